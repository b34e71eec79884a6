"""Random models: graphs of stages that return random trees of tensors of every kind, some of them never used."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from attrs import frozen
from hypothesis import strategies as st
from torch import nn

import pipeline_engine as pe
from pipeline_engine.run.cargo import flatten
from tests.oracles.plain import Plain, run_plain
from tests.run.playing import WIDTH
from tests.strategies import chain_for


@dataclasses.dataclass
class Record:
    left: Any
    right: Any


class Pair(NamedTuple):
    left: Any
    right: Any


Make = Callable[[torch.Tensor, "Mixing", torch.Tensor], Any]

KINDS: dict[str, Make] = {
    "float32": lambda h, stage, given: h * 1.5,
    "float64": lambda h, stage, given: h.double(),
    "bfloat16": lambda h, stage, given: h.bfloat16(),
    "complex64": lambda h, stage, given: torch.complex(h, 0.5 * h),
    "int64": lambda h, stage, given: torch.arange(h.numel()),
    "bool": lambda h, stage, given: h.detach() > 0,
    "detached": lambda h, stage, given: h.detach() * 2,
    "scalar": lambda h, stage, given: h.sum(),
    "empty": lambda h, stage, given: h[:0],
    "expanded": lambda h, stage, given: h[:1].expand(3, WIDTH),
    "transposed": lambda h, stage, given: h.T,
    "strided": lambda h, stage, given: h[:, ::2],
    "view": lambda h, stage, given: h.view(-1),
    "same": lambda h, stage, given: h,
    "received": lambda h, stage, given: given,
    "parameter": lambda h, stage, given: stage.weight,
    "constant": lambda h, stage, given: "a word",
}
"""By name, what a leaf of a stage's output is made of: its hidden state, itself, or the first tensor it was given."""

Recipe = Any
"""A tree with names of kinds for leaves."""

recipes: st.SearchStrategy[Recipe] = st.recursive(
    st.sampled_from(sorted(KINDS)),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3),
        st.tuples(inner, inner),
        st.tuples(inner, st.none()),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3),
        st.builds(Record, inner, inner),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=5,
)


def cooked(recipe: Recipe, make: Callable[[str], Any]) -> Any:
    """A recipe's tree, its names replaced."""
    if isinstance(recipe, str):
        return make(recipe)
    if isinstance(recipe, dict):
        return {key: cooked(each, make) for key, each in recipe.items()}
    if isinstance(recipe, (Record, Pair)):
        return type(recipe)(cooked(recipe.left, make), cooked(recipe.right, make))
    if isinstance(recipe, (list, tuple)):
        return type(recipe)([cooked(each, make) for each in recipe])
    return recipe


