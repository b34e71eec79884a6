"""A real Megatron GPTModel, small enough for a laptop, whose weights do not depend on how it is cut.

Every parameter is drawn from a generator that is seeded by its name in the whole model: one process, two pipeline
stages and two tensor shards hold the same numbers.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import sysconfig
from collections.abc import Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist

from .base_model import named_globally
from .compat import run_megatron_on_cpu
from .requests import ForwardInput
from .runtime import Runtime


@attrs.frozen(kw_only=True)
class Shape:
    """The model; sizes count elements, ``vocabulary=256`` makes a token of every byte.

    ``tied`` makes the output layer use the embedding's weight.
    """

    layers: int = 4
    hidden: int = 64
    heads: int = 4
    query_groups: int = 2
    feed_forward: int = 128
    vocabulary: int = 256
    longest_sequence: int = 2048
    normalization: str = "RMSNorm"
    gated: bool = True
    tied: bool = False
    dtype: torch.dtype = torch.float32


@attrs.frozen(kw_only=True)
class Cut:
    """How the model is spread over ranks.

    Attributes:
        tensor, context, pipeline: numbers of ranks.
        virtual: chunks per pipeline rank; stage v * pipeline + p is chunk v of rank p.  Megatron has no virtual stages
            on one rank: there the layers are numbered here.
        layers_per_stage: one number >= 1 per stage, or None for as even as possible, the larger ones first.
        sequence_parallel: whether tensor-parallel ranks also share out the sequence.
    """

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    virtual: int = 1
    layers_per_stage: Sequence[int] | None = attrs.field(default=None, converter=attrs.converters.optional(tuple))
    sequence_parallel: bool = False

    @property
    def stages(self) -> int:
        return self.pipeline * self.virtual

    @property
    def virtual_in_megatron(self) -> int | None:
        """What Megatron's configuration says."""
        return self.virtual if self.virtual > 1 and self.pipeline > 1 else None

    def counts(self, layers: int) -> tuple[int, ...]:
        """Layers of each stage.

        Raises:
            ValueError: the stages cannot be filled, or the given numbers do not add up.
        """
        if self.stages > layers:
            raise ValueError(f"{self.stages} stages need at least {self.stages} layers, the model has {layers}")
        whole, rest = divmod(layers, self.stages)
        counts = tuple(self.layers_per_stage or ()) or tuple(whole + (stage < rest) for stage in range(self.stages))
        if len(counts) != self.stages or sum(counts) != layers or min(counts) < 1:
            raise ValueError(
                f"layers_per_stage={counts} must be {self.stages} numbers >= 1 that add up to {layers} layers"
            )
        return counts


def build_runtime(shape: Shape = Shape(), cut: Cut = Cut(), *, train_base: bool = False, seed: int = 1234) -> Runtime:
    """Build this rank's chunks in an initialised ``torch.distributed`` world (gloo on a CPU).

    Args:
        shape: the model.
        cut: how it is spread; ranks that are left over are data-parallel.
        train_base: whether the base weights require gradients; a trainer sees to that by itself.
        seed: of all weights.

    Raises:
        ValueError: the cut does not fit the model or the world; no process has talked to another yet.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from .context import ContextAttention

    cut.counts(shape.layers)
    world = dist.get_world_size()
    if world % (cut.tensor * cut.context * cut.pipeline):
        sizes = f"tensor={cut.tensor} times context={cut.context} times pipeline={cut.pipeline}"
        raise ValueError(f"a world of {world} ranks cannot hold {sizes}")
    initialise_parallel_state(cut)
    config = transformer_config(shape, cut)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    layer = get_gpt_layer_local_spec(normalization=shape.normalization)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    if cut.context > 1:
        layer.submodules.self_attention.submodules.core_attention = ContextAttention
    chunks = [make_chunk(shape, cut, config, number, layer).to(device) for number in range(cut.virtual)]
    for chunk in chunks:
        fill(chunk, config, seed)
        chunk.requires_grad_(train_base)
    return Runtime(model=chunks, provider=config, rank=dist.get_rank(), world_size=world)


def adapter(config: Any, *, r: int = 4, seed: int = 1, scale: float = 0.1) -> dict[str, torch.Tensor]:
    """A full LoRA adapter of the whole model; ``config`` is ``runtime.provider``, entries are normal times scale."""
    from .lora import shapes_in_model

    full: dict[str, torch.Tensor] = {}
    for site, (out, into) in shapes_in_model(config).items():
        full[f"{site}.lora_A"] = scale * draw(f"{site}.lora_A", (r, into), seed)
        full[f"{site}.lora_B"] = scale * draw(f"{site}.lora_B", (out, r), seed)
    return full


def licence_text_inputs(
    count: int = 8, *, shortest: int = 24, longest: int = 96, shared_prefix: int = 0, **wanted: Any
) -> list[ForwardInput]:
    """Byte sequences of different lengths from Python's licence, each byte's target being the next one.

    Args:
        count: how many.
        shortest, longest: lengths in bytes; they go up and down between the two.
        shared_prefix: how many leading bytes all of them have in common.
        wanted: further fields of ForwardInput, the same for all.

    Raises:
        ValueError: not ``0 <= shared_prefix < shortest <= longest``.
    """
    if not 0 <= shared_prefix < shortest <= longest:
        raise ValueError(f"0 <= {shared_prefix=} < {shortest=} <= {longest=} does not hold")
    text = torch.tensor(list(licence_text()), dtype=torch.long)
    span = longest - shortest + 1
    inputs = []
    for number in range(count):
        length = shortest + (number * 37) % span
        start = shared_prefix + (number * 211) % (len(text) - shared_prefix - longest - 1)
        sequence = torch.cat((text[:shared_prefix], text[start : start + length + 1 - shared_prefix]))
        inputs.append(ForwardInput(input_tokens=sequence[:-1], target_tokens=sequence[1:], **wanted))
    return inputs


def licence_text() -> bytes:
    """Python's licence; where the file is not installed, the source of ``argparse`` stands in for it."""
    import builtins

    licence = getattr(builtins, "license", None)  # made by the site module, absent under python -S
    places = [*getattr(licence, "_Printer__filenames", ()), os.path.join(sysconfig.get_path("stdlib"), "LICENSE.txt")]
    for place in places:
        if os.path.isfile(place) and os.path.getsize(place) > 4096:
            with open(place, "rb") as file:
                return file.read()
    import argparse

    return inspect.getsource(argparse).encode()


