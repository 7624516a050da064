"""convert: PyTorch's transformers with their attention swapped, on every way through them.

Also tests unconvert, the way back.
"""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_attn
from _accuracy import check_modules
from _models import Calls
from _switch import compile_anew, operators, runs_attn  # noqa: F401 (the first is a fixture)
from helpers import SEED
from torch_attn import convert, unconvert
from torch_attn.nn import MultiheadAttention

pytestmark = [
    pytest.mark.usefixtures("device"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]

B, L, S, E, H, LAYERS = 3, 6, 8, 16, 4, 2
RUNS = 8  # of each case: errors of few numbers are luck
LENGTHS = torch.tensor([6, 2, 5])


class Attentions(Calls):
    """Counts PyTorch's attentions too, whichever way they are computed."""

    @property
    def theirs(self) -> list[str]:
        marks = ("attention", "transformer_encoder", "softmax")
        return [name for name in self.count if any(mark in name for mark in marks)]


class Encoder(nn.Module):
    """What the tests call of nn.TransformerEncoder, with all its masks as arguments."""

    calls = LAYERS

    def __init__(self, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(E, H, 32, 0.0, **options)
        self.encoder = nn.TransformerEncoder(layer, LAYERS)

    def forward(self, x: Tensor, y: Tensor, padding: Any, mask: Any) -> Tensor:
        return self.encoder(x, mask, padding)


class Decoder(nn.Module):
    """nn.TransformerDecoder: its mask is over x, the padding over both."""

    calls = 2 * LAYERS

    def __init__(self, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(E, H, 32, 0.0, **options)
        self.decoder = nn.TransformerDecoder(layer, LAYERS)

    def forward(self, x: Tensor, y: Tensor, padding: Any, mask: Any) -> Tensor:
        of_memory = None if padding is None else padding[:, :1].expand(-1, S)
        paddings = {"tgt_key_padding_mask": padding, "memory_key_padding_mask": of_memory}
        return self.decoder(x, y, tgt_mask=mask, **paddings)


class Both(nn.Module):
    calls = 3 * LAYERS

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.both = nn.Transformer(E, H, LAYERS, LAYERS, 32, 0.0, **options)

    def forward(self, x: Tensor, y: Tensor, padding: Any, mask: Any) -> Tensor:
        return self.both(x, y, mask, src_key_padding_mask=padding)


MODELS = {cls.__name__: cls for cls in (Encoder, Decoder, Both)}
# With relu, rounding would decide whether a number just above 0 has a gradient.
SHAPES: dict[str, dict[str, Any]] = {
    f"batch first {batch_first}, norm first {norm_first}": {
        "batch_first": batch_first,
        "norm_first": norm_first,
        "activation": "gelu",
    }
    for batch_first, norm_first in itertools.product([True, False], repeat=2)
}
MASKS: dict[str, dict[str, bool]] = {
    "no mask": {},
    "padding": {"padding": True},
    "causal": {"mask": True},
    "causal, padding": {"mask": True, "padding": True},
}


def build(name: str, shape: str) -> tuple[nn.Module, nn.Module]:
    """A model and its converted copy."""
    torch.manual_seed(SEED)
    model = MODELS[name](**SHAPES[shape])
    converted = copy.deepcopy(model)
    result = convert(converted)
    assert len(result.swapped) == model.calls
    assert not result.skipped
    return model, converted


def arguments(shape: str, padding: bool = False, mask: bool = False) -> dict[str, Any]:
    x, y = torch.randn(B, L, E), torch.randn(B, S, E)
    if not SHAPES[shape]["batch_first"]:
        x, y = x.transpose(0, 1), y.transpose(0, 1)
    causal = torch.ones(L, L, dtype=torch.bool, device=x.device).triu(1)
    hidden = torch.arange(L, device=x.device) >= LENGTHS.to(x.device)[:, None]
    return {
        "x": x,
        "y": y,
        "padding": hidden if padding else None,
        "mask": causal if mask else None,
    }


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("masks", MASKS)
def test_training(name: str, shape: str, masks: str) -> None:
    """Outputs and all gradients; the attention is ours and nothing else's.

    In float64; test_nn.py bounds the errors of the module's gradients in other dtypes.
    """
    model, converted = (m.double() for m in build(name, shape))
    inputs = arguments(shape, **MASKS[masks])

    def run(model: nn.Module) -> list[Any]:
        leaves = {n: inputs[n].double().requires_grad_() for n in ("x", "y")}
        output = model(**{**inputs, **leaves})
        wanted = [*model.parameters(), *leaves.values()]
        loss = (output * torch.linspace(-1, 1, E, dtype=output.dtype, device=output.device)).sum()
        return [output, *torch.autograd.grad(loss, wanted, allow_unused=name == "Encoder")]

    expected = run(model)
    with Attentions() as calls:
        actual = run(converted)
    assert calls.forward == model.calls
    assert not calls.theirs
    torch.testing.assert_close(actual, expected)


CONTEXTS = itertools.cycle((torch.no_grad, torch.inference_mode, torch.enable_grad))


@pytest.mark.parametrize(
    ("name", "shape", "masks", "context"),
    [(*case, next(CONTEXTS)) for case in itertools.product(MODELS, SHAPES, MASKS)],
)
def test_evaluation(name: str, shape: str, masks: str, context: Any) -> None:
    """Where PyTorch's layers go around their attention modules, and pack padded texts together."""
    model, converted = build(name, shape)
    exact = copy.deepcopy(model).double()
    model.eval()
    converted.eval()
    runs = []
    for _ in range(RUNS):
        inputs = arguments(shape, **MASKS[masks])
        double = {n: inputs[n].double() for n in ("x", "y")}
        with context():
            with Attentions() as calls:
                actual = converted(**inputs)
            fast = model(**inputs)
            assert calls.forward == model.calls
            assert not calls.theirs
            # On the fast path padding gives 0, here as there; elsewhere it gives numbers.
            packed = (fast == 0).all(-1, keepdim=True)
            assert torch.equal(packed, (actual == 0).all(-1, keepdim=True))
            slow = model.train()(**inputs)
            model.eval()
            expected = exact(**{**inputs, **double})
        results = (actual, fast, slow, expected)
        runs.append(tuple({"output": r.masked_fill(packed, 0)} for r in results))
    check_modules(runs)


@pytest.mark.cpu  # within torch.device("cuda"), as tests of a GPU are, torch has no fast path
def test_the_way_around_is_there() -> None:
    """Else the tests above would find nothing that is not converted."""
    shape = "batch first True, norm first False"
    model, converted = build("Encoder", shape)
    inputs = arguments(shape, padding=True)
    with torch.no_grad():
        with Attentions() as calls:
            output = model.eval()(**inputs)
        assert calls.forward == 0
        assert calls.count["aten::_transformer_encoder_layer_fwd"] == LAYERS
        assert (output[1, 2:] == 0).all()
        for module in converted.eval().modules():
            module._forward_pre_hooks.clear()
        with Attentions() as calls:
            converted(**inputs)
        assert calls.forward == 0


@pytest.mark.cpu  # within torch.device("cuda"), as tests of a GPU are, torch has no fast path
def test_new_layer_with_our_module() -> None:
    """Not converted, but put there by hand."""
    layer = nn.TransformerEncoderLayer(E, H, 32, batch_first=True)
    layer.self_attn = MultiheadAttention(E, H, num_kv_heads=2, batch_first=True)
    encoder = nn.TransformerEncoder(layer, LAYERS).eval()
    inputs = arguments("batch first True, norm first False", padding=True)
    with torch.no_grad(), Attentions() as calls:
        packed = encoder(inputs["x"], None, inputs["padding"])
    assert calls.forward == LAYERS
    assert not calls.theirs
    output = encoder(inputs["x"], None, inputs["padding"])
    torch.testing.assert_close(packed, output.masked_fill(inputs["padding"][..., None], 0))


# --- what stays as it was -------------------------------------------------------------------------


def test_same_objects() -> None:
    """Parameters, flags and everything that refers to the module."""
    model = nn.TransformerEncoderLayer(E, H, dropout=0.25).double()
    attention = model.self_attn.eval()
    attention.in_proj_bias.requires_grad_(False)
    before = dict(model.named_parameters())
    names = list(model.state_dict())
    convert(model)
    assert model.self_attn is attention
    assert type(attention) is MultiheadAttention
    assert attention.num_kv_heads == H
    assert attention.dropout == 0.25
    assert not attention.training
    assert model.training
    assert list(model.state_dict()) == names
    after = dict(model.named_parameters())
    assert all(after[name] is before[name] for name in before)
    assert not attention.in_proj_bias.requires_grad


@pytest.mark.usefixtures("compile_anew")
@pytest.mark.parametrize("masks", MASKS)
def test_compile(masks: str) -> None:
    shape = "batch first True, norm first False"
    _, converted = build("Encoder", shape)
    converted.encoder.forward = functools.partial(
        converted.encoder.forward, is_causal="mask" in MASKS[masks]
    )  # PyTorch cannot compile its search for a causal mask in one graph
    inputs = arguments(shape, **MASKS[masks])
    expected = converted(**inputs)
    compiled = torch.compile(converted, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**inputs), expected)
    compiled.eval()
    expected = converted(**inputs)  # without gradients torch's own encoder clears padding
    with torch.no_grad():
        torch.testing.assert_close(compiled(**inputs), expected)
        assert operators(compiled, **inputs)["attn::sdpa"] == LAYERS


@pytest.mark.usefixtures("compile_anew")
def test_compiled_before() -> None:
    """What was compiled is compiled again."""
    model = nn.TransformerEncoderLayer(E, H, batch_first=True).eval()
    compiled = torch.compile(model, backend="eager")
    x = torch.randn(B, L, E)
    expected = compiled(x)
    assert convert(compiled).swapped == ("_orig_mod.self_attn",)
    assert runs_attn(compiled, x)
    torch.testing.assert_close(compiled(x), expected)
    unconvert(compiled)
    assert not runs_attn(compiled, x)
    assert torch.equal(compiled(x), expected)


# --- what is said ---------------------------------------------------------------------------------


def test_result() -> None:
    """Names, each module once, and nothing of what was converted before."""

    class Derived(nn.MultiheadAttention):
        pass

    model = nn.Module()
    model.first = nn.MultiheadAttention(E, H)
    model.again = model.first
    model.layer = nn.TransformerDecoderLayer(E, H)
    model.derived = Derived(E, H)
    model.patched = nn.MultiheadAttention(E, H)
    model.patched.forward = lambda *_: None
    model.linear = nn.Linear(E, E)
    result = convert(model)
    assert result.swapped == ("first", "layer.self_attn", "layer.multihead_attn")
    assert result.skipped == {
        "derived": "its class, test_result.<locals>.Derived, is derived",
        "patched": "its forward was replaced",
    }
    assert "skipped={'derived'" in repr(result)
    assert model.again is model.first
    assert len(model.first._forward_pre_hooks) == 1
    assert type(model.derived) is Derived
    assert type(model.patched) is nn.MultiheadAttention
    assert convert(model) == torch_attn.Converted((), result.skipped)


class LeavesWeightsOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.MultiheadAttention(E, H)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x, x, x)[0]


class AsksForNone(LeavesWeightsOn):
    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x, x, x, need_weights=False)[0]


