"""docs/flex-gallery.md: its code is what was drawn and measured, and computes what it says."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn.attention import flex_attention as pytorchs

import torch_attn
from test_bench import imported
from test_docs import ROOT, examples
from torch_attn import reference

PAGE = ROOT / "docs" / "flex-gallery.md"
B, H, L, E = 2, 2, 40, 8


@pytest.fixture(scope="module")
def gallery() -> Iterator[Any]:
    with imported("gallery") as module:
        yield module


def test_page_is_what_the_command_makes(gallery: Any) -> None:
    text = PAGE.read_text()
    times = gallery.Times.of_page(text)
    assert gallery.page(times) == text
    assert examples(PAGE) == [entry.source() for entry in gallery.ENTRIES.values()]
    assert list(times.rows) == list(gallery.ENTRIES)  # a row of times for each function
    assert max(len(x) for x in text.splitlines() if not x.startswith("|")) <= 120
    for title, link in re.findall(r"\[([^\]]+)\]\(#([\w-]+)\)", text):
        headings = map(gallery.anchor, re.findall(r"^## (.+)$", text, re.MULTILINE))
        assert link in headings, title


def test_pictures_of_the_page(gallery: Any) -> None:
    """Small, and crisp at 600 pixels on a screen that has two for each."""
    pictures = re.findall(r"\(pictures/(.+?)\)", PAGE.read_text())
    assert pictures == [f"flex-{name}.png" for name in gallery.ENTRIES]
    for name in pictures:
        path = PAGE.parent / "pictures" / name
        assert path.stat().st_size < 25_000, name
        assert Image.open(path).width == 1200, name


def over_pairs(gallery: Any, entry: Any, arguments: Any, x: list[Tensor]) -> Tensor:
    """Attention by PyTorch, whose matrix of scores the functions change."""
    query, key, value = x
    scores = query @ key.mT * (1 / math.sqrt(E) if entry.scale is None else entry.scale)
    changed = gallery.over_pairs(entry.mods(**arguments), (B, H, L, L), scores)
    return changed.softmax(-1) @ value


def same(name: str, found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, msg=lambda text: f"{name}: {text}")


def test_functions_compute_what_pytorch_computes_over_all_pairs(gallery: Any) -> None:
    """The blocks of the page, called as the page says, against the matrix and against the bias."""
    names: dict[str, Any] = {"flex_attention": torch_attn.flex_attention}
    for entry, block in zip(gallery.ENTRIES.values(), examples(PAGE), strict=True):
        exec(block, names)
        arguments = entry.example(B, H, L)
        x = [torch.randn(B, H, L, E, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        of = list(x)
        for name, tensor in arguments.items():
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                arguments[name] = tensor.double().requires_grad_()
                of.append(arguments[name])
        given = dict(zip(("query", "key", "value"), x, strict=True)) | arguments
        found = eval(f"flex_attention(query, key, value, {entry.call})", names, given)

        bias = gallery.bias_of(entry, arguments, L, torch.float64)
        biased = reference.sdpa(*x, bias, scale=entry.scale, **entry.options)
        gradient = torch.randn_like(found)
        grads = torch.autograd.grad(found, of, gradient)
        for other in (over_pairs(gallery, entry, arguments, x), biased):
            same(entry.name, found, other)
            expected = torch.autograd.grad(other, of, gradient, retain_graph=True)
            assert all(grad.any() for grad in expected)  # zeros would show nothing
            same(entry.name, grads, expected)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_pytorchs_flex_attention_takes_the_same_functions(gallery: Any) -> None:
    """Without torch.compile, which takes seconds for each; `make gallery` compiles them."""
    x = torch.randn(3, B, H, L, E).unbind()
    for entry in gallery.ENTRIES.values():
        score_mod, mask_mod = entry.mods(**entry.example(B, H, L))
        shown = mask_mod and pytorchs.create_block_mask(mask_mod, B, H, L, L, device="cpu")
        found = torch_attn.flex_attention(*x, score_mod, mask_mod, scale=entry.scale)
        expected = pytorchs.flex_attention(*x, score_mod, shown, scale=entry.scale)
        same(entry.name, found, expected)


def test_a_run_without_times_keeps_those_of_the_page(
    gallery: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["gallery.py", "--only", "alibi", "--no-times", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    gallery.main()
    page = tmp_path / PAGE.name
    assert page.read_text() == gallery.page(gallery.Times())
    assert "Nothing has been measured." in page.read_text()
    assert [x.name for x in (tmp_path / "pictures").iterdir()] == ["flex-alibi.png"]

    measured = gallery.page(
        gallery.Times("Measured on some day.", {"t5": ["1.5 (2%)", "2", "3", "4", "5", "raises"]})
    )
    assert "Forward: 1.5 ms; with a bias 2 ms" in measured
    page.write_text(measured)
    gallery.main()
    assert page.read_text() == measured
