"""The reference trainer: right by plain autograd and by itself, on one process and on two."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from art_adapter import (
    AdamParams,
    ForwardInput,
    ForwardOutput,
    ReferenceTrainerRank,
    TrainerRankMemoryError,
    TrainerRankSlotStateError,
)
from art_adapter.lora import SlotRef, use_lora_slot
from art_adapter.packing import packed_length
from art_adapter.runtime import Runtime
from art_adapter.tiny_gpt import Cut, Shape, adapter, build_runtime, licence_text, licence_text_inputs

from .processes import on_ranks

ADAM = AdamParams(learning_rate=1e-2)


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    yield build_runtime()
    if started:
        dist.destroy_process_group()


@pytest.fixture
def trainer(runtime: Runtime) -> ReferenceTrainerRank:
    return with_slots(ReferenceTrainerRank(runtime))


def with_slots(trainer: ReferenceTrainerRank) -> ReferenceTrainerRank:
    for name, seed in (("A", 1), ("B", 2)):
        trainer.load_checkpoint_slot(name, adapter(trainer.runtime.provider, seed=seed), alpha=8.0)
    trainer.set_checkpoint("A")
    return trainer


def loss_of(outputs: list[ForwardOutput]) -> torch.Tensor:
    return torch.stack([-output.target_logprobs.mean() for output in outputs]).sum()


def gradients(trainer: ReferenceTrainerRank, slot: str = "A") -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in trainer._checkpoint_slot_params_by_name[slot]]


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


# ---- two processes


def data_parallel(rank: int) -> Any:
    trainer = with_slots(ReferenceTrainerRank(build_runtime()))
    total = torch.tensor([float(rank + 1)])
    trainer.dp_reduce(total)
    weights = trainer._checkpoint_slot_params_by_name["A"]
    seen, gradients, norms, after = [], [], [], [[weight.detach().clone() for weight in weights]]
    for _ in range(2):
        for batch in trainer.forward_micro_batches(licence_text_inputs(5)):
            if batch.outputs:
                loss_of(batch.outputs).backward()
            seen += batch.indices
        gradients.append(trainer._reduce_dynamic_grads(weights, scale_grads=1.0))
        norms.append(trainer.optim_step(params=ADAM)["grad_norm"])
        after.append([weight.detach().clone() for weight in weights])
    return total.item(), seen, gradients, norms, after


def test_two_data_parallel_ranks_step_like_one_on_the_union(runtime: Runtime) -> None:
    """Both see the gradients of the union and make AdamW's step out of them.

    Their weights are not compared with those of one rank: AdamW divides a gradient by its own size, so where it is
    nearly zero, how the sum over ranks was rounded becomes a difference of up to a whole step.
    """
    zero, one = on_ranks(data_parallel, 2)
    alone = data_parallel(0)
    assert (zero[0], one[0], alone[0]) == (3.0, 3.0, 1.0)
    assert (zero[1], one[1], alone[1]) == ([0, 2, 4] * 2, [1, 3] * 2, [0, 1, 2, 3, 4] * 2)
    torch.testing.assert_close(zero[2], alone[2], rtol=0, atol=1e-6)
    assert zero[3] == one[3] == pytest.approx(alone[3], rel=1e-6)
    for ours, theirs in zip(zero[4], one[4], strict=True):
        assert all(map(torch.equal, ours, theirs))
    torch.testing.assert_close(zero[4], by_adamw(zero[4][0], zero[2], zero[3]), rtol=0, atol=1e-6)


def by_adamw(weights: Any, gradients: Any, norms: list[float]) -> list[list[torch.Tensor]]:
    """The weights before and after each step of torch's own AdamW."""
    own = [torch.nn.Parameter(weight.clone()) for weight in weights]
    adamw = torch.optim.AdamW(
        own, lr=ADAM.learning_rate, betas=(ADAM.beta1, ADAM.beta2), weight_decay=ADAM.weight_decay
    )
    after = [weights]
    for step, norm in zip(gradients, norms, strict=True):
        for weight, gradient in zip(own, step, strict=True):
            weight.grad = gradient * min(1.0, ADAM.grad_clip_norm / norm)
        adamw.step()
        after.append([weight.detach().clone() for weight in own])
    return after


