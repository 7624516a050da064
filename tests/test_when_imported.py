"""The hook that waits for a module: it neither misses an import nor stands in the way of one."""

from __future__ import annotations

import concurrent.futures
import importlib
import importlib.util
import inspect
import itertools
import pathlib
import sys
import types
from collections.abc import Iterator

import pytest

from _variants import run_python
from torch_attn._when_imported import when_imported

NAMES = map("attn_test_module_{}".format, itertools.count())


@pytest.fixture
def module(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that is not imported yet."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    name = next(NAMES)
    (tmp_path / f"{name}.py").write_text("def function():\n    return 'of the module'\n")
    yield name
    sys.modules.pop(name, None)


@pytest.fixture
def calls(module: str) -> list[str]:
    """What the module had in it at each call of the hook."""
    calls: list[str] = []
    when_imported(module, lambda: calls.append(sys.modules[module].function()))
    return calls


def test_at_the_import(module: str, calls: list[str]) -> None:
    """Neither before, when programs look whether the module is there, nor at a second import."""
    specs = [importlib.util.find_spec(module) for _ in range(3)]
    assert calls == []
    importlib.import_module(module)
    importlib.import_module(module)
    assert calls == ["of the module"]
    executed = importlib.util.module_from_spec(specs[0])
    specs[0].loader.exec_module(executed)
    assert len(calls) == 2


def test_reload(module: str, calls: list[str]) -> None:
    importlib.reload(importlib.import_module(module))
    assert len(calls) == 2


def test_an_import_that_fails_first(module: str, calls: list[str], tmp_path: pathlib.Path) -> None:
    path = tmp_path / f"{module}.py"
    source = path.read_text()
    path.write_text("import attn_test_module_that_nobody_has_written  # and so this fails\n")
    with pytest.raises(ModuleNotFoundError, match="nobody_has_written"):
        importlib.import_module(module)
    assert calls == []
    path.write_text(source)
    importlib.import_module(module)
    assert calls == ["of the module"]


def test_threads(module: str, calls: list[str], tmp_path: pathlib.Path) -> None:
    path = tmp_path / f"{module}.py"
    path.write_text(f"import time\ntime.sleep(0.2)\n{path.read_text()}")

    def look_and_import(_: int) -> str:
        importlib.util.find_spec(module)
        return importlib.import_module(module).function()

    with concurrent.futures.ThreadPoolExecutor(8) as executor:
        assert list(executor.map(look_and_import, range(8))) == ["of the module"] * 8
    assert calls == ["of the module"]


def test_several_functions_of_a_module(module: str, calls: list[str]) -> None:
    """Also one that comes when the module is imported already: it alone is called then."""
    others: list[str] = []
    when_imported(module, lambda: others.append("before"))
    importlib.import_module(module)
    when_imported(module, lambda: others.append("after"))
    assert (calls, others) == (["of the module"], ["before", "after"])


def test_what_is_not_there() -> None:
    name = next(NAMES)
    when_imported(name, pytest.fail)
    assert importlib.util.find_spec(name) is None
    with pytest.raises(ModuleNotFoundError, match=name):
        importlib.import_module(name)


@pytest.mark.filterwarnings("ignore:.*find_spec:ImportWarning")
def test_finders_of_others(module: str, calls: list[str]) -> None:
    """One without `find_spec`, as old releases of six have, and one with one loader for all."""

    class Shared:
        def find_spec(self, name: str, path: object, target: object = None) -> object:
            found = name in (module, module + "_other")
            return importlib.util.spec_from_loader(name, self) if found else None

        def create_module(self, spec: object) -> None:
            return None

        def exec_module(self, executed: types.ModuleType) -> None:
            executed.function = lambda: "shared"

    sys.meta_path[1:1] = [types.SimpleNamespace(find_module=lambda *_: None), Shared()]
    importlib.import_module(module)
    importlib.import_module(module + "_other")
    assert calls == ["shared"]


def test_the_module_is_as_without(module: str, calls: list[str]) -> None:
    imported = importlib.import_module(module)
    assert inspect.getsource(imported.function).startswith("def function")
    assert imported.__spec__.origin == imported.__file__


def test_an_error_is_a_warning(module: str) -> None:
    def function() -> None:
        raise AttributeError("what it needs is gone")

    when_imported(module, function)
    with pytest.warns(UserWarning, match=f"this {module}: what it needs is gone"):
        importlib.import_module(module)
    with pytest.warns(UserWarning, match="what it needs is gone"):
        when_imported(module, function)


@pytest.mark.long
@pytest.mark.regression
def test_reloading_the_package() -> None:
    """It has said all there is to say."""
    program = """
import importlib, sys, warnings
import torch.distributed.tensor, torch.nested._internal.nested_tensor, torch_attn
warnings.simplefilter("error")
finders = len(sys.meta_path)
importlib.reload(torch_attn)
assert len(sys.meta_path) == finders
"""
    run_python("-c", program)
