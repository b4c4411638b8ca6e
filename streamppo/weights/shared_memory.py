"""Memory for a version's tensors that processes of one machine share; it is freed when the last of them ends.

A version is in blocks of about `block_bytes`; a larger tensor has a block of its own. Sizes determine all places.
"""

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from streamppo.errors import WeightsError
from streamppo.weights import buckets
from streamppo.weights.buckets import ALIGNMENT, Place

SHARED = Path("/dev/shm")


class NoRoom(WeightsError):
    """/dev/shm has no room for a version at present. Other processes may free memory later."""


class Blocks(NamedTuple):
    """The block and the first byte of each tensor, and the number of bytes of each block."""

    places: list[Place]
    totals: list[int]


class SharedTensors(NamedTuple):
    """The blocks of a version (uint8), and the part of a block that holds each tensor."""

    blocks: list[Tensor]
    parts: list[Tensor]

    def descriptors(self) -> list[int]:
        """Return the file descriptor of each block, for `attach` in another process. The blocks keep them open."""
        return [block.untyped_storage()._share_fd_cpu_()[0] for block in self.blocks]


def plan(sizes: Iterable[int], block_bytes: int) -> Blocks:
    """Plan blocks for tensors of these sizes in bytes, in order."""
    places, totals = buckets.plan(sizes, block_bytes)
    # Memory of 0 bytes would have no descriptor.
    return Blocks(places, [max(ALIGNMENT, -(-total // ALIGNMENT) * ALIGNMENT) for total in totals])


def allocate(totals: Sequence[int]) -> list[Tensor]:
    """Return a new block for each size in bytes in `totals`. Raises `NoRoom`."""
    # If there is no room for a page, a write to it would kill the process (SIGBUS).
    if SHARED.is_dir() and sum(totals) > (free := shutil.disk_usage(SHARED).free):
        raise NoRoom(
            f"{SHARED} has {free / 2**30:.1f} GiB left, and a version takes {sum(totals) / 2**30:.1f} GiB: make it "
            "larger (docker run --shm-size), or choose rollout.engine.transport = 'group'"
        )
    return [_block(torch.UntypedStorage._new_shared(total)) for total in totals]


def new(sizes: Sequence[int], block_bytes: int) -> SharedTensors:
    """Return new memory for tensors of these sizes in bytes. Raises `NoRoom`."""
    places, totals = plan(sizes, block_bytes)
    return _parts(allocate(totals), places, sizes)


def attach(descriptors: Sequence[int], sizes: Sequence[int], block_bytes: int) -> SharedTensors:
    """Return another process's memory for tensors of these sizes, and close `descriptors`. Raises `WeightsError`."""
    places, totals = plan(sizes, block_bytes)
    try:
        shared_bytes = [os.fstat(descriptor).st_size for descriptor in descriptors]
        if shared_bytes != totals:
            raise WeightsError(
                f"the shared memory has blocks of {shared_bytes[:3]} bytes, but the version needs {totals[:3]}"
            )
        storages = [
            torch.UntypedStorage._new_shared_fd_cpu(descriptor, total)  # pyright: ignore[reportAttributeAccessIssue]
            for descriptor, total in zip(descriptors, totals, strict=True)
        ]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return _parts([_block(storage) for storage in storages], places, sizes)


def is_shared(tensors: Iterable[Tensor]) -> bool:
    """Return whether all tensors are in shared memory of this machine, where other processes can read them."""
    return all(tensor.device.type == "cpu" and tensor.untyped_storage().is_shared() for tensor in tensors)


def _block(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _parts(blocks: list[Tensor], places: Sequence[Place], sizes: Sequence[int]) -> SharedTensors:
    parts = [blocks[block][start : start + size] for (block, start), size in zip(places, sizes, strict=True)]
    return SharedTensors(blocks, parts)
