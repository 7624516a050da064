"""What the options promise: what is never read, memory, the same bits at any number of threads."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_attn
from _memory import in_guarded_memory, largest_block
from _options import Case, Tensors, attention, drawn, everything, formula, stats_of
from helpers import (
    CPU_CAPABILITIES,
    DTYPES,
    INF,
    NAN,
    assert_same_bits,
    cpu_capability_set_to,
    in_fresh_process,
    randn,
)

# of PyTorch's, by its own forward mode
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("L", "dtype"), [(L, dtype) for L in (1, 70, 300) for dtype in DTYPES])
def test_nothing_beyond_the_length_is_read(L: int, dtype: torch.dtype) -> None:
    """Keys, values and the mask may hold anything there; the same bits, and gradients of 0."""
    S, lengths = 260, torch.tensor([130, 70])
    case = Case(
        "x", (2, 4, 2, L, S, 16), mask=(2, 1, L, S), sinks=(4,), given={"key_lengths": lengths}
    )
    x, u, t = drawn(case, dtype)
    clean = everything(attention, x, u, t, **case.options)
    beyond = torch.arange(S) >= lengths[:, None]

    def spoilt(tensors: Tensors) -> Tensors:
        of_keys = beyond[:, None, :, None]
        return {
            **tensors,
            "key": tensors["key"].masked_fill(of_keys, NAN),
            "value": tensors["value"].masked_fill(of_keys, INF),
            "attn_mask": tensors["attn_mask"].masked_fill(beyond[:, None, None], NAN),
        }

    found = everything(attention, spoilt(x), u, spoilt(t), **case.options)
    assert_same_bits(found, clean)
    for name in ("grad_key", "grad_value", "d grad_key", "d grad_value"):
        assert (found[name][beyond[:, None].expand(2, 2, S)] == 0).all()
    for name in ("grad_attn_mask", "d grad_attn_mask"):
        assert (found[name][beyond[:, None, None].expand(2, 1, L, S)] == 0).all()


@pytest.mark.parametrize("of", ["weights", "third derivative"])
def test_formulas_do_not_read_beyond_the_length(of: str) -> None:
    """Derivatives that no kernel computes read nothing there, nor a direction there."""
    S, used = 9, 6
    point, along = (
        {name: torch.randn(2, 1, S, 4, dtype=torch.float64) for name in ("query", "key", "value")}
        for _ in range(2)
    )

    def derivative(keys: slice, **options: Any) -> tuple[Tensor, ...]:
        x, t = (
            {n: a if n == "query" else a[:, :, keys] for n, a in d.items()} for d in (point, along)
        )
        leaves = [a.clone().requires_grad_() for a in x.values()]
        if of == "weights":
            result = torch_attn.sdpa_with_weights(*leaves, **options)[1].square().sum()
        else:
            (result,) = torch.autograd.grad(
                torch_attn.sdpa(*leaves, **options).square().sum(), leaves[:1], create_graph=True
            )
            (result,) = torch.autograd.grad(result.square().sum(), leaves[:1], create_graph=True)
        n = 2 if of == "weights" else 3  # which do not depend on the value
        first = torch.autograd.grad(result.square().sum(), leaves[:n], create_graph=True)
        return torch.autograd.grad(first, leaves[:n], [*t.values()][:n])

    expected = derivative(slice(used))
    for tensors in (point, along):
        tensors["key"][:, :, used:] = tensors["value"][:, :, used:] = NAN
    query, *of_keys = derivative(slice(None), key_lengths=used)
    torch.testing.assert_close((query, *(t[:, :, :used] for t in of_keys)), expected)
    assert not any(t[:, :, used:].any() for t in of_keys)


def attend_up_to_lengths(capability: str) -> None:
    """Runs in a process of its own, which any read beyond the keys in use ends."""
    S = 200
    torch.manual_seed(0)
    lengths = ((0, 1), (64, 133), (197, 200))
    for n, (used, L) in enumerate(itertools.product(lengths, (1, 7, 100))):
        options = {"key_lengths": torch.tensor(used)}
        case = Case("x", (2, 4, 2, L, S, 20), (2, 1, 1, S) if n % 2 else None, given=options)
        for dtype in DTYPES:
            x, u, t = drawn(case, dtype)
            for tensors, name in itertools.product((x, t), {"key", "value", "attn_mask"} & {*x}):
                of_keys = tensors[name].mT if name == "attn_mask" else tensors[name]
                guarded = in_guarded_memory(of_keys, used)
                tensors[name] = guarded.mT if name == "attn_mask" else guarded
            with cpu_capability_set_to(capability):
                found = everything(attention, x, u, t, **options)
                stats_of(x, **options)
                if capability != "cuda":  # there ATen computes them, and reads all keys
                    torch_attn.sdpa_with_weights(**x, enable_gqa=True, **options)
            assert found["grad_value"].isfinite().all()


@pytest.mark.parametrize("cpu_capability", CPU_CAPABILITIES)
def test_nothing_beyond_the_length_is_touched(cpu_capability: str) -> None:
    in_fresh_process(attend_up_to_lengths, cpu_capability)


EVERY: dict[str, Any] = {
    "attn_mask": lambda S: torch.randn(1, S),
    "alibi_slopes": lambda S: torch.rand(2),
    "sinks": lambda S: torch.randn(2),
    "softcap": 2.0,
    "window_size": (100, 30),
    "query_offset": torch.tensor([37]),
    "key_lengths": torch.tensor([1999]),
    "is_causal": True,
    "dropout_p": 0.3,
}


@pytest.mark.parametrize(
    "names",
    [*itertools.combinations(EVERY, 1), *itertools.combinations(EVERY, 2), tuple(EVERY)],
    ids="-".join,
)
def test_memory_is_linear(names: tuple[str, ...]) -> None:
    """No L x S, not even in bytes; with one query no copy of the keys."""

    def drawn_for(L: int, S: int, E: int) -> Tensors:
        shapes = {"query": (1, 2, L, E), "key": (1, 1, S, E), "value": (1, 1, S, E)}
        given = {name: EVERY[name](S) for name in names if callable(EVERY[name])}
        return {name: torch.randn(shape) for name, shape in shapes.items()} | given

    options = {name: EVERY[name] for name in names if not callable(EVERY[name])}
    of_scores = {name: value for name, value in options.items() if name != "dropout_p"}
    x, one = drawn_for(2048, 2048, 8), drawn_for(1, 16384, 64)
    u = {"output": torch.randn(x["query"].shape), "logsumexp": torch.randn(1, 2, 2048)}
    t = {name: torch.randn(tensor.shape) for name, tensor in x.items()}

    assert largest_block(lambda: everything(attention, x, u, t, **options)) < 2048 * 2048
    assert largest_block(lambda: stats_of(x, **of_scores)) < 2048 * 2048
    with torch.no_grad():
        assert largest_block(lambda: attention(one, **options)) < one["key"].nbytes / 4
        assert largest_block(lambda: stats_of(one, **of_scores)) < one["key"].nbytes / 4


def test_a_block_of_scores_would_be_noticed() -> None:
    x = {name: torch.randn(1, 1, 2048, 8) for name in ("query", "key", "value")}
    assert largest_block(lambda: formula(x)) >= 2048 * 2048


@pytest.mark.regression
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_in_grad_output_stays_before_the_length(dtype: torch.dtype) -> None:
    """Within the tile too, where it meets weights of 0."""
    sizes = {"query": 20, "key": 130, "value": 130}
    x = {name: randn((2, 2, n, 16), dtype).requires_grad_() for name, n in sizes.items()}
    lengths = torch.tensor([70, 0])
    output = torch_attn.sdpa(**x, key_lengths=lengths)
    grad_output = randn(output.shape, dtype)
    grad_output[..., 7, 3] = NAN
    output.backward(grad_output)
    beyond = torch.arange(130) >= lengths[:, None]
    for name in ("key", "value"):
        gradient = x[name].grad.transpose(1, 2)
        assert (gradient[beyond] == 0).all()
        assert gradient[~beyond].any()
