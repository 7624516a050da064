"""Scaled dot-product attention for PyTorch: every input, every gradient, memory O(L + S).

Importing the package registers the operators ``torch.ops.attn.sdpa`` and
``torch.ops.attn.sdpa_with_weights``, of which :func:`sdpa` and :func:`sdpa_with_weights` are the
documented Python side. :mod:`torch_attn.reference` is the textbook version. In models that exist,
:func:`replacing_sdpa` puts :func:`sdpa` in the place of the built-in, and :func:`convert` puts
:class:`torch_attn.nn.MultiheadAttention` in that of torch's module.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torch_attn import _library, distributed, flops, nn, replace, subclasses
from torch_attn._convert import convert
from torch_attn.functional import sdpa, sdpa_with_weights
from torch_attn.replace import Replacement, replace_sdpa, replacing_sdpa

if TYPE_CHECKING:
    from torch_attn import plots

__all__ = [
    "Replacement",
    "__version__",
    "convert",
    "nn",
    "plots",
    "replace_sdpa",
    "replacing_sdpa",
    "sdpa",
    "sdpa_with_weights",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`plots` is imported when it is first asked for, because it needs matplotlib."""
    if name == "plots":
        return importlib.import_module("torch_attn.plots")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_library.load()
flops.register()
distributed.register_when_imported()
subclasses.register_when_imported()
replace.register_with_torch()
