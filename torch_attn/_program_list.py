"""The list of operations of a score program, and the rules that write PyTorch's calls into it.

`_program_trace.py` runs the user's functions and sees their calls of PyTorch. If the result of a
call has the kind PAIR, a rule of this module writes the call into the list. `RULES` maps the name
of a PyTorch function to our rule. The rule takes the list and the arguments of that function.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

# The kind of a value says what the value depends on: head (b, h), row (b, h, i), key (b, h, j),
# distance (b, h, i - j), or pair (b, h, i, j). A value of kind HEAD is stored as a row term.
HEAD, ROW, KEY, DISTANCE, PAIR = range(5)
_LEAF = "row", "row", "key", "distance"


class Value:
    """A number, or a tensor of numbers, that the user's function computes for every pair."""

    make: Callable[[], Tensor] | None = None  # computes `tensor` when it is read
    made: Tensor | None = None
    shape: tuple[int, ...] = ()
    node: int = -1  # the place in the list, if kind is PAIR
    affine: tuple[int, int, Any] | None = None  # a i + b j + c; c: an int or a tensor of HEAD
    constant: bool = False  # the function made it without captured tensors
    unrounded: Tensor | None = None  # `tensor` before it was rounded to `dtype`, if it was
    limits: tuple[int, int] | None = None  # least and largest number, if they are known
    lookup: tuple[Tensor, list[Value | None]] | None = None  # a table, and an index per dimension
    number: Any = None  # Python's number for which the value stands, see Tracer.symbolic()

    def __init__(self, serial: int, kind: int, dtype: torch.dtype, type_: str) -> None:
        self.serial = serial  # unique
        self.kind = kind
        self.dtype = dtype  # the function sees dtype and shape, which is () for a number
        self.type = type_  # letter(dtype)

    @property
    def tensor(self) -> Tensor:
        """The numbers, `[B|1, H|1, N|1, *shape]`, where the kind says if N is L, S or L + S - 1.

        A Value of kind PAIR has no such tensor.
        """
        if self.made is None:
            assert self.make is not None
            self.made = self.make()
            if self.made.dtype != self.dtype:
                self.unrounded, self.made = self.made, self.made.to(self.dtype)
        return self.made


def letter(dtype: torch.dtype) -> str:
    """Returns the type of a dtype in the list: f (floating), i (whole number) or b (boolean)."""
    return "f" if dtype.is_floating_point else "b" if dtype is torch.bool else "i"


def together(values: Iterable[Value]) -> int:
    """Returns the kind of a value that is computed from these values.

    If all values have the kind HEAD, so has the result. If the remaining values have one kind, the
    result has it, too. If they have different kinds, the result has the kind PAIR.
    """
    kind = HEAD
    for x in values:
        if x.kind != kind and x.kind != HEAD:
            if kind != HEAD:
                return PAIR
            kind = x.kind
    return kind


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype is dtype else x.to(dtype)  # to() takes 3 us even if it changes nothing


_promote = functools.cache(torch.promote_types)


def promoted(*operands: Any) -> torch.dtype:
    """Returns the dtype to which PyTorch promotes these Values and Python's numbers."""
    dtype: Any = None
    number = 0  # 1: there is an int, 2: a float
    for x in operands:
        if type(x) is Value and x.number is None:
            if x.dtype is not dtype:
                dtype = _promote(dtype, x.dtype) if dtype else x.dtype
        elif type(x) is Value:
            number = 2 if number == 2 or x.type == "f" else 1
        elif type(x) is not bool:
            number = 2 if number == 2 or isinstance(x, float | torch.SymFloat) else 1
    if number == 2 and not (dtype and dtype.is_floating_point):
        return torch.get_default_dtype()
    return torch.int64 if number and dtype in (None, torch.bool) else dtype or torch.bool


def _word(x: Any, type_: str) -> str:
    """Returns the text that stands for a constant in the list."""
    if type_ != "f":
        whole = int(bool(x) if type_ == "b" else x)
        if type_ == "i" and whole != x:
            raise NotImplementedError(f"{x!r} as a whole number")
        return str(whole)
    return float(x).hex() if math.isfinite(x) else str(float(x))


Limits = tuple[int, int]


def _within(limits: Limits, bits: int) -> bool:
    most: int = 2 ** (bits - 1) - 1
    return -most - 1 <= limits[0] and limits[1] <= most


