"""What is known about PyTorch's functions: which are elementwise, which read numbers, and so on."""

from __future__ import annotations

import operator as operators
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch

from torch_attn._programs.rules import RULES


class Elementwise(NamedTuple):
    """What is known about an elementwise function.

    Attributes:
        name: its name in `RULES`, or of a function of vectors.
        function: returns the result in a new tensor.
        is_reversed: whether the operands are reversed, as in `__radd__`.
        is_in_place: whether the function itself works in place.
    """

    name: str
    function: Any
    is_reversed: bool = False
    is_in_place: bool = False


def known_elementwise(function: Any) -> Elementwise | None:
    """Returns what is known about a function of PyTorch; None if it is not elementwise."""
    if torch.compiler.is_compiling() and isinstance(function, FunctionType):
        # Such as Tensor.__pow__, which torch.compile does not find in a dict that has it.
        return _BY_NAME.get(function.__name__)
    return _KNOWN.get(function)


def _named(holders: Iterable[Any], names: str) -> frozenset[Any]:
    return frozenset(
        f for n in names.split() for h in holders if callable(f := getattr(h, n, None))
    )


_HOLDERS = torch.Tensor, torch, torch.nn.functional, torch.special
# Functions that work on vectors (over rows, keys or distances), but not on values of the pair.
_OF_VECTORS = "copysign erfinv fmax fmin lgamma logit nan_to_num positive sinc xlogy"
_OPERATORS = (
    "add sub mul truediv:div div floordiv:floor_divide mod:remainder pow neg abs pos:positive "
    "eq ne lt le gt ge and:bitwise_and or:bitwise_or xor:bitwise_xor invert:bitwise_not "
    "lshift:bitwise_left_shift rshift:bitwise_right_shift"
)


def _known() -> Iterator[tuple[Any, Elementwise]]:
    """Yields each elementwise function with what is known about it."""
    for name in (*RULES, *_OF_VECTORS.split()):
        for function in _named(_HOLDERS, name):
            yield function, Elementwise(name, function)
        for function in _named([torch.Tensor], f"{name}_"):
            plain = getattr(torch.Tensor, name)
            yield function, Elementwise(name, plain, is_in_place=True)
    for word in _OPERATORS.split():
        operator, _, name = word.partition(":")
        plain = getattr(torch, name or operator)
        # torch.export(strict=True) calls Python's own operators.
        for prefix in ("", "r", "i"):
            for function in _named([torch.Tensor, operators], f"__{prefix}{operator}__"):
                of = name or operator, plain, prefix == "r", prefix == "i"
                yield function, Elementwise(*of)
    yield torch.rsub, Elementwise("sub", torch.sub, is_reversed=True)
    for holder in (torch, torch.Tensor):  # of two tensors; of one tensor, min and max reduce
        yield holder.min, Elementwise("minimum", torch.minimum)
        yield holder.max, Elementwise("maximum", torch.maximum)


_KNOWN = dict(_known())
_BY_NAME = {function.__name__: known for function, known in _KNOWN.items()}
# Functions that change their first argument.
IN_PLACE = _named(
    _HOLDERS,
    " ".join(n for h in _HOLDERS for n in dir(h) if n[0] != "_" == n[-1] and "resize" not in n)
    + " __setitem__",
)
# Functions whose results a stand-in has, as its dtype.
QUESTIONS = _named(_HOLDERS, "dim size stride numel is_floating_point is_complex") | {
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "ndim", "is_cuda", "requires_grad")
}
# Functions that read only the shape, dtype or device of their first argument, and no number.
LIKE = _named(
    _HOLDERS,
    "empty_like full_like ones_like zeros_like new_empty new_full new_ones new_tensor new_zeros",
)
# Functions that read some numbers of a tensor, chosen by whole numbers, and compute none.
LOOKUPS = _named(
    _HOLDERS,
    "index_select gather take take_along_dim embedding __getitem__ select squeeze unsqueeze view "
    "reshape flatten unbind",
)
# Functions that return numbers as Python's, or as many numbers as the tensor's numbers say.
READS = _named(
    _HOLDERS,
    "item tolist numpy __bool__ __int__ __float__ __index__ __complex__ __contains__ __iter__ "
    "__len__ __array__ is_nonzero nonzero equal allclose",
)
RANDOM = _named(
    _HOLDERS,
    "rand randn randint randperm rand_like randn_like randint_like bernoulli normal multinomial "
    "poisson dropout uniform_ normal_ random_ exponential_ bernoulli_",
)
