"""Single calls of PyTorch's FlexAttention on a CPU, without and with the switch: same answers?

    python tests/outside/pytorch_calls.py

Needs nothing but torch. The calls are the corners that PyTorch's newest test_flex_attention.py
asks for: dtypes and autocast, broadcasts, layouts of the output, errors, logsumexp and maxima,
tensors that score_mod captures, BlockMasks. PyTorch's function is allowed to compute derivatives.
The result is results/pytorch_calls.txt; a line says whether both answer alike, both raise, or one
raises.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import _outside
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

import torch_attn


def t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def blocks(mask_mod: Any, length: int, batch: int | None = None, **options: Any) -> BlockMask:
    return create_block_mask(mask_mod, batch, None, length, length, device="cpu", **options)


def three(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return t(*shape, dtype=dtype), t(*shape, dtype=dtype), t(*shape, dtype=dtype)


HALF, BF16, F64 = torch.float16, torch.bfloat16, torch.float64
CASES: dict[str, Callable[[], Any]] = {
    "query float32, key and value float16": lambda: flex_attention(
        t(1, 1, 64, 64), t(1, 1, 64, 64).half(), t(1, 1, 64, 64).half()
    ),
    "key and value of one batch entry, no mask": lambda: flex_attention(
        t(3, 2, 64, 16), t(1, 2, 64, 16), t(1, 2, 64, 16)
    ),
    "key and value of one batch entry, mask of three": lambda: flex_attention(
        t(3, 2, 64, 16), t(1, 2, 64, 16), t(1, 2, 64, 16), block_mask=blocks(causal, 64, 3)
    ),
    "fewer heads of the keys, no enable_gqa": lambda: flex_attention(
        t(1, 4, 64, 16), t(1, 2, 64, 16), t(1, 2, 64, 16)
    ),
    "4 heads and 3 of the keys, enable_gqa": lambda: flex_attention(
        t(1, 4, 64, 16), t(1, 3, 64, 16), t(1, 3, 64, 16), enable_gqa=True
    ),
    "return_lse and return_aux": lambda: flex_attention(
        *three(1, 1, 64, 16), return_lse=True, return_aux=AuxRequest(lse=True)
    ),
    "return_aux of nothing": lambda: flex_attention(*three(1, 1, 43, 16), return_aux=AuxRequest()),
    "return_aux of the logsumexp, float16": lambda: flex_attention(
        *three(1, 1, 43, 16, dtype=HALF), return_aux=AuxRequest(lse=True)
    ),
    "return_aux of the maxima": lambda: flex_attention(
        *three(1, 1, 43, 16), return_aux=AuxRequest(max_scores=True)
    ),
    "BlockMask of other lengths": lambda: flex_attention(
        *three(1, 1, 64, 16), block_mask=blocks(causal, 128)
    ),
    "BlockMask that was sliced": lambda: flex_attention(
        t(1, 1, 128, 16),
        t(1, 1, 256, 16),
        t(1, 1, 256, 16),
        block_mask=blocks(causal, 256)[:, :, :1],
    ),
    "three dimensions": lambda: flex_attention(*three(1, 64, 16)),
    "head dims of query and key differ": lambda: flex_attention(
        t(1, 1, 64, 16), t(1, 1, 64, 8), t(1, 1, 64, 16)
    ),
    "whole numbers": lambda: flex_attention(
        *(torch.ones(1, 1, 64, 16, dtype=torch.int32) for _ in range(3))
    ),
    "layout: heads and queries transposed": lambda: flex_attention(
        *(x.transpose(1, 2) for x in three(2, 64, 3, 16))
    ),
    "layout: batch and heads permuted": lambda: flex_attention(
        *(x.permute(1, 0, 2, 3) for x in three(3, 2, 64, 16))
    ),
    "layout: query transposed, value of other width": lambda: flex_attention(
        t(2, 64, 3, 16).transpose(1, 2), t(2, 3, 64, 16), t(2, 3, 64, 24)
    ),
    "layout: query expanded": lambda: flex_attention(
        t(1, 1, 64, 16).expand(2, 3, 64, 16), t(2, 3, 64, 16), t(2, 3, 64, 16)
    ),
    "no queries": lambda: flex_attention(t(1, 1, 0, 16), t(1, 1, 4, 16), t(1, 1, 4, 16)),
    "score_mod returns a boolean": lambda: flex_attention(
        *three(1, 1, 8, 16), score_mod=lambda s, b, h, i, j: i >= j
    ),
    "score_mod returns a whole number": lambda: flex_attention(
        *three(1, 1, 8, 16), score_mod=lambda s, b, h, i, j: i - j
    ),
    "scale is a tensor": lambda: flex_attention(*three(1, 1, 8, 16), scale=torch.tensor(0.3)),
    "head_dim 17": lambda: flex_attention(
        *three(1, 2, 50, 17), score_mod=lambda s, b, h, i, j: s + (i - j)
    ),
}


def of_autocast(dtype: torch.dtype, to: torch.dtype) -> Callable[[], Any]:
    def call() -> Tensor:
        with torch.autocast("cpu", to):
            return flex_attention(t(1, 1, 64, 64).to(to), *three(1, 1, 64, 64, dtype=dtype)[1:])

    return call


for name, dtype, to in (("float32", torch.float32, HALF), ("bfloat16", BF16, HALF)):
    CASES[f"autocast to float16, key and value {name}"] = of_autocast(dtype, to)
CASES["autocast to bfloat16"] = of_autocast(torch.float32, BF16)


def with_gradients(score_mod: Any, captured: Callable[[], Tensor] | None) -> Callable[[], Any]:
    """The call with a score_mod that captures a parameter; output and all gradients."""

    def call() -> list[Tensor]:
        leaves = [x.requires_grad_() for x in three(2, 4, 32, 16)]
        parameter = None if captured is None else captured().requires_grad_()
        if parameter is not None:
            leaves.append(parameter)
        output = flex_attention(
            *leaves[:3], score_mod=lambda s, b, h, i, j: score_mod(s, b, h, i, j, parameter)
        )
        loss = output.sin().sum()
        return [output.detach(), *torch.autograd.grad(loss, leaves, allow_unused=True)]

    return call


def shape(*sizes: int, dtype: torch.dtype = torch.float32) -> Callable[[], Tensor]:
    return lambda: torch.randn(sizes, dtype=dtype)


F = torch.nn.functional
for name, captured, score_mod in (
    ("one number", shape(1), lambda s, b, h, i, j, p: s + p[0] * s),
    ("0-d", shape(), lambda s, b, h, i, j, p: s * p + p),
    ("detached", shape(), lambda s, b, h, i, j, p: s + p.detach()),
    ("unused", shape(4, 2), lambda s, b, h, i, j, p: (p[h], s)[1]),
    ("float64", shape(4, dtype=F64), lambda s, b, h, i, j, p: s * p[h]),
    ("by query and by key", shape(32), lambda s, b, h, i, j, p: s + p[i] + p[j]),
    ("of the pair, twice", shape(32, 32), lambda s, b, h, i, j, p: s + p[i, j] * p[j, i]),
    ("exponential", shape(4), lambda s, b, h, i, j, p: s * p.exp()[h]),
    ("sum of a row", shape(2, 4, 8), lambda s, b, h, i, j, p: s + p[b, h].sum()),
    ("negative index", shape(32), lambda s, b, h, i, j, p: s + p[i - j]),
    ("in where", shape(32), lambda s, b, h, i, j, p: torch.where(i >= j, s * p[j], -torch.inf)),
    (
        "distance of vectors",
        shape(32, 3),
        lambda s, b, h, i, j, p: s - (p[i] - p[j]).square().sum(),
    ),
):
    CASES[f"captured: {name}"] = with_gradients(score_mod, captured)
for name, function in (
    ("silu", F.silu),
    ("sin", torch.sin),
    ("cos", torch.cos),
    ("tanh", torch.tanh),
    ("gelu", F.gelu),
    ("erf", torch.erf),
    ("cube", lambda s: s**3),
    ("softplus", F.softplus),
    ("leaky_relu", F.leaky_relu),
    ("sign", torch.sign),
    ("logaddexp", lambda s: torch.logaddexp(s, s * 0.5)),
    ("round", lambda s: s + torch.round(s)),
):
    CASES[f"of the score: {name}"] = with_gradients(
        lambda s, b, h, i, j, p, function=function: function(s), None
    )


def with_compact_lists() -> list[Tensor]:
    ids = torch.arange(512) // 100
    of = blocks(lambda b, h, i, j: (i >= j) | (ids[i] == ids[j]), 512)
    lists = {}
    for name in ("kv", "full_kv", "q", "full_q"):
        number, index = getattr(of, f"{name}_num_blocks"), getattr(of, f"{name}_indices")
        lists[f"{name}_num_blocks"] = number
        lists[f"{name}_indices"] = index[..., : max(int(number.max()), 1)].contiguous()
    mask = BlockMask(of.seq_lengths, BLOCK_SIZE=of.BLOCK_SIZE, mask_mod=of.mask_mod, **lists)
    leaves = [x.requires_grad_() for x in three(1, 1, 512, 16)]
    output = flex_attention(*leaves, block_mask=mask)
    return [output.detach(), *torch.autograd.grad(output.sin().sum(), leaves)]


def that_hides_whole_queries() -> list[Tensor]:
    leaves = [x.requires_grad_() for x in three(2, 2, 64, 16)]
    lengths = torch.tensor([10, 0])
    mask = blocks(lambda b, h, i, j: j < lengths[b], 64, 2)
    output, lse = flex_attention(*leaves, block_mask=mask, return_lse=True)
    return [output.detach(), lse.detach(), *torch.autograd.grad(output.sin().sum(), leaves)]


CASES["BlockMask with compact lists"] = with_compact_lists
CASES["BlockMask that hides whole queries"] = that_hides_whole_queries


def answer(call: Callable[[], Any]) -> list[Any] | Exception:
    """What the call returns, as a list, or raises."""
    torch.manual_seed(0)
    try:
        result = call()
    except Exception as error:
        return error
    flat: list[Any] = []
    for part in result if isinstance(result, (list, tuple)) else [result]:
        flat += list(part) if isinstance(part, tuple) else [part]
    return flat


def compare(call: Callable[[], Any]) -> str:
    """One line: how the answers with and without the switch compare."""
    theirs = answer(call)
    with torch_attn.replacing_flex() as handle:
        ours = answer(call)
    if isinstance(theirs, Exception) and isinstance(ours, Exception):
        kinds = f"{type(theirs).__name__}, with the switch {type(ours).__name__}"
        same = type(theirs) is type(ours)
        return f"both raise ({'alike' if same else 'other classes'}): {kinds}"
    if isinstance(ours, Exception):
        return f"only the switch raises: {type(ours).__name__}: {str(ours)[:110]}"
    if isinstance(theirs, Exception):
        return f"only PyTorch raises: {type(theirs).__name__}: {str(theirs)[:90]}"
    worst = 0.0
    for one, other in zip(theirs, ours, strict=True):
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            if one is not None or other is not None:
                return f"differ: {one} and {other}"
            continue
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return f"differ: {one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}"
        if one.numel() and one.stride() != other.stride():
            return f"differ in layout: strides {one.stride()} and {other.stride()}"
        if one.numel():
            pair = one.double().nan_to_num(), other.double().nan_to_num()
            error = (pair[0] - pair[1]).norm() / pair[0].norm().clamp_min(1e-3)
            worst = max(worst, error.item() / (1e-5 if one.dtype in (torch.float32, F64) else 1e-2))
    note = ", passed on to PyTorch" if handle.passed_on else ""
    return f"{'alike' if worst < 1 else f'differ: {worst:.0f} times the tolerance'}{note}"


def main() -> None:
    """Compares all calls and writes the result."""
    _outside.begin()
    _outside.allow_derivatives_in_torch()
    rows = {name: compare(call) for name, call in CASES.items()}
    counts = collections.Counter(text.split(":")[0] for text in rows.values())
    lines = [*_outside.versions(), "", f"{len(rows)} calls"]
    lines += [f"{count:5}  {text}" for text, count in counts.most_common()]
    lines += ["", *(f"{name:48} {text}" for name, text in rows.items())]
    _outside.write("pytorch_calls", lines)


if __name__ == "__main__":
    main()
