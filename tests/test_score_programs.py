"""score_mod and mask_mod: the list and its leaves compute what the function says of every pair."""

import functools
import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torch_attn
from tests._programs import by_0_is_0, evaluate
from torch_attn import reference
from torch_attn._programs.limits import limits_of
from torch_attn._programs.program import Program, remembered, trace

# All different, so that a wrong axis or direction cannot go unseen.
B, H, L, S = SHAPE = 2, 3, 5, 8


@dataclass
class Case:
    """Functions, what they capture with a gradient, and the lines of their lists."""

    score: Callable[..., Any] | None = None
    mask: Callable[..., Any] | None = None
    captured: list[Tensor] = field(default_factory=list)
    lines: str | None = None  # of the score, or of the mask without one; without constants


TWO, LENGTHS = torch.tensor(2), torch.tensor([2, 4])
OF_HEADS = torch.tensor([True, False, True])
CASES: dict[str, Callable[[], Case]] = {
    "causal": lambda: Case(mask=lambda b, h, i, j: i >= j, lines="b distance 0"),
    "causal_with_an_offset_in_a_tensor": lambda: Case(
        mask=lambda b, h, i, j: i + TWO >= j, lines="b distance 0"
    ),
    "offset_without_a_distance": lambda: Case(
        mask=lambda b, h, i, j: (i + TWO) ^ j > 3, lines="i row 0, i key_index, i xor, b gt"
    ),
    "sliding_window": lambda: Case(
        mask=lambda b, h, i, j: (j <= i) & (i - j < 3), lines="b distance 0"
    ),
    "dilated": lambda: Case(mask=lambda b, h, i, j: (i - j) % 2 == 0, lines="b distance 0"),
    "prefix": lambda: Case(
        mask=lambda b, h, i, j: (i >= j) | (j < LENGTHS[b]), lines="b distance 0, b key 0, b or"
    ),
    "of_the_head_alone": lambda: Case(
        mask=lambda b, h, i, j: OF_HEADS[h] & (b < 5), lines="b row 0"
    ),
    "numbers_that_wrap_around": lambda: Case(
        mask=lambda b, h, i, j: (i + 126).to(torch.int8) >= j + 126 - 3,
        lines="i row 0, i key 0, b ge",
    ),
    "soft_cap": lambda: Case(
        lambda s, b, h, i, j: 3 * torch.tanh(s / 3), lines="f score, f div, f tanh, f mul"
    ),
    # A tanh with a factor, whose product is used again.
    "tanh_and_a_bias": lambda: Case(lambda s, b, h, i, j: 20 * torch.tanh(s / 20) + j * 0.125),
    "bias_less_a_tanh": lambda: Case(lambda s, b, h, i, j: j * 0.125 - 2 * torch.tanh(s)),
    "tanh_of_a_tanh": lambda: Case(lambda s, b, h, i, j: torch.tanh(3 * torch.tanh(s))),
    "tanh_twice": lambda: Case(lambda s, b, h, i, j: 3 * torch.tanh(s) * (2 * torch.tanh(s) + s)),
}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    """Adds a case whose functions capture tensors of their own."""
    CASES[make.__name__] = make
    return make


