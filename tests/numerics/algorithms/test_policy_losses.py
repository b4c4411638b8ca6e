"""Every policy loss against a plain-float definition: values, gradient by finite differences, special cases."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from padded_rows import (
    Padded,
    Rows,
    assert_rows,
    compact,
    logprob_rows,
    near,
    ragged_mask,
    random_rows,
)
from torch import Tensor

from streamppo.algorithms import policy_losses, sequence_losses
from streamppo.algorithms.policy_losses import TokenLoss

Row = list[float]
Slow = Callable[[Row, Row, Row, Row], Row]
Fast = Callable[..., TokenLoss]


def clamp(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def surrogate(a: float, r: float, low: float, high: float) -> float:
    return max(-a * r, -a * clamp(r, 1 - low, 1 + high))


def slow_clipped(lp: Row, frozen: Row, px: Row, adv: Row) -> Row:
    return [surrogate(a, math.exp(x - p), 0.1, 0.2) for x, p, a in zip(lp, px, adv, strict=True)]


def slow_dual(lp: Row, frozen: Row, px: Row, adv: Row) -> Row:
    rows = zip(slow_clipped(lp, frozen, px, adv), adv, strict=True)
    return [min(loss, -1.25 * a) if a < 0 else loss for loss, a in rows]


def slow_cispo(lp: Row, frozen: Row, px: Row, adv: Row) -> Row:
    return [-clamp(math.exp(f - p), 0.9, 1.2) * a * x for x, f, p, a in zip(lp, frozen, px, adv, strict=True)]


def slow_gspo(lp: Row, frozen: Row, px: Row, adv: Row) -> Row:
    s = math.exp(sum(f - p for f, p in zip(frozen, px, strict=True)) / max(len(lp), 1))
    return [surrogate(a, s * math.exp(x - f), 0.02, 0.03) for x, f, a in zip(lp, frozen, adv, strict=True)]


def slow_sequence(lp: Row, frozen: Row, px: Row, adv: Row) -> Row:
    if not lp:
        return []
    ratio = math.exp(sum(x - p for x, p in zip(lp, px, strict=True)))
    return [surrogate(sum(adv) / len(adv), ratio, 0.2, 0.3)] * len(lp)


def slow_reinforce(lp: Row, frozen: Row, px: Row, adv: Row) -> Row:
    return [-a * x for x, a in zip(lp, adv, strict=True)]


def slow_weighted(lp: Row, frozen: Row, px: Row, adv: Row) -> Row:
    return [-a * math.exp(x - p) for x, p, a in zip(lp, px, adv, strict=True)]


def slow_dppo(lp: Row, frozen: Row, px: Row, adv: Row) -> Row:
    result: Row = []
    for x, f, p, a in zip(lp, frozen, px, adv, strict=True):
        shift = math.exp(f) - math.exp(p)
        drop = (a > 0 and shift > 0.05) or (a < 0 and -shift > 0.05)
        result.append(0.0 if drop else -a * math.exp(x - p))
    return result


def slow_sapo(lp: Row, frozen: Row, px: Row, adv: Row) -> Row:
    result: Row = []
    for x, p, a in zip(lp, px, adv, strict=True):
        tau = 1.5 if a > 0 else 2.5
        result.append(-a * 4 / tau / (1 + math.exp(-tau * (math.exp(x - p) - 1))))
    return result


def clipped_log_ratio(x: float, p: float, a: float) -> float:
    return min(x - p, 0.2) if a > 0 else max(x - p, -0.1)


def slow_gmpo(lp: Row, frozen: Row, px: Row, adv: Row) -> Row:
    kept = [clipped_log_ratio(*columns) for columns in zip(frozen, px, adv, strict=True)]
    mean = math.exp(sum(kept) / max(len(kept), 1))
    moved = [clipped_log_ratio(*columns) for columns in zip(lp, px, adv, strict=True)]
    return [-a * mean * math.exp(x - k) for x, k, a in zip(moved, kept, adv, strict=True)]


def slow_vespo(lp: Row, frozen: Row, px: Row, adv: Row) -> Row:
    weight = math.exp(sum(f - p for f, p in zip(frozen, px, strict=True)))
    result: Row = []
    for x, a in zip(lp, adv, strict=True):
        k, rate = (2.0, 3.0) if a >= 0 else (1.5, 0.5)
        result.append(-(weight**k) * math.exp(rate * (1 - weight)) * a * x)
    return result


def slow_dppo_kl(lp: Row, frozen: Row, px: Row, adv: Row) -> Row:
    result: Row = []
    for x, f, log_p, a in zip(lp, frozen, px, adv, strict=True):
        p, q = math.exp(log_p), math.exp(f)
        kl = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
        result.append(0.0 if kl > 0.005 and (q - p) * a > 0 else -a * math.exp(x - log_p))
    return result


def slow_ipo(lp: Row, frozen: Row, px: Row, adv: Row) -> Row:
    rows = zip(lp, frozen, px, adv, strict=True)
    return [0.0 if abs(math.exp(f) - math.exp(p)) > 0.05 else -a * math.exp(x - p) for x, f, p, a in rows]


LOSSES: dict[str, tuple[Fast, Slow]] = {
    "clipped": (partial(policy_losses.clipped, clip_low=0.1, clip_high=0.2), slow_clipped),
    "dual": (partial(policy_losses.clipped, clip_low=0.1, clip_high=0.2, dual_clip=1.25), slow_dual),
    "cispo": (partial(policy_losses.cispo, clip_low=0.1, clip_high=0.2), slow_cispo),
    "gspo": (partial(sequence_losses.gspo, clip_low=0.02, clip_high=0.03), slow_gspo),
    "sequence": (partial(sequence_losses.sequence_clipped, clip_low=0.2, clip_high=0.3), slow_sequence),
    "reinforce": (policy_losses.reinforce, slow_reinforce),
    "importance_weighted": (policy_losses.importance_weighted, slow_weighted),
    "dppo_tv": (partial(policy_losses.dppo_tv, delta=0.05), slow_dppo),
    "dppo_kl": (partial(policy_losses.dppo_kl, delta=0.005), slow_dppo_kl),
    "ipo": (partial(policy_losses.ipo, eps=0.05), slow_ipo),
    "gmpo": (partial(sequence_losses.gmpo, log_low=0.1, log_high=0.2), slow_gmpo),
    "vespo": (partial(sequence_losses.vespo, positive=(2.0, 3.0), negative=(1.5, 0.5)), slow_vespo),
    "sapo": (partial(policy_losses.sapo, tau_positive=1.5, tau_negative=2.5), slow_sapo),
}


def slow_rows(slow: Slow, lp: Rows, frozen: Rows, px: Rows, adv: Rows) -> Rows:
    return [slow(*rows) for rows in zip(lp, frozen, px, adv, strict=True)]


def slow_gradient(slow: Slow, lp: Rows, px: Rows, adv: Rows) -> Rows:
    """Central differences of the summed loss; what the loss detaches (`frozen`) is held still."""

    def total(b: int, t: int, shift: float) -> float:
        moved = [list(row) for row in lp]
        moved[b][t] += shift
        return sum(slow(moved[b], lp[b], px[b], adv[b]))

    h = 1e-6
    return [[(total(b, t, h) - total(b, t, -h)) / (2 * h) for t in range(len(row))] for b, row in enumerate(lp)]


@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_equal_the_plain_float_definition(name: str) -> None:
    fast, slow = LOSSES[name]
    mask = ragged_mask(2, 8)
    proximal, adv = logprob_rows(mask, 3), random_rows(mask, 6)
    current = near(proximal, 7)
    padded = Padded(mask)
    logprobs = padded.tensor(current).requires_grad_()
    got = fast(logprobs, padded.tensor(proximal), padded.tensor(adv), padded.mask)
    lp, px, a = compact(current, mask), compact(proximal, mask), compact(adv, mask)
    assert_rows(padded.unmasked(got.loss), slow_rows(slow, lp, lp, px, a))
    assert got.loss[~padded.mask].abs().sum() == 0
    assert not got.clipped[~padded.mask].any()
    assert got.clipped.dtype == torch.bool
    got.loss.sum().backward()
    assert logprobs.grad is not None
    assert_rows(padded.unmasked(logprobs.grad), slow_gradient(slow, lp, px, a), 1e-6)
    assert logprobs.grad[~padded.mask].abs().sum() == 0


@pytest.mark.parametrize("name", LOSSES)
def test_at_current_equal_proximal_every_loss_has_the_gradient_of_reinforce(name: str) -> None:
    """Sequence-level ratios spread it: GSPO over its mean, sequence PPO over the sum of equal advantages."""
    advantages = torch.tensor([[0.5], [-2.0], [1.0]], dtype=torch.float64)
    proximal = torch.tensor([[-1.0], [-0.3], [-2.0]], dtype=torch.float64)
    logprobs = proximal.clone().requires_grad_()
    got = LOSSES[name][0](logprobs, proximal, advantages, torch.ones(3, 1).bool())
    got.loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, -advantages)
    assert not got.clipped.any()
    assert torch.equal(got.ratio, torch.ones(3, 1, dtype=torch.float64))


@pytest.mark.parametrize("name", LOSSES)
def test_proximal_logprobs_and_advantages_are_constants(name: str) -> None:
    logprobs, proximal, advantages = torch.full((3, 1, 2), -1.0, requires_grad=True).unbind()
    proximal.retain_grad()
    advantages.retain_grad()
    LOSSES[name][0](logprobs, proximal, advantages, torch.ones(1, 2).bool()).loss.sum().backward()
    assert proximal.grad is None
    assert advantages.grad is None


def test_clipping_cuts_the_gradient_only_in_the_direction_of_the_advantage() -> None:
    ratio = torch.tensor([[1.5, 1.5, 0.5, 0.5]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]], dtype=torch.float64)
    logprobs = (ratio.log() - 1).requires_grad_()
    got = policy_losses.clipped(logprobs, torch.full_like(ratio, -1), advantages, torch.ones(1, 4).bool())
    got.loss.sum().backward()
    assert got.clipped.tolist() == [[True, False, False, True]]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0.0, pytest.approx(1.5), pytest.approx(-0.5), 0.0]]
    torch.testing.assert_close(got.ratio, ratio)


def test_clip_higher_lets_rare_tokens_rise_further() -> None:
    one = torch.ones(1, 1, dtype=torch.float64)
    args = (0.25 * one - 1, -one, one, one.bool())
    assert policy_losses.clipped(*args, clip_high=0.28).clipped.item()
    assert not policy_losses.clipped(*args, clip_high=0.29).clipped.item()


def test_cispo_keeps_the_gradient_that_ppo_cuts() -> None:
    logprobs = torch.tensor([[0.9 - 1]], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, 1, dtype=torch.float64)
    got = policy_losses.cispo(logprobs, -one, one, one.bool(), clip_high=0.2)
    got.loss.sum().backward()
    assert got.clipped.item()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-1.2)


def test_gspo_under_sequence_mean_token_mean_has_the_gradient_of_the_sequence_form() -> None:
    proximal = torch.tensor([[-1.0, -2.0, -0.5]], dtype=torch.float64)
    logprobs = torch.tensor([[-1.1, -1.8, -0.6]], dtype=torch.float64, requires_grad=True)
    mask, one = torch.ones(1, 3).bool(), torch.ones(1, 3, dtype=torch.float64)
    sequence_losses.gspo(logprobs, proximal, one, mask, clip_low=1, clip_high=1).loss.mean().backward()
    token_form = logprobs.grad
    again = logprobs.detach().clone().requires_grad_()
    (-(again - proximal).mean().exp()).backward()
    torch.testing.assert_close(token_form, again.grad)


def test_wide_bounds_turn_clipped_and_dppo_into_the_plain_surrogate() -> None:
    mask = ragged_mask(2)
    padded = Padded(mask)
    rows = logprob_rows(mask, 3)
    args = (padded.tensor(near(rows, 7)), padded.tensor(rows), padded.tensor(random_rows(mask, 6)), padded.mask)
    plain = policy_losses.importance_weighted(*args).loss
    assert torch.equal(policy_losses.clipped(*args, clip_low=1e9, clip_high=1e9).loss, plain)
    assert torch.equal(policy_losses.dppo_tv(*args, delta=1.0).loss, plain)
    assert torch.equal(policy_losses.dppo_kl(*args, delta=1e9).loss, plain)
    assert torch.equal(policy_losses.ipo(*args, eps=1.0).loss, plain)


def paper_gmpo(logprobs_T: Tensor, proximal_T: Tensor, advantage: float) -> Tensor:
    """-A * prod(min(r^sgn(A), clip(r, e^-0.1, e^0.2)^sgn(A)))^(sgn(A) / T), as the paper has it for one response."""
    ratio_T, sign = (logprobs_T - proximal_T).exp(), math.copysign(1.0, advantage)
    kept_T = torch.minimum(ratio_T**sign, ratio_T.clamp(math.exp(-0.1), math.exp(0.2)) ** sign)
    return -advantage * kept_T.prod() ** (sign / len(ratio_T))


@pytest.mark.parametrize("advantage", [1.5, -0.5])
def test_gmpo_under_sequence_mean_token_mean_is_the_product_of_the_paper(advantage: float) -> None:
    proximal = torch.tensor([[-1.0, -2.0, -0.5, -0.7]], dtype=torch.float64)
    logprobs = proximal + torch.tensor([[0.3, -0.3, 0.05, -0.05]], dtype=torch.float64)
    logprobs.requires_grad_()
    mask = torch.ones(1, 4).bool()
    fast = LOSSES["gmpo"][0](logprobs, proximal, torch.full((1, 4), advantage).double(), mask)
    assert fast.clipped.tolist() == [[advantage > 0, advantage < 0, False, False]]
    (found,) = torch.autograd.grad(fast.loss.mean(), logprobs)
    paper = paper_gmpo(logprobs[0], proximal[0], advantage)
    assert fast.loss.mean().item() == pytest.approx(paper.item(), rel=1e-12)
    (expected,) = torch.autograd.grad(paper, logprobs)
    torch.testing.assert_close(found, expected)


def test_without_bounds_gmpo_is_gspo_and_on_single_tokens_it_is_clipped_in_log_space() -> None:
    mask = ragged_mask(2)
    padded, rows = Padded(mask), logprob_rows(mask, 3)
    args = (padded.tensor(near(rows, 7)), padded.tensor(rows), padded.tensor(random_rows(mask, 6)), padded.mask)
    wide = sequence_losses.gmpo(*args, log_low=1e9, log_high=1e9).loss
    torch.testing.assert_close(wide, sequence_losses.gspo(*args, clip_low=1.0, clip_high=1e9).loss)
    args, low, high = single(), 1 - math.exp(-0.1), math.exp(0.2) - 1
    found = LOSSES["gmpo"][0](*args)
    ours = policy_losses.clipped(*args, clip_low=low, clip_high=high)
    torch.testing.assert_close(found.loss, ours.loss)
    assert torch.equal(found.clipped, ours.clipped) and found.clipped.any()


SINGLE = [(-0.5, -1.0, 1.0), (-0.5, -1.0, -1.0), (-1.5, -1.0, 1.0), (-1.5, -1.0, -1.0), (-1.05, -1.0, 2.0)]
"""Current and proximal log-prob and advantage of responses of one token."""


def single() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The columns of SINGLE and a mask, [B, 1] each."""
    logprobs, proximal, advantages = torch.tensor(SINGLE, dtype=torch.float64).T[..., None]
    return logprobs, proximal, advantages, torch.ones(len(SINGLE), 1).bool()


