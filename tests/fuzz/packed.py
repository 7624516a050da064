"""Packed sequences, keys in pages and texts in chunks, held to the bits of the dense operator.

One index in `EVERY` has such a problem, beside drawing.py's. Its oracle is torch_attn itself, given
every sequence alone, which the problems of drawing.py hold to the textbook.
"""

from __future__ import annotations

import dataclasses
import random
import traceback
from collections.abc import Iterator
from typing import Any

import torch

from . import check as check_module
from .check import Failure, apply_settings
from .drawing import EDGES, MODES
from .options import length, offset, softcap, weighted, window
from .problem import (
    DTYPES,
    EIGHT,
    MASKS,
    OF_SCALES,
    ON_CUDA,
    SINKS,
    SLOPES,
    VALUES,
    Problem,
)

EVERY = 5  # one index in five has such a problem, too; odd, for all processes
# The cost of a problem, in multiplications, that one in twenty exceeds by a factor of ten.
COSTS = {"cpu": 2_000_000, "cuda": 50_000, "gpu": 5_000_000, "amx": 400_000}

# What is said of a problem beside its numbers and tensors.
SEQUENCES = """
def starts(lengths):
    return [0, *itertools.accumulate(lengths)]
def rows(n):  # the queries of sequence n, and its keys in use
    first, second = starts(queries)[n], starts(keys)[n]
    return slice(first, first + queries[n]), slice(second, second + used[n])
def part(name, a, n):  # what belongs to sequence n, as sdpa has it
    q, k = rows(n)
    if a is None or name.endswith(("alibi_slopes", "sinks")):
        return a
    if name.endswith(("attn_mask", "logsumexp")):
        return a[:, q, : used[n]] if name.endswith("attn_mask") else a[:, q]
    return a[k if "key" in name or "value" in name else q].transpose(0, 1)
def packed(query, key, value, cu_seq_q, cu_seq_k, **more):
    aux = torch_attn.varlen.AuxRequest(lse=True)
    cu_seq_q, cu_seq_k = (a if a is None else torch.tensor(starts(a), dtype=integer)
                          for a in (cu_seq_q, cu_seq_k))
    return torch_attn.varlen_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, return_aux=aux, **more)
def assert_same(name, actual, expected, any_zero=False):
    any_zero |= ON_CUDA  # a GPU computes 0 * scale for a sequence without keys
    same = (actual == expected) & (any_zero | (actual.signbit() == expected.signbit()))
    differ = (~(same | actual.isnan() & expected.isnan())).sum().item()
    print(name, "numbers that differ:", differ)
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, name
    assert differ == 0, f"{name}: {differ} of {actual.numel()} numbers differ"
"""
READ = """
of_query, of_key = torch.zeros(tokens_q, dtype=torch.bool), torch.zeros(tokens_k, dtype=torch.bool)
of_mask = torch.zeros(tokens_q, max_k, dtype=torch.bool)
for n in range(len(queries)):
    of_query[rows(n)[0]] = of_key[rows(n)[1]] = True
    of_mask[rows(n)[0], : used[n]] = True
"""
TABLE = """
counts = [-(-length // page) for length in used]
order = torch.randperm(sum(counts) + 2)
table = torch.full((len(counts), max([*counts, 0]) + 1), -1, dtype=integer)
of_key = torch.zeros(len(order), page, dtype=torch.bool)
for n, first in enumerate(starts(counts)[:-1]):
    table[n, : counts[n]] = order[first : first + counts[n]]
    if n in shared:  # the first pages of a sequence before it
        both = min(counts[n], counts[shared[n]])
        table[n, :both] = table[shared[n], :both]
    in_use = torch.arange(counts[n] * page).reshape(-1, page) < used[n]
    of_key[table[n, : counts[n]].long()] |= in_use
def gathered(pool):
    lines = [pool[table[n, : counts[n]].long()].flatten(0, 1)[: used[n]] for n in range(len(used))]
    spoil = SPOIL if pool.dtype.itemsize > 1 else 99
    beyond = pool.new_full((tokens_k - sum(used), *pool.shape[2:]), spoil)
    return torch.cat([*lines, beyond])
"""
ALONE = """
def check_alone(solve, x, more):
    actual = solve(packed, x, *more, **options, **numbers)
    expected = {n: torch.zeros_like(a) for n, a in actual.items()}  # of tokens of no sequence
    sums = [n for n in actual if n.endswith(("alibi_slopes", "sinks"))]
    terms = {n: [] for n in sums}
    for n in range(len(queries)):
        own = [{name: part(name, a, n) for name, a in tensors.items()} for tensors in (x, *more)]
        of_n = {"query_offset": offsets[n], **({"key_lengths": used[n]} if ON_CUDA else {})}
        if x["attn_mask"] is not None and used[n] == 1 < max_k:
            # The gradient of a mask of one column is computed otherwise: there is a second one.
            dims, of_n["key_lengths"] = {"key": 1, "value": 1, "attn_mask": -1}, 1
            dims |= {"key_scale": 1, "value_scale": 1}
            own = [{name: torch.cat([a, a], dims[name]) if name in dims else a
                    for name, a in tensors.items()} for tensors in own]
        alone = solve(torch_attn.sdpa_with_logsumexp, *own, **options, **of_n)
        for name in actual:
            if name in sums:
                terms[name].append(alone[name].double())
            else:
                place = part(name, expected[name], n)
                place.copy_(alone[name][tuple(map(slice, place.shape))])
    for name in actual:
        if name not in sums:
            assert_same(name, actual[name], expected[name])
        elif name.startswith("grad"):  # a sum over rows in another order
            eps, sum_of, (u, *_) = torch.finfo(actual[name].dtype).eps, terms[name], more
            sizes = sum(a.abs() for a in sum_of) if sum_of else torch.zeros(())
            far = [abs(o) + length + used[n]
                   for n, (o, length) in enumerate(zip(offsets, queries))]
            far = max([*far, 1]) if name == "grad_alibi_slopes" else 1
            values = max([*x["value"].double().abs().nan_to_num(0, 0).flatten().tolist(), 0])
            ends = sum((a[of_query] * 2 * values if n == "output" else a[:, of_query] * 2)
                       .double().abs().sum() for n, a in u.items())
            error = (actual[name].double() - sum(sum_of)).abs()
            assert not (error > 4 * eps * sizes + 2**-20 * far * ends).any(), f"{name}: {error}"
"""
PAGED = """
def check_pages():
    output, logsumexp = packed(**x, **options, **numbers)
    pools = {**x, **pool_of}
    numbers_of_pages = {**numbers, "cu_seq_k": None, "seqused_k": torch.tensor(used, dtype=integer)}
    paged = packed(**pools, **options, **numbers_of_pages, block_table=table)
    assert_same("output from pages", paged[0], output)
    assert_same("logsumexp from pages", paged[1], logsumexp)
"""
CHUNKS = """
def check_chunks():
    own = {name: part(name, a, cut) for name, a in x.items()}
    names_of_keys = [name for name in x if "key" in name or "value" in name]
    # 8 bits have -0, which the 0 of a hidden key turns into 0
    any_zero = any("scale" in name for name in x)
    def of_keys(x, **more):
        lengths = {"key_lengths": x["key"].size(1)} if ON_CUDA else {}
        return torch_attn.sdpa_with_logsumexp(**x, **options, **more, **lengths)
    whole = of_keys(own, query_offset=offsets[cut])
    right = options["window_size"][1]
    parts, seen = list(itertools.pairwise(cuts)), []
    for first, last in parts:
        keys_seen = offsets[cut] + last + right if right >= 0 else used[cut]
        seen.append(max(0, min(keys_seen, used[cut])))
        chunk = {**own, "query": own["query"][:, first:last]}
        if own["attn_mask"] is not None:
            chunk["attn_mask"] = own["attn_mask"][:, first:last, : seen[-1]]
        chunk |= {name: own[name][:, : seen[-1]] for name in names_of_keys}
        is_graded = first % 2 == 1 and not any_zero  # 8 bits have no derivatives
        chunk["query"] = chunk["query"].detach().requires_grad_(is_graded)
        found = of_keys(chunk, query_offset=offsets[cut] + first)
        for name, a, b in zip(("output", "logsumexp"), found, whole):
            assert_same(f"{name} of chunk {first}:{last}", a, b[:, first:last], any_zero)
    ahead = {**own, "query": own["query"].transpose(0, 1)}
    for name in names_of_keys:
        ahead[name] = torch.cat([own[name].transpose(0, 1)[:k] for k in (*seen, 0)])
    if own["attn_mask"] is not None:
        unseen = own["attn_mask"].new_zeros((*own["attn_mask"].shape[:-1], max_k - used[cut]))
        ahead["attn_mask"] = torch.cat([own["attn_mask"], unseen], -1)
    at = torch.tensor([offsets[cut] + first for first, _ in parts])
    lengths = [last - first for first, last in parts]
    found = packed(**ahead, **options, cu_seq_q=lengths, cu_seq_k=seen, query_offset=at)
    assert_same("output of packed chunks", found[0].transpose(0, 1), whole[0], any_zero)
    assert_same("logsumexp of packed chunks", found[1], whole[1])
"""


