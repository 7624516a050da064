"""What only a GPU shows: streams, graphs, memory, sizes past 2^31, other devices, the sanitizer.

The cases of the other files run on a GPU as well, by the fixtures `kernels` and `device`.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

import torch_attn
from _second_order import directions, make_grad_output
from helpers import (
    DTYPES,
    GPU,
    SEED,
    Inputs,
    assert_same_bits,
    largest,
    make_inputs,
    results,
)
from test_cuda_stand_in import weights_kept
from test_memory import OPTIONS, make_option
from test_subsystems import Attention
from tests.cuda.programs import PROGRAMS, compile_program, find
from torch_attn import reference
from torch_attn.varlen import AuxRequest

ROOT = Path(__file__).parents[1]
WHY = "the library was built without CUDA" if torch.cuda.is_available() else "no GPU"
if not GPU:
    pytest.skip(f"not run: {WHY}", allow_module_level=True)

F64, F32, BF16, F16 = DTYPES

Tensors = dict[str, Tensor]


class Call(NamedTuple):
    """What is called: a function of the tensors of `sizes` and `more`, by name, and of options."""

    sizes: dict[str, Any]  # of make_inputs
    options: dict[str, Any]
    function: Callable[..., Any] = torch_attn.sdpa
    more: Callable[[Inputs], Tensors] = lambda _: {}
    has_derivatives: bool = True
    in_graphs: bool = True  # whether a replay gives the bits of a call


def packed(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """Attention of sequences in a row: a head is [tokens, E] here as it is elsewhere."""
    by_token = (a.transpose(0, 1) for a in (query, key, value))
    aux = AuxRequest(lse=True)
    return torch_attn.varlen_attn(*by_token, enable_gqa=True, return_aux=aux, **options)


def paged(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """The same, the keys and values being pools of pages of 16 tokens."""
    pools = (a.transpose(0, 1).unflatten(0, (-1, 16)) for a in (key, value))
    by_token, aux = query.transpose(0, 1), AuxRequest(lse=True)
    more = {"cu_seq_k": None, "enable_gqa": True, "return_aux": aux, **options}
    return torch_attn.varlen_attn(by_token, *pools, **more)


def cached(query: Tensor, key: Tensor, value: Tensor, starts: Tensor) -> Any:
    """Attends in a cache of two sequences and a fork, which then have a token more, and a query."""
    heads, tokens, head_dim = key.shape
    sizes = {"page_size": 16, "key_heads": heads, "head_dim": head_dim, "dtype": key.dtype}
    cache = torch_attn.PagedCache(20, **sizes, device=key.device)
    new = [a.transpose(0, 1) for a in (key, value)]
    texts = [cache.add(), cache.add()]
    cache.append(texts, *(a[3:] for a in new), torch.tensor([0, 40, tokens - 3], device="cpu"))
    texts.append(cache.fork(texts[0]))
    cache.append(texts, *(a[:3] for a in new), torch.arange(4, device="cpu"))
    return cache.attend(query.transpose(0, 1), texts, starts, max_q=1)


def starts(tokens: int, sequences: int) -> Tensor:
    """Starts of sequences of any lengths, the last of which ends with the tokens."""
    cuts = torch.randint(tokens + 1, (sequences - 1,)).sort().values
    return torch.cat([torch.zeros(1, dtype=torch.int64), cuts, torch.full((1,), tokens)])


def positions(x: Inputs) -> Tensors:
    return {"query_offset": torch.randint(-30, 100, x.query.shape[:1])}


def lengths(x: Inputs) -> Tensors:
    return {"key_lengths": torch.randint(x.key.size(-2) + 1, x.query.shape[:1])}


def slopes(x: Inputs) -> Tensors:
    return {"alibi_slopes": torch.rand(x.query.size(-3)).to(x.query.dtype)}


def sinks(x: Inputs) -> Tensors:
    return {"sinks": torch.randn(x.query.size(-3)).to(x.query.dtype)}


def everything(x: Inputs) -> Tensors:
    return {**positions(x), **lengths(x), **slopes(x), **sinks(x)}


def sequences(x: Inputs) -> Tensors:
    return {f"cu_seq_{n}": starts(a.size(-2), 3) for n, a in (("q", x.query), ("k", x.key))}


def some_of_sequences(x: Inputs) -> Tensors:
    """Keys that are not in use behind those that are, and positions of their own."""
    of_keys = sequences(x)
    used = (torch.rand(3) * (of_keys["cu_seq_k"].diff() + 1)).long()
    return {**of_keys, **sinks(x), "seqused_k": used, "query_offset": torch.randint(-9, 99, (3,))}


def pages(x: Inputs) -> Tensors:
    """Pages of three sequences, in any order."""
    number = x.key.size(-2) // 16
    table = torch.randperm(number).view(3, -1).int()
    used = torch.randint(16 * table.size(1) + 1, (3,)).int()
    return {"cu_seq_q": starts(x.query.size(-2), 3), "seqused_k": used, "block_table": table}


def statistics(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    return torch_attn.sdpa_stats(query, key, **options)


ALL = {"softcap": 2.0, "window_size": (40, 10), "is_causal": True}
PACKED = {"L": 201, "S": 288, "E": 64, "batch": (), "heads": (4, 2, 2)}
MOST = {"max_q": 201, "max_k": 288}

# One of each kernel, at sizes that fill no tile.
CALLS: dict[str, Call] = {
    "float64": Call({"L": 33, "S": 70, "mask": (33, 70), "dtype": F64}, {}),
    "float32": Call({"L": 70, "S": 131, "E": 65, "Ev": 20, "mask": (2, 3, 70, 131)}, {}),
    "float32, causal": Call({"L": 131, "S": 70, "E": 300, "heads": 1}, {"is_causal": True}),
    "bfloat16": Call({"L": 201, "S": 301, "E": 64, "dtype": BF16}, {}),
    "bfloat16, 128": Call({"L": 201, "S": 301, "E": 128, "dtype": BF16}, {"is_causal": True}),
    "float16, 256": Call({"L": 131, "S": 201, "E": 256, "Ev": 80, "dtype": F16}, {}),
    "float16, 300": Call({"L": 33, "S": 70, "E": 300, "heads": 1, "dtype": F16}, {}),
    "odd sizes": Call({"L": 7, "S": 13, "E": 9, "Ev": 3, "mask": (7, 13), "dtype": F16}, {}),
    "bool mask": Call({"L": 70, "S": 131, "mask": (70, 131), "kind": "bool", "dtype": F16}, {}),
    "mask of keys": Call({"L": 70, "S": 131, "mask": (1, 131), "dtype": BF16}, {}),
    "mask of rows": Call({"L": 70, "S": 131, "mask": (70, 1), "dtype": BF16}, {}),
    "float32 mask": Call(
        {"L": 70, "S": 131, "mask": (70, 131), "kind": "float32", "dtype": BF16}, {}
    ),
    "head_dim 0": Call({"L": 33, "S": 70, "E": 0, "Ev": 8, "dtype": BF16}, {}),
    "no columns of value": Call({"L": 33, "S": 70, "E": 8, "Ev": 0, "dtype": BF16}, {}),
    "no keys, odd head_dim": Call({"L": 33, "S": 0, "E": 9, "Ev": 8, "dtype": BF16}, {}),
    "no keys, odd value": Call({"L": 33, "S": 0, "E": 8, "Ev": 9, "dtype": BF16}, {}),
    "grouped heads": Call(
        {"L": 90, "S": 150, "heads": (6, 2, 3), "dtype": BF16}, {"enable_gqa": True}
    ),
    "one query": Call({"L": 1, "S": 5001, "heads": (8, 1, 1), "dtype": BF16}, {"enable_gqa": True}),
    "one float32 query": Call({"L": 1, "S": 5001, "batch": ()}, {}),
    "dropout": Call(
        {"L": 201, "S": 301, "mask": (1, 301), "dtype": BF16}, {"dropout_p": 0.3}, in_graphs=False
    ),
    "float32 dropout": Call(
        {"L": 70, "S": 131}, {"dropout_p": 0.3, "is_causal": True}, in_graphs=False
    ),
    "softcap": Call({"L": 70, "S": 131, "E": 64, "dtype": BF16}, {"softcap": 2.0}),
    "float32 softcap": Call({"L": 33, "S": 70, "mask": (70,)}, {"softcap": 2.0}),
    "window": Call({"L": 201, "S": 301, "E": 64, "dtype": BF16}, {"window_size": (37, 20)}),
    "float32 window": Call({"L": 70, "S": 131}, {"window_size": (20, -1)}),
    "offset": Call(
        {"L": 90, "S": 150, "E": 64, "dtype": BF16}, {"is_causal": True}, more=positions
    ),
    "key lengths": Call({"L": 90, "S": 150, "E": 64, "dtype": F16}, {}, more=lengths),
    "key lengths, mask": Call(
        {"L": 70, "S": 131, "mask": (70, 131), "dtype": BF16}, {}, more=lengths
    ),
    "few queries, key lengths": Call({"L": 2, "S": 3001, "dtype": BF16}, {}, more=lengths),
    "sinks": Call({"L": 201, "S": 301, "E": 128, "dtype": BF16}, {}, more=sinks),
    "slopes": Call({"L": 70, "S": 131, "E": 64, "dtype": F16}, {}, more=slopes),
    "all": Call({"L": 70, "S": 131, "mask": (70, 131)}, ALL, more=everything),
    "float16, all": Call(
        {"L": 70, "S": 131, "mask": (3, 70, 131), "dtype": F16}, ALL, more=everything
    ),
    "packed": Call({**PACKED, "dtype": BF16}, MOST, packed, sequences),
    "packed, causal": Call(
        {**PACKED, "dtype": F16}, {**MOST, "window_size": (-1, 0)}, packed, sequences
    ),
    "packed, float32": Call(
        {**PACKED, "mask": (4, 201, 288)}, {**MOST, "softcap": 2.0}, packed, some_of_sequences
    ),
    "packed, some keys": Call(
        {**PACKED, "S": 283, "mask": (1, 201, 283), "dtype": BF16},
        {**MOST, "max_k": 283},
        packed,
        some_of_sequences,
    ),
    "packed, dropout": Call(
        {**PACKED, "dtype": BF16}, {**MOST, "dropout_p": 0.3}, packed, sequences, in_graphs=False
    ),
    "pages": Call({**PACKED, "dtype": BF16}, MOST, paged, pages, has_derivatives=False),
    "pages, float32": Call(
        PACKED, {**MOST, "window_size": (70, 0)}, paged, pages, has_derivatives=False
    ),
    "cache": Call(
        {"L": 3, "S": 123, "E": 64, "batch": (), "heads": (4, 2, 2), "dtype": BF16},
        {},
        cached,
        lambda _: {"starts": torch.arange(4)},
        has_derivatives=False,
        in_graphs=False,
    ),
    "logsumexp": Call(
        {"L": 201, "S": 301, "E": 64, "dtype": BF16}, {}, torch_attn.sdpa_with_logsumexp, sinks
    ),
    "statistics": Call(
        {"L": 90, "S": 150, "E": 64, "dtype": BF16},
        {"is_causal": True},
        statistics,
        has_derivatives=False,
    ),
    "statistics, float32": Call(
        {"L": 70, "S": 131}, {"softcap": 2.0}, statistics, everything, has_derivatives=False
    ),
    "invariant": Call(
        {"L": 3, "S": 5001, "E": 64, "dtype": BF16},
        {},
        torch_attn.invariant()(torch_attn.sdpa),
        lengths,
    ),
}


@pytest.fixture(autouse=True)
def _on_cuda() -> Iterator[None]:
    with torch.device("cuda"):
        yield


def make_call(call: str) -> tuple[Callable[..., Any], Tensors, list[Tensor], Tensors]:
    """What is called, at a point; gradients of its results; a direction."""
    sizes, options, function, more, has_derivatives, _ = CALLS[call]
    inputs = make_inputs(**sizes)
    x = {**present(inputs), **more(inputs)}
    named = functools.partial(function, **options)
    u = [torch.randn_like(a) for a in results_of(named, x)]
    floating = {n: a for n, a in x.items() if a.is_floating_point() and has_derivatives}
    return named, x, u, {n: torch.randn_like(a) for n, a in floating.items()}


def present(x: Inputs) -> Tensors:
    return {name: a for name, a in x._asdict().items() if a is not None}


def results_of(function: Callable[..., Any], x: Tensors) -> Sequence[Tensor]:
    found = function(**x)
    return found if isinstance(found, tuple) else (found,)


def compute(
    function: Callable[..., Any], x: Tensors, u: Sequence[Tensor], t: Tensors
) -> dict[str, Tensor]:
    """What the kernels give: the results, all gradients, J t and H(u; x; t).

    Without a direction the results alone.
    """
    x = {n: a.detach().requires_grad_(n in t) for n, a in x.items()}
    results = results_of(function, x)
    found = {f"result {i}": a for i, a in enumerate(results)}
    if t:
        smooth = [i for i, a in enumerate(results) if a.requires_grad]
        upstream = [u[i].detach().requires_grad_() for i in smooth]
        wanted = [x[n] for n in t]
        gradients = torch.autograd.grad(
            [results[i] for i in smooth], wanted, upstream, create_graph=True
        )
        further = torch.autograd.grad(
            gradients, [*upstream, *wanted], [*t.values()], materialize_grads=True
        )
        names = [f"tangent {i}" for i in smooth] + [f"second_{n}" for n in t]
        found |= {f"grad_{n}": a for n, a in zip(t, gradients, strict=True)}
        found |= dict(zip(names, further, strict=True))
    return {n: a.detach() for n, a in found.items()}


def compute_seeded(*arguments: Any) -> dict[str, Tensor]:
    torch.manual_seed(SEED)
    return compute(*arguments)


def assert_near(actual: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    """Errors are below so much of the largest value: enough to see wrong addresses."""
    assert actual.keys() == expected.keys()
    for name in expected:
        assert largest(actual[name] - expected[name]) <= bound * largest(expected[name]), name


# --- streams, synchronisation, graphs -------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS)
def test_current_stream(call: str) -> None:
    """A call reads what was queued before on the stream, though the host does not wait for it."""
    function, x, u, t = make_call(call)
    expected = compute_seeded(function, x, u, t)
    late = {name: torch.zeros_like(a) for name, a in x.items()}
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # cycles, in which any other stream goes on
        for name, source in x.items():
            late[name].copy_(source)
        actual = compute_seeded(function, late, u, t)
    stream.synchronize()
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("call", CALLS)
def test_nothing_waits_for_the_device(call: str) -> None:
    of_call = make_call(call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        compute_seeded(*of_call)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_waiting_would_be_noticed() -> None:
    number = torch.ones(())
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            number.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Copies(TorchFunctionMode):
    """Counts calls that copy to the device, of tensors or of Python's numbers."""

    number = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_cuda:
            moved = function is Tensor.to and not args[0].is_cuda
            self.number += moved or function in (torch.tensor, torch.as_tensor)
        return result


