"""Chapter: why the root of d_k. Scores, weights and gradients as head_dim grows, against theory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from examples import plots
from examples.demo.report import check

from .page import Numbers, Picture, Section, theme
from .scaling import (
    DRAWS,
    FULL,
    KEYS,
    NONE,
    QUERIES,
    ROOT,
    VALUE_SIZE,
    Measured,
    carriers,
    measure_all,
    quartiles,
    standard_error,
)
from .sources import ON_THE_ROOT
from .theory import (
    TwoKeys,
    dscores_of_many,
    entropy_of_many,
    two_keys,
    variance_error,
    variance_of_scores,
)
from .wording import number, percent, times

# Up to the first variance of the scores many keys share the weight, from the other on two do.
MANY, TWO = 1.0, 256.0
SIGMAS = 5  # standard errors that what is said of the measurements may be off


def sizes(quick: bool) -> list[int]:
    return [4**i for i in range(6)] if quick else [2**i for i in range(13)]


def STEPS(quick: bool) -> int:  # noqa: N802
    return len(sizes(quick))


def chapter(quick: bool, advance: Callable[[], None]) -> Section:
    measured = measure_all(sizes(quick), advance=advance)
    _check(measured)
    section = Section(
        "root",
        "Why the root of dₖ",
        f"After {ON_THE_ROOT}, which give the reason in a sentence each.",
    )
    section.text(f"""
        All four divide the scores by √dₖ, the root of the size of a query and a key (here also
        `head_dim`), and give the same reason: it "prevents the dot products from growing too large
        in magnitude, leading to extremely small gradients in the softmax function" (*Scaled
        Dot-Product Attention*). Every step of the argument can be measured.

        Queries, keys and values are drawn from the standard normal distribution: {DRAWS} times
        {QUERIES} queries and {KEYS} keys, for each dₖ from 1 to {sizes(quick)[-1]:,}, with the
        scores multiplied by **{ROOT}**, by **{NONE}** (no scaling) and by **{FULL}**. The gradient
        that arrives at each output is a vector of length 1 in a random direction, and values have
        {VALUE_SIZE} numbers whatever dₖ is: nothing but the scores depends on it. All of it is in
        float64, for the smallest gradients below would be rounding errors in float32.
    """)
    section.differs(
        "*Notes On: Scaled Dot-Product Attention*",
        """
        The *Notes* say that "this *scaling* might lead to the vanishing gradient problem". The
        growth of the scores leads to it; the scaling prevents it.
        """,
    )
    _scores(section, measured)
    _weights(section, measured)
    _dscores(section, measured)
    _dquery(section, measured)
    return section


def _check(measured: dict[str, list[Measured]]) -> None:
    """What the text says of the pictures, within the errors of the measurement."""
    worst = max(
        abs(m.variance.mean().item() / variance_of_scores(m.size, m.scale) - 1)
        / variance_error(m.size, QUERIES, KEYS, DRAWS)
        for m in measured[NONE]
    )
    check(worst < SIGMAS, f"the variance of scores is dₖ, within {worst:.1f} standard errors")

    logs = [m.median_dscores.log() for m in measured[NONE] if m.size in (16, 64, 256, 1024, 4096)]
    falls = [a - b for a, b in itertools.pairwise(logs)]
    check(
        all(
            fall.mean() > SIGMAS * standard_error(fall)
            for fall in (falls if len(falls) < 5 else [a + b for a, b in itertools.pairwise(falls)])
        ),
        "without the scale the median row of dS gets shorter and shorter from dₖ = 16 on",
    )
    flat = [m.median_dscores for m in measured[ROOT] if m.size >= 64]
    differences = [a - b for a, b in itertools.combinations(flat, 2)]
    check(
        all(abs(d.mean()) < SIGMAS * standard_error(d) for d in differences),
        "with it the median row of dS stays as long, from dₖ = 64 on",
    )


def _curves(
    name: str,
    measured: dict[str, list[Measured]],
    values: Callable[[Measured], float | list[float]],
    title: str,
    ylabel: str,
    caption: str,
    alt: str,
    theory: Callable[[Measured], float],
    logy: bool = True,
) -> Picture:
    """One number, or three quartiles, of every size and scale; theory is NaN where it is silent."""
    found = {f"scale {scale}": [values(m) for m in row] for scale, row in measured.items()}
    dashed = {f"scale {scale}": [theory(m) for m in row] for scale, row in measured.items()}
    x = [m.size for m in measured[ROOT]]
    with theme():
        figure = plots.scaling(
            x, found, theory=dashed, xlabel="dₖ", ylabel=ylabel, title=title, logy=logy
        )
    columns: list[str] = ["dₖ"]
    rows: list[list[object]] = [[size] for size in x]
    for scale, row in found.items():
        quartered = isinstance(row[0], list)
        columns += [f"{scale}, {q} %" for q in (25, 50, 75)] if quartered else [scale]
        columns.append(f"{scale}, theory")
        for cells, value, expected in zip(rows, row, dashed[scale], strict=True):
            cells += value if isinstance(value, list) else [value]
            cells.append(_silent(expected))
    return Picture(name, figure, caption, alt, Numbers(columns, rows))


def _silent(x: float) -> object:
    return "" if math.isnan(x) else x


def _scores(section: Section, measured: dict[str, list[Measured]]) -> None:
    last = {name: row[-1] for name, row in measured.items()}
    size = last[ROOT].size
    error = variance_error(size, QUERIES, KEYS, DRAWS)
    section.heading("1. The scores grow")
    section.text(f"""
        A score is a sum of dₖ products, q·k = q₁k₁ + q₂k₂ + … Each product has mean 0 and variance
        1 · 1 = 1; they are independent, so that their variances add up: **the variance of q·k is
        dₖ**, and a typical score is as large as √dₖ. A factor in front of the score comes out
        squared: 1/√dₖ makes the variance dₖ/dₖ = 1 for every size, and 1/dₖ makes it 1/dₖ.

        Measured at dₖ = {size:,}: {number(last[NONE].variance.mean().item(), 4)} without scaling
        and {number(last[ROOT].variance.mean().item(), 4)} with {ROOT}. Scores that share a query or
        a key are not independent; counting that in, the standard error of the variance of
        {DRAWS * QUERIES * KEYS:,} scores is {percent(error)}.
    """)
    section.pictures(
        _curves(
            "root-variance",
            measured,
            lambda m: m.variance.mean().item(),
            "Variance of the scores",
            "variance of the scores",
            "Markers: measured. Dashed: dₖ, 1 and 1/dₖ, which is the theory for every size.",
            "Three straight lines on logarithmic axes: the variance of scores grows as dₖ without "
            f"a scale, stays at 1 with {ROOT} and falls as 1/dₖ with {FULL}.",
            lambda m: variance_of_scores(m.size, m.scale),
        )
    )


def _weights(section: Section, measured: dict[str, list[Measured]]) -> None:
    last = {name: row[-1] for name, row in measured.items()}
    size = last[ROOT].size
    entropy = {name: m.entropy.mean().item() for name, m in last.items()}
    largest = {name: m.largest.mean().item() for name, m in last.items()}
    section.heading("2. Softmax saturates")
    section.text(f"""
        Softmax looks at differences: a key whose score is larger by 1 gets e ≈ 2.7 times the
        weight, by {math.isqrt(size)} (= √{size:,}) already {number(math.exp(math.isqrt(size)), 2)}
        times. So without scaling the largest score takes all, and attention becomes a lookup of one
        key. The *entropy* of a row of weights, −Σ p log p, says how many keys share it: log {KEYS}
        = {math.log(KEYS):.3f} if all are alike, 0 if one has everything, and in between about
        exp(entropy) of them.

        At dₖ = {size:,} the largest of {KEYS} weights is {number(largest[NONE])} on average without
        scaling (entropy {number(entropy[NONE])}). With {ROOT} it is {number(largest[ROOT])}, and
        about {math.exp(entropy[ROOT]):.0f} keys share a row (entropy {number(entropy[ROOT])}), as
        many as at any other size. With {FULL} the scores are nearly equal, and so are the weights:
        the largest is {number(largest[FULL], 2)}, next to 1/{KEYS} = {number(1 / KEYS, 2)}. Such a
        head averages all values and cannot choose.
    """)
    many_and_two = (
        f"Dashed where theory knows. *Many keys share* (variance σ² of the scores up to {MANY:g}): "
        "entropy log S − σ²/2, for S scores of normal distribution, and a correction of order 1/S. "
        f"*Two keys share* (σ² of {TWO:g} and more): all weight lies on the two largest scores, "
        "whose distance has a known distribution; that leaves out a share of about √(2 log S)/σ. "
        "In between neither holds."
    )
    section.pictures(
        _curves(
            "root-entropy",
            measured,
            lambda m: m.entropy.mean().item(),
            "Entropy of the weights",
            "entropy of a row of weights (nats)",
            many_and_two,
            "Without a scale the entropy falls from "
            f"{measured[NONE][0].entropy.mean():.2f} to {entropy[NONE]:.2f}; with {ROOT} it stays "
            f"near {entropy[ROOT]:.1f}, and with {FULL} it rises to log {KEYS}.",
            lambda m: _theory(m, entropy_of_many, lambda two: two.entropy),
            logy=False,
        ),
        _curves(
            "root-largest",
            measured,
            lambda m: m.largest.mean().item(),
            "Largest weight",
            "largest weight of a row",
            "The mean of the rows' largest weights. Dashed: two keys share.",
            f"Without a scale the largest weight rises to {largest[NONE]:.2f}; with {ROOT} it "
            f"stays near {largest[ROOT]:.2f} and with {FULL} it falls to 1/{KEYS}.",
            lambda m: _theory(m, None, lambda two: two.largest),
            logy=False,
        ),
    )


def _theory(
    measured: Measured,
    many: Callable[[float, int], float] | None,
    two: Callable[[TwoKeys], float],
) -> float:
    """NaN between the two cases, and where queries of few dimensions differ much in length."""
    variance = variance_of_scores(measured.size, measured.scale)
    if variance >= TWO:
        return two(two_keys(variance**0.5, KEYS))
    if many and variance <= MANY * (1 + 1e-9) and measured.size >= 16:
        return many(variance, KEYS)
    return math.nan


def _dscores(section: Section, measured: dict[str, list[Measured]]) -> None:
    medians = {
        name: {m.size: m.dscores.median().item() for m in row} for name, row in measured.items()
    }
    last = {name: row[-1] for name, row in measured.items()}
    size = last[ROOT].size
    peak = max(medians[NONE], key=lambda n: medians[NONE][n])
    means = {name: m.dscores.square().mean().sqrt().item() for name, m in last.items()}
    flat = [m.median_dscores for m in measured[ROOT] if m.size >= 64]
    spread = max(t.mean() for t in flat) / min(t.mean() for t in flat) - 1
    error = max(standard_error(t) / t.mean() for t in flat)
    section.heading("3. The gradient of the scores vanishes")
    section.text("""
        The derivative of softmax is the matrix diag(p) − p pᵀ: on its diagonal pᵢ (1 − pᵢ), beside
        it −pᵢ pⱼ. If one weight is 1 and all other weights are 0, **every entry of it is 0**: no
        change of any score changes the weights, and no gradient comes back through them. In a row
        of gradients, dS = P ∘ (dP − rowsum(P ∘ dP)).

        An attention operator keeps dS to itself, and this one never stores it. But its mask is
        *added to the scores*, and has a derivative like every other input: the gradient of a mask
        of zeros **is** dS.
    """)
    section.code("""
        mask = torch.zeros(queries, keys, requires_grad=True)
        output = torch_attn.sdpa(query, key, value, mask, scale=scale)
        output.backward(doutput)
        dscores = mask.grad
    """)
    section.text(f"""
        - **Without scaling** the length of a median row of dS first rises, up to
          {number(medians[NONE][peak], 2)} at dₖ = {peak}: softmax begins to prefer some keys, and
          those it prefers pass more gradient on. Then one key wins, and it falls and falls, to
          {number(medians[NONE][size], 2)} at {size:,}:
          {times(medians[ROOT][size] / medians[NONE][size])} less than with the scale.
        - **With {ROOT}** it stays: {number(medians[ROOT][size])} at {size:,}. From 64 on, all sizes
          are within {percent(float(spread))} of each other, where one standard error is up to
          {percent(float(error))}.
        - **With {FULL}** it stays too, at {number(medians[FULL][size])}, near 1/√{KEYS} =
          {number(KEYS**-0.5)}, which is what equal weights let through. What is wrong with {FULL}
          is not here.

        There is more to it than "the gradients vanish". The *root mean square* of the same rows is
        {number(means[NONE])} without scaling at {size:,}, and {number(means[ROOT])} with it. The
        gradient does not get lost on average; it gets **rare**:
        {percent(carriers(last[NONE].dscores, 0.9))} of the rows carry nine tenths of it (sum of
        squares), against {percent(carriers(last[ROOT].dscores, 0.9))} with {ROOT}. They are the
        rows whose two best keys happen to be nearly level. All other rows have decided, before
        anything was learned, and cannot be talked out of it.
    """)
    section.pictures(
        _curves(
            "root-dscores",
            measured,
            lambda m: quartiles(m.dscores),
            "Median row of dS",
            "length of a row of dS",
            "Markers: the median of all rows; bands: from 25 to 75 % of the rows. Dashed: two keys "
            "share, whose scores are g apart: |dS| = √2 p (1 − p) |dP₁ − dP₂| with "
            "p = 1/(1 + e⁻ᵍ), and its median.",
            "On a logarithmic axis the curve without a scale falls to "
            f"{medians[NONE][size]:.0e}; the two other curves are level.",
            lambda m: _theory(m, None, lambda two: two.median_dscores),
        ),
        _curves(
            "root-dscores-mean",
            measured,
            lambda m: m.dscores.square().mean().sqrt().item(),
            "Root mean square row of dS",
            "length of a row of dS",
            "The same rows. Dashed: √(exp(σ²)/S) where many keys share, to which the measurement "
            "comes as S grows; where two share it falls as dₖ to the power of −1/4 only.",
            "Without a scale the root mean square rises first and then falls slowly, to "
            f"{means[NONE]:.2f}; with {ROOT} it is {means[ROOT]:.2f} throughout.",
            lambda m: _theory(m, dscores_of_many, lambda two: two.root_mean_square_dscores),
            logy=False,
        ),
    )


def _dquery(section: Section, measured: dict[str, list[Measured]]) -> None:
    last = {name: row[-1] for name, row in measured.items()}
    size = last[ROOT].size
    dquery = {name: m.dquery.median().item() for name, m in last.items()}
    dkey = {name: m.dkey.median().item() for name, m in last.items()}
    section.heading("4. What queries and keys get, and why not 1/dₖ")
    section.text(f"""
        A step of training moves the weights that make queries and keys, by dQ = scale · dS K and dK
        = scale · dSᵀ Q. A row of dQ adds up keys, which in many dimensions are nearly at right
        angles and all about √dₖ long. So **|dQ| ≈ scale · √dₖ · |dS|**, and here the three part:

        - scale {NONE}: the factor √dₖ *grows*, to {math.isqrt(size)} at {size:,}. That delays the
          end and does not prevent it, for |dS| falls exponentially with √dₖ: the median row of dQ
          is {number(dquery[NONE], 2)}, of dK {number(dkey[NONE], 2)}.
        - scale {ROOT}: the factor is 1, and the growth of the keys is taken back exactly. dQ has
          {number(dquery[ROOT])}, dK {number(dkey[ROOT])}, at this size as at any other.
        - scale {FULL}: the factor is 1/√dₖ. dQ has {number(dquery[FULL], 2)}, dK
          {number(dkey[FULL], 2)}. Weights that are uniform *and* hardly move: that is why the
          divisor is not dₖ. (For queries and keys that have learned to point the same way, products
          of mean 1 instead of 0, it would be the right one; at the beginning of training they do
          not.)

        The argument is about independent numbers of variance 1, so about the *beginning* of
        training, with weights initialized for that. The next chapter trains.
    """)
    few = " In few dimensions keys are not at right angles, and the dashed line is too high."
    section.pictures(
        *(
            _curves(
                f"root-d{name}",
                measured,
                lambda m, name=name: quartiles(getattr(m, f"d{name}")),
                f"Median row of d{letter}",
                f"length of a row of d{letter}",
                "Markers and bands: median and quartiles. Dashed: scale · √dₖ · the median length "
                f"of {of} of dS, as measured.{few}",
                f"The length of d{letter} stays level with {ROOT}, falls in proportion to 1/√dₖ "
                f"with {FULL} and collapses without a scale.",
                lambda m, name=name: getattr(m, f"d{name}_predicted").median().item(),
            )
            for name, letter, of in (("query", "Q", "a row"), ("key", "K", "a column"))
        )
    )
