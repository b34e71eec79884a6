"""A bar is there for whoever looks at a terminal, and for nobody else; what it counts is the same either way."""

from __future__ import annotations

import io
import sys

import pytest

from art_adapter import progress


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        return True


def counted_on(terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is written to stderr while three things are counted and one line is said."""
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(progress.with_bar(("one", "two", "three"), "things")) == ["one", "two", "three"]
    progress.say("done")
    return terminal.getvalue()


def test_nothing_is_drawn_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert counted_on(io.StringIO(), monkeypatch) == ""
    assert capsys.readouterr().out == "done\n"


def test_nothing_is_drawn_where_the_library_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "tqdm", None)
    assert counted_on(Terminal(), monkeypatch) == ""
    assert capsys.readouterr().out == "done\n"


def test_a_terminal_sees_what_is_done_and_lines_above_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tqdm", reason="tqdm is not installed: it is in the extras 'canary' and 'benchmarks'")
    drawn = counted_on(Terminal(), monkeypatch)
    assert "things" in drawn and "0/3" in drawn and not drawn.endswith("\n")
    assert capsys.readouterr().out.endswith("done\n")


def test_the_library_may_be_missing_altogether(monkeypatch: pytest.MonkeyPatch) -> None:
    source = progress.__spec__.loader.get_source("art_adapter.progress")  # type: ignore[union-attr, attr-defined]
    monkeypatch.setitem(sys.modules, "tqdm", None)
    names = {"__name__": "without"}
    exec(source, names)
    assert names["tqdm"] is None and list(names["with_bar"]([1, 2], "things")) == [1, 2]  # type: ignore[operator]


def test_whoever_wants_silence_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress.progress("things", 2, silent=True) as step:
        step()
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]
