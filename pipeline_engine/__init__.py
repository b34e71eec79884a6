"""Pipeline parallelism in which the caller owns the loss.

Public names are resolved when they are first used: importing this package, or its ``plan`` half, imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline_engine.errors import DeadlineError as DeadlineError
    from pipeline_engine.errors import PeerFailedError as PeerFailedError
    from pipeline_engine.errors import PipelineError as PipelineError
    from pipeline_engine.errors import ScheduleError as ScheduleError
    from pipeline_engine.errors import TransportError as TransportError
    from pipeline_engine.errors import UsageError as UsageError
    from pipeline_engine.plan.advance import lower as lower
    from pipeline_engine.plan.check import check as check
    from pipeline_engine.plan.graph import StageGraph as StageGraph
    from pipeline_engine.plan.schedule import Schedule as Schedule
    from pipeline_engine.plan.schedules import SCHEDULES as SCHEDULES
    from pipeline_engine.plan.schedules import build as build
    from pipeline_engine.plan.simulate import Costs as Costs
    from pipeline_engine.plan.simulate import Timeline as Timeline
    from pipeline_engine.plan.simulate import simulate as simulate
    from pipeline_engine.run.bridge import Pipeline as Pipeline
    from pipeline_engine.run.bridge import Yielded as Yielded
    from pipeline_engine.run.microbatch import Microbatch as Microbatch
    from pipeline_engine.run.transports.memory import MemoryTransport as MemoryTransport
    from pipeline_engine.run.transports.torch_distributed import TorchTransport as TorchTransport

_HOMES = {
    "DeadlineError": "errors",
    "PeerFailedError": "errors",
    "PipelineError": "errors",
    "ScheduleError": "errors",
    "TransportError": "errors",
    "UsageError": "errors",
    "lower": "plan.advance",
    "check": "plan.check",
    "StageGraph": "plan.graph",
    "Schedule": "plan.schedule",
    "SCHEDULES": "plan.schedules",
    "build": "plan.schedules",
    "Costs": "plan.simulate",
    "Timeline": "plan.simulate",
    "simulate": "plan.simulate",
    "Pipeline": "run.bridge",
    "Yielded": "run.bridge",
    "Microbatch": "run.microbatch",
    "MemoryTransport": "run.transports.memory",
    "TorchTransport": "run.transports.torch_distributed",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