def small_cache(layers: int = 1) -> tuple[torch_attn.PagedCache, list[int]]:
    """A cache, and texts of 40, 3 and 17 tokens in it."""
    cache = torch_attn.PagedCache(30, page_size=4, key_heads=2, head_dim=64, layers=layers)
    texts = [cache.add() for _ in range(3)]
    for layer in range(layers):
        starts = torch.tensor([0, 40, 43, 60], device="cpu")
        cache.append(texts, *torch.randn(2, 60, 2, 64), starts, layer=layer)
    return cache, texts


def test_a_model_that_generates_waits_for_nothing() -> None:
    """The first of four layers copies what is new to the device: rows, lengths, at times tables.

    Also, when one of two sequences writes into a page of both, which pages are copied.
    """
    layers = 4
    cache, texts = small_cache(layers)
    texts.append(cache.fork(texts[1]))
    starts, host_starts = torch.arange(5), torch.arange(5, device="cpu")
    query, new = torch.randn(4, 4, 64), torch.randn(2, 4, 2, 64)
    copies = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(8):
            with Copies() as counted:
                for layer in range(layers):
                    cache.append(texts, *new, host_starts, layer=layer)
                    cache.attend(query, texts, starts, layer=layer, max_q=1)
            copies.append(counted.number)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert copies[0] == 4, copies
    assert {*copies[1:]} == {2, 3}, copies


