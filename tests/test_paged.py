"""The paged cache: in no order of calls is a page lost, or read after it is free."""

from __future__ import annotations

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
from _memory import GuardedMemory
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


@pytest.mark.long
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


# --- texts that grow ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generation(dtype: torch.dtype, device: str) -> None:
    """Prompts, chunks, tokens and forks side by side give the bits of dense calls, each alone.

    On a GPU, tensor cores compute what is dense, and need not compute what is in pages.
    """
    bound = 2**-6 if device == "cuda" and dtype == torch.bfloat16 else 0
    # Of each token, in each of two layers, in any text.
    queries, keys, values = (torch.randn(2, 50, heads, 8).to(dtype) for heads in (4, 2, 2))
    cache = PagedCache(40, page_size=5, key_heads=2, head_dim=8, layers=2, dtype=dtype)
    texts: dict[int, list[int]] = {}

    def step(new: dict[int, list[int]]) -> None:
        """Appends new tokens to texts, and checks what these tokens attend to."""
        handles, starts = list(new), starts_of([len(tokens) for tokens in new.values()])
        tokens = [token for of_text in new.values() for token in of_text]
        for handle in handles:
            texts[handle] = texts.get(handle, []) + new[handle]
        for layer in range(2):
            cache.append(handles, keys[layer, tokens], values[layer, tokens], starts, layer=layer)
            output = cache.attend(queries[layer, tokens], handles, starts, layer=layer)
            for handle, part in zip(handles, output.split(starts.diff().tolist()), strict=True):
                x = (t[layer, texts[handle]].transpose(0, 1) for t in (queries, keys, values))
                dense = torch_attn.sdpa(*x, is_causal=True, enable_gqa=True).transpose(0, 1)
                torch.testing.assert_close(part, dense[-len(part) :], rtol=bound, atol=bound)

    with torch_attn.invariant():
        first, second = cache.add(), cache.add()
        # a whole prompt, and the first chunk of a long one
        step({first: list(range(13)), second: list(range(20, 37))})
        # a token of the first, the rest of the second
        step({first: [45], second: list(range(30, 41))})
        # the first goes on in two ways, and a text of its own begins
        fork = cache.fork(first)
        texts[fork] = list(texts[first])
        step({first: [46], second: [47], fork: [7, 8], cache.add(): [1, 2, 3]})
        # the last three tokens of the fork are taken back
        shorter = cache.fork(fork, cache.lengths([fork])[0] - 3)
        cache.free(fork)
        texts[shorter] = texts.pop(fork)[:-3]
        for n in range(8):
            step({handle: [10 * place + n] for place, handle in enumerate(texts)})
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


def test_no_handle_is_given_twice() -> None:
    cache = small()
    handles = [cache.add(), cache.add()]
    cache.free(handles[1])
    assert cache.add() not in handles
    assert cache.fork(handles[0]) not in handles


