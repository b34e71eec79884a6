"""The fault kit does what it says, and no fault leads to a hang, or to a wrong gradient without an error."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline_engine as pe
from pipeline_engine.plan.values import Channel
from pipeline_engine.run.transports.base import Transport
from pipeline_engine.testing import CHECKS, Fault, FaultyTransport, run_ranks_in_threads
from pipeline_engine.testing.faults import HARMLESS
from tests.run.playing import DEADLINE, ROWS, Layer, Rank, batch, loss_of
from tests.run.processes import Crash, run_in_processes
from tests.strategies import schedule_names

X, Y = Channel(0, 1, "x0"), Channel(0, 1, "y")
SHORT = 1.5  # seconds; a wait of this length is one for something that never comes


# The kit itself.


@pytest.mark.parametrize("check", CHECKS)
def test_harmless_faults_break_no_promise_of_a_transport(check: Any) -> None:
    def on_rank(transport: Transport) -> None:
        check(FaultyTransport.seeded(transport, transport.rank, kinds=HARMLESS, rate=0.3))

    run_ranks_in_threads(on_rank, CHECKS[check])


def sent(fault: Fault) -> list[list[int]]:
    """What arrives on two channels if the second of three messages suffers ``fault``; the third is on the other."""

    def on_rank(transport: Transport) -> list[list[int]]:
        faulty = FaultyTransport(transport, {1: fault} if transport.rank == 0 else {})
        faulty.open([X, Y], deadline=DEADLINE)
        arrived = []
        if transport.rank == 0:
            for number, channel in enumerate([X, X, Y]):
                faulty.send(channel, torch.full((10,), number, dtype=torch.uint8))
        else:
            for channel in (X, X, X, Y):
                handle = faulty.receive(channel, 10)
                with suppress(pe.DeadlineError):
                    faulty.wait(handle, deadline=0.1)
                    arrived.append(handle.buffer.tolist())
        faulty.exchange(b"", deadline=DEADLINE)
        return arrived

    return run_ranks_in_threads(on_rank, 2)[1]


@pytest.mark.parametrize(
    ("fault", "numbers"),
    [
        (Fault.DELAY, [0, 1, 2]),
        (Fault.REORDER, [0, 1, 2]),
        (Fault.DUPLICATE, [0, 1, 1, 2]),
        (Fault.DROP, [0, 2]),
        (Fault.TRUNCATE, [0, 1, 2]),
    ],
)
def test_each_fault_does_what_it_says(fault: Fault, numbers: list[int]) -> None:
    arrived = sent(fault)
    assert [message[0] for message in arrived] == numbers
    assert all(len(message) == 10 for message in arrived) == (fault is not Fault.TRUNCATE)


@pytest.mark.parametrize("side", ["sends", "receives"])
@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.CLOSE])
def test_a_message_that_fails_raises_and_one_that_closes_ends_the_transport(fault: Fault, side: str) -> None:
    """It is rank 0's; rank 1 sends as much and is told."""

    def on_rank(transport: Transport) -> str:
        faulty = FaultyTransport(transport, **({side: {0: fault}} if transport.rank == 0 else {}))
        channels = [Channel(0, 1, "x0"), Channel(1, 0, "x0")]
        faulty.open(channels, deadline=DEADLINE)
        with pytest.raises((pe.TransportError, pe.PeerFailedError)) as raised:
            handle = faulty.receive(channels[1 - transport.rank], 1)
            faulty.send(channels[transport.rank], torch.zeros(1, dtype=torch.uint8))
            faulty.wait(handle, deadline=DEADLINE)
            faulty.exchange(b"", deadline=DEADLINE)
        faulty.close()
        return str(raised.value)

    own, peer = run_ranks_in_threads(on_rank, 2)
    assert "it closed its transport" in peer
    assert "failed, as it was told to" in own or fault is Fault.CLOSE


# The engine under it.


@frozen
class Ended:
    """How a pass ended on one rank: what it raised, and whether its gradients are those of one process."""

    raised: str
    is_right: bool


def train(rank: Rank, entry: str) -> None:
    if entry == "step":
        rank.pipeline.step(batch(ROWS), loss_of)
    elif entry == "forward":
        for number, output in enumerate(rank.pipeline.forward(batch(ROWS))):
            loss_of(output, number).backward()
    else:
        rank.train(ROWS)


