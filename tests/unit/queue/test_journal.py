"""The journal: kept and forgotten rows, and detected damage."""

import math
import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from conftest import COUNTERS, trajectory

from streamppo import durable
from streamppo.errors import JournalError
from streamppo.queue.rules.records import Changes, DeadLetter, EndedAttempt, Lease, PublishedVersion, SavedSlot
from streamppo.queue.store import database as sqlite
from streamppo.queue.store.journal import DEAD_LETTERS, FORMAT, Journal
from streamppo.types import Identity


def slot(number: int, ready: bool = True, attempt: int = 0) -> SavedSlot:
    identity = Identity(task="t", prompt=number, sample=0, attempt=attempt)
    made = msgspec.structs.replace(trajectory([5, 6, number], number=number), identity=identity)
    return SavedSlot(
        number=number,
        identity=identity,
        actor=None if ready else "rollout-0",
        call=0,
        failures=0,
        trajectory=made if ready else None,
    )


def filled(path: Path) -> Journal:
    """Eight slots, a lease, a version, a dead letter, two attempts that failed, over several transactions."""
    journal = Journal(path)
    journal.configure(0, b"{}")
    for number in range(8):
        journal.write(Changes(COUNTERS, (slot(number, ready=number % 3 > 0),)))
    journal.write(Changes(COUNTERS, leases=(Lease(version=0, min_version=-1, slots=((1, 0), (2, 0))),)), [made(0)])
    journal.write(Changes(COUNTERS, dead=(DeadLetter(trajectory=trajectory([1]), reason="no"),), ended=ENDED))
    return journal


def ended(number: int, reason: str, attempt: int = 0) -> EndedAttempt:
    identity = slot(number, attempt=attempt).identity
    return EndedAttempt(number=number, identity=identity, state="failed", reason=reason)


ENDED = (ended(4, "no"), ended(4, "no again", attempt=1))


def made(version: int) -> PublishedVersion:
    return PublishedVersion(version=version, digest=f"digest {version}", archived=None)


def everything(journal: Journal) -> object:
    return journal.read(), journal.versions(), journal.dead_letters(), journal.ended_attempts(), journal.configs()


def test_a_journal_reads_back_what_was_written(tmp_path: Path) -> None:
    before = everything(filled(tmp_path / "journal.sqlite"))
    again = Journal(tmp_path / "journal.sqlite")
    assert everything(again) == before
    saved = again.read()
    assert saved is not None
    assert saved.slots == tuple(slot(number, ready=number % 3 > 0) for number in range(8))
    assert [lease.slots for lease in saved.leases] == [((1, 0), (2, 0))]
    assert [letter.reason for letter in again.dead_letters()] == ["no"]
    assert again.ended_attempts() == list(ENDED)


def test_a_new_journal_is_empty(tmp_path: Path) -> None:
    assert Journal(tmp_path / "journal.sqlite").read() is None


def test_writing_the_same_again_changes_nothing(tmp_path: Path) -> None:
    journal = filled(tmp_path / "journal.sqlite")
    before = everything(journal)
    dead = (DeadLetter(trajectory=trajectory([1]), reason="other"),)
    journal.write(Changes(COUNTERS, (slot(4),), dead=dead, ended=(ended(4, "other"),)), [made(0)])
    assert everything(journal) == before


def test_the_digest_of_a_version_is_never_written_over(tmp_path: Path) -> None:
    journal = filled(tmp_path / "journal.sqlite")
    journal.write(Changes(COUNTERS), [PublishedVersion(version=0, digest="another", archived=None)])
    assert journal.versions()[0].digest == "digest 0"


def test_consumed_slots_and_their_lease_leave_the_journal(tmp_path: Path) -> None:
    journal = filled(tmp_path / "journal.sqlite")
    journal.write(Changes(msgspec.structs.replace(COUNTERS, version=1), removed=((1, 0), (2, 0))), [made(1)])
    saved = journal.read()
    assert saved is not None
    assert [slot.number for slot in saved.slots] == [0, 3, 4, 5, 6, 7]
    assert saved.leases == ()


