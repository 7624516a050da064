"""Draws the results of bench.py: ``python benchmarks/chart.py results.json speed.png``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = {"attn": "#0072b2", "built-in": "#d55e00"}


def draw(result: dict[str, Any], path: Path) -> None:
    """Speed over length: a panel for each pass and dtype, ours and the built-in in each."""
    rows = [r for r in result["speed"] if r["case"].startswith("length ")]
    panels = [(w, d) for w in ("forward", "backward") for d in ("f32", "bf16")]
    figure, axes = plt.subplots(2, 2, figsize=(10, 7), sharex=True, layout="constrained")
    for axis, (which, dtype) in zip(axes.flat, panels, strict=True):
        chosen = [r for r in rows if (r["pass"], r["dtype"]) == (which, dtype)]
        lengths = [r["length"] for r in chosen]
        for name, column in (("attn", "gflops"), ("built-in", "builtin_gflops")):
            rates = [r[column] for r in chosen]
            axis.plot(lengths, rates, "o-", color=COLORS[name], label=name)
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [str(n) for n in lengths])
        axis.minorticks_off()
        peak = result["machine"]["peak_gflops"][dtype]
        axis.axhline(peak, color="0.4", linestyle="--", label="peak of the machine")
        axis.set_ylim(0, 1.1 * peak)
        axis.set_title(f"{which}, {dtype}", loc="left", fontweight="bold")
        axis.grid(color="0.9")
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("GFLOP/s")
    for axis in axes[-1]:
        axis.set_xlabel("length: queries = keys")
    axes[0, 0].legend(frameon=False, loc="lower right")
    machine = result["machine"]
    figure.suptitle(
        f"Attention, 1 x 12 heads x length, head_dim 64: {machine['cpu']}, "
        f"{machine['threads']} threads, {machine['capability']}, torch {machine['torch']}",
        fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