def test_a_cache_in_a_graph() -> None:
    """Its replays read the tables of the call, whatever the cache has been asked for since."""
    cache, texts = small_cache()
    starts, query = torch.arange(4), torch.randn(3, 4, 64)

    def attend() -> Tensor:
        return cache.attend(query, texts, starts, max_q=1)

    replay, actual = captured(attend)
    for _ in range(2):
        query.copy_(torch.randn_like(query))
        cache.key.copy_(torch.randn_like(cache.key))
        expected = attend()
        for others in (texts[::-1], texts[:1] * 3):
            cache.attend(query, others, starts, max_q=1)
        # what is in memory that was freed, if any was
        _others = [torch.full((100,), 2**30, dtype=torch.int32) for _ in range(20)]
        replay()
        assert torch.equal(actual, expected)


def captured(function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """A function captured in a graph: what replays it, and the tensors that this writes to."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()  # outside of the graph first, as PyTorch's documentation asks
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    # As a capture begins, PyTorch writes the seed into the graph on the stream that captures. A
    # replay writes its own on the caller's stream, and does not wait for the first.
    torch.cuda.synchronize()
    return graph.replay, result


def change(tensors: Any, call: str) -> None:
    """Other numbers in the same memory, from another draw."""
    _, *drawn = make_call(call)
    for old, new in zip(tree_leaves(tensors), tree_leaves(drawn), strict=True):
        old.copy_(new)


IN_GRAPHS = [name for name, call in CALLS.items() if call.in_graphs]


@pytest.mark.parametrize("call", IN_GRAPHS)
def test_graph(call: str) -> None:
    """Forward and all derivatives, replayed with other numbers: the bits of a call."""
    function, *tensors = make_call(call)
    replay, actual = captured(lambda: compute(function, *tensors))
    for _ in range(2):
        change(tensors, call)
        replay()
        assert_same_bits(actual, compute(function, *tensors))


def test_splits_are_counted_for_each_call() -> None:
    """Two streams and a graph decode at once, in splits that the last block of each merges."""
    query = torch.randn(1, 32, 1, 128, dtype=torch.bfloat16)
    key, value = torch.randn(2, 1, 8, 16384, 128, dtype=torch.bfloat16)
    decode = functools.partial(torch_attn.sdpa, query, key, value, enable_gqa=True)
    expected = decode()
    replay, in_graph = captured(decode)
    streams, found = [torch.cuda.Stream(), torch.cuda.Stream()], []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(decode())
        replay()
        found.append(in_graph.clone())
    torch.cuda.synchronize()
    for output in found:
        assert torch.equal(output, expected)


@pytest.mark.parametrize("call", IN_GRAPHS)
def test_graph_without_gradients(call: str) -> None:
    function, *tensors = make_call(call)
    x, u, _ = tensors
    replay, actual = captured(lambda: compute(function, x, u, {}))
    for _ in range(2):
        change(tensors, call)
        replay()
        assert_same_bits(actual, compute(function, x, u, {}))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_in_a_graph(dtype: torch.dtype) -> None:
    """Each replay drops others, as the same number of calls do, and a call with its state."""
    x = make_inputs(70, 131, dtype=dtype)

    def call(rng_state: Tensor | None = None) -> Tensor:
        return torch.ops.attn._sdpa_forward(*x, dropout_p=0.5, rng_state=rng_state)

    replay, (output, _, rng_state, *_) = captured(call)
    torch.manual_seed(SEED)
    replayed = []
    for _ in range(3):
        replay()
        replayed.append(output.clone())
        assert torch.equal(call(rng_state.clone())[0], output)
    assert not torch.equal(replayed[0], replayed[1])
    assert not torch.equal(replayed[1], replayed[2])
    torch.manual_seed(SEED)
    for expected in replayed:
        assert torch.equal(call()[0], expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_dropout_in_a_graph(dtype: torch.dtype) -> None:
    """The backward drops what the forward dropped: <u, A V> = <A'u, V> for the weights kept, A."""
    x = make_inputs(70, 131, dtype=dtype)
    u = torch.randn_like(x.query)
    replay, actual = captured(lambda: results(torch_attn.sdpa, x, u, dropout_p=0.5))
    outputs = []
    for _ in range(3):
        replay()
        products = u.double() * actual["output"].double()
        others = actual["grad_value"].double() * x.value.double()
        size = products.abs().sum() + others.abs().sum()
        assert (products.sum() - others.sum()).abs() <= torch.finfo(dtype).eps * size
        outputs.append(actual["output"].clone())
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[1], outputs[2])


