"""The canary: a real Megatron GPT, cut over processes, must train as it does in one process.

One training run through TrainerRank's public API, done twice: over pipeline stages, and on one stage.  What both
runs saw is compared, value by value.
"""

from __future__ import annotations

import pickle
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from megatron.core import parallel_state

import pipeline_engine as pe
from pipeline_engine.launch import run_ranks, tell

from .base_model import named_globally
from .canary_host import CanaryHost, canary_host, host_name
from .compat import slot_parameters_by_name
from .records import tensors_of
from .runtime import language_model
from .scheduling import chain_of, schedule_for
from .tiny_gpt import Cut, Shape, licence_text_inputs
from .topology import Topology, UnsupportedTopologyError, check_supported
from .trainer import TrainerRank

ITEMS = 8
"""Top-level items of one step, of two sequences each."""
MEMORY_BUDGET = 12_000_000
"""Bytes that a window's estimate may reach: one or two items, so that a step has several windows."""
SLOT = "policy"
LEARNING_RATE = 1e-2


@attrs.frozen
class Plan:
    """What the canary runs.

    Attributes:
        pp, dp, tp, cp, virtual: ranks of a pipeline, data-, tensor- and context-parallel ranks, chunks per rank;
            tensor-parallel ranks also share out the sequence.
        schedule: a name of ``pipeline_engine.SCHEDULES``, or None for what the trainer chooses.
        steps: optimizer steps.
        timeout: seconds for each of the two runs.
        host: ``reference`` or ``art``; what the environment asks for.
    """

    pp: int = 2
    dp: int = 1
    tp: int = 1
    cp: int = 1
    virtual: int = 1
    schedule: str | None = None
    steps: int = 3
    timeout: float = 120.0
    host: str = attrs.field(factory=host_name)

    @property
    def ranks(self) -> int:
        """Processes of the pipelined run."""
        return self.pp * self.dp * self.tp * self.cp

    @property
    def cut(self) -> Cut:
        """How the model is spread over the ranks."""
        return Cut(
            tensor=self.tp,
            context=self.cp,
            pipeline=self.pp,
            virtual=self.virtual,
            sequence_parallel=self.tp > 1,
        )

    @property
    def graph(self) -> pe.StageGraph:
        """The stages of one pipeline."""
        return chain_of(ranks=self.pp, chunks=self.virtual)

    @property
    def schedule_that_runs(self) -> str:
        """The schedule that was asked for, or else the trainer's choice."""
        return self.schedule or schedule_for(self.graph)

    def on_one_stage(self) -> Plan:
        """The matched reference."""
        return attrs.evolve(self, pp=1, virtual=1)


def run(plan: Plan, on_step: Callable[[], object] = lambda: None) -> list[Seen]:
    """Run the training in ``plan.ranks`` processes; what each rank saw, by rank.

    Args:
        plan: what to run.
        on_step: called after each optimizer step of the first rank.

    Raises:
        RuntimeError: a rank raised or died.
        TimeoutError: it took longer than ``plan.timeout`` seconds.
    """

    def hear(rank: int, news: str) -> None:
        if rank == 0:
            on_step()

    found = run_ranks(train, plan.ranks, plan, timeout=plan.timeout, on_news=hear)
    return [pickle.loads(seen) for seen in found]


def train(rank: int, plan: Plan) -> bytes:
    """One rank's training run; what it saw, pickled."""
    host = canary_host(memory_budget_bytes=MEMORY_BUDGET)
    runtime = host.build(plan.cut)
    trainer = TrainerRank(runtime, schedule=plan.schedule, **host.trainer_options)
    trainer.load_checkpoint_slot(SLOT, host.adapter(runtime.provider), alpha=8.0, **host.load_options)
    trainer.set_checkpoint(SLOT)
    head = _head_of(trainer, int(runtime.provider.hidden_size))
    watch = Watch.over(trainer)
    started = time.perf_counter()
    steps = [_step(host, trainer, head, step) for step in range(plan.steps)]
    seconds = time.perf_counter() - started
    seen = Seen(
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        shard=(
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_context_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
        ),
        steps=steps,
        seconds=seconds,
        weights=_weights(trainer),
        bytes_per_channel=trainer.stages.pipeline.bytes_per_channel if plan.graph.num_stages > 1 else {},
        peak_in_flight=watch.peak,
        num_windows=max(int(step["windows"]["number"]) for step in steps),
    )
    return pickle.dumps(seen)


