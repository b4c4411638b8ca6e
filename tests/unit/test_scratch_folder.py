"""Folders in which results are prepared: those of killed commands do not stay, and nobody else's is touched."""

import errno
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import learner_case
import pytest
import replay_case

from streamppo import cli, durable
from streamppo.commands import versions


def live(path: Path, rounds: int) -> None:
    """Prepare results again and again; every third time die in the middle."""
    for number in range(rounds):
        with durable.scratch_folder(path) as scratch:
            (scratch / "file").write_text("x")
            for name in ("a", "b"):
                durable.folder(scratch / name)
            assert sorted(one.name for one in scratch.iterdir()) == ["a", "b", "file"]
            if number == rounds - 1 and os.getpid() % 3 == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def test_living_processes_keep_theirs_and_dead_ones_leave_none_in_the_end(tmp_path: Path) -> None:
    path = tmp_path / "math [1]"
    processes = [multiprocessing.get_context("fork").Process(target=live, args=(path, 20)) for _ in range(12)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert {process.exitcode for process in processes} <= {0, -signal.SIGKILL}
    with durable.scratch_folder(path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_what_only_resembles_such_a_folder_stays(tmp_path: Path) -> None:
    names = ["math", "math.tmp", "math.2024.tmp", "math.back-up.tmp", "math-2.0123456789abcdef.tmp"]
    names += [
        "math.0123456789abcdef",
        "my math.0123456789abcdef.tmp",
        "math.0123456789ABCDEF.tmp",
        "math.0123456789abcdef0.tmp",
    ]
    for name in names:
        (tmp_path / name / "of mine").mkdir(parents=True)
    (tmp_path / "math.0123456789abcdef.tmp").symlink_to(tmp_path / "math")
    with durable.scratch_folder(tmp_path / "math"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {*names, "math.0123456789abcdef.tmp"}
    assert all((tmp_path / name / "of mine").is_dir() for name in names)


def killed(words: list[str]) -> int | None:
    """The exit code of a command that is killed once it has a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        process = learner_case.processes().Process(target=_main, args=(words, Path(folder)))
        process.start()
        process.join()
        return process.exitcode


def _main(words: list[str], folder: Path) -> None:
    copy: Callable[..., Any] = versions._copy_checkpoint

    def copy_and_die(*arguments: Any) -> None:
        copy(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(versions, "_copy_checkpoint", copy_and_die)  # noqa: B010
    replay_case.run_command(words, folder / "out", folder / "err")


@pytest.mark.parametrize(
    ("words", "result"),
    [(("fork", "--at", "4", "--runs", "."), "math-at-4"), (("bundle", "--update", "5"), "math-5.safetensors")],
)
def test_a_command_that_was_killed_is_given_again_and_leaves_its_result_alone(
    words: tuple[str, ...], result: str, exact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = shutil.copytree(exact, tmp_path / "elsewhere" / "math")
    command = ["streamppo", words[0], str(run), *words[1:]]
    assert killed(command) == -signal.SIGKILL
    assert len([path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]) == 1
    done = replay_case.command(*command)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} - {f"{result}.consent"} == {"elsewhere", result}


@pytest.mark.parametrize("given", ["demo", "new/demo", "demo/"])
@pytest.mark.parametrize("written", range(5))
def test_a_project_is_there_whole_or_not_at_all(
    given: str, written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that is full after some of its files leaves nothing, so that the same command succeeds later."""
    monkeypatch.chdir(tmp_path)
    write_text, count = Path.write_text, 0

    def write(path: Path, *arguments: Any, **named: Any) -> int:
        nonlocal count
        count += 1
        if count > written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_text(path, *arguments, **named)

    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", write)
        assert cli.main(["init", given]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert not Path(given).exists()
    assert cli.main(["init", given]) == 0
    assert len(list(Path(given).rglob("*"))) == 6
    assert [path for path in Path(given).resolve().parent.iterdir() if path.name.endswith(".tmp")] == []


def test_a_project_may_be_made_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path / "demo")
    assert cli.main(["init", "."]) == 0
    assert len(list(Path.cwd().iterdir())) == 4, "the folder is the same one"
