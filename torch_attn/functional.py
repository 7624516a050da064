"""The operators as Python functions, with the arguments of ``F.scaled_dot_product_attention``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["sdpa", "sdpa_with_weights"]

# Both can be compiled by torch.jit.script. It takes no arguments that are given by name only and
# have a default, so that `scale` and `enable_gqa` may be given by position here.


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Scaled dot-product attention.

    Computes ``dropout(softmax(scale * query @ key^T + attn_mask)) @ value`` for every head, and
    takes the arguments of :func:`torch.nn.functional.scaled_dot_product_attention`, which it
    replaces. The L x S scores are never stored, whatever the arguments: keys are read block by
    block with a running softmax, and backward computes the weights again.

    Shapes: ``B...`` stands for any number of leading dimensions, also none, that broadcast between
    query, key and value (sizes 1 and n). L is the number of queries, S of keys, E the size of a
    query and a key, Ev that of a value; each may be 0. The head dimension is the third from the
    end. Strides are free: views are read as they are, without a copy.

    Args:
        query: ``[B..., Hq, L, E]``, at least 2-D; float64, float32, bfloat16 or float16.
        key: ``[B..., Hk, S, E]``, query's dtype and device.
        value: ``[B..., Hv, S, Ev]``, query's dtype and device.
        attn_mask: at least 2-D, broadcasts to ``[B..., Hq, L, S]`` without enlarging it. Boolean:
            True = the query may attend to the key. Floating, of query's dtype or float32: added to
            the scaled scores; ``-inf`` masks the key. A floating mask may require a gradient, which
            has the mask's own shape. Or ``causal_upper_left(L, S)`` or ``causal_lower_right(L, S)``
            of :mod:`torch.nn.attention.bias`, of which no L x S mask is made.
        dropout_p: probability, in [0, 1], with which each weight is zeroed; the others are divided
            by ``1 - dropout_p``. Applies whenever it is not 0: pass 0 in evaluation. Drawn from
            torch's default generator of the device, so :func:`torch.manual_seed` repeats it.
        is_causal: query i attends to keys 0 ... i, counted from the top left also where L != S.
            Together with `attn_mask` both apply.
        scale: factor of the scores, of any sign; None means ``1 / sqrt(E)``.
        enable_gqa: allows Hk and Hv to be divisors of Hq (they may differ). ``Hq / Hk``
            neighbouring query heads share a key head, ``Hq / Hv`` a value head; neither is copied.

    Returns:
        ``[B..., Hq, L, Ev]`` in query's dtype, laid out as the query is (a ``[B, L, H, E]`` tensor
        seen as ``[B, H, L, E]`` gives such a view again). A query that may attend to no key, and
        every query if S = 0, gives a row of 0 and finite gradients.

    Raises:
        RuntimeError: shapes, dtypes or devices that do not fit, or a dropout outside [0, 1]. The
            message names the argument, what it was and what is allowed. Nothing is read or written.
        TypeError: `scale` or `dropout_p` is a tensor of which a derivative is asked, for they have
            none. ``torch.ops.attn.sdpa`` itself cannot see that: PyTorch makes a number of it.
        ValueError: `is_causal` beside one of the two causal biases.

    Precision: bfloat16 and float16 accumulate in float32, with the softmax in float32; float64 is
    float64 throughout. Under :class:`torch.autocast` the inputs are cast as the built-in's are.

    Derivatives: with respect to query, key, value and a floating `attn_mask`, only those asked for,
    with dropout's mask held fixed. First and second derivatives, in reverse mode, forward mode and
    any mixture of the two, take memory O(L + S). Third ones, and forward mode over forward mode,
    store the L x S scores, and raise RuntimeError with dropout. Under :func:`torch.func.vmap` the
    operator is called once for all samples; with dropout, `randomness` is honoured.

    Determinism: output and gradients have the same bits on every run and with any number of
    threads.

    NaN: one in a query makes that query's row NaN and no other. One in a key reaches the rows that
    attend to that key, and no row that masks it. One in a value may reach any row of its head, for
    0 * NaN is NaN.

    Memory: O(L + S) a head beside inputs and outputs, forward and backward.

    Sources:
        - the formula: Vaswani et al., *Attention Is All You Need*, 2017,
          https://arxiv.org/abs/1706.03762
        - softmax in one pass: Milakov & Gimelshein, *Online normalizer calculation for softmax*,
          2018, https://arxiv.org/abs/1805.02867
        - backward without the L x S matrix: Rabe & Staats, *Self-attention Does Not Need O(n^2)
          Memory*, 2021, https://arxiv.org/abs/2112.05682
        - blocks, and a backward from the logsumexp of each row: Dao et al., *FlashAttention*, 2022,
          https://arxiv.org/abs/2205.14135

    Example:
        >>> query = torch.randn(2, 8, 100, 64, requires_grad=True)  # 2 texts, 8 heads, 100 queries
        >>> key, value = torch.randn(2, 2, 2, 120, 64)  # 2 heads, each for 4 heads of the query
        >>> bias = torch.zeros(8, 100, 120, requires_grad=True)  # one for both texts
        >>> output = torch_attn.sdpa(query, key, value, bias, enable_gqa=True)
        >>> output.sum().backward()
        >>> output.shape, bias.grad.shape
        (torch.Size([2, 8, 100, 64]), torch.Size([8, 100, 120]))
    """
    if not isinstance(dropout_p, float) or (scale is not None and not isinstance(scale, float)):
        _refuse_derivatives(scale=scale, dropout_p=dropout_p)
    output: Tensor = torch.ops.attn.sdpa(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return output


def sdpa_with_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`sdpa` with the matrices it goes through, to look at or to train on.

    Arguments, errors and the output are those of :func:`sdpa`. The two matrices are L x S by
    nature, so this takes memory O(L S). They are composed of PyTorch's own operators, so that every
    derivative comes from them.

    Returns:
        Three tensors, all differentiable:

        - output: ``[B..., Hq, L, Ev]``;
        - weights: ``[B..., Hq, L, S]``, after softmax and before dropout. A row sums to 1, or is 0
          if the query may attend to no key;
        - scores: ``[B..., Hq, L, S]``, scaled and masked, before softmax; ``-inf`` where masked.

    Example:
        >>> query, key, value = torch.randn(3, 4, 5, 8)  # 4 heads, 5 tokens
        >>> output, weights, _ = torch_attn.sdpa_with_weights(query, key, value, is_causal=True)
        >>> bool(torch.allclose(weights @ value, output, atol=1e-6))
        True
    """
    if not isinstance(dropout_p, float) or (scale is not None and not isinstance(scale, float)):
        _refuse_derivatives(scale=scale, dropout_p=dropout_p)
    results: tuple[Tensor, Tensor, Tensor] = torch.ops.attn.sdpa_with_weights(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return results


def _refuse_derivatives(**numbers: Any) -> None:
    for name, number in numbers.items():
        if not isinstance(number, Tensor):
            continue
        tangent = forward_ad.unpack_dual(number).tangent  # type: ignore[no-untyped-call]
        if number.requires_grad or tangent is not None:
            learn = "; to learn it, multiply the query by it and set it to 1"
            raise TypeError(
                f"attn::sdpa: {name} is a tensor that wants a derivative and would get none; "
                f"it must be a number{learn if name == 'scale' else ''}"
            )
