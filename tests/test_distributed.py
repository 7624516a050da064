"""DTensor: two processes on this machine, with gloo, give the result of one."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import torch_attn
from _processes import Processes, processes_of
from helpers import in_fresh_process, make_inputs

WORLD = 2
run = processes_of(WORLD)


R, Batch, Head, Rows, Columns = Replicate(), Shard(0), Shard(1), Shard(2), Shard(3)
HEADS, GQA = {"heads": (4, 2, 2)}, {"enable_gqa": True}

# Sizes, options, placements of query, key, value and mask, and of the output if it is known.
Case = tuple[dict[str, Any], dict[str, Any], tuple[Any, ...], Any]
LOCAL: dict[str, Case] = {
    "batch": ({}, {}, (Batch, Batch, Batch, R), Batch),
    "heads": ({}, {}, (Head, Head, Head, R), Head),
    "replicated": ({}, {}, (R, R, R, R), R),
    "causal": ({}, {"is_causal": True}, (Head, Head, Head, R), Head),
    "uneven batch": ({"batch": (3,)}, {}, (Batch, Batch, Batch, R), Batch),
    "uneven heads": ({"heads": 3}, {}, (Head, Head, Head, R), Head),
    "3-D": ({"batch": ()}, {}, (Shard(0), Shard(0), Shard(0), R), Shard(0)),
    "5-D": ({"batch": (2, 3)}, {}, (Head, Head, Head, R), Head),
    "bfloat16": ({"dtype": torch.bfloat16}, {}, (Head, Head, Head, R), Head),
    "mask, bfloat16": (
        {"dtype": torch.bfloat16, "mask": (2, 4, 5, 7)},
        {},
        (Head,) * 4,
        Head,
    ),
    "grouped heads": (HEADS, GQA, (Head, Head, Head, R), Head),
    "one key head": ({"heads": (4, 1, 1)}, GQA, (Head, R, R, R), Head),
    "one value head": ({"heads": (4, 2, 1)}, GQA, (Head, Head, R, R), Head),
    "grouped heads over batch": (HEADS, GQA, (Batch, Batch, Batch, R), Batch),
    "mask of batch": ({"mask": (2, 1, 5, 7)}, {}, (Batch,) * 4, Batch),
    "mask of all": ({"mask": (2, 4, 5, 7)}, {"is_causal": True}, (Head,) * 4, Head),
    "mask of heads": ({"mask": (4, 1, 7)}, {}, (Head, Head, Head, Shard(0)), Head),
    "mask of scores": ({"mask": (5, 7)}, {}, (Head, Head, Head, R), Head),
    "mask of keys": ({"mask": (2, 1, 1, 7)}, {}, (Head, Head, Head, R), Head),
    "bool mask": ({"mask": (2, 1, 5, 7), "kind": "bool"}, {}, (Batch,) * 4, Batch),
    "replicated key": ({}, {}, (Head, R, R, R), Head),
    "replicated groups": (HEADS, GQA, (Head, R, R, R), Head),
}
REDISTRIBUTED: dict[str, Case] = {
    "two ways": ({}, {}, (Batch, Head, Head, R), None),
    "keys": ({}, {}, (R, Rows, Rows, R), None),
    "queries and keys": ({"mask": (2, 4, 5, 7)}, {}, (Rows, Rows, Rows, Columns), None),
    "head_dim": ({}, {}, (Columns, Columns, R, R), None),
    "value_dim": ({}, {}, (R, R, Columns, R), None),
    "mask of other heads": ({"mask": (2, 4, 5, 7)}, {}, (Batch, Batch, Batch, Head), None),
    "groups cut": ({"heads": (6, 3, 3)}, GQA, (Head, Head, Head, R), R),
    "sum to be done": ({}, {}, (Partial(), R, R, R), None),
}


def derivatives(*inputs: Tensor | None, **options: Any) -> dict[str, Tensor]:
    """Output, gradients, and the gradients of their squares."""
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in inputs if t is not None]
    wanted = [t for t in leaves if t.requires_grad]
    output = torch_attn.sdpa(*leaves, **options)
    gradients = torch.autograd.grad(output.square().sum(), wanted, create_graph=True)
    again = torch.autograd.grad(sum(g.square().sum() for g in gradients), wanted)
    results = {"output": output}
    results |= {f"gradient {i}": g for i, g in enumerate(gradients)}
    results |= {f"second {i}": g for i, g in enumerate(again)}
    return {name: t.detach() for name, t in results.items()}


def shard(tensor: Tensor | None, mesh: Any, placement: Any) -> DTensor | None:
    if tensor is None:
        return None
    if placement.is_partial():
        return DTensor.from_local(tensor / WORLD, mesh, [placement])
    return distribute_tensor(tensor, mesh, [placement])


def compare(case: Case) -> tuple[tuple[Any, ...], int]:
    """Asserts that the results equal one process's.

    Returns the output's placements and the number of collectives of forward and backward.
    """
    sizes, options, placements, _ = case
    torch.manual_seed(0)
    inputs = make_inputs(**{"L": 5, "S": 7, "E": 6, "heads": 4, "dtype": torch.float64, **sizes})
    mesh = init_device_mesh("cpu", (WORLD,))
    sharded = [shard(t, mesh, p) for t, p in zip(inputs, placements, strict=True)]
    expected = derivatives(*inputs, **options)
    actual = derivatives(*sharded, **options)
    for name in expected:
        torch.testing.assert_close(actual[name].full_tensor(), expected[name], msg=name)
    sharded = [t.detach().requires_grad_(t.is_floating_point()) for t in sharded if t is not None]
    grad_output = torch.ones_like(torch_attn.sdpa(*sharded, **options))
    with CommDebugMode() as communication:
        output = torch_attn.sdpa(*sharded, **options)
        torch.autograd.grad(output, [t for t in sharded if t.requires_grad], grad_output)
    return output.placements, communication.get_total_counts()


@pytest.mark.parametrize("case", LOCAL)
def test_without_communication(run: Processes, case: str) -> None:
    expected = LOCAL[case][-1]
    assert run(compare, LOCAL[case]) == [((expected,), 0)] * WORLD


@pytest.mark.parametrize("case", REDISTRIBUTED)
def test_redistributed(run: Processes, case: str) -> None:
    for (placement,), communications in run(compare, REDISTRIBUTED[case]):
        assert placement == (REDISTRIBUTED[case][-1] or placement)
        assert communications > 0


def compare_statistics(case: Case) -> list[tuple[tuple[Any, ...], int]]:
    """Asserts that those are of one process too; their placements and the collectives."""
    sizes, options, placements, _ = case
    torch.manual_seed(0)
    inputs = make_inputs(**{"L": 5, "S": 7, "E": 6, "heads": 4, "dtype": torch.float64, **sizes})
    mesh = init_device_mesh("cpu", (WORLD,))
    query, key, _, mask = (shard(t, mesh, p) for t, p in zip(inputs, placements, strict=True))
    with CommDebugMode() as communication:
        actual = torch_attn.sdpa_stats(query, key, mask, **options)
    expected = torch_attn.sdpa_stats(inputs.query, inputs.key, inputs.attn_mask, **options)
    for name, tensor in expected._asdict().items():
        torch.testing.assert_close(getattr(actual, name).full_tensor(), tensor, msg=name)
    return [(t.placements, communication.get_total_counts()) for t in actual]


@pytest.mark.parametrize("case", [name for name in LOCAL if "value" not in name])
def test_statistics_without_communication(run: Processes, case: str) -> None:
    expected = LOCAL[case][-1]
    assert run(compare_statistics, LOCAL[case]) == [[((expected,), 0)] * 4] * WORLD


@pytest.mark.parametrize("case", ["keys", "head_dim", "sum to be done", "two ways"])
def test_statistics_redistributed(run: Processes, case: str) -> None:
    for results in run(compare_statistics, REDISTRIBUTED[case]):
        assert all(communications > 0 for _, communications in results)


# Shapes of the tensors among the options with their placements, the placements of query, key and
# value, and of the output.
WITH_OPTIONS: dict[str, tuple[dict[str, tuple[tuple[int, ...], Any]], Any, Any]] = {
    "numbers": ({"query_offset": ((), None), "key_lengths": ((), None)}, Head, Head),
    "of heads, heads": ({"alibi_slopes": ((4,), Shard(0)), "sinks": ((4,), Shard(0))}, Head, Head),
    "of heads, batch": ({"alibi_slopes": ((4,), R), "sinks": ((4,), R)}, Batch, Batch),
    "of heads and batch, heads": ({"alibi_slopes": ((2, 4), Shard(1))}, Head, Head),
    "of heads and batch, batch": ({"sinks": ((2, 4), Shard(0))}, Batch, Batch),
    "of one batch entry": ({"alibi_slopes": ((1, 4), R), "sinks": ((1, 4), R)}, Batch, Batch),
    "of entries, batch": (
        {"query_offset": ((2,), Batch), "key_lengths": ((2,), Batch)},
        *(Batch, Batch),
    ),
    "of entries, heads": ({"query_offset": ((2,), R), "key_lengths": ((2,), R)}, Head, Head),
    "all, heads": (
        {
            "alibi_slopes": ((2, 4), Shard(1)),
            "sinks": ((4,), Shard(0)),
            "query_offset": ((2,), R),
            "key_lengths": ((1,), None),
        },
        *(Head, Head),
    ),
    "of entries, not sharded": ({"key_lengths": ((2,), R)}, Batch, Batch),
    "of entries, sharded alone": ({"key_lengths": ((2,), Batch)}, R, Batch),
    "of entries, sharded otherwise": ({"key_lengths": ((2,), Batch)}, Head, Head),
}


def option(name: str, shape: tuple[int, ...]) -> Tensor:
    if name in ("query_offset", "key_lengths"):
        return torch.randint(2, 6, shape)
    return torch.rand(shape, dtype=torch.float64)


def results(inputs: list[Tensor], options: dict[str, Any]) -> dict[str, Tensor]:
    """All that comes out: with gradients, to second order, and without; statistics."""
    options = {"window_size": (4, 1), "softcap": 2.0, **options}
    plain = torch_attn.sdpa_with_logsumexp(*inputs, **options)
    found = dict(zip(("output", "logsumexp", "max_score"), plain, strict=True))
    found |= torch_attn.sdpa_stats(*inputs[:2], **options)._asdict()
    leaves = [t.detach().requires_grad_() for t in inputs]
    learned = {
        name: t.detach().requires_grad_()
        for name, t in options.items()
        if isinstance(t, Tensor) and t.is_floating_point()
    }
    output, logsumexp, _ = torch_attn.sdpa_with_logsumexp(*leaves, **options | learned)
    wanted = [*leaves, *learned.values()]
    loss = output.square().sum() + logsumexp.sin().sum()
    first = torch.autograd.grad(loss, wanted, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), wanted)
    found |= {f"gradient {i}": g for i, g in enumerate(first)}
    found |= {f"second {i}": g for i, g in enumerate(second)}
    # without the logsumexp, whose results are then empty
    first = torch.autograd.grad(torch_attn.sdpa(*leaves, **options | learned).sum(), wanted)
    return found | {f"of the output {i}": g for i, g in enumerate(first)}


def compare_options(case: str) -> tuple[Any, int]:
    """Compares as `compare` does, of the output without gradients."""
    torch.manual_seed(0)
    tensors, placement, _ = WITH_OPTIONS[case]
    inputs = list(make_inputs(5, 7, 6, heads=4, dtype=torch.float64)[:3])
    options = {name: option(name, shape) for name, (shape, _) in tensors.items()}
    mesh = init_device_mesh("cpu", (WORLD,))
    sharded = [shard(t, mesh, placement) for t in inputs]
    others = {
        name: options[name] if p is None else shard(options[name], mesh, p)
        for name, (_, p) in tensors.items()
    }
    expected, actual = results(inputs, options), results(sharded, others)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name].full_tensor(), tensor, msg=f"{case}: {name}")
    with CommDebugMode() as communication:
        output = torch_attn.sdpa(*sharded, **others)
    return output.placements, communication.get_total_counts()


@pytest.mark.filterwarnings("ignore:Found a non-scalar tensor with numel=1")
@pytest.mark.parametrize("case", WITH_OPTIONS)
def test_options(run: Processes, case: str) -> None:
    *_, of_output = WITH_OPTIONS[case]
    for placements, communications in run(compare_options, case):
        assert placements == (of_output,)
        assert (communications > 0) == (case == "of entries, sharded otherwise")


def what_the_forward_keeps() -> None:
    """Each result is known as what it is, also where it is empty: a redistribution relies on it."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (WORLD,))
    inputs = make_inputs(5, 7, 6, heads=4, dtype=torch.bfloat16)[:3]
    for name, with_rows in (("alibi_slopes", False), ("sinks", True), (None, True), (None, False)):
        options = {} if name is None else {name: torch.rand(4)}
        expected = torch.ops.attn._sdpa_forward(*inputs, with_rows=with_rows, **options)
        sharded = [shard(t, mesh, Head) for t in inputs]
        options = {n: shard(t, mesh, Shard(0)) for n, t in options.items()}
        actual = torch.ops.attn._sdpa_forward(*sharded, with_rows=with_rows, **options)
        assert with_rows == (actual[-1].shape != (0,))
        for one, other in zip(actual, expected, strict=True):
            assert one.shape == other.shape
            torch.testing.assert_close(one.full_tensor(), other)
        rows = torch.ops.attn.attention(*sharded, with_rows=False)[1:]
        assert [t.shape for t in rows] == [(0,), (0,)]


