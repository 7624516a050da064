"""Makes encoders compute no padding, for :func:`torch_attn.integrations.transformers.unpad`.

A stack is a model that owns layers. This module replaces the stack's forward, because some callers
do not run hooks. The new forward makes a :class:`_Plan` from the mask of padding and adds the plan
to the keyword arguments. transformers hands these arguments on to every layer. So the model itself
stores nothing about a call. Each thread and each compiled graph reads the plan of its own call. If
a backward computes layers again, it reads the plan of the call that it repeats.
nn.TransformerEncoder does not hand keyword arguments on, so a ContextVar holds its plan.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
import threading
import weakref
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torch_attn.integrations._attention import (
    PLAN,
    attention_forward,
    is_ours,
    register_function,
)
from torch_attn.integrations._masks import Pattern
from torch_attn.nn import MultiheadAttention
from torch_attn.varlen import PackedSequences

__all__ = ["Unpadded"]

_NAME = "torch_attn.unpad"  # our implementation, for models that have another one
_REFUSED = ["encoder_hidden_states", "cache", "past_key_values", "use_cache", "cu_seq_lens_q"]
_REFUSED += ["output_attentions", "mask", "is_causal"]
_plan_of_nn: ContextVar[_Plan | None] = ContextVar("torch_attn.unpad", default=None)
_lock = threading.Lock()
_source: Any = functools.cache(inspect.getsource)  # getsource parses a whole file
# For each stack that `unpad` has changed: how many handles there are, the forward in the stack's
# __dict__ before the change (or None), functions that undo the change, and what is known of it.
_on: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()
# For each configuration, by its id, whose attention `unpad` has changed: the configuration, its
# implementation before, and how many stacks that are on use it. Models may share one.
_held: dict[int, list[Any]] = {}


class Unpadded(contextlib.ExitStack):
    """What :func:`~torch_attn.integrations.transformers.unpad` has turned on.

    Attributes:
        tokens_given: the number of tokens that the model got since then, padding included.
        tokens_computed: the number of tokens that the model computed.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = type(model).__name__
        self._stacks: list[_Stack] = []
        with _lock:
            for stack, known, turn_on in _find(model):
                if stack not in _on:
                    _forget(stack)
                    _on[stack] = [0, vars(stack).get("forward"), turn_on(stack, known), known]
                _on[stack][0] += 1
                self._stacks.append(_on[stack][3])
                self.callback(_remove, stack, _on[stack])

    @property
    def tokens_given(self) -> int:
        return sum(stack.given for stack in self._stacks)

    @property
    def tokens_computed(self) -> int:
        return sum(stack.computed for stack in self._stacks)

    def __repr__(self) -> str:
        state = "on" if any(stack.is_on for stack in self._stacks) else "off"
        tokens = f"{self.tokens_computed:,} of {self.tokens_given:,} tokens computed"
        return f"<unpad of {self._model}: {state}, {tokens}>"

    remove = contextlib.ExitStack.close


def restore(model: nn.Module) -> None:
    """Removes all handles of a model."""
    with _lock:
        for stack in model.modules():
            if stack in _on:
                _turn_off(stack)


def _remove(stack: nn.Module, entry: list[Any]) -> None:
    with _lock:
        entry[0] -= 1
        if not entry[0] and _on.get(stack) is entry:  # else restore() came before
            _turn_off(stack)


def _turn_off(stack: nn.Module) -> None:
    _, forward, undo, _ = _on.pop(stack)
    for function in undo:
        function()
    if _is_replaced(stack):  # else leaves the forward that other code has set
        del stack.forward
        if forward is not None:
            stack.forward = forward


def _is_replaced(stack: nn.Module) -> bool:
    return getattr(vars(stack).get("forward"), "func", None) in (_run, _run_nn)


def _forget(stack: Any) -> None:
    """Takes from a copy, made while `unpad` was on, what does nothing there."""
    if not _is_replaced(stack):
        return
    before = stack.forward.args[-1]
    del stack.forward
    if getattr(before, "__func__", before) is not type(stack).forward:
        stack.forward = before
    ours = _before, _after, _refuse_replica, _attend
    for module in stack.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [k for k, hook in hooks.items() if getattr(hook, "func", hook) in ours]:
                del hooks[key]


