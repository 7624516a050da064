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
    known = (ops.sdpa, ops.sdpa.default, ops.sdpa_with_weights, ops.sdpa_with_weights.default)

    def torch_function(
        cls: type, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in known:
            return _attend_causally(func, *args, **(kwargs or {}))
        if func in (ops.sdpa_stats, ops.sdpa_stats.default):
            return _causal_stats(func, *args, **(kwargs or {}))
        return own(cls, func, types, args, kwargs)

    causal_bias.__torch_function__ = classmethod(torch_function)


def _attend_causally(
    op: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """The operator with the mask that a CausalBias stands for, as the built-in reads it."""
    inputs = {"query": query, "key": key, "value": value}
    mask, causal, is_reversed = _mask_of(op, inputs, attn_mask, is_causal)
    query = query.flip(-2) if is_reversed else query
    results = op(query, key, value, mask, dropout_p, causal, scale=scale, enable_gqa=enable_gqa)
    if not is_reversed:
        return results
    if isinstance(results, Tensor):
        return results.flip(-2)
    return tuple(result.flip(-2) for result in results)


def _causal_stats(
    op: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    attn_mask: Any = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """The same of sdpa_stats, whose last result is of keys."""
    inputs = {"query": query, "key": key}
    mask, causal, is_reversed = _mask_of(op, inputs, attn_mask, is_causal)
    query = query.flip(-2) if is_reversed else query
    *of_rows, of_keys = op(query, key, mask, causal, scale=scale, enable_gqa=enable_gqa)
    return (*(t.flip(-1) if is_reversed else t for t in of_rows), of_keys)


def _mask_of(
    op: Any, inputs: dict[str, Tensor], attn_mask: Any, is_causal: bool
) -> tuple[Tensor | None, bool, bool]:
    """attn_mask and is_causal that say the same, and whether with the queries in reverse order."""
    from torch.nn.attention.bias import CausalBias, CausalVariant

    for name, tensor in inputs.items():
        if isinstance(tensor, CausalBias):
            raise TypeError(f"{_name(op)}: {name} is a CausalBias, which only attn_mask may be")
    if is_causal:
        raise ValueError(
            f"{_name(op)}: is_causal is True and attn_mask a CausalBias, which says itself what is "
            "causal; give one of them"
        )
    query, key = inputs["query"], inputs["key"]
    L, S = attn_mask.seq_len_q, attn_mask.seq_len_kv
    if (*query.shape[-2:-1], *key.shape[-2:-1]) != (L, S):
        raise RuntimeError(
            f"{_name(op)}: attn_mask is a CausalBias of {L} queries and {S} keys, but query is "
            f"{list(query.shape)} and key {list(key.shape)}; the lengths must be equal"
        )
    if attn_mask.variant == CausalVariant.UPPER_LEFT or L == S:
        return None, True, False
    if L <= 1:
        return None, False, False
    # Query i sees the keys j <= i + S - L. With the queries in reverse order that is i + j < S: a
    # mask whose rows are one vector, each beginning one further, so L + S - 1 numbers hold it.
    mask = torch.arange(L + S - 1, device=query.device).lt(S).unfold(0, S, 1)
    return mask, False, True


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

    names = ("sdpa", "sdpa_with_weights", "_sdpa_and_weights", "sdpa_stats", "_sdpa_forward")
    for name in names:
        torch.library.register_torch_dispatch(f"attn::{name}", NestedTensor, refuse)
