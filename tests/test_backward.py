"""Output and gradients: every case against the float64 reference; layouts; rows without keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_attn
from _accuracy import check
from _cases import CASES, Case
from _operators import OPERATORS, arguments
from helpers import (
    DTYPES,
    INF,
    LAYOUTS,
    SEED,
    Inputs,
    assert_same_bits,
    make_grad_output,
    make_inputs,
    results,
    with_two_dtypes,
)

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case: Case) -> None:
    """Runs with gradients and without, which few queries have a kernel of their own for."""
    check(case.inputs(), gradients=True, **case.options)


@pytest.mark.parametrize(("layout", "dtype"), with_two_dtypes(LAYOUTS))
def test_layouts(layout: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(35, 70, 12, 20, mask=(2, 3, 35, 70), dtype=dtype)
    check(inputs.map(LAYOUTS[layout]), gradients=True)


@pytest.mark.parametrize(("layout", "dtype"), with_two_dtypes(LAYOUTS))
def test_layouts_of_grad_output(layout: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(35, 70, 12, 20, mask=(35, 70), dtype=dtype)
    grad_output = make_grad_output(inputs)
    actual = results(torch_attn.sdpa, inputs, LAYOUTS[layout](grad_output))
    assert_same_bits(actual, results(torch_attn.sdpa, inputs, grad_output))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", [(1, 1, 1, 1), (2, 1, 1, 20), (1, 3, 1, 1), (1, 1, 35, 1)])
def test_expanded_grad_output(stored: tuple[int, ...], dtype: torch.dtype) -> None:
    """The gradient has stride 0, as from `output.sum().backward()` and other reductions."""
    inputs = make_inputs(35, 70, 12, 20, dtype=dtype)
    grad_output = torch.randn(stored, dtype=dtype).expand(2, 3, 35, 20)
    actual = results(torch_attn.sdpa, inputs, grad_output)
    assert_same_bits(actual, results(torch_attn.sdpa, inputs, grad_output.contiguous()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("S", [1, 5, 16, 70, 200])
def test_fully_masked_rows(S: int, dtype: torch.dtype) -> None:
    """Zero, not NaN, as output and as gradient, and nothing of them in other gradients."""
    inputs = make_inputs(9, S, dtype=dtype)
    rows = torch.tensor([0, 3, 4, 8])
    attend = torch.ones(9, S, dtype=torch.bool)
    attend[rows] = False
    added = torch.zeros(9, S, dtype=dtype).masked_fill(~attend, -INF)
    for mask in (attend, added):
        found = check(inputs._replace(attn_mask=mask), gradients=True)
        assert (found["output"][..., rows, :] == 0).all()
        assert (found["grad_query"][..., rows, :] == 0).all()
    assert (found["grad_attn_mask"][rows] == 0).all()
    assert (torch_attn.sdpa(*inputs[:3], torch.zeros(1, 1, dtype=torch.bool)) == 0).all()
    nothing = inputs._replace(attn_mask=torch.full((1, 1), -INF, dtype=dtype))
    gradients = results(torch_attn.sdpa, nothing, torch.ones_like(inputs.query))
    assert all((gradient == 0).all() for gradient in gradients.values())


@pytest.mark.regression
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": -1.0}], ids=str)
def test_large_scores(options: dict, dtype: torch.dtype, kernels: str) -> None:
    """Scores of 1e4 and more: the softmax is almost one-hot, nothing overflows."""
    inputs = make_inputs(33, 65, mask=(33, 65), dtype=dtype)
    check(inputs._replace(query=inputs.query * 3e3), **options)
    inputs = inputs._replace(attn_mask=inputs.attn_mask * 1e4)
    tensor_cores = kernels == "cuda" and dtype.itemsize == 2
    check(inputs, gradients=not tensor_cores, **options)
    if not tensor_cores:
        return
    # They sum dP in another order than delta, by 3 roundings and by 14: dS, which is 0, has these.
    grad_output = make_grad_output(inputs, **options)
    found = results(torch_attn.sdpa, inputs, grad_output, **options)["grad_attn_mask"]
    products = (grad_output.double().abs() @ inputs.value.double().abs().mT).sum((0, 1))
    assert (found.abs() <= 17 * 2**-24 * products.amax(-1, keepdim=True)).all()


@pytest.mark.regression
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [None, 7.7, 1e30])
def test_one_key_has_all_the_weight(scale: float | None, dtype: torch.dtype, kernels: str) -> None:
    """However large its score: value receives the gradient as it is, the score none."""
    query, key = 1000 * torch.randn(2, 3, 8, 17).to(dtype), torch.randn(2, 3, 1, 17).to(dtype)
    grad_output = torch.randint(-4, 5, (2, 3, 8, 5)).to(dtype)  # so that sums are exact
    inputs = Inputs(query, key, torch.randn(2, 3, 1, 5).to(dtype))
    gradients = results(torch_attn.sdpa, inputs, grad_output, scale=scale)
    # Tensor cores sum dP in another order than delta, and large scores are rounded twice.
    tensor_cores = kernels == "cuda" and dtype.itemsize == 2
    if not tensor_cores or scale is None:
        assert torch.equal(gradients["grad_value"], grad_output.sum(-2, keepdim=True))
    if not tensor_cores:
        assert (gradients["grad_query"] == 0).all()
        assert (gradients["grad_key"] == 0).all()


def a_number_further(tensor: Any) -> Any:
    """The same numbers in memory that begins where none is aligned to more than its own size."""
    if not isinstance(tensor, Tensor):
        return tensor
    return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.regression
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATORS)
def test_aligned_as_numbers_are(name: str, dtype: torch.dtype) -> None:
    """A GPU ends the process where it is told to read a pair of numbers at another address."""
    options: dict[str, Any] = {"dropout_p": 0.3}
    if name != "sdpa":
        options["sinks"] = torch.randn(3, dtype=dtype)
    x = make_inputs(33, 70, 16, mask=(2, 3, 33, 70), dtype=dtype)
    given, keywords = arguments(name, x, **options)
    operator = getattr(torch.ops.attn, name)
    names = [a.name for a in operator.default._schema.arguments]
    call = dict(zip(names, given, strict=False)) | keywords
    found = []
    # Without output and residual aligned, tensor cores take no part in the sums of their products.
    for moved in ({"output"}, {"residual"}, {*names}):
        torch.manual_seed(SEED)
        result = operator(**{n: a_number_further(a) if n in moved else a for n, a in call.items()})
        found.append((result,) if isinstance(result, Tensor) else result)
    for first, *others in zip(*found, strict=True):
        none = first is None or first == []  # the gradients of the tables are a list
        assert all(a == first if none else torch.equal(first, a) for a in others)


@pytest.mark.regression
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("large", [4e4, 512], ids=["infinite", "without digits"])
def test_gradients_of_broadcast_inputs_are_summed_before_they_are_rounded(
    large: float, dtype: torch.dtype
) -> None:
    """Two samples share one value. Their gradients nearly cancel; in a half type nothing is left.

    The first sample's is 2 * large + 1, the second's -2 * large.
    """
    large = torch.tensor(large, dtype=dtype).item()
    query, key = torch.zeros(2, 1, 3, 4, dtype=dtype), torch.zeros(2, 1, 1, 4, dtype=dtype)
    value = torch.ones(1, 1, 1, 4, dtype=dtype, requires_grad=True)
    rows = torch.tensor([[large, large, 1], [-large, -large, 0]], dtype=dtype)
    grad_output = rows.view(2, 1, 3, 1).expand(2, 1, 3, 4)
    (gradient,) = torch.autograd.grad(torch_attn.sdpa(query, key, value), value, grad_output)
    assert torch.equal(gradient, torch.ones_like(value))
