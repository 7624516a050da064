"""Runs score_mod and mask_mod once, and writes down what has to be computed for every pair.

FlexAttention's functions `score_mod(score, b, h, q_idx, kv_idx)` and `mask_mod(b, h, q_idx,
kv_idx)` are defined on numbers. `trace` calls them with 0-d tensors under a TorchFunctionMode, which
sees every call of PyTorch. Each value has a kind: what it depends on. Everything that does not
depend on query and key at once is computed by PyTorch's own operations, on vectors over the rows,
the keys or the distances i - j: any operation is allowed there, and autograd records it. What
depends on both is written into a list (`_program_list.py`) that the kernels run inside their tiles.

In between stand 0-d tensors, "places", whose numbers mean nothing: they answer questions such as
`score.dtype` or `b.new_ones(())`, and their attribute `_attn` holds the Value.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torch_attn._program_list import (
    DISTANCE,
    HEAD,
    KEY,
    PAIR,
    ROW,
    RULES,
    List,
    Value,
    letter,
)

__all__ = ["Program", "trace"]

MOST_OPERATIONS, MOST_LEAVES = 64, 16
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Program:
    """What the kernels run for every pair, and the numbers that it reads.

    The leaves of one pair (i, j) are row i, key j and distance i - j + S - 1. B and H are 1 where
    no number depends on the entry or the head. Each tensor is None where the program reads none.

    Attributes:
        score: the list that computes the score; None without a score_mod.
        mask: the list that says whether a key is visible; None without a mask_mod.
        row_terms: ``[B|1, H|1, L, R]``, float32 (float64 for inputs in float64), with gradients to
            what the functions captured.
        key_terms: ``[B|1, H|1, S, K]``, likewise.
        distance_terms: ``[B|1, H|1, L + S - 1, D]``, likewise.
        row_numbers: ``[B|1, H|1, L, R]``, int32: whole numbers, and booleans as 0 and 1.
        key_numbers: ``[B|1, H|1, S, K]``, likewise.
        distance_numbers: ``[B|1, H|1, L + S - 1, D]``, likewise.
    """

    score: str | None
    mask: str | None
    row_terms: Tensor | None
    key_terms: Tensor | None
    distance_terms: Tensor | None
    row_numbers: Tensor | None
    key_numbers: Tensor | None
    distance_numbers: Tensor | None

    def __str__(self) -> str:
        parts = [f"{n}:\n{text}" for n in ("score", "mask") if (text := getattr(self, n))]
        for name in _LEAVES.values():
            leaves = getattr(self, name)
            if leaves is not None:
                parts.append(f"{name}: {list(leaves.shape)} {leaves.dtype}\n")
        return "".join(parts)


_LEAVES = {
    (name, type_): f"{name}_{noun}"
    for type_, noun in (("f", "terms"), ("i", "numbers"))
    for name in ("row", "key", "distance")
}


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
        batch, heads, queries, keys: the sizes B, H (of the query), L and S.
        dtype: of query, key and value. Scores are float32, or float64 for float64.
        device: of the leaves.

    Raises:
        RuntimeError: the function does what cannot be run for each pair. The message names the
            operation, the line, and what to do instead.
    """
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    tracer = _Tracer((batch, heads, queries, keys), compute, torch.device(device))
    with contextlib.ExitStack() as stack:
        kind = tracer.device.type
        if torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
        score = mask = None
        if score_mod is not None:
            score = tracer.run(score_mod, [tracer.score(), *tracer.indices()])
            if letter(score.dtype) != "f":
                tracer.fail(f"score_mod returned {score.dtype}", "return a floating number")
        if mask_mod is not None:
            with torch.no_grad():
                tracer.tracking = False
                mask = tracer.run(mask_mod, tracer.indices())
            if mask.dtype != torch.bool:
                tracer.fail(f"mask_mod returned {mask.dtype}", "return a boolean: True is visible")
        return tracer.program(score, mask)


class _Mode(TorchFunctionMode):
    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self.tracer.call(func, args, kwargs or {})


