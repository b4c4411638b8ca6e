"""A run can be asked where its time goes: by process, by phase, for one update."""

import json
from pathlib import Path

import pytest

from streamppo.cli import main
from streamppo.telemetry import metrics_file
from streamppo.telemetry.phase_times import ELSEWHERE, PerUpdate, per_update

LINES: list[dict[str, object]] = [
    {"phases": "queue", "wall_s": 3.0, "spent": {"process": [1, 2.5, 0.5], "journal": [9, 1.0, 0.4]}},
    # It died, and has another life.
    {"phases": "queue", "wall_s": 5.0, "spent": {"process": [1, 1.0, 1.0], "journal": [1, 1.0, 0.25]}},
    *(
        {"update": n, "wall_s": 10.0 + n, "reward": 0.0, "tokens_trained": 1.0, "tokens_too_old": 0.0}
        | {"wait_s": 0.0, "update_s": 1.0, "push_ms": 0.0, "lag_histogram": {}}
        for n in range(1, 9)
    ),
    {"phases": "queue", "wall_s": 30.0, "spent": {"process": [1, 26.0, 4.0], "journal": [16, 2.0, 1.0]}},
    # It came when four updates were left.
    {"phases": "rollout-1", "wall_s": 30.0, "spent": {"process": [1, 15.5, 2.0], "decode": [40, 1.0, 0.8]}},
    {"phases": "rollout-2", "wall_s": 30.0, "spent": {"process": [1, 0.5, 1.0]}},
    {"phases": "learner-0", "wall_s": 30.0, "spent": {}},
]


def write(folder: Path) -> None:
    (folder / "config.toml").touch()
    (folder / metrics_file.METRICS).write_text("".join(json.dumps(line) + "\n" for line in LINES))


def test_a_phase_is_divided_by_the_updates_that_its_process_has_seen(tmp_path: Path) -> None:
    write(tmp_path)
    found = per_update(metrics_file.read(tmp_path))
    assert found.keys() == {"queue", "rollout-1"}, "the others saw no update, or did not say since when they live"
    # The first line, of the same life, has its start-up.
    assert found["queue"]["journal"] == PerUpdate(15 / 8, 125.0, 93.75)
    assert found["queue"][ELSEWHERE] == PerUpdate(0.0, 0.0, pytest.approx(281.25))
    assert found["rollout-1"]["decode"] == PerUpdate(10.0, 250.0, pytest.approx(200.0))


def test_the_table_has_every_phase_with_its_meaning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    assert main(["inspect", str(tmp_path), "--time"]) == 0
    said = capsys.readouterr().out
    assert "queue: 375.0 ms of CPU for one update" in said
    (journal,) = [line.split() for line in said.splitlines() if line.startswith("  journal")]
    assert journal[:6] == ["journal", "1.9", "125.00", "93.75", "25%", "commit"]


def test_a_run_that_has_told_nothing_yet_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").touch()
    assert main(["inspect", str(tmp_path), "--time"]) == 1
    assert "no process has reported its phases yet" in capsys.readouterr().err
