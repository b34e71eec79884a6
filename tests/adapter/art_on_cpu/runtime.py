"""A small dense GPT as ART's trainer wants to see it, whole or one stage of it, and adapters for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from art_adapter.tiny_gpt import Cut, Shape, draw, fill, initialise_parallel_state, make_chunk, transformer_config

from . import install
from .attention import DenseTreeAttention

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK = 4
SHAPE = Shape(vocabulary=256)


def build_runtime(cut: Cut, *, shape: Shape = SHAPE, recompute: bool = False) -> Any:
    """The fields of ART's TrainingRuntime that its trainer touches, for this rank's stages of the model.

    Args:
        cut: how the model is spread over ranks.
        shape: the model.
        recompute: whether every layer is run again in the backward instead of keeping its activations.
    """
    install()
    initialise_parallel_state(cut)
    config = transformer_config(shape, cut)
    if recompute:
        config.recompute_granularity, config.recompute_method, config.recompute_num_layers = "full", "uniform", 1
    chunks = [make_chunk(shape, cut, config, number, _layer()) for number in range(cut.virtual)]
    for chunk in chunks:
        fill(chunk, config, seed=1234)
        chunk.requires_grad_(False)
    handler = _with_lora(chunks, config)
    return SimpleNamespace(
        model=chunks,
        provider=config,
        optimizer=None,
        optimizer_config=None,
        model_support_handler=handler,
        rank=torch.distributed.get_rank(),
        world_size=torch.distributed.get_world_size(),
    )


def adapter(config: Any, *, r: int = RANK, seed: int = 1, scale: float = 0.1) -> dict[str, torch.Tensor]:
    """A full adapter of the whole model under PEFT's names."""
    full: dict[str, torch.Tensor] = {}
    for layer in range(config.num_layers):
        for path, (out, into) in _shapes(config).items():
            site = f"base_model.model.model.layers.{layer}.{path}"
            full[f"{site}.lora_A.weight"] = scale * draw(f"{site}.A", (r, into), seed)
            full[f"{site}.lora_B.weight"] = scale * draw(f"{site}.B", (out, r), seed)
    return full


def adapter_config(*, r: int = RANK, alpha: float = 8.0) -> dict[str, Any]:
    """What ART wants to know of an adapter that it is to publish."""
    return {"base_model_name_or_path": "tiny", "r": r, "lora_alpha": alpha, "target_modules": TARGETS}


def _shapes(config: Any) -> dict[str, tuple[int, int]]:
    hidden, inner = config.hidden_size, config.ffn_hidden_size
    heads, groups = (n * config.kv_channels for n in (config.num_attention_heads, config.num_query_groups))
    return {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (groups, hidden),
        "self_attn.v_proj": (groups, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def _layer() -> Any:
    import megatron.core.extensions.transformer_engine as engine
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    column, row = engine.TELayerNormColumnParallelLinear, engine.TERowParallelLinear
    attention = SelfAttentionSubmodules(linear_qkv=column, core_attention=DenseTreeAttention, linear_proj=row)
    mask = {"attn_mask_type": AttnMaskType.causal}
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=ModuleSpec(module=SelfAttention, params=mask, submodules=attention),
            self_attn_bda=get_bias_dropout_add,
            mlp=ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row)),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _with_lora(chunks: list[Any], config: Any) -> Any:
    """Wrap ART's LoRA around the chunks' linear layers; returns ART's handler for this kind of model."""
    from art.megatron.lora import apply_lora_adapters
    from art.megatron.model_support.handlers.qwen3_dense import Qwen3DenseHandler

    handler = Qwen3DenseHandler()
    config._art_model_support_handler = handler
    config._art_model_support_spec = SimpleNamespace(default_target_modules=TARGETS)
    config._art_lora_rank = RANK
    apply_lora_adapters(chunks, config)
    handler.install_preprocess_patch(chunks)
    return handler
