"""A small transformer that is trained with a scale, and watched while it learns.

The task is associative recall: "a is 7, b is 2, c is 7, ...; b?", answered by 2. Nothing but the
text itself tells which value belongs to which key, so that only attention can answer; and how well
it does is one number. The weights that make queries and keys begin such that both are standard
normal, as in the chapter before, with one head of 128.

How it was chosen: tried beforehand were this task with 16 and 32 pairs, learning rates of 0.001 and
0.003, three seeds, PyTorch's default initialization and SGD, as well as the characters of a real
text. With 1/√dₖ it was learned first in all of them, by little in the text;
without a scale last, but for PyTorch's initialization, where it was level with 1/dₖ. SGD learned
with 1/√dₖ alone, and not for good. With four heads of 32 the three are nearer to each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_attn
from examples.demo.gpt import Block, Config

from .scaling import SCALES

SYMBOLS = 64  # keys that there are, and values
PAIRS = 16
CONFIG = Config(context=2 * PAIRS, batch=16, layers=2, heads=1, width=128)
HEAD_DIM = CONFIG.width // CONFIG.heads
LEARNING_RATE = 1e-3
SEEDS = (0, 1)
CHANCE = math.log(SYMBOLS)
WATCHED_EVERY = 10
AGREEMENT_AFTER = 40  # steps, when no run has learned anything yet


class Attention:
    """attn with a scale, which hands out the gradient of the scores of its last watched call."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.watching = False
        self.mask: Tensor | None = None
        self.query = self.key = torch.empty(0)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        self.mask = None
        if self.watching:
            # Adding zeros changes nothing; the gradient of the zeros is the gradient of the scores.
            shape = (*query.shape[:-1], key.size(-2))
            self.mask = torch.zeros(shape, requires_grad=True)
            self.query, self.key = query.detach(), key.detach()
        return torch_attn.sdpa(query, key, value, self.mask, scale=self.scale, **options)


class Recall(nn.Module):
    """Logits `[B, pairs, SYMBOLS]` of the values that belong to the keys that are asked for.

    A pair is one token, the sum of what stands for its key and its value; a question is a token
    that has a key alone. Tokens see those before them; there are no positions, for none is needed.
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        width = CONFIG.width
        self.attentions = [Attention(scale) for _ in range(CONFIG.layers)]
        self.key = nn.Embedding(SYMBOLS, width)
        self.value = nn.Embedding(SYMBOLS, width)
        self.blocks = nn.Sequential(*(Block(CONFIG, attention) for attention in self.attentions))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, SYMBOLS, bias=False)
        for block in self.blocks:
            # LayerNorm gives numbers of variance 1: so have the queries and keys made of them.
            nn.init.normal_(block.qkv.weight[: 2 * width], std=width**-0.5)
            nn.init.zeros_(block.qkv.bias)

    def forward(self, keys: Tensor, values: Tensor, asked: Tensor) -> Tensor:
        tokens = torch.cat([self.key(keys) + self.value(values), self.key(asked)], dim=1)
        logits: Tensor = self.head(self.norm(self.blocks(tokens)))[:, keys.size(1) :]
        return logits


def batch_of(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values, keys that are asked for and their values: each `[size, PAIRS]`.

    The keys of a row are distinct; values and questions may repeat.
    """
    keys = torch.rand(size, SYMBOLS, generator=generator).argsort(dim=-1)[:, :PAIRS]
    values = torch.randint(SYMBOLS, (size, PAIRS), generator=generator)
    asked = torch.randint(PAIRS, (size, PAIRS), generator=generator)
    return keys, values, keys.gather(1, asked), values.gather(1, asked)


@dataclass(frozen=True)
class Rows:
    """The rows of scores of the questions, in each layer: `[layers]`."""

    deviation: Tensor  # the standard deviation of the scores
    entropy: Tensor  # the mean, in nats
    largest: Tensor  # the mean of the largest weights
    median_dscores: Tensor  # the length of a row of dS, of the losses' sum
    root_mean_square_dscores: Tensor


