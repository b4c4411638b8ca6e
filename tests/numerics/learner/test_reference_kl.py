"""KL to the reference is of the current policy, by whichever older policy the tokens were sampled: all of it exact.

The vocabulary has four tokens. A batch holds each token as often as the behavior policy would sample it, so that means
over the batch are exact expectations.
"""

import learner_case as case
import pytest
import table_policy as tables
import torch
from conftest import trajectory

from streamppo.algorithms.kl import K3_BOUND, kl, kl_loss, kl_reward
from streamppo.learner.batch.padded import PaddedBatch, pad
from streamppo.types import Batch

pytestmark = pytest.mark.usefixtures("alone")

BEHAVIOR, PROXIMAL = [1 / 2, 1 / 4, 1 / 8, 1 / 8], [1 / 4, 1 / 4, 1 / 8, 3 / 8]
REFERENCE = [1 / 4, 1 / 8, 1 / 8, 1 / 2]
VALUES = [0.0] * 4


def as_sampled(version: int) -> PaddedBatch:
    """Eight answers of one token, of `version`, in the shares of BEHAVIOR, all with the same reward."""
    tokens = [token for token in range(4) for _ in range(round(8 * BEHAVIOR[token]))]
    logs = torch.tensor(BEHAVIOR).log().tolist()
    made = [
        trajectory([token], prompt=[0], number=n // 2, sample=n % 2, versions=[version], logprobs=[logs[token]])
        for n, token in enumerate(tokens)
    ]
    return pad(Batch(version=3, min_version=0, trajectories=tuple(made)))


def exact(logits_V: torch.Tensor) -> torch.Tensor:
    logp_V, reference_V = logits_V.log_softmax(-1), torch.tensor(REFERENCE).log()
    return (logp_V.exp() * (logp_V - reference_V)).sum()


def updated(correction: str, *choices: str) -> tuple[dict[str, float], torch.Tensor]:
    """Metrics, and the gradient of the last step, of an update whose advantages are all 0."""
    rloo = ("algorithm.advantage.kind=rloo", "learner.max_grad_norm=1000", "algorithm.entropy=0")
    kl = ("algorithm.kl.loss_beta=1", "algorithm.kl.loss_estimator=k2")
    config = case.config_of(*rloo, *kl, f"algorithm.correction={correction}", *choices)
    policy = tables.TablePolicy(PROXIMAL, VALUES)
    moved = ([3 / 8, 1 / 4, 1 / 8, 1 / 4], VALUES)
    script = tables.Scripted(policy, [moved] if config.learner.epochs == 2 else [])
    updater = tables.updater(config, policy, tables.TablePolicy(REFERENCE, VALUES), script)
    metrics = case.metrics(updater, as_sampled(version=0))
    assert policy.lm.logits_V.grad is not None
    return metrics, policy.lm.logits_V.grad


@pytest.mark.parametrize("epochs", [1, 2])
def test_its_gradient_on_old_data_is_that_of_the_current_policys_kl(epochs: int) -> None:
    _, gradient_V = updated("{kind = 'truncate', cap = 100.0}", f"learner.epochs={epochs}")
    now = PROXIMAL if epochs == 1 else [3 / 8, 1 / 4, 1 / 8, 1 / 4]
    logits_V = torch.tensor(now).log().requires_grad_()
    exact(logits_V).backward()
    torch.testing.assert_close(gradient_V, logits_V.grad, rtol=0, atol=1e-6)


def test_the_metric_on_old_data_is_the_learners_kl_and_not_that_of_the_policy_which_sampled() -> None:
    for correction in ("{kind = 'off'}", "{kind = 'truncate', cap = 2.0}"):
        metrics, _ = updated(correction)
        unweighted = torch.tensor(BEHAVIOR) @ kl(
            torch.tensor([PROXIMAL]).log(), torch.tensor([REFERENCE]).log(), torch.ones(1, 4) > 0, kind="k3"
        ).squeeze(0)
        expected = exact(torch.tensor(PROXIMAL).log()).item()
        assert metrics["reference_kl"] == pytest.approx(expected, rel=1e-5)
        assert abs(unweighted.item() - expected) > 0.005


def test_k3_in_loss_and_reward_is_bounded_in_value_and_gradient() -> None:
    far, mask = torch.tensor([[-13.0, -4.0, -1.0]], requires_grad=True), torch.ones(1, 3) > 0
    reference = torch.full((1, 3), -1.0)
    loss = kl_loss(far, reference, mask, kind="k3")
    loss.sum().backward()
    assert far.grad is not None
    assert loss[0].tolist() == pytest.approx([K3_BOUND, K3_BOUND, 0.0])
    assert far.grad.abs().max() <= 12
    shaped = kl_reward(torch.zeros(1, 3), far, reference, mask, beta=1.0, kind="k3")
    assert shaped[0].tolist() == pytest.approx([-K3_BOUND, -K3_BOUND, 0.0])
    assert kl(far, reference, mask, kind="k3")[0, 0] > 1e5
