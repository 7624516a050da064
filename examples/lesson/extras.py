"""Chapter: what models add to attention: a sliding window, a soft cap on scores, and a sink."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from matplotlib.figure import Figure
from torch import Tensor

import torch_attn
from examples import plots
from examples.demo.report import check

from .heads import TOKENS, X
from .lookup import vector
from .page import Numbers, Section, theme
from .threads import one_thread
from .wording import fixed, number, times

LEFT, LONG = 3, 127  # keys before its own that a query sees, in the picture and in the table
CAP, RAW = 4.0, torch.tensor([-1.0, 0.5, 2.0, 12.0], dtype=torch.float64)
QUERIES, KEYS = ["fruit", "chair"], ["apple", "banana", "carrot", "leek"]
SINKS = torch.tensor([-torch.inf, 0.0, 2.0], dtype=torch.float64)  # of three heads; −∞ is none


def window(left: int) -> Tensor:
    """[10, 10]: the weights of the sentence of ten tokens; a `left` of -1 is plain causal."""
    return torch_attn.sdpa_with_weights(X, X, X, window_size=(left, 0))[1]


def pairs(length: int, left: int) -> int:
    """How many queries and keys see each other: of scores of 0 the logsumexp is log(keys)."""
    zero = torch.zeros(length, 1, dtype=torch.float64)
    logsumexp = torch_attn.sdpa_with_logsumexp(zero, zero, zero, window_size=(left, 0))[1]
    return round(logsumexp.exp().sum().item())


def reach(layers: int) -> int:
    """How many tokens the last output depends on, after this many layers with a window."""
    x = y = X.clone().requires_grad_()
    for _ in range(layers):
        y = torch_attn.sdpa(y, y, y, window_size=(LEFT, 0))
    return int(torch.autograd.grad(y[-1].sum(), x)[0].any(-1).sum())


def milliseconds(length: int, left: int) -> float:
    """Processor time of the fastest of five forwards on one thread, head_dim 64."""
    x, spent = torch.randn(length, 64, generator=torch.Generator().manual_seed(0)), []
    with one_thread():
        for _ in range(5):
            start = time.process_time()
            torch_attn.sdpa(x, x, x, window_size=(left, 0))
            spent.append(1000 * (time.process_time() - start))
    return min(spent)


def row(raw: Tensor, softcap: float) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, weights, and the derivative of each weight by its own raw score, all [S].

    The query is 1 and the keys are the raw scores. With the identity as values the output is the
    weights.
    """
    one, key, identity = raw.new_ones(1, 1), raw[:, None], torch.eye(len(raw), dtype=raw.dtype)
    _, weights, scores = torch_attn.sdpa_with_weights(one, key, identity, scale=1, softcap=softcap)
    jacobian = torch.autograd.functional.jacobian(
        lambda key: torch_attn.sdpa(one, key, identity, scale=1, softcap=softcap), key
    )
    return scores[0], weights[0], jacobian[0, ..., 0].diagonal()


