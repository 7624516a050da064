"""How many instructions the tensor cores' kernels issue a tile, in the machine code for sm_90.

Nothing of this runs: no GPU is needed, but nvcc and nvdisasm are (of the CUDA toolkit, or of the
packages triton or nvidia-cuda-nvdisasm).
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cuda.programs import HOPPER, find

ROOT = Path(__file__).parents[1]
NVCC, NVDISASM = find("nvcc"), find("nvdisasm")
pytestmark = [
    pytest.mark.slow("csrc/core", "csrc/cuda"),  # compiles kernels
    pytest.mark.skipif(
        not (NVCC and NVDISASM), reason="not run: nvcc and nvdisasm are not both there"
    ),
]


class Instruction(NamedTuple):
    predicate: str
    name: str
    operands: str


class Kernel(NamedTuple):
    instructions: list[Instruction]
    labels: dict[str, int]

    def after(self, at: int) -> list[int]:
        """The instructions that may come next."""
        predicate, name, operands = self.instructions[at]
        following = [at + 1] if at + 1 < len(self.instructions) else []
        if name.startswith(("EXIT", "RET")):
            return following if predicate else []
        if not name.startswith("BRA") or name.startswith("BRA.DIV"):
            return following
        *condition, target = operands.replace("`(", "").replace(")", "").split(", ")
        always = not predicate and not condition
        return [self.labels[target], *([] if always else following)]


def disassemble(cubin: Path) -> Kernel:
    text = subprocess.run(
        [NVDISASM, "-c", cubin], capture_output=True, text=True, check=True
    ).stdout
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    code = text[text.index("\n.text.") :]
    for line in code.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(instructions)
        if found := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:(@!?\w+) +)?(\S+) *(.*?) *;", line):
            instructions.append(Instruction(found[1] or "", found[2], found[3]))
    return Kernel(instructions, labels)


def in_order(kernel: Kernel) -> tuple[list[int], set[tuple[int, int]]]:
    """Instructions, each after those that lead there but for loops; the steps that close loops."""
    closing = set()
    postorder: list[int] = []
    state = {0: "open"}
    stack: list[tuple[int, Iterator[int]]] = [(0, iter(kernel.after(0)))]
    while stack:
        at, successors = stack[-1]
        following = next(successors, None)
        if following is None:
            postorder.append(at)
            state[at] = "done"
            stack.pop()
        elif following not in state:
            state[following] = "open"
            stack.append((following, iter(kernel.after(following))))
        elif state[following] == "open":
            closing.add((at, following))
    return postorder[::-1], closing


# What a cap (tanh), ALiBi (distances) and numbers that are not finite take.
SELDOM = r"MUFU\.RCP|I2F|.*\b0x7f80\b"
# The same, but for a cap that is small: see Tanh in csrc/cuda/mma/scores.cuh.
SELDOM_BESIDE_A_CAP = r"MUFU\.TANH|I2F|.*\b0x7f80\b"
# And where there is a mask, but no ALiBi: distances are absolute values.
SELDOM_BESIDE_A_MASK = rf"{SELDOM}|.*\|R\d+\|"


def passes(
    kernel: Kernel, most: tuple[str, ...], rare: str = SELDOM
) -> Iterator[list[Instruction]]:
    """For each loop, the instructions of one pass through it.

    The pass is one with fewest of `rare`, then most of each of `most`, and else with fewest
    instructions: what a tile takes in which nothing is hidden or left over. Loops within count
    once.
    """
    names = [instruction.name for instruction in kernel.instructions]
    counted = [re.compile(pattern) for pattern in most]
    seldom, texts = re.compile(rare), [f"{i.name} {i.operands}" for i in kernel.instructions]
    order, closing = in_order(kernel)
    costs = {
        at: (
            -int(bool(seldom.match(texts[at]))),
            *(int(bool(c.match(names[at]))) for c in counted),
            -1,
        )
        for at in order
    }
    for head in {to for _, to in closing}:
        best = {head: (costs[head], -1)}  # and the instruction before
        ends = []
        for at in order[order.index(head) :]:
            if at not in best:
                continue
            if (at, head) in closing:
                ends.append(at)
            for to in kernel.after(at):
                sums = tuple(map(sum, zip(best[at][0], costs[to], strict=True)))
                if (at, to) not in closing and (to not in best or sums > best[to][0]):
                    best[to] = sums, at
        at = max(ends, key=lambda end: best[end][0], default=-1)
        path = []
        while at >= 0:
            path.append(kernel.instructions[at])
            at = best[at][1]
        yield path[::-1]


def main_loop(kernel: Kernel, most: tuple[str, ...], loop: str) -> list[Instruction]:
    """A pass through the loop over tiles.

    It is the loop with most of most[0], of these with most of `loop`, and the shortest.
    """
    found = passes(kernel, most)
    return max(found, key=lambda path: (count(path, most[0]), count(path, loop), -len(path)))


def count(path: list[Instruction], pattern: str) -> int:
    return sum(bool(re.match(pattern, instruction.name)) for instruction in path)


class Limit(NamedTuple):
    """A limit of the loop over tiles."""

    kernel: str
    params: str
    products: int  # HMMA
    instructions: int
    # See main_loop(). Also what copies the next tile and reads of its rows: the last one has none.
    most: tuple[str, ...] = ("LDGSTS", r"LDG\.")
    loop: str = "HMMA"
    spilled: int = 0  # bytes that registers have no place for


def backward(dim: int, gradient: str, products: int) -> Limit:
    """A pass of grad_query has twice the rows of one of the keys' gradients."""
    kernel = f"BackwardMma<BFloat16, {dim}, MmaGradient::{gradient}, false>"
    return Limit(kernel, "BackwardParams", products, 6 * products)