def test_what_the_forward_keeps(run: Processes) -> None:
    run(what_the_forward_keeps)


def options_after_options() -> None:
    """A call must not be taken for one before whose tensors were placed otherwise."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (WORLD,))
    inputs = make_inputs(5, 7, 6, heads=4)[:3]
    sinks, lengths = torch.randn(4), torch.tensor([3, 6])
    for of_inputs, of_sinks, of_lengths in (
        (Head, Shard(0), R),
        (Head, R, R),
        (Batch, R, Batch),
        (Head, Shard(0), R),
        (Batch, R, R),
    ):
        sharded = [shard(t, mesh, of_inputs) for t in inputs]
        for moved in (lengths, lengths - 2):
            options = {
                "sinks": shard(sinks, mesh, of_sinks),
                "key_lengths": shard(moved, mesh, of_lengths),
            }
            output = torch_attn.sdpa(*sharded, **options).full_tensor()
            expected = torch_attn.sdpa(*inputs, sinks=sinks, key_lengths=moved)
            torch.testing.assert_close(output, expected)


def test_options_after_options(run: Processes) -> None:
    run(options_after_options)


def options_placed_otherwise() -> None:
    """They follow query, key and value; integers may be plain tensors."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (WORLD,))
    inputs = make_inputs(5, 7, 6, heads=4)[:3]
    sinks, lengths = torch.randn(4), torch.tensor([3, 6])
    expected = torch_attn.sdpa(*inputs, sinks=sinks, key_lengths=lengths)
    for of_inputs in (Batch, Head, R):
        for given in (lengths, shard(lengths, mesh, Batch)):
            output = torch_attn.sdpa(
                *(shard(t, mesh, of_inputs) for t in inputs),
                sinks=shard(sinks, mesh, Shard(0)),
                key_lengths=given,
            )
            torch.testing.assert_close(output.full_tensor(), expected)
    with pytest.raises(RuntimeError, match="sinks is a plain tensor, mixed with DTensors"):
        torch_attn.sdpa(*(shard(t, mesh, Head) for t in inputs), sinks=sinks)


