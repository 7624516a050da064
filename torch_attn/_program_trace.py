"""Runs a score_mod or a mask_mod, and lists the operations that kernels must run for every pair.

The functions of FlexAttention take single numbers: `score_mod(score, b, h, q_idx, kv_idx)`.
`Tracer` calls each function once, with 0-d tensors. `Tracer` is a TorchFunctionMode, so it sees
every call of PyTorch. If a value depends on the query i alone, on the key j alone, on i - j alone
or on none of these, PyTorch's own operation computes a vector over the rows, keys or distances. Any
operation is allowed there, and autograd records it. For every other value, `Tracer` writes the
operation into a list (`_program_list.py`), which the kernels run inside their tiles.

The function gets placeholder tensors, called places. The numbers in a place have no meaning, but a
place has the dtype and the shape of a value, so `score.dtype` and `b.new_ones(())` work. Its
attribute `_attn` is the Value for which the place stands.
"""

from __future__ import annotations

import functools
import linecache
import operator as operators
import os
import sys
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_attn._program_list import (
    CONVERSIONS,
    DISTANCE,
    HEAD,
    KEY,
    PAIR,
    ROW,
    RULES,
    List,
    Value,
    as_dtype,
    letter,
    promoted,
    together,
)
from torch_attn._program_tables import getitem

__all__ = ["Tracer", "UnsupportedError"]


class UnsupportedError(RuntimeError):
    """A score_mod or mask_mod does something that the kernels cannot compute for every pair.

    It is raised before anything is computed. Its message names the operation and the line.
    """


