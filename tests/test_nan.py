"""NaN: nothing beyond the tensors is read, and each NaN goes where it belongs and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torch_attn
from helpers import (
    DTYPES,
    INF,
    NAN,
    Inputs,
    assert_same_bits,
    make_grad_output,
    make_inputs,
    results,
    with_two_dtypes,
)

pytestmark = pytest.mark.usefixtures("kernels")

# Numbers of keys below, at and above the width of vectors and tiles, each with two dtypes; and each
# dtype with three numbers.
of_keys = pytest.mark.parametrize(("S", "dtype"), with_two_dtypes((1, 7, 16, 17, 64, 200)))


def split_rows(dirty: Tensor, clean: Tensor, reached: Tensor) -> tuple[Tensor, bool]:
    """The rows that a NaN should reach; whether all others have the bits of the clean run."""
    return dirty[reached], torch.equal(dirty[~reached], clean[~reached])


@of_keys
@pytest.mark.parametrize("is_causal", [False, True])
def test_query(S: int, is_causal: bool, dtype: torch.dtype) -> None:
    """Its own row is NaN throughout, every other row is untouched."""
    inputs = make_inputs(20, S, 9, dtype=dtype)
    clean = torch_attn.sdpa(*inputs, is_causal=is_causal)
    rows = torch.zeros(2, 3, 20, dtype=torch.bool)
    rows[0, 1, 0] = rows[1, 2, 19] = rows[1, 0, 7] = True
    for column in (0, 8):
        query = inputs.query.clone()
        query[..., column][rows] = NAN
        dirty = torch_attn.sdpa(*inputs._replace(query=query), is_causal=is_causal)
        reached, others_untouched = split_rows(dirty, clean, rows)
        assert reached.isnan().all()
        assert others_untouched


def masks_that_hide(hidden: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        "bool": ~hidden,
        "-inf": torch.randn(hidden.shape, dtype=dtype).masked_fill(hidden, -INF),
        "float32 -inf": torch.randn(hidden.shape).masked_fill(hidden, -INF),
    }


@of_keys
@pytest.mark.parametrize("kind", ["bool", "-inf", "float32 -inf", "causal"])
def test_key(S: int, kind: str, dtype: torch.dtype) -> None:
    """It reaches the rows that attend to it and no other, in the output and in grad_query."""
    L = 20
    inputs = make_inputs(L, S, 9, dtype=dtype)
    where = torch.rand(L, S) < 0.5
    where[torch.arange(L), torch.randint(S, (L,))] = False  # no row attends to nothing
    if kind == "causal":
        where = torch.ones(L, S, dtype=torch.bool).triu(1)
        options = {"is_causal": True}
    else:
        inputs = inputs._replace(attn_mask=masks_that_hide(where, dtype)[kind])
        options = {}
    grad_output = make_grad_output(inputs, **options)
    clean = results(torch_attn.sdpa, inputs, grad_output, **options)
    for bad in {0, S // 2, S - 1}:
        key = inputs.key.clone()
        key[0, 1, bad, 3] = NAN
        dirty = results(torch_attn.sdpa, inputs._replace(key=key), grad_output, **options)
        rows = torch.zeros(2, 3, L, dtype=torch.bool)
        rows[0, 1] = ~where[:, bad]
        for name in ("output", "grad_query"):
            reached, others_untouched = split_rows(dirty[name], clean[name], rows)
            assert reached.isnan().all(), name
            assert others_untouched, name


found = pytest.mark.regression  # rows that do not fill the vectors of a last tile


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "bad"), [("bool", INF), ("-inf", NAN), ("float32 -inf", -INF)])
@pytest.mark.parametrize(
    ("L", "S"),
    [
        (20, 1),
        (20, 40),
        pytest.param(21, 40, marks=found),
        pytest.param(65, 6, marks=found),
        (200, 130),
    ],
)
def test_key_that_no_row_attends_to(
    L: int, S: int, kind: str, bad: float, dtype: torch.dtype
) -> None:
    """Padding may hold anything: no result sees it, no gradient reaches it."""
    inputs = make_inputs(L, S, 9, dtype=dtype)
    padding = torch.zeros(1, S, dtype=torch.bool)
    padding[:, S // 2 :] = True
    inputs = inputs._replace(attn_mask=masks_that_hide(padding, dtype)[kind])
    grad_output = make_grad_output(inputs)
    clean = results(torch_attn.sdpa, inputs, grad_output)
    key = inputs.key.clone()
    key[..., S // 2 :, :] = bad
    dirty = results(torch_attn.sdpa, inputs._replace(key=key), grad_output)
    assert_same_bits(dirty, clean)
    assert (dirty["grad_key"][..., S // 2 :, :] == 0).all()
    assert (dirty["grad_value"][..., S // 2 :, :] == 0).all()


@pytest.mark.regression
@pytest.mark.parametrize("bad", [NAN, float("inf")])
@pytest.mark.parametrize("L", [65, 200])
def test_key_hidden_by_a_row_that_all_queries_share(L: int, bad: float) -> None:
    """The mask's gradient, and that gradient's own, sum no more than the last tile's rows."""
    inputs = make_inputs(L, 6, 8)
    mask = torch.zeros(1, 6)
    mask[:, 4:] = -torch.inf
    key = inputs.key.clone()
    key[..., 4:, :] = bad

    def gradients(key: Tensor) -> tuple[Tensor, ...]:
        query, bias = (x.clone().requires_grad_() for x in (inputs.query, mask))
        loss = torch_attn.sdpa(query, key, inputs.value, bias).square().sum()
        first = torch.autograd.grad(loss, (query, bias), create_graph=True)
        return (first[1], *torch.autograd.grad((first[0] * inputs.query).sum(), (query, bias)))

    for dirty, clean in zip(gradients(key), gradients(inputs.key), strict=True):
        assert torch.equal(dirty, clean)


