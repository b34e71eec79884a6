"""Wheel and sdist hold what they should, and the plan works from the wheel with attrs alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path, PurePosixPath

import attr
import attrs
import pytest

import pipeline_engine as pe

ROOT = Path(pe.__file__).parents[1]
NEEDED = 77  # of setuptools, as pyproject.toml says
BUILD = "from setuptools import build_meta as b; b.build_wheel('dist'); b.build_sdist('dist')"


def setuptools_is_too_old() -> bool:
    try:
        return int(version("setuptools").partition(".")[0]) < NEEDED
    except ModuleNotFoundError:
        return True


pytestmark = pytest.mark.skipif(
    setuptools_is_too_old(), reason=f"building without the network wants setuptools >= {NEEDED} in this environment"
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and an sdist, built from a copy of the project."""
    copy = tmp_path_factory.mktemp("project")
    unwanted = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info", "build", "dist", "api", "venv")
    shutil.copytree(ROOT, copy, ignore=unwanted, dirs_exist_ok=True)
    (copy / "dist").mkdir()
    done = subprocess.run([sys.executable, "-c", BUILD], cwd=copy, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return copy / "dist"


def modules() -> set[str]:
    """Every file of the two packages, as it must be in the wheel."""
    files = [
        path
        for package in ("pipeline_engine", "art_adapter")
        for pattern in ("*.py", "py.typed")
        for path in (ROOT / package).rglob(pattern)
    ]
    return {path.relative_to(ROOT).as_posix() for path in files}


def test_the_wheel_holds_the_two_packages_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == modules()


def test_the_sdist_holds_the_packages_and_what_builds_them(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        paths = [PurePosixPath(member.name) for member in archive.getmembers() if member.isfile()]
    names = {PurePosixPath(*path.parts[1:]).as_posix() for path in paths}
    others = {name for name in names - modules() if "egg-info/" not in name}
    assert modules() <= names
    assert others == {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"}


PLAN = """
import importlib.util, pipeline_engine as pe
assert importlib.util.find_spec("torch") is None
for name, recipe in pe.SCHEDULES.items():
    graph = pe.StageGraph.chain(4 if recipe.placement == "straight" else 8, 4, recipe.placement)
    schedule = pe.build(name, graph, 8)
    pe.check(schedule)
    print(name, pe.simulate(schedule, pe.Costs()).makespan)
"""


def interpreter(release: str) -> Path | str:
    """A Python of this release: the one that runs the tests, one on the path, or one of pyenv's."""
    if release == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for candidate in (shutil.which(f"python{release}"), *pyenv.glob(f"versions/{release}.*/bin/python")):
        if candidate and subprocess.run([candidate, "-c", ""], capture_output=True, timeout=60).returncode == 0:
            return candidate
    pytest.skip(f"there is no Python {release} here")


@pytest.mark.parametrize("release", ["3.11", "3.12", "3.13"])
def test_the_plan_works_with_attrs_alone(built: Path, tmp_path: Path, release: str) -> None:
    subprocess.run([interpreter(release), "-m", "venv", "--without-pip", tmp_path], check=True, timeout=60)
    packages = tmp_path / "lib" / f"python{release}" / "site-packages"
    for package in (attr, attrs):
        home = Path(package.__file__).parent
        shutil.copytree(home, packages / home.name)
    zipfile.ZipFile(next(built.glob("*.whl"))).extractall(packages)
    command = [tmp_path / "bin/python", "-I", "-c", PLAN]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "gpipe 33.0" and len(done.stdout.splitlines()) == len(pe.SCHEDULES)
