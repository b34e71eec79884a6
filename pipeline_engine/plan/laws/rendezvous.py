"""Rendezvous, laws 2, 3, 5, 7 and 8: performs all lowered programs at once, without time.

A send completes only when its receive is posted, and the caller runs a barrier at every yield: no rank goes on before
all that have yields left stand there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from attrs import define, field

from pipeline_engine.errors import ScheduleError
from pipeline_engine.plan.actions import (
    COMPUTE,
    Action,
    Compute,
    PostRecv,
    Program,
    Publish,
    Send,
    WaitRecv,
    WaitSend,
    Yield,
    makes,
    needs,
    sized_by,
)
from pipeline_engine.plan.laws.deadlock import Stuck, describe
from pipeline_engine.plan.laws.hand_out import outputs_travel
from pipeline_engine.plan.lifetimes import reads_on
from pipeline_engine.plan.numbering import Numbering, numbering_of
from pipeline_engine.plan.schedule import Schedule
from pipeline_engine.plan.values import Output, OutputGrad, Value


def check_rendezvous(schedule: Schedule) -> None:
    """Perform a lowered schedule.

    Raises:
        ScheduleError: a rank waits for ever, reads a value that is not there or was freed, or keeps one.
    """
    numbering, traffic, hand_out = numbering_of(schedule.graph), _Traffic(), outputs_travel(schedule)
    ranks = [_Rank(rank, program, numbering, hand_out, traffic) for rank, program in enumerate(schedule.programs)]
    awake = list(ranks)
    while awake:
        while awake:
            rank = awake.pop()
            rank.run()
            awake += (ranks[number] for number in rank.woken)
            rank.woken.clear()
        awake += _pass_barrier(ranks)
    late = [rank.rank for rank in ranks if rank.yields_left and not rank.is_at_yield]
    stuck = {rank.rank: rank.stuck(late) for rank in ranks if rank.head is not None}
    if stuck:
        raise ScheduleError(describe(schedule.name, stuck))
    for rank in ranks:
        rank.check_freed()


def _pass_barrier(ranks: list[_Rank]) -> list[_Rank]:
    """The ranks that the caller lets on: all that have yields left, once all of them stand at one."""
    having = [rank for rank in ranks if rank.yields_left]
    if not having or not all(rank.is_at_yield for rank in having):
        return []
    first = having[0]
    for rank in having:
        if rank.head != first.head:
            raise ScheduleError(
                f"rank {first.rank} hands out {first.head}, rank {rank.rank} {rank.head}; "
                "yields come in one order on all ranks."
            )
        rank.check_quiet()
    for rank in having:
        rank.hand_out_next()
    return having


@define(eq=False)
class _Traffic:
    """Messages between all ranks, by number, and who waits for one."""

    sent: set[int] = field(factory=set)
    posted: set[int] = field(factory=set)
    receiving: dict[int, int] = field(factory=dict)  # by message that must be sent: the rank that waits
    sending: dict[int, int] = field(factory=dict)  # by message that must be posted: the rank that waits
    outstanding: defaultdict[int, dict[int, PostRecv]] = field(factory=lambda: defaultdict(dict))  # by receiver

    def send(self, message: int, target: int) -> list[int]:
        """A message is sent; returns the ranks that can go on."""
        self.sent.add(message)
        self.outstanding[target].pop(message, None)
        return [self.receiving.pop(message)] if message in self.receiving else []

    def post(self, message: int, target: int, action: PostRecv) -> list[int]:
        """A message's receive is posted; returns the ranks that can go on."""
        self.posted.add(message)
        if message not in self.sent:
            self.outstanding[target][message] = action
        return [self.sending.pop(message)] if message in self.sending else []