def _head_of(trainer: Any, hidden_size: int) -> torch.nn.Module:
    """A value head that trains with the slot; of a trainer without custom heads, one that stays as it is."""
    if hasattr(trainer, "module"):
        head: torch.nn.Module = trainer.module("value", lambda: _value_head(hidden_size))
        return head
    return _value_head(hidden_size)


def _weights(trainer: Any) -> dict[str, int]:
    """Elements of every parameter that this rank holds, by its name in the whole model."""
    own = {name: weight for chunk in trainer.runtime.model for name, weight in named_globally(language_model(chunk))}
    held = {id(parameter) for parameter in own.values()}
    slots = {name: p for name, p in slot_parameters_by_name(trainer) if id(p) not in held}
    return {name: parameter.numel() for name, parameter in {**own, **slots}.items()}


@attrs.frozen(eq=False)
class Seen:
    """What one rank saw.

    Attributes:
        stage: its rank in its pipeline.
        shard: its data-, context- and tensor-parallel rank; the ranks of one pipeline have the same.
        steps: for each optimizer step, tensors by name of the check and then by name or place.
        seconds: for all steps.
        weights: number of elements of each parameter that this rank holds, by its name in the whole model.
        bytes_per_channel: payload that this rank sent.
        peak_in_flight: largest number of decoder graphs that were alive on this rank at once.
        num_windows: largest number of windows of one step, each one microbatch.
    """

    stage: int
    shard: tuple[int, int, int]
    steps: list[dict[str, dict[str, torch.Tensor]]]
    seconds: float
    weights: dict[str, int]
    bytes_per_channel: dict[str, int]
    peak_in_flight: int
    num_windows: int


class Watch:
    """Counts the decoder graphs of a trainer that are alive, from inside its stage.

    Each decoder output saves an empty marker for its backward; autograd lets go of it when the graph is freed.
    """

    def __init__(self) -> None:
        self.peak = 0
        self._markers: list[weakref.ref[torch.Tensor]] = []

    @classmethod
    def over(cls, trainer: Any) -> Watch:
        """Watch the decoders of this trainer from now on."""
        watch = cls()
        for chunk in trainer.runtime.model:
            language_model(chunk).decoder.register_forward_hook(watch._mark)
        return watch

    def _mark(self, decoder: Any, inputs: Any, hidden: torch.Tensor) -> torch.Tensor:
        if not hidden.requires_grad:
            return hidden
        marker = torch.empty(0)
        self._markers = [known for known in self._markers if known() is not None] + [weakref.ref(marker)]
        self.peak = max(self.peak, len(self._markers))
        marked: torch.Tensor = _Marked.apply(hidden, marker)  # type: ignore[no-untyped-call]
        return marked


