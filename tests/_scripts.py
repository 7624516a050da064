"""Functions that give the operators all arguments, for torch.jit.script to compile."""

from __future__ import annotations

import torch
from torch import Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float = 0.0,
    window_size: tuple[int, int] = (-1, -1),
    query_offset: Tensor | None = None,
    key_lengths: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.attn.attention(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        softcap=softcap,
        query_offset=query_offset,
        key_lengths=key_lengths,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        key_scale=key_scale,
        value_scale=value_scale,
        window_size=[window_size[0], window_size[1]],
    )


def sdpa_with_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float = 0.0,
    window_size: tuple[int, int] = (-1, -1),
    query_offset: Tensor | None = None,
    key_lengths: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.attn.sdpa_with_weights(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        softcap=softcap,
        query_offset=query_offset,
        key_lengths=key_lengths,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        key_scale=key_scale,
        value_scale=value_scale,
        window_size=[window_size[0], window_size[1]],
    )
