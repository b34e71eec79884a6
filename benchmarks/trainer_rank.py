"""TrainerRank at pipeline speed: ``python -m benchmarks.trainer_rank``.

The reference trainer on four stages whose layers sleep, in three situations: one window of all items, a window for each
item, and a memory budget that admits four items at once. Measured beside the makespan simulated, and beside the port
that one would write first: each window goes through the stages by blocking sends and receives. Then a model that
computes, on two stages and on one, with the caller's own loss, LoRA and items of uneven length.

The page is trainer_rank.md.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import asdict, frozen
from megatron.core import parallel_state

import pipeline_engine as pe
from art_adapter import AdamParams, ForwardInput, ReferenceTrainerRank, TrainerRank
from art_adapter.compat import boundary_input, presented_as_one_stage
from art_adapter.memory import forward_bytes, output_bytes
from art_adapter.pace import Agreed, Pace
from art_adapter.progress import progress
from art_adapter.runtime import Runtime, language_model
from art_adapter.tiny_gpt import Cut, Shape, adapter, build_runtime, licence_text_inputs
from benchmarks.record import Record
from benchmarks.sleeping import nap
from benchmarks.tables import markdown, spread
from pipeline_engine.launch import run_ranks

STAGES, ITEMS, TOKENS = 4, 16, 16
FORWARD, BACKWARD = 0.040, 0.080
"""Seconds that one item takes on one stage."""
SLEEPING = Shape(layers=STAGES, hidden=16, heads=2, query_groups=1, feed_forward=16)
COMPUTING = Shape(layers=8, hidden=384, heads=6, query_groups=6, feed_forward=1024)
COMPUTING_ITEMS = 16
WARM_UPS = 2
ROUNDS = 3  # in which one stage and two take turns
ADAM = AdamParams(learning_rate=1e-4)


@frozen
class Situation:
    """How the items come in windows: what the trainer is told, and what it comes to."""

    name: str
    options: dict[str, int]
    sizes: tuple[int, ...]
    at_once: int | None

    @property
    def nominal(self) -> float:
        """Makespan in seconds if nothing but the sleeping took time."""
        return self.simulated([(FORWARD, BACKWARD)] * STAGES)

    def simulated(self, took: Sequence[tuple[float, float]]) -> float:
        """Makespan in seconds if an item took so long forward and backward on each stage, and nothing else any time."""
        forward, backward = zip(*took, strict=True)
        half = [seconds / 2 for seconds in backward]
        costs = pe.Costs(forward=list(forward), backward_input=half, backward_weight=half)
        graph = pe.StageGraph.chain(STAGES, STAGES)
        return pe.simulate(pe.in_waves("1f1b", graph, self.sizes, at_once=self.at_once), costs).makespan


@frozen
class Step:
    """One step on one rank: when it began and ended."""

    start: float
    end: float


@frozen
class Slept:
    """The layers that sleep, on one rank, by situation: its steps, and what an item took there forward and backward."""

    steps: dict[str, list[Step]]
    took: dict[str, tuple[float, float]]


@frozen
class Computed:
    """The model that computes, on one rank: its steps, and what the stages were measured to take."""

    steps: list[Step]
    agreed: Agreed | None


def situations() -> list[Situation]:
    """The three."""
    return [
        Situation("one window of 16 items", {}, (ITEMS,), None),
        Situation("16 windows of one item", {"items_at_once": 1}, (1,) * ITEMS, None),
        Situation("memory for 4 items at once", {"memory_budget_bytes": budget(4)}, (4,) * 4, 3),
    ]


def budget(count: int) -> int:
    """Bytes that so many items are estimated to need, in one window."""
    config = build_config()
    return forward_bytes(config, [count * TOKENS]) + output_bytes(config, SLEEPING.vocabulary, items()[:count])


def build_config() -> Any:
    """What the estimate reads of a configuration."""
    from art_adapter.tiny_gpt import transformer_config

    return transformer_config(SLEEPING, Cut())


def items() -> list[ForwardInput]:
    """Sequences of one length that have no beginning in common, so that a window of them can be cut."""
    rows = [torch.arange(TOKENS + 1).add(number * 15) % SLEEPING.vocabulary for number in range(ITEMS)]
    return [ForwardInput(input_tokens=row[:-1], target_tokens=row[1:]) for row in rows]


def main() -> None:
    options = parser().parse_args()
    repeats = 1 if options.quick else options.repeats
    record = Record()
    rounds = 1 if options.quick else ROUNDS
    limit = 120.0 + 60 * repeats
    computing: dict[int, list[list[Computed]]] = {1: [], 2: []}
    with progress("runs", 1 + 2 * rounds) as run_done:
        sleeping = run_ranks(sleep_on_rank, STAGES, repeats, timeout=limit)
        for ranks in (1, 2) * rounds:
            run_done()
            each = math.ceil(repeats / rounds)
            computing[ranks].append(run_ranks(compute_on_rank, ranks, ranks, each, timeout=limit))
    print(table_of_sleeping(sleeping))
    print()
    print(table_of_computing(computing))
    record.end(
        options.json,
        sleeping=list(map(asdict, sleeping)),
        computing={ranks: [list(map(asdict, found)) for found in turns] for ranks, turns in computing.items()},
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.trainer_rank", description=__doc__.splitlines()[0])
    made.add_argument("--quick", action="store_true", help="one repeat: within 90 seconds on two cores")
    made.add_argument("--repeats", type=int, default=7, metavar="N")
    made.add_argument("--json", type=Path, metavar="FILE", help="write every step as data")
    return made


# ---- stages that sleep


def sleep_on_rank(rank: int, repeats: int) -> Slept:
    """Every repeat on one rank, the situations and the blocking port taking turns."""
    runtime = build_runtime(SLEEPING, Cut(pipeline=STAGES))
    language_model(runtime.model[0]).decoder.register_forward_hook(sleeping)
    trainers = {each.name: trainer_over(runtime, **each.options) for each in situations()}
    blocking = with_slot(Blocking(runtime))
    for trainer in trainers.values():  # the first step is measured, and decides how the next ones are cut
        for _ in range(WARM_UPS):
            step(trainer, items())
    step(blocking, items()[:1])
    found: dict[str, list[Step]] = {}
    for _ in range(repeats):
        for name, trainer in trainers.items():
            found.setdefault(name, []).append(timed(lambda trainer=trainer: step(trainer, items())))
        found.setdefault("blocking", []).append(timed(lambda: step(blocking, items())))
    took = {name: of_one_item(trainer.stages.pace) for name, trainer in trainers.items()}
    for trainer in trainers.values():
        trainer.close()
    return Slept(found, took)


def of_one_item(pace: Pace) -> tuple[float, float]:
    """Seconds of a forward and of a backward."""
    _, forward, of_a_token, backward, back_of_a_token = pace.words()
    return forward + of_a_token * TOKENS, backward + back_of_a_token * TOKENS


def trainer_over(runtime: Runtime, **options: Any) -> Any:
    """A trainer with a slot."""
    return with_slot(TrainerRank(runtime, **options))


def with_slot(trainer: Any) -> Any:
    trainer.load_checkpoint_slot("policy", adapter(trainer.runtime.provider), alpha=8.0)
    trainer.set_checkpoint("policy")
    return trainer


def step(trainer: Any, inputs: list[Any]) -> None:
    """What a caller writes: a loss of his own for each window."""
    for window in trainer.forward_micro_batches(inputs):
        losses = [-output.target_logprobs.mean() for output in window.outputs]
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        del window, losses
    if trainer.stages is not None:
        trainer.stages.pipeline.flush()
    trainer.zero_grad()


def timed(run: Callable[[], None]) -> Step:
    dist.barrier()
    start = time.perf_counter()
    run()
    return Step(start, time.perf_counter())


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        ctx.tokens = len(hidden)
        nap(FORWARD * ctx.tokens / TOKENS)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        nap(BACKWARD * ctx.tokens / TOKENS)
        return grads[0]


def sleeping(decoder: Any, inputs: Any, hidden: torch.Tensor) -> torch.Tensor:
    """A decoder that takes its seconds by the token; ``hidden`` is ``[tokens, 1, hidden]``."""
    slept: torch.Tensor = _Sleep.apply(hidden)  # type: ignore[no-untyped-call]
    return slept


# ---- the port that one would write first


class Blocking(ReferenceTrainerRank):
    """Every forward and backward of a window passes through the stages one after the other."""

    stages = None

    def __init__(self, runtime: Runtime) -> None:
        with presented_as_one_stage(runtime.provider):
            super().__init__(runtime)
        self._group = parallel_state.get_pipeline_model_parallel_group()
        self._rank, self._last = dist.get_rank(self._group), dist.get_world_size(self._group) - 1

    def _forward_packed(self, items: Any, prepared: Any) -> list[Any]:
        tokens = prepared.tokens.numel()
        received = [_Receive.apply(torch.zeros(tokens, 1, self.hidden_size, requires_grad=True), self._rank - 1)]
        with boundary_input(language_model(self.runtime.model[0]), received if self._rank else []):
            if self._rank == self._last:
                outputs = super()._forward_packed(items, prepared)
                for output in outputs:
                    dist.broadcast(output.target_logprobs.detach(), src=self._last, group=self._group)
                return outputs
            sent = _Send.apply(self._decoder_hidden(prepared), self._rank + 1)
        return [self._output_elsewhere(item, sent) for item in items]

    def _output_elsewhere(self, item: Any, sent: torch.Tensor) -> Any:
        logprobs = torch.empty(item.input_ids.shape)
        dist.broadcast(logprobs, src=self._last, group=self._group)
        from art_adapter import ForwardOutput

        return ForwardOutput(target_logprobs=logprobs + 0.0 * sent.sum())

    def _validate_dynamic_slot_consistency(self, kind: Any, name: str, loaded_sites: int) -> Any:
        from art_adapter import lora

        return lora.parameters(self._sites, lora.SlotRef(kind, name))


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: torch.Tensor, source: int) -> torch.Tensor:
        ctx.source = source
        received = torch.empty_like(buffer)
        if source >= 0:
            dist.recv(received, src=source)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.source >= 0:
            dist.send(grads[0].contiguous(), dst=ctx.source)
        return grads[0], None


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, target: int) -> torch.Tensor:
        ctx.target = target
        dist.send(hidden.contiguous(), dst=target)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        received = torch.empty_like(grads[0])
        dist.recv(received, src=ctx.target)
        return received, None


# ---- a model that computes


def compute_on_rank(rank: int, ranks: int, repeats: int) -> Computed:
    """Every repeat on one rank, with one thread; windows of one item, so that both have the same rows to compute."""
    torch.set_num_threads(1)
    trainer = trainer_over(build_runtime(COMPUTING, Cut(pipeline=ranks)), items_at_once=1)
    if ranks == 1:
        trainer.stages = None
    for _ in range(WARM_UPS):
        step(trainer, uneven())
    steps = [timed(lambda: step(trainer, uneven())) for _ in range(repeats)]
    if ranks == 1:
        return Computed(steps, None)
    trainer.close()
    return Computed(steps, trainer.stages.agreed)


def uneven() -> list[ForwardInput]:
    """Sequences of 48 to 192 tokens."""
    return licence_text_inputs(COMPUTING_ITEMS, shortest=48, longest=192)


def simulated_speed_up(agreed: Agreed) -> float:
    """Of two stages over one, if nothing but what the stages were measured to take took time."""
    weights = [each.input_tokens.numel() + agreed.fixed for each in uneven()]
    backward = [seconds / 2 for seconds in agreed.backward]
    costs = pe.Costs(forward=agreed.forward, backward_input=backward, backward_weight=backward, weights=weights)
    alone = sum(weights) * sum((*agreed.forward, *agreed.backward))
    schedule = pe.in_waves("1f1b", pe.StageGraph.chain(2, 2), [1] * len(weights))
    return alone / pe.simulate(schedule, costs).makespan


# ---- what is shown


def makespans(by_rank: list[list[Step]]) -> list[float]:
    """Of every repeat, from the first rank's start to the last rank's end."""
    return [max(s.end for s in steps) - min(s.start for s in steps) for steps in zip(*by_rank, strict=True)]


def table_of_sleeping(by_rank: list[Slept]) -> str:
    blocking = makespans([rank.steps["blocking"] for rank in by_rank])
    rows = []
    for each in situations():
        steps = makespans([rank.steps[each.name] for rank in by_rank])
        measured = each.simulated([rank.took[each.name] for rank in by_rank])
        over = [spread([seconds / bound for seconds in steps]) for bound in (each.nominal, measured)]
        factor = spread([b / t for b, t in zip(blocking, steps, strict=True)], 2)
        seconds = f"{statistics.median(steps):.3f} s"
        rows.append([each.name, seconds, f"{each.nominal:.3f} s", over[0], f"{measured:.3f} s", over[1], factor])
    heads = ["situation", "step", "nominal", "over it", "by measured times", "over it", "blocking port / step"]
    return markdown(heads, rows)


def table_of_computing(computing: dict[int, list[list[Computed]]]) -> str:
    """One and two stages took turns; every turn is a run of its own."""
    one, two = (
        [took for by_rank in computing[ranks] for took in makespans([rank.steps for rank in by_rank])]
        for ranks in (1, 2)
    )
    agreed = [by_rank[0].agreed for by_rank in computing[2]]
    simulated = statistics.median(simulated_speed_up(each) for each in agreed if each is not None)
    measured = statistics.median(one) / statistics.median(two)
    share = f"{100 * measured / simulated:.0f} %"
    row = [spread(one), spread(two), f"{measured:.2f}", f"{simulated:.2f}", share]
    return markdown(["one stage, s a step", "two stages, s a step", "speed-up", "simulated", "of simulated"], [row])


if __name__ == "__main__":
    main()
