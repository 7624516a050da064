"""The functions of the pair that torch_attn.mods makes, against formulas over L x S."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torch_attn
from torch_attn import mods, reference

B, H, L, S, E = 2, 3, 70, 84, 8


def learned(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=torch.float64, requires_grad=True)


def check(score_mod: mods.ScoreMod, bias: Tensor, tables: list[Tensor], keys: int = S) -> None:
    """Results and gradients are those of the bias `[B, H, L, S]`."""
    query, key, value = learned(B, H, L, E), learned(B, H, keys, E), learned(B, H, keys, E)
    found = torch_attn.flex_attention(query, key, value, score_mod)
    assert isinstance(found, Tensor)
    expected = reference.sdpa(query, key, value, bias)
    torch.testing.assert_close(found, expected)
    wanted, grad = [query, key, value, *tables], torch.randn_like(found)
    for a, b in zip(
        torch.autograd.grad(found, wanted, grad),
        torch.autograd.grad(expected, wanted, grad),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


i, j = torch.arange(L)[:, None], torch.arange(S)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5(bidirectional: bool) -> None:
    """As transformers' own module."""
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


def test_transformer_xl() -> None:
    positions = learned(B, H, L, L + S - 1)
    index = (j - i + L - 1).expand(B, H, L, S)
    check(mods.transformer_xl(positions), positions.gather(-1, index), [positions])


@pytest.mark.parametrize("max_distance", [None, 60])
def test_deberta(max_distance: int | None) -> None:
    """With transformers' own buckets."""
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


def test_swin() -> None:
    """A table by an index of the pair, computed or captured, as Swin's window attention has it."""
    table, places = learned(15 * 15, H), torch.arange(64)
    rows, columns = places // 8, places % 8
    index = (rows[:, None] - rows + 7) * 15 + columns[:, None] - columns + 7
    query, key, value = (learned(B, H, 64, E) for _ in range(3))
    expected = reference.sdpa(query, key, value, table[index].permute(2, 0, 1))
    for at in (
        lambda i, j: index[i, j],
        lambda i, j: (i // 8 - j // 8 + 7) * 15 + i % 8 - j % 8 + 7,
    ):
        found = torch_attn.flex_attention(
            query, key, value, lambda s, b, h, i, j, at=at: s + table[at(i, j), h]
        )
        assert isinstance(found, Tensor)
        torch.testing.assert_close(found, expected)
        grads = [torch.autograd.grad(x.square().sum(), table)[0] for x in (found, expected)]
        torch.testing.assert_close(*grads, msg=str(at))
        expected = reference.sdpa(query, key, value, table[index].permute(2, 0, 1))


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
    with pytest.raises(ValueError, match="must be odd"):
        mods.neighbourhood((4,), (2,))
