"""DTensor: two processes on this machine, with gloo, give the result of one."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import torch_attn
from _distributed import Attention
from _processes import Processes, processes_of
from helpers import Inputs, in_fresh_process, make_inputs

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
    "mask, bfloat16": ({"dtype": torch.bfloat16, "mask": (2, 4, 5, 7)}, {}, (Head,) * 4, Head),
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


def results(inputs: Inputs, options: dict[str, Any]) -> dict[str, Tensor]:
    """All that comes out: with gradients, to second order, and without; statistics."""
    plain = torch_attn.sdpa_with_logsumexp(*inputs, **options)
    found = dict(zip(("output", "logsumexp", "max_score"), plain, strict=True))
    query, key, _, mask = inputs
    found |= torch_attn.sdpa_stats(query, key, mask, **options)._asdict()
    given = inputs._asdict() | options
    leaves = {
        name: t.detach().requires_grad_()
        for name, t in given.items()
        if isinstance(t, Tensor) and t.is_floating_point()
    }
    wanted = [*leaves.values()]
    output, logsumexp, _ = torch_attn.sdpa_with_logsumexp(**given | leaves)
    alone = torch_attn.sdpa(**given | leaves)  # without the logsumexp, whose results are then empty
    with_rows, without = [output.square().sum(), logsumexp.sin().sum()], [alone.square().sum()]
    for of, loss in (("both", with_rows), ("the output", without)):
        first = torch.autograd.grad(loss, wanted, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), wanted)
        found |= {f"gradient of {of}, {name}": g for name, g in zip(leaves, first, strict=True)}
        found |= {f"second of {of}, {name}": g for name, g in zip(leaves, second, strict=True)}
    return {name: t.detach() for name, t in found.items()}


def shard(tensor: Tensor | None, mesh: Any, placement: Any) -> Any:
    if tensor is None or placement is None:
        return tensor
    if placement.is_partial():
        return DTensor.from_local(tensor / WORLD, mesh, [placement])
    return distribute_tensor(tensor, mesh, [placement])


def compare(
    sizes: dict[str, Any],
    options: dict[str, Any],
    placements: tuple[Any, ...],
    tensors: dict[str, tuple[tuple[int, ...], Any]],
) -> tuple[list[tuple[Any, ...]], int]:
    """Asserts that the results equal one process's.

    Returns the placements of the output and of the statistics, and the number of collectives of
    these and of the backward.
    """
    torch.manual_seed(0)
    inputs = make_inputs(**{"L": 5, "S": 7, "E": 6, "heads": 4, "dtype": torch.float64, **sizes})
    drawn = {name: option(name, shape) for name, (shape, _) in tensors.items()}
    mesh = init_device_mesh("cpu", (WORLD,))
    sharded = Inputs(*(shard(t, mesh, p) for t, p in zip(inputs, placements, strict=True)))
    placed = {name: shard(drawn[name], mesh, p) for name, (_, p) in tensors.items()}
    expected, actual = results(inputs, options | drawn), results(sharded, options | placed)
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(actual[name].full_tensor(), expected[name], msg=name)
    query, key, _, mask = sharded
    leaves = sharded.require_grad()
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    options = options | placed
    grad_output = torch.ones_like(torch_attn.sdpa(*leaves, **options))
    with CommDebugMode() as communication:
        output = torch_attn.sdpa(*leaves, **options)
        statistics = torch_attn.sdpa_stats(query, key, mask, **options)
        torch.autograd.grad(output, wanted, grad_output)
    return [t.placements for t in (output, *statistics)], communication.get_total_counts()


@pytest.mark.long
@pytest.mark.parametrize("case", LOCAL)
def test_without_communication(run: Processes, case: str) -> None:
    *given, of_output = LOCAL[case]
    assert run(compare, *given, {}) == [([(of_output,)] * 5, 0)] * WORLD


@pytest.mark.parametrize("case", REDISTRIBUTED)
def test_redistributed(run: Processes, case: str) -> None:
    *given, of_output = REDISTRIBUTED[case]
    for (placements, *_), communications in run(compare, *given, {}):
        assert of_output is None or placements == (of_output,)
        assert communications > 0


@pytest.mark.parametrize("case", WITH_OPTIONS)
def test_options(run: Processes, case: str) -> None:
    tensors, placement, of_output = WITH_OPTIONS[case]
    options = {"window_size": (4, 1), "softcap": 2.0}
    for placements, communications in run(compare, {}, options, (placement,) * 4, tensors):
        assert placements == [(of_output,)] * 5
        assert (communications > 0) == (case == "of entries, sharded otherwise")


# What runs in both processes, and compares there.


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


def options_placed_otherwise() -> None:
    """They follow query, key and value; integers may be plain tensors. And a call must not be taken
    for one before whose tensors were placed otherwise."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (WORLD,))
    inputs = make_inputs(5, 7, 6, heads=4)[:3]
    sinks = torch.randn(4)
    for of_sinks, of_lengths, numbers, of_inputs in itertools.product(
        (Shard(0), R), (None, R, Batch), ([3, 6], [1, 4]), (Head, Batch, R)
    ):
        lengths = torch.tensor(numbers)
        output = torch_attn.sdpa(
            *(shard(t, mesh, of_inputs) for t in inputs),
            sinks=shard(sinks, mesh, of_sinks),
            key_lengths=shard(lengths, mesh, of_lengths),
        )
        expected = torch_attn.sdpa(*inputs, sinks=sinks, key_lengths=lengths)
        torch.testing.assert_close(output.full_tensor(), expected)
    with pytest.raises(RuntimeError, match="sinks is a plain tensor, mixed with DTensors"):
        torch_attn.sdpa(*(shard(t, mesh, Head) for t in inputs), sinks=sinks)


