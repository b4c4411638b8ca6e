"""Whole runs for several tests: a short one, the same one resumed elsewhere, and one with a faulty reward.

A test that changes a run's folder copies it. Every test of this file is in one process of `pytest -n`.
"""

import json
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from conftest import SUPPORT
from replay_case import replay
from test_recovery import command, digests, resumed
from test_run import SHORT, finished, gone, started, summary, updates

from streamppo.queue.store import archive
from streamppo.telemetry import metrics_file as lines

NOISE = ("Failed to push error", "Traceback", "(raylet)", "WARNING", "ConnectionResetError", "core_worker", "gcs_")
"""Words of Ray, and of unhandled errors."""
CHANGES = (
    "learner.lr=5e-4",
    "learner.decay=constant",
    "learner.betas=[0.8, 0.99]",
    "algorithm.kl.reward_beta=0.05",
    "rollout.temperature=0.9",
)
LOST = (4, 7)
"""Updates whose lines are lost: one is torn, one is missing."""


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run whose reader leaves after five lines; they are in `read.txt`."""
    folder = tmp_path_factory.mktemp("short")
    with started(folder, *SHORT, "queue.too_old=drop", "queue.max_lag=1") as process:
        assert process.stdout
        (folder / "read.txt").write_text("".join(process.stdout.readline() for _ in range(5)))
        process.stdout.close()
        assert process.wait() == 0 and gone(folder)
    return folder


@pytest.fixture(scope="module")
def longer(short: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the short run in another place, resumed there without two of its lines and with `CHANGES`.

    The output of the resume is in `resumed.txt`.
    """
    folder = copied(short, tmp_path_factory.mktemp("longer"))
    metrics = folder / "math" / lines.METRICS
    torn, missing = (f'"update": {version},' for version in LOST)
    kept = metrics.read_text().splitlines()
    metrics.write_text("\n".join("{" if torn in line else line for line in kept if missing not in line) + "\n")
    (folder / "resumed.txt").write_text(resumed(folder, "updates=16", *CHANGES))
    return folder


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run with a reward of every fault; its output is in `run.txt`."""
    folder = tmp_path_factory.mktemp("faulty")
    reward = ("reward.function=bad_rewards:of_every_kind", "reward.timeout_s=0.5")
    settings = ("queue.too_old=wait", "queue.max_lag=1", "evaluation.actors=1")
    (folder / "run.txt").write_text(finished(folder, *SHORT, *reward, *settings))
    return folder


@pytest.mark.slow
def test_an_actor_of_its_own_evaluates_and_no_rollout_actor_samples_less_for_it(faulty: Path) -> None:
    found = summary(faulty)
    assert "evaluation-0: completions end at" in (faulty / "run.txt").read_text()
    assert [version for version, _ in found["evaluations"]][:1] == [0] and len(found["evaluations"]) > 1
    assert [engine["actor"] for engine in found["engines"]["actors"]] == ["rollout-0"], "no tokens of evaluations"


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder / "math", to / "math")
    return to


def test_a_run_without_a_reader_goes_on_in_its_log(short: Path) -> None:
    log, read = (short / "math" / "logs" / "driver.log").read_text(), (short / "read.txt").read_text()
    assert len(read.splitlines()) == 5 and summary(short)["outcome"] == "finished"
    assert "12 updates in" in log and log.rstrip().endswith(f"model: {short / 'math' / 'final'}")
    assert not [word for word in NOISE if word in log + read]


@pytest.mark.parametrize("too_old", ["drop", pytest.param("wait", marks=pytest.mark.slow)])
def test_the_other_choices_for_old_tokens_run_and_keep_the_bound(too_old: str, request: pytest.FixtureRequest) -> None:
    found = summary(request.getfixturevalue("short" if too_old == "drop" else "faulty"))
    assert found["lag"]["max"] <= 1
    assert found["trajectories"] == 12 * 64


def test_a_resumed_run_goes_on_from_the_last_checkpoint(longer: Path) -> None:
    rows, found = updates(longer), summary(longer)
    assert [row["update"] for row in rows] == [version for version in range(1, 17) if version not in LOST]
    assert (found["updates"], found["pushes"], found["parts"], found["trajectories"]) == (16, 16, 2, 16 * 64)
    assert found["evaluations"][0][0] == 0
    assert found["wall_s"] > rows[-1]["wall_s"] > rows[-4]["wall_s"] > rows[-5]["wall_s"]
    assert found["tokens_trained"] == sum(found["lag"]["histogram"].values())


def test_a_run_goes_on_from_another_place_with_its_lines_made_again(short: Path, longer: Path) -> None:
    output = (longer / "resumed.txt").read_text()
    assert "the lines of updates 4, 7 were lost and are recomputed from their batches" in output
    assert not [word for word in NOISE if word in output]
    remade = {line["remade"]: line for line in lines.read(longer / "math") if "remade" in line}
    before = {row["update"]: row for row in updates(short)}
    assert sorted(remade) == list(LOST)
    for version, line in remade.items():
        assert {name: before[version][name] for name in line if name not in ("remade", "wall_s")} == {
            name: value for name, value in line.items() if name not in ("remade", "wall_s")
        }
    tokens = [row["tokens"] for row in (*updates(longer), *remade.values())]
    assert summary(longer)["tokens_trained"] == sum(tokens) > summary(short)["tokens_trained"]


@pytest.mark.slow
def test_replay_compares_every_version_and_a_what_if_puts_both_curves_into_one_report(
    longer: Path, tmp_path: Path
) -> None:
    run = copied(longer, tmp_path) / "math"
    rows = updates(tmp_path)[-5:]
    assert [row["lr"] for row in rows[1:]] == [5e-4] * 4
    assert [row.get("kl_beta") for row in rows[:2]] == [None, 0.05]
    done = replay(run)
    assert "17 versions, all of them bit for bit as recorded" in done.stdout, done.stderr
    done = replay(run, "--to", "6", "--set", "learner.lr=1e-5")
    assert done.returncode == 0, done.stderr
    report = json.loads((run / "replays" / "2.json").read_text())
    assert report["set"] == ["learner.lr=1e-5"]
    assert report["same"] == [0], "other weights from the first update on"
    assert [row["version"] for row in report["updates"]] == list(range(1, 7))
    last: dict[str, Any] = report["updates"][-1]
    assert last["recorded"]["tokens"] == last["replayed"]["tokens"]
    assert last["recorded"]["behavior_kl"] != last["replayed"]["behavior_kl"]
    assert replay(run, "--set", "updates=3").returncode == 0
    shorter = json.loads((run / "replays" / "3.json").read_text())
    assert [row["version"] for row in shorter["updates"]] == [1, 2, 3]
    shown = command("inspect", str(run), "--update", "1", "--n", "2").stdout
    assert shown.startswith("update 0 -> 1: 64 trajectories, mean reward ")
    assert "no token is too old" in shown.splitlines()[0]
    assert shown.count("completion  ") == shown.count("values  ") == 2


@pytest.mark.slow
@pytest.mark.parametrize("damaged", ["__0_0.distcp", ".metadata", "manifest.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(short: Path, tmp_path: Path, damaged: str) -> None:
    copied(short, tmp_path)
    before, newest = digests(tmp_path), tmp_path / "math" / "checkpoints" / "00000012"
    data = bytearray((newest / damaged).read_bytes())
    data[random.Random(1).randrange(len(data))] ^= 1
    (newest / damaged).write_bytes(data)
    output = resumed(tmp_path, "updates=14")
    assert f"{newest / damaged}: " in output
    assert "moved to 00000012.damaged, continuing from the checkpoint before it" in output
    assert summary(tmp_path)["redone"] == 4, "from version 8 to 12"
    after = digests(tmp_path)
    assert {version: after[version] for version in before} == before


@pytest.mark.slow
def test_a_journal_of_another_run_is_named_by_the_resume(short: Path, tmp_path: Path) -> None:
    path = copied(short, tmp_path) / "math" / "journal.sqlite"
    other = command("resume", str(path.parent), "updates=100", "queue.samples_per_prompt=2")
    assert other.returncode == 1
    assert f"JournalError: {path}: of another run" in other.stderr


def test_a_journal_that_cannot_be_opened_is_named_by_the_resume(short: Path, tmp_path: Path) -> None:
    path = copied(short, tmp_path) / "math" / "journal.sqlite"
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("update state set checksum = checksum + 1 where name = 'counters'")
    damaged = command("resume", str(path.parent), "updates=100")
    assert damaged.returncode == 1
    assert f"JournalError: {path}: damaged: a row of 'state'" in damaged.stderr


def test_damage_in_the_archive_is_named_by_whoever_needs_it(short: Path, tmp_path: Path) -> None:
    run = copied(short, tmp_path) / "math"
    path = archive.open(run).path(5)
    path.write_bytes(path.read_bytes()[:-1])
    done = replay(run)
    assert done.returncode == 1
    assert f"{path}: damaged" in done.stderr


@pytest.mark.slow
def test_a_reward_of_every_fault_is_survived_and_its_reasons_are_in_log_and_report(faulty: Path) -> None:
    found, output = summary(faulty), (faulty / "run.txt").read_text()
    assert found["failed"]["reward"] > 0 and found["trajectories"] == 12 * 64, "what failed is sampled again"
    (scorer,) = found["engines"]["scorers"]
    assert scorer["respawns"] > 0
    source = (SUPPORT / "bad_rewards.py").read_text().splitlines()
    raised = 1 + next(number for number, line in enumerate(source) if "raise ValueError" in line)
    for reason in (
        f"bad_rewards.py:{raised}: ValueError: no such answer",
        "its process died: exit code 3",
        "returned nan, not a finite number",
    ):
        assert scorer["reasons"][reason] > 0
        assert f"reward failed: {reason}" in output
