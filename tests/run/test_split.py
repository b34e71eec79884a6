"""A split backward does what the whole one does: the same bits, the same hooks, and no work twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pipeline_engine as pe
from pipeline_engine.run.cargo import Cargo
from pipeline_engine.run.stage import Ran, run_forward
from tests.oracles.plain import gradients_of
from tests.run.counting import KINDS, Counted, Products, stage_of_kind
from tests.run.playing import WIDTH, Rank, loss_of, on_ranks

SPLITTING = ["zb-h1", "zb-v", "dualpipe-v"]


def received(requires_grad: bool = True) -> Cargo:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
    return Cargo.of(x.requires_grad_(requires_grad))


def after_forward(stage: Callable[..., Any], *, input_grad: bool = True) -> tuple[Ran, tuple[Any, ...]]:
    """What a forward left, and gradients for what it returned."""
    cargo, ran = run_forward(stage, [received(input_grad)], (), {}, keep=True)
    assert ran is not None
    return ran, tuple(torch.ones_like(leaf).cumsum(-1) for leaf in cargo.leaves)


def whole(counted: Counted, *, input_grad: bool = True) -> Any:
    """The input's gradient by plain autograd."""
    x = received().leaves[0].requires_grad_(input_grad)
    with Products(counted.counts):
        returned = counted(x * 1 if input_grad else x)
        outputs = returned if isinstance(returned, tuple) else (returned,)
        torch.autograd.backward(outputs, [torch.ones_like(output).cumsum(-1) for output in outputs])
    return x.grad


def halves(counted: Counted, *, input_grad: bool = True) -> tuple[Any, str]:
    """The same by a split backward, and what it says of itself."""
    with Products(counted.counts):
        ran, grads = after_forward(counted, input_grad=input_grad)
        ((grad,),), part = ran.backward_input(grads, retain_graph=False)
        del ran
        part.run(retain_graph=False)
    return grad, part.split.summary


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("input_grad", [True, False])
def test_both_halves_do_the_work_of_the_whole_once(kind: str, input_grad: bool) -> None:
    if kind == "reentrant" and not input_grad:
        pytest.skip("reentrant checkpointing needs an input that requires a gradient")
    expected, found = stage_of_kind(kind), stage_of_kind(kind)
    grad = whole(expected, input_grad=input_grad)
    split_grad, summary = halves(found, input_grad=input_grad)
    assert (grad is None and split_grad is None) or torch.equal(grad, split_grad)
    assert found.counts == expected.counts
    gradients = gradients_of(found.stage)
    assert gradients.keys() == gradients_of(expected.stage).keys()
    for name, each in gradients_of(expected.stage).items():
        assert torch.equal(gradients[name], each), name
    if input_grad:
        assert summary.startswith(KINDS[kind][1])


@pytest.mark.parametrize("kind", ["mlp", "attention", "convolved", "halved", "both"])
def test_the_first_half_makes_no_gradient_that_is_deferred(kind: str) -> None:
    counted = stage_of_kind(kind)
    ran, grads = after_forward(counted)
    _, part = ran.backward_input(grads, retain_graph=False)
    early = gradients_of(counted.stage).keys()
    deferred = {id(weight) for product in part.split.deferred for weight in product.weights}
    assert deferred and early == {name for name, p in counted.stage.named_parameters() if id(p) not in deferred}


def test_a_stage_of_which_nobody_asks_an_input_gradient_runs_whole_in_the_second_half() -> None:
    counted = stage_of_kind("mlp")
    ran, grads = after_forward(counted, input_grad=False)
    ((grad,),), part = ran.backward_input(grads, retain_graph=False)
    assert grad is None and not gradients_of(counted.stage)
    part.run(retain_graph=False)
    assert gradients_of(counted.stage).keys() == dict(counted.stage.named_parameters()).keys()
    assert part.split.summary == "whole backward in the second half: no gradient of an input is wanted"


@pytest.mark.parametrize("kind", KINDS)
def test_a_retained_graph_may_be_split_again(kind: str) -> None:
    once, twice = stage_of_kind(kind), stage_of_kind(kind)
    whole(once)
    ran, grads = after_forward(twice)
    for retain in (True, False):
        _, part = ran.backward_input(grads, retain_graph=retain)
        part.run(retain_graph=retain)
    for name, grad in gradients_of(once.stage).items():
        assert torch.equal(gradients_of(twice.stage)[name], 2 * grad), name


def test_a_hook_on_what_a_product_returns_fires_once_and_its_change_counts_once() -> None:
    counted = stage_of_kind("mlp")
    halves(counted)
    assert counted.counts["hook within"] == 2


