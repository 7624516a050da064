"""Values of the pair are PyTorch's: NaN, rounding, conversions, lookups, and numbers by 0."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention as of_torch

import torch_attn
from _memory import LargestAllocation
from helpers import INF, NAN, largest, ulp
from tests.test_program_operations import at_single_key
from torch_attn import mods, reference

Function = Callable[..., Tensor]


def same_tensor(x: Tensor) -> Tensor:
    y = x.contiguous().to(x.dtype).type_as(x)  # PyTorch returns x itself
    y += 1
    return x


NUMBERS = [0.0, 0.1, -0.1, 0.5, -2.5, 3.0, 1e-3, -1e6, 7.25, INF, -INF, NAN]
OPERATIONS: dict[str, Function] = {
    "relu": lambda x, y: F.relu(x),
    "relu, method": lambda x, y: x.relu(),
    "clamp(max=tensor)": lambda x, y: x.clamp(max=y),
    "clamp(min=tensor)": lambda x, y: x.clamp(min=y),
    "clamp of both": lambda x, y: torch.clamp(x, y, y + 1),
    "clamp(NaN)": lambda x, y: x.clamp(-1.0, NAN),
    "minimum": torch.minimum,
    "x // y": lambda x, y: x // y,
    "x % y": lambda x, y: x % y,
    "x // 0.1": lambda x, y: x // 0.1,
    "x % 0.3": lambda x, y: x % 0.3,
    "1 // y": lambda x, y: 1 // y,
    "-1 % y": lambda x, y: -1 % y,
    "div, floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "half": lambda x, y: x.half(),
    "to(bfloat16)": lambda x, y: (x * 1.001).to(torch.bfloat16),
    "type('torch.HalfTensor')": lambda x, y: x.type("torch.HalfTensor"),
    "type(torch.FloatTensor)": lambda x, y: x.type(torch.FloatTensor),
    "float": lambda x, y: x.float(),
    "square of booleans": lambda x, y: ((x < y) ** 2 + torch.square(x < y)).double(),
    "other=": lambda x, y: torch.remainder(torch.add(x, other=1), other=3.0),
    "to the same dtype": lambda x, y: same_tensor(x),
}


@pytest.mark.usefixtures("cpu_capability")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_have_pytorchs_values(name: str, dtype: torch.dtype) -> None:
    x, y = (
        t.flatten()
        for t in torch.meshgrid(*[torch.tensor(NUMBERS, dtype=dtype)] * 2, indexing="ij")
    )
    expected = OPERATIONS[name](x.clone(), y.clone()).to(dtype)

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return OPERATIONS[name](s + x[i], s + y[i]).to(s.dtype)

    found = at_single_key(score, len(x), dtype)
    # The logsumexp is computed with powers of 2, and of -inf and inf as they are.
    near = 1e-6 if dtype == torch.float32 else 1e-14
    torch.testing.assert_close(found, expected, rtol=near, atol=near, equal_nan=True)


WHOLE = torch.tensor([0, 1, -1, 5, -7, 127, 128, -129, 255, 256, 40000, -70000, 2**31 - 1])
CONVERSIONS: dict[str, Function] = {
    "to(int8)": lambda n: n.to(torch.int8),
    "char": lambda n: n.char(),
    "byte": lambda n: n.byte(),
    "short": lambda n: n.short(),
    "int": lambda n: (n * 2**20).int(),
    "type('torch.IntTensor')": lambda n: (n * 2**20).type("torch.IntTensor"),
    "type(torch.uint8)": lambda n: n.type(torch.uint8),
    "of an int8": lambda n: n.to(torch.int8).long() * 3,
    "int32 products": lambda n: n.int() * 1103515245 * 12345,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversions_of_whole_numbers_wrap(name: str, dtype: torch.dtype) -> None:
    """As PyTorch's: in masks, which know 64 bits."""
    convert, count = CONVERSIONS[name], len(WHOLE)
    query, key = torch.randn(1, 1, count, 4, dtype=dtype), torch.randn(1, 1, 3, 4, dtype=dtype)
    for threshold in (-100, 0, 3, 200):
        mask = lambda b, h, i, j: convert(WHOLE[i] + j).long() > threshold  # noqa: B023, E731
        seen = convert(WHOLE[:, None] + torch.arange(3)).long() > threshold
        found = torch_attn.flex_attention(query, key, key, None, mask)
        torch.testing.assert_close(found, torch_attn.sdpa(query, key, key, seen))


