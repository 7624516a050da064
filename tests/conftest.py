"""Fixtures of the whole suite: seed, a run per instruction set and device, settings restored."""

from __future__ import annotations

import atexit
import collections
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis.internal.conjecture import providers

from helpers import (
    CPU_CAPABILITIES,
    DEVICES,
    KERNELS,
    cpu_capability_set_to,
    kernels_set_to,
)
from torch_attn import replace

# Compiled graphs of an earlier build of the operators must not be used again.
_CACHE = tempfile.mkdtemp(prefix="attn-inductor-")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _CACHE
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)

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
# Hypothesis also draws constants of the modules that happen to be imported: examples would depend
# on which other tests run in the process.
if hasattr(providers, "_get_local_constants"):
    _none = providers._local_constants
    providers._get_local_constants = lambda: _none


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=CPU_CAPABILITIES)
def cpu_capability(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once with every instruction set this machine has."""
    with cpu_capability_set_to(request.param):
        yield request.param


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once with every instruction set and, where there is a GPU, on that.

    New tensors are then on "cuda" unless told otherwise.
    """
    # else the built-in, to which ours is compared, would round float32 to TF32
    assert torch.get_float32_matmul_precision() == "highest"
    with kernels_set_to(request.param):
        yield request.param


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once on the CPU, as fast as it can, and on the GPU where there is one."""
    if request.param == "cpu":
        yield request.param
        return
    with torch.device(request.param):
        yield request.param


@pytest.fixture
def switched_off() -> Iterator[None]:
    """A test that leaves the built-in replaced fails, and not those after it."""
    assert torch.ops.attn._replace_sdpa(0) == 0
    yield
    left = torch.ops.attn._replace_sdpa(0)
    for _ in range(left):
        replace._switch(-1)
    assert left == 0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help="one case of each test and instruction set, all cases of those marked regression, "
        "none of those marked slow",
    )
    parser.addoption("--rest", action="store_true", help="what --quick leaves out")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out repetitions of the same functions, and what --quick and --rest are for."""
    taken = [item for item in items if _runs_functions_of_its_own(item)]
    if config.getoption("--quick"):
        taken = _one_case_of_each(taken)
    elif config.getoption("--rest"):
        quick = set(_one_case_of_each(taken))
        taken = [item for item in taken if item not in quick]
    left = set(items) - set(taken)
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = taken


def _params(item: pytest.Item) -> dict[str, Any]:
    callspec = getattr(item, "callspec", None)
    return callspec.params if callspec else {}


def _capability(item: pytest.Item) -> str:
    params = _params(item)
    name: str = params.get("kernels", params.get("cpu_capability", params.get("device", "")))
    return name


def _runs_functions_of_its_own(item: pytest.Item) -> bool:
    """Of an instruction set only what it does itself: other dtypes run the functions of avx512."""
    of_avx512 = {
        "avx512_bf16": {torch.float64, torch.float32, torch.float16},
        "amx": {torch.float64},
    }
    dtypes = {
        v if isinstance(v, torch.dtype) else getattr(v, "dtype", None)
        for v in _params(item).values()
    }
    return not dtypes & of_avx512.get(_capability(item), set())


def _one_case_of_each(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of each test and instruction set the same case on every run; which one is spread evenly."""
    cases: dict[tuple[Any, ...], list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow"):
            continue
        function = getattr(item, "originalname", item.name)
        regression = item.name if item.get_closest_marker("regression") else ""
        cases[item.path, function, _capability(item), regression].append(item)
    taken = {
        group[zlib.crc32(f"{function} {capability}".encode()) % len(group)]
        for (_, function, capability, _), group in cases.items()
    }
    return [item for item in items if item in taken]


@pytest.fixture(autouse=True)
def _restore_settings() -> Iterator[None]:
    """Of the process; the next test is not to depend on which came before it."""
    threads, capability = torch.get_num_threads(), torch.ops.attn._cpu_capability()
    yield
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    if torch.ops.attn._cpu_capability() != capability:
        torch.ops.attn._set_cpu_capability(capability)