def masked(dim: int, instructions: int, boolean: bool) -> Limit:
    """With a mask, of a tile of which each lane's first two rows show some.

    A boolean mask is read two numbers at a time, one of bfloat16 by ldmatrix, which K is, too.
    """
    kernel = f"ForwardMma<BFloat16, {dim}, 2, true>"
    read, loop = (r"LDS\.U16", r"LDS\.U16") if boolean else ("LDSM", "LDGSTS")
    most = (read, "LDGSTS", r"LDS\.128", "FFMA")
    spilled = 8 if dim == 128 else 0  # an address, outside of a tile
    return Limit(kernel, "ForwardParams", 2 * dim, instructions, most, loop, spilled)


LIMITS = {
    # Three blocks a multiprocessor took 0.83 of the time of two on an H100, though each thread
    # reads four addresses from memory, once a tile.
    "forward, 64": Limit(
        "ForwardMma<BFloat16, 64, 2, false>", "ForwardParams", 128, 724, spilled=16
    ),
    "forward, 128": Limit("ForwardMma<BFloat16, 128, 2, false>", "ForwardParams", 256, 1020),
    "forward in pages, 64": Limit(
        "ForwardMma<BFloat16, 64, 2, false, true>", "ForwardParams", 128, 860
    ),
    "forward in pages, 128": Limit(
        "ForwardMma<BFloat16, 128, 2, false, true>", "ForwardParams", 256, 1160
    ),
    "forward with a mask, 64": masked(64, 1046, boolean=False),
    "forward with a mask, 128": masked(128, 1446, boolean=False),
    "forward with a boolean mask, 64": masked(64, 1071, boolean=True),
    "forward with a boolean mask, 128": masked(128, 1481, boolean=True),
    "latent": Limit("LatentMma<BFloat16>", "ForwardParams", 68, 500, most=("LDGSTS",)),
    "grad_query, 64": backward(64, "query", 192),
    "grad_query, 128": backward(128, "query", 192),
    "grad_key and grad_value, 64": backward(64, "key_and_value", 128),
    "grad_key and grad_value, 128": backward(128, "key_and_value", 128),
}


