"""With ``ART_SRC``: ART's own unit tests of its trainer pass with our class in the place of theirs, on one stage."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .art_on_cpu import why_not

ROOT = Path(__file__).parents[2]
FILES = ("test_trainer_rank_validation.py", "test_trainer_rank_weird_shapes.py")
PLUGIN = "tests.adapter.art_on_cpu.in_its_place"


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_arts_own_unit_tests_pass_with_our_class_in_the_place_of_theirs() -> None:
    tests = [Path(os.environ["ART_SRC"]).parent / "tests/unit" / name for name in FILES]
    if missing := [str(path) for path in tests if not path.is_file()]:
        pytest.skip(f"the tree of ART_SRC has no {missing}")
    pytest_alone = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--noconftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*pytest_alone, "-p", PLUGIN, *map(str, tests)], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) > 0
    assert "failed" not in done.stdout and "skipped" not in done.stdout, done.stdout
