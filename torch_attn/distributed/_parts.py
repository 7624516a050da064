"""Attention over blocks of keys on different processes: computes parts and merges them.

Let O_b be the output of part b, and l_b its logsumexp. All parts together have the logsumexp l =
log sum_b exp(l_b) and the output sum_b exp(l_b - l) O_b. A backward over a part's keys computes the
part's gradients, from l and the output of all parts. The gradients are then summed over the parts.
A sink counts as one more part. Inputs of half types become float32, so that no summand is rounded
to a half type. l is float64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torch_attn._programs.program import MOST_TABLES
from torch_attn.distributed._exchange import Ring, waiting
from torch_attn.distributed._layout import Call, Layout, Part

__all__ = ["Inputs", "Saved", "check", "forward", "gradients", "tangents", "wide"]


class Inputs(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None


class Saved(NamedTuple):
    """The results of each row, merged from all parts. Derivatives need these results."""

    output: Tensor  # [..., L, Ev], wide
    logsumexp: Tensor  # [..., L, 2]: the pair that the operators keep (params.h)


def wide(tensor: Any) -> Any:
    """Converts half types to float32; returns other tensors unchanged."""
    half = tensor is not None and tensor.dtype in (torch.bfloat16, torch.float16)
    return tensor.float() if half else tensor


def _of_inputs(*some: Any, rest: Any) -> list[Any]:
    """Returns a list with an entry for each tensor, but tables, that may have a derivative.

    The first entries are `some`. Every entry after them is `rest`.
    """
    number = len(torch.ops.attn._sdpa_second.default._schema.returns) - 1
    return [*some, *[rest] * (number - len(some))]


def check(call: Call, inputs: Inputs) -> None:
    """Checks the call like :func:`torch_attn.sdpa`, as if all keys were here, and sends nothing."""
    S, forward = call.layout.lengths[1], torch.ops.attn._sdpa_forward
    given: dict[str, Any] = inputs._asdict()
    given = {n: None if t is None else t.detach() for n, t in given.items()}
    more = S - inputs.key.shape[-2]  # keys on the other processes
    for name in ("key", "value"):
        t = given[name]
        given[name] = t.new_zeros(()).expand(*t.shape[:-2], t.shape[-2] + more, t.shape[-1])
    places = {"cu_seq_q": call.cu_seq_q, "cu_seq_k": call.cu_seq_k}
    packed = {name: t for name, t in places.items() if t is not None}
    on_meta = {n: None if t is None else t.to("meta") for n, t in (given | packed).items()}
    forward(**on_meta, **call.options)
    if packed:
        return  # each part checks its own number of rows
    numbers = {"query_offset": call.query_offset, "key_lengths": call.key_lengths}
    nothing_to_compute = {n: given[n] for n in ("key", "value")}
    query = given["query"][..., :0, :]
    forward(query, **nothing_to_compute, **call.options, **numbers)


class _Rows(NamedTuple):
    """The results of rows, merged over some parts, in float64."""

    output: Tensor  # [..., L, Ev]
    logsumexp: Tensor  # [..., L]
    reference: Tensor  # [..., L]: the first number of the logsumexp's pair
    max_score: Tensor  # [..., L]

    def merged_with(self, other: _Rows) -> _Rows:
        logsumexp = torch.logaddexp(self.logsumexp, other.logsumexp)
        greater = (torch.maximum(a, b) for a, b in zip(self[2:], other[2:], strict=True))
        return _Rows(self.weighed(logsumexp) + other.weighed(logsumexp), logsumexp, *greater)

    def weighed(self, logsumexp: Tensor) -> Tensor:
        return self.output * _weights(self.logsumexp, logsumexp)[..., None]

    def merged_over(self, group: dist.ProcessGroup) -> _Rows:
        """Merges these results with the other processes' results of the same rows."""
        most = torch.stack([self.logsumexp, *self[2:]])
        with waiting(group, "all to merge their parts"):
            dist.all_reduce(most, dist.ReduceOp.MAX, group)
        weights = _weights(self.logsumexp, most[0])[..., None]
        sums = torch.cat([self.output * weights, weights], -1)
        with waiting(group, "all to merge their parts"):
            dist.all_reduce(sums, group=group)
        weights = sums[..., -1:]
        output = (sums[..., :-1] / weights).masked_fill(weights == 0, 0)
        return _Rows(output, most[0] + weights[..., 0].log(), *most[1:])


def _weights(part: Tensor, logsumexp: Tensor) -> Tensor:
    return (part - logsumexp).exp().masked_fill(part.isneginf(), 0)


def _of(part: Part, tensors: Any) -> list[Tensor]:
    """Returns the part's rows of each tensor."""
    return [t[..., part.rows, :] for t in tensors]


