"""Runs a problem, holds its results to the bounds, and makes what fails small."""

from __future__ import annotations

import dataclasses
import math
import time
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .bound import arithmetic, bounds
from .problem import LACKS, ON_CUDA, Integers, Problem
from .textbook import Textbook

# What is said of a problem beside its tensors and its call: lines that end with an assertion.
NAN_REACHES = """
dirty = {**x, NAME: x[NAME].masked_fill(bad, BAD)}
clean, dirty = solve(sdpa, x, *more, **options), solve(sdpa, dirty, *more, **options)
xs = double_all(x)
flat = {"key": 0 * xs["key"], "attn_mask": x["attn_mask"]}
shape = clean["output"].shape[:-1] + x["query"].shape[-1:]  # options may have any of its sizes
flat["query"] = torch.zeros(shape, dtype=torch.float64)
flat["value"] = torch.ones(*xs["value"].shape[:-1], 1, dtype=torch.float64)
if x["attn_mask"] is not None and x["attn_mask"].dtype != torch.bool:
    flat["attn_mask"] = x["attn_mask"] != -inf
has_keys = reference.sdpa(**flat, **options) > 0
rows = bad.any(-1, keepdim=True).double()
if NAME == "query":  # its row, unless that attends to nothing
    must = may = has_keys & (rows > 0)
elif NAME == "key":  # the rows that attend to it
    groups = x["key"].shape[:-1] if options.get("enable_gqa") else rows.shape[:-1]
    flat["value"] = rows.expand(*groups, 1)
    must = may = reference.sdpa(**flat, **options) > 0
    must, may = (a.expand(*clean["output"].shape[:-1], 1) for a in (must, may))
elif NAME == "value":  # its column, in any row of its head; where the row attends to it, it has to
    must = reference.sdpa(**{**xs, "value": bad.double()}, **options) > 1e-20
    flat["value"], flat["attn_mask"] = bad.double(), None
    lengths = {n: a for n, a in options.items() if n in ("key_lengths", "enable_gqa")}
    may = reference.sdpa(**flat, **lengths) > 0
else:  # its head, and of slopes what attends to something
    must = may = bad[..., None, None] & (has_keys | (NAME == "sinks"))
for n in clean:
    has_to, can = must, may
    if n in ("logsumexp", "max_score"):
        of_scores = torch.tensor(NAME != "value")
        has_to = must.any(-1) & of_scores & ((NAME != "sinks") | (n == "logsumexp"))
        can = may.any(-1) & of_scores
    lost = has_to & ~dirty[n].isnan() & (BAD != BAD)
    print(n, "NaNs that are lost:", lost.sum().item())
    assert not lost.any(), f"{n}: NaNs are lost"
    touched = ~can & (dirty[n] != clean[n])
    print(n, "numbers changed that may not be reached:", touched.sum().item())
    assert not touched.any(), f"{n}: numbers are changed that may not be reached"
"""
HIDDEN_KEYS = """
mask, S = x["attn_mask"], x["key"].size(-2)
hidden = torch.arange(S) >= (S + 1) // 2
x["attn_mask"] = mask.masked_fill(hidden, False if mask.dtype == torch.bool else -inf)
# of one layout, which the bits of ATen depend on
x["key"] = x["key"].clone(memory_format=torch.contiguous_format)
dirty = {**x, "key": x["key"].masked_fill(hidden[:, None], BAD)}
spoilt = more[:1] + [
    {n: a.masked_fill(hidden[:, None], BAD) if n == "key" else a for n, a in t.items()}
    for t in more[1:]
]
clean, dirty = solve(sdpa, x, *more, **options), solve(sdpa, dirty, *spoilt, **options)
for n in clean:
    changed = (dirty[n] != clean[n]).sum().item()
    print(n, "numbers changed by keys that no query sees:", changed)
    assert changed == 0, f"{n}: numbers are changed by keys that no query sees"
"""
SAME_BITS = """
first = solve(sdpa, x, *more, **options)
for threads in (1, 2, 3):
    torch.set_num_threads(threads)
    torch.manual_seed(7)
    again = solve(sdpa, x, *more, **options)
    assert all(torch.equal(again[n], first[n]) for n in first), f"{threads} threads"
copies = {n: a if a is None else a.clone(memory_format=torch.contiguous_format)
          for n, a in x.items()}
if x["key"].data_ptr() == x["value"].data_ptr() != 0:  # on a GPU other kernels compute with copies
    copies["value"] = copies["key"][..., :x["value"].size(-1)]
torch.manual_seed(7)
again = solve(sdpa, copies, *more, **options)
assert all(torch.equal(again[n], first[n]) for n in first), "contiguous copies"
"""


