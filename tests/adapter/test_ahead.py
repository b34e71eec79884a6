"""What runs ahead of the caller: bounded by memory, planned no more often than needed, and no secret to the trainer."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

pytest.importorskip("megatron.core")

import pipeline_engine as pe
from art_adapter.ahead import MOST_AT_A_TIME, Horizon, Line, Room, Wave
from art_adapter.memory_watch import WaveMemory


@attrs.frozen
class Check:
    estimated_required_bytes: int
    available_bytes: int


class Call:
    """In the place of ``pe.Waves``: notes what it is told."""

    def __init__(self) -> None:
        self.added = self.taken = 0
        self.open: set[int] = set()
        self.ended = False

    @property
    def waiting(self) -> int:
        return self.added - self.taken

    def add(self, microbatches: list[pe.Microbatch]) -> None:
        self.added += 1

    def take(self) -> list[Any]:
        self.open.add(self.taken)
        self.taken += 1
        return []

    def end(self) -> None:
        self.ended = True


@attrs.define
class Group:
    tokens: int = 10
    differentiates: bool = True
    microbatch: pe.Microbatch = attrs.field(factory=pe.Microbatch)


def line_of(
    count: int,
    *,
    required: int,
    available: int,
    share: float = 1.0,
    boundary: int = 0,
    left: bool = False,
    **group: Any,
) -> tuple[Line, Call]:
    call = Call()
    line = Line(lambda: call, Room(share, boundary, left))  # type: ignore[arg-type, return-value]
    for _ in range(count):
        line.add(Wave(result="window", groups=[Group(**group)], check=Check(required, available)))  # type: ignore[list-item]
    return line, call


def test_waves_run_ahead_as_far_as_they_fit_beside_each_other() -> None:
    line, call = line_of(9, required=10, available=35)
    line.take()
    assert (call.added, call.taken) == (3, 1)
    line.take()  # the first one still waits for its backward
    assert call.added == 3
    call.open.clear()
    line.take()
    assert call.added == 5
    line.end()
    assert call.ended


def test_a_window_that_fills_the_memory_runs_alone_but_runs() -> None:
    line, call = line_of(3, required=10, available=10)
    for number in range(3):
        line.take()
        assert call.added == number + 1
        call.open.clear()


def test_a_stage_holds_its_share_of_an_estimate_for_the_whole_model_and_what_crosses_its_ends() -> None:
    line, call = line_of(9, required=10, available=10, share=0.25)
    line.take()
    assert call.added == 4
    line, call = line_of(9, required=10, available=10, share=0.25, boundary=1, tokens=1)
    line.take()
    assert call.added == 2


def planned(required: int, available: int) -> Wave:
    return Wave(result="window", groups=[Group()], check=Check(required, available))  # type: ignore[list-item]


def test_a_window_is_planned_again_once_the_caller_holds_the_memory_that_it_was_planned_for() -> None:
    line, call = line_of(3, required=10, available=25, left=True)
    line.take()
    assert not line.is_crowded  # 10 are held, and 10 fit into 25 beside them
    line.take()
    assert line.is_crowded
    call.open.clear()
    assert not line.is_crowded
    by_budget, _ = line_of(3, required=10, available=15)
    by_budget.take()
    assert not by_budget.is_crowded  # a trainer whose budget is for each window alone


def test_a_window_that_was_planned_for_what_is_left_beside_others_runs_beside_them() -> None:
    line, call = line_of(1, required=10, available=25, left=True)
    line.take()
    for _ in range(2):
        line.add(planned(required=7, available=15))  # what is held is out of it already
    assert not line.is_crowded
    line.take()
    assert call.added == 3


def test_what_waits_for_no_backward_keeps_no_memory() -> None:
    line, call = line_of(9, required=10, available=20, differentiates=False)
    line.take()
    line.take()
    assert call.added == 3


def test_a_caller_who_steps_in_every_window_plans_each_once_and_others_plan_many_at_a_time() -> None:
    horizon = Horizon()
    assert horizon.size == MOST_AT_A_TIME
    horizon.used()
    assert horizon.size == MOST_AT_A_TIME
    sizes = []
    for _ in range(2):
        horizon.changed(used=1)
        sizes.append(horizon.size)
        horizon.used()
    assert sizes == [1, 1] and horizon.size == 2


class Device:
    """In the place of a device: every piece keeps what it is told to, and takes twice that on the way."""

    is_measured = True

    def __init__(self) -> None:
        self.now = self.most = 1000

    def allocated(self) -> int:
        self.most = self.now
        return self.now

    def peak(self) -> int:
        return self.most

    def run(self, kept: int) -> None:
        self.most = max(self.most, self.now + 2 * kept)
        self.now += kept


def test_pieces_are_added_up_to_the_peak_of_a_wave_that_ran_in_a_row() -> None:
    device, told = Device(), []
    memory = WaveMemory(device, pieces=2, beside=7, report=told.append)
    memory.measure(lambda: device.run(100))
    device.run(5000)  # a piece of another wave
    assert not told
    memory.measure(lambda: device.run(30))
    assert told == [max(200, 100 + 60) + 7]


class OwnError(RuntimeError):
    """In the place of a trainer's memory error."""


def test_running_out_of_memory_is_the_trainers_own_error() -> None:
    def run() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    wave = Wave(groups=[Group(), Group()], check=Check(10, 20), shortage=OwnError)  # type: ignore[list-item]
    with pytest.raises(OwnError, match="packed_tokens=20 microbatches=2 estimated_required_bytes=10"):
        wave.run_piece(run)
