"""Bad input: every error names the argument, says what it was and what is allowed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

import torch_attn
from helpers import DEVICES, of_inputs, rng_state

CALLS: dict[str, Callable[..., Any]] = {
    "torch.ops.attn.sdpa": torch.ops.attn.sdpa,
    "torch.ops.attn.sdpa_with_weights": torch.ops.attn.sdpa_with_weights,
    "torch.ops.attn._sdpa_forward": torch.ops.attn._sdpa_forward,
    "torch_attn.sdpa": torch_attn.sdpa,
    "torch_attn.sdpa_with_weights": torch_attn.sdpa_with_weights,
}
SIZES = {"query": (2, 4, 5, 8), "key": (2, 4, 7, 8), "value": (2, 4, 7, 6)}


def floats(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(size, dtype=dtype)


# What differs from good input; what the message says: the argument, what it was, what is allowed.
BAD: dict[str, tuple[dict[str, Any], tuple[str, str, str]]] = {
    # dimensions
    "1-D query": ({"query": floats(8)}, (r"query", r"\[8\]", r"at least 2 dim")),
    "0-D key": ({"key": floats()}, (r"key", r"\[\]", r"at least 2 dim")),
    "1-D value": ({"value": floats(6)}, (r"value", r"\[6\]", r"at least 2 dim")),
    # sizes that do not fit
    "head sizes": ({"key": floats(2, 4, 7, 9)}, (r"key", r"\b9\b", r"\b8\b.*must be equal")),
    "lengths": ({"value": floats(2, 4, 6, 6)}, (r"value", r"\b6\b", r"\b7\b.*must be equal")),
    "no keys": ({"key": floats(2, 4, 0, 8)}, (r"value", r"\b7\b", r"\b0\b.*must be equal")),
    "batch of key": ({"key": floats(3, 4, 7, 8)}, (r"key", r"\[3, 4, 7, 8\]", r"equal or 1")),
    "batch of value": ({"value": floats(3, 4, 7, 6)}, (r"value", r"\[3, 4, 7, 6\]", r"equal or 1")),
    "batch of 0": ({"key": floats(0, 4, 7, 8)}, (r"key", r"\[0, 4, 7, 8\]", r"equal or 1")),
    # heads
    "key heads, no flag": ({"key": floats(2, 2, 7, 8)}, (r"key", r"2 heads", r"enable_gqa")),
    "value heads, no flag": ({"value": floats(2, 2, 7, 6)}, (r"value", r"2 heads", r"enable_gqa")),
    **{
        f"{heads} {name} heads": (
            {name: floats(2, heads, *SIZES[name][2:]), "enable_gqa": True},
            (name, f"{heads} heads", r"divide the query's|\b4\b"),
        )
        for name, heads in (("key", 3), ("value", 3), ("key", 8), ("key", 0))
    },
    # dtypes
    **{
        f"{dtype} query": (
            {name: floats(*size).to(dtype) for name, size in SIZES.items()},
            (r"query", says, r"float64, float32, bfloat16 or float16"),
        )
        for dtype, says in (
            (torch.int64, r"Long|int64"),
            (torch.complex64, r"[Cc]omplex"),
            (torch.float8_e5m2, r"Float8_e5m2"),
        )
    },
    "bfloat16 key": ({"key": floats(2, 4, 7, 8).bfloat16()}, ("key", "BFloat16", "same dtype")),
    "float64 value": ({"value": floats(2, 4, 7, 6).double()}, ("value", "[Dd]ouble", "same dtype")),
    # mask
    **{
        f"{dtype} mask": (
            {"attn_mask": floats(5, 7, dtype=dtype)},
            (r"attn_mask", says, r"bool.*float32"),
        )
        for dtype, says in (
            (torch.int32, r"[Ii]nt"),
            (torch.uint8, r"[Bb]yte"),
            (torch.float16, r"[Hh]alf"),
            (torch.float64, r"[Dd]ouble"),
        )
    },
    **{
        f"mask of shape {size}": (
            {"attn_mask": floats(*size)},
            (r"attn_mask", re.escape(f"{size}"), r"broadcast.*\[2, 4, 5, 7\]"),
        )
        for size in ([5], [7, 5], [5, 2], [2, 3, 5, 7], [1, 2, 4, 5, 7])
    },
    "mask that enlarges the batch": (
        {"attn_mask": floats(3, 1, 5, 7), **{n: floats(1, *s[1:]) for n, s in SIZES.items()}},
        (r"attn_mask", r"\[3, 1, 5, 7\]", r"broadcast.*\[1, 4, 5, 7\]"),
    ),
    "mask that enlarges one query": (
        {"attn_mask": floats(5, 7), "query": floats(2, 4, 1, 8)},
        (r"attn_mask", r"\[5, 7\]", r"broadcast.*\[2, 4, 1, 7\]"),
    ),
    "mask of one head's heads": (
        {"attn_mask": floats(4, 5, 7), **{n: floats(*s[2:]) for n, s in SIZES.items()}},
        (r"attn_mask", r"\[4, 5, 7\]", r"broadcast.*\[5, 7\]"),
    ),
    # numbers
    "negative dropout": ({"dropout_p": -0.1}, (r"dropout_p", r"-0\.1", r"between 0 and 1")),
    "dropout above 1": ({"dropout_p": 1.5}, (r"dropout_p", r"1\.5", r"between 0 and 1")),
    "dropout NaN": ({"dropout_p": float("nan")}, (r"dropout_p", r"nan", r"between 0 and 1")),
    "scale NaN": ({"scale": float("nan")}, (r"scale", r"(?i)nan", r"must be")),
}  # fmt: skip


def assert_names(operator: str, message: str) -> None:
    """The function that was called stands at the beginning, and no other anywhere."""
    assert message.startswith(f"attn::{operator}: "), message
    assert set(re.findall(r"attn::(\w+)", message)) == {operator}, message


def operator_of(call: str) -> str:
    """What error messages name: of a private operator, the one that users call."""
    return call.rpartition(".")[2].replace("_sdpa_forward", "sdpa")


def assert_raises(
    call: Callable[..., Any],
    arguments: dict[str, Any],
    says: tuple[str, ...],
    operator: str = "sdpa",
) -> None:
    with pytest.raises(RuntimeError) as error:
        call(**arguments)
    message = str(error.value)
    assert_names(operator, message)
    for pattern in says:
        assert re.search(pattern, message, re.DOTALL), f"{pattern!r} is not in {message!r}"
    # The argument comes first: what else is named is there to compare.
    names = re.findall(r"query|key|value|attn_mask|dropout_p|scale", message)
    assert names[0] == says[0]


def in_turn(n: int, of: Any) -> Any:
    return [*of][n % len(of)]


PLACES = [*itertools.product(CALLS, [*DEVICES, "meta"])]


# Every error of the function, and of one of the other calls and devices.
@pytest.mark.parametrize(
    ("bad", "call", "device"),
    [(bad, *place) for n, bad in enumerate(BAD) for place in (PLACES[0], in_turn(n, PLACES[1:]))],
)
def test_bad_input(bad: str, call: str, device: str) -> None:
    changed, says = BAD[bad]
    arguments = {**{name: floats(*size) for name, size in SIZES.items()}, **changed}
    on_device = {n: a.to(device) if isinstance(a, Tensor) else a for n, a in arguments.items()}
    state = rng_state(torch.device(device))
    assert_raises(CALLS[call], on_device, says, operator_of(call))
    assert torch.equal(rng_state(torch.device(device)), state)


@pytest.mark.parametrize("call", CALLS)
def test_bad_input_that_wants_gradients(call: str) -> None:
    """The check comes before autograd's own work, too."""
    arguments = {n: floats(*size).requires_grad_() for n, size in SIZES.items()}
    arguments["key"] = floats(2, 4, 7, 9).requires_grad_()
    says = (r"key", r"\b9\b", r"\b8\b.*must be equal")
    assert_raises(CALLS[call], arguments, says, operator_of(call))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("argument", ["key", "value", "attn_mask"])
