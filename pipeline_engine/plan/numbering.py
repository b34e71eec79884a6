"""Numbering: values as plain ints, and the law read off once for each verb and stage.

No action needs a value of another microbatch, so what the law says of microbatch 0 holds of all.  Value ``offset`` of
microbatch m has the number ``m * width + offset``; inner loops add two ints where they would hash a nested value.
"""

from __future__ import annotations

from functools import lru_cache

from attrs import field, frozen

from pipeline_engine.plan.actions import (
    BACKWARD,
    COMPUTE,
    Compute,
    Forward,
    maker_of,
    makes,
    needs,
    sized_by,
    takers_of,
)
from pipeline_engine.plan.graph import StageGraph
from pipeline_engine.plan.lifetimes import read_by
from pipeline_engine.plan.values import Activation, InputGrad, OutputGrad, Value


@frozen
class Travel:
    """A value that one verb at one stage sends to another rank."""

    kind: type[Activation] | type[InputGrad]
    stage: int
    offset: int
    target: int
    sized_by: tuple[int, ...]  # offsets of what the target must have before it can post the receive


@frozen
class Rule:
    """The law for one verb at one stage, on the rank that owns it.

    Attributes:
        makes: offset of the value that it makes, or of a value that nobody needs.
        needs: offsets of the values that it needs.
        reads: those of them that are freed after their last read; the others its stage keeps for itself.
        arrives: those of them that other ranks make.
        travels: where what it makes is sent.
        wakes: the ranks that may go on because of it, its own not among them.
    """

    is_backward: bool
    is_last_forward: bool
    makes: int
    needs: tuple[int, ...]
    reads: tuple[int, ...]
    arrives: tuple[int, ...]
    travels: tuple[Travel, ...]
    wakes: tuple[int, ...]


@frozen(eq=False)
class Numbering:
    """The numbers of a graph's values, and the rules of its verbs.

    Attributes:
        width: how many numbers a microbatch has.
        rules: by verb and stage.
    """

    graph: StageGraph
    width: int = field(init=False)
    _stages: int = field(init=False)
    _ranks: int = field(init=False)
    rules: dict[type[Compute], tuple[Rule, ...]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        stages = range(self.graph.num_stages)
        object.__setattr__(self, "width", 2 * len(stages) + 3)
        object.__setattr__(self, "_stages", len(stages))
        object.__setattr__(self, "_ranks", self.graph.num_ranks)
        rules = {verb: tuple(self._rule(verb(stage, 0)) for stage in stages) for verb in COMPUTE}
        object.__setattr__(self, "rules", rules)

    def offset(self, value: Value) -> int:
        """The number of a value within its microbatch."""
        return self.number(value) - value.microbatch * self.width

    @property
    def nobodys(self) -> int:
        """The offset of a value that nobody needs."""
        return self.width - 1

    def number(self, value: Value) -> int:
        """The number of a value among all."""
        base = value.microbatch * self.width
        if isinstance(value, Activation):  # not a match, which takes three times as long
            return base + value.stage
        if isinstance(value, InputGrad):
            return base + self._stages + value.stage
        return base + 2 * self._stages + isinstance(value, OutputGrad)

    def message(self, value: Value, source: int, target: int) -> int:
        """The number of a message among all that can be; of one microbatch modulo ``width * ranks ** 2``."""
        return (self.number(value) * self._ranks + source) * self._ranks + target

    def rule(self, action: Compute) -> Rule:
        """The rule of a computing action."""
        return self.rules[type(action)][action.stage]

    def name(self, action: Compute, number: int) -> Value:
        """The value with that number, which ``action`` needs."""
        return next(value for value in needs(action, self.graph) if self.number(value) == number)

    def _rule(self, action: Compute) -> Rule:
        graph, rank = self.graph, self.graph.rank_of[action.stage]
        made = makes(action)
        needed = needs(action, graph)
        travels = tuple(self._travel(value, target) for value in made for target in takers_of(value, graph))
        return Rule(
            is_backward=isinstance(action, BACKWARD),
            is_last_forward=isinstance(action, Forward) and action.stage == graph.last_stage,
            makes=self.offset(made[0]) if made else self.nobodys,
            needs=tuple(map(self.offset, needed)),
            reads=tuple(map(self.offset, read_by(action, graph))),
            arrives=tuple(self.offset(value) for value in needed if maker_of(value, graph) != rank),
            travels=travels,
            wakes=tuple(travel.target for travel in travels),
        )

    def _travel(self, value: Value, target: int) -> Travel:
        assert isinstance(value, (Activation, InputGrad))
        sizes = tuple(self.offset(known) for known in sized_by(value, target, self.graph))
        return Travel(type(value), value.stage, self.offset(value), target, sizes)


@lru_cache(maxsize=16)
def numbering_of(graph: StageGraph) -> Numbering:
    """The numbering of a graph, remembered for the next call."""
    return Numbering(graph)
