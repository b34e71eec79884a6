"""Dataflow, laws 2 and 3 for computing verbs: every action's needs are made before it, and no rank waits for ever.

Programs are read as a stream, each action once, so that a plan too large to hold can be checked while it is
generated.  Values travel by themselves, and the caller has given every gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attrs import define, field

from pipeline_engine.errors import ScheduleError
from pipeline_engine.plan.actions import Compute, maker_of
from pipeline_engine.plan.graph import StageGraph
from pipeline_engine.plan.laws.census import Census
from pipeline_engine.plan.laws.deadlock import Stuck, describe
from pipeline_engine.plan.numbering import Numbering, numbering_of
from pipeline_engine.plan.values import OutputGrad


def check_computing(name: str, graph: StageGraph, num_microbatches: int, programs: Iterable[Iterable[Compute]]) -> None:
    """Hold computing verbs to laws 1, 2 and 3.

    Args:
        name: of the schedule, for errors.
        graph: the stage graph.
        num_microbatches: m >= 0.
        programs: for each rank its actions; generators are read as the ranks go on.

    Raises:
        ScheduleError: a law is broken; the message is a short counter-example in actions and ranks.
    """
    flow = _Dataflow(name, numbering_of(graph), Census(graph, num_microbatches), [iter(each) for each in programs])
    flow.run()
    flow.check_end()


@define(eq=False)
class _Dataflow:
    name: str
    numbering: Numbering
    census: Census
    programs: list[Iterator[Compute]]
    _heads: dict[int, Compute] = field(init=False, factory=dict)  # of ranks that wait
    _steps: list[int] = field(init=False)
    _made: bytearray = field(init=False)
    _waiting: dict[int, list[int]] = field(init=False, factory=dict)  # by number: ranks

    def __attrs_post_init__(self) -> None:
        self._steps = [-1 for _ in self.programs]
        self._made = bytearray(self.census.num_microbatches * self.numbering.width)
        for m in range(self.census.num_microbatches):
            self._made[self.numbering.number(OutputGrad(m))] = 1

    def run(self) -> None:
        awake = list(range(len(self.programs)))
        while awake:
            self._run_rank(awake.pop(), awake)

    def check_end(self) -> None:
        """What is left of the programs is counted first: a missing action explains a deadlock better."""
        for rank, program in enumerate(self.programs):
            for step, action in enumerate(program, self._steps[rank] + 1):
                self.census.add(rank, step, action)
        self.census.finish()
        if self._heads:
            raise ScheduleError(describe(self.name, {rank: self._stuck(rank) for rank in sorted(self._heads)}))

    def _run_rank(self, rank: int, awake: list[int]) -> None:
        rules, width, made = self.numbering.rules, self.numbering.width, self._made
        action = self._heads.pop(rank, None) or self._next(rank)
        while action is not None:
            rule, base = rules[type(action)][action.stage], action.microbatch * width
            for offset in rule.needs:
                if not made[base + offset]:
                    self._heads[rank] = action
                    self._waiting.setdefault(base + offset, []).append(rank)
                    return
            made[base + rule.makes] = 1
            if base + rule.makes in self._waiting:
                awake += self._waiting.pop(base + rule.makes)
            action = self._next(rank)

    def _next(self, rank: int) -> Compute | None:
        action = next(self.programs[rank], None)
        if action is not None:
            self._steps[rank] += 1
            self.census.add(rank, self._steps[rank], action)
        return action

    def _stuck(self, rank: int) -> Stuck:
        head = self._heads[rank]
        base = head.microbatch * self.numbering.width
        missing = [base + offset for offset in self.numbering.rule(head).needs if not self._made[base + offset]]
        values = [self.numbering.name(head, number) for number in missing]
        on = maker_of(values[0], self.numbering.graph)
        return Stuck(self._steps[rank], head, ", ".join(map(str, values)), on)
