"""Ranks as processes: they tell what they have done so far, and Ctrl-C ends all of them without their words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch.distributed as dist

import pipeline_engine
from pipeline_engine.launch import run_ranks, tell


def count_to_three(rank: int) -> int:
    for number in range(3):
        tell((rank, number))
    return dist.get_world_size()


def test_what_ranks_tell_arrives_in_their_order_while_they_run() -> None:
    heard: dict[int, list[tuple[int, int]]] = {0: [], 1: []}
    found = run_ranks(count_to_three, 2, timeout=60, on_news=lambda rank, news: heard[rank].append(news))
    assert found == [2, 2]
    assert heard == {rank: [(rank, number) for number in range(3)] for rank in range(2)}


def test_to_tell_something_where_nobody_listens_does_nothing() -> None:
    tell("anything")


def sleep_for_long(rank: int) -> None:
    tell(os.getpid())
    time.sleep(100)


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


STARTS_RANKS = """
from pipeline_engine.launch import run_ranks
from tests.run.test_launch import sleep_for_long
if __name__ == "__main__":
    run_ranks(sleep_for_long, 2, timeout=60, on_news=lambda rank, pid: print(pid, flush=True))
"""


def test_ctrl_c_ends_every_rank_and_only_the_caller_speaks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(STARTS_RANKS)
    caller = subprocess.Popen(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": str(Path(pipeline_engine.__file__).parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert caller.stdout is not None
    ranks = [int(caller.stdout.readline()) for _ in range(2)]
    os.killpg(caller.pid, signal.SIGINT)  # as a terminal does it: all of them get it
    _, words = caller.communicate(timeout=20)
    assert caller.returncode == -signal.SIGINT and words.count("Traceback") == 1 and "KeyboardInterrupt" in words
    assert not [pid for pid in ranks if is_alive(pid)]
