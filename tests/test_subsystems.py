"""The parts of PyTorch that touch an operator: checkpoints, counters, profilers, modes, threads."""

from __future__ import annotations

import concurrent.futures
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.profiler import ProfilerActivity, profile
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import torch_attn
from _second_order import directions, over_forward, over_reverse
from helpers import SEED, Inputs, assert_same_bits, double_backward, make_inputs
from torch_attn import reference

# of PyTorch's, by its own forward mode
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

ops = torch.ops.attn
WAYS = {way.__name__: way for way in (double_backward, over_forward, over_reverse)}


class Attention(nn.Module):
    """Self-attention with a learned bias and dropout in training."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)
        self.bias = nn.Parameter(torch.randn(2, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        """[B, 6, 8] -> [B, 6, 8]."""
        query, key, value = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        p = 0.5 if self.training else 0.0
        output = torch_attn.sdpa(query, key, value, self.bias, p, is_causal=True)
        return output.transpose(1, 2).flatten(-2)


def gradients(module: nn.Module, x: Tensor, wrap: Any = None) -> dict[str, Tensor]:
    module.zero_grad()
    torch.manual_seed(SEED)
    x = x.detach().requires_grad_()
    output = wrap(module, x) if wrap else module(x)
    output.square().sum().backward()
    return {"output": output, "x": x.grad} | {n: p.grad for n, p in module.named_parameters()}


class Calls(TorchDispatchMode):
    """Lists the calls of our operators."""

    def __enter__(self) -> list[Any]:
        super().__enter__()
        self.calls: list[Any] = []
        return self.calls

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "attn":
            self.calls.append(function.overloadpacket)
        return function(*args, **(kwargs or {}))


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant: bool) -> None:
    """The same results with the forward computed twice: dropout is drawn again as it was."""
    module, x = Attention(), torch.randn(3, 6, 8)
    expected = gradients(module, x)

    def wrap(module: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(module, x, use_reentrant=reentrant)

    with Calls() as calls:
        actual = gradients(module, x, wrap)
    if reentrant:  # of few queries the operator for inference has other bits
        torch.testing.assert_close(actual, expected)
    else:
        assert_same_bits(actual, expected)
    first = ops.sdpa if reentrant else ops._sdpa_forward
    assert calls == [first, ops._sdpa_forward, ops._sdpa_backward]


def test_second_derivative_through_a_checkpoint() -> None:
    x = make_inputs(5, 7, mask=(5, 7))
    u, t = torch.randn(2, 3, 5, 16), directions(x)

    def checkpointed(*tensors: Tensor) -> Tensor:
        return checkpoint(torch_attn.sdpa, *tensors, use_reentrant=False)

    expected = double_backward(torch_attn.sdpa, x, u, t)
    assert_same_bits(double_backward(checkpointed, x, u, t), expected)


@pytest.mark.parametrize("saved", [True, False])
def test_selective_checkpoint(saved: bool) -> None:
    """A policy that names the operator decides whether it runs again."""
    module, x = Attention(), torch.randn(3, 6, 8)
    expected = gradients(module, x)

    def policy(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = saved and function == ops._sdpa_forward.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def wrap(module: nn.Module, x: Tensor) -> Tensor:
        def context() -> Any:
            return create_selective_checkpoint_contexts(policy)

        return checkpoint(module, x, use_reentrant=False, context_fn=context)

    with Calls() as calls:
        assert_same_bits(gradients(module, x, wrap), expected)
    again = [] if saved else [ops._sdpa_forward]
    assert calls == [ops._sdpa_forward, *again, ops._sdpa_backward]


def test_saved_tensors_hooks() -> None:
    """What the graph keeps may be moved away and back; all of it is linear in the lengths."""
    x = make_inputs(300, 400, mask=(1, 400)).require_grad()
    sizes = []

    def pack(tensor: Tensor) -> Any:
        sizes.append(tensor.numel())
        return tensor.numpy(force=True).copy()

    with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
        output = torch_attn.sdpa(*x)
    actual = torch.autograd.grad(output.sum(), x)
    expected = torch.autograd.grad(torch_attn.sdpa(*x).sum(), x)
    assert all(map(torch.equal, actual, expected))
    assert 0 < max(sizes) < 300 * 400


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:Error detected in")
def test_anomaly_mode() -> None:
    x = make_inputs(5, 7).require_grad()[:3]
    with torch.autograd.detect_anomaly(check_nan=True):
        output = torch_attn.sdpa(*x)
        first = torch.autograd.grad(output.sum(), x, create_graph=True)
        torch.autograd.grad(sum(g.sum() for g in first), x)
        with pytest.raises(RuntimeError, match="SdpaBackward' returned nan"):
            torch_attn.sdpa(*x).backward(torch.full_like(output, torch.nan))


# --- counters and profilers -----------------------------------------------------------------------


def flops(function: Any, *args: Any, **kwargs: Any) -> dict[Any, int]:
    with FlopCounterMode(display=False) as counter:
        function(*args, **kwargs)
    return dict(counter.flop_counts["Global"])


@pytest.mark.parametrize("heads", [(4, 4, 4), (4, 2, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_flops_are_those_of_the_builtin(causal: bool, heads: tuple[int, int, int]) -> None:
    """Counts as its formulas for the fused forward and backward, which count no CPU operator.

    They count every query head; in torch 2.11 they take no grouped heads.
    """
    x = make_inputs(5, 7, 16, 24, heads=heads)[:3]
    options = {"is_causal": causal, "enable_gqa": True}
    shapes = [(2, 4, *t.shape[2:]) for t in x]
    forward = flop_counter.sdpa_flop_count(*shapes)
    backward = flop_counter.sdpa_backward_flop_count((2, 4, 5, 24), *shapes)
    assert flops(torch_attn.sdpa, *x, **options) == {ops.sdpa: forward}
    scores_twice = 2 * (2 * 2 * 4 * 5 * 7 * 16)
    assert flops(torch_attn.sdpa_stats, *x[:2], **options) == {ops.sdpa_stats: scores_twice}
    leaves = [t.requires_grad_() for t in x]
    counts = flops(lambda: torch_attn.sdpa(*leaves, **options).sum().backward())
    assert counts == {ops._sdpa_forward: forward, ops._sdpa_backward: backward}


def test_flops_of_what_is_asked_for() -> None:
    E, Ev = 16, 24
    x = make_inputs(5, 7, E, Ev)
    pair = 2 * (2 * 3) * 5 * 7
    names = (ops._sdpa_backward, ops._sdpa_tangent, ops._sdpa_second)
    for wanted, products in {  # of E and of Ev, for each of the names
        (True, True, True): ((3, 2), (3, 2), (7, 3)),
        (True, False, False): ((2, 1), (2, 1), (3, 1)),
        (False, True, False): ((2, 1), (2, 1), (3, 1)),
        (False, False, True): ((1, 1), (1, 1), (1, 3)),
    }.items():
        all_directions = zip(directions(x), (*wanted, False), strict=True)
        t = Inputs(*(d if w else None for d, w in all_directions))
        counts = flops(over_reverse, torch_attn.sdpa, x, torch.randn(2, 3, 5, Ev), t)
        for name, (of_E, of_Ev) in zip(names, products, strict=True):
            # over_reverse calls the tangent for the output and for the gradient
            calls = 2 if name is ops._sdpa_tangent else 1
            assert counts[name] == calls * pair * (of_E * E + of_Ev * Ev), name


@pytest.mark.parametrize("window", [(3, -1), (-1, 0), (2, 1), (0, 0), (100, 100)])
@pytest.mark.parametrize(("L", "S"), [(5, 7), (7, 5), (1, 9), (9, 1), (0, 3), (3, 0)])
def test_flops_of_a_window(L: int, S: int, window: tuple[int, int]) -> None:
    """Counts the pairs that it leaves: from the first key, and with an offset from the last."""
    E, Ev = 16, 24
    x = make_inputs(L, S, E, Ev)[:3]
    for causal, offset in itertools.product((False, True), (None, S - L)):
        options = {"window_size": window, "is_causal": causal, "query_offset": offset}
        weights = reference.sdpa_with_weights(*x, **options)[1]
        pairs = int(weights.count_nonzero())
        counts = flops(torch_attn.sdpa, *x, **options)
        assert counts == {ops.attention: 2 * pairs * (E + Ev)}
        counts = flops(torch_attn.sdpa_stats, *x[:2], **options)
        assert counts == {ops.sdpa_stats: 2 * pairs * 2 * E}
        leaves = [t.detach().requires_grad_() for t in x]
        counts = flops(lambda: torch_attn.sdpa(*leaves, **options).sum().backward())  # noqa: B023
        assert counts[ops._sdpa_backward] == 2 * pairs * (3 * E + 2 * Ev)


def test_flops_of_the_gradients_of_slopes_and_sinks() -> None:
    """Slopes go through the softmax as a mask does."""
    E, Ev = 16, 24
    x = make_inputs(5, 7, E, Ev)[:3]
    pair = 2 * (2 * 3) * 5 * 7
    for name, products in {"alibi_slopes": (1, 1), "sinks": (1, 0)}.items():
        leaf = torch.rand(3, requires_grad=True)
        counts = flops(lambda: torch_attn.sdpa(*x, **{name: leaf}).sum().backward())  # noqa: B023
        of_E, of_Ev = products
        assert counts[ops._sdpa_backward] == pair * (of_E * E + of_Ev * Ev)


def test_flops_of_broadcast_inputs() -> None:
    query, key, value = torch.randn(5, 8), torch.randn(2, 3, 7, 8), torch.randn(3, 7, 4)
    assert flops(torch_attn.sdpa, query, key, value) == {ops.sdpa: 2 * 6 * 5 * 7 * (8 + 4)}


def test_profiler_names() -> None:
    """What a timeline shows, with shapes."""
    x = make_inputs(5, 7).require_grad()[:3]
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as timeline:
        torch_attn.sdpa(*[t.detach() for t in x])
        first = torch.autograd.grad(torch_attn.sdpa(*x).sum(), x, create_graph=True)
        torch.autograd.grad(sum(g.sum() for g in first), x)
        torch_attn.sdpa_stats(x[0].detach(), x[1].detach())
    events = {event.key: event for event in timeline.key_averages(group_by_input_shape=True)}
    backwards = ("_sdpa_backward", "_sdpa_tangent", "_sdpa_second")
    for name in ("sdpa", "sdpa_stats", "_sdpa_forward", *backwards):
        assert f"attn::{name}" in events
    assert events["attn::_sdpa_forward"].input_shapes[:2] == [[2, 3, 5, 16], [2, 3, 7, 16]]
    assert "SdpaBackward" in str(list(events))
    assert "SdpaDoubleBackward" in str(list(events))


# --- modes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_fake_tensors(way: str) -> None:
    """Every derivative without data has the shapes, strides and dtypes of the real one."""
    for dtype in (torch.float32, torch.bfloat16):
        x = make_inputs(5, 7, 4, 6, heads=(4, 2, 1), mask=(4, 1, 7), dtype=dtype)
        u, t = torch.randn(2, 4, 5, 6, dtype=dtype), directions(x)
        options = {"enable_gqa": True, "is_causal": True}
        expected = WAYS[way](torch_attn.sdpa, x, u, t, **options)
        with FakeTensorMode() as mode:
            fake = mode.from_tensor
            actual = WAYS[way](torch_attn.sdpa, x.map(fake), fake(u), t.map(fake), **options)
        meta = [x.map(lambda t: t.to("meta")), u.to("meta"), t.map(lambda t: t.to("meta"))]
        on_meta = WAYS[way](torch_attn.sdpa, *meta, **options)
        for name in expected:
            for other in (actual[name], on_meta[name]):
                assert other.shape == expected[name].shape
                assert other.stride() == expected[name].stride()
                assert other.dtype == expected[name].dtype


def test_inference_mode() -> None:
    """Inference tensors go in and out; a derivative of one is refused by autograd, not lost."""
    module, x = Attention().eval(), torch.randn(3, 6, 8)
    with torch.no_grad():
        expected = module(x)
    with torch.inference_mode(), Calls() as calls:
        output = module(x)
    assert calls == [ops.sdpa]
    assert output.is_inference()
    assert torch.equal(output, expected)
    query = torch.randn(3, 5, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        torch_attn.sdpa(query, output[..., :4], output[..., :4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_derivatives_under_autocast(dtype: torch.dtype) -> None:
    """Gradients have the dtypes of the inputs, and the bits of inputs cast by hand."""
    x = make_inputs(9, 13, mask=(9, 13))
    u, t = torch.randn(2, 3, 9, 16, dtype=dtype), directions(x)
    by_hand = double_backward(lambda *a: torch_attn.sdpa(*(b.to(dtype) for b in a)), x, u, t)
    for way in WAYS.values():
        with torch.autocast("cpu", dtype):
            actual = way(torch_attn.sdpa, x, u, t)
        assert_same_bits(actual, by_hand)
        assert actual["tangent"].dtype == dtype
        assert actual["second_query"].dtype == torch.float32


def test_a_tangent_that_is_zero_by_a_bit() -> None:
    query, key, value, _ = make_inputs(5, 7)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(query, torch._efficientzerotensor(query.shape))
        tangent = forward_ad.unpack_dual(torch_attn.sdpa(dual, key, value)).tangent
    assert torch.equal(tangent, torch.zeros_like(query))


def test_functions_are_pickled_by_name() -> None:
    for function in (torch_attn.sdpa, torch_attn.sdpa_with_weights):
        assert pickle.loads(pickle.dumps(function)) is function


@pytest.mark.usefixtures("cpu_capability")
def test_threads() -> None:
    """Second derivatives from several Python threads at once."""
    torch.set_num_threads(2)
    problems = []
    for n in range(6):
        x = make_inputs(40 + n, 70, mask=(1, 70))
        problems.append((x, torch.randn(2, 3, 40 + n, 16), directions(x)))
    expected = [double_backward(torch_attn.sdpa, *given) for given in problems]

    def call(given: Any) -> dict[str, Tensor]:
        return double_backward(torch_attn.sdpa, *given)

    with concurrent.futures.ThreadPoolExecutor(3) as executor:
        for _ in range(3):
            for actual, result in zip(executor.map(call, problems), expected, strict=True):
                assert_same_bits(actual, result)
