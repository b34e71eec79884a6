"""What a caller does with a trainer and what he sees, so that it can be compared between one stage and several."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import pytest
import torch

from art_adapter.compat import slot_parameters_by_name
from art_adapter.tiny_gpt import Cut, licence_text

from .hosts import Host, host

TOLERANCE = 1e-6
SMALL = 1_000_000
"""Bytes of memory in which a window holds one to three items."""
Body = Callable[["Play"], None]


@attrs.define(eq=False)
class Seen:
    """What one rank saw in one body.

    Attributes:
        exact: the same on every stage, to the last bit.
        close: the same on every stage, within a relative ``TOLERANCE``.
        here: tensors that live on one stage; all stages together hold what one process holds, to the last bit.
        here_close: the same within a relative ``TOLERANCE``.
        failed: the traceback of a body that raised.
        skipped: what the host does not have, so that the body was not played.
    """

    exact: dict[str, Any] = attrs.field(factory=dict)
    close: dict[str, Any] = attrs.field(factory=dict)
    here: dict[str, torch.Tensor] = attrs.field(factory=dict)
    here_close: dict[str, torch.Tensor] = attrs.field(factory=dict)
    failed: str = ""
    skipped: str = ""


class NotHere(Exception):
    """The host does not have what a body is about."""


class Play:
    """A caller with a trainer of his own, two trainable slots A and B, and A selected."""

    def __init__(self, own: Host, runtime: Any) -> None:
        self.host = own
        self.seen = Seen()
        self.take_up(own.trainer(runtime))

    def take_up(self, trainer: Any) -> None:
        """Another trainer in the place of the one that he has."""
        self.trainer = trainer
        self.sites = self.host.load(trainer, "A", 1) + self.host.load(trainer, "B", 2)
        trainer.set_checkpoint("A")

    # ---- what he asks for

    def request(self, number: int, *, length: int = 0, **wanted: Any) -> Any:
        """A sequence of the licence's text, each byte's target being the next, and what is wanted of it."""
        length = length or 7 + (number * 5) % 11
        start = 300 + 97 * number
        text = torch.tensor(list(licence_text()[start : start + length + 1]), dtype=torch.long)
        return self.host.records.ForwardInput(**{"input_tokens": text[:-1], "target_tokens": text[1:], **wanted})

    def requests(self, count: int, **wanted: Any) -> list[Any]:
        return [self.request(number, **wanted) for number in range(count)]

    def step(self, *, learning_rate: float = 1e-2, **options: Any) -> dict[str, float]:
        result: dict[str, float] = self.trainer.optim_step(
            params=self.host.records.AdamParams(learning_rate=learning_rate), **options
        )
        return result

    def windows(self, inputs: Any) -> Iterator[Any]:
        """``forward_micro_batches``, in several windows."""
        if self.host.name != "reference":  # the others have windows of one item on a CPU
            return iter(self.trainer.forward_micro_batches(inputs))
        return self._small_windows(inputs)

    def _small_windows(self, inputs: Any) -> Iterator[Any]:
        own = self.trainer.memory_budget_bytes
        self.trainer.memory_budget_bytes = SMALL
        try:
            yield from self.trainer.forward_micro_batches(inputs)
        finally:
            self.trainer.memory_budget_bytes = own

    # ---- what he sees

    def note(self, name: str, value: Any) -> None:
        """Something that is to be the same to the last bit."""
        self.seen.exact[name] = _plain(value)

    def note_close(self, name: str, value: Any) -> None:
        self.seen.close[name] = _plain(value)

    def note_outputs(self, name: str, outputs: Any) -> None:
        self.note(name, _outputs(outputs))

    def note_gradients(self, name: str = "gradients") -> None:
        """The LoRA gradients of this stage."""
        for key, parameter in slot_parameters_by_name(self.trainer):
            self.seen.here[f"{name}: {key}"] = _grad(parameter)

    def note_parameters(self, name: str = "parameters") -> None:
        for key, parameter in slot_parameters_by_name(self.trainer):
            self.seen.here_close[f"{name}: {key}"] = parameter.detach().clone()

    def note_error(self, name: str, function: Callable[[], Any]) -> None:
        """The type of what the trainer raised, or that it did not."""
        try:
            function()
        except Exception as error:
            self.note(name, type(error).__name__)
        else:
            self.note(name, "nothing was raised")

    def loss(self, outputs: Any) -> torch.Tensor:
        """A loss that reaches every tensor of nested outputs."""
        return torch.stack([_loss(output) for output in flat(outputs)]).sum()


def flat(outputs: Any) -> Iterator[Any]:
    """The outputs of a nested result in source order."""
    if isinstance(outputs, (list, tuple)):
        for each in outputs:
            yield from flat(each)
    else:
        yield outputs


def _loss(output: Any) -> torch.Tensor:
    total = torch.zeros(())
    for tensor in (output.target_logprobs, output.logits, output.hidden_states):
        if tensor is not None and tensor.requires_grad:
            total = total + (tensor.float() * torch.linspace(1.0, 0.5, tensor.shape[-1])).square().mean()
    if output.top_k is not None and output.top_k.logprobs.requires_grad:
        total = total + output.top_k.logprobs[:, 0].square().mean()
    return total


def _outputs(outputs: Any) -> Any:
    if isinstance(outputs, (list, tuple)):
        return [_outputs(each) for each in outputs]
    best = outputs.top_k
    tensors = {
        "target_logprobs": outputs.target_logprobs,
        "top_k.logprobs": None if best is None else best.logprobs,
        "top_k.tokens": None if best is None else best.tokens,
        "logits": outputs.logits,
        "hidden_states": outputs.hidden_states,
    }
    told = {name: (None if t is None else (t.detach().clone(), t.requires_grad)) for name, t in tensors.items()}
    return {**told, "checkpoint": getattr(outputs, "checkpoint", None), "no_grad": getattr(outputs, "no_grad", None)}


def _grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    return torch.full((), math.nan) if parameter.grad is None else parameter.grad.clone()


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def play(
    rank: int, names: Sequence[str], cut: Cut, bodies: Mapping[str, Body], **options: Any
) -> dict[str, dict[str, Seen]]:
    """On one rank: every body over every host; what was seen, by host and body."""
    seen: dict[str, dict[str, Seen]] = {}
    runtime: Any = None
    for name in names:
        own = host(name)
        runtime = runtime or own.build(cut, **options)
        seen[name] = {body: play_one(own, runtime, function) for body, function in bodies.items()}
    return seen


def play_one(own: Host, runtime: Any, body: Body) -> Seen:
    """One body with a fresh trainer."""
    caller = Play(own, runtime)
    try:
        body(caller)
    except NotHere as missing:
        caller.seen.skipped = str(missing)
    except Exception:
        caller.seen.failed = traceback.format_exc()
    finally:
        caller.trainer.zero_grad()
        close(caller.trainer)
    return caller.seen


def close(trainer: Any) -> None:
    """Leave the pipeline, if there is one."""
    if hasattr(trainer, "close"):
        trainer.close()


# ---- comparison


def difference(one: Seen, stages: Sequence[Seen]) -> str:
    """The first thing in which what the stages saw differs from what one process saw; empty if there is none.

    Raises:
        pytest.skip.Exception: the host does not have what the body is about.
    """
    if one.skipped:
        pytest.skip(one.skipped)
    for where, seen in (("one process", one), *((f"stage {number}", stage) for number, stage in enumerate(stages))):
        if seen.failed:
            return f"{where} failed:\n{seen.failed}"
    for number, stage in enumerate(stages):
        for tolerance, found, wanted in ((0.0, stage.exact, one.exact), (TOLERANCE, stage.close, one.close)):
            if why := unlike(found, wanted, tolerance):
                return f"stage {number}: {why}"
    for tolerance, field in ((0.0, "here"), (TOLERANCE, "here_close")):
        if why := _apart([getattr(stage, field) for stage in stages], getattr(one, field), tolerance):
            return why
    return ""


def close_only(seen: Seen) -> Seen:
    """What was to be the same to the last bit: cut rows are multiplied in other shapes, and added up in parts."""
    return Seen(close={**seen.exact, **seen.close}, here_close={**seen.here, **seen.here_close}, failed=seen.failed)


def _apart(stages: Sequence[dict[str, Any]], whole: dict[str, Any], tolerance: float) -> str:
    held = [name for stage in stages for name in stage]
    if sorted(held) != sorted(whole):
        return f"the stages hold {sorted(set(held) ^ set(whole)) or 'something twice'}"
    together = {name: value for stage in stages for name, value in stage.items()}
    return unlike(together, whole, tolerance)


def unlike(found: Any, wanted: Any, tolerance: float, where: str = "") -> str:
    """Where and how two nested values differ."""
    if isinstance(wanted, dict) and isinstance(found, dict) and found.keys() == wanted.keys():
        pairs = [(found[key], wanted[key], f"{where}/{key}") for key in wanted]
        return next((why for a, b, path in pairs if (why := unlike(a, b, tolerance, path))), "")
    if isinstance(wanted, (list, tuple)) and isinstance(found, (list, tuple)) and len(found) == len(wanted):
        pairs = [(a, b, f"{where}/{place}") for place, (a, b) in enumerate(zip(found, wanted, strict=True))]
        return next((why for a, b, path in pairs if (why := unlike(a, b, tolerance, path))), "")
    if isinstance(wanted, torch.Tensor) and isinstance(found, torch.Tensor):
        return _tensors_unlike(found, wanted, tolerance, where)
    if isinstance(wanted, float) and isinstance(found, float):
        both_nan = math.isnan(found) and math.isnan(wanted)
        same = found == wanted or both_nan or math.isclose(found, wanted, rel_tol=tolerance)
        return "" if same else f"{where}: {found} instead of {wanted}"
    return "" if found == wanted else f"{where}: {found!r} instead of {wanted!r}"


def _tensors_unlike(found: torch.Tensor, wanted: torch.Tensor, tolerance: float, where: str) -> str:
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        return f"{where}: {found.shape} {found.dtype} instead of {wanted.shape} {wanted.dtype}"
    if torch.equal(found, wanted) or torch.allclose(found, wanted, rtol=0.0, atol=0.0, equal_nan=True):
        return ""
    scale = max(1.0, float(wanted.double().abs().max()))
    apart = float((found.double() - wanted.double()).abs().max()) / scale
    return "" if apart <= tolerance else f"{where}: {apart:.3g} apart, {tolerance} is allowed"
