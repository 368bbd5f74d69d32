"""A fixed colour for each family of optimizers, so that they look the same in every report.

The colours themselves are variables in page.css, one set for light and one for dark; they stay
apart for the common kinds of colour blindness (lightness differs where hue may not).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

FAMILIES = {
    "adamw", "mars-adamw", "muon", "mars-m", "lion", "mars-lion", "soap", "mars-shampoo", "adopt",
}  # fmt: skip
SPARE = 5  # colours for optimizers without a family, and for a second one of a family
DASHES = ("", "7 3", "2 3", "9 3 2 3")  # of the second, third … that has a colour


def colours(optimizers: Sequence[str]) -> list[tuple[str, str]]:
    """(name of a CSS variable, dash pattern) for each.

    >>> colours(["adamw", "mars-m", "adamw", "my:Own"])
    [('adamw', ''), ('mars-m', ''), ('spare-0', ''), ('spare-1', '')]
    """
    spare = 0
    seen: Counter[str] = Counter()
    chosen = []
    for optimizer in optimizers:
        name = optimizer.casefold()
        if name not in FAMILIES or seen[name]:
            name, spare = f"spare-{spare % SPARE}", spare + 1
        chosen.append((name, DASHES[seen[name] % len(DASHES)]))
        seen[name] += 1
    return chosen
