"""The paged cache: in no order of calls is a page lost, or read after it is free."""

from __future__ import annotations

import ctypes
import mmap
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

import torch_attn
from helpers import bits_promised
from torch_attn import PagedCache
from torch_attn.varlen import AuxRequest


def starts_of(counts: list[int]) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


def pages_of(cache: PagedCache) -> Any:
    """All that the cache keeps beside the pools, to see whether a call has changed it."""
    sequences = {h: (list(s.pages), list(s.lengths)) for h, s in cache._sequences.items()}
    return sequences, list(cache._uses), list(cache._free)


# --- any calls in any order -----------------------------------------------------------------------

# Token t has the same key and value in every layer and sequence that it is in.
TOKENS, GENERATOR = 1000, torch.Generator().manual_seed(0)
KEYS, VALUES = (torch.randn(TOKENS, *sizes, generator=GENERATOR) for sizes in ((2, 8), (1, 4)))


class AnyCalls(RuleBasedStateMachine):
    """A cache beside a model of it: for each sequence and layer, a list of the tokens.

    What no sequence may read is NaN before every call. Few sequences, most with tokens, are what
    makes pages shared, and written to, often: two are there from the start to the end.
    """

    make = PagedCache

    @initialize(pages=st.integers(6, 40), page_size=st.integers(1, 5), layers=st.integers(1, 2))
    def begin(self, pages: int, page_size: int, layers: int) -> None:
        self.size, self.layers, self.tokens = page_size, layers, 0
        device = torch.get_default_device()
        self.keys, self.values = KEYS.to(device), VALUES.to(device)
        sizes = {"key_heads": 2, "head_dim": 8, "value_heads": 1, "value_dim": 4}
        self.cache = self.make(pages, page_size=page_size, layers=layers, **sizes)
        self.texts: dict[int, list[list[int]]] = {}
        self.add()
        self.add()
        self.step(3)

    def tables(self) -> dict[int, list[int]]:
        tables = {}
        for handle in self.texts:
            table, _ = self.cache.block_table([handle])
            tables[handle] = [page for page in table[0].tolist() if page != -1]
        return tables

    def some(self, data: st.DataObject, *, once: bool = False) -> list[int]:
        handles = st.sampled_from(sorted(self.texts))
        return data.draw(st.lists(handles, min_size=once, max_size=4, unique=once))

    @precondition(lambda self: len(self.texts) < 5)
    @rule()
    def add(self) -> None:
        handle = self.cache.add()
        assert handle not in self.texts
        self.texts[handle] = [[] for _ in range(self.layers)]

    @precondition(lambda self: len(self.texts) < 8)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(sorted(self.texts)))
        longest = max(map(len, self.texts[parent]))
        length = data.draw(st.none() | st.integers(0, longest))
        free = self.cache.free_pages
        child = self.cache.fork(parent, length)
        assert child not in self.texts
        assert self.cache.free_pages == free
        self.texts[child] = [tokens[:length] for tokens in self.texts[parent]]

    @precondition(lambda self: len(self.texts) > 2)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.texts)))
        self.cache.free(handle)
        del self.texts[handle]
        with pytest.raises(ValueError, match=f"handle: {handle} has been freed"):
            self.cache.free(handle)

    def needed(self, handles: list[int], counts: list[int], layer: int) -> int:
        """How many pages an append takes: new ones, and copies for all writers but a last owner."""
        tables, written, new = self.tables(), Counter[int](), 0
        for handle, count in zip(handles, counts, strict=True):
            begin = len(self.texts[handle][layer])
            for index in {row // self.size for row in range(begin, begin + count)}:
                if index < len(tables[handle]):
                    written[tables[handle][index]] += 1
                else:
                    new += 1
        users = Counter(page for table in tables.values() for page in table)
        return new + sum(n - (n == users[page]) for page, n in written.items())

    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        handles = self.some(data, once=True)
        counts = [data.draw(st.integers(0, 7)) for _ in handles]
        self.append_or_refuse(handles, counts, data.draw(st.integers(0, self.layers - 1)))

    @rule(count=st.integers(1, 3))
    def step(self, count: int) -> None:
        """All sequences and layers, as a model generates."""
        for layer in range(self.layers):
            self.append_or_refuse(list(self.texts), [count] * len(self.texts), layer)

    def append_or_refuse(self, handles: list[int], counts: list[int], layer: int) -> None:
        total = sum(counts)
        new = torch.arange(self.tokens, self.tokens + total + 2) % TOKENS  # two behind the last
        arguments = handles, self.keys[new], self.values[new], starts_of(counts)
        needed, free, before = self.needed(handles, counts, layer), self.cache.free_pages, None
        if needed > free:
            event("append: too few pages")
            before = pages_of(self.cache), self.cache.key.clone(), self.cache.value.clone()
            message = f"{needed} pages are needed and {free} are free"
            with pytest.raises(RuntimeError, match=message):
                self.cache.append(*arguments, layer=layer)
            assert pages_of(self.cache) == before[0]
            torch.testing.assert_close(self.cache.key, before[1], rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(self.cache.value, before[2], rtol=0, atol=0, equal_nan=True)
            return
        self.cache.append(*arguments, layer=layer)
        assert self.cache.free_pages == free - needed
        starts = starts_of(counts).tolist()
        for n, handle in enumerate(handles):
            self.texts[handle][layer] += new[starts[n] : starts[n + 1]].tolist()
        self.tokens += total

    @rule(data=st.data())
    def attend(self, data: st.DataObject) -> None:
        """Bit for bit what a call has of the keys and values one behind the other."""
        handles, layer = self.some(data), data.draw(st.integers(0, self.layers - 1))
        counts = [data.draw(st.integers(0, 4)) for _ in handles]
        texts = [self.texts[handle][layer] for handle in handles]
        in_a_row = torch.tensor([token for text in texts for token in text], dtype=torch.int64)
        query, starts = torch.randn(sum(counts), 4, 8), starts_of(counts)
        lse = AuxRequest(lse=True)
        actual = self.cache.attend(query, handles, starts, layer=layer, return_aux=lse)
        expected = torch_attn.varlen_attn(
            query,
            self.keys[in_a_row],
            self.values[in_a_row],
            starts,
            starts_of([len(text) for text in texts]),
            4,
            len(in_a_row),
            window_size=(-1, 0),
            enable_gqa=True,
            return_aux=lse,
        )
        assert all(map(torch.equal, actual, expected))

    def teardown(self) -> None:
        for handle in getattr(self, "texts", ()):
            self.cache.free(handle)
        if hasattr(self, "texts"):
            assert self.cache.free_pages == len(self.cache._uses)

    @invariant()
    def uses_are_those_of_the_tables(self) -> None:
        tables = self.tables()
        users = Counter(page for table in tables.values() for page in table)
        assert self.cache._uses == [users[page] for page in range(len(self.cache._uses))]
        assert sorted([*self.cache._free, *users]) == list(range(len(self.cache._uses)))
        assert self.cache.free_pages == len(self.cache._free)
        for handle, table in tables.items():
            assert len(set(table)) == len(table)
            assert len(table) == -(-max(map(len, self.texts[handle])) // self.size)

    @invariant()
    def contents_are_those_of_the_model(self) -> None:
        readable = torch.zeros(self.cache.key.shape[:3], dtype=torch.bool)
        for layer in range(self.layers):
            table, used = self.cache.block_table(list(self.texts), layer=layer)
            assert used.tolist() == self.cache.lengths(list(self.texts), layer=layer)
            for row, text in zip(table, self.texts.values(), strict=True):
                at = torch.arange(len(text[layer]))
                page, offset = row[at // self.size].long(), at % self.size
                assert torch.equal(self.cache.key[layer, page, offset], self.keys[text[layer]])
                assert torch.equal(self.cache.value[layer, page, offset], self.values[text[layer]])
                readable[layer, page, offset] = True
            assert used.tolist() == [len(text[layer]) for text in self.texts.values()]
        self.cache.key[~readable] = torch.nan
        self.cache.value[~readable] = torch.nan


RUNS = settings(max_examples=60, stateful_step_count=40)


def test_any_calls(device: str) -> None:
    with bits_promised(device):
        run_state_machine_as_test(AnyCalls, settings=RUNS)


class ForgetsToCopy(PagedCache):
    def _write(self, new: list[Tensor], layer: int, _: Any, slots: list[int]) -> None:
        super()._write(new, layer, {}, slots)


class WritesIntoSharedPages(PagedCache):
    def append(self, *args: Any, **options: Any) -> None:
        uses, self._uses = self._uses, [min(n, 1) for n in self._uses]
        super().append(*args, **options)
        self._uses = [n or new for n, new in zip(uses, self._uses, strict=True)]


class FreesSharedPages(PagedCache):
    def free(self, handle: int) -> None:
        self._uses = [min(n, 1) for n in self._uses]
        super().free(handle)


class LosesPages(PagedCache):
    def free(self, handle: int) -> None:
        super().free(handle)
        del self._free[10:], self._free[:1]


class TakesBeforeItKnows(PagedCache):
    def append(self, *args: Any, **options: Any) -> None:
        try:
            super().append(*args, **options)
        except RuntimeError:
            self._free.clear()
            raise


@pytest.mark.parametrize(
    "broken",
    [ForgetsToCopy, WritesIntoSharedPages, FreesSharedPages, LosesPages, TakesBeforeItKnows],
)
def test_any_calls_find_what_is_broken(broken: type[PagedCache]) -> None:
    machine = type("Broken", (AnyCalls,), {"make": broken})
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run_state_machine_as_test(machine, settings=settings(RUNS, phases=[Phase.generate]))


# --- a model that generates -----------------------------------------------------------------------


class TinyGPT:
    """Two layers in numbers of which no bit depends on how many tokens there are in a call."""

    layers, heads, groups, size, width, words = 2, 4, 2, 8, 32, 50

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype  # of the attention
        kv = 2 * self.groups * self.size
        self.embedding = torch.randn(self.words, self.width)
        self.inputs = torch.randn(self.layers, self.width + kv, self.width) / 6
        self.outputs = torch.randn(self.layers, self.width, self.width) / 6

    def __call__(self, tokens: list[int], attention: Any) -> Tensor:
        """The logits of all tokens, ``[T, words]``; `attention` has packed heads ``[T, H, E]``."""
        x = self.embedding[tokens]
        for layer in range(self.layers):
            heads = self.each(self.inputs[layer], x).unflatten(-1, (-1, self.size)).to(self.dtype)
            query, key, value = heads.split([self.heads, self.groups, self.groups], dim=1)
            attended = attention(layer, query, key, value).flatten(1).float()
            x = torch.tanh(x + self.each(self.outputs[layer], attended))
        return self.each(self.embedding, x)

    @staticmethod
    def each(matrix: Tensor, x: Tensor) -> Tensor:
        return torch.stack([matrix @ row for row in x.unbind()])

    def dense(self, tokens: list[int]) -> Tensor:
        def attention(_: int, *packed: Tensor) -> Tensor:
            query, key, value = (t.transpose(0, 1) for t in packed)
            output = torch_attn.sdpa(query, key, value, is_causal=True, enable_gqa=True)
            return output.transpose(0, 1)

        return self(tokens, attention)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generation(dtype: torch.dtype, device: str) -> None:
    """Prompts, chunks, tokens and forks side by side give the bits of dense calls, each alone.

    On a GPU, tensor cores compute what is dense, and need not compute what is in pages.
    """
    bound = 0.1 if device == "cuda" and dtype == torch.bfloat16 else 0
    gpt = TinyGPT(dtype)
    cache = PagedCache(40, page_size=5, key_heads=2, head_dim=8, layers=TinyGPT.layers, dtype=dtype)
    texts: dict[int, list[int]] = {}

    def step(new: dict[int, list[int]]) -> list[int]:
        """The likeliest next token of each text, after new ones that are all checked."""
        handles, cu_seq = list(new), starts_of([len(tokens) for tokens in new.values()])

        def attention(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            cache.append(handles, key, value, cu_seq, layer=layer)
            return cache.attend(query, handles, cu_seq, layer=layer)

        logits = gpt([token for tokens in new.values() for token in tokens], attention)
        for (handle, tokens), part in zip(
            new.items(), logits.split(cu_seq.diff().tolist()), strict=True
        ):
            texts[handle] = texts.get(handle, []) + tokens
            dense = gpt.dense(texts[handle])[-len(tokens) :]
            torch.testing.assert_close(part, dense, rtol=0, atol=bound)
        return [int(logits[end - 1].argmax()) for end in cu_seq[1:].tolist()]

    with torch_attn.invariant():
        first, second = cache.add(), cache.add()
        # a whole prompt, and the first chunk of a long one
        token, _ = step({first: list(range(13)), second: list(range(20, 37))})
        # a token of the first, the rest of the second
        tokens = step({first: [token], second: list(range(30, 41))})
        # the first goes on in two ways, and a text of its own begins
        fork = cache.fork(first)
        texts[fork] = list(texts[first])
        step({first: [tokens[0]], second: [tokens[1]], fork: [7, 8], cache.add(): [1, 2, 3]})
        # the last three tokens of the fork are taken back
        shorter = cache.fork(fork, cache.lengths([fork])[0] - 3)
        cache.free(fork)
        texts[shorter] = texts.pop(fork)[:-3]
        tokens = [5] * len(texts)
        for _ in range(8):
            tokens = step({handle: [token] for handle, token in zip(texts, tokens, strict=True)})
    for handle in texts:
        cache.free(handle)
    assert cache.free_pages == 40


# --- each method ----------------------------------------------------------------------------------


def small(**sizes: Any) -> PagedCache:
    return PagedCache(**{"pages": 4, "page_size": 4, "key_heads": 2, "head_dim": 8, **sizes})


def test_pools_are_as_asked_for() -> None:
    cache = PagedCache(3, key_heads=2, head_dim=8)
    assert cache.key.shape == cache.value.shape == (1, 3, 64, 2, 8)
    assert cache.key.dtype == torch.float32
    cache = small(value_heads=1, value_dim=3, layers=5, dtype=torch.float16, device="meta")
    assert cache.key.shape == (5, 4, 4, 2, 8)
    assert cache.value.shape == (5, 4, 4, 1, 3)
    assert cache.value.dtype == torch.float16
    assert cache.value.device.type == "meta"


@pytest.mark.usefixtures("device")
def test_tables_are_what_the_operator_takes() -> None:
    cache = small()
    handles = [cache.add() for _ in range(3)]
    cache.append(handles, *torch.randn(2, 11, 2, 8), starts_of([9, 0, 2]))
    table, used = cache.block_table(handles)
    assert table.dtype == used.dtype == torch.int32
    assert table.tolist() == [[0, 1, 2], [-1, -1, -1], [3, -1, -1]]
    assert used.tolist() == cache.lengths(handles) == [9, 0, 2]
    table, used = cache.block_table([])
    assert table.shape == (0, 0)
    assert used.shape == (0,)


@pytest.mark.usefixtures("device")
def test_a_prefix_takes_no_page_until_it_is_written_to() -> None:
    cache = small()
    first = cache.add()
    cache.append([first], *torch.randn(2, 6, 2, 8), starts_of([6]))
    second = cache.fork(first)
    third = cache.fork(first, 4)
    assert cache.free_pages == 2
    # Two write into one page: one gets a copy, the other keeps the page.
    cache.append([first, second], *torch.randn(2, 2, 2, 8), starts_of([1, 1]))
    assert cache.free_pages == 1
    assert cache.block_table([first, second, third])[0][:, 0].tolist() == [0, 0, 0]
    cache.free(first)
    assert cache.free_pages == 2
    cache.free(second)
    assert cache.free_pages == 3
    cache.free(third)
    assert cache.free_pages == 4


def test_no_handle_is_given_twice() -> None:
    cache = small()
    handles = [cache.add(), cache.add()]
    cache.free(handles[1])
    assert cache.add() not in handles
    assert cache.fork(handles[0]) not in handles


@pytest.mark.usefixtures("device")
def test_of_all_who_write_into_a_page_the_last_keeps_it() -> None:
    cache = small(pages=3)
    texts = [cache.add()]
    cache.append(texts, *torch.randn(2, 2, 2, 8), starts_of([2]))
    texts += [cache.fork(texts[0]), cache.fork(texts[0])]
    new = torch.randn(3, 2, 8)
    cache.append(texts, new, new, starts_of([1, 1, 1]))
    table, _ = cache.block_table(texts)
    assert sorted(table.flatten().tolist()) == [0, 1, 2]
    assert torch.equal(cache.key[0, table[:, 0], 2], new)
    for handle in texts:
        cache.free(handle)
    assert cache.free_pages == 3


@pytest.mark.usefixtures("device")
def test_attend_takes_the_options_of_the_operator() -> None:
    cache = small()
    handle = cache.add()
    cache.append([handle], *torch.randn(2, 10, 2, 8), starts_of([10]))
    query, starts = torch.randn(10, 2, 8), starts_of([10])
    key, value = (pool[0].flatten(0, 1)[:10].transpose(0, 1) for pool in (cache.key, cache.value))
    options = {"window_size": (3, 2), "softcap": 5.0, "sinks": torch.randn(2), "scale": 0.3}
    output = cache.attend(query, [handle], starts, max_q=12, **options)
    expected = torch_attn.sdpa(query.transpose(0, 1), key, value, **options)
    assert torch.equal(output.transpose(0, 1), expected)


def test_repr() -> None:
    cache = PagedCache(8, page_size=16, key_heads=2, head_dim=4)
    handle = cache.add()
    cache.append([handle], torch.randn(17, 2, 4), torch.randn(17, 2, 4), torch.tensor([0, 17]))
    assert repr(cache) == (
        "PagedCache(8 pages of 16 tokens, 6 free; 1 sequences; layers=1, key_heads=2, head_dim=4, "
        "torch.float32, cpu)"
    )


@pytest.mark.usefixtures("device")
def test_keys_and_values_are_kept_as_numbers() -> None:
    cache = small()
    handle, starts = cache.add(), starts_of([3])
    key = torch.randn(3, 2, 8, requires_grad=True)
    cache.append([handle], key, key * 2, starts)
    assert not cache.key.requires_grad
    assert not cache.value.requires_grad
    query = torch.randn(3, 2, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="derivative is asked for, but block_table is given"):
        cache.attend(query, [handle], starts)
    with torch.no_grad():
        assert not cache.attend(query, [handle], starts).requires_grad


@pytest.mark.usefixtures("device")
def test_a_cache_can_be_made_and_used_for_inference_alone() -> None:
    outputs = []
    for inside in (False, True):
        torch.manual_seed(0)
        with torch.inference_mode(inside):
            cache = small()
        with torch.inference_mode():
            handle, starts = cache.add(), starts_of([3])
            cache.append([handle], *torch.randn(2, 3, 2, 8), starts)
            outputs.append(cache.attend(torch.randn(3, 2, 8), [handle], starts))
    assert torch.equal(*outputs)


SIZES = ["pages", "page_size", "key_heads", "head_dim", "value_heads", "value_dim", "layers"]


@pytest.mark.parametrize("size", [0, -1, 2.0])
@pytest.mark.parametrize("name", SIZES)
def test_refuses_sizes(name: str, size: Any) -> None:
    with pytest.raises(ValueError, match=rf"PagedCache: {name} is {size}; it must be an int of 1"):
        small(**{name: size})


def test_refuses_dtypes() -> None:
    message = r"dtype is torch.int64; it must be one of torch.float64, torch.float32"
    with pytest.raises(ValueError, match=message):
        small(dtype=torch.int64)


KEY, STARTS = torch.ones(5, 2, 8), starts_of([2, 3])
# Calls of a cache that has sequence 0 of 2 tokens and 1 of 3 tokens, and had 2: method, arguments,
# options, what is said.
REFUSED: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], str]] = {
    "free, freed": ("free", (2,), {}, "handle: 2 has been freed; it must be a sequence that is"),
    "free, unknown": ("free", (3,), {}, "handle: 3 is no handle; it must be what add or fork"),
    "free, negative": ("free", (-1,), {}, "handle: -1 is no handle"),
    "free, many": ("free", ([0, 1],), {}, r"handle: \[0, 1\] is no handle"),
    "fork, freed": ("fork", (2,), {}, "handle: 2 has been freed"),
    "fork, too long": ("fork", (1, 4), {}, "length is 4; it must be an int from 0 to 3, the len"),
    "fork, negative": ("fork", (1, -1), {}, "length is -1; it must be an int from 0 to 3"),
    "fork, half": ("fork", (1, 1.5), {}, "length is 1.5; it must be an int"),
    "lengths, freed": ("lengths", ([0, 2],), {}, "handles: 2 has been freed"),
    "lengths, layer": ("lengths", ([0],), {"layer": 2}, "layer is 2; it must be .* from 0 to 1"),
    "block_table, unknown": ("block_table", ([9],), {}, "handles: 9 is no handle"),
    "block_table, layer": ("block_table", ([0],), {"layer": -1}, "layer is -1; it must be an int"),
    "attend, freed": ("attend", (KEY, [0, 2], STARTS), {}, "handles: 2 has been freed"),
    "attend, layer": ("attend", (KEY, [0, 1], STARTS), {"layer": 0.5}, "layer is 0.5; it must"),
    "attend, fewer": ("attend", (KEY, [0], STARTS), {}, r"cu_seq_q has shape \[3\]; .* handles"),
    "attend, list": ("attend", (KEY, [0], [0, 5]), {}, "cu_seq_q is a list; it must be a tensor"),
    **{
        f"append, {name}": ("append", arguments, options, message)
        for name, arguments, options, message in [
            ("freed", ([0, 2], KEY, KEY, STARTS), {}, "handles: 2 has been freed"),
            ("unknown", ([0, 5], KEY, KEY, STARTS), {}, "handles: 5 is no handle"),
            ("twice", ([1, 1], KEY, KEY, STARTS), {}, r"handles is \[1, 1\]; each must be in it"),
            ("layer", ([0, 1], KEY, KEY, STARTS), {"layer": 7}, "layer is 7; it must be an int"),
            (
                "heads of key",
                ([0, 1], KEY[:, :1], KEY, STARTS),
                {},
                r"key is torch.float32 of shape \[5, 1, 8\] on cpu; it must be torch.float32 of "
                r"shape \[T, 2, 8\] on cpu",
            ),
            ("number", ([0, 1], KEY[0, 0, 0], KEY, STARTS), {}, r"key is .* of shape \[\] on cpu"),
            ("value", ([0, 1], KEY, KEY[:4], STARTS), {}, r"value is .*\[4, 2, 8\].*\[T = 5, 2"),
            ("dtype", ([0, 1], KEY.half(), KEY, STARTS), {}, "key is torch.float16 .*float32"),
            ("device", ([0, 1], KEY, KEY.to("meta"), STARTS), {}, "value is .* on meta; .* on cpu"),
            ("layout", ([0, 1], KEY, KEY.to_sparse(), STARTS), {}, "value has layout torch.sparse"),
            ("fewer", ([0], KEY, KEY, STARTS), {}, r"cu_seq has shape .*must be \[2\], one"),
            ("start", ([0, 1], KEY, KEY, STARTS + 1), {}, r"cu_seq is \[1, 3, 6\]; .* from 0"),
            ("descends", ([0, 1], KEY, KEY, starts_of([3, -1])), {}, r"cu_seq is \[0, 3, 2\]"),
            (
                "more",
                ([0, 1], KEY, KEY, starts_of([3, 3])),
                {},
                r"cu_seq is \[0, 3, 6\]; .* at most 5",
            ),
            ("scalar", ([0, 1], KEY, KEY, STARTS[0]), {}, r"cu_seq has shape .* must be \[3\]"),
            ("list", ([0, 1], KEY, KEY, [0, 2, 5]), {}, "cu_seq is a list; it must be a tensor of"),
            ("floats", ([0, 1], KEY, KEY, STARTS.float()), {}, "cu_seq is torch.float32; it must"),
        ]
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    """Every wrong argument, and all is as before."""
    cache = small(layers=2)
    handles = [cache.add() for _ in range(3)]
    cache.append(handles[:2], KEY, KEY, STARTS)
    cache.free(handles[2])
    before = pages_of(cache)
    method, arguments, options, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"torch_attn.PagedCache: {message}"):
        getattr(cache, method)(*arguments, **options)
    assert pages_of(cache) == before


def test_refuses_what_is_no_tensor() -> None:
    cache = small()
    with pytest.raises(TypeError, match="PagedCache: value is a list; it must be a tensor"):
        cache.append([cache.add()], KEY, [1.0], starts_of([5]))


def test_says_how_many_pages_are_needed() -> None:
    cache = small()
    handles = [cache.add(), cache.add()]
    message = "5 pages are needed and 4 are free; free sequences, append to fewer, or make a cache"
    with pytest.raises(RuntimeError, match=message):
        cache.append(handles, *torch.randn(2, 17, 2, 8), starts_of([8, 9]))
    cache.append(handles, *torch.randn(2, 16, 2, 8), starts_of([8, 8]))
    assert cache.free_pages == 0


def test_a_write_that_fails_changes_no_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The write here is interrupted at its end: pages are taken afterwards.

    Two write into a shared page: the shorter one would write over tokens of the other.
    """

    def fails(*arguments: Any) -> None:
        PagedCache._write(cache, *arguments)
        raise KeyboardInterrupt

    cache = small()
    first = cache.add()
    cache.append([first], *torch.randn(2, 7, 2, 8), starts_of([7]))
    second, before = cache.fork(first, 5), None
    before = pages_of(cache), cache.key[0].flatten(0, 1)[:7].clone()
    monkeypatch.setattr(cache, "_write", fails)
    with pytest.raises(KeyboardInterrupt):
        cache.append([first, second], *torch.randn(2, 6, 2, 8), starts_of([1, 5]))
    assert pages_of(cache) == before[0]
    assert torch.equal(cache.key[0].flatten(0, 1)[:7], before[1])


@pytest.mark.usefixtures("device")
def test_appends_tokens_that_are_in_the_cache() -> None:
    cache = small()
    first, second = cache.add(), cache.add()
    cache.append([first], *torch.randn(2, 3, 2, 8), starts_of([3]))
    key, value = cache.key[0, 0, :3], cache.value[0, 0, :3]
    cache.append([second], key, value, starts_of([3]))
    assert torch.equal(cache.key[0, 1, :3], key)
    assert torch.equal(cache.value[0, 1, :3], value)


@pytest.mark.usefixtures("device")
def test_handles_may_be_given_once() -> None:
    """An iterator may give them, which is empty afterwards."""
    cache = small()
    handle, starts = cache.add(), starts_of([3])
    cache.append(iter([handle]), *torch.randn(2, 3, 2, 8), starts)  # type: ignore[arg-type]
    output = cache.attend(torch.randn(3, 2, 8), iter([handle]), starts)  # type: ignore[arg-type]
    assert isinstance(output, Tensor)
    assert output.isfinite().all()


# --- block tables of any kind ---------------------------------------------------------------------


def unmapped_behind(numbers: list[int], dtype: torch.dtype) -> Tensor:
    """[1, 2 n]: a table of n numbers, and behind them n whose memory cannot be read."""
    size = mmap.PAGESIZE
    area = mmap.mmap(-1, 2 * size)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    behind = ctypes.c_void_p(start + size)
    assert ctypes.CDLL(None, use_errno=True).mprotect(behind, size, 0) == 0
    bytes_of_both = (ctypes.c_char * (2 * size)).from_address(start)
    table = torch.frombuffer(bytes_of_both, dtype=dtype)
    table = table.as_strided((1, 2 * len(numbers)), (1, 1), size // dtype.itemsize - len(numbers))
    table[0, : len(numbers)] = torch.tensor(numbers, dtype=dtype)
    MAPPED.append(area)
    return table


MAPPED: list[mmap.mmap] = []  # as long as tensors point into it


@pytest.mark.regression
@pytest.mark.usefixtures("cpu_capability")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("page", [2, 16, 64])
@pytest.mark.parametrize("queries", [1, 40])
def test_only_entries_in_use_are_read(dtype: torch.dtype, page: int, queries: int) -> None:
    """Entries keep their dtype and have any strides; no table, however wide, is copied."""
    pool, query = torch.randn(9, page, 2, 8), torch.randn(queries, 2, 8)
    starts, used = torch.tensor([0, queries]), torch.tensor([2 * page + 1])

    def attend(table: Tensor) -> Tensor:
        output = torch_attn.varlen_attn(
            query,
            pool,
            pool,
            starts,
            None,
            queries,
            2 * page + 1,
            seqused_k=used,
            block_table=table,
        )
        assert isinstance(output, Tensor)
        return output

    expected = attend(torch.tensor([[3, 8, 5]]))
    assert torch.equal(attend(unmapped_behind([3, 8, 5], dtype)), expected)
    strided = torch.full((1, 6), 10**9, dtype=dtype)
    strided[:, ::2] = torch.tensor([3, 8, 5])
    assert torch.equal(attend(strided[:, ::2]), expected)
    wide = torch.tensor([[3]], dtype=dtype).expand(1, 2**40)
    assert torch.equal(attend(wide), attend(torch.tensor([[3, 3, 3]])))


@pytest.mark.regression
@pytest.mark.parametrize("used", [2**63 - 1, 2**63 - 15, 2**63 - 16, 17, -1])
def test_lengths_beyond_the_table_are_refused(used: int) -> None:
    """Refuses lengths, too, whose number of pages overflows when it is rounded up."""
    query, pool = torch.randn(1, 1, 8), torch.randn(2, 16, 1, 8)
    with pytest.raises(RuntimeError, match=f"attn::varlen_attention: seqused_k is {used}"):
        torch_attn.varlen_attn(
            query, pool, pool, torch.tensor([0, 1]), None, 1, 2**63 - 1,
            seqused_k=torch.tensor([used]), block_table=torch.tensor([[-1]]),
        )  # fmt: skip
