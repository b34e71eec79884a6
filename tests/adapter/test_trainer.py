"""What is special about several stages: which class one gets, and that what goes wrong on one rank is known to all."""

from __future__ import annotations

from time import monotonic
from typing import Any

import attrs
import pytest

pytest.importorskip("megatron.core")

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from art_adapter import ReferenceTrainerRank, TrainerRank
from art_adapter.runtime import language_model
from art_adapter.tiny_gpt import Cut
from art_adapter.trainer import PipelinedForward, pipelined

from .art_on_cpu import why_not
from .hosts import OWN, host
from .miniatures import july
from .playing import Play
from .processes import on_ranks

SECONDS = 10.0
"""In which every rank must know that another one failed."""


def told(function: Any) -> tuple[str, str, float]:
    """The type and the text of what a function raised, and after how many seconds."""
    started = monotonic()
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error), monotonic() - started
    return "nothing", "", monotonic() - started


def mistakes(rank: int) -> dict[str, tuple[str, str, float]]:
    """Things that go wrong on one of two stages of two data ranks, one after the other."""
    own = host("reference")
    runtime = own.build(Cut(pipeline=2, layers_per_stage=(1, 3)))
    play = Play(own, runtime)
    trainer, is_last = play.trainer, parallel_state.is_pipeline_last_stage()
    seen = {"other rank": told(lambda: own.load(trainer, "C", 3, r=2 + 2 * (rank == 3)))}
    seen["other inputs"] = told(lambda: trainer.dp_rank_forward(play.requests(2 + is_last)))
    seen["other slot"] = told(lambda: trainer.dp_rank_forward(play.request(0, checkpoint="B" if is_last else "A")))
    seen["other order"] = told(lambda: list(trainer.forward_micro_batches(play.requests(4)[:: -1 if is_last else 1])))
    seen["other number"] = told(lambda: list(trainer.forward_micro_batches(play.requests(4 + is_last))))
    loss = play.loss(trainer.dp_rank_forward(play.requests(2)))
    loss.backward(retain_graph=True)
    if rank != 1:  # one rank keeps what waits for another backward
        del loss
    seen["kept by one"] = told(play.step)
    loss = None
    seen["and then"] = told(play.step)
    handle = language_model(runtime.model[0]).decoder.register_forward_hook(failing if is_last else lambda *_: None)
    seen["failing stage"] = told(lambda: trainer.dp_rank_forward(play.request(0)))
    handle.remove()
    seen["works again"] = told(lambda: play.loss(trainer.dp_rank_forward(play.request(0))).backward())
    return seen


def failing(*_: Any) -> None:
    raise ArithmeticError("this stage cannot")


@pytest.fixture(scope="module")
def seen() -> list[dict[str, tuple[str, str, float]]]:
    return on_ranks(mistakes, 4)


def kinds(seen: Any, what: str) -> list[str]:
    assert all(each[what][2] < SECONDS for each in seen)
    return [each[what][0] for each in seen]


def test_a_slot_that_differs_within_one_stage_is_refused_by_all_ranks(seen: Any) -> None:
    assert kinds(seen, "other rank") == ["RuntimeError"] * 4
    assert all("is not the same on all ranks" in each["other rank"][1] for each in seen)


@pytest.mark.parametrize("what", ["other inputs", "other slot", "other order"])
def test_stages_with_other_inputs_find_out_before_anything_runs(seen: Any, what: str) -> None:
    assert kinds(seen, what) == ["UsageError"] * 4
    assert all("ranks have planned differently" in each[what][1] for each in seen)


def test_another_number_of_items_is_refused_by_the_host_itself(seen: Any) -> None:
    assert kinds(seen, "other number") == ["ValueError"] * 4


def test_if_outputs_wait_on_one_rank_no_rank_steps(seen: Any) -> None:
    assert kinds(seen, "kept by one") == ["TrainerRankSlotStateError"] * 4
    assert "optim_step failed on rank 1" in seen[0]["kept by one"][1]
    assert kinds(seen, "and then") == ["nothing"] * 4


def test_a_stage_that_fails_fails_every_stage_and_the_trainer_can_be_used_again(seen: Any) -> None:
    assert kinds(seen, "failing stage") == ["PeerFailedError"] * 2 + ["ArithmeticError"] * 2
    assert "this stage cannot" in seen[0]["failing stage"][1]
    assert kinds(seen, "works again") == ["nothing"] * 4


