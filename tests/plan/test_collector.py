"""Planning without the garbage collector leaves it as it was."""

from __future__ import annotations

import gc

import pytest

from pipeline_engine.plan.collector import without_collector


@without_collector
def is_collecting(error: Exception | None = None) -> bool:
    if error is not None:
        raise error
    return gc.isenabled()


def test_it_is_off_inside_and_on_again_afterwards() -> None:
    assert gc.isenabled() and not is_collecting() and gc.isenabled()
    with pytest.raises(KeyError):
        is_collecting(KeyError("boom"))
    assert gc.isenabled()


def test_a_caller_who_has_turned_it_off_finds_it_off() -> None:
    gc.disable()
    try:
        assert not is_collecting() and not gc.isenabled()
    finally:
        gc.enable()
