"""Masks that transformers asks `attn` for: patterns that need no mask, and packed sequences."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torch_attn.distributed import _context as context
from torch_attn.functional import sdpa
from torch_attn.varlen import PackedSequences


def mask_function() -> Callable[..., Tensor | Pattern | None]:
    """Returns the function that transformers calls to make the mask of a forward."""
    masking = importlib.import_module("transformers.masking_utils")

    def make(*args: Any, config: Any = None, **kwargs: Any) -> Tensor | Pattern | None:
        given = kwargs.get("attention_mask")
        if isinstance(given, Pattern):  # made for `generate`; the model asks for the mask again
            return given
        # The last layers of Gemma 4 use the keys of earlier layers again, and Gemma 4 drops queries
        # before these layers. Without a mask, causality would put the first remaining query at the
        # position of the first key.
        if getattr(config, "num_kv_shared_layers", 0):
            kwargs["allow_is_causal_skip"] = False
        packed = _packed(masking, config, kwargs.get("mask_function"))
        if packed is not None:
            function, sequences = packed
            alone = {**kwargs, "mask_function": function, "allow_is_causal_skip": True}
            window = _window(masking, config, **alone)
            if window is not None:
                pattern = _pattern(masking, *window, **alone)
                assert isinstance(pattern, Pattern)  # packed sequences have several tokens
                # Over several processes, two pieces of one sequence look like two sequences.
                return replace(pattern, sequences=None if context.is_on() else sequences)
        window = _window(masking, config, **kwargs)
        if window is not None:
            return _pattern(masking, *window, **kwargs)
        # A model that does not support "sdpa" may add the mask to its scores by itself, so it gets
        # a floating mask. `attention_forward` takes boolean and floating masks.
        own = masking.sdpa_mask if supports_sdpa(type(config)) else masking.eager_mask
        mask: Tensor | None = own(*args, config=config, **kwargs)
        return mask

    return make


# --- patterns that need no mask -------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Pattern:
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
    sequences: PackedSequences | None = None  # if they are packed
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

    def to(self, *args: Any, **kwargs: Any) -> Pattern:
        """Moves the pattern to another device. accelerate calls `to` on a layer's arguments."""
        offset = None if self.offset is None else self.offset.to(*args, **kwargs)
        padding = None if self.padding is None else self.padding.to(*args, **kwargs)
        sequences = None if self.sequences is None else self.sequences.to(*args, **kwargs)
        return replace(self, offset=offset, padding=padding, sequences=sequences)

    def contiguous(self) -> Pattern:
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
    if both and local_size is None and supports_sdpa(type(config)):
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
) -> Pattern | Tensor | None:
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
    return Pattern(left, right, start, padding, (batch_size, 1, q_length, kv_length))


# --- packed sequences -----------------------------------------------------------------------------


def sequences_of_call(kwargs: dict[str, Any]) -> PackedSequences | None:
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
    return PackedSequences(cu_seq_q, cu_seq_k, max_q, max_k)


def attend_padded(
    sequences: PackedSequences, *tensors: Tensor, attn_mask: Tensor, **options: Any
) -> Tensor:
    """Returns self-attention in each sequence, `[1, T, H, Ev]`; the mask is `[1, H, max, max]`."""
    cu_seq, longest = sequences.cu_seq_k, sequences.max_k
    token = torch.arange(tensors[0].size(2), device=cu_seq.device)
    sequence = torch.searchsorted(cu_seq, token, right=True) - 1
    place = sequence * longest + token - cu_seq[sequence]
    x = torch.cat(tensors).transpose(1, 2)  # [3, T, H, E]
    size = (cu_seq.numel() - 1, longest)
    padded = x.new_zeros(3, size[0] * size[1], *x.shape[2:]).index_copy(1, place, x)
    q, k, v = torch.unflatten(padded, 1, size).transpose(2, 3)
    output = sdpa(q, k, v, attn_mask, key_lengths=cu_seq.diff(), **options)
    return output.transpose(1, 2).flatten(0, 1).index_select(0, place)[None]


def mask_of(sequences: PackedSequences, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """Makes a mask `[B, 1, L, S]` that hides other sequences too.

    Only calls that need memory of L x S for another reason use this mask. Tokens after the last
    sequence see no keys, as in :meth:`PackedSequences.attend`.
    """
    starts = (sequences.cu_seq_q, query.shape), (sequences.cu_seq_k, key.shape)
    of_query, of_key = (
        torch.searchsorted(cu_seq, torch.arange(B * n, device=cu_seq.device), right=True)
        .view(B, 1, n)
        .to(query.device)
        for cu_seq, (B, _, n, _) in starts
    )
    of_query = of_query.masked_fill(of_query == sequences.cu_seq_q.numel(), -1)
    same = of_query[..., None] == of_key[..., None, :]
    if mask is None or mask.dtype == torch.bool:
        return same if mask is None else mask & same
    return torch.where(same, mask, -math.inf)


def _packed(masking: Any, config: Any, function: Any) -> tuple[Any, PackedSequences] | None:
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
    return alone, PackedSequences(cu_seq, cu_seq, longest, longest)


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
def supports_sdpa(config: type) -> bool:
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


def with_bias(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Merges a mask and a bias into one mask."""
    if mask is None or bias is None:
        return bias if mask is None else mask
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, -math.inf)
    return mask + bias
