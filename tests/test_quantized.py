"""Keys and values of 8 bits with scales: dense, packed and in pages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, ones

import torch_attn
from _accuracy import Tensors, changed, hold, over_neighbours
from _memory import in_guarded_memory, largest_block
from _packed import cu_seq, in_pages
from helpers import INF, NAN, largest
from torch_attn import quantize_kv, reference

EIGHT = [torch.int8, torch.float8_e4m3fn]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Stored(NamedTuple):
    numbers: Tensor
    scale: Tensor

    def wide(self) -> Tensor:
        scale = self.scale.expand(self.numbers.shape[:-1])
        return self.numbers.double() * scale.double()[..., None]

    def each(self, f: Callable[[Tensor], Tensor]) -> Stored:
        return Stored(f(self.numbers), f(self.scale))


def drawn(*shape: int, dtype: torch.dtype = torch.int8) -> Stored:
    return Stored(*quantize_kv(torch.randn(shape) * torch.rand(shape[:-1])[..., None], dtype))


def attend(query: Tensor, key: Stored, value: Stored, **options: Any) -> Tensor:
    scales = {"key_scale": key.scale, "value_scale": value.scale}
    return torch_attn.sdpa(query, key.numbers, value.numbers, enable_gqa=True, **scales, **options)


def check(query: Tensor, key: Stored, value: Stored, **options: Any) -> None:
    """Holds the result to the bound of ordinary calls, with keys of query's dtype."""
    exact = reference.sdpa(query.double(), key.wide(), value.wide(), enable_gqa=True, **options)
    actual = attend(query, key, value, **options)
    assert actual.dtype == query.dtype
    x = {"query": query, "key": key.wide(), "value": value.wide()}
    if (mask := options.get("attn_mask")) is not None:
        x["attn_mask"] = mask
    x = {name: t.to(query.dtype) for name, t in x.items()}

    def errors(x: Tensors) -> Iterator[tuple[str, float]]:
        """The built-in's without the other options; in float32 also the formula's with them."""
        plain = largest_error(F.scaled_dot_product_attention, x)
        rest = {name: option for name, option in options.items() if name != "attn_mask"}
        formula = largest_error(reference.sdpa, x, **rest) if query.dtype == torch.float32 else 0.0
        yield "output", max(plain, formula)

    error = over_neighbours(x, errors, lambda x, _: changed(x))["output"]
    hold("output", actual.double(), exact, error, query.dtype)


def largest_error(sdpa: Callable[..., Tensor], x: Tensors, **options: Any) -> float:
    options["enable_gqa"] = True
    exact = reference.sdpa(**{name: t.double() for name, t in x.items()}, **options)
    return largest(sdpa(**x, **options).double() - exact)


