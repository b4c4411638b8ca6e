"""A crash at any file-system call leaves the last good state; bit flips in a checkpoint are named."""

import json
import os
import random
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from conftest import SUPPORT
from test_archive import batch, written
from test_journal import damage

from streamppo import durable
from streamppo.errors import CheckpointError
from streamppo.learner.checkpoint import manifest
from streamppo.learner.checkpoint.manifest import CheckpointFiles, CheckpointState
from streamppo.queue.store.archive import Archive


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("what", "error", "calls", "fewest"),
    [
        ("archive", "crash", "each", 5),
        ("archive", "full", "each", 5),
        ("checkpoint", "crash", "ends", 30),
        pytest.param("checkpoint", "crash", "each", 300, marks=pytest.mark.slow),
        pytest.param("checkpoint", "full", "each", 300, marks=pytest.mark.slow),
    ],
)
def test_a_crash_or_a_full_disk_at_any_file_system_call_leaves_the_last_good_state(
    tmp_path: Path, what: str, error: str, calls: str, fewest: int
) -> None:
    words = [sys.executable, str(SUPPORT / "crashes.py"), what, error, calls, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[-1]) >= fewest, "the shim saw too few calls"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is flushed and renamed from here on, in order."""
    calls: list[str] = []
    flush, replace = durable.flush, os.replace

    def rename(source: Path, target: Path) -> None:
        calls.append(f"rename {source.name}")
        replace(source, target)

    monkeypatch.setattr(durable, "flush", lambda path: (calls.append(f"flush {path.name}"), flush(path)))
    monkeypatch.setattr(os, "replace", rename)
    return calls


def test_bytes_are_flushed_before_a_name_is_given_and_the_folder_after_it(tmp_path: Path, calls: list[str]) -> None:
    durable.write(tmp_path / "a", b"content")
    assert calls == ["flush a.tmp", "rename a.tmp", f"flush {tmp_path.name}"]
    assert (tmp_path / "a").read_bytes() == b"content"


def test_concurrent_writers_of_one_file_succeed_and_a_reader_sees_one_of_them_whole(tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom streamppo import durable\n"
        "end = time.monotonic() + 1.5\n"
        "while time.monotonic() < end:\n    durable.write(Path(sys.argv[1]), sys.argv[2].encode() * 100_000)\n"
    )
    path, whole = tmp_path / "report.html", {letter.encode() * 100_000 for letter in "abc"}
    durable.write(path, b"a" * 100_000)
    with ExitStack() as ending:
        writers = [
            ending.enter_context(subprocess.Popen([sys.executable, "-c", script, str(path), letter]))
            for letter in "abc"
        ]
        while any(writer.poll() is None for writer in writers):
            assert path.read_bytes() in whole
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def test_a_file_of_the_archive_is_flushed_before_it_has_its_name_and_its_folder_after_it(
    tmp_path: Path, calls: list[str]
) -> None:
    made = Archive(tmp_path / "archive", {})
    version = written(made, batch())
    (aside,) = [path.name for path in made.folder.iterdir()]
    made.settle(version)
    assert calls == [f"flush {tmp_path.name}", f"flush {aside}", f"rename {aside}", "flush archive"]
    assert made.batch(3) == batch()


def complete(folder: Path, version: int) -> Path:
    path = folder / f"{version:08d}"
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(random.Random(version).randbytes(3000))
    (path / ".metadata").write_bytes(b"m" * 200)
    files = CheckpointFiles(
        shared=manifest.flush_and_hash(path, ".metadata"), ranks=(manifest.flush_and_hash(path, "__0_*"),)
    )
    manifest.write(path, CheckpointState(version=version, digest="d" * 64, ranks=1, beta=0.1, bad_steps=(0, 0)), files)
    return path


def whole_one(folder: Path) -> Path | None:
    """The checkpoint that a single rank continues from: the driver reads manifests, the rank verifies files."""
    while path := manifest.newest(folder):
        try:
            manifest.verify(path, 0)
        except manifest.DamagedFile as error:
            manifest.set_aside(path, error)
        else:
            return path
    return None


def test_200_random_flips_and_truncations_of_a_checkpoint_are_named_and_the_one_before_is_used(
    tmp_path: Path, logged: pytest.LogCaptureFixture
) -> None:
    generator = random.Random(5)
    first, second = complete(tmp_path, 1), complete(tmp_path, 2)
    whole = {path: path.read_bytes() for path in second.iterdir()}
    harmless = 0
    for _ in range(200):
        path = generator.choice(sorted(whole))
        what = damage(path, generator)
        logged.clear()
        found = whole_one(tmp_path)
        if found == second:
            # White space and escapes of the manifest's JSON may change without changing its content.
            assert path.name == manifest.MANIFEST, f"{what} went unnoticed"
            assert json.loads(path.read_bytes()) == json.loads(whole[path]), what
            harmless += 1
        else:
            assert found == first
            assert str(path) in logged.messages[0], what
            (tmp_path / "00000002.damaged").rename(second)
        path.write_bytes(whole[path])
    assert harmless < 20


def test_the_newest_and_every_nth_checkpoint_are_kept(tmp_path: Path) -> None:
    for version in range(1, 9):
        complete(tmp_path, version)
    manifest.drop(tmp_path, keep=2, keep_every=3)
    assert [path.name for path in manifest.complete(tmp_path)] == ["00000003", "00000006", "00000007", "00000008"]


def test_a_checkpoint_under_the_name_of_another_version_is_refused(tmp_path: Path) -> None:
    complete(tmp_path, 3).rename(tmp_path / "00000004")
    with pytest.raises(CheckpointError, match="does not match its own checksum"):
        manifest.verify(tmp_path / "00000004", 0)
