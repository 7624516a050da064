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
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

import torch_attn
from torch_attn._count import counter
from torch_attn._import import import_of, install
from torch_attn.distributed import _context as context

if TYPE_CHECKING:
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
            implementation that transformers chooses by itself, until :func:`unregister`.

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
    masks.register(name, _mask_function())
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
    attention_mask: Tensor | _Pattern | None,
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
            an offset, a mask of padding and the starts of packed sequences. With a pattern,
            `is_causal` is ignored.
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
    texts = _Texts.of_call(kwargs)
    if (plan := kwargs.get("torch_attn_plan")) is not None:  # unpad made it
        plan.attended += 1
    if isinstance(attention_mask, _Pattern):
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
            is_causal = config is None or _supports_sdpa(type(config))
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

    if texts is not None:
        if position_bias is not None and position_bias.size(-1) != key.size(2):
            options["attn_mask"] = position_bias
            return texts.attend_padded(query, key, value, **options), None
        dense = output_attentions or position_bias is not None or _watching > 0
        if options["attn_mask"] is None and not dense:
            return texts.attend(query, key, value, **options), None
        options["attn_mask"] = texts.mask(query, key, options["attn_mask"])
    options["attn_mask"] = _with_bias(options["attn_mask"], position_bias)
    weights = None
    if output_attentions:
        output, weights, _ = torch_attn.sdpa_with_weights(query, key, value, **options)
    else:
        output = torch_attn.sdpa(query, key, value, **options)
    # The output has the strides of the query. In most models the query is a view of [B, L, H, E],
    # so nothing is copied here. Whisper and models that rotate a part of the query (GPT-NeoX, Phi)
    # make the query contiguous, so the output is copied.
    return output.transpose(1, 2).contiguous(), weights


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


def _mask_function() -> Callable[..., Tensor | _Pattern | None]:
    """Returns the function that transformers calls to make the mask of a forward."""
    masking = importlib.import_module("transformers.masking_utils")

    def mask_function(*args: Any, config: Any = None, **kwargs: Any) -> Tensor | _Pattern | None:
        given = kwargs.get("attention_mask")
        if isinstance(given, _Pattern):  # made for `generate`; the model asks for the mask again
            return given
        # The last layers of Gemma 4 use the keys of earlier layers again, and Gemma 4 drops queries
        # before these layers. Without a mask, causality would put the first remaining query at the
        # position of the first key.
        if getattr(config, "num_kv_shared_layers", 0):
            kwargs["allow_is_causal_skip"] = False
        packed = _packed(masking, config, kwargs.get("mask_function"))
        if packed is not None:
            function, texts = packed
            alone = {**kwargs, "mask_function": function, "allow_is_causal_skip": True}
            window = _window(masking, config, **alone)
            if window is not None:
                pattern = _pattern(masking, *window, **alone)
                assert isinstance(pattern, _Pattern)  # packed sequences have several tokens
                # Over several processes, two pieces of one sequence look like two sequences.
                return replace(pattern, texts=None if context.is_on() else texts)
        window = _window(masking, config, **kwargs)
        if window is not None:
            return _pattern(masking, *window, **kwargs)
        # A model that does not support "sdpa" may add the mask to its scores by itself, so it gets
        # a floating mask. `attention_forward` takes boolean and floating masks.
        make = masking.sdpa_mask if _supports_sdpa(type(config)) else masking.eager_mask
        mask: Tensor | None = make(*args, config=config, **kwargs)
        return mask

    return mask_function


