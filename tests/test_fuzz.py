"""The harness of `make fuzz` finds what is wrong, and nothing where nothing is."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_attn
from fuzz import functions, grammar, packed, relative
from fuzz.bound import arithmetic, bounds
from fuzz.check import Failure, check, shrunk
from fuzz.drawing import MODES, draw
from fuzz.problem import OF_BUILTIN, OPTIONS
from fuzz.textbook import Textbook
from helpers import CPU_CAPABILITIES, cpu_capability_set_to, threads_set_to, to_dtype
from torch_attn._programs.rules import RULES

ROOT = Path(__file__).parents[1]
PROBLEMS = 150
# Seed and number of problems that were above their bound, which was wrong: it took the scores of a
# second derivative for exact where the forward's were rounded, and a tangent for finite that
# float16 cannot hold.
FOUND = [(2, 6793), (3, 238208)]

# Operators that are wrong in `changed`; `right` is the operator.
BEGINNING = """
import math, torch, torch_attn
right = torch_attn.sdpa
def wrong(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None,
          enable_gqa=False):
    options = {"scale": scale, "enable_gqa": enable_gqa}
"""
# The same for the options that the built-in lacks: only problems with them find it.
BEGINNING_OF_OPTIONS = """
import torch, torch_attn
right = torch_attn.sdpa_with_logsumexp
def wrong(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, softcap=0.0,
          window_size=(-1, -1), query_offset=None, key_lengths=None, alibi_slopes=None, sinks=None,
          key_scale=None, value_scale=None, **options):
    def called(**changes):
        x = {"alibi_slopes": alibi_slopes, "sinks": sinks, "softcap": softcap,
             "key_scale": key_scale, "value_scale": value_scale,
             "window_size": window_size, "query_offset": query_offset, "key_lengths": key_lengths}
        x = {**options, **x, **changes}
        return right(query, key, value, attn_mask, dropout_p, is_causal, **x)
"""
ENDING = """
    return right(query, key, value, attn_mask, dropout_p, is_causal, **options)
torch_attn.sdpa = wrong
"""
WRONG = {
    "scale": """
    scale = 1 / math.sqrt(max(query.size(-1), 1)) if scale is None else scale
    options["scale"] = scale * 1.001
""",
    "causal": """
    if is_causal and attn_mask is None:
        attn_mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool).tril(1)
        is_causal = False
""",
    "column of a mask": """
    if attn_mask is not None and attn_mask.size(-1) > 1:
        attn_mask = attn_mask.clone()
        attn_mask[..., -1] = attn_mask.dtype == torch.bool
""",
    "last key": """
    if key.size(-2) > 1 and attn_mask is None:
        key, value = key[..., :-1, :], value[..., :-1, :]
""",
    "rounded weights": """
    if dropout_p == 0 and not enable_gqa and not key.isnan().any():
        output, weights, _ = torch_attn.sdpa_with_weights(
            query, key, value, attn_mask, 0.0, is_causal, **options)
        return output + (weights.bfloat16().to(value.dtype) - weights) @ value
""",
    "gradient": """
    value = value + 1e-2 * (value - value.detach())
""",
    "second derivative": """
    value = value + 1e-2 * (value - value.detach()) ** 2
""",
    "dropped weights": """
    dropout_p = dropout_p * 0.98
""",
    "lost NaN": """
    key = torch.where(key.isnan(), 0, key)
""",
    "NaN behind a mask": """
    if key.shape[:-2] == query.shape[:-2]:
        query = query + torch.where(key.isnan(), key, 0).sum(-2, keepdim=True)
""",
    "NaN of hidden keys in the gradient of the mask": """
    if attn_mask is not None and attn_mask.requires_grad and key.isnan().any():
        attn_mask = attn_mask.clone()
        attn_mask.register_hook(lambda gradient: gradient * math.nan)
