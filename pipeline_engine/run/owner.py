"""Owner: the process and the thread that built a pipeline, the only ones that may use it."""

from __future__ import annotations

import os
import threading

from attrs import field, frozen

from pipeline_engine.errors import UsageError


@frozen
class Owner:
    """Process and thread by number; made where the pipeline is built."""

    process: int = field(init=False, factory=os.getpid)
    thread: int = field(init=False, factory=threading.get_ident)

    def check(self) -> None:
        """Raise UsageError if this is another process or thread."""
        if os.getpid() != self.process:
            raise UsageError("the process has forked since the pipeline was built; build one in the child instead.")
        if threading.get_ident() != self.thread:
            raise UsageError("the pipeline was built in another thread; use it in that thread only.")
