"""sdpa_stats: statistics of scores and weights, held to the textbook in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

import torch_attn
from _accuracy import Neighbour, hold
from _cases import CASES, Case
from _in_order import product
from helpers import (
    DTYPES,
    INF,
    NAN,
    SEED,
    Inputs,
    largest,
    make_inputs,
    randn,
    threads_set_to,
    to_dtype,
    ulp,
)
from test_properties import problems
from torch_attn import Stats, reference

NAMES = Stats._fields
ops = torch.ops.attn


def sdpa_stats(inputs: Inputs, **options: Any) -> dict[str, Tensor]:
    return torch_attn.sdpa_stats(inputs.query, inputs.key, inputs.attn_mask, **options)._asdict()


def textbook(inputs: Inputs, dtype: torch.dtype, **options: Any) -> dict[str, Tensor]:
    query, key, _, mask = (to_dtype(t, dtype) for t in inputs)
    results = reference.sdpa_stats(query, key, mask, **options)
    named = dict(zip(NAMES, results, strict=True))
    if dtype == torch.float64:
        # Rounded once, not as often as there are queries: sums of multiples of 2^-40 are exact.
        weights = reference.sdpa_with_weights(query, key, key, mask, **options)[1]
        high = weights.mul(2.0**40).round().div(2.0**40)
        named["received_weight"] = high.sum(-2) + (weights - high).sum(-2)
    return named


def in_order(inputs: Inputs, *, scale: float | None = None, **options: Any) -> dict[str, Tensor]:
    """The textbook in float32 with the products' sums in an order that is the same everywhere.

    The scores are given to it as a floating mask of a product that is 0.
    """
    query, key, _, mask = (to_dtype(t, torch.float32) for t in inputs)
    if options.get("enable_gqa"):
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    scores = product(query, key.mT) * scale
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -INF)
    elif mask is not None:
        scores = scores + mask
    lead = scores.shape[:-2]
    zeros = torch.zeros(*lead, query.size(-2), 1), torch.zeros(*lead, key.size(-2), 1)
    results = reference.sdpa_stats(*zeros, scores, options.get("is_causal", False))
    return dict(zip(NAMES, results, strict=True))


def finite(actual: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of both where the expected ones are finite; others must be equal."""
    where = expected.isfinite()
    assert torch.equal(actual[~where].double(), expected[~where].double())
    return actual[where].double(), expected[where].double()


_errors: dict[Any, dict[str, float]] = {}


def torch_errors(inputs: Inputs, known_as: Any, **options: Any) -> dict[str, float]:
    """The largest error of PyTorch in float32, over neighbours of the problem (`_accuracy.py`)."""
    if known_as is not None and known_as in _errors:
        return _errors[known_as]
    worst = dict.fromkeys(NAMES, 0.0)
    small = sum(t.numel() for t in inputs if t is not None) < 1 << 14
    generator = torch.Generator(inputs.query.device).manual_seed(SEED)
    problem = inputs
    for change in [False] * 4 + [True] * 4 if small else [False] * 2:
        exact = textbook(problem, torch.float64, **options)
        runs = [textbook(problem, torch.float32, **options)]
        if small and problem.query.numel() and problem.key.numel():
            runs.append(in_order(problem, **options))
        for run in runs:
            for name in NAMES:
                worst[name] = max(worst[name], largest(torch.sub(*finite(run[name], exact[name]))))
        causal = bool(options.get("is_causal"))
        problem = Neighbour(problem, causal, generator, change=change).inputs(problem)
    if inputs.query.dtype == torch.float64:  # and as much again for the textbook's own
        factor = 2 * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        worst = {name: factor * e for name, e in worst.items()}
    if known_as is not None:
        _errors[known_as] = worst
    return worst


def check(inputs: Inputs, known_as: Any = None, **options: Any) -> dict[str, Tensor]:
    """Allows twice the error of PyTorch in the precision of the statistics, plus an ulp."""
    dtype = torch.float64 if inputs.query.dtype == torch.float64 else torch.float32
    with threads_set_to(1):  # PyTorch's errors depend on it
        expected = textbook(inputs, torch.float64, **options)
        errors = torch_errors(inputs, known_as, **options)
    actual = sdpa_stats(inputs, **options)
    for name in NAMES:
        assert actual[name].shape == expected[name].shape, name
        assert actual[name].dtype == dtype, name
        assert actual[name].is_contiguous(), name
        hold(name, *finite(actual[name], expected[name]), errors[name], dtype)
    return actual


