"""The options of conftest.py that choose tests."""

from __future__ import annotations

import pytest

from _variants import run_python

# They have tests of each tier, and some that are marked regression.
FILES = ["tests/test_amx.py", "tests/test_nan.py"]
# For each of the arguments, which are options of pytest, a line with the tests that would run.
COLLECT = """
import contextlib, io, sys, pytest
for options in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert pytest.main(["--collect-only", "-q", *options.split()]) == 0
    print([line for line in said.getvalue().splitlines() if "::" in line])
"""


@pytest.mark.slow  # collects tests four times
def test_shares_have_every_case_of_rest_once_and_all_others() -> None:
    options = ["--tiers rest", *(f"--share {k}/3" for k in (42, 43, 44))]
    lines = run_python("-c", COLLECT, *(f"{o} {' '.join(FILES)}" for o in options)).splitlines()
    rest, *shares = (set(eval(line)) for line in lines)
    of_rest = [share & rest for share in shares]
    assert all(of_rest)
    assert sorted(case for cases in of_rest for case in cases) == sorted(rest)
    others = [share - rest for share in shares]
    assert {case.partition("::")[0] for case in others[0]} == set(FILES)
    assert others == 3 * others[:1]
