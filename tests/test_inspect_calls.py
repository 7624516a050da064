"""What inspect does around a model: modules, hooks, threads, and what it cannot look at."""

from __future__ import annotations

import contextlib
import math
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_attn
from test_inspect import Heads, bert, state


def test_an_exception_leaves_the_model_as_it_was() -> None:
    model, inputs = bert(attn_implementation="eager")
    before = state(model)

    def fail(*_: Any) -> None:
        raise RuntimeError("on purpose")

    hook = model.encoder.layer[1].register_forward_hook(fail)  # type: ignore[union-attr,index]
    with pytest.raises(RuntimeError, match="on purpose"):
        torch_attn.inspect(model, inputs)
    hook.remove()
    assert state(model) == before
    assert model.config._attn_implementation == "eager"  # type: ignore[union-attr]
    assert torch.overrides._get_current_function_mode_stack() == []


def test_inspect_within_an_inspected_model() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Heads()

        def forward(self, x: Tensor) -> Any:
            return torch_attn.inspect(self.inner, (x, x))

    outer = torch_attn.inspect(Outer(), torch.randn(1, 2, 4, 8))
    inner = outer.output
    assert [layer.name for layer in outer.layers] == ["inner"]
    assert [layer.name for layer in inner.layers] == [""]
    assert torch.equal(outer.attentions[0], inner.attentions[0])


