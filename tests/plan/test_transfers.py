"""Transfers: what the pages of the module promise about where posts and waits stand."""

from __future__ import annotations

from hypothesis import given

import pipeline_engine as pe
from pipeline_engine.plan.actions import COMPUTE, Forward, PostRecv, Program, Send, WaitRecv, WaitSend, Yield
from pipeline_engine.plan.advance import canonical_batches
from pipeline_engine.plan.graph import StageGraph
from pipeline_engine.plan.transfers import AHEAD, Transfers, channels_of
from pipeline_engine.plan.values import Activation, Output, channel_of
from tests.strategies import schedules


def test_the_whole_traffic_of_two_ranks_and_one_microbatch() -> None:
    lowered = pe.lower(pe.build("1f1b", StageGraph.chain(2, 2), 1))
    assert lowered.to_text().splitlines() == [
        "post:y[0]<1 0F0 send:x[0,0]>1 recv:y[0]<1 sent:x[0,0]>1 yield:y[0] post:dx[1,0]<1 recv:dx[1,0]<1 0B0",
        "post:x[0,0]<0 recv:x[0,0]<0 1F0 publish:y[0] send:y[0]>0 yield:y[0] 1B0 send:dx[1,0]>0 "
        "sent:y[0]>0 sent:dx[1,0]>0",
    ]


@given(schedules())
def test_a_receive_is_posted_in_the_batch_of_its_send(schedule: pe.Schedule) -> None:
    for batch in canonical_batches(schedule):
        sends = {(a.value, rank, a.to_rank) for rank, part in enumerate(batch) for a in part if isinstance(a, Send)}
        posts = {(a.value, a.from_rank, rank) for rank, p in enumerate(batch) for a in p if isinstance(a, PostRecv)}
        assert sends == posts


@given(schedules(min_microbatches=1))
def test_within_a_batch_no_post_stands_more_than_two_computing_actions_ahead_of_its_use(schedule: pe.Schedule) -> None:
    for batch in canonical_batches(schedule):
        for program in batch:
            for step, action in enumerate(program):
                if not isinstance(action, PostRecv):
                    continue
                wait = WaitRecv(action.value, action.from_rank)
                if wait in program[step:]:
                    between = program[step : step + program[step:].index(wait)]
                    ahead = sum(isinstance(each, COMPUTE) for each in between)
                    assert ahead <= AHEAD or _is_held_back(program, step), f"{action} in {program}"
                    assert not any(isinstance(each, Yield) for each in between)


def _is_held_back(program: Program, step: int) -> bool:
    """Whether a later message of the same sender, used earlier, pulls this post forward."""
    first = program[step]
    assert isinstance(first, PostRecv)
    following = [a for a in program[step + 1 :] if isinstance(a, PostRecv)]
    return any(a.from_rank == first.from_rank for a in following)


@given(schedules())
def test_a_send_is_waited_for_only_after_its_receiver_has_answered(schedule: pe.Schedule) -> None:
    """Before the drain, a wait follows a message from the very rank that the value went to, or many later outputs."""
    for batch in canonical_batches(schedule)[:-1]:
        for program in batch:
            for step, action in enumerate(program):
                if isinstance(action, WaitSend) and not _is_old_output(action, program):
                    received = [a.from_rank for a in program[:step] if isinstance(a, WaitRecv)]
                    assert received and received[-1] == action.to_rank


def _is_old_output(action: WaitSend, program: Program) -> bool:
    """Whether the batch hands out an output that comes more than twice as many after this one as there are ranks."""
    handed = [each.microbatch for each in program if isinstance(each, Yield)]
    return isinstance(action.value, Output) and handed[:1] > [action.value.microbatch + 5]


def test_a_rank_from_which_nothing_comes_back_is_sent_a_few_outputs_at_a_time() -> None:
    """In loops the last rank sends to all; rank 1 of 4 never answers it, so nine outputs are the most on their way."""
    lowered = pe.lower(pe.build("interleaved", StageGraph.chain(8, 4, "looped"), 20)).programs[3]
    held = most = 0
    for action in lowered:
        if isinstance(action, (Send, WaitSend)) and action.value == Output(action.value.microbatch):
            held += (isinstance(action, Send) - isinstance(action, WaitSend)) * (action.to_rank == 1)
        most = max(most, held)
    assert most == 9


def test_a_value_travels_once_to_a_rank_with_two_takers() -> None:
    graph = StageGraph(edges=[(0, 1), (1, 2), (0, 2)], rank_of=[0, 1, 1])
    transfers = Transfers(graph, hand_out=False)
    transfers.compute(0, Forward(0, 0))
    sends = [action for action in transfers.end_batch()[0] if isinstance(action, Send)]
    assert sends == [Send(Activation(0, 0), 1)]


@given(schedules())
def test_every_channel_that_a_program_uses_is_known_beforehand(schedule: pe.Schedule) -> None:
    known = channels_of(schedule.graph)
    assert len(set(known)) == len(known)
    for rank, program in enumerate(pe.lower(schedule).programs):
        used = {channel_of(action.value, rank, action.to_rank) for action in program if isinstance(action, Send)}
        assert used <= set(known)


def test_channels_join_ranks_one_way_each_and_in_one_order_on_all_ranks() -> None:
    named = [str(channel) for channel in channels_of(StageGraph.chain(3, 3)) if not channel.name.endswith("+")]
    assert named == ["x0:0>1", "dx1:1>0", "x1:1>2", "dx2:2>1", "y:2>1", "y:1>0"]
