"""What the tests share: inputs, results, memory layouts, devices, processes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_attn
from torch_attn import reference

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
CPU_CAPABILITIES: list[str] = torch.ops.attn._cpu_capabilities()
WITH_CUDA = torch._C._dispatch_has_kernel_for_dispatch_key("attn::sdpa", "CUDA")
GPU = torch.cuda.is_available() and WITH_CUDA
DEVICES = ["cpu", "cuda"] if GPU else ["cpu"]
KERNELS = [*CPU_CAPABILITIES, "cuda"] if GPU else CPU_CAPABILITIES
SEED = 7
INF = math.inf
NAN = math.nan
Sdpa = Callable[..., Tensor]


class Inputs(NamedTuple):
    """The tensors of one call."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> Inputs:
        return Inputs(*(None if t is None else function(t) for t in self))

    def require_grad(self) -> Inputs:
        """Leaves with the same values and strides; all but a boolean mask want a gradient."""
        return self.map(lambda t: t.detach().requires_grad_(t.is_floating_point()))


def randn(shape: Sequence[int], dtype: torch.dtype, device: Any = None) -> Tensor:
    """`torch.randn`; in half types float32, rounded, for there releases of torch draw otherwise."""
    drawn = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.randn(shape, dtype=drawn, device=device).to(dtype)


def with_two_dtypes(cases: Iterable[Any]) -> list[tuple[Any, torch.dtype]]:
    """Pairs of each case and two dtypes, which go round."""
    return [(case, DTYPES[(i + j) % 4]) for i, case in enumerate(cases) for j in (0, 2)]


def make_mask(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A mask of one of `MASK_KINDS`."""
    if kind == "bool":
        return torch.rand(shape) > 0.3
    mask = randn(shape, torch.float32 if kind == "float32" else dtype)
    return mask.masked_fill(torch.rand(shape) < 0.3, -INF) if kind == "-inf" else mask


MASK_KINDS = ("bool", "float", "-inf", "float32")


def make_inputs(
    L: int,
    S: int,
    E: int = 16,
    Ev: int | None = None,
    *,
    batch: tuple[int, ...] | None = (2,),
    heads: int | tuple[int, int, int] = 3,
    mask: tuple[int, ...] | None = None,
    kind: str = "float",
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    """Random tensors `[*batch, heads, L or S, E or Ev]`; heads is one number or (Hq, Hk, Hv).

    With None as the batch they have neither batch nor heads.
    """
    of_each = (heads,) * 3 if isinstance(heads, int) else heads
    query, key, value = (() if batch is None else (*batch, number) for number in of_each)
    return Inputs(
        randn((*query, L, E), dtype),
        randn((*key, S, E), dtype),
        randn((*value, S, E if Ev is None else Ev), dtype),
        None if mask is None else make_mask(kind, mask, dtype),
    )


# --- what is compared -----------------------------------------------------------------------------


def builtin_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    dropout_mask: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The built-in, with its arguments in a form that it takes.

    It refuses, or reads wrongly, some that ours takes: mask and causal, a mask with more leading
    dimensions than query and key, a float32 mask for float64, and has no public `dropout_mask`.
    On CUDA by its math backend.
    """
    if is_causal and options.get("scale") is not None:
        query, options["scale"] = positive_scale(query, options["scale"])
    if attn_mask is not None:
        lead = torch.broadcast_shapes(query.shape[:-2], attn_mask.shape[:-2])
        query = query.expand(*lead, *query.shape[-2:])
        if query.dtype == torch.float64 and attn_mask.is_floating_point():
            attn_mask = attn_mask.double()
        if dropout_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -INF)
        if is_causal:
            causal = causal_mask(query, key)
            masked = False if attn_mask.dtype == torch.bool else -INF
            attn_mask, is_causal = torch.where(causal, attn_mask, masked), False
    if dropout_mask is None:
        with sdpa_kernel(SDPBackend.MATH) if query.is_cuda else contextlib.nullcontext():
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, **options
            )
    return torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, dropout_mask, **options
    )[0]


