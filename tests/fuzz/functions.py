"""Random functions of the pair in flex_attention, written as source text (grammar.py).

Each function runs in every dtype and with every instruction set. The oracle is plain PyTorch over
the L x S matrix, in float64 and in float32. For a share of the functions, PyTorch's own eager
flex_attention is a second oracle.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import multiprocessing
import random
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention as of_torch

import torch_attn

from .grammar import Captured, Grammar, Sizes, captures, rendered, strided
from .worker import Report

HEAD_DIM = 4
EAGER = (
    32  # one function in 32 also runs in PyTorch's eager flex_attention, which takes half a second
)
Results = dict[str, Tensor]


@dataclasses.dataclass
class Problem:
    """A score_mod, a mask_mod or both, and how they are called."""

    rng: random.Random
    sizes: Sizes
    group: int  # query heads of a key head
    score: str
    mask: str
    block: int  # the block size of a BlockMask; 0: the mask_mod itself
    threads: int
    second: bool  # whether second derivatives and tangents are computed
    known: Any = None  # the BlockMask
    largest: float = 0.0  # of the scores in float64

    @staticmethod
    def draw(seed: int, index: int) -> Problem:
        rng = random.Random(f"functions {seed} {index}")
        lengths = rng.choice(
            [(4, 5), (7, 3), (1, 6), (1, 70), (70, 5), (6, 80), (37, 70), (66, 65)]
        )
        group = rng.choice([1, 1, 2])
        sizes = Sizes(rng.randrange(1, 3), group * rng.randrange(1, 3), *lengths)
        kind = rng.choice(["score", "mask", "both", "both", "both"])
        problem = Problem(rng, sizes, group, "", "", 0, rng.choice([1, 1, 2]), rng.random() < 0.25)
        captured = problem.captured(torch.float64)
        if kind != "mask":
            grammar = Grammar(rng, sizes, captured, in_mask=False)
            problem.score = grammar.function("score_mod", "score, b, h, i, j", "f")
        if kind != "score":
            grammar = Grammar(rng, sizes, captured, in_mask=True)
            problem.mask = grammar.function("mask_mod", "b, h, i, j", "b")
            problem.block = rng.choice([0, 0, 0, 16, 40])
        problem.rng = random.Random(rng.random())  # the same numbers for every dtype
        return problem

    def captured(self, dtype: torch.dtype) -> dict[str, Captured]:
        """The captured tensors, whose numbers do not depend on the dtype of the scores."""
        rng = random.Random(repr(self.sizes))
        torch.manual_seed(rng.randrange(2**32))
        return captures(rng, self.sizes, dtype)

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Query, key and value, and what the functions capture; floating ones want a gradient."""
        of, rng = self.sizes, random.Random(repr(self.sizes))
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        found = {name: x.numbers for name, x in self.captured(wide).items()}
        heads = of.heads // self.group
        shapes = {
            "query": (of.heads, of.queries),
            "key": (heads, of.keys),
            "value": (heads, of.keys),
        }
        for name, (n, length) in shapes.items():
            x = torch.randint(-4, 5, (of.batch, n, length, HEAD_DIM)) / 4
            found[name] = strided(rng, x.to(dtype))
        return {
            n: x.detach().requires_grad_() if x.is_floating_point() else x for n, x in found.items()
        }

    def functions(self, tensors: dict[str, Tensor], plain: bool = False) -> tuple[Any, Any]:
        """The functions, compiled from their source, as they would be in a file."""
        scope: dict[str, Any] = {"torch": torch, "math": math, "F": F, **tensors}
        exec(rendered(self.score + self.mask, plain), scope)
        return scope.get("score_mod"), scope.get("mask_mod")

    def unit(self) -> float:
        """Returns the largest rounding unit of the captured tensors that the functions read.

        Leaves out tensors of 16 bits, because the functions convert them before they compute.
        """
        text = rendered(self.score + self.mask, plain=True)
        read = [x.numbers for n, x in self.captured(torch.float64).items() if f"{n}" in text]
        units = [
            torch.finfo(x.dtype).eps for x in read if x.dtype in (torch.float32, torch.float64)
        ]
        return max(units, default=0.0)

    def blocks(self, mask: Any) -> Any:
        """The mask_mod, or a BlockMask of it; its blocks are found once for all dtypes."""
        if not (self.block and mask):
            return mask
        of = self.sizes
        if self.known is None:
            plain = self.functions({n: t.detach() for n, t in self.tensors(torch.float64).items()})
            self.known = of_torch.create_block_mask(
                plain[1],
                of.batch,
                of.heads,
                of.queries,
                of.keys,
                device="cpu",
                BLOCK_SIZE=self.block,
            )
        found = copy.copy(self.known)
        found.mask_mod = mask
        return found

    def program(self) -> str:
        return f"# {self.sizes}, {self.group} query heads a key head, block {self.block}\n" + (
            rendered(self.score + self.mask, plain=False)
        )


