"""The command line starts quickly, answers in text or JSON, and says in one line what is wrong."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pipeline_engine as pe
from pipeline_engine.__main__ import main


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeline_engine", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_it_starts_in_under_half_a_second_and_without_torch() -> None:
    """Of its own time, for the machine may be busy."""
    seconds = []
    for _ in range(5):
        start = seconds_of_children()
        done = run("show", "1f1b", "--ranks", "4", "--num-microbatches", "8")
        seconds.append(seconds_of_children() - start)
        assert done.returncode == 0 and done.stderr == ""
    assert min(seconds) < 0.5
    code = "import sys, pipeline_engine.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_show_draws_and_writes_every_kind_of_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg, trace, csv = tmp_path / "a.svg", tmp_path / "a.json", tmp_path / "a.csv"
    sizes = ["show", "1f1b", "--ranks", "4", "--num-microbatches", "8"]
    assert main([*sizes, "--svg", str(svg), "--trace", str(trace), "--csv", str(csv)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("rank 0 | F0 F1 F2 F3 ..") and "33 s, 27.3% idle" in text and "4, 3, 2, 1" in text
    assert svg.read_text().startswith("<svg") and json.loads(trace.read_text())["traceEvents"]
    assert main(["check", str(csv)]) == 0
    assert "keeps all laws" in capsys.readouterr().out


def test_show_as_json_is_the_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    main(["show", "zb-v", "--ranks", "2", "--num-microbatches", "3", "--json"])
    graph = pe.StageGraph.chain(4, 2, "vee")
    assert pe.from_json(capsys.readouterr().out) == pe.build("zb-v", graph, 3)


def test_several_stages_a_rank_and_a_limit_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    shown = answer(capsys, "show", "interleaved", "--ranks", "4", "--num-microbatches", "8", "--stages", "16")
    assert len(shown["rank_of"]) == 16
    limited = answer(capsys, "simulate", "1f1b", "--ranks", "4", "--num-microbatches", "8", "--max-in-flight", "6")
    assert max(limited["peak_in_flight"]) == 6


def test_check_shows_a_counter_example_and_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    crossed = tmp_path / "crossed.csv"
    crossed.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    assert main(["check", str(crossed)]) == 1
    assert "deadlocks" in capsys.readouterr().out
    assert main(["check", str(crossed), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["lawful"] is False


def test_simulate_takes_costs_and_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    slow = answer(capsys, "simulate", "1f1b", "--ranks", "4", "--num-microbatches", "8", "--latency", "0.05")
    assert slow["makespan"] > 33
    costs = ["--forward", "0.5", "--backward-input", "0.5", "--backward-weight", "0.5", "--latency", "0.05"]
    lengths = ["simulate", "1f1b", "--ranks", "4", "--lengths", "512,64,1024,64,64,2048,100,300", *costs]
    given, planned = answer(capsys, *lengths), answer(capsys, *lengths, "--order", "planned")
    assert planned["makespan"] < given["makespan"]
    assert given["order"] == sorted(planned["order"]) == list(range(8))


def test_compare_has_a_row_for_every_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    rows = answer(capsys, "compare", "--ranks", "4", "--num-microbatches", "8")
    assert [row["schedule"] for row in rows] == list(pe.SCHEDULES)
    makespans = {row["schedule"]: row["makespan"] for row in rows}
    assert (makespans["gpipe"], makespans["1f1b"], makespans["zb-v"]) == pytest.approx((33, 33, 25.5))
    assert main(["compare", "--ranks", "4", "--num-microbatches", "8"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 2 + len(rows) and all(name in "\n".join(table) for name in pe.SCHEDULES)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "required"),
        ("dance", "invalid choice"),
        ("show 2f1b --ranks 2 --num-microbatches 2", "'2f1b' is unknown; one of"),
        ("show 1f1b --num-microbatches 2", "--ranks"),
        ("show 1f1b --ranks 0 --num-microbatches 2", "'0' is not a whole number of 1 or more"),
        ("show 1f1b --ranks 2", "number of microbatches is unknown"),
        ("show 1f1b --ranks 2 --num-microbatches 2 --stages 3", "multiple of 2 stages"),
        ("show 1f1b --ranks 2 --num-microbatches 2 --svg /nowhere/a.svg", "No such file"),
        ("simulate 1f1b --ranks 2 --num-microbatches 2 --latency -1", "'-1' is not a number of seconds"),
        ("simulate 1f1b --ranks 2 --lengths 1,x", "not a list of numbers"),
        ("simulate 1f1b --ranks 2 --lengths 1,0", "a length is more than 0"),
        ("simulate 1f1b --ranks 2 --num-microbatches 3 --lengths 1,2", "2 weights are given for 3 microbatches"),
        ("check /nowhere/a.csv", "No such file"),
        ("compare --ranks 2", "number of microbatches is unknown"),
    ],
)
def test_a_wrong_argument_gets_one_line_and_status_2(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and out == ""
    assert len(err.splitlines()) == 1 and words in err


def test_a_file_that_is_no_schedule_gets_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in {"words.csv": b"hello,world\n", "bytes.csv": b"\xff\xfe"}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SystemExit) as ended:
            main(["check", str(tmp_path / name)])
        assert ended.value.code == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