def up_to_tiles(where: Tensor, size: int = 128) -> Tensor:
    """All rows of each tile that has a row in `where`."""
    count = len(where)
    tiles = torch.nn.functional.pad(where, (0, 0, 0, -count % size)).unflatten(0, (-1, size))
    return tiles.any(1, keepdim=True).expand_as(tiles).flatten(0, 1)[:count]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("E", [64, 128])
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("where", ["query", "key", "value", "grad_output"])
def test_one_number_and_gradients(where: str, bad: float, E: int, dtype: torch.dtype) -> None:
    """A NaN of a query or key reaches what attends to it; all else reaches no further tile.

    Where it does not reach, gradients have the bits that they have without it. A key that no row
    sees may hold anything.
    """
    L, S, at, column = 200, 230, 90, 5
    options = {"is_causal": True, "key_lengths": torch.tensor([210])}
    inputs = make_inputs(L, S, E, batch=(1,), heads=1, dtype=dtype)
    grad_output = make_grad_output(inputs, **options)
    clean = results(torch_attn.sdpa, inputs, grad_output, **options)

    def plant(row: int) -> dict[str, Tensor]:
        tensors = {**inputs._asdict(), "grad_output": grad_output}
        tensors[where] = tensors[where].clone()
        tensors[where][..., row, column] = bad
        gradient = tensors.pop("grad_output")
        return results(torch_attn.sdpa, Inputs(**tensors), gradient, **options)

    dirty = plant(at)
    rows, keys = torch.arange(L)[:, None], torch.arange(S)[:, None]
    row, behind, seen, used, none = rows == at, rows >= at, keys <= at, keys < L, keys < 0
    reached = {  # of grad_query, grad_key, grad_value
        "query": (row, seen, seen),
        "key": (behind, used, used),
        "value": (behind, used, none),
        "grad_output": (row, seen, seen & (torch.arange(E) == column)),
    }
    for name, expected in zip(("query", "key", "value"), reached[where], strict=True):
        gradient, without = dirty[f"grad_{name}"][0, 0], clean[f"grad_{name}"][0, 0]
        finite, expected = gradient.isfinite(), expected.expand_as(gradient)
        if where in ("query", "key") and bad != INF:
            assert torch.equal(~finite, expected), name
        assert (finite | up_to_tiles(expected)).all(), name
        if (where, bad) != ("key", INF):  # a score of -inf is a weight of 0
            assert not (finite & expected).any(), name
            assert torch.equal(gradient[finite], without[finite]), name
    if where in ("key", "value"):
        assert_same_bits(plant(215), clean)


