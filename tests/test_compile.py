"""torch.compile and make_fx: one graph, one compile for all lengths, derivatives inside of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch.func import grad, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import torch_attn
from helpers import Inputs, assert_same_bits, make_grad_output, make_inputs, results

ops = torch.ops.attn


@pytest.fixture(autouse=True)
def _start_anew() -> Iterator[None]:
    torch.set_num_threads(1)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Recorder:
    """A backend that runs graphs as they are and lists their operators of this library.

    One list for each graph that was compiled: forward, backward.
    """

    def __init__(self) -> None:
        self.graphs: list[list[Any]] = []

    def compile(self, graph: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Any:
        self.graphs.append(operators(graph))
        return make_boxed_func(graph.forward)

    @property
    def backend(self) -> Any:
        return aot_autograd(fw_compiler=self.compile)


def operators(graph: torch.fx.GraphModule) -> list[Any]:
    targets = [node.target for node in graph.graph.nodes]
    return [getattr(ops, t._opname) for t in targets if getattr(t, "namespace", None) == "attn"]


# Options as a function of the lengths, whose values change from call to call; sizes of some.
OPTIONS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "causal": lambda L, S: {"is_causal": True},
    "grouped heads": lambda L, S: {"enable_gqa": True, "scale": 0.3},
    "mask": lambda L, S: {"is_causal": True},
    "mask of keys": lambda L, S: {},
    "bool mask": lambda L, S: {},
    "numbers": lambda L, S: {"query_offset": S - L, "key_lengths": S - 1, "is_causal": True},
    "negative offset": lambda L, S: {"query_offset": L - S, "window_size": (5, 3)},
    "tensors": lambda L, S: {
        "query_offset": torch.tensor(S - L),
        "key_lengths": torch.arange(L % 7 + 5) % S,
        "window_size": (7, 0),
    },
    "soft cap, slopes, sinks": lambda L, S: {
        "softcap": 2.0,
        "alibi_slopes": torch.full((3,), 1 / L),
        "sinks": torch.arange(3.0),
    },
}
SIZES: dict[str, dict[str, Any]] = {
    "grouped heads": {"heads": (4, 2, 1)},
    "mask": {"mask": ("L", "S")},
    "mask of keys": {"mask": (1, "S")},
    "bool mask": {"mask": (1, "S"), "kind": "bool"},
}


def make_option(option: str, length: int) -> Inputs:
    # equal sizes in a first call would be taken for one and the same
    sizes = {"L": length, "S": 2 * length + 3, "batch": (length % 7 + 5,), **SIZES.get(option, {})}
    if "mask" in sizes:
        sizes["mask"] = tuple(sizes.get(n, n) for n in sizes["mask"])
    return make_inputs(**sizes)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("dynamic", "compiles"), [(True, 1), (None, 2)])
@pytest.mark.parametrize("option", OPTIONS)
def test_one_compile_for_all_lengths(option: str, dynamic: bool | None, compiles: int) -> None:
    """Numbers that depend on the lengths are symbolic where these are; tensors are inputs.

    With dynamic=None PyTorch takes sizes for constants until a second call differs.
    """
    options_of = OPTIONS[option]
    recorder, counter = Recorder(), CompileCounter()

    def function(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **tensors: Tensor
    ) -> Tensor:
        options = options_of(query.size(-2), key.size(-2))
        return torch_attn.sdpa(query, key, value, mask, **{**options, **tensors})

    forward = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=counter)
    training = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=recorder.backend)
    for length in (5, 8, 33, 64, 65, 100):
        inputs = make_option(option, length)
        options = options_of(length, inputs.key.size(-2))
        given = {n: t for n, t in options.items() if isinstance(t, Tensor)}
        grad_output = make_grad_output(inputs, **options)
        expected = results(function, inputs, grad_output, **given)
        assert_same_bits(results(training, inputs, grad_output, **given), expected)
        assert torch.equal(forward(*inputs, **given), function(*inputs, **given))
    assert counter.frame_count == compiles
    # Backward is compiled once in each, and computes nothing of the forward again.
    assert recorder.graphs == [[ops._sdpa_forward], [ops._sdpa_backward]] * compiles


@pytest.mark.parametrize("option", ["plain", "numbers"])
def test_inference_has_one_operator(option: str) -> None:
    """Also if the tensors require gradients and none is recorded."""
    recorder = Recorder()

    def function(*x: Tensor) -> Tensor:
        offset = x[1].size(-2) - x[0].size(-2)
        options = {"query_offset": offset, "is_causal": True} if option == "numbers" else {}
        return torch_attn.sdpa(*x, **options)

    compiled = torch.compile(function, fullgraph=True, backend=recorder.backend)
    for L in (5, 9):
        inputs = make_inputs(L, 7)[:3]
        assert torch.equal(compiled(*inputs), function(*inputs))
    learning = make_inputs(5, 7).require_grad()[:3]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            compiled(*learning)
    assert recorder.graphs
    operator = ops.sdpa if option == "plain" else ops.attention
    assert recorder.graphs == [[operator]] * len(recorder.graphs)


@pytest.mark.regression
@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("options", [{}, {"window_size": (3, 0)}], ids=["plain", "window"])
def test_results_share_no_memory(options: dict[str, Any]) -> None:
    """PyTorch warns of results that share memory: two empty ones were one tensor."""
    inputs = make_inputs(5, 7).require_grad()[:3]
    compiled = torch.compile(torch_attn.sdpa, fullgraph=True, backend="aot_eager")
    compiled(*inputs, **options).sum().backward()


def scalar(*x: Tensor) -> Tensor:
    # Nothing more: PyTorch's own forward over reverse of a product takes sizes for constants.
    return torch_attn.sdpa(*x, is_causal=True).sum()


gradient = grad(scalar, (0, 1, 2))
# A function of query, key and value, and the operators that its graph has.
DERIVATIVES: dict[str, tuple[Callable[..., Any], set[Any]]] = {
    "grad": (gradient, {ops._sdpa_backward}),
    "jvp": (lambda *x: jvp(torch_attn.sdpa, x, x)[1], {ops._sdpa_tangent}),
    "forward over reverse": (
        lambda *x: jvp(gradient, x, x)[1],
        {ops._sdpa_tangent, ops._sdpa_second},
    ),
    "reverse over reverse": (
        lambda *x: vjp(gradient, *x)[1](x),
        {ops._sdpa_tangent, ops._sdpa_second},
    ),
    "reverse over forward": (
        lambda *x: grad(lambda *y: jvp(scalar, y, x)[1], (0, 1, 2))(*x),
        {ops._sdpa_tangent, ops._sdpa_second},
    ),
    "gradients of each sample": (vmap(gradient), {ops._sdpa_backward}),
    "jacrev": (jacrev(torch_attn.sdpa), {ops._sdpa_backward}),
}


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_inside(name: str) -> None:
    """A derivative within the compiled function is part of its one graph, by our operators."""
    function, expected = DERIVATIVES[name]
    recorder = Recorder()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=recorder.backend)
    for length in (4, 9):
        inputs = make_inputs(length, length + 1)[:3]
        torch.testing.assert_close(compiled(*inputs), function(*inputs))
    [used] = recorder.graphs
    assert expected <= set(used) <= expected | {ops._sdpa_forward, ops._sdpa_backward}


@pytest.mark.slow  # compiles
@pytest.mark.usefixtures("device")
def test_inductor() -> None:
    """The default backend, with a second derivative in the graph."""
    function = DERIVATIVES["forward over reverse"][0]
    inputs = make_inputs(9, 13)[:3]
    compiled = torch.compile(function, fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), function(*inputs))


@pytest.mark.slow  # compiles
@pytest.mark.regression
@pytest.mark.parametrize(
    "layer",
    [
        lambda x: torch_attn.sdpa(x, x, x, is_causal=True),
        lambda x: torch_attn.sdpa(x, x, x, window_size=(3, 1)),
        lambda x: torch_attn.sdpa_with_weights(x, x, x)[0],
    ],
    ids=["sdpa", "window", "weights"],
)
def test_checkpoints_with_dynamic_shapes(layer: Callable[[Tensor], Tensor]) -> None:
    """Two, where dynamo takes what a function has by default for an input of the graph."""

    def layers(x: Tensor) -> Tensor:
        return checkpoint(layer, checkpoint(layer, x, use_reentrant=False), use_reentrant=False)

    x = torch.randn(2, 3, 9, 8, requires_grad=True)
    compiled = torch.compile(layers, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(x), layers(x))


@pytest.mark.usefixtures("device")
def test_dropout() -> None:
    """The backward drops what the forward dropped: <u, A V> = <A'u, V> for the weights kept, A."""
    compiled = torch.compile(torch_attn.sdpa, fullgraph=True, backend="aot_eager")
    query, key, value, _ = make_inputs(30, 40, dtype=torch.float64)
    value.requires_grad_()
    outputs = []
    for _ in range(2):
        output = compiled(query, key, value, dropout_p=0.5)
        u = torch.randn_like(output)
        (gradient,) = torch.autograd.grad(output, value, u)
        torch.testing.assert_close((u * output).sum(), (gradient * value).sum())
        outputs.append(output)
    assert not torch.equal(*outputs)


