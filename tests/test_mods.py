"""The functions of the pair that torch_attn.mods makes, against formulas over L x S."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_attn
from torch_attn import mods, reference

B, H, L, S, E = 2, 3, 70, 84, 8


def learned(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=torch.float64, requires_grad=True)


def same(found: Any, expected: Tensor, of: list[Tensor]) -> None:
    """The same numbers with the same gradients."""
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(expected)
    grads = (torch.autograd.grad(x, of, grad, retain_graph=True) for x in (found, expected))
    for n, (a, b) in enumerate(zip(*grads, strict=True)):
        assert b.any(), n  # a gradient of zeros would show nothing
        torch.testing.assert_close(a, b)


def check(score_mod: mods.ScoreMod, bias: Tensor, tables: list[Tensor], keys: int = S) -> None:
    """Results and gradients equal the ones with the bias `[B, H, L, S]`."""
    query, key, value = learned(B, H, L, E), learned(B, H, keys, E), learned(B, H, keys, E)
    found = torch_attn.flex_attention(query, key, value, score_mod)
    same(found, reference.sdpa(query, key, value, bias), [query, key, value, *tables])


i, j = torch.arange(L)[:, None], torch.arange(S)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5(bidirectional: bool) -> None:
    """As compute_bias of transformers' T5Attention."""
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    config = pytest.importorskip("transformers").T5Config(
        d_model=H * E, d_kv=E, num_heads=H, is_decoder=not bidirectional
    )
    module = t5.T5Attention(config, has_relative_attention_bias=True).double()
    table = module.relative_attention_bias.weight
    bias = module.compute_bias(L, S)
    check(mods.t5(table, bidirectional=bidirectional), bias, [table])


def test_distances() -> None:
    table = learned(H, 21)
    check(mods.distances(table), table[:, (i - j).clamp(-10, 10) + 10], [table])


def test_alibi_and_softcap() -> None:
    slopes = learned(H)
    check(mods.alibi(slopes), -slopes[:, None, None] * (i - j).abs(), [slopes])
    query, key, value = (learned(B, H, L, E) for _ in range(3))
    cap = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    found = torch_attn.flex_attention(query, key, value, mods.softcap(cap))
    scores = cap * torch.tanh(query @ key.mT / E**0.5 / cap)
    same(found, scores.softmax(-1) @ value, [query, key, value, cap])


@pytest.mark.parametrize("batch", [1, B])
def test_transformer_xl(batch: int) -> None:
    positions = learned(batch, H, L, L + S - 1)
    index = (j - i + L - 1).expand(B, H, L, S)
    bias = positions.expand(B, -1, -1, -1).gather(-1, index)
    check(mods.transformer_xl(positions), bias, [positions])


@pytest.mark.parametrize("max_distance", [None, 60])
def test_deberta(max_distance: int | None) -> None:
    """Compares with the buckets of transformers."""
    R = 16
    c2p, p2c = learned(B, H, L, 2 * R), learned(B, H, S, 2 * R)
    place = i - j
    if max_distance:
        deberta = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")
        place = deberta.make_log_bucket_position(place, R, max_distance)
    place = (place.long() + R).clamp(0, 2 * R - 1).expand(B, H, L, S)
    bias = c2p.gather(-1, place) + p2c.gather(-1, place.mT).mT
    check(mods.deberta(c2p, p2c, max_distance=max_distance), bias, [c2p, p2c])


def test_two_axes() -> None:
    """As SAM's add_decomposed_rel_pos adds them."""
    rel_h, rel_w = learned(B, H, L, 7), learned(B, H, L, 12)
    bias = (rel_h[..., :, None] + rel_w[..., None, :]).flatten(-2)
    check(mods.two_axes(rel_h, rel_w), bias, [rel_h, rel_w])


