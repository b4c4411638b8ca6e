"""Critic losses, KL estimators and controllers, the interpolated proximal policy and the boundary checks."""

import math
import statistics
from collections.abc import Callable

import pytest
import torch
from padded_rows import Padded, assert_rows, compact, logprob_rows, near, ragged_mask, random_rows

from streamppo.algorithms.corrections import current_as_proximal, loglinear_proximal
from streamppo.algorithms.kl import Estimator, kl, kl_loss, kl_reward, next_beta, stop_early
from streamppo.algorithms.masked import check_any, check_finite, check_logprobs
from streamppo.algorithms.value_losses import ValueKind, explained_variance, value_loss


def slow_regression(error: float, kind: ValueKind, delta: float) -> float:
    if kind == "mse" or abs(error) <= delta:
        return 0.5 * error * error
    return delta * (abs(error) - 0.5 * delta)


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("kind", ["mse", "huber"])
def test_the_value_loss_equals_its_definition_and_reports_what_was_clipped(clip: float | None, kind: ValueKind) -> None:
    mask = ragged_mask(2)
    values, anchors, returns = (random_rows(mask, seed) for seed in (1, 2, 3))
    padded = Padded(mask)
    current = padded.tensor(values).requires_grad_()
    got = value_loss(
        current, padded.tensor(anchors), padded.tensor(returns), padded.mask,
        clip=clip, kind=kind, huber_delta=0.3,
    )  # fmt: skip
    loss, clipped = [], []
    for rows in zip(*(compact(rows, mask) for rows in (values, anchors, returns)), strict=True):
        loss.append([])
        clipped.append([])
        for v, a, g in zip(*rows, strict=True):
            free = slow_regression(v - g, kind, 0.3)
            moved = v if clip is None else a + min(max(v - a, -clip), clip)
            bounded = slow_regression(moved - g, kind, 0.3)
            loss[-1].append(max(free, bounded))
            clipped[-1].append(float(bounded > free))
    assert_rows(padded.unmasked(got.loss), loss)
    assert_rows(padded.unmasked(got.clipped), clipped)
    got.loss.sum().backward()
    assert current.grad is not None
    assert current.grad.isfinite().all()


def test_critic_errors_of_the_worked_example_are_half_of_1_64_1() -> None:
    values, returns = torch.tensor([[8.0, 9.0, 1.0]]), torch.tensor([[9.0, 1.0, 0.0]])
    got = value_loss(values, values, returns, torch.ones(1, 3).bool(), clip=None)
    assert got.loss.tolist() == [[0.5, 32.0, 0.5]]


def test_explained_variance_is_one_for_a_perfect_critic_and_zero_for_a_constant_one() -> None:
    mask = ragged_mask(2)
    rows = random_rows(mask, 1)
    padded = Padded(mask)
    returns = padded.tensor(rows)
    assert explained_variance(returns, returns, padded.mask) == pytest.approx(1.0)
    constant = torch.full_like(returns, 3.0)
    assert explained_variance(constant, returns, padded.mask) == pytest.approx(0.0)
    guess = random_rows(mask, 2)
    flat = [x for row in compact(rows, mask) for x in row]
    errors = [
        x - y for r, g in zip(compact(rows, mask), compact(guess, mask), strict=True) for x, y in zip(r, g, strict=True)
    ]
    expected = 1 - statistics.pvariance(errors) / statistics.pvariance(flat)
    assert explained_variance(padded.tensor(guess), returns, padded.mask) == pytest.approx(expected)
    assert explained_variance(returns, constant, padded.mask) == 0.0
    assert explained_variance(returns, returns, torch.zeros_like(padded.mask)) == 0.0


def slow_kl(d: float, kind: Estimator) -> float:
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[kind]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_in_the_loss_and_in_the_reward_equals_its_definition(kind: Estimator) -> None:
    mask = ragged_mask(2)
    reference, rewards = logprob_rows(mask, 3), random_rows(mask, 5)
    current = near(reference, 4)
    padded = Padded(mask)
    logprobs = padded.tensor(current).requires_grad_()
    pairs = zip(compact(current, mask), compact(reference, mask), strict=True)
    difference = [[x - y for x, y in zip(*pair, strict=True)] for pair in pairs]
    expected = [[slow_kl(d, kind) for d in row] for row in difference]
    straight = kl_loss(logprobs, padded.tensor(reference), padded.mask, kind=kind, straight_through=True)
    plain = kl_loss(logprobs, padded.tensor(reference), padded.mask, kind=kind)
    assert_rows(padded.unmasked(plain), expected)
    assert_rows(padded.unmasked(straight), expected)
    straight.sum().backward()
    assert logprobs.grad is not None
    assert_rows(padded.unmasked(logprobs.grad), difference)
    shaped = kl_reward(padded.tensor(rewards), logprobs, padded.tensor(reference), padded.mask, beta=0.3, kind=kind)
    rows = zip(compact(rewards, mask), expected, strict=True)
    assert_rows(padded.unmasked(shaped), [[r - 0.3 * k for r, k in zip(*pair, strict=True)] for pair in rows])
    assert not shaped.requires_grad