def test_what_cannot_be_converted_is_an_error() -> None:
    x = torch.randn(3, 1, 1, 5, 4)
    for convert, message in (
        (lambda s: s.type("torch.sparse.FloatTensor"), "conversion to torch.sparse.FloatTensor"),
        (lambda s: s.type(), r"type\(\) without a dtype"),
        (lambda s: s.to(torch.complex64).real, "complex64|real"),
    ):
        with pytest.raises((RuntimeError, AttributeError), match=message):
            torch_attn.flex_attention(*x, lambda s, b, h, i, j, f=convert: f(s))


def test_whole_numbers_by_zero() -> None:
    """0, so that a guard works; a divisor that is 0 for certain is an error."""
    x = torch.randn(3, 1, 1, 6, 4)
    w = torch.tensor([0, 3, 2, 0, 1, 4])
    guarded = {
        "of the pair": lambda b, h, i, j: torch.where(w[j] > 0, (i + j) % w[j], 0) == 0,
        "of the query": lambda b, h, i, j: torch.where(w[i] > 0, i % w[i], 0) + j < 4,
        "quotients": lambda b, h, i, j: torch.where(w[j] > 0, i // w[j] + j // w[i], 1) < 3,
    }
    i, j = torch.arange(6)[:, None], torch.arange(6)
    safe = w.clamp(min=1)
    seen = {
        "of the pair": torch.where(w[j] > 0, (i + j) % safe[j], 0) == 0,
        "of the query": torch.where(w[i] > 0, i % safe[i], 0) + j < 4,
        "quotients": torch.where(w[j] > 0, i // safe[j] + torch.where(w[i] > 0, j // safe[i], 0), 1)
        < 3,
    }
    for name, mask in guarded.items():
        found = torch_attn.flex_attention(*x, block_mask=mask)
        torch.testing.assert_close(found, torch_attn.sdpa(*x, seen[name]), msg=name)
    zero, nothing = torch.tensor(0), torch.zeros(6, dtype=torch.int64)
    for divisor in (
        lambda i, j: 0,
        lambda i, j: zero,
        lambda i, j: nothing[i],
        lambda i, j: nothing[j],
    ):
        for number in (lambda i, j: i, lambda i, j: i ^ j):
            with pytest.raises(
                (RuntimeError, ZeroDivisionError), match=r"divisor is 0|by 0|ZeroDivision"
            ):
                torch_attn.flex_attention(
                    *x, None, lambda b, h, i, j, d=divisor, n=number: n(i, j) % d(i, j) == 0
                )


LOOKUPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "t[n]": lambda t, n: t[n],
    "t[n] twice": lambda t, n: 0.5 * t[n] + 0.5 * t[n],
    "index_select": lambda t, n: t.index_select(0, n.view(1))[0],
    "torch.index_select": lambda t, n: torch.index_select(t, 0, n.reshape(1)).squeeze(),
    "embedding": lambda t, n: F.embedding(n, t[:, None])[0],
    "gather": lambda t, n: t.gather(0, n.view(1)).view(()),
    "take": lambda t, n: torch.take(t, n),
    "take_along_dim": lambda t, n: torch.take_along_dim(t, n.view(1), 0)[0],
    "t[:, 0][n]": lambda t, n: t[:, None][:, 0][n],
}
INDICES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "distance": lambda i, j: (i - j).clamp(-1, 1) + 1,
    "row": lambda i, j: i % 3,
    "key": lambda i, j: j // 700,
    "pair": lambda i, j: (i * j) % 3,
    "sum": lambda i, j: (i + j) // 1000,
}


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize(
    ("name", "index"),  # an index of the pair is written as t[n] alone
    [(n, i) for n in LOOKUPS for i in INDICES if i not in ("pair", "sum") or n.startswith("t[n]")],
)
def test_gradients_of_tables_of_16_bits_are_summed_in_float32(name: str, index: str) -> None:
    """Rounded once: within a unit of the gradient of the same numbers in float32."""
    L, look_up, at = 1500, LOOKUPS[name], INDICES[index]
    x, along = torch.randn(3, 1, 1, L, 8), torch.randn(1, 1, L, 8)

    def gradient(table: Tensor) -> Tensor:
        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return s + look_up(table, at(i, j))

        (found,) = torch.autograd.grad(torch_attn.flex_attention(*x, score), table, along)
        return found.float()

    for dtype in (torch.bfloat16, torch.float16):
        table = (torch.arange(3) / 4).to(dtype)
        found = gradient(table.clone().requires_grad_())
        exact = gradient(table.float().requires_grad_())
        assert largest(found - exact) <= ulp(largest(exact), dtype) + 2e-6, dtype


