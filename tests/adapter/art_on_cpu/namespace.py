"""``art`` as a namespace whose modules are found in a tree, and whose source is read on Python 3.11 as well.

The front pages of ``art`` and ``art.utils`` import clients and trackers that a trainer does not touch; here they are
empty. ART is written for Python 3.12: its ``type X = ...`` statements, which 3.11 cannot read, become plain names.
"""

from __future__ import annotations

import importlib.machinery
import re
import sys
import types
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

EMPTY_FRONT_PAGES = ("art", "art.utils")
ALIAS = re.compile(r"^type (\w+) = (.*)$")


def install(source: Path) -> None:
    """Find ``art.*`` under ``source`` from now on."""
    if sys.version_info < (3, 12):
        sys.meta_path.insert(0, _Finder())
        sys.dont_write_bytecode = True  # what is compiled here is not what stands in the file
    for name in EMPTY_FRONT_PAGES:
        sys.modules.setdefault(name, _package(name, source))
    sys.modules["art"].utils = sys.modules["art.utils"]  # type: ignore[attr-defined]


def _package(name: str, source: Path) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__path__ = [str(source.joinpath(*name.split(".")))]
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__spec__.submodule_search_locations = module.__path__
    return module


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if not name.startswith("art."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> types.CodeType:  # type: ignore[override]
        lines = bytes(data).decode().split("\n")
        return super().source_to_code("\n".join(_without_aliases(lines)).encode(), path, _optimize=_optimize)


def _without_aliases(lines: Sequence[str]) -> Iterator[str]:
    """The same lines; a ``type`` statement, which 3.12 evaluates lazily or never, becomes ``X = object``."""
    depth = 0
    for line in lines:
        found = ALIAS.match(line)
        if depth:
            depth += _opened(line)
            yield ""
        elif found:
            depth = _opened(found[2])
            yield f"{found[1]} = object"
        else:
            yield line


def _opened(text: str) -> int:
    return sum(text.count(bracket) for bracket in "[(") - sum(text.count(bracket) for bracket in "])")