def test_the_journal_stays_as_large_as_the_queue_however_long_the_run(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    sizes: list[int] = []
    for version in range(200):
        numbers = range(64 * version, 64 * version + 64)
        journal.write(Changes(COUNTERS, tuple(map(slot, numbers))))
        journal.write(Changes(COUNTERS, removed=tuple((number, 0) for number in numbers)))
        sizes.append(sum(path.stat().st_size for path in tmp_path.iterdir()))
    assert max(sizes[100:]) <= max(sizes[:100]) * 1.05


def test_only_the_newest_dead_letters_are_kept(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    letters = tuple(
        DeadLetter(trajectory=trajectory([1], number=number), reason=str(number)) for number in range(DEAD_LETTERS + 7)
    )
    journal.write(Changes(COUNTERS, dead=letters))
    kept = journal.dead_letters()
    assert (len(kept), kept[0].reason) == (DEAD_LETTERS, "7")


def test_a_zombie_queue_cannot_write(tmp_path: Path) -> None:
    zombie = filled(tmp_path / "journal.sqlite")
    living = Journal(tmp_path / "journal.sqlite")
    living.write(Changes(COUNTERS))
    with pytest.raises(JournalError, match="marked dead"):
        zombie.write(Changes(COUNTERS, (slot(7, ready=False, attempt=1),)))
    saved = living.read()
    assert saved is not None
    assert saved.slots[7] == slot(7)


def test_whoever_fences_reads_all_that_was_written_before_and_nobody_else_writes_after(tmp_path: Path) -> None:
    zombie = filled(tmp_path / "journal.sqlite")
    living, reader = Journal(tmp_path / "journal.sqlite"), Journal(tmp_path / "journal.sqlite")
    zombie.write(Changes(COUNTERS, (slot(8),)))
    living.fence()
    named: list[PublishedVersion] = []
    with pytest.raises(JournalError, match="marked dead"):
        zombie.write(Changes(COUNTERS, (slot(9),)), [made(1)], named.append)
    assert named == [], "a file of the archive got its name by a zombie"
    before = everything(reader)
    saved = living.read()
    assert saved is not None
    assert [slot.number for slot in saved.slots] == list(range(9))
    living.write(Changes(COUNTERS, (slot(9),)), [made(1)], named.append)
    assert named == [made(1)]
    assert everything(reader) != before


def test_a_version_whose_file_gets_no_name_is_not_recorded(tmp_path: Path) -> None:
    journal = filled(tmp_path / "journal.sqlite")
    before = everything(journal)

    def full(_: PublishedVersion) -> None:
        raise OSError("no room")

    with pytest.raises(JournalError, match="no room"):
        journal.write(Changes(COUNTERS, (slot(8),)), [made(1)], full)
    assert everything(journal) == before


def test_a_power_cut_after_any_of_the_first_transactions_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite flushes commits; of everything else the cut leaves the names and bytes of the last flush."""
    run = tmp_path / "run"
    run.mkdir()
    flushed: dict[int, bytes] = {}
    names: dict[str, int] = {}

    def flush(path: Path) -> None:
        if path.is_dir():
            names.update({child.name: child.stat().st_ino for child in path.iterdir()})
        else:
            flushed[path.stat().st_ino] = path.read_bytes()

    monkeypatch.setattr(durable, "flush", flush)
    journal = Journal(run / "journal.sqlite")
    for number in range(4):
        after = _copy(run, tmp_path / f"after {number}")
        for path in after.glob("journal.tip*"):
            path.unlink()
            if path.name in names:
                path.write_bytes(flushed.get(names[path.name], b""))
        saved = Journal(after / "journal.sqlite").read()
        assert (len(saved.slots) if saved else 0) == number
        journal.write(Changes(COUNTERS, (slot(number),)))


def test_a_transaction_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    journal = filled(tmp_path / "journal.sqlite")
    before = everything(journal)
    with pytest.raises(AttributeError):
        journal.write(Changes(COUNTERS, (slot(1, attempt=9),), dead=(None,)))  # pyright: ignore[reportArgumentType]
    assert everything(journal) == before


def damage(path: Path, generator: random.Random) -> str:
    """Flip one bit, or cut the file; return a description."""
    data = bytearray(path.read_bytes())
    if generator.random() < 0.2:
        cut = generator.randrange(len(data))
        path.write_bytes(data[:cut])
        return f"{path.name} cut at {cut}"
    at, bit = generator.randrange(len(data)), generator.randrange(8)
    data[at] ^= 1 << bit
    path.write_bytes(data)
    return f"{path.name} bit {bit} of byte {at}"


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "killed"])
def test_damage_is_named_or_hits_a_byte_that_carries_nothing(tmp_path: Path, closed: bool) -> None:
    """200 random flips and truncations over the files of a journal, at rest and as a kill leaves them."""
    generator, named = random.Random(7), 0
    whole = tmp_path / "whole"
    whole.mkdir()
    journal = filled(whole / "journal.sqlite")
    before = everything(journal)
    # A second connection keeps the log from being folded in when this one closes.
    copied = _copy(whole, tmp_path / "killed") if not closed else whole
    journal.close()
    for number in range(200):
        folder = _copy(copied, tmp_path / str(number))
        what = damage(generator.choice([path for path in folder.iterdir() if path.stat().st_size]), generator)
        try:
            assert everything(Journal(folder / "journal.sqlite")) == before, f"{what}: read back as something else"
        except JournalError as error:
            named += 1
            assert str(folder / "journal.") in str(error), what
        shutil.rmtree(folder)
    assert named > 100


def _copy(source: Path, target: Path) -> Path:
    # The first reader rebuilds the shared-memory index from the log.
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*-shm"))
    return target


def test_a_log_that_was_cut_is_noticed_even_where_sqlite_is_content(tmp_path: Path) -> None:
    journal = filled(tmp_path / "journal.sqlite")
    killed = _copy(tmp_path, tmp_path.with_name("killed"))
    log = killed / "journal.sqlite-wal"
    log.write_bytes(log.read_bytes()[:-100])
    with pytest.raises(JournalError, match=r"ends with transaction 10, and 11 were acknowledged"):
        Journal(killed / "journal.sqlite")
    journal.close()


def test_a_journal_of_another_format_is_refused_by_name_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    filled(path).close()
    for number, said in ((0, 1), (FORMAT - 1, FORMAT - 1), (FORMAT + 1, FORMAT + 1)):
        with sqlite3.connect(path) as database:
            database.execute(f"pragma user_version = {number}")
        database.close()
        with pytest.raises(
            JournalError,
            match=f"journal.sqlite: made by another .*: its format is {said}, and this version reads {FORMAT}",
        ):
            Journal(path)


def test_a_journal_from_before_formats_had_numbers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("create table slots (number integer primary key, task text, row blob, checksum int) strict")
    database.close()
    with pytest.raises(JournalError, match=f"its format is 1, and this version reads {FORMAT}"):
        Journal(path)


def test_the_rows_of_some_slots_are_found_by_their_numbers_alone(tmp_path: Path) -> None:
    journal = filled(tmp_path / "journal.sqlite")
    assert [slot.number for slot in journal.slots(range(2, 5))] == [2, 3, 4]
    assert journal.ended_attempts(range(4, 5)) == list(ENDED)
    assert journal.ended_attempts(range(4)) == journal.ended_attempts(range(5, 9)) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"nowhere/journal.sqlite: unable to open"):
        Journal(tmp_path / "nowhere" / "journal.sqlite")


def full_disk(journal: Journal) -> Callable[[], None]:
    """As if the disk ended here."""
    pages = journal._db.execute("pragma page_count").fetchone()[0]
    journal._db.execute(f"pragma max_page_count = {pages}")
    return lambda: journal._db.execute("pragma max_page_count = 1000000") and None


def test_a_full_disk_is_named_and_the_journal_goes_on_when_there_is_room(tmp_path: Path) -> None:
    journal = filled(tmp_path / "journal.sqlite")
    make_room = full_disk(journal)
    many = Changes(COUNTERS, tuple(slot(number) for number in range(8, 2000)))
    before = everything(journal)
    with pytest.raises(JournalError, match=r"journal.sqlite: database or disk is full"):
        journal.write(many)
    assert everything(journal) == before
    make_room()
    journal.write(many)
    saved = journal.read()
    assert saved is not None
    assert len(saved.slots) == 2000


def test_a_writer_waits_for_the_process_that_has_locked_the_journal_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = filled(tmp_path / "journal.sqlite")
    mine._db.execute("pragma busy_timeout = 1")
    other = sqlite3.connect(mine.path, isolation_level=None)
    other.execute("begin immediate")
    before = everything(mine)
    waiting = Waiting(other)
    monkeypatch.setattr(sqlite, "time", waiting)
    monkeypatch.setattr(sqlite, "log", waiting)
    with pytest.raises(JournalError, match=r"journal\.sqlite: (another )?process.* has locked it for 120 s$"):
        mine.write(Changes(COUNTERS, (slot(9),)))
    assert everything(mine) == before
    waiting.unlocked_after_s = waiting.now + 100
    mine.write(Changes(COUNTERS, (slot(9),)))
    assert slot(9) in mine.slots()


class Waiting:
    """Clock and log of a writer that looks at the lock every 10 s, until the other process is done."""

    def __init__(self, other: sqlite3.Connection) -> None:
        self._other = other
        self.now = 0.0
        self.unlocked_after_s = math.inf

    def monotonic(self) -> float:
        self.now += 10
        return self.now

    def info(self, message: str, *of: object) -> None:
        assert "journal.sqlite: the queue waits for " in message % of
        if self.now > self.unlocked_after_s:
            self._other.execute("commit")


def test_the_process_that_holds_the_lock_is_named_by_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "LOCKS", tmp_path / "locks")
    shared = tmp_path / "journal.sqlite-shm"
    shared.touch()
    (tmp_path / "locks").write_text(
        "1: FLOCK  ADVISORY  WRITE 11 fe:00:1 0 EOF\n"
        f"2: POSIX  ADVISORY  READ  12 fe:00:{shared.stat().st_ino} 124 124\n"
        f"3: POSIX  ADVISORY  WRITE 4711 fe:00:{shared.stat().st_ino} 120 120\n"
    )
    assert sqlite._holder(tmp_path / "journal.sqlite") == "process 4711"
    assert sqlite._holder(tmp_path / "other.sqlite") == "another process"


@pytest.mark.parametrize(
    "change",
    [
        "drop table leases; create view leases as with recursive n(x) as (select 1 union all select x + 1 from n) "
        "select x as version, x as row, x as checksum from n",
        "create trigger t after insert on slots begin delete from versions; end",
        "create table other (x)",
    ],
)
def test_a_journal_with_other_tables_views_or_triggers_is_refused(tmp_path: Path, change: str) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    journal.fence()
    journal.close()
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as db:
        db.executescript(change)
    with pytest.raises(JournalError, match="not a journal of streamppo"):
        Journal.open_run(tmp_path)


@pytest.mark.parametrize("row", [b"\xa1\xb4", b"\x81\xa1\xb4\xc0", b"\x91" * 100_000, b"\xc1"])
def test_a_row_of_a_stranger_with_its_checksum_is_told_in_a_sentence(tmp_path: Path, row: bytes) -> None:
    path = tmp_path / "journal.sqlite"
    filled(path).close()
    with closing(sqlite3.connect(path)) as database:
        database.execute("update slots set row = ?, checksum = ?", sqlite.checked_row(row))
        database.execute("update configs set row = ?, checksum = ?", sqlite.checked_row(row))
        database.commit()
    with closing(Journal(path, read_only=True)) as journal, pytest.raises(JournalError, match="cannot be read"):
        journal.read()


def test_the_journal_of_a_killed_run_on_a_disk_that_takes_no_file_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    killed = filled(tmp_path / "run" / "journal.sqlite")
    for name in ("journal.sqlite", "journal.sqlite-wal", "journal.tip"):
        shutil.copy(tmp_path / "run" / name, tmp_path / name)
    # SQLite cannot make its index here.
    (tmp_path / "journal.sqlite-shm").symlink_to(tmp_path / "nowhere" / "else")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(
        JournalError, match=r"journal\.sqlite: unable to open.*copy the run's folder to such a place, or resume it"
    ):
        Journal.open_run(tmp_path)
    (tmp_path / "journal.sqlite-shm").unlink()
    with closing(Journal.open_run(tmp_path)) as found:
        assert everything(found) == everything(killed)


def test_the_files_of_a_run_that_ended_are_whole_without_the_logs_of_its_killed_processes(tmp_path: Path) -> None:
    run, alone = tmp_path / "run", tmp_path / "alone"
    for folder in (run / "shards", alone):
        folder.mkdir(parents=True)
    (tmp_path / "0").mkdir()
    alive = [filled(tmp_path / "journal.sqlite"), filled(tmp_path / "0" / "0.sqlite")]
    # What a kill leaves: the files as they are while the queue has them open.
    for name in ("journal.sqlite", "journal.sqlite-wal", "journal.tip"):
        shutil.copy(tmp_path / name, run / name)
    for name in ("0.sqlite", "0.sqlite-wal"):
        shutil.copy(tmp_path / "0" / name, run / "shards" / name)
    sqlite.merge_logs(run)
    assert sorted(path.name for path in run.rglob("*.*")) == ["0.sqlite", "journal.sqlite", "journal.tip"]
    for name in ("journal.sqlite", "journal.tip"):
        shutil.copy(run / name, alone)
    with closing(Journal.open_run(alone)) as found:
        assert everything(found) == everything(alive[0])


def test_a_journal_that_was_copied_without_its_log_says_so(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    filled(tmp_path / "run" / "journal.sqlite")
    shutil.copy(tmp_path / "run" / "journal.sqlite", tmp_path)
    with pytest.raises(
        JournalError, match=r"empty: nothing was .*, or it was copied without its log journal\.sqlite-wal$"
    ):
        Journal.open_run(tmp_path)