@define(eq=False)
class _Rank:
    """One rank's program, how far it has come, and the values that are there.

    Attributes:
        woken: ranks that can go on because of this one.
    """

    rank: int
    program: Program
    numbering: Numbering
    hand_out: bool
    traffic: _Traffic
    step: int = 0
    yields_left: int = 0
    woken: list[int] = field(factory=list)
    _reads_left: dict[int, int] = field(factory=dict)  # of each value that was there, by number
    _lives: dict[int, int] = field(factory=dict)  # how often a value is read here, by offset
    _output: int = field(init=False)  # the offsets of an output and of its gradient
    _gradient: int = field(init=False)
    _verbs: dict[type[Action], Callable[[Any], bool]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._output, self._gradient = self.numbering.number(Output(0)), self.numbering.number(OutputGrad(0))
        self.yields_left = sum(type(action) is Yield for action in self.program)
        self._verbs = {
            **dict.fromkeys(COMPUTE, self._compute),
            Publish: self._publish,
            Yield: lambda _: False,
            Send: self._send,
            PostRecv: self._post,
            WaitRecv: self._wait_receive,
            WaitSend: self._wait_send,
        }

    @property
    def head(self) -> Action | None:
        """The action at which it stands; None at the end."""
        return self.program[self.step] if self.step < len(self.program) else None

    @property
    def is_at_yield(self) -> bool:
        """Whether it stands at a yield whose output is there."""
        head = self.head
        return type(head) is Yield and head.microbatch * self.numbering.width + self._output in self._reads_left

    def run(self) -> None:
        """Go on as far as it can without anybody else."""
        program, verbs = self.program, self._verbs
        while self.step < len(program):
            action = program[self.step]
            if not verbs[type(action)](action):
                return
            self.step += 1

    def hand_out_next(self) -> None:
        """The caller goes on from the yield at which it stands."""
        head = self.head
        assert isinstance(head, Yield)
        base = head.microbatch * self.numbering.width
        self._read(base + self._output, head)
        self._make(base + self._gradient, head)
        self.yields_left -= 1
        self.step += 1

    def check_quiet(self) -> None:
        """Law 8, at a yield."""
        for post in self.traffic.outstanding[self.rank].values():
            raise ScheduleError(
                f"rank {self.rank} step {self.step}   {self.head}: the receive of {post.value} is outstanding and rank "
                f"{post.from_rank} sends it only later; at a yield no such receive may hang on the caller's code."
            )

    def check_freed(self) -> None:
        """Law 5, at the end: every value was read as often as its lifetime says."""
        if not any(left > 0 for left in self._reads_left.values()):
            return
        made = (value for action in self.program for value in makes(action))
        kept = next(value for value in made if self._reads_left[self.numbering.number(value)] > 0)
        missing = self._reads_left[self.numbering.number(kept)]
        raise ScheduleError(
            f"rank {self.rank}: {kept} is never freed, {missing} of its reads are missing; "
            "a value is freed once, after its last use."
        )

    def stuck(self, late: list[int]) -> Stuck:
        """Where it stands and what it waits for; ``late``: ranks that still have to come to a yield."""
        head = self.head
        assert head is not None
        match head:
            case WaitRecv(value, source):
                return Stuck(self.step, head, f"{value}, which rank {source} has not sent", source)
            case WaitSend(value, target):
                return Stuck(self.step, head, f"rank {target} to post {value}", target)
            case Yield() if self.is_at_yield:
                return Stuck(self.step, head, "the other ranks' callers", late[0] if late else self.rank)
            case PostRecv(value, _):
                sizes = [each for each in sized_by(value, self.rank, self.numbering.graph) if not self._has(each)]
                return Stuck(self.step, head, ", ".join(f"the size of {each}" for each in sizes), self.rank)
        missing = [str(value) for value in needs(head, self.numbering.graph) if not self._has(value)]
        return Stuck(self.step, head, ", ".join(missing), self.rank)

    def _has(self, value: Value) -> bool:
        return self.numbering.number(value) in self._reads_left

    def _compute(self, action: Compute) -> bool:
        rule, base = self.numbering.rules[type(action)][action.stage], action.microbatch * self.numbering.width
        for offset in rule.needs:
            if base + offset not in self._reads_left:
                return False
        for offset in rule.reads:
            self._read(base + offset, action)
        if rule.makes != self.numbering.nobodys:
            self._make(base + rule.makes, action)
        return True

    def _publish(self, action: Publish) -> bool:
        base = action.microbatch * self.numbering.width
        returned = base + self.numbering.graph.last_stage
        if returned not in self._reads_left:
            return False
        self._read(returned, action)
        self._make(base + self._output, action)
        return True

    def _send(self, action: Send) -> bool:
        number = self.numbering.number(action.value)
        if number not in self._reads_left:
            return False
        self._read(number, action)
        message = self.numbering.message(action.value, self.rank, action.to_rank)
        self.woken += self.traffic.send(message, action.to_rank)
        return True

    def _post(self, action: PostRecv) -> bool:
        if not all(map(self._has, sized_by(action.value, self.rank, self.numbering.graph))):
            return False
        message = self.numbering.message(action.value, action.from_rank, self.rank)
        self.woken += self.traffic.post(message, self.rank, action)
        return True

    def _wait_receive(self, action: WaitRecv) -> bool:
        message = self.numbering.message(action.value, action.from_rank, self.rank)
        if message not in self.traffic.sent:
            self.traffic.receiving[message] = self.rank
            return False
        self._make(self.numbering.number(action.value), action)
        return True

    def _wait_send(self, action: WaitSend) -> bool:
        message = self.numbering.message(action.value, self.rank, action.to_rank)
        if message not in self.traffic.posted:
            self.traffic.sending[message] = self.rank
            return False
        return True

    def _make(self, number: int, action: Action) -> None:
        offset = number % self.numbering.width
        if number in self._reads_left or offset not in self._lives:
            (value,) = makes(action)
            if number in self._reads_left:
                raise ScheduleError(f"{value} is made 2 times on rank {self.rank}; every value is made exactly once.")
            self._lives[offset] = _life(value, self.rank, self.numbering, self.hand_out)
        self._reads_left[number] = self._lives[offset]

    def _read(self, number: int, action: Action) -> None:
        left = self._reads_left[number]
        if left == 0:
            raise ScheduleError(
                f"rank {self.rank} step {self.step}   {action}: what it reads was freed; "
                "a value is freed once, after its last use."
            )
        self._reads_left[number] = left - 1


def _life(value: Value, rank: int, numbering: Numbering, hand_out: bool) -> int:
    """How often a value is read on a rank; -1 if nobody counts, as for a gradient that only the last stage wants."""
    if isinstance(value, OutputGrad):
        return -1
    return reads_on(rank, numbering.graph, hand_out=hand_out).of(value)