# --- patterns that need no mask -------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Pattern:
    """Says which keys each query sees, as options of :func:`torch_attn.sdpa`.

    :func:`attention_forward` gets a pattern as its mask. Query i sees key j if
    ``-left <= j - i - offset <= right`` and key j is no padding.

    A pattern is not a tensor. So a model that computes with its mask raises an error. In a graph,
    `left` is a constant, because it comes from the model's window. `offset` is a tensor, because it
    differs between calls.
    """

    left: int  # -1 is all
    right: int  # 0 is causal
    offset: Tensor | None  # 0-d, int64: the position of query 0 among the keys; None is 0
    padding: Tensor | None  # [B, 1, 1, S], boolean, True attends
    shape: tuple[int, int, int, int]  # [B, 1, L, S], of the mask that it replaces
    texts: _Texts | None = None  # packed sequences, which do not see each other
    ndim: ClassVar[int] = 4

    def options(self, module: nn.Module, query: Tensor, key: Tensor) -> dict[str, Any]:
        """Returns the pattern as arguments of :func:`torch_attn.sdpa`."""
        if query.size(2) != self.shape[2] or key.size(2) != self.shape[3]:
            raise ValueError(
                f"{type(module).__name__} attends with {query.size(2)} queries to {key.size(2)} "
                f"keys, but its mask was made for {self.shape[2]} queries and {self.shape[3]} "
                'keys; load the model with attn_implementation="eager"'
            )
        options: dict[str, Any] = {"attn_mask": self.padding, "is_causal": self.left < 0}
        if self.left >= 0:
            options["window_size"] = (self.left, self.right)
        if self.offset is not None:
            options["query_offset"] = self.offset
        return options

    def to(self, *args: Any, **kwargs: Any) -> _Pattern:
        """Moves the pattern to another device. accelerate calls `to` on a layer's arguments."""
        offset = None if self.offset is None else self.offset.to(*args, **kwargs)
        padding = None if self.padding is None else self.padding.to(*args, **kwargs)
        texts = None if self.texts is None else self.texts.to(*args, **kwargs)
        return replace(self, offset=offset, padding=padding, texts=texts)

    def contiguous(self) -> _Pattern:
        """Returns the pattern itself. `generate` makes every mask contiguous."""
        return self


def _window(
    masking: Any,
    config: Any,
    mask_function: Any = None,
    allow_is_causal_skip: bool = False,
    allow_is_bidirectional_skip: bool = False,
    local_size: int | None = None,
    **kwargs: Any,
) -> tuple[int, int] | None:
    """Returns how many keys a query sees before and after the key at its own position.

    -1 stands for all keys. Returns None if the mask has another pattern. A mask without a window
    and without causality says only which keys are padding, so `[B, 1, 1, S]` suffices for it.
    """
    # transformers sets the arguments `allow_..._skip` to False if a mask must be made: for other
    # patterns (parts of images, packed sequences), for models that compute with the mask, and for a
    # single query in a static cache, whose mask has only one row. Releases without `q_offset` do
    # not say where the queries begin.
    both = allow_is_bidirectional_skip and not context.is_on()
    if not (both or allow_is_causal_skip) or "q_offset" not in kwargs:
        return None
    if both and local_size is None and _supports_sdpa(type(config)):
        return (-1, -1) if mask_function is masking.bidirectional_mask_function else None
    if not _hands_on(config):
        return None
    if local_size is None:
        return (-1, 0) if mask_function is masking.causal_mask_function else None
    kind = "bidirectional" if both else "causal"
    sliding = getattr(masking, f"sliding_window_{kind}_mask_function")(local_size)
    if torch.compiler.is_dynamo_compiling():
        # Compares the code alone, because Dynamo cannot tell which functions `mask_function` closes
        # over. The mask function of chunked attention has the same code, but its configuration has
        # a chunk size. No other mask function of transformers' own models has this code.
        found = (
            mask_function.__code__ is sliding.__code__
            and local_size == getattr(config, "sliding_window", None)
            and getattr(config, "attention_chunk_size", None) is None
            and type(config).__module__.startswith("transformers.")
        )
    else:
        found = _alike(mask_function, sliding)
    window = (local_size, local_size) if both else (local_size - 1, 0)
    return window if found else None


def _alike(a: Any, b: Any) -> bool:
    """Whether two functions have the same code and close over the same functions and numbers."""
    if isinstance(a, FunctionType) and isinstance(b, FunctionType):
        cells = [tuple(c.cell_contents for c in f.__closure__ or ()) for f in (a, b)]
        return a.__code__ is b.__code__ and _alike(*cells)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_alike, a, b))
    return isinstance(a, int) and isinstance(b, int) and a == b


