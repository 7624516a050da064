"""Whether two builds of the library compute the same bits: for changes that must not change any.

    python -m tests.fuzz.same_bits before/libattn.so after/libattn.so --problems 5000

Both run the same random problems of `make fuzz`, forward and derivatives, on every instruction set:
without the options that the built-in lacks, if one of the two has no operator for them.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHOWN = 5  # of the results that differ


def has_options(library: Path) -> bool:
    """Whether the library has an operator that takes them."""
    return b"attn::attention" in library.read_bytes()


def print_digests(seed: int, problems: int, device: str, options: bool) -> None:
    """A line for each result of each problem: which one it is, and a digest of its bits."""
    import torch

    import torch_attn  # noqa: F401, registers the operators

    from .check import apply_settings
    from .drawing import draw

    everything = torch.ops.attn._cpu_capabilities() if device == "cpu" else [device]
    for index in range(problems):
        problem = draw(seed, index, device, options=options)
        made = problem.make()
        if problem.nan:
            made.x[problem.nan] = made.x[problem.nan].masked_fill(made.bad, float("nan"))
        for capability in problem.capabilities(everything):
            apply_settings(problem, capability)
            for name, result in problem.results(made).items():
                # a NaN has many bit patterns, which say nothing
                same_nan = torch.where(result.isnan(), torch.nan, result.detach()).flatten().clone()
                digest = hashlib.sha1(same_nan.view(torch.uint8).numpy().tobytes()).hexdigest()
                print(index, capability, problem.kind.replace(" ", "_"), name, digest)
        torch.set_float32_matmul_precision("highest")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.same_bits", description=__doc__)
    parser.add_argument("libraries", nargs="*", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--problems", type=int, default=2000)
    parser.add_argument("--device", choices=["cpu", "cuda", "amx"], default="cpu")
    parser.add_argument("--digests", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.digests:
        print_digests(options.seed, options.problems, options.device, not options.plain)
        return 0
    if len(options.libraries) != 2:
        parser.error(f"two libraries are compared, but {len(options.libraries)} are given")
    settings = ["--seed", options.seed, "--problems", options.problems, "--device", options.device]
    if not all(map(has_options, options.libraries)):
        print("without the options of attn::attention, which a library lacks")
        settings.append("--plain")
    command = [sys.executable, "-m", "tests.fuzz.same_bits", "--digests", *map(str, settings)]
    with contextlib.ExitStack() as stack:
        running, outputs = [], []
        for library in options.libraries:
            environment = {**os.environ, "ATTN_LIBRARY": str(library.resolve(strict=True))}
            environment["OMP_WAIT_POLICY"] = "passive"
            output = stack.enter_context(tempfile.TemporaryFile("w+"))
            outputs.append(output)
            running.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output))
        for process in running:
            process.wait()
        if any(process.returncode for process in running):
            return 2
        for output in outputs:
            output.seek(0)
        before, after = (output.read().splitlines() for output in outputs)
    if len(before) != len(after):
        print(f"{len(before)} results before, {len(after)} after: other instruction sets?")
        return 1
    different = [(b, a) for b, a in zip(before, after, strict=True) if b != a]
    print(f"{options.problems} problems, {len(before)} results, {len(different)} differ")
    for b, _ in different[:SHOWN]:
        index, capability, kind, name, _ = b.split()
        print(f"  problem {index} on {capability}: {name} ({kind})")
    return 1 if different else 0


if __name__ == "__main__":
    raise SystemExit(main())
