"""Derivatives of attention over several processes: along one tensor, and where processes differ."""

from __future__ import annotations

import contextlib
import datetime
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torch_attn
from _distributed import assert_same
from _processes import Processes, processes_of
from _sequences import METHODS, own_leaf, own_part, under
from torch_attn import reference

pytestmark = pytest.mark.long

run, two = processes_of(2, 4), processes_of(2)


def check_one_tensor(method: str) -> None:
    torch.manual_seed(0)
    L, S = 5, 3
    shapes = {"query": (2, L, 2), "key": (2, S, 2), "value": (2, S, 1), "attn_mask": (L, S)}
    shapes |= {"alibi_slopes": (2,), "sinks": (2,)}
    tensors = {n: torch.randn(shape, dtype=torch.float64) for n, shape in shapes.items()}
    options = {"is_causal": True, "query_offset": 1, "softcap": 3.0}
    attend = functools.partial(torch_attn.distributed.sdpa, lengths=(L, S), **options)
    for name, tensor in tensors.items():
        whole = torch.randn_like(tensor)
        direction = own_part(name, whole)
        blocks = {n: own_part(n, t).clone() for n, t in tensors.items()}
        with forward_ad.dual_level():
            dual = {name: forward_ad.make_dual(tensor, whole)}
            tangent = forward_ad.unpack_dual(reference.sdpa(**tensors | dual, **options)).tangent
            dual = {name: forward_ad.make_dual(blocks[name], direction)}
            found = forward_ad.unpack_dual(attend(**blocks | dual)).tangent
        expected = own_part("output", tangent)
        assert_same(found, expected, name)
        if method == "ring":
            continue
        blocks[name].requires_grad_()
        output = attend(**blocks)
        upstream = torch.ones_like(output, requires_grad=True)
        (gradient,) = torch.autograd.grad(output, blocks[name], upstream, create_graph=True)
        (found,) = torch.autograd.grad((gradient * direction).sum(), upstream)
        assert_same(found, expected, name)


@pytest.mark.parametrize("method", METHODS)
def test_along_one_tensor(two: Processes, method: str) -> None:
    """The other tensors have no tangents. The derivative of the tensor's gradient, in the gradient
    that is given to the backward, is the tangent too; a ring has no second derivatives."""
    two(under, method, check_one_tensor, method)


def check_mask_of_few_rows(L: int) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, dist.get_world_size(), L, 4, dtype=torch.float64)
    mask = torch.randn(L, L, dtype=torch.float64, requires_grad=True)
    expected = torch_attn.sdpa(query, key, value, mask)
    (gradient,) = torch.autograd.grad(expected.square().sum(), mask)
    blocks = [own_leaf(t) for t in (query, key, value, mask)]
    group = dist.new_group(timeout=datetime.timedelta(seconds=5))  # an error must not reach others
    output = torch_attn.distributed.sdpa(*blocks, group=group, lengths=(L, L))
    assert_same(output, own_part("output", expected))
    (found,) = torch.autograd.grad(output.square().sum(), blocks[3])
    assert_same(found, own_part("output", gradient))


@pytest.mark.parametrize("L", [2, 3, 6])
@pytest.mark.parametrize("method", METHODS)
def test_mask_where_a_process_has_one_query_or_none(run: Processes, method: str, L: int) -> None:
    """One row is that process's own, not the same for all queries; all exchange rows, or none."""
    run(under, method, check_mask_of_few_rows, L)


def check_change_in_place(name: str, method: str, way: str) -> None:
    """An error on one process and for DTensors; a gather and all_to_all have copies."""
    torch.manual_seed(0)
    whole = [torch.randn(1, 2, 6, 4, dtype=torch.float64) for _ in range(3)]
    leaves = [t.clone().requires_grad_() for t in whole]
    loss = torch_attn.sdpa(*leaves, is_causal=True, **{name: 4}).square().sum()
    expected = torch.autograd.grad(loss, leaves)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for changes in (False, True):
        number = torch.tensor(4)
        options = {"is_causal": True, name: number}
        kept = (
            saved_tensors_hooks(torch.clone, torch.clone)
            if way == "hooks"
            else contextlib.nullcontext()
        )
        with kept, torch_attn.distributed.method(method):
            if way == "DTensor":
                blocks = [distribute_tensor(t, mesh, [Shard(2)]).requires_grad_() for t in whole]
                loss = torch_attn.sdpa(*blocks, **options).square().sum()
            else:
                blocks = [own_leaf(t) for t in whole]
                loss = torch_attn.distributed.sdpa(*blocks, **options).square().sum()
        if changes:
            number += 1
        fails = changes and (way == "DTensor" or (method == "ring" and way != "hooks"))
        error = pytest.raises(RuntimeError, match="modified by an inplace operation")
        with error if fails else contextlib.nullcontext():
            found = torch.autograd.grad(loss, blocks)
        for gradient, other in zip(found, expected, strict=True):
            own = gradient.to_local() if way == "DTensor" else gradient
            assert_same(own, own_part("query", other))


@pytest.mark.regression
@pytest.mark.parametrize("way", ["plain", "hooks", "DTensor"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["query_offset", "key_lengths"])
def test_numbers_that_change_in_place(two: Processes, name: str, method: str, way: str) -> None:
    """Between forward and backward: an error, or the gradients of the forward."""
    two(check_change_in_place, name, method, way)


class Swallowed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


def check_output_without_gradient() -> None:
    torch.manual_seed(0)
    whole = torch.randn(3, 2, 6, 4, dtype=torch.float64)
    leaves = [t.clone().requires_grad_() for t in whole]
    expected = torch.autograd.grad(torch_attn.sdpa(*leaves)[..., 3:, :].square().sum(), leaves)
    blocks = [own_leaf(t) for t in whole]
    group = dist.new_group(timeout=datetime.timedelta(seconds=5))
    output = torch_attn.distributed.sdpa(*blocks, group=group, lengths=(6, 6))
    output = Swallowed.apply(output) if dist.get_rank() == 0 else output
    output.square().sum().backward()
    for block, gradient in zip(blocks, expected, strict=True):
        found = torch.zeros_like(block) if block.grad is None else block.grad
        assert_same(found, own_part("query", gradient))


@pytest.mark.parametrize("method", METHODS)
def test_a_process_whose_output_gets_no_gradient(two: Processes, method: str) -> None:
    """The process takes part all the same, because other processes have gradients of its keys."""
    two(under, method, check_output_without_gradient)
