"""Agreement: before the first tensor of a call moves, all ranks find out whether they mean the same."""

from __future__ import annotations

import pickle
from collections.abc import Mapping

from pipeline_engine.errors import UsageError
from pipeline_engine.run.transports.base import Transport


def agree(transport: Transport, word: Mapping[str, object], *, deadline: float) -> None:
    """Exchange ``word`` with all ranks.  Collective.

    Args:
        transport: the control plane.
        word: what must be the same on all ranks, by name.
        deadline: seconds to wait for the slowest rank.

    Raises:
        UsageError: on every rank, if two ranks differ; the message shows both sides.
    """
    words = [pickle.loads(each) for each in transport.exchange(pickle.dumps(dict(word)), deadline=deadline)]
    for rank, other in enumerate(words):
        for name in dict.fromkeys((*words[0], *other)):
            if words[0].get(name) != other.get(name):
                raise UsageError(
                    f"ranks disagree on the {name}: rank 0 has {words[0].get(name)!r}, rank {rank} has "
                    f"{other.get(name)!r}; every rank of a pipeline makes the same calls."
                )
