"""Every action runs under what the caller's thread was set to when he called."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import pytest
import torch

from pipeline_engine.run.modes import Modes
from tests.run.playing import ROWS, Layer, Rank, batch, loss_of, on_ranks

SLOT: ContextVar[str] = ContextVar("SLOT", default="none")


def now() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.get_default_dtype(),
        SLOT.get(),
    )


def test_modes_are_taken_along_and_put_back() -> None:
    token = SLOT.set("teacher")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        modes, expected = Modes.of_caller(), now()
    SLOT.reset(token)
    outside = now()
    assert modes.run(now) == expected != outside == now()
    assert not modes.differentiates


def test_inference_mode_may_be_left_for_a_call_that_was_made_outside() -> None:
    modes = Modes.of_caller()
    with torch.inference_mode():
        assert modes.run(now)[:2] == (True, False)
        assert now()[:2] == (False, True)


def test_what_raises_under_modes_leaves_none_behind() -> None:
    with torch.no_grad():
        modes = Modes.of_caller()
    outside = now()
    with pytest.raises(ZeroDivisionError):
        modes.run(lambda: 1 // 0)
    assert now() == outside


class Witness(Layer):
    """A stage that notes the modes of its forwards and of its backwards."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.seen: list[tuple[Any, ...]] = []

    def forward(self, x: torch.Tensor, *, number: int = 0) -> torch.Tensor:
        self.seen.append(now())
        y = super().forward(x, number=number)
        if y.requires_grad:
            y.register_hook(lambda _: self.seen.append((True, *now()[1:])))
        return y


def test_a_stage_sees_the_callers_modes_in_its_forward_and_in_its_backward() -> None:
    def on_rank(rank: Rank) -> None:
        SLOT.set("student")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = now()
            for item in rank.pipeline.stream(batch([2] * 5)):
                with torch.autocast("cpu", enabled=False), torch.inference_mode(False):
                    loss_of(item.outputs.float(), item.index).backward()
            rank.pipeline.flush()
        assert len(rank.stage.seen) == 10 and set(rank.stage.seen) == {expected}
        assert not torch.is_autocast_enabled("cpu")

    on_ranks(on_rank, 3, "1f1b", Witness)


def test_a_backward_casts_as_its_ask_did_whatever_the_caller_is_set_to_by_then() -> None:
    def casting(dtype: torch.dtype | None) -> torch.autocast:
        return torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None)

    def on_rank(rank: Rank) -> None:
        items, asked = rank.pipeline.stream(batch([2] * 4)), []
        for dtype in (torch.bfloat16, None, torch.float16, torch.bfloat16):
            with casting(dtype):
                asked.append(now())
                item = next(items)
            with casting(torch.float16 if dtype == torch.bfloat16 else torch.bfloat16):
                loss_of(item.outputs.float(), item.index).backward()
        assert rank.stage.seen == [modes for modes in asked for _ in ("forward", "backward")]

    on_ranks(on_rank, 1, "1f1b", Witness)


def test_what_the_caller_changes_in_his_loop_holds_for_the_forwards_that_come_then() -> None:
    def on_rank(rank: Rank) -> None:
        SLOT.set("student")
        for item in rank.pipeline.stream(batch([2] * 6)):
            if item.index == 2:
                SLOT.set("teacher")
            with torch.no_grad():  # the loop's business: whether the call differentiates was said when it began
                assert item.outputs.requires_grad
        slots = [seen[-1] for seen in rank.stage.seen]
        ahead = rank.graph.num_ranks - rank.number  # forwards that have run when an item is handed out
        assert slots == ["student"] * (2 + ahead) + ["teacher"] * (4 - ahead), slots

    on_ranks(on_rank, 3, "1f1b", Witness)


def test_a_stage_sees_the_callers_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)  # for all threads, as torch has it
    try:

        def on_rank(rank: Rank) -> None:
            next(rank.pipeline.stream(batch([1])))
            assert rank.stage.seen[0][4] is torch.float64

        on_ranks(on_rank, 2, "1f1b", lambda number: Witness(number).double())
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_stage_sees_that_nothing_is_differentiated(mode: Any) -> None:
    def on_rank(rank: Rank) -> None:
        with mode():
            expected = now()
            for item in rank.pipeline.stream(batch([2] * 4)):
                assert item.outputs.is_inference() == (mode is torch.inference_mode)
        assert len(rank.stage.seen) == 4 and set(rank.stage.seen) == {expected}

    on_ranks(on_rank, 3, "1f1b", Witness)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_the_engine_makes_its_own_tensors_on_the_cpu_whatever_the_default_device_of_the_caller(schedule: str) -> None:
    def on_rank(rank: Rank) -> None:
        microbatches = batch(ROWS)
        with torch.device("meta"):
            for item in rank.pipeline.stream(microbatches):
                loss_of(item.outputs, item.index).backward()
            rank.pipeline.flush()
        rank.check_gradients(range(len(ROWS)), ROWS)
        losses = rank.pipeline.step(microbatches, loss_of)
        assert [loss.device.type for loss in losses] == ["cpu"] * len(ROWS)

    on_ranks(on_rank, 2, schedule=schedule)
