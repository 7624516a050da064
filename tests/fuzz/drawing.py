"""Draws a random problem, from a seed and an index alone."""

from __future__ import annotations

import dataclasses
import math
import random

from .options import weighted, with_options
from .problem import DTYPES, NAMES, Problem

# Around the edges of the kernels' tiles, vectors and blocks, and usual sizes of heads.
EDGES = [
    *(15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 80, 96),
    *(127, 128, 129, 192, 193, 255, 256, 257, 300),
]
MODES = {"forward": 66, "backward": 22, "jvp": 3, "second": 3, "over_forward": 3, "over_reverse": 3}
# The cost of a problem, in multiplications, that one in twenty exceeds by a factor of ten.
COSTS = {"cpu": 500_000, "cuda": 50_000, "gpu": 5_000_000, "amx": 200_000}


def size(rng: random.Random) -> int:
    r = rng.random()
    if r < 0.015:
        return 0
    if r < 0.1:
        return 1
    if r < 0.6:
        return rng.randint(2, 20)
    return rng.choice(EDGES) if r < 0.9 else rng.randint(0, 300)


def draw(
    seed: int, index: int, device: str = "cpu", plain: bool = False, options: bool = True
) -> Problem:
    """Problem `index`; `options`: may have options that the built-in lacks.

    The rest of the problem does not depend on these options.

    `plain`: of numbers that the built-in, too, computes well, each with memory of its own: where
    values are expanded along the keys, the gradient of the scores is 0, and the built-in, which
    computes the gradient of a mask in float32, has no error at all.
    """
    problem = draw_builtin(seed, index, device, plain)
    if plain or not options:
        return problem
    rng = random.Random(f"{seed} {index} {device} options")
    return with_options(rng, problem, device)


def draw_builtin(seed: int, index: int, device: str, plain: bool) -> Problem:
    rng = random.Random(f"{seed} {index} {device}")
    mode = weighted(rng, MODES)
    on_tiles = {"float32": 5, "bfloat16": 30, "float16": 20}  # float32 where it may be rounded
    dtype = weighted(rng, on_tiles if device == "amx" else DTYPES)
    sizes = {name: size(rng) for name in ("L", "S", "E", "Ev")}
    if device in ("cpu", "gpu") and rng.random() < 0.02:  # keys of a query are cut among tasks
        sizes["L"], sizes["S"] = rng.randint(1, 9), rng.randint(256, 4200)
    batch = [f"B{i}" for i in range(rng.choices([0, 1, 2, 3], [4, 5, 3, 1])[0])]
    for name in batch:
        sizes[name] = rng.choices([0, 1, 2, 3, 4], [1, 10, 40, 30, 10])[0]
    gqa = rng.random() < 0.25
    if gqa:
        sizes["Hq"] = heads = rng.choice((1, 2, 3, 4, 6, 8))
        divisors = [n for n in (1, 2, 3, 4, 6, 8) if heads % n == 0]
        sizes["Hk"], sizes["Hv"] = rng.choice(divisors), rng.choice(divisors)
    keep_small(rng, sizes, COSTS[device] / (3 if mode not in ("forward", "backward") else 1))

    def broadcast(dims: list[str]) -> tuple[str, ...]:
        if rng.random() < 0.6:
            return tuple(dims)
        shrunk = ["1" if rng.random() < 0.3 else d for d in dims]
        return tuple(shrunk[rng.randint(0, len(dims)) if rng.random() < 0.5 else 0 :])

    ends = {"query": ("Hq", "L", "E"), "key": ("Hk", "S", "E"), "value": ("Hv", "S", "Ev")}
    dims = {n: (*broadcast(batch), *end[0 if gqa else 1 :]) for n, end in ends.items()}
    values = {n: weighted(rng, {"normal": 70, "tiny": 4, "large": 8, "huge": 3, "spread": 6,
                                "integers": 6, "zeros": 3}) for n in (*dims, "u")}  # fmt: skip
    if plain:
        values = dict.fromkeys(values, "normal")

    problem = Problem(seed=rng.randrange(2**31), mode=mode, dtype=dtype, sizes=sizes, dims=dims,
                      values=values, layouts={}, gqa=gqa)  # fmt: skip
    dtypes: dict[str, str] = {}
    if rng.random() < 0.45:
        rank = len(problem.lead)
        shape = [*problem.lead_dims, "L", "S"]
        if rng.random() < 0.7:
            shape = ["1" if rng.random() < 0.35 else d for d in shape]
            shape = shape[rng.randint(0, rank) :]
        dims["attn_mask"] = tuple(shape)
        values["attn_mask"] = weighted(rng, {"bool": 30, "rare": 8, "float": 20, "large": 5,
                                             "-inf": 20, "most -inf": 5, "lowest": 5})  # fmt: skip
        if plain and values["attn_mask"] in ("rare", "most -inf", "lowest", "large"):
            values["attn_mask"] = "float"
        if values["attn_mask"] not in ("bool", "rare") and rng.random() < 0.3:
            dtypes = {"attn_mask": "float32"}

    causal = rng.random() < 0.3
    scale = rng.choice((0.0, 1.0, -1.0, -0.37, 0.1, 2.5, 1e-4, 12.0, 1e-20))
    scale = scale if rng.random() < 0.3 else None
    dropout_p = rng.choice((0.01, 0.1, 0.3, 0.5, 0.9, 1.0)) if rng.random() < 0.1 else 0.0
    threads = rng.choices([1, 2, 3], [8, 1, 1])[0]
    precision = "highest"
    if dtype == "float32" and (device == "amx" or rng.random() < 0.08):
        precision = rng.choice(("medium", "medium", "high"))
    layouts = {n: rng.randrange(2**31) for n in (*dims, "u") if rng.random() < 0.4}
    special = rng.random()
    wanted: tuple[str, ...] = ()
    if mode != "forward":
        floating = [n for n in dims if n != "attn_mask" or values[n] not in ("bool", "rare")]
        wanted = tuple(n for n in floating if rng.random() < 0.75) or (rng.choice(floating),)
    if plain:
        dropout_p, precision, special, layouts = 0.0, "highest", 1.0, {}
        scale = scale if scale is not None and 0.05 < abs(scale) < 2 else None
    problem = dataclasses.replace(
        problem, dtypes=dtypes, causal=causal, scale=scale, dropout_p=dropout_p,
        threads=threads, precision=precision, layouts=layouts, wanted=wanted,
    )  # fmt: skip
    if special < 0.03 and not dropout_p:
        return with_vmap(rng, problem)
    if special < 0.06 and mode in ("forward", "backward"):
        return dataclasses.replace(problem, bits=True)
    if special < 0.11 and mode in ("forward", "backward"):
        return with_nan(rng, problem)
    if 0.95 < special < 1:
        return with_hidden(rng, problem)
    return problem


