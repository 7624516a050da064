"""The model of decoding on a GPU: what it predicts reaches the floors, and what it counts is so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from test_cuda_sass import DECODE_LIMITS

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import decode_model as model  # noqa: E402


@pytest.mark.parametrize("call", model.CUDNN, ids=lambda call: call.name)
def test_prediction(call: model.Call) -> None:
    """At least 0.95 of cuDNN's speed, and all of it for one long sequence.

    What the model assumes, and how keys are split, decides this; what a GPU does is measured later.
    """
    floor = 1.0 if (call.batch, call.keys) == (1, 16384) else 0.95
    assert model.CUDNN[call] / model.seconds(call) >= floor


@pytest.mark.parametrize("call", model.CUDNN, ids=lambda call: call.name)
def test_prediction_of_8_bits(call: model.Call) -> None:
    """1.5 of the speed of 16 bits, or 1.3 where a call is short."""
    floor = 1.3 if call.keys == 16384 else 1.5
    assert model.seconds(call) / model.seconds(call._replace(bits=8)) >= floor


def test_instructions_are_counted() -> None:
    for (bits, dim), instructions in model.INSTRUCTIONS.items():
        limit = DECODE_LIMITS[f"{dim}, int8" if bits == 8 else f"{dim}"]
        assert limit.instructions * 16 // limit.keys == instructions


def test_waves() -> None:
    """Before, 256 tasks had 768 blocks on 528 places: the second wave was 45% full."""
    call = model.Call(64, 32, 4, 4096, 64)
    assert call.tasks == 256
    assert call.splits() == 1
    assert model.splits_of(8, 4, 16384, 132) == 16  # 128 blocks
    assert model.splits_of(8, 4, 300, 132) == 1  # too few keys
    assert model.splits_of(1, 1, 1 << 20, 132) == 132
    assert model.splits_of(1, 16, 1 << 16, 132) < 132  # the merge would take longer than the keys
    assert model.splits_of(530, 1, 4096, 132) > 1  # 530 blocks would be five a multiprocessor


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_memory_binds(dim: int) -> None:
    """While memory brings 16 keys, a multiprocessor could issue their instructions twice.

    Keys of 8 bits are there in half of the time. It could issue their instructions once.
    """
    card = model.Card()
    for bits, times in ((16, 2), (8, 1)):
        call = model.Call(1, 1, 1, 16, dim, bits)
        seconds = 16 * call.bytes_of_key / (card.bytes_a_second / card.multiprocessors)
        issued = 4 * card.clock * seconds  # by four schedulers
        assert times * model.INSTRUCTIONS[bits, dim] <= issued


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_enough_is_under_way(dim: int, bits: int) -> None:
    """So much that the memory's rate, and not its latency, binds."""
    card = model.Card()
    call = model.Call(1, 1, 1, 1, dim, bits)
    limit = DECODE_LIMITS[f"{dim}, int8" if bits == 8 else f"{dim}"]
    assert model.BLOCKS[dim] * 128 * limit.registers <= 65536
    needed = card.bytes_a_second / card.multiprocessors * card.latency
    assert model.under_way(call) >= 1.5 * needed