def test_options_placed_otherwise(run: Processes) -> None:
    run(options_placed_otherwise)


def call_after_call() -> None:
    """What DTensor remembers of a call must not serve one that differs in an option only."""
    torch.manual_seed(0)
    inputs, mesh = make_inputs(5, 7, heads=4)[:3], init_device_mesh("cpu", (WORLD,))
    for wanted in ((0,), (1, 2), (0, 1, 2)):
        for options in ({}, {"is_causal": True}, {"scale": 0.1}):
            leaves = [t.clone().requires_grad_(i in wanted) for i, t in enumerate(inputs)]
            torch_attn.sdpa(*leaves, **options).square().sum().backward()
            sharded = [
                shard(t.detach(), mesh, Head).requires_grad_(t.requires_grad) for t in leaves
            ]
            torch_attn.sdpa(*sharded, **options).square().sum().backward()
            for leaf, other in zip(leaves, sharded, strict=True):
                assert (leaf.grad is None) == (other.grad is None)
                if leaf.grad is not None:
                    torch.testing.assert_close(other.grad.full_tensor(), leaf.grad)
    for tensors in (sharded, [t.detach() for t in sharded]):
        with pytest.raises(RuntimeError, match=r"dropout_p is 0\.5, but .* DTensors"):
            torch_attn.sdpa(*tensors, dropout_p=0.5)
    with pytest.raises(RuntimeError, match="key is a plain tensor, mixed with DTensors"):
        torch_attn.sdpa(sharded[0], *inputs[1:])


