"""Training over several processes: branches of a model, checkpoints, FSDP, torch.compile."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import torch_attn
from _distributed import Attention, assert_same
from _processes import Processes, processes_of
from _sequences import METHODS, Counted, own_leaf, own_part, under

pytestmark = pytest.mark.long

run, two, four = processes_of(2, 4), processes_of(2), processes_of(4)


# A model's branches, and checkpoints.


class Branches(nn.Module):
    """Two attentions of one x, which are added: the last tensors that autograd saves are theirs."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Attention(attend, is_causal=causal) for causal in (False, True))
        for part in self.parts:
            part.o = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.parts[0](x) + self.parts[1](x)
        return result


def check_branches() -> None:
    own = functools.partial(own_part, "output")
    calls = (torch_attn.sdpa, torch.clone), (torch_attn.distributed.sdpa, own)
    for repeat in range(20):
        torch.manual_seed(repeat)
        whole, upstream = torch.randn(2, 2, 7, 8, dtype=torch.float64)
        results = []
        for attend, cut in calls:
            torch.manual_seed(repeat)
            model, x = Branches(attend), cut(whole).clone().requires_grad_()
            output = model(x)
            output.backward(cut(upstream))
            results.append(([output.detach(), x.grad], [w.grad for w in model.parameters()]))
        (of_rows, of_weights), (own_rows, shares) = results
        for share in shares:
            dist.all_reduce(share)
        assert_same(own_rows + shares, [*map(own, of_rows), *of_weights])


def test_two_attentions_in_branches_of_a_model(run: Processes) -> None:
    run(under, "ring", check_branches)


def check_checkpoint() -> None:
    """The same bits, where as much is recomputed as derivatives need, and where all of it is."""
    torch.manual_seed(0)
    x = own_leaf(torch.randn(2, 9, 8, dtype=torch.float64))
    model = Branches(torch_attn.distributed.sdpa)
    results, counts = [], []
    for kind in ("kept", "as needed", "recomputed"):
        with Counted() as forward, set_checkpoint_early_stop(kind == "as needed"):
            output = model(x) if kind == "kept" else checkpoint(model, x, use_reentrant=False)
        with Counted() as backward:
            found = torch.autograd.grad(output.square().sum(), [x, *model.parameters()])
        results.append([output.detach(), *found])
        counts.append([sum(size for _, size in c.sent) for c in (forward, backward)])
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)
    (first, back), (_, as_needed), of_all = counts
    assert back < as_needed <= first + back
    assert of_all == [first, first + back]  # it is sent again, too


@pytest.mark.parametrize("method", METHODS)
def test_checkpoints(two: Processes, method: str) -> None:
    two(under, method, check_checkpoint)


# Beside FSDP.


def check_fsdp(sharding: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sequence", "data"))
    data, sequence = mesh["data"], mesh["sequence"].get_group()
    torch.manual_seed(0)
    batches = torch.randn(3, 2, 4, 7, 8, dtype=torch.float64)  # of steps, inputs and targets
    of_one = Attention(torch_attn.sdpa)

    def attend(*blocks: Tensor, **options: Any) -> Tensor:
        return torch_attn.distributed.sdpa(*blocks, group=sequence, lengths=(7, 7), **options)

    of_all = Attention(attend)
    of_all.load_state_dict(of_one.state_dict())
    # FSDP takes the mean over the processes of its mesh. Of data alone, the gradients, which are
    # shares of the sequence's, are added here.
    fully_shard(of_all, mesh=mesh if sharding == "hybrid" else data)
    averaged = mesh.size() if sharding == "hybrid" else data.size()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (of_one, of_all)]
    before = [p.detach().clone() for p in of_one.parameters()]
    for x, target in batches:
        (F.mse_loss(of_one(x), target)).backward()
        own_x, own_target = (
            t.chunk(2, 0)[data.get_local_rank()].chunk(2, 1)[mesh.get_local_rank("sequence")]
            for t in (x, target)
        )
        loss = F.mse_loss(of_all(own_x), own_target, reduction="sum") / target.numel()
        (loss * averaged).backward()
        if sharding == "data":
            for parameter in of_all.parameters():
                assert isinstance(parameter.grad, DTensor)
                dist.all_reduce(parameter.grad.to_local(), group=sequence)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, expected), actual, first in zip(
        of_one.named_parameters(), of_all.parameters(), before, strict=True
    ):
        assert isinstance(actual, DTensor)
        assert name == "k.bias" or not torch.allclose(expected, first, rtol=1e-3)  # it has learned
        assert_same(actual.full_tensor(), expected, f"{name}, {sharding}")


