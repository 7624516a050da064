"""Second derivatives and forward mode: gradgradcheck, accuracy, bits, every way to ask."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.gradcheck import gradcheck, gradgradcheck

import torch_attn
from _cases import CAUSAL, F64, GQA, SMALL, Case
from _operators import arguments
from _second_order import check_second, directions, over_forward, over_reverse
from helpers import (
    DTYPES,
    INF,
    LAYOUTS,
    SEED,
    Inputs,
    Sdpa,
    assert_same_bits,
    double_backward,
    make_grad_output,
    make_inputs,
    named,
    with_two_dtypes,
)
from torch_attn import reference

# of PyTorch's, by its own forward mode
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

TENSORS = Inputs._fields


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """For problems of a few numbers, where waking another thread takes longest."""
    torch.set_num_threads(1)


def differentiable(case: Case) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """The operator as a smooth function of the tensors of the case that are not boolean."""
    inputs = case.inputs()
    mask, hidden = inputs.attn_mask, None
    if case.kind == "bool":
        mask[..., :1, :] = False  # a query that attends to nothing
        inputs = inputs._replace(attn_mask=None)
    if case.kind == "-inf":  # stays, whatever a difference quotient adds to the rest
        mask[..., :1, :] = -INF
        hidden = mask == -INF
        inputs = inputs._replace(attn_mask=mask.masked_fill(hidden, 0))

    def function(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None
    ) -> Tensor:
        torch.manual_seed(SEED)
        attn_mask = mask if attn_mask is None else attn_mask
        if hidden is not None:
            attn_mask = attn_mask.masked_fill(hidden, -INF)
        return torch_attn.sdpa(query, key, value, attn_mask, **case.options)

    return function, tuple(t.requires_grad_() for t in inputs if t is not None)


def directional(case: Case) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """J(x) t, the derivative in forward mode, as a function of (x, t)."""
    function, point = differentiable(case)

    def tangent(*both: Tensor) -> Tensor:
        return torch.func.jvp(function, both[: len(point)], both[len(point) :])[1]

    return tangent, (*point, *(torch.randn_like(t).requires_grad_() for t in point))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("case", SMALL)
def test_gradgradcheck(case: str) -> None:
    """Forward mode, and second order by reverse and by forward over reverse."""
    function, tensors = differentiable(SMALL[case])
    assert gradcheck(function, tensors, check_forward_ad=True)
    assert gradgradcheck(function, tensors, check_fwd_over_rev=True)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("case", SMALL)
def test_reverse_over_forward(case: str) -> None:
    assert gradcheck(*directional(SMALL[case]))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("case", ["mask and causal", "grouped heads", "mask with -inf"])
def test_third_order(case: str) -> None:
    """Reverse and forward over each way to the second order, and forward thrice."""
    function, point = differentiable(SMALL[case])
    tangent, both = directional(SMALL[case])
    assert gradgradcheck(tangent, both)
    grad_output = torch.randn_like(function(*point))

    def gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(*tensors), tensors, grad_output, create_graph=True)

    assert gradgradcheck(gradients, point, check_fwd_over_rev=True)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("case", ["mask and causal", "grouped heads", "mask of keys"])
def test_forward_over_forward(case: str) -> None:
    """The second and the third derivative along a line."""
    inputs, options = SMALL[case].inputs(), SMALL[case].options
    v = directions(inputs)

    def along(sdpa: Sdpa) -> list[Tensor]:
        def line(s: Tensor) -> Tensor:
            return sdpa(*(x + s * d for x, d in zip(inputs, v, strict=True)), **options)

        derivatives = [line]
        for _ in range(3):
            f = derivatives[-1]
            derivatives.append(lambda s, f=f: torch.func.jvp(f, (s,), (torch.ones_like(s),))[1])
        return [f(torch.tensor(0.5, dtype=F64)) for f in derivatives]

    torch.testing.assert_close(along(torch_attn.sdpa), along(reference.sdpa))


@pytest.mark.regression
@pytest.mark.usefixtures("device")
def test_forward_over_forward_of_a_score_of_minus_infinity() -> None:
    """No NaN, as of a key that a mask hides."""
    query, key = torch.rand(2, 3, 4, dtype=F64) + 0.1, torch.randn(2, 5, 4, dtype=F64)
    value, along = torch.randn(2, 5, 6, dtype=F64), torch.randn(2, 3, 4, dtype=F64)
    infinite = key.clone()
    infinite[:, 2, 1] = -INF

    def derivatives(key: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        def first(query: Tensor) -> Tensor:
            call = functools.partial(torch_attn.sdpa, key=key, value=value, attn_mask=mask)
            return torch.func.jvp(call, (query,), (along,))[1]

        return torch.func.jvp(first, (query,), (along,))

    visible = torch.arange(5).ne(2).expand(3, 5)
    torch.testing.assert_close(derivatives(infinite, None), derivatives(key, visible))


@pytest.mark.usefixtures("device")
def test_third_order_with_dropout_is_an_error() -> None:
    tangent, both = directional(SMALL["dropout"])
    first = torch.autograd.grad(tangent(*both).sum(), both, create_graph=True)
    message = "dropout_p is 0.4, but third derivatives and forward over forward .* set it to 0"
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.grad(sum(g.sum() for g in first), both)
    with pytest.raises(RuntimeError, match=message):
        torch.func.jvp(tangent, both, both)


# --- accuracy, in every precision -----------------------------------------------------------------


LARGE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"L": 70, "S": 130}, {}),
    "one number": ({"L": 1, "S": 2, "E": 1, "heads": 1, "batch": (64,)}, {}),
    "causal, L < S": ({"L": 65, "S": 129}, CAUSAL),
    "causal, L > S": ({"L": 129, "S": 65}, CAUSAL),
    "scale": ({"L": 33, "S": 65}, {"scale": -0.5}),
    "large heads": ({"L": 40, "S": 70, "E": 128, "Ev": 65, "heads": 1}, {}),
    "small heads": ({"L": 40, "S": 70, "E": 3, "Ev": 130}, CAUSAL),
    "bool mask": ({"L": 50, "S": 70, "mask": (2, 1, 50, 70), "kind": "bool"}, {}),
    "mask": ({"L": 50, "S": 70, "mask": (2, 3, 50, 70)}, CAUSAL),
    "mask with -inf": ({"L": 50, "S": 70, "mask": (50, 70), "kind": "-inf"}, {}),
    "float32 mask": ({"L": 50, "S": 70, "mask": (3, 50, 70), "kind": "float32"}, {}),
    "mask of keys": ({"L": 70, "S": 90, "mask": (2, 1, 1, 90)}, {}),
    "mask of queries": ({"L": 70, "S": 90, "mask": (3, 70, 1)}, {}),
    "one number as mask": ({"L": 70, "S": 90, "mask": (1, 1)}, CAUSAL),
    "grouped heads": ({"L": 33, "S": 70, "heads": (6, 3, 2), "mask": (6, 1, 70)}, GQA),
    "one query": ({"L": 1, "S": 1100, "heads": (4, 1, 1), "mask": (1, 1100)}, GQA),
    "long": ({"L": 300, "S": 1300, "batch": (), "heads": 1}, CAUSAL),
    "2-D": ({"L": 33, "S": 70, "batch": None}, {}),
    "5-D": ({"L": 20, "S": 30, "batch": (2, 2), "mask": (2, 1, 1, 20, 30)}, {}),
    "dropout": ({"L": 70, "S": 130, "mask": (1, 130)}, {"dropout_p": 0.3}),
    "dropout and all else": (
        {"L": 33, "S": 70, "Ev": 24, "heads": (6, 2, 3), "mask": (6, 1, 70), "kind": "-inf"},
        {"dropout_p": 0.3, "is_causal": True, "enable_gqa": True, "scale": 0.2},
    ),
}  # fmt: skip


def make_large(case: str, dtype: torch.dtype) -> tuple[Inputs, dict[str, Any]]:
    sizes, options = LARGE[case]
    return make_inputs(**sizes, dtype=dtype), options


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("case", "dtype"), with_two_dtypes(LARGE))
def test_accuracy(case: str, dtype: torch.dtype) -> None:
    check_second(*make_large(case, dtype))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["bool", "-inf"])
@pytest.mark.parametrize("S", [1, 5, 70])
def test_fully_masked_rows(S: int, kind: str, dtype: torch.dtype) -> None:
    """0, not NaN, in their own rows and in all that they could reach."""
    rows = [0, 3, 8]
    mask = torch.ones(9, S, dtype=torch.bool)
    mask[rows] = False
    if kind == "-inf":
        mask = torch.zeros(9, S, dtype=dtype).masked_fill(~mask, -INF)
    actual = check_second(make_inputs(9, S, dtype=dtype)._replace(attn_mask=mask), {})
    assert (actual["tangent"][..., rows, :] == 0).all()
    assert (actual["second_query"][..., rows, :] == 0).all()
    if kind == "-inf":
        assert (actual["second_attn_mask"][rows] == 0).all()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("sizes", [(0, 7, 4, 4), (5, 0, 4, 4), (5, 7, 0, 4), (5, 7, 4, 0)], ids=str)
def test_empty(sizes: tuple[int, int, int, int]) -> None:
    """Equals the reference, which for S = 0 has nothing but zeros."""
    x = make_inputs(*sizes, mask=(1, sizes[1]), dtype=F64)
    u, t = make_grad_output(x), directions(x)
    expected = double_backward(reference.sdpa, x, u, t)
    for way in (double_backward, over_forward, over_reverse):
        actual = way(torch_attn.sdpa, x, u, t)
        for name in expected:
            torch.testing.assert_close(actual[name], expected[name], msg=f"{way.__name__} {name}")


@pytest.mark.regression
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_of_a_masked_key_stays_hidden(dtype: torch.dtype) -> None:
    """Neither the key nor its direction reaches a query that does not attend to it."""
    x = make_inputs(20, 70, dtype=dtype)
    attend = torch.ones(20, 70, dtype=torch.bool)
    attend[:, 40] = False
    x = x._replace(attn_mask=attend)
    u, t = make_grad_output(x), directions(x)
    expected = double_backward(torch_attn.sdpa, x, u, t)
    for tensor in (x.key, t.key):
        tensor[..., 40, :] = math.nan
        assert_same_bits(double_backward(torch_attn.sdpa, x, u, t), expected)


@pytest.mark.regression
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_key_has_all_the_weight(dtype: torch.dtype, kernels: str) -> None:
    """However large its score: the output moves as the value does."""
    query, key = 1000 * torch.randn(2, 3, 8, 17).to(dtype), torch.randn(2, 3, 1, 17).to(dtype)
    value, tangent = torch.randn(2, 2, 3, 1, 5).to(dtype)

    def attend(v: Tensor) -> Tensor:
        return torch_attn.sdpa(query, key, v)

    moved = torch.func.jvp(attend, (value,), (tangent,))[1]
    if kernels == "cuda" and dtype.itemsize == 2:
        # tensor cores have summed the score, up to 1e4, for the logsumexp, and others sum it anew
        torch.testing.assert_close(moved, tangent.expand_as(moved), rtol=2e-3, atol=0)
    else:
        assert torch.equal(moved, tangent.expand_as(moved))


# --- subsets, layouts, bits -----------------------------------------------------------------------


SUBSETS = [s for n in range(1, 5) for s in itertools.combinations(TENSORS, n)]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("subset", SUBSETS, ids="-".join)
def test_subsets(subset: tuple[str, ...]) -> None:
    """A direction without a tensor has the bits of one with zeros there."""
    x = make_inputs(20, 70, heads=(4, 2, 1), mask=(4, 1, 70))
    options = {"enable_gqa": True, "is_causal": True}
    u, t = make_grad_output(x, **options), directions(x)
    zeros = Inputs(*(d if n in subset else torch.zeros_like(d) for n, d in t._asdict().items()))
    some = Inputs(*(d if n in subset else None for n, d in t._asdict().items()))
    expected = double_backward(torch_attn.sdpa, x, u, zeros, **options)
    expected = {
        "tangent": expected["tangent"],
        **{f"second_{n}": expected[f"second_{n}"] for n in subset},
    }
    for way in (double_backward, over_forward, over_reverse):
        assert_same_bits(way(torch_attn.sdpa, x, u, some, **options), expected)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("gradient", TENSORS)
def test_derivative_of_one_gradient(gradient: str) -> None:
    """The gradients not differentiated count as zero, as does a direction not given."""
    x = make_inputs(20, 70, mask=(20, 70)).require_grad()
    u = torch.randn(2, 3, 20, 16)
    gradients = torch.autograd.grad(torch_attn.sdpa(*x), x, u, create_graph=True)
    t = torch.randn_like(getattr(x, gradient))
    actual = torch.autograd.grad(gradients[TENSORS.index(gradient)], x, t, materialize_grads=True)
    zeros = x.map(torch.zeros_like)._replace(**{gradient: t})
    expected = double_backward(torch_attn.sdpa, x, u, zeros)
    assert_same_bits(
        named("second_", x, actual), {n: expected[n] for n in expected if n != "tangent"}
    )


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("which", ["x", "u", "t"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, which: str) -> None:
    """Views into memory full of NaN give the bits of contiguous tensors."""
    x = make_inputs(35, 70, 12, 20, mask=(2, 3, 35, 70))
    u, t = make_grad_output(x), directions(x)
    expected = double_backward(torch_attn.sdpa, x, u, t)
    place = LAYOUTS[layout]
    views = {
        "x": (x.map(place), u, t),
        "u": (x, place(u), t),
        "t": (x, u, t.map(place)),
    }[which]
    for way in (double_backward, over_forward, over_reverse):
        assert_same_bits(way(torch_attn.sdpa, *views), expected)


@pytest.mark.usefixtures("kernels")
def test_expanded() -> None:
    """Stride 0, as of `sum()` of an output and of a gradient."""
    x = make_inputs(35, 70, mask=(35, 70))
    u = torch.randn(2, 1, 1, 16).expand(2, 3, 35, 16)
    t = directions(x).map(lambda d: d[..., :1, :].expand(d.shape))
    expected = double_backward(torch_attn.sdpa, x, u.contiguous(), t.map(torch.Tensor.contiguous))
    for way in (double_backward, over_forward, over_reverse):
        assert_same_bits(way(torch_attn.sdpa, x, u, t), expected)


@pytest.mark.usefixtures("cpu_capability")
@pytest.mark.parametrize("case", LARGE)
def test_repeats_and_threads(case: str) -> None:
    x, options = make_large(case, torch.float32)
    u, t = make_grad_output(x, **options), directions(x)
    torch.set_num_threads(1)
    expected = double_backward(torch_attn.sdpa, x, u, t, **options)
    for threads in (2, 5, 2):
        torch.set_num_threads(threads)
        assert_same_bits(double_backward(torch_attn.sdpa, x, u, t, **options), expected)


@pytest.mark.usefixtures("device")
def test_changed_tensor_is_noticed() -> None:
    """What a second backward reads may not change after the first."""
    for change in ("query", "attn_mask", "u"):
        x = make_inputs(5, 7, mask=(5, 7)).require_grad()
        u = torch.randn(2, 3, 5, 16, requires_grad=True)
        gradients = torch.autograd.grad(torch_attn.sdpa(*x), x, u, create_graph=True)
        with torch.no_grad():
            (u if change == "u" else getattr(x, change)).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(sum(g.sum() for g in gradients), x)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("name", ["_sdpa_tangent", "_sdpa_second"])
def test_a_direction_that_does_not_fit_is_an_error(name: str) -> None:
    positional, keywords = arguments(name, make_inputs(5, 7, mask=(5, 7)))
    names = [a.name for a in getattr(torch.ops.attn, name).default._schema.arguments]
    for argument in (
        "tangent_query",
        "tangent_key",
        "tangent_value",
        "tangent_attn_mask",
        "logsumexp",
    ):
        wrong = list(positional)
        wrong[names.index(argument)] = wrong[names.index(argument)][..., :3, :]
        with pytest.raises(RuntimeError, match=argument):
            getattr(torch.ops.attn, name)(*wrong, **keywords)
