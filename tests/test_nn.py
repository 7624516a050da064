"""nn.MultiheadAttention: torch's module, argument by argument, and what it has beyond it."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrize

from _accuracy import check_modules
from _memory import LargestAllocation
from _switch import compile_anew  # noqa: F401 (a fixture)
from helpers import INF, NAN, SEED
from torch_attn.nn import MultiheadAttention

pytestmark = [
    pytest.mark.usefixtures("device"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]

B, H, L, S, E = 3, 4, 5, 7, 8

CONSTRUCTORS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False, "batch_first": True},
    "kdim, vdim": {"kdim": 6, "vdim": 10},
    "only vdim": {"vdim": 10, "batch_first": True, "bias": False},
    "add_bias_kv": {"add_bias_kv": True},
    "add_zero_attn": {"add_zero_attn": True, "batch_first": True},
    "all": {"add_bias_kv": True, "add_zero_attn": True, "kdim": 6, "batch_first": True},
}  # fmt: skip


def make(cls: type[nn.Module], dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """A module of parameters that depend on the options alone, with biases that are not 0."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        module = cls(E, H, dtype=dtype, **options)
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter)
    return module


def ours(**options: Any) -> MultiheadAttention:
    module: MultiheadAttention = make(MultiheadAttention, **options)
    return module


def both(**options: Any) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
    """torch's module and ours from the same seed."""
    return make(nn.MultiheadAttention, **options), ours(**options)


def inputs(module: nn.Module, batch: int | None = B, same: str = "none") -> list[Tensor]:
    """Query, key and value as the module takes them; `same` are one tensor."""

    def make(length: int, size: int) -> Tensor:
        lead = () if batch is None else (batch,)
        tensor = torch.randn(*lead, length, size, dtype=torch.float64)
        return tensor if batch is None or module.batch_first else tensor.transpose(0, 1)

    if same == "all":
        return [make(L, E)] * 3
    query, key = make(L, E), make(S, module.kdim)
    if same == "query and key":
        return [query, query, make(L, E)]
    if same == "query and value":
        return [query, make(L, E), query]
    return [query, key, key if same == "key and value" else make(S, module.vdim)]


def make_mask(kind: str, *shape: int) -> Tensor | None:
    """A mask of torch's kind for this module: True hides. The first key is never hidden."""
    if kind == "none":
        return None
    hidden = torch.rand(shape) < 0.4
    hidden[..., 0] = False
    if kind == "bool":
        return hidden
    mask = torch.randn(shape, dtype=torch.float64)
    return mask.masked_fill(hidden, -INF) if kind == "-inf" else mask


def call(
    module: nn.Module, tensors: list[Tensor], *, of_weights: bool = True, **options: Any
) -> dict[str, Tensor]:
    """The output, the weights if there are some, and all gradients of a function of both.

    Unless `of_weights`, of a function of the output alone.
    """
    leaves: dict[int, Tensor] = {}  # one tensor three times stays one tensor
    for t in tensors:
        leaves.setdefault(id(t), t.detach().requires_grad_())
    masks = {
        name: option.detach().requires_grad_()
        for name, option in options.items()
        if isinstance(option, Tensor) and option.is_floating_point()
    }
    output, weights = module(*(leaves[id(t)] for t in tensors), **{**options, **masks})
    module.zero_grad()
    direction = torch.Generator(output.device).manual_seed(SEED)
    loss = (output * torch.randn(output.shape, generator=direction, device=output.device)).sum()
    (loss + weights.square().sum() if weights is not None and of_weights else loss).backward()
    results = {"output": output.detach()}
    if weights is not None:
        results["weights"] = weights.detach()
    results |= {f"grad_{n}": p.grad for n, p in module.named_parameters()}
    results |= {f"grad_input_{n}": t.grad for n, t in enumerate(leaves.values())}
    return results | {f"grad_{n}": t.grad for n, t in masks.items()}


# --- against torch's module -----------------------------------------------------------------------


