"""Makes programs as users keep them, in files: `python -m tests.programs.make FOLDER`.

The programs of a folder here were made by the commit that it is named after, with torch 2.13.
`tests/test_programs.py` says whether they still run.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from torch import Tensor, nn

import torch_attn


class Program(nn.Module):
    """A call of the built-in's arguments, one with all options, and one of packed sequences."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor,
        alibi_slopes: Tensor,
        sinks: Tensor,
        integers: Tensor,
        cu_seq: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        plain = torch.ops.attn.sdpa(
            query, key, value, attn_mask, is_causal=True, scale=0.25, enable_gqa=True
        )
        options = torch.ops.attn.attention(
            query,
            key,
            value,
            attn_mask,
            0.0,
            True,
            scale=0.5,
            enable_gqa=True,
            softcap=2.0,
            window_size=[3, 1],
            query_offset=integers[0],
            key_lengths=integers[1],
            alibi_slopes=alibi_slopes,
            sinks=sinks,
        )
        packed = torch.ops.attn.varlen_attention(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            cu_seq,
            cu_seq,
            4,
            4,
            scale=0.5,
            window_size=[2, 0],
            enable_gqa=True,
            seqused_k=cu_seq.diff(),
            softcap=3.0,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            query_offset=integers[2],
            attn_mask=attn_mask[:, :, :4],
        )
        return plain, options[0], options[1], packed[0]


class ForOnnx(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor) -> Tensor:
        x = query, key, value, attn_mask
        options = {"softcap": 2.0, "window_size": (3, 1), "scale": 0.5, "enable_gqa": True}
        return torch_attn.sdpa(*x, is_causal=True, **options)


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    query, (key, value) = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 2, 7, 8)
    mask, slopes, sinks = torch.randn(1, 7, 7), torch.rand(4), torch.randn(4)
    integers = torch.tensor([[1, 0], [6, 7], [0, 1]])
    return query, key, value, mask, slopes, sinks, integers, torch.tensor([0, 3, 7])


def make_small(package: str) -> None:
    """Leaves out symbols and sources, which no run needs, and compresses the rest."""
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(package) as archive:
            archive.extractall(folder)
        files = [p for p in Path(folder).rglob("*") if p.is_file() and p.suffix != ".cpp"]
        with zipfile.ZipFile(package, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in files:
                if file.suffix == ".so":
                    subprocess.run(["strip", "--strip-all", file], check=True)
                archive.write(file, file.relative_to(folder))


def main() -> None:
    x, program = inputs(), Program()
    folder = Path(__file__).parent / sys.argv[1]
    folder.mkdir(exist_ok=True)
    torch.jit.script(program).save(str(folder / "scripted.pt"))
    exported = torch.export.export(program, x)
    torch.export.save(exported, folder / "exported.pt2")
    with torch._inductor.config.patch({"cpp.march": "x86-64", "cpp.simdlen": 1}):
        path = str(folder / "compiled.pt2")
        torch._inductor.aoti_compile_and_package(exported, package_path=path)
    make_small(path)
    onnx = torch.onnx.export(
        ForOnnx(),
        x[:4],
        dynamo=True,
        opset_version=25,
        custom_translation_table=torch_attn.onnx.translations(),
    )
    onnx.save(folder / "attention.onnx")


if __name__ == "__main__":
    main()
