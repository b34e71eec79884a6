"""Which combinations of parallel sizes a pipelined trainer runs, as data, each with its reason."""

from __future__ import annotations

from typing import Any

import attrs
from megatron.core import parallel_state


class UnsupportedTopologyError(NotImplementedError):
    """A combination of parallel sizes that cannot run; the message says why and what to use instead."""


@attrs.frozen
class Support:
    """One row of the table.

    Attributes:
        combination: how it is spoken of.
        supported: whether it runs.
        reason: what is known of it.
        cure: what to do if it does not run.
    """

    combination: str
    supported: bool
    reason: str
    cure: str


SUPPORT: dict[str, Support] = {
    "pp": Support("PP > 1, one chunk per rank", True, "run on CPU with gloo; not run on a GPU", ""),
    "pp+dp": Support("PP > 1 with DP > 1", True, "run on CPU with gloo; not run on a GPU", ""),
    "pp+tp": Support(
        "PP > 1 with TP > 1",
        True,
        "run on CPU with gloo, with sequence parallelism and, over the reference, without; not run on a GPU",
        "",
    ),
    "pp+cp": Support(
        "PP > 1 with CP > 1",
        True,
        "run on CPU with gloo over the reference; over ART, whose own CP needs a GPU, it is not run",
        "",
    ),
    "pp+tp+cp": Support(
        "PP > 1 with TP > 1 and CP > 1",
        True,
        "run on CPU with gloo over the reference: `canary --pp 2 --tp 2 --cp 2`, eight processes, bit for bit",
        "",
    ),
    "pp+ep": Support("PP > 1 with EP > 1", False, "expert gradients across stages are not written yet", "use EP=1"),
    "virtual": Support(
        "several local chunks (len(runtime.model) > 1)",
        True,
        "run on CPU with gloo, with PP=1 too; not run on a GPU",
        "",
    ),
    "recompute": Support(
        "PP > 1 with activation recomputation",
        True,
        "over ART, whose LoRA keeps the slot for the recomputed forward; the reference refuses it everywhere",
        "",
    ),
    "tied": Support(
        "PP > 1 with tied embeddings",
        True,
        "run on CPU with gloo; ART steps no base weight, so that the copies on the first and last stage stay equal; "
        "the reference does with base_model=True: their gradients are summed, and they stay equal to the last bit",
        "",
    ),
}


@attrs.frozen
class Topology:
    """Parallel sizes of the world, and how many chunks this rank has."""

    pipeline: int
    tensor: int
    context: int
    expert: int
    chunks: int

    @classmethod
    def of(cls, runtime: Any) -> Topology:
        """What Megatron's parallel state and the runtime say; where there is no parallel state, nothing is cut."""
        if not parallel_state.model_parallel_is_initialized():
            return cls(1, 1, 1, 1, chunks=len(runtime.model))
        return cls(
            pipeline=parallel_state.get_pipeline_model_parallel_world_size(),
            tensor=parallel_state.get_tensor_model_parallel_world_size(),
            context=parallel_state.get_context_parallel_world_size(),
            expert=parallel_state.get_expert_model_parallel_world_size(),
            chunks=len(runtime.model),
        )

    @property
    def is_pipelined(self) -> bool:
        """Whether the model is cut into stages."""
        return self.pipeline > 1 or self.chunks > 1


def check_supported(topology: Topology, error: type[UnsupportedTopologyError] = UnsupportedTopologyError) -> None:
    """Refuse a pipelined combination that cannot run, before any rank talks to another about it.

    Raises:
        UnsupportedTopologyError: of the type ``error``, with the reason and the cure.
    """
    if not topology.is_pipelined:
        return
    sizes = {
        "virtual": topology.chunks,
        "pp+tp": topology.tensor,
        "pp+cp": topology.context,
        "pp+ep": topology.expert,
    }
    for name, size in sizes.items():
        if size > 1:
            _refuse(name, error)


def _refuse(name: str, error: type[UnsupportedTopologyError]) -> None:
    row = SUPPORT[name]
    if not row.supported:
        raise error(f"{row.combination} is not supported: {row.reason}; {row.cure}.")


def table() -> str:
    """``SUPPORT`` in Markdown, as the README shows it."""
    lines = ["| combination | runs | what is known of it | instead |", "|---|---|---|---|"]
    for row in SUPPORT.values():
        lines.append(f"| {row.combination} | {'yes' if row.supported else 'no'} | {row.reason} | {row.cure} |")
    return "\n".join(lines)