@pytest.mark.parametrize("constructor", CONSTRUCTORS)
def test_parameters(constructor: str) -> None:
    """The same names, shapes and initial values; a state_dict fits both ways."""
    theirs, module = both(**CONSTRUCTORS[constructor])
    state = theirs.state_dict()
    assert list(module.state_dict()) == list(state)
    assert all(torch.equal(module.state_dict()[name], state[name]) for name in state)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_()
    tensors = inputs(module)
    for source, target in ((theirs, module), (module, theirs)):
        with torch.no_grad():
            next(source.parameters()).mul_(2)
        target.load_state_dict(source.state_dict())
        torch.testing.assert_close(target(*tensors), source(*tensors))


MASKS = st.sampled_from(["none", "bool", "float", "-inf"])


@given(
    constructor=st.sampled_from(list(CONSTRUCTORS)),
    batch=st.sampled_from([B, 1, None]),
    same=st.sampled_from(["none", "key and value", "query and key", "query and value", "all"]),
    padding=MASKS,
    masked=MASKS,
    mask_per_head=st.booleans(),
    need_weights=st.booleans(),
    average=st.booleans(),
)
@pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning")
def test_values_and_gradients(
    constructor: str,
    batch: int | None,
    same: str,
    padding: str,
    masked: str,
    mask_per_head: bool,
    need_weights: bool,
    average: bool,
) -> None:
    event(f"{constructor}, weights: {need_weights}")
    theirs, module = both(**CONSTRUCTORS[constructor])
    if not module._qkv_same_embed_dim:
        same = "none"
    tensors = inputs(module, batch, same)
    keys = S if same in ("none", "key and value") else L
    lead = () if batch is None else (batch,)
    options = {
        "key_padding_mask": make_mask(padding, *lead, keys),
        "attn_mask": make_mask(masked, *([(batch or 1) * H] * mask_per_head), L, keys),
        "need_weights": need_weights,
        "average_attn_weights": average,
    }
    torch.testing.assert_close(call(module, tensors, **options), call(theirs, tensors, **options))
    with torch.no_grad():  # where nothing learns, weights and output are computed in one pass
        torch.testing.assert_close(module(*tensors, **options), theirs(*tensors, **options))


# --- causality, windows, offsets and lengths ------------------------------------------------------


def hidden(
    window_size: tuple[int, int] = (-1, -1),
    query_offset: Any = 0,
    key_lengths: Any = S,
    is_causal: bool = False,
) -> Tensor:
    """The mask that says the same as numbers or [B] integers, [L, S] or [B H, L, S]."""
    left, right = (n if n >= 0 else L + S for n in window_size)
    offset, lengths = (torch.as_tensor(n)[..., None, None] for n in (query_offset, key_lengths))
    ahead = torch.arange(S) - torch.arange(L)[:, None] - offset
    mask = (ahead < -left) | (ahead > (min(right, 0) if is_causal else right))
    mask = mask | (torch.arange(S) >= lengths)
    return mask if mask.dim() == 2 else mask.repeat_interleave(H, 0)


OFFSETS, LENGTHS = [2, 0, -3], [7, 0, 4]  # without a batch, the first of them
# Arguments of the constructor and of the call.
SAID_OTHERWISE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "window": ({"window_size": (1, 2)}, {}),
    "window to the left": ({"window_size": (2, -1)}, {}),
    "window and causal": ({"window_size": (2, 3)}, {"is_causal": True}),
    "window and offset": ({"window_size": (2, 0), "batch_first": True}, {"query_offset": S - L}),
    "offset": ({}, {"is_causal": True, "query_offset": 1}),
    "offsets": ({"kdim": 6}, {"is_causal": True, "query_offset": OFFSETS}),
    "length": ({"bias": False}, {"key_lengths": 4}),
    "lengths": ({"num_kv_heads": 2}, {"key_lengths": LENGTHS, "is_causal": True}),
    **{f"causal, {name}": (made, {"is_causal": True}) for name, made in CONSTRUCTORS.items()},
}