""",
    "threads": """
    if torch.get_num_threads() > 1:
        options["scale"] = (scale or 1 / math.sqrt(max(query.size(-1), 1))) * (1 + 1e-6)
""",
    "number of keys": """
    if key.size(-2) == 17:
        raise RuntimeError("17 keys")
""",
}


WRONG_OPTIONS = {
    "window": """
    before, after = window_size
    return called(window_size=(before + (before >= 0), after))
""",
    "sign of an offset": """
    return called(query_offset=None if query_offset is None else -query_offset)
""",
    "length": """
    return called(key_lengths=None)
""",
    "what lies beyond the lengths": """
    if key_lengths is not None:
        query = query + 0 * key.sum()
    return called()
""",
    "cap in the backward": """
    output, *rows = called()
    if softcap:
        uncapped = called(softcap=0.0)[0]
        output = output.detach() + uncapped - uncapped.detach()
    return output, *rows
""",
    "second derivative of the cap": """
    if softcap:
        query = query + 1e-2 * (query - query.detach()) ** 2
    return called()
""",
    "sign of a slope's gradient": """
    if alibi_slopes is not None:
        alibi_slopes = 2 * alibi_slopes.detach() - alibi_slopes
    return called()
""",
    "one scale for all keys": """
    return called(key_scale=None if key_scale is None else key_scale.mean().expand_as(key_scale))
""",
    "the scale of another value": """
    return called(value_scale=None if value_scale is None else value_scale.flip(-1))
""",
    "gradient of a sink": """
    return called(sinks=None if sinks is None else sinks.detach() + 0 * sinks)
""",
    "logsumexp without the sink": """
    output, _, max_score = called()
    return output, called(sinks=None)[1], max_score
""",
    "sign of the logsumexp's gradient": """
    output, logsumexp, max_score = called()
    return output, 2 * logsumexp.detach() - logsumexp, max_score
""",
    "largest score with the sink": """
    output, logsumexp, max_score = called()
    if sinks is not None and query.dim() > 2:
        max_score = torch.maximum(max_score, sinks.to(max_score.dtype)[..., None])
    return output, logsumexp, max_score
""",
}
# Errors of packed sequences: only problems of packed.py find them.
BEGINNING_OF_PACKED = """
import contextlib, torch, torch_attn
right = torch_attn.varlen_attn
def wrong(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options):
    def called(**changes):
        x = {"query": query, "key": key, "value": value, **options, **changes}
        return right(cu_seq_q=cu_seq_q, cu_seq_k=cu_seq_k, max_q=max_q, max_k=max_k, **x)
"""
WRONG_PACKED = {
    "offset": """
    lengths = cu_seq_q.diff()
    if options.get("query_offset") is None and cu_seq_k is not None:
        options["query_offset"] = cu_seq_k.diff() - lengths  # of all keys, not those in use
    return called()
""",
    "tokens of no sequence": """
    output, logsumexp = called()
    behind = torch.arange(len(query)) >= cu_seq_q[-1]
    return output.masked_fill(behind[:, None, None], 1), logsumexp
""",
    "what nobody may read": """
    return called(query=query + 0 * key.sum())
""",
    "order of pages": """
    table = options.get("block_table")
    if table is not None:
        options["block_table"] = torch.where(table < 0, table, len(key) - 1 - table)
    return called()
""",
    "last bit of a gradient": """
    graded = value.requires_grad
    return called(**{"value": value + 2**-8 * (value - value.detach())} if graded else {})
""",
    "gradient of sinks": """
    sinks = options.get("sinks")
    return called(**{} if sinks is None else {"sinks": sinks * 2 - sinks.detach()})
""",
    "logsumexp of one head": """
    output, logsumexp = called()
    return output, logsumexp[:1].expand_as(logsumexp)
""",
    "chunks": """
    return called()
