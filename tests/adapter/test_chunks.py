"""The chunks of all ranks, in order, are the model; anything else is refused by name."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron.core")

from art_adapter.chunks import Chunk, check_stages, first_is
from pipeline_engine import UsageError

EMBEDDING, MIDDLE, LATER, HEAD = (
    Chunk((1,), True, False),
    Chunk((2, 3), False, False),
    Chunk((), False, False),
    Chunk((4,), False, True),
)


def test_chunk_v_of_rank_p_is_stage_v_times_the_ranks_plus_p() -> None:
    check_stages([[EMBEDDING, LATER], [MIDDLE, HEAD]])
    check_stages([[EMBEDDING, MIDDLE, HEAD]])
    check_stages([[EMBEDDING], [MIDDLE], [HEAD]])


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([[LATER, EMBEDDING], [MIDDLE, HEAD]], "chunk 0 of pipeline rank 0 is not stage 0 of 4"),
        ([[EMBEDDING, HEAD], [MIDDLE, LATER]], r"chunk 1 of pipeline rank 0 is not stage 2 of 4: .*has_head=True"),
        ([[EMBEDDING], [Chunk((1, 2), False, False)], [HEAD]], r"layers=\(2, 3\).* is needed; runtime.model lists"),
        ([[EMBEDDING, MIDDLE], [HEAD]], r"the same number of chunks; by rank they are \[2, 1\]"),
        ([[EMBEDDING], [MIDDLE]], "chunk 0 of pipeline rank 1 is not stage 1 of 2"),
    ],
)
def test_chunks_that_are_not_the_model_are_refused(ranks: list[list[Chunk]], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_stages(ranks)


def test_a_chunk_stands_first_while_it_runs_and_no_longer() -> None:
    chunks = [object(), object(), object()]
    before = list(chunks)
    with pytest.raises(ArithmeticError), first_is(before[2], chunks):
        assert chunks[0] is before[2]
        raise ArithmeticError
    assert chunks == before
