"""The switch and torch's own packed sequences, for which torch has kernels on GPUs only."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.nn.attention import varlen

import torch_attn
from helpers import DTYPES
from torch_attn import replace_sdpa, replacing_sdpa

pytestmark = pytest.mark.usefixtures("switched_off")

flash = torch.ops.aten._flash_attention_forward
LSE = varlen.AuxRequest(lse=True)
# What this release of torch has; another has fewer.
NAMES = inspect.signature(varlen.varlen_attn).parameters
GROUPED = {"enable_gqa": True} if "enable_gqa" in NAMES else {}
needs_out = pytest.mark.skipif(
    not hasattr(varlen, "varlen_attn_out"), reason="not run: this torch has no varlen_attn_out"
)

OPTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"window_size": (-1, 0)},
    "window": {"window_size": (3, 1)},
    "scale": {"scale": 0.3},
}


def packed(
    queries: tuple[int, ...] = (5, 0, 12, 3),
    keys: tuple[int, ...] = (9, 4, 12, 0),
    dtype: torch.dtype = torch.float32,
) -> tuple[Any, ...]:
    """What varlen_attn takes; the same in every call. Some sequences are empty."""
    torch.manual_seed(0)
    heads = (4, 2, 2) if GROUPED else (4, 4, 4)
    lengths = (sum(queries), sum(keys), sum(keys))
    tensors = [torch.randn(n, h, 16, dtype=dtype) for n, h in zip(lengths, heads, strict=True)]
    cu_seqs = [torch.tensor((0, *n)).cumsum(0).int() for n in (queries, keys)]
    return *tensors, *cu_seqs, max(queries), max(keys)


def gradients(output: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    return torch.autograd.grad(output, leaves, torch.randn_like(output))


def assert_equal(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.regression
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_and_backward(options: str, dtype: torch.dtype) -> None:
    """Equal attn's to the bit, with the logsumexp, which torch has in float32.

    The backward too, for which attn keeps a pair of numbers where torch keeps one.
    """
    x, more = packed(dtype=dtype), OPTIONS[options] | GROUPED
    with replacing_sdpa() as handle:
        output, lse = varlen.varlen_attn(*x, return_aux=LSE, **more)
    assert handle.calls == 1
    expected, expected_lse = torch_attn.varlen_attn(*x, return_aux=LSE, **more)
    assert_equal((output, lse), (expected, expected_lse.float()))
    assert lse[:, -3:].eq(-math.inf).all()  # no keys
    leaves = [t.requires_grad_() for t in x[:3]]
    with replacing_sdpa():
        actual = gradients(varlen.varlen_attn(*x, **more), *leaves)
    assert_equal(actual, gradients(torch_attn.varlen_attn(*x, **more), *leaves))


@pytest.mark.regression
def test_views() -> None:
    """Views of one tensor with queries, keys and values: neighbours are not to be touched."""
    x = packed((5, 9), (5, 9))
    qkv = torch.randn(14, 3, 4, 16, requires_grad=True)
    more = {"window_size": (-1, 0)}
    with replacing_sdpa():
        actual = gradients(varlen.varlen_attn(*qkv.unbind(1), *x[3:], **more), qkv)
    assert_equal(actual, gradients(torch_attn.varlen_attn(*qkv.unbind(1), *x[3:], **more), qkv))


@needs_out
@pytest.mark.regression
def test_out() -> None:
    x, out = packed(), torch.empty(20, 16, 4).transpose(1, 2)
    with replacing_sdpa() as handle:
        output, lse = varlen.varlen_attn_out(out, *x, return_aux=LSE, **GROUPED)
        with pytest.raises(RuntimeError, match=r"out has dtype Float and shape \[19, 4, 16"):
            varlen.varlen_attn_out(out[1:], *x, **GROUPED)
    assert handle.calls == 1
    assert output is out
    assert_equal((out, lse), torch_attn.varlen_attn(*x, return_aux=LSE, **GROUPED))


@pytest.mark.skipif("seqused_k" not in NAMES, reason="not run: this torch has no seqused_k")
@pytest.mark.regression
def test_keys_in_use() -> None:
    x, more = packed(), {"seqused_k": torch.tensor([3, 4, 11, 0]).int(), "window_size": (-1, 0)}
    expected = torch_attn.varlen_attn(*x, **more, **GROUPED)
    with replacing_sdpa():
        assert_equal(varlen.varlen_attn(*x, **more, **GROUPED), expected)
        with pytest.raises(RuntimeError, match="seqused_k is an inference-only parameter"):
            varlen.varlen_attn(x[0].requires_grad_(), *x[1:], **more, **GROUPED)


@pytest.mark.skipif("block_table" not in NAMES, reason="not run: this torch has no block_table")
@pytest.mark.regression
def test_pages() -> None:
    query, _, _, cu_seq_q, *_ = packed((2, 3))
    x = query, *torch.randn(2, 3, 8, 2, 16), cu_seq_q, None, 3, 16
    more = {
        "seqused_k": torch.tensor([12, 4]).int(),
        "block_table": torch.tensor([[2, 0], [1, -1]]).int(),
        "num_splits": 1,
    }
    with replacing_sdpa():
        actual = varlen.varlen_attn(*x, **more, **GROUPED)
    assert_equal(actual, torch_attn.varlen_attn(*x, **more, **GROUPED))


@pytest.mark.regression
def test_dense() -> None:
    """Without cum_seq_q: a batch [B, L, heads, E], whose last query stands at the last key."""
    torch.manual_seed(0)
    leaves = [torch.randn(2, n, 4, 16, requires_grad=True) for n in (5, 7, 7)]
    with replacing_sdpa() as handle:
        output = flash(*leaves, None, None, 5, 7, 0.0, True, False)[0]
        actual = gradients(output, *leaves)
    assert handle.calls == 1
    swapped = [t.transpose(1, 2) for t in leaves]
    expected = torch_attn.sdpa(*swapped, window_size=(-1, 0), query_offset=2).transpose(1, 2)
    torch.testing.assert_close(output, expected)
    assert_equal(actual, gradients(expected, *leaves))


def kinds(results: tuple[Tensor, ...]) -> list[Any]:
    return [(t.shape, t.dtype, t.stride()) for t in results]


@pytest.mark.regression
def test_fake_results() -> None:
    """Torch's have the shapes, dtypes and strides of ours, because compiled graphs rely on it."""
    more = (5, 5, 0.0, False, False)
    for cu_seq in (None, torch.tensor([0, 2, 5], dtype=torch.int32)):
        shape = (5, 4, 3, 16) if cu_seq is not None else (2, 5, 4, 3, 16)
        tensors = torch.randn(shape).bfloat16().unbind(-2)  # with gaps between them
        tensors = *tensors[:2], tensors[2].contiguous()
        results = {}
        for mode in (replacing_sdpa(), FakeTensorMode(allow_non_fake_inputs=True)):
            with mode:
                forward = flash(*tensors, cu_seq, cu_seq, *more)
                backward = (
                    torch.ops.aten._flash_attention_backward(
                        forward[0], *tensors, *forward[:2], cu_seq, cu_seq, *more[:4], *forward[2:4]
                    )
                    if cu_seq is not None
                    else ()
                )
            results[type(mode)] = kinds((*forward, *backward))
        real, fake = results.values()
        assert real == fake


