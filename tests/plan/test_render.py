"""One renderer for schedules, simulated and measured timelines; files that are read back as they were written."""

from __future__ import annotations

import json
import re
from itertools import combinations
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipeline_engine as pe
from pipeline_engine.plan.files import graph_of_csv
from pipeline_engine.plan.render import palette
from pipeline_engine.plan.render.scene import scene_of
from tests.strategies import schedules

SVG = "{http://www.w3.org/2000/svg}"
PAIR = pe.StageGraph.chain(2, 2)


# Text.


def test_the_grid_is_the_picture() -> None:
    assert pe.as_text(pe.build("1f1b", PAIR, 2)) == (
        "rank 0 | F0 F1 .. .. B0 -- .. B1 --\n"  # a column is a second
        "rank 1 | .. F0 B0 -- F1 B1 --"
    )


def test_the_grid_shows_loss_halves_stages_and_the_callers_numbers() -> None:
    slow = pe.simulate(pe.build("gpipe", PAIR, 1), pe.Costs(loss=2.0))
    assert "L0 --" in pe.as_text(slow)
    looped = pe.build("interleaved", pe.StageGraph.chain(4, 2, "looped"), 2)
    assert pe.as_text(looped).startswith("rank 0 | 0F0 0F1 2F0 2F1")
    assert pe.as_text(pe.build("gpipe", PAIR, 2), order=(7, 5)).startswith("rank 0 | F7 F5")
    assert re.search(r"I0 W0", pe.as_text(pe.build("zb-h1", PAIR, 2)))


@given(schedules(max_ranks=4, max_microbatches=9))
def test_every_action_is_in_the_grid(schedule: pe.Schedule) -> None:
    words = pe.as_text(schedule).split()
    computing = [word for word in words if re.fullmatch(r"\d*[FBIW]\d+", word)]
    assert len(computing) == sum(map(len, schedule.programs))


# SVG.


def blocks_in(svg: str) -> list[ElementTree.Element]:
    return [rect for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]


@given(schedules(max_ranks=4, max_microbatches=9))
def test_an_svg_has_a_block_for_every_action_and_rows_for_ranks(schedule: pe.Schedule) -> None:
    blocks = blocks_in(pe.as_svg(schedule))
    assert len(blocks) == sum(map(len, schedule.programs))
    if schedule.num_microbatches:
        assert len({block.get("y") for block in blocks}) == schedule.graph.num_ranks


def test_blocks_lie_where_the_seconds_are() -> None:
    blocks = blocks_in(pe.as_svg(pe.build("1f1b", PAIR, 2)))
    first, second = blocks[0], blocks[1]
    width = float(first.get("width") or 0) + 1.0  # a pixel is left free between blocks
    assert float(second.get("x") or 0) - float(first.get("x") or 0) == pytest.approx(width, abs=0.02)


def test_planned_stands_above_measured_on_one_scale() -> None:
    schedule = pe.build("1f1b", PAIR, 4)
    planned, measured = pe.simulate(schedule, pe.Costs()), pe.simulate(schedule, pe.Costs(latency=0.5, loss=0.5))
    svg = pe.as_svg({"planned": planned, "measured <1>": pe.Trace(schedule, (), measured.spans)})
    assert svg.index("planned") < svg.index("measured &lt;1&gt;")
    blocks = [block for block in blocks_in(svg) if "0F0" in (block.findtext(f"{SVG}title") or "")]
    assert len(blocks) == 2 and blocks[0].get("width") == blocks[1].get("width")
    assert "the caller's loss" in "".join(ElementTree.fromstring(svg).itertext())


def test_idle_time_is_hatched_and_memory_is_drawn() -> None:
    svg = pe.as_svg(pe.build("1f1b", PAIR, 2))
    assert svg.count("fill='url(#idle)'") == 2 + 1  # one for each rank and one in the legend
    assert "activations in flight" in svg and "rank 1</title>" in svg


@pytest.mark.parametrize(("ranks", "count", "widest"), [(4, 8, 1000), (16, 64, 2800)])
def test_sizes_are_for_a_screen_and_numbers_are_readable(ranks: int, count: int, widest: int) -> None:
    svg = ElementTree.fromstring(pe.as_svg(pe.build("1f1b", pe.StageGraph.chain(ranks, ranks), count)))
    assert float(svg.get("width") or 0) <= widest
    sizes = [float(text.get("font-size") or 0) for text in svg.iter(f"{SVG}text")]
    assert min(sizes) >= 6.5
    assert len(sizes) > 2 * ranks * count


