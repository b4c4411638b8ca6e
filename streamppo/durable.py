"""Durable files: written under a temporary name, flushed, renamed, and their folder flushed.

A file is settled once it has its final name. A writer that dies earlier leaves a file whose name ends in `.tmp`; it is
never read, and the next writer replaces it.
"""

import errno
import fcntl
import hashlib
import os
import re
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from io import BufferedReader, BufferedWriter
from pathlib import Path

from streamppo.errors import StreamppoError

ASIDE = ".tmp"
"""The suffix of a temporary name."""
HOLLOW_BYTES, HOLLOW_RATIO = 2**28, 100
"""A larger file with data in less than 1 / `HOLLOW_RATIO` of it is hollow: it takes a reader's memory, but no disk."""
HOLLOW = "a sparse file, which streamppo does not write"


def aside(path: Path) -> Path:
    """The temporary name of `path`, until it is settled."""
    return path.with_name(f"{path.name}{ASIDE}")


def refuse_aside(path: Path, kind: type[StreamppoError]) -> None:
    """Raise `kind` if the temporary name of `path`, a path chosen by a user, exists: it may be the user's file."""
    if os.path.lexists(aside(path)):
        raise kind(
            f"{aside(path)}: is where {path.name} is written until it is complete, and exists: delete it if a stopped "
            "command left it there, or choose another name"
        )


def refuse_output(path: Path, kind: type[StreamppoError]) -> None:
    """Raise `kind` if no result can be written at `path`, chosen by a user; call it before the work."""
    if path.is_dir():
        raise kind(f"{path}: a folder; name a file")
    if not path.parent.is_dir():
        raise kind(f"{path.parent}: no such folder")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise kind(f"{path.parent}: you may not write in this folder")
    refuse_aside(path, kind)


def write_output(path: Path, data: bytes, kind: type[StreamppoError]) -> None:
    """Write a result to a file chosen by a user, whole or not at all; to a pipe or device directly. Raises `kind`."""
    with naming(path, kind):
        if path.exists() and not path.is_file():
            path.write_bytes(data)
        else:
            write(path.resolve(), data)


@contextmanager
def naming(path: Path, kind: type[StreamppoError]) -> Generator[None]:
    """Raise any `OSError` of the block as `kind`, with `path` in the message: errors of open files lack the name."""
    try:
        yield
    except OSError as error:
        raise kind(f"{path}: cannot be written: {error}") from error


def folder(path: Path) -> None:
    """Make a folder, unless it exists, so that its name survives a power failure; concurrent calls are safe."""
    if not path.is_dir():
        path.mkdir(exist_ok=True)
        flush(path.parent)


def settle(path: Path) -> None:
    """Flush the file or folder at `aside(path)` and give it its final name; both then survive a power failure."""
    flush(aside(path))
    rename(aside(path), path)


def rename(source: Path, target: Path) -> None:
    """Rename a flushed file within its folder; the new name then survives a power failure."""
    os.replace(source, target)
    flush(target.parent)


def write(path: Path, data: bytes) -> None:
    """Write a whole file durably. A link at its temporary name is replaced, not followed.

    Concurrent writers of one path wait for each other, so that a reader sees the whole content of one of them.
    """
    with _temporary_file(path) as file:
        file.truncate()
        file.write(data)
        file.flush()
        settle(path)


@contextmanager
def _temporary_file(path: Path) -> Generator[BufferedWriter]:
    """Open the file at the temporary name of `path`, locked until the end of the block."""
    while True:
        if aside(path).is_symlink():
            aside(path).unlink()
        descriptor = os.open(aside(path), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            # Some file systems have no locks.
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(aside(path), file.fileno()):
                yield file
                return


def _is_at(path: Path, file: int) -> bool:
    """False for an open file that another writer has meanwhile given its final name."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def reading(path: Path, *, whole: bool = False) -> Generator[BufferedReader]:
    """Open a regular file for reading. Raises `OSError` for anything else, such as a pipe, without blocking on it.

    For a reader of the `whole` file, hollow files are refused too.
    """
    with open(path, "rb", opener=_open_nonblocking) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a file", str(path))
        if whole and _is_hollow(file.fileno()):
            raise OSError(errno.EFBIG, HOLLOW, str(path))
        yield file


def is_hollow(path: Path) -> bool:
    """True for a hollow file; False for a missing one. Raises `OSError`."""
    try:
        if path.stat().st_size <= HOLLOW_BYTES:
            return False
        with open(path, "rb", opener=_open_nonblocking) as file:
            return _is_hollow(file.fileno())
    except FileNotFoundError:
        return False


def _is_hollow(file: int) -> bool:
    """True for an open file that consists almost only of holes. A file system that reports no holes has none."""
    size = os.fstat(file).st_size
    if size <= HOLLOW_BYTES or not hasattr(os, "SEEK_DATA"):
        return False
    data = end = 0
    try:
        while data * HOLLOW_RATIO < size:
            begin = os.lseek(file, end, os.SEEK_DATA)
            end = os.lseek(file, begin, os.SEEK_HOLE)
            data += end - begin
    except OSError as error:
        # No data follow the last hole, or the file system does not report holes.
        return error.errno == errno.ENXIO
    finally:
        os.lseek(file, 0, os.SEEK_SET)
    return False


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def read(path: Path) -> bytes:
    """The content of a file. Raises `OSError` as `reading` does."""
    with reading(path, whole=True) as file:
        return file.read()


def sha256(path: Path) -> str:
    """The SHA-256 of a file."""
    with reading(path, whole=True) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_kernel(path: Path) -> str:
    """The text of a file of /proc, decoded as names of files are; "" if there is none."""
    return os.fsdecode(path.read_bytes()) if path.exists() else ""


def mount_point(field: str) -> str:
    """A path as mountinfo (proc(5)) writes it, with white space and backslashes as octal digits: "my\\040disk"."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def flush(path: Path) -> None:
    """fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
