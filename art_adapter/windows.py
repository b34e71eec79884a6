"""Top-level items in windows that fit the memory, shared out over the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs
from megatron.core import parallel_state

from .agreement import gather, largest
from .forward import FlatForwardPlan, Forward
from .memory import MemoryCheck, forward_bytes, output_bytes, window_widths
from .packing import packed_length
from .requests import (
    ForwardInput,
    ForwardInputs,
    ForwardOutputs,
    MicroBatch,
    MicroBatchStats,
    TrainerRankMemoryError,
    flatten,
    materialize,
    unflatten,
)
from .runtime import Runtime

TOO_LARGE = 1 << 62


@attrs.frozen(eq=False)
class Window:
    """The next top-level items that run together, and this rank's share of them."""

    inputs: list[Any]
    indices: tuple[int, ...]
    plan: FlatForwardPlan
    check: MemoryCheck
    global_count: int
    rejected: int


class Windows(Forward):
    """The part of a trainer that decides how much runs at once."""

    def __init__(
        self, runtime: Runtime, *, memory_budget_bytes: int, items_at_once: int | None, **packing: int
    ) -> None:
        super().__init__(runtime, **packing)
        self.memory_budget_bytes = memory_budget_bytes
        self.items_at_once = items_at_once

    def forward_micro_batches(self, inputs: Iterable[ForwardInputs]) -> Iterator[MicroBatch]:
        """Run top-level items, the same list on every rank, in windows that fit the memory.

        Item i of a window goes to data-parallel rank i modulo their number; a last window may leave a rank empty.

        Raises:
            ValueError: another number of top-level items on some rank, or a request that cannot run.
            TypeError: something that is neither a ForwardInput nor a list of them.
            TrainerRankMemoryError: the smallest window does not fit.
        """
        items = [materialize(item) for item in inputs]
        for request in flatten(items):
            self._forward_item(request)
            self._resolve_slot_ref(request)
        self._validate_replicated_top_level_count(len(items))
        start = 0
        while start < len(items):
            window = self._select_next_micro_batch(items, start)
            yield self._run_window(window, start)
            start += window.global_count

    def dp_rank_forward(self, inputs: ForwardInputs) -> ForwardOutputs:
        """Run this data-parallel rank's own inputs at once; outputs in the same nesting.

        Raises:
            ValueError, TypeError: as ``forward_micro_batches``.
            TrainerRankMemoryError: the inputs do not fit.
        """
        nested = materialize(inputs)
        plan = self._plan_flat_forward(list(flatten(nested)))
        self._require_memory(self._memory_check(plan), context="dp_rank_forward")
        outputs = self._run_flat_plan_with_memory_tracking(plan, context="dp_rank_forward")
        return unflatten(nested, iter(outputs))

    def _run_window(self, window: Window, start: int) -> MicroBatch:
        outputs = iter(self._run_flat_plan_with_memory_tracking(window.plan, context="forward_micro_batches"))
        stats = MicroBatchStats(
            global_start=start,
            global_stop=start + window.global_count,
            global_count=window.global_count,
            local_count=len(window.inputs),
            packed_tokens=window.plan.packed_tokens,
            logical_tokens=window.plan.logical_tokens,
            estimated_required_bytes=window.check.estimated_required_bytes,
            available_bytes=window.check.available_bytes,
            rejected_candidates=window.rejected,
            cold_start=False,
        )
        nested = [unflatten(item, outputs) for item in window.inputs]
        return MicroBatch(inputs=window.inputs, outputs=nested, indices=window.indices, stats=stats)

    def _select_next_micro_batch(self, items: Sequence[Any], start: int) -> Window:
        """The widest window that fits on every rank; all ranks choose the same."""
        dp_rank, dp_size = self._dp_rank_and_size()
        widths = window_widths(len(items) - start, dp_size)[: self.items_at_once]
        checks = self._check_widths(items, start, widths)
        self._require_memory(checks[0], context="forward_micro_batches")
        fitting = [place for place, check in enumerate(checks) if check.fits]
        width, check = widths[fitting[-1]], checks[fitting[-1]]
        indices = tuple(range(start + dp_rank, start + width, dp_size))
        inputs = [items[index] for index in indices]
        plan = self._plan_flat_forward(list(flatten(inputs)))
        return Window(inputs, indices, plan, check, width, len(checks) - len(fitting))

    def _check_widths(self, items: Sequence[Any], start: int, widths: Sequence[int]) -> list[MemoryCheck]:
        dp_rank, dp_size = self._dp_rank_and_size()
        required: list[int] = []
        for width in widths:
            if required and required[-1] > self.memory_budget_bytes:
                required.append(TOO_LARGE)
            else:
                share = items[start + dp_rank : start + width : dp_size]
                required.append(self._estimate(list(flatten(share))))
        return self._worst(required, self.memory_budget_bytes, group=None)

    def _estimate(self, requests: Sequence[ForwardInput]) -> int:
        depth = self.shared_prefix_max_depth
        lengths = [
            packed_length((requests[index].input_tokens.reshape(-1) for index in indices), max_depth=depth)
            for indices in self._group_active_request_indices(requests).values()
        ]
        config = self.runtime.provider
        return forward_bytes(config, lengths) + output_bytes(config, self._vocabulary, requests)

    def _memory_check(self, plan: FlatForwardPlan, *, sync_across_dp: bool = False) -> MemoryCheck:
        lengths = [group.packed.tokens.numel() for group in plan.groups]
        required = forward_bytes(self.runtime.provider, lengths) + plan.output_bytes
        group = None if sync_across_dp else self._forward_memory_group()
        return self._worst([required], self.memory_budget_bytes, group=group)[0]

    @staticmethod
    def _forward_memory_group() -> Any:
        """The ranks that run one data-parallel rank's forward together."""
        return parallel_state.get_tensor_and_context_parallel_group()

    @staticmethod
    def _require_memory(check: MemoryCheck, *, context: str) -> None:
        if not check.fits:
            raise TrainerRankMemoryError(
                f"{context}: the forward needs an estimated {check.estimated_required_bytes} bytes, "
                f"of which {check.available_bytes} are available; pass fewer or shorter inputs"
            )

    @staticmethod
    def _validate_replicated_top_level_count(count: int) -> None:
        counts = gather(count)
        if any(other != count for other in counts):
            raise ValueError(
                "forward_micro_batches needs the same number of top-level inputs on every rank "
                f"(inputs of one data-parallel rank go to dp_rank_forward); by rank: {counts}"
            )

    def _worst(self, required: Sequence[int], available: int, *, group: Any) -> list[MemoryCheck]:
        *needs, lacks = largest([*required, -available], device=self.device, group=group)
        return [MemoryCheck(need, -lacks) for need in needs]
