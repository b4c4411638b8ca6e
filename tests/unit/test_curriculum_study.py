"""The study of skipped prompts: its cases, rows, and reached targets."""

import asyncio
import json
from itertools import product
from pathlib import Path

import pytest

from benchmarks.learning import curriculum
from benchmarks.learning.curriculum import Case
from benchmarks.lib.campaign import Row
from streamppo.learner.model import tiny


@pytest.mark.parametrize(("task", "rule"), [*product(curriculum.TARGETS, curriculum.RULES)])
def test_every_case_is_a_configuration_that_can_be_run(task: str, rule: str, tmp_path: Path) -> None:
    config = curriculum.configure(Case(task, rule, 4), 7, tmp_path)
    assert (config.queue.bound, config.seed, config.updates, config.algorithm.negative_weight) == (0, 4, 7, 0.25)
    assert (config.algorithm.zero_variance == "resample") == rule.startswith("resample")
    chosen = config.algorithm.curriculum
    assert (None if chosen is None else chosen.skip) == {"right": "right", "equal": "equal"}.get(
        rule.removeprefix("resample_")
    )


@pytest.mark.parametrize("task", ["sort", "mixed"])
def test_rows_that_are_held_out_are_not_trained_on_and_their_answers_are_right(task: str, tmp_path: Path) -> None:
    curriculum.rows(task, tmp_path, 4)
    train, held_out = (
        {row["prompt"]: row["answer"] for row in map(json.loads, (tmp_path / name).read_text().splitlines())}
        for name in ("train.jsonl", "held_out.jsonl")
    )
    assert (len(train), len(held_out)) == (curriculum.TRAINED, curriculum.HELD_OUT)
    assert not train.keys() & held_out.keys() and not any("*" in prompt for prompt in held_out)
    assert sum("*" in prompt for prompt in train) == (curriculum.TRAINED // 2 if task == "mixed" else 0)
    for prompt, answer in (train | held_out).items():
        if task == "sort":
            assert list(answer) == sorted(prompt.removesuffix(">"))
        else:
            sign = "*" if "*" in prompt else "+"
            first, second = map(int, prompt.removesuffix("=").split(sign))
            assert int(answer) == (first * second if sign == "*" else first + second)


def row(rule: str, accuracies: list[float], seed: int = 4) -> Row:
    completions = [256 * 10 * at for at in range(len(accuracies))]
    counts = {"silent": [0.5], "skipped_prompts": 3, "resampled": 0}
    return {"task": "add", "rule": rule, "seed": seed, "accuracies": accuracies, "completions": completions, **counts}


def test_a_target_is_reached_with_two_evaluations_and_a_goal_compares_medians() -> None:
    keep, right = row("keep", [0.1, 0.3, 0.55, 0.4, 0.52, 0.6]), row("right", [0.1, 0.3, 0.55, 0.5, 0.52, 0.6])
    assert (curriculum.reached(keep), curriculum.reached(right)) == (5 * 2560, 3 * 2560)
    assert curriculum.reached(row("keep", [0.1, 0.2, 0.3])) == round(1.1 * 5120), "a run that never reaches it"
    verdicts = {one["goal"]: one["measured"] for one in curriculum.judge([keep, right])}
    assert verdicts["add: completions to 0.5 with right over keep"] == pytest.approx(0.6)
    assert verdicts["accuracy at the end with right less keep, all tasks"] == pytest.approx(0.1 / 3)
    lines = {line["rule"]: line["updates"] for line in curriculum.summed([keep, right])}
    assert lines == {"keep": 50, "right": 30}


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_a_case_counts_what_it_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ("queue.batch_size=16", "queue.samples_per_prompt=4", "queue.max_lag=0", "evaluation.prompts=16")
    monkeypatch.setattr(curriculum, "SIZES", (*sizes, "model.tiny.max_steps=1"))
    config = curriculum.configure(Case("add", "right", 4), 10, tmp_path)
    tiny.make(config, tmp_path / "model")
    found = asyncio.run(curriculum.measure(config, tmp_path / "model"))
    assert len(found["accuracies"]) == len(found["completions"]) == 2
    assert found["completions"] == [0, 160] and 0 <= found["silent"][0] <= 1
