"""What a trainer that plans by the memory it finds admits on several stages, on a device that is made up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest

pytest.importorskip("megatron.core")

from art_adapter.memory import MemoryCheck
from art_adapter.packing import packed_length
from art_adapter.reference import ReferenceTrainerRank
from art_adapter.requests import TrainerRankMemoryError
from art_adapter.runtime import language_model
from art_adapter.tiny_gpt import Cut

from .devices import Device
from .hosts import host
from .playing import Play
from .processes import on_ranks

PER_TOKEN = 102_400
"""Bytes that a token takes on a device, from its forward to its backward."""
BOUNDARY = 0.01
"""What it takes beside that where it comes in and goes out, with its gradients: 4 times 64 float32 numbers."""


class Measuring(ReferenceTrainerRank):
    """The reference, but by what a token takes and what is left of ``capacity`` bytes, under ART's names for both."""

    capacity = 0

    def __init__(self, runtime: Any, **options: Any) -> None:
        self.device_memory = Device(bytes_per_token=PER_TOKEN)
        self._memory_profiles: dict[Any, int] = {}
        super().__init__(runtime, **options)

    @property
    def memory_budget_bytes(self) -> int:
        return self._available_memory_bytes()

    @memory_budget_bytes.setter
    def memory_budget_bytes(self, _: int) -> None:
        """It has none."""

    def _available_memory_bytes(self) -> int:
        return self.capacity - self.device_memory.allocated()

    def _estimate_required_memory_bytes_from_values(self, *, packed_tokens: int) -> int:
        return PER_TOKEN * packed_tokens

    def _estimate(self, requests: Sequence[Any]) -> int:
        tokens = sum(
            packed_length((requests[index].input_tokens for index in indices), max_depth=self.shared_prefix_max_depth)
            for indices in self._group_active_request_indices(requests).values()
        )
        return self._estimate_required_memory_bytes_from_values(packed_tokens=tokens)

    def _memory_check(self, plan: Any, *, sync_across_dp: bool = False) -> MemoryCheck:
        required = self._estimate_required_memory_bytes_from_values(packed_tokens=plan.packed_tokens)
        return self._worst([required], self.memory_budget_bytes, group=self._forward_memory_group())[0]

    def _update_memory_profile(self, plan: Any, peak: int) -> None:
        self._memory_profiles[plan.packed_tokens] = peak


class Caller(Play):
    """A caller of a trainer that measures; his items have no beginning in common."""

    def __init__(self, runtime: Any) -> None:
        super().__init__(attrs.evolve(host("reference"), trainer_class=Measuring), runtime)
        self.trainer._memory = device = self.trainer.device_memory
        for chunk in runtime.model:
            language_model(chunk).decoder.register_forward_hook(device.note)

    def widths(self, lengths: Sequence[int], *, capacity: float, at_once: int, holds: bool = False) -> list[Any]:
        """How many items each window has; last, what ended the loop if it was an error.

        Args:
            lengths: of the items, in tokens.
            capacity: of the device, in tokens.
            at_once: the most items of a window.
            holds: whether he keeps all outputs, instead of giving each window its backward.
        """
        self.trainer.capacity, self.trainer.items_at_once = int(capacity * PER_TOKEN), at_once
        items = [self.request(number, length=length) for number, length in enumerate(lengths)]
        found: list[Any] = []
        kept = []
        try:
            for window in self.trainer.forward_micro_batches(items):
                found.append(len(window.indices))
                if holds:
                    kept.append(window.outputs)
                else:
                    self.loss(window.outputs).backward()
                del window
        except Exception as error:
            found.append(type(error).__name__)
        return found

    def admitted(self, length: int, *, capacity: float) -> bool:
        """Whether one item runs at once, on a device of so many tokens."""
        self.trainer.capacity = int(capacity * PER_TOKEN)
        try:
            self.loss(self.trainer.dp_rank_forward(self.request(0, length=length))).backward()
        except TrainerRankMemoryError:
            return False
        return True


def admissions(rank: int, cut: Cut) -> dict[str, Any]:
    caller = Caller(host("reference").build(cut))
    tens, growing = [10] * 8, [10, 10, 10, 10, 40, 40]
    seen = {
        "holds": caller.widths(tens, capacity=35, at_once=2, holds=True),
        "gives": caller.widths(tens, capacity=35, at_once=2),
    }
    if cut.pipeline > 1:  # so that it plans while windows are under way
        caller.trainer._horizon.size = 1
    seen["plans while others run ahead"] = caller.widths(growing, capacity=45, at_once=1)
    seen["just fits without boundaries"] = caller.admitted(10, capacity=10)
    seen["just fits with boundaries"] = caller.admitted(10, capacity=10 * (1 + BOUNDARY))
    seen["windows without boundaries"] = caller.widths(tens[:4], capacity=20, at_once=4)
    seen["windows with boundaries"] = caller.widths(tens[:4], capacity=20 * (1 + BOUNDARY), at_once=4)
    return seen


@pytest.fixture(scope="module")
def on_one() -> dict[str, Any]:
    return on_ranks(admissions, 1, Cut())[0]


@pytest.fixture(scope="module")
def on_two() -> list[dict[str, Any]]:
    return on_ranks(admissions, 2, Cut(pipeline=2))


def test_what_the_caller_holds_leaves_less_for_the_next_windows_as_on_one_stage(on_one: Any, on_two: Any) -> None:
    assert on_one["holds"] == [2, 1, "TrainerRankMemoryError"]
    assert [seen["holds"] for seen in on_two] == [on_one["holds"]] * 2


@pytest.mark.parametrize("what", ["gives", "plans while others run ahead"])
def test_what_has_been_given_back_when_a_window_runs_is_not_in_its_way(on_one: Any, on_two: Any, what: str) -> None:
    assert on_one[what] == {"gives": [2] * 4, "plans while others run ahead": [1] * 6}[what]
    assert [seen[what] for seen in on_two] == [on_one[what]] * 2


def test_what_comes_in_and_goes_out_at_a_stages_ends_is_counted(on_one: Any, on_two: Any) -> None:
    assert on_one["just fits without boundaries"] and on_one["windows without boundaries"] == [2, 2]
    for seen in on_two:
        assert not seen["just fits without boundaries"] and seen["just fits with boundaries"]
        assert seen["windows without boundaries"] == [1] * 4 and seen["windows with boundaries"] == [2, 2]
