"""The list of operations that the kernels run for every pair, and the text that it becomes."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any

import torch
from torch import Tensor

from torch_attn._programs.limits import Limits, limits_of, within
from torch_attn._programs.value import PAIR, Value, as_dtype, letter


def _word(x: Any, type_: str) -> str:
    """Returns the text that stands for a constant in the list."""
    if type_ != "f":
        whole = int(bool(x) if type_ == "b" else x)
        if type_ == "i" and whole != x:
            raise NotImplementedError(f"{x!r} as a whole number")
        return str(whole)
    return float(x).hex() if math.isfinite(x) else str(float(x))


_NEUTRAL = {  # x op constant is x, bit for bit
    *((name, "f", _word(1, "f")) for name in ("mul", "div")),
    *(("sub", "f", _word(0, "f")), ("add", "f", _word(-0.0, "f"))),
    *((name, "i", "1") for name in ("mul", "floor_divide")),
    *((name, "i", "0") for name in ("add", "sub", "or", "xor")),
    *(("or", "b", "0"), ("xor", "b", "0"), ("and", "b", "1")),
}
_SWAPS = frozenset(("add", "mul", "and", "or", "xor"))
_CONVERT = {"f": "float", "i": "int", "b": "bool"}
_LEAF = "row", "row", "key", "distance"  # by kind
# By number. A node is (type, name, operands...). An operand is the number of a node, the word of a
# constant, or a leaf: (stored type, serial).
Nodes = tuple[tuple[Any, ...], ...]


class List:
    """The operations of score_mod and mask_mod. Equal operations are stored once.

    A node is an operation, a constant or a leaf, and has a number in the list. A leaf is a number
    that the list reads from a tensor.

    Args:
        dtype: the dtype of floating leaves: float32 or float64.
        compiling: whether torch.compile is tracing. While it traces, the numbers of constants
            cannot be read, so constants become leaves.

    Attributes:
        in_mask: whether mask_mod is running, not score_mod.
        wide: the nodes whose whole numbers need 64 bits. Kernels have them in a mask_mod, and in
            a score_mod whose numbers are float64.
    """

    def __init__(self, dtype: torch.dtype, compiling: bool) -> None:
        self.dtype, self.compiling, self.in_mask = dtype, compiling, False
        self.wide: set[int] = set()
        self.nodes: dict[tuple[Any, ...], int] = {}  # from (type, name, operands...)
        self.words: dict[int, str] = {}  # of nodes that are constants
        self.leaves: dict[tuple[str, int], Tensor] = {}  # by stored type (t: a table) and serial
        self.count = 0

    def value(
        self, kind: int, dtype: torch.dtype, make: Any = None, node: int = -1, **fields: Any
    ) -> Value:
        """Makes a Value, which has a serial number of its own."""
        self.count += 1
        value = Value(self.count, kind, dtype, letter(dtype))
        value.make, value.node = make, node
        for name, x in fields.items():
            setattr(value, name, x)
        return value

    def add(self, *node: Any) -> int:
        """Adds the node (type, name, operands...), if it is new, and returns its number."""
        return self.nodes.setdefault(node, len(self.nodes))

    @property
    def bits(self) -> int:
        """The size of a whole number of the pair."""
        return 64 if self.in_mask or self.dtype == torch.float64 else 32

    def fit(self, limits: Limits, node: int) -> Limits | None:
        """Notes that a node has whole numbers within limits, which may be beyond 32 bits.

        Beyond 64 bits they wrap around, as PyTorch's do.
        """
        if within(limits, 32):
            return limits
        if self.bits == 32:
            least, most = limits
            raise NotImplementedError(
                f"it has whole numbers from {least} to {most}, beyond the 32 bits of a score_mod; "
                "take the remainder of smaller numbers, or convert to floating numbers first"
            )
        self.wide.add(node)
        return limits if within(limits, 64) else None

    def limits(self, x: Any) -> Limits | None:
        """Returns the least and the largest whole number of a value; None if they are unknown.

        If the limits are not known yet, this method reads the value's tensor, if that is possible.
        """
        if type(x) is not Value:
            return (int(x), int(x)) if type(x) in (int, bool) else None
        if x.type == "b":
            return 0, 1
        if x.type == "i" and x.limits is None and x.kind != PAIR:
            x.limits = self.read_limits(x.tensor)
        return x.limits

    def read_limits(self, numbers: Tensor) -> Limits | None:
        """Returns the least and the largest number of a tensor; None if they cannot be read."""
        if not self.compiling and numbers.numel():
            # Under torch.func.vmap the numbers cannot be read. index_select then checks the
            # indices.
            with contextlib.suppress(RuntimeError):
                least, most = numbers.detach().aminmax()
                return int(least), int(most)
        return None

    def node_of(self, x: Any, type_: str) -> int:
        """Returns the node that has a Value or a number, converted to a type."""
        if type(x) is not Value:  # no isinstance() here: this runs for every operand
            word = _word(x, type_)
            node = self.add(type_, "const", word)
            self.words[node] = word
            if type_ == "i":
                self.fit((int(word), int(word)), node)
            return node
        have = x.type
        if x.kind == PAIR:
            return x.node if have == type_ else self.add(type_, _CONVERT[type_], x.node)
        if x.constant and not self.compiling:
            with contextlib.suppress(RuntimeError):  # a fake tensor has no number
                return self.node_of(x.tensor.item(), type_)
        a, b, c = x.affine or (0, 0, 0)
        if type_ == "i" and a + b == 1 and type(c) is int and c == 0:
            return self.add("i", "query" if a else "key_index")
        if type_ == "i" and x.dtype == torch.int64:
            limits = self.limits(x)
            if limits is not None and not within(limits, 32):
                return self._wide_leaf(x, limits)
        # Booleans are stored as whole numbers, so that one column serves both types.
        stored = "i" if have == "b" and type_ == "b" else type_
        if (stored, x.serial) not in self.leaves:
            tensor = x.tensor if type_ != "b" or have == "b" else x.tensor != 0
            if type_ == "f" and x.unrounded is not None:
                tensor = x.unrounded
            tensor = as_dtype(tensor, self.dtype if type_ == "f" else torch.int32)
            self.leaves[stored, x.serial] = tensor
        return self.add(type_, _LEAF[x.kind], (stored, x.serial))

    def _wide_leaf(self, x: Value, limits: Limits) -> int:
        """Stores whole numbers of 64 bits as two leaves of 32 bits."""
        self.fit(limits, -1)  # an error in a score_mod of float32
        if x.node < 0:
            low = self.value(x.kind, torch.int32, make=lambda: x.tensor.to(torch.int32))
            high = self.value(x.kind, torch.int32, make=lambda: (x.tensor >> 32).to(torch.int32))
            nodes = [self.node_of(x, "i") for x in (high, low, 2**32, 2**32 - 1)]
            high_bits = self.add("i", "mul", nodes[0], nodes[2])
            low_bits = self.add("i", "and", nodes[1], nodes[3])
            x.node = self.add("i", "or", high_bits, low_bits)
        return x.node

    def reads(self, node: int, leaf: str) -> bool:
        """Returns whether a node depends on a leaf."""
        nodes = tuple(self.nodes)
        return any(nodes[n][1] == leaf for n in _needed(nodes, node))

    def operation(self, dtype: torch.dtype, name: str, *operands: Any) -> Value:
        """Adds an operation. Converts its operands to the type of its result."""
        type_ = letter(dtype)
        nodes = [self.node_of(x, type_) for x in operands]
        node = -1
        if len(nodes) == 2:
            x, y = nodes
            if y in self.words and (name, type_, self.words[y]) in _NEUTRAL:
                node = x
            elif x in self.words and (name, type_, self.words[x]) in _NEUTRAL and name in _SWAPS:
                node = y
        value = self.value(PAIR, dtype, None, node if node >= 0 else self.add(type_, name, *nodes))
        if type_ == "i":
            return self.bounded(value, name, [self.limits(x) for x in operands])
        return value

    def bounded(self, value: Value, name: str, of: list[Limits | None]) -> Value:
        """Gives a whole number its limits. Makes it wrap around where PyTorch's number does."""
        known = [x for x in of if x is not None]
        if name in ("floor_divide", "remainder") and of[1] == (0, 0):
            raise NotImplementedError("its divisor is 0 for every pair")
        limits = limits_of(name, known) if len(known) == len(of) else None
        if value.dtype == torch.int32 and (
            name == "mul" if limits is None else not within(limits, 32)
        ):
            return self.narrowed(value) if self.bits == 64 else value
        if limits is not None:
            value.limits = self.fit(limits, value.node)
        elif name == "mul" and self.bits == 64:
            self.wide.add(value.node)
        return value

    def narrowed(self, x: Value) -> Value:
        """Converts whole numbers to x.dtype, an integer dtype, as PyTorch does, by wrapping."""
        of = torch.iinfo(x.dtype)
        if x.dtype == torch.int64 or (x.limits and of.min <= x.limits[0] and x.limits[1] <= of.max):
            return x
        if x.dtype == torch.int32 and self.bits == 32:
            return x
        shift, ones = (self.node_of(n, "i") for n in (-of.min, 2**of.bits - 1))
        low_bits = self.add("i", "and", self.add("i", "add", x.node, shift), ones)
        node = self.add("i", "sub", low_bits, shift)
        return self.value(PAIR, x.dtype, node=node, limits=(of.min, of.max))


