"""A cut is invisible to autograd: in-place operations, views, trees, unused outputs, frozen stages, shared inputs."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pipeline_engine as pe
from pipeline_engine.run.cargo import Cargo
from pipeline_engine.run.stage import receive, run_forward
from pipeline_engine.run.transports.base import Transport
from pipeline_engine.testing import run_ranks_in_threads
from tests.run.playing import ROWS, WIDTH, Layer, Rank, batch, on_ranks, plain
from tests.run.processes import run_in_processes

Function = Callable[..., Any]


@dataclasses.dataclass
class Hidden:
    states: torch.Tensor
    positions: torch.Tensor | None


class Stages(nn.Module):
    """Stage ``number`` of a model that is given as functions ``f(parameter, *inputs)``."""

    def __init__(self, number: int, functions: tuple[Function, ...]) -> None:
        super().__init__()
        self.parameter = nn.Parameter(torch.randn(WIDTH, generator=torch.Generator().manual_seed(number)))
        self.function = functions[number]

    def forward(self, *inputs: Any) -> Any:
        return self.function(self.parameter, *inputs)


def as_one_process(functions: tuple[Function, ...], value: torch.Tensor, loss: Callable[[Any], torch.Tensor]) -> Any:
    """Outputs and gradients of the parameters, by plain autograd, twice, as two microbatches."""
    stages = [Stages(number, functions) for number in range(len(functions))]
    outputs = []
    for scale in (1.0, 2.0):
        result: Any = value * scale
        for stage in stages:
            result = stage(result)
        outputs.append(result)
        loss(result).backward()
    return outputs, [stage.parameter.grad for stage in stages]


def check_cut(
    functions: tuple[Function, ...], loss: Callable[[Any], torch.Tensor] = lambda y: y.square().sum()
) -> None:
    """The functions, one a rank, do what they do in one process."""
    value = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(5))
    outputs, grads = as_one_process(functions, value, loss)

    def on_rank(rank: Rank) -> Any:
        microbatches = [pe.Microbatch((value * scale,)) for scale in (1.0, 2.0)]
        seen = []
        for item in rank.pipeline.stream(microbatches):
            seen.append(item.outputs)
            loss(item.outputs).backward()
        rank.pipeline.flush()
        return seen, rank.stage.parameter.grad

    ranks = on_ranks(on_rank, len(functions), "1f1b", lambda number: Stages(number, functions))
    for number, (seen, grad) in enumerate(ranks):
        for left, right in zip(seen, outputs, strict=True):
            assert all(map(torch.equal, Cargo.of(left).leaves, Cargo.of(right).leaves)), f"outputs on rank {number}"
        expected = grads[number]
        assert (grad is None) == (expected is None), f"rank {number}: {grad} is not {expected}"
        assert grad is None or torch.equal(grad, expected), f"gradient on rank {number}"


def test_the_first_operation_on_what_was_received_may_be_in_place() -> None:
    check_cut((lambda p, x: x * p, lambda p, x: x.mul_(p).sin_(), lambda p, x: x.add_(p) * 2))


def test_a_stage_may_return_a_view_or_a_transposed_tensor() -> None:
    check_cut((lambda p, x: (x * p).T, lambda p, x: (x.T * p)[1:], lambda p, x: (x * p)[:, ::2]))


def test_a_stage_may_hand_on_what_it_was_given_and_use_it_too() -> None:
    check_cut(
        (lambda p, x: (x * p, x), lambda p, xs: (xs[0] * p, xs[0], xs[1]), lambda p, xs: (xs[0] + xs[1] * p) * xs[2])
    )


def test_a_stage_may_return_a_tensor_twice() -> None:
    def first(p: torch.Tensor, x: torch.Tensor) -> Any:
        y = x * p
        return [y, y]

    check_cut((first, lambda p, ys: ys[0] * p + ys[1]))


def test_a_dataclass_with_none_and_integers_crosses_a_cut() -> None:
    check_cut(
        (
            lambda p, x: Hidden(x * p, torch.arange(WIDTH)),
            lambda p, h: Hidden(h.states * p + h.positions, None),
            lambda p, h: h.states * p if h.positions is None else h.states,
        )
    )


def test_dicts_constants_and_leaves_of_every_dtype_cross_a_cut() -> None:
    def first(p: torch.Tensor, x: torch.Tensor) -> Any:
        y = x * p
        return {
            "bf16": y.bfloat16(),
            "complex": torch.complex(y, -y),
            "double": y.double(),
            "mask": x > 0,
            "name": "hidden",
            "scale": 3,
            "empty": y[:0],
            "scalar": y.sum(),
        }

    def second(p: torch.Tensor, tree: Any) -> torch.Tensor:
        assert (tree["name"], tree["scale"], tree["empty"].shape) == ("hidden", 3, (0, WIDTH))
        kept = torch.where(tree["mask"], tree["bf16"].float(), tree["complex"].abs())
        return kept * p * tree["scale"] + tree["double"].float() * tree["scalar"] + tree["empty"].sum()  # type: ignore[no-any-return]

    check_cut((first, second))


def test_each_of_several_outputs_of_one_operation_gets_its_own_gradient() -> None:
    check_cut((lambda p, x: (x * p).unbind(), lambda p, rows: rows[0] * p + 2 * rows[2]))


def test_of_several_outputs_in_the_callers_hands_each_gets_its_own_gradient_or_none() -> None:
    def last(p: torch.Tensor, x: torch.Tensor) -> Any:
        return [torch.arange(WIDTH), x * 2, x * p, x * 3]

    check_cut((lambda p, x: x * p, last), lambda y: (y[0] * y[1]).sum() + y[3].square().sum())


class Cut(torch.autograd.Function):
    """Hands on, and has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> None:
        return None


