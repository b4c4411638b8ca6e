"""Parameters <-> flat byte buckets with checksums. Pure: no Ray.

A bucket is a one-dimensional uint8 array; tensors lie in it one after another, each aligned to 64 bytes. The layout
is a function of names, shapes and sizes alone, so equal parameters always make equal buckets and equal checksums.
"""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from streamppo.errors import WeightsError
from streamppo.types import Push, Tensor

ALIGNMENT = 64


def flatten(
    version: int, base_version: int | None, tensors: Mapping[str, torch.Tensor], bucket_bytes: int
) -> tuple[Push, list[NDArray[np.uint8]]]:
    """Copy CPU `tensors` into buckets of at most `bucket_bytes` (a larger tensor gets a bucket of its own)."""
    layout, sizes = _plan(tensors, bucket_bytes)
    buckets = [np.zeros(size, dtype=np.uint8) for size in sizes]
    for place, tensor in zip(layout, tensors.values(), strict=True):
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        buckets[place.bucket][place.start : place.start + place.nbytes] = raw
    push = Push(
        version=version,
        base_version=base_version,
        tensors=layout,
        bucket_bytes=sizes,
        checksums=tuple(checksum(bucket) for bucket in buckets),
    )
    return push, buckets


def unflatten(push: Push, buckets: Sequence[NDArray[np.uint8]]) -> dict[str, torch.Tensor]:
    """The tensors of a verified push, as views of the buckets. Raises `WeightsError` if a checksum differs."""
    if len(buckets) != len(push.checksums):
        raise WeightsError(f"push {push.version}: {len(buckets)} buckets arrived, {len(push.checksums)} were sent")
    for number, (bucket, expected) in enumerate(zip(buckets, push.checksums, strict=True)):
        if checksum(bucket) != expected:
            raise WeightsError(f"push {push.version}: bucket {number} does not match its checksum")
    return {place.name: _view(place, buckets[place.bucket]) for place in push.tensors}


def checksum(bucket: NDArray[np.uint8]) -> str:
    """SHA-256 of the bytes."""
    return hashlib.sha256(bucket.data).hexdigest()


def _plan(tensors: Mapping[str, torch.Tensor], bucket_bytes: int) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    layout: list[Tensor] = []
    sizes: list[int] = []
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        start = -(-sizes[-1] // ALIGNMENT) * ALIGNMENT if sizes else 0
        if not sizes or start + nbytes > bucket_bytes:
            sizes.append(0)
            start = 0
        dtype = str(tensor.dtype).removeprefix("torch.")
        place = Tensor(
            name=name,
            dtype=dtype,
            shape=tuple(tensor.shape),
            bucket=len(sizes) - 1,
            start=start,
            nbytes=nbytes,
        )
        layout.append(place)
        sizes[-1] = start + nbytes
    return tuple(layout), tuple(sizes)


def _view(place: Tensor, bucket: NDArray[np.uint8]) -> torch.Tensor:
    # A tensor over a read-only buffer would warn: engines copy from it and never write to it.
    raw = bucket[place.start : place.start + place.nbytes]
    if not raw.flags.writeable:
        raw = raw.copy()
    return torch.from_numpy(raw).view(getattr(torch, place.dtype)).reshape(place.shape)
