"""The calls: their tensors, the options by the names of the schema, and a value that matters for
each argument of `attention` that the built-in lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torch_attn  # noqa: F401 (registers the operators)

ops = torch.ops.attn
H, HK, E = 4, 2, 8  # heads of the query and of the keys, head_dim
PAGE = 4  # rows of a page


def beyond_builtin(operator: Any) -> set[str]:
    """Without `with_rows`, which is no option: it changes no result, but leaves two out."""
    builtin = torch.ops.aten.scaled_dot_product_attention
    own, others = ({a.name for a in op.default._schema.arguments} for op in (operator, builtin))
    return own - others - {"with_rows"}


def integers(*numbers: Any) -> Tensor:
    return torch.tensor(numbers)


def inputs(
    L: int, S: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, ``[1, heads, length, E]``."""
    torch.manual_seed(seed)
    drawn = torch.float64 if dtype == torch.float64 else torch.float32
    sizes = ((H, L), (HK, S), (HK, S))
    return tuple(torch.randn(1, heads, n, E, dtype=drawn).to(dtype) for heads, n in sizes)


def whole(L: int, S: int) -> dict[str, Any]:
    """One packed sequence."""
    return {"cu_seq_q": integers(0, L), "cu_seq_k": integers(0, S), "max_q": L, "max_k": S}


# --- arguments that the built-in lacks ------------------------------------------------------------


class Argument(NamedTuple):
    """A value that matters, and beside which others. Or one that is wrong: `max_q` and `max_k`
    change no result."""

    value: Any
    beside: Mapping[str, Any] = MappingProxyType({})
    wrong: bool = False


L = S = 8  # of these calls, equal as within a context_parallel
CAUSAL = {"window_size": (-1, 0)}
WHOLE = whole(L, S)
PACKED = {"cu_seq_q": integers(0, 3, L), "cu_seq_k": integers(0, 2, S), "max_q": 5, "max_k": 6}
PAGED = {**WHOLE, "cu_seq_k": None, "key_lengths": integers(S), "block_table": integers([0, 1])}
ARGUMENTS: dict[str, Argument] = {
    "softcap": Argument(0.5),
    "window_size": Argument((1, 1)),
    "query_offset": Argument(integers(2), CAUSAL),
    "key_lengths": Argument(integers(6)),
    "alibi_slopes": Argument(torch.tensor([0.5, 0.1, 1.0, 0.2], dtype=torch.float64)),
    "sinks": Argument(torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)),
    "cu_seq_q": Argument(integers(0, 4, L), PACKED),
    "cu_seq_k": Argument(integers(0, 5, S), PACKED),
    "max_q": Argument(4, PACKED, wrong=True),
    "max_k": Argument(5, PACKED, wrong=True),
    "block_table": Argument(integers([1, 1]), PAGED),
    "key_scale": Argument(torch.ones(()), wrong=True),  # of keys that need none
    "value_scale": Argument(torch.ones(()), wrong=True),
}
ALL = set(ARGUMENTS)
DENSE = beyond_builtin(ops.sdpa_with_weights)
PACKING = ALL - DENSE
OF_FLEX = {"window_size", "query_offset", "key_lengths", "sinks"}
OF_MODULE = {"softcap", "window_size", "query_offset", "key_lengths"}


# --- calls of any length --------------------------------------------------------------------------

Options = dict[str, Any]


def _packed(L: int, S: int) -> Options:
    """Two sequences, cut within a tile."""
    q, k = integers(0, L // 3, L), integers(0, S // 4, S)
    return {"cu_seq_q": q, "cu_seq_k": k, "max_q": L - L // 3, "max_k": S - S // 4}


def _paged(L: int, S: int) -> Options:
    """One sequence, whose pages lie in reverse order; the last is not used."""
    pages = torch.arange(S // PAGE).flip(0)[None]
    paging = {"cu_seq_k": None, "key_lengths": integers(S - PAGE), "block_table": pages}
    return {**whole(L, S), **paging}


def _numbers(count: int) -> Tensor:
    """Numbers that differ from their neighbours. Float16 holds each of them exactly."""
    return torch.arange(count).remainder(7) / 4 - 0.5


# By name: the options of a call with L queries and S keys.
CALLS: dict[str, Callable[[int, int], Options]] = {
    "plain": lambda L, S: {},
    "causal": lambda L, S: {"is_causal": True},
    "scale": lambda L, S: {"scale": -0.25},
    "mask of keys": lambda L, S: {"attn_mask": _numbers(S)[None]},
    "boolean mask": lambda L, S: {"attn_mask": (_numbers(S) > 0)[None]},
    "mask of queries": lambda L, S: {"attn_mask": _numbers(L)[:, None], "is_causal": True},
    "dropout": lambda L, S: {"dropout_p": 0.5},
    "soft cap": lambda L, S: {"softcap": 2.0},
    "window": lambda L, S: {"window_size": (S // 4, S // 4)},
    "offset": lambda L, S: {"query_offset": integers(S // 4 - 1), **CAUSAL},
    "lengths": lambda L, S: {"key_lengths": integers(S - S // 4)},
    "slopes": lambda L, S: {"alibi_slopes": _numbers(H).abs(), "is_causal": True},
    "sinks": lambda L, S: {"sinks": _numbers(H)},
    "all": lambda L, S: {
        "softcap": 2.0,
        "window_size": (S // 2, S // 4),
        "query_offset": integers(3),
        "key_lengths": integers(max(0, S - 2)),
        "alibi_slopes": _numbers(H).abs(),
        "sinks": _numbers(H),
    },
    "packed": _packed,
    "packed, causal": lambda L, S: {**_packed(L, S), **CAUSAL},
    "packed, slopes and sinks": lambda L, S: {
        **_packed(L, S),
        "alibi_slopes": _numbers(H).abs(),
        "sinks": _numbers(H),
    },
    "pages": _paged,
    "pages, window": lambda L, S: {**_paged(L, S), "window_size": (S // 4, 0)},
}
# Options of these calls, by which the doors are chosen.
NAMES = {name: set(make(8, 8)) for name, make in CALLS.items()}
BUILTIN = {"attn_mask", "is_causal", "scale", "dropout_p"}