def test_autocast(device: str) -> None:
    def function(*x: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return torch_attn.sdpa(*x)

    inputs = make_inputs(9, 13, mask=(9, 13))
    grad_output = torch.randn(2, 3, 9, 16, dtype=torch.bfloat16)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    expected = results(function, inputs, grad_output)
    assert expected["output"].dtype == torch.bfloat16
    assert_same_bits(results(compiled, inputs, grad_output), expected)


def test_error_names_the_argument() -> None:
    compiled = torch.compile(torch_attn.sdpa, fullgraph=True, backend="aot_eager")
    query, key, _, _ = make_inputs(5, 7, 8)
    with pytest.raises(Exception, match="key"):
        compiled(query, key[..., :3], key)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(mode: str) -> None:
    """A trace has the operators, and holds for other sizes."""

    def both_orders(*x: Tensor) -> Any:
        leaves = [t.detach().requires_grad_() for t in x]
        first = torch.autograd.grad(scalar(*leaves), leaves, create_graph=True)
        return first, torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    traced = make_fx(both_orders, tracing_mode=mode)(*make_inputs(5, 7)[:3])
    assert operators(traced)[:4] == [
        ops._sdpa_forward,
        ops._sdpa_backward,
        ops._sdpa_tangent,
        ops._sdpa_second,
    ]
    inputs = make_inputs(9, 11, batch=(4,))[:3] if mode == "symbolic" else make_inputs(5, 7)[:3]
    torch.testing.assert_close(traced(*inputs), both_orders(*inputs))


def test_functionalize() -> None:
    inputs = make_inputs(5, 7)[:3]
    traced = make_fx(torch.func.functionalize(lambda *x: torch_attn.sdpa(*x)))(*inputs)
    assert operators(traced) == [ops.sdpa]
    assert torch.equal(traced(*inputs), torch_attn.sdpa(*inputs))


# For query [B, 4, L, 8], key and value [B, 4, S, 8] and mask [L, S], the dimensions of which the
# compiler is told nothing: (argument, dimension).
UNBACKED = {
    "batch": [("query", 0), ("key", 0), ("value", 0)],
    "batch of the key": [("key", 0), ("value", 0)],
    "heads": [("query", 1), ("key", 1), ("value", 1)],
    "queries": [("query", 2), ("mask", 0)],
    "keys": [("key", 2), ("value", 2), ("mask", 1)],
    "all": [
        *[("query", 0), ("key", 0), ("value", 0), ("query", 2), ("mask", 0)],
        *[("key", 2), ("value", 2), ("mask", 1)],
    ],
}


@pytest.mark.regression
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("unbacked", "transposed", "requires_grad"),
    [(name, (i + j) % 2 == 0, j == 1) for i, name in enumerate(UNBACKED) for j in (0, 1)],
)
def test_sizes_that_only_a_run_tells(unbacked: str, transposed: bool, requires_grad: bool) -> None:
    """Sizes such as torch.nonzero's: no question is asked of them while compiling."""

    def make(batch: int, L: int, S: int) -> dict[str, Tensor]:
        query, key, value, mask = make_inputs(L, S, 8, batch=(batch,), heads=4, mask=(L, S))
        if transposed:  # the view that models make of [B, L, H, E]
            query, key, value = (
                t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value)
            )
        return {"query": query, "key": key, "value": value, "mask": mask}

    inputs = make(3, 5, 7)
    for name, dimension in UNBACKED[unbacked]:
        torch._dynamo.decorators.mark_unbacked(inputs[name], dimension)
    compiled = torch.compile(torch_attn.sdpa, fullgraph=True, backend="aot_eager")
    others = make(
        3 if unbacked not in ("batch", "all") else 2,
        5 if unbacked not in ("queries", "all") else 6,
        7 if unbacked not in ("keys", "all") else 1,
    )
    for arguments in (inputs, others):
        leaves = [t.requires_grad_(requires_grad) for t in arguments.values()]
        actual, expected = compiled(*leaves), torch_attn.sdpa(*leaves)
        assert torch.equal(actual, expected)
        assert actual.stride() == expected.stride()
        if requires_grad:
            gradients = (
                torch.autograd.grad(out.square().sum(), leaves) for out in (actual, expected)
            )
            assert all(map(torch.equal, *gradients))