def initialise_parallel_state(cut: Cut) -> None:
    """Set up Megatron's process groups, on a CPU as well; collective."""
    run_megatron_on_cpu()
    from megatron.core import parallel_state, tensor_parallel

    virtual = cut.virtual_in_megatron
    if not _already_cut_like(cut):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(cut.tensor, cut.pipeline, virtual, context_parallel_size=cut.context)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(virtual)
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def _already_cut_like(cut: Cut) -> bool:
    from megatron.core import parallel_state

    return parallel_state.model_parallel_is_initialized() and (cut.tensor, cut.context, cut.pipeline) == (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )


def transformer_config(shape: Shape, cut: Cut) -> Any:
    """Megatron's configuration of the whole model, the same on every rank."""
    from megatron.core.transformer import TransformerConfig

    layout = [["decoder"] * count for count in cut.counts(shape.layers)]
    layout[0].insert(0, "embedding")
    layout[-1].append("loss")
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.query_groups,
        ffn_hidden_size=shape.feed_forward,
        normalization=shape.normalization,
        gated_linear_unit=shape.gated,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=shape.dtype,
        pipeline_dtype=shape.dtype,
        bf16=shape.dtype == torch.bfloat16,
        tensor_model_parallel_size=cut.tensor,
        context_parallel_size=cut.context,
        pipeline_model_parallel_size=cut.pipeline,
        virtual_pipeline_model_parallel_size=cut.virtual_in_megatron,
        pipeline_model_parallel_layout=layout if cut.pipeline > 1 else None,
        sequence_parallel=cut.sequence_parallel,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
    )


def make_chunk(shape: Shape, cut: Cut, config: Any, number: int, layer: Any) -> Any:
    """One of this rank's chunks, a GPTModel; ``layer`` is Megatron's specification of a layer."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from .context import give_whole_rotary_table

    stage = number * cut.pipeline + parallel_state.get_pipeline_model_parallel_rank()
    counts = cut.counts(shape.layers)
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=[layer] * counts[stage], layer_norm=Norm),
        vocab_size=shape.vocabulary,
        max_sequence_length=shape.longest_sequence,
        pre_process=stage == 0,
        post_process=stage == cut.stages - 1,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=shape.tied,
        vp_stage=None if cut.virtual_in_megatron is None else number,
    )
    if cut.context > 1:
        give_whole_rotary_table(chunk)
    for layer_number, layer in enumerate(chunk.decoder.layers, start=1 + sum(counts[:stage])):
        layer.layer_number = layer_number
    return chunk


class Norm:
    """Makes torch's norm, tagged as Megatron wants it where the sequence is shared out; Megatron asks for a class."""

    def __new__(cls, config: Any, hidden_size: int, eps: float, **_: Any) -> Any:
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


@torch.no_grad()
def fill(chunk: Any, config: Any, seed: int) -> None:
    """Give the parameters of a chunk the weights that their names in the whole model stand for."""
    for name, parameter in named_globally(chunk):
        parameter.copy_(_own_share(name, parameter, config, seed))


def _own_share(name: str, parameter: Any, config: Any, seed: int) -> torch.Tensor:
    from .lora import cut

    if parameter.ndim == 1:  # norms
        return float(name.endswith("weight")) + 0.02 * draw(name, tuple(parameter.shape), seed)
    shape, dim = list(parameter.shape), parameter.partition_dim
    shape[dim] *= config.tensor_model_parallel_size
    full = draw(name, tuple(shape), seed) / shape[1] ** 0.5
    return cut(full, dim, parts=2 if name.endswith("linear_fc1.weight") and config.gated_linear_unit else 1)


def draw(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Normal numbers that depend on the name and the seed alone."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.randn(shape, generator=torch.Generator().manual_seed(int.from_bytes(digest[:7], "big")))