def attempt(rank: Rank, entry: str) -> Ended:
    rank.zero_grad()
    try:
        train(rank, entry)
        rank.pipeline.flush()
    except pe.PipelineError as error:
        return Ended(f"{type(error).__name__}: {error}", False)
    try:
        rank.check_gradients(range(len(ROWS)), ROWS)
    except (AssertionError, pe.PipelineError) as error:
        return Ended("", isinstance(error, pe.PipelineError))
    return Ended("", True)


@settings(max_examples=40)
@given(
    schedule_names,
    st.integers(2, 4),
    st.sampled_from(["stream", "forward", "step"]),
    st.sampled_from(Fault),
    st.integers(0, 40),
    st.integers(0, 3),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_no_fault_leads_to_a_hang_or_to_a_wrong_gradient_without_an_error(
    schedule: str, num_ranks: int, entry: str, fault: Fault, at: int, victim: int, receives: bool, seed: int
) -> None:
    def on_rank(transport: Transport) -> list[Ended]:
        hit = {at: fault} if transport.rank == victim % num_ranks else {}
        faulty = FaultyTransport(transport, {} if receives else hit, hit if receives else {}, seed=seed)
        rank = Rank(faulty, schedule, Layer, deadline=DEADLINE if fault in HARMLESS else SHORT)
        ended = [attempt(rank, entry) for _ in range(2)]
        faulty.plan()
        ended += [attempt(rank, entry) for _ in range(3)]
        rank.pipeline.close()
        return ended

    ranks = run_ranks_in_threads(on_rank, num_ranks)
    for attempts in zip(*ranks, strict=True):
        assert all(each.raised or each.is_right for each in attempts), ranks
        if fault in HARMLESS:
            assert not any(each.raised for each in attempts), ranks
    if fault is not Fault.CLOSE:
        assert all(each[-1].is_right for each in ranks), ranks


def suffer_over_gloo(rank: int, faults: list[Fault]) -> dict[Fault, list[Ended]]:
    """Each fault hits rank 0's third send, which is small."""
    outcomes = {}
    for fault in faults:
        faulty = FaultyTransport(pe.TorchTransport(), {2: fault} if rank == 0 else {})
        subject = Rank(faulty, "1f1b", Layer)
        subject.pipeline._accord.deadline = DEADLINE if fault in HARMLESS else SHORT
        outcomes[fault] = [attempt(subject, "stream")]
        subject.pipeline._accord.deadline = DEADLINE
        outcomes[fault].append(attempt(subject, "stream"))
        subject.pipeline.close()
    return outcomes


def test_no_fault_over_gloo_leads_to_a_hang_or_to_a_wrong_gradient_without_an_error() -> None:
    ranks = run_in_processes(suffer_over_gloo, 2, list(Fault))
    for rank in ranks:
        assert not isinstance(rank, Crash), rank
        for fault, (first, then) in rank.items():
            assert bool(first.raised) == (fault not in HARMLESS), (fault, ranks)
            honest = "the pipeline is broken, because rank 0", "rank 0 has closed its transport"
            assert then.is_right or any(words in then.raised for words in honest), (fault, ranks)
            assert then.is_right == (fault is not Fault.CLOSE), (fault, ranks)


LARGE = [4000, 4000]  # rows: an activation and its gradient go through gloo, which fills what has come


def cut_over_gloo(rank: int, cuts: list[tuple[int, int]]) -> list[list[Ended]]:
    """Of each cut the rank, and the number of its send: a second part, or a gradient, which is one part."""
    outcomes = []
    faulty = FaultyTransport(pe.TorchTransport())
    subject = Rank(faulty, "1f1b", Layer)
    with subject.pipeline:
        for victim, at in cuts:
            faulty.plan({at: Fault.TRUNCATE} if rank == victim else {})
            outcomes.append([attempt_with(subject, LARGE)])
            faulty.plan()
            outcomes[-1].append(attempt_with(subject, LARGE))
    return outcomes


def attempt_with(rank: Rank, rows: list[int]) -> Ended:
    rank.zero_grad()
    try:
        rank.train(rows)
        rank.check_gradients(range(len(rows)), rows)
    except pe.PipelineError as error:
        return Ended(str(error), False)
    return Ended("", True)


def test_a_large_message_over_gloo_whose_end_is_missing_is_refused_though_no_checksum_is_asked_for() -> None:
    cuts = [(0, 1), (0, 3), (1, 1), (1, 2)]
    ranks = run_in_processes(cut_over_gloo, 2, cuts)
    for rank in ranks:
        assert not isinstance(rank, Crash), rank
        for cut, (first, then) in zip(cuts, rank, strict=True):
            assert "arrived without its end: it was cut short" in first.raised, (cut, ranks)
            assert then.is_right, (cut, ranks)
