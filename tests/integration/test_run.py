"""The real command, on shortened configurations: it learns, it is asynchronous, and every end of it is clean."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from conftest import MATH, REPOSITORY, SUPPORT
from transformers import AutoModelForCausalLM, AutoTokenizer

from streamppo.queue.store import archive
from streamppo.telemetry import metrics_file as lines
from streamppo.telemetry.catalogue import BESIDE, SOMETIMES, UPDATE

MARK = "STREAMPPO_TEST_RUN"


@contextlib.contextmanager
def started(folder: Path, *overrides: str, flags: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """`streamppo run` in a process of its own, whose descendants are marked."""
    command = [sys.executable, "-m", "streamppo", "run", str(MATH), *flags, "--runs", str(folder), *overrides]
    path = os.pathsep.join(map(str, (REPOSITORY, SUPPORT)))
    environment = {**os.environ, MARK: str(folder), "PYTHONPATH": path}
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for left in family(folder):
            left.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def family(folder: Path) -> list[psutil.Process]:
    """Every living process that descends from the run in `folder`."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def named(folder: Path, part: str) -> psutil.Process:
    """The actor process whose title has `part` in it."""
    return titled(folder, part)[0]


def titled(folder: Path, part: str) -> list[psutil.Process]:
    """The processes of a run whose titles have `part` in them."""
    found: list[psutil.Process] = []
    for process in family(folder):
        # It may end in between.
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [process] if part in " ".join(process.cmdline()) else []
    return found


def finished(folder: Path, *overrides: str, flags: tuple[str, ...] = ()) -> str:
    """Run to the end; the output. Fails unless the exit code is 0."""
    with started(folder, *overrides, flags=flags) as process:
        output, _ = process.communicate()
        assert process.returncode == 0, output
        assert gone(folder), "processes were left behind"
    return output


