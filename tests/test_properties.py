"""Shapes, strides, masks, dtypes and options as hypothesis combines them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

import torch_attn
from _accuracy import check
from helpers import (
    DTYPES,
    LAYOUTS,
    MASK_KINDS,
    Inputs,
    assert_same_bits,
    make_grad_output,
    make_mask,
    results,
)

pytestmark = pytest.mark.usefixtures("kernels")

LENGTHS = st.one_of(st.integers(0, 20), st.sampled_from([31, 32, 63, 64, 65, 100, 129]))
HEAD_DIMS = st.one_of(st.integers(0, 20), st.sampled_from([31, 33, 64, 65]))


@st.composite
def shrunk(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to the given one: sizes set to 1, then leading ones left out."""
    sizes = tuple(draw(st.sampled_from([n, n, 1])) for n in shape)
    return sizes[draw(st.integers(0, len(sizes))) :] if draw(st.booleans()) else sizes


@st.composite
def problems(draw: st.DrawFn) -> tuple[Inputs, dict[str, Any]]:
    L, S, E, Ev = draw(LENGTHS), draw(LENGTHS), draw(HEAD_DIMS), draw(HEAD_DIMS)
    batch = draw(st.lists(st.integers(1, 3), max_size=2).map(tuple))
    gqa = draw(st.booleans())
    if gqa:
        heads = draw(st.sampled_from([1, 2, 4, 6]))
        divisors = [n for n in (1, 2, 3, 4, 6) if heads % n == 0]
        leads = [(*draw(shrunk(batch)), n) for n in (heads, *draw(st.permutations(divisors))[:2])]
        leads = (leads * 2)[:3]
    else:
        full = (*batch, draw(st.integers(1, 3))) if draw(st.booleans()) else ()
        leads = [draw(shrunk(full)) for _ in range(3)]
    dtype = draw(st.sampled_from(DTYPES))
    torch.manual_seed(draw(st.integers(0, 2**32)))
    query, key, value = (
        torch.randn(*lead, *sizes, dtype=dtype)
        for lead, sizes in zip(leads, ((L, E), (S, E), (S, Ev)), strict=True)
    )
    mask = None
    if draw(st.booleans()):
        heads_of_scores = [(*lead[:-1], heads) for lead in leads] if gqa else leads
        scores = (*torch.broadcast_shapes(*heads_of_scores), L, S)
        shape = draw(shrunk(scores).filter(lambda sizes: len(sizes) >= 2))
        mask = make_mask(draw(st.sampled_from(MASK_KINDS)), shape, dtype)
    layouts = [name for name in LAYOUTS if name != "rows and heads swapped"]
    if draw(st.booleans()):
        query, key, value = (
            LAYOUTS[draw(st.sampled_from(layouts))](tensor) for tensor in (query, key, value)
        )
        mask = mask if mask is None else LAYOUTS[draw(st.sampled_from(layouts))](mask)
    options: dict[str, Any] = {"is_causal": draw(st.booleans()), "enable_gqa": gqa}
    if draw(st.booleans()):
        options["scale"] = draw(st.floats(-2, 2, width=16))
    return Inputs(query, key, value, mask), options


@given(problems())
def test_accuracy(problem: tuple[Inputs, dict[str, Any]]) -> None:
    inputs, options = problem
    event(f"{inputs.query.dtype}, {'mask' if inputs.attn_mask is not None else 'no mask'}")
    check(inputs, gradients=True, **options)


@given(problems())
def test_strides_do_not_matter(problem: tuple[Inputs, dict[str, Any]]) -> None:
    """The same bits from contiguous copies."""
    inputs, options = problem
    grad_output = make_grad_output(inputs, **options)
    copies = inputs.map(lambda t: t.contiguous())
    assert_same_bits(
        results(torch_attn.sdpa, inputs, grad_output, **options),
        results(torch_attn.sdpa, copies, grad_output, **options),
    )
