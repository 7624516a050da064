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
MARKERS = {"attn": "o", "built-in": "s"}  # also apart where colours are not


@dataclass
class Panel:
    """Rates, or memory, over lengths, by name: NaN where there is none."""

    title: str
    lengths: list[int]
    values: dict[str, list[float]]
    unit: str
    peak: float | None = None


def cpu_panels(result: dict[str, Any]) -> list[list[Panel]]:
    """A panel for each pass and dtype, and a row of memory; older results have less of both."""
    rows = [r for r in result["speed"] if r["case"].startswith("length ")]
    dtypes = list(dict.fromkeys(r["dtype"] for r in rows))

    def panel(which: str, dtype: str) -> Panel:
        chosen = [r for r in rows if (r["pass"], r["dtype"]) == (which, dtype)]
        columns = {"attn": "gflops", "built-in": "builtin_gflops"}
        rates = {name: [r[column] for r in chosen] for name, column in columns.items()}
        peak = result["machine"]["peak_gflops"][dtype]
        lengths = [r["length"] for r in chosen]
        return Panel(f"{which}, {dtype}", lengths, rates, "GFLOP/s", peak)

    passes = ("forward", "backward") if rows else ()
    speed = [[panel(which, dtype) for dtype in dtypes] for which in passes]
    return [*speed, *filter(None, [memory_panels(result)])]


def memory_panels(result: dict[str, Any]) -> list[Panel]:
    """MiB beside the inputs: first derivatives, with dropout, second derivatives."""
    memory = result.get("memory", [])
    rows = [*memory, *(r for r in result["derivatives"] if memory and r["kind"] != "jvp")]

    def panel(kind: str) -> Panel:
        chosen = [r for r in rows if r["kind"] == kind]
        columns = {"attn": "ours_mib", "built-in": "builtin_mib"}
        values = {name: [r[column] for r in chosen] for name, column in columns.items()}
        return Panel(f"memory, {kind}", [r["length"] for r in chosen], values, "MiB")

    return [panel(kind) for kind in dict.fromkeys(r["kind"] for r in rows)]


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
        return Panel(title, lengths, rates, "TFLOP/s", result["machine"]["peak_tflops"]["bf16"])

    return [[panel(*kind, dim) for dim in dims] for kind in kinds]


def title_of(result: dict[str, Any]) -> str:
    machine = result["machine"]
    if "gpu" in machine:
        title = f"Attention, {machine['tokens']} tokens, bf16: {machine['gpu']}"
    else:
        memory = "; memory beside the inputs, 1 x 2 heads, f32" if result.get("memory") else ""
        cores = f"{machine['cores']} cores, " if "cores" in machine else ""
        title = (
            f"Attention, head_dim 64: speed, 1 x 12 heads{memory}\n{machine['cpu']}, {cores}"
            f"{machine['threads']} threads, {machine['capability']}"
        )
    return f"{title}, torch {machine['torch']}"


def draw(result: dict[str, Any], path: Path) -> bool:
    """Speed over length, ours and others in each panel; False where no row has it."""
    panels = gpu_panels(result) if "gpu" in result["machine"] else cpu_panels(result)
    if not panels:
        return False
    rows, columns = len(panels), max(map(len, panels))
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(5 * columns, 3.5 * rows),
        squeeze=False,
        layout="constrained",
    )
    for row, panels_of_row in zip(axes, panels, strict=True):
        lengths = sorted({n for panel in panels_of_row for n in panel.lengths})
        for axis, panel in zip(row, panels_of_row, strict=False):
            draw_panel(axis, panel, lengths)
        for axis in row[len(panels_of_row) :]:
            axis.set_axis_off()
        row[0].set_ylabel(panels_of_row[0].unit)
        if panels_of_row[0].peak is None:
            top = max(axis.get_ylim()[1] for axis in row[: len(panels_of_row)])
            for axis in row[: len(panels_of_row)]:
                axis.set_ylim(1, top)
    for axis in axes[-1]:
        axis.set_xlabel("length: queries = keys")
    # A panel may lack a name that another has.
    lines: dict[str, Any] = {}
    for axis in axes.flat:
        for line, name in zip(*axis.get_legend_handles_labels(), strict=True):
            lines.setdefault(name, line)
    where = "outside lower center"
    figure.legend(lines.values(), lines, loc=where, ncols=len(lines), frameon=False)
    figure.suptitle(title_of(result), fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True


def draw_panel(axis: Any, panel: Panel, ticks: list[int]) -> None:
    for name, values in panel.values.items():
        axis.plot(
            panel.lengths, values, MARKERS.get(name, "o") + "-", color=COLORS[name], label=name
        )
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(n) for n in ticks])
    axis.set_xlim(ticks[0] / 1.2, ticks[-1] * 1.2)
    axis.minorticks_off()
    if panel.peak is None:  # grows as a power of the length, which is the slope
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
    else:
        axis.axhline(panel.peak, color="0.4", linestyle="--", label="peak of the machine")
        # Other work on the machine may have lowered the peak.
        rates = [rate for values in panel.values.values() for rate in values if rate == rate]
        axis.set_ylim(0, 1.1 * max(panel.peak, *rates))
    axis.set_title(panel.title, loc="left", fontweight="bold")
    axis.grid(color="0.9")
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
