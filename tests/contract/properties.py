"""The properties: what each call at each door has to have. A check raises an error, or returns."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from _memory import GuardedMemory, in_sparse_memory, largest_block
from contract.calls import CALLS, Options, inputs
from contract.doors import Door
from contract.textbooks import by_sequence
from helpers import (
    DTYPES,
    LAYOUTS,
    NAN,
    threads_set_to,
    ulp,
)

Check = Callable[..., None]
Named = dict[str, Tensor]
LEARNED = ("alibi_slopes", "sinks", "attn_mask")


def sizes(door: Door, L: int, S: int) -> tuple[int, int]:
    return (S, S) if door.square else (L, S)


def options_of(door: Door, call: str, L: int, S: int, dtype: torch.dtype) -> Options:
    """Terms of the score in float64 where the query is; half types take float32."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return options_in(wide, door.always(L, S) | CALLS[call](L, S))


def results(
    function: Callable[..., Any],
    tensors: tuple[Tensor, ...],
    options: Options,
    *,
    learns: bool = True,
    wanted: tuple[str, ...] = (),
) -> Named:
    """The results and, where they have some, the gradients of a loss of them, in what is wanted."""
    learned = {
        n: x for n in LEARNED if isinstance(x := options.get(n), Tensor) and x.is_floating_point()
    }
    learns = learns and options.get("block_table") is None
    named = dict(zip(("query", "key", "value"), tensors, strict=True)) | learned
    leaves = {n: x.detach().requires_grad_(learns) for n, x in named.items()}
    torch.manual_seed(1)  # for dropout
    found = function(
        *map(leaves.get, ("query", "key", "value")), **options | {n: leaves[n] for n in learned}
    )
    found = [found] if isinstance(found, Tensor) else list(found)
    outputs = {f"result {n}": x for n, x in enumerate(found)}
    losses = [weighed(x) for x in found if x.requires_grad]
    if losses and learns:
        asked = {n: leaves[n] for n in wanted or leaves}
        gradients = torch.autograd.grad(sum(losses), [*asked.values()], materialize_grads=True)
        outputs |= {f"gradient of {n}": g for n, g in zip(asked, gradients, strict=True)}
    return {n: x.detach() for n, x in outputs.items()}


def weighed(result: Tensor) -> Tensor:
    """A sum in which each number has a factor that every dtype has; without infinities."""
    factors = torch.arange(result.numel()).remainder(13).view(result.shape) / 4 - 1.5
    return (result.masked_fill(~result.isfinite(), 0) * factors.to(result.dtype)).sum()


def assert_near(found: Named, expected: Named, close: float, where: str) -> None:
    for name, right in expected.items():
        torch.testing.assert_close(
            found[name],
            right,
            rtol=close,
            atol=close,
            check_dtype=False,
            msg=lambda m, name=name: f"{where}, {name}: {m}",
        )


def of_textbook(door: Door, tensors: tuple[Tensor, ...], options: Options) -> Named:
    return results(
        functools.partial(by_sequence, door.textbook), tensors, options, learns=door.learns
    )


def same_bits(found: Named, expected: Named, what: str) -> None:
    assert found.keys() == expected.keys(), what
    for name, right in expected.items():
        other = found[name] != right
        other &= ~(found[name].isnan() & right.isnan())
        if other.any():
            at = tuple(other.nonzero()[0].tolist())
            raise AssertionError(
                f"{what}: {int(other.sum())} of {other.numel()} numbers of {name} differ; the "
                f"first is [{at}]: {found[name][at].item()!r}, not {right[at].item()!r}"
            )


# --- numbers --------------------------------------------------------------------------------------


def is_the_textbook(door: Door, call: str) -> None:
    """Results and gradients, within a row of tiles and over several."""
    check_textbook(door, call, ((9, 12), (70, 136)))


def check_textbook(door: Door, call: str, lengths: Any) -> None:
    for L, S in (sizes(door, *both) for both in lengths):
        tensors, options = inputs(L, S), options_of(door, call, L, S, torch.float64)
        expected = of_textbook(door, tensors, options)
        found = results(door.call, tensors, options, learns=door.learns)
        assert_near(found, expected, door.close, f"{L} x {S}")


def half_types_are_rounded_once(door: Door, call: str) -> None:
    """At most twice the error of the textbook in float32, rounded, and one ulp of the largest.

    The error of one draw is luck, so the bound takes the largest error of two draws.
    """
    L, S = sizes(door, 17, 68)
    for dtype in (torch.bfloat16, torch.float16):
        options = options_of(door, call, L, S, dtype)
        found: Named = {}
        errors, largest, own = (collections.Counter[str]() for _ in range(3))
        for seed in range(2):
            tensors = inputs(L, S, dtype, seed)
            wide, single = (
                of_textbook(door, tuple(x.to(t) for x in tensors), options_in(t, options))
                for t in (torch.float64, torch.float32)
            )
            if seed == 0:
                found = results(door.call, tensors, options, learns=door.learns)
            for name, right in wide.items():
                rounded = single[name].to(found[name].dtype)
                errors[name] = max(errors[name], distance(rounded, right))
                largest[name] = max(largest[name], distance(right, torch.zeros_like(right)))
                if seed == 0 and found[name].dtype == dtype:
                    own[name] = distance(found[name], right)
        for name, error in own.items():
            bound = 2 * errors[name] + ulp(largest[name], found[name].dtype)
            assert error <= bound, f"{dtype}, {name}: an error of {error:.3g}, allowed {bound:.3g}"


