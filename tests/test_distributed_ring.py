"""A sequence over several processes of this machine, with gloo, has the results of one process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torch_attn
from _accuracy import hold
from _distributed import assert_same
from _options import errors_of_algorithms
from _processes import Processes, processes_of
from _sequences import (
    CASES,
    CUT,
    FOUND,
    METHODS,
    Counted,
    cases,
    derivatives,
    made,
    own_leaf,
    results,
    under,
)
from helpers import largest, ulp
from torch_attn import reference
from torch_attn.distributed._layout import Call, Layout
from torch_attn.distributed._methods import sent

pytestmark = pytest.mark.long

run = processes_of(2, 3)


def over_processes(case: str, told: bool = True) -> Callable[..., Tensor]:
    """The function of this process."""
    lengths = CASES[case][:2] if told else None
    return functools.partial(torch_attn.distributed.sdpa, lengths=lengths)


def check_case(case: str, method: str) -> None:
    """Checks a method, in forward mode too, and second derivatives where it has them."""
    asked = {"second": method != "ring", "tangent": True}
    expected = results(case, torch.float64, reference.sdpa, alone=True, **asked)
    heads = CASES[case][2:4]
    possible = method != "all_to_all" or all(n % dist.get_world_size() == 0 for n in heads)
    for told in (True, False):
        refused = pytest.raises(RuntimeError, match=r"all_to_all over \d processes needs")
        with contextlib.nullcontext() if possible else refused:
            actual = results(case, torch.float64, over_processes(case, told), **asked)
            assert_same(actual, expected)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", cases(*FOUND))
def test_results_are_those_of_one_process(run: Processes, case: str, method: str) -> None:
    run(under, method, check_case, case, method)


@functools.cache
def errors_of(case: str, dtype: torch.dtype) -> dict[str, float]:
    tensors, options = made(case, dtype, dtype)

    def solve(sdpa: Callable[..., Tensor], x: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return derivatives(sdpa, x, options, lambda _, t: t, dtype=dtype)

    return errors_of_algorithms(tensors, solve)


def check_precision(dtype: torch.dtype, method: str, errors: dict[str, dict[str, float]]) -> None:
    """The bound of one process. Each process rounds its share of a gradient once more."""
    for case, of_case in errors.items():
        exact = results(case, dtype, reference.sdpa, alone=True, computed=torch.float64)
        found = under(method, results, case, dtype, over_processes(case))
        for name, actual in found.items():
            shares = 0 if name in CUT else dist.get_world_size()
            error = of_case[name] + shares * ulp(largest(exact[name]), dtype) / 2
            hold(f"{case}, {name}", actual.double(), exact[name], error, dtype)


@pytest.mark.parametrize("method", ["ring", "gather"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precision_is_that_of_one_process(run: Processes, dtype: torch.dtype, method: str) -> None:
    run(check_precision, dtype, method, {c: errors_of(c, dtype) for c in CASES if c not in FOUND})


def check_bytes(method: str, dtype: torch.dtype, causal: bool) -> None:
    world, group = dist.get_world_size(), dist.group.WORLD
    assert group is not None
    L, S, heads, key_heads, E, Ev = 8 * world, 8 * world, 4 * world, world, 8, 6
    shapes = (heads, L, E), (key_heads, S, E), (key_heads, S, Ev)
    query, key, value = (
        own_leaf(torch.randn(2, *shape, dtype=torch.float64).to(dtype)) for shape in shapes
    )
    layout = Layout(dist.get_rank(), Layout.chunks(L, world), Layout.chunks(S, world))
    options = {"is_causal": causal, "window_size": (-1, -1)}
    call = Call(layout, group, options, torch.zeros((), dtype=torch.int64), None)
    ways = sent(call, query, key, value)
    chosen = torch_attn.distributed.method(method) if method else contextlib.nullcontext()
    with chosen:
        with Counted() as forward:
            output = torch_attn.distributed.sdpa(
                query, key, value, is_causal=causal, enable_gqa=True, lengths=(L, S)
            )
        with Counted() as backward:
            output.sum().backward()

    def average(counted: Counted) -> float:
        total = torch.tensor(sum(size for _, size in counted.sent), dtype=torch.float64)
        dist.all_reduce(total)
        return float(total) / world

    way = method or min(ways, key=lambda name: ways[name])
    assert average(forward) == ways[way]
    # A ring sends keys and values once more, and their gradients back; other ways what the forward
    # sent, the other way. Gradients of keys are float32 at least.
    wide = max(4, dtype.itemsize) / dtype.itemsize
    assert average(backward) == ways[way] * (1 + wide if way == "ring" else 1)
    if way == "ring":  # the formula itself, of how many processes see whose keys
        pairs = world * (world - 1) // (2 if causal else 1)
        of_a_block = 2 * key_heads * (S // world) * (E + Ev) * dtype.itemsize
        assert ways[way] * world == pairs * of_a_block


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("method", [*METHODS, ""])
def test_bytes(run: Processes, method: str, dtype: torch.dtype, causal: bool) -> None:
    run(check_bytes, method, dtype, causal)


# What runs in all processes, and compares there.


def check_masks_of_fewer_dimensions() -> None:
    """The same for all queries of all processes; a gradient has the mask's own shape."""
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = torch.randn(3, 1, 2, 6 * world, 8, dtype=torch.float64)
    rows = slice(6 * rank, 6 * rank + 6)
    for mask in (torch.randn(6 * world).double(), torch.tensor(-1.0).double()):
        mask.requires_grad_()
        expected = torch_attn.sdpa(*whole, mask)
        (of_mask,) = torch.autograd.grad(expected.square().sum(), mask, retain_graph=True)
        for method in ("ring", "gather"):
            with torch_attn.distributed.method(method):
                found = torch_attn.distributed.sdpa(*whole[..., rows, :], mask)
            torch.testing.assert_close(found, expected[..., rows, :])
            (share,) = torch.autograd.grad(found.square().sum(), mask)
            dist.all_reduce(share)
            torch.testing.assert_close(share, of_mask)


