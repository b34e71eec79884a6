"""What a benchmark leaves behind: its environment, and every figure as data."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen


def environment() -> dict[str, Any]:
    """What a reader needs to judge the figures."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.system(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "backend": "gloo",
    }


@frozen
class Record:
    """Made before anything is measured, so that the load is that of other work."""

    environment: dict[str, Any] = field(factory=environment)

    def end(self, file: Path | None, **data: Any) -> None:
        """Print the environment, and write it to ``file`` with ``data``, if there is one."""
        print(", ".join(f"{name} {value}" for name, value in self.environment.items()))
        if file:
            file.write_text(json.dumps({"environment": self.environment, **data}, indent=2) + "\n")