def distance(x: Tensor, y: Tensor) -> float:
    """The largest absolute difference; infinities that are equal have none."""
    return (x.double() - y.double()).masked_fill(x.double() == y, 0).abs().max().item()


def options_in(dtype: torch.dtype, options: Options) -> Options:
    return {
        n: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
        for n, x in options.items()
    }


def nothing_is_too_small(door: Door, call: str) -> None:
    """No queries, no keys, neither: the textbook's results and gradients."""
    check_textbook(door, call, ((0, 12), (9, 0), (0, 0)))


def works_without_autograd(door: Door, call: str) -> None:
    """Its bits may be others than beside autograd's."""
    L, S = sizes(door, 9, 12)
    tensors, options = inputs(L, S), options_of(door, call, L, S, torch.float64)
    expected = results(door.call, tensors, options, learns=door.learns)
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            found = results(door.call, inputs(L, S), options, learns=False)
        assert_near({n: expected[n] for n in found}, found, door.close, off.__name__)


# --- bits -----------------------------------------------------------------------------------------


def threads_change_no_bits(door: Door, call: str) -> None:
    """Nor does a second call."""
    for number, dtype in enumerate(DTYPES):
        L, S = sizes(door, 67 + 64 * number, 132)
        tensors, options = inputs(L, S, dtype), options_of(door, call, L, S, dtype)
        learns = door.learns and not door.by_torch
        run = functools.partial(results, door.call, tensors, options, learns=learns)
        with threads_set_to(1):
            expected = run()
        for threads in (1, 3):
            with threads_set_to(threads):
                same_bits(run(), expected, f"{dtype}, {threads} threads")


def strides_change_no_bits(door: Door, call: str) -> None:
    """What is beside the numbers is NaN. And heads may be more than 2^31 numbers apart, except for
    derivatives: forward mode makes a tangent of a tensor's whole storage."""
    L, S = sizes(door, 35, 68)
    far = {} if door.derives else {"more than 2^31 numbers": in_sparse_memory}
    for n, (layout, place) in enumerate((LAYOUTS | far).items()):
        dtype = DTYPES[n % len(DTYPES)]
        tensors, options = inputs(L, S, dtype), options_of(door, call, L, S, dtype)
        expected = results(door.call, tensors, options, learns=door.learns)
        placed = tuple(map(place, tensors))
        same_bits(results(door.call, placed, options, learns=door.learns), expected, layout)


def some_gradients_have_the_bits_of_all(door: Door, call: str) -> None:
    L, S = sizes(door, 35, 68)
    for dtype in (torch.float32, torch.bfloat16):
        tensors, options = inputs(L, S, dtype), options_of(door, call, L, S, dtype)
        every = results(door.call, tensors, options)
        for name in ("query", "key", "value"):
            some = results(door.call, tensors, options, wanted=(name,))
            same_bits(some, {n: every[n] for n in some}, f"{dtype}, only {name}")


def what_is_beyond_the_lengths_does_not_count(door: Door, call: str) -> None:
    """NaN there changes no bits, and has the gradient 0."""
    for L, S in (sizes(door, 9, 12), sizes(door, 70, 136)):
        for dtype in (torch.float64, torch.bfloat16):
            tensors, options = inputs(L, S, dtype), options_of(door, call, L, S, dtype)
            used = int(options["key_lengths"])
            expected = results(door.call, tensors, options, learns=door.learns)
            query, *others = tensors
            for x in others:
                x[:, :, beyond(options, used, S)] = NAN
            found = results(door.call, (query, *others), options, learns=door.learns)
            same_bits(found, expected, f"{L} x {S}, {dtype}")


