"""examples/cpp/generate: a GPT with a cache in pages writes in C++ what Python writes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from _cmake import build_example, run, succeed

pytestmark = pytest.mark.slow  # trains a model and compiles a program

# The cache's: keys and values of 2 layers, 32 texts of 192 tokens, 4 heads.
ROWS = 2 * 2 * 32 * 192 * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "gpt.pt"
    succeed(sys.executable, "-m", "examples.cpp.generate.train", "--out", path)
    return path


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_example("generate", tmp_path_factory.mktemp("build"))


def test_text_is_that_of_python(program: Path, model: Path) -> None:
    expected = torch.load(model)["text"]
    # Many different characters, so that a wrong cache cannot write the same.
    assert len(set(expected)) > 20
    written, _, rates = succeed(program, model).partition("\n\nprefill: ")
    assert written == expected
    assert "the text equals Python's" in rates
    assert f"\ncache: float, {ROWS * 4 * 32} bytes\n" in rates
    check_many(rates)
    assert all(float(rate) > 0 for rate in re.findall(r" (\d+) a second", rates))


def test_int8_writes_what_float_writes(program: Path, model: Path) -> None:
    """A scale that is 10% off changes the text after 20 characters. A text may differ later on."""
    written, _, rates = run(program, model, "--cache", "int8").stdout.partition("\n\nprefill: ")
    expected = torch.load(model)["text"]
    agreeing = sum(map(str.__eq__, written, expected))
    assert agreeing > len(expected) / 2, written
    assert f"\ncache: int8, {ROWS * (32 + 4)} bytes\n" in rates  # 32 numbers and their scale


def check_many(rates: str) -> None:
    """What the program says of many prompts: it writes the same at once, and faster."""
    found = re.search(
        r"32 prompts: (\d+) tokens written\n"
        r"at once: (\d+) a second\none by one: (\d+) a second\nthe texts are the same\n$",
        rates,
    )
    assert found, rates
    written, at_once, one_by_one = map(int, found.groups())
    assert written == sum(192 - (1 + n * 192 // 64) for n in range(32))
    assert at_once > one_by_one


def test_another_text_is_an_error(program: Path, model: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.pt"
    torch.save(torch.load(model) | {"text": "Something else"}, wrong)
    done = run(program, wrong)
    assert done.returncode == 1
    assert "the text differs from Python's:\nSomething else" in done.stdout


def test_own_prompt_fills_the_context(program: Path, model: Path) -> None:
    written, _, rates = succeed(program, model, "The extended").partition("\n\nprefill: ")
    assert written.startswith("The extended form")
    assert len(written) == 192
    assert rates.startswith("12 tokens")
    assert "decode: 179 tokens" in rates  # what follows the last character is never asked for
    check_many(rates)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.pt"], "cannot read none.pt: python -m examples.cpp.generate.train"),
        (["MODEL", "Привет"], "does not know the character 'П'"),
        (["MODEL", ""], "the prompt is empty"),
        (["MODEL", "a" * 193], "at most 192 characters, not 193"),
        (["MODEL", "--cache", "int4"], "--cache is 'int4': it must be float or int8"),
        (["MODEL", "--cache"], "--cache is '': it must be float or int8"),
        ([], "usage: "),
    ],
)
def test_wrong_use(program: Path, model: Path, arguments: list[str], message: str) -> None:
    done = run(program, *(str(model) if word == "MODEL" else word for word in arguments))
    assert done.returncode in (1, 2)
    assert message in done.stderr


def test_other_files_are_refused(program: Path, tmp_path: Path) -> None:
    torch.save({"something": torch.ones(3)}, tmp_path / "other.pt")
    done = run(program, tmp_path / "other.pt")
    assert done.returncode == 1
    assert f"{tmp_path / 'other.pt'} is not what examples.cpp.generate.train writes" in done.stderr
