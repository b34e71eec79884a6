"""Check: the laws of a schedule, each with a counter-example that a person can read.

 1. Every forward and every backward (or input and weight pair) of every stage and microbatch exactly once, in range,
    on the rank that owns the stage.
 2. What an action needs is made before it, on its rank or received there.
 3. No deadlock under rendezvous: a send completes only when its receive is posted.
 4. On each channel the order of the sends equals the order of the receives.
 5. What is sent is waited for, what is posted is received, each exactly once; nothing is read after it was freed.
 6. What is drawn, checked, simulated and run is one object: what runs is the lowered schedule that is checked here.
 7. With every gate from k on closed every rank still reaches its yield of k; yields come in one order on all ranks.
 8. At a yield no receive is outstanding whose send depends on what this rank does later.

Laws 3, 7 and 8 are checked together by a machine that performs all programs under rendezvous for a caller who runs a
barrier at every yield: no rank goes on before all stand there.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from attrs import define, field

from pipeline_engine.errors import ScheduleError
from pipeline_engine.plan.actions import (
    BACKWARD,
    COMPUTE,
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    PostRecv,
    Program,
    Send,
    WaitRecv,
    WaitSend,
    Yield,
    makes,
    needs,
    sized_by,
)
from pipeline_engine.plan.advance import lower
from pipeline_engine.plan.schedule import Schedule
from pipeline_engine.plan.values import Channel, Output, Value, channel_of


def check(schedule: Schedule) -> None:
    """Hold a schedule to the laws; the computing verbs as given, and the lowered program that really runs.

    Args:
        schedule: computing verbs only, or lowered.

    Raises:
        ScheduleError: a law is broken; the message is a short counter-example in actions and ranks.
    """
    check_in_range(schedule)
    check_exactly_once(schedule)
    if not schedule.is_lowered:
        _Machine(schedule, gated=False).run()
    lowered = lower(schedule)
    check_hand_out(lowered)
    check_pairs(lowered)
    check_channel_order(lowered)
    _Machine(lowered, gated=True).run()


def check_in_range(schedule: Schedule) -> None:
    """Law 1, first part: stages and microbatches exist, and the stage is the rank's own."""
    graph, m = schedule.graph, schedule.num_microbatches
    for rank, step, action in _steps(schedule.programs):
        if not isinstance(action, COMPUTE):
            continue
        if action.stage >= graph.num_stages:
            raise ScheduleError(f"rank {rank} step {step}   {action}: stages run 0..{graph.num_stages - 1}.")
        if action.microbatch >= m:
            raise ScheduleError(f"rank {rank} step {step}   {action}: microbatches run 0..{m - 1}.")
        if (owner := graph.rank_of[action.stage]) != rank:
            raise ScheduleError(f"rank {rank} step {step}   {action}: stage {action.stage} is owned by rank {owner}.")


def check_exactly_once(schedule: Schedule) -> None:
    """Law 1, second part: each forward and each backward exactly once."""
    counts = Counter(action for _, _, action in _steps(schedule.programs) if isinstance(action, COMPUTE))
    for action, count in counts.items():
        if count > 1:
            raise ScheduleError(f"{action} is performed {count} times; every action is performed exactly once.")
    backwards = any(isinstance(action, BACKWARD) for action in counts)
    for stage in range(schedule.graph.num_stages):
        for m in range(schedule.num_microbatches):
            if not counts[Forward(stage, m)]:
                raise ScheduleError(f"{Forward(stage, m)} is missing; every forward is performed exactly once.")
            if backwards:
                _check_backward(stage, m, counts)


def _check_backward(stage: int, m: int, counts: Counter[Compute]) -> None:
    whole = counts[Backward(stage, m)]
    first, second = counts[BackwardInput(stage, m)], counts[BackwardWeight(stage, m)]
    if (whole, first, second) not in ((1, 0, 0), (0, 1, 1)):
        raise ScheduleError(
            f"stage {stage}, microbatch {m}: {whole} x B, {first} x I, {second} x W; "
            "a backward is performed once, whole or as an I and a W."
        )


