"""The suite's own bound, twice the error of the built-in, for a sample of the problems."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import torch
from torch import Tensor

from .check import Failure, apply_settings
from .drawing import draw
from .problem import NAMES, Problem

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `pytest` finds these, too
import _accuracy
from helpers import Inputs, largest, ulp
from torch_attn import reference

MORE_NEIGHBOURS = 20  # times twelve


@dataclasses.dataclass(frozen=True)
class Excess:
    """An error above the bound that the built-in makes as well, of other neighbours."""

    problem: Problem
    capability: str
    result: str
    ratio: float  # to the suite's bound
    ratio_of_more: float  # to the bound by more neighbours


def draw_plain(seed: int, index: int, device: str) -> Problem:
    problem = draw(seed, index, device, plain=True)
    return dataclasses.replace(problem, mode="backward") if problem.of_second_order else problem


def check(
    problem: Problem, capabilities: list[str]
) -> tuple[Failure | None, list[Excess], dict[str, float]]:
    """A failure; what is above the bound by the bound's own error; the ratios by result.

    A bound is no failure's before the built-in was asked for twenty times as many neighbours.
    """
    made = problem.make()
    inputs = Inputs(*(made.x[n] for n in NAMES)).map(contiguous)
    u = None if made.u is None else contiguous(made.u["output"])
    call = _accuracy.Problem(inputs, made.options, u, None)
    expected = call.to(torch.float64).solve(reference.sdpa)
    errors = call.builtin_errors
    _accuracy._known_errors.clear()
    ratios: dict[str, float] = {}
    if not expected or max(errors.values()) > 0.05 * max(map(largest, expected.values())):
        return None, [], ratios  # the built-in computes something else
    excesses = []
    for capability in capabilities:
        apply_settings(problem, capability)
        actual = problem.results(made)
        torch.set_num_threads(1)
        for name, result in actual.items():
            error = largest(result - expected[name])
            size = largest(expected[name])
            step = max(ulp(size, problem.torch_dtype), ulp(size, result.dtype))
            ratio = error / (2 * errors[name] + step)
            ratios[name] = max(ratio, ratios.get(name, 0))
            if ratio <= 1:
                continue
            more = max(errors[name], more_errors(call)[name])
            bound = 2 * more + step
            if error <= bound:
                excesses.append(Excess(problem, capability, name, ratio, error / bound))
                continue
            what = (
                f"{name}: largest error {error:.3g}, that of the built-in {errors[name]:.3g}, "
                f"over many neighbours {more:.3g}, largest value {size:.3g}"
            )
            ending = (
                f"name, bound = {name!r}, {bound!r}",
                "error = (actual[name].double() - expected[name]).abs().max().item()",
                'print(f"{name}: error {error:.3g}, bound {bound:.3g}")',
                "assert error <= bound",
            )
            return Failure(problem, capability, what, ending), excesses, ratios
    return None, excesses, ratios


def contiguous(tensor: Tensor) -> Tensor:
    """A copy with the strides of a contiguous tensor, also in dimensions of size 1."""
    return tensor.clone(memory_format=torch.contiguous_format)


def more_errors(call: _accuracy.Problem) -> dict[str, float]:
    worst: dict[str, float] = {}
    for seed in range(MORE_NEIGHBOURS):
        generator = torch.Generator(torch.get_default_device()).manual_seed(1000 + seed)
        problem = call
        for change in [False] * 8 + [True] * 4:
            problem = problem.neighbour(generator, change=change)
            for name, error in _accuracy._errors(problem):
                if error == error:
                    worst[name] = max(error, worst.get(name, 0.0))
    return worst