# --- bits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS)
def test_repeats(call: str) -> None:
    """The same bits on every run, also while the GPU is busy with something else."""
    of_call = make_call(call)
    expected = compute_seeded(*of_call)
    matrix, other = torch.randn(2048, 2048), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        with torch.cuda.stream(other):
            torch.mm(matrix, matrix)
        assert_same_bits(compute_seeded(*of_call), expected)
    other.synchronize()


@pytest.mark.parametrize("keys", [128, 133])  # as in test_cuda_stand_in.py
@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_is_that_of_the_cpu(dtype: torch.dtype, keys: int) -> None:
    """Given the state of a generator, both devices drop the same weights."""
    with torch.device("cpu"):
        expected = weights_kept(dtype, keys)
    assert torch.equal(weights_kept(dtype, keys).cpu(), expected)


# --- devices --------------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", Inputs._fields)
@pytest.mark.parametrize("function", [torch_attn.sdpa, torch_attn.sdpa_with_weights])
def test_mixed_devices(function: Callable[..., Any], argument: str) -> None:
    x = make_inputs(5, 7, mask=(5, 7))
    x = x._replace(**{argument: getattr(x, argument).cpu()})
    message = f"{argument} is on cpu but query is on cuda:0; all tensors must be on the same device"
    if argument == "query":
        message = "key is on cuda:0 but query is on cpu; all tensors must be on the same device"
    for inputs in (x, x.require_grad()):
        with pytest.raises(RuntimeError, match=message):
            function(*inputs)


