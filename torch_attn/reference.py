"""Scaled dot-product attention as in textbooks: the tests' oracle, and a place to start reading.

Vaswani et al., *Attention Is All You Need*, 2017, section 3.2.1, https://arxiv.org/abs/1706.03762,
define::

    Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V

Each row of the softmax holds the weights with which one query averages the values. To keep the code
short, this module stores the whole L x S matrix of weights, which `torch_attn.sdpa` avoids. The
code is plain PyTorch, so autograd differentiates it to any order. It computes in the precision of
its inputs. With float64 inputs it is the tests' oracle.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["flex_attention", "sdpa", "sdpa_stats", "sdpa_with_logsumexp", "sdpa_with_weights"]


def sdpa(query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """Returns only the output of `sdpa_with_weights`, `[..., Hq, L, Ev]`."""
    return sdpa_with_weights(query, key, value, *arguments, **options)[0]


def sdpa_with_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float = 0.0,
    window_size: tuple[int, int] = (-1, -1),
    query_offset: Tensor | int | None = None,
    key_lengths: Tensor | int | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Textbook attention, with its weights and scores.

    Args:
        query: `[..., Hq, L, E]`, floating point. The leading dimensions of all inputs broadcast.
        key: `[..., Hk, S, E]`, of the query's dtype.
        value: `[..., Hv, S, Ev]`, of the query's dtype.
        attn_mask: broadcasts to `[..., Hq, L, S]`. In a boolean mask, True lets the query attend to
            the key. A floating mask is added to the scaled scores; the key is masked where the mask
            is -inf.
        sinks: `[..., Hq]`, as for :func:`torch_attn.sdpa`. Arguments without a line here are also
            as for :func:`torch_attn.sdpa`.
        dropout_mask: boolean, broadcasts to `[..., Hq, L, S]`, True where a weight was kept. This
            function draws no random numbers: the caller says what was dropped.

    Returns:
        Three tensors: the output `[..., Hq, L, Ev]`; the weights before dropout, `[..., Hq, L, S]`;
        and the scores, scaled and masked, `[..., Hq, L, S]`. A row of the weights sums to 1, or to
        less with a sink. The row is 0 if every key is masked.

    Raises:
        ValueError: `dropout_p` is not 0 and no `dropout_mask` is given.
    """
    if dropout_p and dropout_mask is None:
        raise ValueError(f"dropout_p = {dropout_p} needs a dropout_mask that says what was kept")
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), dim=-3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), dim=-3)
    if scale is None:
        scale = 1 / math.sqrt(max(query.size(-1), 1))

    leading = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
        query.shape[:-2], key.shape[:-2], value.shape[:-2]
    )
    scores = (query @ key.transpose(-2, -1) * scale).expand(*leading, -1, -1)
    if softcap:
        scores = softcap * (scores / softcap).tanh()

    # How far key j is ahead of query i, [..., 1, L, S]: < 0 if the key is before the query.
    device = query.device
    positions = torch.arange(query.size(-2), device=device)[:, None]
    if query_offset is not None:
        positions = positions + _of_samples(query_offset, scores)
    keys = torch.arange(key.size(-2), device=device)
    ahead = keys - positions
    if alibi_slopes is not None:
        scores = scores - _of_heads(alibi_slopes, scores) * ahead.abs()

    masked = torch.zeros_like(scores, dtype=torch.bool)
    left, right = window_size
    if left >= 0:
        masked = masked | (ahead < -left)
    if right >= 0:
        masked = masked | (ahead > right)
    if is_causal:
        masked = masked | (ahead > 0)
    if key_lengths is not None:
        masked = masked | (keys >= _of_samples(key_lengths, scores))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        masked = masked | ~attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask.to(scores.dtype)
        masked = masked | (attn_mask == -math.inf)
    # Fills in -inf instead of adding it, because NaN + -inf is NaN, and a masked key must have no
    # influence.
    scores = scores.masked_fill(masked, -math.inf)

    kept = weights = _softmax(scores, sinks)
    if dropout_mask is not None:
        # With dropout_p = 1 no weight is left to divide.
        kept = weights.masked_fill(~dropout_mask, 0) / ((1 - dropout_p) or 1)
    return kept @ value, weights, scores


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Computes the softmax of each row, with the sink of its head as one more score.

    The softmax of a row without keys would be 0 / 0. Such a row gets weights of 0, without
    gradients.
    """
    logits = scores
    if sinks is not None:
        logits = torch.cat([scores, _of_heads(sinks, scores).expand_as(scores[..., :1])], dim=-1)
    empty = (logits == -math.inf).all(dim=-1, keepdim=True)
    weights = logits.masked_fill(empty, 0).softmax(dim=-1).masked_fill(empty, 0)
    return weights[..., : scores.size(-1)]


def _of_samples(numbers: Tensor | int, scores: Tensor) -> Tensor:
    """Reshapes one number per sample, `[...]`, to broadcast over heads, queries and keys."""
    numbers = torch.as_tensor(numbers, device=scores.device)
    return numbers[..., None, None, None] if scores.dim() > 2 else numbers


def _of_heads(numbers: Tensor, scores: Tensor) -> Tensor:
    """Reshapes one number per head, `[..., Hq]`, to broadcast over queries and keys."""
    numbers = numbers.to(scores.dtype)[..., None, None]
    return numbers if scores.dim() > 2 else numbers[0]


def sdpa_with_logsumexp(
    query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `sdpa`, and two numbers for every row X of the scores, each `[..., Hq, L]`.

    Returns:
        Three tensors: the output; the logsumexp `log(exp(sink) + sum_j exp(X_j))`; and the largest
        score `max_j X_j`, without the sink. For a row without keys, the logsumexp is the sink, or
        -inf if there is no sink, and the largest score is -inf.
    """
    output, _, scores = sdpa_with_weights(query, key, value, *arguments, **options)
    sinks = options.get("sinks")
    sink = torch.tensor(-math.inf) if sinks is None else _of_heads(sinks, scores)
    logits = torch.cat([scores, sink.to(scores).expand(*scores.shape[:-1], 1)], dim=-1)
    empty = (logits == -math.inf).all(dim=-1)
    logsumexp = logits.masked_fill(empty[..., None], 0).logsumexp(-1).masked_fill(empty, -math.inf)
    return output, logsumexp, torch.nn.functional.pad(scores, (0, 1), value=-math.inf).amax(-1)


