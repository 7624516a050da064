"""The lesson's chapter on costs: what is stored, exactly, and how what is measured is fitted."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from _memory import LargestAllocation
from examples.lesson import cost, threads


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with threads.one_thread():
        yield


def largest_allocation(name: str, length: int, dropout_p: float) -> int:
    inputs = cost.make(length)
    with LargestAllocation() as largest:
        cost.step(name, inputs, dropout_p)
    return largest.elements


@pytest.mark.parametrize("length", [128, 512])
def test_what_is_kept(length: int) -> None:
    """Query, key, value and output of 64 in float32. Naive keeps L x S weights beside them, and
    with dropout also what these are multiplied by, and what is left of them. Ours keeps two numbers
    a row; dropout adds at most three numbers in all, from which it draws again.
    """
    vectors, matrix, rows = 4 * 64 * length * 4, length * length * 4, 2 * length * 4
    assert cost.kept_bytes("naive", length) == vectors + matrix
    assert cost.kept_bytes("naive", length, 0.1) == vectors + 3 * matrix
    assert cost.kept_bytes("attn", length) == vectors + rows
    assert vectors + rows < cost.kept_bytes("attn", length, 0.1) <= vectors + rows + 3 * 8


@pytest.mark.parametrize("dropout_p", [0.0, cost.DROPOUT])
@pytest.mark.parametrize("name", cost.OPERATORS)
def test_who_writes_scores(name: str, dropout_p: float) -> None:
    """What the chapter says and leaves out for long texts is what a step allocates."""
    length = 1024
    matrix = length * length
    allocated = largest_allocation(name, length, dropout_p)
    assert (allocated >= matrix) == cost.writes_scores(name, dropout_p)
    if not cost.writes_scores(name, dropout_p):
        # Twice the length, twice the memory.
        assert largest_allocation(name, 2 * length, dropout_p) <= 2 * allocated


@pytest.mark.parametrize("name", cost.OPERATORS)
def test_operators_compute_the_same(name: str) -> None:
    query, key, value = (t.double() for t in cost.make(20))
    output = cost.OPERATORS[name](query, key, value, dropout_p=0.0)
    weights = torch.softmax(query @ key.mT / 8, dim=-1)
    torch.testing.assert_close(output, weights @ value)


def test_exponent() -> None:
    lengths = [128, 256, 512, 1024]
    assert cost.exponent(lengths, [3.0 * n**2 for n in lengths]) == pytest.approx(2)
    assert cost.exponent(lengths, [5.0 * n for n in lengths]) == pytest.approx(1)
    # Over the last three that were measured: what is before and NaNs do not count.
    values = [1e9, *(n**1.5 for n in lengths), math.nan]
    assert cost._fit([64, *lengths, 2048], values) == pytest.approx(1.5)


def test_times_leaves_out_long_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "LONGEST_MATRIX", 32)
    found = cost.times(64, dropout_p=0.1, budget=0)
    assert math.isnan(found["naive"])
    assert math.isnan(found["built-in"])
    assert found["attn"] > 0
    assert all(seconds > 0 for seconds in cost.times(32, budget=0).values())


@pytest.mark.slow  # measures in processes of their own
def test_memory_in_a_process_of_its_own() -> None:
    """At 2048 tokens a matrix has 16 MiB: naive has one at least, attn altogether less."""
    matrix = 2048 * 2048 * 4
    naive, ours = cost.memory("naive", [2048]), cost.memory("attn", [2048])
    for dropout_p in (0.0, cost.DROPOUT):
        assert naive[dropout_p][0] > matrix
        assert 0 < ours[dropout_p][0] < matrix
