"""Autograd as PyTorch sees it: gradcheck, opcheck, compile, flags, only the gradients asked for."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torch_attn
from _cases import SMALL
from _operators import OPERATORS, arguments
from helpers import Inputs, make_grad_output, make_inputs, results
from torch_attn import reference

DRAWING = ("sdpa", "attention", "sdpa_with_weights", "_sdpa_forward")  # for dropout
TENSORS = Inputs._fields
SUBSETS = [s for n in range(1, 5) for s in itertools.combinations(TENSORS, n)]


class BackwardCalls(TorchDispatchMode):
    """Notes what each call of the backward operator was asked for and what it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[list[bool], list[bool]]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.attn._sdpa_backward.default:
            asked = list(kwargs["grad_input_mask"])[: len(TENSORS)]
            self.calls.append(
                (asked, [gradient is not None for gradient in result][: len(TENSORS)])
            )
        return result


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("subset", SUBSETS, ids="-".join)
def test_only_gradients_asked_for(subset: tuple[str, ...]) -> None:
    """Each of the 15 subsets: the same bits as with all four, and nothing else is computed."""
    inputs = make_inputs(20, 70, heads=(4, 2, 1), mask=(4, 1, 70))
    options = {"enable_gqa": True, "is_causal": True}
    grad_output = make_grad_output(inputs, **options)
    expected = results(torch_attn.sdpa, inputs, grad_output, **options)
    leaves = Inputs(*(t.clone().requires_grad_(n in subset) for n, t in inputs._asdict().items()))
    output = torch_attn.sdpa(*leaves, **options)
    assert output.requires_grad
    with BackwardCalls() as backward:
        output.backward(grad_output)
    asked = [name in subset for name in TENSORS]
    assert backward.calls == [(asked, asked)]
    for name, leaf in leaves._asdict().items():
        if name in subset:
            assert torch.equal(leaf.grad, expected[f"grad_{name}"]), name
        else:
            assert leaf.grad is None, name


@pytest.mark.usefixtures("device")
def test_boolean_mask_gets_no_gradient() -> None:
    inputs = make_inputs(5, 7, mask=(5, 7), kind="bool").require_grad()
    with BackwardCalls() as backward:
        torch_attn.sdpa(*inputs).sum().backward()
    assert backward.calls == [([True, True, True, False],) * 2]


@pytest.mark.usefixtures("device")
def test_every_gradient_is_given_for_empty_tensors() -> None:
    inputs = make_inputs(5, 0, mask=(5, 0)).require_grad()
    torch_attn.sdpa(*inputs).sum().backward()
    for name, leaf in inputs._asdict().items():
        assert torch.equal(leaf.grad, torch.zeros_like(leaf)), name


@pytest.mark.usefixtures("device")
def test_flags() -> None:
    inputs = make_inputs(5, 7, mask=(5, 7))
    assert not torch_attn.sdpa(*inputs).requires_grad
    leaves = inputs.require_grad()
    output = torch_attn.sdpa(*leaves)
    assert output.requires_grad
    assert not output.is_leaf
    assert "Sdpa" in output.grad_fn.name()
    with torch.no_grad():
        assert not torch_attn.sdpa(*leaves).requires_grad
    assert torch_attn.sdpa(inputs.query, inputs.key, leaves.value).requires_grad
    assert torch_attn.sdpa(*inputs[:3], leaves.attn_mask).requires_grad


@pytest.mark.usefixtures("device")
def test_graph_can_be_kept_or_not() -> None:
    inputs = make_inputs(5, 7, mask=(5, 7)).require_grad()
    output = torch_attn.sdpa(*inputs)
    first = torch.autograd.grad(output.sum(), inputs, retain_graph=True)
    second = torch.autograd.grad(output.sum(), inputs)
    assert all(map(torch.equal, first, second))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(output.sum(), inputs)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("tensor", [*TENSORS, "output"])
def test_input_changed_before_backward_is_noticed(tensor: str) -> None:
    inputs = make_inputs(5, 7, mask=(5, 7)).require_grad()
    output = torch_attn.sdpa(*inputs)
    with torch.no_grad():
        (output if tensor == "output" else getattr(inputs, tensor)).add_(1)
    message = rf"modified by an inplace operation.* backward reads {tensor} again.* clone\(\)"
    with pytest.raises(RuntimeError, match=message):
        output.backward(torch.ones_like(output))


