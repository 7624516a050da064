"""The score_mods and mask_mods of well-known models, for :func:`torch_attn.flex_attention`.

The functions here take tensors, numbers or other masks, and return a score_mod or a mask_mod. Only
:func:`causal` is itself a mask_mod. B is the number of batch entries, H the number of query heads,
L the number of queries, and S the number of keys. Tensors that a model learns get gradients.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import torch
from torch import Tensor

from torch_attn._programs.program import MaskMod, ScoreMod

__all__ = [
    "alibi",
    "both",
    "causal",
    "deberta",
    "distances",
    "documents",
    "neighbourhood",
    "prefix",
    "sliding_window",
    "softcap",
    "t5",
    "transformer_xl",
    "two_axes",
]


def _check(is_right: bool, name: str, value: Any, allowed: str) -> None:
    if not is_right:
        what = f"of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"torch_attn.mods: {name} is {what}; it must be {allowed}")


def _check_dims(name: str, tensor: Tensor, *allowed: str) -> None:
    """Checks that a tensor has as many dimensions as one of the shapes, such as "[H, R]"."""
    is_right = isinstance(tensor, Tensor) and tensor.dim() in {x.count(",") + 1 for x in allowed}
    _check(is_right, name, tensor, f"a tensor {' or '.join(allowed)}")


def distances(table: Tensor) -> ScoreMod:
    """A learned bias for each head and distance. The outermost biases also serve longer distances.

    Args:
        table: ``[H, 2 R + 1]``: a pair gets the bias in column ``R + q_idx - kv_idx``. A distance
            beyond R counts as R, as in Shaw et al. (2018), who learn vectors in place of biases.

    Example:
        >>> table, x = torch.zeros(8, 33, requires_grad=True), torch.randn(1, 8, 50, 16)
        >>> score_mod = torch_attn.mods.distances(table)
        >>> torch_attn.flex_attention(x, x, x, score_mod).sum().backward()
        >>> table.grad.shape
        torch.Size([8, 33])
    """
    _check_dims("table", table, "[H, 2 R + 1]")
    _check(table.size(1) % 2 == 1, "table", table, "[H, 2 R + 1], with an odd number of columns")
    R = table.size(1) // 2
    return lambda score, b, h, q_idx, kv_idx: score + table[h, (q_idx - kv_idx).clamp(-R, R) + R]


def t5(table: Tensor, *, bidirectional: bool = True, max_distance: int = 128) -> ScoreMod:
    """T5's relative positions (Raffel et al., 2020): a bias per bucket of distances.

    Buckets of longer distances are wider.

    Args:
        table: ``[num_buckets, H]``, the weight of ``relative_attention_bias``.
        bidirectional: True for an encoder; False for a decoder, which has no buckets for keys after
            the query.
        max_distance: longer distances share the last bucket.

    Example:
        >>> x = torch.randn(1, 8, 50, 16)
        >>> score_mod = torch_attn.mods.t5(torch.zeros(32, 8))
        >>> torch_attn.flex_attention(x, x, x, score_mod, scale=1.0).shape  # T5 does not scale
        torch.Size([1, 8, 50, 16])
    """
    _check_dims("table", table, "[num_buckets, H]")
    buckets = table.size(0) // 2 if bidirectional else table.size(0)
    near = buckets // 2
    _check(
        near > 0, "table", table, f"[num_buckets, H], num_buckets >= {4 if bidirectional else 2}"
    )
    _check(max_distance > near, "max_distance", max_distance, f"above {near}, the exact buckets")

    def score_mod(score: Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Tensor:
        ahead = kv_idx - q_idx
        distance = ahead.abs() if bidirectional else (-ahead).clamp(min=0)
        far = torch.log(distance.float() / near) / math.log(max_distance / near) * (buckets - near)
        far = (near + far.to(torch.long)).clamp(max=buckets - 1)
        bucket = torch.where(distance < near, distance, far)
        if bidirectional:
            bucket = bucket + torch.where(ahead > 0, buckets, 0)
        return score + table[bucket, h]

    return score_mod


def alibi(slopes: Tensor) -> ScoreMod:
    """A penalty that grows with the distance (Press et al., 2022): ``-slope |q_idx - kv_idx|``.

    ``torch_attn.sdpa(..., alibi_slopes=slopes)`` computes the same in less time.

    Args:
        slopes: ``[H]``.

    Example:
        >>> x = torch.randn(1, 8, 50, 16)
        >>> slopes = 0.5 ** torch.arange(1, 9)
        >>> torch_attn.flex_attention(x, x, x, torch_attn.mods.alibi(slopes)).shape
        torch.Size([1, 8, 50, 16])
    """
    _check_dims("slopes", slopes, "[H]")
    return lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx - kv_idx).abs()


def softcap(cap: float | Tensor) -> ScoreMod:
    """A soft cap, ``cap tanh(score / cap)``: it keeps scores between -cap and cap (Gemma 2).

    ``torch_attn.sdpa(..., softcap=cap)`` computes the same in less time.

    Args:
        cap: a positive number. It may be a 0-d tensor, which gets a gradient.

    Example:
        >>> x = torch.randn(1, 8, 50, 16)
        >>> torch_attn.flex_attention(x, x, x, torch_attn.mods.softcap(50.0)).shape
        torch.Size([1, 8, 50, 16])
    """
    _check(isinstance(cap, Tensor) or cap > 0, "cap", cap, "positive")
    return lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap)


def transformer_xl(positions: Tensor) -> ScoreMod:
    """Adds the scores of queries with relative positions (the relative shift).

    Transformer-XL (Dai et al., 2019) and Conformer use these scores.

    Args:
        positions: the scaled scores of queries with relative positions, ``[B, H, L, L + S - 1]``,
            or ``[1, H, L, L + S - 1]`` for all entries of the batch. The number in column
            ``L - 1 + kv_idx - q_idx`` is added to the score of a pair.

    Example:
        >>> query, key, value = torch.randn(3, 1, 8, 50, 16)
        >>> embeddings = torch.randn(8, 99, 16)  # of the distances 49, 48, ..., -49
        >>> positions = query @ embeddings.mT / 16**0.5
        >>> score_mod = torch_attn.mods.transformer_xl(positions)
        >>> torch_attn.flex_attention(query, key, value, score_mod).shape
        torch.Size([1, 8, 50, 16])
    """
    _check_dims("positions", positions, "[B, H, L, L + S - 1]")
    L = positions.size(2)
    if positions.size(0) == 1:
        shared = positions[0]
        return lambda score, b, h, q_idx, kv_idx: score + shared[h, q_idx, kv_idx - q_idx + L - 1]
    return lambda score, b, h, q_idx, kv_idx: score + positions[b, h, q_idx, kv_idx - q_idx + L - 1]


def deberta(c2p: Tensor | None, p2c: Tensor | None, *, max_distance: int | None = None) -> ScoreMod:
    """DeBERTa's disentangled attention (He et al., 2021): scores between content and positions.

    Args:
        c2p: ``[B, H, L, 2 R]``, the scaled scores of each query with 2 R keys, one key for each
            relative position.
        p2c: ``[B, H, S, 2 R]``, the scaled scores of each key with 2 R queries, one query for each
            relative position.
        max_distance: distances from R / 2 to `max_distance` share logarithmic buckets (v2 and v3).
            With None, each distance has its own bucket.

    Example:
        >>> x = torch.randn(1, 8, 50, 16)
        >>> c2p, p2c = torch.randn(2, 1, 8, 50, 32)
        >>> score_mod = torch_attn.mods.deberta(c2p, p2c, max_distance=64)
        >>> torch_attn.flex_attention(x, x, x, score_mod, scale=(3 * 16) ** -0.5).shape
        torch.Size([1, 8, 50, 16])
    """
    given = {name: x for name, x in (("c2p", c2p), ("p2c", p2c)) if x is not None}
    _check(bool(given), "c2p", None, "a tensor, or p2c must be one")
    for name, x in given.items():
        _check_dims(name, x, "[B, H, L or S, 2 R]")
    R = next(iter(given.values())).size(3) // 2
    for name, x in given.items():
        _check(x.size(3) == 2 * R, name, x, f"[B, H, L or S, {2 * R}], as the other one")

    def bucket(distance: Tensor) -> Tensor:
        if max_distance is None:
            return distance
        middle = R // 2
        size = distance.abs().clamp(min=middle - 1).double()
        log = torch.log(size / middle) / math.log((max_distance - 1) / middle) * (middle - 1)
        far = (log.ceil() + middle).to(torch.long) * distance.sign()
        return torch.where(distance.abs() <= middle, distance, far)

    def score_mod(score: Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Tensor:
        place = (bucket(q_idx - kv_idx) + R).clamp(0, 2 * R - 1)
        if c2p is not None:
            score = score + c2p[b, h, q_idx, place]
        if p2c is not None:
            score = score + p2c[b, h, kv_idx, place]
        return score

    return score_mod


def two_axes(rel_h: Tensor, rel_w: Tensor) -> ScoreMod:
    """Relative positions in pictures (MViT v2, SAM): one term for a key's row, one for its column.

    Args:
        rel_h: ``[B, H, L, height]``, scores of queries with the rows of the keys.
        rel_w: ``[B, H, L, width]``, scores of queries with the columns of the keys. S is height
            times width.

    Example:
        >>> x = torch.randn(1, 8, 4 * 6, 16)
        >>> score_mod = torch_attn.mods.two_axes(torch.randn(1, 8, 24, 4), torch.randn(1, 8, 24, 6))
        >>> torch_attn.flex_attention(x, x, x, score_mod).shape
        torch.Size([1, 8, 24, 16])
    """
    _check_dims("rel_h", rel_h, "[B, H, L, height]")
    _check_dims("rel_w", rel_w, "[B, H, L, width]")
    width = rel_w.size(3)
    return lambda score, b, h, q_idx, kv_idx: (
        score + rel_h[b, h, q_idx, kv_idx // width] + rel_w[b, h, q_idx, kv_idx % width]
    )


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """A query sees the keys up to its own position. Pass this function itself as the mask_mod.

    Example:
        >>> x = torch.randn(1, 8, 50, 16)
        >>> output = torch_attn.flex_attention(x, x, x, block_mask=torch_attn.mods.causal)
        >>> torch.equal(output, torch_attn.sdpa(x, x, x, is_causal=True))
        True
    """
    return q_idx >= kv_idx


def sliding_window(left: int, right: int = 0) -> MaskMod:
    """A query sees the key at its own position, `left` keys before it and `right` keys after it.

    Args:
        left: keys before; 0 or more.
        right: keys after; 0 or more, 0 for a causal window.

    Example:
        >>> x = torch.randn(1, 8, 50, 16)
        >>> mask_mod = torch_attn.mods.sliding_window(15)
        >>> output = torch_attn.flex_attention(x, x, x, block_mask=mask_mod)
        >>> torch.equal(output, torch_attn.sdpa(x, x, x, window_size=(15, 0)))
        True
    """
    _check(left >= 0, "left", left, "0 or more")
    _check(right >= 0, "right", right, "0 or more")
    return lambda b, h, q_idx, kv_idx: (q_idx - kv_idx <= left) & (kv_idx - q_idx <= right)


def both(first: MaskMod, *others: MaskMod) -> MaskMod:
    """A query sees the keys that all of the masks show.

    Example:
        >>> x, ids = torch.randn(1, 8, 50, 16), torch.tensor([0] * 30 + [1] * 20)
        >>> mask_mod = torch_attn.mods.both(torch_attn.mods.causal, torch_attn.mods.documents(ids))
        >>> torch_attn.flex_attention(x, x, x, block_mask=mask_mod).shape
        torch.Size([1, 8, 50, 16])
    """
    masks = (first, *others)
    return lambda b, h, q_idx, kv_idx: functools.reduce(
        operator.and_, (mask(b, h, q_idx, kv_idx) for mask in masks)
    )


def documents(ids: Tensor) -> MaskMod:
    """Packed documents: a query sees the keys of its own document.

    Args:
        ids: ``[L]``, or ``[B, L]``: the document of each token.

    Example:
        >>> x, ids = torch.randn(1, 8, 50, 16), torch.tensor([0] * 30 + [1] * 20)
        >>> mask_mod = torch_attn.mods.documents(ids)
        >>> torch_attn.flex_attention(x, x, x, block_mask=mask_mod).shape
        torch.Size([1, 8, 50, 16])
    """
    _check_dims("ids", ids, "[L]", "[B, L]")
    if ids.dim() == 1:
        return lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx]
    return lambda b, h, q_idx, kv_idx: ids[b, q_idx] == ids[b, kv_idx]


def prefix(lengths: Tensor) -> MaskMod:
    """A query sees the prefix, and the keys up to its own position (prefix-LM).

    Args:
        lengths: ``[B]``, the length of each entry's prefix.

    Example:
        >>> x = torch.randn(2, 8, 50, 16)
        >>> mask_mod = torch_attn.mods.prefix(torch.tensor([10, 20]))
        >>> torch_attn.flex_attention(x, x, x, block_mask=mask_mod).shape
        torch.Size([2, 8, 50, 16])
    """
    _check_dims("lengths", lengths, "[B]")
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) | (kv_idx < lengths[b])


def neighbourhood(
    shape: int | tuple[int, ...],
    window: int | tuple[int | None, ...],
    *,
    stride: int | tuple[int, ...] = 1,
    dilation: int | tuple[int, ...] = 1,
    causal: bool | tuple[bool, ...] = False,
) -> MaskMod:
    """Neighbourhood attention in one to three dimensions by NATTEN's rule (Hassani et al., 2023).

    At a border the window is shifted inwards, so that every query has the same number of keys.

    Args:
        shape: the sizes of the grid of tokens, such as ``(height, width)``. Their product is both L
            and S.
        window: how many tokens a query sees along each dimension. An even window has one token
            more before the query than after it. With None, a query sees the whole dimension.
        stride: how many neighbouring queries share a window, which is centred on the middle one of
            them, or on the right one of the two in the middle. At most the window. A window of the
            stride's size is blocked attention.
        dilation: the distance of neighbours. A query sees tokens at multiples of the dilation only.
        causal: whether the window ends at the query's own token along a dimension. A causal window
            is not shifted, so it has fewer tokens at the beginning of the dimension.

    The last three, and `window`, have one value for all dimensions, or one for each.

    Example:
        >>> x = torch.randn(1, 8, 6 * 7, 16)
        >>> mask_mod = torch_attn.mods.neighbourhood((6, 7), (3, 5))
        >>> torch_attn.flex_attention(x, x, x, block_mask=mask_mod).shape
        torch.Size([1, 8, 42, 16])
    """
    shape = (shape,) if isinstance(shape, int) else shape
    of_axis: list[tuple[Any, ...]] = []
    for name, x in (
        ("window", window),
        ("stride", stride),
        ("dilation", dilation),
        ("causal", causal),
    ):
        of_axis.append(tuple(x) if isinstance(x, tuple | list) else (x,) * len(shape))
        _check(
            len(of_axis[-1]) == len(shape) > 0, name, x, f"one value, or one for each of {shape}"
        )
    along = list(zip(shape, *of_axis, strict=True))
    for n, w, s, d, _ in along:
        _check(d >= 1, "dilation", dilation, "1 or more")
        size = n if w is None else w
        _check(
            0 < size * d <= n, "window", window, f"1 or more, and times dilation at most {shape}"
        )
        _check(1 <= s <= size, "stride", stride, f"between 1 and the window, which is {window}")

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Tensor:
        visible: list[Tensor] = []
        for n, w, s, d, c in along[::-1]:
            row, column = q_idx % n, kv_idx % n
            q_idx, kv_idx = q_idx // n, kv_idx // n
            if d > 1:
                visible.append(row % d == column % d)
            # The place among the tokens at multiples of the dilation, and the last place there.
            last = (n - 1 - row % d) // d
            row, column = row // d, column // d
            if c:
                visible.append(column <= row)
            if w is not None:
                leader = torch.minimum(row // s * s + (s - 1 if c else s // 2), last)
                least = leader - w + 1
                if not c:
                    least = torch.minimum((leader - w // 2).clamp(min=0), last - w + 1)
                    visible.append(column < least + w)
                visible.append(column >= least)
        shown: Tensor = functools.reduce(operator.and_, visible or [q_idx == q_idx])
        return shown

    return mask_mod
