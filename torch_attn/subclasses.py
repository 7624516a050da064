"""The tensor subclasses of PyTorch that the operators must be told about.

An operator sees a subclass either as the plain tensor inside of it or, if the subclass has its own
``__torch_dispatch__``, not at all. That suits most. It does not suit

- :class:`torch.nn.attention.bias.CausalBias`, the mask of ``causal_upper_left`` and
  ``causal_lower_right``: inside is memory that nobody has written, for the mask is in its
  attributes. Its ``__torch_function__`` knows the built-in attention, and here learns ours;
- ``NestedTensor``, of ``torch.nested`` with ``layout=torch.jagged``, which says of our operators
  only that it has no implementation of them. Here it learns an error that says what to do.

Where PyTorch takes the subclass away before an operator is called, a CausalBias is read as that
memory, by the built-in as by ours: as an argument of a function that is scripted or transformed by
:mod:`torch.func`. Let such a function take it from around it, not as an argument.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_attn._when_imported import when_imported

__all__ = ["register_when_imported"]


@functools.cache
def register_when_imported() -> None:
    """Tells each subclass about the operators, once its module is there; the package calls it."""
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
    """The arguments with causality in place of a CausalBias, as the built-in reads it."""
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
    """Of sdpa or sdpa.default: attn::sdpa."""
    return f"attn::{op.__name__.removesuffix('.default')}"


def _register_nested() -> None:
    from torch.nested._internal.nested_tensor import NestedTensor

    def refuse(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> None:
        names = [argument.name for argument in op._schema.arguments]
        given = dict(zip(names, args, strict=False)) | (kwargs or {})
        operator = _name(op).replace("_sdpa_forward", "sdpa")  # what users call
        nested = next(name for name in given if isinstance(given[name], NestedTensor))
        raise RuntimeError(
            f"{operator}: {nested} is a nested tensor; it must be a dense one. Pad it, "
            f"{nested}.to_padded_tensor(0.0), and hide the padding with attn_mask, or call attn "
            f"for each of {nested}.unbind()"
        )

    public = ("sdpa", "attention", "sdpa_with_weights", "sdpa_stats")
    for name in (*public, "_sdpa_and_weights", "_sdpa_forward"):
        torch.library.register_torch_dispatch(f"attn::{name}", NestedTensor, refuse)
