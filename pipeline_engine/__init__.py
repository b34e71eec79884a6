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
    from pipeline_engine.plan.check import check_computing as check_computing
    from pipeline_engine.plan.choose import Choice as Choice
    from pipeline_engine.plan.choose import best_schedule as best_schedule
    from pipeline_engine.plan.files import as_csv as as_csv
    from pipeline_engine.plan.files import as_json as as_json
    from pipeline_engine.plan.files import from_json as from_json
    from pipeline_engine.plan.graph import StageGraph as StageGraph
    from pipeline_engine.plan.limit import limit as limit
    from pipeline_engine.plan.order import plan_order as plan_order
    from pipeline_engine.plan.partition import split as split
    from pipeline_engine.plan.render.perfetto import as_perfetto as as_perfetto
    from pipeline_engine.plan.render.svg import as_svg as as_svg
    from pipeline_engine.plan.render.text import as_text as as_text
    from pipeline_engine.plan.report import Report as Report
    from pipeline_engine.plan.report import report as report
    from pipeline_engine.plan.schedule import Schedule as Schedule
    from pipeline_engine.plan.schedules import SCHEDULES as SCHEDULES
    from pipeline_engine.plan.schedules import build as build
    from pipeline_engine.plan.schedules import generate as generate
    from pipeline_engine.plan.simulate import Costs as Costs
    from pipeline_engine.plan.simulate import Timeline as Timeline
    from pipeline_engine.plan.simulate import simulate as simulate
    from pipeline_engine.plan.trace import Trace as Trace
    from pipeline_engine.plan.waves import in_waves as in_waves
    from pipeline_engine.run.bridge import Pipeline as Pipeline
    from pipeline_engine.run.microbatch import Microbatch as Microbatch
    from pipeline_engine.run.products import splits_backward as splits_backward
    from pipeline_engine.run.ties import tie as tie
    from pipeline_engine.run.tracing import Tracer as Tracer
    from pipeline_engine.run.transports.memory import MemoryTransport as MemoryTransport
    from pipeline_engine.run.transports.torch_distributed import TorchTransport as TorchTransport
    from pipeline_engine.run.yielded import Yielded as Yielded

_HOMES = {
    "DeadlineError": "errors",
    "PeerFailedError": "errors",
    "PipelineError": "errors",
    "ScheduleError": "errors",
    "TransportError": "errors",
    "UsageError": "errors",
    "lower": "plan.advance",
    "check": "plan.check",
    "check_computing": "plan.check",
    "best_schedule": "plan.choose",
    "Choice": "plan.choose",
    "as_csv": "plan.files",
    "as_json": "plan.files",
    "from_json": "plan.files",
    "StageGraph": "plan.graph",
    "limit": "plan.limit",
    "plan_order": "plan.order",
    "as_perfetto": "plan.render.perfetto",
    "as_svg": "plan.render.svg",
    "as_text": "plan.render.text",
    "Report": "plan.report",
    "report": "plan.report",
    "split": "plan.partition",
    "Schedule": "plan.schedule",
    "build": "plan.schedules",
    "generate": "plan.schedules",
    "SCHEDULES": "plan.schedules",
    "Costs": "plan.simulate",
    "simulate": "plan.simulate",
    "Timeline": "plan.simulate",
    "Trace": "plan.trace",
    "in_waves": "plan.waves",
    "Pipeline": "run.bridge",
    "Yielded": "run.yielded",
    "Microbatch": "run.microbatch",
    "splits_backward": "run.products",
    "tie": "run.ties",
    "Tracer": "run.tracing",
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
