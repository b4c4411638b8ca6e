"""The commands' words: order of flags and overrides, exit codes, signals, pipes, terminals."""

import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import get_args

import pytest
from conftest import MATH

from streamppo import cli
from streamppo.commands.console import console, table
from streamppo.errors import ConfigError, Interrupted, RunError

PROGRAM = [sys.executable, "-m", "streamppo"]


def streamppo(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, without a terminal."""
    return subprocess.run(
        [*PROGRAM, *words], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "words",
    [
        ["CONFIG", "--dry-run", "learner.lr=0.5", "name=x"],
        ["CONFIG", "learner.lr=0.5", "--dry-run", "name=x"],
        ["CONFIG", "learner.lr=0.5", "--runs", "elsewhere", "name=x", "--dry-run"],
        ["--dry-run", "CONFIG", "learner.lr=0.5", "name=x"],
        ["--runs=elsewhere", "CONFIG", "learner.lr=0.5", "--dry-run", "name=x"],
    ],
)
def test_overrides_and_flags_may_stand_in_any_order(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", *(str(MATH) if word == "CONFIG" else word for word in words)]) == 0
    shown = capsys.readouterr().out
    tree = tomllib.loads(shown)
    assert (tree["learner"]["lr"], tree["name"]) == (0.5, "x")


def test_the_value_of_an_override_may_be_negative_and_contain_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", str(MATH), "rollout.top_k=-1", "--dry-run", "name=a--b"]) == 2
    assert "rollout.top_k" in capsys.readouterr().err, "it has reached the configuration"


COMPLETED = {
    "re": ["report", "replay", "reward-test", "resume"],
    "run --dr": ["--dry-run"],
    "run a.toml --r": ["--resume", "--runs"],
    "run a": ["a.toml"],
    "eval runs/m": ["runs/math"],
    "data g": ["gsm8k"],
    "completion z": ["zsh"],
}


def test_bash_completes_commands_options_paths_and_choices(tmp_path: Path) -> None:
    (tmp_path / "a.toml").touch()
    (tmp_path / "runs" / "math").mkdir(parents=True)
    asked = "".join(f"ask {words}\n" for words in COMPLETED)
    script = (
        "source completion.bash\n"
        'ask() { COMP_WORDS=(streamppo "$@"); COMP_CWORD=$#; COMPREPLY=(); _streamppo; echo "${COMPREPLY[*]}"; }\n'
    )
    (tmp_path / "b c.csv").touch()
    asked += 'ask run "b"; echo "${#COMPREPLY[@]}"\n'
    (tmp_path / "completion.bash").write_text(streamppo("completion", "bash").stdout)
    done = subprocess.run(["bash", "-c", script + asked], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        *(" ".join(words) for words in COMPLETED.values()),
        *("b c.csv", "1"),
    ], done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_of_every_shell_knows_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert [name for name in cli.app if name[0] != "-" and not re.search(rf"(?<![\w-]){name}(?![\w-])", script)] == []


MISTAKES = {
    "": "",
    "bogus": "Unknown command",
    "run": "CONFIG requires an argument",
    "run CONFIG --bogus": "Unknown option: --bogus",
    "run CONFIG --dry": "Unknown option: --dry. Did you mean --dry-run?",
    "run CONFIG --no-dry-run": "Unknown option: --no-dry-run",
    "run CONFIG learner.rangs=2": "did you mean 'ranks'?",
    "run nowhere.toml": "nowhere.toml",
    "check CONFIG learner.rangs=2": "did you mean 'ranks'?",
    "check CONFIG --gpu-gib much": "--gpu-gib",
    "reward-test CONFIG --n few": "--n",
    "scale run": "--rollouts requires an argument",
    "scale run --rollouts 0": "--rollouts",
    "replay run --to last": "--to",
    "inspect run --n -1": "--n",
    "inspect run --n 0": "--n",
    "inspect run --update 0": "--update",
    "inspect run --prompt -1": "--prompt",
    "export run --version -1 --to x": "--version",
    "reward-test CONFIG --n 0": "--n",
    "data mnist --from a --to b": 'Choose from: "gsm8k"',
    "inspect run --time --prompt 3": "takes only one of --time and --prompt",
    "inspect run --update 2 --dead-letters": "takes only one of --dead-letters and --update",
    "inspect run --time --n 3": "takes only one of --time and --n",
    "reward-test CONFIG --n 3 --completions x.jsonl": "takes only one of --n and --completions",
    "plan CONFIG --measured run --gpu h200": "--gpu is for a plan with --gpus",
    "plan CONFIG --measured run --length 3": "--length is for a plan with --gpus",
    "check CONFIG --gpu-gib -3": "Must be > 0",
    "run .": "cannot read .: a folder, not a TOML file",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_sentence_and_exit_code_2(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words.replace("CONFIG", str(MATH)).split()) == 2
    told = capsys.readouterr().err
    assert MISTAKES[words] in told
    assert len(told.splitlines()) == bool(MISTAKES[words])


NUMBERS = [
    (name, option)
    for name in cli.app
    if name[0] != "-"
    for argument in cli.app[name].assemble_argument_collection()
    for option in argument.names
    if float in (argument.hint, *get_args(argument.hint))
]


@pytest.mark.parametrize(("name", "option"), NUMBERS)
@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_an_option_that_is_a_number_is_finite(
    name: str, option: str, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([name, str(MATH), f"{option}={number}"]) == 2
    assert f"Invalid value for {option}: {number} is not finite" in capsys.readouterr().err


SEVERAL = {
    ("fork", "--set"): ["--at", "3"],
    ("replay", "--set"): [],
    ("replay", "--rows"): [],
    ("bisect", "--set"): ["--metric", "reward", "--above", "1"],
    ("bundle", "--rows"): ["--update", "3"],
    ("try", "--version"): ["--prompt", "3"],
    ("plan", "--measured"): [],
    ("report", "--measured"): [],
}


@pytest.mark.parametrize(("name", "option"), SEVERAL)
def test_an_option_without_its_values_is_refused(name: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, str(MATH), *SEVERAL[name, option], option]) == 2
    assert f"parameter {option} requires at least 1 element" in capsys.readouterr().err


def test_every_option_with_several_values_is_known() -> None:
    found = {
        (name, argument.names[0])
        for name in cli.app
        if name[0] != "-"
        for argument in cli.app[name].assemble_argument_collection()
        if argument.parameter.consume_multiple
    }
    assert found == {*SEVERAL}


def test_every_option_that_is_a_number_is_known() -> None:
    known = {"--above", "--below", "--gpu-gib", "--length", "--price", "--prompt-tokens", "--reward-s"}
    assert known <= {option for _, option in NUMBERS}


COMMANDS_ON_A_RUN = ["resume", "replay", "verify", "inspect", "summary", "report", "watch", "trace"]


@pytest.mark.parametrize("command", COMMANDS_ON_A_RUN)
def test_a_folder_without_a_run_is_answered_with_the_runs_that_may_be_meant(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(7):
        folder = tmp_path / "runs" / f"math-{number}"
        folder.mkdir(parents=True)
        cli.configfile.save(cli.configfile.load(MATH), folder)
    for folder, hint in {
        "math-3": f"no run found: is {tmp_path / 'runs' / 'math-3'} meant?",
        "runs": "no run found, but the runs math-0, math-1, math-2, math-3, math-4 and others: name one of them",
        "nowhere": "no run found; `streamppo list` shows the runs of a folder",
    }.items():
        assert cli.main([command, folder]) == 1
        assert hint in capsys.readouterr().err
    assert cli.main(["run", "runs/math-3"]) == 2
    assert "the folder of a run; `streamppo resume runs/math-3` continues it" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["resume", "nowhere"], ["inspect", "nowhere"], ["replay", "nowhere"]])
def test_a_failure_is_exit_code_1(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 1
    assert "nowhere: no run found" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("wrong"), 2),
        (RunError("a stall"), 1),
        (Interrupted(signal.SIGINT), 130),
        (Interrupted(signal.SIGTERM), 143),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 141),
    ],
)
def test_the_exit_code_tells_how_a_command_ended(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def load(*_: object) -> None:
        raise error

    monkeypatch.setattr(cli.configfile, "load", load)
    assert cli.main(["run", str(MATH), "--dry-run"]) == code


@pytest.mark.slow
def test_ctrl_c_ends_a_command_without_a_traceback(tmp_path: Path) -> None:
    """A reward that never returns keeps the command at work."""
    (tmp_path / "slow.py").write_text(
        "import asyncio, sys\n"
        "async def score(trajectory):\n    print('at work', flush=True)\n    await asyncio.sleep(600)\n"
    )
    words = ["reward-test", str(MATH), f"reward.function={tmp_path}/slow.py:score", "reward.where=actor", "--n", "1"]
    words += ["model.tiny.max_steps=1"]
    # A background process ignores Ctrl-C, and so do its children: pytest may be one.
    program = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    program += "from streamppo.__main__ import main\nmain()\n"
    with subprocess.Popen(
        [sys.executable, "-c", program, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None and running.stderr is not None
        assert any(line.endswith("at work\n") for line in iter(running.stderr.readline, ""))
        time.sleep(0.1)
        running.send_signal(signal.SIGINT)
        running.wait(60)
        said = running.stderr.read()
        assert running.returncode == 130, said
        assert "Traceback" not in said


@pytest.mark.parametrize("moment", ["find_spec", "main"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_at_any_moment_ends_a_command_in_silence(moment: str, number: signal.Signals) -> None:
    """While it imports its modules, and at work, where its blocks end as after Ctrl-C."""
    program = f"""
import contextlib, os, signal, sys
def stop(*_):
    try:
        os.kill(os.getpid(), {int(number)})
    finally:
        print("ended", flush=True)
class Imports:
    def find_spec(self, name, *_):
        return stop() if name == "streamppo.cli" else None
for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(one, signal.default_int_handler if one == signal.SIGINT else signal.SIG_DFL)
if "{moment}" == "find_spec":
    sys.meta_path.insert(0, Imports())
else:
    from streamppo import cli
    cli.configfile.load = stop
from streamppo.__main__ import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program, "run", str(MATH)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (128 + number, "")
    assert done.stdout == ("ended\n" if moment == "main" else "")


@pytest.mark.parametrize("lines", [10, 100_000])
def test_a_reader_that_went_away_ends_the_command_like_any_program_in_a_pipe(lines: int) -> None:
    program = (
        "import sys\nfrom streamppo import cli\n"
        "cli.configfile.load = lambda *_: None\n"
        f"cli.configfile.show = lambda *_: '\\n'.join(map(str, range({lines})))\n"
        "sys.exit(cli.main(['run', 'x.toml', '--dry-run']))\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.stderr, done.returncode) == ("", 141)


CHEAP = {"--version": 0, "--help": 0, "run CONFIG --dry-run": 0, "summary nowhere": 1}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("words", CHEAP)
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&-", ">&- 2>&- <&-"])
def test_closed_standard_streams_change_no_exit_code(words: str, closed: str, tmp_path: Path) -> None:
    line = f"{shlex.join(PROGRAM)} {words.replace('CONFIG', str(MATH))} {closed}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == CHEAP[words]
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert (done.stdout == "") == (">&-" in closed.replace("2>&-", "") or CHEAP[words] != 0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", [words for words, code in CHEAP.items() if code == 0])
def test_output_to_a_full_disk_ends_in_a_sentence(words: str) -> None:
    line = f"{shlex.join(PROGRAM)} {words.replace('CONFIG', str(MATH))} >/dev/full"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "streamppo: standard output cannot be written: its disk is full, or its device fails\n",
    )


def test_nothing_of_a_terminal_goes_into_a_pipe() -> None:
    for words in (["--help"], ["run", "--help"]):
        done = streamppo(*words, COLUMNS="40", TERM="xterm-256color")
        assert done.returncode == 0
        assert "\x1b" not in done.stdout


def shown(columns: int, **environment: str) -> str:
    """Print a table on a terminal of so many columns."""
    program = (
        "from streamppo.commands.console import console, table\nfrom rich.text import Text\n"
        "rows = table('name', 'words'); rows.add_row(Text('a', 'bold red'), 'word ' * 30); console().print(rows)\n"
    )
    reader, writer = pty.openpty()
    settings = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm-256color", **environment}
    with subprocess.Popen([sys.executable, "-c", program], stdout=writer, env=settings) as running:
        os.close(writer)
        found = b""
        while select.select([reader], [], [], 60)[0]:
            try:
                found += os.read(reader, 10_000)
            except OSError:
                break
        running.wait()
    os.close(reader)
    return found.decode()


def test_a_table_fits_the_terminal_and_has_colours_unless_they_are_refused() -> None:
    rows = shown(80)
    assert "\x1b[1;31ma" in rows
    lines = re.sub(r"\x1b\[[0-9;]*m", "", rows).splitlines()
    assert len(lines) > 2 and all(len(line) <= 80 for line in lines)
    assert "\x1b[1;31m" not in shown(80, NO_COLOR="1")


def test_text_with_brackets_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    rows = table("", "")
    rows.add_row("[red]", ":smile: [/]")
    console().print(rows)
    assert capsys.readouterr().out.split() == ["[red]", ":smile:", "[/]"]
