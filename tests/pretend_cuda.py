"""A GPU that is not there: `pytest -p pretend_cuda` runs the device tests without one.

Tensors made on "cuda" say that they are on cuda:0; what mixes them with tensors of the CPU is an
error, as on a GPU. The CPU computes. It shows that the tests run, not that the kernels are right.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves

import helpers

CUDA = torch.device("cuda:0")


class OnCpu(Tensor):
    pass


class OnCuda(Tensor):
    device = property(lambda _: CUDA)
    is_cuda = property(lambda _: True)


class Generator(torch.Generator):
    """It remembers for which device it was made."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        generator = super().__new__(cls)
        generator.made_for = torch.device(device).type
        return generator


FACTORIES = _device_constructors()
# These take, or leave, tensors of the other device.
MOVES = {Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.copy_, Tensor.__getitem__, Tensor.__setitem__}


# What asks for numbers of a tensor, and of data of Python.
ASK = {Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.nonzero, torch.equal}
ASK |= {Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__}
FROM_PYTHON = {torch.tensor, torch.as_tensor, torch.asarray}


class PretendCuda(TorchFunctionMode):
    """Waiting is an error if set_sync_debug_mode says so."""

    sync_debug_mode = "default"

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        kwargs = dict(kwargs or {})
        # What torch.func gives back has lost its class.
        if function == Tensor.device.__get__ and type(args[0]) is Tensor and not args[0].is_meta:
            return CUDA
        if function == Tensor.is_cuda.__get__ and type(args[0]) is Tensor:
            return not args[0].is_meta
        leaves = tree_leaves((args, kwargs))
        kinds = {type(t) for t in leaves if isinstance(t, Tensor) and t.dim()}
        if {OnCpu, OnCuda} <= kinds and function not in MOVES:
            raise RuntimeError(
                f"{function.__name__}: expected all tensors to be on the same device"
            )
        if function is Tensor.numpy and OnCuda in kinds:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        result_kind = OnCuda if any(type(t) is OnCuda for t in leaves) else None
        if result_kind is None and any(type(t) is OnCpu for t in leaves):
            result_kind = OnCpu
        if function is Tensor.copy_:
            result_kind = type(args[0])
        wanted = [str(a) for a in leaves if isinstance(a, (str, torch.device))]
        wanted = [a.split(":")[0] for a in wanted if a.split(":")[0] in ("cpu", "cuda", "meta")]
        if function is Tensor.cpu:
            wanted = ["cpu"]
        if function in FACTORIES and not wanted and result_kind is None:
            wanted = ["cpu"]
        places = function in FACTORIES or function in MOVES or "device" in kwargs
        if wanted and places:
            result_kind = {"cpu": OnCpu, "cuda": OnCuda, "meta": None}[wanted[0]]
        pinned = kwargs.pop("pin_memory", False)
        if self.sync_debug_mode == "error" and waits(function, args, kwargs, result_kind):
            raise RuntimeError(f"{function.__name__}: called a synchronizing CUDA operation")
        generator = kwargs.get("generator")
        if generator is not None and result_kind is not None:
            found = getattr(generator, "made_for", "cpu")
            if found != ("cuda" if result_kind is OnCuda else "cpu"):
                raise RuntimeError(f"{function.__name__}: generator of the wrong device, {found}")

        def on_cpu(a: Any) -> Any:
            return "cpu" if isinstance(a, (str, torch.device)) and str(a)[:4] == "cuda" else a

        if places:
            args = tuple(map(on_cpu, args))
            kwargs = {name: on_cpu(a) for name, a in kwargs.items()}
        with torch._C.DisableTorchFunctionSubclass():
            if function is Tensor.to and result_kind in (OnCpu, OnCuda) and wanted:
                # never the same tensor, which is on the other device
                result = function(*args, **kwargs)
                result = result.clone() if type(result) not in (Tensor, result_kind) else result
            elif function is Tensor.cpu:
                result = args[0].clone()
            elif function is F.scaled_dot_product_attention and OnCuda in kinds:
                result = self.sdpa(*args, **kwargs)
            else:
                result = function(*args, **kwargs)
        if result_kind is not None:
            for t in tree_leaves(result):
                if type(t) in (Tensor, OnCpu, OnCuda):
                    t.__class__ = result_kind
        if pinned:
            assert result_kind is OnCpu
            result.pinned = True
        return result

    def sdpa(self, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, *args: Any, **more):
        """By the math backend, or by the CPU's fused one with the demands of CUDA's."""
        if torch.backends.cuda.math_sdp_enabled():
            return F.scaled_dot_product_attention(query, key, value, mask, *args, **more)
        assert torch.backends.cuda.mem_efficient_sdp_enabled()
        for t in (query, key, value):
            assert t.dim() == 4
            assert t.size(-1) % 8 == 0
            assert t.stride(-1) == 1
            assert t.data_ptr() % 16 == 0
        if mask is None:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return F.scaled_dot_product_attention(query, key, value, None, *args, **more)
        assert mask.dtype in (torch.bool, query.dtype)
        assert mask.shape == (*query.shape[:-1], key.size(-2))
        assert mask.stride(-1) == 1
        assert mask.data_ptr() % 16 == 0
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            output = F.scaled_dot_product_attention(query, key, value, mask.detach(), *args, **more)
        tensors = (t.detach() for t in (query, key, value))
        with sdpa_kernel(SDPBackend.MATH):  # for the gradient of the mask, which the CPU's lacks
            of_mask = F.scaled_dot_product_attention(*tensors, mask, *args, **more)
        return output + (of_mask - of_mask.detach())


