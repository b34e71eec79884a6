"""Callers, stages and transports that break where they are told to, and what every rank must say about it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import torch
from attrs import frozen

import pipeline_engine as pe
from pipeline_engine.run.transports.base import Transport
from pipeline_engine.testing import Fault, FaultyTransport
from tests.run.playing import ROWS, Layer, Rank, batch, loss_of

NUM_RANKS = 3
AT = 2  # the microbatch
FAULTS = ("forward", "memory", "backward", "weight", "send", "receive", "publish", "loss", "leave", "plan")
ENTRIES = ("stream", "forward", "step")
LIMIT = 10.0  # seconds


class Boom(Exception):
    """What breaks."""


class _NoCopy(torch.Tensor):
    """Cannot be cloned, which the last forward does so that it can be published later."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.clone:
            raise Boom("in publish")
        return super().__torch_function__(function, types, args, kwargs or {})


class Breakable(Layer):
    """A stage that breaks on microbatch ``AT``, in a way."""

    way = ""

    def forward(self, x: torch.Tensor, *, number: int = 0) -> torch.Tensor:
        y = super().forward(x, number=number)
        if number == AT:
            if self.way == "forward":
                raise Boom("in forward")
            if self.way == "memory":
                raise torch.OutOfMemoryError("out of memory, as it was told to")
            if self.way == "backward":
                y.register_hook(self._break)
            if self.way == "publish":
                return y.as_subclass(_NoCopy)
        return y

    def _break(self, _: torch.Tensor) -> None:
        raise Boom("in backward")


@frozen
class Cell:
    """One way of breaking, on one rank, under one entry point."""

    fault: str
    rank: int
    entry: str

    @property
    def schedule(self) -> str:
        return "zb-h1" if self.fault == "weight" else "1f1b"

    @property
    def in_callers_code(self) -> bool:
        """Whether no action breaks, but the caller goes his own way, and into his next call."""
        return self.fault in ("loss", "leave") and self.entry != "step"

    @property
    def doing(self) -> str:
        """What the rank was doing, as a pattern."""
        if self.in_callers_code:
            return "the caller's code"
        stage = self.rank
        return {
            "forward": rf"{stage}F2 \(forward of stage {stage}, microbatch 2\)",
            "memory": rf"{stage}F2 \(forward of stage {stage}, microbatch 2\)",
            "backward": rf"{stage}B2 \(backward of stage {stage}, microbatch 2\)",
            "weight": rf"{stage}W(\d) \(backwardweight of stage {stage}, microbatch \1\)",
            "send": r"send:d?[xy]\[(\d,)?\d\]>\d \(send of the .*, to rank \d\)",
            "receive": r"recv:d?[xy]\[(\d,)?\d\]<\d \(receive of the .*, from rank \d\)",
            "publish": rf"{stage}F2 \(forward of stage {stage}, microbatch 2\)",
            "loss": r"yield:y\[2\] \(microbatch 2 in the caller's hands\)",
            "plan": f"the planning of {self.entry}",
        }[self.fault]

    @property
    def cause(self) -> str:
        """Type and text of the first exception, as a pattern."""
        return {
            "memory": "OutOfMemoryError: out of memory, as it was told to",
            "send": "TransportError: a message on channel .* failed, as it was told to",
            "receive": "TransportError: a message on channel .* failed, as it was told to",
            "plan": "UsageError: the number of microbatches is unknown",
            "leave": "",
        }.get(self.fault, f"Boom: in {self.fault}")


def cells() -> Iterator[Cell]:
    """All that can be: only the last rank publishes, and under ``step`` only that one has a caller's loss."""
    for fault in FAULTS:
        for rank in range(NUM_RANKS):
            for entry in ENTRIES:
                is_last = rank == NUM_RANKS - 1
                if (fault == "publish" and not is_last) or (entry == "step" and fault == "leave"):
                    continue
                if (fault, entry) == ("publish", "step") or ((fault, entry) == ("loss", "step") and not is_last):
                    continue
                yield Cell(fault, rank, entry)


@frozen
class Broken:
    """What one rank raised, one after the other, with notes, and after how many seconds."""

    errors: list[str]
    notes: list[str]
    seconds: float


