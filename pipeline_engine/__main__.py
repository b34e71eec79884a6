"""The command line: show, check, simulate and compare schedules.  Needs no torch.

python -m pipeline_engine show 1f1b --ranks 4 --num-microbatches 8 --svg 1f1b.svg
python -m pipeline_engine check programs.csv
python -m pipeline_engine simulate 1f1b --ranks 4 --lengths 512,64,1024 --latency 0.05
python -m pipeline_engine compare --ranks 8 --num-microbatches 32
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pipeline_engine.errors import ScheduleError
from pipeline_engine.plan.check import check
from pipeline_engine.plan.files import as_csv, as_json, graph_of_csv
from pipeline_engine.plan.graph import Placement, StageGraph
from pipeline_engine.plan.limit import limit
from pipeline_engine.plan.order import in_order, plan_order, weighted, weights_of
from pipeline_engine.plan.render.perfetto import as_perfetto
from pipeline_engine.plan.render.svg import as_svg
from pipeline_engine.plan.render.text import as_text
from pipeline_engine.plan.schedule import Schedule
from pipeline_engine.plan.schedules import SCHEDULES, build
from pipeline_engine.plan.simulate import Costs, Timeline, simulate

_STAGES_A_RANK: dict[Placement, int] = {"straight": 1, "looped": 2, "vee": 2}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 if a schedule breaks a law, 2 if an argument is wrong."""
    parser = _parser()
    given = parser.parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = given.command
    try:
        return command(given)
    except (ScheduleError, OSError, UnicodeDecodeError) as error:
        parser.error(" ".join(str(error).split()))


def _show(given: argparse.Namespace) -> int:
    schedule = _built(given)
    if given.csv:
        given.csv.write_text(as_csv(schedule))
    return _present(given, schedule, simulate(schedule, Costs()), as_json(schedule))


def _simulate(given: argparse.Namespace) -> int:
    schedule, costs = _built(given), _costs(given)
    weights_of(costs, schedule.num_microbatches)
    order: tuple[int, ...] = ()
    if given.order == "planned":
        order = plan_order(schedule, costs)
        costs = in_order(costs, order)
    timeline = simulate(schedule, costs)
    facts = {**_facts(timeline), "order": list(order or range(schedule.num_microbatches))}
    return _present(given, schedule, timeline, json.dumps(facts), order)


def _check(given: argparse.Namespace) -> int:
    text = given.file.read_text()
    schedule = Schedule.from_csv(text, graph_of_csv(text), given.file.name)
    broken = ""
    try:
        check(schedule)
    except ScheduleError as error:
        broken = str(error)
    facts = {"lawful": not broken, "why": broken, "num_microbatches": schedule.num_microbatches}
    lawful = (
        f"{schedule.name} keeps all laws: {len(schedule.programs)} ranks, {schedule.num_microbatches} microbatches."
    )
    print(json.dumps(facts) if given.json else broken or lawful)
    return 1 if broken else 0


def _compare(given: argparse.Namespace) -> int:
    count = _num_microbatches(given)
    rows = [_row(given, name, count) for name in SCHEDULES]
    if given.json:
        print(json.dumps(rows))
        return 0
    print(f"{'schedule':<14}{'stages':>7}{'makespan':>12}{'bubble':>9}{'in flight':>11}")
    for row in rows:
        if "refused" in row:
            print(f"{row['schedule']:<14}  {row['refused']}")
        else:
            print(
                f"{row['schedule']:<14}{row['stages']:>7}{row['makespan']:>10.5g} s{row['bubble']:>9.1%}"
                f"{max(row['peak_in_flight']) * given.ranks / row['stages']:>11.4g}"
            )
    print("in flight: microbatches of a whole rank that the fullest one holds until their backward is done")
    return 0


