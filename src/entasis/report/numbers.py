"""Numbers as people read them: losses, ratios, counts and bytes as short text with units."""

from __future__ import annotations

import math

NATS_PER_TOKEN = "nats per token"
MINUS = "\N{MINUS SIGN}"
_COUNT_UNITS = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BYTE_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def loss_unit(mask_share: float | None) -> str:
    """The unit of a loss: per token, or, where a share of the tokens is masked and predicted, per masked token."""
    return NATS_PER_TOKEN if mask_share is None else "nats per masked token"


def nats(value: float, *, sign: bool = False) -> str:
    """A loss or difference with four decimals, or as many more as two significant digits need."""
    return _fixed(value, max(4, _decimals(value, digits=2)), sign=sign)


def signed(value: float) -> str:
    """An exponent or other number of the order of one, with its sign and two decimals; what rounds to zero has none."""
    text = f"{value:+.2f}".replace("-", MINUS)
    return text[1:] if text[1:] == "0.00" else text


def interval(low: float, high: float) -> str:
    """Both ends with their sign and one number of decimals, enough that neither end is rounded to zero."""
    larger, smaller = sorted((low, high), key=abs, reverse=True)
    decimals = max(4, _decimals(larger, digits=2), _decimals(smaller, digits=1))
    return f"{_fixed(low, decimals, sign=True)} to {_fixed(high, decimals, sign=True)}"


def _decimals(value: float, digits: int) -> int:
    """Decimals that show so many significant digits, at most 12."""
    return 0 if value == 0 else min(12, digits - 1 - math.floor(math.log10(abs(value))))


def _fixed(value: float, decimals: int, *, sign: bool) -> str:
    return f"{value:{'+' if sign else ''}.{decimals}f}".replace("-", MINUS)


def significant(value: float, digits: int = 4) -> str:
    """A number with so many significant digits, never in exponent form, whole numbers above that unrounded."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}".replace("-", MINUS)


def count(value: float, unit: str = "") -> str:
    """A count with a decimal prefix: `1.235 M`; with a unit `1.235 MFLOP`."""
    for size, prefix in _COUNT_UNITS:
        if abs(value) >= size:
            return f"{significant(value / size)} {prefix}{unit}"
    return f"{significant(value) if value % 1 else f'{value:,.0f}'} {unit}".strip()


def binary_bytes(value: float) -> str:
    """A size with a binary prefix: `12.5 KiB`."""
    for size, unit in _BYTE_UNITS:
        if abs(value) >= size:
            return f"{significant(value / size)} {unit}"
    return f"{value:,.0f} bytes"


def ratio(value: float | None) -> str:
    """A ratio with three decimals below ten; a dash where there is none."""
    if value is None:
        return "–"
    return f"{value:.3f}×" if abs(value) < 10 else f"{significant(value, 3)}×"


def percent(share: float) -> str:
    """A share as a percentage of at most three significant digits."""
    return f"{100 * share:.3g} %"


def rate(value: float) -> str:
    """A learning rate: `3e-3`, `1.5e-3`."""
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