@pytest.mark.parametrize("leading", [(1, 1), (1, H), (B, 1), (B, H)])
def test_few_numbers_of_each_query(leading: tuple[int, int]) -> None:
    """Two small tables: one index is the same for 64 neighbouring keys, the other one is any."""
    keys = 32 * 7
    rel_h, rel_w = learned(*leading, L, 4), learned(*leading, L, 7)
    column = torch.randint(7, (keys,))  # 64 neighbouring keys have one row, but any column
    bias = rel_h.repeat_interleave(64, -1)[..., :keys] + rel_w[..., column]

    def axes(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        of = (b % leading[0], h % leading[1], i)
        return s + rel_h[(*of, j // 64)] + rel_w[(*of, column[j])]

    check(axes, bias.expand(B, H, L, keys), [rel_h, rel_w], keys)


def test_swin() -> None:
    """A table by an index of the pair, computed or captured, as Swin's window attention has it."""
    table, places = learned(15 * 15, H), torch.arange(64)
    rows, columns = places // 8, places % 8
    index = (rows[:, None] - rows + 7) * 15 + columns[:, None] - columns + 7
    query, key, value = (learned(B, H, 64, E) for _ in range(3))
    for at in (
        lambda i, j: index[i, j],
        lambda i, j: (i // 8 - j // 8 + 7) * 15 + i % 8 - j % 8 + 7,
    ):
        expected = reference.sdpa(query, key, value, table[index].permute(2, 0, 1))
        found = torch_attn.flex_attention(
            query, key, value, lambda s, b, h, i, j, at=at: s + table[at(i, j), h]
        )
        same(found, expected, [query, key, value, table])


def check_mask(mask_mod: mods.MaskMod, expected: Tensor, length: int = L) -> None:
    query, key, value = (learned(B, H, length, E) for _ in range(3))
    found = torch_attn.flex_attention(query, key, value, block_mask=mask_mod)
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found, torch_attn.sdpa(query, key, value, expected))


def test_documents_and_prefix() -> None:
    ids, lengths = torch.randint(0, 3, (B, L)).sort().values, torch.tensor([5, 66])
    check_mask(mods.documents(ids), (ids[:, :, None] == ids[:, None])[:, None])
    check_mask(mods.documents(ids[0]), ids[0][:, None] == ids[0])
    causal = torch.ones(L, L, dtype=torch.bool).tril()
    check_mask(mods.prefix(lengths), causal | (torch.arange(L) < lengths[:, None, None, None]))


def test_causal_and_sliding_window() -> None:
    i, j = torch.arange(L)[:, None], torch.arange(L)
    check_mask(mods.causal, i >= j)
    check_mask(mods.sliding_window(9), (i >= j) & (i - j <= 9))
    check_mask(mods.sliding_window(9, 4), (j - i <= 4) & (i - j <= 9))
    with pytest.raises(ValueError, match="neither may be negative"):
        mods.sliding_window(-1)


def test_both() -> None:
    ids = torch.randint(0, 3, (L,)).sort().values
    i, j = torch.arange(L)[:, None], torch.arange(L)
    documents = mods.documents(ids)
    check_mask(mods.both(documents), ids[:, None] == ids)
    check_mask(mods.both(mods.causal, documents), (i >= j) & (ids[:, None] == ids))
    expected = (i >= j) & (i - j <= 9) & (ids[:, None] == ids)
    check_mask(mods.both(mods.causal, mods.sliding_window(9, 9), documents), expected)


@pytest.mark.parametrize(
    ("shape", "window"), [((75,), (7,)), ((9, 8), (3, 5)), ((4, 5, 3), (3, 1, 3))]
)
def test_neighbourhood(shape: tuple[int, ...], window: tuple[int, ...]) -> None:
    """Each query sees the block of keys that is centred on it, or as near to it as fits."""
    length = int(torch.tensor(shape).prod())
    places = torch.stack(torch.meshgrid(*map(torch.arange, shape), indexing="ij"), -1).view(
        length, -1
    )
    sizes, reach = torch.tensor(shape), torch.tensor(window)
    first = torch.minimum((places - reach // 2).clamp(min=0), sizes - reach)
    expected = ((places >= first[:, None]) & (places < (first + reach)[:, None])).all(-1)
    assert (expected.sum(-1) == reach.prod()).all()
    check_mask(mods.neighbourhood(shape, window), expected, length)


@pytest.mark.parametrize("causal", [True, (True, False)])
def test_causal_neighbourhood(causal: bool | tuple[bool, bool]) -> None:
    """Along a causal dimension a query sees the tokens up to its own, the last `window` of them."""
    height, width = 9, 8
    i, j = torch.arange(height * width)[:, None], torch.arange(height * width)
    down, across = i // width - j // width, i % width - j % width
    expected = (down >= 0) & (down < 4)  # an even window
    if causal is True:
        expected = expected & (across >= 0) & (across < 3)
    else:
        first = (i % width - 1).clamp(0, width - 3)
        expected = expected & (j % width >= first) & (j % width < first + 3)
    check_mask(mods.neighbourhood((height, width), (4, 3), causal=causal), expected, height * width)


@pytest.mark.parametrize(
    ("shape", "window", "causal", "message"),
    [
        ((4,), (2,), False, "must be odd"),
        ((4,), (5,), False, "between 1 and"),
        ((4,), (0,), True, "between 1 and"),
        ((4, 4), (3,), False, "one value for each"),
        ((4, 4), (3, 3), (True,), "one value for each"),
    ],
)
def test_neighbourhood_errors(
    shape: tuple[int, ...], window: tuple[int, ...], causal: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        mods.neighbourhood(shape, window, causal=causal)


# The attention of transformers with its own weights, and the same weights around flex_attention


def filled(module: nn.Module) -> Any:
    """The module in float64, without dropout, with numbers where tables begin with zeros."""
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.double().eval()


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (H, E)).transpose(1, 2)


def joined(x: Any) -> Tensor:
    assert isinstance(x, Tensor)
    return x.transpose(1, 2).flatten(2)


def learned_by(module: nn.Module, *without: str) -> list[Tensor]:
    return [p for name, p in module.named_parameters() if name not in without]


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_module(bidirectional: bool) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    config = t5.T5Config(
        d_model=H * E, d_kv=E, num_heads=H, is_decoder=not bidirectional, dropout_rate=0.0,
        relative_attention_num_buckets=8, relative_attention_max_distance=40,
    )  # fmt: skip
    config._attn_implementation = "eager"
    module = filled(t5.T5Attention(config, has_relative_attention_bias=True))
    x = learned(B, L, H * E)
    expected = module(x)[0]
    score_mod = mods.t5(
        module.relative_attention_bias.weight, bidirectional=bidirectional, max_distance=40
    )
    query, key, value = (heads(f(x)) for f in (module.q, module.k, module.v))
    found = torch_attn.flex_attention(query, key, value, score_mod, scale=1.0)
    same(module.o(joined(found)), expected, [x, *learned_by(module)])


def test_swin_module() -> None:
    """Compares with PyTorch's attention, because the softmax of the module's own is in float32."""
    swin = pytest.importorskip("transformers.models.swin.modeling_swin")
    config = swin.SwinConfig(attention_probs_dropout_prob=0.0)
    config._attn_implementation = "sdpa"
    module = filled(swin.SwinAttention(config, H * E, H, window_size=7))
    x = learned(B, 49, H * E)
    expected = module(x)[0]
    bias = module.relative_position_bias
    table, index = bias.relative_position_bias_table, bias.relative_position_index.view(49, 49)
    query, key, value = (heads(f(x)) for f in (module.q_proj, module.k_proj, module.v_proj))
    score_mod = lambda s, b, h, i, j: s + table[index[i, j], h]  # noqa: E731
    found = torch_attn.flex_attention(query, key, value, score_mod)
    # A constant of a row, the bias of the keys changes no weight: its gradient is rounding.
    same(module.o_proj(joined(found)), expected, [x, *learned_by(module, "k_proj.bias")])


def test_conformer_module() -> None:
    conformer = pytest.importorskip(
        "transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer"
    )
    config = conformer.Wav2Vec2ConformerConfig(
        hidden_size=H * E, num_attention_heads=H, position_embeddings_type="relative",
        attention_dropout=0.0, max_source_positions=L,
    )  # fmt: skip
    config._attn_implementation = "eager"
    module = filled(conformer.Wav2Vec2ConformerSelfAttention(config))
    x = learned(B, L, H * E)
    embeddings = conformer.Wav2Vec2ConformerRelPositionalEmbedding(config)(x)
    expected = module(x, relative_position_embeddings=embeddings)[0]
    query, key, value = (heads(f(x)) for f in (module.linear_q, module.linear_k, module.linear_v))
    with_position = query + module.pos_bias_v[:, None]
    positions = with_position @ heads(module.linear_pos(embeddings)).mT * module.scaling
    query = query + module.pos_bias_u[:, None]
    found = torch_attn.flex_attention(query, key, value, mods.transformer_xl(positions))
    without = "linear_k.bias"
    same(module.linear_out(joined(found)), expected, [x, *learned_by(module, without)])


@pytest.mark.parametrize("kinds", [["c2p"], ["p2c"], ["c2p", "p2c"]])
@pytest.mark.parametrize("buckets", [-1, 8])
def test_deberta_module(kinds: list[str], buckets: int) -> None:
    deberta = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")
    config = deberta.DebertaV2Config(
        hidden_size=H * E, num_attention_heads=H, relative_attention=True, pos_att_type=kinds,
        position_buckets=buckets, max_relative_positions=40, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    module = filled(deberta.DisentangledSelfAttention(config))
    R = buckets if buckets > 0 else 40
    x, embeddings = learned(B, L, H * E), learned(2 * R, H * E)
    expected = module(x, torch.ones(B, 1, L, L), rel_embeddings=embeddings)[0]
    query, key, value = (
        heads(f(x)) for f in (module.query_proj, module.key_proj, module.value_proj)
    )
    # The module takes the square root in float32.
    scale = 1 / deberta.scaled_size_sqrt(query, 1 + len(kinds)).double().item()
    c2p = p2c = None
    if "c2p" in kinds:
        c2p = query @ heads(module.pos_key_proj(embeddings)[None]).mT * scale
    if "p2c" in kinds:
        p2c = key @ heads(module.pos_query_proj(embeddings)[None]).mT * scale
    score_mod = mods.deberta(c2p, p2c, max_distance=40 if buckets > 0 else None)
    found = torch_attn.flex_attention(query, key, value, score_mod, scale=scale)
    # Constants of a row change no weight.
    without = ["pos_key_proj.bias"] if kinds == ["c2p"] else []
    without += ["key_proj.bias"] if "p2c" not in kinds else []
    same(joined(found), expected, [x, embeddings, *learned_by(module, *without)])


def test_sam_module() -> None:
    """The module that calls PyTorch's attention, because the other one's softmax is in float32."""
    sam = pytest.importorskip("transformers.models.sam.modeling_sam")
    config = sam.SamVisionConfig(hidden_size=H * E, num_attention_heads=H, attention_dropout=0.0)
    module = filled(sam.SamVisionSdpaAttention(config, window_size=9))
    x = learned(B, 9, 9, H * E)
    expected = module(x)[0]
    query, key, value = (heads(t) for t in module.qkv(x).flatten(1, 2).chunk(3, dim=-1))
    places = torch.arange(9)
    at = places[:, None] - places + 8
    grid = query.unflatten(2, (9, 9))
    rel_h = torch.einsum("bnhwc,hkc->bnhwk", grid, module.rel_pos_h[at]).flatten(2, 3)
    rel_w = torch.einsum("bnhwc,wkc->bnhwk", grid, module.rel_pos_w[at]).flatten(2, 3)
    found = torch_attn.flex_attention(query, key, value, mods.two_axes(rel_h, rel_w))
    same(module.proj(joined(found)).view_as(expected), expected, [x, *learned_by(module)])
