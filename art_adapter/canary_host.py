"""What the canary trains with: the reference, or with ``ART_SRC`` ART's own class from the tree that it points to."""

from __future__ import annotations

import importlib
import os
import subprocess
from collections.abc import Callable
from types import ModuleType
from typing import Any

import attrs
import torch

from .tiny_gpt import Cut

ON_CPU = "tests.adapter.art_on_cpu.runtime"
"""Stand-ins for what ART imports and a CPU cannot have; part of a checkout, not of the installed package."""


@attrs.frozen
class CanaryHost:
    """A trainer's class and what its caller needs.

    Attributes:
        name: ``reference`` or ``art``.
        records: the module with its ForwardInput and AdamParams.
        build: this rank's runtime for a cut of the model.
        adapter: full LoRA weights for a configuration.
        load_options, trainer_options: further arguments of ``load_checkpoint_slot`` and of the trainer.
    """

    name: str
    records: ModuleType
    build: Callable[[Cut], Any]
    adapter: Callable[[Any], dict[str, torch.Tensor]]
    load_options: dict[str, Any]
    trainer_options: dict[str, Any]

    def request(self, like: Any, **wanted: Any) -> Any:
        """A sequence as this host wants it."""
        tokens = {"input_tokens": like.input_tokens, "target_tokens": like.target_tokens}
        return self.records.ForwardInput(**tokens, **wanted)


def host_name() -> str:
    """Which host the environment asks for."""
    return "art" if os.environ.get("ART_SRC") else "reference"


def commit_of_art() -> str | None:
    """The commit of the tree that ``ART_SRC`` points to; None if it is no checkout."""
    git = ["git", "-C", os.environ["ART_SRC"], "rev-parse", "HEAD"]
    try:
        found = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def canary_host(*, memory_budget_bytes: int) -> CanaryHost:
    """The host, in the process that is to train with it.

    Raises:
        ImportError: ``ART_SRC`` is set, but this is not run from a checkout, or ART needs a package that is missing.
    """
    if host_name() == "art":
        return _art()
    from . import requests, tiny_gpt

    return CanaryHost(
        name="reference",
        records=requests,
        build=lambda cut: tiny_gpt.build_runtime(cut=cut),
        adapter=tiny_gpt.adapter,
        load_options={},
        trainer_options={"memory_budget_bytes": memory_budget_bytes},
    )


def _art() -> CanaryHost:
    from .compat import art_trainer_rank

    try:
        stand_ins = importlib.import_module(ON_CPU)
    except ModuleNotFoundError as error:
        raise ImportError(f"with ART_SRC the canary needs {ON_CPU}: run it in a checkout of this repository") from error
    importlib.import_module(ON_CPU.rpartition(".")[0]).install()
    art_trainer_rank()
    return CanaryHost(
        name="art",
        records=importlib.import_module("art.trainer_rank"),
        build=stand_ins.build_runtime,
        adapter=stand_ins.adapter,
        load_options={"adapter_config": stand_ins.adapter_config(alpha=8.0)},
        trainer_options={},
    )
