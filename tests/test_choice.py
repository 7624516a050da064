"""The options of `_choice.py`, which choose tests."""

from __future__ import annotations

import itertools

import pytest

from _variants import run_python

# They have tests of each tier, and some that are marked regression.
SLOW = ["tests/test_amx.py", "tests/test_choice.py"]
FILES = [*SLOW, "tests/test_nan.py"]
# For each of the arguments, which are options of pytest, a line with the tests that would run.
COLLECT = """
import contextlib, io, sys, pytest
for options in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert pytest.main(["--collect-only", "-q", *options.split()]) == 0
    print([line for line in said.getvalue().splitlines() if "::" in line])
"""

# A test of four parameters, whose ids tell them.
PRODUCT = "tests/test_forward.py::test_tasks_that_share_keys"


@pytest.mark.long
def test_every_two_parameters_meet_in_rest() -> None:
    tiers = "quick,rest", "product", "quick,rest,product"
    lines = run_python("-c", COLLECT, *(f"--tiers {t} {PRODUCT}" for t in tiers)).splitlines()
    rest, product, everything = (set(eval(line)) for line in lines)
    assert rest | product == everything
    assert product - rest == product != set()

    def meetings(cases: set[str]) -> set[tuple[str, ...]]:
        ids = [case.partition("[")[2].rstrip("]").split("-") for case in cases]
        # Kernels and dtype, which choose the code, are one parameter.
        values = [(f"{kernels} {dtype}", causal, E) for kernels, causal, E, dtype in ids]
        return {pair for case in values for pair in itertools.combinations(case, 2)}

    assert meetings(rest) == meetings(everything)


@pytest.mark.slow  # collects tests six times
def test_shares_have_slow_files_once_and_all_else_always() -> None:
    options = [
        "--tiers quick,rest,product",
        "--tiers slow",
        "-m regression",
        *(f"--share {k}/2" for k in (42, 43)),
    ]
    lines = run_python("-c", COLLECT, *(f"{o} {' '.join(FILES)}" for o in options)).splitlines()
    fast, slow, regressions, *shares = (set(eval(line)) for line in lines)
    assert set.intersection(*shares) == fast | regressions
    assert set.union(*shares) == fast | slow
    files = [{case.partition("::")[0] for case in share & slow - regressions} for share in shares]
    assert sorted(file for names in files for file in names) == sorted(SLOW)
