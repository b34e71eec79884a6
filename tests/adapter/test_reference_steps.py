"""The reference trainer's optimizer step: over slots and over base weights it is that of plain torch."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("megatron.core")

from art_adapter import (
    AdamParams,
    ReferenceTrainerRank,
    TrainerRankSlotStateError,
)
from art_adapter.runtime import Runtime
from art_adapter.tiny_gpt import Shape, adapter, build_runtime, licence_text_inputs

from .training import ADAM, loss_of, with_slots

# ---- steps


def test_three_steps_lower_the_loss(trainer: ReferenceTrainerRank) -> None:
    losses = []
    for _ in range(4):
        for batch in trainer.forward_micro_batches(licence_text_inputs(6)):
            loss = loss_of(batch.outputs)
            loss.backward()
        losses.append(loss.item())
        stats = trainer.optim_step(params=ADAM)
        assert stats["update_successful"] == 1.0 and stats["learning_rate"] == ADAM.learning_rate
    assert losses == sorted(losses, reverse=True)


def test_the_norm_and_the_step_are_those_of_plain_adamw(trainer: ReferenceTrainerRank) -> None:
    loss_of(trainer.dp_rank_forward(licence_text_inputs(3))).backward()
    params = trainer._checkpoint_slot_params_by_name["A"]
    copies = [torch.nn.Parameter(parameter.detach().clone()) for parameter in params]
    for copy, parameter in zip(copies, params, strict=True):
        copy.grad = parameter.grad * 0.5
    plain = torch.optim.AdamW(copies, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    norm = torch.nn.utils.clip_grad_norm_(copies, 0.1)
    plain.step()
    stats = trainer.optim_step(params=ADAM, scale_grads=0.5)
    assert stats["grad_norm"] == pytest.approx(norm.item(), rel=1e-6)
    torch.testing.assert_close([p.detach() for p in params], [c.detach() for c in copies], rtol=1e-5, atol=1e-6)


def test_only_the_named_slots_step(trainer: ReferenceTrainerRank) -> None:
    loss_of(trainer.dp_rank_forward([licence_text_inputs(1, checkpoint=name)[0] for name in "AB"])).backward()
    before = [parameter.detach().clone() for parameter in trainer._checkpoint_slot_params_by_name["B"]]
    trainer.optim_step(params=ADAM, checkpoints=["A"])
    assert all(map(torch.equal, before, trainer._checkpoint_slot_params_by_name["B"]))
    trainer.optim_step(params=ADAM)
    assert not any(map(torch.equal, before, trainer._checkpoint_slot_params_by_name["B"]))


def test_a_gradient_that_is_not_finite_changes_nothing(trainer: ReferenceTrainerRank) -> None:
    (loss_of(trainer.dp_rank_forward(licence_text_inputs(1))) * math.inf).backward()
    before = [parameter.detach().clone() for parameter in trainer._checkpoint_slot_params_by_name["A"]]
    assert trainer.optim_step(params=ADAM)["update_successful"] == 0.0
    assert all(map(torch.equal, before, trainer._checkpoint_slot_params_by_name["A"]))
    assert all(parameter.grad is None for parameter in trainer._checkpoint_slot_params_by_name["A"])


def test_a_restored_optimizer_continues_as_if_never_saved(runtime: Runtime) -> None:
    def step(trainer: ReferenceTrainerRank) -> None:
        loss_of(trainer.dp_rank_forward(licence_text_inputs(2))).backward()
        trainer.optim_step(params=ADAM)

    trainer = with_slots(ReferenceTrainerRank(runtime))
    assert trainer.checkpoint_slot_optimizer_state("A") is None
    step(trainer)
    state = trainer.checkpoint_slot_optimizer_state("A")
    names = [f"{site.name}.lora_{half}" for site in trainer._sites for half in "AB"]
    weights = dict(zip(names, (p.detach().clone() for p in trainer._checkpoint_slot_params_by_name["A"]), strict=True))
    step(trainer)
    expected = [parameter.detach().clone() for parameter in trainer._checkpoint_slot_params_by_name["A"]]
    trainer.load_checkpoint_slot("A", weights, alpha=8.0, optimizer_state=state)
    step(trainer)
    assert all(map(torch.equal, expected, trainer._checkpoint_slot_params_by_name["A"]))
    foreign = adapter(runtime.provider, r=2)
    with pytest.raises(TrainerRankSlotStateError, match="optimizer state has layout"):
        trainer.load_checkpoint_slot("A", foreign, optimizer_state=state)


# ---- base weights


@pytest.mark.parametrize("tied", [False, True])
def test_base_weights_step_as_in_plain_torch(runtime: Runtime, tied: bool) -> None:
    one, other = build_runtime(Shape(tied=tied)), build_runtime(Shape(tied=tied), train_base=True)
    trainer, model = ReferenceTrainerRank(one, base_model=True), other.model[0]
    adam = AdamParams(learning_rate=1e-3, weight_decay=0.1, grad_clip_norm=0.5)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    request = licence_text_inputs(1)[0]
    length = len(request.input_tokens)
    mask = torch.ones(1, 1, length, length).tril() == 0
    for _ in range(3):
        trainer.dp_rank_forward(request).target_logprobs.mean().neg().backward()
        norm = trainer.optim_step(params=adam)["grad_norm"]
        logits = model(request.input_tokens[None], torch.arange(length)[None], mask)[0]
        torch.nn.functional.cross_entropy(logits, request.target_tokens).backward()
        assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)), rel=1e-4)
        plain.step()
        plain.zero_grad()
    found, expected = dict(one.model[0].named_parameters()), dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-4, msg=name)


def test_base_weights_that_are_not_trained_require_no_gradient_and_are_no_slot(runtime: Runtime) -> None:
    trainer = ReferenceTrainerRank(build_runtime())
    assert not trainer.dp_rank_forward(licence_text_inputs(1)[0]).target_logprobs.requires_grad
    with pytest.raises(ValueError, match=r"Unknown checkpoint slots: \[None\]"):
        trainer.optim_step(params=ADAM, checkpoints=[None])


def test_base_weights_are_not_stepped_while_outputs_of_any_slot_wait(runtime: Runtime) -> None:
    trainer = with_slots(ReferenceTrainerRank(build_runtime(), base_model=True))
    trainer.dp_rank_forward(licence_text_inputs(1, checkpoint=None)[0]).target_logprobs.sum().backward()
    waiting = trainer.dp_rank_forward(licence_text_inputs(1)[0])
    with pytest.raises(TrainerRankSlotStateError, match="cannot step checkpoint slot None while"):
        trainer.optim_step(params=ADAM)
    waiting.target_logprobs.sum().backward()
    trainer.optim_step(params=ADAM)
