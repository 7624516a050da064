"""No option is dropped in silence: wherever a call may be made it counts, or an error names it.

A door says which arguments it takes. These have to change the results to the textbook's, with their
gradients; the door has to refuse the rest by name. So an argument that is new in the schema fails
here until it has a value, and until every door does something about it.
"""

from __future__ import annotations

import functools
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import torch_attn
from _variants import ROOT
from contract.calls import (
    ALL,
    ARGUMENTS,
    DENSE,
    OF_FLEX,
    PACKED,
    PACKING,
    WHOLE,
    E,
    H,
    L,
    S,
    beyond_builtin,
    inputs,
)
from contract.doors import DOORS, Door
from contract.properties import results
from contract.textbooks import by_sequence
from contract.ways import OF_TRANSFORMERS, Function, attention, in_groups, sharded
from torch_attn import reference

ops = torch.ops.attn
INPUTS = inputs(L, S)


def test_every_argument_has_a_value() -> None:
    """Every argument of the other operators, public and private, has a value too."""
    assert beyond_builtin(ops.attention) == ALL
    assert beyond_builtin(ops._attend_over_processes) == ALL
    assert beyond_builtin(ops.flex_attention) >= OF_FLEX
    renamed = {"seqused_k": "key_lengths"}
    assert {renamed.get(n, n) for n in beyond_builtin(ops.varlen_attention)} == ALL
    assert beyond_builtin(ops.sdpa_stats) == DENSE - {"key_scale", "value_scale"}
    assert beyond_builtin(ops._sdpa_and_weights) == {*DENSE, "mean"}
    for operator in (ops._sdpa_forward, ops._sdpa_backward, ops._sdpa_tangent, ops._sdpa_second):
        assert beyond_builtin(operator) > ALL


def refuses(door: Door, argument: str, options: dict[str, Any]) -> str | None:
    """What there is instead of an error that names an argument."""
    called = "|".join({argument, door.named.get(argument, argument)})
    try:
        door.call(*INPUTS, **options)
    except Exception as error:
        said = re.search(rf"\b({called})\b", str(error))
        return None if said else f"is refused in other words: {error}"
    return "is neither taken nor refused"


def lost(door: Door, argument: str) -> str | None:
    """How a door loses an argument."""
    value, beside, wrong = ARGUMENTS[argument]
    base = door.always(L, S) | beside
    call = base | {argument: value}
    if argument not in door.takes:
        return refuses(door, argument, door.always(L, S) | {argument: value})
    if wrong:
        return refuses(door, argument, call)
    textbook = functools.partial(by_sequence, door.textbook)
    run = functools.partial(results, learns=door.learns)
    without, expected = (run(textbook, INPUTS, options) for options in (base, call))
    pairs = ((without[n], expected[n]) for n in without)  # no gradient of the argument itself
    differences = [(a - b).abs().nan_to_num().max() for a, b in pairs]
    assert max(differences) > 10 * door.close, f"{argument} has a value that does not matter"
    try:
        found = run(door.call, INPUTS, call)
        close = {"rtol": door.close, "atol": door.close, "check_dtype": False}
        torch.testing.assert_close(found, expected, **close)
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        return f"is not what the textbook says: {type(error).__name__}, {first_line}"
    return None


def all_lost(doors: dict[str, Door]) -> dict[tuple[str, str], str]:
    found = {
        (name, argument): lost(doors[name], argument) for name in doors for argument in ARGUMENTS
    }
    return {where: how for where, how in found.items() if how is not None}


@pytest.mark.usefixtures("group")
def test_at_every_door() -> None:
    """The textbook in Python is one, too."""
    doors = DOORS | {"reference": Door(in_groups(reference.sdpa), DENSE)}
    assert all_lost(doors) == {}


def check_packing_is_all_or_nothing(call: Function) -> None:
    """Each part of it alone is an error, of which `beside` says nothing."""
    for argument in PACKING:
        with pytest.raises(RuntimeError, match=r"cu_seq_[qk]|block_table"):
            call(*INPUTS, **{argument: ARGUMENTS[argument].value})


