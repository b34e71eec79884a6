"""It fits in: process groups and device meshes, a quiet log, types that a user's checker accepts."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import pipeline_engine as pe
from tests.run.processes import Crash, run_in_processes

ROOT = Path(pe.__file__).parents[1]
SPEAKING = {"__main__.py"}  # command lines
SOURCES = [*(ROOT / "pipeline_engine").rglob("*.py"), *(ROOT / "art_adapter").rglob("*.py")]


def train(transport: pe.TorchTransport) -> tuple[int, float]:
    """A step of a two-stage pipeline; this rank's place in it, and a number that tells the pipelines apart."""
    stage = torch.nn.Linear(4, 4)
    torch.nn.init.constant_(stage.weight, float(dist.get_rank() // 2 + 1))
    torch.nn.init.zeros_(stage.bias)
    microbatches = [pe.Microbatch((torch.ones(rows, 4),)) for rows in (2, 1)]
    graph, seen = pe.StageGraph.chain(2, 2), 0.0
    with pe.Pipeline({transport.rank: stage}, graph=graph, schedule="1f1b", transport=transport) as pipeline:
        for item in pipeline.stream(microbatches):
            item.outputs.sum().backward()
            seen = float(item.outputs[0, 0])
    assert stage.weight.grad is not None
    return transport.rank, seen


def over_a_mesh_and_over_groups(rank: int) -> list[tuple[int, float]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return [train(pe.TorchTransport(group)) for group in (mesh.get_group("pp"), groups[rank // 2])]


def test_two_pipelines_live_side_by_side() -> None:
    found = run_in_processes(over_a_mesh_and_over_groups, 4)
    assert not [each for each in found if isinstance(each, Crash)], found
    assert found == [2 * [(0, 16.0)], 2 * [(1, 16.0)], 2 * [(0, 64.0)], 2 * [(1, 64.0)]]


QUIET = """
import torch, pipeline_engine as pe
from pipeline_engine.testing import run_ranks_in_threads

def train(transport):
    stage, graph = torch.nn.Linear(4, 4), pe.StageGraph.chain(2, 2)
    with pe.Pipeline({transport.rank: stage}, graph=graph, schedule="zb-h1", transport=transport) as pipeline:
        for item in pipeline.stream([pe.Microbatch((torch.ones(3, 4),))] * 3):
            item.outputs.sum().backward()
            pipeline.invalidate()
        pipeline.step([pe.Microbatch((torch.ones(3, 4),))], lambda outputs, index: outputs.sum())

run_ranks_in_threads(train, 2)
pe.best_schedule(pe.StageGraph.chain(2, 2), pe.Costs(weights=[1, 2]))
"""


def test_an_ordinary_run_says_nothing() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", QUIET], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("path", [path for path in SOURCES if path.name not in SPEAKING], ids=lambda path: path.stem)
def test_only_command_lines_print_and_loggers_carry_the_name_of_their_module(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            call = ast.unparse(node)
            assert not call.startswith(("print(", "logging.basicConfig", "warnings.simplefilter")), (path, node.lineno)
            assert not call.startswith("logging.getLogger") or call == "logging.getLogger(__name__)", (
                path,
                node.lineno,
            )


def test_a_users_file_passes_mypy() -> None:
    """Here with the project's settings, whose cache ``.ci/run`` goes on with."""
    pytest.importorskip("megatron.core")
    command = [sys.executable, "-m", "mypy", "--strict", "tests/typing/user.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout
