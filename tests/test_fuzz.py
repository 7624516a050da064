"""The harness of `make fuzz` finds what is wrong, and nothing where nothing is."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_attn
from fuzz import relative
from fuzz.bound import Textbook, arithmetic
from fuzz.check import Failure, check, shrunk
from fuzz.problem import MODES, draw
from helpers import CPU_CAPABILITIES, cpu_capability_set_to, threads_set_to, to_dtype

ROOT = Path(__file__).parents[1]
PROBLEMS = 150
# Seed and number of problems that were above their bound, which was wrong: it took the scores of a
# second derivative for exact where the forward's were rounded, and a tangent for finite that
# float16 cannot hold.
FOUND = [(2, 6793), (3, 238208)]

# Operators that are wrong in `changed`; `right` is the operator.
BEGINNING = """
import math, torch, torch_attn
right = torch_attn.sdpa
def wrong(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None,
          enable_gqa=False):
    options = {"scale": scale, "enable_gqa": enable_gqa}
"""
ENDING = """
    return right(query, key, value, attn_mask, dropout_p, is_causal, **options)
torch_attn.sdpa = wrong
"""
WRONG = {
    "scale": """
    scale = 1 / math.sqrt(max(query.size(-1), 1)) if scale is None else scale
    options["scale"] = scale * 1.001
""",
    "causal": """
    if is_causal and attn_mask is None:
        attn_mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool).tril(1)
        is_causal = False
""",
    "column of a mask": """
    if attn_mask is not None and attn_mask.size(-1) > 1:
        attn_mask = attn_mask.clone()
        attn_mask[..., -1] = attn_mask.dtype == torch.bool
""",
    "last key": """
    if key.size(-2) > 1 and attn_mask is None:
        key, value = key[..., :-1, :], value[..., :-1, :]
""",
    "rounded weights": """
    if dropout_p == 0 and not enable_gqa and not key.isnan().any():
        output, weights, _ = torch_attn.sdpa_with_weights(
            query, key, value, attn_mask, 0.0, is_causal, **options)
        return output + (weights.bfloat16().to(value.dtype) - weights) @ value
""",
    "gradient": """
    value = value + 1e-2 * (value - value.detach())
""",
    "second derivative": """
    value = value + 1e-2 * (value - value.detach()) ** 2
""",
    "dropped weights": """
    dropout_p = dropout_p * 0.98
""",
    "lost NaN": """
    key = torch.where(key.isnan(), 0, key)
""",
    "NaN behind a mask": """
    if key.shape[:-2] == query.shape[:-2]:
        query = query + torch.where(key.isnan(), key, 0).sum(-2, keepdim=True)
""",
    "NaN of hidden keys in the gradient of the mask": """
    if attn_mask is not None and attn_mask.requires_grad and key.isnan().any():
        attn_mask = attn_mask.clone()
        attn_mask.register_hook(lambda gradient: gradient * math.nan)
""",
    "threads": """
    if torch.get_num_threads() > 1:
        options["scale"] = (scale or 1 / math.sqrt(max(query.size(-1), 1))) * (1 + 1e-6)
""",
    "number of keys": """
    if key.size(-2) == 17:
        raise RuntimeError("17 keys")
""",
}


def first_failure(problems: int = 3000) -> Failure:
    for index in range(problems):
        problem = draw(0, index)
        failure, _ = check(problem, problem.capabilities(CPU_CAPABILITIES)[-1:])
        if failure:
            return shrunk(failure, seconds=10)
    raise AssertionError(f"nothing was found in {problems} problems")


@pytest.mark.parametrize("name", WRONG)
def test_wrong_operator(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found, and the printed program shows it in a process of its own."""
    wrong = BEGINNING + WRONG[name] + ENDING
    names: dict[str, Any] = {}
    with monkeypatch.context() as patch:
        patch.setattr(torch_attn, "sdpa", torch_attn.sdpa)  # is put back
        exec(wrong, names)
        assert torch_attn.sdpa is names["wrong"]
        failure = first_failure()
    program = failure.program()
    assert len(program.splitlines()) < 80, program
    run = subprocess.run(
        [sys.executable, "-c", wrong + program], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 1, program
    assert ("RuntimeError: 17 keys" if name == "number of keys" else "AssertionError") in run.stderr
    with cpu_capability_set_to(failure.capability), threads_set_to(1):
        exec(program, {})  # of the right operator it finds nothing
    torch.set_float32_matmul_precision("highest")


def test_right_operator() -> None:
    kinds = set()
    for seed, index in [*((0, i) for i in range(PROBLEMS)), *FOUND]:
        problem = draw(seed, index)
        failure, ratios = check(problem, problem.capabilities(CPU_CAPABILITIES))
        assert failure is None, f"{failure.what}\n{failure.program()}"
        assert ratios or problem.nan or problem.hidden or 0 in problem.output_shape
        kinds.add(problem.mode)
    assert kinds == set(MODES)


def test_bound_of_the_suite() -> None:
    ratios: dict[str, float] = {}
    for index in range(3):
        problem = relative.draw_plain(0, index, "cpu")
        failure, _, found = relative.check(problem, CPU_CAPABILITIES)
        assert failure is None, failure.what
        ratios |= found
    assert ratios


def test_textbook_is_the_reference() -> None:
    """Its formulas give what autograd makes of `torch_attn.reference`, up to roundings."""
    compared = 0
    for index in range(PROBLEMS):
        drawn = draw(1, index)
        if drawn.nan or drawn.bits or drawn.hidden:
            continue
        names: dict[str, Any] = {}
        exec(drawn.program(CPU_CAPABILITIES[0], []), names)
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision("highest")
        made = drawn.make()
        made.x = {n: to_dtype(t, torch.float64) for n, t in made.x.items()}
        problem = dataclasses.replace(drawn, dtype="float64", mask_dtype="")
        bounds = Textbook(problem, made).bounds(arithmetic(problem, "default"))
        for name, (exact, bound) in bounds.items():
            expected = names["expected"][name]
            assert exact.shape == expected.shape
            assert ((exact - expected).abs() <= bound).all(), drawn
            compared += 1
    assert compared > PROBLEMS


def test_a_problem_is_drawn_from_seed_and_index_alone() -> None:
    for index in range(20):
        assert draw(3, index) == draw(3, index)
        assert draw(3, index) != draw(4, index)
        first, again = draw(3, index).make(), draw(3, index).make()
        for name, tensor in first.x.items():
            if tensor is not None:
                torch.testing.assert_close(tensor, again.x[name], rtol=0, atol=0, equal_nan=True)


def run_harness(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.fuzz", "--only", "cpu", *arguments]
    environment = {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)


def test_program() -> None:
    run = run_harness("--problems", "60", "--seed", "2")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "cpu: 60 problems" in run.stdout
    assert "seed 2: no failures" in run.stdout


@pytest.mark.slow  # starts worker after worker
def test_a_process_that_dies_is_a_failure() -> None:
    run = run_harness("--problems", "10", "--seed", "2", ATTN_LIBRARY="/nowhere/libattn.so")
    assert run.returncode == 1
    assert "cpu: exit code 1" in run.stdout
    assert "seed 2: 2 failures" in run.stdout


def test_one_problem() -> None:
    run = run_harness("--seed", "2", "--problem", "5")
    assert run.returncode == 0, run.stderr
    assert "torch.manual_seed" in run.stdout
