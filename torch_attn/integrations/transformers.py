"""`attn` as an attention implementation of Hugging Face transformers.

It goes where a model takes the name of one::

    from torch_attn.integrations import transformers
    model = AutoModel.from_pretrained(path, attn_implementation=transformers.register())

An implementation is two functions under one name: how to attend, and which mask to prepare for it
(https://huggingface.co/docs/transformers/attention_interface). Without the second, transformers
would silently hand out no mask at all.

Not every model asks for an implementation by its name; :func:`register` says which, and
:func:`calls` whether a model did.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import torch_attn
from torch_attn._import import import_of, install
from torch_attn.integrations import _calls

__all__ = ["attention_forward", "calls", "register"]

# What a model may ask of its attention that the operator does not do: saying so beats being wrong.
_UNSUPPORTED = {
    "block_indices": "keys that an indexer chooses (block_indices)",
    "cache": "a paged cache",
    "head_mask": "head_mask",
    "indices": "keys that an indexer chooses (indices)",
    "s_aux": "attention sinks (s_aux)",
    "sinks": "attention sinks",
    "softcap": "softcap",
}


def register(name: str = "attn") -> str:
    """Makes `attn` known to transformers as an attention implementation.

    Masks are prepared as for transformers' own "sdpa": boolean, and left out where causality or the
    absence of padding makes them superfluous. Models that do not support "sdpa" get those of
    "eager", which their own attention understands, too.

    Args:
        name: what to write in `attn_implementation=`. With "sdpa" it replaces the implementation
            that transformers chooses by itself.

    Models that ask for what the operator does not do raise ValueError at their first call; in
    transformers 5.23 among them

    - with a soft cap of the scores: Gemma 2, T5Gemma, VaultGemma and VideoPrism;
    - with attention sinks: DeepSeek-V4, GPT-OSS, Granite SWA, Inkling 2 and MiMo-V2-Flash;
    - with an indexer that chooses keys: DeepSeek-V3.2, GLM-MoE-DSA and MiniMax-M3-VL.

    Models that do not use transformers' AttentionInterface cannot be helped from here:

    - Some take any `attn_implementation` and go on with their own attention; in transformers 5.23
      about 80 families of 520, among them BigBird, BLIP, BLOOM, DeBERTa, Longformer, MPNet, MPT,
      RoFormer, Swin v2, WavLM, XGLM and XLNet. :func:`calls` then stays where it was, and
      `model.set_attn_implementation(name)` logs a warning.
    - Those that look it up in a table of their own raise KeyError: 'attn' when they are made with
      it: Bark, Data2VecVision, DeepSeek-OCR 2, DeepSeek-VL Hybrid, Falcon, GIT, GPT-J, GPT-Neo,
      SAM, SAM-HQ, SuperGlue and UnlimitedOCR. Make them without it.

    Returns:
        `name`.

    Raises:
        ImportError: transformers is not installed, is older than 5 or does not import; in the last
            case the message is that of the import that failed.
    """
    _register(name, attention_forward)
    return name


def _register(name: str, function: Callable[..., tuple[Tensor, Tensor | None]]) -> None:
    attention, masks = _interfaces()
    attention.register(name, function)
    masks.register(name, _mask_function())


def _interfaces() -> tuple[Any, Any]:
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


def calls() -> int:
    """How often models have called `attn` in this process: did it grow, the model uses it.

    A compiled model (`torch.compile`, `torch.export`) counts each of its layers when it is
    compiled, and not when it runs.
    """
    return _calls.calls("transformers")


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
        is_causal: overrides `module.is_causal`, which a decoder that supports "sdpa" need not have.
            Either counts only without a mask, which holds the causality otherwise, and for more
            than one query: a single one is the newest token.
        position_bias: broadcasts to `[B, H, L, S]`, added to the scaled scores.
        output_attentions: also return the weights, `[B, H, L, S]`, before dropout. A few models
            (GPT-2, GPTBigCode, OPT, SigLIP, StableLM) keep this argument to themselves: they return
            no weights with any implementation but "eager".
        kwargs: everything else that models pass along, such as `position_ids`.

    Returns:
        Output `[B, L, H, Ev]`, contiguous, and the weights or None.

    Raises:
        ValueError: the model asks for softcap, attention sinks, keys that an indexer chooses, a
            head mask or a paged cache.
    """
    meaning = _unsupported(kwargs)
    if meaning is not None:
        raise ValueError(
            f"{type(module).__name__} asks for {meaning}, which attn does not support; "
            'load the model with attn_implementation="eager"'
        )

    _calls.count("transformers")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
    if is_causal is None:
        # As in transformers' "sdpa". A model without it does not know of the attribute: what is
        # causal there has a mask.
        config = getattr(module, "config", None)
        is_causal = config is None or _supports_sdpa(type(config))
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
    # The operator keeps the strides of the query, in most models a view of [B, L, H, E]: no copy
    # here. Whisper and models that rotate a part of the query (GPT-NeoX, Phi) make it contiguous.
    return output.transpose(1, 2).contiguous(), weights


