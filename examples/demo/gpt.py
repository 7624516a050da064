"""A small GPT over characters, with the attention function as an argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_attn

from .text import ALPHABET, PROSE

Attention = Callable[..., Tensor]
ATTENTION: dict[str, Attention] = {
    "built-in": F.scaled_dot_product_attention,
    "attn": torch_attn.sdpa,
}


@dataclass(frozen=True)
class Config:
    context: int = 256
    batch: int = 8
    layers: int = 4
    heads: int = 4
    width: int = 128
    attention_dropout: float = 0.0


class Block(nn.Module):
    """Attention and a two-layer network, each added to what it reads."""

    def __init__(self, config: Config, attention: Attention) -> None:
        super().__init__()
        self.config, self.attention = config, attention
        width = config.width
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        # [B, L, 3 * width] -> three views [B, heads, L, width / heads]
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.config.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        dropout = self.config.attention_dropout if self.training else 0.0
        attended = self.attention(query, key, value, dropout_p=dropout, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """Logits `[B, L, characters]` of the next character for tokens `[B, L]`."""

    def __init__(self, characters: int, config: Config, attention: Attention) -> None:
        super().__init__()
        self.token = nn.Embedding(characters, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(*(Block(config, attention) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, characters, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.size(1))
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(positions))))


@torch.no_grad()
def write(model: GPT, start: str, length: int, seed: int = 0) -> str:
    """Text that the model goes on with, each character drawn by its probability."""
    model.eval()
    context = model.position.num_embeddings
    generator = torch.Generator().manual_seed(seed)
    tokens = [ALPHABET.index(character) for character in start]
    for _ in range(length):
        logits = model(torch.tensor([tokens[-context:]]))[0, -1]
        tokens.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
    return "".join(ALPHABET[token] for token in tokens)


class Training:
    """One model in training: the same seed and steps give the same batches for every attention."""

    def __init__(self, attention: str, config: Config, seed: int = 0) -> None:
        index = {character: i for i, character in enumerate(ALPHABET)}
        self.text = torch.tensor([index[character] for character in PROSE])
        self.config = config
        torch.manual_seed(seed)
        self.model = GPT(len(ALPHABET), config, ATTENTION[attention])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.generator = torch.Generator().manual_seed(seed)

    def step(self) -> float:
        """Trains on one batch; returns its loss in nats a character."""
        size, length = self.config.batch, self.config.context
        starts = torch.randint(len(self.text) - length, (size, 1), generator=self.generator)
        window = self.text[starts + torch.arange(length + 1)]
        logits = self.model(window[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss.item()
