"""Messages for users whose optional libraries cannot be imported."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

__all__ = ["import_of", "install"]


def install(extra: str) -> str:
    """Returns the command that installs an extra, with supported versions of its packages.

    The command is for a checkout, because no package index has torch_attn.
    """
    return f"in a checkout of torch_attn, pip install --no-build-isolation -e '.[{extra}]'"


@contextlib.contextmanager
def import_of(package: str, extra: str | None = None) -> Iterator[None]:
    """Makes an ImportError say whether the package is missing or why its import fails.

    Args:
        package: the name that is imported.
        extra: the extra of torch-attn that installs the package; None if it has the package's name.
    """
    try:
        yield
    except ImportError as error:
        if error.name == package:
            message = f"{package} is not installed: {install(extra or package)}"
            raise ImportError(message, name=package) from error
        cause: Any = error
        while cause.__cause__ is not None:  # the last cause names what is missing
            cause = cause.__cause__
        raise ImportError(
            f"{package} is installed but does not import: {type(cause).__name__}: {cause}",
            name=getattr(cause, "name", None),
        ) from error
