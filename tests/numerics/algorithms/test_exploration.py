"""The tokens of `exploration` and the entropy bonus are those of the papers, whatever masked places hold."""

import math
import statistics

import pytest
import torch
from padded_rows import Mask, Padded, Rows, compact, logprob_rows, ragged_mask, random_rows
from torch import Tensor

from streamppo.algorithms import exploration
from streamppo.algorithms.exploration import Bonus, next_bonus
from streamppo.algorithms.kl import K3_BOUND


def flat(rows: Rows, mask: Mask) -> list[float]:
    return [x for row in compact(rows, mask) for x in row]


def chosen(found_BT: Tensor, padded: Padded) -> list[bool]:
    """At unmasked tokens, row by row; none else may be chosen."""
    assert not found_BT[~padded.mask].any()
    return found_BT[padded.mask].tolist()


def slow_covariance(logprobs: list[float], advantages: list[float]) -> list[float]:
    mean_logprob, mean_advantage = statistics.fmean(logprobs), statistics.fmean(advantages)
    return [(a - mean_advantage) * (x - mean_logprob) for x, a in zip(logprobs, advantages, strict=True)]


def columns() -> tuple[Mask, Padded, Rows, Rows]:
    mask = ragged_mask(2, 8)
    return mask, Padded(mask), logprob_rows(mask, 3), random_rows(mask, 6)


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 1.0])
def test_the_least_certain_tokens_are_those_of_the_highest_entropy(share: float) -> None:
    mask, padded, _, entropy = columns()
    known = flat(entropy, mask)
    threshold = sorted(known, reverse=True)[math.ceil(share * len(known)) - 1]
    found = chosen(exploration.high_entropy_mask(padded.tensor(entropy), padded.mask, share=share), padded)
    assert found == [x >= threshold for x in known]
    assert sum(found) == math.ceil(share * len(known))


def test_the_covariance_of_tokens_has_the_covariance_as_its_mean() -> None:
    mask, padded, logprobs, advantages = columns()
    found_BT = exploration.covariance(padded.tensor(logprobs), padded.tensor(advantages), padded.mask)
    slow = slow_covariance(flat(logprobs, mask), flat(advantages, mask))
    assert found_BT[padded.mask].tolist() == pytest.approx(slow, rel=1e-12, abs=1e-15)
    assert found_BT[~padded.mask].eq(0).all()
    count = len(slow)
    whole = statistics.covariance(flat(logprobs, mask), flat(advantages, mask)) * (count - 1) / count
    assert found_BT.sum().item() / count == pytest.approx(whole)


@pytest.mark.parametrize(("share", "number"), [(1e-4, 1), (0.2, None), (1.0, None)])
def test_kl_cov_takes_the_highest_covariances(share: float, number: int | None) -> None:
    mask, padded, logprobs, advantages = columns()
    covariance_BT = exploration.covariance(padded.tensor(logprobs), padded.tensor(advantages), padded.mask)
    known = slow_covariance(flat(logprobs, mask), flat(advantages, mask))
    wanted = number or math.floor(share * len(known))
    highest = sorted(range(len(known)), key=lambda n: -known[n])[:wanted]
    found = chosen(exploration.kl_cov(covariance_BT, padded.mask, share=share), padded)
    assert found == [n in highest for n in range(len(known))]


def test_clip_cov_draws_from_the_band_alone_and_in_the_given_order() -> None:
    covariance_BT = torch.tensor([[0.5, 1.5, 2.5, 9.0], [3.5, 1.0, 4.5, 2.0]])
    mask_BT = torch.tensor([[True, True, True, True], [True, True, True, False]])

    def drawn(share: float, order: list[int], band: tuple[float, float] = (1.0, 5.0)) -> list[float]:
        def ordered(count: int) -> Tensor:
            assert count == len(order)
            return torch.tensor(order, dtype=torch.long)

        found_BT = exploration.clip_cov(covariance_BT, mask_BT, share=share, band=band, order=ordered)
        return covariance_BT[found_BT].tolist()

    # In the band are 1.5, 2.5, 3.5 and 4.5; a bound itself is outside, and so is a masked token.
    assert drawn(1e-4, [2, 0, 1, 3]) == [3.5]
    assert drawn(0.3, [2, 0, 1, 3]) == [1.5, 3.5]
    assert drawn(1.0, [2, 0, 1, 3]) == [1.5, 2.5, 3.5, 4.5]
    assert drawn(0.3, [], band=(10.0, 11.0)) == []


