"""AdamW for one checkpoint slot, on float32 masters of its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .requests import AdamParams, TrainerRankSlotStateError

FORMAT_VERSION = 1


class SlotOptimizer:
    """Parameters may join later, as those of a custom head do; they start with empty moments."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], adam: AdamParams) -> None:
        self.parameters: list[torch.nn.Parameter] = []
        self.masters: list[torch.nn.Parameter] = []
        self._adamw = torch.optim.AdamW([{"params": []}], lr=adam.learning_rate)
        self.join(parameters, adam)

    def join(self, parameters: Sequence[torch.nn.Parameter], adam: AdamParams) -> None:
        """Take up what is new in ``parameters``, and use these hyper-parameters from now on."""
        fresh = list(parameters[len(self.parameters) :])
        masters = [torch.nn.Parameter(parameter.detach().float().clone()) for parameter in fresh]
        self.parameters += fresh
        self.masters += masters
        options = {"lr": adam.learning_rate, "betas": (adam.beta1, adam.beta2), "weight_decay": adam.weight_decay}
        if masters:
            self._adamw.add_param_group({"params": masters})
        for group in self._adamw.param_groups:
            group.update(options)

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """One step; gradients: float32, one per parameter, None to leave that parameter alone."""
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient
        self._adamw.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None
            parameter.copy_(master)

    def state(self) -> dict[str, object]:
        """Masters and moments, copied to the CPU."""
        return {
            "format_version": FORMAT_VERSION,
            "layout": self._layout(),
            "master_params": tuple(_on_cpu(master.detach()) for master in self.masters),
            "optimizer": _on_cpu(self._adamw.state_dict()),
        }

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state()`` of a slot with the same parameters on the same rank of the same topology.

        Raises:
            TrainerRankSlotStateError: the state is of another version, or of other parameters.
        """
        for key, expected in (("format_version", FORMAT_VERSION), ("layout", self._layout())):
            if state.get(key) != expected:
                raise TrainerRankSlotStateError(
                    f"optimizer state has {key} {state.get(key)}, this slot needs {expected}: "
                    "restore on each rank what the same rank of the same topology saved"
                )
        for master, saved in zip(self.masters, state["master_params"], strict=True):
            master.copy_(saved)
        self._adamw.load_state_dict(state["optimizer"])

    def _layout(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        return tuple((tuple(parameter.shape), str(parameter.dtype)) for parameter in self.parameters)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on_cpu(item) for item in value)
    return value