def gone(folder: Path, within_s: float = 60.0) -> bool:
    deadline = time.monotonic() + within_s
    while family(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def wait_for_line(process: "subprocess.Popen[str]", words: str) -> str:
    """Read and return the output of a run up to the line with `words`."""
    assert process.stdout
    read = ""
    for line in process.stdout:
        read += line
        if words in line:
            return read
    pytest.fail(f"the run has ended without {words!r}: {read}")


def wait_for_updates(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 240
    while len(updates(folder)) < count:
        if time.monotonic() > deadline:
            pytest.fail(f"no {count} updates within four minutes")
        time.sleep(0.2)
        if not family(folder):
            ends = [json.loads(file.read_text())["outcome"] for file in folder.glob("*/summary.json")]
            pytest.fail(f"the run ended before {count} updates: {ends}")


def updates(folder: Path, name: str = "math") -> list[dict[str, Any]]:
    return lines.updates(folder / name)


def summary(folder: Path, name: str = "math") -> dict[str, Any]:
    return json.loads((folder / name / "summary.json").read_text())


SHORT = (
    "updates=12",
    "evaluation.prompts=64",
    "evaluation.every=5",
    "queue.batch_size=64",
    "checkpoint.every=4",
    "model.tiny.max_steps=3",
)


def test_a_short_run_learns_asynchronously_and_leaves_what_it_promises(tmp_path: Path) -> None:
    """The default job, cut to 60 of its updates: accuracy must rise by 0.15 from the warm start."""
    finished(tmp_path, "updates=60", "evaluation.every=30", "checkpoint.every=0")
    found = summary(tmp_path)
    assert found["outcome"] == "finished"
    assert found["updates"] == found["pushes"] == 60
    start, final = found["eval_accuracy"]["start"], found["eval_accuracy"]["final"]
    assert 0.1 < start < 0.35
    assert final >= start + 0.15
    assert found["reward"]["final"] > found["reward"]["start"]
    assert 0 < found["lag"]["mean"] <= found["lag"]["max"] <= 8
    assert found["trajectories"] == 60 * 512
    for name in ("wall_s", "first_update_s", "tokens_trained", "push_ms"):
        assert found[name] > 0, name
    for name in ("tokens", "tokens_per_s", "seconds", "swaps", "swap_ms"):
        assert found["engines"][name] > 0, name
    for share in (found["learner_idle_share"], found["engines"]["idle_share"]):
        assert 0 <= share <= 1
    assert found["seed"] == 1
    kept = archive.open(tmp_path / "math").columns(59)
    assert np.isfinite(kept["advantages"]).all() and np.std(kept["advantages"]) > 0.1
    # The learner is a few versions ahead of the policy that sampled.
    assert np.median(np.abs(kept["proximal_logprobs"] - kept["logprobs"])) < 0.2
    assert found["dropped"].keys() >= {"too_old", "abandoned"}
    assert found["versions"]["torch"]
    rows = updates(tmp_path)
    assert [row["update"] for row in rows] == list(range(1, 61))
    assert_documented(rows)
    assert accuracy_by_transformers(tmp_path / "math" / "final") >= start + 0.1


def assert_documented(rows: list[dict[str, Any]]) -> None:
    """Every number in metrics.jsonl is in the catalogue, and every name of the catalogue is in every row."""
    for row in rows:
        assert row.keys() >= BESIDE.keys()
        names = row.keys() - BESIDE.keys()
        assert names >= UPDATE.keys()
        extra = names - UPDATE.keys()
        assert all(name.startswith(tuple(SOMETIMES)) for name in extra), extra


def accuracy_by_transformers(folder: Path) -> float:
    """The exported model, loaded and run by transformers alone, on 200 problems."""
    lm, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    problems = [(a, b) for a in range(10, 100) for b in range(10, 100)][::41]
    prompts = tokenizer([f"{a}+{b}=" for a, b in problems], return_tensors="pt")
    answers = lm.generate(**prompts, max_new_tokens=5, do_sample=False)[:, prompts["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    right = [text == str(a + b) for text, (a, b) in zip(texts, problems, strict=True)]
    return sum(right) / len(right)


@pytest.mark.slow
def test_max_lag_zero_is_synchronous_and_two_ranks_and_two_actors_end_with_the_learners_bytes(tmp_path: Path) -> None:
    finished(tmp_path, *SHORT, "queue.max_lag=0", "learner.ranks=2", "rollout.actors=2", "rollout.in_flight=16")
    found = summary(tmp_path)
    assert found["lag"]["max"] == 0
    engines = found["engines"]["actors"]
    assert len(engines) == 2
    assert all(engine["version"] == 12 for engine in engines)
    assert {engine["checksum"] for engine in engines} == {found["checksum"]}
    assert found["checksum"]


def send_twice(pid: int, number: int) -> None:
    """Send a signal as `timeout` does: to the process, then to its group."""
    os.kill(pid, number)
    os.killpg(pid, number)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "send"),
    [(signal.SIGINT, os.kill), (signal.SIGINT, os.killpg), (signal.SIGTERM, os.kill), (signal.SIGTERM, send_twice)],
    ids=["SIGINT", "Ctrl-C", "SIGTERM", "timeout"],
)
def test_a_signal_ends_the_run_with_a_message_and_no_process_left(
    tmp_path: Path, number: signal.Signals, send: Callable[[int, int], None]
) -> None:
    """A terminal sends Ctrl-C to the run's process group, and the last checkpoint is still written."""
    with started(tmp_path, *SHORT, "updates=100000", "watchdog.shutdown_s=40") as process:
        wait_for_updates(tmp_path, 2)
        for unused in ("ray/dashboard/dashboard.py", "ray/autoscaler/_private/monitor.py"):
            assert not titled(tmp_path, unused)
        # Of a signal to the driver's group, Ray's server would end at once, and actors a minute later.
        for part in ("raylet/raylet", "gcs_server"):
            assert os.getpgid(named(tmp_path, part).pid) != os.getpgid(process.pid)
        send(process.pid, number)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 128 + number
        assert f"stopped by {number.name}" in output
        assert "Traceback" not in output
        assert gone(tmp_path)
    assert number.name in summary(tmp_path)["outcome"]
    newest = tmp_path / "math" / "checkpoints" / f"{summary(tmp_path)['updates']:08d}"
    assert (newest / "manifest.json").is_file(), "the version at which it stopped"


@pytest.mark.slow
@pytest.mark.parametrize("line", ["starting Ray", "making builtin:tiny", "reward is"])
def test_a_signal_while_the_run_starts_ends_it_like_any_other(tmp_path: Path, line: str) -> None:
    with started(tmp_path, *SHORT, "updates=100000") as process:
        before = wait_for_line(process, line)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGINT, before + output
        assert "stopped by SIGINT" in output
        assert "Traceback" not in output
        assert gone(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["RolloutActor", "QueueActor", "Rank"])
def test_too_many_deaths_end_the_run_and_name_the_stage(tmp_path: Path, part: str) -> None:
    with started(tmp_path, *SHORT, "updates=100000", "watchdog.max_restarts=0") as process:
        wait_for_updates(tmp_path, 2)
        named(tmp_path, f"ray::{part}").kill()
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 1, output
        assert "RunError: 1 restart within 600 s" in output
        assert "retries remaining" not in output and "Failed to push error" not in output, "Ray leaves that to us"
        assert gone(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "queue"), [("ray::Rank", "the queue is at version"), ("ray::QueueActor", "the queue gives no answer")]
)
def test_a_stage_that_hangs_ends_the_run_and_it_is_said_what_everybody_waits_for(
    tmp_path: Path, part: str, queue: str
) -> None:
    with started(tmp_path, *SHORT, "updates=100000", "watchdog.stall_s=10") as process:
        wait_for_updates(tmp_path, 2)
        named(tmp_path, part).send_signal(signal.SIGSTOP)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 1, output
        assert "RunError: no progress for 10 s: the driver waits for update" in output
        assert f"; {queue}" in output
        assert gone(tmp_path), [one.cmdline() for one in family(tmp_path)]


@pytest.mark.slow
def test_a_ray_that_hangs_keeps_no_run_from_ending(tmp_path: Path) -> None:
    with started(tmp_path, *SHORT, "updates=100000") as process:
        wait_for_updates(tmp_path, 2)
        named(tmp_path, "raylet/raylet").send_signal(signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 1, output
        assert "Ray has not ended within 10 s; the process ends without waiting for it: stopped by SIGINT" in output
        assert gone(tmp_path), [one.cmdline() for one in family(tmp_path)]


LEAVING = ("reward.function=bad_rewards:starts_programs", "reward.where=actor")


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["driver", "raylet/raylet"])
def test_a_killed_driver_or_raylet_leaves_no_process_of_the_run_nor_of_a_reward(tmp_path: Path, killed: str) -> None:
    with started(tmp_path, *SHORT, *LEAVING, "updates=100000") as process:
        wait_for_updates(tmp_path, 2)
        assert len([one for one in family(tmp_path) if one.name() == "sleep"]) == 2
        named(tmp_path, "ray::RolloutActor").send_signal(signal.SIGSTOP)
        (process if killed == "driver" else named(tmp_path, killed)).kill()
        output, _ = process.communicate(timeout=120)
        assert killed == "driver" or "raylet has died (SIGKILL); resume the run to start a new Ray" in output
        assert gone(tmp_path), [one.cmdline() for one in family(tmp_path)]


@pytest.mark.slow
def test_a_reward_that_always_fails_stops_the_run_and_is_quoted(tmp_path: Path) -> None:
    with started(tmp_path, *SHORT, "reward.function=bad_rewards:always_raises") as process:
        output, _ = process.communicate()
        assert process.returncode == 1
    assert "TooManyFailures" in summary(tmp_path)["outcome"] or "failed" in summary(tmp_path)["outcome"]
    assert "the judge is on holiday" in output


CALCULATOR = (
    "task.kind=calculator",
    "environment.name=streamppo.tasks.library.calculator:Calculator",
    "environment.max_turns=3",
    "environment.max_tokens=24",
    "reward={}",
)


@pytest.mark.slow
def test_the_policy_learns_to_use_a_tool(tmp_path: Path) -> None:
    """From one call of the calculator in five to nearly always, with observations that are not trained on."""
    finished(
        tmp_path,
        *CALCULATOR,
        "updates=40",
        "queue.batch_size=128",
        "evaluation.prompts=64",
        "evaluation.every=0",
        "checkpoint.every=0",
        "model.tiny.target_accuracy=0.45",
    )
    rows = updates(tmp_path)
    first, last = rows[0], rows[-5:]
    assert first["reward_tool"] < 0.5
    assert sum(row["reward_tool"] for row in last) / len(last) > 0.75
    assert sum(row["reward"] for row in last) / len(last) > first["reward"] + 0.3
    assert_documented(rows)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_learner_and_engine_share_a_gpu_and_the_reward_rises(tmp_path: Path) -> None:
    finished(tmp_path, "updates=150", "learner.gpus=0.5", "rollout.gpus=0.5", "model.dtype=bfloat16")
    summary = json.loads((tmp_path / "math" / "summary.json").read_text())
    assert summary["updates"] == 150
    assert summary["eval_accuracy"]["final"] > summary["eval_accuracy"]["start"] + 0.1
