"""metrics.jsonl during its writing: each line is read once, whole, and stays."""

import io
import json
import os
from pathlib import Path

import pytest

from streamppo import durable
from streamppo.telemetry import metrics_file
from streamppo.telemetry.metrics_file import METRICS, LineReader


def queue(number: int) -> str:
    return json.dumps({"queue": number, "wall_s": 1.0, "in_flight": 0}) + "\n"


def add(run: Path, text: str) -> None:
    with (run / METRICS).open("a") as file:
        file.write(text)


@pytest.fixture
def follower(tmp_path: Path) -> LineReader:
    add(tmp_path, queue(1) + queue(2))
    found = LineReader(tmp_path)
    assert [line.get("queue") for line in found.read()] == [1, 2]
    return found


def test_a_line_that_is_being_written_is_read_when_it_is_whole(
    tmp_path: Path, follower: LineReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rest, and the next line, come between two reads of one look."""

    class Growing(io.BytesIO):
        def readlines(self, most: int = -1, /) -> list[bytes]:
            return [queue(3).encode(), queue(4)[:9].encode(), queue(4)[9:].encode(), queue(5).encode()]

        def fileno(self) -> int:
            return os.open(tmp_path / METRICS, os.O_RDONLY)

    add(tmp_path, queue(3) + queue(4) + queue(5))
    with monkeypatch.context() as patch:
        patch.setattr(durable, "reading", lambda *_, **__: Growing())
        assert [line.get("queue") for line in follower.read()] == [3]
    assert [line.get("queue") for line in follower.read()] == [4, 5]
    assert follower.content.damage == []


def test_only_new_bytes_are_read(tmp_path: Path, follower: LineReader) -> None:
    path = tmp_path / METRICS
    # In its place, with as many bytes: a second reading finds the damage.
    with path.open("r+b") as file:
        file.write(b"x" * 10)
    add(tmp_path, queue(3))
    assert [line.get("queue") for line in follower.read()] == [3]
    assert [line.get("queue") for line in follower.content.lines] == [1, 2, 3]
    assert follower.content.damage == [] and len(metrics_file.content(tmp_path).damage) == 1
    assert follower.read() == []


def test_a_line_is_read_once_it_is_whole_and_a_damaged_one_is_named(tmp_path: Path, follower: LineReader) -> None:
    text = queue(3)
    add(tmp_path, text[:9])
    assert follower.read() == []
    add(tmp_path, text[9:] + "{]\n" + queue(4))
    assert [line.get("queue") for line in follower.read()] == [3, 4]
    assert follower.content.damage == [f"{tmp_path / METRICS}: line 4 is damaged: it is left out"]


def test_what_was_read_stays_when_the_file_goes_and_a_new_one_is_read_from_its_begin(
    tmp_path: Path, follower: LineReader
) -> None:
    path = tmp_path / METRICS
    path.rename(tmp_path / "gone")
    assert follower.read() == [] and len(follower.content.lines) == 2
    add(tmp_path, queue(7) + queue(8) + queue(9))
    assert [line.get("queue") for line in follower.read()] == [7, 8, 9]
    assert (len(follower.content.lines), follower.times_begun) == (3, 2)


def test_a_file_that_became_shorter_is_read_from_its_begin(tmp_path: Path, follower: LineReader) -> None:
    os.truncate(tmp_path / METRICS, len(queue(1)))
    assert [line.get("queue") for line in follower.read()] == [1]
    assert len(follower.content.lines) == 1


@pytest.mark.parametrize(
    "line",
    [
        '{"end": "finished", "wall_s": %s}',
        '{"queue": 1, "wall_s": %s, "in_flight": 0}',
        '{"update": 1, "wall_s": 1, "tokens_trained": 1, "tokens_too_old": %s, "wait_s": 1, "update_s": 1, '
        '"push_ms": 1, "lag_histogram": {}}',
    ],
)
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e300"])
def test_a_number_that_cannot_be_rounded_is_damage(line: str, number: str) -> None:
    assert metrics_file.parse((line % "5.5").encode()) is not None
    assert metrics_file.parse((line % number).encode()) is None


@pytest.mark.parametrize("count", [-1, -(2**63), 2**63, 1.5])
def test_a_count_that_no_run_has_is_damage(count: float) -> None:
    engine = {"engine": "a", "wall_s": 1.0, "version": 1, "tokens": 8, "busy_s": 1.0, "idle_s": 1.0, "sampled": None}
    numbers = dict.fromkeys(("wall_s", "tokens_trained", "tokens_too_old", "wait_s", "update_s", "push_ms"), 1.0)
    assert metrics_file.is_line(engine)
    assert not metrics_file.is_line({**engine, "tokens": count})
    assert not metrics_file.is_line({**engine, "kv_ages": {"0": count}})
    assert not metrics_file.is_line({"update": 1, **numbers, "lag_histogram": {"0": 4, "1": count}})


@pytest.mark.parametrize(("lag", "is_one"), [("0", True), ("-3", True), ("x", False), ("1e3", False), ("", False)])
def test_a_lag_is_a_whole_number(lag: str, is_one: bool) -> None:
    numbers = dict.fromkeys(("wall_s", "tokens_trained", "tokens_too_old", "wait_s", "update_s", "push_ms"), 1.0)
    assert metrics_file.is_line({"update": 1, **numbers, "lag_histogram": {lag: 1}}) is is_one
