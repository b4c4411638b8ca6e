"""Makes the folder of a run of its copies at an address (standby.py): `resume` goes on with it. Pure: no Ray."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from uuid import uuid4

import msgspec

from streamppo import durable
from streamppo.errors import CheckpointError, JournalError
from streamppo.queue import continuation, copies, shards
from streamppo.queue.archive import Archive, checksums
from streamppo.queue.copies import ARCHIVE, JOURNAL, LIFE, LIVES, RUN, SHARDS, life_name
from streamppo.queue.journal import Journal
from streamppo.queue.standby import BASE, Configured, CopiedBodies, Entry, Forgot, Wrote, crc, name
from streamppo.types import Identity, Trajectory, decode
from streamppo.weights import store
from streamppo.weights.store import Store


def restore(address: str, run: Path) -> None:
    """Make the folder of a run, at `run`, of its copies at `address`; the copies of its shards, in its new life, too.

    Raises `CheckpointError` if `run` exists, or there are no copies, and `JournalError` if they lack something.
    """
    if run.exists():
        raise CheckpointError(f"{run}: exists; name a folder that does not")
    found = Store(address)
    lives = found.names(LIVES)
    if not lives:
        raise CheckpointError(f"{address}: no copy of a journal is there: only a run with queue.standby makes one")
    aside = durable.aside(run.with_name(f"{run.name}.{uuid4().hex}"))
    with durable.naming(run, CheckpointError):
        durable.folder(aside)
        for file in found.names(RUN):
            found.fetch(RUN, file, aside)
        durable.write(aside / store.ADDRESS, found.address.encode())
        durable.write(aside / LIFE, life_name(int(lives[-1]) + 1).encode())
    if found.names(store.MODEL):
        found.fetch_folder(store.MODEL, aside / store.MODEL)
    journal = _restored(found, f"{JOURNAL}/{lives[-1]}", aside)
    try:
        for version, files in checksums(journal.versions().values()).items():
            for path in Archive(aside / ARCHIVE, {}).paths(version, len(files)):
                found.fetch(ARCHIVE, path.name, aside / ARCHIVE)
        _restore_shards(found, f"{SHARDS}/{lives[-1]}", aside, journal)
    finally:
        journal.close()
    with durable.naming(run, CheckpointError):
        durable.rename(aside, run)


def _restored(found: Store, folder: str, run: Path) -> Journal:
    """Make the journal of a run of the newest copy that is whole, and of the transactions behind it."""
    names = found.names(folder)
    journal = _based(found, folder, [one for one in names if one.endswith(BASE)], run)
    behind = [one for one in names if not one.endswith(BASE) and one > name(journal.number)]
    for one, entry in _whole(found, folder, behind):
        if one != name(journal.number + 1):
            raise JournalError(f"{found.address}/{folder}: transaction {journal.number + 1} is missing")
        _repeat(journal, entry)
    return journal


def _whole(found: Store, folder: str, names: Sequence[str]) -> Iterator[tuple[str, Entry]]:
    """Read transactions; the last one may be cut off: its writer has died, and acknowledged it to nobody."""
    for one in names:
        row = copies.read(found, folder, one)
        if row is not None:
            yield one, msgspec.msgpack.decode(row, type=Entry)
        elif one != names[-1]:
            raise JournalError(f"{found.address}/{folder}/{one}: damaged, and transactions follow")


def _based(found: Store, folder: str, bases: Sequence[str], run: Path) -> Journal:
    for base in reversed(bases):
        number, checksum = base.removesuffix(BASE).split("-")
        found.fetch(folder, base, run)
        if f"{crc(run / base):08x}" == checksum:
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


def _restore_shards(found: Store, folder: str, run: Path, journal: Journal) -> None:
    """Make the journals of a run's shards. Raises `JournalError` if one lacks what the queue has a record of."""
    config = continuation.newest_config(journal)
    held = [slot.identity for slot in journal.slots() if slot.record]
    numbers = shards.numbers(config) if config else range(0)
    for number in numbers:
        # Written again as by the shard itself, it is copied for the life that begins.
        bodies = CopiedBodies(run, number, found.address)
        for trajectories in _stored(found, f"{folder}/{number}"):
            bodies.write(trajectories)
        bodies.read([one for one in held if one.prompt % len(numbers) == number])
        bodies.close()


def _stored(found: Store, folder: str) -> Iterator[dict[Identity, bytes]]:
    """The encoded trajectories of each file of a shard's; one that is cut off was acknowledged to nobody."""
    for one in found.names(folder):
        try:
            row = copies.read(found, folder, one)
        except CheckpointError:
            if one in found.names(folder):
                raise
            # A shard that lives has deleted it meanwhile, because nobody needs it.
            continue
        if row is not None:
            rows = [bytes(raw) for raw in decode(row, tuple[msgspec.Raw, ...])]
            yield {decode(row, Trajectory).identity: row for row in rows}
