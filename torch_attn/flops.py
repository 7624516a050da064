"""Floating-point operations, for :class:`torch.utils.flop_counter.FlopCounterMode`.

Counted as PyTorch counts its own attention: the matrix products that the formulas need, a product
``[m, k] @ [k, n]`` as ``2 m n k``, in every query head, with nothing taken off for scores that are
masked. Derivatives include the scores that they compute again. Not counted is what is not asked
for: the gradient of a key that wants none, a direction that is zero.

With E the size of a query and a key, Ev that of a value, and per pair of a query and a key:

==============  =================================================================================
forward         ``2 (E + Ev)``
backward        ``2 (3 E + 2 Ev)``, of which ``2 E`` for grad_query and for grad_key each, and
                ``2 Ev`` for grad_value
tangent         ``2 (3 E + 2 Ev)``, of which ``2 E`` for the direction of query and of key each, and
                ``2 Ev`` for that of value
second order    ``2 (7 E + 3 Ev)``
statistics      ``4 E``: the scores twice, for a weight is known once its whole row has been seen
==============  =================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

__all__ = ["register"]

# The arguments of a call by name, with shapes in place of tensors.
Call = dict[str, Any]


def register() -> None:
    """Registers the formulas with PyTorch; importing the package does."""
    ops = torch.ops.attn
    for op, count in (
        (ops.sdpa, _forward),
        (ops.sdpa_stats, _statistics),
        (ops._sdpa_forward, _forward),
        (ops._sdpa_backward, _backward),
        (ops._sdpa_tangent, _tangent),
        (ops._sdpa_second, _second),
    ):
        flop_registry.pop(op, None)  # of an earlier import of the package
        register_flop_formula(op)(_of_arguments(op, count))


def _of_arguments(op: Any, count: Callable[[Call], int]) -> Callable[..., int]:
    names = [argument.name for argument in op.default._schema.arguments]

    def formula(*args: Any, **kwargs: Any) -> int:
        given = zip(names, args, strict=False)  # defaults at the end may be left out
        return count(dict(given) | kwargs)

    return formula


def _products(call: Call, over_head_dim: int, over_value_dim: int) -> int:
    """As many products over E and over Ev, of every query with every key."""
    query, key, value = call["query"], call["key"], call["value"]
    leading = zip_longest(*(shape[-3::-1] for shape in (query, key, value)), fillvalue=1)
    # The sizes are equal or 1 and one more; of grouped heads, the query has most.
    heads: int = math.prod(map(max, leading))
    flops: int = 2 * query[-2] * key[-2] * (over_head_dim * query[-1] + over_value_dim * value[-1])
    return heads * flops


def _forward(call: Call) -> int:
    return _products(call, 1, 1)


def _backward(call: Call) -> int:
    query, key, value, mask = call["grad_input_mask"]
    through_softmax = query or key or mask
    return _products(call, 1 + query + key, through_softmax + value)


def _statistics(call: Call) -> int:
    return _products({**call, "value": call["key"]}, 2, 0)


def _directions(call: Call) -> list[bool]:
    names = ("tangent_query", "tangent_key", "tangent_value", "tangent_mask")
    return [call[name] is not None for name in names]


def _tangent(call: Call) -> int:
    query, key, value, mask = _directions(call)
    through_softmax = query or key or mask
    return _products(call, 1 + query + key, through_softmax + value)


def _second(call: Call) -> int:
    query, key, value, _ = call["grad_input_mask"]
    along_query, along_key, along_value, _ = _directions(call)
    scores = 1 + along_query + along_key
    gradients = query * (1 + along_key) + key * (1 + along_query)
    return _products(call, scores + gradients, 1 + along_value + value)
