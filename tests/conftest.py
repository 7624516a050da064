"""Fixtures of the whole suite: seed, a run per instruction set and device, settings restored."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator

import hypothesis
import pytest
import torch
from hypothesis.internal.conjecture import providers

import torch_attn
from helpers import (
    CPU_CAPABILITIES,
    DEVICES,
    GPU,
    KERNELS,
    cpu_capability_set_to,
    kernels_set_to,
)

pytest_plugins = ["_choice"]  # of tests

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
    """A test that leaves PyTorch's attention replaced fails, and not those after it."""
    assert torch.ops.attn._replace_sdpa(0) == 0
    assert not torch_attn.flex_is_replaced()
    yield
    left = torch.ops.attn._replace_sdpa(0), torch_attn.flex_is_replaced()
    torch_attn.restore_sdpa()
    torch_attn.restore_flex()
    assert left == (0, False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Ends a process whose GPU has met an illegal access: after it every test would fail.

    xdist then says which test it was and goes on in another process.
    """
    yield
    if GPU and torch.cuda.is_initialized() and hasattr(item.config, "workerinput"):
        try:
            torch.cuda.synchronize()
        except torch.AcceleratorError:
            os._exit(1)


@pytest.fixture(autouse=True)
def _restore_settings() -> Iterator[None]:
    """Restores settings of the process: a test is not to depend on which came before it."""
    threads, capability = torch.get_num_threads(), torch.ops.attn._cpu_capability()
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    if torch.ops.attn._cpu_capability() != capability:
        torch.ops.attn._set_cpu_capability(capability)
