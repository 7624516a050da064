"""A random problem, drawn from a seed and an index alone, and the program that says it.

The text of the program is the only definition of a problem: the harness executes it and prints the
same text when something fails.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import types
from typing import Any

import torch
from torch import Tensor

NAMES = ("query", "key", "value", "attn_mask")
DTYPES = {"float32": 35, "bfloat16": 30, "float16": 20, "float64": 15}  # how often
# Around the edges of the kernels' tiles, vectors and blocks, and usual sizes of heads.
EDGES = [
    *(15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 80, 96),
    *(127, 128, 129, 192, 193, 255, 256, 257, 300),
]
MODES = {"forward": 66, "backward": 22, "jvp": 3, "second": 3, "over_forward": 3, "over_reverse": 3}
# The cost of a problem, in multiplications, that one in twenty exceeds by a factor of ten.
COSTS = {"cpu": 500_000, "cuda": 50_000, "amx": 200_000}

# How the numbers of a tensor are drawn; `s` stands for its shape, `d` for its dtype.
VALUES = {
    "normal": "torch.randn({s}, dtype={d})",
    "tiny": "torch.randn({s}, dtype={d}) * 1e-3",
    "large": "torch.randn({s}, dtype={d}) * 8",
    "huge": "torch.randn({s}, dtype={d}) * 100",
    "spread": "(torch.randn({s}) * torch.randint(-9, 10, {s}).exp2()).to({d})",
    "integers": "torch.randint(-3, 4, {s}).to({d})",
    "zeros": "torch.zeros({s}, dtype={d})",
}
MASKS = {
    "bool": "torch.rand({s}) > 0.3",
    "rare": "torch.rand({s}) > 0.95",  # few keys are seen, of many rows none
    "float": "torch.randn({s}, dtype={d})",
    "large": "torch.randn({s}, dtype={d}) * 30",
    "-inf": "torch.randn({s}, dtype={d}).masked_fill_(torch.rand({s}) < 0.3, -inf)",
    "most -inf": "torch.randn({s}, dtype={d}).masked_fill_(torch.rand({s}) < 0.95, -inf)",
    "lowest": "torch.zeros({s}, dtype={d}).masked_fill_("
    "torch.rand({s}) < 0.3, torch.finfo({d}).min)",
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call and what is asked of it. Dimensions go by name, so that a size has one place."""

    seed: int
    mode: str
    dtype: str
    sizes: dict[str, int]
    dims: dict[str, tuple[str, ...]]  # of each tensor: names of `sizes`, or "1" where it broadcasts
    values: dict[str, str]  # keys of VALUES and, for the mask, of MASKS
    layouts: dict[str, int]  # what is not here is contiguous
    wanted: tuple[str, ...] = ()  # what derivatives are taken of and along
    mask_dtype: str = ""  # that of the query if empty
    causal: bool = False
    scale: float | None = None
    dropout_p: float = 0.0
    gqa: bool = False
    vmap: tuple[int | None, ...] | None = None  # in_dims of query, key, value and mask
    nan: str = ""  # the tensor that NaNs are put into, or what `bad` says
    bad: str = "nan"
    hidden: bool = False  # `bad` is in keys that the mask hides from all queries
    weights: bool = False  # the output of sdpa_with_weights, plus something of its weights
    bits: bool = False  # compare the bits of several runs
    threads: int = 1
    precision: str = "highest"

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(1 if d == "1" else self.sizes[d] for d in self.dims[name])

    @functools.cached_property
    def lead(self) -> tuple[int, ...]:
        """The leading dimensions of the output."""
        leads = [[self.sizes.get(d, 1) for d in self.dims[n][:-2]] for n in NAMES[:3]]
        if self.gqa:
            for lead in leads:
                lead[-1] = self.sizes["Hq"]
        return tuple(torch.broadcast_shapes(*leads))

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (*self.lead, self.sizes["L"], self.sizes["Ev"])

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def of_second_order(self) -> bool:
        return self.mode not in ("forward", "backward")

    @property
    def kind(self) -> str:
        """What the table counts it as."""
        extra = "NaN" if self.nan else "hidden" if self.hidden else "bits" if self.bits else ""
        extra = extra or ("vmap" if self.vmap else "dropout" if self.dropout_p else "")
        extra = extra or self.precision.removeprefix("highest")
        mode = "second" if self.mode.startswith("over") else self.mode
        return f"{mode} {extra}".strip()

    def capabilities(self, all_of_them: list[str]) -> list[str]:
        """Those that do not merely call another's functions."""
        left_out = set()
        pairs = self.dtype == "bfloat16" or (self.dtype, self.precision) == ("float32", "medium")
        if not pairs:
            left_out.add("avx512_bf16")
        if self.dtype == "float64" or (self.dtype, self.precision) == ("float32", "highest"):
            left_out.add("amx")
        return [c for c in all_of_them if c not in left_out]

    # --- the program ------------------------------------------------------------------------------

    def setup(self) -> list[str]:
        """Lines that make the tensors x, the gradient u of the output, the direction t, options."""
        tensors = {n: self._tensor(n) for n in self.dims}
        tensors.setdefault("attn_mask", "None")
        lines = [
            f"torch.manual_seed({self.seed})",
            f"dtype = torch.{self.dtype}",
            "x = {}",
            *(f"x[{name!r}] = {text}" for name, text in tensors.items()),
        ]
        if self.nan:
            *rows, columns = self.shape(self.nan)
            column = f"(torch.arange({columns}) == {self.seed % max(columns, 1)})"
            lines.append(f"bad = (torch.rand({(*rows, 1)}) < 0.1) & {column}")
        if self.mode != "forward":
            s = self.output_shape
            lines.append(f"u = {self._placed(VALUES[self.values['u']], s, 'dtype', 'u')}")
        if self.of_second_order:
            lines.append("t = {n: torch.randn_like(x[n], memory_format=torch.contiguous_format) "
                         f"for n in {list(self.wanted)}}}")  # fmt: skip
        options = {
            **({"is_causal": True} if self.causal else {}),
            **({} if self.scale is None else {"scale": self.scale}),
            **({"enable_gqa": True} if self.gqa else {}),
            **({"dropout_p": self.dropout_p} if self.dropout_p else {}),
        }
        lines.append(f"options = {options}")
        if self.dropout_p:
            # Of scores that are 0 all weights are 1 / S; with the unit matrix as value they are the
            # output, 0 where dropped.
            L, S = self.sizes["L"], self.sizes["S"]
            lead = "".join(f"{n}, " for n in self.lead)
            lines += [
                "torch.manual_seed(7)",
                f"query, key = torch.zeros({lead}{L}, 1), torch.zeros({lead}{S}, 1)",
                f"eye = torch.eye({S}).expand({lead}{S}, {S})",
                f"kept = torch_attn.sdpa(query, key, eye, dropout_p={self.dropout_p}) != 0",
            ]
        return lines

    def _tensor(self, name: str) -> str:
        if name != "attn_mask":
            return self._placed(VALUES[self.values[name]], self.shape(name), "dtype", name)
        dtype = f"torch.{self.mask_dtype}" if self.mask_dtype else "dtype"
        text = MASKS[self.values[name]]
        if self.values[name] in ("bool", "rare"):
            dtype = "torch.bool"
        return self._placed(text, self.shape(name), dtype, name)

    def _placed(self, values: str, shape: tuple[int, ...], dtype: str, name: str) -> str:
        """A view into a larger storage, otherwise NaN (True for bool): any strides and offsets."""
        if name not in self.layouts:
            return values.format(s=shape, d=dtype)
        rng = random.Random(self.layouts[name])
        n = len(shape)
        order = list(range(n))
        if rng.random() < 0.6:
            if n > 2 and rng.random() < 0.5:
                order[-3], order[-2] = order[-2], order[-3]  # [B, L, H, E] seen as [B, H, L, E]
            else:
                rng.shuffle(order)
        drawn = list(shape)
        index, storage = [], [0] * n
        for d, size in enumerate(shape):
            first, after, step = *rng.choices((0, 0, 1, 3), k=2), rng.choice((1, 1, 1, 2, 3))
            if size > 1 and rng.random() < 0.08 and self.mode in ("forward", "backward", "second"):
                size = drawn[d] = 1  # expanded: a stride of 0, which forward mode does not take
            last = first + step * (size - 1) + 1 if size else first
            storage[order[d]] = last + after
            index.append(f"{first}:{last}:{step}" if step > 1 else f"{first}:{last}")
        filler = "True" if dtype == "torch.bool" else "nan"
        text = f"torch.full({tuple(storage)}, {filler}, dtype={dtype})"
        if order != sorted(order):
            text += f".permute({tuple(order)})"
        text += f"[{', '.join(index)}].copy_({values.format(s=tuple(drawn), d=dtype)})"
        return text if tuple(drawn) == shape else f"{text}.expand({shape})"

    def solve(self, mode: str, name: str = "solve") -> list[str]:
        """Lines of a function that gives the results of `sdpa`, by name."""
        wanted = list(self.wanted)
        lines = [f"def {name}(sdpa, x, u=None, t=None, **options):"]
        if mode == "forward":
            return [*lines, '    return {"output": sdpa(*x.values(), **options)}']
        grad = "n in wanted" if mode != "jvp" else "False"
        lines += [
            f"    wanted = {wanted}",
            "    x = {n: a if a is None else "
            f"a.detach().requires_grad_({grad}) for n, a in x.items()}}",
            "    leaves = [x[n] for n in wanted]",
        ]
        if mode == "backward":
            lines += [
                "    output = sdpa(*x.values(), **options)",
                "    g = torch.autograd.grad(output, leaves, u, materialize_grads=True)",
                '    return {"output": output.detach(), '
                '**{f"grad_{n}": a for n, a in zip(wanted, g)}}',
            ]
            return lines
        if mode == "second":
            lines += [
                "    u = u.detach().requires_grad_()",
                "    output = sdpa(*x.values(), **options)",
                "    g = torch.autograd.grad(output, leaves, u, create_graph=True)",
                "    moved, *h = torch.autograd.grad(",
                "        g, [u, *leaves], [t[n] for n in wanted], materialize_grads=True)",
            ]
        else:
            lines += [
                "    ad = torch.autograd.forward_ad",
                "    with ad.dual_level():",
                "        duals = {n: ad.make_dual(a, t[n]) if n in wanted else a "
                "for n, a in x.items()}",
                "        output, h = sdpa(*duals.values(), **options), []",
                "        moved = ad.unpack_dual(output).tangent",
            ]
        if mode == "over_forward":
            lines.append(
                "        h = torch.autograd.grad(moved, leaves, u, materialize_grads=True)"
            )
        if mode == "over_reverse":
            lines += [
                "        g = torch.autograd.grad(output, [duals[n] for n in wanted], u)",
                "        h = [ad.unpack_dual(a).tangent for a in g]",
                "        h = [torch.zeros_like(a) if d is None else d for a, d in zip(g, h)]",
            ]
        lines.append(
            '    return {"tangent": moved.detach(), '
            '**{f"second_{n}": a.detach() for n, a in zip(wanted, h)}}'
        )
        return lines

    def sdpa(self) -> list[str]:
        """Lines that name the operator that is called."""
        if self.weights:
            return [
                "def sdpa(*x, **options):",
                "    output, weights, _ = torch_attn.sdpa_with_weights(*x, **options)",
                "    return output + weights.square().sum(-1, keepdim=True)",
            ]
        if self.vmap is None:
            return ["sdpa = torch_attn.sdpa"]
        lines = ["def sdpa(query, key, value, attn_mask, **options):"]
        arguments, in_dims = [], []
        for name, dim in zip(NAMES, self.vmap, strict=True):
            if name not in self.dims:
                arguments.append("None")
            elif dim is not None:
                arguments.append(f"{name}.movedim(0, {dim})" if dim else name)
            else:
                whole = len(self.dims[name]) == len(self.lead) + 2  # its first size is then 1
                arguments.append(f"{name}[0]" if whole else name)
            in_dims.append(dim)
        return [
            *lines,
            "    def of_sample(*x):",
            "        return torch_attn.sdpa(*x, **options)",
            f"    return torch.func.vmap(of_sample, {tuple(in_dims)})({', '.join(arguments)})",
        ]

    def settings(self, capability: str) -> list[str]:
        lines = [f"torch.set_num_threads({self.threads})"]
        if capability != "cuda":
            lines.append(f'torch.ops.attn._set_cpu_capability("{capability}")')
        if self.precision != "highest":
            lines.append(f'torch.set_float32_matmul_precision("{self.precision}")')
        return lines

    def program(self, capability: str, ending: list[str]) -> str:
        """The whole program, which runs by itself."""
        exact = "**options, dropout_mask=kept" if self.dropout_p else "**options"
        more = "" if self.mode == "forward" else ", u"
        more += ", t" if self.of_second_order else ""
        doubled = "" if self.mode == "forward" else ", u.double()"
        doubled += ", {n: a.double() for n, a in t.items()}" if self.of_second_order else ""
        # The textbook by reverse mode alone: the softmax of torch has no gradient of its tangent.
        by_reverse = self.mode in ("jvp", "over_forward", "over_reverse")
        textbook = "exact" if by_reverse else "solve"
        lines = [
            "import torch",
            "import torch_attn",
            "from math import inf, nan",
            "from torch_attn import reference",
            "",
            *self.solve(self.mode),
            *(self.solve("second", "exact") if by_reverse else []),
            *self.sdpa(),
            "",
            *self.settings(capability),
            *self.setup(),
        ]
        if not (self.nan or self.bits or self.hidden):
            lines += [
                "torch.manual_seed(7)",
                f"actual = solve(sdpa, x{more}, **options)",
                "double = lambda a: a if a is None or a.dtype == torch.bool else a.double()",
                "xs = {n: double(a) for n, a in x.items()}",
                f"expected = {textbook}(reference.sdpa, xs{doubled}, {exact})",
            ]
        return "\n".join([*lines, *ending]) + "\n"

    def make(self) -> types.SimpleNamespace:
        """The tensors: executes the lines of `setup`."""
        import torch_attn

        names: dict[str, Any] = {"torch": torch, "torch_attn": torch_attn, "inf": math.inf}
        names["nan"] = math.nan
        exec("\n".join(self.setup()), names)
        return types.SimpleNamespace(
            x=names["x"],
            u=names.get("u"),
            t=names.get("t"),
            options=names["options"],
            kept=names.get("kept"),
            bad=names.get("bad"),
        )

    def results(self, made: types.SimpleNamespace) -> dict[str, Tensor]:
        """What the operator gives."""
        function = compiled("\n".join(self.solve(self.mode)), "solve")
        sdpa = compiled("\n".join(self.sdpa()), "sdpa") if self.vmap else _operator
        torch.manual_seed(7)
        return function(sdpa, made.x, made.u, made.t, **made.options)


