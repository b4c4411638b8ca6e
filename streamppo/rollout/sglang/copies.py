"""Copies of two versions in the actor's memory: the served one, which a restart needs, and the next one.

    version n      copied, checked    in set A    SGLang loads from it, and it stays for a restart
    version n + 1  copied, checked    in set B    A stays until B is served, and is the memory of version n + 2

With the transport "tensor" SGLang reads the shared memory of these copies, and no other copy is made. Versions that the
actors of a machine share (rollout/machine_weights.py) are not copied here.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from streamppo.weights import content, shared_memory


class VersionCopies:
    """The memory of two versions; buckets have about `bucket_bytes`, in shared memory if it is `shared`."""

    def __init__(self, bucket_bytes: int, *, shared: bool) -> None:
        self._bucket_bytes, self._shared = bucket_bytes, shared
        self._served: list[Tensor] = []
        self._spare: list[Tensor] = []

    def copy(self, tensors: Mapping[str, Tensor], contents: Mapping[str, int] | None = None) -> dict[str, Tensor]:
        """Copy `tensors` to memory that is not served. Raises `WeightsError` if `contents` differ, or without room."""
        places, totals = shared_memory.plan((tensor.nbytes for tensor in tensors.values()), self._bucket_bytes)
        if [len(flat) for flat in self._spare] != totals:
            # The old memory is freed first, so that both are never allocated together.
            self._spare = []
            if self._shared:
                self._spare = shared_memory.allocate(totals)
            else:
                self._spare = [torch.empty(total, dtype=torch.uint8) for total in totals]
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
        return copied

    def serve(self) -> None:
        """Mark the last copy as served. The next version reuses the memory of the previously served one."""
        self._served, self._spare = self._spare, self._served
