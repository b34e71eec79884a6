"""Progress: a bar on stderr for work of minutes, where tqdm is there to draw it and a terminal to show it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

try:
    from tqdm import tqdm
except ModuleNotFoundError:  # it is in the extras of the command lines only
    tqdm = None

Item = TypeVar("Item")


@contextmanager
def progress(what: str, total: int, *, silent: bool = False) -> Iterator[Callable[[], object]]:
    """Show a bar while the block runs, and wipe it away at its end; what is yielded counts one step.

    It is drawn when a step is counted, and so takes no time from what is measured in one.

    Args:
        what: stands before the bar.
        total: number of steps.
        silent: whether to show nothing at all.
    """
    if silent or not _is_shown():
        yield lambda: None
        return
    with tqdm(desc=what, total=total, leave=False, miniters=1, dynamic_ncols=True) as bar:
        yield bar.update


def with_bar(items: Sequence[Item], what: str) -> Iterator[Item]:
    """The items, with a bar that counts those that are done."""
    with progress(what, len(items)) as step:
        for item in items:
            yield item
            step()


def say(line: str) -> None:
    """Write a line on stdout, above the bar if there is one."""
    if _is_shown():
        tqdm.write(line)
    else:
        sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _is_shown() -> bool:
    return tqdm is not None and sys.stderr.isatty()
