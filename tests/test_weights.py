"""sdpa_with_weights: its output is sdpa's, its weights and scores are the textbook's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_attn
from _cases import NAMED, make_named
from helpers import DTYPES, INF, NAN, SEED, make_inputs
from torch_attn import reference


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", NAMED)
def test_values(case: str, dtype: torch.dtype) -> None:
    inputs, options = make_named(case, dtype)
    output, weights, scores = torch_attn.sdpa_with_weights(*inputs, **options)
    assert torch.equal(output, torch_attn.sdpa(*inputs, **options))
    exact = inputs.map(lambda t: t.double() if t.is_floating_point() else t)
    _, exact_weights, exact_scores = reference.sdpa_with_weights(*exact, **options)
    assert output.dtype == weights.dtype == scores.dtype == dtype
    torch.testing.assert_close(weights, exact_weights.to(dtype))
    torch.testing.assert_close(scores, exact_scores.to(dtype))


# Several tiles of queries and keys, of which masks hide some wholly; few queries over many keys.
LARGE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tiles": ({"L": 70, "S": 200}, {}),
    "causal": ({"L": 300, "S": 300, "E": 40}, {"is_causal": True}),
    "grouped heads, bool mask": (
        {"L": 70, "S": 200, "heads": (6, 2, 3), "mask": (6, 1, 200), "kind": "bool"},
        {"enable_gqa": True},
    ),
    "mask with -inf": ({"L": 70, "S": 200, "mask": (70, 1), "kind": "-inf"}, {"scale": -0.5}),
    "rows that see nothing": ({"L": 70, "S": 200, "mask": (70, 1), "kind": "bool"}, {}),
    "one query": ({"L": 1, "S": 1500, "heads": 1, "batch": ()}, {}),
    "one head": ({"L": 3, "S": 2100, "heads": 1, "mask": (1, 2100)}, {"scale": 0.0}),
}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", LARGE)
def test_values_of_many_tiles(case: str, dtype: torch.dtype) -> None:
    """Also in one pass, for nn.MultiheadAttention; with a gradient, the output is sdpa's."""
    sizes, options = LARGE[case]
    inputs = make_inputs(**{"dtype": dtype, **sizes})
    exact = inputs.map(lambda t: t.double() if t.is_floating_point() else t)
    exact_output, exact_weights, exact_scores = reference.sdpa_with_weights(*exact, **options)
    # Rows with gaps between their numbers, and columns of the transposed.
    strided = inputs._replace(
        query=inputs.query.repeat_interleave(2, -1)[..., ::2],
        key=inputs.key.mT.contiguous().mT,
    )
    _, weights, scores = torch_attn.sdpa_with_weights(*strided, **options)
    torch.testing.assert_close(weights, exact_weights.to(dtype))
    torch.testing.assert_close(scores, exact_scores.to(dtype))
    hidden = exact_scores == -INF
    assert torch.equal(scores == -INF, hidden)
    assert (weights[hidden] == 0).all()

    # The sums of weights that a half type rounds.
    rounds = {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(dtype)
    learning = inputs._replace(query=inputs.query.clone().requires_grad_())
    for mean in (False, True):
        output, weights = torch.ops.attn._sdpa_and_weights(*inputs, **options, mean=mean)
        with_gradient = torch.ops.attn._sdpa_and_weights(*learning, **options, mean=mean)
        expected = exact_weights.mean(-3) if mean else exact_weights
        torch.testing.assert_close(weights, expected.to(dtype))
        assert torch.equal(with_gradient[0], torch_attn.sdpa(*learning, **options))
        assert torch.equal(with_gradient[1], weights)
        torch.testing.assert_close(output, exact_output.to(dtype), atol=rounds, rtol=rounds)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("argument", ["query", "key"])
@pytest.mark.parametrize("number", [NAN, INF, -INF])
def test_kernel_and_formula_agree_on_what_is_no_number(number: float, argument: str) -> None:
    """Under vmap the formula serves. Key 70 is seen by no query, tiles are hidden from query 3."""
    inputs = make_inputs(9, 200)
    mask = torch.rand(9, 200) > 0.3
    mask[:, 70] = False
    mask[3, 64:] = False
    mask[4] = False
    for row in (3, 4) if argument == "query" else (5, 70, 130):
        getattr(inputs, argument)[..., row, 2] = number

    def results(*tensors: Tensor) -> tuple[Tensor, ...]:
        return torch_attn.sdpa_with_weights(*tensors)[1:]

    batched = [t.unsqueeze(0) for t in (*inputs[:3], mask)]
    expected = torch.vmap(results)(*batched)
    for kernel, formula in zip(results(*inputs[:3], mask), expected, strict=True):
        torch.testing.assert_close(kernel, formula[0], equal_nan=True)


@pytest.mark.regression
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("number", [NAN, INF, -INF])
def test_hidden_keys_reach_no_gradient(number: float) -> None:
    query, key, value, _ = make_inputs(5, 7)
    mask = torch.arange(7) < 4

    def gradients(key: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in (query, key, value)]
        output, weights, _ = torch_attn.sdpa_with_weights(*leaves, mask[None])
        return torch.autograd.grad(output.sum() + weights.square().sum(), leaves)

    spoilt = torch.where(mask[:, None], key, number)
    assert all(map(torch.equal, gradients(spoilt), gradients(key)))


@pytest.mark.usefixtures("device")
def test_weights_are_those_before_dropout() -> None:
    inputs = make_inputs(5, 7)
    torch.manual_seed(SEED)
    output, weights, scores = torch_attn.sdpa_with_weights(*inputs, dropout_p=0.5)
    torch.manual_seed(SEED)
    assert torch.equal(output, torch_attn.sdpa(*inputs, dropout_p=0.5))
    _, plain_weights, plain_scores = torch_attn.sdpa_with_weights(*inputs)
    assert torch.equal(weights, plain_weights)
    assert torch.equal(scores, plain_scores)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("case", NAMED)
@pytest.mark.parametrize(
    "which", [0, 1, 2, slice(None)], ids=["output", "weights", "scores", "all"]
)
def test_gradients(which: int | slice, case: str) -> None:
    inputs, options = make_named(case, torch.float64)
    hidden = inputs.attn_mask == -INF if inputs.attn_mask is not None else None
    if hidden is not None and inputs.attn_mask.is_floating_point():
        inputs = inputs._replace(attn_mask=inputs.attn_mask.double().masked_fill(hidden, 0))

    def function(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Any:
        if mask is not None and mask.is_floating_point():
            mask = mask.masked_fill(hidden, -INF)
        results = torch_attn.sdpa_with_weights(query, key, value, mask, **options)
        # A masked score is -inf, which has no difference with itself.
        return tuple(t.masked_fill(t == -INF, 0) for t in results)[which]

    assert torch.autograd.gradcheck(function, tuple(inputs.require_grad()))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("which", [1, 2], ids=["weights", "scores"])
def test_second_derivatives(which: int) -> None:
    inputs = make_inputs(3, 4, 5, heads=2, mask=(3, 4), dtype=torch.float64).require_grad()

    def function(*tensors: Tensor) -> Tensor:
        return torch_attn.sdpa_with_weights(*tensors, is_causal=which == 1)[which].masked_fill(
            torch.ones(3, 4, dtype=torch.bool).triu(1), 0
        )

    assert torch.autograd.gradgradcheck(function, tuple(inputs))


@pytest.mark.usefixtures("device")
def test_weights_have_no_gradient_by_the_value() -> None:
    query, key, value, _ = make_inputs(5, 7)
    results = torch_attn.sdpa_with_weights(query, key, value.requires_grad_())
    assert [t.requires_grad for t in results] == [True, False, False]


@pytest.mark.usefixtures("device")
def test_fully_masked_row_has_finite_gradients() -> None:
    inputs = make_inputs(5, 7, mask=(5, 7), kind="float").require_grad()
    with torch.no_grad():
        inputs.attn_mask[2] = -INF
    output, weights, _ = torch_attn.sdpa_with_weights(*inputs)
    (output.sum() + (weights**2).sum()).backward()
    for leaf in inputs:
        assert leaf.grad.isfinite().all()
    assert (inputs.query.grad[..., 2, :] == 0).all()


@pytest.mark.regression
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("which", [1, 2], ids=["weights", "scores"])
@pytest.mark.parametrize("argument", ["query", "key"])
@pytest.mark.parametrize("number", [NAN, INF, -INF])
def test_masked_number_reaches_no_gradient(number: float, argument: str, which: int) -> None:
    """A NaN that is attended to is not lost: its row of weights, and their gradients, are NaN."""
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[:, 2] = False  # Key 2 is seen by no query,
    mask[1] = False  # and query 1 sees no key.

    def gradients(row: int, number: float) -> dict[str, Tensor]:
        torch.manual_seed(SEED)
        inputs = make_inputs(5, 7)
        with torch.no_grad():
            getattr(inputs, argument)[..., row, 3] = number
        leaves = inputs.require_grad()
        results = torch_attn.sdpa_with_weights(*leaves[:3], mask)
        visible = results[which].masked_fill(~mask, 0)
        named = {"query": leaves.query, "key": leaves.key}
        return dict(
            zip(named, torch.autograd.grad(visible.square().sum(), named.values()), strict=True)
        )

    hidden, seen = (1, 0) if argument == "query" else (2, 1)
    expected, actual = gradients(hidden, 0), gradients(hidden, number)
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name
    assert gradients(seen, NAN)["query"].isnan().any()
    assert gradients(seen, NAN)["key"][..., seen, :].isnan().all()


@pytest.mark.regression
@pytest.mark.parametrize("derive", ["second", "third"])
@pytest.mark.parametrize("number", [NAN, INF])
def test_hidden_key_reaches_no_higher_derivative(number: float, derive: str) -> None:
    """The second of the weights; the third of sdpa, by the formulas for third derivatives."""
    mask = torch.arange(7) < 5

    def result(number: float) -> Tensor:
        torch.manual_seed(SEED)
        query, key, value, _ = make_inputs(5, 7, dtype=torch.float64)
        key[..., 5:, :] = number

        def gradient(query: Tensor) -> Tensor:
            index = 1 if derive == "second" else 0
            output = torch_attn.sdpa_with_weights(query, key, value, mask[None])[index]
            return output.square().sum()

        for _ in range(2 if derive == "second" else 3):
            gradient = _squared(torch.func.grad(gradient))
        return gradient(query)

    assert torch.equal(result(number), result(0))


def _squared(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x).square().sum()


def test_a_kernel_serves_on_the_cpu() -> None:
    inputs = make_inputs(5, 7).require_grad()
    with torch.autograd.profiler.profile() as profile:
        _, weights, _ = torch_attn.sdpa_with_weights(*inputs)
    assert not [event.name for event in profile.function_events if "softmax" in event.name]
    with torch.autograd.profiler.profile() as profile:
        weights.sum().backward()
    assert [event.name for event in profile.function_events if "softmax" in event.name]