def _operator(*args: Any, **options: Any) -> Tensor:
    import torch_attn  # looked up at every call: tests put a wrong one there

    return torch_attn.sdpa(*args, **options)


@functools.lru_cache(maxsize=4096)
def compiled(text: str, name: str) -> Any:
    import torch_attn

    names: dict[str, Any] = {"torch": torch, "torch_attn": torch_attn}
    exec(text, names)
    return names[name]


# --- drawing --------------------------------------------------------------------------------------


def size(rng: random.Random) -> int:
    r = rng.random()
    if r < 0.015:
        return 0
    if r < 0.1:
        return 1
    if r < 0.6:
        return rng.randint(2, 20)
    return rng.choice(EDGES) if r < 0.9 else rng.randint(0, 300)


def weighted(rng: random.Random, weights: dict[Any, int]) -> Any:
    return rng.choices(list(weights), list(weights.values()))[0]


def draw(seed: int, index: int, device: str = "cpu", plain: bool = False) -> Problem:
    """Problem `index`. `plain`: of numbers that the built-in, too, computes well.

    And of numbers of their own: where values are expanded along the keys, the gradient of the
    scores is 0, and the built-in, which computes that of a mask in float32, has no error at all.
    """
    rng = random.Random(f"{seed} {index} {device}")
    mode = weighted(rng, MODES)
    on_tiles = {"float32": 5, "bfloat16": 30, "float16": 20}  # float32 where it may be rounded
    dtype = weighted(rng, on_tiles if device == "amx" else DTYPES)
    sizes = {name: size(rng) for name in ("L", "S", "E", "Ev")}
    if device == "cpu" and rng.random() < 0.02:  # keys of a query are cut among tasks
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
    mask_dtype = ""
    if rng.random() < 0.45:
        # names of the dimensions of the scores
        rank = len(problem.lead)
        lead = ["1"] * rank
        for n in ("query", "key", "value"):
            for i, d in enumerate(reversed(dims[n][:-2])):
                if d != "1":
                    lead[rank - 1 - i] = "Hq" if d in ("Hk", "Hv") else d
        shape = [*lead, "L", "S"]
        if rng.random() < 0.7:
            shape = ["1" if rng.random() < 0.35 else d for d in shape]
            shape = shape[rng.randint(0, rank) :]
        dims["attn_mask"] = tuple(shape)
        values["attn_mask"] = weighted(rng, {"bool": 30, "rare": 8, "float": 20, "large": 5,
                                             "-inf": 20, "most -inf": 5, "lowest": 5})  # fmt: skip
        if plain and values["attn_mask"] in ("rare", "most -inf", "lowest", "large"):
            values["attn_mask"] = "float"
        if values["attn_mask"] not in ("bool", "rare") and rng.random() < 0.3:
            mask_dtype = "float32"

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
        problem, mask_dtype=mask_dtype, causal=causal, scale=scale, dropout_p=dropout_p,
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
    in_dims = tuple(
        rng.randrange(rank + 2) if whole.get(n) and problem.dims[n][0] != "1" else None
        for n in NAMES
    )
    if all(d is None for d in in_dims):
        return problem
    return dataclasses.replace(problem, vmap=in_dims)


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
        mask_dtype=problem.mask_dtype if values["attn_mask"] != "bool" else "",
        layouts={n: s for n, s in problem.layouts.items() if n != "attn_mask"},
        bad=rng.choice(("nan", "nan", "inf", "-inf")),
        weights=problem.mode != "over_forward" and rng.random() < 0.25,  # which torch's exp lacks
    )  # fmt: skip
