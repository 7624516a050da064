"""Packed sequences by the CUDA kernels, over tests/stand_in, against the CPU's results."""

from __future__ import annotations

import math
import platform
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_attn.varlen
from _accuracy import differences, over_neighbours
from _variants import build_stand_in, run_python
from helpers import LAYOUTS, SEED, largest, ulp
from test_cuda_stand_in import environment

pytestmark = [
    pytest.mark.slow("csrc", "tests/stand_in"),  # compiles a library
    pytest.mark.skipif(
        platform.machine() != "x86_64", reason="not run: the stand-in is written for x86_64"
    ),
]

QUERIES, KEYS = [5, 0, 70, 1, 130, 3], [9, 3, 70, 0, 150, 3]
# What differs from a plain call: sizes, names of inputs beside query, key and value, and options.
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"window_size": (-1, 0)},
    "groups of heads": {"heads": (6, 3, 2), "window_size": (-1, 0)},
    "one group": {"heads": (4, 1, 1), "window_size": (3, 1)},
    "no chunks": {"dims": (20, 33)},
    "large heads": {"dims": (72, 136)},
    "query in no chunks": {"query_stride": 65, "heads": (4, 2, 2)},
    "tokens of no sequence": {"beyond": 7, "window_size": (-1, 0)},
    "mask": {"inputs": ("attn_mask",)},
    "mask that heads share": {"inputs": ("attn_mask",), "mask_heads": 1, "window_size": (9, 2)},
    "boolean mask": {"inputs": ("attn_mask",), "boolean": True, "heads": (6, 3, 2)},
    "slopes and sinks": {"inputs": ("alibi_slopes", "sinks"), "softcap": 3.0},
    "sinks": {"inputs": ("sinks",), "heads": (4, 2, 1), "window_size": (-1, 0)},
    "dropout": {"dropout_p": 0.3, "heads": (4, 2, 2)},
    "keys in use": {"seqused_k": [4, 0, 70, 0, 129, 2], "heads": (4, 2, 2)},
    "query offset": {"query_offset": [3, 0, -5, 2, 60, 0], "window_size": (-1, 0)},
    "longest": {"more": 50, "heads": (4, 2, 2), "window_size": (-1, 0)},
    "splits of the keys": {
        "lengths": ([1, 2, 0, 1], [1500, 700, 3, 0]),
        "heads": (2, 1, 1),
        "inputs": ("sinks",),
    },
    "one sequence": {"lengths": ([7], [70]), "inputs": ("attn_mask",), "mask_heads": 1},
    "one token": {"lengths": ([0, 1, 0], [0, 70, 3]), "inputs": ("attn_mask",), "mask_heads": 1},
    "no keys": {"lengths": ([3, 0], [0, 0]), "inputs": ("sinks",)},
}
DTYPES = ["float64", "float32", "bfloat16", "float16"]


def cu_seq(lengths: list[int]) -> Tensor:
    return torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0))


