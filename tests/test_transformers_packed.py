"""Packed texts in transformers: training without padding, and continuous batching.

Small models with random weights. Each text is to be what it is alone.
"""

from __future__ import annotations

import copy
import functools
import os
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.generation import ContinuousBatchingConfig, GenerationConfig

import torch_attn
from _memory import largest_block
from _models import Calls, InFloat64, assert_close_in_float64
from torch_attn import reference, varlen
from torch_attn.integrations._masks import Pattern, _packed
from torch_attn.integrations.transformers import attention_forward, register

ATTN = register()
LAYERS = 2
VOCABULARY = 40
LENGTHS = (9, 6, 14)
SMALL = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
}
WINDOW = {"sliding_window": 4}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": WINDOW,
    # A cap that bends scores, and a window in every other layer.
    "Gemma2": WINDOW | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    # A sink a head.
    "GptOss": WINDOW
    | {"num_local_experts": 2, "num_experts_per_tok": 2, "experts_implementation": "eager"},
}


def build(name: str, dtype: torch.dtype) -> Any:
    cls = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(0)
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    sizes = {"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    config = cls.config_class(**SMALL, **MODELS[name], **tokens, **sizes)
    model = cls._from_config(config, attn_implementation="eager", dtype=dtype).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)  # scores and sinks that matter
    return model


def with_attn(model: Any) -> Any:
    model = copy.deepcopy(model)
    model.set_attn_implementation(ATTN)
    return model


def texts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def packed(
    lengths: tuple[int, ...] = LENGTHS, use_cache: bool = False, **options: Any
) -> dict[str, Any]:
    collator = transformers.DataCollatorWithFlattening(return_tensors="pt", **options)
    batch: dict[str, Any] = collator([{"input_ids": text} for text in texts(lengths)])
    return batch | {"use_cache": use_cache}


# How transformers is told of the texts, and whether their keys go to a cache, as is its default.
TOLD: dict[str, dict[str, Any]] = {
    "numbers": {"return_flash_attn_kwargs": True},
    "numbers, beside a cache": {"return_flash_attn_kwargs": True, "use_cache": True},
    "positions": {},
}
CASES = [(name, told) for name in MODELS for told in TOLD]
CASES.remove(("GptOss", "positions"))  # it does not look at them for its masks


@pytest.mark.parametrize(("name", "told"), CASES)
def test_a_packed_batch_trains_as_its_texts_alone(name: str, told: str) -> None:
    """Loss and all gradients equal eager attention's, sequence by sequence, in float64."""
    losses, gradients = [], []
    with InFloat64():
        eager = build(name, torch.float64)
        ours = with_attn(eager)
        before = torch_attn.calls()["transformers"]
        with Calls() as operators:
            loss = ours(**packed(**TOLD[told])).loss
            loss.backward()
        assert torch_attn.calls()["transformers"] - before == LAYERS
        assert operators.forward == LAYERS  # of all texts at once
        for text in texts():
            tokens = torch.tensor([text])
            losses.append(eager(input_ids=tokens, labels=tokens).loss * (len(text) - 1))
        expected = sum(losses) / (sum(LENGTHS) - len(LENGTHS))
        expected.backward()
    assert_close_in_float64(loss, expected)
    for model in (ours, eager):
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert_close_in_float64(*gradients)


@pytest.mark.parametrize(("name", "told"), CASES)
def test_memory_of_a_packed_batch(name: str, told: str) -> None:
    """Not even the booleans of a mask fit into the largest block of forward and backward."""
    lengths = (900, 20, 1100)
    batch, ours = packed(lengths, **TOLD[told]), with_attn(build(name, torch.float32))
    taken = largest_block(lambda: ours(**batch).loss.backward())
    assert 0 < taken < sum(lengths) ** 2 / 4


def test_rows_of_packed_texts() -> None:
    """Several of them in a batch, each of several texts."""
    tokens = torch.tensor([texts((12,))[0], texts((5, 7))[0] + texts((5, 7))[1]])
    positions = torch.tensor([[*range(4), *range(8)], [*range(5), *range(7)]])
    ours = with_attn(build("Mistral", torch.float64))
    with torch.no_grad(), Calls() as operators:
        actual = ours(input_ids=tokens, position_ids=positions, use_cache=False).logits
        assert operators.forward == LAYERS
        for row, start, end in ((0, 0, 4), (0, 4, 12), (1, 0, 5), (1, 5, 12)):
            alone = ours(input_ids=tokens[row : row + 1, start:end]).logits
            torch.testing.assert_close(actual[row : row + 1, start:end], alone)


