"""`make mutants`: what the tests are worth. Errors are put into the sources, one at a time.

A mutant is the last commit with one line changed, drawn by a seed from the lines of csrc (a third
in cuda/) and torch_attn that an operator below applies to; not from instructions that the machine
lacks, what the stand-in for CUDA replaces, and pictures. Until one compiles, others are drawn. It
is compiled with -O1, one of csrc/cuda over the stand-in. Number 0, of none, must pass; tests with
errors of their own, and one of bits that -O3 alone makes differ, are left out."""

import argparse
import collections.abc
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE, STDOUT, check_call, check_output

from torch_attn._library import IN_PACKAGE

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "mutants"
TREE, BUILD_LOG = WORK / "tree", WORK / "build.log"
BUILT = TREE, WORK / "cuda"  # the second over the stand-in
OBJECTS = WORK / "objects", WORK / "cuda_objects"
ASIDE = TREE / "build" / "aside"  # what a mutant replaces, where git does not see it

SWAPS = [
    *((" + ", " - "), (" += ", " -= "), (" * ", " / "), (" < ", " <= "), (" > ", " >= ")),
    *((" == ", " != "), (" && ", " || "), (" and ", " or "), (" is None", " is not None")),
    *(("[0]", "[1]"), ("-1)", "-2)"), ("true", "false"), ("True", "False"), (".first", ".last")),
    *(("smaller(", "larger("), ("min(", "max("), (".keys", ".queries"), ("key_head", "value_head")),
    *(("Op::add", "Op::sub"), ("Op::mul", "Op::div"), ("from[0]", "from[1]"), ("(a,", "(b,")),
]
NEGATED = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
OPERATORS = [
    *((rf"(?<!\w){re.escape(a)}", b) for pair in SWAPS for a, b in (pair, pair[::-1])),
    *((r" [+-] 1\b", ""), (r"\b1\b(?!\.)", "2"), (r"= 0;", "= 1;")),  # off by one
    (r" \* [\w.]+(?=[;,)]|$)", ""),  # a factor is dropped
    *((r"(?<=[ (\[])-(?=[a-z])", ""), (r"\bnot |!(?=[\w(])", "")),  # a sign, a negation
    (rf"\bif (constexpr )?({NEGATED})", r"if \1(!\2)"),
    (r"\b(if|while) (?=[a-z][^(]*:$)", r"\1 not "),
    # A rewrite loses a condition or a sign, or its operands change places.
    (r" (?:&&|\|\||and|or) !?[\w.:\->\[\]]+(?:\([^()]*\))?(?=[);?]| [?&|]| and | or |:$)", ""),
    (r"\((\w[\w.\[\]]*), (\w[\w.\[\]]*)\)", r"(\2, \1)"),
    (r"g\.add\(Op::neg, ([\w.\[\]]+)\)", r"\1"),
    (r"^( +)[a-z_][\w.:<>]*\(.*\);$", r"\1;"),  # a step is missing
    (r"^( +)[a-z_][\w.]*\(.*\)$", r"\1pass"),
]
NO_CODE = re.compile(r"\s*(#|static_assert|using |template|namespace |import |from |@|\.def\()")

FLAGS = {"avx512": "avx512f", "bf16": "avx512_bf16", "amx": "amx_tile", "neon": "asimd"}
LACKS = set(FLAGS) - {k for k in FLAGS if FLAGS[k] in Path("/proc/cpuinfo").read_text().split()}
LEFT_OUT = re.compile(
    rf"csrc/cpu/\w+/\w*({'|'.join(LACKS or '-')})\.|csrc/cuda/(device\.h|shared/ptx)|torch_lacks/"
    r"|/plots/|(?<!\.cpp)(?<!\.h)(?<!\.inl)(?<!\.cu)(?<!\.cuh)(?<!\.py)$"
)

# The likeliest tests, after those with the source's name, and those that run over the stand-in.
LIKELY = ["validate", "options", "forward", "backward", "derivatives", "nan", "stats", "dropout"]
MORE = ["options_promises", "hidden_tiles", "stats_hidden", "stats_subsystems"]
STAND_IN = [f"tests/test_{name}.py" for name in LIKELY[1:] + MORE]
NO_OWN_ERRORS = [
    "-k",
    "not errors_are_found and not mutation_is_found and not race_is_found and not rounding_only",
]
EQUIVALENT = {  # survivors that change no result, and why
    "if (!(i == 0)) {": "the other threads write the same",
    "if (!(slices == p.batch * p.heads)) return {};  // no two heads share it": "changes the speed",
    "run_ranges(keys, kRowsPerRange, 1.0 * p.chunks, 0,": "changes the speed",
    "int batch_dims = 1;": "is always set",
    "found = ops._sdpa_forward(*own, **options, with_rows=True)": "what is not read is computed",
    "p.rows_per_pass = std::max(rows, round_up(p.rows(), kRowTile));": "changes the speed",
    "static constexpr bool kRoundsScores = std::is_same_v<F, S>;": "rounds float32 to float32",
    "for i, (cell, width) in enumerate(zip(row, widths, strict=False))": "rows are equally long",
}
Mutant = collections.namedtuple("Mutant", "file line old new", defaults=["", 0, "", ""])


