"""Tries what attention in PyTorch can do, and writes the table of docs/derivatives.md.

    python docs/make_support_table.py

Every cell is a trial in this process, on the CPU, against `torch_attn.reference` in float64. It
says yes; no, of a limit or a count that the row names; raises; slow loop, where PyTorch warns that
`vmap` falls back to one; wrong, where a result comes that is not the right one.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.gradcheck import gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import torch_attn
from torch_attn import reference

PAGE = Path(__file__).parent / "derivatives.md"
BEGIN, END = "<!-- table: made by make_support_table.py -->\n", "<!-- end of table -->"

Sdpa = Callable[..., Tensor]
F64 = torch.float64


# --- the columns ----------------------------------------------------------------------------------


def builtin(*args: Any, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(*args, **options)


def builtin_math(*args: Any, **options: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **options)


def flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
) -> Tensor:
    """FlexAttention with these arguments; it has no dropout."""
    if dropout_p:
        raise NotImplementedError("FlexAttention has no dropout")

    def score(score: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        score = score if attn_mask is None else score + attn_mask[i, j]
        return torch.where(i >= j, score, -torch.inf) if is_causal else score

    return flex_attention(query, key, value, score_mod=score)


COLUMNS: dict[str, Sdpa] = {
    "built-in": builtin,
    "built-in, MATH": builtin_math,
    "FlexAttention": flex,
    "torch_attn": torch_attn.sdpa,
}


# --- the rows -------------------------------------------------------------------------------------


ROWS: dict[str, Callable[[Sdpa], bool | None]] = {}


def row(name: str) -> Callable[[Any], Any]:
    def add(trial: Any) -> Any:
        ROWS[name] = trial
        return trial

    return add


def make(L: int = 5, S: int = 7, E: int = 4, dtype: torch.dtype = F64) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, 3, n, E, dtype=dtype) for n in (L, S, S))


def make_mask(L: int = 5, S: int = 7) -> Tensor:
    return torch.randn(L, S, dtype=F64)


def same(compute: Callable[[Sdpa], Any], sdpa: Sdpa) -> None:
    """What is computed with sdpa is what is computed with the reference."""
    torch.testing.assert_close(compute(sdpa), compute(reference.sdpa))


def loss(sdpa: Sdpa, **options: Any) -> Callable[..., Tensor]:
    return lambda *x: sdpa(*x, **options).sin().sum()


ALL = (0, 1, 2)


@row("gradient of query, key and value")
def _(sdpa: Sdpa) -> None:
    def compute(sdpa: Sdpa) -> Any:
        x = [t.requires_grad_() for t in make()]
        return torch.autograd.grad(loss(sdpa, is_causal=True)(*x), x)

    same(compute, sdpa)


@row("gradient of a floating mask")
def _(sdpa: Sdpa) -> None:
    def compute(sdpa: Sdpa) -> Any:
        x = [t.requires_grad_() for t in (*make(), make_mask())]
        return torch.autograd.grad(loss(sdpa)(*x), x)

    same(compute, sdpa)


def of_score_mod(sdpa: Sdpa, order: int = 1, inputs: bool = False) -> bool | None:
    """Derivatives of a table over distances that a score_mod captures, and of the inputs."""
    if sdpa not in (flex, torch_attn.sdpa):
        return False  # takes no score_mod

    def derivative(attention: Callable[..., Any]) -> Any:
        q, k, v = (t.requires_grad_(inputs) for t in make())
        table = torch.linspace(-1, 1, 11, dtype=F64, requires_grad=True)

        def score(score: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + table[i - j + 6]

        found = attention(q, k, v, score)
        loss = (found[0] if isinstance(found, tuple) else found).sin().sum()
        of = (table, q, k, v) if inputs else (table,)
        for _ in range(order):
            gradients = torch.autograd.grad(loss, of, create_graph=True)
            loss = sum((g.square().sum() for g in gradients), torch.zeros(()))
        return gradients

    attention = flex_attention if sdpa is flex else torch_attn.flex_attention
    torch.testing.assert_close(derivative(attention), derivative(reference.flex_attention))
    return None


@row("gradient of what a `score_mod` captures, alone")
def _(sdpa: Sdpa) -> bool | None:
    return of_score_mod(sdpa)


@row("gradient of what a `score_mod` captures, and of query, key and value")
def _(sdpa: Sdpa) -> bool | None:
    return of_score_mod(sdpa, inputs=True)


@row("double backward of what a `score_mod` captures")
def _(sdpa: Sdpa) -> bool | None:
    return of_score_mod(sdpa, order=2)


@row("gradient with dropout")
def _(sdpa: Sdpa) -> None:
    query, key, value = make()
    value.requires_grad_()
    output = sdpa(query, key, value, dropout_p=0.5)
    (gradient,) = torch.autograd.grad(output, value, output.detach())
    # of the weights kept, A: <A V, A V> = <A'(A V), V>
    torch.testing.assert_close(output.square().sum(), (gradient * value).sum())


@row("double backward")
def _(sdpa: Sdpa) -> None:
    def compute(sdpa: Sdpa) -> Any:
        x = [t.requires_grad_() for t in make()]
        first = torch.autograd.grad(loss(sdpa)(*x), x, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), x)

    same(compute, sdpa)


@row("double backward, floating mask")
def _(sdpa: Sdpa) -> None:
    def compute(sdpa: Sdpa) -> Any:
        x = [t.requires_grad_() for t in (*make(), make_mask())]
        first = torch.autograd.grad(loss(sdpa)(*x), x, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), x)

    same(compute, sdpa)


def with_dropout(sdpa: Sdpa) -> Sdpa:
    """The same weights dropped in every call."""

    def function(*x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return sdpa(*x, dropout_p=0.4)

    return function


@row("double backward with dropout")
def _(sdpa: Sdpa) -> None:
    x = tuple(t[0, :1, :3].clone().requires_grad_() for t in make(E=2))
    assert gradgradcheck(with_dropout(sdpa), x)


@row("third derivative")
def _(sdpa: Sdpa) -> None:
    def compute(sdpa: Sdpa) -> Any:
        x = [t.requires_grad_() for t in make()]
        gradients = torch.autograd.grad(loss(sdpa)(*x), x, create_graph=True)
        for _ in range(2):
            square = sum(g.square().sum() for g in gradients)
            gradients = torch.autograd.grad(square, x, create_graph=True)
        return gradients

    same(compute, sdpa)


@row("third derivative with dropout")
def _(sdpa: Sdpa) -> None:
    x = tuple(t[0, :1, :3].clone().requires_grad_() for t in make(E=2))

    def gradient(*x: Tensor) -> Any:
        return torch.autograd.grad(with_dropout(sdpa)(*x).sum(), x, create_graph=True)

    assert gradgradcheck(gradient, x)


@row("forward mode, `forward_ad.dual_level`")
def _(sdpa: Sdpa) -> None:
    def compute(sdpa: Sdpa) -> Any:
        with forward_ad.dual_level():
            x = [forward_ad.make_dual(t, t.cos()) for t in make()]
            return forward_ad.unpack_dual(sdpa(*x)).tangent

    same(compute, sdpa)


@row("forward mode, `torch.func.jvp`")
def _(sdpa: Sdpa) -> None:
    same(lambda sdpa: jvp(sdpa, make(), make()), sdpa)


@row("forward over reverse")
def _(sdpa: Sdpa) -> None:
    same(lambda sdpa: jvp(grad(loss(sdpa), ALL), make(), make()), sdpa)


@row("reverse over forward")
def _(sdpa: Sdpa) -> None:
    def compute(sdpa: Sdpa) -> Any:
        return grad(lambda *x: jvp(loss(sdpa), x, make())[1], ALL)(*make())

    same(compute, sdpa)


@row("forward over forward")
def _(sdpa: Sdpa) -> None:
    def compute(sdpa: Sdpa) -> Any:
        return jvp(lambda *x: jvp(sdpa, x, make())[1], make(), make())

    same(compute, sdpa)


@row("`torch.func.grad`")
def _(sdpa: Sdpa) -> None:
    same(lambda sdpa: grad(loss(sdpa), ALL)(*make()), sdpa)


def samples() -> tuple[Tensor, ...]:
    return tuple(torch.stack([t, t.cos(), t.sin()]) for t in make())


@row("`vmap`")
def _(sdpa: Sdpa) -> None:
    same(lambda sdpa: vmap(sdpa)(*samples()), sdpa)


@row("`vmap` of `grad`: gradients of each sample")
def _(sdpa: Sdpa) -> None:
    same(lambda sdpa: vmap(grad(loss(sdpa), ALL))(*samples()), sdpa)


@row("`vmap` with `randomness='different'`")
def _(sdpa: Sdpa) -> None:
    x = tuple(t.expand(3, -1, -1, -1, -1) for t in make())
    first, second, _ = vmap(lambda *x: sdpa(*x, dropout_p=0.5), randomness="different")(*x)
    assert not torch.equal(first, second)


@row("`jacrev`")
def _(sdpa: Sdpa) -> None:
    same(lambda sdpa: jacrev(sdpa, ALL)(*make()), sdpa)


@row("`jacfwd`")
def _(sdpa: Sdpa) -> None:
    same(lambda sdpa: jacfwd(sdpa, ALL)(*make()), sdpa)


@row("`hessian`")
def _(sdpa: Sdpa) -> None:
    same(lambda sdpa: hessian(loss(sdpa), ALL)(*make()), sdpa)


class LargestAllocation(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(result):
            if isinstance(t, Tensor):
                self.elements = max(self.elements, t.untyped_storage().nbytes() // t.element_size())
        return result


def is_linear(compute: Callable[..., Any]) -> bool:
    """Whether no tensor is as large as the scores of one head."""
    L = S = 512
    x = tuple(t[:1, :1] for t in make(L, S, 16, torch.float32))
    with LargestAllocation() as allocation:
        compute(*(t.detach().requires_grad_() for t in x))
    return 0 < allocation.elements < L * S


@row("memory O(L + S): backward")
def _(sdpa: Sdpa) -> bool:
    return is_linear(lambda *x: torch.autograd.grad(loss(sdpa)(*x), x))


@row("memory O(L + S): backward with dropout")
def _(sdpa: Sdpa) -> bool:
    return is_linear(lambda *x: torch.autograd.grad(loss(sdpa, dropout_p=0.5)(*x), x))


@row("memory O(L + S): double backward")
def _(sdpa: Sdpa) -> bool:
    def compute(*x: Tensor) -> None:
        first = torch.autograd.grad(loss(sdpa)(*x), x, create_graph=True)
        torch.autograd.grad(sum(g.square().sum() for g in first), x)

    return is_linear(compute)


@row("memory O(L + S): `jvp`")
def _(sdpa: Sdpa) -> bool:
    return is_linear(lambda *x: jvp(sdpa, x, x))


def compiled(function: Any, **options: Any) -> Any:
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


@row("`torch.compile`: backward")
def _(sdpa: Sdpa) -> None:
    def compute(sdpa: Sdpa) -> Any:
        x = [t.requires_grad_() for t in make()]
        return torch.autograd.grad(compiled(loss(sdpa))(*x), x)

    same(compute, sdpa)


@row("`torch.compile`: one for all lengths")
def _(sdpa: Sdpa) -> bool:
    counter = torch._dynamo.testing.CompileCounter()
    torch.compiler.reset()
    function = torch.compile(sdpa, fullgraph=True, backend=counter, dynamic=True)
    for n in (5, 8, 33, 100):
        function(*make(n, 2 * n + 3, 16))
    return counter.frame_count == 1


@row("`torch.compile`: double backward of what was compiled")
def _(sdpa: Sdpa) -> None:
    x = [t.requires_grad_() for t in make()]
    first = torch.autograd.grad(compiled(loss(sdpa))(*x), x, create_graph=True)
    torch.autograd.grad(first[0].sum(), x)


@row("`torch.compile`: double backward within it")
def _(sdpa: Sdpa) -> None:
    def compute(sdpa: Sdpa) -> Any:
        x = make()
        return compiled(lambda *x: vjp(grad(loss(sdpa), ALL), *x)[1](x))(*x)

    same(compute, sdpa)


@row("`torch.export` with dynamic lengths")
def _(sdpa: Sdpa) -> None:
    class Attention(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return sdpa(query, key, value)

    L, S = torch.export.Dim("L"), torch.export.Dim("S")
    shapes = {"query": {2: L}, "key": {2: S}, "value": {2: S}}
    program = torch.export.export(Attention(), make(), dynamic_shapes=shapes).module()
    x = make(9, 20)
    torch.testing.assert_close(program(*x), reference.sdpa(*x))


@row("`torch.utils.checkpoint`, double backward")
def _(sdpa: Sdpa) -> None:
    def compute(sdpa: Sdpa) -> Any:
        x = [t.requires_grad_() for t in make()]
        first = torch.autograd.grad(
            checkpoint(loss(sdpa), *x, use_reentrant=False), x, create_graph=True
        )
        return torch.autograd.grad(sum(g.square().sum() for g in first), x)

    same(compute, sdpa)


@row("FakeTensor and Meta, backward")
def _(sdpa: Sdpa) -> None:
    x = make()
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t).requires_grad_() for t in x]
        assert torch.autograd.grad(loss(sdpa)(*fakes), fakes)[0].shape == x[0].shape
    metas = [t.to("meta").requires_grad_() for t in x]
    assert torch.autograd.grad(loss(sdpa)(*metas), metas)[0].is_meta


@row("FLOP counter, forward and backward")
def _(sdpa: Sdpa) -> bool:
    x = [t.requires_grad_() for t in make()]
    with FlopCounterMode(display=False) as counter:
        loss(sdpa)(*x).backward()
    scores = 2 * 2 * 3 * 5 * 7 * 4
    # with the scores computed again or kept
    return counter.get_total_flops() in (6 * scores, 7 * scores)


@row("TorchScript: trace")
def _(sdpa: Sdpa) -> None:
    with warnings.catch_warnings(action="ignore"):
        traced = torch.jit.trace(lambda *x: sdpa(*x), make())
    torch.testing.assert_close(traced(*make(9, 20)), reference.sdpa(*make(9, 20)))


@contextlib.contextmanager
def one_of_two_devices() -> Any:
    """A mesh of two devices, of which this process plays the first and none computes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        torch.distributed.destroy_process_group()


