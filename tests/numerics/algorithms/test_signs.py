"""Weights that depend on an advantage's sign, against loops over plain floats, in weights, losses and gradients."""

import math

import pytest
import torch
from padded_rows import Mask, Padded, Rows, assert_rows, compact, logprob_rows, near, ragged_mask, random_rows
from torch import Tensor

from streamppo.algorithms import groups
from streamppo.algorithms.corrections import importance_weights, scale_negatives, topr
from streamppo.algorithms.policy_losses import clipped, reinforce

MASK = ragged_mask(1)
SPLITS = [[[0, 1, 2, 3, 4, 5]], [[0], [1], [2], [3], [4], [5]], [[5, 1], [0, 3, 2], [4]]]


def rows_of(mask: Mask) -> tuple[Rows, Rows, Rows]:
    """Proximal and behavior log-probs, and advantages of both signs within a response."""
    behavior = logprob_rows(mask, 3)
    return near(behavior, 4), behavior, random_rows(mask, 6)


def slow_topr(proximal: Rows, behavior: Rows, advantages: Rows) -> Rows:
    """By response: exp of the summed log-ratio, at most 1, at tokens of negative advantage; 1 at the others."""
    weights: Rows = []
    for p, b, a in zip(proximal, behavior, advantages, strict=True):
        ratio = math.prod(math.exp(x - y) for x, y in zip(p, b, strict=True))
        weights.append([min(ratio, 1.0) if advantage < 0 else 1.0 for advantage in a])
    return weights


def columns(padded: Padded, *several: Rows) -> list[Tensor]:
    return [padded.tensor(rows) for rows in several]


def test_topr_tapers_negatives_by_the_ratio_of_the_whole_response() -> None:
    padded, several = Padded(MASK), rows_of(MASK)
    got = topr(*columns(padded, *several), padded.mask)
    expected = slow_topr(*(compact(rows, MASK) for rows in several))
    assert_rows(padded.unmasked(got.weights), expected)
    flat = [weight for row in expected for weight in row]
    assert any(weight < 0.999 for weight in flat) and any(weight == 1.0 for weight in flat)
    assert torch.equal(got.keep, padded.mask) and not got.dropped
    assert got.weights[~padded.mask].abs().sum() == 0 and not got.weights.requires_grad


@pytest.mark.parametrize("split", SPLITS)
def test_any_split_of_the_rows_gives_the_same_weights(split: list[list[int]]) -> None:
    padded, several = Padded(MASK), rows_of(MASK)
    whole = padded.unmasked(topr(*columns(padded, *several), padded.mask).weights)
    for members in split:
        part = Padded([MASK[b] for b in members])
        cut = columns(part, *([rows[b] for b in members] for rows in several))
        assert_rows(part.unmasked(topr(*cut, part.mask).weights), [whole[b] for b in members])


def test_with_equal_policies_topr_is_no_correction() -> None:
    padded, (proximal, _, advantages) = Padded(MASK), rows_of(MASK)
    same, advantages_BT = columns(padded, proximal, advantages)
    assert torch.equal(topr(same, same, advantages_BT, padded.mask).weights, padded.mask.double())


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_with_advantages_of_one_sign_topr_is_off_or_truncation_of_the_response_at_one(sign: float) -> None:
    padded, (proximal, behavior, advantages) = Padded(MASK), rows_of(MASK)
    one_sign = [[sign * abs(x) for x in row] for row in advantages]
    proximal_BT, behavior_BT, advantages_BT = columns(padded, proximal, behavior, one_sign)
    got = topr(proximal_BT, behavior_BT, advantages_BT, padded.mask).weights
    mode = "off" if sign > 0 else "truncate"
    known = importance_weights(proximal_BT, behavior_BT, padded.mask, level="sequence", mode=mode, cap=1.0)
    torch.testing.assert_close(got, known.weights, rtol=1e-12, atol=0)


