"""Random numbers: the same masks however the model is cut, and however often a forward is run."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline_engine as pe
from pipeline_engine.run.randomness import RandomState, Turns, alone, carried, state_of
from pipeline_engine.run.transports.base import Transport
from pipeline_engine.testing import run_ranks_in_threads
from tests.run.playing import DEADLINE, WIDTH, Rank, batch, loss_of, on_ranks
from tests.run.processes import Crash, run_in_processes
from tests.strategies import chain_for

LAYERS = 4
ROWS = [3, 1, 4, 2, 5]


class Dropping(torch.nn.Module):
    """A layer with dropout."""

    def __init__(self, number: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(torch.tanh(x @ self.weight), 0.5, True)


class Stage(torch.nn.Module):
    """Some layers, with or without recomputing them in the backward."""

    def __init__(self, numbers: range, recompute: bool) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(Dropping(number) for number in numbers))
        self.recompute = recompute

    def forward(self, x: torch.Tensor, *, number: int = 0) -> torch.Tensor:
        if self.recompute:
            return torch.utils.checkpoint.checkpoint(self.layers, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.layers(x)  # type: ignore[no-any-return]


def gradients(
    num_ranks: int, schedule: str = "1f1b", *, recompute: bool = False, invalidate: bool = False
) -> list[torch.Tensor]:
    """The gradients of all layers after one stream, on a model cut into ``num_ranks`` stages."""

    def on_rank(transport: Transport) -> dict[int, list[torch.Tensor]]:
        stages, graph = cut_for(schedule, num_ranks, transport.rank, recompute=recompute)
        return train(stages, graph, schedule, transport, invalidate=invalidate)

    torch.manual_seed(7)
    found = {stage: grads for rank in run_ranks_in_threads(on_rank, num_ranks) for stage, grads in rank.items()}
    return [grad for _, grads in sorted(found.items()) for grad in grads]


def cut_for(schedule: str, num_ranks: int, rank: int, *, recompute: bool) -> tuple[dict[int, Stage], pe.StageGraph]:
    """The model in equal pieces, as many as the schedule has stages, and the pieces of one rank."""
    graph = chain_for(schedule, num_ranks)
    each = LAYERS // graph.num_stages
    return {stage: Stage(range(stage * each, (stage + 1) * each), recompute) for stage in graph.stages_of(rank)}, graph


def train(
    stages: dict[int, Stage], graph: pe.StageGraph, schedule: str, transport: Transport, *, invalidate: bool = False
) -> dict[int, list[torch.Tensor]]:
    """The gradients of each stage's layers after one stream."""
    with pe.Pipeline(
        stages, graph=graph, schedule=schedule, transport=transport, deadline=DEADLINE, rng="per-microbatch"
    ) as pipeline:
        for item in pipeline.stream(batch(ROWS)):
            loss_of(item.outputs, item.index).backward()
            if invalidate:
                pipeline.invalidate()
    return {
        number: [parameter.grad for parameter in stage.parameters() if parameter.grad is not None]
        for number, stage in stages.items()
    }


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_dropout_does_not_depend_on_the_cut_or_the_schedule(num_ranks: int, schedule: str) -> None:
    whole = gradients(1)
    for found, expected in zip(gradients(num_ranks, schedule), whole, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_recomputing_draws_the_same_masks(num_ranks: int) -> None:
    for found, expected in zip(gradients(num_ranks, recompute=True), gradients(1), strict=True):
        assert torch.equal(found, expected)


def test_what_is_run_again_draws_the_same_masks() -> None:
    for found, expected in zip(gradients(4, invalidate=True), gradients(1), strict=True):
        assert torch.equal(found, expected)


def test_microbatches_draw_different_masks() -> None:
    first, second = state_of(7, 0), state_of(7, 1)
    assert not torch.equal(first[0], second[0]) and torch.equal(first[0], state_of(7, 0)[0])


@settings(max_examples=30)
@given(st.integers(0, 2**62), st.integers(0, 100), st.integers(1, 5))
def test_states_go_on_where_they_stopped(seed: int, microbatch: int, draws: int) -> None:
    with carried(state_of(seed, microbatch)):
        whole = torch.rand(2 * draws)
    with carried(state_of(seed, microbatch)) as state_after:
        first = torch.rand(draws)
        states = state_after()
    with carried(states):
        second = torch.rand(draws)
    assert torch.equal(torch.cat([first, second]), whole) or draws % 2  # torch draws floats in vectors of even length


def test_the_outer_state_is_left_as_it_was() -> None:
    before = RandomState.now()
    with carried(state_of(1, 2)):
        torch.rand(5)
    assert torch.equal(RandomState.now().cpu, before.cpu)


def test_joins_are_refused_since_their_states_would_differ() -> None:
    graph = pe.StageGraph(edges=[(0, 1), (1, 2), (0, 2)], rank_of=[0, 0, 0])

    def on_rank(transport: Transport) -> None:
        with pytest.raises(pe.UsageError, match="stage 2 joins several inputs"):
            pe.Pipeline(
                {0: abs, 1: abs, 2: abs}, graph=graph, schedule="gpipe", transport=transport, rng="per-microbatch"
            )

    run_ranks_in_threads(on_rank, 1)


def test_an_unknown_keyword_is_refused() -> None:
    def on_rank(transport: Transport) -> None:
        with pytest.raises(pe.UsageError, match="rng is 'mine'"):
            pe.Pipeline(
                {0: abs},
                graph=pe.StageGraph.chain(1, 1),
                schedule="gpipe",
                transport=transport,
                rng="mine",  # type: ignore[arg-type]
            )

    run_ranks_in_threads(on_rank, 1)


@pytest.mark.parametrize("schedule, num_ranks", [("zb-h1", 2), ("zb-h1", 4), ("zb-v", 2), ("dualpipe-v", 2)])
@pytest.mark.parametrize("recompute", [False, True])
def test_split_backwards_draw_the_masks_of_one_process(schedule: str, num_ranks: int, recompute: bool) -> None:
    whole = gradients(1)
    for found, expected in zip(gradients(num_ranks, schedule, recompute=recompute), whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)


def gradients_in_process(rank: int, schedules: list[str]) -> list[dict[int, list[torch.Tensor]]]:
    found = []
    for schedule in schedules:
        torch.manual_seed(7 if rank == 0 else 100 + rank)
        stages, graph = cut_for(schedule, 2, rank, recompute=True)
        found.append(train(stages, graph, schedule, pe.TorchTransport()))
    return found


def test_in_processes_masks_depend_on_the_first_ranks_seed_only() -> None:
    schedules = ["1f1b", "zb-h1"]
    ranks = run_in_processes(gradients_in_process, 2, schedules)
    for rank in ranks:
        assert not isinstance(rank, Crash), rank
    whole = gradients(1)
    for index in range(len(schedules)):
        found = [grad for rank in ranks for grads in rank[index].values() for grad in grads]
        assert all(torch.equal(mine, expected) for mine, expected in zip(found, whole, strict=True))


def test_in_threads_a_backward_that_recomputes_has_the_generator_to_itself() -> None:
    """Ten times, since a race does not show each time."""
    whole = gradients(1)
    for _ in range(10):
        found = gradients(4, recompute=True)
        assert all(torch.equal(mine, expected) for mine, expected in zip(found, whole, strict=True))


class Redrawing(torch.nn.Module):
    """Multiplies by numbers that it draws anew whenever it is run; if a recomputation draws others, it says so."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.seen: dict[int, torch.Tensor] = {}
        self.differ = 0

    def forward(self, x: torch.Tensor, *, number: int = 0) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self._draw, x, number, use_reentrant=False)  # type: ignore[no-any-return]

    def _draw(self, x: torch.Tensor, number: int) -> torch.Tensor:
        drawn = torch.cat([torch.rand(3) for _ in range(50)])
        if number in self.seen:
            self.differ += not torch.equal(drawn, self.seen[number])
        self.seen[number] = drawn
        return x * self.weight * drawn.mean()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_in_threads_without_numbers_of_their_own_recomputations_and_repetitions_draw_what_was_drawn(
    schedule: str,
) -> None:
    def on_rank(rank: Rank) -> list[int]:
        for _ in range(5):
            for item in rank.pipeline.stream(batch(ROWS)):
                loss_of(item.outputs, item.index).backward()
                rank.pipeline.invalidate()
            rank.pipeline.flush()
            for stage in rank.stages.values():
                stage.seen.clear()
        return [stage.differ for stage in rank.stages.values()]

    assert on_ranks(on_rank, 4, schedule, Redrawing) == [[0]] * 4


def test_a_stage_that_draws_nothing_takes_no_turns_after_its_first_forward() -> None:
    turns = Turns()
    with turns.of_forward(0):
        pass
    with ThreadPoolExecutor(1) as other, alone(), turns.of_backward(0):
        assert other.submit(lambda: turns.of_backward(0).__enter__()).result(timeout=10) is None
    with turns.of_forward(0):
        torch.rand(1)
    assert turns.of_backward(0) is alone()


READING_THREADS = """
import gc, sys
from threading import Thread
import torch
from pipeline_engine.run.randomness import RandomState

class Cycle:
    def __init__(self):
        self.itself, self.tensor = self, torch.empty(10)  # whose end lets other threads run

def read():
    for _ in range(20_000):
        Cycle(), Cycle(), Cycle(), RandomState.now().restore()

sys.setswitchinterval(1e-5)
gc.set_threshold(50, 2, 2)
threads = [Thread(target=read) for _ in range(3)]
for thread in threads:
    thread.start()
"""


def test_threads_that_read_states_while_garbage_is_collected_do_not_lock_each_other_out() -> None:
    """In a process of its own: if they did, no thread of it could run any more, not even one that watches the time."""
    environment = {**os.environ, "PYTHONPATH": str(Path(pe.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", READING_THREADS], env=environment, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
