"""flex_attention: functions of the pair run inside the kernels, with every derivative."""

import functools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import torch_attn
from _memory import GuardedMemory
from helpers import largest, threads_set_to, ulp
from tests.test_score_programs import CASES, SHAPE, Case, learned
from torch_attn import reference

B, H, L, S = SHAPE
E = 8


def tensors(
    *, batch: int = B, heads: int = H, key_heads: int = H, queries: int = L, keys: int = S,
    dtype: torch.dtype = torch.float64, head_dim: int = E, seed: int = 1,
) -> list[Tensor]:  # fmt: skip
    torch.manual_seed(seed)
    sizes = (heads, queries), (key_heads, keys), (key_heads, keys)
    return [torch.randn(batch, *s, head_dim, dtype=dtype, requires_grad=True) for s in sizes]


def error(x: Tensor, exact: Tensor) -> float:
    same = x.double() == exact.double()  # infinities, too
    return largest((x.double() - exact.double()).masked_fill(same, 0).nan_to_num(math.inf))


def largest_difference(a: Any, b: Any) -> float:
    return max(error(x, y) for x, y in zip(a, b, strict=True))


def results(
    attention: Callable[..., Any], x: list[Tensor], case: Case, **options: Any
) -> list[Tensor]:
    """The output and the logsumexp, and the gradients of the inputs and of what is captured."""
    found = attention(*x, case.score, case.mask, **options)
    leaves = [*x, *case.captured]
    torch.manual_seed(2)
    # numbers that every dtype has
    grads = [(torch.randint(-8, 9, t.shape) / 4).to(t.dtype) for t in found]
    grads[1] = grads[1].masked_fill(found[1].isinf(), 0)
    derivatives = torch.autograd.grad(found, leaves, grads, materialize_grads=True)
    return [*found, *derivatives]


def assert_textbook(x: list[Tensor], case: Case, close: float = 1e-12, **options: Any) -> None:
    found = results(torch_attn.flex_attention, x, case, return_lse=True, **options)
    expected = results(reference.flex_attention, x, case, **options)
    assert largest_difference(found, expected) < close


@pytest.mark.usefixtures("cpu_capability")
@pytest.mark.parametrize("name", CASES)
def test_is_the_textbook(name: str) -> None:
    case, x = CASES[name](), tensors()
    # PyTorch divides whole numbers in float32.
    close = 1e-5 if name == "every_operation_of_whole_numbers" else 1e-12
    assert_textbook(x, case, close)
    with torch.no_grad():  # the list that keeps nothing for derivatives
        alone = torch_attn.flex_attention(*x, case.score, case.mask)
        expected, _ = reference.flex_attention(*x, case.score, case.mask)
    assert error(alone, expected) < close


