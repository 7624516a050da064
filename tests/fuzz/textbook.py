"""The textbook in float64: what is exact.

Tensors have the leading dimensions of the output, and rows have [..., L, 1]. Names are as in
csrc/cpu/kernels (backward.inl, tangent.inl) in lower case, t in front for a derivative along t.
"""

from __future__ import annotations

import functools
import math
import types

import torch
from torch import Tensor

from .problem import Problem

INF = math.inf


class Textbook:
    """Computes with tensors in float64, which `made` holds in the problem's dtype."""

    def __init__(self, problem: Problem, made: types.SimpleNamespace) -> None:
        self.problem, self.made = problem, made
        self.lead = problem.lead
        sizes = problem.sizes
        self.L, self.S, self.E, self.Ev = (sizes[n] for n in ("L", "S", "E", "Ev"))
        self.keep_scale = 1 / ((1 - problem.dropout_p) or 1) if problem.dropout_p else 1.0
        scale = problem.scale
        self.scale = 1 / math.sqrt(max(self.E, 1)) if scale is None else scale
        self.cap = problem.softcap
        self.x = {n: self.full(made.x[n], n) for n in ("query", "key", "value")}
        for name in ("key", "value"):
            if (scale := made.x.get(f"{name}_scale")) is not None:
                given = made.x[name].shape[:-1]
                scale = self.full(scale.expand(given)[..., None], name)
                self.x[name] = self.x[name] * scale
        self.mask = made.x["attn_mask"]
        if self.mask is not None and self.mask.dtype != torch.bool:
            self.mask = self.numbers(self.mask)
        self.slopes = self.of_heads(made.x.get("alibi_slopes"))
        self.sinks = self.of_heads(made.x.get("sinks"))
        # 0 where there is no row: every result is then 0.
        self.empty = 0 in (*self.lead, self.L)

    def numbers(self, tensor: Tensor) -> Tensor:
        """Reads a tensor in float64; 0 for numbers beyond the lengths that are NaN or infinite."""
        tensor = tensor.detach().double()
        return tensor.nan_to_num(0, 0, -INF) if "key_lengths" in self.problem.integers else tensor

    def full(self, tensor: Tensor, name: str) -> Tensor:
        """At the leading dimensions of the output."""
        tensor = self.numbers(tensor)
        heads = {"key": "Hk", "value": "Hv"}.get(name)
        if self.problem.gqa and heads:
            times = self.problem.sizes["Hq"] // self.problem.sizes[heads]
            tensor = tensor if times == 1 else tensor.repeat_interleave(times, -3)
        return tensor.expand(*self.lead, *tensor.shape[-2:])

    def of_heads(self, tensor: Tensor | None) -> Tensor | None:
        """[..., heads] beside [..., heads, L, S]."""
        if tensor is None:
            return None
        tensor = tensor.detach().double()[..., None, None]
        return tensor if self.lead else tensor[0]

    def of_entries(self, name: str) -> Tensor | int | None:
        """One integer for each batch entry beside the scores."""
        numbers = self.made.options.get(name)
        if not isinstance(numbers, Tensor) or numbers.dim() == 0:
            return None if numbers is None else int(numbers)
        return numbers.long()[..., None, None, None]

    # --- scores and weights -----------------------------------------------------------------------

    @functools.cached_property
    def ahead(self) -> Tensor:
        """How far ahead of its query's position a key is (int64)."""
        offset = self.of_entries("query_offset")
        rows = torch.arange(self.L)[:, None] + (0 if offset is None else offset)
        return torch.arange(self.S) - rows

    @functools.cached_property
    def distance(self) -> Tensor:
        return self.ahead.abs().double()

    @functools.cached_property
    def beyond(self) -> Tensor | None:
        """[..., 1, S], True for keys that there are not."""
        lengths = self.of_entries("key_lengths")
        return None if lengths is None else torch.arange(self.S)[None] >= lengths

    @functools.cached_property
    def hidden(self) -> Tensor:
        """[..., L, S], True where a query may not attend to a key."""
        hidden = torch.zeros(*self.lead, self.L, self.S, dtype=torch.bool)
        left, right = self.problem.window
        if left >= 0:
            hidden = hidden | (self.ahead < -left)
        if right >= 0:
            hidden = hidden | (self.ahead > right)
        if self.problem.causal:
            hidden = hidden | (self.ahead > 0)
        if self.beyond is not None:
            hidden = hidden | self.beyond
        if self.mask is not None:
            of_mask = ~self.mask if self.mask.dtype == torch.bool else self.mask == -INF
            hidden = hidden | of_mask
        return hidden

    @functools.cached_property
    def scaled(self) -> Tensor:
        return self.x["query"] @ self.x["key"].mT * self.scale

    @functools.cached_property
    def capped(self) -> Tensor:
        return self.cap * (self.scaled / self.cap).tanh() if self.cap else self.scaled

    @functools.cached_property
    def bias(self) -> Tensor:
        assert self.slopes is not None
        return self.slopes * self.distance

    @functools.cached_property
    def biased(self) -> Tensor:
        return self.capped if self.slopes is None else self.capped - self.bias

    @functools.cached_property
    def scores(self) -> Tensor:
        """-inf where hidden."""
        scores = self.biased
        if self.mask is not None and self.mask.dtype != torch.bool:
            scores = scores + self.mask
        return scores.masked_fill(self.hidden, -INF)

    @functools.cached_property
    def products(self) -> Tensor:
        """sum |q| |k|"""
        return self.x["query"].abs() @ self.x["key"].abs().mT

    @functools.cached_property
    def max_score(self) -> Tensor:
        """The largest score of each row, -inf of a row without keys."""
        if not self.S:
            return torch.full((*self.lead, self.L, 1), -INF, dtype=torch.float64)
        return self.scores.amax(-1, keepdim=True)

    @functools.cached_property
    def sink(self) -> Tensor:
        """The sinks, for each row; -inf where there is none."""
        sinks = torch.tensor(-INF, dtype=torch.float64) if self.sinks is None else self.sinks
        return sinks.expand(self.max_score.shape)

    @functools.cached_property
    def largest(self) -> Tensor:
        """The largest of the row's scores and its sink; 0 for a row without one."""
        best = torch.maximum(self.max_score, self.sink)
        return best.masked_fill(best == -INF, 0)

    @functools.cached_property
    def sums(self) -> Tensor:
        return self._unnormalised.sum(-1, keepdim=True) + self._unnormalised_sink

    @functools.cached_property
    def _unnormalised(self) -> Tensor:
        return (self.scores - self.largest).exp_()

    @functools.cached_property
    def _unnormalised_sink(self) -> Tensor:
        return (self.sink - self.largest).exp()

    @functools.cached_property
    def p(self) -> Tensor:
        return self._unnormalised / self.sums.masked_fill(self.sums == 0, 1)

    @functools.cached_property
    def p_sink(self) -> Tensor:
        return self._unnormalised_sink / self.sums.masked_fill(self.sums == 0, 1)

    @functools.cached_property
    def logsumexp(self) -> Tensor:
        return self.largest + self.sums.log()

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

    # --- gradients --------------------------------------------------------------------------------

    @functools.cached_property
    def g(self) -> Tensor:
        """The gradient of the output."""
        if "output" in self.made.u:
            return self.made.u["output"].detach().double()
        return torch.zeros(self.problem.output_shape, dtype=torch.float64)

    @functools.cached_property
    def g_rows(self) -> Tensor:
        """The gradient of the logsumexp."""
        if "logsumexp" in self.made.u:
            return self.made.u["logsumexp"].detach().double()[..., None]
        return torch.zeros(*self.lead, self.L, 1, dtype=torch.float64)

    @functools.cached_property
    def delta(self) -> Tensor:
        return (self.g * self.output).sum(-1, keepdim=True) - self.g_rows

    @functools.cached_property
    def slope(self) -> Tensor:
        """dP - delta"""
        return self.times_z(self.g @ self.x["value"].mT) - self.delta

    @functools.cached_property
    def ds(self) -> Tensor:
        return self.p * self.slope

    @functools.cached_property
    def part(self) -> Tensor:
        """The share of the cap that a score takes."""
        return self.capped / self.cap

    @functools.cached_property
    def cap_slope(self) -> Tensor:
        """cap', the derivative of a capped score."""
        return (1 - self.part) * (1 + self.part)

    @functools.cached_property
    def cap_bend(self) -> Tensor:
        """cap''"""
        return -2 / self.cap * self.part * self.cap_slope

    @functools.cached_property
    def dz(self) -> Tensor:
        """The gradient of what is capped."""
        return self.ds * self.cap_slope if self.cap else self.ds

    @functools.cached_property
    def ds_sink(self) -> Tensor:
        return -self.p_sink * self.delta

    # --- derivatives along t ----------------------------------------------------------------------

    @functools.cached_property
    def t(self) -> dict[str, Tensor]:
        t = {n: a for n, a in self.made.t.items() if n in ("query", "key", "value")}
        return {n: self.full(a, n) for n, a in t.items()}

    @functools.cached_property
    def t_mask(self) -> Tensor | None:
        return self.numbers(self.made.t["attn_mask"]) if "attn_mask" in self.made.t else None

    @functools.cached_property
    def t_bias(self) -> Tensor | None:
        slopes = self.of_heads(self.made.t.get("alibi_slopes"))
        return None if slopes is None else slopes * self.distance

    @functools.cached_property
    def t_sink(self) -> Tensor:
        t = self.of_heads(self.made.t.get("sinks"))
        t = torch.zeros((), dtype=torch.float64) if t is None else t
        return t.expand(self.sink.shape)

    @functools.cached_property
    def tz(self) -> Tensor:
        """The derivative along t of what is capped."""
        tz = torch.zeros(*self.lead, self.L, self.S, dtype=torch.float64)
        if "query" in self.t:
            tz = tz + self.t["query"] @ self.x["key"].mT * self.scale
        if "key" in self.t:
            tz = tz + self.x["query"] @ self.t["key"].mT * self.scale
        return tz

    @functools.cached_property
    def tx(self) -> Tensor:
        """The derivative along t of the scores; 0 where they are hidden."""
        tx = self.tz * self.cap_slope if self.cap else self.tz
        if self.t_bias is not None:
            tx = tx - self.t_bias
        if self.t_mask is not None:
            tx = tx + self.t_mask
        return tx.masked_fill(self.hidden, 0)

    @functools.cached_property
    def c(self) -> Tensor:
        """The derivative along t of the logsumexp."""
        return (self.p * self.tx).sum(-1, keepdim=True) + self.p_sink * self.t_sink

    @functools.cached_property
    def tp(self) -> Tensor:
        return self.p * (self.tx - self.c)

    @functools.cached_property
    def tp_sink(self) -> Tensor:
        return self.p_sink * (self.t_sink - self.c)

    @functools.cached_property
    def tangent(self) -> Tensor:
        tangent = self.times_z(self.tp) @ self.x["value"]
        return tangent + self.pz @ self.t["value"] if "value" in self.t else tangent

    @functools.cached_property
    def tdelta(self) -> Tensor:
        return (self.g * self.tangent).sum(-1, keepdim=True)

    @functools.cached_property
    def tslope(self) -> Tensor:
        """t(dP) - t(delta)"""
        if "value" not in self.t:
            return (-self.tdelta).expand(self.p.shape)
        return self.times_z(self.g @ self.t["value"].mT) - self.tdelta

    @functools.cached_property
    def tds(self) -> Tensor:
        return self.tp * self.slope + self.p * self.tslope

    @functools.cached_property
    def tdz(self) -> Tensor:
        if not self.cap:
            return self.tds
        return self.tds * self.cap_slope + self.ds * self.cap_bend * self.tz

    @functools.cached_property
    def tds_sink(self) -> Tensor:
        return -self.tp_sink * self.delta - self.p_sink * self.tdelta
