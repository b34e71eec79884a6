"""The smallest trainer with TrainerRank's public surface, over a Megatron GPTModel on one pipeline stage.

It is the reference that a pipelined trainer must agree with, and the class whose few seam methods a pipelined
trainer overrides. A forward goes this way, in ART and here:

    forward_micro_batches | dp_rank_forward
        plan = _plan_flat_forward(requests)                       one group per slot
        _run_flat_plan_with_memory_tracking(plan, context=...)
            _execute_flat_plan(plan)                              for each group, under its slot:
                prepared = _prepare_packed_forward(group.packed)
                _forward_packed(group.items, prepared)
                    _project_head(items, prepared, _gather_sequence_parallel_hidden(_decoder_hidden(prepared)))
                _track_slot_graph_outputs(group.slot_ref, outputs)

Everything is deterministic, and what a group computes depends on that group alone.
"""

from __future__ import annotations

from . import base_model as base_weights
from .runtime import Runtime
from .stepping import Stepping
from .windows import Windows


class ReferenceTrainerRank(Windows, Stepping):
    """See ART's TrainerRank; what is not here: publishing, saving the state of custom heads.

    Outputs of a context-parallel rank are those of its own share of each sequence's tokens, as in ART.

    Args:
        runtime: this rank's model, built for the parallel state that is in force.
        head_chunk_tokens: rows of logits that exist at a time, where logits themselves are not asked for.
        shared_prefix_max_depth: nested levels of common beginnings that are stored once; 0 turns sharing off.
        memory_budget_bytes: what a window's estimate may reach.
        items_at_once: the most top-level items of a window on one data-parallel rank, whatever the memory; 1 or more.
        base_model: whether the base weights are trained too. They are the checkpoint None, which ``optim_step`` steps
            like any other; every forward gives them gradients, also one through a slot. ART trains slots only.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        head_chunk_tokens: int = 512,
        shared_prefix_max_depth: int = 1,
        memory_budget_bytes: int = 2 << 30,
        items_at_once: int | None = None,
        base_model: bool = False,
    ) -> None:
        super().__init__(
            runtime,
            head_chunk_tokens=head_chunk_tokens,
            shared_prefix_max_depth=shared_prefix_max_depth,
            memory_budget_bytes=memory_budget_bytes,
            items_at_once=items_at_once,
        )
        if base_model:
            self._checkpoint_slot_params_by_name[None] = base_weights.train(runtime.model)