@dataclasses.dataclass(frozen=True)
class Packed:
    """One call and what is asked of it."""

    seed: int
    mode: str
    dtype: str
    queries: tuple[int, ...]  # of each sequence
    keys: tuple[int, ...]
    heads: tuple[int, int, int]  # Hq, Hk, Hv
    dims: tuple[int, int]  # E, Ev
    values: str = "normal"
    eight: tuple[tuple[str, str, str], ...] = ()  # what has 8 bits, its kind, its scales' kind
    used: tuple[int, ...] | None = None  # None: all keys
    offset: int | tuple[int, ...] | None = None
    more: tuple[int, int, int, int] = (0, 0, 0, 0)  # tokens of no sequence; max_q and max_k, too
    integer: str = "int64"
    layouts: dict[str, int] = dataclasses.field(default_factory=dict)
    wanted: tuple[str, ...] = ()
    graded: tuple[str, ...] = ("output",)
    scale: float | None = None
    softcap: float = 0.0
    window: tuple[int, int] = (-1, -1)
    tables: dict[str, str] = dataclasses.field(default_factory=dict)  # mask, slopes, sinks: kinds
    dtypes: dict[str, str] = dataclasses.field(default_factory=dict)  # of these, not the query's
    mask_heads: int = 1
    spoil: str = "nan"  # what is in memory that no call may read
    page: int = 0  # 0: no pages
    shared: tuple[tuple[int, int], ...] = ()  # sequences with the first pages of one before them
    interleaved: bool = False  # keys and values in one pool
    cut: int = -1  # the sequence that is also given in chunks
    cuts: tuple[int, ...] = ()  # where these begin, and its end
    invariant: bool = False
    threads: int = 1
    precision: str = "highest"

    @property
    def in_use(self) -> tuple[int, ...]:
        return self.keys if self.used is None else self.used

    @property
    def kinds(self) -> list[str]:
        """What the table counts it as."""
        kinds = ["packed", *(["pages"] if self.page else []), *(["chunks"] if self.cuts else [])]
        return [*kinds, *([self.mode] if self.mode != "forward" else [])]

    @property
    def like(self) -> Problem:
        """Whose functions serve here, too."""
        # forward mode takes nothing that is expanded
        return Problem(
            self.seed, "jvp", self.dtype, {"S": 0}, {}, {}, self.layouts, wanted=self.wanted,
            graded=self.graded, rows=True, precision=self.precision,
        )  # fmt: skip

    def capabilities(self, all_of_them: list[str]) -> list[str]:
        return self.like.capabilities(all_of_them)

    # --- the program ------------------------------------------------------------------------------

    def setup(self) -> list[str]:
        """Lines that make the numbers of the sequences, the tensors and the options."""
        tokens = sum(self.queries) + self.more[0], sum(self.keys) + self.more[1]
        most = [
            max([*n, 0]) + m for n, m in zip((self.queries, self.keys), self.more[2:], strict=True)
        ]
        default = [k - q for q, k in zip(self.queries, self.in_use, strict=True)]
        offsets = default if self.offset is None else self.offset
        if isinstance(offsets, int):
            offsets = [offsets] * len(self.queries)
        options = {"window_size": self.window, "softcap": self.softcap, "scale": self.scale}
        options["enable_gqa"] = set(self.heads) > {self.heads[0]}
        numbers = ["'cu_seq_q': queries", "'cu_seq_k': keys"]
        if self.used is not None:
            numbers.append("'seqused_k': torch.tensor(used, dtype=integer)")
        if isinstance(self.offset, int):
            numbers.append(f"'query_offset': {self.offset}")
        elif self.offset is not None:
            wide = any(abs(n) >= 2**31 for n in self.offset)
            of_type = "torch.int64" if wide else "integer"
            numbers.append(f"'query_offset': torch.tensor(offsets, dtype={of_type})")
        (Hq, Hk, Hv), (E, Ev) = self.heads, self.dims
        spoil = f".masked_fill(~{{}}, {self.spoil})"
        of_query, of_key = (spoil.format(f"of_{n}[..., None, None]") for n in ("query", "key"))
        of_mask = spoil.format("of_mask")

        def tensor(name: str, shape: tuple[int, ...], read: str, dtype: str = "dtype") -> str:
            return self.like._placed(f"({VALUES[self.values]}){read}", shape, dtype, name)

        lines = [
            f"torch.manual_seed({self.seed})",
            f"dtype, integer = torch.{self.dtype}, torch.{self.integer}",
            f"queries, keys, used = {[*self.queries]}, {[*self.keys]}, {[*self.in_use]}",
            f"offsets = {[*offsets]}",
            f"(tokens_q, tokens_k), (max_q, max_k) = {tokens}, {tuple(most)}",
            f"options = {options}",
            f"numbers = {{{', '.join(numbers)}}}",
            *READ.strip().splitlines(),
            f"x = {{'query': {tensor('query', (tokens[0], Hq, E), of_query)}}}",
        ]
        if self.page:
            pages = sum(-(-n // self.page) for n in self.in_use) + 2
            lines += [f"page, shared, SPOIL = {self.page}, {dict(self.shared)}, {self.spoil}"]
            lines += TABLE.strip().splitlines()
        in_rows = (pages, self.page) if self.page else (tokens[1],)
        of_keys = {
            name: tensor(name, (*in_rows, heads, dim), of_key)
            for name, heads, dim in (("key", Hk, E), ("value", Hv, Ev))
        }
        for name, kind, of_scales in self.eight:
            heads, dim = (Hk, E) if name == "key" else (Hv, Ev)
            shape = (*in_rows, heads, dim)
            of_keys[name] = self.like._placed(EIGHT[kind], shape, f"torch.{kind}", name)
            values = f"({OF_SCALES[of_scales]})" + spoil.format("of_key[..., None]")
            name = f"{name}_scale"
            of_keys[name] = self.like._placed(values, shape[:-1], "torch.float32", name)
        lines += ["pool_of = {}"] if self.page else []
        for name, text in of_keys.items():
            if not self.page:
                lines.append(f"x[{name!r}] = {text}")
                continue
            if self.interleaved:
                if name == "key":
                    shape = (*in_rows, max(Hk, Hv), E + Ev)
                    lines.append(f"pool = torch.full({shape}, {self.spoil}, dtype=dtype)")
                heads, columns = (Hk, f":{E}") if name == "key" else (Hv, f"{E}:")
                text = f"pool[:, :, :{heads}, {columns}].copy_({text})"
            lines.append(f"pool_of[{name!r}] = {text}")
            lines.append(f"x[{name!r}] = gathered(pool_of[{name!r}])")
        lines.append("x['attn_mask'] = None")
        for name, table in (("attn_mask", MASKS), ("alibi_slopes", SLOPES), ("sinks", SINKS)):
            if name not in self.tables:
                continue
            kind, dtype = self.tables[name], f"torch.{self.dtypes.get(name, self.dtype)}"
            shape = (self.mask_heads, tokens[0], most[1]) if name == "attn_mask" else (Hq,)
            values = f"({table[kind]})" + (of_mask if name == "attn_mask" else "")
            if kind in ("bool", "rare"):
                values, dtype = table[kind], "torch.bool"
            lines.append(f"x[{name!r}] = {self.like._placed(values, shape, dtype, name)}")
        if self.mode != "forward":
            lines.append("u = {}")
            shapes = {"output": (tokens[0], Hq, Ev), "logsumexp": (Hq, tokens[0])}
            for name in self.graded:
                dtype = "dtype" if name == "output" else str(self.like.dtype_of_rows)
                read = of_query if name == "output" else spoil.format("of_query")
                lines.append(f"u[{name!r}] = {tensor('u', shapes[name], read, dtype)}")
        if self.mode not in ("forward", "backward"):
            lines.append("t = {n: torch.randn_like(x[n], memory_format=torch.contiguous_format) "
                         f"for n in {[*self.wanted]}}}")  # fmt: skip
            of_key = spoil.format("of_tokens[:, None, None]")
            lines += ["of_tokens = ~x['key'].isnan().any(-1).any(-1)"] if self.page else [
                "of_tokens = of_key"]  # fmt: skip
            read = {"query": of_query, "key": of_key, "value": of_key, "attn_mask": of_mask}
            lines += [f"t[{n!r}] = t[{n!r}]{read[n]}" for n in self.wanted if n in read]
        return lines

    def settings(self, capability: str) -> list[str]:
        return dataclasses.replace(self.like, threads=self.threads).settings(capability)

    def program(self, capability: str, ending: list[str]) -> str:
        """The whole program, which runs by itself."""
        given = {"forward": "", "backward": "u"}.get(self.mode, "u, t")
        solves = self.like.solve("forward", "solve_forward")
        calls = ["check_alone(solve_forward, x, [])"]
        functions = ALONE
        if self.mode != "forward":
            solves += self.like.solve(self.mode)
            calls.append(f"check_alone(solve, x, [{given}])")
        if self.page:
            functions += PAGED
            calls.append("check_pages()")
        calls = [f"{'    ' if self.invariant else ''}{call}" for call in calls]
        if self.invariant:
            calls.insert(0, "with torch_attn.invariant():")
        if self.cuts:
            functions += CHUNKS
            calls += [f"cut, cuts = {self.cut}, {[*self.cuts]}"]
            calls += ["with torch_attn.invariant():", "    check_chunks()"]
        lines = [
            *("import itertools", "", "import torch", "", "import torch_attn"),
            *("import torch_attn.varlen", "from math import inf, nan", ""),
            *solves,
            *SEQUENCES.strip().splitlines(),
            *functions.strip().splitlines(),
            "",
            *self.settings(capability),
            # Which takes other kernels for 16 bits where lengths and rows of no 16 bytes meet.
            f"ON_CUDA = {capability in ON_CUDA}",
            *self.setup(),
            *calls,
        ]
        return "\n".join([*lines, *ending]) + "\n"


def draw(seed: int, index: int, device: str = "cpu") -> Packed:
    """Problem `index`, from nothing else."""
    rng = random.Random(f"{seed} {index} {device} packed")
    mode = weighted(rng, MODES)
    on_tiles = {"float32": 5, "bfloat16": 30, "float16": 20}  # float32 where it may be rounded
    dtype = weighted(rng, on_tiles if device == "amx" else DTYPES)
    count = rng.choice((0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 8, 12))
    queries = [length_of(rng) for _ in range(count)]
    same = rng.random() < 0.3  # as many keys
    keys = [n if same else length_of(rng) for n in queries]
    if count and device == "cpu" and rng.random() < 0.08:  # keys of a query are cut among tasks
        at = rng.randrange(count)
        queries[at], keys[at] = rng.randint(1, 9), rng.randint(256, 4200)
    Hq = rng.choice((1, 1, 2, 3, 4, 6, 8))
    divisors = [n for n in range(1, Hq + 1) if Hq % n == 0]
    heads = (Hq, *(rng.choice(divisors) if rng.random() < 0.5 else Hq for _ in range(2)))
    dims = [rng.choice((1, 7, 8, 16, 20, 32, 33, 64, 64, 72, 128, 130)) for _ in range(2)]
    dims = dims if rng.random() < 0.5 else dims[:1] * 2
    Hq, Hk, Hv = keep_small(rng, queries, keys, heads, dims, COSTS[device])

    page = 0
    if rng.random() < 0.4:
        page = rng.choice((16, 64, 128)) if rng.random() < 0.6 else rng.randint(1, 200)
    used = None
    if rng.random() < 0.4 and not page:  # of pages all keys are in use
        drawn = [length(rng, n) for n in keys]
        used = [k if isinstance(k, int) else n for k, n in zip(drawn, keys, strict=True)]
    far, at = rng.random() < 0.1, []
    for q, k in zip(queries, used or keys, strict=True):
        drawn = offset(rng, q, k, any_size=far)
        at.append(drawn if isinstance(drawn, int) else k - q)
    offsets: Any = None
    if rng.random() < 0.35:
        offsets = tuple(at) if rng.random() < 0.7 else rng.choice([*at, 0])
    pair = window(rng, max([*keys, 0])) if rng.random() < 0.3 else (-1, -1)
    pair = (pair[0], 0) if rng.random() < 0.4 else pair

    tables, dtypes = {}, {}
    for name, table in (("attn_mask", MASKS), ("alibi_slopes", SLOPES), ("sinks", SINKS)):
        if rng.random() < 0.2:
            tables[name] = rng.choice([*table])
            if dtype in ("bfloat16", "float16") and rng.random() < 0.4:
                dtypes[name] = "float32"
    wanted: tuple[str, ...] = ()
    if mode != "forward":
        floating = ["query", "key", "value", *(n for n in tables if tables[n] not in BOOLEAN)]
        wanted = tuple(n for n in floating if rng.random() < 0.75) or (rng.choice(floating),)
    graded = weighted(rng, {("output",): 3, ("output", "logsumexp"): 5, ("logsumexp",): 2})
    graded = (*(("output",) if "value" in wanted and "output" not in graded else ()), *graded)

    cut, cuts = -1, (0,)
    whole = [n for n, length in enumerate(queries) if length > 1]
    if whole and not far and rng.random() < 0.25:  # positions of chunks are farther
        cut = rng.choice(whole)
        inner = rng.sample(range(1, queries[cut]), rng.randint(1, min(4, queries[cut] - 1)))
        cuts = (0, *sorted(inner), queries[cut])
        pair = (pair[0], rng.choice((0, 0, 0, pair[1])))
    shared = [(n, rng.randrange(n)) for n in range(1, len(queries)) if rng.random() < 0.4]
    layouts = {n: rng.randrange(2**31) for n in (*tables, "query", "key", "value", "u")
               if rng.random() < 0.35}  # fmt: skip
    if device in ON_CUDA and dtype in ("bfloat16", "float16"):
        layouts = {}  # rows of packed sequences that begin anywhere: tensor cores do not take them
    eight: list[tuple[str, str, str]] = []
    if mode == "forward" and dtype != "float64" and rng.random() < 0.3:
        eight = [(n, rng.choice([*EIGHT]), rng.choice([*OF_SCALES, "normal"]))
                 for n in ("key", "value") if rng.random() < 0.7]  # fmt: skip
    if device in ON_CUDA and len(eight) == 2:  # rows that tensor cores take
        dims = [-(-n // 16) * 16 for n in dims]
    scale = rng.choice((0.0, 1.0, -0.37, 0.1, 2.5, 12.0)) if rng.random() < 0.2 else None
    precision = "highest"
    if dtype == "float32" and (device == "amx" or rng.random() < 0.15):
        precision = rng.choice(("medium", "medium", "high"))
    return Packed(
        seed=rng.randrange(2**31), mode=mode, dtype=dtype, queries=tuple(queries),
        keys=tuple(keys), heads=(Hq, Hk, Hv), dims=(dims[0], dims[1]),
        values=weighted(rng, {"normal": 80, "large": 8, "spread": 6, "integers": 4, "tiny": 2}),
        eight=tuple(eight),
        used=None if used is None else tuple(used), offset=offsets,
        more=tuple(rng.choice((0, 0, 1, 5, 70)) for _ in range(4)),
        integer=rng.choice(("int32", "int64")), layouts=layouts, wanted=wanted,
        graded=graded if mode != "forward" else ("output",), scale=scale,
        softcap=softcap(rng) if rng.random() < 0.2 else 0.0, window=pair, tables=tables,
        dtypes=dtypes, mask_heads=rng.choice((1, Hq)), spoil=rng.choice(("nan", "nan", "inf")),
        page=page, shared=tuple(shared) if page and rng.random() < 0.6 else (),
        interleaved=bool(page) and not eight and rng.random() < 0.3,
        cut=cut, cuts=cuts if cut >= 0 else (),
        invariant=device in ON_CUDA or rng.random() < 0.15,
        threads=rng.choices([1, 2, 3], [8, 1, 1])[0], precision=precision,
    )  # fmt: skip


BOOLEAN = ("bool", "rare")  # kinds of masks


def shrunk(failure: Failure, seconds: float = 30) -> Failure:
    """As simple a problem as is found that fails, too, on the same instruction set."""
    return check_module.shrunk(failure, seconds, check, smaller)


def length_of(rng: random.Random) -> int:
    """Draws the length of a sequence."""
    choices: dict[str, Any] = {"0": [0], "1": [1], "few": range(2, 21), "edge": EDGES,
                               "any": range(301)}  # fmt: skip
    return rng.choice(choices[weighted(rng, {"0": 10, "1": 15, "few": 40, "edge": 25, "any": 10})])


def keep_small(
    rng: random.Random, queries: list[int], keys: list[int], heads: Any, dims: list[int], limit: int
) -> Any:
    """Draws sizes again, smaller, until the problem costs no more than the limit; the heads."""
    limit *= 10 if rng.random() < 0.05 else 1

    def cost() -> int:
        pairs = sum((q + 4) * (k + 4) for q, k in zip(queries, keys, strict=True))
        return heads[0] * pairs * (sum(dims) + 40)

    while cost() > limit:
        kind = rng.choice(("heads", "dims", "queries", "keys", "keys", "queries"))
        if kind == "heads":
            heads = (1, 1, 1) if heads[0] < 3 else (2, rng.choice((1, 2)), rng.choice((1, 2)))
        else:
            sizes = {"dims": dims, "queries": queries, "keys": keys}[kind]
            largest = sizes.index(max(sizes))
            sizes[largest] = min(sizes[largest], rng.choice((1, 2, 5, 16, 17, 33)))
    return heads


def check(problem: Packed, capabilities: list[str]) -> tuple[Failure | None, None]:
    """Checks on each of the instruction sets; returns the first failure, if any."""
    try:
        for capability in capabilities:
            failure = Failure(problem, capability, "")
            apply_settings(problem, capability)
            try:
                exec(failure.program(), {"print": lambda *_: None})
            except AssertionError as error:
                return dataclasses.replace(failure, what=str(error)), None
            except Exception:
                what = traceback.format_exc(limit=-2)
                return dataclasses.replace(failure, what=what, raises=True), None
        return None, None
    finally:
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision("highest")


def smaller(problem: Packed) -> Iterator[Packed]:
    """Simpler problems, the most simple first."""

    def but(**changes: Any) -> Packed:
        return dataclasses.replace(problem, **changes)

    plain = Packed(0, "forward", problem.dtype, (), (), (1, 1, 1), (1, 1))
    if problem.mode != "forward":
        yield but(mode="forward", wanted=(), graded=("output",))
    if problem.mode not in ("forward", "backward"):
        yield but(mode="backward")
    if problem.cuts:
        yield but(cut=-1, cuts=())
        for i in range(1, len(problem.cuts) - 1):
            yield but(cuts=problem.cuts[:i] + problem.cuts[i + 1 :])
    for n in range(len(problem.queries)):
        yield without(problem, n)
    fields = ("eight", "page", "used", "offset", "more", "layouts", "scale", "softcap", "window",
              "values", "shared", "interleaved", "invariant", "threads", "precision", "integer",
              "heads", "dtypes")  # fmt: skip
    for name in fields:
        if getattr(problem, name) != getattr(plain, name):
            heads = {"mask_heads": 1} if name == "heads" else {}
            yield but(**{name: getattr(plain, name)}, **heads)
    for name in problem.tables:
        rest = tuple(n for n in problem.wanted if n != name)
        if rest or not problem.wanted:
            tables = {n: kind for n, kind in problem.tables.items() if n != name}
            yield but(tables=tables, wanted=rest)
    for name in problem.wanted if len(problem.wanted) > 1 else ():
        yield but(wanted=tuple(n for n in problem.wanted if n != name))
    for name in ("dims", "queries", "keys"):
        sizes = getattr(problem, name)
        for i, n in enumerate(sizes):
            for m in sorted({1, n // 2, n - 16, n - 1}):
                if 0 < m < n and not (name == "queries" and i == problem.cut):
                    changed = (*sizes[:i], m, *sizes[i + 1 :])
                    used = problem.used
                    if name == "keys" and used is not None:
                        used = tuple(min(a, b) for a, b in zip(used, changed, strict=True))
                    yield but(**{name: changed}, used=used)


def without(problem: Packed, n: int) -> Packed:
    """Without sequence n."""

    def rest(numbers: Any) -> Any:
        return numbers[:n] + numbers[n + 1 :] if isinstance(numbers, tuple) else numbers

    cut = {"cut": -1, "cuts": ()} if n == problem.cut else {"cut": problem.cut - (n < problem.cut)}
    shared = tuple((a - (a > n), b - (b > n)) for a, b in problem.shared if n not in (a, b))
    return dataclasses.replace(
        problem, queries=rest(problem.queries), keys=rest(problem.keys), used=rest(problem.used),
        offset=rest(problem.offset), shared=shared, **(cut if problem.cuts else {}),
    )  # fmt: skip
