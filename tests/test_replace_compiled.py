"""The switch and programs that are compiled: each call runs what counts when it is made."""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_attn
from _switch import (
    Module,
    attend,
    builtin,
    compile_anew,  # noqa: F401 (a fixture)
    exported,
    inputs,
    is_off,
    runs_attn,
)
from helpers import in_fresh_process
from torch_attn import Replacement, replace_sdpa, replacing_sdpa

pytestmark = [
    pytest.mark.usefixtures("switched_off", "compile_anew"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning"),  # of torch.export
]

# For backward, the default backend has C++ to compile, which takes ten seconds.
MODES: dict[str, tuple[Any, bool, str]] = {
    "grad": (torch.enable_grad, True, "aot_eager"),
    "no_grad": (torch.no_grad, True, "inductor"),
    "inference_mode": (torch.inference_mode, False, "inductor"),
}


@pytest.mark.regression
@pytest.mark.parametrize("mode", MODES)
def test_compiled(mode: str) -> None:
    """Compiled before, while and after: each call runs what then counts."""
    context, requires_grad, backend = MODES[mode]
    compiled = torch.compile(attend, fullgraph=True, backend=backend)

    def run() -> list[Tensor]:
        leaves = [t.requires_grad_(requires_grad) for t in inputs()]
        with context():
            output = compiled(*leaves)
        wanted = leaves if output.requires_grad else []
        return [output, *(torch.autograd.grad(output.square().sum(), wanted) if wanted else ())]

    before = run()
    assert not runs_attn(run)
    with replacing_sdpa() as handle:
        torch.testing.assert_close(run(), before)
        calls = handle.calls
        assert calls > 0
        assert runs_attn(run)
        assert handle.calls == calls  # those that compiling makes, as the docstring says
    torch.testing.assert_close(run(), before, rtol=0, atol=0)
    assert not runs_attn(run)


def test_caches_on_disk() -> None:
    """A graph that was compiled with one attention is not found with the other, in any thread."""
    compiled = torch.compile(lambda *x: builtin(*x, scale=0.7), fullgraph=True)

    def ran_attn() -> bool:
        compiled(*inputs())
        return runs_attn(compiled, *inputs())

    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        for _ in range(2):
            assert not ran_attn()
            with replacing_sdpa():
                assert executor.submit(ran_attn).result()


def stored_and_found(folder: str, change: str) -> tuple[int, int]:
    """How many graphs a new process finds on disk, and how many it compiles."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    if change:
        torch.compiler.config._config["cache_key_tag"].default += change  # type: ignore[attr-defined]
    torch.compile(torch_attn.sdpa, fullgraph=True)(*inputs())
    counted = torch._dynamo.utils.counters["aot_autograd"]
    return counted["autograd_cache_hit"], counted["autograd_cache_miss"]


@pytest.mark.long
def test_caches_on_disk_are_of_one_build(tmp_path: Path) -> None:
    """A graph of another build may hold operators with other arguments."""
    assert "torch_attn " in torch.compiler.config.cache_key_tag
    assert in_fresh_process(stored_and_found, str(tmp_path), "") == (0, 1)
    assert in_fresh_process(stored_and_found, str(tmp_path), "") == (1, 0)
    assert in_fresh_process(stored_and_found, str(tmp_path), " of another build") == (0, 1)


def test_decomposed_programs_keep_what_they_were_made_with() -> None:
    """A program that is taken apart holds operators below the one that is switched."""
    off = exported().run_decompositions()
    with replacing_sdpa():
        on = exported().run_decompositions()
        assert not runs_attn(off.module(), *inputs())
    assert runs_attn(on.module(), *inputs())
    for program in (on, off):
        torch.testing.assert_close(program.module()(*inputs()), Module()(*inputs()))


def test_softmax_that_the_compiler_recognises() -> None:
    """A model's own softmax becomes a call of the built-in in a compiled graph, and so of attn."""

    def own(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.softmax(query @ key.mT * 0.25, -1) @ value

    query, key, value = inputs(16, 16, 32)
    with replacing_sdpa(), torch.no_grad():
        compiled = torch.compile(own)
        torch.testing.assert_close(compiled(query, key, value), own(query, key, value))
        assert runs_attn(compiled, query, key, value)


@pytest.mark.parametrize("kind", ["function", "with block", "remove"])
def test_switching_in_a_compiled_function(kind: str) -> None:
    """Outside of the graph where it may be broken, else an error that says so."""
    handles: list[Replacement] = []

    def function(x: Tensor) -> Tensor:
        if kind == "with block":
            with replacing_sdpa():
                return builtin(x, x, x)
        if kind == "function":
            handles.append(replace_sdpa())
            return builtin(x, x, x)
        handles[-1].remove()
        return builtin(x, x, x)

    for fullgraph in (True, False):
        if kind == "remove":
            handles.append(replace_sdpa())
        torch.compiler.reset()
        compiled = torch.compile(function, backend="eager", fullgraph=fullgraph)
        x = inputs()[0]
        if fullgraph:
            with pytest.raises(RuntimeError, match="cannot be part of a compiled function"):
                compiled(x)
        else:
            expected = builtin(x, x, x) if kind == "remove" else torch_attn.sdpa(x, x, x)
            torch.testing.assert_close(compiled(x), expected)
        for handle in handles:
            handle.remove()
        assert is_off()


def test_switching_while_another_thread_compiles() -> None:
    """All threads know that one compiles; that is no error in other threads. The switch waits."""
    compiling = threading.Event()

    def backend(graph: Any, _: Any) -> Any:
        compiling.set()
        time.sleep(0.1)
        return graph

    compiled = torch.compile(attend, backend=backend)
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        result = executor.submit(compiled, *inputs())
        assert compiling.wait(60)
        with replacing_sdpa():
            torch.testing.assert_close(result.result(), torch_attn.sdpa(*inputs()))
