"""The textbook in float64, with a bound for the error of each number of each result.

The bounds follow from the standard model fl(a op b) = (a op b)(1 + d), |d| <= u, and

- a sum of n products, in any order, is off by at most n u sum |a_i b_i| to first order, and one
  added up from parts of 64, as all kernels do, by (64 + n / 32) u sum |a_i b_i|
  (N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed. 2002, sections 3.1, 4.2);
- with scores off by r_j (and weights by a factor e^(r_j) for what else is inexact), softmax gives
  P_j e^(r_j) / sum_k P_k e^(r_k), of which the logarithm is off by at most
  r_j + log sum_k P_k e^(r_k). Nothing is of first order here: scores may be off by 10.
  (The first-order form: P. Blanchard, D. J. Higham, N. J. Higham, Accurately computing the
  log-sum-exp and softmax functions, IMA J. Numer. Anal. 41(4), 2021, sections 3 and 4.)

Absolute errors are carried through the formulas of csrc/cpu/kernels (backward.inl, tangent.inl),
whose names are used here in lower case; `e_x` is the bound for the error of x. Products of two
errors are left out where both are small: hence `SLACK`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable

import torch
from torch import Tensor

from .problem import Problem

SLACK = 1.02
# A few operations of one rounding each that the analysis does not list one by one.
FEW = 8
INF = math.inf


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """How a kernel computes."""

    u: float  # unit roundoff of sums, statistics and exponentials
    exp: float  # relative error of an exponential of an exact argument
    weight: float = 0.0  # unit roundoff of weights where they are factors of a product
    smallest: float = 0.0  # what a weight below its type's normal numbers is off by
    factor: float = 0.0  # unit roundoff of all other factors of products
    exact: bool = False  # the textbook is no better than the kernel


BF16, F16 = 2.0**-8, 2.0**-11  # unit roundoffs


def arithmetic(problem: Problem, capability: str) -> Arithmetic:
    """Of the forward and the gradients."""
    if problem.dtype == "float64":
        return Arithmetic(2.0**-53, 4 * 2.0**-53, exact=True)
    u = 2.0**-24
    plain = Arithmetic(u, 4 * u)
    exact_weights = problem.mask_dtype == "float32"
    if capability == "cuda":
        of_tensor_cores = max(problem.sizes["E"], problem.sizes["Ev"]) <= 256 and not exact_weights
        if problem.dtype == "bfloat16" and of_tensor_cores:
            return Arithmetic(u, 4 * u, weight=BF16)
        if problem.dtype == "float16" and of_tensor_cores:
            return Arithmetic(u, 4 * u, weight=F16, smallest=2.0**-25)
        return plain
    if capability not in ("avx512_bf16", "amx"):
        return plain
    # The bits that factors of products may be rounded to, as csrc/operators/problem.cpp has them.
    if problem.dtype == "float32":
        bits = {"medium": 8, "high": 16, "highest": 24}[problem.precision]
    elif problem.dtype == "float16":
        bits = 16
    else:
        bits = 16 if exact_weights else 8
    if bits > {"avx512_bf16": 8, "amx": 16}[capability]:
        return plain
    # A number is a sum of one or two bfloat16; the exponential is as accurate (exp2_of_degree of
    # csrc/cpu/isa/instructions_avx512.inl).
    unit = {8: BF16, 16: 2.0**-16}[bits]
    exp = {8: 3e-6, 16: 1e-7}[bits] + 4 * u
    given = 8 if problem.dtype == "bfloat16" else 11 if problem.dtype == "float16" else 24
    return Arithmetic(u, exp, weight=unit, factor=unit if given > bits else 0.0)


def chain(n: int, a: Arithmetic) -> float:
    """The number of roundings that one of n summed products goes through."""
    # In float64 the textbook is another such sum, which torch adds up in an order of its own.
    return 2 * n + FEW if a.exact else min(n, 64 + n / 32) + FEW


class Textbook:
    """What is exact, and `bounds` for it.

    Of tensors in float64, which `made` holds in the problem's dtype.
    """

    def __init__(self, problem: Problem, made: types.SimpleNamespace) -> None:
        self.problem, self.made = problem, made
        self.lead = problem.lead
        sizes = problem.sizes
        self.L, self.S, self.E, self.Ev = (sizes[n] for n in ("L", "S", "E", "Ev"))
        self.keep_scale = 1 / ((1 - problem.dropout_p) or 1) if problem.dropout_p else 1.0
        scale = problem.scale
        self.scale = 1 / math.sqrt(max(self.E, 1)) if scale is None else scale
        self.x = {n: self.full(made.x[n], n) for n in ("query", "key", "value")}
        self.mask = made.x["attn_mask"]
        # 0 where some input has no entries: every result is then 0.
        self.empty = 0 in (*self.lead, self.L, self.S)

    def full(self, tensor: Tensor, name: str) -> Tensor:
        """In float64, at the leading dimensions of the output."""
        tensor = tensor.detach().double()
        heads = {"key": "Hk", "value": "Hv"}.get(name)
        if self.problem.gqa and heads:
            times = self.problem.sizes["Hq"] // self.problem.sizes[heads]
            tensor = tensor if times == 1 else tensor.repeat_interleave(times, -3)
        return tensor.expand(*self.lead, *tensor.shape[-2:])

    # --- what is exact ----------------------------------------------------------------------------

    @functools.cached_property
    def hidden(self) -> Tensor:
        """[..., L, S], True where a query may not attend to a key."""
        hidden = torch.zeros(*self.lead, self.L, self.S, dtype=torch.bool)
        if self.problem.causal:
            hidden = hidden | torch.ones(self.L, self.S, dtype=torch.bool).triu(1)
        if self.mask is not None:
            of_mask = ~self.mask if self.mask.dtype == torch.bool else self.mask == -INF
            hidden = hidden | of_mask
        return hidden

    @functools.cached_property
    def scores(self) -> Tensor:
        """-inf where hidden."""
        scores = self.x["query"] @ self.x["key"].mT * self.scale
        if self.mask is not None and self.mask.dtype != torch.bool:
            scores = scores + self.mask.detach().double()
        return scores.masked_fill(self.hidden, -INF)

    @functools.cached_property
    def products(self) -> Tensor:
        """sum |q| |k|"""
        return self.x["query"].abs() @ self.x["key"].abs().mT

    @functools.cached_property
    def largest(self) -> Tensor:
        """[..., L, 1], the largest score of each row, 0 of a row without keys."""
        best = self.scores.amax(-1, keepdim=True)
        return best.masked_fill_(best == -INF, 0)

    @functools.cached_property
    def sums(self) -> Tensor:
        return self._unnormalised.sum(-1, keepdim=True)

    @functools.cached_property
    def _unnormalised(self) -> Tensor:
        return (self.scores - self.largest).exp_()

    @functools.cached_property
    def p(self) -> Tensor:
        return self._unnormalised / self.sums.masked_fill(self.sums == 0, 1)

    @functools.cached_property
    def z(self) -> Tensor | None:
        """What dropout multiplies weights with."""
        return None if self.made.kept is None else self.made.kept.double() * self.keep_scale

    def times_z(self, x: Tensor) -> Tensor:
        return x if self.z is None else x * self.z

    @functools.cached_property
    def pz(self) -> Tensor:
        return self.times_z(self.p)

    @functools.cached_property
    def output(self) -> Tensor:
        return self.pz @ self.x["value"]

    @functools.cached_property
    def g(self) -> Tensor:
        return self.made.u.detach().double()

    @functools.cached_property
    def slope(self) -> Tensor:
        """dP - delta"""
        dP = self.times_z(self.g @ self.x["value"].mT)
        return dP - (self.g * self.output).sum(-1, keepdim=True)

    @functools.cached_property
    def ds(self) -> Tensor:
        return self.p * self.slope

    @functools.cached_property
    def t(self) -> dict[str, Tensor]:
        t = {n: self.full(a, n) for n, a in self.made.t.items() if n != "attn_mask"}
        if "attn_mask" in self.made.t:
            t["attn_mask"] = self.made.t["attn_mask"].double()
        return t

    @functools.cached_property
    def tx(self) -> Tensor:
        """The derivative of the scores; 0 where they are hidden."""
        tx = torch.zeros(*self.lead, self.L, self.S, dtype=torch.float64)
        if "query" in self.t:
            tx = tx + self.t["query"] @ self.x["key"].mT * self.scale
        if "key" in self.t:
            tx = tx + self.x["query"] @ self.t["key"].mT * self.scale
        if "attn_mask" in self.t:
            tx = tx + self.t["attn_mask"]
        return tx.masked_fill(self.hidden, 0)

    @functools.cached_property
    def c(self) -> Tensor:
        return (self.p * self.tx).sum(-1, keepdim=True)

    @functools.cached_property
    def tp(self) -> Tensor:
        return self.p * (self.tx - self.c)

    @functools.cached_property
    def tangent(self) -> Tensor:
        tangent = self.times_z(self.tp) @ self.x["value"]
        return tangent + self.pz @ self.t["value"] if "value" in self.t else tangent

    @functools.cached_property
    def tslope(self) -> Tensor:
        """t(dP) - t(delta)"""
        tdelta = (self.g * self.tangent).sum(-1, keepdim=True)
        if "value" not in self.t:
            return -tdelta
        return self.times_z(self.g @ self.t["value"].mT) - tdelta

    @functools.cached_property
    def tds(self) -> Tensor:
        return self.tp * self.slope + self.p * self.tslope

    # --- bounds -----------------------------------------------------------------------------------

    def bounds(self, a: Arithmetic) -> dict[str, tuple[Tensor, Tensor]]:
        """Each result with the bound for the error of each of its numbers."""
        problem, wanted = self.problem, self.problem.wanted
        if self.empty:
            zero, bound = torch.tensor([0, 1e-300], dtype=torch.float64)
            return {n: (zero.expand(s), bound.expand(s)) for n, s in self._shapes()}
        of_forward = Errors(self, a)
        if problem.mode == "forward":
            return {"output": self.rounded(self.output, of_forward.e_output)}
        if problem.mode == "backward":
            gradients = of_forward.gradients()
            return {
                "output": self.rounded(self.output, of_forward.e_output),
                **{f"grad_{n}": self.reduced(n, *gradients[n](), a) for n in wanted},
            }
        # Tangents and second derivatives round no factors of products but those of scores.
        exact = dataclasses.replace(a, weight=0.0, smallest=0.0, factor=0.0)
        errors = SecondErrors(self, exact, of_forward)
        results = {"tangent": self.rounded(self.tangent, errors.e_tangent)}
        if problem.mode == "jvp":
            return results
        second = errors.second()
        return results | {f"second_{n}": self.reduced(n, *second[n](), a) for n in wanted}

    def _shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        mode, x = self.problem.mode, self.made.x
        first = "output" if mode in ("forward", "backward") else "tangent"
        shapes = [(first, self.problem.output_shape)]
        if mode not in ("forward", "jvp"):
            of = "grad" if mode == "backward" else "second"
            shapes += [(f"{of}_{n}", tuple(x[n].shape)) for n in self.problem.wanted]
        return shapes

    def rounded(
        self, x: Tensor, error: Tensor, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """The bound after rounding to the dtype, that of the query if None."""
        info = torch.finfo(dtype or self.problem.torch_dtype)
        bound = error * SLACK
        if info.bits < (64 if self.problem.dtype == "float64" else 32):
            bound = bound + (x.abs() + bound) * (info.eps / 2)
        # half the distance of the numbers below the normal ones, and above 0 in float64, too
        bound = bound + max(info.smallest_normal * info.eps / 2, 1e-323)
        bound = torch.where(x.abs() + bound >= info.max, INF, bound)
        return x, bound.nan_to_num_(nan=INF, posinf=INF)

    def reduced(self, name: str, x: Tensor, error: Tensor, a: Arithmetic) -> tuple[Tensor, Tensor]:
        """The gradient at the output's leading dimensions, summed to the input's."""
        given = self.made.x[name]
        if name != "attn_mask":
            heads = {"key": "Hk", "value": "Hv"}.get(name)
            if self.problem.gqa and heads:
                split = (self.problem.sizes[heads], -1)
                x, error = (b.unflatten(-3, split).sum(-3) for b in (x, error))
            if x.shape == given.shape:
                return self.rounded(x, error)
            # Rounded to the dtype of the result, then summed over what was broadcast.
            x, error = self.rounded(x, error)
        n = x.numel() // max(given.numel(), 1)
        error = error + x.abs() * ((2 * n if a.exact else n) * a.u)
        x, error = x.sum_to_size(given.shape), error.sum_to_size(given.shape)
        return self.rounded(x, error, given.dtype)


class Errors:
    """Of the forward and the gradients, before results are rounded."""

    def __init__(self, textbook: Textbook, a: Arithmetic) -> None:
        self.textbook = t = textbook
        self.a = a
        self.scale = abs(t.scale)
        numbers = [*t.x.values(), *([t.g] if t.made.u is not None else [])]
        big = max((b.abs().max().item() for b in numbers if b.numel()), default=0.0)
        tiny = torch.finfo(torch.float64 if a.exact else torch.float32).smallest_normal
        # What sums lose to numbers that are too small to be normal.
        self.lost = tiny * 300 * (1 + big) ** 2
        # What one product loses whose value is such a number.
        self.least = 2 * tiny * (2.0**-52 if a.exact else 2.0**-23)
        self.visible = (~t.hidden).double()
        self.rounding, self.smallest = self._rounding_of_outputs()

    def _rounding_of_outputs(self) -> tuple[float, float]:
        """Of an output as derivatives know it: of half types without what rounding took from it."""
        p = self.textbook.problem
        masked = self.textbook.mask is not None and self.textbook.mask.dtype != torch.bool
        if p.dtype not in ("bfloat16", "float16") or masked or p.dropout_p:
            return 0.0, 0.0
        return (BF16, 2.0**-134) if p.dtype == "bfloat16" else (F16, 2.0**-25)

    def rounded_output(self, output: Tensor, error: Tensor) -> Tensor:
        """The error of such an output, given that before rounding."""
        error = error + (output.abs() + error) * self.rounding + self.smallest
        # A tangent that float16 cannot hold is infinite, and so is what is computed from it.
        largest = torch.finfo(self.textbook.problem.torch_dtype).max
        return torch.where(output.abs() + error >= largest, INF, error)

    def product(self, n: int, factors: float = 0.0) -> float:
        """The relative error of a sum of n products, of factors that are rounded themselves."""
        return chain(n, self.a) * self.a.u + factors

    @functools.cached_property
    def e_scores(self) -> Tensor:
        t, u = self.textbook, self.a.u
        of_products = (self.product(t.E, 2 * self.a.factor) + FEW * u) * self.scale
        error = t.products * of_products + self.scale * self.lost
        if t.mask is not None and t.mask.dtype != torch.bool:
            error = error + 2 * u * t.scores.masked_fill(t.hidden, 0).abs()
        return error

    @functools.cached_property
    def gone(self) -> Tensor:
        """Hidden, or below the largest score by so much that weights are 0 whatever the errors."""
        t = self.textbook
        far = 750 if self.a.exact else 110
        floor = (t.scores - self.e_scores).amax(-1, keepdim=True) - far
        return (t.scores + self.e_scores < floor) | t.hidden

    @functools.cached_property
    def r(self) -> Tensor:
        """What the logarithms of unnormalised weights are off by."""
        t, a = self.textbook, self.a
        tiles = t.S / 64 + 3  # each corrects what was before it
        distance = (t.largest - t.scores).masked_fill_(self.gone, 0)
        r = self.e_scores + 3 * a.u * distance + tiles * (a.exp + 2 * a.u)
        return (2 * r if a.exact else r).masked_fill_(self.gone, 0)

    @functools.cached_property
    def e_logsumexp(self) -> Tensor:
        """[..., L, 1], by the scores and exponentials alone."""
        moved = self.textbook.p * torch.expm1(self.r.clamp(max=20))
        return torch.log1p(moved.sum(-1, keepdim=True))

    def _softmax(self) -> Tensor:
        """e_P, by the scores and exponentials alone."""
        error = (self.textbook.p * torch.expm1(self.r + self.e_logsumexp)).clamp_(max=1)
        # A row with a score that far off may have any weights.
        anything = (self.r > 20).any(-1, keepdim=True) & ~self.gone
        return error.masked_fill_(anything, 1)

    @functools.cached_property
    def e_p(self) -> Tensor:
        """Of weights that are computed from the saved logsumexp or divided by their sum."""
        t, a = self.textbook, self.a
        few = 2 * chain(t.S, a) + FEW + 3 * t.sums.masked_fill(t.sums == 0, 1).log()
        tiny = 1e-300 if a.exact else 2e-38
        return self._softmax() + t.p * (few * a.u) + self.visible * tiny

    @functools.cached_property
    def e_factor(self) -> Tensor:
        """Of weights, after dropout, as factors of a product."""
        a, t = self.a, self.textbook
        error = self.e_p + t.p * (a.weight + 3 * a.u)
        return t.times_z(error + self.visible * a.smallest if a.smallest else error)

    @functools.cached_property
    def e_output(self) -> Tensor:
        t = self.textbook
        v = t.x["value"].abs()
        return (self.e_factor + t.pz * self.product(t.S, self.a.factor)) @ v + self.lost

    @functools.cached_property
    def e_slope(self) -> Tensor:
        t, u = self.textbook, self.a.u
        g, v = t.g.abs(), t.x["value"].abs()
        e_dP = t.times_z(g @ v.mT) * (self.product(t.Ev, 2 * self.a.factor) + 3 * u)
        relative = self.product(t.Ev, 2 * self.a.factor) + 3 * u
        e_output = self.rounded_output(t.output, self.e_output)
        e_delta = (g * (e_output * SLACK + t.output.abs() * relative)).sum(-1, keepdim=True)
        return e_dP + e_delta + 2 * u * t.slope.abs() + self.lost * self.textbook.keep_scale

    @functools.cached_property
    def e_ds(self) -> Tensor:
        t = self.textbook
        e_slope = self.e_slope
        error = self.e_p * (t.slope.abs() + e_slope) + t.p * e_slope + 3 * self.a.u * t.ds.abs()
        return error + self.visible * self.least

    @functools.cached_property
    def e_ds_factor(self) -> Tensor:
        """Of dS as a factor of a product."""
        t, a = self.textbook, self.a
        error = self.e_ds + (t.ds.abs() + self.e_ds) * a.weight
        if a.smallest:
            error = error + self.visible * a.smallest
            error = torch.where(t.ds.abs() + error >= torch.finfo(torch.float16).max, INF, error)
        return error

    def gradients(self) -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
        return {"query": self.query, "key": self.key, "value": self.value, "attn_mask": self.mask}

    def rows(self) -> int:
        """What a sum over the queries of a key may have."""
        p = self.textbook.problem
        return self.textbook.L * (p.sizes["Hq"] if p.gqa else 1)

    def query(self) -> tuple[Tensor, Tensor]:
        t = self.textbook
        k = t.x["key"]
        relative = self.product(t.S, self.a.factor) + 3 * self.a.u
        error = (self.e_ds_factor + t.ds.abs() * relative) @ k.abs()
        return t.ds @ k * t.scale, (error + self.lost) * self.scale

    def key(self) -> tuple[Tensor, Tensor]:
        t = self.textbook
        q = t.x["query"]
        relative = self.product(self.rows(), self.a.factor) + 3 * self.a.u
        error = (self.e_ds_factor + t.ds.abs() * relative).mT @ q.abs()
        return t.ds.mT @ q * t.scale, (error + self.lost) * self.scale

    def value(self) -> tuple[Tensor, Tensor]:
        t = self.textbook
        relative = self.product(self.rows(), self.a.factor)
        error = (self.e_factor + t.pz * relative).mT @ t.g.abs()
        return t.pz.mT @ t.g, error + self.lost

    def mask(self) -> tuple[Tensor, Tensor]:
        return self.textbook.ds, self.e_ds


class SecondErrors(Errors):
    """Of tangents and second derivatives; the forward may have computed otherwise."""

    def __init__(self, textbook: Textbook, a: Arithmetic, forward: Errors) -> None:
        super().__init__(textbook, a)
        self.e_scores = forward.e_scores  # of factors that are rounded as the forward's
        self.e_output = forward.e_output
        self.e_logsumexp = forward.e_logsumexp

    @functools.cached_property
    def e_tx(self) -> Tensor:
        t, u = self.textbook, self.a.u
        error = 2 * u * t.tx.abs() + self.scale * self.lost
        relative = (self.product(t.E) + FEW * u) * self.scale
        if "query" in t.t:
            error = error + t.t["query"].abs() @ t.x["key"].abs().mT * relative
        if "key" in t.t:
            error = error + t.x["query"].abs() @ t.t["key"].abs().mT * relative
        if "attn_mask" in t.t:
            error = error + 2 * u * t.t["attn_mask"].abs()
        return error.masked_fill(t.hidden, 0)

    @functools.cached_property
    def e_moved(self) -> Tensor:
        """[..., L, 1], of c - r, r being a mean of some of the tx."""
        return self._sum_of_moves.sum(-1, keepdim=True)

    @functools.cached_property
    def range(self) -> Tensor:
        """[..., L, 1], what |c - r| is at most."""
        t = self.textbook
        return (t.tx - t.c).masked_fill(t.hidden, 0).abs().amax(-1, keepdim=True)

    @functools.cached_property
    def moves(self) -> Tensor:
        """What |tx - r| is at most."""
        t = self.textbook
        return (t.tx - t.c).masked_fill(t.hidden, 0).abs() + self.range

    @functools.cached_property
    def _sum_of_moves(self) -> Tensor:
        """Of P (tx - r), with the roundings of its sum over the keys."""
        t, u = self.textbook, self.a.u
        moves = self.moves
        relative = self.product(t.S) + 3 * u
        return self.e_p * (moves + self.e_tx) + t.p * (self.e_tx + moves * relative)

    @functools.cached_property
    def e_tangent(self) -> Tensor:
        t = self.textbook
        error = t.times_z(self._sum_of_moves) @ t.x["value"].abs()
        if "value" in t.t:
            weights = self.e_p + t.p * (self.product(t.S) + 3 * self.a.u)
            error = error + t.times_z(weights) @ t.t["value"].abs()
        e_moved = self.e_moved
        e_output = self.rounded_output(t.output, self.e_output)
        error = error + e_moved * t.output.abs() + (self.range + e_moved) * e_output
        few = FEW * self.a.u
        return error + few * (self.range * t.output.abs() + t.tangent.abs()) + self.lost

    @functools.cached_property
    def e_tp(self) -> Tensor:
        t, u = self.textbook, self.a.u
        move = (t.tx - t.c).masked_fill(t.hidden, 0).abs()
        e_move = self.e_tx + self.e_moved + 3 * u * (move + self.range)
        error = self.e_p * (move + e_move) + t.p * e_move + u * t.tp.abs()
        return error + self.visible * self.least

    @functools.cached_property
    def e_tslope(self) -> Tensor:
        t, u = self.textbook, self.a.u
        g = t.g.abs()
        relative = self.product(t.Ev) + 3 * u
        e_tangent = self.rounded_output(t.tangent, self.e_tangent)
        e_tdelta = g * (e_tangent * SLACK + t.tangent.abs() * relative)
        error = e_tdelta.sum(-1, keepdim=True) + 2 * u * t.tslope.abs() + self.lost
        if "value" in t.t:
            error = error + t.times_z(g @ t.t["value"].abs().mT) * relative
        return error

    @functools.cached_property
    def e_tds(self) -> Tensor:
        t, u = self.textbook, self.a.u
        error = self.e_tp * (t.slope.abs() + self.e_slope) + t.tp.abs() * self.e_slope
        error = error + self.e_p * (t.tslope.abs() + self.e_tslope) + t.p * self.e_tslope
        error = error + 4 * u * ((t.tp * t.slope).abs() + (t.p * t.tslope).abs())
        return error + self.visible * self.least

    def second(self) -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
        return {
            "query": self.second_query,
            "key": self.second_key,
            "value": self.second_value,
            "attn_mask": self.second_mask,
        }

    def second_query(self) -> tuple[Tensor, Tensor]:
        t = self.textbook
        relative = self.product(2 * t.S) + 3 * self.a.u
        k = t.x["key"]
        exact = t.tds @ k
        error = (self.e_tds + t.tds.abs() * relative) @ k.abs() + self.lost
        if "key" in t.t:
            tk = t.t["key"]
            exact = exact + t.ds @ tk
            error = error + (self.e_ds + t.ds.abs() * relative) @ tk.abs()
        return exact * t.scale, error * self.scale

    def second_key(self) -> tuple[Tensor, Tensor]:
        t = self.textbook
        relative = self.product(2 * self.rows()) + 3 * self.a.u
        q = t.x["query"]
        exact = t.tds.mT @ q
        error = (self.e_tds + t.tds.abs() * relative).mT @ q.abs() + self.lost
        if "query" in t.t:
            tq = t.t["query"]
            exact = exact + t.ds.mT @ tq
            error = error + (self.e_ds + t.ds.abs() * relative).mT @ tq.abs()
        return exact * t.scale, error * self.scale

    def second_value(self) -> tuple[Tensor, Tensor]:
        t = self.textbook
        relative = self.product(self.rows()) + 3 * self.a.u
        error = t.times_z(self.e_tp + t.tp.abs() * relative).mT @ t.g.abs()
        return t.times_z(t.tp).mT @ t.g, error + self.lost

    def second_mask(self) -> tuple[Tensor, Tensor]:
        return self.textbook.tds, self.e_tds
