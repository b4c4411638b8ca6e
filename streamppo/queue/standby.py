"""A copy of journal and archive at an address of fsspec's: a run outlives the disk of its queue (`queue.standby`).

ADDRESS/journal/0000/000000000012-1a2b3c4d.base     the journal after transaction 12, as a file, with its CRC-32
ADDRESS/journal/0000/000000000013                   the next transaction, behind its CRC-32
ADDRESS/archive/00000007.zarr.zip                   a file of the archive, as it is on the disk
ADDRESS/run/config.toml                             what else `resume` reads; metrics.jsonl as of the last checkpoint

    written here -> copied -> acknowledged        a transaction that is not in the copy was acknowledged to nobody

A store that is away is waited for: nothing is acknowledged meanwhile, and the watchdog says what everybody waits for. A
file that is cut off is no part of the copy, so that its writer may die at any moment. Each restored run has a life
of its own, a folder there, and a queue of an earlier life makes no version any more. Pure: no Ray.
"""

import io
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar
from uuid import uuid4
from zlib import crc32

import msgspec

from streamppo import durable
from streamppo.config.sections import Config
from streamppo.errors import CheckpointError, JournalError
from streamppo.queue.archive import Archive, checksums
from streamppo.queue.journal import Journal
from streamppo.queue.records import Changes, Made
from streamppo.types import Crossing, encode
from streamppo.weights import store
from streamppo.weights.store import Store

JOURNAL, ARCHIVE, RUN = "journal", "archive", "run"
"""Folders at a run's address."""
BASE = ".base"
LIFE = "standby.life"
"""The file in a run's folder that has the number of its life; without it that is 0."""
FILES = ("config.toml", "inputs.json", "metrics.jsonl")
"""Files of a run's folder, beside journal and archive, that `resume` reads if they are there."""
BASE_EVERY = 1000
"""Transactions after which a whole journal takes the place of those before."""
RETRY_S = 5.0
"""Seconds between two attempts to reach a store that has been away for long."""
T = TypeVar("T")
log = logging.getLogger(__name__)


class Wrote(Crossing, frozen=True, tag="wrote"):
    """A call of `Journal.write`."""

    changes: Changes
    made: tuple[Made, ...]


class Configured(Crossing, frozen=True, tag="configured"):
    """A call of `Journal.configure`."""

    version: int
    config: bytes


class Forgot(Crossing, frozen=True, tag="forgot"):
    """A call of `Journal.forget`."""

    before: int
    first_slot: int


Entry: TypeAlias = Wrote | Configured | Forgot


class CopiedJournal(Journal):
    """The journal of the run in the folder `run`, with a copy of all that is written at `address`.

    `every` is the number of versions between two copies of metrics.jsonl; 0 copies it at the begin alone.
    """

    def __init__(self, run: Path, address: str, every: int) -> None:
        super().__init__(run / "journal.sqlite")
        self._run, self._every, self._store = run, every, Store(address)
        self._archive = Archive(run / ARCHIVE, {})
        self._life = int((run / LIFE).read_text()) if (run / LIFE).is_file() else 0
        self._entries = 0

    def fence(self) -> None:
        """See `Journal.fence`. The copy begins anew with all that is here: the writer before may have copied less."""
        super().fence()
        self._refuse_later_life()
        self._copy_base()
        self._copy_run()

    def write(
        self, changes: Changes, made: Sequence[Made] = (), before_commit: Callable[[Made], None] | None = None
    ) -> None:
        """See `Journal.write`."""
        super().write(changes, made, before_commit)
        if made:
            self._refuse_later_life()
        for version, files in checksums(made).items():
            for path in self._archive.paths(version, len(files)):
                self._copy_file(ARCHIVE, path)
        if any(self._every and one.version % self._every == 0 for one in made):
            self._copy_run()
        self._copy(Wrote(changes=changes, made=tuple(made)))

    def configure(self, version: int, config: bytes) -> None:
        """See `Journal.configure`."""
        super().configure(version, config)
        self._copy_run()
        self._copy(Configured(version=version, config=config))

    def forget(self, before: int, first_slot: int) -> None:
        """See `Journal.forget`; the copies of these batches go too."""
        dropped = [one for one in checksums(self.versions().values()).items() if one[0] < before]
        super().forget(before, first_slot)
        self._copy(Forgot(before=before, first_slot=first_slot))
        for version, files in dropped:
            for path in self._archive.paths(version, len(files)):
                self._delete(ARCHIVE, path.name)

    # --- the pieces ------------------------------------------------------------------------------------------

    @property
    def _folder(self) -> str:
        return f"{JOURNAL}/{self._life:04d}"

    def _copy(self, entry: Entry) -> None:
        row = encode(entry)
        content = crc32(row).to_bytes(4, "little") + row
        self._patiently(lambda: self._store.put(self._folder, {_name(self._number): io.BytesIO(content)}))
        self._entries += 1
        if self._entries >= BASE_EVERY:
            self._copy_base()

    def _copy_base(self) -> None:
        """Copy the whole journal, and delete what the copy has made needless."""
        aside = durable.aside(self.path.with_name(f"{self.path.name}.copy"))
        with self._errors_named():
            aside.unlink(missing_ok=True)
            self.back_up(aside)
            name = f"{_name(self._number)}-{_crc(aside):08x}{BASE}"
            self._copy_file(self._folder, aside, name)
            aside.unlink()
        self._entries = 0
        for old in self._patiently(lambda: self._store.names(self._folder)):
            if old < name:
                self._delete(self._folder, old)

    def _delete(self, folder: str, name: str) -> None:
        """Delete a file that nobody reads any more: one that stays, or has gone already, does no harm."""
        try:
            self._store.delete(f"{folder}/{name}")
        except CheckpointError as error:
            log.info("a needless copy was not deleted: %s", error)

    def _copy_run(self) -> None:
        for name in FILES:
            if (self._run / name).is_file():
                self._copy_file(RUN, self._run / name)

    def _copy_file(self, folder: str, path: Path, name: str = "") -> None:
        with self._errors_named(), path.open("rb") as file:
            self._patiently(lambda: self._store.put(folder, {name or path.name: file}))

    def _refuse_later_life(self) -> None:
        """Raise `JournalError` if the run was restored elsewhere: that one goes on, and not this one."""
        lives = self._patiently(lambda: self._store.names(JOURNAL))
        if lives and int(lives[-1]) > self._life:
            raise JournalError(
                f"{self.path}: the run was restored from {self._store.address}, where it goes on: this one ends here"
            )

    def _patiently(self, call: Callable[[], T]) -> T:
        """Wait for a store that is away: what is not copied is acknowledged to nobody."""
        while True:
            try:
                return call()
            except CheckpointError as error:
                log.warning("nothing can be acknowledged while the copy of the journal is out of reach: %s", error)
                time.sleep(RETRY_S)


