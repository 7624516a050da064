"""sdpa_stats and the parts of PyTorch: no derivatives, and an error that says so; vmap, compile."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.bias import causal_upper_left

import torch_attn
from _cases import NAMED, make_named
from helpers import make_inputs
from test_stats import NAMES, sdpa_stats
from torch_attn import Stats

# --- derivatives: none, and it says so ------------------------------------------------------------

NO_DERIVATIVE = r"sdpa_stats: its results have no derivatives.*sdpa_with_weights.*detach"


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("argument", ["query", "key", "attn_mask"])
@pytest.mark.parametrize("name", NAMES)
def test_gradient_raises(name: str, argument: str) -> None:
    inputs = make_inputs(5, 7, mask=(5, 7))
    getattr(inputs, argument).requires_grad_()
    result = sdpa_stats(inputs)[name]
    assert result.requires_grad
    assert result.grad_fn.name() == "SdpaStatsBackward"
    with pytest.raises(RuntimeError, match=NO_DERIVATIVE):
        result.sum().backward()


@pytest.mark.usefixtures("device")
def test_logging_in_a_training_step() -> None:
    """The gradients of a loss that does not take them, whether detached or not."""
    inputs = make_inputs(5, 7).require_grad()
    expected = torch.autograd.grad(torch_attn.sdpa(*inputs).square().sum(), inputs[:3])
    output = torch_attn.sdpa(*inputs)
    stats = sdpa_stats(inputs)
    logged = {name: t.detach().mean().item() for name, t in stats.items()}
    assert all(map(math.isfinite, logged.values()))
    assert torch_attn.sdpa_stats(*inputs[:2]).entropy.mean().item() == logged["entropy"]
    actual = torch.autograd.grad(output.square().sum(), inputs[:3])
    assert all(map(torch.equal, actual, expected))
    with torch.no_grad():
        assert not any(t.requires_grad for t in sdpa_stats(inputs).values())


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("argument", ["query", "key", "attn_mask"])
# of PyTorch's own forward mode
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_forward_mode_raises(argument: str) -> None:
    inputs = make_inputs(5, 7, mask=(5, 7))
    with forward_ad.dual_level():
        tensor = getattr(inputs, argument)
        dual = forward_ad.make_dual(tensor, torch.ones_like(tensor))
        with pytest.raises(RuntimeError, match=NO_DERIVATIVE):
            sdpa_stats(inputs._replace(**{argument: dual}))
    with pytest.raises(RuntimeError, match=NO_DERIVATIVE):
        torch.func.jvp(
            lambda t: torch_attn.sdpa_stats(t, inputs.key), (inputs.query,), (inputs.query,)
        )


@pytest.mark.usefixtures("device")
def test_torch_func() -> None:
    """grad of a function that returns them besides; and of them."""
    query, key, value, _ = make_inputs(5, 7)

    def loss(query: Tensor) -> tuple[Tensor, Tensor]:
        output = torch_attn.sdpa(query, key, value)
        return output.sum(), torch_attn.sdpa_stats(query, key).entropy

    gradient, entropy = torch.func.grad(loss, has_aux=True)(query)
    assert torch.equal(entropy, torch_attn.sdpa_stats(query, key).entropy)
    assert gradient.shape == query.shape
    with pytest.raises(RuntimeError, match=NO_DERIVATIVE):
        torch.func.grad(lambda q: torch_attn.sdpa_stats(q, key).entropy.sum())(query)


def test_scale_that_wants_a_derivative() -> None:
    query = torch.randn(5, 8)
    message = r"^attn::sdpa_stats: scale is a tensor that wants a derivative .* pass scale.item\(\)"
    with pytest.raises(TypeError, match=message):
        torch_attn.sdpa_stats(query, query, scale=torch.tensor(1.0, requires_grad=True))
    expected = torch_attn.sdpa_stats(query, query, scale=0.5)
    actual = torch_attn.sdpa_stats(query, query, scale=torch.tensor(0.5))
    assert all(map(torch.equal, actual, expected))


# --- the parts of PyTorch -------------------------------------------------------------------------


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("kind", [kind for kind in NAMED if kind != "no keys"])
@pytest.mark.parametrize("mapped", ["all", "query", "key", "attn_mask"])
def test_vmap(mapped: str, kind: str) -> None:
    """Equals a loop over the samples; one call, whatever is mapped."""
    samples = [make_named(kind)[0] for _ in range(3)]
    options = NAMED[kind][1]
    if mapped == "attn_mask" and samples[0].attn_mask is None:
        scores = samples[0].query.size(-2), samples[0].key.size(-2)
        samples = [s._replace(attn_mask=torch.rand(scores) > 0.3) for s in samples]
    dims, arguments = [], []
    for name in ("query", "key", "attn_mask"):
        tensors = [getattr(s, name) for s in samples]
        is_mapped = mapped in ("all", name) and tensors[0] is not None
        dims.append(1 if is_mapped else None)
        arguments.append(torch.stack(tensors, 1) if is_mapped else tensors[0])

    def call(query: Tensor, key: Tensor, mask: Tensor | None) -> Stats:
        return torch_attn.sdpa_stats(query, key, mask, **options)

    with torch.profiler.profile() as timeline:
        actual = torch.vmap(call, in_dims=tuple(dims))(*arguments)
    below = [e for e in timeline.events() if e.name == "attn::sdpa_stats"]
    assert len(below) <= 2  # above vmap and below
    for i in range(3):
        sample = [a if d is None else a.select(d, i) for a, d in zip(arguments, dims, strict=True)]
        for name, expected in call(*sample)._asdict().items():
            torch.testing.assert_close(getattr(actual, name)[i], expected, msg=name)


def test_vmap_of_vmap_and_of_nothing() -> None:
    query, key = torch.randn(2, 3, 5, 8), torch.randn(2, 7, 8)
    inner = torch.vmap(torch_attn.sdpa_stats, in_dims=(0, None))
    actual = torch.vmap(inner)(query, key)
    expected = torch_attn.sdpa_stats(query, key[:, None])
    for name in NAMES:
        torch.testing.assert_close(getattr(actual, name), getattr(expected, name))
    nothing = torch.vmap(lambda x: torch_attn.sdpa_stats(query[0, 0], key[0]).entropy + 0 * x)
    alone = torch_attn.sdpa_stats(query[0, 0], key[0]).entropy
    assert torch.equal(nothing(torch.zeros(2, 1)), alone.expand(2, 5))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", ["plain", "mask", "grouped heads"])
def test_compile(kind: str, dynamic: bool) -> None:
    """One graph, the class that is returned included."""
    inputs, options = make_named(kind)
    query, key, _, mask = inputs

    def function(query: Tensor, key: Tensor, mask: Tensor | None) -> tuple[Stats, Tensor]:
        stats = torch_attn.sdpa_stats(query, key, mask, **options)
        return stats, stats.largest_weight

    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    stats, weight = compiled(query, key, mask)
    expected, expected_weight = function(query, key, mask)
    assert isinstance(stats, Stats)
    assert all(map(torch.equal, stats, expected))
    assert torch.equal(weight, expected_weight)


@pytest.mark.usefixtures("device")
@pytest.mark.filterwarnings("ignore:Error detected in SdpaStatsBackward")  # says where, too
def test_compiled_training_step() -> None:
    """Runs with detached query and key; otherwise the compiler, which differentiates, is told."""
    inputs = make_inputs(5, 7)

    def step(detached: bool) -> Any:
        def function(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            output = torch_attn.sdpa(query, key, value)
            if detached:
                query, key = query.detach(), key.detach()
            return output.sum(), torch_attn.sdpa_stats(query, key).entropy

        torch.compiler.reset()
        leaves = inputs.require_grad()[:3]
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        loss, entropy = compiled(*leaves)
        return torch.autograd.grad(loss, leaves), entropy

    gradients, entropy = step(detached=True)
    leaves = inputs.require_grad()[:3]
    expected = torch.autograd.grad(torch_attn.sdpa(*leaves).sum(), leaves)
    assert all(map(torch.equal, gradients, expected))
    assert torch.equal(entropy, sdpa_stats(inputs)["entropy"])
    with pytest.raises(Exception, match=NO_DERIVATIVE):
        step(detached=False)


def test_make_fx() -> None:
    inputs = make_inputs(5, 7)
    traced = make_fx(lambda *x: torch_attn.sdpa_stats(*x), tracing_mode="symbolic")(*inputs[:2])
    other = make_inputs(9, 11, batch=(4,))[:2]
    assert all(map(torch.equal, traced(*other), torch_attn.sdpa_stats(*other)))


def test_errors_with_a_causal_bias() -> None:
    query, key, _, _ = make_inputs(5, 7)
    causal = causal_upper_left(5, 7)
    with pytest.raises(ValueError, match="is_causal is True and attn_mask a CausalBias"):
        torch_attn.sdpa_stats(query, key, causal, is_causal=True)
    with pytest.raises(TypeError, match="key is a CausalBias"):
        torch_attn.sdpa_stats(query, causal, causal)
