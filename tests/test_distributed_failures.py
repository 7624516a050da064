"""Messages that are slow, processes that end or are late, and arguments that are wrong."""

from __future__ import annotations

import concurrent.futures
import datetime
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_attn
from _processes import Processes, processes_of
from _sequences import METHODS, under

pytestmark = pytest.mark.long

run, two, four = processes_of(2, 4), processes_of(2), processes_of(4)


# Delay.


class DelayedWork:
    """The work of a message that is under way for a while, whatever the processes do meanwhile."""

    def __init__(self, work: dist.Work, arrives: float) -> None:
        self.work, self.arrives = work, arrives

    def wait(self) -> None:
        time.sleep(max(0.0, self.arrives - time.monotonic()))
        self.work.wait()


class SlowSystem:
    """Until `patch` is undone, messages take `DELAY` seconds, and a part of a call `COMPUTING`."""

    DELAY, COMPUTING = 0.2, 0.25

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.computing = 0.0  # seconds, so far
        self.start = dist.batch_isend_irecv
        patch.setattr(dist, "batch_isend_irecv", self._delayed)
        for name in ("_sdpa_forward", "_sdpa_backward"):
            patch.setattr(torch.ops.attn, name, self._slow(getattr(torch.ops.attn, name)))

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
        with pytest.MonkeyPatch.context() as patch, torch_attn.distributed.method("ring"):
            system = SlowSystem(patch)
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


def test_blocks_travel_while_the_processes_compute(run: Processes) -> None:
    run(check_delay)


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
    """Attends with 4 rows of each process."""
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


def error_of(rank: int, world: int, other: int | None = None) -> str:
    """What an error says; in a ring it names the other process, that was waited for."""
    begin = rf"torch_attn\.distributed: process {rank} of {world} waited for "
    if other is None:
        return begin
    return rf"{begin}[^:]*\bprocess {other}\b[^:]*\bstep 1 of {world - 1}: "


TIMEOUT = 5
ENDED = 1
# Where the other processes are when one ends: before a call, in which they notice it, or did notice
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
    """The errors that the remaining processes find, by their ranks."""
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
        other = None if where in ("gather", "lengths are told") else ENDED
        assert re.match(error_of(rank, world, other), message), message


PATIENCE = 1.5  # seconds
# What the other processes wait for: keys, or the gradients of their own.
LATE = ["forward", "backward", "gradients"]


def pause_in_backward(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Between what is computed of the own block and what is computed of the next one."""
    operator, calls = torch.ops.attn._sdpa_backward, itertools.count()

    def compute(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds if next(calls) == 1 else 0)
        return operator(*args, **kwargs)

    patch.setattr(torch.ops.attn, "_sdpa_backward", compute)


def check_lateness(world: int) -> dict[str, Failure] | None:
    """Runs in the last `world` of the processes, of which the last one is late."""
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
    with pytest.MonkeyPatch.context() as patch:
        if is_late:
            pause_in_backward(patch, 2 * PATIENCE)
        found["gradients"] = failure(lambda: outputs["gradients"].sum().backward())
    time.sleep(PATIENCE + 0.5 if is_late else 0)  # and till the other processes are through
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
        assert is_late or seconds < PATIENCE + 1
        expected = error_of(rank, world, None if is_late else world - 1)
        assert re.match(expected, message), message


# What a call of one process would refuse.


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "columns of the mask": ({"attn_mask": torch.zeros(3, 7)}, "attn_mask has shape"),
    "a mask of one dimension": ({"attn_mask": torch.zeros(7)}, "attn_mask has shape"),
    "key_lengths": ({"key_lengths": 7}, "key_lengths is 7; it must be between 0 and 6"),
    "sinks": ({"sinks": torch.zeros(3)}, "sinks has shape"),
    "dtype": (
        {"key": torch.zeros(2, 3, 4, dtype=torch.bfloat16)},
        "key has dtype BFloat16 but query has Float",
    ),
    "rows of the mask": ({"attn_mask": torch.zeros(5, 6)}, "attn_mask has shape"),
}


def check_wrong(case: str) -> None:
    given, message = WRONG[case]
    arguments = dict(zip(("query", "key", "value"), torch.zeros(3, 2, 3, 4), strict=True)) | given
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
