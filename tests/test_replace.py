"""The switch: whoever calls the built-in gets attn while it is on, and the built-in again after."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import functools
import os
import pickle
import platform
import signal
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import torch_attn
from _switch import (
    Module,
    assert_close,
    attend,
    builtin,
    exported,
    gradients,
    inputs,
    is_off,
    operators,
    runs_attn,
    tokens,
)
from _variants import run_python
from helpers import NAN, in_fresh_process
from torch_attn import replace_sdpa, replacing_sdpa
from torch_attn._replacement import switch

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*attn was not called:UserWarning"),
    pytest.mark.usefixtures("switched_off"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning"),  # of torch.export
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
]

MATH = SDPBackend.MATH


# --- who is caught --------------------------------------------------------------------------------


def double_backward() -> Any:
    leaves = [t.requires_grad_() for t in inputs(dtype=torch.float64)]
    with sdpa_kernel(MATH):  # the built-in has no second derivative otherwise
        output = builtin(*leaves)
    first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)


def forward_mode() -> Tensor:
    query, key, value = inputs()
    with forward_ad.dual_level(), sdpa_kernel(MATH):
        dual = forward_ad.make_dual(query, query.cos())
        return forward_ad.unpack_dual(builtin(dual, key, value)).tangent


def gradient_of_a_mask() -> Any:
    mask = torch.zeros(3, 5, 7, requires_grad=True)
    return torch.autograd.grad(builtin(*inputs(), mask).square().sum(), mask)


def loss(*x: Tensor) -> Tensor:
    return builtin(*x).square().sum()


def func_vjp_and_jvp() -> Any:
    output, pull = vjp(builtin, *inputs())
    with sdpa_kernel(MATH):
        return pull(output), jvp(attend, inputs(), inputs())


def small_inputs() -> tuple[Tensor, Tensor, Tensor]:
    return inputs(2, 3, 2, batch=(), heads=1, dtype=torch.float64)


def func_hessian() -> Tensor:
    with sdpa_kernel(MATH):
        return hessian(lambda *x: builtin(*x).sin().sum())(*small_inputs())


def vmap_of_what_is_not_mapped() -> Tensor:
    query, key, value = inputs()
    return vmap(lambda x: builtin(query, key, value) + x)(torch.arange(2.0))


def autocast() -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        output = builtin(*inputs())
    assert output.dtype == torch.bfloat16
    return output


def no_grad_and_inference_mode() -> list[Tensor]:
    with torch.no_grad():
        outputs = [builtin(*(t.requires_grad_() for t in inputs()))]
    with torch.inference_mode():
        outputs.append(builtin(*inputs()))
    assert outputs[1].is_inference()
    return outputs


def every_choice_of_a_kernel() -> list[Tensor]:
    with sdpa_kernel(MATH):
        outputs = [builtin(*inputs())]
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, MATH], set_priority=True):
        return [*outputs, builtin(*inputs())]


def self_attention(training: bool, need_weights: bool = False) -> Any:
    """Of PyTorch's module, with the same parameters in every call."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, batch_first=True).train(training)
    x = tokens()
    return module(x, x, x, need_weights=need_weights)


def transformer_layers() -> list[Tensor]:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    decoder = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    stack = nn.TransformerEncoder(encoder, 2)
    x = tokens()
    return [decoder.train(mode)(x, stack.train(mode)(x)) for mode in (True, False)]


