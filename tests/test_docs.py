"""The examples of the documentation run as they stand there."""

import doctest
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_attn
from torch_attn import functional

README = Path(__file__).parent.parent / "README.md"


def test_docstrings() -> None:
    names = {"torch": torch, "torch_attn": torch_attn}
    result = doctest.testmod(functional, extraglobs=names)
    assert result.attempted > 0
    assert result.failed == 0


def test_readme(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"model": tiny_model()}
    for block in blocks:
        exec(block, names)  # one after the other, as a reader would
    assert names["model"].config._attn_implementation == "attn"
    assert names["weights"].shape == (2, 8, 100, 120)
    assert "torch.Size([8, 100, 120])" in capsys.readouterr().out


def tiny_model() -> nn.Module:
    """What the README calls a model you have."""
    from transformers import BertConfig, BertModel

    return BertModel(
        BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=9)
    )