class _Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, marker: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(marker)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def _step(host: CanaryHost, trainer: Any, head: torch.nn.Module, step: int) -> dict[str, dict[str, torch.Tensor]]:
    """One optimizer step, as an experiment would write it."""
    seen: dict[str, dict[str, torch.Tensor]] = {"outputs": {}, "loss": {}}
    total, windows = torch.zeros(()), 0
    for window in trainer.forward_micro_batches(_inputs(host, step)):
        windows += 1
        losses = [_loss(item, head) for item in window.outputs]
        for index, item, loss in zip(window.indices, window.outputs, losses, strict=True):
            seen["outputs"] |= {f"{index}/{name}": value for name, value in _named_outputs(item)}
            seen["loss"][str(index)] = loss.detach().clone()
        if losses:
            loss = torch.stack(losses).sum() / ITEMS
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
    trainer.dp_reduce(total)
    seen["dp_reduce"] = {"sum of losses": total}
    seen["windows"] = {"number": torch.tensor(windows)}
    seen["model gradients"] = {name: _grad(p) for name, p in slot_parameters_by_name(trainer)}
    seen["head gradients"] = {name: _grad(p) for name, p in head.named_parameters()}
    if losses:
        del loss, losses, window  # ART holds that outputs which are kept wait for another backward
    result = trainer.optim_step(params=host.records.AdamParams(learning_rate=LEARNING_RATE))
    head.zero_grad()
    seen["gradient norm"] = {"before clipping": torch.tensor(result["grad_norm"], dtype=torch.float64)}
    seen["parameters"] = {name: p.detach().clone() for name, p in slot_parameters_by_name(trainer)}
    seen["head parameters"] = {name: p.detach().clone() for name, p in head.named_parameters()}
    tell("step")
    return seen


def _inputs(host: CanaryHost, step: int) -> list[list[Any]]:
    """Top-level items of two sequences each, of different lengths, which ask for different things."""
    wants: list[dict[str, Any]] = [{}, {"top_k": 5}, {"logits": True}, {"top_k": 3, "logits": True}]
    sequences = licence_text_inputs(2 * ITEMS * (step + 1), shared_prefix=12)[-2 * ITEMS :]
    asked = [host.request(each, hidden_states=True, **wants[place % 4]) for place, each in enumerate(sequences)]
    return [asked[place : place + 2] for place in range(0, len(asked), 2)]


def _loss(item: list[Any], head: torch.nn.Module) -> torch.Tensor:
    """A policy loss, a value loss on the custom head, and terms that reach every other output."""
    total = torch.zeros(())
    for place, output in enumerate(item):
        assert output.target_logprobs is not None and output.hidden_states is not None
        advantage = torch.linspace(1.0, 0.5, len(output.target_logprobs))
        total = total - (advantage * output.target_logprobs).mean()
        total = total + 0.1 * (head(output.hidden_states).squeeze(-1) - 0.1 * place).square().mean()
        if output.logits is not None:
            total = total + 0.01 * output.logits.float().logsumexp(-1).mean()
        if output.top_k is not None:
            total = total - 0.01 * output.top_k.logprobs[:, 0].mean()
    return total


def _value_head(hidden_size: int) -> torch.nn.Module:
    head = torch.nn.Linear(hidden_size, 1)
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-0.1, 0.1, hidden_size)[None])
        head.bias.zero_()
    return head


def _named_outputs(item: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    names = ("target_logprobs", "top_k.logprobs", "top_k.tokens", "logits", "hidden_states")
    for place, output in enumerate(item):
        for name, value in zip(names, tensors_of(output), strict=True):
            if value is not None:
                yield f"{place}/{name}", value.detach().clone()


def _grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


def check_plan(plan: Plan) -> None:
    """Refuse what cannot run before any process starts.

    Raises:
        ValueError: an unknown schedule, or more stages than layers.
        UnsupportedTopologyError: a combination of parallel sizes that a pipelined trainer refuses, or that its host
            runs on a GPU only.
    """
    if plan.host == "art" and plan.cp > 1:
        raise UnsupportedTopologyError(
            "ART's own context parallelism needs a GPU, and the canary runs on the CPU; "
            "use --cp 1, or unset ART_SRC to run it over the reference."
        )
    plan.cut.counts(Shape().layers)
    pe.build(plan.schedule_that_runs, plan.graph, num_microbatches=1)
    check_supported(Topology(plan.pp, plan.tp, plan.cp, expert=1, chunks=plan.virtual))
