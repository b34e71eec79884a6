"""The README tells the truth: every block of code runs, and every table says what the code says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import frozen

import pipeline_engine as pe
from pipeline_engine.plan.actions import Backward, Forward, Yield
from pipeline_engine.run.transports.base import Transport
from pipeline_engine.testing import run_ranks_in_threads
from tests.run.processes import Crash, _free_port, run_in_processes
from tests.strategies import chain_for

ROOT = Path(pe.__file__).parents[1]
README = (ROOT / "README.md").read_text()
LETTERS = {Forward: "F", Yield: "L", Backward: "B"}


@frozen
class Block:
    """A fenced block, and the comment before it that says how it is run."""

    how: str
    text: str


BLOCKS = [
    Block(found["how"], found["text"])
    for found in re.finditer(r"<!-- (?P<how>[^\n]*) -->\n```\w+\n(?P<text>.*?)^```$", README, re.DOTALL | re.MULTILINE)
]
HOW = {
    "run: threads",
    "the picture",
    "run: torchrun",
    "run: that file",
    "run: python",
    "canary command",
    "test command: .ci/run executes this block as it stands",
    "run: two ranks",
    "it prints",
    "run: two ranks, with transformers",
    "run: over the reference trainer",
    "as in tests/adapter/test_stages.py",
    "run: sh",
    "run: with pdoc",
    "as in tests/run/test_wrappers.py",
    "run by .ci/run",
}
"""Each is the argument of a ``blocks`` or ``block`` below."""


def blocks(how: str) -> list[str]:
    return [block.text for block in BLOCKS if block.how == how]


def block(how: str) -> str:
    (text,) = blocks(how)
    return text


def between(start: str, end: str) -> str:
    return README.partition(start)[2].partition(end)[0].strip()


def run_shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """In a shell that finds this interpreter's programs and these packages first."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    command = f"set -euo pipefail\n{command}"
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=100
    )


def test_every_block_says_how_it_is_run_and_every_way_is_known() -> None:
    assert len(BLOCKS) == len(re.findall(r"^```", README, re.MULTILINE)) / 2
    assert {block.how for block in BLOCKS} == HOW


def test_the_picture_is_the_schedule_that_runs() -> None:
    lowered = pe.lower(pe.build("1f1b", pe.StageGraph.chain(3, 3), 4))
    rows = [
        " ".join(f"{LETTERS[type(action)]}{action.microbatch}" for action in program if type(action) in LETTERS)  # type: ignore[union-attr, index]
        for program in lowered.programs
    ]
    assert block("the picture").splitlines() == [f"rank {rank}   {row}" for rank, row in enumerate(rows)]


def test_the_first_lines_run_on_every_rank() -> None:
    def caller(transport: Transport) -> list[tuple[int, ...]]:
        shapes: list[tuple[int, ...]] = []

        def loss(outputs: torch.Tensor, target: float) -> torch.Tensor:
            shapes.append(tuple(outputs.shape))
            return (outputs - target).square().sum()

        graph, stage = pe.StageGraph.chain(2, 2), torch.nn.Linear(4, 4)
        with pe.Pipeline({transport.rank: stage}, graph=graph, schedule="1f1b", transport=transport) as pipeline:
            microbatches = [pe.Microbatch((torch.ones(length, 4),)) for length in (3, 1, 2)]
            exec(block("run: threads"), {**locals(), "targets": [0.0, 1.0, 2.0]})
        return shapes

    assert run_ranks_in_threads(caller, 2) == [[(3, 4), (1, 4), (2, 4)]] * 2