@pytest.mark.usefixtures("device")
def test_more_queries_than_there_are_may_be_announced() -> None:
    """As of a graph that serves calls of any length."""
    cache = small()
    handle, starts, query = cache.add(), starts_of([10]), torch.randn(10, 2, 8)
    cache.append([handle], *torch.randn(2, 10, 2, 8), starts)
    output = cache.attend(query, [handle], starts, max_q=12)
    assert torch.equal(output, cache.attend(query, [handle], starts))


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
RIGHT: dict[str, dict[str, Any]] = {
    "append": {"handles": [0, 1], "key": KEY, "value": KEY, "cu_seq": STARTS},
    "attend": {"query": KEY, "handles": [0, 1], "cu_seq_q": STARTS},
}
# Calls of a cache that has sequence 0 of 2 tokens and 1 of 3 tokens, and had 2: the method, what
# differs from a call that is right, what is said.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("free", {"handle": 2}, "handle: 2 has been freed; it must be a sequence that is"),
    ("free", {"handle": 3}, "handle: 3 is no handle; it must be what add or fork"),
    ("free", {"handle": -1}, "handle: -1 is no handle"),
    ("free", {"handle": [0, 1]}, r"handle: \[0, 1\] is no handle"),
    ("fork", {"handle": 2}, "handle: 2 has been freed"),
    ("fork", {"handle": 1, "length": 4}, "length is 4; it must be an int from 0 to 3, the len"),
    ("fork", {"handle": 1, "length": -1}, "length is -1; it must be an int from 0 to 3"),
    ("fork", {"handle": 1, "length": 1.5}, "length is 1.5; it must be an int"),
    ("lengths", {"handles": [0, 2]}, "handles: 2 has been freed"),
    ("lengths", {"handles": [0], "layer": 2}, "layer is 2; it must be .* from 0 to 1"),
    ("block_table", {"handles": [9]}, "handles: 9 is no handle"),
    ("block_table", {"handles": [0], "layer": -1}, "layer is -1; it must be an int"),
    ("attend", {"handles": [0, 2]}, "handles: 2 has been freed"),
    ("attend", {"layer": 0.5}, "layer is 0.5; it must"),
    ("attend", {"handles": [0]}, r"cu_seq_q has shape \[3\]; .* handles"),
    ("attend", {"handles": [0], "cu_seq_q": [0, 5]}, "cu_seq_q is a list; it must be a tensor"),
    ("append", {"handles": [0, 2]}, "handles: 2 has been freed"),
    ("append", {"handles": [0, 5]}, "handles: 5 is no handle"),
    ("append", {"handles": [1, 1]}, r"handles is \[1, 1\]; each must be in it"),
    ("append", {"layer": 7}, "layer is 7; it must be an int"),
    (
        "append",
        {"key": KEY[:, :1]},
        r"key is torch.float32 of shape \[5, 1, 8\] on cpu; it must be torch.float32 of shape "
        r"\[T, 2, 8\] on cpu",
    ),
    ("append", {"key": KEY[0, 0, 0]}, r"key is .* of shape \[\] on cpu"),
    ("append", {"value": KEY[:4]}, r"value is .*\[4, 2, 8\].*\[T = 5, 2"),
    ("append", {"key": KEY.half()}, "key is torch.float16 .*float32"),
    ("append", {"value": KEY.to("meta")}, "value is .* on meta; .* on cpu"),
    ("append", {"value": KEY.to_sparse()}, "value has layout torch.sparse"),
    ("append", {"handles": [0]}, r"cu_seq has shape .*must be \[2\], one"),
    ("append", {"cu_seq": STARTS + 1}, r"cu_seq is \[1, 3, 6\]; .* from 0"),
    ("append", {"cu_seq": starts_of([3, -1])}, r"cu_seq is \[0, 3, 2\]"),
    ("append", {"cu_seq": starts_of([3, 3])}, r"cu_seq is \[0, 3, 6\]; .* at most 5"),
    ("append", {"cu_seq": STARTS[0]}, r"cu_seq has shape .* must be \[3\]"),
    ("append", {"cu_seq": [0, 2, 5]}, "cu_seq is a list; it must be a tensor of"),
    ("append", {"cu_seq": STARTS.float()}, "cu_seq is torch.float32; it must"),
]


@pytest.mark.parametrize(("method", "changes", "said"), REFUSED, ids=[s for *_, s in REFUSED])
def test_refuses(method: str, changes: dict[str, Any], said: str) -> None:
    """Every wrong argument, and all is as before."""
    cache = small(layers=2)
    handles = [cache.add() for _ in range(3)]
    cache.append(handles[:2], KEY, KEY, STARTS)
    cache.free(handles[2])
    before = pages_of(cache)
    with pytest.raises(ValueError, match=f"torch_attn.PagedCache: {said}"):
        getattr(cache, method)(**RIGHT.get(method, {}) | changes)
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
    memory, n = GuardedMemory(1, at_end=True), len(numbers)
    end = (mmap.PAGESIZE + memory.size) // dtype.itemsize
    table = torch.frombuffer(memory.map, dtype=dtype).as_strided((1, 2 * n), (1, 1), end - n)
    table[0, :n] = torch.tensor(numbers, dtype=dtype)
    return table


@pytest.mark.regression
@pytest.mark.usefixtures("cpu_capability")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("page", [2, 16, 64])
@pytest.mark.parametrize("queries", [1, 40])
def test_only_entries_in_use_are_read(dtype: torch.dtype, page: int, queries: int) -> None:
    """Entries keep their dtype and have any strides; no table, however wide, is copied."""
    pool, query = torch.randn(9, page, 2, 8), torch.randn(queries, 2, 8)
    starts, used = torch.tensor([0, queries]), torch.tensor([2 * page + 1])

    def attend(table: Tensor) -> Any:
        given = {"seqused_k": used, "block_table": table}
        return torch_attn.varlen_attn(
            query, pool, pool, starts, None, queries, 2 * page + 1, **given
        )

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
