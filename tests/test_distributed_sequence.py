"""DTensors that are sharded over a sequence have the results of one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torch_attn
from _accuracy import hold
from _distributed import assert_same
from _options import errors_of_algorithms
from _processes import Processes, processes_of
from _sequences import CASES, LEARNED, METHODS, cases, derivatives, made
from helpers import largest, ulp
from torch_attn import reference

pytestmark = pytest.mark.long

R, Rows = Replicate(), Shard(2)
# Whether queries, and keys with values, are cut.
CUTS = {"both": (Rows, Rows), "queries": (Rows, R), "keys": (R, Rows)}

run, four = processes_of(2, 3), processes_of(4)


def on_mesh(cut: str) -> Callable[[str, Tensor], DTensor]:
    of_queries, of_keys = CUTS[cut]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def distribute(name: str, whole: Tensor) -> DTensor:
        if name in ("key", "value"):
            is_cut = of_keys == Rows
        elif name in ("query", "output", "logsumexp"):
            is_cut = of_queries == Rows
        else:
            is_cut = name == "attn_mask" and whole.shape[-2] > 1 and cut == "both"
        rows = whole.ndim - (1 if name == "logsumexp" else 2)
        return distribute_tensor(whole, mesh, [Shard(rows) if is_cut else R])

    return distribute


def with_logsumexp(module: Any) -> Any:
    return lambda **x: module.sdpa_with_logsumexp(**x)[:2]


def refusal(cut: str, method: str, heads: tuple[int, ...], ring_lacks: str = "") -> Any:
    """Within it a call that the method lacks has to be an error, and others have to be none."""
    if cut != "queries":  # processes that hold all keys exchange nothing, so they lack nothing
        if method == "all_to_all" and any(n % dist.get_world_size() for n in heads):
            return pytest.raises(RuntimeError, match="needs numbers of heads that are multiples of")
        if method == "ring" and ring_lacks:
            return pytest.raises(RuntimeError, match=f"{ring_lacks}, which a ring lacks")
    return contextlib.nullcontext()


def check_case(case: str, cut: str, method: str) -> None:
    call = made(case, torch.float64, torch.float64)
    distribute, second = on_mesh(cut), method != "ring" or cut == "queries"
    torch.manual_seed(1)
    expected = derivatives(with_logsumexp(reference), *call, lambda _, t: t, second=second)
    torch.manual_seed(1)
    with torch_attn.distributed.method(method), refusal(cut, method, CASES[case][2:4]):
        actual = derivatives(with_logsumexp(torch_attn), *call, distribute, second=second)
        for name, tensor in actual.items():
            if name in ("output", "logsumexp") or (name in ("key", "value") and cut != "queries"):
                assert tensor.placements == distribute(name, expected[name]).placements
            assert_same(tensor.full_tensor(), expected[name], name)


def cut_in_turn(case: str, among: Iterable[str], method: str) -> str:
    """Each case has each method once and each cut once; each method has each cut."""
    return [*CUTS][([*among].index(case) + METHODS.index(method)) % len(CUTS)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", cases("two dimensions", "mask of rows that see no keys"))
def test_results_are_those_of_one_process(run: Processes, case: str, method: str) -> None:
    run(check_case, case, cut_in_turn(case, CASES, method), method)


PACKED: dict[str, dict[str, Any]] = {
    "causal": {"window_size": (-1, 0)},
    "window": {"window_size": (2, 1), "softcap": 2.0},
    "some keys": {"seqused_k": torch.tensor([2, 0, 5, 3, 1]), "window_size": (-1, 0)},
    "offsets": {"query_offset": torch.tensor([1, -1, 0, 3, 2]), "window_size": (-1, 0)},
    "learned": {"alibi_slopes": (4,), "sinks": (4,)},
    "mask": {"attn_mask": (1, 14, 7)},
}


def check_packed(case: str, cut: str, method: str) -> None:
    """Sequences of 3, 0, 7, 3 and 1 queries, stored across the processes; T is longer."""
    torch.manual_seed(0)
    cu_seq = torch.tensor([0, 3, 3, 10, 13, 14]), torch.tensor([0, 2, 5, 10, 14, 15])
    shapes = {"query": (14 if case == "mask" else 15, 4, 8), "key": (17, 2, 8), "value": (17, 2, 5)}
    shapes |= {n: shape for n, shape in PACKED[case].items() if n in LEARNED}
    tensors = {n: torch.randn(shape, dtype=torch.float64) for n, shape in shapes.items()}
    options = {n: x for n, x in PACKED[case].items() if n not in LEARNED} | {"enable_gqa": True}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def attend(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
        return torch_attn.varlen_attn(query, key, value, *cu_seq, 7, 7, **more, **options)

    def distribute(name: str, whole: Tensor) -> DTensor:
        of_queries, of_keys = (Shard(0) if p == Rows else R for p in CUTS[cut])
        placement = {"query": of_queries, "output": of_queries, "key": of_keys, "value": of_keys}
        return distribute_tensor(whole, mesh, [placement.get(name, R)])

    ring_lacks = "packed sequences with an attn_mask are asked for" if case == "mask" else ""
    second = method != "ring" or cut == "queries"
    torch.manual_seed(1)
    expected = derivatives(attend, tensors, {}, lambda _, t: t, second=second)
    torch.manual_seed(1)
    with torch_attn.distributed.method(method), refusal(cut, method, (4, 2), ring_lacks):
        actual = derivatives(attend, tensors, {}, distribute, second=second)
        for name, tensor in actual.items():
            assert_same(tensor.full_tensor(), expected[name], name)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", PACKED)
def test_packed_sequences(run: Processes, case: str, method: str) -> None:
    run(check_packed, case, cut_in_turn(case, PACKED, method), method)


def check_statistics(cut: str, method: str) -> None:
    """A gather and all-to-all compute them; a ring has none."""
    tensors, options = made("all", torch.float64, torch.float64)
    del tensors["value"]
    distribute = on_mesh(cut)
    sharded = {name: distribute(name, t) for name, t in tensors.items()}
    expected = torch_attn.sdpa_stats(**tensors, **options)
    refused = refusal(cut, method, CASES["all"][2:4], "statistics are asked for")
    with torch_attn.distributed.method(method), refused:
        actual = torch_attn.sdpa_stats(**sharded, **options)
        for name, tensor in expected._asdict().items():
            torch.testing.assert_close(getattr(actual, name).full_tensor(), tensor, msg=name)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cut", CUTS)
def test_statistics(run: Processes, cut: str, method: str) -> None:
    run(check_statistics, cut, method)


def check_default() -> None:
    """Without a method: the fewest bytes, another way for what a ring lacks, or an error."""
    torch.manual_seed(0)
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    for heads, possible in ((2 * world, True), (world + 1, False)):
        whole = [torch.randn(1, heads, 8, 4, dtype=torch.float64) for _ in range(3)]
        expected = torch_attn.sdpa(*whole, is_causal=True)
        leaves = [distribute_tensor(t, mesh, [Rows]).requires_grad_() for t in whole]
        output = torch_attn.sdpa(*leaves, is_causal=True)
        torch.testing.assert_close(output.full_tensor(), expected)
        (first,) = torch.autograd.grad(output.sum(), leaves[0], create_graph=True)
        if possible:
            torch.autograd.grad(first.square().sum(), leaves)
            continue
        with pytest.raises(RuntimeError, match="a second derivative is asked for, which a ring"):
            torch.autograd.grad(first.square().sum(), leaves)


def test_without_a_method(run: Processes) -> None:
    run(check_default)


def drawn(dtype: torch.dtype) -> dict[str, Tensor]:
    torch.manual_seed(0)
    x = {n: torch.randn(2, 2, 24, 16, dtype=dtype) for n in ("query", "key", "value")}
    return x | {"sinks": torch.randn(2, dtype=dtype)}


def solved(sdpa: Callable[..., Any], x: dict[str, Any]) -> dict[str, Tensor]:
    leaves = {n: t.detach().requires_grad_() for n, t in x.items()}
    output = sdpa(**leaves, is_causal=True)
    gradients = torch.autograd.grad(output, [*leaves.values()], torch.ones_like(output))
    found = {"output": output.detach(), **dict(zip(leaves, gradients, strict=True))}
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in found.items()}


def check_dtypes(dtype: torch.dtype, errors: dict[str, float]) -> None:
    """The output and the gradients of half types are rounded once."""
    world, x = dist.get_world_size(), drawn(dtype)
    exact = solved(reference.sdpa, {n: t.double() for n, t in x.items()})
    mesh = init_device_mesh("cpu", (world,))
    sharded = {n: distribute_tensor(t, mesh, [R if n == "sinks" else Rows]) for n, t in x.items()}
    for method in ("ring", "gather", *(["all_to_all"] if world == 2 else [])):
        with torch_attn.distributed.method(method):
            found = solved(torch_attn.sdpa, sharded)
        for name, actual in found.items():
            assert actual.dtype == dtype
            # Sums over devices, of slopes and sinks, are of their dtype, and so rounded again.
            rounded = (world - 1) * ulp(largest(exact[name]), dtype) if name == "sinks" else 0
            error = errors[name] + rounded / 2
            hold(f"{method}, {name}", actual.double(), exact[name], error, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_precision(run: Processes, dtype: torch.dtype) -> None:
    run(check_dtypes, dtype, errors_of_algorithms(drawn(dtype), solved))


def check_lengths_of_some_entries() -> None:
    """All processes of a mesh choose the same way, also where they see other lengths."""
    mesh = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(0)
    query = torch.randn(2, 2, 4, 8, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, 16, 8, dtype=torch.float64)
    lengths, sinks = torch.tensor([4, 16]), torch.randn(2, dtype=torch.float64)
    leaf = sinks.clone().requires_grad_()
    loss = torch_attn.sdpa(query, key, value, key_lengths=lengths, sinks=leaf).square().sum()
    (expected,) = torch.autograd.grad(loss, leaf)
    leaf = distribute_tensor(sinks, mesh, [R, R]).requires_grad_()
    cut = [distribute_tensor(t, mesh, [Shard(0), Rows]) for t in (query, key, value)]
    lengths = distribute_tensor(lengths, mesh, [Shard(0), R])
    loss = torch_attn.sdpa(*cut, key_lengths=lengths, sinks=leaf).square().sum()
    (found,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(found.full_tensor(), expected)


def test_lengths_of_some_entries(four: Processes) -> None:
    four(check_lengths_of_some_entries)


def check_wrong(method: str) -> None:
    """An error before messages: the next call works."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    x = distribute_tensor(torch.randn(1, 12, 12, 8), mesh, [Rows])
    short = distribute_tensor(torch.randn(1, 12, 8, 8), mesh, [Rows])
    with torch_attn.distributed.method(method):
        for wrong in ((x, x.double(), x), (x, x, short), (x, x[..., :4], x)):
            with pytest.raises(RuntimeError, match="attn::sdpa: "):
                torch_attn.sdpa(*wrong)
            torch_attn.sdpa(x, x, x)


@pytest.mark.parametrize("method", METHODS)
def test_wrong_arguments(run: Processes, method: str) -> None:
    run(check_wrong, method)
