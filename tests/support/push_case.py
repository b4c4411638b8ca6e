"""Pushes of learner ranks without a learner, and a queue's calls without Ray."""

from typing import Any

import torch

from streamppo.weights.buckets import Buckets, PackedPush, Shard
from streamppo.weights.shares import join

Tensors = dict[str, torch.Tensor]


class Remote:
    """Offers a coroutine function as `remote`, like a method of a Ray actor."""

    def __init__(self, function: Any) -> None:
        self.remote = function


def shard(tensor: torch.Tensor, rank: int, ranks: int) -> Shard:
    """One rank's shard of a tensor's rows, as in FSDP; the last ranks of a small tensor have no rows."""
    rows = tensor.shape[0] if tensor.dim() else 1
    chunk = -(-rows // ranks)
    first = min(rank * chunk, rows)
    return Shard(tensor.dtype, tuple(tensor.shape), first, min(chunk, rows - first))


class Rank:
    """Makes one rank's pushes, one version after another."""

    def __init__(self, like: Tensors, rank: int = 0, ranks: int = 1, bucket_bytes: int = 200) -> None:
        self.shards = {name: shard(tensor, rank, ranks) for name, tensor in like.items()}
        self.rank, self.ranks = rank, ranks
        self.sets = [Buckets(self.shards, bucket_bytes) for _ in range(2)]

    def push(self, version: int, tensors: Tensors, *, delta: bool = False) -> PackedPush:
        self.sets.reverse()
        for name, into in self.sets[0].tensors.items():
            at = self.shards[name]
            into.copy_(tensors[name][at.first_row : at.first_row + at.rows] if tensors[name].dim() else tensors[name])
        packed = self.sets[0].push(version, self.sets[1] if delta else None, rank=self.rank, ranks=self.ranks)
        # As in the object store: read-only copies, independent of the reused memory.
        arrays = [array.copy() for array in packed.arrays]
        for array in arrays:
            array.flags.writeable = False
        return PackedPush(packed.push, arrays)


def joined(packed: list[PackedPush]) -> PackedPush:
    return PackedPush(join([one.push for one in packed]), [array for one in packed for array in one.arrays])
