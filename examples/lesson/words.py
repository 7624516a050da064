"""Chapter: query, key and value in plain words, with the smallest example that there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import torch_attn
from examples import plots
from examples.demo.report import check

from .page import Section, theme
from .wording import fixed

QUERY = "something warm"
KEYS = ["cocoa", "lemonade"]


@dataclass
class Menu:
    """One query [1, 2] and two drinks: keys [2, 2] (how warm, how sweet), values [2, 1] (a price).

    Scores are before softmax, scaled: [1, 2], as the weights are; the output is [1, 1].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scores: Tensor
    weights: Tensor
    output: Tensor


def menu() -> Menu:
    query = torch.tensor([[2.0, 0.0]], dtype=torch.float64)
    key = torch.tensor([[1.0, 0.5], [-0.5, 1.0]], dtype=torch.float64)
    value = torch.tensor([[4.0], [2.0]], dtype=torch.float64)
    output, weights, scores = torch_attn.sdpa_with_weights(query, key, value)
    return Menu(query, key, value, scores, weights, output)


def STEPS(quick: bool) -> int:  # noqa: N802
    return 1


def chapter(quick: bool, advance: Callable[[], None]) -> Section:
    section = Section("words", "Query, key and value, in plain words")
    m = menu()
    warm, cold = m.weights[0].tolist()
    high, low = m.scores[0].tolist()
    price = m.output.item()
    check(abs(warm * 4 + cold * 2 - price) < 1e-15, "the output is the values' weighted mean")
    section.text(f"""
        Attention is a way to look something up when no entry fits exactly. Three things take part:

        - a **query** says what is looked for;
        - a **key** says what an entry is about. It is what the query is compared with;
        - a **value** is what the entry holds. It is what one gets.

        A guest asks for something warm, and the menu has two drinks. The query is a pair of
        numbers, (2, 0): warmth counts, sweetness does not. So are the keys: cocoa is warm and a
        little sweet (1, 0.5), lemonade is cold and sweet (−0.5, 1). The values are the prices, 4
        and 2. What will the guest pay?

        1. **Compare.** Multiply the query with each key, number by number, and add up: 2 for cocoa,
           −1 for lemonade. Divided by the root of the size of a key, √2, these are the **scores**,
           {fixed(high, 2)} and {fixed(low, 2)}. The last chapters show why they are divided.
        2. **Share out.** Softmax turns any scores into parts of one whole. These are the
           **weights**: {fixed(warm, 3)} for cocoa and {fixed(cold, 3)} for lemonade.
        3. **Mix.** Add the values up, each times its weight:
           {fixed(warm, 3)} · 4 + {fixed(cold, 3)} · 2 = **{fixed(price, 3)}**.

        The answer is neither entry, but a mixture that leans to the one that fits. So a small
        change of the query changes the answer a little, and the whole can be learned by gradients.
    """)
    with theme():
        figure = plots.graph(m.weights, [QUERY], KEYS)
    section.picture(
        "words",
        figure,
        "**One query, two keys.** Each edge is as wide as the weight with which that key's value "
        "flows to the query.",
        "A graph with edges from cocoa, wide, and from lemonade, narrow, to: something warm.",
    )
    section.table(
        ["", "key", "value", "score", "weight", "weight · value"],
        [
            [name, f"({k[0]:g}, {k[1]:g})".replace("-", "−"), v[0], s, w, w * v[0]]
            for name, k, v, s, w in zip(
                KEYS,
                m.key.tolist(),
                m.value.tolist(),
                m.scores[0].tolist(),
                m.weights[0].tolist(),
                strict=True,
            )
        ],
        "All the numbers of the example; the last column adds up to the output.",
    )
    section.text("In code, and with any number of queries, keys and values at once:")
    section.code("""
        import torch, torch_attn

        query = torch.tensor([[2.0, 0.0]])               # [L, E]:  L queries of E numbers
        key = torch.tensor([[1.0, 0.5], [-0.5, 1.0]])    # [S, E]:  S keys of E numbers
        value = torch.tensor([[4.0], [2.0]])             # [S, Ev]: a value for each key

        output = torch_attn.sdpa(query, key, value)      # [L, Ev]
        output, weights, scores = torch_attn.sdpa_with_weights(query, key, value)
    """)
    section.text("""
        A network's queries, keys and values are not written by hand. Each token, a word or a part
        of one, is a vector x, and three learned matrices make a query, a key and a value of it.
        Every token asks, and every token is also an entry that other tokens find.
    """)
    advance()
    return section
