"""Nothing that a policy, a reward or a stranger's folder says is obeyed by a terminal, or passes for a line of ours."""

import io
import json
import logging
import os
import sys
import traceback
import unicodedata
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ray._private import ray_constants, worker
from ray.experimental.tqdm_ray import RAY_TQDM_MAGIC

from streamppo import process, terminal
from streamppo.commands import console
from streamppo.commands.checks.finding import Finding, print_findings
from streamppo.commands.look import inspect
from streamppo.commands.start import reward_test
from streamppo.driver.ray import cluster
from streamppo.tasks.rewards.processes import template
from streamppo.types import Reward, ScoredText
from streamppo.types.wire import utf8_safe

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
    console.print_error(f"TaskError: {hostile}")
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
    shown = template._sanitise(hostile.encode(errors="replace"), b"reward f: ").decode()
    data = {"lines": [hostile, "plain", "5e1fours"], "actor_name": hostile}
    cluster._show_lines("5e1f", set(), data)
    assert is_shown(shown) and is_shown("".join(data["lines"])) and is_shown(data["actor_name"])
    assert data["lines"][1:] == ["prints: plain", "ours"]


FORGED = ["learner-0: version 3", "warning: forged", "  further", "5e1", "", "reward f: forged", "prints: forged"]
ORDERS = [f"{RAY_TQDM_MAGIC}{{}}", f"{ray_constants.LOG_PREFIX_INFO_MESSAGE}learner-0: version 3"]


@pytest.mark.parametrize("line", [*FORGED, *ORDERS])
def test_no_line_that_an_actor_prints_passes_for_one_of_its_log(line: str) -> None:
    data = {"lines": [line, f" 5e1f{line}"], "pid": 12, "is_err": False}
    cluster._show_lines("5e1f", set(), data)
    out = io.StringIO()
    worker.print_worker_logs(data, out)
    assert len(out.getvalue().splitlines()) == 2
    assert all(" prints: " in one for one in out.getvalue().splitlines())


def test_a_line_of_an_actors_log_has_the_mark_in_every_row_and_the_drivers_has_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(process.MARK, "5e1f")
    for who in ("queue", ""):
        monkeypatch.setattr(logging.getLogger("streamppo"), "handlers", [])
        process.log_to_stdout(who)
        logging.getLogger("streamppo.anywhere").info("one\ntwo")
    rows = capsys.readouterr().out.splitlines()
    assert rows == ["5e1fqueue: one", "5e1f  two", "one", "  two"]
    assert [process.with_origin(row, "5e1f") for row in rows[:2]] == ["queue: one", "  two"]
    assert process.with_origin("queue: one", "") == "prints: queue: one"


ANY = st.text(st.characters(exclude_categories=[]) | st.sampled_from("\ud83d\x1b\u202e\u2028\r\n\x9b"))


@given(ANY)
def test_any_text_of_others_reaches_a_terminal_a_file_and_json(text: str) -> None:
    assert is_shown(terminal.harmless(text)) and is_shown(terminal.lines(text))
    for shown in (terminal.harmless(text), terminal.lines(text), process.with_origin(text, "5e1f"), utf8_safe(text)):
        assert json.loads(json.dumps(shown)) == shown
        assert msgspec.json.decode(msgspec.json.encode(shown)) == shown
        assert shown.encode().decode() == shown


def test_a_long_text_is_cut_and_says_by_how_much() -> None:
    assert terminal.bounded("aaaaa", 3) == "aaa... (2 characters more)"
    assert terminal.bounded("aaa", 3) == "aaa"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ANY, st.sampled_from(["utf-8", "ascii", "latin-1", "cp1252"]))
def test_any_text_is_printed_in_any_encoding(monkeypatch: pytest.MonkeyPatch, text: str, encoding: str) -> None:
    printed = io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding))
        process.escape_unprintable()
        print(text)
        console.echo(text)
        sys.stdout.flush()
        assert printed.getvalue().decode(encoding)


@given(st.lists(st.binary(max_size=40), max_size=20), st.integers(1, 30))
def test_every_line_of_a_reward_says_whose_it_is(pieces: list[bytes], length: int) -> None:
    printed, shown = os.pipe(), os.pipe()
    with mock.patch.object(template, "LINE_BYTES", length):
        for piece in pieces:
            os.write(printed[1], piece)
        os.close(printed[1])
        template._copy_lines(printed[0], shown[1], "mine:f")
    with os.fdopen(shown[0], "rb") as read:
        text = read.read().decode()
    assert is_shown(text) and (not text or text.endswith("\n"))
    assert all(line.startswith("reward mine:f: ") for line in text.splitlines())
    said = b"".join(pieces)
    assert text.count("\n") >= said.count(b"\n") + (not said.endswith(b"\n") and said != b"")


def test_a_table_of_rewards_and_one_of_findings_are_harmless(hostile: str, capsys: pytest.CaptureFixture[str]) -> None:
    reward = Reward(score=1.0, components={hostile: 1.0}, explanation=hostile)
    text = ScoredText(prompt=hostile, completion=hostile, finish="stop", num_tokens=1)
    tried = reward_test.TriedCompletion(text, hostile, reward, "", 0.1)
    reward_test._print_table([tried, tried._replace(text=None, reward=None, reason=hostile)])
    print_findings([Finding(hostile, "error", hostile)])
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


def test_a_table_in_a_file_has_no_padding_at_the_ends_of_lines(capsys: pytest.CaptureFixture[str]) -> None:
    print_findings([Finding("one", "ok", "x" * 300), Finding("two", "ok", "short"), Finding("three", "note", "")])
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["one", "ok", "x" * 300],
        ["two", "ok", "short"],
        ["three", "note"],
    ]
    print_findings([Finding("one", "ok", "x" * 300), Finding("two", "ok", "short")])
    assert [line for line in capsys.readouterr().out.splitlines() if line.endswith(" ")] == []


def test_rays_line_about_a_full_disk_becomes_one_warning(logged: pytest.LogCaptureFixture) -> None:
    line = (
        "[2026-01-31 12:39:33,687 E 1 2] (raylet) file_system_monitor.cc:116: /tmp/ray/session_1 is over 95% full, "
        "available space: 4.2 GB; capacity: 250 GB. Object creation will fail if spilling is required."
    )
    full_disks = set[str]()
    for _ in range(2):
        data: dict[str, Any] = {"pid": "raylet", "lines": [line, "another", "another", line]}
        cluster._show_lines("5e1f", full_disks, data)
        assert data["lines"] == ["another", "another"]
    assert logged.messages == ["/tmp/ray/session_1: the disk is over 95% full (4.2 GB left), and Ray may need it"]