def _needed(nodes: Nodes, result: int) -> set[int]:
    """Returns the nodes that a result needs."""
    needed = {result}
    for node in range(result, -1, -1):
        if node in needed:
            needed.update(x for x in nodes[node][2:] if type(x) is int)
    return needed


@functools.lru_cache(maxsize=256)
def write(
    nodes: Nodes,
    results: tuple[int, ...],
    wide: tuple[frozenset[int], ...],
    dtype: torch.dtype,
) -> tuple[list[str], list[int], list[tuple[str, str, int]]]:
    """Returns a string for each result, with only the operations that the result needs.

    Returns:
        The strings; how many operations each string has; and the leaves that the strings read, each
        as (kind, stored type, serial). Leaves of the same kind become columns of tensors, in the
        order in which they are returned. Leaves of type f become columns of one tensor, and all
        other leaves columns of a second tensor.
    """
    texts, counts, columns = [], [], {}  # type: ignore[var-annotated]
    for result, wide_nodes in zip(results, wide, strict=True):
        needed = _needed(nodes, result)
        is_wide = bool(needed & wide_nodes)
        # Kernels evaluate a wide list in float64.
        rounds = is_wide and dtype == torch.float32
        line_of: dict[int, int] = {}
        lines, count = ["attn.program 1 wide" if is_wide else "attn.program 1"], 0
        for node in sorted(needed):
            type_, name, *operands = nodes[node]
            words = []
            for x in operands:
                if type(x) is tuple:
                    group = ("table", False) if x[0] == "t" else (name, x[0] == "f")
                    column = columns.setdefault(group, {})
                    x = column.setdefault(x, len(column))
                    words.append(str(x))
                elif type(x) is int:
                    words.append(f"%{line_of[x]}")
                else:
                    words.append(x)
            is_operation = any(type(x) is int for x in operands)
            count += is_operation
            line_of[node] = len(lines) - 1
            lines.append(" ".join([f"%{line_of[node]}", type_, name, *words]))
            if rounds and type_ == "f" and (is_operation or name == "const"):
                count += 1
                lines.append(f"%{line_of[node] + 1} f float32 %{line_of[node]}")
                line_of[node] += 1
        texts.append("\n".join([*lines, f"return %{line_of[result]}\n"]))
        counts.append(count)
    return texts, counts, [(kind, *leaf) for (kind, _), of in columns.items() for leaf in of]
