"""A bound for the error of each number of each result.

The bounds follow from the standard model fl(a op b) = (a op b)(1 + d), |d| <= u, and

- a sum of n products, in any order, is off by at most n u sum |a_i b_i| to first order, and one
  added up from parts of 64, as all kernels do, by (64 + n / 32) u sum |a_i b_i|
  (N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed. 2002, sections 3.1, 4.2);
- with scores off by r_j (and weights by a factor e^(r_j) for what else is inexact), softmax gives
  P_j e^(r_j) / sum_k P_k e^(r_k), of which the logarithm is off by at most
  r_j + log sum_k P_k e^(r_k). Nothing is of first order here: scores may be off by 10.
  (The first-order form: P. Blanchard, D. J. Higham, N. J. Higham, Accurately computing the
  log-sum-exp and softmax functions, IMA J. Numer. Anal. 41(4), 2021, sections 3 and 4.)
  The logarithm of the sum itself is off by no more than the same log sum_k P_k e^(r_k), and by no
  more than the largest r_k. A sink is one of the scores in all this;
- with cap(z) = c tanh(z / c) and z off by e, cap(z) is off by at most cap(|z|) - cap(|z| - e),
  which is cap(e) (1 - tanh(|z| / c) tanh((|z| - e) / c)): of first order neither.

Absolute errors are carried through the formulas of textbook.py; `e_x` is the bound for the error of
x. Products of two errors are left out where both are small: hence `SLACK`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .problem import OF_KEY, ON_CUDA, RESULTS, Problem
from .textbook import INF, Textbook

SLACK = 1.02
# A few operations of one rounding each that the analysis does not list one by one.
FEW = 8
# The hyperbolic tangent rounds in its last three operations (csrc/cpu/simd/exp.inl): where it is
# small 3 ulps, or 6 unit roundoffs, and its argument is a product of two numbers that were rounded.
# Near 1 all this is small beside it, and one rounding counts.
TANH, TANH_NEAR_1 = 6 + 3, 4


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """How a kernel computes."""

    u: float  # unit roundoff of sums, statistics and exponentials
    exp: float  # relative error of an exponential of an exact argument
    weight: float = 0.0  # unit roundoff of weights where they are factors of a product
    smallest: float = 0.0  # what a weight below its type's normal numbers is off by
    factor: float = 0.0  # unit roundoff of all other factors of products
    exact: bool = False  # the textbook is no better than the kernel
    # unit roundoff of weights in the output that derivatives know, if slopes or sinks are there
    known: float = 0.0


BF16, F16 = 2.0**-8, 2.0**-11  # unit roundoffs


def arithmetic(problem: Problem, capability: str) -> Arithmetic:
    """The arithmetic of the forward and the gradients."""
    if problem.dtype == "float64":
        return Arithmetic(2.0**-53, 4 * 2.0**-53, exact=True)
    u = 2.0**-24
    plain = Arithmetic(u, 4 * u)
    exact_weights = "attn_mask" in problem.dtypes
    if capability in ON_CUDA:
        # Latent attention rounds weights; the other kernels of large heads do not.
        large = max(problem.sizes["E"], problem.sizes["Ev"]) > 256
        large = large and problem.values["value"] != OF_KEY
        if large or exact_weights or problem.dtype not in ("bfloat16", "float16"):
            return plain
        unit, smallest = (BF16, 0.0) if problem.dtype == "bfloat16" else (F16, 2.0**-25)
        # Where there are slopes, what rounding takes from a weight is multiplied, too, rounded
        # itself.
        known = unit**2 if "alibi_slopes" in problem.dims else unit
        return Arithmetic(u, 4 * u, weight=unit, smallest=smallest, known=known)
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
    # What rounding takes from a weight is multiplied with the values, too, rounded itself.
    known = unit**2 if bits == 8 and problem.dtype == "bfloat16" else unit
    return Arithmetic(u, exp, weight=unit, factor=unit if given > bits else 0.0, known=known)


def chain(n: int, a: Arithmetic) -> float:
    """The number of roundings that one of n summed products goes through."""
    # In float64 the textbook is another such sum, which torch adds up in an order of its own.
    return 2 * n + FEW if a.exact else min(n, 64 + n / 32) + FEW


def bounds(textbook: Textbook, a: Arithmetic) -> dict[str, tuple[Tensor, Tensor]]:
    """Each result with the bound for the error of each of its numbers."""
    t, problem = textbook, textbook.problem
    if t.empty:
        zero, bound = torch.tensor([0, 1e-300], dtype=torch.float64)
        return {n: (zero.expand(s), bound.expand(s)) for n, s in shapes(t)}
    to = Results(t, a)
    errors = Errors(t, a)
    if problem.mode in ("forward", "backward"):
        results = {"output": to.rounded(t.output, errors.e_output)}
        if problem.rows:
            results["logsumexp"] = to.of_rows(t.logsumexp, errors.e_rows)
            results["max_score"] = to.of_rows(t.max_score, errors.e_max_score)
        if problem.mode == "backward":
            gradients = errors.gradients()
            results |= {f"grad_{n}": to.reduced(n, *gradients[n]()) for n in problem.wanted}
        return results
    # Tangents and second derivatives round factors of products only in scores.
    exact = dataclasses.replace(a, weight=0.0, smallest=0.0, factor=0.0)
    errors = SecondErrors(t, exact, errors)
    results = {}
    if "output" in t.made.u:
        results["tangent_output"] = to.rounded(t.tangent, errors.e_tangent)
    if "logsumexp" in t.made.u:
        results["tangent_logsumexp"] = to.of_rows(t.c, errors.e_c)
    if problem.mode == "jvp":
        return results
    second = errors.second()
    return results | {f"second_{n}": to.reduced(n, *second[n]()) for n in problem.wanted}


def shapes(textbook: Textbook) -> list[tuple[str, tuple[int, ...]]]:
    made, problem = textbook.made, textbook.problem
    of_rows = {"output": problem.output_shape} | dict.fromkeys(RESULTS[1:], problem.rows_shape)
    if problem.mode in ("forward", "backward"):
        found = [(n, of_rows[n]) for n in (RESULTS if problem.rows else RESULTS[:1])]
    else:
        found = [(f"tangent_{n}", of_rows[n]) for n in made.u]
    if problem.mode not in ("forward", "jvp"):
        of = "grad" if problem.mode == "backward" else "second"
        found += [(f"{of}_{n}", tuple(made.x[n].shape)) for n in problem.wanted]
    return found


class Results:
    """What is exact and a bound, as the results have it: in the input's shape, and rounded."""

    def __init__(self, textbook: Textbook, a: Arithmetic) -> None:
        self.textbook, self.problem, self.a = textbook, textbook.problem, a

    def rounded(
        self, x: Tensor, error: Tensor, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """The bound after rounding to the dtype, or to the query's if None."""
        info = torch.finfo(dtype or self.problem.torch_dtype)
        bound = error * SLACK
        if info.bits < (64 if self.problem.dtype == "float64" else 32):
            bound = bound + (x.abs() + bound) * (info.eps / 2)
        # half the distance of the numbers below the normal ones, and above 0 in float64, too
        bound = bound + max(info.smallest_normal * info.eps / 2, 1e-323)
        bound = torch.where(x.abs() + bound >= info.max, INF, bound)
        return x, bound.nan_to_num_(nan=INF, posinf=INF)

    def of_rows(self, x: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
        """The bound of a number per row; one that is infinite has no error."""
        exact, bound = self.rounded(x, error, self.problem.dtype_of_rows)
        return exact.squeeze(-1), bound.masked_fill(x == -INF, 1e-300).squeeze(-1)

    def reduced(self, name: str, x: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient at the output's leading dimensions, summed to the input's."""
        given, a = self.textbook.made.x[name], self.a
        if name in ("alibi_slopes", "sinks"):
            return self.of_heads(name, x, error)
        if name != "attn_mask":
            heads = {"key": "Hk", "value": "Hv"}.get(name)
            if heads and self.textbook.beyond is not None:  # where nothing is read, exactly 0
                error = error.masked_fill(self.textbook.beyond.mT, 0)
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

    def of_heads(self, name: str, x: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
        """The bound of numbers per row, summed in float64 over the rows and what was broadcast."""
        given = self.textbook.made.x[name]
        n = x.numel() // max(given.numel(), 1)
        info = torch.finfo(self.problem.dtype_of_rows)
        error = error + x.abs() * (self.a.u + 2 * n * 2.0**-53) + info.smallest_normal * info.eps
        x, error = (b.sum((-2, -1)).reshape(self.problem.lead or (1,)) for b in (x, error))
        x, error = x.sum_to_size(given.shape), error.sum_to_size(given.shape)
        return self.rounded(x, error + x.abs() * self.a.u, given.dtype)


class Errors:
    """Errors of the forward and the gradients, before results are rounded."""

    def __init__(self, textbook: Textbook, a: Arithmetic) -> None:
        self.textbook = t = textbook
        self.a = a
        self.scale = abs(t.scale)
        numbers = [*t.x.values(), *(t.made.u or {}).values()]
        big = max((b.abs().max().item() for b in numbers if b.numel()), default=0.0)
        tiny = torch.finfo(torch.float64 if a.exact else torch.float32).smallest_normal
        # What sums lose to numbers that are too small to be normal.
        self.lost = tiny * 300 * (1 + big) ** 2
        # What one product loses whose value is such a number.
        self.least = 2 * tiny * (2.0**-52 if a.exact else 2.0**-23)
        self.visible = (~t.hidden).double()
        self.rounding, self.smallest = self._rounding_of_outputs()

    def _rounding_of_outputs(self) -> tuple[float, float]:
        """Rounding of the output that derivatives read, relative and absolute; 0 if exact."""
        p = self.textbook.problem
        masked = self.textbook.mask is not None and self.textbook.mask.dtype != torch.bool
        kept = masked or p.dropout_p or "alibi_slopes" in p.dims or "sinks" in p.dims
        if p.dtype not in ("bfloat16", "float16") or kept:
            return 0.0, 0.0
        return (BF16, 2.0**-134) if p.dtype == "bfloat16" else (F16, 2.0**-25)

    def rounded_output(self, output: Tensor, error: Tensor) -> Tensor:
        """The error of such an output, given that before rounding."""
        error = error + (output.abs() + error) * self.rounding + self.smallest
        # A tangent that float16 cannot hold is infinite, and so is what is computed from it.
        largest = torch.finfo(self.textbook.problem.torch_dtype).max
        return torch.where(output.abs() + error >= largest, INF, error)

    @property
    def u_of_both(self) -> float:
        """Where the kernel rounds, so does the textbook, if it is no better."""
        return 2 * self.a.u if self.a.exact else self.a.u

    def product(self, n: int, factors: float = 0.0) -> float:
        """The relative error of a sum of n products, of factors that are rounded themselves."""
        return chain(n, self.a) * self.a.u + factors

    @functools.cached_property
    def e_scaled(self) -> Tensor:
        t = self.textbook
        of_products = (self.product(t.E, 2 * self.a.factor) + FEW * self.a.u) * self.scale
        return t.products * of_products + self.scale * self.lost

    @functools.cached_property
    def e_capped(self) -> Tensor:
        t, c = self.textbook, self.textbook.cap
        if not c:
            return self.e_scaled
        size, e = t.scaled.abs() / c, self.e_scaled / c
        error = c * e.tanh() * (1 - size.tanh() * (size - e).tanh())
        # An argument too small to be normal loses digits, and so does scale / c; but not of a cap
        # that the type computed in does not hold, which is as good as none. The score itself, too.
        held = c < torch.finfo(t.problem.dtype_of_rows).max
        tiny = 2 * self.least * (1 + (c if held else 0) * (1 + t.products))
        roundings = TANH - (TANH - TANH_NEAR_1) * t.part.square()
        return error + t.capped.abs() * ((roundings + 2) * self.u_of_both) + tiny

    @functools.cached_property
    def e_scores(self) -> Tensor:
        t, u = self.textbook, self.a.u
        error = self.e_capped
        if t.slopes is not None:
            error = error + u * (3 * t.bias.abs() + t.biased.abs())
        if t.mask is not None and t.mask.dtype != torch.bool:
            error = error + 2 * u * t.scores.masked_fill(t.hidden, 0).abs()
        return error

    @functools.cached_property
    def e_sink(self) -> Tensor:
        """Error of a sink as one of the scores: the largest is subtracted from it, as from them."""
        t = self.textbook
        sizes = [b.masked_fill(b == -INF, 0).abs() for b in (t.sink, t.max_score)]
        return (2 * self.a.u * torch.maximum(*sizes)).masked_fill(t.sink == -INF, 0)

    @functools.cached_property
    def floor(self) -> Tensor:
        """So far below the largest score that weights are 0 whatever the errors."""
        t = self.textbook
        floor = t.sink - self.e_sink
        if t.S:
            floor = torch.maximum(floor, (t.scores - self.e_scores).amax(-1, keepdim=True))
        return floor - (750 if self.a.exact else 110)

    @functools.cached_property
    def gone(self) -> Tensor:
        """Below the floor, or hidden."""
        t = self.textbook
        return (t.scores + self.e_scores < self.floor) | t.hidden

    @functools.cached_property
    def sink_gone(self) -> Tensor:
        t = self.textbook
        return (t.sink + self.e_sink < self.floor) | (t.sink == -INF)

    @functools.cached_property
    def tiles(self) -> float:
        """Each corrects what was before it."""
        t = self.textbook
        return t.S / 64 + (3 if t.sinks is None else 4)

    def _unnormalised(self, e: Tensor, x: Tensor, gone: Tensor) -> Tensor:
        """What the logarithm of the weight of a score x is off by, the score by e."""
        a = self.a
        distance = (self.textbook.largest - x).masked_fill_(gone, 0)
        r = e + 3 * a.u * distance + self.tiles * (a.exp + 2 * a.u)
        return (2 * r if a.exact else r).masked_fill_(gone, 0)

    @functools.cached_property
    def r(self) -> Tensor:
        return self._unnormalised(self.e_scores, self.textbook.scores, self.gone)

    @functools.cached_property
    def r_sink(self) -> Tensor:
        t = self.textbook
        return self._unnormalised(self.e_sink, t.sink, self.sink_gone)

    def _sum(self, r: Tensor, r_sink: Tensor) -> Tensor:
        moved = (self.textbook.p * torch.expm1(r)).sum(-1, keepdim=True)
        return torch.log1p(moved + self.textbook.p_sink * torch.expm1(r_sink))

    @functools.cached_property
    def e_logsumexp(self) -> Tensor:
        """[..., L, 1], by the scores and exponentials alone."""
        return self._sum(self.r.clamp(max=20), self.r_sink.clamp(max=20))

    @functools.cached_property
    def e_rows(self) -> Tensor:
        """Error of the logsumexp as a result."""
        t, a = self.textbook, self.a
        most = self.r_sink
        if t.S:
            most = torch.maximum(most, self.r.amax(-1, keepdim=True))
        error = torch.where(most > 20, most, torch.minimum(most, self.e_logsumexp))
        return error + (chain(t.S, a) + FEW) * a.u + 2 * a.u * t.logsumexp.abs()

    @functools.cached_property
    def e_max_score(self) -> Tensor:
        t, e = self.textbook, self.e_scores
        if not t.S:
            return torch.zeros_like(t.max_score)
        above = (t.scores + e).amax(-1, keepdim=True) - t.max_score
        below = t.max_score - (t.scores - e).amax(-1, keepdim=True)
        error = torch.maximum(above, below)
        return (2 * error if self.a.exact else error) + 2 * self.a.u * t.max_score.abs()

    def _softmax(self, p: Tensor, r: Tensor, gone: Tensor) -> Tensor:
        """The error of weights by the scores and exponentials alone."""
        error = (p * torch.expm1(r + self.e_logsumexp)).clamp_(max=1)
        # A row with a score that far off may have any weights.
        anything = (self.r > 20).any(-1, keepdim=True) | (self.r_sink > 20)
        return error.masked_fill_(anything & ~gone, 1)

    @functools.cached_property
    def few(self) -> Tensor:
        """Relative to u, of what is computed from a saved logsumexp or divided by its sum."""
        t = self.textbook
        return 2 * chain(t.S, self.a) + FEW + 3 * t.sums.masked_fill(t.sums == 0, 1).log()

    @functools.cached_property
    def e_p(self) -> Tensor:
        t, a = self.textbook, self.a
        tiny = 1e-300 if a.exact else 2e-38
        error = self._softmax(t.p, self.r, self.gone)
        return error + t.p * (self.few * a.u) + self.visible * tiny

    @functools.cached_property
    def e_p_sink(self) -> Tensor:
        t = self.textbook
        error = self._softmax(t.p_sink, self.r_sink, self.sink_gone)
        return error + t.p_sink * (self.few * self.a.u)

    @functools.cached_property
    def e_factor(self) -> Tensor:
        """Error of weights, after dropout, as factors of a product."""
        return self.e_weight_rounded_by(self.a.weight)

    def e_weight_rounded_by(self, unit: float) -> Tensor:
        a, t = self.a, self.textbook
        error = self.e_p + t.p * (unit + 3 * a.u)
        return t.times_z(error + self.visible * a.smallest if a.smallest else error)

    @functools.cached_property
    def e_output(self) -> Tensor:
        return self.e_output_of(self.e_factor)

    def e_output_of(self, e_weights: Tensor) -> Tensor:
        t = self.textbook
        v = t.x["value"].abs()
        return (e_weights + t.pz * self.product(t.S, self.a.factor)) @ v + self.lost

    @functools.cached_property
    def e_known_output(self) -> Tensor:
        """Error of the output as derivatives know it, with its residual."""
        wanted = self.textbook.problem.wanted
        sums_scores = "alibi_slopes" in wanted or "sinks" in wanted
        unit = self.a.known if sums_scores else self.a.weight
        error = self.e_output_of(self.e_weight_rounded_by(unit))
        return self.rounded_output(self.textbook.output, error)

    @functools.cached_property
    def e_delta(self) -> Tensor:
        t, u = self.textbook, self.a.u
        relative = self.product(t.Ev, 2 * self.a.factor) + 3 * u
        error = t.g.abs() * (self.e_known_output * SLACK + t.output.abs() * relative)
        return error.sum(-1, keepdim=True) + u * t.delta.abs()

    @functools.cached_property
    def e_slope(self) -> Tensor:
        t, u = self.textbook, self.a.u
        g, v = t.g.abs(), t.x["value"].abs()
        e_dP = t.times_z(g @ v.mT) * (self.product(t.Ev, 2 * self.a.factor) + 3 * u)
        return e_dP + self.e_delta + 2 * u * t.slope.abs() + self.lost * self.textbook.keep_scale

    @functools.cached_property
    def e_ds(self) -> Tensor:
        t = self.textbook
        e_slope = self.e_slope
        error = self.e_p * (t.slope.abs() + e_slope) + t.p * e_slope + 3 * self.a.u * t.ds.abs()
        return error + self.visible * self.least

    @functools.cached_property
    def e_part(self) -> Tensor:
        return self.e_capped / self.textbook.cap

    @functools.cached_property
    def e_cap_slope(self) -> Tensor:
        t, e = self.textbook, self.e_part
        return e * (2 + e) + 3 * self.u_of_both * t.cap_slope.abs()

    @functools.cached_property
    def e_cap_bend(self) -> Tensor:
        t = self.textbook
        error = of_product(t.part, self.e_part, t.cap_slope, self.e_cap_slope)
        return 2 / t.cap * error + 4 * self.u_of_both * t.cap_bend.abs()

    @functools.cached_property
    def e_dz(self) -> Tensor:
        t = self.textbook
        if not t.cap:
            return self.e_ds
        error = of_product(t.ds, self.e_ds, t.cap_slope, self.e_cap_slope)
        return error + self.a.u * t.dz.abs() + self.visible * self.least

    @functools.cached_property
    def e_dz_factor(self) -> Tensor:
        """Error of dz, the gradient of what is capped, as a factor of a product."""
        t, a = self.textbook, self.a
        error = self.e_dz + (t.dz.abs() + self.e_dz) * a.weight
        if a.smallest:
            error = error + self.visible * a.smallest
            error = torch.where(t.dz.abs() + error >= torch.finfo(torch.float16).max, INF, error)
        return error

    def gradients(self) -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
        return {
            "query": self.query,
            "key": self.key,
            "value": self.value,
            "attn_mask": self.mask,
            "alibi_slopes": self.slopes,
            "sinks": self.sinks,
        }

    def rows(self) -> int:
        """What a sum over the queries of a key may have."""
        p = self.textbook.problem
        return self.textbook.L * (p.sizes["Hq"] if p.gqa else 1)

    def query(self) -> tuple[Tensor, Tensor]:
        t = self.textbook
        k = t.x["key"]
        relative = self.product(t.S, self.a.factor) + 3 * self.a.u
        error = (self.e_dz_factor + t.dz.abs() * relative) @ k.abs()
        return t.dz @ k * t.scale, (error + self.lost) * self.scale

    def key(self) -> tuple[Tensor, Tensor]:
        t = self.textbook
        q = t.x["query"]
        relative = self.product(self.rows(), self.a.factor) + 3 * self.a.u
        error = (self.e_dz_factor + t.dz.abs() * relative).mT @ q.abs()
        return t.dz.mT @ q * t.scale, (error + self.lost) * self.scale

    def value(self) -> tuple[Tensor, Tensor]:
        t = self.textbook
        relative = self.product(self.rows(), self.a.factor)
        error = (self.e_factor + t.pz * relative).mT @ t.g.abs()
        return t.pz.mT @ t.g, error + self.lost

    def mask(self) -> tuple[Tensor, Tensor]:
        error = self.sinks()[1] + 2 * self.a.u * self.textbook.g_rows.abs()
        return self.of_mask(self.textbook.ds, self.e_ds, error)

    def of_mask(self, ds: Tensor, e_ds: Tensor, e_rows: Tensor) -> tuple[Tensor, Tensor]:
        """Sums over the keys where a mask has one number per row: sum_j dS_ij is g - dS_sink.

        e_rows: the error of that difference.
        """
        t = self.textbook
        if t.mask is None or t.mask.size(-1) != 1:
            return ds, e_ds
        error = (e_ds + ds.abs() * (chain(t.S, self.a) * self.a.u)).sum(-1, keepdim=True)
        return ds.sum(-1, keepdim=True), torch.maximum(error, e_rows)

    def slopes(self) -> tuple[Tensor, Tensor]:
        return self.times_distance(self.textbook.ds, self.e_ds)

    def times_distance(self, ds: Tensor, e_ds: Tensor) -> tuple[Tensor, Tensor]:
        """[..., L, 1], -sum_j dS_ij |p - j|, added up one after the other."""
        t = self.textbook
        n = (2 * t.S if self.a.exact else t.S) + FEW
        error = (e_ds + ds.abs() * (n * self.a.u)) * t.distance
        return -(ds * t.distance).sum(-1, keepdim=True), error.sum(-1, keepdim=True) + self.lost

    def sinks(self) -> tuple[Tensor, Tensor]:
        t = self.textbook
        error = of_product(t.p_sink, self.e_p_sink, t.delta, self.e_delta)
        return t.ds_sink, error + 3 * self.a.u * t.ds_sink.abs()


def of_product(a: Tensor, e_a: Tensor, b: Tensor, e_b: Tensor) -> Tensor:
    """The error of a b, before it is rounded."""
    return e_a * (b.abs() + e_b) + a.abs() * e_b


class SecondErrors(Errors):
    """Errors of tangents and second derivatives; the forward may have computed otherwise."""

    def __init__(self, textbook: Textbook, a: Arithmetic, forward: Errors) -> None:
        super().__init__(textbook, a)
        self.e_scores = forward.e_scores  # of factors that are rounded as the forward's
        self.e_capped = forward.e_capped
        self.e_known_output = forward.e_known_output
        self.e_logsumexp = forward.e_logsumexp

    @functools.cached_property
    def e_tz(self) -> Tensor:
        t, u = self.textbook, self.a.u
        error = u * t.tz.abs() + self.scale * self.lost
        relative = (self.product(t.E) + FEW * u) * self.scale
        if "query" in t.t:
            error = error + t.t["query"].abs() @ t.x["key"].abs().mT * relative
        if "key" in t.t:
            error = error + t.x["query"].abs() @ t.t["key"].abs().mT * relative
        return error

    @functools.cached_property
    def e_tx(self) -> Tensor:
        t, u = self.textbook, self.a.u
        error = self.e_tz
        if t.cap:
            error = of_product(t.tz, error, t.cap_slope, self.e_cap_slope)
            error = error + u * (t.tz * t.cap_slope).abs()
        if t.t_bias is not None:
            error = error + 4 * u * t.t_bias.abs()
        if t.t_mask is not None:
            error = error + 2 * u * t.t_mask.abs()
        return (error + 2 * u * t.tx.abs()).masked_fill(t.hidden, 0)

    @functools.cached_property
    def e_moved(self) -> Tensor:
        """[..., L, 1], of c - r, r being a mean of some of the tx."""
        t = self.textbook
        of_sink = (t.t_sink - t.c).abs() + self.range
        error = self.e_p_sink * of_sink + t.p_sink * (of_sink * FEW * self.a.u)
        return self._sum_of_moves.sum(-1, keepdim=True) + error

    @functools.cached_property
    def e_c(self) -> Tensor:
        """Error of the derivative of the logsumexp as a result: r + (c - r)."""
        t, a = self.textbook, self.a
        error = self.e_moved + 2 * a.u * (t.c.abs() + self.range)
        if a.exact:  # the textbook adds up what is not shifted
            error = error + chain(t.S, a) * a.u * (t.p * t.tx.abs()).sum(-1, keepdim=True)
        return error + self.lost

    @functools.cached_property
    def range(self) -> Tensor:
        """[..., L, 1], what |c - r| is at most. Where no weight but the sink's is above 0,
        r is 0."""
        t = self.textbook
        if not t.S:
            return t.c.abs()
        moves = (t.tx - t.c).masked_fill(t.hidden, 0).abs().amax(-1, keepdim=True)
        none = t.p.amax(-1, keepdim=True) < (1e-290 if self.a.exact else 1e-30)
        return torch.where(none, torch.maximum(moves, t.c.abs()), moves)

    @functools.cached_property
    def moves(self) -> Tensor:
        """What |tx - r| is at most."""
        t = self.textbook
        return (t.tx - t.c).masked_fill(t.hidden, 0).abs() + self.range

    @functools.cached_property
    def _sum_of_moves(self) -> Tensor:
        """Error of P (tx - r), with the roundings of its sum over the keys."""
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
        e_output = self.e_known_output
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
    def e_tdelta(self) -> Tensor:
        t = self.textbook
        relative = self.product(t.Ev) + 3 * self.a.u
        e_tangent = self.rounded_output(t.tangent, self.e_tangent)
        error = t.g.abs() * (e_tangent * SLACK + t.tangent.abs() * relative)
        return error.sum(-1, keepdim=True)

    @functools.cached_property
    def e_tslope(self) -> Tensor:
        t, u = self.textbook, self.a.u
        error = self.e_tdelta + 2 * u * t.tslope.abs() + self.lost
        if "value" in t.t:
            relative = self.product(t.Ev) + 3 * u
            error = error + t.times_z(t.g.abs() @ t.t["value"].abs().mT) * relative
        return error

    @functools.cached_property
    def e_tds(self) -> Tensor:
        t, u = self.textbook, self.a.u
        error = self.e_tp * (t.slope.abs() + self.e_slope) + t.tp.abs() * self.e_slope
        error = error + self.e_p * (t.tslope.abs() + self.e_tslope) + t.p * self.e_tslope
        error = error + 4 * u * ((t.tp * t.slope).abs() + (t.p * t.tslope).abs())
        return error + self.visible * self.least

    @functools.cached_property
    def e_tdz(self) -> Tensor:
        t, u = self.textbook, self.a.u
        if not t.cap:
            return self.e_tds
        error = of_product(t.tds, self.e_tds, t.cap_slope, self.e_cap_slope)
        bent = t.ds * t.cap_bend
        e_bent = of_product(t.ds, self.e_ds, t.cap_bend, self.e_cap_bend)
        error = error + of_product(bent, e_bent, t.tz, self.e_tz)
        error = error + u * (2 * (t.tds * t.cap_slope).abs() + 3 * (bent * t.tz).abs())
        return error + self.visible * self.least

    def second(self) -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
        return {
            "query": self.second_query,
            "key": self.second_key,
            "value": self.second_value,
            "attn_mask": self.second_mask,
            "alibi_slopes": self.second_slopes,
            "sinks": self.second_sinks,
        }

    def second_query(self) -> tuple[Tensor, Tensor]:
        t = self.textbook
        relative = self.product(2 * t.S) + 3 * self.a.u
        k = t.x["key"]
        exact = t.tdz @ k
        error = (self.e_tdz + t.tdz.abs() * relative) @ k.abs() + self.lost
        if "key" in t.t:
            tk = t.t["key"]
            exact = exact + t.dz @ tk
            error = error + (self.e_dz + t.dz.abs() * relative) @ tk.abs()
        return exact * t.scale, error * self.scale

    def second_key(self) -> tuple[Tensor, Tensor]:
        t = self.textbook
        relative = self.product(2 * self.rows()) + 3 * self.a.u
        q = t.x["query"]
        exact = t.tdz.mT @ q
        error = (self.e_tdz + t.tdz.abs() * relative).mT @ q.abs() + self.lost
        if "query" in t.t:
            tq = t.t["query"]
            exact = exact + t.dz.mT @ tq
            error = error + (self.e_dz + t.dz.abs() * relative).mT @ tq.abs()
        return exact * t.scale, error * self.scale

    def second_value(self) -> tuple[Tensor, Tensor]:
        t = self.textbook
        relative = self.product(self.rows()) + 3 * self.a.u
        error = t.times_z(self.e_tp + t.tp.abs() * relative).mT @ t.g.abs()
        return t.times_z(t.tp).mT @ t.g, error + self.lost

    def second_mask(self) -> tuple[Tensor, Tensor]:
        return self.of_mask(self.textbook.tds, self.e_tds, self.second_sinks()[1])

    def second_slopes(self) -> tuple[Tensor, Tensor]:
        return self.times_distance(self.textbook.tds, self.e_tds)

    def second_sinks(self) -> tuple[Tensor, Tensor]:
        t, u = self.textbook, self.a.u
        move = t.t_sink - t.c
        e_move = self.e_moved + 3 * u * (move.abs() + self.range)
        e_tp = of_product(t.p_sink, self.e_p_sink, move, e_move)
        error = of_product(t.tp_sink, e_tp, t.delta, self.e_delta)
        error = error + of_product(t.p_sink, self.e_p_sink, t.tdelta, self.e_tdelta)
        return t.tds_sink, error + 3 * u * (t.tp_sink * t.delta).abs() + self.lost