def _limits_of(name: str, of: list[Limits]) -> Limits | None:
    """Returns the limits of an operation on whole numbers with these limits; None if unknown."""
    (a, b), (c, d) = of[0], of[-1]
    if name == "add":
        return a + c, b + d
    if name == "sub":
        return a - d, b - c
    if name == "mul":
        products = a * c, a * d, b * c, b * d
        return min(products), max(products)
    if name == "neg":
        return -b, -a
    if name == "abs":
        return max(a, -b, 0), max(b, -a)
    if name == "minimum":
        return min(a, c), min(b, d)
    if name == "maximum":
        return max(a, c), max(b, d)
    if name == "clamp":
        (least, most), (c, d) = of[1:]
        return min(max(a, least), c), min(max(b, most), d)
    if name == "where":
        return min(a, c), max(b, d)
    if name == "remainder":
        return min(c + 1, 0), max(d - 1, 0)
    if name == "fmod":
        rest = max(abs(c), abs(d), 1) - 1
        return max(min(a, 0), -rest), min(max(b, 0), rest)
    if name == "floor_divide":
        divisors = [n for n in (c, d, -1, 1) if n and c <= n <= d]
        quotients = [x // n for x in (a, b) for n in divisors]
        if c <= 0 <= d:  # by 0: 0
            quotients.append(0)
        return min(quotients), max(quotients)
    if not all(type(x) is int for limits in of for x in limits):
        return None  # symbolic numbers have no bits
    if name in ("shift_left", "shift_right"):
        # A negative number, or more bits than there are, shifts all bits out.
        counts = [min(max(n, 0), 64) for n in (c, d)]
        shifted = [x << n if name == "shift_left" else x >> n for x in (a, b) for n in counts]
        return min(*shifted, -(a < 0)), max(*shifted, 0)
    if name == "not":
        return ~b, ~a
    if name == "and" and max(a, c) >= 0:
        return 0, min(x[1] for x in of if x[0] >= 0)
    power = 1 << max(abs(x) for limits in of for x in limits).bit_length()
    return 0 if min(a, c) >= 0 else -power, power - 1


_NEUTRAL = {  # x op constant is x, bit for bit
    *((name, "f", _word(1, "f")) for name in ("mul", "div")),
    *(("sub", "f", _word(0, "f")), ("add", "f", _word(-0.0, "f"))),
    *((name, "i", "1") for name in ("mul", "floor_divide")),
    *((name, "i", "0") for name in ("add", "sub", "or", "xor")),
    *(("or", "b", "0"), ("xor", "b", "0"), ("and", "b", "1")),
}
_SWAPS = frozenset(("add", "mul", "and", "or", "xor"))
_CONVERT = {"f": "float", "i": "int", "b": "bool"}


class List:
    """The operations of score_mod and mask_mod. Equal operations are stored once.

    A leaf is a number that the list reads from a tensor.

    Args:
        dtype: the dtype of floating leaves: float32 or float64.
        compiling: whether torch.compile is tracing. While it traces, the numbers of constants
            cannot be read, so constants become leaves.

    Attributes:
        in_mask: whether mask_mod is running, not score_mod.
        wide: the places whose whole numbers need 64 bits. Kernels have them in a mask_mod, and in
            a score_mod whose numbers are float64.
    """

    def __init__(self, dtype: torch.dtype, compiling: bool) -> None:
        self.dtype, self.compiling, self.in_mask = dtype, compiling, False
        self.wide: set[int] = set()
        self.nodes: dict[tuple[Any, ...], int] = {}  # from (type, name, operands...) to place
        self.words: dict[int, str] = {}  # the constant at a place
        self.leaves: dict[tuple[str, int], Tensor] = {}  # by stored type (t: a table) and serial
        self.count = 0

    def value(
        self, kind: int, dtype: torch.dtype, make: Any = None, node: int = -1, **fields: Any
    ) -> Value:
        self.count += 1
        value = Value(self.count, kind, dtype, letter(dtype))
        value.make, value.node = make, node
        for name, x in fields.items():
            setattr(value, name, x)
        return value

    def add(self, *node: Any) -> int:
        return self.nodes.setdefault(node, len(self.nodes))

    @property
    def bits(self) -> int:
        """The size of a whole number of the pair."""
        return 64 if self.in_mask or self.dtype == torch.float64 else 32

    def fit(self, limits: Limits, place: int) -> Limits | None:
        """Notes that place `place` has whole numbers within limits, which may be beyond 32 bits.

        Beyond 64 bits they wrap around, as PyTorch's do.
        """
        if _within(limits, 32):
            return limits
        if self.bits == 32:
            least, most = limits
            raise NotImplementedError(
                f"it has whole numbers from {least} to {most}, beyond the 32 bits of a score_mod; "
                "take the remainder of smaller numbers, or convert to floating numbers first"
            )
        self.wide.add(place)
        return limits if _within(limits, 64) else None

    def limits(self, x: Any) -> Limits | None:
        """Returns the least and the largest whole number of a value; None if they are unknown.

        If the limits are not known yet, this method reads the value's tensor, if that is possible.
        """
        if type(x) is not Value:
            return (int(x), int(x)) if type(x) in (int, bool) else None
        if x.type == "b":
            return 0, 1
        if x.type == "i" and x.limits is None and x.kind != PAIR:
            x.limits = self.limits_of(x.tensor)
        return x.limits

    def limits_of(self, numbers: Tensor) -> Limits | None:
        """Returns the least and the largest number of a tensor; None if they cannot be read."""
        if not self.compiling and numbers.numel():
            # Under torch.func.vmap the numbers cannot be read. index_select then checks the
            # indices.
            with contextlib.suppress(RuntimeError):
                least, most = numbers.detach().aminmax()
                return int(least), int(most)
        return None

    def place(self, x: Any, type_: str) -> int:
        """Converts a Value or a number to a type. Returns the place of the result in the list."""
        if type(x) is not Value:  # no isinstance() here: this runs for every operand
            word = _word(x, type_)
            place = self.add(type_, "const", word)
            self.words[place] = word
            if type_ == "i":
                self.fit((int(word), int(word)), place)
            return place
        have = x.type
        if x.kind == PAIR:
            return x.node if have == type_ else self.add(type_, _CONVERT[type_], x.node)
        if x.constant and not self.compiling:
            with contextlib.suppress(RuntimeError):  # a fake tensor has no number
                return self.place(x.tensor.item(), type_)
        a, b, c = x.affine or (0, 0, 0)
        if type_ == "i" and a + b == 1 and type(c) is int and c == 0:
            return self.add("i", "query" if a else "key_index")
        if type_ == "i" and x.dtype == torch.int64:
            limits = self.limits(x)
            if limits is not None and not _within(limits, 32):
                return self._wide_leaf(x, limits)
        # Booleans are stored as whole numbers, so that one column serves both types.
        stored = "i" if have == "b" and type_ == "b" else type_
        if (stored, x.serial) not in self.leaves:
            tensor = x.tensor if type_ != "b" or have == "b" else x.tensor != 0
            if type_ == "f" and x.unrounded is not None:
                tensor = x.unrounded
            tensor = as_dtype(tensor, self.dtype if type_ == "f" else torch.int32)
            self.leaves[stored, x.serial] = tensor
        return self.add(type_, _LEAF[x.kind], (stored, x.serial))

    def _wide_leaf(self, x: Value, limits: Limits) -> int:
        """Stores whole numbers of 64 bits as two leaves of 32 bits."""
        self.fit(limits, -1)  # an error in a score_mod of float32
        if x.node < 0:
            low = self.value(x.kind, torch.int32, make=lambda: x.tensor.to(torch.int32))
            high = self.value(x.kind, torch.int32, make=lambda: (x.tensor >> 32).to(torch.int32))
            places = [self.place(x, "i") for x in (high, low, 2**32, 2**32 - 1)]
            high_bits = self.add("i", "mul", places[0], places[2])
            low_bits = self.add("i", "and", places[1], places[3])
            x.node = self.add("i", "or", high_bits, low_bits)
        return x.node

    def reads(self, place: int, leaf: str) -> bool:
        nodes = list(self.nodes)
        needed = {place}
        for at in range(place, -1, -1):
            if at in needed:
                if nodes[at][1] == leaf:
                    return True
                needed.update(x for x in nodes[at][2:] if type(x) is int)
        return False

    def operation(self, dtype: torch.dtype, name: str, *operands: Any) -> Value:
        """Adds an operation. Converts its operands to the type of its result."""
        type_ = letter(dtype)
        places = [self.place(x, type_) for x in operands]
        node = -1
        if len(places) == 2:
            x, y = places
            if y in self.words and (name, type_, self.words[y]) in _NEUTRAL:
                node = x
            elif x in self.words and (name, type_, self.words[x]) in _NEUTRAL and name in _SWAPS:
                node = y
        value = self.value(PAIR, dtype, None, node if node >= 0 else self.add(type_, name, *places))
        if type_ == "i":
            return self.bounded(value, name, [self.limits(x) for x in operands])
        return value

    def bounded(self, value: Value, name: str, of: list[Limits | None]) -> Value:
        """Gives a whole number its limits. Makes it wrap around where PyTorch's number does."""
        known = [x for x in of if x is not None]
        if name in ("floor_divide", "remainder") and of[1] == (0, 0):
            raise NotImplementedError("its divisor is 0 for every pair")
        limits = _limits_of(name, known) if len(known) == len(of) else None
        if value.dtype == torch.int32 and (
            name == "mul" if limits is None else not _within(limits, 32)
        ):
            return self.narrowed(value) if self.bits == 64 else value
        if limits is not None:
            value.limits = self.fit(limits, value.node)
        elif name == "mul" and self.bits == 64:
            self.wide.add(value.node)
        return value

    def of(self, name: str, *operands: Any, **named: Any) -> Value:
        """Adds the operations of PyTorch's function `name`."""
        return RULES[name](self, *operands, **named)

    def narrowed(self, x: Value) -> Value:
        """Converts whole numbers to x.dtype, an integer dtype, as PyTorch does, by wrapping."""
        of = torch.iinfo(x.dtype)
        if x.dtype == torch.int64 or (x.limits and of.min <= x.limits[0] and x.limits[1] <= of.max):
            return x
        if x.dtype == torch.int32 and self.bits == 32:
            return x
        places = [self.place(n, "i") for n in (-of.min, 2**of.bits - 1)]
        node = self.add("i", "and", self.add("i", "add", x.node, places[0]), places[1])
        node = self.add("i", "sub", node, places[0])
        return self.value(PAIR, x.dtype, node=node, limits=(of.min, of.max))


@functools.lru_cache(maxsize=256)
def write(
    nodes: tuple[tuple[Any, ...], ...],
    results: tuple[int, ...],
    wide: tuple[frozenset[int], ...],
    dtype: torch.dtype,
) -> tuple[list[str], list[int], list[tuple[str, str, int]]]:
    """Returns a string for each result, with only the operations that the result needs.

    Returns:
        The strings; how many operations each string has; and the leaves that the strings read, each
        as (kind, stored type, serial). Leaves of the same kind become columns of tensors, in the
        order in which they are returned. Leaves of type f become columns of one tensor, and all
        other leaves columns of a second tensor.
    """
    texts, counts, columns = [], [], {}  # type: ignore[var-annotated]
    for result, places in zip(results, wide, strict=True):
        needed = {result}
        for place in range(result, -1, -1):
            if place in needed:
                needed.update(x for x in nodes[place][2:] if type(x) is int)
        is_wide = bool(needed & places)
        # Kernels evaluate a wide list in float64.
        rounds = is_wide and dtype == torch.float32
        number: dict[int, int] = {}
        lines, count = ["attn.program 1 wide" if is_wide else "attn.program 1"], 0
        for place in sorted(needed):
            type_, name, *operands = nodes[place]
            words = []
            for x in operands:
                if type(x) is tuple:
                    group = ("table", False) if x[0] == "t" else (name, x[0] == "f")
                    column = columns.setdefault(group, {})
                    x = column.setdefault(x, len(column))
                    words.append(str(x))
                elif type(x) is int:
                    words.append(f"%{number[x]}")
                else:
                    words.append(x)
            is_operation = any(type(x) is int for x in operands)
            count += is_operation
            number[place] = len(lines) - 1
            lines.append(" ".join([f"%{number[place]}", type_, name, *words]))
            if rounds and type_ == "f" and (is_operation or name == "const"):
                count += 1
                lines.append(f"%{number[place] + 1} f float32 %{number[place]}")
                number[place] += 1
        texts.append("\n".join([*lines, f"return %{number[result]}\n"]))
        counts.append(count)
    return texts, counts, [(kind, *leaf) for (kind, _), of in columns.items() for leaf in of]


# The rules. Each rule returns a Value of kind PAIR.


def _simple(name: str, of_booleans: str = "", floating: bool = False) -> Callable[..., Value]:
    """Makes a rule whose operands and result have the dtype to which PyTorch promotes the operands.

    With `floating`, a Python float takes part in the promotion, so the dtype is floating.
    """
    bitwise = name in ("and", "or", "xor", "not", "shift_left", "shift_right")

    def rule(
        ops: List, *operands: Any, input: Any = None, other: Any = None, alpha: Any = 1
    ) -> Value:
        for x in (input, other):
            operands = operands if x is None else (*operands, x)
        if not (type(alpha) is int and alpha == 1):  # of add and sub
            operands = operands[0], RULES["mul"](ops, operands[1], alpha)
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
    def rule(ops: List, input: Any, other: Any) -> Value:
        type_ = "f" if promoted(input, other).is_floating_point else "i"
        places = ops.place(input, type_), ops.place(other, type_)
        return ops.value(PAIR, torch.bool, node=ops.add("b", name, *places))

    return rule


def _logical(name: str) -> Callable[..., Value]:
    return lambda ops, *operands: ops.operation(torch.bool, name, *operands)


def _div(ops: List, input: Any, other: Any, *, rounding_mode: str | None = None) -> Value:
    if rounding_mode == "floor":
        return ops.of("floor_divide", input, other)
    if rounding_mode == "trunc" and not promoted(input, other).is_floating_point:
        return ops.of("floor_divide", ops.of("sub", input, ops.of("fmod", input, other)), other)
    quotient = _simple("div", floating=True)(ops, input, other)
    return ops.of("trunc", quotient) if rounding_mode else quotient


def _rounds(name: str) -> Callable[..., Value]:
    """Makes a rule that rounds to a whole number, or to some decimals."""

    def rule(ops: List, input: Value, *, decimals: int = 0) -> Value:
        if letter(input.dtype) != "f":
            return input
        if decimals:
            scale, inverse = ("mul", "div") if decimals > 0 else ("div", "mul")
            scaled = ops.of(scale, input, 10.0 ** abs(decimals))
            return ops.of(inverse, ops.of(name, scaled), 10.0 ** abs(decimals))
        return _simple(name)(ops, input)

    return rule


def _square(ops: List, input: Value) -> Value:
    if input.type == "b":
        input = _converted(ops, input, torch.int64)
    floating = letter(input.dtype) == "f"
    return _simple("square")(ops, input) if floating else RULES["mul"](ops, input, input)


def _pow(ops: List, input: Any, exponent: Any) -> Value:
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


def _sign(ops: List, input: Value) -> Value:
    if letter(input.dtype) != "f":
        return ops.of("clamp", input, -1, 1)
    is_negative, is_positive = ops.of("lt", input, 0), ops.of("gt", input, 0)
    return _where(ops, is_positive, 1, _where(ops, is_negative, -1, 0, input.dtype), input.dtype)


def _clamp(ops: List, input: Any, min: Any = None, max: Any = None) -> Value:
    dtype = promoted(*(x for x in (input, min, max) if x is not None))
    if letter(dtype) != "f" and (min is None or max is None):  # infinity is no whole number
        name = "maximum" if max is None else "minimum"
        return ops.operation(dtype, name, input, min if max is None else max)
    least, most = -math.inf if min is None else min, math.inf if max is None else max
    return ops.operation(dtype, "clamp", input, least, most)


def _where(ops: List, condition: Any, input: Any, other: Any, dtype: Any = None) -> Value:
    dtype = dtype or promoted(input, other)
    at = ops.place(condition, "b")
    x, y = (ops.place(v, letter(dtype)) for v in (input, other))
    word = ops.words.get(at)
    if word or x == y:
        chosen = y if word == "0" else x
    else:
        chosen = ops.add(letter(dtype), "where", at, x, y)
    value = ops.value(PAIR, dtype, node=chosen)
    of = [ops.limits(v) for v in (input, other)]
    return ops.bounded(value, "where", of) if letter(dtype) == "i" else value


def _relu(ops: List, input: Value, inplace: bool = False) -> Value:
    # PyTorch's gradient of relu at 0 is 0. The gradient of maximum would be 1/2. A NaN stays.
    return _where(ops, ops.of("le", input, 0), 0, input)


def _hardtanh(
    ops: List, input: Value, min_val: float = -1, max_val: float = 1, inplace: bool = False
) -> Value:
    # The gradient at a bound is 0, and that of clamp would be 1.
    below = _where(ops, ops.of("ge", input, max_val), max_val, input)
    return _where(ops, ops.of("le", input, min_val), min_val, below)


def _gelu(ops: List, input: Value, approximate: str = "none") -> Value:
    # 1 + erf and 1 + tanh would round to 0 where the input is far below 0.
    if approximate == "none":
        half = ops.of("mul", input, 0.5)
        return ops.of("mul", half, ops.of("erfc", ops.of("mul", input, -math.sqrt(0.5))))
    cube = ops.of("mul", ops.of("square", input), ops.of("mul", input, 0.044715))
    inner = ops.of("mul", ops.of("add", input, cube), math.sqrt(8 / math.pi))
    return ops.of("mul", input, ops.of("sigmoid", inner))


def _leaky_relu(
    ops: List, input: Value, negative_slope: float = 0.01, inplace: bool = False
) -> Value:
    return _where(ops, ops.of("gt", input, 0), input, ops.of("mul", input, negative_slope))


def _elu(
    ops: List, input: Value, alpha: Any = 1, inplace: bool = False, *, scale: float = 1
) -> Value:
    factor = ops.of("mul", alpha, scale) if type(alpha) is Value else alpha * scale
    below = ops.of("mul", ops.of("expm1", input), factor)
    above = ops.of("mul", input, scale)
    if type(alpha) is Value or alpha != 1:
        # PyTorch's gradient at 0 is alpha * scale, as below 0, and its second derivative is 0.
        at_0 = ops.of("mul", input, factor)
        above = _where(ops, ops.of("gt", input, 0), above, at_0)
    return _where(ops, ops.of("lt", input, 0), below, above)


def _celu(ops: List, input: Value, alpha: float = 1, inplace: bool = False) -> Value:
    below = ops.of("mul", ops.of("expm1", ops.of("div", input, alpha)), alpha)
    return _where(ops, ops.of("lt", input, 0), below, input)


def _softplus(ops: List, input: Value, beta: float = 1, threshold: float = 20) -> Value:
    scaled = input if beta == 1 else ops.of("mul", input, beta)
    soft = ops.of("log1p", ops.of("exp", scaled))
    return _where(
        ops,
        ops.of("gt", scaled, threshold),
        input,
        soft if beta == 1 else ops.of("div", soft, beta),
    )


def _logaddexp(ops: List, input: Any, other: Any) -> Value:
    # Each case has its own derivatives, so that they are right where both are equal.
    def above(x: Any, y: Any) -> Value:
        return ops.of("add", x, ops.of("log1p", ops.of("exp", ops.of("sub", y, x))))

    found = _where(ops, ops.of("lt", input, other), above(other, input), above(input, other))
    is_infinite = ops.of("logical_and", ops.of("eq", input, other), ops.of("isinf", input))
    return _where(ops, is_infinite, input, found)


def _logsigmoid(ops: List, input: Value) -> Value:
    # As of logaddexp.
    above = ops.of("neg", ops.of("log1p", ops.of("exp", ops.of("neg", input))))
    below = ops.of("sub", input, ops.of("log1p", ops.of("exp", input)))
    return _where(ops, ops.of("lt", input, 0), below, above)


def _lerp(ops: List, input: Any, end: Any, weight: Any) -> Value:
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


def _to(ops: List, input: Value, *arguments: Any, dtype: Any = None, **_: Any) -> Value:
    for x in (*arguments, dtype):
        target = x.dtype if isinstance(x, Value) else _BY_NAME.get(str(x), x)
        if isinstance(target, torch.dtype):
            return _converted(ops, input, target)
        if isinstance(x, type):  # torch.IntTensor
            return _to(ops, input, f"{x.__module__}.{x.__name__}")
        if isinstance(x, str) and x.endswith("Tensor"):
            raise NotImplementedError(f"a conversion to {x}")
    return input


def _type(ops: List, input: Value, dtype: Any = None, non_blocking: bool = False) -> Value:
    if dtype is None:
        raise NotImplementedError("type() without a dtype; ask for its dtype")
    return _to(ops, input, dtype)


def _converted(ops: List, input: Value, dtype: torch.dtype) -> Value:
    type_ = letter(dtype)
    node = ops.place(input, type_)
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
    **{name: _compare(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
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
