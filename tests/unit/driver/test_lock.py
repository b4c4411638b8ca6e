"""What other commands see of a run, and how they reach its driver."""

import errno
import fcntl
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from streamppo.cli import main
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.driver import lock as running
from streamppo.errors import RunError


def test_a_run_has_one_driver_and_goes_on_as_long_as_it_lives(tmp_path: Path) -> None:
    assert not running.goes_on(tmp_path)
    with running.held(tmp_path):
        assert running.goes_on(tmp_path)
        assert running.goes_on(tmp_path), "whoever asks takes no lock"
        with pytest.raises(RunError, match="already running"), running.held(tmp_path):
            pass
    assert not running.goes_on(tmp_path)
    with running.held(tmp_path):
        pass


def test_a_folder_that_takes_no_lock_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"nowhere/driver\.lock: No such file"), running.held(tmp_path / "nowhere"):
        pass


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: object, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with running.held(tmp_path):
        pass
    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(RunError, match=r"driver\.lock: No locks available: .* file system with locks"):
        running.held(tmp_path).__enter__()
    with pytest.raises(RunError, match=r"driver\.lock: No locks available: .* file system with locks"):
        running.goes_on(tmp_path)


@pytest.mark.parametrize("name", [running.SCALE, running.TAKEN])
def test_what_a_driver_that_has_ended_was_asked_for_is_forgotten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"rollouts": 3}')
    with running.held(tmp_path):
        assert not (tmp_path / name).exists()
        assert running.take(tmp_path) is None


def test_a_command_returns_when_the_driver_has_seen_to_it(tmp_path: Path) -> None:
    with running.held(tmp_path):
        asking = threading.Thread(target=running.scale, args=(tmp_path, 3))
        asking.start()
        while (taken := running.take(tmp_path)) is None:
            time.sleep(0.01)
        assert taken == 3
        assert running.take(tmp_path) is None, "once"
        asking.join(5 * running.POLL_S)
        assert asking.is_alive(), "taken is not done"
        running.done(tmp_path)
        asking.join(20)
        assert not asking.is_alive()


def test_what_is_asked_while_another_number_is_seen_to_is_not_forgotten(tmp_path: Path) -> None:
    with running.held(tmp_path):
        for wanted in (3, 5):
            with pytest.raises(RunError, match="no answer within 0 s"):
                running.scale(tmp_path, wanted, within_s=0)
            assert running.take(tmp_path) == wanted
        running.done(tmp_path)
        assert running.take(tmp_path) is None


def test_a_run_that_ends_meanwhile_leaves_no_request_behind(tmp_path: Path) -> None:
    raised: list[RunError] = []

    def ask() -> None:
        try:
            running.scale(tmp_path, 3)
        except RunError as error:
            raised.append(error)

    with running.held(tmp_path):
        asking = threading.Thread(target=ask)
        asking.start()
        while not (tmp_path / running.SCALE).exists():
            time.sleep(0.01)
    asking.join(20)
    assert "ended before it took the number over" in str(raised[0])
    assert running.take(tmp_path) is None


@pytest.mark.parametrize("text", ["3", '{"rollouts": 0}', '{"rollouts": 3, "learners": 2}', ""])
def test_a_request_that_is_none_is_refused_once(tmp_path: Path, text: str) -> None:
    (tmp_path / running.SCALE).write_text(text)
    with pytest.raises(RunError, match=r"scale\.json"):
        running.take(tmp_path)
    assert running.take(tmp_path) is None


def test_the_command_says_why_it_does_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], math_config: Callable[..., Config]
) -> None:
    command = ["scale", str(tmp_path), "--rollouts"]
    assert main([*command, "3"]) == 1
    assert f"{tmp_path}: no run is there" in capsys.readouterr().err
    configfile.save(math_config(), tmp_path)
    assert main([*command, "3"]) == 1
    assert f"is not running: `streamppo resume {tmp_path} rollout.actors=3`" in capsys.readouterr().err
    for wrong in ("0", "-1", "1.5", "many"):
        with pytest.raises(SystemExit):
            main([*command, wrong])
        assert f"'{wrong}' is not a whole number from 1 on" in capsys.readouterr().err
    with running.held(tmp_path):
        assert main(["resume", str(tmp_path)]) == 1
    assert "already running" in capsys.readouterr().err


def test_a_number_that_no_run_may_have_is_told_to_whoever_asks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], math_config: Callable[..., Config]
) -> None:
    configfile.save(math_config("learner.gpus=0.5", "rollout.gpus=0.5"), tmp_path)
    with running.held(tmp_path):
        assert main(["scale", str(tmp_path), "--rollouts", "2"]) == 1
        assert "are more than one GPU where a rank and its share of the 2 rollout actors" in capsys.readouterr().err
        assert running.take(tmp_path) is None


def test_a_number_that_the_run_refuses_is_no_success(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    math_config: Callable[..., Config],
) -> None:
    configfile.save(math_config(), tmp_path)
    monkeypatch.setattr(running, "scale", lambda folder, rollouts: None)
    assert main(["scale", str(tmp_path), "--rollouts", "2"]) == 1
    assert f"{tmp_path}: the run has 1 rollout actors, not 2: its output says why" in capsys.readouterr().err
