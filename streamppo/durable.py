"""Files that survive a crash: each is written under a temporary name, flushed to disk and then renamed.

If a writer dies before it renames its file, a file whose name ends in `.tmp` remains. No reader opens that file, and
the next writer replaces it.
"""

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from io import BufferedReader, BufferedWriter
from pathlib import Path

from streamppo.errors import StreamppoError

ASIDE = ".tmp"
"""The suffix of a temporary name."""
SCRATCH = re.compile(rf"\.[0-9a-f]{{16}}\{ASIDE}")
"""The end of a scratch folder's name, after the name of its result."""
HOLLOW_BYTES, HOLLOW_RATIO = 2**28, 100
"""A file above `HOLLOW_BYTES` is hollow if less than 1 / `HOLLOW_RATIO` of its size is data.

A reader of a hollow file would fill its memory with zeros.
"""
HOLLOW = "a sparse file, which streamppo does not write"
LFS = b"version https://git-lfs.github.com/spec/"
"""The first bytes of a git-LFS pointer, a small text file that replaces a file."""
POINTER = "a git-LFS pointer and not the file: `git lfs pull` in its folder downloads the file"


def aside(path: Path) -> Path:
    """Return the temporary name of the file `path`."""
    return path.with_name(f"{path.name}{ASIDE}")


def refuse_aside(path: Path, kind: type[StreamppoError]) -> None:
    """Raise `kind` if the temporary name of the user's `path` exists, because that file may belong to the user."""
    if os.path.lexists(aside(path)):
        raise kind(
            f"{aside(path)}: is where {path.name} is written until it is complete, and exists: delete it if a stopped "
            "command left it there, or choose another name"
        )


def refuse_output(path: Path, kind: type[StreamppoError]) -> None:
    """Raise `kind` if no result can be written at the user's `path`. Commands call it before they start to work."""
    if path.is_dir():
        raise kind(f"{path}: a folder; name a file")
    if not path.parent.is_dir():
        raise kind(f"{path.parent}: no such folder")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise kind(f"{path.parent}: you may not write in this folder")
    refuse_aside(path, kind)


def write_output(path: Path, data: bytes, kind: type[StreamppoError]) -> None:
    """Write a result durably to the user's `path`; a pipe or a device is written directly. Raises `kind`."""
    with naming(path, kind):
        if path.exists() and not path.is_file():
            path.write_bytes(data)
        else:
            write(path.resolve(), data)


@contextmanager
def naming(path: Path, kind: type[StreamppoError]) -> Generator[None]:
    """Raise `kind`, with `path` in the message, in place of an `OSError` of the block.

    An `OSError` about an open file does not name the file.
    """
    try:
        yield
    except OSError as error:
        raise kind(f"{path}: cannot be written: {error}") from error


def folder(path: Path) -> None:
    """Create the folder if it does not exist, and flush its parent. Concurrent calls are safe."""
    if not path.is_dir():
        path.mkdir(exist_ok=True)
        flush(path.parent)


@contextmanager
def scratch_folder(path: Path) -> Generator[Path]:
    """Create a temporary folder next to `path`, in which the block prepares the content of `path`.

    If the block does not rename the folder to `path`, the folder is deleted at the end. A living process holds a lock
    on its folder. Unlocked folders for the same `path` belong to killed processes, and are deleted first.
    """
    if path.parent.is_dir():
        for left in path.parent.iterdir():
            if left.name.startswith(path.name) and SCRATCH.fullmatch(left.name, len(path.name)):
                _delete_unlocked(left)
    while True:
        scratch = path.with_name(f"{path.name}.{secrets.token_hex(8)}{ASIDE}")
        folder(scratch)
        with _open_folder(scratch) as opened:
            # Some file systems have no locks.
            with suppress(OSError):
                fcntl.flock(opened, fcntl.LOCK_EX)
            if not is_at(scratch, os.fstat(opened)):
                # Another process has deleted the folder before it was locked.
                continue
            try:
                yield scratch
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
            return


def _delete_unlocked(path: Path) -> None:
    with suppress(OSError), _open_folder(path) as opened:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _open_folder(path: Path) -> Generator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def settle(path: Path) -> None:
    """Flush the file or folder at `aside(path)` and rename it to `path`, so that it survives a power failure."""
    flush(aside(path))
    rename(aside(path), path)


def rename(source: Path, target: Path) -> None:
    """Rename a flushed file within its folder, and flush the folder so that the new name survives a power failure."""
    os.replace(source, target)
    flush(target.parent)


def write(path: Path, data: bytes) -> None:
    """Write a file durably. A symbolic link at its temporary name is replaced, not followed.

    Concurrent writers of one path wait for each other, so a reader sees the complete content of one of them.
    """
    with _temporary_file(path) as file:
        file.truncate()
        file.write(data)
        file.flush()
        settle(path)


@contextmanager
def _temporary_file(path: Path) -> Generator[BufferedWriter]:
    """Open the file at the temporary name of `path`, and keep it locked until the end of the block."""
    while True:
        if aside(path).is_symlink():
            aside(path).unlink()
        descriptor = os.open(aside(path), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            # Some file systems have no locks.
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            if is_at(aside(path), os.fstat(file.fileno())):
                yield file
                return


def is_at(path: Path, opened: os.stat_result) -> bool:
    """Return whether the file or folder with the status `opened` is still at `path`, neither renamed nor deleted."""
    try:
        return os.path.samestat(path.stat(), opened)
    except FileNotFoundError:
        return False


@contextmanager
def reading(path: Path, *, whole: bool = False) -> Generator[BufferedReader]:
    """Open a regular file for reading. Raises `OSError` for any other kind of file, and never blocks on a pipe.

    With `whole`, the caller reads the complete file, so a hollow file raises `OSError` too.
    """
    with open(path, "rb", opener=_open_nonblocking) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a file", str(path))
        if whole and _is_hollow(file.fileno()):
            raise OSError(errno.EFBIG, HOLLOW, str(path))
        yield file


def is_pointer(path: Path) -> bool:
    """Return whether a file is only the pointer of git-LFS to the file. Raises `OSError` if it cannot be read."""
    with reading(path) as file:
        return file.read(len(LFS)) == LFS


def is_hollow(path: Path) -> bool:
    """Return whether a file is hollow (`HOLLOW_BYTES`); False if it does not exist. Raises `OSError`."""
    try:
        if path.stat().st_size <= HOLLOW_BYTES:
            return False
        with open(path, "rb", opener=_open_nonblocking) as file:
            return _is_hollow(file.fileno())
    except FileNotFoundError:
        return False


def _is_hollow(file: int) -> bool:
    """Return whether an open file is hollow; False if the file system does not report holes."""
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
        # ENXIO means that the rest of the file is a hole. Other errors mean that the file system reports no holes.
        return error.errno == errno.ENXIO
    finally:
        os.lseek(file, 0, os.SEEK_SET)
    return False


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def read(path: Path) -> bytes:
    """Return the content of a file. Raises `OSError` if it is hollow or not a regular file."""
    with reading(path, whole=True) as file:
        return file.read()


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with reading(path, whole=True) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_kernel(path: Path) -> str:
    """Return the text of a file of /proc, decoded like a file name; "" if the file does not exist."""
    return os.fsdecode(path.read_bytes()) if path.exists() else ""


def mount_point(field: str) -> str:
    """Return a path of mountinfo (proc(5)) without its octal escapes. Example: "my\\040disk" -> "my disk"."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def flush(path: Path) -> None:
    """Call fsync on a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