def _unsupported(arguments: dict[str, Any]) -> str | None:
    """What the arguments ask for that the operator does not do."""
    for argument, meaning in _UNSUPPORTED.items():
        if arguments.get(argument) is not None:
            return meaning
    return None


@contextlib.contextmanager
def calling_sdpa(model: nn.Module, name: str = "torch_attn.inspect") -> Iterator[None]:
    """For a while, models within `model` call the built-in attention or an operator of attn.

    Those that do already stay as they are; the others get our implementation, under a name that no
    other program has. Does nothing where transformers was not imported.
    """
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    pretrained = () if modeling is None else (modeling.PreTrainedModel,)
    models: list[Any] = [m for m in model.modules() if isinstance(m, pretrained)]
    configs = {id(config): config for m in models for config in _configs(m.config)}.values()
    before = [(config, config._attn_implementation) for config in configs]
    try:
        for part in models:  # from the outside to the inside: the first may switch the others
            now = part.config._attn_implementation
            if now != "sdpa" and _interfaces()[0]().get(now) not in (attention_forward, _inspected):
                _register(name, _inspected)
                part.set_attn_implementation(name)
        yield
    finally:
        for config, implementation in before:
            # The public attribute would set that of the configurations inside, too.
            config._attn_implementation_internal = implementation


def _configs(config: Any) -> Iterator[Any]:
    """A configuration and those inside of it."""
    yield config
    for name in getattr(config, "sub_configs", {}):
        inner = getattr(config, name, None)
        if inner is not None:
            yield from _configs(inner)


def _inspected(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """:func:`attention_forward` in a model that somebody looks into, who did not ask for it."""
    meaning = _unsupported(kwargs)
    if meaning is not None:
        raise ValueError(
            f"inspect: {type(module).__name__} asks for {meaning}, which attn does not compute; "
            "the attention of such a model cannot be inspected"
        )
    return attention_forward(module, *args, **kwargs)


def _mask_function() -> Callable[..., Tensor | None]:
    """What transformers calls for the mask of a forward pass."""
    masking = importlib.import_module("transformers.masking_utils")

    def mask_function(*args: Any, config: Any = None, **kwargs: Any) -> Tensor | None:
        # Gemma 4 drops queries before the layers that share their keys: without a mask, causality
        # would count the rest from the first key on.
        if getattr(config, "num_kv_shared_layers", 0):
            kwargs["allow_is_causal_skip"] = False
        # A model that goes on with its own attention adds the mask to its scores, so that it has to
        # be of 0 and large negative numbers. `attention_forward` takes either kind.
        make = masking.sdpa_mask if _supports_sdpa(type(config)) else masking.eager_mask
        mask: Tensor | None = make(*args, config=config, **kwargs)
        return mask

    return mask_function


# Called while a graph is traced, and no part of it.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _supports_sdpa(config: type) -> bool:
    return _models_support_sdpa(config)


@functools.cache
def _models_support_sdpa(config: type) -> bool:
    """Whether the models with such a configuration, as far as they are imported, all do."""
    found, classes = [], [importlib.import_module("transformers").PreTrainedModel]
    while classes:
        model = classes.pop()
        classes += model.__subclasses__()
        if model.config_class is config:
            found.append(bool(model._supports_sdpa))
    return bool(found) and all(found)


def _with_bias(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """One mask that stands for both."""
    if mask is None or bias is None:
        return bias if mask is None else mask
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, -math.inf)
    return mask + bias