@pytest.mark.parametrize(("dtype", "bound"), [(F64, 1e-14), (F32, 1e-5), (BF16, 2e-2)])
def test_model_moves_to_the_gpu(dtype: torch.dtype, bound: float) -> None:
    """The same output and gradients of parameters, to rounding."""
    with torch.device("cpu"):
        model, x = Attention().to(dtype).eval(), torch.randn(3, 6, 8, dtype=dtype)
    moved = Attention().to(dtype).eval()
    moved.load_state_dict(model.state_dict())
    for module, inputs in ((model, x), (moved, x.to("cuda"))):
        module.output = module(inputs)
        module.output.square().sum().backward()
    named_gradients = [
        {"output": m.output.detach(), **{n: p.grad for n, p in m.named_parameters()}}
        for m in (moved, model)
    ]
    assert all(tensor.is_cuda for tensor in named_gradients[0].values())
    actual, expected = ({n: t.cpu().double() for n, t in d.items()} for d in named_gradients)
    assert_near(actual, expected, bound)


@pytest.mark.skipif(GPU and torch.cuda.device_count() < 2, reason="not run: needs two GPUs")
@pytest.mark.parametrize("call", CALLS)
def test_second_device(call: str) -> None:
    """Tensors on a GPU that is not the current one."""
    function, *tensors = make_call(call)
    there = torch.device("cuda:1")
    moved = tree_map(lambda a: a.to(there), tensors)
    actual = compute_seeded(function, *moved)
    assert torch.cuda.current_device() == 0
    assert all(tensor.device == there for tensor in actual.values())
    expected = compute_seeded(function, *tensors)
    alike = torch.cuda.get_device_name(0) == torch.cuda.get_device_name(1)
    on_cpu = ({name: a.cpu() for name, a in some.items()} for some in (actual, expected))
    assert_near(*on_cpu, bound=0 if alike else 2e-2)


