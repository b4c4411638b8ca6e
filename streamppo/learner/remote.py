"""Copies of a run's checkpoints at an address of fsspec's: an object store, or a folder. Needs no torch.

checkpoint.remote/NAME-ID/00000050/     the files of a checkpoint, as they are on disks
runs/NAME/remote.address                NAME-ID is the run's own, so that none of another run's is taken for one of it;
                                        a copy of the folder gets another one (weights/owner.py)

Every rank copies the files that it wrote, in a thread of its own, and waits for nobody. A copy is whole when its
manifest and all files that this names are there, in whichever order they came; a file is verified when it is fetched.
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
from streamppo.errors import CheckpointError
from streamppo.learner import history, manifest
from streamppo.learner.history import History
from streamppo.learner.manifest import MANIFEST, Manifest
from streamppo.weights import owner, ways
from streamppo.weights.store import Store, known

log = logging.getLogger(__name__)


def address_of(config: Config, folder: Path) -> str:
    """The address of the copies of the run in `folder`, which claims it; empty without any.

    It is a new one if the run has none there, or if its address belongs to another folder: this one is a copy.
    """
    if not (under := config.checkpoint.remote.rstrip("/")):
        return ""
    found = known(folder)
    if reason := belongs_to(config, folder):
        log.info("%s: %s", folder, reason)
    if reason or not found.startswith(f"{under}/"):
        found = f"{under}/{folder.name}-{uuid4().hex[:8]}"
        owner.write(folder, found)
        log.info("copies are at %s", found)
    try:
        owner.claim(Store(found), folder)
    except CheckpointError as error:
        log.info("%s was not claimed: %s", found, error)
    return found


def belongs_to(config: Config, folder: Path) -> str:
    """Say which other folder the address of the run in `folder` belongs to; empty if to this one, or if it is away.

    It belongs to another one, too, if checkpoints are there that the journal does not know: a folder that was put back
    is a copy of what it was. Raises `JournalError` for a journal that cannot be read.
    """
    if not (address := known(folder)) or not address.startswith(f"{config.checkpoint.remote.rstrip('/')}/"):
        return ""
    try:
        there = Remote(address)
        if reason := owner.of_another(there, folder):
            return reason
        others = set(there.versions()) - set(there.versions(history.of_run(folder, config)))
    except CheckpointError as error:
        log.info("%s", error)
        return ""
    return f"{address} has checkpoints of another run, of version {max(others)}" if others else ""


def refuse_copy(config: Config, folder: Path) -> None:
    """Raise `CheckpointError` if nodes read from an address that belongs to another folder than that of the run."""
    if config.cluster.own_disks and config.checkpoint.remote and (reason := belongs_to(config, folder)):
        raise CheckpointError(f"{folder}: {reason}; {owner.forget(folder)}")


def told(config: Config, folder: Path) -> Config:
    """The configuration as ranks and rollout actors get it: with the run's own address, and folder of weights."""
    return _placed(config, folder, address_of(config, folder))


def at_rest(config: Config, folder: Path) -> Config:
    """The same of ranks whose versions go nowhere, as in a replay: nothing is claimed, and nothing has to be there."""
    return ways.at_rest(_placed(config, folder, known(folder) if config.checkpoint.remote else ""))


def _placed(config: Config, folder: Path, address: str) -> Config:
    checkpoint = structs.replace(config.checkpoint, remote=address)
    return ways.placed(structs.replace(config, checkpoint=checkpoint), folder)


def newest(folder: Path, address: str, at_most: float, past: History | None = None) -> Path | None:
    """The newest checkpoint of versions up to `at_most`, under `folder` or else at the address, as its path there.

    One with a damaged manifest, or not of the run's `past`, is moved out of the way. Raises `CheckpointError` if there
    is none here, and the address does not answer.
    """
    here = manifest.newest(folder, at_most, past)
    try:
        versions = [one for one in Remote(address).versions(past) if one <= at_most] if address else []
    except CheckpointError as error:
        if here is None:
            raise
        log.info("going on from %s: %s", here.name, error)
        return here
    if not versions or (here is not None and int(here.name) >= versions[-1]):
        return here
    return folder / f"{versions[-1]:08d}"


class Remote(Store):
    """The copies of a run's checkpoints. Every method raises as those of `Store` do."""

    def versions(self, past: History | None = None) -> list[int]:
        """The versions of the copies that are whole, and of the run's `past`, in order."""
        return [version for version in self._listed() if self._is_whole(version, past)]

    def fetch_checkpoint(self, path: Path) -> None:
        """Fetch all files of the checkpoint that is to be at `path`, and is not there."""
        self.fetch_folder(path.name, path)

    def drop(self, config: Checkpoint) -> None:
        """Delete whole copies that are kept no longer, and parts of copies that are older than a whole one."""
        listed, whole = self._listed(), self.versions()
        kept = {*whole[-config.keep :], *(one for one in whole if config.keep_every and one % config.keep_every == 0)}
        for version in listed:
            if version not in kept and whole and version < whole[-1]:
                self.delete(f"{version:08d}")

    # --- the pieces ------------------------------------------------------------------------------------------

    def _listed(self) -> list[int]:
        """The versions of which any file is there."""
        return sorted(int(name) for name in self.names() if name.isdigit())

    def _is_whole(self, version: int, past: History | None) -> bool:
        names = set(self.names(f"{version:08d}"))
        if MANIFEST not in names:
            return False
        try:
            found = msgspec.json.decode(self.read(f"{version:08d}", MANIFEST), type=Manifest)
        except (msgspec.MsgspecError, RecursionError):
            return False
        if past is not None and (reason := past.refusal(version, found.state.digest)):
            log.info("%s/%08d: %s", self.address, version, reason)
            return False
        files = found.files
        return names.issuperset(name for some in (files.shared, *files.ranks) for name in some)


class Copier:
    """Copies one rank's files of checkpoints to the address, one checkpoint at a time, beside everything else."""

    def __init__(self, config: Checkpoint) -> None:
        self.remote = Remote(config.remote) if config.remote else None
        self._config = config
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="copy")
        self._under_way: Future[None] | None = None

    @property
    def is_busy(self) -> bool:
        """True while files are on their way."""
        return self._under_way is not None and not self._under_way.done()

    def start(self, path: Path, files: Mapping[str, BinaryIO], *, prunes: bool) -> None:
        """Copy open `files` of the checkpoint at `path`, and close them; `prunes` deletes copies that are not kept."""
        if self.remote is not None:
            self._under_way = self._thread.submit(self._copy, self.remote, path.name, files, prunes=prunes)

    def wait(self) -> None:
        """Wait until nothing is on its way."""
        if self._under_way is not None:
            self._under_way.result()

    def _copy(self, remote: Remote, version: str, files: Mapping[str, BinaryIO], *, prunes: bool) -> None:
        try:
            remote.put(version, files)
            if prunes:
                remote.drop(self._config)
        except CheckpointError as error:
            # A run does not end because a store does not answer: its own disk has the checkpoint.
            log.info("checkpoint %s was not copied: %s", version, error)
        finally:
            for file in files.values():
                file.close()
