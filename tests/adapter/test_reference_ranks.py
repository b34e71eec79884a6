"""The reference trainer on several ranks, cut by data, tensors, context or hand: what one process computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from art_adapter import (
    ReferenceTrainerRank,
)
from art_adapter.lora import SlotRef, use_lora_slot
from art_adapter.runtime import Runtime
from art_adapter.tiny_gpt import Cut, Shape, adapter, build_runtime, licence_text_inputs

from .processes import on_ranks
from .training import ADAM, loss_of, with_slots


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
