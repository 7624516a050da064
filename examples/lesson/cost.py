"""Chapter: what attention costs. Time and memory of a forward and backward as the text grows.

    python -m examples.lesson.cost attn 512 1024

runs steps of one operator in a process of its own, without and with dropout, and prints for each
length by how many bytes the peak of its resident memory (VmHWM of Linux) grew, whoever allocated
them: tensors, the scratch of kernels, libraries.
"""

from __future__ import annotations

import ctypes
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_attn
from examples import plots

from .page import Numbers, Picture, Section, theme
from .threads import one_thread
from .wording import listed, number, percent
from .wording import times as times_of

HEADS, HEAD_DIM, DROPOUT = 1, 64, 0.1
ROOT = Path(__file__).parents[2]
MIB = 2**20


def naive(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0) -> Tensor:
    """The formula as the sources write it: every step makes a matrix [heads, L, S]."""
    scores = query @ key.mT / math.sqrt(key.size(-1))
    weights = torch.softmax(scores, dim=-1)
    return F.dropout(weights, dropout_p) @ value


OPERATORS: dict[str, Callable[..., Tensor]] = {
    "naive": naive,
    "built-in": F.scaled_dot_product_attention,
    "attn": torch_attn.sdpa,
}


LONGEST_MATRIX = 4096  # tokens; a matrix of 8,192 would be four times as large
LONGEST_TIMED = 8192


def writes_scores(name: str, dropout_p: float) -> bool:
    """Whether it makes matrices [L, S]: the naive operator always, the built-in for dropout."""
    return name == "naive" or (name == "built-in" and dropout_p > 0)


def measured_at(name: str, length: int, dropout_p: float) -> bool:
    return length <= LONGEST_MATRIX or not writes_scores(name, dropout_p)


def make(length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value [1, 1, length, 64] that want gradients; the same on every call."""
    generator = torch.Generator().manual_seed(length)
    shape = (3, 1, HEADS, length, HEAD_DIM)
    query, key, value = torch.randn(shape, generator=generator).unbind()
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_()


def step(name: str, inputs: Sequence[Tensor], dropout_p: float = 0.0) -> None:
    """One forward and backward, as in training."""
    output = OPERATORS[name](*inputs, dropout_p=dropout_p)
    torch.autograd.grad(output, inputs, output.detach())


# --- what is kept, exactly ------------------------------------------------------------------------


def kept_bytes(name: str, length: int, dropout_p: float = 0.0) -> int:
    """How many bytes the forward keeps for the backward, with query, key, value and the output.

    Each storage once, however many views of it are kept.
    """
    storages: dict[int, int] = {}
    kept: list[Tensor] = []  # alive, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)
        return tensor

    inputs = make(length)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept.append(OPERATORS[name](*inputs, dropout_p=dropout_p))
    for tensor in (*inputs, kept[-1]):
        pack(tensor)
    return sum(storages.values())


# --- time -----------------------------------------------------------------------------------------


def times(length: int, dropout_p: float = 0.0, budget: float = 0.4) -> dict[str, float]:
    """Operator -> seconds of a step: the median of rounds in which each has its turn, or NaN.

    On one thread, and in seconds of processor time, so that other programs do not count. Rounds go
    on for about `budget` seconds, but there are at least 3 and at most 30.
    """
    inputs = make(length)
    names = [name for name in OPERATORS if measured_at(name, length, dropout_p)]
    measured: dict[str, list[float]] = {name: [] for name in names}
    spent, rounds = 0.0, 0
    with one_thread():
        for name in names:
            step(name, inputs, dropout_p)  # memory and caches are as in the middle of training
        while rounds < 3 or (spent < budget and rounds < 30):
            # Who goes first changes, so that none always finds the machine warm.
            for name in names[:: 1 if rounds % 2 else -1]:
                start = time.process_time()
                step(name, inputs, dropout_p)
                measured[name].append(time.process_time() - start)
                spent += measured[name][-1]
            rounds += 1
    return {name: median(measured[name]) if name in names else math.nan for name in OPERATORS}


def exponent(lengths: Sequence[int], values: Sequence[float]) -> float:
    """The power of the length with which the values grow: the slope of a line through both logs."""
    x = torch.tensor(lengths, dtype=torch.float64).log2()
    y = torch.tensor(values, dtype=torch.float64).log2()
    x, y = x - x.mean(), y - y.mean()
    return ((x * y).sum() / x.square().sum()).item()


# --- memory ---------------------------------------------------------------------------------------


def memory(name: str, lengths: Sequence[int]) -> dict[float, list[float]]:
    """Dropout -> bytes that a step takes at each length beside its inputs, in a new process.

    NaN where it is not measured.
    """
    command = [sys.executable, "-m", "examples.lesson.cost", name, *map(str, lengths)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[float, list[float]] = json.loads(
        done.stdout, object_pairs_hook=lambda pairs: {float(p): values for p, values in pairs}
    )
    return found


def resident_bytes(field: str) -> int:
    """VmRSS: resident now. VmHWM: at most, since the process began or clear_refs was written."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no line {field}")


