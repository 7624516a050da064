"""The doors: every way to call attention, what each takes, and what each lacks."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import varlen

import torch_attn
from contract import textbooks, ways
from contract.calls import ALL, BUILTIN, DENSE, OF_FLEX, OF_MODULE, PACKING, whole
from contract.ways import OF_CONTEXT, OF_TRANSFORMERS, Function, in_groups
from torch_attn import reference

ops = torch.ops.attn


class Door(NamedTuple):
    """A way to call attention with query, key and value, ``[1, heads, length, E]``, and options by
    the names of the schema. Results are tensors of this layout."""

    call: Function
    takes: set[str]  # of the options that the built-in lacks
    textbook: Function = reference.sdpa
    builtin: set[str] = BUILTIN  # of the built-in's options, those that its calls have
    always: Function = lambda L, S: {}  # the options that every call has
    named: Mapping[str, str] = MappingProxyType({})  # what the argument is called there
    learns: bool = True  # whether its results have gradients
    derives: bool = False  # whether they are gradients
    by_torch: bool = False  # whether PyTorch's operators, whose bits threads change, derive them
    square: bool = False  # whether there are as many keys as queries
    close: float = 1e-6
    lacks: Mapping[str, str] = MappingProxyType({})  # properties, and why
    name: str = ""


def statistics(function: Function) -> Function:
    """Lets a function of query and key be called with a value, which it ignores."""
    return in_groups(ways.statistics(function))


attention, gradient_of = ways.attention, ways.gradient_of
ROWS, WEIGHTS = textbooks.rows_of_textbook, reference.sdpa_with_weights
STATISTICS = ways.statistics(reference.sdpa_stats)
DOUBLED = ways.of_doubled(reference.sdpa)
LEARNED = ALL - {"block_table"}  # beside which there are no derivatives
OF_TORCH = {"window_size", "key_lengths", *PACKING}
NO_DROPOUT = BUILTIN - {"dropout_p"}
TOLD = {"fake_tensors_have_the_same_shapes": "processes tell each other their lengths"}
OF_NESTED = {"fake_tensors_have_the_same_shapes": "their lengths need symbolic shapes"}
OF_BIAS = {
    "memory_is_linear": "torch's bias takes memory of L x S where it is made",
    "fake_tensors_have_the_same_shapes": "torch's bias cannot be made of one",
}
OF_WEIGHTS: dict[str, Any] = {
    "textbook": WEIGHTS,
    "by_torch": True,
    "lacks": {"memory_is_linear": "its results are L x S"},
}
SEQUENCES: dict[str, Any] = {
    "always": whole,
    "builtin": {"scale"},
    "named": {"key_lengths": "seqused_k"},
}
FUNCTIONS: dict[str, Any] = {"takes": OF_FLEX, "builtin": {"is_causal"}}
STATS: dict[str, Any] = {"takes": DENSE, "textbook": STATISTICS, "builtin": NO_DROPOUT}
_DOORS: dict[str, Door] = {
    "sdpa": Door(in_groups(torch_attn.sdpa), DENSE),
    "sdpa_with_logsumexp": Door(in_groups(torch_attn.sdpa_with_logsumexp), DENSE, ROWS),
    "sdpa_with_weights": Door(in_groups(torch_attn.sdpa_with_weights), DENSE, **OF_WEIGHTS),
    "sdpa_stats": Door(statistics(torch_attn.sdpa_stats), **STATS, learns=False),
    "varlen_attn": Door(ways.packed(torch_attn.varlen_attn), ALL, **SEQUENCES),
    "varlen_attn_out": Door(
        ways.packed(ways.written_into),
        ALL,
        learns=False,
        **SEQUENCES,
        lacks={"autocast_casts": "its output is given"},
    ),
    "flex_attention": Door(
        in_groups(ways.with_function(torch_attn.flex_attention)), set(), DOUBLED, set()
    ),
    "ops.flex_attention": Door(
        in_groups(ways.of_string), textbook=ways.of_doubled(ROWS), **FUNCTIONS
    ),
    "ops.flex_attention, derivatives": Door(
        gradient_of(in_groups(ways.of_string)),
        textbook=gradient_of(DOUBLED),
        derives=True,
        **FUNCTIONS,
    ),
    "ops.sdpa": Door(in_groups(ops.sdpa), set()),
    "ops.attention": Door(attention, ALL, ROWS),
    "ops.sdpa_with_weights": Door(in_groups(ops.sdpa_with_weights), DENSE, **OF_WEIGHTS),
    "ops.sdpa_stats": Door(statistics(ops.sdpa_stats), **STATS, learns=False),
    "second derivatives": Door(
        gradient_of(attention), LEARNED, gradient_of(reference.sdpa), derives=True
    ),
    "third derivatives": Door(
        ways.third(attention),
        LEARNED,
        ways.third(reference.sdpa),
        NO_DROPOUT,
        derives=True,
        by_torch=True,
        lacks={"memory_is_linear": "they are of the formula over L x S"},
    ),
    "tangents": Door(
        ways.tangent_of(attention),
        LEARNED,
        ways.tangent_of(reference.sdpa),
        derives=True,
        lacks={"what_is_beyond_the_lengths_does_not_count": "its directions are NaN there"},
    ),
    "vmap": Door(ways.mapped, DENSE, ROWS, NO_DROPOUT),
    "autocast": Door(
        ways.with_autocast,
        DENSE,
        close=0.05,
        lacks={
            "half_types_are_rounded_once": "it rounds to bfloat16",
            "autocast_casts": "it has an autocast of its own",
        },
    ),
    "jagged": Door(ways.jagged, DENSE, ROWS, {"is_causal", "scale"}, lacks=OF_NESTED),
    "scripted": Door(ways.scripted, DENSE),
    "sdpa, causal bias": Door(
        ways.with_causal_bias(torch_attn.sdpa),
        DENSE - {"query_offset"},
        textbooks.causal(reference.sdpa),
        {"scale", "dropout_p"},
        lacks=OF_BIAS,
    ),
    "sdpa_with_weights, causal bias": Door(
        ways.with_causal_bias(torch_attn.sdpa_with_weights),
        DENSE - {"query_offset"},
        textbooks.causal(WEIGHTS),
        {"scale", "dropout_p"},
        by_torch=True,
        lacks=OF_BIAS,
    ),
    "built-in, replaced": Door(ways.replaced(in_groups(F.scaled_dot_product_attention)), set()),
    "torch's varlen_attn, replaced": Door(
        ways.packed(ways.replaced(varlen.varlen_attn)),
        OF_TORCH,
        learns=False,
        lacks={"autocast_casts": "torch does not cast either"},
        **SEQUENCES,
    ),
    **{
        f"inspect, {name}": Door(
            ways.inspected(call),
            DENSE,
            learns=False,
            **OF_WEIGHTS | {"textbook": textbooks.to_be_inspected, "builtin": NO_DROPOUT},
        )
        for name, call in (("sdpa", in_groups(torch_attn.sdpa)), ("ops.attention", attention))
    },
    "module": Door(ways.by_module(False), OF_MODULE, builtin=set()),
    **{
        name: Door(
            ways.by_module(True, dropout),
            OF_MODULE,
            **OF_WEIGHTS | {"textbook": textbooks.output_and_weights, "builtin": set()},
        )
        for name, dropout in (("module, weights", 0.0), ("module, weights after dropout", 1e-30))
    },
    "eight bits": Door(
        ways.in_eight_bits,
        DENSE - {"key_scale", "value_scale"},
        textbooks.of_eight_bits,
        NO_DROPOUT,
        learns=False,
        close=1e-5,
        lacks={
            "what_is_beyond_the_lengths_does_not_count": "quantize_kv refuses NaN",
            "fake_tensors_have_the_same_shapes": "quantize_kv looks for NaN",
        },
    ),
    "PagedCache": Door(
        ways.by_paged_cache,
        OF_FLEX - {"key_lengths"} | {"softcap", "alibi_slopes"},
        textbooks.lower_right(reference.sdpa),
        {"scale"},
        learns=False,
        lacks={"fake_tensors_have_the_same_shapes": "it reads lengths, to find pages"},
    ),
    "checkpoint": Door(ways.checkpointed, DENSE),
    "compiled": Door(ways.compiled, DENSE),
    "exported": Door(ways.exported, DENSE),
    "transformers": Door(
        ways.by_transformers, {"softcap", "sinks"}, builtin=set(), named=OF_TRANSFORMERS
    ),
    "transformers, packed": Door(
        ways.by_transformers, {*OF_TRANSFORMERS}, builtin=set(), always=whole, named=OF_TRANSFORMERS
    ),
    "diffusers": Door(ways.by_diffusers, set()),
    # Over a group of processes, which may be one.
    "context_parallel": Door(
        ways.within_context_parallel,
        OF_CONTEXT,
        builtin={"is_causal", "scale"},
        square=True,
        lacks=TOLD | {"nothing_is_too_small": "a process has two tokens or more"},
    ),
    "DTensor, statistics": Door(
        ways.sharded(statistics(torch_attn.sdpa_stats)), **STATS, learns=False, lacks=TOLD
    ),
}
for method in ("ring", "gather", "all_to_all"):
    _DOORS[f"distributed.sdpa, {method}"] = Door(
        ways.by(method, in_groups(torch_attn.distributed.sdpa)),
        DENSE,
        builtin=NO_DROPOUT,
        lacks=TOLD,
    )
    _DOORS[f"DTensor, {method}"] = Door(
        ways.by(method, ways.sharded(in_groups(ops.attention))),
        LEARNED,
        ROWS,
        NO_DROPOUT,
        lacks=TOLD,
    )
DOORS = {name: door._replace(name=name) for name, door in _DOORS.items()}
