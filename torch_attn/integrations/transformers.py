"""`attn` as an attention implementation of Hugging Face transformers.

    from torch_attn.integrations import transformers
    model = AutoModel.from_pretrained(path, attn_implementation=transformers.register())

An implementation is two functions under one name: how to attend, and which mask to prepare for it
(https://huggingface.co/docs/transformers/attention_interface). Without the second, transformers
would silently hand out no mask at all.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch
from torch import Tensor, nn

import torch_attn

__all__ = ["attention_forward", "register"]

# What a model may ask of its attention that the operator does not do: saying so beats being wrong.
_UNSUPPORTED = {
    "cache": "a paged cache",
    "head_mask": "head_mask",
    "s_aux": "attention sinks (s_aux)",
    "sinks": "attention sinks",
    "softcap": "softcap",
}


def register(name: str = "attn") -> str:
    """Makes `attn` known to transformers as an attention implementation.

    Masks are prepared as for transformers' own "sdpa": boolean, and left out where causality or the
    absence of padding makes them superfluous.

    Args:
        name: what to write in `attn_implementation=`. With "sdpa" it replaces the implementation
            that transformers chooses by itself.

    Returns:
        `name`.

    Raises:
        ImportError: transformers is not installed or has no attention interface.
    """
    try:
        transformers = importlib.import_module("transformers")
        attention, masks = transformers.AttentionInterface, transformers.AttentionMaskInterface
    except (ImportError, AttributeError) as error:
        raise ImportError(
            "torch_attn.integrations.transformers needs a transformers that has an "
            "AttentionMaskInterface: pip install 'torch-attn[transformers]'"
        ) from error
    attention.register(name, attention_forward)
    masks.register(name, masks()["sdpa"])
    return name


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls in place of its own attention functions.

    Args:
        module: the attention module that calls; its `training`, `is_causal` and
            `num_key_value_groups` are read.
        query: `[B, H, L, E]`.
        key: `[B, H / num_key_value_groups, S, E]`, neither repeated nor expanded for its group.
        value: `[B, H / num_key_value_groups, S, Ev]`.
        attention_mask: broadcasts to `[B, H, L, S]`; boolean (True attends) or floating (added).
        dropout: probability, applied only while `module.training`.
        scaling: the factor of the scores, 1 / sqrt(E) if None.
        is_causal: overrides `module.is_causal`. Either counts only without a mask, which holds the
            causality otherwise, and for more than one query: a single one is the newest token.
        position_bias: broadcasts to `[B, H, L, S]`, added to the scaled scores.
        output_attentions: also return the weights, `[B, H, L, S]`, before dropout. A few models
            (GPT-2) keep this argument to themselves: they return no weights with any
            implementation but "eager".
        kwargs: everything else that models pass along, such as `position_ids`.

    Returns:
        Output `[B, L, H, Ev]`, contiguous, and the weights or None.

    Raises:
        ValueError: the model asks for softcap, attention sinks, a head mask or a paged cache.
    """
    for argument, meaning in _UNSUPPORTED.items():
        if kwargs.get(argument) is not None:
            raise ValueError(
                f"{type(module).__name__} asks for {meaning}, which attn does not support; "
                'load the model with attn_implementation="eager"'
            )

    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    is_causal = bool(is_causal) and attention_mask is None and bool(query.size(2) > 1)
    mask = _with_bias(attention_mask, position_bias)
    dropout_p = dropout if module.training else 0.0
    gqa = getattr(module, "num_key_value_groups", 1) > 1

    weights = None
    if output_attentions:
        output, weights, _ = torch_attn.sdpa_with_weights(
            query, key, value, mask, dropout_p, is_causal, scale=scaling, enable_gqa=gqa
        )
    else:
        output = torch_attn.sdpa(
            query, key, value, mask, dropout_p, is_causal, scale=scaling, enable_gqa=gqa
        )
    # The operator keeps the strides of the query, in models a view of [B, L, H, E]: no copy here.
    return output.transpose(1, 2).contiguous(), weights


def _with_bias(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """One mask that stands for both."""
    if mask is None or bias is None:
        return bias if mask is None else mask
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, -math.inf)
    return mask + bias