@pytest.mark.regression
def test_compiled() -> None:
    """Whole, forward and backward. From the second length on nothing is compiled again."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(varlen.varlen_attn, fullgraph=True, backend=counter)
    graphs = []
    with replacing_sdpa() as handle:
        for lengths in ((5, 0, 12, 7), (6, 1, 2, 4), (20, 1, 4, 4), (3, 3, 0, 1)):
            x = packed(lengths, lengths)
            leaves = [t.requires_grad_() for t in x[:3]]
            actual = compiled(*x, window_size=(-1, 0), **GROUPED)
            expected = torch_attn.varlen_attn(*x, window_size=(-1, 0), **GROUPED)
            torch.testing.assert_close(actual, expected)
            assert_equal(gradients(actual, *leaves), gradients(expected, *leaves))
            graphs.append(counter.frame_count)
        assert handle.calls == 4
    assert graphs == [1, 2, 2, 2]
    with pytest.raises(NotImplementedError, match=r"torch_attn\.varlen_attn"):
        compiled(*x, window_size=(-1, 0), **GROUPED)
    torch.compiler.reset()


@needs_out
@pytest.mark.regression
def test_out_compiled() -> None:
    torch.compiler.reset()
    x, out = packed(), torch.empty(20, 4, 16)
    with replacing_sdpa():
        torch.compile(varlen.varlen_attn_out, fullgraph=True)(out, *x, **GROUPED)
    assert_equal(out, torch_attn.varlen_attn(*x, **GROUPED))
    torch.compiler.reset()


@pytest.mark.regression
def test_autocast() -> None:
    """Torch's operator has no autocast: it computes in the dtype that it is given."""
    x = packed()
    expected = torch_attn.varlen_attn(*x, **GROUPED)
    with replacing_sdpa(), torch.autocast("cpu", torch.bfloat16):
        assert_equal(varlen.varlen_attn(*x, **GROUPED), expected)


@pytest.mark.regression
def test_off() -> None:
    """Then there is no kernel, as before; the error says where there is one."""
    replace_sdpa().remove()
    x = packed()
    with pytest.raises(NotImplementedError, match=r"turn torch_attn\.replace_sdpa\(\) on, or"):
        varlen.varlen_attn(*x, **GROUPED)
    calls = torch.ops.attn._replaced_calls()
    with replacing_sdpa():
        output = varlen.varlen_attn(*(t.requires_grad_() for t in x[:3]), *x[3:], **GROUPED)
    with pytest.raises(NotImplementedError, match="_flash_attention_backward"):
        output.sum().backward()
    assert torch.ops.attn._replaced_calls()[0] == calls[0] + 1


@pytest.mark.regression
def test_no_second_derivative() -> None:
    """Torch's operator has none; ours has."""
    x = packed()
    query = x[0].requires_grad_()
    with replacing_sdpa():
        output = varlen.varlen_attn(*x, **GROUPED)
        (first,) = torch.autograd.grad(output.square().sum(), query, create_graph=True)
        with pytest.raises(RuntimeError, match="no autograd formula was registered"):
            torch.autograd.grad(first.square().sum(), query)


@pytest.mark.regression
def test_refused() -> None:
    query, key, value, *more = packed((5, 9), (5, 9))
    query = query.requires_grad_()
    with replacing_sdpa():
        wrong: list[tuple[str, Any]] = [
            ("dropout_p is 0.5; .* call torch_attn.varlen_attn", (value, *more, 0.5, False, False)),
            ("return_debug_mask must be False", (value, *more, 0.0, False, True)),
            ("value has head_dim 8 but query has 16", (value[..., :8], *more, 0.0, False, False)),
            ("query has shape .14, 4, 16.", (value, None, None, 9, 9, 0.0, False, False)),
            ("cu_seq_k is None", (value, more[0], None, 9, 9, 0.0, False, False)),
        ]
        for message, arguments in wrong:
            with pytest.raises(RuntimeError, match=message):
                flash(query, key, *arguments)
        slopes = flash(query, key, value, *more, 0.0, False, False, alibi_slopes=torch.ones(4))
        with pytest.raises(RuntimeError, match="torch's formula of the derivative is wrong"):
            slopes[0].sum().backward()
