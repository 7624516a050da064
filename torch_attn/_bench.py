"""``python -m torch_attn bench``: how fast this processor is beside PyTorch's attention."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import datetime
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from torch_attn._convert import convert
from torch_attn.functional import sdpa
from torch_attn.replace import replacing_sdpa

Runs = dict[str, Callable[[], Any]]


class Shape(NamedTuple):
    """What a model calls attention with: self-attention, unless `keys` says otherwise."""

    model: str
    query: tuple[int, int, int, int]  # batch, heads, queries, head_dim
    dtype: torch.dtype = torch.float32
    trains: bool = False  # forward and backward
    keys: tuple[int, int] | None = None  # heads and length of key and value
    options: dict[str, Any] = {}  # noqa: RUF012, of a NamedTuple
    mask: str = ""  # "padding", or "learned"

    def run(self, attention: Callable[..., Tensor]) -> Callable[[], Any]:
        torch.manual_seed(0)
        batch, heads, queries, head_dim = self.query
        key_heads, keys = self.keys or (heads, queries)
        sizes = [(heads, queries), (key_heads, keys), (key_heads, keys)]
        x = [torch.randn(batch, *size, head_dim, dtype=self.dtype) for size in sizes]
        options = dict(self.options)
        if self.mask == "padding":
            lengths = torch.linspace(keys / 4, keys, batch)[:, None, None, None]
            options["attn_mask"] = torch.arange(keys) < lengths
        if self.mask == "learned":
            options["attn_mask"] = torch.randn(1, heads, queries, keys, dtype=self.dtype)
        if not self.trains:
            return lambda: attention(*x, **options)
        leaves = [*x, options["attn_mask"]] if self.mask == "learned" else x
        for leaf in leaves:
            leaf.requires_grad_()
        along = torch.randn_like(x[0])
        return lambda: torch.autograd.grad(attention(*x, **options), leaves, along)


_BERT, _VIT, _GPT = (8, 12, 128, 64), (4, 12, 197, 64), (1, 12, 1024, 64)
_CAUSAL, _GROUPED, _DROPOUT = {"is_causal": True}, {"enable_gqa": True}, {"dropout_p": 0.1}
SHAPES = [
    Shape("BERT-base", _BERT),
    Shape("BERT-base", _BERT, torch.bfloat16),
    Shape("BERT-base, padding mask", _BERT, mask="padding"),
    Shape("BERT-base", _BERT, torch.bfloat16, trains=True),
    Shape("BERT-base, dropout 0.1", _BERT, trains=True, options=_DROPOUT),
    Shape("ViT-B/16", _VIT),
    Shape("ViT-B/16", _VIT, trains=True),
    Shape("Stable Diffusion, 32 x 32", (2, 8, 1024, 40)),
    Shape("T5-small, learned bias", (4, 8, 256, 64), trains=True, mask="learned"),
    Shape("GPT-2, prompt of 1,024", _GPT, options=_CAUSAL),
    Shape("GPT-2, 1,024 tokens", _GPT, trains=True, options=_CAUSAL),
    Shape(
        "Llama 3 8B, prompt of 256",
        (1, 32, 256, 128),
        torch.bfloat16,
        False,
        (8, 256),
        _CAUSAL | _GROUPED,
    ),
    Shape("Llama 3 8B, token 4,096", (1, 32, 1, 128), torch.float32, False, (8, 4096), _GROUPED),
    Shape("Llama 3 8B, token 4,096", (1, 32, 1, 128), torch.bfloat16, False, (8, 4096), _GROUPED),
]
LONG = Shape("GPT-2, 1,024 tokens, dropout 0.1", _GPT, trains=True, options=_CAUSAL | _DROPOUT)


def bench(seconds: float, machine: dict[str, str], to: Path | None) -> None:
    """Prints the table; writes the numbers to the file `to`, if it is given."""
    result: dict[str, Any] = {"machine": machine, "date": str(datetime.date.today())}
    print(*(f"{name} {value}" for name, value in machine.items()), sep=", ")
    print(f"In about {seconds:.0f} seconds: PyTorch's attention (built-in) beside attn\n")
    print(f"{'':<52}{'built-in':>12}{'attn':>12}{'times as fast':>16}")
    each = seconds / (len(SHAPES) + 6)
    result["calls"] = [_call(shape, each, n) for n, shape in enumerate(SHAPES, 1)]
    result["memory"] = _memory()
    result["encoder"] = _encoder(6 * each)
    times = [row["times"] for row in result["calls"]]
    print(
        f"\nType this for an encoder ({result['encoder']['unpad']:.1f} times as fast here):\n"
        "    from torch_attn.integrations.transformers import unpad\n    unpad(model)\n"
        f"and for all other code, once ({min(times):.1f} to {max(times):.1f} times, by call):\n"
        "    torch_attn.replace_sdpa()"
    )
    if to:
        to.write_text(json.dumps(result, indent=1) + "\n")


def _call(shape: Shape, seconds: float, number: int) -> dict[str, Any]:
    what = "training" if shape.trains else "forward"
    dtype = str(shape.dtype).removeprefix("torch.")
    _progress(f"{number} of {len(SHAPES)}: {shape.model}")
    runs = {"built-in": shape.run(scaled_dot_product_attention), "attn": shape.run(sdpa)}
    if "dropout_p" not in shape.options:  # which drops other weights
        _check(shape.model, *(run() for run in runs.values()))
    builtin, ours = _alternate(runs, seconds).values()
    _row(
        shape.model,
        f"{dtype} {what}",
        f"{builtin * 1e3:.2f} ms",
        f"{ours * 1e3:.2f} ms",
        builtin / ours,
    )
    row = {"model": shape.model, "dtype": dtype, "pass": what}
    return {**row, "builtin_ms": builtin * 1e3, "attn_ms": ours * 1e3, "times": builtin / ours}


def _memory() -> dict[str, float]:
    """MiB that a step of training takes beside its inputs, where the system tells it."""
    runs = {"builtin": LONG.run(scaled_dot_product_attention), "attn": LONG.run(sdpa)}
    try:
        found = {name: _peak(run) for name, run in runs.items()}
    except (OSError, AttributeError):  # not Linux, or no glibc
        return {}
    builtin, ours = found.values()
    _row(LONG.model, "memory of training", f"{builtin:.0f} MiB", f"{ours:.0f} MiB")
    return found


def _encoder(seconds: float) -> dict[str, Any]:
    """An encoder as wide as MiniLM, with random weights: padded, then without padding."""
    torch.manual_seed(0)
    lengths = (30 * (0.8 * torch.randn(16)).exp()).round().long().clamp(3, 256)
    keep = torch.arange(int(lengths.max())) < lengths[:, None]
    _progress("an encoder")
    kind, runs = _encoder_runs(keep)
    with torch.inference_mode(), warnings.catch_warnings():
        # torch's encoder makes nested tensors of a batch with padding, and warns of them.
        warnings.filterwarnings("ignore", message=".*nested tensors is in prototype stage")
        padded, _, unpadded = (run() for run in runs.values())
        _check(kind, padded[keep], unpadded[keep])
        builtin, ours, unpad = _alternate(runs, seconds).values()
    tokens, padding = int(keep.sum()), int((~keep).sum())
    _progress("")
    print(f"\nAn encoder: {kind}, 16 texts, {tokens:,} tokens and {padding:,} of padding")
    for name, own in ("padded", ours), ("without padding: unpad", unpad):
        _row(
            name, "float32 forward", f"{builtin * 1e3:.0f} ms", f"{own * 1e3:.0f} ms", builtin / own
        )
    return {"kind": kind, "attn": builtin / ours, "unpad": builtin / unpad}


def _encoder_runs(keep: Tensor) -> tuple[str, Runs]:
    """With the built-in, with attn, and without padding; of transformers, or of torch."""
    from torch_attn.integrations.transformers import unpad

    runs: list[Callable[[], Any]]
    contexts: list[Callable[[], Any]]
    try:
        from transformers import BertConfig, BertModel
    except ImportError:
        layer = nn.TransformerEncoderLayer(384, 12, 1536, batch_first=True)
        builtin = nn.TransformerEncoder(layer, 3).train(False)
        ours = copy.deepcopy(builtin)
        convert(ours)
        x, hidden = torch.randn(*keep.shape, 384), ~keep
        runs = [lambda m=m: m(x, src_key_padding_mask=hidden) for m in (builtin, ours, ours)]  # type: ignore[misc]
        contexts = [contextlib.nullcontext, contextlib.nullcontext, lambda: unpad(ours)]
        kind = "3 layers of nn.TransformerEncoder, 384 features"
    else:
        config = BertConfig(num_hidden_layers=3, hidden_size=384, intermediate_size=1536)
        model: Any = BertModel(config).train(False)
        tokens = torch.randint(1000, 20000, keep.shape) * keep
        runs = [lambda: model(tokens, attention_mask=keep.long()).last_hidden_state] * 3
        contexts = [contextlib.nullcontext, replacing_sdpa, lambda: unpad(model)]
        kind = "3 layers of BERT, 384 features, as MiniLM's"

    def within(context: Callable[[], Any], run: Callable[[], Any]) -> Any:
        with context():
            return run()

    bound = [partial(within, c, r) for c, r in zip(contexts, runs, strict=True)]
    return kind, dict(zip(("built-in", "attn", "unpad"), bound, strict=True))


def _alternate(runs: Runs, seconds: float) -> dict[str, float]:
    """The median seconds of a call of each, at least three rounds; calls of microseconds repeat."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    once = {name: _clock(run, 1) for name, run in runs.items()}
    repeats = {name: max(1, int(2e-3 / once[name])) for name in runs}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples[next(iter(runs))]) < 3:
        for name, run in runs.items():
            samples[name].append(_clock(run, repeats[name]))
    return {name: statistics.median(of) for name, of in samples.items()}


