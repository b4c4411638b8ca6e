"""The study of negative advantages: its tasks, cases, lag, and reached targets."""

import asyncio
import json
from pathlib import Path

import learner_case
import pytest
import torch
from msgspec.structs import replace

from benchmarks.learning import negatives, signs
from benchmarks.learning.negatives import Case
from benchmarks.lib import world
from benchmarks.lib.campaign import Row
from streamppo.config import file as configfile
from streamppo.config.correction import Topr
from streamppo.config.task import GymTask
from streamppo.learner.model import tiny
from streamppo.tasks.library import gym
from streamppo.types import ScoredText, Trajectory

TINY = ("queue.batch_size=16", "model.tiny.max_steps=1", "evaluation.prompts=16")


@pytest.mark.slow
@pytest.mark.parametrize("task", negatives.TASKS)
@pytest.mark.parametrize("rule", negatives.RULES)
def test_every_case_is_a_configuration_that_can_be_run(task: str, rule: str, tmp_path: Path) -> None:
    chosen = negatives.write(task, tmp_path, 4) + negatives.overrides(Case(task, rule, 16, 4), 300, ())
    config = configfile.load(negatives.CONFIG, chosen)
    assert (config.queue.bound, config.seed, config.updates) == (16, 4, 300)
    assert isinstance(config.algorithm.correction, Topr) == (
        rule in ("topr", "quarter", "halves", "steady", "full", "grpo_quarter")
    )
    assert (config.algorithm.negative_weight == 0.25) == (rule in ("quarter", "halves", "steady", "grpo_quarter"))


@pytest.mark.parametrize("task", ["subtract", "sort", "split"])
def test_rows_that_are_held_out_are_not_trained_on_and_their_answers_are_right(task: str, tmp_path: Path) -> None:
    negatives.write(task, tmp_path, 4)
    train, held_out = (
        {(row["prompt"], row["answer"]) for row in map(json.loads, (tmp_path / name).read_text().splitlines())}
        for name in ("train.jsonl", "held_out.jsonl")
    )
    assert held_out and train.isdisjoint(held_out)
    for prompt, answer in held_out:
        match task:
            case "subtract":
                first, second = prompt.removesuffix("=").split("-")
                assert answer == str(int(first) - int(second))
            case "sort":
                assert list(answer) == sorted(prompt.removesuffix(">"))
            case _:
                assert prompt == f"{sum(map(int, answer.split('+')))}="


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("12+25", 1.0),
        ("0+37", 1.0),
        ("50+1", 0.0),
        ("12+24", 0.0),
        ("37", 0.0),
        ("12+25+0", 0.0),
        ("", 0.0),
        ("+", 0.0),
    ],
)
def test_a_split_is_right_if_its_parts_have_the_sum(completion: str, score: float) -> None:
    said = ScoredText(prompt="37=", completion=completion, finish="stop", num_tokens=5)
    assert asyncio.run(negatives.score_split(said, "12+25")) == score
    cut_off = replace(said, finish="length")
    assert asyncio.run(negatives.score_split(cut_off, "12+25")) == 0.0


@pytest.mark.slow
def test_a_trajectory_over_turns_has_the_observations_of_its_environment(tmp_path: Path) -> None:
    chosen = negatives.write("turns", tmp_path, 1) + negatives.overrides(Case("turns", "steady", 0, 1), 20, TINY)
    config = configfile.load(negatives.CONFIG, [*chosen, "model.tiny.max_steps=30"])
    tiny.make(config, tmp_path / "model")

    async def sample() -> list[Trajectory]:
        made = await world.build(config, tmp_path / "model", slots=64, max_total_tokens=64)
        rows = await world.sampled(made, range(64), version=3)
        await made.engine.stop()
        return rows

    with learner_case.group(0, 1, tmp_path / "store"):
        rows = asyncio.run(sample())
    called = [row for row in rows if b"\x00" in row.mask]
    assert called, "the warm start shows some calls"
    assert all(len(row.versions) == 4 * row.num_tokens and row.components["tool"] for row in called)


@pytest.mark.parametrize("name", ["basic_arithmetic", "spell_backward"])
def test_a_task_of_reasoning_gym_is_scored_by_its_own_verifier(name: str) -> None:
    pytest.importorskip("reasoning_gym")
    task = gym.rows(GymTask(dataset=name, parameters={}, size=20, held_out=0.2), 1)
    for prompt in task.held_out:
        said = ScoredText(prompt=prompt.text, completion=str(prompt.columns["answer"]), finish="stop", num_tokens=3)
        asked = {key: str(prompt.columns[key]) for key in ("dataset", "parameters", "entry")}
        assert asyncio.run(negatives.score_gym(said, **asked)) == 1.0
        assert asyncio.run(negatives.score_gym(replace(said, completion="?"), **asked)) < 1.0


def test_two_evaluations_in_a_row_reach_a_target() -> None:
    assert negatives.reached([0.2, 0.95, 0.5, 0.88, 0.92], 0.9) == 80
    assert negatives.reached([0.9, 0.95], 0.9) is None, "the model of the start is not an evaluation of training"
    assert negatives.reached([0.2, 0.5], 0.9) is None