class Tracer(TorchFunctionMode):
    """The state of one call of `trace`: the values of both user functions, and their operations."""

    def __init__(self, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        B, H, L, S = sizes
        self.device = device
        self.list = List(dtype, torch.compiler.is_compiling())
        self.tracking = torch.is_grad_enabled()
        self.computed: dict[Any, Value] = {}  # by function and arguments
        self.seen: list[Tensor] = []
        self.places: dict[int, int] = {}  # from the id of a tensor to its place in `seen`
        self.captured: dict[int, Value] = {}  # 0-d tensors by place_of()
        self.made: list[Tensor] = []  # tensors that the functions made
        self.used: list[Tensor] = []  # tensors of `made` that the list reads
        self.widened: dict[int, Tensor] = {}  # by place_of(), see wide()
        self.empty: dict[torch.dtype, Tensor] = {}
        self.tables: dict[Any, tuple[int, Tensor]] = {}  # (number, table) by what is read
        self.pairs: Tensor | None = None
        self.dtypes: tuple[torch.dtype, ...] = (dtype,)  # that kernels read for each pair
        self.sizes = sizes
        self.lengths = {HEAD: 1, ROW: L, KEY: S, DISTANCE: max(L + S - 1, 0)}
        self.indices: list[Any] = [self.index(HEAD, 0, B), self.index(HEAD, 1, H)]
        self.indices += [self.of_affine((1, 0, 0)), self.of_affine((0, 1, 0))]

    def index(self, kind: int, axis: int, size: int) -> Value:
        """Returns the numbers 0, 1, ... along an axis: b, h, or n for rows, keys or distances."""

        device = self.device  # make() holds no self, so that there is no reference cycle

        def make() -> Tensor:
            numbers = torch.arange(size, device=device)
            return numbers.view([-1 if a == axis else 1 for a in range(3)])

        return self.list.value(kind, torch.int64, make, limits=(0, size - 1) if size else None)

    def put(self, value: Value) -> Tensor:
        """Returns the place of a value: the tensor that the user's function sees."""
        if value.shape:
            place = torch.empty(value.shape, dtype=value.dtype, device=self.device)
        else:
            if (empty := self.empty.get(value.dtype)) is None:
                empty = torch.zeros((), dtype=value.dtype, device=self.device)
                self.empty[value.dtype] = empty
            place = empty.detach()  # the cheapest new tensor
        place._attn = value  # type: ignore[attr-defined]
        return place

    def run(self, name: str, function: Any, arguments: list[Value], type_: str) -> int:
        """Runs a user's function and returns the index of its result in the list of operations."""
        places = [self.put(x) for x in arguments]
        with self:
            result = function(*places)
        if isinstance(result, bool | int | float):
            result = torch.tensor(result, device=self.device)
            self.made.append(result)
        value = self.value(result) if isinstance(result, Tensor) else None
        if value is None or value.shape:
            is_tensor = isinstance(result, Tensor)
            what = f"shape {list(result.shape)}" if is_tensor else type(result).__name__
            self.fail(f"the function returned {what}", "return one number: a 0-d tensor")
        if value.type != type_:
            wanted = "floating number" if type_ == "f" else "boolean"
            self.fail(f"{name} returned {result.dtype}", f"return a {wanted}")
        return self.list.place(value, type_)

    def value(self, x: Tensor) -> Value | None:
        """Returns the Value of a place, or of a 0-d tensor. Returns None for any other tensor."""
        value: Value | None = getattr(x, "_attn", None)
        if value is not None or x.dim():
            return value
        place = self.place_of(x)
        if place not in self.captured:
            self.check_captured(x)
            self.use(x)
            make = functools.partial(x.view, 1, 1, 1)
            self.captured[place] = self.list.value(HEAD, x.dtype, make, constant=self.is_made(x))
        return self.captured[place]

    def place_of(self, x: Tensor) -> int:
        """Returns a number that stands for a tensor, in place of its id.

        torch.compile would compile again for every tensor whose id is read.
        """
        if not self.list.compiling:
            place = self.places.setdefault(id(x), len(self.seen))
        else:
            place = next((n for n, y in enumerate(self.seen) if y is x), len(self.seen))
        if place == len(self.seen):
            self.seen.append(x)
        return place

    def is_made(self, x: Any) -> bool:
        return any(x is made for made in self.made)  # torch.compile knows no id() of these

    def use(self, x: Tensor) -> None:
        """Notes that the list reads a tensor, which must not change from here on."""
        if self.is_made(x):
            self.used.append(x)

    def is_used(self, x: Any) -> bool:
        """Returns whether the list reads the memory of a tensor that the function made."""
        if self.list.compiling:
            return any(x is used for used in self.used)
        at = x.untyped_storage().data_ptr()
        return any(at == used.untyped_storage().data_ptr() for used in self.used)

    def wide(self, x: Tensor) -> Tensor:
        """Converts a tensor of 16 bits to the list's dtype, in which lookups sum its gradient."""
        if x.dtype not in (torch.bfloat16, torch.float16):
            return x
        place = self.place_of(x)
        if place not in self.widened:
            self.widened[place] = x.to(self.list.dtype)
        return self.widened[place]

    def symbolic(self, x: Any) -> Any:
        """Makes a Value of a number that torch.compile does not know, as with dynamic shapes."""
        from torch.fx.experimental.symbolic_shapes import has_static_value  # imports sympy

        if not isinstance(x, int | float | torch.SymInt | torch.SymFloat) or has_static_value(x):
            return x
        number: Any = x
        dtype = torch.float64 if isinstance(x, float | torch.SymFloat) else torch.int64
        device = self.device  # as in index()

        def make() -> Tensor:
            # A product, because torch.compile would make a graph for each float of scalar_tensor().
            ones = torch.ones(1, 1, 1, dtype=dtype, device=device)
            return ones.mul(number)

        return self.list.value(HEAD, dtype, make, number=number)

    # The calls that the user's function makes to PyTorch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if "out" in kwargs:
            known = None
        elif self.list.compiling and isinstance(func, FunctionType):
            # Such as Tensor.__pow__, which torch.compile does not find in a dict that has it.
            known = _BY_NAME.get(func.__name__)
        else:
            known = _KNOWN.get(func)
        if known is None:
            if func is torch.Tensor.__getitem__ or func is operators.getitem:
                return getitem(self, *args)
            return func(*args, **kwargs) if func in _QUESTIONS else self.general(func, args, kwargs)
        name, function, reflected, in_place = known
        traced, values, operands = False, [], []
        for x in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(x, Tensor):
                traced = traced or hasattr(x, "_attn")
                value = self.value(x)
                if value is None or value.shape:
                    return self.general(func, args, kwargs)
                operands.append(value)
                x = value
            elif not isinstance(x, _PLAIN) and hasattr(x, "item"):
                x = x.item()  # a number of NumPy's
            values.append(x)
        if not traced:
            return self.general(func, args, kwargs)
        named = kwargs
        if kwargs:
            named = dict(zip(kwargs, values[len(args) :], strict=True))
            del values[len(args) :]
        if reflected:
            values.reverse()
        result = self.elementwise(name, function, values, named, operands)
        if in_place or kwargs.get("inplace"):
            return self.assign(args[0], result, name)
        if name in _SAME and result.dtype == args[0].dtype and not kwargs.get("copy"):
            return args[0]  # as PyTorch returns the tensor itself
        return self.put(result)

    def assign(self, target: Any, value: Value, name: str) -> Any:
        """Assigns in place, as `target += x` does: every reference sees the new value."""
        if not (hasattr(target, "_attn") or self.is_made(target)):
            self.fail(f"{name} changes a captured tensor in place", "compute a new one")
        if not self.list.compiling and self.is_made(target):
            at = target.untyped_storage().data_ptr()
            made = (x for x in self.made if x is not target and isinstance(x, Tensor))
            if any(at == x.untyped_storage().data_ptr() for x in made):
                self.fail(f"{name} changes a tensor that has views", "compute a new one")
        own: Any = self.value(target)
        if "bif".index(value.type) > "bif".index(own.type):
            self.fail(f"{name} would change {target.dtype} in place to {value.dtype}")
        if value.dtype != target.dtype:
            value = self.elementwise("to", torch.Tensor.to, [value, target.dtype], {}, [value])
        target._attn = value
        return target

    def elementwise(
        self, name: str, function: Any, values: list[Any], named: dict[str, Any], of: list[Value]
    ) -> Value:
        """Computes an elementwise function. The list `of` has all Values among the arguments."""
        if self.list.compiling:
            values = list(map(self.symbolic, values))
            named = {name: self.symbolic(x) for name, x in named.items()}
        kind = together(of) if len(of) > 1 else of[0].kind
        whole = of[0].type == "i" and of[-1].type == "i"
        affine = self.affine(name, values) if whole and name in _AFFINE and not named else None
        dtype = torch.int64
        if affine is not None:
            if any(x.dtype != dtype for x in of):
                dtype = promoted(*values)
            affine = affine if self.fits(affine, dtype) else None
        if affine is not None and (moved := self.of_affine(affine, dtype)) is not None:
            return moved
        if kind == PAIR and whole and name in _COMPARISONS and len(values) == 2:
            # i >= j is i - j >= 0, which depends on the distance alone.
            difference = self.affine("sub", values)
            if difference and (moved := self.of_affine(difference)) is not None:
                kind, values = moved.kind, [moved, 0]
        if kind == PAIR:
            result = self.of_pair(name, values, named)
            result.affine = result.affine or affine
            return result
        if (
            whole
            and (name in _DIVISIONS or (name == "div" and named.get("rounding_mode")))
            and (len(values) > 1 and type(values[1]) is Value and values[1].number is None)
            and letter(promoted(*values)) == "i"
        ):
            if self.list.limits(values[1]) == (0, 0):
                self.fail(f"{name} by 0, for every pair", "divide by another number")
            function = _zero_by_zero(function)
        result = self.vector(kind, function, values, named)
        form = values[0].affine if name in _CONVERSIONS and isinstance(values[0], Value) else None
        if form and result.dtype in (torch.int32, torch.int64) and self.fits(form, result.dtype):
            result.affine, result.limits = form, values[0].limits
        return result

    def vector(self, kind: int, function: Any, values: list[Any], named: dict[str, Any]) -> Value:
        """Computes a value of a kind other than PAIR. Computes equal calls only once."""
        key: Any = (function, *map(_key, values))
        if named:
            key += tuple((n, _key(x)) for n, x in named.items())
        found = self.computed.get(key)
        if found is None:
            of = [*values, *named.values()] if named else values
            self.check_gradients(function.__name__, of)
            numbers = {n: _numbers(x) for n, x in named.items() if n != "inplace"}
            made = function(*map(_numbers, values), **numbers)
            if made.dtype == self.list.dtype and any(_unrounded(x) is not _numbers(x) for x in of):
                # The same numbers, and a lookup sums their gradients before it rounds them.
                numbers = {n: _unrounded(x) for n, x in named.items() if n != "inplace"}
                made = function(*map(_unrounded, values), **numbers)
            found = self.computed[key] = self.list.value(kind, made.dtype)
            found.made = made
            found.constant = all(x.constant for x in of if type(x) is Value)
        return found

    def of_pair(self, name: str, values: list[Any], named: dict[str, Any]) -> Value:
        rule = RULES.get(name)
        if rule is None:
            self.unknown(name)
        self.check_gradients(name, values)
        try:
            result = rule(self.list, *values, **named) if named else rule(self.list, *values)
        except (NotImplementedError, TypeError) as error:
            self.fail(f"{name} of a value of the pair: {error}")
        return result

    # Values of the form a i + b j + c

    def affine(self, name: str, values: list[Any]) -> tuple[int, int, Any] | None:
        """Returns the form (a, b, c) of a sum, difference, negation or product, or None."""
        forms: list[tuple[int, int, Any]] = []
        for x in values:
            if type(x) is int:
                forms.append((0, 0, x))
            elif type(x) is not Value or x.type != "i":
                return None
            elif x.affine is not None:
                forms.append(x.affine)
            elif x.kind == HEAD:
                forms.append((0, 0, x.tensor.long()))
            else:
                return None
        if not any(a or b for a, b, _ in forms):
            return None
        if name == "neg":
            forms, name = [(0, 0, 0), *forms], "sub"
        (a, b, c), (d, e, f) = forms
        if name == "mul":
            if a or b:
                a, b, c, d, e, f = d, e, f, a, b, c
            return (d * c, e * c, f * c) if not (a or b) and type(c) is int else None
        return (a + d, b + e, c + f) if name == "add" else (a - d, b - e, c - f)

    def fits(self, affine: tuple[int, int, Any], dtype: torch.dtype) -> bool:
        """Returns whether all numbers a i + b j + c are within an integer dtype, for certain."""
        a, b, c = affine
        if type(c) is not int:
            return dtype == torch.int64
        if dtype == torch.int64 and max(abs(a), abs(b), abs(c)) < 2**31:
            return True  # with fewer than 2^30 queries and keys
        ends = [a * i + b * j for i in (0, self.lengths[ROW]) for j in (0, self.lengths[KEY])]
        most = torch.iinfo(dtype).max
        return max(ends) + abs(c) <= most and min(ends) - abs(c) >= -most

    def of_affine(
        self, affine: tuple[int, int, Any], dtype: torch.dtype = torch.int64
    ) -> Value | None:
        """Returns the Value of a form (a, b, c).

        The form must depend on i alone, on j alone, on i - j alone, or on none of these. Returns
        None for any other form.
        """
        a, b, c = affine
        if a and b and a + b:
            return None
        whole = type(c) is int
        key = "affine", a, b, c if whole else ("at", self.place_of(c)), dtype
        found = self.computed.get(key)
        if found is None:
            kind = DISTANCE if a and b else ROW if a else KEY if b else HEAD
            step, count = a or b or 1, self.lengths[kind]
            begin = (1 - self.lengths[KEY] if kind == DISTANCE else 0) * step + (c if whole else 0)
            device = self.device  # as in index()

            def make() -> Tensor:
                numbers = torch.arange(begin, begin + count * step, step, device=device)
                numbers = numbers.view(1, 1, -1) if whole else numbers.view(1, 1, -1) + c
                return as_dtype(numbers, dtype)

            found = self.list.value(kind, dtype, make, affine=affine)
            if whole:
                ends = begin, begin + max(count - 1, 0) * step
                found.limits = min(ends), max(ends)
            self.computed[key] = found
        return found

    def of(self, name: str, *values: Any) -> Value:
        of = [x for x in values if isinstance(x, Value)]
        return self.elementwise(name, getattr(torch, name), list(values), {}, of)

    # Everything else

    def general(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls any function of values that are not of kind PAIR, by torch.vmap over b, h and n."""
        flat, spec = pytree.tree_flatten((args, kwargs))
        values: dict[int, Value] = {
            n: x._attn for n, x in enumerate(flat) if isinstance(x, Tensor) and hasattr(x, "_attn")
        }
        name = getattr(func, "__name__", str(func))
        if func in _RANDOM:
            self.fail(f"{name} draws random numbers", "draw them outside, and index the tensor")
        if func in _READS and values:
            self.fail(
                f"{name} reads a number that differs between pairs",
                "use torch.where for if, torch.minimum for min(), a tensor for a list",
            )
        target = args[0] if args and func in _IN_PLACE else kwargs.get("out")
        given = [x for n, x in enumerate(flat) if isinstance(x, Tensor) and n not in values]
        made = all(map(self.is_made, given))
        if target is not None and (values or not made):
            self.fail(f"{name} changes a tensor in place", "compute a new one")
        if target is not None and self.is_used(target):
            self.fail(f"{name} changes a tensor that the function has used", "compute a new one")
        if not values or (func in _LIKE and list(values) == [0]):
            result = func(*args, **kwargs)
            if made:
                self.made.append(result)
            return result
        kind = together(values.values())
        if kind == PAIR:
            self.unknown(name, "vector" if any(x.shape for x in values.values()) else "value")
        self.check_gradients(name, values.values())
        numbers = [x.tensor for x in values.values()]
        dtype = None  # of the results of a lookup in a table of 16 bits
        if func in _LOOKUPS and kwargs.get("max_norm") is None:
            tables = [x for x in (*given, *numbers) if self.wide(x) is not x]
            dtype = tables[0].dtype if tables else None
            numbers = [self.wide(_unrounded(x)) for x in values.values()]
            flat = [self.wide(x) if isinstance(x, Tensor) else x for x in flat]

        def function(*numbers: Tensor) -> Any:
            leaves = list(flat)
            for n, x in zip(values, numbers, strict=True):
                leaves[n] = x
            arguments, named = pytree.tree_unflatten(leaves, spec)
            return func(*arguments, **named)

        mapped: Any = function
        present = [a for a in range(3) if any(x.size(a) != 1 for x in numbers)]
        for axis in reversed(present):
            mapped = torch.vmap(mapped, tuple(0 if x.size(axis) != 1 else None for x in numbers))
        absent = [a for a in range(3) if a not in present]

        def back(x: Tensor) -> Tensor:
            for axis in absent:
                x = x.unsqueeze(axis)
            value = self.list.value(kind, dtype or x.dtype, lambda: x, shape=tuple(x.shape[3:]))
            value.tensor  # noqa: B018 (now, while gradients are on or off as asked)
            return self.put(value)

        ones = [tuple(a for a in range(3) if x.size(a) == 1) for x in numbers]
        result = mapped(*(x.squeeze(a) for x, a in zip(numbers, ones, strict=True)))
        return pytree.tree_map_only(Tensor, back, result)

    # Errors

    def check_captured(self, x: Tensor) -> None:
        dense = x.layout == torch.strided and not is_traceable_wrapper_subclass(x)
        if not dense or x.is_complex() or x.is_quantized:
            what = f"{type(x).__name__} of layout {x.layout} and {x.dtype}"
            self.fail(f"a captured tensor is a {what}", "capture a dense tensor of real numbers")
        if x.device != self.device:
            what = f"{self.name_of(x)} is on {x.device}, but query is on {self.device}"
            self.fail(what, "all captured tensors must be on query's device", is_wrong=True)

    def check_gradients(self, name: str, values: Iterable[Any]) -> None:
        """Refuses functions that run without gradients, although the caller records gradients.

        For example, a function may call PyTorch in the forward of an autograd.Function. Autograd
        does not record these calls, and would not call the function's own backward.
        """
        if not self.tracking or torch.is_grad_enabled():
            return
        if any(x.type == "f" for x in values if isinstance(x, Value)):
            self.fail(
                f"{name} runs without gradients, under no_grad or in an autograd.Function",
                "detach what is captured, and call PyTorch's own functions",
            )

    def unknown(self, name: str, of: str = "value") -> NoReturn:
        self.fail(
            f"there is no {name} of a {of} that depends on query and key at once",
            "compute it outside as a tensor and index it, bias[b, h, q_idx, kv_idx]; append "
            "captured vectors whose dot product is wanted to query and key, as more columns",
        )

    def name_of(self, tensor: Tensor) -> str:
        frame = _frame_of_user()
        known = {**frame.f_globals, **frame.f_locals} if frame else {}
        names = [n for n, x in known.items() if x is tensor]
        return f"{names[0] if names else 'a tensor'} of shape {list(tensor.shape)}"

    def fail(self, what: str, hint: str = "", is_wrong: bool = False) -> NoReturn:
        """Refuses the function; `is_wrong` if PyTorch's FlexAttention must not run it either."""
        where = ""
        if not self.list.compiling and (frame := _frame_of_user()):
            file, line = frame.f_code.co_filename, frame.f_lineno
            where = f" ({file}, line {line}: {linecache.getline(file, line).strip()})"
        message = f"torch_attn.flex_attention: {what}{where}{hint and f'; {hint}'}"
        if is_wrong:
            raise RuntimeError(message)
        raise UnsupportedError(message)


@functools.cache
def _zero_by_zero(divide: Any) -> Any:
    """Makes a division of whole numbers 0 where the divisor is 0, as it is for values of the pair.

    So `torch.where(n > 0, i % n, 0)` works.
    """

    @functools.wraps(divide)
    def guarded(x: Any, y: Tensor, **named: Any) -> Tensor:
        is_zero = y == 0
        return divide(x, y.masked_fill(is_zero, 1), **named).masked_fill(is_zero, 0)  # type: ignore[no-any-return]

    return guarded


def _key(x: Any) -> Any:
    return x.serial if type(x) is Value else (type(x), str(x))


def _numbers(x: Any) -> Any:
    return x if type(x) is not Value else x.tensor if x.number is None else x.number


def _unrounded(x: Any) -> Any:
    numbers = _numbers(x)
    return numbers if type(x) is not Value or x.unrounded is None else x.unrounded


_HERE = tuple(os.path.dirname(os.path.abspath(x)) + os.sep for x in (__file__, torch.__file__))


def _frame_of_user() -> Any:
    """Returns the innermost frame that is neither in PyTorch nor in this package."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return frame


def _named(holders: Iterable[Any], names: str) -> frozenset[Any]:
    return frozenset(
        f for n in names.split() for h in holders if callable(f := getattr(h, n, None))
    )


_PLAIN = bool, int, float, str, type, torch.dtype, torch.SymInt, torch.SymFloat
_AFFINE = frozenset(("add", "sub", "neg", "mul"))
_DIVISIONS = frozenset(("floor_divide", "remainder", "fmod"))
_CONVERSIONS = frozenset(("to", "long", "int", "type"))
_SAME = frozenset(("to", "type", "type_as", "contiguous", *CONVERSIONS))
_COMPARISONS = frozenset(name for name in RULES if RULES[name].__qualname__.startswith("_compare"))
_HOLDERS = torch.Tensor, torch, torch.nn.functional, torch.special
# Functions that work on vectors (over rows, keys or distances), but not on values of the pair.
_OF_VECTORS = "copysign erfinv fmax fmin lgamma logit nan_to_num positive sinc xlogy"
_OPERATORS = (
    "add sub mul truediv:div div floordiv:floor_divide mod:remainder pow neg abs pos:positive "
    "eq ne lt le gt ge and:bitwise_and or:bitwise_or xor:bitwise_xor invert:bitwise_not "
    "lshift:bitwise_left_shift rshift:bitwise_right_shift"
)


def _known() -> Iterator[tuple[Any, tuple[str, Any, bool, bool]]]:
    """Yields each elementwise function with four facts about it.

    The facts are the name, the function that returns the result in a new tensor, whether the
    operands are reversed (`__radd__`), and whether the elementwise function works in place.
    """
    for name in (*RULES, *_OF_VECTORS.split()):
        for function in _named(_HOLDERS, name):
            yield function, (name, function, False, False)
        for function in _named([torch.Tensor], f"{name}_"):
            yield function, (name, getattr(torch.Tensor, name), False, True)
    for word in _OPERATORS.split():
        operator, _, name = word.partition(":")
        plain = getattr(torch, name or operator)
        # torch.export(strict=True) calls Python's own operators.
        for prefix in ("", "r", "i"):
            for function in _named([torch.Tensor, operators], f"__{prefix}{operator}__"):
                yield function, (name or operator, plain, prefix == "r", prefix == "i")
    yield torch.rsub, ("sub", torch.sub, True, False)
    for of in (torch, torch.Tensor):  # of two tensors; of one tensor, min and max reduce
        yield of.min, ("minimum", torch.minimum, False, False)
        yield of.max, ("maximum", torch.maximum, False, False)


_KNOWN = dict(_known())
_BY_NAME = {function.__name__: known for function, known in _KNOWN.items()}
_IN_PLACE = _named(
    _HOLDERS,
    " ".join(n for h in _HOLDERS for n in dir(h) if n[0] != "_" == n[-1] and "resize" not in n)
    + " __setitem__",
)
_QUESTIONS = _named(_HOLDERS, "dim size stride numel is_floating_point is_complex") | {
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "ndim", "is_cuda", "requires_grad")
}
# Functions that read only the shape, dtype or device of their first argument, and no number.
_LIKE = _named(
    _HOLDERS,
    "empty_like full_like ones_like zeros_like new_empty new_full new_ones new_tensor new_zeros",
)
# Functions that read some numbers of a tensor, chosen by whole numbers.
_LOOKUPS = _named(  # choose numbers, and compute none
    _HOLDERS,
    "index_select gather take take_along_dim embedding __getitem__ select squeeze unsqueeze view "
    "reshape flatten unbind",
)
_READS = _named(
    _HOLDERS,
    "item tolist numpy __bool__ __int__ __float__ __index__ __complex__ __contains__ __iter__ "
    "__len__ __array__ is_nonzero nonzero equal allclose",
)
_RANDOM = _named(
    _HOLDERS,
    "rand randn randint randperm rand_like randn_like randint_like bernoulli normal multinomial "
    "poisson dropout uniform_ normal_ random_ exponential_ bernoulli_",
)
