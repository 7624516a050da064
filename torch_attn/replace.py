"""The switch that puts `attn` in the place of the built-in attention, in code that nobody changes.

While it is on, every ``F.scaled_dot_product_attention`` of the process is computed by
``torch.ops.attn.sdpa``, whoever calls it: the switch is in PyTorch's dispatcher
(csrc/operators/replace.cpp and replace_varlen.cpp), through which all callers go. What is left to
do here is what PyTorch remembers by itself: the code that ``torch.compile`` has made of a function,
in memory and on disk.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
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


class Replacement:
    """The switch, turned on; made by :func:`replace_sdpa` and :func:`replacing_sdpa`."""

    def __init__(self) -> None:
        self._at_end: tuple[int, int] | None = None
        _switch(+1)
        self._at_start = _counts()
        _on.add(self)

    def remove(self) -> None:
        """Turns the switch off, unless another handle has it on. A second call does nothing.

        If attn has answered no call since, a warning says why that may be.

        Raises:
            RuntimeError: as for :func:`replace_sdpa`.
        """
        if self._take_back():
            _warn_if_not_called("Replacement.remove", self, stacklevel=3)

    def _take_back(self) -> bool:
        """Whether this call has turned it off."""
        was_on = self._at_end is None
        _switch(-1, self)
        return was_on

    @property
    def calls(self) -> int:
        """How many calls of the built-in `attn` has answered since, up to :meth:`remove`.

        Of the whole process. A compiled function counts when it is compiled, not when it runs;
        ``torch.nn.attention.varlen`` counts when it runs.
        """
        return self._since()[0]

    @property
    def passed_on(self) -> int:
        """How many calls were left to the built-in, for the kind of the tensors or their device."""
        return self._since()[1]

    def _since(self) -> tuple[int, int]:
        calls, passed_on = self._at_end or _counts()
        return calls - self._at_start[0], passed_on - self._at_start[1]

    # A switch that is on once is not on twice by the copy of a model that holds the handle.
    def __copy__(self) -> Replacement:
        return self

    def __deepcopy__(self, memo: Any) -> Replacement:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "torch_attn: a Replacement is the switch of this process and cannot be pickled; call "
            "replace_sdpa() in the other process"
        )

    def __repr__(self) -> str:
        state = "on" if self._at_end is None else "removed"
        return f"<Replacement: {state}, calls={self.calls}, passed_on={self.passed_on}>"


def replace_sdpa() -> Replacement:
    """Computes every ``F.scaled_dot_product_attention`` by `attn`, until it is told to stop.

    For the whole process: all threads, and processes that are forked from now on. Also for names
    that were imported before, for ``nn.MultiheadAttention`` and libraries, TorchScript, exported
    programs, and callers in C++. `docs/any-pytorch-code.md` lists what is caught and what is not.
    ``torch.nn.attention.varlen``, which torch has for GPUs only, then runs on the CPU, too.

    Tensors of the CPU, and of CUDA if the kernels for it were compiled and run on the GPU (compute
    capability 8.0 or higher), are served: dense ones of float64, float32, bfloat16 and float16. All
    others go to the built-in, as if nothing were there.
    Wrong shapes, dtypes and devices are errors as before, in the words of :func:`torch_attn.sdpa`.
    ``torch.nn.attention.sdpa_kernel`` chooses among the kernels of the built-in, and changes
    nothing here.

    What ``torch.compile`` has compiled is forgotten when the switch is turned on and when it is
    turned off (:func:`torch.compiler.reset`): the next call compiles again, with the attention that
    then counts. The caches on disk keep the two apart.

    Returns:
        A handle: `remove()` turns the switch off, `calls` says how often `attn` was called. Of
        several handles, the last one that is removed turns it off, in any order. A handle that is
        only dropped leaves it on: :func:`restore_sdpa` turns it off without one.

    Raises:
        RuntimeError: it is called in a function that ``torch.compile`` compiles with
            ``fullgraph=True``. Without it, such a call runs outside of the graph.

    Example:
        >>> query, key, value = torch.randn(3, 2, 8, 10, 64)
        >>> handle = torch_attn.replace_sdpa()
        >>> output = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        >>> handle.calls
        1
        >>> handle.remove()
    """
    return Replacement()


def sdpa_is_replaced() -> bool:
    """Whether the switch of :func:`replace_sdpa` is on, in this process.

    Example:
        >>> torch_attn.sdpa_is_replaced()
        False
    """
    return is_on()


def restore_sdpa() -> None:
    """Gives ``F.scaled_dot_product_attention`` back to the built-in, whoever has replaced it.

    It removes every handle of :func:`replace_sdpa` that is on, also those that nothing holds any
    more, and warns of one that has answered no call. Where the switch is off it does nothing.

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
    for handle in list(_on):
        if handle._take_back():
            _warn_if_not_called("restore_sdpa", handle, stacklevel=3)


