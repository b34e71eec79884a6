"""Stages of many kinds, and what happens in them: forwards, products, hooks and calls of custom functions, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from attrs import define, field
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import pipeline_engine as pe
from tests.run.playing import WIDTH

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")


class Products(TorchDispatchMode):
    """Counts products while it is active; a convolution's backward counts once for each gradient that it makes."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name == "convolution_backward":
            self.counts["products"] += sum(args[-1][:2])
        elif name in PRODUCTS:
            self.counts["products"] += 1
        return function(*args, **(kwargs or {}))


@define(eq=False)
class Counted:
    """A stage whose doings are counted, with a hook on every parameter.

    Attributes:
        stage: the module.
        counts: how often what has happened.
    """

    stage: nn.Module
    counts: Counter[str] = field(init=False, factory=Counter)
    log: list[str] = field(init=False, factory=list)

    def __attrs_post_init__(self) -> None:
        for name, parameter in self.stage.named_parameters():
            parameter.register_hook(self.note(f"hook on {name}"))  # type: ignore[no-untyped-call]
            parameter.register_post_accumulate_grad_hook(self.note(f"after {name}"))
        for module in self.stage.modules():
            module.counts = self.counts  # type: ignore[assignment]

    def __call__(self, x: torch.Tensor, **_: Any) -> Any:
        self.counts["forward"] += 1
        return self.stage(x)

    def note(self, what: str) -> Callable[[Any], None]:
        """A hook that counts."""

        def hook(_: Any) -> None:
            self.counts[what] += 1

        return hook


class Mlp(nn.Module):
    """Two linear layers, and a hook on what each returns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        if hidden.requires_grad:
            hidden.register_hook(self._hooked)
        y: torch.Tensor = self.down(torch.relu(hidden))
        if y.requires_grad:
            y.register_hook(self._hooked)
        return y

    def _hooked(self, grad: torch.Tensor) -> torch.Tensor:
        self.counts["hook within"] += 1
        return grad * 2


class Norms(nn.Module):
    """Parameters of which none is a product's, and a bias that stands alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.bias = nn.LayerNorm(WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) + self.bias  # type: ignore[no-any-return]


class Twice(nn.Module):
    """A weight that is used twice, one use behind the other, and one that is used once."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.own = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(self.own(self.shared(x)))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Several outputs of one node, products without weights, and joins."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return x + self.out(torch.softmax(q @ k.T, -1) @ v)  # type: ignore[no-any-return]


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(1, 4, 3, padding=1), nn.Conv1d(4, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x.unsqueeze(1)))).squeeze(1)  # type: ignore[no-any-return]


class Batched(nn.Module):
    """A product with a batch of weights, seen through a transposed view."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(torch.stack([x, x]), self.experts.transpose(1, 2)).sum(0)


class Cast(nn.Module):
    """Autocast: a cast stands between weight and product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.linear(x).float()  # type: ignore[no-any-return]


class Showing(nn.Module):
    """A stage that returns its weight as it is, through a view, and used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x)), self.first.weight, self.second.weight.T


class Fused(torch.autograd.Function):
    """A linear layer that makes all gradients at once."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float, weight: torch.Tensor, counts: Counter[str]) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scale, ctx.counts = scale, counts
        return scale * (x @ weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.counts["custom backward"] += 1
        x, weight = ctx.saved_tensors
        grad = ctx.scale * grads[0]
        return grad @ weight.T, None, x.T @ grad, None


@pe.splits_backward(weights=[2])
class Halved(Fused):
    """The same in two halves, with a second output that is not used."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float, weight: torch.Tensor, counts: Counter[str]) -> Any:
        return Fused.forward(ctx, x, scale, weight, counts), x * 3

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        assert grads[1].count_nonzero() == 0  # materialized in both halves
        x, weight = ctx.saved_tensors
        grad = ctx.scale * grads[0]
        for_x = grad @ weight.T if ctx.needs_input_grad[0] else None
        return for_x, None, x.T @ grad if ctx.needs_input_grad[2] else None, None


class Custom(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.function.apply(x, 2.0, self.weight, self.counts)  # type: ignore[no-untyped-call]
        return y[0] if isinstance(y, tuple) else y  # type: ignore[no-any-return]


class Recomputed(nn.Module):
    """Activation checkpointing around an inner stage."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self._run, x, use_reentrant=self.reentrant)

    def _run(self, x: torch.Tensor) -> Any:
        self.counts["inner forward"] += 1
        return self.inner(x)


class Both(nn.Module):
    """A checkpointed region and a linear layer outside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = Recomputed(nn.Linear(WIDTH, WIDTH), False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.gelu(self.outer(self.inner(x)))


KINDS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "mlp": (Mlp, "3 of 3 parameters deferred"),
    "norms": (Norms, "whole backward at once: no weight is used by exactly one matrix product"),
    "twice": (Twice, "2 of 4 parameters deferred"),
    "attention": (Attention, "4 of 4 parameters deferred"),
    "convolved": (Convolved, "4 of 4 parameters deferred"),
    "batched": (Batched, "1 of 1 parameters deferred"),
    "cast": (Cast, "2 of 2 parameters deferred"),
    "showing": (Showing, "whole backward at once: no weight is used by exactly one matrix product"),
    "custom": (lambda: Custom(Fused), "whole backward at once: Fused makes all its gradients at once"),
    "halved": (lambda: Custom(Halved), "1 of 1 parameters deferred"),
    "recomputed": (
        lambda: Recomputed(Mlp(), False),
        "whole backward at once: its matrix products are under saved-tensor hooks",
    ),
    "reentrant": (
        lambda: Recomputed(Mlp(), True),
        "whole backward at once: reentrant checkpointing cannot be split",
    ),
    "both": (Both, "2 of 4 parameters deferred"),
}
"""By name, a stage and what a report says of its backward if it is split."""


def stage_of_kind(kind: str, seed: int = 0) -> Counted:
    """A stage whose parameters depend on the seed only, also when several threads make some."""
    stage, generator = KINDS[kind][0](), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return Counted(stage)
