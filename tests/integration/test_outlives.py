"""Things that a run outlives, or ends of with a reason: its reader, its place, its lines, a process of Ray's own."""

import json
import shutil
from pathlib import Path

import pytest
from test_recovery import replayed, resumed
from test_run import SHORT, family, gone, started, summary, updates, wait_for_updates

from streamppo.telemetry import metrics_file as lines

NOISE = ("Failed to push error", "Traceback", "(raylet)", "WARNING", "ConnectionResetError", "core_worker", "gcs_")
"""Words of Ray's own, and of errors that nobody handled."""


def test_a_run_without_a_reader_goes_on_in_its_log_and_later_from_another_place_with_its_lines_mended(
    tmp_path: Path,
) -> None:
    with started(tmp_path, *SHORT) as process:
        assert process.stdout
        read = [process.stdout.readline() for _ in range(5)]
        process.stdout.close()
        assert process.wait() == 0 and gone(tmp_path)
    run = tmp_path / "math"
    log = (run / "logs" / "driver.log").read_text()
    assert all(read) and summary(tmp_path)["outcome"] == "finished"
    assert "12 updates in" in log and log.rstrip().endswith(f"model: {run / 'final'}")
    assert not [word for word in NOISE if word in log + "".join(read)]

    moved = tmp_path / "moved"
    moved.mkdir()
    shutil.move(run, moved)
    whole = summary(moved)
    kept = (moved / "math" / lines.METRICS).read_text().splitlines()
    broken = ["{" if '"update": 4' in line else line for line in kept if '"update": 7' not in line]
    (moved / "math" / lines.METRICS).write_text("\n".join(broken) + "\n")
    output = resumed(moved, "updates=14")
    assert "the lines of updates 4, 7 were lost, and are made again of their batches" in output
    assert not [word for word in NOISE if word in output]
    again, remade = summary(moved), {line["remade"]: line for line in lines.read(moved / "math") if "remade" in line}
    before = {row["update"]: row for row in map(json.loads, kept) if "update" in row}
    assert sorted(remade) == [4, 7] and again["updates"] == again["pushes"] == 14
    for version, line in remade.items():
        assert {name: before[version][name] for name in line if name not in ("remade", "wall_s")} == {
            name: value for name, value in line.items() if name not in ("remade", "wall_s")
        }
    assert again["tokens_trained"] > whole["tokens_trained"]
    assert "all of them bit for bit as they were" in replayed(moved)


@pytest.mark.slow
def test_a_ray_that_has_lost_its_gcs_ends_the_run_at_once_with_the_reason_and_it_is_resumed(tmp_path: Path) -> None:
    with started(tmp_path, *SHORT, "updates=40", "evaluation.every=0") as process:
        wait_for_updates(tmp_path, 6)
        next(one for one in family(tmp_path) if one.name() == "gcs_server").kill()
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 1 and gone(tmp_path)
    assert "RunError: Ray's gcs_server has died (SIGKILL); resume starts another" in output
    assert "gcs_server has died" in summary(tmp_path)["outcome"]
    resumed(tmp_path)
    assert [row["update"] for row in updates(tmp_path)] == list(range(1, 41))
