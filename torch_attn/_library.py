"""Loads libattn.so, the library with the operators, after checking that it fits the running torch."""

import json
from pathlib import Path
from typing import TypedDict

import torch

_PACKAGE = Path(__file__).parent
_LIBRARY = _PACKAGE / "libattn.so"
_REBUILD = "Rebuild it for the torch of this environment: pip install --no-build-isolation -e ."


class BuiltWith(TypedDict):
    """What libattn.json says: the library was compiled with these."""

    torch: str
    compiler: str
    cuda: bool


def load() -> BuiltWith:
    """Registers the operators of ``torch.ops.attn``.

    Returns:
        What the library was built with.

    Raises:
        ImportError: the library was not built, was built for another release of torch, or does not load.
    """
    if not _LIBRARY.exists():
        raise ImportError(
            f"torch_attn: {_LIBRARY} does not exist: the library was not built. "
            "Build it with: pip install --no-build-isolation -e ."
        )
    built_with: BuiltWith = json.loads(_LIBRARY.with_suffix(".json").read_text())
    # torch keeps its C++ ABI within a minor release only.
    if _minor(built_with["torch"]) != _minor(torch.__version__):
        raise ImportError(
            f"torch_attn: {_LIBRARY} was built for torch {built_with['torch']}, "
            f"but this is torch {torch.__version__}. {_REBUILD}"
        )
    try:
        torch.ops.load_library(_LIBRARY)
    except OSError as error:
        raise ImportError(f"torch_attn: {_LIBRARY} does not load: {error}. {_REBUILD}") from error
    return built_with


def _minor(version: str) -> list[str]:
    """``2.13`` of ``2.13.0+cpu``."""
    return version.split(".")[:2]
