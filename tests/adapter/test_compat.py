"""The adapter knows a trainer by its shape, and says which name is missing when it has changed."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core")

import torch

from art_adapter import UnsupportedHostError, UnsupportedTopologyError
from art_adapter.compat import SEAM, art_trainer_rank, boundary_input, check_shape, presented_as_one_stage, refusal_of
from art_adapter.reference import ReferenceTrainerRank
from art_adapter.topology import Topology, check_supported

from .art_on_cpu import why_not
from .hosts import OWN, host
from .miniatures import july, september


@pytest.mark.parametrize("name", OWN)
def test_the_shapes_of_our_own_hosts_are_known(name: str) -> None:
    check_shape(host(name).trainer_class)


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_the_shape_of_the_tree_is_known() -> None:
    check_shape(host("art").trainer_class)


@pytest.mark.parametrize("name", SEAM)
def test_a_name_that_is_missing_is_named(name: str) -> None:
    changed = type("TrainerRank", (july.TrainerRank,), {name: None, "__module__": july.__name__})
    with pytest.raises(UnsupportedHostError, match=f"july.TrainerRank is not .*: {name} is missing; use the version"):
        check_shape(changed)


def test_a_signature_that_has_changed_is_shown() -> None:
    def _forward_packed(self: Any, *, rows: Any) -> None: ...

    changed = type("TrainerRank", (july.TrainerRank,), {"_forward_packed": _forward_packed})
    with pytest.raises(UnsupportedHostError, match=r"_forward_packed\(self: .* does not take items, prepared"):
        check_shape(changed)


def test_a_step_that_counts_parameters_elsewhere_is_refused() -> None:
    def _dynamic_optim_step(self: Any, checkpoint_names: Any) -> None: ...

    changed = type("TrainerRank", (july.TrainerRank,), {"_dynamic_optim_step": _dynamic_optim_step})
    with pytest.raises(UnsupportedHostError, match="_dynamic_optim_step no longer uses _distributed_grad_norm"):
        check_shape(changed)


def test_a_refusal_is_of_the_hosts_own_kind_where_it_has_one() -> None:
    assert refusal_of(july.TrainerRank) is refusal_of(ReferenceTrainerRank) is UnsupportedTopologyError
    kind = refusal_of(september.TrainerRank)
    assert issubclass(kind, (UnsupportedTopologyError, september.TrainerRankRuntimeSupportError))
    assert issubclass(kind, september.TrainerRankRuntimeSupportError)
    with pytest.raises(september.TrainerRankRuntimeSupportError, match=r"PP > 1 with EP > 1 is not supported: .*; use"):
        check_supported(Topology(2, 1, 1, 2, 1), kind)


def test_arts_constructor_sees_one_stage_and_nobody_else_does() -> None:
    provider = SimpleNamespace(pipeline_model_parallel_size=4)
    with pytest.raises(ArithmeticError), presented_as_one_stage(provider):
        assert provider.pipeline_model_parallel_size == 1
        raise ArithmeticError
    assert provider.pipeline_model_parallel_size == 4


class Stage:
    """Of a GPTModel, what a boundary input is given to."""

    def __init__(self) -> None:
        self.input: Any = None

    def set_input_tensor(self, tensor: Any) -> None:
        self.input = tensor

    def _preprocess(self, decoder_input: Any = None) -> Any:
        return decoder_input


def test_a_stage_starts_from_what_it_received_and_forgets_it() -> None:
    stage, received = Stage(), torch.ones(1)
    with boundary_input(stage, [received]):
        assert stage.input is received and stage._preprocess() is received
    assert stage.input is None and stage._preprocess() is None and "_preprocess" not in vars(stage)
    hook = stage._preprocess = lambda decoder_input=None: ("hooked", decoder_input)  # type: ignore[method-assign]
    with boundary_input(stage, [received]):
        assert stage._preprocess() == ("hooked", received)
    assert stage._preprocess is hook
    with boundary_input(stage, []):
        assert stage.input is None


def test_without_art_the_way_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "art.trainer_rank", None)
    monkeypatch.delenv("ART_SRC", raising=False)
    with pytest.raises(ImportError, match=r"ART_SRC is not set: .*; a runtime of art_adapter.Runtime needs no ART"):
        art_trainer_rank()
