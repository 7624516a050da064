"""The values that a user's function computes, each in the cheapest way.

If a value depends on q_idx alone, on kv_idx alone, on q_idx - kv_idx alone or on none of these,
PyTorch's own operation computes a vector over the rows, keys or distances. Any operation is allowed
there, and autograd records it. Every other value has the kind PAIR: a rule writes its operation
into the list, which the kernels run inside their tiles.

The function gets stand-ins: tensors whose numbers have no meaning. A stand-in has the dtype and the
shape of a value, so `score.dtype` and `b.new_ones(())` work. Its attribute `_attn` is the Value.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torch_attn._programs.errors import fail, fail_for_pairs
from torch_attn._programs.rules import COMPARISONS, RULES, Operations
from torch_attn._programs.tensors import Tensors
from torch_attn._programs.value import (
    DISTANCE,
    HEAD,
    KEY,
    PAIR,
    ROW,
    Affine,
    Value,
    as_dtype,
    combined_form,
    form_fits,
    letter,
    numbers_of,
    promoted,
    together,
    unrounded,
)


class Values:
    """The values of both user functions of one call.

    Args:
        sizes: B, H, L and S.
        dtype: the dtype of the list's floating leaves: float32 or float64.
        device: the device of query.

    Attributes:
        list: the operations of the values of kind PAIR.
        tensors: the tensors that the functions capture or make.
        indices: b, h, q_idx and kv_idx.
        lengths: how many numbers a vector of each kind has.
        tracking: whether the caller records gradients for the function that runs.
        computed: the values that a further equal call returns again.
    """

    def __init__(self, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        B, H, L, S = sizes
        self.sizes, self.device = sizes, device
        self.list = Operations(dtype, torch.compiler.is_compiling())
        self.tensors = Tensors(device, dtype)
        self.tracking = torch.is_grad_enabled()
        self.computed: dict[Any, Value] = {}  # by function and arguments
        self.captured: dict[int, Value] = {}  # 0-d tensors, by Tensors.serial_of()
        self.empty: dict[torch.dtype, Tensor] = {}
        self.lengths = {HEAD: 1, ROW: L, KEY: S, DISTANCE: max(L + S - 1, 0)}
        self.indices: list[Any] = [self.numbers(HEAD, 0, B), self.numbers(HEAD, 1, H)]
        self.indices += [self.of_affine((1, 0, 0)), self.of_affine((0, 1, 0))]

    def numbers(self, kind: int, axis: int, size: int) -> Value:
        """Returns the numbers 0, 1, ... along an axis: b, h, or n for rows, keys or distances."""

        device = self.device  # make() holds no self, so that there is no reference cycle

        def make() -> Tensor:
            numbers = torch.arange(size, device=device)
            return numbers.view([-1 if a == axis else 1 for a in range(3)])

        return self.list.value(kind, torch.int64, make, limits=(0, size - 1) if size else None)

    # Tensors and their values

    def stand_in(self, value: Value) -> Tensor:
        """Returns the tensor that the user's function sees in place of a value."""
        if value.shape:
            tensor = torch.empty(value.shape, dtype=value.dtype, device=self.device)
        else:
            if (empty := self.empty.get(value.dtype)) is None:
                empty = torch.zeros((), dtype=value.dtype, device=self.device)
                self.empty[value.dtype] = empty
            tensor = empty.detach()  # the cheapest new tensor
        tensor._attn = value  # type: ignore[attr-defined]
        return tensor

    def of_tensor(self, x: Tensor) -> Value | None:
        """Returns the Value of a stand-in, or of a 0-d tensor. Returns None for other tensors."""
        value: Value | None = getattr(x, "_attn", None)
        if value is not None or x.dim():
            return value
        serial = self.tensors.serial_of(x)
        if serial not in self.captured:
            self.tensors.check_captured(x)
            self.tensors.use(x)
            make = functools.partial(x.view, 1, 1, 1)
            is_made = self.tensors.is_made(x)
            self.captured[serial] = self.list.value(HEAD, x.dtype, make, constant=is_made)
        return self.captured[serial]

    def of_symbol(self, x: Any) -> Any:
        """Makes a Value of a number that torch.compile does not know, as with dynamic shapes."""
        from torch.fx.experimental.symbolic_shapes import has_static_value  # imports sympy

        if not isinstance(x, int | float | torch.SymInt | torch.SymFloat) or has_static_value(x):
            return x
        number: Any = x
        dtype = torch.float64 if isinstance(x, float | torch.SymFloat) else torch.int64
        device = self.device  # as in numbers()

        def make() -> Tensor:
            # A product, because torch.compile would make a graph for each float of scalar_tensor().
            ones = torch.ones(1, 1, 1, dtype=dtype, device=device)
            return ones.mul(number)

        return self.list.value(HEAD, dtype, make, number=number)

    def of_affine(self, form: Affine, dtype: torch.dtype = torch.int64) -> Value | None:
        """Returns the Value of a form (a, b, c).

        The form must depend on q_idx alone, on kv_idx alone, on q_idx - kv_idx alone, or on none of
        these. Returns None for any other form.
        """
        a, b, c = form
        if a and b and a + b:
            return None
        whole = type(c) is int
        key = "affine", a, b, c if whole else ("at", self.tensors.serial_of(c)), dtype
        found = self.computed.get(key)
        if found is None:
            kind = DISTANCE if a and b else ROW if a else KEY if b else HEAD
            step, count = a or b or 1, self.lengths[kind]
            begin = (1 - self.lengths[KEY] if kind == DISTANCE else 0) * step + (c if whole else 0)
            device = self.device  # as in numbers()

            def make() -> Tensor:
                numbers = torch.arange(begin, begin + count * step, step, device=device)
                numbers = numbers.view(1, 1, -1) if whole else numbers.view(1, 1, -1) + c
                return as_dtype(numbers, dtype)

            found = self.list.value(kind, dtype, make, affine=form)
            if whole:
                ends = begin, begin + max(count - 1, 0) * step
                found.limits = min(ends), max(ends)
            self.computed[key] = found
        return found

    # Elementwise functions

    def of(self, name: str, *values: Any) -> Value:
        """Computes the elementwise function that torch has under this name."""
        of = [x for x in values if isinstance(x, Value)]
        return self.elementwise(name, getattr(torch, name), list(values), {}, of)

    def elementwise(
        self, name: str, function: Any, values: list[Any], named: dict[str, Any], of: list[Value]
    ) -> Value:
        """Computes an elementwise function. The list `of` has all Values among the arguments."""
        if self.list.compiling:
            values = list(map(self.of_symbol, values))
            named = {name: self.of_symbol(x) for name, x in named.items()}
        kind = together(of) if len(of) > 1 else of[0].kind
        whole = of[0].type == "i" and of[-1].type == "i"
        form = combined_form(name, values) if whole and name in _AFFINE and not named else None
        dtype = torch.int64
        if form is not None:
            if any(x.dtype != dtype for x in of):
                dtype = promoted(*values)
            form = form if form_fits(form, dtype, self.lengths) else None
        if form is not None and (moved := self.of_affine(form, dtype)) is not None:
            return moved
        if kind == PAIR and whole and name in COMPARISONS and len(values) == 2:
            # q_idx >= kv_idx is q_idx - kv_idx >= 0, which depends on the distance alone.
            difference = combined_form("sub", values)
            if difference and (moved := self.of_affine(difference)) is not None:
                kind, values = moved.kind, [moved, 0]
        if kind == PAIR:
            result = self.pair(name, values, named)
            result.affine = result.affine or form
            return result
        if (
            whole
            and (name in _DIVISIONS or (name == "div" and named.get("rounding_mode")))
            and (len(values) > 1 and type(values[1]) is Value and values[1].number is None)
            and letter(promoted(*values)) == "i"
        ):
            if self.list.limits(values[1]) == (0, 0):
                fail(f"{name} by 0, for every pair", "divide by another number")
            function = _zero_by_zero(function)
        result = self.vector(kind, function, values, named)
        form = values[0].affine if name in _CONVERSIONS and isinstance(values[0], Value) else None
        may_fit = form and result.dtype in (torch.int32, torch.int64)
        if form and may_fit and form_fits(form, result.dtype, self.lengths):
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
            numbers = {n: numbers_of(x) for n, x in named.items() if n != "inplace"}
            made = function(*map(numbers_of, values), **numbers)
            if made.dtype == self.list.dtype and any(unrounded(x) is not numbers_of(x) for x in of):
                # The same numbers, and a lookup sums their gradients before it rounds them.
                numbers = {n: unrounded(x) for n, x in named.items() if n != "inplace"}
                made = function(*map(unrounded, values), **numbers)
            found = self.computed[key] = self.list.value(kind, made.dtype)
            found.made = made
            found.constant = all(x.constant for x in of if type(x) is Value)
        return found

    def pair(self, name: str, values: list[Any], named: dict[str, Any]) -> Value:
        """Writes the operations of a value of kind PAIR into the list."""
        rule = RULES.get(name)
        if rule is None:
            fail_for_pairs(name)
        self.check_gradients(name, values)
        try:
            result = rule(self.list, *values, **named) if named else rule(self.list, *values)
        except (NotImplementedError, TypeError) as error:
            fail(f"{name} of a value of the pair: {error}")
        return result

    def check_gradients(self, name: str, values: Iterable[Any]) -> None:
        """Refuses functions that run without gradients, although the caller records gradients.

        For example, a function may call PyTorch in the forward of an autograd.Function. Autograd
        does not record these calls, and would not call the function's own backward.
        """
        if not self.tracking or torch.is_grad_enabled():
            return
        if any(x.type == "f" for x in values if isinstance(x, Value)):
            fail(
                f"{name} runs without gradients, under no_grad or in an autograd.Function",
                "detach what is captured, and call PyTorch's own functions",
            )


@functools.cache
def _zero_by_zero(divide: Any) -> Any:
    """Makes a division of whole numbers 0 where the divisor is 0, as it is for values of the pair.

    So `torch.where(n > 0, q_idx % n, 0)` works.
    """

    @functools.wraps(divide)
    def guarded(x: Any, y: Tensor, **named: Any) -> Tensor:
        is_zero = y == 0
        return divide(x, y.masked_fill(is_zero, 1), **named).masked_fill(is_zero, 0)  # type: ignore[no-any-return]

    return guarded


def _key(x: Any) -> Any:
    return x.serial if type(x) is Value else (type(x), str(x))


_AFFINE = frozenset(("add", "sub", "neg", "mul"))
_DIVISIONS = frozenset(("floor_divide", "remainder", "fmod"))
_CONVERSIONS = frozenset(("to", "long", "int", "type"))
