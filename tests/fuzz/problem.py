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

NAMES = ("query", "key", "value", "attn_mask")  # of the tensors that the built-in takes, too
INPUTS = (*NAMES, "alibi_slopes", "sinks")  # what has derivatives
INTEGERS = ("query_offset", "key_lengths")
SCALES = ("key_scale", "value_scale")  # of numbers of 8 bits
# How many of the dimensions of a head, a row and a column they lack.
LACKS = {"alibi_slopes": 2, "sinks": 2, "query_offset": 3, "key_lengths": 3}
LACKS |= dict.fromkeys(SCALES, 1)
# Options that the built-in lacks, and options that it has, by the names of the table of pairs.
OPTIONS = ("softcap", "window_size", *INTEGERS, "alibi_slopes", "sinks", "logsumexp")
OF_BUILTIN = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
RESULTS = ("output", "logsumexp", "max_score")

ON_CUDA = ("cuda", "gpu")  # capabilities of the same kernels: over the stand-in, and on a GPU

DTYPES = {"float32": 35, "bfloat16": 30, "float16": 20, "float64": 15}  # how often
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
SLOPES = {
    "alibi": "(-8 * torch.rand({s})).exp2().to({d})",
    "normal": "torch.randn({s}, dtype={d})",
    "tiny": "torch.randn({s}, dtype={d}) * 1e-3",
    "large": "torch.randn({s}, dtype={d}) * 30",
    "some zeros": "torch.randn({s}, dtype={d}) * (torch.rand({s}) < 0.5)",
    "zeros": "torch.zeros({s}, dtype={d})",
}
SINKS = {
    "normal": "torch.randn({s}, dtype={d})",
    "zeros": "torch.zeros({s}, dtype={d})",
    "large": "torch.randn({s}, dtype={d}) * 30",
    "above all": "torch.rand({s}, dtype={d}) * 2e4",
    "below all": "torch.rand({s}, dtype={d}) * -2e4",
    "-inf": "torch.randn({s}, dtype={d}).masked_fill_(torch.rand({s}) < 0.5, -inf)",
    "lowest": "torch.full({s}, torch.finfo({d}).min, dtype={d})",
}
EIGHT = {  # 0x7F and 0xFF are the NaNs of float8_e4m3fn
    "int8": "torch.randint(-128, 128, {s}, dtype={d})",
    "float8_e4m3fn": "(torch.randint(0, 127, {s}) + 128 * torch.randint(0, 2, {s}))"
    ".to(torch.uint8).view({d})",
}
OF_KEY = "of the key"  # a value, in the memory of the key's first columns
OF_SCALES = {
    "normal": "torch.rand({s}, dtype={d}) / 40",
    "signs": "torch.randn({s}, dtype={d}) / 40",
    "tiny": "torch.rand({s}, dtype={d}) * 1e-6",
    "spread": "torch.randint(-15, 0, {s}).to({d}).exp2()",
    "some zeros": "torch.rand({s}, dtype={d}) / 40 * (torch.rand({s}) < 0.5)",
}
TABLES = {"attn_mask": MASKS, "alibi_slopes": SLOPES, "sinks": SINKS}
TABLES |= dict.fromkeys(SCALES, OF_SCALES)  # the other tensors have VALUES


