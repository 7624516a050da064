"""Tensor subclasses: each is right or an error that says what to do."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import create_block_mask

import torch_attn
from _memory import LargestAllocation
from helpers import Inputs, make_inputs
from torch_attn import reference

pytestmark = [
    pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs"),
    pytest.mark.filterwarnings("ignore:.*MaskedTensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]

Calls = dict[str, Callable[..., Any]]


def calls_of(function: str, operator: str) -> Calls:
    packet = getattr(torch.ops.attn, operator)
    return {
        f"torch_attn.{function}": getattr(torch_attn, function),
        f"torch.ops.attn.{operator}": packet,
        f"torch.ops.attn.{operator}.default": packet.default,
    }


OUTPUT = calls_of("sdpa", "sdpa")
WITH_WEIGHTS = calls_of("sdpa_with_weights", "sdpa_with_weights")
WITH_ROWS = calls_of("sdpa_with_logsumexp", "attention")
ALL = OUTPUT | WITH_WEIGHTS | WITH_ROWS
VARIANTS = {"upper left": causal_upper_left, "lower right": causal_lower_right}
LENGTHS = list(itertools.product((0, 1, 2, 5, 67), (0, 1, 3, 5, 130)))


def textbook(call: str) -> Callable[..., Any]:
    """The textbook version of a call."""
    if call in WITH_ROWS:
        return reference.sdpa_with_logsumexp
    return reference.sdpa_with_weights if call in WITH_WEIGHTS else reference.sdpa


def make_bias(variant: str, L: int, S: int) -> CausalBias:
    """A bias with NaNs in the memory that no call is to read."""
    bias = VARIANTS[variant](L, S)
    with torch._C.DisableTorchFunctionSubclass():
        return bias.fill_(math.nan)


def make(variant: str, L: int, S: int, **options: Any) -> tuple[Inputs, Tensor]:
    """Inputs with a CausalBias, and the boolean mask that it stands for."""
    bias = make_bias(variant, L, S)
    offset = S - L if variant == "lower right" else 0
    mask = torch.ones(L, S, dtype=torch.bool).tril(offset)
    return make_inputs(L, S, 8, 6, **options)._replace(attn_mask=bias), mask


# --- CausalBias -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("call", ALL)
def test_causal_bias(call: str, variant: str) -> None:
    options = {"scale": 0.3, "enable_gqa": True}
    for L, S in LENGTHS:
        inputs, mask = make(variant, L, S, heads=(4, 2, 1))
        expected = textbook(call)(*inputs[:3], mask, **options)
        at = f"{L} x {S}: "
        torch.testing.assert_close(ALL[call](*inputs, **options), expected, msg=at.__add__)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("L", "S"), [(5, 7), (7, 7), (9, 4), (67, 130)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_causal_bias_beside_options(variant: str, L: int, S: int) -> None:
    """Positions are the bias's, for the window and for ALiBi too."""
    inputs, mask = make(variant, L, S)
    options = {
        "softcap": 2.0,
        "window_size": (2, 1),
        "key_lengths": torch.tensor([S, S - 1]),
        "alibi_slopes": torch.rand(3),
        "sinks": torch.randn(3),
    }
    told = {**options, "query_offset": S - L if variant == "lower right" else 0}
    for call in (torch_attn.sdpa, torch_attn.sdpa_with_weights, torch_attn.sdpa_with_logsumexp):
        expected = getattr(reference, call.__name__)(*inputs[:3], mask, **told)
        torch.testing.assert_close(call(*inputs, **options), expected)
    expected = reference.sdpa_stats(*inputs[:2], mask, **told)
    actual = torch_attn.sdpa_stats(*inputs[:2], inputs.attn_mask, **options)
    torch.testing.assert_close(tuple(actual), expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_causal_bias_as_the_builtin_reads_it(variant: str) -> None:
    for L, S in ((3, 5), (5, 5), (1, 4), (5, 3)):
        inputs, _ = make(variant, L, S)
        expected = F.scaled_dot_product_attention(*inputs)
        torch.testing.assert_close(torch_attn.sdpa(*inputs), expected)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("variant", VARIANTS)
def test_derivatives_with_a_causal_bias(variant: str) -> None:
    inputs, mask = make(variant, 5, 7, dtype=torch.float64)

    def derivatives(sdpa: Callable[..., Tensor], attn_mask: Tensor) -> Any:
        def gradients(*x: Tensor) -> Any:
            return grad(lambda *y: sdpa(*y, attn_mask).sin().sum(), (0, 1, 2))(*x)

        second = grad(lambda *x: sum(g.square().sum() for g in gradients(*x)), (0, 1, 2))
        return gradients(*inputs[:3]), second(*inputs[:3])

    actual = derivatives(torch_attn.sdpa, inputs.attn_mask)
    torch.testing.assert_close(actual, derivatives(reference.sdpa, mask))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("variant", VARIANTS)
def test_memory_of_a_causal_bias(variant: str) -> None:
    """No mask of L x S elements is made of it."""
    L, S = 512, 640
    inputs, _ = make(variant, L, S, batch=(), heads=1)
    leaves = [t.requires_grad_() for t in inputs[:3]]
    with LargestAllocation() as largest:
        torch_attn.sdpa(*leaves, inputs.attn_mask).sum().backward()
    assert 0 < largest.elements < L * S // 2


@pytest.mark.usefixtures("device")
def test_layout_with_a_causal_bias() -> None:
    """The output has the query's layout, as always."""
    inputs, _ = make("lower right", 5, 7)
    query = inputs.query.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch_attn.sdpa(query, *inputs[1:]).transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("sdpa", ALL.values(), ids=ALL)
def test_errors_with_a_causal_bias(sdpa: Callable[..., Any]) -> None:
    inputs, _ = make("lower right", 5, 7)
    with pytest.raises(ValueError, match=r"is_causal is True and attn_mask a CausalBias.*one of"):
        sdpa(*inputs, is_causal=True)
    for variant in VARIANTS:
        for L, S in ((5, 8), (4, 7), (8, 8), (1, 7)):
            message = rf"CausalBias of {L} queries and {S} keys, but query is \[2, 3, 5, 8\]"
            with pytest.raises(RuntimeError, match=message):
                sdpa(*inputs[:3], make_bias(variant, L, S))
    with pytest.raises(RuntimeError, match=r"CausalBias of 5 queries .* query is \[8\]"):
        sdpa(inputs.query[0, 0, 0], *inputs[1:])
    with pytest.raises(TypeError, match="value is a CausalBias, which only attn_mask may be"):
        sdpa(*inputs[:2], inputs.attn_mask)


@pytest.mark.parametrize("call", ["torch_attn.sdpa", *WITH_WEIGHTS, *WITH_ROWS])
def test_a_causal_bias_beside_an_offset(call: str) -> None:
    """Both would say where the queries stand."""
    for variant in VARIANTS:
        inputs, _ = make(variant, 5, 7)
        offset = torch.tensor(2)
        with pytest.raises(ValueError, match=r"attn::\w+: query_offset is given and attn_mask a C"):
            ALL[call](*inputs, query_offset=offset)
        with pytest.raises(TypeError, match="sinks is a CausalBias"):
            ALL[call](*inputs, sinks=inputs.attn_mask)
        query, key, _, bias = inputs
        with pytest.raises(ValueError, match="attn::sdpa_stats: query_offset is given"):
            torch_attn.sdpa_stats(query, key, bias, query_offset=offset)


@pytest.mark.parametrize("op", [torch.ops.attn.sdpa, torch.ops.attn.attention.default], ids=str)
def test_arguments_beside_a_causal_bias_are_those_of_the_operator(op: Callable[..., Any]) -> None:
    inputs, _ = make("upper left", 5, 7)
    with pytest.raises(ValueError, match="longer"):
        op(*inputs, 0.0, False, 0.3)  # the scale is given by name
    with pytest.raises(TypeError, match="query"):
        op(*inputs, query=inputs.query)
    with pytest.raises(TypeError, match="query"):
        op(key=inputs.key, value=inputs.value, attn_mask=inputs.attn_mask)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("call", ALL)
def test_causal_bias_compiled(call: str, variant: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(ALL[call], fullgraph=True, backend="aot_eager")
    for L, S in ((5, 7), (9, 9), (9, 4), (1, 4)):
        inputs, _ = make(variant, L, S)
        torch.testing.assert_close(compiled(*inputs), ALL[call](*inputs))
    torch.compiler.reset()


def test_causal_bias_made_in_a_compiled_function() -> None:
    """PyTorch cannot trace the making; the rest is compiled around it."""

    def function(*x: Tensor) -> Tensor:
        return torch_attn.sdpa(*x, causal_lower_right(5, 7)) + 1

    inputs, mask = make("lower right", 5, 7)
    compiled = torch.compile(function, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs[:3]), reference.sdpa(*inputs[:3], mask) + 1)
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of the check of the lengths
@pytest.mark.parametrize("variant", VARIANTS)
def test_causal_bias_in_programs(variant: str) -> None:
    """Mapped, traced and exported."""
    inputs, mask = make(variant, 5, 7)
    expected = reference.sdpa(*inputs[:3], mask)
    torch.testing.assert_close(vmap(torch_attn.sdpa, (0, 0, 0, None))(*inputs), expected)

    class Attends(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return torch_attn.sdpa(query, key, value, inputs.attn_mask)

    traced = torch.jit.trace(Attends(), inputs[:3], check_trace=False)
    torch.testing.assert_close(traced(*inputs[:3]), expected)
    exported = torch.export.export(Attends(), inputs[:3])
    torch.testing.assert_close(exported.module()(*inputs[:3]), expected)


@pytest.mark.long
@pytest.mark.parametrize("first", ["torch_attn", "torch.nn.attention.bias"])
def test_causal_bias_imported_before_or_after(first: str) -> None:
    code = f"""
import {first}, torch, torch_attn, sys
assert ("torch.nn.attention.bias" in sys.modules) == ({first!r} != "torch_attn")
import torch.nn.attention.bias as bias
x = torch.randn(2, 5, 8)
expected = torch.ops.attn.sdpa(x, x, x, is_causal=True)
assert torch.ops.attn.sdpa(x, x, x, bias.causal_upper_left(5, 5)).equal(expected)
expected = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
y = torch.nn.functional.scaled_dot_product_attention(x, x, x, bias.causal_upper_left(5, 5))
assert y.equal(expected)
"""
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], check=True)