def test_a_token_without_an_advantage_weighs_one_and_extremes_stay_finite() -> None:
    mask = torch.ones(3, 1, dtype=torch.bool)
    proximal, behavior = torch.tensor([[-900.0], [-1.0], [-900.0]]), torch.tensor([[-1.0], [-900.0], [-1.0]])
    got = topr(proximal, behavior, torch.tensor([[-1.0], [-1.0], [0.0]]), mask).weights
    assert got[0].item() == pytest.approx(math.exp(-20)) and got[1:].tolist() == [[1.0], [1.0]]
    no_number = topr(torch.full((3, 1), torch.nan), behavior, torch.full((3, 1), -1.0), mask).weights
    assert no_number.isnan().all(), "no number is no old token: it makes a bad step, and is not hidden"


@pytest.mark.parametrize("negative", [0.0, 0.25, 1.0])
def test_the_weight_of_negatives_multiplies_their_losses_and_gradients_and_no_other(negative: float) -> None:
    """PPO's clip to the proximal policy stays: a clipped token has no gradient, whatever it weighs."""
    padded, (proximal, behavior, advantages) = Padded(MASK), rows_of(MASK)
    current = near(proximal, 7)
    logprobs_BT, proximal_BT, behavior_BT, advantages_BT = columns(padded, current, proximal, behavior, advantages)
    logprobs_BT.requires_grad_()
    tokens = clipped(logprobs_BT, proximal_BT, advantages_BT, padded.mask)
    weights_BT = topr(proximal_BT, behavior_BT, advantages_BT, padded.mask).weights
    loss_BT = scale_negatives(tokens.loss, advantages_BT, negative=negative) * weights_BT
    (gradient_BT,) = torch.autograd.grad(loss_BT.sum(), logprobs_BT)
    cut = [compact(rows, MASK) for rows in (current, proximal, advantages)]
    tapers = slow_topr(*(compact(rows, MASK) for rows in (proximal, behavior, advantages)))
    losses: Rows = []
    slopes: Rows = []
    for row, (c, p, a) in enumerate(zip(*cut, strict=True)):
        losses.append([])
        slopes.append([])
        for t, (new, old, advantage) in enumerate(zip(c, p, a, strict=True)):
            ratio, weight = math.exp(new - old), tapers[row][t] * (negative if advantage < 0 else 1.0)
            free, bounded = -advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2)
            losses[-1].append(weight * max(free, bounded))
            slopes[-1].append(0.0 if bounded > free else weight * free)
    assert_rows(padded.unmasked(loss_BT), losses)
    assert_rows(padded.unmasked(gradient_BT), slopes)
    assert tokens.clipped.any() and not loss_BT[~padded.mask].any()


def test_the_scaled_loss_is_the_very_same_tensor_with_a_weight_of_one() -> None:
    padded, (proximal, _, advantages) = Padded(MASK), rows_of(MASK)
    proximal_BT, advantages_BT = columns(padded, proximal, advantages)
    loss_BT = reinforce(proximal_BT, proximal_BT, advantages_BT, padded.mask).loss
    assert scale_negatives(loss_BT, advantages_BT, negative=1.0) is loss_BT


def test_a_shifted_baseline_is_subtracted_from_every_score_and_equal_scores_teach() -> None:
    scores, prompts = [1.0, 0.0, 0.0, 0.5, 0.5], [4, 4, 4, 9, 9]
    got = groups.dr_grpo(torch.tensor(scores), torch.tensor(prompts), baseline_shift=-0.1)
    assert got.tolist() == pytest.approx([1 - 1 / 3 + 0.1, -1 / 3 + 0.1, -1 / 3 + 0.1, 0.1, 0.1])
    plain = groups.dr_grpo(torch.tensor(scores), torch.tensor(prompts))
    assert torch.equal(plain, groups.dr_grpo(torch.tensor(scores), torch.tensor(prompts), baseline_shift=0.0))
