"""Switches that replace PyTorch's attention by `attn`, without changes to the caller's code.

While the first switch is on, ``torch.ops.attn.sdpa`` computes every call of
``F.scaled_dot_product_attention`` in the process. The switch catches all callers, because it is in
PyTorch's dispatcher (csrc/operators/replace.cpp and replace_varlen.cpp). This module discards the
code that ``torch.compile`` keeps in memory, and marks the keys under which ``torch.compile`` stores
code on disk. The second switch is for FlexAttention (_replacement/flex.py).
"""

from __future__ import annotations

import contextlib
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import torch

from torch_attn._count import calls_of_built_in, jagged_calls
from torch_attn._replacement.flex import FLEX
from torch_attn._replacement.switch import Replacement, Switch, replacing, restore

__all__ = [
    "Replacement",
    "register_with_torch",
    "replace_sdpa",
    "replacing_sdpa",
    "restore_sdpa",
    "sdpa_is_replaced",
]


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
    return Replacement(_SDPA, *([FLEX] if flex else []))


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
    restore(_SDPA, "restore_sdpa")


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
    with replacing(replace_sdpa(flex), "replacing_sdpa") as handle:
        yield handle


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


def answers_jagged(query: torch.Tensor, fits: bool) -> bool:
    """Counts a call of the built-in with jagged tensors, and returns whether attn answers it.

    The dispatcher does not count such a call, because jagged tensors intercept the call before it.
    """
    has_kernels = torch.ops.attn._has_kernels(query.device)
    floats = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    answered = fits and has_kernels and query.dtype in floats
    jagged_calls[answered] += 1
    return answered


class _Sdpa(Switch):
    counts = staticmethod(calls_of_built_in)
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
