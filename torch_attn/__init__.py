"""Scaled dot-product attention for PyTorch, with every gradient, in memory O(L + S).

Importing the package registers the operators ``torch.ops.attn.sdpa``, ``attention``,
``sdpa_with_weights`` and ``sdpa_stats``. The Python functions :func:`sdpa`,
:func:`sdpa_with_logsumexp`, :func:`sdpa_with_weights` and :func:`sdpa_stats` call these operators
and document them. :func:`varlen_attn` takes packed sequences. The keys of these sequences may be
stored in the pages of a :class:`PagedCache`. :func:`flex_attention` takes functions of the caller
that change scores and hide keys. :mod:`torch_attn.reference` is the textbook version of attention.

In existing models, :func:`replacing_sdpa` replaces ``F.scaled_dot_product_attention`` by
:func:`sdpa`, and :func:`replacing_flex` replaces PyTorch's FlexAttention by :func:`flex_attention`.
:func:`convert` replaces :class:`torch.nn.MultiheadAttention` by
:class:`torch_attn.nn.MultiheadAttention`. :func:`unconvert` undoes that conversion.
:func:`inspect` shows what a model attends to, and :mod:`torch_attn.plots` draws it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torch_attn import distributed, flops, nn, replace, subclasses
from torch_attn._caches.paged import PagedCache
from torch_attn._caches.quantize import quantize_kv
from torch_attn._convert import Converted, convert, unconvert
from torch_attn._count import calls
from torch_attn._inspection.result import Inspection, Layer
from torch_attn._invariance import invariant
from torch_attn._programs.program import Program, score_program
from torch_attn._replacement.flex import (
    flex_is_replaced,
    replace_flex,
    replacing_flex,
    restore_flex,
)
from torch_attn.flex import flex_attention
from torch_attn.functional import (
    Stats,
    sdpa,
    sdpa_stats,
    sdpa_with_logsumexp,
    sdpa_with_weights,
)
from torch_attn.replace import (
    Replacement,
    replace_sdpa,
    replacing_sdpa,
    restore_sdpa,
    sdpa_is_replaced,
)
from torch_attn.varlen import varlen_attn, varlen_attn_out

if TYPE_CHECKING:
    from torch_attn import integrations as integrations
    from torch_attn import mods as mods
    from torch_attn import onnx as onnx
    from torch_attn import plots as plots
    from torch_attn import reference as reference
    from torch_attn._inspection.record import inspect

__all__ = [
    "Converted",
    "Inspection",
    "Layer",
    "PagedCache",
    "Program",
    "Replacement",
    "Stats",
    "__version__",
    "calls",
    "convert",
    "flex_attention",
    "flex_is_replaced",
    "inspect",
    "invariant",
    "nn",
    "quantize_kv",
    "replace_flex",
    "replace_sdpa",
    "replacing_flex",
    "replacing_sdpa",
    "restore_flex",
    "restore_sdpa",
    "score_program",
    "sdpa",
    "sdpa_is_replaced",
    "sdpa_stats",
    "sdpa_with_logsumexp",
    "sdpa_with_weights",
    "unconvert",
    "varlen_attn",
    "varlen_attn_out",
]

__version__ = "0.1.0"


_MODULES = ["distributed", "flops", "integrations", "mods", "onnx", "plots", "reference"]


def __dir__() -> list[str]:
    """Returns the public names, which docs/promises.md explains."""
    return sorted([*__all__, *_MODULES])


def __getattr__(name: str) -> Any:
    """Imports a module of `_MODULES`, or `inspect`, when the caller first uses it.

    `plots` needs matplotlib. `inspect` needs parts of torch that ``import torch`` does not load.
    """
    if name in _MODULES:
        return importlib.import_module(f"torch_attn.{name}")
    if name == "inspect":
        return importlib.import_module("torch_attn._inspection.record").inspect
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


flops.register()
distributed.register_when_imported()
subclasses.register_when_imported()
replace.register_with_torch()
replace.mark_build()
