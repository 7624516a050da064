"""Attention of blocks of a sequence on the processes of a group: parts that are merged.

A part is a call over some of the keys. With O_b the output of part b and l_b its logsumexp, that of
all parts is l = log sum_b exp(l_b), and the output sum_b exp(l_b - l) O_b. The gradients of a part
are those of a call over its keys whose rows have the output and the logsumexp of all. Half types
are computed in float32, so that nothing is rounded before it is added; l is float64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torch_attn.distributed._blocks import Blocks, Exchange
from torch_attn.functional import _integers, _numbers, _pair

__all__ = ["sdpa"]


class Call(NamedTuple):
    """What is the same for all parts."""

    blocks: Blocks
    group: dist.ProcessGroup
    options: dict[str, Any]  # of the operators, but for what depends on the part
    query_offset: Tensor
    key_lengths: Tensor | None

    def of_part(self, block: int) -> dict[str, Any]:
        """The options of the call over a block of keys, which are counted from its first one."""
        first, last = self.blocks.keys[block : block + 2]
        lengths = self.key_lengths
        return {
            **self.options,
            "query_offset": self.query_offset + (self.blocks.queries[self.blocks.rank] - first),
            "key_lengths": None if lengths is None else (lengths - first).clamp(0, last - first),
        }

    def columns(self, mask: Tensor | None, block: int) -> Tensor | None:
        """The part of a mask that belongs to a block of keys."""
        if mask is None:
            return None
        first, last = self.blocks.keys[block : block + 2]
        own = mask.expand(*mask.shape[:-1], last) if mask.shape[-1] == 1 else mask
        return _wide(own[..., first:last])


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    group: dist.ProcessGroup | None = None,
    lengths: tuple[int, int] | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    query_offset: Tensor | int | None = None,
    key_lengths: Tensor | int | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """:func:`torch_attn.sdpa` over a sequence whose blocks lie on the processes of a group.

    Process r gives block r of the queries and block r of the keys and values, and gets block r of
    the output: that of :func:`torch_attn.sdpa` of the whole. Blocks may have any lengths, 0 too. No
    process ever holds more than three blocks of keys and values. All call it together, with the
    same options.

    Args:
        query: ``[..., Hq, L_r, E]``, a block of ``L`` queries.
        key: ``[..., Hk, S_r, E]``, a block of ``S`` keys, query's dtype and device.
        value: ``[..., Hv, S_r, Ev]``.
        attn_mask: broadcasts to ``[..., Hq, L_r, S]``: the rows of the own queries over all keys.
        is_causal: whether a query sees no key behind its position, counted from the whole's start.
        group: the processes; None means all.
        lengths: ``(L, S)`` of the whole, where the blocks are those of :func:`torch.chunk`. None:
            the processes tell each other how long their blocks are, in each call.
        scale, enable_gqa, window_size, softcap, query_offset, key_lengths, alibi_slopes, sinks: as
            of :func:`torch_attn.sdpa`, for the whole: the same on all processes.

    Returns:
        ``[..., Hq, L_r, Ev]``, query's dtype. First derivatives of query, key, value, mask, slopes
        and sinks; those of slopes and sinks are this process's share, whose sum over the group is
        the gradient. The same bits on every run with as many processes.

    Raises:
        RuntimeError: shapes, dtypes or devices that do not fit, as of :func:`torch_attn.sdpa`;
            lengths that are not those of the blocks; a second derivative; a process that has ended
            or is later than the group's timeout.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        >>> query, key, value = torch.randn(3, 1, 8, 100, 64)
        >>> torch_attn.distributed.sdpa(query, key, value, is_causal=True).shape
        torch.Size([1, 8, 100, 64])
        >>> dist.destroy_process_group()
    """
    scale, softcap = _numbers("torch_attn.distributed.sdpa", scale=scale, softcap=softcap)
    group = group or dist.group.WORLD
    assert group is not None
    offset = _integers("query_offset", query_offset, query)
    offset = query.new_zeros((), dtype=torch.int64) if offset is None else offset
    used = _integers("key_lengths", key_lengths, query)
    window = _pair(window_size)
    L, S = query.shape[-2], key.shape[-2]
    if lengths is None:
        queries, keys = Blocks.gathered(L, S, query.device, group)
    else:
        queries, keys = (Blocks.starts(n, group.size()) for n in lengths)
    rank = group.rank()
    own = queries[rank + 1] - queries[rank], keys[rank + 1] - keys[rank]
    if own != (L, S):
        raise RuntimeError(
            f"torch_attn.distributed.sdpa: lengths is {lengths}, of which process {rank} of "
            f"{group.size()} has {own[0]} queries and {own[1]} keys, but query has {L} and key {S}"
        )
    needed = _needed(queries, keys, is_causal, window, offset, used)
    options = {
        "dropout_p": 0.0,
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": enable_gqa,
        "softcap": softcap,
        "window_size": window,
    }
    call = Call(Blocks(rank, queries, keys, needed), group, options, offset, used)
    output: Tensor = _Attention.apply(query, key, value, attn_mask, alibi_slopes, sinks, call)  # type: ignore[no-untyped-call]
    return output


def _needed(
    queries: list[int],
    keys: list[int],
    is_causal: bool,
    window: list[int],
    offset: Tensor,
    used: Tensor | None,
) -> Any:
    """Whether some query of process r may see some key of block b, as all processes find it."""
    left, right = window
    right = 0 if is_causal and right != 0 else right
    least, most = (int(x) for x in offset.aminmax())
    longest = keys[-1] if used is None else int(used.max())

    def needed(r: int, b: int) -> bool:
        first, last = queries[r] + least, queries[r + 1] - 1 + most
        begins, ends = keys[b], min(keys[b + 1], longest)
        return (
            queries[r] < queries[r + 1]
            and begins < ends
            and (right < 0 or begins <= last + right)
            and (left < 0 or ends - 1 >= first - left)
        )

    return needed


class Rows(NamedTuple):
    """What is known of rows after some parts, in float64."""

    output: Tensor  # [..., L, Ev]
    logsumexp: Tensor  # [..., L]
    reference: Tensor  # [..., L]: what the pair of the logsumexp is to begin with (params.h)

    def merged_with(self, other: Rows) -> Rows:
        logsumexp = torch.logaddexp(self.logsumexp, other.logsumexp)
        reference = torch.maximum(self.reference, other.reference)
        return Rows(self.weighed(logsumexp) + other.weighed(logsumexp), logsumexp, reference)

    def weighed(self, logsumexp: Tensor) -> Tensor:
        weights = (self.logsumexp - logsumexp).exp()
        return self.output * weights.masked_fill(self.logsumexp.isneginf(), 0)[..., None]


def _wide(tensor: Tensor) -> Tensor:
    """Half types as float32; others, and boolean masks, as they are."""
    half = tensor.dtype in (torch.bfloat16, torch.float16)
    return tensor.float() if half else tensor


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        slopes: Tensor | None,
        sinks: Tensor | None,
        call: Call,
    ) -> Tensor:
        ops, wide = torch.ops.attn, _wide(query)
        of_heads = None if slopes is None else _wide(slopes)
        unit = {name: call.options[name] for name in ("scale", "softcap")}
        rows = None
        for block, tensors in Exchange(call.blocks, [key, value], call.group):
            if not tensors and (rows is not None or block != call.blocks.rank):
                continue
            # Where no block is seen, the own one without its keys.
            k, v = tensors or (t[..., :0, :] for t in (key, value))
            options = call.of_part(block) | ({} if tensors else {"key_lengths": None})
            more = call.columns(mask, block) if tensors else None, of_heads
            output, pair, *_ = ops._sdpa_forward(wide, _wide(k), _wide(v), *more, **options)
            logsumexp = ops._logsumexp_of_pair(pair, wide, *more, **unit)
            part = Rows(output.double(), logsumexp, pair[..., 0].double())
            rows = part if rows is None else rows.merged_with(part)
        assert rows is not None
        if sinks is not None:
            of_rows = sinks.double()[..., None].expand_as(rows.logsumexp)
            rows = rows.merged_with(Rows(torch.zeros_like(rows.output), of_rows, rows.reference))
        ctx.call = call
        output = rows.output.to(wide.dtype)
        ctx.save_for_backward(query, key, value, mask, slopes, sinks, output, *rows[1:])
        return output.to(query.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, output, logsumexp, reference = ctx.saved_tensors
        with torch.no_grad():
            gradients = _gradients(
                ctx.call,
                inputs,
                Rows(output, logsumexp, reference),
                _wide(grad_output),
                ctx.needs_input_grad,
            )
        results = [
            None if t is None or g is None or not wanted else g.to(t.dtype)
            for t, g, wanted in zip(inputs, gradients, ctx.needs_input_grad, strict=False)
        ]
        return *_Once.apply(results, *inputs, grad_output), None  # type: ignore[no-untyped-call]


def _gradients(
    call: Call,
    inputs: list[Tensor | None],
    rows: Rows,
    grad_output: Tensor,
    wanted: tuple[bool, ...],
) -> list[Tensor | None]:
    query, key, value, mask, slopes, sinks = inputs
    assert query is not None
    assert key is not None
    assert value is not None
    ops, wide = torch.ops.attn, _wide(query)
    of_heads = None if slopes is None else _wide(slopes)
    unit = {name: call.options[name] for name in ("scale", "softcap")}
    pair = ops._pair_of_logsumexp(*rows[1:], wide, mask, of_heads, **unit)
    saved = rows.output, pair, pair.new_empty(0, dtype=torch.int64), wide.new_empty(0)
    of_query, of_mask, of_slopes = (
        torch.zeros_like(_wide(t)) if t is not None and w else None
        for t, w in zip((query, mask, slopes), (wanted[0], wanted[3], wanted[4]), strict=True)
    )
    own = [torch.zeros_like(_wide(t)) for t in (key, value)]
    of_keys = of_mask is not None and of_mask.shape[-1] > 1
    exchange = Exchange(call.blocks, [key, value], call.group)
    for block, tensors in exchange:
        found: tuple[Tensor, ...] = ()
        if tensors:
            k, v = (_wide(t) for t in tensors)
            columns, options = call.columns(mask, block), call.of_part(block)
            if of_keys and columns is not None and columns.shape[-1] == 1:
                # To an operator it would be the same for all keys: one that nobody sees is added.
                k, v, columns = (
                    F.pad(k, (0, 0, 0, 1)),
                    F.pad(v, (0, 0, 0, 1)),
                    F.pad(columns, (0, 1)),
                )
                if options["key_lengths"] is None:
                    options["key_lengths"] = torch.ones_like(call.query_offset)
            found = ops._sdpa_backward(
                *(grad_output, None, wide, k, v, columns, of_heads, None, *saved),
                **options,
                grad_input_mask=[wanted[0], True, True, of_keys, wanted[4], False],
            )
            count = tensors[0].shape[-2]
            found = (found[0], *(g[..., :count, :] for g in found[1:3]), *found[3:])
            if of_query is not None:
                of_query += found[0]
            if of_slopes is not None:
                of_slopes += found[4]
            if of_keys and of_mask is not None:
                first, last = call.blocks.keys[block : block + 2]
                of_mask[..., first:last] = found[3][..., :count]
        if block != call.blocks.rank:
            exchange.bring_back(list(found[1:3]), block, own)
        elif found:
            own = [a + b for a, b in zip(own, found[1:3], strict=True)]
    exchange.finish(own)
    of_sinks = None
    if sinks is not None:
        weights = (sinks.double()[..., None] - rows.logsumexp).exp()
        weights = weights.masked_fill(sinks.isneginf()[..., None], 0)
        of_rows = weights * (grad_output * rows.output).sum(-1, dtype=torch.float64)
        of_sinks = -of_rows.sum(-1).sum_to_size(sinks.shape)
        if of_mask is not None and not of_keys:  # the same for all keys, which takes from the sink
            of_mask = of_rows[..., None].sum_to_size(of_mask.shape)
    return [of_query, *own, of_mask, of_slopes, of_sinks]


class _Once(torch.autograd.Function):
    """Hands gradients on; a derivative of them is an error, for all that they depend on."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor | None], *_: Tensor | None) -> Any:
        return tuple(gradients)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        raise RuntimeError(
            "torch_attn.distributed.sdpa: a second derivative is asked for, of which attention "
            "over several processes has none; gather the keys and call torch_attn.sdpa"
        )