def test_ten_lines_run_under_torchrun_and_say_nothing_more(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(block("run: torchrun"))
    done = run_shell(block("run: that file"), tmp_path)
    assert done.returncode == 0, done.stderr
    line = r"rank (\d): gradient norm \d\.\d{4}"  # its end may come after the other rank's: they are written apart
    assert sorted(re.findall(line, done.stdout)) == ["0", "1"]
    assert re.sub(line, "", done.stdout) == "\n\n" and "pipeline_engine" not in done.stderr


@pytest.mark.parametrize("text", blocks("run: python"))
def test_a_block_without_processes_runs(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(text, {"__name__": "readme"})
    assert capsys.readouterr().out


def programs_of_a_rank(rank: int, programs: Sequence[str], ports: Sequence[int]) -> list[tuple[str, Any]]:
    """Run programs as ``torchrun`` would; what each printed, and whether its gradients are those of ``model``."""
    dist.destroy_process_group()
    found = []
    for program, port in zip(programs, ports, strict=True):
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_PORT=str(port))
        names: dict[str, Any] = {"__name__": "readme"}
        with redirect_stdout(StringIO()) as printed:
            exec(program, names)
        assert not dist.is_initialized()
        found.append((printed.getvalue(), _as_whole_model(names) if "model" in names else None))
    return found


def _as_whole_model(names: dict[str, Any]) -> bool:
    model, mine = names["model"], torch.nn.ModuleList(names["mine"])
    piecewise = [parameter.grad.clone() for parameter in mine.parameters()]
    model.zero_grad()
    for text in names["texts"]:
        torch.nn.functional.cross_entropy(model(text).logits[0, :-1], text[0, 1:]).backward()
    return all(torch.equal(p.grad, grad) for p, grad in zip(mine.parameters(), piecewise, strict=True))


def on_two_ranks(*programs: str) -> list[list[tuple[str, Any]]]:
    found = run_in_processes(programs_of_a_rank, 2, programs, [_free_port() for _ in programs])
    for rank, each in enumerate(found):
        assert not isinstance(each, Crash), f"rank {rank}:\n{each}"
    return found


def test_the_loops_run_on_two_ranks_and_print_what_is_shown() -> None:
    (printed_by_0, _), (printed_by_1, _) = (each[0] for each in on_two_ranks("".join(blocks("run: two ranks"))))
    error_of_0, error_of_1 = block("it prints").splitlines()
    assert "% idle" in printed_by_0 and printed_by_0.splitlines()[-1] == error_of_0
    assert printed_by_1.splitlines() == [error_of_1]


def test_a_hugging_face_model_trains_as_it_does_uncut() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    for ((printed, is_as_uncut),) in on_two_ranks(block("run: two ranks, with transformers")):
        assert printed == "" and is_as_uncut


def tokens_of(length: int) -> Any:
    from art_adapter import ForwardInput

    return ForwardInput(input_tokens=torch.arange(length), target_tokens=torch.arange(1, length + 1))


def train_a_gpt(rank: int, text: str) -> list[float]:
    import art_adapter
    from art_adapter import tiny_gpt

    losses: list[float] = []

    def loss(outputs: Any) -> torch.Tensor:
        found = torch.stack([-output.target_logprobs.mean() for output in outputs]).sum()
        losses.append(found.item())
        return found

    runtime = tiny_gpt.build_runtime(tiny_gpt.Shape(), tiny_gpt.Cut(pipeline=2))
    inputs = [tokens_of(length) for length in (5, 9, 3)]
    exec(text, locals() | {"art_adapter": art_adapter, "adapter": tiny_gpt.adapter(runtime.provider)})
    return losses


def test_a_trainer_runs_over_two_stages() -> None:
    pytest.importorskip("megatron.core")
    from tests.adapter.processes import on_ranks

    first, last = on_ranks(train_a_gpt, 2, block("run: over the reference trainer"))
    assert first == last and len(first) > 0


def test_the_lines_for_a_trainer_are_those_that_are_tried() -> None:
    tried = (ROOT / "tests/adapter/test_stages.py").read_text()
    diff = block("as in tests/adapter/test_stages.py").splitlines()
    for line in (line[1:].strip() for line in diff if line.startswith("+")):
        assert line in tried, line


def test_the_lines_for_wrappers_are_those_that_are_tried() -> None:
    tried = (ROOT / "tests/run/test_wrappers.py").read_text()
    lines = [line.partition("  #")[0].strip() for line in block("as in tests/run/test_wrappers.py").splitlines()[1:]]
    assert all(line in tried for line in lines) and "on_last_backward=reduce_now" in tried


def test_commands_answer(tmp_path: Path) -> None:
    done = run_shell(block("run: sh"), tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and "27.3% idle" in done.stdout


def test_the_reference_is_rendered_with_every_public_name(tmp_path: Path) -> None:
    pytest.importorskip("pdoc", reason="pdoc is not installed: it is in the extra 'docs'")
    done = run_shell(block("run: with pdoc").partition("&& ")[2], tmp_path)
    assert done.returncode == 0 and "does not resolve" not in done.stderr, done.stderr
    page = (tmp_path / "api/pipeline_engine.html").read_text()
    assert all(f'id="{name}"' in page for name in pe.__all__)


def test_extras_and_checks_are_those_of_the_project() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for how in ("canary command", "test command: .ci/run executes this block as it stands", "run: with pdoc"):
        (name,) = re.findall(r"\.\[(\w+)\]", block(how))
        assert name in extras
    checks = (ROOT / ".ci/run").read_text()
    for command in block("run by .ci/run").split("&&"):
        assert command.strip() in checks


def test_the_table_of_schedules_is_that_of_their_pages() -> None:
    assert between("<!-- table of schedules -->", "<!-- end of the table of schedules -->") == table_of_schedules()


def table_of_schedules() -> str:
    lines = [
        "| name | stages | bubble, seconds per rank | held on rank *r* at most | idle |",
        "|---|---|---|---|---|",
    ]
    for name, recipe in pe.SCHEDULES.items():
        page = " ".join(recipe.page.split())
        bubble, held = re.findall(r"Bubble: (.*?)\. Held on (?:every rank|rank r): (.*?)\. ", page)[0]
        held = re.sub(r" activations( of a stage)?", "", held).replace("at most ", "")
        schedule = pe.build(name, chain_for(name, 4, 2), 8)
        each = schedule.graph.num_stages // 4
        idle = pe.simulate(schedule, pe.Costs(1 / each, 1 / each, 1 / each)).bubble
        cells = (
            f"`{name}`",
            recipe.demand.text.replace("mod P", "mod p"),
            bubble.replace(" seconds per rank", ""),
            held,
            f"{idle:.1%}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
