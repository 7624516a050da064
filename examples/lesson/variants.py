"""Chapter: self-, masked and cross-attention, and what attention does and does not depend on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import Tensor

import torch_attn
from examples import plots
from examples.demo.report import check

from .page import Numbers, Picture, Section, theme
from .wording import fixed, number

ENGLISH = ["I", "have", "read", "the", "book"]
GERMAN = ["Ich", "habe", "das", "Buch", "gelesen"]
# How much a word has of: a person, having, reading, an article, a book. Made by hand.
MEANINGS = torch.tensor(
    [
        [2.4, 0.4, 0.4, 0.0, 0.0],
        [0.5, 2.2, 1.0, 0.0, 0.0],
        [0.3, 0.9, 2.2, 0.0, 0.8],
        [0.0, 0.0, 0.0, 2.2, 0.9],
        [0.0, 0.0, 0.8, 0.9, 2.2],
    ],
    dtype=torch.float64,
)
TRANSLATES = [0, 1, 3, 4, 2]  # of each German word, the English one
TWICE = ["the", "cat", "saw", "the", "dog"]
FARTHEST = 8  # distance of the learned bias
LOOKS_BACK = [-3, -1, 1, 3]  # places to the left that each head shall learn to read


def self_attention() -> Tensor:
    """Weights [5, 5] among the English words."""
    return torch_attn.sdpa_with_weights(MEANINGS, MEANINGS, MEANINGS)[1]


def masked_attention() -> Tensor:
    """The same, where no word sees a later one."""
    return torch_attn.sdpa_with_weights(MEANINGS, MEANINGS, MEANINGS, is_causal=True)[1]


def cross_attention() -> Tensor:
    """Weights [5, 5] of German queries over the English words."""
    query = 0.9 * MEANINGS[TRANSLATES]
    return torch_attn.sdpa_with_weights(query, MEANINGS, MEANINGS)[1]


@dataclass
class MultiHead:
    """Weights [4, 5, 5] of one call with four heads; `apart`: the largest difference from four."""

    weights: Tensor
    apart: float


def multi_head() -> MultiHead:
    """Four heads of four numbers, whose projections are random: nothing is learned here."""
    draw = torch.Generator().manual_seed(3)
    project = torch.randn(3, 4, 5, 4, generator=draw, dtype=torch.float64)
    query, key, value = MEANINGS @ project  # each [4, 5, 4]
    output, weights, _ = torch_attn.sdpa_with_weights(query, key, value)
    single = [torch_attn.sdpa(query[h], key[h], value[h]) for h in range(4)]
    return MultiHead(weights, _difference(output, torch.stack(single)))


def positions(length: int, size: int) -> Tensor:
    """[L, E]: sines and cosines of the places, of Vaswani et al., 2017, section 3.5."""
    place = torch.arange(length)[:, None]
    frequency = 10000 ** (-torch.arange(0, size, 2) / size)
    angles = place * frequency
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


@dataclass
class SameWord:
    """Weights [5, 5] of a sentence that has "the" twice, and how far their two rows differ."""

    plain: Tensor
    placed: Tensor

    @staticmethod
    def rows_differ(weights: Tensor) -> float:
        return _difference(weights[0], weights[3])


def same_word() -> SameWord:
    draw = torch.Generator().manual_seed(1)
    words = {word: torch.randn(16, generator=draw) for word in TWICE}
    x = torch.stack([words[word] for word in TWICE])
    placed = x + positions(5, 16)
    return SameWord(
        torch_attn.sdpa_with_weights(x, x, x)[1],
        torch_attn.sdpa_with_weights(placed, placed, placed)[1],
    )


@dataclass
class Learned:
    """A bias over distances that four heads have learned: the table [4, 17], and the losses."""

    table: Tensor
    losses: list[float]

    @property
    def weights(self) -> Tensor:
        """exp(bias) of each distance, as a share of all: [4, 17]."""
        return self.table.softmax(-1)


def learned_bias(steps: int = 20) -> Learned:
    """Head h learns to read LOOKS_BACK[h] places to the left; queries and keys say nothing."""
    draw = torch.Generator().manual_seed(0)
    table = torch.zeros(4, 2 * FARTHEST + 1, requires_grad=True)
    optimizer = torch.optim.Adam([table], lr=0.2)
    nothing = torch.zeros(1, 4, 64, 1)
    losses = []
    for _ in range(steps):
        value = torch.randn(1, 4, 64, 8, generator=draw)
        output = torch_attn.flex_attention(
            nothing, nothing, value, torch_attn.mods.distances(table)
        )
        wanted = torch.stack([value[:, h].roll(LOOKS_BACK[h], 1) for h in range(4)], 1)
        inner = slice(FARTHEST, -FARTHEST)  # not what is rolled over the ends
        loss = (output - wanted)[:, :, inner].square().mean()  # type: ignore[operator]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Learned(table.detach(), losses)


def experiments() -> dict[str, float]:
    """What is changed, and by how much the result changes at most (float32, results of order 1)."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(12, 16, generator=draw)
    order = torch.randperm(12, generator=draw)
    place = positions(12, 16)

    def attend(x: Tensor, causal: bool = False) -> Tensor:
        return torch_attn.sdpa(x, x, x, is_causal=causal)

    results = {
        "tokens in another order": _difference(attend(x[order]), attend(x)[order]),
        "… with positional encodings": _difference(
            attend(x[order] + place), attend(x + place)[order]
        ),
        "… with a causal mask": _difference(attend(x[order], True), attend(x, True)[order]),
    }

    wanted = torch.randn(1, 16, generator=draw)
    text = torch.randn(4095, 16, generator=draw)
    next_to_it, far_away = torch.cat([text, wanted]), torch.cat([wanted, text])
    results["a key moved 4,095 places away"] = _difference(
        torch_attn.sdpa(wanted, next_to_it, next_to_it),
        torch_attn.sdpa(wanted, far_away, far_away),
    )

    batch = torch.randn(3, 12, 16, generator=draw)
    other = batch.clone()
    other[1] = torch.randn(12, 16, generator=draw)
    before, after = attend(batch), attend(other)
    results["another text of the batch replaced"] = _difference(before[[0, 2]], after[[0, 2]])
    one_token = batch.clone()
    one_token[1, 5] = other[1, 5]
    others = [i for i in range(12) if i != 5]
    results["one token of the same text replaced"] = _difference(
        before[1, others], attend(one_token)[1, others]
    )

    weights = torch_attn.sdpa_with_weights(batch, batch, batch)[1]
    results["weights of one text and of another"] = _difference(weights[0], weights[1])
    layer = torch.nn.Linear(16, 16)
    fixed_weights = layer.weight.detach().clone()
    layer(batch[0]), layer(batch[1])
    results["weights of a linear layer, likewise"] = _difference(fixed_weights, layer.weight)
    return results


