"""Every error of the package: one base class, and a builtin parent where callers expect one."""

from __future__ import annotations


class PipelineError(Exception):
    """Base class of all errors that this package raises by itself.

    An exception raised by a stage or by the caller is never wrapped: it reaches the caller
    unchanged, with a note that says which action was being performed.
    """


class ScheduleError(PipelineError, ValueError):
    """A graph, a schedule or one of its parts breaks a law; the message shows a counter-example."""


class UsageError(PipelineError, RuntimeError):
    """The caller did something that a pipeline cannot do; the message says what to do instead."""


class TransportError(PipelineError, RuntimeError):
    """A message could not be moved, what arrived is not what was announced, or no message ever can be any more."""


class DeadlineError(PipelineError, TimeoutError):
    """A single wait took longer than the pipeline's ``deadline`` (seconds)."""


class PeerFailedError(PipelineError, RuntimeError):
    """Another rank failed first.

    Attributes:
        rank: the rank that failed, counted inside the pipeline.
        doing: what that rank was doing, for example ``"2F3 (stage 2, microbatch 3)"``.
        cause: type and text of its exception, for example ``"ValueError: boom"``.
        remote_traceback: its traceback as text; empty if the rank died without one.
    """

    def __init__(self, rank: int, doing: str, cause: str, remote_traceback: str = "") -> None:
        super().__init__(f"rank {rank} failed while it performed {doing}: {cause}")
        self.rank = rank
        self.doing = doing
        self.cause = cause
        self.remote_traceback = remote_traceback
        if remote_traceback:
            self.add_note(f"traceback of rank {rank}:\n{remote_traceback}")

    def __reduce__(self) -> tuple[type[PeerFailedError], tuple[int, str, str, str]]:
        return type(self), (self.rank, self.doing, self.cause, self.remote_traceback)
