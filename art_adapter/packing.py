"""Several sequences in one row, in which a common beginning is stored once.

The row is a forest of segments. A token attends to its own segment up to itself, and to all of the segment's
ancestors; so different roots never see each other, and cutting between them changes nothing.

    ABCx ABCyz Q     max_depth=1        segment   ABC   x    yz   Q
                                        parent     -   ABC  ABC   -
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import torch


@attrs.frozen
class Segment:
    """Tokens ``start`` to ``stop`` of each member; ``parent`` is the index of a segment, its own for a root."""

    members: tuple[int, ...]
    start: int
    stop: int
    parent: int


@attrs.frozen(eq=False)
class PrefixTreePack:
    """A packed row; the fields and their shapes are those of ART's pack.

    Attributes:
        tokens, position_ids: ``[1, packed]`` int64; positions count inside the source sequence.
        group_ids, parent_ids: ``[1, packed]`` int64; the segment of each token and that segment's parent.
        positions_by_sequence: where each source token stands in the row, one ``[tokens]`` int64 per sequence.
    """

    tokens: torch.Tensor
    group_ids: torch.Tensor
    parent_ids: torch.Tensor
    position_ids: torch.Tensor
    positions_by_sequence: tuple[torch.Tensor, ...]


def prefix_tree_pack(sequences: Iterable[torch.Tensor], *, max_depth: int) -> PrefixTreePack:
    """Pack flat token sequences; ``max_depth`` nested levels of sharing, 0 for none."""
    rows = [sequence.tolist() for sequence in sequences]
    forest = segments(rows, max_depth=max_depth)
    tokens: list[int] = []
    groups: list[int] = []
    positions: list[int] = []
    places: list[list[int]] = [[] for _ in rows]
    for group, segment in enumerate(forest):
        span = range(segment.start, segment.stop)
        for member in segment.members:
            places[member].extend(range(len(tokens), len(tokens) + len(span)))
        tokens.extend(rows[segment.members[0]][segment.start : segment.stop])
        groups.extend([group] * len(span))
        positions.extend(span)
    return PrefixTreePack(
        tokens=_row(tokens),
        group_ids=_row(groups),
        parent_ids=_row([forest[group].parent for group in groups]),
        position_ids=_row(positions),
        positions_by_sequence=tuple(torch.tensor(place, dtype=torch.long) for place in places),
    )


def packed_length(sequences: Iterable[torch.Tensor], *, max_depth: int) -> int:
    """How many tokens the packed row has, without building it."""
    forest = segments([sequence.tolist() for sequence in sequences], max_depth=max_depth)
    return sum(segment.stop - segment.start for segment in forest)


def pad(pack: PrefixTreePack, *, multiple: int) -> PrefixTreePack:
    """Append tokens that nobody sees, each a root of its own, until the length is a multiple."""
    missing = -pack.tokens.shape[1] % multiple
    next_group = int(pack.group_ids.max()) + 1 if pack.group_ids.numel() else 0
    fresh = torch.arange(next_group, next_group + missing).unsqueeze(0)
    zeros = torch.zeros_like(fresh)
    return PrefixTreePack(
        tokens=torch.cat((pack.tokens, zeros), dim=1),
        group_ids=torch.cat((pack.group_ids, fresh), dim=1),
        parent_ids=torch.cat((pack.parent_ids, fresh), dim=1),
        position_ids=torch.cat((pack.position_ids, zeros), dim=1),
        positions_by_sequence=pack.positions_by_sequence,
    )


def hidden_from(pack: PrefixTreePack) -> torch.Tensor:
    """The attention mask ``[1, 1, packed, packed]``, bool, True where the row's token must not see the column's."""
    groups = pack.group_ids[0]
    parents = dict(zip(groups.tolist(), pack.parent_ids[0].tolist(), strict=True))
    sees = torch.eye(len(parents), dtype=torch.bool)
    for group, parent in parents.items():  # parents come first, so their line is complete
        sees[group] |= sees[parent]
    visible = sees[groups][:, groups].tril()
    return ~visible[None, None]


def segments(rows: Sequence[list[int]], *, max_depth: int) -> list[Segment]:
    """The forest in the order of the packed row: parents before their children.

    Raises:
        ValueError: max_depth is negative.
    """
    if max_depth < 0:
        raise ValueError(f"max_depth must be >= 0, not {max_depth}")
    forest: list[Segment] = []

    def emit(members: tuple[int, ...], start: int, stop: int, parent: int | None) -> int:
        forest.append(Segment(members, start, stop, len(forest) if parent is None else parent))
        return len(forest) - 1

    def grow(members: Sequence[int], start: int, parent: int | None, depth: int) -> None:
        for branch in _branches(rows, members, start) if depth else [(member,) for member in members]:
            if len(branch) > 1:
                stop = _common_stop(rows, branch, start)
                grow(branch, stop, emit(branch, start, stop, parent), depth - 1)
            elif start < len(rows[branch[0]]):
                emit(branch, start, len(rows[branch[0]]), parent)

    grow(range(len(rows)), 0, None, max_depth)
    return forest


def _branches(rows: Sequence[list[int]], members: Sequence[int], start: int) -> list[tuple[int, ...]]:
    by_token: dict[int, list[int]] = {}
    for member in members:
        if start < len(rows[member]):
            by_token.setdefault(rows[member][start], []).append(member)
    return [tuple(branch) for branch in by_token.values()]


def _common_stop(rows: Sequence[list[int]], members: Sequence[int], start: int) -> int:
    # what the first and the last in dictionary order have in common, all between them have too
    first, last = min(rows[member] for member in members), max(rows[member] for member in members)
    stop = start
    while stop < min(len(first), len(last)) and first[stop] == last[stop]:
        stop += 1
    return stop


def _row(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.long).unsqueeze(0)