# L, S, heads of the query and of the key, E and Ev. A GPU's tensor cores take multiples of 16.
SHAPES = [
    (1, 300, 8, 2, 64, 64),
    (5, 131, 4, 4, 17, 20),
    (8, 64, 4, 1, 128, 131),
    (70, 200, 4, 2, 48, 80),
    (3, 9, 2, 2, 6, 9),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "softcap": {"softcap": 0.5},
    "causal": {"is_causal": True, "query_offset": 7},
    "lengths": {"key_lengths": torch.tensor([5, 9]), "window_size": (4, -1)},
    "mask": {"attn_mask": "pairs"},
    "slopes and sinks": {"alibi_slopes": "heads", "sinks": "heads"},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eight", EIGHT)
@pytest.mark.usefixtures("kernels")
def test_output(eight: torch.dtype, dtype: torch.dtype, option: str) -> None:
    for L, S, H, HK, E, Ev in SHAPES:
        key, value = drawn(2, HK, S, E, dtype=eight), drawn(2, HK, S, Ev, dtype=eight)
        draw = {"pairs": torch.randn(H, L, S), "heads": torch.rand(H)}
        query = torch.randn(2, H, L, E).to(dtype)
        options = {n: draw[o] if isinstance(o, str) else o for n, o in OPTIONS[option].items()}
        if (lengths := options.get("key_lengths")) is not None:
            options["key_lengths"] = lengths.to(query.device)
        check(query, key, value, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eight", EIGHT)
@pytest.mark.usefixtures("kernels")
def test_every_number(eight: torch.dtype, dtype: torch.dtype) -> None:
    """Scores of one key each: of few rows, and of more than one vector has lanes."""
    one = torch.ones(())
    for rows, columns in ((1, 1), (20, 1), (1, 64), (20, 64)):
        numbers = torch.arange(256, dtype=torch.uint8).view(eight)[:, None, None]
        key = numbers.expand(-1, 1, columns).contiguous()
        query = torch.zeros(256, rows, columns, dtype=dtype)
        query[..., 0] = 1
        value = torch.zeros(256, 1, 16, dtype=torch.int8)
        call = {"scale": 1.0, "key_scale": one, "value_scale": one}
        scores = torch.ops.attn.attention(query, key, value, **call)[1]
        expected = key[..., 0].float().expand(-1, rows)
        assert torch.allclose(scores, expected, rtol=1e-6, atol=0, equal_nan=True)


# The scales of values, the largest number, and the share of numbers that are not 0. So float16 has
# no place for a weight times its scale, but for each output.
SIZES = {"tiny": (1e-7, 100, 1.0), "large": (1e5, 3, 0.02)}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eight", EIGHT)
@pytest.mark.usefixtures("kernels")
def test_scales_of_any_size(eight: torch.dtype, dtype: torch.dtype, size: str) -> None:
    scale, most, share = SIZES[size]
    info = torch.finfo(dtype)
    for rows in (1, 40):
        key, numbers = drawn(2, 200, 64, dtype=eight), torch.randint(-most, most + 1, (2, 200, 64))
        numbers = (numbers * (torch.rand(numbers.shape) < share)).to(eight)
        value = Stored(numbers, scale * (1 + torch.rand(2, 200)) / 2)
        query = torch.randn(2, rows, 64).to(dtype)
        found = attend(query, key, value).double()
        exact, sizes = (
            reference.sdpa(query.double(), key.wide(), x)
            for x in (value.wide(), value.wide().abs())
        )
        assert exact.abs().max() < info.max
        # Weights are rounded, and so is the output.
        allowed = 4 * max(info.eps, 1e-6) * sizes + info.smallest_normal * info.eps
        assert ((found - exact).abs() <= allowed).all()


@pytest.mark.parametrize("shape", [(), (50,), (3, 1), (1, 50), (3, 50), (2, 1, 1), (2, 3, 50)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("device")
def test_scales_broadcast(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    numbers = torch.randint(-127, 128, (2, 3, 50, 16), dtype=torch.int8)
    for rows in (1, 30):
        key, value = Stored(numbers, torch.rand(shape) / 60), Stored(numbers, torch.rand(shape))
        check(torch.randn(2, 3, rows, 16).to(dtype), key, value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("device")
def test_strides(dtype: torch.dtype) -> None:
    numbers = torch.randint(-9, 9, (2, 50, 16, 3), dtype=torch.int8).permute(0, 3, 1, 2)
    scale = torch.rand(50, 6, 2).permute(2, 1, 0)[:, ::2]
    for rows in (1, 30):
        key, value = Stored(numbers, scale), Stored(numbers.flip(-1), scale.flip(-1))
        check(torch.randn(2, 3, rows, 16).to(dtype), key, value)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_beyond_the_lengths_is_not_read(dtype: torch.dtype, rows: int) -> None:
    used = (37, 64)
    key, value = drawn(2, 3, 100, 16), drawn(2, 3, 100, 16)
    options = {"key_lengths": torch.tensor(used)}
    query = torch.randn(2, 3, rows, 16).to(dtype)

    def guarded(x: Stored) -> Stored:
        scale = in_guarded_memory(x.scale[..., None], used)[..., 0]
        return Stored(in_guarded_memory(x.numbers, used), scale)

    expected = attend(query, key, value, **options)
    assert torch.equal(attend(query, guarded(key), guarded(value), **options), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("device")
def test_nan(dtype: torch.dtype) -> None:
    """A key whose scale is NaN reaches the rows that see it, and no others."""
    key, value = drawn(2, 1, 30, 16), drawn(2, 1, 30, 16)
    key.scale[1, 0, 20] = NAN
    for rows in (30, 1):
        first = 30 - rows
        query = torch.randn(2, 1, rows, 16).to(dtype)
        output = attend(query, key, value, is_causal=True, query_offset=first)
        sees = torch.arange(first, 30) >= 20
        expected = torch.stack([torch.zeros_like(sees), sees])
        assert torch.equal(output.isnan().all(-1)[:, 0], expected)


@pytest.fixture
def invariant(dtype: torch.dtype) -> Iterator[None]:
    """In 16 bits a GPU has other kernels for few rows, but not here."""
    with torch_attn.invariant() if dtype != torch.float32 else contextlib.nullcontext():
        yield


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("eight", EIGHT)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("device", "invariant")
def test_packed_and_paged_have_the_bits_of_each_alone(
    dtype: torch.dtype, eight: torch.dtype, page_size: int
) -> None:
    keys, rows = [70, 1, 33], [3, 1, 20]
    key, value = drawn(sum(keys), 2, 32, dtype=eight), drawn(sum(keys), 2, 32, dtype=eight)
    query = torch.randn(sum(rows), 4, 32).to(dtype)
    tensors = {"key": key.numbers, "value": value.numbers}
    tensors |= {"key_scale": key.scale, "value_scale": value.scale}
    given = {"query": query, "cu_seq_q": cu_seq(rows), "max_q": 20, "max_k": 70}
    given |= {"enable_gqa": True, "window_size": (-1, 0)}
    packed = torch_attn.varlen_attn(**given, **tensors, cu_seq_k=cu_seq(keys))
    paged = torch_attn.varlen_attn(**given, **in_pages(tensors, keys, page_size))
    assert torch.equal(paged, packed)
    for n, own in enumerate(packed.split(rows)):
        q = query.split(rows)[n].transpose(0, 1)
        k, v = (x.each(lambda t: t.split(keys)[n].transpose(0, 1)) for x in (key, value))  # noqa: B023
        alone = attend(q, k, v, is_causal=True, query_offset=keys[n] - rows[n])
        assert torch.equal(own, alone.transpose(0, 1))


@pytest.mark.parametrize("rows", [1, 512])
@pytest.mark.usefixtures("cpu_capability")
def test_memory(rows: int) -> None:
    """No copy of the cache in more bits, and nothing of its size."""
    key, value = drawn(4, 4096, 64), drawn(4, 4096, 64)
    query = torch.randn(4, rows, 64, dtype=torch.bfloat16)
    assert largest_block(lambda: attend(query, key, value)) < key.numbers.numel() // 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("device")
def test_invariant(dtype: torch.dtype) -> None:
    key, value, query = drawn(2, 90, 16), drawn(2, 90, 16), torch.randn(2, 90, 16).to(dtype)
    with torch_attn.invariant():
        whole = attend(query, key, value, is_causal=True)
        for i in (0, 41, 89):
            own = slice(i, i + 1)
            one = attend(query[:, own], key, value, is_causal=True, query_offset=i)
            assert torch.equal(one, whole[:, own])


class Cached(torch.nn.Module):
    def forward(self, query: Tensor, *stored: Tensor) -> Tensor:
        return attend(query, Stored(*stored[:2]), Stored(*stored[2:]))


def test_subsystems() -> None:
    """vmap, compile and export give what the call gives."""
    x = torch.randn(3, 4, 2, 16), *drawn(3, 4, 20, 16), *drawn(3, 4, 20, 16)
    expected = Cached()(*x)
    assert torch.equal(torch.vmap(Cached())(*x), expected)
    assert torch.equal(torch.compile(Cached(), fullgraph=True, backend="aot_eager")(*x), expected)
    assert torch.equal(torch.export.export(Cached(), x).module()(*x), expected)


# What differs from a call that is right, and what is said.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no scale": ({"key_scale": None}, "key_scale is None but key has dtype Char; int8 and"),
    "scale of floats": ({"key": ones(1, 2, 20, 16)}, "key_scale is given but key has dtype Float"),
    "shape": (
        {"value_scale": ones(2, 19)},
        r"value_scale is Float of shape \[2, 19\].*\[1, 2, 20\]",
    ),
    "enlarging": ({"key_scale": ones(4, 2, 20)}, r"key_scale is Float of shape \[4, 2, 20\]"),
    "dtype": ({"key_scale": ones(2, 20).double()}, "key_scale is Double .* must be float32"),
    "device": ({"key_scale": ones(2, 20, device="meta")}, "key_scale is .* on meta; .* on cpu"),
    "float64": (
        {"query": ones(1, 2, 3, 16).double()},
        "key has dtype Char and query Double.*must be float32, bfloat16 or float16",
    ),
    "gradient": (
        {"query": ones(1, 2, 3, 16, requires_grad=True)},
        "a derivative is asked for, but key has 8 bits and no derivatives",
    ),
}


def right() -> dict[str, Any]:
    """The arguments of a call that is right."""
    key, value = drawn(1, 2, 20, 16), drawn(1, 2, 20, 16)
    scales = {"key_scale": key.scale, "value_scale": value.scale}
    x = {"query": torch.randn(1, 2, 3, 16), "key": key.numbers, "value": value.numbers}
    return x | scales


@pytest.mark.parametrize("case", WRONG)
def test_errors(case: str) -> None:
    changes, said = WRONG[case]
    with pytest.raises(RuntimeError, match=said):
        torch_attn.sdpa(**right() | changes)


def test_what_takes_no_8_bits_says_so() -> None:
    x = right()
    query, key, value = x["query"], x["key"], x["value"]
    takes_none = "key has dtype Char.*takes no numbers of 8 bits"
    with pytest.raises(RuntimeError, match=f"sdpa_with_weights: {takes_none}"):
        torch_attn.sdpa_with_weights(**x)
    with pytest.raises(RuntimeError, match=f"sdpa_stats: {takes_none}"):
        torch_attn.sdpa_stats(query, key)
    with pytest.raises(RuntimeError, match=f"flex_attention: {takes_none}"):
        torch_attn.flex_attention(query, key, value, torch_attn.mods.softcap(5.0))
    with pytest.raises(RuntimeError, match="key_scale is None but key has dtype Char"):
        torch.ops.attn.sdpa(query, key, value)
    del x["query"]
    with pytest.raises(RuntimeError, match="key has 8 bits and no derivatives"):
        torch.func.jvp(lambda query: torch_attn.sdpa(query, **x), (query,), (query,))


@pytest.mark.parametrize("eight", EIGHT)
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize(dtype: torch.dtype, eight: torch.dtype) -> None:
    x = torch.randn(3, 50, 33).to(dtype)
    x[0, 0], x[0, 1], x[0, 2] = 0, 1e-42, 1e4
    stored = Stored(*quantize_kv(x, eight))
    assert (stored.numbers.dtype, stored.numbers.shape) == (eight, x.shape)
    assert (stored.scale.dtype, stored.scale.shape) == (torch.float32, x.shape[:-1])
    assert torch.equal(stored.scale[0, :2], torch.zeros(2))
    assert not stored.numbers[0, :2].float().any()
    largest_of_row = stored.numbers.float().abs().amax(-1)[stored.scale > 0]
    assert (largest_of_row == (127 if eight == torch.int8 else 448)).all()
    scale = stored.scale[..., None].double()
    half_a_step = scale / 2
    if eight == torch.float8_e4m3fn:  # 3 bits, and the distance of the smallest numbers
        half_a_step = torch.maximum(x.double().abs() / 16, scale * 2**-10)
    assert ((stored.wide() - x).abs() <= half_a_step * (1 + 1e-4) + 2e-42).all()


def test_quantize_rounds_to_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5, 3.5]])
    assert quantize_kv(x)[0].tolist() == [[127, 0, 2, -2, 4]]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_quantize_refuses_what_is_not_finite(bad: float) -> None:
    x = torch.randn(2, 5, 8)
    x[1, 3, 2] = bad
    with pytest.raises(ValueError, match=r"x has a NaN or an infinity in row \[1, 3\]"):
        quantize_kv(x)
    numbers, scale = torch.compile(quantize_kv, fullgraph=True, backend="aot_eager")(x)
    assert scale.isnan().nonzero().tolist() == [[1, 3]]
    assert not numbers[1, 3].any()


def test_quantize_refuses_other_dtypes() -> None:
    with pytest.raises(ValueError, match=r"int16; it must be torch.int8 or torch.float8_e4m3fn"):
        quantize_kv(torch.randn(2, 3), torch.int16)
    with pytest.raises(ValueError, match=r"x has dtype torch.int64; it must be floating"):
        quantize_kv(torch.ones(2, 3, dtype=torch.int64))


@pytest.mark.parametrize("eight", EIGHT)
def test_paged_cache(eight: torch.dtype) -> None:
    """A fork shares scales with the pages; an append that fails changes nothing."""
    cache = torch_attn.PagedCache(6, page_size=4, key_heads=2, head_dim=16, dtype=eight)
    first = cache.add()
    key, value = torch.randn(2, 14, 2, 16).bfloat16()
    beyond = torch.full((3, 2, 16), NAN).bfloat16()  # belongs to no sequence
    x = (torch.cat([x[:10], beyond]) for x in (key, value))
    cache.append([first], *x, torch.tensor([0, 10]))
    second = cache.fork(first)
    cu_seq = torch.tensor([0, 1, 4])
    cache.append([first, second], key[10:], value[10:], cu_seq)
    pools = cache.key, cache.value, cache.key_scale, cache.value_scale
    before = [pool.clone() for pool in pools]
    for new, error in (
        (torch.full((1, 2, 16), NAN), ValueError),
        (key.expand(9, -1, -1, -1).flatten(0, 1), RuntimeError),
    ):
        with pytest.raises(error):
            cache.append([first], new, new, torch.tensor([0, len(new)]))
    for pool, x in zip(pools, before, strict=True):
        assert torch.equal(pool.view(torch.uint8), x.view(torch.uint8))
    query = torch.randn(4, 4, 16)
    actual = cache.attend(query, [first, second], cu_seq)
    for n, tokens in enumerate(([*range(11)], [*range(10), 11, 12, 13])):
        k, v = (Stored(*quantize_kv(x[tokens].transpose(0, 1), eight)) for x in (key, value))
        own = slice(cu_seq[n], cu_seq[n + 1])
        q = query[own].transpose(0, 1)
        first_row = len(tokens) - q.shape[1]
        expected = attend(q, k, v, is_causal=True, query_offset=first_row)
        assert torch.equal(actual[own].transpose(0, 1), expected)


def test_inspect_skips_it() -> None:
    x = torch.randn(1, 2, 3, 16), *drawn(1, 2, 20, 16), *drawn(1, 2, 20, 16)
    with pytest.raises(RuntimeError, match="its keys or values have 8 bits, and no statistics"):
        torch_attn.inspect(Cached(), *x)
