"""Parameters <-> flat byte buckets with checksums. Pure: no Ray.

A bucket is a one-dimensional uint8 array; tensors lie in it one after another, each aligned to 64 bytes. The layout
is a function of names, shapes and sizes alone, so equal parameters always make equal buckets and equal checksums.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from streamppo.errors import WeightsError
from streamppo.types import Push, Tensor, checksum

ALIGNMENT = 64


class Buckets:
    """Memory for one version of `tensors`, of which names, shapes and types count: `tensors` are views of `arrays`.

    A bucket has at most `bucket_bytes`; a larger tensor gets one of its own. The memory is used for one version after
    another: to ask the kernel for fresh pages costs more than to hash what is written to them.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], bucket_bytes: int) -> None:
        self._layout, sizes = _plan(tensors, bucket_bytes)
        # The gaps between tensors stay 0, so that they change no checksum.
        self.arrays = [np.zeros(size, dtype=np.uint8) for size in sizes]
        self.tensors = {place.name: _view(place, self.arrays[place.bucket]) for place in self._layout}

    def push(self, version: int, base_version: int | None) -> Push:
        """Describe the version that was written to `tensors`: this hashes every bucket."""
        return Push(
            version=version,
            base_version=base_version,
            tensors=self._layout,
            bucket_bytes=tuple(array.nbytes for array in self.arrays),
            checksums=tuple(checksum(array.data) for array in self.arrays),
        )


def flatten(
    version: int, base_version: int | None, tensors: Mapping[str, torch.Tensor], bucket_bytes: int
) -> tuple[Push, list[NDArray[np.uint8]]]:
    """Copy `tensors` into buckets of their own. See `Buckets`."""
    buckets = Buckets(tensors, bucket_bytes)
    for name, into in buckets.tensors.items():
        into.copy_(tensors[name].detach())
    return buckets.push(version, base_version), buckets.arrays


def unflatten(push: Push, buckets: Sequence[NDArray[np.uint8]]) -> dict[str, torch.Tensor]:
    """The tensors of a verified push, as views of the buckets: to be read alone.

    Raises `WeightsError` if a checksum differs.
    """
    if len(buckets) != len(push.checksums):
        raise WeightsError(f"push {push.version}: {len(buckets)} buckets arrived, {len(push.checksums)} were sent")
    for number, (bucket, expected) in enumerate(zip(buckets, push.checksums, strict=True)):
        if checksum(bucket.data) != expected:
            raise WeightsError(f"push {push.version}: bucket {number} does not match its checksum")
    return {place.name: _view(place, buckets[place.bucket]) for place in push.tensors}


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


class _Exposed:
    """An array's memory as NumPy takes it from a stranger, which keeps the array alive."""

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self.array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def _view(place: Tensor, bucket: NDArray[np.uint8]) -> torch.Tensor:
    raw = bucket[place.start : place.start + place.nbytes]
    if not raw.flags.writeable:
        # A tensor cannot say that it is read-only, and torch warns of that. Nobody writes to weights that have arrived.
        raw = np.asarray(_Exposed(raw))
    return torch.from_numpy(raw).view(getattr(torch, place.dtype)).reshape(place.shape)
