"""The program of a score_mod and a mask_mod: two lists of operations, and the numbers they read.

This package calls FlexAttention's score_mod and mask_mod "functions of the pair", because each call
of these functions gets one pair of a query i and a key j.
"""

from __future__ import annotations

import contextlib
import dis
from collections.abc import Callable
from dataclasses import dataclass, fields
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from torch_attn._programs.errors import fail
from torch_attn._programs.list import write
from torch_attn._programs.tables import Tables
from torch_attn._programs.trace import Tracer
from torch_attn._programs.value import DISTANCE, KEY, PAIR, ROW
from torch_attn._programs.values import Values

MOST_OPERATIONS, MOST_LEAVES, MOST_TABLES = 64, 16, 16
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Program:
    """The operations that kernels run for every pair, and the numbers that the operations read.

    For the pair of query i and key j, the operations read row i of row_terms and row_numbers, row j
    of key_terms and key_numbers, and row i - j + S - 1 of distance_terms and distance_numbers. B of
    a tensor is 1 if the tensor's numbers do not depend on the batch entry. H is 1 if the numbers do
    not depend on the head. A tensor that the operations do not read is None.

    Attributes:
        score: the list of operations that computes the score; None without a score_mod.
        mask: the list that computes whether the query sees the key; None without a mask_mod.
        row_terms: ``[B|1, H|1, L, R]``, float32 (float64 for inputs in float64). Gradients flow
            from it to the tensors that the functions captured.
        key_terms: ``[B|1, H|1, S, K]``, likewise.
        distance_terms: ``[B|1, H|1, L + S - 1, D]``, likewise.
        row_numbers: ``[B|1, H|1, L, R]``, int32: whole numbers, and booleans as 0 and 1.
        key_numbers: ``[B|1, H|1, S, K]``, likewise.
        distance_numbers: ``[B|1, H|1, L + S - 1, D]``, likewise.
        tables: each ``[B|1, H|1, L|S|1, N]``, of the terms' dtype: captured tensors that the
            kernels read in place, because their indices depend on query and key. The list of
            operations calls a table row_table if it has a row for each query, key_table if it has a
            row for each key, and table if it has one row.
        pairs: ``[B|1, H|1, L, S]``, a view of a captured tensor, which the kernels read in place.
    """

    score: str | None
    mask: str | None
    row_terms: Tensor | None = None
    key_terms: Tensor | None = None
    distance_terms: Tensor | None = None
    row_numbers: Tensor | None = None
    key_numbers: Tensor | None = None
    distance_numbers: Tensor | None = None
    tables: tuple[Tensor, ...] = ()
    pairs: Tensor | None = None

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of ``torch.ops.attn.flex_attention`` that are there, by name."""
        given = {name: getattr(self, part) for part, name in _ARGUMENTS if part != "tables"}
        given["tables"] = [*self.tables] or None
        return {name: x for name, x in given.items() if x is not None}

    def __str__(self) -> str:
        parts = [f"{n}: {text}" for n in ("score", "mask") if (text := getattr(self, n))]
        names = [f"{kind}_{noun}" for noun in ("terms", "numbers") for kind in _KINDS]
        leaves = {name: getattr(self, name) for name in names}
        leaves |= {f"tables[{t}]": table for t, table in enumerate(self.tables)}
        for name, tensor in (leaves | {"pairs": self.pairs}).items():
            if tensor is not None:
                parts.append(f"{name}: {list(tensor.shape)} {tensor.dtype}\n")
        return "".join(parts)


_OF_PROGRAM = {"score": "score_mod", "mask": "mask_mod", "pairs": "attn_mask"}
_ARGUMENTS = [(f.name, _OF_PROGRAM.get(f.name, f.name)) for f in fields(Program)]
_KINDS = {"row": ROW, "key": KEY, "distance": DISTANCE}


def trace(
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | None,
    *,
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Program:
    """Runs the functions once and returns the program that the kernels need.

    Args:
        score_mod: a score_mod of FlexAttention, or None.
        mask_mod: a mask_mod of FlexAttention, or None. Tensors that mask_mod captures get no
            gradients.
        batch, heads, queries, keys: the sizes B, H (heads of the query), L and S.
        dtype: the dtype of query, key and value. The kernels compute scores in float64 if this
            dtype is float64, else in float32.
        device: the device of the program's tensors.

    Raises:
        RuntimeError: a function does something that the kernels cannot run for every pair. The
            message names the operation and the line, and says what to do instead.
    """
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    values = Values((batch, heads, queries, keys), compute, torch.device(device))
    tables = Tables(values, (dtype, compute))
    results, wide = _run(Tracer(values, tables), score_mod, mask_mod)
    writer = write.__wrapped__ if values.list.compiling else write
    texts, counts, read = writer(tuple(values.list.nodes), results, wide, compute)
    if max(counts, default=0) > MOST_OPERATIONS:
        fail(f"{max(counts)} operations of the pair; at most {MOST_OPERATIONS}")
    columns: dict[str, list[Tensor]] = {}
    for kind, type_, serial in read:
        name = f"{kind}_{'terms' if type_ == 'f' else 'numbers'}"
        columns.setdefault(name, []).append(values.list.leaves[type_, serial])
    read_tables = columns.pop("table_numbers", [])
    if len(read_tables) > MOST_TABLES:
        fail(f"{len(read_tables)} tables have an index of the pair; at most {MOST_TABLES}")
    leaves: dict[str, Any] = {
        name: _stack(name, of, values.lengths) for name, of in columns.items()
    }
    leaves["tables"] = tuple(read_tables)
    if tables.pairs is not None and " f pair\n" in texts[0]:  # else the result does not need it
        leaves["pairs"] = tables.pairs
    score_text = texts[0] if score_mod is not None else None
    return Program(score_text, texts[-1] if mask_mod is not None else None, **leaves)


def _run(
    tracer: Tracer, score_mod: ScoreMod | None, mask_mod: MaskMod | None
) -> tuple[tuple[int, ...], tuple[frozenset[int], ...]]:
    """Runs both functions. Returns for each its result's node, and the nodes that need 64 bits."""
    values, ops = tracer.values, tracer.values.list
    results: list[int] = []
    wide: list[frozenset[int]] = []
    kind = values.device.type
    cast = torch.is_autocast_enabled(kind)
    with torch.autocast(kind, enabled=False) if cast else contextlib.nullcontext():
        if score_mod is not None:
            score = ops.value(PAIR, ops.dtype, node=ops.add("f", "score"))
            results.append(tracer.run("score_mod", score_mod, [score, *values.indices], "f"))
            wide.append(frozenset(ops.wide))
        if mask_mod is not None:
            values.tracking, ops.in_mask = False, True
            with torch.no_grad():
                ops.wide.clear()
                results.append(tracer.run("mask_mod", mask_mod, values.indices, "b"))
            wide.append(frozenset(ops.wide))
    return tuple(results), tuple(wide)


