"""How a file becomes durable: written beside its final name, flushed with its folder, renamed.

A file is settled when it has its final name. A writer that dies before leaves a name that ends in `.tmp`, which nobody
reads and the next writer replaces.
"""

import errno
import hashlib
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from streamppo.errors import StreamppoError

ASIDE = ".tmp"
"""The end of a name that does not count yet, or no longer."""


def aside(path: Path) -> Path:
    """The name under which `path` is written before it is settled."""
    return path.with_name(f"{path.name}{ASIDE}")


@contextmanager
def naming(path: Path, kind: type[StreamppoError]) -> Generator[None]:
    """Re-raise any `OSError` of the block as `kind`, with `path` in the message: an open file does not say its name."""
    try:
        yield
    except OSError as error:
        raise kind(f"{path}: cannot be written: {error}") from error


def folder(path: Path) -> None:
    """Make a folder, unless it is there, so that its name survives a power cut; several may do it at a time."""
    if not path.is_dir():
        path.mkdir(exist_ok=True)
        flush(path.parent)


def settle(path: Path) -> None:
    """Give the file, or the flushed folder, at `aside(path)` its final name; both survive a power cut from here on."""
    flush(aside(path))
    rename(aside(path), path)


def rename(source: Path, target: Path) -> None:
    """Give a file that is flushed another name in its folder, which survives a power cut from here on."""
    os.replace(source, target)
    flush(target.parent)


def write(path: Path, data: bytes) -> None:
    """Write a whole file. A link that stands where it is written aside is replaced, and not followed."""
    if aside(path).is_symlink():
        aside(path).unlink()
    with open(aside(path), "wb", opener=_not_by_link) as file:
        file.write(data)
    settle(path)


def _not_by_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


@contextmanager
def reading(path: Path) -> Generator[BufferedReader]:
    """Open a file to read it. Raises `OSError` for what is no file, such as a pipe: nobody waits for it."""
    with open(path, "rb", opener=_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a file", str(path))
        yield file


def _at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def read(path: Path) -> bytes:
    """The content of a file. Raises `OSError` for what is no file, as `reading` does."""
    with reading(path) as file:
        return file.read()


def sha256(path: Path) -> str:
    """The SHA-256 of a file."""
    with reading(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    """fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
