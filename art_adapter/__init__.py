"""TrainerRank's public surface; names are resolved when they are first used, so importing this costs nothing."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .compat import UnsupportedHostError as UnsupportedHostError
    from .reference import ReferenceTrainerRank as ReferenceTrainerRank
    from .requests import AdamParams as AdamParams
    from .requests import ForwardInput as ForwardInput
    from .requests import ForwardOutput as ForwardOutput
    from .requests import MicroBatch as MicroBatch
    from .requests import MicroBatchStats as MicroBatchStats
    from .requests import TopK as TopK
    from .requests import TrainerRankMemoryError as TrainerRankMemoryError
    from .requests import TrainerRankSlotStateError as TrainerRankSlotStateError
    from .requests import Unset as Unset
    from .runtime import Runtime as Runtime
    from .stages import Group as Group
    from .stages import StageExecutor as StageExecutor
    from .topology import SUPPORT as SUPPORT
    from .topology import UnsupportedTopologyError as UnsupportedTopologyError
    from .trainer import TrainerRank as TrainerRank

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


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
