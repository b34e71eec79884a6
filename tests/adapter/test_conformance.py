"""Whatever a caller does with a TrainerRank, several stages give him what one stage does, over every host."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from itertools import product
from typing import Any

import attrs
import pytest
import torch

pytest.importorskip("megatron.core")

from art_adapter.tiny_gpt import Cut, Shape

from .art_on_cpu import why_not
from .bodies import BODIES
from .hosts import OWN
from .playing import Seen, difference, play
from .processes import on_ranks

UNEVEN = Cut(pipeline=2, layers_per_stage=(1, 3))
CHUNKS = {"on one rank": (1, Cut(virtual=2)), "on each of two ranks": (2, Cut(pipeline=2, virtual=2))}
"""Two chunks on a rank: the number of ranks, and the cut."""


def played(
    ranks: int, names: tuple[str, ...], cut: Cut, bodies: Any = None, **options: Any
) -> list[dict[str, dict[str, Seen]]]:
    """What every rank saw, by host and body; options: of the model."""
    return on_ranks(partial(play, **options), ranks, names, cut, bodies or BODIES)


@cache
def on_one_rank(host: str) -> dict[str, Seen]:
    """What one process with the whole model saw, by body."""
    return played(1, (host,), Cut())[0][host]


def some(*names: str) -> dict[str, Any]:
    return {name: BODIES[name] for name in names}


@pytest.fixture(scope="module", params=OWN)
def own(request: pytest.FixtureRequest) -> Iterator[Any]:
    stages = played(2, (request.param,), UNEVEN)
    yield on_one_rank(request.param), [stage[request.param] for stage in stages]


@pytest.mark.parametrize("body", BODIES)
def test_two_uneven_stages_do_what_one_does(own: Any, body: str) -> None:
    one, stages = own
    why = difference(one[body], [stage[body] for stage in stages])
    assert not why, why


@pytest.fixture(scope="module")
def art() -> Iterator[Any]:
    if (why := why_not()) is not None:
        pytest.skip(why)
    yield on_one_rank("art"), [stage["art"] for stage in played(2, ("art",), UNEVEN)]


@pytest.mark.parametrize("body", BODIES)
def test_two_uneven_stages_do_what_one_does_over_arts_own_class(art: Any, body: str) -> None:
    one, stages = art
    why = difference(one[body], [stage[body] for stage in stages])
    assert not why, why


@pytest.fixture(scope="module", params=("reference", "art"))
def chunks(request: pytest.FixtureRequest) -> Iterator[Any]:
    name = request.param
    if name == "art" and (why := why_not()) is not None:
        pytest.skip(why)
    cuts = {where: [stage[name] for stage in played(ranks, (name,), cut)] for where, (ranks, cut) in CHUNKS.items()}
    yield on_one_rank(name), cuts


@pytest.mark.parametrize("where", CHUNKS)
@pytest.mark.parametrize("body", BODIES)
def test_two_chunks_on_a_rank_do_what_one_does(chunks: Any, where: str, body: str) -> None:
    one, cuts = chunks
    why = difference(one[body], [stage[body] for stage in cuts[where]])
    assert not why, why


RECOMPUTED = ("gradients_accumulate_over_forwards_and_backwards", "slots_mixed_in_one_call", "five_steps")


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_recomputed_forward_keeps_its_slot_over_arts_own_class() -> None:
    (one,), stages = (
        played(1, ("art",), Cut(), some(*RECOMPUTED), recompute=True),
        played(2, ("art",), UNEVEN, some(*RECOMPUTED), recompute=True),
    )
    for body in RECOMPUTED:
        why = difference(one["art"][body], [stage["art"][body] for stage in stages])
        assert not why, f"{body}: {why}"


TIED = ("all_combinations_of_outputs", "five_steps")


def test_an_output_layer_that_is_tied_to_the_embedding_does_what_it_does_on_one_stage() -> None:
    shape = Shape(tied=True)
    (one,) = played(1, ("reference",), Cut(), some(*TIED), shape=shape)
    stages = played(2, ("reference",), UNEVEN, some(*TIED), shape=shape)
    for body in TIED:
        why = difference(one["reference"][body], [stage["reference"][body] for stage in stages])
        assert not why, f"{body}: {why}"


BASE = (
    "base_weights_are_trained_with_slots_and_without",
    "base_weights_are_stepped_zeroed_and_guarded_inside_the_loop",
)
TIED_CUTS = {
    "two stages": (2, UNEVEN),
    "three stages": (3, Cut(pipeline=3, layers_per_stage=(2, 1, 1))),
    "two chunks on one rank": CHUNKS["on one rank"],
    "two chunks on each of two ranks": CHUNKS["on each of two ranks"],
}


TRAINED = Shape(tied=True, dtype=torch.float64)
"""The halves of a tied weight's gradient are added in another order than in one process, and AdamW divides a gradient
by its own size: where one nearly cancels, the last bit of a float32 becomes a step of over 1e-6 on some processors.
In float64 nothing is seen of it."""


@pytest.fixture(scope="module")
def one_process_with_tied_weights() -> Any:
    return played(1, ("reference",), Cut(), some(*BASE), shape=TRAINED)[0]["reference"]


@pytest.mark.parametrize("cut", TIED_CUTS)
def test_a_tied_weight_that_is_trained_stays_one(one_process_with_tied_weights: Any, cut: str) -> None:
    ranks, where = TIED_CUTS[cut]
    stages = played(ranks, ("reference",), where, some(*BASE), shape=TRAINED)
    for body in BASE:
        why = difference(one_process_with_tied_weights[body], [stage["reference"][body] for stage in stages])
        assert not why, f"{body}: {why}"


@pytest.mark.parametrize("cut", [Cut(), Cut(tensor=2, sequence_parallel=True)], ids=["data ranks", "tensor ranks"])
def test_a_tied_weight_that_is_trained_stays_one_on_two_ranks_of_each_stage(cut: Cut) -> None:
    bodies, shape = some(*BASE), TRAINED
    whole = played(2, ("reference",), cut, bodies, shape=shape)
    stages = played(4, ("reference",), attrs.evolve(cut, pipeline=2), bodies, shape=shape)
    for body, place in product(bodies, range(2)):
        of_place = [stages[2 * stage + place]["reference"][body] for stage in range(2)]
        why = difference(whole[place]["reference"][body], of_place)
        assert not why, f"{body}, rank {place} of each stage, {why}"


TENSOR_PARALLEL = (
    "all_combinations_of_outputs",
    "slots_mixed_in_one_call",
    "leaving_the_loop_early",
    "an_optimizer_step_inside_the_loop",
    "five_steps",
    "a_custom_head_counts_once_and_stays_the_same_everywhere",
    "what_a_caller_can_do_wrong",
)


@pytest.mark.parametrize(
    ("host", "sequence_parallel", "virtual"),
    [("reference", False, 1), ("reference", True, 2), ("art", True, 1)],
)
def test_two_stages_of_two_tensor_ranks_do_what_two_tensor_ranks_do(
    host: str, sequence_parallel: bool, virtual: int
) -> None:
    if host == "art" and (why := why_not()) is not None:
        pytest.skip(why)
    bodies, whole = some(*TENSOR_PARALLEL), Cut(tensor=2, sequence_parallel=sequence_parallel)
    uncut = played(2, (host,), whole, bodies)
    cut = played(4, (host,), attrs.evolve(whole, pipeline=2, virtual=virtual), bodies)
    for body, tensor_rank in product(bodies, range(2)):
        stages = [cut[2 * stage + tensor_rank][host][body] for stage in range(2)]
        why = difference(uncut[tensor_rank][host][body], stages)
        assert not why, f"{body}, tensor rank {tensor_rank}, {why}"


CONTEXT_PARALLEL = ("all_combinations_of_outputs", "slots_mixed_in_one_call", "leaving_the_loop_early", "five_steps")


def test_two_stages_of_two_context_ranks_do_what_two_context_ranks_do() -> None:
    bodies, host = some(*CONTEXT_PARALLEL), "reference"
    uncut = played(2, (host,), Cut(context=2), bodies)
    cut = played(4, (host,), Cut(context=2, pipeline=2), bodies)
    for body, context_rank in product(bodies, range(2)):
        stages = [cut[2 * stage + context_rank][host][body] for stage in range(2)]
        why = difference(uncut[context_rank][host][body], stages)
        assert not why, f"{body}, context rank {context_rank}, {why}"


DATA_PARALLEL = ("data_is_reduced_over_data_ranks_only", "five_steps", "an_optimizer_step_inside_the_loop")
DATA_PARALLEL_HOSTS = ("reference", "july")


@pytest.fixture(scope="module")
def data_parallel() -> Iterator[Any]:
    bodies = some(*DATA_PARALLEL)
    yield played(2, DATA_PARALLEL_HOSTS, Cut(), bodies), played(4, DATA_PARALLEL_HOSTS, UNEVEN, bodies)


@pytest.mark.parametrize("body", DATA_PARALLEL)
@pytest.mark.parametrize("host", DATA_PARALLEL_HOSTS)
def test_two_stages_of_two_data_ranks_do_what_two_data_ranks_do(data_parallel: Any, host: str, body: str) -> None:
    whole, cut = data_parallel
    for data_rank in range(2):
        stages = [cut[2 * stage + data_rank][host][body] for stage in range(2)]
        why = difference(whole[data_rank][host][body], stages)
        assert not why, f"data rank {data_rank}, {why}"
