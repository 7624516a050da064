"""Makes the operators raise an error within torch's own ``context_parallel``.

The error names the ``context_parallel`` of this package. To balance the work, torch's function
gives each process a piece near the head of a sequence and a piece near the tail, but it tells
DTensor that the blocks are in order. It also cuts indivisible lengths in another way than DTensor
does. No public function tells whether torch's function is on. So this module uses two private
names. The tests check these names with every supported torch.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any, NoReturn

from torch_attn._when_imported import when_imported
from torch_attn.distributed._context import answering

__all__ = ["register_when_imported"]

_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"


@functools.cache
def register_when_imported() -> None:
    """Watches torch's function as soon as torch's module is imported."""
    when_imported(_MODULE, _watch)


class _Refusing:
    def attend(self, **call: Any) -> NoReturn:
        raise RuntimeError(
            "attn::sdpa: it is called within torch's context_parallel, which puts sequences out of "
            "order; use torch_attn.distributed.context_parallel"
        )


def _watch() -> None:
    module: Any = sys.modules[_MODULE]
    enable, disable = (
        getattr(module, f"_{verb}_context_parallel_dispatcher_impl")
        for verb in ("enable", "disable")
    )
    entered = contextlib.ExitStack()

    def turn_on(*args: Any, **kwargs: Any) -> None:
        enable(*args, **kwargs)
        entered.enter_context(answering(_Refusing()))

    def turn_off() -> None:
        entered.close()
        disable()

    module._enable_context_parallel_dispatcher_impl = turn_on
    module._disable_context_parallel_dispatcher_impl = turn_off