# --- memory and sizes -----------------------------------------------------------------------------


def peak_growth(function: Callable[[], Any]) -> int:
    """How many bytes more than before the function had allocated at a time."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("option", OPTIONS)
def test_peak_grows_linearly(option: str, dtype: torch.dtype) -> None:
    """From L = S = 2048 to 16384: the scores would grow 64-fold, to 512 MiB or more."""
    growth = []
    for length in (2048, 16384):
        x, options = make_option(option, length, length, dtype), OPTIONS[option][1]
        function = functools.partial(torch_attn.sdpa, **options)
        u, t = [make_grad_output(x, **options)], present(directions(x))
        growth.append(peak_growth(lambda: compute(function, present(x), u, t)))  # noqa: B023
    small, large = growth
    assert 0 < large <= 10 * small, (small, large)
    assert large <= 64 << 20, (small, large)


def test_scores_would_be_noticed() -> None:
    x = make_option("plain", 16384, 16384)
    assert peak_growth(lambda: reference.sdpa(*x)) > 1 << 30


def needs(gib: int) -> None:
    free = torch.cuda.mem_get_info()[0] >> 30
    if free < gib:
        pytest.skip(f"not run: needs {gib} GiB of GPU memory, {free} are free")


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_more_than_2_31_numbers_in_keys(dtype: torch.dtype) -> None:
    """The last sample as if it were alone."""
    needs(12 * dtype.itemsize)
    x = make_inputs(16, 1 << 16, 64, batch=(33,), heads=16, dtype=dtype)
    assert x.key.numel() > 1 << 31
    u = torch.randn_like(x.query)
    alone = results(torch_attn.sdpa, x.map(lambda a: a[-1:]), u[-1:])
    actual = {n: a[-1:].clone() for n, a in results(torch_attn.sdpa, x, u).items()}
    assert_near(actual, alone, 2e-2)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_more_than_2_31_numbers_in_a_mask(dtype: torch.dtype) -> None:
    """The last rows as if they were alone."""
    needs(6 * dtype.itemsize)
    x = make_inputs(46400, 46400, 64, batch=(), heads=1, mask=(46400, 46400), dtype=dtype)
    assert x.attn_mask.numel() > 1 << 31
    u = torch.randn_like(x.query)
    names = ("output", "grad_query", "grad_attn_mask")  # of which every row stands alone
    last = x._replace(query=x.query[:, -70:], attn_mask=x.attn_mask[-70:])
    alone = results(torch_attn.sdpa, last, u[:, -70:])
    actual = results(torch_attn.sdpa, x, u)
    assert_near({n: actual[n][..., -70:, :] for n in names}, {n: alone[n] for n in names}, 2e-2)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(
    "sizes",
    [
        {"L": 3, "S": 5, "batch": (70_000,), "heads": 1},
        {"L": 3, "S": 5, "batch": (), "heads": 70_000},
        {"L": 4_500_000, "S": 3, "batch": (), "heads": 1},
        {"L": 3, "S": 4_500_000, "batch": (), "heads": 1},
    ],
    ids=["batch", "heads", "queries", "keys"],
)
def test_more_than_65535_blocks(sizes: dict[str, Any], dtype: torch.dtype) -> None:
    """As many as two of a grid's three dimensions may not have."""
    needs(24)
    x = make_inputs(**sizes, dtype=dtype)
    given = present(x), [torch.randn_like(x.query)], present(directions(x))
    doubles = tree_map(Tensor.double, given)
    actual = compute(torch_attn.sdpa, *given)
    assert_near(actual, compute(reference.sdpa, *doubles), 2e-2)