_known: dict[Any, Program] = {}
_MOST_KNOWN, _MOST_NUMBERS = 64, 1 << 16


def remembered(
    score_mod: ScoreMod | None, mask_mod: MaskMod | None, dtype: torch.dtype, **more: Any
) -> Program:
    """Does what `trace` does, but only once for functions that cannot change, as `i >= j`."""
    # First, because torch.compile cannot trace _fixed().
    fixed = (None,) if _records() else (_fixed(score_mod), _fixed(mask_mod))
    if None in fixed:
        return trace(score_mod, mask_mod, dtype=dtype, **more)
    inference = torch.is_inference_mode_enabled()
    key = *fixed, dtype, *more.values(), torch.get_default_dtype(), inference
    if (program := _known.get(key)) is None:
        program = trace(score_mod, mask_mod, dtype=dtype, **more)
        parts = program.arguments().values()
        if sum(x.numel() for x in parts if isinstance(x, Tensor)) <= _MOST_NUMBERS:
            if len(_known) >= _MOST_KNOWN:
                _known.clear()
            _known[key] = program
    return program


def _fixed(function: Callable[..., Any] | None) -> Any:
    """Returns all that a function's results depend on besides its arguments, or None.

    None means that the results may depend on more, for example on a global or on a tensor. They do
    not if the function captures numbers alone, and uses operators, but no names.
    """
    if function is None:
        return ()
    if type(function) is not FunctionType or function.__defaults__ or function.__kwdefaults__:
        return None
    code = function.__code__
    # Every second byte is an operation. Each call must assign to a captured name (STORE_DEREF).
    if code.co_names or dis.opmap["STORE_DEREF"] in code.co_code[::2]:
        return None
    try:
        captured = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a name that is not assigned yet
        return None
    numbers = bool, int, float
    if any(type(x) not in numbers for x in captured):
        return None
    if any(type(x) not in (*numbers, str, type(None)) for x in code.co_consts):
        return None
    return code, tuple(map(repr, captured))  # repr tells 1, 1.0 and True apart, and 0.0 and -0.0


def _records() -> bool:
    """Whether something sees the operations of this call, or changes what they return."""
    C = torch._C
    return bool(
        torch.compiler.is_compiling()
        or not C._is_torch_function_enabled()
        or C._get_tracing_state()
        or C._len_torch_dispatch_stack()
        or C._len_torch_function_stack()
        or C._functorch.peek_interpreter_stack()
    )


def _stack(name: str, leaves: list[Tensor], lengths: dict[int, int]) -> Tensor:
    """Stacks n leaves `[B|1, H|1, N|1]` into `[B|1, H|1, N, n]`, each column contiguous."""
    if len(leaves) > MOST_LEAVES:
        fail(f"the functions need {len(leaves)} {name}; at most {MOST_LEAVES}")
    length = lengths[_KINDS[name.partition("_")[0]]]
    B, H = (max(x.size(axis) for x in leaves) for axis in (0, 1))
    whole = [x if x.shape == (B, H, length) else x.expand(B, H, length) for x in leaves]
    columns = torch.stack(whole, -2) if len(whole) > 1 else whole[0].contiguous().unsqueeze(-2)
    return columns.transpose(-1, -2)


def score_program(
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    *,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype = torch.float32,
) -> Program:
    """Returns the program that :func:`flex_attention` would run for every pair; ``print`` shows it.

    Args:
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)``, as in PyTorch's FlexAttention.
        mask_mod: ``mask_mod(b, h, q_idx, kv_idx)``, likewise.
        shape: ``(B, H, L, S)``: the sizes of the batch, heads of the query, queries and keys.
        dtype: the dtype of query, key and value.

    Returns:
        The two lists of operations as strings, and the tensors that the operations read. These
        tensors hold what the functions captured at this call. Tables and `pairs` may share memory
        with captured tensors. The other tensors stay the same if a captured tensor changes later.

    Raises:
        RuntimeError: a function does something that the kernels cannot run for every pair. The
            message names the operation and the line, and says what to do instead.
    """
    B, H, L, S = shape
    return trace(score_mod, mask_mod, batch=B, heads=H, queries=L, keys=S, dtype=dtype)
