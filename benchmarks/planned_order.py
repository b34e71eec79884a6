"""How good is the planned order?  Against the best of 2,000 other orders, as packed, and smallest at both ends.

    python -m benchmarks.planned_order --json figures.json

Everything is simulated: no run, no torch.  See planned_order.md for what the figures mean.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from attrs import asdict, evolve, frozen

import pipeline_engine as pe
from art_adapter.progress import say, with_bar
from pipeline_engine.plan.order import in_order, weighted
from pipeline_engine.plan.outline import Outline
from pipeline_engine.plan.starts import Order, frugal_starts, smallest_at_both_ends, starts

LATENCY = 0.1  # of a forward of mean weight
RANDOM, LOCAL = 1000, 1000
EFFORT = 8  # of the second planned order
SIMULATED = 10  # of the rivals, the best by outline


@frozen
class Setting:
    """What is varied; ``in_flight`` is in multiples of P, and ``tight`` says whether bytes are short."""

    ranks: int
    count: int
    sigma: float
    in_flight: int
    tight: bool


@frozen
class Row:
    """Makespans over that of the best rival, one for each draw; seconds of process time for the planner."""

    setting: Setting
    packed: tuple[float, ...]
    both_ends: tuple[float, ...]
    planned: tuple[float, ...]
    planned_longer: tuple[float, ...]
    seconds: tuple[float, ...]


@frozen
class Problem:
    """One draw of weights."""

    schedule: pe.Schedule
    lowered: pe.Schedule
    costs: pe.Costs
    outline: Outline
    budget: float

    def simulated(self, order: Order) -> float:
        return pe.simulate(self.lowered, in_order(self.costs, order)).makespan

    def placed(self, order: Sequence[int]) -> list[float]:
        return [self.costs.weights[m] for m in order]

    def fits(self, order: Order) -> bool:
        return self.budget == math.inf or self.outline.peak(self.placed(order)) <= self.budget


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="seed of the first draw")
    parser.add_argument("--quick", action="store_true", help="four draws")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    for setting in with_bar(list(settings()), "settings"):
        rows.append(measured(setting, range(given.first, given.first + (4 if given.quick else given.draws))))
        say(line(rows[-1]))
    print("\n".join([HEAD, *map(line, rows)]))
    print(f"worst planned: {max(max(row.planned) for row in rows):.3f}")
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def settings() -> Iterator[Setting]:
    for in_flight, tight in ((1, False), (1, True), (2, False)):
        for ranks in (4, 8):
            for count in (16, 32):
                for sigma in (0.5, 1.0):
                    yield Setting(ranks, count, sigma, in_flight, tight)


def measured(setting: Setting, draws: Iterable[int]) -> Row:
    """All draws of one setting, by their seeds."""
    schedule = pe.build("1f1b", pe.StageGraph.chain(setting.ranks, setting.ranks), setting.count)
    schedule = pe.limit(schedule, setting.in_flight * setting.ranks)
    lowered = pe.lower(schedule)
    row = Row(setting, (), (), (), (), ())
    for draw in draws:
        problem = drawn(setting, schedule, lowered, random.Random(draw))
        best = best_rival(problem, random.Random(1000 + draw))
        start = time.process_time()
        order = pe.plan_order(schedule, problem.costs, memory_budget=problem.budget)
        seconds = time.process_time() - start
        longer = pe.plan_order(schedule, problem.costs, memory_budget=problem.budget, effort=EFFORT)
        assert problem.fits(order) and problem.fits(longer), "a planned order exceeds the budget"
        packed, both_ends = tuple(range(setting.count)), smallest_at_both_ends(problem.costs.weights)
        row = evolve(
            row,
            packed=(*row.packed, problem.simulated(packed) / best),
            both_ends=(*row.both_ends, problem.simulated(both_ends) / best),
            planned=(*row.planned, problem.simulated(order) / best),
            planned_longer=(*row.planned_longer, problem.simulated(longer) / best),
            seconds=(*row.seconds, seconds),
        )
    return row


def drawn(setting: Setting, schedule: pe.Schedule, lowered: pe.Schedule, rng: random.Random) -> Problem:
    """Log-normal weights of mean 1.

    A tight budget lies halfway between what the most frugal of the simple orders holds and what smallest at both ends
    does.
    """
    lengths = [math.exp(rng.gauss(0.0, setting.sigma)) for _ in range(setting.count)]
    mean = sum(lengths) / len(lengths)
    costs = weighted(pe.Costs(latency=LATENCY), [length / mean for length in lengths])
    outline = Outline.of(schedule, costs)
    problem = Problem(schedule, lowered, costs, outline, math.inf)
    if not setting.tight:
        return problem
    simple = [*starts(costs.weights), *frugal_starts(costs.weights)]
    peaks = [outline.peak(problem.placed(order)) for order in simple]
    greedy = outline.peak(problem.placed(smallest_at_both_ends(costs.weights)))
    return evolve(problem, budget=(min(peaks) + greedy) / 2)


def best_rival(problem: Problem, rng: random.Random) -> float:
    """The best makespan of 2,000 orders: random ones, and two local searches.

    They start from the best random order and from the best simple one.  Orders over the budget do not count.
    """
    tried: dict[Order, float] = {}

    def judge(order: Order) -> float:
        if order not in tried:
            fits = problem.fits(order)
            tried[order] = problem.outline.makespan(problem.placed(order)) if fits else math.inf
        return tried[order]

    count = len(problem.costs.weights)
    simple = [*starts(problem.costs.weights), *frugal_starts(problem.costs.weights)]
    for _ in range(RANDOM):
        judge(tuple(rng.sample(range(count), count)))
    for start in (min(tried, key=judge), min(simple, key=judge)):
        order = start
        for _ in range(LOCAL // 2):
            candidate = neighbour(order, rng)
            if judge(candidate) <= judge(order):
                order = candidate
    best = sorted((order for order in tried if tried[order] < math.inf), key=judge)[:SIMULATED]
    return min(problem.simulated(order) for order in best)


def neighbour(order: Order, rng: random.Random) -> Order:
    """Two swapped, or one moved, or a stretch turned round."""
    changed = list(order)
    here, there = sorted(rng.sample(range(len(order)), 2))
    match rng.randrange(3):
        case 0:
            changed[here], changed[there] = changed[there], changed[here]
        case 1:
            changed.insert(there, changed.pop(here))
        case _:
            changed[here : there + 1] = reversed(changed[here : there + 1])
    return tuple(changed)


COLUMNS = (
    "P",
    "m",
    "sigma",
    "in flight",
    "bytes",
    "as packed",
    "smallest at both ends",
    "planned",
    "planned, effort 8",
)
HEAD = "\n".join(f"| {' | '.join(cells)} |" for cells in [(*COLUMNS, "over 1.05", "planner, ms"), ["---"] * 11])


def line(row: Row) -> str:
    """Median and extremes of each ratio."""
    at = row.setting
    ratios = " | ".join(spread(each) for each in (row.packed, row.both_ends, row.planned, row.planned_longer))
    over = " and ".join(str(sum(ratio > 1.05 for ratio in each)) for each in (row.planned, row.planned_longer))
    return (
        f"| {at.ranks} | {at.count} | {at.sigma} | {at.in_flight * at.ranks} | {'tight' if at.tight else 'free'} "
        f"| {ratios} | {over} | {statistics.median(row.seconds) * 1e3:.1f} |"
    )


def spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})"


if __name__ == "__main__":
    main()
