"""Attention over a sequence whose blocks are plain tensors on the processes of a group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_attn.distributed import _parts
from torch_attn.distributed._exchange import exchanged, told
from torch_attn.distributed._layout import Call, Layout, Piece, arguments
from torch_attn.distributed._methods import choose, is_traced
from torch_attn.distributed._parts import Inputs, Saved, wide
from torch_attn.functional import _integers, _out_of_tensor, _pair, _refuse_others

__all__ = ["all_rows", "attend", "group_of", "sdpa"]

_NAME = "torch_attn.distributed.sdpa"


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    group: dist.ProcessGroup | None = None,
    lengths: tuple[int, int] | None = None,
    **options: Any,
) -> Tensor:
    """:func:`torch_attn.sdpa` over a sequence whose blocks are on the processes of a group.

    Process r calls this function with block r of the queries and block r of the keys and values.
    The result on process r is block r of the output of :func:`torch_attn.sdpa` for the whole
    sequence. Blocks may have any length, also 0. All processes must call this function together,
    with the same options.

    Args:
        query: ``[..., Hq, L_r, E]``, block r of the ``L`` queries.
        key: ``[..., Hk, S_r, E]``, block r of the ``S`` keys, query's dtype and device.
        value: ``[..., Hv, S_r, Ev]``.
        attn_mask: broadcasts to ``[..., Hq, L_r, S]``: the rows of block r over all keys.
        is_causal: hides keys after a query's position in the whole sequence.
        group: the processes; None means all.
        lengths: ``(L, S)`` of the whole sequence, if the blocks are cut as by :func:`torch.chunk`.
            If None, the processes tell each other the lengths of their blocks in each call.
        options: scale, enable_gqa, window_size, softcap, query_offset, key_lengths, alibi_slopes
            and sinks, as for :func:`torch_attn.sdpa`. These options are for the whole sequence, and
            the same on all processes.

    Returns:
        ``[..., Hq, L_r, Ev]``, query's dtype. Backward and forward mode give first derivatives with
        respect to query, key, value, mask, slopes and sinks. There are second derivatives unless
        the method is "ring" (:func:`method`). Gradients of slopes and sinks are this process's
        share; the shares of the group add up to the gradient. The bits are the same on every run
        with the same number of processes. In a ring's forward, a process holds at most three blocks
        of keys and values.

    Raises:
        RuntimeError: shapes, dtypes or devices that do not fit, as for :func:`torch_attn.sdpa`;
            `lengths` that do not fit the blocks; a second derivative of a ring; a process that has
            ended or is later than the group's timeout.
        TypeError: an unknown option; dropout_p is not supported.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        >>> query, key, value = torch.randn(3, 1, 8, 100, 64)
        >>> torch_attn.distributed.sdpa(query, key, value, is_causal=True).shape
        torch.Size([1, 8, 100, 64])
        >>> dist.destroy_process_group()
    """
    _refuse_others(_NAME, query=query, key=key, value=value)
    if min(query.ndim, key.ndim) < 2:
        shapes = f"query is {list(query.shape)} and key {list(key.shape)}"
        raise RuntimeError(f"{_NAME}: {shapes}; they must have two dimensions or more")
    if lengths is not None and (not isinstance(lengths, (tuple, list)) or len(lengths) != 2):
        raise ValueError(f"{_NAME}: lengths is {lengths}; it must be a pair (L, S) of ints")
    group = group_of(_NAME, group)
    L, S = query.shape[-2], key.shape[-2]
    if lengths is None:
        queries, keys = told(L, S, query.device, group)
    else:
        queries, keys = (Layout.chunks(n, group.size()) for n in lengths)
    layout = Layout(group.rank(), queries, keys)
    return attend(layout, group, query, key, value, attn_mask, is_causal, **options)


def group_of(name: str, group: Any) -> dist.ProcessGroup:
    """Returns the group, or all processes for None. This process must be in the group."""
    if not dist.is_initialized():
        raise RuntimeError(
            f"{name}: there are no processes yet: call torch.distributed's init_process_group"
        )
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{name}: {group!r} is no process group, or one that this process is not in"
        )
    return group


def attend(
    layout: Layout,
    group: dist.ProcessGroup,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Computes :func:`sdpa`, where `layout` says which pieces each process has."""
    if torch.compiler.is_compiling() or is_traced(query):
        raise RuntimeError(
            f"{_NAME}: it cannot be part of a compiled function; call it "
            "outside, or give torch_attn.sdpa DTensors"
        )
    if any(hasattr(t, "placements") for t in (query, key, value)):
        raise TypeError(
            f"{_NAME}: query, key or value is a DTensor; give these to "
            "torch_attn.sdpa, which knows where their parts are"
        )
    numbers = arguments("sdpa_with_weights", of_tensors=False) | {"is_causal": is_causal}
    tensors = dict.fromkeys(("query_offset", "key_lengths", "alibi_slopes", "sinks"))
    for n, given in options.items():
        if n not in (numbers.keys() | tensors.keys()) - {"dropout_p"}:
            raise TypeError(f"{_NAME}() got an unexpected keyword argument '{n}'")
        if n in numbers:
            numbers[n] = _out_of_tensor(_NAME, n, given)
        else:
            tensors[n] = given
    own = tuple(Layout.length(x[layout.rank]) for x in (layout.queries, layout.keys))
    if own != (query.shape[-2], key.shape[-2]):
        raise RuntimeError(
            f"{_NAME}: lengths is {layout.lengths}, of which process "
            f"{layout.rank} of {layout.world} has {own[0]} queries and {own[1]} keys, but query "
            f"has {query.shape[-2]} and key {key.shape[-2]}"
        )
    if isinstance(attn_mask, Tensor) and attn_mask.ndim < 2:
        attn_mask = attn_mask.reshape(1, -1)  # the same for all queries
    if torch.is_autocast_enabled(query.device.type):
        query, key, value, attn_mask = map(_cast, (query, key, value, attn_mask))
    numbers["window_size"] = _pair(numbers["window_size"])
    offset, used = (_integers(n, tensors[n], query) for n in ("query_offset", "key_lengths"))
    offset = torch.zeros((), dtype=torch.int64, device=query.device) if offset is None else offset
    call = Call(layout, group, numbers, offset, used)
    inputs = Inputs(query, key, value, attn_mask, tensors["alibi_slopes"], tensors["sinks"])
    _parts.check(call, inputs)
    way = {"ring": _ring, "gather": _gathered, "all_to_all": _by_heads}
    output = way[choose(call, query, key, value)](call, inputs)
    if query.ndim > 2 and query.transpose(-3, -2).is_contiguous():  # keeps the query's layout
        output = output.transpose(-3, -2).contiguous().transpose(-3, -2)
    return output


