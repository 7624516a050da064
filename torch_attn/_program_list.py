"""The operations of the pair of a score program: rules that turn PyTorch's calls into a list.

`_programs.py` runs the user's function. Every call on a value of the pair arrives here, where a
rule of the called function's name and signature adds operations to the list.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["DISTANCE", "HEAD", "KEY", "PAIR", "RULES", "ROW", "List", "Value", "letter"]

# What a value depends on: head (b, h), row (b, h, i), key (b, h, j), distance (b, h, i - j), pair.
HEAD, ROW, KEY, DISTANCE, PAIR = range(5)
LEAVES = {ROW: "row", KEY: "key", DISTANCE: "distance"}

Number = bool | int | float


class Value:
    """A number, or a tensor of numbers, that the user's function computes for every pair.

    Attributes:
        kind: HEAD, ROW, KEY, DISTANCE or PAIR.
        dtype, shape: what the user's function sees: `()` for a number.
        tensor: the numbers, `[B|1, H|1, N|1, *shape]`; N is L, S or L + S - 1 by `kind`. None for
            PAIR, and for `lookup` until somebody reads it.
        node: of a PAIR: its place in the list.
        affine: (a, b, c) if the value is a i + b j + c; c is an int or a whole HEAD tensor.
        lookup: a table and, for each of its dimensions, a Value that indexes it or None.
        constant: a number that the function itself made.
        limits: the smallest and the largest number, where they are known.
        serial: distinguishes values.
    """

    __slots__ = (
        *("kind", "dtype", "shape", "tensor", "node"),
        *("affine", "lookup", "constant", "limits", "serial"),
    )

    def __init__(
        self,
        serial: int,
        kind: int,
        dtype: torch.dtype,
        shape: tuple[int, ...] = (),
        tensor: Tensor | None = None,
        node: int = -1,
        affine: tuple[int, int, Any] | None = None,
        constant: bool = False,
        limits: tuple[int, int] | None = None,
    ) -> None:
        self.serial, self.kind, self.dtype, self.shape = serial, kind, dtype, shape
        self.tensor, self.node, self.affine = tensor, node, affine
        self.constant, self.limits = constant, limits
        self.lookup: tuple[Tensor, list[Value | None]] | None = None


def letter(dtype: torch.dtype) -> str:
    """The type of the list for a dtype: f, i or b."""
    return "f" if dtype.is_floating_point else "b" if dtype == torch.bool else "i"


def result_type(*arguments: Value | Number) -> torch.dtype:
    """PyTorch's type promotion for 0-d tensors and Python's numbers."""
    dtypes = [x.dtype for x in arguments if isinstance(x, Value)]
    dtype = functools.reduce(torch.promote_types, dtypes, torch.bool)
    if any(isinstance(x, float) for x in arguments) and not dtype.is_floating_point:
        return torch.get_default_dtype()
    if dtype == torch.bool and any(type(x) is int for x in arguments):
        return torch.int64
    return dtype


class List:
    """The list of operations, shared by the score and the mask; equal operations are one.

    Args:
        dtype: of leaves that are not whole: float32 or float64.
        compiling: numbers cannot be read while `torch.compile` traces.
    """

    def __init__(self, dtype: torch.dtype, compiling: bool) -> None:
        self.dtype, self.compiling = dtype, compiling
        self.nodes: list[tuple[Any, ...]] = []
        self.places: dict[tuple[Any, ...], int] = {}
        self.leaves: dict[tuple[str, int], Tensor] = {}  # by type and serial
        self.count = 0

    def value(self, kind: int, dtype: torch.dtype, **fields: Any) -> Value:
        self.count += 1
        return Value(self.count, kind, dtype, **fields)

    def add(self, type_: str, name: str, *operands: Any) -> int:
        """The place of an operation, after what is exact for every number: x 1, + 0, where."""
        x, *rest = operands or (None,)
        y = self.nodes[rest[0]] if rest and type(rest[0]) is int and name != "const" else ()
        if y[1:2] == ("const",):
            neutral = {"mul": 1, "div": 1, "sub": 0, "floor_divide": 1}
            if type_ == "i":
                neutral["add"] = 0
            if y[2] == neutral.get(name) and math.copysign(1, y[2]) > 0:
                return x  # type: ignore[no-any-return]
        if name == "where":
            if self.nodes[x][1] == "const":
                return rest[0] if self.nodes[x][2] else rest[1]  # type: ignore[no-any-return]
            if rest[0] == rest[1]:
                return rest[0]  # type: ignore[no-any-return]
        # Type and sign tell 1 from True and 0.0 from -0.0.
        node = (type_, name, *operands)
        key = (*node, str(x)) if name == "const" else node
        place = self.places.get(key)
        if place is None:
            place = self.places[key] = len(self.nodes)
            self.nodes.append(node)
        return place

    def operand(self, x: Value | Number, type_: str) -> int:
        """The place of a value or number as an operand of a type."""
        if not isinstance(x, Value):
            return self.add(type_, "const", {"f": float, "i": int, "b": bool}[type_](x))
        if x.kind == PAIR:
            have = letter(x.dtype)
            name = {"f": "float", "i": "int", "b": "bool"}[type_]
            return x.node if have == type_ else self.add(type_, name, x.node)
        assert x.tensor is not None
        if x.constant and not self.compiling:
            return self.operand(x.tensor.item(), type_)
        if type_ == "i" and x.affine in ((1, 0, 0), (0, 1, 0)):
            return self.add("i", "query" if x.kind == ROW else "key_index")
        tensor = x.tensor
        if type_ == "f" and tensor.dtype != self.dtype:
            tensor = tensor.to(self.dtype)
        elif type_ == "b" and tensor.dtype != torch.bool:
            tensor = tensor != 0
        elif type_ == "i" and x.dtype.is_floating_point:
            tensor = tensor.to(torch.int64)
        # The same column holds a boolean and its 0 or 1.
        stored = "i" if x.dtype == torch.bool and type_ != "f" else type_
        self.leaves.setdefault((stored, x.serial), tensor)
        return self.add(type_, LEAVES.get(x.kind, "row"), (stored, x.serial))

    def operation(self, dtype: torch.dtype, name: str, *operands: Value | Number) -> Value:
        """Adds an operation whose operands have the type of its result."""
        type_ = letter(dtype)
        return self.result(dtype, name, *(self.operand(x, type_) for x in operands))

    def result(self, dtype: torch.dtype, name: str, *operands: int) -> Value:
        return self.value(PAIR, dtype, node=self.add(letter(dtype), name, *operands))

    def text(self, result: int, column: Callable[[str, int, str], int]) -> str:
        """The string of the operations that `result` needs.

        Args:
            result: the place of the returned value.
            column: gives the column of a leaf from its kind, serial and stored type.
        """
        needed = {result}
        for place in range(result, -1, -1):
            node = self.nodes[place]
            if place in needed and node[1] != "const" and type(node[-1]) is int:
                needed.update(node[2:])
        number = {place: n for n, place in enumerate(sorted(needed))}
        lines = ["attn.program 1"]
        for place in number:
            type_, name, *operands = self.nodes[place]
            if name == "const":
                words = [_constant(operands[0], type_)]
            elif operands and type(operands[0]) is tuple:
                words = [str(column(name, operands[0][1], operands[0][0]))]
            else:
                words = [f"%{number[x]}" for x in operands]
            lines.append(" ".join([f"%{number[place]}", type_, name, *words]))
        return "\n".join([*lines, f"return %{number[result]}"]) + "\n"


def _constant(x: Number, type_: str) -> str:
    return (float(x).hex() if math.isfinite(x) else str(x)) if type_ == "f" else str(int(x))


# Rules: a function of the list and of the arguments that PyTorch's function of that name takes.
Rule = Callable[..., Value]
RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def _narrow(dtype: torch.dtype) -> bool:
    return dtype in (torch.uint8, torch.int8, torch.int16)


@_rule("add")
def add(ops: List, input: Any, other: Any, *, alpha: Any = 1) -> Value:
    return _arithmetic(ops, "add", input, other if alpha == 1 else mul(ops, other, alpha))


@_rule("sub", "subtract")
def sub(ops: List, input: Any, other: Any, *, alpha: Any = 1) -> Value:
    return _arithmetic(ops, "sub", input, other if alpha == 1 else mul(ops, other, alpha))


@_rule("mul", "multiply")
def mul(ops: List, input: Any, other: Any) -> Value:
    return _arithmetic(ops, "mul", input, other)


@_rule("minimum")
def minimum(ops: List, input: Any, other: Any) -> Value:
    return _arithmetic(ops, "minimum", input, other)


@_rule("maximum")
def maximum(ops: List, input: Any, other: Any) -> Value:
    return _arithmetic(ops, "maximum", input, other)


def _arithmetic(ops: List, name: str, x: Any, y: Any) -> Value:
    dtype = result_type(x, y)
    if _narrow(dtype) and name in ("add", "sub", "mul"):
        raise NotImplementedError(f"{name} in {dtype}, which wraps around; call .int() first")
    if dtype == torch.bool:
        if name == "sub":
            raise TypeError("sub of two booleans, which PyTorch refuses too; use ^")
        name = {"add": "or", "maximum": "or", "mul": "and", "minimum": "and"}[name]
    return ops.operation(dtype, name, x, y)


@_rule("div", "divide", "true_divide")
def div(ops: List, input: Any, other: Any, *, rounding_mode: str | None = None) -> Value:
    if rounding_mode == "floor":
        return floor_divide(ops, input, other)
    if rounding_mode is not None:
        raise NotImplementedError(f'div(rounding_mode="{rounding_mode}")')
    dtype = result_type(input, other)
    dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
    return ops.operation(dtype, "div", input, other)


@_rule("floor_divide")
def floor_divide(ops: List, input: Any, other: Any) -> Value:
    dtype = result_type(input, other)
    if letter(dtype) == "f":
        return ops.operation(dtype, "floor", ops.operation(dtype, "div", input, other))
    return ops.operation(dtype, "floor_divide", input, other)


@_rule("remainder")
def remainder(ops: List, input: Any, other: Any) -> Value:
    dtype = result_type(input, other)
    if letter(dtype) == "f":
        return sub(ops, input, mul(ops, floor_divide(ops, input, other), other))
    return ops.operation(dtype, "remainder", input, other)


@_rule("neg", "negative")
def neg(ops: List, input: Any) -> Value:
    return ops.operation(input.dtype, "neg", input)


@_rule("abs", "absolute")
def abs_(ops: List, input: Any) -> Value:
    return ops.operation(input.dtype, "abs", input)


def _of_float(name: str) -> Rule:
    def rule(ops: List, input: Any) -> Value:
        dtype = input.dtype if letter(input.dtype) == "f" else torch.get_default_dtype()
        return ops.operation(dtype, name, input)

    return rule


for _name in ("reciprocal sqrt rsqrt exp exp2 log log1p tanh sigmoid").split():
    RULES[_name] = _of_float(_name)


@_rule("floor")
def floor(ops: List, input: Any) -> Value:
    return ops.operation(input.dtype, "floor", input) if letter(input.dtype) == "f" else input


@_rule("square")
def square(ops: List, input: Any) -> Value:
    return power(ops, input, 2)


@_rule("pow")
def power(ops: List, input: Any, exponent: Any) -> Value:
    if isinstance(input, Value) and isinstance(exponent, int | float):
        if exponent == 2:
            is_float = letter(input.dtype) == "f"
            return (
                ops.operation(input.dtype, "square", input) if is_float else mul(ops, input, input)
            )
        if exponent in (0.5, -0.5, -1):
            return RULES[{0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}[exponent]](ops, input)
    elif isinstance(input, int | float) and input == 2 and letter(exponent.dtype) == "f":
        return ops.operation(exponent.dtype, "exp2", exponent)
    raise NotImplementedError("pow (other than x ** 2, 0.5, -0.5, -1, and 2 ** x of a float x)")


@_rule("clamp", "clip")
def clamp(ops: List, input: Any, min: Any = None, max: Any = None) -> Value:
    dtype = result_type(*(x for x in (input, min, max) if x is not None))
    if letter(dtype) == "f":
        least, most = -math.inf if min is None else min, math.inf if max is None else max
        return ops.operation(dtype, "clamp", input, least, most)
    # A whole number has no infinity that stands for an absent bound.
    if min is not None and max is not None:
        return ops.operation(dtype, "clamp", input, min, max)
    if min is not None:
        return ops.operation(dtype, "maximum", input, min)
    return ops.operation(dtype, "minimum", input, max)


@_rule("clamp_min")
def clamp_min(ops: List, input: Any, min: Any) -> Value:
    return clamp(ops, input, min)


@_rule("clamp_max")
def clamp_max(ops: List, input: Any, max: Any) -> Value:
    return clamp(ops, input, None, max)


@_rule("relu")
def relu(ops: List, input: Any, inplace: bool = False) -> Value:
    # PyTorch's gradient at 0 is 0, that of maximum a half.
    return where(ops, compare(ops, "gt", input, 0), input, 0)


def compare(ops: List, name: str, x: Any, y: Any) -> Value:
    type_ = "f" if letter(result_type(x, y)) == "f" else "i"
    return ops.result(torch.bool, name, ops.operand(x, type_), ops.operand(y, type_))


def _comparison(name: str) -> Rule:
    def rule(ops: List, input: Any, other: Any) -> Value:
        return compare(ops, name, input, other)

    return rule


for _names in ("eq", "ne not_equal", "lt less", "le less_equal", "gt greater", "ge greater_equal"):
    _rule(*_names.split())(_comparison(_names[:2]))


def _bitwise(name: str, logical: bool) -> Rule:
    def rule(ops: List, input: Any, *other: Any) -> Value:
        dtype = torch.bool if logical else result_type(input, *other)
        if letter(dtype) == "f":
            raise TypeError(f"bitwise {name} of a number that is not whole")
        return ops.operation(dtype, name, input, *other)

    return rule


for _name in ("and", "or", "xor", "not"):
    RULES[f"bitwise_{_name}"] = _bitwise(_name, False)
    RULES[f"logical_{_name}"] = _bitwise(_name, True)


@_rule("where")
def where(ops: List, condition: Any, input: Any, other: Any) -> Value:
    numbers = [x for x in (input, other) if not isinstance(x, Value)]
    dtype = result_type(input, other) if len(numbers) < 2 else torch.tensor(sum(numbers)).dtype
    operands = [ops.operand(x, letter(dtype)) for x in (input, other)]
    return ops.result(dtype, "where", ops.operand(condition, "b"), *operands)


@_rule("masked_fill")
def masked_fill(ops: List, input: Any, mask: Any, value: Any) -> Value:
    operands = [ops.operand(x, letter(input.dtype)) for x in (value, input)]
    return ops.result(input.dtype, "where", ops.operand(mask, "b"), *operands)


def _convert(ops: List, x: Value, dtype: torch.dtype) -> Value:
    return ops.value(PAIR, dtype, node=ops.operand(x, letter(dtype)), affine=None)


@_rule("to", "type")
def to(ops: List, input: Any, *arguments: Any, dtype: Any = None, **_: Any) -> Value:
    for x in (dtype, *arguments):
        if isinstance(x, torch.dtype | Value):
            return _convert(ops, input, x.dtype if isinstance(x, Value) else x)
    return input  # type: ignore[no-any-return]


@_rule("type_as")
def type_as(ops: List, input: Any, other: Any) -> Value:
    return _convert(ops, input, other.dtype)


@_rule("clone", "contiguous")
def clone(ops: List, input: Any, **_: Any) -> Value:
    return input  # type: ignore[no-any-return]


def _conversions() -> Iterator[tuple[str, torch.dtype]]:
    yield from {"float": torch.float32, "double": torch.float64, "half": torch.float16}.items()
    yield from {"bfloat16": torch.bfloat16, "long": torch.int64, "int": torch.int32}.items()
    yield from {"bool": torch.bool, "short": torch.int16}.items()


for _name, _dtype in _conversions():
    RULES[_name] = functools.partial(
        lambda ops, input, dtype: _convert(ops, input, dtype), dtype=_dtype
    )
