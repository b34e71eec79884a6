"""Orders are permutations that fit the memory, outlines agree with the simulator, and the choice keeps its word."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline_engine as pe
from pipeline_engine.plan import starts as starts_page
from pipeline_engine.plan.actions import Backward, BackwardWeight, Forward
from pipeline_engine.plan.graph import Placement
from pipeline_engine.plan.order import in_order
from pipeline_engine.plan.outline import Outline
from pipeline_engine.plan.simulate import peak_in_flight
from pipeline_engine.plan.starts import fitted_starts, frugal_starts, smallest_at_both_ends, starts, valley_starts
from tests.strategies import chain_for, schedule_names, schedules

weight_lists = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=12)


def bytes_held(timeline: pe.Timeline, weights: list[float]) -> float:
    """The largest number of bytes that any rank holds in a simulation, a byte for each unit of weight and stage."""
    worst = 0.0
    for spans in timeline.spans:
        held = 0.0
        for span in spans:
            match span.action:
                case Forward(_, m):
                    held += weights[m]
                    worst = max(worst, held)
                case Backward(_, m) | BackwardWeight(_, m):
                    held -= weights[m]
    return worst


# Outlines.


@given(schedules(min_microbatches=1), st.data())
def test_an_outline_without_transfers_agrees_with_the_simulator(schedule: pe.Schedule, data: st.DataObject) -> None:
    weights = data.draw(
        st.lists(st.integers(1, 9), min_size=schedule.num_microbatches, max_size=schedule.num_microbatches)
    )
    costs = pe.Costs(forward=1, backward_input=2, backward_weight=1, weights=[float(w) for w in weights])
    outline = Outline.of(schedule, costs)
    timeline = pe.simulate(schedule, costs)
    if schedule.graph.is_straight:  # with several stages a rank, an output may wait for a busy rank on its way
        assert outline.makespan(costs.weights) == pytest.approx(timeline.makespan)
    assert outline.makespan(costs.weights) <= timeline.makespan * (1 + 1e-9)
    assert outline.peak(costs.weights) == pytest.approx(bytes_held(timeline, list(costs.weights)))


@given(schedules(min_microbatches=1), st.floats(0, 2), st.floats(0, 2))
def test_an_outline_is_never_slower_than_the_simulator(schedule: pe.Schedule, latency: float, loss: float) -> None:
    costs = pe.Costs(latency=latency, loss=loss)
    makespan = Outline.of(schedule, costs).makespan([1.0] * schedule.num_microbatches)
    assert makespan <= pe.simulate(schedule, costs).makespan * (1 + 1e-9)


def test_an_outline_knows_that_large_messages_travel_longer() -> None:
    schedule = pe.build("1f1b", pe.StageGraph.chain(3, 3), 5)
    costs = pe.Costs(
        latency={"x": 0.1, "dx": 0.2}, seconds_per_byte=0.01, num_bytes={"x1:1>2": 9}, weights=[1, 9, 2, 5, 1]
    )
    makespan = pe.simulate(schedule, costs).makespan
    assert Outline.of(schedule, costs).makespan(costs.weights) == pytest.approx(makespan, rel=0.03)


@given(schedules(min_microbatches=1), st.floats(0, 2), st.data())
def test_a_pass_that_goes_on_where_two_orders_part_finds_the_same(
    schedule: pe.Schedule, loss: float, data: st.DataObject
) -> None:
    count = schedule.num_microbatches
    lists = st.lists(st.floats(0.1, 9.0), min_size=count, max_size=count)
    first, second, place = data.draw(lists), data.draw(lists), data.draw(st.integers(0, count - 1))
    outline = Outline.of(schedule, pe.Costs(latency=0.5, loss=loss, seconds_per_byte=0.1, num_bytes={"x": 3.0}))
    placed = [*first[:place], *second[place:]]
    assert outline.ends(placed, outline.ends(first), place) == outline.ends(placed)


def test_an_outline_of_what_cannot_end_is_refused() -> None:
    crossed = pe.Schedule.from_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1", pe.StageGraph.chain(2, 2), "crossed")
    with pytest.raises(pe.ScheduleError, match="'crossed' cannot reach its end"):
        Outline.of(crossed, pe.Costs())


# Limits.


def test_a_limit_is_the_picture_on_its_page() -> None:
    schedule = pe.limit(pe.build("1f1b", pe.StageGraph.chain(3, 3), 4), 4)
    assert [" ".join(str(action)[1:] for action in program) for program in schedule.programs] == [
        "F0 F1 F2 F3 B0 B1 B2 B3",
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
    ]


@given(schedules(min_microbatches=1), st.integers(1, 20))
def test_a_limited_schedule_holds_what_it_may_is_lawful_and_performs_the_same(
    schedule: pe.Schedule, number: int
) -> None:
    """Or the error says what would be."""
    try:
        limited = pe.limit(schedule, number)
    except pe.ScheduleError as error:
        number = int(re.findall(r"; (\d+) is lawful", str(error))[0])
        limited = pe.limit(schedule, number)
    pe.check(limited)
    assert max(peak_in_flight(program) for program in limited.programs) <= number
    for program, own in zip(limited.programs, schedule.programs, strict=True):
        assert sorted(map(str, program)) == sorted(map(str, own))


@given(st.sampled_from(["1f1b", "gpipe"]), st.integers(1, 6), st.integers(1, 12), st.integers(1, 12))
def test_with_one_stage_a_rank_any_number_in_flight_is_lawful(name: str, ranks: int, count: int, number: int) -> None:
    pe.check(pe.limit(pe.build(name, pe.StageGraph.chain(ranks, ranks), count), number))


def test_too_small_a_limit_is_refused_with_what_is_lawful() -> None:
    schedule = pe.build("zb-v", pe.StageGraph.chain(8, 4, "vee"), 8)
    with pytest.raises(pe.ScheduleError, match=r"max_in_flight=1 the ranks .* for ever; \d is lawful"):
        pe.limit(schedule, 1)


def test_a_limit_of_nothing_is_refused() -> None:
    schedule = pe.build("1f1b", pe.StageGraph.chain(2, 2), 2)
    with pytest.raises(pe.ScheduleError, match="max_in_flight is 0; it is 1 or more"):
        pe.limit(schedule, 0)
    with pytest.raises(pe.ScheduleError, match="lowered already"):
        pe.limit(pe.lower(schedule), 3)


# Orders.


@given(weight_lists, st.integers(0, 8), st.floats(0.0, 40.0))
def test_every_start_is_a_permutation(weights: list[float], window: int, allowed: float) -> None:
    fitted = fitted_starts(weights, window, allowed)
    for order in (*starts(weights), *frugal_starts(weights), *fitted, *valley_starts(weights)):
        assert sorted(order) == list(range(len(weights)))


def test_starts_are_the_pictures_on_their_page() -> None:
    """Each line of digits is one of the orders that its function yields."""
    lines = re.findall(r"^    ([a-z ]+?)  +((?:\d ){7}\d)", str(starts_page.__doc__), re.MULTILINE)
    assert [name for name, _ in lines] == ["as packed", "smallest at both ends", "frugal", "fitted", "valley"]
    packed = [float(digit) for digit in lines[0][1].split()]
    yielded = [*starts(packed), *frugal_starts(packed), *fitted_starts(packed, 4, 20.0), *valley_starts(packed)]
    pictures = {" ".join(f"{packed[m]:.0f}" for m in order) for order in yielded}
    for name, digits in lines:
        assert digits in pictures, name


def test_a_fitted_start_keeps_the_biggest_together_as_far_as_its_windows_allow() -> None:
    weights = [3.0, 8.0, 1.0, 6.0, 2.0, 7.0, 5.0, 4.0]
    fitting = []
    for order in fitted_starts(weights, 4, 20.0):
        placed = [weights[m] for m in order]
        if max(sum(placed[at : at + 4]) for at in range(5)) <= 20.0:
            fitting.append(abs(placed.index(8.0) - placed.index(7.0)))
    assert 1 in fitting


@given(schedules(min_microbatches=1))
def test_a_window_of_an_outline_is_what_equal_microbatches_hold_at_most(schedule: pe.Schedule) -> None:
    outline = Outline.of(schedule, pe.Costs())
    held = outline.peak([1.0] * schedule.num_microbatches)
    assert held <= outline.window * outline.whole_bytes < held + outline.whole_bytes


def test_the_smallest_stand_at_both_ends() -> None:
    weights = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [weights[m] for m in smallest_at_both_ends(weights)] == [1, 3, 5, 4, 2]


@settings(deadline=None)
@given(schedule_names, st.integers(1, 5), weight_lists, st.floats(1.0, 5.0), st.floats(0.0, 0.5))
def test_a_planned_order_is_a_permutation_that_never_loses(
    name: str, ranks: int, weights: list[float], slack: float, latency: float
) -> None:
    """Among orders that fit the budget it is at least as good as the order given, by its outline."""
    schedule = pe.build(name, chain_for(name, ranks), len(weights))
    costs = pe.Costs(latency=latency, weights=weights)
    budget = slack * max(weights)
    order = pe.plan_order(schedule, costs, memory_budget=budget)
    assert sorted(order) == list(range(len(weights)))
    assert order == pe.plan_order(schedule, costs, memory_budget=budget)
    outline, placed = Outline.of(schedule, costs), [weights[m] for m in order]
    if outline.peak(weights) <= budget:
        assert outline.peak(placed) <= budget
        assert outline.makespan(placed) <= outline.makespan(weights)


def test_a_short_search_beats_every_simple_order() -> None:
    schedule = pe.build("1f1b", pe.StageGraph.chain(4, 4), 16)
    for seed in range(8):
        draw = random.Random(seed)
        costs = pe.Costs(latency=0.1, weights=[draw.lognormvariate(0, 1) for _ in range(16)])
        outline = Outline.of(schedule, costs)

        def makespan(order: Sequence[int], outline: Outline = outline, costs: pe.Costs = costs) -> float:
            return outline.makespan(in_order(costs, order).weights)

        assert makespan(pe.plan_order(schedule, costs)) < min(map(makespan, starts(costs.weights)))


def test_equal_microbatches_stay_as_they_are() -> None:
    schedule = pe.build("1f1b", pe.StageGraph.chain(4, 4), 8)
    assert pe.plan_order(schedule, pe.Costs(weights=[2.0] * 8)) == tuple(range(8))
    assert pe.plan_order(schedule, pe.Costs()) == tuple(range(8))


def test_weights_are_one_for_each_microbatch() -> None:
    schedule = pe.build("1f1b", pe.StageGraph.chain(2, 2), 3)
    with pytest.raises(pe.ScheduleError, match="2 weights are given for 3 microbatches"):
        pe.plan_order(schedule, pe.Costs(weights=[1.0, 2.0]))


# The choice.


@settings(deadline=None, max_examples=50)
@given(schedule_names, st.integers(1, 4), weight_lists, st.floats(1.0, 8.0), st.floats(0.0, 0.5))
def test_a_choice_keeps_within_the_budget_and_simulates_as_it_says(
    name: str, ranks: int, weights: list[float], slack: float, latency: float
) -> None:
    costs = pe.Costs(latency=latency, weights=weights)
    graph = chain_for(name, ranks)
    budget = slack * max(weights)
    try:
        choice = pe.best_schedule(graph, costs, memory_budget=budget)
    except pe.ScheduleError as error:
        assert graph.num_stages > graph.num_ranks and "memory_budget is" in str(error)
        return
    assert sorted(choice.order) == list(range(len(weights)))
    assert choice.timeline == pe.simulate(choice.schedule, in_order(costs, choice.order))
    assert bytes_held(choice.timeline, [weights[m] for m in choice.order]) <= budget * (1 + 1e-9)
    assert choice.max_in_flight == max(choice.timeline.peak_in_flight)
    pe.check(choice.schedule)


def test_the_reason_says_what_is_expected_and_what_was_passed_over() -> None:
    costs = pe.Costs(latency=0.1, weights=[1.0, 5.0, 2.0, 8.0, 1.0, 3.0, 2.0, 1.0])
    reason = pe.best_schedule(pe.StageGraph.chain(4, 4), costs, memory_budget=20.0).reason
    for words in ("in flight:", "idle expected", "in the order given", "of 20 bytes", "next best"):
        assert words in reason


def test_too_small_a_budget_is_refused_with_what_is_needed() -> None:
    costs = pe.Costs(weights=[1.0, 4.0])
    with pytest.raises(pe.ScheduleError, match=r"memory_budget is 3 bytes; the least .* holds 4 on one rank"):
        pe.best_schedule(pe.StageGraph.chain(2, 2), costs, memory_budget=3.0)


def test_wrong_questions_are_refused() -> None:
    graph = pe.StageGraph.chain(2, 2)
    with pytest.raises(pe.ScheduleError, match="number of microbatches is unknown"):
        pe.best_schedule(graph, pe.Costs())
    with pytest.raises(pe.ScheduleError, match="'2f1b' is unknown"):
        pe.best_schedule(graph, pe.Costs(), num_microbatches=2, schedules=["2f1b"])
    with pytest.raises(pe.ScheduleError, match="no schedule fits"):
        pe.best_schedule(graph, pe.Costs(), num_microbatches=2, schedules=["zb-v"])
    with pytest.raises(pe.ScheduleError, match="activation_bytes are given for 1 stages, but there is a stage 1"):
        pe.best_schedule(graph, pe.Costs(), num_microbatches=2, activation_bytes=[1.0])


def test_a_costly_stage_is_paid_for_in_bytes() -> None:
    """Rank 1 keeps ten times as much, so it is rank 1 that bounds the number in flight."""
    costs = pe.Costs(weights=[1.0] * 8)
    graph = pe.StageGraph.chain(2, 2)
    choice = pe.best_schedule(graph, costs, memory_budget=10.0, activation_bytes=[1.0, 10.0])
    assert choice.peak_bytes == 10.0


UNEVEN = pe.Costs(latency=0.1, weights=[math.exp(math.sin(7.0 * m)) for m in range(16)])


@pytest.mark.parametrize("budget", [math.inf, 16.0])  # which is short for those with few in flight
@pytest.mark.parametrize("name", pe.SCHEDULES)
def test_an_order_for_every_step_takes_5_ms(name: str, budget: float) -> None:
    """Of this process's own time, for the machine may be busy."""
    schedule = pe.build(name, chain_for(name, 4), 16)
    assert fastest(lambda: pe.plan_order(schedule, UNEVEN, memory_budget=budget)) < 0.005