def learned(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@case
def alibi() -> Case:
    slopes = learned(H)
    return Case(
        lambda s, b, h, i, j: s - (i - j).abs() * slopes[h],
        lambda b, h, i, j: i >= j,
        [slopes],
        "f score, f distance 0, f sub",
    )


@case
def numbers_of_numpy() -> Case:
    half, two, three = np.float64(0.5), np.float32(2), np.int64(3)
    return Case(lambda s, b, h, i, j: s * two + i * j * half + torch.where(i * j > three, half, s))


@case
def documents() -> Case:
    ids = torch.randint(0, 2, (B, S))
    return Case(
        lambda s, b, h, i, j: torch.where(ids[b, i] == ids[b][j], s, -math.inf),
        lambda b, h, i, j: ids[b, i] == ids[b, j],
        lines="f score, i row 0, i key 0, b eq, f where",
    )


@case
def t5() -> Case:
    table = learned(32, H)

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = j - i
        near = distance.abs()
        far = torch.log(near.float() / 2) / math.log(16 / 2) * 2
        far = torch.min(2 + far.to(torch.long), torch.full_like(near, 15))
        s += table[torch.where(distance > 0, 16, 0) + torch.where(near < 2, near, far), h]
        return s

    return Case(score, captured=[table], lines="f score, f distance 0, f add")


@case
def clamped_distances() -> Case:
    table = learned(H, 7)
    return Case(
        lambda s, b, h, i, j: s + table[h, (i - j).clamp(-3, 3) + 3],
        captured=[table],
        lines="f score, f distance 0, f add",
    )


@case
def negative_and_partial_indices() -> Case:
    table = learned(4, 3, H, 2)
    return Case(
        lambda s, b, h, i, j: s * table[-2, :, h, 1][-1 - (j % 2)] + table[0][1][h][0],
        captured=[table],
        lines="f score, f key 0, f mul, f row 0, f add",
    )


@case
def distances_from_the_end() -> Case:
    table, once = learned(L + S), torch.tensor([1, 200], dtype=torch.uint8)
    return Case(
        lambda s, b, h, i, j: s + table[j - i] * table[(2 * (i + 1) - -j * -2) // 2],
        lambda b, h, i, j: (i + once[0]) - (once[1] + j) > -once[1].int(),
        [table],
        "f score, f distance 0, f add",
    )


@case
def every_kind_at_once_by_any_function() -> Case:
    x, y, z = learned(B), learned(H), learned(L)
    return Case(
        lambda s, b, h, i, j: s + torch.stack([x[b], y[h] * 2, z[i] * 3]).cumsum(0)[b + 1],
        captured=[x, y, z],
        lines="f score, f row 0, f add",
    )


@case
def swin() -> Case:
    table, window = learned(H, 9), torch.arange(S) % 4
    return Case(
        lambda s, b, h, i, j: torch.where(window[i] == window[j], s, s + table[h, i % 9]),
        captured=[table],
    )


@case
def temperature() -> Case:
    scale, bias = learned(), learned(1)
    return Case(
        lambda s, b, h, i, j: s * scale.exp() + bias[0],
        captured=[scale, bias],
        lines="f score, f row 0, f mul, f row 1, f add",
    )


@case
def booleans() -> Case:
    flags = torch.rand(S) > 0.5
    return Case(
        lambda s, b, h, i, j: s + (flags[i] ^ ~flags[j]) * 2.0 + (flags[j] + flags[i] * True),
        lambda b, h, i, j: (flags[i] | flags[j]).logical_not() | (flags[j] & (i != j)),
    )


@case
def embedding() -> Case:
    torch.manual_seed(0)
    layer = nn.Embedding(S + L, H, dtype=torch.float64)
    return Case(
        lambda s, b, h, i, j: s + layer(i - j + S - 1)[h],
        captured=[layer.weight],
        lines="f score, f distance 0, f add",
    )


@case
def mlp() -> Case:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(2, 4), nn.GELU(), nn.Linear(4, H)).double()

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = (i - j).double()
        return s + layers(torch.stack([distance, distance.abs()]))[h]

    parameters = list(layers.parameters())
    return Case(score, captured=parameters, lines="f score, f distance 0, f add")


@case
def sink() -> Case:
    strength = learned(H, S)
    return Case(
        lambda s, b, h, i, j: torch.where(j < 2, s + strength[h, j], s),
        captured=[strength],
        lines="f score, f key 0, f add, b key 0, f where",
    )


def shifted(
    s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, *, by: Tensor, of: Any
) -> Tensor:
    return of(s, b, h, i, j) + by[b]


@case
def nested() -> Case:
    by, slopes = learned(B), learned(H)
    inner = lambda s, b, h, i, j: s * slopes[h]  # noqa: E731
    return Case(functools.partial(shifted, by=by, of=inner), captured=[by, slopes])


class Bias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(learned(H, L))

    def forward(self, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + self.table[h, i] * torch.exp(-(i - j).square() / 9.0)

    def visible(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (self.table[h, i] > 0) | (j == 0)


@case
def module_and_bound_method() -> Case:
    bias = Bias()
    return Case(bias, bias.visible, [bias.table])


@case
def every_operation_of_floating_numbers() -> Case:
    x, y = learned(S), learned(H, S)

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        p, q = x[i] * 0.5, y[h, j] * 2
        both = p * q + 3.1
        r = both.abs() + torch.minimum(p, q) - torch.maximum(q, p) + (-both).clamp(-4, 1)
        r = r + both.square().reciprocal() + (both**2 + 1).sqrt() + torch.rsqrt(both * both + 2)
        r = r + torch.exp(p - q) + torch.exp2(p + q) + torch.log(both * both + 1)
        r = r + torch.log1p(both * both) + torch.sigmoid(p * q) + torch.floor(both) + p % q
        r = r + both.masked_fill(p > q, 1.5) + torch.relu(p - q) + 2 ** (p - q)
        r -= 1 / (3 + both) + both.clamp_max(2.0).to(s.dtype)
        return s * (2 - r) + both.half().bool()

    return Case(score, captured=[x, y])


@case
def every_operation_of_whole_numbers() -> Case:
    ids = torch.randint(-9, 9, (S,))

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        n, m = ids[i] * 3 - ids[j], i + j
        r = n // 4 + n % 5 + (n & 3) + (n | 4) + (n ^ 7) + (~n) + n.clamp(min=2) + m.square()
        r = r + torch.maximum(n, m) + torch.where(n > m, -n, n.abs()) + (m % 2).bool() * 5
        return s * (n / 7 + (n.bool() & (n <= 1)).float()) + r - n.clamp(-3, 4) + (m / 2).int()

    return Case(score, lambda b, h, i, j: (~(ids[i] + j > 3)) ^ (i + j).bool())


@case
def constants() -> Case:
    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        two = torch.full_like(s, 1.0) + s.new_ones(())
        return s * two * 1.0 - 0 + torch.where(torch.tensor(True), s, 3.0)

    return Case(
        score, lambda b, h, i, j: b.new_ones((), dtype=torch.bool), [], "f score, f mul, f add"
    )


def traced(of: Case, **options: Any) -> Program:
    arguments = {"dtype": torch.float64, **options}
    return trace(of.score, of.mask, batch=B, heads=H, queries=L, keys=S, **arguments)


def lines(text: str) -> str:
    """What a list does, without its constants and places."""
    found = re.findall(r"^%\d+ (.*)$", text, flags=re.MULTILINE)
    return ", ".join(re.sub(" %.*", "", x) for x in found if " const " not in x)


@pytest.mark.parametrize("name", CASES)
def test_computes_what_the_function_says(name: str) -> None:
    of = CASES[name]()
    program = traced(of)
    if of.lines is not None:
        text = program.score or program.mask
        assert lines(text or "") == of.lines
    if of.mask is not None:
        assert program.mask
        visible = evaluate(program.mask, program, SHAPE, None)
        assert torch.equal(visible, reference.of_every_pair(of.mask, SHAPE))
    if of.score is None:
        return
    score = learned(*SHAPE)
    assert program.score
    ours = evaluate(program.score, program, SHAPE, score)
    theirs = reference.of_every_pair(of.score, SHAPE, score.clone())
    torch.testing.assert_close(ours, theirs)
    wanted = [score, *of.captured]
    weight = torch.randn(SHAPE, dtype=torch.float64)
    finite = theirs.isfinite()
    gradients = [
        torch.autograd.grad((x[finite] * weight[finite]).sum(), wanted, retain_graph=True)
        for x in (ours, theirs)
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", CASES)
def test_float32_and_both_together_compute_the_same(name: str) -> None:
    of = CASES[name]()
    program = traced(of, dtype=torch.bfloat16)
    exact = traced(of)
    assert (program.score, program.mask) == (exact.score, exact.mask)
    for noun in ("row", "key", "distance"):
        terms, numbers = getattr(program, f"{noun}_terms"), getattr(program, f"{noun}_numbers")
        for leaves, dtype in ((terms, torch.float32), (numbers, torch.int32)):
            if leaves is not None:
                length = {"row": L, "key": S, "distance": L + S - 1}[noun]
                assert leaves.dtype == dtype
                assert leaves.size(0) in (1, B)
                assert leaves.size(1) in (1, H)
                assert leaves.size(2) == length
                assert leaves.stride(2) == 1


def fails(score: Any, *words: str, mask: Any = None, dtype: torch.dtype = torch.float32) -> None:
    with pytest.raises(RuntimeError, match=r"^torch_attn\.flex_attention: ") as caught:
        traced(Case(score, mask), dtype=dtype)
    for word in (*words, __file__):
        assert word in str(caught.value)


def branches(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s if s > 0 else -s


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


TABLE = torch.randn(H, 4, requires_grad=True)
IDS = torch.randint(0, 2, (S,))
VECTORS = torch.randn(S, 4)
REFUSED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "control flow": (branches, ("__bool__", "return s if s > 0 else -s", "torch.where")),
    "min": (lambda s, b, h, i, j: s * min(i, j), ("__bool__", "torch.minimum")),
    "item": (lambda s, b, h, i, j: s * i.item(), ("item",)),
    "list": (lambda s, b, h, i, j: s * [1, 2, 3][h], ("__index__", "a tensor")),
    "tensor of a place": (lambda s, b, h, i, j: s * torch.tensor(s), ("no tensor of",)),
    "range": (lambda s, b, h, i, j: s * torch.arange(s)[0], ("no arange of",)),
    "large constant": (lambda s, b, h, i, j: s + (i + j) * 2**31, ("beyond the 32 bits",)),
    "large numbers": (lambda s, b, h, i, j: s + (i * 2**30 ^ j), ("from 0 to 4294967296, bey",)),
    "no number": (lambda s, b, h, i, j: s + (i * j) * "2", ("'2' as a whole number",)),
    "fraction": (lambda s, b, h, i, j: s + (i * j).masked_fill(i > j, 1.5), ("1.5 as a whole",)),
    "random": (lambda s, b, h, i, j: s + torch.rand(()), ("rand",)),
    "dropout": (lambda s, b, h, i, j: nn.functional.dropout(s), ("dropout",)),
    "in place": (lambda s, b, h, i, j: s + VECTORS.add_(1)[i, 0], ("add_ changes",)),
    "setitem": (lambda s, b, h, i, j: VECTORS.__setitem__((0, 0), i), ("__setitem__ changes",)),
    "unknown": (lambda s, b, h, i, j: torch.erfinv(s), ("no erfinv", "attn_mask=")),
    "pow": (lambda s, b, h, i, j: s * (i ^ j) ** -2, ("pow", "positive constant")),
    "vectors": (
        lambda s, b, h, i, j: s - (VECTORS[i] - VECTORS[j]).abs().sum(),
        ("no sub of a vector that depends on query and key", "more columns"),
    ),
    "dot": (
        lambda s, b, h, i, j: s + torch.dot(VECTORS[i], VECTORS[j]),
        ("no dot", "more columns"),
    ),
    "score as index": (
        lambda s, b, h, i, j: s + TABLE[h, s.int()],
        ("TABLE of shape [3, 4] depends on the score",),
    ),
    "out of range": (
        lambda s, b, h, i, j: s + TABLE[h, j],
        ("index 7 is out of range in dimension 1 of TABLE of shape [3, 4]",),
    ),
    "just out of range": (lambda s, b, h, i, j: s + TABLE[h, i], ("index 4 is out",)),
    "below range": (lambda s, b, h, i, j: s + TABLE[h, i - 5], ("index -5",)),
    "too many indices": (lambda s, b, h, i, j: s + TABLE[h, 0, i], ("indices",)),
    "floating index": (lambda s, b, h, i, j: s + TABLE[h, i / 2], ("index of torch.float32",)),
    "vector": (lambda s, b, h, i, j: s + TABLE[h], ("query and key at once",)),
    "vector result": (lambda s, b, h, i, j: TABLE[h], ("returned shape [4]",)),
    "no tensor": (lambda s, b, h, i, j: None, ("returned NoneType",)),
    "whole result": (lambda s, b, h, i, j: i - j, ("returned torch.int64",)),
    "autograd.Function": (lambda s, b, h, i, j: Doubled.apply(s), ("autograd.Function",)),
    "sparse": (lambda s, b, h, i, j: s + TABLE.detach().to_sparse()[h, i], ("sparse",)),
    "complex": (lambda s, b, h, i, j: s + torch.tensor(1j), ("complex",)),
    "narrow": (lambda s, b, h, i, j: s + (IDS.byte()[i] - IDS.byte()[j]), ("uint8", ".int()")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_names_what_it_cannot_run_and_where(name: str) -> None:
    score, words = REFUSED[name]
    fails(score, *words)


def test_a_mask_is_boolean() -> None:
    fails(None, "mask_mod returned torch.float32", mask=lambda b, h, i, j: i * 1.0)


def test_limits() -> None:
    def long(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        for n in range(65):
            s = s * (n + 2)
        return s

    def wide(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        for n in range(17):
            s = s * torch.cos(i * (n + 1))
        return s

    fails(long, "65 operations of the pair; at most 64")
    fails(wide, "17 row_terms; at most 16")


def biased(table: Tensor, scale: Tensor, ids: Tensor) -> Tensor:
    """Row, key and distance terms with gradients to a table and to a number: their sum."""

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        near = torch.where((i - j).abs() < 2, (i - j).abs(), 3)
        return s * scale + table[near, h] + table[ids[i], h] * table[-1, h] + table[0, h]

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return ids[i] >= table[ids[j], h] * scale

    program = traced(Case(score, mask))
    assert program.score
    score = torch.linspace(-1, 1, B * H * L * S, dtype=torch.float64).view(SHAPE)
    return evaluate(program.score, program, SHAPE, score).sin().sum()


def test_captured_tensors_of_torch_func() -> None:
    table, ids = learned(4, H), torch.randint(-1, 4, (S,))
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    loss = functools.partial(biased, ids=ids)
    wanted = torch.autograd.grad(loss(table, scale), [table, scale])
    leaves = table.detach(), scale.detach()
    torch.testing.assert_close(torch.func.grad(loss, argnums=(0, 1))(*leaves), wanted)
    direction = torch.randn(4, H, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)
    _, tangent = torch.func.jvp(loss, leaves, direction)
    along = sum((g * d).sum() for g, d in zip(wanted, direction, strict=True))
    torch.testing.assert_close(tangent, along)
    torch.autograd.gradcheck(loss, (table, scale))
    torch.autograd.gradgradcheck(loss, (table, scale))

    tables, scales = torch.randn(3, 4, H).double(), torch.rand(3).double()
    samples = tables, scales, torch.randint(-1, 4, (3, S))
    for function in (biased, torch.func.grad(biased)):
        each = [function(*sample) for sample in zip(*samples, strict=True)]
        torch.testing.assert_close(torch.func.vmap(function)(*samples), torch.stack(each))


@pytest.mark.parametrize("threads", [2, 5])
def test_gradients_of_tables_have_the_same_bits(threads: int) -> None:
    """The derivative of PyTorch's indexing adds by atomics from 32,768 numbers on."""
    table = torch.randn(12, 33, requires_grad=True)

    def gradient() -> Tensor:
        mod = lambda s, b, h, i, j: s + table[h, (i - j).clamp(-16, 16) + 16]  # noqa: E731
        terms = trace(mod, None, batch=1, heads=12, queries=2048, keys=2048).distance_terms
        assert terms is not None
        assert terms.numel() > 32768
        return torch.autograd.grad((terms * weight).sum(), table)[0]

    weight = torch.randn(1, 12, 4095, 1)
    torch.set_num_threads(1)
    one = gradient()
    torch.set_num_threads(threads)
    for _ in range(5):
        assert torch.equal(gradient(), one)


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.scale = nn.Parameter(torch.randn(H, 7)), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, str | None, str | None]:
        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            s += self.table[h, (i - j).clamp(-3, 3) + 3] * self.scale
            return torch.where(ids[i] == ids[j], s, -math.inf)

        def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) | (ids[j] == 0)

        program = trace(score, mask, batch=B, heads=H, queries=L, keys=S)
        assert program.distance_terms is not None
        return (program.distance_terms.square().sum() * x).sum(), program.score, program.mask


def test_torch_compile_without_a_graph_break() -> None:
    model, x, ids = Compiled(), torch.randn(3), torch.randint(0, 2, (S,))
    results = []
    for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        loss, *texts = call(x, ids)
        loss.backward()
        results.append((loss.detach(), *texts, model.table.grad, model.scale.grad))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs) if isinstance(ours, Tensor) else ours == theirs


@pytest.mark.parametrize("strict", [False, True])
def test_torch_export(strict: bool) -> None:
    model, x, ids = Compiled(), torch.randn(3), torch.randint(0, 2, (S,))
    exported = torch.export.export(model, (x, ids), strict=strict).module()
    other = torch.flip(ids, [0])
    assert torch.equal(exported(x, other)[0], model(x, other)[0])


def test_reads_a_mask_without_gradients_and_stores_equal_leaves_once() -> None:
    table, ids, flags = learned(H, S), torch.randint(0, 2, (S,)), torch.rand(S) > 0.5
    program = traced(
        Case(
            lambda s, b, h, i, j: torch.where(ids[i] == ids[j], s, s + (flags[i] + ids[j])),
            lambda b, h, i, j: (ids[i] == ids[j]) & (table[h, i] > table[h, j]) & flags[i],
        )
    )
    assert program.row_numbers is not None
    assert program.row_numbers.shape == (1, 1, L, 2)
    assert program.row_terms is not None
    assert not program.row_terms.requires_grad


def test_in_place_changes_are_seen_by_every_name() -> None:
    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        same, total = s, torch.zeros_like(s)
        s *= 2
        nn.functional.relu(s, inplace=True)
        total += same
        return total - 1

    expected = "f score, f mul, b le, f where, f sub"
    assert lines(traced(Case(score)).score or "") == expected.replace("f sub", "f add, f sub")
    fails(lambda s, b, h, i, j: s + i.mul_(0.5), "in place")
    fails(lambda s, b, h, i, j: s + torch.add(i, 1, out=torch.zeros(())), "add changes")
    fails(lambda s, b, h, i, j: s + torch.zeros(()).add_(TABLE[0, 0]), "add_ changes")


LARGE = torch.tensor([2**31, -(2**40) + 5, *range(S - 2)])
BEYOND: dict[str, Callable[..., Tensor]] = {
    "a vector": lambda b, h, i, j: LARGE[i] - LARGE[j],
    "a constant": lambda b, h, i, j: (i + j) ^ 2**33,
    "a sum": lambda b, h, i, j: (i + 2**30) + (j + 2**30),
    "a difference": lambda b, h, i, j: (i - 2**30) - (j * 2 + 2**30),
    "a product": lambda b, h, i, j: (i * 100000) * (j * 100000),
    "products": lambda b, h, i, j: ((i * 300 + j) * 1103515245 + 12345) * 6364136223846793005,
    "the least, negated": lambda b, h, i, j: -((i ^ j) * 0 - 2**31),
    "the least, divided": lambda b, h, i, j: ((i ^ j) * 0 - 2**31) // -1,
    "a choice": lambda b, h, i, j: torch.where(i > j, LARGE[i], j),
    "a vector of 32 bits": lambda b, h, i, j: (i.int() * 2**20) * (j.int() * 2**20),
    "narrow ones": lambda b, h, i, j: (i * 37 + j).to(torch.int8).long() + (i * j).byte().int(),
    "by 0": lambda b, h, i, j: i % (j - 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", BEYOND)
def test_whole_numbers_beyond_32_bits(name: str, dtype: torch.dtype) -> None:
    """Masks have 64 bits, and scores of float64; of others they are an error with the limits."""
    number = BEYOND[name]
    of = lambda b, h, i, j: number(b, h, i, j) % 1000 < 500  # noqa: E731
    program = traced(Case(mask=of), dtype=dtype)
    assert program.mask
    i, j = torch.arange(L)[:, None], torch.arange(S)
    expected = number(0, 0, i, j.where(j != 2, 1) if name == "by 0" else j)
    expected = expected.masked_fill(j == 2, 0) if name == "by 0" else expected
    seen = evaluate(program.mask, program, SHAPE, None)
    assert torch.equal(seen, (expected % 1000 < 500).expand(SHAPE))
    x = [torch.randn(B, H, n, 8, dtype=dtype) for n in (L, S, S)]
    torch.testing.assert_close(torch_attn.flex_attention(*x, None, of), torch_attn.sdpa(*x, seen))
    score = Case(lambda s, b, h, i, j: s + (number(b, h, i, j) % 1000) / 1000)
    if dtype == torch.float64 or name in ("narrow ones", "by 0", "a vector of 32 bits"):
        program = traced(score, dtype=dtype)
        assert program.score
        added = evaluate(program.score, program, SHAPE, torch.zeros(SHAPE, dtype=torch.float64))
        torch.testing.assert_close(added, ((expected % 1000) / 1000.0).double().expand(SHAPE))
        found = torch_attn.flex_attention(*x, score.score)
        bias = ((expected % 1000) / 1000.0).to(dtype)
        torch.testing.assert_close(found, torch_attn.sdpa(*x, bias))
    else:
        fails(score.score, "whole numbers from ", "beyond the 32 bits of a score_mod")


def test_prints_what_runs() -> None:
    slopes = torch.rand(H)
    mod = lambda s, b, h, i, j: s - (i - j).abs() * slopes[h]  # noqa: E731
    program = torch_attn.score_program(mod, lambda b, h, i, j: i >= j, shape=SHAPE)
    assert (
        str(program)
        == """score: attn.program 1
%0 f score
%1 f distance 0
%2 f sub %0 %1
return %2
mask: attn.program 1
%0 b distance 0
return %0
distance_terms: [1, 3, 12, 1] torch.float32
distance_numbers: [1, 1, 12, 1] torch.int32
"""
    )


def test_what_the_text_says_of_types_constants_and_order() -> None:
    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        unused = torch.tanh(s) + s
        del unused
        return torch.where((i + j) % 3 > 1, s * 1.5 + s * 1.5, -math.inf)

    assert (
        traced(Case(score)).score
        == """attn.program 1
%0 f score
%1 i query
%2 i key_index
%3 i add %1 %2
%4 i const 3
%5 i remainder %3 %4
%6 i const 1
%7 b gt %5 %6
%8 f const 0x1.8000000000000p+0
%9 f mul %0 %8
%10 f add %9 %9
%11 f const -inf
%12 f where %7 %10 %11
return %12
"""
    )


def test_pairs_that_the_result_does_not_need_are_left_out() -> None:
    pairs = learned(L, S)

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        _ = s * pairs[i, j]
        return s + 1

    assert trace(score, None, batch=B, heads=H, queries=L, keys=S).pairs is None


def test_what_cannot_change_is_traced_once() -> None:
    """Operators and captured numbers alone. Anything else could return something else next time."""
    sizes = {"batch": 1, "heads": 2, "queries": 5, "keys": 8, "device": "cpu"}

    def program(score: Any, mask: Any = None, **more: Any) -> Program:
        return remembered(score, mask, torch.float32, **sizes | more)

    def near(width: float) -> Any:
        return lambda b, h, i, j: (i - j < width) & (j - i <= 2)

    def scaled(factor: Any) -> Any:
        return lambda s, b, h, i, j: s * factor

    assert program(None, near(3)) is program(None, near(3))
    assert program(scaled(2), near(3)) is program(scaled(2), near(3))
    others = [
        program(None, near(4)), program(None, near(3.0)), program(None, near(3), keys=9),
        program(scaled(2), near(3)), program(scaled(2.0), near(3)), program(scaled(True), near(3)),
    ]  # fmt: skip
    assert len({id(p) for p in [*others, program(None, near(3))]}) == 7
    with torch.inference_mode():  # its tensors cannot be saved for a backward
        inside = program(None, near(3)).arguments()
    outside = program(None, near(3)).arguments()
    assert inside["distance_numbers"].is_inference()
    assert not outside["distance_numbers"].is_inference()
    with torch.device("meta"):
        assert program(None, near(3)) is not program(None, near(3))

    calls, tensor, options = 0, torch.ones(8), {"width": 3}

    def counts(b: Any, h: Any, i: Any, j: Any) -> Any:
        nonlocal calls
        calls += 1
        return i >= j

    def by_default(b: Any, h: Any, i: Any, j: Any, width: Any = tensor) -> Any:
        return i >= j

    def empty_cell(b: Any, h: Any, i: Any, j: Any) -> Any:
        return i >= j if i is not None else later

    for mask in (
        counts,
        by_default,
        empty_cell,
        functools.partial(by_default),
        lambda b, h, i, j: j < tensor[j],
        lambda b, h, i, j: i - j < options["width"],
        lambda b, h, i, j: torch.logical_not(i < j),
        lambda b, h, i, j: (lambda: i >= j)(),
    ):
        assert program(None, mask) is not program(None, mask)
    assert calls == 2
    later = 0  # only now
    assert program(None, empty_cell) is program(None, empty_cell)
    with torch._C.DisableTorchFunction():  # in which nothing sees what the function calls
        inside = program(None, lambda b, h, i, j: 2 * i >= j)
    assert program(None, lambda b, h, i, j: 2 * i >= j) is not inside


OF_WHOLE: dict[str, Callable[..., Tensor]] = {
    **{
        name: getattr(torch, name)
        for name in ("add", "sub", "mul", "neg", "abs", "minimum", "maximum", "clamp")
    },
    **{name: getattr(torch, f"bitwise_{name}") for name in ("and", "or", "xor", "not")},
    "floor_divide": lambda x, y: by_0_is_0(torch.floor_divide, x, y),
    "remainder": lambda x, y: by_0_is_0(torch.remainder, x, y),
    "where": lambda x, y: torch.cat([x, y]),  # either
}


@pytest.mark.parametrize("name", OF_WHOLE)
def test_limits_hold_every_number(name: str) -> None:
    """What decides whether 32 bits are enough: of intervals that have one number, or 0, or more."""
    operation, draw = OF_WHOLE[name], random.Random(name)
    count = {"neg": 1, "abs": 1, "not": 1, "clamp": 3}.get(name, 2)
    nearest = 0
    for _ in range(400):
        bounds = [sorted(draw.sample(range(-9, 12), 2)) for _ in range(count)]
        bounds = [(x, draw.choice([x, y])) for x, y in bounds]
        numbers = [torch.arange(x, y + 1) for x, y in bounds]
        grid = torch.meshgrid(*numbers, indexing="ij") if name != "where" else numbers
        found = operation(*(x.flatten() for x in grid))
        limits = limits_of(name, [*bounds])
        assert limits is not None
        least, most = limits
        assert least <= found.min(), (bounds, limits)
        assert most >= found.max(), (bounds, limits)
        nearest += (least, most) == (found.min(), found.max())
        assert max(-least, most) <= 4 * max(max(map(abs, x)) for x in bounds) ** 2 + 2
    assert nearest > 40 or name in ("or", "xor")  # whose limits are powers of 2


@pytest.mark.long
def test_compile_knows_every_operator() -> None:
    """torch.compile calls some of them by other functions than Python does."""
    x = torch.randn(3, B, H, S, 8)

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        n = (i * j) // 3 % 5 + (7 // (i + j + 1)) + (9 % (i * j + 2)) + (i & 3 | j ^ 1)
        n //= 2
        n %= 3
        t = 1 - s / 2 + 2 / (s.square() + 1) + 2**s - (-s) ** 2 + (s.abs() + 1) ** -0.5
        t += n
        t *= 0.5
        return torch.where((s >= 0) & ~(i == j) | (n != 1), t, s // 0.5 % 3)

    mask = lambda b, h, i, j: (i // 3 == j // 3) | (i * 1103515245 + j * 12345 % 7 > 2)  # noqa: E731
    attend = lambda *x: torch_attn.flex_attention(*x, score, mask)  # noqa: E731
    for dynamic in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(attend, backend="eager", fullgraph=True, dynamic=dynamic)
        assert torch.equal(compiled(*x), attend(*x))
