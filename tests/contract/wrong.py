"""Doors that are wrong on purpose: each lacks one property, which has to be found."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

import torch_attn
from contract.calls import DENSE
from contract.doors import Door
from contract.ways import Function, in_groups
from torch_attn import reference

_sdpa = in_groups(torch_attn.sdpa)


def _with(change: Function) -> Function:
    """Multiplies the output by what `change` gives for the call."""

    def call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return _sdpa(query, key, value, **options) * change(query, key, value)

    return call


def _of_scores(query: Tensor, key: Tensor, value: Tensor) -> int:
    torch.empty(query.size(2) * key.size(2) // 8, dtype=torch.uint8)  # a bit for each pair
    return 1


def _read_behind(query: Tensor, key: Tensor, value: Tensor) -> int:
    ctypes.string_at(key.data_ptr() + key.numel() * key.element_size(), 1)
    return 1


def _read_before(query: Tensor, key: Tensor, value: Tensor) -> int:
    ctypes.string_at(value.data_ptr() - 1, 1)
    return 1


def _by_threads(query: Tensor, key: Tensor, value: Tensor) -> float:
    return 1 + torch.get_num_threads() / 32


def _by_strides(query: Tensor, key: Tensor, value: Tensor) -> float:
    return 1 if key.is_contiguous() else 1.0625


def _with_value_of_hidden_keys(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return 1 + 0 * value.sum()


def _in_half(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Rounds the scores and the weights."""
    key, value = (x.repeat_interleave(2, 1) for x in (key, value))
    scores = query @ key.mT / query.size(-1) ** 0.5
    return (scores.softmax(-1) @ value).to(query.dtype)


def _of_one_row_more(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Right where there are rows."""
    output: Tensor = _sdpa(query, key, value, **options)
    return output if key.size(2) else output + 1


def _only_recorded(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    assert torch.is_grad_enabled()
    return _sdpa(query, key, value, **options)


class _Doubled(torch.autograd.Function):
    """Doubles a gradient: always, or only where nobody asks for one of the node's input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, node: Any) -> Tensor:
        ctx.node = node
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        is_asked = ctx.node is not None and torch._C._will_engine_execute_node(ctx.node)
        return gradient if is_asked else 2 * gradient, None


def _with_doubled(always: bool) -> Function:
    def call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        query = query.clone()
        return _sdpa(
            query, _Doubled.apply(key, None if always else query.grad_fn), value, **options
        )

    return call


def _of_other_strides(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    output: Tensor = _sdpa(query, key, value, **options)
    is_fake = isinstance(output, torch._subclasses.FakeTensor)
    return output.mT.contiguous().mT if is_fake else output


def _deaf_to_autocast(*args: Tensor, **options: Any) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return _sdpa(*args, **options)


def _of_one_seed(*args: Tensor, **options: Any) -> Tensor:
    """Draws the mask of another call, which no seed repeats."""
    torch.seed()
    return _sdpa(*args, **options)


# By the property that they lack.
_FUNCTIONS: dict[str, Function] = {
    "is_the_textbook": _with_doubled(always=True),
    "half_types_are_rounded_once": _in_half,
    "nothing_is_too_small": _of_one_row_more,
    "works_without_autograd": _only_recorded,
    "threads_change_no_bits": _with(_by_threads),
    "strides_change_no_bits": _with(_by_strides),
    "some_gradients_have_the_bits_of_all": _with_doubled(always=False),
    "what_is_beyond_the_lengths_does_not_count": _with(_with_value_of_hidden_keys),
    "memory_is_linear": _with(_of_scores),
    "only_its_tensors_are_read": _with(_read_behind),
    "fake_tensors_have_the_same_shapes": _of_other_strides,
    "autocast_casts": _deaf_to_autocast,
    "dropout_repeats": _of_one_seed,
}
_MORE = {
    "memory_is_linear": in_groups(reference.sdpa),
    "only_its_tensors_are_read": _with(_read_before),
}
WRONG = {
    f"wrong: {name}{more}": Door(
        function, DENSE, lacks={name: "on purpose"}, name=f"wrong: {name}{more}"
    )
    for functions, more in ((_FUNCTIONS, ""), (_MORE, ", too"))
    for name, function in functions.items()
}