def without_value(inputs: Inputs, enable_gqa: bool = False, **_: Any) -> Inputs:
    """A mask may fit to leading dimensions that only the value has; then the query gets them."""

    def leading(x: Inputs) -> tuple[int, ...]:
        on_meta = (t.to("meta") for t in x[:3])
        return tuple(reference.sdpa(*on_meta, enable_gqa=enable_gqa).shape[:-2])

    scores, query = inputs._replace(value=inputs.key), inputs.query
    if leading(scores) == leading(inputs):
        return scores
    return scores._replace(query=query.expand(*leading(inputs), *query.shape[-2:]))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("case", CASES[::2], ids=str)
def test_accuracy(case: Case) -> None:
    check(without_value(case.inputs(), **case.options), known_as=str(case), **case.options)


PROBLEMS = problems().map(lambda drawn: (without_value(drawn[0], **drawn[1]), drawn[1]))


@pytest.mark.usefixtures("kernels")
@given(PROBLEMS)
def test_accuracy_of_any_problem(problem: tuple[Inputs, dict[str, Any]]) -> None:
    inputs, options = problem
    check(inputs, **options)


@pytest.mark.usefixtures("kernels")
@given(PROBLEMS)
def test_identities(problem: tuple[Inputs, dict[str, Any]]) -> None:
    """What is so whatever the scores are."""
    inputs, options = problem
    query, key, _, mask = inputs
    stats = torch_attn.sdpa_stats(query, key, mask, **options)
    _, _, scores = reference.sdpa_with_weights(
        *(to_dtype(t, torch.float64) for t in (query, key, key, mask)), **options
    )
    L, S = scores.shape[-2:]
    seen = (scores > -INF).sum(-1)
    eps = torch.finfo(stats.entropy.dtype).eps

    # A row gives away l / l: two powers and sums of S weights in parts of 64, and of L rows.
    total, rows = stats.received_weight.double().sum(-1), (seen > 0).sum(-1)
    assert ((total - rows).abs() <= (64 + S / 64 + L / 64 + 8) * eps * rows).all()
    assert (stats.received_weight >= 0).all()
    assert (stats.entropy >= 0).all()
    assert ((stats.entropy == 0) | (seen > 1)).all()
    # Entropy is log(l) - t / l, both with l a sum of S weights in parts of 64.
    most = seen.clamp(min=1).double().log()
    assert (stats.entropy <= most * (1 + 4 * eps) + (64 + S / 64 + 8) * eps).all()
    assert (stats.logsumexp >= stats.largest_score).all()
    assert torch.equal(stats.logsumexp == -INF, seen == 0)
    weight = stats.largest_weight
    assert ((weight >= 0) & (weight <= 1)).all()
    assert torch.equal(weight == 0, seen == 0)