def test_weights_of_packed_texts() -> None:
    """The weights are L x S, as with a mask; between sequences they are 0."""
    ours = with_attn(build("Gemma2", torch.float64))
    with torch.no_grad():
        batch = packed(**TOLD["numbers"])
        expected = ours(**batch).logits
        actual = ours(**batch, output_attentions=True)
    torch.testing.assert_close(actual.logits, expected)
    weights = actual.attentions[0][0, 0]
    number = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    assert weights[number[:, None] != number].eq(0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[0]))


@pytest.mark.parametrize("told", TOLD)
def test_packed_texts_are_inspected_as_texts_alone(told: str) -> None:
    ours = with_attn(build("Mistral", torch.float64))
    seen = torch_attn.inspect(ours, **packed(**TOLD[told]))
    assert len(seen.layers) == LAYERS
    expected = torch.cat([torch.arange(1, n + 1).clamp(max=4) for n in LENGTHS])
    for layer in seen.layers:
        assert layer.visible_keys[0, 0].equal(expected)


@pytest.mark.parametrize("kind", ["boolean", "floating", "padding"])
def test_packed_texts_beside_a_mask(kind: str) -> None:
    """A model's other pattern beside packed sequences: both count."""
    query, key, value = torch.randn(3, 1, 2, 8, 4)
    cu_seq = torch.tensor([0, 3, 8], dtype=torch.int32)
    said = {"cu_seq_lens_q": cu_seq, "cu_seq_lens_k": cu_seq, "max_length_q": 5, "max_length_k": 5}
    same = torch.zeros(8, 8, dtype=torch.bool)
    same[:3, :3] = same[3:, 3:] = True
    given: Any
    if kind == "boolean":
        given = torch.rand(1, 1, 8, 8) > 0.3
        total = torch.where(same & given, 0.0, -torch.inf)
    elif kind == "floating":
        given = torch.randn(1, 1, 8, 8)
        total = torch.where(same, given, -torch.inf)
    else:
        seen = torch.arange(8).view(1, 1, 1, 8) != 4
        given = Pattern(-1, 0, None, seen, (1, 1, 8, 8))
        total = torch.where(same & seen, 0.0, -torch.inf).masked_fill(
            ~torch.ones(8, 8, dtype=torch.bool).tril(), -torch.inf
        )
    module = nn.Module()
    output, _ = attention_forward(module, query, key, value, given, **said)
    expected = reference.sdpa(query, key, value, total)
    torch.testing.assert_close(output.transpose(1, 2), expected)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_packed_texts_without_a_mask(is_causal: bool, window: int | None) -> None:
    """Packed sequences of encoders, and where the model has said that no mask is needed."""
    query, key, value = torch.randn(3, 2, 2, 8, 4)
    cu_seq = torch.tensor([0, 3, 8, 16], dtype=torch.int32)
    said = {"cu_seq_lens_q": cu_seq, "cu_seq_lens_k": cu_seq}
    said |= {"max_length_q": torch.tensor(8), "max_length_k": torch.tensor(8)}
    output, _ = attention_forward(
        nn.Module(), query, key, value, None, is_causal=is_causal, sliding_window=window, **said
    )
    left = -1 if window is None else window - 1
    for row, start, end in ((0, 0, 3), (0, 3, 8), (1, 0, 8)):
        q, k, v = (t[row : row + 1, :, start:end] for t in (query, key, value))
        sizes = (left, 0 if is_causal else left)
        expected = torch_attn.sdpa(q, k, v, window_size=sizes)
        assert output[row : row + 1, start:end].transpose(1, 2).equal(expected)