def test_says_who_computes_weights() -> None:
    layer = nn.TransformerEncoderLayer(E, H)
    model = nn.ModuleDict({"on": LeavesWeightsOn(), "off": AsksForNone(), "torch's": layer})
    result = convert(model)
    assert result.with_weights == ("on.layers.0",)
    assert "with_weights=('on.layers.0',)" in repr(result)
    assert "with_weights" not in repr(convert(model))
    assert convert(nn.Sequential(nn.MultiheadAttention(E, H))).with_weights == ()


@pytest.mark.parametrize(
    ("function", "other", "hint"),
    [
        (convert, MultiheadAttention, "; for models that .*integrations"),
        (unconvert, nn.MultiheadAttention, ""),
    ],
)
def test_a_model_without_attention_warns(function: Any, other: Any, hint: str) -> None:
    """But not one whose attention is of the other class already."""
    message = f"^{function.__name__}: Linear has no torch.nn.MultiheadAttention{hint}$"
    with pytest.warns(UserWarning, match=message) as warned:
        assert function(nn.Linear(E, E)) == torch_attn.Converted((), {})
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert function(other(E, H)) == torch_attn.Converted((), {})


@pytest.mark.parametrize("function", [convert, unconvert])
@pytest.mark.parametrize("model", [None, nn.MultiheadAttention, [nn.Linear(1, 1)]])
def test_no_module(function: Callable[[Any], Any], model: Any) -> None:
    name = type(model).__name__
    message = f"^{function.__name__}: model is a {name}; it must be a torch.nn.Module"
    with pytest.raises(TypeError, match=message):
        function(model)


