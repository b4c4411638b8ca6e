"""Restores the folder of a run from its copies at an address (standby.py), so that `resume` can continue it."""

import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
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
    RUN_FILES,
    ConfigureEntry,
    CopiedTrajectoryStore,
    Entry,
    ForgetEntry,
    WriteEntry,
    archive_copy_name,
    claim_token,
    file_crc,
    is_journal_copy,
    transaction_number,
)
from streamppo.queue.shards import shards
from streamppo.queue.store.archive import Archive, checksums
from streamppo.queue.store.journal import Journal
from streamppo.types import Identity, Trajectory, decode
from streamppo.weights import owner, store
from streamppo.weights.store import Store

log = logging.getLogger(__name__)


def restore(address: str, run: Path) -> None:
    """Restore a run to the new folder `run` from its copies at `address`. Raises `CheckpointError`, `JournalError`."""
    if run.exists():
        raise CheckpointError(f"{run}: exists; name a new folder")
    source = Store(address)
    if earlier := set(RUN_FILES).intersection(source.names(RUN)):
        raise CheckpointError(
            f"{source.address}/{RUN}/{min(earlier)}: a copy by an earlier version of streamppo: "
            "only that version can restore it"
        )
    lives = list(filter(copies.is_life, source.names(LIVES)))
    if not lives:
        raise CheckpointError(f"{address}: there is no copy of a journal: only a run with queue.standby makes one")
    with durable.naming(run, CheckpointError), durable.scratch_folder(run) as scratch:
        _fill(source, lives[-1], scratch)
        durable.rename(scratch, run)


def _fill(remote: Store, life: str, run: Path) -> None:
    owner.hand_over(remote, run)
    with durable.naming(run, CheckpointError):
        durable.write(run / LIFE, copies.next_life(life).encode())
    if remote.names(store.MODEL):
        remote.fetch_folder(store.MODEL, run / store.MODEL)
    journal, token = _restore_journal(remote, f"{JOURNAL}/{life}", run)
    with closing(journal):
        _restore_archive(remote, run / ARCHIVE, journal)
        _restore_shards(remote, f"{SHARDS}/{life}", run, journal, token)
        _restore_files(remote, f"{RUN}/{life}", run, journal)


def _restore_archive(remote: Store, archive: Path, journal: Journal) -> None:
    for version, files in checksums(journal.versions().values()).items():
        for path, checksum in zip(Archive(archive, {}).paths(version, len(files)), files, strict=True):
            name = archive_copy_name(path, checksum)
            remote.fetch(ARCHIVE, name, archive)
            with durable.naming(path, JournalError):
                durable.rename(archive / name, path)


def _restore_files(remote: Store, folder: str, run: Path, journal: Journal) -> None:
    """Restore the run's other files from their newest intact copies, or a lost configuration from the journal."""
    for file in RUN_FILES:
        if (content := _newest_intact(remote, folder, file)) is not None:
            with durable.naming(run / file, CheckpointError):
                durable.write(run / file, content)
    config = resume_checks.newest_config(journal)
    if not (run / configfile.CONFIG).is_file() and config is not None:
        log.info("%s/%s: no complete copy of %s: the journal's copy is used", remote.address, folder, configfile.CONFIG)
        configfile.save(config, run)


def _newest_intact(remote: Store, folder: str, file: str) -> bytes | None:
    copies_of_file = [name for name in remote.names(folder) if name.startswith(f"{file}.")]
    for name in sorted(copies_of_file, reverse=True):
        content = remote.read(folder, name)
        if name.endswith(f"-{crc32(content):08x}"):
            return content
    return None