def solve(
    case: str, dtype: torch.dtype, compute: torch.dtype | None = None, seed: int = SEED
) -> dict[str, Tensor]:
    """Output, logsumexp, their gradients, the derivatives of those and those along a direction.

    Rounds the inputs to `dtype`, and computes in `compute` if given.
    """
    options = dict(CASES[case])
    queries, keys = options.pop("lengths", (QUERIES, KEYS))
    heads, (dim, value_dim) = options.pop("heads", (2, 2, 2)), options.pop("dims", (64, 64))
    beyond, more = options.pop("beyond", 0), options.pop("more", 0)
    max_q, max_k = max(queries) + more, max(keys) + more
    tokens_q, tokens_k = sum(queries) + beyond, sum(keys) + beyond
    names, boolean = options.pop("inputs", ()), options.pop("boolean", False)
    mask_heads, stride = options.pop("mask_heads", heads[0]), options.pop("query_stride", dim)
    for name in ("seqused_k", "query_offset"):
        if name in options:
            options[name] = torch.tensor(options[name])
    generator = torch.Generator().manual_seed(seed)

    def draw(*sizes: int) -> Tensor:
        drawn = torch.randn(*sizes, generator=generator, dtype=torch.float64)
        return drawn.to(dtype).to(compute or dtype)

    inputs = {
        "query": draw(tokens_q, heads[0], stride)[..., :dim],
        "key": draw(tokens_k, heads[1], dim),
        "value": draw(tokens_k, heads[2], value_dim),
    }
    if "attn_mask" in names and not boolean:
        inputs["attn_mask"] = draw(mask_heads, tokens_q, max_k)
        hidden = torch.rand(inputs["attn_mask"].shape, generator=generator) < 0.2
        inputs["attn_mask"].masked_fill_(hidden, -torch.inf)
    elif boolean:
        options["attn_mask"] = draw(mask_heads, tokens_q, max_k) > 0
    inputs |= {name: draw(heads[0]) for name in ("alibi_slopes", "sinks") if name in names}

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(SEED)
        named = dict(zip(inputs, tensors, strict=True))
        query, key, value = (named.pop(name) for name in ("query", "key", "value"))
        output, lse = torch_attn.varlen_attn(
            *(query, key, value, cu_seq(queries), cu_seq(keys), max_q, max_k),
            return_aux=torch_attn.varlen.AuxRequest(lse=True),
            enable_gqa=True,
            **named,
            **options,
        )
        return output, lse

    leaves = [t.requires_grad_() for t in inputs.values()]
    output, lse = call(*leaves)
    found = {"output": output, "lse": lse}
    finite = torch.where(lse.isinf(), 0, lse)
    directions = [draw(*t.shape) for t in leaves]
    of_output, of_lse = draw(*output.shape).requires_grad_(), draw(*lse.shape).to(lse.dtype)
    grads = torch.autograd.grad(
        [output, finite], leaves, [of_output, of_lse], create_graph=True, allow_unused=True
    )
    found |= {f"grad {name}": g for name, g in zip(inputs, grads, strict=True)}
    along = sum((g * t).double().sum() for g, t in zip(grads, directions, strict=True))
    second = torch.autograd.grad(along, [of_output, *leaves])
    names_of_second = ["grad_output", *inputs]
    found |= {f"second {name}": g for name, g in zip(names_of_second, second, strict=True)}
    tangents = torch.func.jvp(call, tuple(t.detach() for t in leaves), tuple(directions))[1]
    found |= {"tangent output": tangents[0], "tangent lse": tangents[1]}
    return {name: t.detach().nan_to_num(neginf=-1e4, nan=1e9) for name, t in found.items()}


# --- bits, on the stand-in ------------------------------------------------------------------------


def differing_alone(dtype: torch.dtype, heads: tuple[int, int, int], **options: Any) -> list[str]:
    """The sequences whose output or gradients differ in a bit from a call of the sequence alone."""
    generator = torch.Generator().manual_seed(SEED)
    sizes = [(sum(QUERIES), heads[0]), (sum(KEYS), heads[1]), (sum(KEYS), heads[2])]
    inputs = [torch.randn(*s, 64, generator=generator).to(dtype).requires_grad_() for s in sizes]
    grad_output = torch.randn(sum(QUERIES), heads[0], 64, generator=generator).to(dtype)
    starts = cu_seq(QUERIES), cu_seq(KEYS)
    packed = torch_attn.varlen_attn(
        *inputs, *starts, max(QUERIES), max(KEYS), enable_gqa=True, **options
    )
    expected = [packed, *torch.autograd.grad(packed, inputs, grad_output)]
    differing = []
    for n, (length, keys) in enumerate(zip(QUERIES, KEYS, strict=True)):
        of_queries = slice(starts[0][n], starts[0][n] + length)
        of_keys = slice(starts[1][n], starts[1][n] + keys)
        parts = [of_queries, of_keys, of_keys]
        own = [t[part].transpose(0, 1) for t, part in zip(inputs, parts, strict=True)]
        alone = torch_attn.sdpa(*own, enable_gqa=True, query_offset=keys - length, **options)
        grads = torch.autograd.grad(alone, inputs, grad_output[of_queries].transpose(0, 1))
        found = [alone.transpose(0, 1), *(g[p] for g, p in zip(grads, parts, strict=True))]
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            if not torch.equal(a, b[[of_queries, *parts][i]]):
                differing.append(f"{dtype}, {heads}, {options}: sequence {n}, result {i}")
    return differing