def test_k1_and_k3_estimate_the_exact_kl_and_only_k2_has_its_gradient() -> None:
    logits = torch.tensor([0.3, -0.4, 0.9, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.0, 0.2, 0.1, -0.5], dtype=torch.float64).log_softmax(-1)
    current = logits.log_softmax(-1)
    p = current.exp()
    exact = (p * (current - reference)).sum()
    (exact_gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
    everywhere = torch.ones(1, 4, dtype=torch.bool)
    gradients = {}
    for kind in ("k1", "k2", "k3"):
        estimate = kl(current[None], reference[None], everywhere, kind=kind)[0]
        if kind != "k2":
            assert (p * estimate).sum().item() == pytest.approx(exact.item(), rel=1e-9)
        (gradients[kind],) = torch.autograd.grad((p.detach() * estimate).sum(), logits, retain_graph=True)
    torch.testing.assert_close(gradients["k2"], exact_gradient)
    assert gradients["k1"].abs().max() < 1e-12
    assert (gradients["k3"] - exact_gradient).abs().max() > 1e-2


def test_the_adaptive_coefficient_moves_towards_the_target_and_by_a_bounded_amount() -> None:
    assert next_beta(0.1, 6.0, 256, target=6.0, horizon=10_000) == 0.1
    assert next_beta(0.1, 6.6, 1000, target=6.0, horizon=10_000) == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert next_beta(0.1, 60.0, 1000, target=6.0, horizon=10_000) == pytest.approx(0.1 * (1 + 0.2 * 0.1))
    assert next_beta(0.1, 0.0, 1000, target=6.0, horizon=10_000) == pytest.approx(0.1 * (1 - 0.2 * 0.1))
    assert next_beta(0.1, 0.0, 10**9, target=6.0, horizon=10) == 0.0


def test_an_update_stops_early_when_its_kl_passes_the_target_or_is_not_a_number() -> None:
    assert not stop_early(0.014, 0.01)
    assert stop_early(0.016, 0.01)
    assert stop_early(float("nan"), 0.01)
    assert not stop_early(100.0, None)


def test_the_interpolated_proximal_policy_is_behavior_at_lag_0_and_nears_the_current_one() -> None:
    behavior, current = torch.tensor([[-2.0, -2.0, -2.0, float("nan")]]), torch.full((1, 4), -1.0, requires_grad=True)
    mask = torch.tensor([[True, True, True, False]])
    got = loglinear_proximal(behavior, current, torch.tensor([[0, 1, 3, 5]]), mask)
    assert got.tolist() == [[-2.0, -1.5, -1.25, 0.0]]
    assert not got.requires_grad
    with pytest.raises(ValueError, match="lag_BT has shape"):
        loglinear_proximal(behavior, current, torch.zeros(1, 3), mask)


def test_in_an_update_of_one_step_the_proximal_policy_is_the_current_one_as_a_constant() -> None:
    behavior, current = torch.full((1, 3), -2.0), torch.tensor([[-1.0, -3.0, float("nan")]], requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    got = current_as_proximal(behavior, current, torch.tensor([[0, 4, 0]]), mask)
    assert got.tolist() == [[-1.0, -3.0, 0.0]]
    assert not got.requires_grad
    with pytest.raises(ValueError, match="behavior_logprobs_BT has shape"):
        current_as_proximal(behavior[:, :2], current, torch.zeros(1, 3), mask)


@pytest.mark.parametrize("anchor", [loglinear_proximal, current_as_proximal])
def test_the_proximal_policy_equals_its_definition_at_every_unmasked_token(anchor: Callable[..., torch.Tensor]) -> None:
    mask = ragged_mask(5)
    behavior, current = logprob_rows(mask, 1), logprob_rows(mask, 2)
    lag = [[float(t % 4) for t in range(len(row))] for row in mask]
    padded = Padded(mask)
    got = anchor(padded.tensor(behavior), padded.tensor(current), padded.tensor(lag), padded.mask)

    def between(b: float, c: float, age: float) -> float:
        return c if anchor is current_as_proximal else b / (age + 1) + c * age / (age + 1)

    rows = zip(*(compact(rows, mask) for rows in (behavior, current, lag)), strict=True)
    assert_rows(padded.unmasked(got), [[between(*numbers) for numbers in zip(*row, strict=True)] for row in rows])
    assert not got[~padded.mask].any()


def test_nan_infinite_and_positive_logprobs_are_refused_where_they_would_be_used() -> None:
    mask = torch.tensor([[True, True, False]])
    good = torch.tensor([[-1.0, 1e-4, float("nan")]])
    check_logprobs(mask, logprobs=good)
    check_logprobs(mask, logprobs=torch.tensor([[-1.0, -1.0, 9.0]]))
    check_any(mask)
    with pytest.raises(ValueError, match=r"behavior_logprobs\[0, 1\] = 0.5 is above 0"):
        check_logprobs(mask, logprobs=good, behavior_logprobs=torch.tensor([[-1.0, 0.5, 9.0]]))
    with pytest.raises(ValueError, match=r"logprobs\[0, 0\] = nan is not finite \(1 of 3 entries\)"):
        check_logprobs(mask, logprobs=torch.tensor([[float("nan"), -1.0, -1.0]]))
    with pytest.raises(ValueError, match=r"rewards\[0, 0\] = -inf is not finite"):
        check_finite(mask, rewards=torch.full((1, 3), -math.inf))
    with pytest.raises(ValueError, match="every token of the batch is masked"):
        check_any(mask & False)
    with pytest.raises(ValueError, match="rewards has shape"):
        check_finite(mask, rewards=torch.zeros(1, 2))


def test_rounding_never_counts_as_clipping() -> None:
    """anchor + (value - anchor) is not always the value."""
    generator = torch.Generator().manual_seed(0)
    anchor, moved, returns = (torch.randn(4, 2000, generator=generator) * 0.01 for _ in range(3))
    got = value_loss(moved, anchor, returns, torch.ones_like(anchor).bool(), clip=0.2)
    assert not got.clipped.any()
    assert torch.equal(got.loss, 0.5 * (moved - returns).square())
