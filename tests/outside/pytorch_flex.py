"""PyTorch's own tests of FlexAttention, on a CPU: what they compile is answered by torch_attn.

    python tests/outside/pytorch_flex.py <pytorch>/test/inductor/test_flex_attention.py

A test compares a compiled FlexAttention with PyTorch's uncompiled one in float64 and in the dtype
of the test. Here `torch.compile` of a test compiles nothing: it turns the switch on for the call.
The rest of the test runs PyTorch's function, which is allowed to compute derivatives on a CPU. The
text of the file is changed before it runs, so that it takes the branches of CUDA on a CPU:

- device "cuda" is "cpu", and what a CPU skips or lacks (gradients, dtypes) is as on CUDA;
- lengths 1024, 2048 and 4096 are 128, 256 and 512, or as --length says; batch and heads are 2, 4;
- nothing is compiled, so the numbers of graphs that the compiler counts are not checked;
- a test that never calls FlexAttention under the switch runs again wholly under the switch.

`--plant output` (or `scores`) spoils torch_attn: tests have to fail then. `-k WORD` picks tests.
`--each N` runs at most N of the variants of a test, spread over all of them (all take hours).
`--compile BACKEND` compiles, under the switch, what the tests compile. The result is
results/pytorch_flex.txt (with the fault and the backend in its name, if there are any).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import os
import pathlib
import re
import sys
import time
import types
import unittest

import _outside
import torch
from torch.nn.attention.experimental._paged_attention import PagedAttention

import torch_attn

# Why a test fails although no result of torch_attn is wrong: the first pattern that the end of its
# traceback matches. What matches none is a difference of results, or another error.
REASONS = [
    (r"\nt\S*UnsupportedError: .*", "torch_attn refuses: {}"),
    (r"\nRuntimeError: attn::.*", "raises RuntimeError where PyTorch raises ValueError"),
    (r"FileCheck|run_and_get_code|in code\[0\]|\(code\[0\]|\bcode\[", "text of generated code"),
    (r"assertExpectedInline|assert_expected_inline|\.code\.strip", "text of a graph"),
    (r"frame_count|len\(.*graphs\)", "counts of PyTorch's compiler"),
    (r"unexpected success", "works here; PyTorch expects a failure"),
    (r"AssertionError: \w+ not raised", "expects an error of PyTorch's compiler"),
    (r'AssertionError: ".*" does not match ".*"', "expects the text of another error"),
]

# Tests of which the reason needs an explanation, by how their names start.
AT_2048 = "numbers of blocks at length 2048; passes with --length 2048"
KNOWN = {
    "test_comparison_vs_sdpa_with_learnable_bias": "rounding of gradients that are 0: float32's",
    # The tests' golden gradient of the gate is summed in the gate's bfloat16. Against gradients in
    # float64 all through, torch_attn's error is 100 times smaller than PyTorch's.
    "test_head_specific_gate": "the golden gradient is summed in bfloat16, and wrong",
    "test_mask_mod_combiners": AT_2048,
    "test_block_mask_attributes": "BlockMasks were different in torch 2.6",
    "test_block_mask_viz": AT_2048,
    "test_getitem": "BlockMasks were different in torch 2.6",
    "test_block_mask_device_change": "needs two devices",
    "test_captured_wrong_device_error_message": "needs two devices",
    "test_mixed_device_error_message": "needs two devices",
    "test_mixed_dtypes_fails": "an error that later versions of PyTorch do not raise",
    "test_compiling_create_block_mask_no_recompile": "counts of PyTorch's compiler",
    "test_no_q_info_compile_False": "PyTorch's own function fails without lists of queries",
}


def changed(text: str, length: int) -> str:
    """The file's text, with CUDA's branches on a CPU and shorter lengths; lines keep their places.

    Files of 2026 have a list of the devices with gradients; those of 2025 ask for the device.
    """
    text = text.replace("[0, 1024, 1024 + 512, S]", "[0, S // 2, S // 2 + S // 4, S]")
    text = text.replace("1023", str(length // 2 - 1))
    for number in (1024, 2048, 4096):
        text = re.sub(rf"\b{number}\b", str(number * length // 2048), text)
    text = text.replace("\nB = 4\nH = 8\n", "\nB = 2\nH = 4\n")
    text = re.sub(r"self.assertEqual\(torch._dynamo.utils.counters\[.*\)", "pass", text)
    text = re.sub(r'"cuda(:\d)?"', '"cpu"', text)
    text = text.replace(".cuda()", ".cpu()")
    text = text.replace("test_inference_only = True", "test_inference_only = False")
    text = text.replace('if device == "cpu" and dtype is torch.float16:', "if False:")
    text = text.replace('SubstringSet(["cpu", "xpu"])', 'SubstringSet(["cpu"])')
    text = re.sub(r"(\n    test_dtypes_fast = )\[.*?\]", r"\1[torch.float16]", text)
    text = re.sub(r"(dtypes_fast=)\[torch.float32\]", r"\1[torch.float16]", text)
    # Decorators that skip a test on a CPU, and classes that exist on CUDA only.
    names = "running_on_a100_only|supported_platform|skip_on_cpu|supports_learnable_bias"
    text = re.sub(rf"\n *@({names})(?=\n)", "\n", text)
    text = re.sub(r"\n *@unittest.skipIf\(TEST_ON_CUDA, .*?\)(?=\n)", "\n", text)
    text = re.sub(r"only_for=\(test_device\[0\] if HAS_GPU.*?\)", 'only_for=("cpu",)', text)
    return text.split('\nif __name__ == "__main__":')[0]


class Pages(PagedAttention):
    """PagedAttention on a CPU; it also takes the positions of v2.6.0, one row for all sequences."""

    def __init__(self, *arguments, device="cpu", **more):
        super().__init__(*arguments, device=device, **more)

    def assign(self, batch_idx, input_pos, *tensors):
        if input_pos.dim() == 1:
            input_pos = input_pos.expand(batch_idx.numel(), -1)
        super().assign(batch_idx, input_pos, *tensors)


def load(path: pathlib.Path, length: int, backend: str | None) -> types.ModuleType:
    """Runs the changed file as a module, in which torch.compile turns the switch on."""
    module = types.ModuleType("pytorch_flex_tests")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    compiled = torch.compile

    def of_tests(function=None, **options):
        if sys._getframe(1).f_globals is not module.__dict__:
            return compiled(function, **options)
        if function is None:
            return functools.partial(switched, **options)
        return switched(function, **options)

    def switched(function, *, fullgraph=False, dynamic=None, **_):
        if backend is not None:
            function = compiled(function, backend=backend, fullgraph=fullgraph, dynamic=dynamic)

        @functools.wraps(getattr(function, "func", function))
        def call(*arguments, **more):
            with torch_attn.replacing_flex():
                return function(*arguments, **more)

        return call

    module_compile = torch.nn.Module.compile

    def of_modules(self, *arguments, **options):
        if sys._getframe(1).f_globals is not module.__dict__:
            return module_compile(self, *arguments, **options)
        self._compiled_call_impl = switched(self._call_impl)
        return None

    torch.compile = of_tests
    torch.nn.Module.compile = of_modules
    exec(compile(changed(path.read_text(), length), str(path), "exec"), module.__dict__)
    module.PagedAttention = Pages
    return module


class Once(unittest.TestResult):
    """The outcome of one test: passed, failed or skipped, and why."""

    def __init__(self) -> None:
        super().__init__()
        self.outcome, self.why = "passed", ""

    def addSkip(self, test, reason):  # noqa: N802
        self.outcome, self.why = "skipped", reason

    def addFailure(self, test, error):  # noqa: N802
        self.outcome, self.why = "failed", self._exc_info_to_string(error, test)

    def addUnexpectedSuccess(self, test):  # noqa: N802
        self.outcome, self.why = "failed", "unexpected success"

    addError = addFailure  # noqa: N815

    def addSubTest(self, test, subtest, error):  # noqa: N802
        if error is not None:
            self.addFailure(test, error)


def run(test: unittest.TestCase, whole: bool) -> tuple[str, str, int, int]:
    """Runs a test; returns its outcome, the reason, and how torch_attn answered its calls."""
    result = Once()
    torch.manual_seed(0)
    with torch_attn.replacing_flex() if whole else contextlib.nullcontext():
        _, calls, passed_on = _outside.counted(test.run, result)
    return result.outcome, result.why, calls, passed_on


def reason(name: str, why: str) -> str:
    """The group of a failure: of KNOWN or REASONS, or the line that names the error."""
    for start, text in KNOWN.items():
        if name.split(".")[-1].startswith(start):
            return text
    end = "\n".join(why.strip().split("\n")[-30:])
    for pattern, text in REASONS:
        if found := re.search(pattern, end):
            return text.format(found.group().split(": ", 2)[-1].split(" (")[0][:90])
    return "other: " + last_line(why)[:90]


def last_line(why: str) -> str:
    """The line of a traceback that names the error."""
    lines = [line for line in why.split("\n") if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return lines[-1] if lines else why.strip().split("\n")[-1]


def some(tests: list, text: str, each: int) -> list:
    """At most `each` variants of every test function of the file, spread over its variants."""
    names = sorted(set(re.findall(r"def (test_\w+)", text)), key=len, reverse=True)
    variants = collections.defaultdict(list)
    for test in tests:
        of = next(name for name in names if test._testMethodName.startswith(name))
        variants[type(test), of].append(test)
    return [test for all_of in variants.values() for test in all_of[:: -(-len(all_of) // each)]]


def main() -> None:
    """Runs the tests and writes the result."""
    parser = _outside.arguments_of(__doc__, "test_flex_attention.py of PyTorch")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--compile", metavar="BACKEND")
    parser.add_argument("--each", type=int, metavar="N")
    parser.add_argument("-k", default="", metavar="WORD")
    parser.add_argument("--of", default="?", help="the version of the file, for the result")
    parser.add_argument("--name", help="for the file of the result")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    os.environ["PYTORCH_PRINT_REPRO_ON_FAILURE"] = "0"
    _outside.begin(options.plant)
    _outside.allow_derivatives_in_torch()
    module = load(options.path, options.length, options.compile)
    tests = [
        test
        for value in list(vars(module).values())
        if isinstance(value, type) and issubclass(value, unittest.TestCase)
        if value.__module__ == module.__name__
        for test in unittest.defaultTestLoader.loadTestsFromTestCase(value)
        if re.search(options.k, test.id())
    ]
    if options.each:
        tests = some(tests, options.path.read_text(), options.each)
    start = time.time()
    rows = []
    for test in tests:
        again = type(test)(test._testMethodName)
        outcome, why, calls, passed_on = run(test, whole=False)
        whole = outcome == "passed" and not calls and not passed_on
        if whole:
            outcome, why, calls, passed_on = run(again, whole=True)
        name = test.id().removeprefix(module.__name__ + ".")
        rows.append((name, outcome, why, calls, passed_on))
        if options.verbose:
            sys.stderr.write(f"{outcome:8} {calls:3} {passed_on:3} {name}\n")
            sys.stderr.write(why[-3000:] if outcome == "failed" else "")
            sys.stderr.flush()
    report(options, rows, time.time() - start)


def report(options: argparse.Namespace, rows: list, seconds: float) -> None:
    """Writes the table of outcomes, and each test that failed or did not run on torch_attn."""
    of_file = f"{options.path.name} of {options.of}, lengths of {options.length}"
    if options.each:
        of_file += f", at most {options.each} variants of each"
    lines = _outside.versions(tests=of_file, fault=options.plant or "none")
    if options.compile:
        lines.append(f"compiled by   {options.compile}")
    answered = [row for row in rows if row[3] and not row[4]]
    groups = collections.Counter()
    for name, outcome, why, calls, passed_on in rows:
        if outcome == "passed":
            if passed_on:
                groups["passed, but a call was passed on to PyTorch"] += 1
            elif calls:
                groups["passed on torch_attn"] += 1
            else:
                groups["passed, and calls no FlexAttention"] += 1
        elif outcome == "skipped":
            groups[f"skipped: {why.strip()[:70]}"] += 1
        else:
            groups[f"failed: {reason(name, why)}"] += 1
    lines += [
        f"seconds       {seconds:.0f}",
        "",
        f"{len(rows)} tests; all calls of {len(answered)} were answered by torch_attn "
        f"({sum(row[3] for row in rows)} calls; {sum(row[4] for row in rows)} passed on)",
        "",
    ]
    lines += [f"{count:5}  {group}" for group, count in groups.most_common()]
    lines += ["", "Tests that failed:"]
    for name, outcome, why, calls, passed_on in rows:
        if outcome == "failed":
            lines.append(f"  {name} ({calls} calls, {passed_on} passed on)")
            lines.append(f"      {reason(name, why)}: {last_line(why)[:150]}")
    lines += ["", "Tests that passed although a call was passed on to PyTorch:"]
    lines += [f"  {row[0]} ({row[4]})" for row in rows if row[1] == "passed" and row[4]]
    suffixes = [part for part in (options.plant, options.compile, options.name) if part]
    _outside.write("_".join(["pytorch_flex", *suffixes]), lines)


if __name__ == "__main__":
    main()