AFTER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "t[n] ** 2 in float32": lambda t, n: t[n].to(torch.float32) ** 2,
    "t[n] times float32": lambda t, n: t[n] * torch.tensor(1.1),
    "t[None][:, n][0] in float32": lambda t, n: t[None][..., n][0].float() * 1.1,
    "F.embedding(n, t)[0] in float32": lambda t, n: F.embedding(n, t[:, None])[0].float() * 1.1,
}


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("name", AFTER)
def test_gradients_are_not_rounded_after_a_lookup_in_16_bits(name: str) -> None:
    """All keys read one number, which cannot change the weights, so its gradient is 0.

    That is 4e-5 for sums of 900 x 900 numbers in float32. If each key's were rounded to 16 bits, it
    would be 1e-2.
    """
    x, along = torch.randn(3, 1, 1, 900, 8), torch.randn(1, 1, 900, 8)
    table = torch.tensor([0.5, 0.75]).bfloat16().requires_grad_()

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + AFTER[name](table, j.clamp(0, 0))

    (found,) = torch.autograd.grad(torch_attn.flex_attention(*x, score), table, along)
    assert largest(found) <= 2e-4


NARROW: dict[str, Callable[..., Tensor]] = {
    "of the query and the pair": lambda t, n, i, j: t[n[i], i * j % 3],
    "of the query and the key": lambda t, n, i, j: t[n[i], n[j] * 0] * j,
    "alone, then a number": lambda t, n, i, j: t[n[i]][2],
    "negative": lambda t, n, i, j: t[n[j] - 101, i * j % 3],
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in NARROW
        for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32)
        if name != "negative" or dtype.is_signed
    ],
)
def test_indices_of_few_bits(name: str, dtype: torch.dtype) -> None:
    """The place in a table is computed with more bits than the index has."""
    x, table, number = torch.randn(3, 1, 1, 9, 8), torch.randn(101, 300), torch.full((9,), 100)
    look_up = NARROW[name]
    i, j = torch.arange(9)[:, None], torch.arange(9)
    exact = look_up(table, number, i, j).expand(9, 9) if "alone" not in name else table[100, 2]
    n = number.to(dtype)
    found = torch_attn.flex_attention(*x, lambda s, b, h, i, j: s + look_up(table, n, i, j))
    torch.testing.assert_close(found, torch_attn.sdpa(*x, exact.expand(9, 9)))


def test_numbers_of_the_pair_in_wide_masks_are_float32() -> None:
    """Whole numbers of 64 bits do not change how floating numbers are computed."""
    x = torch.randn(3, 1, 1, 11, 8)
    masks = [
        lambda b, h, i, j: ((i * j).float() * 0.1 == 0.3) | (i * 10**10 * j < 5),
        lambda b, h, i, j: (i * 10**10 + j * 7 % 5).float() == (i * 10**10).float(),
        lambda b, h, i, j: (i * 10**10 * j + j) * 1.0 == (i * 10**10 * j) * 1.0,
        lambda b, h, i, j: torch.tanh((i * j) * 0.1) * 1e10 + i * 10**10 * j > 7e9,
    ]
    i, j = torch.arange(11)[:, None], torch.arange(11)
    for mask in masks:
        seen = mask(0, 0, i, j)
        found = torch_attn.flex_attention(*x, None, mask)
        torch.testing.assert_close(found, torch_attn.sdpa(*x, seen))


def test_score_and_mask_may_share_whole_numbers() -> None:
    """64 bits of a mask_mod are not asked of the score_mod beside it."""
    x, table = torch.randn(3, 1, 1, 9, 8), torch.tensor([1, 2, 3, 4, 5])
    number = lambda i, j: table[i * j % 5] * table[(i * j + 1) % 5] % 7  # noqa: E731
    i, j = torch.arange(9)[:, None], torch.arange(9)
    bias = number(i, j).float().masked_fill(number(i, j) >= 4, -INF)
    found = torch_attn.flex_attention(
        *x, lambda s, b, h, i, j: s + number(i, j), lambda b, h, i, j: number(i, j) < 4
    )
    torch.testing.assert_close(found, torch_attn.sdpa(*x, bias))
    table = torch.tensor([100000, 200003, 3, 400001, 70001])
    with pytest.raises(RuntimeError, match="from 9 to 160000800001, beyond the 32 bits"):
        torch_attn.flex_attention(*x, lambda s, b, h, i, j: s + number(i, j))


