"""1,000 equal calls beside a busy stream have equal bits: `python -m tests.cuda.equal_runs`.

A missing barrier or fence shows as a call whose bits differ. A second stream keeps some of the
multiprocessors busy, so that blocks start in other orders and at other times.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

import torch_attn

RUNS = 1000
CALLS = list(itertools.product((64, 128, 256, 576), (False, True)))  # head_dim, causal


def results(x: tuple[Tensor, ...], grad_output: Tensor, causal: bool) -> Sequence[Tensor]:
    """The output, and the gradients; of latent attention the output alone."""
    if x[0].size(-1) > 256:
        return (torch_attn.sdpa(*x, is_causal=causal),)
    leaves = [t.detach().requires_grad_() for t in x]
    output = torch_attn.sdpa(*leaves, is_causal=causal)
    return (output.detach(), *torch.autograd.grad(output, leaves, grad_output))


def main() -> None:
    torch.manual_seed(0)
    busy = torch.cuda.Stream()
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    for dim, causal in CALLS:
        *x, grad_output = torch.randn(4, 2, 8, 1500, dim, device="cuda", dtype=torch.bfloat16)
        x = (*x[:2], x[1][..., :512] if dim == 576 else x[2])  # latent attention
        first = results(x, grad_output, causal)
        different = torch.zeros((), device="cuda", dtype=torch.int64)
        for _ in range(RUNS):
            with torch.cuda.stream(busy):
                a @ a
            pairs = zip(results(x, grad_output, causal), first, strict=True)
            different += torch.stack([(again != before).any() for again, before in pairs]).any()
        count = int(different)
        print(f"head_dim {dim}, {'causal' if causal else 'full'}: {count} of {RUNS} differ")
        assert count == 0
        assert all(bool(t.isfinite().all()) for t in first)
    print("right")


if __name__ == "__main__":
    main()
