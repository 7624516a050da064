"""How exact models are with keys and values of 8 bits: ``make bench-eight-bits``.

gpt: the demo's GPT, whose positions begin as sines, learns nine tenths of the manual of Python by
characters. Then it reads four places of the last tenth over a cache. `change` says how much the
perplexity of the next character changes. `same` is the share of places where the most probable
next character stays the same. minilm: a trained MiniLM embeds sentences. `smallest` and `mean`
summarise the cosines between the two embeddings of a sentence. A model with 8 bits is compared with
the same model without them, and bfloat16 with float32.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import about, write
from rich.progress import track
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, AutoTokenizer

import torch_attn
from examples.demo.embeddings import embed, get_model_path
from examples.demo.gpt import GPT, Config, Training
from examples.demo.report import console, table
from examples.demo.text import sentences
from torch_attn.integrations._attention import EIGHT_BITS, EightBits
from torch_attn.integrations.transformers import attention_forward, register

CONFIG = Config(context=1024, layers=4, heads=2, width=128)
# Context, batch, steps. Short contexts come first, because there a model soon learns where to look.
LESSONS = [(64, 16, 600), (256, 4, 400), (1024, 2, 500)]
PROMPTS, LENGTH, SENTENCES = 4, 800, 256
Bits = torch.dtype | None  # of keys and values; None: as the model
MODELS, BITS = (torch.float32, torch.bfloat16), (None, torch.int8, torch.float8_e4m3fn)
# What is run, each with what it is compared with.
JOBS = {(m, bits): (m if bits else torch.float32, None) for m in MODELS for bits in BITS}
FORMATS = {"perplexity": ".4f", "change": "+.3%", "same": ".2%", "smallest": ".6f", "mean": ".6f"}


def stored(key: Tensor, value: Tensor, bits: Bits) -> dict[str, Tensor]:
    """Arguments of `torch_attn.sdpa`."""
    if bits is None:
        return {"key": key, "value": value}
    (key, key_scale), (value, value_scale) = (torch_attn.quantize_kv(x, bits) for x in (key, value))
    return {"key": key, "value": value, "key_scale": key_scale, "value_scale": value_scale}


def cached(room: int, bits: Bits) -> Callable[..., Tensor]:
    """The attention of a layer that decodes, over buffers with room for that many tokens."""
    buffers: dict[str, Tensor] = {}
    places = iter(range(room))

    def attend(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        place = next(places)
        for name, x in stored(key, value, bits).items():
            if place == 0:
                buffers[name] = x.new_empty(*x.shape[:2], room, *x.shape[3:])
            buffers[name][:, :, place] = x[:, :, 0]
        return torch_attn.sdpa(query, **{n: x[:, :, : place + 1] for n, x in buffers.items()})

    return attend


@torch.inference_mode()
def decode(model: GPT, tokens: Tensor, bits: Bits) -> Tensor:
    """Logits `[B, L, characters]` of the next character for tokens `[B, L]`, one at a time."""
    for block in model.blocks:
        block.attention = cached(tokens.size(1), bits)
    places = zip(tokens.split(1, dim=1), model.position.weight, strict=False)
    hidden = [model.blocks(model.token(token) + place) for token, place in places]
    return model.head(model.norm(torch.cat(hidden, dim=1))).double()


def rows(run: Callable[..., Tensor], compare: Callable[..., dict[str, float]]) -> list[Any]:
    found, result = {}, []
    for job in track(JOBS, "comparing", console=console):
        found[job] = run(*job)
        names = {"model": f"{job[0]}"[6:], "keys and values": f"{job[1] or job[0]}"[6:]}
        result.append(names | compare(found[job], found[JOBS[job]]))
    return result


def gpt() -> list[Any]:
    training = Training("attn", CONFIG)
    training.text, unseen = training.text.tensor_split([len(training.text) * 9 // 10])
    angles = torch.arange(CONFIG.context)[:, None] / 1e4 ** torch.linspace(0, 1, CONFIG.width // 2)
    training.model.position.weight.data = torch.cat([angles.sin(), angles.cos()], -1)
    for context, batch, steps in LESSONS:
        training.config = replace(CONFIG, context=context, batch=batch)
        for _ in track(range(steps), f"training, {context} characters", console=console):
            loss = training.step()
    console.print(f"loss of the last batch: {loss:.2f} nats a character")
    text = unseen.unfold(0, LENGTH + 1, len(unseen) // PROMPTS)[:PROMPTS]

    def compare(logits: Tensor, others: Tensor) -> dict[str, float]:
        loss, other = (F.cross_entropy(x.mT, text[:, 1:]).item() for x in (logits, others))
        same = (logits.argmax(-1) == others.argmax(-1)).double().mean().item()
        return {"perplexity": math.exp(loss), "change": math.expm1(loss - other), "same": same}

    return rows(lambda dtype, bits: decode(training.model.to(dtype), text[:, :-1], bits), compare)


def attention_of(bits: Bits) -> str:
    """The name, for transformers, of our attention with such keys and values."""

    def forward(module: Any, query: Any, key: Any, value: Any, mask: Any, **more: Any) -> Any:
        x = stored(key, value, bits)
        if bits is not None:
            more[EIGHT_BITS] = EightBits(**x)
        return attention_forward(module, query, x["key"], x["value"], mask, **more)

    AttentionInterface.register(f"attn, {bits}", forward)
    AttentionMaskInterface.register(f"attn, {bits}", AttentionMaskInterface()[register()])
    return f"attn, {bits}"


def minilm() -> list[Any]:
    tokenizer, model = (x.from_pretrained(get_model_path()) for x in (AutoTokenizer, AutoModel))
    batch = dict(tokenizer(sentences(SENTENCES), padding=True, return_tensors="pt"))

    def run(dtype: torch.dtype, bits: Bits) -> Tensor:
        model.to(dtype).eval().set_attn_implementation(attention_of(bits))
        return embed(model, [batch]).double()

    def compare(embeddings: Tensor, others: Tensor) -> dict[str, float]:
        cosines = F.cosine_similarity(embeddings, others)
        return {"smallest": cosines.min().item(), "mean": cosines.mean().item()}

    return rows(run, compare)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the results here")
    arguments = parser.parse_args()
    results = {"gpt": gpt(), "minilm": minilm()}
    for name, found in results.items():
        printed = table(*found[0], caption=name)
        for row in found:
            printed.add_row(*(format(x, FORMATS.get(k, "")) for k, x in row.items()))
        console.print(printed)
    if arguments.json:
        write({"machine": about(), **results}, arguments.json)
        console.print(f"written: {arguments.json}")


if __name__ == "__main__":
    main()
