"""A schedule: a stage graph and one program for each rank, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import get_args

from attrs import field, frozen, validators

from pipeline_engine.errors import ScheduleError
from pipeline_engine.plan.actions import COMPUTE, Action, Program
from pipeline_engine.plan.graph import StageGraph
from pipeline_engine.plan.reading import programs_from_csv, programs_from_text

_ACTIONS = get_args(Action)


def _programs(programs: Iterable[Iterable[Action]]) -> tuple[Program, ...]:
    return tuple(tuple(program) for program in programs)


@frozen
class Schedule:
    """What every rank does, in order.  One object is drawn, checked, simulated and run.

    Args:
        name: how it is called in reports.
        graph: the stage graph.
        num_microbatches: number of microbatches m >= 0.
        programs: for each rank its actions; either computing verbs only, or lowered with all ten verbs.

    Raises:
        ScheduleError: the number of programs is not the number of ranks, or m is negative.
    """

    name: str = field(validator=validators.instance_of(str))
    graph: StageGraph = field(validator=validators.instance_of(StageGraph))
    num_microbatches: int = field(validator=validators.instance_of(int))
    programs: tuple[Program, ...] = field(converter=_programs)

    def __attrs_post_init__(self) -> None:
        if self.num_microbatches < 0:
            raise ScheduleError(f"num_microbatches is {self.num_microbatches}; it is 0 or more.")
        if len(self.programs) != self.graph.num_ranks:
            raise ScheduleError(
                f"schedule {self.name!r} has {len(self.programs)} programs for {self.graph.num_ranks} ranks; "
                f"each rank has exactly one.{self._surplus()}"
            )

    def _surplus(self) -> str:
        if len(self.programs) < self.graph.num_ranks:
            return ""
        return f"  Rank {self.graph.num_ranks} owns no stage: leave its program out, or give it a stage in rank_of."

    @property
    def is_lowered(self) -> bool:
        """Whether transfers and yields are in the programs, not only computing verbs."""
        return any(not isinstance(action, COMPUTE) for program in self.programs for action in program)

    @classmethod
    def from_text(cls, text: str, graph: StageGraph, name: str = "from text") -> Schedule:
        """Read one program a line, actions separated by spaces.  The number of microbatches is read off the actions.

        Args:
            text: for example ``"0F0 0B0\\n1F0 1B0"``: stage, verb and microbatch.
            graph: the stage graph.
            name: how the schedule is called in reports.

        Raises:
            ScheduleError: a word is not an action, or the number of lines is not the number of ranks.
        """
        return cls(name, graph, *_counted(programs_from_text(text)))

    @classmethod
    def from_csv(cls, text: str, graph: StageGraph, name: str = "from csv") -> Schedule:
        """Read one program a row, one action a cell; empty cells are idle slots and are passed over.

        Args:
            text: CSV, with the actions of ``from_text``.
            graph: the stage graph.
            name: how the schedule is called in reports.

        Raises:
            As ``from_text``.
        """
        return cls(name, graph, *_counted(programs_from_csv(text)))

    @classmethod
    def from_function(
        cls, name: str, graph: StageGraph, num_microbatches: int, function: Callable[[int], Iterable[Action]]
    ) -> Schedule:
        """Ask a function for each rank's actions.

        Args:
            name: how the schedule is called in reports.
            graph: the stage graph.
            num_microbatches: m >= 0.
            function: ``function(rank)`` returns the actions of a rank in order.

        Raises:
            ScheduleError: the function returned something that is not an action.
        """
        programs = [tuple(function(rank)) for rank in range(graph.num_ranks)]
        for rank, program in enumerate(programs):
            for step, action in enumerate(program):
                if not isinstance(action, _ACTIONS):
                    raise ScheduleError(
                        f"rank {rank} step {step}: {action!r} is not an action; return for example Forward(stage, "
                        "microbatch), or use Schedule.from_text."
                    )
        return cls(name, graph, num_microbatches, programs)

    def to_text(self) -> str:
        """One program a line, as ``from_text`` reads it."""
        return "\n".join(" ".join(str(action) for action in program) for program in self.programs)


def _counted(programs: tuple[Program, ...]) -> tuple[int, tuple[Program, ...]]:
    """The number of microbatches that the programs name, and the programs."""
    named = (getattr(action, "microbatch", -1) for program in programs for action in program)
    return max(named, default=-1) + 1, programs
