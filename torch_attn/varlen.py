"""Attention over packed sequences: their tokens are concatenated, without padding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch
from torch import Tensor

from torch_attn.functional import (
    ScoreOptions,
    _check_whole,
    _integers,
    _number,
    _pair,
    _refuse_others,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["AuxRequest", "varlen_attn", "varlen_attn_out"]


class AuxRequest(NamedTuple):
    """Asks for more results; ``torch.nn.attention.varlen.AuxRequest`` can be passed instead.

    Attributes:
        lse: whether to return the logsumexp of every query.
    """

    lse: bool = False


class VarlenOptions(ScoreOptions, total=False):
    """The arguments of :func:`varlen_attn` from `scale` on."""

    scale: float | None
    enable_gqa: bool
    seqused_k: Tensor | None
    block_table: Tensor | None
    num_splits: int | None
    dropout_p: float
    attn_mask: Tensor | None
    key_scale: Tensor | None
    value_scale: Tensor | None


@overload
def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: None = ...,
    **options: Unpack[VarlenOptions],
) -> Tensor: ...


@overload
def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: AuxRequest,
    **options: Unpack[VarlenOptions],
) -> tuple[Tensor, Tensor]: ...


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: AuxRequest | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    query_offset: Tensor | int | None = None,
    dropout_p: float = 0.0,
    attn_mask: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention within each of several sequences whose tokens are concatenated.

    It takes the arguments of :func:`torch.nn.attention.varlen.varlen_attn` and replaces that
    function. It also runs on a CPU, in every floating dtype and with any head size. It also takes
    the options of :func:`torch_attn.sdpa`, which mean the same here. Sequence n has the queries
    ``cu_seq_q[n] ... cu_seq_q[n + 1] - 1``, and `cu_seq_k` gives the keys of sequence n in the same
    way. A sequence attends to its own keys only. The last query of a sequence is at the position of
    its last key (lower right alignment, as in flash-attn), unless `query_offset` says otherwise.

    Shapes: N sequences have T_q queries and T_k keys together; any sequence may be empty.

    Args:
        query: ``[T_q, Hq, E]``; float64, float32, bfloat16 or float16.
        key: ``[T_k, Hk, E]``, query's dtype and device; with a `block_table`, a pool
            ``[pages, page_size, Hk, E]``.
        value: ``[T_k, Hv, Ev]``; with a `block_table`, a pool ``[pages, page_size, Hv, Ev]``.
        cu_seq_q: int32 or int64 ``[N + 1]``: 0, then the end of each sequence. T_q may be larger
            than the last end; rows of the output after the last end are 0.
        cu_seq_k: as `cu_seq_q`, for the keys. It may be None only with a `block_table`.
        max_q: at least the number of queries of the longest sequence. It changes no result.
        max_k: at least the number of keys of the longest sequence. The last dimension of
            `attn_mask` has this size.
        return_aux: ``AuxRequest(lse=True)`` asks for the logsumexp, too.
        scale: factor of the scores; None means ``1 / sqrt(E)``.
        window_size: (left, right), how many keys a query sees to the left and right of its own
            position; -1 is all. (-1, 0) is causality.
        enable_gqa: allows Hk and Hv to be divisors of Hq.
        seqused_k: int32 or int64 ``[N]``, how many keys of each sequence are in use. The kernel
            does not read the other keys.
        block_table: int32 or int64 ``[N, most pages]``: the pages of the pool that hold the keys
            and values of each sequence, in order. Sequences may share pages. A call with a table
            must also give `seqused_k`, and has no derivatives. The kernel does not read the table's
            entries after the last page in use.
        num_splits: is accepted and changes nothing. The results of a sequence have the same bits,
            whatever other sequences are in the call (see below).
        alibi_slopes, sinks: ``[Hq]``, as for :func:`torch_attn.sdpa`. Arguments without a line here
            are also as for :func:`torch_attn.sdpa`.
        query_offset: the position of each sequence's first query among its keys: integers ``[N]``,
            or one int for all sequences. None is the number of keys in use minus the number of
            queries.
        attn_mask: ``[Hq or 1, T_q, max_k]``, boolean or floating: each query has a row over the
            keys of its own sequence. Differentiable.

        key_scale, value_scale: float32, the scales of a key or value in int8 or float8_e4m3fn, as
            for :func:`torch_attn.sdpa`. key_scale broadcasts to ``[T_k, Hk]``, or with a
            `block_table` to ``[pages, page_size, Hk]``. value_scale broadcasts to the same shape
            with Hv in place of Hk.

    Returns:
        ``[T_q, Hq, Ev]`` in query's dtype. With `return_aux`, the pair of this output and the
        logsumexp, ``[Hq, T_q]``, float32 (float64 for float64), differentiable. A query that may
        attend to no key has the output 0. Its logsumexp is the sink, or -inf if there is no sink.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit, or, on a CPU, starts, lengths or pages
            are out of range. The message names the argument, its value and what is allowed. The
            operator raises this error before the kernel runs. On a GPU, starts, lengths and pages
            are clamped instead, because checking them would synchronise. So the kernel reads and
            writes nothing outside of the tensors.
        TypeError, ValueError: as for :func:`torch_attn.sdpa`, and for a negative `num_splits`.

    Derivatives, memory, precision and determinism are as in :func:`torch_attn.sdpa`. Without
    dropout, output and gradients of a sequence have the same bits as in a call with this sequence
    alone, ``sdpa(..., query_offset=S - L)``. On a GPU they have the same bits only within
    :func:`torch_attn.invariant`. In half types on a GPU, the heads in both calls must also begin at
    addresses that are multiples of 16.

    Example:
        >>> lengths = torch.tensor([5, 0, 12, 7])
        >>> cu_seq = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))  # 0, 5, 5, 17, 24
        >>> query, key, value = torch.randn(3, 24, 8, 64, requires_grad=True)
        >>> output = torch_attn.varlen_attn(
        ...     query, key, value, cu_seq, cu_seq, 12, 12, window_size=(-1, 0)
        ... )
        >>> output.sum().backward()
        >>> output.shape
        torch.Size([24, 8, 64])
    """
    name = "attn::varlen_attention"
    if not all(isinstance(t, Tensor) for t in (query, key, value, cu_seq_q)):
        _refuse_others(name, query=query, key=key, value=value, cu_seq_q=cu_seq_q)
    if num_splits is not None and (not isinstance(num_splits, int) or num_splits < 0):
        raise ValueError(
            f"{name}: num_splits is {num_splits}; it must be None or an int of 0 or more"
        )
    if return_aux is not None and not hasattr(return_aux, "lse"):
        raise TypeError(
            f"{name}: return_aux is {return_aux!r}; it must be None or a "
            "torch_attn.varlen.AuxRequest, such as AuxRequest(lse=True)"
        )
    _check_whole("max_q", max_q)
    _check_whole("max_k", max_k)
    offset = _integers("query_offset", query_offset, query)
    if offset is not query_offset:  # [N]; if cu_seq_q is not [N + 1], the operator raises
        offset = offset.expand(cu_seq_q.flatten()[1:].shape)  # type: ignore[union-attr]
    with_rows: bool = return_aux is not None and return_aux.lse
    output, logsumexp, _ = torch.ops.attn.varlen_attention(
        *(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k),
        scale=None if scale is None else _number(name, "scale", scale),
        window_size=_pair(window_size),
        enable_gqa=enable_gqa,
        seqused_k=seqused_k,
        block_table=block_table,
        softcap=_number(name, "softcap", softcap),
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        query_offset=offset,
        dropout_p=_number(name, "dropout_p", dropout_p),
        attn_mask=attn_mask,
        key_scale=key_scale,
        value_scale=value_scale,
        with_rows=with_rows,
    )
    return (output, logsumexp) if with_rows else output


