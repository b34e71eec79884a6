"""Sockets for small messages: what Ctrl-C tears stays torn until the channels are built again."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline_engine.run.transports.direct import _Backlog


class Interrupted:
    """A socket in whose ``send`` Ctrl-C comes, once."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.is_quiet = False

    def send(self, frame: bytes) -> int:
        if not self.is_quiet:
            self.is_quiet = True
            raise KeyboardInterrupt
        self.sent.append(frame)
        return len(frame)


def test_a_frame_that_ctrl_c_tore_is_not_forgotten_when_the_next_one_is_sent() -> None:
    socket: Any = Interrupted()
    backlog = _Backlog(socket)
    with pytest.raises(KeyboardInterrupt):
        backlog.send(b"torn")
    backlog.send(b"a notice of the failure")
    assert backlog.is_writing and not socket.sent