def without_the_fast_path() -> list[Tensor]:
    """What PyTorch's layers otherwise take in evaluation without autograd."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            return transformer_layers()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


# Made in the first call: before the switch is turned on.
@functools.cache
def scripted() -> tuple[Any, Any]:
    return torch.jit.script(Module()), torch.jit.trace(Module(), inputs())


def torchscript() -> Any:
    """Called from C++, by the interpreter; from the third call on by an optimized program."""
    program, traced = scripted()
    return [*(gradients(program) for _ in range(4)), traced(*inputs())]


def another_thread() -> Tensor:
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(attend, *inputs()).result()


Situation = Callable[[], Any]
SITUATIONS: dict[str, Situation] = {
    "by_its_full_name": lambda: F.scaled_dot_product_attention(*inputs()),
    "by_a_name_imported_before": lambda: builtin(*inputs()),
    "by_its_operator": lambda: torch.ops.aten.scaled_dot_product_attention.default(*inputs()),
    "with_a_mask": lambda: builtin(*inputs(), torch.ones(5, 7, dtype=torch.bool).tril()),
    "with_a_mask_of_one_dimension": lambda: builtin(*inputs(batch=()), torch.arange(7.0)),
    "grouped_heads": lambda: builtin(
        *inputs(heads=(4, 2, 2)), is_causal=True, scale=0.3, enable_gqa=True
    ),
    "half_types": lambda: [builtin(*inputs(dtype=t)) for t in (torch.bfloat16, torch.float16)],
    "backward": lambda: gradients(builtin),
    "double_backward": double_backward,
    "forward_mode": forward_mode,
    "gradient_of_a_mask": gradient_of_a_mask,
    "func_grad": lambda: grad(loss, (0, 1, 2))(*inputs()),
    "func_vjp_and_jvp": func_vjp_and_jvp,
    "func_hessian": func_hessian,
    "func_vmap": lambda: vmap(attend)(*inputs()),
    "vmap_of_what_is_not_mapped": vmap_of_what_is_not_mapped,
    "vmap_twice_and_grad": lambda: vmap(vmap(grad(loss, (0, 1, 2))))(*inputs()),
    "func_jacrev": lambda: jacrev(attend)(*small_inputs()),
    "autocast": autocast,
    "no_grad_and_inference_mode": no_grad_and_inference_mode,
    "checkpoints": lambda: [
        gradients(functools.partial(checkpoint, attend, use_reentrant=reentrant))
        for reentrant in (True, False)
    ],
    "causal_biases": lambda: [
        builtin(*inputs(), bias(5, 7)) for bias in (causal_upper_left, causal_lower_right)
    ],
    "every_choice_of_a_kernel": every_choice_of_a_kernel,
    # While training or where autograd records; else see below.
    "multihead_attention": lambda: [self_attention(mode)[0] for mode in (True, False)],
    "transformer_layers": transformer_layers,
    "without_the_fast_path": without_the_fast_path,
    "torchscript": torchscript,
    "exported_programs": lambda: [
        program.module()(*inputs())
        for program in (exported(), torch.export.export(Module(), inputs()))
    ],
    "graphs_of_make_fx": lambda: [
        make_fx(attend, pre_dispatch=pre)(*inputs())(*inputs()) for pre in (False, True)
    ],
    "another_thread": another_thread,
}


@pytest.mark.regression
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # the built-in's vmap
@pytest.mark.parametrize("name", SITUATIONS)
def test_caught(name: str) -> None:
    """Each situation calls attn while the switch is on, and the same built-in before and after."""
    run = SITUATIONS[name]
    before = run()
    with replacing_sdpa() as handle:
        during = run()
        assert handle.calls > 0
        assert handle.passed_on == 0
    calls = torch.ops.attn._replaced_calls()
    after = run()
    assert torch.ops.attn._replaced_calls() == calls
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert_close(during, before)


@pytest.mark.regression
@pytest.mark.parametrize("name", ["backward", "func_vmap", "autocast", "torchscript"])
def test_nothing_else_runs(name: str) -> None:
    """None of the operators that the built-in is made of."""
    run = SITUATIONS[name]
    assert not runs_attn(run)
    with replacing_sdpa():
        assert runs_attn(run)
        assert not any("_scaled_dot_product" in op for op in operators(run))


@pytest.mark.usefixtures("device")
def test_a_call_is_that_of_attn() -> None:
    """Bit for bit, with its node for the gradients."""
    leaves = [t.requires_grad_() for t in inputs()]
    expected = torch_attn.sdpa(*leaves, is_causal=True)
    with replacing_sdpa():
        actual = builtin(*leaves, is_causal=True)
    assert torch.equal(actual, expected)
    for output in (actual, expected):
        assert output.grad_fn is not None
        assert output.grad_fn.name() == "SdpaBackward"


# --- what is not caught ---------------------------------------------------------------------------


@torch.no_grad()
def fast_path_of_multihead_attention() -> Tensor:
    return self_attention(training=False)[0]


@torch.no_grad()
def fast_path_of_an_encoder() -> Tensor:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval()(tokens())


def weights_of_multihead_attention() -> Any:
    return self_attention(training=True, need_weights=True)


def own_softmax() -> Tensor:
    query, key, value = inputs()
    return torch.softmax(query @ key.mT, -1) @ value


@pytest.mark.regression
@pytest.mark.parametrize(
    "run",
    [
        fast_path_of_multihead_attention,
        fast_path_of_an_encoder,
        weights_of_multihead_attention,
        own_softmax,
    ],
)
def test_not_caught(run: Situation) -> None:
    """These do not call the built-in, as docs/any-pytorch-code.md says."""
    before = run()
    with replacing_sdpa() as handle:
        torch.testing.assert_close(run(), before, rtol=0, atol=0)
    assert (handle.calls, handle.passed_on) == (0, 0)


def nested(layout: torch.layout) -> Tensor:
    torch.manual_seed(0)
    parts = [torch.randn(length, 3, 8) for length in (5, 4)]
    return torch.nested.nested_tensor(parts, layout=layout).transpose(1, 2)


# One tensor for query, key and value.
OF_OTHER_KINDS: dict[str, Callable[[], Tensor]] = {
    "meta": lambda: torch.randn(2, 3, 5, 8, device="meta"),
    "nested, strided": lambda: nested(torch.strided).contiguous(),
    "nested, jagged, integers": lambda: nested(torch.jagged).long(),
    "sparse": lambda: inputs()[0].to_sparse(),
    "compressed sparse": lambda: inputs(batch=(), heads=1)[0][0].to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(inputs()[0], 0.1, 0, torch.qint8),
    "mkldnn": lambda: inputs()[0].to_mkldnn(),
    "complex": lambda: torch.ones(2, 3, 5, 8, dtype=torch.complex64),
    "integers": lambda: torch.ones(2, 3, 5, 8, dtype=torch.int64),
    "float8": lambda: inputs()[0].to(torch.float8_e4m3fn),
}


@pytest.mark.regression
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning", "ignore:.*quantize:DeprecationWarning")
@pytest.mark.parametrize("kind", OF_OTHER_KINDS)
def test_passed_on(kind: str) -> None:
    """Tensors that are not for attn: the result of the built-in, or its error."""

    def run() -> Any:
        x = OF_OTHER_KINDS[kind]()
        try:
            output = builtin(x, x, x)
        except (RuntimeError, NotImplementedError) as error:
            return type(error), str(error)
        if output.is_meta:
            return output.shape
        return [part.clone() for part in output.unbind()] if output.is_nested else output

    before = run()
    with replacing_sdpa() as handle:
        during = run()
    assert (handle.calls, handle.passed_on) == (0, 1)
    if isinstance(before, tuple):
        assert during == before
    else:
        torch.testing.assert_close(during, before, rtol=0, atol=0)


@pytest.mark.regression
def test_errors_stay_errors() -> None:
    """What the built-in refuses is refused, with the argument's name."""
    query, key, value = inputs()
    wrong: list[tuple[str, Any]] = [
        ("key has head_dim 8", (query, key[..., :8], value)),
        ("key has 2 heads", (query, key[:, :2], value[:, :2])),
        ("key has dtype Double", (query, key.double(), value)),
        ("key is on meta", (query, key.to("meta"), value)),
        ("attn_mask has dtype Double", (query, key, value, torch.zeros(5, 7).double())),
        ("attn_mask has shape", (query, key, value, torch.zeros(4, 1, 5, 7))),
        ("dropout_p is 2", (query, key, value, None, 2.0)),
        ("query has shape", (query[0, 0, 0], key, value)),
    ]
    for message, call in wrong:
        with pytest.raises((RuntimeError, IndexError)):
            builtin(*call)
        with replacing_sdpa(), pytest.raises(RuntimeError, match=f"attn::sdpa: {message}"):
            builtin(*call)


