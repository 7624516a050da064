"""The attention of models of transformers, and its place among transformers' implementations.

:mod:`torch_attn.integrations.transformers` is the public face. `_cache`, `_unpad` and
:func:`torch_attn.inspect` use this module.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torch_attn._count import counter
from torch_attn._import import import_of, install
from torch_attn._programs.program import ScoreMod
from torch_attn.flex import attend, is_block_mask
from torch_attn.functional import sdpa, sdpa_with_weights
from torch_attn.integrations._masks import (
    Pattern,
    attend_padded,
    mask_function,
    mask_of,
    sequences_of_call,
    supports_sdpa,
    with_bias,
)

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = [
    "EIGHT_BITS",
    "PLAN",
    "EightBits",
    "attention_forward",
    "calling_sdpa",
    "interfaces",
    "is_ours",
    "register_function",
]

# Keyword arguments of a call of attention.
EIGHT_BITS = "torch_attn_eight_bits"  # what eight_bit_cache stores
PLAN = "torch_attn_plan"  # which tokens unpad computes

# Arguments that the operator does not support, and what they mean. A model that passes one gets an
# error, because an error is better than a wrong result.
_UNSUPPORTED = {
    "block_indices": "keys that an indexer chooses (block_indices)",
    "block_table": "keys in the pages of a cache (block_table)",
    "head_mask": "head_mask",
    "indices": "keys that an indexer chooses (indices)",
    "sinks": "an attention sink for every query (sinks)",
}


_count = counter("transformers")


def register_function(name: str, function: Callable[..., tuple[Tensor, Tensor | None]]) -> None:
    """Makes a function of attention known to transformers, beside our function of masks."""
    attention, masks = interfaces()
    attention.register(name, function)
    masks.register(name, mask_function())
    _let_through_continuous_batching()


@functools.cache
def _let_through_continuous_batching() -> None:
    module: Any = importlib.import_module("transformers.generation")
    manager = getattr(module, "ContinuousBatchingManager", None)
    own: Any = getattr(manager, "switch_to_cb_friendly_attn", None)
    if own is None:
        return

    def switch_to_cb_friendly_attn(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        name = model.config._attn_implementation
        if interfaces()[0]().get(name) is not attention_forward:
            own(self, model, *args, **kwargs)

    setattr(manager, own.__name__, switch_to_cb_friendly_attn)


def interfaces() -> tuple[Any, Any]:
    """Returns transformers' tables of implementations: of attention, and of masks."""
    with import_of("transformers"):
        transformers: Any = importlib.import_module("transformers")
        attention = getattr(transformers, "AttentionInterface", None)
        masks = getattr(transformers, "AttentionMaskInterface", None)
    if attention is None or masks is None:
        raise ImportError(
            f"transformers {transformers.__version__} has no AttentionInterface with masks; "
            f"torch_attn needs transformers 5 or later: {install('transformers')}",
            name="transformers",
        )
    return attention, masks


def is_ours(name: str) -> bool:
    """Whether the implementation of attention with that name is ours."""
    return interfaces()[0]().get(name) in (attention_forward, _inspected)