@contextlib.contextmanager
def replacing_sdpa() -> Iterator[Replacement]:
    """:func:`replace_sdpa` for the time of a ``with`` block, or of a function that it decorates.

    Not of a generator or a coroutine, whose body runs when the decorated call is over. A block in
    which attn was not called ends with a warning that says why that may be.

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
    handle = replace_sdpa()
    try:
        yield handle
    finally:
        handle._take_back()
    _warn_if_not_called("replacing_sdpa", handle, stacklevel=4)  # of contextlib


def _warn_if_not_called(name: str, handle: Replacement, stacklevel: int) -> None:
    if handle.calls > 0:
        return
    why = (
        "nothing called F.scaled_dot_product_attention meanwhile. PyTorch's nn.TransformerEncoder "
        "and nn.MultiheadAttention do not in evaluation without gradients, nor with weights: "
        "torch_attn.convert(model) reaches them"
    )
    if handle.passed_on:
        why = (
            f"{handle.passed_on} calls were left to the built-in, for the kind of the tensors or "
            "their device"
        )
    warnings.warn(f"{name}: attn was not called: {why}", stacklevel=stacklevel)


def register_with_torch() -> None:
    """Tells ``torch.nn.attention`` of the switch; the package calls it.

    Afterwards ``activate_flash_attention_impl("attn")`` turns it on, and
    ``restore_flash_attention_impl()`` off. Releases of torch without these are left alone.
    """
    register = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if register is not None:
        register("attn", register_fn=replace_sdpa)


_lock = threading.Lock()
# A process that is forked while another thread holds it would wait forever.
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)


_times_on = 0
_on: set[Replacement] = set()
_jagged_calls = {True: 0, False: 0}  # answered, and left to the built-in


def is_on() -> bool:
    return _times_on > 0


def answers_jagged(query: torch.Tensor, fits: bool) -> bool:
    """Counts a call with jagged tensors, which take it before the dispatcher does."""
    has_kernels = torch.ops.attn._has_kernels(query.device)
    floats = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    answered = fits and has_kernels and query.dtype in floats
    _jagged_calls[answered] += 1
    return answered


def answered() -> int:
    """How many calls of the built-in attn has answered in this process."""
    return _counts()[0]


def _counts() -> tuple[int, int]:
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "torch_attn: calls and passed_on cannot be read in a compiled function, where they "
            "would stay what they are now; read them around it"
        )
    calls, passed_on = torch.ops.attn._replaced_calls()
    return calls + _jagged_calls[True], passed_on + _jagged_calls[False]


def _switch(change: int, removed: Replacement | None = None) -> None:
    """Turns the switch on or off once more, and PyTorch's memory with the first or the last."""
    if torch.compiler.is_dynamo_compiling():  # this code; other threads may compile others
        raise RuntimeError(
            "torch_attn: replace_sdpa, replacing_sdpa and remove cannot be part of a compiled "
            "function; call them around it"
        )
    global _times_on
    with _lock:
        if removed is not None:
            if removed._at_end is not None:
                return
            removed._at_end = _counts()
            _on.discard(removed)
        _times_on = torch.ops.attn._replace_sdpa(change)
        turns = _times_on == max(change, 0)
        if turns:
            _mark_caches(change > 0)
    if turns and "torch._dynamo" in sys.modules:
        torch.compiler.reset()


_mark_before: Any = None


def _mark_caches(on: bool) -> None:
    """Marks what compiled graphs are looked up by on disk: the calls in a graph, not what they do.

    There is a public setting for it, but from torch 2.13 on a value given to it is that of one
    thread. The value that an environment variable would force is that of all.
    """
    global _mark_before
    config: Any = torch.compiler.config
    setting = config._config["cache_key_tag"]
    if on:
        _mark_before = setting.env_value_force
        setting.env_value_force = f"{config.cache_key_tag}, torch_attn.replace_sdpa"
    else:
        setting.env_value_force = _mark_before