@pytest.mark.regression
def test_errors_of_attn_alone() -> None:
    """What the built-in answers with numbers that mean nothing."""
    query, key, value = inputs()
    with replacing_sdpa():
        for length in (4, 9):
            other = torch.ones(2, 3, length, 16)
            with pytest.raises(RuntimeError, match=f"value has length {length} but key has 7"):
                builtin(query, key, other)
        with pytest.raises(RuntimeError, match="scale is nan"):
            builtin(query, key, value, scale=NAN)


# --- on and off -----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_handles_in_any_order(order: tuple[int, ...]) -> None:
    x = inputs()
    handles = [replace_sdpa() for _ in range(3)]
    for n, which in enumerate(order):
        builtin(*x)
        handles[which].remove()
        handles[which].remove()  # does nothing
        assert handles[which].calls == n + 1  # and it counts no longer
    assert is_off()
    builtin(*x)
    assert sorted(handle.calls for handle in handles) == [1, 2, 3]


def test_a_block_that_ends_early() -> None:
    """By an exception, or because its handle is removed."""
    with pytest.raises(ZeroDivisionError), replacing_sdpa():
        _ = 1 / 0
    assert is_off()
    with replacing_sdpa() as handle:
        handle.remove()
        assert is_off()


def test_as_a_decorator() -> None:
    function = replacing_sdpa()(attend)
    for _ in range(2):
        assert torch.equal(function(*inputs()), torch_attn.sdpa(*inputs()))
        assert is_off()


