"""Attention over a sequence that several processes have, and what it is to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import torch_attn

METHODS = ["ring", "gather", "all_to_all"]

# Queries, keys, heads of the query and of the keys, and options; numbers stand for tensors.
CASES: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {
    "plain": (12, 12, 2, 2, {}),
    "uneven": (7, 9, 2, 2, {"is_causal": True}),
    "empty blocks": (1, 2, 2, 2, {}),
    "more queries than keys": (9, 1, 2, 2, {"is_causal": True}),
    "causal, grouped heads": (12, 12, 4, 2, {"is_causal": True}),
    "window": (12, 12, 2, 2, {"window_size": (2, 1)}),
    "window to the left": (12, 12, 2, 2, {"window_size": (3, 0), "is_causal": True}),
    "offsets": (5, 9, 2, 2, {"is_causal": True, "query_offset": torch.tensor([4, -2])}),
    "far offset": (5, 9, 2, 2, {"is_causal": True, "query_offset": -5}),
    "lengths": (6, 9, 2, 1, {"key_lengths": torch.tensor([7, 0])}),
    "soft cap": (8, 8, 2, 2, {"softcap": 2.0}),
    "slopes": (7, 9, 2, 2, {"alibi_slopes": (2,), "is_causal": True}),
    "sinks": (6, 9, 2, 2, {"sinks": (2, 2), "key_lengths": torch.tensor([7, 0])}),
    "mask": (7, 9, 2, 2, {"attn_mask": (2, 7, 9)}),
    "mask of keys": (5, 3, 2, 2, {"attn_mask": (5, 3), "softcap": 3.0}),
    "mask of rows": (7, 7, 2, 2, {"attn_mask": (7, 1), "sinks": (2,)}),
    "boolean mask": (7, 9, 2, 2, {"attn_mask": "bool"}),
    "all": (
        9,
        11,
        4,
        2,
        {
            "attn_mask": (4, 9, 11),
            "window_size": (6, 2),
            "query_offset": torch.tensor([1, 3]),
            "key_lengths": torch.tensor([8, 11]),
            "softcap": 3.0,
            "alibi_slopes": (4,),
            "sinks": (4,),
        },
    ),
}
LEARNED = ("attn_mask", "alibi_slopes", "sinks")
CUT = ("output", "query", "key", "value", "attn_mask")  # the others are shares of a process


def made(case: str, dtype: torch.dtype, computed: torch.dtype) -> tuple[dict[str, Tensor], Any]:
    """The tensors and the other options: numbers of a dtype, in another."""
    torch.manual_seed(0)
    L, S, heads, key_heads, given = CASES[case]
    shapes = {"query": (2, heads, L, 8), "key": (2, key_heads, S, 8), "value": (2, key_heads, S, 5)}
    options: dict[str, Any] = {"enable_gqa": True}
    for name, value in given.items():
        if name in LEARNED and value != "bool":
            shapes[name] = value
        elif value != "bool":
            options[name] = value
    tensors = {name: torch.randn(shape, dtype=dtype).to(computed) for name, shape in shapes.items()}
    if given.get("attn_mask") == "bool":
        tensors["attn_mask"] = torch.rand(L, S) < 0.6
    return tensors, options


def own_part(name: str, whole: Tensor) -> Tensor:
    """The block of this process, as torch.chunk cuts."""
    if name.removeprefix("second, ") not in CUT:
        return whole
    world, length = dist.get_world_size(), whole.shape[-2]
    size = -(-length // world)
    starts = [min(r * size, length) for r in range(1, world)]
    return whole.tensor_split(starts, -2)[dist.get_rank()]


def own_leaf(whole: Tensor) -> Tensor:
    """The rows of this process, a leaf."""
    return own_part("query", whole).detach().clone().requires_grad_()


def derivatives(
    attend: Callable[..., Tensor],
    tensors: dict[str, Tensor],
    options: dict[str, Any],
    cut: Callable[[str, Tensor], Any],
    *,
    second: bool = False,
) -> dict[str, Tensor]:
    """Output, gradients, and the second ones along a direction, of what `cut` makes of each."""
    Ev = tensors["value"].shape[-1]
    upstream = torch.randn(*tensors["query"].shape[:-1], Ev).to(tensors["query"].dtype)
    directions = {n: torch.randn(t.shape).to(upstream.dtype) for n, t in tensors.items()}
    leaves = {n: cut(n, t).detach().clone() for n, t in tensors.items()}
    wanted = {n: t.requires_grad_() for n, t in leaves.items() if t.is_floating_point()}
    output = attend(**leaves, **options)
    given = wanted.values()
    gradients = torch.autograd.grad(output, given, cut("output", upstream), create_graph=second)
    found = {"output": output.detach(), **dict(zip(wanted, gradients, strict=True))}
    if second:
        along = sum(
            (g * cut(n, directions[n])).sum() for n, g in zip(wanted, gradients, strict=True)
        )
        again = torch.autograd.grad(along, given, materialize_grads=True)
        found |= {f"second, {n}": t for n, t in zip(wanted, again, strict=True)}
    return {n: t.detach() for n, t in found.items()}


def results(
    case: str,
    dtype: torch.dtype,
    attend: Callable[..., Tensor],
    *,
    alone: bool = False,
    second: bool = False,
    computed: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Of this process; of a function that computes the whole alone, the part that belongs here."""
    tensors, options = made(case, dtype, computed or dtype)
    if not alone:
        found = derivatives(attend, tensors, options, own_part, second=second)
        for name in found:
            if name.endswith(("alibi_slopes", "sinks")):
                dist.all_reduce(found[name])
        return found
    found = derivatives(attend, tensors, options, lambda _, t: t, second=second)
    return {n: own_part(n, t) for n, t in found.items()}


def under(method: str, function: Callable[..., Any], *args: Any) -> Any:
    with torch_attn.distributed.method(method):
        return function(*args)


class Counted:
    """The tensors that this process sends while it is entered."""

    def __enter__(self) -> Counted:
        self.sent: list[tuple[int, int]] = []  # to whom, and how many bytes
        self.start = dist.batch_isend_irecv

        def start(ops: list[dist.P2POp]) -> list[dist.Work]:
            sends = [op for op in ops if op.op is dist.isend]
            self.sent += [(op.peer, op.tensor.nbytes) for op in sends]
            return self.start(ops)

        dist.batch_isend_irecv = start
        return self

    def __exit__(self, *_: object) -> None:
        dist.batch_isend_irecv = self.start
