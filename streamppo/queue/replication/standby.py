"""Copies of journal and archive at an fsspec address, so that a run survives the loss of its disk (`queue.standby`).

ADDRESS/journal/0000/000000000012-1a2b3c4d.TOKEN.base    the journal after transaction 12, as a file, with its CRC-32
ADDRESS/journal/0000/000000000013.TOKEN             the next transaction, after its CRC-32
ADDRESS/shards/0000/1/5e6f...TOKEN                  the trajectories in one transaction of shard 1, after their CRC-32
ADDRESS/archive/00000007.1a2b3c4d5e6f.zarr.zip      a file of the archive, unchanged; its SHA-256 is in the name
ADDRESS/run/0000/config.toml.000000000012-1a2b3c4d  another file that `resume` reads, as of transaction 12, with CRC-32
ADDRESS/lives/0000                                  marks the copy of a life as complete; the newest one counts

TOKEN identifies the claim (weights/owner.py) of the folder that wrote a file, so that a restore never mixes two copies
of a run's folder. The queue copies its journal and the archive; each shard copies its trajectories.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias
from uuid import uuid4
from zlib import crc32

import msgspec

from streamppo import durable
from streamppo.config import consent
from streamppo.config.sections import Config
from streamppo.errors import JournalError
from streamppo.queue.replication import copies
from streamppo.queue.replication.copies import ARCHIVE, JOURNAL, LIVES, RUN, SHARDS, ReplicaWriter
from streamppo.queue.rules.records import Changes, PublishedVersion
from streamppo.queue.store.archive import Archive, checksums
from streamppo.queue.store.journal import Journal
from streamppo.queue.store.trajectory_store import TrajectoryStore
from streamppo.types import Identity, WireStruct, encode
from streamppo.weights import owner, store

BASE = ".base"
DIGITS = 12
JOURNAL_COPY = re.compile(r"\d{12}(-[0-9a-f]{8})?(\.[0-9a-f]+)?(\.base)?")
RUN_FILES = ("config.toml", "inputs.json", "metrics.jsonl", consent.FILE)
"""The files of a run's folder, except journal and archive, that `resume` reads if they exist."""
BASE_EVERY = 1000
"""After this many transactions, a copy of the whole journal replaces the transactions' copies."""
TRAJECTORIES_PER_FILE = 64
"""The number of trajectories per file when a shard copies its whole journal."""


class WriteEntry(WireStruct, frozen=True, tag="wrote"):
    """The arguments of a call of `Journal.write`, which a restore repeats."""

    changes: Changes
    made: tuple[PublishedVersion, ...]


class ConfigureEntry(WireStruct, frozen=True, tag="configured"):
    """The arguments of a call of `Journal.configure`, which a restore repeats."""

    version: int
    config: bytes


class ForgetEntry(WireStruct, frozen=True, tag="forgot"):
    """The arguments of a call of `Journal.forget`, which a restore repeats."""

    before: int
    first_slot: int


Entry: TypeAlias = WriteEntry | ConfigureEntry | ForgetEntry


class CopiedJournal(Journal):
    """The run's journal, also copied to `address`; metrics.jsonl is copied at the start and every `every` versions."""

    def __init__(self, run: Path, address: str, every: int) -> None:
        super().__init__(run / "journal.sqlite")
        self._run, self._every, self._copies = run, every, ReplicaWriter(address)
        self._archive = Archive(run / ARCHIVE, {})
        self._life = copies.life(run)
        self._folder, self._token = f"{JOURNAL}/{self._life}", owner.token(run)
        self._entries = 0
        self._copied: dict[str, int] = {}

    def fence(self) -> None:
        """Fence out earlier writers, then complete their copies of journal, archive and run files."""
        super().fence()
        self._refuse_others()
        self._copy_base()
        self._copy_archive()
        self._copy_run()
        self._copies.put(LIVES, self._life, b"")

    def write(
        self,
        changes: Changes,
        versions: Sequence[PublishedVersion] = (),
        before_commit: Callable[[PublishedVersion], None] | None = None,
    ) -> None:
        super().write(changes, versions, before_commit)
        if versions:
            self._refuse_others()
        for path, name in self._archive_files(checksums(versions)):
            self._copy_file(ARCHIVE, path, name)
        if any(self._every and version.version % self._every == 0 for version in versions):
            self._copy_run()
        self._copy(WriteEntry(changes=changes, made=tuple(versions)))

    def configure(self, version: int, config: bytes) -> None:
        super().configure(version, config)
        self._copy_run()
        self._copy(ConfigureEntry(version=version, config=config))

    def forget(self, before: int, first_slot: int) -> None:
        dropped = [item for item in checksums(self.versions().values()).items() if item[0] < before]
        super().forget(before, first_slot)
        self._copy(ForgetEntry(before=before, first_slot=first_slot))
        for _, name in self._archive_files(dict(dropped)):
            self._copies.delete(ARCHIVE, name)

    def _copy(self, entry: Entry) -> None:
        self._copies.put(self._folder, f"{number_name(self._number)}{_token_suffix(self._token)}", encode(entry))
        self._entries += 1
        if self._entries >= BASE_EVERY:
            self._copy_base()

    def _copy_base(self) -> None:
        aside = durable.aside(self.path.with_name(f"{self.path.name}.copy"))
        with self._errors_named():
            aside.unlink(missing_ok=True)
            self.back_up(aside)
            base = f"{number_name(self._number)}-{file_crc(aside):08x}{_token_suffix(self._token)}{BASE}"
            self._copies.put_file(self._folder, aside, base)
            aside.unlink()
        self._entries = 0
        for old in filter(is_journal_copy, self._copies.names(self._folder)):
            if old != base and transaction_number(old) <= self._number:
                self._copies.delete(self._folder, old)

    def _copy_archive(self) -> None:
        """Copy the batches whose copies are missing or truncated, because an earlier writer died or made no copies."""
        sizes = self._copies.sizes(ARCHIVE)
        for path, name in self._archive_files(checksums(self.versions().values())):
            if path.is_file() and sizes.get(name) != path.stat().st_size:
                self._copy_file(ARCHIVE, path, name)

    def _archive_files(self, files: Mapping[int, tuple[str, ...]]) -> Iterator[tuple[Path, str]]:
        for version, sums in files.items():
            for path, checksum in zip(self._archive.paths(version, len(sums)), sums, strict=True):
                yield path, archive_copy_name(path, checksum)

    def _copy_run(self) -> None:
        folder = f"{RUN}/{self._life}"
        for file in RUN_FILES:
            with self._errors_named():
                content = durable.read(self._run / file) if (self._run / file).is_file() else b""
            if not content or self._copied.get(file) == crc32(content):
                continue
            name = f"{file}.{number_name(self._number)}-{crc32(content):08x}"
            self._copies.put_bytes(folder, name, content)
            self._copied[file] = crc32(content)
            for old in self._copies.names(folder):
                if old.startswith(f"{file}.") and old < name:
                    self._copies.delete(folder, old)

    def _copy_file(self, folder: str, path: Path, name: str) -> None:
        with self._errors_named():
            self._copies.put_file(folder, path, name)

    def _refuse_others(self) -> None:
        owners = owner.claims_among(self._copies.names(owner.OWNERS))
        lives = filter(copies.is_life, self._copies.names(LIVES))
        if max(lives, default="") > self._life or not owner.owns(owners, self._run):
            raise JournalError(
                f"{self.path}: the run continues in another folder, restored from {self._copies.address} or copied, "
                f"and ends in this one; {owner.separation_hint(self._run)}"
            )