def test_a_gradient_that_a_custom_function_leaves_out_is_no_zeros_upstream() -> None:
    check_cut((lambda p, x: x * p, lambda p, x: Cut.apply(x) * p, lambda p, x: x * p))


def test_what_backwards_inside_of_a_backward_bring_is_summed() -> None:
    """Those of two reentrant checkpoints whose functions use what was received; in numbers that sum without error."""

    def second(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return sum(checkpoint(lambda q, n=n: x * n + q, p, use_reentrant=True) for n in (3, 4))  # type: ignore[no-any-return]

    check_cut((lambda p, x: x + p, second), lambda y: y.sum())  # nothing is saved: plain autograd comes back, too


def test_an_unused_output_gets_no_gradient_and_no_zeros() -> None:
    seen: list[Any] = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            ctx.set_materialize_grads(False)
            return x * 2, x * 3

        @staticmethod
        def backward(ctx: Any, left: Any, right: Any) -> Any:
            seen.append((left is None, right is None))
            return left * 2

    check_cut((lambda p, x: Spy.apply(x * p), lambda p, ys: ys[0] * p))
    assert set(seen) == {(False, True)}


def test_a_loss_that_uses_one_of_several_outputs_gives_the_others_none() -> None:
    def last(p: torch.Tensor, x: torch.Tensor) -> Any:
        return {"used": x * p, "unused": x * 2, "count": torch.tensor(3)}

    check_cut((lambda p, x: x * p, last), lambda y: y["used"].sum())


def test_nothing_is_sent_back_to_a_stage_that_needs_no_gradient() -> None:
    check_cut((lambda p, x: x * 2, lambda p, x: x * 3, lambda p, x: x * p))
    check_cut((lambda p, x: x * p.detach(), lambda p, x: x * p, lambda p, x: x + p.detach()))


def test_a_stage_may_cut_the_gradient_off() -> None:
    check_cut((lambda p, x: x * p, lambda p, x: x.detach() * p, lambda p, x: x * p))


def test_a_stage_may_return_its_parameter() -> None:
    check_cut((lambda p, x: (x, p), lambda p, xp: xp[0] * xp[1] * p))


def test_when_no_stage_needs_a_gradient_outputs_have_no_history() -> None:
    def on_rank(rank: Rank) -> None:
        for item in rank.pipeline.stream([pe.Microbatch((torch.ones(2, WIDTH),))] * 5):
            assert not item.outputs.requires_grad
        rank.pipeline.flush()

    for schedule in pe.SCHEDULES:
        on_ranks(on_rank, 2, schedule, lambda number: nn.Identity())


def test_the_callers_own_graph_behind_an_input_gets_its_gradient() -> None:
    def on_rank(rank: Rank) -> torch.Tensor | None:
        embedding = torch.ones(2, WIDTH, requires_grad=True)
        for item in rank.pipeline.stream([pe.Microbatch((embedding * (number + 1),)) for number in range(3)]):
            item.outputs.sum().backward()
        rank.pipeline.flush()
        return embedding.grad

    first, second = on_ranks(on_rank)
    embedding = torch.ones(2, WIDTH, requires_grad=True)
    for number in range(3):
        Layer(1)(Layer(0)(embedding * (number + 1))).sum().backward()
    assert first is not None and torch.equal(first, embedding.grad) and second is None  # type: ignore[arg-type]


def test_shared_arguments_reach_every_stage_by_name_and_inputs_only_the_first() -> None:
    def on_rank(rank: Rank) -> None:
        shared = {"offset": torch.full((1,), 10.0), "labels": ["a", "b"]}
        (item,) = rank.pipeline.stream([pe.Microbatch((torch.zeros(1), torch.ones(1)), shared)])
        assert item.outputs.tolist() == [31.0]

    def stage_of(number: int) -> Any:
        def first(x: torch.Tensor, y: torch.Tensor, *, offset: torch.Tensor, labels: list[str]) -> torch.Tensor:
            assert labels == ["a", "b"]
            return x + y + offset

        def later(x: torch.Tensor, *, offset: torch.Tensor, labels: list[str]) -> torch.Tensor:
            return x + offset

        return first if number == 0 else later

    on_ranks(on_rank, 3, "1f1b", stage_of)


def test_hooks_on_a_parameter_fire_once_per_microbatch() -> None:
    fired: dict[int, int] = {0: 0, 1: 0}

    def on_rank(rank: Rank) -> None:
        def count(_: torch.Tensor) -> None:
            fired[rank.number] += 1

        rank.stage.weight.register_post_accumulate_grad_hook(count)
        for item in rank.pipeline.stream([pe.Microbatch((torch.ones(1, WIDTH),))] * 4):
            item.outputs.sum().backward()

    on_ranks(on_rank)
    assert fired == {0: 4, 1: 4}


def test_buffers_and_random_numbers_are_touched_once_per_microbatch() -> None:
    """No trial forward: a batch norm counts its batches."""

    def on_rank(rank: Rank) -> int:
        for item in rank.pipeline.stream([pe.Microbatch((torch.randn(4, WIDTH),)) for _ in range(3)]):
            item.outputs.sum().backward()
        return int(rank.stage.num_batches_tracked)

    assert on_ranks(on_rank, 2, "1f1b", lambda number: nn.BatchNorm1d(WIDTH)) == [3, 3]


def test_received_tensors_are_no_leaves_and_no_views() -> None:
    received, entry = receive(Cargo.of(torch.ones(2, requires_grad=True)), differentiate=True)
    assert received.requires_grad and not received.is_leaf and not received._is_view()
    assert entry.take() == (None,)
    assert not receive(Cargo.of(torch.ones(2, requires_grad=True)), differentiate=False)[0].requires_grad


def test_of_tensors_only_what_the_graph_saved_is_kept_for_the_backward() -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    def stage(x: torch.Tensor) -> torch.Tensor:
        output = x + 1  # its backward needs neither
        seen.extend((weakref.ref(x), weakref.ref(output)))
        return output

    cargo, ran = run_forward(stage, [Cargo.of(torch.ones(2, requires_grad=True))], (), {}, keep=True)
    assert [each() for each in seen] == [None, None]
    assert ran is not None
    (gradients,) = ran.backward((torch.full((2,), 3.0),), retain_graph=False)
    assert cargo.needs_grad == (True,) and gradients[0].tolist() == [3.0, 3.0]


def test_without_a_backward_to_come_nothing_is_kept() -> None:
    cargo, ran = run_forward(lambda x: x * 2, [], (torch.ones(2, requires_grad=True),), {}, keep=False)
    assert ran is None and cargo.leaves[0].tolist() == [2, 2]


@pytest.mark.parametrize("inputs", [(), (torch.ones(1), torch.ones(1))])
def test_a_stage_called_with_the_wrong_arguments_raises_its_own_error(inputs: tuple[torch.Tensor, ...]) -> None:
    def on_rank(rank: Rank) -> str:
        with pytest.raises((TypeError, pe.PeerFailedError), match="argument") as caught:
            list(rank.pipeline.stream([pe.Microbatch(inputs)]))
        return type(caught.value).__name__

    assert on_ranks(on_rank) == ["TypeError", "PeerFailedError"]


class Recycling(Layer):
    """A stage that writes every output into one buffer, over the last one, which may still be on its way."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.buffer = torch.empty(ROWS[-1], WIDTH)

    def forward(self, x: torch.Tensor, *, number: int = 0) -> torch.Tensor:
        with torch.no_grad():
            buffer = self.buffer[: x.shape[0]]
            buffer.copy_(super().forward(x, number=number))
        return buffer


def recycle(transport: Transport) -> None:
    rank = Rank(transport, "gpipe", Recycling)
    rows = [ROWS[-1]] * 4
    with torch.no_grad(), rank.pipeline:
        for output, true in zip(rank.pipeline.forward(batch(rows)), plain(3, rows).outputs, strict=True):
            assert torch.equal(output, true)


def recycle_in_process(rank: int) -> None:
    recycle(pe.TorchTransport())


def test_a_tensor_that_is_overwritten_while_it_is_sent_was_copied_before() -> None:
    """Messages too large to be handed to the kernel, whose bytes the transport reads late."""
    run_ranks_in_threads(recycle, 3)
    assert run_in_processes(recycle_in_process, 3) == [None] * 3