def _beside(rows: Tensor, sinks: Tensor) -> Tensor:
    """Repeats each head's number for all rows, ``[..., Hq, L]`` or ``[L]``, in float64."""
    sinks = sinks.double()[..., None]
    return (sinks if rows.ndim > 1 else sinks[0]).expand_as(rows)


def _mask(part: Part, mask: Tensor | None) -> Tensor | None:
    if mask is None:
        return None
    own = mask if mask.shape[-2] == 1 else mask[..., part.rows, :]
    return own if own.shape[-1] == 1 else own[..., part.columns]


def forward(call: Call, inputs: Inputs) -> tuple[Saved, Tensor, Tensor]:
    """Returns `Saved` for derivatives, and each row's logsumexp and greatest score in float64."""
    query, key, value, mask, *of_heads = map(wide, inputs)
    slopes, sinks = of_heads
    own = call.layout.queries[call.layout.rank]
    places, ops = Layout.places(own), torch.ops.attn
    found: list[_Rows | None] = [None] * len(own)

    def add(part: Part, k: Tensor, v: Tensor, columns: Tensor | None) -> None:
        given = query[..., part.rows, :], wide(k), wide(v), columns
        options = part.options | {"alibi_slopes": slopes}
        output, pair, *_, greatest = ops._sdpa_forward(*given, **options)
        logsumexp = ops._logsumexp_of_pair(pair, *given, **options)
        rows = _Rows(output.double(), logsumexp, pair[..., 0].double(), greatest.double())
        place = places.index(part.rows)
        before = found[place]
        found[place] = rows if before is None else before.merged_with(rows)

    for block, tensors in Ring(call, [inputs.key, inputs.value]):
        for part in call.parts(block) if tensors else ():
            k, v = (t[..., part.keys, :] for t in tensors)
            add(part, k, v, _mask(part, mask))
    for place, piece in zip(places, own, strict=True):
        if found[places.index(place)] is None:  # these rows see no key
            part = Part(place, slice(0, 0), slice(0, 0), call.options_of(piece, (0, 0)))
            add(part, key[..., :0, :], value[..., :0, :], None)
    parts = zip(*(rows for rows in found if rows is not None), strict=True)
    rows = _Rows(*(torch.cat(tensors, n - 2 if n == 0 else -1) for n, tensors in enumerate(parts)))
    if call.whole_queries:
        rows = rows.merged_over(call.group)
    greatest = rows.max_score
    if sinks is not None:
        of_rows = _beside(rows.logsumexp, sinks)
        nothing_seen = torch.full_like(of_rows, -torch.inf)
        sink = _Rows(torch.zeros_like(rows.output), of_rows, *[nothing_seen] * 2)
        rows = rows.merged_with(sink)
    given = query, key, value, mask
    pair = ops._pair_of_logsumexp(*rows[1:3], *given, **call.options, alibi_slopes=slopes)
    return Saved(rows.output.to(query.dtype), pair), rows.logsumexp, greatest


def _logsumexp(call: Call, inputs: Inputs, pair: Tensor) -> Tensor:
    given = {n: wide(t) for n, t in inputs._asdict().items()}
    logsumexp: Tensor = torch.ops.attn._logsumexp_of_pair(pair, **given, **call.options)
    return logsumexp