def test_mixed_devices(argument: str, call: str) -> None:
    arguments = {n: floats(*size) for n, size in SIZES.items()} | {"attn_mask": floats(5, 7)}
    arguments[argument] = arguments[argument].to("meta")
    says = (argument, r"\bmeta\b", r"same device")
    assert_raises(CALLS[call], arguments, says, operator_of(call))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("argument", ["query", "key", "value", "attn_mask"])
@pytest.mark.parametrize("wrong", [[1.0, 2.0], "tensor", 3], ids=["list", "str", "int"])
def test_not_a_tensor(wrong: Any, argument: str, call: str) -> None:
    """PyTorch names argument and type for an operator; the functions also say what to do."""
    arguments = {**{n: floats(*size) for n, size in SIZES.items()}, argument: wrong}
    kind = type(wrong).__name__
    said = rf"^attn::\w+: {argument} is a {kind}; .* torch\.as_tensor\({argument}\)"
    if "ops" in call:
        said = rf"'{argument}'.*'{kind}'"
    with pytest.raises((TypeError, RuntimeError), match=said) as error:
        CALLS[call](**arguments)
    assert "Tensor" in str(error.value)


# What people write: arguments of other libraries, numbers and lists for tensors, places mistaken.
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "causal": ({"causal": True}, r"no argument causal here; use is_causal, and query_offset=S - L"),
    "softmax_scale": ({"softmax_scale": 0.1}, r"no argument softmax_scale here; use scale$"),
    "score_mod": ({"score_mod": abs}, r"score_mod here; use torch_attn.flex_attention"),
    "window": ({"window": (3, 0)}, r"no argument window here; use window_size"),
    "misspelt": ({"key_length": 3}, r"no argument key_length here; the options are softcap, .*"),
    "place": ({"attn_mask": True}, r"attn_mask is a bool; .*is_causal is passed by its name"),
    "sinks": ({"sinks": 0.0}, r"sinks is a float; .*torch\.as_tensor\(sinks\)"),
    "slopes": ({"alibi_slopes": [1.0]}, r"alibi_slopes is a list; .*torch\.as_tensor\("),
    "lengths": (
        {"key_lengths": [3, 4]},
        r"key_lengths is \[3, 4\]; it must .* torch.tensor\(\[3, 4\]\)",
    ),
    "window_size": ({"window_size": 5}, r"window_size is 5; .*\(127, 0\) for 128 keys"),
    "None": ({"key": None}, r"key is None; it must be a torch.Tensor$"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_natural_mistakes(mistake: str) -> None:
    wrong, said = MISTAKES[mistake]
    with pytest.raises((TypeError, ValueError), match=said):
        torch_attn.sdpa(**{n: floats(*size) for n, size in SIZES.items()} | wrong)


LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "sparse": (lambda t: t.to_sparse(), r"layout Sparse; it must be a dense"),
    "sparse rows": (lambda t: t.to_sparse_csr(), r"layout SparseCsr; it must be a dense"),
    "mkldnn": (lambda t: t.to_mkldnn(), r"layout Mkldnn; it must be a dense"),
    "quantized": (lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8), r"dtype QInt8"),
    "nested": (
        lambda t: torch.nested.nested_tensor(list(t.unbind())),
        r"is a nested tensor.*\.unbind\(\).*to_padded_tensor",
    ),
}


