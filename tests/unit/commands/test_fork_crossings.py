"""Forks and bundles of runs of every kind: estimators, segments, adapters, environments, an adaptive lag.

Each run dies after its fifth update, with checkpoints of 2 and 4; each is forked at version 3, which is replayed. At
lag 0 the fork is the same run. With lag it has the prompts that were to come, each once. All of them are replayed, and
in all of them `try` samples a completion of one version again. The update behind that version is bundled and made
again alone, bit for bit.
"""

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import bundle_case
import pytest
import replay_case
import thread_run
from conftest import SUPPORT

from streamppo import cli
from streamppo.commands.look import verify
from streamppo.commands.models import archived
from streamppo.queue.store import archive
from streamppo.queue.store.journal import Journal

LAG = ("queue.max_lag=2", "rollout.in_flight=48")
STEERED = (*replay_case.STEERED, "rollout.in_flight=64")
TURNS = (
    "task.kind=calculator",
    f"environment.name={SUPPORT}/three_turns.py:ThreeTurns",
    "environment.max_turns=3",
    "environment.max_tokens=32",
    "reward={}",
)
CRITIC = ("algorithm.advantage={kind='gae'}", "algorithm.critic.lr=1e-3")
EXACT = {
    **thread_run.ESTIMATORS,
    "a critic of its own": (*CRITIC, "algorithm.critic.model=policy", "algorithm.critic.epochs=2"),
    "a critic from scratch": (*CRITIC, "algorithm.critic.model=scratch", "algorithm.critic.warmup_updates=4"),
    "adapters": ("model.lora={rank=4}", "algorithm.kl.loss_beta=0.1", "learner.lr=5e-3"),
    "top-p": ("rollout.top_p=0.9", "algorithm.proximal=behavior", "algorithm.correction={kind='off'}"),
    "a reference that follows": ("algorithm.kl.loss_beta=0.1", "algorithm.kl.follow_every=2"),
}
LAGGED = {
    "segments": (*LAG, "queue.segments={max_tokens = 2}", "queue.too_old=mask"),
    "adaptive": STEERED,
    "adaptive segments": (*STEERED, "queue.segments={max_tokens = 2}", "queue.too_old=mask"),
    "windowed": ("queue.too_old=windowed", "queue.max_lag=4", "rollout.in_flight=80"),
    "mean": ("queue.admission=mean", "queue.too_old=keep", *LAG),
    "turns": (*TURNS, *LAG),
}


def forked(run: Path, runs: Path) -> Path:
    words = ("streamppo", "fork", str(run), "--at", "3", "--runs", str(runs), "--json", "--trust")
    done = replay_case.command(*words)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["begin"], told["remade"]) == (2, 1)
    fork = Path(told["folder"])
    trained = thread_run.train(fork)
    assert trained.returncode == 0, trained.stdout
    assert verify.check(fork, 0).faults == []
    again = replay_case.replay(fork)
    assert again.returncode == 0, again.stdout + again.stderr
    return fork


def digests(run: Path) -> dict[int, str]:
    with closing(Journal.open_run(run)) as journal:
        return {version: one.digest for version, one in journal.versions().items()}


def continued(run: Path) -> int:
    """Sample a completion of one version again, behind the first token of its last turn; returns its turns."""
    trajectories = [one for version in range(5) for one in archive.open(run).batch(version).trajectories]
    names = sorted({(one.identity.prompt, one.identity.sample) for one in trajectories if one.finish != "cut"})
    whole = [one for name in names if (one := archived.find(run, *name, None)) is not None]
    known = [(version, one) for one in whole for version in (0, 2, 4) if one.sampled_by(version)]
    version, one = max(known, key=lambda pair: len(pair[1].recorded.turns))
    start, end = one.recorded.turns[-1]
    words = ("--prompt", str(one.identity.prompt), "--sample", str(one.identity.sample), "-n", "2", "--json", "--trust")
    at = str(min(start + 1, end - 1))
    done = replay_case.command("streamppo", "try", str(run), "--version", str(version), "--at", at, *words)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["versions"]
    assert found["is_same"] is True and found["begin"] == version, found
    assert all(each["reward"] is not None for each in found["continuations"])
    return len(one.recorded.turns)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", EXACT.values(), ids=EXACT)
def test_at_lag_0_a_fork_is_the_same_run(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    run = thread_run.trained(tmp_path, *overrides, dies_at=5)
    bundle_case.made_again(run, 4, tmp_path / "4.safetensors")
    made = digests(run)
    continued(run)
    assert {
        version: digest for version, digest in digests(forked(run, tmp_path / "forks")).items() if version <= 5
    } == made


@pytest.mark.slow
@pytest.mark.parametrize("overrides", LAGGED.values(), ids=LAGGED)
def test_with_lag_a_fork_has_what_was_to_come_each_once(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    run = thread_run.trained(tmp_path, *overrides, dies_at=5)
    assert continued(run) == (3 if overrides[0] == TURNS[0] else 1)
    bundle_case.made_again(run, 4, tmp_path / "4.safetensors")
    fork = forked(run, tmp_path / "forks")
    found, its = archive.open(fork), archive.open(run)
    assert [found.batch(version) for version in range(3)] == [its.batch(version) for version in range(3)]
    names = [one.identity for version in found.versions() for one in found.batch(version).trajectories]
    assert len(set(names)) == len(names), "nothing is trained on twice"
    # Whole samples: with segments the last one of each.
    whole = [
        (one.identity.prompt, one.identity.sample)
        for version in found.versions()
        for one in found.batch(version).trajectories
        if one.finish != "cut"
    ]
    assert len(set(whole)) == len(whole)
    with closing(Journal.open_run(fork)) as journal:
        counters = journal.counters()
        held = {(slot.identity.prompt, slot.identity.sample) for slot in journal.slots()}
    assert counters is not None and not counters.abandoned
    assert {divmod(number, 4) for number in range(counters.opened)} == {*whole} | held, "and none is left out"


@pytest.mark.slow
def test_a_fork_of_two_ranks_is_the_same_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With Ray: ranks are processes. The update alone has one rank, and says so if its bits are others."""
    run = thread_run.begin(tmp_path / "runs", "learner.ranks=2", "updates=5", "checkpoint.every=2")
    forks, bundle = tmp_path / "forks", tmp_path / "3.safetensors"
    for words in (
        ("resume", str(run)),
        ("bundle", str(run), "--update", "3", "--to", str(bundle)),
        ("fork", str(run), "--at", "3", "--runs", str(forks)),
        ("resume", str(forks / "math-at-3")),
        ("replay", str(forks / "math-at-3")),
        ("try", str(run), "--version", "3", "--prompt", "0", "-n", "2"),
    ):
        done = subprocess.run([sys.executable, "-m", "streamppo", *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert digests(forks / "math-at-3") == digests(run)
    assert cli.main(["replay", str(bundle)]) == 0
    told = capsys.readouterr().out
    assert "summed over 2 ranks in the run, over one here" in told or "bit for bit" in told
