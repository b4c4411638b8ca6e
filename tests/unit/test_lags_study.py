"""The study of lag in one process: its cases, its exact lag, its paces, its verdicts."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import learner_case
import pytest
import torch

from benchmarks.learning import lags
from benchmarks.learning.lags import Case
from streamppo.config import file as configfile
from streamppo.learner.model import tiny
from streamppo.learner.objective.adaptation import is_lowered_by_ess

TINY = ("updates=6", "queue.batch_size=16", "model.tiny.max_steps=1", "evaluation.prompts=16")


@pytest.mark.slow
@pytest.mark.parametrize("part", ["fixed", "steered", "default"])
def test_every_case_is_a_configuration_that_can_be_run(part: str) -> None:
    listed = list(lags.cases(part, (1, 2)))
    assert len(listed) == len(set(listed)) and {case.seed for case in listed} == {1, 2}
    for case in listed:
        config = configfile.load(lags.CONFIG, lags.overrides(case, 0))
        assert config.queue.bound == case.lag
        assert (config.queue.first_lag is not None) == (case.pace in ("adaptive", "alone"))
        assert is_lowered_by_ess(config) == (case.pace in ("adaptive", "rate"))
        assert config.learner.minibatches == (4 if part == "steered" else 1)


def measured(folder: Path, case: Case, *more: str) -> Mapping[str, Any]:
    """A tiny run of a case."""
    config = configfile.load(lags.CONFIG, [*lags.overrides(case, 0), *TINY, *more])
    tiny.make(config, folder / "model")
    with learner_case.group(0, 1, folder / "store"):
        return asyncio.run(lags.measure(case, config, folder / "model"))


def test_every_token_has_exactly_the_lag_that_was_chosen_once_there_are_as_many_versions(tmp_path: Path) -> None:
    found = measured(tmp_path, Case("fixed", "truncate", "grpo", "fixed", 2, 1))
    assert found["lags"] == [0, 1, 2, 2, 2, 2]
    assert (found["lag_max"], found["lr_share"]) == (2, 1.0)
    assert len(found["accuracies"]) == 7


def test_a_steered_run_goes_ahead_as_far_as_the_rule_admits(tmp_path: Path) -> None:
    found = measured(tmp_path, Case("steered", "clip", "gae", "adaptive", 64, 1), "learner.lr=1e-6")
    # It begins with 1, and data as good as on-policy let it rise to 3 once they are as old as admitted.
    assert found["lags"] == [0, 1, 1, 1, 2, 3]


def test_aligned_gradients_halve_the_lag_and_unaligned_ones_raise_it() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    holder: Any = type("Policy", (), {"lm": torch.nn.ParameterList([parameter])})
    pace = lags.Cosine(holder)
    for gradient, admitted in (([1.0, 0.0], 1), ([0.0, 1.0], 2), ([1.0, 0.0], 3), ([1.0, 0.2], 1), ([1.0, -2.0], 1)):
        parameter.grad = torch.tensor(gradient)
        pace.after(None, {})  # pyright: ignore[reportArgumentType]
        assert pace.admitted == admitted, gradient


def row(pace: str, lag: int, accuracy: float, **more: Any) -> dict[str, Any]:
    numbers = {"first_accuracy": 0.2, "ess": 0.5, "lag_mean": float(lag), "lr_share": 1.0}
    case = {"part": "steered", "treatment": "clip", "advantage": "gae", "pace": pace, "lag": lag, "seed": 1}
    return {**case, "accuracy": accuracy, **numbers, **more}


def test_runs_are_judged_beside_the_synchronous_one_of_their_seed_and_loss() -> None:
    rows = [row("fixed", 0, 0.8), row("adaptive", 64, 0.76, lag_mean=9.0), row("adaptive", 64, 0.1, seed=2)]
    found = {verdict["goal"]: verdict for verdict in lags.judge(rows)}
    assert found[lags.GOALS["collapses"].name]["measured"] == 1
    assert found[lags.GOALS["accuracy"].name]["range"] == [pytest.approx(0.95)] * 2, "seed 2 has no synchronous run"
    assert found[lags.GOALS["default"].name]["met"] is None
    lines = lags.summed(rows)
    assert [(line["pace"], line["seeds"], line["collapsed"]) for line in lines] == [("fixed", 1, 0), ("adaptive", 2, 1)]
