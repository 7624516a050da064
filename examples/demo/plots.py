"""What the pictures have in common."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from torch_attn.plots import PALETTE

COLORS = PALETTE[:4]

mpl.rcParams.update(
    {
        "font.size": 11,
        "axes.titlesize": 13,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlepad": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#e4e4e4",
        "grid.linewidth": 0.7,
        "legend.frameon": False,
        "savefig.dpi": 150,
    }
)


def figure(width: float, height: float) -> Figure:
    """A figure that needs no display; sizes in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def save(picture: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path)
    return path
