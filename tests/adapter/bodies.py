"""What callers do with a TrainerRank: one function per promise of its API, the same over every host and every cut.

A body notes what it sees; the suite compares what was seen on one stage with what was seen on several. Bodies also
assert what must hold on any number of stages.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from art_adapter.agreement import gather
from art_adapter.base_model import is_tied
from art_adapter.compat import slot_parameters_by_name

from .playing import Body, NotHere, Play, close, flat

BODIES: dict[str, Body] = {}
"""By name."""


def body(function: Body) -> Body:
    BODIES[function.__name__] = function
    return function


# ---- outputs


@body
def all_combinations_of_outputs(play: Play) -> None:
    wants = []
    for number, (targets, top_k, logits, hidden) in enumerate(product([False, True], [None, 3], [False, True], [0, 1])):
        request = play.request(number, top_k=top_k, logits=logits, hidden_states=bool(hidden))
        wants.append(request if targets else without_targets(play, request))
    outputs = play.trainer.dp_rank_forward([wants[:5], [[wants[5:9]], wants[9]], [[[wants[10:]]]]])
    play.note_outputs("outputs", outputs)
    play.loss(outputs).backward()
    play.note_gradients()


@body
def several_and_ignored_targets(play: Play) -> None:
    request = play.request(0, length=9)
    targets = torch.stack([request.target_tokens, torch.full((9,), -100), request.input_tokens], dim=1)
    targets[4] = -100
    ignored = torch.full((9,), -100)
    make = play.host.records.ForwardInput
    outputs = play.trainer.dp_rank_forward(
        [
            make(input_tokens=request.input_tokens, target_tokens=targets),
            make(input_tokens=request.input_tokens, target_tokens=ignored),
            make(input_tokens=request.input_tokens.reshape(3, 3), target_tokens=request.target_tokens.reshape(3, 3)),
        ]
    )
    play.note_outputs("outputs", outputs)
    play.loss(outputs).backward()
    play.note_gradients()


@body
def outputs_may_be_changed_in_place(play: Play) -> None:
    output = play.trainer.dp_rank_forward(play.request(0, logits=True))

    def change() -> None:
        output.logits.div_(2.0)
        (output.logits.square().mean() + output.target_logprobs.mean()).backward()

    play.note_error("in place", change)
    play.note_gradients()


@body
def without_gradients(play: Play) -> None:
    with torch.no_grad():
        play.note_outputs("no_grad", play.trainer.dp_rank_forward(play.requests(3, logits=True)))
        play.note_outputs("windows", [w.outputs for w in play.windows(play.requests(3))])
    with torch.inference_mode():
        play.note_outputs("inference_mode", play.trainer.dp_rank_forward(play.requests(2)))
    outputs = play.trainer.dp_rank_forward(play.requests(2))
    play.loss(outputs).backward()
    play.note_gradients()


@body
def some_inputs_without_gradients(play: Play) -> None:
    """``no_grad`` per input, where the host has it."""
    has_it = "no_grad" in getattr(play.host.records.ForwardInput, "__dataclass_fields__", ())
    requests = [play.request(n, **({"no_grad": n % 2 == 0} if has_it else {})) for n in range(4)]
    outputs = play.trainer.dp_rank_forward(requests)
    play.note_outputs("outputs", outputs)
    play.loss(outputs).backward()
    play.note_gradients()


@body
def what_inputs_leave_open_is_decided_by_the_call(play: Play) -> None:
    """``checkpoint`` and ``no_grad`` per call, where the host has them."""
    if "no_grad" not in getattr(play.host.records.ForwardInput, "__dataclass_fields__", ()):
        raise NotHere(f"{play.host.name} decides nothing by call")
    requests = [play.request(0), play.request(1, checkpoint="A", no_grad=True), play.request(2, no_grad=False)]
    outputs = play.trainer.dp_rank_forward(requests, checkpoint="B")
    play.note_outputs("forward", outputs)
    play.loss(outputs).backward()
    for window in play.trainer.forward_micro_batches(requests, checkpoint="B", no_grad=True):
        play.note_outputs(f"window {window.indices}", window.outputs)
        if any(output.target_logprobs.requires_grad for output in window.outputs):
            play.loss(window.outputs).backward()
        play.trainer.set_checkpoint(None)  # planned again, with what the call decided
    play.note_gradients()


# ---- windows


@body
def windows_of_nested_inputs_in_source_order(play: Play) -> None:
    a, b, c, d, e = play.requests(5)
    nested = [a, (b, iter([c])), [[d]], without_targets(play, play.request(5)), [[[e]]]]
    windows = []
    for window in play.windows(nested):
        windows.append(
            [window.indices, window.outputs and [shape_of(item) for item in window.outputs], stats_of(window)]
        )
        play.note_outputs(f"window {len(windows)}", window.outputs)
        if any(output.target_logprobs is not None for output in flat(window.outputs)):
            play.loss(window.outputs).backward()
        assert window.select("abcde") == ["abcde"[index] for index in window.indices]
    play.note("windows", windows)
    play.note_gradients()


@body
def one_backward_for_all_windows(play: Play) -> None:
    windows = [window.outputs for window in play.windows(play.requests(5))]
    losses = [play.loss(outputs) for outputs in windows if outputs]
    play.note("losses", losses)
    torch.stack(losses).sum().backward()
    close_gradients(play)


@body
def backwards_in_reverse_order(play: Play) -> None:
    windows = [window.outputs for window in play.windows(play.requests(4))]
    for outputs in reversed(windows):
        play.loss(outputs).backward()
    close_gradients(play)


@body
def a_window_without_a_backward(play: Play) -> None:
    for number, window in enumerate(play.windows(play.requests(5))):
        if number % 2:
            play.loss(window.outputs).backward()
    del window
    play.note_gradients()
    play.note_close("norm", play.step()["grad_norm"])
    play.note_parameters()


@body
def a_loss_that_uses_some_outputs_only(play: Play) -> None:
    for window in play.windows([play.requests(3, hidden_states=True), play.requests(2)]):
        first = next(flat(window.outputs))
        first.target_logprobs[2:].sum().backward()
    play.note_gradients()


@body
def a_backward_that_comes_after_another_loop(play: Play) -> None:
    early = [window.outputs for window in play.windows(play.requests(6))]
    play.loss(early[1]).backward()
    for window in play.windows(play.requests(2)):
        play.loss(window.outputs).backward()
    play.note_gradients("second loop")
    torch.stack([play.loss(outputs) for outputs in (early[0], *early[2:])]).sum().backward()
    close_gradients(play)


@body
def outputs_that_are_kept_after_the_step(play: Play) -> None:
    kept = []
    for step in range(2):
        for window in play.windows(play.requests(3)):
            kept.append(window.outputs)
            play.loss(window.outputs).backward()
        play.note_close(f"norm {step}", play.step()["grad_norm"])
    play.note_error("too late", lambda: play.loss(kept[1]).backward())
    play.note_parameters()


@body
def outputs_that_are_let_go_of_do_not_wait(play: Play) -> None:
    for number, window in enumerate(play.windows(play.requests(4))):
        if number % 2:
            del window
        else:
            play.loss(window.outputs).backward()
        play.note_error(f"step {number}", lambda: play.note_close("norm", play.step()["grad_norm"]))
    play.note_parameters()


@body
def collectives_of_the_callers_own_inside_the_loop(play: Play) -> None:
    for window in play.windows(play.requests(4)):
        dist.barrier()
        loss = play.loss(window.outputs)
        everywhere = loss.detach().clone()
        dist.all_reduce(everywhere, op=dist.ReduceOp.MAX)
        assert torch.equal(everywhere, loss)
        loss.backward()
        dist.barrier()
    play.note_gradients()


@body
def leaving_the_loop_early(play: Play) -> None:
    for number, window in enumerate(play.windows(play.requests(5))):
        play.loss(window.outputs).backward()
        if number == 1:
            break
    finish_what_was_given(play)
    play.note_gradients("after the break")
    outputs = play.trainer.dp_rank_forward(play.requests(2))
    play.loss(outputs).backward()
    play.note_gradients("and one more")


@body
def a_loop_that_is_never_finished(play: Play) -> None:
    abandoned = play.windows(play.requests(4))
    play.note_outputs("first", next(abandoned).outputs)
    for window in play.windows(play.requests(3)):
        play.loss(window.outputs).backward()
    play.note_gradients()
    play.note_outputs("second", next(abandoned).outputs)


@body
def an_exception_in_the_loop(play: Play) -> None:
    def loop() -> None:
        for number, window in enumerate(play.windows(play.requests(4))):
            play.loss(window.outputs).backward()
            if number == 1:
                raise ArithmeticError("the caller's own")

    play.note_error("loop", loop)
    finish_what_was_given(play)
    play.note_gradients("after the exception")
    for window in play.windows(play.requests(3)):
        play.loss(window.outputs).backward()
    play.note_gradients("and once more")


@body
def a_forward_between_two_windows(play: Play) -> None:
    for number, window in enumerate(play.windows(play.requests(4))):
        with torch.no_grad():
            play.note_outputs(f"teacher {number}", play.trainer.dp_rank_forward(play.request(number, checkpoint="B")))
        extra = play.trainer.dp_rank_forward(play.request(number + 7))
        (play.loss(window.outputs) + play.loss(extra)).backward()
    close_gradients(play)


@body
def no_inputs_at_all(play: Play) -> None:
    play.note("windows", [window.indices for window in play.windows([])])
    play.note("forward", play.trainer.dp_rank_forward([]))
    play.note_outputs("silent", play.trainer.dp_rank_forward([without_targets(play, play.request(0))]))


@body
def a_forward_that_has_not_run_is_not_measured(play: Play) -> None:
    """A host that takes its memory profile around the forward would measure nothing."""
    for window in play.windows(play.requests(2)):
        play.loss(window.outputs).backward()
    play.trainer.dp_rank_forward(play.requests(2))
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        assert not getattr(play.trainer, "_memory_profiles", None)


# ---- accumulation


@body
def several_forwards_then_one_backward(play: Play) -> None:
    outputs = [play.trainer.dp_rank_forward(play.requests(2 + number)) for number in range(3)]
    torch.stack([play.loss(each) for each in outputs]).sum().backward()
    close_gradients(play)


@body
def gradients_accumulate_over_forwards_and_backwards(play: Play) -> None:
    for number in range(3):
        play.loss(play.trainer.dp_rank_forward(play.request(number))).backward()
        play.note_gradients(f"after {number}")
    play.trainer.zero_grad()
    play.note_gradients("after zero_grad")
    play.loss(play.trainer.dp_rank_forward(play.request(4))).backward()
    play.note_gradients("after one more")


@body
def a_retained_graph(play: Play) -> None:
    loss = play.loss(play.trainer.dp_rank_forward(play.requests(2)))
    loss.backward(retain_graph=True)
    play.note_gradients("first")
    loss.backward()
    play.note_gradients("second")
    play.note_error("third", loss.backward)


# ---- slots


@body
def slots_are_selected_by_default_push_and_request(play: Play) -> None:
    trainer, request = play.trainer, play.request(0)
    trainer.load_lora_slot("F", play.host.adapter(trainer.runtime.provider, seed=3), alpha=8.0)
    play.note_outputs("A", trainer.dp_rank_forward(request))
    with trainer.push_checkpoint("B"):
        play.note_outputs("B", trainer.dp_rank_forward(request))
        with trainer.push_checkpoint(None):
            play.note_outputs("base", trainer.dp_rank_forward(request))
        with trainer.push_lora("F"):
            play.note_outputs("frozen", trainer.dp_rank_forward(request))
        play.note_error("load while pushed", lambda: play.host.load(trainer, "C", 4))
        play.note_error("set while pushed", lambda: trainer.set_checkpoint("A"))
    trainer.set_checkpoint("B")
    play.note_outputs("B again", trainer.dp_rank_forward(request))
    play.note_error("pop too often", trainer.pop_pushed_lora_or_checkpoint)


@body
def slots_mixed_in_one_call(play: Play) -> None:
    selections: list[dict[str, Any]] = [{}, {"checkpoint": "B"}, {"checkpoint": None}, {"checkpoint": "A"}, {}]
    requests = [play.request(number, **selection) for number, selection in enumerate(selections)]
    outputs = play.trainer.dp_rank_forward(requests)
    play.note_outputs("outputs", outputs)
    play.loss(outputs).backward()
    play.note_gradients()
    for window in play.windows([requests[:2], requests[2:]]):
        play.note_outputs(f"window {window.indices}", window.outputs)
        play.loss(window.outputs).backward()
    play.note_gradients("windows")
    play.note_close("norm", play.step()["grad_norm"])
    play.note_parameters()


@body
def another_slot_inside_the_loop(play: Play) -> None:
    for number, window in enumerate(play.windows(play.requests(5))):
        play.note_outputs(f"window {number}", window.outputs)
        play.note(f"place {number}", [window.indices, stats_of(window)])
        play.loss(window.outputs).backward()
        play.trainer.set_checkpoint("B" if number % 2 == 0 else "A")
    play.note_gradients()


@body
def a_slot_loaded_inside_the_loop(play: Play) -> None:
    for number, window in enumerate(play.windows(play.requests(4))):
        play.note_outputs(f"window {number}", window.outputs)
        play.loss(window.outputs).backward()
        del window
        play.trainer.zero_grad()
        if number == 1:
            play.host.load(play.trainer, "A", 5)


@body
def an_optimizer_step_inside_the_loop(play: Play) -> None:
    for number, window in enumerate(play.windows(play.requests(4))):
        loss = play.loss(window.outputs)
        loss.backward()
        (play.note if number == 0 else play.note_close)(f"loss {number}", float(loss))
        play.note_close(f"norm {number}", play.step(learning_rate=1e-3)["grad_norm"])
    play.note_parameters()


@body
def outputs_that_wait_keep_their_slot_as_it_is(play: Play) -> None:
    outputs = play.trainer.dp_rank_forward(play.requests(2))
    loss = play.loss(outputs)
    loss.backward(retain_graph=True)
    play.note_error("step", play.step)
    play.note_error("load", lambda: play.host.load(play.trainer, "A", 9))
    loss.backward()
    play.note_gradients()
    play.note_close("norm", play.step()["grad_norm"])
    play.note_parameters()


# ---- optimizer


@body
def five_steps(play: Play) -> None:
    for step in range(5):
        for window in play.windows(play.requests(4)):
            loss = play.loss(window.outputs)
            loss.backward()
            (play.note if step == 0 else play.note_close)(f"step {step} loss {window.indices}", float(loss))
        if step == 0:
            play.note_gradients()
        result = play.step(scale_grads=0.5)
        play.note_close(f"step {step}", {key: float(value) for key, value in result.items()})
    play.note_parameters()


@body
def a_step_of_named_slots_only(play: Play) -> None:
    play.note_error("nothing to step with", play.step)
    outputs = play.trainer.dp_rank_forward([play.request(0), play.request(1, checkpoint="B")])
    play.loss(outputs).backward()
    play.note_error("unknown slot", lambda: play.step(checkpoints=["C"]))
    play.note_close("A", play.step(checkpoints=["A"])["grad_norm"])
    play.note_error("A again", lambda: play.step(checkpoints=["A"]))
    play.note_parameters("after A")
    play.note_close("B", play.step()["grad_norm"])
    play.note_parameters()


@body
def a_norm_that_is_not_finite(play: Play) -> None:
    (play.loss(play.trainer.dp_rank_forward(play.request(0))) * math.inf).backward()
    play.note("step", play.step()["update_successful"])
    play.note_parameters()
    play.note_gradients()


@body
def a_gradient_that_is_not_finite_on_one_stage(play: Play) -> None:
    play.loss(play.trainer.dp_rank_forward(play.request(0))).backward()
    for name, parameter in slot_parameters_by_name(play.trainer):
        if name.startswith("A/") and "layers.3" in name and name.endswith("lora_B"):
            parameter.grad.fill_(math.nan)
    play.note("step", play.step()["update_successful"])
    play.note_parameters()
    play.note_gradients()


@body
def a_step_of_one_slot_while_outputs_of_another_wait(play: Play) -> None:
    one, other = (play.trainer.dp_rank_forward(play.requests(2, checkpoint=name)) for name in "AB")
    play.loss(one).backward()
    play.note_close("A", play.step(checkpoints=["A"])["grad_norm"])
    play.loss(other).backward()
    play.note_gradients()
    play.note_close("B", play.step()["grad_norm"])
    play.note_parameters()


@body
def a_step_inside_the_loop_while_outputs_of_another_slot_wait(play: Play) -> None:
    waiting = []
    for number, window in enumerate(play.windows(play.requests(4))):
        if number % 2:
            play.loss(window.outputs).backward()
            play.note_close(f"norm {number}", play.step(learning_rate=1e-3)["grad_norm"])
        else:
            waiting.append(window.outputs)
        play.trainer.set_checkpoint("A" if number % 2 else "B")
    del window
    torch.stack([play.loss(outputs) for outputs in waiting]).sum().backward()
    close_gradients(play)
    play.note_close("norm", play.step()["grad_norm"])
    play.note_parameters()


@body
def zero_grad_inside_the_loop(play: Play) -> None:
    for number, window in enumerate(play.windows(play.requests(4))):
        play.loss(window.outputs).backward()
        if number == 1:
            play.trainer.zero_grad()
    play.note_gradients()


@body
def a_restored_optimizer_goes_on_as_if_never_saved(play: Play) -> None:
    trainer = play.trainer
    play.note("before the first step", trainer.checkpoint_slot_optimizer_state("A"))
    for _ in range(2):
        play.loss(trainer.dp_rank_forward(play.requests(2))).backward()
        play.step()
    state = trainer.checkpoint_slot_optimizer_state("A")
    play.host.load(trainer, "A", 1)
    restored = dict(play.host.load_options, optimizer_state=state)
    full = play.host.adapter(trainer.runtime.provider, seed=1)
    trainer.load_checkpoint_slot("A", full, alpha=8.0, **restored)
    play.loss(trainer.dp_rank_forward(play.requests(2))).backward()
    play.note_close("norm", play.step()["grad_norm"])
    play.note_parameters()

    def load_foreign() -> None:
        play.host.load(trainer, "D", 4, r=2)
        foreign = play.host.adapter(trainer.runtime.provider, seed=4, r=2)
        options = {**restored, **({"adapter_config": None} if play.host.is_art else {})}
        trainer.load_checkpoint_slot("D", foreign, alpha=8.0, **options)

    play.note_error("foreign state", load_foreign)


# ---- custom heads


@body
def a_custom_head_counts_once_and_stays_the_same_everywhere(play: Play) -> None:
    if not hasattr(play.trainer, "module"):
        raise NotHere(f"{play.host.name} has no custom heads")
    assert play.trainer.hidden_size == 64
    head = play.trainer.module("value", lambda: torch.nn.Linear(play.trainer.hidden_size, 1))
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-1.0, 1.0, 64)[None])
        head.bias.zero_()
    for step in range(3):
        for window in play.windows(play.requests(4, hidden_states=True)):
            values = torch.stack([head(output.hidden_states).square().mean() for output in flat(window.outputs)])
            (play.loss(window.outputs) + values.sum()).backward()
        if step == 0:
            play.note("gradient", head.weight.grad)
        play.note_close(f"norm {step}", play.step()["grad_norm"])
    play.note_close("weight", head.weight)
    alike = [torch.empty_like(head.weight) for _ in range(dist.get_world_size())]
    dist.all_gather(alike, head.weight.detach().clone())
    assert all(torch.equal(each, head.weight) for each in alike)
    play.note_parameters()


@body
def a_single_parameter_and_a_buffer_belong_to_a_slot(play: Play) -> None:
    if not hasattr(play.trainer, "parameter"):
        raise NotHere(f"{play.host.name} has no custom heads")
    scale = play.trainer.parameter("scale", lambda: torch.full((64,), 0.5))
    seen = play.trainer.buffer("seen", lambda: torch.zeros(()))
    assert play.trainer.parameter("scale", lambda: torch.zeros(1)) is scale
    for window in play.windows(play.requests(3, hidden_states=True)):
        loss = torch.stack([(output.hidden_states * scale).square().mean() for output in flat(window.outputs)]).sum()
        seen += 1
        (loss + play.loss(window.outputs)).backward()
    play.note("gradient", scale.grad)
    play.note("seen", seen)
    play.note_close("norm", play.step()["grad_norm"])
    play.note_close("scale", scale)


@body
def a_head_that_is_not_used_does_not_change(play: Play) -> None:
    if not hasattr(play.trainer, "module"):
        raise NotHere(f"{play.host.name} has no custom heads")
    head = play.trainer.module("value", lambda: torch.nn.Linear(64, 1, bias=False))
    play.loss(play.trainer.dp_rank_forward(play.request(0))).backward()
    play.note_close("norm", play.step()["grad_norm"])
    play.note("gradient", head.weight.grad)
    play.note_parameters()


# ---- base weights


@body
def base_weights_are_trained_with_slots_and_without(play: Play) -> None:
    with base_weights_trained(play):
        for step in range(5):
            requests = [play.request(number, checkpoint="A" if step and number % 2 else None) for number in range(4)]
            for window in play.windows(requests):
                play.loss(window.outputs).backward()
            del window
            play.note_close(f"norm {step}", play.step(learning_rate=1e-3)["grad_norm"])
            check_that_copies_are_alike(play)
        play.note_parameters()


@body
def base_weights_are_stepped_zeroed_and_guarded_inside_the_loop(play: Play) -> None:
    with base_weights_trained(play, items_at_once=1):
        play.trainer.set_checkpoint(None)
        for number, window in enumerate(play.trainer.forward_micro_batches(play.requests(8))):
            loss = play.loss(window.outputs)
            loss.backward(retain_graph=number == 2)
            play.note_close(f"loss {number}", loss)
            if number == 1:
                play.trainer.zero_grad()
            if number == 2:
                play.note_error("step while outputs wait", play.step)
                loss.backward()
                play.note_close("norm", play.step(learning_rate=1e-3, checkpoints=[None])["grad_norm"])
        play.note_close("last norm", play.step(learning_rate=1e-3)["grad_norm"])
        play.note_error("nothing to step with", lambda: play.step(checkpoints=[None]))
        check_that_copies_are_alike(play)
        play.note_parameters()


@contextlib.contextmanager
def base_weights_trained(play: Play, **options: Any) -> Iterator[None]:
    """Meanwhile the caller's trainer trains the base weights too; afterwards they are frozen, and as they were."""
    if not play.host.trains_base_weights:
        raise NotHere(f"{play.host.name} trains no base weights")
    runtime = play.trainer.runtime
    weights = {weight: weight.detach().clone() for chunk in runtime.model for weight in chunk.parameters()}
    close(play.trainer)
    play.take_up(play.host.trainer(runtime, base_model=True, **options))
    try:
        yield
    finally:
        for weight, value in weights.items():
            weight.requires_grad_(False).copy_(value)
            weight.grad = None


