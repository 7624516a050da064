"""The CUDA kernels, the sources as they are, on the CPU: over tests/stand_in in place of CUDA."""

from __future__ import annotations

import itertools
import os
import platform
import re
import sys
from pathlib import Path

import pytest
import torch

import torch_attn
from _variants import ROOT, build_stand_in, run_fuzz, run_python, run_tests
from helpers import DTYPES

sys.path.insert(0, str(ROOT / "benchmarks"))
import decode_model

# Tests of other files. Left out are tests that run no kernels, that take long with fibers, or whose
# mask is expanded before the kernels see it. Where weights have no kernels, sdpa finds too many
# leading dimensions in a call of sdpa_with_weights, and names itself.
TESTS = [
    f"tests/test_{name}.py"
    for name in (
        *("forward", "backward", "nan", "dropout"),
        *("derivatives", "hidden_tiles", "validate", "options", "options_promises", "quantized"),
        *("stats", "stats_hidden", "stats_subsystems"),
    )
]
# On a GPU of 9.0, Hopper's kernels compute the forward and the gradients. With ATTN_INVARIANT they
# also compute those of few rows and of pages.
ON_HOPPER = [
    f"tests/test_{name}.py"
    for name in (
        *("forward", "backward", "nan", "options", "options_promises", "paged", "varlen"),
        *("invariance", "quantized"),
    )
]
LEFT_OUT = [
    "test_validate and (operator or gradient or (leading and with_weights))",
    "test_stats and (long_sequence or beyond)",
    "fewer_than_two_dimensions or third_order or weigh_alike or memory or many_sequences",
]

# The fibers switch stacks with a few instructions of x86.
pytestmark = [
    pytest.mark.slow("csrc", "tests/stand_in", "tests/fuzz", *TESTS, *ON_HOPPER),
    pytest.mark.skipif(
        platform.machine() != "x86_64", reason="not run: the stand-in is written for x86_64"
    ),
]


@pytest.fixture(scope="module")
def library() -> Path:
    return build_stand_in("cuda")


def environment(library: Path, seed: int, capability: int = 80) -> dict[str, str]:
    """For a process whose calls on the CPU run the CUDA kernels, threads in this random order.

    They run as on a GPU of this compute capability (80 is 8.0). New memory holds large numbers, so
    that no result is right by chance if memory is not written.
    """
    return {
        "MALLOC_PERTURB_": "128",  # glibc fills memory with its complement, 0x7f
        "ATTN_LIBRARY": str(library),
        "ATTN_STAND_IN_SEED": str(seed),
        "ATTN_STAND_IN_CAPABILITY": str(capability),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }


def test_kernels(library: Path) -> None:
    some = ["--tiers", "quick", "-k", f"not ({' or '.join(LEFT_OUT)})"]  # the rest is fuzzed
    run_tests(*some, *TESTS, at_least=380, **environment(library, seed=1))


def test_kernels_of_hopper(library: Path) -> None:
    # Two tests are about calls that are not invariant.
    left_out = [*LEFT_OUT, "test_bits_differ_without_invariant or test_all_threads"]
    some = ["--tiers", "quick", "-k", f"not ({' or '.join(left_out)})"]
    options = {**environment(library, seed=1, capability=90), "ATTN_INVARIANT": "1"}
    run_tests(*some, *ON_HOPPER, at_least=250, **options)


@pytest.mark.parametrize("seed", [2, 3])
def test_forward_in_another_order_of_threads(library: Path, seed: int) -> None:
    some = ["-k", "mixed_layouts or expanded or many_dimensions"]
    run_tests("tests/test_forward.py", *some, at_least=50, **environment(library, seed))


