"""Caches of 8 bits for transformers, against a cache that stores `stored * scale` as floats."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_attn import quantize_kv
from torch_attn.integrations import transformers as integration

transformers = pytest.importorskip("transformers")
DynamicLayer = pytest.importorskip("transformers.cache_utils").DynamicLayer

EIGHT = [torch.int8, torch.float8_e4m3fn]
SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "Llama": {"num_key_value_heads": 2},
    "Qwen3": {"num_key_value_heads": 1, "head_dim": 24},
    "Granite": {},
    "Olmo2": {},
}


def model_of(family: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        **{**SMALL, **FAMILIES.get(family, {}), **more}
    )
    kind = getattr(transformers, f"{family}ForCausalLM")
    return kind._from_config(config, attn_implementation=integration.register()).eval()


def float_cache(model: Any, dtype: torch.dtype, like: Any = None) -> Any:
    """The oracle: an ordinary cache that gets what the 8 bits mean.

    With `like`, a cache of ours that has had the same tokens, it gets what that cache has stored,
    and compares: a number may lie so near the edge between two of 8 bits that rounding errors of
    the layer below decide, and then the two are one step apart.
    """

    class Layer(DynamicLayer):  # type: ignore[misc, valid-type]
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def update(self, *new: Tensor, **kwargs: Any) -> Any:
            stored = [quantize_kv(x, dtype) for x in new]
            if like is not None:
                first = self.get_seq_length()
                buffers = like.layers[self.number]._buffers
                own = [x[:, :, first : first + new[0].size(2)] for x in buffers]
                for x, (_, scale), eight, of_ours in zip(
                    new, stored, own[::2], own[1::2], strict=True
                ):
                    torch.testing.assert_close(of_ours, scale, rtol=1e-5, atol=0)
                    half_a_step = (x / of_ours[..., None] - eight.float()).abs()
                    coarse = 1.0 if dtype == torch.int8 else eight.float().abs().clamp(1 / 64) / 8
                    assert (half_a_step <= 0.5 * coarse * (1 + 1e-3)).all()
                stored = list(zip(own[::2], own[1::2], strict=True))
            return super().update(*(x.float() * scale[..., None] for x, scale in stored))

    return transformers.Cache(layers=[Layer(n) for n in range(model.config.num_hidden_layers)])


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 64, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(
    model: Any, cache: Any, ids: Tensor, chunks: list[int], mask: Tensor | None = None
) -> Tensor:
    parts = []
    for part, end in zip(ids.split(chunks, 1), itertools.accumulate(chunks), strict=True):
        seen = None if mask is None else mask[:, :end]
        parts.append(model(part, cache=cache, attention_mask=seen, use_cache=True).logits)
    return torch.cat(parts, 1)


@pytest.mark.parametrize("dtype", EIGHT)
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_chunks_and_tokens(family: str, dtype: torch.dtype) -> None:
    """Left padding, a prefill, a chunk of 5 and single tokens, beyond the first buffer's room."""
    model, ids = model_of(family), tokens(3, 130)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    chunks = [20, 5, *[1] * 105]
    cache = integration.eight_bit_cache(model, dtype)
    actual = logits(model, cache, ids, chunks, mask)
    oracle = float_cache(model, dtype, like=cache)
    exact = logits(model, oracle, ids, chunks, mask)
    seen = mask.bool()
    torch.testing.assert_close(actual[seen], exact[seen], rtol=1e-4, atol=1e-5)
    assert cache.get_seq_length() == 130
    assert {layer.keys.dtype for layer in cache.layers} == {dtype}
    whole = model(ids, attention_mask=mask).logits[seen]
    assert (actual[seen] - whole).abs().max() > 1e-4  # so the comparison can tell the two apart


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "assisted, which crops": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("way", WAYS)
def test_generate(way: str) -> None:
    model = model_of("Llama")
    ids = tokens(1 if "assisted" in way else 2, 9).repeat(1, 2)  # assisted generation finds repeats
    same = {"max_new_tokens": 40, "min_new_tokens": 40, **WAYS[way]}
    caches = integration.eight_bit_cache(model), float_cache(model, torch.int8)
    results = []
    for cache in caches:
        torch.manual_seed(3)
        results.append(model.generate(ids, cache=cache, **same))
    assert torch.equal(*results)


def test_a_step_copies_no_cache() -> None:
    """A cache of 1,000 tokens moves 4 times while 600 tokens are added."""
    model = model_of("Llama", max_position_embeddings=2000)
    cache = integration.eight_bit_cache(model)
    logits(model, cache, tokens(1, 1000), [1000])
    places = set()
    for n in range(600):
        logits(model, cache, tokens(1, 1, seed=n), [1])
        places.add(cache.layers[1].keys.data_ptr())
    assert len(places) <= 2


