"""The switch for FlexAttention: who calls PyTorch's function gets attn while it is on."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import os
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import flex_attention as of_torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

# A name that is there before the switch is turned on.
from torch.nn.attention.flex_attention import flex_attention as before
from torch.nn.parallel import DistributedDataParallel

import torch_attn
from _switch import assert_close, builtin, runs_attn
from helpers import in_fresh_process, make_inputs
from torch_attn import replacing_flex, replacing_sdpa
from torch_attn._replacement import flex as switch
from torch_attn.flex import UnsupportedError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*attn was not called:UserWarning"),
    pytest.mark.usefixtures("switched_off"),
    pytest.mark.filterwarnings("ignore:.*unfused implementation:UserWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning"),  # of torch.export
    pytest.mark.filterwarnings("ignore:.*return_lse is deprecated:FutureWarning"),
]

L = 40


def inputs(heads: tuple[int, int, int] = (4, 4, 4), **options: Any) -> list[Tensor]:
    """[2, heads, L, 16]; the same in every call."""
    torch.manual_seed(0)
    return make_inputs(L, L, 16, heads=heads, **options)[:3]


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def near(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.tanh(score) - (i - j).abs() * 0.1 * h


def mask() -> Any:
    return create_block_mask(causal, None, None, L, L, device="cpu", BLOCK_SIZE=16)


def gradients(output: Tensor, of: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(output.square().sum(), of, create_graph=True))


# --- who is caught --------------------------------------------------------------------------------


@functools.cache
def kept() -> Any:
    """As transformers keeps it: compiled before the switch is turned on."""
    return torch.compile(before, backend="aot_eager")


Situation = Callable[[], Any]
SITUATIONS: dict[str, Situation] = {
    "by_its_full_name": lambda: torch.nn.attention.flex_attention.flex_attention(*inputs()),
    "by_a_name_imported_before": lambda: before(*inputs(), near),
    "by_a_function_compiled_before": lambda: kept()(*inputs(), near),
    "compiled_as_one_graph": lambda: torch.compile(before, backend="aot_eager", fullgraph=True)(
        *inputs(), near, mask()
    ),
    "grouped_heads_with_logsumexp": lambda: before(
        *inputs((4, 2, 2)), near, enable_gqa=True, return_lse=True
    ),
    "with_kernel_options": lambda: before(*inputs(), near, kernel_options={"BLOCK_M": 16}),
}


def situation(function: Situation) -> Situation:
    SITUATIONS[function.__name__] = function
    return function


@situation
def by_keywords() -> Tensor:
    query, key, value = inputs()
    return before(value=value, key=key, query=query, score_mod=near, block_mask=mask(), scale=0.3)


@situation
def with_further_results() -> Any:
    output, aux = before(*inputs(), near, mask(), return_aux=AuxRequest(lse=True))
    assert aux.max_scores is None
    return output, aux.lse


@situation
def without_gradients() -> Tensor:
    with torch.no_grad():
        return before(*inputs(), near, mask())


@situation
def in_a_compiled_module() -> Tensor:
    class Module(nn.Module):
        def forward(self, *x: Tensor) -> Tensor:
            return torch.nn.attention.flex_attention.flex_attention(*x, near).relu()

    return torch.compile(Module(), backend="aot_eager", fullgraph=True)(*inputs())


@situation
def exported() -> Tensor:
    class Module(nn.Module):
        def forward(self, *x: Tensor) -> Tensor:
            return before(*x, near)

    return torch.export.export(Module(), tuple(inputs())).module()(*inputs())


@pytest.mark.parametrize("name", SITUATIONS)
def test_who_is_caught(name: str) -> None:
    run = SITUATIONS[name]
    torch.compiler.reset()
    kept()(*inputs())
    expected = run()
    with replacing_flex() as handle:
        assert_close(run(), expected)
        assert runs_attn(run)
    assert (handle.calls > 0, handle.passed_on) == (True, 0)
    assert not runs_attn(run)


# What PyTorch's function refuses on a CPU.
TRAINS: dict[str, Callable[[Callable[..., Tensor], list[Tensor]], Any]] = {
    "backward": lambda f, x: gradients(f(*x), x),
    "second derivatives": lambda f, x: gradients(gradients(f(*x), x)[0], x),
    "a learned table": lambda f, x: gradients(
        f(*x, lambda s, b, h, i, j: s + TABLE[h, i - j + L - 1]), [TABLE, *x]
    ),
    "per sample": lambda f, x: torch.func.vmap(
        torch.func.grad(lambda *y: f(*(t[None] for t in y), near).square().sum())
    )(*(t.detach() for t in x)),
    "logsumexp": lambda f, x: gradients(f(*x, near, return_lse=True)[1], x[:2]),
    "checkpointed": lambda f, x: gradients(
        torch.utils.checkpoint.checkpoint(f, *x, near, use_reentrant=False), x
    ),
}
TABLE = torch.linspace(-1, 1, 4 * (2 * L - 1)).view(4, -1).requires_grad_()


@pytest.mark.parametrize("name", TRAINS)
def test_training(name: str) -> None:
    """The results are torch_attn.flex_attention's, whose tests compare them with PyTorch's."""
    x = [t.requires_grad_() for t in inputs()]
    with replacing_flex() as handle:
        found = TRAINS[name](before, x)
    assert handle.calls > 0
    assert_close(found, TRAINS[name](torch_attn.flex_attention, x))
    with pytest.raises((NotImplementedError, RuntimeError)):
        before(*x).sum().backward()


def test_forward_mode() -> None:
    query, key, value = inputs()
    with forward_ad.dual_level(), replacing_flex():
        dual = forward_ad.make_dual(query, torch.ones_like(query))
        tangent = forward_ad.unpack_dual(before(dual, key, value, near)).tangent
        expected = forward_ad.unpack_dual(torch_attn.flex_attention(dual, key, value, near)).tangent
    assert tangent.equal(expected)


def test_each_state_keeps_its_graphs() -> None:
    """torch.compile compares the code of the function, so nothing is compiled again."""
    # Not at the top, because the import of the compiler is what the last test looks for.
    from torch._dynamo.testing import CompileCounter

    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(lambda *x: before(*x, near) * 2, backend=counter, fullgraph=True)
    for _ in range(3):
        compiled(*inputs())
        with replacing_flex() as handle:
            compiled(*inputs())
            assert runs_attn(compiled, *inputs())
        assert not runs_attn(compiled, *inputs())
    assert counter.frame_count == 2
    assert handle.calls == 0  # those that compiling makes, as the docstring says


# --- what is left to PyTorch ----------------------------------------------------------------------


def bessel(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.special.bessel_j0(score)


def test_what_attn_refuses_goes_to_pytorch() -> None:
    expected = before(*inputs(), bessel)
    switch._warned.clear()
    with replacing_flex() as handle:
        with pytest.warns(UserWarning, match=r"no special_bessel_j0 .*, line \d+: return torch\."):
            found = before(*inputs(), bessel)
        with warnings.catch_warnings(action="error"):  # once a function
            before(*inputs(), bessel)
        with pytest.warns(UserWarning, match="there is no lgamma"):
            before(*inputs(), lambda s, b, h, i, j: torch.lgamma(s * s + 1))
        assert (handle.calls, handle.passed_on) == (0, 3)
        compiled = torch.compile(lambda *x: before(*x, bessel), backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(*inputs()), expected)
    assert found.equal(expected)
    assert (handle.calls, handle.passed_on) == (0, 4)


def test_what_neither_can_do_is_our_error() -> None:
    """PyTorch has no derivatives on a CPU, and some functions it cannot run."""
    x = [t.requires_grad_() for t in inputs()]
    with replacing_flex() as handle:
        with pytest.raises(UnsupportedError, match=r"special_bessel_j0.*test_replace_flex"):
            before(*x, bessel)
        with pytest.raises(UnsupportedError, match="__bool__ reads a number") as caught:
            before(*inputs(), lambda s, b, h, i, j: s if i > j else -s)
        assert caught.value.__cause__ is not None  # PyTorch's own
        with pytest.raises(RuntimeError, match="index 39 is out of range") as wrong:
            before(*inputs(), lambda s, b, h, i, j: s + torch.zeros(9)[i])
        assert not isinstance(wrong.value, UnsupportedError)
        with pytest.raises(RuntimeError, match="query has 40"):
            before(*inputs(), None, create_block_mask(causal, None, None, 64, L, device="cpu"))
    assert handle.passed_on == 1
    assert issubclass(UnsupportedError, RuntimeError)


def test_mixed_dtypes_go_to_pytorch() -> None:
    query, key, value = inputs()
    mixed = query, key.half(), value.half()
    expected = before(*mixed)
    with replacing_flex() as handle:
        with pytest.warns(
            UserWarning, match="key torch.float16 and value torch.float16; give them"
        ):
            assert before(*mixed).equal(expected)
        with pytest.raises(UnsupportedError, match="give them one dtype"):
            before(query.requires_grad_(), *mixed[1:])
        with torch.autocast("cpu", torch.bfloat16):
            assert before(query, key.bfloat16(), value).dtype == torch.bfloat16
    assert (handle.calls, handle.passed_on) == (1, 1)


def test_other_tensors_go_to_pytorch() -> None:
    x = [t.to("meta") for t in inputs()]
    eight = [t.to(torch.float8_e4m3fn) for t in inputs()]
    for tensors in (x, eight):
        with pytest.raises((ValueError, RuntimeError, NotImplementedError), match=r".") as expected:
            before(*tensors)
        with replacing_flex() as handle, pytest.raises(type(expected.value)) as found:
            before(*tensors)
        assert (handle.calls, handle.passed_on) == (0, 1)
        assert str(found.value) == str(expected.value)


# --- the switch -----------------------------------------------------------------------------------


def is_on() -> bool:
    return runs_attn(before, *inputs())


def test_handles_end_in_any_order() -> None:
    first, second = torch_attn.replace_flex(), torch_attn.replace_flex()
    before(*inputs())
    first.remove()
    first.remove()
    assert is_on()
    assert torch_attn.flex_is_replaced()
    second.remove()
    assert not is_on()
    assert not torch_attn.flex_is_replaced()
    torch_attn.replace_flex()
    third = torch_attn.replace_flex()
    del first, second
    gc.collect()
    torch_attn.restore_flex()
    assert not is_on()
    assert "removed" in repr(third)
    torch_attn.restore_flex()


def test_both_switches_at_once() -> None:
    with replacing_sdpa(flex=True) as handle:
        builtin(*inputs())
        before(*inputs())
        with replacing_flex() as inner:
            before(*inputs())
        assert (handle.calls, inner.calls) == (3, 1)
        assert is_on()
    assert not is_on()
    assert not torch_attn.sdpa_is_replaced()
    handle = torch_attn.replace_sdpa(flex=True)
    before(*inputs())
    torch_attn.restore_flex()
    assert (is_on(), torch_attn.sdpa_is_replaced()) == (False, True)
    assert "on" in repr(handle)
    handle.remove()
    assert not torch_attn.sdpa_is_replaced()
    with replacing_sdpa():
        assert not is_on()


def test_counts_are_among_those_of_the_process() -> None:
    counted = torch_attn.calls()["FlexAttention"]
    with replacing_flex():
        before(*inputs())
    before(*inputs())
    assert torch_attn.calls()["FlexAttention"] == counted + 1


def warning_of(block: Any, *arguments: Any) -> str:
    with pytest.warns(UserWarning, match="attn was not called") as caught, block:
        before(*arguments) if arguments else None
    assert caught[-1].filename == __file__
    return str(caught[-1].message)


def test_a_block_without_calls_warns() -> None:
    name = "torch.nn.attention.flex_attention.flex_attention"
    assert f"not called: nothing called {name} meanwhile" in warning_of(replacing_flex())
    both = warning_of(replacing_sdpa(flex=True))
    assert f"nothing called F.scaled_dot_product_attention or {name} meanwhile" in both
    passed_on = warning_of(replacing_flex(), *inputs(), bessel)
    assert "1 calls were left to PyTorch" in passed_on
    assert "cannot run their functions" in passed_on


def test_the_function_stays_what_it_is() -> None:
    signature, code = inspect.signature(before), before.__code__
    with replacing_flex():
        assert before.__code__ is not code
        assert inspect.signature(before) == signature
        assert pickle.loads(pickle.dumps(before)) is before
        assert copy.deepcopy(before) is before
        with pytest.raises(TypeError, match="unexpected keyword argument 'dropout_p'"):
            before(*inputs(), dropout_p=0.1)  # type: ignore[call-arg]
        assert not runs_attn(switch.original, *inputs())
    assert before.__code__ is code


@pytest.fixture
def _forgotten() -> Iterator[None]:
    switch._code.cache_clear()
    yield
    switch._code.cache_clear()


def test_code_that_replaces_the_function_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only PyTorch's own function is changed, and changed back."""
    code = before.__code__
    mine = lambda *args, **kwargs: before(*args, **kwargs)  # noqa: E731
    own = mine.__code__
    with replacing_flex():
        before(*inputs())
        monkeypatch.setattr(of_torch, "flex_attention", mine)
    assert (before.__code__, mine.__code__) == (code, own)


