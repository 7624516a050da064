"""FlexAttention on a CPU: the caller's functions change scores and hide keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from torch_attn._programs.errors import UnsupportedError
from torch_attn._programs.program import MaskMod, Program, ScoreMod, remembered
from torch_attn._replacement.of_torch import original
from torch_attn.functional import _number, _refuse_others

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask
    from typing_extensions import TypeIs

__all__ = ["UnsupportedError", "flex_attention"]

_NAME = "attn::flex_attention"
_NO_MASK = 1 << 30  # the block size of a BlockMask that hides nothing


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = ...,
    block_mask: BlockMask | MaskMod | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    return_lse: Literal[False] = ...,
    kernel_options: Any = ...,
    *,
    return_aux: None = ...,
) -> Tensor: ...


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = ...,
    block_mask: BlockMask | MaskMod | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    return_lse: Literal[True] = ...,
    kernel_options: Any = ...,
    *,
    return_aux: None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = ...,
    block_mask: BlockMask | MaskMod | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    return_lse: Literal[False] = ...,
    kernel_options: Any = ...,
    *,
    return_aux: AuxRequest,
) -> tuple[Tensor, AuxOutput]: ...


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | MaskMod | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Attention whose scores and mask are functions of the pair of a query and a key.

    It takes the arguments of :func:`torch.nn.attention.flex_attention.flex_attention`, and replaces
    that function on a CPU, where PyTorch's function lacks the derivatives of query, key and value.
    No machine code is generated. Each call runs `score_mod` and the mask_mod once. A function that
    uses nothing but operators and captured numbers, such as ``i >= j``, may run less often, because
    its operations are remembered. Some parts of these functions depend on both the query and the
    key. The kernels evaluate such parts inside their tiles. The score of a pair is
    ``score_mod(z, b, h, q_idx, kv_idx)``, where ``z = scale <query, key>``. A query does not see a
    key where ``mask_mod(b, h, q_idx, kv_idx)`` is False.

    Args:
        query: ``[B, Hq, L, E]``; float64, float32, bfloat16 or float16.
        key: ``[B, Hk, S, E]``, query's dtype and device.
        value: ``[B, Hk, S, Ev]``, query's dtype and device.
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx) -> score``, on 0-d tensors. `score` is
            float32 (float64 for float64). `h` is the head of the query.
        block_mask: a :class:`torch.nn.attention.flex_attention.BlockMask`, or a mask_mod itself,
            ``mask_mod(b, h, q_idx, kv_idx) -> bool``. Blocks that a BlockMask does not list are
            hidden. Full blocks are visible. In partial blocks the mask_mod of the BlockMask
            decides. PyTorch's compiled FlexAttention treats blocks in the same way.
        scale: factor of the scores; None means ``1 / sqrt(E)``.
        enable_gqa: allows Hk to be a divisor of Hq.
        return_lse: whether to return the logsumexp, too.
        kernel_options: is accepted and changes nothing.
        return_aux: PyTorch's ``AuxRequest(lse=..., max_scores=...)``, which requests further
            results.

    Returns:
        The output, ``[B, Hq, L, Ev]`` in query's dtype. With `return_lse`, the pair of the output
        and the logsumexp, ``[B, Hq, L]``, float32 (float64 for float64), differentiable. With
        `return_aux`, the pair of the output and an ``AuxOutput`` with the requested results. A
        query that sees no key has the output 0 and the logsumexp -inf.

    Raises:
        torch_attn.flex.UnsupportedError: a function does something that the kernels cannot compute
            for every pair. The message names the operation and the line. It is a RuntimeError.
        RuntimeError: shapes, dtypes or indices do not fit.
        TypeError: query, key or value is no tensor, `block_mask` is neither a BlockMask nor a
            function, or `scale` is a tensor that requires a gradient or has a tangent.
        ValueError: `return_lse` is given together with `return_aux`.

    Derivatives: first and second derivatives, in reverse mode and forward mode, with respect to
    query, key, value and every tensor that `score_mod` captures. These derivatives take memory
    O(L + S), in addition to the captured tensors. They equal PyTorch's derivatives, with one
    exception: in the derivative of a value that depends on both query and key, 0 times infinity or
    NaN is 0.

    Determinism: the results have the same bits on every run and with any number of threads.

    Example:
        >>> table = torch.zeros(8, 33, requires_grad=True)  # a bias for each head and distance
        >>> def relative(score, b, h, i, j):
        ...     return score + table[h, (i - j).clamp(-16, 16) + 16]
        >>> query, key, value = torch.randn(3, 1, 8, 100, 64)
        >>> causal = lambda b, h, i, j: i >= j
        >>> torch_attn.flex_attention(query, key, value, relative, causal).sum().backward()
        >>> table.grad.shape
        torch.Size([8, 33])
    """
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        _refuse_others(_NAME, query=query, key=key, value=value)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise RuntimeError(
                f"{_NAME}: {name} has shape {list(tensor.shape)}; it must have four dimensions: "
                "[batch, heads, length, head_dim]"
            )
    if return_lse and return_aux is not None:
        raise ValueError(f"{_NAME}: return_lse and return_aux are given; leave return_lse out")
    if query.is_cuda:
        from torch.nn.attention import flex_attention as of_torch

        if callable(block_mask):
            block_mask = of_torch.create_block_mask(
                block_mask, None, None, query.size(2), key.size(2), device=query.device
            )
        options: Any = (score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options)
        aux: Any = return_aux
        return original(query, key, value, *options, return_aux=aux)  # type: ignore[no-any-return]
    output, logsumexp, max_score = attend(
        query,
        key,
        value,
        score_mod,
        block_mask,
        scale=None if scale is None else _number(_NAME, "scale", scale),
        enable_gqa=enable_gqa,
        with_rows=return_lse or return_aux is not None,
    )
    if return_lse:
        return output, logsumexp
    if return_aux is None:
        return output
    from torch.nn.attention.flex_attention import AuxOutput

    most = return_aux.max_scores
    return output, AuxOutput(logsumexp if return_aux.lse else None, max_score if most else None)


