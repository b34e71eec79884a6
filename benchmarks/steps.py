"""Steps over sleeping stages: the drivers that are timed, what a step took, and what it could not have been without."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

import pipeline_engine as pe
from benchmarks.bound import bound
from benchmarks.sleeping import Sleeping
from pipeline_engine.plan.actions import Action, Backward, BackwardInput, BackwardWeight, Forward

ROWS, WIDTH = 4, 64
WARM_UPS = 5
SECONDS_TO_START = 60.0
VERBS: dict[str, type[Forward | Backward | BackwardInput | BackwardWeight]] = {
    "F": Forward,
    "B": Backward,
    "I": BackwardInput,
    "W": BackwardWeight,
}

Step = Callable[[], None]


@frozen
class Repeat:
    """One step on one rank: when it began and ended, and by stage and letter of the verb what its actions took."""

    start: float
    end: float
    took: dict[int, dict[str, list[float]]]


@frozen
class Makespans:
    """Of a step on all ranks, by repeat, in seconds.

    Attributes:
        measured: from the first rank's start to the last rank's end.
        bounds: of actions that take what they took in that repeat, and of nothing else.
    """

    measured: tuple[float, ...]
    bounds: tuple[float, ...]

    @classmethod
    def of(cls, by_rank: Sequence[Sequence[Repeat]], bound_of: Callable[[Sequence[Repeat]], float]) -> Makespans:
        """Put the ranks' repeats together."""
        return cls(measured(by_rank), tuple(map(bound_of, zip(*by_rank, strict=True))))

    @property
    def median(self) -> float:
        """Of what was measured, in seconds."""
        return statistics.median(self.measured)

    @property
    def share(self) -> float:
        """What the engine adds to the bound, in per cent; the median over the repeats."""
        return 100 * statistics.median(m / b - 1 for m, b in zip(self.measured, self.bounds, strict=True))


def measured(by_rank: Sequence[Sequence[Repeat]]) -> tuple[float, ...]:
    """Seconds from the first rank's start to the last rank's end; the clock is one for all processes of a machine."""
    steps = zip(*by_rank, strict=True)
    return tuple(max(each.end for each in step) - min(each.start for each in step) for step in steps)


def bound_of_step(schedule: pe.Schedule, step: Iterable[Repeat]) -> float:
    """The least seconds in which the actions of a step can follow each other.

    Args:
        schedule: that was run; the microbatches of a stage come in order.
        step: of each rank.
    """
    seconds: dict[Action, float] = {}
    for stage, took in (pair for rank in step for pair in rank.took.items()):
        for letter, naps in took.items():
            seconds |= {VERBS[letter](stage, m): each for m, each in enumerate(naps)}
        for m, whole in enumerate(took.get("B", ())):  # a first stage leaves all of a split backward to its second half
            seconds |= {BackwardInput(stage, m): 0.0, BackwardWeight(stage, m): whole}
    return bound(schedule, seconds)


def graph_for(schedule: str, ranks: int) -> pe.StageGraph:
    """A chain with one stage a rank, or two where the schedule wants several."""
    placement = pe.SCHEDULES[schedule].placement
    return pe.StageGraph.chain(ranks * (1 if placement == "straight" else 2), ranks, placement)


def loss_of(outputs: Tensor) -> Tensor:
    """A loss whose gradient every driver knows: the bias of each stage gets the number of rows."""
    return outputs.sum()


def streaming(pipeline: pe.Pipeline, inputs: Sequence[Tensor]) -> Step:
    """The caller's own loop; the weight of a microbatch is its number of rows."""
    data = [pe.Microbatch((hidden,), weight=len(hidden)) for hidden in inputs]

    def stream() -> None:
        for item in pipeline.stream(data):
            loss_of(item.outputs).backward()
        pipeline.flush()

    return stream


def engine_steps(pipeline: pe.Pipeline, inputs: Sequence[Tensor]) -> dict[str, Step]:
    """The caller's own loop, and the closed one."""
    data = [pe.Microbatch((hidden,)) for hidden in inputs]

    def step() -> None:
        pipeline.step(data, lambda outputs, index: loss_of(outputs))

    return {"stream": streaming(pipeline, inputs), "step": step}


def warm_up(step: Step, stages: Mapping[int, Sleeping], rows: int, times: int = WARM_UPS) -> None:
    """The first backward of a process and the first message of a channel are slow; and what is timed must be right.

    Args:
        step: runs forwards and backwards of the whole batch.
        stages: of this rank; they are given no sleep yet.
        rows: of all microbatches.
        times: how often to run it.

    Raises:
        AssertionError: a gradient is wrong.
    """
    for _ in range(times):
        for stage in stages.values():
            stage.bias.grad = None
        step()
        for stage in stages.values():
            gradient = stage.bias.grad
            if gradient is None or not torch.equal(gradient, torch.full_like(gradient, rows)):
                raise AssertionError(f"gradient of a sum over {rows} rows is {gradient}")


def timed_in_turns(
    drivers: Mapping[str, Step], stages: Mapping[int, Sleeping], repeats: int
) -> dict[str, list[Repeat]]:
    """Every step ``repeats`` times, by driver; the drivers take turns."""
    found: dict[str, list[Repeat]] = {driver: [] for driver in drivers}
    for _ in range(repeats):
        for driver, step in drivers.items():
            found[driver].append(timed(step, stages))
    return found


def timed(step: Step, stages: Mapping[int, Sleeping]) -> Repeat:
    """One step, which all ranks begin together."""
    for stage in stages.values():
        stage.naps.took = {}
    dist.barrier()
    start = time.perf_counter()
    step()
    end = time.perf_counter()
    return Repeat(start, end, {number: stage.naps.took for number, stage in stages.items()})
