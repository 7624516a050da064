"""The options that the built-in lacks: windows, offsets, lengths, soft cap, ALiBi, sinks.

Held to the formula composed of PyTorch's operators, as the built-in's math backend composes its
own: half types computed in float32 and rounded once, at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_attn
from _accuracy import changed, differences, hold, means_something, over_neighbours
from _options import (
    CASES,
    Case,
    Tensors,
    attention,
    drawn,
    errors_of_formula,
    everything,
    factor_of,
    formula,
    stats_of,
    to_32,
    to_64,
)
from helpers import DTYPES, INF, NAN, assert_same_bits
from torch_attn import reference

# of PyTorch's, by its own forward mode
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("case", "dtype"),
    [(c, DTYPES[(i + j) % 4]) for i, c in enumerate(CASES) for j in range(2)],
    ids=str,
)
def test_results_and_derivatives(case: Case, dtype: torch.dtype) -> None:
    """First and second derivatives too, held to twice the formula's error and one ulp."""
    x, u, t = drawn(case, dtype)
    expected, errors = exact_results(case, dtype)
    actual = everything(attention, x, u, t, **case.options)
    assert actual.keys() == expected.keys()
    for name, result in actual.items():
        of = name.removeprefix("d ").removeprefix("grad_")
        if of in x:
            assert result.dtype == x[of].dtype, name
        assert torch.equal(result.isinf(), expected[name].isinf()), name
        finite = [t.double().masked_fill(t.isinf(), 0) for t in (result, expected[name])]
        hold(name, *finite, errors[name], dtype, result.dtype)


@functools.cache  # the same for every instruction set, as the seed is
def exact_results(case: Case, dtype: torch.dtype) -> tuple[Tensors, dict[str, float]]:
    """Results in float64, and the formula's largest error in each, of several problems alike."""
    torch.manual_seed(0)
    problem = drawn(case, dtype)
    results = everything(formula, *map(to_64, problem), **case.options)
    errors = errors_of_formula(*problem, **case.options)
    means_something(
        {n: e for n, e in errors.items() if not n.startswith("d ")},
        {n: e.masked_fill(e.isinf(), 0) for n, e in results.items()},
    )
    return results, errors


def statistics(sdpa: Any, x: Tensors, **options: Any) -> Tensors:
    """The statistics, and the weights and scores."""
    _, weights, scores = sdpa.sdpa_with_weights(**x, enable_gqa=True, **options)
    return {**stats_of(x, sdpa, **options)._asdict(), "weights": weights, "scores": scores}


@functools.cache
def exact_statistics(dtype: torch.dtype) -> tuple[Case, Tensors, Tensors, dict[str, float]]:
    torch.manual_seed(0)
    case = next(c for c in CASES if c.name == "all")
    x = case.tensors(dtype)

    def errors(x: Tensors) -> Iterator[tuple[str, float]]:
        rough, exact = (statistics(reference, to(x), **case.options) for to in (to_32, to_64))
        rough |= {name: rough[name].to(dtype) for name in ("weights", "scores")}
        yield from ((n, factor_of(dtype) * e) for n, e in differences(rough, exact))

    expected = statistics(reference, to_64(x), **case.options)
    return case, x, expected, over_neighbours(x, errors, lambda x, _: changed(x))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_and_weights(dtype: torch.dtype) -> None:
    """A sink is in the denominator, and no score."""
    case, x, expected, errors = exact_statistics(dtype)
    found = statistics(torch_attn, x, **case.options)
    for name, actual in found.items():
        assert torch.equal(actual.isinf(), expected[name].isinf()), name
        finite = [t.double().masked_fill(t.isinf(), 0) for t in (actual, expected[name])]
        hold(name, *finite, errors[name], dtype)
    assert (found["weights"].double().sum(-1) < 1).all()
    output = torch_attn.sdpa_with_weights(**x, enable_gqa=True, **case.options)[0]
    assert torch.equal(output, torch_attn.sdpa(**x, enable_gqa=True, **case.options))


# ------------------------------------------------------------------------------------------------
# What the options mean


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
def test_causality_is_a_window(dtype: torch.dtype) -> None:
    """Every result is the same to the bit."""
    case = Case("causal", (2, 4, 2, 130, 150, 16))
    x, u, t = drawn(case, dtype)
    causal = everything(attention, x, u, t, is_causal=True)
    for same in ({"window_size": (-1, 0)}, {"window_size": (10_000, 0), "query_offset": 0}):
        found = everything(attention, x, u, t, **same)
        assert_same_bits(found, causal)
    assert torch.equal(
        causal["output alone"], torch_attn.sdpa(**x, is_causal=True, enable_gqa=True)
    )


