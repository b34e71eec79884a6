"""Independent truth about batches: a machine that performs one batch of all ranks under the strictest rendezvous.

Its rules are its own: a receive is taken when it is posted and sent; a send has left when
its receiver has taken it, for a second part is received only then.  A batch must end on its own: nothing in it may
wait for a batch that comes later.
"""

from __future__ import annotations

from collections import defaultdict

from pipeline_engine.plan.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    PostRecv,
    Program,
    Publish,
    Send,
    WaitRecv,
    WaitSend,
    Yield,
)
from pipeline_engine.plan.graph import StageGraph
from pipeline_engine.plan.values import InputGrad, Value

Message = tuple[Value, int, int]


class Rendezvous:
    """All ranks of a graph, batch after batch.

    Attributes:
        performed: for each rank the computing actions in order.
        given: microbatches whose gradient the caller has given; told by the test.
    """

    def __init__(self, graph: StageGraph) -> None:
        self.graph = graph
        self.performed: list[list[Action]] = [[] for _ in range(graph.num_ranks)]
        self.given: set[int] = set()
        self._done: list[set[str]] = [set() for _ in range(graph.num_ranks)]  # names of values on each rank
        self._posted: set[Message] = set()
        self._sent: set[Message] = set()
        self._taken: set[Message] = set()
        self._left: set[Message] = set()
        self._sends: defaultdict[tuple[str, int, int], list[Value]] = defaultdict(list)
        self._posts: defaultdict[tuple[str, int, int], list[Value]] = defaultdict(list)

    def perform(self, batch: tuple[Program, ...]) -> None:
        """Perform a batch to its end.

        Raises:
            AssertionError: a rank cannot go on, or a post or send of the batch has no counterpart in it.
        """
        heads = [0 for _ in batch]
        while any(self._run(rank, program, heads) for rank, program in enumerate(batch)):
            pass
        for rank, program in enumerate(batch):
            assert heads[rank] == len(program), f"rank {rank} is stuck at {program[heads[rank]]} of {_text(batch)}"
        assert self._posted == self._sent, f"{self._posted ^ self._sent} has no counterpart in {_text(batch)}"
        assert self._sends == self._posts, f"the order of sends is not that of receives in {_text(batch)}"

    def is_silent(self) -> bool:
        """Whether nothing is on its way and nothing is waited for."""
        return self._posted == self._taken and self._sent == self._left

    def unread(self) -> set[Message]:
        """Messages that were received and not looked at yet."""
        return self._sent - self._taken

    def _run(self, rank: int, program: Program, heads: list[int]) -> bool:
        before = heads[rank]
        while heads[rank] < len(program) and self._may(rank, program[heads[rank]]):
            self._take(rank, program[heads[rank]])
            heads[rank] += 1
        return heads[rank] > before

    def _may(self, rank: int, action: Action) -> bool:
        here, last = self._done[rank], self.graph.last_stage
        match action:
            case Forward(stage, m):
                return all(f"x[{before},{m}]" in here for before, after in self.graph.edges if after == stage)
            case BackwardWeight(stage, m):
                return f"dx[{stage},{m}]" in here
            case Backward(stage, m) | BackwardInput(stage, m) if stage == last:
                return f"x[{stage},{m}]" in here and m in self.given
            case Backward(stage, m) | BackwardInput(stage, m):
                grads = [f"dx[{after},{m}]" for before, after in self.graph.edges if before == stage]
                return f"x[{stage},{m}]" in here and all(grad in here for grad in grads)
            case Publish(m):
                return f"x[{last},{m}]" in here
            case Yield(m):
                return f"y[{m}]" in here
            case Send(value, _):
                return str(value) in here
            case PostRecv(InputGrad(stage, m), _):
                takers = [before for before, after in self.graph.edges if after == stage]
                return all(f"x[{each},{m}]" in here for each in takers if self.graph.rank_of[each] == rank)
            case PostRecv():
                return True
            case WaitRecv(value, source):
                return {(value, source, rank)} <= self._posted & self._sent
            case WaitSend(value, target):
                return (value, rank, target) in self._taken
        raise AssertionError(f"{action} has no rule here")

    def _take(self, rank: int, action: Action) -> None:
        match action:
            case Forward(stage, m):
                self._add(rank, f"x[{stage},{m}]")
                self.performed[rank].append(action)
            case Backward(stage, m) | BackwardInput(stage, m):
                self._add(rank, f"dx[{stage},{m}]")
                self.performed[rank].append(action)
            case BackwardWeight(stage, m):
                self._add(rank, f"dw[{stage},{m}]")
                self.performed[rank].append(action)
            case Publish(m):
                self._add(rank, f"y[{m}]")
            case Yield(m):
                self._add(rank, f"yielded {m}")
            case Send(value, target):
                assert (value, rank, target) not in self._sent, f"{action} for the second time"
                self._sent.add((value, rank, target))
                self._sends[_channel(value, rank, target)].append(value)
            case PostRecv(value, source):
                assert (value, source, rank) not in self._posted, f"{action} for the second time"
                self._posted.add((value, source, rank))
                self._posts[_channel(value, source, rank)].append(value)
            case WaitRecv(value, source):
                self._taken.add((value, source, rank))
                self._add(rank, str(value))
            case WaitSend(value, target):
                assert (value, rank, target) not in self._left, f"{action} for the second time"
                self._left.add((value, rank, target))

    def _add(self, rank: int, name: str) -> None:
        assert name not in self._done[rank], f"{name} is made for the second time on rank {rank}"
        self._done[rank].add(name)


def _channel(value: Value, source: int, target: int) -> tuple[str, int, int]:
    return (f"{type(value).__name__}{getattr(value, 'stage', '')}", source, target)


def _text(batch: tuple[Program, ...]) -> str:
    return "\n".join(" ".join(map(str, program)) for program in batch)
