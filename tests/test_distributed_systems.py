"""Attention over several processes as a part of a system: slow messages, processes that fail, what
is sent, and what PyTorch builds on a call: checkpoints, FSDP, torch.compile, gradcheck."""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import functools
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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
from _processes import Processes
from _sequences import own_part
from test_distributed_ring import Counted
from torch_attn.distributed._layout import Call, Layout
from torch_attn.distributed._methods import sent

METHODS = ["ring", "gather", "all_to_all"]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    processes = Processes(2, tmp_path_factory.mktemp("gloo"))
    yield processes
    processes.end()


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    processes = Processes(4, tmp_path_factory.mktemp("gloo"))
    yield processes
    processes.end()


def own(whole: Tensor) -> Tensor:
    """The rows of this process, a leaf."""
    return own_part("query", whole).detach().clone().requires_grad_()


# Delay.


class DelayedWork:
    """Of a message that is under way for a while, whatever the processes do meanwhile."""

    def __init__(self, work: dist.Work, arrives: float) -> None:
        self.work, self.arrives = work, arrives

    def wait(self) -> None:
        time.sleep(max(0.0, self.arrives - time.monotonic()))
        self.work.wait()


class SlowSystem:
    """While entered, messages take `DELAY` seconds, and a part of a call `COMPUTING`."""

    DELAY, COMPUTING = 0.2, 0.25
    OPERATORS = ("_sdpa_forward", "_sdpa_backward")

    def __enter__(self) -> SlowSystem:
        self.computing = 0.0  # seconds, so far
        self.start = dist.batch_isend_irecv
        self.operators = [getattr(torch.ops.attn, name) for name in self.OPERATORS]
        dist.batch_isend_irecv = self._delayed
        for name, operator in zip(self.OPERATORS, self.operators, strict=True):
            setattr(torch.ops.attn, name, self._slow(operator))
        return self

    def __exit__(self, *_: object) -> None:
        dist.batch_isend_irecv = self.start
        for name, operator in zip(self.OPERATORS, self.operators, strict=True):
            setattr(torch.ops.attn, name, operator)

    def _delayed(self, ops: list[dist.P2POp]) -> list[Any]:
        arrives = time.monotonic() + self.DELAY
        return [DelayedWork(work, arrives) for work in self.start(ops)]

    def _slow(self, operator: Any) -> Callable[..., Any]:
        def compute(*args: Any, **kwargs: Any) -> Any:
            begin = time.monotonic()
            time.sleep(self.COMPUTING)
            found = operator(*args, **kwargs)
            self.computing += time.monotonic() - begin
            return found

        return compute

    def waited(self, function: Callable[[], Any]) -> tuple[float, Any]:
        """How many delays a call took beside computing, on the slowest process; and its result."""
        dist.barrier()
        begin, before = time.monotonic(), self.computing
        found = function()
        took = torch.tensor(time.monotonic() - begin - (self.computing - before))
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return float(took) / self.DELAY, found


def check_delay() -> None:
    """Computing hides all messages but the last: the gradients of the last step."""
    world = dist.get_world_size()
    leaves = [t.requires_grad_() for t in torch.randn(3, 1, 2, 4, 8)]
    for _ in range(3):  # on a machine with other work
        with SlowSystem() as system, torch_attn.distributed.method("ring"):
            forward, output = system.waited(
                lambda: torch_attn.distributed.sdpa(*leaves, lengths=(4 * world, 4 * world))
            )
            backward, _ = system.waited(lambda: output.sum().backward())  # noqa: B023
            parts = 2 * world * system.COMPUTING
            assert parts <= system.computing < parts + 2 * world * system.DELAY
        # In the other order, computing and then sending, it is a delay in each of world - 1 steps.
        if forward < 0.5 and 1 <= backward < 1.5:
            return
    raise AssertionError(f"waited for {forward} and {backward} delays")


@pytest.mark.parametrize("world", ["two", "four"])
def test_blocks_travel_while_the_processes_compute(
    request: pytest.FixtureRequest, world: str
) -> None:
    request.getfixturevalue(world)(check_delay)


# Processes that end, or are late.


class Failure(NamedTuple):
    message: str
    seconds: float


