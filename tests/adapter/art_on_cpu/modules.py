"""Stand-ins for the modules that ART imports and a CPU cannot have."""

from __future__ import annotations

import ast
import importlib
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import nn

TAKEN_FROM_TRAIN = {"_placeholder_attention_mask", "_infer_parallel_topology", "_unwrap_model_config"}


def install(source: Path) -> None:
    """Put the stand-ins in place; what is really installed stays."""
    _install_linears()  # imports Megatron, and with it the parts of torch that look for the real triton
    for name in ("triton", "triton.language"):
        _module(name, __getattr__=_anything)
    _module("quack.gemm", gemm=Anything())
    _module("megatron.bridge.models.gpt_provider", GPTModelProvider=type("GPTModelProvider", (), {}))
    _install_train(source)


class Anything:
    """Stands for kernels that are defined but never run here; as a decorator it hands the function back."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        is_decorator = len(arguments) == 1 and not options and isinstance(arguments[0], types.FunctionType)
        return arguments[0] if is_decorator else self

    def __getattr__(self, name: str) -> Any:
        return _anything(name)


def _anything(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything()


def _module(name: str, **attributes: Any) -> None:
    """Make a module and its parents, unless they can be imported."""
    try:
        importlib.import_module(name)
        return
    except ImportError:
        pass
    parent, _, last = name.rpartition(".")
    if parent:
        _module(parent)
    module = types.ModuleType(name)
    module.__path__ = []
    vars(module).update(attributes)
    sys.modules[name] = module
    if parent:
        setattr(sys.modules[parent], last, module)


def _install_linears() -> None:
    """Transformer Engine's linear layers as Megatron's plain ones, under the names that ART looks for."""
    import megatron.core.extensions.transformer_engine as engine
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    class Column(ColumnParallelLinear):  # type: ignore[misc]
        in_features = property(lambda self: self.input_size)
        out_features = property(lambda self: self.output_size_per_partition)
        tp_size = property(lambda self: self.config.tensor_model_parallel_size)

    class Row(RowParallelLinear):  # type: ignore[misc]
        in_features = property(lambda self: self.input_size_per_partition)
        out_features = property(lambda self: self.output_size)
        tp_size = property(lambda self: self.config.tensor_model_parallel_size)

    class NormAndColumn(Column):
        """A norm and then a linear layer; returns ``((output, normed), bias)`` once it is asked to.

        Where the sequence is shared out, ``normed`` can be had gathered.
        """

        def __init__(self, input_size: int, output_size: int, *, config: Any, init_method: Any, **options: Any) -> None:
            options.pop("name", None)
            super().__init__(input_size, output_size, config=config, init_method=init_method, **options)
            self.ln = nn.RMSNorm(input_size, eps=config.layernorm_epsilon, dtype=config.params_dtype)
            self.return_layernorm_output = False
            self.return_layernorm_output_gathered = False

        def forward(self, x: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            normed = self.ln(x)
            output, bias = super().forward(normed, *arguments, **options)
            if self.return_layernorm_output_gathered and self.sequence_parallel:
                normed = gather_from_sequence_parallel_region(normed, group=self.tp_group)
            return ((output, normed), bias) if self.return_layernorm_output else (output, bias)

    engine.TEColumnParallelLinear, engine.TERowParallelLinear = Column, Row
    engine.TELayerNormColumnParallelLinear = NormAndColumn
    engine.TEColumnParallelGroupedLinear = type("TEColumnParallelGroupedLinear", (nn.Module,), {})
    engine.TERowParallelGroupedLinear = type("TERowParallelGroupedLinear", (nn.Module,), {})
    if not hasattr(GPTModel, "_scale_logits"):  # before Megatron-core 0.17
        GPTModel._scale_logits = lambda self, logits: logits


def _install_train(source: Path) -> None:
    """art.megatron.train pulls in bridges and servers; a trainer needs three small functions, read from its source."""
    from art.megatron.context_parallel.types import ParallelTopology
    from megatron.core import parallel_state

    path = source / "art/megatron/train.py"
    wanted = [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name in TAKEN_FROM_TRAIN
    ]
    future = ast.parse("from __future__ import annotations").body
    module = types.ModuleType("art.megatron.train")
    vars(module).update(
        torch=torch, ps=parallel_state, ParallelTopology=ParallelTopology, Any=Any, cast=lambda _, value: value
    )
    exec(compile(ast.Module([*future, *wanted], []), str(path), "exec"), vars(module))
    sys.modules[module.__name__] = module
    sys.modules["art.megatron"].train = module  # type: ignore[attr-defined]
