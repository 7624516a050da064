"""Runs a problem, holds its results to the bounds, and makes what fails small."""

from __future__ import annotations

import dataclasses
import math
import time
import traceback
from collections.abc import Iterator

import torch
from torch import Tensor

from .bound import Textbook, arithmetic
from .problem import Problem

# What is said of a problem beside its tensors and its call: lines that end with an assertion.
NAN_REACHES = """
dirty = {**x, NAME: x[NAME].masked_fill(bad, BAD)}
clean, dirty = solve(sdpa, x, *more, **options), solve(sdpa, dirty, *more, **options)
xs = {n: a if a is None or a.dtype == torch.bool else a.double() for n, a in x.items()}
flat = {**xs, "query": 0 * xs["query"], "key": 0 * xs["key"], "value": torch.ones_like(xs["value"])}
if x["attn_mask"] is not None and x["attn_mask"].dtype != torch.bool:
    flat["attn_mask"] = x["attn_mask"] != -inf
rows = bad.any(-1, keepdim=True).double()
if NAME == "query":  # its row, unless that attends to nothing
    must = may = (reference.sdpa(*flat.values(), **options) > 0) & (rows > 0)
elif NAME == "key":  # the rows that attend to it
    groups = x["key"].shape[:-1] if options.get("enable_gqa") else rows.shape[:-1]
    flat["value"] = rows.expand(*groups, 1)
    must = may = reference.sdpa(*flat.values(), **options) > 0
    must, may = (a.expand(*clean["output"].shape[:-1], 1) for a in (must, may))
else:  # its column, in any row of its head; where the row attends to it, it has to
    must = reference.sdpa(*{**xs, "value": bad.double()}.values(), **options) > 1e-20
    flat["value"], flat["attn_mask"] = bad.double(), None
    may = reference.sdpa(*flat.values(), **{**options, "is_causal": False}) > 0
for n in clean:
    lost = must & ~dirty[n].isnan() & (BAD != BAD)
    print(n, "NaNs that are lost:", lost.sum().item())
    assert not lost.any(), f"{n}: NaNs are lost"
    touched = ~may & (dirty[n] != clean[n])
    print(n, "numbers changed that may not be reached:", touched.sum().item())
    assert not touched.any(), f"{n}: numbers are changed that may not be reached"
"""
HIDDEN_KEYS = """
mask, S = x["attn_mask"], x["key"].size(-2)
hidden = torch.arange(S) >= (S + 1) // 2
x["attn_mask"] = mask.masked_fill(hidden, False if mask.dtype == torch.bool else -inf)
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
torch.manual_seed(7)
again = solve(sdpa, copies, *more, **options)
assert all(torch.equal(again[n], first[n]) for n in first), "contiguous copies"
"""


@dataclasses.dataclass(frozen=True)
class Failure:
    problem: Problem
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
    if capability != "cuda":
        torch.ops.attn._set_cpu_capability(capability)
    if torch.get_float32_matmul_precision() != problem.precision:
        torch.set_float32_matmul_precision(problem.precision)


def check(problem: Problem, capabilities: list[str]) -> tuple[Failure | None, list[Ratio]]:
    """On each of the instruction sets; the first failure, if any."""
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
        bounds = {}
        for capability in capabilities:
            apply_settings(problem, capability)
            try:
                actual = problem.results(made)
            except Exception:  # whatever it is, a valid call has to give results
                what = traceback.format_exc(limit=-2)
                return Failure(problem, capability, what, raises=True), ratios
            torch.set_num_threads(1)
            how = arithmetic(problem, capability)
            if how not in bounds:
                bounds[how] = textbook.bounds(how)
            for name, (expected, bound) in bounds[how].items():
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
    dtype = problem.torch_dtype
    if name.endswith("attn_mask") and problem.mask_dtype:
        dtype = getattr(torch, problem.mask_dtype)
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
    ratio = error / bound
    worst = ratio.max().item()
    if not worst <= 1:
        ratio = torch.where(bound == math.inf, 0, ratio).nan_to_num_(nan=math.inf)
        worst = ratio.max().item()
    if worst > 1:
        at = tuple(int(i) for i in torch.unravel_index(ratio.argmax(), ratio.shape))
        limit = bound[at].item()
        what = (
            f"{name}{list(at)} is {actual[at].item():.6g}, exact {expected[at].item():.6g}: "
            f"error {error[at].item():.3g}, bound {limit:.3g}"
        )
        ending = (
            f"name, at, bound = {name!r}, {at}, {limit!r}",
            "error = abs(actual[name][at].double() - expected[name][at]).item()",
            'print(f"{name}{list(at)}: error {error:.3g}, bound {bound:.3g}")',
            "assert error <= bound",
        )
        return Failure(problem, capability, what, ending)
    says_nothing = bool((bound >= expected.abs().max()).all()) and bool(expected.any())
    ratios.append(Ratio(name, worst, capability, says_nothing))
    return None


def check_program(problem: Problem, capability: str) -> Failure | None:
    """Of problems that are programs with assertions of their own: runs them."""
    more = [] if problem.mode == "forward" else ["u", "t"] if problem.of_second_order else ["u"]
    ending = [f"more = [{', '.join(more)}]"]
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
    if problem.vmap is None:
        for position in range(4 if problem.gqa else 3, 3 + len(problem.lead)):
            yield but(
                dims={
                    n: tuple(d for i, d in enumerate(dims) if i != len(dims) - position)
                    for n, dims in problem.dims.items()
                }
            )
    else:
        yield but(vmap=None)
    if problem.layouts:
        yield but(layouts={})
        for name in problem.layouts:
            yield but(layouts={n: s for n, s in problem.layouts.items() if n != name})
    if "attn_mask" in problem.dims:
        dims = {n: d for n, d in problem.dims.items() if n != "attn_mask"}
        if problem.wanted != ("attn_mask",):
            wanted = tuple(n for n in problem.wanted if n != "attn_mask")
            layouts = {n: s for n, s in problem.layouts.items() if n != "attn_mask"}
            vmap = problem.vmap and (*problem.vmap[:3], None)
            yield but(dims=dims, wanted=wanted, layouts=layouts, mask_dtype="", vmap=vmap)
        if len(problem.dims["attn_mask"]) > 2 and problem.vmap is None:
            yield but(dims={**dims, "attn_mask": problem.dims["attn_mask"][-2:]})
    for field in dataclasses.fields(Problem):
        plain = {"causal": False, "scale": None, "dropout_p": 0.0, "threads": 1}
        plain |= {"mask_dtype": "", "precision": "highest"}
        if field.name in plain and getattr(problem, field.name) != plain[field.name]:
            yield but(**{field.name: plain[field.name]})
    for name in problem.wanted if len(problem.wanted) > 1 else ():
        yield but(wanted=tuple(n for n in problem.wanted if n != name))
    for name, value in problem.values.items():
        if name != "attn_mask" and value != "normal":
            yield but(values={**problem.values, name: "normal"})
    if problem.gqa and problem.sizes["Hq"] > 1:
        yield but(sizes={**problem.sizes, "Hq": 1, "Hk": 1, "Hv": 1})
        yield but(sizes={**problem.sizes, "Hk": 1, "Hv": 1})
    for name, n in problem.sizes.items():
        if name not in ("Hq", "Hk", "Hv"):
            for m in sorted({1, n // 2, n - 16, n - 1} - {0}):
                if 0 < m < n:
                    yield but(sizes={**problem.sizes, name: m})


def shrunk(failure: Failure, seconds: float = 30) -> Failure:
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
