"""torch.export and AOTInductor: programs with the operator in them, run here and elsewhere."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn.attention import varlen

import _scripts
import torch_attn
from helpers import in_fresh_process, make_inputs

# by torch, of its own parts
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")


class Attention(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return torch_attn.sdpa(2 * query, key, value, mask, is_causal=True, enable_gqa=True).relu()


class Decode(nn.Module):
    """A step over a cache that is filled to another length in every text, in every call."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, offset: Tensor, lengths: Tensor
    ) -> tuple[Tensor, ...]:
        options = {"is_causal": True, "window_size": (9, 0), "softcap": 3.0, "enable_gqa": True}
        return torch_attn.sdpa_with_logsumexp(
            query, key, value, **options, query_offset=offset, key_lengths=lengths
        )


class LowerRight(nn.Module):
    """The offset is said as a number, S - L."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, _: Tensor) -> Tensor:
        S = key.size(-2)
        offset = S - query.size(-2)
        options = {"query_offset": offset, "key_lengths": S - 1, "window_size": (9, 0)}
        return torch_attn.sdpa(query, key, value, **options, enable_gqa=True)


def make(batch: int, L: int, S: int) -> tuple[Tensor, ...]:
    return tuple(make_inputs(L, S, 8, batch=(batch,), heads=(4, 2, 1), mask=(1, S)))


def make_step(L: int, *lengths: int) -> tuple[Tensor, ...]:
    query, key, value, _ = make_inputs(L, 32, 8, batch=(len(lengths),), heads=(4, 2, 1))
    filled = torch.tensor(lengths)
    return query, key, value, filled - L, filled


class Model(NamedTuple):
    module: nn.Module
    operator: Any
    make: Callable[..., tuple[Tensor, ...]]
    sizes: tuple[tuple[int, ...], ...]
    dynamic: tuple[dict[int, Dim] | None, ...]


BATCH, QUERIES, KEYS = Dim("batch"), Dim("L"), Dim("S")
OF_KEYS = {0: BATCH, 2: KEYS}
LENGTHS = ({0: BATCH, 2: QUERIES}, OF_KEYS, OF_KEYS, {1: KEYS})
SIZES = ((2, 5, 7), (3, 100, 30), (1, 1, 9), (2, 9, 1), (1, 64, 64))
STEPS = ((3, 8, 32), (1, 1, 9), (2, 31, 2), (5, 17, 5))
MODELS = {
    "mask": Model(Attention(), torch.ops.attn.sdpa, make, SIZES, LENGTHS),
    "offset of sizes": Model(LowerRight(), torch.ops.attn.attention, make, SIZES, LENGTHS),
    "offsets and lengths": Model(
        Decode(), torch.ops.attn.attention, make_step, STEPS, ({2: QUERIES}, *[None] * 4)
    ),
}


def exported(name: str, strict: bool = False) -> ExportedProgram:
    model = MODELS[name]
    inputs = model.make(*model.sizes[0])
    return torch.export.export(model.module, inputs, dynamic_shapes=model.dynamic, strict=strict)


def check(program: Callable[..., Any], name: str, sizes: int | None = None) -> None:
    """Compares a program with its model, with all sizes of inputs or the first `sizes` ones."""
    model = MODELS[name]
    for size in model.sizes[:sizes]:
        inputs = model.make(*size)
        torch.testing.assert_close(program(*inputs), model.module(*inputs))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["mask", "offsets and lengths"])
def test_one_program_for_all_sizes_and_positions(name: str, strict: bool) -> None:
    """The operator stays whole, also when the program is decomposed."""
    program = exported(name, strict)
    for version in (program, program.run_decompositions()):
        calls = [node.target for node in version.graph.nodes if node.op == "call_function"]
        assert [c for c in calls if "attn" in str(c)] == [MODELS[name].operator.default]
        assert not any("softmax" in str(call) or "matmul" in str(call) for call in calls)
        check(version.module(), name)


@pytest.mark.usefixtures("device")
def test_an_offset_of_sizes_stays_a_formula() -> None:
    check(exported("offset of sizes").module(), "offset of sizes")


def test_lengths_are_checked_after_an_export() -> None:
    """On a CPU; on a GPU they are clamped."""
    query, key, value, offset, lengths = make_step(*STEPS[0])
    with pytest.raises(RuntimeError, match="key_lengths is 40 at entry 1; it must be between"):
        exported("offsets and lengths").module()(query, key, value, offset, lengths + 8)


def run_saved(path: str, name: str) -> None:
    """Runs in another process, that knows of the operator by `import torch_attn`."""
    check(torch.export.load(path).module(), name)


@pytest.mark.long
@pytest.mark.parametrize("name", ["mask", "offsets and lengths"])
def test_saved_program(name: str, tmp_path: Path) -> None:
    path = str(tmp_path / "program.pt2")
    torch.export.save(exported(name), path)
    in_fresh_process(run_saved, path, name)


def run_package(path: str, name: str, sizes: int) -> None:
    check(torch._inductor.aoti_load_package(path), name, sizes)


@pytest.mark.slow  # compiles
@pytest.mark.parametrize(("name", "sizes"), [("mask", 2), ("offsets and lengths", 4)])
def test_aot_inductor(name: str, sizes: int, tmp_path: Path) -> None:
    """A compiled package, run in another process."""
    path = str(tmp_path / "program.pt2")
    torch._inductor.aoti_compile_and_package(exported(name), package_path=path)
    in_fresh_process(run_package, path, name, sizes)


def packed(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    x = (t.flatten(0, 1) for t in (query, key, value))
    cu_seq = torch.tensor([0, query.size(1), 2 * query.size(1)])
    return torch_attn.varlen_attn(*x, cu_seq, cu_seq, query.size(1), query.size(1), **options)


def written(query: Tensor, *others: Tensor) -> Any:
    x = [t.flatten(0, 1) for t in (query, *others)]
    cu_seq = torch.tensor([0, query.size(1), 2 * query.size(1)])
    return torch_attn.varlen_attn_out(torch.empty_like(x[0]), *x, cu_seq, cu_seq, 9, 9)


def with_functions(*x: Tensor, **options: Any) -> Any:
    table = torch.arange(4.0)
    return torch_attn.flex_attention(
        *x, lambda s, b, h, i, j: s + table[h] * (i - j), lambda b, h, i, j: i >= j, **options
    )


# By the name of a public function, and what else is asked of it.
DOORS: dict[str, Callable[..., Any]] = {
    "sdpa": torch_attn.sdpa,
    "sdpa, options": lambda *x: torch_attn.sdpa(*x, softcap=3.0, window_size=(2, 1)),
    "sdpa_with_logsumexp": torch_attn.sdpa_with_logsumexp,
    "sdpa_with_weights": torch_attn.sdpa_with_weights,
    "sdpa_stats": lambda q, k, v: tuple(torch_attn.sdpa_stats(q, k)),
    "varlen_attn": packed,
    "varlen_attn, logsumexp": lambda *x: packed(*x, return_aux=varlen.AuxRequest(lse=True)),
    "varlen_attn_out": written,
    "flex_attention": with_functions,
    "flex_attention, logsumexp": lambda *x: with_functions(*x, return_lse=True),
}


def test_every_door_is_listed() -> None:
    public = {n: getattr(torch_attn, n) for n in torch_attn.__all__}
    doors = {n for n, x in public.items() if inspect.isroutine(x) and "query" in names_of(x)}
    assert doors == {name.partition(",")[0] for name in DOORS}


def names_of(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


@pytest.mark.long
@pytest.mark.parametrize("name", DOORS)
def test_every_door_is_exported_and_packaged(name: str, tmp_path: Path) -> None:
    class Door(nn.Module):
        def forward(self, *x: Tensor) -> Any:
            return DOORS[name](*x)

    x = tuple(torch.randn(3, 2, 4, 9, 8))
    with torch.no_grad():
        expected, program = Door()(*x), torch.export.export(Door(), x)
        torch.testing.assert_close(program.module()(*x), expected)
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "door.pt2")
        )
        found = torch._inductor.aoti_load_package(path)(*x)
    of_ours, of_package = (torch.utils._pytree.tree_leaves(t) for t in (expected, found))
    torch.testing.assert_close(of_package, of_ours)


@pytest.mark.usefixtures("device")
def test_symbolic_trace() -> None:
    """torch.fx sees one call, of the operator."""
    traced = torch.fx.symbolic_trace(Attention())
    calls = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert calls.count(torch.ops.attn.sdpa) == 1
    check(traced, "mask")

    x = torch.randn(4, 5, 8)
    with_options = torch.fx.symbolic_trace(lambda x: torch_attn.sdpa(x, x, x, softcap=2.0))
    assert torch.equal(with_options(x), torch_attn.sdpa(x, x, x, softcap=2.0))


def run_script(path: str) -> None:
    check(torch.jit.load(path), "mask")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("how", ["trace", "script of the operator"])
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
        program = torch.jit.script(OfTheOperator())
    assert "attn::sdpa" in str(program.inlined_graph)
    check(program, "mask")
    leaves = [t.requires_grad_() for t in inputs]
    actual = torch.autograd.grad(program(*leaves).sum(), leaves)
    expected = torch.autograd.grad(Attention()(*leaves).sum(), leaves)
    assert all(map(torch.equal, actual, expected))
    path = str(tmp_path / "attention.pt")
    program.save(path)
    in_fresh_process(run_script, path)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", ["attention", "sdpa_with_weights"])
def test_torchscript_of_the_operators(name: str) -> None:
    """Scripts every argument, by position and by name."""
    function, operator = getattr(_scripts, name), getattr(torch.ops.attn, name)
    scripted = torch.jit.script(function)
    query, key, value, mask = make(2, 5, 7)
    for options in (
        *({}, {"is_causal": True, "scale": 0.3}, {"dropout_p": 1.0}),
        *({"softcap": 2.0}, {"window_size": (2, 1)}, {"sinks": torch.randn(4)}),
        *({"key_lengths": torch.tensor(3)}, {"alibi_slopes": torch.rand(2, 4)}),
        *({"is_causal": True, "query_offset": torch.tensor(n)} for n in (2, [1, 3])),
    ):
        expected = operator(query, key, value, mask, enable_gqa=True, **options)
        actual = scripted(query, key, value, mask, enable_gqa=True, **options)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    expected = operator(query, query, query)
    torch.testing.assert_close(scripted(query, query, query), expected, rtol=0, atol=0)
    of_operator = torch.ops.attn.sdpa_with_weights.default._schema.arguments  # of none are packed
    given = [argument.name for argument in scripted.schema.arguments]
    assert given == [argument.name for argument in of_operator]
    with pytest.raises(RuntimeError, match="key"):
        scripted(query, key[..., :3], value)


def calling(x: Tensor) -> Tensor:
    return torch_attn.sdpa(x, x, x)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("program", "operator"),
    [
        (torch_attn.sdpa, "sdpa"),
        (torch_attn.sdpa_with_logsumexp, "attention"),
        (torch_attn.sdpa_with_weights, "sdpa_with_weights"),
        (torch_attn.sdpa_stats, "sdpa_stats"),
        (calling, "sdpa"),
        (Attention(), "sdpa"),
    ],
)
def test_scripting_of_the_functions_names_the_operator(program: Any, operator: str) -> None:
    with pytest.raises(RuntimeError, match=rf"call torch\.ops\.attn\.{operator} in the script"):
        torch.jit.script(program)


# --- docs/promises.md -----------------------------------------------------------------------------

PUBLIC = {
    *("attn::sdpa", "attn::attention", "attn::flex_attention", "attn::varlen_attention"),
    *("attn::sdpa_with_weights", "attn::sdpa_stats"),
}


def of_attn(program: ExportedProgram) -> set[str]:
    targets = (getattr(node.target, "_schema", None) for node in program.graph.nodes)
    return {schema.name for schema in targets if schema and schema.name.startswith("attn::")}


def test_public_operators() -> None:
    names = torch._C._dispatch_get_all_op_names()
    ours = {n for n in names if n.startswith("attn::") and not n.startswith("attn::_")}
    page = (Path(__file__).parents[1] / "docs" / "promises.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith("| Operators |"))
    assert {name.replace("torch.ops.attn.", "") for name in row.split("`")[1::2]} == {
        name.removeprefix("attn::") for name in PUBLIC
    }
    assert ours == PUBLIC


class Step(nn.Module):
    """Layers that learn a bias and sinks, and the loss of a training step; entropies are logged."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(8, 24)
        self.bias = nn.Parameter(torch.randn(1, 6))
        self.sink = nn.Parameter(torch.zeros(2))
        self.register_buffer("cu_seq", torch.tensor([0, 1, 2]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value = self.project(x).chunk(3, -1)
        output = torch_attn.sdpa(query, key, value, self.bias, is_causal=True)
        rows = torch_attn.sdpa_with_logsumexp(
            query, key, output, is_causal=True, window_size=(3, -1), sinks=self.sink
        )
        output = rows[0] + rows[1].square().mean()  # a z-loss
        output = output + torch_attn.varlen_attn(query, key, value, self.cu_seq, self.cu_seq, 1, 1)
        _, weights, _ = torch_attn.sdpa_with_weights(query, key, value)
        stats = torch_attn.sdpa_stats(query.detach(), key.detach())
        return (output - x).square().mean() + weights.square().mean(), stats.entropy


def trained(step: Callable[[Tensor], tuple[Tensor, Tensor]], module: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        step(torch.randn(2, 6, 8))[0].backward()
        optimizer.step()
    return [parameter.detach() for _, parameter in sorted(module.named_parameters())]


def train_saved(path: str) -> list[Tensor]:
    program = torch.export.load(path).module()
    return trained(program, program)


@pytest.mark.long
def test_training_step_holds_public_operators_only(tmp_path: Path) -> None:
    """Exported, decomposed, saved; loaded in another process it trains as the module does."""
    program = torch.export.export(Step(), (torch.randn(2, 6, 8),))
    assert of_attn(program) == PUBLIC - {"attn::flex_attention"}
    assert of_attn(program.run_decompositions()) <= PUBLIC  # without the weights', which are ATen's
    path = str(tmp_path / "step.pt2")
    torch.export.save(program, path)
    module = Step()
    actual = in_fresh_process(train_saved, path)
    torch.testing.assert_close(actual, trained(module, module), rtol=0, atol=0)


def test_joint_graphs_are_of_one_build() -> None:
    """The page warns of what they hold."""

    class Loss(nn.Module):
        def forward(self, query: Tensor) -> tuple[Tensor]:
            return (torch_attn.sdpa(query, query, query).sum(),)

    query = torch.randn(5, 8, requires_grad=True)
    joint, _ = torch._functorch.aot_autograd.aot_export_module(
        Loss(), [query], trace_joint=True, output_loss_index=0
    )
    assert of_attn(joint) == {"attn::_sdpa_forward", "attn::_sdpa_backward"}
