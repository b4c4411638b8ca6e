"""The durable record of what waits in the queue: SQLite in WAL mode. Pure: no Ray.

runs/NAME/journal.sqlite       slots that are alive, leases, attempts that came to nothing, dead letters, and one row
                               for each published version
runs/NAME/journal.tip          the number of the last transaction; a log that ends before it has lost some

A slot's row goes when its batch is consumed, because the archive names it from then on. So the journal is as large as
the queue, but for a short row for each attempt that was lost, failed, too old or given up. SQLite checks its structure
and nothing else: every row carries a checksum of its own.
"""

import sqlite3
import struct
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec

from streamppo.errors import JournalError
from streamppo.replay.saved import Changes, Counters, DeadLetter, Ended, Lease, Made, Saved, SavedSlot
from streamppo.types import decode, encode

DEAD_LETTERS = 1000
"""Dead letters that are kept; the newest."""
TIP = struct.Struct("<QI")
TABLES = """
create table if not exists state (name text primary key, value blob, checksum int) strict;
create table if not exists slots (
    number integer primary key, task text, prompt int, sample int, attempt int, state text, row blob, checksum int
) strict;
create table if not exists leases (version integer primary key, row blob, checksum int) strict;
create table if not exists versions (version integer primary key, digest text, row blob, checksum int) strict;
create table if not exists configs (version integer primary key, row blob, checksum int) strict;
create table if not exists ended (
    number integer, task text, prompt int, sample int, attempt int, state text, row blob, checksum int,
    primary key (number, attempt)
) strict;
create table if not exists dead_letters (
    task text, prompt int, sample int, attempt int, reason text, row blob, checksum int,
    primary key (task, prompt, sample, attempt)
) strict;
"""


