"""`attn` as an attention implementation of Hugging Face transformers.

:func:`register` returns a name. Pass the name as a model's `attn_implementation`::

    from torch_attn.integrations import transformers
    model = AutoModel.from_pretrained(path, attn_implementation=transformers.register())

An implementation is two functions under one name: one attends, the other prepares the mask
(https://huggingface.co/docs/transformers/attention_interface). Without the second function,
transformers would silently pass no mask at all.

Not every model asks for an implementation by its name. :func:`register` says which models do, and
:func:`torch_attn.calls` counts the calls of these models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torch_attn._import import import_of
from torch_attn.integrations._attention import attention_forward, interfaces, register_function
from torch_attn.integrations._unpad import Unpadded
from torch_attn.integrations._unpad import restore as _restore

if TYPE_CHECKING:
    from torch_attn.integrations._cache import EightBitCache

__all__ = [
    "attention_forward",
    "eight_bit_cache",
    "register",
    "restore_unpad",
    "unpad",
    "unregister",
]

# The names that register() took from transformers, each with its implementation and mask function.
_taken: dict[str, tuple[Any, Any]] = {}


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
      :func:`torch_attn.calls` does not grow, and `model.set_attn_implementation(name)` logs a
      warning.
    - Other models look up the implementation in a table of their own, and raise KeyError: 'attn' if
      they are made with `attn_implementation="attn"`. Make these models without that argument:
      Bark, Data2VecVision, DeepSeek-OCR 2, DeepSeek-VL Hybrid, Falcon, GIT, GPT-J (until
      transformers 5.24), GPT-Neo, SAM, SAM-HQ, SuperGlue and UnlimitedOCR.

    `model.set_attn_implementation("sdpa")` undoes `model.set_attn_implementation(register())`.

    Returns:
        `name`.

    Raises:
        ImportError: transformers is not installed, is older than 5 or does not import. In the last
            case the message names the error of the failed import.
    """
    attention, mask = (interface().get(name) for interface in interfaces())
    if attention is not attention_forward and (attention or mask):
        _taken[name] = attention, mask
    register_function(name, attention_forward)
    return name


def unregister(name: str | None = None) -> None:
    """Gives a name that :func:`register` took, such as "sdpa", back to transformers.

    Models attend with transformers' own implementation from their next call on. A model that has
    our own name leaves it by `model.set_attn_implementation("sdpa")`.

    Args:
        name: the name that was passed to :func:`register`. None stands for all of them.

    Raises:
        ValueError: `attn` does not replace an implementation of that name.
    """
    if name is not None and name not in _taken:
        taken = ", ".join(map(repr, _taken)) or "none"
        raise ValueError(
            f"name is {name!r}; register() took these from transformers: {taken}. A model leaves "
            'another name by model.set_attn_implementation("sdpa")'
        )
    for taken in [*_taken] if name is None else [name]:
        for interface, function in zip(interfaces(), _taken.pop(taken), strict=True):
            if function is None:  # "eager" has a mask only; no public function removes a name
                del interface._global_mapping[taken]
            else:
                interface.register(taken, function)


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
    with import_of("transformers"):  # only now, because EightBitCache is a class of transformers
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
        A handle for ``with``. Without ``with``, call its `remove()` at the end, or
        :func:`restore_unpad`. It counts the tokens that the model got and computed.

    Raises:
        ValueError: `unpad` does not support the model (a decoder, layerdrop), or does not support
            what a call with padding asks for (weights, a cache, a causal mask). `unpad` checks the
            model at once, and checks a call before its first layer computes.
        RuntimeError: attention did not get the arguments of the layers, the model did not end with
            its last layer, or a backward with checkpointing runs after `unpad` has ended.
    """
    return Unpadded(model)


def restore_unpad(model: nn.Module) -> None:
    """Ends :func:`unpad` for a model, whoever has the handles; does nothing where it is off.

    Args:
        model: the module that was passed to :func:`unpad`, or one that holds it.
    """
    _restore(model)
