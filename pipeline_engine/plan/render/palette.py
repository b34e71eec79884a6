"""Palette: colours that stay apart also for a colour-blind reader, and in grey.

Source: Okabe and Ito 2008, Color Universal Design (blue, orange, vermillion, bluish green, reddish purple), lightened
or darkened so that the lightness differs too.
"""

from __future__ import annotations

from typing import Final

FILLS: Final = {
    "forward": "#2b6cb0",
    "backward": "#f2a93b",
    "input": "#f2a93b",
    "weight": "#064a3b",
    "loss": "#e6cfe2",
}
WORDS: Final = {
    "forward": "forward",
    "backward": "backward",
    "input": "backward, input half",
    "weight": "backward, weight half",
    "loss": "the caller's loss",
}
INK: Final = "#1f2933"
FAINT: Final = "#7b8794"
IDLE: Final = "#f4f5f7"
HATCH: Final = "#d5dae1"
_RANKS: Final = ("#1b3a6b", "#7b3fa0", "#d1495b", "#e8962e")


def fill(kind: str, layer: int, layers: int) -> str:
    """The colour of an action; a rank's later stages are lighter."""
    return mixed(FILLS[kind], "#ffffff", 0.5 * layer / max(layers - 1, 1)) if layers > 1 else FILLS[kind]


def ink_on(colour: str) -> str:
    """Dark or white, whichever is better read on ``colour``."""
    red, green, blue = rgb(colour)
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"


def of_rank(rank: int, ranks: int) -> str:
    """From dark blue for the first rank over purple and red to orange for the last: darker means earlier."""
    place = rank / max(ranks - 1, 1) * (len(_RANKS) - 1)
    before = min(int(place), len(_RANKS) - 2)
    return mixed(_RANKS[before], _RANKS[before + 1], place - before)


def mixed(first: str, second: str, share: float) -> str:
    """``share`` of the second colour in the first."""
    parts = [round(a + (b - a) * share) for a, b in zip(rgb(first), rgb(second), strict=True)]
    return "#{:02x}{:02x}{:02x}".format(*parts)


def rgb(colour: str) -> tuple[int, int, int]:
    """``"#rrggbb"`` as three numbers from 0 to 255."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
