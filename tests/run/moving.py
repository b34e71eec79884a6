"""What tests of transports share: channels, a failure, and the messages of two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pipeline_engine.errors import PeerFailedError
from pipeline_engine.plan.values import Channel
from pipeline_engine.run.transports.base import Failure, Transport
from tests.run.processes import Crash

DEADLINE = 20.0
SOON = 5.0  # seconds; far less than DEADLINE, far more than waking takes on a busy machine
X, Y, BACK = Channel(0, 1, "x0"), Channel(0, 1, "y"), Channel(1, 0, "x0")
BOOM = Failure(0, "0F3", "ValueError: boom", "a traceback")


def bytes_of(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def all_pairs(num_ranks: int) -> list[Channel]:
    return [Channel(a, b, "x0") for a in range(num_ranks) for b in range(num_ranks) if a != b]


def told(call: Callable[[], object]) -> PeerFailedError:
    with pytest.raises(PeerFailedError) as raised:
        call()
    return raised.value


def wait_for(transport: Transport, peer: int) -> None:
    """Block in a receive from ``peer``."""
    transport.wait(transport.receive(Channel(peer, transport.rank, "x0"), 8), deadline=DEADLINE)


def ring(transport: Transport) -> None:
    rank, num_ranks = transport.rank, transport.num_ranks
    received = transport.receive(Channel((rank - 1) % num_ranks, rank, "x0"), 1)
    sent = transport.send(Channel(rank, (rank + 1) % num_ranks, "x0"), bytes_of(rank))
    for handle in (received, sent):
        transport.wait(handle, deadline=DEADLINE)
    assert list(received.buffer) == [(rank - 1) % num_ranks]


def all_returned(results: list[Any]) -> list[Any]:
    assert not any(isinstance(result, Crash) for result in results), "\n".join(map(str, results))
    return results
