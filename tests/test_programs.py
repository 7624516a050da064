"""Programs in files that an earlier commit made run, and give what the same calls give today."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from programs.make import ForOnnx, Program, inputs

FOLDERS = [made.parent for made in Path(__file__).parent.glob("programs/*/scripted.pt")]
LOAD: dict[str, Callable[[Path], Callable[..., Any]]] = {
    "scripted.pt": torch.jit.load,
    "exported.pt2": lambda path: torch.export.load(path).module(),
    "compiled.pt2": lambda path: torch._inductor.aoti_load_package(str(path)),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.load:DeprecationWarning")
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
@pytest.mark.parametrize("file", LOAD)
def test_torch(folder: Path, file: str) -> None:
    if file == "compiled.pt2" and platform.machine() != "x86_64":
        pytest.skip("not run: compiled for x86-64")
    results = LOAD[file](folder / file)(*inputs())
    for actual, expected in zip(results, Program()(*inputs()), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_onnx(folder: Path) -> None:
    model = onnx.load(folder / "attention.onnx")
    x = inputs()[:4]
    names = [i.name for i in model.graph.input]
    (actual,) = ReferenceEvaluator(model).run(
        None, dict(zip(names, [t.numpy() for t in x], strict=True))
    )
    torch.testing.assert_close(torch.from_numpy(actual), ForOnnx()(*x))
