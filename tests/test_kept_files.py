"""Programs in files that an earlier commit made run, and give what they gave then."""

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

HERE = Path(__file__).parent / "programs"
FOLDERS = sorted({made.parent for made in HERE.glob("*/*scripted.pt")})
LOAD: dict[str, Callable[[Path], Callable[..., Any]]] = {
    "scripted.pt": torch.jit.load,
    "exported.pt2": lambda path: torch.export.load(path).module(),
    "compiled.pt2": lambda path: torch._inductor.aoti_load_package(str(path)),
}


FILES = sorted(file for name in LOAD for file in HERE.glob(f"*/*{name}"))


@pytest.mark.filterwarnings("ignore:.*torch.jit.load:DeprecationWarning")
@pytest.mark.parametrize("file", FILES, ids=lambda f: f"{f.parent.name}/{f.name}")
def test_torch(file: Path) -> None:
    prefix, _, name = file.name.rpartition("_")
    if name == "compiled.pt2" and platform.machine() != "x86_64":
        pytest.skip("not run: compiled for x86-64")
    results = LOAD[name](file)(*inputs())
    # A language with more operations makes other functions today.
    today = () if prefix else Program()(*inputs())
    for actual, expected in zip(results, today, strict=not prefix):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    then = file.with_name(f"{prefix}_results.pt" if prefix else "results.pt")
    if then.exists():  # of the first folder there is none
        for actual, expected in zip(results, torch.load(then), strict=True):
            torch.testing.assert_close(actual, expected)


def test_every_operation_is_in_a_file() -> None:
    """An operation that is added needs files: `python -m tests.programs.make FOLDER`."""
    texts = [
        node.kwargs.get("score_mod", "")
        for file in FILES
        if file.name == "functions_exported.pt2"
        for node in torch.export.load(file).graph.nodes
    ]
    for row in torch.ops.attn._operations_of_programs():
        name, *signatures = row.split()
        for signature in signatures:
            assert any(f" {signature[-1]} {name} %" in text for text in texts), row


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_onnx(folder: Path) -> None:
    model = onnx.load(folder / "attention.onnx")
    x = inputs()[:4]
    names = [i.name for i in model.graph.input]
    (actual,) = ReferenceEvaluator(model).run(
        None, dict(zip(names, [t.numpy() for t in x], strict=True))
    )
    torch.testing.assert_close(torch.from_numpy(actual), ForOnnx()(*x))
