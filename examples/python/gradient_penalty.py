"""A critic whose gradient is held at length 1, as in a Wasserstein GAN.

    python -m examples.python.gradient_penalty

The penalty is a function of a gradient, and its own gradient a second derivative. The built-in
attention raises there "derivative for aten::_scaled_dot_product_flash_attention_for_cpu_backward is
not implemented". One line makes it go away: ``torch_attn.convert(critic)``.

Source: Gulrajani et al., *Improved Training of Wasserstein GANs*, 2017,
https://arxiv.org/abs/1704.00028.
"""

import torch
from torch import Tensor, nn

import torch_attn


class Critic(nn.Module):
    """A number for each sequence [batch, tokens, features]."""

    def __init__(self, features: int = 8, dim: int = 64) -> None:
        super().__init__()
        self.features = nn.Linear(features, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.value = nn.Linear(dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.value(self.encoder(self.features(x)).mean(1)).squeeze(-1)


def penalty(critic: nn.Module, real: Tensor, made: Tensor) -> Tensor:
    mix = torch.rand(len(real), 1, 1)
    between = (mix * real + (1 - mix) * made).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (gradient.flatten(1).norm(dim=1) - 1).square().mean()


def main(steps: int = 40) -> list[tuple[float, float]]:
    torch.manual_seed(0)
    critic = Critic()
    torch_attn.convert(critic)  # the line
    optimizer = torch.optim.AdamW(critic.parameters(), 1e-3)
    history = []
    for i in range(steps):
        made = torch.randn(16, 20, 8)
        real = made.cumsum(1) / torch.arange(1, 21)[:, None].sqrt()  # neighbours are alike
        far, held = critic(made).mean() - critic(real).mean(), penalty(critic, real, made)
        optimizer.zero_grad()
        (far + 10 * held).backward()
        optimizer.step()
        history.append((-far.item(), held.item()))
        if i % 10 == 0 or i == steps - 1:
            print(f"step {i:3}   distance {history[-1][0]:6.3f}   penalty {history[-1][1]:.4f}")
    return history


if __name__ == "__main__":
    main()
