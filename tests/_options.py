"""Calls with the options that the built-in lacks, and the formula that they are held to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import torch_attn
from _accuracy import Tensors, changed, differences, over_neighbours
from _in_order import sdpa_in_order
from helpers import LAYOUTS, make_mask, randn, to_dtype
from torch_attn import reference


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A call: its sizes, the shape of a mask, and its options; of slopes and sinks the shapes."""

    name: str
    sizes: tuple[int, ...] = (2, 4, 2, 70, 90, 8)  # B, Hq, Hk, L, S, E
    mask: tuple[int, ...] | None = None
    kind: str = "float"
    slopes: tuple[int, ...] | None = None
    sinks: tuple[int, ...] | None = None
    given: dict[str, Any] = dataclasses.field(default_factory=dict)  # see options
    steep: float = 1 / 8  # of the order of the slopes
    spread: float = 1.0  # about the standard deviation of scaled products
    of_output: bool = False  # gradients of the output alone: a row of dS sums to 0, but for a sink

    def __str__(self) -> str:
        return self.name

    @property
    def options(self) -> dict[str, Any]:
        """Tensors among them are on the device on which tensors are made now."""
        device = torch.empty(0).device
        return {n: o.to(device) if isinstance(o, Tensor) else o for n, o in self.given.items()}

    def tensors(self, dtype: torch.dtype) -> Tensors:
        """What may have a gradient, in memory that is otherwise NaN, and a boolean mask."""
        B, Hq, Hk, L, S, E = self.sizes
        tensors = {
            "query": randn((B, Hq, L, E), dtype) * self.spread,
            "key": randn((B, Hk, S, E), dtype),
            "value": randn((B, Hk, S, E + 4), dtype),
        }
        if self.mask is not None:
            tensors["attn_mask"] = make_mask(self.kind, self.mask, dtype)
        if self.slopes is not None:
            tensors["alibi_slopes"] = randn(self.slopes, dtype).abs() * self.steep
        if self.sinks is not None:
            tensors["sinks"] = 2 * randn(self.sinks, dtype)
        return {name: LAYOUTS["NaN before and after"](t) for name, t in tensors.items()}


ALL: dict[str, Any] = {
    "softcap": 2.0,
    "window_size": (40, 10),
    "query_offset": torch.tensor([20, -17]),
    "key_lengths": torch.tensor([90, 67]),
    "is_causal": True,
}
# Queries, keys, an offset and sinks: rows far from all keys, and near to some and far from others.
FAR: list[tuple[int, int, int, tuple[int] | None]] = [
    (64, 64, 1000, None),
    (70, 20, -(10**4), None),
    (300, 4, 0, None),
    (16, 1000, 984, None),
    (1, 1000, 999, None),
    (64, 64, 100, (4,)),
    (300, 20, 0, (4,)),
    (16, 1000, 984, (4,)),
]
# This order pairs no 900 with float16, which may not hold its second derivatives.
NEAR_THE_CAP = [(36.0, 50.0), (100.0, 30.0), (900.0, 30.0), (900.0, 1e10), (1.0, 1e-5)]
CASES = [
    Case("softcap", given={"softcap": 1.5}),
    Case("softcap with a mask", mask=(1, 4, 70, 90), given={"softcap": 1.5}),
    Case("window", given={"window_size": (37, 20)}),
    Case("window to the left", given={"window_size": (40, 0)}),
    Case("window to the right", mask=(2, 1, 1, 90), kind="bool", given={"window_size": (-1, 5)}),
    Case("window of one key", given={"window_size": (0, 0)}),
    Case("offset", given={"query_offset": torch.tensor([37, -5]), "is_causal": True}),
    Case("offset beyond all keys", given={"window_size": (3, 3), "query_offset": 1000}),
    Case("lengths", given={"key_lengths": torch.tensor([77, 0], dtype=torch.int32)}),
    Case("lengths with a mask", mask=(2, 1, 1, 90), given={"key_lengths": 77}),
    Case("ALiBi", slopes=(4,)),
    Case("ALiBi, one a sample", slopes=(2, 4), mask=(4, 70, 90), given={"is_causal": True}),
    Case("sinks", sinks=(4,)),
    Case("sinks, one a sample", (2, 4, 2, 70, 90, 16), (70, 90), "-inf", sinks=(2, 4)),
    Case("sinks alone", (2, 2, 2, 70, 90, 32), sinks=(2,)),
    Case("sinks and a mask of rows", sinks=(4,), mask=(4, 70, 1), given={"is_causal": True}),
    Case("sinks without keys", sinks=(4,), given={"window_size": (5, 5), "query_offset": -70}),
    Case("all", mask=(70, 90), slopes=(4,), sinks=(4,), given=ALL),
    Case("all, no mask", (2, 3, 3, 65, 90, 20), None, slopes=(2, 3), sinks=(3,), given=ALL),
    Case("negative scale", slopes=(4,), sinks=(4,), given={"softcap": 3.0, "scale": -0.5}),
    Case("few queries", (2, 4, 2, 2, 150, 64), None, "", (4,), (4,), {**ALL, "query_offset": 140}),
    Case(
        "few queries, a window",
        (2, 4, 1, 1, 900, 40),
        given={"window_size": (200, 0), "query_offset": 850},
    ),
    *(
        Case(
            f"rows at {offset}{', sinks' * bool(sinks)}",
            (1, 4, 2, L, S, 64),
            None,
            "",
            (4,),
            sinks,
            {"query_offset": offset},
            steep=8 / max(abs(offset), L),
            of_output=True,
        )
        for L, S, offset, sinks in FAR
    ),
    *(
        Case(
            f"scores of {spread} and a cap of {cap}",
            (1, 2, 2, 40, 50, 64),
            given={"softcap": cap},
            spread=spread,
        )
        for spread, cap in NEAR_THE_CAP
    ),
    Case("many keys", (1, 2, 1, 3, 2100, 32), sinks=(2,), given={"key_lengths": 1999}),
    Case(
        "many keys, a window",
        (1, 1, 1, 70, 2100, 8),
        given={"window_size": (600, 0), "query_offset": 1600},
    ),
]