@pytest.mark.slow
@pytest.mark.parametrize("task", ["split", "turns"])
def test_a_run_tells_its_accuracy_and_that_of_the_averaged_weights(task: str, tmp_path: Path) -> None:
    case = Case(task, "quarter", 2, 1)
    chosen = negatives.write(task, tmp_path / "rows", 1) + negatives.overrides(case, 20, TINY)
    config = configfile.load(negatives.CONFIG, chosen)
    tiny.make(config, tmp_path / "model")
    with learner_case.group(0, 1, tmp_path / "store"):
        found = asyncio.run(negatives.measure(case, config, tmp_path / "model", "cpu"))
    assert len(found["accuracies"]) == len(found["averaged"]) == 2
    assert found["accuracies"][0] == found["averaged"][0]
    assert len(found["entropy"]) == len(found["length"]) == 1 and found["entropy"][0] > 0
    (best,), (mean,) = found["pass_at_16"], found["mean_at_16"]
    assert 0 <= mean <= best <= 1
    assert ("reward_tool" in found) == (task == "turns"), "an environment says how often its tool was used"


def row(rule: str, lag: int, curve: list[float], seed: int = 4, task: str = "add", **more: list[float]) -> Row:
    about = {"task": task, "rule": rule, "lag": lag, "seed": seed, "updates": 20 * (len(curve) - 1)}
    alike = {"reward": curve[1:], "entropy": [1 - one for one in curve[1:]], "ess": [1.0], "seconds": 1.0}
    return {**about, "accuracies": curve, "averaged": curve, "mean_at_16": curve, "pass_at_16": curve, **alike, **more}


def test_runs_are_judged_beside_those_of_their_task_and_seed() -> None:
    rising = [0.2, 0.6, 0.9, 0.92, 0.98]
    rows = [
        row("steady", 16, rising),
        row("steady", 0, rising),
        row("grpo", 0, rising, pass_at_16=[one - 0.1 for one in rising]),
        row("plain", 16, [0.2, 0.3, 0.4, 0.5, 0.6]),
        row("steady", 16, [0.2, 0.3, 0.4, 0.5, 0.6], seed=5),
        row("steady", 0, rising, seed=6),
    ]
    verdicts = {one["goal"]: one for one in negatives.judge(rows)}
    found = {name: verdicts[goal.name]["measured"] for name, goal in negatives.GOALS.items()}
    assert found["add"] == 1.0 and found["sort"] is None
    assert found["worst"] == 0.6, "a run that has no other beside it counts too"
    assert found["plain"] == pytest.approx(100 / 60), "a run that does not come so far counts as one that needs more"
    assert found["pass"] == pytest.approx(0.1)
    assert found["entropy"] == pytest.approx(1.0)
    lines = {(one["rule"], one["lag"]): one for one in negatives.summed(rows)}
    assert (lines["steady", 16]["seeds"], lines["steady", 16]["worst"]) == (2, 100)


def test_a_value_is_read_where_a_curve_first_comes_to_a_level() -> None:
    assert negatives.at_level(0.5, [0.2, 0.4, 0.6, 0.5], [0.0, 1.0, 3.0, 9.0]) == pytest.approx(2.0)
    assert negatives.at_level(0.1, [0.2, 0.4], [5.0, 6.0]) == 5.0
    assert negatives.at_level(0.9, [0.2, 0.4], [5.0, 6.0]) == 6.0


def test_every_study_has_a_picture_a_task(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [row("steady", lag, [0.2, 0.6, 0.9], task=task) for lag in (0, 16) for task in ("add", "sort")]
    negatives.plot(rows, tmp_path / "made.png")
    assert (tmp_path / "made.png").read_bytes()[:4] == b"\x89PNG"


def test_the_best_weight_of_negatives_is_that_of_the_closest_direction() -> None:
    exact, positive = torch.tensor([1.0, 1.0, 0.0]).double(), torch.tensor([1.0, 0.0, 0.0]).double()
    found = signs.products(positive, torch.tensor([0.0, 4.0, 0.0]).double(), exact)
    assert signs.best_weight(found) == 0.25 and signs.cosine(found, 0.25) == pytest.approx(1.0)
    assert signs.cosine(found, 0.0) == pytest.approx(0.5**0.5)
    opposite = signs.products(positive, torch.tensor([0.0, -4.0, 0.0]).double(), exact)
    assert signs.best_weight(opposite) == 0.0


@pytest.mark.slow
def test_gradients_by_sign_point_to_the_expected_score_where_it_is_measured(tmp_path: Path) -> None:
    """One batch of a model that has just learned the format, and a second one after the critic has seen it."""
    world.alone(tmp_path)
    try:
        found = signs._measured(Case("add", "steady", 0, 4), signs.EVERY + 1, tmp_path)["measured"]
    finally:
        torch.distributed.destroy_process_group()
    assert [one["version"] for one in found] == [0, signs.EVERY]
    for one in found:
        assert 0 < one["expected"] < 1 and one["p_right"] > one["p_wrong"] > 0
        assert one["truncate"] == pytest.approx(one["topr"], rel=1e-3), "data of lag 0 need no correction"
        assert one["topr"]["pj"] > 0, "right answers say where the score rises"
        assert one["moved_right"] > 0
