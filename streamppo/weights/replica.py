"""The tensors of one version after another, made of what was pulled. Pure: no Ray.

whole, each tensor in one piece      tensors are views of what arrived: nothing is copied
whole, in several pieces             copied into memory of its own, which is used again
delta                                changed in place, in memory of its own
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from streamppo.errors import WeightsError
from streamppo.types import Piece, Push, Tensor
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
        self._is_own = False

    @property
    def version(self) -> int:
        """The version that was last taken; -1 before one."""
        return -1 if self.push is None else self.push.version

    @property
    def contents(self) -> Mapping[str, int]:
        """The hash of every tensor that the version should have. It is compared where the tensors end up."""
        return {} if self.push is None else {tensor.name: tensor.content for tensor in self.push.tensors}

    def take(self, push: Push, buckets: Sequence[Bytes]) -> None:
        """Become the version that `push` describes.

        Raises `WeightsError` if `buckets` are not those of `push`, or its deltas are to another version than this one;
        there is no version then.
        """
        before, self.push = self.version, None
        if [bucket.nbytes for bucket in buckets] != list(push.bucket_bytes):
            raise WeightsError(f"version {push.version}: other buckets arrived than were sent")
        if push.base_version not in {None, before}:
            raise WeightsError(f"version {push.version} is a delta to version {push.base_version}, not to {before}")
        check_whole(push)
        if all(piece.nbytes == push.tensors[piece.tensor].nbytes and not piece.is_delta for piece in push.pieces):
            self._see(push, buckets)
        else:
            self._copy(push, buckets)
        names = [tensor.name for tensor in push.tensors]
        views = (_view(tensor, raw) for tensor, raw in zip(push.tensors, self._arrays, strict=True))
        self.tensors = dict(zip(names, views, strict=True))
        self.push = push

    def forget(self) -> None:
        """Have no version: the next one is to be whole."""
        self.push = None

    def _see(self, push: Push, buckets: Sequence[Bytes]) -> None:
        found = {piece.tensor: _stored(push, piece, buckets) for piece in push.pieces}
        nothing = np.zeros(0, dtype=np.uint8)
        self._arrays, self._is_own = [found.get(number, nothing) for number in range(len(push.tensors))], False

    def _copy(self, push: Push, buckets: Sequence[Bytes]) -> None:
        sizes = [tensor.nbytes for tensor in push.tensors]
        if not self._is_own or [array.nbytes for array in self._arrays] != sizes:
            seen = [] if push.base_version is None else self._arrays
            self._arrays = [array.copy() for array in seen] or [np.empty(size, dtype=np.uint8) for size in sizes]
            self._is_own = True
        for piece in push.pieces:
            stored = _stored(push, piece, buckets)
            into = self._arrays[piece.tensor][piece.first : piece.first + piece.nbytes]
            if piece.is_delta:
                delta.apply(stored, into, getattr(torch, push.tensors[piece.tensor].dtype).itemsize)
            elif stored.nbytes == into.nbytes:
                into[:] = stored
            else:
                raise WeightsError(f"version {push.version}: {stored.nbytes} bytes came for {into.nbytes}")


def _stored(push: Push, piece: Piece, buckets: Sequence[Bytes]) -> Bytes:
    if not 0 <= piece.bucket < len(buckets) or piece.start + piece.stored > buckets[piece.bucket].nbytes:
        raise WeightsError(f"version {push.version}: a piece lies outside of its bucket")
    return buckets[piece.bucket][piece.start : piece.start + piece.stored]


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
