"""Chapter: query, key and value in plain words, with the smallest example that there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import torch_attn

from .page import Section

KEYS = ["tea", "coffee"]


@dataclass
class Smallest:
    """One query and two pairs of key and value: key is [2, 2], value [2, 1], weights [1, 2]."""

    query: Tensor
    key: Tensor
    value: Tensor
    scores: Tensor
    weights: Tensor
    output: Tensor


def smallest() -> Smallest:
    query = torch.tensor([[1.0, 1.0]], dtype=torch.float64)
    key = torch.tensor([[2.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    value = torch.tensor([[80.0], [60.0]], dtype=torch.float64)
    output, weights, scores = torch_attn.sdpa_with_weights(query, key, value)
    return Smallest(query, key, value, scores, weights, output)


def STEPS(quick: bool) -> int:  # noqa: N802
    return 1


def chapter(quick: bool, advance: Callable[[], None]) -> Section:
    section = Section("words", "Query, key and value in plain words")
    section.text("A **query** says what is looked for.")
    advance()
    return section