def failure(function: Callable[[], Any]) -> Failure:
    begin = time.monotonic()
    try:
        function()
    except RuntimeError as error:
        return Failure(str(error), time.monotonic() - begin)
    raise AssertionError("no error")


def attend(group: dist.ProcessGroup, *, told: bool = True, whole: Tensor | None = None) -> Tensor:
    """Of 4 rows of each process."""
    rank, world = group.rank(), group.size()
    whole = torch.randn(3, 1, 2, 4 * world, 8) if whole is None else whole
    blocks = [t.chunk(world, -2)[rank].clone().requires_grad_() for t in whole]
    lengths = (4 * world, 4 * world) if told else None
    return torch_attn.distributed.sdpa(*blocks, group=group, lengths=lengths)


def is_right(group: dist.ProcessGroup) -> bool:
    """Whether the processes of a group compute what one would."""
    torch.manual_seed(group.size())
    whole = torch.randn(3, 1, 2, 4 * group.size(), 8)
    expected = torch_attn.sdpa(*whole).chunk(group.size(), -2)[group.rank()]
    torch.testing.assert_close(attend(group, whole=whole), expected)
    return True


def named(rank: int, world: int, other: int) -> str:
    """What an error says in a ring, of the process that was waited for."""
    return (
        rf"torch_attn\.distributed: process {rank} of {world} waited for [^:]*"
        rf"\bprocess {other}\b[^:]*\bstep 1 of {world - 1}: "
    )


TIMEOUT = 5
ENDED = 1
# Where the others are when a process ends: before a call, in which they notice it, or have noticed
# it a second ago, and between forward and backward.
WHERE = ["at once", "a second ago", "backward", "gather", "lengths are told"]


def check_an_end(rendezvous: str) -> dict[str, Failure]:
    rank, world = dist.get_rank(), dist.get_world_size()
    timeout = datetime.timedelta(seconds=TIMEOUT)
    groups = {where: dist.new_group(timeout=timeout) for where in WHERE}
    with torch_attn.distributed.method("ring"):
        output = attend(groups["backward"])
        dist.barrier()
        if rank == ENDED:
            os._exit(1)
        found = {"at once": failure(lambda: attend(groups["at once"]))}
        time.sleep(1)
        found["a second ago"] = failure(lambda: attend(groups["a second ago"]))
        found["backward"] = failure(lambda: output.sum().backward())
        told = groups["lengths are told"]
        found["lengths are told"] = failure(lambda: attend(told, told=False))
    with torch_attn.distributed.method("gather"):
        found["gather"] = failure(lambda: attend(groups["gather"]))
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", f"file://{rendezvous}", rank=rank - (rank > ENDED), world_size=world - 1
    )
    assert dist.group.WORLD is not None
    assert is_right(dist.group.WORLD)
    return found


@pytest.fixture(scope="module", params=[2, 3])
def after_an_end(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[int, dict[str, Failure]]]:
    """What those that remain find, by their ranks."""
    folder = tmp_path_factory.mktemp("gloo")
    processes = Processes(request.param, folder)
    calls = [p.submit(check_an_end, str(folder / "again")) for p in processes.processes]
    with pytest.raises(concurrent.futures.process.BrokenProcessPool):
        calls[ENDED].result(timeout=60)
    yield {rank: c.result(timeout=60) for rank, c in enumerate(calls) if rank != ENDED}
    processes.end()


@pytest.mark.parametrize("where", WHERE)
def test_a_process_that_ends(after_an_end: dict[int, dict[str, Failure]], where: str) -> None:
    """The others raise at once, say who waited for whom, and can go on without it."""
    world = len(after_an_end) + 1
    for rank, found in after_an_end.items():
        message, seconds = found[where]
        assert seconds < TIMEOUT
        expected = rf"torch_attn\.distributed: process {rank} of {world} waited for "
        if where not in ("gather", "lengths are told"):
            expected = named(rank, world, ENDED)
        assert re.match(expected, message), message


PATIENCE = 1.5  # seconds
# What the others wait for: keys, or the gradients of their own.
LATE = ["forward", "backward", "gradients"]