@dataclasses.dataclass(frozen=True)
class Failure:
    problem: Any  # a Problem, or one of packed.py
    capability: str
    what: str
    ending: tuple[str, ...] = ()  # of the program: lines with an assertion
    raises: bool = False  # without an assertion

    def program(self) -> str:
        return self.problem.program(self.capability, list(self.ending))


@dataclasses.dataclass(frozen=True)
class Ratio:
    """How much of its bound the worst number of a result needs."""

    result: str
    ratio: float
    capability: str
    says_nothing: bool  # bounds that no number of the result exceeds


def apply_settings(problem: Problem, capability: str) -> None:
    if torch.get_num_threads() != problem.threads:
        torch.set_num_threads(problem.threads)
    if capability not in ON_CUDA:
        torch.ops.attn._set_cpu_capability(capability)
    if torch.get_float32_matmul_precision() != problem.precision:
        torch.set_float32_matmul_precision(problem.precision)


def check(problem: Problem, capabilities: list[str]) -> tuple[Failure | None, list[Ratio]]:
    """Checks on each of the instruction sets; returns the first failure, if any."""
    ratios: list[Ratio] = []
    try:
        if problem.nan or problem.bits or problem.hidden:
            for capability in capabilities:
                if failure := check_program(problem, capability):
                    return failure, ratios
            if problem.nan or problem.hidden:
                return None, ratios
        made = problem.make()
        textbook = Textbook(problem, made)
        known = {}
        for capability in capabilities:
            apply_settings(problem, capability)
            try:
                actual = problem.results(made)
            except Exception:  # whatever it is, a valid call has to give results
                what = traceback.format_exc(limit=-2)
                return Failure(problem, capability, what, raises=True), ratios
            torch.set_num_threads(1)
            how = arithmetic(problem, capability)
            if how not in known:
                known[how] = bounds(textbook, how)
            for name, (expected, bound) in known[how].items():
                failure = compare(problem, capability, name, actual[name], expected, bound, ratios)
                if failure:
                    return failure, ratios
        return None, ratios
    finally:
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision("highest")


def compare(
    problem: Problem,
    capability: str,
    name: str,
    actual: Tensor,
    expected: Tensor,
    bound: Tensor,
    ratios: list[Ratio],
) -> Failure | None:
    dtype = problem.result_dtype(name)
    if actual.shape != expected.shape or actual.dtype != dtype:
        ending = (
            f"print(actual[{name!r}].shape, actual[{name!r}].dtype)",
            f"assert actual[{name!r}].shape == {tuple(expected.shape)}",
            f"assert actual[{name!r}].dtype == {dtype}",
        )
        what = f"{name} is {actual.dtype} {list(actual.shape)}"
        return Failure(problem, capability, what, ending)
    if not actual.numel():
        return None
    error = (actual.detach().double() - expected).abs_()
    error = error.masked_fill_(actual == expected, 0)  # infinities, too
    ratio = error / bound
    worst = ratio.max().item()
    if not worst <= 1:
        ratio = torch.where(bound == math.inf, 0, ratio).nan_to_num_(nan=math.inf)
        worst = ratio.max().item()
    if worst > 1:
        at = tuple(int(i) for i in torch.unravel_index(ratio.argmax().cpu(), ratio.shape))
        limit = bound[at].item()
        what = (
            f"{name}{list(at)} is {actual[at].item():.6g}, exact {expected[at].item():.6g}: "
            f"error {error[at].item():.3g}, bound {limit:.3g}"
        )
        ending = (
            f"name, at, bound = {name!r}, {at}, {limit!r}",
            "found, exact = actual[name][at].item(), expected[name][at].item()",
            "error = 0 if found == exact else abs(found - exact)  # both may be -inf",
            'print(f"{name}{list(at)}: error {error:.3g}, bound {bound:.3g}")',
            "assert error <= bound",
        )
        return Failure(problem, capability, what, ending)
    says_nothing = bool((bound >= expected.abs().max()).all()) and bool(expected.any())
    ratios.append(Ratio(name, worst, capability, says_nothing))
    return None


