"""The stage graph: which stage feeds which, and which rank owns it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Literal, TypeAlias

from attrs import Factory, field, frozen

from pipeline_engine.errors import ScheduleError

Placement = Literal["straight", "looped", "vee"]


def _edges(pairs: Iterable[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted((int(before), int(after)) for before, after in pairs))


def _ranks(ranks: Iterable[int]) -> tuple[int, ...]:
    return tuple(int(rank) for rank in ranks)


def _straight(stages: int, ranks: int) -> list[int]:
    if stages != ranks:
        raise ScheduleError(
            f"placement 'straight' puts one stage on each rank: got {stages} stages on {ranks} ranks; "
            "use 'looped' or 'vee' for several stages a rank."
        )
    return list(range(ranks))


def _looped(stages: int, ranks: int) -> list[int]:
    if stages % ranks:
        raise ScheduleError(f"placement 'looped' needs a multiple of {ranks} stages, got {stages}.")
    return [stage % ranks for stage in range(stages)]


def _vee(stages: int, ranks: int) -> list[int]:
    if stages != 2 * ranks:
        raise ScheduleError(f"placement 'vee' needs two stages a rank: {2 * ranks} for {ranks} ranks, got {stages}.")
    return [*range(ranks), *reversed(range(ranks))]


_PLACEMENTS = {"straight": _straight, "looped": _looped, "vee": _vee}


def _befores(graph: StageGraph) -> tuple[tuple[int, ...], ...]:
    return _neighbours(graph, [(after, before) for before, after in graph.edges])


def _afters(graph: StageGraph) -> tuple[tuple[int, ...], ...]:
    return _neighbours(graph, graph.edges)


def _neighbours(graph: StageGraph, pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """For each stage those that it is paired with; looked up often, so gathered once."""
    lists: list[list[int]] = [[] for _ in graph.rank_of]
    for stage, neighbour in pairs:
        if 0 <= stage < len(lists):
            lists[stage].append(neighbour)
    return tuple(map(tuple, lists))


Suppliers: TypeAlias = dict[tuple[int, int], tuple[int, ...]]


def _supplied(graph: StageGraph) -> Suppliers:
    lists: Suppliers = {}
    for before, after in graph.edges:
        if 0 <= before < len(graph.rank_of):
            key = after, graph.rank_of[before]
            lists[key] = (*lists.get(key, ()), before)
    return lists


def _owned(graph: StageGraph) -> tuple[tuple[int, ...], ...]:
    lists: list[list[int]] = [[] for _ in range(max(graph.rank_of, default=-1) + 1)]
    for stage, rank in enumerate(graph.rank_of):
        if rank >= 0:
            lists[rank].append(stage)
    return tuple(map(tuple, lists))


@frozen(cache_hash=True)
class StageGraph:
    """A directed acyclic graph of stages, numbered along it, each owned by one rank.

    Stage 0 takes the caller's inputs; the last stage's output is what the caller is handed.

    Args:
        edges: pairs (before, after) with before < after.
        rank_of: for each stage the rank that owns it; ranks are numbered 0..P-1 and each owns at least one stage.

    Raises:
        ScheduleError: an edge runs backwards or out of range, a stage has no way in or out, a rank owns nothing.
    """

    edges: tuple[tuple[int, int], ...] = field(converter=_edges)
    rank_of: tuple[int, ...] = field(converter=_ranks)
    _before: tuple[tuple[int, ...], ...] = field(init=False, eq=False, repr=False, default=Factory(_befores, True))
    _after: tuple[tuple[int, ...], ...] = field(init=False, eq=False, repr=False, default=Factory(_afters, True))
    _stages: tuple[tuple[int, ...], ...] = field(init=False, eq=False, repr=False, default=Factory(_owned, True))
    _suppliers: Suppliers = field(init=False, eq=False, repr=False, default=Factory(_supplied, True))

    def __attrs_post_init__(self) -> None:
        self._check_edges()
        self._check_ranks()

    def _check_edges(self) -> None:
        stages = len(self.rank_of)
        for before, after in self.edges:
            if not 0 <= before < after < stages:
                raise ScheduleError(
                    f"edge ({before}, {after}): stages are numbered 0..{stages - 1} along the graph, before < after"
                    f"{_cure(self.edges)}"
                )
        if len(set(self.edges)) != len(self.edges):
            raise ScheduleError(f"edges {list(self.edges)}: each edge is named once.")
        for stage in range(stages):
            if stage > 0 and not self.before(stage):
                raise ScheduleError(f"stage {stage} has no stage before it; only stage 0 takes the caller's inputs.")
            if stage < stages - 1 and not self.after(stage):
                raise ScheduleError(f"stage {stage} has no stage after it; only stage {stages - 1} ends the graph.")

    def _check_ranks(self) -> None:
        if not self.rank_of:
            raise ScheduleError("rank_of is empty: a graph has at least one stage.")
        owners = set(self.rank_of)
        if missing := sorted(set(range(max(owners) + 1)) - owners):
            raise ScheduleError(f"rank_of {list(self.rank_of)}: rank {missing[0]} owns no stage; ranks run 0..P-1.")
        if min(owners) < 0:
            raise ScheduleError(f"rank_of {list(self.rank_of)}: rank {min(owners)} is negative.")

    @classmethod
    def chain(cls, stages: int, ranks: int, placement: Placement = "straight") -> StageGraph:
        """Stages one after the other.

        Args:
            stages: number of stages.
            ranks: number of ranks.
            placement: ``"straight"`` one stage a rank, ``"looped"`` stage s on rank s mod P,
                ``"vee"`` two stages a rank, down and up again.

        Raises:
            ScheduleError: the numbers do not fit the placement.
        """
        if stages < 1 or ranks < 1:
            raise ScheduleError(f"a chain has at least one stage and one rank, got {stages} stages and {ranks} ranks.")
        if placement not in _PLACEMENTS:
            raise ScheduleError(f"placement {placement!r} is unknown; one of {sorted(_PLACEMENTS)}.")
        rank_of = _PLACEMENTS[placement](stages, ranks)
        return cls(edges=[(stage, stage + 1) for stage in range(stages - 1)], rank_of=rank_of)

    def is_placed(self, placement: Placement) -> bool:
        """Whether the stages lie on the ranks as on a chain of that ``placement``; edges do not matter."""
        try:
            return self.rank_of == tuple(_PLACEMENTS[placement](self.num_stages, self.num_ranks))
        except ScheduleError:
            return False

    @property
    def num_stages(self) -> int:
        """Number of stages S."""
        return len(self.rank_of)

    @property
    def num_ranks(self) -> int:
        """Number of ranks P."""
        return len(self._stages)

    @property
    def last_stage(self) -> int:
        """The stage whose output the caller is handed."""
        return len(self.rank_of) - 1

    @property
    def is_chain(self) -> bool:
        """Whether each stage feeds exactly the next one."""
        return self.edges == tuple((stage, stage + 1) for stage in range(self.num_stages - 1))

    @property
    def is_straight(self) -> bool:
        """Whether this is a chain with one stage a rank, in rank order."""
        return self.is_chain and self.rank_of == tuple(range(self.num_stages))

    def before(self, stage: int) -> tuple[int, ...]:
        """Stages whose output ``stage`` takes, in the order of its arguments."""
        return self._before[stage]

    def after(self, stage: int) -> tuple[int, ...]:
        """Stages that take the output of ``stage``."""
        return self._after[stage]

    def suppliers(self, stage: int, rank: int) -> tuple[int, ...]:
        """Stages of ``rank`` whose output ``stage`` takes, in the order of its arguments."""
        return self._suppliers.get((stage, rank), ())

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages that ``rank`` owns, in order."""
        return self._stages[rank]

    def hops_to_end(self) -> tuple[int, ...]:
        """For each stage the number of edges on the longest way from it to the last stage."""
        hops = [0 for _ in self.rank_of]
        for stage in reversed(range(self.last_stage)):
            hops[stage] = 1 + max(hops[after] for after in self.after(stage))
        return tuple(hops)

    def relay(self) -> tuple[int, ...]:
        """Ranks in the order in which an output reaches them, from the last stage's rank on."""
        start = self.rank_of[self.last_stage]
        return (*range(start, -1, -1), *range(start + 1, self.num_ranks))

    def deliveries(self) -> tuple[tuple[int, int], ...]:
        """Pairs (from, to) of ranks on whose way an output reaches every rank once, in order.

        Note [ways of outputs]: an output goes hop by hop, as the gradient comes back: whoever passes it on has just
        needed it himself, and no rank sends more than one copy.  In loops the last rank also feeds the first one, which
        needs an output before those between them have a moment to pass it on, so there each rank gets it at once; hop
        by hop would cost ``interleaved`` 3 % at 8 ranks.
        """
        relay = self.relay()
        if self.num_stages > self.num_ranks and self.is_placed("looped"):
            return tuple((relay[0], rank) for rank in relay[1:])
        return tuple(pairwise(relay))


def _cure(edges: Iterable[tuple[int, int]]) -> str:
    """What to do about edges that run backwards: number the stages anew, unless they close a cycle."""
    before: dict[int, set[int]] = {}
    for source, target in edges:
        before.setdefault(target, set()).add(source)
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        cycle = " -> ".join(map(str, error.args[1]))
        return f"; the stages {cycle} form a cycle, which no order of them can serve: make one stage of them."
    return "; number the stages in the order in which data flows."
