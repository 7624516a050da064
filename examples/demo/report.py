"""How the demo talks: one console, one kind of table, and failures a person can read."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

console = Console(highlight=False)


class DemoError(Exception):
    """Something the demo promises did not hold."""


def check(holds: bool, promise: str) -> None:
    """Prints a promise that holds; raises DemoError for one that does not."""
    if not holds:
        raise DemoError(promise)
    console.print(f"  [green]ok[/] {promise}")


def heading(title: str, explanation: str) -> None:
    console.print()
    console.rule(f"[bold]{title}", align="left")
    console.print(explanation, style="dim")


def table(*columns: str, caption: str | None = None) -> Table:
    """A table whose first column is text and whose others are numbers."""
    result = Table(caption=caption, caption_justify="left")
    for i, column in enumerate(columns):
        result.add_column(column, justify="right" if i else "left")
    return result


def progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