def test_a_block_without_calls_warns() -> None:
    nothing = r"replacing_sdpa: attn was not called: nothing called F\.scaled"
    with pytest.warns(UserWarning, match=nothing) as warned, replacing_sdpa():
        pass
    assert warned[0].filename == __file__
    x = torch.empty(2, 3, 4, device="meta")
    with pytest.warns(UserWarning, match="1 calls were left to PyTorch"), replacing_sdpa():
        builtin(x, x, x)


def test_a_handle_without_calls_warns_once() -> None:
    handle = replace_sdpa()
    with pytest.warns(UserWarning, match=r"Replacement\.remove: attn was not called") as warned:
        handle.remove()
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle.remove()
        with replacing_sdpa():
            builtin(*inputs())


def test_the_switch_can_be_asked_and_taken_back_by_everyone() -> None:
    assert not torch_attn.sdpa_is_replaced()
    torch_attn.restore_sdpa()  # does nothing
    replace_sdpa()  # dropped
    with pytest.warns(UserWarning, match=r"restore_sdpa: attn was not called") as warned:
        torch_attn.restore_sdpa()
    assert warned[0].filename == __file__
    replace_sdpa(), replace_sdpa()  # dropped
    before = torch_attn.calls()["built-in"]
    builtin(*inputs())
    assert torch_attn.calls()["built-in"] == before + 1
    assert torch_attn.sdpa_is_replaced()
    torch_attn.restore_sdpa()
    assert not torch_attn.sdpa_is_replaced()
    builtin(*inputs())
    assert torch_attn.calls()["built-in"] == before + 1


def test_repr() -> None:
    with replacing_sdpa() as handle:
        builtin(*inputs())
        assert repr(handle) == "<Replacement: on, calls=1, passed_on=0>"
    assert repr(handle) == "<Replacement: removed, calls=1, passed_on=0>"