def check_that_copies_are_alike(play: Play) -> None:
    """The embedding and the output layer that is tied to it, wherever they are, hold the same to the last bit."""
    own = [weight.detach() for weight in play.trainer._checkpoint_slot_params_by_name[None] if is_tied(weight)]
    found = gather(own, group=parallel_state.get_pipeline_model_parallel_group())
    copies = [copy for stage in found for copy in stage]
    assert all(torch.equal(copy, copies[0]) for copy in copies), [float(copy.double().norm()) for copy in copies]


# ---- data parallelism


@body
def data_is_reduced_over_data_ranks_only(play: Play) -> None:
    ones = torch.ones(3)
    play.trainer.dp_reduce(ones)
    play.note("ones", ones)
    assert float(ones[0]) == parallel_state.get_data_parallel_world_size()
    for window in play.windows(play.requests(3)):  # uneven, and empty on a rank at the end
        total = torch.zeros(())
        if window.outputs:
            loss = play.loss(window.outputs)
            loss.backward()
            total += loss.detach()
        play.trainer.dp_reduce(total)
        play.note(f"total {window.stats.global_start}", total)
        play.note(f"indices {window.stats.global_start}", window.indices)
    play.note_gradients()
    play.note_close("norm", play.step()["grad_norm"])
    play.note_parameters()


