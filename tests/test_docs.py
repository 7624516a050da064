"""The examples of the documentation run as they stand there."""

import doctest
import re
import runpy
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_attn
from _variants import ROOT, run_python
from examples import plots
from examples.plots import _arrows, _curves, _graph
from torch_attn import (
    _convert,
    _invariance,
    distributed,
    flex,
    functional,
    mods,
    nn,
    onnx,
    replace,
    varlen,
)
from torch_attn._caches import paged
from torch_attn._inspection import record
from torch_attn.plots import _matrices, _points

README = ROOT / "README.md"
DERIVATIVES = ROOT / "docs" / "derivatives.md"


def examples(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    "module",
    [
        *(functional, varlen, flex, mods, nn, onnx, replace, _convert, _invariance, paged),
        *(distributed._context, distributed._methods, distributed._sdpa),
        *(record, _matrices, _points, _arrows, _curves, _graph),
    ],
)
def test_docstrings(module: types.ModuleType) -> None:
    names = {"torch": torch, "torch_attn": torch_attn, "plots": plots}
    result = doctest.testmod(module, extraglobs=names)
    assert result.attempted > 0
    assert result.failed == 0


# Each block is a process of its own, of one that has imported what takes longest, and what no block
# imports itself: torch does, and the classes of transformers do.
RUN_BLOCKS = """
import gc, os, sys, types
import torch_attn, torch._dynamo, torch._inductor.config
if "transformers" in "".join(sys.argv): import transformers.modeling_utils
gc.freeze()
for block in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        main = sys.modules["__main__"] = types.ModuleType("__main__")  # FlexAttention looks there
        exec(compile(block, "block", "exec"), vars(main))
        sys.stdout.flush()
        os._exit(0)  # without the second that Python takes to end with so many modules
    if os.waitpid(child, 0)[1] != 0:
        sys.exit(f"in this block of the page:\\n{block}")
"""
PAGES = [README, *(p for p in sorted(ROOT.glob("docs/*.md")) if p != DERIVATIVES and examples(p))]


# The pages that compile, train, or import much take as long as all other pages.
SLOW = dict.fromkeys(
    ("any-pytorch-code", "coming-from", "deployment", "diffusers", "training", "transformers"),
    pytest.mark.slow,
)


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=SLOW.get(p.stem, ()), id=p.stem) for p in PAGES]
)
def test_page(page: Path) -> None:
    """Each block alone, as somebody runs it who copied no other.

    Blocks with torchvision run where it is: in test_replace_libraries.py.
    """
    blocks = [block for block in examples(page) if "torchvision" not in block]
    printed = run_python("-W", "ignore", "-c", RUN_BLOCKS, *blocks)
    assert printed.splitlines() == [line for block in blocks for line in promised(block)]


def promised(block: str) -> list[str]:
    """What a block says that it prints, without the explanation that may follow a number."""
    comments = re.findall(r"^print\(.*\)(?:  |\n)# (.*)$", block, re.MULTILINE)
    return [re.split(r"(?<=\d)[:;] ", comment)[0] for comment in comments]


@pytest.mark.slow  # runs all blocks of the page
def test_derivatives_page() -> None:
    names: dict[str, Any] = {}
    for block in examples(DERIVATIVES):
        exec(block, names)
    assert [g.shape for g in names["gradients"]] == [(2, 8, 100, 64)] * 3
    torch.testing.assert_close(names["product"], names["same"])


@pytest.mark.slow  # tries every call of the table
def test_support_table() -> None:
    """The committed table is what its script finds now."""
    script = str(ROOT / "docs" / "make_support_table.py")
    made = runpy.run_path(script, run_name="make_support_table")
    assert made["table"]() == made["committed"]()


def of_the_builtin(call: Callable[[], Any]) -> str:
    """What the built-in attention says when it cannot do something: an error, or a warning."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            call()
        except (RuntimeError, NotImplementedError) as error:
            return str(error)
    return str(warned[0].message)


def test_messages_of_the_builtin() -> None:
    """They stand verbatim where people who search for them find what makes them go away."""
    x = torch.randn(1, 2, 4, 8, requires_grad=True)

    def squares(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q).square().sum()

    (gradient,) = torch.autograd.grad(squares(x), x, create_graph=True)
    calls: list[Callable[[], Any]] = [
        lambda: gradient.sum().backward(),
        lambda: torch.func.jvp(squares, (x.detach(),), (x.detach(),)),
        lambda: torch.vmap(squares)(x.detach().expand(3, 1, 2, 4, 8)),
    ]
    pages = [README, DERIVATIVES]
    for call in calls:
        message = re.split(r"\s(?:Please|\(Triggered)", of_the_builtin(call))[0]
        assert "_scaled_dot_product_flash_attention_for_cpu" in message
        for page in pages:
            assert message in page.read_text()
        with torch_attn.replacing_sdpa():
            (gradient,) = torch.autograd.grad(squares(x), x, create_graph=True)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                call()


@pytest.mark.slow  # reads all docstrings
def test_reference(tmp_path: Path) -> None:
    """What `make docs` makes, without a warning; it has every public name."""
    run_python("-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", ".", str(tmp_path))
    page = (tmp_path / "docs" / "reference.html").read_text()
    names = [
        f"torch_attn.{name}" for name in torch_attn.__all__ if name not in ("nn", "__version__")
    ]
    names += [f"torch_attn.plots.{name}" for name in torch_attn.plots.__all__ if name.islower()]
    names += ["torch_attn.nn.MultiheadAttention", "torch_attn.reference.sdpa"]
    assert [name for name in names if f'id="{name}"' not in page] == []


# Runs the examples, with their lines of torch_attn or without; prints what they raise.
RUN_EXAMPLES = """
import importlib, sys, torch, torch_attn
if sys.argv[1] == "without":
    torch_attn.replace_sdpa = torch_attn.convert = lambda *_: None
    torch.backends.mha.set_fastpath_enabled(False)
for name in sys.argv[2:]:
    try:
        importlib.import_module(f"examples.python.{name}").main(steps=2)
    except (RuntimeError, NotImplementedError) as error:
        print(name, str(error).splitlines()[0], sep=": ")
"""


@pytest.mark.slow  # runs whole programs
def test_examples_in_python() -> None:
    """They run, and without the line that they point to the built-in raises what they quote."""

    def said(how: str, *names: str) -> list[str]:
        printed = run_python("-c", RUN_EXAMPLES, how, *names)
        return [line for line in printed.splitlines() if not line.startswith("step ")]

    assert said("with", "meanflow", "force_field", "gradient_penalty", "private_texts") == []
    raised = said("without", "meanflow", "gradient_penalty")
    assert len(raised) == 2
    for line in raised:
        name, _, message = line.partition(": ")
        text = (ROOT / "examples" / "python" / f"{name}.py").read_text()
        assert message in " ".join(text.split())


def test_modules_of_the_readmes_table() -> None:
    """A cell is what a reader types, after the import below the table."""
    text = README.read_text()
    found = set(re.findall(r"\battn_(\w+)\.(\w+)\(", text))
    assert len(found) >= 3
    assert "from torch_attn.integrations import transformers as attn_transformers" in text
    for module, function in found:
        source = (ROOT / "torch_attn" / "integrations" / f"{module}.py").read_text()
        assert f"\ndef {function}(" in source or f'"{function}"' in source, (module, function)
