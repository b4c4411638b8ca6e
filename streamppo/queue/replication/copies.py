"""Copies a run's files to its fsspec address, before anything is acknowledged.

    written here -> copied -> acknowledged        all that was acknowledged is in the copy

While the store is unreachable, writers retry and nothing is acknowledged; the watchdog reports the wait. A writer may
die at any moment, because a file that it left truncated is ignored by a restore.

A life of a run is the time between two restores. Each life has its own folders at the address, so that processes of an
earlier life, which may still run, cannot damage a later one.
"""

import io
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from streamppo import durable
from streamppo.errors import CheckpointError
from streamppo.weights.store import Store, row_of, with_crc

JOURNAL, SHARDS, LIVES, ARCHIVE, RUN = "journal", "shards", "lives", "archive", "run"
LIFE = "standby.life"
"""The file in a run's folder with the name of the run's life; without this file the life is `FIRST`."""
FIRST = "0000"
LIFE_NAME = re.compile(r"\d{4,}(-[0-9a-f]{8})?")
RETRY_S = 5.0
T = TypeVar("T")
log = logging.getLogger(__name__)


class ReplicaWriter:
    """Writes the copies of a run to `address`; several threads may use it concurrently."""

    def __init__(self, address: str) -> None:
        self._store = Store(address)
        self.address = self._store.address

    def put(self, folder: str, name: str, row: bytes) -> None:
        """Copy `row` after its CRC-32, by which `read_row` detects truncation."""
        self.put_bytes(folder, name, with_crc(row))

    def put_bytes(self, folder: str, name: str, content: bytes) -> None:
        self._retry(lambda: self._store.put(folder, {name: io.BytesIO(content)}))

    def put_file(self, folder: str, path: Path, name: str) -> None:
        """Copy a file unchanged, under `name`. Raises `OSError` if the local file cannot be read."""
        with durable.reading(path) as file:
            self._retry(lambda: self._store.put(folder, {name: file}))

    def sizes(self, folder: str) -> dict[str, int]:
        return self._retry(lambda: self._store.sizes(folder))

    def names(self, folder: str) -> list[str]:
        return self._retry(lambda: self._store.names(folder))

    def delete(self, folder: str, name: str) -> bool:
        """Delete a file that is no longer needed. Returns False if that fails, which does no harm."""
        try:
            self._store.delete(f"{folder}/{name}")
        except CheckpointError as error:
            log.info("a copy that is no longer needed was not deleted: %s", error)
            return False
        return True

    def _retry(self, call: Callable[[], T]) -> T:
        while True:
            try:
                return call()
            except CheckpointError as error:
                log.warning("nothing is acknowledged until the address can be reached: %s", error)
                time.sleep(RETRY_S)


def read_row(source: Store, folder: str, name: str) -> bytes | None:
    """Read a row written by `put`; None if the file is truncated or damaged."""
    return row_of(source.read(folder, name))


def life(run: Path) -> str:
    """The name of the life of the run in the folder `run`; it also names folders at the address. Names sort by age."""
    return durable.read(run / LIFE).decode() if (run / LIFE).is_file() else FIRST


def is_life(name: str) -> bool:
    """True for the name of a life; False for foreign files."""
    return LIFE_NAME.fullmatch(name) is not None


def next_life(before: str) -> str:
    """Return a unique name for the life after `before`. Example: 0001-5e6f7a8b follows 0000."""
    return f"{int(before.partition('-')[0]) + 1:04d}-{uuid4().hex[:8]}"
