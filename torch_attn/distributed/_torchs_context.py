"""Inside torch's own ``context_parallel`` the operators raise, and name ours.

It puts the head of a sequence beside its tail on each process, for the balance, and tells DTensor
that these were blocks in order; lengths that do not divide are cut as DTensor would not. Nothing in
public says whether it is on: the two names that are looked at stand here and nowhere else, and are
tested with every torch that is supported.
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
    """Watches it from when its module is there; the package calls this."""
    when_imported(_MODULE, _watch)


class _Refusing:
    def attend(self, **call: Any) -> NoReturn:
        raise RuntimeError(
            "attn::sdpa: it is called within torch's context_parallel, which puts sequences out of "
            "order; torch_attn.distributed.context_parallel is right there"
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