@dataclass(eq=False)
class _Plan:
    """The T tokens of `[B, L]` that one call computes."""

    keep: Tensor  # [B, L], boolean
    index: Tensor  # [T], int64, in keep.flatten()
    sequences: PackedSequences
    bias: Tensor | None = None  # T5: [1, H, longest, longest], which all layers share
    packed: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    layers: int = 0  # layers that have begun
    attended: int = 0  # calls of attention that got the packed sequences
    calls: int = 0
    done: bool = False

    def is_packed(self, states: Tensor) -> bool:
        # Padded states `[B, L, ...]` never have this shape. If B were 1 and L were T, there would
        # be no padding, and so no plan.
        return states.dim() == 3 and states.shape[:2] == (1, self.index.size(0))

    def pack(self, name: str, value: Any, once: bool = False) -> Any:
        """Packs `[B or 1, L, ...]` to `[1, T, ...]`.

        With `once`, a tensor that all layers get (cos, sin) is packed only once.
        """
        if isinstance(value, tuple):
            return tuple(self.pack(name, x, once) for x in value)
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        for whole, part in self.packed:
            if whole is value:
                return part
        if value.dim() == 1:  # the positions of a sequence (transformers 5.0)
            return self.pack(name, value[None])[0]
        B, L = self.keep.shape
        if value.size(0) not in (1, B) or value.size(1) != L:
            shape = tuple(value.shape)
            raise ValueError(f"unpad: layers get {name} {shape}; it must be ({B} or 1, {L}, ...)")
        index = self.index if value.size(0) == B else self.index % L
        part = value.flatten(0, 1).index_select(0, index)[None]
        if once:
            self.packed.append((value, part))
        return part

    def pad(self, states: Any) -> Any:
        """Pads `[1, T, ...]` to `[B, L, ...]` with zeros. Returns anything else unchanged."""
        if isinstance(states, tuple):
            return tuple(map(self.pad, states))
        if not isinstance(states, Tensor) or not self.is_packed(states):
            return states
        padded = states.new_zeros(self.keep.numel(), states.size(2))
        return torch.unflatten(padded.index_copy(0, self.index, states[0]), 0, self.keep.shape)


