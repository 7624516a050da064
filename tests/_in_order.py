"""The fused algorithm with its sums in an order written here, the same on every machine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from helpers import INF
from torch_attn import reference


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        total = a[..., :, :1] * b[..., :1, :]
        for k in range(1, a.size(-1)):
            total = total + a[..., :, k, None] * b[..., k, None, :]
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        of_a, of_b = product(gradients[0], b.mT), product(a.mT, gradients[0])
        return of_a.sum_to_size(a.shape), of_b.sum_to_size(b.shape)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [..., L, K] times b [..., K, S]: for each number, K products added one after the other.

    Each is rounded before it is added, as it is not by every BLAS.
    """
    total: Tensor = _Product.apply(a, b)  # type: ignore[no-untyped-call]
    return total


class _Products(TorchFunctionMode):
    """While entered, products of matrices are `product`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_product = func in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
        return product(*args) if is_product else func(*args, **(kwargs or {}))


class _Fused(torch.autograd.Function):
    """As FlashAttention and the built-in's fused kernel compute it (Dao, 2023), all in one tile.

    Its backward takes the weights from the logsumexp and <dP, P> from the output: where a weight is
    nearly 1, numbers nearly equal are subtracted whose errors depend on how each was summed.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
        maximum = torch.maximum(scores.amax(-1, keepdim=True), sinks)
        maximum = maximum.clamp(min=torch.finfo(scores.dtype).min)
        weights = (scores - maximum).exp()
        ones = weights.new_ones(weights.size(-1), 1)
        total = product(weights, ones) + (sinks - maximum).exp()
        output = torch.where(total > 0, product(weights, value) / total, 0)
        ctx.save_for_backward(scores, value, sinks, output, maximum + total.log())
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        (grad,) = gradients
        scores, value, sinks, output, logsumexp = ctx.saved_tensors
        weights, of_sinks = (
            torch.where(x > -INF, (x - logsumexp).exp(), 0) for x in (scores, sinks)
        )
        # Sums in the order of vectors of 4 numbers, unlike the product with the values.
        shares = grad * output
        lanes = [shares[..., lane::4].unbind(-1) for lane in range(4)]
        delta = sum(sum(lane) for lane in lanes)[..., None]
        return (
            weights * (product(grad, value.mT) - delta),
            product(weights.mT, grad).sum_to_size(value.shape),
            (-of_sinks * delta).sum_to_size(sinks.shape),
        )


def sdpa_in_order(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *arguments: Any,
    sinks: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """With the arguments of `reference.sdpa`, but for dropout, of inputs that are not empty."""
    with _Products():
        scores = reference.sdpa_with_weights(query, key, value, *arguments, **options)[2]
    if options.get("enable_gqa"):
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    sinks = query.new_full((1,), -INF) if sinks is None else sinks
    sinks = sinks.to(scores.dtype)[..., None, None]
    return _Fused.apply(scores, value, sinks if scores.dim() > 2 else sinks[0])
