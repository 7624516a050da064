"""The problems that forward, backward, statistics and Meta are all held to: shapes, masks, options.

The dtype goes round with the cases instead of multiplying them; `make fuzz` draws the product.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import torch

from helpers import DTYPES, LAYOUTS, MASK_KINDS, Inputs, make_inputs, make_mask, randn

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: shapes of the tensors, kind of the mask, dtype, options."""

    query: Shape
    key: Shape
    value: Shape
    mask: Shape | None = None
    kind: str = "bool"
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def inputs(self) -> Inputs:
        """Random numbers in memory that is otherwise NaN."""
        query, key, value = (
            randn(shape, self.dtype) for shape in (self.query, self.key, self.value)
        )
        mask = None if self.mask is None else make_mask(self.kind, self.mask, self.dtype)
        return Inputs(query, key, value, mask).map(LAYOUTS["NaN before and after"])

    def __str__(self) -> str:
        def times(shape: Shape) -> str:
            return "x".join(map(str, shape))

        mask = [] if self.mask is None else [f"{self.kind}{times(self.mask)}"]
        options = [k if v is True else f"{k}={v}" for k, v in self.options.items()]
        shapes = [times(self.query), times(self.key), times(self.value)]
        return "-".join([*shapes, *mask, str(self.dtype).removeprefix("torch."), *options])


# Around the edges of the kernels' tiles, vectors and blocks.
LENGTHS = (1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 197, 257)
HEAD_DIMS = (1, 2, 3, 8, 17, 32, 64, 80, 96, 128, 192, 256, 300)


def _lengths() -> list[Case]:
    """Every length with five others, each pair with other options."""
    cases = []
    for (i, L), (j, S) in itertools.product(enumerate(LENGTHS), enumerate(LENGTHS)):
        if (i + j) % 3:
            continue
        choose = random.Random(1000 * L + S).choice
        E, Ev = choose((1, 8, 20, 64)), choose((3, 8, 20, 64))
        causal = {"is_causal": True} if choose((True, False)) else {}
        mask = choose((None, (1, S), (L, 1), (L, S), (2, 1, L, S), (2, 3, 1, S)))
        kind, dtype = choose(MASK_KINDS), choose(DTYPES)
        cases.append(Case((2, 3, L, E), (2, 3, S, E), (2, 3, S, Ev), mask, kind, dtype, causal))
    return cases


def _head_dims() -> list[Case]:
    return [
        Case((2, 2, 33, E), (2, 2, 35, E), (2, 2, 35, Ev), dtype=DTYPES[(i + j) % 4])
        for i, E in enumerate(HEAD_DIMS)
        for j, Ev in enumerate((E, HEAD_DIMS[i - 5]))
    ]


