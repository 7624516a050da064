"""What the programs of examples/python compute; that they run is seen by test_docs.py."""

import torch

from examples.python import force_field, private_texts


def test_forces_of_packed_molecules() -> None:
    """The forces, and what training on them gives, equal the results of one molecule at a time."""
    torch.manual_seed(0)
    sizes = torch.tensor([5, 1, 12, 7])
    atoms = 1.5 * torch.randn(int(sizes.sum()), 3, dtype=torch.double)
    direction = torch.randn_like(atoms)
    model = force_field.ForceField(dim=16).double()

    def trained(positions: torch.Tensor, sizes: torch.Tensor, direction: torch.Tensor) -> list:
        forces = force_field.forces(model, positions, force_field.pack(sizes), train=True)
        loss = (forces * direction).sum() + forces.square().sum()
        # An offset of all energies moves no force.
        return [forces, *torch.autograd.grad(loss, [*model.parameters()][:-1])]

    packed = trained(atoms, sizes, direction)
    parts = zip(atoms.split(sizes.tolist()), sizes, direction.split(sizes.tolist()), strict=True)
    alone = [trained(positions, n[None], d) for positions, n, d in parts]
    torch.testing.assert_close(packed[0], torch.cat([forces for forces, *_ in alone]))
    for gradient, *each in zip(packed[1:], *(gradients for _, *gradients in alone), strict=True):
        torch.testing.assert_close(gradient, sum(each))


def test_gradients_of_packed_texts_are_clipped() -> None:
    """The clipped gradients equal one backward per sequence."""
    torch.manual_seed(0)
    lengths = [5, 1, 30, 12]
    model = private_texts.Reader(dim=16).double()
    tokens, labels = torch.randn(48, 8, dtype=torch.double), torch.tensor([0.0, 1, 1, 0]).double()
    parameters = list(model.parameters())
    expected = [torch.zeros_like(p) for p in parameters]
    expected_losses, expected_norms = [], []
    for n, text in enumerate(tokens.split(lengths)):
        (loss,) = private_texts.losses(model, text, [len(text)], labels[n : n + 1])
        gradients = torch.autograd.grad(loss, parameters)
        norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
        expected_losses.append(loss)
        expected_norms.append(norm)
        for sum_, g in zip(expected, gradients, strict=True):
            sum_ += g * min(1.0, 1.7 / norm.item())

    loss, norms = private_texts.clip(model, tokens, lengths, labels, bound=1.7)
    torch.testing.assert_close(loss, torch.stack(expected_losses).detach())
    torch.testing.assert_close(norms, torch.stack(expected_norms))
    assert norms.min() < 1.7 < norms.max()
    torch.testing.assert_close([p.grad for p in parameters], expected)
