"""Small models with random weights, nothing downloaded: `attn` against their eager attention."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from _models import Calls
from torch_attn import reference
from torch_attn.integrations.transformers import attention_forward, calls, register

ATTN = register()
LAYERS = 2
LENGTHS = [9, 6, 1]  # of three sentences, padded to the longest
VOCABULARY = 40

# name: (model, configuration, calls of the operator in one forward pass)
MODELS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "bert": (
        transformers.BertModel,
        {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 32},
        LAYERS,
    ),
    "gpt2": (transformers.GPT2Model, {"hidden_size": 24, "num_attention_heads": 3}, LAYERS),
    "llama-gqa": (
        transformers.LlamaModel,
        {
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 32,
        },
        LAYERS,
    ),
    # A learned bias of relative positions, and attention from decoder to encoder.
    "t5": (
        transformers.T5Model,
        {
            "d_model": 24,
            "d_kv": 8,
            "d_ff": 32,
            "num_heads": 3,
            "num_decoder_layers": LAYERS,
            "decoder_start_token_id": 0,
        },
        3 * LAYERS,
    ),
}


def build(name: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    """The same random weights with eager attention and with attn, in float32."""
    cls, settings, _ = MODELS[name]
    torch.manual_seed(0)
    config = cls.config_class(
        **settings,
        **options,
        num_hidden_layers=LAYERS,
        vocab_size=VOCABULARY,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    eager = cls._from_config(config, attn_implementation="eager").eval()
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation(ATTN)
    return eager, ours


def batch(side: str, name: str) -> tuple[dict[str, Tensor], Tensor]:
    """Model inputs padded on one side, and which positions are real."""
    real = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    if side == "left":
        real = real.flip(1)
    elif side == "none":
        real = torch.ones_like(real)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, real.shape, generator=generator)
    inputs = {"input_ids": tokens, "attention_mask": real.long()}
    if name == "t5":
        inputs |= {"decoder_input_ids": tokens.flip(1), "decoder_attention_mask": real.long()}
    return inputs, real


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """To a hundred units of float32's resolution at the largest value, after some layers of it."""
    largest = expected.abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=0, atol=100 * 1.2e-7 * largest)


@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_those_of_eager(name: str, side: str) -> None:
    inputs, real = batch(side, name)
    results = []
    direction = torch.randn(build(name)[0].config.hidden_size)
    for model in build(name):
        before = calls()
        with Calls() as operators:
            hidden = model(**inputs).last_hidden_state
            # Rows of padding mean nothing and differ: eager averages there, attn gives 0.
            (hidden * real[..., None]).mul(direction).sum().backward()
        grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        results.append((hidden, torch.cat(grads), operators, calls() - before))
    (eager, eager_grads, eager_calls, eager_counted) = results[0]
    (ours, our_grads, our_calls, counted) = results[1]

    assert eager_counted == 0
    assert counted == MODELS[name][2]
    assert eager_calls.forward == 0
    assert our_calls.forward == MODELS[name][2]
    assert our_calls.count["attn::_sdpa_backward"] == MODELS[name][2]
    assert our_calls.builtin == 0
    assert_close(ours[real], eager[real])
    assert_close(our_grads, eager_grads)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_one_token_at_a_time(name: str, cache: str) -> None:
    """A cache filled by half a text and then token by token gives what the whole text gives."""
    eager, ours = build(name)
    tokens = batch("none", name)[0]["input_ids"]
    with torch.no_grad():
        expected = eager(input_ids=tokens).last_hidden_state
        past = (
            transformers.DynamicCache(config=ours.config)
            if cache == "dynamic"
            else transformers.StaticCache(config=ours.config, max_cache_len=16)
        )
        parts = [tokens[:, :4], *tokens[:, 4:].split(1, dim=1)]
        states = [
            ours(input_ids=part, past_key_values=past, use_cache=True).last_hidden_state
            for part in parts
        ]
    assert_close(torch.cat(states, dim=1), expected)


@pytest.mark.parametrize("side", ["none", "right"])
def test_compiles_as_one_graph_with_dynamic_shapes(side: str) -> None:
    inputs, real = batch(side, "llama-gqa")
    _, ours = build("llama-gqa")
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for length in (9, 5):
            short = {name: tensor[:, :length] for name, tensor in inputs.items()}
            actual, expected = (m(**short).last_hidden_state for m in (compiled, ours))
            assert_close(actual[real[:, :length]], expected[real[:, :length]])
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["bert", "llama-gqa"])
def test_output_attentions_as_a_call_argument(name: str) -> None:
    inputs, _ = batch("right", name)
    eager, ours = build(name)
    expected = eager(**inputs, output_attentions=True).attentions
    actual = ours(**inputs, output_attentions=True).attentions
    assert len(actual) == len(expected) == LAYERS
    for ours_layer, eager_layer in zip(actual, expected, strict=True):
        assert_close(ours_layer, eager_layer)


