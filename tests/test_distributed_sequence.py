"""DTensors that are sharded over a sequence have the results of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torch_attn
from _processes import Processes
from _sequences import CASES, LEARNED, derivatives, made
from torch_attn import reference

R, Rows = Replicate(), Shard(2)
# Whether queries, and keys with values, are cut.
CUTS = {"both": (Rows, Rows), "queries": (Rows, R), "keys": (R, Rows)}


@pytest.fixture(scope="module", params=[2, 3, 4])
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Processes]:
    processes = Processes(request.param, tmp_path_factory.mktemp("gloo"))
    yield processes
    processes.end()


def on_mesh(cut: str, mesh: Any) -> Any:
    of_queries, of_keys = CUTS[cut]

    def distribute(name: str, whole: Tensor) -> DTensor:
        name = name.removeprefix("second, ")
        if name in ("key", "value"):
            placement = of_keys
        elif name in ("query", "output"):
            placement = of_queries
        else:
            of_rows = name == "attn_mask" and whole.shape[-2] > 1 and cut == "both"
            placement = Shard(whole.ndim - 2) if of_rows else R
        return distribute_tensor(whole, mesh, [placement])

    return distribute


def check_case(case: str, cut: str, method: str) -> None:
    tensors, options = made(case, torch.float64, torch.float64)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    second = method != "ring" or cut == "queries"
    if method == "all_to_all" and any(n % dist.get_world_size() for n in CASES[case][2:4]):
        return  # tests/test_distributed_ring.py has the error
    torch.manual_seed(1)
    expected = derivatives(reference.sdpa, tensors, options, lambda _, t: t, second=second)
    torch.manual_seed(1)
    with torch_attn.distributed.method(method):
        actual = derivatives(torch_attn.sdpa, tensors, options, on_mesh(cut, mesh), second=second)
    assert actual["output"].placements == (CUTS[cut][0],)
    for name, tensor in actual.items():
        if name in ("key", "value"):
            assert tensor.placements == (CUTS[cut][1],) or cut == "queries"
        torch.testing.assert_close(
            tensor.full_tensor(), expected[name], rtol=1e-10, atol=1e-11, msg=name
        )


@pytest.mark.parametrize("method", ["ring", "gather", "all_to_all"])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_one_process(run: Processes, case: str, cut: str, method: str) -> None:
    run(check_case, case, cut, method)


PACKED: dict[str, dict[str, Any]] = {
    "causal": {"window_size": (-1, 0)},
    "window": {"window_size": (2, 1), "softcap": 2.0},
    "some keys": {"seqused_k": torch.tensor([2, 0, 5, 3, 1]), "window_size": (-1, 0)},
    "offsets": {"query_offset": torch.tensor([1, -1, 0, 3, 2]), "window_size": (-1, 0)},
    "learned": {"alibi_slopes": (4,), "sinks": (4,)},
    "mask": {"attn_mask": (1, 14, 7)},
}


def check_packed(case: str, cut: str, method: str) -> None:
    """Sequences of 3, 0, 7, 3 and 1 queries, which lie across the processes; T is longer."""
    torch.manual_seed(0)
    cu_seq = torch.tensor([0, 3, 3, 10, 13, 14]), torch.tensor([0, 2, 5, 10, 14, 15])
    options = {"enable_gqa": True, **PACKED[case]}
    tensors = {
        n: torch.randn(s, dtype=torch.float64)
        for n, s in options.items()
        if type(s) is tuple and n in LEARNED
    }
    options = {n: x for n, x in options.items() if n not in tensors}
    shapes = {"query": (15, 4, 8), "key": (17, 2, 8), "value": (17, 2, 5)}
    shapes["query"] = (14, 4, 8) if case == "mask" else shapes["query"]
    tensors |= {n: torch.randn(shape, dtype=torch.float64) for n, shape in shapes.items()}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def attend(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
        return torch_attn.varlen_attn(query, key, value, *cu_seq, 7, 7, **more, **options)

    def distribute(name: str, whole: Tensor) -> DTensor:
        of_queries, of_keys = (Shard(0) if p == Rows else R for p in CUTS[cut])
        placement = {"query": of_queries, "output": of_queries, "key": of_keys, "value": of_keys}
        return distribute_tensor(whole, mesh, [placement.get(name, R)])

    second = method != "ring" or cut == "queries"
    if method == "all_to_all" and dist.get_world_size() > 2:
        return
    if case == "mask" and method == "ring" and cut != "queries":
        with torch_attn.distributed.method(method):
            with pytest.raises(RuntimeError, match="packed sequences with an attn_mask are asked"):
                derivatives(attend, tensors, {}, distribute)
        return
    torch.manual_seed(1)
    expected = derivatives(attend, tensors, {}, lambda _, t: t, second=second)
    torch.manual_seed(1)
    with torch_attn.distributed.method(method):
        actual = derivatives(attend, tensors, {}, distribute, second=second)
    for name, tensor in actual.items():
        torch.testing.assert_close(
            tensor.full_tensor(), expected[name], rtol=1e-10, atol=1e-11, msg=name
        )


@pytest.mark.parametrize("method", ["ring", "gather", "all_to_all"])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("case", PACKED)
def test_packed_sequences(run: Processes, case: str, cut: str, method: str) -> None:
    run(check_packed, case, cut, method)
