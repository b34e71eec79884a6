"""LoRA on the linear layers of a Megatron decoder, in named slots of which one is selected at a time.

    output = linear(x) + (alpha / r) * B A x

Weights are named by the layer's number in the whole model, so that a full adapter can be handed to every rank of
a pipeline: each takes its own layers. Under tensor parallelism each rank also takes its own shard.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Literal

import attrs
import torch
from megatron.core import parallel_state, tensor_parallel
from torch.nn import functional

from .runtime import language_model, tensor_group

LORA_ALPHA = 32.0
SHARDED = "lora_tp_sharded"
"""The attribute that says whether a LoRA parameter is a shard, or a replica, over the tensor-parallel ranks."""


@attrs.frozen
class SlotRef:
    """A slot's name; None is the base model."""

    kind: Literal["checkpoint", "lora"]
    name: str | None


_selected: ContextVar[SlotRef | None] = ContextVar("art_adapter_selected_slot", default=None)


@contextlib.contextmanager
def use_lora_slot(ref: SlotRef | None) -> Iterator[None]:
    """Run the body under one slot; in another thread or context the selection is not seen."""
    token = _selected.set(ref)
    try:
        yield
    finally:
        _selected.reset(token)


@attrs.frozen(eq=False)
class Adapter:
    """One slot's weights at one site: A ``[r, in]``, B ``[out, r]``, of which this rank may hold a shard."""

    A: torch.nn.Parameter
    B: torch.nn.Parameter
    scale: float


class Site:
    """One linear layer of the decoder, and what the loaded slots add to it.

    The gradients of the replicated half of an adapter are complete on every tensor-parallel rank: the collective
    stands between A and B, so no reduction over those ranks is left for the optimizer step.
    """

    def __init__(self, name: str, linear: Any) -> None:
        self.name = name
        self.linear = linear
        self.adapters: dict[SlotRef, Adapter] = {}
        self.is_column = isinstance(linear, tensor_parallel.ColumnParallelLinear)
        self.parts = 2 if name.endswith("linear_fc1") and linear.config.gated_linear_unit else 1
        linear.register_forward_hook(self._add)

    def _add(self, linear: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, Any]) -> Any:
        adapter = self.adapters.get(ref) if (ref := _selected.get()) is not None else None
        if adapter is None:
            return output
        delta = self._column(adapter, inputs[0]) if self.is_column else self._row(adapter, inputs[0])
        return output[0] + adapter.scale * delta, output[1]

    def _column(self, adapter: Adapter, x: torch.Tensor) -> torch.Tensor:
        if self.linear.sequence_parallel:
            x = tensor_parallel.gather_from_sequence_parallel_region(
                x, tensor_parallel_output_grad=False, group=tensor_group()
            )
        narrow = tensor_parallel.copy_to_tensor_model_parallel_region(functional.linear(x, adapter.A), tensor_group())
        return functional.linear(narrow, adapter.B)

    def _row(self, adapter: Adapter, x: torch.Tensor) -> torch.Tensor:
        narrow = tensor_parallel.reduce_from_tensor_model_parallel_region(
            functional.linear(x, adapter.A), tensor_group()
        )
        delta = functional.linear(narrow, adapter.B)
        if self.linear.sequence_parallel:
            delta = tensor_parallel.scatter_to_sequence_parallel_region(delta, tensor_group())
        return delta

    def load(self, ref: SlotRef, a: torch.Tensor, b: torch.Tensor, *, alpha: float, trainable: bool) -> None:
        """Take this rank's part of full weights; what the slot held here before is replaced."""
        like = self.linear.weight
        shard_a, shard_b = (a, cut(b, 0, parts=self.parts)) if self.is_column else (cut(a, 1), b)
        self.adapters[ref] = Adapter(
            A=_parameter(shard_a, like, trainable=trainable, sharded=not self.is_column),
            B=_parameter(shard_b, like, trainable=trainable, sharded=self.is_column),
            scale=alpha / a.shape[0],
        )


def cut(full: torch.Tensor, dim: int, *, parts: int = 1) -> torch.Tensor:
    """This tensor-parallel rank's share of a tensor, of each of ``parts`` equal pieces (gate and up) separately."""
    size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    return torch.cat([piece.chunk(size, dim)[rank] for piece in full.chunk(parts, dim)], dim)