def test_vespo_without_a_kernel_is_reinforce_and_with_the_weight_itself_importance_weighting() -> None:
    mask = ragged_mask(2)
    padded, rows = Padded(mask), logprob_rows(mask, 3)
    args = (padded.tensor(near(rows, 7)), padded.tensor(rows), padded.tensor(random_rows(mask, 6)), padded.mask)
    none = sequence_losses.vespo(*args, positive=(0.0, 0.0), negative=(0.0, 0.0)).loss
    assert torch.equal(none, policy_losses.reinforce(*args).loss)
    args = single()
    args[0].requires_grad_()
    itself = sequence_losses.vespo(*args, positive=(1.0, 0.0), negative=(1.0, 0.0)).loss
    (found,) = torch.autograd.grad(itself.sum(), args[0])
    (expected,) = torch.autograd.grad(policy_losses.importance_weighted(*args).loss.sum(), args[0])
    torch.testing.assert_close(found, expected)


def test_vespo_fades_responses_whose_product_has_left_one_on_either_side() -> None:
    # phi = W^2 exp(3 (1 - W)): 0.16 at W = 0.2, 1 at 1, 0.2 at 2.
    ratio = torch.tensor([[0.5, 0.4], [1.0, 1.0], [2.0, 1.0]], dtype=torch.float64)
    one = torch.ones(3, 2, dtype=torch.float64)
    got = sequence_losses.vespo(ratio.log() - 3, -3 * one, one, one.bool())
    assert got.clipped.tolist() == [[True, True], [False, False], [True, True]]
    weight = [0.2**2 * math.exp(2.4), 1.0, 4 * math.exp(-3.0)]
    expected = [[-w * (math.log(r) - 3) for r in row] for w, row in zip(weight, ratio.tolist(), strict=True)]
    assert_rows(got.loss.tolist(), expected)
    torch.testing.assert_close(got.ratio, torch.tensor([[0.2], [1.0], [2.0]]).double().expand(3, 2))


