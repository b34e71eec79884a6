"""Packing: every sequence is whole in the row, and a token sees its own past and nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from art_adapter.packing import Segment, hidden_from, packed_length, pad, prefix_tree_pack, segments


def test_the_picture_in_the_docstring() -> None:
    rows = [list(map(ord, row)) for row in ("ABCx", "ABCyz", "Q")]
    assert segments(rows, max_depth=1) == [
        Segment((0, 1), 0, 3, 0),
        Segment((0,), 3, 4, 0),
        Segment((1,), 3, 5, 0),
        Segment((2,), 0, 1, 3),
    ]
    with pytest.raises(ValueError, match="max_depth must be >= 0, not -1"):
        segments(rows, max_depth=-1)


token_rows = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=6)


@given(token_rows, st.integers(0, 4))
def test_a_pack_holds_every_sequence_and_shows_each_token_its_own_past(rows: list[list[int]], depth: int) -> None:
    pack = prefix_tree_pack(map(torch.tensor, rows), max_depth=depth)
    visible = ~hidden_from(pack)[0, 0]
    for row, places in zip(rows, pack.positions_by_sequence, strict=True):
        assert pack.tokens[0, places].tolist() == row
        assert pack.position_ids[0, places].tolist() == list(range(len(row)))
        for position, place in enumerate(places.tolist()):
            assert visible[place].nonzero()[:, 0].tolist() == places[: position + 1].tolist()
    assert packed_length(map(torch.tensor, rows), max_depth=depth) == pack.tokens.shape[1]


@given(token_rows, st.integers(1, 5))
def test_padding_is_seen_by_nobody(rows: list[list[int]], multiple: int) -> None:
    pack = prefix_tree_pack(map(torch.tensor, rows), max_depth=1)
    padded = pad(pack, multiple=multiple)
    length = pack.tokens.shape[1]
    visible = ~hidden_from(padded)[0, 0]
    assert padded.tokens.shape[1] % multiple == 0
    assert torch.equal(visible[:length, :length], ~hidden_from(pack)[0, 0])
    assert visible[length:].sum() == padded.tokens.shape[1] - length
