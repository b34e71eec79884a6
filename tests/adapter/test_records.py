"""Records: what a trainer hands to its caller, taken apart and put together; errors among them."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron.core")

import pipeline_engine as pe
from art_adapter.records import Records
from art_adapter.reference import ReferenceTrainerRank
from art_adapter.requests import TrainerRankMemoryError

from .miniatures import july


@pytest.mark.parametrize("host", [ReferenceTrainerRank, july.TrainerRank])
def test_a_memory_error_of_another_rank_is_the_hosts_own_in_the_same_words(host: type) -> None:
    records = Records(host)
    assert issubclass(records.memory_error, RuntimeError)
    told = records.peer_error(pe.PeerFailedError(1, "1F0", "TrainerRankMemoryError: too little: 7 bytes"))
    assert type(told) is records.memory_error and str(told) == "too little: 7 bytes"


def test_any_other_failure_of_another_rank_stays_what_it_is() -> None:
    failure = pe.PeerFailedError(1, "1F0", f"ValueError: {TrainerRankMemoryError.__name__}: no")
    assert Records(ReferenceTrainerRank).peer_error(failure) is failure
