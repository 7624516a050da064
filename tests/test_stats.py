"""sdpa_stats: statistics of scores and weights, held to the textbook in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import torch_attn
from _accuracy import Neighbour, hold
from _cases import CASES, LENGTHS, NAMED, Case, Shape, make_named
from _in_order import product
from _memory import GuardedMemory, LargestAllocation, resident
from helpers import (
    DTYPES,
    INF,
    LAYOUTS,
    NAN,
    PLACES,
    SEED,
    Inputs,
    cpu_capability_set_to,
    in_fresh_process,
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


def statistics_dtype(inputs: Inputs) -> torch.dtype:
    return torch.float64 if inputs.query.dtype == torch.float64 else torch.float32


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
    """At most twice the error of PyTorch in the precision of the statistics, plus an ulp."""
    inputs = inputs._replace(value=inputs.key)
    dtype = statistics_dtype(inputs)
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


def leading(query: Shape, key: Shape, enable_gqa: bool = False, **_: Any) -> Shape:
    """Of the scores of a query and a key of these shapes, `[*batch, heads]`."""
    heads = (query,) if enable_gqa else (query, key)
    return (
        *torch.broadcast_shapes(query[:-3], key[:-3]),
        *torch.broadcast_shapes(*(shape[-3:-2] for shape in heads)),
    )


def without_value(case: Case) -> bool:
    """Whether the value has no part in the shape of the scores."""
    own = leading(case.query, case.key, **case.options)
    value = case.value[-3:-2] if not case.options.get("enable_gqa") else ()
    return own == (
        *torch.broadcast_shapes(own[:-1], case.value[:-3]),
        *torch.broadcast_shapes(own[-1:], value),
    )


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("case", [*filter(without_value, CASES)][::2], ids=str)
def test_accuracy(case: Case) -> None:
    check(case.inputs(), known_as=str(case), **case.options)


def without_the_value(problem: tuple[Inputs, dict[str, Any]]) -> tuple[Inputs, dict[str, Any]]:
    """A mask may be as large as a value that is not here; then there is none."""
    inputs, options = problem
    if inputs.attn_mask is None:
        return problem
    lead = leading(tuple(inputs.query.shape), tuple(inputs.key.shape), **options)
    scores = (*lead, inputs.query.size(-2), inputs.key.size(-2))
    shape = inputs.attn_mask.shape
    fits = len(shape) <= len(scores) and torch.broadcast_shapes(shape, scores) == scores
    return (inputs if fits else inputs._replace(attn_mask=None)), options


PROBLEMS = problems().map(without_the_value)


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
    # Of log(l) - t / l, both with l a sum of S weights in parts of 64.
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


# --- masked, NaN, infinity ------------------------------------------------------------------------


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["bool", "-inf"])
@pytest.mark.parametrize("L", [7, 70])
def test_rows_without_keys(L: int, kind: str, dtype: torch.dtype) -> None:
    visible = torch.rand(L, 130) > 0.3
    visible[[2, L - 1]] = False
    mask = visible if kind == "bool" else randn((L, 130), dtype).masked_fill(~visible, -INF)
    inputs = make_inputs(L, 130, 40, dtype=dtype)._replace(attn_mask=mask)
    stats = torch_attn.sdpa_stats(inputs.query, inputs.key, mask)
    for row in (2, L - 1):
        assert (stats.largest_score[..., row] == -INF).all()
        assert (stats.logsumexp[..., row] == -INF).all()
        assert (stats.entropy[..., row] == 0).all()
        assert (stats.largest_weight[..., row] == 0).all()
    total = stats.received_weight.sum(-1)
    torch.testing.assert_close(total, torch.full_like(total, L - 2))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("L", [1, 7, 70, 1100])
def test_nan_in_a_query_stays_in_its_row(L: int, dtype: torch.dtype) -> None:
    """And reaches the keys that the row may attend to, of its head alone."""
    row, S = L // 2, 1100 if L < 70 else 130
    shape = {"mask": (L, S), "heads": (4, 2, 2)}
    query, key, _, mask = make_inputs(L, S, 40, kind="bool", dtype=dtype, **shape)
    mask[row] = torch.rand(S) > 0.9
    mask[row, 0] = False
    options = {"attn_mask": mask, "enable_gqa": True}
    clean = torch_attn.sdpa_stats(query, key, **options)
    spoilt = query.clone()
    spoilt[1, 2, row, 3] = NAN
    dirty = torch_attn.sdpa_stats(spoilt, key, **options)
    for name in NAMES[:3]:
        is_nan = torch.zeros(2, 4, L, dtype=torch.bool)
        is_nan[1, 2, row] = True
        actual, expected = getattr(dirty, name), getattr(clean, name)
        assert torch.equal(actual.isnan(), is_nan), name
        assert torch.equal(actual[~is_nan], expected[~is_nan]), name
    assert dirty.largest_weight[1, 2, row].isnan()
    is_nan = torch.zeros(2, 4, S, dtype=torch.bool)
    is_nan[1, 2] = mask[row]
    assert torch.equal(dirty.received_weight.isnan(), is_nan)
    untouched = ~is_nan
    untouched[1, 2] = False  # of its head, one row less is summed
    assert torch.equal(dirty.received_weight[untouched], clean.received_weight[untouched])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("L", "S", "bad"), [(7, 1100, 4), (70, 130, 40)])
def test_nan_in_a_key_reaches_rows_that_see_it(
    L: int, S: int, bad: int, causal: bool, dtype: torch.dtype
) -> None:
    query, key, _, mask = make_inputs(L, S, 40, mask=(L, S), kind="bool", dtype=dtype)
    key[..., bad, 1] = NAN
    stats = torch_attn.sdpa_stats(query, key, mask, causal)
    visible = mask.tril() if causal else mask
    sees = visible[:, bad].expand(2, 3, L)
    for name in NAMES[:3]:
        assert torch.equal(getattr(stats, name).isnan(), sees), name
    reached = (visible & visible[:, bad, None]).any(0).expand(2, 3, S)
    assert torch.equal(stats.received_weight.isnan(), reached)
    # Hidden from all rows, it is nowhere.
    mask[:, bad] = False
    stats = torch_attn.sdpa_stats(query, key, mask, causal)
    assert not any(t.isnan().any() for t in stats)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_mask", [False, True])
def test_infinite_scores(with_mask: bool, dtype: torch.dtype, kernels: str) -> None:
    """-inf is a key that is masked; +inf leaves its row without weights, as in softmax."""
    query, key = torch.ones(4, 2, dtype=dtype), torch.zeros(130, 2, dtype=dtype)
    key[:, 1] = torch.linspace(-1, 1, 130).to(dtype)
    query[1, 0], query[2, 0], key[7, 0] = -1, 1, INF
    query[0, 0] = query[3, 0] = 0  # 0 times inf is NaN
    mask = torch.zeros(4, 130, dtype=dtype) if with_mask else None
    stats = torch_attn.sdpa_stats(query, key, mask, scale=1.0)
    assert stats.largest_score.isnan().tolist() == [True, False, False, True]
    assert stats.logsumexp.isnan().tolist() == [True, False, False, True]
    assert stats.entropy.isnan().tolist() == [True, False, True, True]
    assert stats.largest_score[2] == stats.logsumexp[2] == INF
    assert stats.largest_weight[2].isnan()
    # Row 1 is as if key 7 were masked.
    others = torch.arange(130) != 7
    masked = torch_attn.sdpa_stats(query[1:2], key, others[None], scale=1.0)
    exact = textbook(Inputs(query[1:2], key[others], key[others]), torch.float64, scale=1.0)
    for name in NAMES[:3]:
        torch.testing.assert_close(getattr(stats, name)[1:2], getattr(masked, name))
        torch.testing.assert_close(
            getattr(stats, name)[1:2].double(), exact[name], rtol=1e-5, atol=1e-6
        )
    assert stats.received_weight.isnan().all()
    alone = torch_attn.sdpa_stats(query[1:2], key, None if mask is None else mask[1:2], scale=1.0)
    assert alone.received_weight[7] == 0
    assert alone.received_weight.isfinite().all()
    # +inf and NaN in one row: the NaN is not lost.
    both = key.clone()
    both[100, 0] = NAN
    assert torch_attn.sdpa_stats(query[2:3], both, scale=1.0).largest_score.isnan().all()
    assert torch_attn.sdpa_stats(query[2:3], both.flip(0), scale=1.0).logsumexp.isnan().all()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("L", [1, 7, 70])
@pytest.mark.parametrize("causal", [False, True])
def test_nothing_of_hidden_tiles_is_read(causal: bool, L: int, dtype: torch.dtype) -> None:
    S = 2000  # several splits, of which some see nothing
    inputs = make_inputs(L, S, 40, dtype=dtype)
    if not causal:
        inputs = inputs._replace(attn_mask=torch.arange(S).expand(L, S) < 100)
    clean = sdpa_stats(inputs, is_causal=causal)
    key = inputs.key.clone()
    key[..., 128:, :] = NAN
    dirty = sdpa_stats(inputs._replace(key=key), is_causal=causal)
    for name in NAMES:
        assert torch.equal(dirty[name], clean[name]), name
    assert (dirty["received_weight"][..., 100:] == 0).all()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "shape", [(2, 3, 0, 7), (2, 3, 5, 0), (0, 3, 5, 7), (2, 0, 5, 7), (2, 3, 0, 0)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_empty(causal: bool, shape: tuple[int, int, int, int]) -> None:
    batch, heads, L, S = shape
    query, key = torch.randn(batch, heads, L, 8), torch.randn(batch, heads, S, 8)
    stats = torch_attn.sdpa_stats(query, key, is_causal=causal)
    assert stats.entropy.shape == stats.largest_score.shape == (batch, heads, L)
    assert stats.received_weight.shape == (batch, heads, S)
    assert (stats.received_weight == 0).all()
    assert (stats.entropy == 0).all()
    assert (stats.logsumexp == -INF).all()
    assert (stats.largest_score == -INF).all()


@pytest.mark.usefixtures("kernels")
def test_head_dim_of_zero() -> None:
    """All scores are 0."""
    stats = torch_attn.sdpa_stats(torch.randn(5, 0), torch.randn(7, 0), scale=3.0)
    assert (stats.largest_score == 0).all()
    torch.testing.assert_close(stats.entropy, torch.full((5,), math.log(7)))


# --- layouts, threads, repeats --------------------------------------------------------------------


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("layout", "dtype"), PLACES)
def test_layouts(layout: str, dtype: torch.dtype) -> None:
    """Views are read where they lie, and nothing beside them."""
    inputs = make_inputs(67, 131, 24, mask=(2, 3, 67, 131), dtype=dtype, heads=3)
    expected = sdpa_stats(inputs)
    actual = sdpa_stats(inputs.map(LAYOUTS[layout]))
    for name in NAMES:
        assert torch.equal(actual[name], expected[name]), name


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


def run_guarded(capability: str, at_end: bool) -> int:
    """Many sizes between forbidden pages; the number of calls survived."""
    memories = [GuardedMemory(1 << 19, at_end) for _ in range(3)]
    calls = 0
    with cpu_capability_set_to(capability):
        for n, L in enumerate(LENGTHS):
            S = LENGTHS[(4 * n + 7) % len(LENGTHS)]
            for dtype in DTYPES:
                for E in (1, 7, 33):
                    mask, kind = (((1, S), "bool"), ((L, S), "float"))[(n + E) % 2]
                    query, key, _, bias = make_inputs(
                        L, S, E, batch=(), heads=1, mask=mask, kind=kind, dtype=dtype
                    )
                    tensors = (query, key, bias)
                    placed = (m.tensor(t) for m, t in zip(memories, tensors, strict=True))
                    torch_attn.sdpa_stats(*placed, is_causal=n % 2 == 0)
                    calls += 1
    return calls


@pytest.mark.parametrize("at_end", [True, False], ids=["after", "before"])
def test_nothing_is_read_beyond(cpu_capability: str, at_end: bool) -> None:
    calls = in_fresh_process(run_guarded, cpu_capability, at_end)
    assert calls == len(LENGTHS) * len(DTYPES) * 3


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_no_tensor_of_scores(causal: bool, dtype: torch.dtype) -> None:
    L = S = 512
    query, key, _, mask = make_inputs(L, S, batch=(), heads=1, mask=(1, S), dtype=dtype)
    with LargestAllocation() as most:
        torch_attn.sdpa_stats(query, key, mask, causal).largest_weight  # noqa: B018
    assert 0 < most.elements < L * S // 2
    with LargestAllocation() as most:
        reference.sdpa_stats(query, key, mask, causal)
    assert most.elements >= L * S


def peak_growth(length: int, dtype: torch.dtype) -> int:
    """How far resident memory rises in a call, once a small one has warmed up."""
    torch.set_num_threads(2)
    small, large = (make_inputs(n, n, batch=(), heads=1, dtype=dtype) for n in (64, length))
    sdpa_stats(small)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    stats = sdpa_stats(large)
    growth = resident("VmHWM") - before
    assert abs(stats["received_weight"].double().sum().item() - length) < 1e-3 * length
    return growth


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_of_a_long_sequence(dtype: torch.dtype) -> None:
    """16384 x 16384: the scores alone would be 1 GiB."""
    assert in_fresh_process(peak_growth, 16384, dtype) < 16 << 20


# --- derivatives: none, and it says so ------------------------------------------------------------

NO_DERIVATIVE = r"sdpa_stats: its results have no derivatives.*sdpa_with_weights.*detach"


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("argument", ["query", "key", "attn_mask"])
@pytest.mark.parametrize("name", NAMES)
def test_gradient_raises(name: str, argument: str) -> None:
    inputs = make_inputs(5, 7, mask=(5, 7))
    getattr(inputs, argument).requires_grad_()
    result = sdpa_stats(inputs)[name]
    assert result.requires_grad
    assert result.grad_fn.name() == "SdpaStatsBackward"
    with pytest.raises(RuntimeError, match=NO_DERIVATIVE):
        result.sum().backward()


@pytest.mark.usefixtures("device")
def test_logging_in_a_training_step() -> None:
    """The gradients of a loss that does not take them, whether detached or not."""
    inputs = make_inputs(5, 7).require_grad()
    expected = torch.autograd.grad(torch_attn.sdpa(*inputs).square().sum(), inputs[:3])
    output = torch_attn.sdpa(*inputs)
    stats = sdpa_stats(inputs)
    logged = {name: t.detach().mean().item() for name, t in stats.items()}
    assert all(map(math.isfinite, logged.values()))
    assert torch_attn.sdpa_stats(*inputs[:2]).entropy.mean().item() == logged["entropy"]
    actual = torch.autograd.grad(output.square().sum(), inputs[:3])
    assert all(map(torch.equal, actual, expected))
    with torch.no_grad():
        assert not any(t.requires_grad for t in sdpa_stats(inputs).values())


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("argument", ["query", "key", "attn_mask"])
# of PyTorch's own forward mode
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_forward_mode_raises(argument: str) -> None:
    inputs = make_inputs(5, 7, mask=(5, 7))
    with forward_ad.dual_level():
        tensor = getattr(inputs, argument)
        dual = forward_ad.make_dual(tensor, torch.ones_like(tensor))
        with pytest.raises(RuntimeError, match=NO_DERIVATIVE):
            sdpa_stats(inputs._replace(**{argument: dual}))
    with pytest.raises(RuntimeError, match=NO_DERIVATIVE):
        torch.func.jvp(
            lambda t: torch_attn.sdpa_stats(t, inputs.key), (inputs.query,), (inputs.query,)
        )


@pytest.mark.usefixtures("device")
def test_torch_func() -> None:
    """grad of a function that returns them besides; and of them."""
    query, key, value, _ = make_inputs(5, 7)

    def loss(query: Tensor) -> tuple[Tensor, Tensor]:
        output = torch_attn.sdpa(query, key, value)
        return output.sum(), torch_attn.sdpa_stats(query, key).entropy

    gradient, entropy = torch.func.grad(loss, has_aux=True)(query)
    assert torch.equal(entropy, torch_attn.sdpa_stats(query, key).entropy)
    assert gradient.shape == query.shape
    with pytest.raises(RuntimeError, match=NO_DERIVATIVE):
        torch.func.grad(lambda q: torch_attn.sdpa_stats(q, key).entropy.sum())(query)


def test_scale_that_wants_a_derivative() -> None:
    query = torch.randn(5, 8)
    message = r"^attn::sdpa_stats: scale is a tensor that wants a derivative .* pass scale.item\(\)"
    with pytest.raises(TypeError, match=message):
        torch_attn.sdpa_stats(query, query, scale=torch.tensor(1.0, requires_grad=True))
    expected = torch_attn.sdpa_stats(query, query, scale=0.5)
    actual = torch_attn.sdpa_stats(query, query, scale=torch.tensor(0.5))
    assert all(map(torch.equal, actual, expected))


# --- the parts of PyTorch -------------------------------------------------------------------------


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("kind", "dtype"), [(name, DTYPES[i % 4]) for i, name in enumerate(NAMED)])
def test_meta(kind: str, dtype: torch.dtype) -> None:
    inputs, options = make_named(kind, dtype)
    expected = check(inputs, **options)
    actual = sdpa_stats(inputs.map(lambda t: t.to("meta")), **options)
    for name in NAMES:
        assert actual[name].is_meta
        assert actual[name].shape == expected[name].shape, name
        assert actual[name].stride() == expected[name].stride(), name
        assert actual[name].dtype == expected[name].dtype, name


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("kind", [kind for kind in NAMED if kind != "no keys"])
@pytest.mark.parametrize("mapped", ["all", "query", "key", "mask"])
def test_vmap(mapped: str, kind: str) -> None:
    """As a loop over the samples; one call, whatever is mapped."""
    samples = [make_named(kind)[0] for _ in range(3)]
    options = NAMED[kind][1]
    if mapped == "mask" and samples[0].attn_mask is None:
        samples = [
            s._replace(attn_mask=torch.rand(s.query.size(-2), s.key.size(-2)) > 0.3)
            for s in samples
        ]
    names = ("query", "key", "attn_mask")
    chosen = {"all": names, "mask": ("attn_mask",)}.get(mapped, (mapped,))
    dims, arguments = [], []
    for name in names:
        is_mapped = name in chosen and getattr(samples[0], name) is not None
        tensors = [getattr(s, name) for s in samples]
        dims.append(1 if is_mapped else None)
        arguments.append(torch.stack(tensors, 1) if is_mapped else tensors[0])

    def call(query: Tensor, key: Tensor, mask: Tensor | None) -> Stats:
        return torch_attn.sdpa_stats(query, key, mask, **options)

    actual = torch.vmap(call, in_dims=tuple(dims))(*arguments)
    for i in range(3):
        sample = [a if d is None else a.select(d, i) for a, d in zip(arguments, dims, strict=True)]
        for name, expected in call(*sample)._asdict().items():
            torch.testing.assert_close(getattr(actual, name)[i], expected, msg=name)
    with torch.profiler.profile() as timeline:
        torch.vmap(call, in_dims=tuple(dims))(*arguments)
    below = [e for e in timeline.events() if e.name == "attn::sdpa_stats"]
    assert len(below) <= 2  # above vmap and below


def test_vmap_of_vmap_and_of_nothing() -> None:
    query, key = torch.randn(2, 3, 5, 8), torch.randn(2, 7, 8)
    inner = torch.vmap(torch_attn.sdpa_stats, in_dims=(0, None))
    actual = torch.vmap(inner)(query, key)
    expected = torch_attn.sdpa_stats(query, key[:, None])
    for name in NAMES:
        torch.testing.assert_close(getattr(actual, name), getattr(expected, name))
    nothing = torch.vmap(lambda x: torch_attn.sdpa_stats(query[0, 0], key[0]).entropy + 0 * x)
    alone = torch_attn.sdpa_stats(query[0, 0], key[0]).entropy
    assert torch.equal(nothing(torch.zeros(2, 1)), alone.expand(2, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    """The statistics of what sdpa computes there: scores of cast inputs, in float32."""
    query, key, _, mask = make_inputs(9, 13, mask=(9, 13))
    with torch.autocast("cpu", dtype):
        actual = torch_attn.sdpa_stats(query, key, mask)
    expected = torch_attn.sdpa_stats(*(t.to(dtype) for t in (query, key, mask)))
    for name in NAMES:
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
        assert getattr(actual, name).dtype == torch.float32
    with torch.autocast("cpu", dtype):
        assert torch_attn.sdpa_stats(query.double(), key.double()).entropy.dtype == torch.float64


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", ["plain", "mask", "grouped heads"])
def test_compile(kind: str, dynamic: bool) -> None:
    """One graph, the class that is returned included."""
    inputs, options = make_named(kind)
    query, key, _, mask = inputs

    def function(query: Tensor, key: Tensor, mask: Tensor | None) -> tuple[Stats, Tensor]:
        stats = torch_attn.sdpa_stats(query, key, mask, **options)
        return stats, stats.largest_weight

    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    stats, weight = compiled(query, key, mask)
    expected, expected_weight = function(query, key, mask)
    assert isinstance(stats, Stats)
    assert all(map(torch.equal, stats, expected))
    assert torch.equal(weight, expected_weight)


@pytest.mark.usefixtures("device")
@pytest.mark.filterwarnings("ignore:Error detected in SdpaStatsBackward")  # says where, too
def test_compiled_training_step() -> None:
    """Of detached query and key it runs; otherwise the compiler, which differentiates, is told."""
    inputs = make_inputs(5, 7)

    def step(detached: bool) -> Any:
        def function(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            output = torch_attn.sdpa(query, key, value)
            if detached:
                query, key = query.detach(), key.detach()
            return output.sum(), torch_attn.sdpa_stats(query, key).entropy

        torch.compiler.reset()
        leaves = inputs.require_grad()[:3]
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        loss, entropy = compiled(*leaves)
        return torch.autograd.grad(loss, leaves), entropy

    gradients, entropy = step(detached=True)
    leaves = inputs.require_grad()[:3]
    expected = torch.autograd.grad(torch_attn.sdpa(*leaves).sum(), leaves)
    assert all(map(torch.equal, gradients, expected))
    assert torch.equal(entropy, sdpa_stats(inputs)["entropy"])
    with pytest.raises(Exception, match=NO_DERIVATIVE):
        step(detached=False)


@pytest.mark.usefixtures("device")
def test_export() -> None:
    class Entropy(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
            return tuple(torch_attn.sdpa_stats(query, key, is_causal=True))

    query, key, _, _ = make_inputs(9, 13)
    batch, L, S = (torch.export.Dim(name) for name in ("batch", "L", "S"))
    program = torch.export.export(
        Entropy(), (query, key), dynamic_shapes=({0: batch, 2: L}, {0: batch, 2: S})
    )
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert targets[0] == ops.sdpa_stats.default
    query, key, _, _ = make_inputs(21, 34, batch=(5,))
    expected = torch_attn.sdpa_stats(query, key, is_causal=True)
    assert all(map(torch.equal, program.module()(query, key), expected))


def test_make_fx() -> None:
    inputs = make_inputs(5, 7)
    traced = make_fx(lambda *x: torch_attn.sdpa_stats(*x), tracing_mode="symbolic")(*inputs[:2])
    other = make_inputs(9, 11, batch=(4,))[:2]
    assert all(map(torch.equal, traced(*other), torch_attn.sdpa_stats(*other)))


def test_flops() -> None:
    """The scores twice, in every head of the query."""
    query, key, _, _ = make_inputs(5, 7, 16, heads=(4, 2, 2))
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        torch_attn.sdpa_stats(query, key, enable_gqa=True)
    assert counter.flop_counts["Global"] == {ops.sdpa_stats: 2 * 2 * (2 * 4) * 5 * 7 * 16}


@pytest.mark.parametrize("variant", ["upper_left", "lower_right"])
@pytest.mark.parametrize(("L", "S"), [(5, 7), (7, 5), (5, 5), (1, 4), (0, 3), (130, 67)])
def test_causal_bias(L: int, S: int, variant: str) -> None:
    from torch.nn.attention import bias

    inputs = make_inputs(L, S, heads=(4, 2, 2))
    mask = torch.ones(L, S, dtype=torch.bool).tril(S - L if variant == "lower_right" else 0)
    causal = getattr(bias, f"causal_{variant}")(L, S)
    actual = sdpa_stats(inputs._replace(attn_mask=causal), enable_gqa=True, scale=0.3)
    expected = sdpa_stats(inputs._replace(attn_mask=mask), enable_gqa=True, scale=0.3)
    for name in NAMES:
        torch.testing.assert_close(actual[name], expected[name], msg=name)
    with pytest.raises(ValueError, match="is_causal is True and attn_mask a CausalBias"):
        torch_attn.sdpa_stats(inputs.query, inputs.key, causal, is_causal=True)
    with pytest.raises(TypeError, match="key is a CausalBias"):
        torch_attn.sdpa_stats(inputs.query, causal, causal)


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
    "scale": ({"scale": NAN}, "scale is NaN"),
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


def test_schema() -> None:
    schema = str(ops.sdpa_stats.default._schema)
    assert "Tensor query, Tensor key, Tensor? attn_mask=None, bool is_causal=False" in schema
    results = ", ".join(f"Tensor {name}" for name in NAMES)
    assert schema.endswith(f"-> ({results})")
    assert torch.Tag.nondeterministic_seeded not in ops.sdpa_stats.default.tags
