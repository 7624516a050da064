"""NATTEN's backend on FlexAttention, on a CPU under the switch, with gradients.

    python tests/outside/natten_flex.py <NATTEN>

<NATTEN> is a checkout of SHI-Labs/NATTEN; its Python part runs without its CUDA library. Problems
of its tests/test_flex.py, smaller, run with each of its tilings. Output, logsumexp and gradients
are compared with a dense attention in float64 whose mask is written out below, coordinate by
coordinate. Where torch_attn.mods.neighbourhood can express the problem, it is compared, too. The
result is results/natten_flex.txt. `--plant output` (or `scores`) spoils torch_attn: all has to
fail.

A result that differs is "theirs" if PyTorch's compiled FlexAttention has the same output. NATTEN
makes its BlockMask for batch entry 0, but its mask_mod depends on the batch entry where dilation
makes groups of several sizes: the blocks then hide pairs that the mask_mod shows.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import time

import _outside
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import torch_attn

# Batch, heads, heads of the keys, head dim, grid, window, stride, dilation.
PROBLEMS = [
    (1, 2, 1, 8, (128,), (3,), (2,), (5,)),
    (2, 1, 1, 16, (128,), (8,), (7,), (5,)),
    (1, 1, 1, 32, (125,), (3,), (1,), (1,)),
    (1, 2, 2, 8, (125,), (15,), (1,), (1,)),
    (1, 1, 1, 64, (256,), (3,), (2,), (10,)),
    (1, 1, 1, 8, (24, 19), (7, 9), (1, 6), (3, 1)),
    (2, 2, 1, 32, (19, 29), (8, 8), (1, 1), (2, 3)),
    (1, 4, 2, 16, (16, 16), (5, 7), (1, 1), (1, 1)),
    (1, 1, 1, 16, (16, 24), (5, 4), (2, 3), (2, 2)),
    (1, 1, 1, 16, (9, 8, 7), (3, 4, 3), (2, 1, 1), (2, 2, 1)),
    (1, 2, 1, 16, (6, 8, 8), (3, 5, 3), (1, 1, 1), (1, 1, 1)),
]


def sees(n: int, window: int, stride: int, dilation: int, causal: bool) -> Tensor:
    """NATTEN's rule along one dimension: ``[n, n]``, whether a token sees a token.

    Tokens of the same residue modulo `dilation` form a group. In each group, `stride` neighbouring
    queries share the window of their leader.
    """
    visible = torch.zeros(n, n, dtype=torch.bool)
    for query in range(n):
        group = range(query % dilation, n, dilation)
        at, size = query // dilation, len(group)
        if causal:
            leader = min(at // stride * stride + stride - 1, size - 1)
            places = range(max(leader - window + 1, 0), at + 1)
        else:
            leader = min(at // stride * stride + stride // 2, size - 1)
            first = min(max(leader - window // 2, 0), size - window)
            places = range(first, first + window)
        for place in places:
            visible[query, group[place]] = True
    return visible


def mask(
    grid: tuple[int, ...],
    window: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    causal: tuple[bool, ...],
) -> Tensor:
    """The mask of all dimensions, ``[tokens, tokens]``."""
    along = [sees(*of) for of in zip(grid, window, stride, dilation, causal, strict=True)]
    return functools.reduce(
        lambda all_of, one: torch.kron(all_of.int(), one.int()).bool(),
        along,
        torch.ones(1, 1, dtype=torch.bool),
    )


def dense(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Attention in float64; the tensors are ``[batch, tokens, heads, head_dim]``."""
    query, key, value = (x.double().transpose(1, 2) for x in (query, key, value))
    repeats = query.size(1) // key.size(1)
    key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.size(-1))
    scores = scores.masked_fill(~visible, -math.inf)
    output = (scores.softmax(-1) @ value).transpose(1, 2)
    return output, scores.logsumexp(-1).transpose(1, 2)