def test_dppo_drops_outward_moves_alone_and_ipo_both() -> None:
    probability = torch.tensor([[0.5, 0.5, 0.5, 0.5, 0.99, 0.01]], dtype=torch.float64)
    moved = torch.tensor([[0.9, 0.9, 0.1, 0.1, 0.90, 0.02]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0, -1.0, 1.0]], dtype=torch.float64)
    args = (moved.log(), probability.log(), advantages, torch.ones(1, 6).bool())
    assert policy_losses.ipo(*args, eps=0.3).clipped.tolist() == [[True, True, True, True, False, False]]
    # KL(0.99 || 0.9) is 0.071, though the probability moved by 0.09 only; KL(0.01 || 0.02) is 0.003.
    assert policy_losses.dppo_kl(*args).clipped.tolist() == [[True, False, False, True, True, False]]
    assert policy_losses.dppo_tv(*args).clipped.tolist() == [[True, False, False, True, False, False]]


def test_a_token_that_had_all_of_the_probability_has_a_finite_kl() -> None:
    logprobs = torch.tensor([[0.0, -1e-9, 0.0, -40.0]])
    proximal = torch.tensor([[0.0, 0.0, -40.0, 0.0]])
    got = policy_losses.dppo_kl(logprobs, proximal, torch.tensor([[1.0, -1.0, 1.0, -1.0]]), proximal < 1)
    assert got.clipped.tolist() == [[False, False, True, True]]
    assert got.loss.isfinite().all()


def test_sapo_reports_where_less_than_half_of_the_gradient_passes() -> None:
    one = torch.ones(1, 3, dtype=torch.float64)
    ratio = torch.tensor([[1.0, 2.7, 2.9]], dtype=torch.float64)
    got = policy_losses.sapo(ratio.log() - 1, -one, one, one.bool())
    assert got.clipped.tolist() == [[False, False, True]]


@pytest.mark.parametrize("name", LOSSES)
def test_ratios_of_e_to_the_900_stay_finite_in_loss_and_gradient(name: str) -> None:
    logprobs = torch.tensor([[-0.1, -900.0]], requires_grad=True)
    advantages = torch.tensor([[-1.0, 1.0]])
    got = LOSSES[name][0](logprobs, torch.tensor([[-900.0, -0.1]]), advantages, torch.ones(1, 2).bool())
    got.loss.sum().backward()
    assert got.loss.isfinite().all()
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()


def test_other_shapes_are_refused() -> None:
    one = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="advantages_BT has shape"):
        policy_losses.reinforce(one, one, one[0], one == 0)
