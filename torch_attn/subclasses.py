"""Makes two tensor subclasses of PyTorch known to the operators.

An operator sees the plain tensor inside of a subclass. If the subclass has its own
``__torch_dispatch__``, the operator does not see the tensor at all. Both behaviours are right for
most subclasses, but not for these two:

- :class:`torch.nn.attention.bias.CausalBias`, which ``causal_upper_left`` and
  ``causal_lower_right`` return. Three attributes of a CausalBias (a variant and two lengths) say
  which keys a query sees, so PyTorch leaves the memory of a CausalBias uninitialised. Its
  ``__torch_function__`` handles only the built-in attention. This module makes
  ``__torch_function__`` handle the operators of torch_attn, too;
- ``NestedTensor``, of ``torch.nested`` with ``layout=torch.jagged``. A NestedTensor stores its
  sequences one after another, like packed sequences. Its ``__torch_function__`` handles only the
  built-in attention, and on a CPU only without ``is_causal``. This module makes
  ``__torch_function__`` handle ``attn::sdpa`` and ``attn::attention``, too, with ``is_causal`` and
  with every option but a mask.

If a function is scripted, or transformed by :mod:`torch.func`, PyTorch unwraps a CausalBias among
its arguments. Then every attention operator, including the built-in, reads the uninitialised
memory. Such a function must take the bias from its enclosing scope, not as an argument.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_attn import replace
from torch_attn._when_imported import when_imported

__all__ = ["register_when_imported"]


@functools.cache
def register_when_imported() -> None:
    """Adds the operators to each subclass once PyTorch's module of that subclass is imported.

    ``import torch_attn`` calls this function.
    """
    when_imported("torch.nn.attention.bias", _register_causal_bias)
    when_imported("torch.nested._internal.nested_tensor", _register_nested)


def _register_causal_bias() -> None:
    from torch.nn.attention import bias

    causal_bias: Any = bias.CausalBias
    own = causal_bias.__torch_function__.__func__
    ops = torch.ops.attn
    positional = {
        op: [a.name for a in packet.default._schema.arguments if not a.kwarg_only]
        for packet in (ops.sdpa, ops.attention, ops.sdpa_with_weights, ops.sdpa_stats)
        for op in (packet, packet.default)
    }

    def torch_function(
        cls: type, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func not in positional:
            return own(cls, func, types, args, kwargs)
        named = zip(positional[func][: len(args)], args, strict=True)
        call = _without_bias(func, **dict(named), **(kwargs or {}))
        if func in (ops.sdpa, ops.sdpa.default) and "query_offset" in call:
            return ops.attention(**call)[0]
        return func(**call)

    causal_bias.__torch_function__ = classmethod(torch_function)


def _without_bias(
    op: Any,
    *,
    query: Tensor,
    key: Tensor,
    attn_mask: Any = None,
    is_causal: bool = False,
    query_offset: Tensor | None = None,
    **others: Any,
) -> dict[str, Any]:
    """Replaces a CausalBias by causality, as the built-in does; returns the new arguments."""
    from torch.nn.attention.bias import CausalBias, CausalVariant

    call = {"query": query, "key": key, **others}
    for name, given in call.items():
        if isinstance(given, CausalBias):
            raise TypeError(f"{_name(op)}: {name} is a CausalBias, which only attn_mask may be")
    if is_causal or query_offset is not None:
        other = "is_causal is True" if is_causal else "query_offset is given"
        raise ValueError(
            f"{_name(op)}: {other} and attn_mask a CausalBias, which says itself what is causal; "
            "give one of them"
        )
    L, S = attn_mask.seq_len_q, attn_mask.seq_len_kv
    if (*query.shape[-2:-1], *key.shape[-2:-1]) != (L, S):
        raise RuntimeError(
            f"{_name(op)}: attn_mask is a CausalBias of {L} queries and {S} keys, but query is "
            f"{list(query.shape)} and key {list(key.shape)}; the lengths must be equal"
        )
    if attn_mask.variant == CausalVariant.LOWER_RIGHT and L != S:
        call["query_offset"] = torch.full([], S - L, dtype=torch.int64, device=query.device)
    return {**call, "is_causal": True}


def _name(op: Any) -> str:
    """Returns attn::sdpa for sdpa or sdpa.default."""
    return f"attn::{op.__name__.removesuffix('.default')}"


def _register_nested() -> None:
    from torch.nested._internal import ops as nested_ops
    from torch.nested._internal.nested_tensor import NestedTensor

    own: Any = nested_ops.jagged_torch_function
    ops = torch.ops.attn
    operators: dict[Any, Any] = {F.scaled_dot_product_attention: ops.sdpa}
    for packet in (ops.sdpa, ops.attention):
        operators |= {packet: packet, packet.default: packet}

    # NestedTensor.__torch_function__ calls this function before autograd sees the call.
    def jagged_torch_function(func: Any, *args: Any, **kwargs: Any) -> Any:
        is_builtin = func is F.scaled_dot_product_attention
        if func not in operators or (is_builtin and not replace.sdpa_is_replaced()):
            return own(func, *args, **kwargs)
        op = operators[func]
        names = [argument.name for argument in op.default._schema.arguments]
        call = dict(zip(names, args, strict=False)) | kwargs
        why_not = _why_not_jagged(**call)
        if is_builtin and not replace.answers_jagged(call["query"], why_not is None):
            return own(func, *args, **kwargs)
        if why_not is not None:
            raise RuntimeError(f"{_name(op)}: {why_not}")
        call.setdefault("with_rows", op is ops.attention)
        results = _attend_jagged(**call)
        return results if op is ops.attention else results[0]

    nested_ops.jagged_torch_function = jagged_torch_function

    # Refuses all other operators, and calls that bypass jagged_torch_function().
    def refuse(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> None:
        names = [argument.name for argument in op._schema.arguments]
        given = dict(zip(names, args, strict=False)) | (kwargs or {})
        operator = _name(op).replace("_sdpa_forward", "sdpa")  # what users call
        nested = next(name for name in given if isinstance(given[name], NestedTensor))
        raise RuntimeError(
            f"{operator}: {nested} is a nested tensor; it must be a dense one. {_instead(nested)}"
        )

    public = ("sdpa", "attention", "flex_attention", "sdpa_with_weights", "sdpa_stats")
    for name in (*public, "_sdpa_and_weights", "_sdpa_forward"):
        torch.library.register_torch_dispatch(f"attn::{name}", NestedTensor, refuse)


def _instead(nested: str) -> str:
    return (
        f"Pad it, {nested}.to_padded_tensor(0.0), and hide the padding with attn_mask, or call "
        f"attn for each of {nested}.unbind()"
    )


def _why_not_jagged(
    query: Any, key: Any, value: Any, attn_mask: Any = None, **others: Any
) -> str | None:
    """Returns why a call with a jagged tensor cannot run as packed sequences, or None if it can."""
    from torch.nested._internal.nested_tensor import NestedTensor

    inputs = {"query": query, "key": key, "value": value}
    given = inputs | {"attn_mask": attn_mask}
    nested = [name for name, tensor in given.items() if isinstance(tensor, NestedTensor)]
    if nested != list(inputs):
        either = "query, key and value must be nested, and attn_mask not, or all dense"
        return f"{nested[0]} is a nested tensor; {either}. {_instead(nested[0])}"
    if attn_mask is not None:
        return (
            "attn_mask is given beside nested tensors, whose scores have no common shape; "
            "torch_attn.varlen_attn takes one with their values() and offsets()"
        )
    for name, tensor in inputs.items():
        if not tensor.dim() - 2 == tensor._ragged_idx == query.dim() - 2:
            return (
                f"{name} is a nested tensor {list(tensor.shape)}; query, key and value must be "
                "[B, H, j, E], as x.transpose(1, 2) is of [B, j, H, E], or [B, j, E], with the "
                "dimension j that is ragged"
            )
    N = query.size(0)
    if key.size(0) != N:
        return f"key is a nested tensor of {key.size(0)} sequences; it must be of query's {N}"
    for name in ("query_offset", "key_lengths"):
        numbers = others.get(name)
        if numbers is not None and numbers.shape not in ((), (1,), (N,)):
            return (
                f"{name} has shape {list(numbers.shape)} beside nested tensors; it must be [] or "
                f"[B], {N} numbers"
            )
    if not _same_places(key, value):
        return "key and value are nested tensors of different lengths; they must be equal"
    return None


def _same_places(key: Any, value: Any) -> bool:
    """Returns whether each sequence begins and ends at the same row in both tensors."""
    if key.lengths() is None and value.lengths() is None and key.shape[-2] == value.shape[-2]:
        return True  # both have the same offsets; a traced graph can compare no more than this
    places = [torch.cat(_with_gaps(tensor)) for tensor in (key, value)]
    return torch.equal(*places)


def _attend_jagged(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    query_offset: Tensor | None = None,
    key_lengths: Tensor | None = None,
    **options: Any,
) -> tuple[Any, Any, Any]:
    """Computes :func:`torch_attn.sdpa_with_logsumexp` per sequence; returns jagged tensors."""
    from torch.nested._internal import nested_tensor

    view: Any = nested_tensor.nested_view_from_values_offsets_lengths
    N = query.size(0)
    cu_seq_q, cu_seq_k = query.offsets(), key.offsets()
    offset = cu_seq_q.new_zeros(()) if query_offset is None else query_offset
    offset = offset.expand(N)
    longest = [t._maybe_max_seqlen or t.values().size(t._ragged_idx - 1) for t in (query, key)]
    if query.lengths() is not None or key.lengths() is not None:
        # Treats the tokens between two sequences as a sequence of their own, without keys.
        (cu_seq_q, _), (cu_seq_k, used) = _with_gaps(query), _with_gaps(key)
        if key_lengths is not None:
            used = used.minimum(key_lengths.expand(N))
        key_lengths = torch.stack([torch.zeros_like(used), used], 1).flatten()
        offset = offset.repeat_interleave(2)
        longest = [t.values().size(t._ragged_idx - 1) for t in (query, key)]
    elif key_lengths is not None:
        key_lengths = key_lengths.expand(N)
    with_heads = query.dim() > 3
    results = torch.ops.attn.attention(
        *(t.values() if with_heads else t.values()[None] for t in (query, key, value)),
        None,
        dropout_p,
        is_causal,
        query_offset=offset,
        key_lengths=key_lengths,
        cu_seq_q=cu_seq_q,
        cu_seq_k=cu_seq_k,
        max_q=longest[0],
        max_k=longest[1],
        **options,
    )

    extremes = query._maybe_min_seqlen, query._maybe_max_seqlen
    layout = (query.offsets(), query.lengths(), query._ragged_idx, *extremes)
    output, logsumexp, max_score = (
        view(values if with_heads else values[0], *layout) if values.dim() > 1 else values
        for values in results  # those that are not wanted are [0]
    )
    return output, logsumexp, max_score


def _with_gaps(tensor: Any) -> tuple[Tensor, Tensor]:
    """Returns the bounds of the sequences and of the gaps before them, and the lengths."""
    starts = tensor.offsets()
    lengths = starts.diff() if tensor.lengths() is None else tensor.lengths()
    starts = starts[:-1]
    return F.pad(torch.stack([starts, starts + lengths], 1).flatten(), (1, 0)), lengths