@pytest.mark.usefixtures("kernels")
def test_an_int_means_that_of_every_sample() -> None:
    x = Case("x").tensors(torch.float32)
    number = attention(x, query_offset=20, key_lengths=77, is_causal=True)
    for offset, lengths in (
        (torch.tensor(20), torch.tensor([77], dtype=torch.int32)),
        (torch.tensor([20, 20]), torch.tensor([77, 77])),
    ):
        tensors = attention(x, query_offset=offset, key_lengths=lengths, is_causal=True)
        assert all(map(torch.equal, number, tensors))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("far", [2**61, -(2**61), 2**62 - 1, 1 - 2**62])
@pytest.mark.parametrize("window", [(-1, -1), (0, 0), (-1, 0), (2**63 - 1, 2**63 - 1), (2**62, 5)])
def test_offsets_beyond_everything(far: int, window: tuple[int, int]) -> None:
    """Distances do not overflow: Python's integers say which keys are seen."""
    L, S = 5, 9
    query, key, value = torch.randn(1, L, 8), torch.randn(1, S, 8), torch.randn(1, S, 8)
    left, right = window
    seen = [
        [
            (left < 0 or j >= i + far - left) and (right < 0 or j <= i + far + right)
            for j in range(S)
        ]
        for i in range(L)
    ]
    expected = torch_attn.sdpa(query, key, value, torch.tensor(seen))
    found = torch_attn.sdpa(query, key, value, window_size=window, query_offset=far)
    torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("kernels")
def test_a_sink_of_minus_infinity_is_none() -> None:
    x = Case("x").tensors(torch.float64)
    found = attention(x, sinks=torch.full((4,), -INF, dtype=torch.float64))
    torch.testing.assert_close(found, formula(x), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found[0], attention(x)[0], rtol=0, atol=1e-15)


@pytest.mark.regression
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sink", [1e3, 1e5, 1e9, 1e20, 1e29, 3.3e38, -1e9, -3.3e38])
def test_a_sink_far_beyond_the_scores(sink: float, dtype: torch.dtype) -> None:
    """All of the weight, or none; head_dim 12 makes a scale that is no power of two."""
    x = Case("x", (2, 4, 2, 70, 90, 12)).tensors(dtype)
    sinks = torch.full((4,), sink, dtype=dtype, requires_grad=True)
    output, logsumexp, _ = attention(x, sinks=sinks)
    (of_sinks,) = torch.autograd.grad(logsumexp.sum(), [sinks], retain_graph=True)
    torch.testing.assert_close(of_sinks, torch.full_like(sinks, 140.0 if sink > 0 else 0.0))
    expected = torch.full_like(logsumexp, sink) if sink > 0 else attention(x)[1]
    torch.testing.assert_close(logsumexp, expected, atol=0, rtol=4 * torch.finfo(dtype).eps)
    assert not output.any() if sink > 0 else torch.equal(output, attention(x)[0])
    stats = stats_of(x, sinks=sinks.detach())
    torch.testing.assert_close(stats.logsumexp, expected, atol=0, rtol=4 * torch.finfo(dtype).eps)
    assert stats.entropy.isfinite().all()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [12.0, 0.1])
def test_the_least_sink_over_no_keys(dtype: torch.dtype, scale: float) -> None:
    """The sink has, as a product, an exponent that overflows."""
    x = Case("x").tensors(dtype)
    least = torch.finfo(dtype).min
    sinks = torch.full((4,), least, dtype=dtype)
    output, logsumexp, _ = attention(x, sinks=sinks, key_lengths=0, scale=scale)
    assert not output.any()
    assert (logsumexp == least).all()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("beyond", "within"), [(1e40, 1e30), (1e-46, 1e-30)])
def test_caps_beyond_float32(beyond: float, within: float, dtype: torch.dtype) -> None:
    """Such caps cap nothing, or everything, also in the formulas that differentiate weights."""
    x = {n: t.requires_grad_() for n, t in Case("x").tensors(dtype).items()}

    def gradients(softcap: float) -> tuple[Tensor, ...]:
        weights = torch_attn.sdpa_with_weights(**x, enable_gqa=True, softcap=softcap)[1]
        return torch.autograd.grad(weights.square().sum(), [x["query"], x["key"]])

    torch.testing.assert_close(gradients(beyond), gradients(within))


