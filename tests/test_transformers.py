"""Small models with random weights, nothing downloaded: `attn` against their eager attention."""

from __future__ import annotations

import contextlib
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
from packaging.version import Version
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention

import torch_attn
from _models import Calls
from torch_attn import reference
from torch_attn.integrations._masks import Pattern
from torch_attn.integrations.transformers import attention_forward, register, unregister

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
    """Allows a hundred units of float32's resolution at the largest value, after some layers."""
    largest = expected.abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=0, atol=100 * 1.2e-7 * largest)


@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_those_of_eager(name: str, side: str) -> None:
    inputs, real = batch(side, name)
    results = []
    direction = torch.randn(build(name)[0].config.hidden_size)
    for model in build(name):
        before = torch_attn.calls()["transformers"]
        with Calls() as operators:
            hidden = model(**inputs).last_hidden_state
            # Rows of padding mean nothing and differ: eager averages there, attn gives 0.
            (hidden * real[..., None]).mul(direction).sum().backward()
        grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        results.append(
            (hidden, torch.cat(grads), operators, torch_attn.calls()["transformers"] - before)
        )
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


@pytest.mark.slow  # compiles models
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


@pytest.mark.parametrize(("name", "builtin"), [("sdpa", 1), ("eager", 0), ("flex_attention", 0)])
def test_register_in_place_of_transformers_own(
    monkeypatch: pytest.MonkeyPatch, name: str, builtin: int
) -> None:
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))
    interfaces = transformers.AttentionInterface(), transformers.AttentionMaskInterface()
    before = [dict(interface) for interface in interfaces]
    assert register(name) == register(name) == name
    model = transformers.BertModel(build("bert")[0].config.__class__(num_hidden_layers=1)).eval()
    model.set_attn_implementation(name)
    with Calls() as operators:
        model(input_ids=torch.tensor([[1, 2, 3]]))
    assert (operators.forward, operators.builtin) == (1, 0)
    unregister(name)
    assert [dict(interface) for interface in interfaces] == before
    answered = torch_attn.calls()["transformers"]
    # PyTorch's FlexAttention cannot run in the mode that counts operators.
    operators = Calls()
    with contextlib.nullcontext() if name == "flex_attention" else operators, torch.no_grad():
        model(input_ids=torch.tensor([[1, 2, 3]]))
    assert (
        torch_attn.calls()["transformers"] - answered,
        operators.forward,
        operators.builtin,
    ) == (0, 0, builtin)


def block_mask(side: str, name: str) -> Any:
    """What FlexAttention gets for a batch: causal, without padding."""
    real = batch(side, name)[1]

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & real[b, j]

    B, L = real.shape
    return flex_attention.create_block_mask(visible, B, None, L, L, device="cpu")


@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize("name", ["llama-gqa"])
def test_block_masks_of_the_caller(name: str, side: str) -> None:
    """A model in training under a BlockMask, as under the mask that transformers makes."""
    inputs, real = batch(side, name)
    ours = build(name)[1].train()
    results = []
    for mask in (inputs["attention_mask"], block_mask(side, name)):
        ours.zero_grad()
        with Calls() as operators:
            hidden = ours(**(inputs | {"attention_mask": mask})).last_hidden_state
            (hidden * real[..., None]).square().sum().backward()
        grads = [p.grad.flatten() for p in ours.parameters() if p.grad is not None]
        results.append((hidden[real], torch.cat(grads)))
        assert operators.forward == MODELS[name][2]
    for found, expected in zip(*results, strict=True):
        assert_close(found, expected)


