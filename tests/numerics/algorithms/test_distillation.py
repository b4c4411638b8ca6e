"""The teacher's advantage and the likelihood of right answers, against plain floats."""

import math

import pytest
import torch

from streamppo.algorithms.kl import kl_advantages
from streamppo.algorithms.policy_losses import positive_nll

MASK = torch.tensor([[True, True, False], [True, False, False]])
ADVANTAGES = torch.tensor([[1.0, -2.0, math.nan], [0.5, math.nan, 0.0]])
LOGPROBS = torch.tensor([[-1.0, -0.25, math.nan], [-3.0, 0.0, math.nan]], requires_grad=True)
TEACHER = torch.tensor([[-0.5, -2.0, 9.0], [-3.0, math.nan, 0.0]])


def test_each_token_gets_minus_the_reverse_kl_beside_its_weighted_advantage_and_no_gradient() -> None:
    found_BT = kl_advantages(ADVANTAGES, LOGPROBS, TEACHER, MASK, weight=2.0, others=0.5)
    assert found_BT.tolist() == [[0.5 + 2 * 0.5, -1.0 - 2 * 1.75, 0.0], [0.25, 0.0, 0.0]]
    assert not found_BT.requires_grad


def test_without_others_the_teacher_is_alone_and_one_like_the_policy_teaches_nothing() -> None:
    alone_BT = kl_advantages(ADVANTAGES, LOGPROBS, TEACHER, MASK, weight=1.0, others=0.0)
    assert alone_BT.tolist() == [[0.5, -1.75, 0.0], [0.0, 0.0, 0.0]]
    same_BT = kl_advantages(ADVANTAGES, LOGPROBS, LOGPROBS, MASK, weight=3.0)
    assert same_BT.tolist() == [[1.0, -2.0, 0.0], [0.5, 0.0, 0.0]]


def test_its_expected_policy_gradient_is_that_of_the_exact_reverse_kl() -> None:
    """Every token is there once, weighed by its probability, so that the mean is an exact expectation."""
    logits_V = torch.tensor([0.3, -1.0, 0.8, 0.0], requires_grad=True)
    teacher_V = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    logp_V = logits_V.log_softmax(-1)
    (exact_V,) = torch.autograd.grad((logp_V.exp() * (logp_V - teacher_V)).sum(), logits_V, retain_graph=True)
    ones = torch.ones(1, 4) > 0
    advantages_BT = kl_advantages(torch.zeros(1, 4), logp_V[None], teacher_V[None], ones, weight=1.0)
    loss = -(logp_V.detach().exp() * advantages_BT[0] * logp_V).sum()
    (found_V,) = torch.autograd.grad(loss, logits_V)
    torch.testing.assert_close(found_V, exact_V)


def test_the_nll_is_the_mean_over_the_tokens_of_right_answers_and_adds_up_over_pieces() -> None:
    right = torch.tensor([[True, True, False], [False, False, False]])
    whole = positive_nll(LOGPROBS, right, 2.0)
    assert whole.item() == pytest.approx(1.25 / 2)
    pieces = [positive_nll(LOGPROBS[row : row + 1], right[row : row + 1], 2.0) for row in range(2)]
    assert sum(piece.item() for piece in pieces) == pytest.approx(whole.item())
    (gradient,) = torch.autograd.grad(whole, LOGPROBS)
    assert gradient.tolist() == [[-0.5, -0.5, 0.0], [0.0, 0.0, 0.0]]
    assert positive_nll(LOGPROBS, torch.zeros_like(right), 0.0).item() == 0.0
