"""Attention of :class:`torch.distributed.tensor.DTensor`, sharded over batch and over heads.

A program that imports torch_attn and ``torch.distributed.tensor``, in either order, has it. These
placements of the inputs need no communication, in any combination over the dimensions of the mesh,
and derivatives of every order follow them:

- ``Replicate()``;
- ``Shard`` of a leading dimension, the same for all: of those whose size there is 1, or that have
  fewer dimensions, ``Replicate()``. Their gradients are ``Partial()``;
- ``Shard`` of the heads, too; of grouped heads if each device gets whole groups, that is, if the
  numbers of heads of key and of value are multiples of the number of devices (or 1: replicated).

Sinks and slopes, ``[Hq]`` or ``[B..., Hq]``, are sharded with the heads and the batch, offsets and
lengths, ``[B...]``, with the batch. One number for all, or a causal bias, needs to be no DTensor.

All others, over queries, keys or head_dim say, are first redistributed to one of these by DTensor's
collectives. It does so for no tensor that an operator takes by name only: offsets and lengths, and
sinks and slopes where no gradient is wanted, stay as they are, and the others follow them or, if no
placement fits, it is an error. In any case the result is that of a single process. Dropout is an
error, because the devices would have to draw one mask together.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from torch_attn._when_imported import when_imported

__all__ = ["register", "register_when_imported"]


def register() -> None:
    """Tells DTensor how the operators can be sharded. The package calls it by itself."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    propagator = DTensor._op_dispatcher.sharding_propagator
    for name in (
        *("sdpa", "attention", "sdpa_stats"),
        *("_sdpa_forward", "_sdpa_backward", "_sdpa_tangent", "_sdpa_second"),
    ):
        op = getattr(torch.ops.attn, name).default
        register_sharding(op)(_Shardings(op))
        strategies = propagator.op_strategy_funcs
        strategies[op] = functools.partial(_as_given_by_name, strategies[op])
        # Of a call like one before, DTensor repeats what it found, and takes only integers among
        # the other arguments into account. Here all matter: dropout, the gradients asked for.
        keywords = [a.name for a in op._schema.arguments if a.kwarg_only]
        propagator.op_to_schema_info[op] = RuntimeSchemaInfo(0, keywords, needs_pytree=True)


def _as_given_by_name(strategy: Any, call: Any) -> Any:
    """Of the ways found, those that leave tensors given by name as they are.

    DTensor redistributes positional arguments only, and would take the others for redistributed.
    """
    from torch.distributed.tensor._op_schema import OpStrategy

    found = strategy(call)
    given = {
        name: argument.strategies[0].output_spec.placements
        for name, argument in call.kwargs_schema.items()
        if isinstance(argument, OpStrategy)
    }
    if not given:
        return found
    fitting = [
        way
        for way in found.strategies
        if [spec.placements for spec in way.input_specs[-len(given) :]] == [*given.values()]
    ]
    if not fitting:
        said = ", ".join(f"{name} is {placements}" for name, placements in given.items())
        raise RuntimeError(
            f"{call.op}: {said}, which fits no way to shard the call; shard sinks and alibi_slopes "
            "as heads and batch, query_offset and key_lengths as the batch, or replicate them"
        )
    return OpStrategy(fitting)


# Of results, those that begin with the dimensions before the rows of [*batch, heads, L, Ev] as the
# output does; of the forward's, the last two are empty where nobody wants them.
_AS_THE_OUTPUT = (
    *("output", "logsumexp", "row_logsumexp", "max_score", "grad_output", "grad_logsumexp"),
    *("largest_score", "entropy", "received_weight"),
)
# Inputs by what is left of their names in those of tangents and gradients, and how many of the
# last dimensions of [*batch, heads, L, E] they lack.
_INPUTS = {"mask": "attn_mask", "slopes": "alibi_slopes"}
_LACKING = {"alibi_slopes": 2, "sinks": 2, "query_offset": 3, "key_lengths": 3}


