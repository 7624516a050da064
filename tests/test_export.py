"""torch.export and AOTInductor: programs with the operator in them, run here and elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import torch_attn
from helpers import in_fresh_process, make_inputs

# by torch, of its own parts
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")


class Attention(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return torch_attn.sdpa(2 * query, key, value, mask, is_causal=True, enable_gqa=True).relu()


def make(batch: int, L: int, S: int) -> tuple[Tensor, ...]:
    return tuple(make_inputs(L, S, 8, batch=(batch,), heads=(4, 2, 1), mask=(1, S)))


def exported(strict: bool = False) -> ExportedProgram:
    batch, L, S = Dim("batch"), Dim("L"), Dim("S")
    keys = {0: batch, 2: S}
    lengths = ({0: batch, 2: L}, keys, keys, {1: S})
    return torch.export.export(Attention(), make(2, 5, 7), dynamic_shapes=lengths, strict=strict)


SIZES = ((2, 5, 7), (3, 100, 30), (1, 1, 9), (2, 9, 1), (1, 64, 64))


def check(program: Callable[..., Tensor], sizes: tuple[tuple[int, int, int], ...] = SIZES) -> None:
    for size in sizes:
        inputs = make(*size)
        torch.testing.assert_close(program(*inputs), Attention()(*inputs))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("strict", [False, True])
def test_any_lengths(strict: bool) -> None:
    """The operator stays whole, also when the program is decomposed."""
    program = exported(strict)
    for version in (program, program.run_decompositions()):
        calls = [node.target for node in version.graph.nodes if node.op == "call_function"]
        assert calls.count(torch.ops.attn.sdpa.default) == 1
        assert not any("softmax" in str(call) or "matmul" in str(call) for call in calls)
        check(version.module())


def run_saved(path: str) -> None:
    """In another process, that knows of the operator by `import torch_attn`."""
    check(torch.export.load(path).module())


def test_saved_program(tmp_path: Path) -> None:
    path = str(tmp_path / "attention.pt2")
    torch.export.save(exported(), path)
    in_fresh_process(run_saved, path)


def run_package(path: str) -> None:
    check(torch._inductor.aoti_load_package(path), SIZES[:2])


def test_aot_inductor(tmp_path: Path) -> None:
    """A compiled package, run in another process."""
    path = str(tmp_path / "attention.pt2")
    torch._inductor.aoti_compile_and_package(exported(), package_path=path)
    in_fresh_process(run_package, path)


@pytest.mark.usefixtures("device")
def test_symbolic_trace() -> None:
    """torch.fx sees one call, of the operator."""
    traced = torch.fx.symbolic_trace(Attention())
    calls = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert calls.count(torch.ops.attn.sdpa) == 1
    check(traced)


def loaded(path: str) -> Any:
    return torch.jit.load(path)


def run_script(path: str) -> None:
    check(loaded(path))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("how", ["trace", "script", "script of the operator"])
def test_torchscript(how: str, tmp_path: Path) -> None:
    """What torch.jit still does, it does: here, and saved, in another process."""

    class OfTheOperator(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
            return torch.ops.attn.sdpa(
                2 * query, key, value, mask, is_causal=True, enable_gqa=True
            ).relu()

    inputs = make(2, 5, 7)
    if how == "trace":
        program = torch.jit.trace(Attention(), inputs)
    else:
        program = torch.jit.script(Attention() if how == "script" else OfTheOperator())
    assert "attn::sdpa" in str(program.inlined_graph)
    check(program)
    leaves = [t.requires_grad_() for t in inputs]
    actual = torch.autograd.grad(program(*leaves).sum(), leaves)
    expected = torch.autograd.grad(Attention()(*leaves).sum(), leaves)
    assert all(map(torch.equal, actual, expected))
    path = str(tmp_path / "attention.pt")
    program.save(path)
    in_fresh_process(run_script, path)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", ["sdpa", "sdpa_with_weights"])
def test_torchscript_of_the_function(name: str) -> None:
    """With every argument, by position and by name, and the defaults of the operator."""
    function = getattr(torch_attn, name)
    scripted = torch.jit.script(function)
    query, key, value, mask = make(2, 5, 7)
    for options in ({}, {"is_causal": True, "scale": 0.3}, {"dropout_p": 1.0}):
        expected = function(query, key, value, mask, enable_gqa=True, **options)
        actual = scripted(query, key, value, mask, enable_gqa=True, **options)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    expected = function(query, query, query)
    torch.testing.assert_close(scripted(query, query, query), expected, rtol=0, atol=0)
    of_operator = getattr(torch.ops.attn, name).default._schema.arguments
    for argument, other in zip(scripted.schema.arguments, of_operator, strict=True):
        assert (argument.name, str(argument.type)) == (other.name, str(other.type))
        assert argument.default_value == other.default_value
    with pytest.raises(RuntimeError, match="key"):
        scripted(query, key[..., :3], value)
