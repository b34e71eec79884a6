"""The one place that touches private names of Megatron or ART.

No version of ART is asked for: ``check_shape`` looks at the few names and signatures that are needed.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from .base_model import is_copy, named_globally
from .runtime import language_model
from .topology import UnsupportedTopologyError

HEAD_PARAMETER = "_art_custom_checkpoint_param"
"""The attribute by which ART, and we, mark a parameter of a custom head."""
NORM = "_distributed_grad_norm"
"""The function by which a trainer finds its gradient norm."""
Square = tuple[torch.nn.Parameter, torch.Tensor]
"""A parameter, and the square of its gradient as a trainer's norm adds it on this rank: 0 where it does not count."""

SEAM: dict[str, tuple[str, ...]] = {
    "_decoder_hidden": ("prepared",),
    "_forward_packed": ("items", "prepared"),
    "_track_slot_graph_outputs": ("ref", "outputs"),
    "_execute_flat_plan": ("plan",),
    "_forward_memory_group": (),
    "_load_slot": (),
    "_validate_dynamic_slot_consistency": (),
    "_guard_checkpoint_can_step": ("name",),
    "_reduce_dynamic_grads": ("params",),
    "_dynamic_optim_step": ("checkpoint_names",),
}
"""The methods of a trainer that are overridden or looked into, and the arguments that are passed by place."""


class UnsupportedHostError(NotImplementedError):
    """The trainer's class does not have the shape that the adapter knows."""


def art_trainer_rank() -> type:
    """ART's own TrainerRank: of the tree that ``ART_SRC`` points to if it is set, else of what is installed.

    Raises:
        ImportError: neither is there; the message says what to do.
    """
    source = os.environ.get("ART_SRC")
    if source and "art" not in sys.modules:
        sys.path.insert(0, source)
    try:
        from art.trainer_rank import TrainerRank
    except ImportError as error:
        where = f"in ART_SRC={source}" if source else "as an installed package, and ART_SRC is not set"
        raise ImportError(
            f"art.trainer_rank cannot be imported {where}: {error}; a runtime of art_adapter.Runtime needs no ART"
        ) from error
    found: type = TrainerRank
    return found


@cache
def check_shape(host: type) -> None:
    """Look whether a trainer's class still has the names that the adapter needs.

    Raises:
        UnsupportedHostError: with the name that is missing, or whose signature has changed.
    """
    for name, arguments in SEAM.items():
        method: Any = getattr(host, name, None)
        if method is None:
            _refuse(host, f"{name} is missing")
        skipped = () if isinstance(inspect.getattr_static(host, name), staticmethod) else (None,)
        try:
            inspect.signature(method).bind_partial(*skipped, *arguments)
        except TypeError:
            _refuse(host, f"{name}{inspect.signature(method)} does not take {', '.join(arguments)}")
    step = host._dynamic_optim_step  # type: ignore[attr-defined]
    _check_uses(host, host._validate_dynamic_slot_consistency, "dist")  # type: ignore[attr-defined]
    _check_uses(host, step, NORM)
    _check_uses(host, _names_seen_by(step)[NORM], "dist")


def _check_uses(host: type, function: Any, needed: str) -> None:
    if needed not in _names_seen_by(function):
        _refuse(host, f"{function.__name__} no longer uses {needed}")


def _refuse(host: type, why: str) -> None:
    raise UnsupportedHostError(
        f"{host.__module__}.{host.__qualname__} is not a TrainerRank that art_adapter can cut into stages: {why}; "
        "use the version of ART that art_adapter was made for, or a newer art_adapter."
    )


def refusal_of(host: type) -> type[UnsupportedTopologyError]:
    """The error by which a topology is refused: of the host's own kind as well, where it has one."""
    kind = getattr(sys.modules[host.__module__], "TrainerRankRuntimeSupportError", None)
    return UnsupportedTopologyError if kind is None else _both(kind)


@cache
def _both(kind: type[Exception]) -> type[UnsupportedTopologyError]:
    return type("UnsupportedTopologyError", (UnsupportedTopologyError, kind), {"__module__": __name__})


@contextlib.contextmanager
def presented_as_one_stage(provider: Any) -> Iterator[None]:
    """ART's constructor refuses a configuration with several stages; meanwhile it sees one."""
    said = provider.pipeline_model_parallel_size
    provider.pipeline_model_parallel_size = 1
    try:
        yield
    finally:
        provider.pipeline_model_parallel_size = said


