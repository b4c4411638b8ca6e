"""A file that a user names for a result: refused before the work, replaced whole, or written as a pipe."""

import errno
import itertools
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest
from conftest import MATH

from streamppo import durable
from streamppo.cli import main
from streamppo.commands.plan import measured

COMMANDS = {
    "trace": ("trace", "RUN", "--to", "OUTPUT"),
    "report": ("report", "RUN", "--to", "OUTPUT"),
    "plan on this machine": ("plan", str(MATH), "--measured", "RUN", "--json", "OUTPUT"),
    "plan on GPUs": ("plan", str(MATH), "--gpus", "8", "--json", "OUTPUT"),
    "bundle": ("bundle", "RUN", "--update", "5", "--to", "OUTPUT"),
    "data": ("data", "gsm8k", "--from", "ROWS", "--to", "OUTPUT"),
}
PLACES = {
    "a folder": "folder",
    "in no folder": "no such folder",
    "in a file": "no such folder",
    "beside a file of its temporary name": "exists: delete it",
}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """The original files of a data set."""
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "train.jsonl").write_text(json.dumps({"question": "How many?", "answer": "#### 1"}) + "\n")
    return folder


def words(command: str, run: Path, rows: Path, to: Path) -> list[str]:
    return [{"RUN": str(run), "ROWS": str(rows), "OUTPUT": str(to)}.get(word, word) for word in COMMANDS[command]]


@pytest.mark.parametrize("case", list(itertools.product(COMMANDS, PLACES)), ids=": ".join)
def test_a_place_that_takes_no_file_is_refused_before_any_work(
    case: tuple[str, str],
    exact: Path,
    rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command, place = case

    def work(*_: object) -> NoReturn:
        raise AssertionError("it worked before it looked at the place")

    monkeypatch.setattr(measured, "read", work)
    to = {"in no folder": tmp_path / "nowhere" / "x", "in a file": MATH / "x"}.get(place, tmp_path / "x")
    if place == "a folder":
        to.mkdir()
    elif place == "beside a file of its temporary name":
        durable.aside(to).write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    code = main(words(command, exact, rows, to))
    if command == "data" and place == "in no folder":
        assert code == 0 and to.exists(), "it makes the folder"
        return
    said = capsys.readouterr().err
    assert code in (1, 2) and "Traceback" not in said
    wanted = {("bundle", "a folder"): "already exists", ("data", "in a file"): "cannot be written"}
    assert wanted.get((command, place), PLACES[place]) in said
    assert sorted(tmp_path.rglob("*")) == before
    assert not durable.aside(to).exists() or durable.aside(to).read_text() == "mine"


@pytest.mark.parametrize("command", ["trace", "report", "data"])
def test_an_earlier_result_stays_if_the_disk_is_full(
    command: str,
    exact: Path,
    rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    to = tmp_path / "x"
    to.write_text("earlier")

    def full(_: Path) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(durable, "flush", full)
    assert main(words(command, exact, rows, to)) in (1, 2)
    assert "x: cannot be written: [Errno 28]" in capsys.readouterr().err
    assert to.read_text() == "earlier"


@pytest.mark.parametrize(
    ("command", "begin"), [("trace", b'{"traceEvents"'), ("report", b"<!doctype"), ("data", b"PAR1")]
)
def test_a_pipe_gets_the_result_and_a_link_stays_one(
    command: str, begin: bytes, exact: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe, link, target = (tmp_path / name for name in ("pipe", "link", "target"))
    os.mkfifo(pipe)
    link.symlink_to(target)
    with ThreadPoolExecutor(1) as pool:
        content = pool.submit(pipe.read_bytes)
        assert main(words(command, exact, rows, pipe)) == 0
        assert content.result(60).lower().startswith(begin.lower())
    # The pipe may be standard output.
    printed = capsys.readouterr()
    assert not printed.out and str(pipe) in printed.err
    assert main(words(command, exact, rows, link)) == 0
    assert str(link) in capsys.readouterr().out
    assert link.is_symlink() and target.read_bytes().lower().startswith(begin.lower())
