"""The rules, which write PyTorch's functions of values of the pair into the list of operations.

`RULES` maps the name of a PyTorch function to a rule. A rule takes the list and PyTorch's
arguments, by PyTorch's names, and returns a Value of kind PAIR.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from torch_attn._programs.list import List
from torch_attn._programs.value import PAIR, Value, letter, promoted


class Operations(List):
    """The list of operations, to which PyTorch's functions can be added."""

    def of(self, name: str, *operands: Any, **named: Any) -> Value:
        """Adds the operations of PyTorch's function `name`."""
        return RULES[name](self, *operands, **named)


def _simple(name: str, of_booleans: str = "", floating: bool = False) -> Callable[..., Value]:
    """Makes a rule whose operands and result have the dtype to which PyTorch promotes the operands.

    With `floating`, a Python float takes part in the promotion, so the dtype is floating.
    """
    bitwise = name in ("and", "or", "xor", "not", "shift_left", "shift_right")

    def rule(
        ops: Operations, *operands: Any, input: Any = None, other: Any = None, alpha: Any = 1
    ) -> Value:
        for x in (input, other):
            operands = operands if x is None else (*operands, x)
        if not (type(alpha) is int and alpha == 1):  # of add and sub
            operands = operands[0], ops.of("mul", operands[1], alpha)
        dtype = promoted(*operands, 1.0) if floating else promoted(*operands)
        if dtype.is_floating_point:
            if bitwise:
                raise NotImplementedError(f"bitwise {name} of floating numbers")
            return ops.operation(dtype, name, *operands)
        if dtype in _NARROW:
            raise NotImplementedError(f"{name} in {dtype}, which wraps around; call .int() first")
        if dtype is torch.bool and not of_booleans:
            raise NotImplementedError(f"{name} of booleans; call .int() first")
        return ops.operation(dtype, of_booleans if dtype is torch.bool else name, *operands)

    return rule


def _compare(name: str) -> Callable[..., Value]:
    def rule(ops: Operations, input: Any, other: Any) -> Value:
        type_ = "f" if promoted(input, other).is_floating_point else "i"
        node = ops.add("b", name, ops.node_of(input, type_), ops.node_of(other, type_))
        return ops.value(PAIR, torch.bool, node=node)

    return rule


def _logical(name: str) -> Callable[..., Value]:
    return lambda ops, *operands: ops.operation(torch.bool, name, *operands)


def _div(ops: Operations, input: Any, other: Any, *, rounding_mode: str | None = None) -> Value:
    if rounding_mode == "floor":
        return ops.of("floor_divide", input, other)
    if rounding_mode == "trunc" and not promoted(input, other).is_floating_point:
        return ops.of("floor_divide", ops.of("sub", input, ops.of("fmod", input, other)), other)
    quotient = _simple("div", floating=True)(ops, input, other)
    return ops.of("trunc", quotient) if rounding_mode else quotient


def _rounds(name: str) -> Callable[..., Value]:
    """Makes a rule that rounds to a whole number, or to some decimals."""

    def rule(ops: Operations, input: Value, *, decimals: int = 0) -> Value:
        if letter(input.dtype) != "f":
            return input
        if decimals:
            scale, inverse = ("mul", "div") if decimals > 0 else ("div", "mul")
            scaled = ops.of(scale, input, 10.0 ** abs(decimals))
            return ops.of(inverse, ops.of(name, scaled), 10.0 ** abs(decimals))
        return _simple(name)(ops, input)

    return rule


def _square(ops: Operations, input: Value) -> Value:
    if input.type == "b":
        input = _converted(ops, input, torch.int64)
    floating = letter(input.dtype) == "f"
    return _simple("square")(ops, input) if floating else ops.of("mul", input, input)


