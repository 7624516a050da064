"""Random functions of the pair in flex_attention, against the textbook in float64.

One index in `EVERY` has such a problem, beside its problem of drawing.py. The operator and the
textbook both compute in float64. A relative difference above 1e-7 is then an error, not a rounding.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import torch_attn
from torch_attn import reference

EVERY = 9  # one index in nine has such a problem, too; odd, for all processes
# Maps the arguments of a function of the pair, as a namespace (s, b, h, i, j), to a number.
Term = Callable[[Any], Tensor]


class Functions:
    """Draws functions of the pair, and what they capture."""

    def __init__(self, rng: random.Random, shape: tuple[int, ...]) -> None:
        B, H, L, S = shape
        self.rng, self.batch = rng, B

        def learned(*sizes: int) -> Tensor:
            return torch.randn(sizes, dtype=torch.float64, requires_grad=True)

        self.of_heads, self.of_entries, self.scale = learned(H, 6), learned(B, 5, 4), learned()
        self.pairs = learned(H, L, S)
        self.captured = [self.of_heads, self.of_entries, self.scale, self.pairs]
        self.ids = torch.randint(-4, 9, (B, L + S))
        self.flags, self.offset = torch.rand(L + S) > 0.5, torch.tensor(rng.randrange(-3, 4))

    def choose(self, leaves: list[Term], operations: list[Term], depth: int) -> Term:
        return self.rng.choice([*leaves, *operations] if depth else leaves)

    def whole(self, depth: int) -> Term:
        ids, offset, n = self.ids, self.offset, self.rng.choice([-3, -2, -1, 1, 2, 3, 5])
        leaves: list[Term] = [
            lambda e: e.i,
            lambda e: e.j,
            lambda e: e.h,
            lambda e: e.i - e.j + n,
            lambda e: ids[e.b, e.i],
            lambda e: ids[e.b][e.j] + offset,
        ]
        if not depth:
            return self.rng.choice(leaves)
        x, y, c = self.whole(depth - 1), self.whole(depth - 1), self.truth(depth - 1)
        operations: list[Term] = [
            lambda e: x(e) + y(e),
            lambda e: n - x(e),
            lambda e: x(e) * n,
            lambda e: torch.clamp(x(e), -abs(n), abs(n) + 1),
            lambda e: x(e) // n,
            lambda e: x(e) % n,
            lambda e: torch.where(c(e), x(e), y(e)),
        ]
        return self.choose(leaves, operations, depth)

    def truth(self, depth: int) -> Term:
        x, y = self.whole(max(depth - 1, 0)), self.whole(max(depth - 1, 0))
        flags, compare = self.flags, self.rng.choice([torch.lt, torch.le, torch.eq, torch.ne])
        leaves: list[Term] = [lambda e: compare(x(e), y(e)), lambda e: flags[e.i] ^ flags[e.j]]
        if not depth:
            return self.rng.choice(leaves)
        p, q = self.truth(depth - 1), self.truth(depth - 1)
        operations: list[Term] = [
            lambda e: p(e) & q(e),
            lambda e: p(e) | q(e),
            lambda e: ~p(e),
            lambda e: torch.where(p(e), q(e), p(e)),
        ]
        return self.choose(leaves, operations, depth)

    def number(self, depth: int) -> Term:
        of_heads, of_entries, pairs = self.of_heads, self.of_entries, self.pairs
        leaves: list[Term] = [
            lambda e: e.s,
            lambda e: self.scale,
            lambda e: of_heads[e.h, e.i % 6],
            lambda e: of_entries[e.b][(e.i - e.j) % 5 - 5, 1],
            lambda e: of_entries[e.b, e.j % 5][e.h % 4],
            lambda e: pairs[e.h, e.i, e.j],
        ]
        if not depth:
            return self.rng.choice(leaves)
        x, y = self.number(depth - 1), self.number(depth - 1)
        n, m, c = self.whole(depth - 1), self.whole(depth - 1), self.truth(depth - 1)
        operations: list[Term] = [
            lambda e: x(e) + y(e),
            lambda e: x(e) * y(e) - n(e) * 0.25,
            lambda e: torch.tanh(x(e)),
            lambda e: 3 * torch.tanh(x(e) / 3) - y(e),
            lambda e: torch.sigmoid(x(e)) * 2,
            lambda e: (-x(e).square()).exp() - y(e),
            lambda e: x(e) / (y(e).abs() + 1),
            lambda e: torch.log1p(x(e).abs()) * (y(e).square() + 1).rsqrt(),
            lambda e: torch.where(c(e), x(e), y(e)),
            lambda e: torch.maximum(x(e), y(e)),
            lambda e: x(e).clamp(-0.5, 1),
            lambda e: of_heads[e.h, n(e) % 6] * x(e),
            lambda e: x(e) + of_entries[m(e) % self.batch, n(e) % 5, 2] / 3,
        ]
        return self.choose(leaves, operations, depth)


def check(seed: int, index: int, capabilities: list[str]) -> str | None:
    """Results, gradients and second derivatives on one of the instruction sets; what is wrong."""
    capability = capabilities[index // EVERY % len(capabilities)]
    torch.ops.attn._set_cpu_capability(capability)
    torch.set_num_threads(1)
    try:
        compare(random.Random(f"functions {seed} {index}"))
    except Exception:  # whatever it is, a function that can be drawn has to give results
        what = f"# {capability}, --seed {seed} --problem {index} --only cpu: functions of the pair"
        return f"{what}\n{traceback.format_exc()}"
    return None


def compare(rng: random.Random) -> None:
    torch.manual_seed(rng.randrange(2**32))
    lengths = rng.choice([(4, 5), (7, 3), (1, 6), (70, 5), (6, 80)])
    shape = B, H, L, S = rng.randrange(1, 4), rng.randrange(1, 4), *lengths
    draw = Functions(rng, shape)
    f, m = draw.number(rng.randrange(1, 4)), draw.truth(rng.randrange(1, 4))

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return f(SimpleNamespace(s=s, b=b, h=h, i=i, j=j)) + 0.5 * s

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return m(SimpleNamespace(b=b, h=h, i=i, j=j))

    leaves = [
        *(torch.randn(B, H, n, 4, dtype=torch.float64, requires_grad=True) for n in (L, S, S)),
        *draw.captured,
    ]
    weights, along = torch.randn(B, H, L, 4).double(), [torch.randn_like(x) for x in leaves]

    def derivatives(attention: Callable[..., Any]) -> list[Tensor]:
        output = attention(*leaves[:3], score, mask)
        output = output[0] if isinstance(output, tuple) else output
        loss = (output * weights).sum()
        known = {"create_graph": True, "allow_unused": True, "materialize_grads": True}
        first = torch.autograd.grad(loss, leaves, **known)
        slope = sum((g * t).sum() for g, t in zip(first, along, strict=True))
        second = torch.autograd.grad(slope, leaves, allow_unused=True, materialize_grads=True)
        return [output, *first, *second]

    try:
        found = derivatives(torch_attn.flex_attention)
    except RuntimeError as error:
        if "at most" in str(error):  # the function is longer than a list may be
            return
        raise
    expected = derivatives(reference.flex_attention)
    for n, (x, y) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(x, y, msg=lambda text, n=n: f"result {n}: {text}")