def _row(given: argparse.Namespace, name: str, count: int) -> dict[str, Any]:
    try:
        schedule = _on_chain(name, given.ranks, count)
        facts = _facts(simulate(schedule, _costs(given, schedule.graph.num_stages // given.ranks)))
    except ScheduleError as error:
        return {"schedule": name, "refused": " ".join(str(error).split())}
    return {"schedule": name, "stages": schedule.graph.num_stages, **facts}


def _on_chain(name: str, ranks: int, num_microbatches: int, stages: int | None = None) -> Schedule:
    """The schedule on a chain of stages that lie as it wants them."""
    placement: Placement = SCHEDULES[name].placement if name in SCHEDULES else "straight"
    if stages is None:
        stages = ranks * _STAGES_A_RANK[placement]
    elif placement == "straight" and stages != ranks:
        placement = "looped"
    return build(name, StageGraph.chain(stages, ranks, placement), num_microbatches)


def _built(given: argparse.Namespace) -> Schedule:
    schedule = _on_chain(given.schedule, given.ranks, _num_microbatches(given), given.stages)
    return schedule if given.max_in_flight is None else limit(schedule, given.max_in_flight)


def _num_microbatches(given: argparse.Namespace) -> int:
    count: int | None = given.num_microbatches or len(getattr(given, "lengths", None) or ()) or None
    if count is None:
        raise ScheduleError("the number of microbatches is unknown: give --num-microbatches or --lengths.")
    return count


def _costs(given: argparse.Namespace, per_rank: int = 1) -> Costs:
    """What was asked for; with several stages a rank, their seconds together are those of a rank."""
    costs = Costs(
        forward=given.forward / per_rank,
        backward_input=given.backward_input / per_rank,
        backward_weight=given.backward_weight / per_rank,
        loss=given.loss,
        latency=given.latency,
    )
    lengths = given.lengths or ()
    mean = sum(lengths) / len(lengths) if lengths else 1.0
    return weighted(costs, [length / mean for length in lengths])


def _facts(timeline: Timeline) -> dict[str, Any]:
    return {
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "peak_in_flight": list(timeline.peak_in_flight),
    }


def _present(
    given: argparse.Namespace, schedule: Schedule, timeline: Timeline, as_data: str, order: Sequence[int] = ()
) -> int:
    if given.svg:
        given.svg.write_text(as_svg({schedule.name: timeline}, order))
    if given.trace:
        given.trace.write_text(as_perfetto({schedule.name: timeline}, schedule.graph, order))
    if given.json:
        print(as_data)
        return 0
    print(as_text(timeline, order))
    peaks = ", ".join(map(str, timeline.peak_in_flight))
    print(f"{timeline.makespan:.5g} s, {timeline.bubble:.1%} idle; activations in flight by rank: {peaks}")
    return 0


def _parser() -> _Parser:
    parser = _Parser(prog="python -m pipeline_engine", description="Show, check, simulate and compare schedules.")
    commands = parser.add_subparsers(required=True, metavar="show | check | simulate | compare")
    sizes, costs, pictures, output = _sizes(), _cost_options(), _pictures(), _output()
    show = commands.add_parser("show", parents=[_schedule(), sizes, pictures, output], help="draw a schedule")
    show.add_argument("--csv", type=Path, metavar="F", help="write the programs, one a row")
    show.set_defaults(command=_show)
    checks = commands.add_parser("check", parents=[output], help="hold a file of programs to the laws")
    checks.add_argument("file", type=Path, metavar="FILE.csv", help="one program a row, one action a cell")
    checks.set_defaults(command=_check)
    run = commands.add_parser(
        "simulate", parents=[_schedule(), sizes, costs, pictures, output], help="play a schedule under given costs"
    )
    run.add_argument("--order", choices=["given", "planned"], default="given", help="of uneven microbatches")
    run.set_defaults(command=_simulate)
    table = commands.add_parser("compare", parents=[sizes, costs, output], help="a table over all schedules")
    table.set_defaults(command=_compare)
    return parser


def _schedule() -> _Parser:
    options = _Parser(add_help=False)
    options.add_argument("schedule", metavar="NAME", help=", ".join(SCHEDULES))
    options.add_argument(
        "--stages", type=_count, metavar="S", help="stages; as few as the schedule allows if not given"
    )
    options.add_argument("--max-in-flight", type=_count, metavar="N", help="activations that a rank may hold")
    return options


def _sizes() -> _Parser:
    options = _Parser(add_help=False)
    options.add_argument("--ranks", type=_count, required=True, metavar="P")
    options.add_argument("--num-microbatches", type=_count, metavar="M")
    return options


def _cost_options() -> _Parser:
    options = _Parser(add_help=False)
    for name in ("forward", "backward-input", "backward-weight"):
        options.add_argument(f"--{name}", type=_seconds, default=1.0, metavar="SECONDS")
    for name in ("loss", "latency"):
        options.add_argument(f"--{name}", type=_seconds, default=0.0, metavar="SECONDS")
    options.add_argument("--lengths", type=_lengths, metavar="L,L,...", help="of the microbatches; 1 on the average")
    return options


def _pictures() -> _Parser:
    options = _Parser(add_help=False)
    options.add_argument("--svg", type=Path, metavar="F", help="write a picture")
    options.add_argument("--trace", type=Path, metavar="F", help="write a trace for ui.perfetto.dev")
    return options


def _output() -> _Parser:
    options = _Parser(add_help=False)
    options.add_argument("--json", action="store_true", help="print data instead of text")
    return options


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
        Costs(latency=seconds)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    return seconds


def _lengths(text: str) -> list[float]:
    try:
        lengths = [float(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers with commas between") from None
    if not all(0 < length < float("inf") for length in lengths):
        raise argparse.ArgumentTypeError(f"{text!r}: a length is more than 0")
    return lengths


if __name__ == "__main__":
    sys.exit(main())