@pytest.mark.parametrize("sharding", ["data", "hybrid"])
@pytest.mark.parametrize("method", METHODS)
def test_training_with_fsdp(four: Processes, method: str, sharding: str) -> None:
    """The same parameters as of one process that has the whole batch and the whole sequence."""
    four(under, method, check_fsdp, sharding)


# torch.compile.


@functools.cache
def line() -> Any:
    """A mesh of all processes. One: in torch 2.13 what is compiled with a second fails, of any
    operator ("Node tangents_2 was invalid, but is output")."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def check_compiled_dtensors(method: str, fullgraph: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    *whole, upstream = torch.randn(4, 1, 4, 8, 8, dtype=torch.float64)
    leaves = [t.clone().requires_grad_() for t in whole]
    expected = torch_attn.sdpa(*leaves, is_causal=True) * 2
    gradients = torch.autograd.grad(expected, leaves, upstream)

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch_attn.sdpa(query, key, value, is_causal=True) * 2

    compiled = torch.compile(function, backend="aot_eager", fullgraph=fullgraph)
    blocks = [distribute_tensor(t, line(), [Shard(2)]).requires_grad_() for t in whole]
    with torch_attn.distributed.method(method) if method else contextlib.nullcontext():
        if method == "ring":
            with pytest.raises(RuntimeError, match=r"torch_attn\.distributed(?s:.*)\bring\b"):
                compiled(*blocks)
            return
        output = compiled(*blocks)
        found = torch.autograd.grad(output, blocks, distribute_tensor(upstream, line(), [Shard(2)]))
    for actual, wanted in zip([output, *found], [expected, *gradients], strict=True):
        assert isinstance(actual, DTensor)
        assert actual.placements == (Shard(2),)
        assert_same(actual.detach().full_tensor(), wanted.detach())


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("method", [*METHODS, ""])
def test_compiled_dtensors(two: Processes, method: str, fullgraph: bool) -> None:
    """One graph without a ring; a ring in one graph raises an error that says it."""
    two(check_compiled_dtensors, method, fullgraph)


def check_compiled_blocks(told: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    whole = torch.randn(3, 1, 2, 8, 8, dtype=torch.float64)
    leaves = [t.clone().requires_grad_() for t in whole]
    expected = torch_attn.sdpa(*leaves, is_causal=True) * 2
    gradients = torch.autograd.grad(expected.sum(), leaves)
    lengths = (8, 8) if told else None

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch_attn.distributed.sdpa(query, key, value, is_causal=True, lengths=lengths) * 2

    blocks = [own_leaf(t) for t in whole]
    output = torch.compile(function, backend="aot_eager")(*blocks)
    found = torch.autograd.grad(output.sum(), blocks)
    for actual, wanted in zip([output, *found], [expected, *gradients], strict=True):
        assert_same(actual, own_part("query", wanted))
    torch._dynamo.reset()
    in_one_graph = torch.compile(function, backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="sdpa: it cannot be part of a compiled function"):
        in_one_graph(*blocks)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_compiled_blocks(two: Processes, method: str, told: bool) -> None:
    """A graph ends before the call, and the next begins behind it."""
    two(under, method, check_compiled_blocks, told)
