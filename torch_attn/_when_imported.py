"""Calls a function after a module is imported, without importing that slow module itself."""

from __future__ import annotations

import importlib.abc
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["when_imported"]


def when_imported(name: str, function: Callable[[], None]) -> None:
    """Calls `function` after each execution of a module; at once if the module is imported already.

    An exception in `function` becomes a warning, because the module may be of another release of
    torch, and programs that do not use attention should go on.
    """

    def call() -> None:
        try:
            function()
        except Exception as error:
            warnings.warn(f"torch_attn does not know this {name}: {error}", stacklevel=2)

    sys.meta_path.insert(0, _Finder(name, call))
    if name in sys.modules:
        call()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module, by asking the finders that come after this one.

    The finder stays in ``sys.meta_path`` and keeps no state, because Python may search without
    importing, may repeat an import that failed, and may search in several threads at the same time.
    """

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self.name, self.function = name, function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        finders = list(sys.meta_path)
        for finder in finders[finders.index(self) + 1 :]:
            if not hasattr(finder, "find_spec"):
                continue  # Python ignores such finders too, since 3.12
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self.function)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Loads a module by the module's own loader, and then calls a function."""

    def __init__(self, own: Any, function: Callable[[], None]) -> None:
        self._own, self._function = own, function

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._own.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._own.exec_module(module)
        self._function()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)  # such as get_source, which tracebacks call
