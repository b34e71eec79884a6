"""The process group that a transport is made over: what it must be, and a part of its store."""

from __future__ import annotations

from collections import Counter

import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

from pipeline_engine.errors import UsageError

_constructed: Counter[str] = Counter()  # transports made over each process group: the same on every rank


def checked(group: ProcessGroup | None) -> ProcessGroup:
    """The group itself, or the default one.

    Raises:
        UsageError: there is none, it is not gloo, or this rank is not in it.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise UsageError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group('gloo') on every rank."
        )
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, ProcessGroup):
        raise UsageError("this rank is not in the process group; make the transport on its members only.")
    backends = str(c10d._world.pg_backend_config[group])
    if "cpu:gloo" not in backends:
        raise UsageError(
            f"process group {group.group_name} uses {backends}; TorchTransport moves messages over gloo only. "
            "Make a group with torch.distributed.new_group(backend='gloo') on every rank and pass that one."
        )
    return group


def own_store(group: ProcessGroup) -> Store:
    """A part of the group's store for this transport alone; its number is the same on all ranks."""
    name = group.group_name
    _constructed[name] += 1
    return PrefixStore(f"pipeline_engine/{name}/{_constructed[name]}", c10d._get_process_group_store(group))