# --- accuracy near the edges ----------------------------------------------------------------------


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("others", [1, 2, 300, 3000])
@pytest.mark.parametrize("gap", [0.25, 1.0, 8.0, 20.0, 50.0, 80.0])
def test_small_entropies_are_relatively_accurate(
    gap: float, others: int, dtype: torch.dtype
) -> None:
    """One key ahead of all others by the same gap; in float32 log(l) and 1 - p would both be 0.

    With r = others e^-gap the entropy is log1p(r) + gap r / (1 + r). Rounded are: the exponent
    gap log2(e), twice, its power, by an ulp, sums of at most 64 + others / 64 weights, a handful
    of operations behind.
    """
    key = torch.full((others + 1, 1), -gap, dtype=dtype)
    key[others // 2] = 0
    entropy = torch_attn.sdpa_stats(torch.ones(1, 1, dtype=dtype), key, scale=1.0).entropy
    r = others * math.exp(-gap)
    expected = math.log1p(r) + gap * r / (1 + r)
    eps = torch.finfo(dtype).eps
    assert abs(entropy.item() - expected) <= (gap + 64 + others / 64 + 8) * eps * expected


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("S", [1, 2, 3, 64, 65, 1000, 5000])
def test_equal_scores(S: int, dtype: torch.dtype) -> None:
    """The largest possible entropy, and of one key exactly 0."""
    query, key = torch.ones(3, 8, dtype=dtype), torch.ones(S, 8, dtype=dtype)
    stats = torch_attn.sdpa_stats(query, key, scale=1.0)
    kind = stats.entropy.dtype
    expected = torch.full((3,), math.log(S), dtype=kind)
    step = ulp(math.log(S), kind) if S > 1 else 0
    torch.testing.assert_close(stats.entropy, expected, rtol=0, atol=step)
    torch.testing.assert_close(stats.logsumexp, expected + 8, rtol=0, atol=ulp(20, kind))
    assert (stats.largest_score == 8).all()
    # 3 weights 2^-log2(S): the rounding of log2(S), the power, 2 sums
    torch.testing.assert_close(
        stats.received_weight,
        torch.full((S,), 3 / S, dtype=kind),
        rtol=(math.log2(S) + 4) * torch.finfo(kind).eps,
        atol=0,
    )
    assert (stats.largest_weight <= 1).all()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores(dtype: torch.dtype) -> None:
    """Rows of finfo.min, as some models mask: every key is seen, none by a weight of NaN."""
    query, key = randn((5, 8), dtype), randn((130, 8), dtype)
    for number in (torch.finfo(dtype).min, -1e9 if dtype != torch.float16 else -6e4):
        mask = torch.full((5, 130), number, dtype=dtype)
        stats = torch_attn.sdpa_stats(query, key, mask)
        torch.testing.assert_close(
            stats.received_weight.sum(), torch.tensor(5.0, dtype=stats.entropy.dtype)
        )
        assert all(t.isfinite().all() for t in stats)
        assert (stats.entropy >= 0).all()


# --- threads and repeats --------------------------------------------------------------------------


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("L", "S", "heads"),
    [(1, 5000, (4, 2, 2)), (5000, 3, 1), (300, 300, 6), (1500, 1300, 1), (5, 7, 3)],
)
def test_same_bits_on_any_number_of_threads(L: int, S: int, heads: Any, dtype: torch.dtype) -> None:
    inputs = make_inputs(L, S, 24, batch=(), heads=heads, dtype=dtype)
    runs = []
    for threads in (1, 1, 2, 3, 8):
        with threads_set_to(threads):
            runs.append(sdpa_stats(inputs, enable_gqa=True, is_causal=L == 300))
    for run in runs[1:]:
        for name in NAMES:
            assert torch.equal(run[name], runs[0][name]), name


# --- bad input ------------------------------------------------------------------------------------

GOOD = {"query": (2, 4, 5, 8), "key": (2, 4, 7, 8)}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "1-D query": ({"query": torch.zeros(8)}, r"query has shape \[8\]; .*at least 2"),
    "head_dim": ({"key": torch.zeros(2, 4, 7, 9)}, "key has head_dim 9 but query has 8"),
    "heads": ({"key": torch.zeros(2, 2, 7, 8)}, "key has 2 heads.*enable_gqa"),
    "groups": (
        {"key": torch.zeros(2, 3, 7, 8), "enable_gqa": True},
        "key has 3 heads but query has 4",
    ),
    "batch": ({"key": torch.zeros(3, 4, 7, 8)}, r"key has shape \[3, 4, 7, 8\].*equal or 1"),
    "dtype": ({"key": torch.zeros(2, 4, 7, 8).half()}, "key has dtype Half but query has Float"),
    "integers": ({"query": torch.zeros(2, 4, 5, 8).int()}, "query has dtype Int; it must be"),
    "mask": ({"attn_mask": torch.zeros(5, 6)}, r"attn_mask has shape \[5, 6\].*\[2, 4, 5, 7\]"),
    "mask's dtype": (
        {"attn_mask": torch.zeros(5, 7).long()},
        "attn_mask has dtype Long; it must be bool",
    ),
    "large mask": ({"attn_mask": torch.zeros(3, 2, 4, 5, 7)}, "attn_mask has shape"),
    "scale": ({"scale": NAN}, "scale is nan"),
    "device": ({"key": torch.zeros(2, 4, 7, 8, device="meta")}, "key is on meta but query is on"),
    "layout": ({"key": torch.zeros(2, 4, 7, 8).to_sparse()}, "key has layout Sparse"),
    "sparse query": ({"query": torch.zeros(2, 4, 5, 8).to_sparse()}, "query has layout Sparse"),
}


@pytest.mark.parametrize("function", [torch_attn.sdpa_stats, ops.sdpa_stats])
@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_argument(case: str, function: Any) -> None:
    arguments, message = BAD[case]
    good = {name: torch.zeros(size) for name, size in GOOD.items()}
    with pytest.raises(RuntimeError, match=message):
        function(**{**good, **arguments})


def test_nested_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.randn(5, 8), torch.randn(3, 8)], layout=torch.jagged)
    with pytest.raises(RuntimeError, match=r"query is a nested tensor.*to_padded_tensor"):
        torch_attn.sdpa_stats(nested, nested)