@dataclasses.dataclass(frozen=True)
class Integers:
    """Where queries stand, or how many keys there are, for each batch entry."""

    dims: tuple[str, ...]  # names of sizes
    dtype: str  # empty: a number of Python
    numbers: tuple[int | str, ...]  # go round; "S" and "S - L" follow the sizes

    def of_sizes(self, sizes: dict[str, int], limit: int | None) -> list[int]:
        count = math.prod(1 if d == "1" else sizes[d] for d in self.dims)
        by_name = {"S": sizes["S"], "S - L": sizes["S"] - sizes["L"]}
        numbers = [n if isinstance(n, int) else by_name[n] for n in self.numbers]
        numbers = numbers if limit is None else [min(n, limit) for n in numbers]
        return [numbers[i % len(numbers)] for i in range(count)]


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call and what is asked of it. Dimensions go by name, so that a size has one place."""

    seed: int
    mode: str
    dtype: str
    sizes: dict[str, int]
    dims: dict[str, tuple[str, ...]]  # of each tensor: names of `sizes`, or "1" where it broadcasts
    values: dict[str, str]  # keys of VALUES or of one of TABLES
    layouts: dict[str, int]  # what is not here is contiguous
    wanted: tuple[str, ...] = ()  # what derivatives are taken of and along
    dtypes: dict[str, str] = dataclasses.field(default_factory=dict)  # other than the query's
    causal: bool = False
    scale: float | None = None
    dropout_p: float = 0.0
    gqa: bool = False
    softcap: float = 0.0
    window: tuple[int, int] = (-1, -1)
    integers: dict[str, Integers] = dataclasses.field(default_factory=dict)
    spoil: str = "nan"  # what keys, values and mask hold from `key_lengths` on
    rows: bool = False  # logsumexp and max_score, too
    graded: tuple[str, ...] = ("output",)  # the results that derivatives start from
    vmap: dict[str, int | None] | None = None  # in_dims
    nan: str = ""  # the tensor that NaNs are put into, or what `bad` says
    bad: str = "nan"
    hidden: bool = False  # `bad` is in keys that the mask hides from all queries
    weights: bool = False  # the output of sdpa_with_weights, plus something of its weights
    bits: bool = False  # compare the bits of several runs
    threads: int = 1
    precision: str = "highest"

    def shape(self, name: str) -> tuple[int, ...]:
        dims = self.integers[name].dims if name in self.integers else self.dims[name]
        return tuple(1 if d == "1" else self.sizes[d] for d in dims)

    @functools.cached_property
    def lead_dims(self) -> tuple[str, ...]:
        """Names of the leading dimensions of the output."""
        names = ["1"] * (max(len(self.dims[n]) for n in NAMES[:3]) - 2)
        for n in NAMES[:3]:
            for i, d in enumerate(reversed(self.dims[n][:-2])):
                if d != "1":
                    names[-1 - i] = "Hq" if d in ("Hk", "Hv") else d
        return tuple(names)

    @functools.cached_property
    def lead(self) -> tuple[int, ...]:
        """The leading dimensions of the output."""
        return tuple(1 if d == "1" else self.sizes[d] for d in self.lead_dims)

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (*self.lead, self.sizes["L"], self.sizes["Ev"])

    @property
    def rows_shape(self) -> tuple[int, ...]:
        return (*self.lead, self.sizes["L"])

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def dtype_of_rows(self) -> torch.dtype:
        return torch.float64 if self.dtype == "float64" else torch.float32

    def result_dtype(self, result: str) -> torch.dtype:
        if result.endswith(("logsumexp", "max_score")):
            return self.dtype_of_rows
        return getattr(torch, self.dtypes.get(result.partition("_")[2], self.dtype))

    @property
    def directions(self) -> list[str]:
        """What is given beside the inputs."""
        return [] if self.mode == "forward" else ["u", "t"] if self.of_second_order else ["u"]

    @property
    def given(self) -> tuple[str, ...]:
        """`graded`, but for what no derivative that is asked for follows from."""
        if self.wanted == ("value",):
            return ("output",)
        needed = ("output",) if "value" in self.wanted else ()
        return tuple(dict.fromkeys((*needed, *self.graded)))

    @property
    def given_options(self) -> tuple[str, ...]:
        """The names of all that is not as it is by default."""
        names = {
            **{n: n in self.dims for n in ("attn_mask", "alibi_slopes", "sinks")},
            **{n: n in self.integers for n in INTEGERS},
            **{n: n in self.dims for n in SCALES},
            "dropout_p": self.dropout_p > 0,
            "is_causal": self.causal,
            "scale": self.scale is not None,
            "enable_gqa": self.gqa,
            "softcap": self.softcap > 0,
            "window_size": self.window != (-1, -1),
            "logsumexp": self.rows,
        }
        return tuple(n for n in (*OF_BUILTIN, *OPTIONS, *SCALES) if names[n])

    @property
    def is_plain(self) -> bool:
        """Whether the built-in could be called so."""
        return not set(self.given_options).intersection((*OPTIONS, *SCALES))

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
        return " ".join(filter(None, (mode, extra, "" if self.is_plain else "options")))

    def capabilities(self, all_of_them: list[str]) -> list[str]:
        """The instruction sets that do not merely call another's functions."""
        left_out = set()
        pairs = self.dtype == "bfloat16" or (self.dtype, self.precision) == ("float32", "medium")
        if not pairs:
            left_out.add("avx512_bf16")
        if self.dtype == "float64" or (self.dtype, self.precision) == ("float32", "highest"):
            left_out.add("amx")
        return [c for c in all_of_them if c not in left_out]

    # --- the program ------------------------------------------------------------------------------

    def setup(self) -> list[str]:
        """Lines that make the tensors x, the gradients u of results, the direction t, options."""
        tensors = {n: self._tensor(n) if n in self.dims else "None" for n in (*INPUTS, *SCALES)}
        tensors = {n: text for n, text in tensors.items() if n in NAMES or n in self.dims}
        lines = [
            f"torch.manual_seed({self.seed})",
            f"dtype = torch.{self.dtype}",
            "x = {}",
            *(f"x[{name!r}] = {text}" for name, text in tensors.items()),
        ]
        if self.nan:
            *rows, columns = self.shape(self.nan)
            column = f"(torch.arange({columns}) == {self.seed % max(columns, 1)})"
            share = 0.5 if self.nan in LACKS else 0.1
            lines.append(f"bad = (torch.rand({(*rows, 1)}) < {share}) & {column}")
        if self.mode != "forward":
            lines.append("u = {}")
            for name in self.given:
                shape = self.output_shape if name == "output" else self.rows_shape
                dtype = "dtype" if name == "output" else str(self.dtype_of_rows)
                values = VALUES[self.values["u" if name == "output" else "u of rows"]]
                lines.append(f"u[{name!r}] = {self._placed(values, shape, dtype, 'u')}")
        if self.of_second_order:
            lines.append("t = {n: torch.randn_like(x[n], memory_format=torch.contiguous_format) "
                         f"for n in {list(self.wanted)}}}")  # fmt: skip
            for name in self.wanted:
                if beyond := self._beyond_lengths(name, self.shape(name)):
                    lines.append(f"t[{name!r}].masked_fill_({beyond}, {self.spoil})")
        options = {
            **({"is_causal": "True"} if self.causal else {}),
            **({} if self.scale is None else {"scale": repr(self.scale)}),
            **({"enable_gqa": "True"} if self.gqa else {}),
            **({"dropout_p": repr(self.dropout_p)} if self.dropout_p else {}),
            **({"softcap": repr(self.softcap)} if self.softcap else {}),
            **({} if self.window == (-1, -1) else {"window_size": repr(self.window)}),
            **{name: self._integers(name) for name in INTEGERS if name in self.integers},
        }
        lines.append(f"options = {{{', '.join(f'{n!r}: {text}' for n, text in options.items())}}}")
        if self.dropout_p:
            # With scores of 0 all weights are 1 / S; with the unit matrix as value they are the
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

    def numbers(self, name: str) -> list[int]:
        """The numbers of `query_offset` or `key_lengths`."""
        limit = self.sizes["S"] if name == "key_lengths" else None
        return self.integers[name].of_sizes(self.sizes, limit)

    def _integers(self, name: str) -> str:
        numbers, dtype = self.numbers(name), self.integers[name].dtype
        if not dtype:
            return str(numbers[0])
        shape = self.shape(name)
        if not shape:
            return f"torch.tensor({numbers[0]}, dtype=torch.{dtype})"
        return f"torch.tensor({numbers}, dtype=torch.{dtype}).reshape({shape})"

    def _beyond_lengths(self, name: str, shape: tuple[int, ...]) -> str:
        """The condition that a key is one of no sequence that reads this part of the tensor.

        It broadcasts to the shape that is given, and is empty where there is no such key.
        """
        S = self.sizes["S"]
        row = 1 if name in ("attn_mask", *SCALES) else 2  # the dimension of the keys, from the end
        if name not in ("key", "value", "attn_mask", *SCALES) or "key_lengths" not in self.integers:
            return ""
        if shape[-row:][:1] != (S,) or 0 in self.lead:
            return ""
        last = 2 if name in SCALES else 3
        batch, own = self.lead[:-1], shape[:-last]
        lengths = torch.tensor(self.numbers("key_lengths")).reshape(self.shape("key_lengths"))
        lengths = lengths.expand(batch)
        own = (1,) * (len(batch) - len(own)) + own
        shared = [d for d, size in enumerate(own) if size == 1]
        lengths = lengths.amax(shared, keepdim=True) if shared else lengths
        if bool((lengths >= S).all()):
            return ""
        keys = f"torch.arange({S})" + "[:, None]" * (row - 1)
        if lengths.numel() == 1:
            return f"{keys} >= {lengths.item()}"
        lengths = lengths.reshape(shape[:-last])
        return (f"{keys} >= torch.tensor({lengths.flatten().tolist()})"
                f".reshape({(*lengths.shape, *[1] * last)})")  # fmt: skip

    def _tensor(self, name: str) -> str:
        if self.values[name] == OF_KEY:
            return f"x['key'][..., :{self.sizes['Ev']}]"
        text = {**EIGHT, **TABLES.get(name, VALUES)}[self.values[name]]
        dtype = f"torch.{self.dtypes[name]}" if name in self.dtypes else "dtype"
        if self.values[name] in ("bool", "rare"):
            dtype = "torch.bool"
        elif self.values[name] in EIGHT:
            dtype = f"torch.{self.values[name]}"
        return self._placed(text, self.shape(name), dtype, name)

    def _placed(self, values: str, shape: tuple[int, ...], dtype: str, name: str) -> str:
        """A view into a larger storage, otherwise NaN (True for bool): any strides and offsets."""
        fillers = {"torch.bool": "True", "torch.int8": "99", "torch.float8_e4m3fn": "nan"}

        def filled(shape: tuple[int, ...]) -> str:
            text = values.format(s=shape, d=dtype)
            beyond = "" if dtype in fillers else self._beyond_lengths(name, shape)
            return f"({text}).masked_fill({beyond}, {self.spoil})" if beyond else text

        if name not in self.layouts or not shape:
            return filled(shape)
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
        text = f"torch.full({tuple(storage)}, {fillers.get(dtype, 'nan')}, dtype={dtype})"
        if order != sorted(order):
            text += f".permute({tuple(order)})"
        text += f"[{', '.join(index)}].copy_({filled(tuple(drawn))})"
        return text if tuple(drawn) == shape else f"{text}.expand({shape})"

    def solve(self, mode: str, name: str = "solve") -> list[str]:
        """Lines of a function that gives the results of `sdpa`, by name."""
        wanted = list(self.wanted)
        lines = [f"def {name}(sdpa, x, u=None, t=None, **options):"]

        def called(x: str) -> str:
            call = f"sdpa(**{x}, **options)"
            return f"dict(zip({RESULTS}, {call}))" if self.rows else f'{{"output": {call}}}'

        if mode == "forward":
            return [*lines, f"    return {called('x')}"]
        grad = "n in wanted" if mode != "jvp" else "False"
        lines += [
            f"    wanted = {wanted}",
            "    x = {n: a if a is None else "
            f"a.detach().requires_grad_({grad}) for n, a in x.items()}}",
            "    leaves = [x[n] for n in wanted]",
        ]
        if mode == "backward":
            lines += [
                f"    y = {called('x')}",
                "    g = torch.autograd.grad(",
                "        [y[n] for n in u], leaves, [*u.values()], materialize_grads=True)",
                "    y = {n: a.detach() for n, a in y.items()}",
                '    return {**y, **{f"grad_{n}": a for n, a in zip(wanted, g)}}',
            ]
            return lines
        if mode == "second":
            lines += [
                "    u = {n: a.detach().requires_grad_() for n, a in u.items()}",
                f"    y = {called('x')}",
                "    g = torch.autograd.grad(",
                "        [y[n] for n in u], leaves, [*u.values()], create_graph=True)",
                "    along, of = [t[n] for n in wanted], [*u.values(), *leaves]",
                "    h = torch.autograd.grad(g, of, along, materialize_grads=True)",
                "    moved, h = dict(zip(u, h)), h[len(u):]",
            ]
        else:
            lines += [
                "    ad = torch.autograd.forward_ad",
                "    with ad.dual_level():",
                "        duals = {n: ad.make_dual(a, t[n]) if n in wanted else a "
                "for n, a in x.items()}",
                f"        y, h = {called('duals')}, []",
                "        moved = {n: ad.unpack_dual(y[n]).tangent for n in u}",
            ]
        if mode == "over_forward":
            lines += [
                "        h = torch.autograd.grad(",
                "            [*moved.values()], leaves, [*u.values()], materialize_grads=True)",
            ]
        if mode == "over_reverse":
            lines += [
                "        g = torch.autograd.grad(",
                "            [y[n] for n in u], [duals[n] for n in wanted], [*u.values()])",
                "        h = [ad.unpack_dual(a).tangent for a in g]",
                "        h = [torch.zeros_like(a) if d is None else d for a, d in zip(g, h)]",
            ]
        lines += [
            '    moved = {f"tangent_{n}": a.detach() for n, a in moved.items()}',
            '    return {**moved, **{f"second_{n}": a.detach() for n, a in zip(wanted, h)}}',
        ]
        return lines

    @property
    def operator(self) -> str:
        return "sdpa_with_logsumexp" if self.rows else "sdpa"

    def sdpa(self) -> list[str]:
        """Lines that name the operator that is called."""
        if self.weights:
            return [
                "def sdpa(**x):",
                "    output, weights, _ = torch_attn.sdpa_with_weights(**x)",
                "    return output + weights.square().sum(-1, keepdim=True)",
            ]
        if self.vmap is None:
            return [f"sdpa = torch_attn.{self.operator}"]
        names = list(self.vmap)
        return [
            "def sdpa(**x):",
            f"    samples = [{', '.join(map(self._for_vmap, names))}]",
            "    def of_sample(*samples):",
            f"        return torch_attn.{self.operator}(**dict(zip({names}, samples)), **x)",
            f"    return torch.func.vmap(of_sample, {tuple(self.vmap.values())})(*samples)",
        ]

    def has_mapped_dimension(self, name: str) -> bool:
        """Whether the tensor has the first of the leading dimensions, if only of size 1."""
        dims = self.integers[name].dims if name in self.integers else self.dims[name]
        return len(dims) == len(self.lead) + 2 - LACKS.get(name, 0) and len(dims) > 0

    def _for_vmap(self, name: str) -> str:
        """The tensor, with the dimension that is mapped over where in_dims says."""
        assert self.vmap is not None
        text, dim = f"x.pop({name!r})", self.vmap[name]
        if LACKS.get(name) == 2 and len(self.lead) == 1:  # the heads are mapped over
            return text if dim is None else f"{text}[:, None]" if dim == 0 else f"{text}[None]"
        if dim is not None:
            return f"{text}.movedim(0, {dim})" if dim else text
        return f"{text}[0]" if self.has_mapped_dimension(name) else text

    def settings(self, capability: str) -> list[str]:
        lines = [f"torch.set_num_threads({self.threads})"]
        if capability == "gpu":
            lines.append('torch.set_default_device("cuda")')
        if capability not in ON_CUDA:
            lines.append(f'torch.ops.attn._set_cpu_capability("{capability}")')
        if self.precision != "highest":
            lines.append(f'torch.set_float32_matmul_precision("{self.precision}")')
        return lines

    def program(self, capability: str, ending: list[str]) -> str:
        """The whole program, which runs by itself."""
        exact = "**options, dropout_mask=kept" if self.dropout_p else "**options"
        # The textbook by reverse mode alone: the softmax of torch has no gradient of its tangent.
        by_reverse = self.mode in ("jvp", "over_forward", "over_reverse")
        given = ["x", *self.directions]
        textbook = "exact" if by_reverse else "solve"
        # What is beyond the lengths is no number, and 0 * NaN in the textbook.
        numbers = ".nan_to_num(0, 0, -inf)" if "key_lengths" in self.integers else ""
        lines = [
            "import torch",
            "import torch_attn",
            "from math import inf, nan",
            "from torch_attn import reference",
            "",
            *self.solve(self.mode),
            *(self.solve("second", "exact") if by_reverse else []),
            *self.sdpa(),
            "def double(a):",
            f"    return a if a is None or a.dtype == torch.bool else a.double(){numbers}",
            "def double_all(x):",
            "    x = {n: double(a) for n, a in x.items()}",
            f"    for name in {SCALES}:",
            "        if name in x:",
            "            x[name[:-6]] = x[name[:-6]] * x.pop(name)[..., None]",
            "    return x",
            "",
            *self.settings(capability),
            *self.setup(),
        ]
        if not (self.nan or self.bits or self.hidden):
            lines += [
                "torch.manual_seed(7)",
                f"actual = solve(sdpa, {', '.join(given)}, **options)",
                f"given = {', '.join(f'double_all({n})' for n in given)},",
                f"expected = {textbook}(reference.{self.operator}, *given, {exact})",
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
        import torch_attn

        function = compiled("\n".join(self.solve(self.mode)), "solve")
        if self.vmap:
            sdpa = compiled("\n".join(self.sdpa()), "sdpa")
        else:  # looked up at every call: tests put a wrong one there
            sdpa = getattr(torch_attn, self.operator)
        torch.manual_seed(7)
        return function(sdpa, made.x, made.u, made.t, **made.options)


@functools.lru_cache(maxsize=4096)
def compiled(text: str, name: str) -> Any:
    import torch_attn

    names: dict[str, Any] = {"torch": torch, "torch_attn": torch_attn}
    exec(text, names)
    return names[name]