class CopiedTrajectoryStore(TrajectoryStore):
    """The journal of shard `number` of `run`; trajectories are also copied to `address`, a file for a transaction."""

    def __init__(self, run: Path, number: int, address: str) -> None:
        super().__init__(run, number)
        self._copies, self._folder = ReplicaWriter(address), f"{SHARDS}/{copies.life(run)}/{number}"
        self._token = owner.token(run)
        self._needed: dict[str, set[Identity]] = {}
        before = self._copies.names(self._folder)
        for bodies in self.all(TRAJECTORIES_PER_FILE):
            self._copy(bodies)
        for old in before:
            self._copies.delete(self._folder, old)

    def write(self, encoded: Mapping[Identity, bytes]) -> None:
        super().write(encoded)
        self._copy(encoded)

    def drop(self, identities: Iterable[Identity], first_prompt: int) -> None:
        """Drop trajectories, and delete their copies; the next call repeats a deletion that fails."""
        dropped = set(identities)
        super().drop(dropped, first_prompt)
        with self._lock:
            for copy, needed in self._needed.items():
                self._needed[copy] = {identity for identity in needed - dropped if identity.prompt >= first_prompt}
            needless = [copy for copy, needed in self._needed.items() if not needed]
        for old in needless:
            if self._copies.delete(self._folder, old):
                del self._needed[old]

    def _copy(self, encoded: Mapping[Identity, bytes]) -> None:
        copy = f"{uuid4().hex}{_token_suffix(self._token)}"
        self._copies.put(self._folder, copy, encode(tuple(map(msgspec.Raw, encoded.values()))))
        with self._lock:
            self._needed[copy] = set(encoded)


def open_journal(run: Path, config: Config) -> Journal:
    """Open the journal of the run in `run` for its only writer; with `queue.standby`, it is a `CopiedJournal`."""
    if not config.queue.standby:
        return Journal(run / "journal.sqlite")
    return CopiedJournal(run, store.known_address(run), config.checkpoint.every)


def open_trajectory_store(run: Path, number: int, config: Config) -> TrajectoryStore:
    """Open the journal of shard `number` of the run in `run`; with `queue.standby`, it is a `CopiedTrajectoryStore`."""
    return (
        CopiedTrajectoryStore(run, number, store.known_address(run))
        if config.queue.standby
        else TrajectoryStore(run, number)
    )


def archive_copy_name(path: Path, checksum: str) -> str:
    """The name of an archived file's copy, with the checksum: a restored run may make another batch of a version."""
    stem, dot, end = path.name.partition(".zarr.")
    return f"{stem}.{checksum[:12]}{dot}{end}"


def claim_token(copy: str) -> str:
    """The token of the claim under which a copy was written; "" if the name has no token."""
    return copy.removesuffix(BASE).partition(".")[2]


def is_journal_copy(name: str) -> bool:
    """True for the name of a copy of a transaction or of a whole journal; False for foreign files."""
    return JOURNAL_COPY.fullmatch(name) is not None


def transaction_number(copy: str) -> int:
    """The number of a copy's transaction; for a whole journal, the number of its last transaction."""
    return int(copy[:DIGITS])


def number_name(number: int) -> str:
    """The number of a transaction as the beginning of a name, zero-padded so that names sort."""
    return f"{number:0{DIGITS}d}"


def _token_suffix(token: str) -> str:
    return f".{token}" if token else ""


def file_crc(path: Path) -> int:
    """The CRC-32 of a file."""
    checksum = 0
    with durable.reading(path) as file:
        while part := file.read(store.PART_BYTES):
            checksum = crc32(part, checksum)
    return checksum
