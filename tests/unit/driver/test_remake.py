"""Lines of metrics.jsonl that were deleted or damaged are recomputed from the archive, and hold nothing back."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import COUNTERS, trajectory

from streamppo.config.sections import Config
from streamppo.driver import rebuild_metrics
from streamppo.queue.rules.records import Changes, PublishedVersion
from streamppo.queue.store.archive import Archive
from streamppo.queue.store.journal import Journal
from streamppo.telemetry import metrics_file as lines
from streamppo.telemetry.metrics_file import FINISHED
from streamppo.telemetry.record import RunRecord
from streamppo.types import Batch, Trajectory, UpdateReport

Load = Callable[..., Config]
UPDATES = 6
TIMES = {"entropy": 1.0, "ess": 1.0, "update_s": 2.0, "wait_s": 1.0, "push_ms": 3.0}
KNOWN = {"reward": 0.25, "length": 2.5, "truncated": 0.5, "tokens": 5.0, "tokens_too_old": 2.0, "tokens_trained": 3.0}
KNOWN |= {"equal_groups": 1.0, "lag_mean": 1.4, "lag_max": 3.0, "reward_right": 0.5}
MASKED = ("algorithm.advantage={kind='grpo'}", "queue.samples_per_prompt=2", "algorithm.zero_variance=mask")
LAGS = {"0": 2, "1": 1, "3": 2}


def batch(version: int) -> Batch:
    """Two trajectories: three tokens of which one was not sampled, and three of lags 3, 3 and 0 at `max_lag` 1."""
    rewards = {"components": {"right": 0.5}}
    one = trajectory([1, 2, 3], versions=[version - 1, version, version], mask=[True, False, True], reward=0.0)
    other = trajectory([1, 2, 3], versions=[version - 3, version - 3, version], number=1, reward=0.5, finish="length")
    both: tuple[Trajectory, ...] = tuple(msgspec.structs.replace(part, **rewards) for part in (one, other))
    return Batch(version=version, min_version=version - 1, trajectories=both)


def report(version: int) -> UpdateReport:
    histogram = {int(lag): count for lag, count in LAGS.items()}
    return UpdateReport(version=version, metrics={**TIMES, **KNOWN}, lag_histogram=histogram)


@pytest.fixture
def run(tmp_path: Path, math_config: Load) -> Path:
    """A run that was killed after its last update, with journal, archive and all lines."""
    journal, archive = Journal(tmp_path / "journal.sqlite"), Archive(tmp_path / "archive", {})
    journal.configure(0, msgspec.msgpack.encode(math_config()))
    journal.write(Changes(COUNTERS), [PublishedVersion(version=0, digest="0", archived=None)])
    record = RunRecord(tmp_path, 0.0, seed=1, updates=UPDATES)
    for version in range(1, UPDATES + 1):
        made = PublishedVersion(version=version, digest="d", archived=archive.write(batch(version - 1)))
        journal.write(Changes(COUNTERS), [made], archive.settle)
        record.update(report(version))
    journal.close()
    record._file.close()
    return tmp_path


def damage(run: Path, *, deleted: list[int], damaged: list[int]) -> None:
    """Delete or damage the lines of these updates."""
    kept = [
        "{" if line.get("update") in damaged else json.dumps(line)
        for line in map(json.loads, (run / lines.METRICS).read_text().splitlines())
        if line.get("update") not in deleted
    ]
    (run / lines.METRICS).write_text("".join(f"{line}\n" for line in kept))


def go_on(run: Path) -> dict[str, Any]:
    """Another part, which begins with the newest version and finishes; its summary."""
    record = RunRecord(run, 0.0, seed=1, updates=UPDATES)
    record.begin(UPDATES)
    rebuild_metrics.write_lost_lines(record, run)
    record.close(FINISHED, None, [])
    return json.loads((run / "summary.json").read_text())


def remade(run: Path) -> dict[int, dict[str, Any]]:
    return {line["remade"]: dict(line) for line in lines.read(run) if "remade" in line}


def test_lines_that_are_lost_are_made_again_as_far_as_the_batches_tell(
    run: Path, logged: pytest.LogCaptureFixture
) -> None:
    whole = go_on(run)
    assert remade(run) == {}
    damage(run, deleted=[1, 6], damaged=[3, 4])
    again = go_on(run)
    found = remade(run)
    assert sorted(found) == [1, 3, 4, 6]
    for line in found.values():
        assert {name: line[name] for name in KNOWN} == pytest.approx(KNOWN)
        assert line["lag_histogram"] == LAGS and not line.keys() & TIMES.keys()
    assert "the lines of updates 1, 3 to 4, 6 were lost and are recomputed from their batches" in logged.text
    for name in ("updates", "reward", "lag", "trained_lag", "tokens_trained", "pushes", "push_ms"):
        assert again[name] == whole[name], name


def test_a_line_is_made_again_once(run: Path) -> None:
    damage(run, deleted=[2], damaged=[])
    go_on(run)
    go_on(run)
    assert [line for line in lines.read(run) if "remade" in line] == [remade(run)[2]]


def test_a_file_that_is_gone_as_a_whole_is_made_again(run: Path) -> None:
    (run / lines.METRICS).unlink()
    assert go_on(run)["updates"] == UPDATES
    assert sorted(remade(run)) == list(range(1, UPDATES + 1))


def test_groups_that_were_left_out_of_the_loss_are_left_out_again(run: Path, math_config: Load) -> None:
    journal = Journal(run / "journal.sqlite")
    # From the third update on, no trajectory has another one of its prompt to differ from.
    journal.configure(2, msgspec.msgpack.encode(math_config(*MASKED)))
    journal.close()
    (run / lines.METRICS).unlink()
    go_on(run)
    trained = [remade(run)[version]["tokens_trained"] for version in range(1, UPDATES + 1)]
    assert trained == [3.0] * 2 + [0.0] * 4


def test_lines_of_batches_that_are_gone_are_named_and_hold_nothing_back(
    run: Path, logged: pytest.LogCaptureFixture
) -> None:
    damage(run, deleted=[2], damaged=[3])
    (run / "archive" / "00000002.zarr.zip").write_bytes(b"damaged")
    go_on(run)
    assert sorted(remade(run)) == [2]
    assert "the line of update 3 is lost: " in logged.text and "damaged: its SHA-256" in logged.text
    for path in run.glob("journal*"):
        path.unlink()
    assert go_on(run)["updates"] == UPDATES
    assert "the lines of updates 3 are lost: " in logged.text