def attention(x: Tensors, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch_attn.sdpa_with_logsumexp(**x, enable_gqa=True, **options)


def stats_of(x: Tensors, sdpa: Any = torch_attn, **options: Any) -> torch_attn.Stats:
    """The statistics, by torch_attn or the textbook: what does not depend on the value."""
    of_scores = {name: t for name, t in x.items() if name != "value"}
    return torch_attn.Stats(*sdpa.sdpa_stats(**of_scores, enable_gqa=True, **options))


def formula(x: Tensors, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Computes in float64, or as the math backend does: in float32, the output rounded."""
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


def factor_of(dtype: torch.dtype) -> float:
    """The factor from errors in float32 to errors in float64, because they grow with eps.

    Twice as much, because the reference makes them too.
    """
    eps = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    return 2 * eps if dtype == torch.float64 else 1


def errors_of_formula(x: Tensors, u: Tensors, t: Tensors, **options: Any) -> dict[str, float]:
    """The largest of several problems alike, in the precision of the inputs."""
    dtype = x["query"].dtype

    def errors(problem: list[Tensors]) -> Iterator[tuple[str, float]]:
        at = [to_32(some) if dtype == torch.float64 else some for some in problem]
        found = everything(formula, *at, **options)
        expected = everything(formula, *map(to_64, at), **options)
        yield from ((n, factor_of(dtype) * e) for n, e in differences(found, expected))

    changes = (True,) * 6
    return over_neighbours([x, u, t], errors, lambda p, _: [changed(some) for some in p], changes)


def errors_of_algorithms(
    x: Tensors, solve: Callable[[Callable[..., Tensor], Tensors], Tensors]
) -> dict[str, float]:
    """The formula's errors in what `solve` finds with it, as `errors_of_formula`.

    In float32 also its algorithm's errors with the sums in an order of our own (`_in_order.py`): in
    problems of few numbers, the order of one processor may be lucky.
    """
    dtype = x["query"].dtype
    algorithms = [reference.sdpa, *([sdpa_in_order] if dtype == torch.float32 else [])]

    def errors(x: Tensors) -> Iterator[tuple[str, float]]:
        exact = solve(reference.sdpa, to_64(x))
        for sdpa in algorithms:
            found = solve(sdpa, to_32(x))
            yield from differences({n: t.to(dtype) for n, t in found.items()}, exact)

    return over_neighbours(x, errors, lambda x, _: changed(x))


def to_64(tensors: Tensors) -> Tensors:
    return {name: to_dtype(t, torch.float64) for name, t in tensors.items()}


def to_32(tensors: Tensors) -> Tensors:
    return {name: to_dtype(t, torch.float32) for name, t in tensors.items()}


def drawn(case: Case, dtype: torch.dtype) -> tuple[Tensors, Tensors, Tensors]:
    """Inputs, gradients of the results, and a direction."""
    x = case.tensors(dtype)
    output, logsumexp, _ = attention(x, **case.options)
    u = {"output": randn(output.shape, dtype), "logsumexp": randn(logsumexp.shape, logsumexp.dtype)}
    u["logsumexp"] *= not case.of_output
    t = {name: randn(t.shape, t.dtype) for name, t in x.items() if t.is_floating_point()}
    if "alibi_slopes" in t:
        t["alibi_slopes"] *= case.steep  # distances make them large
    return x, u, t