def ours(problem: Problem, x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    score, mask = problem.functions(x)
    options = {"scale": 0.5, "enable_gqa": problem.group > 1, "return_lse": True}
    return torch_attn.flex_attention(  # type: ignore[return-value]
        x["query"], x["key"], x["value"], score, problem.blocks(mask), **options
    )


def eager(problem: Problem, x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """PyTorch's own, which refuses gradients on a CPU only by `_validate_device`."""
    score, mask = problem.functions(x)
    of = problem.sizes
    if mask:
        with torch.no_grad():
            mask = of_torch.create_block_mask(
                mask, of.batch, of.heads, of.queries, of.keys, device="cpu"
            )
    own, of_torch._validate_device = of_torch._validate_device, lambda *_: None
    try:
        return of_torch.flex_attention(  # type: ignore[return-value]
            x["query"],
            x["key"],
            x["value"],
            score,
            mask,
            scale=0.5,
            enable_gqa=problem.group > 1,
            return_lse=True,
        )
    finally:
        of_torch._validate_device = own


def textbook(problem: Problem, x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Plain PyTorch: the functions of tensors that broadcast over batch, heads, rows and keys.

    Captured tensors get at least the dtype of the scores, in which their gradients are summed.
    """
    size = x["query"].dtype.itemsize
    narrow = {n for n, t in x.items() if t.is_floating_point() and t.dtype.itemsize < size}
    x = {n: t.to(x["query"].dtype) if n in narrow else t for n, t in x.items()}
    score, mask = problem.functions(x, plain=True)
    query, key, value = (x[n] for n in ("query", "key", "value"))
    key, value = (t.repeat_interleave(problem.group, 1) for t in (key, value))
    scores = query @ key.mT * 0.5
    axes = zip((0, 1, 2, 3), scores.shape, strict=True)
    places = [torch.arange(n).view([-1 if a == axis else 1 for a in range(4)]) for axis, n in axes]
    if score:
        scores = score(scores.clone(), *places).expand(scores.shape).to(query.dtype)
    if mask:
        visible = torch.as_tensor(mask(*places)).expand(scores.shape)
        scores = scores.masked_fill(~visible, -math.inf)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    finite = scores.masked_fill(empty, 0)
    weights = finite.softmax(-1).masked_fill(empty, 0)
    problem.largest = largest(scores)
    return weights @ value, finite.logsumexp(-1).masked_fill(empty[..., 0], -math.inf)


def largest(x: Tensor) -> float:
    finite = x.detach().double()[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def weighted(found: tuple[Tensor, Tensor], generator: torch.Generator) -> Tensor:
    """A sum of the results, over numbers that can be differentiated."""
    total: Any = 0.0
    for x in found:
        weight = torch.randint(-4, 5, x.shape, generator=generator) / 4
        total = total + torch.where(x.isfinite(), x.double() * weight, 0).sum()
    return total  # type: ignore[no-any-return]


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    own = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(own)


def results(
    attend: Callable[..., Any], problem: Problem, dtype: torch.dtype, second: bool
) -> Results:
    """The output, the logsumexp, the gradients and, if asked, second derivatives and a tangent."""
    # A quotient of whole numbers, for example, has the default dtype.
    with default_dtype(torch.float64 if dtype == torch.float64 else torch.float32):
        return _results(attend, problem, dtype, second)


def _results(
    attend: Callable[..., Any], problem: Problem, dtype: torch.dtype, second: bool
) -> Results:
    x = problem.tensors(dtype)
    found = attend(problem, x)
    named = dict(zip(("output", "logsumexp"), found, strict=True))
    if not all(t.isfinite().all() for t in found[:1]) or not found[0].requires_grad:
        return {n: t.detach() for n, t in named.items()}
    generator = torch.Generator().manual_seed(7)
    leaves = {n: t for n, t in x.items() if t.requires_grad}
    loss = weighted(found, generator)
    first = torch.autograd.grad(
        loss, [*leaves.values()], create_graph=second, materialize_grads=True
    )
    named |= {f"grad {n}": g for n, g in zip(leaves, first, strict=True)}
    if second:
        along = [torch.randint(-2, 3, t.shape, generator=generator) / 2 for t in leaves.values()]
        slope: Any = sum((g.double() * t).sum() for g, t in zip(first, along, strict=True))
        if slope.requires_grad:
            more = torch.autograd.grad(slope, [*leaves.values()], materialize_grads=True)
            named |= {f"second {n}": g for n, g in zip(leaves, more, strict=True)}
        named["tangent"] = tangent_of(attend, problem, x, dict(zip(leaves, along, strict=True)))
    return {n: t.detach() for n, t in named.items()}


def tangent_of(attend: Any, problem: Problem, x: dict[str, Tensor], along: Results) -> Tensor:
    """The derivative of the output along a direction."""
    if attend is textbook:
        # By two gradients, because PyTorch's forward mode takes another side of equal numbers.
        output = attend(problem, x)[0]
        weight = torch.zeros_like(output, requires_grad=True)
        leaves = [x[n] for n in along]
        pulled = torch.autograd.grad(
            output, leaves, weight, create_graph=True, materialize_grads=True
        )
        slope = sum((g * t).sum() for g, t in zip(pulled, along.values(), strict=True))
        return torch.autograd.grad(slope, weight, materialize_grads=True)[0]  # type: ignore[arg-type]
    with fwAD.dual_level():
        duals = {n: fwAD.make_dual(x[n].detach(), t.to(x[n].dtype)) for n, t in along.items()}
        output, tangent = fwAD.unpack_dual(attend(problem, {**x, **duals})[0])
        return torch.zeros_like(output) if tangent is None else tangent


class Bound(NamedTuple):
    exact: Tensor
    fine: Tensor  # where numbers are compared
    allowed: float
    scale: float


def bounds(
    exact: Results, rough: Results | None, dtype: torch.dtype, scores: float, of_captured: float
) -> dict[str, Bound]:
    """How near results in a dtype must be.

    `scores`: the largest score. `of_captured`: the unit of captured tensors, in whose dtype the
    functions may compute. `rough`: what plain PyTorch finds in float32, twice whose error is
    allowed; None in float64.
    """
    eps = max(torch.finfo(dtype).eps, of_captured)
    is_half = dtype.itemsize == 2
    of_all = max([1.0, *(largest(t) for n, t in exact.items() if n.startswith("grad"))])
    found = {}
    for name, expected in exact.items():
        y = expected.double()
        if rough is not None:
            fine = y.isfinite() & rough[name].isfinite()
        elif name in ("output", "logsumexp"):
            fine = torch.ones_like(y, dtype=torch.bool)  # the same infinities and NaNs, too
        else:
            fine = y.isfinite()  # PyTorch multiplies 0 by infinity, where ours is 0
        if dtype == torch.float16:
            fine = fine & (y.abs() < torch.finfo(dtype).max)
        scale = max(1.0, largest(y), of_all if is_half else 0.0)
        allowed = 2 * largest((rough[name].double() - y)[fine]) if rough is not None else 0.0
        # The derivative of a function is about as large as its value. And in float64 the formula's
        # own gradient of a logsumexp of 1e15 is wrong.
        order = 3 if name.startswith("second") else 2 if name.startswith(("grad", "tan")) else 1
        # Two terms that cancel leave their rounding error: even float64's, in the formula itself.
        terms = max(scale, math.prod([max(1.0, scores)] * (order - 1)))
        if eps * terms > torch.finfo(dtype).max:
            fine = torch.zeros_like(fine)
        grows = max(1.0, scores * 1e-9) if is_half else math.prod([max(1.0, scores)] * order)
        allowed += (64 if is_half else 256) * grows * eps * scale
        allowed += torch.finfo(expected.dtype).eps * scale
        found[name] = Bound(y[fine], fine, allowed, scale)
    return found


def differences(found: Results, bounds: dict[str, Bound]) -> Iterator[str]:
    """What of `found` is beyond its bound."""
    for name, bound in bounds.items():
        if name not in found:
            yield f"{name} is missing"
            continue
        a, b = found[name].double()[bound.fine], bound.exact
        if torch.equal(a, b) or not a.numel():
            continue
        alike = (a == b) | (b.isnan() & (a.isnan() | (a == math.inf)))  # a row of both has inf
        off = float(torch.where(alike, 0, (a - b).abs()).nan_to_num(math.inf).max())
        if off > bound.allowed:
            largest_of = f"largest {bound.scale:.3g}"
            yield f"{name}: off by {off:.3g}, allowed {bound.allowed:.3g}, {largest_of}"


@contextlib.contextmanager
def kernels(capability: str, threads: int) -> Iterator[None]:
    own = torch.ops.attn._cpu_capability()
    torch.ops.attn._set_cpu_capability(capability)
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.ops.attn._set_cpu_capability(own)
        torch.set_num_threads(1)


def compare(problem: Problem, index: int, capabilities: list[str], report: Report) -> Iterator[str]:
    """What is wrong, in every dtype and with every instruction set."""
    second = problem.second
    exact = results(textbook, problem, torch.float64, second)
    scores = problem.largest
    rough = results(textbook, problem, torch.float32, second)
    for n, dtype in enumerate((torch.float64, torch.float32, torch.bfloat16, torch.float16)):
        if n > 0 and (exact.keys() != rough.keys() or scores > torch.finfo(torch.float32).max):
            report.say_nothing += 1  # in float32 the formula itself overflows
            break
        own = bounds(exact, rough if n else None, dtype, scores, problem.unit())
        first = {k: x for k, x in own.items() if not k.startswith(("second", "tangent"))}
        for m, capability in enumerate(capabilities):
            # Second derivatives, which take most of the time, with one instruction set each.
            with_second = second and n < 2 and m == index // 4 % len(capabilities)
            with kernels(capability, problem.threads):
                try:
                    found = results(ours, problem, dtype, with_second)
                except RuntimeError as error:
                    if "at most" in str(error):  # the function is longer than a list may be
                        return
                    raise
            report.calls[capability] += 1
            report.results += len(found)
            report.say_nothing += sum(not x.fine.any() for n, x in own.items() if n in found)
            for what in differences(found, own if with_second else first):
                yield f"{dtype} {capability} {what}"
    if index % EAGER == 0:
        try:
            found = results(eager, problem, torch.float64, second=False)
        except Exception:  # its vmap lacks some operations
            report.say_nothing += 1
            return
        report.samples += 1
        with kernels(capabilities[-1], 1):
            own = results(ours, problem, torch.float64, second=False)
        narrow = {n for n, t in own.items() if t.dtype != torch.float64}  # it sums them so
        own, found = ({n: t for n, t in x.items() if n not in narrow} for x in (own, found))
        hidden = own["logsumexp"] == -math.inf  # there eager PyTorch's results are its own
        for part in (own, found):
            part["output"] = part["output"].masked_fill(hidden[..., None], 0)
            part["logsumexp"] = part["logsumexp"].masked_fill(hidden, 0)
        if own.keys() == found.keys() and not hidden.any():
            near = bounds(found, None, torch.float64, scores, problem.unit())
            for what in differences(own, near):
                yield f"beside PyTorch's eager flex_attention: {what}"


def check(
    seed: int, index: int, capabilities: list[str], report: Report | None = None
) -> str | None:
    """What is wrong with a function, with its source."""
    problem = None
    try:
        problem = Problem.draw(seed, index)
        wrong = list(compare(problem, index, capabilities, report or Report()))
        if not wrong:
            return None
        text = "\n".join(wrong)
    except Exception:  # whatever it is, a function that can be drawn has to give results
        text = traceback.format_exc()
    program = problem.program() if problem else ""
    return f"# --seed {seed} --problem {index} --only functions\n{program}{text}"


def work(
    device: str, seed: int, first: int, step: int, last: int, seconds: float, reports: Any, at: Any
) -> None:
    """As worker.work."""
    for module in (torch.xpu, torch.mtia, torch.cuda):
        setattr(module, "manual_seed_all", lambda _: None)  # noqa: B010, not what it is typed as
    warnings.simplefilter("ignore")  # vmap says of torch.take that it is slow
    torch.set_num_threads(1)
    capabilities = torch.ops.attn._cpu_capabilities()
    end, report, reported = time.monotonic() + seconds, Report(), time.monotonic()
    for index in range(first, last, step):
        parent = multiprocessing.parent_process()
        if time.monotonic() > end or (parent and not parent.is_alive()):
            break
        at.value = index
        report.problems[device, "f64"] += 1
        if wrong := check(seed, index, capabilities, report):
            report.failures.append(wrong)
        if time.monotonic() > reported + 1:
            reports.put(report)
            report, reported = Report(), time.monotonic()
    reports.put(report)
    at.value = -1
