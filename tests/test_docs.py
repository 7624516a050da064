"""The examples of the documentation run as they stand there."""

import doctest
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_attn
from torch_attn import functional

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DERIVATIVES = ROOT / "docs" / "derivatives.md"


def examples(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def test_docstrings() -> None:
    names = {"torch": torch, "torch_attn": torch_attn}
    result = doctest.testmod(functional, extraglobs=names)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("block", examples(README))
def test_readme(block: str) -> None:
    """Each runs alone, as somebody runs it who copied no other."""
    exec(block, {})


def test_readme_says_what_happens(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for block in examples(README):
        exec(block, {})
        says = re.findall(r"^print\(.*  # (.*)$", block, re.MULTILINE)
        printed.append((says, capsys.readouterr().out))
    assert (["torch.Size([8, 100, 120])"], "torch.Size([8, 100, 120])\n") in printed
    assert (["2: once a layer"], "2\n") in printed


def test_derivatives_page() -> None:
    names: dict[str, Any] = {}
    for block in examples(DERIVATIVES):
        exec(block, names)
    assert [g.shape for g in names["gradients"]] == [(2, 8, 100, 64)] * 3
    torch.testing.assert_close(names["product"], names["same"])


def test_support_table() -> None:
    """The committed table is what its script finds now."""
    script = ROOT / "docs" / "make_support_table.py"
    spec = importlib.util.spec_from_file_location("make_support_table", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.table() == module.committed()