@contextlib.contextmanager
def pause_in_backward(seconds: float) -> Iterator[None]:
    """Between what is computed of the own block and what is computed of the next one."""
    operator, calls = torch.ops.attn._sdpa_backward, []

    def compute(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        time.sleep(seconds if len(calls) == 2 else 0)
        return operator(*args, **kwargs)

    torch.ops.attn._sdpa_backward = compute
    yield
    torch.ops.attn._sdpa_backward = operator


def check_lateness(world: int) -> dict[str, Failure] | None:
    """In the last `world` of the processes, of which the last one is late."""
    ranks = list(range(dist.get_world_size()))[-world:]
    timeout = datetime.timedelta(seconds=PATIENCE)
    groups = {what: dist.new_group(ranks, timeout) for what in LATE}
    found = None
    if dist.get_rank() in ranks:
        with torch_attn.distributed.method("ring"):
            found = too_late(groups)
        for group in groups.values():
            dist.destroy_process_group(group)
    group = dist.new_group(ranks)
    assert found is None or is_right(group)
    return found


def too_late(groups: dict[str, dist.ProcessGroup]) -> dict[str, Failure]:
    is_late = dist.get_rank() == dist.get_world_size() - 1
    outputs = {what: attend(groups[what]) for what in ("backward", "gradients")}
    dist.barrier(groups["gradients"])
    found = {}
    with pause_in_backward(2 * PATIENCE) if is_late else contextlib.nullcontext():
        found["gradients"] = failure(lambda: outputs["gradients"].sum().backward())
    time.sleep(PATIENCE + 0.5 if is_late else 0)  # and till the others are through
    found["forward"] = failure(lambda: attend(groups["forward"]))
    found["backward"] = failure(lambda: outputs["backward"].sum().backward())
    return found


@pytest.fixture(scope="module", params=[2, 3])
def after_lateness(
    request: pytest.FixtureRequest, four: Processes
) -> tuple[int, list[dict[str, Failure]]]:
    return request.param, four(check_lateness, request.param)[-request.param :]


@pytest.mark.parametrize("what", LATE)
def test_a_process_that_is_late(
    after_lateness: tuple[int, list[dict[str, Failure]]], what: str
) -> None:
    """All raise when the time is up; the late one too. A new group works."""
    world, by_rank = after_lateness
    for rank, found in enumerate(by_rank):
        message, seconds = found[what]
        is_late = rank == world - 1
        if not is_late:
            assert seconds < PATIENCE + 1
        expected = rf"torch_attn\.distributed: process {rank} of {world} waited for "
        assert re.match(expected if is_late else named(rank, world, world - 1), message), message


# What is sent.


def check_bytes(method: str, dtype: torch.dtype, causal: bool) -> None:
    world, group = dist.get_world_size(), dist.group.WORLD
    assert group is not None
    L, S, heads, key_heads, E, Ev = 8 * world, 8 * world, 16, 4, 8, 6
    shapes = (heads, L, E), (key_heads, S, E), (key_heads, S, Ev)
    query, key, value = (
        own(torch.randn(2, *shape, dtype=torch.float64).to(dtype)) for shape in shapes
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
    # A ring sends keys and values once more, and their gradients back; the others what the forward
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
def test_bytes(
    request: pytest.FixtureRequest, method: str, dtype: torch.dtype, causal: bool
) -> None:
    for world in ("two", "four"):
        request.getfixturevalue(world)(check_bytes, method, dtype, causal)


# A model's branches, and checkpoints.


class Branches(nn.Module):
    """Two attentions of one x, ``[B, L, 8]``, which are added."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.projections = nn.ModuleList(
            nn.Linear(8, 24, bias=False, dtype=torch.float64) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for causal, projection in enumerate(self.projections):
            query, key, value = projection(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            output = self.attend(query, key, value, is_causal=bool(causal))
            outputs.append(output.transpose(1, 2).flatten(-2))
        return outputs[0] + outputs[1]


def check_branches() -> None:
    group = dist.group.WORLD
    for repeat in range(20):
        torch.manual_seed(repeat)
        whole, upstream = torch.randn(2, 2, 7, 8, dtype=torch.float64)
        results = []
        for alone in (True, False):
            torch.manual_seed(repeat)
            function = torch_attn.sdpa if alone else torch_attn.distributed.sdpa
            model = Branches(function)
            x = whole.clone().requires_grad_() if alone else own(whole)
            output = model(x)
            output.backward(upstream if alone else own_part("output", upstream))
            of_weights = [w.grad for w in model.parameters()]
            if not alone:
                for gradient in of_weights:
                    dist.all_reduce(gradient, group=group)
            found = [output.detach(), x.grad]
            if alone:
                found = [own_part("output", t) for t in found]
            results.append([*found, *of_weights])
        torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("world", ["two", "four"])
def test_two_attentions_in_branches_of_a_model(request: pytest.FixtureRequest, world: str) -> None:
    request.getfixturevalue(world)(under, "ring", check_branches)


def under(method: str, function: Callable[..., Any], *args: Any) -> Any:
    with torch_attn.distributed.method(method):
        return function(*args)


def check_checkpoint() -> None:
    """The same bits, where as much is recomputed as derivatives need, and where all of it is."""
    torch.manual_seed(0)
    x = own(torch.randn(2, 9, 8, dtype=torch.float64))
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


class Attention(nn.Module):
    """Of ``[B, L, 8]``."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, dtype=torch.float64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        output: Tensor = self.o(self.attend(*heads, is_causal=True).transpose(1, 2).flatten(-2))
        return output


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
        torch.testing.assert_close(
            actual.full_tensor(), expected, rtol=1e-10, atol=1e-11, msg=f"{name}, {sharding}"
        )


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
    whole = torch.randn(3, 1, 4, 8, 8, dtype=torch.float64)
    upstream = torch.randn(1, 4, 8, 8, dtype=torch.float64)
    leaves = [t.clone().requires_grad_() for t in whole]
    expected = torch_attn.sdpa(*leaves, is_causal=True) * 2
    gradients = torch.autograd.grad(expected, leaves, upstream)

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch_attn.sdpa(query, key, value, is_causal=True) * 2

    compiled = torch.compile(function, backend="aot_eager", fullgraph=fullgraph)
    blocks = [distribute_tensor(t, line(), [Shard(2)]).requires_grad_() for t in whole]
    with torch_attn.distributed.method(method) if method else contextlib.nullcontext():
        if method == "ring":
            message, _ = failure(lambda: compiled(*blocks))
            assert re.search(r"torch_attn\.distributed(?s:.*)\bring\b", message), message
            return
        output = compiled(*blocks)
        found = torch.autograd.grad(output, blocks, distribute_tensor(upstream, line(), [Shard(2)]))
    for actual, wanted in zip([output, *found], [expected, *gradients], strict=True):
        assert isinstance(actual, DTensor)
        assert actual.placements == (Shard(2),)
        torch.testing.assert_close(
            actual.detach().full_tensor(), wanted.detach(), rtol=1e-10, atol=1e-11
        )


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("method", [*METHODS, ""])
def test_compiled_dtensors(two: Processes, method: str, fullgraph: bool) -> None:
    """In one graph without a ring; of one, an error that says it."""
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

    blocks = [own(t) for t in whole]
    output = torch.compile(function, backend="aot_eager")(*blocks)
    found = torch.autograd.grad(output.sum(), blocks)
    for actual, wanted in zip([output, *found], [expected, *gradients], strict=True):
        torch.testing.assert_close(actual, own_part("query", wanted), rtol=1e-10, atol=1e-11)
    torch._dynamo.reset()
    in_one_graph = torch.compile(function, backend="aot_eager", fullgraph=True)
    message, _ = failure(lambda: in_one_graph(*blocks))
    assert "torch_attn.distributed.sdpa: it cannot be part of a compiled function" in message


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_compiled_blocks(two: Processes, method: str, told: bool) -> None:
    """A graph ends before the call, and the next begins behind it."""
    two(under, method, check_compiled_blocks, told)


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
    """A tensor that all have, of `length` rows, from those of each."""

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
def test_gradcheck(two: Processes, method: str) -> None:
    """In forward and reverse mode; every process moves the same numbers in the same order."""
    two(under, method, check_derivatives, False)


@pytest.mark.parametrize("method", ["gather", "all_to_all"])
def test_gradgradcheck(two: Processes, method: str) -> None:
    two(under, method, check_derivatives, True)


# What one process cannot see by itself, and what a call of one process would refuse.


def check_mask_of_few_rows(L: int) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, dist.get_world_size(), L, 4, dtype=torch.float64)
    mask = torch.randn(L, L, dtype=torch.float64, requires_grad=True)
    expected = torch_attn.sdpa(query, key, value, mask)
    (gradient,) = torch.autograd.grad(expected.square().sum(), mask)
    blocks = [own(t) for t in (query, key, value, mask)]
    group = dist.new_group(timeout=datetime.timedelta(seconds=5))  # an error must not reach others
    output = torch_attn.distributed.sdpa(*blocks, group=group, lengths=(L, L))
    torch.testing.assert_close(output, own_part("output", expected), rtol=1e-10, atol=1e-11)
    (found,) = torch.autograd.grad(output.square().sum(), blocks[3])
    torch.testing.assert_close(found, own_part("output", gradient), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(("world", "L"), [("two", 2), ("two", 3), ("four", 6)])
@pytest.mark.parametrize("method", METHODS)
def test_mask_where_a_process_has_one_query_or_none(
    request: pytest.FixtureRequest, method: str, world: str, L: int
) -> None:
    """One row is that process's own, not the same for all queries; all exchange rows, or none."""
    request.getfixturevalue(world)(under, method, check_mask_of_few_rows, L)


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
    blocks = [own(t) for t in whole]
    group = dist.new_group(timeout=datetime.timedelta(seconds=5))
    output = torch_attn.distributed.sdpa(*blocks, group=group, lengths=(6, 6))
    output = Swallowed.apply(output) if dist.get_rank() == 0 else output
    output.square().sum().backward()
    for block, gradient in zip(blocks, expected, strict=True):
        found = torch.zeros_like(block) if block.grad is None else block.grad
        torch.testing.assert_close(found, own_part("query", gradient), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("method", METHODS)
def test_a_process_whose_output_gets_no_gradient(two: Processes, method: str) -> None:
    """It takes part all the same: the others have gradients of its keys."""
    two(under, method, check_output_without_gradient)


def check_autocast() -> None:
    torch.manual_seed(0)
    whole = torch.randn(3, 2, 6, 4)
    with torch.autocast("cpu", torch.bfloat16):
        expected = torch_attn.sdpa(*whole)
        output = torch_attn.distributed.sdpa(*(own(t) for t in whole), lengths=(6, 6))
    assert output.dtype == expected.dtype == torch.bfloat16


@pytest.mark.parametrize("method", METHODS)
def test_autocast(two: Processes, method: str) -> None:
    two(under, method, check_autocast)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "columns of the mask": ({"attn_mask": (3, 7)}, "attn_mask has shape"),
    "dimensions of the mask": ({"attn_mask": (6,)}, "attn_mask has shape"),
    "key_lengths": ({"key_lengths": 7}, "key_lengths is 7; it must be between 0 and 6"),
    "sinks": ({"sinks": (3,)}, "sinks has shape"),
    "dtype": ({"key": torch.bfloat16}, "key has dtype BFloat16 but query has Float"),
    "rows of the mask": ({"attn_mask": (5, 6)}, "attn_mask has shape"),
}


def check_wrong(case: str) -> None:
    given, message = WRONG[case]
    arguments: dict[str, Any] = dict(
        zip(("query", "key", "value"), torch.randn(3, 2, 3, 4), strict=True)
    )
    for name, value in given.items():
        if isinstance(value, torch.dtype):
            value = arguments[name].to(value)
        arguments[name] = torch.randn(value) if isinstance(value, tuple) else value
    group = dist.new_group(timeout=datetime.timedelta(seconds=5))
    found, _ = failure(
        lambda: torch_attn.distributed.sdpa(**arguments, group=group, lengths=(6, 6))
    )
    assert message in found, found


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("method", METHODS)
def test_what_is_wrong_is_an_error(two: Processes, method: str, case: str) -> None:
    """As of :func:`torch_attn.sdpa`."""
    two(under, method, check_wrong, case)
