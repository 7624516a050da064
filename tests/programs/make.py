"""Makes programs as users keep them, in files: `python -m tests.programs.make FOLDER`.

The programs of a folder here were made by the commit that it is named after, with torch 2.13.
`tests/test_kept_files.py` says whether they still run.
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


def texts() -> list[str]:
    """score_mods in which every operation of the language occurs, at most 15 in each."""
    rows = [row.split() for row in torch.ops.attn._operations_of_programs()]
    signatures = [(name, signature) for name, *of in rows for signature in of]
    return [text_of(signatures[n : n + 15]) for n in range(0, len(signatures), 15)]


def text_of(signatures: list[tuple[str, str]]) -> str:
    """Adds a hundredth of each operation's result to the score."""
    lines = ["f score", "f sigmoid %0", "f const 1.5", "f const 0.01"]
    lines += ["i query", "i key_index", "i const 3", "b lt %4 %5", "b eq %4 %5", "f add %1 %2"]
    of_type = {"f": ["%1", "%2", "%1"], "i": ["%4", "%6", "%5"], "b": ["%7", "%8", "%7"]}
    total = "%0"

    def add(line: str) -> str:
        lines.append(line)
        return f"%{len(lines) - 1}"

    for name, signature in signatures:
        types, result = signature.split(">")
        taken = {letter: list(places) for letter, places in of_type.items()}
        operands = ["%9"] if name == "acosh" else [taken[letter].pop(0) for letter in types]
        value = add(f"{result} {name} {' '.join(operands)}")
        if result != "f":
            value = add(f"f float {value}")
        total = add(f"f add {total} {add(f'f mul {value} %3')}")
    numbered = [f"%{n} {line}" for n, line in enumerate(lines)]
    return "\n".join(["attn.program 1", *numbered, f"return {total}\n"])


# Every kind of number that a function reads.
LEAVES = """attn.program 1
%0 f score
%1 f row 0
%2 f key 0
%3 f distance 0
%4 f pair
%5 i row 1
%6 f table 0 %5
%7 i const 2
%8 f row_table 1 %7
%9 f add %0 %1
%10 f add %9 %2
%11 f add %10 %3
%12 f add %11 %4
%13 f add %12 %6
%14 f add %13 %8
return %14
"""


class Functions(nn.Module):
    """Functions of the pair, every operation of their language, and what takes no functions."""

    def __init__(self) -> None:
        super().__init__()
        self.texts, self.leaves = texts(), LEAVES

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
    ) -> list[Tensor]:
        results: list[Tensor] = []
        for text in self.texts:
            output, lse, most = torch.ops.attn.flex_attention(
                query, key, value, scale=0.25, enable_gqa=True, score_mod=text
            )
            results += [output, lse, most]
        rows = query[:1, :, :, :1]
        tables: list[Tensor | None] = [alibi_slopes[None, None, None], rows.expand(1, 4, 7, 3)]
        output, lse, most = torch.ops.attn.flex_attention(
            query,
            key,
            value,
            attn_mask,
            enable_gqa=True,
            sinks=sinks,
            key_lengths=integers[1],
            score_mod=self.leaves,
            mask_mod="attn.program 1 wide\n%0 i query\n%1 i key_index\n%2 b ge %0 %1\nreturn %2\n",
            row_terms=rows,
            key_terms=key[:1, :1, :, :1],
            distance_terms=torch.linspace(-1, 1, 13)[None, None, :, None],
            row_numbers=cu_seq[:2].int()[None, None, None].expand(1, 1, 7, 2),
            tables=tables,
        )
        results += [output, lse, most]
        output, weights, scores = torch.ops.attn.sdpa_with_weights(
            query, key, value, attn_mask, scale=0.25, enable_gqa=True, softcap=2.0, sinks=sinks
        )
        results += [output, weights, scores]
        largest, entropy, lse, received = torch.ops.attn.sdpa_stats(
            query, key, attn_mask, scale=0.25, enable_gqa=True, window_size=[3, 1]
        )
        results += [largest, entropy, lse, received]
        return results


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
    x = inputs()
    folder = Path(__file__).parent / sys.argv[1]
    folder.mkdir(exist_ok=True)
    for prefix, program in (("", Program()), ("functions_", Functions())):
        torch.jit.script(program).save(str(folder / f"{prefix}scripted.pt"))
        exported = torch.export.export(program, x)
        torch.export.save(exported, folder / f"{prefix}exported.pt2")
        with torch._inductor.config.patch({"cpp.march": "x86-64", "cpp.simdlen": 1}):
            path = str(folder / f"{prefix}compiled.pt2")
            torch._inductor.aoti_compile_and_package(exported, package_path=path)
        make_small(path)
        torch.save(list(program(*x)), folder / f"{prefix}results.pt")
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
