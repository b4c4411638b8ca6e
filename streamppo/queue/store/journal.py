"""The durable record of the queue's content: SQLite in WAL mode.

runs/NAME/journal.sqlite       held slots, leases, attempts that ended without training, dead letters, one row for
                               each published version, and the counts and skipped prompts of `algorithm.curriculum`
runs/NAME/journal.tip          the number of the last transaction; a journal that ends before it has lost transactions

After a writer's `fence`, earlier writers can neither write rows nor give files of the archive their final names. A
slot's row is deleted when its batch is consumed, because the archive then has the trajectory.
"""

import os
import sqlite3
import struct
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from zlib import crc32

import msgspec

from streamppo import durable
from streamppo.errors import JournalError
from streamppo.process import phase
from streamppo.queue.rules.records import (
    Changes,
    Counters,
    Counts,
    DeadLetter,
    EndedAttempt,
    KnownRows,
    Lease,
    PublishedVersion,
    SavedSlot,
    with_link,
)
from streamppo.queue.store.database import LOG, Database, with_checksum

FORMAT = 9
DEAD_LETTERS = 1000
ALL = range(2**62)
TIP = struct.Struct("<QI")
TIP_FILE = "journal.tip"
LOGS = (LOG, "-shm")
TIP_READS = 3
"""The number of reads before a tip counts as damaged: a queue may be writing the tip during a read."""
TABLES = """
create table if not exists state (name text primary key, value blob, checksum int) strict;
create table if not exists slots (
    number int, part int, row blob, checksum int, primary key (number, part)
) strict, without rowid;
create table if not exists leases (version integer primary key, row blob, checksum int) strict;
create table if not exists versions (version integer primary key, row blob, checksum int) strict;
create table if not exists configs (version integer primary key, row blob, checksum int) strict;
create table if not exists ended (
    number int, attempt int, segment int, row blob, checksum int, primary key (number, attempt, segment)
) strict, without rowid;
create table if not exists dead_letters (
    prompt int, sample int, attempt int, row blob, checksum int, primary key (prompt, sample, attempt)
) strict;
create table if not exists zero_variance (data_row integer primary key, row blob, checksum int) strict;
create table if not exists skipped (number integer primary key, row blob, checksum int) strict;
"""


