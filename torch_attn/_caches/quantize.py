"""Rounds keys and values to 8 bits, for caches."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["quantize_kv"]

# For each dtype, the largest absolute number that quantize_kv stores. So int8's -128 is not used.
MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantize_kv(x: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Rounds each row of keys or values to 8 bits, with a scale of its own.

    A row is the E numbers of one token in one head. Its scale is its largest absolute number,
    divided by 127 (int8) or 448 (float8_e4m3fn). ``stored * scale[..., None]`` is near `x`: with
    int8 it differs by at most half of a scale. With float8_e4m3fn it differs by at most 1/16 of
    each number, or by 2^-10 of a scale where that is more.

    :func:`torch_attn.sdpa`, :func:`torch_attn.sdpa_with_logsumexp` and
    :func:`torch_attn.varlen_attn` take `stored` as key or value, and `scale` as `key_scale` or
    `value_scale`. These functions also take other scales. A scale for each channel needs no
    argument: multiply query by the scales of key's channels, and the output by the scales of
    value's channels.

    Args:
        x: ``[..., E]``, floating.
        dtype: :attr:`torch.int8` or :attr:`torch.float8_e4m3fn`.

    Returns:
        Two tensors:

        - stored: ``[..., E]`` of `dtype`, rounded to nearest, ties to even;
        - scale: ``[...]``, float32. A row of zeros, and a row whose scale would be below the
          smallest normal float32, has the scale 0 and is stored as 0. A row with a NaN or an
          infinity has the scale NaN on a GPU and inside :func:`torch.compile`.

    Raises:
        ValueError: `dtype` is another dtype; `x` is not floating; or, on a CPU outside of
            :func:`torch.compile`, `x` has a NaN or an infinity.

    Example:
        >>> key, value = torch.randn(2, 1, 8, 100, 64)  # 8 heads, 100 tokens
        >>> (key, key_scale), (value, value_scale) = map(torch_attn.quantize_kv, (key, value))
        >>> query = torch.randn(1, 8, 1, 64)
        >>> output = torch_attn.sdpa(
        ...     query, key, value, key_scale=key_scale, value_scale=value_scale
        ... )
        >>> key.dtype, key_scale.shape, output.dtype
        (torch.int8, torch.Size([1, 8, 100]), torch.float32)
    """
    if dtype not in MOST:
        raise ValueError(f"quantize_kv: dtype is {dtype}; it must be {' or '.join(map(str, MOST))}")
    if not x.is_floating_point():
        raise ValueError(f"quantize_kv: x has dtype {x.dtype}; it must be floating")
    x = x.detach().float()
    largest = x.abs().amax(-1) if x.shape[-1] > 0 else x.new_zeros(x.shape[:-1])
    if x.is_cpu and not torch.compiler.is_compiling() and not largest.isfinite().all():
        at = (~largest.isfinite()).nonzero()[0].tolist()
        raise ValueError(f"quantize_kv: x has a NaN or an infinity in row {at}; it must be finite")
    scale = largest / MOST[dtype]
    scale = scale.masked_fill(scale < torch.finfo(torch.float32).tiny, 0)
    numbers = x / scale.masked_fill(scale == 0, torch.inf)[..., None]
    if dtype == torch.int8:
        numbers = numbers.round()
    numbers = numbers.nan_to_num(0).clamp(-MOST[dtype], MOST[dtype])
    return numbers.to(dtype), scale.masked_fill(~largest.isfinite(), torch.nan)
