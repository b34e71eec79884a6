"""After long and rough use nothing has grown; ``python -m benchmarks.soak`` is the same for much longer."""

from __future__ import annotations

import pipeline_engine as pe
from benchmarks.soak import Sample, grown, soak
from tests.run.processes import Crash, run_in_processes

MICROBATCHES = 300


def soak_in_process(rank: int, schedule: str) -> list[Sample]:
    return soak(pe.TorchTransport(), MICROBATCHES, schedule=schedule)


def test_threads_and_file_descriptors_are_flat_in_long_and_rough_use_and_memory_nearly() -> None:
    for samples in run_in_processes(soak_in_process, 2, "1f1b"):
        assert not isinstance(samples, Crash), samples
        more = grown(samples)
        assert more["threads"] <= 0 and more["descriptors"] <= 0, samples
        assert more["resident"] < 40, samples  # MiB: allocators warm up for a while
