"""kill -9, damage and full disks against the real command: nothing lost, nothing twice, the same weights."""

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import replay_case
import slow_loss
from conftest import MATH, REPOSITORY, SUPPORT, save_reward_model
from ray.cluster_utils import Cluster
from test_run import (
    SHORT,
    family,
    finished,
    gone,
    named,
    started,
    summary,
    titled,
    updates,
    wait_for_line,
    wait_for_updates,
)

from streamppo.queue.store import archive
from streamppo.queue.store.journal import Journal
from streamppo.tasks.library.arithmetic import ALPHABET
from streamppo.telemetry import metrics_file as lines

sys.path.insert(0, str(REPOSITORY))

from benchmarks.faults import chaos

TWO_RANKS_WITH_DELTAS = (
    "learner.ranks=2",
    "queue.max_lag=0",
    "learner.deltas=on",
    "model.dtype=bfloat16",
    "learner.lr=1e-6",
)
RPC_FAILURES = {
    "CoreWorkerService.grpc_client.PushTask": {
        "num_failures": 20,
        "req_failure_prob": 3,
        "resp_failure_prob": 3,
        "in_flight_failure_prob": 3,
    }
}


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """One command of streamppo, to its end."""
    words = [sys.executable, "-m", "streamppo", *arguments]
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{SUPPORT}"}
    return subprocess.run(words, capture_output=True, text=True, check=False, env=environment)


