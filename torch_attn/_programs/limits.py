"""The least and the largest number that an operation on whole numbers can return.

With them, the list knows which whole numbers need 64 bits, and where an index is inside its table.
"""

from __future__ import annotations

Limits = tuple[int, int]  # the least and the largest number


def within(limits: Limits, bits: int) -> bool:
    """Returns whether signed whole numbers of this many bits hold all numbers within limits."""
    most: int = 2 ** (bits - 1) - 1
    return -most - 1 <= limits[0] and limits[1] <= most


def limits_of(name: str, of: list[Limits]) -> Limits | None:
    """Returns the limits of an operation on whole numbers with these limits; None if unknown."""
    (a, b), (c, d) = of[0], of[-1]
    if name == "add":
        return a + c, b + d
    if name == "sub":
        return a - d, b - c
    if name == "mul":
        products = a * c, a * d, b * c, b * d
        return min(products), max(products)
    if name == "neg":
        return -b, -a
    if name == "abs":
        return max(a, -b, 0), max(b, -a)
    if name == "minimum":
        return min(a, c), min(b, d)
    if name == "maximum":
        return max(a, c), max(b, d)
    if name == "clamp":
        (least, most), (c, d) = of[1:]
        return min(max(a, least), c), min(max(b, most), d)
    if name == "where":
        return min(a, c), max(b, d)
    if name == "remainder":
        return min(c + 1, 0), max(d - 1, 0)
    if name == "fmod":
        rest = max(abs(c), abs(d), 1) - 1
        return max(min(a, 0), -rest), min(max(b, 0), rest)
    if name == "floor_divide":
        divisors = [n for n in (c, d, -1, 1) if n and c <= n <= d]
        quotients = [x // n for x in (a, b) for n in divisors]
        if c <= 0 <= d:  # by 0: 0
            quotients.append(0)
        return min(quotients), max(quotients)
    if not all(type(x) is int for limits in of for x in limits):
        return None  # symbolic numbers have no bits
    if name in ("shift_left", "shift_right"):
        # A negative number, or more bits than there are, shifts all bits out.
        counts = [min(max(n, 0), 64) for n in (c, d)]
        shifted = [x << n if name == "shift_left" else x >> n for x in (a, b) for n in counts]
        return min(*shifted, -(a < 0)), max(*shifted, 0)
    if name == "not":
        return ~b, ~a
    if name == "and" and max(a, c) >= 0:
        return 0, min(x[1] for x in of if x[0] >= 0)
    power = 1 << max(abs(x) for limits in of for x in limits).bit_length()
    return 0 if min(a, c) >= 0 else -power, power - 1