def journal_of(run: Path, config: Config) -> Journal:
    """The journal of the run in the folder `run`, for its one writer; with a copy, if `config` asks for one."""
    if not config.queue.standby:
        return Journal(run / "journal.sqlite")
    return CopiedJournal(run, store.known(run), config.checkpoint.every)


def restore(address: str, run: Path) -> None:
    """Make the folder of a run, at `run`, of its copies at `address`: `resume` goes on with it.

    Raises `CheckpointError` if `run` exists, or there are no copies, and `JournalError` if they have a gap.
    """
    if run.exists():
        raise CheckpointError(f"{run}: exists; name a folder that does not")
    found = Store(address)
    lives = found.names(JOURNAL)
    if not lives:
        raise CheckpointError(f"{address}: no copy of a journal is there: only a run with queue.standby makes one")
    aside = durable.aside(run.with_name(f"{run.name}.{uuid4().hex}"))
    with durable.naming(run, CheckpointError):
        durable.folder(aside)
        for name in found.names(RUN):
            found.fetch(RUN, name, aside)
        durable.write(aside / store.ADDRESS, found.address.encode())
        durable.write(aside / LIFE, str(int(lives[-1]) + 1).encode())
    if found.names(store.MODEL):
        found.fetch_folder(store.MODEL, aside / store.MODEL)
    for version, files in checksums(_restored(found, f"{JOURNAL}/{lives[-1]}", aside)).items():
        for path in Archive(aside / ARCHIVE, {}).paths(version, len(files)):
            found.fetch(ARCHIVE, path.name, aside / ARCHIVE)
    with durable.naming(run, CheckpointError):
        durable.rename(aside, run)


def _restored(found: Store, folder: str, run: Path) -> list[Made]:
    """Make the journal of a run of the newest copy that is whole, and of the transactions behind it; its versions."""
    names = found.names(folder)
    journal = _based(found, folder, [name for name in names if name.endswith(BASE)], run)
    try:
        behind = [name for name in names if not name.endswith(BASE) and name > _name(journal.number)]
        for name, entry in _whole(found, folder, behind):
            if name != _name(journal.number + 1):
                raise JournalError(f"{found.address}/{folder}: transaction {journal.number + 1} is missing")
            _repeat(journal, entry)
        return list(journal.versions().values())
    finally:
        journal.close()


def _whole(found: Store, folder: str, names: Sequence[str]) -> Iterator[tuple[str, Entry]]:
    """Read transactions; the last one may be cut off: its writer has died, and acknowledged it to nobody."""
    for name in names:
        content = found.read(folder, name)
        if crc32(content[4:]).to_bytes(4, "little") == content[:4]:
            yield name, msgspec.msgpack.decode(content[4:], type=Entry)
        elif name != names[-1]:
            raise JournalError(f"{found.address}/{folder}/{name}: damaged, and transactions follow")


def _based(found: Store, folder: str, bases: Sequence[str], run: Path) -> Journal:
    for base in reversed(bases):
        number, crc = base.removesuffix(BASE).split("-")
        found.fetch(folder, base, run)
        if f"{_crc(run / base):08x}" == crc:
            with durable.naming(run, JournalError):
                durable.rename(run / base, run / "journal.sqlite")
            return Journal.restored(run / "journal.sqlite", int(number))
        (run / base).unlink()
    raise JournalError(f"{found.address}/{folder}: no whole copy of the journal is there")


def _repeat(journal: Journal, entry: Entry) -> None:
    match entry:
        case Wrote(changes=changes, made=made):
            journal.write(changes, made)
        case Configured(version=version, config=config):
            journal.configure(version, config)
        case Forgot(before=before, first_slot=first_slot):
            journal.forget(before, first_slot)


def _name(number: int) -> str:
    return f"{number:012d}"


def _crc(path: Path) -> int:
    found = 0
    with path.open("rb") as file:
        while part := file.read(store.PART_BYTES):
            found = crc32(part, found)
    return found
