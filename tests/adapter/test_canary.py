"""The canary: several stages against one, in real processes; with ``ART_SRC`` over ART's own class as well."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

import torch

from art_adapter.__main__ import main
from art_adapter.canary import Plan, Seen
from art_adapter.comparison import RELATIVE, as_data, compare

from .art_on_cpu import why_not


def run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    file = tmp_path / "result.json"
    assert main(["canary", *arguments, "--steps", "1", "--json", str(file)]) == 0
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def test_two_stages_of_the_reference_train_as_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ART_SRC", raising=False)
    result = run(tmp_path)
    words = capfd.readouterr()
    assert words.out.startswith("2 processes over reference: ") and words.err == ""
    assert result["host"] == "reference" and "commit" not in result
    assert result["ok"] and all(check["difference"] == 0.0 for check in result["checks"].values())


def test_two_chunks_on_one_rank_train_as_one_does_and_data_may_have_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ART_SRC", raising=False)
    assert main(["canary", "--pp", "1", "--virtual", "2", "--steps", "1", "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["schedule"] == "interleaved" and result["ok"]
    assert all(check["difference"] == 0.0 for check in result["checks"].values())


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_uneven_stages_of_arts_own_class_train_as_one_does(tmp_path: Path) -> None:
    result = run(tmp_path, "--pp", "3")
    assert result["host"] == "art" and result["ok"]
    is_checkout = any((path / ".git").exists() for path in Path(os.environ["ART_SRC"]).resolve().parents)
    assert (result["commit"] is not None) == is_checkout


def seen(stage: int, outputs: float, norm: float = 1.0) -> Seen:
    step = {name: {} for name in ("dp_reduce", "head gradients", "head parameters")}
    own = {f"weight {stage}": torch.ones(2)}
    return Seen(
        stage=stage,
        shard=(0, 0, 0),
        steps=[
            {
                **step,
                "outputs": {"0": torch.tensor(outputs)},
                "loss": {"0": torch.tensor(1.0)},
                "model gradients": own,
                "gradient norm": {"before clipping": torch.tensor(norm)},
                "parameters": own,
            }
        ]
        * 2,
        seconds=1.0,
        weights={f"weight {stage}": 2},
        bytes_per_channel={},
        peak_in_flight=1,
        num_windows=1,
    )


def whole(outputs: float = 1.0) -> Seen:
    one, other = seen(0, outputs), seen(1, outputs)
    for step, more in zip(one.steps, other.steps, strict=True):
        for name in ("model gradients", "parameters"):
            step[name] = {**step[name], **more[name]}
    one.weights.update(other.weights)
    return one


@pytest.mark.parametrize("host", ["reference", "art"])
def test_outputs_and_losses_are_exact_in_every_step_and_norms_are_close(host: str) -> None:
    plan = Plan(steps=2, host=host)
    checks = compare(plan, [seen(0, 1.0), seen(1, 1.0 + 2**-20, norm=1.0 + 2**-21)], [whole()])
    for step in ("step 1", "step 2"):
        assert not checks[f"{step}: outputs"].ok and checks[f"{step}: loss"].tolerance == 0.0
        assert checks[f"{step}: gradient norm"].ok and checks[f"{step}: gradient norm"].tolerance == RELATIVE


def test_a_value_that_a_stage_lacks_fails_and_the_result_says_so() -> None:
    plan = Plan(steps=2, host="reference")
    lacking = seen(1, 1.0)
    lacking.steps[0]["outputs"].clear()
    checks = compare(plan, [seen(0, 1.0), lacking], [whole()])
    result = as_data(plan, [seen(0, 1.0), lacking], 1.0, checks)
    assert not result["ok"] and not result["checks"]["step 1: outputs"]["ok"]