def keep_small(rng: random.Random, sizes: dict[str, int], limit: float) -> None:
    """Draws sizes again, smaller, until the problem costs no more than the limit."""
    limit *= 10 if rng.random() < 0.05 else 1

    def cost() -> int:
        lead = math.prod(n for name, n in sizes.items() if name[0] == "B" or name == "Hq")
        return lead * (sizes["L"] + 4) * (sizes["S"] + 4) * (sizes["E"] + sizes["Ev"] + 40)

    while cost() > limit:
        name = rng.choice([n for n in sizes if sizes[n] > 1 and n not in ("Hk", "Hv")])
        if name == "Hq":
            sizes.update(Hq=1, Hk=1, Hv=1)
        else:
            small = 1 if name[0] == "B" else rng.choice((1, 2, 5, 16, 17, 33))
            sizes[name] = min(sizes[name], small)


def with_vmap(rng: random.Random, problem: Problem) -> Problem:
    """Over the first dimension of the output, which each tensor that has it holds anywhere."""
    rank = len(problem.lead)
    if rank == 0 or (rank == 1 and problem.gqa) or not problem.lead[0]:
        return problem
    whole = {n: len(d) == rank + 2 for n, d in problem.dims.items()}
    in_dims = {
        n: rng.randrange(rank + 2) if whole.get(n) and problem.dims[n][0] != "1" else None
        for n in NAMES
    }
    if all(d is None for d in in_dims.values()):
        return problem
    return dataclasses.replace(problem, vmap={n: d for n, d in in_dims.items() if n in whole})


def with_nan(rng: random.Random, problem: Problem) -> Problem:
    """Plain numbers but for NaNs or infinities in one tensor: what these reach is then sure."""
    values = {n: v if n == "attn_mask" else "normal" for n, v in problem.values.items()}
    name = rng.choice(NAMES[:3])
    layouts = {n: s for n, s in problem.layouts.items() if n != name}
    whole = problem.shape("query")[:-2] == problem.lead
    with_gradient = name == "key" and whole and problem.mode == "backward"
    return dataclasses.replace(
        problem, values=values, layouts=layouts, nan=name, dropout_p=0.0, scale=None,
        bad=rng.choice(("nan", "nan", "inf", "-inf")),
        mode="backward" if with_gradient else "forward", wanted=("query",) if with_gradient else (),
    )  # fmt: skip


def with_hidden(rng: random.Random, problem: Problem) -> Problem:
    """Plain numbers, and a mask, often shared by rows, that hides some keys from all queries."""
    dims = dict(problem.dims)
    mask = dims.get("attn_mask", ("1", "S"))
    dims["attn_mask"] = (*mask[:-2], "1" if rng.random() < 0.6 else "L", "S")
    values = dict.fromkeys(problem.values, "normal")
    values["attn_mask"] = weighted(rng, {"bool": 3, "float": 4, "-inf": 3})
    wanted = problem.wanted
    if problem.mode != "forward" and values["attn_mask"] != "bool" and rng.random() < 0.7:
        wanted = tuple(dict.fromkeys((*wanted, "attn_mask")))
    elif values["attn_mask"] == "bool":
        wanted = tuple(n for n in wanted if n != "attn_mask") or (problem.wanted and ("query",))
    return dataclasses.replace(
        problem, dims=dims, values=values, wanted=wanted, hidden=True, dropout_p=0.0,
        dtypes=problem.dtypes if values["attn_mask"] != "bool" else {},
        layouts={n: s for n, s in problem.layouts.items() if n != "attn_mask"},
        bad=rng.choice(("nan", "nan", "inf", "-inf")),
        weights=problem.mode != "over_forward" and rng.random() < 0.25,  # which torch's exp lacks
    )  # fmt: skip
