"""The operators, those that only autograd calls included, and their arguments for any call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from _second_order import directions
from helpers import Inputs
from torch_attn._programs.program import MOST_TABLES

OPERATORS = (
    *("sdpa", "attention", "sdpa_with_weights", "sdpa_stats"),
    *("_sdpa_forward", "_sdpa_backward", "_sdpa_tangent", "_sdpa_second"),
)


def arguments(name: str, x: Inputs, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments: what users, or autograd, pass to the operator."""
    if name == "sdpa_stats":
        return [x.query, x.key, x.attn_mask], {n: o for n, o in options.items() if n != "dropout_p"}
    if not name.startswith("_"):
        return list(x), options
    # Where slopes or sinks are there, the rows' logsumexp counts.
    with_rows = "alibi_slopes" in options or "sinks" in options
    if name == "_sdpa_forward":
        return list(x), {**options, "with_rows": with_rows}
    saved = torch.ops.attn._sdpa_forward(*x, **options)[:4]
    output = saved[0]
    learned = ("alibi_slopes", "sinks", "row_terms", "key_terms", "distance_terms")
    more: list[Tensor | None] = [options.get(n) for n in learned]
    tables: list[Tensor] = options.get("tables", [])
    wanted = [t is not None and t.is_floating_point() for t in (*x, *more)]
    wanted += [True] * len(tables) + [False] * (MOST_TABLES - len(tables))
    grads = [torch.randn_like(output), torch.randn_like(saved[1][..., 0]) if with_rows else None]
    if name == "_sdpa_backward":
        return [*grads, *saved, *x], {**options, "grad_input_mask": wanted}
    along = [*directions(x), *(None if t is None else torch.randn_like(t) for t in more)]
    along.append([*map(torch.randn_like, tables), None])  # it ends with a None
    if name == "_sdpa_tangent":
        return [*saved, *along, *x], options
    moved = torch.ops.attn._sdpa_tangent(*saved, *along, *x, **options)
    return [*grads, *saved, *along, *moved, *x], {**options, "grad_input_mask": wanted}
