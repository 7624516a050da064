"""Every door has every property, with some of the calls; each pair of the three occurs."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import pytest

from contract.calls import CALLS, NAMES
from contract.doors import DOORS, Door
from contract.properties import PROPERTIES, Check
from contract.wrong import WRONG
from helpers import CPU_CAPABILITIES, cpu_capability_set_to, in_fresh_process, threads_set_to

pytestmark = [
    pytest.mark.usefixtures("group"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]
BY_NAME = {check.__name__: check for check in PROPERTIES}
CALLS_OF_EACH = 2  # at least


def taken(door: Door, check: Check) -> list[str]:
    """The calls that the door takes, of those that the property is for."""
    own = door.takes | door.builtin
    always = set(door.always(8, 8))
    return [
        name
        for name, options in NAMES.items()
        if options - always <= own and not options & always
        if PROPERTIES[check](door, options | always)
    ]


def in_some_order(names: Iterable[str], *seed: str) -> list[str]:
    """The same on every machine, and another one for each seed."""
    return sorted(names, key=lambda name: zlib.crc32(" ".join((*seed, name)).encode()))


def chosen() -> dict[tuple[str, str], list[str]]:
    """Calls for each property and door: some, and so many that each call has each property, and
    each door each call, that they can have."""
    could = {(n, d): taken(DOORS[d], check) for n, check in BY_NAME.items() for d in DOORS}
    could = {pair: calls for pair, calls in could.items() if calls}
    found = {pair: in_some_order(calls, *pair)[:CALLS_OF_EACH] for pair, calls in could.items()}
    for side in (0, 1):
        done = {(pair[side], call) for pair, calls in found.items() for call in calls}
        for pair in in_some_order_of_pairs(could):
            missing = [call for call in could[pair] if (pair[side], call) not in done]
            found[pair] += missing
            done |= {(pair[side], call) for call in missing}
    return found


def in_some_order_of_pairs(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [tuple(pair.split("|")) for pair in in_some_order(map("|".join, pairs))]


CHOSEN = chosen()


PROGRAM = """PYTHONPATH=.:tests ATTN_CPU_CAPABILITY={} python -c '
from contract import doors, properties
properties.{}(doors.DOORS["{}"], "{}")'"""


def failures(door: Door, check: Check, calls: list[str]) -> dict[str, str]:
    """By the call: what is wrong, and a program that shows it. The instruction set goes round."""
    found = {}
    for n, call in enumerate(calls):
        number = n + zlib.crc32(f"{door.name} {check.__name__}".encode())
        capability = CPU_CAPABILITIES[number % len(CPU_CAPABILITIES)]
        with cpu_capability_set_to(capability), threads_set_to(1):
            try:
                check(door, call)
            except Exception as error:
                program = PROGRAM.format(capability, check.__name__, door.name, call)
                found[call] = f"{call}: {type(error).__name__}: {error}\n{program}"
    return found


@pytest.mark.each("name")
@pytest.mark.parametrize(("name", "door"), CHOSEN)
def test_contract(name: str, door: str) -> None:
    check, of = BY_NAME[name], DOORS[door]
    found = failures(of, check, CHOSEN[name, door])
    if name in of.lacks:
        assert found, "it has that: not to be listed in `lacks`"
        return
    assert not found, "\n".join(found.values())


def is_found(name: str) -> bool:
    door = WRONG[name]
    (lacking,) = door.lacks
    check = BY_NAME[lacking]
    return bool(failures(door, check, taken(door, check)[:4]))


@pytest.mark.long
@pytest.mark.each("name")
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_door_is_found(name: str) -> None:
    if "only_its_tensors_are_read" not in WRONG[name].lacks:
        assert is_found(name)
        return
    with pytest.raises(Exception, match="terminated abruptly"):
        in_fresh_process(is_found, name)


def test_nothing_is_left_out() -> None:
    """What a door is said to lack is a property, and each of the three kinds occurs."""
    lacks = {name for door in DOORS.values() for name in door.lacks}
    assert lacks <= BY_NAME.keys()
    assert (
        {name for name, _ in CHOSEN} == {name[7:].partition(",")[0] for name in WRONG} == {*BY_NAME}
    )
    assert {door for _, door in CHOSEN} == {*DOORS}
    assert {call for calls in CHOSEN.values() for call in calls} == {*CALLS}
