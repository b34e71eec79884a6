"""Whatever a caller does with a TrainerRank, several stages give him what one stage does, over every host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from art_adapter.tiny_gpt import Cut

from .art_on_cpu import why_not
from .bodies import BODIES
from .hosts import OWN
from .playing import Seen, difference, play
from .processes import on_ranks

UNEVEN = Cut(pipeline=2, layers_per_stage=(1, 3))


def played(ranks: int, names: tuple[str, ...], cut: Cut, bodies: Any = None) -> list[dict[str, dict[str, Seen]]]:
    """What every rank saw, by host and body."""
    return on_ranks(play, ranks, names, cut, bodies or BODIES)


@pytest.fixture(scope="module")
def own() -> Iterator[Any]:
    yield played(1, OWN, Cut()), played(2, OWN, UNEVEN)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("host", OWN)
def test_two_uneven_stages_do_what_one_does(own: Any, host: str, body: str) -> None:
    (one,), stages = own
    why = difference(one[host][body], [stage[host][body] for stage in stages])
    assert not why, why


@pytest.fixture(scope="module")
def art() -> Iterator[Any]:
    if (why := why_not()) is not None:
        pytest.skip(why)
    yield played(1, ("art",), Cut()), played(2, ("art",), UNEVEN)


@pytest.mark.parametrize("body", BODIES)
def test_two_uneven_stages_do_what_one_does_over_arts_own_class(art: Any, body: str) -> None:
    (one,), stages = art
    why = difference(one["art"][body], [stage["art"][body] for stage in stages])
    assert not why, why


DATA_PARALLEL = ("data_is_reduced_over_data_ranks_only", "five_steps", "an_optimizer_step_inside_the_loop")


@pytest.fixture(scope="module")
def data_parallel() -> Iterator[Any]:
    bodies = {name: BODIES[name] for name in DATA_PARALLEL}
    names = ("reference", "july")
    yield played(2, names, Cut(), bodies), played(4, names, UNEVEN, bodies)


@pytest.mark.parametrize("body", DATA_PARALLEL)
@pytest.mark.parametrize("host", ("reference", "july"))
def test_two_stages_of_two_data_ranks_do_what_two_data_ranks_do(data_parallel: Any, host: str, body: str) -> None:
    whole, cut = data_parallel
    for data_rank in range(2):
        stages = [cut[2 * stage + data_rank][host][body] for stage in range(2)]
        why = difference(whole[data_rank][host][body], stages)
        assert not why, f"data rank {data_rank}, {why}"
