"""Packed sequences: each has the bits of a call with it alone, and every derivative."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.nn.attention import varlen as of_torch
from torch.utils.flop_counter import FlopCounterMode

import torch_attn
from _memory import GuardedMemory, resident
from _packed import cu_seq, in_pages
from helpers import (
    DTYPES,
    INF,
    NAN,
    bits_promised,
    in_fresh_process,
    largest,
    of_inputs,
    threads_set_to,
    ulp,
)
from torch_attn import reference
from torch_attn.varlen import AuxRequest

LENGTHS = ([5, 0, 70, 1, 130, 3], [9, 3, 70, 0, 150, 3])
# What differs from a plain call: lengths, heads (Hq, Hk, Hv), sizes (E, Ev), and options.
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal, in groups": {"heads": (6, 3, 2), "window_size": (-1, 0)},
    "window": {"window_size": (20, 3), "sizes": (33, 20)},
    "decoding": {"lengths": ([1, 1, 1, 2], [3000, 64, 1, 700]), "heads": (4, 1, 1)},
    "keys in chunks": {"lengths": ([700, 3], [1500, 900]), "heads": (2, 1, 1)},
    "tokens of no sequence": {"beyond": 7, "window_size": (-1, 0)},
    "mask": {"mask": 4},
    "mask that heads share": {"mask": 1, "window_size": (9, 2)},
    "boolean mask": {"mask": 4, "kind": "bool"},
    "slopes, sinks and a cap": {"terms": ("alibi_slopes", "sinks"), "softcap": 3.0},
    "keys in use": {"seqused_k": [4, 0, 70, 0, 129, 2]},
    "offset": {"query_offset": [3, 0, -5, 2, 60, 0], "window_size": (-1, 0)},
    "longest": {"more": 50},
    "no sequence": {"lengths": ([], []), "beyond": 3},
}


class Call:
    """A case: its tensors, the call of all sequences, and the call of each one alone."""

    def __init__(self, case: str, dtype: torch.dtype, kernels: str = "") -> None:
        options = dict(CASES[case])
        if kernels == "cuda" and dtype.itemsize == 2:  # bits equal for heads of whole 16 bytes
            options.pop("sizes", None)
        self.queries, self.keys = options.pop("lengths", LENGTHS)
        heads, (E, Ev) = options.pop("heads", (4, 4, 4)), options.pop("sizes", (32, 24))
        beyond, more = options.pop("beyond", 0), options.pop("more", 0)
        T, S = sum(self.queries) + beyond, sum(self.keys) + beyond
        self.most = (max(self.queries, default=0) + more, max(self.keys, default=0) + more)
        shapes = {"query": (T, heads[0], E), "key": (S, heads[1], E), "value": (S, heads[2], Ev)}
        self.tensors = {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}
        for name in options.pop("terms", ()):
            self.tensors[name] = torch.rand(heads[0], dtype=dtype)
        mask, kind = options.pop("mask", 0), options.pop("kind", "float")
        if mask:
            numbers = torch.randn(mask, T, self.most[1], dtype=dtype)
            hidden = torch.rand(numbers.shape) < 0.2
            numbers = numbers.masked_fill(hidden, -INF)
            self.tensors["attn_mask"] = hidden if kind == "bool" else numbers
        self.integers = {n: options.pop(n) for n in ("seqused_k", "query_offset") if n in options}
        self.options = options
        if beyond:
            for name in shapes:
                self.tensors[name][-beyond:] = NAN

    def leaves(self) -> dict[str, Tensor]:
        return {n: t.requires_grad_() for n, t in self.tensors.items() if t.is_floating_point()}

    def packed(self) -> tuple[Tensor, Tensor]:
        options = {n: torch.tensor(t, dtype=torch.int64) for n, t in self.integers.items()}
        named = {**self.tensors, **options, **self.options, "enable_gqa": True}
        named |= {"cu_seq_q": cu_seq(self.queries), "cu_seq_k": cu_seq(self.keys).int()}
        named |= {"max_q": self.most[0], "max_k": self.most[1]}
        return torch_attn.varlen_attn(**named, return_aux=AuxRequest(lse=True))

    def each(self) -> list[tuple[Tensor, Tensor]]:
        """The results of each sequence, [L, Hq, Ev] and [Hq, L], by the dense operator."""
        results = []
        q, k = 0, 0
        for n, (L, S) in enumerate(zip(self.queries, self.keys, strict=True)):
            used = self.integers.get("seqused_k", self.keys)[n]
            rows, keys = slice(q, q + L), slice(k, k + used)
            own = {"query": rows, "key": keys, "value": keys}
            named = self.tensors | {n: self.tensors[n][own[n]].transpose(0, 1) for n in own}
            if "attn_mask" in named:
                named["attn_mask"] = named["attn_mask"][:, rows, :used]
            offset = self.integers.get("query_offset", [used - L] * (n + 1))[n]
            output, lse, _ = torch_attn.sdpa_with_logsumexp(
                **named, **self.options, enable_gqa=True, query_offset=offset
            )
            results.append((output.transpose(0, 1), lse))
            q, k = q + L, k + S
        return results


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_each_sequence(case: str, dtype: torch.dtype, kernels: str) -> None:
    """Outputs, logsumexps and gradients: recorded or not, and on any number of threads."""
    with bits_promised(kernels):
        compare_with_each(Call(case, dtype, kernels), dtype)


def compare_with_each(call: Call, dtype: torch.dtype) -> None:
    tokens = sum(call.queries)
    with torch.no_grad():
        with threads_set_to(1):
            output, lse = call.packed()
        each = call.each()
        if each:
            assert_equal(output[:tokens], torch.cat([o for o, _ in each]))
            assert_equal(lse[:, :tokens], torch.cat([r for _, r in each], -1))
        assert not output[tokens:].any()
        assert not lse[:, tokens:].any()
    leaves = call.leaves()
    with threads_set_to(5):
        output, lse = call.packed()
        of_output, of_lse = torch.randn_like(output), torch.randn_like(lse)
        actual = torch.autograd.grad([output, lse], leaves.values(), [of_output, of_lse])
    each = call.each()
    if not each:
        assert not any(g.any() for g in actual)
        return
    outputs = [torch.cat([o for o, _ in each]), torch.cat([r for _, r in each], -1)]
    grads = [of_output[:tokens], of_lse[:, :tokens]]
    expected = torch.autograd.grad(outputs, leaves.values(), grads)
    for name, one, other in zip(leaves, actual, expected, strict=True):
        if name in ("alibi_slopes", "sinks"):  # sums over all rows, in another order
            assert largest(one - other) <= tokens * ulp(largest(other), dtype), name
        else:
            assert_equal(one, other)


def packed_and_formula() -> tuple[Any, Any, list[Tensor]]:
    """A function of all inputs, the same one by the textbook, and inputs."""
    lengths, keys, used = [5, 0, 7, 1], [4, 3, 20, 0], [3, 0, 17, 0]
    beyond, heads, E, Ev = 2, 4, 3, 2
    T, S, most = sum(lengths) + beyond, sum(keys) + beyond, max(keys)
    options: dict[str, Any] = {"enable_gqa": True, "softcap": 2.0, "window_size": (12, 1)}

    def packed(query, key, value, mask, slopes, sinks):
        learned = {"attn_mask": mask, "alibi_slopes": slopes, "sinks": sinks}
        starts = cu_seq(lengths), cu_seq(keys), max(lengths), most
        output, lse, _ = torch.ops.attn.varlen_attention(
            *(query, key, value, *starts), seqused_k=torch.tensor(used), **learned, **options
        )
        return output, lse

    def formula(query, key, value, mask, slopes, sinks):
        outputs, lses = [], []
        q, k = 0, 0
        for L, S, length in zip(lengths, used, keys, strict=True):
            x = query[q : q + L], key[k : k + S], value[k : k + S]
            learned = {"attn_mask": mask[:, q : q + L, :S], "alibi_slopes": slopes, "sinks": sinks}
            output, lse, _ = reference.sdpa_with_logsumexp(
                *(t.movedim(1, 0) for t in x), query_offset=S - L, **learned, **options
            )
            outputs.append(output.movedim(0, 1))
            lses.append(lse)
            q, k = q + L, k + length
        outputs.append(query.new_zeros(beyond, heads, Ev))
        return torch.cat(outputs), torch.cat([*lses, query.new_zeros(heads, beyond)], -1)

    shapes = [(T, heads, E), (S, 2, E), (S, 2, Ev), (heads, T, most), (heads,), (heads,)]
    return packed, formula, [torch.rand(shape, dtype=torch.float64) for shape in shapes]


@pytest.mark.usefixtures("device")
def test_derivatives_up_to_the_third() -> None:
    packed, formula, inputs = packed_and_formula()
    leaves = [t.requires_grad_() for t in inputs]
    directions = [torch.randn_like(t) for t in leaves]
    upstream = [torch.randn_like(t) for t in formula(*leaves)]

    def derivatives(function: Any) -> list[Tensor]:
        results = list(function(*leaves))
        found = list(results)
        of = upstream
        for _ in range(3):
            results = list(torch.autograd.grad(results, leaves, of, create_graph=True))
            found += results
            of = directions
        tangents = jvp(function, tuple(t.detach() for t in leaves), tuple(directions))[1]
        return [*found, *tangents]

    for actual, expected in zip(derivatives(packed), derivatives(formula), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("mapped", range(6))
def test_vmap(mapped: int) -> None:
    """Maps one input at a time, with a gradient of all that are not mapped, too."""
    packed, _, inputs = packed_and_formula()
    several = torch.stack([inputs[mapped], 2 * inputs[mapped], inputs[mapped].flip(0)])

    def loss(*tensors: Tensor) -> Tensor:
        output, lse = packed(*tensors)
        return output.square().sum() + lse.sum()

    of_all = grad(loss, tuple(range(6)))
    in_dims = tuple(0 if i == mapped else None for i in range(6))
    given = [several if i == mapped else t for i, t in enumerate(inputs)]
    actual = vmap(of_all, in_dims)(*given)
    for n in range(3):
        expected = of_all(*[t[n] if i == mapped else t for i, t in enumerate(given)])
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one[n], other)
    # the mapped call inside of a gradient
    leaves = [t.clone().requires_grad_() for t in given]
    total = vmap(loss, in_dims)(*leaves).sum()
    for i, found in enumerate(torch.autograd.grad(total, leaves)):
        torch.testing.assert_close(found, actual[i] if i == mapped else actual[i].sum(0))


def test_what_vmap_cannot_map_is_refused_by_name() -> None:
    starts, tokens = torch.tensor([0, 2]), torch.randn(2, 2, 1, 8)
    pool, table = torch.randn(2, 4, 1, 8), torch.tensor([[1]])

    def packed(query: Tensor, cu_seq: Tensor) -> Tensor:
        return torch_attn.varlen_attn(query, query, query, cu_seq, cu_seq, 2, 2)

    def paged(query: Tensor, keys: Tensor) -> Tensor:
        more = {"seqused_k": torch.tensor([3]), "block_table": table}
        return torch_attn.varlen_attn(query, keys, keys, starts, None, 2, 4, **more)

    with pytest.raises(RuntimeError, match="cu_seq_q is mapped by vmap"):
        vmap(packed, (None, 0))(tokens[0], starts.expand(3, 2))
    for dims, call in (
        ((0, None), (tokens, pool)),
        ((None, 0), (tokens[0], pool.expand(3, -1, 4, 1, 8))),
    ):
        with pytest.raises(RuntimeError, match="nothing may have leading dimensions, which vmap"):
            vmap(paged, dims)(*call)
    pools = (pool.transpose(1, 2),) * 2
    packing = {"cu_seq_q": starts, "max_q": 2, "max_k": 4, "block_table": table}
    with pytest.raises(RuntimeError, match="nothing may have leading dimensions, which vmap"):
        torch.ops.attn.attention(
            tokens.transpose(1, 2), *pools, key_lengths=torch.tensor([3]), **packing
        )
    with pytest.raises(RuntimeError, match="cu_seq_q is None but cu_seq_k is given"):
        torch.ops.attn.attention(tokens, tokens, tokens, cu_seq_k=starts, max_k=2)


def test_signature_is_that_of_torch() -> None:
    """The same names, kinds and defaults, in the same order; more follow by name only."""
    names = [n for n in ("varlen_attn", "varlen_attn_out") if hasattr(of_torch, n)]
    assert len(names) > (torch.__version__ >= "2.12")  # torch 2.11 has the first alone
    for name in names:
        ours = inspect.signature(getattr(torch_attn, name)).parameters.values()
        theirs = inspect.signature(getattr(of_torch, name)).parameters.values()
        for own, other in zip(ours, theirs, strict=False):
            assert (own.name, own.kind, own.default) == (other.name, other.kind, other.default)
        assert len(ours) > len(theirs)
    assert AuxRequest._fields == of_torch.AuxRequest._fields
    assert AuxRequest() == of_torch.AuxRequest()


@pytest.mark.usefixtures("device")
def test_results_asked_for() -> None:
    given = arguments() | {"value": torch.randn(9, 2, 24), "window_size": (-1, 0)}
    output = torch_attn.varlen_attn(**given)
    requests = of_torch.AuxRequest(lse=True)
    both = torch_attn.varlen_attn(**given, return_aux=requests, num_splits=1)
    assert_equal(both[0], output)
    out = torch.full((output.shape[0], 2, *output.shape[1:]), NAN)[:, 1]
    assert torch_attn.varlen_attn_out(out, **given) is out
    assert_equal(out, output)
    found = torch_attn.varlen_attn_out(out.fill_(NAN), **given, return_aux=AuxRequest(lse=True))
    assert found[0] is out
    assert_equal(out, output)
    assert_equal(found[1], both[1])
    query = given.pop("query")
    leaf = query.clone().requires_grad_()
    assert not torch_attn.varlen_attn_out(out.clone(), leaf, **given).requires_grad
    into_out = lambda q: torch_attn.varlen_attn_out(out.clone(), q, **given)  # noqa: E731
    assert not torch.func.jvp(into_out, (query,), (torch.ones_like(query),))[1].any()
    with pytest.raises(RuntimeError, match=r"out is torch.float32 of shape \[3\]"):
        torch_attn.varlen_attn_out(torch.empty(3), query, **given)


def test_out_is_as_the_result() -> None:
    """The result may have other heads or another dtype than the query."""
    query, key = torch.randn(5, 1, 8), torch.randn(5, 2, 8)
    given = (query, key, key, cu_seq([5]), cu_seq([5]), 5, 5)
    out = torch.empty(5, 2, 8)
    assert torch_attn.varlen_attn_out(out, *given).equal(torch_attn.varlen_attn(*given))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(RuntimeError, match=r"out is torch.float32 .* must be torch.bfloat16"):
            torch_attn.varlen_attn_out(out, *given)
        out = out.bfloat16()
        assert torch_attn.varlen_attn_out(out, *given).equal(torch_attn.varlen_attn(*given))


def arguments() -> dict[str, Any]:
    """The arguments of a call that is right."""
    return {
        "query": torch.randn(8, 4, 16),
        "key": torch.randn(9, 2, 16),
        "value": torch.randn(9, 2, 16),
        "cu_seq_q": torch.tensor([0, 3, 8]),
        "cu_seq_k": torch.tensor([0, 5, 9]),
        "max_q": 5,
        "max_k": 5,
        "enable_gqa": True,
    }


def pages() -> dict[str, Any]:
    """The same with keys in pages."""
    return arguments() | {
        "key": torch.randn(5, 4, 2, 16),
        "value": torch.randn(5, 4, 2, 16),
        "cu_seq_k": None,
        "seqused_k": torch.tensor([5, 4]),
        "block_table": torch.tensor([[1, 0], [3, -1]], dtype=torch.int32),
    }


ERRORS = [
    ({"query": torch.randn(2, 8, 4, 16)}, r"query has shape \[2, 8, 4, 16\].*3 dimensions"),
    ({"key": torch.randn(9, 3, 16)}, "key has 3 heads but query has 4"),
    ({"cu_seq_q": torch.tensor([0, 3, 9])}, "cu_seq_q is 9 at entry 2.*not pass T_q = 8"),
    ({"cu_seq_q": torch.tensor([0, 5, 3])}, "cu_seq_q is 3 at entry 2, after 5"),
    ({"cu_seq_q": torch.tensor([1, 3, 8])}, "cu_seq_q begins with 1; it must begin with 0"),
    ({"cu_seq_q": torch.tensor([0.0, 3.0, 8.0])}, "cu_seq_q has dtype Float"),
    ({"cu_seq_q": torch.tensor([[0, 3, 8]])}, r"cu_seq_q has shape \[1, 3\].*\[N \+ 1\]"),
    ({"cu_seq_q": torch.tensor([], dtype=torch.int64)}, r"cu_seq_q has shape \[0\]"),
    ({"cu_seq_q": torch.tensor(8)}, r"cu_seq_q has shape \[\]"),
    ({"cu_seq_k": torch.tensor([0, 5])}, "cu_seq_k has 2 entries but cu_seq_q has 3"),
    ({"cu_seq_k": None}, "cu_seq_k is None"),
    ({"max_q": 4}, "max_q is 4, but sequence 1 of cu_seq_q has length 5"),
    ({"max_k": 3}, "max_k is 3, but sequence 0 of cu_seq_k has length 5"),
    ({"seqused_k": torch.tensor([6, 0])}, "seqused_k is 6 at entry 0.*between 0 and 5"),
    ({"seqused_k": torch.tensor(4)}, r"seqused_k has shape \[\].*one number a sequence"),
    ({"query_offset": torch.tensor([1, 2, 3])}, r"query_offset has shape \[3\]"),
    ({"attn_mask": torch.randn(4, 8, 9)}, r"attn_mask has shape \[4, 8, 9\].*\[4, 8, 5\]"),
    ({"attn_mask": torch.randn(8, 5)}, r"attn_mask has shape \[8, 5\]"),
    ({"sinks": torch.randn(2)}, "sinks has shape"),
    ({"window_size": (-2, 0)}, "window_size is"),
    ({"dropout_p": 2.0}, "dropout_p is 2"),
    ({"block_table": torch.tensor([[0], [1]])}, r"key has shape.*beside a block_table"),
]
PAGE_ERRORS = [
    ({"seqused_k": None}, "seqused_k is None"),
    ({"seqused_k": torch.tensor([5, 9])}, "seqused_k is 9 at entry 1.*between 0 and 5"),
    ({"seqused_k": torch.tensor([5, 5])}, r"block_table is -1 at \[1, 1\].*between 0 and 4"),
    ({"max_k": 20, "seqused_k": torch.tensor([9, 4])}, "room for 2 pages of 4 keys"),
    ({"block_table": torch.tensor([[1, 5], [3, -1]])}, r"block_table is 5 at \[0, 1\]"),
    ({"block_table": torch.tensor([[1, 2]])}, r"block_table has shape \[1, 2\]"),
    ({"block_table": torch.zeros(2, 2)}, "block_table has dtype Float"),
    ({"value": torch.randn(4, 4, 2, 16)}, "pools of as many pages"),
    ({"key": torch.randn(20, 2, 16)}, r"key has shape \[20, 2, 16\]; it must have 4"),
    ({"value": torch.randn(5, 3, 2, 16)}, "value has length 3 but key has 4"),
]


@pytest.mark.parametrize(("changes", "message"), ERRORS, ids=[m for _, m in ERRORS])
def test_errors(changes: dict[str, Any], message: str) -> None:
    torch_attn.varlen_attn(**arguments())
    for offset in ({}, {"query_offset": 1}):
        with pytest.raises(RuntimeError, match=f"attn::varlen_attention: .*{message}"):
            torch_attn.varlen_attn(**arguments() | offset | changes)


@pytest.mark.parametrize(("changes", "message"), PAGE_ERRORS, ids=[m for _, m in PAGE_ERRORS])
def test_errors_of_pages(changes: dict[str, Any], message: str) -> None:
    torch_attn.varlen_attn(**pages())
    with pytest.raises(RuntimeError, match=f"attn::varlen_attention: .*{message}"):
        torch_attn.varlen_attn(**pages() | changes)


def test_errors_in_python() -> None:
    with pytest.raises(ValueError, match="num_splits is -1"):
        torch_attn.varlen_attn(**arguments(), num_splits=-1)
    with pytest.raises(TypeError, match=r"query is a list"):
        torch_attn.varlen_attn(**arguments() | {"query": [1]})
    with pytest.raises(TypeError, match=r"cu_seq_q is a list"):
        torch_attn.varlen_attn(**arguments() | {"cu_seq_q": [0, 3, 8]}, query_offset=1)
    with pytest.raises(TypeError, match=r"return_aux is True; it must be None or a .*AuxRequest"):
        torch_attn.varlen_attn(**arguments(), return_aux=True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"out is a list"):
        torch_attn.varlen_attn_out([1], **arguments())  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="a derivative is asked for, but block_table is given"):
        torch_attn.varlen_attn(**pages() | {"query": torch.randn(8, 4, 16, requires_grad=True)})
    x = torch.randn(4, 8, 16), *(torch.randn(6, 4, 4, 16) for _ in range(2))
    saved = torch.empty(4, 8, 16), torch.empty(4, 8, 2), torch.empty(0, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="a derivative is asked for, but block_table is given"):
        torch.ops.attn._sdpa_backward(  # by hand: key's gradient would have room for one page
            *(saved[0], None, *saved, torch.empty(0), *x),
            cu_seq_q=torch.tensor([0, 8]),
            key_lengths=torch.tensor([8]),
            block_table=torch.tensor([[0, 1]]),
            max_q=8,
            max_k=8,
            grad_input_mask=of_inputs(True, True, True, rest=False),
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page", [1, 16, 50, 64, 128])
def test_pages_have_the_bits_of_keys_in_a_row(page: int, dtype: torch.dtype, kernels: str) -> None:
    """Decoding, a chunk of a prompt and a prompt in one call; also with options, and views.

    On a GPU, tensor cores compute what is in a row, and need not compute what is in pages.
    """
    # by a few roundings of the largest numbers to bfloat16
    apart_by = 2**-6 if kernels == "cuda" and dtype.itemsize == 2 else 0
    for lengths, keys, sizes, options in (
        ([1, 1, 70, 5, 0], [300, 65, 70, 128, 3], (64, 64), {"window_size": (-1, 0)}),
        ([1, 2], [1300, 700], (40, 24), {"softcap": 2.0, "window_size": (100, 0)}),
        ([3, 200], [3, 0], (33, 20), {}),
    ):
        query = torch.randn(sum(lengths), 4, sizes[0], dtype=dtype)
        key, value = (torch.randn(sum(keys), 2, size, dtype=dtype) for size in sizes)
        given = {"query": query, "cu_seq_q": cu_seq(lengths), "max_q": max(lengths)}
        given |= {"max_k": max(keys), "enable_gqa": True, **options}
        in_a_row = torch_attn.varlen_attn(
            **given, key=key, value=value, cu_seq_k=cu_seq(keys), return_aux=AuxRequest(True)
        )
        paged = in_pages({"key": key, "value": value}, keys, page)
        apart = paged["key"].movedim(2, 0).contiguous().movedim(0, 2)  # heads outermost
        columns = paged["value"].transpose(-1, -2).contiguous().transpose(-1, -2)
        for pools in ({}, {"key": apart, "value": columns}):
            found = torch_attn.varlen_attn(**given, **paged | pools, return_aux=AuxRequest(True))
            for one, other in zip(found, in_a_row, strict=True):
                torch.testing.assert_close(one, other, rtol=apart_by, atol=apart_by)


@pytest.mark.parametrize("at_end", [True, False])
def test_nothing_outside_is_read(at_end: bool) -> None:
    """Every tensor ends, or begins, at a page of memory that cannot be read."""

    def guarded(tensor: Tensor) -> Tensor:
        memory = GuardedMemory(tensor.numel() * tensor.element_size(), at_end)
        return memory.tensor(tensor)

    for dtype in (torch.float32, torch.bfloat16):
        call = Call("mask", dtype)
        for name, tensor in call.tensors.items():
            call.tensors[name] = guarded(tensor)
        leaves = call.leaves()
        output, lse = call.packed()
        torch.autograd.grad(output.sum() + lse.sum(), leaves.values())
        keys = [33, 64, 1]
        key, value = torch.randn(2, sum(keys), 2, 40, dtype=dtype)
        for page in (16, 64):
            paged = in_pages({"key": key, "value": value}, keys, page)
            last = paged["block_table"].max()
            for name in ("key", "value"):
                paged[name] = guarded(paged[name][: last + 1])
            query = guarded(torch.randn(5, 2, 40, dtype=dtype))
            torch_attn.varlen_attn(query, cu_seq_q=cu_seq([1, 3, 1]), max_q=3, max_k=64, **paged)


@pytest.mark.long
def test_many_sequences() -> None:
    """More than are planned at a time: the same bits as alone, and little memory for each."""
    in_fresh_process(call_with_many_sequences)


def call_with_many_sequences() -> None:
    lengths = [n % 4 for n in range(200_000)]
    starts, T = cu_seq(lengths), sum(lengths)
    inputs = [torch.randn(T, 1, 8, requires_grad=True) for _ in range(3)]
    before = resident("VmHWM")
    output = torch_attn.varlen_attn(*inputs, starts, starts, 3, 3)
    gradients = torch.autograd.grad(output.square().sum(), inputs)
    tensors = 20 * output.nbytes
    assert resident("VmHWM") - before < tensors + 100 * len(lengths)
    for n in (1023, 1025, 2050, 199_999):
        rows = slice(starts[n], starts[n + 1])
        alone = [t.detach()[rows].transpose(0, 1).requires_grad_() for t in inputs]
        expected = torch_attn.sdpa(*alone)
        assert_equal(output[rows].transpose(0, 1), expected)
        of_alone = torch.autograd.grad(expected.square().sum(), alone)
        for whole, own in zip(gradients, of_alone, strict=True):
            assert_equal(whole[rows].transpose(0, 1), own)


def test_compiled_for_lengths_that_change() -> None:
    """After torch's own second compile, which makes sizes dynamic, there is no other."""
    compiles = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiles.append(graph)
        return graph

    def step(query: Tensor, cu: Tensor, most: int) -> Tensor:
        return torch_attn.varlen_attn(query, query, query, cu, cu, most, most, window_size=(-1, 0))

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    for lengths in ([3, 4, 5], [10, 2, 7], [1, 30, 1], [5, 5, 5], [9, 0, 70]):
        query = torch.randn(sum(lengths), 2, 16, requires_grad=True)
        given = (query, cu_seq(lengths), max(lengths))
        output, expected = compiled(*given), step(*given)
        assert_equal(output, expected)
        pair = [torch.autograd.grad(o.sum(), query)[0] for o in (output, expected)]
        assert_equal(*pair)
    assert len(compiles) <= 2


