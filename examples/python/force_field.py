"""A force field: energies of atoms by attention, trained on forces, which are their gradients.

    python -m examples.python.force_field

The loss holds a gradient, so training differentiates twice, also with respect to the bias of the
scores, which is learned from distances. Without such a bias the built-in attention raises
"derivative for aten::_scaled_dot_product_flash_attention_for_cpu_backward is not implemented", and
with it stores the L x S scores.
"""

import torch
from torch import Tensor, nn

import torch_attn


class ForceField(nn.Module):
    """Energy of atoms: attention that knows of places by distances alone, so it may be turned."""

    def __init__(self, dim: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.near = nn.Sequential(nn.Linear(16, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.bias = nn.Linear(16, heads)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.energy = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, 1))

    def forward(self, positions: Tensor) -> Tensor:
        """[batch] of positions [batch, atoms, 3]."""
        apart = (positions[:, :, None] - positions[:, None]).square().sum(-1)
        distances = (apart + torch.eye(positions.size(1))).sqrt()  # of an atom to itself: 1
        waves = torch.exp(-4 * (distances[..., None] - torch.linspace(0.5, 3, 16)) ** 2)
        atoms = self.near(waves.sum(2))
        q, k, v = self.qkv(atoms).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        bias = self.bias(waves).permute(0, 3, 1, 2)  # [batch, heads, atoms, atoms]
        seen = torch_attn.sdpa(q, k, v, bias).transpose(1, 2).flatten(-2)
        return self.energy(atoms + seen).sum((1, 2))


def lennard_jones(positions: Tensor) -> Tensor:
    """The energy to learn, softened where two atoms are close."""
    first, second = torch.triu_indices(positions.size(1), positions.size(1), 1)
    squares = (positions[:, first] - positions[:, second]).square().sum(-1) + 0.3
    return (squares**-6 - 2 * squares**-3).sum(-1)


def forces(energy: nn.Module, positions: Tensor, train: bool = False) -> Tensor:
    """Minus the gradient of the energy; with `train` it can be differentiated again."""
    positions = positions.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(energy(positions).sum(), positions, create_graph=train)
    return -gradient


def main(steps: int = 60) -> list[float]:
    torch.manual_seed(0)
    grid = torch.cartesian_prod(*3 * [torch.arange(2.0)])  # 8 atoms at the corners of a cube
    positions = grid + 0.15 * torch.randn(256, 8, 3)
    expected = forces(lennard_jones, positions)
    model = ForceField()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    for i in range(steps):
        batch = torch.randint(len(positions), (32,))
        error = forces(model, positions[batch], train=True) - expected[batch]
        loss = error.square().mean() / expected.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if i % 20 == 0 or i == steps - 1:
            print(f"step {i:3}   squared error of the forces, of their square: {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
