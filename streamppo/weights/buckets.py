"""Packs shards of parameters into flat byte buckets. Pure: no Ray.

A bucket is a one-dimensional uint8 array of consecutive pieces. Each piece is aligned to 64 bytes. The layout depends
only on names, shapes and sizes.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import finalize

import numpy as np
import torch

from streamppo.types import Push, Tensor, TensorChunk
from streamppo.weights import delta
from streamppo.weights.content import hash_tensor
from streamppo.weights.delta import Bytes

ALIGNMENT = 64
PORTABLE = 1
"""CUDA's flag for pinned memory that all of its contexts can use."""


class Shard(NamedTuple):
    """Rows `first_row` to `first_row` + `rows` - 1 of a parameter with the global `shape`. A scalar has one row."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    first_row: int
    rows: int

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> "Shard":
        return cls(tensor.dtype, tuple(tensor.shape), 0, tensor.shape[0] if tensor.dim() else 1)

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self.rows, *self.shape[1:]

    @property
    def first(self) -> int:
        """The offset in bytes of the shard in the whole parameter."""
        return self.first_row * self._row_bytes

    @property
    def nbytes(self) -> int:
        return self.rows * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return int(np.prod(self.shape[1:], dtype=np.int64)) * self.dtype.itemsize


class Place(NamedTuple):
    """The bucket of a piece, and the piece's first byte in the bucket."""

    bucket: int
    start: int


class PackedPush(NamedTuple):
    """A push, and the buckets with its pieces."""

    push: Push
    arrays: list[Bytes]


class Buckets:
    """Memory for one rank's share of a version. `tensors` are views of `arrays` in the shapes of the `shards`.

    A bucket has at most `bucket_bytes`, but a larger shard gets a bucket of its own. The memory is reused: fresh pages
    cost more time than hashing their content. A GPU can copy to `pinned` memory asynchronously.
    """

    def __init__(self, shards: Mapping[str, Shard], bucket_bytes: int, *, pinned: bool = False) -> None:
        self._shards, self._bucket_bytes = dict(shards), bucket_bytes
        sizes = {name: shard.nbytes for name, shard in shards.items()}
        self._places, totals = plan(sizes.values(), bucket_bytes)
        self.arrays = [np.zeros(total, np.uint8) for total in totals]
        for memory in self.arrays if pinned else ():
            if memory.nbytes:
                _pin(memory)
        self.tensors = {
            name: torch.from_numpy(raw).view(shard.dtype).view(shard.local_shape)
            if shard.nbytes
            else torch.empty(shard.local_shape, dtype=shard.dtype)
            for raw, (name, shard) in zip(self._raw(), shards.items(), strict=True)
        }

    def push(self, version: int, before: "Buckets | None" = None, *, rank: int = 0, ranks: int = 1) -> PackedPush:
        """Describe the version in `tensors`, and hash all of them.

        A bucket is sent as deltas to `before`, the previous version, if these take at most half of its bytes.
        """
        tensors = tuple(describe_tensor(name, shard, self.tensors[name]) for name, shard in self._shards.items())
        raw = self._raw()
        deltas = [None] * len(raw) if before is None else self._deltas(raw, before._raw())
        stored = [whole if encoded is None else encoded for encoded, whole in zip(deltas, raw, strict=True)]
        changed = zip(self._places, deltas, strict=True)
        places, arrays = self._pack_changed(stored, {place.bucket for place, encoded in changed if encoded is not None})
        pieces = tuple(
            TensorChunk(
                tensor=number,
                first=shard.first,
                nbytes=shard.nbytes,
                bucket=place.bucket,
                start=place.start,
                stored=stored[number].nbytes,
                is_delta=deltas[number] is not None,
            )
            for number, (shard, place) in enumerate(zip(self._shards.values(), places, strict=True))
            if shard.nbytes
        )
        push = Push(
            version=version,
            base_version=version - 1 if any(piece.is_delta for piece in pieces) else None,
            tensors=tensors,
            pieces=pieces,
            bucket_bytes=tuple(array.nbytes for array in arrays),
            rank=rank,
            ranks=ranks,
        )
        return PackedPush(push, arrays)

    def _raw(self) -> list[Bytes]:
        sizes = [shard.nbytes for shard in self._shards.values()]
        return [_bytes_at(self.arrays, place, size) for place, size in zip(self._places, sizes, strict=True)]

    def _deltas(self, raw: Sequence[Bytes], before: Sequence[Bytes]) -> list[Bytes | None]:
        """Return the delta of each shard whose bucket shrinks to at most half of its bytes; None for other shards."""
        widths = [shard.dtype.itemsize for shard in self._shards.values()]
        deltas = [delta.changes(*three) for three in zip(before, raw, widths, strict=True)]
        stored_bytes = [0] * len(self.arrays)
        for encoded, whole, place in zip(deltas, raw, self._places, strict=True):
            stored_bytes[place.bucket] += (whole if encoded is None else encoded).nbytes
        pays = [2 * nbytes <= array.nbytes for nbytes, array in zip(stored_bytes, self.arrays, strict=True)]
        return [encoded if pays[place.bucket] else None for encoded, place in zip(deltas, self._places, strict=True)]

    def _pack_changed(self, stored: Sequence[Bytes], repacked: Collection[int]) -> tuple[list[Place], list[Bytes]]:
        unchanged = [number for number in range(len(self.arrays)) if number not in repacked]
        moved = [number for number, place in enumerate(self._places) if place.bucket in repacked]
        places, totals = plan([stored[number].nbytes for number in moved], self._bucket_bytes)
        arrays = [np.zeros(total, dtype=np.uint8) for total in totals]
        for number, place in zip(moved, places, strict=True):
            _bytes_at(arrays, place, stored[number].nbytes)[:] = stored[number]
        packed = dict(
            zip(moved, (place._replace(bucket=len(unchanged) + place.bucket) for place in places), strict=True)
        )
        new_numbers = {number: at for at, number in enumerate(unchanged)}
        return [
            packed[number] if number in packed else place._replace(bucket=new_numbers[place.bucket])
            for number, place in enumerate(self._places)
        ], [*(self.arrays[number] for number in unchanged), *arrays]