@pytest.mark.parametrize("dtype", EIGHT)
def test_layers_are_cropped_repeated_selected_reset_and_copied(dtype: torch.dtype) -> None:
    model, ids = model_of("Llama"), tokens(2, 30)
    ours, exact = integration.eight_bit_cache(model, dtype), float_cache(model, dtype)

    def both(f: Any) -> None:
        for cache in (ours, exact):
            for layer in cache.layers:
                f(layer)
        rows = ours.layers[0].keys.size(0)
        assert ours.get_seq_length() == exact.get_seq_length()
        a, b = (
            logits(model, copy.deepcopy(c), ids[:1].expand(rows, -1), [29, 1])
            for c in (ours, exact)
        )
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    for cache in (ours, exact):
        logits(model, cache, ids, [30])
    both(lambda layer: layer.crop(-4))
    both(lambda layer: layer.batch_repeat_interleave(2))
    both(lambda layer: layer.batch_select_indices(torch.tensor([3, 0, 1])))
    both(lambda layer: layer.reorder_cache(torch.tensor([2, 2, 0])))
    for layer in ours.layers:
        layer.reset()
    assert ours.get_seq_length() == 0
    fresh = integration.eight_bit_cache(model, dtype)
    assert torch.equal(*(logits(model, cache, ids, [30]) for cache in (ours, fresh)))


@pytest.mark.parametrize(
    ("family", "more", "message"),
    [
        ("Mistral", {"sliding_window": 8}, "MistralForCausalLM needs layers of DynamicSliding"),
        ("FalconH1", {}, "FalconH1ForCausalLM needs layers of "),
        ("DeepseekV3", {"num_key_value_heads": 4}, r"computes with cached numbers itself \(kv_lor"),
        ("XGLM", {"d_model": 64}, "XGLMForCausalLM does not declare that all of its attention"),
    ],
)
def test_layers_of_other_kinds(family: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        integration.eight_bit_cache(model_of(family, **more))


def test_errors_name_what_is_wrong() -> None:
    model, ids = model_of("Llama"), tokens(2, 5)
    with pytest.raises(ValueError, match=r"dtype is torch\.uint8; it must be torch.int8 or"):
        integration.eight_bit_cache(model, torch.uint8)
    with pytest.raises(ValueError, match="model is Linear; it must be a model of transformers"):
        integration.eight_bit_cache(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="T5Model has cross-attention"):
        integration.eight_bit_cache(transformers.T5Model(transformers.T5Config(num_layers=1)))
    other = model_of("GPTNeoX")
    with pytest.raises(ValueError, match=r"does not pass its keyword arguments to cache\.update"):
        logits(other, integration.eight_bit_cache(other), ids, [5])

    cache = integration.eight_bit_cache(model)
    logits(model, cache, ids, [5])
    with pytest.raises(
        ValueError, match=r"have shape \[1, 2, 5, 16\]; the cache has \[2, 2, 5, 16\]"
    ):
        logits(model, cache, ids[:1], [5])
    with pytest.raises(ValueError, match="x has a NaN or an infinity"):
        cache.update(*torch.full((2, 2, 2, 1, 16), torch.nan), 0, kwargs={})
    assert cache.get_seq_length() == 5
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("v_proj" in name)  # the query requires no gradient
    with pytest.raises(ValueError, match=r"gradients; call the model under torch\.no_grad"):
        model(ids, cache=integration.eight_bit_cache(model))
    with torch.no_grad(), pytest.raises(ValueError, match="asks for attention weights"):
        model(ids, cache=integration.eight_bit_cache(model), output_attentions=True)
    copied = copy.deepcopy(cache)
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        for given in (cache, copied):
            with pytest.raises(ValueError, match=f"attn_implementation is '{implementation}'"):
                logits(model, given, ids, [5])
            assert given.get_seq_length() == 5
    wide = model_of("Llama").double()
    with pytest.raises(ValueError, match=r"the model is of float64; it must be of float32"):
        logits(wide, integration.eight_bit_cache(wide), ids, [5])


def test_a_prompt_under_inference_mode() -> None:
    model, ids = model_of("Llama"), tokens(2, 12)
    ours, exact = integration.eight_bit_cache(model), float_cache(model, torch.int8)
    with torch.inference_mode():
        for cache in (ours, exact):
            model(ids[:, :9], cache=cache)
    a, b = (logits(model, cache, ids[:, 9:], [1, 2]) for cache in (ours, exact))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_a_compiled_model() -> None:
    model, ids = model_of("Llama"), tokens(2, 12)
    compiled = torch.compile(model, backend="eager")
    caches = integration.eight_bit_cache(compiled), integration.eight_bit_cache(model)
    a, b = (logits(m, c, ids, [9, 3]) for m, c in zip((compiled, model), caches, strict=True))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    torch.compiler.reset()


def test_a_model_that_changes_cached_values() -> None:
    """Its halves of values have the shape of keys, so that scales would fit them."""
    model = model_of("DiffLlama", num_key_value_heads=2)
    with pytest.raises(ValueError, match=r"DiffLlama\w* changes cached keys or values"):
        logits(model, integration.eight_bit_cache(model), tokens(1, 12), [12])