def growth(name: str, length: int, dropout_p: float) -> int:
    """Bytes by which the peak of this process grows in a step."""
    inputs = make(length)
    # What was freed goes back to the system, and the peak starts anew.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes("VmRSS")
    step(name, inputs, dropout_p)
    return resident_bytes("VmHWM") - before


def main(name: str, *lengths: str) -> None:
    torch.set_num_threads(1)
    found = {}
    for dropout_p in (0.0, DROPOUT):
        step(name, make(64), dropout_p)  # libraries are loaded, and their own memory is there
        found[str(dropout_p)] = [
            growth(name, length, dropout_p) if measured_at(name, length, dropout_p) else math.nan
            for length in map(int, lengths)
        ]
    print(json.dumps(found))


# --- the chapter ----------------------------------------------------------------------------------


def _lengths(quick: bool) -> list[int]:
    return [128, 256, 512, 1024] if quick else [2**i for i in range(7, 15)]


def STEPS(quick: bool) -> int:  # noqa: N802
    lengths = _lengths(quick)
    return 2 * sum(length <= LONGEST_TIMED for length in lengths) + len(OPERATORS)


def chapter(quick: bool, advance: Callable[[], None]) -> Section:
    lengths = _lengths(quick)
    seconds: dict[float, list[dict[str, float]]] = {0.0: [], DROPOUT: []}
    for dropout_p, found in seconds.items():
        for length in lengths:
            if length <= LONGEST_TIMED:
                found.append(times(length, dropout_p))
                advance()
    peaks = {}
    for name in OPERATORS:
        peaks[name] = memory(name, lengths)
        advance()

    section = Section(
        "cost",
        "What it costs: O(n²)",
        "After *Notes On: Scaled Dot-Product Attention* (October 14, 2024), on scalability",
    )
    _quadratic(section, lengths)
    _memory(section, lengths, peaks)
    _time(section, [n for n in lengths if n <= LONGEST_TIMED], seconds)
    return section


