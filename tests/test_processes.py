"""The processes that tests share: what goes wrong in one test is that test's failure alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from _processes import Processes, processes_of

run = processes_of(2)


def fail() -> None:
    raise AssertionError("on purpose")


def in_one_process(happens: Callable[[], None]) -> None:
    """While the other one waits for it in a collective."""
    if dist.get_rank() == 0:
        happens()
    dist.barrier()


def end() -> None:
    os._exit(1)


def hang() -> None:
    time.sleep(60)


def total() -> float:
    ranks = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(ranks)
    return ranks.item()


@pytest.mark.long
@pytest.mark.regression
@pytest.mark.parametrize(
    ("happens", "error"),
    [
        (fail, "on purpose"),
        (end, "terminated abruptly|by peer"),
        (hang, "2 of 2 took over 0.2 seconds"),
    ],
)
def test_the_next_call_is_right(
    run: Processes, happens: Callable[[], None], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if happens is hang:
        monkeypatch.setattr(run, "PATIENCE", 0.2)
    with pytest.raises(Exception, match=error):
        run(in_one_process, happens)
    monkeypatch.undo()  # new processes take seconds to start
    assert run(total) == [3, 3]
