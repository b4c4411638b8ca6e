"""Files of a journal that something else moves, deletes or replaces while the queue has them open."""

import shutil
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from conftest import COUNTERS, trajectory
from test_journal import filled, slot

from streamppo.errors import JournalError
from streamppo.queue.rules.records import Changes
from streamppo.queue.store.journal import Journal
from streamppo.queue.store.trajectory_store import TrajectoryStore
from streamppo.types import Identity, encode

NAMES = ("journal.sqlite", "journal.sqlite-wal", "journal.sqlite-shm")


def copy_over(path: Path) -> None:
    """As rsync does: the copy is complete before it gets the name."""
    shutil.copy2(path, path.with_name("copy"))
    path.with_name("copy").rename(path)


def move_aside(path: Path) -> None:
    subprocess.run(["mv", path, path.with_name("elsewhere")], check=True)


CHANGES: list[Callable[[Path], None]] = [copy_over, move_aside, Path.unlink]
LOST = [NAMES[:1], NAMES[1:2], NAMES[:2], NAMES]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("lost", LOST)
def test_a_journal_that_is_changed_while_it_is_open_is_told_and_all_of_it_is_kept(
    tmp_path: Path, change: Callable[[Path], None], lost: tuple[str, ...]
) -> None:
    path = tmp_path / "journal.sqlite"
    journal = filled(path)
    expected, number = journal.read(), journal.number
    for name in lost:
        change(tmp_path / name)
    with pytest.raises(JournalError, match=rf"{path}.*was deleted or replaced .* all of it is in ") as told:
        journal.write(Changes(COUNTERS, (slot(20),)))
    # The process is killed; its user does what the sentence says.
    if "rename" in str(told.value):
        (tmp_path / "journal.sqlite.saved").rename(path)
        for name in NAMES[1:]:
            (tmp_path / name).unlink(missing_ok=True)
    else:
        assert lost == NAMES[1:2]
    with closing(Journal(path)) as resumed:
        assert (resumed.read(), resumed.number) == (expected, number)
        resumed.write(Changes(COUNTERS, (slot(20),)))


def test_a_folder_that_is_moved_and_copied_back_has_all_that_was_acknowledged_in_both_places(tmp_path: Path) -> None:
    run, old = tmp_path / "run", tmp_path / "old"
    run.mkdir()
    journal = filled(run / "journal.sqlite")
    expected = journal.read()
    run.rename(old)
    with pytest.raises(JournalError, match=r"run/journal\.sqlite: missing: the run's folder was moved or deleted"):
        journal.write(Changes(COUNTERS, (slot(20),)))
    shutil.copytree(old, run)
    with pytest.raises(JournalError, match="was deleted or replaced"):
        journal.write(Changes(COUNTERS, (slot(20),)))
    journal.close()
    for folder in (run, old):
        with closing(Journal(folder / "journal.sqlite")) as there:
            assert there.read() == expected


def test_the_journal_of_a_shard_is_watched_too(tmp_path: Path) -> None:
    store, one = TrajectoryStore(tmp_path, 0), trajectory([1, 2, 3])
    rows: dict[Identity, bytes] = {one.identity: encode(one)}
    store.write(rows)
    (tmp_path / "shards" / "0.sqlite").unlink()
    with pytest.raises(JournalError, match=r"0\.sqlite: was deleted or replaced .* in 0\.sqlite\.saved"):
        store.write(rows)


def test_readers_beside_a_writer_and_a_log_that_grows_and_shrinks_are_no_change(tmp_path: Path) -> None:
    journal = filled(tmp_path / "journal.sqlite")
    for number in range(20, 60):
        journal.write(Changes(COUNTERS, (slot(number),)))
        with closing(Journal(tmp_path / "journal.sqlite", read_only=True)) as reader:
            assert reader.number == journal.number
        if number % 5 == 0:
            journal._db.execute("pragma wal_checkpoint(truncate)")
            journal.back_up(tmp_path / f"copy-{number}")
