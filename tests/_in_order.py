"""The fused algorithm with its sums in an order written here, the same on every machine."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from helpers import INF, causal_mask


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [..., L, K] times b [..., K, S]: for each number, K products added one after the other.

    Each is rounded before it is added, as it is not by every BLAS.
    """
    total = a[..., :, :1] * b[..., :1, :]
    for k in range(1, a.size(-1)):
        total = total + a[..., :, k, None] * b[..., k, None, :]
    return total


class _Fused(torch.autograd.Function):
    """As FlashAttention and the built-in's fused kernel compute it (Dao, 2023), all in one tile.

    Its backward takes the weights from the logsumexp and <dP, P> from the output: where a weight is
    nearly 1, numbers nearly equal are subtracted whose errors depend on how each was summed.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float
    ) -> Tensor:
        scores = product(query, key.mT) * scale + bias
        maximum = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
        weights = (scores - maximum).exp()
        ones = weights.new_ones(weights.size(-1), 1)
        total = product(weights, ones)
        output = torch.where(total > 0, product(weights, value) / total, 0)
        ctx.save_for_backward(query, key, value, bias, output, maximum + total.log())
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = gradients
        query, key, value, bias, output, logsumexp = ctx.saved_tensors
        scores = product(query, key.mT) * ctx.scale + bias
        weights = torch.where(scores > -INF, (scores - logsumexp).exp(), 0)
        # In the order of vectors of 4 numbers, which is not that of the product with the values.
        shares = grad * output
        lanes = [shares[..., lane::4].unbind(-1) for lane in range(4)]
        delta = sum(sum(lane) for lane in lanes)
        grad_scores = weights * (product(grad, value.mT) - delta[..., None])
        return (
            (product(grad_scores, key) * ctx.scale).sum_to_size(query.shape),
            (product(grad_scores.mT, query) * ctx.scale).sum_to_size(key.shape),
            product(weights.mT, grad).sum_to_size(value.shape),
            grad_scores.sum_to_size(bias.shape),
            None,
        )


def sdpa_in_order(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """With the arguments of `F.scaled_dot_product_attention`, of inputs that are not empty."""
    if enable_gqa:
        heads = query.size(-3)
        key, value = (t.repeat_interleave(heads // t.size(-3), -3) for t in (key, value))
    bias = query.new_zeros(1, 1)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        bias = torch.where(attn_mask, 0.0, -INF).to(query.dtype)
    elif attn_mask is not None:
        bias = attn_mask
    if is_causal:
        bias = bias.masked_fill(~causal_mask(query, key), -INF)
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    return _Fused.apply(query, key, value, bias, scale)
