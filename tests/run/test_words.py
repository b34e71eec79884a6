"""What ranks say in an exchange: gathered in any order, complete once, and nothing is left of it afterwards."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_engine.run.words import Words

FIRST, SECOND = (0, 0), (0, 1)


@given(st.permutations(range(5)), st.lists(st.binary(max_size=3), min_size=5, max_size=5))
def test_the_last_word_completes_an_exchange_in_rank_order(order: Sequence[int], said: list[bytes]) -> None:
    words, told = Words(5), b""
    for heard, rank in enumerate(order):
        assert not told and not words.are_complete(FIRST)
        assert words.unheard(FIRST) == sorted(set(range(5)) - set(order[:heard]))
        told = words.gather(FIRST, rank, said[rank])
    for each in (words, Words(5)):
        each.learn(FIRST, told)
        assert each.are_complete(FIRST) and each.unheard(FIRST) == []
        assert list(each.said(FIRST)) == said
        each.drop(FIRST)
        assert not each.are_complete(FIRST)


@given(st.lists(st.tuples(st.sampled_from([FIRST, SECOND]), st.integers(0, 2)), unique=True, min_size=6, max_size=6))
def test_two_exchanges_keep_apart(order: list[tuple[tuple[int, int], int]]) -> None:
    """A rank that is quick may speak in the next one before a slow one has spoken in the first."""
    words = Words(3)
    for exchange, rank in order:
        if told := words.gather(exchange, rank, b"%d in %d" % (rank, exchange[1])):
            words.learn(exchange, told)
    for exchange in (FIRST, SECOND):
        assert list(words.said(exchange)) == [b"%d in %d" % (rank, exchange[1]) for rank in range(3)]


def test_equal_words_travel_once() -> None:
    words = Words(8)
    told = [words.gather(FIRST, rank, bytes([7]) * 10_000) for rank in range(8)][-1]
    assert 10_000 < len(told) < 11_000


def test_who_is_early_is_known_until_his_exchange_is_over() -> None:
    words = Words(3)
    words.hear_early(FIRST, 1, b"one")
    words.hear_early(SECOND, 2, b"two")  # he is further already
    assert words.early(FIRST) == [(1, b"one")] and words.early(SECOND) == [(2, b"two")]
    assert words.unheard(FIRST) == [0, 2] and words.some_are_early
    words.learn(FIRST, told_by(3, FIRST))
    words.drop(FIRST)
    assert words.early(FIRST) == [] and words.early(SECOND) == [(2, b"two")] and words.some_are_early
    words.learn(SECOND, told_by(3, SECOND))
    words.drop(SECOND)
    assert not words.some_are_early


def told_by(num_ranks: int, exchange: tuple[int, int]) -> bytes:
    zero = Words(num_ranks)
    return [zero.gather(exchange, rank, b"") for rank in range(num_ranks)][-1]


def test_an_epoch_is_forgotten_and_the_next_one_stands() -> None:
    words = Words(2)
    for epoch in (0, 1):
        words.gather((epoch, 0), 1, b"%d" % epoch)
        words.hear_early((epoch, 0), epoch, b"")
    words.forget(0)
    assert words.unheard((0, 0)) == [0, 1] and words.unheard((1, 0)) == [0]
    words.learn((1, 0), words.gather((1, 0), 0, b"last"))
    assert list(words.said((1, 0))) == [b"last", b"1"]
    with pytest.raises(KeyError):
        words.said((0, 0))
