"""Computes `table[index]` in a score_mod or mask_mod; the table is a captured or computed tensor.

If the index depends on the query i alone, on the key j alone, on i - j alone or on none of these,
PyTorch looks up a vector: a number for each row, key or distance. Otherwise the kernels read the
tensor in place, as a view with an element for each pair, or as a table.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_attn._program_list import HEAD, KEY, PAIR, ROW, Value, as_dtype, letter, together

if TYPE_CHECKING:
    from torch_attn._program_trace import Tracer

__all__ = ["getitem"]


def getitem(tracer: Tracer, table: Any, key: Any) -> Any:
    """Returns `table[key]`, where the table is a captured tensor or a vector that was computed."""
    keys = list(key) if isinstance(key, tuple) else [key]
    value: Value | None = getattr(table, "_attn", None)
    chosen: Any = value.lookup if value is not None and value.kind == PAIR else None
    if chosen is None and not any(isinstance(x, Tensor) and hasattr(x, "_attn") for x in keys):
        return tracer.general(torch.Tensor.__getitem__, (table, key), {})
    for n, x in enumerate(keys):
        if x is Ellipsis:
            others = sum(y is not None for y in keys) - 1
            keys[n : n + 1] = [slice(None)] * (table.dim() - others)
            break
    if sum(x is not None for x in keys) > table.dim():
        tracer.fail(f"{len(keys)} indices of {tracer.name_of(table)}", "give fewer")
    # First applies the parts of `key` that are not tensors: numbers, slices and None.
    static = [slice(None) if isinstance(x, Tensor) else x for x in keys]
    if chosen is not None:
        chosen = _part(tracer, chosen[0], chosen[1], static)
    elif any(x != slice(None) for x in static):
        table = tracer.general(torch.Tensor.__getitem__, (table, tuple(static)), {})
    indices: list[Value | None] = []
    for x in keys:
        if isinstance(x, Tensor):
            index = tracer.value(x)
            if index is None or index.shape or letter(index.dtype) != "i":
                what = f"an index of {x.dtype} and shape {list(x.shape)}"
                tracer.fail(what, "index by whole numbers, each a 0-d tensor")
            indices.append(index)
        elif type(x) is not int:
            indices.append(None)
    value = getattr(table, "_attn", None)
    if value is None:
        tracer.check_captured(table)
        indices += [None] * (table.dim() - len(indices))
        return tracer.put(look_up(tracer, table, indices))
    source, before = chosen or value.lookup or (value.tensor, _axes(tracer, value))
    remaining = iter(indices)
    return tracer.put(look_up(tracer, source, [x or next(remaining, None) for x in before]))


def _part(
    tracer: Tracer, source: Tensor, before: list[Value | None], static: list[Any]
) -> tuple[Tensor, list[Value | None]]:
    """Returns what numbers and slices choose of `source`, after an index of the pair."""
    if None in static:
        tracer.fail("None as an index after an index of the pair", "leave the dimension out")
    remaining = iter(static)
    key = [slice(None) if x is not None else next(remaining, slice(None)) for x in before]
    part = tracer.general(torch.Tensor.__getitem__, (source, tuple(key)), {})
    return part, [x for x, place in zip(before, key, strict=True) if type(place) is not int]


def _axes(tracer: Tracer, value: Value) -> list[Value | None]:
    """Returns an index for each dimension of a value's vector `[B|1, H|1, N|1, *shape]`.

    So the vector can be looked up like a captured tensor. For each dimension of `shape`, the list
    has None in place of an index, because the user's function gives that index.
    """
    first = []
    for axis, n in enumerate(value.tensor.shape[:3]):
        if axis < 2 and n == tracer.sizes[axis]:
            first.append(tracer.indices[axis])
        elif axis == 2 and value.kind in (ROW, KEY):
            first.append(tracer.indices[value.kind + 1])
        else:
            first.append(tracer.index(value.kind if axis == 2 else HEAD, axis, n))
    return [*first, *[None] * len(value.shape)]


def look_up(tracer: Tracer, source: Tensor, places: list[Value | None]) -> Value:
    tracer.use(source)
    kind = together(x for x in places if x is not None)
    of_mask = (
        kind == PAIR and tracer.list.in_mask
    )  # a mask_mod reads a table instead of a view of pairs
    key = tracer.place_of(source), of_mask, *(x and x.serial for x in places)
    if (found := tracer.computed.get(key)) is not None:
        return found
    shape = tuple(n for n, x in zip(source.shape, places, strict=True) if x is None)
    if kind != PAIR:
        for dim, x in enumerate(places):
            if x is not None:
                _check_index(tracer, source, dim, x)
        make = functools.partial(_select, tracer.wide(source), places)
        found = tracer.list.value(kind, source.dtype, make, shape=shape)
        if not shape:
            found.tensor  # noqa: B018 (now, while gradients are on or off as asked)
    elif shape:
        found = tracer.list.value(PAIR, source.dtype, shape=shape)
    else:
        found = _strided(tracer, source, places) or _gathered(tracer, source, places)
    found.lookup = source, places
    tracer.computed[key] = found
    return found


def _strided(tracer: Tracer, source: Tensor, places: list[Any]) -> Value | None:
    """Returns `source[b, h, i, j]` as a view `[B|1, H|1, L, S]`, which the kernels read as a mask.

    In place of i or j, an index may have the form ``a i + b j + c``, where a, b and c are whole
    numbers. Returns None if there is no such view, for example because an index has another form,
    or if the user's function has already read such a view.
    """
    if tracer.pairs is not None or not source.is_floating_point() or tracer.list.in_mask:
        return None
    L, S = tracer.lengths[ROW], tracer.lengths[KEY]
    dims: list[int | None] = [None, None]  # of b and of h
    sums: list[tuple[int, int, int, int]] = []
    for dim, x in enumerate(places):
        axis = next((n for n in (0, 1) if x.serial == tracer.indices[n].serial), None)
        if axis is not None and dims[axis] is None and source.size(dim) == tracer.sizes[axis]:
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
    # Else several pairs may read one number. Kernels then sum the number's gradient in its dtype.
    if source.dtype not in tracer.dtypes or not is_part:
        source = as_dtype(tracer.wide(source), tracer.list.dtype)
    if is_part:
        sums.sort(key=lambda form: form[2])
    view = source.permute([d for d in dims if d is not None] + [d for d, *_ in sums])
    view = view[tuple(None if d is None else slice(None) for d in dims)]
    if is_part:
        (_, _, _, row), (_, _, _, column) = sums
        if view.shape[2:] != (L, S):
            view = view[..., row : row + L, column : column + S]
    else:
        # torch.compile knows no storage_offset().
        if tracer.list.compiling or torch._C._functorch.is_functorch_wrapped_tensor(source):
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
    tracer.pairs = view
    return tracer.list.value(PAIR, source.dtype, node=tracer.list.add("f", "pair"))


def _gathered(tracer: Tracer, source: Tensor, places: list[Any]) -> Value:
    """Returns `source[places]` of kind PAIR, which the kernels read from a table.

    The table has four dimensions: batch, head, row and a last one. A dimension of `source` with the
    index b or h becomes the table's batch or head. A dimension with the index i or j (plus a
    constant) becomes the table's rows. All other dimensions are flattened into the table's last
    dimension, and their indices become one index.
    """
    own: list[int | None] = [None, None, None]  # dimensions of b, of h, and of i or j
    counts = [*tracer.sizes[:2], 0]
    name, begin, type_ = "table", 0, letter(source.dtype)
    for dim, x in enumerate(places):
        a, b, c = x.affine or (0, 0, -1)
        axis = next((n for n in (0, 1) if x.serial == tracer.indices[n].serial), None)
        if x.kind in (ROW, KEY) and own[2] is None and a + b == 1 and type(c) is int and c >= 0:
            axis, begin, counts[2] = 2, c, tracer.lengths[x.kind]
            name = "row_table" if a else "key_table"
        if axis is not None and own[axis] is None:
            _check_index(tracer, source, dim, x)
            own[axis] = dim
    place = tracer.list.place(_index_of(tracer, source, places, own), "i")
    if tracer.list.reads(place, "score"):
        tracer.fail(f"an index of {tracer.name_of(source)} depends on the score")
    key = tracer.place_of(source), name, *own, begin
    number, _ = tracer.tables.setdefault(key, (len(tracer.tables), source))
    if ("t", number) not in tracer.list.leaves:
        table = tracer.wide(source)
        for n, at in enumerate(own):
            # The loop slices the table only if necessary, because the derivative of a slice makes a
            # copy.
            if at is not None and table.size(at) != counts[n]:
                table = table.narrow(at, begin if n == 2 else 0, counts[n])
        found = [dim for dim in own if dim is not None]
        table = table.permute(*found, *(d for d in range(source.dim()) if d not in found))
        table = table[tuple(None if dim is None else slice(None) for dim in own)]
        numbers = as_dtype(table, tracer.list.dtype)
        size = math.prod(numbers.shape[3:])
        tracer.list.leaves["t", number] = numbers.reshape(*numbers.shape[:3], size)
    node = tracer.list.add("f", name, ("t", number), place)
    if type_ != "f":
        node = tracer.list.add(type_, "bool" if type_ == "b" else "int", node)
    value = tracer.list.value(PAIR, source.dtype, node=node)
    if type_ == "i":
        value.limits = tracer.list.limits_of(source)
        most = 2**53 if tracer.list.dtype == torch.float64 else 2**24
        if value.limits and not -most <= value.limits[0] <= value.limits[1] <= most:
            power = most.bit_length() - 1
            tracer.fail(f"{tracer.name_of(source)} has whole numbers beyond 2^{power}")
    return value


def _index_of(tracer: Tracer, source: Tensor, places: list[Any], own: list[int | None]) -> Value:
    """Returns the index into a table's last dimension.

    It combines the indices of all dimensions of `source` that are not in `own`.
    """
    parts: dict[int, Any] = {}  # sums by kind: PyTorch adds every kind but PAIR
    is_inside: Any = None
    stride = 1
    for dim in reversed(range(source.dim())):
        x, size = places[dim], source.size(dim)
        if dim in own:
            continue
        if x.dtype not in (torch.int32, torch.int64):  # it would wrap around below
            x = tracer.elementwise("long", torch.Tensor.long, [x], {}, [x])
        if x.kind != PAIR:
            _check_index(tracer, source, dim, x)
        limits = tracer.list.limits(x)
        if limits is None or limits[0] < -size or limits[1] >= size:
            inside = tracer.of("logical_and", tracer.of("ge", x, -size), tracer.of("lt", x, size))
            is_inside = tracer.of("logical_and", is_inside, inside) if is_inside else inside
        if limits is None or limits[0] < 0:
            x = tracer.of("where", tracer.of("lt", x, 0), tracer.of("add", x, size), x)
        if x.kind == PAIR:  # what is outside is not used, so it may wrap around
            x = tracer.list.value(PAIR, x.dtype, node=x.node, limits=(0, size - 1))
        part = tracer.of("mul", x, stride) if stride != 1 else x
        parts[x.kind] = tracer.of("add", parts[x.kind], part) if x.kind in parts else part
        stride *= size
    if stride >= 2**31:
        tracer.fail(f"a table of {stride} numbers", "they must be fewer than 2^31")
    index: Value = functools.reduce(
        lambda x, y: tracer.of("add", x, y), (parts[kind] for kind in sorted(parts))
    )
    if is_inside is not None:
        index = tracer.of("where", is_inside, index, 2**31 - 1)
    return index


def _check_index(tracer: Tracer, source: Tensor, dim: int, index: Value) -> None:
    size = source.size(dim)
    for number in tracer.list.limits(index) or ():
        if not -size <= number < size:
            name = tracer.name_of(source)
            what = f"index {number} is out of range in dimension {dim} of {name}"
            tracer.fail(what, is_wrong=True)


def _select(source: Tensor, places: list[Value | None]) -> Tensor:
    """Returns `source[places]`, `[B|1, H|1, N|1, *rest]`, which PyTorch computes.

    Calls index_select, because its derivative adds in a fixed order. The derivative of
    `source[places]` adds with atomics, in an order that varies.
    """
    rest = [dim for dim, x in enumerate(places) if x is None]
    if rest:
        source = source.permute([dim for dim, x in enumerate(places) if x is not None] + rest)
    flat: Any = None
    for index, size in zip((x for x in places if x is not None), source.shape, strict=False):
        at = index.tensor.long()  # an int8 would wrap around below
        if index.limits is None or index.limits[0] < 0:
            at = torch.where(at < 0, at + size, at)
        flat = at if flat is None else flat * size + at
    sizes = source.shape[source.dim() - len(rest) :]
    chosen = source.reshape(-1, *sizes).index_select(0, flat.reshape(-1))
    return chosen.view(*flat.shape, *sizes)