def resumed(folder: Path, *overrides: str) -> str:
    done = command("resume", str(folder / "math"), *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def replayed(folder: Path) -> str:
    done = replay_case.replay(folder / "math")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def digests(folder: Path) -> dict[int, str]:
    journal = Journal.open_run(folder / "math")
    made = journal.versions()
    journal.close()
    return {version: one.digest for version, one in made.items()}


def all_accounted(run: Path) -> chaos.Trial:
    trial = chaos.account(run, [], replay_case.succeeds)
    assert (trial.lost, trial.twice) == (0, 0)
    assert trial.replayed
    return trial


# --- kills ---------------------------------------------------------------------------------------------------


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kinds", "overrides"),
    [
        pytest.param(
            ["queue", "rollout", "learner", "rollout", "queue", "driver"],
            ("rollout.actors=2",),
            id="two-actors",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["queue", "rollout", "learner", "driver", "rollout", "queue"],
            ("rollout.actors=2", "queue.max_lag=2", "queue.segments={}", "queue.too_old=mask"),
            id="segments",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["learner", "driver", "queue"],
            TWO_RANKS_WITH_DELTAS,
            id="two-ranks-with-deltas",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["learner", "rollout", "driver", "queue"],
            ("learner.transport={kind='folder'}", *TWO_RANKS_WITH_DELTAS),
            id="weights-in-a-folder",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["learner", "rollout", "driver", "queue"],
            ("learner.transport={kind='nixl'}", *TWO_RANKS_WITH_DELTAS),
            id="weights-by-nixl",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(find_spec("nixl") is None, reason="the extra `nixl` is not installed"),
            ],
        ),
        pytest.param(
            ["shard", "rollout", "template", "learner", "queue", "driver"],
            ("queue.shards=2", *replay_case.STEERED_SEGMENTS),
            id="every-kind",
        ),
        pytest.param(
            ["shard", "queue", "learner", "shard", "driver"],
            ("queue.shards=3", "learner.ranks=2", "queue.max_lag=1"),
            id="a-queue-with-shards",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["shard", "rollout", "queue", "shard", "driver"],
            ("queue.shards=2", "rollout.actors=2", "queue.max_lag=2", "queue.segments={}", "queue.too_old=mask"),
            id="segments-in-shards",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["learner", "driver"],
            ("learner.ranks=4", "learner.mesh.replicate=2", "queue.max_lag=1"),
            id="two-copies-of-two-ranks",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["learner", "driver"],
            ("learner.ranks=2", "learner.mesh.context=2", "queue.max_lag=1"),
            id="rows-in-two-slices",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["learner", "driver"],
            ("learner.ranks=2", "learner.mesh.tensor=2", "queue.max_lag=1"),
            id="weights-cut-in-two",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_dozen_kills_lose_nothing_and_train_nothing_twice(
    tmp_path: Path, kinds: list[str], overrides: tuple[str, ...]
) -> None:
    trial = chaos.trial(
        MATH,
        tmp_path,
        ("updates=40", "model.tiny.max_steps=3", *overrides),
        kinds,
        seed=4,
        replays=replay_case.succeeds,
    )
    assert [kill.kind for kill in trial.kills] == kinds
    assert (trial.lost, trial.twice) == (0, 0)
    assert trial.consumed == 40 * 64
    assert trial.replayed, "the weights are not those that the archive gives"
    if replay_case.STEERED[0] in overrides:
        assert len(replay_case.decisions(tmp_path / "chaos")) > 1, "nothing was steered"
    if "learner.deltas=on" in overrides:
        pushed = [row["push_mib"] for row in updates(tmp_path, "chaos")]
        assert statistics.median(pushed) < max(pushed) / 20, "versions went as deltas"
    assert not (tmp_path / "chaos" / "weights").exists(), "a run that has ended needs no weights on their way"


@pytest.mark.slow
def test_a_rank_in_a_long_update_is_not_silent_and_one_that_hangs_is_replaced(tmp_path: Path) -> None:
    loss = f"algorithm.policy_loss={{kind='function', function='{SUPPORT / 'slow_loss.py'}:loss'}}"
    with started(tmp_path, *SHORT, "updates=100000", "watchdog.heartbeat_s=10", loss) as process:
        wait_for_updates(tmp_path, slow_loss.SLOW_CALL)
        stopped = named(tmp_path, "ray::Rank")
        stopped.send_signal(signal.SIGSTOP)
        while stopped.is_running():
            time.sleep(0.1)
        wait_for_updates(tmp_path, len(updates(tmp_path)) + 1)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        assert output.count("silent for") == 1, output
        assert "learner-0: silent for more than 10 s; starting learner again" in output
        assert gone(tmp_path), [one.cmdline() for one in family(tmp_path)]
    assert all_accounted(tmp_path / "math").consumed == summary(tmp_path)["updates"] * 64


@pytest.mark.slow
def test_rollout_actors_come_and_go_while_the_run_trains(tmp_path: Path) -> None:
    run = tmp_path / "math"
    with started(tmp_path, *SHORT, "updates=100000") as process:
        wait_for_updates(tmp_path, 2)
        assert scaled(run, 3) == f"{run}: rollout actors: 3, before: 1\n"
        wait_for_batches_by(run, {"rollout-0", "rollout-1", "rollout-2"})
        actors("ray::RolloutActor", tmp_path)[-1].kill()
        wait_for_batches_by(run, {"rollout-3"})
        assert scaled(run, 1) == f"{run}: rollout actors: 1, before: 3\n"
        while len(actors("ray::RolloutActor", tmp_path)) > 1:
            time.sleep(0.1)
        wait_for_updates(tmp_path, len(updates(tmp_path)) + 5)
        assert scaled(run, 2) == f"{run}: rollout actors: 2, before: 1\n"
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        assert output.count("starting rollout again") == 1
        assert gone(tmp_path), [one.cmdline() for one in family(tmp_path)]
    assert {stage: count for stage, count in summary(tmp_path)["restarts"].items() if count} == {"rollout": 1}
    stopped_at = summary(tmp_path)["updates"]
    resumed(tmp_path, f"updates={stopped_at + 4}")
    assert {engine["actor"] for engine in summary(tmp_path)["engines"]["actors"]} == {"rollout-0", "rollout-1"}
    assert all_accounted(run).consumed == (stopped_at + 4) * 64


@pytest.mark.slow
def test_a_reward_model_outlives_rollout_actors_and_comes_back_when_it_is_killed(tmp_path: Path) -> None:
    save_reward_model(tmp_path / "taste", ALPHABET)
    right = "{kind='function', function='streamppo.tasks.library.arithmetic:score'}"
    taste = f"{{kind='model', path='{tmp_path / 'taste'}', weight=0.01, breaker_s=1.0}}"
    reward = f"reward={{scorers={{right={right}, taste={taste}}}}}"
    with started(tmp_path, *SHORT, "updates=100000", "rollout.actors=2", reward) as process:
        wait_for_updates(tmp_path, 2)
        for victim in ("ray::RolloutActor", "ray::RolloutActor", "ray::RewardModel"):
            named(tmp_path, victim).kill()
            wait_for_updates(tmp_path, len(updates(tmp_path)) + 8)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        assert gone(tmp_path), [one.cmdline() for one in family(tmp_path)]
    assert output.count("starting rollout again") == 2, output
    assert {stage: count for stage, count in summary(tmp_path)["restarts"].items() if count} == {"rollout": 2}
    assert all("reward_taste" in row for row in updates(tmp_path))


@pytest.mark.slow
def test_on_a_cluster_an_actor_without_a_place_holds_nobody_up_and_starts_on_a_node_that_comes(tmp_path: Path) -> None:
    small = {"num_cpus": 2, "object_store_memory": 200 * 2**20, "include_dashboard": False}
    cluster, run = Cluster(initialize_head=True, head_node_args=small), tmp_path / "math"
    try:
        with started(tmp_path, *SHORT, "updates=100000", f"cluster.address={cluster.address}") as process:
            wait_for_updates(tmp_path, 2)
            scaled(run, 2)
            wait_for_updates(tmp_path, len(updates(tmp_path)) + 20)
            assert max(line.get("evaluation", 0) for line in lines.read(run)) > 10, "it is not asked for a share"
            while "{'CPU': 1.0}: 1+ pending tasks/actors" not in demands(cluster):
                time.sleep(1)
            cluster.add_node(num_cpus=1, object_store_memory=200 * 2**20)
            wait_for_batches_by(run, {"rollout-1"})
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
    finally:
        cluster.shutdown()
    assert summary(tmp_path)["restarts"]["rollout"] == 0


def demands(cluster: Cluster) -> str:
    """The demand for which the autoscaler adds nodes."""
    status = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", cluster.address]
    return subprocess.run(status, capture_output=True, text=True, check=True).stdout


def scaled(run: Path, rollouts: int) -> str:
    done = command("scale", str(run), "--rollouts", str(rollouts))
    assert done.returncode == 0, done.stderr
    return done.stdout


def actors(part: str, folder: Path) -> list[psutil.Process]:
    """The processes of that title, the oldest first."""
    return sorted(titled(folder, part), key=lambda process: process.create_time())


def wait_for_batches_by(run: Path, names: set[str]) -> None:
    """Wait until the archive has trajectories by all of `names`."""
    seen = 0
    while names:
        found = archive.open(run)
        for version in (version for version in found.versions() if version >= seen):
            names = names - {trajectory.actor for trajectory in found.batch(version).trajectories}
            seen = version + 1
        time.sleep(0.2)


@pytest.mark.slow
def test_calls_that_ray_repeats_or_loses_train_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_testing_rpc_failure", json.dumps(RPC_FAILURES))
    finished(tmp_path, *SHORT, "watchdog.max_restarts=100")
    monkeypatch.delenv("RAY_testing_rpc_failure")
    trial = all_accounted(tmp_path / "math")
    assert trial.consumed == 12 * 64


# --- stopping and continuing --------------------------------------------------------------------------------


@pytest.mark.slow
def test_actors_are_added_one_that_hangs_is_replaced_and_a_stopped_run_goes_on_from_that_very_version(
    tmp_path: Path,
) -> None:
    run = tmp_path / "math"
    with started(tmp_path, *SHORT, "updates=100000", "watchdog.heartbeat_s=10") as process:
        wait_for_updates(tmp_path, 2)
        assert scaled(run, 2) == f"{run}: rollout actors: 2, before: 1\n"
        wait_for_batches_by(run, {"rollout-1"})
        actors("ray::RolloutActor", tmp_path)[0].send_signal(signal.SIGSTOP)
        before = wait_for_line(process, "rollout-0: silent for more than 10 s; starting rollout again")
        wait_for_updates(tmp_path, len(updates(tmp_path)) + 5)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM, before + output
        assert "stopped by SIGTERM" in output and "Traceback" not in output
        assert gone(tmp_path), [one.cmdline() for one in family(tmp_path)]
    assert "SIGTERM" in summary(tmp_path)["outcome"] and summary(tmp_path)["restarts"]["rollout"] == 1
    stopped_at = max(digests(tmp_path))
    assert (run / "checkpoints" / f"{stopped_at:08d}" / "manifest.json").is_file()
    resumed(tmp_path, f"updates={stopped_at + 8}")
    assert summary(tmp_path)["updates"] == stopped_at + 8
    assert [row["update"] for row in updates(tmp_path)] == list(range(1, stopped_at + 9))
    assert all_accounted(run).consumed == (stopped_at + 8) * 64


@pytest.mark.slow
def test_a_second_signal_stops_at_once_and_leaves_no_process(tmp_path: Path) -> None:
    """A hanging rank prevents the last checkpoint; the run does not wait for it."""
    with started(tmp_path, *SHORT, "updates=100000", "watchdog.shutdown_s=60") as process:
        wait_for_updates(tmp_path, 2)
        named(tmp_path, "ray::Rank").send_signal(signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        assert process.returncode == -signal.SIGINT
        assert gone(tmp_path), [one.cmdline() for one in family(tmp_path)]


@pytest.mark.slow
def test_without_any_checkpoint_the_whole_archive_is_redone_as_it_was_made(tmp_path: Path) -> None:
    with started(tmp_path, *SHORT, "updates=60", "checkpoint.every=0") as process:
        wait_for_updates(tmp_path, 6)
        process.kill()
        assert gone(tmp_path), [one.cmdline() for one in family(tmp_path)]
    before = digests(tmp_path)
    # Each version is replayed as it was configured, whatever the newest configuration is.
    for changes in (("learner.lr=1e-5",), ("updates=70", "queue.max_lag=2", "learner.lr=1e-4"), ("updates=80",)):
        resumed(tmp_path, *changes)
        after = digests(tmp_path)
        assert {version: after[version] for version in before} == before
        before = after
        shutil.rmtree(tmp_path / "math" / "checkpoints")
    found = summary(tmp_path)
    assert found["redone"] > 0 and found["parts"] == 4
    evaluated = [asked for asked, *_ in found["evaluations"]]
    assert evaluated[0] == 0 and len(set(evaluated)) == len(evaluated)
    all_accounted(tmp_path / "math")


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "error"), [("archive", "JournalError"), ("checkpoints", "CheckpointError")])
def test_a_folder_that_refuses_stops_the_run_with_the_reason_and_it_goes_on_later(
    tmp_path: Path, folder: str, error: str
) -> None:
    """A file in place of the folder: permissions do not stop a superuser."""
    there = tmp_path / "math" / folder
    with started(tmp_path, *SHORT, "updates=100") as process:
        wait_for_updates(tmp_path, 5)
        there.rename(tmp_path / "kept")
        there.write_text("in the way")
        output, _ = process.communicate(timeout=90)
        assert process.returncode == 1
        assert f"{there}/0000" in output.splitlines()[-1], output
        assert "cannot be written" in output.splitlines()[-1]
        assert gone(tmp_path)
    there.unlink()
    (tmp_path / "kept").rename(there)
    resumed(tmp_path)
    assert all_accounted(tmp_path / "math").consumed == 100 * 64


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB: a few dozen updates."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_full_disk_stops_the_run_with_the_reason_and_it_goes_on_when_there_is_room(small_disk: Path) -> None:
    with started(small_disk, *SHORT, "updates=200") as process:
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 1, output
    last = output.splitlines()[-1]
    assert last.startswith("streamppo: "), output
    assert f"{small_disk}/math/" in last
    assert any(word in last for word in ("full", "No space left", "space")), last
    assert gone(small_disk)
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    resumed(small_disk)
    assert all_accounted(small_disk / "math").consumed == 200 * 64
    assert [row["update"] for row in updates(small_disk)] == list(range(1, 201))


@pytest.mark.slow
def test_old_batches_are_dropped_and_replay_begins_with_the_oldest_checkpoint_that_is_covered(tmp_path: Path) -> None:
    finished(tmp_path, *SHORT, "updates=24", "archive.keep=2")
    first, *_, last = archive.open(tmp_path / "math").versions()
    assert 0 < first <= 16 and last == 23
    output = replayed(tmp_path)
    assert f"batches before version {first} were not kept" in output
    assert "versions, all of them bit for bit as recorded" in output
    resumed(tmp_path, "updates=28")
    assert summary(tmp_path)["updates"] == 28
    early = command("replay", str(tmp_path / "math"), "--to", "2")
    assert early.returncode == 1 and "cannot be replayed: their batches were not kept" in early.stderr


@pytest.mark.slow
def test_a_slow_learner_keeps_the_queue_bounded_and_nothing_is_dropped(tmp_path: Path) -> None:
    finished(tmp_path, *SHORT, "learner.epochs=24", "queue.max_lag=2")
    found = summary(tmp_path)
    assert found["dropped"] == {"too_old": 0, "abandoned": 0, "resampled": 0, "lost": 0}
    assert found["engines"]["idle_share"] > 0.3, "rollouts are blocked, not the learner"
    trial = all_accounted(tmp_path / "math")
    assert trial.opened <= (12 + 2 + 1) * 64


@pytest.mark.slow
def test_a_critic_that_learned_from_an_earlier_run_is_replayed_with_what_it_learned(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    taught = (*SHORT, "model.tiny.max_steps=200")
    finished(first, *taught)
    output = finished(second, *taught, f"algorithm.critic.pretrain={first / 'math'}")
    assert "the critic was trained on 12 batches" in output
    # A head of zeros explains exactly nothing.
    assert updates(first)[0]["explained_variance"] == pytest.approx(0, abs=1e-6)
    assert abs(updates(second)[0]["explained_variance"]) > 1e-3
    assert "13 versions, all of them bit for bit as recorded" in replayed(second)
