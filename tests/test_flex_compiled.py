"""flex_attention under torch.compile: how many graphs are made, and what they compute."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import flex_attention as of_torch

import torch_attn

pytestmark = pytest.mark.filterwarnings("ignore:.*unfused implementation:UserWarning")

L, H = 32, 2
Attend = Callable[..., Tensor]


def qkv(queries: int = L, keys: int | None = None) -> list[Tensor]:
    return [torch.randn(1, H, n, 16) for n in (queries, keys or queries, keys or queries)]


def biased(table: Tensor) -> Callable[..., Tensor]:
    return lambda s, b, h, i, j: s + table[h, i - j + L - 1]


# A step of a model for each attention, and the arguments of its calls.
Steps = tuple[Callable[[Attend], Callable[..., Tensor]], Iterator[tuple[Any, ...]]]


def step(function: Callable[..., Callable[..., Tensor]]) -> Callable[[Attend], Any]:
    """A step that passes what follows query, key and value to the function that it captures."""
    return lambda attend: lambda q, k, v, *captured: attend(q, k, v, function(*captured))


CASES: dict[str, Callable[[], Steps]] = {
    "ten layers with their own tables": lambda: (
        step(biased),
        ((*qkv(), torch.randn(H, 2 * L - 1)) for _ in range(10)),
    ),
    "functions made outside": lambda: (
        lambda attend: attend,
        ((*qkv(), biased(torch.randn(H, 2 * L - 1))) for _ in range(10)),
    ),
    "eight lengths": lambda: (
        step(lambda: lambda s, b, h, i, j: s - (i - j).abs() * 0.1),
        (tuple(qkv(L + 8 * n)) for n in range(8)),
    ),
    "eight lengths, a larger bias": lambda: (
        step(lambda bias: lambda s, b, h, i, j: s + bias[h, i, j]),
        ((*qkv(L + 8 * n), torch.randn(H, 100, 101)) for n in range(8)),
    ),
    "ten offsets of decoding": lambda: (
        step(lambda offset: lambda s, b, h, i, j: torch.where(i + offset >= j, s, -math.inf)),
        ((*qkv(1, 2 * L), torch.tensor(10 + n)) for n in range(10)),
    ),
    "ten offsets that are Python's": lambda: (
        step(lambda offset: lambda s, b, h, i, j: torch.where(i + offset >= j, s, -math.inf)),
        ((*qkv(1, 2 * L), 10 + n) for n in range(10)),
    ),
    "ten windows that are Python's": lambda: (
        step(lambda w: lambda s, b, h, i, j: torch.where((i - j).abs() % (w + 1) < w, s, -9 * w)),
        ((*qkv(), 3 + n) for n in range(10)),
    ),
    "ten temperatures": lambda: (
        step(lambda t: lambda s, b, h, i, j: torch.tanh(s / t) * t + (i - j) * t),
        ((*qkv(), 0.5 + n / 7) for n in range(12)),
    ),
    "ten bounds that are Python's, by keyword": lambda: (
        step(lambda x: lambda s, b, h, i, j: s + (i - j).clamp(min=-x, max=x) + s.clamp(max=x)),
        ((*qkv(), 3 + n) for n in range(10)),
    ),
    "ten temperatures by keyword": lambda: (
        step(
            lambda x: (
                lambda s, b, h, i, j: (
                    F.leaky_relu(s, negative_slope=x)
                    + F.elu(s, alpha=x)
                    + F.softplus(s, beta=x)
                    + torch.add(s, i - j, alpha=x)
                )
            )
        ),
        ((*qkv(), 0.5 + n / 7) for n in range(12)),
    ),
    "ten document masks": lambda: (
        step(lambda ids: lambda s, b, h, i, j: torch.where(ids[i] == ids[j], s, -math.inf)),
        ((*qkv(), torch.arange(L) // (3 + n)) for n in range(10)),
    ),
    "ten biases": lambda: (
        step(lambda bias: lambda s, b, h, i, j: s + bias[h, i, j]),
        ((*qkv(), torch.randn(H, L, L)) for _ in range(10)),
    ),
    "a table at captured numbers": lambda: (
        step(lambda table, ids: lambda s, b, h, i, j: s + table[h, ids[i] - ids[j] + 3]),
        ((*qkv(), torch.randn(H, 9), torch.randint(0, 3, (L,))) for _ in range(10)),
    ),
    "a row of a bias": lambda: (
        step(lambda bias: lambda s, b, h, i, j: s * bias[3, j]),
        ((*qkv(L, 2 * L), torch.randn(100, 2 * L)) for _ in range(3)),
    ),
}


def graphs(attend: Attend, make: Callable[[], Steps], **options: Any) -> tuple[int, list[Tensor]]:
    """How many graphs torch.compile makes, and the outputs of all calls."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model, calls = make()
    counter = CompileCounter()
    compiled = torch.compile(model(attend), backend=counter, fullgraph=True, **options)
    outputs = [compiled(*arguments) for arguments in calls]
    torch.compiler.reset()
    return counter.frame_count, outputs


