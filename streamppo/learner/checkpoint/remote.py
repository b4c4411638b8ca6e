"""Copies of a run's checkpoints at an fsspec address: an object store or a folder. Needs no torch.

checkpoint.remote/NAME-ID/00000050/     the files of a checkpoint, as on disk
runs/NAME/remote.address                contains NAME-ID, which is unique to the run, so that copies of two runs are
                                        never confused; a copied folder gets a new ID (weights/owner.py)

Every rank copies its files in a separate thread and does not wait for other ranks. A copy is whole when the manifest
and all its files have arrived, in any order. A file is verified when it is fetched.
"""

import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

import msgspec
from msgspec import structs

from streamppo.config.sections import Checkpoint, Config
from streamppo.errors import UNREADABLE, CheckpointError
from streamppo.learner.checkpoint import history, manifest
from streamppo.learner.checkpoint.history import History
from streamppo.learner.checkpoint.manifest import MANIFEST, Fetch, Manifest
from streamppo.weights import factory, owner
from streamppo.weights.store import Store, known_address

log = logging.getLogger(__name__)


def address_of(config: Config, folder: Path) -> str:
    """Claim and return the address for copies of the run in `folder`; "" if `checkpoint.remote` is not set.

    A run without an address gets a new one, and so does a copy of a run's folder.
    """
    if not (under := config.checkpoint.remote.rstrip("/")):
        return ""
    address = known_address(folder)
    if reason := belongs_to(config, folder):
        log.info("%s: %s", folder, reason)
    if reason or not address.startswith(f"{under}/"):
        address = f"{under}/{folder.name}-{uuid4().hex[:8]}"
        owner.write(folder, address)
        log.info("copies are at %s", address)
    try:
        owner.claim(Store(address), folder)
    except CheckpointError as error:
        log.info("%s was not claimed: %s", address, error)
    return address


def belongs_to(config: Config, folder: Path) -> str:
    """The reason why the address of the run in `folder` belongs to another folder; "" if not, or without an answer.

    The address also belongs to another folder if it has checkpoints that the journal lacks, as after `folder` was
    restored from a backup. Raises `JournalError` for a journal that cannot be read.
    """
    if not (address := known_address(folder)) or not address.startswith(f"{config.checkpoint.remote.rstrip('/')}/"):
        return ""
    try:
        copies = CheckpointStore(address)
        if reason := owner.other_owner(copies, folder):
            return reason
        foreign = set(copies.versions()) - set(copies.versions(history.read_history(folder, config)))
    except CheckpointError as error:
        log.info("%s", error)
        return ""
    return f"{address} has checkpoints of another run, of version {max(foreign)}" if foreign else ""


def refuse_copy(config: Config, folder: Path) -> None:
    """Raise `CheckpointError` if nodes would read from an address that does not belong to the run's `folder`."""
    if config.cluster.own_disks and config.checkpoint.remote and (reason := belongs_to(config, folder)):
        raise CheckpointError(f"{folder}: {reason}; {owner.separation_hint(folder)}")


def config_for_actors(config: Config, folder: Path) -> Config:
    """The configuration for ranks and rollout actors, with the run's address and the run's folder of weights."""
    return _with_weight_folder(config, folder, address_of(config, folder))


def at_rest(config: Config, folder: Path) -> Config:
    """The configuration for ranks that publish nothing, as in a replay: it claims no address and needs no folder."""
    return factory.without_transport(
        _with_weight_folder(config, folder, known_address(folder) if config.checkpoint.remote else "")
    )


def _with_weight_folder(config: Config, folder: Path, address: str) -> Config:
    checkpoint = structs.replace(config.checkpoint, remote=address)
    return factory.with_run_folder(structs.replace(config, checkpoint=checkpoint), folder)


def newest(folder: Path, address: str, at_most: float, past: History | None = None) -> Path | None:
    """The path under `folder` of the newest checkpoint up to version `at_most`, which may exist only at `address`.

    A checkpoint with a damaged manifest or outside of the run's `past` is moved aside. Raises `CheckpointError` if
    `folder` has no checkpoint and the address does not answer.
    """
    local = manifest.newest(folder, at_most, past)
    try:
        whole = CheckpointStore(address).versions(past) if address else []
    except CheckpointError as error:
        if local is None:
            raise
        log.info("continuing from %s: %s", local.name, error)
        return local
    versions = [version for version in whole if version <= at_most]
    if not versions or (local is not None and int(local.name) >= versions[-1]):
        return local
    return folder / f"{versions[-1]:08d}"


def fetcher(run: Path) -> Fetch | None:
    """The function that fetches a checkpoint's files from the address of `run`; None if the run has no address."""
    address = known_address(run)
    return CheckpointStore(address).fetch if address else None


class CheckpointStore(Store):
    """The copies of a run's checkpoints. All methods raise the errors of `Store`'s methods."""

    def versions(self, past: History | None = None) -> list[int]:
        """The versions of all whole copies that belong to the run's `past`, in ascending order."""
        return [version for version in self._versions() if self._is_whole(version, past)]

    def fetch_checkpoint(self, path: Path) -> None:
        """Fetch all files of the checkpoint `path.name` into `path`, which must not exist."""
        self.fetch_folder(path.name, path)

    def drop(self, config: Checkpoint) -> None:
        """Delete whole copies that `config` does not keep, and partial copies older than the newest whole copy."""
        listed, complete = self._versions(), self.versions()
        keep = {*complete[-config.keep :]}
        keep |= {number for number in complete if config.keep_every and number % config.keep_every == 0}
        for version in listed:
            if version not in keep and complete and version < complete[-1]:
                self.delete(f"{version:08d}")

    def _versions(self) -> list[int]:
        return sorted(int(name) for name in self.names() if name.isdigit())

    def _is_whole(self, version: int, past: History | None) -> bool:
        names = set(self.names(f"{version:08d}"))
        if MANIFEST not in names:
            return False
        try:
            stored = msgspec.json.decode(self.read(f"{version:08d}", MANIFEST), type=Manifest)
        except UNREADABLE:
            return False
        if past is not None and (reason := past.refusal(version, stored.state.digest)):
            log.info("%s/%08d: %s", self.address, version, reason)
            return False
        files = stored.files
        return names.issuperset(name for listed in (files.shared, *files.ranks) for name in listed)


class Copier:
    """Copies one rank's checkpoint files to the address in a thread, one checkpoint at a time."""

    def __init__(self, config: Checkpoint) -> None:
        self.remote = CheckpointStore(config.remote) if config.remote else None
        self._config = config
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="copy")
        self._under_way: Future[None] | None = None

    @property
    def is_busy(self) -> bool:
        return self._under_way is not None and not self._under_way.done()

    def start(self, path: Path, files: Mapping[str, BinaryIO], *, prunes: bool) -> None:
        """Copy the open `files` of the checkpoint at `path`, then close them; if `prunes`, also delete old copies."""
        if self.remote is not None:
            self._under_way = self._thread.submit(self._copy, self.remote, path.name, files, prunes=prunes)

    def wait(self) -> None:
        if self._under_way is not None:
            self._under_way.result()

    def _copy(self, remote: CheckpointStore, version: str, files: Mapping[str, BinaryIO], *, prunes: bool) -> None:
        try:
            remote.put(version, files)
            if prunes:
                remote.drop(self._config)
        except CheckpointError as error:
            # The checkpoint is on disk, so a store that does not answer must not end the run.
            log.info("checkpoint %s was not copied: %s", version, error)
        finally:
            for file in files.values():
                file.close()
