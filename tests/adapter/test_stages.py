"""StageExecutor alone: the few lines by which a trainer would use it instead of refusing several stages.

What is marked ``+`` in the README's diff is what ``Wired`` adds to the September miniature.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("megatron.core")

import torch
from megatron.core import parallel_state

from art_adapter import Group, StageExecutor
from art_adapter.compat import presented_as_one_stage
from art_adapter.lora import use_lora_slot
from art_adapter.tiny_gpt import Cut

from .bodies import BODIES
from .hosts import Host, host
from .miniatures import september
from .playing import Seen, difference, play, play_one
from .processes import on_ranks

WIRED = ("all_combinations_of_outputs", "slots_mixed_in_one_call", "five_steps", "some_inputs_without_gradients")


class Wired(september.TrainerRank):
    """September's trainer without its guard."""

    stages: StageExecutor

    def __init__(self, runtime: Any) -> None:
        with presented_as_one_stage(runtime.provider):  # upstream the guard would go
            super().__init__(runtime)
        self.stages = StageExecutor(
            runtime.model,
            parallel_state.get_pipeline_model_parallel_group(),
            hidden=lambda chunk, group: self._decoder_hidden(group.prepared),
            outputs=lambda chunk, group: self._forward_packed(group.items, group.prepared),
        )

    def _execute_flat_plan(self, plan: Any) -> list[Any]:
        outputs = [september.ForwardOutput(None, None, None, None) for _ in range(plan.request_count)]
        deferred = []
        for group in plan.groups:
            with use_lora_slot(group.slot_ref), nullcontext() if group.grad_enabled else torch.no_grad():
                deferred.append(Group(group.items, self._prepare_packed_forward(group.packed)))
        for group, found in zip(plan.groups, self.stages.forward(deferred), strict=True):
            tracked = self._track_slot_graph_outputs(group.slot_ref, found)
            for index, output in zip(group.request_indices, tracked, strict=True):
                outputs[index] = replace(output, checkpoint=group.slot_ref.name, no_grad=not group.grad_enabled)
        return outputs

    def _reduce_dynamic_grads(self, params: Any, *, scale_grads: float) -> Any:
        self.stages.pipeline.flush()
        return super()._reduce_dynamic_grads(params, scale_grads=scale_grads)

    def close(self) -> None:
        self.stages.pipeline.close()


class WiredHost(Host):
    """Makes the trainer itself, without the adapter's class."""

    def trainer(self, runtime: Any) -> Any:
        return self.trainer_class(runtime)


def play_wired(rank: int, cut: Cut) -> dict[str, Seen]:
    own = host("september")
    wired = WiredHost(own.name, own.records, Wired, own.build, own.adapter, {})
    runtime = own.build(cut)
    return {body: play_one(wired, runtime, BODIES[body]) for body in WIRED}


@pytest.fixture(scope="module")
def seen() -> Any:
    bodies = {name: BODIES[name] for name in WIRED}
    (one,) = on_ranks(play, 1, ("september",), Cut(), bodies)
    return one["september"], on_ranks(play_wired, 2, Cut(pipeline=2))


@pytest.mark.parametrize("body", WIRED)
def test_a_trainer_that_is_wired_by_hand_does_what_one_process_does(seen: Any, body: str) -> None:
    one, stages = seen
    why = difference(one[body], [stage[body] for stage in stages])
    assert not why, why
