"""A sequence over several processes of this machine, with gloo, has the results of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_attn
from _accuracy import hold
from _processes import Processes
from helpers import largest, ulp
from torch_attn import reference

WORLDS = [2, 3, 4]


@pytest.fixture(scope="module", params=WORLDS)
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Processes]:
    processes = Processes(request.param, tmp_path_factory.mktemp("gloo"))
    yield processes
    processes.end()


# Queries, keys, heads of the query and of the keys, and options; numbers stand for tensors.
CASES: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {
    "plain": (12, 12, 2, 2, {}),
    "uneven": (7, 9, 2, 2, {"is_causal": True}),
    "empty blocks": (1, 2, 2, 2, {}),
    "more queries than keys": (9, 1, 2, 2, {"is_causal": True}),
    "causal, grouped heads": (12, 12, 4, 2, {"is_causal": True}),
    "window": (12, 12, 2, 2, {"window_size": (2, 1)}),
    "window to the left": (12, 12, 2, 2, {"window_size": (3, 0), "is_causal": True}),
    "offsets": (5, 9, 2, 2, {"is_causal": True, "query_offset": torch.tensor([4, -2])}),
    "far offset": (5, 9, 2, 2, {"is_causal": True, "query_offset": -5}),
    "lengths": (6, 9, 2, 1, {"key_lengths": torch.tensor([7, 0])}),
    "soft cap": (8, 8, 2, 2, {"softcap": 2.0}),
    "slopes": (7, 9, 2, 2, {"alibi_slopes": (2,), "is_causal": True}),
    "sinks": (6, 9, 2, 2, {"sinks": (2, 2), "key_lengths": torch.tensor([7, 0])}),
    "mask": (7, 9, 2, 2, {"attn_mask": (2, 7, 9)}),
    "mask of keys": (5, 3, 2, 2, {"attn_mask": (5, 3), "softcap": 3.0}),
    "mask of rows": (7, 7, 2, 2, {"attn_mask": (7, 1), "sinks": (2,)}),
    "boolean mask": (7, 9, 2, 2, {"attn_mask": "bool"}),
    "all": (
        9,
        11,
        4,
        2,
        {
            "attn_mask": (4, 9, 11),
            "window_size": (6, 2),
            "query_offset": torch.tensor([1, 3]),
            "key_lengths": torch.tensor([8, 11]),
            "softcap": 3.0,
            "alibi_slopes": (4,),
            "sinks": (4,),
        },
    ),
}
LEARNED = ("attn_mask", "alibi_slopes", "sinks")


def made(
    case: str, dtype: torch.dtype, computed: torch.dtype
) -> tuple[list[Tensor], dict[str, Any]]:
    """Query, key, value, the upstream gradient, and the options: numbers of a dtype, in another."""
    torch.manual_seed(0)
    L, S, heads, key_heads, given = CASES[case]
    shapes = (heads, L, 8), (key_heads, S, 8), (key_heads, S, 5), (heads, L, 5)
    options: dict[str, Any] = {"enable_gqa": True}
    for name, value in given.items():
        if value == "bool":
            options[name] = torch.rand(L, S) < 0.6
        elif name in LEARNED:
            options[name] = torch.randn(value, dtype=dtype).to(computed)
        else:
            options[name] = value
    return [torch.randn(2, *shape, dtype=dtype).to(computed) for shape in shapes], options


def own_part(whole: Tensor, dim: int = -2) -> Tensor:
    """The block of this process, as torch.chunk cuts."""
    world, length = dist.get_world_size(), whole.shape[dim]
    size = -(-length // world)
    return whole.tensor_split([min(r * size, length) for r in range(1, world)], dim)[
        dist.get_rank()
    ]


def results(
    case: str,
    dtype: torch.dtype,
    alone: Callable[..., Tensor] | None = None,
    *,
    told: bool = True,
    method: str = "ring",
    computed: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Output and gradients of this process, or of a function alone the part that belongs here."""
    (query, key, value, upstream), options = made(case, dtype, computed or dtype)
    L, S = query.shape[-2], key.shape[-2]
    tensors = {"query": query, "key": key, "value": value}
    learned = {n: options.pop(n) for n in LEARNED if n in options}
    if not alone:
        tensors = {n: own_part(t, -2) for n, t in tensors.items()}
        upstream = own_part(upstream, -2)
        if "attn_mask" in learned:
            learned["attn_mask"] = own_part(learned["attn_mask"], -2)
        options["lengths"] = (L, S) if told else None
    leaves = {n: t.clone() for n, t in (tensors | learned).items()}
    wanted = {n: t.requires_grad_() for n, t in leaves.items() if t.is_floating_point()}
    if alone:
        output = alone(**leaves, **options)
    else:
        with torch_attn.distributed.method(method):
            output = torch_attn.distributed.sdpa(**leaves, **options)
    gradients = torch.autograd.grad(output, wanted.values(), upstream)
    found = {"output": output.detach(), **dict(zip(wanted, gradients, strict=True))}
    for name in found:
        if alone and name in ("output", "query", "key", "value", "attn_mask"):
            found[name] = own_part(found[name], -2)
        elif not alone and name in ("alibi_slopes", "sinks"):
            dist.all_reduce(found[name])
    return found


