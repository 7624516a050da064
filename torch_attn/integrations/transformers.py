"""`attn` as an attention implementation of Hugging Face transformers.

:func:`register` returns a name. Pass the name as a model's `attn_implementation`::

    from torch_attn.integrations import transformers
    model = AutoModel.from_pretrained(path, attn_implementation=transformers.register())

An implementation is two functions under one name: one attends, the other prepares the mask
(https://huggingface.co/docs/transformers/attention_interface). Without the second function,
transformers would silently pass no mask at all.

Not every model asks for an implementation by its name. :func:`register` says which models do, and
:func:`calls` counts the calls of these models.
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

import torch_attn
from torch_attn._count import counter
from torch_attn._import import import_of, install
from torch_attn._programs.program import ScoreMod
from torch_attn.flex import attend, is_block_mask
from torch_attn.integrations._masks import (
    Pattern,
    Texts,
    mask_function,
    supports_sdpa,
    with_bias,
)

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from torch_attn.integrations._cache import EightBitCache
    from torch_attn.integrations._unpad import Unpadded

__all__ = ["attention_forward", "calls", "eight_bit_cache", "register", "unpad", "unregister"]

# The names that register() took from transformers, each with its implementation and mask function.
_taken: dict[str, tuple[Any, Any]] = {}

# Arguments that the operator does not support, and what they mean. A model that passes one gets an
# error, because an error is better than a wrong result.
_UNSUPPORTED = {
    "block_indices": "keys that an indexer chooses (block_indices)",
    "block_table": "keys in the pages of a cache (block_table)",
    "head_mask": "head_mask",
    "indices": "keys that an indexer chooses (indices)",
    "sinks": "an attention sink for every query (sinks)",
}


def register(name: str = "attn") -> str:
    """Makes `attn` known to transformers as an attention implementation.

    If a model asks only for causality, a sliding window or padding, no mask of L x S is made. The
    operator then gets the window and the position of the queries among the keys, and padding
    becomes a mask `[B, 1, 1, S]`. This holds for models whose layers all have full or sliding
    attention and use the AttentionInterface (`_supports_attention_backend`). Other models get
    boolean masks, as for transformers' own "sdpa". Models that do not support "sdpa" get the mask
    of "eager".

    Packed sequences have no mask either. `DataCollatorWithFlattening` packs sequences in training,
    and continuous batching (`generate_batch`) packs them in generation. Continuous batching accepts
    only the names of transformers' own implementations, so this function changes transformers'
    `ContinuousBatchingManager` to accept `name`.

    Args:
        name: what to write in `attn_implementation=`. With "sdpa", `attn` replaces the
            implementation that transformers chooses by itself, until :func:`unregister`. With
            "flex_attention", it replaces FlexAttention, which does not train on a CPU, has no
            dropout, and has no sinks on a CPU. A BlockMask that the caller passes to a model as
            `attention_mask` works under every name.

    Models that ask for something that the operator lacks raise ValueError at their first call.
    Examples in transformers 5.23 are models

    - with an indexer that chooses keys: DeepSeek-V3.2, GLM-MoE-DSA, HY-V4 and MiniMax-M3-VL;
    - with an attention sink for every query: Inkling 2.

    Models that do not use transformers' AttentionInterface do not use `attn`:

    - Some models accept any `attn_implementation` and keep their own attention. In transformers
      5.23 these are about 80 families of 520, among them BigBird, BLIP, BLOOM, DeBERTa, Longformer,
      MPNet, MPT, RoFormer, Swin v2, WavLM, XGLM and XLNet. For these models the number of
      :func:`calls` does not grow, and `model.set_attn_implementation(name)` logs a warning.
    - Other models look up the implementation in a table of their own, and raise KeyError: 'attn' if
      they are made with `attn_implementation="attn"`. Make these models without that argument:
      Bark, Data2VecVision, DeepSeek-OCR 2, DeepSeek-VL Hybrid, Falcon, GIT, GPT-J (until
      transformers 5.24), GPT-Neo, SAM, SAM-HQ, SuperGlue and UnlimitedOCR.

    Returns:
        `name`.

    Raises:
        ImportError: transformers is not installed, is older than 5 or does not import. In the last
            case the message names the error of the failed import.
    """
    attention, mask = (interface().get(name) for interface in _interfaces())
    if attention is not attention_forward and (attention or mask):
        _taken[name] = attention, mask
    _register(name, attention_forward)
    return name


def unregister(name: str) -> None:
    """Gives a name that :func:`register` took, such as "sdpa", back to transformers.

    Models attend with transformers' own implementation from their next call on.

    Args:
        name: the name that was passed to :func:`register`.

    Raises:
        ValueError: `attn` does not replace an implementation of that name.
    """
    if name not in _taken:
        taken = ", ".join(map(repr, _taken)) or "none"
        raise ValueError(f"name is {name!r}; register() took these from transformers: {taken}")
    for interface, function in zip(_interfaces(), _taken.pop(name), strict=True):
        if function is None:  # "eager" has a mask only; no public function removes a name
            del interface._global_mapping[name]
        else:
            interface.register(name, function)


def eight_bit_cache(model: Any, dtype: torch.dtype = torch.int8) -> EightBitCache:
    """Makes a cache for `model.generate` whose keys and values have 8 bits.

    Each new token's keys and values are rounded once, with a scale for each token and head
    (:func:`torch_attn.quantize_kv`). Attention reads the 8 bits, so a token moves about half the
    bytes of a bfloat16 cache. Beam search, assisted generation, `crop` and left padding work.

    Args:
        model: a decoder of transformers that uses our attention (:func:`register`). All layers must
            keep all keys. The attention modules must pass their keyword arguments to
            `cache.update`, as most decoders do from transformers 5.24 on, and must attend to what
            `cache.update` returns.
        dtype: :attr:`torch.int8` or :attr:`torch.float8_e4m3fn`.

    Returns:
        A :class:`transformers.Cache`. Pass the cache as `past_key_values` to one call of
        `model.generate`, or to the model itself. From transformers 5.24 on, the argument is also
        called `cache`.

    Raises:
        ValueError: `dtype` is neither int8 nor float8_e4m3fn; or the model has cross-attention; or
            a layer of the model needs a cache of another kind, such as a sliding window; or the
            model has attention that cannot be replaced. The first call of the model raises
            ValueError if the model uses another attention, does not pass its keyword arguments on,
            changes cached keys or values, is of float64, or is asked for attention weights or for
            gradients of keys and values.

    Example:
        ::

            name = torch_attn.integrations.transformers.register()
            model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=name)
            cache = torch_attn.integrations.transformers.eight_bit_cache(model)
            model.generate(**inputs, past_key_values=cache)
    """
    with import_of("transformers"):
        from torch_attn.integrations._cache import EightBitCache
    return EightBitCache(model, dtype)


def unpad(model: nn.Module) -> Unpadded:
    """Lets an encoder compute only the tokens that its mask of padding keeps, in all its layers.

    The output has the same shape as before, with zeros in place of padding (unless a norm with a
    bias follows the layers). A call without padding does not change. `docs/transformers.md` says
    more.

    Args:
        model: a model of transformers with `_can_record_outputs["hidden_states"]`, a
            :class:`torch.nn.TransformerEncoder` after :func:`torch_attn.convert`, or a module that
            holds such models. As long as `unpad` is on, a model of transformers must keep our
            attention.

    Returns:
        A handle for ``with``. Without ``with``, call its `remove()` at the end.

    Raises:
        ValueError: `unpad` does not support the model (a decoder, layerdrop), or does not support
            what a call with padding asks for (weights, a cache, a causal mask). `unpad` checks the
            model at once, and checks a call before its first layer computes.
        RuntimeError: attention did not get the arguments of the layers, the model did not end with
            its last layer, or a backward with checkpointing runs after `unpad` has ended.
    """
    from torch_attn.integrations._unpad import Unpadded

    return Unpadded(model)


def _register(name: str, function: Callable[..., tuple[Tensor, Tensor | None]]) -> None:
    attention, masks = _interfaces()
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
        if _interfaces()[0]().get(name) is not attention_forward:
            own(self, model, *args, **kwargs)

    setattr(manager, own.__name__, switch_to_cb_friendly_attn)


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


EIGHT_BITS = "torch_attn_eight_bits"  # the keyword argument that has what eight_bit_cache stores


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


_count = counter("transformers")


def is_ours(name: str) -> bool:
    """Whether the implementation of attention with that name is ours."""
    return _interfaces()[0]().get(name) in (attention_forward, _inspected)


def calls() -> int:
    """``torch_attn.calls()["transformers"]``, a number that grows when a model uses `attn`.

    The layers of a compiled model (`torch.compile`, `torch.export`) are counted when the model is
    compiled, but not when it runs.
    """
    return torch_attn.calls()["transformers"]


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
    meaning = _unsupported(kwargs)
    if meaning is not None:
        raise ValueError(
            f"{type(module).__name__} asks for {meaning}, which attn does not support; "
            'load the model with attn_implementation="eager"'
        )

    _count()
    if cache is not None:  # before 5.24, transformers left this to attention
        key, value = cache.update(key, value, module.layer_idx, kwargs)
        if is_causal:  # the mask that transformers made lacks the cached keys
            attention_mask = None
    texts = Texts.of_call(kwargs)
    if (plan := kwargs.get("torch_attn_plan")) is not None:  # unpad made it
        plan.attended += 1
    options: dict[str, Any]
    if is_block_mask(attention_mask):
        options = {"is_causal": False}
    elif isinstance(attention_mask, Pattern):
        texts = texts or attention_mask.texts
        options = attention_mask.options(module, query, key)
    else:
        if is_causal is None:
            is_causal = getattr(module, "is_causal", None)
        if is_causal is None:
            # Does the same as transformers' "sdpa": a module without `is_causal` is causal. The
            # modules of a model that does not support "sdpa" are an exception: they lack
            # `is_causal`, and the model passes a mask if it is causal.
            config = getattr(module, "config", None)
            is_causal = config is None or supports_sdpa(type(config))
        is_causal = bool(is_causal) and attention_mask is None
        options = {"attn_mask": attention_mask, "is_causal": is_causal}
        if texts is None:
            options["is_causal"] = is_causal and bool(query.size(2) > 1)
            if attention_mask is None and sliding_window and sliding_window < key.size(2):
                raise ValueError(
                    f"{type(module).__name__}: sliding_window is {sliding_window}, but there are "
                    f"{key.size(2)} keys and attention_mask is None; a mask must hide the others, "
                    "as the one that transformers makes for this implementation does"
                )
        elif attention_mask is None and sliding_window:
            options["window_size"] = (sliding_window - 1, 0 if is_causal else sliding_window - 1)
    options["dropout_p"] = dropout if module.training else 0.0
    options["scale"] = scaling
    options["enable_gqa"] = getattr(module, "num_key_value_groups", 1) > 1
    # softcap is passed even if it is 0, because torch.compile does not always treat a default as a
    # constant.
    options["softcap"] = float(softcap or 0.0)
    if s_aux is not None:
        # Models store s_aux in the dtype of their weights, which may not be query's dtype.
        fits = s_aux.dtype == torch.float32 and query.dtype != torch.float64
        options["sinks"] = s_aux if fits else s_aux.to(query.dtype)
    if (stored := kwargs.get(EIGHT_BITS)) is not None:
        options |= stored.scales(module, key, value, output_attentions)

    if is_block_mask(attention_mask):
        if texts is not None or output_attentions or stored is not None:
            what = "weights" if output_attentions else "packed sequences" if texts else "8 bits"
            raise ValueError(f"{type(module).__name__}: a BlockMask beside {what}; pass a tensor")
        if position_bias is not None:
            position_bias = position_bias.expand(*query.shape[:3], key.size(2))
        score_mod = _score_mod(options.pop("softcap"), position_bias)
        output = attend(query, key, value, score_mod, attention_mask, **options)[0]
        return output.transpose(1, 2).contiguous(), None
    if texts is not None:
        if position_bias is not None and position_bias.size(-1) != key.size(2):
            options["attn_mask"] = position_bias
            return texts.attend_padded(query, key, value, **options), None
        dense = output_attentions or position_bias is not None or _watching > 0
        if options["attn_mask"] is None and not dense:
            return texts.attend(query, key, value, **options), None
        options["attn_mask"] = texts.mask(query, key, options["attn_mask"])
    options["attn_mask"] = with_bias(options["attn_mask"], position_bias)
    weights = None
    if output_attentions:
        output, weights, _ = torch_attn.sdpa_with_weights(query, key, value, **options)
    else:
        output = torch_attn.sdpa(query, key, value, **options)
    # The output has the strides of the query. In most models the query is a view of [B, L, H, E],
    # so nothing is copied here. Whisper and models that rotate a part of the query (GPT-NeoX, Phi)
    # make the query contiguous, so the output is copied.
    return output.transpose(1, 2).contiguous(), weights


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
                _register(name, _inspected)
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
