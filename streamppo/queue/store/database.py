"""SQLite for the journals: WAL mode, rows with keys and checksums (SQLite has none), errors that name the file."""

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

from streamppo import durable
from streamppo.errors import UNREADABLE, JournalError
from streamppo.types import decode

LOCKED_S = 120.0
"""Seconds that a writer waits for the write lock while another process, such as a backup or a shell, holds it."""
LOCKS = Path("/proc/locks")
LOG = "-wal"
"""The suffix of SQLite's log beside a file; it holds the transactions that are not in the file yet."""
SAVED = ".saved"
"""The suffix of the copy that a run makes of its file if the file was replaced or deleted."""
T = TypeVar("T")
ENCODER = msgspec.msgpack.Encoder()
"""An encoder whose buffer has room for a row; `msgspec.msgpack.encode` starts with less and reallocates repeatedly."""
SCHEMA = "select type, name, sql from sqlite_master where name not like 'sqlite_stat%' order by type, name"
log = logging.getLogger(__name__)


class Database:
    """One SQLite file with `tables`, in the format `number`; several threads may use it in turn.

    A reader sees the content as of its opening. Methods raise `JournalError`, which names the file, for every error.
    """

    def __init__(self, path: Path, tables: str, number: int, *, read_only: bool = False) -> None:
        self.path = path
        with self._errors_named():
            # Without a log, SQLite would create one unless the file is `immutable`.
            final = "" if _log(path).exists() else "&immutable=1"
            address = f"{path.resolve().as_uri()}?mode=ro{final}" if read_only else path
            self._db = sqlite3.connect(address, uri=read_only, check_same_thread=False, isolation_level=None)
            # The file may be untrusted, so its schema must not call functions.
            self._db.execute("pragma trusted_schema = off")
            if read_only:
                self._db.execute("begin")
            ((structure, *_),) = self._db.execute("pragma integrity_check(1)").fetchall()
            if structure != "ok":
                raise JournalError(f"{path}: damaged: {structure}")
            if not read_only:
                self._db.execute("pragma journal_mode = wal")
                # With `full`, acknowledged transactions survive a power failure, not only a kill.
                self._db.execute("pragma synchronous = full")
            self._verify_format(tables, number, read_only=read_only)
            # Record the inodes only here, after SQLite has created its log.
            self._places = {} if read_only else {place: place.stat() for place in (path, _log(path))}

    def close(self) -> None:
        """Close the file; a writer also moves the write-ahead log into it."""
        with self._errors_named():
            self._db.close()

    def back_up(self, path: Path) -> None:
        with self._errors_named():
            copy = sqlite3.connect(path, check_same_thread=False)
            try:
                self._db.backup(copy)
            finally:
                copy.close()

    @contextmanager
    def _errors_named(self) -> Generator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise JournalError(f"{self.path}: {error}") from error

    @contextmanager
    def _transaction(self) -> Generator[sqlite3.Connection]:
        with self._errors_named():
            self._verify_places()
            self._begin()
            try:
                yield self._db
                self._db.execute("commit")
            finally:
                if self._db.in_transaction:
                    self._db.execute("rollback")

    def _begin(self) -> None:
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

    def _verify_places(self) -> None:
        """Raise `JournalError` if the file or its log was moved, replaced or deleted, because writes would be lost.

        If the log is missing, its content is first written to the file; if the file is missing, to a file beside the
        path.
        """
        lost = next((place for place, opened in self._places.items() if not durable.is_at(place, opened)), None)
        if lost is None:
            return
        if not self.path.parent.is_dir():
            raise JournalError(f"{self.path}: missing: the run's folder was moved or deleted during the run")
        if lost != self.path:
            self._db.execute("pragma wal_checkpoint(full)")
            raise JournalError(f"{lost}: was deleted or replaced during the run: all of it is in {self.path}")
        saved = self.path.with_name(f"{self.path.name}{SAVED}")
        saved.unlink(missing_ok=True)
        self.back_up(saved)
        raise JournalError(
            f"{self.path}: was deleted or replaced during the run: all of it is in {saved.name}: rename that "
            f"to {self.path.name}, delete {self.path.name}{LOG} and {self.path.name}-shm, and resume"
        )

    def _rows(self, table: str, query: str, kind: type[T], *arguments: int) -> list[T]:
        with self._errors_named():
            rows = self._db.execute(query, arguments).fetchall()
        return [self._decode(table, row, checksum, kind) for row, checksum in rows]

    def _decode(self, table: str, row: bytes, checksum: int, kind: type[T]) -> T:
        self._check(table, row, checksum)
        try:
            return decode(row, kind)
        except UNREADABLE as error:
            raise JournalError(f"{self.path}: a row of {table!r} cannot be read: {error}") from error

    def _check(self, table: str, row: bytes, checksum: int) -> None:
        if not isinstance(row, bytes) or crc32(row) != checksum:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise JournalError(f"{self.path}: damaged: a row of {table!r} does not match its checksum")

    def _verify_format(self, tables: str, number: int, *, read_only: bool) -> None:
        ((stored,),) = self._db.execute("pragma user_version").fetchall()
        schema = self._db.execute(SCHEMA).fetchall()
        if not schema and read_only:
            raise JournalError(
                f"{self.path}: empty: nothing was ever written there, or it was copied without its log "
                f"{self.path.name}{LOG}"
            )
        if not schema:
            self._db.executescript(f"begin immediate; {tables} pragma user_version = {number}; commit;")
        elif stored != number:
            # The first format had no number, so its stored number is 0.
            raise JournalError(
                f"{self.path}: made by another version of streamppo: its format is {stored or 1}, and this version "
                f"reads {number}: continue with the version that made the run, or begin a new one"
            )
        elif schema != _tables(tables):
            raise JournalError(f"{self.path}: not a journal of streamppo: its tables, views or triggers differ")


def merge_logs(run: Path) -> None:
    """Move SQLite's logs into the files of a run whose processes were killed. A failure is only logged."""
    for written in [*run.glob(f"*.sqlite{LOG}"), *run.glob(f"shards/*.sqlite{LOG}")]:
        path = written.with_name(written.name.removesuffix(LOG))
        try:
            with closing(sqlite3.connect(path, isolation_level=None)) as db:
                db.execute("pragma wal_checkpoint(truncate)")
        except sqlite3.Error as error:
            log.info("%s: its log stays beside it: %s", path, error)


@cache
def _tables(tables: str) -> list[tuple[str, str, str | None]]:
    with closing(sqlite3.connect(":memory:", check_same_thread=False)) as db:
        db.executescript(tables)
        return db.execute(SCHEMA).fetchall()


def with_checksum(value: object) -> tuple[bytes, int]:
    """Encode a row, and compute its checksum."""
    return checked_row(ENCODER.encode(value))


def checked_row(row: bytes) -> tuple[bytes, int]:
    """Return an encoded row with its checksum."""
    return row, crc32(row)


def _log(path: Path) -> Path:
    return path.with_name(f"{path.name}{LOG}")


def _holder(path: Path) -> str:
    """Name the process that holds the write lock of the file at `path`; in WAL mode the lock is on its -shm file."""
    try:
        inode = path.with_name(f"{path.name}-shm").stat().st_ino
        rows = [line.split() for line in LOCKS.read_text().splitlines()]
    except OSError:
        return "another process"
    # A line of /proc/locks is: 1: POSIX ADVISORY WRITE 4711 fe:00:1234 120 120
    pids = [row[4] for row in rows if row[3] == "WRITE" and row[5].endswith(f":{inode}")]
    return f"process {', '.join(pids)}" if pids else "another process"