def _restore_journal(remote: Store, folder: str, run: Path) -> tuple[Journal, str]:
    """Restore the journal from its newest intact copy and later transactions; return it and the token of its claim."""
    names = list(filter(is_journal_copy, remote.names(folder)))
    claims = owner.claims_among(remote.names(owner.OWNERS))
    bases = [name for name in names if name.endswith(BASE)]
    # `_restore_base` tries the last copy first, so copies under the newest claim of the address are sorted to the end.
    bases.sort(key=lambda base: claim_token(base) == owner.newest(claims))
    journal, token = _restore_base(remote, folder, bases, run)
    claimed = [name for name in names if not name.endswith(BASE) and claim_token(name) == token]
    later = [name for name in claimed if transaction_number(name) > journal.number]
    for name, entry in _read_transactions(remote, folder, later):
        if transaction_number(name) != journal.number + 1:
            raise JournalError(f"{remote.address}/{folder}: transaction {journal.number + 1} is missing")
        _repeat(journal, entry)
    return journal, token


def _read_transactions(remote: Store, folder: str, names: Sequence[str]) -> Iterator[tuple[str, Entry]]:
    """Read transactions. The last file may be truncated, if its writer died before acknowledging the transaction."""
    for name in names:
        row = copies.read_row(remote, folder, name)
        if row is not None:
            with _naming(remote, f"{folder}/{name}"):
                entry = msgspec.msgpack.decode(row, type=Entry)
            yield name, entry
        elif name != names[-1]:
            raise JournalError(f"{remote.address}/{folder}/{name}: damaged, and transactions follow")


def _restore_base(remote: Store, folder: str, bases: Sequence[str], run: Path) -> tuple[Journal, str]:
    for base in reversed(bases):
        checksum = base[DIGITS + 1 :].partition(".")[0]
        remote.fetch(folder, base, run)
        if f"{file_crc(run / base):08x}" == checksum:
            with durable.naming(run, JournalError):
                durable.rename(run / base, run / "journal.sqlite")
            return Journal.from_copy(run / "journal.sqlite", transaction_number(base)), claim_token(base)
        (run / base).unlink()
    raise JournalError(f"{remote.address}/{folder}: there is no complete copy of the journal")


def _repeat(journal: Journal, entry: Entry) -> None:
    match entry:
        case WriteEntry(changes=changes, made=versions):
            journal.write(changes, versions)
        case ConfigureEntry(version=version, config=config):
            journal.configure(version, config)
        case ForgetEntry(before=before, first_slot=first_slot):
            journal.forget(before, first_slot)


def _restore_shards(remote: Store, folder: str, run: Path, journal: Journal, token: str) -> None:
    config = resume_checks.newest_config(journal)
    identities = [slot.identity for slot in journal.slots() if slot.record]
    numbers = shards.numbers(config) if config else range(0)
    for number in numbers:
        # This store copies each trajectory again, to the folder of the run's new life.
        trajectory_store = CopiedTrajectoryStore(run, number, remote.address)
        for trajectories in _shard_trajectories(remote, f"{folder}/{number}", token):
            trajectory_store.write(trajectories)
        trajectory_store.read([identity for identity in identities if identity.prompt % len(numbers) == number])
        trajectory_store.close()


def _shard_trajectories(remote: Store, folder: str, token: str) -> Iterator[dict[Identity, bytes]]:
    """Yield the encoded trajectories of each file of a shard, except truncated files, which were not acknowledged."""
    # Files under the claim of `token` come first: a store keeps the first of two trajectories of an identity.
    for name in sorted(remote.names(folder), key=lambda name: claim_token(name) != token):
        try:
            row = copies.read_row(remote, folder, name)
        except CheckpointError:
            if name in remote.names(folder):
                raise
            # A running shard has deleted the file since it was listed, because no trajectory in it is needed any more.
            continue
        if row is not None:
            with _naming(remote, f"{folder}/{name}"):
                rows = [bytes(raw) for raw in decode(row, tuple[msgspec.Raw, ...])]
                encoded = {decode(row, Trajectory).identity: row for row in rows}
            yield encoded


@contextmanager
def _naming(remote: Store, name: str) -> Generator[None]:
    try:
        yield
    except UNREADABLE as error:
        raise JournalError(f"{remote.address}/{name}: not as this version of streamppo writes it: {error}") from error