@dataclass(frozen=True)
class Run:
    scale: str
    seed: int
    losses: list[float]  # of every step, in nats an answer
    gradients: Tensor  # [steps, layers] norms for the weights that make queries and keys
    watched: list[int]  # the steps at which rows were looked at
    rows: list[Rows]
    agreement: Tensor  # [layers] of gradients, after AGREEMENT_AFTER steps
    accuracy: float  # of 1,024 answers to new texts, at the end

    @property
    def learned_at(self) -> int | None:
        """The first step from which the mean loss of ten is below half of what guessing costs."""
        means = torch.tensor(self.losses).unfold(0, 10, 1).mean(-1)
        below = (means < CHANCE / 2).nonzero()
        return int(below[0]) + 1 if len(below) else None


def rows_of(attentions: list[Attention], answers: int) -> Rows:
    """What the last, watched step did; its loss was the mean over `answers`."""
    found: list[list[Tensor]] = []
    for attention in attentions:
        assert attention.mask is not None
        assert attention.mask.grad is not None
        value = attention.key  # any will do: of the results only scores and weights are looked at
        _, weights, scores = torch_attn.sdpa_with_weights(
            attention.query, attention.key, value, is_causal=True, scale=attention.scale
        )
        weights, scores, dscores = (
            t[:, :, PAIRS:] for t in (weights, scores, answers * attention.mask.grad)
        )
        lengths = dscores.norm(dim=-1)
        found.append(
            [
                scores[scores > -math.inf].std(),
                torch.special.entr(weights).sum(-1).mean(),
                weights.amax(-1).mean(),
                lengths.median(),
                lengths.square().mean().sqrt(),
            ]
        )
    return Rows(*(torch.stack(layers) for layers in zip(*found, strict=True)))


def agreement(model: Recall, generator: torch.Generator, batches: int = 8) -> Tensor:
    """[layers] mean cosine between what two batches want of the weights of queries and keys.

    1 if all agree; 0 if what each teaches is noise to the other batches.
    """
    gradients = []
    for _ in range(batches):
        *given, answers = batch_of(CONFIG.batch, generator)
        loss = F.cross_entropy(model(*given).flatten(0, 1), answers.flatten())
        weights = [block.qkv.weight for block in model.blocks]
        found = torch.stack(torch.autograd.grad(loss, weights))[:, : 2 * CONFIG.width]
        gradients.append(F.normalize(found.flatten(1), dim=-1))
    stacked = torch.stack(gradients, dim=1)  # [layers, batches, numbers]
    cosines = stacked @ stacked.mT
    return (cosines.sum((-2, -1)) - batches) / (batches * (batches - 1))


def train(scale: str, seed: int, steps: int, advance: Callable[[], None] = lambda: None) -> Run:
    """The same seed begins with the same weights and reads the same texts, whatever the scale."""
    torch.manual_seed(seed)
    model = Recall(SCALES[scale](HEAD_DIM))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    generator = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    gradients = torch.empty(steps, CONFIG.layers)
    watched: list[int] = []
    rows: list[Rows] = []
    agreed = torch.full((CONFIG.layers,), math.nan)
    for step in range(steps):
        if step == min(AGREEMENT_AFTER, steps - 1):
            agreed = agreement(model, torch.Generator().manual_seed(1000 + seed))
        watching = step % WATCHED_EVERY == 0
        for attention in model.attentions:
            attention.watching = watching
        *given, answers = batch_of(CONFIG.batch, generator)
        loss = F.cross_entropy(model(*given).flatten(0, 1), answers.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for i, block in enumerate(model.blocks):
            gradients[step, i] = block.qkv.weight.grad[: 2 * CONFIG.width].norm()
        if watching:
            watched.append(step)
            rows.append(rows_of(model.attentions, answers.numel()))
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % WATCHED_EVERY == 0:
            advance()
    *given, answers = batch_of(1024 // PAIRS, generator)
    with torch.no_grad():
        right = model(*given).argmax(-1) == answers
    accuracy = right.double().mean().item()
    return Run(scale, seed, losses, gradients, watched, rows, agreed, accuracy)
