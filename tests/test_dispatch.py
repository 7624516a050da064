"""Instruction sets: all that the machine has are found and tested; one can be forced."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import torch

from helpers import CPU_CAPABILITIES, cpu_capability_set_to, make_inputs, results
from torch_attn import sdpa

NEEDS = {
    "default": set(),
    "avx2": {"avx2", "fma"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx512_bf16": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"},
    "amx": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "amx_tile", "amx_bf16"},
}


def cpu_flags() -> set[str]:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    return {flag for line in lines if line.startswith("flags") for flag in line.split()}


def test_every_instruction_set_of_the_machine_is_found() -> None:
    assert [name for name, flags in NEEDS.items() if flags <= cpu_flags()] == CPU_CAPABILITIES


def test_every_instruction_set_is_tested(
    cpu_capability: str, request: pytest.FixtureRequest
) -> None:
    """The kernels' tests were collected, and none is skipped, for each of them."""
    tested = set()
    for item in request.session.items:
        for fixture in {"kernels", "cpu_capability"} & set(getattr(item, "fixturenames", ())):
            tested.add((item.path, item.callspec.params[fixture]))
            assert not any(mark.name.startswith("skip") for mark in item.iter_markers()), item
    assert cpu_capability == torch.ops.attn._cpu_capability()
    for path in {path for path, _ in tested}:
        assert {name for where, name in tested if where == path} >= {
            name for name, flags in NEEDS.items() if flags <= cpu_flags()
        }, path


def run_forced(name: str | None) -> subprocess.CompletedProcess[str]:
    """A new interpreter, the environment variable set, that computes and says with what."""
    environment = {k: v for k, v in os.environ.items() if k != "ATTN_CPU_CAPABILITY"}
    if name is not None:
        environment["ATTN_CPU_CAPABILITY"] = name
    program = (
        "import torch, torch_attn; torch_attn.sdpa(*torch.ones(3, 4, 4)); "
        "print(torch.ops.attn._cpu_capability())"
    )
    return subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=pathlib.Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("name", [None, ""])
def test_fastest_is_the_default(name: str | None) -> None:
    """The last one, but VDPBF16PS only where it is as fast as an FMA: on AMD's processors."""
    amd = "AuthenticAMD" in pathlib.Path("/proc/cpuinfo").read_text()
    fast = [name for name in CPU_CAPABILITIES if amd or name != "avx512_bf16"]
    assert run_forced(name).stdout.split() == [fast[-1]]


@pytest.mark.long
@pytest.mark.parametrize("name", [*NEEDS, "AVX2", "sse", "avx1024"])
def test_environment_variable(name: str) -> None:
    """Forces an instruction set; one that the machine lacks, or no machine has, is an error."""
    process = run_forced(name)
    if name in CPU_CAPABILITIES:
        assert process.returncode == 0, process.stderr
        assert process.stdout.split() == [name]
    else:
        assert process.returncode == 1, "an exception, not a crash"
        message = process.stderr
        assert f'ATTN_CPU_CAPABILITY is "{name}"' in message
        assert ", ".join(CPU_CAPABILITIES) in message


@pytest.mark.parametrize("name", ["AVX2", "neon", ""])
def test_unknown_name(name: str) -> None:
    before = torch.ops.attn._cpu_capability()
    with pytest.raises(RuntimeError, match=f'name is "{name}".*{", ".join(CPU_CAPABILITIES)}'):
        torch.ops.attn._set_cpu_capability(name)
    assert torch.ops.attn._cpu_capability() == before


def test_instruction_sets_differ_by_rounding_only() -> None:
    """The results do differ: each instruction set really runs code of its own."""
    for dtype in (torch.float32, torch.bfloat16):
        inputs, eps = make_inputs(65, 130, 40, dtype=dtype), torch.finfo(dtype).eps
        outputs = []
        for name in CPU_CAPABILITIES:
            with cpu_capability_set_to(name):
                outputs.append(results(sdpa, inputs)["output"])
        for output in outputs[1:]:
            torch.testing.assert_close(output, outputs[0], rtol=4 * eps, atol=4 * eps)
        assert len(CPU_CAPABILITIES) == 1 or not torch.equal(outputs[0], outputs[-1])