def varlen_attn_out(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: AuxRequest | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes :func:`varlen_attn` and writes the output into a given tensor, without derivatives.

    Args:
        out: a tensor of the output's shape, dtype and device, with any strides. The function
            overwrites it.
        options: the other options of :func:`varlen_attn`.

    Returns:
        `out` or, if `return_aux` asks for it, the pair of `out` and the logsumexp.

    Raises:
        RuntimeError: :func:`varlen_attn` refuses the arguments, or `out` has another shape, dtype
            or device than the output. In both cases `out` is unchanged.

    Example:
        >>> query, key, value = torch.randn(3, 10, 8, 64)
        >>> cu_seq, out = torch.tensor([0, 4, 10]), torch.empty(10, 8, 64)
        >>> torch_attn.varlen_attn_out(out, query, key, value, cu_seq, cu_seq, 6, 6) is out
        True
    """
    if not isinstance(out, Tensor):
        _refuse_others("attn::varlen_attention", out=out)
    with torch.no_grad():
        call: tuple[Any, ...] = query, key, value, cu_seq_q, cu_seq_k, max_q, max_k
        output, logsumexp = varlen_attn(
            *call,
            return_aux=AuxRequest(lse=True),
            scale=scale,
            window_size=window_size,
            enable_gqa=enable_gqa,
            seqused_k=seqused_k,
            block_table=block_table,
            num_splits=num_splits,
            **options,
        )
        # detach() also drops tangents of forward mode, which no_grad does not stop.
        output, logsumexp = output.detach(), logsumexp.detach()
        if (out.shape, out.dtype, out.device) != (output.shape, output.dtype, output.device):
            raise RuntimeError(
                f"attn::varlen_attention: out is {out.dtype} of shape {list(out.shape)} on "
                f"{out.device}; it must be {output.dtype} of shape {list(output.shape)} on "
                f"{output.device}, as the result is"
            )
        out.copy_(output)
    return (out, logsumexp) if return_aux is not None and return_aux.lse else out


@dataclass(frozen=True, eq=False)
class PackedSequences:
    """Which tokens of `[B, T]` belong to which sequence, in the words of :func:`varlen_attn`.

    A module that packs a batch hands this to the modules that attend.
    """

    cu_seq_q: Tensor  # [N + 1], integers
    cu_seq_k: Tensor
    max_q: int
    max_k: int

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        **options: Any,
    ) -> Tensor:
        """Attends within each sequence, from `[B, H, L, E]` to `[B, L, H, Ev]`.

        If there are more keys than queries, a sequence's last query is at its last key.
        """
        if is_causal:
            window_size = (window_size[0], 0)
        B, _, L, _ = query.shape
        query, key, value = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
        starts = self.cu_seq_q, self.cu_seq_k, self.max_q, self.max_k
        output: Any = varlen_attn(query, key, value, *starts, window_size=window_size, **options)
        return output.view(B, L, *output.shape[1:]).contiguous()  # type: ignore[no-any-return]

    def to(self, *args: Any, **kwargs: Any) -> PackedSequences:
        """Moves the starts to another device."""
        q, k = (t.to(*args, **kwargs) for t in (self.cu_seq_q, self.cu_seq_k))
        return replace(self, cu_seq_q=q, cu_seq_k=k)
