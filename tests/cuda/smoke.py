"""One call of every kind on a GPU, with all derivatives, against the same in float64 on the CPU.

`python -m tests.cuda.smoke --dtype bfloat16`, a step of first_run.py. An error is a number's
distance from the exact one, divided by the largest of its tensor and by the unit roundoff of its
dtype. It shows wrong addresses and factors; the fuzzer and the tests have tighter bounds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import torch_attn
from helpers import SEED, largest
from torch_attn._library import LIBRARY, built_with

DTYPES = ("float64", "float32", "bfloat16", "float16", "own")  # own: each call's
MOST = 100.0  # units: of sums of a hundred numbers, weights rounded to 16 bits, and derivatives


def environment() -> None:
    """Prints what the machine has, and checks one result."""
    for command in (["nvidia-smi"], ["nvcc", "--version"], ["ldd", str(LIBRARY)]):
        try:
            run = subprocess.run(command, capture_output=True, text=True)
            print(run.stdout, run.stderr)
        except FileNotFoundError:
            print(f"{command[0]}: not there")
    print(sys.version, torch.__version__, "CUDA", torch.version.cuda, built_with())
    x = [torch.randn(2, 3, 130, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    output = torch_attn.sdpa(*x)
    exact = torch.softmax(x[0].double() @ x[1].double().mT / 8, -1) @ x[2].double()
    error = largest(output.double() - exact)
    assert error < 0.02, f"one call: an error of {error}"
    name = "pretended" if os.environ.get("ATTN_PRETEND") else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}: one call is right, error {error:.1e}")


def errors(call: str, dtype: torch.dtype | None) -> dict[str, float]:
    """The error of every result of a call of tests/test_cuda.py."""
    import test_cuda

    kind = test_cuda.CALLS[call]
    if dtype:
        test_cuda.CALLS[call] = kind._replace(sizes={**kind.sizes, "dtype": dtype})
    torch.manual_seed(SEED)
    with torch.device("cuda"):
        function, *tensors = test_cuda.make_call(call)
        waits = torch.cuda.set_sync_debug_mode
        waits("error")
        try:
            actual = test_cuda.compute(function, *tensors)
        finally:
            waits("default")
    if kind.options.get("dropout_p"):  # draws others on the CPU: test_dropout_is_that_of_the_cpu
        return {name: float("nan") if a.isnan().any() else 0.0 for name, a in actual.items()}
    exact = tree_map(lambda a: a.double().cpu() if a.is_floating_point() else a.cpu(), tensors)
    with torch.device("cpu"):
        expected = test_cuda.compute(function, *exact)
    assert actual.keys() == expected.keys()
    units = {name: torch.finfo(a.dtype).eps / 2 for name, a in actual.items()}
    return {
        n: relative(actual[n].cpu().double(), e.double()) / units[n] for n, e in expected.items()
    }


def relative(actual: Tensor, expected: Tensor) -> float:
    """The largest error; infinite where one is NaN or infinite and the other is not the same."""
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    off = torch.where(same, 0, (actual - expected).abs().nan_to_num(torch.inf))
    size = expected[expected.isfinite()].abs()
    return largest(off) / max(largest(size), torch.finfo(torch.float32).tiny)


def smoke(dtype: torch.dtype | None) -> None:
    from test_cuda import CALLS

    wrong = []
    for call in CALLS:
        start = time.monotonic()
        try:
            found = errors(call, dtype)
        except Exception as error:
            if isinstance(error, torch.AcceleratorError):
                raise  # nothing runs after it
            print(f"WRONG {call}: {type(error).__name__}: {error}")
            wrong.append(call)
            continue
        bad = [name for name, e in found.items() if not e <= MOST]
        wrong += [call] if bad else []
        listed = ", ".join(f"{name} {e:.2g}" for name, e in found.items())
        spent = time.monotonic() - start
        print(f"{'WRONG' if bad else 'ok   '} {call}: {listed}; {spent:.1f} s", flush=True)
    if wrong:
        raise SystemExit(f"{dtype or 'own dtypes'}: wrong: {', '.join(wrong)}")
    said = "all right, errors in units of the dtype and of the largest number"
    print(f"{dtype or 'own dtypes'}: {said}")


def profiled() -> None:
    """What ncu looks at: each kernel twice, at sizes that fill a GPU."""

    def draw(*sizes: int, **options: Any) -> Tensor:
        made = torch.randn(*sizes, dtype=torch.bfloat16, device="cuda")
        return made.requires_grad_(**options) if options else made

    def step(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Callable[[], None]:
        def call() -> None:
            output = torch_attn.sdpa(query, key, value, **options)
            if output.requires_grad:
                output.backward(query.detach())

        return call

    calls = []
    for dim in (64, 128):
        calls.append(step(*(draw(4, 2048 // dim, 4096, dim, requires_grad=True) for _ in range(3))))
        shown = torch.rand(4096, 4096, device="cuda") > 0.3
        calls.append(step(*(draw(4, 2048 // dim, 4096, dim) for _ in range(3)), attn_mask=shown))
    one = (draw(1, 32, 1, 128), *(draw(1, 8, 16384, 128) for _ in range(2)))
    calls.append(step(*one, enable_gqa=True))
    for call in calls:
        for _ in range(2):
            call()
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--environment", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--dtype", choices=DTYPES)
    given = parser.parse_args()
    if os.environ.get("ATTN_PRETEND"):
        import pretend_cuda

        pretend_cuda.pytest_configure()
    if given.environment:
        environment()
    if given.profile:
        profiled()
    if given.dtype:
        smoke(getattr(torch, given.dtype, None))


if __name__ == "__main__":
    main()