@pytest.mark.filterwarnings("ignore:.*[Ss]parse.*:UserWarning", "ignore:.*nested.*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantiz.*:UserWarning")
@pytest.mark.parametrize(
    ("layout", "argument", "call"),
    [
        (layout, argument, in_turn(n + m, CALLS))
        for n, layout in enumerate(LAYOUTS)
        for m, argument in enumerate((*SIZES, "attn_mask", "all"))
    ],
)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_not_dense(layout: str, argument: str, call: str, requires_grad: bool) -> None:
    """Not the dispatcher's error, which names no argument."""
    convert, says = LAYOUTS[layout]
    arguments = {n: floats(*size) for n, size in SIZES.items()} | {"attn_mask": floats(5, 7)}
    converted = arguments if argument == "all" else [argument]
    for name in converted:
        arguments[name] = convert(arguments[name])
    if requires_grad:
        for tensor in arguments.values():
            tensor.requires_grad_(tensor.is_floating_point())
    assert_raises(CALLS[call], arguments, (next(iter(converted)), says), operator_of(call))


def in_memory_of_its_own_order(*size: int) -> Tensor:
    """No two leading dimensions are stored one behind the other."""
    return floats(*size).permute(*reversed(range(len(size) - 2)), -2, -1)


# Where the functions' errors come from: each source has to know what was called.
SOURCES: dict[str, dict[str, Any]] = {
    "lengths": {"attn_mask": floats(6, 6)},
    "heads": {"key": floats(2, 3, 7, 8)},
    "dtype": {"key": floats(*SIZES["key"], dtype=torch.float64)},
    "scale": {"scale": float("nan")},
    "device": {"key": floats(*SIZES["key"]).to("meta")},
    "layout": {"query": floats(*SIZES["query"]).to_sparse()},
    "nested": {"key": torch.nested.nested_tensor(list(floats(*SIZES["key"]).unbind()))},
    "jagged": {
        "key": torch.nested.nested_tensor(list(floats(*SIZES["key"]).unbind()), layout=torch.jagged)
    },
    "subclass": {"attn_mask": causal_lower_right(7, 5)},
    "subclass in the wrong place": {"key": causal_lower_right(5, 7)},
    "leading dimensions": {
        "query": in_memory_of_its_own_order(*[2] * 18, 1, 1),
        "key": floats(*[2] * 18, 1, 1),
        "value": floats(*[2] * 18, 1, 1),
    },
}
FUNCTIONS = ("sdpa", "sdpa_with_weights", "sdpa_stats")


