"""What only a GPU shows: streams, graphs, memory, sizes past 2^31, other devices, the sanitizer.

The cases of the other files run on a GPU as well, by the fixtures `kernels` and `device`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_attn
from _second_order import Sdpa, directions, make_grad_output, named, present
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
from torch_attn import reference

ROOT = Path(__file__).parents[1]
WHY = "the library was built without CUDA" if torch.cuda.is_available() else "no GPU"
pytestmark = pytest.mark.skipif(not GPU, reason=f"not run: {WHY}")

F64, F32, BF16, F16 = DTYPES

# One of each kernel, at sizes that fill no tile.
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "float64": ({"L": 33, "S": 70, "mask": (33, 70), "dtype": F64}, {}),
    "float32": ({"L": 70, "S": 131, "E": 65, "Ev": 20, "mask": (2, 3, 70, 131)}, {}),
    "float32, causal": ({"L": 131, "S": 70, "E": 300, "heads": 1}, {"is_causal": True}),
    "bfloat16": ({"L": 201, "S": 301, "E": 64, "dtype": BF16}, {}),
    "bfloat16, 128": ({"L": 201, "S": 301, "E": 128, "dtype": BF16}, {"is_causal": True}),
    "float16, 256": ({"L": 131, "S": 201, "E": 256, "Ev": 80, "dtype": F16}, {}),
    "float16, 300": ({"L": 33, "S": 70, "E": 300, "heads": 1, "dtype": F16}, {}),
    "odd sizes": ({"L": 7, "S": 13, "E": 9, "Ev": 3, "mask": (7, 13), "dtype": F16}, {}),
    "bool mask": ({"L": 70, "S": 131, "mask": (70, 131), "kind": "bool", "dtype": F16}, {}),
    "mask of keys": ({"L": 70, "S": 131, "mask": (1, 131), "dtype": BF16}, {}),
    "float32 mask": ({"L": 70, "S": 131, "mask": (70, 131), "kind": "float32", "dtype": BF16}, {}),
    "head_dim 0": ({"L": 33, "S": 70, "E": 0, "Ev": 8, "dtype": BF16}, {}),
    "no columns of value": ({"L": 33, "S": 70, "E": 8, "Ev": 0, "dtype": BF16}, {}),
    "no keys, odd head_dim": ({"L": 33, "S": 0, "E": 9, "Ev": 8, "dtype": BF16}, {}),
    "no keys, odd value": ({"L": 33, "S": 0, "E": 8, "Ev": 9, "dtype": BF16}, {}),
    "grouped heads": ({"L": 90, "S": 150, "heads": (6, 2, 3), "dtype": BF16}, {"enable_gqa": True}),
    "one query": ({"L": 1, "S": 5001, "heads": (8, 1, 1), "dtype": BF16}, {"enable_gqa": True}),
    "one float32 query": ({"L": 1, "S": 5001, "batch": ()}, {}),
    "dropout": ({"L": 201, "S": 301, "mask": (1, 301), "dtype": BF16}, {"dropout_p": 0.3}),
    "float32 dropout": ({"L": 70, "S": 131}, {"dropout_p": 0.3, "is_causal": True}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _on_cuda() -> Iterator[None]:
    with torch.device("cuda"):
        yield


def make_call(call: str) -> tuple[Inputs, Tensor, Inputs, dict[str, Any]]:
    """A point, a gradient of the output, a direction, options."""
    sizes, options = CALLS[call]
    x = make_inputs(**sizes)
    return x, make_grad_output(x, **options), directions(x), options


def compute(sdpa: Sdpa, x: Inputs, u: Tensor, t: Inputs, **options: Any) -> dict[str, Tensor]:
    """What the kernels give: the output, all gradients, J t and H(u; x; t)."""
    x, u = x.require_grad(), u.detach().requires_grad_()
    wanted = [a for a, d in zip(x, t, strict=True) if d is not None]
    output = sdpa(*x, **options)
    gradients = torch.autograd.grad(output, wanted, u, create_graph=True)
    tangent, *second = torch.autograd.grad(
        gradients, [u, *wanted], present(t), materialize_grads=True
    )
    return {
        "output": output.detach(),
        "tangent": tangent.detach(),
        **named("grad_", t, gradients),
        **named("second_", t, second),
    }


def compute_seeded(*arguments: Any, **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(SEED)
    return compute(torch_attn.sdpa, *arguments, **options)


def assert_near(actual: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    """Errors are below so much of the largest value: enough to see wrong addresses."""
    assert actual.keys() == expected.keys()
    for name in expected:
        assert largest(actual[name] - expected[name]) <= bound * largest(expected[name]), name


# --- streams, synchronisation, graphs -------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS)
def test_current_stream(call: str) -> None:
    """What was queued before on the stream is there, though nobody waits for it."""
    x, u, t, options = make_call(call)
    expected = compute_seeded(x, u, t, **options)
    late = x.map(torch.zeros_like)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # cycles, in which any other stream goes on
        for destination, source in zip(late, x, strict=True):
            if source is not None:
                destination.copy_(source)
        actual = compute_seeded(late, u, t, **options)
    stream.synchronize()
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("call", CALLS)
def test_nothing_waits_for_the_device(call: str) -> None:
    x, u, t, options = make_call(call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        compute_seeded(x, u, t, **options)
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
    return graph.replay, result


def change(*tensors: Tensor | None) -> None:
    """Other values in the same memory."""
    for tensor in tensors:
        if tensor is not None:
            tensor.copy_(tensor.flip(-2, -1))


@pytest.mark.parametrize("call", [name for name in CALLS if "dropout" not in name])
def test_graph(call: str) -> None:
    """Forward and all derivatives, replayed with other numbers: the bits of a call."""
    x, u, t, options = make_call(call)
    replay, actual = captured(lambda: compute(torch_attn.sdpa, x, u, t, **options))
    for _ in range(2):
        change(*x, u, *t)
        replay()
        assert_same_bits(actual, compute(torch_attn.sdpa, x, u, t, **options))


@pytest.mark.parametrize("call", [name for name in CALLS if "dropout" not in name])
def test_graph_without_gradients(call: str) -> None:
    x, _, _, options = make_call(call)
    replay, actual = captured(lambda: torch_attn.sdpa(*x, **options))
    for _ in range(2):
        change(*x)
        replay()
        assert torch.equal(actual, torch_attn.sdpa(*x, **options))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_in_a_graph(dtype: torch.dtype) -> None:
    """Each replay drops others: those of as many calls, and of a call with the state it drew."""
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
    x, u, t, options = make_call(call)
    expected = compute_seeded(x, u, t, **options)
    matrix, other = torch.randn(2048, 2048), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        with torch.cuda.stream(other):
            torch.mm(matrix, matrix)
        assert_same_bits(compute_seeded(x, u, t, **options), expected)
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
    x, u, t, options = make_call(call)
    there = torch.device("cuda:1")
    moved = x.map(lambda a: a.to(there)), u.to(there), t.map(lambda a: a.to(there))
    actual = compute_seeded(*moved, **options)
    assert torch.cuda.current_device() == 0
    assert all(tensor.device == there for tensor in actual.values())
    expected = compute_seeded(x, u, t, **options)
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
        u, t = make_grad_output(x, **options), directions(x)
        growth.append(peak_growth(lambda: compute(torch_attn.sdpa, x, u, t, **options)))  # noqa: B023
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
    u, t = torch.randn_like(x.query), directions(x)
    doubles = (x.map(Tensor.double), u.double(), t.map(Tensor.double))
    actual = compute(torch_attn.sdpa, x, u, t)
    assert_near(actual, compute(reference.sdpa, *doubles), 2e-2)


# --- compute-sanitizer ----------------------------------------------------------------------------


def find_sanitizer() -> str | None:
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    places = [os.path.join(home, "bin") for home in [*homes, "/usr/local/cuda"]]
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ["PATH"], *places]))


SANITIZER = find_sanitizer()


@pytest.mark.skipif(GPU and SANITIZER is None, reason="not run: compute-sanitizer is not there")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool: str) -> None:
    options = ["--tool", tool, "--error-exitcode", "1", "--report-api-errors", "no"]
    run = subprocess.run(
        [SANITIZER, *options, sys.executable, "-m", "tests.cuda.small_run"],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
            # every tensor in memory of its own, so that a read beyond it is seen
            "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        },
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-4000:]
    assert "SUMMARY: 0 " in run.stdout, run.stdout[-1000:]
