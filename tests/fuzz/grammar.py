"""Draws functions of the pair as people write them: source text of Python.

The grammar follows docs/flex.md. `WRITTEN` says how each operation of the tracer's table, RULES, is
written, and tests/test_fuzz.py fails if it lacks one. The text means the same for single numbers,
as in flex_attention, and for tensors that broadcast over batch, heads, queries and keys, as in an
oracle of plain PyTorch. Lookups are written in several ways for the former, and in one, `t[b, i]`,
for the latter (`rendered`).

Numbers are drawn so that discontinuous operations, such as floor, decide alike in every precision:
captured numbers and scores are small multiples of 1/32, and `Text.bits` says that a number has few
enough bits to be computed without rounding. Only such numbers are rounded, compared or converted.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable

import torch
from torch import Tensor

FLOATS = torch.float64, torch.float32, torch.bfloat16, torch.float16
# What a constant may be: on the grid, special, and neither.
USUAL = ["0.5", "-0.25", "1.5", "2.0", "-2.0", "3.0", "-0.75", "1", "-1", "2", "-3"]
SPECIAL = ["0.0", "-0.0", "1.0", "-1.0", "0", "math.inf", "-math.inf", "math.nan", "1e30", "-1e-30"]
INEXACT = ["0.1", "-0.3", "0.7", "20.0", "-1e3", "1e-3"]


Bits = tuple[int, int]  # after the point, and before it


@dataclasses.dataclass(frozen=True)
class Text:
    """An expression.

    `bits`: how many bits a number has, if it has no rounding error. `whole`: an upper bound of a
    whole number's magnitude.
    """

    text: str
    bits: Bits | None = None
    whole: int | None = None

    def __str__(self) -> str:
        return self.text


# Forms of each operation, by the types of its operands and of its result: f (a number), e (a number
# without rounding errors), i, b; c stands for a constant, d for a whole divisor, n for a whole
# constant. {0} is the first operand.
BINARY = "ff>f ee>e cf>f fc>f ce>e ec>e"
WRITTEN: dict[str, tuple[str, list[str]]] = {
    "add": (
        f"{BINARY} ii>i ni>i in>i bb>b ib>i",
        ["{0} + {1}", "torch.add(T{0}, {1})", "M{0}.add({1})", "torch.add(T{0}, T{1}, alpha=-2)"],
    ),
    "sub": (f"{BINARY} ii>i ni>i in>i", ["{0} - {1}", "M{0}.sub({1})", "torch.sub(T{0}, {1})"]),
    "mul": (
        f"{BINARY} in>i ni>i ii>i bf>f",
        ["{0} * {1}", "M{0}.mul({1})", "torch.mul(T{0}, {1})"],
    ),
    "minimum": ("ff>f ee>e ii>i", ["torch.minimum({0}, {1})", "torch.min({0}, {1})"]),
    "maximum": ("ff>f ee>e ii>i", ["torch.maximum({0}, {1})", "{0}.max({1})"]),
    "abs": ("f>f e>e i>i", ["{0}.abs()", "abs({0})", "torch.abs({0})"]),
    "neg": ("f>f e>e i>i", ["-{0}", "torch.neg({0})", "{0}.neg()"]),
    "div": (
        "fc>f cp>f fp>f ic>f",
        ["{0} / {1}", "torch.div(T{0}, {1})", "M{0}.div({1})"],
    ),
    **{
        name: ("e>e", [f"torch.{name}({{0}})", f"{{0}}.{name}()"])
        for name in ("floor", "ceil", "trunc", "round", "frac")
    },
    **{name: ("e>e i>i", [f"torch.{name}({{0}})", f"{{0}}.{name}()"]) for name in ("sign", "sgn")},
    **{
        f"is{name}": ("e>b", [f"torch.is{name}({{0}})", f"{{0}}.is{name}()"])
        for name in ("nan", "inf", "finite")
    },
    "floor_divide": (
        "ec>e ce>e id>i ed>e",
        # PyTorch's // of numbers has no derivative, and div has one.
        ["{0} // {1}", "torch.div(T{0}, {1}, rounding_mode='floor')"],
    ),
    "remainder": ("ec>e ee>e id>i", ["{0} % {1}", "torch.remainder(T{0}, {1})"]),
    "fmod": ("ec>e ee>e id>i", ["torch.fmod(T{0}, {1})", "M{0}.fmod({1})"]),
    "square": ("f>f e>e", ["{0}.square()", "torch.square({0})"]),
    "pow": (
        "f>f e>e i>i",
        [
            *("{0} ** 2", "torch.pow({0}, 2)", "{0} ** 3", "({0}.abs() + 1) ** -0.5", "2 ** {0}"),
            *("({0}.abs() + 0.5) ** 1.5", "1.5 ** {0}", "torch.pow({0}, exponent=3)"),
        ],
    ),
    **{
        name: ("f>f", [f"torch.{name}({{0}})", f"{{0}}.{name}()"])
        for name in (
            *("exp", "exp2", "expm1", "tanh", "sigmoid", "erf", "erfc", "atan", "asinh"),
            *("sinh", "cosh"),
        )
    },
    # Their operands are exact, because these functions would make rounding errors larger.
    **{
        name: ("e>f", [f"torch.{name}({{0}})", f"{{0}}.{name}()"]) for name in ("sin", "cos", "tan")
    },
    **{
        name: ("e>f", [f"torch.{name}({{0}}.sin() * 0.75)", f"({{0}}.cos() * 0.5).{name}()"])
        for name in ("asin", "acos", "atanh")
    },
    "acosh": ("f>f", ["torch.acosh({0}.abs() + 1.5)", "({0}.abs() + 2).acosh()"]),
    "atan2": ("fp>f", ["torch.atan2({0}, {1})", "{0}.atan2({1})"]),
    "expit": ("f>f", ["torch.special.expit({0})"]),
    **{
        name: ("p>f", [f"torch.{name}({{0}})", f"{{0}}.{name}()"])
        for name in ("reciprocal", "sqrt", "rsqrt", "log", "log1p", "log2", "log10")
    },
    **{
        name: (
            "ee>b ec>b ce>b ii>b in>b ni>b",
            [f"{{0}} {sign} {{1}}", f"torch.{name}(T{{0}}, {{1}})"],
        )
        for name, sign in zip(
            ("eq", "ne", "lt", "le", "gt", "ge"), ("==", "!=", "<", "<=", ">", ">="), strict=True
        )
    },
    **{
        f"bitwise_{name}": (
            "ii>i in>i bb>b",
            [f"{{0}} {sign} {{1}}", f"torch.bitwise_{name}({{0}}, {{1}})"],
        )
        for name, sign in {"and": "&", "or": "|", "xor": "^"}.items()
    },
    **{
        f"bitwise_{side}_shift": (
            signatures,
            [f"{{0}} {sign} {{1}}", f"torch.bitwise_{side}_shift(T{{0}}, {{1}})"],
        )
        for side, sign, signatures in (("left", "<<", "in>i id>i"), ("right", ">>", "in>i ii>i"))
    },
    "bitwise_not": ("i>i b>b", ["~{0}", "torch.bitwise_not({0})"]),
    **{
        f"logical_{name}": (
            "bb>b eb>b ii>b",
            [f"torch.logical_{name}({{0}}, {{1}})", f"{{0}}.logical_{name}({{1}})"],
        )
        for name in ("and", "or", "xor")
    },
    "logical_not": ("b>b e>b i>b", ["torch.logical_not({0})", "{0}.logical_not()"]),
    "relu": ("f>f e>e", ["torch.relu({0})", "F.relu({0})", "{0}.relu()"]),
    "relu6": ("f>f e>e", ["F.relu6({0})"]),
    "hardtanh": ("f>f e>e", ["F.hardtanh({0})", "F.hardtanh({0}, -2, max_val=3)"]),
    "leaky_relu": ("f>f", ["F.leaky_relu({0})", "F.leaky_relu({0}, negative_slope=0.25)"]),
    "elu": ("f>f", ["F.elu({0})", "F.elu({0}, alpha=0.5)"]),
    "selu": ("f>f", ["F.selu({0})", "torch.selu({0})"]),
    "celu": ("f>f", ["F.celu({0})", "torch.celu({0}, alpha=0.5)"]),
    "gelu": ("f>f", ["F.gelu({0})", "F.gelu({0}, approximate='tanh')"]),
    "silu": ("f>f", ["F.silu({0})"]),
    "mish": ("f>f", ["F.mish({0})"]),
    "softplus": ("f>f", ["F.softplus({0})", "F.softplus({0}, beta=2, threshold=9)"]),
    "logsigmoid": ("f>f", ["F.logsigmoid({0})"]),
    "softsign": ("f>f", ["F.softsign({0})"]),
    "tanhshrink": ("f>f", ["F.tanhshrink({0})"]),
    "logaddexp": ("ff>f", ["torch.logaddexp({0}, {1})", "{0}.logaddexp({1})"]),
    "lerp": (
        "ff>f",
        [f"torch.lerp({{0}}.to(score.dtype), {{1}}.to(score.dtype), {w})" for w in (0.25, 0.75)],
    ),
    "addcmul": ("fff>f", ["torch.addcmul({0}, {1}, {2}, value=-2)", "{0}.addcmul({1}, {2})"]),
    "addcdiv": ("ffp>f", ["torch.addcdiv({0}, {1}, {2})"]),
    "where": (
        "bff>f bee>e bcf>f bfc>f bii>i bni>i bbb>b",
        ["torch.where({0}, {1}, {2})"],
    ),
    "clamp": (
        "fcc>f ecc>e fff>f inn>i",
        ["{0}.clamp({1}, {2})", "torch.clamp({0}, min={1}, max={2})"],
    ),
    "clamp_min": ("fc>f ec>e in>i ff>f", ["{0}.clamp(min={1})", "torch.clamp_min({0}, {1})"]),
    "clamp_max": ("fc>f ec>e in>i ff>f", ["{0}.clamp(max={1})", "{0}.clamp_max({1})"]),
    "masked_fill": ("fbc>f ebc>e ibn>i", ["{0}.masked_fill({1}, {2})"]),
    # PyTorch rounds the gradient of a conversion, too, and ours does not.
    "to": ("f>f i>e", ["{0}.to(score.dtype)", "{0}.to(torch.float64)"]),
    "type": (
        "i>e b>e",
        ["{0}.type(torch.float32).to(score.dtype)", "{0}.type('torch.DoubleTensor')"],
    ),
    "type_as": ("f>f i>e", ["{0}.type_as(score)"]),
    "clone": ("f>f i>i", ["{0}.clone()", "torch.clone({0})"]),
    "contiguous": ("f>f b>b", ["{0}.contiguous()"]),
    "float": ("i>e b>e", ["{0}.float().to(score.dtype)", "{0}.to(torch.float32).to(score.dtype)"]),
    "double": ("f>f i>e", ["{0}.double()"]),
    "half": (
        "i>e",
        [
            "({0} % 5000 / 8).half().to(score.dtype)",
            "({0} % 5000).to(torch.float16).to(score.dtype)",
        ],
    ),
    "bfloat16": ("i>e", ["({0} % 5000 / 8).bfloat16().to(score.dtype)"]),
    "bool": ("e>b i>b", ["{0}.bool()", "{0}.to(torch.bool)"]),
    "int": ("e>I i>i b>i", ["{0}.int()", "{0}.to(torch.int32)", "{0}.type('torch.IntTensor')"]),
    "long": ("e>I i>i b>i", ["{0}.long()", "{0}.to(dtype=torch.int64)"]),
    "short": ("i>i b>i", ["{0}.short().long()", "{0}.to(torch.int16).int()"]),
    "char": ("i>i b>i", ["{0}.char().long()", "{0}.to(torch.int8).int()"]),
    "byte": ("i>i b>i", ["{0}.byte().long()", "{0}.to(torch.uint8).int()"]),
}
ALIASES = {
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "negative": "neg",
    "absolute": "abs",
    "clip": "clamp",
    "fix": "trunc",
    **{f"arc{name}": f"a{name}" for name in ("sin", "cos", "tan", "tan2", "sinh", "cosh", "tanh")},
    "not_equal": "ne",
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
}


# The operations whose results have rounding errors.
_ROUNDED = (
    "exp exp2 expm1 tanh sigmoid expit erf erfc sin cos tan asin acos atan atan2 sinh cosh asinh "
    "acosh atanh log log1p log2 log10 div reciprocal sqrt rsqrt leaky_relu elu selu celu gelu silu "
    "mish softplus logsigmoid softsign tanhshrink logaddexp lerp addcmul addcdiv"
)
ROUNDED = frozenset(_ROUNDED.split())


@dataclasses.dataclass(frozen=True)
class Captured:
    """A tensor that functions capture: its numbers, and for each dimension what may index it."""

    numbers: Tensor
    dims: str  # b, h, i, j: the dimension has an element for each; otherwise a letter x


@dataclasses.dataclass
class Sizes:
    batch: int
    heads: int
    queries: int
    keys: int


def strided(rng: random.Random, x: Tensor) -> Tensor:
    """The same numbers with other strides: transposed, with gaps, or at an offset."""
    how = rng.randrange(5)
    if how == 0 and x.dim() > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if how == 1 and x.dim() > 0:
        return torch.stack([x, torch.full_like(x, 1)], -1).flatten(-2)[..., ::2]
    if how == 2 and x.dim() > 0:
        return torch.cat([torch.ones_like(x[:1]), x])[1:]
    return x


def captures(rng: random.Random, of: Sizes, dtype: torch.dtype) -> dict[str, Captured]:
    """What the functions of one problem may capture. `dtype` is the dtype of the scores."""
    B, H, L, S = of.batch, of.heads, of.queries, of.keys
    found: dict[str, Captured] = {}

    def number(name: str, dims: str, *sizes: int) -> None:
        kept = dtype if rng.random() < 0.6 else rng.choice(FLOATS)
        x = torch.randint(-8, 9, sizes) / 8
        found[name] = Captured(strided(rng, x.to(kept)), dims)

    def whole(name: str, dims: str, *sizes: int, most: int = 5) -> None:
        kept = rng.choice([torch.int64, torch.int64, torch.int32])
        found[name] = Captured(strided(rng, torch.randint(0, most, sizes).to(kept)), dims)

    number("temperature", "")
    number("slopes", "h", H)
    number("of_entries", "bx", B, 5)
    number("of_rows", "bi", B, L + rng.choice([0, 3]))
    number("of_keys", "hj", H, S)
    number("bias", "ij", L + rng.choice([0, 0, 6]), S + rng.choice([0, 0, 2]))
    number("pairs", rng.choice(["bhij", "hij"]), *([B, H, L, S]))
    if found["pairs"].dims == "hij":
        found["pairs"] = dataclasses.replace(found["pairs"], numbers=found["pairs"].numbers[0])
    number("table", "x", 20)
    number("buckets", "hx", H, 9)
    number("rows_table", "bix", B, L, 7)
    number("keys_table", "hjx", H, S, 6)
    whole("ids", "j", max(L, S))
    whole("texts", "bj", B, max(L, S), most=3)
    whole("offset", "b", B, most=4)
    found["flags"] = Captured(torch.randint(0, 5, (max(L, S),)) > 1, "j")
    return found


def rendered(text: str, plain: bool) -> str:
    """Writes the lookups of a text, «name|style|index¦index», innermost first."""

    def lookup(found: re.Match[str]) -> str:
        name, style, indices = found[1].split("|", 2)
        places = indices.split("¦")
        if not indices:
            return name
        if style == "take":
            return f"torch.take({name}, torch.as_tensor({indices}).long())"
        if style == "chain" and not plain:
            return name + "".join(f"[{x}]" for x in places)
        if style == "ellipsis" and not plain:
            return f"{name}[..., {places[-1]}][{', '.join(places[:-1])}]"
        return f"{name}[{', '.join(places)}]"

    while "«" in text:
        text = re.sub("«([^«»]*)»", lookup, text)
    return text


class Grammar:
    """Draws the text of one function.

    Args:
        in_mask: whether it is a mask_mod, whose whole numbers may be large and which has no score.
    """

    def __init__(
        self, rng: random.Random, sizes: Sizes, captured: dict[str, Captured], in_mask: bool
    ) -> None:
        self.rng, self.sizes, self.captured, self.in_mask = rng, sizes, captured, in_mask
        self.most = 2**62 if in_mask else 2**30
        self.special = rng.random() < 0.15
        self.variables: list[tuple[str, Text]] = []  # (type, name)
        self.lines: list[str] = []
        self.of_score: set[str] = set()  # variables that depend on the score, which index nothing

    def pick(self, *choices: Callable[[], Text]) -> Text:
        return self.rng.choice(choices)()

    # Leaves

    def constant(self, exact: bool) -> Text:
        if self.special and self.rng.random() < 0.3:
            return Text(self.rng.choice(SPECIAL[:-2] if exact else SPECIAL), (0, 1))
        if not exact and self.rng.random() < 0.3:
            return Text(self.rng.choice(INEXACT))
        return Text(self.rng.choice(USUAL), (2, 2))

    def whole_constant(self) -> Text:
        n = self.rng.choice(
            [0, 1, -1, 2, 3, -5, 7, 64, 1000, 2**31 - 1 if self.most > 2**31 else 9]
        )
        return Text(f"({n})" if n < 0 else str(n), whole=abs(n))

    def divisor(self) -> Text:
        n = self.rng.choice([1, 2, 3, -4, 7, 10])
        return Text(f"({n})" if n < 0 else str(n), whole=abs(n))

    def position(self) -> Text:
        """A whole number that is no value of the pair, but of the query or the key or both."""
        of = self.sizes
        longest = max(of.queries, of.keys)
        forms = [
            ("i", of.queries),
            ("j", of.keys),
            ("h", of.heads),
            ("b", of.batch),
            ("(i - j)", longest),
            ("(j - i)", longest),
            ("(i + 3)", longest + 3),
            ("(i + offset[b])", longest + 4),
            ("(2 * j - 1)", 2 * longest),
            ("ids[i]", 5),
            ("ids[j]", 5),
            ("«texts||b¦j»", 3),
            ("«texts|chain|b¦i»", 3),
            ("(i - j).abs()", longest),
            ("(i * 7 - 2)", 7 * longest),
        ]
        text, most = self.rng.choice(forms)
        return Text(text, whole=most)

    def index(self, size: int, of_pair: bool) -> str:
        """An index of a dimension of this size, never outside of it."""
        x = self.whole(1) if of_pair else self.position()
        if (x.whole or 0) >= 2**20 or "score" in x.text or any(n in x.text for n in self.of_score):
            x = self.position()
        forms = [f"{x} % {size}", f"{x}.clamp(0, {size - 1})", f"{x} % {size} - {size}"]
        return self.rng.choice([*forms, str(self.rng.randrange(size))])

    def lookup(self, name: str) -> Text:
        """A number of a captured tensor."""
        of = self.captured[name]
        of_pair = self.rng.random() < 0.4
        extents = {"b": self.sizes.batch, "h": self.sizes.heads, "i": self.sizes.queries}
        extents["j"] = self.sizes.keys
        places = []
        for dim, size in zip(of.dims, of.numbers.shape, strict=True):
            if dim == "x" or (self.rng.random() < 0.15 and of.numbers.dim() > 1):
                places.append(self.index(size, of_pair))
            elif dim == "i" and size > self.sizes.queries and self.rng.random() < 0.5:
                places.append(f"i + {size - self.sizes.queries}")
            elif self.rng.random() < 0.1:
                places.append(f"{dim} - {size}" if size == extents[dim] else dim)
            else:
                places.append(dim)
        styles = ["", "", "", "chain", "ellipsis"]
        if len(places) < 2:
            styles = ["", "", "take"] if places and not of_pair else [""]
        text = f"«{name}|{self.rng.choice(styles)}|{'¦'.join(places)}»"
        dtype = of.numbers.dtype
        if dtype.is_floating_point and dtype.itemsize == 2:
            text += ".float()" if self.in_mask else ".to(score.dtype)"
        return Text(text, (3, 1))

    # Expressions

    def number(self, depth: int, exact: bool = False) -> Text:
        known = [x for t, x in self.variables if t == "f" and (x.bits or not exact)]
        if known and self.rng.random() < 0.4:
            return self.rng.choice(known)
        if depth <= 0:
            if not self.in_mask and self.rng.random() < 0.4:
                return Text("score", (5, 2))
            names = [n for n, x in self.captured.items() if x.numbers.is_floating_point()]
            return self.lookup(self.rng.choice(names))
        return self.operation("e" if exact else "f", depth)

    def whole(self, depth: int) -> Text:
        known = [x for t, x in self.variables if t == "i"]
        if known and self.rng.random() < 0.3:
            return self.rng.choice(known)
        return self.position() if depth <= 0 else self.operation("i", depth)

    def truth(self, depth: int) -> Text:
        known = [x for t, x in self.variables if t == "b"]
        if known and self.rng.random() < 0.3:
            return self.rng.choice(known)
        if depth <= 0:
            x, y = self.position(), self.position()
            return self.pick(
                lambda: Text(f"({x} {self.rng.choice(['<', '<=', '>', '>=', '==', '!='])} {y})"),
                lambda: Text(self.rng.choice(["flags[i]", "flags[j]", "(flags[i] & flags[j])"])),
            )
        return self.operation("b", depth)

    def operation(self, result: str, depth: int) -> Text:
        for _ in range(50):
            name = self.rng.choice(list(WRITTEN))
            if (found := self.written(name, result, depth)) is not None:
                return found
        return {"f": self.number, "e": self.number, "i": self.whole, "b": self.truth}[result](0)

    def written(self, name: str, result: str, depth: int) -> Text | None:
        """An operation by its name; None if it has no such result or the numbers would be large."""
        signatures, forms = WRITTEN[name]
        wanted = {"f": "fe", "e": "e", "i": "iI", "b": "b"}[result]
        fits = [s for s in signatures.split() if s[-1] in wanted]
        if not fits:
            return None
        types = self.rng.choice(fits).partition(">")[0]
        form = self.rng.choice(forms)
        if self.in_mask:
            form = form.replace("score.dtype", "torch.float32").replace("(score)", "(temperature)")
        operands = []
        for t in types:
            if t in "fe":
                operands.append(self.number(depth - 1, exact=t == "e"))
            elif t == "p":  # positive, and not near 0
                operands.append(Text(f"({self.number(depth - 1)}.abs() + 0.5)"))
            elif t == "c":
                operands.append(self.constant(exact=result == "e" or "e" in types))
            else:
                make = {"i": lambda: self.whole(depth - 1), "b": lambda: self.truth(depth - 1)}
                make |= {"n": self.whole_constant, "d": self.divisor}
                operands.append(make[t]())
        for n, t in enumerate(types):
            # What PyTorch's functions and methods take as a tensor alone.
            needs = f"T{{{n}}}" in form or f"M{{{n}}}" in form or f"{{{n}}}." in form
            if needs and t in "cnd":
                return None
        if name == "pow" and "i" in types and not re.search(r"\D[23]\)?$", form):
            return None
        if ("alpha" in form and "b" in types) or ("//" in form and result != "i"):
            return None
        if name in ("minimum", "maximum") and "f" in types and result != "f":
            return None
        if (
            name in ("clamp", "clamp_min", "clamp_max")
            and types == "f" * len(types)
            and "_m" in form
        ):
            return None
        if name.startswith("clamp") and "c" not in types and result != "i" and not self.in_mask:
            # PyTorch's gradient of a bound that is larger than the number raises an error.
            operands[0] = Text(f"({operands[0]} + 0 * score)", operands[0].bits)
        others = [alias for alias, of in ALIASES.items() if of == name]
        if others and self.rng.random() < 0.2:
            form = re.sub(rf"(torch|\}})\.{name}\(", rf"\1.{self.rng.choice(others)}(", form)
        text = form.replace("T{", "{").replace("M{", "{").format(*operands)
        most = self.most_of(name, form, operands)
        if result == "i" and (most is None or most > self.most):
            return None
        bits = self.bits_of(name, form, operands)
        if result == "e" and (bits is None or sum(bits) > 22):
            return None
        if result == "i":
            return Text(f"({text})", whole=most)
        return Text(f"({text})", bits if bits and sum(bits) <= 22 else None)

    def bits_of(self, name: str, form: str, operands: list[Text]) -> Bits | None:
        """The bits of a result, if it has no rounding error."""
        if name in ("int", "long") and self.special:
            return None
        if name in ("half", "bfloat16"):
            return 3, 13
        of = [(0, x.whole.bit_length()) if x.whole is not None else x.bits for x in operands]
        if name in ("where", "masked_fill"):
            del of[int(name == "masked_fill")]
        known = [x for x in of if x is not None]
        if (
            len(known) < len(of)
            or name in ROUNDED
            or (name == "pow" and "** 2" not in form and ", 2" not in form)
        ):
            return None
        after, before = (max(x[n] for x in known) for n in (0, 1))
        if name in ("mul", "square", "pow"):
            a, b = known[0], known[-1]
            return a[0] + b[0], a[1] + b[1]
        more = 2 if "alpha" in form else 1
        return after, before + (more if name in ("add", "sub", "remainder", "floor_divide") else 0)

    def most_of(self, name: str, form: str, operands: list[Text]) -> int | None:
        of = [x.whole if x.whole is not None else 1 for x in operands]
        if name == "mul":
            return of[0] * of[1]
        if name in ("add", "sub"):
            return sum(of) + (of[1] if "alpha" in form else 0)
        if name == "pow":
            return of[0] ** 3  # type: ignore[no-any-return]
        if name == "bitwise_left_shift":
            return of[0] << min(of[1], 64)
        if name in ("int", "long") and operands[0].whole is None and operands[0].bits:
            return None if self.special else 1 << operands[0].bits[1]  # an infinity has none
        if name == "remainder":
            return of[1]
        if name.startswith("bitwise"):
            return 2 * max(of) + 2
        return max(of) + 1

    # Statements

    def function(self, name: str, arguments: str, result: str) -> str:
        """The source of a whole function."""
        for n in range(self.rng.randrange(3)):
            t = self.rng.choice("fib" if result == "f" else "ib")
            make = {"f": lambda: self.number(2, exact=True), "i": lambda: self.whole(2)}
            make["b"] = lambda: self.truth(1)
            value = make[t]()
            if len(value.text) < 200:
                self.lines.append(f"x{n} = {value}")
                if "score" in value.text or any(x in value.text for x in self.of_score):
                    self.of_score.add(f"x{n}")
                self.variables.append((t, Text(f"x{n}", value.bits, value.whole)))
        if result == "b":
            self.lines.append(f"return {self.truth(self.rng.randrange(1, 4))}")
        else:
            self.lines.append(f"y = {self.number(self.rng.randrange(1, 4))}")
            self.lines.append(
                self.rng.choice(["y = y + score", "y = score - y", "y = y * score", ""])
            )
            for step in ("y += 0.5", "y *= 1.5", "y -= 2", "y /= 2"):
                if self.lines[-1] and self.rng.random() < 0.1:
                    self.lines.append(step)
            self.lines.append(
                "return y + 0 * score"
                if self.rng.random() < 0.5
                else "return y.to(score.dtype) + score * 0.5"
            )
        body = "\n".join(f"    {line}" for line in self.lines if line)
        return f"def {name}({arguments}):\n{body}\n"
