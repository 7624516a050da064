"""Attention of :class:`torch.distributed.tensor.DTensor`, sharded over batch, heads and sequences.

The operators take DTensors in a program that imports torch_attn and ``torch.distributed.tensor``,
in either order. For each dimension of the mesh, a call is computed in one of the ways below. The
placement of the query chooses the way. If the query is ``Replicate()``, the placement of the key
chooses the way, and so on. If a tensor has another placement than the chosen way needs, DTensor's
collectives redistribute the tensor. The result is the same as on a single process.

- ``Replicate()``.
- ``Shard`` of a leading dimension. Tensors that lack this dimension, or have size 1 in it, are
  ``Replicate()``. The gradients of these tensors are ``Partial()``. There is no communication.
- ``Shard`` of the heads, with the same rules. Grouped heads are allowed if each device gets whole
  groups.
- ``Shard`` of the sequence, over one dimension of the mesh. If only the query is cut, there is no
  communication. If only key and value are cut, an all-reduce merges the parts. If all three are
  cut, there are three methods (:func:`torch_attn.distributed.method`). The output is sharded like
  the query. Each process's part of a mask has the rows of its queries and the columns of all keys.

Sinks and slopes, ``[Hq]`` or ``[B..., Hq]``, are sharded like heads and batch. Offsets and lengths,
``[B...]``, are sharded like the batch. Integers, including `cu_seq_q` and `cu_seq_k`, may be plain
tensors that are the same on all devices. Dropout is an error, because all devices would have to
draw the same mask.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torch_attn._when_imported import when_imported
from torch_attn.distributed import _context, _parts, _torchs_context
from torch_attn.distributed._layout import Call, Layout, arguments
from torch_attn.distributed._methods import choose, is_traced
from torch_attn.distributed._parts import Inputs, Saved, wide

__all__ = ["register", "register_when_imported"]


@functools.cache
def register_when_imported() -> None:
    """Calls :func:`register` when ``torch.distributed.tensor`` is imported.

    If that module is imported already, the call happens at once. Importing the module takes half as
    long as importing torch, and most programs do not need it.
    """
    when_imported("torch.distributed.tensor", register)
    _torchs_context.register_when_imported()


def register() -> None:
    """Tells DTensor how to shard the operators. The package itself calls this function."""
    from torch.distributed.tensor import DTensor

    for name in (
        *("sdpa", "attention", "sdpa_stats"),
        *("_sdpa_forward", "_sdpa_backward", "_sdpa_tangent", "_sdpa_second"),
    ):
        torch.library.register_torch_dispatch(f"attn::{name}", DTensor, _attend)


def _attend(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
    given = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | (kwargs or {})
    name = op._schema.name.removeprefix("attn::")
    with torch.no_grad():
        if name not in ("sdpa", "attention"):
            return _Sharded(name, given).results()
        if _context.is_on():  # inference mode skips the Autograd kernel, which checks this too
            results = _context.answer(**given)
        else:
            given["with_rows"] = name == "attention" and given.get("with_rows", True)
            results = _Sharded("_sdpa_forward", given).results(
                ("output", "row_logsumexp", "max_score")
            )
        return results if name == "attention" else results[0]


HEADS, ROWS = -3, -2  # dimensions of the output, counted from its end
# Results of shape [*batch, heads, L, ...], like the output; received_weight has S in place of L.
_OF_ROWS = {"output", "logsumexp", "row_logsumexp", "max_score", "residual"}
_OF_ROWS |= {"largest_score", "entropy", "received_weight"}
# How many of the last dimensions of [*batch, heads, L, E] these arguments lack.
_LACKING = {"alibi_slopes": 2, "sinks": 2, "query_offset": 3, "key_lengths": 3}
_PLACES = {"cu_seq_q", "cu_seq_k"}  # the same on all devices
_WHY_NO_RING = {
    "_sdpa_second": "a second derivative is asked for",
    "sdpa_stats": "statistics are asked for",
}


def _kind(name: str) -> str:
    """Removes the prefix "grad_" or "tangent_" from a name, if the name has one."""
    return name.removeprefix("tangent_").removeprefix("grad_")


class _Sharded:
    """A call with DTensors, and how it is computed over each dimension of the mesh."""

    def __init__(self, name: str, given: dict[str, Any]) -> None:
        from torch.distributed.tensor import DTensor, Replicate

        self.name, self.op = name, getattr(torch.ops.attn, name).default
        self.call = {a.name: a.default_value for a in self.op._schema.arguments} | given
        self.mesh: Any = next(t.device_mesh for t in given.values() if isinstance(t, DTensor))
        first = {n: self.call[n] for n in Inputs._fields[:3] if n in self.call}  # decide first
        self.tensors: dict[str, Any] = {
            n: t for n, t in (first | self.call).items() if isinstance(t, Tensor)
        }
        for n, tensor in self.tensors.items():
            if not isinstance(tensor, DTensor):
                if tensor.is_floating_point():
                    raise RuntimeError(
                        f"attn::sdpa: {n} is a plain tensor, mixed with DTensors; distribute it, "
                        "with torch.distributed.tensor.distribute_tensor"
                    )
                everywhere = [Replicate()] * self.mesh.ndim
                self.tensors[n] = DTensor.from_local(tensor, self.mesh, everywhere)
        self.inputs = [self.tensors[n] for n in first]
        self.rank = max(t.ndim for t in self.inputs)
        if dropout_p := self.call.get("dropout_p"):
            raise RuntimeError(
                f"attn::sdpa: dropout_p is {dropout_p}, but query, key and value are DTensors, "
                "which take no dropout; set it to 0"
            )
        known = {*Inputs._fields, *_LACKING, *_PLACES}
        for n in self.tensors.keys() & (arguments("attention", of_tensors=True).keys() - known):
            raise RuntimeError(
                f"attn::attention: {n} is given, but query is a DTensor, of which no part has its "
                f"own {n}; call it with to_local() of all"
            )
        self.sequence: int | None = None  # the dimension of the mesh that cuts the sequence
        self.cut = self.way = ""  # cut: "rows", "keys" or "both"; way: of METHODS, or ""
        self.dims: list[int | None] = []  # [m]: the output's dimension that mesh dimension m cuts
        for m in range(self.mesh.ndim):
            self.dims.append(self._dim(m))
        if self.cut in ("keys", "both"):
            self._choose()

    def _is_empty(self, kind: str, tensor: Tensor) -> bool:
        """Whether this is a result that is not wanted, ``[0]``."""
        if kind == "residual":
            return tensor.ndim == 1  # any other residual has the output's shape
        return kind in ("row_logsumexp", "max_score") and not self.call["with_rows"]

    def _own(self, name: str, m: int) -> int | None:
        """Returns the dimension of an argument or a result that is sharded over mesh dimension m.

        Returns None if there is no such dimension.
        """
        dim, kind = self.dims[m], _kind(name)
        if kind in ("key", "value") and m == self.sequence and self.way == "ring":
            return int(self.tensors[kind].ndim + ROWS)
        return None if dim is None else self._cut_with(name, dim)

    def _cut_with(self, name: str, dim: int) -> int | None:
        """Returns which dimension of an argument or a result matches the output's `dim`."""
        kind, tensor = _kind(name), self.tensors.get(name)
        if kind in _OF_ROWS:
            is_empty = tensor is not None and self._is_empty(kind, tensor)
            return None if is_empty or (dim, kind) == (ROWS, "received_weight") else self.rank + dim
        tensor, own = self.tensors.get(kind), dim + _LACKING.get(kind, 0)
        if tensor is None or kind in _PLACES or not -tensor.ndim <= own < 0:
            return None
        if (dim == ROWS and kind in ("key", "value")) or tensor.shape[own] == 1 < self._size(dim):
            return None
        return int(tensor.ndim + own)

    def _size(self, dim: int) -> int:
        tensors = self.inputs[:1] if dim == ROWS else self.inputs
        return max(int(t.shape[dim]) for t in tensors if -dim <= t.ndim)

    def _is_shardable(self, dim: int, m: int) -> bool:
        devices = self.mesh.size(m) * math.prod(
            self.mesh.size(i) for i, other in enumerate(self.dims) if other == dim and i != m
        )
        sizes = {int(t.shape[dim]) for t in self.inputs if -dim <= t.ndim}
        grouped = sizes - {1, max(sizes)}
        return max(sizes) > 1 and all(size % devices == 0 for size in grouped)

    def _dim(self, m: int) -> int | None:
        """Returns the dimension of the output that is sharded over mesh dimension m, or None.

        The first tensor that is cut determines the dimension. Query, key and value come first.
        """
        on = {name: tensor.placements[m] for name, tensor in self.tensors.items()}
        rows = [
            n for n in Inputs._fields[:3] if n in on and on[n].is_shard(self.tensors[n].ndim + ROWS)
        ]
        for name, placement in on.items():
            if name == "query" and name in rows and self.sequence is None:
                others = any(on[n].is_shard() for n in ("key", "value") if n in on)
                self.sequence, self.cut = m, "both" if others else "rows"
                return ROWS
            for dim in range(-self.rank, ROWS):
                own = self._cut_with(name, dim)
                if own is not None and placement.is_shard(own) and self._is_shardable(dim, m):
                    return dim
        if rows and "query" not in rows and self.sequence is None:
            self.sequence, self.cut = m, "keys"
        return None

    def _choose(self) -> None:
        """Chooses the method of communication if keys are cut, with or without the queries."""
        assert self.sequence is not None
        why = _WHY_NO_RING.get(self.name)
        if self.call.get("cu_seq_q") is not None and self.call.get("attn_mask") is not None:
            why = "packed sequences with an attn_mask are asked for"
        if torch.compiler.is_compiling() or is_traced(self.inputs[0]._local_tensor):
            why = "a compiled graph is asked for"
        shapes = []
        for name, tensor in zip(Inputs._fields, [*self.inputs, self.inputs[-1]][:3], strict=False):
            shape = list(tensor.shape)
            for m in range(self.mesh.ndim):
                own = None if m == self.sequence else self._own(name, m)
                if own is not None:
                    shape[own] = -(-shape[own] // self.mesh.size(m))
            shapes.append(torch.empty(shape, dtype=tensor.dtype, device="meta"))
        query, key, value = shapes
        call, others = self._as_pieces(), [m for m in range(self.mesh.ndim) if m != self.sequence]
        if any(
            self._own(n, m) is not None for n in ("query_offset", "key_lengths") for m in others
        ):
            # The offsets or lengths differ between processes, but all processes must choose the
            # same method. So the choice assumes that every query sees all keys.
            zero = call.query_offset.new_zeros(())
            options = {**call.options, "is_causal": False, "window_size": (-1, -1)}
            call = replace(call, options=options, query_offset=zero, key_lengths=None)
        self.way = choose(call, query, key, value, why)
        if self.way == "all_to_all":
            self.dims[self.sequence] = HEADS

    def _as_pieces(self) -> Call:
        m, (query, key) = self.sequence, self.inputs[:2]
        assert m is not None
        world, whole = self.mesh.size(m), self.cut == "keys"
        queries = [[(0, query.shape[ROWS])]] * world
        queries = queries if whole else Layout.chunks(query.shape[ROWS], world)
        layout = Layout(self.mesh.get_local_rank(m), queries, Layout.chunks(key.shape[ROWS], world))
        offset, used, q, k = (
            self._local(name) if name in self.tensors else None
            for name in ("query_offset", "key_lengths", "cu_seq_q", "cu_seq_k")
        )
        if q is not None and k is not None:
            default = (k.diff() if used is None else used) - q.diff()
        else:
            default = torch.zeros((), dtype=torch.int64, device=query.device)
        options = {
            n: x for n, x in self.call.items() if n in arguments("attention", of_tensors=False)
        }
        offset = default if offset is None else offset
        return Call(layout, self.mesh.get_group(m), options, offset, used, q, k, whole)

    def _local(self, name: str) -> Any:
        """Returns this process's part of an argument, redistributed for this call."""
        from torch.distributed.tensor import Replicate, Shard

        cut = [self._own(name, m) for m in range(self.mesh.ndim)]
        placements = [Replicate() if own is None else Shard(own) for own in cut]
        tensor = self.tensors[name]
        if list(tensor.placements) != placements:
            tensor = tensor.detach().redistribute(placements=placements)
        return tensor._local_tensor  # like to_local(), for tensors without gradients

    def results(self, wanted: tuple[str, ...] | None = None) -> Any:
        x = self.call | {name: self._local(name) for name in self.tensors}
        names = [r.name for r in self.op._schema.returns]
        names = names if names[0] else [f"grad_{name}" for name in Inputs._fields]
        if self.way == "ring":
            found = _ring(self.name, self._as_pieces(), x)
        else:
            if self.sequence is not None and self.dims[self.sequence] == ROWS:
                call = self._as_pieces()
                (rows,) = call.layout.queries[call.layout.rank]
                x |= call.options_of(rows, (0, call.layout.lengths[1]))
            if self.way == "gather" and "grad_input_mask" in x:
                x = _widened(x)
            found = self.op(**x)
        named = dict(zip(names, found, strict=False))
        results = tuple(self._result(n, named[n]) for n in wanted or names)
        # The schema ends with the gradients of tensors that a score_mod or a mask_mod reads; the
        # last one is a list. A call with DTensors has no such function.
        rest = 0 if wanted else len(self.op._schema.returns) - len(names)
        return results + ((None,) * (rest - 1) + ([],) if rest else ())

    def _result(self, name: str, local: Tensor | None) -> Any:
        """Makes the DTensor of a result.

        If the method gather or all_to_all redistributed an input, the input's gradient gets the
        placement that the caller gave the input.
        """
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        if local is None:
            return None
        source = self.tensors[_kind(name)] if name.startswith("grad_") else None
        of_rows = _kind(name) in _OF_ROWS and not self._is_empty(_kind(name), local)
        is_sum = source is not None or name == "received_weight"
        shape = list(local.shape if source is None else source.shape)
        placements: list[Any] = []
        for m, dim in enumerate(self.dims):
            own = self._own(name, m) if of_rows or source is not None else None
            is_cut = dim is not None or (m == self.sequence and self.way == "ring")
            if own is not None:
                placements.append(Shard(own))
            else:
                placements.append(Partial() if is_cut and is_sum else Replicate())
            if own is not None and dim is not None and source is None:
                shape[own] = self._size(dim)
        order = sorted(range(local.ndim), key=lambda d: (local.stride(d), local.shape[d]))
        strides, step = [0] * local.ndim, 1
        for d in order:
            strides[d], step = step, step * shape[d]
        # Does the same as DTensor.from_local, in a fifth of the time.
        meta = TensorMeta(torch.Size(shape), tuple(strides), local.dtype)
        spec = DTensorSpec(self.mesh, tuple(placements), tensor_meta=meta)
        result: Any = DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
        if self.sequence is not None and self.way in ("gather", "all_to_all"):
            m = self.sequence
            if source is not None and source.placements[m].is_shard():
                placements[m] = source.placements[m]
            elif of_rows and self.way == "all_to_all" and name != "received_weight":
                placements[m] = Shard(self.rank + ROWS) if self.cut == "both" else Replicate()
            result = result.redistribute(placements=placements)
        return result if source is None or result.dtype == source.dtype else result.to(source.dtype)


def _widened(x: dict[str, Any]) -> dict[str, Any]:
    """Converts a call's tensors of half types to float32."""
    x = {n: wide(t) if isinstance(t, Tensor) else t for n, t in x.items()}
    for output, residual in (("output", "residual"), ("tangent_output", "tangent_residual")):
        if output in x and x[residual].ndim > 1:
            x |= {output: x[output] + x[residual], residual: x[output].new_empty(0)}
    return x


def _ring(name: str, call: Call, x: dict[str, Any]) -> Any:
    """Computes an operator by a ring. Returns its results, merged from parts."""
    inputs = Inputs(*(x[n] for n in Inputs._fields))
    dtype = inputs.query.dtype
    if name == "_sdpa_forward":
        _parts.check(call, inputs)
        saved, *of_rows = _parts.forward(call, inputs)
        output, rest = _rounded(saved.output, dtype)
        learned = any(t is not None and t.is_floating_point() for t in inputs[3:])
        rest = rest if learned and output.dtype != rest.dtype else output.new_empty(0)
        rows = [t.to(saved.output.dtype) for t in of_rows]
        rows = rows if x["with_rows"] else [t.new_empty(0) for t in rows]
        no_state = torch.empty(0, dtype=torch.int64, device=output.device)
        return output, saved.logsumexp, no_state, rest, *rows
    y = _widened({n: x[n] for n in ("output", "residual")})
    saved = Saved(y["output"], x["logsumexp"])
    if name == "_sdpa_backward":
        wanted = x["grad_input_mask"]
        found = _parts.gradients(call, inputs, saved, x["grad_output"], x["grad_logsumexp"], wanted)
        return [g if w else None for g, w in zip(found, wanted[: len(found)], strict=True)]
    directions = Inputs(*(x[f"tangent_{n}"] for n in Inputs._fields))
    moved, change = _parts.tangents(call, inputs, saved, directions)
    output, rest = _rounded(moved.to(saved.output.dtype), dtype)
    pair = torch.stack(_rounded(change, saved.output.dtype), -1)
    rest = rest if x["residual"].ndim > 1 else output.new_empty(0)
    return output, pair.to(saved.output.dtype), rest


def _rounded(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns a tensor rounded to a smaller dtype, and the rounding errors."""
    smaller = tensor.to(dtype)
    return smaller, tensor - smaller