@pytest.mark.parametrize("shape", [(1, 1), (70, 1), (1, 70), (130, 200), (65, 64), (64, 129)])
@pytest.mark.usefixtures("cpu_capability")
def test_tiles(shape: tuple[int, int]) -> None:
    """Every kind of leaf over several tiles, with and without a part at their ends."""
    queries, keys = shape
    of_keys, of_rows, distances = learned(keys), learned(queries), learned(4, queries + keys)
    pairs, table, ids = learned(4, *shape), learned(50), torch.randint(0, 25, (max(shape),))

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        s = torch.tanh(s + of_keys[j] * of_rows[i]) + distances[h, i - j + keys]
        return s * table[ids[i] + ids[j]] + pairs[h, i, j]

    leaves = [of_keys, of_rows, distances, pairs, table]
    case = Case(score, lambda b, h, i, j: (i + j) % (h + 3) > 0, leaves)
    x = tensors(heads=4, key_heads=2, queries=queries, keys=keys)
    assert_textbook(x, case, enable_gqa=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("cpu_capability")
def test_dtypes(dtype: torch.dtype) -> None:
    """No further from float64 than twice the same formulas in this precision, and one ulp."""
    numbers = torch.randn(H, 200), torch.randn(H)

    def case(dtype: torch.dtype) -> Case:
        table, bound = (t.to(dtype, copy=True).requires_grad_() for t in numbers)

        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return torch.where(i > j, s + table[h, i - j + 100], s.sigmoid() * bound[h])

        return Case(score, lambda b, h, i, j: i + 30 >= j, [table, bound])

    found, exact, formula = [], [], []
    for seed in range(24):  # the error of one problem is luck
        x = tensors(queries=70, keys=90, dtype=dtype, seed=seed)
        found.append(results(torch_attn.flex_attention, x, case(torch.float32), return_lse=True))
        for wide, of in ((torch.float64, exact), (torch.float32, formula)):
            leaves = [t.detach().to(wide).requires_grad_() for t in x]
            of.append(results(reference.flex_attention, leaves, case(wide)))
    # These multiply weights and their gradients in 8 bits, or in two parts of 8. The sum of weights
    # has an error that csrc/cpu/simd/exp.inl derives. What is captured has gradients in float32.
    rounds = torch.ops.attn._cpu_capability() in ("avx512_bf16", "amx")
    bits = {torch.bfloat16: 8, torch.float16: 16}.get(dtype, 0) if rounds else 0
    for n, kind in enumerate(t.dtype for t in found[0]):
        ours = max(error(x[n], e[n]) for x, e in zip(found, exact, strict=True))
        rounded = max(error(x[n].to(kind), e[n]) for x, e in zip(formula, exact, strict=True))
        size = max(largest(e[n].nan_to_num(0, 0, 0)) for e in exact)
        more = 3e-6 if n == 1 and bits == 8 else size * 2**-bits if n >= 5 and bits else 0
        assert ours <= 2 * rounded + ulp(size, kind) + more, n


@pytest.mark.usefixtures("cpu_capability")
@pytest.mark.parametrize("queries", [1, 6, 70])
def test_lanes_without_a_row_add_nothing(queries: int) -> None:
    """There a divisor is 0, and a gradient 0 / 0."""
    keys = 9
    of_keys, of_both = learned(keys), learned(keys, queries)
    of_rows = (torch.rand(queries, dtype=torch.float64) + 0.5).requires_grad_()
    of_distances = (torch.rand(queries + keys, dtype=torch.float64) + 0.5).requires_grad_()

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        of_pair = of_keys[j] / of_rows[i] + of_both[j, i] / of_distances[i - j + keys]
        return s + of_pair

    case = Case(score, None, [of_keys, of_rows, of_distances, of_both])
    assert_textbook(tensors(queries=queries, keys=keys), case)


def test_gradcheck() -> None:
    x = tensors(batch=1, heads=2, key_heads=1, queries=4, keys=5, head_dim=3)

    def function(*leaves: Tensor) -> Any:
        q, k, v, table, rows, index, pairs = leaves

        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            s = torch.tanh(s * rows[i] + table[h, i - j + 4]) * s
            return s.exp() * index[(i + j) % 3] + pairs[h, i, j].square()

        mask = lambda b, h, i, j: i >= j - 2  # noqa: E731
        return torch_attn.flex_attention(q, k, v, score, mask, enable_gqa=True, return_lse=True)

    leaves = (*x, learned(2, 9), learned(4), learned(3), learned(2, 4, 5))
    assert gradcheck(
        function, leaves, check_forward_ad=True, check_batched_grad=True,
        check_batched_forward_grad=True,
    )  # fmt: skip
    assert gradgradcheck(function, leaves, check_fwd_over_rev=True)


def test_torch_func() -> None:
    """Per-sample gradients of a captured table, and samples with tables of their own."""
    q, k, v = (t.detach() for t in tensors(batch=3, queries=4, keys=4))
    tables = torch.randn(3, H, 7, dtype=torch.float64)

    def loss(table: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        score = lambda s, b, h, i, j: s + table[h, i - j + 3]  # noqa: E731
        return torch_attn.flex_attention(q[None], k[None], v[None], score).square().sum()

    for in_dims, table in (((0, 0, 0, 0), tables), ((None, 0, 0, 0), tables[0])):
        found = torch.func.vmap(torch.func.grad(loss), in_dims)(table, q, k, v)
        one_by_one = [
            torch.func.grad(loss)(table[n] if in_dims[0] == 0 else table, q[n], k[n], v[n])
            for n in range(3)
        ]
        assert torch.allclose(found, torch.stack(one_by_one))
    hessian = torch.func.hessian(loss)(tables[0], q[0], k[0], v[0]).reshape(H * 7, H * 7)
    assert torch.allclose(hessian, hessian.T)


def test_tables_that_entries_or_heads_share_are_expanded() -> None:
    """By vmap, or by the caller: strides of 0 that do not say what the gradient is summed over."""
    x, base = [t.detach() for t in tensors()], torch.randn(1, L, 3, dtype=torch.float64)

    def output(base: Tensor, attention: Callable[..., Any] = torch_attn.flex_attention) -> Tensor:
        table = base.expand(H, -1, -1)
        found = attention(*x, lambda s, b, h, i, j: s + table[h, i, j // 4], None)
        return (found[0] if isinstance(found, tuple) else found).square().sum((1, 2, 3))

    expected = torch.func.jacrev(functools.partial(output, attention=reference.flex_attention))
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(jacobian(output)(base), expected(base))


@pytest.mark.usefixtures("cpu_capability")
def test_same_bits_with_any_number_of_threads() -> None:
    """Also with tables above the size where PyTorch's own indexing adds by atomics."""
    distances = torch.randn(12, 4000, requires_grad=True)
    table, ids = torch.randn(40000, requires_grad=True), torch.randint(0, 200, (600,))

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + distances[h, i - j + 2000] + table[ids[i] * 200 + ids[j]]

    case = Case(score, lambda b, h, i, j: i - j < 300, [distances, table])
    x = tensors(batch=1, heads=12, key_heads=12, queries=600, keys=600, dtype=torch.float32)
    with threads_set_to(1):
        expected = results(torch_attn.flex_attention, x, case, return_lse=True)
    for number in (2, 5):
        with threads_set_to(number):
            found = results(torch_attn.flex_attention, x, case, return_lse=True)
        assert all(map(torch.equal, found, expected))


def test_more_threads_than_copies_of_a_table() -> None:
    """Tasks that add to one copy wait for each other: 40 tasks on 20 threads, 16 copies."""
    table = torch.randn(50, requires_grad=True)
    x = tensors(batch=5, heads=8, key_heads=8, queries=70, keys=70, dtype=torch.float32)
    case = Case(lambda s, b, h, i, j: s + table[(i * j + 7 * j) % 50], None, [table])
    expected = results(torch_attn.flex_attention, x, case, return_lse=True)
    with threads_set_to(20):
        for _ in range(10):
            found = results(torch_attn.flex_attention, x, case, return_lse=True)
            assert all(map(torch.equal, found, expected))


def test_an_index_that_vmap_hides_is_checked() -> None:
    """Behind the first table there is another one, whose numbers are not read instead."""
    x, wrong = [t.detach() for t in tensors()], torch.full((100,), 9)
    other = torch.randn(9, dtype=torch.float64)

    def output(table: Tensor, index: Tensor) -> Any:
        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return s + table[index[i], i * j % 9] + other[i * j % 9]

        return torch_attn.flex_attention(*x, score)

    tables = torch.randn(2, 9, 9, dtype=torch.float64)
    torch.vmap(output)(tables, torch.stack([wrong - 1, wrong - 2]))
    with pytest.raises(RuntimeError, match="index"):
        torch.vmap(output)(tables, torch.stack([wrong - 1, wrong]))


@pytest.mark.usefixtures("cpu_capability")
@pytest.mark.parametrize("at_end", [False, True])
def test_tables_are_read_inside(at_end: bool) -> None:
    """Whole vectors are read where indices go on, but nothing beside the table."""
    x = [t.detach() for t in tensors(batch=1, heads=1, key_heads=1, queries=70, keys=70)]
    for step in (1, -1):
        table = torch.randn(70 * 70, dtype=torch.float64)
        guarded = GuardedMemory(table.nbytes, at_end).tensor(table)

        def output(table: Tensor, step: int = step) -> Any:
            def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                place = j if step > 0 else 69 - j
                return s + table[i * 70 + place % 70] + table[place % 70 * 70 + i]

            return torch_attn.flex_attention(*x, score)

        assert torch.equal(output(guarded), output(table))


@pytest.mark.usefixtures("cpu_capability")
@pytest.mark.parametrize("head_dim", [0, 8, 70])
def test_products_go_on_with_the_list(head_dim: int) -> None:
    """Products do up to four steps that add a leaf or a looked-up number, and run() the rest."""
    queries, keys = 70, 130
    sizes = (queries,), (keys,), (queries + keys,), (queries, keys), (queries, 5), (keys, 200)
    row, key, distance, pair, of_rows, of_keys = leaves = [learned(*size) for size in sizes]

    def first(s: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (s - row[i]) * 1.5 - key[j] + 0.25

    def second(s: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return distance[i - j + keys] + s * 0.5 - pair[i, j]

    def third(s: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return of_keys[j, i - j + 130] + (of_rows[i, j // 64] + s) - of_rows[i, j % 5]

    x = tensors(queries=queries, keys=keys, head_dim=head_dim)
    for steps in ([first], [second], [third], [third, first], [second, first], [first] * 3):

        def score(s: Tensor, b: Any, h: Any, i: Tensor, j: Tensor, steps: Any = steps) -> Tensor:
            for step in steps:
                s = step(s, i, j)
            return s

        def again(s: Tensor, b: Any, h: Any, i: Tensor, j: Tensor, score: Any = score) -> Tensor:
            s = score(s, b, h, i, j)
            return torch.tanh(s) * 2 + s

        def kept(s: Tensor, b: Any, h: Any, i: Tensor, j: Tensor, score: Any = score) -> Tensor:
            return torch.tanh(score(s, b, h, i, j)) * 2  # derivatives read the tanh alone

        for of_pair in (score, again, kept):
            assert_textbook(x, Case(of_pair, None, leaves), scale=0.5)


@pytest.mark.usefixtures("cpu_capability")
@pytest.mark.parametrize("at_end", [False, True])
def test_leaves_are_read_inside(at_end: bool) -> None:
    """A tile reads its terms and indices in place, or a copy if a vector would end outside."""
    for keys in (50, 51, 63, 64, 65, 130):
        shape = (1, 1, 200, keys)
        x = [t.detach() for t in tensors(batch=1, heads=1, key_heads=1, queries=200, keys=keys)]
        row, key, distance, table = (torch.randn(n) for n in (200, keys, 200 + keys, (200, 601)))

        def terms(s: Tensor, b: Any, h: Any, i: Tensor, j: Tensor) -> Tensor:
            return s + row[i] + key[j] + distance[i - j + keys]  # noqa: B023

        def clamped(s: Tensor, b: Any, h: Any, i: Tensor, j: Tensor, most: int = 300) -> Tensor:
            at = (i - j).clamp(-most, most) + most
            return s + table[i, at] + table[i // 2, j % 90]  # noqa: B023

        for function in (terms, clamped, functools.partial(clamped, most=30)):
            program = torch_attn.score_program(function, shape=shape).arguments()
            guarded = {
                n: GuardedMemory(t.nbytes, at_end).tensor(t)
                for n, t in program.items()
                if n.endswith(("_terms", "_numbers"))
            }
            q, k, v = (t.float() for t in x)
            found = torch.ops.attn.flex_attention(q, k, v, **program | guarded)[0]
            assert torch.equal(found, torch.ops.attn.flex_attention(q, k, v, **program)[0])


BUCKETS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "clamped": lambda i, j: (i - j).clamp(-20, 19) + 20,
    "reversed": lambda i, j: (j - i).clamp(-20, 19) + 20,
    "shared": lambda i, j: torch.clamp((i - j) // 7, -20, 19) + 20,
    "there_and_back": lambda i, j: (i - j).abs().clamp(max=39),
    "scattered": lambda i, j: (i - j) * 7 % 40,
    "one": lambda i, j: (i - j) * 0 + 39,
    "column_of_key": lambda i, j: j % 14,
    "line_of_key": lambda i, j: j // 14,
    "of_query": lambda i, j: i % 14 * 2,
    "of_both": lambda i, j: (i // 14 + j // 14) % 40,
}


@pytest.mark.usefixtures("cpu_capability")
@pytest.mark.parametrize("name", BUCKETS)
def test_tables_of_queries_and_keys(name: str) -> None:
    """Vectors hold what neighbours read of a table, if it is near."""
    queries, keys, bucket = 130, 200, BUCKETS[name]
    tables = [learned(H, n, 40) for n in (queries, keys)]

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + tables[0][h, i, bucket(i, j)] + tables[1][h, j, bucket(i, j)]

    x = tensors(queries=queries, keys=keys)
    assert_textbook(x, Case(score, None, tables))
    x = [t.detach().float() for t in x]
    at = bucket(torch.arange(queries)[:, None], torch.arange(keys)).expand(H, queries, keys)
    for of_keys, table in enumerate(t.detach().float() for t in tables):
        pairs = table.gather(2, at.mT).mT if of_keys else table.gather(2, at)

        def by_table(s: Tensor, b: Any, h: Any, i: Any, j: Any, table: Tensor = table,
                     of_keys: int = of_keys) -> Tensor:  # fmt: skip
            return s + table[h, j if of_keys else i, bucket(i, j)]

        def by_pair(s: Tensor, b: Any, h: Any, i: Any, j: Any, pairs: Tensor = pairs) -> Tensor:
            return s + pairs[h, i, j]

        outputs = [torch_attn.flex_attention(*x, score) for score in (by_table, by_pair)]
        assert torch.equal(*outputs), of_keys


def test_nothing_times_infinity_is_nothing() -> None:
    """Where PyTorch's gradient is NaN: the score at 0, whose root has an infinite slope."""
    x = [torch.zeros_like(t).requires_grad_() for t in tensors()]
    out = torch_attn.flex_attention(
        *x, lambda s, b, h, i, j: torch.where(s > 0, s.sqrt(), torch.where(i > j, s, -s))
    )
    first = torch.autograd.grad(out.square().sum() + out.sum(), x, create_graph=True)
    second = torch.autograd.grad(sum(g.sum() for g in first), x)
    assert all(g.isfinite().all() for g in (*first, *second))


def test_programs_of_no_pair_and_masks_from_tables() -> None:
    x = [t.detach() for t in tensors()]
    same = "attn.program 1\n%0 f const 1\n%1 f exp %0\nreturn %1"
    mean = torch.ops.attn.flex_attention(*x, score_mod=same)[0]
    assert torch.allclose(mean, x[2].mean(-2, keepdim=True).expand_as(mean))
    masks = torch.rand(3, L, S) > 0.3
    shown = lambda m: torch_attn.flex_attention(*x, None, lambda b, h, i, j: m[i, j])  # noqa: E731
    expected = torch.stack([torch_attn.sdpa(*x, m) for m in masks])
    assert torch.allclose(torch.vmap(shown)(masks), expected)
    large = torch.full((L, S), 2**24 + 1)
    single = [t.float() for t in x]
    with pytest.raises(RuntimeError, match=r"large .*has whole numbers beyond 2\^24"):
        torch_attn.flex_attention(*single, None, lambda b, h, i, j: large[i, j] == 2**24 + 1)
    bias = torch.randn(L, S, dtype=torch.float64)  # read by both functions
    score, above = lambda s, b, h, i, j: s + bias[i, j], lambda b, h, i, j: bias[i, j] > -1
    hidden = bias.masked_fill(bias <= -1, -math.inf)
    found = torch_attn.flex_attention(*x, score, above)
    assert torch.allclose(found, torch_attn.sdpa(*x, hidden))
    # A table that a mask reads has no gradient, though it asks for one.
    mask = "attn.program 1\n%0 i query\n%1 f table 0 %0\n%2 f const 0\n%3 b lt %2 %1\nreturn %3"
    table = torch.ones(1, 1, 1, L, dtype=torch.float64, requires_grad=True)
    query = x[0].clone().requires_grad_()
    output = torch.ops.attn.flex_attention(query, *x[1:], mask_mod=mask, tables=[table])[0]
    of_query, of_table = torch.autograd.grad(output.sum(), [query, table], materialize_grads=True)
    assert of_query.any()
    assert not of_table.any()


def test_causal_mask_has_the_bits_of_is_causal() -> None:
    x = tensors(queries=300, keys=300, dtype=torch.float32)
    found = torch_attn.flex_attention(*x, block_mask=lambda b, h, i, j: i >= j)
    assert torch.equal(found, torch_attn.sdpa(*x, is_causal=True))
    window = lambda b, h, i, j: (i >= j) & (i - j < 50)  # noqa: E731
    found = torch_attn.flex_attention(*x, block_mask=window)
    assert torch.equal(found, torch_attn.sdpa(*x, window_size=(49, 0)))


def whole(draw: random.Random, leaves: list[Tensor], depth: int) -> Tensor:
    """A random function of whole numbers."""
    if depth == 0:
        return draw.choice(leaves)
    x, y = (whole(draw, leaves, depth - 1) for _ in range(2))
    operations: list[Callable[[], Tensor]] = [
        lambda: x + y,
        lambda: x - y,
        lambda: x * y,
        lambda: torch.minimum(x, y),
        lambda: torch.maximum(x, y),
        lambda: torch.where(boolean(draw, leaves, depth - 1), x, y),
        lambda: x // draw.choice([3, 50, -2]),
        lambda: x % draw.choice([3, 50, -2]),
        lambda: x & y,
        lambda: x.clamp(draw.randrange(3), 5),
    ]
    return draw.choice(operations)()


def boolean(draw: random.Random, leaves: list[Tensor], depth: int) -> Tensor:
    x, y = (whole(draw, leaves, depth) for _ in range(2))
    compare = draw.choice([torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge])
    found: Tensor = compare(x, y)
    if draw.random() < 0.5:
        other = compare(y, whole(draw, leaves, depth))
        found = draw.choice([found & other, found | other, found ^ other, ~found])
    return found


@pytest.mark.usefixtures("cpu_capability")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masks_that_hide_or_show_whole_tiles(dtype: torch.dtype) -> None:
    """What is known of a tile without a look at its pairs is what each pair says."""
    rows, keys = 200, 290
    value = torch.randn(1, 1, keys, 4, dtype=dtype)
    query, key = (torch.zeros(1, 1, n, 4, dtype=dtype) for n in (rows, keys))  # all weights equal
    i, j = torch.arange(rows), torch.arange(keys)
    documents, steps = torch.arange(keys) // 37, torch.arange(keys) // 64 * 9
    zero = torch.tensor(0)
    for seed in range(100):

        def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor, seed: int = seed) -> Tensor:
            leaves = [i, j, documents[i], documents[j], steps[j], steps[i], i - j]
            leaves += [torch.full_like(i, n) for n in (0, 3, 100)]
            return boolean(random.Random(seed), leaves, seed % 3)

        found = torch_attn.flex_attention(query, key, value, None, mask)
        seen = mask(zero, zero, i[:, None], j).expand(rows, keys).to(torch.float64)
        exact = seen @ value[0, 0].double() / seen.sum(-1, keepdim=True).clamp(min=1)
        assert error(found[0, 0], exact) < 1e-5, seed


MASKS: dict[str, Callable[..., Any]] = {
    "documents": lambda b, h, i, j: i // 37 == j // 37,
    "of heads": lambda b, h, i, j: (i - j).abs() < 30 * (h + 1),
    "of entries": lambda b, h, i, j: (j < 100 * (b + 1)) & (i >= j),
    "none": lambda b, h, i, j: i >= 0,
}


@pytest.mark.parametrize("size", [(128, 128), (64, 32), (48, 100)])
@pytest.mark.parametrize("name", MASKS)
def test_block_mask(name: str, size: tuple[int, int]) -> None:
    x, mask = tensors(queries=200, keys=230), MASKS[name]
    blocks = create_block_mask(mask, B, H, 200, 230, device="cpu", BLOCK_SIZE=size)
    found = results(torch_attn.flex_attention, x, Case(None, blocks), return_lse=True)
    expected = results(reference.flex_attention, x, Case(None, mask))
    assert largest_difference(found, expected) < 1e-12


def test_blocks_decide_before_their_mask_mod() -> None:
    """As in compiled FlexAttention: unlisted blocks are hidden, full ones are not asked."""
    x = tensors(queries=96, keys=96)
    partly = torch.tensor([[[1, 2, 1]]]), torch.tensor([[[[0, 9, 9], [5, 1, 0], [2, 0, 0]]]])
    full = torch.tensor([[[0, 1, 1]]]), torch.tensor([[[[0, 0, 0], [0, 0, 0], [2, 0, 0]]]])
    odd = lambda b, h, i, j: (i + j) % 2 == 1  # noqa: E731
    lists = [t.int() for t in (*partly, *full)]
    blocks = BlockMask((96, 96), *lists, *[None] * 4, BLOCK_SIZE=(32, 32), mask_mod=odd)
    i, j = torch.arange(96)[:, None], torch.arange(96)
    partial = torch.eye(3, dtype=torch.bool)  # 5 and 9 are not there; partial wins
    whole = torch.zeros(3, 3, dtype=torch.bool)
    whole[1, 0] = True
    visible = whole[i // 32, j // 32] | (partial[i // 32, j // 32] & ((i + j) % 2 == 1))
    found = torch_attn.flex_attention(*x, block_mask=blocks)
    assert torch.allclose(found, torch_attn.sdpa(*x, visible))


def test_auxiliary_results() -> None:
    x = tensors()
    output, lse = torch_attn.flex_attention(*x, lambda s, b, h, i, j: 2 * s, return_lse=True)
    asked = AuxRequest(lse=True, max_scores=True)
    same, aux = torch_attn.flex_attention(*x, lambda s, b, h, i, j: 2 * s, return_aux=asked)
    scores = 2 * (x[0] @ x[1].mT) / math.sqrt(E)
    assert torch.equal(output, same)
    assert torch.allclose(aux.lse, scores.logsumexp(-1))
    assert torch.equal(aux.lse, lse)
    assert torch.allclose(aux.max_scores, scores.amax(-1))
    _, aux = torch_attn.flex_attention(*x, return_aux=AuxRequest(max_scores=True))
    assert aux.lse is None


def test_checkpoint() -> None:
    """The function runs again in the backward."""
    x, table = tensors(dtype=torch.float32), torch.randn(H, L + S, requires_grad=True)

    def relative(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + table[h, i - j + S] * torch.tanh(s)

    attend = functools.partial(torch_attn.flex_attention, score_mod=relative)
    found, expected = (
        torch.autograd.grad(output.square().sum(), [table, *x])
        for output in (checkpoint(attend, *x, use_reentrant=False), attend(*x))
    )
    assert all(map(torch.equal, found, expected))


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown operation": ({"score_mod": lambda s, b, h, i, j: s.erfinv()}, "erfinv"),
    "control flow": ({"score_mod": lambda s, b, h, i, j: s if i > j else -s}, "torch.where"),
    "no boolean": ({"block_mask": lambda b, h, i, j: i - j}, "mask_mod returned torch.int64"),
    "no function": ({"block_mask": 3}, "block_mask is a int"),
    "both": ({"return_lse": True, "return_aux": AuxRequest(lse=True)}, "leave return_lse out"),
    "index of a pair": (
        {"score_mod": lambda s, b, h, i, j: s + torch.ones(4)[i * j]},
        "indexed out of its range for query 1 and key 4",
    ),
    "lengths": (
        {"block_mask": create_block_mask(MASKS["none"], 1, 1, 16, 8, device="cpu")},
        "block_mask is of 16 queries and 8 keys, but query has 5",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    options, message = ERRORS[name]
    with pytest.raises((RuntimeError, TypeError, ValueError), match=message):
        torch_attn.flex_attention(*tensors(), **options)


STRINGS = {
    "version": ("attn.program 2\n%0 f score\nreturn %0", "line 1"),
    "later operand": ("attn.program 1\n%0 f neg %1\nreturn %0", "line 2.*earlier value"),
    "type": ("attn.program 1\n%0 f score\n%1 b not %0\nreturn %0", "line 3.*no operation not"),
    "returns": ("attn.program 1\n%0 i query\nreturn %0", "must return a number"),
    "end": ("attn.program 1\n%0 f score", "ends without"),
    "number": ("attn.program 1\n%1 f score\nreturn %1", "begin with %0"),
    "column": ("attn.program 1\n%0 f row 16\nreturn %0", "between 0 and 15"),
    "missing leaf": ("attn.program 1\n%0 f row 0\nreturn %0", "row_terms is None"),
    "long": (
        "attn.program 1\n%0 f score\n" + "".join(f"%{n + 1} f neg %{n}\n" for n in range(65))
        + "return %65", "at most 64 operations",
    ),
    "garbage": ("attn.program 1\n%0 f const 1e\nreturn %0", "number must follow"),
}  # fmt: skip


@pytest.mark.parametrize("name", STRINGS)
def test_strings_made_by_hand(name: str) -> None:
    text, message = STRINGS[name]
    with pytest.raises(RuntimeError, match=f"attn::flex_attention.*{message}"):
        torch.ops.attn.flex_attention(*tensors(), score_mod=text)


def test_what_a_program_does_not_stand_beside() -> None:
    score = "attn.program 1\n%0 f score\nreturn %0"
    x = [t.detach() for t in tensors()]
    for name, value in {"softcap": 1.0, "alibi_slopes": torch.ones(H, dtype=torch.float64)}.items():
        with pytest.raises(RuntimeError, match=f"score_mod is given beside {name}"):
            torch.ops.attn._sdpa_forward(*x, score_mod=score, **{name: value})


def test_third_derivatives_are_refused() -> None:
    x = tensors()
    out = torch_attn.flex_attention(*x, lambda s, b, h, i, j: s * s)
    (first,) = torch.autograd.grad(out.sum(), x[0], create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x[0], create_graph=True)
    with pytest.raises(RuntimeError, match="first and second derivatives"):
        second.sum().backward()


def test_flops_opcheck_invariance_and_what_refuses_functions() -> None:
    """An inspection and nested tensors do."""
    q, k, v = tensors(queries=70, keys=70)
    table = torch.randn(H, 200, dtype=torch.float64)

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + table[h, i - j + 100]

    with FlopCounterMode(display=False) as counter:
        torch_attn.flex_attention(q, k, v, score).sum().backward()  # type: ignore[union-attr]
    assert counter.get_total_flops() == 7 * 2 * B * H * 70 * 70 * E
    program = torch_attn.score_program(score, shape=(B, H, 70, 70), dtype=torch.float64)
    torch.library.opcheck(torch.ops.attn.flex_attention, (q, k, v), program.arguments())
    with torch_attn.invariant():
        whole = torch_attn.flex_attention(q, k, v, score)
        last = torch_attn.flex_attention(
            q[:, :, 69:], k, v, lambda s, b, h, i, j: score(s, b, h, i + 69, j)
        )
    assert torch.equal(whole[:, :, 69:], last)  # type: ignore[call-overload]

    class Attends(nn.Module):
        def forward(self, *x: Tensor) -> Any:
            return torch_attn.flex_attention(*x, score)

    with pytest.raises(RuntimeError, match="functions of the pair have no statistics"):
        torch_attn.inspect(Attends(), q, k, v)
    nested = torch.nested.nested_tensor([torch.randn(H, 4, E)])
    text = "attn.program 1\n%0 f score\nreturn %0"
    with pytest.raises(RuntimeError, match="attn::flex_attention: query is a nested tensor"):
        torch.ops.attn.flex_attention(nested, nested, nested, score_mod=text)


@pytest.mark.parametrize("wrong", [lambda b, h, i, j: i >= j, "causal"], ids=["mask_mod", "str"])
def test_what_is_no_score_mod(wrong: Any) -> None:
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(
        TypeError, match=r"score_mod is .*; it must be a function of score, b, h, q_"
    ):
        torch_attn.flex_attention(x, x, x, wrong)


def test_an_error_of_the_function_itself_stays() -> None:
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(TypeError, match="unsupported operand"):
        torch_attn.flex_attention(x, x, x, lambda s, b, h, i, j: s + None)