def test_register_in_place_of_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))
    assert register("sdpa") == "sdpa"
    model = transformers.BertModel(build("bert")[0].config.__class__(num_hidden_layers=1))
    with Calls() as operators:
        model(input_ids=torch.tensor([[1, 2, 3]]))
    assert operators.forward == 1


# --- models that do not use the interface ---------------------------------------------------------


COMMON = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 32}
# They take the name and go on with their own attention.
NEVER: dict[str, tuple[Any, dict[str, Any]]] = {
    "MPNet": (transformers.MPNetModel, COMMON),
    "DeBERTa": (transformers.DebertaModel, COMMON),
    "BigBird": (transformers.BigBirdModel, COMMON | {"attention_type": "original_full"}),
    "BLOOM": (transformers.BloomModel, {"hidden_size": 24, "n_head": 3}),
    "Longformer": (transformers.LongformerModel, COMMON | {"attention_window": 4}),
    "MPT": (transformers.MptModel, {"d_model": 24, "n_heads": 3, "n_layers": 2}),
    "RoFormer": (transformers.RoFormerModel, COMMON),
    "XGLM": (transformers.XGLMModel, {"d_model": 24, "attention_heads": 3, "ffn_dim": 32}),
    "XLNet": (transformers.XLNetModel, {"d_model": 24, "n_head": 3, "d_inner": 32}),
}
# They look the name up in a table of their own.
RAISING = {
    "Bark": transformers.BarkModel,
    "Data2VecVision": transformers.Data2VecVisionModel,
    "DeepSeek-OCR 2": transformers.DeepseekOcr2Model,
    "DeepSeek-VL Hybrid": transformers.DeepseekVLHybridModel,
    "Falcon": transformers.FalconModel,
    "GIT": transformers.GitModel,
    "GPT-J": transformers.GPTJModel,
    "GPT-Neo": transformers.GPTNeoModel,
    "SAM": transformers.SamModel,
    "SAM-HQ": transformers.SamHQModel,
    "SuperGlue": transformers.SuperGlueForKeypointMatching,
    "UnlimitedOCR": transformers.UnlimitedOcrModel,
}


@pytest.mark.parametrize("name", NEVER)
def test_models_that_never_call(name: str) -> None:
    """Their own attention gets the masks that it understands, and the counter says so."""
    cls, settings = NEVER[name]
    torch.manual_seed(0)
    layers = {"num_hidden_layers": LAYERS} if "n_layers" not in settings else {}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
    config = cls.config_class(**settings, **layers, **tokens, vocab_size=VOCABULARY)
    eager = cls._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    ours = cls._from_config(config, attn_implementation=ATTN).eval()
    ours.load_state_dict(eager.state_dict())
    for side in ("none", "right"):
        inputs, real = batch(side, name)
        before = calls()
        actual, expected = (model(**inputs)[0][real] for model in (ours, eager))
        assert calls() == before
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert name in register.__doc__


@pytest.mark.parametrize("name", RAISING)
def test_models_that_raise(name: str) -> None:
    cls = RAISING[name]
    with torch.device("meta"), pytest.raises(KeyError, match=f"'{ATTN}'"):
        cls._from_config(cls.config_class(), attn_implementation=ATTN)
    assert name in register.__doc__


def test_calls_of_a_compiled_model() -> None:
    """It counts while it is compiled and not afterwards; the counter compiles nothing anew."""
    _, ours = build("bert")
    counter = CompileCounter()
    compiled = torch.compile(ours, fullgraph=True, backend=counter)
    inputs, _ = batch("right", "bert")
    before = calls()
    with torch.no_grad():
        for _ in range(3):
            compiled(**inputs)
    assert (calls() - before, counter.frame_count) == (LAYERS, 1)
    torch.compiler.reset()


# --- transformers that cannot be imported ---------------------------------------------------------


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    message = r"transformers is not installed: pip install 'torch-attn\[transformers\]'"
    with pytest.raises(ImportError, match=message):
        register()


# Files of packages that come before the installed ones; the type, text and name of the error.
BROKEN: dict[str, tuple[dict[str, str], str]] = {
    "old": (
        {"transformers.py": "__version__ = '4.30.0'"},
        "ImportError: transformers 4.30.0 has no AttentionInterface with masks; torch_attn needs "
        "transformers 5 or later: pip install 'torch-attn[transformers]' (transformers)",
    ),
    "something missing": (
        {"transformers.py": "import attn_test_missing"},
        "ImportError: transformers is installed but does not import: ModuleNotFoundError: No "
        "module named 'attn_test_missing' (attn_test_missing)",
    ),
    "something broken": (
        {
            "transformers.py": "import torchvision",
            "torchvision.py": "raise ImportError('libjpeg.so: not found', name='torchvision._C')",
        },
        "ImportError: transformers is installed but does not import: ImportError: libjpeg.so: not "
        "found (torchvision._C)",
    ),
    # of which the real transformers only says "Could not import module 'AttentionInterface'"
    "something broken, found late": (
        {"safetensors/__init__.py": "raise RuntimeError('no operator of this name')"},
        "ImportError: transformers is installed but does not import: RuntimeError: no operator of "
        "this name (None)",
    ),
    "another error inside": (
        {"transformers.py": "import math\nmath.no_such_function"},
        "AttributeError: module 'math' has no attribute 'no_such_function' (no_such_function)",
    ),
}