def wrong_counts(rank: int) -> Any:
    trainer = with_slots(ReferenceTrainerRank(build_runtime()))
    with pytest.raises(ValueError) as caught:
        next(trainer.forward_micro_batches(licence_text_inputs(rank + 1)))
    return str(caught.value)


def tensor_parallel(rank: int, *, sequence_parallel: bool) -> Any:
    tensor = dist.get_world_size()
    cut = Cut(tensor=tensor, sequence_parallel=sequence_parallel and tensor > 1)
    trainer = with_slots(ReferenceTrainerRank(build_runtime(Shape(), cut)))
    outputs = trainer.dp_rank_forward(licence_text_inputs(3, logits=True, hidden_states=True, top_k=2))
    logits = [output.logits.detach() for output in outputs]
    (loss_of(outputs) + outputs[0].hidden_states.square().mean()).backward()
    del outputs
    gathered = [_whole(site, half) for site in trainer._sites for half in "AB"]
    norm = trainer.optim_step(params=ADAM)["grad_norm"]
    return logits, gathered, norm


def _whole(site: Any, half: str) -> torch.Tensor:
    """A gradient put together from its shards, in the order of the full weight."""
    parameter = getattr(site.adapters[SlotRef("checkpoint", "A")], half)
    if not parameter.lora_tp_sharded:
        return parameter.grad
    shards = [torch.empty_like(parameter.grad) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, parameter.grad)
    if half == "A":
        return torch.cat(shards, dim=1)
    pieces = [shard.chunk(site.parts) for shard in shards]
    return torch.cat([piece[part] for part in range(site.parts) for piece in pieces])


def plain_tensor_parallel(rank: int) -> Any:
    return tensor_parallel(rank, sequence_parallel=False)


def sequence_parallel(rank: int) -> Any:
    return tensor_parallel(rank, sequence_parallel=True)