class Subject(Rank):
    """A rank to be broken."""

    def __init__(self, transport: Transport, schedule: str) -> None:
        self.transport = FaultyTransport(transport)
        super().__init__(self.transport, schedule, Breakable)

    def suffer(self, cell: Cell) -> Broken:
        """Run into the fault, then train as if nothing had been, and check the gradients."""
        errors: list[BaseException] = []
        began = monotonic()
        disarm = self._arm(cell) if cell.rank == self.number else lambda: None
        self._try(lambda: self._call(cell), errors)
        if not errors or (cell.in_callers_code and cell.rank == self.number):
            self._try(self.pipeline.flush, errors)
        seconds = monotonic() - began
        disarm()
        self.zero_grad()
        self.train(ROWS)
        self.check_gradients(range(len(ROWS)), ROWS)
        notes = [note for error in errors for note in getattr(error, "__notes__", [])]
        return Broken([f"{type(error).__name__}: {error}" for error in errors], notes, seconds)

    def _try(self, call: Callable[[], object], errors: list[BaseException]) -> None:
        try:
            call()
        except (Boom, torch.OutOfMemoryError, pe.PipelineError) as error:
            errors.append(error)

    def _arm(self, cell: Cell) -> Callable[[], None]:
        self.stage.way = cell.fault
        if cell.fault == "send":
            self.transport.plan(sends={3: Fault.FAIL})
        if cell.fault == "receive":
            self.transport.plan(receives={3: Fault.FAIL})
        hook = self.stage.weight.register_hook(self._break_third()) if cell.fault == "weight" else None

        def disarm() -> None:
            self.stage.way = ""
            self.transport.plan()
            if hook is not None:
                hook.remove()

        return disarm

    def _break_third(self) -> Callable[[torch.Tensor], None]:
        count = iter(range(100))

        def hook(_: torch.Tensor) -> None:
            if next(count) == AT:
                raise Boom("in weight")

        return hook

    def _call(self, cell: Cell) -> None:
        strays = cell.rank == self.number and cell.in_callers_code
        data: Any = batch(ROWS)
        if cell.fault == "plan" and cell.rank == self.number:
            data = iter(data)
        if cell.entry == "step":
            self.pipeline.step(data, self._loss_of_step(cell))
            return
        if cell.entry == "stream":
            items = ((item.index, item.outputs) for item in self.pipeline.stream(data))
        else:
            items = ((number, output) for number, output in enumerate(self.pipeline.forward(data)))
        for number, output in items:
            if number == AT and strays:
                if cell.fault == "leave":
                    return
                raise Boom("in loss")
            loss_of(output, number).backward()

    def _loss_of_step(self, cell: Cell) -> Callable[[Any, int], torch.Tensor]:
        def loss(output: Any, number: int) -> torch.Tensor:
            if cell.fault == "loss" and number == AT:
                raise Boom("in loss")
            return loss_of(output, number)

        return loss


def judge_broken(cell: Cell, ranks: list[Broken]) -> None:
    """Every rank has raised soon, with the right names in it."""
    where = f"{cell}: {ranks}"
    assert max(each.seconds for each in ranks) < LIMIT, where
    own, others = ranks[cell.rank], [each for rank, each in enumerate(ranks) if rank != cell.rank]
    if cell.in_callers_code:
        assert [error for error in own.errors if error == "Boom: in loss"] == own.errors[:-1], where
        for each in ranks:
            _judge_stray(cell, each.errors[-1], where)
        return
    assert len(own.errors) == 1 and re.match(cell.cause, own.errors[0]), where
    if cell.fault != "plan":
        assert any(re.search(f"while rank {cell.rank} performed {cell.doing}", note) for note in own.notes), where
    told = f"PeerFailedError: rank {cell.rank} failed while it performed {cell.doing}: {cell.cause}"
    for each in others:
        assert len(each.errors) == 1 and re.match(told, each.errors[0]), where
        assert any(f"traceback of rank {cell.rank}" in note for note in each.notes), where


def _judge_stray(cell: Cell, error: str, where: str) -> None:
    """Whoever waits finds out by himself; where nobody waits, all find out where they agree on the next call."""
    left = f"PeerFailedError: rank {cell.rank} failed while it performed the caller's code: it is in its next call, "
    differ = rf"UsageError: ranks disagree on the history of call \d+: rank \d has '{cell.entry}: .*{cell.entry}: "
    assert re.match(f"{left}flush, and has left|{differ}", error), where
