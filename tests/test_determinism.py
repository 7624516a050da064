"""The same bits on every run, with any number of threads, in forked children, among threads."""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_attn
from helpers import (
    DTYPES,
    SEED,
    Inputs,
    assert_same_bits,
    in_fresh_process,
    make_grad_output,
    make_inputs,
    of_inputs,
    results,
    with_two_dtypes,
)

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "many heads": ({"L": 100, "S": 130, "heads": 8}, {}),
    "one long head": ({"L": 1100, "S": 1100, "batch": (), "heads": 1}, {"is_causal": True}),
    "one query": ({"L": 1, "S": 5000, "batch": (), "heads": 1}, {}),
    "few queries in groups": ({"L": 3, "S": 2100, "heads": (4, 2, 1)}, {"enable_gqa": True}),
    "grouped heads": ({"L": 90, "S": 150, "heads": (6, 2, 3)}, {"enable_gqa": True}),
    "mask of keys": ({"L": 300, "S": 700, "mask": (1, 700)}, {}),
    "mask of queries": ({"L": 300, "S": 700, "mask": (2, 1, 300, 1)}, {}),
    "mask of a head": ({"L": 300, "S": 300, "mask": (3, 1, 1)}, {"is_causal": True}),
    "mask of one head's scores": ({"L": 300, "S": 300, "mask": (300, 300)}, {}),
    "own mask": ({"L": 300, "S": 300, "mask": (2, 3, 300, 300)}, {}),
    "dropout": ({"L": 300, "S": 700, "mask": (1, 700)}, {"dropout_p": 0.3}),
    "dropout of one query": ({"L": 1, "S": 5000, "batch": (), "heads": 1}, {"dropout_p": 0.3}),
    "broadcast key": ({"L": 60, "S": 70, "heads": (6, 1, 1)}, {}),
}  # fmt: skip
of_cases = pytest.mark.parametrize(("case", "dtype"), with_two_dtypes(CASES))


def compute(inputs: Inputs, grad_output: Tensor, **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(SEED)
    return results(torch_attn.sdpa, inputs, grad_output, **options)


@pytest.mark.usefixtures("cpu_capability")
@of_cases
def test_repeats_and_threads(case: str, dtype: torch.dtype) -> None:
    sizes, options = CASES[case]
    inputs = make_inputs(**sizes, dtype=dtype)
    grad_output = torch.randn(*inputs.query.shape, dtype=dtype)
    expected = compute(inputs, grad_output, **options)
    for threads in (2, 1, 5, 2):
        torch.set_num_threads(threads)
        assert_same_bits(compute(inputs, grad_output, **options), expected)


@pytest.mark.regression
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("L", [1, 4, 7])
@pytest.mark.parametrize("E", [33, 64, 80])
def test_strides_change_no_bits(E: int, L: int, dtype: torch.dtype) -> None:
    """Few rows are read where they are stored if they can be, else packed: in the same order."""
    query, key, value, _ = make_inputs(L, 150, E, dtype=dtype)
    expected = torch_attn.sdpa(query, key, value)
    for k, v in itertools.product((key, key.mT.contiguous().mT), (value, value.mT.contiguous().mT)):
        assert torch.equal(torch_attn.sdpa(query, k, v), expected)


@pytest.mark.usefixtures("kernels")
@of_cases
def test_nothing_is_left_unwritten(case: str, dtype: torch.dtype) -> None:
    """With new memory filled with NaN, the results have the same bits as without."""
    sizes, options = CASES[case]
    inputs = make_inputs(**sizes, dtype=dtype)
    grad_output = torch.randn(*inputs.query.shape, dtype=dtype)
    expected = compute(inputs, grad_output, **options)
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        actual = compute(inputs, grad_output, **options)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_bits(actual, expected)


@pytest.mark.usefixtures("kernels")
def test_concurrent_calls() -> None:
    """Python threads that call at the same time, each with inputs of its own."""
    torch.set_num_threads(2)
    inputs = [make_inputs(40 + n, 300 - n, mask=(1, 300 - n)) for n in range(8)]
    grad_outputs = [make_grad_output(i) for i in inputs]
    expected = [compute(*arguments) for arguments in zip(inputs, grad_outputs, strict=True)]
    with concurrent.futures.ThreadPoolExecutor(4) as executor:
        for _ in range(5):
            for actual, result in zip(
                executor.map(compute, inputs, grad_outputs, timeout=60), expected, strict=True
            ):
                assert_same_bits(actual, result)


def forward_and_backward() -> list[bytes]:
    """The bits of all results, by the operators themselves: autograd has threads of its own."""
    inputs = make_inputs(200, 300, batch=(), heads=1)
    saved = torch.ops.attn._sdpa_forward(*inputs)[:4]
    output = saved[0]
    gradients = torch.ops.attn._sdpa_backward(
        *[output, None, *saved, *inputs],
        grad_input_mask=of_inputs(True, True, True, rest=False),
    )
    return [t.numpy().tobytes() for t in (output, *gradients[:3])]


def threads_of_process() -> int:
    return len(os.listdir("/proc/self/task"))


def fork(call_first: bool) -> tuple[bool, int]:
    """Whether a forked child came to its end within a minute, and its exit status.

    The status is 0 if it found the parent's bits, and started a second thread to find them.
    """
    torch.set_num_threads(2)
    torch.manual_seed(SEED)
    expected = forward_and_backward() if call_first else None
    child = os.fork()
    if child == 0:
        before = threads_of_process()
        torch.manual_seed(SEED)
        bits = forward_and_backward()
        new = threads_of_process() - before
        os._exit(1 if expected not in (None, bits) else 2 if new != 1 else 0)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            torch.manual_seed(SEED)  # The parent, too, goes on with all its threads.
            assert expected in (None, forward_and_backward())
            return True, os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False, -1


@pytest.mark.regression
@pytest.mark.parametrize("call_first", [True, False])
def test_forked_child(call_first: bool) -> None:
    """OpenMP's threads do not survive a fork: a child that waits for them would wait forever.

    One that makes none of its own would have a single core for the rest of its life.
    """
    assert in_fresh_process(fork, call_first) == (True, 0)
