"""The script's side of a run: output, errors and signals, with a process in the place of the run's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, SUPPORT

from streamppo.api import parent
from streamppo.api.messages import RunRequest
from streamppo.errors import ConfigError, Interrupted, LearnerLost, RunError


@pytest.fixture
def _scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent, "CHILD", "scripted_child")


def assert_prints(script: str, output: str) -> None:
    """Run a script in a process and a session of its own."""
    path = os.pathsep.join(map(str, (REPOSITORY, SUPPORT)))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
        timeout=60,
    )
    assert done.stdout == output, done.stderr


@pytest.mark.usefixtures("_scripted")
def test_output_goes_to_the_standard_output_of_the_script_character_by_character(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert parent.drive(RunRequest(config="prints zwölf=€12")) == Path("/runs/scripted")
    assert capsys.readouterr().out == "zwölf=€12!\n"


@pytest.mark.parametrize("fails", ["output", "watcher"])
def test_a_run_ends_though_nobody_takes_what_it_prints(fails: str) -> None:
    """More than a pipe holds, printed after the script's output or drawing of curves has failed."""
    script = (
        "import io, sys\n"
        "from streamppo.api import parent\n"
        "from streamppo.api.messages import RunRequest\n"
        "parent.CHILD = 'scripted_child'\n"
        "class Cell(io.StringIO):\n"
        "    def write(self, text):\n"
        f"        if {fails == 'output'}: raise OSError('the cell is gone')\n"
        "        return super().write(text)\n"
        "def watch(folder):\n"
        f"    if {fails == 'watcher'}: raise OSError('the cell is gone')\n"
        "sys.stdout = Cell()\n"
        "try:\n    parent.drive(RunRequest(config='prints_at_its_end 20000'), watch)\n"
        "except OSError as error:\n    print(error, file=sys.__stdout__)\n"
    )
    assert_prints(script, "the cell is gone\n")


@pytest.mark.usefixtures("_scripted")
@pytest.mark.parametrize("kind", [ConfigError, RunError, LearnerLost])
def test_the_error_that_ended_the_run_is_raised_as_what_it_was(kind: type[Exception]) -> None:
    with pytest.raises(kind, match="its words, in two\nlines") as raised:
        parent.drive(RunRequest(config=f"raises {kind.__name__} 1"))
    assert type(raised.value) is kind


@pytest.mark.usefixtures("_scripted")
def test_a_run_that_a_signal_ended_names_the_signal() -> None:
    with pytest.raises(Interrupted, match="stopped by SIGTERM") as raised:
        parent.drive(RunRequest(config="raises Interrupted 143"))
    assert raised.value.number == 15


@pytest.mark.usefixtures("_scripted")
def test_a_process_that_dies_without_a_word_is_an_error_with_its_signal_or_exit_code() -> None:
    with pytest.raises(RunError, match=r"^/runs/scripted: its process has died \(SIGKILL\)"):
        parent.drive(RunRequest(config="dies"))
    with pytest.raises(RunError, match=r"its process has died \(exit code 3\)"):
        parent.drive(RunRequest(config="nothing"))


@pytest.mark.usefixtures("_scripted")
def test_an_error_is_read_when_all_of_it_has_arrived() -> None:
    watched: list[Path] = []
    with pytest.raises(RunError, match=r"^x{300000}$"):
        parent.drive(RunRequest(config="raises_at_length RunError 300000"), watched.append)
    assert watched
    with pytest.raises(RunError, match=r"its process has died \(SIGKILL\)"):
        parent.drive(RunRequest(config="breaks_off"))


@pytest.mark.usefixtures("_scripted")
def test_the_folder_is_watched_while_the_run_goes_on_and_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[Path] = []
    parent.drive(RunRequest(config="prints abc"), watched.append)
    assert len(watched) >= 2 and set(watched) == {Path("/runs/scripted")}


def test_a_ctrl_c_reaches_the_run_once_and_the_script_when_the_run_has_ended() -> None:
    # A background process ignores Ctrl-C, and so do its children: pytest may be one.
    script = (
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from streamppo.api import parent\n"
        "from streamppo.api.messages import RunRequest\n"
        "parent.CHILD = 'scripted_child'\n"
        "try:\n    parent.drive(RunRequest(config='interrupts'))\n"
        "except KeyboardInterrupt:\n    print('and the script')\n"
    )
    assert_prints(script, "heard 1\nand the script\n")
