"""Nothing that a policy, a reward or a stranger's folder says is obeyed by a terminal, or passes for a line of ours."""

import logging
import sys
import traceback
import unicodedata
from pathlib import Path

import pytest

from streamppo import process, terminal
from streamppo.commands import console
from streamppo.commands.checks.finding import Finding
from streamppo.commands.look import inspect
from streamppo.commands.start import reward_test
from streamppo.driver.ray import cluster
from streamppo.tasks.rewards.processes import output
from streamppo.types import Reward

HOSTILE = {
    "a colour": "\033[31mred\033[0m",
    "a title": "\033]0;title\a",
    "a link": "\033]8;;http://evil\033\\click\033]8;;\033\\",
    "C1": "\x9b2J\x90\x9d",
    "C0": "\x00\a\b\v\f\x7f",
    "a return": "fine\rwarning: forged",
    "a line": "fine\nstreamppo: forged",
    "another line": "fine\u2028forged\u2029forged\x85forged",
    "bidi": "\u202egpj.exe\u202c\u2066x\u2069\u200f\u061c",
    "no shape": "a\u200b\ufeff\u00ad\U000e0041",
    "half a pair": "\ud83d",
}


def is_shown(text: str) -> bool:
    """No character but the newlines of ours is one that a terminal obeys."""
    return all(one == "\n" or unicodedata.category(one) not in terminal.HARMFUL for one in text)


@pytest.fixture(params=HOSTILE, ids=list(HOSTILE))
def hostile(request: pytest.FixtureRequest) -> str:
    return HOSTILE[request.param]


def test_a_line_stays_one_line_and_a_message_indents_its_further_ones(hostile: str) -> None:
    one, message = terminal.harmless(hostile), terminal.lines(hostile)
    assert is_shown(one) and "\n" not in one and len(one.splitlines()) == 1
    assert is_shown(message) and all(line.startswith("  ") for line in message.split("\n")[1:])


def test_a_log_line_is_harmless_also_with_a_traceback(
    hostile: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("streamppo"), "handlers", [])
    process.log_to_stdout("rollout-0")
    log = logging.getLogger("streamppo.anywhere")
    try:
        raise ValueError(hostile)
    except ValueError:
        log.exception("reward failed: %s", hostile)
    first, *more = capsys.readouterr().out.rstrip("\n").split("\n")
    assert first.startswith("rollout-0: error: reward failed: ") and is_shown(first)
    assert all(line.startswith("  ") and is_shown(line) for line in more)


def test_what_a_command_prints_and_complains_of_is_harmless(hostile: str, capsys: pytest.CaptureFixture[str]) -> None:
    console.echo(f"component {hostile}: 1")
    console.complain(f"TaskError: {hostile}")
    rows = console.table("name", "text")
    rows.add_row(hostile, hostile)
    console.console().print(rows)
    with console.log_to_stderr():
        logging.getLogger("streamppo.anywhere").warning("%s", hostile)
    said = capsys.readouterr()
    assert is_shown(said.out) and is_shown(said.err)
    assert len(said.out.rstrip("\n").split("\n")) == 3
    assert [line for line in said.err.splitlines() if line.startswith("streamppo: forged")] == []


def test_what_rewards_and_actors_print_is_harmless(hostile: str) -> None:
    shown = output._sanitise(hostile.encode(errors="replace")).decode()
    data = {"lines": [hostile, "plain"]}
    cluster._show_lines(data)
    assert is_shown(shown) and is_shown("".join(data["lines"])) and data["lines"][1] == "plain"


def test_a_table_of_rewards_and_one_of_findings_are_harmless(hostile: str, capsys: pytest.CaptureFixture[str]) -> None:
    from streamppo.commands.checks import check

    reward = Reward(score=1.0, components={hostile: 1.0}, explanation=hostile)
    reward_test._print_table(
        [reward_test.TriedCompletion(hostile, reward, "", 0.1), reward_test.TriedCompletion("", None, hostile, 0.1)]
    )
    check.print_table([Finding(hostile, "error", hostile)])
    assert is_shown(capsys.readouterr().out)


def test_an_error_that_nobody_foresaw_is_harmless(hostile: str, capsys: pytest.CaptureFixture[str]) -> None:
    from streamppo import __main__

    try:
        raise ValueError(hostile)
    except ValueError:
        __main__._show(*sys.exc_info())  # pyright: ignore[reportArgumentType]
    assert is_shown(capsys.readouterr().err)
    assert traceback.format_exc() == "NoneType: None\n"


def test_every_line_of_commands_goes_through_one_function() -> None:
    """No command writes to standard output by itself, but for the script that completes commands."""
    commands = Path(inspect.__file__).parent
    writers = [path.name for path in commands.rglob("*.py") if "sys.stdout.write" in path.read_text()]
    assert writers == []