def _difference(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


def STEPS(quick: bool) -> int:  # noqa: N802
    return 3


def chapter(quick: bool, advance: Callable[[], None]) -> Section:
    section = Section(
        "variants",
        "Three variants, and what attention does not know",
        "After *Attention – a visual tour*, slides by Martin Stoffel.",
    )
    _three(section)
    advance()
    _heads(section)
    advance()
    _depends(section)
    advance()
    return section


def _three(section: Section) -> None:
    section.text("""
        Queries, keys and values need not come from one place, and not every query may see every
        key. Three uses of the same operator make up a transformer:

        - **Self-attention**: all three come from the same tokens, and each token sees all. It reads
          a text to the end, to classify it for example.
        - **Masked self-attention**: the same, but no token sees a later one. It writes: what comes
          next must not be known yet.
        - **Cross-attention**: the queries come from one text, keys and values from another. It
          translates, or describes a picture.

        The tokens are nodes of a directed graph, and each weight is an edge from the key, whose
        value flows, to the query that takes it. The mask removes edges. Without a mask all pairs
        have one, however far they are apart in the text.

        The example is a sentence and its German translation, where the verb comes last. Each word
        has five numbers for what it means, made by hand.
    """)
    masked = masked_attention()
    check(bool((masked.triu(1) == 0).all()), "a causal mask leaves no weight on later tokens")
    variants = [
        (
            "self",
            "Self-attention",
            "Every word sees every word.",
            self_attention(),
            ENGLISH,
            "torch_attn.sdpa(x, x, x)",
        ),
        (
            "masked",
            "Masked self-attention",
            "A word sees itself and what came before; “I” can only see “I”.",
            masked,
            ENGLISH,
            "torch_attn.sdpa(x, x, x, is_causal=True)",
        ),
        (
            "cross",
            "Cross-attention",
            "German queries, English keys: “gelesen”, the last word, finds “read” in the middle.",
            cross_attention(),
            GERMAN,
            "torch_attn.sdpa(y, x, x)",
        ),
    ]
    for name, title, what, weights, queries, call in variants:
        with theme():
            # less than any weight but those that the mask makes 0
            graph = plots.graph(weights, queries, ENGLISH, least=0.01)
            matrix = plots.heatmap(weights, queries, ENGLISH, vmax=1.0)
        section.heading(title)
        section.code(call)
        edges = "ring of words with arrows" if queries == ENGLISH else "two columns of words"
        section.pictures(
            Picture(
                f"variants-{name}-graph",
                graph,
                f"**{title} as a graph.** {what}",
                f"{title} as a graph: {edges}, each arrow as wide as its weight.",
            ),
            Picture(
                f"variants-{name}",
                matrix,
                f"**{title} as a matrix.** Rows sum to 1.",
                f"{title} as a heat map of five by five weights.",
                Numbers.matrix(weights, queries, ENGLISH),
            ),
        )


def _learned(section: Section) -> None:
    learned = learned_bias()
    found = [int(row.argmax()) - FARTHEST for row in learned.weights]
    check(found == LOOKS_BACK, "each head has learned the distance that it was asked for")
    least = learned.weights.amax(-1).min().item()
    check(learned.losses[-1] < learned.losses[0] / 20, "the bias over distances is learned")
    section.heading("Distance, learned")
    section.text(f"""
        Positions can also be added to the scores: a number for each distance, which is learned.
        T5 and Swin do so. Here queries and keys are zeros, so that this bias alone decides. Four
        heads learn to read one place each: 3 and 1 to the right, 1 and 3 to the left. In
        {len(learned.losses)} steps the mean squared error goes from {fixed(learned.losses[0], 2)}
        to {fixed(learned.losses[-1], 2)}, and each head gives its place at least
        {fixed(least, 2)} of the weight. The table has 4 times {2 * FARTHEST + 1} numbers, however
        long the text is. Neither the call nor its gradient makes a matrix of queries and keys.
    """)
    section.code("torch_attn.flex_attention(q, k, v, torch_attn.mods.distances(table))")
    heads = [f"head {h}" for h in range(4)]
    places = [f"{d:+d}" if d else "0" for d in range(-FARTHEST, FARTHEST + 1)]
    with theme():
        figure = plots.heatmap(learned.weights, heads, places, vmax=1.0)
        figure.axes[0].set(xlabel="distance: query minus key", ylabel="")
    section.picture(
        "variants-distances",
        figure,
        "**What four heads have learned**: the weight of each distance.",
        "Heat map of four heads by 17 distances with one bright cell a row, at -3, -1, 1 and 3.",
        Numbers.matrix(learned.weights, heads, places),
    )


def _heads(section: Section) -> None:
    many = multi_head()
    check(many.apart < 1e-14, "heads do not talk: one call of four heads equals four calls")
    first = [row.argmax(-1).tolist() for row in many.weights]
    places = len({tuple(head) for head in first})
    section.heading("Several heads at once")
    section.text(f"""
        A head has projections of its own, so that it can look elsewhere than other heads. Here are
        four with random ones, in one call: query, key and value are [4, 5, 4], that is heads,
        tokens, numbers. Heads know nothing of each other: four calls give the same outputs (the
        largest difference is {number(many.apart, 1)}). The words that get most weight form
        {places} different patterns in the 4 heads.
    """)
    with theme():
        figure = plots.heads(many.weights, ENGLISH, vmax=1.0)
    section.picture(
        "variants-heads",
        figure,
        "**Four heads of the same sentence**, with random projections.",
        "Four heat maps of five by five weights, each with its largest cells elsewhere.",
        Numbers(
            ["head", "query", *ENGLISH],
            [
                [str(h), word, *row]
                for h, rows in enumerate(many.weights.tolist())
                for word, row in zip(ENGLISH, rows, strict=True)
            ],
        ),
    )


def _depends(section: Section) -> None:
    found = experiments()
    small = [found[name] for name in _NOTHING]
    large = [found[name] for name in found if name not in _NOTHING]
    check(max(small) < 1e-5, "order, distance and other texts of the batch do not matter")
    check(min(large) > 0.05, "positions, masks and other tokens do matter")
    words = same_word()

    section.heading("Attention does not know the order")
    section.text(f"""
        Attention acts on a set of vectors. Put the tokens into another order, and the outputs are
        the same ones in that order: **permutation equivariance**. Measured, the largest difference
        is {number(found["tokens in another order"], 1)}, the rounding of float32. So “the cat
        saw the dog” and “the dog saw the cat” would be one to it, and the two *the* of a sentence
        the same token: their rows of weights differ by
        {number(words.rows_differ(words.plain), 1)}.

        What brings order in is added to the vectors before: sines and cosines of the place, the
        **positional encodings**. With them the rows differ by
        {fixed(words.rows_differ(words.placed), 2)}, and another order of the tokens changes
        the outputs by {fixed(found["… with positional encodings"], 2)}. A causal mask knows the
        order too, without any encoding: {fixed(found["… with a causal mask"], 2)}.
    """)
    names = ["the (1)", "cat", "saw", "the (2)", "dog"]
    with theme():
        top = max(words.plain.max().item(), words.placed.max().item())
        plain = plots.heatmap(words.plain, names, title="without positions", vmax=top)
        placed = plots.heatmap(words.placed, names, title="with positions", vmax=top)
        chart = _chart(found)
    section.pictures(
        Picture(
            "variants-without-positions",
            plain,
            "**Without positions** the two “the” have the same row, and the same column.",
            "Heat map in which the first and the fourth row are equal, and columns too.",
            Numbers.matrix(words.plain, names, names),
        ),
        Picture(
            "variants-with-positions",
            placed,
            "**With positional encodings** they are two different tokens.",
            "Heat map in which the first and the fourth row differ.",
            Numbers.matrix(words.placed, names, names),
        ),
    )
    _learned(section)
    section.heading("What the result depends on, by experiment")
    section.text(f"""
        - **Distance does not matter.** A query finds its key next to it or 4,095 tokens away, with
          the same result to {number(found["a key moved 4,095 places away"], 1)}. That is what
          recurrent networks find hard.
        - **Texts of a batch do not talk.** Replace another text of the batch: the change is
          {number(found["another text of the batch replaced"], 1)}, not one bit. Replace one token
          of the same text, and the outputs of the other tokens change by
          {fixed(found["one token of the same text replaced"], 2)}.
        - **Weights are made of the data.** Two texts have weights that differ by up to
          {fixed(found["weights of one text and of another"], 2)}. A linear layer has the same
          weights, whatever it is given.
    """)
    section.picture(
        "variants-depends",
        chart,
        "**The largest change of any number of the result**, in float32. Blue dots: rounding, "
        "or no change at all; the axis below the first tick is linear, so that 0 has its place.",
        "Dots on a logarithmic axis: four experiments at zero or near 1e-7, four near 1.",
        Numbers(["what is changed", "largest change"], [[k, v] for k, v in found.items()]),
    )


_NOTHING = [
    "tokens in another order",
    "a key moved 4,095 places away",
    "another text of the batch replaced",
    "weights of a linear layer, likewise",
]


def _chart(found: dict[str, float]) -> Figure:
    """A dot for each experiment; zero is at the left end of the axis."""
    figure = Figure(figsize=(4.8, 3.9), layout="constrained")
    ax = figure.subplots()
    for y, (name, change) in enumerate(found.items()):
        nothing = name in _NOTHING
        color = "#0072B2" if nothing else "#D55E00"
        ax.plot([0, change], [y, y], color=color, linewidth=1.2, alpha=0.6)
        ax.plot([change], [y], "o" if nothing else "s", color=color, markersize=7, clip_on=False)
        ax.annotate(name, (0, y), (2, 6), textcoords="offset points", fontsize=9, va="bottom")
    ax.set_xscale("symlog", linthresh=1e-8, linscale=0.6)
    ax.set(xlim=(0, 10), ylim=(len(found) - 0.6, -0.9), xlabel="largest change of the result")
    ticks = [0, 1e-8, 1e-6, 1e-4, 1e-2, 1]
    ax.set_xticks(ticks, ["0", *(f"$10^{{{round(math.log10(t))}}}$" for t in ticks[1:])])
    ax.minorticks_off()
    ax.set_yticks([])
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.grid(axis="x")
    ax.set_axisbelow(True)
    return figure
