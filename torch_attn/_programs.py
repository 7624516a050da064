"""Runs score_mod and mask_mod, and writes down what has to be computed for every pair.

FlexAttention's functions are defined on numbers: `score_mod(score, b, h, q_idx, kv_idx)`. `trace`
calls them once, with 0-d tensors, under a TorchFunctionMode, which sees every call of PyTorch. What
does not depend on query and key at once is computed by PyTorch's own operations on vectors over
the rows, the keys or the distances i - j: any operation is allowed there, and autograd records it.
What does is written into a list (`_program_list.py`) that the kernels run inside their tiles.

The function sees "places": tensors whose numbers mean nothing. They answer questions such as
`score.dtype` and `b.new_ones(())`, and their attribute `_attn` is the Value they stand for.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import operator as operators
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_attn._program_list import (
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
    write,
)

__all__ = ["Program", "score_program", "trace"]

MOST_OPERATIONS, MOST_LEAVES = 64, 16
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Program:
    """What the kernels compute for every pair, and the numbers that it reads.

    The leaves of the pair (i, j) are row i, key j and distance i - j + S - 1. B and H are 1 where
    no leaf depends on the entry or the head. A tensor is None where the program reads none.

    Attributes:
        score: the list that computes the score; None without a score_mod.
        mask: the list that says whether the query sees the key; None without a mask_mod.
        row_terms: ``[B|1, H|1, L, R]``, float32 (float64 for inputs in float64), with gradients to
            what the functions captured.
        key_terms: ``[B|1, H|1, S, K]``, likewise.
        distance_terms: ``[B|1, H|1, L + S - 1, D]``, likewise.
        row_numbers: ``[B|1, H|1, L, R]``, int32: whole numbers, and booleans as 0 and 1.
        key_numbers: ``[B|1, H|1, S, K]``, likewise.
        distance_numbers: ``[B|1, H|1, L + S - 1, D]``, likewise.
        table_0: ``[B|1, H|1, L|S|1, N]``, as the terms: a captured tensor that an index of the pair
            reads, in place. The list says whose rows it has. table_1 to table_3: likewise.
        pairs: ``[B|1, H|1, L, S]``, a view of a captured tensor that is read as it lies.
    """

    score: str | None
    mask: str | None
    row_terms: Tensor | None = None
    key_terms: Tensor | None = None
    distance_terms: Tensor | None = None
    row_numbers: Tensor | None = None
    key_numbers: Tensor | None = None
    distance_numbers: Tensor | None = None
    table_0: Tensor | None = None
    table_1: Tensor | None = None
    table_2: Tensor | None = None
    table_3: Tensor | None = None
    pairs: Tensor | None = None

    def arguments(self) -> dict[str, Any]:
        """The arguments of ``torch.ops.attn.flex_attention``, by name."""
        of_program = {"score": "score_mod", "mask": "mask_mod", "pairs": "attn_mask"}
        return {of_program.get(f.name, f.name): getattr(self, f.name) for f in fields(self)}

    def __str__(self) -> str:
        parts = [f"{n}: {text}" for n in ("score", "mask") if (text := getattr(self, n))]
        leaves = [f"{kind}_{noun}" for noun in ("terms", "numbers") for kind in _KINDS]
        leaves += [*_TABLES, "pairs"]
        for name in leaves:
            if (tensor := getattr(self, name)) is not None:
                parts.append(f"{name}: {list(tensor.shape)} {tensor.dtype}\n")
        return "".join(parts)


_KINDS = {"row": ROW, "key": KEY, "distance": DISTANCE}
_TABLES = "table_0", "table_1", "table_2", "table_3"


def trace(
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | None,
    *,
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Program:
    """Runs the functions and returns what the kernels need.

    Args:
        score_mod: FlexAttention's, or None.
        mask_mod: FlexAttention's, or None. What it captures is read without gradients.
        batch: B. heads: H, of the query. queries: L. keys: S.
        dtype: of query, key and value. Scores are float32, or float64 for float64.
        device: of the leaves.

    Raises:
        RuntimeError: a function does what cannot be run for every pair. The message names the
            operation and the line, and says what to do instead.
    """
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    tracer = _Tracer((batch, heads, queries, keys), compute, torch.device(device))
    results = []
    kind = tracer.device.type
    cast = torch.is_autocast_enabled(kind)
    with torch.autocast(kind, enabled=False) if cast else contextlib.nullcontext():
        if score_mod is not None:
            score = tracer.list.value(PAIR, compute, node=tracer.list.add("f", "score"))
            result = tracer.run(score_mod, [score, *tracer.indices])
            if letter(result.dtype) != "f":
                tracer.fail(f"score_mod returned {result.dtype}", "return a floating number")
            results.append(tracer.list.place(result, "f"))
        if mask_mod is not None:
            tracer.tracking = False
            with torch.no_grad():
                result = tracer.run(mask_mod, tracer.indices)
                if result.dtype != torch.bool:
                    tracer.fail(f"mask_mod returned {result.dtype}", "return a boolean")
                results.append(tracer.list.place(result, "b"))
    writer = write.__wrapped__ if tracer.list.compiling else write
    texts, counts, read = writer(tuple(tracer.list.nodes), tuple(results))
    if max(counts, default=0) > MOST_OPERATIONS:
        tracer.fail(f"{max(counts)} operations of the pair; at most {MOST_OPERATIONS}")
    columns: dict[str, list[Tensor]] = {}
    tables = [tracer.list.leaves[type_, serial] for _, type_, serial in read if type_ == "t"]
    if len(tables) > len(_TABLES):
        tracer.fail(f"{len(tables)} tables have an index of the pair; at most {len(_TABLES)}")
    for kind, type_, serial in read:
        if type_ == "t":
            continue
        name = f"{kind}_{'terms' if type_ == 'f' else 'numbers'}"
        columns.setdefault(name, []).append(tracer.list.leaves[type_, serial])
    leaves = {name: tracer.stack(name, of) for name, of in columns.items()}
    leaves |= dict(zip(_TABLES, tables, strict=False))
    if tracer.pairs is not None:
        leaves["pairs"] = tracer.pairs
    score_text = texts[0] if score_mod is not None else None
    return Program(score_text, texts[-1] if mask_mod is not None else None, **leaves)


def score_program(
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    *,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype = torch.float32,
) -> Program:
    """What :func:`flex_attention` would run for every pair; print it to read it.

    Args:
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)``, as of PyTorch's FlexAttention.
        mask_mod: ``mask_mod(b, h, q_idx, kv_idx)``, likewise.
        shape: ``(B, H, L, S)``: batch, heads of the query, queries and keys.
        dtype: of query, key and value.

    Returns:
        the two lists of operations as strings, and the tensors that they read. These hold what the
        functions captured at this call; they do not follow later changes.

    Raises:
        RuntimeError: what a function does cannot be run for every pair. The message names the
            operation and the line, and says what to do instead.
    """
    B, H, L, S = shape
    return trace(score_mod, mask_mod, batch=B, heads=H, queries=L, keys=S, dtype=dtype)


class _Tracer(TorchFunctionMode):
    """One call of `trace`: the values of both functions, and the list."""

    def __init__(self, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        B, H, L, S = sizes
        self.device = device
        self.list = List(dtype, torch.compiler.is_compiling())
        self.tracking = torch.is_grad_enabled()
        self.tracking_score = True  # while score_mod runs
        self.computed: dict[Any, Value] = {}  # by function and arguments
        self.captured: dict[int, tuple[Tensor, Value]] = {}  # 0-d tensors by id
        self.made: list[Any] = []  # tensors that the functions made
        self.empty: dict[torch.dtype, Tensor] = {}
        self.tables: dict[Any, tuple[int, Tensor]] = {}  # by what is read: its number
        self.pairs: Tensor | None = None
        self.sizes = sizes
        self.lengths = {HEAD: 1, ROW: L, KEY: S, DISTANCE: max(L + S - 1, 0)}
        self.indices: list[Any] = [self.index(HEAD, 0, B), self.index(HEAD, 1, H)]
        self.indices += [self.of_affine((1, 0, 0)), self.of_affine((0, 1, 0))]

    def index(self, kind: int, axis: int, size: int) -> Value:
        """The numbers 0, 1, ... along one of the axes b, h, n."""

        device = self.device  # not self: without cycles nothing is left to the garbage collector

        def make() -> Tensor:
            numbers = torch.arange(size, device=device)
            return numbers.view([-1 if a == axis else 1 for a in range(3)])

        return self.list.value(kind, torch.int64, make, limits=(0, size - 1) if size else None)

    def put(self, value: Value) -> Tensor:
        """The place of a value: what the user's function sees."""
        if value.shape:
            place = torch.empty(value.shape, dtype=value.dtype, device=self.device)
        else:
            if (empty := self.empty.get(value.dtype)) is None:
                empty = torch.zeros((), dtype=value.dtype, device=self.device)
                self.empty[value.dtype] = empty
            place = empty.detach()  # the cheapest new tensor
        place._attn = value  # type: ignore[attr-defined]
        return place

    def run(self, function: Callable[..., Any], arguments: list[Value]) -> Value:
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
        return value

    def value(self, x: Tensor) -> Value | None:
        """The Value of a place or of another 0-d tensor; None for the other tensors."""
        value: Value | None = getattr(x, "_attn", None)
        if value is not None or x.dim():
            return value
        if (entry := self.captured.get(id(x))) is not None:
            return entry[1]
        self.check_captured(x)
        constant = self.is_made(x)
        make = functools.partial(x.view, 1, 1, 1)
        value = self.list.value(HEAD, x.dtype, make, constant=constant)
        self.captured[id(x)] = x, value
        return value

    def is_made(self, x: Any) -> bool:
        return any(x is made for made in self.made)

    # A call of PyTorch by the user's function

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        known = None if "out" in kwargs else _KNOWN.get(func)
        if known is None:
            if func is torch.Tensor.__getitem__ or func is operators.getitem:
                return self.getitem(*args)
            return func(*args, **kwargs) if func in _QUESTIONS else self.general(func, args, kwargs)
        name, function, reflected, in_place = known
        traced, values, operands = False, [], []
        for x in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(x, Tensor):
                if (value := getattr(x, "_attn", None)) is not None:
                    traced = True
                else:
                    value = self.value(x)
                if value is None or value.shape:
                    return self.general(func, args, kwargs)
                operands.append(value)
                x = value
            elif hasattr(x, "item"):
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
        return self.put(result)

    def assign(self, target: Any, value: Value, name: str) -> Any:
        """`target += x`: every name of the same tensor sees it."""
        if not (hasattr(target, "_attn") or self.is_made(target)):
            self.fail(f"{name} changes a captured tensor in place", "compute a new one")
        if "bif".index(letter(value.dtype)) > "bif".index(letter(target.dtype)):
            self.fail(f"{name} would change {target.dtype} in place to {value.dtype}")
        if value.dtype != target.dtype:
            value = self.elementwise("to", torch.Tensor.to, [value, target.dtype], {}, [value])
        target._attn = value
        return target

    def elementwise(
        self, name: str, function: Any, values: list[Any], named: dict[str, Any], of: list[Value]
    ) -> Value:
        """A function of numbers; `of` are the Values among its arguments."""
        kind = _together(of)
        whole = of[0].type == "i" and of[-1].type == "i"
        affine = self.affine(name, values) if whole and name in _AFFINE and not named else None
        if affine is not None and (moved := self.of_affine(affine)) is not None:
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
        result = self.vector(kind, function, values, named)
        if name in _CONVERSIONS and result.dtype in (torch.int32, torch.int64):
            result.affine, result.limits = values[0].affine, values[0].limits
        return result

    def vector(self, kind: int, function: Any, values: list[Any], named: dict[str, Any]) -> Value:
        """Computes numbers that are not of the pair; the same ones once."""
        key: Any = (function, *map(_key, values))
        if named:
            key += tuple((n, _key(x)) for n, x in named.items())
        found = self.computed.get(key)
        if found is None:
            of = [*values, *named.values()] if named else values
            self.check_gradients(function.__name__, of)
            numbers = {n: _numbers(x) for n, x in named.items() if n != "inplace"}
            made = function(*map(_numbers, values), **numbers)
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
        if result.type == "i" and not named:
            result.limits = result.limits or self.limits_of_result(name, values)
        return result

    def limits(self, x: Any) -> tuple[int, int] | None:
        """The least and the largest number of a value, if they are known or can be read."""
        if type(x) is int:
            return x, x
        if not isinstance(x, Value) or x.type != "i":
            return None
        unread = x.limits is None and x.kind != PAIR and not self.list.compiling
        if unread and x.tensor.numel():
            # Under torch.func.vmap numbers cannot be read; index_select checks them.
            with contextlib.suppress(RuntimeError):
                least, most = x.tensor.detach().aminmax()
                x.limits = int(least), int(most)
        return x.limits

    def limits_of_result(self, name: str, values: list[Any]) -> tuple[int, int] | None:
        """The limits of the result of an operation of the pair on whole numbers."""
        known = [self.limits(x) for x in (values[1:] if name == "where" else values)]
        of = [x for x in known if x is not None]
        if len(of) < len(known):
            return None
        (a, b), (c, d) = of[0], of[-1]
        if name == "mul":
            ends = a * c, a * d, b * c, b * d
            return min(ends), max(ends)
        if name == "clamp" and len(of) == 2:
            name = "maximum"
        if name in ("remainder", "floor_divide") and not (c == d and c > 0):
            return None
        results = {
            "add": (a + c, b + d),
            "sub": (a - d, b - c),
            "where": (min(a, c), max(b, d)),
            "minimum": (min(a, c), min(b, d)),
            "maximum": (max(a, c), max(b, d)),
            "clamp": (min(max(a, of[len(of) // 2][0]), c), min(max(b, of[len(of) // 2][1]), d)),
            "remainder": (0, c - 1),
            "floor_divide": (a // max(c, 1), b // max(c, 1)),
        }
        return results.get(name, (a, b) if name in _CONVERSIONS else None)

    # a i + b j + c

    def affine(self, name: str, values: list[Any]) -> tuple[int, int, Any] | None:
        """The form of a sum, a difference, a negative or a product, if it has one."""
        forms: list[tuple[int, int, Any]] = []
        for x in values:
            if type(x) is int:
                forms.append((0, 0, x))
            elif type(x) is not Value or x.type != "i":
                return None
            elif x.affine is not None:
                forms.append(x.affine)
            elif x.kind == HEAD:
                forms.append((0, 0, as_dtype(x.tensor, torch.int64)))
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

    def of_affine(self, affine: tuple[int, int, Any]) -> Value | None:
        """The value of a form that depends on i, on j or on i - j alone; else None."""
        a, b, c = affine
        if a and b and a + b:
            return None
        whole = type(c) is int
        key = "affine", a, b, c if whole else id(c)
        found = self.computed.get(key)
        if found is None:
            kind = DISTANCE if a and b else ROW if a else KEY if b else HEAD
            step, count = a or b or 1, self.lengths[kind]
            begin = (1 - self.lengths[KEY] if kind == DISTANCE else 0) * step + (c if whole else 0)
            device = self.device  # as in index()

            def make() -> Tensor:
                numbers = torch.arange(begin, begin + count * step, step, device=device)
                return numbers.view(1, 1, -1) if whole else numbers.view(1, 1, -1) + c

            found = self.list.value(kind, torch.int64, make, affine=affine)
            if whole:
                ends = begin, begin + max(count - 1, 0) * step
                found.limits = min(ends), max(ends)
            self.computed[key] = found
            self.made.append(c)  # so that its id stays its own
        return found

    # table[index]

    def getitem(self, table: Any, key: Any) -> Any:
        """`table[index]` of a captured tensor, or of a vector that the function computed."""
        keys = list(key) if isinstance(key, tuple) else [key]
        if not any(hasattr(x, "_attn") for x in keys):
            return self.general(torch.Tensor.__getitem__, (table, key), {})
        for n, x in enumerate(keys):
            if x is Ellipsis:
                others = sum(y is not None for y in keys) - 1
                keys[n : n + 1] = [slice(None)] * (table.dim() - others)
                break
        if sum(x is not None for x in keys) > table.dim():
            self.fail(f"{len(keys)} indices of {self.name_of(table)}", "give fewer")
        # First what needs no index: numbers, slices and None.
        static = [slice(None) if isinstance(x, Tensor) else x for x in keys]
        if any(x != slice(None) for x in static):
            table = self.general(torch.Tensor.__getitem__, (table, tuple(static)), {})
        indices: list[Value | None] = []
        for x in keys:
            if isinstance(x, Tensor):
                index = self.value(x)
                if index is None or index.shape or letter(index.dtype) != "i":
                    what = f"an index of {x.dtype} and shape {list(x.shape)}"
                    self.fail(what, "index by whole numbers, each a 0-d tensor")
                indices.append(index)
            elif type(x) is not int:
                indices.append(None)
        indices += [None] * (table.dim() - len(indices))
        value = getattr(table, "_attn", None)
        if value is None:
            self.check_captured(table)
            return self.put(self.look_up(table, indices))
        source, before = value.lookup or (value.tensor, self.axes(value))
        remaining = iter(indices)
        return self.put(self.look_up(source, [x or next(remaining) for x in before]))

    def axes(self, value: Value) -> list[Value | None]:
        """A vector `[B|1, H|1, N|1, *shape]` is a table whose first dimensions have indices."""
        first = []
        for axis, n in enumerate(value.tensor.shape[:3]):
            if axis < 2 and n == self.sizes[axis]:
                first.append(self.indices[axis])
            elif axis == 2 and value.kind in (ROW, KEY):
                first.append(self.indices[value.kind + 1])
            else:
                first.append(self.index(value.kind if axis == 2 else HEAD, axis, n))
        return [*first, *[None] * len(value.shape)]

    def look_up(self, source: Tensor, places: list[Value | None]) -> Value:
        kind = _together(x for x in places if x is not None)
        key = id(source), tuple(x and x.serial for x in places)
        found = self.computed.get(key)
        if found is None and kind == PAIR:
            if None in places:
                shape = tuple(n for n, x in zip(source.shape, places, strict=True) if x is None)
                found = self.list.value(PAIR, source.dtype, shape=shape)
            else:
                found = self.strided(source, places) or self.gathered(source, places)
            found.lookup = source, places
            self.computed[key] = found
        if found is None:
            for dim, x in enumerate(places):
                if x is not None:
                    self.check_index(source, dim, x)
            shape = tuple(n for n, x in zip(source.shape, places, strict=True) if x is None)
            make = functools.partial(_select, source, places)
            found = self.list.value(kind, source.dtype, make, shape=shape)
            found.lookup = source, places
            if not shape:
                found.tensor  # noqa: B018 (now, while gradients are on or off as asked)
            self.computed[key] = found
        return found

    def strided(self, source: Tensor, places: list[Any]) -> Value | None:
        """`source[b, h, i, j]`, or sums of i and j as indices: a view that kernels read as a mask.

        None if the indices are others, or if the function has read such a view before.
        """
        if self.pairs is not None or not source.is_floating_point() or not self.tracking_score:
            return None
        L, S = self.lengths[ROW], self.lengths[KEY]
        dims: list[int | None] = [None, None]  # of b and of h
        sums: list[tuple[int, int, int, int]] = []
        for dim, x in enumerate(places):
            axis = next((n for n in (0, 1) if x.serial == self.indices[n].serial), None)
            if axis is not None and dims[axis] is None and source.size(dim) == self.sizes[axis]:
                dims[axis] = dim
                continue
            a, b, c = x.affine or (0, 0, 0)
            ends = [a * i + b * j + c for i in (0, L - 1) for j in (0, S - 1)]
            inside = min(ends) >= 0 and max(ends) < source.size(dim)
            if type(c) is not int or not (a or b) or not inside:
                return None
            sums.append((dim, a, b, c))
        view = source.permute([d for d in dims if d is not None] + [d for d, *_ in sums])
        view = view[tuple(None if d is None else slice(None) for d in dims)]
        if [form[1:] for form in sums] != [(1, 0, 0), (0, 1, 0)] or view.shape[2:] != (L, S):
            if torch._C._functorch.is_functorch_wrapped_tensor(source):
                return None
            backwards = [2 + n for n, (_, _, b, _) in enumerate(sums) if b < 0]
            view = view.flip(backwards) if backwards else view
            at = row = column = 0
            for n, (dim, a, b, c) in enumerate(sums):
                stride = view.stride(2 + n)
                if b < 0:
                    a, b, c = -a, -b, source.size(dim) - 1 - c
                at, row, column = at + c * stride, row + a * stride, column + b * stride
            if row < 0 or column < 0:
                return None
            shape, strides = (*view.shape[:2], L, S), (*view.stride()[:2], row, column)
            view = view.as_strided(shape, strides, view.storage_offset() + at)
        self.pairs = view
        return self.list.value(PAIR, source.dtype, node=self.list.add("f", "pair"))

    def gathered(self, source: Tensor, places: list[Any]) -> Value:
        """`source[places]`, by an index of the pair: the tensor is read where it lies.

        Where b, h, and i or j are indices themselves, its rows are heads, and queries or keys. The
        other indices are one together, of its last dimension.
        """
        own: list[int | None] = [None, None, None]  # dimensions of b, of h, and of i or j
        counts = [*self.sizes[:2], 0]
        name, begin = "table", 0
        for dim, x in enumerate(places):
            a, b, c = x.affine or (0, 0, -1)
            axis = next((n for n in (0, 1) if x.serial == self.indices[n].serial), None)
            if x.kind in (ROW, KEY) and own[2] is None and a + b == 1 and type(c) is int and c >= 0:
                axis, begin, counts[2] = 2, c, self.lengths[x.kind]
                name = "row_table" if a else "key_table"
            if axis is not None and own[axis] is None:
                self.check_index(source, dim, x)
                own[axis] = dim
        place = self.list.place(self.index_of(source, places, own), "i")
        if self.list.reads(place, "score"):
            self.fail(f"an index of {self.name_of(source)} depends on the score")
        number, _ = self.tables.setdefault(
            (id(source), name, *own, begin), (len(self.tables), source)
        )
        if ("t", number) not in self.list.leaves:
            table = source
            for n, at in enumerate(own):
                # A slice has a derivative that copies.
                if at is not None and table.size(at) != counts[n]:
                    table = table.narrow(at, begin if n == 2 else 0, counts[n])
            found = [dim for dim in own if dim is not None]
            table = table.permute(*found, *(d for d in range(source.dim()) if d not in found))
            table = table[tuple(None if dim is None else slice(None) for dim in own)]
            self.list.leaves["t", number] = self.as_numbers(table, source).flatten(3)
        node = self.list.add("f", name, ("t", number), place)
        type_ = letter(source.dtype)
        if type_ != "f":
            node = self.list.add(type_, "bool" if type_ == "b" else "int", node)
        return self.list.value(PAIR, source.dtype, node=node)

    def as_numbers(self, table: Tensor, source: Tensor) -> Tensor:
        numbers = as_dtype(table, self.list.dtype)
        if letter(table.dtype) == "i" and not self.list.compiling:
            fits = True
            with contextlib.suppress(RuntimeError):  # as in stack()
                fits = torch.equal(numbers.to(table.dtype), table)
            if not fits:
                self.fail(f"{self.name_of(source)} has whole numbers beyond 2^24")
        return numbers

    def index_of(self, source: Tensor, places: list[Any], own: list[int | None]) -> Value:
        """The place among the numbers of the dimensions that are not a table's own."""
        parts: dict[int, Any] = {}  # of the index, by kind: what is not of the pair costs nothing
        is_inside: Any = None
        stride = 1
        for dim in reversed(range(source.dim())):
            x, size = places[dim], source.size(dim)
            if dim in own:
                continue
            if x.kind != PAIR:
                self.check_index(source, dim, x)
            limits = self.limits(x)
            if limits is None or limits[0] < -size or limits[1] >= size:
                inside = self.of("logical_and", self.of("ge", x, -size), self.of("lt", x, size))
                is_inside = self.of("logical_and", is_inside, inside) if is_inside else inside
            if limits is None or limits[0] < 0:
                x = self.of("where", self.of("lt", x, 0), self.of("add", x, size), x)
            part = self.of("mul", x, stride) if stride != 1 else x
            parts[x.kind] = self.of("add", parts[x.kind], part) if x.kind in parts else part
            stride *= size
        if stride >= 2**31:
            self.fail(f"a table of {stride} numbers", "they must be fewer than 2^31")
        index: Value = functools.reduce(
            lambda x, y: self.of("add", x, y), (parts[kind] for kind in sorted(parts))
        )
        if is_inside is not None:
            index = self.of("where", is_inside, index, 2**31 - 1)
        return index

    def of(self, name: str, *values: Any) -> Value:
        of = [x for x in values if isinstance(x, Value)]
        return self.elementwise(name, getattr(torch, name), list(values), {}, of)

    def check_index(self, source: Tensor, dim: int, index: Value) -> None:
        size = source.size(dim)
        for number in self.limits(index) or ():
            if not -size <= number < size:
                self.fail(
                    f"index {number} is out of range in dimension {dim} of {self.name_of(source)}"
                )

    # Everything else

    def general(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Any function of values that are not of the pair, by torch.vmap over b, h and n."""
        flat, spec = pytree.tree_flatten((args, kwargs))
        values = {n: x._attn for n, x in enumerate(flat) if hasattr(x, "_attn")}
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
        if not values or (func in _LIKE and list(values) == [0]):
            result = func(*args, **kwargs)
            if made:
                self.made.append(result)
            return result
        kind = _together(values.values())
        if kind == PAIR:
            self.unknown(name)
        self.check_gradients(name, values.values())
        numbers = [x.tensor for x in values.values()]

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
            value = self.list.value(kind, x.dtype, shape=tuple(x.shape[3:]))
            value.made = x
            return self.put(value)

        ones = [tuple(a for a in range(3) if x.size(a) == 1) for x in numbers]
        result = mapped(*(x.squeeze(a) for x, a in zip(numbers, ones, strict=True)))
        return pytree.tree_map_only(Tensor, back, result)

    def stack(self, name: str, leaves: list[Tensor]) -> Tensor:
        """Leaves `[B|1, H|1, N|1]` as `[B|1, H|1, N, n]`, each column contiguous."""
        if len(leaves) > MOST_LEAVES:
            self.fail(f"the functions need {len(leaves)} {name}; at most {MOST_LEAVES}")
        length = self.lengths[_KINDS[name.partition("_")[0]]]
        B, H = (max(x.size(axis) for x in leaves) for axis in (0, 1))
        whole = [x if x.shape == (B, H, length) else x.expand(B, H, length) for x in leaves]
        columns = torch.stack(whole, -2) if len(whole) > 1 else whole[0].contiguous().unsqueeze(-2)
        if columns.dtype == torch.int64:
            wide, columns = columns, columns.to(torch.int32)
            fits = True
            with contextlib.suppress(RuntimeError):  # numbers of torch.func.vmap cannot be read
                fits = self.list.compiling or torch.equal(wide, columns.to(wide.dtype))
            if not fits:
                self.fail("a captured whole number is beyond 32 bits", "number the values anew")
        return columns.transpose(-1, -2)

    # Errors

    def check_captured(self, x: Tensor) -> None:
        dense = x.layout == torch.strided and not is_traceable_wrapper_subclass(x)
        if not dense or x.is_complex() or x.is_quantized:
            what = f"{type(x).__name__} of layout {x.layout} and {x.dtype}"
            self.fail(f"a captured tensor is a {what}", "capture a dense tensor of real numbers")

    def check_gradients(self, name: str, values: Iterable[Any]) -> None:
        """autograd.Function runs its forward without gradients; its backward would be lost."""
        if not self.tracking or torch.is_grad_enabled():
            return
        if any(x.type == "f" for x in values if isinstance(x, Value)):
            self.fail(
                f"{name} runs without gradients, under no_grad or in an autograd.Function",
                "detach what is captured, and call PyTorch's own functions",
            )

    def unknown(self, name: str) -> NoReturn:
        self.fail(
            f"there is no {name} of a value that depends on query and key at once",
            "compute it outside as a tensor and index it, bias[b, h, q_idx, kv_idx]; append "
            "captured vectors whose dot product is wanted to query and key, as more columns",
        )

    def name_of(self, tensor: Tensor) -> str:
        frame = _frame_of_user()
        known = {**frame.f_globals, **frame.f_locals} if frame else {}
        names = [n for n, x in known.items() if x is tensor]
        return f"{names[0] if names else 'a tensor'} of shape {list(tensor.shape)}"

    def fail(self, what: str, hint: str = "") -> NoReturn:
        where = ""
        if not self.list.compiling and (frame := _frame_of_user()):
            file, line = frame.f_code.co_filename, frame.f_lineno
            where = f" ({file}, line {line}: {linecache.getline(file, line).strip()})"
        raise RuntimeError(f"torch_attn.flex_attention: {what}{where}{hint and f'; {hint}'}")


def _together(values: Iterable[Value]) -> int:
    """What a function of values depends on: the pair where two kinds meet."""
    kind = HEAD
    for x in values:
        if x.kind != kind and x.kind != HEAD:
            if kind != HEAD:
                return PAIR
            kind = x.kind
    return kind


def _key(x: Any) -> Any:
    return x.serial if type(x) is Value else (type(x), str(x))


def _numbers(x: Any) -> Any:
    return x.tensor if type(x) is Value else x


def _select(source: Tensor, places: list[Value | None]) -> Tensor:
    """`source[places]`, `[B|1, H|1, N|1, *rest]`.

    By index_select, whose derivative adds in order; indexing's derivative adds by atomics.
    """
    rest = [dim for dim, x in enumerate(places) if x is None]
    if rest:
        source = source.permute([dim for dim, x in enumerate(places) if x is not None] + rest)
    flat: Any = None
    for index, size in zip((x for x in places if x is not None), source.shape, strict=False):
        at = index.tensor
        if index.limits is None or index.limits[0] < 0:
            at = torch.where(at < 0, at + size, at)
        flat = at if flat is None else flat * size + at
    sizes = source.shape[source.dim() - len(rest) :]
    chosen = source.reshape(-1, *sizes).index_select(0, flat.reshape(-1))
    return chosen.view(*flat.shape, *sizes)


_HERE = tuple(os.path.dirname(os.path.abspath(x)) + os.sep for x in (__file__, torch.__file__))


def _frame_of_user() -> Any:
    """The innermost frame that is neither PyTorch's nor ours."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return frame


def _named(holders: Iterable[Any], names: str) -> frozenset[Any]:
    return frozenset(
        f for n in names.split() for h in holders if callable(f := getattr(h, n, None))
    )


_AFFINE = frozenset(("add", "sub", "neg", "mul"))
_CONVERSIONS = frozenset(("to", "long", "int", "type"))
_COMPARISONS = frozenset(name for name in RULES if RULES[name].__qualname__.startswith("_compare"))
_HOLDERS = torch.Tensor, torch, torch.nn.functional, torch.special
# Functions that work on vectors (numbers of rows, keys or distances), but not on pairs.
_OF_VECTORS = (
    "acos acosh asin asinh atan atan2 atanh bitwise_left_shift bitwise_right_shift ceil copysign "
    "cos cosh erf erfc erfinv expm1 fmax fmin fmod frac isfinite isinf isnan lgamma log10 log2 "
    "logaddexp logit nan_to_num positive round sgn sign sin sinc sinh tan trunc xlogy elu gelu "
    "leaky_relu logsigmoid silu softplus"
)
_OPERATORS = (
    "add sub mul truediv:div div floordiv:floor_divide mod:remainder pow neg abs pos:positive "
    "eq ne lt le gt ge and:bitwise_and or:bitwise_or xor:bitwise_xor invert:bitwise_not "
    "lshift:bitwise_left_shift rshift:bitwise_right_shift"
)


def _known() -> Iterator[tuple[Any, tuple[str, Any, bool, bool]]]:
    """Functions of numbers: their name, the new-tensor form, whether reflected, in place."""
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
    for of in (torch, torch.Tensor):  # of two tensors; of one they reduce
        yield of.min, ("minimum", torch.minimum, False, False)
        yield of.max, ("maximum", torch.maximum, False, False)


_KNOWN = dict(_known())
_IN_PLACE = frozenset(
    function
    for holder in _HOLDERS
    for name in (
        "__setitem__",
        *(n for n in dir(holder) if n[0] != "_" == n[-1] and "resize" not in n),
    )
    if callable(function := getattr(holder, name, None))
)
_QUESTIONS = _named(_HOLDERS, "dim size stride numel is_floating_point is_complex") | {
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "ndim", "is_cuda", "requires_grad")
}
# They read no number of their first argument.
_LIKE = _named(
    _HOLDERS,
    "empty_like full_like ones_like zeros_like new_empty new_full new_ones new_tensor new_zeros",
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
