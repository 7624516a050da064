"""A training step of transformers' models with flex_attention, on a CPU under the switch.

    python tests/outside/transformers_flex.py [FAMILY ...]

Takes the installed transformers; no path. For each family, a small model of random weights is made
twice with the same weights: once with attn_implementation="flex_attention", which transformers
compiles by torch.compile and which the switch answers; once with "eager". Loss and the gradients of
all parameters are compared, for whole sequences, padded ones and packed ones. Calls are counted
when torch.compile traces them; what it stores on disk starts empty. The result is
results/transformers_flex.txt. `--plant output` (or `scores`) spoils torch_attn: all has to fail.
"""

from __future__ import annotations

import os
import tempfile
import time
import traceback

import _outside
import torch
import transformers

import torch_attn

SMALL = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
}
ENCODER = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {
    "vocab_size": 99,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}

# The families: the class of the model, the options of its configuration, and what it is for.
FAMILIES = {
    "Llama": ("LlamaForCausalLM", SMALL),  # grouped heads, causal
    "Mistral": ("MistralForCausalLM", SMALL | {"sliding_window": 24}),
    "Gemma2": (  # soft caps in score_mod; every second layer has a window
        "Gemma2ForCausalLM",
        SMALL | {"sliding_window": 24, "attn_logit_softcapping": 5.0},
    ),
    "Qwen3": ("Qwen3ForCausalLM", SMALL),
    "Llama4": (  # chunked attention
        "Llama4ForCausalLM",
        SMALL | {"attention_chunk_size": 32, "num_local_experts": 2, "intermediate_size_mlp": 96},
    ),
    "Bert": ("BertForMaskedLM", SMALL | ENCODER),  # no causal mask
    "T5": ("T5ForConditionalGeneration", T5),  # a learned bias in score_mod
}
LENGTH = 80


def inputs(case: str, family: str) -> dict[str, torch.Tensor]:
    """Two sequences: whole, padded at the right, or of several documents. T5 has one."""
    torch.manual_seed(1)
    tokens = torch.randint(3, 99, (2, LENGTH))
    result = {"input_ids": tokens, "labels": tokens.clone()}
    if case == "padded":
        mask = torch.ones_like(tokens)
        mask[1, 50:] = 0
        result["attention_mask"] = mask
        result["labels"][mask == 0] = -100
    if case == "packed":
        places = torch.arange(LENGTH)
        result["position_ids"] = torch.stack([places % 40, torch.where(places < 17, 0, 17)])
        result["position_ids"][1] = places - result["position_ids"][1]
    if family == "T5":  # of one sequence: transformers indexes its bias, of batch size 1, by batch
        result = {name: tensor[1:] for name, tensor in result.items()}
        result["labels"] = result["labels"][:, :64].contiguous()
    return result


def step(
    model_class: type, config: object, attention: str, case: str, family: str
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss and the gradients of one training step."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    config._attn_implementation = attention
    model = model_class(config).train()
    if family == "T5":  # the learned bias starts at small numbers; larger ones show more
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "relative_attention_bias" in name:
                    parameter.normal_()
    loss = model(**inputs(case, family), use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def compare(family: str, case: str) -> tuple[str, str]:
    """Trains a step in both ways; returns "passed", "failed" or "theirs", and why."""
    name, options = FAMILIES[family]
    model_class = getattr(transformers, name)
    config = model_class.config_class(**options)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    try:
        expected, of_eager = step(model_class, config, "eager", case, family)
        with torch_attn.replacing_flex() as handle:
            loss, gradients = step(model_class, config, "flex_attention", case, family)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        if any(frame.name == "create_block_mask" for frame in frames):
            of_torch = "torch.compile of PyTorch's create_block_mask, which is no call of ours"
            return "theirs", of_torch
        where = frames[-1]
        text = str(error).strip().split("\n")[0]
        return "failed", f"{type(error).__name__}: {text} ({where.filename}, line {where.lineno})"
    errors = {"loss": (loss - expected).abs() / expected.abs()}
    for parameter, gradient in gradients.items():
        if (gradient is None) != (of_eager[parameter] is None):
            return "failed", f"one of the two has no gradient of {parameter}"
        if gradient is not None:
            of = of_eager[parameter].norm().clamp_min(1e-6)
            errors[parameter] = (gradient - of_eager[parameter]).norm() / of
    worst = max(errors, key=lambda name: errors[name])
    text = f"{handle.calls} calls, {handle.passed_on} passed on"
    text += f"; largest error {errors[worst]:.1e}, of {worst}"
    return ("passed" if handle.calls and errors[worst] < 2e-4 else "failed"), text


def main() -> None:
    """Compares the families and writes the result."""
    parser = _outside.arguments_of(__doc__)
    parser.add_argument("families", nargs="*", default=list(FAMILIES), metavar="FAMILY")
    options = parser.parse_args()
    _outside.begin(options.plant)
    transformers.logging.set_verbosity_error()
    # Not what another build of torch_attn left there.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="transformers_flex_")
    start, table = time.time(), []
    for family in options.families:
        for case in ("whole", "padded", "packed"):
            if case == "packed" and family in ("Bert", "T5"):
                continue
            outcome, text = compare(family, case)
            table.append(f"{outcome}  {family:8} {case:7} {text}")
            print(table[-1], flush=True)
    version = transformers.__version__
    _outside.report("transformers_flex", options.plant, start, table, transformers=version)


if __name__ == "__main__":
    main()