@contextlib.contextmanager
def boundary_input(model: Any, received: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let a GPTModel's stage start from what it received, ``[tokens, 1, hidden]``; nothing on the first stage.

    The decoder of a later stage reads ``set_input_tensor``. ART's preprocess hook reads the embedding that Megatron's
    own would have made, so Megatron is handed one.
    """
    if not received:
        yield
        return
    model.set_input_tensor(received[0])
    model._preprocess, own = partial(model._preprocess, decoder_input=received[0]), vars(model).get("_preprocess")
    try:
        yield
    finally:
        model.set_input_tensor(None)
        del model._preprocess
        if own is not None:
            model._preprocess = own


@contextlib.contextmanager
def norm_by(norm: Callable[[list[Square]], float], step: Any) -> Iterator[None]:
    """Meanwhile a trainer's optimizer step has its gradient norm made by ``norm`` out of what its own rule adds up."""
    names = _names_seen_by(step)
    own = names[NORM]
    names[NORM] = lambda parameters, gradients: norm(list(map(partial(_square, own), parameters, gradients)))
    try:
        yield
    finally:
        names[NORM] = own


def _square(norm: Any, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> Square:
    """What a trainer's own norm of one parameter alone would reduce over all ranks."""
    names = _names_seen_by(norm)
    own = names["dist"]
    names["dist"] = heard = _Unreduced(own)
    try:
        norm([parameter], [gradient])
    finally:
        names["dist"] = own
    return parameter, heard.tensor


class _Unreduced:
    """torch.distributed, but what is to be reduced is kept as it is."""

    def __init__(self, whole: Any) -> None:
        self._whole = whole
        self.tensor = torch.zeros(())

    def all_reduce(self, tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        self.tensor = tensor.clone()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


def places_in_model(trainer: Any, slots: Sequence[str]) -> dict[int, tuple[int, float]]:
    """By the id of a parameter of these slots, the place of its slot and the number of its layer; heads come last."""
    layers = {id(parameter): _layer_in(name) for name, parameter in slot_parameters_by_name(trainer)}
    return {
        id(parameter): (place, layers.get(id(parameter), math.inf))
        for place, name in enumerate(slots)
        for parameter in trainer._checkpoint_slot_params_by_name[name]
    }


def _layer_in(name: str) -> float:
    if found := re.search(r"\blayers\.(\d+)\b", name):
        return int(found[1])
    return -1.0 if "/embedding." in name else math.inf


@contextlib.contextmanager
def world_is(group: Any, method: Any) -> Iterator[None]:
    """Meanwhile a trainer's method takes the ranks of ``group`` for the whole world."""
    names = _names_seen_by(method)
    own = names["dist"]
    names["dist"] = _World(own, group)
    try:
        yield
    finally:
        names["dist"] = own


class _World:
    """torch.distributed over one group."""

    def __init__(self, whole: Any, group: Any) -> None:
        self._whole = whole
        self._group = group

    def get_world_size(self) -> int:
        return dist.get_world_size(self._group)

    def all_gather_object(self, found: list[Any], value: Any) -> None:
        dist.all_gather_object(found, value, group=self._group)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


def _names_seen_by(method: Any) -> dict[str, Any]:
    """The names of the module in which a method was written."""
    names: dict[str, Any] = inspect.unwrap(method).__globals__
    return names


def measures_memory(trainer: Any) -> bool:
    """Whether a trainer plans by the memory that its forwards took on this rank, not by an estimate of the model."""
    return hasattr(trainer, "_memory_profiles")


def selection(trainer: Any) -> tuple[Any, ...]:
    """What decides which slot a request without a slot of its own uses."""
    return (trainer._default_slot_ref, *trainer._slot_stack)


def slot_parameters_by_name(trainer: Any) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters of all slots on this rank but heads and copies, by slot and by their name in the whole model."""
    if hasattr(trainer, "_sites"):
        adapters = [
            (f"{ref.name}/{site.name}.{half}", parameter)
            for site in trainer._sites
            for ref, adapter in site.adapters.items()
            for half, parameter in (("lora_A", adapter.A), ("lora_B", adapter.B))
        ]
        return [*_base_weights_by_name(trainer), *adapters]
    return [
        (f"{ref.name}/{module.adapter_model_prefix}.{half}", parameter)
        for chunk in trainer.runtime.model
        for module in chunk.modules()
        for ref in getattr(module, "_slot_keys", ())
        for half, parameter in zip(("lora_A", "lora_B"), module.lora_slot_params(ref), strict=True)
    ]


def _base_weights_by_name(trainer: Any) -> list[tuple[str, torch.nn.Parameter]]:
    """The base weights, where they are trained."""
    trained = set(map(id, trainer._checkpoint_slot_params_by_name.get(None, ())))
    return [
        (f"base model/{name}", weight)
        for chunk in map(language_model, trainer.runtime.model)
        for name, weight in named_globally(chunk)
        if id(weight) in trained and not is_copy(weight)
    ]


@contextlib.contextmanager
def publishing_with(save: Callable[..., None]) -> Iterator[None]:
    """Meanwhile ART publishes a slot through ``save``, which takes the keywords of its own publisher."""
    publisher = _publisher()
    own = publisher.save_vllm_lora_from_model
    publisher.save_vllm_lora_from_model = save
    try:
        yield
    finally:
        publisher.save_vllm_lora_from_model = own


def entries_to_publish(model: Any, adapter_model: Any, handler: Any, slot_ref: Any) -> list[tuple[Any, Any]]:
    """Tensors and metadata of what this rank holds of a slot: of plain layers, and of packed experts."""
    packed = tuple(handler.expert_packed_lora_groups())
    options = {"owner_rank": dist.get_rank(), "packed_expert_groups": packed, "slot_ref": slot_ref}
    collect = (_publisher().collect_local_lora_entries, _publisher().collect_local_packed_expert_entries)
    return [each(model, adapter_model, **options) for each in collect]


def write_published(regular: Any, experts: Any, handler: Any, adapter_config: Any, output_dir: str) -> None:
    """Merge and write, on rank 0, what all ranks hold: pairs of metadata, and tensors by owner and key."""
    if dist.get_rank() == 0:
        _publisher()._save_rank0_vllm_lora(
            metadata=regular[0],
            tensors_by_owner_key=regular[1],
            packed_expert_metadata=experts[0],
            packed_expert_tensors_by_owner_key=experts[1],
            handler=handler,
            adapter_config=adapter_config,
            output_dir=output_dir,
        )


def _publisher() -> Any:
    return importlib.import_module("art.megatron.weights.lora_publish")


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

    Four things ask for a GPU: buffers are made on ``torch.cuda.current_device()``, a tied weight is moved there,
    dropout forks CUDA's random state, and activation recomputation restores it. Megatron's own schedules and its
    optimizers need more than this.
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
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    random._CUDA_RNG_STATE_TRACKER = CpuRngStatesTracker()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
