"""ART's own TrainerRank on a CPU: stand-ins for what it imports and such a machine cannot have.

Nothing of ART is in here. Its tree is read where ``ART_SRC`` points (the folder that holds ``art/``); planner, packing,
LoRA slots, head and optimizer step are its own code.

    namespace.py   ``art`` without its front page, which imports half of the world; its 3.12 syntax on Python 3.11
    modules.py     triton, quack, Megatron-Bridge, Transformer Engine's linear layers, parts of art.megatron.train
    attention.py   the prefix tree's mask as dense attention
    runtime.py     a small dense GPT with ART's LoRA wrapped around it, whole or one stage of it
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from . import modules, namespace

NEEDED = ("megatron.core", "pydantic", "openai", "numpy")
"""What ART imports on a CPU too."""


def install() -> None:
    """Make ``art.trainer_rank`` and what it needs importable in this process; to be called before Megatron is used.

    Raises:
        ImportError: a package of ``NEEDED`` is missing.
    """
    source = Path(os.environ["ART_SRC"])
    namespace.install(source)
    modules.install(source)


def why_not() -> str | None:
    """Why nothing can be run over ART's own class here, or None if it can."""
    if "ART_SRC" not in os.environ:
        return "ART_SRC is not set: nothing is run over ART's own TrainerRank"
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    return f"ART needs {', '.join(missing)}, which the test extra does not install" if missing else None
