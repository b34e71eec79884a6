"""Buffers: what a stage's forwards change in it (running statistics, counters) counts once per microbatch yielded.

Forwards run ahead of the caller, and what ran ahead may be dropped.  Until a microbatch is yielded, the values that the
buffers had before its forward are kept; if it is dropped, they are put back.

Note [which buffers are followed]: those that ``stage.modules()`` names when the pipeline is built, if the stage is a
``torch.nn.Module``.  The first forward in training mode, and the first in evaluation mode, are looked at whole: batch
normalisation changes its statistics behind the back of their version counters.  From then on a module's buffers are
copied before each forward only if one has been seen to change.

Not undone is what ran before the caller changed the buffers himself (nobody could tell his part from it; a backward
that recomputes a forward counts as such a change), or before a forward of another call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from attrs import define, field, frozen
from torch import nn
from torch.nn.parameter import is_lazy

from pipeline_engine.run.stage import StageFunction

Key = tuple[int, int]
"""Number of a call, and a microbatch of it."""


@frozen(eq=False)
class _Value:
    """A buffer's tensor and a copy of what stood in it; both None where there was no tensor."""

    tensor: torch.Tensor | None
    copy: torch.Tensor | None

    @classmethod
    def of(cls, tensor: torch.Tensor | None) -> _Value:
        return cls(tensor, None if tensor is None or is_lazy(tensor) else tensor.detach().clone())

    def stands_in(self, tensor: torch.Tensor | None) -> bool:
        if tensor is not self.tensor or tensor is None:
            return tensor is self.tensor
        return self.copy is not None and torch.equal(tensor, self.copy)

    def put_back(self) -> torch.Tensor | None:
        """The tensor with its old values; its version stays, for graphs that saved it are as good as before."""
        if self.tensor is not None and self.copy is not None:
            self.tensor.data.copy_(self.copy)
        return self.tensor


_Values = Mapping[str, _Value]


@define(eq=False)
class _Module:
    """One module's own buffers."""

    _module: nn.Module
    _changes: dict[bool, bool] = field(init=False, factory=dict)  # by training mode, whether a forward changes them
    _mark: object = field(init=False, default=None)  # of the tensors after the last forward

    def before(self) -> _Values | None:
        """Copies of all buffers, unless forwards do not change them; see Note [which buffers are followed]."""
        self._mark = self._mark_now()
        if self._changes.get(self._module.training, True):
            return {name: _Value.of(tensor) for name, tensor in self._module._buffers.items()}
        return None

    def after(self, values: _Values | None) -> None:
        """A forward has run, from ``values`` on."""
        mark, training = self._mark_now(), self._module.training
        if not self._changes.get(training, False):
            self._changes[training] = mark != self._mark or (values is not None and not self._stand(values))
        self._mark = mark

    @property
    def is_as_left(self) -> bool:
        """Whether nobody else has changed a buffer since the last forward."""
        return self._mark == self._mark_now()

    def put_back(self, values: _Values) -> None:
        """Undo all forwards that came after ``values`` were taken."""
        self._module._buffers.update({name: value.put_back() for name, value in values.items()})
        self._mark = self._mark_now()

    def _stand(self, values: _Values) -> bool:
        return all(value.stands_in(self._module._buffers.get(name)) for name, value in values.items())

    def _mark_now(self) -> object:
        return [(name, id(tensor), _version(tensor)) for name, tensor in self._module._buffers.items()]


@define(eq=False)
class _Run:
    """A forward that was run: what it may be undone with, until its microbatch is yielded."""

    key: Key
    before: dict[_Module, _Values]
    counts: bool = False


@define(eq=False)
class Buffers:
    """The buffers of one stage, over all calls of a pipeline."""

    _modules: list[_Module]
    _runs: deque[_Run] = field(init=False, factory=deque)  # in the order in which they were run

    @contextmanager
    def followed(self, call: int, microbatch: int) -> Iterator[None]:
        """Around a forward."""
        self._respect_the_caller()
        values = {module: module.before() for module in self._modules}
        before = {module: copies for module, copies in values.items() if copies is not None}
        self._runs.append(_Run((call, microbatch), before))
        try:
            yield
        finally:
            for module, copies in values.items():
                module.after(copies)

    def count(self, call: int, microbatch: int) -> None:
        """The microbatch was yielded: what its forward changed stays."""
        self._settle((call, microbatch))

    def put_back(self, call: int) -> None:
        """Undo the forwards of a call that were not yielded; those that another call's came after stay."""
        self._respect_the_caller()
        while self._runs and self._runs[-1].key[0] == call and not self._runs[-1].counts:
            for module, values in self._runs.pop().before.items():
                module.put_back(values)
        for run in list(self._runs):
            if run.key[0] == call:
                self._settle(run.key)

    def _respect_the_caller(self) -> None:
        """Where he has changed buffers himself, nothing from before can be put back."""
        for module in [module for module in self._modules if not module.is_as_left]:
            for run in self._runs:
                run.before.pop(module, None)

    def _settle(self, key: Key) -> None:
        for run in self._runs:
            if run.key == key:
                run.counts = True
                run.before.clear()
        while self._runs and self._runs[0].counts:
            self._runs.popleft()


def buffers_of(stages: Mapping[int, StageFunction]) -> dict[int, Buffers]:
    """By number, the buffers of those stages that have any."""
    modules = {
        number: [_Module(module) for module in stage.modules() if module._buffers]
        for number, stage in stages.items()
        if isinstance(stage, nn.Module)
    }
    return {number: Buffers(each) for number, each in modules.items() if each}


def _version(tensor: torch.Tensor | None) -> int:
    return -1 if tensor is None or tensor.is_inference() else tensor._version
