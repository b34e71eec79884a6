"""TrainerRank's public surface; names are resolved when they are first used, so importing this costs nothing."""

from __future__ import annotations

import importlib

_HOME = {
    "AdamParams": "requests",
    "ForwardInput": "requests",
    "ForwardOutput": "requests",
    "Group": "stages",
    "MicroBatch": "requests",
    "MicroBatchStats": "requests",
    "ReferenceTrainerRank": "reference",
    "Runtime": "runtime",
    "SUPPORT": "topology",
    "StageExecutor": "stages",
    "TopK": "requests",
    "TrainerRank": "trainer",
    "TrainerRankMemoryError": "requests",
    "TrainerRankSlotStateError": "requests",
    "Unset": "requests",
    "UnsupportedHostError": "compat",
    "UnsupportedTopologyError": "topology",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
