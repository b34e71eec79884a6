"""With ``ART_SRC``: a slot that lies on several stages is published to the same files as from one process."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from art_adapter.tiny_gpt import Cut

from .art_on_cpu import why_not
from .hosts import host
from .playing import Play
from .processes import on_ranks
from .test_trainer import told


def publish(rank: int, cut: Cut, folder: str) -> str:
    own = host("art")
    play = Play(own, own.build(cut))
    play.loss(play.trainer.dp_rank_forward(play.requests(2))).backward()
    play.step()
    play.trainer.save_checkpoint_slot_lora("A", folder)
    return told(lambda: play.trainer.save_checkpoint_slot_lora("unknown", folder))[0]


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.skipif(
    importlib.util.find_spec("safetensors") is None, reason="ART publishes with safetensors, which is not installed"
)
def test_a_slot_on_two_stages_is_published_to_the_same_files_as_from_one_process(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert on_ranks(publish, 1, Cut(), str(whole)) == ["ValueError"]
    assert on_ranks(publish, 2, Cut(pipeline=2, layers_per_stage=(1, 3)), str(cut)) == ["ValueError"] * 2
    names = sorted(path.name for path in whole.iterdir())
    assert names == sorted(path.name for path in cut.iterdir()) and len(names) == 2
    for name in names:
        assert (whole / name).stat().st_size == (cut / name).stat().st_size
    from safetensors.torch import load_file

    expected, found = (load_file(folder / "adapter_model.safetensors") for folder in (whole, cut))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() <= 1e-6, name
    config = "adapter_config.json"
    assert (whole / config).read_bytes() == (cut / config).read_bytes()