def test_the_chosen_tokens_pay_and_the_others_keep_their_loss() -> None:
    loss_BT = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
    log_ratio_BT = torch.tensor([[-0.5, 0.25, torch.nan]], dtype=torch.float64, requires_grad=True)
    chosen_BT = torch.tensor([[True, True, False]])
    paid_BT = exploration.penalise_tokens(loss_BT, log_ratio_BT, chosen_BT, coefficient=2.0)
    k3 = [math.exp(d) - 1 - d for d in (-0.5, 0.25)]
    assert paid_BT[0].tolist() == pytest.approx([1 + 2 * k3[0], 2 + 2 * k3[1], 3.0], rel=1e-12)
    (gradient_BT,) = torch.autograd.grad(paid_BT.sum(), log_ratio_BT)
    slope = [2 * (math.exp(d) - 1) for d in (-0.5, 0.25)]
    assert gradient_BT[0].tolist() == pytest.approx([*slope, 0.0], rel=1e-12)
    none_BT = torch.zeros_like(chosen_BT)
    assert torch.equal(exploration.penalise_tokens(loss_BT, log_ratio_BT, none_BT, coefficient=2.0), loss_BT)


def test_the_penalty_is_the_kl_from_the_proximal_policy_in_value_and_gradient() -> None:
    """Over tokens at the proximal policy's frequencies, both are those of the exact KL."""
    proximal_V = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64)
    logits_V = torch.tensor([0.1, 0.2, -0.3, 0.4], dtype=torch.float64, requires_grad=True)
    log_ratio_V = logits_V.log_softmax(-1) - proximal_V.log()
    zero_BT, all_BT = torch.zeros(1, 4, dtype=torch.float64), torch.ones(1, 4, dtype=torch.bool)
    paid = (proximal_V * exploration.penalise_tokens(zero_BT, log_ratio_V[None], all_BT, coefficient=1.0)).sum()
    exact = -(proximal_V * log_ratio_V).sum()
    assert paid.item() == pytest.approx(exact.item(), rel=1e-12)
    (found,) = torch.autograd.grad(paid, logits_V, retain_graph=True)
    (known,) = torch.autograd.grad(exact, logits_V)
    torch.testing.assert_close(found, known)


def test_a_penalty_is_bounded_and_has_no_gradient_where_nothing_has_moved() -> None:
    log_ratio_BT = torch.tensor([[0.0, -900.0, 900.0]], requires_grad=True)
    loss_BT, chosen_BT = torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool)
    paid_BT = exploration.penalise_tokens(loss_BT, log_ratio_BT, chosen_BT, coefficient=1.0)
    assert paid_BT.tolist() == [[0.0, K3_BOUND, K3_BOUND]]
    (gradient_BT,) = torch.autograd.grad(paid_BT.sum(), log_ratio_BT)
    assert gradient_BT.eq(0).all()


def test_a_batch_without_a_token_singles_out_none() -> None:
    none_BT = torch.zeros(2, 3, dtype=torch.bool)
    assert not exploration.high_entropy_mask(torch.ones(2, 3), none_BT, share=0.2).any()
    covariance_BT = exploration.covariance(torch.ones(2, 3), torch.ones(2, 3), none_BT)
    assert covariance_BT.eq(0).all()
    assert not exploration.kl_cov(covariance_BT, none_BT, share=0.2).any()


def test_the_bonus_grows_while_the_entropy_is_low_and_is_given_only_then() -> None:
    entropies = [0.5, 0.2, 0.1, 0.3, 0.3, 0.3, 0.3]
    bonus, seen = Bonus(0.01, 0.01), []
    for entropy in entropies:
        bonus = next_bonus(bonus.coefficient, entropy, target=0.2, step=0.005, within=(0.0, 0.0125))
        seen.append(bonus)
    coefficients = [0.005, 0.01, 0.0125, 0.0075, 0.0025, 0.0, 0.0]
    assert [one.coefficient for one in seen] == pytest.approx(coefficients)
    assert [one.weight for one in seen] == pytest.approx([0.0, 0.01, 0.0125, 0.0, 0.0, 0.0, 0.0])
