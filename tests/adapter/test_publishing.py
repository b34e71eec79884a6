"""A slot that lies on several stages is published to the same files as from one process."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("safetensors")

from safetensors.torch import load_file

from art_adapter.tiny_gpt import Cut, Shape, adapter, transformer_config

from .art_on_cpu import why_not
from .hosts import host
from .playing import Play
from .processes import on_ranks
from .test_trainer import told

CUTS = {
    "two stages": (2, Cut(pipeline=2, layers_per_stage=(1, 3))),
    "three stages": (3, Cut(pipeline=3, layers_per_stage=(2, 1, 1))),
    "two chunks on each of two ranks": (2, Cut(pipeline=2, virtual=2)),
    "two data ranks of each of two stages": (4, Cut(pipeline=2)),
}
TENSORS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def publish(rank: int, name: str, cut: Cut, folder: str, steps: int = 1) -> str:
    """Publish a slot after optimizer steps on the same data on all data-parallel ranks; how another name is refused."""
    if name == "publisher":
        publisher = importlib.import_module("tests.adapter.miniatures.publisher")
        sys.modules[publisher.PLACE_OF_ARTS] = publisher
    own = host(name)
    play = Play(own, own.build(cut))
    for _ in range(steps):
        play.loss(play.trainer.dp_rank_forward(play.requests(2))).backward()
        play.step()
    play.trainer.save_checkpoint_slot_lora("A", folder)
    return told(lambda: play.trainer.save_checkpoint_slot_lora("unknown", folder))[0]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def from_one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole")
    assert on_ranks(publish, 1, "publisher", Cut(), str(folder)) == ["ValueError"]
    return contents(folder)


@pytest.mark.parametrize("cut", CUTS)
def test_files_are_those_from_one_process_byte_for_byte(
    from_one_process: dict[str, bytes], cut: str, tmp_path: Path
) -> None:
    ranks, where = CUTS[cut]
    assert on_ranks(publish, ranks, "publisher", where, str(tmp_path)) == ["ValueError"] * ranks
    assert sorted(from_one_process) == [CONFIG, TENSORS]
    assert contents(tmp_path) == from_one_process


def test_shards_of_tensor_ranks_on_two_stages_are_put_together(tmp_path: Path) -> None:
    cut = Cut(pipeline=2, tensor=2, sequence_parallel=True)
    on_ranks(publish, 4, "publisher", cut, str(tmp_path), 0)
    found = load_file(tmp_path / TENSORS)
    loaded = adapter(transformer_config(Shape(), Cut()), seed=1)
    assert {f"base_model.model.{key}.weight" for key in loaded} == set(found)
    for key, weight in loaded.items():
        assert found[f"base_model.model.{key}.weight"].equal(weight), key


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_slot_on_two_stages_is_published_to_the_same_files_as_from_one_process_over_arts_own_class(
    tmp_path: Path,
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert on_ranks(publish, 1, "art", Cut(), str(whole)) == ["ValueError"]
    assert on_ranks(publish, 2, "art", Cut(pipeline=2, layers_per_stage=(1, 3)), str(cut)) == ["ValueError"] * 2
    assert contents(whole).keys() == contents(cut).keys() == {CONFIG, TENSORS}
    assert (whole / TENSORS).stat().st_size == (cut / TENSORS).stat().st_size
    expected, found = (load_file(folder / TENSORS) for folder in (whole, cut))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() <= 1e-6, name
    assert (whole / CONFIG).read_bytes() == (cut / CONFIG).read_bytes()