def test_hooks_on_the_node_of_a_product_fire_once() -> None:
    fired: Counter[str] = Counter()
    linear = nn.Linear(WIDTH, WIDTH)

    def stage(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = linear(x)
        assert y.grad_fn is not None
        y.grad_fn.register_prehook(lambda grads: fired.update(["before"]))
        y.grad_fn.register_hook(lambda inputs, grads: fired.update(["after"]))
        return y

    ran, grads = after_forward(stage)
    _, part = ran.backward_input(grads, retain_graph=False)
    part.run(retain_graph=False)
    assert part.split.deferred and fired == {"before": 1, "after": 1}


def test_full_backward_hooks_of_modules_fire_once() -> None:
    fired: Counter[str] = Counter()
    linear = nn.Linear(WIDTH, WIDTH)
    linear.register_full_backward_hook(lambda *_: fired.update(["hook"]))
    linear.register_full_backward_pre_hook(lambda *_: fired.update(["pre hook"]))
    ran, grads = after_forward(linear)
    _, part = ran.backward_input(grads, retain_graph=False)
    part.run(retain_graph=False)
    assert fired == {"hook": 1, "pre hook": 1}


def test_an_output_without_a_gradient_leaves_its_weight_without_one() -> None:
    one, other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    _, ran = run_forward(lambda x: (one(x), other(x)), [received()], (), {}, keep=True)
    assert ran is not None
    _, part = ran.backward_input((torch.ones(3, WIDTH), None), retain_graph=False)
    part.run(retain_graph=False)
    assert one.weight.grad is not None and other.weight.grad is None


def test_frozen_weights_cost_nothing() -> None:
    counted = stage_of_kind("mlp")
    counted.stage.requires_grad_(False)
    expected = stage_of_kind("mlp")
    expected.stage.requires_grad_(False)
    whole(expected)
    halves(counted)
    assert counted.counts == expected.counts


def test_a_custom_function_must_name_its_weights() -> None:
    with pytest.raises(pe.UsageError, match="name at least one position of a weight"):
        pe.splits_backward(weights=[])


def test_a_declared_function_works_without_a_pipeline_too() -> None:
    declared, plain = stage_of_kind("halved"), stage_of_kind("custom")
    assert torch.equal(whole(declared), whole(plain))
    assert torch.equal(gradients_of(declared.stage)["weight"], gradients_of(plain.stage)["weight"])


def test_a_compiled_stage_runs_its_backward_whole() -> None:
    linear = nn.Linear(WIDTH, WIDTH)
    try:
        compiled = torch.compile(linear, backend="aot_eager")
        compiled(torch.ones(3, WIDTH))
    except Exception as error:
        pytest.skip(f"torch.compile does not work here: {type(error).__name__}: {error}")
    ran, grads = after_forward(compiled)
    _, part = ran.backward_input(grads, retain_graph=False)
    assert part.split.summary.startswith("whole backward at once: CompiledFunction makes all its gradients at once")
    by_hand = nn.Linear(WIDTH, WIDTH)
    by_hand.load_state_dict(linear.state_dict())
    by_hand(received().leaves[0]).backward(torch.ones(3, WIDTH).cumsum(-1))
    torch.testing.assert_close(linear.weight.grad, by_hand.weight.grad)


@pytest.mark.parametrize("entry", ["stream", "step"])
@pytest.mark.parametrize("schedule", SPLITTING)
@pytest.mark.parametrize("kind", ["mlp", "custom", "halved", "recomputed", "reentrant", "twice"])
def test_within_a_pipeline_everything_happens_as_often_as_without(kind: str, schedule: str, entry: str) -> None:
    """Forwards, hooks and calls; products are counted above, since a dispatch mode sees one thread only."""
    microbatches = [torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(m)) for m in range(5)]
    if kind == "reentrant":
        microbatches = [each.requires_grad_() for each in microbatches]

    def on_rank(rank: Rank) -> Any:
        data = [pe.Microbatch((each.detach().requires_grad_(each.requires_grad),)) for each in microbatches]
        if entry == "step":
            rank.pipeline.step(data, loss_of)
        else:
            for item in rank.pipeline.stream(data):
                loss_of(item.outputs, item.index).backward()
        rank.pipeline.flush()
        gradients = {number: gradients_of(each.stage) for number, each in rank.stages.items()}
        return {number: each.counts for number, each in rank.stages.items()}, gradients, rank.pipeline.report()

    ranks = on_ranks(on_rank, 2, schedule, lambda number: stage_of_kind(kind, number))
    num_stages = sum(len(counts) for counts, _, _ in ranks)
    stages = [stage_of_kind(kind, number) for number in range(num_stages)]
    for number, x in enumerate(microbatches):
        value: Any = x
        for each in stages:
            value = each(value)
        loss_of(value, number).backward()
    for counts, gradients, report in ranks:
        for number, stage in ((number, stages[number]) for number in counts):
            assert counts[number] == stage.counts, f"stage {number}"
            assert gradients[number].keys() == gradients_of(stage.stage).keys()
            for name, grad in gradients_of(stage.stage).items():
                torch.testing.assert_close(gradients[number][name], grad, rtol=1e-5, atol=1e-4)
            assert number == 0 or report[number].startswith(KINDS[kind][1]), report
