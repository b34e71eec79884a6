"""Exchanges over gloo processes when something comes between: Ctrl-C, a close, a rank that is late or held up."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

import pytest

from pipeline_engine.errors import PipelineError
from pipeline_engine.run.transports.base import Failure
from pipeline_engine.run.transports.torch_distributed import TorchTransport
from pipeline_engine.run.transports.wires import Frame, Kind, Wire
from pipeline_engine.run.watchdog import Watchdog
from pipeline_engine.run.words import Words
from tests.run.processes import Crash, run_in_processes

DEADLINE = 20.0
SAID = [b"0", b"1", b"2"]


def told(call: Callable[[], object]) -> str:
    with pytest.raises(PipelineError) as raised:
        call()
    return str(raised.value)


# Ctrl-C in a settle: the next try ends it.


def interrupted(kind: type, method: str, *, after: bool = False, when: Callable[..., bool] = lambda *_: True) -> None:
    """Have Ctrl-C come once in a ``method`` of this process, before or ``after`` what it does."""
    real, over = getattr(kind, method), list[None]()

    def raising(self: Any, *arguments: Any) -> Any:
        comes = not over and when(self, *arguments)
        over.extend([None] * comes)
        if comes and not after:
            raise KeyboardInterrupt
        result = real(self, *arguments)
        if comes:
            raise KeyboardInterrupt
        return result

    setattr(kind, method, raising)


def tells(wire: Wire, frame: Frame) -> bool:
    return frame.kind is Kind.WORDS


PLACES: dict[str, Callable[[], None]] = {
    "before it tells": lambda: interrupted(Watchdog, "_tell_words"),
    "amid the telling": lambda: interrupted(Wire, "send", after=True, when=tells),
    "before it learns": lambda: interrupted(Words, "learn"),
    "after it has heard": lambda: interrupted(Watchdog, "words", after=True),
    "before a new epoch": lambda: interrupted(TorchTransport, "_begin_epoch"),
}


def settle_twice(rank: int, place: str, victim: int) -> list[bytes]:
    transport = TorchTransport()
    transport.open([], deadline=DEADLINE)
    transport.fail(Failure(0, "its work", "boom", ""))
    if rank == victim:
        sleep(0.2)  # it is the last to come, and its main thread does what is to be done
        PLACES[place]()
        with pytest.raises(KeyboardInterrupt):
            transport.settle(deadline=DEADLINE)
    transport.settle(deadline=DEADLINE)
    words = transport.exchange(b"%d" % rank, deadline=DEADLINE)
    transport.close()
    return words


@pytest.mark.parametrize(("place", "victim"), [*((place, 0) for place in PLACES), ("before a new epoch", 1)])
def test_a_settle_that_ctrl_c_broke_off_succeeds_when_it_is_tried_again(place: str, victim: int) -> None:
    assert run_in_processes(settle_twice, 3, place, victim) == [SAID] * 3


# Ranks that leave.


def close_at_once_while_rank_0_is_slow(rank: int) -> list[bytes]:
    """Rank 1 hears all words and says goodbye; rank 2 hears them only long after."""
    transport = TorchTransport()
    if rank == 0:
        real, told_so_far = Wire.send, list[None]()

        def slow(wire: Wire, frame: Frame) -> None:
            told_so_far.extend([None] * (frame.kind is Kind.WORDS))
            if frame.kind is Kind.WORDS and len(told_so_far) == 2:
                sleep(0.9)
            real(wire, frame)

        Wire.send = slow  # type: ignore[method-assign]
    words = transport.exchange(b"%d" % rank, deadline=DEADLINE)
    transport.close()
    return words


def test_a_rank_that_closes_after_an_exchange_has_taken_part_in_it() -> None:
    assert run_in_processes(close_at_once_while_rank_0_is_slow, 3) == [SAID] * 3


def give_up_on_rank_2(rank: int) -> tuple[str, float]:
    """Rank 0, without which no exchange gets complete, closes; the others notice long before their deadline."""
    transport = TorchTransport()
    if rank == 2:
        sleep(1.0)
    start = monotonic()
    text = told(lambda: transport.exchange(b"", deadline=0.6 if rank == 0 else DEADLINE))
    transport.close()
    return text, monotonic() - start


def test_the_end_of_rank_0_ends_every_exchange() -> None:
    (own, _), *others = run_in_processes(give_up_on_rank_2, 3)
    assert "within 0.6 seconds; waiting for rank 2." in own
    for text, seconds in others:
        assert "rank 0 failed" in text and "it closed its transport" in text and seconds < DEADLINE / 2


def wait_for_rank_3(rank: int) -> str:
    """Rank 2 comes so late that it has not waited for long when the others' deadline passes."""
    transport = TorchTransport()
    sleep({2: 0.7, 3: 2.0}.get(rank, 0.0))
    text = "" if rank == 3 else told(lambda: transport.exchange(b"", deadline=1.0))
    sleep(0.0 if rank == 3 else 1.5)
    transport.close()
    return text


def test_a_late_exchange_names_who_has_not_come_and_nobody_else() -> None:
    *texts, nothing = run_in_processes(wait_for_rank_3, 4)
    assert not any(isinstance(text, Crash) for text in texts), texts
    assert nothing == "" and all(text.endswith("waiting for rank 3.") for text in texts), texts


def test_an_exchange_of_one_rank_is_over_at_once() -> None:
    assert run_in_processes(alone, 1) == [[b"only"]]


def alone(rank: int) -> list[bytes]:
    transport = TorchTransport()
    words = transport.exchange(b"only", deadline=DEADLINE)
    transport.close()
    return words