class _Tracer:
    """One call of `trace`: the values of both functions, and the list."""

    def __init__(self, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        B, H, L, S = sizes
        self.device = device
        self.list = List(dtype, torch.compiler.is_compiling())
        self.tracking = torch.is_grad_enabled()
        self.computed: dict[Any, Value] = {}  # by function and arguments
        self.captured: dict[int, tuple[Tensor, Value]] = {}  # 0-d tensors, by id
        self.made: list[Tensor] = []  # by the functions themselves
        self.lengths = {ROW: L, KEY: S, DISTANCE: max(L + S - 1, 0)}

        def index(size: int, axis: int, kind: int, **fields: Any) -> Value:
            shape = [1, 1, 1]
            shape[axis] = size
            tensor = torch.arange(size, device=device).view(shape)
            limits = (0, max(size - 1, 0))
            return self.list.value(kind, torch.int64, tensor=tensor, limits=limits, **fields)

        self.of_indices = [
            index(B, 0, HEAD),
            index(H, 1, HEAD),
            index(L, 2, ROW, affine=(1, 0, 0)),
            index(S, 2, KEY, affine=(0, 1, 0)),
        ]
        self.distance: Tensor | None = None

    def score(self) -> Tensor:
        node = self.list.add("f", "score")
        return self.place(self.list.value(PAIR, self.list.dtype, node=node))

    def indices(self) -> list[Tensor]:
        return [self.place(value) for value in self.of_indices]

    def place(self, value: Value) -> Tensor:
        """A tensor that stands for the value in the user's function."""
        tensor = torch.empty(value.shape, dtype=value.dtype, device=self.device)
        tensor._attn = value  # type: ignore[attr-defined]
        return tensor

    def run(self, function: Callable[..., Any], arguments: list[Tensor]) -> Value:
        with _Mode(self):
            result = function(*arguments)
        if isinstance(result, bool | int | float):
            result = torch.tensor(result, device=self.device)
            self.made.append(result)
        value = self.value(result) if isinstance(result, Tensor) else None
        if value is None or value.shape:
            what = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
            self.fail(f"the function returned {what}", "return a 0-d tensor: one number for a pair")
        return value

    def value(self, x: Any) -> Value | None:
        """The Value of a tensor: traced, or a 0-d tensor that is captured or made inside.

        None for other tensors.
        """
        value: Value | None = getattr(x, "_attn", None)
        if value is not None or x.dim():
            return value
        entry = self.captured.get(id(x))
        if entry is not None:
            return entry[1]
        self.check_captured(x)
        value = self.list.value(HEAD, x.dtype, tensor=x.view(1, 1, 1))
        value.constant = any(x is made for made in self.made)
        self.captured[id(x)] = x, value
        return value

    # A call of PyTorch inside the user's function.

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known = _KNOWN.get(func)
        if known is not None:
            name, function, reflected, in_place = known
            traced, scalar, values = False, True, []
            for x in args:
                if isinstance(x, Tensor):
                    traced = traced or hasattr(x, "_attn")
                    x = self.value(x)
                    scalar = scalar and x is not None and not x.shape
                values.append(x)
            named = kwargs
            if kwargs:
                named = {}
                for key, x in kwargs.items():
                    if isinstance(x, Tensor):
                        traced = traced or hasattr(x, "_attn")
                        x = self.value(x)
                        scalar = scalar and x is not None and not x.shape
                    named[key] = x
            if traced and scalar:
                if reflected:
                    values.reverse()
                result = self.elementwise(name, function, values, named)
                if in_place or named.get("inplace"):
                    return self.assign(args[0], result, name)
                return self.place(result)
        elif func is torch.Tensor.__getitem__:
            return self.getitem(*args)
        elif func in _QUESTIONS:
            return func(*args, **kwargs)
        return self.general(func, args, kwargs)

    def assign(self, target: Any, value: Value, name: str) -> Tensor:
        """`target += x`: other names of the same tensor see it too."""
        if not hasattr(target, "_attn"):
            self.fail(f"{name} changes a captured tensor in place", "compute a new tensor instead")
        if not torch.can_cast(value.dtype, target.dtype):
            self.fail(f"{name} changes {target.dtype} in place to {value.dtype}", "write x = x + y")
        target._attn = value
        return target  # type: ignore[no-any-return]

    def elementwise(
        self, name: str, function: Any, values: list[Any], named: dict[str, Any]
    ) -> Value:
        """A function of numbers, each number by itself."""
        operands = [x for x in (*values, *named.values()) if isinstance(x, Value)]
        kind = _together(operands)
        affine = _AFFINE.get(name) and not named and self.affine(name, values)
        if affine:
            if kind == PAIR and (moved := self.of_affine(affine)):
                return moved
        elif kind == PAIR and name in _COMPARISONS and len(values) == 2:
            difference = self.affine("sub", values)
            if difference and (moved := self.of_affine(difference)):
                kind, values = moved.kind, [moved, 0]
        if kind == PAIR:
            result = self.of_pair(name, values, named)
        else:
            result = self.vector(kind, function, values, named)
        if affine:
            result.affine = affine
        return result

    def vector(self, kind: int, function: Any, values: list[Any], named: dict[str, Any]) -> Value:
        """Computes numbers that are not of the pair; the same ones only once."""
        operands = [x for x in (*values, *named.values()) if isinstance(x, Value)]
        grad = torch.is_grad_enabled() and any(x.dtype.is_floating_point for x in operands)
        key = (function, grad, *map(_key, values), *((n, _key(x)) for n, x in named.items()))
        found = self.computed.get(key)
        if found is None:
            self.check_gradients()
            numbers = [self.numbers(x) for x in values]
            tensor = function(*numbers, **{n: self.numbers(x) for n, x in named.items()})
            constant = all(x.constant for x in operands)
            found = self.list.value(kind, tensor.dtype, tensor=tensor, constant=constant)
            self.computed[key] = found
        return found

    def of_pair(self, name: str, values: list[Any], named: dict[str, Any]) -> Value:
        rule = RULES.get(name)
        if rule is None:
            self.unknown(name)
        if self.tracking and not torch.is_grad_enabled():
            self.check_gradients()
            if any(letter(x.dtype) == "f" for x in values if isinstance(x, Value)):
                self.fail(f"{name} under no_grad of a value of the pair", "leave no_grad out")
        try:
            return rule(self.list, *values, **named)
        except (NotImplementedError, TypeError) as error:
            self.fail(f"of a value of the pair there is no {error}")

    # a i + b j + c

    def affine(self, name: str, values: list[Any]) -> tuple[int, int, Any] | None:
        """The affine form of a sum, difference, negative or product with a number, or None."""
        forms = []
        for x in values:
            if isinstance(x, Value):
                if x.affine is not None:
                    forms.append(x.affine)
                elif x.kind == HEAD and letter(x.dtype) == "i" and not x.shape:
                    forms.append((0, 0, x.tensor))
                else:
                    return None
            elif type(x) is int:
                forms.append((0, 0, x))
            else:
                return None
        (a, b, c), *others = forms
        if name == "neg":
            return -a, -b, -c
        d, e, f = others[0]
        if name == "mul":
            if type(f) is int and not d and not e:
                return a * f, b * f, c * f
            return (d * c, e * c, f * c) if type(c) is int and not a and not b else None
        return (a + d, b + e, c + f) if name == "add" else (a - d, b - e, c - f)

    def of_affine(self, affine: tuple[int, int, Any]) -> Value | None:
        """The value of a form that depends on i, on j or on i - j alone, or None."""
        a, b, c = affine
        if a + b and a and b:
            return None
        constant = type(c) is int
        key = affine if constant else (a, b, id(c))
        found = self.computed.get(key)
        if found is not None:
            return found
        L, S = self.lengths[ROW], self.lengths[KEY]
        if a + b:
            kind, tensor = (
                (ROW, self.of_indices[2].tensor) if a else (KEY, self.of_indices[3].tensor)
            )
            factor, least, most = a + b, 0, max((L if a else S) - 1, 0)
        elif a:
            if self.distance is None:
                self.distance = torch.arange(1 - S, L, device=self.device).view(1, 1, -1)
            kind, tensor, factor, least, most = DISTANCE, self.distance, a, 1 - S, L - 1
        else:
            kind, tensor, factor, least, most = (
                HEAD,
                torch.zeros_like(self.of_indices[0].tensor),
                1,
                0,
                0,
            )
        assert tensor is not None
        tensor = tensor if factor == 1 else -tensor if factor == -1 else tensor * factor
        if not constant or c:
            tensor = tensor + c
        found = self.list.value(kind, torch.int64, tensor=tensor, affine=affine)
        if constant:
            ends = (least * factor + c, most * factor + c)
            found.limits = (min(ends), max(ends))
        else:
            self.captured[id(c)] = c, found  # keeps c, so that its id stays its own
        self.computed[key] = found
        return found

    # table[index]

    def getitem(self, table: Any, key: Any) -> Any:
        """`table[index]`, of a captured tensor or of a vector-valued Value."""
        keys = list(key) if isinstance(key, tuple) else [key]
        if not any(hasattr(x, "_attn") for x in keys):
            return self.general(torch.Tensor.__getitem__, (table, key), {})
        value = getattr(table, "_attn", None)
        if Ellipsis in [x for x in keys if not isinstance(x, Tensor)]:
            at = next(n for n, x in enumerate(keys) if x is Ellipsis)
            rest = sum(x is not None for x in keys) - 1
            keys[at : at + 1] = [slice(None)] * (table.dim() - rest)
        indices: list[Value | None] = []
        for x in keys:
            if isinstance(x, Tensor):
                index = self.value(x)
                if index is None or index.shape or letter(index.dtype) != "i":
                    self.fail(
                        f"an index of {x.dtype} and shape {list(x.shape)}",
                        "index by whole 0-d tensors",
                    )
                indices.append(index)
            elif not isinstance(x, int):
                indices.append(None)
        if len(indices) > table.dim():
            self.fail(
                f"{len(indices)} indices of a tensor of shape {list(table.shape)}",
                "index fewer dimensions",
            )
        static = [slice(None) if isinstance(x, Tensor) else x for x in keys]
        if any(x != slice(None) for x in static):
            table = self.general(torch.Tensor.__getitem__, (table, tuple(static)), {})
            value = getattr(table, "_attn", None)
        indices += [None] * (table.dim() - len(indices))
        if value is None:
            self.check_captured(table)
            source, places = table, indices
        else:
            source, before = value.lookup or self.axes(value)
            remaining = iter(indices)
            places = [next(remaining) if x is None else x for x in before]
        return self.place(self.look_up(source, places))

    def axes(self, value: Value) -> tuple[Tensor, list[Value | None]]:
        """A vector-valued Value as a table whose first three dimensions are indexed by b, h, n."""
        assert value.tensor is not None
        places: list[Value | None] = []
        for axis, size in enumerate(value.tensor.shape[:3]):
            shape = [1, 1, 1]
            shape[axis] = size
            tensor = torch.arange(size, device=self.device).view(shape)
            kind = value.kind if axis == 2 else HEAD
            places.append(self.list.value(kind, torch.int64, tensor=tensor, limits=(0, size - 1)))
        return value.tensor, [*places, *[None] * (value.tensor.dim() - 3)]

    def look_up(self, source: Tensor, places: list[Value | None]) -> Value:
        kind = _together([x for x in places if x is not None])
        if kind == PAIR:
            self.gather_of_pair(source)
        for dim, x in enumerate(places):
            if x is not None:
                self.check_index(source, dim, x)
        shape = tuple(n for n, x in zip(source.shape, places, strict=True) if x is None)
        grad = torch.is_grad_enabled() and source.dtype.is_floating_point
        key = (id(source), grad, *((x.serial if x else None) for x in places))
        found = self.computed.get(key)
        if found is None:
            found = self.list.value(kind, source.dtype, shape=shape)
            found.lookup = source, places
            self.computed[key] = found
            if not shape:
                self.numbers(found)
        return found

    def gather_of_pair(self, source: Tensor) -> NoReturn:
        """Where strided operands (`bias[b, h, i, j]`) and gathers from a flat table will be."""
        self.fail(
            f"{self.name_of(source)} is indexed by a number that depends on query and key at once",
            "pass a bias of L x S as attn_mask=, or index by i, by j or by i - j",
        )

    def check_index(self, source: Tensor, dim: int, index: Value) -> None:
        size = source.size(dim)
        if index.limits is None and not self.list.compiling:
            assert index.tensor is not None
            # Numbers cannot be read under torch.func.vmap; index_select checks them there.
            with contextlib.suppress(RuntimeError):
                if index.tensor.numel():
                    index.limits = tuple(int(x) for x in index.tensor.detach().aminmax())  # type: ignore[assignment]
        if index.limits is not None:
            for number in index.limits:
                if not -size <= number < size:
                    self.fail(
                        f"index {number} is out of range for dimension {dim} of "
                        f"{self.name_of(source)}, which has {size} entries"
                    )

    def numbers(self, x: Any) -> Any:
        """The numbers of a Value, `[B|1, H|1, N|1, *shape]`; other arguments as they are."""
        if not isinstance(x, Value):
            return x
        if x.tensor is None:
            assert x.lookup is not None
            # Autograd's derivative of index_select adds in order; that of indexing does not.
            source, places = x.lookup
            indexed = [dim for dim, index in enumerate(places) if index is not None]
            rest = [dim for dim, index in enumerate(places) if index is None]
            if rest:
                source = source.permute(indexed + rest)
            sizes = source.shape[len(indexed) :]
            flat: Any = None
            for index, size in zip(
                (p for p in places if p is not None), source.shape, strict=False
            ):
                at: Any = index.tensor
                if index.limits is None or index.limits[0] < 0:
                    at = torch.where(at < 0, at + size, at)
                flat = at if flat is None else flat * size + at
            chosen = source.reshape(-1, *sizes).index_select(0, flat.reshape(-1))
            x.tensor = chosen.view(*flat.shape, *sizes)
        return x.tensor

    # Everything else

    def general(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Any function of values that are not of the pair, by torch.vmap over b, h and n."""
        flat, spec = pytree.tree_flatten((args, kwargs))
        values = {n: x._attn for n, x in enumerate(flat) if hasattr(x, "_attn")}
        name = getattr(func, "__name__", str(func))
        if func in _RANDOM:
            self.fail(f"{name} draws random numbers", "draw them before, and index the tensor")
        if not values or (func in _MAKERS and list(values) in ([], [0])):
            changed = args[0] if args and _changes(name) else kwargs.get("out")
            if changed is not None and not any(changed is x for x in self.made):
                self.fail(
                    f"{name} changes a captured tensor in place", "compute a new tensor instead"
                )
            result = func(*args, **kwargs)
            if func in _MAKERS:
                self.made.append(result)
            return result
        if func in _READS:
            self.fail(
                f"{name} reads a number that is another one for each pair",
                "use torch.where instead of if, minimum instead of min(), table[i] of a tensor",
            )
        if _changes(name) or "out" in kwargs or kwargs.get("inplace"):
            self.fail(
                f"{name} changes a tensor in place", "use the function that returns a new one"
            )
        kind = _together(values.values())
        if kind == PAIR:
            self.unknown(name)
        self.check_gradients()
        physical = [self.numbers(x) for x in values.values()]

        def one(*numbers: Tensor) -> Any:
            leaves = list(flat)
            for n, x in zip(values, numbers, strict=True):
                leaves[n] = x
            arguments, named = pytree.tree_unflatten(leaves, spec)
            return func(*arguments, **named)

        function, present = one, [a for a in (2, 1, 0) if any(x.size(a) != 1 for x in physical)]
        for axis in present:
            function = torch.vmap(
                function, tuple(0 if x.size(axis) != 1 else None for x in physical)
            )
        squeezed = [x.squeeze(tuple(a for a in (0, 1, 2) if x.size(a) == 1)) for x in physical]
        result = function(*squeezed)

        def back(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            for axis in (0, 1, 2):
                if axis not in present:
                    x = x.unsqueeze(axis)
            return self.place(self.list.value(kind, x.dtype, shape=tuple(x.shape[3:]), tensor=x))

        return pytree.tree_map(back, result)

    # The result

    def program(self, score: Value | None, mask: Value | None) -> Program:
        columns: dict[tuple[str, str], dict[int, Tensor]] = {key: {} for key in _LEAVES}

        def column(kind: str, serial: int, type_: str) -> int:
            chosen = columns[kind, "f" if type_ == "f" else "i"]
            chosen[serial] = self.list.leaves[type_, serial]
            return list(chosen).index(serial)

        texts = []
        for value, type_ in ((score, "f"), (mask, "b")):
            if value is None:
                texts.append(None)
                continue
            text = self.list.text(self.list.operand(value, type_), column)
            count = sum("%" in line[1:] for line in text.splitlines()[1:-1])
            if count > MOST_OPERATIONS:
                self.fail(
                    f"the function has {count} operations of the pair; at most {MOST_OPERATIONS}"
                )
            texts.append(text)
        leaves = {_LEAVES[key]: self.stack(key, list(x.values())) for key, x in columns.items()}
        return Program(*texts, **leaves)

    def stack(self, key: tuple[str, str], leaves: list[Tensor]) -> Tensor | None:
        """Leaves `[B|1, H|1, N|1]` as columns, `[B|1, H|1, N, n]`, each one contiguous."""
        name, type_ = key
        if not leaves:
            return None
        if len(leaves) > MOST_LEAVES:
            self.fail(f"the functions read {len(leaves)} {name} leaves; at most {MOST_LEAVES}")
        length = self.lengths[{"row": ROW, "key": KEY, "distance": DISTANCE}[name]]
        B, H = (max(x.size(axis) for x in leaves) for axis in (0, 1))
        whole = [x.expand(B, H, length) for x in leaves]
        if type_ == "i":
            whole = [x if x.dtype == torch.int32 else x.to(torch.int32) for x in whole]
        return torch.stack(whole, -2).transpose(-1, -2)

    # Errors

    def check_captured(self, x: Tensor) -> None:
        if x.layout != torch.strided or x.is_complex() or x.is_quantized:
            self.fail(
                f"a captured tensor of layout {x.layout} and {x.dtype}", "capture a dense real one"
            )

    def check_gradients(self) -> None:
        """autograd.Function runs its forward without gradients; its backward would be lost."""
        if self.tracking and not torch.is_grad_enabled() and not self.list.compiling:
            code = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
            frame: Any = sys._getframe()
            while frame is not None:
                if frame.f_code is code:
                    self.fail("an autograd.Function is called", "call PyTorch's functions")
                frame = frame.f_back

    def unknown(self, name: str) -> NoReturn:
        self.fail(
            f"{name} of a value that depends on query and key at once is not available",
            "pass an L x S bias as attn_mask=; for a dot product of captured vectors, append them "
            "to query and key as more columns",
        )

    def name_of(self, tensor: Tensor) -> str:
        shape = f"of shape {list(tensor.shape)}"
        frame = _frame_of_user()
        names = [n for n, x in frame.f_locals.items() if x is tensor] if frame else []
        return f"{names[0]} {shape}" if names else f"the tensor {shape}"

    def fail(self, what: str, hint: str = "") -> NoReturn:
        where = ""
        if not self.list.compiling and (frame := _frame_of_user()):
            file, line = frame.f_code.co_filename, frame.f_lineno
            text = linecache.getline(file, line).strip()
            where = f" ({file}, line {line}: {text})"
        raise RuntimeError(f"torch_attn.flex_attention: {what}{where}{hint and f'; {hint}'}")


def _together(values: Any) -> int:
    """The kind of a function of values: PAIR where two kinds meet."""
    kind = HEAD
    for x in values:
        if x.kind != kind and x.kind != HEAD:
            if kind != HEAD:
                return PAIR
            kind = x.kind
    return kind


def _key(x: Any) -> Any:
    return ("value", x.serial) if isinstance(x, Value) else (type(x), str(x))


def _changes(name: str) -> bool:
    """Whether a function of this name changes its first argument."""
    return (
        name in ("__setitem__", "requires_grad_") or name.endswith("_") and not name.endswith("__")
    )


_HERE = tuple(os.path.dirname(os.path.abspath(x)) + os.sep for x in (__file__, torch.__file__))


def _frame_of_user() -> Any:
    """The innermost frame that is neither PyTorch's nor ours."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return frame


_AFFINE = {name: True for name in ("add", "sub", "neg", "mul")}
_COMPARISONS = frozenset(
    "eq ne lt le gt ge not_equal less less_equal greater greater_equal".split()
)
_MORE_ELEMENTWISE = (
    "acos acosh asin asinh atan atan2 atanh bitwise_left_shift bitwise_right_shift ceil copysign "
    "cos cosh deg2rad digamma elu erf erfc erfinv expm1 float_power fmax fmin fmod frac gelu "
    "heaviside hypot isfinite isinf isnan ldexp leaky_relu lgamma log10 log2 logaddexp "
    "logaddexp2 logit logsigmoid nan_to_num positive rad2deg round sgn sign signbit silu sin sinc "
    "sinh softplus tan trunc xlogy"
)
_OPERATORS = (
    "add sub mul mod:remainder truediv:div div floordiv:floor_divide pow and:bitwise_and "
    "or:bitwise_or xor:bitwise_xor invert:bitwise_not neg abs eq ne lt le gt ge "
    "lshift:bitwise_left_shift rshift:bitwise_right_shift pos:positive"
)


def _known() -> Iterator[tuple[Any, tuple[str, Any, bool, bool]]]:
    """Functions of numbers: name, the one that returns a new tensor, reflected, in place."""
    holders = (torch.Tensor, torch, torch.nn.functional, torch.special)
    for name in [*RULES, *_MORE_ELEMENTWISE.split()]:
        for holder in holders:
            if function := getattr(holder, name, None):
                yield function, (name, function, False, False)
        if function := getattr(torch.Tensor, f"{name}_", None):
            yield function, (name, getattr(torch.Tensor, name), False, True)
    yield torch.rsub, ("sub", torch.sub, True, False)
    for holder in (torch, torch.Tensor):  # of two tensors; of one they reduce
        yield holder.min, ("minimum", torch.minimum, False, False)
        yield holder.max, ("maximum", torch.maximum, False, False)
    for word in _OPERATORS.split():
        operator, _, name = word.partition(":")
        name = name or operator
        plain = getattr(torch, name)
        for prefix, reflected, in_place in (
            ("", False, False),
            ("r", True, False),
            ("i", False, True),
        ):
            if function := getattr(torch.Tensor, f"__{prefix}{operator}__", None):
                yield function, (name, plain, reflected, in_place)


_KNOWN = dict(_known())


def _named(names: str, *holders: Any) -> frozenset[Any]:
    return frozenset(f for n in names.split() for h in holders if (f := getattr(h, n, None)))


_QUESTIONS = (
    _named("dim size stride numel is_floating_point is_complex ndimension", torch.Tensor)
    | {
        getattr(torch.Tensor, name).__get__
        for name in "shape dtype device layout ndim is_cuda is_sparse requires_grad itemsize".split()
    }
    | _named("is_floating_point is_complex numel", torch)
)
_MAKERS = _named(
    "arange as_tensor empty empty_like eye full full_like linspace logspace ones ones_like "
    "scalar_tensor tensor zeros zeros_like",
    torch,
) | _named("new_empty new_full new_ones new_tensor new_zeros", torch.Tensor)
_READS = _named(
    "item tolist numpy __bool__ __int__ __float__ __index__ __complex__ __contains__ __iter__ "
    "__len__ __array__ is_nonzero nonzero equal allclose",
    torch.Tensor,
) | _named("is_nonzero nonzero equal allclose", torch)
_RANDOM = _named(
    "rand randn randint randperm rand_like randn_like randint_like bernoulli normal multinomial "
    "poisson dropout alpha_dropout feature_dropout",
    torch,
    torch.nn.functional,
    torch.Tensor,
) | _named("uniform_ normal_ random_ exponential_ bernoulli_", torch.Tensor)
