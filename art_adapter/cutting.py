"""A window cut into microbatches: a packed group becomes several groups of the same slot, and nothing changes.

Different roots of a packed prefix tree never see each other, so a cut between them is lossless; a root with all that
hangs on it stays whole.

    ABCx ABCyz Q R        roots   ABC(x yz)   Q   R        two pieces   ABCx ABCyz  |  Q R
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from .records import fields_of, replace

PACK_FIELDS = {"tokens", "group_ids", "parent_ids", "position_ids", "positions_by_sequence"}
GROUP_FIELDS = {"slot_ref", "grad_enabled", "request_indices", "items", "packed"}


@attrs.frozen(eq=False)
class Root:
    """A tree of a packed row: places of its tokens in the row, ascending, and the numbers of its items in the group."""

    columns: tuple[int, ...]
    items: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Its length in the packed row."""
        return len(self.columns)


@attrs.frozen(eq=False)
class CutPlan:
    """A flat plan whose groups may be cut.

    Attributes:
        plan: the trainer's own.
        roots: of each of its groups; empty if the trainer packs in a way that is not known here.
    """

    plan: Any
    roots: tuple[tuple[Root, ...], ...]

    @classmethod
    def of(cls, plan: Any) -> CutPlan:
        known = all(
            fields_of(group) <= GROUP_FIELDS and fields_of(group.packed) == PACK_FIELDS for group in plan.groups
        )
        return cls(plan, tuple(tuple(roots(group.packed)) for group in plan.groups) if known else ())

    @property
    def tokens(self) -> int:
        """Of all groups together."""
        return sum(root.tokens for group in self.roots for root in group)

    def pieces(self, tokens: int) -> list[list[list[Root]]]:
        """For each group its pieces of about so many tokens; each piece is one root or several."""
        return [_shared_out(group, -(-sum(root.tokens for root in group) // max(1, tokens))) for group in self.roots]

    def cut(self, tokens: int) -> Any:
        """The plan with groups of about so many tokens."""
        if not self.roots:
            return self.plan
        groups = [
            _part(group, piece) if len(pieces) > 1 else group
            for group, pieces in zip(self.plan.groups, self.pieces(tokens), strict=True)
            for piece in pieces
        ]
        return replace(self.plan, groups=tuple(groups))


def roots(packed: Any) -> list[Root]:
    """The trees of a packed row, in its order."""
    groups, parents = packed.group_ids[0].tolist(), packed.parent_ids[0].tolist()
    root_of: dict[int, int] = {}
    for group, parent in zip(groups, parents, strict=True):  # parents come first
        root_of.setdefault(group, group if parent == group else root_of[parent])
    columns: dict[int, list[int]] = {}
    for column, group in enumerate(groups):
        columns.setdefault(root_of[group], []).append(column)
    items: dict[int, list[int]] = {root: [] for root in columns}
    for number, places in enumerate(packed.positions_by_sequence):
        items[root_of[groups[int(places[0])]]].append(number)
    return [Root(tuple(columns[root]), tuple(items[root])) for root in columns]


def _shared_out(roots: Sequence[Root], number: int) -> list[list[Root]]:
    """Roots in ``number`` shares of nearly equal length, or fewer; the largest roots are given out first."""
    shares: list[list[Root]] = [[] for _ in range(min(max(1, number), len(roots)))]
    lengths = [0 for _ in shares]
    for root in sorted(roots, key=lambda each: -each.tokens):
        least = lengths.index(min(lengths))
        shares[least].append(root)
        lengths[least] += root.tokens
    return sorted((sorted(share, key=_first_column) for share in shares), key=lambda share: _first_column(share[0]))


def _first_column(root: Root) -> int:
    return root.columns[0]


def _part(group: Any, piece: Sequence[Root]) -> Any:
    """A group of these roots only."""
    items = sorted(item for root in piece for item in root.items)
    columns = torch.tensor(sorted(column for root in piece for column in root.columns))
    return replace(
        group,
        request_indices=tuple(group.request_indices[item] for item in items),
        items=tuple(group.items[item] for item in items),
        packed=_part_of_row(group.packed, columns, items),
    )


def _part_of_row(packed: Any, columns: torch.Tensor, items: Sequence[int]) -> Any:
    """The row with these columns and items only; segments are numbered without gaps, as in a row of its own."""
    columns = columns.to(packed.tokens.device)
    ids, dense = torch.unique(packed.group_ids[0, columns], return_inverse=True)
    parents = torch.searchsorted(ids, packed.parent_ids[0, columns])
    places = torch.full_like(packed.tokens[0], -1)
    places[columns] = torch.arange(len(columns), device=places.device)
    first = packed.group_ids.min()
    return replace(
        packed,
        tokens=packed.tokens[:, columns],
        group_ids=(dense + first)[None],
        parent_ids=(parents + first)[None],
        position_ids=packed.position_ids[:, columns],
        positions_by_sequence=tuple(places[packed.positions_by_sequence[item].to(places.device)] for item in items),
    )
