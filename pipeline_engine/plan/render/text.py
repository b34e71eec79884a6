"""Text: a timeline as a grid of characters, a row for each rank and a column for each unit of time.

rank 0 | F0 F1 .. .. B0 -- .. B1 --
rank 1 | .. F0 B0 -- F1 B1 --
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

from pipeline_engine.plan.render.scene import Block, Drawable, Scene, scene_of

_LETTERS = {"forward": "F", "backward": "B", "input": "I", "weight": "W", "loss": "L"}
_MOST_COLUMNS = 400


def as_text(thing: Drawable, order: Sequence[int] = ()) -> str:
    """Draw as text: two dots for idle time, two dashes for an action that goes on.

    A stage's number stands in front of the letter if its rank has several.  A column is as wide as a typical forward;
    shorter actions take a whole one too, except for the caller's code, which is left out then.

    Args:
        thing: a schedule, a timeline or a trace.
        order: for each place in the schedule the microbatch that stands there, to be shown instead.
    """
    scene = scene_of(thing, order)
    unit = _unit(scene)
    names = [[_name(block, scene.layers > 1) for block in blocks] for blocks in scene.blocks]
    width = max((len(name) for each in names for name in each), default=2)
    lines = []
    for rank, blocks in enumerate(scene.blocks):
        cells = _cells(blocks, names[rank], unit)
        lines.append(
            f"rank {rank:<{len(str(len(scene.blocks) - 1))}} | " + " ".join(f"{cell:<{width}}" for cell in cells)
        )
    return "\n".join(line.rstrip() for line in lines)


def _unit(scene: Scene) -> float:
    """A typical forward is one column wide, unless that makes too many columns."""
    forwards = [block.end - block.start for blocks in scene.blocks for block in blocks if block.kind == "forward"]
    return max(median_low(forwards or [1.0]), scene.makespan / _MOST_COLUMNS)


def _name(block: Block, with_stage: bool) -> str:
    if block.kind == "loss" or not with_stage:
        return f"{_LETTERS[block.kind]}{block.label}"
    return block.name


def _cells(blocks: Sequence[Block], names: Sequence[str], unit: float) -> list[str]:
    cells: list[str] = []
    for block, name in zip(blocks, names, strict=True):
        if block.kind == "loss" and block.end - block.start < unit / 2:
            continue
        start, end = round(block.start / unit), round(block.end / unit)
        cells += [".."] * (start - len(cells))
        cells += [name] + ["--"] * (end - len(cells) - 1)
    return cells