# --- programs that need no torch, and compute-sanitizer -------------------------------------------


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Where a program of tests/cuda is: in ATTN_CUDA_PROGRAMS, if set, or else compiled, once."""
    if built := os.environ.get("ATTN_CUDA_PROGRAMS"):
        return lambda name: Path(built).resolve() / name
    if not find("nvcc"):
        pytest.skip("not run: ATTN_CUDA_PROGRAMS is not set, and nvcc is not there")
    to = tmp_path_factory.mktemp("programs")
    return functools.cache(lambda name: compile_program(name, to, "-lineinfo"))


@pytest.mark.slow  # may compile
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str, program: Callable[[str], Path]) -> None:
    run = subprocess.run([program(name)], capture_output=True, text=True, timeout=60)
    assert (run.stdout, run.returncode) == ("right\n", 0), run.stdout + run.stderr


def find_sanitizer() -> str | None:
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    places = [os.path.join(home, "bin") for home in [*homes, "/usr/local/cuda"]]
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ["PATH"], *places]))


SANITIZER = find_sanitizer()
needs_sanitizer = pytest.mark.skipif(
    GPU and SANITIZER is None, reason="not run: compute-sanitizer is not there"
)


def sanitize(tool: str, *command: str | Path, timeout: float, **environment: str) -> None:
    """Runs the sanitizer on our kernels alone, because torch's take minutes."""
    options = ["--tool", tool, "--error-exitcode", "1", "--report-api-errors", "no"]
    run = subprocess.run(
        [SANITIZER, *options, "--kernel-name", "kns=attn", *command],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-4000:]
    assert "SUMMARY: 0 " in run.stdout, run.stdout[-1000:]


@needs_sanitizer
@pytest.mark.slow  # may compile
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_sanitizer(name: str, tool: str, program: Callable[[str], Path]) -> None:
    """Every array is an allocation of its own, so that a read beyond it is seen."""
    sanitize(tool, program(name), timeout=180, ATTN_GUARD_BYTES="0")


@needs_sanitizer
@pytest.mark.slow  # minutes
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer_of_all_calls(tool: str) -> None:
    """The kernels that no program has, too, such as second derivatives' and statistics'."""
    sanitize(
        tool,
        *(sys.executable, "-m", "tests.cuda.smoke", "--dtype", "own"),
        timeout=900,
        PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        # every tensor in memory of its own
        PYTORCH_NO_CUDA_MEMORY_CACHING="1",
    )
