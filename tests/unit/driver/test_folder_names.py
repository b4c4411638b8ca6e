"""Names of folders that no run can have."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import REPOSITORY

from streamppo import cli
from streamppo.process import SIGNALS


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Restore the signal handlers, which a driver replaces."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("name", [b"caf\xe9", b"\xff\xfe", b"d\xc3"])
@pytest.mark.parametrize("command", [("run",), ("resume",), ("fork", "--at", "4")], ids=lambda words: words[0])
def test_a_path_that_is_not_in_utf_8_is_refused_in_a_sentence(
    command: tuple[str, ...],
    name: bytes,
    exact: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    place = tmp_path / os.fsdecode(name)
    if command[0] == "run":
        words = [str(REPOSITORY / "configs" / "math.toml"), "--runs", str(place)]
    else:
        words = [str(shutil.copytree(exact, place)), *command[1:], *(["updates=9"] if command[0] == "resume" else [])]
    assert cli.main([command[0], *words]) == 1
    assert "a run's folder needs a path in UTF-8: rename it" in capsys.readouterr().err
    assert command[0] != "run" or not place.exists()