class Mixing(nn.Module):
    """A stage that mixes what it is given into a hidden state and returns a tree of it.

    Every third tensor that it is given is not used.
    """

    def __init__(self, number: int, recipe: Recipe, frozen: bool, cuts: frozenset[int]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) / 3, requires_grad=not frozen)
        self.number, self.recipe, self.cuts = number, recipe, cuts

    def forward(self, *given: Any, number: int, rows: int) -> Any:
        tensors = tensors_in(given)
        mixed = torch.zeros(rows, WIDTH)
        for place, tensor in enumerate(tensors):
            if (place + self.number) % 3 < 2:
                mixed = mixed + spread(tensor, mixed) / (place + 1)
        if number in self.cuts:
            mixed = mixed.detach()
        hidden = torch.tanh(mixed @ self.weight + 0.1)
        first = next((tensor for tensor in tensors if tensor.requires_grad), hidden)
        return cooked(self.recipe, lambda kind: KINDS[kind](hidden, self, first))


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def spread(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor of any kind as one that can be added to ``like``.

    Torch adds up in the order of memory, which has gaps on one side of a cut only: so it is made dense.
    """
    tensor = tensor.contiguous()
    real = torch.view_as_real(tensor).sum(-1) if tensor.is_complex() else tensor.float()
    return real if real.shape == like.shape else real.sum() / 10


def loss_of_tree(outputs: Any, number: int) -> torch.Tensor:
    """A scalar in which every second tensor is used; without history if those have none."""
    total = torch.zeros(())
    for tensor in tensors_in(outputs)[::2]:
        total = total + (spread(tensor, torch.zeros(())) + number).square().mean()
    return total


@frozen
class Mixture:
    """A model, its graph and schedule, and what it is run on.

    Attributes:
        frozen: stages whose weight needs no gradient.
        cuts: pairs (stage, microbatch): there the history is cut off.
        rows: by microbatch.
        with_grad: microbatches whose input needs a gradient.
    """

    schedule: str
    graph: pe.StageGraph
    recipes: tuple[Recipe, ...]
    frozen: frozenset[int]
    cuts: frozenset[tuple[int, int]]
    rows: tuple[int, ...]
    with_grad: frozenset[int]
    entry: str

    def has(self, kind: str) -> bool:
        """Whether a stage returns a leaf of this kind."""
        found: list[str] = []
        for recipe in self.recipes:
            cooked(recipe, found.append)
        return kind in found

    def stage(self, number: int) -> Mixing:
        cuts = frozenset(microbatch for stage, microbatch in self.cuts if stage == number)
        return Mixing(number, self.recipes[number], number in self.frozen, cuts)

    def batch(self) -> list[pe.Microbatch]:
        """The microbatches anew; each has three inputs."""
        generator = torch.Generator().manual_seed(7)
        return [
            pe.Microbatch(
                (
                    torch.randn(rows, WIDTH, generator=generator).requires_grad_(number in self.with_grad),
                    torch.arange(rows),
                    {"mask": torch.ones(rows, dtype=torch.bool), "scale": torch.tensor(0.5, dtype=torch.float64)},
                ),
                {"number": number, "rows": rows},
            )
            for number, rows in enumerate(self.rows)
        ]

    def plain(self) -> tuple[Plain, list[torch.Tensor | None]]:
        """The same in one process, and the gradients of the microbatches' first inputs."""
        batch = self.batch()
        stages = [self.stage(number) for number in range(self.graph.num_stages)]
        inputs, shared = [each.inputs for each in batch], [each.shared for each in batch]
        truth = run_plain(stages, inputs, shared, loss_of_tree, self.graph.before)
        return truth, [each.inputs[0].grad for each in batch]


@st.composite
def mixtures(draw: st.DrawFn, *, chains: bool) -> Mixture:
    """A chain, or any graph on which the schedule runs, of at most four ranks."""
    name, ranks = draw(st.sampled_from(sorted(pe.SCHEDULES))), draw(st.integers(1, 4))
    graph = chain_for(name, ranks)
    if not chains:
        rank_of = graph.rank_of if name != "gpipe" else draw(placements(ranks))
        graph = pe.StageGraph(draw(edges(len(rank_of))), rank_of)
    stages = range(graph.num_stages)
    rows = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    numbers = st.sampled_from(range(len(rows)))
    return Mixture(
        schedule=name,
        graph=graph,
        recipes=tuple(draw(recipes) for _ in stages),
        frozen=draw(st.frozensets(st.sampled_from(stages))),
        cuts=draw(st.frozensets(st.tuples(st.sampled_from(stages), numbers), max_size=3)),
        rows=tuple(rows),
        with_grad=draw(st.frozensets(numbers)),
        entry=draw(st.sampled_from(["stream", "forward", "step"])),
    )


@st.composite
def edges(draw: st.DrawFn, num_stages: int) -> list[tuple[int, int]]:
    """Edges of a graph in which every stage has a way in and a way out."""
    every = [(before, after) for after in range(num_stages) for before in range(after)]
    chosen = set(draw(st.lists(st.sampled_from(every), max_size=2 * num_stages))) if every else set()
    for stage in range(1, num_stages):
        if not any(after == stage for _, after in chosen):
            chosen.add((draw(st.integers(0, stage - 1)), stage))
    for stage in range(num_stages - 1):
        if not any(before == stage for before, _ in chosen):
            chosen.add((stage, draw(st.integers(stage + 1, num_stages - 1))))
    return sorted(chosen)


@st.composite
def placements(draw: st.DrawFn, num_ranks: int) -> Sequence[int]:
    """Stages on ranks in any order; every rank has one at least."""
    more = draw(st.lists(st.integers(0, num_ranks - 1), max_size=3))
    return draw(st.permutations([*range(num_ranks), *more]))