def _clock(run: Callable[[], Any], repeat: int) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        run()
    return (time.perf_counter() - start) / repeat


def _peak(run: Callable[[], Any]) -> float:
    """MiB by which a call raises the memory of this process at most."""

    def most() -> int:
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

    run()
    ctypes.CDLL(None).malloc_trim(0)  # else the call takes what earlier ones have left
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins with what is held now
    before = most()
    run()
    return (most() - before) / 1024


def _check(name: str, builtin: Any, ours: Any) -> None:
    """Stops where the two do not agree: their times would mean nothing."""
    for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (builtin, ours)), strict=True):
        apart, most = (a - b).abs().max().item(), a.abs().max().item()
        bound = 0.05 if a.dtype == torch.bfloat16 else 1e-3
        if not apart <= bound * most:
            raise SystemExit(f"{name}: built-in and attn differ by {apart:.1e}, of {most:.1e}")


def _row(name: str, what: str, builtin: str, ours: str, times: float | None = None) -> None:
    _progress("")
    ratio = "" if times is None else f"{times:.2f}"
    print(f"{name:<33}{what:<19}{builtin:>12}{ours:>12}{ratio:>16}", flush=True)


def _progress(text: str) -> None:
    """What is measured now, on a line that the next text replaces; nothing into a file."""
    if sys.stdout.isatty():
        print(f"\r{text:<79}\r", end="", flush=True)
