"""The output: strides, large numbers, what else it is without a derivative (test_backward.py)."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_attn
from _accuracy import check
from helpers import DTYPES, INF, LAYOUTS, Inputs, make_inputs, natural_logsumexp, results
from torch_attn import reference

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.mark.parametrize("tensor", Inputs._fields)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_mixed_layouts(layout: str, tensor: str) -> None:
    """One tensor whose strides differ from all others'."""
    inputs = make_inputs(35, 70, 12, 20, mask=(2, 3, 35, 70), kind="bool")
    check(inputs._replace(**{tensor: LAYOUTS[layout](getattr(inputs, tensor))}))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "stored", [(1, 1, 1, 1), (2, 1, 1, 1), (1, 3, 1, 1), (1, 1, 7, 1), (1, 3, 1, 7)]
)
def test_expanded(stored: tuple[int, ...], dtype: torch.dtype) -> None:
    """Stride 0 in leading dimensions, rows and columns."""
    check(Inputs(*(torch.randn(stored, dtype=dtype).expand(2, 3, 7, 7) for _ in range(4))))


@pytest.mark.parametrize(
    ("L", "heads", "kind"),
    [
        (35, (4, 2, 1), None),
        # single queries: rows of neighbouring heads, stored as far apart as their layout has it
        *((1, (40, 2, 1), kind) for kind in (None, "bool", "-inf")),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_heads_in_any_layout(
    dtype: torch.dtype, L: int, heads: tuple[int, int, int], kind: str | None
) -> None:
    mask = {} if kind is None else {"mask": (40, 1, 70), "kind": kind}
    for layout in LAYOUTS.values():
        inputs = make_inputs(L, 70, 16, 24, heads=heads, dtype=dtype, **mask)
        check(inputs.map(layout), enable_gqa=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("E", [24, 64])
def test_few_rows_have_the_bits_of_many(E: int, dtype: torch.dtype) -> None:
    """Few are multiplied the other way round."""
    query, key, value, mask = make_inputs(100, 200, E, E, dtype=dtype, mask=(100, 200), kind="bool")
    many = torch_attn.sdpa(query, key, value, mask, is_causal=True)
    few = torch_attn.sdpa(query[..., :11, :], key, value, mask[:11], is_causal=True)
    if query.is_cuda:
        torch.testing.assert_close(few, many[..., :11, :])
    else:
        assert torch.equal(few, many[..., :11, :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("E", [40, 64])
@pytest.mark.parametrize("is_causal", [False, True])
def test_tasks_that_share_keys(is_causal: bool, E: int, dtype: torch.dtype) -> None:
    """Many queries read the same keys and values, which may be packed once for all of them."""
    inputs = make_inputs(300, 150, E, 72, heads=(4, 2, 1), dtype=dtype)
    check(inputs, enable_gqa=True, is_causal=is_causal)


@pytest.mark.regression
@pytest.mark.parametrize("sizes", [(64, 0), (0, 64)], ids=["no columns of values", "of keys"])
def test_prefetch_where_keys_or_values_are_empty(sizes: tuple[int, int]) -> None:
    """More keys or values than caches hold are asked for ahead, where there are any."""
    inputs = make_inputs(9, 20_000, *sizes, batch=(), heads=1)
    check(inputs)


def test_many_dimensions() -> None:
    """Ten leading dimensions no two of which can be merged into one."""
    sizes = (2, 1, 2, 2, 1, 2, 2, 2, 2, 2)
    backwards = tuple(range(11, -1, -1))
    query, key, value = (torch.randn(5, 4, *sizes).permute(backwards).mT for _ in range(3))
    check(Inputs(query, key, value, torch.randn(2, 1, 1, 2, 1, 1, 2, 1, 1, 2, 5, 1)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_negative_views(dtype: torch.dtype) -> None:
    """A lazily negated tensor is read with its sign."""
    query, key, value, mask = make_inputs(5, 7, mask=(5, 7), dtype=dtype)
    expected = torch_attn.sdpa(-query, -key, -value, -mask)
    actual = torch_attn.sdpa(*(torch._neg_view(t) for t in (query, key, value, mask)))
    assert torch.equal(actual, expected)


@pytest.mark.regression
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("S", [1, 7, 33, 130])
def test_lowest_number_in_a_mask(S: int, dtype: torch.dtype) -> None:
    """finfo.min is a number: it hides a key behind others, but a row of it is not fully masked."""
    inputs = make_inputs(4, S, dtype=dtype)
    mask = torch.zeros(4, S, dtype=dtype)
    mask[1] = mask[2, S // 2 :] = max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)
    assert (check(inputs._replace(attn_mask=mask))["output"] != 0).all()


def test_lowest_double_in_a_mask() -> None:
    query, key, value, _ = make_inputs(4, 33, dtype=torch.float64)
    mask = torch.full((4, 33), torch.finfo(torch.float64).min, dtype=torch.float64)
    expected = value.mean(-2, keepdim=True).expand(2, 3, 4, 16)
    torch.testing.assert_close(torch_attn.sdpa(query, key, value, mask), expected)


@pytest.mark.regression
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_keys_weigh_alike(dtype: torch.dtype) -> None:
    """What is summed over earlier keys is not changed where the largest score is not."""
    query = torch.full((32, 1, 16), 255 / 16, dtype=dtype)
    key = torch.full((32, 8192, 16), 229 / 16, dtype=dtype)
    value = torch.arange(8192)[:, None].ge(4096).expand(32, 8192, 8).to(dtype)
    output, logsumexp, *_ = torch.ops.attn._sdpa_forward(query, key, value)
    assert (output == 0.5).all()
    expected = 16 * 255 / 16 * 229 / 16 / 4 + math.log(8192)
    error = natural_logsumexp(logsumexp, scale=1 / 4) - expected
    assert error.abs().max() <= torch.finfo(logsumexp.dtype).eps * math.sqrt(8192)  # of the sum


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_keys(dtype: torch.dtype) -> None:
    """S = 0 gives zeros, whatever is asked."""
    inputs = make_inputs(5, 0, dtype=dtype, mask=(5, 0))
    for options in ({}, {"is_causal": True}, {"dropout_p": 0.5}):
        output = results(torch_attn.sdpa, inputs, **options)["output"]
        assert torch.equal(output, torch.zeros(2, 3, 5, 16, dtype=dtype))


@pytest.mark.parametrize("S", [7, 200])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_head_dim_zero(S: int, dtype: torch.dtype) -> None:
    """E = 0: all scores are 0, the output is the mean of the values."""
    query, key, value, _ = make_inputs(5, S, 0, 8, dtype=dtype)
    output = torch_attn.sdpa(query, key, value)
    torch.testing.assert_close(output, value.mean(-2, keepdim=True).expand(2, 3, 5, 8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("Ev", [16, 24])
def test_strides_follow_query(Ev: int, dtype: torch.dtype) -> None:
    """A [B, L, H, D] tensor seen as [B, H, L, D] gives an output of that kind."""
    query, key, value, _ = make_inputs(5, 7, 16, Ev, dtype=dtype)
    assert torch_attn.sdpa(query, key, value).is_contiguous()
    swapped = torch.randn(2, 5, 3, 16, dtype=dtype).transpose(1, 2)
    assert torch_attn.sdpa(swapped, key, value).transpose(1, 2).is_contiguous()
    five = torch.randn(4, 2, 5, 3, 16, dtype=dtype).transpose(2, 3)
    assert torch_attn.sdpa(five, key, value).transpose(2, 3).is_contiguous()
    columns = torch.randn(2, 3, 16, 5, dtype=dtype).mT
    assert torch_attn.sdpa(columns, key, value).is_contiguous()
    assert torch_attn.sdpa(query[:1].expand(2, -1, -1, -1), key, value).is_contiguous()
    assert torch_attn.sdpa(query[:, :1], key, value).is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("L", "S", "E"), [(33, 70, 16), (3, 2000, 64), (130, 65, 96), (5, 9, 300)])
def test_logsumexp_and_residual_that_derivatives_need(
    L: int, S: int, E: int, dtype: torch.dtype
) -> None:
    """The logsumexp is a pair; the residual is what rounding took from the output."""
    query, key, value, mask = make_inputs(L, S, E, mask=(L, S), kind="-inf", dtype=dtype)
    assert mask is not None
    mask[0] = -INF
    output, logsumexp, _, residual, *_ = torch.ops.attn._sdpa_forward(query, key, value, mask)
    scores = query.double() @ key.double().mT / E**0.5 + mask.double()
    expected = scores.logsumexp(-1)
    assert (logsumexp[:, :, 0, 0] == -INF).all()
    assert (logsumexp[:, :, 0, 1] == 0).all()
    # E products and S weights are added; scores, and so the errors, are of the order of 1.
    step = torch.finfo(logsumexp.dtype).eps
    error = (natural_logsumexp(logsumexp) - expected)[:, :, 1:]
    assert error.abs().max() <= 8 * step * max(1, expected[:, :, 1:].abs().max())
    if dtype in (torch.float64, torch.float32):
        assert residual.numel() == 0
        return
    assert residual.dtype == torch.float32
    assert (residual != 0).any()
    assert torch.equal((output.double() + residual.double()).to(dtype), output)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_residual_is_kept_where_it_counts(dtype: torch.dtype) -> None:
    """It takes twice the memory of the output."""
    query, key, value, _ = make_inputs(33, 70, 16, dtype=dtype)
    seen = torch.ones(33, 70, dtype=torch.bool)
    for options in ({}, {"is_causal": True}, {"attn_mask": seen}):
        residual = torch.ops.attn._sdpa_forward(query, key, value, **options)[3]
        assert residual.shape == (0,)
    for options in ({"dropout_p": 0.1}, {"attn_mask": seen.to(dtype)}):
        output, _, _, residual, *_ = torch.ops.attn._sdpa_forward(query, key, value, **options)
        assert residual.shape == output.shape


MASKS = {
    "boolean [S]": torch.tensor([True, False, True, True, False, True, True]),
    "floating [S]": torch.linspace(-2, 1, 7),
    "floating [1]": torch.tensor([0.5]),
    "floating []": torch.tensor(-2.0),
    "True": torch.tensor(True),
    "False": torch.tensor(False),
}


@pytest.mark.regression
@pytest.mark.parametrize("name", MASKS)
def test_masks_of_fewer_than_two_dimensions(name: str) -> None:
    """Every door takes them as the built-in does; a gradient has the mask's own shape."""
    query, key, value, _ = make_inputs(5, 7, 8, dtype=(doubles := torch.float64))
    mask = MASKS[name].to(query.device)
    whole = mask.expand(5, 7)
    expected = torch_attn.sdpa(
        query, key, value, whole.to(doubles) if mask.is_floating_point() else whole
    )
    if mask.is_floating_point():
        mask, whole = mask.to(doubles).requires_grad_(), whole.to(doubles)
    stats = torch_attn.sdpa_stats(query, key, mask.detach())
    with torch_attn.replacing_sdpa():
        switched = F.scaled_dot_product_attention(query, key, value, mask)
    many = [t.expand(2, *t.shape) for t in (query, key, value, mask)]
    for output in (
        torch_attn.sdpa(query, key, value, mask),
        torch_attn.sdpa_with_logsumexp(query, key, value, mask, key_lengths=7)[0],
        torch_attn.sdpa_with_weights(query, key, value, mask)[0],
        torch_attn.sdpa_with_weights(query, key, value, mask)[1] @ value,
        torch.ops.attn.sdpa(query, key, value, mask),
        reference.sdpa(query, key, value, mask),
        torch.vmap(torch_attn.sdpa)(*many)[1],
        switched,
    ):
        torch.testing.assert_close(output, expected)
    for found, of_whole in zip(stats, torch_attn.sdpa_stats(query, key, whole), strict=True):
        torch.testing.assert_close(found, of_whole)
    if not mask.is_floating_point():
        return

    def function(mask: Tensor) -> tuple[Tensor, ...]:
        sinks = torch.zeros(query.shape[-3], dtype=doubles)
        return torch_attn.sdpa_with_logsumexp(query, key, value, mask, sinks=sinks)[:2]

    assert torch.autograd.grad(function(mask)[0].sum(), mask)[0].shape == mask.shape
    assert torch.autograd.gradcheck(function, mask, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, mask, check_fwd_over_rev=True)
