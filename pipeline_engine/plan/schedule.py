"""A schedule: a stage graph and one program for each rank, as data."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

from attrs import field, frozen, validators

from pipeline_engine.errors import ScheduleError
from pipeline_engine.plan.actions import COMPUTE, Action, Program, parse_action
from pipeline_engine.plan.graph import StageGraph


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
                "each rank has exactly one."
            )

    @property
    def is_lowered(self) -> bool:
        """Whether transfers and yields are in the programs, not only computing verbs."""
        return any(not isinstance(action, COMPUTE) for program in self.programs for action in program)

    @classmethod
    def from_text(cls, text: str, graph: StageGraph, name: str = "from text") -> Schedule:
        """Read one program a line, actions separated by spaces.  The number of microbatches is read off the actions.

        Raises:
            ScheduleError: a word is not an action, or the number of lines is not the number of ranks.
        """
        lines = [line.split() for line in text.strip().splitlines()]
        return cls._from_words(lines, graph, name)

    @classmethod
    def from_csv(cls, text: str, graph: StageGraph, name: str = "from csv") -> Schedule:
        """Read one program a row, one action a cell; empty cells are idle slots and are passed over."""
        rows = [[cell.strip() for cell in row if cell.strip()] for row in csv.reader(io.StringIO(text))]
        return cls._from_words(rows, graph, name)

    @classmethod
    def _from_words(cls, rows: Sequence[Sequence[str]], graph: StageGraph, name: str) -> Schedule:
        programs = [[_parse_at(word, rank, step) for step, word in enumerate(words)] for rank, words in enumerate(rows)]
        microbatches = [getattr(action, "microbatch", -1) for program in programs for action in program]
        return cls(name, graph, max(microbatches, default=-1) + 1, programs)

    def to_text(self) -> str:
        """One program a line, as ``from_text`` reads it."""
        return "\n".join(" ".join(str(action) for action in program) for program in self.programs)


def _parse_at(word: str, rank: int, step: int) -> Action:
    try:
        return parse_action(word)
    except ScheduleError as error:
        raise ScheduleError(f"rank {rank} step {step}: {error}") from None
