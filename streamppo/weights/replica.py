"""The tensors of one version after another, made of what was pulled. Pure: no Ray.

whole, each tensor in one piece      tensors are views of what arrived: nothing is copied
whole, in several pieces             copied into memory of its own, which is used again
delta                                changed in place, in memory of its own
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from streamppo.errors import WeightsError
from streamppo.types import Push, Tensor, TensorChunk
from streamppo.weights import delta
from streamppo.weights.delta import Bytes
from streamppo.weights.shares import check_whole


class Replica:
    """The `tensors` (HF names) of `push`, the version that was last taken; before one there is neither.

    They are to be read alone, and change with the next `take`.
    """

    def __init__(self) -> None:
        self.push: Push | None = None
        self.tensors: dict[str, torch.Tensor] = {}
        self._arrays: list[Bytes] = []
        self._is_own = self._sees = False
        self._next: Push | None = None
        self._by_bucket: list[list[TensorChunk]] = []
        self._put = 0

    @property
    def version(self) -> int:
        """The version that was last taken; -1 before one."""
        return -1 if self.push is None else self.push.version

    @property
    def contents(self) -> Mapping[str, int]:
        """The hash of every tensor that the version should have. It is compared where the tensors end up."""
        return {} if self.push is None else {tensor.name: tensor.content for tensor in self.push.tensors}

    def take(self, push: Push, buckets: Sequence[Bytes]) -> None:
        """Become the version that `push` describes: `begin`, `put` for each of `buckets`, and `finish`."""
        self.begin(push)
        for bucket in buckets:
            self.put(bucket)
        self.finish()

    def begin(self, push: Push) -> None:
        """Be about to become the version that `push` describes; until `finish` there is none.

        Raises `WeightsError` if its deltas are to another version than this one.
        """
        before, self.push = self.version, None
        if push.base_version not in {None, before}:
            raise WeightsError(f"version {push.version} is a delta to version {push.base_version}, not to {before}")
        check_whole(push)
        self._next, self._put = push, 0
        self._by_bucket = [list[TensorChunk]() for _ in push.bucket_bytes]
        for piece in push.pieces:
            if not 0 <= piece.bucket < len(self._by_bucket):
                raise WeightsError(f"version {push.version}: a piece lies outside of its bucket")
            self._by_bucket[piece.bucket].append(piece)
        self._sees = all(_is_whole(push, piece) for piece in push.pieces)
        if self._sees:
            self._arrays, self._is_own = [np.zeros(0, dtype=np.uint8)] * len(push.tensors), False
        else:
            self._take_memory(push)

    def put(self, bucket: Bytes) -> None:
        """Use the next bucket of the version that was begun. Raises `WeightsError` if it is not that of the push."""
        push, number = self._next, self._put
        assert push is not None, "a version was begun"
        if number >= len(push.bucket_bytes) or bucket.nbytes != push.bucket_bytes[number]:
            raise WeightsError(f"version {push.version}: other buckets arrived than were sent")
        for piece in self._by_bucket[number]:
            self._use(push, piece, _stored(push, piece, bucket))
        self._put += 1

    def finish(self) -> None:
        """Be the version that was begun. Raises `WeightsError` if not all of its buckets came."""
        push, self._next = self._next, None
        assert push is not None, "a version was begun"
        if self._put != len(push.bucket_bytes):
            raise WeightsError(f"version {push.version}: other buckets arrived than were sent")
        names = [tensor.name for tensor in push.tensors]
        views = (_view(tensor, raw) for tensor, raw in zip(push.tensors, self._arrays, strict=True))
        self.tensors = dict(zip(names, views, strict=True))
        self.push = push

    def forget(self) -> None:
        """Have no version: the next one is to be whole."""
        self.push = None

    def _take_memory(self, push: Push) -> None:
        """Have memory for what comes: that of the version before, whose bytes a delta changes."""
        sizes = [tensor.nbytes for tensor in push.tensors]
        if not self._is_own or [array.nbytes for array in self._arrays] != sizes:
            seen = [] if push.base_version is None else self._arrays
            self._arrays = [array.copy() for array in seen] or [np.empty(size, dtype=np.uint8) for size in sizes]
            self._is_own = True

    def _use(self, push: Push, piece: TensorChunk, stored: Bytes) -> None:
        if self._sees:
            self._arrays[piece.tensor] = stored
            return
        into = self._arrays[piece.tensor][piece.first : piece.first + piece.nbytes]
        if piece.is_delta:
            delta.apply(stored, into, getattr(torch, push.tensors[piece.tensor].dtype).itemsize)
        elif stored.nbytes == into.nbytes:
            into[:] = stored
        else:
            raise WeightsError(f"version {push.version}: {stored.nbytes} bytes came for {into.nbytes}")


def _is_whole(push: Push, piece: TensorChunk) -> bool:
    return piece.nbytes == push.tensors[piece.tensor].nbytes and not piece.is_delta


def _stored(push: Push, piece: TensorChunk, bucket: Bytes) -> Bytes:
    if piece.start + piece.stored > bucket.nbytes:
        raise WeightsError(f"version {push.version}: a piece lies outside of its bucket")
    return bucket[piece.start : piece.start + piece.stored]


class _Exposed:
    """An array's memory as NumPy takes it from a stranger, which keeps the array alive."""

    def __init__(self, array: Bytes) -> None:
        self.array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def _view(tensor: Tensor, raw: Bytes) -> torch.Tensor:
    if not raw.flags.writeable:
        # A tensor cannot say that it is read-only, and torch warns of that. Nobody writes to weights that have arrived.
        raw = np.asarray(_Exposed(raw))
    return torch.from_numpy(raw).view(getattr(torch, tensor.dtype)).reshape(tensor.shape)
