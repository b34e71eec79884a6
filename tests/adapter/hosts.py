"""The trainers that the adapter is tried over, each with the records and adapters that its caller needs."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import attrs
import torch

from art_adapter import TrainerRank, tiny_gpt
from art_adapter.reference import ReferenceTrainerRank
from art_adapter.tiny_gpt import Cut, Shape

OWN = ("reference", "july", "september", "graph_cache")
"""Hosts that need nothing but this repository."""
ALPHA = 8.0
WHOLE = 1 << 30
"""Tokens of a microbatch that no window has."""


@attrs.frozen
class Host:
    """One trainer's class.

    Attributes:
        name: ``reference``, a miniature, or ``art``.
        records: the module with its ForwardInput, AdamParams and errors.
        trainer_class: the trainer's own class.
        build: this rank's runtime for a cut of the model.
        adapter: ``adapter(provider, r=, seed=)`` makes full LoRA weights.
        load_options: further arguments of ``load_checkpoint_slot``.
    """

    name: str
    records: Any
    trainer_class: type
    build: Callable[..., Any]
    adapter: Callable[..., dict[str, torch.Tensor]]
    load_options: dict[str, Any]

    @property
    def is_art(self) -> bool:
        """Whether this is ART's own class and not one of ours."""
        return self.name == "art"

    @property
    def trains_base_weights(self) -> bool:
        """Whether the class knows ``base_model=True``."""
        return "base_model" in inspect.signature(self.trainer_class).parameters

    def trainer(self, runtime: Any, **options: Any) -> Any:
        """A trainer over this rank's runtime, which leaves every window whole: what one stage computes, bit for bit.

        Args:
            runtime: of this rank.
            options: of the trainer's own class.
        """
        return TrainerRank(runtime, host=self.trainer_class, deadline=30.0, microbatch_tokens=WHOLE, **options)

    def load(self, trainer: Any, name: str, seed: int, *, r: int = 4) -> int:
        """Load a trainable slot."""
        options = dict(self.load_options)
        if self.is_art:
            options["adapter_config"] = {**options["adapter_config"], "r": r}
        return int(
            trainer.load_checkpoint_slot(
                name, self.adapter(trainer.runtime.provider, seed=seed, r=r), alpha=ALPHA, **options
            )
        )


def host(name: str) -> Host:
    """The host of this name; ``art`` needs ``ART_SRC``."""
    if name == "art":
        return _art()
    module = importlib.import_module("art_adapter" if name == "reference" else f"tests.adapter.miniatures.{name}")
    trainer_class = ReferenceTrainerRank if name == "reference" else module.TrainerRank
    return Host(name, module, trainer_class, _build, tiny_gpt.adapter, {})


def _build(cut: Cut, *, shape: Shape | None = None) -> Any:
    return tiny_gpt.build_runtime(shape or Shape(), cut)


def _art() -> Host:
    from art_adapter.compat import art_trainer_rank

    from . import art_on_cpu
    from .art_on_cpu import runtime

    art_on_cpu.install()
    trainer_class = art_trainer_rank()
    records = importlib.import_module("art.trainer_rank")
    options = {"adapter_config": runtime.adapter_config(alpha=ALPHA)}
    return Host("art", records, trainer_class, runtime.build_runtime, runtime.adapter, options)
