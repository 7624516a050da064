"""Fixtures of the whole suite: one seed, one run per instruction set, restored thread counts."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import torch

from helpers import CPU_CAPABILITIES, cpu_capability_set_to

# The same examples on every machine and every run: a failure here is a failure everywhere.
hypothesis.settings.register_profile(
    "attn",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=100,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("attn")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=CPU_CAPABILITIES)
def cpu_capability(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once with every instruction set this machine has."""
    with cpu_capability_set_to(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
