"""Stores buckets as files in a folder that ranks and rollout actors share, for example on a parallel file system.

    FOLDER/rank-0-4f1c/00000012-0       bucket 0 of rank 0's share of version 12

A file is written under a temporary name and renamed. The file is not flushed to disk: after a crash of the machine the
restarted ranks compute the weights again. A network file system makes closed files visible to other nodes.
"""

import asyncio
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import numpy as np

from streamppo import durable
from streamppo.errors import WeightsError
from streamppo.types import WireStruct, decode, encode
from streamppo.weights.delta import Bytes
from streamppo.weights.transport import BucketGone, BucketRef

MISSING_S = 300.0
"""If a bucket is in the ledger and its file is missing for this many seconds, this node does not see the folder."""


class File(WireStruct, frozen=True):
    """The reference of a bucket."""

    path: str
    nbytes: int


class FolderSender:
    """Implements `transport.Sender` for one process of `rank`. Keeps two whole versions and the deltas after them."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._root, self._name = folder, f"rank-{rank}-"
        self._folder = folder / f"{self._name}{uuid4().hex[:12]}"
        self._names: dict[int, list[Path]] = {}
        self._dropped_before = 0

    def put(self, version: int, arrays: Sequence[Bytes]) -> list[BucketRef]:
        with durable.naming(self._folder, WeightsError):
            self._folder.mkdir(parents=True, exist_ok=True)
            return [self._write(version, number, array) for number, array in enumerate(arrays)]

    def drop(self, before: int) -> None:
        """See `transport.Sender.drop`. Files are deleted one call later, so that actors can finish their reads."""
        for version in [version for version in self._names if version < self._dropped_before]:
            for path in self._names.pop(version):
                path.unlink(missing_ok=True)
        self._dropped_before = before
        for folder in self._root.glob(f"{self._name}*"):
            # The ledger no longer refers to folders of earlier processes of this rank.
            if folder != self._folder:
                shutil.rmtree(folder, ignore_errors=True)

    def _write(self, version: int, number: int, array: Bytes) -> bytes:
        path = self._folder / f"{version:08d}-{number}"
        self._names.setdefault(version, []).append(path)
        with durable.aside(path).open("wb", buffering=0) as file:
            unwritten = array.data
            while unwritten:
                unwritten = unwritten[file.write(unwritten) :]
        os.replace(durable.aside(path), path)
        return encode(File(path=str(path), nbytes=array.nbytes))


class FolderReceiver:
    """Implements `transport.Receiver`."""

    def __init__(self) -> None:
        self._missing, self._since = "", 0.0

    async def fetch(self, ref: BucketRef) -> Bytes:
        """See `transport.Receiver.fetch`. Raises `WeightsError` if a bucket is missing for `MISSING_S`."""
        assert isinstance(ref, bytes), "a reference of a folder's sender"
        file = decode(ref, File)
        try:
            read = await asyncio.to_thread(_read, file)
        except OSError as error:
            if self._missing != file.path:
                self._missing, self._since = file.path, time.monotonic()
            if time.monotonic() - self._since > MISSING_S:
                raise WeightsError(
                    f"{file.path} cannot be read ({error.strerror}): learner.transport.path must be a folder that all "
                    "nodes see"
                ) from error
            raise BucketGone(str(error)) from error
        self._missing = ""
        return read


def _read(file: File) -> Bytes:
    """Read a bucket; fewer bytes if its file is truncated. A file that shrinks while mapped would kill the process."""
    bucket, size = np.empty(file.nbytes, dtype=np.uint8), 0
    memory = bucket.data
    with open(file.path, "rb", buffering=0) as source:
        while size < file.nbytes and (count := source.readinto(memory[size:])):
            size += count
    return bucket[:size]
