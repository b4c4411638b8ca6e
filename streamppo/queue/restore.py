"""Makes the folder of a run of its copies at an address (standby.py): `resume` goes on with it."""

import logging
import shutil
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4
from zlib import crc32

import msgspec

from streamppo import durable
from streamppo.config import file as configfile
from streamppo.errors import UNREADABLE, CheckpointError, JournalError
from streamppo.queue import resume_checks
from streamppo.queue.replication import copies
from streamppo.queue.replication.copies import ARCHIVE, JOURNAL, LIFE, LIVES, RUN, SHARDS
from streamppo.queue.replication.standby import (
    BASE,
    DIGITS,
    FILES,
    ConfigureEntry,
    CopiedBodies,
    Entry,
    ForgetEntry,
    WriteEntry,
    copy_name,
    crc,
    is_of_journal,
    number_of,
    token_of,
)
from streamppo.queue.shards import shards
from streamppo.queue.store.archive import Archive, checksums
from streamppo.queue.store.journal import Journal
from streamppo.types import Identity, Trajectory, decode
from streamppo.weights import owner, store
from streamppo.weights.store import Store

log = logging.getLogger(__name__)


def restore(address: str, run: Path) -> None:
    """Make the folder of a run, at `run`, of its copies at `address`; the copies of its shards, in its new life, too.

    Raises `CheckpointError` if `run` exists, or there are no copies, and `JournalError` if they lack something.
    """
    if run.exists():
        raise CheckpointError(f"{run}: exists; name a folder that does not")
    found = Store(address)
    if earlier := set(FILES).intersection(found.names(RUN)):
        raise CheckpointError(
            f"{found.address}/{RUN}/{min(earlier)}: a copy by an earlier version of streamppo, which alone can make a "
            "run's folder of it"
        )
    lives = list(filter(copies.is_life, found.names(LIVES)))
    if not lives:
        raise CheckpointError(f"{address}: no copy of a journal is there: only a run with queue.standby makes one")
    aside = durable.aside(run.with_name(f"{run.name}.{uuid4().hex}"))
    try:
        with durable.naming(run, CheckpointError):
            durable.folder(aside)
        _fill(found, lives[-1], aside)
        with durable.naming(run, CheckpointError):
            durable.rename(aside, run)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _fill(found: Store, life: str, run: Path) -> None:
    """Make all files of a run in the folder `run` of the copies of a `life`."""
    owner.hand_over(found, run)
    with durable.naming(run, CheckpointError):
        durable.write(run / LIFE, copies.next_life(life).encode())
    if found.names(store.MODEL):
        found.fetch_folder(store.MODEL, run / store.MODEL)
    journal, token = _restore_journal(found, f"{JOURNAL}/{life}", run)
    try:
        _restore_archive(found, run / ARCHIVE, journal)
        _restore_shards(found, f"{SHARDS}/{life}", run, journal, token)
        _restore_files(found, f"{RUN}/{life}", run, journal)
    finally:
        journal.close()


def _restore_archive(found: Store, archive: Path, journal: Journal) -> None:
    """Fetch the file of every batch, by the name of its copy."""
    for version, files in checksums(journal.versions().values()).items():
        for path, checksum in zip(Archive(archive, {}).paths(version, len(files)), files, strict=True):
            name = copy_name(path, checksum)
            found.fetch(ARCHIVE, name, archive)
            with durable.naming(path, JournalError):
                durable.rename(archive / name, path)


def _restore_files(found: Store, folder: str, run: Path, journal: Journal) -> None:
    """Make what else a resume reads, as the newest whole copies have it.

    A configuration of which there is none is the newest one of the journal.
    """
    for file in FILES:
        if (content := _newest_whole(found, folder, file)) is not None:
            with durable.naming(run / file, CheckpointError):
                durable.write(run / file, content)
    config = resume_checks.newest_config(journal)
    if not (run / configfile.CONFIG).is_file() and config is not None:
        log.info("%s/%s: no whole copy of %s: that of the journal is taken", found.address, folder, configfile.CONFIG)
        configfile.save(config, run)


def _newest_whole(found: Store, folder: str, file: str) -> bytes | None:
    named = [name for name in found.names(folder) if name.startswith(f"{file}.")]
    for name in sorted(named, reverse=True):
        content = found.read(folder, name)
        if name.endswith(f"-{crc32(content):08x}"):
            return content
    return None


