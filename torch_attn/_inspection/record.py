"""Records the attention of a model while the model computes, and leaves the model unchanged."""

from __future__ import annotations

import contextlib
import functools
import inspect as signatures
import math
import numbers
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode

from torch_attn._inspection.result import Inspection, Layer
from torch_attn.functional import sdpa_stats, sdpa_with_weights
from torch_attn.integrations._attention import calling_sdpa
from torch_attn.nn import _merge

__all__ = ["inspect"]


def inspect(
    model: nn.Module,
    *inputs: Any,
    weights: bool = True,
    saturated_above: float = 0.99,
    **named_inputs: Any,
) -> Inspection:
    """Calls a model once and returns how every layer and head attended.

    `inspect` works with models of transformers, with :class:`torch.nn.MultiheadAttention` and
    modules that contain it, with :class:`torch_attn.nn.MultiheadAttention`, and with every model
    that calls ``F.scaled_dot_product_attention`` or :func:`torch_attn.sdpa` itself. `inspect` works
    in training and in evaluation, with masks, grouped heads and caches of keys.

    The model computes as always, with its usual gradients. The captured numbers are computed
    separately and have no gradients. Three things differ, and change the output by rounding at
    most. In evaluation, PyTorch's modules do not take their fast paths. Models of transformers that
    use neither "sdpa" nor attn compute with :func:`torch_attn.sdpa` in this call. Code that
    ``torch.compile`` has compiled runs uncompiled. After the call, even if it raises, the model is
    as before.

    Args:
        model: any module.
        inputs: the model's positional arguments. A single mapping is passed on as keyword
            arguments, and a single tuple or list as positional arguments.
        named_inputs: the model's keyword arguments. If an argument of the model has the name
            `weights` or `saturated_above`, pass all keyword arguments in a mapping.
        weights: whether to keep the weights, which takes memory O(L S) per head. Without the
            weights, the memory is O(L + S), plus a number for each element of a mask.
        saturated_above: a query counts as saturated if its largest weight exceeds this number. The
            Jacobian of the softmax, ``diag(p) - p p^T`` with the weights p, then has only small
            entries: at most 0.01 if a weight is 0.99.

    Returns:
        An :class:`Inspection`: the model's output, and a :class:`Layer` for each call of attention,
        in the order of the calls. ``print`` shows the inspection as a table. Queries ``[H, L, E]``
        count as a batch of one. All dimensions before the head belong to the batch.

    Raises:
        RuntimeError: the model called no attention that `inspect` can record. The message says why,
            or which calls `inspect` cannot see.
        TypeError: `model` is no module, or `saturated_above` is no number.
        ValueError: `saturated_above` is not from 0 to 1; or a model of transformers would have to
            compute with :func:`torch_attn.sdpa`, but needs something that the operator lacks, such
            as keys that an indexer chooses.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        >>> inspection = torch_attn.inspect(model, torch.randn(2, 10, 64))
        >>> [layer.name for layer in inspection.layers]
        ['layers.0.self_attn', 'layers.1.self_attn']
        >>> inspection.attentions[0].shape, inspection.layers[0].entropy.shape
        (torch.Size([2, 4, 10, 10]), torch.Size([2, 4, 10]))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"inspect: model is a {type(model).__name__}; it must be a torch.nn.Module")
    if not isinstance(saturated_above, numbers.Real):
        raise TypeError(
            f"inspect: saturated_above is a {type(saturated_above).__name__}; it must be a number"
        )
    if not 0 <= saturated_above <= 1:
        raise ValueError(
            f"inspect: saturated_above is {saturated_above}; it must be a weight, from 0 to 1"
        )
    where = _Where(model)
    recorder = _Recorder(where, weights, saturated_above)
    with _turns[0], where.followed(), calling_sdpa(model), _nothing_compiled(), recorder:
        only = inputs[0] if len(inputs) == 1 and not named_inputs else None
        if isinstance(only, Mapping):
            output = model(**only)
        else:
            output = model(*(only if isinstance(only, (tuple, list)) else inputs), **named_inputs)
    if not recorder.layers:
        raise RuntimeError(_nothing_seen(model, recorder.skipped))
    return Inspection(output, tuple(recorder.layers), recorder.skipped)


# Two settings hold for all threads: which attention a transformers model uses, and whether compiled
# code runs. Threads that inspect take turns, because otherwise one thread would undo the settings
# of another. The lock is in a list, so that a forked process can replace it by a free lock.
_turns = [threading.RLock()]


def _renew_turns() -> None:
    _turns[0] = threading.RLock()


os.register_at_fork(after_in_child=_renew_turns)


class _Where:
    """Tells which module of a model is computing in the thread that inspects the model."""

    def __init__(self, model: nn.Module) -> None:
        # torch.compile wraps a module in another module, which calls it "_orig_mod". The names here
        # omit "_orig_mod".
        self._names = {
            module: ".".join(part for part in name.split(".") if part != "_orig_mod")
            for name, module in model.named_modules()
        }
        self._calls: list[_Call] = []

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Follows only this thread's calls, because other threads may use the same modules."""
        calls, thread = self._calls, threading.get_ident()

        def enter(module: nn.Module, args: Any) -> None:
            if threading.get_ident() == thread:
                calls.append(_Call(module))

        def receive(module: nn.Module, args: Any, kwargs: Any) -> None:
            if threading.get_ident() == thread and calls and calls[-1].module is module:
                calls[-1].args, calls[-1].kwargs = args, kwargs

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if threading.get_ident() != thread:
                return
            # PyTorch calls `leave` without `enter` if a global hook (a hook of all modules) raises
            # before `enter`. PyTorch does not call `leave` after a KeyboardInterrupt.
            for depth in reversed(range(len(calls))):
                if calls[depth].module is module:
                    del calls[depth:]
                    return

        hooks: list[Any] = []
        try:
            for module in self._names:
                if isinstance(module, torch.jit.ScriptModule):
                    continue
                # PyTorch calls `leave` even if one of the module's own hooks raises. `enter` must
                # have run by then, so `enter` runs before these hooks. `receive` runs after the
                # module's own hooks, because they may change the arguments.
                hooks.append(module.register_forward_pre_hook(enter, prepend=True))
                hooks.append(module.register_forward_pre_hook(receive, with_kwargs=True))
                hooks.append(module.register_forward_hook(leave, always_call=True))
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def name(self) -> str:
        """The name of the innermost module that is computing."""
        return self._names[self._calls[-1].module] if self._calls else ""

    @property
    def other_sequence(self) -> bool:
        """Whether the innermost module takes its keys from another sequence than its queries."""
        if not self._calls:
            return False
        call = self._calls[-1]
        try:
            signature = signatures.signature(call.module.forward)
            given = signature.bind_partial(*call.args, **call.kwargs).arguments
        except (TypeError, ValueError):  # it has no signature
            given = call.kwargs
        if isinstance(call.module, nn.MultiheadAttention):
            query, key = given.get("query"), given.get("key")
            return isinstance(query, Tensor) and isinstance(key, Tensor) and not _same(query, key)
        # In transformers and diffusers, a module that takes keys from a second sequence gets that
        # sequence in one of these arguments.
        return any(
            given.get(name) is not None for name in ("key_value_states", "encoder_hidden_states")
        )


