"""Random functions of the pair in flex_attention, against the textbook in float64.

The operator and the textbook both compute in float64. A relative difference above 1e-7 is then an
error, not a rounding.
"""

from __future__ import annotations

import multiprocessing
import random
import time
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor

import torch_attn
from torch_attn import reference

from .worker import Report

# Maps the arguments of a function of the pair, as a namespace (s, b, h, i, j), to a number.
Term = Callable[[Any], Tensor]


class Functions:
    """Draws functions of the pair that capture tensors of these sizes."""

    def __init__(self, rng: random.Random, captured: list[Tensor], numbers: list[Tensor]) -> None:
        self.rng, self.batch = rng, len(captured[1])
        self.of_heads, self.of_entries, self.scale, self.pairs, *tables = captured
        self.of_rows, self.of_keys, self.few_of_rows = tables
        self.ids, self.flags, self.offset = numbers

    @staticmethod
    def sizes(B: int, H: int, L: int, S: int) -> list[tuple[int, ...]]:
        return [(H, 6), (B, 5, 4), (), (H, L, S), (B, L, 20), (H, S, 20), (H, L, 2)]

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

    def bucket(self) -> Term:
        """An index of tables of 20 numbers."""
        n = self.rng.choice([1, 2, 3, 9])
        buckets: list[Term] = [
            lambda e: (e.i - e.j).clamp(-n, n) + 9,
            lambda e: torch.clamp((e.j - e.i) // n, -10, 9),
            lambda e: (e.i - e.j).abs().clamp(max=19),
            lambda e: (e.i - e.j) * n % 20,
            lambda e: e.j // n % 20,
            lambda e: e.i % (2 * n),
            lambda e: (e.i + e.j * n) % 20,
        ]
        return self.rng.choice(buckets)

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
        of_rows, of_keys, bucket = self.of_rows, self.of_keys, self.bucket()
        few, width = self.few_of_rows, self.rng.choice([1, 5, 64])
        leaves: list[Term] = [
            lambda e: e.s,
            lambda e: self.scale,
            lambda e: of_heads[e.h, e.i % 6],
            lambda e: of_entries[e.b][(e.i - e.j) % 5 - 5, 1],
            lambda e: of_entries[e.b, e.j % 5][e.h % 4],
            lambda e: pairs[e.h, e.i, e.j],
            lambda e: of_rows[e.b, e.i, bucket(e)],
            lambda e: of_keys[e.h, e.j, bucket(e)],
            lambda e: few[e.h, e.i, e.j // width % 2],
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

    def sums(self) -> Term:
        """The score and terms, one after the other, as most functions of models begin."""
        steps: list[Callable[[Tensor, Tensor], Tensor]] = [
            lambda x, y: x + y,
            lambda x, y: x - y,
            lambda x, y: y + x * 0.75,
            lambda x, y: x * 1.5 - y,
        ]
        drawn = [(self.rng.choice(steps), self.number(0)) for _ in range(self.rng.randrange(1, 7))]

        def total(e: Any) -> Tensor:
            x = e.s
            for step, term in drawn:
                x = step(x, term(e))
            return x

        return total

    def score(self, depth: int) -> Term:
        x, y = self.number(depth), self.sums()

        def of_sums(e: Any) -> Tensor:
            total = y(e)
            return x(SimpleNamespace(**vars(e) | {"s": total})) + total

        whole: list[Term] = [
            lambda e: x(e) + 0.5 * e.s,
            y,
            lambda e: 3 * torch.tanh(y(e) / 3),
            of_sums,
        ]
        return self.rng.choice(whole)


def check(seed: int, index: int, capabilities: list[str]) -> str | None:
    """All derivatives of a problem on one of the instruction sets; what is wrong."""
    capability = capabilities[index % len(capabilities)]
    torch.ops.attn._set_cpu_capability(capability)
    torch.set_num_threads(1)
    try:
        compare(random.Random(f"functions {seed} {index}"))
    except Exception:  # whatever it is, a function that can be drawn has to give results
        what = f"# {capability}, --seed {seed} --problem {index} --only functions"
        return f"{what}\n{traceback.format_exc()}"
    return None


def compare(rng: random.Random) -> None:
    torch.manual_seed(rng.randrange(2**32))
    lengths = rng.choice([(4, 5), (7, 3), (1, 6), (70, 5), (6, 80), (37, 70)])
    B, H, L, S = rng.randrange(1, 4), rng.randrange(1, 4), *lengths

    def learned(*sizes: int) -> Tensor:
        return torch.randn(sizes, dtype=torch.float64, requires_grad=True)

    leaves = [learned(B, H, n, 4) for n in (L, S, S)]
    leaves += [learned(*sizes) for sizes in Functions.sizes(B, H, L, S)]
    numbers = [torch.randint(-4, 9, (B, L + S)), torch.rand(L + S) > 0.5]
    numbers.append(torch.tensor(rng.randrange(-3, 4)))
    weights, along = learned(B, H, L, 4), [torch.randn_like(x) for x in leaves]
    state = rng.getstate()

    def output_of(attention: Callable[..., Any], tensors: list[Tensor]) -> Tensor:
        rng.setstate(state)
        draw = Functions(rng, tensors[3:], numbers)
        f, m = draw.score(rng.randrange(1, 4)), draw.truth(rng.randrange(1, 4))

        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return f(SimpleNamespace(s=s, b=b, h=h, i=i, j=j))

        def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return m(SimpleNamespace(b=b, h=h, i=i, j=j))

        output = attention(*tensors[:3], score, mask)
        return output[0] if isinstance(output, tuple) else output

    def derivatives(attention: Callable[..., Any]) -> list[Tensor]:
        """The output, first and second derivatives, and last the tangent of the output."""
        output = output_of(attention, leaves)
        first = torch.autograd.grad(
            output, leaves, weights, create_graph=True, materialize_grads=True
        )
        slope = sum((g * t).sum() for g, t in zip(first, along, strict=True))
        second = torch.autograd.grad(slope, [*leaves, weights], materialize_grads=True)
        return [output, *first, *second]

    try:
        found = derivatives(torch_attn.flex_attention)
    except RuntimeError as error:
        if "at most" in str(error):  # the function is longer than a list may be
            return
        raise
    with fwAD.dual_level():
        duals = [fwAD.make_dual(x.detach(), t) for x, t in zip(leaves, along, strict=True)]
        found.append(fwAD.unpack_dual(output_of(torch_attn.flex_attention, duals)).tangent)
    expected = derivatives(reference.flex_attention)
    expected.append(expected[-1])
    for n, (x, y) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(x, y, msg=lambda text, n=n: f"result {n}: {text}")


def work(
    device: str, seed: int, first: int, step: int, last: int, seconds: float, reports: Any, at: Any
) -> None:
    """As worker.work."""
    for module in (torch.xpu, torch.mtia, torch.cuda):
        setattr(module, "manual_seed_all", lambda _: None)  # noqa: B010, not what it is typed as
    capabilities = torch.ops.attn._cpu_capabilities()
    end, report, reported = time.monotonic() + seconds, Report(), time.monotonic()
    for index in range(first, last, step):
        parent = multiprocessing.parent_process()
        if time.monotonic() > end or (parent and not parent.is_alive()):
            break
        at.value = index
        report.problems[device, "f64"] += 1
        report.calls[capabilities[index % len(capabilities)]] += 1
        if wrong := check(seed, index, capabilities):
            report.failures.append(wrong)
        if time.monotonic() > reported + 1:
            reports.put(report)
            report, reported = Report(), time.monotonic()
    reports.put(report)
    at.value = -1
