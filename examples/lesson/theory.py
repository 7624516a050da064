"""What theory says of scores of standard normal queries and keys, of their softmax and of dS."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def variance_error(size: int, L: int, S: int, draws: int) -> float:
    """The relative standard error of the measured variance of L x S scores, exactly.

    The scores of a row share a query, the scores of a column a key. With v = the mean of
    (q_i . k_j)^2, E v = d, the part of v that depends on q_i alone is |q_i|^2 - d, of variance 2 d;
    likewise k_j; what is left has variance Var (q . k)^2 - 4 d = (2 d^2 + 6 d) - 4 d, and its terms
    are uncorrelated. So Var v = 2 d / L + 2 d / S + (2 d^2 + 2 d) / (L S).
    """
    variance = 2 / (size * L) + 2 / (size * S) + (2 + 2 / size) / (L * S)
    return math.sqrt(variance / draws)


def entropy_of_many(variance: float, keys: int) -> float:
    """The entropy of a softmax over many normal scores: log S - variance / 2.

    By the law of large numbers log sum exp(s) = log S + variance / 2 and sum p s = variance. The
    rest is the next order in 1 / S, by the spread of the sum of exponentials. It holds while many
    keys share the weight, which ends long before variance = 2 log S, where one of them takes all
    (the freezing of Derrida's random energy model, 1981).
    """
    growth = math.exp(variance)
    return math.log(keys) - variance / 2 + (variance * growth - (growth - 1) / 2) / keys


def dscores_of_many(variance: float, keys: int) -> float:
    """√(exp(variance) / S): the root mean square length of a row of dS while many keys share.

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


def two_keys(deviation: float, keys: int) -> TwoKeys:
    """The limit of scores of a large standard deviation.

    The largest of S standard normal numbers is the second largest plus a gap g of density
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