def check_case(case: str) -> None:
    expected = results(case, torch.float64, reference.sdpa)
    for told in (True, False):
        actual = results(case, torch.float64, told=told)
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_one_process(run: Processes, case: str) -> None:
    run(check_case, case)


def check_precision(dtype: torch.dtype) -> None:
    """The bound of one process, or what one process holds itself where its numbers are few."""
    computed = torch.promote_types(dtype, torch.float32)
    for case in CASES:
        exact = results(case, dtype, reference.sdpa, computed=torch.float64)
        formula = results(case, dtype, reference.sdpa, computed=computed)
        alone = results(case, dtype, of_one_process)
        for name, actual in results(case, dtype).items():
            error = largest(formula[name].to(dtype).double() - exact[name])
            own = largest(alone[name].double() - exact[name])
            # Each process rounds its part of a gradient once more.
            error = (
                max(error, own / 2) + dist.get_world_size() * ulp(largest(exact[name]), dtype) / 2
            )
            hold(f"{case}, {name}", actual.double(), exact[name], error, dtype)


def of_one_process(**arguments: Any) -> Tensor:
    return torch_attn.sdpa_with_logsumexp(**arguments)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precision_is_that_of_one_process(run: Processes, dtype: torch.dtype) -> None:
    run(check_precision, dtype)


def check_odd_sinks() -> None:
    """One of -inf is none, beside rows without keys too; one of NaN makes its head NaN."""
    query, key, value = torch.randn(3, 1, 3, 4, 8)
    sinks = torch.tensor([0.5, -torch.inf, torch.nan], requires_grad=True)
    used = torch.tensor([2])
    output = torch_attn.distributed.sdpa(
        query, key, value, is_causal=True, query_offset=-2, key_lengths=used, sinks=sinks
    )
    (gradient,) = torch.autograd.grad(output.sum(), sinks)
    assert output.isnan().all((0, 2, 3)).tolist() == [False, False, True]
    assert gradient.isnan().tolist() == [False, False, True]
    assert gradient[1] == 0


def test_odd_sinks(run: Processes) -> None:
    run(check_odd_sinks)


def check_bits() -> None:
    for case in ("plain", "all"):
        first, second = (results(case, torch.float32) for _ in range(2))
        torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_the_same_bits_on_every_run(run: Processes) -> None:
    run(check_bits)


class Counted:
    """The tensors that this process sends while it is entered."""

    def __enter__(self) -> Counted:
        self.sent: list[tuple[int, int]] = []  # to whom, and how many bytes
        self.start = dist.batch_isend_irecv

        def start(ops: list[dist.P2POp]) -> list[dist.Work]:
            sends = [op for op in ops if op.op is dist.isend]
            self.sent += [(op.peer, op.tensor.nbytes) for op in sends]
            return self.start(ops)

        dist.batch_isend_irecv = start
        return self

    def __exit__(self, *_: object) -> None:
        dist.batch_isend_irecv = self.start


def check_what_is_sent() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    query, key, value = torch.randn(3, 1, 2, 16, 8)
    block = key.nbytes
    to_all = {r for r in range(world) if r != rank}
    reached: dict[str, tuple[dict[str, Any], set[int]]] = {
        "all": ({}, to_all),
        "causal": ({"is_causal": True}, {r for r in to_all if r > rank}),
        "window": ({"window_size": (3, 0)}, {rank + 1} & to_all),
        "both sides": ({"window_size": (16, 1)}, {rank - 1, rank + 1} & to_all),
        "lengths": ({"key_lengths": 16}, to_all if rank == 0 else set()),
    }
    for name, (options, expected) in reached.items():
        with Counted() as counted:
            torch_attn.distributed.sdpa(
                query, key, value, lengths=(16 * world, 16 * world), **options
            )
        assert {to for to, _ in counted.sent} == expected, name
        assert sum(size for _, size in counted.sent) == 2 * block * len(expected), name


def test_a_block_goes_to_whom_it_is_of_use(run: Processes) -> None:
    run(check_what_is_sent)


def check_memory() -> None:
    """No tensor has the keys of all."""
    from torch.utils._python_dispatch import TorchDispatchMode

    world, rows = dist.get_world_size(), 64

    class Largest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            for t in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(t, Tensor):
                    self.most = max(self.most, t.numel())
            return result

    inputs = [torch.randn(1, 1, rows, 32, requires_grad=True) for _ in range(3)]
    with Largest() as mode:
        output = torch_attn.distributed.sdpa(*inputs, lengths=(rows * world,) * 2)
        torch.autograd.grad(output.sum(), inputs)
    assert 0 < mode.most <= rows * 32


def test_no_process_has_all_keys(run: Processes) -> None:
    run(check_memory)


def check_errors() -> None:
    query, key, value = (t.requires_grad_() for t in torch.randn(3, 1, 2, 4, 8))
    world, rank = dist.get_world_size(), dist.get_rank()
    message = rf"lengths is \(9, 4\), of which process {rank} of {world} has .* queries"
    with pytest.raises(RuntimeError, match=message):
        torch_attn.distributed.sdpa(query, key, value, lengths=(9, 4))
    output = torch_attn.distributed.sdpa(query, key, value)
    (first,) = torch.autograd.grad(output.sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="a second derivative is asked for, which a ring has not"):
        torch.autograd.grad(first.sum(), query)


def test_errors(run: Processes) -> None:
    run(check_errors)
