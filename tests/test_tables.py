"""Tables that functions of the pair gather from: up to sixteen, in one list of tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

import torch_attn
from _operators import OPERATORS, arguments
from helpers import Inputs
from tests.test_flex import assert_textbook, tensors
from tests.test_score_programs import SHAPE, Case
from torch_attn import reference

L, S = SHAPE[2:]
MOST = 16


def tables_of(number: int, queries: int = L, keys: int = S) -> list[Tensor]:
    """Of different sizes, and of the three kinds in turn: of all pairs, of queries, of keys."""
    torch.manual_seed(3)
    own = [(), (queries,), (keys,)]
    sizes = [(*own[t % 3], 5 + t) for t in range(number)]
    return [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]


def score_of(tables: Sequence[Tensor]) -> Callable[..., Tensor]:
    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        for t, table in enumerate(tables):
            at = i * j % (5 + t)
            x = table[at] if t % 3 == 0 else table[i if t % 3 == 1 else j, at]
            s = s * x if t % 4 == 3 else s + x
        return s

    return score


@pytest.mark.usefixtures("cpu_capability")
@pytest.mark.parametrize("learned", [range(MOST), (0,), (2, 7, 15), ()])
def test_sixteen_tables(learned: Sequence[int]) -> None:
    """The gradients of all tables, or of some."""
    x, tables = tensors(), tables_of(MOST)
    program = torch_attn.score_program(score_of(tables), shape=SHAPE, dtype=torch.float64)
    assert len(program.tables) == MOST
    for t, table in enumerate(tables):
        assert f"{('table', 'row_table', 'key_table')[t % 3]} {t} " in str(program.score)
        assert f"tables[{t}]: " in str(program)
        table.requires_grad_(t in learned)
    assert_textbook(x, Case(score_of(tables), None, [tables[t] for t in learned]), 1e-11)


def test_gradients_that_are_not_asked_for_are_empty() -> None:
    x, tables, sizes = tensors(), tables_of(5), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            found = op(*args, **kwargs or {})
            if op is torch.ops.attn._sdpa_backward.default:
                sizes.append([t.numel() for t in found[-1]])
            return found

    output = torch_attn.flex_attention(*x, score_of(tables))
    with Watch():
        torch.autograd.grad(output.sum(), [tables[1], tables[4]])  # type: ignore[union-attr]
    assert sizes == [[0, tables[1].numel(), 0, 0, tables[4].numel()]]


@pytest.mark.long
@pytest.mark.parametrize("learned", [range(6), (1, 5)])
def test_gradcheck(learned: Sequence[int]) -> None:
    x = tensors(batch=1, heads=2, key_heads=1, queries=3, keys=4, head_dim=2)
    all_tables = tables_of(6, queries=3, keys=4)

    def function(q: Tensor, k: Tensor, v: Tensor, *some: Tensor) -> Any:
        tables = [t.detach() for t in all_tables]
        for t, table in zip(learned, some, strict=True):
            tables[t] = table
        return torch_attn.flex_attention(
            q, k, v, score_of(tables), enable_gqa=True, return_lse=True
        )

    leaves = (*x, *(all_tables[t] for t in learned))
    assert gradcheck(
        function, leaves, check_forward_ad=True, check_batched_grad=True,
        check_batched_forward_grad=True,
    )  # fmt: skip
    assert gradgradcheck(function, leaves, check_fwd_over_rev=True)


def with_table(t: int, attention: Callable[..., Any] = torch_attn.flex_attention) -> Any:
    """A function of table number t of four; all else is constant."""
    x, tables = [t.detach() for t in tensors()], [t.detach() for t in tables_of(4)]

    def output(table: Tensor) -> Tensor:
        found = attention(*x, score_of([*tables[:t], table, *tables[t + 1 :]]))
        return found[0] if isinstance(found, tuple) else found

    return output, tables[t]


@pytest.mark.parametrize("t", range(4))
def test_torch_func_of_one_table(t: int) -> None:
    (ours, table), (exact, _) = with_table(t), with_table(t, reference.flex_attention)
    tangent = torch.randn_like(table)
    torch.testing.assert_close(
        torch.func.jvp(ours, (table,), (tangent,)), torch.func.jvp(exact, (table,), (tangent,))
    )
    samples = torch.stack([table, tangent, table - tangent])
    loss = lambda table, output: output(table).square().sum()  # noqa: E731
    gradient, expected = (
        torch.func.grad(functools.partial(loss, output=output)) for output in (ours, exact)
    )
    for function, by_one in ((ours, ours), (gradient, expected)):
        found = torch.func.vmap(function)(samples)
        torch.testing.assert_close(found, torch.stack([by_one(sample) for sample in samples]))
    few = lambda output, table: output(table).sum((0, 1, 3))  # noqa: E731
    for jacobian in (torch.func.jacfwd, torch.func.jacrev):
        torch.testing.assert_close(*(jacobian(few, 1)(f, table) for f in (ours, exact)))


@pytest.mark.parametrize("name", OPERATORS[4:])
def test_checks_of_pytorch(name: str) -> None:
    x, tables = tensors(), [t.detach() for t in tables_of(3)]
    program = torch_attn.score_program(score_of(tables), shape=SHAPE, dtype=torch.float64)
    positional, keywords = arguments(name, Inputs(*(t.detach() for t in x)), **program.arguments())
    torch.library.opcheck(getattr(torch.ops.attn, name), positional, keywords)


class WithTables(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.tables = nn.ParameterList(t.detach().float() for t in tables_of(number))

    def forward(self, *x: Tensor) -> Tensor:
        tables = [self.tables[n] for n in range(len(self.tables))]
        return torch_attn.flex_attention(*x, score_of(tables))


def test_compile() -> None:
    module, x = WithTables(3), tensors(dtype=torch.float32)
    module.tables[1].requires_grad_(False)
    learned = [module.tables[0], module.tables[2], *x]
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    found, expected = (
        torch.autograd.grad(f(*x).square().sum(), learned) for f in (compiled, module)
    )
    torch.testing.assert_close(found, expected)


class Moves(nn.Module):
    def forward(self, *x: Tensor) -> Any:
        return torch.func.jvp(torch_attn.sdpa, x, x)[1]


@pytest.mark.slow
@pytest.mark.parametrize("number", [-1, 0, 1, 3])
def test_ahead_of_time(number: int, tmp_path: Path) -> None:
    """AOTInductor, also of calls that have no table; -1: the derivative of a call of sdpa."""
    module = Moves() if number < 0 else WithTables(number)
    x = [t.detach() for t in tensors(dtype=torch.float32)]
    with torch.no_grad():
        package = torch._inductor.aoti_compile_and_package(
            torch.export.export(module, tuple(x)), package_path=str(tmp_path / "tables.pt2")
        )
        torch.testing.assert_close(torch._inductor.aoti_load_package(package)(*x), module(*x))


def test_errors() -> None:
    x = [t.detach() for t in tensors()]
    tables = [t.detach() for t in tables_of(MOST + 1)]
    with pytest.raises(RuntimeError, match="17 tables have an index of the pair; at most 16"):
        torch_attn.flex_attention(*x, score_of(tables))
    text = torch_attn.score_program(score_of(tables[:4]), shape=SHAPE, dtype=torch.float64).score
    flat = [t[(None,) * (4 - t.dim())] for t in tables]
    call = functools.partial(torch.ops.attn.flex_attention, *x, score_mod=text)
    with pytest.raises(RuntimeError, match=r"flex_attention: tables has 17 tensors; .* at most 16"):
        call(tables=flat)
    with pytest.raises(RuntimeError, match=r"has 2 tensors; the program reads tables\[2\]"):
        call(tables=flat[:2])
    with pytest.raises(RuntimeError, match=r"tables\[1\] has shape .*; it must broadcast to"):
        call(tables=[flat[0], flat[0], *flat[2:4]])
    with pytest.raises(RuntimeError, match=r"tables\[3\] has dtype Int"):
        call(tables=[*flat[:3], flat[3].int()])
    twice = "attn.program 1\n%0 i query\n%1 f key_table 0 %0\n%2 b lt %1 %1\nreturn %2"
    with pytest.raises(RuntimeError, match=r"read tables\[0\] as different kinds"):
        call(mask_mod=twice, tables=flat[:4])
    beyond = "attn.program 1\n%0 i query\n%1 f table 16 %0\nreturn %1"
    with pytest.raises(RuntimeError, match="between 0 and 15"):
        torch.ops.attn.flex_attention(*x, score_mod=beyond)


def test_errors_of_derivatives() -> None:
    x, tables = tensors(), [t.detach() for t in tables_of(3)]
    program = torch_attn.score_program(score_of(tables), shape=SHAPE, dtype=torch.float64)
    detached = Inputs(*(t.detach() for t in x))
    positional, keywords = arguments("_sdpa_tangent", detached, **program.arguments())
    names = [a.name for a in torch.ops.attn._sdpa_tangent.default._schema.arguments]
    place = names.index("tangent_tables")
    along = positional[place]
    for wrong, message in (
        ([*along[1:]], "tangent_tables has 2 elements but tables has 3"),
        ([*along[:1], along[0], *along[2:]], r"tangent_tables\[1\] is Double of shape"),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.attn._sdpa_tangent(
                *positional[:place], wrong, *positional[place + 1 :], **keywords
            )
    positional, keywords = arguments("_sdpa_backward", detached, **program.arguments())
    keywords["grad_input_mask"][-MOST + 3] = True
    with pytest.raises(RuntimeError, match=r"the gradient of tables\[3\], which is absent"):
        torch.ops.attn._sdpa_backward(*positional, **keywords)
    table = torch.randn(9, dtype=torch.float64)
    output = torch_attn.flex_attention(*x, lambda s, b, h, i, j: s + table[i * j % 9])
    table.add_(1)
    with pytest.raises(RuntimeError, match=r"backward reads a tensor that score_mod or .* again"):
        output.sum().backward()  # type: ignore[union-attr]
