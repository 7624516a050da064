"""Indexes tensors: `table[index]` in a score_mod or mask_mod, of a captured or a computed tensor.

If the index depends on q_idx alone, on kv_idx alone, on q_idx - kv_idx alone or on none of these,
PyTorch looks up a vector: a number for each row, key or distance. Otherwise the kernels read the
tensor in place, as a view with an element for each pair, or as a table.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from torch_attn._programs.errors import fail, name_of
from torch_attn._programs.general import call_general
from torch_attn._programs.list import List
from torch_attn._programs.value import HEAD, KEY, PAIR, ROW, Value, as_dtype, letter, together
from torch_attn._programs.values import Values


class Tables:
    """The tensors that kernels read in place, and all indexing.

    Args:
        values: the values of the call.
        dtypes: of the tensors that the kernels can read for each pair.
    """

    def __init__(self, values: Values, dtypes: tuple[torch.dtype, ...]) -> None:
        self.values, self.dtypes = values, dtypes
        self.list, self.tensors = values.list, values.tensors
        self.tables: dict[Any, tuple[int, Tensor]] = {}  # (number, table) by what is read
        self.pairs: Tensor | None = None  # `[B|1, H|1, L, S]`

    def getitem(self, table: Any, key: Any) -> Any:
        """Returns `table[key]`, where the table is a captured tensor or a computed vector."""
        keys = list(key) if isinstance(key, tuple) else [key]
        value: Value | None = getattr(table, "_attn", None)
        chosen: Any = value.lookup if value is not None and value.kind == PAIR else None
        if chosen is None and not any(isinstance(x, Tensor) and hasattr(x, "_attn") for x in keys):
            return call_general(self.values, torch.Tensor.__getitem__, (table, key), {})
        for n, x in enumerate(keys):
            if x is Ellipsis:
                others = sum(y is not None for y in keys) - 1
                keys[n : n + 1] = [slice(None)] * (table.dim() - others)
                break
        if sum(x is not None for x in keys) > table.dim():
            fail(f"{len(keys)} indices of {name_of(table)}", "give fewer")
        # First applies the parts of `key` that are not tensors: numbers, slices and None.
        static = [slice(None) if isinstance(x, Tensor) else x for x in keys]
        if chosen is not None:
            chosen = self._part(chosen[0], chosen[1], static)
        elif any(x != slice(None) for x in static):
            table = call_general(self.values, torch.Tensor.__getitem__, (table, tuple(static)), {})
        given: list[Value | None] = []
        for x in keys:
            if isinstance(x, Tensor):
                index = self.values.of_tensor(x)
                if index is None or index.shape or letter(index.dtype) != "i":
                    what = f"an index of {x.dtype} and shape {list(x.shape)}"
                    fail(what, "index by whole numbers, each a 0-d tensor")
                given.append(index)
            elif type(x) is not int:
                given.append(None)
        value = getattr(table, "_attn", None)
        if value is None:
            self.tensors.check_captured(table)
            given += [None] * (table.dim() - len(given))
            return self.values.stand_in(self.look_up(table, given))
        source, before = chosen or value.lookup or (value.tensor, self._axes(value))
        remaining = iter(given)
        indices = [x or next(remaining, None) for x in before]
        return self.values.stand_in(self.look_up(source, indices))

    def _part(
        self, source: Tensor, before: list[Value | None], static: list[Any]
    ) -> tuple[Tensor, list[Value | None]]:
        """Returns what numbers and slices choose of `source`, after an index of the pair."""
        if None in static:
            fail("None as an index after an index of the pair", "leave the dimension out")
        remaining = iter(static)
        key = [slice(None) if x is not None else next(remaining, slice(None)) for x in before]
        part = call_general(self.values, torch.Tensor.__getitem__, (source, tuple(key)), {})
        return part, [x for x, chosen in zip(before, key, strict=True) if type(chosen) is not int]

    def _axes(self, value: Value) -> list[Value | None]:
        """Returns an index for each dimension of a value's vector `[B|1, H|1, N|1, *shape]`.

        So the vector can be looked up like a captured tensor. For each dimension of `shape`, the
        list has None instead of an index, because the user's function gives that index.
        """
        first = []
        for axis, n in enumerate(value.tensor.shape[:3]):
            if axis < 2 and n == self.values.sizes[axis]:
                first.append(self.values.indices[axis])
            elif axis == 2 and value.kind in (ROW, KEY):
                first.append(self.values.indices[value.kind + 1])
            else:
                first.append(self.values.numbers(value.kind if axis == 2 else HEAD, axis, n))
        return [*first, *[None] * len(value.shape)]

    def _axis_of(self, index: Value) -> int | None:
        """Returns 0 for b, 1 for h, and None for any other index."""
        return next((n for n in (0, 1) if index.serial == self.values.indices[n].serial), None)

    def look_up(self, source: Tensor, indices: list[Value | None]) -> Value:
        """Returns `source[indices]`, where None stands for a whole dimension."""
        self.tensors.use(source)
        kind = together(x for x in indices if x is not None)
        # A mask_mod reads a table instead of a view of pairs.
        of_mask = kind == PAIR and self.list.in_mask
        key = self.tensors.serial_of(source), of_mask, *(x and x.serial for x in indices)
        if (found := self.values.computed.get(key)) is not None:
            return found
        shape = tuple(n for n, x in zip(source.shape, indices, strict=True) if x is None)
        if kind != PAIR:
            for dim, x in enumerate(indices):
                if x is not None:
                    _check_index(self.list, source, dim, x)
            make = functools.partial(_select, self.tensors.wide(source), indices)
            found = self.list.value(kind, source.dtype, make, shape=shape)
            if not shape:
                found.tensor  # noqa: B018 (now, while gradients are on or off as asked)
        elif shape:
            found = self.list.value(PAIR, source.dtype, shape=shape)
        else:
            found = self._strided(source, indices) or self._gathered(source, indices)
        found.lookup = source, indices
        self.values.computed[key] = found
        return found

    def _strided(self, source: Tensor, indices: list[Any]) -> Value | None:
        """Returns `source[b, h, q_idx, kv_idx]` as a view `[B|1, H|1, L, S]`, read as a mask.

        Instead of q_idx or kv_idx, an index may have the form ``a q_idx + b kv_idx + c``, where a,
        b and c are whole numbers. Returns None if there is no such view, for example because an
        index has another form, or if the user's function has already read such a view.
        """
        if self.pairs is not None or not source.is_floating_point() or self.list.in_mask:
            return None
        sizes = self.values.sizes
        L, S = sizes[2:]
        dims: list[int | None] = [None, None]  # of b and of h
        sums: list[tuple[int, int, int, int]] = []
        for dim, x in enumerate(indices):
            axis = self._axis_of(x)
            if axis is not None and dims[axis] is None and source.size(dim) == sizes[axis]:
                dims[axis] = dim
                continue
            a, b, c = x.affine or (0, 0, 0)
            if type(c) is not int or not (a or b):
                return None
            ends = [a * i + b * j + c for i in (0, L - 1) for j in (0, S - 1)]
            if min(ends) < 0 or max(ends) >= source.size(dim):
                return None
            sums.append((dim, a, b, c))
        is_part = sorted(form[1:3] for form in sums) == [(0, 1), (1, 0)]  # rows and columns
        # Else several pairs may read one number, whose gradient the kernels sum in its dtype.
        if source.dtype not in self.dtypes or not is_part:
            source = as_dtype(self.tensors.wide(source), self.list.dtype)
        if is_part:
            sums.sort(key=lambda form: form[2])
        view = source.permute([d for d in dims if d is not None] + [d for d, *_ in sums])
        view = view[tuple(None if d is None else slice(None) for d in dims)]
        if is_part:
            (_, _, _, row), (_, _, _, column) = sums
            if view.shape[2:] != (L, S):
                view = view[..., row : row + L, column : column + S]
        elif self.list.compiling or torch._C._functorch.is_functorch_wrapped_tensor(source):
            return None  # torch.compile knows no storage_offset()
        elif (sloped := _sloped(view, [form[1:] for form in sums], L, S)) is not None:
            view = sloped
        else:
            return None
        self.pairs = view
        return self.list.value(PAIR, source.dtype, node=self.list.add("f", "pair"))

    def _gathered(self, source: Tensor, indices: list[Any]) -> Value:
        """Returns `source[indices]` of kind PAIR, which the kernels read from a table.

        The table has four dimensions: batch, head, row and a last one. A dimension of `source` with
        the index b or h becomes the table's batch or head. A dimension with the index q_idx or
        kv_idx (plus a constant) becomes the table's rows. All other dimensions are flattened into
        the table's last dimension, and their indices become one index.
        """
        own: list[int | None] = [None, None, None]  # dimensions of b, h, and rows
        counts = [*self.values.sizes[:2], 0]
        name, begin, type_ = "table", 0, letter(source.dtype)
        for dim, x in enumerate(indices):
            a, b, c = x.affine or (0, 0, -1)
            axis = self._axis_of(x)
            if x.kind in (ROW, KEY) and own[2] is None and a + b == 1 and type(c) is int and c >= 0:
                axis, begin, counts[2] = 2, c, self.values.lengths[x.kind]
                name = "row_table" if a else "key_table"
            if axis is not None and own[axis] is None:
                _check_index(self.list, source, dim, x)
                own[axis] = dim
        index = self.list.node_of(self._index_of(source, indices, own), "i")
        if self.list.reads(index, "score"):
            fail(f"an index of {name_of(source)} depends on the score")
        key = self.tensors.serial_of(source), name, *own, begin
        number, _ = self.tables.setdefault(key, (len(self.tables), source))
        if ("t", number) not in self.list.leaves:
            table = _table(self.tensors.wide(source), own, begin, counts)
            table = as_dtype(table, self.list.dtype)
            size = math.prod(table.shape[3:])
            self.list.leaves["t", number] = table.reshape(*table.shape[:3], size)
        node = self.list.add("f", name, ("t", number), index)
        if type_ != "f":
            node = self.list.add(type_, "bool" if type_ == "b" else "int", node)
        value = self.list.value(PAIR, source.dtype, node=node)
        if type_ == "i":
            value.limits = self.list.read_limits(source)
            most = 2**53 if self.list.dtype == torch.float64 else 2**24
            if value.limits and not -most <= value.limits[0] <= value.limits[1] <= most:
                power = most.bit_length() - 1
                fail(f"{name_of(source)} has whole numbers beyond 2^{power}")
        return value

    def _index_of(self, source: Tensor, indices: list[Any], own: list[int | None]) -> Value:
        """Returns the index into a table's last dimension.

        It combines the indices of all dimensions of `source` that are not in `own`.
        """
        of = self.values.of
        parts: dict[int, Any] = {}  # sums by kind: PyTorch adds every kind but PAIR
        is_inside: Any = None
        stride = 1
        for dim in reversed(range(source.dim())):
            x, size = indices[dim], source.size(dim)
            if dim in own:
                continue
            if x.dtype not in (torch.int32, torch.int64):  # it would wrap around below
                x = self.values.elementwise("long", torch.Tensor.long, [x], {}, [x])
            if x.kind != PAIR:
                _check_index(self.list, source, dim, x)
            limits = self.list.limits(x)
            if limits is None or limits[0] < -size or limits[1] >= size:
                inside = of("logical_and", of("ge", x, -size), of("lt", x, size))
                is_inside = of("logical_and", is_inside, inside) if is_inside else inside
            if limits is None or limits[0] < 0:
                x = of("where", of("lt", x, 0), of("add", x, size), x)
            if x.kind == PAIR:  # what is outside is not used, so it may wrap around
                x = self.list.value(PAIR, x.dtype, node=x.node, limits=(0, size - 1))
            part = of("mul", x, stride) if stride != 1 else x
            parts[x.kind] = of("add", parts[x.kind], part) if x.kind in parts else part
            stride *= size
        if stride >= 2**31:
            fail(f"a table of {stride} numbers", "they must be fewer than 2^31")
        index: Value = functools.reduce(
            lambda x, y: of("add", x, y), (parts[kind] for kind in sorted(parts))
        )
        if is_inside is not None:
            index = of("where", is_inside, index, 2**31 - 1)
        return index


def _sloped(view: Tensor, sums: list[Any], L: int, S: int) -> Tensor | None:
    """Returns a view `[B|1, H|1, L, S]` of a tensor `[B|1, H|1, *source]`, or None.

    Args:
        sums: for each dimension of source, the index's form (a, b, c).
    """
    backwards = [2 + n for n, (_, b, _) in enumerate(sums) if b < 0]
    view = view.flip(backwards) if backwards else view
    at = row = column = 0
    for n, (a, b, c) in enumerate(sums):
        stride = view.stride(2 + n)
        if b < 0:
            a, b, c = -a, -b, view.size(2 + n) - 1 - c
        at, row, column = at + c * stride, row + a * stride, column + b * stride
    if row < 0 or column < 0:
        return None
    shape, strides = (*view.shape[:2], L, S), (*view.stride()[:2], row, column)
    return view.as_strided(shape, strides, view.storage_offset() + at)


def _table(source: Tensor, own: list[int | None], begin: int, counts: list[int]) -> Tensor:
    """Returns a view `[B|1, H|1, L|S|1, ...]` of `source`, see `Tables._gathered`."""
    table = source
    for n, dim in enumerate(own):
        # Slices only if necessary, because the derivative of a slice makes a copy.
        if dim is not None and table.size(dim) != counts[n]:
            table = table.narrow(dim, begin if n == 2 else 0, counts[n])
    found = [dim for dim in own if dim is not None]
    table = table.permute(*found, *(d for d in range(source.dim()) if d not in found))
    return table[tuple(None if dim is None else slice(None) for dim in own)]


def _check_index(ops: List, source: Tensor, dim: int, index: Value) -> None:
    size = source.size(dim)
    for number in ops.limits(index) or ():
        if not -size <= number < size:
            name = name_of(source)
            what = f"index {number} is out of range in dimension {dim} of {name}"
            fail(what, is_wrong=True)


def _select(source: Tensor, indices: list[Value | None]) -> Tensor:
    """Returns `source[indices]`, `[B|1, H|1, N|1, *rest]`, which PyTorch computes.

    Calls index_select, because its derivative adds in a fixed order. The derivative of
    `source[indices]` adds with atomics, in an order that varies.
    """
    rest = [dim for dim, x in enumerate(indices) if x is None]
    if rest:
        source = source.permute([dim for dim, x in enumerate(indices) if x is not None] + rest)
    flat: Any = None
    for index, size in zip((x for x in indices if x is not None), source.shape, strict=False):
        at = index.tensor.long()  # an int8 would wrap around below
        if index.limits is None or index.limits[0] < 0:
            at = torch.where(at < 0, at + size, at)
        flat = at if flat is None else flat * size + at
    sizes = source.shape[source.dim() - len(rest) :]
    chosen = source.reshape(-1, *sizes).index_select(0, flat.reshape(-1))
    return chosen.view(*flat.shape, *sizes)
