"""Every number of docs/ppo.md: its tables by the functions that train, its calculations by Python."""

import math
import re
from collections.abc import Iterable

import pytest
import torch
from conftest import REPOSITORY
from torch import Tensor

from streamppo.algorithms.advantages import gae
from streamppo.algorithms.aggregate import aggregate, denominators
from streamppo.algorithms.corrections import importance_weights
from streamppo.algorithms.diagnostics import off_policy
from streamppo.algorithms.masked import on_last_token
from streamppo.algorithms.policy_losses import clipped
from streamppo.algorithms.value_losses import value_loss

PAGE = (REPOSITORY / "docs" / "ppo.md").read_text()
TOKENS = ("Boil", "the", "shoe")
MASK = torch.ones(1, 3, dtype=torch.bool)
FUNCTIONS = {"max": max, "min": min, "log": math.log, "exp": math.exp, "__builtins__": {}}
ARITHMETIC = re.compile(r"(?:max|min|log|exp|[\d\s.,+*/()-])+")

Table = dict[str, dict[str, str]]
"""column -> token or "mean" -> the cell, in the page's own digits."""


def tables() -> list[Table]:
    """The tables about tokens, in the page's order."""
    found = []
    for text in re.findall(r"^\| token .*\n(?:\|.*\n)+", PAGE, re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
        found.append({name: {row[0]: row[n] for row in rows if row[n]} for n, name in enumerate(head)})
    return found


SAMPLED, ESTIMATED, LAMBDAS, FIRST, SECOND, CRITIC, OLD, ONE_RATIO, SEGMENTS = tables()


def numbers(cells: dict[str, str]) -> Tensor:
    return torch.tensor([[float(cells[token]) for token in TOKENS]], dtype=torch.float64)


def mean(loss_BT: Tensor) -> float:
    return float(aggregate(loss_BT, MASK, "token-mean", denominators(MASK), torch.tensor([3])))


def assert_cells(cells: dict[str, str], computed: Iterable[float], mean: float | None = None) -> None:
    """The page's cells are the computed numbers, to each of its digits."""
    wanted = dict(zip(TOKENS, computed, strict=True)) | ({} if mean is None else {"mean": mean})
    assert cells.keys() == wanted.keys()
    for name, cell in cells.items():
        assert_digits(cell, wanted[name])


def assert_digits(cell: str, value: float) -> None:
    digits = len(cell.partition(".")[2])
    assert float(cell) == pytest.approx(value, abs=0.51 * 10**-digits if digits >= 4 else 1e-9), cell


BEHAVIOR, VALUES, REWARD = numbers(SAMPLED["probability"]), numbers(ESTIMATED["value"]), numbers(ESTIMATED["reward"])
NOTHING_AFTER = torch.zeros(1, dtype=torch.float64)
ESTIMATE = gae(REWARD, VALUES, MASK, NOTHING_AFTER, gamma=1.0, lam=0.1)


def test_the_log_probs_are_those_of_the_probabilities() -> None:
    assert_cells(SAMPLED["behavior log-prob"], BEHAVIOR.log()[0].tolist())


def test_deltas_advantages_and_returns() -> None:
    assert torch.equal(on_last_token(REWARD[:, -1], MASK), REWARD), "the reward stands on the last token"
    assert_cells(
        ESTIMATED["delta"], gae(REWARD, VALUES, MASK, NOTHING_AFTER, gamma=1.0, lam=0.0).advantages[0].tolist()
    )
    assert_cells(ESTIMATED["advantage"], ESTIMATE.advantages[0].tolist())
    assert_cells(ESTIMATED["return"], ESTIMATE.returns[0].tolist())


def test_advantages_of_other_lambdas() -> None:
    lambdas = [name for name in LAMBDAS if name != "token"]
    assert lambdas == ["lam 0", "lam 0.1", "lam 0.95", "lam 1"]
    for name in lambdas:
        found = gae(REWARD, VALUES, MASK, NOTHING_AFTER, gamma=1.0, lam=float(name.split()[1]))
        assert_cells(LAMBDAS[name], found.advantages[0].tolist())


def test_the_first_step() -> None:
    correct = importance_weights(BEHAVIOR.log(), BEHAVIOR.log(), MASK, level="token", mode="truncate")
    step = clipped(BEHAVIOR.log(), BEHAVIOR.log(), ESTIMATE.advantages, MASK)
    assert_cells(FIRST["weight"], correct.weights[0].tolist())
    assert_cells(FIRST["ratio"], step.ratio[0].tolist())
    assert_cells(FIRST["loss"], (step.loss * correct.weights)[0].tolist(), mean(step.loss * correct.weights))
    critic = value_loss(VALUES, VALUES, ESTIMATE.returns, MASK, clip=0.2).loss
    shown = re.findall(r"= ([\d.]+)$", PAGE.partition("half the squared")[2].partition("##")[0], re.MULTILINE)
    assert len(shown) == 4
    for cell, value in zip(shown, [*critic[0].tolist(), mean(critic)], strict=True):
        assert_digits(cell, value)


def test_the_second_step_is_clipped() -> None:
    step = clipped(numbers(SECOND["current"]).log(), BEHAVIOR.log(), ESTIMATE.advantages, MASK)
    assert_cells(SECOND["ratio"], step.ratio[0].tolist())
    assert_cells(SECOND["loss"], step.loss[0].tolist(), mean(step.loss))
    assert [SECOND["clipped"][token] == "yes" for token in TOKENS] == step.clipped[0].tolist()
    critic = value_loss(numbers(CRITIC["value"]), VALUES, ESTIMATE.returns, MASK, clip=0.2)
    assert_cells(CRITIC["loss"], critic.loss[0].tolist(), mean(critic.loss))
    assert [CRITIC["clipped"][token] == "yes" for token in TOKENS] == critic.clipped[0].tolist()


def test_the_same_answer_two_versions_old() -> None:
    proximal = numbers(OLD["proximal"])
    correct = importance_weights(proximal.log(), BEHAVIOR.log(), MASK, level="token", mode="truncate", cap=2.0)
    loss = clipped(proximal.log(), proximal.log(), ESTIMATE.advantages, MASK).loss * correct.weights
    assert_cells(OLD["proximal / behavior"], (proximal / BEHAVIOR)[0].tolist())
    assert_cells(OLD["weight"], correct.weights[0].tolist())
    assert_cells(OLD["loss"], loss[0].tolist(), mean(loss))
    lag = torch.full((1, 3), 2)
    size = off_policy(proximal.log(), BEHAVIOR.log(), MASK, lag).overall.ess_token
    assert_digits(re.findall(r"^    \(.*= (0\.\d+)$", PAGE, re.MULTILINE)[-1], size)
    one = clipped(proximal.log(), BEHAVIOR.log(), ESTIMATE.advantages, MASK)
    assert_cells(ONE_RATIO["current / behavior"], one.ratio[0].tolist())
    assert_cells(ONE_RATIO["loss"], one.loss[0].tolist(), mean(one.loss))
    assert [ONE_RATIO["clipped"][token] == "yes" for token in TOKENS] == one.clipped[0].tolist()


def test_the_same_answer_in_two_segments_and_put_together_again() -> None:
    first = gae(REWARD[:, :2], VALUES[:, :2], MASK[:, :2], VALUES[:, 2], gamma=1.0, lam=0.1)
    second = gae(REWARD[:, 2:], VALUES[:, 2:], MASK[:, 2:], NOTHING_AFTER, gamma=1.0, lam=0.1)
    for name, one, two in (
        ("advantage", first.advantages, second.advantages),
        ("return", first.returns, second.returns),
    ):
        assert_cells(SEGMENTS[name], torch.cat([one, two], 1)[0].tolist())
    whole = first.advantages + 0.1 ** torch.tensor([[2.0, 1.0]], dtype=torch.float64) * second.advantages
    torch.testing.assert_close(whole, ESTIMATE.advantages[:, :2])


def test_every_calculation_of_the_page_comes_out() -> None:
    """Lines such as `the:  -8 + 0.1 * -1 = -8.1`: all sides that are numbers alone are the same number."""
    lines = re.findall(r"^    (?:\w+: +)?(.*?)(?:  +\(the .*)?$", PAGE, re.MULTILINE)
    sums = [sides for line in lines if len(sides := line.split(" = ")) > 1 and all(map(ARITHMETIC.fullmatch, sides))]
    assert len(sums) >= 20
    for *sides, cell in sums:
        for side in sides:
            assert_digits(cell, eval(side, dict(FUNCTIONS)))