@pytest.mark.parametrize("need_weights", [False, True], ids=["output", "weights"])
@pytest.mark.parametrize("batch", [B, None], ids=["batch", "no batch"])
@pytest.mark.parametrize("case", SAID_OTHERWISE)
def test_what_a_mask_says_too(case: str, batch: int | None, need_weights: bool) -> None:
    """With and without padding, also over keys that are appended, which nothing hides."""
    constructor, options = SAID_OTHERWISE[case]
    lead = () if batch is None else (batch,)
    numbers = {
        name: (torch.tensor(x) if lead else x[0]) if isinstance(x, list) else x
        for name, x in options.items()
    }
    module, unlimited = ours(**constructor), ours(**constructor | {"window_size": (-1, -1)})
    tensors = inputs(module, batch)
    mask = hidden(module.window_size, **numbers)
    for padding in (None, make_mask("bool", *lead, S)):
        more = {"key_padding_mask": padding, "need_weights": need_weights}
        actual = call(module, tensors, **numbers, **more)
        torch.testing.assert_close(actual, call(unlimited, tensors, attn_mask=mask, **more))
        with torch.no_grad():
            outputs = module(*tensors, **numbers, **more)
        torch.testing.assert_close(outputs, (actual["output"], actual.get("weights")))


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_causal_hint_spares_the_mask(padded: bool) -> None:
    """Without weights the mask is not read; with weights it is what counts, as in torch."""
    theirs, module = both(batch_first=True)
    tensors = inputs(module)
    padding = make_mask("bool", B, S) if padded else None
    unread = torch.full((L, S), NAN, dtype=torch.float64)
    options = {"key_padding_mask": padding, "is_causal": True}
    output, _ = module(*tensors, attn_mask=unread, need_weights=False, **options)
    expected, _ = theirs(*tensors, attn_mask=hidden(is_causal=True), need_weights=False, **options)
    torch.testing.assert_close(output, expected)
    mask = make_mask("bool", L, S)
    torch.testing.assert_close(
        module(*tensors, attn_mask=mask, **options), theirs(*tensors, attn_mask=mask, **options)
    )


def test_a_module_of_an_earlier_release() -> None:
    """Its state has neither a window nor a soft cap."""
    module = ours()
    tensors = inputs(module)
    expected, _ = module(*tensors)
    del module.window_size, module.softcap
    other = pickle.loads(pickle.dumps(module))
    assert torch.equal(other(*tensors)[0], expected)
    assert repr(other) == repr(ours())


