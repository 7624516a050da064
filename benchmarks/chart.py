"""Draws the results of bench.py: ``python benchmarks/chart.py results.json speed.png``."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = {
    "attn": "#0072b2",
    "built-in": "#d55e00",
    "FLASH": "#d55e00",
    "FLASH det.": "#e69f00",
    "EFFICIENT": "#009e73",
    "CUDNN": "#cc79a7",
    "MATH": "0.5",
}


@dataclass
class Panel:
    """Rates over lengths, by name: NaN where there is none."""

    title: str
    lengths: list[int]
    rates: dict[str, list[float]]
    peak: float


def cpu_panels(result: dict[str, Any]) -> list[list[Panel]]:
    """A panel for each pass and dtype."""
    rows = [r for r in result["speed"] if r["case"].startswith("length ")]

    def panel(which: str, dtype: str) -> Panel:
        chosen = [r for r in rows if (r["pass"], r["dtype"]) == (which, dtype)]
        columns = {"attn": "gflops", "built-in": "builtin_gflops"}
        rates = {name: [r[column] for r in chosen] for name, column in columns.items()}
        peak = result["machine"]["peak_gflops"][dtype]
        return Panel(f"{which}, {dtype}", [r["length"] for r in chosen], rates, peak)

    return [[panel(which, dtype) for dtype in ("f32", "bf16")] for which in ("forward", "backward")]


def gpu_panels(result: dict[str, Any]) -> list[list[Panel]]:
    """A row of panels for each pass and causal or not, a column for each head_dim; bfloat16."""
    rows = [
        r
        for r in result["speed"]
        if r["dtype"] == "bf16" and r["pass"] in ("forward", "backward")
        if r["keys"] == r["length"] and not r["mask"] and not r["dropout"]
    ]
    dims = sorted({r["head_dim"] for r in rows})
    kinds = list(dict.fromkeys((r["pass"], r["causal"]) for r in rows))

    def panel(which: str, causal: bool, dim: int) -> Panel:
        shape = (which, causal, dim)
        chosen = [r for r in rows if (r["pass"], r["causal"], r["head_dim"]) == shape]
        names = [name for name in COLORS if any(name in r["tflops"] for r in chosen)]
        rates = {name: [r["tflops"].get(name, math.nan) for r in chosen] for name in names}
        title = f"{which}{', causal' if causal else ''}, head_dim {dim}"
        lengths = [r["length"] for r in chosen]
        return Panel(title, lengths, rates, result["machine"]["peak_tflops"]["bf16"])

    return [[panel(*kind, dim) for dim in dims] for kind in kinds]


def draw(result: dict[str, Any], path: Path) -> bool:
    """Speed over length, ours and others in each panel; False where no row has it."""
    machine = result["machine"]
    if "gpu" in machine:
        panels, unit = gpu_panels(result), "TFLOP/s"
        title = f"Attention, {machine['tokens']} tokens, bf16: {machine['gpu']}"
    else:
        panels, unit = cpu_panels(result), "GFLOP/s"
        title = (
            f"Attention, 1 x 12 heads x length, head_dim 64: {machine['cpu']}, "
            f"{machine['threads']} threads, {machine['capability']}"
        )
    if not panels:
        return False
    rows, columns = len(panels), len(panels[0])
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(5 * columns, 3.5 * rows),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    lengths = sorted({n for row in panels for panel in row for n in panel.lengths})
    for row, panels_of_row in zip(axes, panels, strict=True):
        for axis, panel in zip(row, panels_of_row, strict=True):
            draw_panel(axis, panel, lengths)
        row[0].set_ylabel(unit)
    for axis in axes[-1]:
        axis.set_xlabel("length: queries = keys")
    # A panel may lack a name that another has.
    lines: dict[str, Any] = {}
    for axis in axes.flat:
        for line, name in zip(*axis.get_legend_handles_labels(), strict=True):
            lines.setdefault(name, line)
    where = "outside lower center"
    figure.legend(lines.values(), lines, loc=where, ncols=len(lines), frameon=False)
    figure.suptitle(f"{title}, torch {machine['torch']}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True


def draw_panel(axis: Any, panel: Panel, ticks: list[int]) -> None:
    for name, rates in panel.rates.items():
        axis.plot(panel.lengths, rates, "o-", color=COLORS[name], label=name)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(n) for n in ticks])
    axis.minorticks_off()
    axis.axhline(panel.peak, color="0.4", linestyle="--", label="peak of the machine")
    axis.set_ylim(0, 1.1 * panel.peak)
    axis.set_title(panel.title, loc="left", fontweight="bold")
    axis.grid(color="0.9")
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
