"""Runs a score_mod or a mask_mod once, and sees every call that it makes to PyTorch.

The functions of FlexAttention take single numbers: `score_mod(score, b, h, q_idx, kv_idx)`.
`Tracer` calls each function with 0-d tensors that stand for these numbers in all pairs.
"""

from __future__ import annotations

import inspect
import operator as operators
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torch_attn._programs.errors import fail
from torch_attn._programs.functions import QUESTIONS, known_elementwise
from torch_attn._programs.general import call_general
from torch_attn._programs.rules import CONVERSIONS
from torch_attn._programs.tables import Tables
from torch_attn._programs.value import Value
from torch_attn._programs.values import Values


class Tracer(TorchFunctionMode):
    """Turns the calls of PyTorch that user functions make into values."""

    def __init__(self, values: Values, tables: Tables) -> None:
        super().__init__()
        self.values, self.tables = values, tables

    def run(self, name: str, function: Any, arguments: list[Value], type_: str) -> int:
        """Runs a user's function and returns its result's node in the list of operations."""
        stand_ins = [self.values.stand_in(x) for x in arguments]
        with self:
            try:
                result = function(*stand_ins)
            except TypeError:
                _check_takes(name, function, len(stand_ins))
                raise
        if isinstance(result, bool | int | float):
            result = torch.tensor(result, device=self.values.device)
            self.values.tensors.made.append(result)
        value = self.values.of_tensor(result) if isinstance(result, Tensor) else None
        if value is None or value.shape:
            is_tensor = isinstance(result, Tensor)
            what = f"shape {list(result.shape)}" if is_tensor else type(result).__name__
            fail(f"the function returned {what}", "return one number: a 0-d tensor")
        if value.type != type_:
            wanted = "floating number" if type_ == "f" else "boolean"
            fail(f"{name} returned {result.dtype}", f"return a {wanted}")
        return self.values.list.node_of(value, type_)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        known = None if "out" in kwargs else known_elementwise(func)
        if known is None:
            if func is torch.Tensor.__getitem__ or func is operators.getitem:
                return self.tables.getitem(*args)
            if func in QUESTIONS:
                return func(*args, **kwargs)
            return call_general(self.values, func, args, kwargs)
        traced, values, operands = False, [], []
        for x in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(x, Tensor):
                traced = traced or hasattr(x, "_attn")
                value = self.values.of_tensor(x)
                if value is None or value.shape:
                    return call_general(self.values, func, args, kwargs)
                operands.append(value)
                x = value
            elif not isinstance(x, _PLAIN) and hasattr(x, "item"):
                x = x.item()  # a number of NumPy's
            values.append(x)
        if not traced:
            return call_general(self.values, func, args, kwargs)
        named = kwargs
        if kwargs:
            named = dict(zip(kwargs, values[len(args) :], strict=True))
            del values[len(args) :]
        if known.is_reversed:
            values.reverse()
        name = known.name
        result = self.values.elementwise(name, known.function, values, named, operands)
        if known.is_in_place or kwargs.get("inplace"):
            return self.assign(args[0], result, name)
        if name in _SAME and result.dtype == args[0].dtype and not kwargs.get("copy"):
            return args[0]  # as PyTorch returns the tensor itself
        return self.values.stand_in(result)

    def assign(self, target: Any, value: Value, name: str) -> Any:
        """Assigns in place, as `target += x` does: every reference sees the new value."""
        if not (hasattr(target, "_attn") or self.values.tensors.is_made(target)):
            fail(f"{name} changes a captured tensor in place", "compute a new one")
        if self.values.tensors.is_made(target) and self.values.tensors.has_views(target):
            fail(f"{name} changes a tensor that has views", "compute a new one")
        own: Any = self.values.of_tensor(target)
        if "bif".index(value.type) > "bif".index(own.type):
            fail(f"{name} would change {target.dtype} in place to {value.dtype}")
        if value.dtype != target.dtype:
            arguments = [value, target.dtype]
            value = self.values.elementwise("to", torch.Tensor.to, arguments, {}, [value])
        target._attn = value
        return target


_PLAIN = bool, int, float, str, type, torch.dtype, torch.SymInt, torch.SymFloat
_SAME = frozenset(("to", "type", "type_as", "contiguous", *CONVERSIONS))


def _check_takes(name: str, function: Any, count: int) -> None:
    """Refuses what cannot be called with `count` arguments, such as a mask_mod as a score_mod."""
    try:
        inspect.signature(function).bind(*range(count))
    except ValueError:  # a builtin that does not tell
        pass
    except TypeError:
        arguments = "b, h, q_idx, kv_idx" if count == 4 else "score, b, h, q_idx, kv_idx"
        what = getattr(function, "__qualname__", repr(function))
        raise TypeError(
            f"torch_attn.flex_attention: {name} is {what}; it must be a function of {arguments}. "
            "score_mod(score, b, h, q_idx, kv_idx) comes before block_mask, which may be a "
            "mask_mod(b, h, q_idx, kv_idx)"
        ) from None