def test_block_masks_beside_other_arguments(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    """A soft cap and a bias are part of the function; sinks are not of the score."""
    query, key, value = qkv
    L, S = query.size(2), key.size(2)
    bias, sinks = torch.randn(1, 1, L, S), torch.randn(query.size(1))
    mask = flex_attention.create_block_mask(
        lambda b, h, i, j: i + 1 >= j, None, None, L, S, device="cpu"
    )
    dense = torch.ones(L, S, dtype=torch.bool).tril(1)
    options = {"softcap": 3.0, "position_bias": bias, "s_aux": sinks, "scaling": 0.3}
    module = attention_module()
    found, weights = attention_forward(module, query, key, value, mask, **options)
    expected, _ = attention_forward(module, query, key, value, dense, **options)
    assert weights is None
    torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="a BlockMask beside weights; pass a tensor"):
        attention_forward(module, query, key, value, mask, output_attentions=True)


@pytest.mark.parametrize("name", ["attn", "sdpa", "of nothing"])
def test_unregister_what_was_not_taken(name: str) -> None:
    register()
    with pytest.raises(ValueError, match=f"name is '{name}'; register.. took .* transformers: no"):
        unregister(name)


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
if Version(transformers.__version__) >= Version("5.24"):
    del RAISING["GPT-J"]


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
        before = torch_attn.calls()["transformers"]
        actual, expected = (model(**inputs)[0][real] for model in (ours, eager))
        assert torch_attn.calls()["transformers"] == before
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
    before = torch_attn.calls()["transformers"]
    with torch.no_grad():
        for _ in range(3):
            compiled(**inputs)
    assert (torch_attn.calls()["transformers"] - before, counter.frame_count) == (LAYERS, 1)
    torch.compiler.reset()


# --- transformers that cannot be imported ---------------------------------------------------------


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    message = r"transformers is not installed: in a checkout .* pip install .*\[transformers\]'"
    with pytest.raises(ImportError, match=message):
        register()