class Waits(nn.Module):
    """A module that other threads than the first enter, and leave when they are told to."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.may_leave = threading.Event(), threading.Event()
        # With one hook, PyTorch also calls those that are added while it computes.
        self.register_forward_hook(lambda *_: None)

    def forward(self, x: Tensor) -> Tensor:
        self.entered.set()
        assert self.may_leave.wait(timeout=60)
        return x

    def in_other_thread(self, x: Tensor) -> threading.Thread:
        thread = threading.Thread(target=self, args=(x,))
        thread.start()
        assert self.entered.wait(timeout=60)
        return thread


class Meets(nn.Module):
    """Another thread enters or leaves a module of the same model while this one computes."""

    def __init__(self, thread_enters: bool) -> None:
        super().__init__()
        self.waits, self.heads, self.thread_enters = Waits(), Heads(), thread_enters
        self.thread: threading.Thread | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.thread_enters:
            self.thread = self.waits.in_other_thread(x)
        else:
            self.finish()
        return F.scaled_dot_product_attention(x, x, self.heads(x, x))

    def finish(self) -> None:
        self.waits.may_leave.set()
        assert self.thread is not None
        self.thread.join(timeout=60)
        assert not self.thread.is_alive()


@pytest.mark.parametrize("thread_enters", [True, False])
def test_another_thread_computes_with_the_same_model(thread_enters: bool) -> None:
    x = torch.randn(1, 2, 4, 8)
    model = Meets(thread_enters)
    if not thread_enters:
        model.thread = model.waits.in_other_thread(x)
    inspection = torch_attn.inspect(model, x)
    model.finish()
    assert [layer.name for layer in inspection.layers] == ["heads", ""]


def test_threads_that_inspect_take_turns() -> None:
    """What a model of transformers computes with is a setting that they share."""
    model, inputs = bert(attn_implementation="eager")
    first, second = Waits(), Waits()
    model.waits = first

    def wait(module: nn.Module, args: Any) -> None:
        module.waits(torch.ones(1))  # type: ignore[operator]

    hook = model.register_forward_pre_hook(wait)
    found: list[Any] = []

    def look() -> None:
        found.append(torch_attn.inspect(model, inputs))

    threads = [threading.Thread(target=look) for _ in range(2)]
    threads[0].start()
    assert first.entered.wait(timeout=60)
    model.waits = second
    threads[1].start()
    assert not second.entered.wait(timeout=0.2)
    first.may_leave.set()
    assert second.entered.wait(timeout=60)
    second.may_leave.set()
    for thread in threads:
        thread.join(timeout=60)
    hook.remove()
    assert [len(inspection.layers) for inspection in found] == [2, 2]
    assert model.config._attn_implementation == "eager"  # type: ignore[union-attr]


@pytest.mark.parametrize("of_all_modules", [False, True])
def test_a_hook_that_raises_before_a_module(of_all_modules: bool) -> None:
    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fails = Heads()

        def forward(self, x: Tensor) -> Tensor:
            with contextlib.suppress(ArithmeticError):
                self.fails(x, x)
            return F.scaled_dot_product_attention(x, x, x)

    model = nn.Sequential(Tries())

    def fail(module: nn.Module, args: Any) -> None:
        if isinstance(module, Heads):
            raise ArithmeticError

    register = nn.modules.module.register_module_forward_pre_hook
    hook = (register if of_all_modules else model[0].fails.register_forward_pre_hook)(fail)  # type: ignore[union-attr,operator]
    try:
        inspection = torch_attn.inspect(model, torch.randn(1, 2, 4, 8))
    finally:
        hook.remove()
    assert [layer.name for layer in inspection.layers] == ["0"]


def test_a_module_that_calls_itself_and_fails() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.depth = Heads(), 0

        def forward(self, x: Tensor) -> Tensor:
            with contextlib.suppress(ArithmeticError):
                self(x)
            return F.scaled_dot_product_attention(x, x, self.inner(x, x))

    model = nn.Sequential(Twice())

    def fail(module: nn.Module, args: Any) -> None:
        module.depth += 1  # type: ignore[operator,assignment]
        if module.depth == 2:
            raise ArithmeticError

    model[0].register_forward_pre_hook(fail)
    inspection = torch_attn.inspect(model, torch.randn(1, 2, 4, 8))
    assert [layer.name for layer in inspection.layers] == ["0.inner", "0"]


def test_a_shared_module_has_a_number_for_each_call() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = Heads()

        def forward(self, x: Tensor) -> Tensor:
            return self.shared(self.shared(x, x), x)

    inspection = torch_attn.inspect(Twice(), torch.randn(1, 2, 4, 8))
    assert [(layer.name, layer.call) for layer in inspection.layers] == [
        ("shared", 0),
        ("shared", 1),
    ]
    assert "shared (call 2)" in str(inspection)


def test_a_compiled_model_is_looked_into_and_stays_compiled() -> None:
    compiled = torch.compile(AttendsToItself(), backend="eager")
    x = torch.randn(1, 2, 4, 8)
    compiled(x)
    frames = torch._dynamo.utils.counters["frames"]["ok"]
    inspection = torch_attn.inspect(compiled, x)
    assert [layer.name for layer in inspection.layers] == [""]
    compiled(x)
    assert torch._dynamo.utils.counters["frames"]["ok"] == frames


def test_where_nothing_is_seen_the_error_says_why() -> None:
    class Softmax(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x @ x.mT).softmax(-1) @ x

    with pytest.raises(RuntimeError, match=r"Softmax called no attention .* write the softmax out"):
        torch_attn.inspect(Softmax(), torch.randn(4, 8))


def test_nested_tensors_are_named() -> None:
    texts = [torch.randn(n, 2, 8) for n in (3, 5)]
    nested = torch.nested.nested_tensor(texts, layout=torch.jagged).transpose(1, 2)
    with pytest.raises(RuntimeError, match=r"its tensors are nested; inspect .* padded"):
        torch_attn.inspect(Heads(), (nested, nested))


class AttendsToItself(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


class Samples(nn.Module):
    """Calls attention of each sample, under the transforms of ``torch.func``."""

    def __init__(self, *batched: bool, with_gradient: bool = False) -> None:
        super().__init__()
        self.heads, self.batched, self.with_gradient = Heads(), batched, with_gradient

    def forward(self, x: Tensor) -> Tensor:
        def differentiate(query: Tensor, key: Tensor) -> Tensor:
            return torch.func.grad(lambda q: self.heads(q, key).sum())(query)

        dims = tuple(0 if batched else None for batched in self.batched)
        inputs = [x if batched else x[0] for batched in self.batched]
        call = differentiate if self.with_gradient else self.heads
        return torch.vmap(call, in_dims=dims)(*inputs)


@pytest.mark.parametrize("batched", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("with_gradient", [False, True])
def test_calls_under_vmap_are_named(batched: tuple[bool, bool], with_gradient: bool) -> None:
    model, x = Samples(*batched, with_gradient=with_gradient), torch.randn(3, 2, 4, 8)
    with pytest.raises(RuntimeError, match=r"in heads, it is called under torch.vmap; call it"):
        torch_attn.inspect(model, x)

    inspection = torch_attn.inspect(nn.Sequential(model, AttendsToItself()), x)
    assert [layer.name for layer in inspection.layers] == ["1"]
    assert list(inspection.skipped) == ["0.heads"]
    assert "not inspected: 0.heads: it is called under torch.vmap" in str(inspection)


def test_no_features_and_no_keys() -> None:
    x = torch.randn(2, 3, 5, 0)
    inspection = torch_attn.inspect(Heads(), (x, x))
    layer = inspection.layers[0]
    torch.testing.assert_close(layer.weights, torch.full((2, 3, 5, 5), 0.2))
    assert layer.scale == 1
    assert str(inspection).splitlines()[1].endswith("uniform")

    inspection = torch_attn.inspect(Heads(), (torch.randn(2, 3, 5, 8), torch.randn(2, 3, 0, 8)))
    layer = inspection.layers[0]
    assert layer.weights.shape == (2, 3, 5, 0)
    assert layer.received_weight.shape == (2, 3, 0)
    assert layer.saturation.tolist() == [[0.0] * 3] * 2
    assert [line.split()[2:] for line in str(inspection).splitlines()[1:]] == [
        [str(head), "sees", "no", "key"] for head in range(3)
    ]


@pytest.mark.parametrize("shape", [(2, 3, 0, 8), (0, 3, 5, 8), (2, 0, 5, 8)])
def test_no_queries_no_batch_no_heads(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    inspection = torch_attn.inspect(Heads(), (x, x))
    assert inspection.layers[0].entropy.shape == shape[:3]
    assert len(str(inspection).splitlines()) == 1 + shape[1]


@pytest.mark.parametrize(
    ("model", "above", "error", "message"),
    [
        (F.relu, 0.5, TypeError, "model is a function; it must be a torch.nn.Mod"),
        (nn.ReLU(), 2, ValueError, "saturated_above is 2"),
        (nn.ReLU(), math.nan, ValueError, "above is nan"),
        (nn.ReLU(), "a", TypeError, "above is a str; it must"),
    ],
)
def test_wrong_arguments(model: Any, above: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        torch_attn.inspect(model, torch.ones(1), saturated_above=above)


def test_inputs_as_the_model_is_called() -> None:
    model, inputs = bert()
    model.eval()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    expected = torch_attn.inspect(model, {"input_ids": ids, "attention_mask": mask})
    for given, named in (
        ((ids, mask), {}),
        (((ids, mask),), {}),
        ((ids,), {"attention_mask": mask}),
        ((), {"input_ids": ids, "attention_mask": mask}),
    ):
        inspection = torch_attn.inspect(model, *given, **named)
        torch.testing.assert_close(inspection.attentions, expected.attentions, rtol=0, atol=0)