def sunk() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights [3, 2, 4], outputs [3, 2, 2] and the sink's share [3, 2], of a head for each sink.

    And the outputs [2, 2] without a sink, but with one more key and value of zeros.
    """
    query, key = (torch.stack([vector(w) for w in words]) for words in (QUERIES, KEYS))
    three, more = query.expand(3, -1, -1), torch.cat([key, key.new_zeros(1, 2)])
    weights = torch_attn.sdpa_with_weights(three, key, key, scale=1, sinks=SINKS)[1]
    output, lse, _ = torch_attn.sdpa_with_logsumexp(three, key, key, scale=1, sinks=SINKS)
    share = (SINKS[:, None] - lse).exp()
    return weights, output, share, torch_attn.sdpa(query, more, more, scale=1)


def STEPS(quick: bool) -> int:  # noqa: N802
    return 3


def chapter(quick: bool, advance: Callable[[], None]) -> Section:
    section = Section(
        "extras",
        "What models add: a window, a cap and a sink",
        "As in *Mistral 7B* (2023), *Gemma 2* (2024), *Gemma 3* and *gpt-oss* (2025).",
    )
    _window(section, [512, 1024] if quick else [1024, 2048, 4096, 8192])
    advance()
    _cap(section)
    advance()
    _sink(section)
    advance()
    return section


def _window(section: Section, lengths: list[int]) -> None:
    weights = torch.stack([window(-1), window(LEFT)])
    causal, near = (weights > 0).sum((-2, -1)).tolist()
    check([causal, near] == [pairs(10, -1), pairs(10, LEFT)], "two ways to count pairs agree")
    check([reach(n) for n in (1, 2, 3)] == [4, 7, 10], "each layer reaches 3 tokens further back")
    rows = [[n, *(f(n, w) for f in (pairs, milliseconds) for w in (-1, LONG))] for n in lengths]
    check(
        all(a == n * (n + 1) // 2 and b == 128 * n - 8128 for n, a, b, *_ in rows),
        "causal, the pairs are n (n + 1) / 2; with a window of 128 they are 128 n − 8128",
    )
    n, a, b, slow, fast = rows[-1]
    check(fast < slow, "a window saves time")
    section.heading("A sliding window: near keys only")
    section.code(f"torch_attn.sdpa(x, x, x, window_size=({LEFT}, 0))  # (left, right)")
    section.text(f"""
        With a causal mask token n sees n keys; with this window, itself and the {LEFT} before. In a
        sentence of ten tokens {near} of {causal} pairs of query and key are left. Their number
        grows with the length and no longer with its square, and so does the work, for keys out of
        the window are skipped: at {n:,} tokens a window of {LONG + 1} keeps one of
        {number(a / b, 2)} pairs, and the forward is {times(slow / fast)} as fast. Mistral 7B has a
        window of 4,096 tokens, Gemma 3 one of 1,024 in five of six layers, gpt-oss one of 128 in
        every second layer.

        What is further away is not lost, for layers pass it on: the last token depends on 4 tokens
        after one layer with this window, on 7 after two and on 10 after three.
    """)
    with theme():
        figure = plots.heads(weights, TOKENS, names=["causal", f"window_size=({LEFT}, 0)"])
    section.picture(
        "extras-window",
        figure,
        f"**Who sees whom.** Left: every token before. Right: at most {LEFT + 1} tokens.",
        "Two heat maps of ten by ten weights: a triangle, and a band along its diagonal.",
        Numbers.matrix(weights[1], TOKENS, TOKENS),
    )
    section.table(
        ["length", "pairs, causal", "pairs, window", "ms, causal", "ms, window"],
        [[f"{n:,}", f"{a:,}", f"{b:,}", *ms] for n, a, b, *ms in rows],
        f"A window of {LONG + 1}: pairs, and processor time of a forward on one thread.",
    )


def _cap(section: Section) -> None:
    x = torch.linspace(-14, 14, 113, dtype=torch.float64)
    curve, gemma = row(x, CAP)[0], row(x.new_tensor([10.0]), 50.0)[0].item()
    (scores, after, moves), (_, before, moved) = row(RAW, CAP), row(RAW, 0.0)
    slope = 1 - (scores / CAP) ** 2
    check((curve - CAP * (x / CAP).tanh()).abs().max() < 1e-14, "capped scores are c tanh(s / c)")
    errors = [moves - after * (1 - after) * slope, moved - before * (1 - before)]
    check(torch.cat(errors).abs().max() < 1e-15, "a weight changes by w (1 − w) · slope")
    check(bool((moves > moved).all() and (after.diff() > 0).all()), "all move more, in one order")
    section.heading("A soft cap: no score is too large")
    section.code(f"torch_attn.sdpa(q, k, v, softcap={CAP:g})")
    section.text(f"""
        One score far above all other scores takes the whole row, and hardly a gradient is left to
        change that. A soft cap bends every score: **s ↦ c · tanh(s / c)** is nearly s where s is
        small, and never exceeds c. Gemma 2 has c = 50, which makes {fixed(gemma, 2)} of a score of
        10: ordinary rows hardly notice. Here c is {CAP:g}, so that one sees it. The score
        {RAW[3]:g} becomes {fixed(scores[3].item(), 2)}, its weight {fixed(after[3].item(), 3)} and
        no longer {fixed(before[3].item(), 5)}. The order stays.

        Gradients pass, too. The slope of the cap, 1 − (capped / c)², is small where the score was
        large, here {fixed(slope[3].item(), 4)}, but not 0, as it would be had scores been cut off
        at c. A weight w changes with its own score by w (1 − w) times the slope: for the score
        {RAW[3]:g} by {number(moves[3].item(), 2)} with the cap and {number(moved[3].item(), 2)}
        without, for the score {RAW[2]:g} by {number(moves[2].item(), 2)} and
        {number(moved[2].item(), 2)}.
    """)
    names = [f"score {s:g}".replace("-", "−") for s in RAW.tolist()]
    with theme():
        figure = Figure(figsize=(4.8, 5.6), layout="constrained")
        top, bottom = figure.subplots(2, height_ratios=[3, 2])
        top.plot(x, x, "--", color=plots.PALETTE[0], label="no cap")
        top.plot(x, curve, color=plots.PALETTE[1], label=f"{CAP:g} · tanh(s / {CAP:g})")
        top.plot(RAW, scores, "o", color=plots.PALETTE[1], label="the row below")
        top.set(xlim=(-14, 14), ylim=(-7, 7), xlabel="score s", ylabel="score after the cap")
        top.spines[["top", "right"]].set_visible(False)
        top.grid()
        top.legend(loc="upper left")
        bars = {"no cap": before, f"softcap={CAP:g}": after}
        plots.activations(bars, names, label="weight", ax=bottom)
    columns = {"after the cap": scores, "slope": slope, "weight, no cap": before, "capped": after}
    section.picture(
        "extras-cap",
        figure,
        f"**The cap** bends scores away from the dashed line, towards ±{CAP:g}. Below: **the "
        "weights of a row** with one large score.",
        "A curve like an S between two bounds; and bars: uncapped, one weight is nearly 1.",
        Numbers(["", *columns], zip(names, *(t.tolist() for t in columns.values()), strict=True)),
    )


def _sink(section: Section) -> None:
    weights, output, share, zero_key = sunk()
    total = weights.sum(-1)
    (_, fruit, _), (chair, chair_0, chair_2) = total.T.tolist()
    check((total + share - 1).abs().max() < 1e-14, "weights and the sink's share sum to 1")
    turned = output - output[0] * total[..., None]
    check(turned.abs().max() < 1e-14, "a sink shrinks a row's output, and no more")
    apart = (output[1] - zero_key).abs().max()
    check(apart < 1e-14, "a sink of 0 is one more key and value of zeros")
    check(fruit > 0.99 and chair_0 < 0.2 and chair_2 < 0.05, "who finds nothing takes little")
    section.heading("A sink: a row may look at nothing")
    section.code("torch_attn.sdpa(q, k, v, sinks=torch.tensor([0.0]))  # one for each head")
    section.text(f"""
        Softmax shares out a whole, however low the scores are. No key here is like *chair*, and
        still its weights sum to {fixed(chair, 2)} (the vectors are those of the plane of meanings).
        A **sink** is one more logit in the denominator, without a value:

        > weight = exp(score) / (exp(sink) + sum of all exp(score))

        With a sink of 0 the weights of *chair* sum to {fixed(chair_0, 3)}, with one of 2 to
        {fixed(chair_2, 3)}, almost nothing. *Fruit* finds what it looks for and keeps
        {fixed(fruit, 4)} beside a sink of 0. Ratios between keys stay: the output is the one
        without a sink, times that sum. A sink of 0 is also known as softmax-1 or "off by one", and
        is the same as one more key and value of zeros. gpt-oss learns a sink for each head; models
        without one tend to leave what they do not need on the first token (Xiao et al., 2023).
    """)
    names = [f"{word}, {sink}" for word in QUERIES for sink in ("no sink", "sink 0", "sink 2")]
    bars = weights.transpose(0, 1).flatten(0, 1)
    with theme():
        figure = Figure(figsize=(4.8, 3.4), layout="constrained")
        ax = figure.subplots()
        for k, word in enumerate(KEYS):
            left = bars[:, :k].sum(-1)
            ax.barh(names, bars[:, k], left=left, color=plots.PALETTE[k], label=word)
        ax.set(xlim=(0, 1), xlabel="weights of a row")
        ax.invert_yaxis()
        ax.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
    section.picture(
        "extras-sink",
        figure,
        "**Two queries over four keys, with three sinks.** What is missing up to 1 is the sink's.",
        "Stacked bars: those of fruit always reach nearly 1, those of chair only without a sink.",
        Numbers.matrix(bars, names, KEYS),
    )
