"""How models of transformers get `attn`: its names, the function that attends, and masks.

Small models with random weights, nothing downloaded. Which families of models work, and that they
compute what eager attention does, is in tests/test_transformers_families.py.
"""

from __future__ import annotations

import contextlib
import os
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
from _models import VOCABULARY, Calls, error_of_register, padded_texts, step
from torch_attn import reference
from torch_attn.integrations._masks import Pattern
from torch_attn.integrations.transformers import attention_forward, register, unregister
from torch_attn.varlen import PackedSequences

ATTN = register()
LAYERS = 2
SMALL = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 32}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}


def build(cls: Any, implementation: str = ATTN, **settings: Any) -> Any:
    """A model with the same random weights in every call."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    config = cls.config_class(**sizes, **TOKENS, **settings)
    return cls._from_config(config, attn_implementation=implementation).eval()


@pytest.mark.parametrize(("name", "builtin"), [("sdpa", 1), ("eager", 0), ("flex_attention", 0)])
def test_register_in_place_of_transformers_own(
    monkeypatch: pytest.MonkeyPatch, name: str, builtin: int
) -> None:
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))
    interfaces = transformers.AttentionInterface(), transformers.AttentionMaskInterface()
    before = [dict(interface) for interface in interfaces]
    assert register(name) == register(name) == name
    model = transformers.BertModel(transformers.BertConfig(num_hidden_layers=1)).eval()
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


@pytest.mark.parametrize("side", ["none", "right", "left"])
def test_block_masks_of_the_caller(side: str) -> None:
    """A model in training under a BlockMask, as under the mask that transformers makes."""
    inputs, real = padded_texts(side)
    B, L = real.shape
    blocks = flex_attention.create_block_mask(
        lambda b, h, i, j: (i >= j) & real[b, j], B, None, L, L, device="cpu"
    )
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ours = build(transformers.LlamaModel, hidden_size=32, intermediate_size=32, **heads).train()
    found, expected = (
        step("transformers", ours, inputs | {"attention_mask": mask}, real)
        for mask in (blocks, inputs["attention_mask"])
    )
    assert found.operators.forward == expected.operators.forward == LAYERS
    for x, y in ((found.rows, expected.rows), (found.gradients, expected.gradients)):
        bound = 100 * 1.2e-7 * y.abs().max().item()  # of float32's rounding in some layers
        torch.testing.assert_close(x, y, rtol=0, atol=bound)


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


# They take the name and go on with their own attention.
NEVER: dict[str, tuple[Any, dict[str, Any]]] = {
    "MPNet": (transformers.MPNetModel, SMALL),
    "DeBERTa": (transformers.DebertaModel, SMALL),
    "BigBird": (transformers.BigBirdModel, SMALL | {"attention_type": "original_full"}),
    "BLOOM": (transformers.BloomModel, {"hidden_size": 24, "n_head": 3}),
    "Longformer": (transformers.LongformerModel, SMALL | {"attention_window": 4}),
    "MPT": (transformers.MptModel, {"d_model": 24, "n_heads": 3}),
    "RoFormer": (transformers.RoFormerModel, SMALL),
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
    eager, ours = (build(cls, implementation, **settings) for implementation in ("eager", ATTN))
    ours.load_state_dict(eager.state_dict())
    for side in ("none", "right"):
        inputs, real = padded_texts(side)
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
    counter = CompileCounter()
    ours = build(transformers.BertModel, **SMALL)
    compiled = torch.compile(ours, fullgraph=True, backend=counter)
    inputs, _ = padded_texts("right")
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


@pytest.mark.long
@pytest.mark.parametrize("which", BROKEN)
def test_who_is_to_blame(which: str, tmp_path: Path) -> None:
    """The package that does not work is named, with its own message, and it is the cause."""
    files, expected = BROKEN[which]
    assert error_of_register("transformers", files, tmp_path) == expected


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
    attends, added = torch.rand(2, 1, 5, 5) > 0.3, torch.randn(2, 1, 5, 5)
    mask = {"none": None, "bool": attends, "float": added}[kind]
    bias = torch.randn(1, 4, 5, 5) if with_bias else None
    total = torch.zeros(2, 4, 5, 5) if bias is None else bias.expand(2, 4, 5, 5)
    if mask is not None:
        total = total + (added if kind == "float" else torch.where(attends, 0.0, -torch.inf))
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


UNSUPPORTED = {
    "block_indices": "keys that an indexer chooses",
    "block_table": "keys in the pages of a cache",
    "head_mask": "head_mask",
    "indices": "keys that an indexer chooses",
    "sinks": "an attention sink for every query",
}


@pytest.mark.parametrize("argument", UNSUPPORTED)
def test_what_attn_does_not_do_is_an_error(
    qkv: tuple[Tensor, Tensor, Tensor], argument: str
) -> None:
    attention_forward(attention_module(), *qkv, None, **{argument: None})
    message = rf"Module asks for {UNSUPPORTED[argument]}.*, which attn does not support"
    with pytest.raises(ValueError, match=message):
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


BLOCKS = {"block_sequence_ids": torch.tensor([[-1] * 5 + [0] * 4] * 2)}
PACKED = {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2)}
SHARED = {"num_kv_shared_layers": 1}
# More than causality and a window: what a model asks for, and what its configuration says.
OTHER_PATTERNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "or": ({"or_mask_function": lambda batch, head, q, k: k < 1}, {}),
    "and": ({"and_mask_function": lambda batch, head, q, k: k < 1}, {}),
    "blocks": (BLOCKS, {}),
    "chunked": ({}, {"attention_chunk_size": WINDOW}),
    "asked for": ({"allow_is_causal_skip": False}, {}),
    "shared layers": ({}, SHARED),
    "layers of another kind": (
        {},
        {"layer_types": ["sliding_attention", "compressed_sparse_attention"]},
    ),
    "another model": ({}, {}),
    "four dimensions": ({"attention_mask": torch.eye(9).bool().expand(2, 1, 9, 9)}, {}),
    "packed blocks": (BLOCKS | PACKED, {}),
    "packed, shared layers": (PACKED, SHARED),
}


@pytest.mark.parametrize("kind", OTHER_PATTERNS)
def test_other_patterns_keep_their_mask(kind: str) -> None:
    given, settings = OTHER_PATTERNS[kind]
    model = transformers.StableLmModel if kind == "another model" else transformers.MistralModel
    config = config_of(model)
    for name, setting in settings.items():
        setattr(config, name, setting)
    made = "chunked" if kind == "chunked" else "sliding_window"
    make = getattr(masking, f"create_{made}_causal_mask")
    embeddings = torch.empty(2, 9, 0)
    arguments = {"inputs_embeds": embeddings, "attention_mask": None, "past_key_values": None}
    ours = make(config=config, **arguments | given)
    config._attn_implementation = "sdpa"
    torch.testing.assert_close(ours, make(config=config, **arguments | given))
    assert ours.shape == (2, 1, 9, 9)


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
    padding, cu_seq = torch.ones(2, 1, 1, 5, dtype=torch.bool), torch.tensor([0, 3, 8])
    packed = PackedSequences(cu_seq, cu_seq, 5, 5)
    pattern = Pattern(3, 0, torch.tensor(2), padding, (2, 1, 3, 5), packed)
    assert pattern.contiguous() is pattern
    moved = pattern.to("meta", non_blocking=True)
    assert moved.offset.is_meta
    assert moved.padding.is_meta
    assert moved.sequences.cu_seq_q.is_meta
    assert moved.sequences.cu_seq_k.is_meta
    assert (moved.left, moved.shape) == (3, (2, 1, 3, 5))
    assert Pattern(3, 0, None, None, (2, 1, 3, 5)).to("meta").padding is None
    # A model hands it back to be made into a mask again.
    assert MASKS[ATTN](attention_mask=pattern, config=mistral()) is pattern