def _restore_journal(found: Store, folder: str, run: Path) -> tuple[Journal, str]:
    """Make the journal of a run of the newest copy that is whole, and of the transactions behind it.

    Returns the token of the claim under which they were written too.
    """
    names, claims = list(filter(is_of_journal, found.names(folder))), found.names(owner.OWNERS)
    bases = [one for one in names if one.endswith(BASE)]
    # Those of the folder that claimed the address last; of the one before if it has copied nothing yet.
    bases.sort(key=lambda base: token_of(base) == owner.newest(claims))
    journal, token = _restore_base(found, folder, bases, run)
    by_it = [one for one in names if not one.endswith(BASE) and token_of(one) == token]
    for one, entry in _read_transactions(found, folder, [one for one in by_it if number_of(one) > journal.number]):
        if number_of(one) != journal.number + 1:
            raise JournalError(f"{found.address}/{folder}: transaction {journal.number + 1} is missing")
        _repeat(journal, entry)
    return journal, token


def _read_transactions(found: Store, folder: str, names: Sequence[str]) -> Iterator[tuple[str, Entry]]:
    """Read transactions; the last one may be cut off: its writer has died, and acknowledged it to nobody."""
    for one in names:
        row = copies.read(found, folder, one)
        if row is not None:
            with _naming(found, f"{folder}/{one}"):
                entry = msgspec.msgpack.decode(row, type=Entry)
            yield one, entry
        elif one != names[-1]:
            raise JournalError(f"{found.address}/{folder}/{one}: damaged, and transactions follow")


def _restore_base(found: Store, folder: str, bases: Sequence[str], run: Path) -> tuple[Journal, str]:
    """The journal of the last of `bases` that is whole, and the token of the claim under which it was written."""
    for base in reversed(bases):
        checksum = base[DIGITS + 1 :].partition(".")[0]
        found.fetch(folder, base, run)
        if f"{crc(run / base):08x}" == checksum:
            with durable.naming(run, JournalError):
                durable.rename(run / base, run / "journal.sqlite")
            return Journal.from_copy(run / "journal.sqlite", number_of(base)), token_of(base)
        (run / base).unlink()
    raise JournalError(f"{found.address}/{folder}: no whole copy of the journal is there")


def _repeat(journal: Journal, entry: Entry) -> None:
    match entry:
        case WriteEntry(changes=changes, made=made):
            journal.write(changes, made)
        case ConfigureEntry(version=version, config=config):
            journal.configure(version, config)
        case ForgetEntry(before=before, first_slot=first_slot):
            journal.forget(before, first_slot)


def _restore_shards(found: Store, folder: str, run: Path, journal: Journal, token: str) -> None:
    """Make the journals of a run's shards. Raises `JournalError` if one lacks what the queue has a record of."""
    config = resume_checks.newest_config(journal)
    held = [slot.identity for slot in journal.slots() if slot.record]
    numbers = shards.numbers(config) if config else range(0)
    for number in numbers:
        # Written again as by the shard itself, it is copied for the life that begins.
        bodies = CopiedBodies(run, number, found.address)
        for trajectories in _shard_trajectories(found, f"{folder}/{number}", token):
            bodies.write(trajectories)
        bodies.read([one for one in held if one.prompt % len(numbers) == number])
        bodies.close()


def _shard_trajectories(found: Store, folder: str, token: str) -> Iterator[dict[Identity, bytes]]:
    """The encoded trajectories of each file of a shard's; one that is cut off was acknowledged to nobody.

    Files under the claim of `token` come first, and count: another folder may have gone on with the address.
    """
    for one in sorted(found.names(folder), key=lambda one: token_of(one) != token):
        try:
            row = copies.read(found, folder, one)
        except CheckpointError:
            if one in found.names(folder):
                raise
            # A shard that lives has deleted it meanwhile, because nobody needs it.
            continue
        if row is not None:
            with _naming(found, f"{folder}/{one}"):
                rows = [bytes(raw) for raw in decode(row, tuple[msgspec.Raw, ...])]
                encoded = {decode(row, Trajectory).identity: row for row in rows}
            yield encoded


@contextmanager
def _naming(found: Store, name: str) -> Generator[None]:
    """Raise `JournalError` for a copy that is whole and not as streamppo writes it."""
    try:
        yield
    except UNREADABLE as error:
        raise JournalError(f"{found.address}/{name}: not as this version of streamppo writes it: {error}") from error
