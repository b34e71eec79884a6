"""Any caller on any cut of the model that four ranks can hold: nothing hangs, and he gets what one stage gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch

pytest.importorskip("megatron.core")

from hypothesis import example, given, settings

from art_adapter.tiny_gpt import Cut, Shape

from ..run.processes import World
from .callers import BUSY, Caller, callers
from .hosts import host
from .playing import Seen, close_only, difference, play_one
from .processes import returned, world_of

SECONDS = 30.0
"""For one caller; who needs longer hangs."""
MOST_RANKS = 4
LAYOUTS = [
    (Cut(pipeline=pipeline, virtual=virtual), data_ranks)
    for pipeline, virtual, data_ranks in product((1, 2, 3, 4), (1, 2, 4), (1, 2))
    if 1 < pipeline * virtual <= Shape().layers and pipeline * data_ranks <= MOST_RANKS
]
"""A cut of the model, and how many data-parallel ranks have it."""
Play = Callable[[Cut, int, Caller], list[Seen]]


def play_caller(rank: int, cut: Cut, caller: Caller) -> Seen:
    own = host("reference")
    return close_only(play_one(own, own.build(cut, shape=Shape(dtype=torch.float64)), caller))


@pytest.fixture(scope="module")
def play() -> Iterator[Play]:
    """``play(cut, data_ranks, caller)``: what each rank saw.

    Processes are kept for the next caller, those of each number of stages for themselves: Megatron's process groups
    are made once.
    """
    worlds: dict[tuple[int, int], World] = {}

    def played(cut: Cut, data_ranks: int, caller: Caller) -> list[Seen]:
        where = cut.pipeline, data_ranks
        if where not in worlds:
            worlds[where] = world_of(cut.pipeline * data_ranks, timeout=SECONDS)
        try:
            return returned(worlds[where], play_caller, cut, caller)
        except AssertionError:
            worlds.pop(where).end()
            raise

    yield played
    for world in worlds.values():
        world.end()


def name_of(layout: tuple[Cut, int]) -> str:
    cut, data_ranks = layout
    return f"PP={cut.pipeline} V={cut.virtual} DP={data_ranks}"


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
@given(caller=callers())
@example(caller=BUSY)
@settings(max_examples=2)
def test_any_caller_on_any_cut_gets_what_one_stage_gives(play: Play, layout: tuple[Cut, int], caller: Caller) -> None:
    cut, data_ranks = layout
    whole, stages = play(Cut(), data_ranks, caller), play(cut, data_ranks, caller)
    for data_rank, one in enumerate(whole):
        why = difference(one, stages[data_rank::data_ranks])
        assert not why, f"data rank {data_rank}: {why}"
