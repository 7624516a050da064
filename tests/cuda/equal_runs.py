"""200 equal calls beside a busy stream have equal bits: `python -m tests.cuda.equal_runs`.

A missing barrier or fence shows as a call whose bits differ. A second stream keeps some of the
multiprocessors busy, so that blocks start in other orders and at other times.
"""

from __future__ import annotations

import itertools

import torch

import torch_attn

RUNS = 200
CALLS = list(itertools.product((64, 128, 256, 576), (False, True)))  # head_dim, causal


def main() -> None:
    torch.manual_seed(0)
    busy = torch.cuda.Stream()
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    for dim, causal in CALLS:
        x = torch.randn(3, 2, 8, 1500, dim, device="cuda", dtype=torch.bfloat16)
        x = (*x[:2], x[1, ..., :512] if dim == 576 else x[2])  # latent attention
        first = torch_attn.sdpa(*x, is_causal=causal)
        different = torch.zeros((), device="cuda", dtype=torch.int64)
        for _ in range(RUNS):
            with torch.cuda.stream(busy):
                a @ a
            different += (torch_attn.sdpa(*x, is_causal=causal) != first).any()
        count = int(different)
        print(f"head_dim {dim}, {'causal' if causal else 'full'}: {count} of {RUNS} differ")
        assert count == 0
        assert bool(first.isfinite().all())
    print("right")


if __name__ == "__main__":
    main()