def gradients(
    call: Call,
    inputs: Inputs,
    saved: Saved,
    grad_output: Tensor,
    grad_logsumexp: Tensor | None,
    wanted: Any,
) -> list[Tensor | None]:
    """Returns the gradients of `inputs` in float32 or float64.

    For slopes and sinks, the result is only this process's share of the gradient.
    """
    query, key, value, mask, slopes, sinks = map(wide, inputs)
    grad_output = wide(grad_output)
    of_query, of_mask, of_slopes = (
        torch.zeros_like(t) if t is not None and w else None
        for t, w in zip((query, mask, slopes), (wanted[0], wanted[3], wanted[4]), strict=True)
    )
    own = [torch.zeros_like(t) for t in (key, value)]
    of_keys = of_mask is not None and mask.shape[-1] != 1
    ring = Ring(call, [inputs.key, inputs.value])
    for block, tensors in ring:
        of_block = [torch.zeros_like(wide(t)) for t in tensors]
        for part in call.parts(block) if tensors else ():
            k, v = (wide(t[..., part.keys, :]) for t in tensors)
            columns, options = _mask(part, mask), part.options
            count = k.shape[-2]
            if of_keys and columns is not None and columns.shape[-1] == 1:
                # The operator would broadcast this one column over all keys. So this code adds a
                # hidden key, and a column of the mask for that key.
                k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
                columns = F.pad(columns, (0, 1))
                options = {"key_lengths": torch.ones_like(call.query_offset), **options}
            q, u, output, pair = _of(part, (query, grad_output, *saved[:2]))
            of_rows = None if grad_logsumexp is None else grad_logsumexp[..., part.rows]
            inputs_wanted = _of_inputs(wanted[0], True, True, of_keys, wanted[4], rest=False)
            found = torch.ops.attn._sdpa_backward(
                *(u, of_rows),
                *(output, pair, pair.new_empty(0, dtype=torch.int64), output.new_empty(0)),
                *(q, k, v, columns),
                **options,
                alibi_slopes=slopes,
                grad_input_mask=[*inputs_wanted, *[False] * MOST_TABLES],
            )
            if of_query is not None:
                of_query[..., part.rows, :] += found[0]
            for gradient, more in zip(of_block, found[1:3], strict=True):
                gradient[..., part.keys, :] += more[..., :count, :]
            if of_keys:
                to = (_mask(part, of_mask), found[3][..., :count])
                assert to[0] is not None
                to[0].add_(to[1])
            if of_slopes is not None:
                of_slopes += found[4]
        if block != call.layout.rank:
            ring.bring_back(of_block, block, own)
        else:
            own = [a + b for a, b in zip(own, of_block, strict=True)] if tensors else own
    ring.finish(own)
    # `from_sink` is minus the sink's gradient, for each row. Adding a number to all scores of a row
    # is the same as subtracting it from the sink and adding it to the row's logsumexp. So the
    # number's gradient is `from_sink` plus the gradient of the logsumexp. If all processes have all
    # rows, only process 0 counts these gradients.
    of_all = _logsumexp(call, inputs, saved.logsumexp)
    given = 0 if grad_logsumexp is None else grad_logsumexp.masked_fill(of_all.isneginf(), 0)
    from_sink = saved.output.new_zeros(saved.output.shape[:-1], dtype=torch.float64)
    once = not call.whole_queries or call.layout.rank == 0
    of_sinks = None
    if sinks is not None:
        weights = _weights(_beside(of_all, sinks), of_all) * once
        from_sink = weights * ((grad_output * saved.output).sum(-1, dtype=torch.float64) - given)
        of_sinks = -from_sink[None].sum(-1).sum_to_size(sinks.shape)
    if of_mask is not None and not of_keys:  # the mask is the same for all keys
        of_mask = (from_sink + given * once)[..., None].sum_to_size(of_mask.shape)
    return [of_query, *own, of_mask, of_slopes, of_sinks]


def tangents(call: Call, inputs: Inputs, saved: Saved, directions: Inputs) -> tuple[Tensor, Tensor]:
    """Returns the tangents of output and logsumexp, in float64.

    `directions` are the tangents of the inputs. Part b has the weight ``w_b = exp(l_b - l)``. Then
    ``dl = sum_b w_b dl_b`` and ``dO = sum_b w_b (dO_b + O_b dl_b) - O dl``.
    """
    query, _, _, mask, slopes, sinks = map(wide, inputs)
    of_query, of_key, of_value, of_mask, of_slopes, of_sinks = map(wide, directions)
    moving = [t for t in (of_key, of_value) if t is not None]
    of_all = _logsumexp(call, inputs, saved.logsumexp)
    output, logsumexp = saved.output.double() * 0, torch.zeros_like(of_all)
    ops = torch.ops.attn
    for block, tensors in Ring(call, [inputs.key, inputs.value, *moving]):
        for part in call.parts(block) if tensors else ():
            k, v, *more = (wide(t[..., part.keys, :]) for t in tensors)
            own = query[..., part.rows, :], k, v, _mask(part, mask)
            options = part.options | {"alibi_slopes": slopes}
            found = ops._sdpa_forward(*own, **options, with_rows=False)
            moved, of_pair, _ = ops._sdpa_tangent(
                *found[:4],
                *_of_inputs(
                    None if of_query is None else of_query[..., part.rows, :],
                    *(None if t is None else more.pop(0) for t in (of_key, of_value)),
                    *(_mask(part, of_mask), of_slopes),
                    rest=None,
                ),
                [None],
                *own,
                **options,
            )
            part_of_all = ops._logsumexp_of_pair(found[1], *own, **options)
            weights = _weights(part_of_all, of_all[..., part.rows])
            change = weights * of_pair.sum(-1, dtype=torch.float64)
            logsumexp[..., part.rows] += change
            output[..., part.rows, :] += moved * weights[..., None] + found[0] * change[..., None]
    if call.whole_queries:
        for tensor in (output, logsumexp):
            dist.all_reduce(tensor, group=call.group)
    if sinks is not None and of_sinks is not None:
        weights = _weights(_beside(of_all, sinks), of_all)
        logsumexp += weights * _beside(of_all, of_sinks)
    return output - saved.output * logsumexp[..., None], logsumexp