# --- the way back ---------------------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "no bias": {"bias": False},
    "more keys": {"add_bias_kv": True, "add_zero_attn": True},
    "kdim": {"kdim": 5},
    "vdim, no bias": {"vdim": 7, "bias": False, "add_bias_kv": True},
    "batch first": {"batch_first": True, "dropout": 0.25},
    "bfloat16": {"dtype": torch.bfloat16, "kdim": 5, "vdim": 7},
}


def nothing(*_: Any) -> None:
    """A hook that can be pickled."""


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("hooks", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_there_and_back(variant: str, hooks: bool, training: bool) -> None:
    """Byte by byte: the class, all that is in the module, and in which order."""
    attention = nn.MultiheadAttention(E, H, **VARIANTS[variant]).train(training)
    if hooks:
        attention.register_forward_hook(nothing)
        attention.register_forward_pre_hook(nothing, with_kwargs=True)
    before, parameters = pickle.dumps(attention), list(attention.parameters())
    assert convert(attention) == torch_attn.Converted(("",), {})
    assert type(attention) is MultiheadAttention
    assert unconvert(attention) == torch_attn.Converted(("",), {})
    assert pickle.dumps(attention) == before
    assert all(a is b for a, b in zip(attention.parameters(), parameters, strict=True))


@pytest.mark.parametrize("variant", VARIANTS)
def test_modules_made_as_ours_become_those_of_torch(variant: str) -> None:
    """What was made as ours, and copies of it, is as if it were made as torch's."""
    torch.manual_seed(SEED)
    theirs = nn.MultiheadAttention(E, H, **VARIANTS[variant])
    torch.manual_seed(SEED)
    ours = MultiheadAttention(E, H, **VARIANTS[variant])
    for attention in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), ours):
        assert unconvert(attention) == torch_attn.Converted(("",), {})
        assert type(attention) is nn.MultiheadAttention
        assert repr(vars(attention)) == repr(vars(theirs))


