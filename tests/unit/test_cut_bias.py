"""The arithmetic of the bias of a cut: states are running ones, noise is taken out, advantages decay as GAE has it."""

import sys
from typing import Any

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, trajectory

from streamppo.algorithms.advantages import gae
from streamppo.learner.model.policy import empty_output

sys.path.insert(0, str(REPOSITORY))

from benchmarks.learning import cut_bias
from benchmarks.learning.cut_bias import Cut

ONE = {
    "place": [1, 4, 9, 2],
    "ours": [0.5, 0.1, 0.3, 0.9],
    "before": [0.4, 0.1, 0.3, 0.9],
    "waiting": [1.0, 0.0, 0.0, 1.0],
    "lam-return": [0.6, 0.1, 0.2, 0.8],
    "mean": [0.25, 0.25, 0.25, 0.75],
    "error": [0.01, 0.01, 0.01, 0.01],
}


def row(seed: int, policy: str, **found: dict[str, Any]) -> dict[str, Any]:
    return {"seed": seed, "policy": policy, "critics": found}


def test_cuts_are_different_states_of_running_completions_each_as_likely_as_any_other() -> None:
    lengths = [1, 2, 12]
    every = cut_bias.draw(lengths, 100, np.random.default_rng(0))
    assert every == [Cut(1, 1), *(Cut(2, place) for place in range(1, 12))]
    drawn = [cut for seed in range(600) for cut in cut_bias.draw(lengths, 3, np.random.default_rng(seed))]
    assert drawn.count(Cut(1, 1)) == pytest.approx(600 * 3 / 12, rel=0.25)
    assert cut_bias.draw(lengths, 3, np.random.default_rng(1)) == cut_bias.draw(lengths, 3, np.random.default_rng(1))


def test_each_cut_has_the_value_behind_its_tokens_the_one_before_and_what_came_of_it() -> None:
    batch = cut_bias.pad_all([trajectory([5, 6, 7], reward=1.0), trajectory([5, 6], number=1, reward=0.25)])
    values = torch.tensor([[0.1, 0.2, 0.4], [0.3, 0.5, 0.0]])
    scored = empty_output(batch)._replace(values_BT=values)
    found = cut_bias.columns(batch, scored, [Cut(0, 1), Cut(0, 2), Cut(1, 1)])
    assert found["place"] == [1, 2, 1]
    assert found["ours"] == pytest.approx([0.2, 0.4, 0.5])
    assert found["before"] == pytest.approx([0.1, 0.2, 0.3])
    assert found["waiting"] == pytest.approx([1.0, 1.0, 0.25])
    lam = cut_bias.LAM
    assert found["lam-return"] == pytest.approx([0.4 + lam * (1 - 0.4), 1.0, 0.25], abs=1e-5)


def test_bias_is_a_mean_and_the_error_is_without_the_noise_of_the_truth() -> None:
    assert cut_bias.bias(ONE, "ours") == pytest.approx((0.25 - 0.15 + 0.05 + 0.15) / 4)
    squares = [0.25**2, 0.15**2, 0.05**2, 0.15**2]
    assert cut_bias.rmse(ONE, "ours") == pytest.approx((sum(squares) / 4 - 0.01) ** 0.5)
    assert cut_bias.rmse(ONE | {"error": [1.0] * 4}, "ours") == 0.0
    # Drawn around a truth that is known itself only from 64 draws.
    generator = np.random.default_rng(0)
    truth = generator.random(4000)
    draws = generator.random((4000, 64)) < truth[:, None]
    found = {
        "place": [1] * 4000,
        "ours": (truth + 0.1).tolist(),
        "mean": draws.mean(1).tolist(),
        "error": (draws.var(1, ddof=1) / 64).tolist(),
    }
    assert cut_bias.rmse(found, "ours") == pytest.approx(0.1, abs=0.004)


@pytest.mark.parametrize("distance", [1, 2, 3])
def test_an_error_at_the_cut_reaches_advantages_as_gae_carries_it(distance: int) -> None:
    values, mask = torch.tensor([[0.3, 0.1, 0.6]]), torch.ones(1, 3, dtype=torch.bool)

    def advantage(bootstrap: float) -> float:
        made = gae(torch.zeros(1, 3), values, mask, torch.tensor([bootstrap]), gamma=1.0, lam=cut_bias.LAM)
        return made.advantages[0, 3 - distance].item()

    found = {"place": [3], "ours": [0.7], "mean": [0.4], "error": [0.0]}
    expected = advantage(0.7) - advantage(0.4)
    assert cut_bias.advantage_error(found, "ours", distance) == pytest.approx(expected, abs=1e-6)


def test_an_advantage_is_counted_where_the_segment_has_as_many_tokens() -> None:
    assert cut_bias.advantage_error(ONE, "ours", 4) == pytest.approx(
        cut_bias.LAM**3 * ((0.15**2 + 0.05**2) / 2 - 0.01) ** 0.5
    )
    assert cut_bias.advantage_error(ONE, "ours", 32) == 0.0


def test_seeds_become_medians_with_their_spread_and_goals_have_a_verdict() -> None:
    worse = ONE | {"ours": [number + 0.3 for number in ONE["ours"]]}
    best = ONE | {"ours": ONE["mean"]}
    rows = [row(seed, "trained", trained=found) for seed, found in enumerate((worse, ONE, best))]
    lines = {(line["critic"], line["estimate"]): line for line in cut_bias.summary(rows)}
    line = lines["trained", "ours"]
    assert (line["bias"], line["bias_least"]) == (pytest.approx(0.075), pytest.approx(0.0))
    assert line["bias_most"] == pytest.approx(0.375)
    assert line["rmse"] == pytest.approx(cut_bias.rmse(ONE, "ours"))
    assert line["advantage_1"] == line["rmse"]
    assert all(critic == "trained" for critic, _ in lines)
    verdicts = {verdict["goal"]: verdict["met"] for verdict in cut_bias.judge(rows)}
    assert verdicts[cut_bias.GOALS["bias"].name] is False
    assert verdicts[cut_bias.GOALS["trained"].name] is True
    assert verdicts[cut_bias.GOALS["warmed"].name] is None
