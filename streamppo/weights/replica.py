"""Builds the tensors of the last pulled version from its buckets. Pure: no Ray.

whole, each tensor in one piece      the tensors are views of the buckets; nothing is copied
whole, in several pieces             copied into the replica's memory, which is reused
delta                                applied in place in the replica's memory

A version in shared memory is not changed after it was given to other processes. The next version gets new memory, with
a copy of its base if it is a delta.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from streamppo.errors import WeightsError
from streamppo.types import Push, Tensor, TensorChunk
from streamppo.weights import delta
from streamppo.weights.delta import Bytes
from streamppo.weights.shared_memory import SharedTensors
from streamppo.weights.shares import check_whole


class Replica:
    """The last pulled version: its `push`, and its `tensors` by Hugging Face name; empty before the first version.

    Callers must not change the tensors. The next version may overwrite them, unless `give` was called. With `memory`,
    which allocates shared memory for tensors of these sizes in bytes, the tensors are in shared memory.
    """

    def __init__(self, memory: Callable[[Sequence[int]], SharedTensors] | None = None) -> None:
        self.push: Push | None = None
        self.shared: SharedTensors | None = None
        self._memory, self._is_given = memory, False
        self.tensors: dict[str, torch.Tensor] = {}
        self._arrays: list[Bytes] = []
        self._has_own_memory = self._views_buckets = False
        self._pending: Push | None = None
        self._by_bucket: list[list[TensorChunk]] = []
        self._num_buckets = 0

    @property
    def version(self) -> int:
        return -1 if self.push is None else self.push.version

    @property
    def contents(self) -> Mapping[str, int]:
        """The expected hash of each tensor of the version, for comparison where the tensors are used."""
        return {} if self.push is None else {tensor.name: tensor.content for tensor in self.push.tensors}

    def take(self, push: Push, buckets: Sequence[Bytes]) -> None:
        self.begin(push)
        for bucket in buckets:
            self.put(bucket)
        self.finish()

    def begin(self, push: Push) -> None:
        """Start to pull a version. Raises `WeightsError` if its deltas are to another version than the replica's."""
        base, self.push = self.version, None
        if push.base_version not in {None, base}:
            raise WeightsError(f"version {push.version} is a delta to version {push.base_version}, not to {base}")
        check_whole(push)
        self._pending, self._num_buckets = push, 0
        self._by_bucket = [list[TensorChunk]() for _ in push.bucket_bytes]
        for piece in push.pieces:
            if not 0 <= piece.bucket < len(self._by_bucket):
                raise WeightsError(f"version {push.version}: a piece lies outside of its bucket")
            self._by_bucket[piece.bucket].append(piece)
        self._views_buckets = self._memory is None and all(_is_whole(push, piece) for piece in push.pieces)
        if self._views_buckets:
            self._arrays, self._has_own_memory = [np.zeros(0, dtype=np.uint8)] * len(push.tensors), False
        else:
            self._take_memory(push)

    def put(self, bucket: Bytes) -> None:
        """Apply the next bucket of the version. Raises `WeightsError` if it does not match the push."""
        push, number = self._pending, self._num_buckets
        assert push is not None, "a version was begun"
        if number >= len(push.bucket_bytes) or bucket.nbytes != push.bucket_bytes[number]:
            raise WeightsError(f"version {push.version}: the buckets that arrived are not those that were sent")
        for piece in self._by_bucket[number]:
            if piece.start + piece.stored > bucket.nbytes:
                raise WeightsError(f"version {push.version}: a piece lies outside of its bucket")
            self._use(push, piece, bucket[piece.start : piece.start + piece.stored])
        self._num_buckets += 1

    def finish(self) -> None:
        """Complete the version. Raises `WeightsError` if a bucket is missing."""
        push, self._pending = self._pending, None
        assert push is not None, "a version was begun"
        if self._num_buckets != len(push.bucket_bytes):
            raise WeightsError(f"version {push.version}: the buckets that arrived are not those that were sent")
        if self.shared is not None:
            self.adopt(push, self.shared)
            return
        names = [tensor.name for tensor in push.tensors]
        views = (_view(tensor, raw) for tensor, raw in zip(push.tensors, self._arrays, strict=True))
        self.tensors = dict(zip(names, views, strict=True))
        self.push = push

    def adopt(self, push: Push, shared: SharedTensors) -> None:
        """Replace the version by that of `push`, whose bytes are in `shared`."""
        self.tensors = {
            tensor.name: part.view(getattr(torch, tensor.dtype)).reshape(tensor.shape)
            for tensor, part in zip(push.tensors, shared.parts, strict=True)
        }
        self.push, self.shared = push, shared

    def detach(self) -> SharedTensors:
        """Return the memory of the version; later versions are written to other memory."""
        assert self.shared is not None, "the replica has shared memory"
        self._is_given = True
        return self.shared

    def forget(self) -> None:
        """Forget the version, so that the next one must be whole."""
        self.push = None

    def _take_memory(self, push: Push) -> None:
        sizes = [tensor.nbytes for tensor in push.tensors]
        if self._memory is not None:
            self._take_shared_memory(push, sizes)
            return
        if not self._has_own_memory or [array.nbytes for array in self._arrays] != sizes:
            base = [] if push.base_version is None else self._arrays
            self._arrays = [array.copy() for array in base] or [np.empty(size, dtype=np.uint8) for size in sizes]
            self._has_own_memory = True

    def _take_shared_memory(self, push: Push, sizes: list[int]) -> None:
        assert self._memory is not None, "the replica has shared memory"
        base_arrays, is_same = self._arrays, [array.nbytes for array in self._arrays] == sizes
        if push.base_version is not None and not is_same:
            raise WeightsError(f"version {push.version} is a delta to tensors of other sizes")
        if is_same and not self._is_given:
            return
        self.shared, self._is_given = self._memory(sizes), False
        self._arrays = [part.numpy() for part in self.shared.parts]
        if push.base_version is not None:
            for array, base in zip(self._arrays, base_arrays, strict=True):
                array[:] = base

    def _use(self, push: Push, piece: TensorChunk, stored: Bytes) -> None:
        if self._views_buckets:
            self._arrays[piece.tensor] = stored
            return
        into = self._arrays[piece.tensor][piece.first : piece.first + piece.nbytes]
        if piece.is_delta:
            delta.apply(stored, into, getattr(torch, push.tensors[piece.tensor].dtype).itemsize)
        elif stored.nbytes == into.nbytes:
            into[:] = stored
        else:
            raise WeightsError(f"version {push.version}: {stored.nbytes} bytes arrived for {into.nbytes}")


def _is_whole(push: Push, piece: TensorChunk) -> bool:
    return piece.nbytes == push.tensors[piece.tensor].nbytes and not piece.is_delta


class _WritableArray:
    """Presents a read-only array to NumPy as writable memory, and keeps the array alive."""

    def __init__(self, array: Bytes) -> None:
        self.array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def _view(tensor: Tensor, raw: Bytes) -> torch.Tensor:
    if not raw.flags.writeable:
        # torch has no read-only tensors and warns about read-only arrays. Pulled weights are never written to.
        raw = np.asarray(_WritableArray(raw))
    return torch.from_numpy(raw).view(getattr(torch, tensor.dtype)).reshape(tensor.shape)
