"""`streamppo eval`: the estimator of pass@k, the numbers of a result, and a model evaluated from the command line."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import MATH, SUPPORT

from streamppo.cli import main
from streamppo.commands.models import eval as command
from streamppo.commands.models.eval import ScoredAnswer, Subject
from streamppo.config.sections import Config


@pytest.mark.parametrize(("samples", "correct"), [(4, 0), (4, 1), (5, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_that_have_a_right_one(samples: int, correct: int) -> None:
    right = [number < correct for number in range(samples)]
    for k in range(1, samples + 1):
        choices = list(itertools.combinations(right, k))
        assert command.pass_at(samples, correct, k) == pytest.approx(sum(map(any, choices)) / len(choices))


@pytest.mark.parametrize(
    ("samples", "ks"), [(0, []), (1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8]), (9, [1, 2, 4, 8, 9])]
)
def test_k_doubles_up_to_the_number_of_samples(samples: int, ks: list[int]) -> None:
    assert command._ks(samples) == ks


def result(config: Config, *rows: list[float | None]) -> command.EvalResult:
    """The result of answers with these rewards, the greedy one of each prompt first."""
    answers = [[ScoredAnswer(one, 2, False, "" if one is not None else "why") for one in row] for row in rows]
    return command._result(config, Subject("m", 3, "", {}), len(rows[0]) - 1, answers)


def test_right_is_an_answer_that_reaches_correct_at_and_means_are_over_prompts(
    math_config: Callable[..., Config],
) -> None:
    config = math_config("reward.correct_at=0.5")
    found = result(config, [0.5, 0.5, 0.4], [0.4, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.9])
    # Four values of which two are 1: the mean's error is sqrt(4 * 0.25 / 3 / 4).
    assert found["accuracy"] == {"mean": 0.5, "error": pytest.approx(0.288675)}
    assert found["reward"] == pytest.approx(1.9 / 4)
    assert found["pass_at"][1]["mean"] == pytest.approx((0.5 + 0 + 1 + 0.5) / 4)
    assert found["pass_at"][2]["mean"] == pytest.approx(3 / 4)
    assert (found["version"], found["failed"], found["reasons"]) == (3, 0, {})


def test_a_failed_answer_is_not_a_wrong_one(math_config: Callable[..., Config]) -> None:
    found = result(math_config(), [None, 1.0, None], [1.0, 1.0, 0.0], [0.0, None, None])
    assert found["accuracy"]["mean"] == 0.5, "of two greedy answers with a score"
    assert found["pass_at"][1]["mean"] == pytest.approx((1 + 0.5) / 2), "the third prompt has no sample with a score"
    assert found["pass_at"][2] == {"mean": 1.0, "error": None}, "one prompt has two of them"
    assert (found["failed"], found["reasons"]) == (4, {"why": 4})


SHORT = ("model.tiny.max_steps=1", "evaluation.prompts=8", "reward.correct_at=0", "rollout.in_flight=3")


def test_a_model_is_evaluated_with_the_task_and_the_reward_of_a_configuration(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["eval", "builtin:tiny", str(MATH), *SHORT, "--samples", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["accuracy"]["mean"] == found["pass_at"]["2"]["mean"] == 1.0, "every answer reaches 0"
    assert (found["model"], found["prompts"], found["samples"]) == ("builtin:tiny", 8, 2)
    assert 1.0 <= found["tokens"] <= 5.0


def test_without_any_score_the_exit_code_is_1_and_the_reason_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = (f"reward.function={SUPPORT}/bad_rewards.py:always_raises", "reward.attempts=1")
    assert main(["eval", "builtin:tiny", str(MATH), *SHORT, *overrides, "--samples", "0"]) == 1
    shown = capsys.readouterr().out
    assert "the judge is on holiday" in shown and "8 answers without a score" in shown
    assert "pass@" not in shown


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere"], "nowhere: no run found, and a model needs a CONFIG"),
        (["/nowhere/at/all", str(MATH)], "'/nowhere/at/all' is not a folder here"),
        (["builtin:tiny", str(MATH), "--version", "3"], "builtin:tiny: no run found, and so no version 3"),
        (["builtin:tiny", "a.toml", "b.toml"], "takes one CONFIG, not a.toml and b.toml"),
        (["builtin:tiny", str(MATH), "learner.lrr=1"], "learner.lrr"),
        (["builtin:tiny", str(MATH), "--samples", "-1"], "--samples"),
    ],
)
def test_a_mistake_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["eval", *words]) == 2
    shown = capsys.readouterr()
    assert sentence in shown.err and not shown.out
