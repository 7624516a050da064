"""Scaled dot-product attention as the textbooks write it: the oracle of the tests, and the place to begin reading.

    Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V

A. Vaswani et al., "Attention Is All You Need" (2017), section 3.2.1, https://arxiv.org/abs/1706.03762.

Every row of ``softmax(...)`` holds the weights with which one query averages the values. The whole matrix of L x S
scores is written down here, which is what makes these lines short and what `torch_attn.sdpa` avoids. All of it is
ordinary PyTorch, so autograd differentiates it to any order, and the result has the precision of the inputs: give
float64 to get an oracle.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["sdpa", "sdpa_with_weights"]


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
    """The output of `sdpa_with_weights` alone, `[..., L, Ev]`."""
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
        key: `[..., Hk, S, E]`, the query's dtype.
        value: `[..., Hv, S, Ev]`, the query's dtype.
        attn_mask: broadcastable to `[..., Hq, L, S]`. Boolean: True may attend. Floating: added to the scaled scores,
            and where it is -inf the key is masked.
        dropout_p: probability in [0, 1] with which a weight was dropped; those kept are divided by 1 - dropout_p.
        is_causal: query i sees keys 0..i only (counted from the top left), on top of `attn_mask`.
        scale: factor of the scores; 1 / sqrt(E) if None.
        enable_gqa: let Hk and Hv be divisors of Hq; each key or value head serves Hq / Hk (Hq / Hv) query heads.
        dropout_mask: boolean, broadcastable to `[..., Hq, L, S]`, True where the weight was kept. Nothing is drawn at
            random here: whoever tests dropout says which weights were dropped.

    Returns:
        output `[..., Hq, L, Ev]`; weights `[..., Hq, L, S]`, rows summing to 1 (before dropout), or 0 where a row is
        masked altogether; scores `[..., Hq, L, S]`, scaled and masked, before the softmax.

    Raises:
        ValueError: `dropout_p` is not 0 and there is no `dropout_mask`.
    """
    if dropout_p and dropout_mask is None:
        raise ValueError(f"dropout_p = {dropout_p} needs a dropout_mask that says what was kept")
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), dim=-3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), dim=-3)
    if scale is None:
        scale = 1 / math.sqrt(max(query.size(-1), 1))

    scores = query @ key.transpose(-2, -1) * scale
    masked = torch.zeros_like(scores, dtype=torch.bool)
    if is_causal:
        masked = masked | torch.ones_like(masked).triu(diagonal=1)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        masked = masked | ~attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask.to(scores.dtype)
        masked = masked | (attn_mask == -math.inf)
    # Chosen, not added: NaN + -inf would be NaN, and a masked key must not speak at all.
    scores = scores.masked_fill(masked, -math.inf)

    # A row without any key: softmax would divide 0 by 0. Such a row gets weights 0, and no gradient flows through it.
    empty = masked.all(dim=-1, keepdim=True)
    weights = scores.masked_fill(empty, 0).softmax(dim=-1).masked_fill(empty, 0)

    kept = weights
    if dropout_mask is not None and dropout_p < 1:
        kept = weights.masked_fill(~dropout_mask, 0) / (1 - dropout_p)
    elif dropout_p == 1:
        kept = torch.zeros_like(weights)
    return kept @ value, weights, scores