# Files of packages that come before the installed ones; the type, text and name of the error.
BROKEN: dict[str, tuple[dict[str, str], str]] = {
    "old": (
        {"transformers.py": "__version__ = '4.30.0'"},
        "ImportError: transformers 4.30.0 has no AttentionInterface with masks; torch_attn needs "
        "transformers 5 or later: in a checkout of torch_attn, pip install --no-build-isolation "
        "-e '.[transformers]' (transformers)",
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


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
def test_soft_cap_and_sinks(
    qkv: tuple[Tensor, Tensor, Tensor], softcap: float | None, with_sinks: bool
) -> None:
    sinks = torch.randn(4, requires_grad=True) if with_sinks else None
    options = {"softcap": softcap, "s_aux": sinks}
    module = attention_module(is_causal=True)
    output, _ = attention_forward(module, *qkv, None, **options)
    same, weights = attention_forward(module, *qkv, None, output_attentions=True, **options)
    expected, of_reference, _ = reference.sdpa_with_weights(
        *qkv, is_causal=True, softcap=softcap or 0.0, sinks=sinks, enable_gqa=True
    )
    torch.testing.assert_close(output.transpose(1, 2), expected)
    torch.testing.assert_close(same, output)
    torch.testing.assert_close(weights, of_reference)
    if with_sinks:
        grads = (torch.autograd.grad(x.square().sum(), sinks)[0] for x in (output, expected))
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("of_model", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("of_sinks", [torch.float32, torch.bfloat16, torch.float16])
def test_sinks_of_another_type(
    qkv: tuple[Tensor, Tensor, Tensor], of_model: torch.dtype, of_sinks: torch.dtype
) -> None:
    """A model that keeps some parameters in float32, or computes in more than it stores."""
    query, key, value = (x.to(of_model) for x in qkv)
    sinks = torch.randn(4).to(of_sinks).requires_grad_()
    module = attention_module()
    output, _ = attention_forward(module, query, key, value, None, s_aux=sinks)
    expected, _ = attention_forward(module, *qkv, None, s_aux=sinks.detach().float())
    assert output.dtype == of_model
    bound = 4e-2 if of_model == torch.bfloat16 else 1e-5
    torch.testing.assert_close(output.float(), expected, rtol=0, atol=bound)
    if of_sinks == torch.float32 and of_model != torch.float64:  # not rounded first
        exact = torch_attn.sdpa(query, key, value, sinks=sinks, enable_gqa=True)
        assert torch.equal(output.transpose(1, 2), exact)
    output.sum().backward()
    assert sinks.grad.dtype == of_sinks
    assert sinks.grad.any()


@pytest.mark.parametrize(
    "argument", ["block_indices", "block_table", "head_mask", "indices", "sinks"]
)
def test_what_attn_does_not_do_is_an_error(
    qkv: tuple[Tensor, Tensor, Tensor], argument: str
) -> None:
    attention_forward(attention_module(), *qkv, None, **{argument: None})
    with pytest.raises(ValueError, match=r"Module asks for .*, which attn does not support"):
        attention_forward(attention_module(), *qkv, None, **{argument: torch.ones(4)})


# Which mask is made


MASKS = transformers.AttentionMaskInterface()
WINDOW = 4
masking = transformers.masking_utils
SLIDING = masking.sliding_window_causal_mask_function(WINDOW)


def config_of(model: Any) -> Any:
    """A configuration whose model is imported: it is asked where masks go."""
    config = model.config_class(sliding_window=WINDOW)
    config._attn_implementation = ATTN
    return config


def mistral() -> Any:
    return config_of(transformers.MistralModel)


# name: (queries, keys, position of the first query, of the first key, columns of a mask of padding)
PLACES: dict[str, tuple[int, int, int | Tensor, int, int]] = {
    "a text": (9, 9, 0, 0, 9),
    "a short text": (3, 3, 0, 0, 3),
    "a text as long as the window": (4, 4, 0, 0, 4),
    "a chunk": (3, 9, 6, 0, 9),
    "a token": (1, 9, 8, 0, 9),
    "a token among others": (1, 9, 5, 0, 9),
    "a chunk in a cache of the window": (3, 6, 8, 5, 11),
    "a token in a cache of the window": (1, 4, 8, 5, 9),
    "an empty static cache": (5, 12, 0, 0, 5),
    "a static cache": (3, 12, torch.tensor(5), 0, 8),
    "an empty static cache of the window": (3, 4, 0, 0, 3),
    "a static cache of the window that fills up": (4, 6, 2, 0, 6),
    "a static cache of the window": (3, 6, 8, 5, 11),
    "a mask of padding that is too short": (3, 9, 6, 0, 4),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("windowed", [False, True], ids=["causal", "window"])
@pytest.mark.parametrize("padded", ["", "left", "right"])
def test_patterns_are_the_masks_of_transformers(place: str, windowed: bool, padded: str) -> None:
    """No mask of L x S is made, and attention is as with transformers' own."""
    L, S, q_offset, kv_offset, columns = PLACES[place]
    padding = None
    if padded:
        padding = torch.ones(2, columns, dtype=torch.bool)
        padding[1, slice(columns // 2) if padded == "left" else slice(-1, None)] = False
    arguments: dict[str, Any] = {
        "batch_size": 2,
        "q_length": L,
        "kv_length": S,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": SLIDING if windowed else masking.causal_mask_function,
        "attention_mask": padding,
    }
    if windowed:
        arguments["local_size"] = WINDOW
    mask = masking.sdpa_mask(**arguments, allow_is_causal_skip=False)
    pattern = MASKS[ATTN](**arguments, allow_is_causal_skip=True, config=mistral())
    if isinstance(pattern, Pattern):
        assert pattern.shape == (2, 1, L, S)
        assert pattern.padding is None or pattern.padding.shape == (2, 1, 1, S)
        assert padded or pattern.padding is None
        # A window that reaches to the first key is none.
        hides = isinstance(q_offset, Tensor) or q_offset - kv_offset + L > WINDOW
        assert pattern.left == (WINDOW - 1 if windowed and hides else -1)
    else:
        assert L == 1  # the newest token sees all keys that are there
        assert pattern is None or pattern.shape == (2, 1, 1, S)
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, L, 8), *torch.randn(2, 2, 2, S, 8)
    module = attention_module(is_causal=False)
    actual, expected = (attention_forward(module, query, key, value, m)[0] for m in (pattern, mask))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("L", [1, WINDOW + 1, WINDOW + 2, 9])
@pytest.mark.parametrize("kind", ["bidirectional", "bidirectional_sliding_window"])
def test_keys_on_both_sides_need_no_mask_of_pairs(kind: str, L: int, padded: bool) -> None:
    make = getattr(masking, f"create_{kind}_mask")
    seen = torch.ones(2, L, dtype=torch.long)
    seen[1, L // 2 :] = 0
    config = mistral()
    arguments = {"inputs_embeds": torch.empty(2, L, 0), "attention_mask": seen if padded else None}
    ours = make(config, **arguments)
    config._attn_implementation = "sdpa"
    expected = make(config, **arguments)
    has_window = kind != "bidirectional" and L > WINDOW + 1
    assert isinstance(ours, Pattern) == has_window
    assert (
        has_window or (ours.shape == (2, 1, 1, L) if padded and L > 1 else ours is None) or L == 1
    )
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, L, 8), *torch.randn(2, 2, 2, L, 8)
    module = attention_module(is_causal=False)
    actual, expected = (
        attention_forward(module, query, key, value, m)[0] for m in (ours, expected)
    )
    torch.testing.assert_close(actual, expected)


def test_an_offset_is_not_that_of_a_cache_that_grows() -> None:
    """A static cache adds to its length in place, before the layers attend."""
    length = torch.tensor(5)
    arguments = {"batch_size": 1, "q_length": 3, "kv_length": 12, "q_offset": length}
    function = masking.causal_mask_function
    pattern = MASKS[ATTN](
        **arguments, mask_function=function, allow_is_causal_skip=True, config=mistral()
    )
    length.add_(3)
    assert pattern.offset == 5


def made_by_transformers(kind: str) -> Tensor:
    """The mask of a pattern that is more than causality and a window."""
    arguments: dict[str, Any] = {
        "config": mistral(),
        "inputs_embeds": torch.empty(2, 9, 0),
        "attention_mask": None,
        "past_key_values": None,
    }
    make = masking.create_sliding_window_causal_mask
    first = lambda batch, head, q, k: k < 1  # noqa: E731
    if kind == "or":
        arguments["or_mask_function"] = first
    elif kind == "and":
        arguments["and_mask_function"] = first
    elif kind == "blocks":
        arguments["block_sequence_ids"] = torch.tensor([[-1] * 5 + [0] * 4] * 2)
    elif kind == "packed blocks":
        arguments["position_ids"] = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2)
        arguments["block_sequence_ids"] = torch.tensor([[-1] * 5 + [0] * 4] * 2)
    elif kind == "packed, shared layers":
        arguments["position_ids"] = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2)
        arguments["config"].num_kv_shared_layers = 1
    elif kind == "chunked":
        arguments["config"].attention_chunk_size = WINDOW
        make = masking.create_chunked_causal_mask
    elif kind == "asked for":
        arguments["allow_is_causal_skip"] = False
    elif kind == "layers of another kind":
        arguments["config"].layer_types = ["sliding_attention", "compressed_sparse_attention"]
    elif kind == "shared layers":
        arguments["config"].num_kv_shared_layers = 1
    elif kind == "another model":
        arguments["config"] = config_of(transformers.StableLmModel)
    elif kind == "four dimensions":
        arguments["attention_mask"] = torch.rand(2, 1, 9, 9) > 0.5
    ours = make(**arguments)
    arguments["config"]._attn_implementation = "sdpa"
    torch.testing.assert_close(ours, make(**arguments))
    return ours


@pytest.mark.parametrize(
    "kind",
    [
        *("or", "and", "blocks", "chunked", "asked for", "shared layers"),
        *("layers of another kind", "another model", "four dimensions"),
        *("packed blocks", "packed, shared layers"),
    ],
)
def test_other_patterns_keep_their_mask(kind: str) -> None:
    assert made_by_transformers(kind).shape == (2, 1, 9, 9)


def window_mask(function: Any, config: Any, size: int | None = WINDOW) -> Any:
    """What a model gets that asks by this function for a window, or for causality (None)."""
    return MASKS[ATTN](
        batch_size=1,
        q_length=9,
        kv_length=9,
        q_offset=0,
        mask_function=function,
        allow_is_causal_skip=True,
        local_size=size,
        config=config,
    )


FUNCTIONS = {
    "another window": masking.sliding_window_causal_mask_function(WINDOW - 1),
    "another order": masking.and_masks(
        masking.causal_mask_function, masking.sliding_window_overlay(WINDOW)
    ),
    "three": masking.and_masks(
        masking.sliding_window_overlay(WINDOW),
        masking.causal_mask_function,
        masking.bidirectional_mask_function,
    ),
    "or": masking.or_masks(masking.sliding_window_overlay(WINDOW), masking.causal_mask_function),
    "chunks": masking.chunked_causal_mask_function(WINDOW, torch.zeros(1, dtype=torch.int64)),
    "another function": lambda batch, head, q, k: k <= q,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_only_look_like_a_window(name: str) -> None:
    """Masks of models outside of transformers, which may combine what they like."""
    assert isinstance(window_mask(FUNCTIONS[name], mistral()), Tensor)
    assert not isinstance(window_mask(FUNCTIONS[name], mistral(), None), Pattern)
    assert isinstance(window_mask(SLIDING, mistral()), Pattern)
    assert isinstance(window_mask(SLIDING, config_of(OwnModel)), Pattern)


class OwnConfig(transformers.MistralConfig):
    """The config of a program's own model, which may combine functions as it likes."""


class OwnModel(transformers.MistralModel):
    config_class = OwnConfig


@pytest.mark.parametrize(
    ("model", "function", "size", "expected"),
    [
        (transformers.MistralModel, SLIDING, WINDOW, Pattern),
        (transformers.MistralModel, SLIDING, WINDOW + 1, Tensor),
        (transformers.MistralModel, FUNCTIONS["or"], WINDOW, Tensor),
        (OwnModel, SLIDING, WINDOW, Tensor),
    ],
    ids=["window", "another window", "or", "a model of one's own"],
)
@pytest.mark.parametrize("chunk", [None, WINDOW], ids=["", "a model with chunks"])
def test_what_a_graph_knows_to_be_a_window(
    model: Any, function: Any, size: int, expected: type, chunk: int | None
) -> None:
    """The code of the function and a configuration of transformers, without what is around it."""
    config = config_of(model)
    config.attention_chunk_size = chunk
    expected = Tensor if chunk else expected

    def is_as_expected(x: Tensor) -> Tensor:
        return x + isinstance(window_mask(function, config, size), expected)

    assert torch.compile(is_as_expected, fullgraph=True, backend="eager")(torch.zeros(1)).all()
    torch.compiler.reset()


def test_a_pattern_for_other_sizes_is_an_error(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    module = attention_module()
    for L, S in ((5, 6), (4, 5)):
        pattern = Pattern(-1, 0, None, None, (2, 1, L, S))
        message = rf"Module attends with 5 queries to 5 keys, but its mask .* {L} queries and {S}"
        with pytest.raises(ValueError, match=message):
            attention_forward(module, *qkv, pattern)


def test_what_generate_and_accelerate_do_to_a_pattern() -> None:
    padding = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    pattern = Pattern(3, 0, torch.tensor(2), padding, (2, 1, 3, 5))
    assert pattern.contiguous() is pattern
    moved = pattern.to("meta", non_blocking=True)
    assert (moved.offset.device.type, moved.padding.device.type) == ("meta", "meta")
    assert (moved.left, moved.shape) == (3, (2, 1, 3, 5))
    assert Pattern(3, 0, None, None, (2, 1, 3, 5)).to("meta").padding is None
    # A model hands it back to be made into a mask again.
    assert MASKS[ATTN](attention_mask=pattern, config=mistral()) is pattern
