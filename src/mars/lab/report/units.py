"""Numbers as people read them: 1.2M tokens, 3 min 20 s, 1.5 GiB."""

from __future__ import annotations

import math

DECIMALS = 4  # of a loss
MINUS = "−"


def tokens(count: float | None) -> str:
    """
    >>> tokens(950), tokens(1_234_567), tokens(2e9), tokens(None)
    ('950', '1.23M', '2B', '–')
    """
    if count is None:
        return "–"
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= unit * 0.9995:
            return _three(count / unit) + name
    return _three(count)


def seconds(value: float | None) -> str:
    """
    >>> seconds(0.0123), seconds(4.2), seconds(200), seconds(7380), seconds(180000)
    ('12.3 ms', '4.2 s', '3 min 20 s', '2 h 3 min', '2 d 2 h')
    >>> seconds(59.97), seconds(3599.7), seconds(86399.9)
    ('1 min', '1 h', '1 d')
    """
    if value is None:
        return "–"
    if value < 0.9995:
        return f"{_three(value * 1e3)} ms"
    if value < 59.95:
        return f"{_three(value)} s"
    for unit, name, small, part in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if round(value / small) * small >= unit:
            whole, rest = divmod(round(value / small), unit // small)
            return f"{whole} {name}" + (f" {rest} {part}" if rest else "")
    return "–"


def size(count: float | None) -> str:
    """
    >>> size(1536), size(3 * 2**30), size(None)
    ('1.5 KiB', '3 GiB', '–')
    """
    if count is None:
        return "–"
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{_three(count / unit)} {name}"
    return f"{_three(count)} B"


def loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.{DECIMALS}f}"


def accuracy(value: float | None) -> str:
    """
    >>> accuracy(0.95287), accuracy(None)
    ('95.29%', '–')
    """
    return "–" if value is None else f"{100 * value:.2f}%"


def signed(value: float | None, decimals: int = DECIMALS) -> str:
    """
    >>> signed(0.01), signed(-0.25), signed(0), signed(1.5, 2)
    ('+0.0100', '−0.2500', '0.0000', '+1.50')
    """
    if value is None:
        return "–"
    text = f"{abs(value):.{decimals}f}"
    if float(text) == 0:
        return text
    return ("+" if value > 0 else MINUS) + text


def rate(value: float) -> str:
    """
    >>> rate(0.003), rate(1.2e-05), rate(0.0001)
    ('0.003', '1.2e-5', '1e-4')
    """
    if value and abs(value) < 1e-3:
        digits, power = f"{value:.3e}".split("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    return f"{value:.4g}"


def share(value: float | None) -> str:
    """
    >>> share(0.0123), share(0.25)
    ('1.2%', '25%')
    """
    if value is None:
        return "–"
    return f"{value:.0%}" if value >= 0.0995 else f"{value:.1%}"


def about(text: str, doubt: object) -> str:
    """A figure, marked as a rough one if there is a doubt.

    >>> about("4.2 s", "busy"), about("4.2 s", None), about("–", "busy")
    ('~4.2 s', '4.2 s', '–')
    """
    return f"~{text}" if doubt and text != "–" else text


def _three(value: float) -> str:
    """Three significant digits, no trailing zeros, no exponent."""
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value)) + 1e-12))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def count(n: int, what: str) -> str:
    """A number of things.

    >>> count(1, "run"), count(2, "run")
    ('1 run', '2 runs')
    """
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"