# With dynamic=False each length and each of Python's numbers has a graph.
MODES: list[tuple[str, dict[str, Any]]] = [
    (name, options)
    for name in CASES
    for options in ({}, {"dynamic": True}, {"dynamic": False})
    if options.get("dynamic") is not False
    or not any(word in name for word in ("lengths", "Python", "temperatures"))
]


@pytest.mark.parametrize(("name", "options"), MODES, ids=str)
def test_as_many_graphs_as_pytorch_or_fewer(name: str, options: dict[str, Any]) -> None:
    make = CASES[name]
    count, found = graphs(torch_attn.flex_attention, make, **options)
    try:
        most, _ = graphs(of_torch, make, **options)
    except torch._dynamo.exc.TorchRuntimeError:  # torch 2.11 takes no floating numbers
        most = 2
    assert count <= most
    torch.manual_seed(0)
    model, calls = make()
    eager = model(torch_attn.flex_attention)
    for output, arguments in itertools.zip_longest(found, calls):
        torch.testing.assert_close(output, eager(*arguments))


class Layer(nn.Module):
    """A layer with a table and a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(H, 2 * L - 1))
        self.number = 0.5

    def forward(self, *x: Tensor) -> Tensor:
        def relative(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return s * self.number + self.table[h, i - j + L - 1]

        return torch_attn.flex_attention(*x, relative)


def test_layers_share_a_graph_while_their_numbers_change() -> None:
    """PyTorch makes one graph with the first number, and one in which it is an input."""
    torch.compiler.reset()
    counter = CompileCounter()
    for n in range(10):
        layer = Layer()
        layer.number += n // 3
        x = qkv()
        found = torch.compile(layer, backend=counter, fullgraph=True)(*x)
        torch.testing.assert_close(found, layer(*x))
        (gradient,) = torch.autograd.grad(found.square().sum(), layer.table)
        (expected,) = torch.autograd.grad(layer(*x).square().sum(), layer.table)
        torch.testing.assert_close(gradient, expected)
    assert counter.frame_count == 2
    torch.compiler.reset()


@pytest.mark.long
def test_vmap_in_a_compiled_function() -> None:
    """Views of a mapped table."""
    samples = torch.randn(3, 5, 1, H, L, 16)
    x = (*samples, torch.randn(5, H, L, 2 * L - 1), torch.randn(5, 40, 50))

    def shifted(q: Tensor, k: Tensor, v: Tensor, table: Tensor, bias: Tensor) -> Tensor:
        return torch_attn.flex_attention(
            q, k, v, lambda s, b, h, i, j: s + table[h, i, j - i + L - 1] + bias[i + 1, j + 2]
        )

    of_sample = torch.func.grad(lambda *x: shifted(*x).square().sum(), (3, 4))
    for function in (shifted, of_sample):
        run = torch.func.vmap(function)
        compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(*x), run(*x))
    torch.compiler.reset()