def is_block_mask(mask: Any) -> TypeIs[BlockMask]:
    return hasattr(mask, "kv_num_blocks")


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None,
    block_mask: BlockMask | MaskMod | None,
    with_rows: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Calls ``torch.ops.attn.flex_attention``, whose other options it takes as keyword arguments.

    Returns:
        The output, the rows' logsumexp, and the largest score of every row. The last two are
        empty without `with_rows`.
    """
    blocks, block_size, mask_mod = _parts(block_mask, query, key)
    program = Program(None, None)
    if score_mod is not None or mask_mod is not None:
        sizes = {"batch": max(query.size(0), key.size(0)), "heads": query.size(1)}
        sizes |= {"queries": query.size(2), "keys": key.size(2)}
        program = remembered(score_mod, mask_mod, query.dtype, **sizes, device=query.device)
    return torch.ops.attn.flex_attention(  # type: ignore[no-any-return]
        query,
        key,
        value,
        blocks=blocks,
        block_size=block_size,
        **program.arguments(),
        with_rows=with_rows,
        **options,
    )


def _parts(
    block_mask: Any, query: Tensor, key: Tensor
) -> tuple[Tensor | None, tuple[int, int], Callable[..., Tensor] | None]:
    """Returns the blocks of a mask, the size of a block, and the mask_mod."""
    if not is_block_mask(block_mask):
        if block_mask is not None and not callable(block_mask):
            raise TypeError(
                f"{_NAME}: block_mask is a {type(block_mask).__qualname__}; it must be a BlockMask "
                "or a function mask_mod(b, h, q_idx, kv_idx)"
            )
        return None, (0, 0), block_mask
    rows, keys = block_mask.BLOCK_SIZE
    if (rows, keys) == (_NO_MASK, _NO_MASK):
        return None, (0, 0), block_mask.mask_mod
    lengths = query.size(2), key.size(2)
    if tuple(block_mask.seq_lengths) != lengths:
        raise RuntimeError(
            f"{_NAME}: block_mask is of {block_mask.seq_lengths[0]} queries and "
            f"{block_mask.seq_lengths[1]} keys, but query has {lengths[0]} and key has "
            f"{lengths[1]}; make one of these lengths"
        )
    count = -(-lengths[1] // keys)
    partial = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, count)
    states = partial.to(torch.uint8)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, count)
        states = torch.where(full & ~partial, 2, states)
    batch = max(query.size(0), key.size(0))  # a mask may have more entries and heads
    states = states[:batch, : query.size(1)]
    return (
        states[..., : -(-lengths[0] // rows), :].to(torch.uint8),
        (rows, keys),
        block_mask.mask_mod,
    )


def _listed(numbers: Tensor, indices: Tensor, count: int) -> Tensor:
    """Returns which of the `count` blocks each row lists: ``[B, H, rows, count]``, boolean.

    In each row, the first n numbers of `indices` are the list. `numbers` has n for each row.
    """
    places = torch.arange(indices.size(-1), device=indices.device)
    is_there = (places < numbers[..., None]) & (indices >= 0) & (indices < count)
    listed = indices.new_zeros((*indices.shape[:-1], count + 1), dtype=torch.bool)
    at = torch.where(is_there, indices, count).to(torch.int64)
    return listed.scatter(-1, at, True)[..., :count]
