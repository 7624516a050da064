"""The examples of the documentation run as they stand there."""

import doctest
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

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


def test_readme(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"model": tiny_model()}
    for block in examples(README):
        exec(block, names)  # one after the other, as a reader would
    assert names["model"].config._attn_implementation == "attn"
    assert names["weights"].shape == (2, 8, 100, 120)
    assert "torch.Size([8, 100, 120])" in capsys.readouterr().out


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


def tiny_model() -> nn.Module:
    """What the README calls a model you have."""
    from transformers import BertConfig, BertModel

    return BertModel(
        BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=9)
    )
