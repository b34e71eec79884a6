"""Callers drawn by Hypothesis: what they ask for, how much may run at once, and what they do in their loop."""

from __future__ import annotations

from typing import Any, Literal

import attrs
import torch
from hypothesis import strategies as st

from .hosts import WHOLE
from .playing import Play, flat

LITTLE, AMPLE = 3_000_000, 2 << 30
"""Bytes of memory in which one item of three requests fits, or some smaller ones; and in which everything does."""
CUT = 1
"""Tokens of a microbatch: every root of a window is one."""
Request = dict[str, Any]
"""What is asked for beyond the log-probabilities of the targets, and of which slot."""
Gives = Literal["now", "later", "never"]
"""A backward for this window and those before it that wait; at the next backward; none, and for those neither."""
Does = Literal["nothing", "selects A", "selects B", "drops gradients", "leaves"]


@attrs.frozen
class Turn:
    """What a caller does with one window: about its backward, and then."""

    gives: Gives
    does: Does


@attrs.frozen
class Caller:
    """One loop over windows.

    Attributes:
        items: top-level items, each of some requests.
        items_at_once, memory: the most items, and the most bytes of a window.
        length: tokens of a microbatch; None for what the trainer chooses.
        turns: at each window; after the last of them they begin again.
    """

    items: tuple[tuple[Request, ...], ...]
    items_at_once: int | None
    memory: int
    length: int | None
    turns: tuple[Turn, ...]

    def __call__(self, play: Play) -> None:
        """The same on every rank, on any number of stages."""
        trainer = play.trainer
        trainer.items_at_once, trainer.memory_budget_bytes = self.items_at_once, self.memory
        if hasattr(trainer, "stages"):
            trainer._microbatch_tokens = self.length
        numbers = iter(range(100))
        items = [[play.request(next(numbers), **request) for request in item] for item in self.items]
        waiting: list[torch.Tensor] = []
        for place, window in enumerate(trainer.forward_micro_batches(items)):
            turn = self.turns[place % len(self.turns)]
            play.note_outputs(f"window {place} {window.indices}", window.outputs)
            waiting += losses_of(play, window.outputs)
            del window
            waiting = [] if turn.gives == "never" else waiting
            if turn.gives == "now":
                waiting = backward(waiting)
            match turn.does:
                case "selects A" | "selects B":
                    trainer.set_checkpoint(turn.does[-1])
                case "drops gradients":
                    trainer.zero_grad()
                case "leaves":
                    break
        backward(waiting)
        trainer.dp_reduce(torch.zeros(1))  # all are here: nobody hangs
        with torch.no_grad():  # with several chunks a rank may owe backwards until the next call
            trainer.dp_rank_forward(play.request(0))
        play.note_gradients()


def losses_of(play: Play, outputs: Any) -> list[torch.Tensor]:
    losses = [play.loss([each]) for each in flat(outputs)]
    return [loss for loss in losses if loss.requires_grad]


def backward(losses: list[torch.Tensor]) -> list[torch.Tensor]:
    """One backward for all of them; none of them waits after that."""
    if losses:
        torch.stack(losses).sum().backward()
    return []


BUSY = Caller(
    items=(
        ({}, {"logits": True}),
        ({}, {"checkpoint": "B"}),
        ({"top_k": 2}, {}),
        ({},),
        ({}, {}, {"checkpoint": None}),
    ),
    items_at_once=1,
    memory=AMPLE,
    length=CUT,
    turns=(
        Turn("later", "selects B"),
        Turn("now", "nothing"),
        Turn("never", "drops gradients"),
        Turn("now", "selects A"),
    ),
)
"""He does everything but leave."""


def callers() -> st.SearchStrategy[Caller]:
    """Any caller of two to six items."""
    asks = st.sampled_from([{}, {"logits": True}, {"top_k": 2}, {"hidden_states": True}])
    slots = st.sampled_from([{}, {}, {"checkpoint": "B"}, {"checkpoint": None}])
    requests = st.builds(lambda ask, slot: {**ask, **slot}, asks, slots)
    does = st.sampled_from(["nothing", "nothing", "selects B", "selects A", "drops gradients", "leaves"])
    return st.builds(
        Caller,
        items=_tuples(_tuples(requests, 1, 3), 2, 6),
        items_at_once=st.sampled_from([1, 2, 3, None]),
        memory=st.sampled_from([LITTLE, AMPLE]),
        length=st.sampled_from([CUT, 12, WHOLE, None]),
        turns=_tuples(st.builds(Turn, st.sampled_from(["now", "now", "later", "never"]), does), 1, 4),
    )


def _tuples(elements: st.SearchStrategy[Any], least: int, most: int) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(elements, min_size=least, max_size=most).map(tuple)
