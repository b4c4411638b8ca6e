"""Copies of a version in the actor's memory: the one that SGLang serves, for a restart, and the next one.

    version n      copied, checked    in set A    SGLang loads from it, and it stays for a restart
    version n + 1  copied, checked    in set B    A stays until B is served, and is the memory of version n + 2

With the transport "tensor" the memory is shared, and SGLang reads it where it is: no other copy is made. An actor that
pulls whole models then has at most three versions in memory: the replica's and these two.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from streamppo.errors import WeightsError
from streamppo.weights import content
from streamppo.weights.buckets import ALIGNMENT

SHARED = Path("/dev/shm")


class Copied(NamedTuple):
    """Copies of tensors, and the flat memory of which they are views."""

    tensors: dict[str, Tensor]
    memory: list[Tensor]


class VersionCopies:
    """The memory of two versions; buckets have about `bucket_bytes`, in shared memory if it is `shared`."""

    def __init__(self, bucket_bytes: int, *, shared: bool) -> None:
        self._bucket_bytes, self._shared = bucket_bytes, shared
        self._served: list[Tensor] = []
        self._spare: list[Tensor] = []

    def copy(self, tensors: Mapping[str, Tensor], contents: Mapping[str, int] | None = None) -> Copied:
        """Copy `tensors` to the unused set; `serve` then marks this set as served.

        Raises `WeightsError` if a copy's hash is not that of `contents`, or if /dev/shm has no room for it.
        """
        places, totals = _plan(tensors, self._bucket_bytes)
        if [len(flat) for flat in self._spare] != totals:
            # Freed first, so that both are never in memory.
            self._spare = []
            self._spare = self._allocate(totals)
        copied: dict[str, Tensor] = {}
        hashes: dict[str, int] = {}
        for (name, tensor), (bucket, start) in zip(tensors.items(), places, strict=True):
            flat = self._spare[bucket][start : start + tensor.nbytes]
            copied[name] = flat.view(tensor.dtype).view(tensor.shape)
            if contents is None:
                copied[name].copy_(tensor)
            else:
                hashes[name] = content.write(copied[name], tensor)
        if contents is not None:
            content.compare(contents, hashes.items())
        return Copied(copied, self._spare)

    def serve(self) -> None:
        """Keep the last copy; the next version reuses the memory of the one before it."""
        self._served, self._spare = self._spare, self._served

    def _allocate(self, totals: Sequence[int]) -> list[Tensor]:
        if not self._shared:
            return [torch.empty(total, dtype=torch.uint8) for total in totals]
        # A write to a page for which there is no room would kill the actor (SIGBUS).
        if SHARED.is_dir() and sum(totals) > (free := shutil.disk_usage(SHARED).free):
            raise WeightsError(
                f"{SHARED} has {free / 2**30:.1f} GiB left, and a version takes {sum(totals) / 2**30:.1f} GiB: make it "
                "larger (docker run --shm-size), or choose rollout.engine.transport = 'disk'"
            )
        return [torch.empty(total, dtype=torch.uint8).share_memory_() for total in totals]


def _plan(tensors: Mapping[str, Tensor], bucket_bytes: int) -> tuple[list[tuple[int, int]], list[int]]:
    """The (bucket, first byte) of each tensor, and the bytes of each bucket; a larger tensor is alone in its bucket."""
    places: list[tuple[int, int]] = []
    totals: list[int] = []
    for tensor in tensors.values():
        if not totals or totals[-1] + tensor.nbytes > bucket_bytes:
            totals.append(0)
        places.append((len(totals) - 1, totals[-1]))
        totals[-1] += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return places, totals
