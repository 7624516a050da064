"""Which tests run: tiers, shares, samples, what changed; what a run says of those that did not."""

from __future__ import annotations

import collections
import itertools
import re
import subprocess
import tempfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import CPU_CAPABILITIES

ROOT = Path(__file__).parents[1]

SIZES = pytest.StashKey[str]()  # how many tests each tier has, and which run
# A file in which workers of pytest-xdist, which collect and print nothing, say that.
_SAID = tempfile.NamedTemporaryFile(prefix="attn-sizes-")  # noqa: SIM115, as long as the process

# Every test is in one of them.
TIERS = {
    "quick": "one case of each test, instruction set and dtype; all of those marked regression",
    "rest": "other cases, until every two values of parameters meet, and what is marked long; none "
    "of the slowest instruction set, which is default",
    "product": "the cases that are left of the product of three and more parameters",
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
    parser.addoption(
        "--passed",
        metavar="COMMIT",
        help="of the tier slow only what may fail now if it passed at this commit: tests of whose "
        "inputs, which the marker slow names, a file has changed since",
    )
    parser.addoption(
        "--kernels",
        action="store_true",
        help="only tests that run once per instruction set: those with a fixture that chooses one",
    )
    parser.addoption(
        "--sample",
        default="1/1",
        metavar="K/N",
        help="one test in N of those chosen: runs with N successive K have each of them once",
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
    isa = ROOT / "csrc/cpu/isa"
    lacks = {path.stem for path in isa.glob("*.cpp")} - set(CPU_CAPABILITIES)
    if lacks:
        names = ", ".join(sorted(lacks))
        terminalreporter.write_line(
            f"not run, because this processor lacks them: kernels of {names}"
        )
    if "run" in config.stash.get(SIZES, ""):
        terminalreporter.write_line(f"not all of the tests: {config.stash[SIZES]}")


# The fixtures of conftest.py that run a test once per instruction set.
FIXTURES = ("kernels", "cpu_capability", "device")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --kernels reads no file without such tests: it may import what is not installed."""
    if config.getoption("--kernels") and collection_path.match("test_*.py"):
        text = collection_path.read_text()
        names = "|".join(FIXTURES)
        if not re.search(rf'\b({names}): str|usefixtures\(.*"({names})"', text):
            return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out repetitions of the same functions, and the tiers that were not asked for."""
    asked = config.getoption("--tiers").split(",")
    if unknown := set(asked) - set(TIERS):
        raise pytest.UsageError(f"--tiers {', '.join(unknown)}: there are {', '.join(TIERS)}")
    own = [item for item in items if _runs_functions_of_its_own(item)]
    first = set(_one_case_of_each(own))
    # The slowest instruction set, whose kernels are compiled from the sources of the others.
    only_first = {i for i in own if _capability(i) == "default" and len(CPU_CAPABILITIES) > 1}
    own = [i for i in own if i in first or _slow(i) or i not in only_first]
    tier = dict.fromkeys(own, "product") | dict.fromkeys(_pairs(own, first), "rest")
    tier |= {i: "quick" for i in first if not i.get_closest_marker("long")}
    tier |= {i: "slow" for i in own if _slow(i)}
    slow = [i for i in own if tier[i] == "slow"]
    share, shares = _part(config, "--share")
    left_out = _other_shares(slow, share, shares)
    passed = config.getoption("--passed")
    if passed:
        left_out |= _unchanged(slow, _changed_since(passed))
    sizes = collections.Counter(tier.values())
    notes = dict.fromkeys(TIERS, " (not run)") | dict.fromkeys(asked, "")
    if left_out and "slow" in asked:
        what = [f"share {share}/{shares}"] if shares > 1 else []
        what += [f"what changed since {passed}"] if passed else []
        notes["slow"] = f" (run: {', '.join(what)}, {sizes['slow'] - len(left_out):,})"
    said = [f"{name} {sizes[name]:,}{notes[name]}" for name in TIERS]
    config.stash[SIZES] = f"tiers: {', '.join(said)}"
    if hasattr(config, "workerinput"):
        Path(config.workerinput["sizes"]).write_text(config.stash[SIZES])
    chosen = [i for i in own if tier[i] in asked and i not in left_out]
    if config.getoption("--kernels"):
        chosen = [i for i in chosen if _capability(i)]
    first, every = _part(config, "--sample")
    chosen = chosen[first - 1 :: every]
    config.hook.pytest_deselected(items=[*set(items).difference(chosen)])
    items[:] = chosen


def pytest_report_collectionfinish(config: pytest.Config) -> str:
    return config.stash.get(SIZES, "")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["sizes"] = _SAID.name


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any) -> None:
    said = Path(_SAID.name).read_text()  # empty where nothing was collected: a path that is none
    if SIZES not in node.config.stash and said:
        node.config.stash[SIZES] = said
        node.config.pluginmanager.get_plugin("terminalreporter").write_line(said)


def _part(config: pytest.Config, option: str) -> tuple[int, int]:
    """K and N of "K/N"; a K above N is counted modulo N, so that a number of commits will do."""
    given = config.getoption(option)
    if not (found := re.fullmatch(r"(\d+)/([1-9]\d*)", given)):
        raise pytest.UsageError(f"{option} {given}: it must be K/N, such as 1/8")
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


# What every test depends on, beside its own file.
COMMON = ["tests/_", "tests/helpers.py", "tests/conftest.py", "setup.py", "pyproject.toml"]


def _changed_since(commit: str) -> list[str]:
    """The files that differ from the commit's, also those that git does not know."""
    git = ["git", "-C", str(ROOT)]
    since = [*git, "diff", "--name-only", commit, "--"]
    unknown = [*git, "ls-files", "--others", "--exclude-standard"]
    run = [subprocess.run(command, capture_output=True, text=True) for command in (since, unknown)]
    if any(done.returncode for done in run):
        raise pytest.UsageError(f"--passed {commit}: {''.join(done.stderr for done in run)}")
    return [name for done in run for name in done.stdout.split("\n") if name]


def _unchanged(slow: list[pytest.Item], changed: list[str]) -> set[pytest.Item]:
    """The tests none of whose inputs has changed.

    `slow("csrc/cuda", "tests/cuda")` names the beginnings of paths that a test depends on, its own
    file and COMMON among them; a test of `slow` without any depends on all files.
    """
    unchanged = set()
    for item in slow:
        marks = [mark.args for mark in item.iter_markers("slow")]
        paths = (*sum(marks, ()), *COMMON, str(item.path.relative_to(ROOT)))
        depends_on_all = not all(marks)
        if not any(depends_on_all or name.startswith(paths) for name in changed):
            unchanged.add(item)
    return unchanged


def _params(item: pytest.Item) -> dict[str, Any]:
    callspec = getattr(item, "callspec", None)
    return callspec.params if callspec else {}


def _capability(item: pytest.Item) -> str:
    params = _params(item)
    return next((str(params[name]) for name in FIXTURES if name in params), "")


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


def _function(item: pytest.Item) -> str:
    return getattr(item, "originalname", item.name)


def _slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def _one_case_of_each(items: list[pytest.Item]) -> list[pytest.Item]:
    """Takes the same case of each test, instruction set and dtype on every run.

    Which one is spread evenly.
    """
    cases: dict[tuple[Any, ...], list[pytest.Item]] = collections.defaultdict(list)
    for item in filter(lambda i: not _slow(i), items):
        function = _function(item)
        each = item.get_closest_marker("each")
        regression = item.name if item.get_closest_marker("regression") else ""
        regression += str([_params(item)[name] for name in each.args]) if each else ""
        kernels = f"{_capability(item)} {sorted(map(str, _dtypes(item)))}"
        cases[item.path, function, kernels, regression].append(item)
    return [
        group[zlib.crc32(f"{function} {kernels}".encode()) % len(group)]
        for (_, function, kernels, _), group in cases.items()
    ]


def _pairs(items: list[pytest.Item], chosen: set[pytest.Item]) -> list[pytest.Item]:
    """Takes cases of each test, those chosen first, until every two values of parameters meet."""
    tests: dict[tuple[Any, ...], list[pytest.Item]] = collections.defaultdict(list)
    for item in filter(lambda i: not _slow(i), items):
        tests[item.path, getattr(item, "cls", None), _function(item)].append(item)
    taken = []
    for cases in tests.values():
        # A value meets itself, so that a test of one parameter has each.
        pairs = {i: set(itertools.combinations_with_replacement(_values(i), 2)) for i in cases}
        met: set[Any] = set()
        while pairs:
            case = max(pairs, key=lambda i: (i in chosen, len(pairs[i] - met)))
            if case not in chosen and met.issuperset(pairs[case]):
                break
            met |= pairs.pop(case)
            taken.append(case)
    return taken


def _values(case: pytest.Item) -> list[Any]:
    """What tells the case from the others of its test, one value a parameter.

    The names of one decorator are one parameter. Instruction set and dtype are one, too, because
    together they choose the code.
    """
    values = _params(case)
    names = [mark.args[0] for mark in case.iter_markers("parametrize")]
    together = [n.replace(" ", "").split(",") if isinstance(n, str) else n for n in names]
    together += [[name] for name in values if not any(name in names for names in together)]
    code = _capability(case), *sorted(map(str, _dtypes(case)))
    return [code, *((*names, *(id(values[name]) for name in names)) for names in together)]
