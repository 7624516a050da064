"""The derivatives of attention over several processes, as PyTorch checks them."""

from __future__ import annotations

import contextlib
import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torch_attn
from _processes import Processes, processes_of
from _sequences import METHODS, own_leaf, own_part, under

run = processes_of(2, 4)


# The derivatives, as PyTorch checks them. A tensor is either the same on all processes, or local to
# each. The functions from the one to the other are adjoint, with gradients and tangents alike.


class Cut(torch.autograd.Function):
    """The own rows of a tensor that all have."""

    @staticmethod
    def forward(whole: Tensor) -> Tensor:
        return own_part("query", whole).clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.length = inputs[0].shape[-2]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return Join.apply(gradient, ctx.length)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Any:
        return Cut.apply(tangent)


class Join(torch.autograd.Function):
    """Joins the rows of each process to a tensor of `length` rows that all have."""

    @staticmethod
    def forward(block: Tensor, length: int) -> Tensor:
        whole = block.new_zeros(*block.shape[:-2], length, block.shape[-1])
        own_part("query", whole).copy_(block)
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.length = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return Cut.apply(gradient), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Any:
        return Join.apply(tangent, ctx.length)


class Given(torch.autograd.Function):
    """A tensor that all have, to each, whose gradients are shares."""

    @staticmethod
    def forward(tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return Added.apply(gradient)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Any:
        return Given.apply(tangent)


class Added(torch.autograd.Function):
    """The sum of what each has, to all."""

    @staticmethod
    def forward(share: Tensor) -> Tensor:
        total = share.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return Given.apply(gradient)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Any:
        return Added.apply(tangent)


def check_derivatives(second: bool) -> None:
    torch.manual_seed(0)
    L, S = 5, 3
    shapes = [(2, L, 2), (2, S, 2), (2, S, 1), (L, S), (2,), (2,)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    options = {"is_causal": True, "query_offset": 1, "softcap": 3.0}

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *rest: Tensor) -> Tensor:
        blocks = [Cut.apply(t) for t in (query, key, value, mask)]
        slopes, sinks = (Given.apply(t) for t in rest)
        output = torch_attn.distributed.sdpa(
            *blocks, lengths=(L, S), alibi_slopes=slopes, sinks=sinks, **options
        )
        whole: Tensor = Join.apply(output, L)
        return whole

    query, key, value, mask, slopes, sinks = inputs
    expected = torch_attn.sdpa(query, key, value, mask, alibi_slopes=slopes, sinks=sinks, **options)
    torch.testing.assert_close(attend(*inputs), expected)
    if second:
        # gradgradcheck leaves out gradients that have no graph.
        output = attend(*inputs).square().sum()
        gradients = torch.autograd.grad(output, inputs, create_graph=True)
        assert all(g.requires_grad for g in gradients)
        assert torch.autograd.gradgradcheck(attend, inputs)
    else:
        assert torch.autograd.gradcheck(attend, inputs, check_forward_ad=True)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("run", [2], indirect=True)
def test_gradcheck(run: Processes, method: str) -> None:
    """Forward and reverse mode; every process moves the same numbers in the same order."""
    run(under, method, check_derivatives, False)


@pytest.mark.slow  # many evaluations over processes
@pytest.mark.parametrize("method", ["gather", "all_to_all"])
@pytest.mark.parametrize("run", [2], indirect=True)
def test_gradgradcheck(run: Processes, method: str) -> None:
    run(under, method, check_derivatives, True)


# What one process cannot see by itself, and what a call of one process would refuse.


def check_mask_of_few_rows(L: int) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, dist.get_world_size(), L, 4, dtype=torch.float64)
    mask = torch.randn(L, L, dtype=torch.float64, requires_grad=True)
    expected = torch_attn.sdpa(query, key, value, mask)
    (gradient,) = torch.autograd.grad(expected.square().sum(), mask)
    blocks = [own_leaf(t) for t in (query, key, value, mask)]
    group = dist.new_group(timeout=datetime.timedelta(seconds=5))  # an error must not reach others
    output = torch_attn.distributed.sdpa(*blocks, group=group, lengths=(L, L))
    torch.testing.assert_close(output, own_part("output", expected), rtol=1e-10, atol=1e-11)
    (found,) = torch.autograd.grad(output.square().sum(), blocks[3])
    torch.testing.assert_close(found, own_part("output", gradient), rtol=1e-10, atol=1e-11)


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
            torch.testing.assert_close(own, own_part("query", other), rtol=1e-10, atol=1e-11)


@pytest.mark.regression
@pytest.mark.parametrize("way", ["plain", "hooks", "DTensor"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["query_offset", "key_lengths"])
@pytest.mark.parametrize("run", [2], indirect=True)
def test_numbers_that_change_in_place(run: Processes, name: str, method: str, way: str) -> None:
    """Between forward and backward: an error, or the gradients of the forward."""
    run(check_change_in_place, name, method, way)


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
        torch.testing.assert_close(found, own_part("query", gradient), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("run", [2], indirect=True)
def test_a_process_whose_output_gets_no_gradient(run: Processes, method: str) -> None:
    """The process takes part all the same, because other processes have gradients of its keys."""
    run(under, method, check_output_without_gradient)


def check_autocast() -> None:
    torch.manual_seed(0)
    whole = torch.randn(3, 2, 6, 4)
    with torch.autocast("cpu", torch.bfloat16):
        expected = torch_attn.sdpa(*whole)
        output = torch_attn.distributed.sdpa(*(own_leaf(t) for t in whole), lengths=(6, 6))
    assert output.dtype == expected.dtype == torch.bfloat16


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("run", [2], indirect=True)
def test_autocast(run: Processes, method: str) -> None:
    run(under, method, check_autocast)