def _cast(tensor: Any) -> Any:
    """Casts an argument as autocast does for the operators."""
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def _ring(call: Call, inputs: Inputs) -> Tensor:
    numbers = call.query_offset, call.key_lengths
    output: Tensor = _Ring.apply(call, *numbers, *inputs)[0]  # type: ignore[no-untyped-call]
    return output


def _gathered(call: Call, inputs: Inputs) -> Tensor:
    """Gathers all keys on each process.

    Half types become float32, so that no part of a gradient is rounded to a half type.
    """
    layout, (_, S) = call.layout, call.layout.lengths
    key, value = (
        all_rows(call.group, layout.keys, layout.rank, [wide(t)] * layout.world)
        for t in (inputs.key, inputs.value)
    )
    own, mask = layout.queries[layout.rank], inputs.attn_mask
    outputs = []
    for piece, rows in zip(own, Layout.places(own), strict=True):
        columns = mask if mask is None or mask.shape[-2] == 1 else mask[..., rows, :]
        given = wide(inputs.query)[..., rows, :], key, value, wide(columns)
        of_heads = {"alibi_slopes": wide(inputs.alibi_slopes), "sinks": wide(inputs.sinks)}
        options = call.options_of(piece, (0, S)) | of_heads
        outputs.append(torch.ops.attn._sdpa_forward(*given, **options, with_rows=False)[0])
    return torch.cat(outputs, -2).to(inputs.query.dtype)