def takes(function: str, arguments: dict[str, Any]) -> dict[str, Any]:
    schema = getattr(torch.ops.attn, function).default._schema
    return {a.name: arguments[a.name] for a in schema.arguments if a.name in arguments}


@pytest.mark.regression
@pytest.mark.filterwarnings("ignore:.*[Ss]parse.*:UserWarning", "ignore:.*nested.*:UserWarning")
@pytest.mark.parametrize("source", SOURCES)
def test_names_the_function_that_was_called(source: str) -> None:
    arguments = {n: floats(*size) for n, size in SIZES.items()} | SOURCES[source]
    for module, function in itertools.product([torch.ops.attn, torch_attn], FUNCTIONS):
        with pytest.raises((RuntimeError, TypeError)) as error:
            getattr(module, function)(**takes(function, arguments))
        assert_names(function, str(error.value))


@pytest.mark.regression
@pytest.mark.parametrize("function", FUNCTIONS)
def test_names_the_function_that_gives_no_derivative(function: str) -> None:
    arguments = {n: floats(*size) for n, size in SIZES.items()}
    arguments["scale"] = torch.tensor(0.5, requires_grad=True)
    with pytest.raises(TypeError) as error:
        getattr(torch_attn, function)(**takes(function, arguments))
    assert_names(function, str(error.value))


@pytest.mark.regression
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("argument", ["query", "key", "attn_mask"])
def test_names_the_function_that_was_mapped(argument: str, function: str) -> None:
    good = {n: floats(3, *size) for n, size in SIZES.items()} | {"attn_mask": floats(3, 5, 7)}
    samples = takes(function, good | {argument: floats(3, 8)})

    def call(*tensors: Tensor) -> Any:
        return getattr(torch_attn, function)(**dict(zip(samples, tensors, strict=True)))

    with pytest.raises(RuntimeError) as error:
        torch.vmap(call)(*samples.values())
    assert_names(function, str(error.value))


# How to index a tokenizer's mask [batch, S] so that it fits tensors of 3, 4 or 5 dimensions.
PADDING = {
    3: ((4, 5, 8), "mask[:, None, :]"),
    4: ((4, 2, 5, 8), "mask[:, None, None, :]"),
    5: ((4, 3, 2, 5, 8), "dimensions of size 1"),
}


@pytest.mark.regression
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dims", PADDING)
def test_padding_mask(dims: int, call: str) -> None:
    size, advice = PADDING[dims]
    arguments = {name: floats(*size) for name in SIZES}
    mask = torch.ones(4, 5, dtype=torch.bool)
    with pytest.raises(RuntimeError, match=re.escape(advice)):
        CALLS[call](**arguments, attn_mask=mask)
    CALLS[call](**arguments, attn_mask=mask.view(4, *[1] * (dims - 2), 5))
    with pytest.raises(RuntimeError) as error:
        CALLS[call](**arguments, attn_mask=mask[:3])
    assert "padding" not in str(error.value)