def test_rows_behind_the_last_text_see_nothing() -> None:
    """They see nothing, as where no weights are asked for, and there is no mask."""
    query, key, value = torch.randn(3, 1, 2, 10, 4)
    cu_seq = torch.tensor([0, 3, 8], dtype=torch.int32)
    said = {"cu_seq_lens_q": cu_seq, "cu_seq_lens_k": cu_seq, "max_length_q": 5, "max_length_k": 5}
    call = functools.partial(attention_forward, nn.Module(), query, key, value, None, **said)
    expected, _ = call(is_causal=True)
    output, weights = call(is_causal=True, output_attentions=True)
    torch.testing.assert_close(output, expected)
    assert weights is not None
    assert weights[:, :, 8:].eq(0).all()


def test_texts_told_of_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another release of transformers, say, gets a mask, which is right, and a warning."""
    masking = transformers.masking_utils
    number = torch.zeros(1, 2)
    told = masking.and_masks(
        masking.packed_sequence_mask_function(number),
        masking.remap_positions_for_packed_sequence(masking.causal_mask_function, number),
    )
    monkeypatch.setattr(masking, "packed_sequence_mask_function", lambda number: lambda *_: number)
    with pytest.warns(UserWarning, match="in an unknown way; they get a mask of L x S"):
        assert _packed(masking, build("Llama", torch.float32).config, told) is None


# --- continuous batching --------------------------------------------------------------------------


PROMPTS = (5, 23, 1, 12)


def generate(model: Any, prompts: list[list[int]], new: int = 8) -> list[list[int]]:
    """By `generate_batch`, with few tokens at once, so that prompts come in chunks."""
    results = model.generate_batch(
        inputs=prompts,
        generation_config=generation(new),
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=16, max_batch_tokens=16, page_size=4, max_memory_percent=0.5
        ),
    )
    return [result.generated_tokens for result in results.values()]


def generation(new: int) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=new, min_new_tokens=new, do_sample=False, eos_token_id=2, pad_token_id=0
    )


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_continuous_batching(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of generation one by one, with eager attention too; no mask is made."""
    eager = build(name, torch.float64)
    ours = with_attn(eager)
    prompts = texts(PROMPTS)
    expected = [
        eager.generate(torch.tensor([prompt]), generation_config=generation(8))[0, len(prompt) :]
        for prompt in prompts
    ]
    assert len({tuple(tokens.tolist()) for tokens in expected}) == len(prompts)
    seen: list[tuple[Any, Any]] = []
    varlen_attn = torch_attn.varlen_attn

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return varlen_attn(*args, **kwargs)

    monkeypatch.setattr(varlen, "varlen_attn", spy)
    before = torch_attn.calls()["transformers"]
    actual = generate(ours, prompts)
    assert torch_attn.calls()["transformers"] - before == len(seen) > 0
    assert actual == [tokens.tolist() for tokens in expected]
    assert ours.config._attn_implementation == ATTN
    assert all(kwargs.get("attn_mask") is None for _, kwargs in seen)
    windows = {(-1, 0)} if name == "Llama" else {(3, 0)} if name == "Mistral" else {(-1, 0), (3, 0)}
    assert {kwargs["window_size"] for _, kwargs in seen} == windows
    assert any(args[1].shape[0] > args[0].shape[0] for args, _ in seen)  # keys from the cache


def test_continuous_batching_with_other_names() -> None:
    """Names that transformers knows stay as they are; unknown names stay errors."""
    model = build("Llama", torch.float32)
    before = torch_attn.calls()["transformers"]
    generate(model, texts(PROMPTS), new=2)
    assert torch_attn.calls()["transformers"] == before
    transformers.AttentionInterface.register("of another program", lambda *args, **kwargs: None)
    model.set_attn_implementation("of another program")
    with pytest.raises(ValueError, match="not supported for continuous batching"):
        generate(model, texts(PROMPTS), new=2)


def test_a_model_that_computes_with_its_mask_has_one() -> None:
    """It cannot be seen from how it asks for the mask of packed texts."""
    config = transformers.DogeConfig(num_hidden_layers=LAYERS, vocab_size=VOCABULARY, **SMALL)
    config._attn_implementation = ATTN
    assert transformers.DogeModel.config_class is type(config)
    mask = transformers.masking_utils.create_causal_mask(
        config,
        torch.empty(1, 9, 0),
        None,
        None,
        position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]),
        allow_is_causal_skip=False,
    )
    assert isinstance(mask, Tensor)