def test_masks_of_more_entries_and_heads() -> None:
    larger = create_block_mask(causal, 3, 5, L, L, device="cpu", BLOCK_SIZE=16)
    expected = before(*inputs(), None, larger)
    with replacing_flex():
        torch.testing.assert_close(before(*inputs(), None, larger), expected)


@pytest.mark.usefixtures("_forgotten")
def test_a_release_that_the_switch_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    def more(query: Any, key: Any, value: Any, score_mod: Any = None, sinks: Any = None) -> None:
        """A function of a later torch."""

    wrapped = functools.wraps(before)(lambda *args, **kwargs: before(*args, **kwargs))
    for theirs, problem in ((more, "attn does not know: sinks"), (wrapped, "is wrapped")):
        monkeypatch.setattr(switch, "theirs", theirs)
        code = theirs.__code__
        for replace in (torch_attn.replace_flex, lambda: torch_attn.replace_sdpa(flex=True)):
            with pytest.raises(RuntimeError, match=rf"flex_attention of torch .*{problem}"):
                replace()
            assert not torch_attn.sdpa_is_replaced()
        assert theirs.__code__ is code
        assert not torch_attn.flex_is_replaced()


def test_switching_in_a_compiled_function() -> None:
    def function(x: Tensor) -> Tensor:
        with replacing_flex():
            return before(x, x, x)

    torch.compiler.reset()
    with pytest.raises(RuntimeError, match="cannot be part of a compiled function"):
        torch.compile(function, backend="eager", fullgraph=True)(inputs()[0])
    torch.compiler.reset()