def _pow(ops: Operations, input: Any, exponent: Any) -> Value:
    if type(input) in (int, float) and input == 2 and letter(exponent.dtype) == "f":
        return ops.of("exp2", exponent)
    if type(exponent) is float and input.type != "f":
        input = _converted(ops, input, torch.get_default_dtype())
    if promoted(input, exponent).is_floating_point:
        names = {1: "clone", 2: "square", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
        if type(exponent) is not Value and exponent in names:
            return ops.of(names[exponent], input)
        if type(exponent) is not Value and exponent == 3:
            return ops.of("mul", _square(ops, input), input)
        return _simple("pow")(ops, input, exponent)
    if type(exponent) is not int or exponent < 1:
        raise NotImplementedError("pow of whole numbers but x ** n, where n is a positive constant")
    if exponent == 2:
        return _square(ops, input)
    root = input if exponent == 1 else _pow(ops, _square(ops, input), exponent // 2)
    return ops.of("mul", root, input) if exponent % 2 and exponent > 1 else root


def _sign(ops: Operations, input: Value) -> Value:
    if letter(input.dtype) != "f":
        return ops.of("clamp", input, -1, 1)
    is_negative, is_positive = ops.of("lt", input, 0), ops.of("gt", input, 0)
    return _where(ops, is_positive, 1, _where(ops, is_negative, -1, 0, input.dtype), input.dtype)


def _clamp(ops: Operations, input: Any, min: Any = None, max: Any = None) -> Value:
    dtype = promoted(*(x for x in (input, min, max) if x is not None))
    if letter(dtype) != "f" and (min is None or max is None):  # infinity is no whole number
        name = "maximum" if max is None else "minimum"
        return ops.operation(dtype, name, input, min if max is None else max)
    least, most = -math.inf if min is None else min, math.inf if max is None else max
    return ops.operation(dtype, "clamp", input, least, most)


def _where(ops: Operations, condition: Any, input: Any, other: Any, dtype: Any = None) -> Value:
    dtype = dtype or promoted(input, other)
    chooser = ops.node_of(condition, "b")
    x, y = (ops.node_of(v, letter(dtype)) for v in (input, other))
    word = ops.words.get(chooser)
    if word or x == y:
        chosen = y if word == "0" else x
    else:
        chosen = ops.add(letter(dtype), "where", chooser, x, y)
    value = ops.value(PAIR, dtype, node=chosen)
    of = [ops.limits(v) for v in (input, other)]
    return ops.bounded(value, "where", of) if letter(dtype) == "i" else value


def _relu(ops: Operations, input: Value, inplace: bool = False) -> Value:
    # PyTorch's gradient of relu at 0 is 0. The gradient of maximum would be 1/2. A NaN stays.
    return _where(ops, ops.of("le", input, 0), 0, input)


def _hardtanh(
    ops: Operations, input: Value, min_val: float = -1, max_val: float = 1, inplace: bool = False
) -> Value:
    # The gradient at a bound is 0, and that of clamp would be 1.
    below = _where(ops, ops.of("ge", input, max_val), max_val, input)
    return _where(ops, ops.of("le", input, min_val), min_val, below)


def _gelu(ops: Operations, input: Value, approximate: str = "none") -> Value:
    # 1 + erf and 1 + tanh would round to 0 where the input is far below 0.
    if approximate == "none":
        half = ops.of("mul", input, 0.5)
        return ops.of("mul", half, ops.of("erfc", ops.of("mul", input, -math.sqrt(0.5))))
    cube = ops.of("mul", ops.of("square", input), ops.of("mul", input, 0.044715))
    inner = ops.of("mul", ops.of("add", input, cube), math.sqrt(8 / math.pi))
    return ops.of("mul", input, ops.of("sigmoid", inner))


def _leaky_relu(
    ops: Operations, input: Value, negative_slope: float = 0.01, inplace: bool = False
) -> Value:
    return _where(ops, ops.of("gt", input, 0), input, ops.of("mul", input, negative_slope))


def _elu(
    ops: Operations, input: Value, alpha: Any = 1, inplace: bool = False, *, scale: float = 1
) -> Value:
    factor = ops.of("mul", alpha, scale) if type(alpha) is Value else alpha * scale
    below = ops.of("mul", ops.of("expm1", input), factor)
    above = ops.of("mul", input, scale)
    if type(alpha) is Value or alpha != 1:
        # PyTorch's gradient at 0 is alpha * scale, as below 0, and its second derivative is 0.
        at_0 = ops.of("mul", input, factor)
        above = _where(ops, ops.of("gt", input, 0), above, at_0)
    return _where(ops, ops.of("lt", input, 0), below, above)


def _celu(ops: Operations, input: Value, alpha: float = 1, inplace: bool = False) -> Value:
    below = ops.of("mul", ops.of("expm1", ops.of("div", input, alpha)), alpha)
    return _where(ops, ops.of("lt", input, 0), below, input)


def _softplus(ops: Operations, input: Value, beta: float = 1, threshold: float = 20) -> Value:
    scaled = input if beta == 1 else ops.of("mul", input, beta)
    soft = ops.of("log1p", ops.of("exp", scaled))
    return _where(
        ops,
        ops.of("gt", scaled, threshold),
        input,
        soft if beta == 1 else ops.of("div", soft, beta),
    )


def _logaddexp(ops: Operations, input: Any, other: Any) -> Value:
    # Each case has its own derivatives, so that they are right where both are equal.
    def above(x: Any, y: Any) -> Value:
        return ops.of("add", x, ops.of("log1p", ops.of("exp", ops.of("sub", y, x))))

    found = _where(ops, ops.of("lt", input, other), above(other, input), above(input, other))
    is_infinite = ops.of("logical_and", ops.of("eq", input, other), ops.of("isinf", input))
    return _where(ops, is_infinite, input, found)


def _logsigmoid(ops: Operations, input: Value) -> Value:
    # As of logaddexp.
    above = ops.of("neg", ops.of("log1p", ops.of("exp", ops.of("neg", input))))
    below = ops.of("sub", input, ops.of("log1p", ops.of("exp", input)))
    return _where(ops, ops.of("lt", input, 0), below, above)


def _lerp(ops: Operations, input: Any, end: Any, weight: Any) -> Value:
    difference = ops.of("sub", end, input)
    near = ops.of("add", input, ops.of("mul", weight, difference))
    rest = ops.of("sub", 1, weight) if type(weight) is Value else 1 - weight
    far = ops.of("sub", end, ops.of("mul", difference, rest))
    if type(weight) is not Value:
        return near if abs(weight) < 0.5 else far
    return _where(ops, ops.of("lt", ops.of("abs", weight), 0.5), near, far)


def _with(name: str) -> Callable[..., Value]:
    """Makes the rule of addcmul and addcdiv."""
    return lambda ops, input, tensor1, tensor2, *, value=1: ops.of(
        "add", input, ops.of(name, tensor1, tensor2), alpha=value
    )


_DTYPES = "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool"
_BY_NAME = {
    torch.empty(0, dtype=dtype).type(): dtype
    for dtype in (getattr(torch, name) for name in _DTYPES.split())
}


def _to(ops: Operations, input: Value, *arguments: Any, dtype: Any = None, **_: Any) -> Value:
    for x in (*arguments, dtype):
        target = x.dtype if isinstance(x, Value) else _BY_NAME.get(str(x), x)
        if isinstance(target, torch.dtype):
            return _converted(ops, input, target)
        if isinstance(x, type):  # torch.IntTensor
            return _to(ops, input, f"{x.__module__}.{x.__name__}")
        if isinstance(x, str) and x.endswith("Tensor"):
            raise NotImplementedError(f"a conversion to {x}")
    return input


def _type(ops: Operations, input: Value, dtype: Any = None, non_blocking: bool = False) -> Value:
    if dtype is None:
        raise NotImplementedError("type() without a dtype; ask for its dtype")
    return _to(ops, input, dtype)


def _converted(ops: Operations, input: Value, dtype: torch.dtype) -> Value:
    type_ = letter(dtype)
    node = ops.node_of(input, type_)
    if type_ == "f":
        kept = ops.dtype, input.dtype, torch.float64  # rounds nothing, or less than the list does
        limits, exact = ops.limits(input), int(2 / torch.finfo(dtype).eps)
        is_exact = limits is not None and -exact <= limits[0] and limits[1] <= exact
        is_exact = is_exact or (dtype == torch.float32 and input.dtype in _HALF)
        if dtype not in kept and not is_exact:
            node = ops.add("f", str(dtype).removeprefix("torch."), node)
        return ops.value(PAIR, dtype, node=node)
    value = ops.value(PAIR, dtype, node=node, limits=ops.limits(input))
    if type_ == "b" or (letter(input.dtype) == "f" and dtype in (torch.int32, torch.int64)):
        return value  # PyTorch leaves open what becomes of a number beyond the dtype
    value = ops.narrowed(value)
    value.affine = input.affine if value.node == node else None
    return value


def _converts(dtype: torch.dtype) -> Callable[..., Value]:
    return lambda ops, input: _converted(ops, input, dtype)


_NARROW = torch.uint8, torch.int8, torch.int16
_HALF = torch.float16, torch.bfloat16
_SELU = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946
_FLOATING = (
    "reciprocal sqrt rsqrt exp exp2 expm1 log log1p log2 log10 tanh sigmoid erf erfc sin cos tan "
    "asin acos atan atan2 sinh cosh asinh acosh atanh"
)
_CONVERTS = (
    "float:float32 double:float64 half:float16 bfloat16:bfloat16 long:int64 int:int32 "
    "short:int16 char:int8 byte:uint8 bool:bool"
)
_COMPARES = {name: _compare(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
CONVERSIONS = dict(pair.split(":") for pair in _CONVERTS.split())
RULES: dict[str, Callable[..., Value]] = {
    "add": _simple("add", "or"),
    "sub": _simple("sub"),
    "mul": _simple("mul", "and"),
    "minimum": _simple("minimum", "and"),
    "maximum": _simple("maximum", "or"),
    "abs": _simple("abs"),
    "neg": _simple("neg"),
    "div": _div,
    **{name: _rounds(name) for name in ("floor", "ceil", "trunc", "round")},
    **{name: _simple(name) for name in ("floor_divide", "remainder", "fmod")},
    "frac": lambda ops, input: ops.of("sub", input, ops.of("trunc", input)),
    **dict.fromkeys(("sign", "sgn"), _sign),
    "square": _square,
    "pow": _pow,
    **{name: _simple(name, floating=True) for name in _FLOATING.split()},
    **_COMPARES,
    **{f"bitwise_{name}": _simple(name, name) for name in ("and", "or", "xor", "not")},
    **{f"bitwise_{side}_shift": _simple(f"shift_{side}") for side in ("left", "right")},
    **{f"logical_{name}": _logical(name) for name in ("and", "or", "xor", "not")},
    "isnan": lambda ops, input: ops.of("ne", input, input),
    "isinf": lambda ops, input: ops.of("eq", ops.of("abs", input), math.inf),
    "isfinite": lambda ops, input: ops.of("lt", ops.of("abs", input), math.inf),
    "relu": _relu,
    "relu6": lambda ops, input, inplace=False: _hardtanh(ops, input, 0, 6),
    "hardtanh": _hardtanh,
    "gelu": _gelu,
    "silu": lambda ops, input, inplace=False: ops.of("mul", input, ops.of("sigmoid", input)),
    "mish": lambda ops, input, inplace=False: ops.of(
        "mul", input, ops.of("tanh", _softplus(ops, input))
    ),
    "leaky_relu": _leaky_relu,
    "elu": _elu,
    "selu": lambda ops, input, inplace=False: _elu(ops, input, _SELU[0], scale=_SELU[1]),
    "celu": _celu,
    "softplus": _softplus,
    "logsigmoid": _logsigmoid,
    "softsign": lambda ops, input: ops.of("div", input, ops.of("add", ops.of("abs", input), 1)),
    "tanhshrink": lambda ops, input: ops.of("sub", input, ops.of("tanh", input)),
    "logaddexp": _logaddexp,
    "lerp": _lerp,
    "addcmul": _with("mul"),
    "addcdiv": _with("div"),
    "where": _where,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda ops, input, max: _clamp(ops, input, None, max),
    "masked_fill": lambda ops, input, mask, value: _where(ops, mask, value, input, input.dtype),
    **dict.fromkeys(("to", "type_as", "clone", "contiguous"), _to),
    "type": _type,
    **{name: _converts(getattr(torch, dtype)) for name, dtype in CONVERSIONS.items()},
}
_ALIASES = (
    "subtract:sub multiply:mul divide:div true_divide:div negative:neg absolute:abs clip:clamp "
    "fix:trunc expit:sigmoid arcsin:asin arccos:acos arctan:atan arctan2:atan2 arcsinh:asinh "
    "arccosh:acosh arctanh:atanh"
)
for _alias in f"{_ALIASES} not_equal:ne less:lt less_equal:le greater:gt greater_equal:ge".split():
    RULES[_alias.partition(":")[0]] = RULES[_alias.partition(":")[2]]
COMPARISONS = frozenset(name for name, rule in RULES.items() if rule in _COMPARES.values())