class Journal:
    """One writer at a time. Raises `JournalError` that names the file for whatever SQLite or the disk refuses."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tip = path.with_name("journal.tip")
        with self._named():
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._verify_structure()
            self._db.execute("pragma journal_mode = wal")
            # An acknowledged trajectory survives a power cut, not only a kill.
            self._db.execute("pragma synchronous = full")
            self._db.executescript(TABLES)
            self._number = self._last_transaction()

    @classmethod
    def of(cls, run: Path) -> "Journal":
        """That of the run in the folder `run`. Raises `JournalError` if it has none, and makes none."""
        path = run / "journal.sqlite"
        if not path.is_file():
            raise JournalError(f"{path}: missing: {run} is not the folder of a run, or nothing was sampled in it yet")
        return cls(path)

    def write(self, changes: Changes, made: Sequence[Made] = ()) -> None:
        """One transaction. What is known already is written over by the same."""
        with self._transaction() as db:
            db.executemany("insert or replace into slots values (?, ?, ?, ?, ?, ?, ?, ?)", map(_slot, changes.slots))
            db.executemany(
                "insert or replace into leases values (?, ?, ?)",
                [(lease.version, *_checked(lease)) for lease in changes.leases],
            )
            db.executemany("delete from slots where number = ?", [(number,) for number in changes.gone])
            db.executemany("insert or ignore into ended values (?, ?, ?, ?, ?, ?, ?, ?)", map(_slot, changes.ended))
            db.executemany(
                "insert or ignore into versions values (?, ?, ?, ?)",
                [(version.version, version.digest, *_checked(version)) for version in made],
            )
            db.execute("delete from leases where version < ?", (changes.counters.version,))
            if changes.dead:
                db.executemany(
                    "insert or ignore into dead_letters values (?, ?, ?, ?, ?, ?, ?)", map(_dead, changes.dead)
                )
                db.execute(
                    "delete from dead_letters where rowid <= (select max(rowid) from dead_letters) - ?", (DEAD_LETTERS,)
                )
            db.execute("insert or replace into state values ('counters', ?, ?)", _checked(changes.counters))

    def read(self) -> Saved | None:
        """All that a queue is rebuilt from; None if nothing was ever written."""
        with self._named():
            found = self._rows("state", "select value, checksum from state where name = 'counters'", Counters)
            if not found:
                return None
            slots = self._rows("slots", "select row, checksum from slots order by number", SavedSlot)
            leases = self._rows("leases", "select row, checksum from leases order by version", Lease)
        return Saved(found[0], tuple(slots), tuple(leases))

    def versions(self) -> dict[int, Made]:
        """Every published version, in order."""
        with self._named():
            found = self._rows("versions", "select row, checksum from versions order by version", Made)
        return {version.version: version for version in found}

    def dead_letters(self) -> list[DeadLetter]:
        """What arrived and could not be trained on, oldest first."""
        with self._named():
            return self._rows("dead_letters", "select row, checksum from dead_letters order by rowid", DeadLetter)

    def ended(self) -> list[Ended]:
        """Every attempt that came to nothing, by its slot and its number."""
        with self._named():
            return self._rows("ended", "select row, checksum from ended order by number, attempt", Ended)

    def configs(self) -> dict[int, bytes]:
        """The encoded configurations of the run, by the version from which each of them holds."""
        with self._named():
            found = self._db.execute("select version, row, checksum from configs order by version").fetchall()
        for _, row, checksum in found:
            self._check("configs", row, checksum)
        return {version: row for version, row, _ in found}

    def configure(self, version: int, config: bytes) -> None:
        """`config` holds from `version` on."""
        with self._transaction() as db:
            db.execute("insert or replace into configs values (?, ?, ?)", (version, config, crc32(config)))

    def close(self) -> None:
        """Fold the log into the file."""
        with self._named():
            self._db.close()

    # --- the pieces ------------------------------------------------------------------------------------------

    @contextmanager
    def _named(self) -> Generator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise JournalError(f"{self.path}: {error}") from error

    @contextmanager
    def _transaction(self) -> Generator[sqlite3.Connection]:
        number = self._number + 1
        with self._named():
            self._db.execute("begin immediate")
            try:
                if self._recorded() != self._number:
                    raise JournalError(f"{self.path}: somebody else writes here: this queue was given up for dead")
                yield self._db
                self._db.execute("insert or replace into state values ('number', ?, ?)", _checked(number))
                self._db.execute("commit")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("rollback")
                raise
            self._number = number
            packed = struct.pack("<Q", number)
            with open(self._tip, "r+b" if self._tip.exists() else "wb", buffering=0) as file:
                file.write(TIP.pack(number, crc32(packed)))

    def _verify_structure(self) -> None:
        ((first, *_),) = self._db.execute("pragma integrity_check(1)").fetchall()
        if first != "ok":
            raise JournalError(f"{self.path}: damaged: {first}")

    def _recorded(self) -> int:
        found = self._rows("state", "select value, checksum from state where name = 'number'", int)
        return found[0] if found else 0

    def _last_transaction(self) -> int:
        """The number of the last transaction. Raises if the tip knows of a later one."""
        # The tip first: it is written after the transaction, by a queue that may be at work.
        tip = self._tip.read_bytes() if self._tip.exists() else b""
        number = self._recorded()
        if not tip and number > 1:
            raise JournalError(f"{self._tip}: missing or empty, though {self.path} holds {number} transactions")
        if not tip:
            return number
        if len(tip) != TIP.size or crc32(tip[:8]) != TIP.unpack(tip)[1]:
            raise JournalError(f"{self._tip}: damaged")
        if (known := TIP.unpack(tip)[0]) > number:
            raise JournalError(
                f"{self.path}: damaged: it ends with transaction {number}, and {known} were acknowledged "
                f"(its log {self.path.name}-wal is missing or damaged)"
            )
        return number

    def _rows(self, table: str, query: str, kind: Any) -> list[Any]:
        found = self._db.execute(query).fetchall()
        return [self._decoded(table, row, checksum, kind) for row, checksum in found]

    def _decoded(self, table: str, row: bytes, checksum: int, kind: Any) -> Any:
        self._check(table, row, checksum)
        try:
            return decode(row, kind)
        except msgspec.MsgspecError as error:
            raise JournalError(f"{self.path}: a row of {table!r} cannot be read: {error}") from error

    def _check(self, table: str, row: bytes, checksum: int) -> None:
        if not isinstance(row, bytes) or crc32(row) != checksum:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise JournalError(f"{self.path}: damaged: a row of {table!r} does not match its checksum")


def _checked(value: object) -> tuple[bytes, int]:
    row = encode(value)
    return row, crc32(row)


def _slot(slot: SavedSlot | Ended) -> tuple[Any, ...]:
    return slot.number, *msgspec.structs.astuple(slot.identity), slot.state, *_checked(slot)


def _dead(letter: DeadLetter) -> tuple[Any, ...]:
    return *msgspec.structs.astuple(letter.trajectory.identity), letter.reason, *_checked(letter)