@pytest.mark.parametrize("batch", [B, None], ids=["batch", "no batch"])
@pytest.mark.parametrize("constructor", ["plain", "no bias", "kdim, vdim", "all"])
@pytest.mark.parametrize("groups", [2, 4])
def test_grouped_heads(groups: int, constructor: str, batch: int | None) -> None:
    """Equals torch's module with the heads of keys and values repeated for each group."""
    options = CONSTRUCTORS[constructor]
    theirs, _ = both(**options)
    module = MultiheadAttention(E, H, dtype=torch.float64, num_kv_heads=H // groups, **options)
    size = E // H

    def repeated(rows: Tensor) -> Tensor:
        heads = rows.unflatten(0, (-1, size)).repeat_interleave(groups, 0)
        return heads.flatten(0, 1)

    def expanded(name: str, value: Tensor) -> Tensor:
        if name.startswith("in_proj"):
            query, key_and_value = value.split([E, value.size(0) - E])
            return torch.cat([query, repeated(key_and_value)])
        if name.startswith(("k_proj", "v_proj")):
            return repeated(value)
        return repeated(value.flatten()).view(1, 1, -1) if name.startswith("bias") else value

    theirs.load_state_dict({n: expanded(n, v) for n, v in module.state_dict().items()})
    tensors = inputs(module, batch)
    for need_weights in (False, True):
        mask = make_mask("float", L, S)
        actual = call(module, tensors, attn_mask=mask, need_weights=need_weights)
        expected = call(theirs, tensors, attn_mask=mask, need_weights=need_weights)
        both_have = [n for n in expected if expected[n].shape == actual[n].shape]
        assert {"output", "grad_input_0", "grad_input_1", "grad_out_proj.weight"} <= {*both_have}
        torch.testing.assert_close(
            {n: actual[n] for n in both_have}, {n: expected[n] for n in both_have}
        )


@pytest.mark.parametrize("sizes", [{}, {"kdim": 6, "vdim": 10}], ids=["packed", "separate"])
def test_grouped_heads_are_initialised(sizes: dict[str, int]) -> None:
    """Heads are initialised as torch's parameters of such shapes: Xavier, and biases of 0."""
    module = MultiheadAttention(16, 8, num_kv_heads=2, add_bias_kv=True, **sizes)
    matrices = [p for n, p in module.named_parameters() if p.dim() == 2 and "out_proj" not in n]
    assert len(matrices) == (3 if sizes else 1)
    for weight in matrices:
        bound = (6 / sum(weight.shape)) ** 0.5
        assert 0.9 * bound < weight.abs().max() <= bound
    assert not module.in_proj_bias.any()
    assert module.bias_k.std() > 0.1
    assert module.bias_v.std() > 0.1


# --- dropout --------------------------------------------------------------------------------------


@pytest.mark.parametrize("average", [True, False])
def test_weights_are_those_after_dropout(average: bool) -> None:
    """The weights equal torch's; dropout is drawn alike from the same seed on a CPU."""
    theirs, module = both(dropout=0.5, batch_first=True)
    tensors = inputs(module)
    results = []
    for m in (module, theirs):
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            results.append(call(m, tensors, average_attn_weights=average))
    share = (results[0]["weights"] == 0).double().mean()
    assert 0.02 < share < 0.1 if average else 0.4 < share < 0.6  # 0.5 to the power of 4 heads
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("need_weights", [False, True], ids=["output", "weights"])
def test_dropout_only_in_training(need_weights: bool, kv_heads: int) -> None:
    module = ours(dropout=1.0, num_kv_heads=kv_heads)
    tensors = inputs(module)
    output, _ = module(*tensors, need_weights=need_weights)
    torch.testing.assert_close(output, module.out_proj.bias.expand_as(output))
    module.eval()
    output, _ = module(*tensors, need_weights=need_weights)
    module.dropout = 0.0
    assert torch.equal(output, module.train()(*tensors, need_weights=need_weights)[0])


# --- what no key is left for ----------------------------------------------------------------------


@pytest.mark.parametrize("need_weights", [False, True], ids=["output", "weights"])
@pytest.mark.parametrize("kind", ["bool", "-inf"])
def test_query_without_keys(kind: str, need_weights: bool) -> None:
    """It gets the bias of the last projection, where torch's weights are NaN."""
    theirs, module = both(batch_first=True)
    tensors = inputs(module)
    mask = make_mask(kind, L, S)
    mask[2] = True if kind == "bool" else -INF
    results = call(module, tensors, attn_mask=mask, need_weights=need_weights)
    torch.testing.assert_close(results["output"][:, 2], module.out_proj.bias.expand(B, E))
    for name, result in results.items():
        assert result.isfinite().all(), name
    if need_weights:
        assert (results["weights"][:, 2] == 0).all()
        assert theirs(*tensors, attn_mask=mask)[0][:, 2].isnan().all()


# --- memory ---------------------------------------------------------------------------------------

LONG = 512
CHEAP: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({"batch_first": True}, {"is_causal": True}),
    "padding": ({}, {"key_padding_mask": "bool"}),
    "float padding": ({"kdim": 6}, {"key_padding_mask": "-inf"}),
    "causal and padding": ({}, {"key_padding_mask": "bool", "is_causal": True}),
    "hint": ({}, {"key_padding_mask": "float", "is_causal": True, "attn_mask": "bool"}),
    "appended keys": (
        {"add_bias_kv": True, "add_zero_attn": True},
        {"key_padding_mask": "bool", "is_causal": True},
    ),
    "dropout, grouped heads": ({"dropout": 0.5, "num_kv_heads": 2}, {}),
    "window, soft cap, offset, length": (
        {"window_size": (3, 0), "softcap": 2.0},
        {"query_offset": 1, "key_lengths": 3},
    ),
}


def largest_allocation(module: nn.Module, **options: Any) -> int:
    """Elements, in a forward and backward of one text of LONG tokens."""
    x = torch.randn(1, LONG, E, dtype=torch.float64)
    y = x.new_zeros(1, LONG, module.kdim)
    if not module.batch_first:
        x, y = x.transpose(0, 1), y.transpose(0, 1)
    shapes = {"key_padding_mask": (1, LONG), "attn_mask": (LONG, LONG)}
    options = {
        name: make_mask(option, *shapes[name]) if isinstance(option, str) else option
        for name, option in options.items()
    }
    with LargestAllocation() as largest:
        module(x, x if module.kdim == E else y, x, **options)[0].sum().backward()
    return largest.elements


