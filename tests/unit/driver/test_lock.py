"""A run as other commands see it: has it a driver, and does the driver answer?"""

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from threading import Timer

import pytest
from conftest import REPOSITORY

from streamppo.cli import main
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.driver import run_folder
from streamppo.errors import RunError


def test_a_run_has_one_driver_and_is_running_as_long_as_it_lives(tmp_path: Path) -> None:
    assert not run_folder.is_running(tmp_path)
    with run_folder.driver_lock(tmp_path):
        assert run_folder.is_running(tmp_path)
        assert run_folder.is_running(tmp_path), "a command that asks takes no lock"
        with pytest.raises(RunError, match="already running"), run_folder.driver_lock(tmp_path):
            pass
    assert not run_folder.is_running(tmp_path)
    with run_folder.driver_lock(tmp_path):
        pass


def test_a_folder_that_takes_no_lock_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, reason in (("file", "Not a directory"), ("gone", "No such file or directory")):
        with pytest.raises(RunError, match=rf"{name}: {reason}$"), run_folder.driver_lock(tmp_path / name):
            pass


def test_a_run_is_locked_whatever_is_deleted_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "driver.lock").touch()
    with run_folder.driver_lock(tmp_path):
        for path in list(tmp_path.iterdir()):
            path.unlink()
        assert run_folder.is_running(tmp_path)
        with pytest.raises(RunError, match="already running"), run_folder.driver_lock(tmp_path):
            pass


def test_a_look_at_a_run_writes_nothing(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    assert not run_folder.is_running(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_driver_that_starts_while_a_command_looks_is_not_refused(tmp_path: Path) -> None:
    with run_folder.driver_lock(tmp_path):
        pass
    looking = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    Timer(run_folder.LOCK_S / 5, os.close, [looking]).start()
    with run_folder.driver_lock(tmp_path):
        assert run_folder.is_running(tmp_path)


def test_the_lock_of_a_driver_that_is_killed_is_free(tmp_path: Path) -> None:
    program = "import sys, time; from pathlib import Path; from streamppo.driver import run_folder\n"
    program += "with run_folder.driver_lock(Path(sys.argv[1])): print('locked', flush=True); time.sleep(600)"
    words = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=REPOSITORY) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == b"locked\n"
        assert run_folder.is_running(tmp_path)
        driver.kill()
    assert not run_folder.is_running(tmp_path)
    with run_folder.driver_lock(tmp_path):
        pass


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: object, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with run_folder.driver_lock(tmp_path):
        pass
    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(RunError, match=r"No locks available: .* file system with locks"):
        run_folder.driver_lock(tmp_path).__enter__()
    with pytest.raises(RunError, match=r"No locks available: .* file system with locks"):
        run_folder.is_running(tmp_path)


@pytest.mark.parametrize("name", [run_folder.SCALE, run_folder.ACCEPTED])
def test_a_request_to_a_driver_that_has_ended_is_forgotten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"rollouts": 3}')
    with run_folder.driver_lock(tmp_path):
        assert not (tmp_path / name).exists()
        assert run_folder.accept(tmp_path) is None


def test_a_command_returns_when_the_driver_has_seen_to_it(tmp_path: Path) -> None:
    with run_folder.driver_lock(tmp_path):
        asking = threading.Thread(target=run_folder.scale, args=(tmp_path, 3))
        asking.start()
        while (taken := run_folder.accept(tmp_path)) is None:
            time.sleep(0.01)
        assert taken == 3
        assert run_folder.accept(tmp_path) is None, "once"
        asking.join(5 * run_folder.POLL_S)
        assert asking.is_alive(), "accepted is not answered"
        run_folder.answer(tmp_path)
        asking.join(20)
        assert not asking.is_alive()


def test_a_request_that_comes_while_another_is_seen_to_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "WAIT_S", 0)
    with run_folder.driver_lock(tmp_path):
        for wanted in (3, 5):
            with pytest.raises(RunError, match="no answer within 0 s"):
                run_folder.scale(tmp_path, wanted)
            assert run_folder.accept(tmp_path) == wanted
        run_folder.answer(tmp_path)
        assert run_folder.accept(tmp_path) is None


def test_a_run_that_ends_meanwhile_leaves_no_request_behind(tmp_path: Path) -> None:
    raised: list[RunError] = []

    def ask() -> None:
        try:
            run_folder.scale(tmp_path, 3)
        except RunError as error:
            raised.append(error)

    with run_folder.driver_lock(tmp_path):
        asking = threading.Thread(target=ask)
        asking.start()
        while not (tmp_path / run_folder.SCALE).exists():
            time.sleep(0.01)
    asking.join(20)
    assert "ended before it applied the number" in str(raised[0])
    assert run_folder.accept(tmp_path) is None


@pytest.mark.parametrize("text", ["3", '{"rollouts": 0}', '{"rollouts": 3, "learners": 2}', ""])
def test_a_request_that_is_none_is_refused_once(tmp_path: Path, text: str) -> None:
    (tmp_path / run_folder.SCALE).write_text(text)
    with pytest.raises(RunError, match=r"scale\.json"):
        run_folder.accept(tmp_path)
    assert run_folder.accept(tmp_path) is None


@pytest.mark.timeout(20)
def test_a_request_that_is_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / run_folder.SCALE)
    with pytest.raises(RunError, match=r"scale\.json.*not a file"):
        run_folder.accept(tmp_path)
    assert run_folder.accept(tmp_path) is None


def test_the_command_says_why_it_does_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], math_config: Callable[..., Config]
) -> None:
    command = ["scale", str(tmp_path), "--rollouts"]
    assert main([*command, "3"]) == 1
    assert f"{tmp_path}: no run found" in capsys.readouterr().err
    configfile.save(math_config(), tmp_path)
    assert main([*command, "3"]) == 1
    assert f"is not running; use `streamppo resume {tmp_path} rollout.actors=3`" in capsys.readouterr().err
    for wrong in ("0", "-1", "1.5", "many"):
        assert main([*command, wrong]) == 2
        assert "--rollouts" in capsys.readouterr().err
    with run_folder.driver_lock(tmp_path):
        assert main(["resume", str(tmp_path)]) == 1
    assert "already running" in capsys.readouterr().err


def test_a_number_that_no_run_may_have_is_refused_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], math_config: Callable[..., Config]
) -> None:
    configfile.save(math_config("learner.gpus=0.5", "rollout.gpus=0.5"), tmp_path)
    with run_folder.driver_lock(tmp_path):
        assert main(["scale", str(tmp_path), "--rollouts", "2"]) == 2
        assert "are more than one GPU, but a rank and its share of the 2 engines" in capsys.readouterr().err
        assert run_folder.accept(tmp_path) is None


def test_a_number_that_the_run_refuses_is_no_success(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    math_config: Callable[..., Config],
) -> None:
    configfile.save(math_config(), tmp_path)
    monkeypatch.setattr(run_folder, "scale", lambda folder, rollouts: None)
    assert main(["scale", str(tmp_path), "--rollouts", "2"]) == 1
    assert f"{tmp_path}: the run has 1 rollout actors, not 2: its output says why" in capsys.readouterr().err
