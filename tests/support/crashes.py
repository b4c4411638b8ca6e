"""Repeat one durable operation, and make it fail at its first, second, third, ... file-system call.

    python crashes.py archive|checkpoint crash|full each|ends FOLDER

It prints the number of survived crashes or full disks. `each` takes every call. `ends` takes three of the writes to one
file in a row: the first, the middle, the last. Example: one file is 363 of the 394 calls of a checkpoint.

A failing write leaves half of its bytes; all later file-system calls fail too, also those of the cleanup. If the disk
is full, the error must be one of ours and name the file. After each failure the last good state must load, and a second
attempt of the operation must succeed.
"""

import builtins
import errno
import io
import itertools
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parent.parent))

from conftest import trajectory

from streamppo.config.sections import Checkpoint
from streamppo.errors import CheckpointError, JournalError
from streamppo.learner.checkpoint import checkpoint, manifest
from streamppo.learner.checkpoint.manifest import CheckpointState
from streamppo.queue.rules.records import PublishedVersion
from streamppo.queue.store.archive import Archive
from streamppo.types import Batch
from streamppo.weights.pusher import PushedVersion

WRITE = "write to "
CALLS = ("fsync", "replace", "rename", "mkdir", "unlink", "rmdir", "open")


class Crash(BaseException):
    """Stands for the death of the process."""


def crash() -> BaseException:
    return Crash()


def full() -> BaseException:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Shim:
    """Notes file-system calls; call number `at` and all later ones raise `error()`, with `None` no call does."""

    def __init__(self, at: int | None, error: Callable[[], BaseException]) -> None:
        self.at = at
        self.calls = list[str]()
        self.error = error

    def __enter__(self) -> "Shim":
        self._kept = {name: getattr(os, name) for name in CALLS}, io.open
        for name, function in self._kept[0].items():
            setattr(os, name, self._counted(function))
        opened = io.open
        io.open = builtins.open = lambda *arguments, **words: File(opened(*arguments, **words), self)  # pyright: ignore
        return self

    def __exit__(self, *error: object) -> None:
        for name, function in self._kept[0].items():
            setattr(os, name, function)
        io.open = builtins.open = self._kept[1]

    @property
    def reached(self) -> bool:
        return self.at is not None and len(self.calls) >= self.at

    def hit(self, call: str) -> bool:
        self.calls.append(call)
        return self.reached

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **words: Any) -> Any:
            if self.hit(function.__name__):
                raise self.error()
            return function(*arguments, **words)

        return call


class File:
    """A file whose failing write leaves half of its bytes."""

    def __init__(self, file: Any, shim: Shim) -> None:
        self._file, self._shim = file, shim

    def write(self, data: Any) -> Any:
        if self._shim.hit(f"{WRITE}{self._file.name}"):
            if len(self._shim.calls) == self._shim.at:
                self._file.write(data[: len(data) // 2])
                self._file.flush()
            raise self._shim.error()
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "File":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __iter__(self) -> Any:
        return iter(self._file)


def batch(version: int) -> Batch:
    return Batch(version=version, min_version=0, trajectories=(trajectory([1, 2, version]),))


def record(archive: Archive, version: int) -> dict[int, str]:
    archive.settle(PublishedVersion(version=version + 1, digest="", archived=archive.write(batch(version))))
    return archive.checksums


def write_archive(folder: Path) -> None:
    record(Archive(folder, {}), 2)


def check_archive(folder: Path, known: dict[int, str]) -> None:
    found = Archive(folder, known)
    assert found.batch(1) == batch(1)
    found.sweep()
    assert all(path.name.endswith(".zarr.zip") for path in folder.iterdir())
    record(found, 2)
    assert found.batch(2) == batch(2)


def model_of(version: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(version)
    model = fully_shard(torch.nn.Linear(3, 2), mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def state(version: int) -> CheckpointState:
    return CheckpointState(version=version, digest=f"digest {version}", ranks=1, beta=0.25, bad_steps=(0, 0))


def save_checkpoint(folder: Path, version: int = 2) -> None:
    pushed = Future[PushedVersion]()
    pushed.set_result(PushedVersion(f"digest {version}", 0.0, 0))
    saver = checkpoint.Saver(Checkpoint(keep=1))
    saver.start(folder, state(version), checkpoint.TrainState(*model_of(version), None), pushed)
    saver.wait()


def check_checkpoint(folder: Path) -> None:
    newest = manifest.newest(folder)
    assert newest is not None, "no checkpoint is left"
    model, optimizer = model_of(9)
    found = checkpoint.load(newest, checkpoint.TrainState(model, optimizer, None))
    assert found == state(int(newest.name))
    expected = model_of(found.version)[0].state_dict()
    assert all(bool((value == expected[name]).all()) for name, value in model.state_dict().items())
    save_checkpoint(folder)
    assert manifest.complete(folder)[-1].name == "00000002"


def chosen(write: Callable[[Path], None], base: Path, error: Callable[[], BaseException]) -> list[int]:
    """The numbers of the calls of `write`, counted from 1; of writes to one file in a row three."""
    folder = base / "whole"
    shutil.copytree(base / "good", folder)
    with Shim(None, error) as shim:
        write(folder)
    numbers, found = itertools.count(1), list[int]()
    for call, alike in itertools.groupby(shim.calls):
        row = [next(numbers) for _ in alike]
        found += sorted({row[0], row[len(row) // 2], row[-1]}) if call.startswith(WRITE) else row
    return found


def survived(
    write: Callable[[Path], None],
    check: Callable[[Path], None],
    base: Path,
    error: Callable[[], BaseException],
    numbers: Iterable[int],
) -> int:
    """Return how many failing calls of `numbers` were survived; `check` tests the folder after each failure."""
    for done, at in enumerate(numbers):
        folder = base / str(at)
        shutil.copytree(base / "good", folder)
        with Shim(at, error) as shim:
            try:
                write(folder)
            except BaseException as raised:
                assert shim.reached, f"call {at} was not reached"
                told = isinstance(raised, JournalError | CheckpointError) and f"{folder}/00000002" in str(raised)
                assert told or error is crash, repr(raised)
                traceback.print_exc()
            else:
                assert not shim.reached, f"nobody was told of call {at}"
        check(folder)
        shutil.rmtree(folder)
        if not shim.reached:
            return done
    return done + 1


def main(what: str, error: Callable[[], BaseException], calls: str, base: Path) -> int:
    good = base / "good"
    good.mkdir()
    if what == "archive":
        known = record(Archive(good, {}), 1)
        write, check = write_archive, lambda folder: check_archive(folder, known)
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        # Hundreds of savers share one group, because every group has threads and open files.
        patch.object(dist, "new_group", lambda **_: dist.group.WORLD).start()
        save_checkpoint(good, 1)
        write, check = save_checkpoint, check_checkpoint
    numbers = chosen(write, base, error) if calls == "ends" else itertools.count(1)
    return survived(write, check, base, error, numbers)


if __name__ == "__main__":
    print(main(sys.argv[1], {"crash": crash, "full": full}[sys.argv[2]], sys.argv[3], Path(sys.argv[4])))