@dataclass
class _Call:
    """A module that is computing, with the arguments of its forward."""

    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def _same(query: Tensor, key: Tensor) -> bool:
    """Returns whether the query and the key are the same sequence.

    Two tensors with equal numbers count as the same, as in ``attention(norm(x), norm(x), x)``.
    """
    if query is key:
        return True
    alike = query.shape == key.shape and query.dtype == key.dtype and query.device == key.device
    return alike and torch.allclose(query, key, rtol=0, atol=0, equal_nan=True)


@dataclass
class _Attention:
    """The arguments of an attention as :func:`torch_attn.sdpa_stats` takes them."""

    query: Tensor
    key: Tensor
    attn_mask: Tensor | None
    is_causal: bool
    options: dict[str, Any] = field(default_factory=dict)  # given by name
    sequences: tuple[Tensor, Tensor] | None = None  # inputs of query and key, if they are known


# Whether a recorder is calling attention. The recorder's own calls do not belong to a model.
_recording: ContextVar[bool] = ContextVar("_recording", default=False)


class _Recorder(TorchFunctionMode):
    """A mode that sees each call of attention in one thread and computes the call's statistics."""

    def __init__(self, where: _Where, weights: bool, saturated_above: float) -> None:
        super().__init__()
        self._where, self._weights, self._saturated_above = where, weights, saturated_above
        self._count: Counter[str] = Counter()
        self.layers: list[Layer] = []
        self.skipped: dict[str, str] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        arguments = _attentions().get(func)
        if arguments is not None and not _recording.get():
            # PyTorch turns this recorder off while this method runs, but leaves the recorder of an
            # enclosing `inspect` on. `_recording` tells that recorder to ignore the calls below.
            token = _recording.set(True)
            try:
                with torch.no_grad():
                    self._record(arguments(*args, **kwargs))
            finally:
                _recording.reset(token)
        return output

    def _record(self, attention: _Attention) -> None:
        name, mask = self._where.name, attention.attn_mask
        problem = _problem(attention)
        if problem is not None:
            self.skipped[name] = problem
            return
        query, key = attention.query.detach(), attention.key.detach()
        if mask is not None and not isinstance(mask, CausalBias):
            mask = mask.detach()
        is_causal, options = attention.is_causal, attention.options
        scale = options.get("scale")
        if scale is None:  # with E = 0 the scores are 0 anyway
            scale = 1 / math.sqrt(max(query.size(-1), 1))
        stats = sdpa_stats(query, key, mask, is_causal, **options)
        weights = None
        if self._weights:  # values without columns save computing the output
            no_value = key[..., :0]
            _, matrix, _ = sdpa_with_weights(query, key, no_value, mask, 0.0, is_causal, **options)
            weights = _batched(matrix, 2)
        differ = attention.sequences is not None and not _same(*attention.sequences)
        visible = _visible_keys(attention)
        self.layers.append(
            Layer(
                name=name,
                call=self._count[name],
                is_cross=differ or self._where.other_sequence,
                weights=weights,
                query=_batched(query, 2),
                key=_batched(key, 2),
                scale=scale,
                **{name: _batched(x, 1) for name, x in stats._asdict().items()},
                visible_keys=_batched(visible, 1),
                saturated_above=self._saturated_above,
            )
        )
        self._count[name] += 1


