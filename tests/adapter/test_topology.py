"""SUPPORT says what runs, and what is refused is refused with these words."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

import pipeline_engine as pe
from art_adapter import SUPPORT, UnsupportedTopologyError
from art_adapter.canary import Plan, check_plan
from art_adapter.topology import Topology, check_supported, table

REFUSED = {
    "pp+ep": Topology(2, 1, 1, 2, 1),
}
RUN_BY_THE_CONFORMANCE_SUITE = {"pp", "pp+dp", "pp+tp", "pp+cp", "virtual", "recompute", "tied"}
RUN_BY_THE_CANARY_ALONE = {"pp+tp+cp"}
"""Eight processes: too many for a suite of minutes."""


def test_every_row_is_run_or_refused() -> None:
    assert {name for name, row in SUPPORT.items() if row.supported} == (
        RUN_BY_THE_CONFORMANCE_SUITE | RUN_BY_THE_CANARY_ALONE
    )
    assert {name for name, row in SUPPORT.items() if not row.supported} == REFUSED.keys()
    assert all(bool(row.cure) is not row.supported for row in SUPPORT.values())


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused_with_the_tables_words(name: str) -> None:
    row = SUPPORT[name]
    with pytest.raises(UnsupportedTopologyError) as caught:
        check_supported(REFUSED[name])
    assert str(caught.value) == f"{row.combination} is not supported: {row.reason}; {row.cure}."


def test_on_one_stage_nothing_is_refused() -> None:
    check_supported(Topology(1, 2, 2, 2, 1))


@pytest.mark.parametrize(
    ("plan", "error", "words"),
    [
        (Plan(pp=5), ValueError, "5 stages need at least 5 layers"),
        (Plan(schedule="none"), ValueError, "schedule 'none' is unknown"),
        (Plan(virtual=3), ValueError, "6 stages need at least 6 layers"),
        (Plan(virtual=2, schedule="1f1b"), pe.ScheduleError, "1f1b"),
        (Plan(tp=2, cp=2, host="art"), UnsupportedTopologyError, "ART's own context parallelism needs a GPU"),
    ],
)
def test_a_canary_that_cannot_run_is_refused_before_it_starts(plan: Plan, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        check_plan(plan)


def test_the_readme_shows_the_table() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    shown = readme.partition("topology.table() -->\n")[2].partition("\n<!-- end of the support table")[0]
    assert shown == table()
