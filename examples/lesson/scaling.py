"""What the scale does to scores, weights and gradients as head_dim grows, measured.

Everything is measured through the operator's own forward and backward. Its special part is the
gradient of the scores, dS: a floating mask is added to the scores, so the gradient with respect to
a mask of zeros *is* dS, of which the operator otherwise stores nothing.

    P = softmax(S),  S = scale * Q K^T,  O = P V
    dP = dO V^T,     dS = P * (dP - rowsum(P * dP)),  dQ = scale * dS K,  dK = scale * dS^T Q
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import torch_attn

SCALES: dict[str, Callable[[int], float]] = {
    "1/√dₖ": lambda size: size**-0.5,
    "1": lambda size: 1.0,
    "1/dₖ": lambda size: 1.0 / size,
}
ROOT, NONE, FULL = SCALES
DRAWS, QUERIES, KEYS, VALUE_SIZE = 16, 64, 256, 64


@dataclass(frozen=True)
class Measured:
    """One head_dim and scale. `[draws]`: one number for each independent draw of Q, K, V and dO."""

    size: int
    scale: float
    variance: Tensor  # [draws] of the scores, whose mean is known to be 0
    entropy: Tensor  # [draws] mean of a row of weights, in nats
    largest: Tensor  # [draws] mean of a row's largest weight
    dscores: Tensor  # [draws, queries] length of each row of dS
    dquery: Tensor  # [draws, queries] length of each row of dQ
    dkey: Tensor  # [draws, keys] length of each row of dK
    dkey_predicted: Tensor  # [draws, keys] scale * √d_k * the length of each column of dS
    expected_dscores: Tensor  # [draws] root mean square of those rows that P alone lets expect

    @property
    def median_dscores(self) -> Tensor:
        """[draws] the median length of a row of dS."""
        return self.dscores.median(dim=-1).values

    @property
    def dquery_predicted(self) -> Tensor:
        """[draws, queries] scale * √d_k * the length of each row of dS."""
        return self.scale * self.size**0.5 * self.dscores


def measure(size: int, scale: float, draws: int = DRAWS, seed: int = 0) -> Measured:
    """Q `[draws, 64, size]`, K `[draws, 256, size]` and V standard normal, rows of dO of length 1.

    So dP is standard normal whatever the size: only the scores change with it. In float64, since
    the smallest gradients of float32 would be nothing but rounding.
    """
    generator = torch.Generator().manual_seed(10_000 * seed + size)

    def normal(length: int, width: int) -> Tensor:
        return torch.randn(draws, length, width, generator=generator, dtype=torch.float64)

    query = normal(QUERIES, size).requires_grad_()
    key = normal(KEYS, size).requires_grad_()
    value = normal(KEYS, VALUE_SIZE)
    doutput = torch.nn.functional.normalize(normal(QUERIES, VALUE_SIZE), dim=-1)

    with torch.no_grad():
        _, weights, scores = torch_attn.sdpa_with_weights(query, key, value, scale=scale)
    mask = torch.zeros(draws, QUERIES, KEYS, dtype=torch.float64, requires_grad=True)
    output = torch_attn.sdpa(query, key, value, mask, scale=scale)
    dquery, dkey, dscores = torch.autograd.grad(output, (query, key, mask), doutput)

    squares, cubes = weights.square().sum(-1), weights.pow(3).sum(-1)
    return Measured(
        size,
        scale,
        variance=scores.square().mean((-2, -1)),
        entropy=torch.special.entr(weights).sum(-1).mean(-1),
        largest=weights.amax(-1).mean(-1),
        dscores=dscores.norm(dim=-1),
        dquery=dquery.norm(dim=-1),
        dkey=dkey.norm(dim=-1),
        dkey_predicted=scale * size**0.5 * dscores.norm(dim=-2),
        # dP is standard normal and knows nothing of P: the mean of |(diag(p) - p p^T) dP|^2 is
        # the sum of the squares of that matrix.
        expected_dscores=(squares - 2 * cubes + squares.square()).mean(-1).sqrt(),
    )


def standard_error(draws: Tensor) -> float:
    """The standard error of the mean of `[draws]` independent numbers."""
    return (draws.std() / len(draws) ** 0.5).item()


def quartiles(lengths: Tensor) -> list[float]:
    """25, 50 and 75 % of all rows."""
    return torch.quantile(lengths.flatten(), torch.tensor([0.25, 0.5, 0.75]).double()).tolist()


def measure_all(
    sizes: Sequence[int], draws: int = DRAWS, advance: Callable[[], None] = lambda: None
) -> dict[str, list[Measured]]:
    """Scale's name -> one Measured for each size; every scale sees the same Q, K, V and dO."""
    found: dict[str, list[Measured]] = {name: [] for name in SCALES}
    for size in sizes:
        for name, scale in SCALES.items():
            found[name].append(measure(size, scale(size), draws))
        advance()
    return found


def carriers(dscores: Tensor, share: float) -> float:
    """The least share of the rows of dS that together has this share of the sum of squares."""
    squares = dscores.flatten().square().sort(descending=True).values.cumsum(0)
    return (int((squares < share * squares[-1]).sum()) + 1) / len(squares)