def _batched(x: Tensor, own: int) -> Tensor:
    """Reshapes to [B, H, ...] with `own` dimensions after H. B merges all dimensions before H."""
    heads = x.size(-own - 1) if x.dim() > own else 1
    return x.reshape(math.prod(x.shape[: -own - 1]), heads, *x.shape[-own:])


_SCALES = {"key_scale", "value_scale"}  # arguments that the statistics do not take


def _problem(attention: _Attention) -> str | None:
    """Returns why statistics cannot be computed for this attention, or None."""
    query = attention.query
    if {"score_mod", "mask_mod", "blocks"} & attention.options.keys():
        return "it is flex_attention, whose functions of the pair have no statistics"
    if _SCALES & attention.options.keys():
        return "its keys or values have 8 bits, and no statistics"
    tensors = (query, attention.key, attention.attn_mask, *attention.options.values())
    if any(_is_of_vmap(x) for x in tensors if isinstance(x, Tensor)):
        return "it is called under torch.vmap; call it with a batch instead"
    if query.is_nested:
        return "its tensors are nested; inspect the model with padded ones"
    if query.device.type not in ("cpu", "cuda"):
        return f"its tensors are on {query.device}; statistics are computed on the CPU and on CUDA"
    if query.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        return f"its tensors are of {query.dtype}"
    return None


def _is_of_vmap(x: Tensor) -> bool:
    """Returns whether `x` is, or wraps, a batched tensor that :func:`torch.vmap` made.

    Such a tensor is invalid after vmap has returned.
    """
    functorch: Any = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):  # a wrapper for each transform around the call
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False


# Some programs hide keys not with -inf, but with a number far below all scores: the least number of
# a dtype, half of the least number, or -1e4. bfloat16 rounds -1e4 to -9984.
_HIDES = -9984.0
_LIMITS = {"enable_gqa", "window_size", "query_offset", "key_lengths"}  # but for masks


def _visible_keys(attention: _Attention) -> Tensor:
    """Returns how many keys each query sees: if all scores are 0, logsumexp is the logarithm."""
    mask = attention.attn_mask
    if mask is not None and not isinstance(mask, CausalBias) and mask.dtype != torch.bool:
        mask = mask > _HIDES
    query, key = (x.detach()[..., :0].double() for x in (attention.query, attention.key))
    limits = {name: x for name, x in attention.options.items() if name in _LIMITS}
    logsumexp = sdpa_stats(query, key, mask, attention.is_causal, **limits).logsumexp
    return logsumexp.exp().round().long()


