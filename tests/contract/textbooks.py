"""What calls are compared with, where that is more than a function of `torch_attn.reference`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import torch_attn
from contract.calls import integers
from contract.ways import Function, pages
from torch_attn import reference


def by_sequence(
    textbook: Function,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor | None = None,
    cu_seq_k: Tensor | None = None,
    max_q: int = 0,
    max_k: int = 0,
    block_table: Tensor | None = None,
    query_offset: Tensor | None = None,
    key_lengths: Tensor | None = None,
    **options: Any,
) -> Any:
    """What a textbook function gives for each of the packed sequences, if they are."""
    options["enable_gqa"] = True
    if cu_seq_q is None:
        positions = {"query_offset": query_offset, "key_lengths": key_lengths}
        return textbook(query, key, value, **positions, **options)
    if block_table is not None:
        key, value = (
            pages(x)[block_table[0]].transpose(0, 1).flatten(1, 2)[None] for x in (key, value)
        )
        cu_seq_k = integers(0, key.size(2))
    assert cu_seq_k is not None
    parts = []
    for n in range(cu_seq_q.numel() - 1):
        rows, keys = (slice(*cu_seq[n : n + 2].tolist()) for cu_seq in (cu_seq_q, cu_seq_k))
        used = keys.stop - keys.start if key_lengths is None else int(key_lengths[n])
        first = used - (rows.stop - rows.start) if query_offset is None else int(query_offset[n])
        x = query[:, :, rows], key[:, :, keys], value[:, :, keys]
        found = textbook(*x, query_offset=first, key_lengths=used, **options)
        parts.append([found] if isinstance(found, Tensor) else found)
    return [torch.cat(results, 2) for results in zip(*parts, strict=True)]


def rows_of_textbook(*args: Any, **options: Any) -> Any:
    """Returns what ours does, without a gradient of the largest score."""
    output, logsumexp, max_score = reference.sdpa_with_logsumexp(*args, **options)
    return output, logsumexp, max_score.detach()


def to_be_inspected(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    weights = reference.sdpa_with_weights(query, key, value, **options)[1]
    return weights, *reference.sdpa_stats(query, key, **options), (weights > 0).sum(-1)


def output_and_weights(*args: Any, **options: Any) -> Any:
    return reference.sdpa_with_weights(*args, **options)[:2]


def of_eight_bits(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """The textbook, with the numbers that keys and values of 8 bits stand for."""
    pairs = map(torch_attn.quantize_kv, (key, value))
    wide = (numbers.to(query.dtype) * scale[..., None] for numbers, scale in pairs)
    return reference.sdpa(query, *wide, **options)


def lower_right(textbook: Function) -> Function:
    """The last query is at the position of the last key in use, as packed ones are."""

    def call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        used = options.get("key_lengths")
        used = key.size(2) if used is None else used
        if options.get("query_offset") is None:
            options["query_offset"] = used - query.size(2)
        return textbook(query, key, value, **options)

    return call


def causal(function: Function) -> Function:
    return functools.partial(function, is_causal=True)
