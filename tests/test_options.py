"""The options that the built-in has not: windows, offsets, lengths, soft cap, ALiBi, sinks.

Held to the formula composed of PyTorch's operators, as the built-in's math backend composes its
own: half types computed in float32 and rounded once, at the end.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_attn
from _accuracy import hold, means_something
from _memory import in_guarded_memory, largest_block
from helpers import (
    CPU_CAPABILITIES,
    DTYPES,
    INF,
    LAYOUTS,
    NAN,
    assert_same_bits,
    cpu_capability_set_to,
    in_fresh_process,
    largest,
    make_mask,
    randn,
    to_dtype,
)
from torch_attn import reference

# of PyTorch's, by its own forward mode
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

TILE = 64
DIFFERENTIABLE = ("query", "key", "value", "attn_mask", "alibi_slopes", "sinks")
Tensors = dict[str, Tensor]


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A call: its sizes, the shape of a mask, and its options; of slopes and sinks the shapes."""

    name: str
    sizes: tuple[int, ...] = (2, 4, 2, 70, 90, 8)  # B, Hq, Hk, L, S, E
    mask: tuple[int, ...] | None = None
    kind: str = "float"
    slopes: tuple[int, ...] | None = None
    sinks: tuple[int, ...] | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def tensors(self, dtype: torch.dtype) -> Tensors:
        """What may have a gradient, in memory that is otherwise NaN, and a boolean mask."""
        B, Hq, Hk, L, S, E = self.sizes
        tensors = {
            "query": randn((B, Hq, L, E), dtype),
            "key": randn((B, Hk, S, E), dtype),
            "value": randn((B, Hk, S, E + 4), dtype),
        }
        if self.mask is not None:
            tensors["attn_mask"] = make_mask(self.kind, self.mask, dtype)
        if self.slopes is not None:
            tensors["alibi_slopes"] = randn(self.slopes, dtype).abs() / 8
        if self.sinks is not None:
            tensors["sinks"] = 2 * randn(self.sinks, dtype)
        return {name: LAYOUTS["NaN before and after"](t) for name, t in tensors.items()}


def _window(left: int, right: int) -> dict[str, Any]:
    return {"window_size": (left, right)}


ALL: dict[str, Any] = {
    "softcap": 2.0,
    "window_size": (40, 10),
    "query_offset": torch.tensor([20, -17]),
    "key_lengths": torch.tensor([90, 67]),
    "is_causal": True,
}
CASES = [
    Case("softcap", options={"softcap": 1.5}),
    Case("softcap with a mask", mask=(1, 4, 70, 90), options={"softcap": 1.5}),
    Case("window", options=_window(37, 20)),
    Case("window to the left", options=_window(40, 0)),
    Case("window to the right", mask=(2, 1, 1, 90), kind="bool", options=_window(-1, 5)),
    Case("window of one key", options=_window(0, 0)),
    Case("offset", options={"query_offset": torch.tensor([37, -5]), "is_causal": True}),
    Case("offset beyond all keys", options={**_window(3, 3), "query_offset": 1000}),
    Case("lengths", options={"key_lengths": torch.tensor([77, 0], dtype=torch.int32)}),
    Case("lengths with a mask", mask=(2, 1, 1, 90), options={"key_lengths": 77}),
    Case("ALiBi", slopes=(4,)),
    Case("ALiBi, one a sample", slopes=(2, 4), mask=(4, 70, 90), options={"is_causal": True}),
    Case("sinks", sinks=(4,)),
    Case("sinks, one a sample", (2, 4, 2, 70, 90, 16), (70, 90), "-inf", sinks=(2, 4)),
    Case("sinks alone", (2, 2, 2, 70, 90, 32), sinks=(2,)),
    Case("sinks and a mask of rows", sinks=(4,), mask=(4, 70, 1), options={"is_causal": True}),
    Case("sinks without keys", sinks=(4,), options={**_window(5, 5), "query_offset": -70}),
    Case("all", mask=(70, 90), slopes=(4,), sinks=(4,), options=ALL),
    Case("all, no mask", (2, 3, 3, 65, 90, 20), None, slopes=(2, 3), sinks=(3,), options=ALL),
    Case("negative scale", slopes=(4,), sinks=(4,), options={"softcap": 3.0, "scale": -0.5}),
    Case("few queries", (2, 4, 2, 2, 150, 64), None, "", (4,), (4,), {**ALL, "query_offset": 140}),
    Case(
        "few queries, a window",
        (2, 4, 1, 1, 900, 40),
        options={**_window(200, 0), "query_offset": 850},
    ),
    Case("many keys", (1, 2, 1, 3, 2100, 32), sinks=(2,), options={"key_lengths": 1999}),
    Case(
        "many keys, a window",
        (1, 1, 1, 70, 2100, 8),
        options={**_window(600, 0), "query_offset": 1600},
    ),
]