@pytest.mark.parametrize("capability", [80, 90])
def test_random_problems(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_STAND_IN_CAPABILITY", str(capability))
    run_fuzz("cuda", 400)


# (dtype, sizes of a head, options) and the kernels of its forward on GPUs of 8.0, 9.0 and 10.0.
CALLS = {
    "64": "L=100",
    "128, causal": "L=100, D=128, is_causal=True",
    "256": "L=100, D=256",
    "padded to 128": "L=100, D=72, V=104",
    "float16": "L=100, dtype=torch.float16",
    "float32": "L=100, dtype=torch.float32",
    "float64": "L=100, dtype=torch.float64",
    "head_dim beyond 256": "L=100, D=264",
    "one row": "L=1",
    "16 rows": "L=2, heads=8, key_heads=1, enable_gqa=True",
    "17 rows": "L=17",
    "one row, float32": "L=1, dtype=torch.float32",
    "one row, mask": "L=1, S=64, attn_mask=torch.zeros(1, 64).bfloat16()",
    "one row, cap": "L=1, S=64, softcap=20.0",
    "one row, dropout": "L=1, S=64, dropout_p=0.5",
    "one row, many keys": "L=1, S=9000",
    "few rows": "L=64",
    "few rows, grouped": "L=64, heads=4, key_heads=1, enable_gqa=True",
    "many keys": "L=100, S=3000",
    "window": "L=100, is_causal=True, window_size=(20, 0)",
    "sinks": "L=100, sinks=torch.zeros(2)",
    "rows that are not aligned": "L=100, D=68",
    "boolean mask": "L=100, attn_mask=torch.ones(100, 100).tril().bool()",
    "mask": "L=100, attn_mask=torch.zeros(100, 100).bfloat16()",
    "mask, learned": "L=100, attn_mask=torch.zeros(1, 2, 100, 100).bfloat16().requires_grad_()",
    "one mask, learned": "L=100, attn_mask=torch.zeros(100, 100).bfloat16().requires_grad_()",
    "mask of keys, learned": "L=100, attn_mask=torch.zeros(1, 100).bfloat16().requires_grad_()",
    "mask of one row, learned": (
        "L=1, S=64, heads=128, key_heads=1, enable_gqa=True, "
        "attn_mask=torch.zeros(1, 128, 1, 64).bfloat16().requires_grad_()"
    ),
    "large cap and mask": "L=100, softcap=80.0, attn_mask=torch.ones(100, 100).bool()",
    "ALiBi and mask": "L=100, alibi_slopes=torch.ones(2), attn_mask=torch.ones(100, 100).bool()",
    "float32 mask": "L=100, attn_mask=torch.zeros(100, 100)",
    "256, mask": "L=100, D=256, attn_mask=torch.ones(100, 100).bool()",
    "mask and dropout": "L=100, dropout_p=0.5, attn_mask=torch.ones(100, 100).bool()",
    "cap": "L=100, softcap=20.0",
    "a large cap": "L=100, softcap=1e6",
    "ALiBi": "L=100, alibi_slopes=torch.ones(2)",
    "ALiBi, learned": "L=100, alibi_slopes=torch.ones(2).requires_grad_()",
    "ALiBi, a scale that is no divisor": "L=100, alibi_slopes=torch.ones(2), scale=1e-30",
    "cap and ALiBi": "L=100, softcap=20.0, alibi_slopes=torch.ones(2)",
    "cap and ALiBi, learned": "L=100, softcap=20.0, alibi_slopes=torch.ones(2).requires_grad_()",
    "cap and mask": "L=100, softcap=20.0, attn_mask=torch.ones(100, 100).bool()",
    "dropout": "L=100, dropout_p=0.5",
    "dropout, padded": "L=100, D=72, V=104, dropout_p=0.5",
    "dropout, 256": "L=100, D=256, dropout_p=0.5",
    "dropout and cap": "L=100, dropout_p=0.5, softcap=20.0",
    "dropout, invariant": "L=100, dropout_p=0.5, invariant=True",
    "negative scale": "L=100, scale=-0.1",
    "invariant": "L=100, invariant=True",
    "invariant, one row": "L=1, invariant=True",
    "invariant, many keys": "L=100, S=3000, invariant=True",
    "invariant, cap": "L=100, softcap=20.0, invariant=True",
    "invariant, ALiBi": "L=100, alibi_slopes=torch.ones(2), invariant=True",
    "invariant, mask": "L=100, attn_mask=torch.ones(100, 100).bool(), invariant=True",
    "invariant, float32": "L=100, dtype=torch.float32, invariant=True",
    "pages": "L=100, paged=True",
    "one row, pages": "L=1, S=100, paged=True",
    "pages, rows that are not aligned": "L=100, D=68, paged=True",
    "one row, pages, rows that are not aligned": "L=1, S=100, D=68, paged=True",
    "pages, rows that are not aligned, invariant": "L=100, D=68, paged=True, invariant=True",
    "pages, invariant": "L=100, paged=True, invariant=True",
    "pages, cap": "L=100, paged=True, softcap=20.0",
    "latent": "L=100, D=576, V=512, latent=True",
    "latent, one row": "L=1, heads=16, key_heads=1, enable_gqa=True, D=576, V=512, latent=True",
    "latent, many keys": "L=100, S=3000, D=576, V=512, latent=True",
    "latent, pages": "L=100, D=576, V=512, paged=True, latent=True",
    "latent, causal, odd sizes": "L=100, D=264, V=200, is_causal=True, latent=True",
    "latent, a copy of the values": "L=100, D=576, V=512",
    "latent, values of one head": "L=100, D=576, V=512, latent=True, one_head=True",
    "latent, query not aligned": "L=100, D=576, V=512, latent=True, beside=4",
    "latent, gradients": "L=100, D=576, V=512, latent=True, trains=True",
    "latent, mask": "L=100, D=576, V=512, latent=True, attn_mask=torch.ones(100, 100).bool()",
    "latent, invariant": "L=100, D=576, V=512, latent=True, invariant=True",
    "latent, 8 bits": "L=100, D=576, V=512, latent=True, eight=torch.int8",
    "latent, float32": "L=100, D=576, V=512, latent=True, dtype=torch.float32",
    "8 bits": "L=100, eight=torch.int8",
    "8 bits, one row": "L=1, S=64, eight=torch.float8_e4m3fn",
    "8 bits, one row, invariant": "L=1, S=64, eight=torch.int8, invariant=True",
    "8 bits, float32": "L=1, S=64, dtype=torch.float32, eight=torch.int8",
    "8 bits, rows that are not aligned": "L=1, S=64, D=72, eight=torch.int8",
    "8 bits, pages": "L=1, S=100, paged=True, eight=torch.int8",
}
SIMT, MMA, DECODE = "ForwardSimt", "ForwardMma", "DecodeMma"
ON_80 = {
    **dict.fromkeys((name for name in CALLS if name.startswith("latent")), SIMT),
    "float32": SIMT, "float64": SIMT, "head_dim beyond 256": SIMT, "float32 mask": SIMT,
    "invariant, float32": SIMT, "one row, float32": SIMT, "one row": DECODE, "16 rows": DECODE,
    "one row, mask": DECODE, "one row, cap": DECODE, "one row, many keys": DECODE,
    "one row, pages": DECODE, "8 bits, one row": DECODE, "8 bits, pages": DECODE,
    "pages, rows that are not aligned, invariant": SIMT,
    "8 bits, float32": SIMT, "8 bits, rows that are not aligned": SIMT,
}  # fmt: skip
NOT_ON_WGMMA = {
    *ON_80, "17 rows", "one row, dropout", "few rows", "256, mask", "mask and dropout",
    "dropout, 256", "dropout and cap", "dropout, invariant", "negative scale", "invariant, mask",
    "pages, rows that are not aligned",
    "one row, pages, rows that are not aligned", "8 bits", "8 bits, one row, invariant",
    "ALiBi, learned", "ALiBi, a scale that is no divisor", "cap and ALiBi, learned",
    "invariant, ALiBi",
}  # fmt: skip
MERGED = {"many keys", "latent, many keys"}
LATENT = {
    *("latent", "latent, one row", "latent, many keys", "latent, pages"),
    "latent, causal, odd sizes",
}
PRINT_KERNELS = """
import contextlib, sys, torch, torch_attn

def call(L, S=0, D=64, V=0, heads=2, key_heads=2, dtype=torch.bfloat16, invariant=False,
         paged=False, eight=None, latent=False, one_head=False, trains=False, beside=0,
         backward=False, **options):
    S, V = S or L, V or D
    query = torch.randn(1, heads, L, D + beside, dtype=dtype)[..., :D].requires_grad_(trains)
    key, value = (torch.randn(1, key_heads, S, n, dtype=dtype) for n in (D, V))
    pool = torch.randn(2, 8, 16, key_heads, D, dtype=dtype)
    if eight:
        stored = [torch_attn.quantize_kv(x, eight) for x in (pool if paged else (key, value))]
        pool = key, value = [numbers for numbers, _ in stored]
        options |= {"key_scale": stored[0][1], "value_scale": stored[1][1]}
    if latent:
        value, pool = key[..., :V], (pool[0], pool[0][..., :V])
        if one_head:
            value = value[:, :1].expand(value.shape)
    with torch_attn.invariant() if invariant else contextlib.nullcontext():
        if backward:
            inputs = [x.requires_grad_() for x in (query, key, value)]
            return torch_attn.sdpa(*inputs, **options).sum().backward()
        if not paged:
            return torch_attn.sdpa(query, key, value, **options)
        table, length = torch.arange(8, dtype=torch.int32)[None], torch.tensor([S])
        return torch_attn.varlen_attn(query[0].movedim(0, 1), *pool, torch.tensor([0, L]), None,
                                      L, S, seqused_k=length, block_table=table, **options)

for text in sys.argv[1:]:
    print("call", text, flush=True)
    eval(f"call({text})")
"""


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_which_kernel_a_call_takes(library: Path, capability: int) -> None:
    options = {**environment(library, 1, capability), "ATTN_STAND_IN_LAUNCHES": "1"}
    printed = run_python("-c", PRINT_KERNELS, *CALLS.values(), **options)
    found = dict(zip(CALLS, printed.split("call ")[1:], strict=True))
    for name, launches in found.items():
        expected = ON_80.get(name, MMA)
        if capability == 90 and name not in NOT_ON_WGMMA:
            expected = "ForwardWgmma"
        if name in LATENT:
            expected = "LatentWgmma" if capability == 90 else "LatentMma"
        kernels = set(re.findall(r"attn::cuda::((?:Forward|Decode|Latent)\w+)<", launches))
        assert kernels == {expected}, f"{name}: {launches}"
        assert ("merge_splits" in launches) == (name in MERGED), f"{name}: {launches}"


GRADIENTS_ON_WGMMA = {
    *("64", "128, causal", "padded to 128", "float16", "many keys", "window", "sinks"),
    *("rows that are not aligned", "invariant", "invariant, many keys", "invariant, one row"),
    *("few rows, grouped", "cap", "a large cap", "ALiBi", "ALiBi, learned", "cap and ALiBi"),
    *("invariant, cap", "invariant, ALiBi", "boolean mask", "mask", "cap and mask"),
    *(
        "dropout",
        "dropout, padded",
        "ALiBi and mask",
        "mask, learned",
        "one mask, learned",
        "mask of keys, learned",
        "mask of one row, learned",
    ),
}
GRADIENTS_ON_MMA = {
    *("256", "17 rows", "few rows", "one row", "negative scale", "invariant, mask"),
    *("mask and dropout", "dropout, 256", "dropout and cap", "dropout, invariant"),
    *("cap and ALiBi, learned", "ALiBi, a scale that is no divisor", "large cap and mask"),
    "256, mask",
}
GRADIENTS_ON_SIMT = {"float32", "float64", "head_dim beyond 256", "float32 mask"}


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_which_kernels_gradients_take(library: Path, capability: int) -> None:
    names = [*GRADIENTS_ON_WGMMA, *GRADIENTS_ON_MMA, *GRADIENTS_ON_SIMT]
    options = {**environment(library, 1, capability), "ATTN_STAND_IN_LAUNCHES": "1"}
    calls = [f"{CALLS[name]}, backward=True" for name in names]
    printed = run_python("-c", PRINT_KERNELS, *calls, **options)
    for name, launches in zip(names, printed.split("call ")[1:], strict=True):
        kernels = set(re.findall(r"attn::cuda::((?:Backward|Grad)\w+)<", launches))
        if name in GRADIENTS_ON_SIMT:
            expected = {"GradientSimt"}
        elif capability == 90 and name in GRADIENTS_ON_WGMMA:
            expected = {"GradQueryWgmma", "GradKeyWgmma"}
            if name in ("mask, learned", "one mask, learned", "mask of one row, learned"):
                expected.add("BackwardMma")  # of the mask
        else:
            expected = {"BackwardMma"}
        if name == "mask of keys, learned":  # a gradient that is summed over rows
            expected.add("GradientSimt")
        assert kernels == expected, f"{name}: {launches}"


# (query heads, key heads, keys, bits of a key)
DECODED = [
    *[(2, 2, 200, 16), (2, 2, 3000, 16), (8, 1, 9000, 16), (6, 2, 700, 16), (40, 20, 600, 16)],
    *[(40, 40, 3000, 16), (8, 1, 9000, 8), (2, 2, 3000, 8), (40, 20, 1500, 8)],
]


def test_splits_of_decoding(library: Path) -> None:
    """As many blocks as benchmarks/decode_model.py counts: the busiest of 8 has fewest keys."""
    text = "L=1, heads={}, key_heads={}, S={}, enable_gqa=True, eight={} == 8 and torch.int8"
    options = {**environment(library, 1), "ATTN_STAND_IN_LAUNCHES": "1"}
    printed = run_python("-c", PRINT_KERNELS, *(text.format(*x) for x in DECODED), **options)
    found = [int(n) for n in re.findall(r"launch of (\d+) blocks: .*DecodeMma", printed)]
    assert found == [
        key_heads * decode_model.splits_of(key_heads, heads // key_heads, keys, 8, bits)
        for heads, key_heads, keys, bits in DECODED
    ]


# (heads, queries, keys) and the number of splits that fill one wave of 4 x 8 blocks.
FEW_ROWS = {
    (2, 20, 400): 1,
    (2, 20, 3000): 10,
    (3, 64, 3000): 10,
    (9, 33, 2000): 3,
    (20, 17, 1500): 1,
}


@pytest.mark.parametrize("capability", [80, 90])
def test_splits_of_17_to_64_rows(library: Path, capability: int) -> None:
    """There are never more blocks than run at a time, and a second kernel merges splits."""
    options = {**environment(library, 1, capability), "ATTN_STAND_IN_LAUNCHES": "1"}
    calls = [f"L={L}, heads={heads}, key_heads={heads}, S={S}" for heads, L, S in FEW_ROWS]
    printed = run_python("-c", PRINT_KERNELS, *calls, **options)
    found = [int(n) for n in re.findall(r"launch of (\d+) blocks: .*ForwardMma", printed)]
    assert found == [heads * splits for (heads, *_), splits in FEW_ROWS.items()]
    assert printed.count("merge_splits") == sum(splits > 1 for splits in FEW_ROWS.values())


RNG_STATE = (2**63 - 12345, 2**31 + 5, 7)


def weights_kept(dtype: torch.dtype, keys: int) -> torch.Tensor:
    """What a call with `RNG_STATE` keeps. Scores are 0, so that only dropped weights are."""
    query = torch.zeros(2, 6, 70, 24, dtype=dtype)
    key = torch.zeros(2, 3, keys, 24, dtype=dtype)
    value = torch.eye(keys, dtype=dtype).expand(2, 2, keys, keys)
    drawn = {"dropout_p": 0.4, "is_causal": True, "rng_state": torch.tensor(RNG_STATE)}
    kept, _, rng_state, *_ = torch.ops.attn._sdpa_forward(
        query, key, value, enable_gqa=True, **drawn
    )
    assert rng_state.tolist() == list(RNG_STATE)
    return kept != 0


SAVE_KEPT = """
import sys, torch, test_cuda_stand_in as tests
assert torch.ops.attn._cpu_capability() == "cuda"
torch.save([tests.weights_kept(*problem) for problem in tests.PROBLEMS], sys.argv[1])
"""
# With 128 keys, and so columns of value, tensor cores take numbers of 16 bits; 133 they do not.
PROBLEMS = list(itertools.product(DTYPES, (128, 133)))


@pytest.mark.parametrize("capability", [80, 90])
def test_dropout_is_that_of_the_cpu(library: Path, tmp_path: Path, capability: int) -> None:
    """Given the state of a generator, both devices drop the same weights."""
    file = tmp_path / "kept"
    run_python("-c", SAVE_KEPT, str(file), **environment(library, 1, capability))
    for problem, kept in zip(PROBLEMS, torch.load(file), strict=True):
        expected = weights_kept(*problem)
        assert 0.55 < expected.sum() / (2 * 6 * 70 * 71 / 2) < 0.65
        assert torch.equal(kept, expected), problem


def gradients_of_masked_rows() -> list[torch.Tensor]:
    """Gradients of rows that a mask of numbers hides from all keys: all weigh the same."""
    torch.manual_seed(1)
    x = [torch.randn(1, 2, 100, 32).bfloat16().requires_grad_() for _ in range(3)]
    mask = torch.zeros(100, 100).bfloat16()
    mask[3], mask[7] = torch.finfo(torch.bfloat16).min, -1e9
    grad_output = torch.zeros(1, 2, 100, 32).bfloat16()
    grad_output[..., [3, 7], :] = torch.randn(2, 32).bfloat16()
    return [*torch.autograd.grad(torch_attn.sdpa(*x, mask), x, grad_output), grad_output]


SAVE_GRADIENTS = """
import sys, torch, test_cuda_stand_in as tests
torch.save(tests.gradients_of_masked_rows(), sys.argv[1])
"""


@pytest.mark.regression
@pytest.mark.parametrize("capability", [80, 90])
def test_gradients_of_masked_rows(library: Path, tmp_path: Path, capability: int) -> None:
    """Their scores are rounded in both directions alike. Else weights would sum up to 1.6."""
    file = tmp_path / "gradients"
    run_python("-c", SAVE_GRADIENTS, str(file), **environment(library, 1, capability))
    *_, grad_value, grad_output = torch.load(file)
    expected = (grad_output.float().sum(-2, keepdim=True) / 100).expand(grad_value.shape)
    torch.testing.assert_close(grad_value.float(), expected, rtol=2e-2, atol=1e-3)


COUNT_COPIES = """
import torch, torch_attn
from torch.profiler import profile
for E, Ev, S in ((0, 8, 7), (8, 0, 7), (9, 8, 0), (8, 9, 0)):
    shapes = (2, 3, 5, E), (2, 3, S, E), (2, 3, S, Ev)
    x = [torch.ones(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    with profile() as timeline:
        output = torch_attn.sdpa(*x)
        output.backward(torch.ones_like(output))
    print({event.key: event.count for event in timeline.key_averages()}.get("aten::copy_", 0))
"""


@pytest.mark.regression
def test_nothing_is_copied_where_nothing_is(library: Path) -> None:
    """Tensors without numbers have no memory, which CUDA would be asked about.

    What tensor cores read is copied where it is not aligned; here at most the query is.
    """
    output = run_python("-c", COUNT_COPIES, **environment(library, seed=1))
    assert output.split() == ["0", "0", "1", "0"]


REPLACE = """
import torch, torch_attn
from torch.nn.functional import scaled_dot_product_attention as builtin
x = torch.randn(3, 2, 3, 5, 8)
nested = torch.nested.nested_tensor([torch.randn(n, 3, 8) for n in (5, 4)], layout=torch.jagged)
nested = nested.transpose(1, 2)
expected = builtin(*x), builtin(nested, nested, nested).values()
handle = torch_attn.replace_sdpa()
actual = builtin(*x), builtin(nested, nested, nested).values()
print(handle, *(torch.allclose(*both, atol=1e-6) for both in zip(actual, expected)))
try:
    torch_attn.sdpa(*x)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.regression
@pytest.mark.parametrize(
    ("capability", "runs", "expected"),
    [
        ("80", True, "<Replacement: on, calls=2, passed_on=0> True True\n"),
        (
            "75",
            False,
            "<Replacement: on, calls=0, passed_on=2> True True\n"
            "attn: query is on cpu, a GPU of compute capability 7.5; it must be 8.0 (Ampere) or "
            "higher\n",
        ),
    ],
)
def test_the_switch_leaves_older_gpus_to_the_builtin(
    library: Path, capability: str, runs: bool, expected: str
) -> None:
    """The kernels do not run there. Who calls them by name is told so."""
    options = {**environment(library, seed=1), "ATTN_STAND_IN_LAUNCHES": "1"}
    printed = run_python("-c", REPLACE, **options | {"ATTN_STAND_IN_CAPABILITY": capability})
    lines = printed.splitlines(keepends=True)
    others = [line for line in lines if not line.startswith("launch of ")]
    assert (len(others) < len(lines)) == runs, printed
    assert "".join(others) == expected


# What no row of a tile sees is not read: not even where a tile could have rows of two heads. Prints
# how many rows hold a NaN of the value, before and behind those that see it.
HEADS_THAT_MEET = """
import torch, torch_attn
L, S = 1000, 1000
for dtype in (torch.bfloat16, torch.float32):
    q, k, v = (torch.randn(L, heads, 64, dtype=dtype) for heads in (3, 1, 1))
    v[450:500] = torch.nan
    dense = (x.movedim(1, 0)[None] for x in (q, k, v))
    options = dict(window_size=(40, 3), enable_gqa=True)
    output = torch_attn.sdpa(*dense, **options)[0].movedim(0, 1)
    q, k, v = (torch.cat([x[:30], x]) for x in (q, k, v))
    starts = torch.tensor([0, 30, 1030])
    packed = torch_attn.varlen_attn(q, k, v, starts, starts, L, S, **options)[30:]
    for x in (output, packed):
        print(*(part.isnan().sum().item() for part in (x[:300], x[700:])))
"""


@pytest.mark.regression
def test_a_hidden_tile_between_heads_is_not_read(library: Path) -> None:
    printed = run_python("-c", HEADS_THAT_MEET, **environment(library, seed=1))
    assert printed == 4 * "0 0\n"