def test_other_functions_of_a_causal_bias() -> None:
    bias = causal_lower_right(2, 3)
    assert torch.Tensor.size(bias) == (2, 2, 3)
    assert str(bias) == str(torch.ones(2, 3, dtype=torch.bool).tril(1))


# --- others ---------------------------------------------------------------------------------------


class Plain(Tensor):
    """Overrides nothing."""


class Wrapper(Tensor):
    """Holds another tensor and does with it what is done to the wrapper."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            dtype=inner.dtype,
            device=inner.device,
            requires_grad=inner.requires_grad,
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner.detach()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        unwrap = lambda t: t.inner if isinstance(t, Wrapper) else t  # noqa: E731
        args, kwargs = torch.utils._pytree.tree_map(unwrap, (args, kwargs or {}))
        wrap = lambda t: Wrapper(t) if isinstance(t, Tensor) else t  # noqa: E731
        return torch.utils._pytree.tree_map(wrap, function(*args, **kwargs))


# A subclass made of a tensor, and the type that the output has.
WORKING: dict[str, tuple[Callable[[Tensor], Tensor], type]] = {
    "Parameter": (torch.nn.Parameter, Tensor),
    "Buffer": (torch.nn.Buffer, Tensor),
    "without overrides": (lambda t: t.detach().as_subclass(Plain).requires_grad_(), Plain),
    "wrapper": (lambda t: Wrapper(t.detach().requires_grad_()), Wrapper),
}


@pytest.mark.parametrize("call", ALL)
@pytest.mark.parametrize("which", WORKING)
def test_subclasses_that_work(which: str, call: str) -> None:
    wrap, type_of_output = WORKING[which]
    inputs = make_inputs(5, 7, mask=(5, 7))
    expected = reference.sdpa(*inputs)
    for wrapped in (inputs.map(wrap), inputs._replace(attn_mask=wrap(inputs.attn_mask))):
        output = ALL[call](*wrapped)
        output = output if call in OUTPUT else output[0]
        assert type(output) is type_of_output
        plain = output.inner if isinstance(output, Wrapper) else output.as_subclass(Tensor)
        torch.testing.assert_close(plain, expected)
        if wrapped.attn_mask.requires_grad:
            output.sum().backward()
            assert wrapped.attn_mask.grad.shape == (5, 7)


@pytest.mark.parametrize("sdpa", ALL.values(), ids=ALL)
def test_subclasses_that_are_refused(sdpa: Callable[..., Any]) -> None:
    inputs = make_inputs(5, 7, mask=(5, 7))
    masked = torch.masked.masked_tensor(inputs.attn_mask, inputs.attn_mask > 0)
    with pytest.raises(TypeError, match="MaskedTensor"):
        sdpa(*inputs[:3], masked)
    with pytest.raises(ValueError, match=r"uninitialized parameter in attn\.\w+"):
        sdpa(torch.nn.UninitializedParameter(), *inputs[1:])
    block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 5, 7, device="cpu")
    message = (
        "attn_mask.* a torch.*BlockMask.*flex_attention|argument 'attn_mask' but .* 'BlockMask'"
    )
    with pytest.raises((TypeError, RuntimeError), match=message):
        sdpa(*inputs[:3], block_mask)


# --- nested tensors -------------------------------------------------------------------------------

QUERIES, KEYS = (4, 1, 0, 67), (3, 70, 2, 64)
# Keyword arguments of attention, of a batch or of one sequence of it.
JAGGED: dict[str, Callable[[slice | int], dict[str, Any]]] = {
    "plain": lambda i: {},
    "causal": lambda i: {"is_causal": True},
    "scores": lambda i: {"softcap": 1.5, "scale": 0.4, "window_size": (5, 2)},
    "heads": lambda i: {"sinks": torch.arange(4.0) - 1, "alibi_slopes": torch.arange(4.0) / 9},
    "sequences": lambda i: {
        "query_offset": torch.tensor([0, 60, 5, 3])[i],
        "key_lengths": torch.tensor([3, 65, 0, 61])[i],
        "is_causal": True,
    },
}


def jagged(lengths: tuple[int, ...], *sizes: int, gaps: bool = False) -> Tensor:
    """[B, H, j, E] as a view of [B, j, H, E], or [B, j, E]; between sequences there may be NaNs."""
    offsets = torch.nn.functional.pad(torch.tensor(lengths) + gaps, (1, 0)).cumsum(0)
    values = torch.randn(int(offsets[-1]) + gaps, *sizes)
    if gaps:
        offsets = offsets + 1
        values[offsets - 1] = math.nan
    nested = torch.nested.nested_tensor_from_jagged(
        values, offsets, torch.tensor(lengths) if gaps else None
    )
    nested = nested.detach().requires_grad_()
    return nested.transpose(1, 2) if len(sizes) == 2 else nested


def dense(nested: Tensor, i: int) -> Tensor:
    """Sequence i as a leaf of its own, laid out as within the nested tensor."""
    start, r = int(nested.offsets()[i]), nested._ragged_idx - 1
    length = (nested.offsets().diff() if nested.lengths() is None else nested.lengths())[i]
    return nested._values.narrow(r, start, int(length)).detach().clone().requires_grad_()


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("gaps", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("options", JAGGED)
def test_jagged_tensors_are_sequences_by_themselves(options: str, gaps: tuple[bool, bool]) -> None:
    """Bit by bit, in all results and gradients; tokens between sequences are not read."""
    query = jagged(QUERIES, 4, 8, gaps=gaps[0])
    key, value = (jagged(KEYS, 2, n, gaps=gaps[1]) for n in (8, 6))
    call = {"enable_gqa": True, **JAGGED[options](slice(None))}
    results = torch_attn.sdpa_with_logsumexp(query, key, value, **call)
    alone = torch_attn.sdpa(query, key, value, **call).values()
    assert alone.nan_to_num().equal(results[0].values().nan_to_num())
    assert results[0].shape == (*query.shape[:-1], 6)
    assert results[1].shape == results[2].shape == query.shape[:-1]
    leaves = query, key, value
    loss = (results[0] * results[0]).values().sum() + results[1].values().nan_to_num(0, 0, 0).sum()
    gradients = torch.autograd.grad(loss, leaves)
    for i in range(len(QUERIES)):
        alone = [dense(tensor, i) for tensor in leaves]
        one = {"enable_gqa": True, **JAGGED[options](i)}
        expected = torch_attn.sdpa_with_logsumexp(*alone, **one)
        for tensor, other in zip(results, expected, strict=True):
            assert dense(tensor, i).equal(other)
        loss = expected[0].square().sum() + expected[1].nan_to_num(0, 0, 0).sum()
        for tensor, other in zip(gradients, torch.autograd.grad(loss, alone), strict=True):
            assert dense(tensor, i).equal(other)


@pytest.mark.usefixtures("device")
def test_jagged_tensors_as_the_builtin_takes_them() -> None:
    query, key, value = (jagged(n, 2, 8) for n in (QUERIES, KEYS, KEYS))
    key, value = (  # with the offsets of one tensor, as projections of it have them
        torch.nested.nested_tensor_from_jagged(torch.randn(sum(KEYS), 2, 8), key.offsets())
        .requires_grad_()
        .transpose(1, 2)
        for _ in range(2)
    )
    results = []
    for sdpa in (torch_attn.sdpa, F.scaled_dot_product_attention):
        output = sdpa(query, key, value)
        gradients = torch.autograd.grad(output.values().sin().sum(), (query, key, value))
        results.append([tensor.values() for tensor in (output, *gradients)])
    torch.testing.assert_close(*results)


def test_jagged_tensors_without_heads() -> None:
    query, key, value = (jagged(n, 8) for n in (QUERIES, KEYS, KEYS))
    output, logsumexp, _ = torch_attn.sdpa_with_logsumexp(query, key, value, is_causal=True)
    assert output.shape == query.shape
    assert logsumexp.shape == query.shape[:-1]
    for i in range(len(QUERIES)):
        alone = (dense(tensor, i) for tensor in (query, key, value))
        assert dense(output, i).equal(torch_attn.sdpa(*alone, is_causal=True))


@pytest.mark.usefixtures("device")
def test_memory_of_jagged_tensors() -> None:
    """Neither padding nor scores."""
    query, key, value = (jagged((1500, 1, 1, 1), 1, 8) for _ in range(3))
    with LargestAllocation() as largest:
        torch_attn.sdpa(query, key, value, is_causal=True).values().sum().backward()
    assert 0 < largest.elements < 4 * 1500 * 8


@pytest.mark.usefixtures("switched_off")
def test_jagged_tensors_while_the_builtin_is_replaced() -> None:
    query = jagged(QUERIES, 2, 8)
    expected = torch_attn.sdpa(query, query, query, is_causal=True)
    with torch_attn.replacing_sdpa() as handle:
        output = F.scaled_dot_product_attention(query, query, query, is_causal=True)
        with pytest.raises(ValueError, match="Masks are not yet supported"):  # the built-in's
            F.scaled_dot_product_attention(query, query, query, torch.ones(4, 4) > 0)
    assert output.values().equal(expected.values())
    assert (handle.calls, handle.passed_on) == (1, 1)
    with pytest.raises(RuntimeError, match="No viable backend"):
        F.scaled_dot_product_attention(query, query, query, is_causal=True)


def test_jagged_tensors_compiled() -> None:
    torch.compiler.reset()
    query = jagged(QUERIES, 2, 8)
    compiled = torch.compile(
        lambda x: torch_attn.sdpa(x, x, x, is_causal=True), fullgraph=True, backend="aot_eager"
    )
    results = []
    for sdpa in (compiled, lambda x: torch_attn.sdpa(x, x, x, is_causal=True)):
        output = sdpa(query)
        (gradient,) = torch.autograd.grad(output.values().sin().sum(), query)
        results.append((output.values(), gradient.values()))
    assert all(map(torch.equal, *results))
    torch.compiler.reset()


@pytest.mark.parametrize("call", ["torch_attn.sdpa", "torch.ops.attn.attention"])
def test_jagged_tensors_that_do_not_fit(call: str) -> None:
    query, key, value = (jagged(n, 2, 8) for n in (QUERIES, KEYS, KEYS))
    sdpa = ALL[call]
    with pytest.raises(RuntimeError, match=r"attn::\w+: query is a nested tensor; query, key and"):
        sdpa(query, key, torch.randn(4, 2, 9, 8))
    with pytest.raises(RuntimeError, match=r"attn_mask is given beside .* torch_attn\.varlen_attn"):
        sdpa(query, key, value, torch.randn(9, 9))
    with pytest.raises(RuntimeError, match=r"attn_mask is given beside"):
        sdpa(query, key, value, causal_upper_left(9, 9))
    with pytest.raises(RuntimeError, match=r"query is .* \[4, j\d+, 2, 8\].*transpose"):
        sdpa(*(tensor.transpose(1, 2) for tensor in (query, key, value)))
    with pytest.raises(RuntimeError, match=r"value is a nested tensor \[4, j\d+, 8\]"):
        sdpa(query, key, jagged(KEYS, 8))
    with pytest.raises(RuntimeError, match="key and value are nested tensors of different lengths"):
        sdpa(query, key, query)
    for name, shape in (("query_offset", (4, 1)), ("key_lengths", (3,))):
        message = rf"{name} has shape .* beside nested tensors; it must be \[\] or \[B\], 4 numbers"
        with pytest.raises(RuntimeError, match=message):
            sdpa(query, key, value, **{name: torch.ones(shape, dtype=torch.int64)})
    with pytest.raises(RuntimeError, match="key is a nested tensor of 2 sequences; it must be of"):
        sdpa(query, *(jagged(KEYS[:2], 2, 8),) * 2)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("sdpa", ALL.values(), ids=ALL)
def test_a_nested_tensor_among_dense_ones_is_named(sdpa: Callable[..., Any], mode: Any) -> None:
    """The message says which argument is nested, and what to do."""
    x = torch.randn(3, 2, 5, 8)
    with mode():
        parts = [x[0, :, :4], x[1], x[2, :, :2]]  # [H, L, E]
        nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
        for name in ("query", "key", "value", "attn_mask"):
            call = {"query": x, "key": x, "value": x, "attn_mask": None, name: nested}
            with pytest.raises(RuntimeError, match=rf"attn::\w+: {name} .*to_padded_tensor"):
                sdpa(**call)
