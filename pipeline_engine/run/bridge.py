"""The bridge: a pipeline as the caller sees it, outputs in his hands and the loss his own."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from types import TracebackType
from typing import Any

import torch

from pipeline_engine.errors import UsageError
from pipeline_engine.plan.advance import Replica
from pipeline_engine.plan.graph import StageGraph
from pipeline_engine.plan.history import History, Memory
from pipeline_engine.plan.lifetimes import reads_on
from pipeline_engine.plan.schedule import Schedule
from pipeline_engine.plan.transfers import channels_of
from pipeline_engine.plan.waves import WavesReplica
from pipeline_engine.run.accord import Accord, PeerError
from pipeline_engine.run.agreement import passed
from pipeline_engine.run.buffers import buffers_of
from pipeline_engine.run.call import Call
from pipeline_engine.run.closed_loss import LossFunction, collects_losses
from pipeline_engine.run.executor import Executor
from pipeline_engine.run.fitting import check_fit, check_kinds, digest_of, fitting_schedule
from pipeline_engine.run.last_backward import LastBackward, OnLastBackward, check_whole
from pipeline_engine.run.leaving import Departure
from pipeline_engine.run.lookout import Lookout
from pipeline_engine.run.mailbox import Mailbox, failure_of
from pipeline_engine.run.microbatch import Microbatch
from pipeline_engine.run.microbatches import Microbatches
from pipeline_engine.run.modes import Modes
from pipeline_engine.run.ordering import Ordering, as_given, check_ordering, ordered
from pipeline_engine.run.randomness import Rng, Turns, draw_seed, is_per_microbatch
from pipeline_engine.run.stage import StageFunction
from pipeline_engine.run.ties import Tie, Ties
from pipeline_engine.run.tracing import Tracer
from pipeline_engine.run.transports.base import Transport
from pipeline_engine.run.waves import Waves
from pipeline_engine.run.yielded import Yielded

_log = logging.getLogger(__name__)


class Pipeline:
    """Stages on several ranks that behave like one model whose loss and backward are the caller's.

    Every rank makes the same calls in the same order, with the same number of microbatches.

    Args:
        stages: this rank's stages by number; a stage is any callable ``stage(*inputs, **shared)`` that returns a
            tree of tensors.  Of a ``torch.nn.Module`` the buffers are followed: what forwards that ran ahead and were
            dropped have done to them is undone.
        graph: the stage graph.
        schedule: a name of ``SCHEDULES``, or a ``Schedule`` of the caller's own.
        transport: moves messages between the ranks of this pipeline.
        deadline: seconds that any single wait may take.
        order: ``"given"``, or ``"planned"``: by the weights of the microbatches, so that uneven ones leave little idle
            time; then ``stream`` hands them out in another order, which ``Yielded.index`` tells.
        max_in_flight: activations of one stage and microbatch that the fullest rank holds at once; a few more than
            the schedule's own hide latency, fewer save memory.  See ``pe.best_schedule``.
        tracer: records what this rank does; one of its own for each rank.
        ties: parameters of which several stages hold a copy; see ``pe.tie``.
        rng: None: stages draw random numbers from torch's default generators as they come (threads of one process take
            turns, in an order that is not always the same); ``"per-microbatch"``: what a microbatch draws does not
            depend on how the model is cut or in which order microbatches run.
        verify: whether each message carries a checksum; its size, its end and what it belongs to are always checked.
        on_last_backward: called with the number of a stage just before the last backward of that stage in a call, so
            that a data parallel wrapper can be told to reduce in that one.  Which one is the last is known if every
            item gets its backward, or ``skip`` before the others have had theirs; an item that is left without either,
            and a loop that is left early, hide it.  Not for schedules that split backwards.
        keep_open: whether outputs outlast the next call, and ``flush``: then a gradient may come as long as the caller
            of some rank holds what leads to it.  By default both drop what was not given.
        peer_error: makes what is raised on this rank when another one has failed, out of the PeerFailedError, which
            becomes its cause; by default that error itself.  For a trainer whose callers know errors of its own: they
            get them in ``backward`` too, which no wrapper around this class would see.

    Raises:
        UsageError: the stages are not those that the graph puts on this rank, or the transport joins another number
            of ranks.
        ScheduleError: the schedule is unknown, does not fit the graph, or breaks a law.
    """

    def __init__(
        self,
        stages: Mapping[int, StageFunction],
        *,
        graph: StageGraph,
        schedule: str | Schedule,
        transport: Transport,
        deadline: float = 600.0,
        order: Ordering = "given",
        max_in_flight: int | None = None,
        tracer: Tracer | None = None,
        ties: Iterable[Tie] = (),
        rng: Rng = None,
        verify: bool = False,
        on_last_backward: OnLastBackward | None = None,
        keep_open: bool = False,
        peer_error: PeerError | None = None,
    ) -> None:
        check_kinds(transport, deadline)
        self._accord = Accord(transport, float(deadline), keep_open, peer_error)
        self._transport, self._graph, self._verify = transport, graph, verify
        self._tracer, self._on_last_backward = tracer, on_last_backward
        self._schedule_for = cache(lambda count: fitting_schedule(schedule, graph, count, max_in_flight))
        self._digest_for = cache(lambda count: digest_of(self._schedule_for(count)))
        self._settings = {"max_in_flight": max_in_flight, "rng": rng, "keep_open": keep_open}
        self._memory = Memory()
        self._split_report: dict[int, str] = {}
        transport.host = Lookout(transport.rank, self._accord.doing, lambda: list(self._accord.calls))
        with self._accord.meeting("building"):
            if transport.has_raised:
                self._accord.settle()
            check_fit(stages, graph, transport)
            self._stages, self._buffers = dict(stages), buffers_of(stages)
            self._ordering = check_ordering(order)
            fitting = self._schedule_for(schedule.num_microbatches if isinstance(schedule, Schedule) else 1)
            if on_last_backward is not None:
                check_whole(fitting)
            self._per_microbatch = is_per_microbatch(rng, graph)
            self._ties = Ties.agree(ties, graph, transport, deadline=self._accord.deadline)
            self._channels = (*channels_of(graph), *self._ties.channels)
            transport.open(self._channels, deadline=self._accord.deadline)

    def stream(self, microbatches: Iterable[Microbatch], *, num_microbatches: int | None = None) -> Iterator[Yielded]:
        """Hand out outputs one by one; ``loss.backward()`` in between runs the pipeline's backwards.

        Args:
            microbatches: a sequence, or an iterable that is read lazily.
            num_microbatches: how many; needed if ``microbatches`` has no length.

        Yields:
            Items in order.  Gradients are complete when the stream is exhausted and every item's backward was called.

        Raises:
            UsageError: the ranks do not agree on the call, or it is made on a closed pipeline.
            PeerFailedError: another rank failed, or its caller left this loop before an item that is asked for here;
                the next call works if all ranks are alive.
            TransportError: the pipeline is broken, because an earlier failure left too little alive.
            DeadlineError: a wait took longer than ``deadline``; the message says what every rank does.
        """
        return self._items(self._begin("stream", microbatches, num_microbatches))

    def waves(self) -> Waves:
        """Begin a call whose microbatches are not known yet: they are added, and taken, some at a time.

        For a caller who takes several outputs before he gives a gradient, and who plans what comes next while he is
        under way.  ``order``, ``max_in_flight`` and ``on_last_backward`` play no part: what runs ahead is bounded by
        what he adds.

        Raises:
            As ``stream``.
        """
        queue: deque[Microbatch] = deque()
        return Waves(self._begin("waves", iter(queue.popleft, None), 0), queue, self._accord.check_open)

    def forward(self, microbatches: Iterable[Microbatch], *, num_microbatches: int | None = None) -> list[Any]:
        """The outputs of all microbatches at once, on every rank; the caller's backward drives the rest.

        Their graphs are kept until their gradient is given, or until ``flush``.  When a backward call returns, the
        gradients of all that it reached are complete.

        Args:
            microbatches: a sequence, or an iterable that is read lazily.
            num_microbatches: how many; needed if ``microbatches`` has no length.

        Returns:
            for each microbatch what the last stage returned, in the order of ``microbatches``.

        Raises:
            As ``stream``.
        """
        call = self._begin("forward", microbatches, num_microbatches)
        outputs = [call.ask(place) for place in range(len(call.order))]
        call.finish()
        return as_given(outputs, call.order)

    def step(self, microbatches: Iterable[Microbatch], loss_fn: LossFunction) -> list[torch.Tensor]:
        """The closed loop: forwards, losses and backwards of all microbatches in one call.

        Args:
            microbatches: a sequence.
            loss_fn: ``loss_fn(outputs, index)`` returns a tensor with one element; called on the last stage's rank
                only.

        Returns:
            The losses in order, detached, on every rank; on the CPU.

        Raises:
            As ``stream``; UsageError also if ``loss_fn`` returns something else, or a loss that requires no gradient
            though the outputs do.
        """
        call = self._begin("step", microbatches, None, hand_out=False)
        losses = collects_losses(call, loss_fn)
        call.run_closed()
        last = self._graph.rank_of[self._graph.last_stage]
        return as_given(self._accord.everywhere(losses, last, "the losses of step"), call.order)

    def flush(self) -> None:
        """Finish every gradient that was given, and sum those of ties.

        An output whose gradient was not given is dropped, or see ``keep_open``; a stream that is running ends.

        Raises:
            As ``stream``.
        """
        self._accord.end_calls("the pipeline was flushed", self._accord.agree("flush", {}))
        with self._accord.meeting("the sum of tied parameters"):
            self._ties.add_up(self._accord.agreements)

    def meet(self) -> None:
        """Find out, together with all other ranks, whether any of them has failed.

        To be called before collectives of the caller's own that precede a call: a rank that hears of a failure only in
        that call would leave the others alone in them.

        Raises:
            As ``stream``.
        """
        self._accord.agree("meet", {})

    @property
    def bytes_per_channel(self) -> dict[str, int]:
        """Bytes that this rank has sent so far, by channel: ``"x0:0>1"`` is stage 0's output from rank 0 to rank 1."""
        return {str(channel): size for channel, size in self._accord.traffic.sent_bytes.items()}

    def report(self) -> dict[int, str]:
        """For each stage of this rank, what became of its split backwards; empty if there were none.

        A stage whose backward cannot be split runs it whole in the first half, and this says why.
        """
        return dict(sorted(self._split_report.items()))

    def skip(self, item: Yielded) -> None:
        """Say on every rank that ``item`` gets no gradient, and free its memory."""
        self._accord.check_open()
        item._call.skip(item._place)

    def invalidate(self) -> None:
        """Say on every rank, at the same point, that what forwards depend on is about to change.

        To be called right before an optimizer step or any other change of state, which
        cannot be detected, and may be called inside the loop over a stream.  The backwards of all that was given are
        finished, so that the gradients are those of one process.  Forwards that ran ahead of the caller are dropped;
        they run again, under the new state and with the same random numbers, when he asks for their outputs.  Buffers
        of stages are what they were before them.
        """
        self._accord.check_open()
        for call in self._accord.calls:
            if not call.is_over:
                call.invalidate()

    def close(self) -> None:
        """Finish what was given and release the transport.  Always returns; a closed pipeline stays closed."""
        if self._accord.is_closed:
            return
        self._accord.is_closed = True
        try:
            if not self._transport.has_raised:
                self._accord.end_calls("the pipeline was closed", {})
        except Exception as error:
            _log.warning("closed with work undone: %s", error)
        finally:
            self._ties.close()
            self._transport.close()
            self._transport.host = None

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if error is None and not self._accord.is_closed:
                self.flush()
            elif error is not None and not self._transport.has_raised:
                error.add_note(f"while rank {self._transport.rank} was in {self._accord.doing.place}")
                self._transport.fail(failure_of(self._transport.rank, self._accord.doing.place, error))
                self._transport.has_raised = True
        finally:
            self.close()

    def _items(self, call: Call) -> Iterator[Yielded]:
        call.is_running = True  # from the first item on: an iterator that nobody looks at ends with the next call
        try:
            for place, index in enumerate(call.order):
                yield Yielded(index, call.ask(place), call, place)
            call.finish()
        except GeneratorExit:  # maybe in a finaliser, and in another thread
            self._transport.leave(Departure(call.number, call.entry, place + 1, index).packed())
            raise
        finally:
            call.is_running = False

    def _begin(
        self, entry: str, microbatches: Iterable[Microbatch], count: int | None, *, hand_out: bool = True
    ) -> Call:
        with self._accord.refusing(entry):
            given, order = microbatches, None
            if entry in ("stream", "waves") and any(call.is_running for call in self._accord.calls):
                raise UsageError(
                    "a stream of this pipeline is still running: let it run out, leave its loop or close() it first."
                )
            if self._ordering == "planned" and entry != "waves":
                order, microbatches = ordered(microbatches, self._schedule_for)
            source = Microbatches(microbatches, count, uses=1 if hand_out else len(self._stages))
            modes, schedule = Modes.of_caller(), self._schedule_for(source.count)
        held = self._accord.agree(
            entry,
            {
                "schedule": schedule.name,
                "number of microbatches": source.count,
                "grad mode": modes.differentiates,
                "order": order or "as given",
                **self._settings,
                "programs of the schedule": self._digest_for(source.count),
                **passed(given),
            },
        )
        self._accord.end_calls(f"{entry} was called", held, going_on=True)
        executor = self._executor(schedule, source, modes, hand_out=hand_out)
        history = self._history(schedule, modes, hand_out=hand_out, grows=entry == "waves")
        places = order or range(source.count)
        accord = self._accord
        call = Call(accord.count, entry, history, executor, modes, places, accord.gatekeeper, accord.fail)
        executor.on_yield = call.hand
        accord.count += 1
        accord.calls.append(call)
        return call

    def _executor(self, schedule: Schedule, source: Microbatches, modes: Modes, *, hand_out: bool) -> Executor:
        accord = self._accord
        return Executor(
            rank=self._transport.rank,
            graph=self._graph,
            stages=self._stages,
            buffers=self._buffers,
            microbatches=source,
            mailbox=Mailbox(self._transport, accord.deadline, accord.traffic, accord.count, self._verify),
            channels=self._channels,
            differentiates=modes.differentiates,
            reads=reads_on(self._transport.rank, self._graph, hand_out=hand_out),
            hands_out=hand_out,
            split_report=self._split_report,
            call=accord.count,
            seed=self._seed(),
            turns=Turns() if self._transport.shares_process else None,
            recording=self._tracer.begin(schedule, source) if self._tracer else None,
            last_backward=LastBackward(source.count, self._on_last_backward) if self._on_last_backward else None,
            doing=accord.doing,
        )

    def _history(self, schedule: Schedule, modes: Modes, *, hand_out: bool, grows: bool) -> History:
        forward_only, rank = not modes.differentiates, self._transport.rank

        def make_replica() -> Replica:
            if grows:
                return WavesReplica(self._schedule_for, forward_only=forward_only, rank=rank)
            return Replica(schedule, forward_only=forward_only, hand_out=hand_out, rank=rank)

        return History(
            make_replica=make_replica,
            rank=rank,
            memory=self._memory,
            moment=self._memory.beginning((schedule.num_microbatches, forward_only, hand_out, grows)),
        )

    def _seed(self) -> int | None:
        """Of the microbatches' own random numbers; drawn where they begin, from where on the states travel."""
        if not self._per_microbatch:
            return None
        return draw_seed() if self._transport.rank == self._graph.rank_of[0] else 0
