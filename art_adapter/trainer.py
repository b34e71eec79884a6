"""TrainerRank with pipeline parallelism: a trainer's own class, whose forward runs in stages.

Only the seam of the trainer is overridden.  While a forward is planned, ``_forward_packed`` does not run: it defers
the group and returns placeholders.  Then all deferred groups go through the pipeline, and the placeholders in the
planned result are replaced by the outputs as they come.

Note [re-planned after a change]: windows are planned, and run, ahead of the caller; see ahead.py.  When he changes what
they depend on inside his loop (an optimizer step, another slot, another stream), what has run ahead is dropped and the
rest is planned again, so that the result is that of a trainer that runs one window after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import cache
from typing import Any

import torch
from megatron.core import parallel_state

from .agreement import largest
from .ahead import Horizon, Line, Room, Wave
from .chunks import first_is
from .compat import (
    art_trainer_rank,
    check_shape,
    measures_memory,
    presented_as_one_stage,
    refusal_of,
    selection,
)
from .cutting import CutPlan
from .groups import forward_group
from .memory_watch import DeviceMemory, WaveMemory
from .pace import best_length
from .publishing import PipelinedPublishing
from .records import Records, materialized, replace, shifted, tensors_of
from .reference import ReferenceTrainerRank
from .runtime import Runtime, language_model
from .slots_over_stages import PipelinedSlots
from .stages import Group, Outputs, StageExecutor
from .topology import Topology, check_supported


class PipelinedForward(PipelinedSlots):
    """What a pipelined trainer overrides; it stands in front of the trainer's own class.

    Over a model that is not cut into stages it changes nothing.

    Args:
        runtime: this rank's stages of the model.
        schedule: a name of ``pipeline_engine.SCHEDULES``; by default what fits the number of stages.
        deadline: seconds that any single wait for another stage may take.
        microbatch_tokens: of about how many tokens the microbatches are into which a window is cut, where that is
            lossless; by default what the measured speed of the stages makes the best of.
        options: of the trainer's own class.

    Attributes:
        stages: those of this rank, or None if the model is not cut.

    Raises:
        UnsupportedTopologyError: this combination of parallel sizes cannot run.
        UnsupportedHostError: the trainer's own class is not known to the adapter.
    """

    host: type
    runtime: Any
    device: torch.device
    _deferred: Wave | None = None
    _line: Line | None = None
    _is_under_way = False  # whether windows were planned before, in the same loop

    def __init__(
        self,
        runtime: Any,
        *,
        schedule: str | None = None,
        deadline: float = 600.0,
        microbatch_tokens: int | None = None,
        **options: Any,
    ) -> None:
        topology = Topology.of(runtime)
        if not topology.is_pipelined:
            super().__init__(runtime, **options)  # type: ignore[call-arg]
            return
        check_shape(self.host)
        check_supported(topology, refusal_of(self.host))
        with presented_as_one_stage(runtime.provider):
            super().__init__(runtime, **options)  # type: ignore[call-arg]
        self._records = Records(self.host)
        self._forward_group = forward_group()
        self.stages = StageExecutor(
            runtime.model,
            parallel_state.get_pipeline_model_parallel_group(),
            agreeing=self._forward_group,
            hidden=self._hidden_of,
            outputs=self._outputs_of,
            schedule=schedule,
            deadline=deadline,
            peer_error=self._records.peer_error,
        )
        self._microbatch_tokens = microbatch_tokens
        self._horizon = Horizon()
        self._boundary = _boundary_bytes(runtime)
        self._room = self._room_of(runtime)
        self._memory = DeviceMemory(self.device)

    def forward_micro_batches(self, inputs: Iterable[Any], **options: Any) -> Iterator[Any]:
        """As the trainer's own; windows run ahead of the caller, see Note [re-planned after a change]."""
        if self.stages is None:
            own: Iterator[Any] = super().forward_micro_batches(inputs, **options)  # type: ignore[misc]
            return own
        return self._windows(inputs, **options)

    def dp_rank_forward(self, inputs: Any, **options: Any) -> Any:
        """As the trainer's own."""
        run = super().dp_rank_forward  # type: ignore[misc]
        if self.stages is None:
            return run(inputs, **options)
        self._meet()
        wave = self._planned(lambda: run(inputs, **options))
        self.stages.check_planned_alike(wave.groups)
        return self._filled(wave, self.stages.forward(wave.groups))

    def close(self) -> None:
        """Leave the pipeline; the trainer cannot run forwards any more."""
        if self.stages is not None:
            self.stages.pipeline.close()

    def _windows(self, inputs: Iterable[Any], **options: Any) -> Iterator[Any]:
        items, start = [materialized(item) for item in inputs], 0
        while True:
            with closing(self._unchanged_windows(items[start:], **options)) as windows:
                for window in windows:
                    before, stop = (self._changes, selection(self)), window.stats.global_stop
                    handed = [shifted(window, start)]
                    del window  # what waits for a backward is what the caller holds
                    yield handed.pop()
                    if before != (self._changes, selection(self)) or self._is_crowded:
                        start += stop
                        break
                else:
                    return

    def _unchanged_windows(self, items: Sequence[Any], **options: Any) -> Generator[Any, None, None]:
        """Hand out window after window with its outputs as they come through the pipeline."""
        planning = super().forward_micro_batches(items, **options)  # type: ignore[misc]
        self._is_under_way = False
        line, used, is_planning = self._new_line(), 0, True
        self._agree_on_horizon()
        try:
            while True:
                if is_planning and len(line) < line.fewest:
                    is_planning = self._plan_more(planning, line)
                if not line:
                    return
                wave, outputs = line.take()
                used += 1
                yield replace(wave.result, outputs=self._filled(wave, outputs))
        except GeneratorExit:
            self._horizon.changed(used)
            raise
        finally:
            line.end()

    def _agree_on_horizon(self) -> None:
        """A rank whose caller failed has left its loop early, and others have not: the smallest holds."""
        group = parallel_state.get_pipeline_model_parallel_group()
        self._horizon.size = -largest([-self._horizon.size], device=self.device, group=group)[0]

    def _plan_more(self, planning: Iterator[Any], line: Line) -> bool:
        """Plan as many windows as the horizon says; whether there are further ones.

        While the trainer knows nothing of the memory yet, it plans one, which must run before it can plan better.
        """
        assert self.stages is not None
        self._meet()
        waves: list[Wave] = []
        learns = False
        while len(waves) < self._horizon.size and not learns:
            wave = self._planned(lambda: next(planning, None), before=line.ahead_here)
            if wave.result is None:
                break
            wave.check = wave.result.stats
            waves.append(wave)
            self._is_under_way = True
            learns = self._memory.is_measured and wave.check.cold_start
        self.stages.check_planned_alike([group for each in waves for group in each.groups])
        for each in waves:
            line.add(each)
        line.fewest = 1 if learns else self.stages.graph.num_ranks
        self._horizon.used()
        return wave.result is not None

    def _new_line(self) -> Line:
        """Begin a loop; one that is still running ends, and plans the rest again when it goes on."""
        assert self.stages is not None
        if self._line is not None:
            self._line.end()
        self._changes += 1
        self._line = line = Line(self.stages.pipeline.waves, self._room)
        return line

    def _meet(self) -> None:
        """Hear of a failure before the collectives of planning, in which the others would be alone."""
        assert self.stages is not None
        self.stages.pipeline.meet()

    @property
    def _is_crowded(self) -> bool:
        return self._line is not None and self._line.is_crowded

    def _room_of(self, runtime: Any) -> Room:
        """A trainer that measures does so on this rank, boundaries included; else it estimates for the whole model."""
        if measures_memory(self):
            return Room(share=1.0, boundary=0.0, is_what_is_left=True)
        layers = sum(len(language_model(chunk).decoder.layers) for chunk in runtime.model)
        group = parallel_state.get_pipeline_model_parallel_group()
        (most,) = largest([layers], device=self.device, group=group)
        return Room(share=most / runtime.provider.num_layers, boundary=self._boundary, is_what_is_left=False)

    def _planned(self, plan: Callable[[], Any], *, before: int = 0) -> Wave:
        """Run a forward of the trainer's own class up to its seam; its result holds placeholders."""
        self._deferred = wave = Wave(before=before, shortage=self._records.memory_error)
        try:
            wave.result = plan()
        finally:
            self._deferred = None
        return wave

    def _filled(self, wave: Wave, found: Iterable[Outputs]) -> Any:
        """The planned result with outputs in the place of its placeholders, in the same nesting."""
        made: dict[int, Any] = {}
        for group, outputs in zip(wave.groups, found, strict=True):
            tracked = self._track_slot_graph_outputs(group.slot, [self._records.output(each) for each in outputs])
            made |= dict(zip(group.numbers, tracked, strict=True))
        nested = getattr(wave.result, "outputs", wave.result)
        return self._records.filled(nested, made)

    # What follows is called by the trainer's own class.

    def _forward_packed(self, items: Sequence[Any], prepared: Any) -> list[Any]:
        if self.stages is None:
            own: list[Any] = super()._forward_packed(items, prepared)  # type: ignore[misc]
            return own
        if (wave := self._deferred) is None:
            raise RuntimeError("a pipelined trainer runs forwards through forward_micro_batches and dp_rank_forward")
        placeholders = [self._records.placeholder() for _ in items]
        numbers = [number for number, _ in placeholders]
        packed = wave.plan.groups[len(wave.groups)].packed
        wave.groups.append(Group(items, prepared, numbers, tokens=int(packed.tokens.numel()), around=wave.run_piece))
        return [output for _, output in placeholders]

    def _execute_flat_plan(self, plan: Any) -> list[Any]:
        run: Callable[[Any], list[Any]] = super()._execute_flat_plan  # type: ignore[misc]
        wave = self._deferred
        if wave is None:
            return run(plan)
        whole = CutPlan.of(plan)
        wave.plan = whole.cut(self._length_of_microbatches(whole))
        placeholders = run(wave.plan)
        if self._memory.is_measured:
            wave.memory = self._memory_of(wave, plan)
        return placeholders

    def _length_of_microbatches(self, whole: CutPlan) -> int:
        assert self.stages is not None
        if self._microbatch_tokens is not None:
            return self._microbatch_tokens
        return best_length(
            whole,
            self.stages.agreed,
            self.stages.graph,
            more=self._is_under_way,
            differentiates=torch.is_grad_enabled(),
        )

    def _memory_of(self, wave: Wave, plan: Any) -> WaveMemory:
        """What is to be told of its memory when it has run here: on other stages than the last, outputs arrive."""
        outputs = 0 if parallel_state.is_pipeline_last_stage() else plan.output_bytes
        return WaveMemory(
            self._memory,
            pieces=len(wave.groups) * len(self.runtime.model),
            beside=outputs,
            report=lambda peak: self._update_memory_profile(plan, peak),
        )

    def _memory_check(self, *arguments: Any, **options: Any) -> Any:
        check = super()._memory_check(*arguments, **options)  # type: ignore[misc]
        if self._deferred is not None:
            self._deferred.check = check
        return check

    def _track_slot_graph_outputs(self, ref: Any, outputs: Sequence[Any]) -> list[Any]:
        if self._deferred is not None:  # placeholders: nothing is alive yet
            self._deferred.groups[-1].slot = ref
            return list(outputs)
        tracked: list[Any] = super()._track_slot_graph_outputs(ref, outputs)  # type: ignore[misc]
        return tracked

    def _update_memory_profile(self, *arguments: Any, **options: Any) -> None:
        if self._deferred is None:  # else what was measured is a forward that has not run
            super()._update_memory_profile(*arguments, **options)  # type: ignore[misc]

    def _estimate_required_memory_bytes_from_values(self, *, packed_tokens: int, **options: Any) -> int:
        """A trainer measures its own forwards, not what comes in and goes out at the ends of a stage."""
        estimate = super()._estimate_required_memory_bytes_from_values  # type: ignore[misc]
        own = int(estimate(packed_tokens=packed_tokens, **options))
        return own if self.stages is None else own + math.ceil(self._boundary * packed_tokens)

    def _available_memory_bytes(self) -> int:
        """What has run ahead is in the memory, but not in the way of a window that runs after it."""
        own = int(super()._available_memory_bytes())  # type: ignore[misc]
        return own if self._deferred is None else own + self._deferred.before

    def _hidden_of(self, chunk: Any, group: Group) -> torch.Tensor:
        with first_is(chunk, self.runtime.model):
            hidden: torch.Tensor = super()._decoder_hidden(group.prepared)  # type: ignore[misc]
        return hidden

    def _outputs_of(self, chunk: Any, group: Group) -> Outputs:
        with first_is(chunk, self.runtime.model):
            outputs = super()._forward_packed(group.items, group.prepared)  # type: ignore[misc]
        return [tensors_of(output) for output in outputs]

    def _forward_memory_group(self) -> Any:
        """The ranks that run one data-parallel rank's forward together, those of all its stages."""
        if self.stages is None:
            return super()._forward_memory_group()  # type: ignore[misc]
        return self._forward_group


