"""Inside torch's own ``context_parallel``, calls that would be silently wrong raise.

It puts the head of a sequence beside its tail on each process, for the balance, and tells DTensor
that these were blocks in order. So whatever depends on positions must not be computed there, nor
may plain tensors, which are a process's part. Nothing says in public whether it is on: what is
looked at is here and nowhere else, and tested with every torch that is supported.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor

from torch_attn._when_imported import when_imported
from torch_attn.distributed._context import answering

__all__ = ["check", "register_when_imported"]

_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"
_OURS = "; torch_attn.distributed.context_parallel is right there"
_POSITIONAL = ("attn_mask", "query_offset", "key_lengths", "alibi_slopes", "cu_seq_q")
_uneven: list[str] = []


@functools.cache
def register_when_imported() -> None:
    """Watches it from when its module is there; the package calls this."""
    when_imported(_MODULE, _watch)


def check(call: dict[str, Any]) -> None:
    """Raises for a call with DTensors that would be wrong."""
    from torch.distributed.tensor import DTensor

    module: Any = sys.modules.get(_MODULE)
    if module is None or DTensor._op_dispatcher._custom_op_handlers is module.existing_custom_ops:
        return
    if _uneven:
        raise RuntimeError(f"attn::sdpa: within torch's context_parallel, {_uneven[-1]}{_OURS}")
    windowed = call.get("is_causal") or min(call.get("window_size") or (0,)) >= 0
    if module._cp_options.enable_load_balance and (
        windowed or any(call.get(name) is not None for name in _POSITIONAL)
    ):
        raise RuntimeError(
            "attn::sdpa: torch's context_parallel has put the sequence out of order, so that a "
            f"call that depends on positions, by causality or a window, would be wrong{_OURS}"
        )


def _watch() -> None:
    module: Any = sys.modules[_MODULE]
    enable, disable = (
        getattr(module, f"_{verb}_context_parallel_dispatcher_impl")
        for verb in ("enable", "disable")
    )
    cut, modes = module._context_parallel_buffers, []

    def cut_buffers(mesh: Any, buffers: Any, dims: Any, *args: Any) -> Any:
        parts = cut(mesh, buffers, dims, *args)
        lengths = [b.shape[d] for b, d in zip(buffers, dims, strict=True) if isinstance(b, Tensor)]
        said = [f"{n} tokens do not divide by {mesh.size()}" for n in lengths if n % mesh.size()]
        _uneven[:] = said[:1]
        return parts

    def turn_on(*args: Any, **kwargs: Any) -> None:
        enable(*args, **kwargs)
        modes.append(answering(_NoPlainTensors(), all_operators=False))
        modes[-1].__enter__()

    def turn_off() -> None:
        modes.pop().__exit__(None, None, None)
        _uneven.clear()
        disable()

    module._context_parallel_buffers = cut_buffers
    module._enable_context_parallel_dispatcher_impl = turn_on
    module._disable_context_parallel_dispatcher_impl = turn_off


class _NoPlainTensors:
    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """A call with DTensors as it is, and an error for others."""
        from torch.distributed.tensor import DTensor

        if not isinstance(query, DTensor):
            raise RuntimeError(
                "attn::sdpa: within torch's context_parallel a plain tensor is a part of a "
                "sequence; F.scaled_dot_product_attention under replacing_sdpa() is over all of it"
                f"{_OURS}"
            )
        output: Tensor = torch.ops.attn._sdpa_forward(query, key, value, **options)[0]
        return output
