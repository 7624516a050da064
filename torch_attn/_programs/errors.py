"""Errors about the user's functions. Each names the operation and the line of the user's code."""

from __future__ import annotations

import linecache
import os
import sys
from typing import Any, NoReturn

import torch
from torch import Tensor


class UnsupportedError(RuntimeError):
    """A score_mod or mask_mod does something that the kernels cannot compute for every pair.

    It is raised before anything is computed. Its message names the operation and the line.
    """


def fail(what: str, hint: str = "", is_wrong: bool = False) -> NoReturn:
    """Refuses the function; `is_wrong` if PyTorch's FlexAttention must not run it either."""
    where = ""
    if not torch.compiler.is_compiling() and (frame := _frame_of_user()):
        file, line = frame.f_code.co_filename, frame.f_lineno
        where = f" ({file}, line {line}: {linecache.getline(file, line).strip()})"
    message = f"torch_attn.flex_attention: {what}{where}{hint and f'; {hint}'}"
    if is_wrong:
        raise RuntimeError(message)
    raise UnsupportedError(message)


def fail_for_pairs(name: str, of: str = "value") -> NoReturn:
    """Refuses a function `name` that works on vectors, but not on values of the pair."""
    fail(
        f"there is no {name} of a {of} that depends on query and key at once",
        "compute it outside as a tensor and index it, bias[b, h, q_idx, kv_idx]; append "
        "captured vectors whose dot product is wanted to query and key, as more columns",
    )


def name_of(tensor: Tensor) -> str:
    """Returns the name that the user's code has for a tensor, and the tensor's shape."""
    frame = _frame_of_user()
    known = {**frame.f_globals, **frame.f_locals} if frame else {}
    names = [n for n, x in known.items() if x is tensor]
    return f"{names[0] if names else 'a tensor'} of shape {list(tensor.shape)}"


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_NOT_USERS = _PACKAGE + os.sep, os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def _frame_of_user() -> Any:
    """Returns the innermost frame that is neither in PyTorch nor in this package."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_USERS):
        frame = frame.f_back
    return frame
