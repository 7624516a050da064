"""Draws the options that the built-in lacks, for a problem that is drawn without them.

Each alone, in pairs, in threes, and all of them: as many as `HOW_MANY` says.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from .problem import (
    EIGHT,
    INPUTS,
    INTEGERS,
    LACKS,
    OF_KEY,
    OF_SCALES,
    ON_CUDA,
    OPTIONS,
    SCALES,
    SINKS,
    SLOPES,
    VALUES,
    Integers,
    Problem,
)

PLAIN = 0.4  # the share of problems without any
HOW_MANY = {1: 5, 2: 5, 3: 4, 4: 2, 5: 1, 6: 1, 7: 3}
TILE = 64
FAR = 2**61  # offsets stay below twice this


def with_options(rng: random.Random, problem: Problem, device: str) -> Problem:
    if rng.random() < PLAIN:
        return problem
    chosen = set(rng.sample(OPTIONS, weighted(rng, HOW_MANY)))
    if problem.weights:  # whose output is the only result
        chosen -= {"logsumexp"}
    changes: dict[str, Any] = {}
    if "softcap" in chosen:
        changes["softcap"] = softcap(rng)
    if "window_size" in chosen:
        changes["window"] = window(rng, problem.sizes["S"])
    # Second derivatives by slopes are squares of distances, which float32 has to hold.
    squares = "alibi_slopes" in chosen and problem.mode not in ("forward", "backward", "jvp")
    has_slopes = "alibi_slopes" in chosen
    integers = {
        n: integers_of(rng, n, problem, not squares, has_slopes) for n in INTEGERS if n in chosen
    }
    if "query_offset" in chosen and not chosen.intersection(("window_size", "alibi_slopes")):
        changes["causal"] = problem.causal or rng.random() < 0.7  # which an offset moves
    problem = dataclasses.replace(
        problem, **changes, integers=integers, spoil=rng.choice(("nan", "nan", "inf"))
    )
    for name in ("alibi_slopes", "sinks"):
        if name in chosen:
            problem = with_numbers_of_heads(rng, name, problem)
    if "logsumexp" in chosen:
        problem = with_rows(rng, problem)
    problem = with_8_bits(rng, problem, device)
    problem = with_latent(rng, problem, device)
    return problem if problem.vmap is None else with_mapped(rng, problem)


def weighted(rng: random.Random, weights: dict[Any, int]) -> Any:
    return rng.choices(list(weights), list(weights.values()))[0]


def softcap(rng: random.Random) -> float:
    """Most caps are between no effect and capping all scores; the rest are of any magnitude."""
    if rng.random() < 0.7:
        return rng.choice((0.1, 0.5, 1.0, 3.0, 20.0, 50.0))
    return rng.choice((1e-3, 1e-6, 1e-12, 1e-25, 1e3, 1e6, 1e12, 1e25, 1e40))


def window(rng: random.Random, keys: int) -> tuple[int, int]:
    def side() -> int:
        kind = weighted(rng, {"all": 25, "own": 10, "small": 25, "tile": 15, "any": 15, "more": 5,
                              "huge": 5})  # fmt: skip
        choices = {
            "all": [-1],
            "own": [0],
            "small": range(1, 9),
            "tile": [n * TILE + d for n in (1, 2, 3) for d in (-1, 0, 1)],
            "any": range(keys + 1),
            "more": [keys, keys + 1, 2 * keys + 300],
            "huge": [2**31 - 1, 2**31, FAR - 1, FAR, FAR + 1, 2 * FAR, 2**63 - 1],
        }
        return rng.choice(choices[kind])

    pair = side(), side()
    return pair if pair != (-1, -1) else (rng.randrange(keys + 1), -1)


def offset(rng: random.Random, L: int, S: int, any_size: bool, far: bool = False) -> int | str:
    """`far`: a row in four far from all its keys, by which distances are multiplied."""
    kind = weighted(rng, {"lower right": 25, "0": 5, "small": 20, "some": 25, "tile": 10,
                          "none seen": 30 if far else 7, "far": 4,
                          "farthest": 4 if any_size else 0})  # fmt: skip
    choices: dict[str, Any] = {
        "lower right": ["S - L"],
        "0": [0],
        "small": range(-5, 6),
        "some": range(-L, S + 1),  # rows at the ends see no key where there is a window
        "tile": [n * TILE + d for n in (-2, -1, 1, 2, 3) for d in (-1, 0, 1)],
        "none seen": [-L - S, S, S + 1, S + L + 1000, 10**6, -(10**6)],
        "far": [2**31, -(2**31), 2**40, -(2**40), 2**53 + 1],
        "farthest": [FAR, -FAR, FAR + 1, 2 * FAR - 1, 1 - 2 * FAR],
    }
    return rng.choice(choices[kind])


def length(rng: random.Random, S: int) -> int | str:
    kind = weighted(rng, {"any": 60, "0": 8, "1": 8, "all": 12, "tile": 12})
    choices: dict[str, Any] = {
        "any": range(S + 1),
        "0": [0],
        "1": [min(1, S)],
        "all": ["S"],
        "tile": [min(n * TILE + d, S) for n in (1, 2) for d in (-1, 0, 1)],
    }
    return rng.choice(choices[kind])


def integers_of(
    rng: random.Random, name: str, problem: Problem, any_size: bool, far: bool
) -> Integers:
    """One number, or one for each batch entry, in a shape that broadcasts."""
    dims = broadcast(rng, problem.lead_dims[:-1])
    entries = 1 if not dims else rng.randint(1, 5)
    L, S = problem.sizes["L"], problem.sizes["S"]
    numbers = tuple(
        offset(rng, L, S, any_size, far) if name == "query_offset" else length(rng, S)
        for _ in range(entries)
    )
    of_32_bits = all(isinstance(n, str) or abs(n) < 2**31 for n in numbers)
    dtype = rng.choice(("int32", "int64")) if of_32_bits else "int64"
    return Integers(dims, "" if not dims and rng.random() < 0.4 else dtype, numbers)


def broadcast(rng: random.Random, dims: tuple[str, ...]) -> tuple[str, ...]:
    """The dimensions of a tensor that broadcasts to these: fewer, or of size 1."""
    if rng.random() < 0.5:
        return dims
    return tuple("1" if rng.random() < 0.3 else d for d in dims[rng.randint(0, len(dims)) :])


def with_numbers_of_heads(rng: random.Random, name: str, problem: Problem) -> Problem:
    *batch, heads = problem.lead_dims or ("1",)
    table, often = (SLOPES, "alibi") if name == "alibi_slopes" else (SINKS, "normal")
    kind = rng.choice([*table, often, often])
    if problem.nan:  # what reaches what must be sure
        kind = "normal"
    dtypes = dict(problem.dtypes)
    if problem.dtype in ("bfloat16", "float16") and rng.random() < 0.5:
        dtypes[name] = "float32"
    layouts = dict(problem.layouts)
    if rng.random() < 0.3:
        layouts[name] = rng.randrange(2**31)
    wanted = problem.wanted
    if problem.mode != "forward" and not problem.nan and rng.random() < 0.75:
        wanted = (*wanted, name)
    nan = name if problem.nan and problem.mode == "forward" and rng.random() < 0.2 else problem.nan
    return dataclasses.replace(
        problem, dims={**problem.dims, name: (*broadcast(rng, tuple(batch)), heads)},
        values={**problem.values, name: kind}, dtypes=dtypes, layouts=layouts, wanted=wanted,
        nan=nan,
    )  # fmt: skip


def with_rows(rng: random.Random, problem: Problem) -> Problem:
    """The numbers of rows, too; derivatives start from the output, the logsumexp or both."""
    graded = weighted(rng, {("output",): 1, ("logsumexp",): 2, ("output", "logsumexp"): 7})
    values = {**problem.values, "u of rows": rng.choice([*VALUES, "normal", "normal", "normal"])}
    return dataclasses.replace(problem, rows=True, graded=graded, values=values)


def with_8_bits(rng: random.Random, problem: Problem, device: str) -> Problem:
    """Keys, values or both of 8 bits in some problems, which may have no derivatives."""
    unfit = problem.mode != "forward" or problem.nan or problem.hidden or problem.weights
    chosen = [n for n in ("key", "value") if rng.random() < 0.7]
    if unfit or not chosen or problem.dtype == "float64" or rng.random() < 0.7:
        return problem
    dims, values, layouts = dict(problem.dims), dict(problem.values), dict(problem.layouts)
    sizes = dict(problem.sizes)
    if device in ON_CUDA and rng.random() < 0.7:  # rows that tensor cores take
        chosen = ["key", "value"]
        sizes |= {n: -(-sizes[n] // 16) * 16 for n in ("E", "Ev")}
        layouts = {n: seed for n, seed in layouts.items() if n not in chosen}
    for name in chosen:
        values[name] = rng.choice([*EIGHT])
        scale = f"{name}_scale"
        dims[scale] = broadcast(rng, dims[name][:-1])
        values[scale] = rng.choice([*OF_SCALES, "normal"])
        if rng.random() < 0.3:
            layouts[scale] = rng.randrange(2**31)
    dtypes = {**problem.dtypes, **{n: "float32" for n in SCALES if n in dims}}
    return dataclasses.replace(
        problem, sizes=sizes, dims=dims, values=values, layouts=layouts, dtypes=dtypes
    )


def with_mapped(rng: random.Random, problem: Problem) -> Problem:
    """The options that have the dimension that is mapped over, of any size but 1, are, too."""
    in_dims = dict(problem.vmap or {})
    for name in (*INPUTS, *INTEGERS, *SCALES):
        if name not in LACKS or (name not in problem.dims and name not in problem.integers):
            continue
        if name in problem.integers and not problem.integers[name].dtype:
            continue  # a number of Python
        dims = problem.integers[name].dims if name in problem.integers else problem.dims[name]
        mapped = problem.has_mapped_dimension(name) and dims[0] != "1"
        # where the heads are mapped over, one is left
        rank = len(dims) + (len(problem.lead) == 1 and name not in SCALES)
        in_dims[name] = rng.randrange(rank) if mapped else None
    return dataclasses.replace(problem, vmap=in_dims)


def with_latent(rng: random.Random, problem: Problem, device: str) -> Problem:
    """Values that are the first columns of the keys in some problems, as in latent attention."""
    unfit = problem.mode != "forward" or problem.nan or problem.hidden or problem.weights
    unfit = unfit or problem.vmap is not None
    if unfit or set(problem.values.values()) & {*EIGHT} or rng.random() < 0.8:
        return problem
    sizes, layouts, dims = dict(problem.sizes), dict(problem.layouts), dict(problem.dims)
    changes: dict[str, Any] = {}
    if device in ON_CUDA and rng.random() < 0.8:  # what tensor cores take
        sizes["E"] = rng.choice((264, 320, 512, 576))
        sizes["Ev"] = rng.choice((8, 64, 200, 256, 264, 512))
        sizes |= {n: min(sizes[n], 20) for n in "LS" if rng.random() < 0.8}
        layouts = {n: seed for n, seed in layouts.items() if n not in ("query", "key")}
        dims = {n: d for n, d in dims.items() if n not in ("attn_mask", "alibi_slopes")}
        changes = {"softcap": 0.0, "dropout_p": 0.0, "dtype": rng.choice(("bfloat16", "float16"))}
    sizes["Ev"] = min(sizes["Ev"], sizes["E"])
    if problem.gqa:
        sizes["Hv"] = sizes["Hk"]
    of_key = ["Hv" if d == "Hk" else d for d in dims["key"][:-1]]
    dims["value"] = (*of_key, "Ev")
    layouts.pop("value", None)
    changed = dataclasses.replace(
        problem, sizes=sizes, dims=dims, values={**problem.values, "value": OF_KEY},
        layouts={n: seed for n, seed in layouts.items() if n in dims},
        dtypes={n: dtype for n, dtype in problem.dtypes.items() if n in dims}, **changes,
    )  # fmt: skip
    return changed if changed.lead == problem.lead else problem
