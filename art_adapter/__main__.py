"""python -m art_adapter canary: does a model cut over processes train as it does in one?"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit status."""
    options = _parser().parse_args(arguments)
    _silence_megatron()
    from .canary import Plan, check_plan, run
    from .comparison import as_data, as_table, compare
    from .topology import UnsupportedTopologyError

    plan = Plan(
        pp=options.pp,
        dp=options.dp,
        tp=options.tp,
        cp=options.cp,
        virtual=options.virtual,
        schedule=options.schedule,
        steps=options.steps,
    )
    try:
        check_plan(plan)
    except (ValueError, UnsupportedTopologyError) as error:
        print(f"canary: {error}", file=sys.stderr)
        return 2
    started = time.perf_counter()
    cut = f"pp={plan.pp} dp={plan.dp} tp={plan.tp} cp={plan.cp} virtual={plan.virtual}"
    sizes = f"{cut}, schedule {plan.schedule_that_runs}, {plan.steps} steps"
    print(f"{plan.ranks} processes over {plan.host}: {sizes}", flush=True)
    pipelined = run(plan)
    print(f"{plan.on_one_stage().ranks} process(es): the same on one stage", flush=True)
    reference = run(plan.on_one_stage())
    checks = compare(plan, pipelined, reference)
    result = as_data(plan, pipelined, time.perf_counter() - started, checks)
    print(as_table(checks))
    print(f"{'all hold' if result['ok'] else 'SOME DO NOT HOLD'}, {result['seconds']:.1f} s")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if result["ok"] else 1


def _silence_megatron() -> None:
    """Megatron warns at length about libraries for GPUs that a laptop does not have."""
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning")  # of the processes that will be started
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m art_adapter", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    canary = commands.add_parser("canary", help="train a tiny GPT over a pipeline and on one stage, and compare")
    canary.add_argument("--pp", type=_at_least_one, default=2, help="pipeline stages (default 2)")
    canary.add_argument("--dp", type=_at_least_one, default=1, help="data-parallel ranks (default 1)")
    canary.add_argument("--tp", type=_at_least_one, default=1, help="tensor-parallel ranks (default 1)")
    canary.add_argument("--cp", type=_at_least_one, default=1, help="context-parallel ranks (default 1)")
    canary.add_argument("--virtual", type=_at_least_one, default=1, help="model chunks per rank (default 1)")
    canary.add_argument("--schedule", help="name of the pipeline schedule (default: what fits the stages)")
    canary.add_argument("--steps", type=_at_least_one, default=3, help="optimizer steps (default 3)")
    canary.add_argument("--json", type=Path, metavar="FILE", help="write the result as data")
    return parser


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
