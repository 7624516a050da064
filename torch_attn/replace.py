"""Switches that replace PyTorch's attention by `attn`, without changes to the caller's code.

While the first switch is on, ``torch.ops.attn.sdpa`` computes every call of
``F.scaled_dot_product_attention`` in the process. The switch catches all callers, because it is in
PyTorch's dispatcher (csrc/operators/replace.cpp and replace_varlen.cpp). This module counts the
handles of the switch. It also discards the code that ``torch.compile`` keeps in memory, and marks
the keys under which ``torch.compile`` stores code on disk. The second switch is for
FlexAttention (_replace_flex.py).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = [
    "Replacement",
    "register_with_torch",
    "replace_sdpa",
    "replacing_sdpa",
    "restore_sdpa",
    "sdpa_is_replaced",
]


class Switch:
    """A switch of this process, which is on while it has handles.

    Attributes:
        replaces: the function that the switch replaces.
        hint: why programs may not call that function.
    """

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


def replace_sdpa(flex: bool = False) -> Replacement:
    """Makes `attn` compute every ``F.scaled_dot_product_attention``, until the switch is off.

    The switch holds for the whole process: all threads, and processes that are forked later.
    It also holds for names that were imported before the switch, ``nn.MultiheadAttention``,
    libraries, TorchScript, exported programs, and callers in C++. `docs/any-pytorch-code.md` lists
    what the switch catches and what it does not. ``torch.nn.attention.varlen``, which torch has for
    GPUs only, then runs on the CPU, too.

    `attn` takes dense tensors of float64, float32, bfloat16 and float16, on the CPU, and on CUDA
    if the CUDA kernels were compiled and the GPU can run them (compute capability 8.0 or higher).
    Calls with other tensors go to the built-in, as without the switch. Wrong shapes, dtypes and
    devices are errors, as without the switch, but with the messages of :func:`torch_attn.sdpa`.
    ``torch.nn.attention.sdpa_kernel`` chooses among the kernels of the built-in, and changes
    nothing here.

    Turning the switch on or off discards what ``torch.compile`` has compiled
    (:func:`torch.compiler.reset`). The next call compiles again, with the attention that is then in
    use. Caches on disk store the code with and without the switch under different keys.

    Args:
        flex: also does what :func:`replace_flex` does.

    Returns:
        A handle: `remove()` turns the switch off, and `calls` says how often `attn` was called. If
        there are several handles, the switch turns off when all of them are removed, in any order.
        A handle that is dropped without `remove()` leaves the switch on. :func:`restore_sdpa` turns
        the switch off without a handle.

    Raises:
        RuntimeError: the caller is a function that ``torch.compile`` compiles with
            ``fullgraph=True``. Without ``fullgraph``, such a call runs outside of the graph.

    Example:
        >>> query, key, value = torch.randn(3, 2, 8, 10, 64)
        >>> handle = torch_attn.replace_sdpa()
        >>> output = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        >>> handle.calls
        1
        >>> handle.remove()
    """
    return Replacement(_SDPA, *([_flex()] if flex else []))


def sdpa_is_replaced() -> bool:
    """Returns whether the switch of :func:`replace_sdpa` is on, in this process.

    Example:
        >>> torch_attn.sdpa_is_replaced()
        False
    """
    return _SDPA.times_on > 0


def restore_sdpa() -> None:
    """Turns the switch of :func:`replace_sdpa` off, whatever code turned it on.

    It removes every handle that is on, including dropped handles. It warns of each handle whose
    `calls` is 0. If the switch is off, it does nothing.

    Raises:
        RuntimeError: as for :func:`replace_sdpa`.

    Example:
        >>> handle = torch_attn.replace_sdpa()
        >>> torch_attn.sdpa_is_replaced()
        True
        >>> query, key, value = torch.randn(3, 2, 8, 10, 64)
        >>> output = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        >>> torch_attn.restore_sdpa()
        >>> torch_attn.sdpa_is_replaced()
        False
    """
    _restore(_SDPA, "restore_sdpa")


@contextlib.contextmanager
def replacing_sdpa(flex: bool = False) -> Iterator[Replacement]:
    """Turns the switch on for a ``with`` block, or for a decorated function.

    See :func:`replace_sdpa`.

    It cannot decorate a generator or a coroutine, because their bodies run after the decorated call
    is over. If attn answered no call in the block, a warning at the end names possible reasons.

    Args:
        flex: also does what :func:`replace_flex` does.

    Yields:
        The handle.

    Raises:
        RuntimeError: as for :func:`replace_sdpa`.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
        >>> with torch_attn.replacing_sdpa() as handle:
        ...     output = layer(torch.randn(2, 10, 64))
        >>> handle
        <Replacement: removed, calls=1, passed_on=0>
    """
    with _replacing(replace_sdpa(flex), "replacing_sdpa") as handle:
        yield handle


@contextlib.contextmanager
def _replacing(handle: Replacement, name: str) -> Iterator[Replacement]:
    try:
        yield handle
    finally:
        handle._take_back()
    _warn_if_not_called(name, handle, stacklevel=6)  # skips frames of contextlib


def _restore(switch: Switch, name: str) -> None:
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
        if switches != [_SDPA]:
            why += ", or because attn cannot run their functions"
    warnings.warn(f"{name}: attn was not called: {why}", stacklevel=stacklevel)


def register_with_torch() -> None:
    """Tells ``torch.nn.attention`` of the switch; ``import torch_attn`` calls this.

    Afterwards ``activate_flash_attention_impl("attn")`` turns the switch on, and
    ``restore_flash_attention_impl()`` turns it off. If torch lacks these functions, this function
    does nothing.
    """
    register = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if register is not None:
        register("attn", register_fn=replace_sdpa)


def mark_build() -> None:
    """Marks the keys of graphs on disk with the build; ``import torch_attn`` calls this.

    Compiled graphs of training steps hold private operators. Without the mark, ``torch.compile``
    would run graphs that another build has stored, whose operators have other arguments. The mark
    is a default of torch's, so a ``cache_key_tag`` of the user takes its place. It is part of the
    keys of all graphs of a process that imports this package.
    """
    names = ("forward", "backward", "tangent", "second")
    schemas = "".join(str(getattr(torch.ops.attn, f"_sdpa_{x}").default._schema) for x in names)
    setting = torch.compiler.config._config["cache_key_tag"]  # type: ignore[attr-defined]
    mark = f"torch_attn {zlib.crc32(schemas.encode()):08x}"
    setting.default = ", ".join(filter(None, (setting.default, mark)))


_lock = threading.Lock()
# Forking waits for the lock, because a child that is forked while another thread holds the lock
# would wait for it forever.
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)


_jagged_calls = {True: 0, False: 0}  # answered, and left to the built-in


def answers_jagged(query: torch.Tensor, fits: bool) -> bool:
    """Counts a call of the built-in with jagged tensors, and returns whether attn answers it.

    The dispatcher does not count such a call, because jagged tensors intercept the call before it.
    """
    has_kernels = torch.ops.attn._has_kernels(query.device)
    floats = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    answered = fits and has_kernels and query.dtype in floats
    _jagged_calls[answered] += 1
    return answered


def answered() -> int:
    """Returns how many calls attn has answered in place of the built-in in this process."""
    return _SDPA.counts()[0]


class _Sdpa(Switch):
    def counts(self) -> tuple[int, int]:
        if torch.compiler.is_dynamo_compiling():
            raise RuntimeError(
                "torch_attn: calls and passed_on cannot be read in a compiled function, where they "
                "would stay what they are now; read them around it"
            )
        calls, passed_on = torch.ops.attn._replaced_calls()
        return calls + _jagged_calls[True], passed_on + _jagged_calls[False]

    add = staticmethod(torch.ops.attn._replace_sdpa)

    def turn(self, on: bool) -> None:
        _mark_switch(on)

    def turned(self) -> None:
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()


_SDPA = _Sdpa(
    "F.scaled_dot_product_attention",
    "PyTorch's nn.TransformerEncoder and nn.MultiheadAttention do not in evaluation without "
    "gradients, nor with weights: torch_attn.convert(model) reaches them",
)


def _flex() -> Switch:
    from torch_attn._replace_flex import FLEX

    return FLEX


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


_mark_before: Any = None


def _mark_switch(on: bool) -> None:
    """While the switch is on, marks the keys under which compiled graphs are stored on disk.

    Without the mark, a key would be the same with and without the switch, because a key depends
    only on the calls in a graph. From torch 2.13 on, the public setting, ``cache_key_tag``, holds
    for one thread only. So this function sets the value that an environment variable would force,
    because that value holds for all threads.
    """
    global _mark_before
    config: Any = torch.compiler.config
    setting = config._config["cache_key_tag"]
    if on:
        _mark_before = setting.env_value_force
        setting.env_value_force = f"{config.cache_key_tag}, torch_attn.replace_sdpa"
    else:
        setting.env_value_force = _mark_before