@pytest.mark.regression
@pytest.mark.usefixtures("device")
def test_a_boolean_mask_that_layers_share_is_refilled() -> None:
    """The built-in copies it. Here it is an error that names it and the way out, which is right."""
    mask = torch.ones(6, 6, dtype=torch.bool)
    given = torch.randn(1, 2, 6, 8, dtype=torch.float64, requires_grad=True)

    def gradient(attend: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        x: Tensor = given
        for window in (6, 2, 6, 2):
            mask.copy_(torch.ones_like(mask).tril().triu(1 - window))
            x = x + attend(x, mask)
        return torch.autograd.grad(x.sum(), given)[0]

    with pytest.raises(RuntimeError, match=r"backward reads attn_mask again.* clone\(\)"):
        gradient(lambda x, mask: torch_attn.sdpa(x, x, x, mask))
    expected = gradient(lambda x, mask: reference.sdpa(x, x, x, mask.clone()))
    copied = gradient(lambda x, mask: torch_attn.sdpa(x, x, x, mask.clone()))
    torch.testing.assert_close(copied, expected)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("name", "case", "dtype"),
    [
        (name, case, (torch.float32, torch.bfloat16)[i % 2])
        for n, name in enumerate(OPERATORS)
        for i, case in enumerate(SMALL)
        if (n + i) % 4 == 0  # every operator meets a quarter of the cases, every case two operators
    ],
)
def test_opcheck(name: str, case: str, dtype: torch.dtype) -> None:
    small = dataclasses.replace(SMALL[case], dtype=dtype)
    opcheck(name, small.inputs(), small.options)


def opcheck(name: str, inputs: Inputs, options: dict[str, Any]) -> None:
    """Runs opcheck, on public operators with gradients too; the statistics have no derivative."""
    positional, keywords = arguments(name, inputs, **options)
    # Two runs of dropout differ, so that what compares two runs is left out.
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    deterministic = (*utilities, "test_aot_dispatch_dynamic")
    draws = options.get("dropout_p") and name in DRAWING
    operator = getattr(torch.ops.attn, name).default
    used = utilities if draws else deterministic
    torch.library.opcheck(operator, tuple(positional), keywords, test_utils=used)
    if not name.startswith("_"):
        leaves = tuple(Inputs(*positional).require_grad()[: len(positional)])
        # This one asks for gradients of all results.
        used = utilities if name == "sdpa_stats" else used
        learned = {
            n: o.detach().requires_grad_() if isinstance(o, Tensor) and o.is_floating_point() else o
            for n, o in keywords.items()
        }
        torch.library.opcheck(operator, leaves, learned, test_utils=used)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("which", ["positions", "heads", "all"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name == "sdpa_with_weights" else [])
        for name in OPERATORS  # that one takes ten seconds
        if name != "sdpa"
    ],
)
def test_opcheck_of_options(name: str, which: str) -> None:
    """The inputs are 2 sequences with 3 heads, 5 queries and 7 keys."""
    positions = {
        "window_size": [3, 1],
        "query_offset": torch.tensor([2, -1]),
        "key_lengths": torch.tensor(6, dtype=torch.int32),
        "softcap": 2.0,
    }
    of_heads = {"alibi_slopes": torch.rand(3), "sinks": torch.randn(2, 3)}
    every = positions | of_heads | {"is_causal": True}
    options: dict[str, Any] = {"positions": positions, "heads": of_heads, "all": every}[which]
    opcheck(name, make_inputs(5, 7, 6, mask=(1, 7) if which == "heads" else None), options)


@pytest.mark.parametrize("name", OPERATORS)
def test_tags(name: str) -> None:
    """What draws random numbers says so; derivatives replay what was drawn."""
    tags = getattr(torch.ops.attn, name).default.tags
    assert (torch.Tag.nondeterministic_seeded in tags) == (name in DRAWING)


def test_schema_is_the_builtins() -> None:
    ours = str(torch.ops.attn.sdpa.default._schema)
    builtin = str(torch.ops.aten.scaled_dot_product_attention.default._schema)
    assert ours == builtin.replace("aten::scaled_dot_product_attention", "attn::sdpa")


@pytest.mark.slow  # compiles
@pytest.mark.usefixtures("device")
def test_compile_with_inductor() -> None:
    """The default backend, with operations around ours and with dropout in the graph."""

    def function(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, p: float) -> Tensor:
        return torch_attn.sdpa(query * 2, key, value + 1, mask, p, True).relu()

    torch.compiler.reset()
    inputs = make_inputs(9, 13, mask=(9, 1))
    grad_output = make_grad_output(inputs)
    compiled = torch.compile(function, fullgraph=True)
    expected = results(function, inputs, grad_output, p=0.0)
    for name, tensor in results(compiled, inputs, grad_output, p=0.0).items():
        torch.testing.assert_close(tensor, expected[name], msg=name)
    dropped = results(compiled, inputs, grad_output, p=0.5)
    assert all(tensor.isfinite().all() for tensor in dropped.values())
    assert not torch.equal(dropped["output"], expected["output"])