def waits(function: Any, args: Any, kwargs: Any, result_kind: Any) -> bool:
    """Whether a call copies between the devices and is over only when that is."""
    first = type(args[0]) if args else None
    if result_kind is OnCuda and function in FROM_PYTHON:
        return not isinstance(args[0], Tensor) or first is OnCpu
    if function in ASK:
        return first is OnCuda
    if function not in (Tensor.to, Tensor.copy_, Tensor.cuda):
        return False
    source = args[1] if function is Tensor.copy_ else args[0]
    if {type(source), result_kind} != {OnCpu, OnCuda}:
        return False
    return not kwargs.get("non_blocking") or not hasattr(source, "pinned")


class Autocast(torch.autocast):
    def __init__(self, device_type: str, *args: Any, **options: Any) -> None:
        assert device_type == "cuda"
        super().__init__("cpu", *args, **options)


class Stream:
    def __init__(self, *_: Any) -> None:
        pass

    def wait_stream(self, _: Stream) -> None:
        pass

    def synchronize(self) -> None:
        pass


def captured(function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """In place of a graph: each replay calls the function again."""
    result = function()

    def replay() -> None:
        for destination, source in zip(tree_leaves(result), tree_leaves(function()), strict=True):
            if destination is not None:  # a result that is not wanted
                destination.copy_(source)

    return replay, result


helpers.GPU = True
helpers.KERNELS = helpers.DEVICES = ["cuda"]


def pytest_configure() -> None:
    torch.Generator, torch.autocast = Generator, Autocast
    cuda = torch.cuda
    cuda.get_rng_state = lambda _: torch.get_rng_state()
    stream = Stream()
    cuda.Stream, cuda.current_stream = Stream, lambda *_: stream
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.synchronize = cuda._sleep = lambda *_: None
    cuda.set_sync_debug_mode = functools.partial(setattr, PretendCuda, "sync_debug_mode")
    cuda.is_current_stream_capturing = lambda: False
    cuda.mem_get_info = lambda: (0, 0)
    # torch's own is below the modes that are entered, and asks CUDA itself
    torch.set_default_device = lambda device: torch.device(device).__enter__()
    PretendCuda().__enter__()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for module in {item.module for item in items if hasattr(item.module, "captured")}:
        module.captured = captured
