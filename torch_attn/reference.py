"""Scaled dot-product attention as the textbooks write it: oracle of the tests, place to start.

By Vaswani et al., *Attention Is All You Need*, 2017, section 3.2.1,
https://arxiv.org/abs/1706.03762, it is::

    Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V

Each row of the softmax holds the weights with which one query averages the values. The whole L x S
matrix of them is written down here: that keeps these lines short, and it is what `torch_attn.sdpa`
avoids. All of it is plain PyTorch, so autograd differentiates it to any order, and it computes in
the precision of its inputs: float64 in makes it the oracle.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["sdpa", "sdpa_stats", "sdpa_with_weights"]


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    dropout_mask: Tensor | None = None,
) -> Tensor:
    """The output of `sdpa_with_weights` alone, `[..., Hq, L, Ev]`."""
    return sdpa_with_weights(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        dropout_mask=dropout_mask,
    )[0]


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
    dropout_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Textbook attention that shows its work.

    Args:
        query: `[..., Hq, L, E]`, floating point. The leading dimensions of all inputs broadcast.
        key: `[..., Hk, S, E]`, of the query's dtype.
        value: `[..., Hv, S, Ev]`, of the query's dtype.
        attn_mask: broadcasts to `[..., Hq, L, S]`. Boolean: True may attend. Floating: added to the
            scaled scores; where it is -inf the key is masked.
        dropout_p: the probability in [0, 1] with which each weight was dropped; the kept ones are
            divided by 1 - dropout_p.
        is_causal: query i sees keys 0..i (counted from the top left), on top of `attn_mask`.
        scale: the factor of the scores, 1 / sqrt(E) if None.
        enable_gqa: Hk and Hv may be divisors of Hq; one key (value) head then serves Hq / Hk
            (Hq / Hv) neighbouring query heads.
        dropout_mask: boolean, broadcasts to `[..., Hq, L, S]`, True where a weight was kept.
            Nothing is drawn at random here: who tests dropout says what was dropped.

    Returns:
        output `[..., Hq, L, Ev]`; weights `[..., Hq, L, S]`, before dropout, whose rows sum to 1
        or, where every key is masked, are 0; scores `[..., Hq, L, S]`, scaled and masked.

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
    masked = torch.zeros_like(scores, dtype=torch.bool)
    if is_causal:
        masked = masked | torch.ones_like(masked).triu(diagonal=1)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        masked = masked | ~attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask.to(scores.dtype)
        masked = masked | (attn_mask == -math.inf)
    # Selected, not added: NaN + -inf is NaN, and a masked key must have no say at all.
    scores = scores.masked_fill(masked, -math.inf)

    # In a row without any key softmax would be 0 / 0. Its weights are 0; no gradient enters it.
    empty = masked.all(dim=-1, keepdim=True)
    weights = scores.masked_fill(empty, 0).softmax(dim=-1).masked_fill(empty, 0)

    kept = weights
    if dropout_mask is not None:
        # With dropout_p = 1 nothing is left to divide.
        kept = weights.masked_fill(~dropout_mask, 0) / ((1 - dropout_p) or 1)
    return kept @ value, weights, scores


def sdpa_stats(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Statistics of the weights P and scores X of `sdpa_with_weights`.

    Returns:
        largest score `max_j X`, entropy `-sum_j P log P` in nats and `logsumexp_j X`, each
        `[..., Hq, L]`; received weight `sum_i P`, `[..., Hq, S]`. A row without keys has -inf, 0
        and -inf.
    """
    _, weights, scores = sdpa_with_weights(
        query, key, key, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )
    # A masked key more changes nothing, and without any other there still is a largest score.
    scores = torch.nn.functional.pad(scores, (0, 1), value=-math.inf)
    entropy = -torch.special.xlogy(weights, weights).sum(-1)  # 0 log 0 = 0
    return scores.amax(-1), entropy, scores.logsumexp(-1), weights.sum(-2)
