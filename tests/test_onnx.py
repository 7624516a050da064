"""torch.onnx.export with our translations: what the exported program gives, and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from onnx import checker
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.attention.bias import causal_lower_right
from torch.onnx import OnnxExporterError

import torch_attn
from torch_attn import sdpa, sdpa_stats, sdpa_with_logsumexp, sdpa_with_weights

B, L, S = 2, 5, 9
Function = Callable[..., Any]


class Calls(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


def export(
    model: Function, inputs: tuple[Tensor, ...], opset_version: int = 24, **options: Any
) -> Any:
    module = model if isinstance(model, nn.Module) else Calls(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about its own parts
        return torch.onnx.export(
            module.eval(),
            inputs,
            dynamo=True,
            opset_version=opset_version,
            custom_translation_table=torch_attn.onnx.translations(),
            verbose=False,
            **options,
        )


def run(program: Any, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    proto = program.model_proto
    checker.check_model(proto, full_check=True)
    given = {i.name: x.numpy() for i, x in zip(proto.graph.input, inputs, strict=True)}
    return [torch.from_numpy(y.copy()) for y in ReferenceEvaluator(proto).run(None, given)]


def check(program: Any, model: Function, inputs: tuple[Tensor, ...], **tolerances: float) -> None:
    expected = model(*inputs)
    expected = [expected] if isinstance(expected, Tensor) else list(expected)
    torch.testing.assert_close(run(program, inputs), expected, **tolerances)


def make(length: int = L, keys: int = S, batch: int = B) -> tuple[Tensor, Tensor, Tensor]:
    """Four heads of queries, two of keys and values, which are of another size."""
    query = torch.randn(batch, 4, length, 8)
    return query, torch.randn(batch, 2, keys, 8), torch.randn(batch, 2, keys, 6)


def call(*names: str, **options: Any) -> Function:
    """A call of sdpa that takes the options in `names` as inputs, after query, key and value."""
    return lambda q, k, v, *given: sdpa(
        q, k, v, enable_gqa=True, **options, **dict(zip(names, given, strict=True))
    )


def cached(
    offset: Callable[[Tensor], Tensor], operator: Function = sdpa, **options: Any
) -> Function:
    """Over a cache filled to lengths n, an input: `offset` says where the first query stands."""
    return lambda q, k, v, n: operator(
        q, k, v, enable_gqa=True, key_lengths=n, query_offset=offset(n), **options
    )


LENGTHS = torch.tensor([S, L + 1])
BOOLEAN = torch.rand(B, 1, L, S) < 0.7
BOOLEAN[0, 0, 2] = False  # a query without keys
FLOATING = torch.randn(4, L, S).masked_fill(torch.rand(4, L, S) < 0.3, -torch.inf)
PADDING = torch.arange(S) < LENGTHS[:, None, None, None]
LOWER_RIGHT = causal_lower_right(L, S)
# The opset from which on it can be said, the call, and what it takes after query, key and value.
EXPRESSED: dict[str, tuple[int, Function, tuple[Tensor, ...]]] = {
    "plain": (23, call(), ()),
    "causal": (23, call(is_causal=True), ()),
    "scale": (23, call(scale=0.7), ()),
    "softcap": (23, call(softcap=0.5, is_causal=True), ()),
    "boolean mask": (23, call("attn_mask"), (BOOLEAN,)),
    "floating mask": (23, call("attn_mask", softcap=0.5, is_causal=True), (FLOATING,)),
    "padding": (23, call("attn_mask", is_causal=True), (PADDING,)),
    "mask of queries": (23, call("attn_mask"), (BOOLEAN[..., :1],)),
    "lengths": (24, call("key_lengths"), (LENGTHS,)),
    "lengths, int32": (24, call("key_lengths"), (LENGTHS.int(),)),
    "one length": (24, call(key_lengths=7, softcap=0.5), ()),
    "offset": (24, call("query_offset", is_causal=True), (torch.tensor([3, -2]),)),
    "lower right": (24, call(attn_mask=LOWER_RIGHT), ()),
    "offset that nothing reads": (23, call(query_offset=3), ()),
    "cache": (24, cached(lambda n: n - L, is_causal=True), (LENGTHS,)),
    "cache, int32": (24, cached(lambda n: n - L, is_causal=True), (LENGTHS.int(),)),
    "cache, added to": (24, cached(lambda n: -L + n, is_causal=True), (LENGTHS,)),
    "window": (25, call(window_size=(2, 1)), ()),
    "window, open": (25, call(window_size=(-1, 1)), ()),
    "window, offset": (25, call(window_size=(2, 0), query_offset=S - L), ()),
    "window, cache": (25, cached(lambda n: n - L, window_size=(1, 2)), (LENGTHS,)),
    "output alone": (23, lambda *qkv: sdpa_with_logsumexp(*qkv, enable_gqa=True)[0], ()),
    "weights": (
        24,
        cached(lambda n: n - L, sdpa_with_weights, softcap=0.5, is_causal=True),
        (LENGTHS,),
    ),
}


@pytest.mark.parametrize("name", EXPRESSED)
def test_expressed(name: str) -> None:
    """Each call becomes Attention, of which sdpa_with_weights needs two."""
    opset, model, others = EXPRESSED[name]
    inputs = (*make(), *others)
    program = export(model, inputs, opset)
    nodes = [node.op_type for node in program.model.graph]
    assert nodes.count("Attention") == (2 if name == "weights" else 1)
    assert "Softmax" not in nodes
    assert program.model.opset_imports[""] == opset
    check(program, model, inputs)


@pytest.mark.parametrize("name", ["lengths", "offset", "cache", "window"])
def test_opset_that_does_not_know_it_yet(name: str) -> None:
    opset, model, others = EXPRESSED[name]
    argument = {"offset": "query_offset", "window": "window_size"}.get(name, "key_lengths")
    with pytest.raises(OnnxExporterError, match=f"attn: {argument} is .* opset_version {opset}"):
        export(model, (*make(), *others), opset - 1)


def test_any_lengths() -> None:
    """The offset over a cache, and the one of lower right alignment, follow the sizes, too."""

    def model(q: Tensor, k: Tensor, v: Tensor, n: Tensor) -> list[Tensor]:
        lower_right = call(is_causal=True, query_offset=k.size(2) - q.size(2))
        before = cached(lambda n: n - q.size(2), is_causal=True)
        added = cached(lambda n: -q.size(2) + n, is_causal=True)
        return [
            lower_right(q, k, v),
            *(f(q, k, v, x) for f in (before, added) for x in (n, n.int())),
        ]

    batch, length, keys = Dim("batch"), Dim("length"), Dim("keys")
    sizes = [{0: batch, 2: length}, {0: batch, 2: keys}, {0: batch, 2: keys}, {0: batch}]
    program = export(model, (*make(), LENGTHS), dynamic_shapes=(tuple(sizes),))
    for inputs in (make(3, 7, 3), make(8, 8, 3)):
        check(program, model, (*inputs, torch.tensor([7, 0, 4])))


def test_half_types() -> None:
    """The runtime's scores are in float16 here, but their softmax is not."""
    query, key, value = (x.half() for x in make())
    program = export(call(), (query, key, value))
    (attention,) = program.model.graph
    assert attention.attributes["softmax_precision"].value == 1  # FLOAT
    check(program, call(), (query, key, value), rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("need_weights", [False, True])
def test_converted_module(need_weights: bool) -> None:
    module = nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True).eval()
    torch_attn.convert(module)

    def model(x: Tensor, padding: Tensor) -> Any:
        output, weights = module(x, x, x, padding, need_weights=need_weights)
        return (output, weights) if need_weights else output

    padding = torch.arange(L) >= torch.tensor([[L], [3]])
    inputs = (torch.randn(B, L, 16), padding)
    program = export(model, inputs)
    assert [node.op_type for node in program.model.graph].count("Attention") == 1
    check(program, model, inputs)