def test_threads() -> None:
    """Others call while one switches: each call is one of the two functions, whole."""
    x = inputs()
    expected = before(*x, near)
    failures: list[Any] = []
    stop = threading.Event()

    def call() -> None:
        while not stop.is_set():
            try:
                torch.testing.assert_close(before(*x, near), expected)
            except Exception as error:
                failures.append(error)

    # PyTorch's eager function compiles, which only one thread may do at a time.
    with replacing_flex():
        threads = [threading.Thread(target=call) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(200):
            with replacing_flex():
                pass
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures


def test_forks() -> None:
    with replacing_flex():
        before(*inputs())
        child = os.fork()
        if child == 0:
            os._exit(0 if is_on() else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_beside_other_doors() -> None:
    with replacing_flex(), torch_attn.invariant():
        output = before(*inputs(), near)
        assert output.equal(torch_attn.flex_attention(*inputs(), near))

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return before(x, x, x, near)

    with replacing_flex(), pytest.raises(RuntimeError, match="flex_attention"):
        torch_attn.inspect(Model(), inputs()[0])


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)
        self.table = nn.Parameter(torch.randn(4, 2 * L - 1))

    def forward(self, x: Tensor) -> Tensor:
        def relative(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return s + self.table[h, i - j + L - 1]

        return before(*self.project(x).chunk(3, -1), relative, mask())


@pytest.mark.parametrize("wrap", ["DistributedDataParallel", "fully_shard"])
def test_data_parallel(wrap: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = Layer()
    expected = copy.deepcopy(layer)
    x = inputs()[0]
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        if wrap == "fully_shard":
            model: Any = fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
        else:
            model = DistributedDataParallel(layer)
        with replacing_flex() as handle:
            model(x).square().sum().backward()
            expected(x).square().sum().backward()
    finally:
        dist.destroy_process_group()
    assert handle.calls == 2
    for found, plain in zip(layer.parameters(), expected.parameters(), strict=True):
        grad = found.grad
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad  # type: ignore[union-attr]
        torch.testing.assert_close(grad, plain.grad)


def turn_and_count() -> tuple[int, bool]:
    with replacing_flex() as handle:
        before(*inputs())
    return handle.calls, "torch._dynamo" in sys.modules


def test_turning_it_imports_no_compiler() -> None:
    """The import takes seconds."""
    assert in_fresh_process(turn_and_count) == (1, False)