def attention(x: Tensors, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch_attn.sdpa_with_logsumexp(**x, enable_gqa=True, **options)


def formula(x: Tensors, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """In float64, or as the math backend computes: in float32, the output rounded."""
    dtype = x["query"].dtype
    wide = {
        name: t.float() if dtype.itemsize == 2 and t.is_floating_point() else t
        for name, t in x.items()
    }
    output, logsumexp, max_score = reference.sdpa_with_logsumexp(**wide, enable_gqa=True, **options)
    return output.to(dtype), logsumexp, max_score


Operator = Callable[..., tuple[Tensor, Tensor, Tensor]]


def everything(f: Operator, x: Tensors, u: Tensors, t: Tensors, **options: Any) -> Tensors:
    """Results, the gradients for `u`, and the derivatives of all along the direction `t`."""
    leaves = {name: tensor for name, tensor in x.items() if tensor.is_floating_point()}

    def gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
        def results(*tensors: Tensor) -> tuple[Tensor, Tensor]:
            return f({**x, **dict(zip(leaves, tensors, strict=True))}, **options)[:2]

        found, pullback = torch.func.vjp(results, *tensors)
        return (*found, *pullback((u["output"], u["logsumexp"])))

    point, along = torch.func.jvp(gradients, tuple(leaves.values()), tuple(t[n] for n in leaves))
    names = ["output", "logsumexp", *(f"grad_{name}" for name in leaves)]
    with torch.no_grad():  # other kernels, if there are few queries
        output, logsumexp, max_score = f(x, **options)
    return {
        **dict(zip(names, point, strict=True)),
        **{f"d {name}": d for name, d in zip(names, along, strict=True)},
        "output alone": output,
        "logsumexp alone": logsumexp,
        "max_score": max_score,
    }


def changed(tensors: Tensors) -> Tensors:
    """Every number changed by up to a percent: rounding errors of their own."""

    def change(t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return t
        return torch.where(t.isfinite(), t * (0.99 + 0.02 * torch.rand(t.shape)).to(t.dtype), t)

    return {name: change(t) for name, t in tensors.items()}


def errors_of_formula(x: Tensors, u: Tensors, t: Tensors, **options: Any) -> dict[str, float]:
    """The largest of several problems alike, in the precision of the inputs."""
    worst: dict[str, float] = {}
    exact = x["query"].dtype == torch.float64
    for _ in range(6):
        at = [to_32(some) if exact else some for some in (x, u, t)]
        found = everything(formula, *at, **options)
        expected = everything(formula, *map(to_64, at), **options)
        # Errors grow with eps: of float64 take those of float32, scaled, twice as the reference
        # makes them too.
        factor = 2 * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps if exact else 1
        for name, result in found.items():
            finite = expected[name].isfinite()
            error = factor * largest((result.double() - expected[name])[finite])
            worst[name] = max(error, worst.get(name, 0.0))
        x, u, t = changed(x), changed(u), changed(t)
    return worst


def to_64(tensors: Tensors) -> Tensors:
    return {name: to_dtype(t, torch.float64) for name, t in tensors.items()}


def to_32(tensors: Tensors) -> Tensors:
    return {name: to_dtype(t, torch.float32) for name, t in tensors.items()}


def drawn(case: Case, dtype: torch.dtype) -> tuple[Tensors, Tensors, Tensors]:
    """Inputs, gradients of the results, and a direction."""
    x = case.tensors(dtype)
    output, logsumexp, _ = attention(x, **case.options)
    u = {"output": randn(output.shape, dtype), "logsumexp": randn(logsumexp.shape, logsumexp.dtype)}
    t = {name: randn(t.shape, t.dtype) for name, t in x.items() if t.is_floating_point()}
    if "alibi_slopes" in t:
        t["alibi_slopes"] /= 8  # of the order of the slopes: distances make them large
    return x, u, t


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
    """In float64, and the largest error of the formula in each, of several problems alike."""
    torch.manual_seed(0)
    problem = drawn(case, dtype)
    results = everything(formula, *map(to_64, problem), **case.options)
    errors = errors_of_formula(*problem, **case.options)
    means_something(
        {n: e for n, e in errors.items() if not n.startswith("d ")},
        {n: e.masked_fill(e.isinf(), 0) for n, e in results.items()},
    )
    return results, errors


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_and_weights(dtype: torch.dtype) -> None:
    """A sink is in the denominator, and no score."""
    case = next(c for c in CASES if c.name == "all")
    x = case.tensors(dtype)
    of_scores = {name: t for name, t in x.items() if name != "value"}
    stats = torch_attn.sdpa_stats(**of_scores, enable_gqa=True, **case.options)
    output, weights, scores = torch_attn.sdpa_with_weights(**x, enable_gqa=True, **case.options)
    wide = to_64(x)
    arguments = {"enable_gqa": True, **case.options}
    expected = reference.sdpa_stats(**to_64(of_scores), **arguments)
    _, exact_weights, exact_scores = reference.sdpa_with_weights(**wide, **arguments)
    small = {n: t.float() if dtype.itemsize == 2 else to_32({n: t})[n] for n, t in x.items()}
    rough = reference.sdpa_stats(**{n: t for n, t in small.items() if n != "value"}, **arguments)
    for name, actual, exact, other in zip(stats._fields, stats, expected, rough, strict=True):
        finite = [r.double().masked_fill(r.isinf(), 0) for r in (actual, exact, other)]
        hold(name, *finite[:2], largest(finite[2] - finite[1]), dtype)
    assert torch.equal(scores == -INF, exact_scores == -INF)
    rough_weights = reference.sdpa_with_weights(**small, **arguments)[1].to(dtype)
    hold("weights", weights, exact_weights, largest(rough_weights - exact_weights), dtype)
    assert (weights.double().sum(-1) < 1).all()
    assert torch.equal(output, torch_attn.sdpa(**x, enable_gqa=True, **case.options))


# ------------------------------------------------------------------------------------------------
# What the options mean


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
def test_causality_is_a_window(dtype: torch.dtype) -> None:
    """To the bit, in every result."""
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
def test_numbers_stand_for_tensors() -> None:
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
@pytest.mark.parametrize("sink", [-INF, -1e4, 0.0, 1e4])
def test_sinks_of_any_size(sink: float) -> None:
    """None at all, softmax-1, and one that takes all of the weight."""
    x = Case("x").tensors(torch.float64)
    sinks = torch.full((4,), sink, dtype=torch.float64)
    output, logsumexp, max_score = attention(x, sinks=sinks)
    expected = formula(x, sinks=sinks)
    torch.testing.assert_close((output, logsumexp, max_score), expected, rtol=1e-12, atol=1e-14)
    if sink == -INF:
        torch.testing.assert_close(
            output, torch_attn.sdpa(**x, enable_gqa=True), rtol=0, atol=1e-15
        )


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [12.0, 0.1])
def test_the_least_sink_over_no_keys(dtype: torch.dtype, scale: float) -> None:
    """As a product it has an exponent that overflows."""
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
    """They cap nothing, or everything; also in the formulas that differentiate weights."""
    x = {n: t.requires_grad_() for n, t in Case("x").tensors(dtype).items()}

    def gradients(softcap: float) -> tuple[Tensor, ...]:
        weights = torch_attn.sdpa_with_weights(**x, enable_gqa=True, softcap=softcap)[1]
        return torch.autograd.grad(weights.square().sum(), [x["query"], x["key"]])

    torch.testing.assert_close(gradients(beyond), gradients(within))


@pytest.mark.usefixtures("kernels")
def test_a_sink_of_nan_makes_its_head_nan() -> None:
    x = Case("x").tensors(torch.float32)
    output, logsumexp, _ = attention(
        x, sinks=torch.tensor([0.0, NAN, 0.0, 0.0]), key_lengths=torch.tensor([9, 0])
    )
    for result in (output, logsumexp[..., None]):
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


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_merge(dtype: torch.dtype) -> None:
    """The results over two parts of the keys give those over all, by their logsumexps."""
    x = Case("x").tensors(dtype)
    output, logsumexp, max_score = attention(x)
    parts = [
        attention({**x, "key": x["key"][:, :, part], "value": x["value"][:, :, part]})
        for part in (slice(0, 70), slice(70, None))
    ]
    sums = torch.stack([part[1] for part in parts])
    weights = (sums - sums.logsumexp(0)).exp()
    merged = sum(w[..., None] * part[0].to(w.dtype) for w, part in zip(weights, parts, strict=True))
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(merged.double(), output.double(), atol=8 * eps, rtol=0)
    torch.testing.assert_close(
        sums.logsumexp(0), logsumexp, atol=8 * torch.finfo(sums.dtype).eps * 8, rtol=0
    )
    assert torch.equal(torch.maximum(parts[0][2], parts[1][2]), max_score)


# ------------------------------------------------------------------------------------------------
# What the options promise


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("L", "dtype"), [(L, dtype) for L in (1, 70, 300) for dtype in DTYPES])
def test_nothing_beyond_the_length_is_read(L: int, dtype: torch.dtype) -> None:
    """Keys, values and the mask may hold anything there; the same bits, and gradients of 0."""
    S, lengths = 260, torch.tensor([130, 70])
    case = Case(
        "x", (2, 4, 2, L, S, 16), mask=(2, 1, L, S), sinks=(4,), options={"key_lengths": lengths}
    )
    x, u, t = drawn(case, dtype)
    clean = everything(attention, x, u, t, **case.options)
    beyond = torch.arange(S) >= lengths[:, None]

    def spoilt(tensors: Tensors) -> Tensors:
        of_keys = beyond[:, None, :, None]
        return {
            **tensors,
            "key": tensors["key"].masked_fill(of_keys, NAN),
            "value": tensors["value"].masked_fill(of_keys, INF),
            "attn_mask": tensors["attn_mask"].masked_fill(beyond[:, None, None], NAN),
        }

    found = everything(attention, spoilt(x), u, spoilt(t), **case.options)
    assert_same_bits(found, clean)
    for name in ("grad_key", "grad_value", "d grad_key", "d grad_value"):
        assert (found[name][beyond[:, None].expand(2, 2, S)] == 0).all()
    for name in ("grad_attn_mask", "d grad_attn_mask"):
        assert (found[name][beyond[:, None, None].expand(2, 1, L, S)] == 0).all()


@pytest.mark.parametrize("of", ["weights", "third derivative"])
def test_formulas_do_not_read_beyond_the_length(of: str) -> None:
    """Nor a direction there: derivatives that no kernel computes."""
    S, used = 9, 6
    point, along = (
        {name: torch.randn(2, 1, S, 4, dtype=torch.float64) for name in ("query", "key", "value")}
        for _ in range(2)
    )

    def derivative(keys: slice, **options: Any) -> tuple[Tensor, ...]:
        x, t = (
            {n: a if n == "query" else a[:, :, keys] for n, a in d.items()} for d in (point, along)
        )
        leaves = [a.clone().requires_grad_() for a in x.values()]
        if of == "weights":
            result = torch_attn.sdpa_with_weights(*leaves, **options)[1].square().sum()
        else:
            (result,) = torch.autograd.grad(
                torch_attn.sdpa(*leaves, **options).square().sum(), leaves[:1], create_graph=True
            )
            (result,) = torch.autograd.grad(result.square().sum(), leaves[:1], create_graph=True)
        first = torch.autograd.grad(result.square().sum(), leaves[:2], create_graph=True)
        return torch.autograd.grad(first, leaves[:2], [*t.values()][:2])

    expected = derivative(slice(used))
    for tensors in (point, along):
        tensors["key"][:, :, used:] = tensors["value"][:, :, used:] = NAN
    query, key = derivative(slice(None), key_lengths=used)
    torch.testing.assert_close((query, key[:, :, :used]), expected)
    assert not key[:, :, used:].any()


def attend_up_to_lengths(capability: str) -> None:
    """In a process of its own, which a read of anything that belongs to a key beyond ends."""
    S = 200
    torch.manual_seed(0)
    lengths = ((0, 1), (64, 133), (197, 200))
    for n, (used, L) in enumerate(itertools.product(lengths, (1, 7, 100))):
        options = {"key_lengths": torch.tensor(used)}
        case = Case("x", (2, 4, 2, L, S, 20), (2, 1, 1, S) if n % 2 else None, options=options)
        for dtype in DTYPES:
            x, u, t = drawn(case, dtype)
            for tensors, name in itertools.product((x, t), {"key", "value", "attn_mask"} & {*x}):
                of_keys = tensors[name].mT if name == "attn_mask" else tensors[name]
                guarded = in_guarded_memory(of_keys, used)
                tensors[name] = guarded.mT if name == "attn_mask" else guarded
            with cpu_capability_set_to(capability):
                found = everything(attention, x, u, t, **options)
                of_scores = {name: a for name, a in x.items() if name != "value"}
                torch_attn.sdpa_stats(**of_scores, enable_gqa=True, **options)
                torch_attn.sdpa_with_weights(**x, enable_gqa=True, **options)
            assert found["grad_value"].isfinite().all()


@pytest.mark.parametrize("cpu_capability", CPU_CAPABILITIES)
def test_nothing_beyond_the_length_is_touched(cpu_capability: str) -> None:
    in_fresh_process(attend_up_to_lengths, cpu_capability)


EVERY: dict[str, Any] = {
    "attn_mask": lambda S: torch.randn(1, S),
    "alibi_slopes": lambda S: torch.rand(2),
    "sinks": lambda S: torch.randn(2),
    "softcap": 2.0,
    "window_size": (100, 30),
    "query_offset": torch.tensor([37]),
    "key_lengths": torch.tensor([1999]),
    "is_causal": True,
    "dropout_p": 0.3,
}


@pytest.mark.parametrize(
    "names",
    [*itertools.combinations(EVERY, 1), *itertools.combinations(EVERY, 2), tuple(EVERY)],
    ids="-".join,
)
def test_memory_is_linear(names: tuple[str, ...]) -> None:
    """No L x S, not even in bytes; with one query no copy of the keys."""

    def drawn_for(L: int, S: int, E: int) -> Tensors:
        shapes = {"query": (1, 2, L, E), "key": (1, 1, S, E), "value": (1, 1, S, E)}
        given = {name: EVERY[name](S) for name in names if callable(EVERY[name])}
        return {name: torch.randn(shape) for name, shape in shapes.items()} | given

    options = {name: EVERY[name] for name in names if not callable(EVERY[name])}
    of_scores = {name: value for name, value in options.items() if name != "dropout_p"}
    x, one = drawn_for(2048, 2048, 8), drawn_for(1, 16384, 64)
    u = {"output": torch.randn(x["query"].shape), "logsumexp": torch.randn(1, 2, 2048)}
    t = {name: torch.randn(tensor.shape) for name, tensor in x.items()}

    def stats(x: Tensors) -> None:
        scores = {name: tensor for name, tensor in x.items() if name != "value"}
        torch_attn.sdpa_stats(**scores, enable_gqa=True, **of_scores)

    assert largest_block(lambda: everything(attention, x, u, t, **options)) < 2048 * 2048
    assert largest_block(lambda: stats(x)) < 2048 * 2048
    with torch.no_grad():
        assert largest_block(lambda: attention(one, **options)) < one["key"].nbytes / 4
        assert largest_block(lambda: stats(one)) < one["key"].nbytes / 4


def test_a_block_of_scores_would_be_noticed() -> None:
    x = {name: torch.randn(1, 1, 2048, 8) for name in ("query", "key", "value")}
    assert largest_block(lambda: formula(x)) >= 2048 * 2048


@pytest.mark.regression
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_in_grad_output_stays_before_the_length(dtype: torch.dtype) -> None:
    """Within the tile too, where it meets weights of 0."""
    sizes = {"query": 20, "key": 130, "value": 130}
    x = {name: randn((2, 2, n, 16), dtype).requires_grad_() for name, n in sizes.items()}
    lengths = torch.tensor([70, 0])
    output = torch_attn.sdpa(**x, key_lengths=lengths)
    grad_output = randn(output.shape, dtype)
    grad_output[..., 7, 3] = NAN
    output.backward(grad_output)
    beyond = torch.arange(130) >= lengths[:, None]
    for name in ("key", "value"):
        assert (x[name].grad.transpose(1, 2)[beyond] == 0).all()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.usefixtures("kernels")
def test_same_bits_with_any_number_of_threads(threads: int) -> None:
    case = next(c for c in CASES if c.name == "all")
    x, u, t = drawn(case, torch.float32)
    expected = everything(attention, x, u, t, **case.options)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = everything(attention, x, u, t, **case.options)
    finally:
        torch.set_num_threads(before)
    assert_same_bits(found, expected)


OPTIONS: dict[str, Callable[[], Any]] = {
    "softcap": lambda: 2.0,
    "window_size": lambda: (2, 1),
    "query_offset": lambda: torch.tensor([1, -1]),
    "key_lengths": lambda: torch.tensor([5, 3]),
    "alibi_slopes": lambda: torch.rand(2, dtype=torch.float64, requires_grad=True),
    "sinks": lambda: torch.randn(2, dtype=torch.float64, requires_grad=True),
    "attn_mask": lambda: torch.randn(3, 5, dtype=torch.float64, requires_grad=True),
    "is_causal": lambda: True,
}
TOGETHER = [
    *((name,) for name in OPTIONS),
    *random.Random(0).sample([*itertools.combinations(OPTIONS, 2)], 8),
    *random.Random(1).sample([*itertools.combinations(OPTIONS, 3)], 6),
    tuple(OPTIONS),
]


@pytest.mark.parametrize("names", TOGETHER, ids="-".join)
def test_gradcheck(names: tuple[str, ...]) -> None:
    """First and second derivatives, forward mode and batches, of each option and of several."""
    options = {name: OPTIONS[name]() for name in names}
    options |= {
        "query": torch.randn(2, 2, 3, 4),
        "key": torch.randn(2, 1, 5, 4),
        "value": torch.randn(2, 1, 5, 2),
    }
    options = {
        n: o.double().requires_grad_() if n in ("query", "key", "value") else o
        for n, o in options.items()
    }
    leaves = {n: o for n, o in options.items() if isinstance(o, Tensor) and o.requires_grad}

    def function(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        given = {**options, **dict(zip(leaves, tensors, strict=True))}
        output, logsumexp, _ = torch_attn.sdpa_with_logsumexp(**given, enable_gqa=True)
        return output, logsumexp.masked_fill(logsumexp == -INF, 0)

    inputs = tuple(leaves.values())
    assert torch.autograd.gradcheck(
        function, inputs, check_forward_ad=True, check_batched_grad=True, fast_mode=True
    )
    assert torch.autograd.gradgradcheck(function, inputs, check_fwd_over_rev=True, fast_mode=True)


# ------------------------------------------------------------------------------------------------
# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": -1.0}, r"softcap is -1; it must be a finite number, 0 for none or above"),
        ({"softcap": INF}, r"softcap is inf; it must be a finite number"),
        ({"window_size": (-2, 0)}, r"window_size is \(-2, 0\); each of \(left, right\) must be -1"),
        ({"query_offset": 2**62}, r"query_offset is 4611686018427387904; it must be between"),
        (
            {"query_offset": torch.tensor([1.0, 2.0])},
            r"query_offset has dtype Float; it must be int32 or",
        ),
        (
            {"query_offset": torch.zeros(3, dtype=torch.long)},
            r"query_offset has shape \[3\]; it must be one",
        ),
        (
            {"key_lengths": torch.tensor([3, 10])},
            r"key_lengths is 10 at entry 1; it must be between 0 and 9",
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
    with pytest.raises(RuntimeError, match=f"attn::sdpa: {message}"):
        torch_attn.sdpa(query, key, key, **options)
    with pytest.raises(RuntimeError, match=f"attn::sdpa_stats: {message}"):
        torch_attn.sdpa_stats(query, key, **options)


@pytest.mark.parametrize("window", [(1, 2, 3), (1,), ()])
def test_a_window_is_a_pair(window: Any) -> None:
    x = torch.randn(2, 4, 5, 8)
    with pytest.raises(ValueError, match="it must be a pair"):
        torch_attn.sdpa(x, x, x, window_size=window)


def test_lengths_changed_in_place_are_seen() -> None:
    """As autograd has it for every tensor that a backward needs."""
    x = torch.randn(2, 4, 5, 8, requires_grad=True)
    lengths = torch.tensor([3, 5])
    output = torch_attn.sdpa(x, x, x, key_lengths=lengths)
    lengths += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
