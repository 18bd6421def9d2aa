"""Amounts of bytes as texts. In: bytes. Out: a number with its unit, never 0.00 of a large one."""

from __future__ import annotations

__all__ = ["GIB", "bytes_text", "gb_text", "gib_text"]

GIB = 2**30


def bytes_text(count: int) -> str:
    """Bytes in binary units, with three significant digits."""
    amount, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return (
        f"{count} B"
        if unit == "B"
        else f"{amount:.3g} {unit}"
        if amount < 1000
        else f"{amount:.0f} {unit}"
    )


def gb_text(count: float, digits: int = 2) -> str:
    """GB with so many decimals; what these would show as nothing, in binary units."""
    return _text(count, 1e9, "GB", digits)


def gib_text(count: float, digits: int = 2) -> str:
    """GiB with so many decimals; what these would show as nothing, in smaller units."""
    return _text(count, GIB, "GiB", digits)


def _text(count: float, size: float, unit: str, digits: int) -> str:
    amount = count / size
    return f"{amount:.{digits}f} {unit}" if amount >= 10**-digits else bytes_text(round(count))
