"""Caches of 8 bits for models of transformers: what `eight_bit_cache` returns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from torch_attn._caches.quantize import MOST, quantize_kv
from torch_attn.integrations._attention import EIGHT_BITS, EightBits, is_ours

__all__ = ["EightBitCache"]


class EightBitCache(Cache):
    """What :func:`~torch_attn.integrations.transformers.eight_bit_cache` returns."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        model = getattr(model, "_orig_mod", model)  # of torch.compile
        name = type(model).__name__
        if dtype not in MOST:
            raise _error(f"dtype is {dtype}; it must be {' or '.join(map(str, MOST))}")
        if not isinstance(model, PreTrainedModel):
            raise _error(f"model is {name}; it must be a model of transformers")
        config = model.config.get_text_config(decoder=True)
        if model.config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
            raise _error(f"{name} has cross-attention, which needs two caches")
        own = DynamicCache(config=config).layers
        unfit = {type(layer).__name__ for layer in own if type(layer) is not DynamicLayer}
        if unfit:
            raise _error(
                f"{name} needs layers of {', '.join(sorted(unfit))}; every layer must keep all its "
                "keys"
            )
        if not getattr(model, "_supports_attention_backend", False):
            raise _error(f"{name} does not declare that all of its attention can be replaced")
        if getattr(config, "kv_lora_rank", None) is not None:
            raise _error(f"{name} computes with cached numbers itself (kv_lora_rank)")
        self.dtype = dtype
        layer: Any = functools.partial(_Layer, _Model(config), dtype)
        super().__init__(layer_class_to_replicate=layer)

    def __repr__(self) -> str:
        return f"EightBitCache({len(self)} layers, {self.get_seq_length()} tokens, {self.dtype})"


class _Model:
    """The configuration of the model. Copies of a cache share it, because a model may change it."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __deepcopy__(self, memo: Any) -> _Model:
        return self


class _Layer(DynamicLayer):  # type: ignore[no-untyped-call]
    """The keys and values of one layer.

    A decoder of transformers passes the keyword arguments of its call of attention to the cache.
    The layer adds :class:`EightBits` to these arguments, so the scales reach `attention_forward`.
    """

    supports_early_init = False

    def __init__(self, model: _Model, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model, self._dtype = model, dtype
        # Keys, their scales, values, and their scales, with room for tokens to come.
        self._buffers: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        call = kwargs.get("kwargs")
        if call is None:
            raise _error(
                "this model does not pass its keyword arguments to cache.update, as most decoders "
                "of transformers 5.24 do; so the scales would not reach attention"
            )
        name = self._model.config._attn_implementation
        if not is_ours(name):
            raise _error(
                f"the model's attn_implementation is {name!r}, which would compute with numbers of "
                "8 bits as if they had no scales; load the model with attn_implementation="
                "torch_attn.integrations.transformers.register()"
            )
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise _error("keys and values require gradients; call the model under torch.no_grad()")
        if key_states.dtype == torch.float64:
            raise _error("the model is of float64; it must be of float32, bfloat16 or float16")
        new = [part for x in (key_states, value_states) for part in quantize_kv(x, self._dtype)]
        length = self.get_seq_length()
        end = length + key_states.size(2)
        if not self._buffers:
            self._buffers = [_empty(x, 0) for x in new]
        for x, buffer in zip(new, self._buffers, strict=True):
            if x.shape[:2] != buffer.shape[:2] or x.shape[3:] != buffer.shape[3:]:
                raise _error(
                    f"new keys or values have shape {[*x.shape]}; "
                    f"the cache has {[*buffer[:, :, :length].shape]}"
                )
        if self._buffers[0].is_inference() and not torch.is_inference_mode_enabled():
            self._change(torch.clone)
        if self._buffers[0].size(2) < end:
            room = end // 2 + 64  # with it, only few steps copy the cache
            self._change(lambda x: torch.cat([x[:, :, :length], _empty(x, end - length + room)], 2))
        for x, buffer in zip(new, self._buffers, strict=True):
            buffer[:, :, length:end] = x
        keys, values = self._show(end)
        scales = (x[:, :, :end] for x in self._buffers[1::2])
        call[EIGHT_BITS] = EightBits(keys, values, *scales)
        return keys, values

    def _show(self, length: int) -> tuple[Tensor, Tensor]:
        keys, values = (x[:, :, :length] for x in self._buffers[::2])
        self.keys, self.values, self.is_initialized = keys, values, True
        return keys, values

    def _change(self, f: Callable[[Tensor], Tensor]) -> None:
        """Replaces each buffer x by f(x)."""
        length = self.get_seq_length()
        self._buffers = [f(x) for x in self._buffers]
        if self._buffers:
            self._show(length)

    def reset(self) -> None:
        super().reset()
        self._buffers = []
        self.keys = self.values = None
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._change(lambda x: x.index_select(0, beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change(lambda x: x[indices])


def _empty(like: Tensor, length: int) -> Tensor:
    return like.new_empty(*like.shape[:2], length, *like.shape[3:])


def _error(message: str) -> ValueError:
    return ValueError(f"eight_bit_cache: {message}")
