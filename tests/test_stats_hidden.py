"""sdpa_stats: what is hidden has no effect; where NaN and infinity go, as in softmax."""

from __future__ import annotations

import pytest
import torch

import torch_attn
from helpers import DTYPES, INF, NAN, Inputs, make_inputs, randn
from test_stats import NAMES, sdpa_stats, textbook


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["bool", "-inf"])
@pytest.mark.parametrize("L", [7, 70])
def test_rows_without_keys(L: int, kind: str, dtype: torch.dtype) -> None:
    visible = torch.rand(L, 130) > 0.3
    visible[[2, L - 1]] = False
    mask = visible if kind == "bool" else randn((L, 130), dtype).masked_fill(~visible, -INF)
    inputs = make_inputs(L, 130, 40, dtype=dtype)._replace(attn_mask=mask)
    stats = torch_attn.sdpa_stats(inputs.query, inputs.key, mask)
    for row in (2, L - 1):
        assert (stats.largest_score[..., row] == -INF).all()
        assert (stats.logsumexp[..., row] == -INF).all()
        assert (stats.entropy[..., row] == 0).all()
        assert (stats.largest_weight[..., row] == 0).all()
    total = stats.received_weight.sum(-1)
    torch.testing.assert_close(total, torch.full_like(total, L - 2))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("L", [1, 7, 70, 1100])
def test_nan_in_a_query_stays_in_its_row(L: int, dtype: torch.dtype) -> None:
    """A NaN reaches the keys that the row may attend to, of its head alone."""
    row, S = L // 2, 1100 if L < 70 else 130
    shape = {"mask": (L, S), "heads": (4, 2, 2)}
    query, key, _, mask = make_inputs(L, S, 40, kind="bool", dtype=dtype, **shape)
    mask[row] = torch.rand(S) > 0.9
    mask[row, 0] = False
    options = {"attn_mask": mask, "enable_gqa": True}
    clean = torch_attn.sdpa_stats(query, key, **options)
    spoilt = query.clone()
    spoilt[1, 2, row, 3] = NAN
    dirty = torch_attn.sdpa_stats(spoilt, key, **options)
    for name in NAMES[:3]:
        is_nan = torch.zeros(2, 4, L, dtype=torch.bool)
        is_nan[1, 2, row] = True
        actual, expected = getattr(dirty, name), getattr(clean, name)
        assert torch.equal(actual.isnan(), is_nan), name
        assert torch.equal(actual[~is_nan], expected[~is_nan]), name
    assert dirty.largest_weight[1, 2, row].isnan()
    is_nan = torch.zeros(2, 4, S, dtype=torch.bool)
    is_nan[1, 2] = mask[row]
    assert torch.equal(dirty.received_weight.isnan(), is_nan)
    untouched = ~is_nan
    untouched[1, 2] = False  # of its head, one row less is summed
    assert torch.equal(dirty.received_weight[untouched], clean.received_weight[untouched])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("L", "S", "bad"), [(7, 1100, 4), (70, 130, 40)])
def test_nan_in_a_key_reaches_rows_that_see_it(
    L: int, S: int, bad: int, causal: bool, dtype: torch.dtype
) -> None:
    query, key, _, mask = make_inputs(L, S, 40, mask=(L, S), kind="bool", dtype=dtype)
    key[..., bad, 1] = NAN
    stats = torch_attn.sdpa_stats(query, key, mask, causal)
    visible = mask.tril() if causal else mask
    sees = visible[:, bad].expand(2, 3, L)
    for name in NAMES[:3]:
        assert torch.equal(getattr(stats, name).isnan(), sees), name
    reached = (visible & visible[:, bad, None]).any(0).expand(2, 3, S)
    assert torch.equal(stats.received_weight.isnan(), reached)
    # Hidden from all rows, it is nowhere.
    mask[:, bad] = False
    stats = torch_attn.sdpa_stats(query, key, mask, causal)
    assert not any(t.isnan().any() for t in stats)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_mask", [False, True])
def test_infinite_scores(with_mask: bool, dtype: torch.dtype, kernels: str) -> None:
    """-inf is a key that is masked; +inf leaves its row without weights, as in softmax."""
    query, key = torch.ones(4, 2, dtype=dtype), torch.zeros(130, 2, dtype=dtype)
    key[:, 1] = torch.linspace(-1, 1, 130).to(dtype)
    query[1, 0], query[2, 0], key[7, 0] = -1, 1, INF
    query[0, 0] = query[3, 0] = 0  # 0 times inf is NaN
    mask = torch.zeros(4, 130, dtype=dtype) if with_mask else None
    stats = torch_attn.sdpa_stats(query, key, mask, scale=1.0)
    assert stats.largest_score.isnan().tolist() == [True, False, False, True]
    assert stats.logsumexp.isnan().tolist() == [True, False, False, True]
    assert stats.entropy.isnan().tolist() == [True, False, True, True]
    assert stats.largest_score[2] == stats.logsumexp[2] == INF
    assert stats.largest_weight[2].isnan()
    # Row 1 is as if key 7 were masked.
    others = torch.arange(130) != 7
    masked = torch_attn.sdpa_stats(query[1:2], key, others[None], scale=1.0)
    exact = textbook(Inputs(query[1:2], key[others], key[others]), torch.float64, scale=1.0)
    for name in NAMES[:3]:
        torch.testing.assert_close(getattr(stats, name)[1:2], getattr(masked, name))
        torch.testing.assert_close(
            getattr(stats, name)[1:2].double(), exact[name], rtol=1e-5, atol=1e-6
        )
    assert stats.received_weight.isnan().all()
    alone = torch_attn.sdpa_stats(query[1:2], key, None if mask is None else mask[1:2], scale=1.0)
    assert alone.received_weight[7] == 0
    assert alone.received_weight.isfinite().all()
    # +inf and NaN in one row: the NaN is not lost.
    both = key.clone()
    both[100, 0] = NAN
    assert torch_attn.sdpa_stats(query[2:3], both, scale=1.0).largest_score.isnan().all()
    assert torch_attn.sdpa_stats(query[2:3], both.flip(0), scale=1.0).logsumexp.isnan().all()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("L", [1, 7, 70])
@pytest.mark.parametrize("causal", [False, True])
def test_nothing_of_hidden_tiles_is_read(causal: bool, L: int, dtype: torch.dtype) -> None:
    S = 2000  # several splits, of which some see nothing
    inputs = make_inputs(L, S, 40, dtype=dtype)
    if not causal:
        inputs = inputs._replace(attn_mask=torch.arange(S).expand(L, S) < 100)
    clean = sdpa_stats(inputs, is_causal=causal)
    key = inputs.key.clone()
    key[..., 128:, :] = NAN
    dirty = sdpa_stats(inputs._replace(key=key), is_causal=causal)
    for name in NAMES:
        assert torch.equal(dirty[name], clean[name]), name
    assert (dirty["received_weight"][..., 100:] == 0).all()
