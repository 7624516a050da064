"""Functions of the pair that models use, for :func:`torch_attn.flex_attention`.

Each takes what a model learned, or shapes, and returns a score_mod or a mask_mod. B: entries of the
batch, H: heads of the query, L: queries, S: keys. Tables get gradients.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torch_attn._programs import MaskMod, ScoreMod

__all__ = [
    "deberta",
    "distances",
    "documents",
    "neighbourhood",
    "prefix",
    "t5",
    "transformer_xl",
    "two_axes",
]


def distances(table: Tensor) -> ScoreMod:
    """A learned bias for each head and distance, clamped at the ends.

    Args:
        table: ``[H, 2 R + 1]``: column ``R + q_idx - kv_idx``, where a distance beyond R counts as
            R (Shaw et al., 2018, as a bias).
    """
    R = table.size(1) // 2
    return lambda score, b, h, i, j: score + table[h, (i - j).clamp(-R, R) + R]


def t5(table: Tensor, *, bidirectional: bool = True, max_distance: int = 128) -> ScoreMod:
    """T5's relative positions (Raffel et al., 2020): buckets that grow with the distance.

    Args:
        table: ``[num_buckets, H]``, the weight of ``relative_attention_bias``.
        bidirectional: an encoder's; a decoder's has no buckets for keys after the query.
        max_distance: longer distances share the last bucket.
    """
    buckets = table.size(0) // 2 if bidirectional else table.size(0)
    near = buckets // 2

    def score_mod(score: Tensor, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        ahead = j - i
        distance = ahead.abs() if bidirectional else (-ahead).clamp(min=0)
        far = torch.log(distance.float() / near) / math.log(max_distance / near) * (buckets - near)
        far = (near + far.to(torch.long)).clamp(max=buckets - 1)
        bucket = torch.where(distance < near, distance, far)
        if bidirectional:
            bucket = bucket + torch.where(ahead > 0, buckets, 0)
        return score + table[bucket, h]

    return score_mod


def transformer_xl(positions: Tensor) -> ScoreMod:
    """Scores of queries with relative positions (Dai et al., 2019; Conformer): the relative shift.

    Args:
        positions: ``[B, H, L, L + S - 1]``, scaled; column ``L - 1 + kv_idx - q_idx`` is of a pair.
    """
    L = positions.size(2)
    return lambda score, b, h, i, j: score + positions[b, h, i, j - i + L - 1]


def deberta(c2p: Tensor | None, p2c: Tensor | None, *, max_distance: int | None = None) -> ScoreMod:
    """DeBERTa's disentangled attention (He et al., 2021): content to position, and back.

    Args:
        c2p: ``[B, H, L, 2 R]``, scaled scores of queries with the keys of relative positions.
        p2c: ``[B, H, S, 2 R]``, scaled scores of keys with the queries of relative positions.
        max_distance: distances beyond R / 2 share logarithmic buckets up to this one (v2 and v3);
            None: each distance has a bucket.
    """
    R = next(x.size(3) for x in (c2p, p2c) if x is not None) // 2

    def bucket(distance: Tensor) -> Tensor:
        if max_distance is None:
            return distance
        middle = R // 2
        size = distance.abs().clamp(min=middle - 1).double()
        log = torch.log(size / middle) / math.log((max_distance - 1) / middle) * (middle - 1)
        far = (log.ceil() + middle).to(torch.long) * distance.sign()
        return torch.where(distance.abs() <= middle, distance, far)

    def score_mod(score: Tensor, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        place = (bucket(i - j) + R).clamp(0, 2 * R - 1)
        if c2p is not None:
            score = score + c2p[b, h, i, place]
        if p2c is not None:
            score = score + p2c[b, h, j, place]
        return score

    return score_mod


def two_axes(rel_h: Tensor, rel_w: Tensor) -> ScoreMod:
    """Decomposed positions of pictures (MViT v2, SAM): a term for the key's row and its column.

    Args:
        rel_h: ``[B, H, L, height]``, scores of queries with the rows of the keys.
        rel_w: ``[B, H, L, width]``, likewise with the columns; S is height times width.
    """
    width = rel_w.size(3)
    return lambda score, b, h, i, j: score + rel_h[b, h, i, j // width] + rel_w[b, h, i, j % width]


def documents(ids: Tensor) -> MaskMod:
    """Packed documents: a query sees the keys of its own document.

    Args:
        ids: ``[L]``, or ``[B, L]``: the document of each token.
    """
    if ids.dim() == 1:
        return lambda b, h, i, j: ids[i] == ids[j]
    return lambda b, h, i, j: ids[b, i] == ids[b, j]


def prefix(lengths: Tensor) -> MaskMod:
    """A prefix that all queries see, then causality (prefix-LM).

    Args:
        lengths: ``[B]``, of each entry's prefix.
    """
    return lambda b, h, i, j: (i >= j) | (j < lengths[b])


def neighbourhood(shape: tuple[int, ...], window: tuple[int, ...]) -> MaskMod:
    """Neighbourhood attention in one to three dimensions (Hassani et al., 2023).

    At a border the window is shifted inwards, so that every query has the same number of keys.

    Args:
        shape: of the tokens, such as ``(height, width)``; its product is L and S.
        window: how many tokens a query sees along each dimension, odd.
    """
    if len(shape) != len(window) or any(w % 2 == 0 or w > n for n, w in zip(shape, window)):  # noqa: B905
        raise ValueError(
            f"window is {window} and shape {shape}; they must have as many numbers, and each "
            "number of window must be odd and no larger than that of shape"
        )

    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Tensor:
        visible: Tensor | None = None
        for n, w in zip(reversed(shape), reversed(window), strict=True):
            first = (i % n - w // 2).clamp(0, n - w)
            along = (j % n >= first) & (j % n < first + w)
            visible = along if visible is None else visible & along
            i, j = i // n, j // n
        assert visible is not None
        return visible

    return mask_mod
