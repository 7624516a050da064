"""Loads the libattn.so that was built for the running torch, and so registers the operators."""

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import TypedDict

import torch

# torch keeps its C++ ABI within a minor release, so the package has one library per minor release.
IN_PACKAGE = Path("torch_" + "_".join(torch.__version__.split(".")[:2]), "libattn.so")
# ATTN_LIBRARY names a library that was built elsewhere, such as the variants that tests build. An
# empty ATTN_LIBRARY counts as unset.
PACKAGE = Path(__file__).parent
LIBRARY = Path(os.environ.get("ATTN_LIBRARY") or PACKAGE / IN_PACKAGE)
OLDEST, NEWEST = (2, 11), (2, 15)  # the releases of torch that are supported
_BUILD = "Build it for this environment, in a checkout: pip install --no-build-isolation -e ."


class BuiltWith(TypedDict):
    """The contents of libattn.json, which setup.py writes beside the library."""

    torch: str
    compiler: str
    cuda: bool


def load() -> None:
    """Registers the operators of ``torch.ops.attn``.

    Raises:
        ImportError: the library does not exist, was built for another torch or does not load; or
            another copy of the library has already registered the operators.
        RuntimeError: ATTN_CPU_CAPABILITY names an instruction set that this machine lacks, or
            ATTN_INVARIANT is neither 0 nor 1.
    """
    if not LIBRARY.exists():
        raise ImportError(f"torch_attn: {LIBRARY} is not there. {_why_not_there()}")
    try:
        built_for = built_with()["torch"]
    except (OSError, ValueError, KeyError) as error:
        raise ImportError(
            f"torch_attn: {LIBRARY} is no library that setup.py has built: what it was built with "
            f"does not stand beside it, in {LIBRARY.with_suffix('.json').name} ({error}). {_BUILD}"
        ) from error
    if built_for.split(".")[:2] != torch.__version__.split(".")[:2]:
        raise ImportError(
            f"torch_attn: {LIBRARY} was built for torch {built_for}, "
            f"but this is torch {torch.__version__}. {_BUILD}"
        )
    if torch._C._dispatch_has_kernel("attn::sdpa") and not _is_in_this_process():
        raise ImportError(
            f"torch_attn: torch.ops.attn.sdpa is there already, by another library than {LIBRARY}, "
            "and would be registered twice. Let what has loaded that one link or load this one: "
            "python -m torch_attn --cmake-prefix-path"
        )
    try:
        torch.ops.load_library(LIBRARY)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise ImportError(f"torch_attn: {LIBRARY} does not load: {error}. {_BUILD}") from error
    # Reads ATTN_CPU_CAPABILITY and ATTN_INVARIANT now, so that wrong values raise here.
    torch.ops.attn._cpu_capability(), torch.ops.attn._invariant(0)


def _why_not_there() -> str:
    if os.environ.get("ATTN_LIBRARY"):
        return "The environment variable ATTN_LIBRARY names it: correct or unset that"
    release = tuple(int(n) for n in torch.__version__.split(".")[:2])
    if not OLDEST <= release <= NEWEST:
        oldest, newest = (".".join(map(str, x)) for x in (OLDEST, NEWEST))
        return f"This is torch {torch.__version__}; torch {oldest} to {newest} are supported"
    others = [Path(x or ".", "torch_attn").resolve() for x in sys.path]
    hidden = next((x for x in others if (x / IN_PACKAGE).exists() and x != PACKAGE), None)
    if hidden and (PACKAGE.parent / "setup.py").exists():
        return (
            f"{PACKAGE.parent} is a checkout that was not compiled, and hides the torch_attn that "
            f"is installed in {hidden.parent}: start Python in another directory"
        )
    built = sorted(path.parent.name for path in PACKAGE.glob("torch_*/libattn.so"))
    fits = ", ".join(name.removeprefix("torch_").replace("_", ".") for name in built)
    has = f"torch {fits}" if fits else "none"
    return f"This is torch {torch.__version__}, and what the package has fits {has}. {_BUILD}"


def _is_in_this_process() -> bool:
    try:
        ctypes.CDLL(str(LIBRARY), mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return True


def built_with() -> BuiltWith:
    """Returns the torch and the compiler of the build, and whether it has CUDA kernels."""
    contents: BuiltWith = json.loads(LIBRARY.with_suffix(".json").read_text())
    return contents