def mutants_by_line(file: str) -> collections.abc.Iterator[list[Mutant]]:
    text = (TREE / file).read_text()
    comment = "#" if file.endswith(".py") else "//"
    strings = rf'"""(?s:.*?)"""|"(?:\\.|[^"\\\n])*"|/\*.*?\*/|{comment}.*'
    code = re.sub(strings, lambda found: re.sub(r"[^\n]", "\1", found[0]), text)
    for n, (line, plain) in enumerate(zip(text.splitlines(), code.splitlines(), strict=True), 1):
        found = [(m, new) for old, new in OPERATORS for m in re.finditer(old, plain)]
        changed = {line[: m.start()] + m.expand(new) + line[m.end() :] for m, new in found}
        if changed and not NO_CODE.match(plain):
            yield [Mutant(file, n, line, new) for new in sorted(changed)]


def changed_lines(file: str, since: str) -> set[int]:
    diff = check_output(["git", "diff", "-U0", since, "HEAD", "--", file], cwd=TREE, text=True)
    hunks = re.findall(r"^@@ .* \+(\d+)(?:,(\d+))? @@", diff, re.MULTILINE)
    return {n for at, count in hunks for n in range(int(at), int(at) + int(count or 1))}


def draw(seed: int, since: str) -> list[list[Mutant]]:
    """Draws for each number the mutants to try until one compiles."""
    pools: tuple[list[list[Mutant]], ...] = ([], [])
    listed = check_output(["git", "ls-files", "csrc", "torch_attn"], cwd=TREE, text=True)
    for file in (name for name in listed.split() if not LEFT_OUT.search(name)):
        lines = changed_lines(file, since) if since else ()
        pools["/cuda/" in file].extend(
            m for m in mutants_by_line(file) if not since or m[0].line in lines
        )
    chance = random.Random(seed)
    drawn = [[chance.choice(m) for m in chance.sample(p, min(400, len(p)))] for p in pools]
    return [[Mutant()], *(drawn[n % 3 == 0][n::40] for n in range(40))]


def build(cuda: bool) -> bool:
    """Compiles what is missing of the library, or of that over the stand-in; whether it could."""
    command = [sys.executable, "setup.py", "build_ext", "-b", BUILT[cuda], "-t", OBJECTS[cuda]]
    environment = os.environ | {"ATTN_OPTIMIZE": "-O1", "ATTN_STAND_IN": "cuda" if cuda else ""}
    with BUILD_LOG.open("w") as log:
        return subprocess.call(command, cwd=TREE, env=environment, stdout=log, stderr=log) == 0


def put_in(mutant: Mutant) -> bool:
    """Whether it compiles; what it changes is put aside."""
    path, cuda = TREE / mutant.file, "/cuda/" in mutant.file
    lines = path.read_text().splitlines()
    lines[mutant.line - 1] = mutant.new
    when, aside = path.stat().st_mtime_ns, [path]
    if not mutant.file.endswith(".py"):
        aside.append(BUILT[cuda] / "torch_attn" / IN_PACKAGE)
        deps = check_output(["ninja", "-t", "deps"], cwd=OBJECTS[cuda], text=True)
        blocks = [block for block in deps.split("\n\n") if f"/{mutant.file}\n" in f"{block}\n"]
        compiled = [Path(block.partition(":")[0]) for block in blocks]
        aside += [o for o in compiled if o.exists() and not LEFT_OUT.search(f"{o}.cpp")]
    for file in aside:
        to = ASIDE / file.relative_to(WORK)
        to.parent.mkdir(parents=True, exist_ok=True)
        file.rename(to)
    path.write_text("\n".join(lines) + "\n")
    if mutant.file.endswith(".py"):
        return subprocess.call([sys.executable, "-m", "py_compile", path]) == 0
    os.utime(path, ns=(when, when))  # ninja is to compile only what is not there
    return build(cuda)


