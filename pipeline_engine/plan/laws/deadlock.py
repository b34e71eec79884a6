"""Deadlock: of all ranks that cannot go on, those that wait for each other."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from pipeline_engine.plan.actions import Action


@frozen
class Stuck:
    """A rank that cannot go on.

    Attributes:
        step: where it stands in its program.
        head: the action that it cannot perform.
        waits_for: what is missing, in words.
        on: the rank that would have to act, maybe itself later on.
    """

    step: int
    head: Action
    waits_for: str
    on: int


def describe(name: str, stuck: Mapping[int, Stuck]) -> str:
    """The shortest circle of ranks that wait for each other, one line each."""
    lines = [
        f"rank {rank} step {stuck[rank].step}   {stuck[rank].head}   waits for {stuck[rank].waits_for}"
        for rank in circle(stuck)
    ]
    return "\n".join([f"schedule {name!r} deadlocks:", *lines])


def circle(stuck: Mapping[int, Stuck]) -> list[int]:
    """The ranks of the shortest circle, from the lowest on; or one rank that waits for one that has come to its end."""
    found: list[list[int]] = []
    seen: set[int] = set()
    for start in stuck:
        path: list[int] = []
        rank = start
        while rank in stuck and rank not in seen:
            seen.add(rank)
            path.append(rank)
            rank = stuck[rank].on
        if rank in path:
            found.append(path[path.index(rank) :])
        elif rank not in stuck:
            found.append(path[-1:])
    shortest = min(found, key=len)
    lowest = shortest.index(min(shortest))
    return shortest[lowest:] + shortest[:lowest]