def check_hand_out(schedule: Schedule) -> None:
    """Law 7, first part: each output is handed out once on every rank that outputs reach."""
    if not schedule.is_lowered:
        return
    travels = any(isinstance(a, Send) and isinstance(a.value, Output) for _, _, a in _steps(schedule.programs))
    for rank in range(schedule.graph.num_ranks) if travels else [schedule.graph.rank_of[schedule.graph.last_stage]]:
        counts = Counter(action for action in schedule.programs[rank] if isinstance(action, Yield))
        for action in (Yield(m) for m in range(schedule.num_microbatches)):
            if counts[action] != 1:
                raise ScheduleError(
                    f"rank {rank} performs {action} {counts[action]} times; an output is handed out once on every rank."
                )


def check_pairs(schedule: Schedule) -> None:
    """Law 5: each send has its wait, each post its receive, exactly once and in that order."""
    for rank, program in enumerate(schedule.programs):
        open_sends: dict[tuple[Value, int], int] = {}
        open_posts: dict[tuple[Value, int], int] = {}
        for step, action in enumerate(program):
            match action:
                case Send(value, peer):
                    _open(open_sends, (value, peer), rank, step, action)
                case WaitSend(value, peer):
                    _settle(open_sends, (value, peer), rank, step, action)
                case PostRecv(value, peer):
                    _open(open_posts, (value, peer), rank, step, action)
                case WaitRecv(value, peer):
                    _settle(open_posts, (value, peer), rank, step, action)
        for (value, peer), step in (open_sends | open_posts).items():
            raise ScheduleError(
                f"rank {rank} step {step}   {program[step]}: {value} (rank {peer}) is never waited for; "
                "what is sent or posted is waited for exactly once."
            )


def _open(pending: dict[tuple[Value, int], int], key: tuple[Value, int], rank: int, step: int, action: Action) -> None:
    if key in pending:
        raise ScheduleError(f"rank {rank} step {step}   {action}: the same was started in step {pending[key]}.")
    pending[key] = step


def _settle(
    pending: dict[tuple[Value, int], int], key: tuple[Value, int], rank: int, step: int, action: Action
) -> None:
    if key not in pending:
        raise ScheduleError(f"rank {rank} step {step}   {action}: there is nothing to wait for.")
    del pending[key]


def check_channel_order(schedule: Schedule) -> None:
    """Law 4: on each channel the sends and the posted receives name the same values in the same order."""
    sends: defaultdict[Channel, list[Value]] = defaultdict(list)
    posts: defaultdict[Channel, list[Value]] = defaultdict(list)
    for rank, _, action in _steps(schedule.programs):
        match action:
            case Send(value, to_rank):
                sends[channel_of(value, rank, to_rank)].append(value)
            case PostRecv(value, from_rank):
                posts[channel_of(value, from_rank, rank)].append(value)
    for channel in sends.keys() | posts.keys():
        for place, (sent, posted) in enumerate(zip(sends[channel], posts[channel], strict=False)):
            if sent != posted:
                raise ScheduleError(
                    f"channel {channel}: message {place} is sent as {sent} and received as {posted}; "
                    "sends and receives of a channel have one order."
                )
        if len(sends[channel]) != len(posts[channel]):
            raise ScheduleError(f"channel {channel}: {len(sends[channel])} sends meet {len(posts[channel])} receives.")


