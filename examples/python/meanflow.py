"""A training step of MeanFlow: forward mode through a transformer, and backward after it.

    python -m examples.python.meanflow

The built-in attention raises here "Trying to use forward AD with
_scaled_dot_product_flash_attention_for_cpu that does not support it because it has not been
implemented yet." One line makes it go away: ``torch_attn.replace_sdpa()``.

Source: Geng et al., *Mean Flows for One-step Generative Modeling*, 2025,
https://arxiv.org/abs/2505.13447, algorithm 1.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_attn


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        return x + self.mlp(self.mlp_norm(x))


class MeanVelocity(nn.Module):
    """u(z, r, t): the mean velocity between the times r and t of what is at z at time t."""

    def __init__(self, features: int, tokens: int, dim: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.features, self.times = nn.Linear(features, dim), nn.Linear(2, dim)
        self.places = nn.Parameter(torch.randn(tokens, dim) / 10)
        self.blocks = nn.Sequential(*(Block(dim, 4) for _ in range(depth)))
        self.velocity = nn.Linear(dim, features)

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        when = self.times(torch.stack([r, t], -1))[:, None]
        return self.velocity(self.blocks(self.features(z) + self.places + when))


def step(model: nn.Module, x: Tensor) -> Tensor:
    """The loss of data x, [batch, tokens, features]."""
    noise = torch.randn_like(x)
    r, t = torch.rand(2, len(x)).sort(0).values
    r = torch.where(torch.rand(len(x)) < 0.75, t, r)  # of most the velocity at one time
    at = t[:, None, None]
    z, velocity = (1 - at) * x + at * noise, noise - x
    directions = velocity, torch.zeros_like(r), torch.ones_like(t)
    u, du_dt = torch.func.jvp(model, (z, r, t), directions)
    target = velocity - (t - r)[:, None, None] * du_dt
    return (u - target.detach()).square().mean()


def main(steps: int = 30, tokens: int = 32) -> list[float]:
    torch_attn.replace_sdpa()  # the line
    torch.manual_seed(0)
    model = MeanVelocity(features=8, tokens=tokens)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    losses = []
    for i in range(steps):
        data = torch.randn(16, 1, 8).sign() + torch.randn(16, tokens, 8) / 10  # of two kinds
        loss = step(model, data)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if i % 10 == 0 or i == steps - 1:
            print(f"step {i:3}   loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