@dataclass(eq=False)
class _Stack:
    name: str
    mask: str  # the argument that says what is padding
    arguments: tuple[str, ...]  # of the stack's forward
    configs: tuple[Any, ...] = ()
    reads: tuple[tuple[int, str], ...] = ()  # (0 or -1, who reads the first or last token)
    is_relative: bool = False  # layers count how far tokens are from each other
    compute_bias: Any = None
    is_on: bool = True
    before: tuple[str, ...] = ()  # the implementation in each of `configs`
    given: int = 0  # tokens of all calls, and those computed
    computed: int = 0

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy, by copy.deepcopy or pickle: there `unpad` is off."""
        return {**vars(self), "is_on": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        for config, name in zip(self.configs, self.before, strict=True):
            config._attn_implementation_internal = name

    def count(self, keep: Tensor) -> None:
        with _lock:
            self.given += keep.numel()
            self.computed += int(keep.sum()) or keep.numel()


def _find(model: nn.Module) -> list[tuple[nn.Module, _Stack, Any]]:
    """Returns a model's stacks, what is known of each, and a function that starts unpadding.

    Refuses models that `unpad` does not support.
    """
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    pretrained: Any = () if modeling is None else modeling.PreTrainedModel
    found: list[tuple[nn.Module, _Stack, Any]] = []
    layers: dict[nn.Module, list[nn.Module]] = {}

    def walk(module: nn.Module, owner: Any) -> None:
        if isinstance(module, nn.TransformerEncoder):
            found.append((module, _check_nn(module), _turn_on_nn))
            return
        owner = module if isinstance(module, pretrained) else owner
        spec = (getattr(owner, "_can_record_outputs", None) or {}).get("hidden_states")
        cls = getattr(spec, "target_class", spec)
        if isinstance(cls, type) and isinstance(module, cls):
            layers.setdefault(owner, []).append(module)
            return
        for child in module.children():
            walk(child, owner)

    walk(model, None)
    for stack, own in layers.items():
        if "attention_mask" in inspect.signature(stack.forward).parameters:
            found.append((stack, _check(model, stack, own), partial(_turn_on, own)))
    if not found:
        raise ValueError(
            f"unpad: {type(model).__name__} has no nn.TransformerEncoder, and no layers that "
            'transformers records (_can_record_outputs["hidden_states"])'
        )
    return found


def _check(model: nn.Module, stack: Any, layers: list[nn.Module]) -> _Stack:
    name, config = type(stack).__name__, stack.config
    inside = [module for layer in layers for module in layer.modules()]
    causal = [m.is_causal for m in inside if hasattr(m, "is_causal")]
    reasons = {
        "it is a decoder; give the encoder alone, such as model.get_encoder()": any(causal)
        or getattr(config, "is_decoder", False),
        "its attention does not use transformers' AttentionInterface": not causal
        or not stack._can_set_attn_implementation(),
        "layerdrop is above 0": getattr(stack, "layerdrop", 0) or getattr(config, "layerdrop", 0),
        "chunk_size_feed_forward is above 0": getattr(config, "chunk_size_feed_forward", 0),
        "its layers mix tokens by convolution or recurrence": any(map(_mixes_tokens, inside)),
        "its routers count the tokens of a sequence (expert_capacity)": any(
            hasattr(m, "expert_capacity") for m in inside
        ),
        "each layer has a position bias of its own": any(hasattr(m, "compute_bias") for m in inside)
        and "position_bias" not in inspect.signature(layers[0].forward).parameters,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"unpad: {name}: {reason}")
    compute_bias = next((m.compute_bias for m in inside if hasattr(m, "compute_bias")), None)
    windows = (getattr(m, "sliding_window", None) for m in inside)
    return _Stack(
        name,
        "attention_mask",
        tuple(inspect.signature(stack.forward).parameters),
        tuple({id(m.config): m.config for m in (stack, *inside) if hasattr(m, "config")}.values()),
        tuple({c: type(m).__name__ for m in model.modules() for c in _tokens_read(m)}.items()),
        compute_bias is not None or any(windows),
        compute_bias,
    )


def _mixes_tokens(module: nn.Module) -> bool:
    return isinstance(module, nn.RNNBase) or max(getattr(module, "kernel_size", None) or (1,)) > 1


def _tokens_read(module: nn.Module) -> list[int]:
    """Returns which tokens a pooler or a head reads: 0 is the first token, -1 the last."""
    if hasattr(module, "pooler") or not type(module).__module__.startswith("transformers"):
        return [0] if getattr(module, "pooler", None) is not None else []
    return list(map(int, re.findall(r"\[:, (0|-1)[],]", _source(type(module)))))


def _check_nn(stack: nn.TransformerEncoder) -> _Stack:
    attentions: list[Any] = [getattr(layer, "self_attn", None) for layer in stack.layers]
    for layer, attention in zip(stack.layers, attentions, strict=True):
        is_torchs = type(layer).forward is nn.TransformerEncoderLayer.forward
        if not (is_torchs and isinstance(attention, MultiheadAttention)):
            raise ValueError(f"unpad: {type(layer).__name__}: no layer after torch_attn.convert")
        if attention.bias_k is not None or attention.add_zero_attn:
            raise ValueError("unpad: TransformerEncoder: add_bias_kv and add_zero_attn add keys")
    return _Stack(
        "TransformerEncoder",
        "src_key_padding_mask",
        tuple(inspect.signature(stack.forward).parameters),
        is_relative=any(max(attention.window_size) >= 0 for attention in attentions),
    )


def _turn_on(layers: list[Any], stack: Any, known: _Stack) -> list[Any]:
    for c in known.configs:
        _held.setdefault(id(c), [c, c._attn_implementation, 0])[2] += 1
    known.before = tuple(_held[id(c)][1] for c in known.configs)
    undo: list[Any] = [partial(_give_back, config) for config in known.configs]
    if not _attends(known):
        register_function(_NAME, attention_forward)
        stack.set_attn_implementation(_NAME)
    # If every entry of the list is a layer, the last layer ends the stack. In ALBERT an entry is a
    # group of layers, which runs several times. So the stack ends after `count` calls of layers.
    entries: Any = next(m for m in stack.modules() if isinstance(m, nn.ModuleList) and len(m))
    number = stack.config.num_hidden_layers
    is_shared = entries[0] is not layers[0]
    count = number * (len(layers) // len(entries)) if is_shared else 0
    last = layers if is_shared else [layers[min(number, len(layers)) - 1]]
    before_layer = partial(_before, known, tuple(inspect.signature(layers[0].forward).parameters))
    undo.append(partial(setattr, known, "is_on", False))
    handles = [
        *(m.register_forward_pre_hook(before_layer, with_kwargs=True) for m in layers),
        *(m.register_forward_hook(partial(_after, known, count), with_kwargs=True) for m in last),
    ]
    handles.append(_replace_forward(stack, _run, known))
    return [*(handle.remove for handle in handles), *undo]


def _give_back(config: Any) -> None:
    _, name, users = _held[id(config)]
    _held[id(config)][2] -= 1
    if users == 1:
        del _held[id(config)]
        config._attn_implementation_internal = name


def _replace_forward(stack: nn.Module, run: Any, *known: Any) -> Any:
    forward = partial(run, *known, stack.forward)
    stack.forward = functools.update_wrapper(forward, stack.forward)
    return stack.register_forward_pre_hook(partial(_refuse_replica, stack))


def _refuse_replica(stack: nn.Module, module: nn.Module, _: Any) -> None:
    if module is not stack:  # its copied forward computes with the weights of `stack`
        raise ValueError(f"unpad: {type(module).__name__} is a replica, as DataParallel makes them")


def _turn_on_nn(stack: nn.TransformerEncoder, known: _Stack) -> list[Any]:
    attentions: list[Any] = [layer.self_attn for layer in stack.layers]
    handles = [m.register_forward_pre_hook(_attend, with_kwargs=True) for m in attentions]
    handles.append(_replace_forward(stack, _run_nn, known, 0 if attentions[0].batch_first else 1))
    return [*(handle.remove for handle in handles), partial(setattr, known, "is_on", False)]


def _attends(stack: _Stack) -> bool:
    # Any other attention would let sequences attend to each other.
    return all(is_ours(config._attn_implementation) for config in stack.configs)


# Counting tokens breaks the graph of a compiled model. In a model of transformers, this is the only
# break.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _make_plan(stack: _Stack, given: dict[str, Any]) -> _Plan | None:
    """Makes the plan from the mask of padding.

    Returns None if there is no padding or no token, and after `unpad` has ended.
    """
    mask = given.get(stack.mask)
    if mask is None or not stack.is_on:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        what = f"{stack.mask} must be a tensor [B, L]; it is {getattr(mask, 'shape', type(mask))}"
        raise ValueError(f"unpad: {stack.name}: {what}")
    keep = mask.bool() if stack.mask == "attention_mask" else mask == 0  # torch marks padding
    stack.count(keep)
    if bool(keep.all() | ~keep.any()):  # models cannot compute 0 tokens
        return None
    asked = [name for name in _REFUSED if given.get(name) is not None and given[name] is not False]
    asked += ["output_attentions" for c in stack.configs if getattr(c, "output_attentions", 0)]
    begins = keep.clone()
    begins[:, 1:] &= ~keep[:, :-1]
    reason = ""
    if asked:
        reason = f"{asked[0]} is given, but padding is not computed; call restore_unpad(model)"
    elif not _attends(stack):
        name = stack.configs[0]._attn_implementation
        reason = (
            f"{name} attention would mix sequences; call restore_unpad(model) before setting it"
        )
    elif mask.is_floating_point() and not stack.configs and bool(mask[~keep].isfinite().any()):
        reason = f"{stack.mask} must be 0 or -inf where it is floating"
    elif stack.is_relative and int(begins.sum(1).max()) > 1:
        reason = f"{stack.mask} has holes, and layers count how far tokens are from each other"
    for column, name in stack.reads:
        if not reason and bool((keep.any(1) & ~keep[:, column]).any()):
            which, side = ("last", "left") if column else ("first", "right")
            reason = f"{stack.mask} hides the {which} token, which {name} reads; pad {side}"
    if reason:
        raise ValueError(f"unpad: {stack.name}: {reason}")
    lengths = keep.sum(1)
    cu_seq = nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    index = keep.flatten().nonzero().flatten()
    torch._dynamo.maybe_mark_dynamic(index, 0)
    longest = int(lengths.max())
    return _Plan(keep, index, PackedSequences(cu_seq, cu_seq, longest, longest))


def _run(known: _Stack, forward: Any, *args: Any, **kwargs: Any) -> Any:
    plan = _make_plan(known, dict(zip(known.arguments, args, strict=False)) | kwargs)
    if plan is None:
        return forward(*args, **kwargs)
    if known.compute_bias is not None:
        plan.bias = known.compute_bias(plan.sequences.max_q, plan.sequences.max_k)
    output = forward(*args, **kwargs, **{PLAN: plan})
    if not plan.done:
        raise RuntimeError(f"unpad: {known.name} did not end with its last layer")
    if isinstance(output, tuple):  # a tuple in it has recorded states
        return tuple(plan.pad(x) if isinstance(x, tuple) else x for x in output)
    if states := output.get("hidden_states"):
        output["hidden_states"] = plan.pad(states)
    return output


def _before(known: _Stack, names: tuple[str, ...], layer: Any, args: Any, kwargs: Any) -> Any:
    if not (plan := kwargs.get(PLAN)):
        return None
    given = dict(zip(names, args, strict=False)) | kwargs
    states, sequences = given.pop(names[0]), plan.sequences
    if not plan.is_packed(states):
        states = plan.pack(names[0], states)
    _guard_backward(known, layer, states)
    if not plan.layers and (reason := _refuse_mask(plan, given.get("attention_mask"))):
        raise ValueError(f"unpad: {type(layer).__name__}: {reason}")
    plan.layers += 1
    for name, value in given.items():
        if name not in ("attention_mask", "position_bias", PLAN):
            given[name] = plan.pack(name, value, once=True)
    if plan.bias is not None:
        if plan.bias.requires_grad and not torch.is_grad_enabled():
            raise ValueError("unpad: use_reentrant=True would lose position_bias's gradient here")
        given["position_bias"] = plan.bias
    given |= {"cu_seq_lens_q": sequences.cu_seq_q, "cu_seq_lens_k": sequences.cu_seq_k}
    given |= {"max_length_q": sequences.max_q, "max_length_k": sequences.max_k}
    given["attention_mask"] = None
    rest = [given.pop(name) for name in names[1 : len(args)]]
    return (states, *rest), given


def _refuse_mask(plan: _Plan, mask: Any) -> str:
    """Returns why a mask cannot be replaced by packed sequences, or "" if it can.

    A mask `[B, 1, L, L]` counts as causal if some token x sees a token y that does not see x.
    """
    is_causal = isinstance(mask, Pattern) and mask.right == 0
    if isinstance(mask, Tensor) and mask.dim() == 4 and mask.size(2) > 1:
        if torch.compiler.is_compiling():
            return "a graph cannot tell whether its mask is causal; do not compile this model"
        seen = (mask if mask.dtype == torch.bool else mask == 0) & plan.keep[:, None, :, None]
        is_causal = not torch.equal(seen, seen.mT)
    return "its mask is causal, as a decoder's" if is_causal else ""


def _after(known: _Stack, count: int, layer: Any, args: Any, kwargs: Any, output: Any) -> Any:
    if not (plan := kwargs.get(PLAN)):
        return None
    plan.calls += 1
    plan.done = count in (0, plan.calls)
    if not plan.done:
        return None
    if plan.attended < plan.layers:
        name = type(layer).__name__
        raise RuntimeError(f"unpad: {name}: its attention does not get the layer's arguments")
    _guard_backward(known, layer, output[0] if isinstance(output, tuple) else output)
    return (plan.pad(output[0]), *output[1:]) if isinstance(output, tuple) else plan.pad(output)


def _guard_backward(known: _Stack, layer: nn.Module, states: Tensor) -> None:
    """Refuses a backward that computes layers again (checkpointing) after `unpad` has ended.

    After `unpad` has ended, the model may use another attention implementation. That implementation
    would let packed sequences attend to each other.
    """

    def check(_: Tensor) -> None:
        if not (known.is_on and _attends(known)):
            raise RuntimeError(
                f"unpad: {known.name}: it has ended, but checkpointing computes layers again"
            )

    is_again = getattr(layer, "gradient_checkpointing", False) and states.requires_grad
    if is_again and not torch.compiler.is_compiling():  # a graph has the attention that was traced
        states.register_hook(check)  # type: ignore[no-untyped-call]


def _run_nn(known: _Stack, batch_dim: int, forward: Any, *args: Any, **kwargs: Any) -> Any:
    given = dict(zip(known.arguments, args, strict=False)) | kwargs
    plan = _make_plan(known, given)
    if plan is None:
        return forward(*args, **kwargs)
    given["src"] = plan.pack("src", given["src"].transpose(0, batch_dim)).transpose(0, batch_dim)
    token = _plan_of_nn.set(plan)
    try:
        output = forward(**given | {known.mask: None})
    finally:
        _plan_of_nn.reset(token)
    return plan.pad(output.transpose(0, batch_dim)).transpose(0, batch_dim)


def _attend(attention: nn.Module, args: Any, kwargs: Any) -> Any:
    plan = _plan_of_nn.get()
    return None if plan is None else (args, {**kwargs, "_packed": plan.sequences})