@pytest.mark.parametrize("case", CHEAP)
def test_no_tensor_of_scores(case: str) -> None:
    constructor, options = CHEAP[case]
    assert largest_allocation(ours(**constructor), need_weights=False, **options) < LONG * LONG // 2


def test_tensors_that_are_documented() -> None:
    """Weights; of a boolean mask the complement; of two masks the sum, but not for every head."""
    module = ours()
    assert largest_allocation(module) >= H * LONG * LONG
    for masks in ({}, {"key_padding_mask": "bool"}, {"key_padding_mask": "float"}):
        elements = largest_allocation(module, need_weights=False, attn_mask="bool", **masks)
        assert elements == LONG * LONG
    assert largest_allocation(module, need_weights=False, attn_mask="-inf") < LONG * LONG // 2


# --- nested tensors -------------------------------------------------------------------------------


def nested(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.nested.nested_tensor([torch.randn(n, E, dtype=dtype) for n in (3, 1, 5)])


@pytest.mark.cpu  # within torch.device("cuda"), as tests of a GPU are, torch has no fast path
@pytest.mark.parametrize("average", [True, False])
def test_nested(average: bool) -> None:
    """In evaluation, because torch takes nested tensors only there; weights are padded with 0."""
    theirs, module = both(batch_first=True)
    x = nested()
    with torch.no_grad():
        expected, expected_weights = theirs.eval()(x, x, x, average_attn_weights=average)
        output, weights = module.eval()(x, x, x, average_attn_weights=average)
    assert output.is_nested
    for text, expected_text in zip(output.unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(text, expected_text)
    torch.testing.assert_close(weights, expected_weights)


@pytest.mark.regression
def test_nested_beside_another_default_device() -> None:
    module, x = ours(batch_first=True).eval(), nested()
    expected = module(x, x, x)[0].unbind()
    with torch.device("meta"):
        output = module(x, x, x)[0].unbind()
    assert all(map(torch.equal, output, expected))


def test_nested_in_training() -> None:
    """Texts one by one give the same outputs and gradients."""
    module = ours(batch_first=True)
    x = nested()
    texts = torch.cat([t for t, _ in (module(t, t, t, is_causal=True) for t in x.unbind())])
    expected = torch.autograd.grad(texts.square().sum(), list(module.parameters()))
    output = torch.cat(module(x, x, x, is_causal=True, need_weights=False)[0].unbind())
    torch.testing.assert_close(output, texts)
    actual = torch.autograd.grad(output.square().sum(), list(module.parameters()))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    "wrong", ["cross", "key only", "mask", "jagged", "not batch first", "offset", "lengths"]
)
def test_nested_that_is_not_taken(wrong: str) -> None:
    module = ours(batch_first=wrong != "not batch first")
    x, y = nested(), nested()
    dense = torch.randn(3, 5, E, dtype=torch.float64)
    jagged = torch.nested.nested_tensor(list(x.unbind()), layout=torch.jagged)
    tensors = {"cross": (x, y, y), "key only": (dense, y, y), "jagged": (jagged,) * 3}
    options = {
        "mask": {"attn_mask": torch.zeros(5, 5, dtype=torch.bool)},
        "offset": {"query_offset": 0},
        "lengths": {"key_lengths": 3},
    }
    with pytest.raises(RuntimeError, match="an input is a nested tensor; then query, key and"):
        module(*tensors.get(wrong, (x, x, x)), **options.get(wrong, {}))


# --- the parts of PyTorch that touch a module -----------------------------------------------------


@pytest.mark.usefixtures("compile_anew")
@pytest.mark.parametrize("constructor", ["all", "plain"])
@pytest.mark.parametrize("need_weights", [False, True], ids=["output", "weights"])
def test_compile(constructor: str, need_weights: bool) -> None:
    module = ours(**CONSTRUCTORS[constructor])
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    tensors = inputs(module)
    padding = make_mask("bool", B, S)
    for mask in ({"is_causal": True}, {"attn_mask": make_mask("float", B * H, L, S)}):
        options = {"key_padding_mask": padding, "need_weights": need_weights, **mask}
        found, expected = (call(m, tensors, **options) for m in (compiled, module))
        torch.testing.assert_close([*found.values()], [*expected.values()])


class SelfAttention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = ours(batch_first=True, **options)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.attention(x, x, x, padding, need_weights=False)[0]


def make_texts(length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(B, length, E, dtype=torch.float64), make_mask("bool", B, length)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_export_and_trace() -> None:
    """Texts of other lengths than those that a program was made with."""
    module = SelfAttention(num_kv_heads=2)
    length = {1: torch.export.Dim("length", min=2, max=100)}
    program = torch.export.export(module, make_texts(5), dynamic_shapes=(length, length))
    targets = [node.target for node in program.graph.nodes]
    assert targets.count(torch.ops.attn.sdpa.default) == 1
    texts = make_texts(11)
    for other in (program.module(), torch.jit.trace(module, make_texts(5))):
        torch.testing.assert_close(other(*texts), module(*texts))


def test_gradients_of_each_sample() -> None:
    module = SelfAttention()
    texts = make_texts(5)

    def loss(parameters: dict[str, Tensor], x: Tensor, padding: Tensor) -> Tensor:
        return functional_call(module, parameters, (x, padding)).square().sum()

    gradients = vmap(grad(loss), (None, 0, 0))(dict(module.named_parameters()), *texts)
    for n in range(B):
        module.zero_grad()
        module(texts[0][n], texts[1][n]).square().sum().backward()
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(gradients[name][n], parameter.grad)


def run(
    module: nn.Module, tensors: list[Tensor], padding: Tensor, weights: bool
) -> dict[str, Tensor]:
    """The output and all gradients, with or without the weights that PyTorch can only write out."""
    options = {"key_padding_mask": padding, "need_weights": weights}
    found = call(module, tensors, of_weights=False, **options)
    gradients = [g.flatten() for name, g in found.items() if name.startswith("grad")]
    return {"output": found["output"], "gradients": torch.cat(gradients)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("constructor", CONSTRUCTORS)
def test_accuracy(constructor: str, dtype: torch.dtype) -> None:
    """Half types also run in autocast, which casts the module's float32."""
    for kept in {dtype, torch.float32}:
        theirs, module = both(**CONSTRUCTORS[constructor], dtype=kept)
        exact = copy.deepcopy(theirs).double()
        runs = []
        for _ in range(8):
            tensors = [t.to(dtype).to(kept) for t in inputs(module, batch=20)]
            padding = make_mask("bool", 20, S)
            with torch.autocast(padding.device.type, dtype, enabled=kept != dtype):
                actual = run(module, tensors, padding, False)
                builtin = [run(theirs, tensors, padding, w) for w in (False, True)]
            assert actual["output"].dtype == dtype
            expected = run(exact, [t.double() for t in tensors], padding, True)
            runs.append((actual, *builtin, expected))
        check_modules(runs)


def test_copies() -> None:
    module = ours(num_kv_heads=2, add_bias_kv=True)
    tensors = inputs(module)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(other) is MultiheadAttention
        assert len(other._forward_pre_hooks) == 1  # what keeps TransformerEncoderLayer calling it
        assert torch.equal(other(*tensors)[0], module(*tensors)[0])


def test_parametrization() -> None:
    module, other = ours(), ours()
    with torch.no_grad():
        other.in_proj_weight.relu_()
    parametrize.register_parametrization(module, "in_proj_weight", nn.ReLU())
    tensors = inputs(module)
    assert torch.equal(module(*tensors)[0], other(*tensors)[0])


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_meta_device(kv_heads: int) -> None:
    """Made without memory, shapes inferred without values, then initialised."""
    module = ours(num_kv_heads=kv_heads, device="meta", add_bias_kv=True)
    output, weights = module(*(t.to("meta") for t in inputs(module)))
    assert output.shape == (L, B, E)
    assert weights.shape == (B, L, S + 1)
    module = module.to_empty(device=torch.get_default_device())
    expected = ours(num_kv_heads=kv_heads, add_bias_kv=True)
    for m in (module, expected):
        torch.manual_seed(SEED)
        m._reset_parameters()
    assert module.in_proj_weight.any()
    assert torch.equal(module.in_proj_weight, expected.in_proj_weight)
    assert torch.equal(module.bias_k, expected.bias_k)


def test_output_projection_is_called() -> None:
    """So another module may stand there, such as one that does more."""
    module = ours()
    tensors = inputs(module)
    before, _ = module(*tensors)
    more = nn.Linear(E, E, dtype=torch.float64)
    module.out_proj = nn.Sequential(module.out_proj, more)
    torch.testing.assert_close(module(*tensors)[0], more(before))


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"embed_dim": 0}, "embed_dim is 0; it must be positive"),
        ({"num_heads": -1}, "num_heads is -1; it must be positive"),
        ({"num_heads": 3}, "num_heads is 3; it must divide embed_dim, 8"),
        ({"kdim": 0}, "kdim is 0; it must be positive"),
        ({"vdim": -2}, "vdim is -2; it must be positive"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0; it must be positive"),
        ({"num_kv_heads": 3}, "num_kv_heads is 3; it must divide num_heads, 4"),
        ({"num_kv_heads": 8}, "num_kv_heads is 8; it must divide num_heads, 4"),
        ({"dropout": 1.5}, "dropout is 1.5; it must be a probability from 0 to 1"),
        ({"dropout": NAN}, "dropout is nan; it must be a probability from 0 to 1"),
        ({"window_size": (-2, 0)}, r"window_size is \(-2, 0\); it must be \(left, right\), .*"),
        ({"window_size": (3,)}, r"window_size is \(3,\); it must be \(left, right\), each.*"),
        ({"window_size": (3, -1), "add_bias_kv": True}, r"window_size .*add_bias_kv .*one of them"),
        ({"window_size": (-1, 0), "add_zero_attn": True}, r"window_size .*add_zero_attn append.*"),
        ({"softcap": -1.0}, "softcap is -1.0; it must be a finite number, 0 for none or above"),
        ({"softcap": INF}, "softcap is inf; it must be a finite number, 0 for none or above"),
        ({"softcap": NAN}, "softcap is nan; it must be a finite number, 0 for none or above"),
    ],
)
def test_wrong_construction(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^MultiheadAttention: {message}$"):
        MultiheadAttention(**{"embed_dim": E, "num_heads": H, **arguments})


BAD_CALLS: dict[str, tuple[dict[str, tuple[int, ...]], str]] = {
    "query": ({"query": (3, 5, 9)}, r"query has shape \[3, 5, 9\]; it must have shape \[L, 8\] or"),
    "query 4-D": ({"query": (1, 3, 5, 8)}, r"query .*; it must have shape \[L, 8\] or \[B, L, 8\]"),
    "key size": ({"key": (3, 7, 5)}, r"key has shape \[3, 7, 5\]; it must have shape \[3, S, 6\]"),
    "key batch": ({"key": (1, 7, 6)}, r"key has shape \[1, 7, 6\]; it must .* \[3, S, 6\]"),
    "key 2-D": ({"key": (7, 6)}, r"key has shape \[7, 6\]; it must have shape \[3, S, 6\]"),
    "key 3-D": ({"query": (5, 8)}, r"key has shape \[3, 7, 6\]; it must have shape \[S, 6\]"),
    "value": ({"value": (3, 5, 8)}, r"value has shape \[3, 5, 8\]; it must .* \[3, 7, 8\]"),
    "padding": ({"key_padding_mask": (3, 5)}, r"key_padding_mask has .* must have shape \[3, 7\]"),
    "padding 1-D": ({"key_padding_mask": (7,)}, r"key_padding_mask has .* have shape \[3, 7\]"),
    "mask": ({"attn_mask": (7, 5)}, r"attn_mask has .* have shape \[5, 7\] or \[12, 5, 7\]"),
    "mask 3-D": ({"attn_mask": (3, 5, 7)}, r"attn_mask has shape \[3, 5, 7\]; .*\[12, 5, 7\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_CALLS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_wrong_shapes(case: str, is_causal: bool) -> None:
    """A mask of a wrong shape is an error even where the hint spares reading it."""
    shapes = {"query": (3, 5, 8), "key": (3, 7, 6), "value": (3, 7, 8)}
    wrong, message = BAD_CALLS[case]
    module = ours(kdim=6, batch_first=True)
    arguments = {n: torch.zeros(shape).double() for n, shape in {**shapes, **wrong}.items()}
    with pytest.raises(RuntimeError, match=f"^MultiheadAttention: {message}"):
        module(**arguments, need_weights=False, is_causal=is_causal)


@pytest.mark.cpu  # on a GPU numbers are clamped, and not checked
def test_wrong_offsets_and_lengths() -> None:
    module = ours()
    tensors = inputs(module)
    for name, wrong, message in (
        ("key_lengths", S + 1, "is 8; it must be between 0 and 7"),
        ("key_lengths", torch.tensor([1, -1, 1]), "is -1 at entry 1"),
        ("key_lengths", torch.tensor([1, 1]), r"has shape \[2\]; it must be one number or"),
        ("query_offset", torch.zeros(H), r"has shape \[4\]; it must be one number or"),
        ("query_offset", torch.zeros(B), "has dtype Float; it must be int32 or int64"),
    ):
        for need_weights in (False, True):
            with pytest.raises(RuntimeError, match=f"attn::sdpa.*: {name} {message}"):
                module(*tensors, need_weights=need_weights, **{name: wrong})
    for name in ("query_offset", "key_lengths"):
        with pytest.raises(RuntimeError, match=f"{name} is given, but add_bias_kv and"):
            ours(add_zero_attn=True)(*tensors, **{name: 3})


def test_a_forgotten_batch_first_is_named() -> None:
    module, x = ours(), torch.zeros(3, 5, E, dtype=torch.float64)
    hint = "the module is made with batch_first=True"
    padding = torch.zeros(3, 5, dtype=torch.bool)
    with pytest.raises(RuntimeError, match=rf"key_padding_mask has shape \[3, 5\].*{hint}"):
        module(x, x, x, padding)
    with pytest.raises(RuntimeError, match=rf"key has shape .*{hint}"):
        module(x, x[:, :4], x[:, :4])
    with pytest.raises(RuntimeError) as error:
        module(x, x, x, padding.new_zeros(4, 5))
    assert "batch_first" not in str(error.value)


def test_repr() -> None:
    plain = "MultiheadAttention(\n  embed_dim=8, num_heads=4\n  (out_proj)"
    assert repr(MultiheadAttention(8, 4)).startswith(plain)
    every = {"kdim": 6, "vdim": 5, "dropout": 0.1, "bias": False, "batch_first": True}
    every |= {"num_kv_heads": 2, "add_bias_kv": True, "add_zero_attn": True}
    for options in (every, {"window_size": (3, 0), "softcap": 2.5}):
        said = repr(MultiheadAttention(8, 4, **options))  # type: ignore[arg-type]
        assert all(f", {name}={value}" in said for name, value in options.items())


def test_wrong_dtype() -> None:
    """An error, unless autocast makes the dtypes fit; of masks always."""
    module = ours()
    query, key, value = inputs(module)
    message = "key has dtype torch.float16; it must be that of the parameters, torch.float64"
    with pytest.raises(RuntimeError, match=f"^MultiheadAttention: {message}"):
        module(query, key.half(), value)
    for name, shape in (("key_padding_mask", (B, S)), ("attn_mask", (L, S))):
        mask = torch.zeros(shape, dtype=torch.uint8)
        message = f"{name} has dtype torch.uint8; it must be bool .True hides a key. or floating"
        with pytest.raises(RuntimeError, match=message):
            module(query, key, value, **{name: mask})
    with torch.autocast(query.device.type, torch.bfloat16):
        module.float()(query.float(), key.half(), value.bfloat16())


def test_empty() -> None:
    """No texts, no queries or no keys."""
    module = ours(batch_first=True)
    for sizes in itertools.product((0, B), (0, L), (0, S)):
        batch, queries, keys = sizes
        q, k = (torch.zeros(batch, n, E, dtype=torch.float64) for n in (queries, keys))
        for need_weights in (False, True):
            output, weights = module(q, k, k, need_weights=need_weights)
            assert output.shape == (batch, queries, E)
            assert keys or (output == module.out_proj.bias).all()
            assert weights is None or weights.shape == (batch, queries, keys)