def test_call_after_call(run: Processes) -> None:
    run(call_after_call)


class Attention(nn.Module):
    """Projections and attention over as many heads as the projections give."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.output = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            project(x).unflatten(-1, (-1, 4)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        return self.output(torch_attn.sdpa(query, key, value).transpose(1, 2).flatten(-2))


def tensor_parallel() -> None:
    torch.manual_seed(0)
    module, x = Attention(), torch.randn(2, 5, 16)
    expected = module(x)
    expected.sum().backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()
    columns = ColwiseParallel(use_local_output=False)  # what follows gets a DTensor
    plan = {"query": columns, "key": columns, "value": columns, "output": RowwiseParallel()}
    parallel = parallelize_module(module, init_device_mesh("cpu", (WORLD,)), plan)
    output = parallel(x)
    torch.testing.assert_close(output, expected)
    output.sum().backward()
    for name, parameter in parallel.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), gradients[name], msg=name)


def test_tensor_parallel(run: Processes) -> None:
    run(tensor_parallel)


def placements_on_a_square() -> list[tuple[Any, ...]]:
    """Placements of the outputs on 2 x 2 devices, of which one is played and none computes."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2))
    placements = []
    for heads, both in (
        ((8, 8, 8), Head),
        ((8, 4, 4), Head),
        ((24, 6, 6), Head),
        ((8, 2, 2), Batch),
    ):
        query, key, value, _ = make_inputs(5, 7, heads=heads)
        tensors = [distribute_tensor(t, mesh, [both, Head]) for t in (query, key, value)]
        placements.append(torch_attn.sdpa(*tensors, enable_gqa=True).placements)
    return placements


