"""Part 3: how far attn and the built-in are from the same attention in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_attn
from torch_attn import reference

from .report import check, console, heading, table

BATCH, HEADS, KV_HEADS, QUERIES, KEYS, HEAD_DIM = 2, 8, 2, 100, 160, 64
DROPOUT = 0.2
SEED = 0
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

Operator = Callable[..., Tensor]
OPERATORS: dict[str, Operator] = {
    "attn": torch_attn.sdpa,
    "built-in": F.scaled_dot_product_attention,
}


@dataclass(frozen=True)
class Case:
    name: str
    mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    kv_heads: int = HEADS


@dataclass(frozen=True)
class Error:
    """The largest absolute errors, and the largest absolute values of the true results."""

    output: float
    gradients: float
    largest_output: float
    largest_gradient: float


def cases() -> list[Case]:
    attends = torch.rand(BATCH, 1, QUERIES, KEYS) > 0.25
    # Linear biases for far keys, another slope for every head (ALiBi).
    distance = (torch.arange(QUERIES)[:, None] - torch.arange(KEYS)).abs()
    bias = -distance * 2.0 ** -torch.arange(1.0, HEADS + 1)[:, None, None]
    return [
        Case("no mask"),
        Case("causal", is_causal=True),
        Case("boolean mask", mask=attends),
        Case("floating mask", mask=bias),
        Case(f"GQA, {HEADS} on {KV_HEADS}", kv_heads=KV_HEADS),
        Case(f"dropout {DROPOUT}", dropout_p=DROPOUT),
    ]


def kept_weights(operator: Operator, query: Tensor, key: Tensor, dropout_p: float) -> Tensor:
    """Which weights the seed's dropout keeps: with the identity as values they are the output."""
    identity = torch.eye(key.size(-2), dtype=key.dtype).expand(*key.shape[:-1], key.size(-2))
    torch.manual_seed(SEED)
    return operator(query, key, identity, dropout_p=dropout_p) != 0


def differentiate(operator: Operator, tensors: list[Tensor], **arguments: object) -> list[Tensor]:
    """The output, and the gradients of all floating tensors for a fixed gradient of the output."""
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
    torch.manual_seed(SEED)
    output = operator(*leaves, **arguments)
    grad_output = torch.sin(torch.arange(output.numel(), dtype=torch.float64)).view_as(output)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    gradients = torch.autograd.grad(output, wanted, grad_output.to(output.dtype))
    return [t.double() for t in (output.detach(), *gradients)]


def error(operator: Operator, case: Case, dtype: torch.dtype) -> Error:
    torch.manual_seed(SEED)
    query = torch.randn(BATCH, HEADS, QUERIES, HEAD_DIM).to(dtype)
    key, value = torch.randn(2, BATCH, case.kv_heads, KEYS, HEAD_DIM).to(dtype)
    tensors = [query, key, value]
    if case.mask is not None:
        floating = case.mask.is_floating_point()
        tensors.append(case.mask.to(dtype) if floating else case.mask)
    arguments: dict[str, object] = {
        "dropout_p": case.dropout_p,
        "is_causal": case.is_causal,
        "enable_gqa": case.kv_heads != HEADS,
    }
    actual = differentiate(operator, tensors, **arguments)
    if case.dropout_p:
        arguments["dropout_mask"] = kept_weights(operator, query, key, case.dropout_p)
    exact = [t.double() if t.is_floating_point() else t for t in tensors]
    expected = differentiate(reference.sdpa, exact, **arguments)
    errors = [(a - e).abs().max().item() for a, e in zip(actual, expected, strict=True)]
    sizes = [e.abs().max().item() for e in expected]
    return Error(errors[0], max(errors[1:]), sizes[0], max(sizes[1:]))


def ulp(value: float, dtype: torch.dtype) -> float:
    """The distance between numbers of the dtype at this value."""
    return torch.finfo(dtype).eps * 2.0 ** (math.frexp(value)[1] - 1)


def shares(ours: Error, dtype: torch.dtype, builtin: Error, single: Error) -> tuple[float, float]:
    """The errors of output and gradients as shares of what is allowed.

    Allowed is twice the built-in's error plus one unit in the last place of the largest value. In
    float64 the reference is as inexact as what it judges: there the built-in's error in float32
    counts, scaled to float64, and once more for the reference.
    """
    factor = 2.0
    if dtype == torch.float64:
        builtin = single
        factor = 3 * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    return (
        ours.output / (factor * builtin.output + ulp(ours.largest_output, dtype)),
        ours.gradients / (factor * builtin.gradients + ulp(ours.largest_gradient, dtype)),
    )


def run() -> None:
    heading(
        "3  Accuracy",
        "The largest error against the textbook formula in float64, of the output and of the "
        "gradients of query, key, value and a floating mask.",
    )
    results = table(
        "case",
        "dtype",
        "output\nattn",
        "output\nbuilt-in",
        "gradients\nattn",
        "gradients\nbuilt-in",
        caption=f"batch {BATCH}, {HEADS} heads, {QUERIES} queries, {KEYS} keys, head_dim "
        f"{HEAD_DIM}. Dropout: each operator's own mask, seen with the identity as values.",
    )
    worst = 0.0
    torch.manual_seed(SEED)
    for case in cases():
        single: Error | None = None
        for dtype in DTYPES:
            ours, builtin = (error(operator, case, dtype) for operator in OPERATORS.values())
            single = single or builtin
            results.add_row(
                case.name if dtype == DTYPES[0] else "",
                str(dtype).removeprefix("torch."),
                f"{ours.output:.1e}",
                f"{builtin.output:.1e}",
                f"{ours.gradients:.1e}",
                f"{builtin.gradients:.1e}",
                end_section=dtype == DTYPES[-1],
            )
            worst = max(worst, *shares(ours, dtype, builtin, single))
    console.print(results)
    check(
        worst <= 1,
        "every error of attn is at most twice the built-in's plus one unit in the last place of "
        f"the largest value (at worst {worst:.0%} of that)",
    )