def sdpa_stats(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes statistics of the weights P and scores X of `sdpa_with_weights`.

    Returns:
        Four tensors: the largest score `max_j X`, the entropy `-sum_j P log P` in nats and the
        logsumexp, each `[..., Hq, L]`; and the received weight `sum_i P`, `[..., Hq, S]`. For a row
        without keys and without a sink, the first three tensors are -inf, 0 and -inf.
    """
    arguments = {"attn_mask": attn_mask, "is_causal": is_causal, **options}
    _, weights, _ = sdpa_with_weights(query, key, key, **arguments)
    _, logsumexp, largest_score = sdpa_with_logsumexp(query, key, key, **arguments)
    entropy = -torch.special.xlogy(weights, weights).sum(-1)  # 0 log 0 = 0
    return largest_score, entropy, logsumexp, weights.sum(-2)


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    mask_mod: Callable[..., Tensor] | None = None,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention whose scores and mask are functions of the pair of query and key (FlexAttention).

    Args:
        query: `[B, Hq, L, E]`. key: `[B, Hk, S, E]`. value: `[B, Hk, S, Ev]`.
        score_mod: `score_mod(score, b, h, q_idx, kv_idx)` returns the score of a pair.
        mask_mod: `mask_mod(b, h, q_idx, kv_idx)` says whether query `q_idx` sees key `kv_idx`.

    Returns:
        The output `[B, Hq, L, Ev]` and the logsumexp `[B, Hq, L]`. For a query without keys, the
        output is 0 and the logsumexp is -inf.
    """
    if enable_gqa:
        key, value = (x.repeat_interleave(query.size(1) // x.size(1), dim=1) for x in (key, value))
    scale = 1 / math.sqrt(max(query.size(-1), 1)) if scale is None else scale
    scores = query @ key.transpose(-2, -1) * scale
    if score_mod is not None:
        scores = of_every_pair(score_mod, scores.shape, scores)
    if mask_mod is not None:
        visible = of_every_pair(mask_mod, scores.shape, device=scores.device)
        scores = scores.masked_fill(~visible, -math.inf)
    empty = (scores == -math.inf).all(dim=-1, keepdim=True)
    finite = scores.masked_fill(empty, 0)
    weights = finite.softmax(dim=-1).masked_fill(empty, 0)
    logsumexp = finite.logsumexp(dim=-1).masked_fill(empty[..., 0], -math.inf)
    return weights @ value, logsumexp


def of_every_pair(
    function: Callable[..., Tensor],
    shape: tuple[int, ...],
    *scores: Tensor,
    device: torch.device | str | None = None,
) -> Tensor:
    """Maps a score_mod or mask_mod over b, h, q_idx and kv_idx; returns `[B, H, L, S]`."""
    indices = [torch.arange(n, device=scores[0].device if scores else device) for n in shape]
    mapped = function
    for axis in (3, 2, 1, 0):
        in_dims = [0] * len(scores) + [0 if n == axis else None for n in range(4)]
        mapped = torch.vmap(mapped, in_dims=tuple(in_dims))
    with _IndexByNumbers():
        return mapped(*scores, *indices).expand(shape)


class _IndexByNumbers(TorchFunctionMode):
    """A mode in which `table[i]` works under vmap for a 0-d tensor i.

    Without this mode PyTorch would convert i to a Python int, and vmap would refuse the conversion.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            table, places = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(x, Tensor) for x in places):
                whole = [None if x == slice(None) else torch.as_tensor(x) for x in places]
                return torch.ops.aten.index(table, whole)
        return func(*args, **(kwargs or {}))