class _Shardings:
    """The placements that an operator takes as they are, over one dimension of the mesh."""

    def __init__(self, op: Any) -> None:
        schema = op._schema
        self.arguments = [a.name for a in schema.arguments]
        self.defaults = {a.name: a.default_value for a in schema.arguments}
        self.results = [r.name for r in schema.returns]
        if op is torch.ops.attn.sdpa.default:
            self.results = ["output"]
        elif not any(self.results):
            inputs = ("query", "key", "value", "mask", "slopes", "sinks")
            self.results = [f"grad_{name}" for name in inputs]

    def __call__(self, *args: Any, **kwargs: Any) -> list[tuple[list[Any], list[Any]]]:
        """Of each way to shard, the placements of the results and of the tensors given."""
        from torch.distributed.tensor import Replicate

        call = self.defaults | dict(zip(self.arguments, args, strict=False)) | kwargs
        if dropout_p := call.get("dropout_p"):
            raise RuntimeError(
                f"attn::sdpa: dropout_p is {dropout_p}, but query, key and value are DTensors, "
                "which take no dropout; set it to 0"
            )
        if call.get("cu_seq_q") is not None:
            raise RuntimeError(
                "attn::varlen_attention: query, key and value are DTensors, of which packed "
                "sequences cannot be made yet; call it with their to_local()"
            )
        given = [name for name in self.arguments if hasattr(call.get(name), "placements")]
        replicated = [Replicate()] * len(self.results), [Replicate()] * len(given)
        sharded = [
            (
                [_placement(call, dim, name, is_result=True) for name in self.results],
                [_placement(call, dim, name) for name in given],
            )
            for dim in range(-_rank(call), -2)
            if _is_shardable(call, dim)
        ]
        return [replicated, *sharded]


def _inputs(call: dict[str, Any]) -> list[Any]:
    return [call[name] for name in ("query", "key", "value") if name in call]


def _rank(call: dict[str, Any]) -> int:
    """Of the output."""
    ranks: list[int] = [tensor.ndim for tensor in _inputs(call)]
    return max(ranks)


def _size(tensor: Any, dim: int) -> int:
    """The size of a leading dimension, counted from the end: 1 if it is not there."""
    return int(tensor.shape[dim]) if -dim <= tensor.ndim else 1


def _is_shardable(call: dict[str, Any], dim: int) -> bool:
    sizes = [_size(tensor, dim) for tensor in _inputs(call)]
    grouped = [size for size in sizes if 1 < size < max(sizes)]
    mesh: Sequence[int] = call["query"].mesh.shape
    devices = {
        math.prod(some) for n in range(len(mesh)) for some in itertools.combinations(mesh, n + 1)
    }
    # DTensor itself leaves out what has fewer heads than devices.
    return max(sizes) > 1 and all(heads % n == 0 or heads < n for heads in grouped for n in devices)


def _placement(call: dict[str, Any], dim: int, name: str, is_result: bool = False) -> Any:
    """The placement of an argument or a result where dimension `dim` of the output is sharded."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    kind = name.removeprefix("tangent_")
    if kind == "rng_state":
        return Replicate()
    if kind == "residual":  # like the output, or empty; there is no dropout here
        added = [call.get(name) for name in ("attn_mask", "alibi_slopes", "sinks")]
        learned = any(t is not None and t.tensor_meta.dtype.is_floating_point for t in added)
        half = call["query"].tensor_meta.dtype in (torch.bfloat16, torch.float16)
        return Shard(_rank(call) + dim) if half and learned else Replicate()
    if kind in _AS_THE_OUTPUT:
        return Shard(_rank(call) + dim)
    tensor = kind.removeprefix("grad_")
    tensor = _INPUTS.get(tensor, tensor)
    source, own = call.get(tensor), dim + _LACKING.get(tensor, 0)
    if source is not None and own < 0 and _size(source, own) > 1:
        return Shard(source.ndim + own)
    return Partial() if is_result else Replicate()


@functools.cache
def register_when_imported() -> None:
    """Calls :func:`register` now or when ``torch.distributed.tensor`` is imported, if ever.

    That module takes half as long to import as torch itself, and most programs do without.
    """
    when_imported("torch.distributed.tensor", register)
