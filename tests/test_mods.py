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
@pytest.mark.parametrize(("buckets", "options"), [(32, {}), (8, {"max_distance": 40})])
def test_t5(buckets: int, options: dict[str, int], bidirectional: bool) -> None:
    """As compute_bias of transformers' T5Attention."""
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    config = t5.T5Config(
        d_model=H * E, d_kv=E, num_heads=H, is_decoder=not bidirectional,
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=options.get("max_distance", 128),
    )  # fmt: skip
    module = filled(t5.T5Attention(config, has_relative_attention_bias=True))
    table = module.relative_attention_bias.weight
    bias = module.compute_bias(L, S)
    check(mods.t5(table, bidirectional=bidirectional, **options), bias, [table])


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


def test_both() -> None:
    ids = torch.randint(0, 3, (L,)).sort().values
    i, j = torch.arange(L)[:, None], torch.arange(L)
    documents = mods.documents(ids)
    check_mask(mods.both(documents), ids[:, None] == ids)
    check_mask(mods.both(mods.causal, documents), (i >= j) & (ids[:, None] == ids))
    expected = (i >= j) & (i - j <= 9) & (ids[:, None] == ids)
    check_mask(mods.both(mods.causal, mods.sliding_window(9, 9), documents), expected)


GRIDS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "one axis": ((75,), {"window": (7,)}),
    "two axes": ((9, 8), {"window": (3, 5)}),
    "three axes": ((4, 5, 3), {"window": (3, 1, 3)}),
    "even windows": ((9, 8), {"window": (4, 2)}),
    "blocks": ((9, 8), {"window": (4, 3), "stride": (4, 3)}),
    "strides": ((75,), {"window": 8, "stride": 5}),
    "dilation": ((11, 9), {"window": 3, "dilation": (3, 2)}),
    "all of it": ((11, 9), {"window": (4, 3), "stride": (2, 3), "dilation": (2, 3)}),
    "causal": ((9, 8), {"window": (4, 3), "causal": True}),
    "causal along one axis": ((9, 8), {"window": (4, 3), "causal": (True, False)}),
    "all of it, causal": (
        (11, 9),
        {"window": (4, 3), "stride": (2, 3), "dilation": (2, 3), "causal": True},
    ),
    "all of it, causal along one axis": (
        (4, 5, 6),
        {"window": 2, "stride": 2, "dilation": 2, "causal": (False, True, False)},
    ),
    "an axis in full": ((9, 8), {"window": (None, 3), "stride": (1, 2)}),
    "a causal axis in full": ((9, 8), {"window": (3, None), "causal": (False, True)}),
    "all axes in full": ((4, 5), {"window": (None, None)}),
}


def neighbours(n: int, w: int | None, s: int, d: int, c: bool) -> Tensor:
    """[n, n]: NATTEN's rule along one axis, query by query."""
    visible = torch.zeros(n, n, dtype=torch.bool)
    for q in range(n):
        group = range(q % d, n, d)  # the tokens that the query may see
        place, size = q // d, len(group)
        if w is None:
            start, end = 0, size
        elif c:
            start, end = min(place // s * s + s - 1, size - 1) - w + 1, size
        else:
            leader = min(place // s * s + s // 2, size - 1)
            centre = min(max(leader, w // 2), size - 1 - (w // 2 + w % 2 - 1))
            start, end = centre - w // 2, centre - w // 2 + w
        for n_, k in enumerate(group):
            visible[q, k] = start <= n_ < end and (k <= q or not c)
    return visible


@pytest.mark.parametrize("name", GRIDS)
def test_neighbourhood(name: str) -> None:
    shape, options = GRIDS[name]
    given = [options.get(x, default) for x, default in
             (("window", None), ("stride", 1), ("dilation", 1), ("causal", False))]  # fmt: skip
    of_axis = [x if isinstance(x, tuple) else (x,) * len(shape) for x in given]
    expected = torch.ones(1, 1, dtype=torch.bool)
    for along in zip(shape, *of_axis, strict=True):
        expected = torch.kron(expected, neighbours(*along))
    check_mask(mods.neighbourhood(shape, **options), expected.bool(), len(expected))


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        (
            (4,),
            {"window": 5},
            r"window is 5; it must be 1 or more, and times dilation at most \(4,",
        ),
        ((4,), {"window": 0, "causal": True}, "window is 0; it must be 1 or more"),
        ((4, 4), {"window": (3,)}, r"window is \(3,\); it must be one value, or one for each"),
        ((4, 4), {"window": 3, "causal": (True,)}, "causal is .*one value, or one for each"),
        ((), {"window": ()}, "window is .* one for each"),
        ((9,), {"window": 4, "dilation": 3}, "window is 4; .* times dilation"),
        ((9,), {"window": 4, "dilation": 0}, "dilation is 0; it must be 1 or more"),
        ((9,), {"window": 4, "stride": 5}, "stride is 5; it must be between 1 and the window"),
    ],
)
def test_neighbourhood_errors(shape: tuple[int, ...], options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"torch_attn.mods: {message}"):
        mods.neighbourhood(shape, **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mods.distances(torch.zeros(4)), r"table is of shape \[4\].*\[H, 2 R \+ 1\]"),
        (lambda: mods.distances(torch.zeros(4, 8)), "an odd number of columns"),
        (lambda: mods.t5(torch.zeros(32)), r"table is of shape \[32\].*\[num_buckets, H\]"),
        (lambda: mods.t5(torch.zeros(3, 4)), "num_buckets >= 4"),
        (lambda: mods.t5(torch.zeros(32, 4), max_distance=8), "max_distance is 8; .* above 8"),
        (lambda: mods.alibi(torch.zeros(2, 4)), r"slopes is of shape .* a tensor \[H\]"),
        (lambda: mods.alibi(0.5), r"slopes is 0.5; it must be a tensor \[H\]"),  # type: ignore[arg-type]
        (lambda: mods.softcap(0.0), "cap is 0.0; it must be positive"),
        (lambda: mods.transformer_xl(torch.zeros(2, 3, 4)), "positions is of shape"),
        (lambda: mods.deberta(None, None), "c2p is None; it must be a tensor, or p2c"),
        (lambda: mods.deberta(torch.zeros(1, 2, 8), None), "c2p is of shape"),
        (
            lambda: mods.deberta(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 6)),
            r"p2c is of shape \[1, 2, 3, 6\]; it must be \[B, H, L or S, 8\]",
        ),
        (lambda: mods.two_axes(torch.zeros(3), torch.zeros(3)), "rel_h is of shape"),
        (lambda: mods.documents(torch.zeros(1, 2, 3)), r"ids is .* \[L\] or \[B, L\]"),
        (lambda: mods.prefix(3), r"lengths is 3; it must be a tensor \[B\]"),  # type: ignore[arg-type]
        (lambda: mods.sliding_window(-1), "left is -1; it must be 0 or more"),
        (lambda: mods.sliding_window(1, -2), "right is -2; it must be 0 or more"),
    ],
)
def test_arguments_are_checked(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"torch_attn.mods: .*{message}"):
        make()


# The attention of transformers with its own weights, and the same weights around flex_attention


def filled(module: nn.Module) -> Any:
    """The module in float64, without dropout, with numbers where tables begin with zeros."""
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.double().eval()


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (H, E)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def learned_by(module: nn.Module, *without: str) -> list[Tensor]:
    return [p for name, p in module.named_parameters() if name not in without]


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
    # A constant of a row, the bias of the keys changes no weight: its gradient is rounding.
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