@pytest.mark.parametrize("body", [plain_tensor_parallel, sequence_parallel])
def test_two_tensor_parallel_ranks_compute_what_one_does(runtime: Runtime, body: Callable[[int], Any]) -> None:
    zero, one = on_ranks(body, 2)
    alone = body(0)
    for found in (zero, one):
        torch.testing.assert_close(found[0], alone[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found[1], alone[1], rtol=1e-3, atol=1e-4)
        assert found[2] == pytest.approx(alone[2], rel=1e-5)


def cut_by_hand(rank: int, *, virtual: int, counts: tuple[int, ...] | None) -> Any:
    """Run the stages in order, passing activations and their gradients by plain sends."""
    pipeline = dist.get_world_size()
    cut = Cut(pipeline=pipeline, virtual=virtual, layers_per_stage=counts) if pipeline > 1 else Cut()
    trainer = ReferenceTrainerRank(build_runtime(Shape(), cut))
    chunks, config = list(trainer.runtime.model), trainer.runtime.provider
    for site in trainer._sites:
        site.adapters.clear()
    from art_adapter import lora

    ref = SlotRef("checkpoint", "A")
    lora.load(trainer._sites, ref, adapter(config, seed=1), provider=config, alpha=8.0, trainable=True)
    trainer._known_slots.add(ref)
    trainer.set_checkpoint("A")
    plan = trainer._plan_flat_forward(licence_text_inputs(3, logits=True))
    prepared = trainer._prepare_packed_forward(plan.groups[0].packed)
    boundary = (plan.packed_tokens, 1, config.hidden_size)
    kept, outputs = [], None
    for stage in range(pipeline * cut.virtual):
        if stage % pipeline != rank:
            continue
        trainer.runtime.model = [chunks[stage // pipeline]]
        received = None
        if stage > 0:
            received = torch.empty(boundary)
            dist.recv(received, (rank - 1) % pipeline)
            chunks[stage // pipeline].set_input_tensor(received.requires_grad_())
        with use_lora_slot(ref):
            hidden = trainer._decoder_hidden(prepared)
        kept.append((stage, received, hidden))
        if stage < pipeline * cut.virtual - 1:
            dist.send(hidden.detach(), (rank + 1) % pipeline)
        else:
            outputs = trainer._project_head(plan.groups[0].items, prepared, hidden.squeeze(1))
    for stage, received, hidden in reversed(kept):
        if stage == pipeline * cut.virtual - 1:
            loss_of(outputs).backward()
        else:
            gradient = torch.empty(boundary)
            dist.recv(gradient, (rank + 1) % pipeline)
            hidden.backward(gradient)
        if received is not None:
            dist.send(received.grad, (rank - 1) % pipeline)
    names = [f"{site.name}.{half}" for site in trainer._sites for half in "AB"]
    grads = dict(zip(names, (p.grad for p in lora.parameters(trainer._sites, ref)), strict=True))
    return None if outputs is None else [o.logits.detach() for o in outputs], grads


def two_even_stages(rank: int) -> Any:
    return cut_by_hand(rank, virtual=1, counts=None)


def two_uneven_stages(rank: int) -> Any:
    return cut_by_hand(rank, virtual=1, counts=(1, 3))


def four_virtual_stages(rank: int) -> Any:
    return cut_by_hand(rank, virtual=2, counts=None)


@pytest.mark.parametrize("body", [two_even_stages, two_uneven_stages, four_virtual_stages])
def test_a_model_cut_into_stages_is_the_same_model_bit_for_bit(runtime: Runtime, body: Callable[[int], Any]) -> None:
    zero, one = on_ranks(body, 2)
    alone = body(0)
    assert all(map(torch.equal, one[0], alone[0]))
    grads = {**zero[1], **one[1]}
    assert set(zero[1]).isdisjoint(one[1]) and set(grads) == set(alone[1]) and len(grads) == 32
    assert all(torch.equal(grads[name], alone[1][name]) for name in grads)


def test_another_number_of_items_on_another_rank_is_refused_by_both() -> None:
    zero, one = on_ranks(wrong_counts, 2)
    assert zero == one
    assert "by rank: [1, 2]" in zero


def on_context_ranks(rank: int, context: int) -> Any:
    """Outputs, gradients and the norm where the loss is a sum over tokens."""
    trainer = with_slots(ReferenceTrainerRank(build_runtime(cut=Cut(context=context))))
    outputs = trainer.dp_rank_forward(licence_text_inputs(3, shared_prefix=7, logits=True))
    torch.stack([-output.target_logprobs.sum() for output in outputs]).sum().backward()
    reduced = trainer._reduce_dynamic_grads(trainer._checkpoint_slot_params_by_name["A"], scale_grads=1.0)
    found = [(output.target_logprobs.detach(), output.logits.detach()) for output in outputs]
    del outputs  # whose logits wait for a backward
    return found, reduced, trainer.optim_step(params=ADAM)["grad_norm"]


def test_context_ranks_share_out_the_tokens_and_add_up_to_one_process(runtime: Runtime) -> None:
    whole, grads, norm = on_context_ranks(0, 1)
    shares = on_ranks(on_context_ranks, 2, 2)
    for place, tensors in enumerate(whole):
        for number, tensor in enumerate(tensors):
            found = torch.cat([share[0][place][number] for share in shares])
            assert len(found) == len(tensor) and all(len(share[0][place][number]) for share in shares)
            torch.testing.assert_close(found.sort(0).values, tensor.sort(0).values, rtol=1e-4, atol=1e-4)
    for _, reduced, own_norm in shares:
        torch.testing.assert_close(reduced, grads, rtol=1e-3, atol=1e-4)
        assert own_norm == pytest.approx(norm, rel=1e-5)