# ---- mistakes


@body
def what_a_caller_can_do_wrong(play: Play) -> None:
    trainer, good = play.trainer, play.request(0)
    make = play.host.records.ForwardInput
    wrong = {
        "dict": {"a": good},
        "text": ["text"],
        "empty": [make(input_tokens=torch.arange(0), logits=True)],
        "targets": [make(input_tokens=torch.arange(4), target_tokens=torch.arange(3))],
        "top_k": [make(input_tokens=torch.arange(4), top_k=257)],
    }
    for name, inputs in wrong.items():
        play.note_error(name, lambda inputs=inputs: trainer.dp_rank_forward(inputs))
        play.note_error(f"{name} in a loop", lambda inputs=inputs: list(play.windows([inputs])))
    play.note_outputs("and then", trainer.dp_rank_forward(good))


def without_targets(play: Play, request: Any) -> Any:
    return play.host.records.ForwardInput(
        input_tokens=request.input_tokens,
        top_k=request.top_k,
        logits=request.logits,
        hidden_states=request.hidden_states,
    )


def finish_what_was_given(play: Play) -> None:
    """With several chunks a rank may still owe backwards when a loop is left early; the next call begins with them."""
    with torch.no_grad():
        play.trainer.dp_rank_forward(play.request(0))


def close_gradients(play: Play) -> None:
    """Gradients that were added up in another order than one process adds them."""
    for name, parameter in slot_parameters_by_name(play.trainer):
        if parameter.grad is not None:
            play.seen.here_close[f"gradients: {name}"] = parameter.grad.clone()


def stats_of(window: Any) -> list[int]:
    stats = window.stats
    return [stats.global_start, stats.global_stop, stats.global_count, stats.local_count, stats.packed_tokens]


def shape_of(item: Any) -> Any:
    return [shape_of(each) for each in item] if isinstance(item, (list, tuple)) else "output"
