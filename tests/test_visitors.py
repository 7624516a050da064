"""The files for visitors: a workflow runs what CI runs, and versions agree."""

from __future__ import annotations

import re
from pathlib import Path

import torch_attn

ROOT = Path(__file__).parents[1]


def test_a_workflow_runs_what_ci_runs() -> None:
    for workflow in (ROOT / ".github" / "workflows").iterdir():
        assert re.search(r"^ *- run: .*\.ci/run\b", workflow.read_text(), re.MULTILINE)


def test_citation() -> None:
    """Cites the version that there is; invents no person and no address."""
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {torch_attn.__version__}\n" in citation
    for name in ("CITATION.cff", "SECURITY.md", ".github/ISSUE_TEMPLATE/bug.md"):
        assert not re.search(r"https?:|@\w+\.\w", (ROOT / name).read_text())


def test_an_issue_asks_for_the_environment() -> None:
    assert "python -m torch_attn" in (ROOT / ".github/ISSUE_TEMPLATE/bug.md").read_text()


def test_contributing_begins_with_the_first_change() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert text.index("## ") == text.index("## Your first change")