def test_opcheck() -> None:
    given = arguments()
    for name in ("query", "key", "value"):
        given[name].requires_grad_()
    torch.library.opcheck(torch.ops.attn.varlen_attention.default, (), given)
    given = pages()
    torch.library.opcheck(torch.ops.attn.varlen_attention.default, (), given)
    q, k, v = (arguments()[n].transpose(0, 1).requires_grad_() for n in ("query", "key", "value"))
    packing = {n: arguments()[n] for n in ("cu_seq_q", "cu_seq_k", "max_q", "max_k", "enable_gqa")}
    torch.library.opcheck(torch.ops.attn.attention.default, (q, k, v), packing)
    packing["with_rows"] = False
    torch.library.opcheck(torch.ops.attn.attention.default, (q, k, v), packing)


def test_rows_that_are_not_wanted_are_left_out() -> None:
    """They are empty, and the output has the same bits: by itself, with derivatives, under vmap."""
    given = arguments()
    inputs = [given.pop(name) for name in ("query", "key", "value")]
    plain = {"softcap": 2.0, "enable_gqa": True}
    dense = [t.transpose(0, 1) for t in inputs]
    calls = [
        (torch.ops.attn.varlen_attention, inputs, given),
        (torch.ops.attn.attention, dense, plain),
        (torch.ops.attn.flex_attention, dense, {"enable_gqa": True}),
    ]
    for operator, tensors, options in calls:
        results = []
        for with_rows in (True, False):
            call = functools.partial(operator, **options, with_rows=with_rows)
            x = [t.clone().requires_grad_() for t in tensors]
            output, *rows = call(*x)
            assert [row.shape != (0,) for row in rows] == [with_rows] * 2
            alone, *rows = call(*tensors)
            assert [row.shape != (0,) for row in rows] == [with_rows] * 2
            samples = [torch.stack([t, 2 * t]) for t in tensors]
            of_output = lambda *x, call=call: call(*x)[0]  # noqa: E731
            mapped = vmap(of_output)(*samples)
            _, tangent = jvp(of_output, tuple(tensors), tuple(tensors))
            results.append([output, alone, mapped, tangent, *torch.autograd.grad(output.sum(), x)])
        for one, other in zip(*results, strict=True):
            assert_equal(one, other)