@pytest.mark.regression
def test_handle_in_copies() -> None:
    """A copy of what holds it, such as a model, is no second switch."""
    with replacing_sdpa() as handle:
        assert copy.copy(handle) is copy.deepcopy([handle])[0] is handle
        with pytest.raises(TypeError, match="cannot be pickled; call replace_sdpa"):
            pickle.dumps(handle)
    assert is_off()


@pytest.mark.regression
def test_calls_are_not_part_of_a_compiled_function() -> None:
    """They would be the number of the first call, a constant."""
    with replacing_sdpa() as handle:

        @torch.compile(backend="eager")
        def read(x: Tensor) -> tuple[Tensor, int]:
            return x + 1, handle.calls

        for calls in range(3):
            assert read(torch.ones(2))[1] == calls
            builtin(*inputs())


def turn_in_a_fork() -> int:
    """The exit status of a child that was forked while another thread held the lock."""
    held = threading.Event()

    def hold() -> None:
        with switch._lock:
            held.set()
            time.sleep(0.3)

    threading.Thread(target=hold).start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        with replacing_sdpa():
            os._exit(0)
    return os.waitpid(child, 0)[1]


@pytest.mark.regression
def test_fork_beside_a_turn() -> None:
    assert in_fresh_process(turn_in_a_fork) == 0


@pytest.mark.regression
def test_the_switch_of_torch() -> None:
    """As for the implementations that torch knows itself; for packed sequences, too."""
    attention = torch.nn.attention
    if not hasattr(attention, "restore_flash_attention_impl"):
        pytest.skip("not run: this torch cannot be told of implementations")
    assert "attn" in attention.list_flash_attention_impls()
    x, cu_seq = inputs()[0].flatten(0, 1), torch.tensor([0, 4, 6], dtype=torch.int32)
    packed = x, x, x, cu_seq, cu_seq, 4, 4
    try:
        for _ in range(2):  # the second one replaces the first
            attention.activate_flash_attention_impl("attn")
            assert attention.current_flash_attention_impl() == "attn"
            assert torch.equal(builtin(*inputs()), torch_attn.sdpa(*inputs()))
            assert torch.equal(varlen.varlen_attn(*packed), torch_attn.varlen_attn(*packed))
    finally:
        attention.restore_flash_attention_impl()
    assert is_off()
    assert attention.current_flash_attention_impl() is None


@pytest.mark.regression
def test_threads() -> None:
    """Threads that turn it on and off while others call: every result is right, and it ends off."""
    x = inputs()
    expected = builtin(*x)
    stop = threading.Event()

    def turn() -> None:
        for _ in range(200):
            with replacing_sdpa(), replacing_sdpa():
                pass

    def call() -> int:
        n = 0
        while not stop.is_set():
            torch.testing.assert_close(builtin(*x), expected)
            n += 1
        return n

    with concurrent.futures.ThreadPoolExecutor(6) as executor:
        callers = [executor.submit(call) for _ in range(3)]
        for turning in [executor.submit(turn) for _ in range(3)]:
            turning.result()
        stop.set()
        assert all(caller.result() > 0 for caller in callers)
    assert is_off()
    assert "replace_sdpa" not in torch.compiler.config.cache_key_tag


STRICTLY = ("-W", "error", "-c")  # a warning is an error


@pytest.mark.regression
def test_import_alone_changes_nothing() -> None:
    """Neither the built-in nor what is imported; turning it on warns of nothing and is cheap."""
    run_python(
        *STRICTLY,
        """
import sys, torch
names = ["aten::scaled_dot_product_attention", "aten::_flash_attention_forward"]
before = [torch._C._dispatch_dump(name) for name in names]
import torch_attn
assert [torch._C._dispatch_dump(name) for name in names] == before
x = torch.randn(2, 5, 8)
expected = torch.nn.functional.scaled_dot_product_attention(x, x, x)
handle = torch_attn.replace_sdpa()
torch.nn.functional.scaled_dot_product_attention(x, x, x)
handle.remove()
assert torch.nn.functional.scaled_dot_product_attention(x, x, x).equal(expected)
assert "torch._dynamo" not in sys.modules
""",
    )