@pytest.mark.cpu  # within torch.device("cuda"), as tests of a GPU are, torch has no fast path
def test_scripted_and_exported_again() -> None:
    shape = "batch first True, norm first False"
    model, encoder = build("Encoder", shape)
    model, encoder = model.encoder.eval(), encoder.encoder.eval()
    x = arguments(shape)["x"]
    with pytest.raises(torch.jit.frontend.NotSupportedError):
        torch.jit.script(encoder)
    unconvert(encoder)
    for other in (encoder, copy.deepcopy(encoder), torch.jit.script(encoder)):
        with torch.no_grad(), Attentions() as calls:
            assert torch.equal(other(x), model(x))
        assert calls.forward == 0
        assert calls.count["aten::_transformer_encoder_layer_fwd"] == 2 * LAYERS
    program = torch.export.export(encoder, (x,))
    assert "attn." not in str(program.graph)
    torch.testing.assert_close(program.module()(x), model(x))


def test_result_of_the_way_back() -> None:
    """Names, each module once; of what torch's module cannot do, the reason."""

    class Derived(MultiheadAttention):
        pass

    class Adapted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = nn.Module()
    model.first = MultiheadAttention(E, H)
    model.again = model.first
    model.layer = nn.TransformerDecoderLayer(E, H)
    convert(model.layer)
    model.theirs = nn.MultiheadAttention(E, H)
    model.grouped = MultiheadAttention(E, H, num_kv_heads=2, softcap=50.0)
    model.window = MultiheadAttention(E, H, window_size=(3, 0))
    model.derived = Derived(E, H)
    model.patched, model.adapted, model.called, model.watched, model.watched_before = (
        MultiheadAttention(E, H) for _ in range(5)
    )
    model.patched.forward = nothing
    model.adapted.out_proj = Adapted(E, E)
    model.called.out_proj.forward = nothing
    model.watched.out_proj.register_forward_hook(nothing)
    model.watched_before.out_proj.register_full_backward_pre_hook(nothing)
    before = pickle.dumps([model.grouped, model.window])
    result = unconvert(model)
    assert result.swapped == ("first", "layer.self_attn", "layer.multihead_attn")
    assert result.skipped == {
        "grouped": "torch's module has no num_kv_heads=2, softcap=50.0",
        "window": "torch's module has no window_size=(3, 0)",
        "derived": "its class, test_result_of_the_way_back.<locals>.Derived, is derived",
        "patched": "its forward was replaced",
        "adapted": "torch's module does not call its out_proj, a "
        "test_result_of_the_way_back.<locals>.Adapted",
        **dict.fromkeys(
            ("called", "watched", "watched_before"),
            "torch's module does not call its out_proj, a NonDynamicallyQuantizableLinear",
        ),
    }
    assert type(model.first) is type(model.layer.self_attn) is nn.MultiheadAttention
    assert pickle.dumps([model.grouped, model.window]) == before
    assert unconvert(model) == torch_attn.Converted((), result.skipped)
