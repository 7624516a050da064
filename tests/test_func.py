"""torch.func: vmap, grad, vjp, jvp, Jacobians and Hessians, and their compositions.

A UserWarning is an error: PyTorch warns where vmap falls back to a loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.gradcheck import gradcheck, gradgradcheck
from torch.func import (
    functional_call,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    vjp,
    vmap,
)

import torch_attn
from _cases import SMALL
from helpers import SEED, Inputs, make_inputs
from test_derivatives import differentiable
from torch_attn import reference

pytestmark = [
    pytest.mark.filterwarnings("error::UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]

N = 4  # samples of a vmap
F64 = torch.float64
TENSORS = Inputs._fields
SUBSETS = [s for n in range(1, 5) for s in itertools.combinations(TENSORS, n)]

# One sample: sizes beside the dtype, options.
SAMPLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "2-D": ({"batch": None, "mask": (5, 7)}, {}),
    "heads": ({"batch": (), "mask": (3, 5, 7)}, {"is_causal": True}),
    "4-D": ({"mask": (5, 7)}, {"scale": 0.3}),
    "mask of keys": ({"mask": (1, 7)}, {}),
    "mask of queries": ({"mask": (2, 1, 5, 1)}, {"is_causal": True}),
    "bool mask": ({"mask": (3, 1, 7), "kind": "bool"}, {}),
    "mask with -inf": ({"mask": (3, 1, 7), "kind": "-inf"}, {}),
    "grouped heads": ({"heads": (4, 2, 1), "Ev": 3, "mask": (4, 1, 7)}, {"enable_gqa": True}),
    "broadcast heads": ({"batch": (), "heads": (3, 1, 1), "mask": (1, 1)}, {}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """For problems of a few numbers, where waking another thread takes longest."""
    torch.set_num_threads(1)


def make_sample(sample: str) -> tuple[Inputs, dict[str, Any]]:
    sizes, options = SAMPLES[sample]
    return make_inputs(**{"L": 5, "S": 7, "E": 4, "dtype": F64, **sizes}), options


def make_mapped(sample: str, subset: tuple[str, ...]) -> tuple[Inputs, tuple[int | None, ...], Any]:
    """Inputs of N samples, at which dimension they are mapped, options.

    Each tensor has the mapped dimension at another place, counted from either end.
    """
    samples = [make_sample(sample)[0] for _ in range(N)]
    tensors, in_dims = [], []
    for i, name in enumerate(TENSORS):
        parts = [getattr(s, name) for s in samples]
        if name not in subset:
            tensors.append(parts[0])
            in_dims.append(None)
        else:
            dim = (i + len(subset)) % (parts[0].dim() + 1)
            tensors.append(torch.stack(parts, dim))
            in_dims.append(dim if i % 2 else dim - parts[0].dim() - 1)
    return Inputs(*tensors), tuple(in_dims), SAMPLES[sample][1]


def loop(function: Callable[..., Any], in_dims: tuple[int | None, ...], *tensors: Tensor) -> Any:
    """What vmap means."""
    results = [
        function(
            *(t if d is None else t.select(d, n) for t, d in zip(tensors, in_dims, strict=True))
        )
        for n in range(N)
    ]
    return torch.utils._pytree.tree_map(lambda *parts: torch.stack(parts), *results)


def assert_is_a_loop(
    function: Callable[..., Any], in_dims: tuple[int | None, ...], *tensors: Tensor
) -> None:
    actual = vmap(function, in_dims)(*tensors)
    torch.testing.assert_close(actual, loop(function, in_dims, *tensors))


def gradients(argnums: tuple[int, ...], **options: Any) -> Callable[..., tuple[Tensor, ...]]:
    """The gradients of a loss as a function of the inputs."""
    return grad(lambda *x: torch_attn.sdpa(*x, **options).sin().sum(), argnums)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("subset", SUBSETS, ids="-".join)
@pytest.mark.parametrize("sample", SAMPLES)
def test_vmap(sample: str, subset: tuple[str, ...]) -> None:
    """Output and gradients, mapped over some of the inputs, equal a loop's."""
    inputs, in_dims, options = make_mapped(sample, subset)

    def function(*x: Tensor) -> Tensor:
        return torch_attn.sdpa(*x, **options)

    assert_is_a_loop(function, in_dims, *inputs)
    wanted = (0, 1, 2, 3)[: 4 if inputs.attn_mask.is_floating_point() else 3]
    assert_is_a_loop(gradients(wanted, **options), in_dims, *inputs)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("first", SUBSETS, ids="-".join)