@pytest.mark.usefixtures("device")
def test_dropout() -> None:
    """Drawn from the default generator; other numbers in every sequence; gradients of the same."""
    heads, T, N = 2, 64, 3
    query = torch.zeros(N * T, heads, 8)
    value = torch.eye(T)[:, None].expand(T, heads, T).repeat(N, 1, 1).requires_grad_()
    cu = torch.arange(N + 1) * T

    def draw(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return torch_attn.varlen_attn(query, query, value, cu, cu, T, T, dropout_p=0.25)

    weights = draw(0)
    assert_equal(draw(0), weights)
    kept = (weights != 0).view(N, T, heads, T)
    assert 0.72 < kept.double().mean() < 0.78
    torch.testing.assert_close(weights[weights != 0], torch.tensor(1 / T / 0.75).expand(kept.sum()))
    assert not torch.equal(kept[0], kept[1])
    assert not torch.equal(kept[:, :, 0], kept[:, :, 1])
    (found,) = torch.autograd.grad(weights.sum(), value)
    expected = weights.view(N, T, heads, T).sum(1).transpose(1, 2).reshape(N * T, heads, 1)
    torch.testing.assert_close(found, expected.expand_as(found))


def test_flops() -> None:
    """Sequences of the same length count as the dense call; pages are no more heads."""
    query, key, value = torch.randn(3, 12, 4, 16)
    starts = torch.arange(4) * 4
    window = {"window_size": (2, 0)}

    def count(call: Any) -> int:
        with FlopCounterMode(display=False) as counter:
            call()
        return counter.get_total_flops()

    given = (query, key, value, starts, starts, 4, 4)
    packed = count(lambda: torch_attn.varlen_attn(*given, **window))
    dense = [t.view(3, 4, 4, 16).transpose(1, 2) for t in (query, key, value)]
    assert packed == count(lambda: torch_attn.sdpa(*dense, **window)) > 0
    paged = count(lambda: torch_attn.varlen_attn(**pages()))
    assert paged == 2 * 2 * 4 * 5 * 4 * 2 * 16


@pytest.mark.regression
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query_offset": 1.5}, TypeError, "query_offset is 1.5; it must be an int or a tensor"),
        ({"query_offset": "a"}, TypeError, "query_offset is 'a'; it must be an int or a tensor"),
        ({"query_offset": [1]}, TypeError, r"query_offset is \[1\]; it must be an int or a tensor"),
        ({"query_offset": True}, TypeError, "query_offset is True; it must be an int or a tensor"),
        ({"query_offset": 2**63}, RuntimeError, "query_offset is 9223372036854775808; it must be"),
        ({"query_offset": -(2**62)}, RuntimeError, "query_offset is -4611686018427387904.*between"),
        ({"window_size": (2**63, 0)}, RuntimeError, "window_size is 9223372036854775808; it must"),
        ({"window_size": (True, 0)}, TypeError, "window_size is True; it must be an int"),
        ({"window_size": (0.5, 0)}, TypeError, "window_size is 0.5; it must be an int"),
        ({"max_q": 2**63}, RuntimeError, "max_q is 9223372036854775808; it must be"),
        ({"max_k": 1.0}, TypeError, "max_k is 1.0; it must be an int"),
        ({"max_q": -1, "cu_seq_q": torch.tensor([0])}, RuntimeError, "max_q is -1; it must be the"),
        ({"max_k": -1, "cu_seq_k": torch.tensor([0])}, RuntimeError, "max_k is -1; it must be the"),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_whole_numbers_are_named(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Whatever is no number, or one that nothing holds."""
    with pytest.raises(error, match=message):
        torch_attn.varlen_attn(**arguments() | changes)


@pytest.mark.regression
def test_starts_beside_a_block_table_are_starts() -> None:
    """They name no rows there, and are checked all the same."""
    given = pages()
    expected = torch_attn.varlen_attn(**given)
    starts = given["cu_seq_q"]
    assert_equal(torch_attn.varlen_attn(**given | {"cu_seq_k": starts}), expected)
    for wrong, message in (
        (starts.float(), "cu_seq_k has dtype Float"),
        (starts[:-1], "cu_seq_k has .* entries but cu_seq_q"),
        (starts.flip(0), "cu_seq_k begins with"),
    ):
        with pytest.raises(RuntimeError, match=f"attn::varlen_attention: {message}"):
            torch_attn.varlen_attn(**given | {"cu_seq_k": wrong})


@pytest.mark.regression
@pytest.mark.parametrize("name", ["query", "value", "cu_seq_q", "cu_seq_k", "attn_mask"])
def test_sparse_tensors_are_named(name: str) -> None:
    given = arguments() | {"attn_mask": torch.zeros(1, arguments()["query"].shape[0], 99)}
    given[name] = given[name].to_sparse()
    with pytest.raises(RuntimeError, match=f"attn::varlen_attention: {name} has layout Sparse"):
        torch_attn.varlen_attn(**given)
    with pytest.raises(RuntimeError, match="attn::varlen_attention: block_table has layout Sparse"):
        torch_attn.varlen_attn(**pages() | {"block_table": pages()["block_table"].to_sparse()})
