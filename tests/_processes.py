"""Several processes of this machine that call functions together, in a group of gloo."""

from __future__ import annotations

import concurrent.futures
import datetime
import faulthandler
import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

# Once, before the processes are forked off: it takes seconds.
IMPORTED = ["pytest", "torch_attn", "torch.distributed.tensor", "torch.testing"]


def join(rank: int, world: int, rendezvous: str) -> None:
    faulthandler.enable()  # a process that ends abruptly says where
    torch.set_num_threads(1)
    dist.init_process_group(
        *("gloo", f"file://{rendezvous}", datetime.timedelta(seconds=30)),
        rank=rank,
        world_size=world,
    )


def seeded(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function with the same random numbers in every process.

    Else they would be the same only if the server that forks them has imported torch before.
    """
    torch.manual_seed(0)
    return function(*args)


class Processes:
    """After a call that failed they are others: those that ran may wait for each other for ever."""

    PATIENCE = 120.0  # seconds

    def __init__(self, world: int, folder: Path) -> None:
        self.world = world
        self.stores = (str(folder / f"store {n}") for n in itertools.count())
        self.start()

    def start(self) -> None:
        forks = multiprocessing.get_context("forkserver")
        forks.set_forkserver_preload(IMPORTED)
        store = next(self.stores)
        self.processes = [
            concurrent.futures.ProcessPoolExecutor(1, forks, join, (rank, self.world, store))
            for rank in range(self.world)
        ]

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls a function in every process at once and returns all results."""
        try:
            futures = [process.submit(seeded, function, *args) for process in self.processes]
            done, waiting = concurrent.futures.wait(
                futures, self.PATIENCE, concurrent.futures.FIRST_EXCEPTION
            )
            for future in done:  # first an error: other processes may wait for who had it
                future.result()
            assert not waiting, f"{len(waiting)} of {self.world} took over {self.PATIENCE} seconds"
        except BaseException:
            self.end()
            self.start()
            raise
        return [future.result() for future in futures]

    def end(self) -> None:
        """Ends them, also those that wait for one that had an error."""
        for pool in self.processes:
            for process in (pool._processes or {}).values():
                process.kill()
            pool.shutdown()


def processes_of(*worlds: int) -> Any:
    """A fixture: as many processes, for all tests of a file."""

    @pytest.fixture(scope="module", params=worlds)
    def run(
        request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Processes]:
        processes = Processes(request.param, tmp_path_factory.mktemp("gloo"))
        yield processes
        processes.end()

    return run