def test_heads_over_two_dimensions() -> None:
    """6 key heads divide among 2 devices but not among 4: groups would mix."""
    assert in_fresh_process(placements_on_a_square) == [
        (Head, Head),
        (Head, Head),
        (Head, R),
        (Batch, Head),
    ]


def causal_biases() -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (WORLD,))
    inputs = make_inputs(5, 7, heads=4)[:3]
    tensors = [distribute_tensor(t, mesh, [Head]) for t in inputs]
    for bias, offset in ((causal_upper_left(5, 7), 0), (causal_lower_right(5, 7), 2)):
        output = torch_attn.sdpa(*tensors, bias)
        assert output.placements == (Head,)
        expected = torch_attn.sdpa(*inputs, is_causal=True, query_offset=offset)
        torch.testing.assert_close(output.full_tensor(), expected)


def test_causal_biases(run: Processes) -> None:
    run(causal_biases)


@pytest.mark.parametrize("first", ["torch_attn", "torch.distributed.tensor"])
def test_registered_in_either_order(first: str) -> None:
    code = f"""
import sys, {first}, torch_attn, torch
assert ("torch.distributed.tensor" in sys.modules) == ({first!r} != "torch_attn")
import torch.distributed.tensor
known = torch._library.simple_registry.singleton.find("attn::_sdpa_second").torch_dispatch_rules
assert known.find(torch.distributed.tensor.DTensor) is not None
"""
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], check=True)


def test_registered_where_somebody_has_looked_for_it_first() -> None:
    code = """
import importlib.util, torch, torch_attn
assert importlib.util.find_spec("torch.distributed.tensor") is not None
import torch.distributed.tensor
known = torch._library.simple_registry.singleton.find("attn::_sdpa_second").torch_dispatch_rules
assert known.find(torch.distributed.tensor.DTensor) is not None
"""
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], check=True)


def forward_mode() -> None:
    x = shard(torch.ones(2, 2, 5, 4), init_device_mesh("cpu", (WORLD,)), Head)
    with pytest.raises(NotImplementedError, match="_has_same_storage_numel"):
        torch.func.jvp(lambda x: torch_attn.sdpa(x, x, x), (x,), (x,))


def test_forward_mode_raises(run: Processes) -> None:
    """PyTorch itself makes no dual tensor of a DTensor."""
    run(forward_mode)
