"""Each kernel once: what tests/test_cuda.py has compute-sanitizer look at."""

from __future__ import annotations

import torch

from test_cuda import CALLS, compute_seeded, make_call


def main() -> None:
    with torch.device("cuda"):
        for call in CALLS:
            for name, tensor in compute_seeded(*make_call(call)).items():
                assert not tensor.isnan().any(), (call, name)


if __name__ == "__main__":
    main()