@row("DTensor, sharded over heads, backward")
def _(sdpa: Sdpa) -> None:
    from torch.distributed.tensor import DTensor, Shard

    x = [t[:, :2].detach().requires_grad_() for t in make()]
    expected = torch.autograd.grad(loss(reference.sdpa)(*x), x)
    with one_of_two_devices() as mesh:
        parts = [
            DTensor.from_local(t[:, :1].detach(), mesh, [Shard(1)]).requires_grad_() for t in x
        ]
        actual = torch.autograd.grad(sdpa(*parts).sin(), parts, torch.ones_like(sdpa(*parts)))
        for part, whole in zip(actual, expected, strict=True):
            assert part.placements == (Shard(1),)
            torch.testing.assert_close(part.to_local(), whole[:, :1])


# --- the table ------------------------------------------------------------------------------------


def cell(trial: Callable[[Sdpa], bool | None], sdpa: Sdpa) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            holds = trial(sdpa)
        except AssertionError:
            return "wrong"
        except Exception:
            return "raises"
    if any("batching rule" in str(warning.message) for warning in caught):
        return "slow loop"
    return "no" if holds is False else "yes"


def table() -> list[list[str]]:
    """The cells, with the names of columns and rows."""
    rows = [[name, *(cell(trial, f) for f in COLUMNS.values())] for name, trial in ROWS.items()]
    return [["", *COLUMNS], *rows]


def committed() -> list[list[str]]:
    """The same, as it stands on the page."""
    head, _, *rows = PAGE.read_text().split(BEGIN)[1].split(END)[0].splitlines()
    return [[text.strip() for text in line[1:-1].split("|")] for line in (head, *rows)]


def main() -> None:
    head, *rows = table()
    lines = (f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *rows))
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + "".join(lines) + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
