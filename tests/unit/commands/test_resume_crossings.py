"""Runs of every kind that die are resumed and replayed: estimators, proximal policies, queues, shipped configurations.

Drawn runs have all settings of benchmarks/lib/draw.py at once. Each run dies after its fifth update, as by a kill of
all its processes, with a checkpoint of 2 or 3: updates are redone. No Ray (thread_run.py); with Ray and more kinds of
deaths: tests/integration/test_recovery.py.
"""

import json
import random
from pathlib import Path

import bundle_case
import model_families
import model_folders
import msgspec
import pytest
import replay_case
import thread_run
import torch
from conftest import REPOSITORY
from replay_case import STEERED, STEERED_SEGMENTS

from benchmarks.faults import chaos
from benchmarks.lib import draw
from streamppo.config import file as configfile

SHORT = (
    "updates=8",
    "queue.batch_size=32",
    "queue.max_lag=2",
    "rollout.in_flight=96",
    "rollout.slots=32",
    "checkpoint.every=3",
)


def inline(value: object) -> str:
    """A value of a configuration as an override writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}={inline(one)}" for name, one in value.items() if one is not None) + "}"
    return json.dumps(value)


def mathematics(path: Path) -> tuple[str, ...]:
    """The [algorithm] of a shipped configuration, and the shape of its groups and updates, as overrides."""
    config = msgspec.to_builtins(configfile.load(path))
    learner = [f"learner.{name}={config['learner'][name]}" for name in ("epochs", "minibatches")]
    samples = f"queue.samples_per_prompt={config['queue']['samples_per_prompt']}"
    return (f"algorithm={inline(config['algorithm'])}", samples, *learner)


SHIPPED = {path.stem: mathematics(path) for path in sorted((REPOSITORY / "configs").glob("*.toml"))}
PROXIMAL = {
    "behavior": ("algorithm.proximal=behavior", "algorithm.correction={kind='off'}", "learner.minibatches=2"),
    "loglinear": ("algorithm.proximal=loglinear", "algorithm.critic.model=policy", "learner.minibatches=2"),
}
REFERENCE = {
    "following": ("algorithm.kl.loss_beta=0.1", "algorithm.kl.follow_every=2", "algorithm.kl.follow_share=0.5")
}
ADAPTERS = {"lora": ("model.lora={rank=4}", "algorithm.kl.loss_beta=0.1", "learner.lr=5e-3")}
SIGNS = {"topr": ("algorithm.correction.kind=topr", "algorithm.negative_weight=0.25", "learner.minibatches=2")}
SAMPLING = {"top-p": ("rollout.top_p=0.9", *PROXIMAL["behavior"])}
QUEUES = {
    "segments": ("queue.segments={max_tokens = 2, explained = 0}", "queue.too_old=mask"),
    "detached": (
        "queue.segments={max_tokens = 2, explained = 0, prefix = 'detached'}",
        "queue.too_old=mask",
        "learner.minibatches=2",
    ),
    "windowed": ("queue.too_old=windowed", "queue.max_lag=4"),
    "mean": ("queue.admission=mean", "queue.too_old=keep"),
    "adaptive": STEERED,
    "adaptive segments": STEERED_SEGMENTS,
}


EVERY = {**thread_run.ESTIMATORS, **PROXIMAL, **REFERENCE, **ADAPTERS, **SIGNS, **SAMPLING, **QUEUES, **SHIPPED}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("overrides", EVERY.values(), ids=EVERY)
def test_a_run_that_died_is_resumed_and_replayed(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    run = thread_run.trained(tmp_path, *SHORT, *overrides, dies_at=5)
    resumed = thread_run.train(run)
    assert resumed.returncode == 0, resumed.stdout
    trial = chaos.account(run, [], replay_case.succeeds)
    assert (trial.lost, trial.twice, trial.consumed) == (0, 0, 8 * 32)
    assert trial.replayed, "the weights are not those that the archive gives"
    if STEERED[0] in overrides:
        assert len(replay_case.decisions(run)) > 1, "nothing was steered"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["gemma3", "gpt2", "qwen3_moe", "mistral3", "qwen3_vl"])
def test_a_run_of_transformers_modules_that_died_is_resumed_and_replayed(tmp_path: Path, family: str) -> None:
    """Windows, learned positions, experts, encoders of pictures: the engine samples by the modules of the model."""
    usual = model_folders.usual(family)
    model = model_folders.make(tmp_path / "model", family=family, tokenizer=usual.tokenizer, template=usual.template)
    run = thread_run.trained(tmp_path / "runs", *SHORT, f"model.path={model}", "rollout.max_tokens=24", dies_at=5)
    resumed = thread_run.train(run)
    assert resumed.returncode == 0, resumed.stdout
    trial = chaos.account(run, [], replay_case.succeeds)
    assert (trial.lost, trial.twice, trial.consumed) == (0, 0, 8 * 32)
    assert trial.replayed, "the weights are not those that the archive gives"
    # Parameters that are not trained are in no checkpoint, and in every version, export and bundle.
    export = replay_case.command("streamppo", "export", f"{run}", "--to", f"{tmp_path / 'exported'}")
    assert export.returncode == 0, export.stderr
    before, after = (model_families.read(folder).state_dict() for folder in (model, tmp_path / "exported"))
    assert before.keys() == after.keys()
    assert not all(torch.equal(before[name], after[name]) for name in before)
    bundle_case.made_again(run, 7, tmp_path / "7.safetensors")


IN_ACTOR = draw.SEVERAL.replace("kind='function'", "kind='function', where='actor'")
"""Rewards in the rollout actor, as in all runs without Ray: thread_run.py has replaced them there."""
DRAWN = (
    *("updates=8", "queue.batch_size=32", "queue.shards=1", "learner.ranks=1", "learner.threads=1", IN_ACTOR),
    # Replays of inexact updates compare numbers.
    *("learner.exact=true", "evaluation.every=0", "model.tiny.max_steps=3"),
)
DRAWS = 12


@pytest.fixture(scope="module")
def drawn_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows and the teacher of drawn runs."""
    folder = tmp_path_factory.mktemp("drawn")
    draw.write(folder, thread_run.MATH)
    return folder


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(DRAWS))
def test_a_drawn_run_that_died_is_resumed_and_replayed(tmp_path: Path, drawn_data: Path, seed: int) -> None:
    overrides = draw.draw(random.Random(seed), thread_run.MATH, DRAWN, drawn_data, thread_run.SMALL)
    run = thread_run.trained(tmp_path, *DRAWN, *overrides, dies_at=5)
    resumed = thread_run.train(run)
    assert resumed.returncode == 0, (overrides, resumed.stdout)
    trial = chaos.account(run, [], replay_case.succeeds)
    assert (trial.lost, trial.twice, trial.consumed) == (0, 0, 8 * 32), overrides
    assert trial.replayed, overrides