def _by_heads(call: Call, inputs: Inputs) -> Tensor:
    """Gives each process all rows of some heads, and sends the outputs back."""
    layout, (L, S) = call.layout, call.layout.lengths
    rank, world, queries = layout.rank, layout.world, layout.queries
    query, key, value = (
        all_rows(call.group, of_all, rank, t.tensor_split(world, -3))
        for of_all, t in (
            (queries, inputs.query),
            (layout.keys, inputs.key),
            (layout.keys, inputs.value),
        )
    )
    mask = inputs.attn_mask
    if mask is not None:
        has_heads = mask.ndim > 2 and mask.shape[-3] > 1
        # If a process has one query, one row of a mask may be for this query or for all queries.
        if any(Layout.length(pieces) == 1 for pieces in queries):
            mask = mask.expand(*mask.shape[:-2], Layout.length(queries[rank]), mask.shape[-1])
            is_cut = True
        else:
            is_cut = mask.shape[-2] != 1
        parts = mask.tensor_split(world, -3) if has_heads else [mask] * world
        mask = all_rows(call.group, queries, rank, parts) if is_cut else parts[rank]
    of_heads = {
        name: None if t is None else t.tensor_split(world, -1)[rank]
        for name, t in (("alibi_slopes", inputs.alibi_slopes), ("sinks", inputs.sinks))
    }
    options = call.options_of((0, L), (0, S)) | of_heads
    output = torch.ops.attn._sdpa_forward(query, key, value, mask, **options, with_rows=False)[0]
    back = [
        torch.cat([output[..., slice(*piece), :] for piece in pieces], -2) for pieces in queries
    ]
    shapes = [back[rank].shape] * world
    return torch.cat(exchanged(call.group, shapes, back), -3)


def all_rows(group: Any, of_all: list[list[Piece]], rank: int, parts: Any) -> Tensor:
    """Sends ``parts[r]`` to process r. Returns the rows that all processes send here, in order."""
    shape = parts[rank].shape
    shapes = [(*shape[:-2], Layout.length(pieces), shape[-1]) for pieces in of_all]
    blocks = exchanged(group, shapes, parts)
    pieces = [
        (piece, block[..., place, :])
        for own, block in zip(of_all, blocks, strict=True)
        for piece, place in zip(own, Layout.places(own), strict=True)
    ]
    return torch.cat([rows for _, rows in sorted(pieces, key=lambda piece: piece[0])], -2)


class _Ring(torch.autograd.Function):
    """Computes a call by a ring.

    It saves the offset and the key lengths for the backward, together with the inputs. So autograd
    raises an error if one of these tensors is changed in place.
    """

    @staticmethod
    def forward(
        call: Call, offset: Tensor, used: Tensor | None, *tensors: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        call = replace(call, query_offset=offset, key_lengths=used)
        saved, *_ = _parts.forward(call, Inputs(*tensors))
        return saved.output.to(tensors[0].dtype, copy=True), *saved

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call, *tensors = inputs
        ctx.save_for_backward(*tensors, *output[1:])
        ctx.save_for_forward(*tensors, *output[1:])
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def saved(ctx: Any) -> tuple[Call, Inputs, Saved]:
        offset, used, *tensors, output, pair = ctx.saved_tensors
        call = replace(ctx.call, query_offset=offset, key_lengths=used)
        return call, Inputs(*tensors), Saved(output, pair)

    @staticmethod
    def backward(ctx: Any, grad_output: Any, *_: Any) -> tuple[Tensor | None, ...]:
        call, inputs, saved = _Ring.saved(ctx)
        wanted = ctx.needs_input_grad[3:]
        if grad_output is None:  # other processes still need gradients of keys
            grad_output = torch.zeros_like(saved.output, dtype=inputs.query.dtype)
        with torch.no_grad():
            found = _parts.gradients(call, inputs, saved, grad_output, None, wanted)
        results = [
            g.to(t.dtype) if t is not None and g is not None and w else None
            for t, g, w in zip(inputs, found, wanted, strict=True)
        ]
        gradients = _Once.apply(*results, *inputs, grad_output)  # type: ignore[no-untyped-call]
        return None, None, None, *gradients

    @staticmethod
    def jvp(ctx: Any, *directions: Any) -> tuple[Tensor, None, None]:
        call, inputs, saved = _Ring.saved(ctx)
        moved = _parts.tangents(call, inputs, saved, Inputs(*directions[3:]))[0]
        return moved.to(inputs.query.dtype), None, None


class _Once(torch.autograd.Function):
    """Returns the gradients unchanged. A second derivative raises an error."""

    @staticmethod
    def forward(*tensors: Tensor | None) -> Any:
        gradients = tensors[: len(Inputs._fields)]
        return tuple(None if g is None else g.clone() for g in gradients)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        raise RuntimeError(
            f"{_NAME}: a second derivative is asked for, which a ring lacks; "
            'call it within torch_attn.distributed.method("gather") or method("all_to_all")'
        )