def restore() -> None:
    for file in [path for path in ASIDE.rglob("*") if path.is_file()]:
        file.rename(WORK / file.relative_to(ASIDE))
    for directory in TREE.glob("build/*/objects"):  # of variants that tests have built
        shutil.rmtree(directory)


def first_failure(log: Path, arguments: list[str], lib: str) -> str:
    """The test that fails first, or how else pytest ends; "" if all pass."""
    pytest = "-u -m pytest -v -x -p no:cacheprovider -n auto --maxprocesses 8 --dist loadfile"
    hangs = "-o faulthandler_timeout=400 -o faulthandler_exit_on_timeout=true"
    command = [sys.executable, *f"{pytest} --no-loadscope-reorder {hangs}".split(), *arguments]
    env = os.environ | {"OMP_WAIT_POLICY": "passive", "PYTHONPATH": str(TREE), "ATTN_LIBRARY": lib}
    env["ATTN_STAND_IN_SEED"] = "1"  # the order of threads
    process = subprocess.Popen(
        command, cwd=TREE, env=env, stdout=PIPE, stderr=STDOUT, text=True, start_new_session=True
    )
    with process, log.open("w") as file:
        for line in process.stdout or ():
            file.write(line)
            if failed := re.search(r"\b(?:FAILED|ERROR) (tests/.*)", line):
                os.killpg(process.pid, 9)
                return failed[1]
    return f"exit status {process.returncode}" if process.returncode else ""


def suites(file: str) -> list[tuple[list[str], str]]:
    """What `make test` runs of a source, for one of csrc/cuda over the stand-in; which library."""
    words = (Path(file).stem.strip("_"), *LIKELY)
    files = sorted(str(path.relative_to(TREE)) for path in TREE.glob("tests/test_*.py"))
    likely = [name for name in files if name[11:].startswith(words)]
    rest = [name for name in files if name not in likely]
    cpu = [(["--tiers", "quick", *NO_OWN_ERRORS, *names], "") for names in (likely, rest)]
    library = str(BUILT[True] / "torch_attn" / IN_PACKAGE)
    stand_in = (["--tiers", "quick", "-k", "not long_sequence and not beyond", *STAND_IN], library)
    cuda = [stand_in, (["tests/test_cuda_programs.py", *NO_OWN_ERRORS], "")]
    return cuda if "/cuda/" in file else cpu if file else cpu + cuda


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--since", default="", help="a commit: only lines that have changed since")
parser.add_argument("--only", default=",".join(map(str, range(41))), help="numbers: 7,12")
parser.add_argument("--resume", action="store_true", help="leave out what the file has")
parser.add_argument("--tests", help="options of pytest in place of what `make test` runs")
parser.add_argument("--json", type=Path, default=ROOT / "out" / "mutants.json")
options = parser.parse_args()
restore()
head = check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
if not TREE.exists():
    check_call(["git", "worktree", "add", "-f", "--detach", TREE, head], cwd=ROOT)
check_call(["git", "checkout", "--quiet", "--detach", head], cwd=TREE)
drawn = draw(options.seed, options.since)
if not (build(False) and build(True)):
    sys.exit(BUILD_LOG.read_text()[-8000:])
results = json.loads(options.json.read_text()) if options.resume else {}
options.json.parent.mkdir(exist_ok=True)
for n in (n for n in options.only.split(",") if n not in results):
    for mutant in drawn[int(n)]:
        print(f"{n} {mutant.file}:{mutant.line}", f"-{mutant.old}", f"+{mutant.new}", sep="\n")
        started = time.monotonic()
        if not mutant.file or put_in(mutant):
            break
        print("  does not compile")
        restore()
    compiled = time.monotonic()
    given = [(shlex.split(options.tests), "")] if options.tests else suites(mutant.file)
    caught = next(filter(None, (first_failure(WORK / f"{n}.log", *run) for run in given)), "")
    seconds = round(compiled - started), round(time.monotonic() - compiled)
    restore()
    result = f"caught by {caught}" if caught else EQUIVALENT.get(mutant.new.strip(), "SURVIVED")
    print(f"  {result} (compiled, tested: {seconds} s)")
    results[n] = {**mutant._asdict(), "result": result, "seconds": seconds}
    options.json.write_text(json.dumps(results, indent=1))
wrong = results.pop("0", {}).get("result", "").startswith("caught")
survived = [n for n, r in results.items() if r["result"] == "SURVIVED"]
print(f"{len(results)} mutants, survived: {survived}" + ", tests fail without any" * wrong)
sys.exit(wrong or bool(survived))