def _masks() -> list[Case]:
    B, H, L, S, E = 2, 3, 19, 70, 8
    shapes = [
        *[(L, S), (1, S), (L, 1), (1, 1)],
        *[(H, L, S), (1, L, S), (H, 1, 1)],
        *[(B, H, L, S), (B, 1, L, S), (1, H, L, S), (1, 1, L, S)],
        *[(B, 1, 1, S), (B, H, L, 1), (1, 1, 1, S), (B, 1, 1, 1)],
    ]
    return [
        Case(
            (B, H, L, E), (B, H, S, E), (B, H, S, E), shape, kind, DTYPES[(i // 2 + j) % 4], options
        )
        for i, shape in enumerate(shapes)
        for j, kind in enumerate(MASK_KINDS)
        for options in ({"is_causal": True} if (i + j) % 2 else {},)
    ]


def _heads() -> list[Case]:
    B, L, S, E = 2, 23, 37, 8
    heads = [(4, 2, 2), (4, 1, 1), (6, 3, 2), (6, 2, 3), (4, 1, 4), (4, 4, 1), (8, 2, 1), (3, 3, 3)]
    variants: list[tuple[tuple[int, ...] | None, dict[str, Any]]] = [
        (None, {}),
        (None, {"is_causal": True}),
        ((B, -1, L, S), {"scale": 0.3}),
        ((1, S), {}),
    ]
    return [
        Case(
            (B, Hq, L, E),
            (B, Hk, S, E),
            (B, Hv, S, E),
            mask and tuple(Hq if n == -1 else n for n in mask),
            "float",
            DTYPES[(i + j) % 4],
            {"enable_gqa": True, **options},
        )
        for i, (Hq, Hk, Hv) in enumerate(heads)
        for j, (mask, options) in enumerate(variants)
    ]


def _leading_dimensions() -> list[Case]:
    q, k, v = (17, 8), (21, 8), (21, 5)
    leads: list[tuple[Shape, Shape, Shape, Shape | None]] = [
        ((), (), (), None),
        ((), (), (), (17, 21)),
        ((3,), (3,), (3,), (3, 17, 1)),
        ((2, 2, 3), (2, 2, 3), (2, 2, 3), (2, 1, 1, 17, 21)),
        ((2, 1, 2, 3), (2, 1, 2, 3), (2, 1, 2, 3), (1, 2, 3, 1, 21)),
        ((2, 2, 1, 2, 3), (2, 2, 1, 2, 3), (2, 2, 1, 2, 3), None),
        # broadcast: one, two or all of the three; missing dimensions; different ones
        ((1, 3), (2, 3), (2, 3), (2, 1, 17, 21)),
        ((2, 3), (1, 3), (2, 1), (2, 3, 17, 21)),
        ((2, 3), (2, 3), (1, 3), None),
        ((1, 1), (1, 1), (2, 3), (2, 3, 1, 21)),
        ((), (2, 3), (2, 3), (1, 3, 17, 21)),
        ((2, 3), (), (3,), None),
        ((2, 1), (1, 3), (1, 1), (1, 1, 17, 21)),
        ((2, 1, 3), (4, 1), (2, 1, 1), (4, 1, 17, 21)),
    ]
    return [
        Case(lq + q, lk + k, lv + v, mask, MASK_KINDS[n % 4], DTYPES[(n // 4 + i) % 4], options)
        for i, (lq, lk, lv, mask) in enumerate(leads)
        for n, options in ((i, {}), (i + 1, {"is_causal": True}))
    ]


def _broadcast_groups() -> list[Case]:
    """Grouped heads together with leading dimensions that broadcast."""
    leads: list[tuple[Shape, Shape, Shape, Shape]] = [
        ((4,), (2,), (1,), (4, 1, 19)),
        ((2, 4), (1, 2), (2, 2), (2, 4, 7, 19)),
        ((1, 4), (2, 2), (2, 2), (2, 1, 7, 19)),
        ((4,), (3, 2), (2,), (3, 1, 1, 19)),
        ((2, 1, 6), (5, 3), (2, 1, 1), (2, 5, 1, 7, 1)),
    ]
    return [
        Case(
            (*lq, 7, 8),
            (*lk, 19, 8),
            (*lv, 19, 6),
            mask,
            MASK_KINDS[i % 4],
            DTYPES[i % 4],
            {"enable_gqa": True},
        )
        for i, (lq, lk, lv, mask) in enumerate(leads)
    ]


def _scales() -> list[Case]:
    q, k = (2, 2, 17, 32), (2, 2, 33, 32)
    cases = [
        Case(q, k, k, mask, "float", DTYPES[(i + j) % 4], {"scale": scale})
        for i, scale in enumerate((0.0, 1.0, -0.5, 3, 50.0, -50.0))
        for j, mask in enumerate((None, (17, 33)))
    ]
    # Two keys of which causality hides one; one weight of the other row is nearly 1.
    for i, (L, S, E) in enumerate(((2, 2, 31), (2, 40, 1), (32, 32, 1))):
        for j, scale in enumerate((0.0, -1.0)):
            q, k, v = (1, 1, L, E), (1, 1, S, E), (1, 1, S, 33)
            options = {"is_causal": True, "scale": scale}
            cases.append(Case(q, k, v, dtype=DTYPES[(i + j) % 4], options=options))
    return cases


def _long() -> list[Case]:
    """Few queries and many keys (decoding), many queries and few keys, one head of both."""
    causal, gqa = {"is_causal": True}, {"enable_gqa": True}
    f64, _, bf16, f16 = DTYPES
    return [
        Case((1, 64), (5001, 64), (5001, 64)),
        Case((2, 8, 1, 32), (2, 2, 3000, 32), (2, 2, 3000, 32), dtype=bf16, options=gqa),
        # More than four and more than eight queries to a pass over keys; 16 where these are many.
        Case((2, 12, 36), (2, 200, 36), (2, 200, 44), (12, 200), "bool"),
        Case((1, 24, 1, 40), (1, 2, 300, 40), (1, 2, 300, 40), dtype=bf16, options=gqa),
        Case((15, 64), (16500, 64), (16500, 64)),
        Case((1, 4, 2, 16), (1, 1, 2049, 16), (1, 1, 2049, 40), (1, 2049), "bool", f16, gqa),
        Case((70, 16), (4099, 16), (4099, 16), (1, 4099), "float"),
        Case((3, 8), (4097, 8), (4097, 8), (3, 4097), "-inf", f64),
        Case((1100, 8), (3, 8), (3, 8), (1100, 1), "float"),
        Case((2049, 16), (1, 16), (1, 16), dtype=f16, options=causal),
        Case((1025, 32), (1030, 32), (1030, 32), options=causal),
        Case((1030, 16), (1025, 16), (1025, 24), (1030, 1), "-inf", bf16),
        Case((700, 16), (1500, 16), (1500, 16), (1, 1500), "float", f64, causal),
    ]


def _empty() -> list[Case]:
    """Sizes of zero, one at a time and together."""
    qkv: list[tuple[Shape, Shape, Shape]] = [
        ((0, 3, 5, 8), (0, 3, 7, 8), (0, 3, 7, 8)),
        ((2, 0, 5, 8), (2, 0, 7, 8), (2, 0, 7, 8)),
        ((2, 3, 0, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
        ((2, 3, 5, 8), (2, 3, 0, 8), (2, 3, 0, 8)),
        ((2, 3, 5, 0), (2, 3, 7, 0), (2, 3, 7, 8)),
        ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 0)),
        ((0, 8), (0, 8), (0, 8)),
        ((3, 70, 8), (3, 0, 8), (3, 0, 8)),
        ((5, 0), (0, 0), (0, 0)),
    ]
    return [
        Case(
            q, k, v, (q[-2], k[-2]) if masked else None, "float", DTYPES[(i + masked) % 4], options
        )
        for i, (q, k, v) in enumerate(qkv)
        for masked in (False, True)
        for options in ({"is_causal": True} if (i + masked) % 2 else {},)
    ]


def _every_dtype() -> list[Case]:
    """What each dtype meets: a mask of each kind, groups, causality, few queries, large heads."""
    causal, gqa = {"is_causal": True}, {"enable_gqa": True}
    shapes: list[tuple[Shape, Shape, Shape, Shape | None, str, dict[str, Any]]] = [
        ((2, 3, 70, 24), (2, 3, 131, 24), (2, 3, 131, 40), (3, 70, 131), "-inf", causal),
        ((2, 4, 66, 64), (2, 2, 129, 64), (2, 1, 129, 64), (1, 129), "bool", gqa),
        ((3, 150, 16), (3, 150, 16), (3, 150, 16), (1, 150), "float", causal),
        ((2, 8, 3, 80), (2, 2, 300, 80), (2, 2, 300, 72), None, "", gqa),
        ((2, 33, 192), (2, 70, 192), (2, 70, 192), (33, 1), "float32", {"scale": -0.2}),
        ((1, 40, 300), (1, 33, 300), (1, 33, 257), None, "", causal),
    ]
    return [
        Case(q, k, v, mask, kind, dtype, options)
        for q, k, v, mask, kind, options in shapes
        for dtype in DTYPES
    ]


CASES = [
    *_lengths(),
    *_head_dims(),
    *_masks(),
    *_heads(),
    *_leading_dimensions(),
    *_broadcast_groups(),
    *_scales(),
    *_long(),
    *_empty(),
    *_every_dtype(),
    # where the built-in is lucky (test_opinfo.py)
    Case((2, 3, 19, 8), (2, 3, 70, 8), (2, 3, 70, 8), (1, 1), "-inf", options={"is_causal": True}),
]


# One of each kind of argument; small, because gradcheck perturbs every number. A floating mask
# wants a gradient.
B, H, L, S, E = 2, 2, 2, 3, 2
Q, K = (H, L, E), (H, S, E)
CAUSAL: dict[str, Any] = {"is_causal": True}
GQA: dict[str, Any] = {"enable_gqa": True}
DROPOUT: dict[str, Any] = {"dropout_p": 0.4}
F64 = torch.float64
SMALL = {
    "plain": Case(Q, K, K, None, "", F64),
    "causal, L < S": Case(Q, K, K, None, "", F64, CAUSAL),
    "causal, L > S": Case((H, 4, E), K, K, None, "", F64, CAUSAL),
    "larger value": Case(Q, K, (H, S, 3), None, "", F64),
    "smaller value": Case(Q, K, (H, S, 1), None, "", F64, CAUSAL),
    "negative scale": Case(Q, K, K, None, "", F64, {"scale": -0.3}),
    "zero scale": Case(Q, K, K, None, "", F64, {"scale": 0.0}),
    "bool mask": Case(Q, K, K, (H, L, S), "bool", F64),
    "bool mask of keys": Case(Q, K, K, (1, S), "bool", F64, CAUSAL),
    "mask": Case((B, *Q), (B, *K), (B, *K), (B, H, L, S), "float", F64),
    "mask with -inf": Case(Q, K, K, (L, S), "-inf", F64),
    "mask and causal": Case(Q, K, K, (H, L, S), "float", F64, CAUSAL),
    "mask of a head": Case(Q, K, K, (1, L, S), "float", F64),
    "mask of keys": Case(Q, K, K, (1, S), "float", F64),
    "mask of keys of a sample": Case((B, *Q), (B, *K), (B, *K), (B, 1, 1, S), "float", F64),
    "mask of queries": Case(Q, K, K, (L, 1), "float", F64),
    "mask of all heads": Case((B, *Q), (B, *K), (B, *K), (B, 1, L, 1), "float", F64),
    "one number a head": Case(Q, K, K, (H, 1, 1), "float", F64),
    "one number as mask": Case(Q, K, K, (1, 1), "float", F64),
    "grouped heads": Case((4, L, E), K, K, (4, 1, S), "float", F64, GQA),
    "one key head": Case(Q, (1, S, E), (1, S, E), None, "", F64, GQA | CAUSAL),
    "more value heads": Case((4, L, E), (1, S, E), K, None, "", F64, GQA),
    "more key heads": Case((4, L, E), K, (1, S, E), (1, S), "float", F64, GQA),
    "2-D": Case((L, E), (S, E), (S, E), (L, S), "float", F64),
    "5-D": Case((2, 1, *Q), (2, 1, *K), (2, 1, *K), (2, 1, 1, L, S), "float", F64),
    "broadcast query": Case((1, *Q), (B, *K), (B, *K), (L, S), "float", F64),
    "broadcast key": Case((B, *Q), (1, *K), (B, *K), None, "", F64, CAUSAL),
    "broadcast heads": Case((1, L, E), K, (1, S, E), (H, L, S), "float", F64),
    "broadcast value": Case((B, 1, *Q), (2, *K), K, None, "", F64),
    "one key": Case(Q, (H, 1, E), (H, 1, E), (L, 1), "float", F64),
    "dropout": Case(Q, K, K, (1, S), "float", F64, DROPOUT),
    "dropout and all else": Case(
        (4, L, E), K, (1, S, 3), (4, 1, S), "-inf", F64, DROPOUT | CAUSAL | GQA | {"scale": 0.5}
    ),
}  # fmt: skip

# One of each kind of call, small but not square: sizes beside 5 queries and 7 keys, options.
NAMED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({}, CAUSAL),
    "causal, L > S": ({"L": 9, "S": 4}, CAUSAL),
    "mask": ({"mask": (2, 1, 5, 7)}, {"scale": -0.3}),
    "bool mask": ({"mask": (5, 7), "kind": "bool"}, CAUSAL),
    "mask with -inf": ({"mask": (1, 7), "kind": "-inf"}, {}),
    "float32 mask": ({"mask": (5, 1), "kind": "float32"}, {}),
    "grouped heads": ({"heads": (6, 2, 3), "mask": (6, 1, 7)}, GQA),
    "broadcast heads": ({"heads": (1, 3, 1)}, {}),
    "value size": ({"Ev": 5}, {"scale": -1.0}),
    "2-D": ({"batch": None}, {}),
    "3-D": ({"batch": (), "heads": 1, "mask": (1, 5, 7)}, {}),
    "5-D": ({"batch": (2, 1)}, {}),
    "no keys": ({"S": 0}, {}),
    "no queries": ({"L": 0}, {}),
    "head_dim 0": ({"E": 0}, {}),
}  # fmt: skip


def make_named(name: str, dtype: torch.dtype = torch.float32) -> tuple[Inputs, dict[str, Any]]:
    sizes, options = NAMED[name]
    return make_inputs(**{"L": 5, "S": 7, "E": 6, "dtype": dtype, **sizes}), options
