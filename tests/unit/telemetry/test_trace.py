"""A run's lines as a trace: slices of a lane lie side by side or inside one another, and counters are rates."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamppo.cli import main
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.telemetry import timeline, trace
from streamppo.telemetry.metrics_file import METRICS

UPDATE = {"reward": 0.5, "tokens_trained": 9.0, "tokens_too_old": 0.0, "lag_histogram": {"1": 9}, "lag_mean": 1.0}
LINES: list[Any] = [
    {"part": 1, "wall_s": 0.5, "version": 0},
    {"phases": "queue", "wall_s": 1.0, "spent": {"process": [1, 1.0, 0.5], "journal": [3, 0.1, 0.1]}},
    {"engine": "rollout-0", "wall_s": 1.0, "version": 0, "tokens": 100, "busy_s": 1, "idle_s": 0, "sampled": None},
    {"queue": 7, "wall_s": 1.5, "in_flight": 5},
    {"update": 1, "wall_s": 4.0, "wait_s": 1.0, "score_s": 0.5, "train_s": 1.0, "update_s": 3.0, "push_ms": 50}
    | UPDATE,
    # By its own clock it began before the one before had ended; its push takes longer than itself.
    {"update": 2, "wall_s": 6.0, "wait_s": 0.0, "score_s": 0.5, "train_s": 9.0, "update_s": 2.01, "push_ms": 5e3}
    | UPDATE,
    {"update": 3, "wall_s": 7.0, "wait_s": 0.0, "train_s": 0.25, "update_s": 1.0, "push_ms": 100} | UPDATE,
    {"evaluation": 3, "wall_s": 7.5, "accuracy": None, "count": 0, "failed": 4, "versions": [3, 3]},
    {"restart": "rollout-0", "wall_s": 8.0, "reason": "killed"},
    {"engine": "rollout-0", "wall_s": 9.0, "version": 3, "tokens": 500, "busy_s": 8, "idle_s": 0, "sampled": None},
    {"phases": "queue", "wall_s": 9.0, "spent": {"process": [1, 9.0, 4.0], "journal": [9, 0.9, 0.5]}},
    {"engine": "rollout-0", "wall_s": 10.0, "version": 3, "tokens": 20, "busy_s": 1, "idle_s": 0, "sampled": None},
    {"phases": "queue", "wall_s": 10.0, "spent": {"process": [1, 0.5, 0.1], "journal": [1, 0.01, 0.01]}},
    {"end": "finished", "wall_s": 11.0},
]


def slices(lane: str) -> list[tuple[str, float, float]]:
    """Name, first and last second of each slice, in order."""
    found = [one for one in trace.events(LINES, "math") if one["ph"] == "X" and one["tid"] == trace.LANES.index(lane)]
    return [(one["name"], one["ts"] / 1e6, (one["ts"] + one["dur"]) / 1e6) for one in found]  # type: ignore[operator]


def test_an_update_has_its_wait_its_scoring_and_its_training_inside() -> None:
    assert slices("learner") == [
        ("update 1", 1.0, 4.0),
        ("wait", 1.0, 2.0),
        ("score", 2.0, 2.5),
        ("train", 2.5, 3.5),
        ("update 2", 4.0, 6.0),
        ("score", 4.0, 4.5),
        ("train", 4.5, 6.0),
        ("update 3", 6.0, 7.0),
        ("train", 6.0, 6.25),
    ]


def test_pushes_come_one_after_another() -> None:
    assert slices("push") == [("version 0", 1.0, 1.05), ("version 1", 4.0, 9.0), ("version 2", 9.0, 9.1)]


def test_counters_are_rates_since_the_line_before_or_since_an_actor_began_anew() -> None:
    found = [(one["name"], one["ts"], one["args"]) for one in trace.events(LINES, "math") if one["ph"] == "C"]
    assert ("queue", 1_500_000, {"ready": 7, "being sampled": 5}) in found
    assert [one for one in found if "rollout-0" in str(one[0])] == [
        ("rollout-0: tokens a second", 0, {"tokens": 100.0}),
        ("rollout-0: tokens a second", 1_000_000, {"tokens": 50.0}),
        ("rollout-0: tokens a second", 9_000_000, {"tokens": 20.0}),
    ]
    ((_, at, journal),) = [one for one in found if "seconds a second" in str(one[0])]
    assert at == 1_000_000 and journal == {"journal": pytest.approx(0.1)}


def test_events_are_in_the_order_of_their_begin_and_name_everything_that_happened() -> None:
    events = trace.events(LINES, "math")
    times = [one["ts"] for one in events]
    assert times == sorted(times)  # type: ignore[type-var]
    assert [one["name"] for one in events if one["ph"] == "i"] == [
        "part 1 begins at version 0",
        "version 3: no score",
        "rollout-0: killed",
        "ends: finished",
    ]


def test_the_command_writes_a_file_that_a_reader_of_json_reads(
    tmp_path: Path, math_config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config: Config = math_config()
    run, to = tmp_path / "run", tmp_path / "trace.json"
    run.mkdir()
    configfile.save(config, run)
    assert main(["trace", str(run), "--to", str(to)]) == 1
    assert "metrics.jsonl has no line yet" in capsys.readouterr().err
    (run / METRICS).write_text("".join(json.dumps(line) + "\n" for line in LINES))
    assert main(["trace", str(run), "--to", str(to)]) == 0
    assert json.loads(to.read_text())["traceEvents"] == trace.events(LINES, "run")
    # The gradient of a step that was left out is not finite, and NaN is not JSON.
    (run / METRICS).write_text("".join(json.dumps({**line, "grad_norm": float("nan")}) + "\n" for line in LINES))
    assert main(["trace", str(run), "--to", str(to)]) == 0
    msgspec.json.decode(to.read_bytes())
    assert main(["trace", str(run), "--to", str(tmp_path / "nowhere" / "trace.json")]) == 1


def test_an_engine_that_began_anew_has_no_negative_time_even_if_it_has_sampled_more_than_before() -> None:
    before, after = (
        {"engine": "rollout-0", "version": 0, "sampled": None, "tokens": tokens, "busy_s": busy_s, "idle_s": 1.0}
        for tokens, busy_s in ((100, 7.0), (150, 4.0))
    )
    lines: list[Any] = [{**before, "wall_s": 10.0}, {**after, "wall_s": 20.0}]
    (_, interval) = timeline.engine_intervals(lines)
    assert (interval.tokens, interval.lived_s, interval.idle) == (150, 5.0, 0.2)