@pytest.mark.parametrize("order", ["grad", "jvp"])
def test_nested(order: str, first: tuple[str, ...]) -> None:
    """vmap of vmap, each over its own inputs, around a derivative."""
    second = TENSORS[: 5 - len(first)][::-1]
    samples = [make_mapped("heads", first) for _ in range(N)]
    in_dims, options = samples[0][1:]
    outer = tuple(0 if name in second else None for name in TENSORS)
    inputs = [
        torch.stack(parts) if name in second else parts[0]
        for name, *parts in zip(TENSORS, *(s[0] for s in samples), strict=True)
    ]

    def derivative(*x: Tensor) -> Any:
        if order == "grad":
            return gradients((0, 1, 2, 3), **options)(*x)
        return jvp(lambda *y: torch_attn.sdpa(*y, **options), x, tuple(t.cos() for t in x))

    actual = vmap(vmap(derivative, in_dims), outer)(*inputs)
    expected = loop(lambda *x: loop(derivative, in_dims, *x), outer, *inputs)
    torch.testing.assert_close(actual, expected)


def all_derivatives(function: Callable[..., tuple[Tensor, ...]], learned: int) -> Any:
    """jvp, vjp and Hessian-vector products in each order; the first arguments have derivatives."""

    def derivatives(*arguments: Tensor) -> Any:
        x, fixed = arguments[:learned], arguments[learned:]
        t = tuple(a.isfinite() * a.nan_to_num(neginf=0).cos() for a in x)

        def results(*y: Tensor) -> tuple[Tensor, ...]:
            return function(*y, *fixed)

        def loss_of(tensors: tuple[Tensor, ...]) -> Tensor:
            return sum(tensor.sin().sum() for tensor in tensors)

        gradient = grad(lambda *y: loss_of(results(*y)), tuple(range(learned)))
        along = grad(lambda *y: loss_of(jvp(results, y, t)[1]), tuple(range(learned)))
        outputs, tangents = jvp(results, x, t)
        pulled = vjp(results, *x)[1](tuple(output.cos() for output in outputs))
        return tangents, pulled, jvp(gradient, x, t)[1], vjp(gradient, *x)[1](t), along(*x)

    return derivatives


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("sample", [s for s in SAMPLES if SAMPLES[s][0].get("kind") != "bool"])
@pytest.mark.parametrize("subset", [TENSORS, ("query",), ("key", "attn_mask")], ids="-".join)
def test_vmap_of_derivatives(sample: str, subset: tuple[str, ...]) -> None:
    """jvp, vjp and Hessian-vector products in each order, mapped."""
    inputs, in_dims, options = make_mapped(sample, subset)

    def function(*x: Tensor) -> tuple[Tensor]:
        return (torch_attn.sdpa(*x, **options),)

    assert_is_a_loop(all_derivatives(function, 4), in_dims, *inputs)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("argnum", range(4), ids=TENSORS)
@pytest.mark.parametrize("sample", ["heads", "grouped heads", "mask of queries"])
def test_jacobians(sample: str, argnum: int) -> None:
    inputs, options = make_sample(sample)

    def derivatives(sdpa: Callable[..., Tensor]) -> Any:
        def function(*x: Tensor) -> Tensor:
            return sdpa(*x, **options)

        def scalar(*x: Tensor) -> Tensor:
            return function(*x).sin().sum()

        return [
            jacrev(function, argnum)(*inputs),
            jacfwd(function, argnum)(*inputs),
            jacrev(function, argnum, chunk_size=5)(*inputs),
            hessian(scalar, argnum)(*inputs),
            jacrev(jacfwd(scalar, argnum), argnum)(*inputs),
            jacrev(jacrev(scalar, argnum), argnum)(*inputs),
            jacfwd(jacfwd(scalar, argnum), argnum)(*inputs),
        ]

    torch.testing.assert_close(derivatives(torch_attn.sdpa), derivatives(reference.sdpa))


