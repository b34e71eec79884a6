"""Bugs that a pipelined trainer could have, put in on purpose: each is found by a body of the conformance suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

pytest.importorskip("megatron.core")

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from art_adapter import gradients, stages, trainer
from art_adapter.records import Records
from art_adapter.tiny_gpt import Cut, Shape

from .bodies import BODIES
from .hosts import host
from .playing import Seen, difference, play_one
from .processes import on_ranks

Bug = Callable[[], AbstractContextManager[None]]
BUGS: dict[str, tuple[Bug, str, str]] = {}
"""By name: how to put it in, the body that finds it, and words of what is found."""


def found_by(body: str, words: str) -> Callable[[Callable[[], Iterator[None]]], Bug]:
    """Register a bug."""

    def register(function: Callable[[], Iterator[None]]) -> Bug:
        bug = contextmanager(function)
        BUGS[function.__name__] = (bug, body, words)
        return bug

    return register


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    own = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, own)


@found_by("gradients_accumulate_over_forwards_and_backwards", "after 0")
def the_gradient_send_is_dropped() -> Iterator[None]:
    own = stages.boundary_input
    cut_off = lambda model, received: own(model, [tensor.detach() for tensor in received])  # noqa: E731
    with replaced(stages, "boundary_input", cut_off):
        yield


class _SummedOverStages(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total = grads[0].clone()
        dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
        return total


@found_by("gradients_accumulate_over_forwards_and_backwards", "after 0")
def cotangents_are_summed_over_stages() -> Iterator[None]:
    own = Records.output

    def summed(self: Records, tensors: Any) -> Any:
        return own(self, tuple(_SummedOverStages.apply(t) if t is not None and t.requires_grad else t for t in tensors))

    with replaced(Records, "output", summed):
        yield


@found_by("a_custom_head_counts_once_and_stays_the_same_everywhere", "norm")
def heads_are_counted_on_every_stage() -> Iterator[None]:
    with replaced(gradients, "counts_here", lambda parameter: True):
        yield


@found_by("base_weights_are_trained_with_slots_and_without", "norm 0")
def the_copy_of_a_tied_weight_is_counted_too() -> Iterator[None]:
    with replaced(gradients, "is_copy", lambda parameter: False):
        yield


@found_by("base_weights_are_trained_with_slots_and_without", "norm 0")
def gradients_of_a_tied_weight_are_not_summed() -> Iterator[None]:
    with replaced(stages, "trained_copies", lambda chunks: {}):
        yield


@found_by("slots_mixed_in_one_call", "outputs")
def groups_are_permuted() -> Iterator[None]:
    own = stages.StageExecutor.forward
    with replaced(stages.StageExecutor, "forward", lambda self, groups: own(self, [*groups[:-2], *groups[:-3:-1]])):
        yield


@found_by("slots_mixed_in_one_call", "ranks have planned differently")
def one_stage_plans_differently() -> Iterator[None]:
    own = stages.StageExecutor.check_planned_alike

    def on_the_last_stage(self: stages.StageExecutor, groups: list[Any]) -> None:
        if parallel_state.is_pipeline_last_stage():
            groups.reverse()
        own(self, groups)

    with replaced(stages.StageExecutor, "check_planned_alike", on_the_last_stage):
        yield


@found_by("slots_mixed_in_one_call", "outputs")
def the_slot_is_resolved_when_the_stage_runs() -> Iterator[None]:
    with replaced(stages.Group, "run", lambda self, forward: forward(self)):
        yield


@found_by("another_slot_inside_the_loop", "window 1")
def what_ran_ahead_survives_a_change_of_slot() -> Iterator[None]:
    with replaced(trainer, "selection", lambda own: ()):
        yield


@found_by("an_optimizer_step_inside_the_loop", "loop")
def what_ran_ahead_survives_an_optimizer_step() -> Iterator[None]:
    own = trainer.PipelinedForward._windows

    def unaware(self: Any, inputs: Any, **options: Any) -> Iterator[Any]:
        for window in own(self, inputs, **options):
            before = self._changes
            yield window
            self._changes = before

    with replaced(trainer.PipelinedForward, "_windows", unaware):
        yield


def play_bugs(rank: int, cut: Cut, names: list[str]) -> dict[str, Seen]:
    """On one rank: the body that is to find each bug, with the bug in place."""
    own = host("reference")
    runtime = own.build(cut, shape=Shape(tied=True))
    seen = {}
    for name in names:
        bug, body, _ = BUGS[name]
        with bug():
            seen[name] = play_one(own, runtime, BODIES[body])
    return seen


def play_right(rank: int, bodies: list[str]) -> dict[str, Seen]:
    own = host("reference")
    runtime = own.build(Cut(), shape=Shape(tied=True))
    return {body: play_one(own, runtime, BODIES[body]) for body in bodies}


@pytest.fixture(scope="module")
def seen() -> Iterator[tuple[dict[str, Seen], list[dict[str, Seen]]]]:
    (right,) = on_ranks(play_right, 1, sorted({body for _, body, _ in BUGS.values()}))
    yield right, on_ranks(play_bugs, 2, Cut(pipeline=2), list(BUGS))


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_found(seen: Any, name: str) -> None:
    right, stages_with_bug = seen
    _, body, words = BUGS[name]
    why = difference(right[body], [stage[name] for stage in stages_with_bug])
    assert words in why, why or "nothing was found"


def test_stages_that_plan_differently_all_raise_and_say_both_plans(seen: Any) -> None:
    _, stages_with_bug = seen
    for stage in stages_with_bug:
        failed = stage["one_stage_plans_differently"].failed
        assert "UsageError" in failed and "rank 0 has" in failed and "rank 1 has" in failed
