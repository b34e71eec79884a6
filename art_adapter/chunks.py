"""This rank's chunks of the model: whether they are the stages that they are taken for, and which of them runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from pipeline_engine import StageGraph, UsageError

from .agreement import gather
from .runtime import language_model
from .scheduling import chain_of


@attrs.frozen
class Chunk:
    """What a chunk says of itself: numbers of its layers from 1, and whether it holds the embedding, or the head."""

    layers: tuple[int, ...]
    embeds: bool
    has_head: bool

    @classmethod
    def of(cls, model: Any) -> Chunk:
        """The words of a GPTModel, wrapped or not."""
        model = language_model(model)
        layers = tuple(layer.layer_number for layer in model.decoder.layers)
        return cls(layers, embeds=bool(model.pre_process), has_head=bool(model.post_process))


def graph_of(chunks: Sequence[Any], process_group: Any) -> StageGraph:
    """The stages that the chunks of all ranks are, in order; collective over the pipeline.

    Args:
        chunks: of this rank.
        process_group: the ranks of the pipeline, in order.

    Raises:
        UsageError: on every rank, if the chunks together are not the model from its embedding to its head.
    """
    told = gather([Chunk.of(chunk) for chunk in chunks], group=process_group)
    check_stages(told)
    return chain_of(ranks=len(told), chunks=len(chunks))


def check_stages(chunks_of_rank: Sequence[Sequence[Chunk]]) -> None:
    """Hold what the ranks have against the one order in which it is a model.

    Raises:
        UsageError: with the first chunk that stands in a wrong place.
    """
    counts = [len(chunks) for chunks in chunks_of_rank]
    if len(set(counts)) > 1:
        raise UsageError(f"every rank of a pipeline holds the same number of chunks; by rank they are {counts}.")
    stages = [(v, rank, chunks[v]) for v in range(counts[0]) for rank, chunks in enumerate(chunks_of_rank)]
    known = 0
    for stage, (v, rank, chunk) in enumerate(stages):
        expected = Chunk(tuple(range(known + 1, known + 1 + len(chunk.layers))), stage == 0, stage == len(stages) - 1)
        if chunk != expected:
            raise UsageError(
                f"chunk {v} of pipeline rank {rank} is not stage {stage} of {len(stages)}: {chunk}, "
                f"where {expected} is needed; runtime.model lists a rank's chunks in the order of the model, "
                "and Megatron numbers their layers by vp_stage."
            )
        known += len(chunk.layers)


@contextlib.contextmanager
def first_is(chunk: Any, chunks: list[Any]) -> Iterator[None]:
    """A trainer's own forward runs the first of its chunks; meanwhile that is ``chunk``."""
    place = next(place for place, each in enumerate(chunks) if each is chunk)
    chunks[0], chunks[place] = chunks[place], chunks[0]
    try:
        yield
    finally:
        chunks[0], chunks[place] = chunks[place], chunks[0]
