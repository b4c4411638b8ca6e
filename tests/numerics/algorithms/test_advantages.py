"""GAE, its special cases, the sequence-level form and whitening, against loops over plain floats."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from padded_rows import Mask, Padded, Rows, assert_rows, compact, ragged_mask, random_rows

from streamppo.algorithms.advantages import (
    adaptive_lambda,
    gae,
    gae_actor_critic,
    sequence_level,
    whiten,
)


def slow_gae(rewards: list[float], values: list[float], bootstrap: float, gamma: float, lam: float) -> list[float]:
    """One sequence, no masked tokens, from the definition: a weighted sum of all later TD errors."""
    following = [*values, bootstrap][1:]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    return [sum((gamma * lam) ** (t - s) * deltas[t] for t in range(s, len(deltas))) for s in range(len(deltas))]


def slow_rows(rewards: Rows, values: Rows, bootstrap: list[float], gamma: float, lam: list[float]) -> Rows:
    return [slow_gae(r, v, b, gamma, k) for r, v, b, k in zip(rewards, values, bootstrap, lam, strict=True)]


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_gae_with_tool_tokens_in_the_middle_equals_gae_on_the_compacted_sequence(gamma: float, lam: float) -> None:
    mask = ragged_mask()
    rewards, values = random_rows(mask, 1), random_rows(mask, 2)
    bootstrap = [0.0, 0.7, 0.0, -1.3, 0.4, 2.0]
    padded = Padded(mask)
    got = gae(
        padded.tensor(rewards),
        padded.tensor(values),
        padded.mask,
        torch.tensor(bootstrap, dtype=torch.float64),
        gamma=gamma,
        lam=lam,
    )
    kept = compact(values, mask)
    expected = slow_rows(compact(rewards, mask), kept, bootstrap, gamma, [lam] * len(mask))
    assert_rows(padded.unmasked(got.advantages), expected)
    returns = [[a + v for a, v in zip(*av, strict=True)] for av in zip(expected, kept, strict=True)]
    assert_rows(padded.unmasked(got.returns), returns)
    assert got.advantages[~padded.mask].abs().sum() == 0
    assert got.returns[~padded.mask].abs().sum() == 0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=4))
def test_gae_survives_every_pattern_of_masked_tokens(mask: Mask) -> None:
    rewards, values = random_rows(mask, 1), random_rows(mask, 2)
    bootstrap = [0.5] * len(mask)
    padded = Padded(mask)
    after = torch.tensor(bootstrap, dtype=torch.float64)
    got = gae(padded.tensor(rewards), padded.tensor(values), padded.mask, after, gamma=0.9, lam=0.8)
    expected = slow_rows(compact(rewards, mask), compact(values, mask), bootstrap, 0.9, [0.8] * len(mask))
    assert_rows(padded.unmasked(got.advantages), expected)


def test_the_worked_example_boil_the_shoe_gives_plus_1_minus_8_minus_1_and_errors_1_64_1() -> None:
    values = torch.tensor([[8.0, 9.0, 1.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    got = gae(torch.zeros(1, 3), values, mask, torch.zeros(1), gamma=1.0, lam=0.0)
    assert got.advantages.tolist() == [[1.0, -8.0, -1.0]]
    assert (got.returns - values).square().tolist() == [[1.0, 64.0, 1.0]]


def test_lambda_one_is_monte_carlo_minus_the_value() -> None:
    mask = ragged_mask(3)
    rewards, values = random_rows(mask, 1), random_rows(mask, 2)
    padded = Padded(mask)
    got = gae(
        padded.tensor(rewards), padded.tensor(values), padded.mask, torch.zeros(len(mask)), gamma=1.0, lam=1.0,
    )  # fmt: skip
    to_go = [[sum(r[t:]) for t in range(len(r))] for r in compact(rewards, mask)]
    assert_rows(padded.unmasked(got.returns), to_go)


def test_lambda_may_differ_by_sequence_and_between_actor_and_critic() -> None:
    mask = ragged_mask(7)
    rewards, values = random_rows(mask, 1), random_rows(mask, 2)
    lam = [0.1 * (b + 1) for b in range(len(mask))]
    zeros = [0.0] * len(mask)
    padded = Padded(mask)
    got = gae_actor_critic(
        padded.tensor(rewards),
        padded.tensor(values),
        padded.mask,
        torch.zeros(len(mask)),
        gamma=0.97,
        lam_actor=torch.tensor(lam, dtype=torch.float64),
        lam_critic=1.0,
    )
    kept_r, kept_v = compact(rewards, mask), compact(values, mask)
    assert_rows(padded.unmasked(got.advantages), slow_rows(kept_r, kept_v, zeros, 0.97, lam))
    critic = slow_rows(kept_r, kept_v, zeros, 0.97, [1.0] * len(mask))
    returns = [[a + v for a, v in zip(*av, strict=True)] for av in zip(critic, kept_v, strict=True)]
    assert_rows(padded.unmasked(got.returns), returns)


def test_a_truncated_response_learns_from_the_critics_value_after_its_last_token() -> None:
    mask = torch.ones(2, 2, dtype=torch.bool)
    values = torch.tensor([[1.0, 2.0], [1.0, 2.0]])
    got = gae(torch.zeros(2, 2), values, mask, torch.tensor([0.0, 5.0]), gamma=1.0, lam=0.0)
    assert got.advantages.tolist() == [[1.0, -2.0], [1.0, 3.0]]


def test_a_long_sequence_loses_no_precision_in_the_doubling_scan() -> None:
    T = 3001
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(1, T, generator=generator, dtype=torch.float64)
    values = torch.randn(1, T, generator=generator, dtype=torch.float64)
    mask = torch.ones(1, T, dtype=torch.bool)
    got = gae(rewards, values, mask, torch.tensor([0.3], dtype=torch.float64), gamma=0.999, lam=0.99)
    expected, following, running = [0.0] * T, 0.3, 0.0
    for t in reversed(range(T)):
        delta = rewards[0, t].item() + 0.999 * following - values[0, t].item()
        running = delta + 0.999 * 0.99 * running
        expected[t], following = running, values[0, t].item()
    assert_rows(got.advantages.tolist(), [expected], 1e-8)


def test_no_gradient_flows_from_advantages_into_the_critic() -> None:
    values = torch.ones(1, 2, requires_grad=True)
    got = gae(torch.zeros(1, 2), values, torch.ones(1, 2).bool(), torch.zeros(1), gamma=1.0, lam=0.5)
    assert not got.advantages.requires_grad
    assert not got.returns.requires_grad


def test_adaptive_lambda_grows_with_the_length_and_never_leaves_the_unit_interval() -> None:
    got = adaptive_lambda(torch.tensor([1, 20, 100, 4000, 0]), 0.05)
    assert got.tolist() == pytest.approx([0.0, 0.0, 0.8, 0.995, 0.0], abs=1e-6)


def test_the_sequence_level_form_gives_every_token_score_minus_baseline() -> None:
    mask = ragged_mask()
    padded = Padded(mask)
    scores, baseline = torch.arange(len(mask)).double(), torch.full((len(mask),), 0.5, dtype=torch.float64)
    got = sequence_level(scores, baseline, padded.mask)
    assert_rows(padded.unmasked(got.advantages), [[b - 0.5 for m in row if m] for b, row in enumerate(mask)])
    assert_rows(padded.unmasked(got.returns), [[float(b) for m in row if m] for b, row in enumerate(mask)])


def slow_whiten(x: list[float], shift_mean: bool, unbiased: bool, eps: float) -> list[float]:
    n = len(x)
    mean = sum(x) / n
    variance = sum((v - mean) ** 2 for v in x) / (n - 1 if unbiased and n > 1 else n)
    return [(v - mean) / math.sqrt(variance + eps) + (0.0 if shift_mean else mean) for v in x]


@pytest.mark.parametrize("shift_mean", [True, False])
@pytest.mark.parametrize("unbiased", [True, False])
def test_whitening_sees_unmasked_tokens_only_over_the_batch_or_within_a_group(shift_mean: bool, unbiased: bool) -> None:
    mask = ragged_mask()
    rows = random_rows(mask, 5, 2.0, 5.0)
    padded = Padded(mask)
    kept = compact(rows, mask)
    flat = iter(slow_whiten([x for row in kept for x in row], shift_mean, unbiased, 1e-8))
    got = whiten(padded.tensor(rows), padded.mask, shift_mean=shift_mean, unbiased=unbiased)
    assert_rows(padded.unmasked(got), [[next(flat) for _ in row] for row in kept])
    assert got[~padded.mask].abs().sum() == 0

    groups = [7, 7, 3, 3, 7, 9]
    got = whiten(
        padded.tensor(rows), padded.mask, shift_mean=shift_mean, unbiased=unbiased,
        group_ids_B=torch.tensor(groups),
    )  # fmt: skip
    members = {g: [x for row, h in zip(kept, groups, strict=True) if h == g for x in row] for g in set(groups)}
    white = {g: iter(slow_whiten(x, shift_mean, unbiased, 1e-8)) for g, x in members.items()}
    assert_rows(padded.unmasked(got), [[next(white[g]) for _ in row] for row, g in zip(kept, groups, strict=True)])


def test_whitening_equal_values_or_one_token_gives_zero_and_never_nan() -> None:
    x = torch.tensor([[1e6, 1e6, 1e6], [0.1, 7.0, 7.0]])
    mask = torch.tensor([[True, True, True], [False, False, False]])
    assert whiten(x, mask).abs().max() < 1e-3
    lonely = torch.tensor([[False, False, False], [True, False, False]])
    assert whiten(x, lonely, unbiased=True).tolist() == [[0.0] * 3, [0.0] * 3]
    assert whiten(x, torch.zeros_like(mask)).tolist() == [[0.0] * 3, [0.0] * 3]
