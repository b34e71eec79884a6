"""What cannot fit together is refused when the pipeline is built, in words that help."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pipeline_engine as pe


def build(**changes: Any) -> pe.Pipeline:
    (transport,) = pe.MemoryTransport.connect(1)
    given: dict[str, Any] = {"stages": {0: torch.nn.Identity()}, "transport": transport, "deadline": 5.0}
    given |= {"graph": pe.StageGraph.chain(1, 1), "schedule": "1f1b"} | changes
    return pe.Pipeline(given.pop("stages"), **given)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stages": torch.nn.Identity()}, r"stages is a Identity; name this rank's stages by number: \{0: stage\}"),
        ({"stages": {0: "x"}}, "stage 0 is a str, which cannot be called"),
        ({"stages": {}}, r"rank 0 owns stages \[0\] of the graph, but was given \[\]"),
        ({"transport": None}, "transport is None; pass for example pe.TorchTransport"),
        ({"transport": pe.MemoryTransport}, "transport is <class .*; pass for example"),
        ({"deadline": None}, "deadline is None; it is a number of seconds, more than 0"),
        ({"deadline": 0}, "deadline is 0; it is a number of seconds, more than 0"),
        ({"graph": pe.StageGraph.chain(2, 2)}, "the graph is for 2 ranks, the transport joins 1"),
    ],
)
def test_a_wrong_argument_is_refused_with_what_to_pass(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(pe.UsageError, match=words):
        build(**changes)


def test_what_fits_is_built() -> None:
    build().close()
