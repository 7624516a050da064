"""Training with differential privacy: the gradient of each text is clipped, then noise is added.

    python -m examples.python.private_texts

Texts of different lengths lie one behind the other, without padding: packed. Attention keeps them
apart, so the gradient of a text, of a linear layer's weight, is a sum over its tokens of gradients
of the layer's outputs times its inputs. One forward and one backward give these for all texts. What
is clipped is never stored for each text, and there is no backward for each.

Sources: Abadi et al., *Deep Learning with Differential Privacy*, 2016,
https://arxiv.org/abs/1607.00133; Li et al., *Large Language Models Can Be Strong Differentially
Private Learners*, 2021, https://arxiv.org/abs/2110.05679, for norms of what is not stored.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_attn


class Reader(nn.Module):
    """A number for each text. Only linear layers of tokens have parameters."""

    def __init__(self, features: int = 8, dim: int = 64, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.features, self.answer = nn.Linear(features, dim), nn.Linear(dim, 1)
        self.qkv = nn.ModuleList(nn.Linear(dim, 3 * dim) for _ in range(depth))
        self.out = nn.ModuleList(nn.Linear(dim, dim) for _ in range(depth))

    def forward(self, tokens: Tensor, lengths: list[int]) -> Tensor:
        """[texts] of tokens [all of them, features]."""
        cu_seq = F.pad(torch.tensor(lengths).cumsum(0), (1, 0))
        longest = max(lengths)
        x = self.features(tokens)
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = qkv(F.rms_norm(x, x.shape[-1:])).unflatten(1, (3, self.heads, -1)).unbind(1)
            x = x + out(
                torch_attn.varlen_attn(q, k, v, cu_seq, cu_seq, longest, longest).flatten(1)
            )
        return torch.stack([text.mean() for text in self.answer(x).split(lengths)])


def losses(model: nn.Module, tokens: Tensor, lengths: list[int], labels: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(tokens, lengths), labels, reduction="none")


def clip(
    model: nn.Module, tokens: Tensor, lengths: list[int], labels: Tensor, bound: float
) -> tuple[Tensor, Tensor]:
    """Writes into `grad` the sum of the texts' gradients, each scaled to norm `bound` at most.

    Returns:
        The loss of each text and the norm of its gradient.
    """
    layers, inputs, outputs = [], [], []

    def record(layer: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        layers.append(layer)
        inputs.append(args[0].detach())
        outputs.append(output)

    hooks = [m.register_forward_hook(record) for m in model.modules() if isinstance(m, nn.Linear)]
    loss = losses(model, tokens, lengths, labels)
    for hook in hooks:
        hook.remove()
    gradients = torch.autograd.grad(loss.sum(), outputs)  # of each token: of no weight

    # A layer's gradient is sum over t of g_t x_t', the bias's sum over t of g_t. Together their
    # squared norm is the sum over s and t of <g_s, g_t> (<x_s, x_t> + 1).
    squares = torch.zeros(len(lengths)).to(tokens)
    for x, g in zip(inputs, gradients, strict=True):
        for n, (xn, gn) in enumerate(zip(x.split(lengths), g.split(lengths), strict=True)):
            squares[n] += ((gn @ gn.T) * (xn @ xn.T + 1)).sum()
    norms = squares.sqrt()

    factor = (bound / norms).clamp(max=1).repeat_interleave(torch.tensor(lengths))[:, None]
    for layer, x, g in zip(layers, inputs, gradients, strict=True):
        layer.weight.grad, layer.bias.grad = (factor * g).T @ x, (factor * g).sum(0)
    return loss.detach(), norms


def main(steps: int = 60, bound: float = 1.0, noise: float = 0.5) -> list[float]:
    torch.manual_seed(0)
    model = Reader()
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    history = []
    for i in range(steps):
        lengths = torch.randint(5, 40, (64,)).tolist()
        labels = torch.randint(2, (64,)).float()
        marks = [label * (torch.rand(n) < 0.5) for label, n in zip(labels, lengths, strict=True)]
        tokens = torch.randn(sum(lengths), 8)
        tokens[:, 0] += 3 * torch.cat(marks)  # of half of the tokens of half of the texts
        loss, norms = clip(model, tokens, lengths, labels, bound)
        for p in model.parameters():
            p.grad = (p.grad + noise * bound * torch.randn_like(p)) / len(lengths)
        optimizer.step()
        history.append(loss.mean().item())
        if i % 20 == 0 or i == steps - 1:
            clipped = (norms > bound).float().mean().item()
            print(f"step {i:3}   loss {history[-1]:.3f}   {clipped:4.0%} of the gradients clipped")
    return history


if __name__ == "__main__":
    main()