@of_keys
def test_value(S: int, dtype: torch.dtype) -> None:
    """It reaches the rows that attend to it, and stays in its head."""
    inputs = make_inputs(20, S, 9, dtype=dtype)
    clean = torch_attn.sdpa(*inputs)
    value = inputs.value.clone()
    value[0, 1, S // 2, 4] = NAN
    dirty = torch_attn.sdpa(*inputs._replace(value=value))
    assert dirty[0, 1, :, 4].isnan().all()
    assert not dirty[0, 1, :, :4].isnan().any()
    dirty[0, 1] = clean[0, 1]
    assert torch.equal(dirty, clean)


@of_keys
@pytest.mark.parametrize("mask_dtype", [None, torch.float32])
def test_mask(S: int, dtype: torch.dtype, mask_dtype: torch.dtype | None) -> None:
    """It makes its row NaN, and no other."""
    inputs = make_inputs(20, S, 9, dtype=dtype)
    mask = torch.randn(20, S, dtype=mask_dtype or dtype)
    clean = torch_attn.sdpa(*inputs[:3], mask)
    mask[7, S - 1] = NAN
    dirty = torch_attn.sdpa(*inputs[:3], mask)
    assert dirty[..., 7, :].isnan().all()
    dirty[..., 7, :] = clean[..., 7, :]
    assert torch.equal(dirty, clean)


@of_keys
def test_fully_masked_row(S: int, dtype: torch.dtype) -> None:
    """0, whatever its query and the keys hold."""
    query, key, value, _ = make_inputs(20, S, 9, dtype=dtype)
    mask = torch.ones(20, S, dtype=torch.bool)
    mask[3] = False
    query[..., 3, :] = NAN
    assert (torch_attn.sdpa(query, key, value, mask)[..., 3, :] == 0).all()
    output = torch_attn.sdpa(query, key * NAN, value, torch.zeros(1, 1, dtype=torch.bool))
    assert (output == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_keys(dtype: torch.dtype) -> None:
    """The keys of one query are shared out among threads."""
    query, key, value, _ = make_inputs(1, 3000, 9, batch=(), heads=1, dtype=dtype)
    mask = torch.ones(1, 3000, dtype=torch.bool)
    mask[:, 1999] = False
    clean = torch_attn.sdpa(query, key, value, mask)
    key[:, 1999] = NAN
    assert torch.equal(torch_attn.sdpa(query, key, value, mask), clean)
    assert torch_attn.sdpa(query, key, value).isnan().all()
    mask[:, :2500] = False
    key[:, :2500] = NAN
    assert torch_attn.sdpa(query, key, value, mask).isfinite().all()
    assert torch_attn.sdpa(query * NAN, key, value, mask).isnan().all()


def test_infinite_scores_are_not_hidden() -> None:
    """inf - inf is NaN, as in the formula; one key at -inf score is only a weight of 0."""
    query = torch.ones(1, 1)
    value = torch.tensor([[1.0], [2.0]])
    assert torch_attn.sdpa(query, torch.tensor([[INF], [1.0]]), value).isnan().all()
    assert torch_attn.sdpa(query, torch.tensor([[-INF], [1.0]]), value).item() == 2.0
