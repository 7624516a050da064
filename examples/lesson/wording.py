"""How numbers are written in sentences."""

from __future__ import annotations

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(x: float, digits: int = 3) -> str:
    """Rounded to `digits` significant digits: 0.0927, 4,080, 2.56·10⁻⁷.

    Example:
        >>> number(4082.3), number(2.56e-7), number(-0.5)
        ('4,080', '2.56·10⁻⁷', '−0.5')
    """
    if x != 0 and not 1e-3 <= abs(x) < 1e7:
        mantissa, power = f"{x:.{digits - 1}e}".split("e")
        return f"{mantissa}·10{str(int(power)).translate(_RAISED)}".replace("-", "−")
    rounded = float(f"{x:.{digits}g}")
    text = f"{rounded:,.0f}" if abs(rounded) >= 10 ** (digits - 1) else f"{rounded:.{digits}g}"
    return text.replace("-", "−")


def fixed(x: float, digits: int) -> str:
    """With `digits` decimals: fixed(-0.12345, 3) is "−0.123"."""
    return f"{x:.{digits}f}".replace("-", "−")


def times(factor: float) -> str:
    """A factor: 2.8 times, 366,000 times."""
    return f"{number(factor, 2 if factor < 100 else 3)} times"


def percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def listed(words: list[str]) -> str:
    """a, b and c."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
