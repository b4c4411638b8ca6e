"""While only the critic learns, the policy's schedule stands still with it; what M2PO bounds is what is trained on."""

from pathlib import Path

import learner_case as case
import pytest
import table_policy as tables
import torch

from streamppo.learner.batch.padded import pad
from streamppo.learner.model import optimizer
from streamppo.learner.objective import objective

WARM_UP = ("algorithm.critic.warmup_updates=5", "learner.warmup_updates=4", "updates=20")
FREE = ("learner.lr=1.0", "learner.decay=linear", "learner.final_lr_share=0", "algorithm.critic.lr=2.0")


def test_the_policys_warm_up_begins_when_the_policy_does() -> None:
    config = case.config_of(*WARM_UP, *FREE)
    groups = [{"params": [torch.nn.Parameter(torch.zeros(()))]} for _ in range(2)]
    adamw = torch.optim.AdamW(groups)
    optimizer.configure(adamw, config)
    rates: list[tuple[float, float]] = []
    for version in range(20):
        optimizer.follow_schedule(adamw, config, version)
        rates.append((adamw.param_groups[0]["lr"], adamw.param_groups[1]["lr"]))
    policy, critic = zip(*rates, strict=True)
    assert policy[:9] == (0, 0, 0, 0, 0, 0.25, 0.5, 0.75, 1)
    assert policy[9:11] == pytest.approx((1, 10 / 11))
    assert critic[:5] == pytest.approx((0.5, 1, 1.5, 2, 2))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_critic_of_its_own_warms_up_without_passes_of_the_policy_that_are_thrown_away(epochs: int) -> None:
    config = case.config_of("algorithm.critic.model=policy", *WARM_UP, f"learner.epochs={epochs}")
    batch = pad(case.batch(version=3))
    batch = batch._replace(
        inputs_BL=torch.cat([torch.zeros(case.BATCH, 1).long(), torch.ones(batch.mask_BT.shape).long()], 1),
        start_B=torch.ones(case.BATCH).long(),
    )
    policy = tables.TablePolicy([0.5, 0.5], [0.0, 0.0])
    metrics = case.metrics(tables.updater(config, policy, None, tables.Scripted(policy, [])), batch)
    assert policy.passes == ["both"] + ["critic"] * epochs
    assert (metrics["steps"], metrics["critic_steps"]) == (0, epochs)
    assert 0 < metrics["ess"] < 1
    assert metrics["entropy"] == pytest.approx(torch.tensor(2.0).log().item())


def test_the_second_moment_is_bounded_over_the_tokens_of_the_loss() -> None:
    """Nine tokens that are too old and exact would make room for one whose squared log-ratio is 0.36."""
    chosen = "algorithm.correction={kind = 'second_moment', threshold = 0.04}"
    correct = objective.build(case.config_of(chosen)).correct
    behavior_BT = torch.full((1, 10), -1.0)
    proximal_BT = behavior_BT.clone()
    proximal_BT[0, 9] -= 0.6
    mask_BT, trained_BT = torch.ones(1, 10) > 0, torch.arange(10)[None] == 9
    columns = proximal_BT, behavior_BT, torch.zeros(1, 10), torch.zeros(1, 10).long(), mask_BT
    assert correct(*columns, mask_BT).keep.all()
    assert not correct(*columns, trained_BT).keep.any()


@pytest.mark.usefixtures("alone")
def test_values_in_bfloat16_runs_are_products_with_the_weights_as_they_are(folder: Path) -> None:
    updater = case.updater(case.config_of("model.dtype=bfloat16"), folder)
    hidden: list[torch.Tensor] = []
    updater.policy.lm.base_model.register_forward_hook(lambda *call: hidden.append(call[-1].last_hidden_state))
    batch = pad(case.batch())
    weight_1D = case.full(updater.policy.value_head.weight)
    assert not torch.equal(weight_1D, weight_1D.bfloat16().float())
    with torch.no_grad():
        values_BT = updater.policy(batch, "critic").values_BT
    for row in range(case.BATCH):
        start, length = int(batch.start_B[row]), int(batch.length_B[row])
        expected_T = hidden[0][row, start - 1 : start - 1 + length].float() @ weight_1D[0]
        torch.testing.assert_close(values_BT[row, :length], expected_T, rtol=0, atol=1e-5)
