"""Several processes of this machine that call functions together, in a group of gloo."""

from __future__ import annotations

import concurrent.futures
import datetime
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
    torch.set_num_threads(1)
    dist.init_process_group(
        *("gloo", f"file://{rendezvous}", datetime.timedelta(seconds=30)),
        rank=rank,
        world_size=world,
    )


class Processes:
    def __init__(self, world: int, folder: Path) -> None:
        forks = multiprocessing.get_context("forkserver")
        forks.set_forkserver_preload(IMPORTED)
        self.processes = [
            concurrent.futures.ProcessPoolExecutor(
                1, forks, join, (rank, world, str(folder / "store"))
            )
            for rank in range(world)
        ]

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls a function in every process at once and returns all results."""
        futures = [process.submit(function, *args) for process in self.processes]
        done, _ = concurrent.futures.wait(
            futures, timeout=120, return_when=concurrent.futures.FIRST_EXCEPTION
        )
        for future in done:  # first an error: the others may wait for who had it
            future.result()
        return [future.result(timeout=120) for future in futures]

    def end(self) -> None:
        """Ends them, also those that wait for one that had an error."""
        for pool in self.processes:
            for process in (pool._processes or {}).values():
                process.terminate()
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