def differing_by_token(dtype: torch.dtype) -> list[int]:
    """The tokens whose output a whole text and a cache of it do not agree about, to the bit."""
    generator = torch.Generator().manual_seed(SEED)
    sizes = [(1, heads, 800, 64) for heads in (4, 2, 2)]
    query, key, value = (torch.randn(*s, generator=generator).to(dtype) for s in sizes)
    options = {"is_causal": True, "enable_gqa": True}
    whole = torch_attn.sdpa(query, key, value, **options)

    def of_token(i: int) -> Tensor:
        cache = key[:, :, : i + 1], value[:, :, : i + 1]
        return torch_attn.sdpa(query[:, :, i : i + 1], *cache, query_offset=i, **options)

    tokens = (0, 1, 63, 64, 513, 799)
    return [i for i in tokens if not of_token(i).equal(whole[:, :, i : i + 1])]


def differing_in_pages(
    dtype: torch.dtype,
    page: int,
    dims: tuple[int, int] = (72, 136),
    lengths: tuple[int, ...] = (5, 2, 130, 0, 1),
    keys: tuple[int, ...] = (70, 0, 129, 2, 300),
    with_mask: bool = False,
    **options: Any,
) -> list[str]:
    """Whether results depend on where keys and values are stored: in pages, or in a row.

    Whatever of the pool is not in use is NaN.
    """
    generator = torch.Generator().manual_seed(SEED)
    used, most = torch.tensor(keys), (max(lengths), max(keys))
    sizes = [(sum(lengths), 4, dims[0]), (sum(keys), 2, dims[0]), (sum(keys), 1, dims[1])]
    query, *in_a_row = (torch.randn(*s, generator=generator).to(dtype) for s in sizes)
    pages_of = (used + page - 1) // page
    order = torch.randperm(int(pages_of.sum()) + 3, generator=generator)
    table = torch.full((len(used), int(pages_of.max()) + 1), -1, dtype=torch.int32)
    pools = [torch.full((len(order), page, *t.shape[1:]), torch.nan, dtype=dtype) for t in in_a_row]
    for n, of_sequence in enumerate(order[: int(pages_of.sum())].split(pages_of.tolist())):
        table[n, : pages_of[n]] = of_sequence
        rows = torch.arange(int(used[n]))
        for pool, t in zip(pools, in_a_row, strict=True):
            pool[of_sequence[rows // page], rows % page] = t[used[:n].sum() + rows]
    common = {"return_aux": torch_attn.varlen.AuxRequest(lse=True), "enable_gqa": True, **options}
    if with_mask:
        common["attn_mask"] = torch.rand(1, sum(lengths), most[1], generator=generator) < 0.5
        common["attn_mask"][..., 64:128] = False  # nothing of a tile is read
    starts = cu_seq([*lengths])
    torch.manual_seed(SEED)
    paged = torch_attn.varlen_attn(
        query, *pools, starts, None, *most, seqused_k=used, block_table=table, **common
    )
    torch.manual_seed(SEED)
    expected = torch_attn.varlen_attn(query, *in_a_row, starts, cu_seq([*keys]), *most, **common)
    call = f"{dtype}, pages of {page}, {dims}, mask {with_mask}, {options}"
    names = [f"{call}: {name}" for name in ("output", "lse")]
    return [name for name, a, b in zip(names, paged, expected, strict=True) if not a.equal(b)]


# --- unchecked numbers ----------------------------------------------------------------------------


class Unread(Tensor):
    """Integers that the checks of a call do not look at, as they do not on a GPU."""

    @classmethod
    def __torch_dispatch__(cls, operator: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():
            return operator(*args, **(kwargs or {}))


def run_unchecked(calls: int) -> None:
    """Calls with any numbers of sequences end, and no result is made of what is around an input.

    Numbers far outside end the process if they are believed.
    """
    draw = random.Random(SEED)
    far = [s * n for n in (2**31, 2**40, 2**62) for s in (1, -1)]
    pool = [0, 1, 3, 7, 64, 100, 130, 131, -1, -5, *far, 2**63 - 1, -(2**63)]

    def unread(*sizes: int) -> Tensor:
        numbers = torch.tensor(draw.choices(pool, k=math.prod(sizes)), dtype=torch.int64)
        return Tensor._make_subclass(Unread, numbers.view(sizes))

    def unread_starts(sequences: int) -> Tensor:
        """Some tokens are left over: else the stand-in, on a CPU, believes that none are."""
        starts = unread(sequences + 1)
        starts[-1] = 129
        return starts

    for _ in range(calls):
        dtype = draw.choice([torch.float64, torch.float32, torch.bfloat16])
        paged, sequences = draw.random() < 0.5, draw.choice([1, 2, 5])

        def values(*sizes: int, dtype: torch.dtype = dtype, paged: bool = paged) -> Tensor:
            return LAYOUTS["NaN before and after"](torch.randn(sizes).to(dtype)).requires_grad_(
                not paged
            )

        most, options = (draw.choice([70, 130, 200]), draw.choice([5, 90, 500])), {}
        keys: tuple[int, ...] = (100,)
        starts = [unread_starts(sequences), unread(sequences + 1)]
        if paged:
            keys = draw.choice([0, 1, 4]), draw.choice([1, 16, 48, 64])
            starts[1:] = [None]
            options["block_table"] = unread(sequences, draw.choice([0, 1, 3]))
        if paged or draw.random() < 0.5:
            options["seqused_k"] = unread(sequences)
        if draw.random() < 0.5:
            options["query_offset"] = unread(sequences)
        inputs = [values(130, 4, 64), values(*keys, 2, 64), values(*keys, 2, 64)]
        if draw.random() < 0.5:
            options["attn_mask"] = values(draw.choice([1, 4]), 130, most[1])
        output = torch_attn.varlen_attn(*inputs, *starts, *most, enable_gqa=True, **options)
        results = [output]
        if not paged:
            inputs += [options["attn_mask"]] if "attn_mask" in options else []
            along = torch.randn_like(output).requires_grad_()
            grads = torch.autograd.grad(output, inputs, along, create_graph=True)
            results += grads
            total = sum((g * torch.randn_like(g)).sum() for g in grads)
            results += torch.autograd.grad(total, [along, *inputs])
        assert all(t.isfinite().all() for t in results), sorted(options)


# --- the tests ------------------------------------------------------------------------------------

SAVE = """
import sys, torch, test_varlen_cuda as tests
assert torch.ops.attn._cpu_capability() == "cuda"
torch.save({(case, dtype): tests.solve(case, getattr(torch, dtype))
            for case in tests.CASES for dtype in tests.DTYPES}, sys.argv[1])
"""


@pytest.fixture(scope="module")
def variables() -> dict[str, str]:
    return environment(build_stand_in("cuda"), seed=1)


@pytest.fixture(scope="module")
def of_cuda(variables: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("cuda") / "results"
    run_python("-c", SAVE, str(file), **variables)
    return torch.load(file)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_the_cpu(case: str, dtype: str, of_cuda: Any) -> None:
    """To eight times the CPU's error, whose sums are more exact than the built-in's.

    In float64 that is the error in float32, as much smaller as the numbers' spacing is.
    """
    given = getattr(torch, dtype)
    finer = 2**-29 if given == torch.float64 else 1

    def errors(seed: int) -> Iterator[tuple[str, float]]:
        exact = solve(case, given, torch.float64, seed)
        of_cpu = solve(case, given, torch.float32 if given == torch.float64 else given, seed)
        yield from ((name, finer * error) for name, error in differences(of_cpu, exact))

    exact = solve(case, given, torch.float64)
    of_cpu = over_neighbours(SEED, errors, lambda seed, _: seed + 1, (True,) * 4)
    assert of_cuda[case, dtype].keys() == exact.keys()
    for name, actual in of_cuda[case, dtype].items():
        off, size, error = largest(actual - exact[name]), largest(exact[name]), of_cpu[name]
        assert off <= 8 * error + ulp(size, given), f"{name}: {off:.3g}, CPU {error:.3g}"


def run_over_stand_in(command: str, variables: dict[str, str]) -> str:
    return run_python("-c", f"from test_varlen_cuda import *; {command}", **variables)


@pytest.mark.parametrize("heads", [(2, 2, 2), (6, 3, 2), (4, 1, 1)])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 70)])
def test_bits_are_those_of_a_sequence_alone(
    heads: tuple[int, int, int], window: tuple[int, int], variables: dict[str, str]
) -> None:
    """Holds as long as no keys are split: splits are planned for the longest sequence."""
    call = f"differing_alone(getattr(torch, d), {heads}, window_size={window})"
    assert run_over_stand_in(f"print(sum([{call} for d in DTYPES], []))", variables) == "[]\n"


def test_bits_of_a_token_are_those_of_the_text(variables: dict[str, str]) -> None:
    """Holds where it is promised, because otherwise keys of few queries are split."""
    command = "print([differing_by_token(getattr(torch, d)) for d in DTYPES])"
    assert "799" in run_over_stand_in(command, variables)
    promised = variables | {"ATTN_INVARIANT": "1"}
    assert run_over_stand_in(command, promised) == "[[], [], [], []]\n"


@pytest.mark.parametrize("page", [1, 16, 48, 64, 256])
def test_bits_do_not_depend_on_pages(page: int, variables: dict[str, str]) -> None:
    """Holds on tensor cores, which take numbers of 16 bits, and without."""
    options = "{}, {'window_size': (-1, 0), 'dropout_p': 0.3}, {'softcap': 2.0}"
    call = f"differing_in_pages(getattr(torch, d), {page}, **o)"
    loops = f"for d in DTYPES for o in ({options})"
    assert run_over_stand_in(f"print(sum([{call} {loops}], []))", variables) == "[]\n"


PAGED: dict[str, dict[str, Any]] = {  # arguments of differing_in_pages()
    "blocks of many rows": {"lengths": (70, 130, 3), "keys": (70, 150, 300)},
    "decoding": {"lengths": (1, 1, 1), "keys": (700, 3, 1500)},
    "mask": {"with_mask": True},
    "mask and splits": {"lengths": (40, 1), "keys": (1100, 200), "with_mask": True},
    "scale": {"scale": -0.3, "window_size": (70, 3)},
}


def differing_on_tensor_cores(case: str, dims: tuple[int, int], variables: dict[str, str]) -> str:
    call = f"differing_in_pages(d, p, {dims}, **PAGED[{case!r}])"
    loops = "for d in (torch.bfloat16, torch.float16) for p in (7, 16)"
    return run_over_stand_in(f"print(sum([{call} {loops}], []))", variables)


@pytest.mark.parametrize("dims", [(64, 64), (72, 128), (72, 136)])
@pytest.mark.parametrize("case", PAGED)
def test_bits_on_tensor_cores_do_not_depend_on_pages(
    case: str, dims: tuple[int, int], variables: dict[str, str]
) -> None:
    assert differing_on_tensor_cores(case, dims, variables) == "[]\n"


@pytest.mark.parametrize("case", PAGED)
def test_bits_of_keys_that_are_no_whole_vectors(case: str, variables: dict[str, str]) -> None:
    """Tensor cores read such keys in pages only, and where bits are promised not there either."""
    assert differing_on_tensor_cores(case, (20, 24), variables) != "[]\n"
    promised = variables | {"ATTN_INVARIANT": "1"}
    assert differing_on_tensor_cores(case, (20, 24), promised) == "[]\n"


def far_in_odd_pages(dtype: torch.dtype) -> float:
    """How far results differ from aligned pages' where 16 bytes begin anywhere in a pool."""
    generator = torch.Generator().manual_seed(SEED)
    query, *pools = (
        torch.randn(*s, 64, generator=generator).to(dtype) for s in ((9, 2), (5, 16, 2), (5, 16, 2))
    )
    table, used = torch.tensor([[3, 0, 4]]), torch.tensor([40])
    results = []
    for beyond, first in ((0, 0), (1, 0), (0, 1)):  # between pages, before the pool
        odd = []
        for pool in pools:
            strides = (pool.stride(0) + beyond, *pool.stride()[1:])
            memory = torch.full((first + 5 * strides[0],), torch.nan, dtype=dtype)
            odd.append(memory.as_strided(pool.shape, strides, first).copy_(pool))
        numbers = (cu_seq([9]), None, 9, 40)
        results.append(
            torch_attn.varlen_attn(query, *odd, *numbers, seqused_k=used, block_table=table)
        )
    return max(largest(r.double() - results[0].double()) for r in results)


def test_pages_that_are_not_aligned(variables: dict[str, str]) -> None:
    """The stand-in fails if a copy of 16 bytes is not: the other kernels have to serve them."""
    far = run_over_stand_in("print(far_in_odd_pages(torch.bfloat16))", variables)
    assert 0 < float(far) < 0.02


def test_unchecked_boundaries_read_nothing_outside(variables: dict[str, str]) -> None:
    run_over_stand_in("run_unchecked(200)", variables)