def positive_scale(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """The same problem for the built-in's fused kernel, which hides keys before it scales.

    A key that causality hides scores -inf: a negative scale makes inf of it, and 0 makes NaN.
    """
    if scale > 0:
        return query, scale
    return (-query, -scale) if scale < 0 else (0 * query, 1.0)


def causal_mask(query: Tensor, key: Tensor) -> Tensor:
    """[L, S], True where the query may attend to the key."""
    return query.new_ones(query.size(-2), key.size(-2), dtype=torch.bool).tril()


def ulp(x: float, dtype: torch.dtype) -> float:
    """The distance from x to the next larger number of the dtype."""
    info = torch.finfo(dtype)
    return info.eps * max(2.0 ** (math.frexp(x)[1] - 1), info.tiny)


def results(
    sdpa: Sdpa, inputs: Inputs, grad_output: Tensor | None = None, **options: Any
) -> dict[str, Tensor]:
    """The output and, given a gradient of it, the gradients of the inputs, by name."""
    if grad_output is None:
        with torch.no_grad():
            return {"output": sdpa(*inputs, **options)}
    leaves = inputs.require_grad()
    output = sdpa(*leaves, **options)
    wanted = {f"grad_{n}": t for n, t in leaves._asdict().items() if t is not None}
    wanted = {name: t for name, t in wanted.items() if t.requires_grad}
    gradients = torch.autograd.grad(
        output, list(wanted.values()), grad_output, materialize_grads=True
    )
    return {"output": output.detach(), **dict(zip(wanted, gradients, strict=True))}


def leaves_along(x: Inputs, t: Inputs) -> tuple[Inputs, list[Tensor]]:
    """x, of which those tensors are leaves that have a direction in t; and these leaves."""
    pairs = list(zip(x, t, strict=True))
    x = Inputs(*(a if d is None else a.detach().requires_grad_() for a, d in pairs))
    return x, [a for a, d in zip(x, t, strict=True) if d is not None]


def named(prefix: str, inputs: Inputs, tensors: Any) -> dict[str, Tensor]:
    """The tensors by the names of those inputs that are not None."""
    names = [name for name, t in inputs._asdict().items() if t is not None]
    return {f"{prefix}{name}": t.detach() for name, t in zip(names, tensors, strict=True)}


def double_backward(
    sdpa: Sdpa, x: Inputs, u: Tensor, t: Inputs, **options: Any
) -> dict[str, Tensor]:
    """J t and H(u; x; t) = grad_x <u, J t>, as the gradients of J'u in direction t.

    Only where t has a tensor does x require a gradient.
    """
    x, wanted = leaves_along(x, t)
    u = u.detach().requires_grad_()
    torch.manual_seed(SEED)
    gradients = torch.autograd.grad(sdpa(*x, **options), wanted, u, create_graph=True)
    along = [d for d in t if d is not None]
    tangent, *second = torch.autograd.grad(gradients, [u, *wanted], along, materialize_grads=True)
    return {"tangent": tangent.detach(), **named("second_", t, second)}


def of_inputs(*some: Any, rest: Any) -> list[Any]:
    """One for each input of the operators that has a derivative: `rest` for the last ones."""
    number = torch.ops.attn._sdpa_backward.default._schema.arguments[-1].N
    return [*some, *[rest] * (number - len(some))]


def natural_logsumexp(pair: Tensor, scale: float = 1) -> Tensor:
    """The logsumexp in float64, from what _sdpa_forward keeps (csrc/core/params.h).

    The CPU's pair counts in products, which the scale makes scores, unless the mask holds numbers.
    """
    first, second = pair.double().unbind(-1)
    stand_in = torch.ops.attn._cpu_capability() == "cuda"
    if stand_in or (pair.is_cuda and WITH_CUDA):  # the CUDA kernels
        return first + second
    return first * scale + second * math.log(2)


def make_grad_output(inputs: Inputs, *, enable_gqa: bool = False, **_: Any) -> Tensor:
    """A random gradient of the output of a call with these options, in the dtype of the query."""
    output = reference.sdpa(*inputs.map(lambda t: t.to("meta")), enable_gqa=enable_gqa)
    return randn(output.shape, inputs.query.dtype, inputs.query.device)


def to_dtype(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The tensor in another precision; a boolean mask has none."""
    return tensor if tensor is None or tensor.dtype == torch.bool else tensor.to(dtype)


def largest(tensor: Tensor) -> float:
    """The largest absolute value; NaN if there is one."""
    return tensor.abs().max().item() if tensor.numel() else 0.0


def kept(inputs: Inputs, p: float, seed: int | None = SEED, **options: Any) -> Tensor:
    """The dropout mask that a call draws after `torch.manual_seed`, [*, H, L, S], True = kept.

    With the unit matrix as value the output is the weights themselves, those dropped being 0.
    """
    S = inputs.key.size(-2)
    identity = torch.eye(S, dtype=inputs.value.dtype, device=inputs.value.device)
    identity = identity.expand(*inputs.value.shape[:-1], S)
    if seed is not None:
        torch.manual_seed(seed)
    return torch_attn.sdpa(*inputs._replace(value=identity), dropout_p=p, **options) != 0


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


# --- memory layouts -------------------------------------------------------------------------------


def place(tensor: Tensor, shape: tuple[int, ...], index: tuple[slice, ...]) -> Tensor:
    """The tensor's values as a view into a larger storage that is otherwise NaN (True for bool)."""
    filler = NAN if tensor.is_floating_point() else True
    view = tensor.new_full(shape, filler)[index]
    return view.copy_(tensor)


def _at_ends(tensor: Tensor) -> Tensor:
    # 64 numbers, so that the tensor is aligned as one of its own
    flat = place(tensor.flatten(), (tensor.numel() + 128,), (slice(64, -64),))
    return flat.view(tensor.shape)


def _around(tensor: Tensor) -> Tensor:
    return place(tensor, tuple(n + 5 for n in tensor.shape), (slice(3, -2),) * tensor.dim())


def _after_rows(tensor: Tensor) -> Tensor:
    *lead, rows, columns = tensor.shape
    return place(tensor, (*lead, rows + 67, columns), (..., slice(rows), slice(None)))


def _every_other_row(tensor: Tensor) -> Tensor:
    *lead, rows, columns = tensor.shape
    return place(tensor, (*lead, 2 * rows, columns), (..., slice(None, None, 2), slice(None)))


def _every_third_column(tensor: Tensor) -> Tensor:
    return place(tensor, (*tensor.shape[:-1], 3 * tensor.size(-1)), (..., slice(1, None, 3)))


# The same values at other places, all else NaN: reading anything but the values is seen.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "NaN before and after": _at_ends,
    "NaN around": _around,
    "NaN after the rows of a head": _after_rows,
    "every other row": _every_other_row,
    "every third column": _every_third_column,
    "rows and heads swapped": lambda t: _around(t.transpose(-3, -2)).transpose(-3, -2),
    "columns before rows": lambda t: _around(t.mT).mT,
    "all dimensions reversed": lambda t: _around(t.permute(*range(t.dim())[::-1])).permute(
        *range(t.dim())[::-1]
    ),
}


# --- instruction sets, devices, threads, processes ------------------------------------------------


@contextlib.contextmanager
def cpu_capability_set_to(name: str) -> Iterator[None]:
    previous = torch.ops.attn._cpu_capability()
    torch.ops.attn._set_cpu_capability(name)
    try:
        assert torch.ops.attn._cpu_capability() == name
        yield
    finally:
        torch.ops.attn._set_cpu_capability(previous)


def kernels_set_to(name: str) -> contextlib.AbstractContextManager[Any]:
    """Selects one of `KERNELS`: an instruction set, or "cuda", where new tensors then are."""
    return cpu_capability_set_to(name) if name in CPU_CAPABILITIES else torch.device("cuda")


def bits_promised(kernels: str) -> contextlib.AbstractContextManager[None]:
    """Where the bits of a row depend on nothing beside it: on a GPU only if that is asked for."""
    return torch_attn.invariant() if kernels == "cuda" else contextlib.nullcontext()


def rng_state(device: torch.device) -> Tensor:
    """The state of the generator from which calls on the device draw."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@contextlib.contextmanager
def threads_set_to(number: int) -> Iterator[None]:
    previous = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


# A server that has imported torch forks the processes, which takes seconds less than to start them.
# They are started where a GPU was asked for, or a sanitizer has to see all threads from the start.
_started = GPU or "LD_PRELOAD" in os.environ
_fresh: Any = multiprocessing.get_context("spawn" if _started else "forkserver")
_fresh.set_forkserver_preload(["helpers"])


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    """The function's result or exception from a new interpreter; a crash is an exception too."""
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=_fresh) as executor:
        return executor.submit(function, *args).result(timeout=120)