@define
class _Machine:
    """Performs all programs at once, without time, under rendezvous."""

    schedule: Schedule
    gated: bool  # whether every yield is a barrier; without it values travel by themselves
    next: list[int] = field(init=False)
    here: list[set[Value]] = field(init=False)
    made: set[Value] = field(init=False, factory=set)
    sent: set[tuple[Value, int, int]] = field(init=False, factory=set)
    posted: set[tuple[Value, int, int]] = field(init=False, factory=set)

    def __attrs_post_init__(self) -> None:
        self.next = [0 for _ in self.schedule.programs]
        self.here = [set() for _ in self.schedule.programs]

    def run(self) -> None:
        while self._move() or self._pass_barrier():
            pass
        if any(self._head(rank) is not None for rank in range(len(self.next))):
            raise ScheduleError(self._deadlock())

    def _move(self) -> bool:
        moved = False
        for rank in range(len(self.next)):
            while (action := self._head(rank)) is not None and not self._waits_for(rank, action):
                self._perform(rank, action)
                moved = True
        return moved

    def _head(self, rank: int) -> Action | None:
        program = self.schedule.programs[rank]
        return program[self.next[rank]] if self.next[rank] < len(program) else None

    def _waits_for(self, rank: int, action: Action) -> list[str]:
        match action:
            case WaitRecv(value, source):
                return [] if (value, source, rank) in self.sent else [f"{value}, which rank {source} has not sent"]
            case WaitSend(value, target):
                return [] if (value, rank, target) in self.posted else [f"rank {target} to post {value}"]
            case Yield(m) if self.gated and Output(m) in self.here[rank]:
                return ["the other ranks' callers"]
            case PostRecv(value, _):
                known = sized_by(value, rank, self.schedule.graph)
                return [f"the size of {each}" for each in known if each not in self.here[rank]]
        made = self.here[rank] if self.gated else self.made
        return [
            str(value)
            for value in needs(action, self.schedule.graph)
            if value not in made and not self._is_given(value)
        ]

    def _is_given(self, value: Value) -> bool:
        return not self.gated and str(value).startswith("dy")

    def _perform(self, rank: int, action: Action) -> None:
        for value in makes(action):
            if value in self.here[rank]:
                raise ScheduleError(f"{value} is made 2 times on rank {rank}; every value is made exactly once.")
            self.here[rank].add(value)
            self.made.add(value)
        match action:
            case Send(value, target):
                self.sent.add((value, rank, target))
            case PostRecv(value, source):
                self.posted.add((value, source, rank))
        self.next[rank] += 1

    def _pass_barrier(self) -> bool:
        """All ranks that have yields left stand at one: let the caller on, or say what is wrong."""
        heads = {rank: self._head(rank) for rank in range(len(self.next)) if self._has_yield_left(rank)}
        yields = {rank: head for rank, head in heads.items() if isinstance(head, Yield)}
        if not yields or len(yields) < len(heads):
            return False
        if any(Output(head.microbatch) not in self.here[rank] for rank, head in yields.items()):
            return False
        first, head = next(iter(yields.items()))
        for rank, other in yields.items():
            if other != head:
                raise ScheduleError(
                    f"rank {first} hands out {head}, rank {rank} {other}; yields come in one order on all ranks."
                )
            self._check_quiet(rank, other)
            self._perform(rank, other)
        return True

    def _has_yield_left(self, rank: int) -> bool:
        program = self.schedule.programs[rank]
        return any(isinstance(program[step], Yield) for step in range(self.next[rank], len(program)))

    def _check_quiet(self, rank: int, action: Yield) -> None:
        for value, source, target in self.posted - self.sent:
            if target == rank:
                raise ScheduleError(
                    f"rank {rank} step {self.next[rank]}   {action}: the receive of {value} is outstanding and rank "
                    f"{source} sends it only later; at a yield no such receive may hang on the caller's code."
                )

    def _deadlock(self) -> str:
        """One line for each rank that still has something to do."""
        lines = [
            f"rank {rank} step {self.next[rank]}   {head}   waits for {', '.join(self._waits_for(rank, head))}"
            for rank in range(len(self.next))
            if (head := self._head(rank)) is not None
        ]
        return "\n".join([f"schedule {self.schedule.name!r} deadlocks:", *lines])


def _steps(programs: tuple[Program, ...]) -> list[tuple[int, int, Action]]:
    return [(rank, step, action) for rank, program in enumerate(programs) for step, action in enumerate(program)]
