"""The schemas, which are made of the fields of a call (csrc/operators/call.h)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

ops = torch.ops.attn

# What programs in files name: an argument may be added, with a default.
BUILTIN = "Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0., "
BUILTIN += "bool is_causal=False, *, float? scale=None, bool enable_gqa=False"
MORE = ", float softcap=0., int[2] window_size=-1, Tensor? query_offset=None, "
MORE += "Tensor? key_lengths=None"
PACKED = ", Tensor? cu_seq_q=None, Tensor? cu_seq_k=None, SymInt max_q=0, SymInt max_k=0, "
PACKED += "Tensor? block_table=None"
OF_HEADS = ", Tensor? alibi_slopes=None, Tensor? sinks=None"
SCALES = ", Tensor? key_scale=None, Tensor? value_scale=None"
WITH_ROWS = ", bool with_rows=True"
PROGRAM = ", str? score_mod=None, str? mask_mod=None"
PROGRAM += ", Tensor? row_terms=None, Tensor? key_terms=None, Tensor? distance_terms=None"
PROGRAM += ", Tensor? row_numbers=None, Tensor? key_numbers=None, Tensor? distance_numbers=None"
PROGRAM += ", Tensor? blocks=None, int[2] block_size=0, Tensor?[] tables=[None]"
ROWS = "(Tensor output, Tensor logsumexp, Tensor max_score)"
PUBLIC = {
    "sdpa": f"({BUILTIN}) -> Tensor",
    "attention": f"({BUILTIN}{MORE}{PACKED}{OF_HEADS}{SCALES}{WITH_ROWS}) -> {ROWS}",
    "flex_attention": (
        f"({BUILTIN}, int[2] window_size=-1, Tensor? query_offset=None, "
        "Tensor? key_lengths=None, Tensor? sinks=None"
        f"{PROGRAM}{WITH_ROWS}) -> {ROWS}"
    ),
    "varlen_attention": (
        "(Tensor query, Tensor key, Tensor value, Tensor? cu_seq_q, Tensor? cu_seq_k, "
        "SymInt max_q, SymInt max_k, *, Tensor? attn_mask=None, float dropout_p=0., "
        "float? scale=None, bool enable_gqa=False, float softcap=0., int[2] window_size=-1, "
        "Tensor? query_offset=None, "
        f"Tensor? seqused_k=None, Tensor? block_table=None{OF_HEADS}{SCALES}{WITH_ROWS}) -> {ROWS}"
    ),
    "sdpa_with_weights": (
        f"({BUILTIN}{MORE}{OF_HEADS}{SCALES}) -> (Tensor output, Tensor weights, Tensor scores)"
    ),
    "sdpa_stats": (
        "(Tensor query, Tensor key, Tensor? attn_mask=None, bool is_causal=False, *, float? "
        f"scale=None, bool enable_gqa=False{MORE}{OF_HEADS}) -> (Tensor largest_score, Tensor "
        "entropy, Tensor logsumexp, Tensor received_weight)"
    ),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_schema(name: str) -> None:
    assert str(getattr(ops, name).default._schema) == f"attn::{name}{PUBLIC[name]}"


def arguments(operator: Any) -> list[tuple[str, str, Any]]:
    return [(a.name, str(a.type), a.default_value) for a in operator.default._schema.arguments]


@pytest.mark.parametrize("name", ["forward", "backward", "tangent", "second", "and_weights"])
def test_private_operators_take_a_call(name: str) -> None:
    """They keep the order of public ones: no argument of a call is renamed or dropped."""
    call = arguments(ops.sdpa_with_weights if "weights" in name else ops.attention)
    own = arguments(getattr(ops, f"_sdpa_{name}"))
    assert [a for a in own if a in call] == call


def test_tangents_and_gradients_are_of_the_inputs() -> None:
    tangents = [n for n, *_ in arguments(ops._sdpa_tangent) if n.startswith("tangent_")]
    inputs = [n.removeprefix("tangent_") for n in tangents]
    names = [n for n, *_ in arguments(ops._sdpa_forward)]
    assert inputs == [n for n in names if n in inputs]
    assert {"query", "sinks"} <= {*inputs}
    for operator in (ops._sdpa_backward, ops._sdpa_second):
        assert len(operator.default._schema.returns) == len(inputs)