def results(output: Tensor, lse: Tensor, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Output, logsumexp and the gradients of a loss of both, all of one shape for all callers."""
    torch.manual_seed(1)
    weights = torch.randn(output.numel()).view_as(output), torch.randn(lse.numel()).view_as(lse)
    loss = (output * weights[0]).sum() + (lse * weights[1]).sum()
    return [output, lse, *torch.autograd.grad(loss, tensors)]


def error(results: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative error of a result, in the norm of its tensor."""
    pairs = zip(results, expected, strict=True)
    return max(
        ((one.double().flatten() - of.flatten()).norm() / of.norm()).item() for one, of in pairs
    )


def is_as_compiled(given: dict) -> bool:
    """Whether PyTorch's compiled function has the output that torch_attn has."""
    tensors = [tensor.detach() for tensor in given["of"]]
    options = {"block_mask": given["block_mask"], "scale": given["scale"], "enable_gqa": True}
    compiled = torch.compile(flex_attention)(*tensors, **options)
    return (compiled - torch_attn.flex_attention(*tensors, **options)).abs().max().item() < 1e-5


def main() -> None:
    """Compares the problems and writes the result."""
    options = _outside.arguments_of(__doc__, "a checkout of NATTEN").parse_args()
    _outside.begin(options.plant)
    sys.path.insert(0, str(options.path / "src"))
    import natten
    from natten.backends import flex
    from natten.backends.configs.flex import FLEX_FORWARD_TILE_SHAPES
    from natten.backends.flex import flex_fmha, flex_fna_generic

    given = {}

    def remember(*tensors, block_mask, scale, **more):
        given.update(of=tensors, block_mask=block_mask, scale=scale)
        return flex_attention(*tensors, block_mask=block_mask, scale=scale, **more)

    flex.flex_attention = remember

    start, table = time.time(), []

    def note(name: str, run: object, expected: list[Tensor], calls: int = 1) -> None:
        """Runs a problem that calls PyTorch's function `calls` times."""
        given.clear()
        try:
            with torch_attn.replacing_flex() as handle:
                worst = error(run(), expected)
            good = worst < 1e-5 and handle.calls == calls and not handle.passed_on
            text = f"error {worst:.1e}, {handle.calls} calls, {handle.passed_on} passed on"
        except Exception as problem:
            good, text = False, f"{type(problem).__name__}: {str(problem)[:300]}"
        outcome = "passed" if good else "failed"
        if not good and given and not options.plant and is_as_compiled(given):
            outcome = "theirs"
        table.append(f"{outcome}  {name}: {text}")
        print(table[-1], flush=True)

    for batch, heads, kv_heads, head_dim, grid, window, stride, dilation in PROBLEMS:
        causals = list(itertools.product([False, True], repeat=len(grid)))
        for causal in causals if len(grid) < 3 else [causals[0], causals[5], causals[-1]]:
            torch.manual_seed(0)
            shapes = [(batch, *grid, h, head_dim) for h in (heads, kv_heads, kv_heads)]
            tensors = tuple(torch.randn(shape, requires_grad=True) for shape in shapes)
            flat = [tensor.flatten(1, len(grid)) for tensor in tensors]
            rule = window, stride, dilation, causal
            visible = mask(grid, *rule)
            expected = results(*dense(*flat, visible), tensors)
            problem = f"{grid} window {window} stride {stride} dilation {dilation} causal {causal}"
            for tiles in [*FLEX_FORWARD_TILE_SHAPES[len(grid)], (None, None)]:
                tiling = {"q_tile_shape": tiles[0], "kv_tile_shape": tiles[1]}
                call = functools.partial(
                    flex_fna_generic, *tensors, *rule, return_lse=True, **tiling
                )

                def run(call=call, tensors=tensors) -> list[Tensor]:
                    return results(*call(), tensors)

                note(f"{problem} tiles {tiles}", run, expected)
            odd = all(w % 2 or c for w, c in zip(window, causal, strict=True))
            if odd and max(stride + dilation) == 1:
                blocks = torch_attn.mods.neighbourhood(grid, window, causal=causal)

                def run(flat=flat, tensors=tensors, blocks=blocks) -> list[Tensor]:
                    output, lse = torch_attn.flex_attention(
                        *(x.transpose(1, 2) for x in flat),
                        block_mask=blocks,
                        enable_gqa=True,
                        return_lse=True,
                    )
                    return results(output.transpose(1, 2), lse.transpose(1, 2), tensors)

                note(f"{problem} mods.neighbourhood", run, expected, calls=0)
    torch.manual_seed(0)
    tensors = tuple(
        torch.randn(2, n, h, 16, requires_grad=True) for n, h in ((70, 4), (90, 2), (90, 2))
    )
    expected = results(*dense(*tensors, torch.ones(70, 90, dtype=torch.bool)), tensors)
    note(
        "flex_fmha, 70 queries, 90 keys",
        lambda: results(*flex_fmha(*tensors, return_lse=True), tensors),
        expected,
    )
    version = f"{natten.__version__}, libnatten {natten.HAS_LIBNATTEN}"
    _outside.report("natten_flex", options.plant, start, table, natten=version)


if __name__ == "__main__":
    main()