def beyond(options: Options, used: int, S: int) -> Any:
    """The rows of keys that no query sees, in pages too."""
    if options.get("block_table") is None:
        return slice(used, None)
    page = S // options["block_table"].numel()
    hidden = options["block_table"][0, used // page :]
    return (hidden[:, None] * page + torch.arange(page)).flatten()


# --- memory ---------------------------------------------------------------------------------------


def memory_is_linear(door: Door, call: str) -> None:
    """No block of memory has a bit for each query and key of a head."""
    L = S = 1024 if "memory_is_linear" in door.lacks else 3072  # seconds less
    tensors, options = inputs(L, S, torch.float32), options_of(door, call, L, S, torch.float32)
    with threads_set_to(1):  # each has a tile or two
        block = largest_block(lambda: results(door.call, tensors, options, learns=door.learns))
    assert 0 < block < L * S / 8, f"a block of {block} bytes; there are {L * S} pairs"


def only_its_tensors_are_read(door: Door, call: str) -> None:
    """They end, and begin, at pages of memory that cannot be read: a read there ends the process,
    and pytest says in which test."""
    for at_end in (True, False):
        for n, dtype in enumerate(DTYPES):
            L, S = sizes(door, 31 + 36 * n, 68 - 20 * n)
            tensors, options = inputs(L, S, dtype), options_of(door, call, L, S, dtype)
            guards = [GuardedMemory(x.numel() * x.element_size(), at_end) for x in tensors]
            placed = tuple(g.tensor(x) for g, x in zip(guards, tensors, strict=True))
            results(door.call, placed, options, learns=door.learns)


# --- subsystems -----------------------------------------------------------------------------------


def fake_tensors_have_the_same_shapes(door: Door, call: str) -> None:
    for L, S in (sizes(door, 9, 12), sizes(door, 1, 68)):
        for dtype in DTYPES:
            tensors, options = inputs(L, S, dtype), options_of(door, call, L, S, dtype)
            real = results(door.call, tensors, options, learns=False)
            mode = FakeTensorMode()
            with mode:
                fake = results(
                    door.call,
                    tuple(map(mode.from_tensor, tensors)),
                    {
                        n: mode.from_tensor(x) if isinstance(x, Tensor) else x
                        for n, x in options.items()
                    },
                    learns=False,
                )
            for name, right in real.items():
                has = [(x.shape, x.dtype, strides(x), x.device) for x in (fake[name], right)]
                assert has[0] == has[1], f"{L} x {S}, {dtype}, {name}: {has[0]}, not {has[1]}"


def strides(x: Tensor) -> list[int]:
    """The strides, but for dimensions of size 1, where a stride means nothing."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


def autocast_casts(door: Door, call: str) -> None:
    """It rounds float32, as if the inputs had been rounded before. It leaves float64 alone."""
    L, S = sizes(door, 9, 68)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        given = torch.float32 if dtype != torch.float64 else dtype
        options = options_of(door, call, L, S, given)
        tensors, mask = inputs(L, S, dtype), options.get("attn_mask")
        cast = {} if mask is None or mask.dtype == torch.bool else {"attn_mask": mask.to(dtype)}
        expected = results(door.call, tensors, options | cast, learns=False)
        with torch.autocast("cpu", torch.bfloat16 if dtype == given else dtype):
            found = results(door.call, tuple(x.to(given) for x in tensors), options, learns=False)
        same_bits(found, expected, f"{dtype}")
        dtypes = [[x.dtype for x in tensors.values()] for tensors in (found, expected)]
        assert dtypes[0] == dtypes[1], dtypes


def dropout_repeats(door: Door, call: str) -> None:
    """With the same seed the same bits, with another one others; with p = 1 nothing is left."""
    L, S = sizes(door, 9, 68)
    tensors, options = inputs(L, S), options_of(door, call, L, S, torch.float64)
    first, second = (results(door.call, tensors, options, learns=door.learns) for _ in range(2))
    same_bits(second, first, "the same seed")
    assert not torch.equal(
        first["result 0"], of_textbook(door, tensors, options | {"dropout_p": 0.0})["result 0"]
    )
    nothing = results(door.call, tensors, options | {"dropout_p": 1.0}, learns=door.learns)
    assert not nothing["result 0"].any()


def _not_random(door: Door, names: set[str]) -> bool:
    return "dropout_p" not in names


def _of_values(door: Door, names: set[str]) -> bool:
    return not door.derives


# Each with the doors, and the names of a call's options, that it is for.
PROPERTIES: dict[Check, Callable[[Door, set[str]], bool]] = {
    is_the_textbook: _not_random,
    half_types_are_rounded_once: lambda door, names: not door.derives and "dropout_p" not in names,
    nothing_is_too_small: lambda door, names: not names & {"dropout_p", "cu_seq_q"},
    works_without_autograd: _of_values,
    threads_change_no_bits: lambda door, names: not (door.derives and door.by_torch),
    strides_change_no_bits: lambda door, names: True,
    some_gradients_have_the_bits_of_all: lambda door, names: (
        door.learns and "block_table" not in names
    ),
    what_is_beyond_the_lengths_does_not_count: lambda door, names: "key_lengths" in names,
    memory_is_linear: lambda door, names: True,
    only_its_tensors_are_read: lambda door, names: True,
    fake_tensors_have_the_same_shapes: _of_values,
    autocast_casts: lambda door, names: not door.derives and "dropout_p" not in names,
    dropout_repeats: lambda door, names: "dropout_p" in names,
}
