"""Evaluates the string of a score program over all of L x S, by PyTorch's functions."""

from collections.abc import Callable

import torch
from torch import Tensor

from torch_attn._programs.program import Program

_FUNCTIONS = {
    "div": torch.true_divide,
    "float": lambda x: x.double(),
    "int": lambda x: x.long(),
    "bool": lambda x: x != 0,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "not": torch.bitwise_not,
    "float32": lambda x: x.float().double(),
    "float16": lambda x: x.half().double(),
    "bfloat16": lambda x: x.bfloat16().double(),
    "floor_divide": lambda x, y: by_0_is_0(torch.floor_divide, x, y),
    "remainder": lambda x, y: by_0_is_0(torch.remainder, x, y),
}

_DTYPES = {"f": torch.float64, "i": torch.int64, "b": torch.bool}
_TYPES = {
    "f": lambda x: x.is_floating_point(),
    "i": lambda x: x.dtype in (torch.int32, torch.int64),
    "b": lambda x: x.dtype == torch.bool,
}


def by_0_is_0(divide: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    if y.is_floating_point():
        return divide(x, y)
    return divide(x, y.masked_fill(y == 0, 1)).masked_fill(y == 0, 0)


def evaluate(text: str, program: Program, shape: tuple[int, ...], score: Tensor | None) -> Tensor:
    """The result of every pair, `[B, H, L, S]`.

    Args:
        text: `program.score` or `program.mask`.
        score: `[B, H, L, S]`, float64.
    """
    _, _, L, S = shape
    first, *lines, last = text.splitlines()
    assert first in ("attn.program 1", "attn.program 1 wide")
    rows, keys = torch.arange(L)[:, None], torch.arange(S)
    values: list[Tensor] = []
    for n, line in enumerate(lines):
        place, type_, name, *operands = line.split(" ")
        assert place == f"%{n}"
        if name == "score":
            x = score
        elif name == "const":
            x = torch.tensor(_constant(type_, operands[0]), dtype=_DTYPES[type_])
        elif name in ("row", "key", "distance"):
            leaves = getattr(program, f"{name}_{'terms' if type_ == 'f' else 'numbers'}")
            x = leaves[..., int(operands[0])]
            x = {"row": x[..., None], "key": x[..., None, :]}.get(name, x)
            x = x[..., rows - keys + S - 1] if name == "distance" else x
            x = {"f": x.double(), "i": x.long(), "b": x != 0}[type_]
        elif name.endswith("table"):
            table = program.tables[int(operands[0])].double()
            row = {"table": torch.tensor(0), "row_table": rows, "key_table": keys}[name]
            index = values[int(operands[1][1:])]
            b, h = torch.arange(table.size(0)), torch.arange(table.size(1))
            x = table[b.view(-1, 1, 1, 1), h.view(-1, 1, 1), row, index]
        elif name in ("query", "key_index"):
            x = rows if name == "query" else keys
        else:
            of = [values[int(x[1:])] for x in operands if int(x[1:]) < n]
            assert len(of) == len(operands)
            function = _FUNCTIONS.get(name) or getattr(torch, name)
            x = function(*of)
            if type_ == "i" and not first.endswith("wide"):
                x = x.to(torch.int32).long()
        assert _TYPES[type_](x), line
        values.append(x)
    word, result = last.split(" ")
    assert word == "return"
    return values[int(result[1:])].expand(shape)


def _constant(type_: str, word: str) -> float | int | bool:
    if type_ == "f":
        return float.fromhex(word)  # knows inf and nan too
    return int(word) if type_ == "i" else bool(int(word))
