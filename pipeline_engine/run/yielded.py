"""Yielded: one item of a stream, as the caller is handed it."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from pipeline_engine.run.call import Call


@frozen(eq=False)
class Yielded:
    """One item of ``Pipeline.stream``.

    Attributes:
        index: which microbatch it is.
        outputs: what the last stage returned for it, on every rank; fresh tensors that may be changed in place.
    """

    index: int
    outputs: Any
    _call: Call
    _place: int
