"""Several threads at one node of the autograd graph, each running backward through it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import torch_attn
from helpers import in_fresh_process

SECONDS = 3
THREADS = 3
GRAPHS_A_ROUND = 20
FREED = "Trying to backward through the graph a second time"


def inputs() -> list[Tensor]:
    return [torch.randn(1, 1, 4, 4, requires_grad=True) for _ in range(3)]


def first_order() -> tuple[Tensor, Sequence[Tensor]]:
    x = inputs()
    return torch_attn.sdpa(*x), x


def second_order() -> tuple[Tensor, Sequence[Tensor]]:
    output, x = first_order()
    w = torch.randn_like(output, requires_grad=True)
    return torch.autograd.grad(output, x, w, create_graph=True)[0], [*x, w]


def tangent() -> tuple[Tensor, Sequence[Tensor]]:
    x, t = inputs(), inputs()
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(p, d) for p, d in zip(x, t, strict=True)]
        return forward_ad.unpack_dual(torch_attn.sdpa(*duals)).tangent, [*x, *t]


def third_order() -> tuple[Tensor, Sequence[Tensor]]:
    gradient, x = second_order()
    return torch.autograd.grad(gradient.square().sum(), x, create_graph=True)[0], x


GRAPHS = {f.__name__: f for f in (first_order, second_order, tangent, third_order)}
NODES = {
    "first_order": "SdpaBackward",
    "second_order": "SdpaDoubleBackward",
    "tangent": "SdpaTangentBackward",
    "third_order": "SdpaSecondBackward",
}


def stress(name: str) -> tuple[int, int, list[str]]:
    """Graphs, gradients that came out, and errors other than that the graph was freed."""
    torch.set_num_threads(1)
    number, gradients, errors = 0, [0] * THREADS, []
    graphs: list[tuple[list[Tensor], Sequence[Tensor]]] = []
    barrier = threading.Barrier(THREADS + 1)

    def run(thread: int) -> None:
        while True:
            barrier.wait()
            if not graphs:
                return
            for losses, x in graphs:
                try:
                    torch.autograd.grad(losses[thread], x, allow_unused=True)
                    gradients[thread] += 1
                except RuntimeError as error:
                    if FREED not in str(error):
                        errors.append(str(error))
            barrier.wait()

    threads = [threading.Thread(target=run, args=(n,)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        for _ in range(GRAPHS_A_ROUND):
            output, x = GRAPHS[name]()
            graphs.append(([output.sum() for _ in range(THREADS)], x))
        number += len(graphs)
        barrier.wait()  # The threads begin together,
        barrier.wait()  # and all have ended.
        graphs.clear()
    barrier.wait()
    for thread in threads:
        thread.join()
    return number, sum(gradients), errors


@pytest.mark.regression
@pytest.mark.parametrize("name", GRAPHS)
def test_backward_in_several_threads(name: str) -> None:
    """Without retain_graph the first that ends releases what the node keeps while others read it.

    Each thread gets its gradients or the error that the graph was freed; the process goes on.
    """
    output, _ = GRAPHS[name]()
    assert NODES[name] in graph_of(output)
    number, gradients, errors = in_fresh_process(stress, name)
    assert not errors
    assert number > 0
    assert gradients >= number


def graph_of(tensor: Tensor) -> set[str]:
    """The names of the nodes of its graph."""
    names, waiting = set(), [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None:
            names.add(node.name())
            waiting += [following for following, _ in node.next_functions]
    return names
