"""Attention of :class:`torch.distributed.tensor.DTensor`, sharded over batch, heads and sequences.

A program that imports torch_attn and ``torch.distributed.tensor``, in either order, has it. Over
each dimension of the mesh a call is made in one of these ways, by the placement of the query, or of
the key and so on where that is ``Replicate()``; what is placed otherwise is redistributed to it by
DTensor's collectives. The result is that of a single process.

- ``Replicate()``.
- ``Shard`` of a leading dimension: of tensors whose size there is 1, or that have fewer dimensions,
  ``Replicate()``; their gradients are ``Partial()``. No communication.
- ``Shard`` of the heads, likewise; of grouped heads if each device gets whole groups.
- ``Shard`` of the sequence, over one dimension of the mesh: of the query alone, no communication; of
  key and value alone, parts that are merged by an all-reduce; of all, by one of three ways
  (:func:`torch_attn.distributed.method`). The output is sharded as the query. Masks have the rows of
  the query, and of each all keys.

Sinks and slopes, ``[Hq]`` or ``[B..., Hq]``, follow heads and batch, offsets and lengths, ``[B...]``,
the batch. These and where packed sequences begin, integers, may be plain tensors, the same on all.
Dropout is an error, because the devices would have to draw one mask together.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from torch_attn._when_imported import when_imported
from torch_attn.distributed import _parts, _torchs_context
from torch_attn.distributed._layout import Call, Layout
from torch_attn.distributed._methods import choose
from torch_attn.distributed._parts import Inputs, Saved, wide

__all__ = ["register", "register_when_imported"]


@functools.cache
def register_when_imported() -> None:
    """Calls :func:`register` now or when ``torch.distributed.tensor`` is imported, if ever.

    That module takes half as long to import as torch itself, and most programs do without.
    """
    when_imported("torch.distributed.tensor", register)
    _torchs_context.register_when_imported()


def register() -> None:
    """Tells DTensor how the operators can be sharded. The package calls it by itself."""
    from torch.distributed.tensor import DTensor

    for name in (
        *("sdpa", "attention", "sdpa_stats"),
        *("_sdpa_forward", "_sdpa_backward", "_sdpa_tangent", "_sdpa_second"),
    ):
        torch.library.register_torch_dispatch(f"attn::{name}", DTensor, _attend)


def _attend(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
    given = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | (kwargs or {})
    with torch.no_grad():
        if op in (torch.ops.attn.sdpa.default, torch.ops.attn.attention.default):
            given["with_rows"] = op is torch.ops.attn.attention.default
            output, *_, row_logsumexp, max_score = _Sharded(
                torch.ops.attn._sdpa_forward.default, given
            ).results()
            return (output, row_logsumexp, max_score) if given["with_rows"] else output
        return _Sharded(op, given).results()


HEADS, ROWS = -3, -2  # dimensions of the output, counted from its end
# Results that begin with the dimensions before the rows of [*batch, heads, L, Ev] as the output does.
_AS_THE_OUTPUT = ("output", "logsumexp", "row_logsumexp", "max_score", "residual")
_AS_THE_OUTPUT += ("largest_score", "entropy", "received_weight")
# Inputs by what is left of their names in those of tangents and gradients, and how many of the
# last dimensions of [*batch, heads, L, E] they lack.
_INPUTS = {"mask": "attn_mask", "slopes": "alibi_slopes"}
_LACKING = {"alibi_slopes": 2, "sinks": 2, "query_offset": 3, "key_lengths": 3}
_GRADIENTS = [f"grad_{name}" for name in ("query", "key", "value", "mask", "slopes", "sinks")]
# What a ring cannot make.
_WHOLE = {
    "_sdpa_second": "a second derivative is asked for",
    "sdpa_stats": "statistics are asked for",
}


class _Sharded:
    """A call with DTensors, and the way that it is made over each dimension of the mesh."""

    def __init__(self, op: Any, given: dict[str, Any]) -> None:
        from torch.distributed.tensor import DTensor, Replicate

        self.op = op
        self.call = {a.name: a.default_value for a in op._schema.arguments} | given
        self.mesh: Any = next(t.device_mesh for t in given.values() if isinstance(t, DTensor))
        self.tensors: dict[str, Any] = {}
        for name, tensor in self.call.items():
            if isinstance(tensor, DTensor):
                self.tensors[name] = tensor
            elif isinstance(tensor, Tensor):
                if tensor.is_floating_point():
                    raise RuntimeError(
                        f"attn::sdpa: {name} is a plain tensor, mixed with DTensors; distribute it, "
                        "with torch.distributed.tensor.distribute_tensor"
                    )
                everywhere = [Replicate()] * self.mesh.ndim
                self.tensors[name] = DTensor.from_local(tensor, self.mesh, everywhere)
        names = [n for n in ("query", "key", "value") if n in self.tensors]
        self.tensors = {n: self.tensors[n] for n in names} | self.tensors
        self.inputs = [self.tensors[name] for name in names]
        self.rank = max(t.ndim for t in self.inputs)
        _torchs_context.check(self.call)
        if dropout_p := self.call.get("dropout_p"):
            raise RuntimeError(
                f"attn::sdpa: dropout_p is {dropout_p}, but query, key and value are DTensors, "
                "which take no dropout; set it to 0"
            )
        if self.call.get("block_table") is not None:
            raise RuntimeError(
                "attn::varlen_attention: block_table is given, but query is a DTensor, which has no "
                "pages; call it with to_local() of all"
            )
        self.sequence: int | None = None  # the dimension of the mesh that cuts the sequence, and
        self.cut = self.way = ""  # of "rows", "keys" or "both", in one of METHODS or, of rows, none
        self.dims: list[int | None] = []  # of the output, that each dimension of the mesh cuts
        for m in range(self.mesh.ndim):
            self.dims.append(self._dim(m))
        if self.cut in ("keys", "both"):
            self._choose()

    def _own(self, name: str, dim: int) -> int | None:
        """The dimension of an argument or a result that is cut with one of the output."""
        kind = name.removeprefix("tangent_").removeprefix("grad_")
        kind = _INPUTS.get(kind, kind)
        tensor, own = self.tensors.get(name), dim + _LACKING.get(kind, 0)
        if kind in _AS_THE_OUTPUT:
            if tensor is not None and tensor.ndim == 1:  # empty
                return None
            return None if dim == ROWS and kind == "received_weight" else self.rank + dim
        tensor = self.tensors.get(kind)
        if tensor is None or kind.startswith("cu_seq") or not -tensor.ndim <= own < 0:
            return None
        if dim == ROWS and kind in ("key", "value"):
            return None
        if tensor.shape[own] == self._size(dim) or tensor.shape[own] != 1:
            return int(tensor.ndim + own)
        return None

    def _size(self, dim: int) -> int:
        tensors = self.inputs[:1] if dim == ROWS else self.inputs
        return max(int(t.shape[dim]) for t in tensors if -dim <= t.ndim)

    def _is_shardable(self, dim: int, m: int) -> bool:
        others = [self.mesh.size(i) for i, d in enumerate(self.dims) if d == dim and i != m]
        devices = math.prod(others) * self.mesh.size(m)
        sizes = [int(t.shape[dim]) for t in self.inputs if -dim <= t.ndim]
        grouped = [size for size in sizes if 1 < size < max(sizes)]
        return max(sizes) > 1 and all(size % devices == 0 for size in grouped)

    def _dim(self, m: int) -> int | None:
        """The dimension of the output that one of the mesh cuts, by the first tensor that says it."""
        on = {name: tensor.placements[m] for name, tensor in self.tensors.items()}
        inputs = [name for name in ("query", "key", "value") if name in on]
        rows = [name for name in inputs if on[name].is_shard(self.tensors[name].ndim + ROWS)]
        for name, placement in on.items():
            if name == "query" and name in rows and self.sequence is None:
                others = any(on[name].is_shard() for name in inputs[1:])
                self.sequence, self.cut = m, "both" if others else "rows"
                return ROWS
            for dim in range(-self.rank, ROWS):
                own = self._own(name, dim)
                if own is not None and placement.is_shard(own) and self._is_shardable(dim, m):
                    return dim
        if rows and "query" not in rows and self.sequence is None:
            self.sequence, self.cut = m, "keys"
        return None

    def _choose(self) -> None:
        assert self.sequence is not None
        why = _WHOLE.get(self.op._schema.name.removeprefix("attn::"))
        if self.call.get("cu_seq_q") is not None and self.call.get("attn_mask") is not None:
            why = "packed sequences with an attn_mask are asked for"
        shapes = []
        for name, tensor in zip(
            ("query", "key", "value"), [*self.inputs, self.inputs[-1]], strict=False
        ):
            shape = list(tensor.shape)
            for m, dim in enumerate(self.dims):
                own = None if dim is None or m == self.sequence else self._own(name, dim)
                if own is not None:
                    shape[own] = -(-shape[own] // self.mesh.size(m))
            shapes.append(torch.empty(shape, dtype=tensor.dtype, device="meta"))
        self.way = choose(self._layout(), *shapes, why)
        if self.way == "all_to_all":
            self.dims[self.sequence] = HEADS
        elif self.cut == "keys" or self.way == "ring":
            self.dims[self.sequence] = ROWS if self.cut == "both" else None

    def _layout(self) -> Call:
        """The call as one over pieces of the sequence, whose numbers are those of this process."""
        m, (query, key) = self.sequence, self.inputs[:2]
        assert m is not None
        world, whole = self.mesh.size(m), self.cut == "keys"
        L, S = query.shape[ROWS], key.shape[ROWS]
        queries = [[(0, L)]] * world if whole else Layout.chunks(L, world)
        names = ("is_causal", "scale", "enable_gqa", "softcap", "window_size", "max_q", "max_k")
        options = {n: self.call[n] for n in names if n in self.call}
        if "dropout_p" in self.call:
            options["dropout_p"] = 0.0
        numbers = {
            name: self._local(name) if name in self.tensors else None
            for name in ("query_offset", "key_lengths", "cu_seq_q", "cu_seq_k")
        }
        q, k = (numbers[name] for name in ("cu_seq_q", "cu_seq_k"))
        if q is None or k is None:
            options = {n: x for n, x in options.items() if n not in ("max_q", "max_k")}
        if numbers["query_offset"] is None:
            offset = torch.zeros((), dtype=torch.int64, device=query.device)
            if q is not None and k is not None:
                used = k.diff() if numbers["key_lengths"] is None else numbers["key_lengths"]
                offset = used - q.diff()
            numbers["query_offset"] = offset
        layout = Layout(self.mesh.get_local_rank(m), queries, Layout.chunks(S, world))
        return Call(layout, self.mesh.get_group(m), options, **numbers, whole_queries=whole)

    def _placements(self, name: str) -> list[Any]:
        """Of an argument, in this call."""
        from torch.distributed.tensor import Replicate, Shard

        placements: list[Any] = []
        for m, dim in enumerate(self.dims):
            own = None if dim is None else self._own(name, dim)
            if m == self.sequence and self.way == "ring" and _is_of_keys(name):
                own = self.tensors[name].ndim + ROWS
            placements.append(Replicate() if own is None else Shard(own))
        return placements

    def _local(self, name: str) -> Any:
        tensor, placements = self.tensors[name], self._placements(name)
        if list(tensor.placements) != placements:
            tensor = tensor.redistribute(placements=placements)
        return tensor.to_local()

    def results(self) -> Any:
        x = self.call | {name: self._local(name) for name in self.tensors}
        op = self.op._schema.name.removeprefix("attn::")
        names = [r.name for r in self.op._schema.returns]
        names = names if names[0] else _GRADIENTS
        if self.way == "ring":
            found = _ring(op, self._layout(), x)
        else:
            if self.sequence is not None and self.dims[self.sequence] == ROWS:
                call = self._layout()
                rows = call.layout.queries[call.layout.rank][0]
                x |= call.options_of(rows, (0, call.layout.lengths[1]))
            if self.way == "gather" and "grad_input_mask" in x:
                x = _widened(x)
            found = self.op(**x)
        return tuple(self._result(n, t) for n, t in zip(names, found, strict=True))

    def _result(self, name: str, local: Tensor | None) -> Any:
        """The DTensor of a result, placed as where it comes from if it was redistributed."""
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        if local is None:
            return None
        is_rows = name.removeprefix("tangent_") in _AS_THE_OUTPUT and local.ndim > 1
        source = self.tensors.get(_input_of(name)) if name.startswith("grad_") else None
        placements: list[Any] = []
        shape = list(local.shape if source is None else source.shape)
        for m, dim in enumerate(self.dims):
            own = (
                None if dim is None or not (is_rows or source is not None) else self._own(name, dim)
            )
            if (
                m == self.sequence
                and self.way == "ring"
                and source is not None
                and _is_of_keys(name)
            ):
                own = local.ndim + ROWS
            summed = source is not None or name == "received_weight"
            cut = dim is not None or (m == self.sequence and self.way == "ring")
            placements.append(
                Shard(own) if own is not None else Partial() if summed and cut else Replicate()
            )
            if own is not None and source is None:
                shape[own] = self._size(dim)
        order = sorted(range(local.ndim), key=lambda d: (local.stride(d), local.shape[d]))
        strides, step = [0] * local.ndim, 1
        for d in order:
            strides[d], step = step, step * shape[d]
        result = DTensor.from_local(
            local,
            self.mesh,
            placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=tuple(strides),
        )
        if self.sequence is not None and self.way in ("gather", "all_to_all"):
            m = self.sequence
            if source is not None and source.placements[m].is_shard():
                placements[m] = source.placements[m]
            elif is_rows and self.way == "all_to_all" and name != "received_weight":
                placements[m] = Shard(self.rank + ROWS) if self.cut == "both" else Replicate()
            result = result.redistribute(placements=placements)
        return result if source is None else result.to(source.dtype)


def _input_of(name: str) -> str:
    kind = name.removeprefix("tangent_").removeprefix("grad_")
    return _INPUTS.get(kind, kind)


def _is_of_keys(name: str) -> bool:
    return _input_of(name) in ("key", "value")


def _widened(x: dict[str, Any]) -> dict[str, Any]:
    """The same call in float32, where it is one of half types."""
    x = {
        n: t if n == "tangent_logsumexp" else wide(t) if isinstance(t, Tensor) else t
        for n, t in x.items()
    }
    for output, residual in (("output", "residual"), ("tangent_output", "tangent_residual")):
        if output in x and x[residual].ndim > 1:
            x |= {output: x[output] + x[residual], residual: x[output].new_empty(0)}
    return x


def _ring(op: str, call: Call, x: dict[str, Any]) -> Any:
    names = ("query", "key", "value", "attn_mask", "alibi_slopes", "sinks")
    inputs = Inputs(*(x[name] for name in names))
    dtype = inputs.query.dtype
    if op == "_sdpa_forward":
        saved, *of_rows = _parts.forward(call, inputs)
        logsumexp, greatest = (t.to(saved.output.dtype) for t in of_rows)
        output = saved.output.to(dtype)
        learned = any(t is not None and t.is_floating_point() for t in inputs[3:])
        kept = output.new_empty(0)
        if learned and output.dtype != saved.output.dtype:
            kept = saved.output - output
        rows = (logsumexp, greatest) if x["with_rows"] else (None, None)
        return (
            output,
            saved.logsumexp,
            torch.empty(0, dtype=torch.int64, device=output.device),
            kept,
            *rows,
        )
    y = _widened({n: x[n] for n in ("output", "residual")})
    saved = Saved(y["output"], x["logsumexp"])
    if op == "_sdpa_backward":
        given = x["grad_output"], x["grad_logsumexp"], x["grad_input_mask"]
        found = _parts.gradients(call, inputs, saved, *given)
        return [g if w else None for g, w in zip(found, x["grad_input_mask"], strict=True)]
    given = ("query", "key", "value", "mask", "slopes", "sinks")
    moved, change = _parts.tangents(
        call, inputs, saved, Inputs(*(x[f"tangent_{n}"] for n in given))
    )
    first = change.to(saved.output.dtype)
    rest = (change - first).to(first.dtype)
    output = moved.to(dtype)
    kept = (moved - output).to(first.dtype) if x["residual"].ndim > 1 else output.new_empty(0)
    return output, torch.stack([first, rest], -1), kept