def check_program(problem: Problem, capability: str) -> Failure | None:
    """Runs a problem that is a program with assertions of its own."""
    ending = [f"more = [{', '.join(problem.directions)}]"]
    if problem.nan:
        ending += [f"NAME, BAD = {problem.nan!r}, {problem.bad}"]
        ending += NAN_REACHES.strip().splitlines()
    elif problem.hidden:
        ending += [f"BAD = {problem.bad}", *HIDDEN_KEYS.strip().splitlines()]
    else:
        ending += ["torch.manual_seed(7)", *SAME_BITS.strip().splitlines()]
    failure = Failure(problem, capability, "", tuple(ending))
    text = failure.program()
    apply_settings(problem, capability)
    try:
        exec(text, {"print": lambda *_: None})
    except AssertionError as error:
        return dataclasses.replace(failure, what=str(error))
    except Exception:
        what = traceback.format_exc(limit=-2)
        return dataclasses.replace(failure, what=what, raises=True)
    return None


# --- making it small ------------------------------------------------------------------------------


def smaller(problem: Problem) -> Iterator[Problem]:
    """Simpler problems, the most simple first."""

    def but(**changes: object) -> Problem:
        return dataclasses.replace(problem, **changes)

    if problem.mode != "forward":
        yield but(mode="forward", wanted=())
    if problem.mode not in ("forward", "backward"):
        yield but(mode="backward")
    yield from without_options(problem)
    if problem.vmap is None:
        for position in range(4 if problem.gqa else 3, 3 + len(problem.lead)):
            yield without_dimension(problem, position)
    else:
        yield but(vmap=None)
    if problem.layouts:
        yield but(layouts={})
        for name in problem.layouts:
            yield but(layouts={n: s for n, s in problem.layouts.items() if n != name})
    if "attn_mask" in problem.dims and len(problem.dims["attn_mask"]) > 2 and not problem.vmap:
        yield but(dims={**problem.dims, "attn_mask": problem.dims["attn_mask"][-2:]})
    for field in dataclasses.fields(Problem):
        plain = {"causal": False, "scale": None, "dropout_p": 0.0, "threads": 1}
        plain |= {"dtypes": {}, "precision": "highest", "graded": ("output",)}
        if field.name in plain and getattr(problem, field.name) != plain[field.name]:
            yield but(**{field.name: plain[field.name]})
    for name in problem.wanted if len(problem.wanted) > 1 else ():
        yield but(wanted=tuple(n for n in problem.wanted if n != name))
    for name, value in problem.values.items():
        if name != "attn_mask" and value != "normal":
            yield but(values={**problem.values, name: "normal"})
    yield from with_simpler_options(problem)
    if problem.gqa and problem.sizes["Hq"] > 1:
        yield but(sizes={**problem.sizes, "Hq": 1, "Hk": 1, "Hv": 1})
        yield but(sizes={**problem.sizes, "Hk": 1, "Hv": 1})
    for name, n in problem.sizes.items():
        if name not in ("Hq", "Hk", "Hv"):
            for m in sorted({1, n // 2, n - 16, n - 1} - {0}):
                if 0 < m < n:
                    yield but(sizes={**problem.sizes, name: m})


def without_dimension(problem: Problem, position: int) -> Problem:
    """Without the one at this position from the end of the scores. The third is the heads."""

    def rest(name: str, dims: tuple[str, ...]) -> tuple[str, ...]:
        at = len(dims) - max(1, position - LACKS.get(name, 0))
        return tuple(d for i, d in enumerate(dims) if i != at)

    dims = {n: rest(n, d) for n, d in problem.dims.items()}
    integers = {
        n: dataclasses.replace(i, dims=rest(n, i.dims)) for n, i in problem.integers.items()
    }
    problem = dataclasses.replace(problem, dims=dims, integers=integers)
    heads = problem.lead_dims[-1:] or ("1",)
    of_heads = {n: (*dims[n][:-1], *heads) for n in ("alibi_slopes", "sinks") if n in dims}
    return dataclasses.replace(problem, dims={**dims, **of_heads})


def without_options(problem: Problem) -> Iterator[Problem]:
    """Without one of the tensors that may be absent, or one of the options that have a default."""
    for name in ("attn_mask", "alibi_slopes", "sinks", *problem.integers):
        rest = {
            field: {n: a for n, a in getattr(problem, field).items() if n != name}
            for field in ("dims", "layouts", "dtypes", "integers")
        }
        vmap = problem.vmap and {n: d for n, d in problem.vmap.items() if n != name}
        wanted = tuple(n for n in problem.wanted if n != name)
        if (name in problem.dims or name in problem.integers) and problem.wanted != (name,):
            yield dataclasses.replace(problem, **rest, vmap=vmap, wanted=wanted)
    for name in ("key", "value"):
        if (scale := f"{name}_scale") in problem.dims:
            dims = {n: d for n, d in problem.dims.items() if n != scale}
            vmap = problem.vmap and {n: d for n, d in problem.vmap.items() if n != scale}
            values = {**problem.values, name: "normal"}
            yield dataclasses.replace(problem, dims=dims, values=values, vmap=vmap)
    if problem.softcap:
        yield dataclasses.replace(problem, softcap=0.0)
    if problem.window != (-1, -1):
        yield dataclasses.replace(problem, window=(-1, -1))
    if problem.rows:
        yield dataclasses.replace(problem, rows=False, graded=("output",))


def with_simpler_options(problem: Problem) -> Iterator[Problem]:
    def but(**changes: object) -> Problem:
        return dataclasses.replace(problem, **changes)

    if problem.softcap not in (0.0, 1.0):
        yield but(softcap=1.0)
    for window in ((-1, problem.window[1]), (problem.window[0], -1)):
        if problem.window != window != (-1, -1):
            yield but(window=window)
    for name, integers in problem.integers.items():
        simpler = [] if problem.vmap or not integers.dtype else [Integers((), "", integers.numbers)]
        if len(integers.numbers) > 1:
            simpler += [dataclasses.replace(integers, numbers=(n,)) for n in integers.numbers]
        elif isinstance(n := integers.numbers[0], int):
            halves = {0, 1, n // 2, n - 1 if n > 0 else n + 1} - {n}
            closer = sorted(m for m in halves if abs(m) < abs(n))
            simpler += [dataclasses.replace(integers, numbers=(m,)) for m in closer]
        for one in simpler:
            yield but(integers={**problem.integers, name: one})
    for name in ("alibi_slopes", "sinks"):
        if len(problem.dims.get(name, ())) > 1 and not problem.vmap:
            yield but(dims={**problem.dims, name: problem.dims[name][-1:]})


def shrunk(
    failure: Failure, seconds: float = 30, check: Any = check, smaller: Any = smaller
) -> Failure:
    """As simple a problem as is found that fails, too, on the same instruction set."""
    end = time.monotonic() + seconds
    found = True
    while found:
        found = False
        for problem in smaller(failure.problem):
            if time.monotonic() > end:
                return failure
            try:
                other, _ = check(problem, [failure.capability])
            except Exception:  # not a problem: nothing was left to want, say
                continue
            # An exception where there was none may be a call that is not allowed.
            if other and other.raises == failure.raises:
                failure, found = other, True
                break
    return failure