@pytest.mark.long
def test_the_warning_of_other_overrides_is_left() -> None:
    """Some releases of PyTorch warn once that a kernel is overridden. That stays unused."""
    code = """
import warnings, torch, torch_attn
{switch}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", print, "FuncTorchVmapMode", allow_override=True)
print(sum("Overriding a previously registered" in str(warning.message) for warning in caught))
"""
    warnings = int(run_python(*STRICTLY, code.format(switch="")))
    switch = "torch_attn.replace_sdpa()"
    assert int(run_python(*STRICTLY, code.format(switch=switch))) == warnings
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if release in {(2, 11), (2, 13)}:  # where it is known, so that the line above shows something
        assert warnings == 1


# --- modes, subclasses, processes -----------------------------------------------------------------


def test_modes() -> None:
    """Entered before the switch or after it."""
    for first in (replacing_sdpa, contextlib.nullcontext):
        then = contextlib.nullcontext if first is replacing_sdpa else replacing_sdpa
        with first(), FakeTensorMode(), then():
            x = torch.randn(2, 3, 5, 8, dtype=torch.bfloat16)
            assert builtin(x, x, x).shape == x.shape
            # Whether or not there are kernels for it. On ARM PyTorch's attention ends the process.
            if platform.machine() != "aarch64":
                y = torch.randn(2, 3, 5, 8, device="cuda")
                assert builtin(y, y, y).device.type == "cuda"
        with first(), FlopCounterMode(display=False) as counter, then():
            builtin(*inputs())
        count = 2 * (2 * 3) * 5 * 7 * (16 + 16)
        assert counter.flop_counts["Global"] == {torch.ops.attn.sdpa: count}


def test_subclasses() -> None:
    """One that holds other tensors, and does with them what is done to it; and a parameter."""
    from torch.testing._internal.two_tensor import TwoTensor

    query, key, value = inputs()
    with replacing_sdpa() as handle:
        output = builtin(*(TwoTensor(t, t) for t in (query, key, value)))
        assert type(builtin(nn.Parameter(query), key, value)) is Tensor
    assert handle.calls == 2
    assert torch.equal(output.a, torch_attn.sdpa(query, key, value))


def attend_to_shards(rendezvous: str) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", f"file://{rendezvous}", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    shards = [distribute_tensor(t, mesh, [Shard(1)]).requires_grad_() for t in inputs()]
    with replacing_sdpa() as handle:
        output = builtin(*shards)
        output.sum().backward()
    assert handle.calls == 1
    assert output.placements == (Shard(1),)
    assert shards[0].grad.placements == (Shard(1),)
    torch.testing.assert_close(output.full_tensor(), torch_attn.sdpa(*inputs()))


def test_dtensor(tmp_path: Any) -> None:
    in_fresh_process(attend_to_shards, str(tmp_path / "store"))


class Calls(torch.utils.data.Dataset):
    """How often attn was called in the place of the built-in, by a worker."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, n: int) -> int:
        before = torch.ops.attn._replaced_calls()[0]
        x = torch.randn(2, 3, 300, 64)
        assert torch.equal(builtin(x, x, x), torch_attn.sdpa(x, x, x))
        return int(torch.ops.attn._replaced_calls()[0] - before)


def load_in_workers() -> list[int]:
    assert is_off()  # in a process that is spawned where it is on
    with replacing_sdpa():
        Calls()[0]  # the threads of the parent have started
        loader = torch.utils.data.DataLoader(
            Calls(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60
        )
        return list(loader)


def test_processes() -> None:
    """Forked ones, such as workers of a DataLoader, have it on; spawned ones do not."""
    with replacing_sdpa():
        assert in_fresh_process(load_in_workers) == [1] * 4
