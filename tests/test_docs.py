"""The examples of the documentation run as they stand there."""

import doctest
import importlib.util
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_attn
from torch_attn import _convert, functional, nn, replace

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DERIVATIVES = ROOT / "docs" / "derivatives.md"


def examples(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("module", [functional, nn, replace, _convert])
def test_docstrings(module: types.ModuleType) -> None:
    names = {"torch": torch, "torch_attn": torch_attn}
    result = doctest.testmod(module, extraglobs=names)
    assert result.attempted > 0
    assert result.failed == 0


# What blocks print, by a piece of them. The README says it in a comment.
PRINTED = {
    "bias.grad.shape": "torch.Size([8, 100, 120])\n",
    "handle.calls": "1\n",
    "convert(": "Converted(swapped=('layers.0.self_attn', 'layers.1.self_attn'), skipped={})\n",
    "transformers.calls()": "2\n",
}


@pytest.mark.parametrize("block", examples(README))
def test_readme(block: str) -> None:
    """Each runs alone, as somebody runs it who copied no other."""
    command = [sys.executable, "-W", "ignore", "-c", block]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    for piece, printed in PRINTED.items():
        if piece in block:
            assert run.stdout == printed


# Each block is a process of its own, of one that has imported what takes longest.
RUN_BLOCKS = """
import os, sys
import torch_attn
for block in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        exec(compile(block, "block", "exec"), {"__name__": "__main__"})
        sys.exit()
    if os.waitpid(child, 0)[1] != 0:
        sys.exit(f"in this block of the page:\\n{block}")
"""
PAGES = [p for p in sorted(README.parent.glob("docs/*.md")) if p != DERIVATIVES and examples(p)]


# The page that compiles FlexAttention takes as long as all others.
SLOW = {"coming-from": pytest.mark.slow}


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=SLOW.get(p.stem, ()), id=p.stem) for p in PAGES]
)
def test_page(page: Path) -> None:
    """Those with torchvision run where it is: in test_replace_libraries.py."""
    blocks = [block for block in examples(page) if "torchvision" not in block]
    command = [sys.executable, "-W", "ignore", "-c", RUN_BLOCKS, *blocks]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [line for block in blocks for line in promised(block)]


def promised(block: str) -> list[str]:
    """What a block says that it prints, without the explanation that may follow a number."""
    comments = re.findall(r"^print\(.*\)(?:  |\n)# (.*)$", block, re.MULTILINE)
    return [re.split(r"(?<=\d)[:;] ", comment)[0] for comment in comments]


def test_derivatives_page() -> None:
    names: dict[str, Any] = {}
    for block in examples(DERIVATIVES):
        exec(block, names)
    assert [g.shape for g in names["gradients"]] == [(2, 8, 100, 64)] * 3
    torch.testing.assert_close(names["product"], names["same"])


@pytest.mark.slow  # tries every call of the table
def test_support_table() -> None:
    """The committed table is what its script finds now."""
    script = ROOT / "docs" / "make_support_table.py"
    spec = importlib.util.spec_from_file_location("make_support_table", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.table() == module.committed()
