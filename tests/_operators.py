"""The operators, those that only autograd calls included, and their arguments for any call."""

from __future__ import annotations

from typing import Any

import torch

from _second_order import directions
from helpers import Inputs

OPERATORS = (
    *("sdpa", "sdpa_with_weights", "sdpa_stats"),
    *("_sdpa_forward", "_sdpa_backward", "_sdpa_tangent", "_sdpa_second"),
)


def arguments(name: str, x: Inputs, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments: what users, or autograd, pass to the operator."""
    if name == "sdpa_stats":
        return [x.query, x.key, x.attn_mask], {n: o for n, o in options.items() if n != "dropout_p"}
    if name in ("sdpa", "sdpa_with_weights", "_sdpa_forward"):
        return list(x), options
    saved = torch.ops.attn._sdpa_forward(*x, **options)[:4]
    output = saved[0]
    drawn = [options.pop("dropout_p", 0.0), options.pop("is_causal", False)]
    keywords = {"scale": None, "enable_gqa": False, **options}
    none = [None, None]  # slopes and sinks
    wanted = [*(t is not None and t.is_floating_point() for t in x), False, False]
    positional = [*x, *none, *saved]
    if name == "_sdpa_backward":
        return [torch.randn_like(output), None, *positional, *drawn], {
            **keywords,
            "grad_input_mask": wanted,
        }
    positional += [*directions(x), *none]
    if name == "_sdpa_second":
        moved = torch.ops.attn._sdpa_tangent(*positional, *drawn, **keywords)
        positional = [torch.randn_like(output), None, *positional, *moved]
        keywords["grad_input_mask"] = wanted
    return [*positional, *drawn], keywords
