"""What two runs of the canary saw, held against each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import torch

import pipeline_engine as pe

from .canary import Plan, Seen
from .canary_host import commit_of_art

EXACT = 0.0
RELATIVE = 1e-6

TOLERANCES = {
    "outputs": EXACT,
    "loss": EXACT,
    "dp_reduce": EXACT,
    "model gradients": EXACT,
    "head gradients": EXACT,
    "gradient norm": RELATIVE,
    "parameters": RELATIVE,
    "head parameters": RELATIVE,
}


@attrs.frozen
class Check:
    """The largest difference that was found, and what is allowed."""

    difference: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the difference is within the tolerance; a difference that is not a number is not."""
        return self.difference <= self.tolerance


def compare(plan: Plan, pipelined: Sequence[Seen], reference: Sequence[Seen]) -> dict[str, Check]:
    """All checks by name.

    Args:
        plan: of the pipelined run.
        pipelined: what its ranks saw.
        reference: what the ranks of the run on one stage saw.
    """
    checks: dict[str, Check] = {}
    for step in range(plan.steps):
        for name, tolerance in TOLERANCES.items():
            difference = max(_difference(name, step, pipelined, expected) for expected in reference)
            checks[f"step {step + 1}: {name}"] = Check(difference, tolerance)
    checks["parameters of the ranks add up"] = Check(_misplaced(pipelined, reference), EXACT)
    checks["live activations over the schedule's"] = Check(_too_many(plan, pipelined), EXACT)
    return checks


def _difference(name: str, step: int, pipelined: Sequence[Seen], expected: Seen) -> float:
    """The largest difference between one rank of the reference and the stages that did its part.

    Outputs, losses and heads are on every stage and all are compared; model gradients and parameters are on one.
    """
    wanted = expected.steps[step][name]
    stages = [seen.steps[step][name] for seen in pipelined if seen.shard == expected.shard]
    found = {key for values in stages for key in values}
    if found != wanted.keys():
        return math.inf
    if name not in ("model gradients", "parameters") and any(values.keys() != wanted.keys() for values in stages):
        return math.inf
    return max((_apart(values[key], wanted[key]) for values in stages for key in values), default=math.inf)


def _apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest absolute difference; relative to the largest element where that is above 1."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return math.inf
    if torch.equal(found, wanted):
        return 0.0
    scale = max(1.0, float(wanted.double().abs().max()))
    return float((found.double() - wanted.double()).abs().max()) / scale


def _misplaced(pipelined: Sequence[Seen], reference: Sequence[Seen]) -> float:
    """Elements of parameters that no stage holds, or that a second one holds as well."""
    wrong = 0
    for expected in reference:
        held = [name for seen in pipelined if seen.shard == expected.shard for name in seen.weights]
        wrong += sum(size * abs(held.count(name) - 1) for name, size in expected.weights.items())
        wrong += sum(name not in expected.weights for name in held)
    return float(wrong)


def _too_many(plan: Plan, pipelined: Sequence[Seen]) -> float:
    """By how many the live decoder graphs of any rank exceeded those of its schedule when windows run ahead freely."""
    excess = 0
    for seen in pipelined:
        schedule = pe.in_waves(plan.schedule_that_runs, plan.graph, [1] * seen.num_windows)
        allowed = pe.simulate(schedule, pe.Costs()).peak_in_flight[seen.stage]
        excess = max(excess, seen.peak_in_flight - allowed)
    return float(excess)


def as_data(plan: Plan, pipelined: Sequence[Seen], seconds: float, checks: dict[str, Check]) -> dict[str, Any]:
    """The result as plain data, for ``--json``."""
    channels: dict[str, int] = {}
    for seen in pipelined:
        for channel, size in seen.bytes_per_channel.items():
            channels[channel] = channels.get(channel, 0) + size
    return {
        "host": plan.host,
        **({"commit": commit_of_art()} if plan.host == "art" else {}),
        "pp": plan.pp,
        "dp": plan.dp,
        "tp": plan.tp,
        "cp": plan.cp,
        "virtual": plan.virtual,
        "schedule": plan.schedule_that_runs,
        "steps": plan.steps,
        "seconds": seconds,
        "parameters_per_rank": [sum(seen.weights.values()) for seen in pipelined],
        "bytes_per_channel": channels,
        "peak_in_flight": [seen.peak_in_flight for seen in pipelined],
        "checks": {name: {**attrs.asdict(check), "ok": check.ok} for name, check in checks.items()},
        "ok": all(check.ok for check in checks.values()),
    }


def as_table(checks: dict[str, Check]) -> str:
    """One line a check."""
    width = max(len(name) for name in checks)
    lines = [f"{'check'.ljust(width)}   difference   tolerance"]
    for name, check in checks.items():
        verdict = "ok" if check.ok else "FAILED"
        lines.append(f"{name.ljust(width)}   {check.difference:10.3g}   {check.tolerance:9.3g}   {verdict}")
    return "\n".join(lines)
