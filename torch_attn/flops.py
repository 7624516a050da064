"""Counts floating-point operations for :class:`torch.utils.flop_counter.FlopCounterMode`.

The formulas follow the rules of PyTorch's formulas for its own attention. They count the matrix
products of every query head, where a product ``[m, k] @ [k, n]`` has ``2 m n k`` operations. Masked
scores count, too. The formulas of derivatives include the scores that the kernels compute again.
The formulas leave out what is not computed, such as the gradient of a key that does not require
one.

With a `window_size`, the formulas count only the pairs of a query and a key that the window and
`is_causal` leave visible. The formulas know shapes, but not the numbers in `query_offset` and
`key_lengths`. So they assume that all S keys are in use, and that the first query is at the first
key. If a `query_offset` is given, they assume instead that the last query is at the last key. The
formulas treat packed sequences (`cu_seq_q`, `cu_seq_k`) as if all sequences had the same length,
and sequences in the pages of a `block_table` as if each sequence had `max_k` keys. The formulas
ignore all other options, because these options do not change the matrix products.

The table counts the operations per pair of a query and a key, where E is the size of a query and
of a key, and Ev is the size of a value:

==============  =================================================================================
forward         ``2 (E + Ev)``
backward        ``2 (3 E + 2 Ev)``, of which ``2 E`` for grad_query and for grad_key each, and
                ``2 Ev`` for grad_value
tangent         ``2 (3 E + 2 Ev)``, of which ``2 E`` for the tangent of query and of key each, and
                ``2 Ev`` for the tangent of value
second order    ``2 (7 E + 3 Ev)``
statistics      ``4 E``: the scores twice, because a weight depends on all scores of its row
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
    """Registers the formulas with PyTorch; importing the package calls this."""
    ops = torch.ops.attn
    for op, count in (
        (ops.sdpa, _forward),
        (ops.attention, _forward),
        (ops.flex_attention, _forward),
        (ops.sdpa_stats, _statistics),
        (ops._sdpa_forward, _forward),
        (ops._sdpa_backward, _backward),
        (ops._sdpa_tangent, _tangent),
        (ops._sdpa_second, _second),
    ):
        flop_registry.pop(op, None)  # from an earlier import of the package
        register_flop_formula(op)(_of_arguments(op, count))


def _of_arguments(op: Any, count: Callable[[Call], int]) -> Callable[..., int]:
    names = [argument.name for argument in op.default._schema.arguments]

    def formula(*args: Any, **kwargs: Any) -> int:
        given = zip(names, args, strict=False)  # defaults at the end may be left out
        return count(dict(given) | kwargs)

    return formula


def _products(call: Call, over_head_dim: int, over_value_dim: int) -> int:
    """Counts the operations of products over E and over Ev, for the visible pairs.

    `over_head_dim` is the number of products over E, and `over_value_dim` is the number of products
    over Ev.
    """
    if call.get("block_table") is not None:  # key and value are pools
        pools = {name: call[name] for name in ("key", "value")}
        call = call | {name: (x[1], call["max_k"], x[-1]) for name, x in pools.items()}
    query, key, value = call["query"], call["key"], call["value"]
    leading = zip_longest(*(shape[-3::-1] for shape in (query, key, value)), fillvalue=1)
    # For each leading dimension, the largest of the three sizes counts. A smaller size is 1, which
    # broadcasts, or the number of heads of grouped keys or values.
    heads: int = math.prod(map(max, leading))
    flops: int = 2 * _pairs(call) * (over_head_dim * query[-1] + over_value_dim * value[-1])
    return heads * flops


def _pairs(call: Call) -> int:
    """Counts the pairs of a query and a key, in one head, that the window leaves visible."""
    L, S = call["query"][-2], call["key"][-2]
    if call.get("cu_seq_q") is not None:
        N = max(call["cu_seq_q"][0] - 1, 1)
        S = S if call.get("block_table") is not None else S // N
        one = {"query": (L // N, 0), "key": (S, 0), "query_offset": ()}  # last query at last key
        return int(N) * _pairs({**one, "window_size": call.get("window_size", (-1, -1))})
    window = call.get("window_size", (-1, -1))
    if max(window) < 0:
        return int(L * S)
    left, right = (L + S if size < 0 else size for size in window)
    if call.get("is_causal"):
        right = 0
    first = 0 if call.get("query_offset") is None else S - L  # the position of query 0

    def until(key: int) -> int:
        """Counts the visible pairs if query i sees the keys up to the number i + `key`."""
        return _clamped(L + key, S) - _clamped(key, S)

    return until(first + right) - until(first - left - 1)


def _clamped(n: int, most: int) -> int:
    """Returns the sum of min(i, most) over i = 1 ... n."""
    full = max(n - most, 0)
    rest = max(n - full, 0)
    return rest * (rest + 1) // 2 + full * most


def _forward(call: Call) -> int:
    return _products(call, 1, 1)


def _backward(call: Call) -> int:
    query, key, value, mask, slopes, _, *terms = call["grad_input_mask"]
    through_softmax = query or key or mask or slopes or any(terms)
    return _products(call, 1 + query + key, through_softmax + value)


def _statistics(call: Call) -> int:
    return _products({**call, "value": call["key"]}, 2, 0)


def _directions(call: Call) -> list[bool]:
    names = ("query", "key", "value", "attn_mask", "alibi_slopes")
    terms = ("row_terms", "key_terms", "distance_terms")
    tables = any(shape is not None for shape in call["tangent_tables"])
    return [*(call[f"tangent_{name}"] is not None for name in (*names, *terms)), tables]


def _tangent(call: Call) -> int:
    query, key, value, *others = _directions(call)
    through_softmax = query or key or any(others)
    return _products(call, 1 + query + key, through_softmax + value)


def _second(call: Call) -> int:
    query, key, value, *_ = call["grad_input_mask"]
    along_query, along_key, along_value, *_ = _directions(call)
    scores = 1 + along_query + along_key
    gradients = query * (1 + along_key) + key * (1 + along_query)
    return _products(call, scores + gradients, 1 + along_value + value)