def test_gradients_of_strided_tables_of_16_bits() -> None:
    """`r[i + j]` is read in place, and several pairs read one number."""
    x = torch.randn(3, 1, 1, 900, 8)
    along = torch.randn(1, 1, 900, 8)
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        table = (torch.arange(1800) % 7 / 8).to(dtype).requires_grad_()
        output = torch_attn.flex_attention(*x, lambda s, b, h, i, j, t=table: s + t[i + j])
        found.append(torch.autograd.grad(output, table, along)[0].float())
    assert largest(found[0] - found[1]) <= ulp(largest(found[1]), torch.bfloat16)


def test_a_tensor_of_the_function_must_not_change_after_a_lookup() -> None:
    x = torch.randn(3, 1, 1, 20, 8)

    def of_table(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        t = torch.zeros(20)
        first = t[j]
        t[5] = 3.0
        return s + first + t[j]

    def of_view(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        t = torch.zeros(20)
        first = t[4:][i * j % 9]
        t.add_(1)
        return s + first

    def of_number(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        t = torch.tensor(2.0)
        first = s * t
        t.add_(1)
        return first * t

    for function in (of_table, of_view, of_number):
        with pytest.raises(
            RuntimeError, match=r"changes a tensor that the function has used \(.*line"
        ):
            torch_attn.flex_attention(*x, function)

    def with_view(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        t = torch.zeros(2)
        first = t[0]
        first += s
        return s + t.sum()

    with pytest.raises(RuntimeError, match="changes a tensor that has views"):
        torch_attn.flex_attention(*x, with_view)

    def before(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        t = torch.zeros(20)
        t[5] = 3.0
        return s + t[j]

    expected = reference.flex_attention(*x, before)[0]
    torch.testing.assert_close(torch_attn.flex_attention(*x, before), expected)


EMPTY_TABLE, EMPTY_BIAS = (
    torch.randn(3, 9, requires_grad=True),
    torch.randn(200, 200, requires_grad=True),
)
OF_EMPTY: dict[str, Any] = {
    "table": lambda s, b, h, i, j: s + EMPTY_TABLE[h, (i * j) % 9],
    "vector": lambda s, b, h, i, j: s + EMPTY_TABLE[h, (i - j) % 9],
    "bias": lambda s, b, h, i, j: s + EMPTY_BIAS[i, j],
    "shifted": lambda s, b, h, i, j: s + EMPTY_BIAS[i + 3, j + 1],
    "rows": lambda s, b, h, i, j: s + EMPTY_BIAS[i, (i + j) % 7],
}


@pytest.mark.parametrize("shape", [(0, 3, 65, 70), (2, 0, 65, 70), (2, 3, 0, 70), (2, 3, 65, 0)])
@pytest.mark.parametrize("name", OF_EMPTY)
def test_without_entries_heads_queries_or_keys(name: str, shape: tuple[int, ...]) -> None:
    B, H, L, S = shape
    query, key = torch.randn(B, H, L, 8, requires_grad=True), torch.randn(B, H, S, 8)
    output = torch_attn.flex_attention(query, key, key, OF_EMPTY[name], mods.causal)
    assert output.shape == (B, H, L, 8)
    assert not output.any()
    output.sum().backward()
    assert not query.grad.any()  # type: ignore[union-attr]


# --- what every door has, also with captured tensors and masks ------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_of_scores(dtype: torch.dtype) -> None:
    """Forward, backward, second derivatives and a tangent, with all that a model may have."""
    L = 512
    x = [torch.randn(1, 2, L, 8, dtype=dtype, requires_grad=True) for _ in range(3)]
    table, mask = torch.randn(32, 2, requires_grad=True), mods.documents(torch.arange(L) // 100)
    relative = mods.t5(table)

    def layer(*x: Tensor) -> Tensor:
        score = lambda s, b, h, i, j: 5 * torch.tanh(relative(s, b, h, i, j) / 5)  # noqa: E731
        return torch_attn.flex_attention(*x, score, mask)

    leaves = [*x, table]
    with LargestAllocation() as most:
        first = torch.autograd.grad(layer(*x).float().square().sum(), leaves, create_graph=True)
        torch.autograd.grad(sum(g.float().square().sum() for g in first), leaves)
        torch.func.jvp(lambda q: layer(q, *x[1:]), (x[0].detach(),), (torch.ones_like(x[0]),))
    assert 0 < most.elements < L * L // 2


def test_has_the_signature_of_pytorchs() -> None:
    ours, theirs = (inspect.signature(m.flex_attention).parameters for m in (torch_attn, of_torch))
    assert list(ours) == list(theirs)
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default), name


@pytest.mark.usefixtures("cpu_capability")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_of_hidden_keys_stays_hidden(dtype: torch.dtype) -> None:
    """In keys, in what the function captures, and in its results, forward and backward."""
    L, hidden = 130, torch.arange(130) % 3 == 1
    x = [torch.randn(1, 2, L, 8, dtype=dtype) for _ in range(3)]
    bias = torch.randn(L, L)
    results = []
    for bad in (0.0, NAN, INF):
        key, term = x[1].clone(), bias.clone()
        key[:, :, hidden], term[:, hidden] = bad, bad
        q, k, t = (y.clone().requires_grad_() for y in (x[0], key, term))
        score = lambda s, b, h, i, j, t=t: torch.tanh(s) + t[i, j] * 0.5  # noqa: E731
        output = torch_attn.flex_attention(q, k, x[2], score, lambda b, h, i, j: ~hidden[j])
        results.append([output, *torch.autograd.grad(output.float().square().sum(), (q, k, t))])
    for found in results[1:]:
        for ours, expected in zip(found, results[0], strict=True):
            assert torch.equal(ours, expected)


def test_autocast_casts_query_key_and_value_alone() -> None:
    """The functions compute as without it, and a captured table keeps its dtype."""
    x = torch.randn(3, 1, 2, 40, 8)
    table = torch.randn(2, 80, requires_grad=True)
    seen: list[torch.dtype] = []

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        product = torch.matmul(torch.ones(1, 2), torch.ones(2, 1))
        seen.extend((s.dtype, product.dtype))
        return s + table[h, i - j + 40]

    with torch.autocast("cpu", torch.bfloat16):
        found = torch_attn.flex_attention(*x, score)
    assert found.dtype == torch.bfloat16
    assert set(seen) == {torch.float32}
    assert torch.equal(found, torch_attn.flex_attention(*x.bfloat16(), score))
    (gradient,) = torch.autograd.grad(found.float().sum(), table)
    assert gradient.dtype == torch.float32


def test_the_output_has_the_strides_of_sdpas() -> None:
    """[B, L, H, E] seen as [B, H, L, E], and every second number."""
    x = torch.randn(3, 2, 70, 3, 16).transpose(2, 3)
    score = lambda s, b, h, i, j: s - (i - j).abs() * 0.1  # noqa: E731
    for view in (x, x[..., ::2]):
        found = torch_attn.flex_attention(*view, score)
        assert found.stride() == torch_attn.sdpa(*view).stride()


# --- what the fuzzer found ------------------------------------------------------------------------


def test_gradients_of_bounds_that_are_equal() -> None:
    """PyTorch's: the lower bound has none where it is the upper one, too."""
    numbers = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    of = torch.cartesian_prod(numbers, numbers, numbers)
    differ = (of[:, 0] != of[:, 1]) & (of[:, 0] != of[:, 2])  # at a bound, releases of torch differ
    x = [of[differ, n].clone().requires_grad_() for n in range(3)]
    score = lambda s, b, h, i, j: torch.clamp(s + x[0][i], s + x[1][i], s + x[2][i])  # noqa: E731
    ours = torch.autograd.grad(at_single_key(score, len(x[0]), torch.float64).sum(), x)
    theirs = torch.autograd.grad(torch.clamp(*x).sum(), x)
    torch.testing.assert_close(ours, theirs)


def test_numbers_after_an_index_of_the_pair() -> None:
    x, table = torch.randn(3, 1, 2, 9, 8), torch.randn(5, 2, 4, 3)
    functions = [
        lambda s, b, h, i, j: s + table[i * j % 5][1][2][0],
        lambda s, b, h, i, j: s + table[i * j % 5][h][2, j % 3],
        lambda s, b, h, i, j: s + table[i * j % 5][..., 1:][h, 2][j % 2],
    ]
    for function in functions:
        expected = reference.flex_attention(*x, function)[0]
        torch.testing.assert_close(torch_attn.flex_attention(*x, function), expected)