@pytest.mark.regression
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_no_gradient_passes_a_cap_that_is_reached(dtype: torch.dtype) -> None:
    """Where tanh is 1, its slope is 0, whatever the scale: none of its rounding is left."""
    query, key, value = torch.randn(3, 2, 30, 8, dtype=dtype)
    options = {"softcap": 1e-5, "scale": 1e10}
    x = [query.requires_grad_(), key.requires_grad_()]
    output = torch_attn.sdpa(*x, value, **options)
    first = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    assert not any(t.any() for t in first)
    assert not any(t.any() for t in torch.autograd.grad(sum(t.sum() for t in first), x))


@pytest.mark.usefixtures("kernels")
def test_a_sink_of_nan_makes_its_head_nan() -> None:
    x = Case("x").tensors(torch.float32)
    sinks = torch.tensor([0.0, NAN, 0.0, 0.0])
    output, logsumexp, _ = attention(x, sinks=sinks, key_lengths=torch.tensor([9, 0]))
    stats = stats_of(x, sinks=sinks)
    for result in (output, logsumexp[..., None], stats.entropy, stats.received_weight):
        assert result[:, 1].isnan().all()
        assert result[:, [0, 2, 3]].isfinite().all()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinite_products_are_capped(dtype: torch.dtype) -> None:
    """With a cap only masks and positions hide: a product of -inf has the score -softcap."""
    query = torch.tensor([[[INF], [-INF]]], dtype=dtype)
    key = torch.tensor([[[1.0], [-1.0]]], dtype=dtype)
    scores = torch_attn.sdpa_with_weights(query, key, key, softcap=2.0)[2]
    assert scores.tolist() == [[[2.0, -2.0], [-2.0, 2.0]]]
    expected = (
        torch.tensor([[[2.0, -2.0], [-2.0, 2.0]]], dtype=torch.float64).softmax(-1) @ key.double()
    )
    output = torch_attn.sdpa(query, key, key, softcap=2.0)
    torch.testing.assert_close(output.double(), expected, atol=2 * torch.finfo(dtype).eps, rtol=0)


EVERY: dict[str, Any] = {
    "softcap": 2.0,
    "window_size": (2, 1),
    "query_offset": torch.tensor([1, -1]),
    "key_lengths": torch.tensor([5, 3]),
    "is_causal": True,
}
INPUTS = {"query": (2, 2, 3, 4), "key": (2, 1, 5, 4), "value": (2, 1, 5, 2)}
LEARNED = {"alibi_slopes": (2,), "sinks": (2,), "attn_mask": (3, 5)}