@pytest.mark.usefixtures("device")
def test_mixed_hessian() -> None:
    """All blocks, query against key and so on, mapped over samples."""
    inputs, in_dims, options = make_mapped("2-D", ("query", "value"))

    def blocks(sdpa: Callable[..., Tensor]) -> Any:
        scalar = lambda *x: sdpa(*x, **options).sin().sum()  # noqa: E731
        return vmap(hessian(scalar, (0, 1, 2, 3)), in_dims)(*inputs)

    torch.testing.assert_close(blocks(torch_attn.sdpa), blocks(reference.sdpa))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("case", ["mask and causal", "grouped heads", "mask of keys", "dropout"])
def test_batched_gradcheck(case: str) -> None:
    """`is_grads_batched` and vmap over tangents."""
    function, tensors = differentiable(SMALL[case])
    forward = case != "dropout"  # a forward under vmap would have to draw
    assert gradcheck(
        function,
        tensors,
        check_batched_grad=True,
        check_forward_ad=forward,
        check_batched_forward_grad=forward,
    )
    assert gradgradcheck(function, tensors, check_batched_grad=True)


class Block(nn.Module):
    """An attention with a bias that is learned."""

    def __init__(self, dropout_p: float = 0.0) -> None:
        super().__init__()
        self.dropout_p = dropout_p
        self.project = nn.Linear(8, 24, dtype=F64)
        self.bias = nn.Parameter(torch.randn(2, 1, 6, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        """[*, 6, 8] -> [*, 6, 8]."""
        query, key, value = (
            t.unflatten(-1, (2, 4)).transpose(-3, -2) for t in self.project(x).chunk(3, -1)
        )
        output = torch_attn.sdpa(query, key, value, self.bias, self.dropout_p, is_causal=True)
        return output.transpose(-3, -2).flatten(-2)


@pytest.mark.usefixtures("device")
def test_gradients_of_each_sample() -> None:
    """Gradients of every parameter for every sample, as backward of one sample at a time."""
    model, x = Block(), torch.randn(N, 6, 8, dtype=F64)
    parameters = dict(model.named_parameters())

    def loss(values: dict[str, Tensor], sample: Tensor) -> Tensor:
        return functional_call(model, values, (sample,)).square().sum()

    actual = vmap(grad(loss), (None, 0))(parameters, x)
    for n in range(N):
        model.zero_grad()
        model(x[n]).square().sum().backward()
        for name, parameter in parameters.items():
            torch.testing.assert_close(actual[name][n], parameter.grad)


# --- options --------------------------------------------------------------------------------------

# What may be mapped of a sample [2, 3, 5 or 7, 4] and its options, by shapes: the six tensors that
# may have derivatives, and integers.
LEARNED = {
    "query": (2, 3, 5, 4),
    "key": (2, 3, 7, 4),
    "value": (2, 3, 7, 4),
    "attn_mask": (2, 1, 5, 7),
    "alibi_slopes": (2, 3),
    "sinks": (3,),
}
POSITIONS = {"query_offset": (2,), "key_lengths": ()}
NAMES = [*LEARNED, *POSITIONS]
MAPPED = [
    *((name,) for name in NAMES),
    *itertools.combinations(("query", "alibi_slopes", "sinks", "query_offset", "key_lengths"), 2),
    tuple(NAMES),
]
FIXED: dict[str, Any] = {"window_size": (4, 1), "softcap": 2.0}


def make_options(mapped: tuple[str, ...]) -> tuple[list[Tensor], tuple[int | None, ...]]:
    """All tensors, those that are mapped with one dimension more, each at another place."""
    tensors, in_dims = [], []
    for i, (name, shape) in enumerate((LEARNED | POSITIONS).items()):
        dim = (i + len(mapped)) % (len(shape) + 1) if name in mapped else None
        sizes = shape if dim is None else (*shape[:dim], N, *shape[dim:])
        drawn = torch.randint(2, 6, sizes) if name in POSITIONS else torch.randn(sizes, dtype=F64)
        tensors.append(drawn)
        in_dims.append(dim)
    return tensors, tuple(in_dims)


def with_options(*tensors: Tensor) -> tuple[Tensor, ...]:
    options = dict(zip(NAMES[3:], tensors[3:], strict=True))
    return torch_attn.sdpa_with_logsumexp(*tensors[:3], **options, **FIXED)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("mapped", MAPPED, ids="-".join)
def test_options(mapped: tuple[str, ...]) -> None:
    """All results, and the gradients of all six tensors through two of them."""
    tensors, in_dims = make_options(mapped)

    def loss(*x: Tensor) -> Tensor:
        output, logsumexp, _ = with_options(*x)
        return output.sin().sum() + logsumexp.cos().sum()

    def statistics(*x: Tensor) -> tuple[Tensor, ...]:
        options = dict(zip(NAMES[3:], x[3:], strict=True))
        return tuple(torch_attn.sdpa_stats(*x[:2], **options, **FIXED))

    def weights(*x: Tensor) -> tuple[Tensor, ...]:
        options = dict(zip(NAMES[3:], x[3:], strict=True))
        return torch_attn.sdpa_with_weights(*x[:3], **options, **FIXED)

    for function in (with_options, grad(loss, tuple(range(6))), statistics, weights):
        assert_is_a_loop(function, in_dims, *tensors)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    "mapped", [("sinks",), ("alibi_slopes", "key_lengths"), ("query_offset",), tuple(NAMES)],
    ids="-".join,
)  # fmt: skip
def test_derivatives_with_options(mapped: tuple[str, ...]) -> None:
    """jvp, vjp and Hessian-vector products, through output and logsumexp, mapped."""
    tensors, in_dims = make_options(mapped)

    def function(*x: Tensor) -> tuple[Tensor, ...]:
        return with_options(*x)[:2]

    assert_is_a_loop(all_derivatives(function, 6), in_dims, *tensors)


@pytest.mark.usefixtures("device")
def test_options_nested() -> None:
    """vmap of vmap: sinks in one, lengths in the other."""
    query, key, value = torch.randn(3, 3, 5, 4, dtype=F64)
    sinks = torch.randn(N, 3, dtype=F64)
    lengths = torch.tensor([1, 0, 5, 3])

    def gradient(sinks: Tensor, length: Tensor) -> Tensor:
        def loss(s: Tensor) -> Tensor:
            return torch_attn.sdpa(query, key, value, sinks=s, key_lengths=length).sin().sum()

        return grad(loss)(sinks)

    actual = vmap(vmap(gradient, (None, 0)), (0, None))(sinks, lengths)
    expected = torch.stack([torch.stack([gradient(s, n) for n in lengths]) for s in sinks])
    torch.testing.assert_close(actual, expected)


@pytest.mark.cpu  # on a GPU lengths are clamped, and not checked
@pytest.mark.usefixtures("device")
def test_lengths_are_checked_under_vmap() -> None:
    """The lengths of all samples are checked at once, before anything is read."""
    x = torch.randn(N, 3, 5, 4)
    with pytest.raises(RuntimeError, match="key_lengths is 6"):
        vmap(lambda x, n: torch_attn.sdpa(x, x, x, key_lengths=n))(x, torch.tensor([1, 2, 6, 3]))


def test_errors_name_the_argument() -> None:
    query, key = torch.randn(N, 5, 4), torch.randn(N, 7, 3)
    with pytest.raises(RuntimeError, match="key"):
        vmap(torch_attn.sdpa)(query, key, key)
    with pytest.raises(RuntimeError, match=r"query .* at least 2"):
        vmap(torch_attn.sdpa)(query[:, 0], key, key)


# --- dropout: the randomness of vmap --------------------------------------------------------------


P = 0.5


def dropped(value: Tensor, query: Tensor | None = None) -> Tensor:
    """Drops from equal weights: with the unit matrix as value, the output tells which it kept."""
    S = value.size(-2)
    query = torch.zeros(20, 1, dtype=F64) if query is None else query
    return torch_attn.sdpa(query, torch.zeros(S, 1, dtype=F64), value, None, P)


@pytest.mark.usefixtures("device")
def test_randomness_error() -> None:
    value = torch.eye(30, dtype=F64)
    with pytest.raises(RuntimeError, match="randomness='different' or 'same'"):
        vmap(dropped)(value.expand(N, 30, 30))
    with pytest.raises(RuntimeError, match="randomness='different' or 'same'"):
        vmap(grad(lambda v: dropped(v).sum()))(value.expand(N, 30, 30))
    no_dropout = vmap(lambda v: torch_attn.sdpa(v, v, v))(value.expand(N, 30, 30))
    assert no_dropout.shape == (N, 30, 30)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("which", ["value", "query", "nothing of ours"])
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_randomness(randomness: str, which: str) -> None:
    value, query = torch.eye(30, dtype=F64), torch.zeros(20, 1, dtype=F64)

    def function(n: Tensor) -> Tensor:
        mapped = {"value": value + 0 * n} if which == "value" else {"value": value}
        mapped |= {"query": query + 0 * n} if which == "query" else {"query": query}
        return dropped(**mapped)

    def draw() -> Tensor:
        torch.manual_seed(SEED)
        return vmap(function, randomness=randomness)(torch.zeros(N, dtype=F64)) != 0

    masks = draw()
    assert 0.4 < masks.double().mean() < 0.6
    for one, other in itertools.combinations(masks, 2):
        assert torch.equal(one, other) == (randomness == "same")
        agreement = (one == other).double().mean()
        assert agreement == 1 if randomness == "same" else abs(agreement - 0.5) < 0.1
    assert torch.equal(draw(), masks)
    again = vmap(function, randomness=randomness)(torch.zeros(N, dtype=F64)) != 0
    assert not torch.equal(again, masks)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_randomness_with_options(randomness: str) -> None:
    """Dropout is of the output alone: it does not change a row's logsumexp."""
    value, lengths = torch.eye(30, dtype=F64), torch.tensor([30, 30, 20, 20])
    query, key = torch.zeros(20, 1, dtype=F64), torch.zeros(30, 1, dtype=F64)

    def function(length: Tensor) -> tuple[Tensor, ...]:
        return torch_attn.sdpa_with_logsumexp(
            query, key, value, dropout_p=P, key_lengths=length, sinks=torch.zeros(1, dtype=F64)
        )

    outputs, logsumexp, _ = vmap(function, randomness=randomness)(lengths)
    masks = (outputs != 0)[:, :, :20]
    for one, other in itertools.combinations(masks, 2):
        assert torch.equal(one, other) == (randomness == "same")
    expected = (lengths + 1.0).log()[:, None].expand(N, 20)
    torch.testing.assert_close(logsumexp, expected.double(), check_dtype=False)
    with pytest.raises(RuntimeError, match="randomness='different' or 'same'"):
        vmap(function)(lengths)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("outer", ["same", "different"])
@pytest.mark.parametrize("inner", ["same", "different"])
def test_randomness_nested(inner: str, outer: str) -> None:
    value = torch.eye(30, dtype=F64).expand(N, N, 30, 30)
    masks = vmap(vmap(dropped, randomness=inner), randomness=outer)(value) != 0
    for i, j, k, l in itertools.product(range(N), repeat=4):
        if (i, j) != (k, l):
            same = (i == k or outer == "same") and (j == l or inner == "same")
            assert torch.equal(masks[i, j], masks[k, l]) == same, (i, j, k, l)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_backward_sees_the_mask_of_the_forward(randomness: str) -> None:
    value = torch.randn(N, 3, 30, 8, dtype=F64)
    query = torch.randn(3, 20, 8, dtype=F64)
    key = torch.randn(3, 30, 8, dtype=F64)

    def attention(value: Tensor, query: Tensor) -> Tensor:
        return torch_attn.sdpa(query, key, value, None, P)

    def checks(value: Tensor) -> list[Tensor]:
        """The output is A V with the weights kept A: <u, A V> = <A'u, V>, and J V = A V."""
        output, pull = vjp(lambda v: attention(v, query), value)
        (pulled,) = pull(output)
        jacobian, again = jacrev(lambda v: (attention(v, query),) * 2, has_aux=True)(value)
        primal, tangent = jvp(lambda v: attention(v, query), (value,), (value,))
        # the same within a second derivative: d/ds <d O/d(query) with value s V> = that itself
        (direction,) = (query.cos(),)
        moved, back = vjp(
            lambda v: jvp(lambda q: attention(v, q), (query,), (direction,))[1], value
        )
        return [
            (output * output).sum() - (pulled * value).sum(),
            torch.einsum("...abc,abc->...", jacobian, value) - again,
            primal - tangent,
            (moved * moved).sum() - (back(moved)[0] * value).sum(),
        ]

    for difference in vmap(checks, randomness=randomness)(value):
        torch.testing.assert_close(difference, torch.zeros_like(difference))


@pytest.mark.usefixtures("device")
def test_jacobians_with_dropout() -> None:
    """Within vmap, of a call that draws: the rows and columns of one mask."""
    value = torch.randn(N, 30, 2, dtype=F64)

    def both(value: Tensor) -> tuple[Tensor, Tensor]:
        jacobian, output = jacrev(lambda v: (dropped(v),) * 2, has_aux=True)(value)
        return torch.einsum("abcd,cd->ab", jacobian, value), output

    torch.testing.assert_close(*vmap(both, randomness="different")(value))
    forward = jacfwd(lambda v: (dropped(v),) * 2, has_aux=True, randomness="same")
    jacobian, output = forward(value[0])
    torch.testing.assert_close(torch.einsum("abcd,cd->ab", jacobian, value[0]), output)


@pytest.mark.usefixtures("device")
def test_gradients_of_each_sample_with_dropout() -> None:
    """Per-sample gradients of a model that drops: repeatable, and other for every sample."""
    model = Block(dropout_p=P)
    x = torch.randn(6, 8, dtype=F64).expand(N, 6, 8)
    parameters = dict(model.named_parameters())

    def loss(values: dict[str, Tensor], sample: Tensor) -> Tensor:
        return functional_call(model, values, (sample,)).square().sum()

    def per_sample(randomness: str) -> Tensor:
        torch.manual_seed(SEED)
        return vmap(grad(loss), (None, 0), randomness=randomness)(parameters, x)["bias"]

    different, same = per_sample("different"), per_sample("same")
    assert torch.equal(per_sample("different"), different)
    for one, other in itertools.combinations(range(N), 2):
        assert not torch.equal(different[one], different[other])
        torch.testing.assert_close(same[one], same[other])


# --- numbers that are tensors ---------------------------------------------------------------------


FUNCTIONS = {"sdpa": torch_attn.sdpa, "sdpa_with_weights": torch_attn.sdpa_with_weights}


@pytest.mark.parametrize("name", ["scale", "dropout_p"])
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_number_has_no_derivative(function: Callable[..., Any], name: str) -> None:
    """Asking for one is an error, as it is with the built-in, and no zero."""
    x = torch.randn(2, 5, 8)
    number = torch.tensor(0.5, requires_grad=True)

    def call(number: Tensor) -> Tensor:
        return torch.utils._pytree.tree_leaves(function(x, x, x, **{name: number}))[0]

    message = f"{name} is a tensor that wants a derivative and would get none; it must be a number"
    for wanted in (
        lambda: call(number),
        lambda: call(nn.Parameter(number.detach())),
        lambda: grad(lambda n: call(n).sum())(number.detach()),
        lambda: jvp(call, (number.detach(),), (torch.ones(()),)),
        lambda: torch.compile(call, backend="eager")(number),
    ):
        with pytest.raises(TypeError, match=message):
            wanted()
    with pytest.raises(TypeError, match=f"argument '{name}'.* must be float, not Tensor"):
        F.scaled_dot_product_attention(x, x, x, **{name: number})


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_number_may_be_of_any_type(function: Callable[..., Any]) -> None:
    x = torch.randn(2, 5, 8)
    expected = function(x, x, x, None, 1.0, scale=2.0)
    for one, two in ((1, 2), (torch.tensor(1.0), torch.tensor(2.0)), (True, 2.0)):
        actual = function(x, x, x, None, one, scale=two)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
