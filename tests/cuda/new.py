"""What no GPU has run since it changed: the first steps of first_run.py.

`python -m tests.cuda.new` lists it. An entry holds the sources that it is about. seen.json beside
this file has, for each entry that a GPU found right, the hash of its sources; when they change, the
entry is new again. first_run.py writes the next seen.json into its folder: commit it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SEEN = HERE / "seen.json"

SHARED = ("csrc/cuda/*", "csrc/cuda/shared/*", "csrc/core/*")


class Entry(NamedTuple):
    name: str
    sources: tuple[str, ...]  # patterns, from the root
    seconds: float  # at most
    program: str = ""  # of this folder; or
    module: tuple[str, ...] = ()  # arguments of python -m

    @property
    def key(self) -> str:
        """The hash of the names and the texts of the sources."""
        files = sorted({f for p in self.sources for f in ROOT.glob(p) if f.is_file()})
        text = b"".join(f.relative_to(ROOT).as_posix().encode() + f.read_bytes() for f in files)
        return hashlib.sha256(text).hexdigest()[:16]


def tests(name: str, *files: str) -> Entry:
    """Tests of the tier quick, on the GPU. Their sources are the files and all kernels."""
    paths = tuple(f"tests/test_{file}.py" for file in files)
    some = ("--tiers", "quick", "-k", "cuda and not (2_31 or 65535 or peak)")
    arguments = ("pytest", "-q", "-p", "no:cacheprovider", *paths, *some)
    return Entry(name, (*paths, "csrc/cuda/**/*"), 90, module=arguments)


# What decides most comes first.
ENTRIES = [
    Entry(
        "Hopper's instructions",
        ("csrc/cuda/shared/ptx*", "csrc/cuda/wgmma/wgmma.cuh", "tests/cuda/check_ptx_sm90.cu"),
        30,
        program="check_ptx_sm90",
    ),
    Entry(
        "Hopper's forward",
        (*SHARED, "csrc/cuda/mma/*", "csrc/cuda/wgmma/*", "tests/cuda/check_forward_sm90.cu"),
        30,
        program="check_forward_sm90",
    ),
    *(
        Entry(
            name,
            (*SHARED, "csrc/cuda/mma/*", "csrc/cuda/wgmma/*", f"tests/cuda/{program}.cu"),
            20,
            program=program,
        )
        for name, program in (
            ("Hopper's gradients", "check_backward_sm90"),
            ("latent attention on Hopper", "check_latent_sm90"),
            ("latent attention", "check_latent"),
        )
    ),
    Entry(
        "decoding",
        (*SHARED, "csrc/cuda/mma/*", "tests/cuda/check_decode.cu"),
        20,
        program="check_decode",
    ),
    Entry(
        "8 bits",
        (*SHARED, "csrc/cuda/mma/*", "csrc/cuda/simt/*", "tests/cuda/check_eight_bits.cu"),
        20,
        program="check_eight_bits",
    ),
    Entry(
        "pages",
        (*SHARED, "csrc/cuda/mma/*", "tests/cuda/check_pages.cu"),
        20,
        program="check_pages",
    ),
    Entry(
        "equal runs",
        (*SHARED, "csrc/cuda/mma/*", "csrc/cuda/wgmma/*", "tests/cuda/equal_runs.py"),
        60,
        module=("tests.cuda.equal_runs",),
    ),
    Entry(
        "variants",
        (
            *SHARED,
            "csrc/cuda/mma/*",
            "csrc/cuda/wgmma/*",
            "tests/cuda/variants_sm90.cu",
            "tests/cuda/tensor_maps.cuh",
            "tests/cuda/variants.h",
        ),
        60,
        program="variants_sm90",
    ),
    Entry(
        "one pass",
        (*SHARED, "csrc/cuda/mma/*", "csrc/cuda/wgmma/*", "tests/cuda/check_one_pass_sm90.cu"),
        30,
        program="check_one_pass_sm90",
    ),
    Entry(
        "variants of the backward",
        (
            *SHARED,
            "csrc/cuda/mma/*",
            "csrc/cuda/wgmma/*",
            "tests/cuda/variants_backward_sm90.cu",
            "tests/cuda/variants.h",
        ),
        60,
        program="variants_backward_sm90",
    ),
    tests("tests of the forward", "forward", "nan", "invariance"),
    tests("tests of options", "options", "options_promises", "varlen", "paged", "quantized"),
    tests("tests of gradients", "backward", "derivatives", "hidden_tiles"),
    tests("tests with PyTorch", "nn", "convert", "properties", "dispatch", "weights"),
]


def seen() -> dict[str, str]:
    return json.loads(SEEN.read_text()) if SEEN.exists() else {}


def pending() -> list[Entry]:
    known = seen()
    return [entry for entry in ENTRIES if known.get(entry.name) != entry.key]


def write_seen(right: set[str], to: Path) -> None:
    """Writes what a GPU has found right by now, of which `right` are the entries of this run."""
    known = {e.name: e.key for e in ENTRIES if e.name in right or seen().get(e.name) == e.key}
    to.write_text(json.dumps(known, indent=2) + "\n")


if __name__ == "__main__":
    for entry in pending():
        print(f"{entry.name}: {entry.program or ' '.join(entry.module)}")
