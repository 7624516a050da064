"""Ours and the other attentions of a CPU, forward: ``make bench-peers``.

Each runs in processes of its own, one after the other in several rounds, with the same inputs and
the same number of threads. Every process first compares its result with the textbook formula.

Packages that bring kernels, or change PyTorch's, have environments of their own, which
``make bench-peers`` makes. In "int8", queries are float32, and keys and values int8, with one scale
for all (the finest that onnxruntime has is one for each channel).
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import DTYPES, HERE, Case, about, alternate, write
from rich.console import Console
from rich.progress import track
from rich.table import Table

CASES = [
    *(Case(f"1x12x{n}", 1, 12, n, dtypes=("f32", "bf16")) for n in (128, 512, 2048, 4096)),
    Case("1x8x2048 D128", 1, 8, 2048, 128, dtypes=("f32", "bf16")),
    Case("8x12x128", 8, 12, 128, dtypes=("f32", "bf16")),
    Case("decode 32 heads x 4k D128", 1, 32, 1, 128, keys=4096, dtypes=("f32", "bf16", "int8")),
    Case("decode 32:8 x 16k D128", 1, 32, 1, 128, keys=16384, kv_heads=8, dtypes=("int8",)),
]
SCALE = 4 / 127  # of int8: larger numbers of the normal distribution are clamped

# Takes query, key and value, [B, H, L, D], and the number of threads; gives the call to measure,
# and what makes of its result a tensor [B, H, L, D].
Prepared = tuple[Callable[[], Any], Callable[[Any], torch.Tensor]]
Peer = Callable[[list[torch.Tensor], int], Prepared]
PEERS: dict[str, tuple[Peer, tuple[str, ...], Path]] = {}
MOST_ROUNDS = 8


def peer(name: str, *dtypes: str, environment: str = "") -> Callable[[Peer], Peer]:
    """``environment``: NAME of .venv-peers-NAME; by default the environment of this process."""
    root = HERE.parent / f".venv-peers-{environment}"
    python = root / "bin" / "python" if environment else Path(sys.executable)

    def add(prepare: Peer) -> Peer:
        PEERS[name] = prepare, dtypes, python
        return prepare

    return add


def in_inference_mode(
    function: Callable[..., torch.Tensor], inputs: list[torch.Tensor]
) -> Prepared:
    def call() -> torch.Tensor:
        with torch.inference_mode():
            return function(*inputs)

    return call, lambda output: output


@peer("attn", "f32", "bf16", "int8")
def _(inputs: list[torch.Tensor], threads: int) -> Prepared:
    import torch_attn

    if inputs[1].dtype == torch.int8:
        scale = torch.tensor(SCALE)
        options = {"key_scale": scale, "value_scale": scale, "enable_gqa": True}
        return in_inference_mode(functools.partial(torch_attn.sdpa, **options), inputs)
    return in_inference_mode(torch.ops.attn.sdpa, inputs)


@peer("built-in", "f32", "bf16")
def _(inputs: list[torch.Tensor], threads: int) -> Prepared:
    return in_inference_mode(torch.ops.aten.scaled_dot_product_attention, inputs)


@peer("flex_attention", "f32", "bf16")
def _(inputs: list[torch.Tensor], threads: int) -> Prepared:
    from torch.nn.attention.flex_attention import flex_attention

    return in_inference_mode(torch.compile(flex_attention), inputs)


@peer("zentorch", "f32", "bf16", environment="zentorch")
def _(inputs: list[torch.Tensor], threads: int) -> Prepared:
    import zentorch  # noqa: F401

    call, _ = in_inference_mode(torch.ops.zentorch.zentorch_sdpa, inputs)
    return call, lambda results: results[0]


@peer("onnxruntime", "f32", "int8", environment="others")
def _(inputs: list[torch.Tensor], threads: int) -> Prepared:
    import onnxruntime
    from onnx import TensorProto, helper

    if inputs[1].dtype == torch.int8:
        return of_onnxruntime_with_cache(inputs, threads)

    def side_by_side(x: torch.Tensor) -> np.ndarray:  # [B, L, H D]
        return np.ascontiguousarray(x.transpose(1, 2).flatten(2).numpy())

    heads = inputs[0].shape[1]
    arrays = dict(zip(("query", "key", "value"), map(side_by_side, inputs), strict=True))
    node = helper.make_node(
        "MultiHeadAttention", [*arrays], ["output"], domain="com.microsoft", num_heads=heads
    )
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape)
        for name, array in {**arrays, "output": arrays["query"]}.items()
    ]
    graph = helper.make_graph([node], "attention", values[:3], values[3:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)

    def result(outputs: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(outputs[0]).unflatten(2, (heads, -1)).transpose(1, 2)

    return lambda: session.run(None, arrays), result


def of_onnxruntime_with_cache(inputs: list[torch.Tensor], threads: int) -> Prepared:
    """One query over a cache of int8, which the node updates in place with the newest token."""
    import onnxruntime
    from onnx import TensorProto, helper

    query, key, value = inputs
    heads, kv_heads, keys = query.shape[1], *key.shape[1:3]
    newest = [(x[..., -1:, :] * SCALE).transpose(1, 2).flatten(2).numpy() for x in (key, value)]
    scale = np.array([SCALE], np.float32)
    arrays = {
        "query": query.transpose(1, 2).flatten(2).numpy(),
        "key": newest[0],
        "value": newest[1],
        "past_key": key.numpy(),
        "past_value": value.numpy(),
        "seqlens_k": np.array([keys - 1], np.int32),
        "total": np.array([keys], np.int32),
        "k_scale": scale,
        "v_scale": scale,
    }
    names = [*arrays][:7] + [""] * 5 + [*arrays][7:]
    kinds = {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}
    node = helper.make_node(
        "GroupQueryAttention",
        names,
        ["output", "present_key", "present_value"],
        domain="com.microsoft",
        num_heads=heads,
        kv_num_heads=kv_heads,
        **kinds,
    )
    types = {"float32": TensorProto.FLOAT, "int8": TensorProto.INT8, "int32": TensorProto.INT32}
    like = {"output": "query", "present_key": "past_key", "present_value": "past_value"}
    values = {
        name: helper.make_tensor_value_info(name, types[str(a.dtype)], a.shape)
        for name, a in {**arrays, **{n: arrays[m] for n, m in like.items()}}.items()
    }
    infos = [*values.values()]
    graph = helper.make_graph([node], "attention", infos[: len(arrays)], infos[len(arrays) :])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    binding = session.io_binding()
    held = {n: onnxruntime.OrtValue.ortvalue_from_numpy(a) for n, a in arrays.items()}
    for name, tensor in held.items():
        binding.bind_ortvalue_input(name, tensor)
    for name in ("key", "value"):
        binding.bind_ortvalue_output(f"present_{name}", held[f"past_{name}"])
    binding.bind_output("output")

    def result(_: None) -> torch.Tensor:
        outputs = {x.shape: x for x in binding.copy_outputs_to_cpu()}
        return (
            torch.from_numpy(outputs[arrays["query"].shape])
            .unflatten(2, (heads, -1))
            .transpose(1, 2)
        )

    return lambda: session.run_with_iobinding(binding), result


@peer("OpenVINO", "f32", "bf16", environment="others")
def _(inputs: list[torch.Tensor], threads: int) -> Prepared:
    import openvino
    from openvino import opset13

    # Its inputs are float32; the hint has it compute in bfloat16.
    bf16 = inputs[0].dtype == torch.bfloat16
    parameters = [opset13.parameter(list(x.shape), np.float32) for x in inputs]
    attention = opset13.scaled_dot_product_attention(*parameters)
    config = {
        "INFERENCE_PRECISION_HINT": "bf16" if bf16 else "f32",
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
    }
    model = openvino.Model([attention], parameters)
    request = openvino.compile_model(model, "CPU", config).create_infer_request()
    for i, x in enumerate(inputs):
        request.set_input_tensor(i, openvino.Tensor(x.float().numpy()))
    return request.infer, lambda _: torch.from_numpy(request.get_output_tensor(0).data.copy())


@peer("jax", "f32", "bf16", environment="others")
def _(inputs: list[torch.Tensor], threads: int) -> Prepared:
    import jax

    dtype = jax.numpy.bfloat16 if inputs[0].dtype == torch.bfloat16 else jax.numpy.float32
    arrays = [jax.numpy.asarray(x.transpose(1, 2).float().numpy(), dtype) for x in inputs]
    function = jax.jit(jax.nn.dot_product_attention)

    def result(output: Any) -> torch.Tensor:
        array = np.array(output.astype(jax.numpy.float32))
        return torch.from_numpy(array).transpose(1, 2)

    return lambda: function(*arrays).block_until_ready(), result


def measure(name: str, case: Case, dtype: str, threads: int) -> float:
    """Milliseconds of one call in this process."""
    torch.manual_seed(0)
    inputs = list(case.inputs(DTYPES.get(dtype, torch.float32))[0])
    query, *rest = (x.double() for x in inputs)
    if dtype == "int8":
        rest = [(x / SCALE).round().clamp(-127, 127) for x in rest]
        inputs[1:] = [x.to(torch.int8) for x in rest]
        rest = [x * SCALE for x in rest]
    call, result = PEERS[name][0](inputs, threads)
    key, value = (x.repeat_interleave(query.size(1) // x.size(1), 1) for x in rest)
    rows = query[..., :16, :]
    expected = (rows @ key.mT / case.head_dim**0.5).softmax(-1) @ value
    actual = result(call())
    if actual.shape != query.shape:
        raise ValueError(f"{name} gives {list(actual.shape)}, not {list(query.shape)}")
    tolerance = {"f32": 1e-4, "bf16": 2e-2, "int8": 1e-2}[dtype]
    torch.testing.assert_close(
        actual[..., :16, :].double(), expected, rtol=tolerance, atol=tolerance
    )
    (timing,) = alternate([call], 1.0)
    return timing.median * 1e3


def measure_apart(name: str, case: Case, dtype: str, threads: int) -> float | None:
    """The same in a new process; None where the peer cannot."""
    cpus = sorted(os.sched_getaffinity(0))[:threads]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    command = [PEERS[name][2], __file__, "--run", name, case.name, dtype, str(threads)]
    process = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: os.sched_setaffinity(0, cpus),
    )
    if process.returncode:
        print(f"{name}, {case.name}, {dtype}: {process.stderr.strip().splitlines()[-1]}")
        return None
    return float(process.stdout.splitlines()[-1])


def settled(times: list[float], ours: list[float]) -> bool:
    """Whether another round would say nothing new: the peer takes more than twice our time, or
    the standard error of its mean is below 2%."""
    if times and min(times) > 2 * max(ours):
        return True
    if len(times) < 3:
        return False
    return statistics.stdev(times) / len(times) ** 0.5 < 0.02 * statistics.mean(times)


def measure_all(case: Case, dtype: str, threads: int) -> dict[str, list[float]]:
    """Milliseconds of every peer that can, in rounds."""
    able = [name for name, (_, dtypes, _) in PEERS.items() if dtype in dtypes]
    samples: dict[str, list[float]] = {}
    for _ in range(MOST_ROUNDS):
        asked = [n for n in able if not settled(samples.get(n, []), samples.get("attn", []))]
        for name in asked:
            ms = measure_apart(name, case, dtype, threads)
            if ms is None:
                able.remove(name)
            else:
                samples.setdefault(name, []).append(ms)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--filter", default="", help="only cases whose 'shape dtype' contains this")
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--run", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        name, shape, dtype, threads = arguments.run
        (case,) = (c for c in CASES if c.name == shape)
        print(measure(name, case, dtype, int(threads)))
        return

    console = Console()
    console = Console(width=max(console.width, 120))
    threads = torch.get_num_threads()
    jobs = [(c, d) for c in CASES for d in c.dtypes if arguments.filter in f"{c.name} {d}"]
    table = Table(title="Forward, GFLOP/s; in brackets the time relative to ours (above 1: slower)")
    for heading in ("shape", "dtype", *PEERS):
        table.add_column(heading, justify="left" if heading in ("shape", "dtype") else "right")
    rows = []
    for case, dtype in track(jobs, description="peers", console=console):
        samples = measure_all(case, dtype, threads)
        times = {name: statistics.median(values) for name, values in samples.items()}
        rounds = {name: len(values) for name, values in samples.items()}
        rows.append({"case": case.name, "dtype": dtype, "ms": times, "rounds": rounds})
        cells = [
            f"{case.flops('forward') / times[n] / 1e6:.0f} ({times[n] / times['attn']:.1f})"
            if n in times
            else "-"
            for n in PEERS
        ]
        table.add_row(case.name, dtype, *cells)
    console.print(table)
    if arguments.json:
        write({"machine": about(), "peers": rows}, arguments.json)
        console.print(f"written: {arguments.json}")


if __name__ == "__main__":
    main()