@pytest.mark.parametrize("call", CALLS)
def test_what_to_do_is_said(call: str) -> None:
    arguments = {name: floats(*size) for name, size in SIZES.items()}
    mask = torch.ones(2, 5, 7, dtype=torch.bool)
    with pytest.raises(RuntimeError, match=r"\[batch, L, S\] for all heads .* mask\[:, None\]"):
        CALLS[call](**arguments, attn_mask=mask)
    CALLS[call](**arguments, attn_mask=mask[:, None])
    heads_after_lengths = {name: tensor.transpose(1, 2) for name, tensor in arguments.items()}
    for flag in (False, True):
        with pytest.raises(RuntimeError, match=r"\[batch, length, heads, head_dim\] .*transpose"):
            CALLS[call](**heads_after_lengths, enable_gqa=flag)
    with pytest.raises(RuntimeError) as error:  # here the numbers of heads are wrong
        CALLS[call](**arguments | {"key": floats(2, 3, 7, 8), "value": floats(2, 3, 7, 6)})
    assert "transpose" not in str(error.value)


def test_a_value_given_to_stats_is_named() -> None:
    query, key, value = (floats(*size) for size in SIZES.values())
    with pytest.raises(RuntimeError, match="there is no value: the third argument is attn_mask"):
        torch_attn.sdpa_stats(query, key, value)
    with pytest.raises(TypeError, match=r"^attn::sdpa_stats: key is a list; it must"):
        torch_attn.sdpa_stats(query, [1.0])  # type: ignore[arg-type]


@pytest.mark.regression
@pytest.mark.parametrize("argument", SIZES)
def test_too_few_dimensions_under_vmap(argument: str) -> None:
    """Errors count the dimensions of one sample, and name the wrong argument, not the first."""
    arguments = {n: floats(3, *size) for n, size in SIZES.items()} | {argument: floats(3, 8)}

    def call(**samples: Tensor) -> Tensor:
        return torch.vmap(torch_attn.sdpa)(*samples.values())

    assert_raises(call, arguments, (argument, r"\[8\]", r"at least 2 dim"))


@pytest.mark.parametrize(
    ("position", "name", "wrong"),
    [
        (0, "grad_output", floats(2, 4, 5, 7)),
        (0, "grad_output", floats(2, 4, 5, 6, dtype=torch.float64)),
        (1, "grad_logsumexp", floats(2, 4, 6)),
        (1, "grad_logsumexp", floats(2, 4, 5, dtype=torch.float64)),
        (2, "output", floats(2, 4, 5, 7)),
        (3, "logsumexp", floats(2, 4, 6)),
        (3, "logsumexp", floats(2, 4, 5, dtype=torch.float64)),
        (4, "rng_state", torch.zeros(1, dtype=torch.int32)),
        (5, "residual", torch.zeros(1)),
    ],
)
def test_backward_operator(position: int, name: str, wrong: Tensor) -> None:
    """What only autograd calls does not trust its arguments either."""
    inputs = tuple(floats(*size) for size in SIZES.values())
    saved = torch.ops.attn._sdpa_forward(*inputs, dropout_p=0.5)[:4]
    arguments = [floats(2, 4, 5, 6), None, *saved, *inputs]
    options = {"dropout_p": 0.5, "grad_input_mask": of_inputs(True, True, True, rest=False)}
    torch.ops.attn._sdpa_backward(*arguments, **options)
    arguments[position] = wrong
    with pytest.raises(RuntimeError, match=name):
        torch.ops.attn._sdpa_backward(*arguments, **options)


def test_gradient_of_a_mask_without_one() -> None:
    inputs = tuple(floats(*size) for size in SIZES.values())
    for mask in (None, torch.ones(5, 7, dtype=torch.bool)):
        saved = torch.ops.attn._sdpa_forward(*inputs, mask)[:4]
        arguments = [floats(2, 4, 5, 6), None, *saved, *inputs, mask]
        for i, name in ((3, "attn_mask"), (4, "alibi_slopes"), (5, "sinks")):
            wanted = of_inputs(*(j == i for j in range(6)), rest=False)
            with pytest.raises(RuntimeError, match=name):
                torch.ops.attn._sdpa_backward(*arguments, grad_input_mask=wanted)
