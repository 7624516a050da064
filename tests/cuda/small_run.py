"""Each kernel once: what tests/test_cuda.py has compute-sanitizer look at."""

from __future__ import annotations

import torch

from test_cuda import CALLS, compute_seeded, make_call


def main() -> None:
    with torch.device("cuda"):
        for call in CALLS:
            x, u, t, options = make_call(call)
            for name, tensor in compute_seeded(x, u, t, **options).items():
                assert tensor.isfinite().all(), (call, name)


if __name__ == "__main__":
    main()
