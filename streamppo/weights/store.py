"""Files at an fsspec address: an object store (s3://, gs://, ...) or a folder (file://).

A run with an address stores copies of its checkpoints there and, with `cluster.own_disks`, also the initial model that
it created and the trained model. This module imports neither torch nor Ray.
"""

import io
import logging
import shutil
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4
from zlib import crc32

import fsspec
from fsspec.implementations.local import LocalFileSystem

from streamppo import durable
from streamppo.config.model import BUILTIN
from streamppo.config.sections import Config
from streamppo.errors import CheckpointError

PAUSES_S = (1.0, 10.0, 60.0)
"""Seconds to wait before each retry of a refused write. After the last retry the error is raised."""
PART_BYTES = 2**24
CHAIN = "::"
MODEL, FINAL = "model", "final"
"""Folders at a run's address: the initial model that the run created, and the trained model."""
ADDRESS = "remote.address"
"""The file in a run's folder that holds the address of its copies."""
log = logging.getLogger(__name__)


def with_crc(row: bytes) -> bytes:
    """Return the content of a file that holds `row`. The CRC-32 before the row detects a half-written file."""
    return crc32(row).to_bytes(4, "little") + row


def row_of(content: bytes) -> bytes | None:
    """Return the row in a file's content; None if the file is truncated or damaged."""
    return content[4:] if crc32(content[4:]).to_bytes(4, "little") == content[:4] else None


class Store:
    """The files at `address`. If the address refuses, each method raises `CheckpointError`, which names the address."""

    def __init__(self, address: str) -> None:
        self.address = address
        # fsspec chains file systems by "::". An untrusted address could name the file system that renders templates.
        if CHAIN in address:
            raise CheckpointError(f"{address}: names a file system inside another one: give the store's address")
        with self.naming_errors():
            self._files, self._root = fsspec.url_to_fs(address)

    def put(self, folder: str, files: Mapping[str, BinaryIO]) -> None:
        """Copy open files, in order, to `folder` at the address under these names, with the retries of `PAUSES_S`."""
        for name, file in files.items():
            self._put_with_retries(f"{self._root}/{folder}", name, file)

    def put_folder(self, folder: str, path: Path) -> None:
        """Copy the folder at `path`, which has no subfolders, to `folder` at the address."""
        for source in sorted(path.iterdir()):
            with durable.reading(source) as file:
                self.put(folder, {source.name: file})

    def check_access(self) -> None:
        """Test the address: write a file, read it and delete it."""
        folder = f"check-{uuid4().hex}"
        self._put(f"{self._root}/{folder}", "written", io.BytesIO(b"written"))
        self.read(folder, "written")
        self.delete(folder)

    def fetch(self, folder: str, name: str, to: Path) -> None:
        aside = to / f"{name}.{uuid4().hex}{durable.ASIDE}"
        source = f"{self._root}/{folder}/{name}"
        with self.naming_errors(), self._reading(source) as remote_file, durable.naming(to, CheckpointError):
            to.mkdir(parents=True, exist_ok=True)
            with aside.open("wb") as local_file:
                shutil.copyfileobj(remote_file, local_file, PART_BYTES)
            durable.flush(aside)
            durable.rename(aside, to / name)

    def fetch_folder(self, folder: str, path: Path) -> None:
        """Fetch all files of `folder` to a folder at `path`, which appears when it is complete."""
        aside = path.with_name(f"{path.name}.{uuid4().hex}{durable.ASIDE}")
        for name in self.names(folder):
            self.fetch(folder, name, aside)
        with durable.naming(path, CheckpointError):
            if path.exists():
                shutil.rmtree(aside)
            else:
                durable.rename(aside, path)

    def names(self, folder: str = "") -> list[str]:
        """Return the names of the files in a folder at the address; [] if it does not exist."""
        place = f"{self._root}/{folder}".rstrip("/")
        names = sorted(path.rstrip("/").rpartition("/")[2] for path in self._list(place, detail=False))
        # Writers that died leave temporary files.
        return [name for name in names if not name.endswith(durable.ASIDE)]

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the size in bytes of each file in a folder at the address; {} if it does not exist."""
        entries = self._list(f"{self._root}/{folder}", detail=True)
        return {entry["name"].rpartition("/")[2]: int(entry["size"] or 0) for entry in entries}

    def _list(self, path: str, *, detail: bool) -> Sequence[Any]:
        with self.naming_errors():
            self._files.invalidate_cache()
            try:
                return self._files.ls(path, detail=detail)
            except FileNotFoundError:
                return []

    def read(self, folder: str, name: str) -> bytes:
        with self.naming_errors(), self._reading(f"{self._root}/{folder}/{name}") as file:
            return file.read()

    def _reading(self, path: str) -> AbstractContextManager[BinaryIO]:
        """Open a file at the address. Another user may own the folder, and may have put a pipe in place of the file."""
        if isinstance(self._files, LocalFileSystem):
            return durable.reading(Path(path))
        return self._files.open(path, "rb")

    def delete(self, folder: str) -> None:
        with self.naming_errors():
            self._files.rm(f"{self._root}/{folder}", recursive=True)

    @contextmanager
    def naming_errors(self) -> Generator[None]:
        """Raise `CheckpointError` with the address for every error of the block."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            # Each kind of store raises its own exceptions.
            raise CheckpointError(f"{self.address}: {type(error).__name__}: {error}") from error

    def _put_with_retries(self, folder: str, name: str, file: BinaryIO) -> None:
        for pause_s in PAUSES_S:
            try:
                return self._put(folder, name, file)
            except CheckpointError as error:
                log.info("%s; trying again", error)
                time.sleep(pause_s)
        return self._put(folder, name, file)

    def _put(self, folder: str, name: str, file: BinaryIO) -> None:
        file.seek(0)
        with self.naming_errors():
            self._files.makedirs(folder, exist_ok=True)
            # An object store makes a file visible when it is complete. A folder shows half-written files.
            is_folder = isinstance(self._files, LocalFileSystem)
            path = Path(folder) / name
            aside = f"{path}.{uuid4().hex}{durable.ASIDE}" if is_folder else f"{folder}/{name}"
            with self._files.open(aside, "wb") as remote_file:
                shutil.copyfileobj(file, remote_file, PART_BYTES)
            if is_folder:
                durable.flush(Path(aside))
                durable.rename(Path(aside), path)


def known_address(folder: Path) -> str:
    """Return the address where the run in `folder` stores its copies; "" if the run has no address."""
    file = folder / ADDRESS
    return durable.read(file).decode().partition("\n")[0].strip() if file.is_file() else ""


def bring_model(config: Config, path: str) -> None:
    """Fetch the initial model, if the run created it and this node lacks it, from the run's address to `path`."""
    if config.cluster.own_disks and config.model.path == BUILTIN and not Path(path).exists():
        store = Store(config.checkpoint.remote)
        if store.names(MODEL):
            store.fetch_folder(MODEL, Path(path))