QUERY, KEY, VALUE = QKV = make()
CU_SEQ = torch.tensor([0, 1, 4])
# All but n - L.
OTHER_OFFSETS: list[Callable[[Tensor], Tensor]] = [
    lambda n: n - L + 1,
    lambda n: n - (L - 1),
    lambda n: n + L,
    lambda n: n.flip(0) - L,
    lambda n: torch.sub(n, L, alpha=2),
    lambda n: n + -(L + 1),
    lambda n: n - n,
    lambda n: n.int() - (L - 1),
]
# What the message says, the call, and its inputs.
REFUSED: list[tuple[str, Function, tuple[Tensor, ...]]] = [
    ("dropout_p is 0.1; .* must be 0", call(dropout_p=0.1), QKV),
    ("scale is -0.5; .* must be more than 0", call(scale=-0.5), QKV),
    ("sinks is given; .* must be None", call("sinks"), (*QKV, torch.ones(4))),
    (
        "query_offset beside key_lengths is None; .* must be key_lengths - L",
        call("key_lengths", is_causal=True),
        (*QKV, LENGTHS),
    ),
    *(
        (
            "query_offset beside key_lengths is something else; .* must be key_lengths - L",
            cached(offset, is_causal=True),
            (*QKV, LENGTHS),
        )
        for offset in OTHER_OFFSETS
    ),
    (
        "attn_mask's dtype is FLOAT; .* query's, FLOAT16",
        call("attn_mask"),
        (*(x.half() for x in QKV), FLOATING),
    ),
    (r"query's shape is \[4, 5, 8\]", call(), (QUERY[0], KEY[0], VALUE[0])),
    ("key's batch size is 1; .* query's, 2", call(), (QUERY, KEY[:1], VALUE)),
    ("value's batch size is 2; .* query's, 1", call(), (QUERY[:1], KEY[:1], VALUE)),
    ("value's number of heads is 2; .* key's, 1", call(), (QUERY, KEY[:, :1], VALUE)),
    ("query's number of heads is 1; .* key's, 2", sdpa, (QUERY[:, :1], KEY, VALUE)),
    (
        "attention: logsumexp is read",
        lambda *qkv: sdpa_with_logsumexp(*qkv, enable_gqa=True)[1],
        QKV,
    ),
    (
        "cu_seq_q is given; .* must be None",
        lambda q, k, v: torch_attn.varlen_attn(
            *(x[0].transpose(0, 1) for x in (q, k, v)), CU_SEQ, CU_SEQ, L, S, enable_gqa=True
        ),
        QKV,
    ),
    ("sdpa_stats: ONNX has no", lambda q, k, _: sdpa_stats(q, k, enable_gqa=True)[1], QKV),
    (
        "attention: max_score is read",
        lambda *qkv: sdpa_with_logsumexp(*qkv, enable_gqa=True)[::2],
        QKV,
    ),
]


@pytest.mark.parametrize(
    ("message", "model", "inputs"), REFUSED, ids=[message for message, *_ in REFUSED]
)
def test_refused(message: str, model: Function, inputs: tuple[Tensor, ...]) -> None:
    with pytest.raises(OnnxExporterError, match=f"ValueError.*: attn.*{message}"):
        export(model, inputs)


def test_offset_of_a_window_to_the_right() -> None:
    """ONNX would hide what is behind the last query."""
    with pytest.raises(OnnxExporterError, match=r"query_offset is given; .* \(left, 0\)"):
        export(call(window_size=(2, 2), query_offset=1), make(), 25)


@pytest.mark.parametrize("opset_version", [20, 26])  # 20 is the exporter's default
def test_refused_opset(opset_version: int) -> None:
    message = f"opset_version is {opset_version}; .* 23, 24 or 25"
    with pytest.raises(OnnxExporterError, match=message):
        export(call(), make(), opset_version)
