"""What every switch shares: its handles, the lock, and the warning that nothing was replaced."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch

_lock = threading.Lock()
# Forking waits for the lock, because a child that is forked while another thread holds the lock
# would wait for it forever.
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)


class Switch:
    """A switch of this process, which is on while it has handles.

    Attributes:
        replaces: the function that the switch replaces.
        hint: why programs may not call that function.
        has_functions: whether a call may have functions, some of which attn cannot run.
    """

    has_functions = False

    def __init__(self, replaces: str, hint: str = "") -> None:
        self.replaces, self.hint = replaces, hint
        self.times_on = 0
        self.handles: set[Replacement] = set()

    def counts(self) -> tuple[int, int]:
        """The calls that attn has answered in this process, and those left to PyTorch."""
        raise NotImplementedError

    def add(self, change: int) -> int:
        """Adds to the number of handles, and returns it."""
        return self.times_on + change

    def turn(self, on: bool) -> None:
        """Turns the switch. The caller holds the lock."""

    def turned(self) -> None:
        """Runs after the switch was turned, without the lock."""


class Replacement:
    """A handle of a switch, which :func:`replace_sdpa` and :func:`replace_flex` return."""

    def __init__(self, *switches: Switch) -> None:
        self._at_start: dict[Switch, tuple[int, int]] = {}
        self._at_end: dict[Switch, tuple[int, int]] = {}
        try:
            for switch in switches:
                _turn(switch, self, on=True)
        except BaseException:
            self._take_back()
            raise

    def remove(self) -> None:
        """Turns the switch off, unless another handle keeps it on. A second call does nothing.

        If attn has answered no call since this handle was made, a warning names possible reasons.

        Raises:
            RuntimeError: as for :func:`replace_sdpa`.
        """
        if self._take_back():
            _warn_if_not_called("Replacement.remove", self, stacklevel=3)

    def _take_back(self) -> bool:
        """Turns this handle off; returns whether it was on."""
        was_on = [_turn(switch, self, on=False) for switch in self._at_start]
        return any(was_on)

    @property
    def calls(self) -> int:
        """The number of calls that attn answered instead of PyTorch while this handle was on.

        The count covers the whole process. A call in a compiled function counts when the function
        is compiled, not when it runs. A call of ``torch.nn.attention.varlen`` counts whenever it
        runs.
        """
        return self._since(0)

    @property
    def passed_on(self) -> int:
        """The number of calls that attn left to PyTorch.

        It leaves calls because of the tensors' kind or device, and calls of FlexAttention also
        because of what their functions compute.
        """
        return self._since(1)

    def _since(self, which: int) -> int:
        counts = {switch: self._at_end.get(switch) or switch.counts() for switch in self._at_start}
        return sum(now[which] - self._at_start[switch][which] for switch, now in counts.items())

    # Copying a model that holds the handle must not turn the switch on a second time.
    def __copy__(self) -> Replacement:
        return self

    def __deepcopy__(self, memo: Any) -> Replacement:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "torch_attn: a Replacement is the switch of this process and cannot be pickled; call "
            "replace_sdpa() or replace_flex() in the other process"
        )

    def __repr__(self) -> str:
        state = "removed" if len(self._at_end) == len(self._at_start) else "on"
        return f"<Replacement: {state}, calls={self.calls}, passed_on={self.passed_on}>"


def _turn(switch: Switch, handle: Replacement, on: bool) -> bool:
    """Adds a handle to a switch, or takes it back; returns whether this changed anything."""
    if torch.compiler.is_dynamo_compiling():  # true only if this thread traces
        raise RuntimeError(
            f"torch_attn: turning the switch of {switch.replaces} cannot be part of a compiled "
            "function; turn it around the call"
        )
    with _lock:
        if (handle in switch.handles) == on:
            return False
        number = switch.add(1 if on else -1)
        turns = number == int(on)
        if turns:
            switch.turn(on)
        switch.times_on = number
        if on:
            handle._at_start[switch] = switch.counts()
            switch.handles.add(handle)
        else:
            handle._at_end[switch] = switch.counts()
            switch.handles.discard(handle)
    if turns:
        switch.turned()
    return True


@contextlib.contextmanager
def replacing(handle: Replacement, name: str) -> Iterator[Replacement]:
    try:
        yield handle
    finally:
        handle._take_back()
    _warn_if_not_called(name, handle, stacklevel=6)  # skips frames of contextlib


def restore(switch: Switch, name: str) -> None:
    for handle in list(switch.handles):
        if _turn(switch, handle, on=False):
            _warn_if_not_called(name, handle, stacklevel=4)


def _warn_if_not_called(name: str, handle: Replacement, stacklevel: int) -> None:
    if handle.calls > 0:
        return
    switches = list(handle._at_start)
    why = f"nothing called {' or '.join(switch.replaces for switch in switches)} meanwhile"
    why += "".join(f". {switch.hint}" for switch in switches if switch.hint)
    if handle.passed_on:
        why = (
            f"{handle.passed_on} calls were left to PyTorch, for the kind of the tensors or "
            "their device"
        )
        if any(switch.has_functions for switch in switches):
            why += ", or because attn cannot run their functions"
    warnings.warn(f"{name}: attn was not called: {why}", stacklevel=stacklevel)