@pytest.mark.parametrize(("stages", "placement"), [(4, "straight"), (8, "looped"), (8, "vee")])
def test_the_choice_among_all_takes_100_ms(stages: int, placement: Placement) -> None:
    graph = pe.StageGraph.chain(stages, 4, placement)
    assert fastest(lambda: pe.best_schedule(graph, UNEVEN, memory_budget=60.0), repeats=7) < 0.1


FIXED_LOOP = 0.0015
"""Seconds that ``fixed_loop`` takes on a machine as fast as the one that the limits are meant for."""


def fastest(call: Callable[[], object], repeats: int = 20) -> float:
    """Seconds of the fastest repeat, at the speed at which a fixed loop takes its time.

    A machine on which the loop takes longer is slowed down by others, as virtual machines are, and so is the call.
    """
    own, loop = [], []
    for _ in range(repeats):
        own.append(seconds_of(call))
        loop.append(seconds_of(fixed_loop))
    return min(own) / max(1.0, min(loop) / FIXED_LOOP)


def seconds_of(call: Callable[[], object]) -> float:
    start = process_time()
    call()
    return process_time() - start


def fixed_loop() -> None:
    sums: dict[int, int] = {}
    for number in range(20_000):
        sums[number % 97] = sums.get(number % 97, 0) + number