def describe_tensor(name: str, shard: Shard, values: torch.Tensor) -> Tensor:
    """Return the description of a parameter, with the hash of this rank's `shard`, whose content is `values`."""
    return Tensor(
        name=name,
        dtype=str(shard.dtype).removeprefix("torch."),
        shape=shard.shape,
        nbytes=int(np.prod(shard.shape, dtype=np.int64)) * shard.dtype.itemsize,
        content=hash_tensor(values, shard.first),
    )


def pack_whole(version: int, tensors: Mapping[str, torch.Tensor], bucket_bytes: int) -> PackedPush:
    """Return a push of complete `tensors`, which are copied into new buckets."""
    buckets = Buckets({name: Shard.whole(tensor) for name, tensor in tensors.items()}, bucket_bytes)
    for name, target in buckets.tensors.items():
        target.copy_(tensors[name].detach())
    return buckets.push(version)


def _pin(memory: Bytes) -> None:
    """Lock `memory` in RAM for copies from a GPU, until it is freed; torch rounds sizes up. Raises `CudaError`."""
    cudart: Any = torch.cuda.cudart()
    address = memory.ctypes.data
    torch.cuda.check_error(int(cudart.cudaHostRegister(address, memory.nbytes, PORTABLE)))
    finalize(memory, cudart.cudaHostUnregister, address).atexit = False


def plan(sizes: Iterable[int], bucket_bytes: int) -> tuple[list[Place], list[int]]:
    """Place pieces of these `sizes` in buckets. Returns the places, and the bytes of each bucket."""
    places: list[Place] = []
    totals: list[int] = []
    for nbytes in sizes:
        start = -(-totals[-1] // ALIGNMENT) * ALIGNMENT if totals else 0
        if not totals or start + nbytes > bucket_bytes:
            totals.append(0)
            start = 0
        places.append(Place(len(totals) - 1, start))
        totals[-1] = start + nbytes
    return places, totals


def _bytes_at(arrays: Sequence[Bytes], place: Place, nbytes: int) -> Bytes:
    return arrays[place.bucket][place.start : place.start + nbytes]
