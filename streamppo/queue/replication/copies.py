"""Copies at a run's address, an address of fsspec's, which are there before anything is acknowledged.

    written here -> copied -> acknowledged        what is not in the copy was acknowledged to nobody

A store that is away is waited for: nothing is acknowledged meanwhile, and the watchdog says what everybody waits for. A
file that is cut off is no part of the copy, so that its writer may die at any moment. Each restored run has a life
of its own, with folders of its own there: an earlier life, which may not be as dead as it is taken for, spoils nothing.
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
"""Folders at a run's address."""
LIFE = "standby.life"
"""The file in a run's folder that has the name of its life; without it that is the first one."""
FIRST = "0000"
OF_LIFE = re.compile(r"\d{4,}(-[0-9a-f]{8})?")
RETRY_S = 5.0
"""Seconds between two attempts to reach a store that has been away for long."""
T = TypeVar("T")
log = logging.getLogger(__name__)


class ReplicaWriter:
    """Writes the copies of a run to `address`; threads may use it at a time."""

    def __init__(self, address: str) -> None:
        self._store = Store(address)
        self.address = self._store.address

    def put(self, folder: str, name: str, row: bytes) -> None:
        """Copy `row`, behind its CRC-32: `read` finds it if all of it is there."""
        self.put_bytes(folder, name, with_crc(row))

    def put_bytes(self, folder: str, name: str, content: bytes) -> None:
        """Copy `content` as it is."""
        self._retry(lambda: self._store.put(folder, {name: io.BytesIO(content)}))

    def put_file(self, folder: str, path: Path, name: str) -> None:
        """Copy a file as it is, under `name`. Raises `OSError` if it cannot be read here."""
        with durable.reading(path) as file:
            self._retry(lambda: self._store.put(folder, {name: file}))

    def sizes(self, folder: str) -> dict[str, int]:
        """The bytes of each file in a folder there."""
        return self._retry(lambda: self._store.sizes(folder))

    def names(self, folder: str) -> list[str]:
        """The names of what is in a folder there."""
        return self._retry(lambda: self._store.names(folder))

    def delete(self, folder: str, name: str) -> bool:
        """Delete a file that nobody reads any more, and tell if it went: one that stays does no harm."""
        try:
            self._store.delete(f"{folder}/{name}")
        except CheckpointError as error:
            log.info("a needless copy was not deleted: %s", error)
            return False
        return True

    def _retry(self, call: Callable[[], T]) -> T:
        while True:
            try:
                return call()
            except CheckpointError as error:
                log.warning("nothing can be acknowledged while the copy of the journal is out of reach: %s", error)
                time.sleep(RETRY_S)


def read(found: Store, folder: str, name: str) -> bytes | None:
    """Read a row that was `put` there; None of a file that is cut off or damaged."""
    return row_of(found.read(folder, name))


def life(run: Path) -> str:
    """The name of the life of the run in the folder `run`, and of its folders; they sort in their order."""
    return durable.read(run / LIFE).decode() if (run / LIFE).is_file() else FIRST


def is_life(name: str) -> bool:
    """True for the name of a life; a file of somebody else has another."""
    return OF_LIFE.fullmatch(name) is not None


def next_life(before: str) -> str:
    """The name of a life that follows one, and is nobody else's: a run may be restored twice.

    Example: 0001-5e6f7a8b follows 0000.
    """
    return f"{int(before.partition('-')[0]) + 1:04d}-{uuid4().hex[:8]}"
