"""SQLite as the journals use it: WAL mode, rows with checksums, errors that name the file.

SQLite checks its structure and nothing else: every row carries a checksum of its own. Columns beside a row's bytes are
keys.
"""

import logging
import sqlite3
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import TypeVar
from zlib import crc32

import msgspec

from streamppo.errors import UNREADABLE, JournalError
from streamppo.types import decode

LOCKED_S = 120.0
"""How long a writer waits for another process, such as a backup or an `sqlite3` shell, that has the write lock."""
T = TypeVar("T")
ENCODER = msgspec.msgpack.Encoder()
"""Begins with room for a row; `msgspec.msgpack.encode` begins with less, and makes it larger again and again."""
SCHEMA = "select type, name, sql from sqlite_master where name not like 'sqlite_stat%' order by type, name"
log = logging.getLogger(__name__)


class Database:
    """One file of SQLite's, with `tables` of the format of this number; several threads may use it in turn.

    A reader sees it as it is when it is opened.
    Every method raises `JournalError`, which names the file, if SQLite or the disk refuses. So does opening a file that
    is damaged, or that another version of streamppo made.
    """

    def __init__(self, path: Path, tables: str, number: int, *, read_only: bool = False) -> None:
        self.path = path
        with self._errors_named():
            address = _read_only_address(path) if read_only else path
            self._db = sqlite3.connect(address, uri=read_only, check_same_thread=False, isolation_level=None)
            # Its author may be a stranger: nothing in its tables calls a function.
            self._db.execute("pragma trusted_schema = off")
            if read_only:
                self._db.execute("begin")
            self._verify_structure()
            if not read_only:
                self._db.execute("pragma journal_mode = wal")
                # What is acknowledged survives a power cut, not only a kill.
                self._db.execute("pragma synchronous = full")
            self._verify_format(tables, number, read_only=read_only)

    def close(self) -> None:
        """Fold the log into the file, unless it is only read."""
        with self._errors_named():
            self._db.close()

    def back_up(self, path: Path) -> None:
        """Write all that is committed to a new file at `path`."""
        with self._errors_named():
            other = sqlite3.connect(path, check_same_thread=False)
            try:
                self._db.backup(other)
            finally:
                other.close()

    # --- for those that are a database -----------------------------------------------------------------------

    @contextmanager
    def _errors_named(self) -> Generator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise JournalError(f"{self.path}: {error}") from error

    @contextmanager
    def _transaction(self) -> Generator[sqlite3.Connection]:
        """Commit what the block writes, all or nothing. Raises as `_begin` does."""
        with self._errors_named():
            self._begin()
            try:
                yield self._db
                self._db.execute("commit")
            finally:
                if self._db.in_transaction:
                    self._db.execute("rollback")

    def _begin(self) -> None:
        """Take the write lock. Raises `JournalError` if another process holds it for longer than `LOCKED_S`."""
        deadline = time.monotonic() + LOCKED_S
        while True:
            try:
                self._db.execute("begin immediate")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                    raise
                if time.monotonic() > deadline:
                    raise JournalError(f"{self.path}: {_holder(self.path)} has locked it for {LOCKED_S:g} s") from error
                log.info("%s: the queue waits for %s, which has locked it", self.path, _holder(self.path))
            else:
                return

    def _rows(self, table: str, query: str, kind: type[T], *arguments: int) -> list[T]:
        with self._errors_named():
            found = self._db.execute(query, arguments).fetchall()
        return [self._decode(table, row, checksum, kind) for row, checksum in found]

    def _decode(self, table: str, row: bytes, checksum: int, kind: type[T]) -> T:
        self._check(table, row, checksum)
        try:
            return decode(row, kind)
        except UNREADABLE as error:
            raise JournalError(f"{self.path}: a row of {table!r} cannot be read: {error}") from error

    def _check(self, table: str, row: bytes, checksum: int) -> None:
        if not isinstance(row, bytes) or crc32(row) != checksum:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise JournalError(f"{self.path}: damaged: a row of {table!r} does not match its checksum")

    # --- the pieces ------------------------------------------------------------------------------------------

    def _verify_structure(self) -> None:
        ((first, *_),) = self._db.execute("pragma integrity_check(1)").fetchall()
        if first != "ok":
            raise JournalError(f"{self.path}: damaged: {first}")

    def _verify_format(self, tables: str, number: int, *, read_only: bool) -> None:
        """Make the tables of a new file. Raises `JournalError` for one that another version of streamppo made."""
        ((found,),) = self._db.execute("pragma user_version").fetchall()
        there = self._db.execute(SCHEMA).fetchall()
        if not there and read_only:
            raise JournalError(f"{self.path}: empty: nothing was ever written there")
        if not there:
            self._db.executescript(f"begin immediate; {tables} pragma user_version = {number}; commit;")
        elif found != number:
            # The first format had no number.
            raise JournalError(
                f"{self.path}: made by another version of streamppo: its format is {found or 1}, and this version "
                f"reads {number}: go on with the version that made the run, or begin a new one"
            )
        elif there != _tables(tables):
            raise JournalError(f"{self.path}: not a journal of streamppo: its tables, views or triggers are others")


@cache
def _tables(tables: str) -> list[tuple[str, str, str | None]]:
    """The schema of a file with these `tables`."""
    with closing(sqlite3.connect(":memory:", check_same_thread=False)) as db:
        db.executescript(tables)
        return db.execute(SCHEMA).fetchall()


def with_checksum(value: object) -> tuple[bytes, int]:
    """A row, and its checksum."""
    return checked_row(ENCODER.encode(value))


def checked_row(row: bytes) -> tuple[bytes, int]:
    """A row that is encoded, and its checksum."""
    return row, crc32(row)


def _read_only_address(path: Path) -> str:
    """The address under which SQLite changes nothing; without a log it would begin one, unless the file is final."""
    final = "" if path.with_name(f"{path.name}-wal").exists() else "&immutable=1"
    return f"{path.resolve().as_uri()}?mode=ro{final}"


def _holder(path: Path, locks: Path = Path("/proc/locks")) -> str:
    """Name the process that has locked the file at `path`: the locks of a log in WAL mode are on its -shm file."""
    try:
        inode = path.with_name(f"{path.name}-shm").stat().st_ino
        rows = [line.split() for line in locks.read_text().splitlines()]
    except OSError:
        return "another process"
    # 1: POSIX  ADVISORY  WRITE 4711 fe:00:1234 120 120
    found = [row[4] for row in rows if row[3] == "WRITE" and row[5].endswith(f":{inode}")]
    return f"process {', '.join(found)}" if found else "another process"
