"""Stores keys and values of many growing sequences in pages of a pool, for `varlen_attn`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_attn._caches.quantize import MOST, quantize_kv
from torch_attn.varlen import varlen_attn

__all__ = ["PagedCache"]

_FLOATS = torch.float64, torch.float32, torch.bfloat16, torch.float16
_DTYPES = *_FLOATS, *MOST


class _Sequence(NamedTuple):
    pages: list[int]  # in order, for all layers; the layer with the most keys needs them all
    lengths: list[int]  # of each layer


class _Copy(NamedTuple):
    numbers: list[Any]
    stream: Any  # the CUDA stream on which they were copied
    tensor: Tensor


class PagedCache:
    """The keys and values of sequences that grow while a model generates, in pages of one pool.

    A sequence has as many pages as it needs, anywhere in the pool. Sequences with a common
    beginning share the pages of that beginning, because :meth:`fork` copies no page. If a sequence
    appends to a page that other sequences use too, the cache first copies the page for that
    sequence. A page is free again when the last sequence that uses it is freed. There is no
    scheduler: the caller decides which sequences grow and which are freed.

    The layers of a model share one table of pages: a sequence has the same page numbers in the
    pools of all layers. Each layer appends its own keys and values, at its own time. So the layers
    have different numbers of keys until all layers have appended. The first layer that needs a page
    takes it for all layers.

    The cache copies keys and values without their derivatives. So :meth:`attend` refuses a query
    that requires a gradient. Generate under :func:`torch.no_grad`. The bookkeeping is in Python, on
    the CPU. Only one thread at a time may use a cache.

    Args:
        pages: the number of pages, for all sequences together.
        page_size: the number of keys of a sequence that one page stores.
        key_heads, head_dim: Hk and E, the number of key heads and the size of a key.
        value_heads, value_dim: Hv and Ev, the same for values; None takes Hk or E.
        layers: the number of the model's layers.
        dtype: float64, float32, bfloat16 or float16; None is torch's default. With int8 or
            float8_e4m3fn, the cache rounds new keys and values (:func:`torch_attn.quantize_kv`).
        device: the device of the pool; None is torch's default.

    Attributes:
        key: the pool of keys, ``[layers, pages, page_size, Hk, E]``; :func:`varlen_attn` takes
            ``key[layer]``. Rows after the end of a sequence are undefined.
        value: the pool of values, ``[layers, pages, page_size, Hv, Ev]``.
        key_scale, value_scale: the scales of a pool of 8 bits, float32,
            ``[layers, pages, page_size, Hk]`` and ``[layers, pages, page_size, Hv]``; None for
            other pools.

    Raises:
        ValueError: a size is not a positive integer, or the dtype is not one of the six. Methods
            raise ValueError for shapes, dtypes or devices that do not fit, and for a handle that is
            unknown or has been freed. The message names the argument, its value and what is
            allowed. The cache is then unchanged.
        TypeError: a method got keys or values that are no tensors.
        RuntimeError: :meth:`append` needs more pages than are free.

    Example:
        Two questions share one document, which is stored once.

        >>> cache = torch_attn.PagedCache(8, page_size=16, key_heads=2, head_dim=64)
        >>> first = cache.add()
        >>> cache.append([first], *torch.randn(2, 40, 2, 64), torch.tensor([0, 40]))
        >>> second = cache.fork(first)
        >>> texts, cu_seq = [first, second], torch.tensor([0, 5, 12])  # 5 and 7 tokens more
        >>> query = torch.randn(12, 8, 64)
        >>> cache.append(texts, *torch.randn(2, 12, 2, 64), cu_seq)
        >>> cache.attend(query, texts, cu_seq).shape
        torch.Size([12, 8, 64])
        >>> cache.lengths(texts), cache.free_pages
        ([45, 47], 4)
    """

    def __init__(
        self,
        pages: int,
        *,
        page_size: int = 64,
        key_heads: int,
        head_dim: int,
        value_heads: int | None = None,
        value_dim: int | None = None,
        layers: int = 1,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        value_heads = key_heads if value_heads is None else value_heads
        value_dim = head_dim if value_dim is None else value_dim
        sizes = {"pages": pages, "page_size": page_size, "layers": layers, "key_heads": key_heads}
        sizes |= {"head_dim": head_dim, "value_heads": value_heads, "value_dim": value_dim}
        for name, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise _error(f"{name} is {size!r}; it must be an int of 1 or more")
        dtype = dtype or torch.get_default_dtype()
        if dtype not in _DTYPES:
            raise _error(f"dtype is {dtype}; it must be one of {', '.join(map(str, _DTYPES))}")
        self._page_size = page_size
        pool = layers, pages, page_size
        self.key = torch.empty(*pool, key_heads, head_dim, dtype=dtype, device=device)
        self.value = torch.empty(*pool, value_heads, value_dim, dtype=dtype, device=device)
        self.key_scale = self.value_scale = None
        self._pools = [self.key, self.value]
        if dtype in MOST:
            self.key_scale, self.value_scale = (
                torch.empty(x.shape[:-1], device=device) for x in (self.key, self.value)
            )
            self._pools = [self.key, self.key_scale, self.value, self.value_scale]
        self._uses = [0] * pages  # for each page, how many sequences use it
        self._free = list(reversed(range(pages)))  # unused pages; the last is taken next
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0  # handles are never reused, so a freed one stays unknown
        self._copies: dict[str, _Copy] = {}  # the last copies, which other layers read too
        self._of_graphs: list[Tensor] = []  # copies that replays of CUDA graphs read

    def __repr__(self) -> str:
        layers, pages, page_size, heads, head_dim = self.key.shape
        return (
            f"PagedCache({pages} pages of {page_size} tokens, {self.free_pages} free; "
            f"{len(self._sequences)} sequences; layers={layers}, key_heads={heads}, "
            f"head_dim={head_dim}, {self.key.dtype}, {self.key.device})"
        )

    @property
    def free_pages(self) -> int:
        """The number of pages that no sequence uses."""
        return len(self._free)

    def add(self) -> int:
        """Returns the handle of a new sequence, which is empty and needs no page yet."""
        return self._new(_Sequence([], [0] * self.key.shape[0]))

    def fork(self, handle: int, length: int | None = None) -> int:
        """Returns the handle of a new sequence that shares the beginning of another sequence.

        The two sequences share the pages of that beginning, so the new sequence takes no free page.
        To remove tokens from the end of a sequence, fork the tokens to keep, and free the old
        sequence.

        Args:
            handle: the handle of the other sequence, which does not change.
            length: how many tokens the two sequences share; None is all.
        """
        pages, lengths = self._sequence("handle", handle)
        length = max(lengths) if length is None else length
        if not isinstance(length, int) or not 0 <= length <= max(lengths):
            raise _error(
                f"length is {length!r}; it must be an int from 0 to {max(lengths)}, the length of "
                f"sequence {handle}"
            )
        shared = pages[: -(-length // self._page_size)]
        for page in shared:
            self._uses[page] += 1
        return self._new(_Sequence(shared, [min(length, own) for own in lengths]))

    def free(self, handle: int) -> None:
        """Ends a sequence. Its pages become free, unless another sequence uses them."""
        pages = self._sequence("handle", handle).pages
        del self._sequences[handle]
        self._release(pages)

    def append(
        self, handles: Sequence[int], key: Tensor, value: Tensor, cu_seq: Tensor, *, layer: int = 0
    ) -> None:
        """Appends new keys and values to each sequence of a batch.

        If the free pages do not suffice, or an argument is wrong, the method raises an error and
        changes nothing.

        Args:
            handles: the handles of the N sequences, each once.
            key: ``[T, Hk, E]``, of the cache's dtype and device: the new keys of the first
                sequence, then the new keys of the next sequence, and so on. A cache of 8 bits takes
                float32, bfloat16 and float16, without NaN and infinities.
            value: ``[T, Hv, Ev]``, likewise.
            cu_seq: int32 or int64 ``[N + 1]``: 0, then the row after each sequence's new keys, as
                :func:`varlen_attn` takes it. A sequence may get no tokens. Rows after the last
                sequence are not stored. The CPU reads `cu_seq`, which synchronises if `cu_seq` is
                on a GPU. `cu_seq` may be on the CPU even if the cache is on a GPU.
            layer: the layer of these keys and values.
        """
        handles = list(handles)
        sequences = [self._sequence("handles", handle) for handle in handles]
        if len(set(handles)) < len(sequences):
            raise _error(f"handles is {handles}; each must be in it once")
        self._check_layer(layer)
        tokens = self._check_tokens(key, value)
        _check_starts("cu_seq", cu_seq, len(sequences))
        starts: list[int] = cu_seq.tolist()
        if starts[0] != 0 or [*starts, tokens] != sorted([*starts, tokens]):
            raise _error(
                f"cu_seq is {starts}; it must be from 0, none less than the one before, the last "
                f"at most {tokens}, the T of key"
            )

        new = [x.detach()[: starts[-1]] for x in (key, value)]
        if self.key.dtype in MOST:
            new = [part for x in new for part in quantize_kv(x, self.key.dtype)]
        # Plans the new tables before it changes the cache, so that an error leaves the cache
        # unchanged. New pages come from the end of `_free`. A sequence that appends to a shared
        # page leaves the page and takes a copy of it. `left` counts these sequences. If all other
        # sequences have left the page, the last one writes into the page itself. The loop plans the
        # longest sequence last. So the sequence that writes into the page itself is the longest one
        # on the page, and its new rows come after the rows of all other sequences there.
        left, copies, needed = Counter[int](), {}, 0
        tables = [[*pages] for pages, _ in sequences]
        slots: list[list[int]] = [[] for _ in sequences]  # for each token, its row of the pool
        for n in sorted(range(len(sequences)), key=lambda n: sequences[n].lengths[layer]):
            begin, table = sequences[n].lengths[layer], tables[n]
            end = begin + starts[n + 1] - starts[n]
            while begin < end:
                index, offset = divmod(begin, self._page_size)
                is_new = index == len(table)
                if is_new or self._uses[table[index]] - left[table[index]] > 1:
                    needed += 1
                    page = self._free[-needed] if needed <= len(self._free) else -1
                    if is_new:
                        table.append(page)
                    else:
                        left[table[index]] += 1
                        copies[page], table[index] = table[index], page
                first = table[index] * self._page_size + offset
                count = min(self._page_size - offset, end - begin)
                slots[n] += range(first, first + count)
                begin += count
        if needed > len(self._free):
            raise RuntimeError(
                f"torch_attn.PagedCache: {needed} pages are needed and {len(self._free)} are free; "
                "free sequences, append to fewer, or make a cache of more pages"
            )

        self._write(new, layer, copies, list(chain.from_iterable(slots)))
        taken = self._free[len(self._free) - needed :]
        del self._free[len(self._free) - needed :]
        for page in taken:
            self._uses[page] = 1
        self._release(left.elements())
        for n, (pages, lengths) in enumerate(sequences):
            pages[:] = tables[n]
            lengths[layer] += starts[n + 1] - starts[n]

    def lengths(self, handles: Sequence[int], *, layer: int = 0) -> list[int]:
        """Returns how many keys each of the sequences has in a layer."""
        self._check_layer(layer)
        return [self._sequence("handles", handle).lengths[layer] for handle in handles]

    def block_table(self, handles: Sequence[int], *, layer: int = 0) -> tuple[Tensor, Tensor]:
        """Returns where the sequences are stored, for :func:`varlen_attn` over a layer's pool.

        The tensors are valid until the next call that changes one of the sequences.

        Returns:
            `block_table`, int32 ``[N, most pages]``, -1 after the last page of a sequence, and
            `seqused_k`, int32 ``[N]``, both on the cache's device.
        """
        # Clones the tensors, because the caller may write into them.
        block_table, used = self._tables(handles, layer)
        return block_table.clone(), used.clone()

    def attend(
        self,
        query: Tensor,
        handles: Sequence[int],
        cu_seq_q: Tensor,
        *,
        layer: int = 0,
        max_q: int | None = None,
        **options: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Computes attention of new queries over all keys of their sequences, by `varlen_attn`.

        The last query of a sequence is at the position of its last key. Attention is causal unless
        `window_size` says otherwise. One call may combine whole prompts, chunks of prompts, single
        tokens and forks: `cu_seq_q` gives the number of queries of each sequence.

        Args:
            query: ``[T, Hq, E]``; Hk and Hv divide Hq.
            handles: the handles of the N sequences.
            cu_seq_q: int32 or int64 ``[N + 1]``: 0, then the row after each sequence's queries.
            layer: the layer whose keys and values the queries attend to.
            max_q: at least the largest number of queries of a sequence. If it is None, the cache
                reads this number from `cu_seq_q`, which synchronises with a GPU.
            options: the other options of :func:`varlen_attn`.

        Returns:
            ``[T, Hq, Ev]`` or, with `return_aux`, the pair that :func:`varlen_attn` returns.

        Raises:
            RuntimeError: as for :func:`varlen_attn`.
        """
        handles = list(handles)
        block_table, used = self._tables(handles, layer)
        _check_starts("cu_seq_q", cu_seq_q, len(handles))
        if max_q is None:
            max_q = int(cu_seq_q.diff().max()) if cu_seq_q.numel() > 1 else 0
        scales = {
            name: pool[layer]
            for name, pool in (("key_scale", self.key_scale), ("value_scale", self.value_scale))
            if pool is not None
        }
        attended: Tensor | tuple[Tensor, Tensor] = varlen_attn(
            query,
            self.key[layer],
            self.value[layer],
            cu_seq_q,
            None,
            max_q,
            max(self.lengths(handles, layer=layer), default=0),
            seqused_k=used,
            block_table=block_table,
            **{"window_size": (-1, 0), "enable_gqa": True, **scales, **options},
        )
        return attended

    def _tables(self, handles: Sequence[int], layer: int) -> tuple[Tensor, Tensor]:
        """Returns the same as :meth:`block_table`, in tensors that must not be changed."""
        handles = list(handles)
        lengths = self.lengths(handles, layer=layer)
        tables = [self._sequences[handle].pages for handle in handles]
        most = max(map(len, tables), default=0)
        padded = [table + [-1] * (most - len(table)) for table in tables]
        block_table = self._copied("tables", padded, torch.int32)
        return block_table.view(len(tables), most), self._copied("lengths", lengths, torch.int32)

    def _copied(self, name: str, numbers: list[Any], dtype: torch.dtype) -> Tensor:
        """Returns a tensor of numbers on the cache's device, without waiting for a GPU.

        Keeps the last tensor for each name, because most layers need the same numbers as the layer
        before.
        """
        device, kept = self.key.device, self._copies.get(name)
        on_cuda = device.type == "cuda"
        # A stream does not read the copy of another stream, because the work of two streams runs in
        # no fixed order. A graph may read any earlier copy, because a capture begins when all
        # streams are done.
        stream = torch.cuda.current_stream(device) if on_cuda else None
        capturing = on_cuda and torch.cuda.is_current_stream_capturing()
        if kept and kept.numbers == numbers and (capturing or kept.stream == stream):
            tensor = kept.tensor
        else:
            # The GPU copies pinned memory while Python goes on. Each call takes new pinned memory,
            # so that no write changes memory that is still being copied.
            host = torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=on_cuda)
            tensor = host.to(device, non_blocking=True)
            if capturing:  # a capture copies nothing; each replay does
                self._of_graphs.append(host)
            else:
                self._copies[name] = _Copy(numbers, stream, tensor)
        if capturing:
            self._of_graphs.append(tensor)
        return tensor

    def _new(self, sequence: _Sequence) -> int:
        self._sequences[self._next] = sequence
        self._next += 1
        return self._next - 1

    def _release(self, pages: Any) -> None:
        for page in pages:
            self._uses[page] -= 1
            if self._uses[page] == 0:
                self._free.append(page)

    def _write(
        self, new: list[Tensor], layer: int, copies: dict[int, int], slots: list[int]
    ) -> None:
        """Writes new numbers into each pool.

        Writes only into pages that are still free, and into rows that no sequence reads.
        """
        if copies:
            pages = [[*copies], [*copies.values()]]
            to, source = self._copied("pages", pages, torch.int64)
        rows = self._copied("rows", slots, torch.int64)
        for pool, numbers in zip(self._pools, new, strict=True):
            if numbers.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr():
                numbers = numbers.clone()  # because the cache writes into this part of the pool
            if copies:
                pool[:, to] = pool[:, source]
            pool[layer].flatten(0, 1)[rows] = numbers

    def _sequence(self, name: str, handle: int) -> _Sequence:
        if not isinstance(handle, int) or not 0 <= handle < self._next:
            raise _error(f"{name}: {handle!r} is no handle; it must be what add or fork returned")
        if handle not in self._sequences:
            raise _error(f"{name}: {handle} has been freed; it must be a sequence that is not")
        return self._sequences[handle]

    def _check_layer(self, layer: int) -> None:
        layers = self.key.shape[0]
        if not isinstance(layer, int) or not 0 <= layer < layers:
            raise _error(f"layer is {layer!r}; it must be an int from 0 to {layers - 1}")

    def _check_tokens(self, key: Tensor, value: Tensor) -> int:
        for name, new, pool in (("key", key, self.key), ("value", value, self.value)):
            if not isinstance(new, Tensor):
                raise TypeError(
                    f"torch_attn.PagedCache: {name} is a {type(new).__name__}; it must be a tensor"
                )
            if new.layout != torch.strided:
                raise _error(f"{name} has layout {new.layout}; it must be a dense (strided) tensor")
            expected = (*key.shape[:1], *pool.shape[3:])
            dtypes = _FLOATS[1:] if pool.dtype in MOST else (pool.dtype,)
            if (new.shape, new.device) != (expected, pool.device) or new.dtype not in dtypes:
                tokens = "T" if name == "key" else f"T = {key.shape[0]}"
                allowed = " or ".join(map(str, dtypes))
                raise _error(
                    f"{name} is {new.dtype} of shape {list(new.shape)} on {new.device}; it must be "
                    f"{allowed} of shape [{tokens}, {pool.shape[3]}, {pool.shape[4]}] on "
                    f"{pool.device}"
                )
        return key.shape[0]


def _check_starts(name: str, cu_seq: Tensor, sequences: int) -> None:
    if not isinstance(cu_seq, Tensor) or cu_seq.dtype not in (torch.int32, torch.int64):
        was = cu_seq.dtype if isinstance(cu_seq, Tensor) else f"a {type(cu_seq).__name__}"
        raise _error(f"{name} is {was}; it must be a tensor of int32 or int64")
    if cu_seq.shape != (sequences + 1,):
        raise _error(
            f"{name} has shape {list(cu_seq.shape)}; it must be [{sequences + 1}], one number more "
            "than handles"
        )


def _error(message: str) -> ValueError:
    return ValueError(f"torch_attn.PagedCache: {message}")