@pytest.mark.usefixtures("group")
def test_packing_is_all_or_nothing() -> None:
    check_packing_is_all_or_nothing(attention)
    check_packing_is_all_or_nothing(sharded(in_groups(ops.attention)))


def flops(**options: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        attention(*INPUTS, **options)
    return counter.get_total_flops()


def test_flops() -> None:
    """No option counts but those that the formulas' page names."""
    taken = {n: a for n, a in ARGUMENTS.items() if not a.wrong}
    changed = {n for n, a in taken.items() if flops(**a.beside) != flops(**a.beside | {n: a.value})}
    assert changed == {"window_size"}
    assert flops(**PACKED) < flops(**WHOLE) == flops()


def test_every_option_is_documented() -> None:
    """By a line of its own, and by what it does to scores, weights or keys, also for C++."""
    page = torch_attn.sdpa.__doc__ or ""
    assert {n for n in DENSE if f"\n        {n}: " not in page} == set()
    header = (ROOT / "csrc/attn/sdpa.h").read_text()
    formulas = {page: r"p = i \+.*?Shapes:", header: r"p = i \+.*?  query "}
    for text, pattern in formulas.items():
        (found,) = re.findall(pattern, text, re.S)
        assert {n for n in DENSE if n not in found} == set()


def test_unconverted_modules() -> None:
    """Torch's module has none of what ours is made with beside its own arguments."""
    module = torch_attn.nn.MultiheadAttention
    for argument in ALL & inspect.signature(module).parameters.keys():
        made = module(H * E, H, **{argument: ARGUMENTS[argument].value})
        ((_, why),) = torch_attn.unconvert(made).skipped.items()
        assert argument in why
        assert argument in repr(made)


# --- programs and other libraries -----------------------------------------------------------------


OF_ONNX = {"softcap", "window_size", "query_offset", "key_lengths"}


def test_onnx() -> None:
    """One program, in float32, that has a call for each argument."""
    from test_onnx import export, run

    calls = {n: a.beside | {n: a.value} for n, a in ARGUMENTS.items() if n in OF_ONNX}

    def model(*x: Tensor) -> list[Tensor]:
        return [torch_attn.sdpa(*x, enable_gqa=True, **options) for options in calls.values()]

    x = tuple(t.float() for t in INPUTS)
    found = dict(zip(calls, run(export(model, x, 25), x), strict=True))
    doors = {
        n: Door(lambda *_, n=n, **__: found[n], OF_ONNX, learns=False, close=1e-4) for n in calls
    }
    assert {n: lost(door, n) for n, door in doors.items()} == dict.fromkeys(calls)
    for argument in ALL - OF_ONNX:  # one that a graph has
        value = ARGUMENTS[argument].value
        with pytest.raises(ValueError, match=f"{argument} is .*; for ONNX's Attention it must be"):
            torch_attn.onnx._attention(None, *INPUTS, **{argument: value})


def test_keywords_of_transformers() -> None:
    """Every argument that its models give their attention means something here, or nothing."""
    import transformers
    from transformers.utils.generic import TransformersKwargs

    from torch_attn.integrations._attention import _UNSUPPORTED, attention_forward

    ignored = {
        "deterministic": "ours is, with dropout too",
        "position_ids": "packed texts are told of by masks and lengths",
        "seq_idx": "of state space models",
        "num_items_in_batch": "of losses",
        "output_hidden_states": "of models",
        "output_router_logits": "of models",
    }
    known = {*inspect.signature(attention_forward).parameters, *_UNSUPPORTED, *ignored}
    known |= {*OF_TRANSFORMERS.values()}
    given = {*TransformersKwargs.__annotations__}
    call = r"^( *)(?:\S.*)?attention_interface\(\n((?:\1 .*\n)*)"  # up to a line less indented
    for file in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        text = file.read_text()
        for indent, arguments in re.findall(call, text, re.MULTILINE):
            given |= {*re.findall(rf"^{indent}    (\w+)=", arguments, re.MULTILINE)}
    assert {"s_aux", "position_bias", "sliding_window", "indices"} <= given
    assert given - known == set()