def _quadratic(section: Section, lengths: list[int]) -> None:
    last = min(LONGEST_MATRIX, lengths[-1])
    section.text(f"""
        The *Notes* name the price of attention: its scores are "stored in a matrix that grows
        quadratically with the length of the input sequence", so that the complexity is O(n²). Two
        things are in that sentence. The *work* is quadratic: each of n queries is multiplied with
        each of n keys. The *memory* is quadratic only if the matrix is stored.

        One step of training, forward and backward, was measured for one head of {HEAD_DIM}, in
        float32 and at lengths from {lengths[0]} to {lengths[-1]:,}, with three operators: the
        **naive** formula, softmax(Q Kᵀ / √dₖ) V line by line, as *Scaled Dot-Product Attention*
        writes it; PyTorch's **built-in** `F.scaled_dot_product_attention`; and **attn**. Operators
        that store matrices are measured up to {LONGEST_MATRIX:,} tokens. At {last:,} query, key,
        value and output are
        {number(4 * last * HEAD_DIM * 4 / MIB, 2)} MiB together; one matrix of scores is
        {number(last * last * 4 / MIB, 2)} MiB, and the naive formula needs several.
    """)
    section.text("""
        What is kept from the forward to the backward can be counted exactly, with query, key, value
        and output. The naive formula keeps a matrix of weights; attn keeps two numbers a row, from
        which the backward computes the weights again.
    """)
    naive, ours = ([kept_bytes(name, n) for n in lengths] for name in ("naive", "attn"))
    section.table(
        ["length", "naive", "of it L × S", "share", "attn", "attn, a token"],
        [
            [n, f"{a:,}", f"{4 * n * n:,}", percent(4 * n * n / a), f"{b:,}", b // n]
            for n, a, b in zip(lengths, naive, ours, strict=True)
            if n <= LONGEST_MATRIX
        ],
        "Bytes kept from the forward to the backward.",
    )


def _fit(lengths: list[int], row: list[float]) -> float:
    """The exponent over the three longest lengths that were measured."""
    points = [(n, x) for n, x in zip(lengths, row, strict=True) if not math.isnan(x)][-3:]
    return exponent(*map(list, zip(*points, strict=True)))


def _exponents(lengths: list[int], values: dict[str, list[float]]) -> dict[str, float]:
    return {name: _fit(lengths, row) for name, row in values.items()}


def _at(lengths: list[int], values: dict[str, list[float]], length: int) -> dict[str, float]:
    return {name: row[lengths.index(length)] for name, row in values.items()}


def _curves(
    name: str,
    lengths: list[int],
    values: dict[str, list[float]],
    title: str,
    ylabel: str,
    caption: str,
    alt: str,
) -> Picture:
    with theme():
        figure = plots.scaling(
            lengths, values, xlabel="length (tokens)", ylabel=ylabel, title=title
        )
    rows = [
        [n, *("" if math.isnan(row[i]) else row[i] for row in values.values())]
        for i, n in enumerate(lengths)
    ]
    return Picture(name, figure, caption, alt, Numbers(["length", *values], rows))


def _memory(
    section: Section, lengths: list[int], peaks: dict[str, dict[float, list[float]]]
) -> None:
    mib = {
        dropout_p: {name: [x / MIB for x in found[dropout_p]] for name, found in peaks.items()}
        for dropout_p in (0.0, DROPOUT)
    }
    plain, dropped = (_exponents(lengths, found) for found in mib.values())
    length = min(LONGEST_MATRIX, lengths[-1])
    at = {dropout_p: _at(lengths, found, length) for dropout_p, found in mib.items()}
    section.heading("Memory")
    section.text(f"""
        The peak of a process's resident memory grows in one step at {length:,} tokens by
        {number(at[0.0]["naive"])} MiB with the naive formula, {number(at[0.0]["built-in"])} MiB
        with the built-in and {number(at[0.0]["attn"])} MiB with attn. Fitted to the three longest
        texts of each, memory grows as the length to the power of {plain["naive"]:.2f},
        {plain["built-in"]:.2f} and {plain["attn"]:.2f}. (The naive formula's peak is
        {number(at[0.0]["naive"] * MIB / (4 * length**2), 2)} matrices at {length:,} tokens and
        {number(mib[0.0]["naive"][lengths.index(length // 4)] * MIB / (length**2 / 4), 2)} at
        {length // 4:,}, which is why its exponent is not 2. One head is the worst case for attn: to
        keep threads busy its backward cuts the keys into up to 16 chunks, each with a gradient of
        the query of its own, where there are fewer than 16 heads. That is the step in its curve,
        and it ends there.)

        With dropout of {DROPOUT:g} the built-in takes another way, which stores matrices:
        {number(at[DROPOUT]["built-in"])} MiB, and an exponent of {dropped["built-in"]:.2f}. attn
        stays at {number(at[DROPOUT]["attn"])} MiB ({dropped["attn"]:.2f}): which weights are
        dropped it draws again in the backward, from the same seed.
    """)
    section.pictures(
        *(
            _curves(
                f"cost-memory{suffix}",
                lengths,
                mib[dropout_p],
                title,
                "peak growth (MiB)",
                "Growth of the resident peak in one forward and backward, beside the inputs, in a "
                "process of its own. Short texts take less than what libraries allocate at a time.",
                f"At {length:,} tokens: "
                + listed([f"{name} {x:.0f} MiB" for name, x in at[dropout_p].items()])
                + ".",
            )
            for suffix, title, dropout_p in (
                ("", "Memory of a step", 0.0),
                ("-dropout", f"Memory, dropout {DROPOUT:g}", DROPOUT),
            )
        )
    )


def _time(
    section: Section, lengths: list[int], seconds: dict[float, list[dict[str, float]]]
) -> None:
    milliseconds = {
        dropout_p: {name: [1e3 * row[name] for row in found] for name in OPERATORS}
        for dropout_p, found in seconds.items()
    }
    exponents = {p: _exponents(lengths, found) for p, found in milliseconds.items()}
    length = min(LONGEST_MATRIX, lengths[-1])
    at = {dropout_p: _at(lengths, found, length) for dropout_p, found in milliseconds.items()}
    plain, dropped = at.values()
    section.heading("Time")
    section.text(f"""
        Time is another matter: **it grows at least quadratically with all three**, which compute
        the same products. Fitted to the three longest texts of each, the exponents are
        {exponents[0.0]["naive"]:.2f} for the naive formula,
        {exponents[0.0]["built-in"]:.2f} for the built-in and
        {exponents[0.0]["attn"]:.2f} for attn. What differs is the factor: at {length:,} tokens a
        step takes {number(plain["naive"])}, {number(plain["built-in"])} and {number(plain["attn"])}
        ms, so that the naive formula takes {times_of(plain["naive"] / plain["attn"])} as long as
        attn and the built-in {times_of(plain["built-in"] / plain["attn"])}. A matrix that is
        written and read costs time as well as room, and most where it no longer fits into the
        processor's caches: an exponent above 2 is the way there. With dropout they take
        {number(dropped["naive"])}, {number(dropped["built-in"])} and {number(dropped["attn"])} ms.

        So a text twice as long takes four times as long or longer with every operator; but it need
        not take four times the memory. The other challenge that the *Notes* name, a context of
        limited size, is eased by that and not removed.
    """)
    section.pictures(
        *(
            _curves(
                f"cost-time{suffix}",
                lengths,
                milliseconds[dropout_p],
                title,
                "processor time (ms)",
                "Medians of alternating rounds on one thread. Exponents: "
                + listed([f"{name} {x:.2f}" for name, x in exponents[dropout_p].items()])
                + ".",
                "Three nearly parallel lines on logarithmic axes; at "
                f"{length:,} tokens "
                + listed([f"{name} {x:.0f} ms" for name, x in at[dropout_p].items()])
                + ".",
            )
            for suffix, title, dropout_p in (
                ("", "Time of a step", 0.0),
                ("-dropout", f"Time, dropout {DROPOUT:g}", DROPOUT),
            )
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