def _pattern(
    masking: Any,
    left: int,
    right: int,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> _Pattern | Tensor | None:
    """Makes the pattern: a window or causality, an offset, and padding if there is any.

    If every query sees all keys that are not padding, returns only the mask of padding, or None if
    there is no padding.
    """
    # A static cache changes the tensor q_offset in place before layers attend, so `offset` must be
    # a new tensor.
    offset = q_offset - kv_offset
    padding: Tensor | None = masking.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + kv_length]
        # The empty part of a static cache does not count, because no query sees it.
        all_seen = right != 0 or isinstance(offset, Tensor)
        seen = padding if all_seen else padding[:, : offset + q_length]
        # While a graph is traced, the numbers of `padding` cannot be read.
        needless = not masking.is_tracing(padding) and bool(seen.all())
        padding = None if needless else padding[:, None, None, :]
    if right < 0 or 0 < right >= kv_length - 1:  # every query sees all keys
        return padding
    start: Tensor | None = None
    if isinstance(offset, Tensor):
        start = offset
    elif context.is_on():  # the first and the last key may be on another process
        if attention_mask is not None and padding is None:  # other processes may have padding
            padding = torch.ones(1, 1, 1, kv_length, dtype=torch.bool, device=device)
    else:
        if offset + q_length <= left + 1:  # the window reaches to the first key
            left = -1
        if left < 0 and q_length == 1 and offset + 1 == kv_length:  # the newest token sees all
            return padding
        if offset != 0:
            start = torch.full([], offset, dtype=torch.int64, device=device)
    return _Pattern(left, right, start, padding, (batch_size, 1, q_length, kv_length))