def _of_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    mean: bool = False,
    with_rows: bool = True,
    **options: Any,
) -> _Attention:
    given = {n: o for n, o in options.items() if n not in _SCALES or o is not None}
    return _Attention(query, key, attn_mask, is_causal, given)


def _of_multi_head_attention(*args: Any, **kwargs: Any) -> _Attention:
    """Returns the attention that ``F.multi_head_attention_forward`` computes.

    https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html explains the
    parameters of that function, under the same names.
    """
    call = _MULTI_HEAD.bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    query, key, heads = given["query"], given["key"], given["num_heads"]
    if given["use_separate_proj_weight"]:
        weights = given["q_proj_weight"], given["k_proj_weight"]
    else:
        weights = given["in_proj_weight"].chunk(3)[:2]
    bias = given["in_proj_bias"]
    biases = (None, None) if bias is None else bias.chunk(3)[:2]
    q, k = (F.linear(x, w, b) for x, w, b in zip((query, key), weights, biases, strict=True))
    if q.dim() == 2:
        q, k = q[:, None], k[:, None]
    if given["bias_k"] is not None:
        k = torch.cat([k, given["bias_k"].expand(1, *k.shape[1:])])
    q, k = (torch.unflatten(x, -1, (heads, -1)).movedim(0, 2) for x in (q, k))  # [B, H, L or S, E]
    if given["static_k"] is not None:
        k = torch.unflatten(given["static_k"], 0, (-1, heads))
    if given["add_zero_attn"]:
        k = F.pad(k, (0, 0, 0, 1))

    mask, padding = given["attn_mask"], given["key_padding_mask"]
    if mask is not None and mask.dim() == 3:
        mask = torch.unflatten(mask, 0, (-1, heads))
    if padding is not None and padding.dim() == 1:
        padding = padding[None]
    hidden = _merge(mask, padding)
    if hidden is not None:
        hidden = F.pad(hidden, (0, k.size(2) - hidden.size(-1)))  # no mask hides appended keys
        hidden = ~hidden if hidden.dtype == torch.bool else hidden
    # Ignores `is_causal`, which only says that the mask is the causal one.
    return _Attention(q, k, hidden, is_causal=False, sequences=(query, key))


_MULTI_HEAD = signatures.signature(F.multi_head_attention_forward)


@functools.cache
def _attentions() -> dict[Any, Callable[..., _Attention]]:
    """Maps each function that the recorder sees to a function that makes an _Attention.

    Both functions take the same arguments.
    """
    found: dict[Any, Callable[..., _Attention]] = {
        F.multi_head_attention_forward: _of_multi_head_attention,
        F.scaled_dot_product_attention: _of_sdpa,
    }
    ops = torch.ops.attn
    of_scores = ops.sdpa, ops.attention, ops.sdpa_with_weights, ops._sdpa_and_weights
    for operator in (*of_scores, ops.flex_attention):
        found |= {operator: _of_sdpa, operator.default: _of_sdpa}
    return found


def _nothing_compiled() -> contextlib.AbstractContextManager[Any]:
    """Runs compiled code eagerly, because the recorder sees no calls inside compiled code."""
    compiled = "torch._dynamo" in sys.modules  # otherwise no code was compiled
    return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()


def _nothing_seen(model: nn.Module, skipped: dict[str, str]) -> str:
    name = type(model).__qualname__
    if skipped:
        module, why = next(iter(skipped.items()))
        return (
            f"inspect: no attention of {name} can be inspected; in {module or 'the model'}, {why}"
        )
    return (
        f"inspect: {name} called no attention that can be seen. Seen are calls of "
        "F.scaled_dot_product_attention, F.multi_head_attention_forward (nn.MultiheadAttention) "
        "and torch_attn.sdpa, and models of transformers that take any attn_implementation. Not "
        "seen are models that write the softmax out themselves, call another library's kernels, "
        "are TorchScript or exported programs, or compute in other threads. Where the model is "
        "your own, call F.scaled_dot_product_attention; elsewhere, a statistic of a query and a "
        "key at hand is torch_attn.sdpa_stats"
    )