class Journal(Database):
    """The journal's file: one writer at a time, and readers, which see the last transaction before they opened it."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path, self._tip = path, path.with_name(TIP_FILE)
        # A running queue writes the tip after each transaction, so a tip read before the journal is never ahead of it.
        with self._errors_named():
            tip = self._read_tip()
        super().__init__(path, TABLES, FORMAT, read_only=read_only)
        with self._errors_named():
            self._number = self._last_transaction(tip)

    @classmethod
    def open_run(cls, run: Path) -> "Journal":
        """Open the journal of the run in the folder `run` for reading. Raises `JournalError` if there is none."""
        path = run / "journal.sqlite"
        if not path.is_file():
            raise JournalError(f"{path}: missing: {run} is not the folder of a run, or nothing was sampled in it yet")
        # If one of these files were a pipe, SQLite would wait for it forever.
        for beside in (path.with_name(f"{path.name}{end}") for end in LOGS):
            if beside.exists() and not beside.is_file():
                raise JournalError(f"{beside}: not a file")
        try:
            return cls(path, read_only=True)
        except JournalError as error:
            # SQLite needs an index beside a log to read it, and creates the index if it is missing.
            if path.with_name(f"{path.name}{LOG}").exists() and not os.access(run, os.W_OK):
                raise JournalError(
                    f"{error}: the run is running or was killed, and its journal can be read only where files can be "
                    "written: copy the run's folder to such a place, or resume it"
                ) from error
            raise

    @classmethod
    def from_copy(cls, path: Path, number: int) -> "Journal":
        """Open the journal at `path`, a copy made after transaction `number`, and write its tip."""
        with durable.naming(path, JournalError):
            durable.write(path.with_name(TIP_FILE), _tip(number))
        return cls(path)

    @property
    def number(self) -> int:
        return self._number

    def fence(self) -> None:
        """Prevent all earlier writers from writing again; all that they have written is visible afterwards."""
        with self._numbered_transaction(fencing=True):
            pass

    @phase("journal")
    def write(
        self,
        changes: Changes,
        versions: Sequence[PublishedVersion] = (),
        before_commit: Callable[[PublishedVersion], None] | None = None,
    ) -> None:
        """Write one transaction, idempotently; in it, call `before_commit` for each of `versions` unless fenced out."""
        with self._numbered_transaction() as db:
            if before_commit is not None:
                for version in versions:
                    before_commit(version)
            db.executemany(
                "insert or replace into slots values (?, ?, ?, ?)",
                [(slot.number, slot.part, *with_checksum(slot)) for slot in changes.slots],
            )
            db.executemany(
                "insert or replace into leases values (?, ?, ?)",
                [(lease.version, *with_checksum(lease)) for lease in changes.leases],
            )
            db.executemany("delete from slots where number = ? and part = ?", changes.removed)
            db.executemany(
                "insert or ignore into ended values (?, ?, ?, ?, ?)",
                [
                    (attempt.number, attempt.identity.attempt, attempt.identity.segment, *with_checksum(attempt))
                    for attempt in changes.ended
                ],
            )
            for version in versions:
                query = "select row, checksum from versions where version = ?"
                before = self._rows("versions", query, PublishedVersion, version.version - 1)
                linked = with_link(version, self.configs(), before[0].link if before else "")
                db.execute("insert or ignore into versions values (?, ?, ?)", (version.version, *with_checksum(linked)))
            db.execute("delete from leases where version < ?", (changes.counters.version,))
            if changes.dead:
                db.executemany("insert or ignore into dead_letters values (?, ?, ?, ?, ?)", map(_dead, changes.dead))
                db.execute(
                    "delete from dead_letters where rowid <= (select max(rowid) from dead_letters) - ?", (DEAD_LETTERS,)
                )
            db.executemany(
                "insert or replace into zero_variance values (?, ?, ?)",
                [(row, *with_checksum(count)) for row, count in changes.zero_variance],
            )
            db.executemany(
                "insert or ignore into skipped values (?, ?, ?)",
                [(number, *with_checksum(count)) for number, count in changes.skipped],
            )
            if changes.rows is not None:
                db.execute("insert or replace into state values ('rows', ?, ?)", with_checksum(changes.rows))
            db.execute("insert or replace into state values ('counters', ?, ?)", with_checksum(changes.counters))

    def read(self) -> Changes | None:
        """Read everything that is needed to rebuild a queue; None if nothing was ever written."""
        counters = self.counters()
        if counters is None:
            return None
        counts = self._counts("zero_variance", "select data_row, row, checksum from zero_variance order by data_row")
        zero_variance = tuple((row, count) for row, count in counts if count)
        slots, leases = tuple(self.slots()), tuple(self.leases())
        return Changes(counters, slots, leases, zero_variance=zero_variance, rows=self.known_rows())

    def known_rows(self) -> KnownRows | None:
        rows = self._rows("state", "select value, checksum from state where name = 'rows'", KnownRows)
        return rows[0] if rows else None

    def skipped(self, numbers: range = ALL) -> Counts:
        """For each skipped prompt: the number of its first slot, if this is in `numbers`, and the z of its row."""
        query = "select number, row, checksum from skipped where number >= ? and number < ? order by number"
        return self._counts("skipped", query, numbers.start, numbers.stop)

    def counters(self) -> Counters | None:
        rows = self._rows("state", "select value, checksum from state where name = 'counters'", Counters)
        return rows[0] if rows else None

    def slots(self, numbers: range = ALL) -> list[SavedSlot]:
        query = "select row, checksum from slots where number >= ? and number < ? order by number, part"
        return self._rows("slots", query, SavedSlot, numbers.start, numbers.stop)

    def leases(self) -> list[Lease]:
        return self._rows("leases", "select row, checksum from leases order by version", Lease)

    def versions(self) -> dict[int, PublishedVersion]:
        versions = self._rows("versions", "select row, checksum from versions order by version", PublishedVersion)
        return {version.version: version for version in versions}

    def dead_letters(self) -> list[DeadLetter]:
        """The delivered trajectories that cannot be trained on, oldest first; at most `DEAD_LETTERS`."""
        return self._rows("dead_letters", "select row, checksum from dead_letters order by rowid", DeadLetter)

    def ended_attempts(self, numbers: range = ALL) -> list[EndedAttempt]:
        """The attempts at the slots in `numbers` that ended without training, ordered by slot, attempt and segment."""
        query = "select row, checksum from ended where number >= ? and number < ? order by number, attempt, segment"
        return self._rows("ended", query, EndedAttempt, numbers.start, numbers.stop)

    def configs(self) -> dict[int, bytes]:
        with self._errors_named():
            rows = self._db.execute("select version, row, checksum from configs order by version").fetchall()
        for _, row, checksum in rows:
            self._check("configs", row, checksum)
        return {version: row for version, row, _ in rows}

    def configure(self, version: int, config: bytes) -> None:
        with self._numbered_transaction() as db:
            db.execute("insert or replace into configs values (?, ?, ?)", (version, config, crc32(config)))

    def forget(self, before: int, first_slot: int) -> None:
        """Forget the archived batches of versions below `before`, and the endings of the slots below `first_slot`."""
        versions = [
            version
            for version in self.versions().values()
            if version.archived is not None and version.version <= before
        ]
        forgotten = [
            msgspec.structs.replace(
                version, archived=None, forgotten=version.batch_digest, newest_prompt=version.last_prompt
            )
            for version in versions
        ]
        rows = [(version.version, *with_checksum(version)) for version in forgotten]
        with self._numbered_transaction() as db:
            db.executemany("insert or replace into versions values (?, ?, ?)", rows)
            db.execute("delete from ended where number < ?", (first_slot,))
            db.execute("delete from skipped where number < ?", (first_slot,))

    @contextmanager
    def _numbered_transaction(self, *, fencing: bool = False) -> Generator[sqlite3.Connection]:
        with self._errors_named():
            with self._transaction() as db:
                number = self._transactions()
                if number != self._number and not fencing:
                    raise JournalError(f"{self.path}: another process writes here: this queue was marked dead")
                if number == 0:
                    # Make the tip's name and size durable; later writes change only its number.
                    durable.write(self._tip, _tip(0))
                yield db
                db.execute("insert or replace into state values ('number', ?, ?)", with_checksum(number + 1))
            self._number = number + 1
            with open(self._tip, "r+b", buffering=0) as file:
                file.write(_tip(self._number))

    def _counts(self, table: str, query: str, *arguments: int) -> Counts:
        with self._errors_named():
            rows = self._db.execute(query, arguments).fetchall()
        return tuple((key, self._decode(table, row, checksum, int)) for key, row, checksum in rows)

    def _transactions(self) -> int:
        rows = self._rows("state", "select value, checksum from state where name = 'number'", int)
        return rows[0] if rows else 0

    def _last_transaction(self, tip: bytes) -> int:
        number = self._transactions()
        # The queue creates the tip before its first transaction; both may have happened after `tip` was read.
        if not tip and number and not self._read_tip():
            raise JournalError(f"{self._tip}: missing or empty, though {self.path} holds {number} transactions")
        if not tip:
            return number
        if not _is_whole(tip):
            raise JournalError(f"{self._tip}: damaged")
        if (acknowledged := TIP.unpack(tip)[0]) > number:
            raise JournalError(
                f"{self.path}: damaged: it ends with transaction {number}, and {acknowledged} were acknowledged "
                f"(its log {self.path.name}{LOG} is missing or damaged)"
            )
        return number

    def _read_tip(self) -> bytes:
        tip = b""
        for _ in range(TIP_READS):
            tip = durable.read(self._tip) if self._tip.exists() else b""
            # A concurrent write of the tip may be half visible, so read again.
            if not tip or _is_whole(tip):
                break
        return tip


def _tip(number: int) -> bytes:
    return TIP.pack(number, crc32(struct.pack("<Q", number)))


def _is_whole(tip: bytes) -> bool:
    return len(tip) == TIP.size and crc32(tip[:8]) == TIP.unpack(tip)[1]


def _dead(letter: DeadLetter) -> tuple[int | bytes, ...]:
    identity = letter.trajectory.identity
    return identity.prompt, identity.sample, identity.attempt, *with_checksum(letter)