def install(chunks: Iterable[Any]) -> list[Site]:
    """The LoRA sites of this rank's chunks in the order of the model; they are made at the first call."""
    return [
        _site(f"decoder.layers.{layer.layer_number - 1}.{path}", layer.get_submodule(path))
        for chunk in chunks
        for layer in language_model(chunk).decoder.layers
        for path in shapes_in_layer(layer.config)
    ]


def load(
    sites: Iterable[Site],
    ref: SlotRef,
    adapter_model: Mapping[str, torch.Tensor],
    *,
    provider: Any,
    alpha: float,
    trainable: bool,
) -> int:
    """Put this rank's share of a full adapter into a slot; sites without weights are left as in the base model.

    Returns:
        How many sites of this rank were loaded.

    Raises:
        ValueError: a name that the whole model does not have, or a shape that is not the full one.
    """
    check_adapter(adapter_model, provider)
    loaded = 0
    for site in sites:
        site.adapters.pop(ref, None)
        if f"{site.name}.lora_A" in adapter_model:
            a, b = adapter_model[f"{site.name}.lora_A"], adapter_model[f"{site.name}.lora_B"]
            site.load(ref, a, b, alpha=alpha, trainable=trainable)
            loaded += 1
    return loaded


def parameters(sites: Iterable[Site], ref: SlotRef) -> tuple[torch.nn.Parameter, ...]:
    """A slot's parameters on this rank: A, B of each site in the order of the model."""
    adapters = (site.adapters[ref] for site in sites if ref in site.adapters)
    return tuple(parameter for adapter in adapters for parameter in (adapter.A, adapter.B))


def shapes_in_layer(config: Any) -> dict[str, tuple[int, int]]:
    """``(out, in)`` of the full weight of each site of a layer."""
    heads = config.num_attention_heads * config.kv_channels
    groups = config.num_query_groups * config.kv_channels
    feed_forward = config.ffn_hidden_size * (2 if config.gated_linear_unit else 1)
    return {
        "self_attention.linear_qkv": (heads + 2 * groups, config.hidden_size),
        "self_attention.linear_proj": (config.hidden_size, heads),
        "mlp.linear_fc1": (feed_forward, config.hidden_size),
        "mlp.linear_fc2": (config.hidden_size, config.ffn_hidden_size),
    }


def shapes_in_model(config: Any) -> dict[str, tuple[int, int]]:
    """``(out, in)`` of the full weight of each site of the whole model, by its global name."""
    layer = shapes_in_layer(config)
    return {f"decoder.layers.{n}.{path}": layer[path] for n in range(config.num_layers) for path in layer}


def check_adapter(adapter_model: Mapping[str, torch.Tensor], config: Any) -> None:
    """Refuse an adapter that does not belong to the whole model; this rank's own layers play no part.

    Raises:
        ValueError: with the names, or the name and both shapes.
    """
    shapes = shapes_in_model(config)
    known = {f"{site}.{half}" for site in shapes for half in ("lora_A", "lora_B")}
    if unknown := sorted(set(adapter_model) - known):
        raise ValueError(f"the adapter has weights for sites that the model does not have: {_preview(unknown)}")
    for site, (out, into) in shapes.items():
        halves = [adapter_model.get(f"{site}.lora_A"), adapter_model.get(f"{site}.lora_B")]
        if all(half is None for half in halves):
            continue
        found = [None if half is None else tuple(half.shape) for half in halves]
        r = found[0][0] if found[0] else "r"
        if found != [(r, into), (out, r)]:
            raise ValueError(f"{site}: lora_A, lora_B must be [({r}, {into}), ({out}, {r})], not {found}")


def _site(name: str, linear: Any) -> Site:
    if not hasattr(linear, "lora_site"):
        linear.lora_site = Site(name, linear)
    site: Site = linear.lora_site
    return site


def _parameter(value: torch.Tensor, like: torch.Tensor, *, trainable: bool, sharded: bool) -> torch.nn.Parameter:
    own = value.detach().to(device=like.device, dtype=like.dtype, copy=True).contiguous()
    parameter = torch.nn.Parameter(own, requires_grad=trainable)
    setattr(parameter, SHARDED, sharded)
    return parameter


def _preview(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
