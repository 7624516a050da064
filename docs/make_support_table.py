"""Writes the table of docs/derivatives.md: ``python docs/make_support_table.py``.

Every cell is tried: the derivative or subsystem of its row, taken of the attention of its column,
in float64 on the CPU, and compared with :mod:`torch_attn.reference`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.nn.attention.flex_attention import flex_attention

import torch_attn
from torch_attn import reference

PAGE = Path(__file__).parent / "derivatives.md"
BEGIN, END = "<!-- table: make_support_table.py -->\n", "<!-- end of table -->\n"

Attention = Callable[..., Tensor]


def flex(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
    if bias is None:
        return flex_attention(query, key, value)
    return flex_attention(
        query, key, value, score_mod=lambda score, b, h, i, j: score + bias[h, i, j]
    )


COLUMNS: dict[str, Attention] = {
    "built-in": torch.nn.functional.scaled_dot_product_attention,
    "FlexAttention": flex,
    "attn": torch_attn.sdpa,
}


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 2, length, 8, dtype=torch.float64) for length in (5, 7, 7))
    return query, key, value


def gradients(attention: Attention, *tensors: Tensor, create_graph: bool = False) -> Any:
    leaves = [t.detach().requires_grad_() for t in tensors]
    loss = attention(*leaves).pow(2).sum()
    return leaves, torch.autograd.grad(loss, leaves, create_graph=create_graph)


def backward(attention: Attention) -> Any:
    return gradients(attention, *inputs())[1]


def gradient_of_bias(attention: Attention) -> Any:
    torch.manual_seed(1)
    return gradients(attention, *inputs(), torch.randn(2, 5, 7, dtype=torch.float64))[1]


def double_backward(attention: Attention) -> Any:
    leaves, first = gradients(attention, *inputs(), create_graph=True)
    return torch.autograd.grad(sum(g.pow(2).sum() for g in first), leaves)


def forward_mode(attention: Attention) -> Any:
    return jvp(attention, inputs(), tuple(torch.ones_like(t) for t in inputs()))


def forward_over_reverse(attention: Attention) -> Any:
    first = grad(lambda *t: attention(*t).pow(2).sum(), argnums=(0, 1, 2))
    return jvp(first, inputs(), tuple(torch.ones_like(t) for t in inputs()))


def mapped(attention: Attention) -> Any:
    return vmap(attention)(*(t.unsqueeze(1) for t in inputs()))


def per_sample_gradients(attention: Attention) -> Any:
    return vmap(grad(lambda *t: attention(*t).pow(2).sum(), argnums=(0, 1, 2)))(
        *(t.unsqueeze(1) for t in inputs())
    )


def loss_of_query(attention: Attention) -> Callable[[Tensor], Tensor]:
    _, key, value = inputs()
    return lambda query: attention(query, key, value).pow(2).sum()


def jacobian_reverse(attention: Attention) -> Any:
    return jacrev(attention)(*inputs())


def jacobian_forward(attention: Attention) -> Any:
    return jacfwd(attention)(*inputs())


def full_hessian(attention: Attention) -> Any:
    return hessian(loss_of_query(attention))(inputs()[0])


def third_order(attention: Attention) -> Any:
    derivative = loss_of_query(attention)
    for _ in range(2):
        inner = grad(derivative)
        derivative = lambda q, inner=inner: inner(q).pow(2).sum()  # noqa: E731
    return grad(derivative)(inputs()[0])


def compiled(attention: Attention) -> Any:
    torch.compiler.reset()
    return gradients(torch.compile(attention, fullgraph=True, backend="aot_eager"), *inputs())[1]


def exported(attention: Attention) -> Any:
    class Module(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return attention(query, key, value)

    return torch.export.export(Module(), inputs()).module()(*inputs())


ROWS: dict[str, Callable[[Attention], Any]] = {
    "backward": backward,
    "gradient of a bias": gradient_of_bias,
    "double backward": double_backward,
    "forward mode (`torch.func.jvp`)": forward_mode,
    "forward over reverse": forward_over_reverse,
    "`jacrev`": jacobian_reverse,
    "`jacfwd`": jacobian_forward,
    "`hessian`": full_hessian,
    "third order": third_order,
    "`vmap`": mapped,
    "per-sample gradients, `vmap(grad)`": per_sample_gradients,
    "`torch.compile(fullgraph=True)`, backward": compiled,
    "`torch.export`": exported,
}


def try_cell(row: Callable[[Attention], Any], attention: Attention) -> str:
    """yes, slow loop (vmap went through the samples one by one), wrong, or raises."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = row(attention)
        except Exception:
            return "raises"
    expected = row(reference.sdpa)
    try:
        torch.testing.assert_close(result, expected)
    except AssertionError:
        return "wrong"
    slow = any("performance drop" in str(w.message) for w in caught)
    return "slow loop" if slow else "yes"


def table() -> str:
    lines = ["| | " + " | ".join(COLUMNS) + " |", "|---|" + "---|" * len(COLUMNS)]
    for name, row in ROWS.items():
        cells = (try_cell(row, attention) for attention in COLUMNS.values())
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    torch._C._functorch._set_vmap_fallback_warning_enabled(True)
    PAGE.write_text(with_table(PAGE.read_text()))
    print(PAGE.read_text())
