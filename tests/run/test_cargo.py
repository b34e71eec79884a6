"""Cargo is a tree without its history: the same structure, the same bits, detached."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline_engine.errors import UsageError
from pipeline_engine.run.cargo import ALIGNMENT, Cargo, aligned, flatten
from pipeline_engine.run.wire import Stamp


@dataclasses.dataclass
class Hidden:
    states: Any
    aux: Any


Pair = namedtuple("Pair", "left right")

leaves = st.sampled_from(
    [None, 3, "text", 2.5, torch.ones(2), torch.zeros(0, 3), torch.tensor(1.5, requires_grad=True), torch.tensor(True)]
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.builds(Hidden, inner, inner),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=8,
)


def same(left: Any, right: Any) -> bool:
    """Equal in types, structure and bits, by rules of its own."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, Hidden):
        return same(left.states, right.states) and same(left.aux, right.aux)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@given(trees)
def test_a_tree_is_the_same_after_it_was_cargo(tree: Any) -> None:
    assert same(Cargo.of(tree).tree(), tree)
    assert same(Cargo.of(tree).copied().tree(), tree)


@given(trees)
def test_cargo_has_no_history_and_remembers_what_wants_a_gradient(tree: Any) -> None:
    cargo = Cargo.of(tree)
    originals, _ = flatten(tree)
    needed = [cargo.needs_grad[place] for place in cargo.places]
    assert needed == [isinstance(x, torch.Tensor) and x.requires_grad for x in originals]
    assert not any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in cargo.leaves)


def test_a_copy_has_memory_of_its_own_and_the_same_strides() -> None:
    strided = torch.arange(6.0).view(2, 3).T
    cargo = Cargo.of((strided, strided[:]))
    first, second = cargo.copied().leaves
    first.zero_()
    assert first.stride() == strided.stride() and torch.equal(second, strided) and strided.sum() == 15


def test_a_tensor_that_stands_in_several_places_is_one_leaf() -> None:
    tensor, other = torch.ones(2), torch.ones(2)
    cargo = Cargo.of({"a": tensor, "b": [other, tensor]})
    tree = cargo.copied().tree()
    assert len(cargo.leaves) == 2 and tree["a"] is tree["b"][1] and tree["a"] is not tree["b"][0]


def test_an_ordered_dict_stays_one() -> None:
    tree = OrderedDict(b=torch.ones(1), a=torch.zeros(1))
    assert list(Cargo.of(tree).tree().items()) == list(tree.items())


def test_gradients_are_counted_for_leaves_that_want_one_each_padded() -> None:
    wanted = torch.ones(3, requires_grad=True)
    assert Cargo.of((wanted, torch.ones(1000), wanted * 1, wanted)).grad_bytes == 2 * ALIGNMENT


@given(st.integers(0, 10**9))
def test_aligned_rounds_up_to_the_next_multiple(num_bytes: int) -> None:
    rounded = aligned(num_bytes)
    assert rounded % ALIGNMENT == 0 and num_bytes <= rounded < num_bytes + ALIGNMENT


def test_a_list_of_one_kind_of_dataclass_inside_another_is_flattened_through_and_through() -> None:
    tree = Hidden([Hidden(torch.ones(1), None)], {"x": Hidden(1, 2)})
    found, _ = flatten(tree)
    assert len(found) == 3 and found[1:] == [1, 2]  # None is part of the structure
    assert same(Cargo.of(tree).tree(), tree)


def test_a_frozen_dataclass_is_a_tree_too() -> None:
    @dataclasses.dataclass(frozen=True)
    class Frozen:
        x: torch.Tensor

    assert torch.equal(Cargo.of(Frozen(torch.ones(2))).tree().x, torch.ones(2))


def test_a_dataclass_that_checks_its_fields_can_be_sent() -> None:
    from pipeline_engine.run import wire

    (message,) = wire.encode_cargo(Cargo.of(Checked(torch.ones(2))), Stamp(0))
    assert torch.equal(wire.Arrived.opened(message, Stamp(0)).cargo().tree().x, torch.ones(2))


@dataclasses.dataclass
class Checked:
    x: torch.Tensor

    def __post_init__(self) -> None:
        assert isinstance(self.x, torch.Tensor)


@pytest.mark.parametrize(
    ("leaf", "kind"),
    [
        (torch.eye(2).to_sparse(), "tensor of layout torch.sparse_coo"),
        (torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged), "NestedTensor"),
    ],
)
def test_a_tensor_that_is_no_plain_memory_is_refused_with_the_cure(leaf: torch.Tensor, kind: str) -> None:
    with pytest.raises(UsageError, match=f"a stage returned a {kind}; only plain dense tensors travel.*return those"):
        Cargo.of((torch.ones(1), leaf))
