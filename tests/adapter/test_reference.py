"""The reference trainer in one process: what it computes is right by plain torch, and what is wrong is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from art_adapter import (
    ForwardInput,
    ReferenceTrainerRank,
    TrainerRankMemoryError,
    TrainerRankSlotStateError,
)
from art_adapter.lora import SlotRef, use_lora_slot
from art_adapter.packing import packed_length
from art_adapter.runtime import Runtime
from art_adapter.tiny_gpt import Cut, Shape, adapter, build_runtime, licence_text, licence_text_inputs

from .training import ADAM, gradients, loss_of, with_slots

# ---- outputs


def test_target_logprobs_are_the_gathered_log_softmax_of_the_logits(trainer: ReferenceTrainerRank) -> None:
    request = licence_text_inputs(1, logits=True, top_k=5, hidden_states=True)[0]
    output = trainer.dp_rank_forward(request)
    expected = output.logits.float().log_softmax(-1)
    assert torch.equal(output.target_logprobs, expected.gather(1, request.target_tokens[:, None])[:, 0])
    assert torch.equal(output.top_k.logprobs, expected.sort(descending=True).values[:, :5])
    assert torch.equal(expected.gather(1, output.top_k.tokens), output.top_k.logprobs)
    assert output.hidden_states.shape == (len(request.input_tokens), trainer.hidden_size)
    assert output.target_logprobs.dtype == torch.float32


def test_logits_are_megatrons_own(trainer: ReferenceTrainerRank, runtime: Runtime) -> None:
    request = licence_text_inputs(1, logits=True, checkpoint=None)[0]
    length = len(request.input_tokens)
    mask = torch.ones(1, 1, length, length).tril() == 0
    own = runtime.model[0](request.input_tokens[None], torch.arange(length)[None], mask)[0]
    torch.testing.assert_close(trainer.dp_rank_forward(request).logits, own, rtol=1e-5, atol=1e-5)


def test_small_chunks_of_the_head_change_nothing(runtime: Runtime) -> None:
    requests = licence_text_inputs(3, logits=True, top_k=3)
    whole = with_slots(ReferenceTrainerRank(runtime)).dp_rank_forward(requests)
    chunked = with_slots(ReferenceTrainerRank(runtime, head_chunk_tokens=7)).dp_rank_forward(requests)
    for a, b in zip(whole, chunked, strict=True):
        torch.testing.assert_close(a.target_logprobs, b.target_logprobs)
        torch.testing.assert_close(a.logits, b.logits)
        assert torch.equal(a.top_k.tokens, b.top_k.tokens)


def test_an_ignored_target_is_zero_and_several_targets_keep_their_shape(trainer: ReferenceTrainerRank) -> None:
    tokens = torch.arange(10)
    targets = torch.stack([tokens + 1, torch.full((10,), -100), tokens + 2], dim=1)
    many = trainer.dp_rank_forward(ForwardInput(input_tokens=tokens, target_tokens=targets))
    one = trainer.dp_rank_forward(ForwardInput(input_tokens=tokens, target_tokens=tokens + 2))
    assert many.target_logprobs.shape == (10, 3)
    assert not many.target_logprobs[:, 1].any()
    assert torch.equal(many.target_logprobs[:, 2], one.target_logprobs)


def test_a_request_that_wants_nothing_gets_nothing(trainer: ReferenceTrainerRank) -> None:
    silent, other = trainer.dp_rank_forward([ForwardInput(input_tokens=torch.arange(4)), *licence_text_inputs(1)])
    assert (silent.target_logprobs, silent.top_k, silent.logits, silent.hidden_states) == (None,) * 4
    assert other.target_logprobs is not None


def test_outputs_may_be_changed_in_place(trainer: ReferenceTrainerRank) -> None:
    output = trainer.dp_rank_forward(licence_text_inputs(1, logits=True)[0])
    output.logits.div_(2.0)
    (output.logits.square().mean() + output.target_logprobs.mean()).backward()
    trainer.zero_grad()


def test_training_works_after_inference_mode(trainer: ReferenceTrainerRank) -> None:
    requests = licence_text_inputs(2)
    with torch.inference_mode():
        silent = trainer.dp_rank_forward(requests)
    assert not silent[0].target_logprobs.requires_grad
    loss_of(trainer.dp_rank_forward(requests)).backward()
    trainer.zero_grad()


# ---- packing


def test_packed_equals_one_by_one(trainer: ReferenceTrainerRank) -> None:
    requests = licence_text_inputs(6, logits=True)
    packed = trainer.dp_rank_forward(requests)
    for request, output in zip(requests, packed, strict=True):
        torch.testing.assert_close(trainer.dp_rank_forward(request).logits, output.logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("depth", [1, 3])
def test_sharing_a_prefix_equals_not_sharing_it(runtime: Runtime, depth: int) -> None:
    requests = licence_text_inputs(4, shared_prefix=16)
    found = []
    for max_depth in (0, depth):
        trainer = with_slots(ReferenceTrainerRank(runtime, shared_prefix_max_depth=max_depth))
        outputs = trainer.dp_rank_forward(requests)
        loss_of(outputs).backward()
        found.append(([output.target_logprobs.detach() for output in outputs], gradients(trainer)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
    tokens = [request.input_tokens for request in requests]
    saved = packed_length(tokens, max_depth=0) - packed_length(tokens, max_depth=depth)
    assert saved >= 3 * 16


# ---- slots


def test_slots_differ_and_are_selected_by_request_default_and_push(trainer: ReferenceTrainerRank) -> None:
    tokens = licence_text_inputs(1)[0]
    by_request = {
        name: trainer.dp_rank_forward(licence_text_inputs(1, checkpoint=name)[0]).target_logprobs
        for name in ("A", "B", None)
    }
    assert not torch.equal(by_request["A"], by_request["B"])
    assert not torch.equal(by_request["A"], by_request[None])
    assert torch.equal(trainer.dp_rank_forward(tokens).target_logprobs, by_request["A"])
    with trainer.push_checkpoint("B"):
        assert torch.equal(trainer.dp_rank_forward(tokens).target_logprobs, by_request["B"])
        with trainer.push_checkpoint(None):
            assert torch.equal(trainer.dp_rank_forward(tokens).target_logprobs, by_request[None])
    assert torch.equal(trainer.dp_rank_forward(tokens).target_logprobs, by_request["A"])


def test_one_plan_may_mix_slots(trainer: ReferenceTrainerRank) -> None:
    names = ["A", "B", None, "A"]
    mixed = trainer.dp_rank_forward([licence_text_inputs(1, checkpoint=name)[0] for name in names])
    for name, output in zip(names, mixed, strict=True):
        alone = trainer.dp_rank_forward(licence_text_inputs(1, checkpoint=name)[0])
        torch.testing.assert_close(output.target_logprobs, alone.target_logprobs, rtol=1e-5, atol=1e-5)


def test_a_lora_slot_is_frozen(trainer: ReferenceTrainerRank) -> None:
    trainer.load_lora_slot("A", adapter(trainer.runtime.provider, seed=1), alpha=8.0)
    frozen, trained = trainer.dp_rank_forward(
        [licence_text_inputs(1, lora="A")[0], licence_text_inputs(1, checkpoint="A")[0]]
    )
    torch.testing.assert_close(frozen.target_logprobs, trained.target_logprobs, rtol=1e-5, atol=1e-5)
    assert not frozen.target_logprobs.requires_grad


def test_gradients_reach_the_slot_and_the_head_only(trainer: ReferenceTrainerRank, runtime: Runtime) -> None:
    head = trainer.module("value", lambda: torch.nn.Linear(trainer.hidden_size, 1))
    assert trainer.module("value", lambda: torch.nn.Linear(1, 1)) is head
    hidden = trainer.dp_rank_forward(licence_text_inputs(1, hidden_states=True)[0]).hidden_states
    head(hidden).mean().backward()
    assert all(parameter.grad is not None for parameter in trainer._checkpoint_slot_params_by_name["A"])
    assert all(parameter.grad is None for parameter in trainer._checkpoint_slot_params_by_name["B"])
    assert all(parameter.grad is None for parameter in runtime.model[0].parameters())
    before = head.weight.detach().clone()
    trainer.optim_step(params=ADAM)
    assert not torch.equal(head.weight, before)


def test_a_head_without_gradients_is_left_alone(trainer: ReferenceTrainerRank) -> None:
    head = trainer.module("value", lambda: torch.nn.Linear(trainer.hidden_size, 1))
    before = head.weight.detach().clone()
    loss_of(trainer.dp_rank_forward(licence_text_inputs(2))).backward()
    trainer.optim_step(params=ADAM)
    assert torch.equal(head.weight, before)


def test_lora_gradients_are_those_of_merged_weights(trainer: ReferenceTrainerRank, runtime: Runtime) -> None:
    """The oracle is the base model with one weight replaced by W + scale B A, differentiated by plain autograd."""
    site = trainer._sites[2]
    slot = site.adapters[SlotRef("checkpoint", "A")]
    request = licence_text_inputs(1)[0]
    trainer.load_checkpoint_slot(
        "one", {k: v for k, v in adapter(runtime.provider, seed=1).items() if site.name in k}, alpha=8.0
    )
    trainer.dp_rank_forward(licence_text_inputs(1, checkpoint="one")[0]).target_logprobs.sum().backward()
    a, b = slot.A.detach().clone().requires_grad_(), slot.B.detach().clone().requires_grad_()
    merged = site.linear.weight.detach() + slot.scale * b @ a
    path = f"{site.name}.weight"
    plan = trainer._plan_flat_forward([request])
    prepared = trainer._prepare_packed_forward(plan.groups[0].packed)
    base = runtime.model[0]

    def run() -> torch.Tensor:
        with use_lora_slot(None):
            return trainer._forward_packed(plan.groups[0].items, prepared)[0].target_logprobs.sum()

    owner, name = base.get_submodule(path.rpartition(".")[0]), "weight"
    kept = owner._parameters.pop(name)
    owner.weight = merged
    try:
        run().backward()
    finally:
        del owner.weight
        owner._parameters[name] = kept
    torch.testing.assert_close([a.grad, b.grad], gradients(trainer, "one"), rtol=1e-4, atol=1e-5)


# ---- micro-batches


def test_nested_inputs_keep_source_order(trainer: ReferenceTrainerRank) -> None:
    a, b, c, d = licence_text_inputs(4)
    nested = [a, (b, iter([c])), [[d]]]
    items = [a, [b, [c]], [[d]]]
    flat = [trainer.dp_rank_forward(request).target_logprobs for request in (a, b, c, d)]
    batches = list(trainer.forward_micro_batches(nested))
    outputs = [output for batch in batches for output in batch.outputs]
    assert [index for batch in batches for index in batch.indices] == [0, 1, 2]
    assert [item for batch in batches for item in batch.inputs] == items
    found = [outputs[0], outputs[1][0], outputs[1][1][0], outputs[2][0][0]]
    for expected, output in zip(flat, found, strict=True):
        torch.testing.assert_close(output.target_logprobs, expected, rtol=1e-5, atol=1e-5)
    assert batches[0].select(["x", "y", "z"]) == ["x", "y", "z"]


def test_a_small_budget_cuts_into_windows_that_fit(runtime: Runtime) -> None:
    requests = licence_text_inputs(6)
    generous = with_slots(ReferenceTrainerRank(runtime))
    whole = list(generous.forward_micro_batches(requests))
    budget = whole[0].stats.estimated_required_bytes // 3
    tight = with_slots(ReferenceTrainerRank(runtime, memory_budget_bytes=budget))
    batches = list(tight.forward_micro_batches(requests))
    assert len(whole) == 1 < len(batches)
    assert all(batch.stats.estimated_required_bytes <= budget == batch.stats.available_bytes for batch in batches)
    assert [batch.stats.global_start for batch in batches[1:]] == [batch.stats.global_stop for batch in batches[:-1]]
    assert sum(batch.stats.local_count for batch in batches) == 6


def test_what_cannot_fit_is_refused(runtime: Runtime) -> None:
    trainer = with_slots(ReferenceTrainerRank(runtime, memory_budget_bytes=1000))
    with pytest.raises(TrainerRankMemoryError, match="forward_micro_batches: the forward needs an estimated"):
        next(trainer.forward_micro_batches(licence_text_inputs(2)))
    with pytest.raises(TrainerRankMemoryError, match="1000 are available"):
        trainer.dp_rank_forward(licence_text_inputs(2))


# ---- mistakes


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: {"a": ForwardInput(input_tokens=torch.arange(3))}, TypeError, "must not be a dict"),
        (lambda: ["text"], TypeError, "not str"),
        (lambda: [torch.arange(3)], TypeError, "not Tensor"),
        (lambda: [3], TypeError, "not int"),
        (lambda: [request(input_tokens=torch.arange(0))], ValueError, "input_tokens must not be empty"),
        (lambda: [request(input_tokens=torch.tensor([256]))], ValueError, r"must be in \[0, 256\), found 256 to 256"),
        (lambda: [request(target_tokens=torch.arange(4))], ValueError, r"input_tokens \(3,\), target_tokens \(4,\)"),
        (lambda: [request(target_tokens=torch.tensor([1, 2, -1]))], ValueError, "target_tokens must be in"),
        (lambda: [request(top_k=257)], ValueError, "top_k=257 exceeds vocabulary size 256"),
        (lambda: [request(checkpoint="C")], ValueError, "Unknown checkpoint slot: 'C'"),
        (lambda: [request(lora="A")], ValueError, "Unknown lora slot: 'A'"),
    ],
)
def test_a_wrong_input_is_refused(runtime: Runtime, make: Callable[[], Any], error: type, message: str) -> None:
    trainer = with_slots(ReferenceTrainerRank(runtime))
    with pytest.raises(error, match=message):
        trainer.dp_rank_forward(make())
    with pytest.raises(error, match=message):
        next(trainer.forward_micro_batches([make()]))


def request(**fields: Any) -> ForwardInput:
    return ForwardInput(**{"input_tokens": torch.arange(3), "logits": True, **fields})


def test_a_wrong_request_is_refused_when_it_is_made() -> None:
    with pytest.raises(ValueError, match="top_k must be >= 1, not 0"):
        request(top_k=0)
    with pytest.raises(ValueError, match="both checkpoint and lora"):
        request(checkpoint="A", lora="A")


def test_a_wrong_adapter_is_refused(trainer: ReferenceTrainerRank) -> None:
    full = adapter(trainer.runtime.provider)
    site = "decoder.layers.0.mlp.linear_fc2"
    with pytest.raises(ValueError, match=r"does not have: decoder\.layers\.4\.x"):
        trainer.load_checkpoint_slot("C", {"decoder.layers.4.x.lora_A": torch.zeros(1)})
    with pytest.raises(ValueError, match=rf"{site}: lora_A, lora_B must be"):
        trainer.load_checkpoint_slot("C", {f"{site}.lora_A": full[f"{site}.lora_A"]})
    with pytest.raises(ValueError, match=r"adapter_config\['r'\]=8, but the weights have rank \[4\]"):
        trainer.load_checkpoint_slot("C", full, adapter_config={"r": 8, "lora_alpha": 8.0})
    with pytest.raises(ValueError, match="alpha=4 contradicts"):
        trainer.load_checkpoint_slot("C", full, alpha=4, adapter_config={"lora_alpha": 8.0})
    assert trainer.load_checkpoint_slot("C", full) == 16


def test_a_step_without_or_before_a_backward_is_refused(trainer: ReferenceTrainerRank) -> None:
    with pytest.raises(TrainerRankSlotStateError, match=r"no gradients on any rank for slots \['A', 'B'\]"):
        trainer.optim_step(params=ADAM)
    with pytest.raises(ValueError, match=r"Unknown checkpoint slots: \['C'\]"):
        trainer.optim_step(params=ADAM, checkpoints=["C"])
    outputs = trainer.dp_rank_forward(licence_text_inputs(2))
    loss = loss_of(outputs)
    loss.backward(retain_graph=True)
    with pytest.raises(TrainerRankSlotStateError, match="wait for their backward"):
        trainer.optim_step(params=ADAM)
    with pytest.raises(TrainerRankSlotStateError, match="cannot load checkpoint slot 'A'"):
        trainer.load_checkpoint_slot("A", adapter(trainer.runtime.provider))
    loss.backward()
    trainer.optim_step(params=ADAM)


def test_slots_cannot_be_changed_while_one_is_pushed(trainer: ReferenceTrainerRank) -> None:
    with trainer.push_checkpoint("A"):
        with pytest.raises(RuntimeError, match="cannot set a LoRA or checkpoint while one is pushed"):
            trainer.set_checkpoint("B")
        with pytest.raises(RuntimeError, match="cannot load a LoRA or checkpoint while one is pushed"):
            trainer.load_checkpoint_slot("B", {})
    with pytest.raises(RuntimeError, match="no LoRA or checkpoint is pushed"):
        trainer.pop_pushed_lora_or_checkpoint()


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (Cut(pipeline=5), "5 stages need at least 5 layers, the model has 4"),
        (Cut(pipeline=2, virtual=3), "6 stages need at least 6 layers"),
        (Cut(pipeline=2, layers_per_stage=(4, 0)), "must be 2 numbers >= 1 that add up to 4 layers"),
        (Cut(virtual=5), "5 stages need at least 5 layers"),
        (Cut(pipeline=2), "a world of 1 ranks cannot hold tensor=1 times context=1 times pipeline=2"),
    ],
)
def test_a_wrong_cut_is_refused_by_one_process_alone(runtime: Runtime, cut: Cut, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_runtime(Shape(), cut)


def test_the_licence_text_is_long_enough_to_cut_from() -> None:
    assert len(licence_text()) > 4096
    lengths = {len(request.input_tokens) for request in licence_text_inputs(8, shortest=10, longest=30)}
    assert len(lengths) > 4 and min(lengths) >= 10 and max(lengths) <= 30