@functools.cache
def compile_kernel(
    name: str, params: str = "ForwardParams", architecture: tuple[str, ...] = tuple(HOPPER)
) -> tuple[Kernel, str]:
    """Compiles one instantiation. Returns its code, and what ptxas says of it."""
    kind, what = re.fullmatch(r"([A-Z][a-z]+)\w*?(Mma|Wgmma)", name.partition("<")[0]).groups()  # type: ignore[union-attr]
    kind = "backward" if kind == "Grad" else kind
    with tempfile.TemporaryDirectory() as to:
        source, cubin = Path(to) / "kernel.cu", Path(to) / "kernel.cubin"
        source.write_text(
            f'#include "cuda/{what.lower()}/{kind.lower()}.cuh"\n'
            "namespace attn::cuda {\n"
            f"template __global__ void run_block<{name}>(const __grid_constant__ {params});\n"
            "}\n"
        )
        options = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "-fmad=false", *architecture]
        said = subprocess.run(
            [NVCC, *options, f"-I{ROOT / 'csrc'}", "-Xptxas=-v", "-cubin", source, "-o", cubin],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
        return disassemble(cubin), said


@pytest.mark.parametrize("name", LIMITS)
def test_instructions_of_a_tile(name: str) -> None:
    limit = LIMITS[name]
    kernel, said = compile_kernel(limit.kernel, limit.params)
    expected = (f"{limit.spilled} bytes {what}" for what in ("stack frame", "spill stores"))
    assert ", ".join(expected) in said, said
    path = main_loop(kernel, ("HMMA", *limit.most), limit.loop)
    assert count(path, "HMMA") == limit.products
    assert len(path) <= limit.instructions


class DecodeLimit(NamedTuple):
    """A limit of a warp's loop over tiles of keys, in which no key is hidden."""

    kernel: str
    products: int  # HMMA
    copies: int  # of a lane
    instructions: int
    registers: int  # so that three blocks fit, or two
    most: str = "MUFU"  # the branch that has most of these: see main_loop()
    keys: int = 16  # of a tile


DECODE_LIMITS = {
    "64": DecodeLimit("DecodeMma<BFloat16, 64, false, false>", 16, 8, 304, 168),
    "128": DecodeLimit("DecodeMma<BFloat16, 128, false, false>", 32, 16, 372, 168),
    "256": DecodeLimit("DecodeMma<BFloat16, 256, false, false>", 64, 32, 500, 255),
    "128, mask": DecodeLimit("DecodeMma<BFloat16, 128, true, false>", 32, 16, 404, 168),
    "256, mask, pages": DecodeLimit("DecodeMma<BFloat16, 256, true, true>", 64, 32, 640, 255),
    "128, pages": DecodeLimit("DecodeMma<BFloat16, 128, false, true>", 32, 16, 456, 168),
    # Both dtypes of 8 bits: int8 is widened by PRMT, float8_e4m3fn by F2FP.
    "64, int8": DecodeLimit(
        "DecodeMma<BFloat16, 64, false, false, true>", 32, 16, 856, 168, "PRMT", 32
    ),
    "64, e4m3": DecodeLimit(
        "DecodeMma<BFloat16, 64, false, false, true>", 32, 16, 832, 168, "F2FP", 32
    ),
    "64, int8, float16, pages": DecodeLimit(
        "DecodeMma<Half, 64, false, true, true>", 48, 16, 1048, 168, "PRMT", 32
    ),
    "128, int8": DecodeLimit(
        "DecodeMma<BFloat16, 128, false, false, true>", 32, 8, 736, 168, "PRMT"
    ),
    "128, e4m3": DecodeLimit(
        "DecodeMma<BFloat16, 128, false, false, true>", 32, 8, 716, 168, "F2FP"
    ),
    "256, int8": DecodeLimit(
        "DecodeMma<BFloat16, 256, false, false, true>", 64, 16, 1140, 255, "PRMT"
    ),
    # Weights are split, so that values are multiplied twice.
    "128, int8, float16": DecodeLimit(
        "DecodeMma<Half, 128, false, false, true>", 48, 8, 736, 168, "PRMT"
    ),
    "128, int8, float16, pages": DecodeLimit(
        "DecodeMma<Half, 128, false, true, true>", 48, 8, 760, 168, "PRMT"
    ),
}


@pytest.mark.parametrize("name", DECODE_LIMITS)
def test_instructions_of_a_tile_of_decoding(name: str) -> None:
    limit = DECODE_LIMITS[name]
    kernel, said = compile_kernel(limit.kernel)
    assert "0 bytes stack frame, 0 bytes spill stores" in said, said
    assert int(re.search(r"Used (\d+) registers", said)[1]) <= limit.registers  # type: ignore[index]
    path = main_loop(kernel, ("HMMA", "LDGSTS", "MUFU", limit.most), "HMMA")
    assert count(path, "HMMA") == limit.products
    assert count(path, "LDGSTS") == limit.copies
    # Half a weight a key, and 2 factors: the softmax is in the path.
    assert count(path, r"MUFU\.EX2") >= limit.keys // 2 + 2
    assert count(path, "BAR") == 0  # no warp waits for another
    assert len(path) <= limit.instructions


class HopperLimit(NamedTuple):
    """A limit of the loop over tiles of a consumer, in which no key is hidden."""

    kernel: str
    products: int  # HGMMA
    instructions: int
    registers: int  # so that three blocks fit, or two
    copies: int  # of a thread of the producer, for a tile
    copying: int  # instructions of the producer, for a tile
    exponentials: int = 66  # of the consumer
    in_memory: int = 0  # of the consumer's, how many read or write a register that is in memory


# What marks the way of a tile through the code with an option.
WAYS = {
    "": (("HGMMA",), SELDOM),
    "ALiBi": (("HGMMA", "FADD"), SELDOM),
    "cap": (("HGMMA", r"MUFU\.RCP"), SELDOM_BESIDE_A_CAP),
    "boolean mask": (("HGMMA", r"LDS\.U(16|8)", "LDGSTS"), SELDOM_BESIDE_A_MASK),
    "mask": (("HGMMA", "LDSM", "LDGSTS"), SELDOM),
    "mask of numbers": (("HGMMA", "LDSM", "LDGSTS", "FSETP"), SELDOM_BESIDE_A_MASK),
}


def passes_of(name: str, kernel: Kernel, products: int) -> Iterator[list[Instruction]]:
    """Passes through loops with `products`, of a limit whose name ends with an option or not."""
    option = name.rpartition(", ")[2]
    way = WAYS.get(option, WAYS[""])
    return (x for x in passes(kernel, *way) if count(x, "HGMMA") == products)


HOPPER_LIMITS = {
    "forward, 64": HopperLimit(
        "ForwardWgmma<BFloat16, 64, 3, 128, 4, false>", 12, 436, 160, 16, 120
    ),
    "forward, 128": HopperLimit(
        "ForwardWgmma<BFloat16, 128, 2, 128, 2, false>", 16, 488, 208, 32, 168
    ),
    "forward, 256": HopperLimit(
        "ForwardWgmma<BFloat16, 256, 2, 80, 2, false>", 21, 496, 224, 40, 196, 42
    ),
    "forward, 64, ALiBi": HopperLimit(
        "ForwardWgmma<BFloat16, 64, 3, 128, 4, false, Extra::terms>", 12, 544, 160, 16, 120, 68
    ),
    "forward, 64, cap": HopperLimit(
        "ForwardWgmma<BFloat16, 64, 3, 128, 4, false, Extra::terms>", 12, 816, 160, 16, 120, 130, 8
    ),
    "forward, 128, ALiBi": HopperLimit(
        "ForwardWgmma<BFloat16, 128, 2, 128, 2, false, Extra::terms>", 16, 604, 224, 32, 168, 68, 16
    ),
    "forward, 128, cap": HopperLimit(
        "ForwardWgmma<BFloat16, 128, 2, 128, 2, false, Extra::terms>",
        16,
        852,
        224,
        32,
        168,
        130,
        16,
    ),
    "forward, 256, ALiBi": HopperLimit(
        "ForwardWgmma<BFloat16, 256, 2, 80, 2, false, Extra::terms>", 21, 592, 224, 40, 196, 44, 4
    ),
    "forward, 256, cap": HopperLimit(
        "ForwardWgmma<BFloat16, 256, 2, 80, 2, false, Extra::terms>", 21, 744, 224, 40, 196, 82, 4
    ),
    "forward, 64, a tile of a mask that changes nothing": HopperLimit(
        "ForwardWgmma<BFloat16, 64, 2, 128, 4, false, Extra::mask>", 12, 584, 224, 16, 134
    ),
    "forward, 64, boolean mask": HopperLimit(
        "ForwardWgmma<BFloat16, 64, 2, 128, 4, false, Extra::mask>", 12, 772, 224, 16, 134
    ),
    "forward, 64, mask": HopperLimit(
        "ForwardWgmma<BFloat16, 64, 2, 128, 4, false, Extra::mask>", 12, 788, 224, 16, 134
    ),
    "forward, 128, a tile of a mask that changes nothing": HopperLimit(
        "ForwardWgmma<BFloat16, 128, 2, 128, 2, false, Extra::mask>", 16, 696, 224, 32, 188
    ),
    "forward, 128, boolean mask": HopperLimit(
        "ForwardWgmma<BFloat16, 128, 2, 128, 2, false, Extra::mask>", 16, 952, 224, 32, 188
    ),
    "forward, 128, mask": HopperLimit(
        "ForwardWgmma<BFloat16, 128, 2, 128, 2, false, Extra::mask>", 16, 900, 224, 32, 188
    ),
    "forward, 64, dropout": HopperLimit(
        "ForwardWgmma<BFloat16, 64, 2, 128, 4, false, Extra::dropout>", 12, 1500, 224, 16, 120
    ),
    "forward, 128, dropout": HopperLimit(
        "ForwardWgmma<BFloat16, 128, 2, 128, 2, false, Extra::dropout>", 16, 1550, 224, 32, 168
    ),
}


@pytest.mark.parametrize("name", HOPPER_LIMITS)
def test_instructions_of_a_tile_on_hopper(name: str) -> None:
    """A consumer's loop has few instructions, all in registers, and its softmax beside products."""
    limit = HOPPER_LIMITS[name]
    kernel, said = compile_kernel(limit.kernel)
    assert not re.search(r"C75\d\d|serializ", said), (
        said
    )  # what ptxas says if it serializes products
    path = min(passes_of(name, kernel, limit.products), key=len)
    registers = [int(n) for x in path for n in re.findall(r"\bR(\d+)\b", x.operands)]
    waits = [n for n, x in enumerate(path) if x.name.startswith("WARPGROUP.DEPBAR")]
    exponentials = [n for n, x in enumerate(path) if x.name.startswith("MUFU.EX2")]
    assert len(exponentials) == limit.exponentials
    assert len(path) <= limit.instructions
    assert max(registers) < limit.registers
    assert count(path, "LDL|STL") <= limit.in_memory
    # From the wait for the scores on, all but the last product are under way until the second wait.
    first, second = waits
    assert first < exponentials[0]
    assert exponentials[-1] < second
    of_producer = [x for x in passes(kernel, ("LDGSTS",)) if count(x, "LDGSTS") == limit.copies]
    copying = min(of_producer, key=len)
    assert len(copying) <= limit.copying
    in_memory = 5 if "Extra::mask" in limit.kernel else 0  # it looks for tiles that the mask shows
    assert count(copying, "LDL|STL") <= in_memory


class GradientLimit(NamedTuple):
    """A limit of a tile in which no key is hidden, and whose numbers are finite."""

    kernel: str
    products: int  # HGMMA
    # Instructions: to start products, until there are weights, and until the tile ends.
    start: int
    weigh: int
    slopes: int
    exponentials: int
    registers: int
    copies: int  # of a thread of the producer
    copying: int  # instructions of the producer
    # How many read or write a register that is in memory: of the producer, of the consumer.
    in_memory: tuple[int, int] = (0, 0)
    behind: int = 2  # exponentials that ptxas moves behind the wait for dP


GRADIENT_LIMITS = {
    "grad_query, 64": GradientLimit(
        "GradQueryWgmma<BFloat16, 64, 128, 4>", 16, 72, 248, 186, 64, 224, 16, 112
    ),
    "grad_query, 128": GradientLimit(
        "GradQueryWgmma<BFloat16, 128, 96, 2>", 22, 99, 194, 145, 48, 224, 24, 140
    ),
    "grad_key and grad_value, 64": GradientLimit(
        "GradKeyWgmma<BFloat16, 64, 96, 4>", 20, 70, 232, 184, 48, 224, 12, 300
    ),
    "grad_key and grad_value, 128": GradientLimit(
        "GradKeyWgmma<BFloat16, 128, 64, 2>", 24, 96, 162, 130, 32, 232, 16, 376, (16, 0)
    ),
    "grad_query, 64, ALiBi": GradientLimit(
        "GradQueryWgmma<BFloat16, 64, 128, 4, Extra::terms>",
        16,
        74,
        396,
        324,
        64,
        224,
        16,
        112,
        (0, 12),
    ),
    "grad_query, 64, cap": GradientLimit(
        "GradQueryWgmma<BFloat16, 64, 128, 4, Extra::terms>",
        16,
        74,
        800,
        191,
        128,
        224,
        16,
        112,
        (0, 80),
    ),
    "grad_query, 128, ALiBi": GradientLimit(
        "GradQueryWgmma<BFloat16, 128, 96, 2, Extra::terms>",
        22,
        103,
        308,
        244,
        48,
        224,
        24,
        140,
        (0, 4),
    ),
    "grad_query, 128, cap": GradientLimit(
        "GradQueryWgmma<BFloat16, 128, 96, 2, Extra::terms>",
        22,
        103,
        560,
        148,
        96,
        224,
        24,
        140,
        (0, 4),
    ),
    "grad_key and grad_value, 64, ALiBi": GradientLimit(
        "GradKeyWgmma<BFloat16, 64, 96, 4, Extra::terms>",
        20,
        72,
        374,
        182,
        48,
        224,
        12,
        304,
        (0, 8),
    ),
    "grad_key and grad_value, 64, cap": GradientLimit(
        "GradKeyWgmma<BFloat16, 64, 96, 4, Extra::terms>",
        20,
        72,
        624,
        182,
        96,
        224,
        12,
        304,
        (0, 8),
    ),
    "grad_key and grad_value, 128, ALiBi": GradientLimit(
        "GradKeyWgmma<BFloat16, 128, 64, 2, Extra::terms>",
        24,
        96,
        264,
        130,
        32,
        232,
        16,
        384,
        (16, 4),
    ),
    "grad_key and grad_value, 128, cap": GradientLimit(
        "GradKeyWgmma<BFloat16, 128, 64, 2, Extra::terms>",
        24,
        96,
        450,
        130,
        64,
        232,
        16,
        384,
        (16, 16),
    ),
    "grad_query, 64, boolean mask": GradientLimit(
        "GradQueryWgmma<BFloat16, 64, 128, 4, Extra::mask>",
        16,
        159,
        264,
        322,
        64,
        224,
        16,
        135,
        (3, 0),
    ),
    "grad_query, 64, mask of numbers": GradientLimit(
        "GradQueryWgmma<BFloat16, 64, 128, 4, Extra::mask>",
        16,
        159,
        617,
        322,
        64,
        224,
        16,
        135,
        (3, 0),
    ),
    "grad_query, 128, boolean mask": GradientLimit(
        "GradQueryWgmma<BFloat16, 128, 64, 2, Extra::mask>",
        20,
        159,
        147,
        193,
        32,
        224,
        16,
        148,
        (14, 0),
    ),
    "grad_query, 128, mask of numbers": GradientLimit(
        "GradQueryWgmma<BFloat16, 128, 64, 2, Extra::mask>",
        20,
        159,
        331,
        175,
        32,
        224,
        16,
        148,
        (14, 0),
    ),
    "grad_key and grad_value, 64, boolean mask": GradientLimit(
        "GradKeyWgmma<BFloat16, 64, 64, 4, Extra::mask>", 16, 68, 285, 134, 32, 224, 8, 358, (13, 0)
    ),
    "grad_key and grad_value, 64, mask of numbers": GradientLimit(
        "GradKeyWgmma<BFloat16, 64, 64, 4, Extra::mask>", 16, 68, 338, 198, 32, 224, 8, 484, (13, 0)
    ),
    "grad_key and grad_value, 128, boolean mask": GradientLimit(
        "GradKeyWgmma<BFloat16, 128, 64, 2, Extra::mask>",
        24,
        92,
        328,
        136,
        32,
        232,
        16,
        514,
        (29, 40),
    ),
    "grad_key and grad_value, 128, mask of numbers": GradientLimit(
        "GradKeyWgmma<BFloat16, 128, 64, 2, Extra::mask>",
        24,
        92,
        350,
        200,
        32,
        232,
        16,
        641,
        (29, 7),
    ),
    "grad_query, 64, dropout": GradientLimit(
        "GradQueryWgmma<BFloat16, 64, 96, 4, Extra::dropout>",
        14,
        900,
        270,
        276,
        48,
        224,
        12,
        100,
        behind=14,
    ),
    "grad_query, 128, dropout": GradientLimit(
        "GradQueryWgmma<BFloat16, 128, 96, 2, Extra::dropout>",
        22,
        975,
        198,
        276,
        48,
        224,
        24,
        140,
        (0, 20),
        30,
    ),
    "grad_key and grad_value, 64, dropout": GradientLimit(
        "GradKeyWgmma<BFloat16, 64, 96, 4, Extra::dropout>",
        20,
        850,
        412,
        234,
        48,
        224,
        12,
        304,
        (0, 34),
    ),
    "grad_key and grad_value, 128, dropout": GradientLimit(
        "GradKeyWgmma<BFloat16, 128, 64, 2, Extra::dropout>",
        24,
        632,
        282,
        168,
        32,
        232,
        16,
        384,
        (16, 18),
    ),
    "one pass, 64": GradientLimit(
        "GradKeyWgmma<BFloat16, 64, 64, 4, Extra::none, true>",
        24,
        56,
        160,
        210,
        32,
        224,
        16,
        369,
        (0, 0),
    ),
    "one pass, 64, ALiBi": GradientLimit(
        "GradKeyWgmma<BFloat16, 64, 64, 4, Extra::terms, true>",
        24,
        58,
        256,
        214,
        32,
        224,
        16,
        372,
        (0, 0),
    ),
    "one pass, 64, cap": GradientLimit(
        "GradKeyWgmma<BFloat16, 64, 64, 4, Extra::terms, true>",
        24,
        58,
        424,
        214,
        64,
        224,
        16,
        372,
        (0, 0),
    ),
    "one pass, 128": GradientLimit(
        "GradKeyWgmma<BFloat16, 128, 64, 2, Extra::none, true>",
        32,
        83,
        160,
        213,
        32,
        232,
        32,
        680,
        (11, 0),
    ),
    "one pass, 128, ALiBi": GradientLimit(
        "GradKeyWgmma<BFloat16, 128, 64, 2, Extra::terms, true>",
        32,
        83,
        258,
        217,
        32,
        232,
        32,
        682,
        (13, 0),
    ),
    "one pass, 128, cap": GradientLimit(
        "GradKeyWgmma<BFloat16, 128, 64, 2, Extra::terms, true>",
        32,
        83,
        440,
        217,
        64,
        232,
        32,
        682,
        (13, 8),
    ),
}


@pytest.mark.parametrize("name", GRADIENT_LIMITS)
def test_instructions_of_a_tile_of_gradients_on_hopper(name: str) -> None:
    limit = GRADIENT_LIMITS[name]
    kernel, said = compile_kernel(limit.kernel, "BackwardTaskParams")
    assert not re.search(r"C75\d\d|serializ", said), said
    path = min(passes_of(name, kernel, limit.products), key=len)
    assert (
        max(int(n) for x in path for n in re.findall(r"\bR(\d+)\b", x.operands)) < limit.registers
    )
    assert count(path, "LDL|STL") <= limit.in_memory[1]
    weigh, slopes = [n for n, x in enumerate(path) if x.name.startswith("WARPGROUP.DEPBAR")][:2]
    parts = path[:weigh], path[weigh:slopes], path[slopes:]
    limits = limit.start, limit.weigh, limit.slopes
    assert all(len(part) <= most for part, most in zip(parts, limits, strict=True)), [
        *map(len, parts)
    ]
    # Beside dP, or at least beside the sum that is under way in a block of rows.
    assert count(path, r"MUFU\.EX2") == limit.exponentials
    assert count(parts[1], r"MUFU\.EX2") >= limit.exponentials - limit.behind
    # The producer's loop over tiles, which has another one of four copies if rows are anywhere. In
    # a block of keys a third one copies 32 rows of a mask.
    of_producer = [x for x in passes(kernel, ("LDGSTS",)) if count(x, "HGMMA") == 0]
    few = sorted((x for x in of_producer if count(x, "LDGSTS") == 4), key=len)
    if limit.kernel.startswith("GradQuery"):
        copying = [x for x in of_producer if count(x, "LDGSTS") == limit.copies]
        whole = len(copying[0])
    else:
        copying = few[-2:]
        whole = len(few[-1]) + (limit.copies // 4 - 1) * len(few[1])
        if "Extra::mask" in limit.kernel:
            of_mask = 8 if name.endswith("boolean mask") else 16
            whole += min(len(x) for x in of_producer if count(x, "LDGSTS") == of_mask)
    assert whole <= limit.copying
    assert max(count(x, "LDL|STL") for x in copying) <= limit.in_memory[0]


# What a warp issues for a tile of 64 keys, by what it does: (HGMMA, LDGSTS) and instructions.
LATENT_LIMITS = {
    "weigh": ((40, 0), 388),  # the first consumer: scores, weights, its half of the output
    "receive": ((4, 0), 64),  # the second one
    "copy": ((0, 40), 208),  # half of the producer, which copies the columns from 256 on
}


@pytest.mark.parametrize("loop", LATENT_LIMITS)
def test_instructions_of_a_tile_of_latent_attention(loop: str) -> None:
    kernel, said = compile_kernel("LatentWgmma<BFloat16, false>")
    assert not re.search(r"C75\d\d|serializ", said), said
    assert "0 bytes stack frame, 0 bytes spill stores" in said, said
    counted, limit = LATENT_LIMITS[loop]
    path = min(
        (
            path
            for most in ("HGMMA", "LDGSTS")
            for path in passes(kernel, (most,))
            if (count(path, "HGMMA"), count(path, "LDGSTS")) == counted
        ),
        key=len,
    )
    assert len(path) <= limit
    assert max(int(n) for x in path for n in re.findall(r"\bR(\d+)\b", x.operands)) < 200


@pytest.mark.parametrize("architecture", ["80", "90", "100"])
@pytest.mark.parametrize(
    "name",
    [
        *("ForwardWgmma<BFloat16, 64, 3, 128, 4, false>", "LatentWgmma<BFloat16, false>"),
        *("GradQueryWgmma<BFloat16, 64, 128, 4>", "GradKeyWgmma<BFloat16, 64, 96, 4>"),
    ],
)
def test_other_gpus_get_a_trap(name: str, architecture: str) -> None:
    """nvcc would make an empty kernel of it for sm_90 without the letter, and say nothing."""
    params = "BackwardTaskParams" if name.startswith("Grad") else "ForwardParams"
    kernel, _ = compile_kernel(name, params, (f"-arch=sm_{architecture}",))
    names = [instruction.name for instruction in kernel.instructions]
    assert "BPT.TRAP" in names, names
    assert not any(name.startswith(("HGMMA", "STG")) for name in names)