def call_after_call() -> None:
    """What DTensor remembers of a call must not serve one that differs in an option only."""
    torch.manual_seed(0)
    inputs, mesh = make_inputs(5, 7, heads=4)[:3], init_device_mesh("cpu", (WORLD,))
    for wanted, options in itertools.product(
        ((0,), (1, 2), (0, 1, 2)), ({}, {"is_causal": True}, {"scale": 0.1})
    ):
        gradients = []
        for placement in (None, Head):
            tensors = [shard(t, mesh, placement).detach() for t in inputs]
            leaves = [tensors[i].requires_grad_() for i in wanted]
            loss = torch_attn.sdpa(*tensors, **options).square().sum()
            gradients.append(torch.autograd.grad(loss, leaves))
        for expected, actual in zip(*gradients, strict=True):
            torch.testing.assert_close(actual.full_tensor(), expected)
    for sharded in (tensors, [t.detach() for t in tensors]):
        with pytest.raises(RuntimeError, match=r"dropout_p is 0\.5, but .* DTensors"):
            torch_attn.sdpa(*sharded, dropout_p=0.5)
    with pytest.raises(RuntimeError, match="key is a plain tensor, mixed with DTensors"):
        torch_attn.sdpa(tensors[0], *inputs[1:])


def tensor_parallel() -> None:
    torch.manual_seed(0)
    module, x = Attention(torch_attn.sdpa), torch.randn(2, 5, 8, dtype=torch.float64)
    expected = module(x)
    expected.sum().backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()
    columns = ColwiseParallel(use_local_output=False)  # what follows gets a DTensor
    plan = {"q": columns, "k": columns, "v": columns, "o": RowwiseParallel()}
    parallel = parallelize_module(module, init_device_mesh("cpu", (WORLD,)), plan)
    output = parallel(x)
    torch.testing.assert_close(output, expected)
    output.sum().backward()
    for name, parameter in parallel.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), gradients[name], msg=name)


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


@pytest.mark.each("check")
@pytest.mark.parametrize(
    "check",
    [
        what_the_forward_keeps,
        options_placed_otherwise,
        call_after_call,
        tensor_parallel,
        causal_biases,
    ],
)
def test_dtensors(run: Processes, check: Callable[[], None]) -> None:
    run(check)


def heads_over_two_dimensions() -> None:
    """2 x 2 devices, of which one is played and none computes."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2))
    for heads, first, second in (
        ((8, 8, 8), Head, Head),
        ((8, 4, 4), Head, Head),
        ((24, 6, 6), Head, R),  # 6 key heads divide among 2 devices, not among 4: groups would mix
        ((8, 2, 2), Batch, Head),
    ):
        query, key, value, _ = make_inputs(5, 7, heads=heads)
        tensors = [distribute_tensor(t, mesh, [first, Head]) for t in (query, key, value)]
        output = torch_attn.sdpa(*tensors, enable_gqa=True)
        assert output.placements == (first, second), heads


@pytest.mark.long
def test_heads_over_two_dimensions() -> None:
    in_fresh_process(heads_over_two_dimensions)


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "is_imported"),
    [
        ("import torch_attn", False),
        ("import torch.distributed.tensor, torch_attn", True),
        ("import torch_attn; find_spec('torch.distributed.tensor')", False),  # only looks for it
    ],
)
def test_registered_in_either_order(before: str, is_imported: bool) -> None:
    code = f"""
import sys
from importlib.util import find_spec
{before}
assert ("torch.distributed.tensor" in sys.modules) == {is_imported}
import torch.distributed.tensor
known = torch._library.simple_registry.singleton.find("attn::_sdpa_second").torch_dispatch_rules
assert known.find(torch.distributed.tensor.DTensor) is not None
"""
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], check=True)
