"""Commands that replay from a checkpoint, beside a run that deletes it before they have read it. No Ray."""

import json
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import replay_case

from streamppo.commands import replay, versions
from streamppo.learner.checkpoint import manifest


def command(run: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """As `replay_case.command`; at its first use of a checkpoint the run deletes all but the newest."""
    return replay_case.command(*words, main=partial(_main, run))


def _main(run: Path, words: list[str], out: Path, err: Path) -> None:
    for module, name in ((replay, "make_ranks"), (versions, "_copy_checkpoint")):
        setattr(module, name, _after_drop(getattr(module, name), run))
    replay_case.run_command(words, out, err)


def _after_drop(function: Callable[..., Any], run: Path) -> Callable[..., Any]:
    def call(*arguments: object) -> object:
        manifest.drop(run / "checkpoints", keep=1, keep_every=0)
        return function(*arguments)

    return call


@pytest.fixture
def run(exact: Path, tmp_path: Path) -> Path:
    """A run of six updates with the checkpoints 2, 4 and 6."""
    return shutil.copytree(exact, tmp_path / "math")


@pytest.mark.parametrize("at", [4, 5], ids=["a checkpoint", "from a checkpoint"])
def test_a_fork_begins_before_a_checkpoint_that_the_run_deletes(run: Path, tmp_path: Path, at: int) -> None:
    done = command(run, "streamppo", "fork", str(run), "--at", str(at), "--runs", str(tmp_path / "runs"), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["begin"] == 0
    assert "00000004: the run has deleted it meanwhile" in done.stderr
    assert not list((run / "checkpoints").glob("*.damaged"))
    fork = Path(json.loads(done.stdout)["folder"])
    assert [path.name for path in manifest.complete(fork / "checkpoints")] == [f"{at:08d}"]


@pytest.mark.parametrize("updates", [1, 6])
def test_verify_raises_no_alarm_for_a_checkpoint_that_the_run_deletes(run: Path, updates: int) -> None:
    done = command(run, "streamppo", "verify", str(run), "--json", "--updates", str(updates))
    told = json.loads(done.stdout)
    assert (done.returncode, told["faults"]) == (0, []), done.stderr
    assert told["remade"]


def test_a_bundle_and_a_trial_are_of_their_version(run: Path, tmp_path: Path) -> None:
    to = tmp_path / "one.safetensors"
    done = command(run, "streamppo", "bundle", str(run), "--update", "6", "--to", str(to))
    assert done.returncode == 0, done.stderr
    assert replay_case.command("streamppo", "replay", str(to)).returncode == 0


def test_bisect_goes_on_with_the_checkpoints_that_are_left(run: Path, tmp_path: Path) -> None:
    (tmp_path / "ask.py").write_text("def test(version, model):\n    return version >= 4\n")
    done = command(run, "streamppo", "bisect", str(run), "--test", str(tmp_path / "ask.py"), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["version"] == 4