def check_odd_sinks() -> None:
    """One of -inf is none, beside rows without keys too; one of NaN makes its head NaN."""
    query, key, value = torch.randn(3, 1, 3, 4, 8)
    sinks = torch.tensor([0.5, -torch.inf, torch.nan], requires_grad=True)
    used = torch.tensor([2])
    output = torch_attn.distributed.sdpa(
        query, key, value, is_causal=True, query_offset=-2, key_lengths=used, sinks=sinks
    )
    (gradient,) = torch.autograd.grad(output.sum(), sinks)
    assert output.isnan().all((0, 2, 3)).tolist() == [False, False, True]
    assert gradient.isnan().tolist() == [False, False, True]
    assert gradient[1] == 0


def check_bits() -> None:
    """They are the same on every run."""
    for case in ("plain", "all"):
        call = results, case, torch.float32, over_processes(case)
        first, second = (under("ring", *call) for _ in range(2))
        torch.testing.assert_close(first, second, rtol=0, atol=0)


def check_what_is_sent() -> None:
    """A block goes to the processes to which it is of use."""
    rank, world = dist.get_rank(), dist.get_world_size()
    query, key, value = torch.randn(3, 1, 2, 16, 8)
    block = key.nbytes
    to_all = {r for r in range(world) if r != rank}
    reached: dict[str, tuple[dict[str, Any], set[int]]] = {
        "all": ({}, to_all),
        "causal": ({"is_causal": True}, {r for r in to_all if r > rank}),
        "window": ({"window_size": (3, 0)}, {rank + 1} & to_all),
        "both sides": ({"window_size": (16, 1)}, {rank - 1, rank + 1} & to_all),
        "lengths": ({"key_lengths": 16}, to_all if rank == 0 else set()),
    }
    for name, (options, expected) in reached.items():
        with Counted() as counted, torch_attn.distributed.method("ring"):
            torch_attn.distributed.sdpa(
                query, key, value, lengths=(16 * world, 16 * world), **options
            )
        assert {to for to, _ in counted.sent} == expected, name
        assert sum(size for _, size in counted.sent) == 2 * block * len(expected), name


def check_memory() -> None:
    """No tensor has the keys of all."""
    world, rows = dist.get_world_size(), 64

    class Largest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for t in torch.utils._pytree.tree_leaves(result):
                if isinstance(t, Tensor) and not t.is_meta:
                    self.most = max(self.most, t.untyped_storage().nbytes() // t.itemsize)
            return result

    inputs = [torch.randn(1, 1, rows, 32, requires_grad=True) for _ in range(3)]
    with Largest() as mode, torch_attn.distributed.method("ring"):
        output = torch_attn.distributed.sdpa(*inputs, lengths=(rows * world,) * 2)
        torch.autograd.grad(output.sum(), inputs)
    assert 0 < mode.most <= rows * 32


def check_errors() -> None:
    query, key, value = (t.requires_grad_() for t in torch.randn(3, 1, 2, 4, 8))
    world, rank = dist.get_world_size(), dist.get_rank()
    message = rf"lengths is \(9, 4\), of which process {rank} of {world} has .* queries"
    with pytest.raises(RuntimeError, match=message):
        torch_attn.distributed.sdpa(query, key, value, lengths=(9, 4))
    with pytest.raises(RuntimeError, match="value has"):
        torch_attn.distributed.sdpa(query, key, value[..., :2, :], lengths=(4 * world, 4 * world))
    with pytest.raises(ValueError, match=r"lengths is 8; it must be a pair \(L, S\)"):
        torch_attn.distributed.sdpa(query, key, value, lengths=8)
    with pytest.raises(RuntimeError, match=r"query is \[8\] and key .*; they must have two"):
        torch_attn.distributed.sdpa(query[0, 0, 0], key, value)
    with pytest.raises(TypeError, match=r"torch_attn.distributed.sdpa: key is a list"):
        torch_attn.distributed.sdpa(query, key.tolist(), value)
    with pytest.raises(TypeError, match=r"distributed.sdpa\(\) got an unexpected .* 'dropout_p'"):
        torch_attn.distributed.sdpa(query, key, value, dropout_p=0.1)
    with pytest.raises(ValueError, match="name is 'star'; it must be"):
        torch_attn.distributed.method("star").__enter__()
    with torch_attn.distributed.method("ring"):
        torch.func.grad(lambda q: torch_attn.distributed.sdpa(q, key, value).sum())(query)
        output = torch_attn.distributed.sdpa(query, key, value)
    (first,) = torch.autograd.grad(output.sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="a second derivative is asked for, which a ring lacks"):
        torch.autograd.grad(first.sum(), query)


@pytest.mark.each("check")
@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check_masks_of_fewer_dimensions, marks=pytest.mark.regression),
        *(check_odd_sinks, check_bits, check_what_is_sent, check_memory, check_errors),
    ],
)
def test_blocks(run: Processes, check: Callable[[], None]) -> None:
    run(check)
