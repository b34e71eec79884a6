"""The caller's microbatches, read lazily and let go once they are of no more use here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized

from pipeline_engine.errors import UsageError
from pipeline_engine.run.microbatch import Microbatch


class Microbatches:
    """Microbatches by number, over any iterable of ``Microbatch``.

    Args:
        source: a sequence, or an iterable that is read as far as it is needed.
        count: how many there are; needed if ``source`` has no length.
        uses: how often each of them is released before it is let go.

    Raises:
        UsageError: the number is unknown, or is not that of the sequence.
    """

    def __init__(self, source: Iterable[Microbatch], count: int | None, uses: int) -> None:
        known = len(source) if isinstance(source, Sized) else None
        if count is None and known is None:
            raise UsageError("the number of microbatches is unknown: pass a sequence, or num_microbatches=.")
        if count is not None and known is not None and count != known:
            raise UsageError(f"num_microbatches is {count}, but {known} microbatches were passed.")
        self.count: int = known if known is not None else count or 0
        self._uses = uses
        self._source: Iterator[Microbatch] = iter(source)
        self._read = 0
        self._kept: dict[int, list[Microbatch]] = {}  # one entry for each use that is left

    def __getitem__(self, number: int) -> Microbatch:
        while number >= self._read:
            self._kept[self._read] = [self._next()] * self._uses
            self._read += 1
        return self._kept[number][-1]

    def release(self, number: int) -> None:
        """One use is over."""
        uses = self._kept[number]
        uses.pop()
        if not uses:
            del self._kept[number]

    def clear(self) -> None:
        """Let go of all that were read."""
        self._kept.clear()
        self._source = iter(())

    def _next(self) -> Microbatch:
        try:
            microbatch = next(self._source)
        except StopIteration:
            raise UsageError(f"there are {self._read} microbatches, but {self.count} were announced.") from None
        if not isinstance(microbatch, Microbatch):
            raise UsageError(
                f"microbatch {self._read} is a {type(microbatch).__name__}; "
                "wrap the arguments of the first stage: pe.Microbatch(inputs=(tensor,))."
            )
        return microbatch
