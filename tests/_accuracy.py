"""The suite's one bound: at most twice the built-in's error, plus one ulp of the largest value."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_attn
from _in_order import sdpa_in_order
from helpers import (
    INF,
    SEED,
    Inputs,
    Sdpa,
    builtin_sdpa,
    causal_mask,
    double_backward,
    largest,
    make_grad_output,
    positive_scale,
    results,
    threads_set_to,
    to_dtype,
    ulp,
)
from torch_attn import reference


def hold(name: str, actual: Tensor, expected: Tensor, error: float, *dtypes: torch.dtype) -> None:
    """The bound: twice the error that PyTorch makes, plus one ulp of the largest value.

    With several dtypes, of the inputs and of the result, the coarser counts.
    """
    assert actual.shape == expected.shape, name
    off, size = largest(actual - expected), largest(expected)
    assert off <= 2 * error + max(ulp(size, dtype) for dtype in dtypes), (
        f"{name}: error {off:.3g}, PyTorch's {error:.3g}, largest value {size:.3g}"
    )


def means_something(errors: dict[str, float], expected: dict[str, Tensor]) -> None:
    """A bound means nothing where the built-in and the reference compute different things."""
    assert max(errors.values()) <= 0.05 * max(map(largest, expected.values())), errors


def check(
    inputs: Inputs, *, gradients: bool = False, dropout_mask: Tensor | None = None, **options: Any
) -> dict[str, Tensor]:
    """Holds the output and, if asked, every gradient of `torch_attn.sdpa` to the bound.

    The output of a call without gradients too, which other kernels compute if there are few
    queries. With dropout, `dropout_mask` is what `helpers.kept` says of the same call. Returns the
    results.
    """
    grad_output = make_grad_output(inputs, **options) if gradients else None
    problem = Problem(inputs, options, grad_output, dropout_mask=dropout_mask)
    for gradient in [None, grad_output] if gradients else [None]:
        torch.manual_seed(SEED)
        actual = results(torch_attn.sdpa, inputs, gradient, **options)
        hold_results(problem, actual, inputs.query.dtype)
    assert actual.keys() == problem.exact.keys()
    return actual


def hold_results(problem: Problem, actual: dict[str, Tensor], *dtypes: torch.dtype) -> None:
    """Holds results of a problem, which have the dtype of their input, to the bound."""
    means_something(problem.builtin_errors, problem.exact)
    for name, result in actual.items():
        source = "query" if name in ("output", "tangent") else name.partition("_")[2]
        dtype = getattr(problem.inputs, source).dtype
        assert result.dtype == dtype, name
        hold(name, result, problem.exact[name], problem.builtin_errors[name], dtype, *dtypes)


P = TypeVar("P")
Tensors = dict[str, Tensor]


def check_modules(runs: Sequence[tuple[Tensors, Tensors, Tensors, Tensors]]) -> None:
    """Holds the results of a module to the bound, over several inputs: their errors are luck.

    Each run has the module's results by name, the results of PyTorch's module by two algorithms, of
    which the larger error counts, and the results in float64.
    """
    ours, first, second, exact = (
        {name: torch.stack([run[name] for run in column]) for name in column[0]}
        for column in zip(*runs, strict=True)
    )
    assert ours.keys() == first.keys() == second.keys() == exact.keys()
    for name, expected in exact.items():
        error = max(largest(first[name] - expected), largest(second[name] - expected))
        hold(name, ours[name], expected, error, first[name].dtype)


def over_neighbours(
    problem: P,
    errors: Callable[[P], Iterable[tuple[str, float]]],
    neighbour: Callable[[P, bool], P],
    changes: Sequence[bool] = (True,) * 12,
) -> dict[str, float]:
    """The largest error of each result, over a problem and its neighbours: of one it is luck.

    `neighbour(problem, change)` is another one, with other numbers if asked.
    """
    worst: dict[str, float] = {}
    for change in changes:
        for name, error in errors(problem):
            assert math.isfinite(error), name
            worst[name] = max(error, worst.get(name, 0.0))
        problem = neighbour(problem, change)
    return worst


def changed(tensors: Tensors) -> Tensors:
    """Every number changed by up to a percent: rounding errors of their own."""

    def change(t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return t
        return torch.where(t.isfinite(), t * (0.99 + 0.02 * torch.rand(t.shape)).to(t.dtype), t)

    return {name: change(t) for name, t in tensors.items()}


def differences(found: Tensors, exact: Tensors) -> Iterator[tuple[str, float]]:
    """The largest of each result, where it is finite."""
    for name, result in found.items():
        yield name, largest((result.double() - exact[name])[exact[name].isfinite()])


# Neighbours with columns, rows and keys in another order; True: with other numbers, too.
IN_OTHER_ORDERS = (False,) * 8 + (True,) * 4


class Neighbour:
    """A problem as well conditioned as another, with rounding errors of its own.

    The same sums in another order, of columns and, unless causal, of keys and queries; if asked,
    also every number changed by up to a percent, for a problem of a few numbers has no other order.
    """

    def __init__(
        self, inputs: Inputs, causal: bool, generator: torch.Generator, *, change: bool
    ) -> None:
        self.generator = generator
        self.change = change

        query, key, value, _ = inputs
        device = query.device

        def order(n: int, fixed: bool = False) -> Tensor:
            if fixed:
                return torch.arange(n, device=device)
            return torch.randperm(n, generator=generator, device=device)

        self.queries, self.keys = order(query.size(-2), causal), order(key.size(-2), causal)
        self.columns, self.value_columns = order(query.size(-1)), order(value.size(-1))

    def inputs(self, inputs: Inputs) -> Inputs:
        """Moves the inputs, or a direction for some of them, to the neighbour's order."""
        query, key, value, attn_mask = inputs
        return Inputs(
            self._moved(query, self.queries, self.columns),
            self._moved(key, self.keys, self.columns),
            self._moved(value, self.keys, self.value_columns),
            self.scores(attn_mask),
        )

    def output(self, tensor: Tensor | None) -> Tensor | None:
        return self._moved(tensor, self.queries, self.value_columns)

    def scores(self, tensor: Tensor | None) -> Tensor | None:
        return self._moved(tensor, self.queries, self.keys)

    def _moved(self, tensor: Tensor | None, rows: Tensor, columns: Tensor) -> Tensor | None:
        if tensor is None:
            return None
        tensor = tensor if tensor.size(-2) == 1 else tensor.index_select(-2, rows)
        tensor = tensor if tensor.size(-1) == 1 else tensor.index_select(-1, columns)
        if not self.change or not tensor.is_floating_point():
            return tensor
        change = torch.rand(
            tensor.shape, generator=self.generator, dtype=torch.float64, device=tensor.device
        )
        changed = tensor * (0.99 + 0.02 * change).to(tensor.dtype)
        return changed.where(changed.isfinite(), tensor)  # finfo.min stays


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call, the gradient given to its backward and the weights that its dropout keeps.

    With a direction its results are second derivatives along that, else first ones.
    """

    inputs: Inputs
    options: dict[str, Any]
    grad_output: Tensor | None = None
    direction: Inputs | None = None
    dropout_mask: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Problem:
        convert = functools.partial(to_dtype, dtype=dtype)
        return dataclasses.replace(
            self,
            inputs=self.inputs.map(convert),
            grad_output=convert(self.grad_output),
            direction=self.direction and self.direction.map(convert),
        )

    def solve(self, sdpa: Sdpa) -> dict[str, Tensor]:
        dropout = {} if self.dropout_mask is None else {"dropout_mask": self.dropout_mask}
        call, options = (sdpa, self.inputs, self.grad_output), {**self.options, **dropout}
        if self.direction is None:
            return results(*call, **options)
        return double_backward(*call, self.direction, **options)

    @functools.cached_property
    def exact(self) -> dict[str, Tensor]:
        with threads_set_to(1):
            return self.to(torch.float64).solve(reference.sdpa)

    def errors(self, sdpa: Sdpa) -> dict[str, float]:
        """The largest error of each result."""
        return {name: largest(t - self.exact[name]) for name, t in self.solve(sdpa).items()}

    @functools.cached_property
    def builtin_errors(self) -> dict[str, float]:
        """The largest error of each of the built-in's results at the precision of the inputs.

        It has two algorithms, fused and with all scores in memory; ours is the fused one, for
        whatever arguments. The larger error of the two counts, over several neighbours of the
        problem: it must not depend on which of them the built-in's rules pick, nor on how lucky its
        rounding was.
        """
        key = self.digest()
        if key not in _known_errors:  # the same for every instruction set
            with threads_set_to(1):  # they depend on it
                _known_errors[key] = self.over_neighbours(_errors)
        return _known_errors[key]

    def over_neighbours(
        self, errors: Callable[[Problem], Iterable[tuple[str, float]]]
    ) -> dict[str, float]:
        """The largest error of each result, over the problem and its neighbours."""
        generator = torch.Generator(self.inputs.query.device).manual_seed(SEED)
        changes = IN_OTHER_ORDERS if self.size() < 1 << 17 else IN_OTHER_ORDERS[:2]
        return over_neighbours(
            self, errors, lambda p, change: p.neighbour(generator, change=change), changes
        )

    def without_dropout(self) -> Problem:
        if "dropout_p" not in self.options:
            return self
        options = {name: option for name, option in self.options.items() if name != "dropout_p"}
        return dataclasses.replace(self, options=options, dropout_mask=None)

    def size(self) -> int:
        return sum(t.numel() for t in self.inputs if t is not None)

    def neighbour(self, generator: torch.Generator, *, change: bool) -> Problem:
        causal = bool(self.options.get("is_causal"))
        other = Neighbour(self.inputs, causal, generator, change=change)
        return dataclasses.replace(
            self,
            inputs=other.inputs(self.inputs),
            direction=self.direction and other.inputs(self.direction),
            grad_output=other.output(self.grad_output),
            dropout_mask=other.scores(self.dropout_mask),
        )

    def digest(self) -> bytes:
        """Equal for problems of equal content."""
        content = hashlib.blake2b(repr(sorted(self.options.items())).encode())
        tensors = *self.inputs, *(self.direction or ()), self.grad_output, self.dropout_mask
        for tensor in tensors:
            if tensor is None:
                content.update(b"None")
            else:
                content.update(f"{tensor.device}{tensor.dtype}{list(tensor.shape)}".encode())
                flat = tensor.flatten().clone(memory_format=torch.contiguous_format)
                content.update(flat.view(torch.uint8).cpu().numpy())
        return content.digest()


_known_errors: dict[bytes, dict[str, float]] = {}


def math_sdpa(*args: Any, **options: Any) -> Tensor:
    """The built-in by its backend that has second derivatives."""
    with sdpa_kernel(SDPBackend.MATH):
        return builtin_sdpa(*args, **options)


def _errors(problem: Problem) -> Iterator[tuple[str, float]]:
    """Each result with an error that the built-in makes in it."""
    dtype = problem.inputs.query.dtype
    if dtype == torch.float64:
        # The reference is no better than the built-in here. Rounding errors grow with eps: take
        # the errors in float32, scaled, and as much again for the reference's own.
        factor = 2 * torch.finfo(dtype).eps / torch.finfo(torch.float32).eps
        yield from ((name, factor * e) for name, e in _errors(problem.to(torch.float32)))
        return
    if problem.direction is not None:
        yield from problem.errors(math_sdpa).items()
        return
    if not all(t.numel() for t in problem.inputs[:3]):
        # The built-in gives some empty results another shape.
        yield from problem.errors(reference.sdpa).items()
        return
    own = problem.errors(builtin_sdpa)
    yield from own.items()
    query, _, _, attn_mask = problem.inputs
    if query.is_cuda and attn_mask is not None and attn_mask.dtype not in (dtype, torch.bool):
        return  # The fused kernel has no such mask, with which ours keeps its weights in float32.
    # The fused kernel has no dropout, which makes weights, and so errors, 1 / (1 - p) as large.
    factor = 1 / (1 - problem.options.get("dropout_p", 0.0))
    plain = problem.without_dropout()
    for name, error in plain.errors(fused_sdpa).items():
        if name != "grad_attn_mask" or dtype == torch.float32:
            yield name, factor * error
    # On few numbers the largest error is luck: the built-in's sums have another order on every kind
    # of processor, and in some what a nearly certain weight subtracts is rounded alike. So one
    # order is the same on all. (What is exact, such as the gradient of a single key's score, is so
    # in every order.)
    if dtype == torch.float32 and problem.size() < 1 << 14:
        for name, error in plain.errors(sdpa_in_order).items():
            if own[name] > 0:
                yield name, factor * error


def fused_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The built-in's fused kernel, on a problem that it takes: 4-D, equal heads and sizes.

    On the CPU it has no gradient for a mask. In float32 the mask is made of inner products instead:
    queries get the rows of the unit matrix as further columns, keys the columns of the mask.
    On CUDA it is the one that has masks, and wants rows of a multiple of 16 bytes.
    """
    on_cuda = query.is_cuda
    if enable_gqa:
        heads = query.size(-3)
        key = key.repeat_interleave(heads // key.size(-3), -3)
        value = value.repeat_interleave(heads // value.size(-3), -3)
    lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    L, S, E, Ev = query.size(-2), key.size(-2), query.size(-1), value.size(-1)
    scale = 1 / math.sqrt(max(E, 1)) if scale is None else scale
    query, scale = positive_scale(query, scale)
    if is_causal and attn_mask is None and S > L:
        # It leaves the gradients of keys that no query sees as they are in memory.
        S, key, value = L, key[..., :L, :], value[..., :L, :]
    if attn_mask is not None and attn_mask.is_floating_point():
        if on_cuda:  # It multiplies by log2(e): finfo.min would be masked.
            attn_mask = torch.where(attn_mask < -1e38, attn_mask + 1.5e38, attn_mask)
        elif query.dtype == torch.float32:
            columns = attn_mask.masked_fill(attn_mask == -INF, 0).expand(*lead, L, S).mT
            rows = torch.eye(L, device=query.device).expand(*query.shape[:-1], L)
            key = torch.cat([key.expand(*lead, S, E), columns], -1)
            query = torch.cat([query * scale, rows], -1)
            attn_mask, scale = attn_mask != -INF, 1.0
    if attn_mask is not None:
        attn_mask = attn_mask if on_cuda else attn_mask.detach()
        if is_causal:
            masked = False if attn_mask.dtype == torch.bool else -INF
            attn_mask, is_causal = torch.where(causal_mask(query, key), attn_mask, masked), False
        attn_mask = attn_mask.expand(*lead, L, S).reshape(-1, 1, L, S)
        attn_mask = attn_mask.clone(memory_format=torch.contiguous_format)
    size = max(query.size(-1), Ev)
    size = (size + 7) // 8 * 8 if on_cuda else size
    query, key, value = (
        F.pad(t, (0, size - t.size(-1)))
        .expand(*lead, t.size(-2), size)
        .reshape(-1, 1, t.size(-2), size)
        .clone(memory_format=torch.contiguous_format)  # a stride of 1 even where there is 1 column
        for t in (query, key, value)
    )
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION if on_cuda else SDPBackend.FLASH_ATTENTION):
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask, is_causal=is_causal, scale=scale
        )
    return output[..., :Ev].reshape(*lead, L, Ev)