@pytest.mark.usefixtures("device")
def test_sizes_that_a_run_finds_unequal() -> None:
    """What is not asked while compiling is checked in the run."""
    query, key, value, _ = make_inputs(5, 7, 8)
    for tensor in (key, value):
        torch._dynamo.decorators.mark_unbacked(tensor, 2)
    compiled = torch.compile(torch_attn.sdpa, fullgraph=True, backend="aot_eager")
    compiled(query, key, value)
    with pytest.raises((RuntimeError, AssertionError)):
        compiled(query, key[:, :, 1:], value)


def test_a_scale_of_one_number_ends_the_graph() -> None:
    """The built-in's scale, too, must be a number of the graph."""
    query, key, value, _ = make_inputs(5, 7, 8)
    scale = torch.tensor(0.3)
    expected = torch_attn.sdpa(query, key, value, scale=0.3)
    for operator in (torch_attn.sdpa, F.scaled_dot_product_attention):

        def attend(scale: Tensor, operator: Any = operator) -> Tensor:
            return operator(query, key, value, scale=scale)

        for run in (attend, torch.compile(attend, backend="aot_eager")):
            torch.testing.assert_close(run(scale), expected)
        torch.compiler.reset()
        with pytest.raises(torch._dynamo.exc.TorchDynamoException):
            torch.compile(attend, backend="aot_eager", fullgraph=True)(scale)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compiled_autograd_is_refused() -> None:
    query, key, value, _ = make_inputs(5, 7, 8)
    output = torch_attn.sdpa(query.requires_grad_(), key, value)
    message = "attn::sdpa does not support compiled autograd: call backward"
    compiler = torch.compile(backend="eager")
    with torch._dynamo.compiled_autograd._enable(compiler), pytest.raises(Exception, match=message):
        output.sum().backward()
