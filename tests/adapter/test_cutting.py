"""Cutting a window: every piece is the row that its items would make alone, and together they are the whole."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("megatron.core")

from art_adapter.cutting import CutPlan, roots
from art_adapter.packing import hidden_from, prefix_tree_pack

token_rows = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8), min_size=1, max_size=7)


@attrs.frozen(eq=False)
class Group:
    slot_ref: str
    request_indices: tuple[int, ...]
    items: tuple[Any, ...]
    packed: Any


@attrs.frozen(eq=False)
class Plan:
    groups: tuple[Group, ...]


def plan_of(*groups: list[list[int]], depth: int = 1) -> Plan:
    first, made = 0, []
    for rows in groups:
        packed = prefix_tree_pack(map(torch.tensor, rows), max_depth=depth)
        made.append(Group(f"slot {len(made)}", tuple(range(first, first + len(rows))), tuple(map(tuple, rows)), packed))
        first += len(rows)
    return Plan(tuple(made))


def test_the_picture_in_the_docstring() -> None:
    whole = CutPlan.of(plan_of([list(map(ord, row)) for row in ("ABCx", "ABCyz", "Q", "R")]))
    assert [(root.tokens, root.items) for root in whole.roots[0]] == [(6, (0, 1)), (1, (2,)), (1, (3,))]
    pieces = whole.cut(4).groups
    assert [piece.request_indices for piece in pieces] == [(0, 1), (2, 3)]
    assert [bytes(piece.packed.tokens[0].tolist()) for piece in pieces] == [b"ABCxyz", b"QR"]


@given(st.lists(token_rows, min_size=1, max_size=3), st.integers(0, 3), st.integers(1, 30))
def test_a_piece_is_the_row_that_its_items_make_alone(groups: list[list[list[int]]], depth: int, tokens: int) -> None:
    plan = plan_of(*groups, depth=depth)
    cut = CutPlan.of(plan).cut(tokens)
    assert sorted(index for piece in cut.groups for index in piece.request_indices) == list(
        range(sum(map(len, groups)))
    )
    assert sum(piece.packed.tokens.numel() for piece in cut.groups) == sum(
        group.packed.tokens.numel() for group in plan.groups
    )
    for piece in cut.groups:
        packed = piece.packed
        visible = ~hidden_from(packed)[0, 0]
        for row, places in zip(piece.items, packed.positions_by_sequence, strict=True):
            assert packed.tokens[0, places].tolist() == list(row)
            assert packed.position_ids[0, places].tolist() == list(range(len(row)))
            for position, place in enumerate(places.tolist()):
                assert visible[place].nonzero()[:, 0].tolist() == places[: position + 1].tolist()
        assert sorted(set(packed.group_ids[0].tolist())) == list(range(int(packed.group_ids.max()) + 1))


@given(token_rows, st.integers(1, 30))
def test_pieces_are_whole_roots_of_nearly_equal_length(rows: list[list[int]], tokens: int) -> None:
    whole = CutPlan.of(plan_of(rows))
    (pieces,) = whole.pieces(tokens)
    lengths = [sum(root.tokens for root in piece) for piece in pieces]
    assert sum(lengths) == whole.tokens and len(pieces) <= max(1, -(-whole.tokens // tokens))
    assert max(lengths) - min(lengths) <= max(root.tokens for root in roots(whole.plan.groups[0].packed))


def test_a_row_that_is_packed_in_an_unknown_way_is_left_whole() -> None:
    @attrs.frozen(eq=False)
    class Unknown:
        tokens: torch.Tensor

    plan = Plan((Group("slot", (0,), ((1,),), Unknown(torch.ones(1, 1))),))
    assert CutPlan.of(plan).cut(1) is plan
