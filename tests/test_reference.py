"""The oracle itself is checked three ways: by hand, by loops without tensors, by PyTorch."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.attention import SDPBackend, sdpa_kernel

from torch_attn import reference

INF = math.inf


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def matrix(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


# By hand


def test_four_tokens() -> None:
    """Two-dimensional tokens that are query, key and value at once; the first row on paper."""
    tokens = matrix([[0.9, 0.1], [0.2, 0.8], [0.1, 0.9], [0.8, 0.2]])
    output, weights, scores = reference.sdpa_with_weights(tokens, tokens, tokens)

    raw = matrix([[0.82, 0.26, 0.18, 0.74]])  # 0.9*0.9 + 0.1*0.1, 0.9*0.2 + 0.1*0.8, ...
    torch.testing.assert_close(scores[:1], raw / math.sqrt(2))
    # exp(0.5798) = 1.7857, 1.2018, 1.1357, 1.6875; their sum is 5.8108
    by_hand = matrix([[0.3073, 0.2068, 0.1955, 0.2904]])
    torch.testing.assert_close(weights[:1], by_hand, atol=6e-5, rtol=0)
    torch.testing.assert_close(output[0], weights[0] @ tokens)
    # Both components of every token sum to 1, so the components of every average of tokens do.
    torch.testing.assert_close(output.sum(-1), torch.ones(4, dtype=torch.float64))


def test_scores_are_scaled_dot_products() -> None:
    query = matrix([[2.0, 1.0, 3.0]])
    key = matrix([[-1.0, 2.0, -1.0], [1.5, 0.0, -1.0], [4.0, -2.0, -1.0]])
    for scale, factor in [(1.0, 1.0), (-0.5, -0.5), (0.0, 0.0), (None, 1 / math.sqrt(3))]:
        _, weights, scores = reference.sdpa_with_weights(query, key, key, scale=scale)
        torch.testing.assert_close(scores, matrix([[-3.0, 0.0, 3.0]]) * factor)
        torch.testing.assert_close(weights, scores.softmax(-1))


# By loops over numbers: no tensor operation, no broadcasting rule of PyTorch


def loops(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    """`[H, L, E]`, `[Hk, S, E]`, `[Hv, S, Ev]` and a mask `[H, L, S]`, with grouped heads."""
    heads, queries, size = query.shape
    output = torch.zeros(heads, queries, value.size(-1), dtype=torch.float64)
    for h, i in itertools.product(range(heads), range(queries)):
        k = key[h * key.size(0) // heads].tolist()
        v = value[h * value.size(0) // heads].tolist()
        exponentials = []
        for j in range(key.size(1)):
            score = scale * sum(query[h, i, e].item() * k[j][e] for e in range(size))
            attends = j <= i or not is_causal
            if mask is not None and mask.dtype == torch.bool:
                attends = attends and bool(mask[h, i, j])
            elif mask is not None:
                score += mask[h, i, j].item()
            exponentials.append(math.exp(score) if attends else 0.0)
        total = sum(exponentials)
        for e in range(value.size(-1)):
            average = sum(p * row[e] for p, row in zip(exponentials, v, strict=True))
            output[h, i, e] = average / total if total else 0.0
    return output


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kind", ["none", "bool", "float"])
@pytest.mark.parametrize("sizes", [(3, 5), (5, 3), (1, 4), (4, 1)], ids=lambda s: f"L{s[0]}S{s[1]}")
@pytest.mark.parametrize("heads", [(2, 2, 2), (4, 2, 1), (6, 2, 3)], ids=lambda h: f"H{h}")
def test_against_loops(
    heads: tuple[int, int, int], sizes: tuple[int, int], kind: str, is_causal: bool
) -> None:
    (H, Hk, Hv), (L, S) = heads, sizes
    query, key, value = random(H, L, 3), random(Hk, S, 3, seed=1), random(Hv, S, 2, seed=2)
    mask = None
    if kind == "bool":
        mask = random(H, L, S, seed=3) > 0
    elif kind == "float":
        mask = random(H, L, S, seed=3)
        mask[mask > 1] = -INF
    expected = loops(query, key, value, mask, is_causal, -0.7)
    actual = reference.sdpa(
        query, key, value, mask, is_causal=is_causal, scale=-0.7, enable_gqa=True
    )
    torch.testing.assert_close(actual, expected)


# By PyTorch, where both are defined


# Shapes of query, key and value.
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "4d": [(2, 3, 4, 5), (2, 3, 6, 5), (2, 3, 6, 7)],
    "2d": [(4, 5), (6, 5), (6, 7)],
    "3d": [(3, 4, 5), (3, 6, 5), (3, 6, 7)],
    "5d-broadcast": [(2, 1, 3, 4, 5), (1, 2, 3, 6, 5), (2, 2, 1, 6, 7)],
    "one-query-batch": [(1, 3, 4, 5), (2, 3, 6, 5), (2, 3, 6, 7)],
    "batch-of-values": [(3, 4, 5), (3, 6, 5), (2, 3, 6, 7)],
}


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "float"])
@pytest.mark.parametrize("scale", [None, 0.0, -1.5])
def test_against_the_built_in(shapes: str, kind: str, scale: float | None) -> None:
    q, k, v = (random(*shape) for shape in SHAPES[shapes])
    L, S = q.size(-2), k.size(-2)
    mask = {"bool": random(L, S) > -1, "float": random(L, S)}.get(kind)
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=kind == "causal", scale=scale
        )
    actual, weights, scores = reference.sdpa_with_weights(
        q, k, v, mask, is_causal=kind == "causal", scale=scale
    )
    torch.testing.assert_close(actual, expected)
    assert weights.shape == scores.shape == (*expected.shape[:-1], S)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_keeps_the_dtype(dtype: torch.dtype) -> None:
    q = random(2, 3, 4).to(dtype)
    for mask in (None, torch.zeros(3, 3), torch.zeros(3, 3, dtype=dtype)):
        for tensor in reference.sdpa_with_weights(q, q, q, mask):
            assert tensor.dtype == dtype


# Corners


def test_fully_masked_row_is_zero_and_differentiable() -> None:
    q, k, v = (random(2, 3, 4, seed=i).requires_grad_() for i in range(3))
    holes = torch.ones(3, 3, dtype=torch.bool)
    holes[1] = False  # nothing for query 1
    holes[2, 0] = False
    added = torch.zeros(3, 3, dtype=torch.float64).masked_fill(~holes, -INF)
    for mask in (holes, added):
        output, weights, scores = reference.sdpa_with_weights(q, k, v, mask)
        assert output[:, 1].eq(0).all()
        assert weights[:, 1].eq(0).all()
        assert scores[:, 1].eq(-INF).all()
        torch.testing.assert_close(weights.sum(-1)[:, 0], torch.ones(2, dtype=torch.float64))
        assert gradcheck(lambda *x, m=mask: reference.sdpa(*x, m), (q, k, v), fast_mode=True)
        assert gradgradcheck(lambda *x, m=mask: reference.sdpa(*x, m), (q, k, v), fast_mode=True)
        (grad_q,) = torch.autograd.grad(output.sum(), q)
        assert grad_q[:, 1].eq(0).all()


def test_masked_key_has_no_say() -> None:
    q, k, v = random(4, 3), random(4, 3, seed=1), random(4, 2, seed=2)
    poisoned = k.clone()
    poisoned[3] = math.nan
    mask = torch.tensor([True, True, True, False]).expand(4, 4)
    added = torch.zeros(4, 4, dtype=torch.float64).masked_fill(~mask, -INF)
    expected = reference.sdpa(q, k[:3], v[:3])
    torch.testing.assert_close(reference.sdpa(q, poisoned, v, mask), expected)
    torch.testing.assert_close(reference.sdpa(q, poisoned, v, added), expected)
    # Causal: only query 3 sees key 3.
    causal = reference.sdpa(q, poisoned, v, is_causal=True)
    assert causal[:3].isfinite().all()
    assert causal[3].isnan().all()


def test_nan_query_stays_in_its_row() -> None:
    q, k = random(4, 3), random(5, 3)
    q[1, 2] = math.nan
    output = reference.sdpa(q, k, k)
    assert output[1].isnan().all()
    assert output[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("sizes", [(0, 3, 2, 4), (3, 0, 2, 4), (3, 5, 0, 4), (3, 5, 2, 0)])
def test_zero_sizes(sizes: tuple[int, int, int, int]) -> None:
    L, S, E, Ev = sizes
    query, key, value = random(2, L, E), random(2, S, E), random(2, S, Ev)
    output = reference.sdpa(query, key, value)
    assert output.shape == (2, L, Ev)
    if S == 0:
        assert output.eq(0).all()
    elif E == 0:  # all scores are 0: the mean of the values
        torch.testing.assert_close(output, value.mean(-2, keepdim=True).expand(2, L, Ev))


def test_dropout_keeps_what_the_mask_says() -> None:
    q, v = random(3, 4), torch.eye(3, dtype=torch.float64)
    keep = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
    output, weights, _ = reference.sdpa_with_weights(q, q, v, dropout_p=0.2, dropout_mask=keep)
    torch.testing.assert_close(output, weights * keep / 0.8)
    torch.testing.assert_close(weights, q.matmul(q.T).div(2).softmax(-1))
    nothing = reference.sdpa(q, q, v, dropout_p=1.0, dropout_mask=torch.zeros_like(keep))
    assert nothing.eq(0).all()


def test_dropout_without_a_mask_is_an_error() -> None:
    q = random(3, 4)
    with pytest.raises(ValueError, match=r"dropout_p = 0.1 needs a dropout_mask"):
        reference.sdpa(q, q, q, dropout_p=0.1)


def test_offset_and_length_of_two_dimensions() -> None:
    """A number for the one sample adds no dimension."""
    query, key, value = random(3, 4), random(5, 4), random(5, 2)
    visible = torch.ones(3, 5, dtype=torch.bool).tril(1)
    visible[:, 3:] = False
    expected = reference.sdpa(query, key, value, visible)
    for offset, length in [(1, 3), (torch.tensor(1), torch.tensor(3))]:
        options = {"query_offset": offset, "key_lengths": length}
        output = reference.sdpa(query, key, value, is_causal=True, **options)
        torch.testing.assert_close(output, expected, rtol=0, atol=0)
