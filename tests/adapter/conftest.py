"""A model in this process, and a trainer over it; Megatron is asked for only by those who use them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="module")
def runtime() -> Iterator[Any]:
    from megatron.core import parallel_state

    from art_adapter.tiny_gpt import build_runtime

    started = not dist.is_initialized()
    if started:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    yield build_runtime()
    if started:
        parallel_state.destroy_model_parallel()  # its groups end with the world
        dist.destroy_process_group()


@pytest.fixture
def trainer(runtime: Any) -> Any:
    from art_adapter import ReferenceTrainerRank

    from .training import with_slots

    return with_slots(ReferenceTrainerRank(runtime))