@pytest.mark.parametrize("options", [{}, EVERY], ids=["none", "all"])
def test_gradcheck(options: dict[str, Any]) -> None:
    """First and second derivatives, forward mode and batches, through both results."""
    shapes: dict[str, Any] = INPUTS | LEARNED if options else INPUTS
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes.values()]

    def function(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return attention(dict(zip(shapes, tensors, strict=True)), **options)[:2]

    assert torch.autograd.gradcheck(
        function, inputs, check_forward_ad=True, check_batched_grad=True, fast_mode=True
    )
    assert torch.autograd.gradgradcheck(function, inputs, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.regression
@pytest.mark.parametrize("name", ["query_offset", "key_lengths"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_transforms_within_transforms(name: str, dtype: torch.dtype) -> None:
    """The integers, which are checked in each, are made outside of them."""
    query, key, value = torch.randn(3, 2, 1, 4, 2, dtype=torch.float64)
    numbers = torch.tensor([3, 2])

    def loss(query: Tensor, numbers: Tensor) -> Tensor:
        return torch_attn.sdpa(query, key, value, is_causal=True, **{name: numbers}).square().sum()

    found = torch.func.hessian(lambda query: loss(query, numbers.to(dtype)))(query)
    torch.testing.assert_close(
        found, torch.autograd.functional.hessian(lambda query: loss(query, numbers), query)
    )
    given = numbers.to(dtype)
    torch.testing.assert_close(torch.func.hessian(lambda query: loss(query, given))(query), found)


@pytest.mark.usefixtures("kernels")
def test_a_sink_of_none_over_no_keys_in_forward_over_forward() -> None:
    query, key, value = torch.randn(3, 1, 1, 3, 2)
    sinks, one = torch.tensor([-INF]), torch.ones(1)

    def along(sinks: Tensor) -> Tensor:
        return torch.func.jvp(
            lambda s: torch_attn.sdpa(query, key, value, key_lengths=0, sinks=s), (sinks,), (one,)
        )[1]

    assert not any(t.any() for t in torch.func.jvp(along, (sinks,), (one,)))


# ------------------------------------------------------------------------------------------------
# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": -1.0}, r"softcap is -1; it must be a finite number, 0 for none or above"),
        ({"softcap": INF}, r"softcap is inf; it must be a finite number"),
        ({"window_size": (-2, 0)}, r"window_size is \(-2, 0\); each of \(left, right\) must be -1"),
        ({"query_offset": 2**62}, r"query_offset is 4611686018427387904; it must be between"),
        ({"query_offset": torch.ones(2)}, r"query_offset has dtype Float; it must be int32 or"),
        ({"query_offset": torch.ones(3).long()}, r"query_offset has shape \[3\]; it must be one"),
        (
            {"key_lengths": torch.tensor([3, 10])},
            r"key_lengths is 10 at entry 1; it must be between 0 and 9",
        ),
        *(
            ({name: number}, rf"{name} is {number}; it must be an int of 64 bits, -2\^63 to")
            for name in ("query_offset", "key_lengths")
            for number in (2**63, -(2**63) - 1)
        ),
        ({"key_lengths": -1}, r"key_lengths is -1; it must be between 0 and 9"),
        ({"sinks": torch.zeros(3)}, r"sinks has shape \[3\]; it must be \[Hq\] or \[B..., Hq\]"),
        ({"sinks": torch.zeros(4).double()}, r"sinks has dtype Double; it must be query's dtype"),
        ({"alibi_slopes": torch.zeros(3, 4)}, r"alibi_slopes has shape \[3, 4\]; it must be"),
        ({"alibi_slopes": torch.zeros(())}, r"alibi_slopes has shape \[\]; it must be"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_errors_name_the_argument(options: dict[str, Any], message: str) -> None:
    query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 9, 8)
    with pytest.raises(RuntimeError, match=f"^(attn::sdpa: )?{message}"):
        torch_attn.sdpa(query, key, key, **options)
    with pytest.raises(RuntimeError, match=f"^(attn::sdpa_stats: )?{message}"):
        torch_attn.sdpa_stats(query, key, **options)


@pytest.mark.parametrize("window", [(1, 2, 3), (1,), (), 3])
def test_a_window_is_a_pair(window: Any) -> None:
    x = torch.randn(2, 4, 5, 8)
    with pytest.raises(ValueError, match="it must be a pair"):
        torch_attn.sdpa(x, x, x, window_size=window)


@pytest.mark.parametrize("name", ["query_offset", "key_lengths"])
@pytest.mark.parametrize("numbers", [1.5, [1, 2], "a", True])
def test_integers_are_integers(name: str, numbers: Any) -> None:
    x = torch.randn(2, 4, 5, 8)
    with pytest.raises(TypeError, match=rf"{name} is .*; it must be an int or a tensor"):
        torch_attn.sdpa(x, x, x, **{name: numbers})


@pytest.mark.parametrize("name", ["temperature", "with_rows", "block_table"])
@pytest.mark.parametrize("function", ["sdpa_with_logsumexp", "sdpa_with_weights", "sdpa_stats"])
def test_unknown_options_are_refused(function: str, name: str) -> None:
    """Also arguments of the operators that these functions lack."""
    x = torch.randn(2, 4, 5, 8)
    inputs = (x, x) if function == "sdpa_stats" else (x, x, x)
    with pytest.raises(TypeError, match=rf"there is no argument {name} here; the options are soft"):
        getattr(torch_attn, function)(*inputs, **{name: None})


def test_lengths_changed_in_place_are_seen() -> None:
    """Autograd sees it for every tensor that a backward needs."""
    x = torch.randn(2, 4, 5, 8, requires_grad=True)
    lengths = torch.tensor([3, 5])
    output = torch_attn.sdpa(x, x, x, key_lengths=lengths)
    lengths += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
