"""The slots of a trainer: which one is selected, loading them, and the custom heads that belong to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import attrs
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from . import lora
from .compat import HEAD_PARAMETER
from .live_graphs import LiveGraphs
from .lora import SlotRef
from .optimizer import SlotOptimizer
from .requests import AdamParams, AdapterSelection, ForwardInput, TrainerRankSlotStateError, Unset
from .runtime import Runtime

ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)
CustomT = TypeVar("CustomT", bound=torch.nn.Module | torch.Tensor)
SlotKind = Literal["checkpoint", "lora"]


@attrs.frozen(eq=False)
class PushedSlot:
    """A pushed selection; as a context manager it is popped at the end of the block."""

    trainer: Slots
    ref: SlotRef

    def __enter__(self) -> PushedSlot:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.trainer._slot_stack[-1:] != [self.ref]:
            raise RuntimeError(f"slot {self.ref.name!r} is no longer the last one pushed")
        self.trainer.pop_pushed_lora_or_checkpoint()


class Slots:
    """The part of a trainer that owns the model and its slots."""

    def __init__(self, runtime: Runtime) -> None:
        if runtime.provider.recompute_granularity is not None:
            raise ValueError("activation recomputation would run without the selected LoRA slot; turn it off")
        self.runtime = runtime
        self.device = next(runtime.model[0].parameters()).device
        self._sites = lora.install(runtime.model)
        self._default_slot_ref: SlotRef | None = None
        self._slot_stack: list[SlotRef] = []
        self._known_slots: set[SlotRef] = set()
        self._checkpoint_slot_params_by_name: dict[str | None, tuple[torch.nn.Parameter, ...]] = {}
        self._heads: dict[tuple[str | None, str], Any] = {}
        self._dynamic_optimizers: dict[str | None, SlotOptimizer] = {}
        self._live_graphs = LiveGraphs()

    @property
    def hidden_size(self) -> int:
        """The last dimension of hidden_states, for a custom head's first layer."""
        return int(self.runtime.provider.hidden_size)

    def _dp_rank_and_size(self) -> tuple[int, int]:
        return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()

    def set_checkpoint(self, name: str | None) -> None:
        """Select a trainable slot for requests that name none; None is the base model."""
        self._set_default_slot(SlotRef("checkpoint", name))

    def set_lora(self, name: str | None) -> None:
        """Select a frozen slot for requests that name none."""
        self._set_default_slot(SlotRef("lora", name))

    def push_checkpoint(self, name: str | None) -> PushedSlot:
        """Select a trainable slot until it is popped, or until the ``with`` block ends."""
        return self._push(SlotRef("checkpoint", name))

    def push_lora(self, name: str | None) -> PushedSlot:
        """Select a frozen slot until it is popped, or until the ``with`` block ends."""
        return self._push(SlotRef("lora", name))

    def pop_pushed_lora_or_checkpoint(self) -> None:
        if not self._slot_stack:
            raise RuntimeError("no LoRA or checkpoint is pushed")
        self._slot_stack.pop()

    def load_checkpoint_slot(
        self,
        name: str,
        adapter_model: Mapping[str, torch.Tensor],
        *,
        optimizer_state: Mapping[str, object] | None = None,
        alpha: float | None = None,
        adapter_config: Mapping[str, Any] | None = None,
    ) -> int:
        """Load a full adapter into a trainable slot; custom heads of a slot of that name are forgotten.

        Args:
            name: of the slot.
            adapter_model: A ``[r, in]`` and B ``[out, r]`` by global name; see ``lora.shapes_in_model``.
            optimizer_state: of ``checkpoint_slot_optimizer_state``, saved on this rank.
            alpha: numerator of the LoRA scale; by default that of the config, else 32.
            adapter_config: may say ``lora_alpha`` and ``r``, which are then checked.

        Returns:
            How many linear layers of this rank got weights.

        Raises:
            ValueError: the adapter does not fit the model, or the config contradicts it.
            TrainerRankSlotStateError: outputs of that slot wait for their backward, or the optimizer state is foreign.
        """
        alpha = _agreed_alpha(name, adapter_model, alpha, adapter_config)
        loaded = self._load_slot("checkpoint", name, adapter_model, alpha=alpha)
        params = self._validate_dynamic_slot_consistency("checkpoint", name, loaded)
        self._checkpoint_slot_params_by_name[name] = params
        self._heads = {key: head for key, head in self._heads.items() if key[0] != name}
        self._dynamic_optimizers.pop(name, None)
        if optimizer_state is not None:
            optimizer = SlotOptimizer(params, AdamParams(learning_rate=0.0))
            optimizer.restore(optimizer_state)
            self._dynamic_optimizers[name] = optimizer
        return loaded

    def load_lora_slot(
        self, name: str, adapter_model: Mapping[str, torch.Tensor], *, alpha: float | None = None
    ) -> int:
        """Load a full adapter into a frozen slot; see ``load_checkpoint_slot``."""
        alpha = _agreed_alpha(name, adapter_model, alpha, None)
        loaded = self._load_slot("lora", name, adapter_model, alpha=alpha)
        self._validate_dynamic_slot_consistency("lora", name, loaded)
        return loaded

    def checkpoint_slot_optimizer_state(self, name: str | None) -> dict[str, object] | None:
        """This rank's optimizer state of a slot on the CPU, or None before its first step.

        Raises:
            ValueError: no such slot.
            TrainerRankSlotStateError: the slot has custom heads, which are not part of the format.
        """
        if name not in self._checkpoint_slot_params_by_name:
            raise ValueError(f"Unknown checkpoint slot: {name!r}")
        if heads := [head for slot, head in self._heads if slot == name]:
            raise TrainerRankSlotStateError(f"the optimizer state of custom heads cannot be saved: {heads}")
        optimizer = self._dynamic_optimizers.get(name)
        return None if optimizer is None else optimizer.state()

    def module(self, name: str, factory: Callable[[], ModuleT], *, checkpoint: AdapterSelection = Unset) -> ModuleT:
        """Register a custom head, or get the one of that name; collective over all ranks.

        Its parameters start as rank 0's, are replicas on every rank, and train with the slot.

        Args:
            name: unique within the slot.
            factory: called once on each rank.
            checkpoint: the slot; by default the one that is selected now.
        """
        return self._custom(name, lambda: factory().to(self.device), checkpoint)

    def parameter(
        self, name: str, factory: Callable[[], torch.Tensor], *, checkpoint: AdapterSelection = Unset
    ) -> torch.nn.Parameter:
        """As ``module``, for a single trainable tensor."""
        return self._custom(name, lambda: torch.nn.Parameter(_own_copy(factory(), self.device)), checkpoint)

    def buffer(
        self, name: str, factory: Callable[[], torch.Tensor], *, checkpoint: AdapterSelection = Unset
    ) -> torch.Tensor:
        """As ``module``, for a tensor that is not trained; what the caller writes into it is his own affair."""
        return self._custom(name, lambda: _own_copy(factory(), self.device), checkpoint)

    def _custom(self, name: str, factory: Callable[[], CustomT], checkpoint: AdapterSelection) -> CustomT:
        slot = self._head_slot(checkpoint)
        if (slot, name) not in self._heads:
            head = factory()
            self._adopt_head(slot, head)
            self._heads[slot, name] = head
        found: CustomT = self._heads[slot, name]
        return found

    def _head_slot(self, checkpoint: AdapterSelection) -> str | None:
        ref = self._selected_slot() if checkpoint is Unset else SlotRef("checkpoint", checkpoint)
        if ref.kind != "checkpoint" or ref.name not in self._checkpoint_slot_params_by_name:
            raise TrainerRankSlotStateError(f"a custom head needs a loaded checkpoint slot, not {ref.name!r}")
        return ref.name

    def _adopt_head(self, slot: str | None, head: torch.nn.Module | torch.Tensor) -> None:
        tensors = [head] if isinstance(head, torch.Tensor) else [*head.parameters(), *head.buffers()]
        with torch.no_grad():
            for tensor in tensors:
                dist.broadcast(tensor, src=0)
        params = tuple(each for each in tensors if isinstance(each, torch.nn.Parameter) and each.requires_grad)
        for parameter in params:
            setattr(parameter, HEAD_PARAMETER, True)
        self._checkpoint_slot_params_by_name[slot] += params

    def _set_default_slot(self, ref: SlotRef) -> None:
        if self._slot_stack:
            raise RuntimeError("cannot set a LoRA or checkpoint while one is pushed")
        self._default_slot_ref = ref

    def _push(self, ref: SlotRef) -> PushedSlot:
        self._slot_stack.append(ref)
        return PushedSlot(self, ref)

    def _load_slot(self, kind: SlotKind, name: str, adapter_model: Mapping[str, torch.Tensor], *, alpha: float) -> int:
        if self._slot_stack:
            raise RuntimeError("cannot load a LoRA or checkpoint while one is pushed")
        ref = SlotRef(kind, name)
        self._guard_slot_can_load(ref)
        loaded = lora.load(
            self._sites,
            ref,
            adapter_model,
            provider=self.runtime.provider,
            alpha=alpha,
            trainable=kind == "checkpoint",
        )
        self._known_slots.add(ref)
        return loaded

    def _validate_dynamic_slot_consistency(
        self, kind: SlotKind, name: str, loaded_sites: int
    ) -> tuple[torch.nn.Parameter, ...]:
        """The slot's parameters on this rank, once all ranks agree on their number, shapes and dtypes."""
        params = lora.parameters(self._sites, SlotRef(kind, name))
        found: list[Any] = [None] * dist.get_world_size()
        own = (loaded_sites, [(tuple(parameter.shape), str(parameter.dtype)) for parameter in params])
        dist.all_gather_object(found, own)
        if any(state != found[0] for state in found):
            sites = [state[0] for state in found]
            raise RuntimeError(f"{kind} slot {name!r} is not the same on all ranks; sites loaded by rank: {sites}")
        return params

    def _guard_slot_can_load(self, ref: SlotRef) -> None:
        if self._live_graphs.waiting(ref):
            raise TrainerRankSlotStateError(
                f"cannot load {ref.kind} slot {ref.name!r} while its outputs wait for their backward: "
                "finish it, release the outputs, or load under another name"
            )

    def _selected_slot(self) -> SlotRef:
        if self._slot_stack:
            return self._slot_stack[-1]
        return self._default_slot_ref or SlotRef("checkpoint", None)

    def _resolve_slot_ref(self, request: ForwardInput) -> SlotRef:
        ref = self._selected_slot()
        if request.checkpoint is not Unset:
            ref = SlotRef("checkpoint", request.checkpoint)
        elif request.lora is not Unset:
            ref = SlotRef("lora", request.lora)
        if ref.name is not None and ref not in self._known_slots:
            raise ValueError(f"Unknown {ref.kind} slot: {ref.name!r}")
        return ref


def _agreed_alpha(
    name: str,
    adapter_model: Mapping[str, torch.Tensor],
    alpha: float | None,
    adapter_config: Mapping[str, Any] | None,
) -> float:
    config = adapter_config or {}
    said = [float(value) for value in (alpha, config.get("lora_alpha")) if value is not None]
    if len(set(said)) > 1:
        raise ValueError(f"slot {name!r}: alpha={alpha} contradicts adapter_config['lora_alpha']={said[1]}")
    ranks = {value.shape[0] for key, value in adapter_model.items() if key.endswith("lora_A")}
    if "r" in config and ranks - {config["r"]}:
        raise ValueError(f"slot {name!r}: adapter_config['r']={config['r']}, but the weights have rank {sorted(ranks)}")
    return said[0] if said else lora.LORA_ALPHA


def _own_copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.detach().to(device=device, copy=True)
