"""Fixtures of the whole suite: seed, a run per instruction set and device, settings restored."""

from __future__ import annotations

import atexit
import collections
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


# Every test is in one of them.
TIERS = {
    "quick": "one case of each test, instruction set and dtype; all of those marked regression",
    "rest": "the other cases, but none of the slowest instruction set, which is default",
    "slow": "what is marked slow: it compiles variants, runs whole programs, or trains",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-tools",
        action="store_true",
        help="a test that is skipped for lack of a tool, other than a GPU and its, fails",
    )
    tiers = "; ".join(f"{name}: {what}" for name, what in TIERS.items())
    parser.addoption(
        "--tiers", default=",".join(TIERS), help=f"those to run, with commas between ({tiers})"
    )
    parser.addoption(
        "--share",
        default="1/1",
        metavar="K/N",
        help="of the tier slow only share K of N: runs with N successive K have all of it once",
    )


# What the machine of a run with --all-tools may lack.
MAY_LACK = "no GPU|no CUDA|two GPUs|compute-sanitizer|nvcc|CUDA toolkit|of GPU memory"


def _with_its_tools(config: pytest.Config, report: Any) -> Any:
    """Makes a failure of a test that is skipped, if --all-tools forbids its reason."""
    is_skipped = report.outcome == "skipped" and not hasattr(report, "wasxfail")
    if is_skipped and config.getoption("--all-tools"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not re.search(MAY_LACK, reason):
            report.outcome, report.longrepr = "failed", f"{reason} (--all-tools forbids this skip)"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Any:
    return _with_its_tools(item.config, (yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Any:
    return _with_its_tools(collector.config, (yield))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Says what a green run did not test; pytest itself tells of skipped tests."""
    isa = Path(__file__).parents[1] / "csrc/cpu/isa"
    lacks = {path.stem for path in isa.glob("*.cpp")} - set(CPU_CAPABILITIES)
    if lacks:
        names = ", ".join(sorted(lacks))
        terminalreporter.write_line(
            f"not run, because this processor lacks them: kernels of {names}"
        )
    if "not run" in config.stash.get(SIZES, "") or "share" in config.stash.get(SIZES, ""):
        terminalreporter.write_line(f"not all of the tests: {config.stash[SIZES]}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out repetitions of the same functions, and the tiers that were not asked for."""
    asked = config.getoption("--tiers").split(",")
    if unknown := set(asked) - set(TIERS):
        raise pytest.UsageError(f"--tiers {', '.join(unknown)}: there are {', '.join(TIERS)}")
    own = [item for item in items if _runs_functions_of_its_own(item)]
    quick = set(_one_case_of_each(own))
    # The slowest instruction set, whose kernels are compiled from the sources of the others.
    left_to_quick = {i for i in own if _capability(i) == "default" and len(CPU_CAPABILITIES) > 1}
    own = [i for i in own if i in quick or _slow(i) or i not in left_to_quick]
    tier = {i: "slow" if _slow(i) else "quick" if i in quick else "rest" for i in own}
    share, shares = _share(config.getoption("--share"))
    later = _other_shares([i for i in own if tier[i] == "slow"], share, shares)
    sizes = collections.Counter(tier.values())
    left = collections.Counter(tier[i] for i in own if i not in later)
    notes = dict.fromkeys(TIERS, " (not run)") | dict.fromkeys(asked, "")
    if shares > 1 and "slow" in asked:
        notes["slow"] = f" (run: share {share}/{shares}, {left['slow']:,})"
    said = [f"{name} {sizes[name]:,}{notes[name]}" for name in TIERS]
    config.stash[SIZES] = f"tiers: {', '.join(said)}"
    if hasattr(config, "workerinput"):
        Path(config.workerinput["sizes"]).write_text(config.stash[SIZES])
    chosen = [i for i in own if tier[i] in asked and i not in later]
    config.hook.pytest_deselected(items=[*set(items).difference(chosen)])
    items[:] = chosen


SIZES = pytest.StashKey[str]()


def pytest_report_collectionfinish(config: pytest.Config) -> str:
    return config.stash.get(SIZES, "")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tells workers of pytest-xdist, which collect and print nothing, which file to write to."""
    node.workerinput["sizes"] = os.path.join(_CACHE, "sizes")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any) -> None:
    sizes = Path(_CACHE, "sizes")  # not there where nothing was collected: a path that is none
    if SIZES not in node.config.stash and sizes.exists():
        node.config.stash[SIZES] = sizes.read_text()
        node.config.pluginmanager.get_plugin("terminalreporter").write_line(
            node.config.stash[SIZES]
        )


def _share(given: str) -> tuple[int, int]:
    """K and N of "K/N"; a K above N is counted modulo N, so that a number of commits will do."""
    if not (found := re.fullmatch(r"(\d+)/([1-9]\d*)", given)):
        raise pytest.UsageError(f"--share {given}: it must be K/N, such as 1/8")
    k, n = map(int, found.groups())
    return (k - 1) % n + 1, n


def _other_shares(slow: list[pytest.Item], share: int, shares: int) -> set[pytest.Item]:
    """What is not of this share. Tests of a file stay together, because they compile the same.

    Files take turns in the order of their names, because neighbours are of one kind and take as
    long. All shares have what is marked regression.
    """
    files = sorted({i.path.name for i in slow})
    others = {name for n, name in enumerate(files) if n % shares + 1 != share}
    return {i for i in slow if i.path.name in others and not i.get_closest_marker("regression")}


def _params(item: pytest.Item) -> dict[str, Any]:
    callspec = getattr(item, "callspec", None)
    return callspec.params if callspec else {}


def _capability(item: pytest.Item) -> str:
    params = _params(item)
    name: str = params.get("kernels", params.get("cpu_capability", params.get("device", "")))
    return name


def _runs_functions_of_its_own(item: pytest.Item) -> bool:
    """Whether the instruction set, not avx512, has the functions that the test's dtypes run.

    A test that is marked `cpu` has none on a GPU.
    """
    of_avx512 = {
        "avx512_bf16": {torch.float64, torch.float32, torch.float16},
        "amx": {torch.float64, torch.float32},
    }
    if _capability(item) == "cuda" and item.get_closest_marker("cpu"):
        return False
    return not _dtypes(item) & of_avx512.get(_capability(item), set())


def _dtypes(item: pytest.Item) -> set[torch.dtype]:
    given = (getattr(value, "dtype", value) for value in _params(item).values())
    return {value for value in given if isinstance(value, torch.dtype)}


def _slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def _one_case_of_each(items: list[pytest.Item]) -> list[pytest.Item]:
    """Takes the same case of each test, instruction set and dtype on every run.

    Which one is spread evenly.
    """
    cases: dict[tuple[Any, ...], list[pytest.Item]] = collections.defaultdict(list)
    for item in filter(lambda i: not _slow(i), items):
        function = getattr(item, "originalname", item.name)
        each = item.get_closest_marker("each")
        regression = item.name if item.get_closest_marker("regression") else ""
        regression += str([_params(item)[name] for name in each.args]) if each else ""
        kernels = f"{_capability(item)} {sorted(map(str, _dtypes(item)))}"
        cases[item.path, function, kernels, regression].append(item)
    return [
        group[zlib.crc32(f"{function} {kernels}".encode()) % len(group)]
        for (_, function, kernels, _), group in cases.items()
    ]


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
