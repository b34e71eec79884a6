"""Plans: the runs that a benchmark makes by itself, or the one that its options ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from attrs import evolve

from art_adapter.progress import with_bar


class Settings(Protocol):
    """What is measured in one run."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Numbers of ranks, each a pipeline of its own."""


S = TypeVar("S", bound=Settings)
R = TypeVar("R")


def chosen(options: dict[str, Any], *, full: Sequence[S], quick: Sequence[S]) -> Sequence[S]:
    """The plan of a command line.

    Args:
        options: ``quick``, and settings by name, None where not given; with any, the plan is its first run with those.
        full, quick: the two plans.
    """
    plan = quick if options.pop("quick") else full
    given = {
        name: tuple(value) if isinstance(value, list) else value for name, value in options.items() if value is not None
    }
    first: Any = plan[0]
    return [evolve(first, **given)] if given else plan


def rows_of(plan: Sequence[S], measure: Callable[[S, int], list[R]]) -> list[tuple[S, list[R]]]:
    """What ``measure(settings, ranks)`` finds for each number of ranks of each run, with a progress bar."""
    cases = [(settings, ranks) for settings in plan for ranks in settings.ranks]
    measured = {case: measure(*case) for case in with_bar(cases, "pipelines")}
    return [(each, [row for ranks in each.ranks for row in measured[each, ranks]]) for each in plan]