# --- packed texts ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Texts:
    """Packed sequences, which do not see each other, one after the other in `[B, T]` tokens.

    If there are more keys than queries, the last query of a sequence is at the sequence's last key.
    """

    cu_seq_q: Tensor  # [N + 1], integers
    cu_seq_k: Tensor
    max_q: int
    max_k: int

    @classmethod
    def of_call(cls, kwargs: dict[str, Any]) -> _Texts | None:
        """Takes the starts of packed sequences from the arguments of a call, or returns None.

        transformers passes the same arguments to its flash attention.
        """
        names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
        missing = [name for name in names if kwargs.get(name) is None]
        if len(missing) == len(names):
            return None
        if missing:
            raise ValueError(
                f"{', '.join(missing)} missing: packed sequences need {', '.join(names)}, "
                "all of them or none"
            )
        cu_seq_q, cu_seq_k, *most = (kwargs[name] for name in names)
        max_q, max_k = (int(n) if isinstance(n, Tensor) else n for n in most)
        return cls(cu_seq_q, cu_seq_k, max_q, max_k)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: None,
        is_causal: bool,
        window_size: tuple[int, int] = (-1, -1),
        query_offset: Tensor | None = None,  # not used: `cu_seq_k` implies it
        **options: Any,
    ) -> Tensor:
        """Output `[B, L, H, Ev]`."""
        if is_causal:
            window_size = (window_size[0], 0)
        B, _, L, _ = query.shape
        query, key, value = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
        places = self.cu_seq_q, self.cu_seq_k, self.max_q, self.max_k
        output: Any = torch_attn.varlen_attn(
            query, key, value, *places, window_size=window_size, **options
        )
        return output.view(B, L, *output.shape[1:]).contiguous()  # type: ignore[no-any-return]

    def attend_padded(self, *tensors: Tensor, attn_mask: Tensor, **options: Any) -> Tensor:
        """Returns self-attention in each text, `[1, T, H, Ev]`; the mask is `[1, H, max, max]`."""
        token = torch.arange(tensors[0].size(2), device=self.cu_seq_k.device)
        text = torch.searchsorted(self.cu_seq_k, token, right=True) - 1
        place = text * self.max_k + token - self.cu_seq_k[text]
        x = torch.cat(tensors).transpose(1, 2)  # [3, T, H, E]
        size = (self.cu_seq_k.numel() - 1, self.max_k)
        padded = x.new_zeros(3, size[0] * size[1], *x.shape[2:]).index_copy(1, place, x)
        q, k, v = torch.unflatten(padded, 1, size).transpose(2, 3)
        output = torch_attn.sdpa(q, k, v, attn_mask, key_lengths=self.cu_seq_k.diff(), **options)
        return output.transpose(1, 2).flatten(0, 1).index_select(0, place)[None]

    def mask(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        """Makes a mask `[B, 1, L, S]` that hides other sequences too.

        Only calls that need memory of L x S for another reason use this mask. Tokens after the last
        sequence see no keys, as in :meth:`attend`.
        """
        of_query, of_key = (
            torch.searchsorted(cu_seq, torch.arange(B * n, device=cu_seq.device), right=True)
            .view(B, 1, n)
            .to(query.device)
            for cu_seq, (B, _, n, _) in ((self.cu_seq_q, query.shape), (self.cu_seq_k, key.shape))
        )
        of_query = of_query.masked_fill(of_query == self.cu_seq_q.numel(), -1)
        same = of_query[..., None] == of_key[..., None, :]
        if mask is None or mask.dtype == torch.bool:
            return same if mask is None else mask & same
        return torch.where(same, mask, -math.inf)

    def to(self, *args: Any, **kwargs: Any) -> _Texts:
        q, k = (t.to(*args, **kwargs) for t in (self.cu_seq_q, self.cu_seq_k))
        return replace(self, cu_seq_q=q, cu_seq_k=k)


def _packed(masking: Any, config: Any, function: Any) -> tuple[Any, _Texts] | None:
    """Returns the mask function that each packed sequence has on its own, and the sequences.

    Returns None if sequences are not packed, or if the call needs a mask of L x S.
    """
    if torch.compiler.is_dynamo_compiling() or not isinstance(function, FunctionType):
        return None
    parts = _around(function).get("mask_functions", ())
    around = {name: x for part in parts for name, x in _around(part).items()}
    if "packed_sequence_mask" not in around:
        return None
    number, alone = around["packed_sequence_mask"], around.get("mask_function")
    names = {"packed_sequence_mask", "mask_function", "position_ids"}
    if is_known := set(around) == names and len(parts) == 2:
        own = (
            masking.packed_sequence_mask_function(number),
            masking.remap_positions_for_packed_sequence(alone, around["position_ids"]),
        )
        known = masking.and_masks(*own), *own
        is_known = {f.__code__ for f in (function, *parts)} == {f.__code__ for f in known}
    if not is_known:
        warnings.warn(
            "attn: this release of transformers describes packed sequences in an unknown way; "
            "they get a mask of L x S",
            stacklevel=2,
        )
        return None
    if masking.is_tracing(number):
        return None
    kind: type = type(config)
    if getattr(config, "num_kv_shared_layers", 0) or _computes_with_masks(kind):
        return None
    begins = torch.cat([torch.ones_like(number[:, :1]), number.diff()], 1).flatten()
    cu_seq = nn.functional.pad(begins.nonzero().flatten(), (0, 1), value=begins.numel())
    longest = int(cu_seq.diff().max())
    return alone, _Texts(cu_seq, cu_seq, longest, longest)


def _around(function: FunctionType) -> dict[str, Any]:
    """The variables that a function closes over, by name."""
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    return dict(zip(function.__code__.co_freevars, cells, strict=True))


# --- models ---------------------------------------------------------------------------------------


def _hands_on(config: Any) -> bool:
    """Whether models with this configuration give every mask to `attention_forward`, unchanged."""
    # Some layers of other kinds change the mask, and some need a mask of their own.
    kinds = set(getattr(config, "layer_types", None) or ())
    return kinds <= {"full_attention", "sliding_attention"} and _interfaced(type(config))


# torch.compile calls these two functions while it traces a graph, but does not trace into them.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _supports_sdpa(config: type) -> bool:
    return _all_models(config, "_supports_sdpa")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _interfaced(config: type) -> bool:
    # Authors set this attribute if all attention of a model uses the AttentionInterface.
    return _all_models(config, "_supports_attention_backend")


@functools.cache
def _computes_with_masks(config: type) -> bool:
    """Whether some model with this configuration always needs a mask.

    The source code of such a model mentions the argument `allow_is_causal_skip`. The value of this
    argument does not show which models need a mask, because with packed sequences the value is
    False for all models.
    """
    modules = {model.__module__ for model in _models(config)}
    try:
        sources = [inspect.getsource(sys.modules[name]) for name in modules]
    except (OSError, TypeError):  # no source, as for code typed into a console
        return True
    return any("allow_is_causal_skip" in source for source in sources)


@functools.cache
def _all_models(config: type, attribute: str) -> bool:
    """Whether `attribute` is True in all imported model classes with this configuration."""
    found = [bool(getattr(model, attribute, False)) for model in _models(config)]
    return bool(found) and all(found)


def _models(config: type) -> Iterator[Any]:
    classes = [importlib.import_module("transformers").PreTrainedModel]
    while classes:
        model = classes.pop()
        classes += model.__subclasses__()
        if model.config_class is config:
            yield model


def _with_bias(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Merges a mask and a bias into one mask."""
    if mask is None or bias is None:
        return bias if mask is None else mask
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, -math.inf)
    return mask + bias