@dataclass(frozen=True, eq=False)
class EightBits:
    """The keys and values of a layer of :func:`eight_bit_cache`, and their scales."""

    key: Tensor
    value: Tensor
    key_scale: Tensor
    value_scale: Tensor

    def scales(
        self, module: nn.Module, key: Tensor, value: Tensor, weights: bool
    ) -> dict[str, Tensor]:
        """Returns the scales, if the call of attention got the tensors that they belong to."""
        name = type(module).__name__
        if key is not self.key or value is not self.value:
            raise ValueError(
                f"eight_bit_cache: {name} changes cached keys or values before attention, so that "
                "the scales do not belong to them; use a cache of floats"
            )
        if weights:
            raise ValueError(
                f"eight_bit_cache: {name} asks for attention weights (output_attentions), which "
                "numbers of 8 bits do not have; use a cache of floats"
            )
        return {"key_scale": self.key_scale, "value_scale": self.value_scale}


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Pattern | BlockMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool = False,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function that transformers calls.

    Args:
        module: the calling attention module. This function reads the module's `training`,
            `is_causal` and `num_key_value_groups`.
        query: `[B, H, L, E]`.
        key: `[B, H / num_key_value_groups, S, E]`, not repeated for the heads of a group.
        value: `[B, H / num_key_value_groups, S, Ev]`.
        attention_mask: broadcasts to `[B, H, L, S]`; boolean (True attends) or floating (added). It
            may also be the pattern that the mask function of this implementation returns: a window,
            an offset, a mask of padding and the starts of packed sequences; or a BlockMask of
            FlexAttention. With a pattern or a BlockMask, `is_causal` is ignored.
        dropout: probability, applied only while `module.training`.
        scaling: the factor of the scores, 1 / sqrt(E) if None.
        is_causal: overrides `module.is_causal`. If both are missing, a model that supports "sdpa"
            is causal. With a mask both are ignored, because the mask contains the causality. For a
            single query both are ignored, because the query is the newest token.
        position_bias: broadcasts to `[B, H, L, S]`, added to the scaled scores.
        output_attentions: also return the weights, `[B, H, L, S]`, before dropout. A few models
            (GPT-2, GPTBigCode, OPT, SigLIP, StableLM) do not pass this argument on, so they return
            weights with "eager" only.
        softcap: bounds the scaled scores, before a mask is added (Gemma 2).
        s_aux: `[H]`, one more logit in the softmax of each head, without a value (gpt-oss).
        sliding_window: how many keys a query sees, including its own. It is used for packed
            sequences without a mask. A mask contains the window. Without packed sequences and
            without a mask, the window must reach all keys.
        cache: the cache of continuous batching, to which key and value are appended.
        kwargs: `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and `max_length_k`, which say where
            packed sequences begin, and all else that models pass, such as `position_ids`.

    Returns:
        Output `[B, L, H, Ev]`, contiguous, and the weights or None.

    Raises:
        ValueError: the model asks for keys that an indexer chooses, a sink for every query, a head
            mask, a block table or an option of the operator that is not an argument here; the model
            passes only some of the arguments for packed sequences; the model has a window, but no
            mask hides the keys outside the window; or the mask was made for another number of
            queries or keys.
    """
    _refuse_unsupported(module, kwargs)
    _count()
    if cache is not None:  # before 5.24, transformers left this to attention
        key, value = cache.update(key, value, module.layer_idx, kwargs)
        if is_causal:  # the mask that transformers made lacks the cached keys
            attention_mask = None
    sequences = sequences_of_call(kwargs)
    if (plan := kwargs.get(PLAN)) is not None:  # unpad made it
        plan.attended += 1
    options: dict[str, Any]
    if is_block_mask(attention_mask):
        options = {"is_causal": False}
    elif isinstance(attention_mask, Pattern):
        sequences = sequences or attention_mask.sequences
        options = attention_mask.options(module, query, key)
    else:
        is_packed = sequences is not None
        options = _options_of_mask(
            module, query, key, attention_mask, is_causal, sliding_window, is_packed
        )
    options["dropout_p"] = dropout if module.training else 0.0
    options["scale"] = scaling
    options["enable_gqa"] = getattr(module, "num_key_value_groups", 1) > 1
    # softcap is passed even if it is 0, because torch.compile does not always treat a default as a
    # constant.
    options["softcap"] = float(softcap or 0.0)
    if s_aux is not None:
        options["sinks"] = _sinks(s_aux, query)
    if (stored := kwargs.get(EIGHT_BITS)) is not None:
        options |= stored.scales(module, key, value, output_attentions)

    if is_block_mask(attention_mask):
        if sequences is not None or output_attentions or stored is not None:
            beside = "packed sequences" if sequences else "8 bits"
            what = "weights" if output_attentions else beside
            raise ValueError(f"{type(module).__name__}: a BlockMask beside {what}; pass a tensor")
        return _attend_blocks(query, key, value, attention_mask, position_bias, options), None
    if sequences is not None:
        if position_bias is not None and position_bias.size(-1) != key.size(2):
            options["attn_mask"] = position_bias
            return attend_padded(sequences, query, key, value, **options), None
        dense = output_attentions or position_bias is not None or _watching > 0
        if options["attn_mask"] is None and not dense:
            del options["attn_mask"]
            options.pop("query_offset", None)  # cu_seq_k implies it
            return sequences.attend(query, key, value, **options), None
        options["attn_mask"] = mask_of(sequences, query, key, options["attn_mask"])
    options["attn_mask"] = with_bias(options["attn_mask"], position_bias)
    weights = None
    if output_attentions:
        output, weights, _ = sdpa_with_weights(query, key, value, **options)
    else:
        output = sdpa(query, key, value, **options)
    # The output has the strides of the query. In most models the query is a view of [B, L, H, E],
    # so nothing is copied here. Whisper and models that rotate a part of the query (GPT-NeoX, Phi)
    # make the query contiguous, so the output is copied.
    return output.transpose(1, 2).contiguous(), weights


def _refuse_unsupported(module: nn.Module, arguments: dict[str, Any]) -> None:
    meaning = _unsupported(arguments)
    if meaning is not None:
        raise ValueError(
            f"{type(module).__name__} asks for {meaning}, which attn does not support; "
            'load the model with attn_implementation="eager"'
        )


def _options_of_mask(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool | None,
    sliding_window: int | None,
    is_packed: bool,
) -> dict[str, Any]:
    """Returns a mask that is a tensor or None, causality and the window, as options of `sdpa`."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
    if is_causal is None:
        # Does the same as transformers' "sdpa": a module without `is_causal` is causal. The
        # modules of a model that does not support "sdpa" are an exception: they lack
        # `is_causal`, and the model passes a mask if it is causal.
        config = getattr(module, "config", None)
        is_causal = config is None or supports_sdpa(type(config))
    is_causal = bool(is_causal) and attention_mask is None
    options: dict[str, Any] = {"attn_mask": attention_mask, "is_causal": is_causal}
    if not is_packed:
        options["is_causal"] = is_causal and bool(query.size(2) > 1)
        if attention_mask is None and sliding_window and sliding_window < key.size(2):
            raise ValueError(
                f"{type(module).__name__}: sliding_window is {sliding_window}, but there are "
                f"{key.size(2)} keys and attention_mask is None; a mask must hide the others, "
                "as the one that transformers makes for this implementation does"
            )
    elif attention_mask is None and sliding_window:
        options["window_size"] = (sliding_window - 1, 0 if is_causal else sliding_window - 1)
    return options


def _sinks(s_aux: Tensor, query: Tensor) -> Tensor:
    """Models store s_aux in the dtype of their weights, which may not be query's dtype."""
    fits = s_aux.dtype == torch.float32 and query.dtype != torch.float64
    return s_aux if fits else s_aux.to(query.dtype)


def _attend_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: BlockMask,
    position_bias: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Attends under a BlockMask. Returns `[B, L, H, Ev]`."""
    if position_bias is not None:
        position_bias = position_bias.expand(*query.shape[:3], key.size(2))
    score_mod = _score_mod(options.pop("softcap"), position_bias)
    output = attend(query, key, value, score_mod, block_mask, **options)[0]
    return output.transpose(1, 2).contiguous()


def _score_mod(softcap: float, position_bias: Tensor | None) -> ScoreMod | None:
    """The score_mod that does what these arguments of a model ask for; None if they are absent."""

    def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        if position_bias is not None:
            score = score + position_bias[b, h, i, j]
        return score

    return capped if softcap or position_bias is not None else None


# The arguments that `attention_forward` refuses. These include the operator's own options, because
# transformers lacks such options or has other names for them.
_REFUSED = {
    option.name: option.name
    for option in torch.ops.attn.attention.default._schema.arguments
    if option.name not in inspect.signature(attention_forward).parameters
} | _UNSUPPORTED


def _unsupported(arguments: dict[str, Any]) -> str | None:
    """Describes the first given argument that :func:`attention_forward` does not support."""
    asked = (_REFUSED[name] for name in _REFUSED if arguments.get(name) is not None)
    return next(asked, None)


_watching = 0  # how many blocks of calling_sdpa are open


@contextlib.contextmanager
def calling_sdpa(model: nn.Module, name: str = "torch_attn.inspect") -> Iterator[None]:
    """Within the block, all transformers models inside `model` attend with "sdpa" or `attn`.

    A model that already uses "sdpa" or `attn` does not change. Any other model gets our
    implementation, under a private name. Does nothing if transformers was not imported.
    """
    global _watching
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    pretrained = () if modeling is None else (modeling.PreTrainedModel,)
    models: list[Any] = [m for m in model.modules() if isinstance(m, pretrained)]
    configs = {id(config): config for m in models for config in _configs(m.config)}.values()
    before = [(config, config._attn_implementation) for config in configs]
    _watching += 1
    try:
        for part in models:  # outermost first, because a model may switch the models inside it
            now = part.config._attn_implementation
            if now != "sdpa" and not is_ours(now):
                register_function(name, _inspected)
                part.set_attn_implementation(name)
        yield
    finally:
        _watching -= 1
        for config, implementation in before:
            # Setting the public attribute would change the configurations inside, too.
            config._attn_implementation_internal = implementation


def _configs(config: Any) -> Iterator[Any]:
    """Yields a configuration and the configurations inside it."""
    yield config
    for name in getattr(config, "sub_configs", {}):
        inner = getattr(config, name, None)
        if inner is not None:
            yield from _configs(inner)


def _inspected(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """:func:`attention_forward` for `inspect`, in a model that was made with another attention."""
    meaning = _unsupported(kwargs)
    if meaning is not None:
        raise ValueError(
            f"inspect: {type(module).__name__} asks for {meaning}, which attn does not compute; "
            "the attention of such a model cannot be inspected"
        )
    return attention_forward(module, *args, **kwargs)
