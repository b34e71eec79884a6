"""Imports go one way, the plan needs no torch, and every public name is there and says what it is."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pipeline_engine as pe

ROOT = Path(pe.__file__).parent
LAYERS = {"errors": 0, "plan": 1, "run": 2, "testing": 3, "launch": 3, "art_adapter": 3}
MODULES = sorted([*ROOT.rglob("*.py"), *(ROOT.parent / "art_adapter").rglob("*.py")])


def layer_of(module: str) -> int | None:
    """The layer of a dotted name; None for what belongs to no layer: other packages, and the lazy front page."""
    package, *rest = module.split(".")
    if package == "pipeline_engine":
        return LAYERS.get(rest[0]) if rest else None
    return LAYERS.get(package)


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each thing that a module imports, wherever it stands in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(path.relative_to(ROOT.parent).parts[: -node.level]) + "." if node.level else ""
            source = f"{package}{node.module or ''}".rstrip(".")
            yield node.lineno, source
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_imports_point_down_the_layers(path: Path) -> None:
    own = layer_of(dotted(path))
    if own is None:
        return
    for line, name in imports(path):
        theirs = layer_of(name)
        assert theirs is None or theirs <= own, f"{path}:{line}: a layer below imports {name}"
        if own < LAYERS["art_adapter"]:
            assert name != "pipeline_engine", f"{path}:{line}: the engine does not import its own front page"


@pytest.mark.parametrize("path", [path for path in MODULES if layer_of(dotted(path)) == LAYERS["plan"]], ids=dotted)
def test_the_plan_imports_neither_torch_nor_a_clock(path: Path) -> None:
    packages = {name.partition(".")[0] for _, name in imports(path)}
    assert not packages & {"torch", "time", "os", "random", "numpy", "megatron"}


@pytest.mark.parametrize("path", [path for path in MODULES if "art_adapter" not in str(path)], ids=dotted)
def test_the_engine_knows_no_trainer(path: Path) -> None:
    packages = {name.partition(".")[0] for _, name in imports(path)}
    assert not packages & {"art_adapter", "megatron", "art"}


WITHOUT_TORCH = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy"):
            raise ImportError(f"{name} is blocked here")
sys.meta_path.insert(0, Blocked())
import pipeline_engine as pe
import pipeline_engine.plan.lifetimes, pipeline_engine.plan.transfers
schedule = pe.build("1f1b", pe.StageGraph.chain(4, 4), 8)
pe.check(schedule)
print(pe.simulate(schedule, pe.Costs()).makespan)
assert not [name for name in sys.modules if name.partition(".")[0] == "torch"]
"""


def test_schedules_are_built_checked_and_simulated_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "33.0"), done.stderr


@pytest.mark.parametrize("name", pe.__all__)
def test_a_public_name_is_there_and_says_what_it_is(name: str) -> None:
    value = getattr(pe, name)
    assert name in dir(pe)
    if name != "SCHEDULES":
        assert len((inspect.getdoc(value) or "").split()) >= 4, f"{name} has no docstring of its own"
        if inspect.isclass(value) and not issubclass(value, Exception):
            for method, function in vars(value).items():
                if not method.startswith(("_", "on_")) and callable(function):
                    assert inspect.getdoc(getattr(value, method)), f"{name}.{method} has no docstring"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Pipelin'"):
        pe.Pipelin  # noqa: B018


def test_every_error_has_the_base_class_and_a_builtin_parent() -> None:
    errors = [value for name in pe.__all__ if isinstance(value := getattr(pe, name), type) and name.endswith("Error")]
    for error in errors:
        assert issubclass(error, pe.PipelineError)
        if error is not pe.PipelineError:
            assert issubclass(error, (ValueError, RuntimeError, TimeoutError))


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_a_file_begins_with_what_it_is(path: Path) -> None:
    assert (ast.get_docstring(ast.parse(path.read_text())) or "").strip()
