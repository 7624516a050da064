"""What tests of attention over several processes share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def assert_same(actual: Any, expected: Any, name: str | None = None) -> None:
    """Asserts equality in float64, but for the order of sums over the processes."""
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-11, msg=name)


class Attention(nn.Module):
    """Self-attention of ``[B, L, 8]``, over as many heads as the projections give."""

    def __init__(self, attend: Callable[..., Tensor], *, is_causal: bool = True) -> None:
        super().__init__()
        self.attend, self.is_causal = attend, is_causal
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, dtype=torch.float64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        output = self.attend(*heads, is_causal=self.is_causal)
        result: Tensor = self.o(output.transpose(1, 2).flatten(-2))
        return result
