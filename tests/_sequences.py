"""Attention over a sequence that several processes have, and what it is to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

import torch_attn

METHODS = ["ring", "gather", "all_to_all"]

ALL: dict[str, Any] = {
    "attn_mask": (4, 9, 11),
    "window_size": (6, 2),
    "query_offset": torch.tensor([1, 3]),
    "key_lengths": torch.tensor([8, 11]),
    "softcap": 3.0,
    "alibi_slopes": (4,),
    "sinks": (4,),
}
FAR = torch.tensor([2**61, -(2**61)])
EXTREME = torch.tensor([2**62 - 1, 1 - 2**62])
OF_32_BITS = torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32)
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
    "windows from far offsets": (
        *(5, 9, 2, 2),
        {"query_offset": FAR, "window_size": (2**61 + 1, 2**61 - 3)},
    ),
    "lengths": (6, 9, 2, 1, {"key_lengths": torch.tensor([7, 0])}),
    "soft cap": (8, 8, 2, 2, {"softcap": 2.0}),
    "slopes": (7, 9, 2, 2, {"alibi_slopes": (2,), "is_causal": True}),
    "sinks": (6, 9, 2, 2, {"sinks": (2, 2), "key_lengths": torch.tensor([7, 0])}),
    "mask": (7, 9, 2, 2, {"attn_mask": (2, 7, 9)}),
    "mask of keys": (5, 3, 2, 2, {"attn_mask": (5, 3), "softcap": 3.0}),
    "mask of rows": (7, 7, 2, 2, {"attn_mask": (7, 1), "sinks": (2,)}),
    "boolean mask": (7, 9, 2, 2, {"attn_mask": "bool"}),
    "all": (9, 11, 4, 2, ALL),
}
# Each was wrong once.
FOUND: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {
    "two dimensions": (
        *(5, 9, 1, 1),
        {"lead": (), "attn_mask": (5, 9), "alibi_slopes": (1,), "sinks": (1,)},
    ),
    "no keys, a mask": (5, 0, 2, 2, {"attn_mask": (2, 5, 0), "sinks": (2, 2)}),
    "mask of rows that see no keys": (
        *(7, 7, 2, 2),
        {"attn_mask": (2, 7, 1), "is_causal": True, "query_offset": -3},
    ),
    "extreme offsets": (5, 9, 2, 2, {"query_offset": EXTREME, "is_causal": True, "sinks": (2,)}),
    "windows from extreme offsets": (
        *(5, 9, 2, 2),
        {"query_offset": EXTREME, "window_size": (2**62, 2**62 - 4)},
    ),
    "windows from offsets of 32 bits": (
        *(5, 9, 2, 2),
        {"query_offset": OF_32_BITS, "window_size": (2**31, 2**31 - 3)},
    ),
}
CASES |= FOUND
LEARNED = ("attn_mask", "alibi_slopes", "sinks")
CUT = "output", "tangent", "query", "key", "value", "attn_mask"  # others are shares of a process


def cases(*regressions: str) -> list[Any]:
    return [
        pytest.param(case, marks=pytest.mark.regression if case in regressions else ())
        for case in CASES
    ]


def made(case: str, dtype: torch.dtype, computed: torch.dtype) -> tuple[dict[str, Tensor], Any]:
    """The tensors and the other options: numbers of a dtype, in another."""
    torch.manual_seed(0)
    L, S, heads, key_heads, given = CASES[case]
    lead, of_keys = given.get("lead", (2, heads)), given.get("lead", (2, key_heads))
    shapes = {"query": (*lead, L, 8), "key": (*of_keys, S, 8), "value": (*of_keys, S, 5)}
    options: dict[str, Any] = {"enable_gqa": heads != key_heads}
    for name, value in given.items():
        if name in LEARNED and value != "bool":
            shapes[name] = value
        elif name != "lead" and value != "bool":
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
    attend: Callable[..., Any],
    tensors: dict[str, Tensor],
    options: dict[str, Any],
    cut: Callable[[str, Tensor], Any],
    *,
    second: bool = False,
    tangent: bool = False,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Output, logsumexp where `attend` returns it, and gradients, of what `cut` makes of each.

    If asked, the second ones along a direction, and the output's derivative along it. The gradient
    that is given to the backward is drawn in `dtype`, then cast to the query's.
    """
    query, Ev = tensors["query"], tensors["value"].shape[-1]
    shapes = {"output": (*query.shape[:-1], Ev), "logsumexp": query.shape[:-1]}
    drawn = {n: torch.randn(shape).to(dtype or query.dtype) for n, shape in shapes.items()}
    upstream = {n: cut(n, t.to(query.dtype)) for n, t in drawn.items()}
    directions = {n: cut(n, torch.randn(t.shape).to(query.dtype)) for n, t in tensors.items()}
    leaves = {n: cut(n, t).detach().clone() for n, t in tensors.items()}
    wanted = {n: t.requires_grad_() for n, t in leaves.items() if t.is_floating_point()}
    outputs = attend(**leaves, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    given = wanted.values()
    gradients = torch.autograd.grad(
        outputs, given, [*upstream.values()][: len(outputs)], create_graph=second
    )
    found = {
        **dict(zip(shapes, outputs, strict=False)),
        **dict(zip(wanted, gradients, strict=True)),
    }
    if second:
        along = sum((g * directions[n]).sum() for n, g in zip(wanted, gradients, strict=True))
        again = torch.autograd.grad(along, given, materialize_grads=True)
        found |= {f"second, {n}": t for n, t in zip(wanted, again, strict=True)}
    if tangent:
        with forward_ad.dual_level():
            duals = {n: forward_ad.make_dual(t.detach(), directions[n]) for n, t in wanted.items()}
            output = attend(**{**leaves, **duals}, **options)
            found["tangent"] = forward_ad.unpack_dual(output).tangent
    return {n: t.detach() for n, t in found.items()}


def results(
    case: str,
    dtype: torch.dtype,
    attend: Callable[..., Tensor],
    *,
    alone: bool = False,
    computed: torch.dtype | None = None,
    **asked: Any,
) -> dict[str, Tensor]:
    """The results of this process; if `alone`, cut from the whole that `attend` computes."""
    tensors, options = made(case, dtype, computed or dtype)
    asked["dtype"] = dtype
    if not alone:
        found = derivatives(attend, tensors, options, own_part, **asked)
        for name in found:
            if name.endswith(("alibi_slopes", "sinks")):
                dist.all_reduce(found[name])
        return found
    found = derivatives(attend, tensors, options, lambda _, t: t, **asked)
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