def test_a_block_too_narrow_for_a_readable_number_has_its_hint_alone() -> None:
    costs = pe.Costs(weights=[60.0 if m != 7 else 1.0 for m in range(20)])
    svg = pe.as_svg(pe.simulate(pe.build("1f1b", PAIR, 20), costs))
    assert ">0F7: " in svg and ">7</text>" not in svg
    assert svg.count(">8</text>") == 4


def test_many_ranks_share_one_legend_of_all_their_colours() -> None:
    svg = pe.as_svg(pe.build("1f1b", pe.StageGraph.chain(16, 16), 2))
    legend = svg.partition("activations in flight</text>")[2].partition("rank 15</text>")[0]
    assert ">rank 0</text>" in legend and len(set(re.findall("fill='(#[0-9a-f]+)'/>", legend))) == 16


def test_a_scene_counts_what_is_held() -> None:
    scene = scene_of(pe.build("1f1b", PAIR, 2))
    assert scene.held[0] == ((0.0, 0), (0.0, 1), (1.0, 2), (6.0, 1), (9.0, 0))
    assert scene.most_held == 2


def test_an_empty_schedule_can_be_drawn() -> None:
    empty = pe.build("1f1b", PAIR, 0)
    assert pe.as_text(empty) == "rank 0 |\nrank 1 |"
    ElementTree.fromstring(pe.as_svg(empty))
    json.loads(pe.as_perfetto(empty, PAIR))


# Colours.

# Machado, Oliveira and Fernandes 2009, "A physiologically-based model for simulation of color vision deficiency".
DEFICIENCIES = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "tritanopia": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
    "grey": ((0.2126, 0.7152, 0.0722),) * 3,
}


def lab(colour: str, seen: tuple[tuple[float, ...], ...]) -> tuple[float, float, float]:
    linear = [
        (part / 255 / 12.92) if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in palette.rgb(colour)
    ]
    red, green, blue = (sum(weight * part for weight, part in zip(row, linear, strict=True)) for row in seen)
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    fx, fy, fz = (max(part, 0.0) ** (1 / 3) for part in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_colours_stay_apart_for_a_colour_blind_reader(deficiency: str) -> None:
    """A just noticeable difference is 2.3 (CIE 1976); side by side, 10 and more are told apart at once."""
    fills = {palette.FILLS[kind] for kind in ("forward", "backward", "weight", "loss")} | {palette.IDLE}
    for first, second in combinations(sorted(fills), 2):
        one, other = lab(first, DEFICIENCIES[deficiency]), lab(second, DEFICIENCIES[deficiency])
        assert sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5 > 10, (first, second)


# Perfetto.


@given(schedules(max_ranks=4, min_microbatches=1, max_microbatches=6))
def test_a_perfetto_trace_has_slices_and_arrows_that_go_forward_in_time(schedule: pe.Schedule) -> None:
    timeline = pe.simulate(schedule, pe.Costs(latency=0.5))
    events = json.loads(pe.as_perfetto({"simulated": timeline}, schedule.graph))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == sum(map(len, schedule.programs))
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    crossings = sum(schedule.graph.rank_of[a] != schedule.graph.rank_of[b] for a, b in schedule.graph.edges)
    assert starts.keys() == ends.keys() and len(starts) == 2 * crossings * schedule.num_microbatches
    for number, start in starts.items():
        assert start["tid"] != ends[number]["tid"] and start["ts"] < ends[number]["ts"]


# Files.


@given(schedules(), st.booleans())
def test_schedules_survive_json_and_csv(schedule: pe.Schedule, lowered: bool) -> None:
    thing = pe.lower(schedule) if lowered else schedule
    assert pe.from_json(pe.as_json(thing)) == thing
    if schedule.num_microbatches:
        assert pe.Schedule.from_csv(pe.as_csv(thing), schedule.graph, schedule.name) == thing
        assert graph_of_csv(pe.as_csv(thing)) == schedule.graph


@given(schedules())
def test_timelines_survive_json(schedule: pe.Schedule) -> None:
    timeline = pe.simulate(schedule, pe.Costs(latency=0.1))
    assert pe.from_json(pe.as_json(timeline)) == timeline


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"kind": "poem"}', '{"kind": "timeline", "spans": [[["0F0junk", 0, 1]]]}']
)
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(pe.ScheduleError):
        pe.from_json(text)


def test_a_csv_without_some_stage_is_refused() -> None:
    with pytest.raises(pe.ScheduleError, match="stage 0 is performed on no rank"):
        graph_of_csv("1F0,1B0\n")