def other_inputs_on_one_tensor_rank(rank: int) -> list[tuple[str, str, float]]:
    own = host("reference")
    play = Play(own, own.build(Cut(tensor=2, pipeline=2)))
    found = [told(lambda: play.trainer.dp_rank_forward(play.requests(2 + (rank == 3))))]
    return [*found, told(lambda: play.loss(play.trainer.dp_rank_forward(play.requests(2))).backward())]


def test_tensor_ranks_with_other_inputs_find_out_before_they_would_wait_for_each_other_for_ever() -> None:
    seen = on_ranks(other_inputs_on_one_tensor_rank, 4)
    for (kind, text, seconds), (after, *_) in seen:
        assert (kind, after) == ("UsageError", "nothing") and seconds < SECONDS
        assert "rank 0 has" in text and "rank 3 has" in text


def classes(rank: int, stages: int) -> list[bool]:
    runtime = host("reference").build(Cut(pipeline=stages))
    by_default, chosen = TrainerRank(runtime), TrainerRank(runtime, host=july.TrainerRank)
    expected = [ReferenceTrainerRank, july.TrainerRank]
    if stages > 1:
        expected = [pipelined(each) for each in expected]
    found = [type(each) is kind for each, kind in zip((by_default, chosen), expected, strict=True)]
    for each in (by_default, chosen):
        if isinstance(each, PipelinedForward):
            each.close()
    return found


@pytest.mark.parametrize("stages", [1, 2])
def test_one_gets_the_hosts_own_class_on_one_stage_and_the_pipelined_one_on_several(stages: int) -> None:
    assert on_ranks(classes, stages, stages) == [[True, True]] * stages


class Sharing(ReferenceTrainerRank):
    """Its rank's share of any packed row is three tokens."""

    def _prepare_packed_forward(self, packed: Any) -> Any:
        prepared = super()._prepare_packed_forward(packed)
        return attrs.evolve(prepared, tokens=prepared.tokens[:, :3])


def lengths(rank: int) -> tuple[list[int], float]:
    """Of the microbatches of a window that is planned, and their weight."""
    own = attrs.evolve(host("reference"), trainer_class=Sharing)
    play = Play(own, own.build(Cut(virtual=2)))
    requests = [play.request(0, length=9), play.request(1, length=14, checkpoint="B")]
    wave = play.trainer._planned(lambda: ReferenceTrainerRank.dp_rank_forward(play.trainer, requests))
    play.trainer.close()
    return [group.tokens for group in wave.groups], sum(group.microbatch.weight for group in wave.groups)


def test_a_microbatch_is_as_long_as_its_packed_row_however_little_of_it_this_rank_has() -> None:
    """What is decided by it, every context-parallel rank must decide alike, with shares of whatever length."""
    assert on_ranks(lengths, 1) == [([9, 14], 23.0)]


def unchanged(rank: int) -> list[bool]:
    """The pipelined classes over a model that is not cut."""
    runtime = host("reference").build(Cut())
    found = []
    for name in OWN:
        own = host(name)
        trainers = [own.trainer_class(runtime), pipelined(own.trainer_class)(runtime)]
        outputs = []
        for trainer in trainers:
            own.load(trainer, "A", 1)
            trainer.set_checkpoint("A")
            request = own.records.ForwardInput(input_tokens=torch.arange(9), target_tokens=torch.arange(9))
            outputs.append(next(iter(trainer.forward_micro_batches([request]))).outputs[0].target_logprobs)
            outputs[-1].sum().backward()
            trainer.optim_step(params=own.records.AdamParams(learning_rate=1e-2))
        found.append(torch.equal(*outputs) and trainers[1].stages is None)
    return found


def test_over_a_model_that_is_not_cut_the_pipelined_class_changes_nothing() -> None:
    assert on_ranks(unchanged, 1) == [[True] * len(OWN)]


def load_without_the_last_layers(rank: int) -> tuple[str, str, float]:
    own = host("art")
    trainer = Play(own, own.build(Cut(pipeline=2))).trainer
    full = own.adapter(trainer.runtime.provider)
    first = {name: weight for name, weight in full.items() if ".layers.0." in name}
    found = told(lambda: trainer.load_checkpoint_slot("C", first, alpha=8.0))
    dist.barrier()
    trainer.close()
    return found


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_an_adapter_that_leaves_a_stage_of_art_without_weights_is_refused_by_all_ranks() -> None:
    found = on_ranks(load_without_the_last_layers, 2)
    assert [kind for kind, _, _ in found] == ["RuntimeError"] * 2
    assert all("loaded no adapter sites" in text for _, text, _ in found)
