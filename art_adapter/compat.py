"""The one place that touches private names of Megatron or ART."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

HEAD_PARAMETER = "_art_custom_checkpoint_param"
"""The attribute by which ART, and we, mark a parameter of a custom head."""


def slot_parameters(trainer: Any, kind: Any, name: str) -> tuple[torch.nn.Parameter, ...]:
    """The LoRA parameters of a slot on this rank."""
    from .lora import SlotRef, parameters

    return parameters(trainer._sites, SlotRef(kind, name))


def slot_parameters_by_name(trainer: Any) -> list[tuple[str, torch.nn.Parameter]]:
    """The LoRA parameters of all slots on this rank, by slot and by their name in the whole model."""
    return [
        (f"{ref.name}/{site.name}.{half}", parameter)
        for site in trainer._sites
        for ref, adapter in site.adapters.items()
        for half, parameter in (("lora_A", adapter.A), ("lora_B", adapter.B))
    ]


def preprocess(model: Any, tokens: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor | None, Any]:
    """The decoder's input and its rotary table, one row per packed token.

    Megatron's table counts places in the row; a packed token stands at its place in its own sequence.

    Returns:
        decoder_input: ``[packed, 1, hidden]``, or None on a stage that reads what ``set_input_tensor`` gave it.
        rotary: ``[packed, 1, 1, rotary]`` float32.
    """
    decoder_input, rotary = model._preprocess(input_ids=tokens, position_ids=position_ids)[:2]
    return decoder_input, rotary[position_ids[0]]


def run_megatron_on_cpu() -> None:
    """Let Megatron's GPTModel run forward and backward without CUDA; with CUDA this does nothing.

    Two things ask for a GPU: buffers are made on ``torch.cuda.current_device()``, and dropout forks CUDA's
    random state. Activation recomputation, Megatron's own schedules and its optimizers need more than this.
    """
    if torch.cuda.is_available():
        return
    from megatron.core.tensor_parallel import random

    class CpuRngStatesTracker(random.CudaRNGStatesTracker):  # type: ignore[misc]  # megatron has no types
        """The named random states of Megatron, kept for the CPU generator."""

        def add(self, name: str, seed: int) -> None:
            self._is_initialized = True
            self.states_[name] = torch.Generator().manual_seed(seed).get_state()

        @contextlib.contextmanager
        def fork(self, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            outer = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outer)

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    random._CUDA_RNG_STATE_TRACKER = CpuRngStatesTracker()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
