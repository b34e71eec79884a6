"""Tables in markdown, as the pages show them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with a line for each row."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def ratios(own: Sequence[float], others: Sequence[float]) -> str:
    """How one driver's steps compare with another's of the same turns: median, least and most."""
    return spread([a / b for a, b in zip(own, others, strict=True)])


def spread(found: Sequence[float], decimals: int = 3) -> str:
    """Median, least and most."""
    median, least, most = (f"{pick(found):.{decimals}f}" for pick in (statistics.median, min, max))
    return f"{median} ({least}-{most})"
