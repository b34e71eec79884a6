"""SVG: timelines one above the other on one scale, ranks as rows, idle time hatched, memory below.

Every picture is a list of strings that are joined at the end; nothing but the text of the file is made here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise
from math import floor, log10

from attrs import frozen

from pipeline_engine.plan.render import palette
from pipeline_engine.plan.render.scene import KINDS, Block, Drawable, Scene, scene_of

_LEFT, _RIGHT, _TOP = 70.0, 24.0, 46.0
_TITLE, _AXIS, _GAP = 26.0, 30.0, 26.0
_CURVE = 84.0
_SMALLEST = 6.5  # pixels of a label; the hint of a block says what stands in a smaller one
_FONT = "font-family='Inter, Helvetica, Arial, sans-serif'"


@frozen
class _Frame:
    """Where things stand: pixels for seconds and for ranks."""

    width: float
    seconds: float
    row: float

    def x(self, second: float) -> float:
        return _LEFT + second * self.width / self.seconds

    def height(self, scene: Scene) -> float:
        return _TITLE + len(scene.blocks) * self.row + _AXIS + _TITLE + _CURVE + _GAP


def as_svg(panels: Mapping[str, Drawable] | Drawable, order: Sequence[int] = ()) -> str:
    """Draw as SVG.

    Args:
        panels: what is drawn, one above the other on one time scale, by title: for example
            ``{"planned": pe.simulate(schedule, trace.costs()), "measured": trace}``; or one thing without a title.
        order: for each place in the schedule the microbatch that stands there, to be shown instead.
    """
    named = panels if isinstance(panels, Mapping) else {"": panels}
    scenes = {title: scene_of(thing, order) for title, thing in named.items()}
    frame = _frame(list(scenes.values()))
    total = _TOP + sum(frame.height(scene) for scene in scenes.values())
    whole = _LEFT + frame.width + _RIGHT
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {whole:.0f} {total:.0f}' width='{whole:.0f}' "
        f"height='{total:.0f}' {_FONT}>",
        _hatching(),
        f"<rect width='{whole:.0f}' height='{total:.0f}' fill='#ffffff'/>",
        *_legend(list(scenes.values())),
    ]
    top = _TOP
    for title, scene in scenes.items():
        lines += _panel(title, scene, frame, top)
        top += frame.height(scene)
    return "\n".join([*lines, "</svg>\n"])


def _frame(scenes: Sequence[Scene]) -> _Frame:
    seconds = max((scene.makespan for scene in scenes), default=0.0) or 1.0
    blocks = [block for scene in scenes for blocks in scene.blocks for block in blocks if block.kind != "loss"]
    lengths = sorted(block.end - block.start for block in blocks)
    typical = lengths[len(lengths) // 10] if lengths else seconds
    ranks = max((len(scene.blocks) for scene in scenes), default=1)
    return _Frame(
        width=min(max(seconds / typical * 12.0, 900.0), 2600.0), seconds=seconds, row=28.0 if ranks <= 8 else 21.0
    )


def _hatching() -> str:
    return (
        "<defs><pattern id='idle' width='6' height='6' patternUnits='userSpaceOnUse' patternTransform='rotate(45)'>"
        f"<rect width='6' height='6' fill='{palette.IDLE}'/>"
        f"<line x1='0' y1='0' x2='0' y2='6' stroke='{palette.HATCH}' stroke-width='2'/></pattern></defs>"
    )


def _legend(scenes: Sequence[Scene]) -> Iterator[str]:
    there = {kind for scene in scenes for kind in scene.kinds}
    entries = [(palette.FILLS[kind], palette.WORDS[kind]) for kind in KINDS if kind in there]
    x = _LEFT
    for colour, word in [*entries, ("url(#idle)", "idle")]:
        yield f"<rect x='{x:.1f}' y='14' width='14' height='14' rx='2' fill='{colour}'/>"
        yield _text(x + 20, 25.5, word, size=12)
        x += 46 + 5.6 * len(word)
    if any(scene.layers > 1 for scene in scenes):
        yield _text(x, 25.5, "lighter: a rank's later stages", size=12, colour=palette.FAINT)


def _panel(title: str, scene: Scene, frame: _Frame, top: float) -> Iterator[str]:
    facts = f"{_number(scene.makespan)} s, {scene.bubble:.1%} idle, {scene.most_held} in flight at most"
    yield _text(_LEFT, top + 14, title, size=14, weight="bold") if title else ""
    yield _text(_LEFT + (9.2 * len(title) + 14 if title else 0), top + 14, facts, size=12, colour=palette.FAINT)
    rows = top + _TITLE
    for rank, blocks in enumerate(scene.blocks):
        yield from _row(rank, blocks, scene, frame, rows + rank * frame.row)
    bottom = rows + len(scene.blocks) * frame.row
    yield from _axis(frame, rows, bottom)
    yield from _curves(scene, frame, bottom + _AXIS + _TITLE)


def _row(rank: int, blocks: Sequence[Block], scene: Scene, frame: _Frame, top: float) -> Iterator[str]:
    height = frame.row - 4
    right = frame.x(scene.makespan) - _LEFT
    yield _text(_LEFT - 10, top + height / 2 + 4.2, f"rank {rank}", size=12, anchor="end")
    yield f"<rect x='{_LEFT:.1f}' y='{top:.1f}' width='{right:.2f}' height='{height:.1f}' fill='url(#idle)'/>"
    for block in blocks:
        yield from _block(block, scene.layers, frame, top, height)


def _block(block: Block, layers: int, frame: _Frame, top: float, height: float) -> Iterator[str]:
    left, width = frame.x(block.start), frame.x(block.end) - frame.x(block.start)
    colour = palette.fill(block.kind, block.layer, layers)
    gap = min(0.5, width / 8)
    hint = escape(f"{block.name}: {_number(block.start)} to {_number(block.end)} s", quote=True)
    yield (
        f"<rect x='{left + gap:.2f}' y='{top:.1f}' width='{width - 2 * gap:.2f}' height='{height:.1f}' "
        f"rx='{min(2.0, width / 6):.1f}' fill='{colour}'><title>{hint}</title></rect>"
    )
    size = min(12.0, height * 0.6, (width - 2) / (0.58 * len(block.label)))
    if size >= _SMALLEST:
        middle = top + height / 2 + size * 0.36
        yield _text(left + width / 2, middle, block.label, size=size, colour=palette.ink_on(colour), anchor="middle")


def _axis(frame: _Frame, top: float, bottom: float) -> Iterator[str]:
    step = _step(frame.seconds, frame.width / 90)
    places = [step * tick for tick in range(floor(frame.seconds / step + 1e-9) + 1)]
    for second in places:
        x = frame.x(second)
        yield f"<line x1='{x:.1f}' y1='{bottom:.1f}' x2='{x:.1f}' y2='{bottom + 4:.1f}' stroke='{palette.FAINT}'/>"
        yield _text(x, bottom + 17, _number(second), size=11, colour=palette.FAINT, anchor="middle")
    yield _text(_LEFT - 10, bottom + 17, "seconds", size=11, colour=palette.FAINT, anchor="end")


def _curves(scene: Scene, frame: _Frame, top: float) -> Iterator[str]:
    """Activations in flight on every rank over the same time."""
    ranks, most = len(scene.held), scene.most_held or 1
    base = top + _CURVE - 10
    tall = _CURVE - 16
    yield _text(_LEFT, top - 8, "activations in flight", size=12, colour=palette.FAINT)
    yield from _ranks_legend(ranks, _LEFT + 136, top - 8)
    right = _LEFT + frame.width
    for number in sorted({0, most // 2, most}):
        y = base - tall * number / most
        yield f"<line x1='{_LEFT:.1f}' y1='{y:.1f}' x2='{right:.1f}' y2='{y:.1f}' stroke='{palette.HATCH}'/>"
        yield _text(_LEFT - 10, y + 4, str(number), size=11, colour=palette.FAINT, anchor="end")
    for rank, steps in enumerate(scene.held):
        yield _curve([(frame.x(second), base - tall * number / most) for second, number in steps], rank, ranks)


def _curve(points: Sequence[tuple[float, float]], rank: int, ranks: int) -> str:
    """Level stretches in full, and steps faintly, for many ranks step at a time."""
    level = "".join(f"M{x:.1f} {y:.1f}H{after:.1f}" for (x, y), (after, _) in pairwise(points))
    steps = "".join(f"M{x:.1f} {before:.1f}V{y:.1f}" for (_, before), (x, y) in pairwise(points))
    colour = palette.of_rank(rank, ranks)
    return (
        f"<g fill='none' stroke='{colour}'><title>rank {rank}</title>"
        f"<path d='{steps}' stroke-width='1' opacity='0.3'/>"
        f"<path d='{level}' stroke-width='{2 if ranks <= 8 else 1.6}'/></g>"
    )


def _ranks_legend(ranks: int, x: float, y: float) -> Iterator[str]:
    """A line for each rank with its name, or for many ranks all their colours between the first and the last name."""
    if ranks > 8:
        yield _text(x, y, "rank 0", size=11, colour=palette.FAINT)
        for rank in range(ranks):
            yield _swatch(x + 42 + 96.0 * rank / ranks, y, 96.0 / ranks, palette.of_rank(rank, ranks))
        yield _text(x + 146, y, f"rank {ranks - 1}", size=11, colour=palette.FAINT)
        return
    for rank in range(ranks):
        yield _swatch(x, y, 14.0, palette.of_rank(rank, ranks))
        yield _text(x + 19, y, f"rank {rank}", size=11, colour=palette.FAINT)
        x += 68.4


def _swatch(x: float, y: float, width: float, colour: str) -> str:
    return f"<rect x='{x:.1f}' y='{y - 5.5:.1f}' width='{width:.1f}' height='3' fill='{colour}'/>"


def _text(
    x: float, y: float, text: str, *, size: float, colour: str = palette.INK, anchor: str = "start", weight: str = ""
) -> str:
    bold = f" font-weight='{weight}'" if weight else ""
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size:.1f}' fill='{colour}' text-anchor='{anchor}'{bold}>"
        f"{escape(text)}</text>"
    )


def _step(length: float, most: float) -> float:
    """The smallest of 1, 2, 5, 10, ... that divides ``length`` into at most ``most`` steps."""
    least = length / max(most, 1.0)
    power = 10.0 ** floor(log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def _number(value: float) -> str:
    return f"{value:.4g}"
