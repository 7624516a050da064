"""Why the root of d_k: scores, weights and gradients over head_dim, with and without the scale.

Everything is measured through the operator's own forward and backward. Its special part is the
gradient of the scores, dS: a floating mask is added to the scores, so the gradient with respect to
a mask of zeros *is* dS, of which the operator otherwise stores nothing.

    P = softmax(S),  S = scale * Q K^T,  O = P V
    dP = dO V^T,     dS = P * (dP - rowsum(P * dP)),  dQ = scale * dS K,  dK = scale * dS^T Q
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import torch_attn

SCALES: dict[str, Callable[[int], float]] = {
    "1": lambda size: 1.0,
    "1/√d_k": lambda size: size**-0.5,
    "1/d_k": lambda size: 1.0 / size,
}
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


# --- theory ---------------------------------------------------------------------------------------


def variance_error(size: int, draws: int = DRAWS) -> float:
    """The relative standard error of the measured variance of L x S scores, exactly.

    The scores of a row share a query, those of a column a key. With v = the mean of (q_i . k_j)^2,
    E v = d, the part of v that depends on q_i alone is |q_i|^2 - d, of variance 2 d; likewise k_j;
    what is left has variance Var (q . k)^2 - 4 d = (2 d^2 + 6 d) - 4 d, and its terms are
    uncorrelated. So Var v = 2 d / L + 2 d / S + (2 d^2 + 2 d) / (L S).
    """
    L, S = QUERIES, KEYS
    variance = 2 / (size * L) + 2 / (size * S) + (2 + 2 / size) / (L * S)
    return math.sqrt(variance / draws)


def entropy_of_many(variance: float, keys: int = KEYS) -> float:
    """The entropy of a softmax over many normal scores: log S - variance / 2.

    By the law of large numbers log sum exp(s) = log S + variance / 2 and sum p s = variance. The
    rest is the next order in 1 / S, by the spread of the sum of exponentials. It holds while many
    keys share the weight, which ends long before variance = 2 log S, where one of them takes all
    (the freezing of Derrida's random energy model, 1981).
    """
    growth = math.exp(variance)
    return math.log(keys) - variance / 2 + (variance * growth - (growth - 1) / 2) / keys


def dscores_of_many(variance: float, keys: int = KEYS) -> float:
    """Root mean square length of a row of dS while many keys share the weight: √(exp(variance) / S).

    The mean of |dS|^2 is sum p^2 but for terms of 1 / S^2, and of normal scores many keys make
    S E exp(2 s) / (S E exp(s))^2 = exp(variance) / S.
    """
    return math.sqrt(math.exp(variance) / keys)


@dataclass(frozen=True)
class TwoKeys:
    """What a row does once all weight lies on its two largest scores: weights p and 1 - p."""

    entropy: float
    largest: float
    median_dscores: float
    root_mean_square_dscores: float


def two_keys(deviation: float, keys: int = KEYS) -> TwoKeys:
    """The limit of scores of a large standard deviation.

    Of S standard normal numbers the largest is the second largest plus a gap g of density
    S (S - 1) ∫ φ(x) φ(x + g) Φ(x)^(S - 2) dx. Then p = 1 / (1 + exp(-deviation * g)), and
    |dS| = √2 p (1 - p) |dP_1 - dP_2|, where the difference has variance 2. The other keys are left
    out, which is wrong by a share of about √(2 log S) / deviation.
    """
    x = torch.linspace(-3, 8, 1101, dtype=torch.float64)
    # As fine as p needs near 0, where the two keys still share.
    gap = torch.cat(
        [torch.linspace(0, 20 / deviation, 1001), torch.linspace(20 / deviation, 5, 1001)[1:]]
    ).double()
    normal = torch.distributions.Normal(torch.tensor(0.0).double(), torch.tensor(1.0).double())
    density = torch.trapezoid(
        (
            normal.log_prob(x)
            + normal.log_prob(x + gap[:, None])
            + (keys - 2) * torch.special.log_ndtr(x)
        ).exp(),
        x,
    )
    density *= keys * (keys - 1)
    p, rest = torch.sigmoid(deviation * gap), torch.sigmoid(-deviation * gap)

    def mean(values: Tensor) -> float:
        return torch.trapezoid(density * values, gap).item()

    # The median by bisection of its logarithm: P(|dS| <= m) = mean over g of erf(...).
    low, high = -5 * deviation - 10, 5.0
    for _ in range(60):
        middle = (low + high) / 2
        below = mean(torch.erf(math.exp(middle) / (2 * math.sqrt(2) * p * rest)))
        low, high = (middle, high) if below < 0.5 else (low, middle)
    return TwoKeys(
        entropy=mean(torch.special.entr(p) + torch.special.entr(rest)),
        largest=mean(p),
        median_dscores=math.exp(low),
        root_mean_square_dscores=2 * math.sqrt(mean((p * rest).square())),
    )


def variance_of_scores(size: int, scale: float) -> float:
    """scale^2 * d_k: d_k independent products, each of mean 0 and variance 1."""
    return scale**2 * size


MANY, FEW = 1.0, 144.0  # up to the one variance many keys share the weight, from the other on two


def sizes(quick: bool) -> list[int]:
    return [4**i for i in range(6)] if quick else [2**i for i in range(13)]


def standard_error(draws: Tensor) -> float:
    """Of the mean of `[draws]` independent numbers."""
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
