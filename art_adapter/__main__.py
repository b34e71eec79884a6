"""python -m art_adapter canary: does a model cut over processes train as it does in one?"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from pathlib import Path

from .progress import progress


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit status."""
    options = _parser().parse_args(arguments)
    try:
        return _canary(options)
    except KeyboardInterrupt:
        print("canary: stopped", file=sys.stderr)
        return 130  # as a shell has it


def _canary(options: argparse.Namespace) -> int:
    """Train over the pipeline and on one stage, and say how they compare; ``--json -`` has stdout for itself."""
    only_data = options.json == Path("-")
    words = sys.stderr if only_data else sys.stdout
    _silence_megatron()
    from .canary import Plan, check_plan, run
    from .comparison import as_data, as_table, compare
    from .topology import UnsupportedTopologyError

    plan = Plan(**{size: getattr(options, size) for size in ("pp", "dp", "tp", "cp", "virtual", "schedule", "steps")})
    try:
        check_plan(plan)
    except (ValueError, UnsupportedTopologyError) as error:
        print(f"canary: {error}", file=sys.stderr)
        return 2
    cut = f"pp={plan.pp} dp={plan.dp} tp={plan.tp} cp={plan.cp} virtual={plan.virtual}"
    sizes = f"{cut}, schedule {plan.schedule_that_runs}, {plan.steps} steps"
    started = time.perf_counter()
    found = []
    for each, what in ((plan, f" over {plan.host}: {sizes}"), (plan.on_one_stage(), ": the same on one stage")):
        print(f"{each.ranks} process{'es' if each.ranks > 1 else ''}{what}", file=words, flush=True)
        with progress("optimizer steps", plan.steps, silent=only_data) as step:
            found.append(run(each, step))
    checks = compare(plan, *found)
    result = as_data(plan, found[0], time.perf_counter() - started, checks)
    print(as_table(checks), file=words)
    print(f"{'all hold' if result['ok'] else 'SOME DO NOT HOLD'}, {result['seconds']:.1f} s", file=words)
    if options.json is not None:
        data = json.dumps(result, indent=2) + "\n"
        sys.stdout.write(data) if only_data else options.json.write_text(data)
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
    canary.add_argument("--tp", type=_at_least_one, default=1, help="tensor- and sequence-parallel ranks (default 1)")
    canary.add_argument("--cp", type=_at_least_one, default=1, help="context-parallel ranks (default 1)")
    canary.add_argument("--virtual", type=_at_least_one, default=1, help="model chunks per rank (default 1)")
    canary.add_argument("--schedule", help="name of the pipeline schedule (default: what fits the stages)")
    canary.add_argument("--steps", type=_at_least_one, default=3, help="optimizer steps (default 3)")
    canary.add_argument("--json", type=Path, metavar="FILE", help="write the result as data; - is stdout")
    return parser


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
