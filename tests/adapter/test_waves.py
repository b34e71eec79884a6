"""Windows that are cut and run ahead give what one stage gives, in every situation and whatever the caller does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest

pytest.importorskip("megatron.core")

import torch
from megatron.core import parallel_state

from art_adapter import TrainerRank
from art_adapter.runtime import language_model
from art_adapter.tiny_gpt import Cut

from .bodies import BODIES
from .callers import CUT
from .hosts import Host, host
from .playing import SMALL, Play, Seen, _apart, close_only, difference, play_one
from .processes import on_ranks

SITUATIONS: dict[str, dict[str, int]] = {
    "one window": {},
    "windows of one item": {"items_at_once": 1},
    "little memory": {"memory_budget_bytes": SMALL},
}
LOOPS = (
    "windows_of_nested_inputs_in_source_order",
    "one_backward_for_all_windows",
    "leaving_the_loop_early",
    "a_forward_between_two_windows",
    "another_slot_inside_the_loop",
    "an_optimizer_step_inside_the_loop",
    "five_steps",
)
AFTER_ADAM = 1e-4


@attrs.frozen
class Situated(Host):
    """The reference, told how much it may run at once; on several stages its windows are cut at every root."""

    options: dict[str, int] = attrs.field(factory=dict)

    def trainer(self, runtime: Any) -> Any:
        return TrainerRank(runtime, host=self.trainer_class, deadline=30.0, microbatch_tokens=CUT, **self.options)


def situated(options: dict[str, int]) -> Situated:
    own = host("reference")
    return Situated("situated", own.records, own.trainer_class, own.build, own.adapter, {}, options)


def without_parameters(seen: Seen) -> Seen:
    kept = {name: value for name, value in seen.here_close.items() if not name.startswith("parameters")}
    return attrs.evolve(seen, here_close=kept)


def parameters(seen: Seen) -> dict[str, torch.Tensor]:
    """Adam divides a gradient by its own size: where it is nearly zero, its last bits count."""
    return {name: value for name, value in seen.here_close.items() if name.startswith("parameters")}


def play_situations(rank: int, cut: Cut) -> dict[str, Seen]:
    runtime = host("reference").build(cut)
    return {
        f"{name}: {body}": close_only(play_one(situated(options), runtime, BODIES[body]))
        for name, options in SITUATIONS.items()
        for body in LOOPS
    }


@pytest.fixture(scope="module")
def situations() -> Iterator[Any]:
    yield on_ranks(play_situations, 1, Cut()), on_ranks(play_situations, 2, Cut(pipeline=2, layers_per_stage=(1, 3)))


@pytest.mark.parametrize("body", LOOPS)
@pytest.mark.parametrize("name", SITUATIONS)
def test_windows_that_are_cut_and_run_ahead_give_what_one_stage_gives(situations: Any, name: str, body: str) -> None:
    (one,), stages = situations
    alone, together = one[f"{name}: {body}"], [stage[f"{name}: {body}"] for stage in stages]
    why = difference(without_parameters(alone), list(map(without_parameters, together)))
    why = why or _apart(list(map(parameters, together)), parameters(alone), AFTER_ADAM)
    assert not why, why


# ---- what is special about several stages


def special(rank: int) -> dict[str, Any]:
    """What ran when, how often was planned, and what happens when memory runs out."""
    runtime = host("reference").build(Cut(pipeline=2))
    play = Play(situated({"items_at_once": 1}), runtime)
    trainer, seen = play.trainer, {}
    forwards: list[int] = []
    plans: list[int] = []
    own = type(trainer)._plan_flat_forward
    trainer._plan_flat_forward = lambda requests: plans.append(len(requests)) or own(trainer, requests)
    decoder = language_model(runtime.model[0]).decoder
    handle = decoder.register_forward_hook(lambda *_: forwards.append(1))
    seen["ran at each window"] = []
    for window in trainer.forward_micro_batches(play.requests(4)):
        seen["ran at each window"].append(len(forwards))
        play.loss(window.outputs).backward()
    plans.clear()
    for _ in range(2):
        for window in trainer.forward_micro_batches(play.requests(6)):
            play.loss(window.outputs).backward()
            del window
            play.step()
        seen["plans of six windows with a step in each"], plans[:] = len(plans), []
    handle.remove()
    handle = decoder.register_forward_hook(
        out_of_memory if parallel_state.is_pipeline_last_stage() else lambda *_: None
    )
    for name, run in (
        ("windows", lambda: list(trainer.forward_micro_batches(play.requests(3)))),
        ("forward", lambda: trainer.dp_rank_forward(play.requests(3))),
    ):
        try:
            run()
        except Exception as error:
            seen[name] = type(error).__name__, str(error)
    handle.remove()
    play.loss(trainer.dp_rank_forward(play.request(0))).backward()
    trainer.close()
    return seen


def out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.fixture(scope="module")
def on_two_stages() -> list[dict[str, Any]]:
    return on_ranks(special, 2)


def test_the_first_stage_is_a_window_ahead_and_the_last_one_is_not(on_two_stages: Any) -> None:
    first, last = (seen["ran at each window"] for seen in on_two_stages)
    assert (first, last) == ([2, 3, 4, 4], [1, 2, 3, 4])


def test_a_caller_who_steps_in_every_window_plans_each_hardly_more_than_once(on_two_stages: Any) -> None:
    assert all(6 <= seen["plans of six windows with a step in each"] <= 7 for seen in on_two_stages)


@pytest.mark.parametrize("entry", ["windows", "forward"])
def test_a_deferred_forward_that_runs_out_of_memory_is_the_trainers_error_in_the_same_words_on_every_rank(
    on_two_stages: Any, entry: str
) -> None:
    (kind, text), other = (seen[entry] for seen in on_two_stages)
    assert kind == "TrainerRankMemoryError" and (kind, text) == other
    assert "estimated_required_bytes=" in text and "packed_tokens=" in text
