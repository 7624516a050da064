"""No option is dropped in silence: wherever a call may be made it counts, or an error names it.

`ARGUMENTS` has a value that matters for each argument of `attention` that the built-in lacks.
A `Door` is a way to call it: it says which of them it takes. These have to change the results to
the textbook's, with their gradients; the door has to refuse the rest by name. So an
argument that is new in the schema fails here until it has a value, and until every door does
something about it.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.nn.attention import varlen
from torch.nn.attention.bias import causal_upper_left
from torch.utils.flop_counter import FlopCounterMode

import _scripts
import torch_attn
from _variants import ROOT
from torch_attn import reference

ops = torch.ops.attn
H, HK, L, S, E = 4, 2, 8, 8, 8  # lengths are equal, as within a context_parallel
PAGE = 4
Function = Callable[..., Any]


def beyond_builtin(operator: Any) -> set[str]:
    """Without `with_rows`, which is no option: it changes no result, but leaves two out."""
    builtin = torch.ops.aten.scaled_dot_product_attention
    own, others = ({a.name for a in op.default._schema.arguments} for op in (operator, builtin))
    return own - others - {"with_rows"}


class Argument(NamedTuple):
    """A value that matters, and beside which others. Or one that is wrong: `max_q` and `max_k`
    change no result."""

    value: Any
    beside: Mapping[str, Any] = MappingProxyType({})
    wrong: bool = False


def integers(*numbers: Any) -> Tensor:
    return torch.tensor(numbers)


CAUSAL = {"window_size": (-1, 0)}
WHOLE = {"cu_seq_q": integers(0, L), "cu_seq_k": integers(0, S), "max_q": L, "max_k": S}
PACKED = {"cu_seq_q": integers(0, 3, L), "cu_seq_k": integers(0, 2, S), "max_q": 5, "max_k": 6}
PAGED = {**WHOLE, "cu_seq_k": None, "key_lengths": integers(S), "block_table": integers([0, 1])}
ARGUMENTS: dict[str, Argument] = {
    "softcap": Argument(0.5),
    "window_size": Argument((1, 1)),
    "query_offset": Argument(integers(2), CAUSAL),
    "key_lengths": Argument(integers(6)),
    "alibi_slopes": Argument(torch.tensor([0.5, 0.1, 1.0, 0.2], dtype=torch.float64)),
    "sinks": Argument(torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)),
    "cu_seq_q": Argument(integers(0, 4, L), PACKED),
    "cu_seq_k": Argument(integers(0, 5, S), PACKED),
    "max_q": Argument(4, PACKED, wrong=True),
    "max_k": Argument(5, PACKED, wrong=True),
    "block_table": Argument(integers([1, 1]), PAGED),
    "key_scale": Argument(torch.ones(()), wrong=True),  # of keys that need none
    "value_scale": Argument(torch.ones(()), wrong=True),
}
ALL = set(ARGUMENTS)
DENSE = beyond_builtin(ops.sdpa_with_weights)
PACKING = ALL - DENSE


def test_every_argument_has_a_value() -> None:
    """Every argument of the other operators, public and private, has a value too."""
    assert beyond_builtin(ops.attention) == ALL
    assert beyond_builtin(ops._attend_over_processes) == ALL
    assert beyond_builtin(ops.flex_attention) >= OF_FLEX
    renamed = {"seqused_k": "key_lengths"}
    assert {renamed.get(n, n) for n in beyond_builtin(ops.varlen_attention)} == ALL
    assert beyond_builtin(ops.sdpa_stats) == DENSE - {"key_scale", "value_scale"}
    assert beyond_builtin(ops._sdpa_and_weights) == {*DENSE, "mean"}
    for operator in (ops._sdpa_forward, ops._sdpa_backward, ops._sdpa_tangent, ops._sdpa_second):
        assert beyond_builtin(operator) > ALL


# --- the doors ------------------------------------------------------------------------------------


class Door(NamedTuple):
    """A way to call attention with query, key and value, ``[1, heads, length, E]``, and options by
    the names of the schema. Results are tensors of this layout."""

    call: Function
    takes: set[str]
    textbook: Function = reference.sdpa
    always: Mapping[str, Any] = MappingProxyType({})  # the options that every call has
    named: Mapping[str, str] = MappingProxyType({})  # what the argument is called there
    learns: bool = True  # whether its results have gradients
    close: float = 1e-6


def in_groups(function: Function) -> Function:
    return functools.partial(function, enable_gqa=True)


def tokens(tensor: Tensor) -> Tensor:
    return tensor[0].transpose(0, 1)


def pages(tensor: Tensor) -> Tensor:
    """``[pages, heads, PAGE, E]``."""
    return tensor[0].unflatten(1, (-1, PAGE)).transpose(0, 1)


def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """Packed calls without the dimension of the batch, which beside pages there is not."""
    packed = options.keys() & PACKING
    if packed:
        lay_out = pages if options.get("block_table") is not None else lambda x: x[0]
        query, key, value = query[0], lay_out(key), lay_out(value)
    results = ops.attention(query, key, value, enable_gqa=True, **options)
    return [x[None] for x in results] if packed else results


def packed(function: Function) -> Function:
    """Wraps a function with the arguments of torch's varlen_attn."""

    def call(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        key_lengths: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        lay_out: Function = tokens
        if options.get("block_table") is not None:

            def lay_out(x: Tensor) -> Tensor:
                return pages(x).transpose(1, 2)

        if key_lengths is not None:
            options["seqused_k"] = key_lengths
        x = tokens(query), lay_out(key), lay_out(value)
        output = function(*x, cu_seq_q, cu_seq_k, max_q, max_k, enable_gqa=True, **options)
        return output.transpose(0, 1)[None]

    return call


def by_sequence(
    textbook: Function,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor | None = None,
    cu_seq_k: Tensor | None = None,
    max_q: int = 0,
    max_k: int = 0,
    block_table: Tensor | None = None,
    query_offset: Tensor | None = None,
    key_lengths: Tensor | None = None,
    **options: Any,
) -> Any:
    """What a textbook function gives for each of the packed sequences, if they are."""
    options["enable_gqa"] = True
    if cu_seq_q is None:
        positions = {"query_offset": query_offset, "key_lengths": key_lengths}
        return textbook(query, key, value, **positions, **options)
    if block_table is not None:
        key, value = (
            pages(x)[block_table[0]].transpose(0, 1).flatten(1, 2)[None] for x in (key, value)
        )
        cu_seq_k = integers(0, S)
    assert cu_seq_k is not None
    parts = []
    for n in range(cu_seq_q.numel() - 1):
        rows, keys = (slice(*cu_seq[n : n + 2].tolist()) for cu_seq in (cu_seq_q, cu_seq_k))
        used = keys.stop - keys.start if key_lengths is None else int(key_lengths[n])
        first = used - (rows.stop - rows.start) if query_offset is None else int(query_offset[n])
        x = query[:, :, rows], key[:, :, keys], value[:, :, keys]
        found = textbook(*x, query_offset=first, key_lengths=used, **options)
        parts.append([found] if isinstance(found, Tensor) else found)
    return [torch.cat(results, 2) for results in zip(*parts, strict=True)]


def statistics(function: Function) -> Function:
    return lambda query, key, value, **options: function(query, key, **options)


def rows_of_textbook(*args: Any, **options: Any) -> Any:
    """Returns what ours does, without a gradient of the largest score."""
    output, logsumexp, max_score = reference.sdpa_with_logsumexp(*args, **options)
    return output, logsumexp, max_score.detach()


def gradient_of(function: Function) -> Function:
    """The gradient of a loss in query and key, differentiable."""

    def call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        found = function(query, key, value, **options)
        output = found if isinstance(found, Tensor) else found[0]
        return torch.autograd.grad(output.sin().sum(), (query, key), create_graph=True)

    return call


def third(function: Function) -> Function:
    """With the gradients of `results`."""
    return gradient_of(gradient_of(function))


def tangent_of(function: Function) -> Function:
    def call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        def output(*x: Tensor) -> Tensor:
            found = function(*x, **options)
            return found if isinstance(found, Tensor) else found[0]

        x = query, key, value
        return torch.func.jvp(output, x, tuple(t.cos() for t in x))[1]

    return call


def mapped(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """Calls by vmap, also over an offset or a length a sample."""
    samples = {n: options.pop(n) for n in ("query_offset", "key_lengths") if n in options}

    def one(query: Tensor, key: Tensor, value: Tensor, samples: dict[str, Tensor]) -> Any:
        call = torch_attn.sdpa_with_logsumexp
        return call(query, key, value, enable_gqa=True, **options, **samples)

    return torch.vmap(one)(query, key, value, samples)


def with_autocast(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    halves = {n: x.float() if n in ("sinks", "alibi_slopes") else x for n, x in options.items()}
    with torch.autocast("cpu", torch.bfloat16):
        x = (t.float() for t in (query, key, value))
        return torch_attn.sdpa(*x, enable_gqa=True, **halves).double()


def jagged(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    places = integers(0, L)
    x = (
        torch.nested.nested_tensor_from_jagged(tokens(t), places).transpose(1, 2)
        for t in (query, key, value)
    )
    return [t.values()[None] for t in ops.attention(*x, enable_gqa=True, **options)]


def scripted(*args: Any, **options: Any) -> Any:
    return torch.jit.script(_scripts.attention)(*args, enable_gqa=True, **options)[0]


def with_causal_bias(function: Function) -> Function:
    return functools.partial(function, attn_mask=causal_upper_left(L, S), enable_gqa=True)


def causal(function: Function) -> Function:
    return functools.partial(function, is_causal=True)


def replaced(function: Function) -> Function:
    def call(*args: Any, **options: Any) -> Any:
        with torch_attn.replacing_sdpa():
            return function(*args, **options)

    return call


def written_into(*args: Any, **options: Any) -> Tensor:
    return torch_attn.varlen_attn_out(torch.empty(L, H, E, dtype=torch.float64), *args, **options)


def inspected(function: Function) -> Function:
    """Gives what `inspect` sees of a model that calls the function."""

    def call(*args: Tensor, **options: Any) -> Any:
        class Calls(nn.Module):
            def forward(self) -> Any:
                return function(*args, **options)

        (layer,) = torch_attn.inspect(Calls()).layers
        stats = layer.largest_score, layer.entropy, layer.logsumexp, layer.received_weight
        return layer.weights, *stats, layer.visible_keys

    return call


def to_be_inspected(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    weights = reference.sdpa_with_weights(query, key, value, **options)[1]
    return weights, *reference.sdpa_stats(query, key, **options), (weights > 0).sum(-1)


def by_module(need_weights: bool, dropout: float = 0.0) -> Function:
    """Calls the module with projections that change nothing."""

    def call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        module = torch_attn.nn.MultiheadAttention
        of_module = inspect.signature(module).parameters.keys() & options.keys()
        sizes = {"kdim": HK * E, "vdim": HK * E, "num_kv_heads": HK}
        made = {n: options.pop(n) for n in of_module} | sizes
        attend = module(H * E, H, dropout, False, batch_first=True, dtype=query.dtype, **made)
        for parameter in attend.parameters():
            nn.init.eye_(parameter)
        x = (t.transpose(1, 2).flatten(2) for t in (query, key, value))
        kept = {"need_weights": need_weights, "average_attn_weights": False}
        output, weights = attend(*x, **kept, **options)
        output = output.unflatten(2, (H, E)).transpose(1, 2)
        return (output, weights) if need_weights else output

    return call


def output_and_weights(*args: Any, **options: Any) -> Any:
    return reference.sdpa_with_weights(*args, **options)[:2]


def with_function(function: Function) -> Function:
    """With a score_mod that doubles the score."""
    return functools.partial(function, score_mod=lambda score, b, h, i, j: score * 2)


def of_string(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    double = "attn.program 1\n%0 f score\n%1 f const 2\n%2 f mul %0 %1\nreturn %2"
    return ops.flex_attention(query, key, value, score_mod=double, **options)


def of_doubled(function: Function) -> Function:
    return lambda *args, **options: function(*args, scale=2 / E**0.5, **options)


OF_FLEX = {"window_size", "query_offset", "key_lengths", "sinks"}
OF_MODULE = {"softcap", "window_size", "query_offset", "key_lengths"}
ROWS, WEIGHTS = rows_of_textbook, reference.sdpa_with_weights
DOUBLED = of_doubled(reference.sdpa)
STATISTICS = statistics(reference.sdpa_stats)
SEQUENCES = {"always": WHOLE, "named": {"key_lengths": "seqused_k"}}
LEARNED = ALL - {"block_table"}  # beside which there are no derivatives
OF_TORCH = {"window_size", "key_lengths", *PACKING}
DOORS: dict[str, Door] = {
    "sdpa": Door(in_groups(torch_attn.sdpa), DENSE),
    "sdpa_with_logsumexp": Door(in_groups(torch_attn.sdpa_with_logsumexp), DENSE, ROWS),
    "sdpa_with_weights": Door(in_groups(torch_attn.sdpa_with_weights), DENSE, WEIGHTS),
    "sdpa_stats": Door(
        in_groups(statistics(torch_attn.sdpa_stats)), DENSE, STATISTICS, learns=False
    ),
    "varlen_attn": Door(packed(torch_attn.varlen_attn), ALL, **SEQUENCES),
    "varlen_attn_out": Door(packed(written_into), ALL, learns=False, **SEQUENCES),
    "flex_attention": Door(in_groups(with_function(torch_attn.flex_attention)), set(), DOUBLED),
    "ops.flex_attention": Door(in_groups(of_string), OF_FLEX, of_doubled(ROWS)),
    "ops.flex_attention, derivatives": Door(
        gradient_of(in_groups(of_string)), OF_FLEX, gradient_of(DOUBLED)
    ),
    "ops.sdpa": Door(in_groups(ops.sdpa), set()),
    "ops.attention": Door(attention, ALL, ROWS),
    "ops.sdpa_with_weights": Door(in_groups(ops.sdpa_with_weights), DENSE, WEIGHTS),
    "ops.sdpa_stats": Door(in_groups(statistics(ops.sdpa_stats)), DENSE, STATISTICS, learns=False),
    "second derivatives": Door(gradient_of(attention), LEARNED, gradient_of(reference.sdpa)),
    "third derivatives": Door(third(attention), LEARNED, third(reference.sdpa)),
    "tangents": Door(tangent_of(attention), LEARNED, tangent_of(reference.sdpa)),
    "reference": Door(in_groups(reference.sdpa), DENSE),
    "vmap": Door(mapped, DENSE, ROWS),
    "autocast": Door(with_autocast, DENSE, close=0.05),
    "jagged": Door(jagged, DENSE, ROWS),
    "scripted": Door(scripted, DENSE),
    **{
        f"{name}, causal bias": Door(
            with_causal_bias(getattr(torch_attn, name)), DENSE - {"query_offset"}, causal(textbook)
        )
        for name, textbook in (("sdpa", reference.sdpa), ("sdpa_with_weights", WEIGHTS))
    },
    "built-in, replaced": Door(replaced(in_groups(F.scaled_dot_product_attention)), set()),
    "torch's varlen_attn, replaced": Door(
        packed(replaced(varlen.varlen_attn)), OF_TORCH, learns=False, **SEQUENCES
    ),
    **{
        f"inspect, {name}": Door(inspected(function), DENSE, to_be_inspected, learns=False)
        for name, function in (("sdpa", in_groups(torch_attn.sdpa)), ("ops.attention", attention))
    },
    "module": Door(by_module(False), OF_MODULE),
    "module, weights": Door(by_module(True), OF_MODULE, output_and_weights),
    "module, weights after dropout": Door(by_module(True, 1e-30), OF_MODULE, output_and_weights),
}


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return tuple(torch.randn(1, n, L, E, dtype=torch.float64) for n in (H, HK, HK))


def results(call: Function, options: dict[str, Any], learns: bool) -> list[Tensor]:
    """The results, and the gradients of a loss of them, where they have some."""
    learned = {n: x for n, x in options.items() if n in ("alibi_slopes", "sinks")}
    learns = learns and options.get("block_table") is None
    leaves = [x.detach().clone().requires_grad_(learns) for x in (*inputs(), *learned.values())]
    given = options | dict(zip(learned, leaves[3:], strict=True))
    found = call(*leaves[:3], **given)
    found = [found] if isinstance(found, Tensor) else list(found)
    losses = [x.masked_fill(~x.isfinite(), 0).square().sum() for x in found if x.requires_grad]
    if losses:
        found += torch.autograd.grad(sum(losses), leaves, materialize_grads=True)
    return [x.detach() for x in found]


def refuses(door: Door, argument: str, options: dict[str, Any]) -> str | None:
    """What there is instead of an error that names an argument."""
    called = "|".join({argument, door.named.get(argument, argument)})
    try:
        door.call(*inputs(), **options)
    except Exception as error:
        said = re.search(rf"\b({called})\b", str(error))
        return None if said else f"is refused in other words: {error}"
    return "is neither taken nor refused"


def lost(door: Door, argument: str) -> str | None:
    """How a door loses an argument."""
    value, beside, wrong = ARGUMENTS[argument]
    base = door.always | beside
    call = base | {argument: value}
    if argument not in door.takes:
        return refuses(door, argument, door.always | {argument: value})
    if wrong:
        return refuses(door, argument, call)
    textbook = functools.partial(by_sequence, door.textbook)
    without, expected = (results(textbook, options, door.learns) for options in (base, call))
    pairs = zip(without, expected, strict=False)  # the gradient of the argument itself comes last
    differences = [(a - b).abs().nan_to_num().max() for a, b in pairs]
    assert max(differences) > 10 * door.close, f"{argument} has a value that does not matter"
    try:
        found = results(door.call, call, door.learns)
        close = {"rtol": door.close, "atol": door.close, "check_dtype": False}
        torch.testing.assert_close(found, expected, **close)
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        return f"is not what the textbook says: {type(error).__name__}, {first_line}"
    return None


def all_lost(doors: dict[str, Door]) -> dict[tuple[str, str], str]:
    found = {
        (name, argument): lost(doors[name], argument) for name in doors for argument in ARGUMENTS
    }
    return {where: how for where, how in found.items() if how is not None}


def test_in_one_process() -> None:
    assert all_lost(DOORS) == {}


def check_packing_is_all_or_nothing(call: Function) -> None:
    """Each part of it alone is an error, of which `beside` says nothing."""
    for argument in PACKING:
        with pytest.raises(RuntimeError, match=r"cu_seq_[qk]|block_table"):
            call(*inputs(), **{argument: ARGUMENTS[argument].value})


def test_packing_is_all_or_nothing() -> None:
    check_packing_is_all_or_nothing(attention)


def flops(**options: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        attention(*inputs(), **options)
    return counter.get_total_flops()


def test_flops() -> None:
    """No option counts but those that the formulas' page names."""
    taken = {n: a for n, a in ARGUMENTS.items() if not a.wrong}
    changed = {n for n, a in taken.items() if flops(**a.beside) != flops(**a.beside | {n: a.value})}
    assert changed == {"window_size"}
    assert flops(**PACKED) < flops(**WHOLE) == flops()


def test_every_option_is_documented() -> None:
    """By a line of its own, and by what it does to scores, weights or keys, also for C++."""
    page = torch_attn.sdpa.__doc__ or ""
    assert {n for n in DENSE if f"\n        {n}: " not in page} == set()
    header = (ROOT / "csrc/attn/sdpa.h").read_text()
    formulas = {page: r"p = i \+.*?Shapes:", header: r"p = i \+.*?  query "}
    for text, pattern in formulas.items():
        (found,) = re.findall(pattern, text, re.S)
        assert {n for n in DENSE if n not in found} == set()


def test_unconverted_modules() -> None:
    """Torch's module has none of what ours is made with beside its own arguments."""
    module = torch_attn.nn.MultiheadAttention
    for argument in ALL & inspect.signature(module).parameters.keys():
        made = module(H * E, H, **{argument: ARGUMENTS[argument].value})
        ((_, why),) = torch_attn.unconvert(made).skipped.items()
        assert argument in why
        assert argument in repr(made)


# --- over several processes -----------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[None]:
    """A group of this process alone: all ways of communicating are there."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def sharded(function: Function) -> Function:
    """Gives it DTensors, with the sequences cut; packed calls too."""

    def call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        mesh = init_device_mesh("cpu", (1,))

        def place(x: Any, placement: Any) -> Any:
            is_number = isinstance(x, Tensor) and x.is_floating_point()
            return DTensor.from_local(x, mesh, [placement]) if is_number else x

        x = (place(t, Shard(2)) for t in (query, key, value))
        found = function(*x, **{n: place(option, Replicate()) for n, option in options.items()})
        found = [found] if isinstance(found, Tensor) else found
        return [t.to_local() for t in found]

    return call


def within_context_parallel(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    with torch_attn.distributed.context_parallel(x=query.transpose(1, 2)):
        return ops.attention(query, key, value, enable_gqa=True, **options)[0]


OF_CONTEXT = DENSE - {"query_offset", "key_lengths"}


def by(method: str, function: Function) -> Function:
    def call(*args: Any, **options: Any) -> Any:
        with torch_attn.distributed.method(method):
            return function(*args, **options)

    return call


@pytest.mark.usefixtures("group")
def test_over_processes() -> None:
    stats = sharded(in_groups(statistics(torch_attn.sdpa_stats)))
    doors = {
        "context_parallel": Door(within_context_parallel, OF_CONTEXT),
        "DTensor, statistics": Door(stats, DENSE, STATISTICS, learns=False),
    }
    of_dtensors = sharded(in_groups(ops.attention))
    for method in ("ring", "gather", "all_to_all"):
        of_blocks = by(method, in_groups(torch_attn.distributed.sdpa))
        doors[f"distributed.sdpa, {method}"] = Door(of_blocks, DENSE)
        doors[f"DTensor, {method}"] = Door(by(method, of_dtensors), LEARNED, ROWS)
        check_packing_is_all_or_nothing(by(method, of_dtensors))
    assert all_lost(doors) == {}


# --- programs and other libraries -----------------------------------------------------------------


OF_ONNX = {"softcap", "window_size", "query_offset", "key_lengths"}


def test_onnx() -> None:
    """One program, in float32, that has a call for each argument."""
    from test_onnx import export, run

    calls = {n: a.beside | {n: a.value} for n, a in ARGUMENTS.items() if n in OF_ONNX}

    def model(*x: Tensor) -> list[Tensor]:
        return [torch_attn.sdpa(*x, enable_gqa=True, **options) for options in calls.values()]

    x = tuple(t.float() for t in inputs())
    found = dict(zip(calls, run(export(model, x, 25), x), strict=True))
    doors = {
        n: Door(lambda *_, n=n, **__: found[n], OF_ONNX, learns=False, close=1e-4) for n in calls
    }
    assert {n: lost(door, n) for n, door in doors.items()} == dict.fromkeys(calls)
    for argument in ALL - OF_ONNX:  # one that a graph has
        value = ARGUMENTS[argument].value
        with pytest.raises(ValueError, match=f"{argument} is .*; for ONNX's Attention it must be"):
            torch_attn.onnx._attention(None, *inputs(), **{argument: value})


def by_transformers(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Uses the names of transformers, where it has some; a window is one number there."""
    from torch_attn.integrations.transformers import attention_forward

    module = nn.Module()
    module.num_key_value_groups = H // HK
    if "window_size" in options:
        options["window_size"] = options["window_size"][0] + 1
    given = {OF_TRANSFORMERS.get(name, name): option for name, option in options.items()}
    output, _ = attention_forward(module, query, key, value, None, is_causal=False, **given)
    return output.transpose(1, 2)


OF_TRANSFORMERS = {
    "softcap": "softcap",
    "window_size": "sliding_window",
    "sinks": "s_aux",
    "cu_seq_q": "cu_seq_lens_q",
    "cu_seq_k": "cu_seq_lens_k",
    "max_q": "max_length_q",
    "max_k": "max_length_k",
}


def by_diffusers(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    from torch_attn.integrations.diffusers import attention_forward

    x = (t.transpose(1, 2) for t in (query, key, value))
    return attention_forward(*x, enable_gqa=True, **options).transpose(1, 2)


def test_libraries() -> None:
    doors = {
        "transformers": Door(by_transformers, {"softcap", "sinks"}, named=OF_TRANSFORMERS),
        "transformers, packed": Door(
            by_transformers, {*OF_TRANSFORMERS}, always=WHOLE, named=OF_TRANSFORMERS
        ),
        "diffusers": Door(by_diffusers, set()),
    }
    assert all_lost(doors) == {}


def test_keywords_of_transformers() -> None:
    """Every argument that its models give their attention means something here, or nothing."""
    import transformers
    from transformers.utils.generic import TransformersKwargs

    from torch_attn.integrations._attention import _UNSUPPORTED, attention_forward

    ignored = {
        "deterministic": "ours is, with dropout too",
        "position_ids": "packed texts are told of by masks and lengths",
        "seq_idx": "of state space models",
        "num_items_in_batch": "of losses",
        "output_hidden_states": "of models",
        "output_router_logits": "of models",
    }
    known = {*inspect.signature(attention_forward).parameters, *_UNSUPPORTED, *ignored}
    known |= {*OF_TRANSFORMERS.values()}
    given = {*TransformersKwargs.__annotations__}
    call = r"^( *)(?:\S.*)?attention_interface\(\n((?:\1 .*\n)*)"  # up to a line less indented
    for file in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        text = file.read_text()
        for indent, arguments in re.findall(call, text, re.MULTILINE):
            given |= {*re.findall(rf"^{indent}    (\w+)=", arguments, re.MULTILINE)}
    assert {"s_aux", "position_bias", "sliding_window", "indices"} <= given
    assert given - known == set()
