"""Loops over windows: in any order, left early, never finished, with other calls inside."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from ..playing import Play, flat
from .registry import body, close_gradients, finish_what_was_given, shape_of, stats_of, without_targets


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