@pytest.mark.parametrize("which", BROKEN)
def test_who_is_to_blame(which: str, tmp_path: Path) -> None:
    """The package that does not work is named, with its own message, and it is the cause."""
    files, expected = BROKEN[which]
    for name, source in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    code = f"""
import sys
from torch_attn.integrations.transformers import register
sys.path.insert(0, {str(tmp_path)!r})
try:
    register()
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}} ({{error.name}})")
    assert ("does not import" in str(error)) == (error.__cause__ is not None)
"""
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert result.stdout.decode().strip() == expected


# The function itself


@pytest.fixture
def qkv() -> tuple[Tensor, Tensor, Tensor]:
    """Views `[B, H, L, E]` of `[B, L, H, E]`, as models make them; two query heads per KV head."""
    torch.manual_seed(0)
    make = lambda heads, size: torch.randn(2, 5, heads, size).transpose(1, 2)  # noqa: E731
    return make(4, 8), make(2, 8), make(2, 6)


def attention_module(**attributes: Any) -> nn.Module:
    module = nn.Module().eval()
    for name, attribute in {"num_key_value_groups": 2, "is_causal": False, **attributes}.items():
        setattr(module, name, attribute)
    return module


@pytest.mark.parametrize("kind", ["none", "bool", "float"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["", "causal"])
def test_masks_and_bias(
    qkv: tuple[Tensor, Tensor, Tensor], kind: str, with_bias: bool, is_causal: bool
) -> None:
    attends = torch.rand(2, 1, 5, 5) > 0.3
    mask = {"bool": attends, "float": torch.randn(2, 1, 5, 5)}.get(kind)
    bias = torch.randn(1, 4, 5, 5) if with_bias else None
    total = torch.zeros(2, 4, 5, 5) if bias is None else bias.expand(2, 4, 5, 5)
    if kind == "bool":
        total = total.masked_fill(~attends, float("-inf"))
    elif kind == "float":
        total = total + mask
    # A mask holds the causality already; without one the flag counts.
    expected = reference.sdpa(
        *qkv, total, is_causal=is_causal and mask is None, scale=0.3, enable_gqa=True
    )
    module = attention_module(is_causal=is_causal)
    output, weights = attention_forward(module, *qkv, mask, scaling=0.3, position_bias=bias)
    assert weights is None
    assert output.shape == (2, 5, 4, 6)
    assert output.is_contiguous()
    torch.testing.assert_close(output.transpose(1, 2), expected)


def test_is_causal_of_the_call_comes_first(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    full, _ = attention_forward(attention_module(is_causal=True), *qkv, None, is_causal=False)
    causal, _ = attention_forward(attention_module(is_causal=False), *qkv, None, is_causal=True)
    torch.testing.assert_close(full.transpose(1, 2), reference.sdpa(*qkv, enable_gqa=True))
    torch.testing.assert_close(
        causal.transpose(1, 2), reference.sdpa(*qkv, is_causal=True, enable_gqa=True)
    )


def test_a_single_query_sees_every_key(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value = qkv[0][:, :, -1:], *qkv[1:]
    output, _ = attention_forward(attention_module(is_causal=True), query, key, value, None)
    expected = reference.sdpa(query, key, value, enable_gqa=True)
    torch.testing.assert_close(output.transpose(1, 2), expected)


def test_dropout_only_in_training(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    module = attention_module()
    expected, _ = attention_forward(module, *qkv, None)
    torch.testing.assert_close(attention_forward(module, *qkv, None, dropout=0.5)[0], expected)
    module.train()
    torch.testing.assert_close(attention_forward(module, *qkv, None)[0], expected)
    assert attention_forward(module, *qkv, None, dropout=1.0)[0].eq(0).all()
    assert not attention_forward(module, *qkv, None, dropout=0.5)[0].allclose(expected)


def test_weights_are_those_before_dropout(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    module = attention_module().train()
    _, weights = attention_forward(module, *qkv, None, dropout=0.5, output_attentions=True)
    expected = reference.sdpa_with_weights(*qkv, enable_gqa=True)[1]
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("argument", ["cache", "head_mask", "s_aux", "sinks", "softcap"])
def test_what_attn_does_not_do_is_an_error(
    qkv: tuple[Tensor, Tensor, Tensor], argument: str
) -> None:
    attention_forward(attention_module(), *qkv, None, **{argument: None})
    with pytest.raises(ValueError, match=r"Module asks for .*, which attn does not support"):
        attention_forward(attention_module(), *qkv, None, **{argument: torch.ones(4)})