torch_attn.invariant = contextlib.nullcontext
""",
}
ENDING_OF_OPTIONS = """
torch_attn.sdpa_with_logsumexp = wrong
torch_attn.sdpa = lambda *x, **options: wrong(*x, **options)[0]
"""


def first_failure(options: bool, problems: int = 3000, seconds: float = 10) -> Failure:
    for index in range(problems):
        problem = draw(0, index, options=options)
        failure, _ = check(problem, problem.capabilities(CPU_CAPABILITIES)[-1:])
        if failure:
            return shrunk(failure, seconds)
    raise AssertionError(f"nothing was found in {problems} problems")


@pytest.mark.parametrize("name", WRONG)
def test_wrong_operator(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found, and the printed program shows it in a process of its own."""
    wrong = BEGINNING + WRONG[name] + ENDING
    names: dict[str, Any] = {}
    with monkeypatch.context() as patch:
        patch.setattr(torch_attn, "sdpa", torch_attn.sdpa)  # is put back
        exec(wrong, names)
        assert torch_attn.sdpa is names["wrong"]
        failure = first_failure(options=False)
    program = failure.program()
    assert len(program.splitlines()) < 80, program
    run = subprocess.run(
        [sys.executable, "-c", wrong + program], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 1, program
    assert ("RuntimeError: 17 keys" if name == "number of keys" else "AssertionError") in run.stderr
    with cpu_capability_set_to(failure.capability), threads_set_to(1):
        exec(program, {})  # of the right operator it finds nothing
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_wrong_option(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = BEGINNING_OF_OPTIONS + WRONG_OPTIONS[name] + ENDING_OF_OPTIONS
    with monkeypatch.context() as patch:
        for operator in ("sdpa", "sdpa_with_logsumexp"):
            patch.setattr(torch_attn, operator, getattr(torch_attn, operator))
        exec(wrong, {})
        failure = first_failure(options=True, seconds=1)
        assert not failure.problem.is_plain
        settings = cpu_capability_set_to(failure.capability), threads_set_to(1)
        with settings[0], settings[1], pytest.raises(AssertionError):
            exec(failure.program(), {})
    with cpu_capability_set_to(failure.capability), threads_set_to(1):
        exec(failure.program(), {})
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("name", WRONG_PACKED)
def test_wrong_packing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = BEGINNING_OF_PACKED + WRONG_PACKED[name] + "\ntorch_attn.varlen_attn = wrong\n"
    with monkeypatch.context() as patch:
        for operator in ("varlen_attn", "invariant"):
            patch.setattr(torch_attn, operator, getattr(torch_attn, operator))
        exec(wrong, {})
        problems = (packed.draw(0, index) for index in range(1000))
        found = (packed.check(p, p.capabilities(CPU_CAPABILITIES)[-1:])[0] for p in problems)
        failure = packed.shrunk(next(filter(None, found)), seconds=3)
        assert not failure.raises
        settings = cpu_capability_set_to(failure.capability), threads_set_to(1)
        with settings[0], settings[1], pytest.raises(AssertionError):
            exec(failure.program(), {})
    with cpu_capability_set_to(failure.capability), threads_set_to(1):
        exec(failure.program(), {})  # of the right operator it finds nothing
    torch.set_float32_matmul_precision("highest")


def test_right_packing() -> None:
    kinds = set()
    for index in range(60):
        problem = packed.draw(0, index)
        assert problem == packed.draw(0, index)
        failure, _ = packed.check(problem, problem.capabilities(CPU_CAPABILITIES))
        assert failure is None, f"{failure.what}\n{failure.program()}"
        kinds.update(problem.kinds)
    assert kinds >= {"packed", "pages", "chunks", "backward"}


def test_every_pair_of_options_is_drawn_often() -> None:
    problems = [draw(0, index) for index in range(2000)]
    for pair in itertools.combinations((*OF_BUILTIN, *OPTIONS), 2):
        together = sum(set(pair) <= set(problem.given_options) for problem in problems)
        assert together > len(problems) / 100, pair
    assert 0.3 < sum(problem.is_plain for problem in problems) / len(problems) < 0.6


def test_right_operator() -> None:
    kinds = set()
    problems = [draw(0, index) for index in range(PROBLEMS)]
    for problem in [*problems, *(draw(*found, options=False) for found in FOUND)]:
        failure, ratios = check(problem, problem.capabilities(CPU_CAPABILITIES))
        assert failure is None, f"{failure.what}\n{failure.program()}"
        assert ratios or problem.nan or problem.hidden or 0 in problem.output_shape
        kinds.add(problem.mode)
    assert kinds == set(MODES)


def test_bound_of_the_suite() -> None:
    ratios: dict[str, float] = {}
    for index in range(3):
        problem = relative.draw_plain(0, index, "cpu")
        failure, _, found = relative.check(problem, CPU_CAPABILITIES)
        assert failure is None, failure.what
        ratios |= found
    assert ratios


def test_textbook_is_the_reference() -> None:
    """Its formulas give what autograd makes of `torch_attn.reference`, up to roundings."""
    compared = 0
    for index in range(PROBLEMS):
        drawn = draw(1, index)
        if drawn.nan or drawn.bits or drawn.hidden:
            continue
        names: dict[str, Any] = {}
        exec(drawn.program(CPU_CAPABILITIES[0], []), names)
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision("highest")
        made = drawn.make()
        made.x = {n: to_dtype(t, torch.float64) for n, t in made.x.items()}
        problem = dataclasses.replace(drawn, dtype="float64", dtypes={})
        of_results = bounds(Textbook(problem, made), arithmetic(problem, "default"))
        for name, (exact, bound) in of_results.items():
            expected = names["expected"][name]
            assert exact.shape == expected.shape
            near = (exact - expected).abs() <= bound
            assert (near | (exact == expected)).all(), drawn
            compared += 1
    assert compared > PROBLEMS


def test_a_problem_is_drawn_from_seed_and_index_alone() -> None:
    for index in range(20):
        assert draw(3, index) == draw(3, index)
        assert draw(3, index) != draw(4, index)
        first, again = draw(3, index).make(), draw(3, index).make()
        for name, tensor in first.x.items():
            if tensor is not None:
                torch.testing.assert_close(tensor, again.x[name], rtol=0, atol=0, equal_nan=True)


def run_harness(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.fuzz", "--only", "cpu", *arguments]
    environment = {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)


@pytest.mark.slow  # starts worker after worker
def test_program() -> None:
    run = run_harness("--problems", "60", "--seed", "2")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "cpu: 60 problems" in run.stdout
    assert "seed 2: no failures" in run.stdout


@pytest.mark.slow  # starts worker after worker
def test_a_process_that_dies_is_a_failure() -> None:
    run = run_harness("--problems", "10", "--seed", "2", ATTN_LIBRARY="/nowhere/libattn.so")
    assert run.returncode == 1
    assert "cpu: exit code 1" in run.stdout
    assert "seed 2: 2 failures" in run.stdout


def test_one_problem() -> None:
    run = run_harness("--seed", "2", "--problem", "5")
    assert run.returncode == 0, run.stderr
    assert "torch.manual_seed" in run.stdout


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_functions_of_the_pair() -> None:
    with cpu_capability_set_to("default"):  # and back, after those that the problems set
        for index in range(100):
            assert functions.check(1, index, CPU_CAPABILITIES) is None


def drawn(index: int) -> grammar.Grammar:
    rng = random.Random(index)
    sizes = grammar.Sizes(2, 2, 5, 7)
    captured = grammar.captures(rng, sizes, torch.float64)
    return grammar.Grammar(rng, sizes, captured, in_mask=False)


@pytest.mark.long
def test_the_grammar_writes_every_operation() -> None:
    """A new operation in the tracer's table fails here until the grammar has it."""
    assert set(grammar.WRITTEN) | set(grammar.ALIASES) == set(RULES)
    assert all(RULES[alias] is RULES[name] for alias, name in grammar.ALIASES.items())
    for name in grammar.WRITTEN:
        texts = [
            str(found)
            for index in range(40)
            for result in "feib"
            if (found := drawn(index).written(name, result, 1)) is not None
        ]
        assert texts, name
        for alias in (x for x, of in grammar.ALIASES.items() if of == name):
            assert any(f".{alias}(" in text for text in texts), alias


OPERATIONS = sorted(grammar.WRITTEN)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_a_wrong_operation_is_found() -> None:
    """Each operation of the pair in turn: a number is a little larger, a boolean the other one."""
    not_found = []
    for name in OPERATIONS:
        with pytest.MonkeyPatch.context() as patch:
            if not wrong_is_found(name, patch):
                not_found.append(name)
    assert not_found == []


def wrong_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether one of 6,000 functions sees it."""
    right, calls = RULES[name], []

    def wrong(ops: Any, *operands: Any, **named: Any) -> Any:
        found = right(ops, *operands, **named)
        calls.append(found)
        if found.type == "b":
            return RULES["logical_not"](ops, found) if name != "logical_not" else operands[0]
        return ops.operation(found.dtype, "add", found, 1 if found.type == "i" else 1e-3)

    for rule in [x for x, of in RULES.items() if of is right]:
        monkeypatch.setitem(RULES, rule, wrong)
    _, forms = grammar.WRITTEN[name]
    by_name = all(re.search(rf"\b{name}\b", form) for form in forms)
    operator = "<<|>>" if "shift" in name else "[-+*/%<>=&|^~]"
    pattern = rf"\b{name}\b" if by_name else rf"\b{name}\b|{operator}"
    for index in range(6000):
        problem = functions.Problem.draw(5, index)
        if not re.search(pattern, problem.score + problem.mask):
            continue
        calls.clear()
        try:
            found = functions.results(functions.ours, problem, torch.float64, second=False)
        except RuntimeError:  # the wrong number is outside of a table
            continue
        if not calls:
            continue
        exact = functions.results(functions.textbook, problem, torch.float64, second=False)
        near = functions.bounds(exact, None, torch.float64, problem.largest, problem.unit())
        if [*functions.differences(found, near)]:
            return True
    return False


def test_a_bound_says_nothing_where_terms_that_cancel_overflow() -> None:
    """Scores of 1e30 have second derivatives of 1e60: their sum can be 0, inf or NaN in float32."""
    exact = {n: torch.zeros(3) for n in ("output", "logsumexp", "grad query", "second query")}
    for dtype, scores, told in [
        (torch.float32, 1e30, False),
        (torch.float32, 1e22, True),
        (torch.float64, 1e30, True),
    ]:
        near = functions.bounds(exact, exact, dtype, scores, 0.0)
        assert {n: bool(x.fine.all()) for n, x in near.items()} == {
            **dict.fromkeys(exact, True),
            "second query": told,
        }
        infinite = dict.fromkeys(exact, torch.full([3], float("inf")))
        found = [what.split(":")[0] for what in functions.differences(infinite, near)]
        assert found == [*exact][: 3 + told]


def test_wrong_functions_of_the_pair_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch_attn.flex_attention

    def wrong(query: Any, key: Any, value: Any, score: Any, mask: Any, **options: Any) -> Any:
        if score:
            own = score
            score = lambda s, b, h, i, j: own(s * 1.00001, b, h, i, j)  # noqa: E731
        return right(query, key, value, score, mask, **options)

    monkeypatch.setattr(torch_attn, "flex_attention", wrong)
    with cpu_capability_set_to("default"):
        found = [functions.check(1, index, CPU_CAPABILITIES) for index in range(20)]
    known = [f"--seed 1 --problem {index} " in str(what) for index, what in enumerate(found)]
    assert sum(known) >= 8  # a function may have no score_mod, or show each query one key or none
