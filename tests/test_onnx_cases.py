"""The cases by which onnx defines its Attention, of opsets 23 to 25, given to our operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx.backend.test.case.node.attention  # makes the cases
import pytest
import torch
from onnx import helper
from onnx.backend.test.runner import Runner
from torch import Tensor

import torch_attn

Call = dict[str, Any]


# The adapter: shapes, concatenation and positions; no arithmetic on scores.
def attention(call: Call) -> Call:
    """What ONNX's Attention gives, by its names, for its inputs and attributes."""
    query, key, value = call["Q"], call["K"], call["V"]
    if query.dim() == 3:  # [B, L, H E]
        heads = (call["q_num_heads"], call["kv_num_heads"], call["kv_num_heads"])
        query, key, value = (
            x.unflatten(-1, (n, -1)).transpose(1, 2)
            for x, n in zip((query, key, value), heads, strict=True)
        )
    L, offset, lengths = query.size(2), None, call.get("nonpad_kv_seqlen")
    if "past_key" in call:
        offset = call["past_key"].size(2)
        key = torch.cat([call["past_key"], key], 2)
        value = torch.cat([call["past_value"], value], 2)
    elif lengths is not None:
        offset = lengths - L
    unmasked: Call = {"scale": call.get("scale"), "enable_gqa": True}
    capped = unmasked | {"softcap": call.get("softcap", 0.0)}
    masked = capped | {
        "attn_mask": whole(call.get("attn_mask"), key.size(2)),
        "is_causal": bool(call.get("is_causal", 0)),
        "window_size": (call.get("left_window_size", -1), call.get("right_window_size", -1)),
        "query_offset": offset,
        "key_lengths": lengths,
    }
    output = torch_attn.sdpa(query, key, value, **masked)
    mode = call.get("qk_matmul_output_mode", 0)
    options = (unmasked, capped, masked, masked)[mode]
    _, weights, scores = torch_attn.sdpa_with_weights(query, key, value, **options)
    return {
        "Y": output if call["Q"].dim() == 4 else output.transpose(1, 2).flatten(2),
        "present_key": key,
        "present_value": value,
        "qk_matmul_output": weights if mode == 3 else scores,
    }


def whole(mask: Tensor | None, S: int) -> Tensor | None:
    """ONNX's mask may be one row; keys that it leaves out are hidden."""
    if mask is None:
        return None
    mask = mask if mask.dim() > 1 else mask[None]
    hidden = False if mask.dtype == torch.bool else -math.inf
    return torch.cat([mask, mask.new_full((*mask.shape[:-1], S - mask.size(-1)), hidden)], -1)


# The end of the adapter.
def tensor(array: np.ndarray[Any, Any]) -> Tensor:
    """Reads NumPy's types or ml_dtypes' bfloat16, which PyTorch does not know."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def similar(given: Tensor, expected: np.ndarray[Any, Any], case: Any) -> None:
    """As onnx compares, which allows two units in the last place of bfloat16 whatever the case."""
    if given.dtype == torch.bfloat16:
        array = given.contiguous().view(torch.int16).numpy().view(expected.dtype)
    else:
        array = given.numpy()
    Runner.assert_similar_outputs([expected], [array], case.rtol, case.atol)


def wrong(adapter: Callable[[Call], Call]) -> dict[str, str]:
    """The cases of which an output is another, and how."""
    made = onnx.backend.test.case.node._NodeTestCases
    # Each is there a second time, with the node written out by its formula.
    cases = [case for case in made if case.model.graph.node[0].op_type == "Attention"]
    assert len(cases) == 93
    messages = {}
    for case in cases:
        (operator,), ((inputs, outputs),) = case.model.graph.node, case.data_sets
        call = {a.name: helper.get_attribute_value(a) for a in operator.attribute}
        call |= zip(filter(None, operator.input), map(tensor, inputs), strict=True)
        given = adapter(call)
        for name, expected in zip(filter(None, operator.output), outputs, strict=True):
            try:
                similar(given[name], expected, case)
            except AssertionError as error:
                messages[f"{case.name}, {name}"] = str(error)
    return messages


def test_every_case() -> None:
    assert wrong(attention) == {}


@pytest.mark.parametrize(
    "name",
    [
        *("attn_mask", "is_causal", "nonpad_kv_seqlen", "scale", "softcap"),
        *("left_window_size", "right_window_size", "qk_matmul_output_mode"),
    ],
)
def test_cases_tell(name: str) -> None:
    """An adapter that leaves out one of the inputs and attributes is found out."""
    assert wrong(lambda call: attention({n: x for n, x in call.items() if n != name})) != {}
