"""The switch that replaces PyTorch's FlexAttention by `attn`, without changes to the caller's code.

While the switch is on, ``torch.nn.attention.flex_attention.flex_attention`` runs other code: its
``__code__`` is replaced by a call of :func:`_answer`, and restored. So the switch catches every
caller, also one that imported or compiled the function before. ``torch.compile`` keeps a graph for
each of the two codes, because its guards compare the code.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_attn._count import calls_of, counter
from torch_attn._programs.errors import UnsupportedError
from torch_attn._replacement.of_torch import original, theirs
from torch_attn._replacement.switch import Replacement, Switch, replacing, restore
from torch_attn.flex import flex_attention

__all__ = ["flex_is_replaced", "replace_flex", "replacing_flex", "restore_flex"]


def replace_flex() -> Replacement:
    """Makes `attn` compute every FlexAttention of PyTorch on the CPU, until the switch is off.

    The switch holds for the whole process, and for every caller of
    ``torch.nn.attention.flex_attention.flex_attention``: names imported before, functions compiled
    before (:func:`torch.compile`), libraries. Code that FlexAttention does not train on a CPU then
    trains: :func:`torch_attn.flex_attention` has all derivatives. `docs/flex.md` lists what the
    switch does not catch.

    Calls with tensors of other devices or dtypes go to PyTorch, as without the switch. So do calls
    whose functions :func:`torch_attn.flex_attention` refuses; a warning says why, once for each
    function. If PyTorch cannot compute such a call either, the error is that of
    :func:`torch_attn.flex_attention`, which names the operation and the line.

    Returns:
        A handle: `remove()` turns the switch off, `calls` says how often `attn` was called, and
        `passed_on` how often PyTorch. If there are several handles, the switch turns off when all
        of them are removed, in any order. :func:`restore_flex` turns the switch off without a
        handle.

    Raises:
        RuntimeError: PyTorch's function is of a form that the switch does not know; or the caller
            is a function that ``torch.compile`` compiles with ``fullgraph=True``.

    Example:
        >>> from torch.nn.attention.flex_attention import flex_attention
        >>> handle = torch_attn.replace_flex()
        >>> query, key, value = torch.randn(3, 1, 2, 10, 64, requires_grad=True)
        >>> output = flex_attention(query, key, value, lambda score, b, h, i, j: score - (i - j))
        >>> output.sum().backward()
        >>> handle.calls
        1
        >>> handle.remove()
    """
    return Replacement(FLEX)


@contextlib.contextmanager
def replacing_flex() -> Iterator[Replacement]:
    """Turns the switch of :func:`replace_flex` on for a ``with`` block, or a decorated function.

    If attn answered no call in the block, a warning at the end names possible reasons.

    Yields:
        The handle.

    Raises:
        RuntimeError: as for :func:`replace_flex`.

    Example:
        >>> from torch.nn.attention.flex_attention import flex_attention
        >>> query, key, value = torch.randn(3, 1, 2, 10, 64)
        >>> with torch_attn.replacing_flex() as handle:
        ...     output = flex_attention(query, key, value)
        >>> handle
        <Replacement: removed, calls=1, passed_on=0>
    """
    with replacing(replace_flex(), "replacing_flex") as handle:
        yield handle


def restore_flex() -> None:
    """Turns the switch of :func:`replace_flex` off, whatever code turned it on.

    It removes every handle of this switch. A handle of ``replace_sdpa(flex=True)`` still replaces
    ``F.scaled_dot_product_attention``. It warns of each handle whose `calls` is 0. If the switch is
    off, it does nothing.

    Raises:
        RuntimeError: as for :func:`replace_flex`.

    Example:
        >>> handle = torch_attn.replace_flex()
        >>> torch_attn.restore_flex()
        >>> torch_attn.flex_is_replaced()
        False
    """
    restore(FLEX, "restore_flex")


def flex_is_replaced() -> bool:
    """Returns whether the switch of :func:`replace_flex` is on, in this process.

    Example:
        >>> torch_attn.flex_is_replaced()
        False
    """
    return FLEX.times_on > 0


_count, _count_passed_on = counter("FlexAttention"), counter("FlexAttention, left to PyTorch")


class _Flex(Switch):
    has_functions = True

    def counts(self) -> tuple[int, int]:
        return calls_of("FlexAttention"), calls_of("FlexAttention, left to PyTorch")

    def turn(self, on: bool) -> None:
        theirs.__code__ = _code() if on else original.__code__


FLEX = _Flex("torch.nn.attention.flex_attention.flex_attention")


@functools.cache
def _code() -> CodeType:
    """The code that calls _answer() with all arguments of PyTorch's function, by their names."""
    ours = inspect.signature(flex_attention).parameters
    if type(theirs) is not FunctionType or theirs.__closure__ or hasattr(theirs, "__wrapped__"):
        problem = "is wrapped by another function"
    elif unknown := [name for name in inspect.signature(theirs).parameters if name not in ours]:
        problem = f"has arguments that attn does not know: {', '.join(unknown)}"
    else:
        parameters = inspect.signature(theirs).parameters.values()
        given = [inspect.Parameter(p.name, p.kind) for p in parameters]
        names = ", ".join(f"{p.name}={p.name}" for p in given)
        text = f"def flex_attention{inspect.Signature(given)}:\n"
        text += f"    from {__name__} import _answer\n    return _answer({names})\n"
        made: dict[str, Any] = {}
        exec(compile(text, __file__, "exec"), made)
        code: CodeType = made["flex_attention"].__code__
        return code.replace(co_firstlineno=_answer.__code__.co_firstlineno)  # for tracebacks
    raise RuntimeError(
        f"torch_attn.replace_flex: flex_attention of torch {torch.__version__} {problem}; call "
        "torch_attn.flex_attention in its place"
    )


_DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16


def _answer(query: Any, key: Any, value: Any, **more: Any) -> Any:
    """Answers a call of PyTorch's function."""
    if (
        query.device.type != "cpu"
        or query.dtype not in _DTYPES
        or is_traceable_wrapper_subclass(query)
        or query.is_nested
    ):
        _count_passed_on()
        return original(query, key, value, **more)
    try:
        if not query.dtype == key.dtype == value.dtype and not torch.is_autocast_enabled("cpu"):
            dtypes = f"query has {query.dtype}, key {key.dtype} and value {value.dtype}"
            raise UnsupportedError(f"torch_attn.flex_attention: {dtypes}; give them one dtype")
        result = flex_attention(query, key, value, **more)
    except UnsupportedError as refusal:
        if query.requires_grad or key.requires_grad or value.requires_grad:
            raise  # PyTorch has no derivatives on a CPU
        reason = refusal
    else:
        _count()
        return result
    _count_passed_on()
    if torch.compiler.is_compiling():
        return original(query, key, value, **more)
    _warn_once(more["score_mod"], more["block_mask"], reason)
    try:
        return original(query, key, value, **more)
    except ValueError:  # of PyTorch's checks of shapes
        raise
    except Exception as error:
        raise reason from error


_warned: set[Any] = set()


def _warn_once(score_mod: Any, block_mask: Any, reason: UnsupportedError) -> None:
    mask_mod = getattr(block_mask, "mask_mod", None)
    key = (str(reason), *(getattr(f, "__code__", type(f)) for f in (score_mod, mask_mod)))
    if key not in _warned:
        _warned.add(key)
        warnings.warn(f"{reason}. PyTorch's FlexAttention computes this call", stacklevel=4)