def _boundary_bytes(runtime: Any) -> float:
    """Per token of a packed row what crosses into and out of a stage, gradients included, on each of its ranks."""
    size = next(runtime.model[0].parameters()).element_size()
    hidden: int = 4 * int(runtime.provider.hidden_size) * size
    return hidden / int(parallel_state.get_context_parallel_world_size())


@cache
def pipelined(host: type) -> type:
    """The pipelined class over a trainer's own class."""
    publishing = (PipelinedPublishing,) if hasattr(host, "save_checkpoint_slot_lora") else ()
    bases = (*publishing, PipelinedForward, host)
    return type(f"Pipelined{host.__name__}", bases, {"__module__": __name__, "host": host})


class TrainerRank:
    """A trainer over this rank's part of a model: the host's own class, pipelined if the model is cut into stages.

    Args:
        runtime: this rank's model chunks and their configuration.
        host: the trainer's own class; by default the reference for an ``art_adapter.Runtime``, else ART's, from the
            tree that the environment variable ``ART_SRC`` points to or as it is installed.
        schedule: pipeline schedule, used with several stages only; a name of ``pipeline_engine.SCHEDULES``, by default
            what fits the number of stages.
        deadline: seconds that any single wait for another stage may take; used with several stages only.
        microbatch_tokens: see ``PipelinedForward``; used with several stages only.
        options: of the host's class.

    Raises:
        UnsupportedTopologyError: this combination of parallel sizes cannot run.
        UnsupportedHostError: the host's class is not known to the adapter.
        ImportError: ART cannot be found.
    """

    def __new__(
        cls,
        runtime: Any,
        *,
        host: type | None = None,
        schedule: str | None = None,
        deadline: float = 600.0,
        microbatch_tokens: int | None = None,
        **options: Any,
    ) -> Any:
        """Make an instance of the class that fits the topology."""
        if host is None:
            host = ReferenceTrainerRank if isinstance(runtime, Runtime) else art_trainer_rank()
        if not Topology.of(runtime).is_pipelined:
            return host(runtime, **options)
        own = {"schedule": schedule, "deadline": deadline, "microbatch_tokens": microbatch_tokens}
        return pipelined(host)(runtime, **own, **options)
