"""The tables of figures in the documentation, from results: ``python benchmarks/tables.py FILE``.

FILE is what bench.py, peers.py or models.py has written. Prints Markdown, to be pasted
into docs/performance.md and, the last of bench.py's, into README.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]

# The rows of README.md: their names there and in results.
README = {
    "1 x 12 x 2048": "1x12x2048",
    "1 x 8 x 2048, D = 128": "1x8x2048 D128",
    "causal, 2 x 12 x 512": "causal 2x12x512",
    "8 x 12 x 128": "8x12x128",
    "64 x 12 x 16": "64x12x16",
    "boolean mask, 2 x 12 x 1024": "bool mask 2x12x1024",
    "gradient of a mask, 1 x 12 x 1024": "mask gradient 1x12x1024",
    "dropout, 1 x 12 x 1024": "dropout 0.1 1x12x1024",
    "one query, 32 heads on 8, 4096 keys, D = 128": "decode GQA 32:8 x 4k D128",
}


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def table(headings: list[str], rows: Iterable[Iterable[str]]) -> str:
    rule = "|" + "---|" * len(headings)
    first = line(*headings).replace("|  |", "| |")
    return "\n".join([first, rule, *(line(*row) for row in rows)])


def by_dtype(rows: list[Row], cell: Callable[[Row], str]) -> Iterable[list[str]]:
    """A line for each case and pass, a cell for each dtype."""
    for case, which in dict.fromkeys((r["case"], r["pass"]) for r in rows):
        cells = {r["dtype"]: cell(r) for r in rows if (r["case"], r["pass"]) == (case, which)}
        yield [case, which, *(cells.get(dtype, "") for dtype in ("f32", "bf16", "f16"))]


def speed(rows: list[Row]) -> str:
    counted = any("of_peak_cycles" in r for r in rows)

    def cell(r: Row) -> str:
        cycles = [f"{r['of_peak_cycles']:.0%}"] if "of_peak_cycles" in r else []
        shares = ", ".join([f"{r['of_peak']:.0%}", *cycles])
        return f"{r['ours_ms']:.3g}, {r['ratio']:.2f}x, {shares}"

    what = f"f32 ms, ratio, of peak{', in cycles' if counted else ''}"
    chosen = [r for r in rows if not r["case"].startswith("length ")]
    return table(["shape, D = 64", "pass", what, "bf16", "f16"], by_dtype(chosen, cell))


def masked(rows: list[Row]) -> str:
    def cell(r: Row) -> str:
        return f"{r['ours_ms']:.3g}, {r['of_instead']:.2f}, {r['ratio']:.2f}x"

    what = "f32 ms, of the time without the mask, ratio"
    return table(["mask", "pass", what, "bf16", "f16"], by_dtype(rows, cell))


def options(rows: list[Row]) -> str:
    def cell(r: Row) -> str:
        flex = f", FlexAttention {r['flex_ms']:.3g}" if "flex_ms" in r else ""
        return f"{r['ours_ms']:.3g}, {r['of_instead']:.3g}{flex}"

    named = [{**r, "case": f"{r['option']}, {r['case']}"} for r in rows]
    found = ((*cells[:4],) for cells in by_dtype(named, cell))
    return table(["option", "pass", "f32 ms, of the time instead", "bf16"], found)


def derivatives(rows: list[Row]) -> str:
    lines = (
        [r["kind"], str(r["length"]), f"{r['ours_ms']:.3g}", f"{r['ratio']:.2f}", *mib(r)]
        for r in rows
    )
    return table(["", "L", "ms", "ratio", "MiB", "built-in's MiB"], lines)


def memory(rows: list[Row]) -> str:
    lines = ([r["kind"], str(r["length"]), *mib(r)] for r in rows)
    return table(["", "L", "MiB", "built-in's MiB"], lines)


def mib(r: Row) -> tuple[str, str]:
    return f"{r['ours_mib']:.0f}", f"{r['builtin_mib']:.0f}"


def threads(rows: list[Row]) -> str:
    ratios = [r["ratio"] for r in rows]
    return f"{rows[0]['threads']} threads: {min(ratios):.2f} to {max(ratios):.2f} times one."


def readme(rows: list[Row]) -> str:
    ratios = {(r["case"], r["pass"], r["dtype"]): r["ratio"] for r in rows}

    def cell(*key: str) -> str:
        ratio = ratios.get(key)
        return "" if ratio is None else f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.0f}"

    columns = [
        (which, dtype) for which in ("forward", "backward") for dtype in ("f32", "bf16", "f16")
    ]
    lines = ([name, *(cell(case, *column) for column in columns)] for name, case in README.items())
    headings = ["", "forward f32", "bf16", "f16", "backward f32", "bf16", "f16"]
    return table(headings, lines)


def peers(rows: list[Row], gflops: Callable[[Row, str], float]) -> str:
    names = list(dict.fromkeys(name for r in rows for name in r["ms"]))

    def cell(r: Row, name: str) -> str:
        if name not in r["ms"]:
            return ""
        return f"{gflops(r, name):.0f} ({r['ms'][name] / r['ms']['attn']:.2f})"

    lines = ([r["case"], r["dtype"], *(cell(r, name) for name in names)] for r in rows)
    return table(["shape", "dtype", *names], lines)


def models(rows: list[Row]) -> str:
    def cell(r: Row) -> str:
        share = "" if r["attention"] is None else f", {r['attention']:.0%}"
        return f"{r['attn']:.3g}, {r['ratio']:.2f}x, {r['ratio_eager']:.2f}x{share}"

    lines = []
    for model, which in dict.fromkeys((r["model"], r["pass"]) for r in rows):
        chosen = [r for r in rows if (r["model"], r["pass"]) == (model, which)]
        cells = {r["dtype"]: cell(r) for r in chosen}
        lines.append([model, which, chosen[0]["counted"], *(cells[d] for d in ("f32", "bf16"))])
    what = "f32 a second, to the built-in, to eager, attention's share"
    return table(["model", "pass", "counted", what, "bf16"], lines)


def gpu(rows: list[Row]) -> str:
    """The time of each backend of the built-in on a GPU, divided by ours."""
    backends = {"FLASH": "FLASH", "FLASH det.": "FLASH, deterministic"}
    backends |= {"EFFICIENT": "EFFICIENT", "CUDNN": "cuDNN", "MATH": "math"}

    def rate(r: Row) -> str:
        unit = (
            f"{r['gbytes']:.0f} GB/s"
            if "gbytes" in r
            else f"{r.get('tflops', {}).get('attn', 0):.0f}"
        )
        return f"{unit}, {r['of_peak']:.0%}" if "of_peak" in r else ""

    def cells(r: Row) -> Iterable[str]:
        ratios = (f"{r['ratio'][b]:.2f}" if b in r["ratio"] else "" for b in backends)
        return (r["case"], r["pass"], f"{r['ms']['attn']:.3g}", rate(r), *ratios)

    headings = ["bf16", "pass", "ms", "TFLOP/s, of peak", *backends.values()]
    return table(headings, map(cells, rows))


def tables(result: dict[str, Any]) -> list[str]:
    """The tables of what a result has; older results have less."""
    if "gpu" in result.get("machine", {}):
        return [gpu(result["speed"])]
    if "models" in result:
        return [models(result["models"])]
    if "peers" in result:
        from peers import CASES

        flops = {case.name: case.flops("forward") for case in CASES}
        return [peers(result["peers"], lambda r, name: flops[r["case"]] / r["ms"][name] / 1e6)]
    makers = {
        "speed": speed,
        "masked": masked,
        "options": options,
        "functions": options,
        "derivatives": derivatives,
        "memory": memory,
        "threads": threads,
    }
    made = [make(result[name]) for name, make in makers.items() if result.get(name)]
    return [*made, readme(result["speed"])] if result["speed"] else made


if __name__ == "__main__":
    print("\n\n".join(tables(json.loads(Path(sys.argv[1]).read_text()))))
