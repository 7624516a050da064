"""A force field: energies of molecules by attention, trained on forces, which are their gradients.

    python -m examples.python.force_field

Molecules of different sizes lie one behind the other, without padding: packed. The loss holds a
gradient, so training differentiates twice, also with respect to the bias of the scores, which is
learned from distances. The built-in attention takes molecules that are padded; without a bias it
raises "derivative for aten::_scaled_dot_product_flash_attention_for_cpu_backward is not
implemented", and with one stores the L x S scores.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_attn


class Molecules(NamedTuple):
    """The atoms of each molecule."""

    cu_seq: Tensor  # [molecules + 1]: where each begins and ends
    molecule: Tensor  # [atoms]: the number of its molecule
    mates: Tensor  # [atoms, longest]: the atoms of its molecule
    there: Tensor  # [atoms, longest]: whether the molecule has that atom


def pack(sizes: Tensor) -> Molecules:
    cu_seq = F.pad(sizes.cumsum(0), (1, 0))
    molecule = torch.arange(len(sizes)).repeat_interleave(sizes)
    mates = cu_seq[molecule, None] + torch.arange(int(sizes.max()))
    there = mates < cu_seq[molecule + 1, None]
    return Molecules(cu_seq, molecule, mates.where(there, 0), there)


def distances(positions: Tensor, of: Molecules) -> Tensor:
    """[atoms, longest] from each atom to all of its molecule; 1 to itself and past the last."""
    squares = (positions[:, None] - positions[of.mates]).square().sum(-1)
    itself = of.mates == torch.arange(len(positions))[:, None]
    return squares.where(of.there & ~itself, 1).sqrt()


class ForceField(nn.Module):
    """Energy of atoms: attention that knows of places by distances alone, so it may be turned."""

    def __init__(self, dim: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.near = nn.Sequential(nn.Linear(16, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.bias = nn.Linear(16, heads)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.energy = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, 1))

    def forward(self, positions: Tensor, of: Molecules) -> Tensor:
        """[molecules] of positions [atoms, 3]."""
        apart = distances(positions, of)[..., None] - torch.linspace(0.5, 3, 16).to(positions)
        waves = torch.exp(-4 * apart**2)
        atoms = self.near((waves * of.there[..., None]).sum(1))
        q, k, v = self.qkv(atoms).unflatten(-1, (3, self.heads, -1)).unbind(1)
        bias = self.bias(waves).permute(2, 0, 1)  # [heads, atoms, longest]
        cu_seq, longest = of.cu_seq, bias.size(-1)
        seen = torch_attn.varlen_attn(q, k, v, cu_seq, cu_seq, longest, longest, attn_mask=bias)
        return summed(self.energy(atoms + seen.flatten(1)).squeeze(1), of)


def summed(energies: Tensor, of: Molecules) -> Tensor:
    """[molecules] of [atoms]."""
    return energies.new_zeros(len(of.cu_seq) - 1).index_add(0, of.molecule, energies)


def lennard_jones(positions: Tensor, of: Molecules) -> Tensor:
    """The energy to learn, softened where two atoms are close."""
    squares = distances(positions, of) ** 2 + 0.3
    return summed((squares**-6 - 2 * squares**-3).sum(1) / 2, of)


def forces(
    energy: Callable[[Tensor, Molecules], Tensor],
    positions: Tensor,
    of: Molecules,
    train: bool = False,
) -> Tensor:
    """Minus the gradient of the energy; with `train` it can be differentiated again."""
    positions = positions.detach().requires_grad_()
    total = energy(positions, of).sum()
    (gradient,) = torch.autograd.grad(total, positions, create_graph=train)
    return -gradient


def main(steps: int = 60) -> list[float]:
    torch.manual_seed(0)
    grid = torch.cartesian_prod(*3 * [torch.arange(2.0)])  # 8 atoms at the corners of a cube
    sizes = torch.randint(4, 9, (256,))  # or only some of them
    atoms = [grid[:size] + 0.07 * torch.randn(size, 3) for size in sizes.tolist()]
    expected = forces(lennard_jones, torch.cat(atoms), pack(sizes))
    scale, expected = expected.square().mean(), expected.split(sizes.tolist())
    model = ForceField()
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    losses = []
    for i in range(steps):
        batch = torch.randint(len(sizes), (32,))
        positions, right = (torch.cat([of[n] for n in batch]) for of in (atoms, expected))
        error = forces(model, positions, pack(sizes[batch]), train=True) - right
        loss = error.square().mean() / scale
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if i % 20 == 0 or i == steps - 1:
            print(f"step {i:3}   squared error of the forces, of their square: {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
