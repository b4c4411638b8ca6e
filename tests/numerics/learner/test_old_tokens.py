"""Tokens of older policies, where an average takes them as they are: docs/algorithms.md says why."""

import learner_case as case
import pytest
import table_policy as tables
import torch
from test_metrics import BEFORE, metrics, rows

from streamppo.learner.objective import objective


def test_whitening_looks_at_tokens_that_are_too_old_so_that_leaving_them_out_scales_no_other_one() -> None:
    config = case.config_of("algorithm.advantage={kind = 'gae', lam = 1.0}", "algorithm.whiten.over=batch")
    found: list[torch.Tensor] = []
    for min_version in (0, 2, 3):
        batch = rows(min_version)
        scored = tables.TablePolicy(*BEFORE)(batch, "both")
        found.append(objective.build(config).advantages(batch, scored, batch.rewards_BT).advantages)
    assert rows(0).fresh_BT.sum() > rows(2).fresh_BT.sum() > rows(3).fresh_BT.sum()
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    whole = found[0][rows().mask_BT]
    assert whole.mean().item() == pytest.approx(0, abs=1e-6) and whole.var(correction=0).item() == pytest.approx(1)


@pytest.mark.usefixtures("alone")
def test_movement_is_an_average_over_the_tokens_that_are_trained_whichever_policy_sampled_them() -> None:
    batch = rows()
    older = batch._replace(behavior_logprobs_BT=batch.behavior_logprobs_BT * 2)
    as_sampled, other = metrics(batch=batch), metrics(batch=older)
    assert as_sampled["ess"] != other["ess"], "the weights are others"
    for name in ("proximal_kl", "proximal_kl_k1", "clip_fraction_high", "clip_fraction_low", "ratio_p50"):
        assert as_sampled[name] == other[name]
