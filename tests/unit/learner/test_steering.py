"""The adaptive lag in the learner: begun, carried on, bounded, and the same on every rank."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import learner_case as case
import pytest
import torch
import torch.distributed as dist

from streamppo.algorithms.diagnostics import OffPolicy, off_policy
from streamppo.algorithms.lag import AdmittedLag
from streamppo.learner import update
from streamppo.learner.batch.fetch import lag_histogram
from streamppo.learner.batch.padded import pad
from streamppo.learner.learner import Learner
from streamppo.learner.model import optimizer
from streamppo.learner.objective import adaptation, metrics

ADAPTIVE = "queue.max_lag={kind='adaptive', at_most=4, ess=0.5}"


def test_it_begins_with_lag_one_goes_on_from_a_checkpoint_and_is_never_above_a_new_bound() -> None:
    config = case.config_of(ADAPTIVE)
    assert adaptation.lag_under(config, None) == AdmittedLag(1)
    assert adaptation.lag_under(config, AdmittedLag(3, 0.5, 2)) == AdmittedLag(3, 0.5, 2)
    assert adaptation.lag_under(
        case.config_of("queue.max_lag={kind='adaptive', at_most=2}"), AdmittedLag(3, 0.5, 2)
    ) == AdmittedLag(2, 0.5, 2)
    assert adaptation.lag_under(case.config_of("queue.max_lag=4"), AdmittedLag(3)) is None


def test_with_a_window_the_lag_is_at_most_the_one_that_leaves_room_for_it() -> None:
    config = case.config_of("queue.max_lag={kind='adaptive', at_most=8}", "queue.too_old=windowed")
    assert (config.queue.flow_lag, config.queue.bound) == (5, 8)
    found = {f"ess_lag_{name}": 1.0 for name in ("0", "5-8")}
    assert adaptation.lag_after_update(config, AdmittedLag(4), found, {0: 5, 4: 5}).admitted == 5
    assert adaptation.lag_after_update(config, AdmittedLag(5), found, {0: 5, 5: 5}).admitted == 5


def test_a_policy_that_stands_still_says_nothing_about_lag() -> None:
    metrics = {"ess_lag_1": 1.0, "lr": 1.0}
    for frozen, admitted in ((True, 1), (False, 3)):
        learner: Any = SimpleNamespace(
            updater=SimpleNamespace(adapt=lambda *_: None), config=case.config_of(ADAPTIVE), lag=AdmittedLag(1)
        )
        updated: Any = SimpleNamespace(frozen=frozen)
        assert Learner.adapt(learner, updated, metrics, {1: 9}, 1.0) == {"lr_share": 1.0, "admitted_lag": admitted}
        assert learner.lag.admitted == admitted


def test_the_critic_keeps_its_learning_rate() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(()))], "lr": rate} for rate in (1.0, 2.0)]
    adamw = torch.optim.AdamW(groups)
    optimizer.lower_policy(adamw, 0.25)
    assert [group["lr"] for group in adamw.param_groups] == [0.25, 2.0]


CHOICES = {
    "gae": (),
    "grpo": ("algorithm.advantage.kind=grpo",),
    "vtrace": ("algorithm.advantage.kind=vtrace",),
    "behavior": ("algorithm.proximal=behavior", "algorithm.correction={kind='off'}", "algorithm.advantage.kind=rloo"),
    "loglinear": ("algorithm.proximal=loglinear", "learner.minibatches=2", "algorithm.advantage.kind=rloo"),
}


def decisions(ranks: int, folder: Path) -> torch.Tensor:
    """[ranks, choices, updates, 2] lags and shares of the learning rate, as each rank decides them."""
    found: list[list[list[float]]] = []
    for overrides in CHOICES.values():
        config = case.config_of(ADAPTIVE, *overrides)
        updater, lag = case.updater(config, folder), AdmittedLag(4)
        found.append([])
        for version in (4, 5, 6):
            batch = pad(case.batch(version=version, min_version=version - 4, seed=version))
            updated = updater.update(batch)
            metrics = case.adapt(updater, updated)
            lag = adaptation.lag_after_update(config, lag, metrics, lag_histogram(batch))
            found[-1].append([lag.admitted, lag.lr_share])
    mine = torch.tensor(found)
    everyones = [torch.zeros_like(mine) for _ in range(ranks)]
    dist.all_gather(everyones, mine)
    return torch.stack(everyones)


@pytest.mark.slow
def test_one_rank_and_two_decide_alike_under_every_estimator_and_proximal_policy(tmp_path: Path) -> None:
    case.save_model(tmp_path)
    alone, both = (case.by_ranks(decisions, ranks, tmp_path, tmp_path) for ranks in (1, 2))
    assert torch.equal(both[0], both[1])
    assert torch.equal(alone[0], both[0])
    assert (alone[0, :, -1, 0] < 4).all(), "the data of the case are far off"


RATE = "learner.lr=0.01"
"""A hundredth of the rate of the case's optimizer."""


@pytest.mark.parametrize(
    "overrides",
    [(), ("algorithm.advantage.kind=grpo",), ("algorithm.advantage.kind=grpo", "learner.minibatches=3"), (ADAPTIVE,)],
)
def test_the_learning_rate_is_lowered_by_the_root_of_the_sequences_effective_sample_size(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    case.save_model(tmp_path)

    batch, chosen = pad(case.batch()), (RATE, *overrides)
    with case.group(0, 1, tmp_path / "store"):
        lowered, metrics = case.updated(tmp_path, batch, *chosen, "learner.lr_by_ess=on")
        share = math.sqrt(metrics["ess_sequence"])
        assert 0.1 < share < 0.9
        assert metrics["lr"] == pytest.approx(share)
        same, _ = case.updated(tmp_path, batch, *chosen, f"learner.lr={0.01 * share!r}", "learner.lr_by_ess=off")
        full, _ = case.updated(tmp_path, batch, *chosen, "learner.lr_by_ess=off")
    case.assert_same_weights(lowered, same)
    assert any(not torch.allclose(weight, full[name]) for name, weight in lowered.items())


@pytest.mark.parametrize("chosen", ["on", "off"])
def test_a_batch_is_compared_with_its_policy_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    case.save_model(tmp_path)
    compared: list[OffPolicy] = []

    def counted(*columns: torch.Tensor) -> OffPolicy:
        compared.append(off_policy(*columns))
        return compared[-1]

    for module in (update, metrics):
        monkeypatch.setattr(module, "off_policy", counted)
    with case.group(0, 1, tmp_path / "store"):
        _, found = case.updated(tmp_path, pad(case.batch()), f"learner.lr_by_ess={chosen}", "learner.minibatches=3")
    assert [one.overall.ess_sequence for one in compared] == [found["ess_sequence"]]


@pytest.mark.parametrize(
    ("overrides", "is_lowered"),
    [
        ((), False),
        (("learner.lr_by_ess=on",), True),
        ((ADAPTIVE,), True),
        ((ADAPTIVE, "learner.lr_by_ess=off"), False),
        ((ADAPTIVE, *CHOICES["behavior"]), False),
    ],
)
def test_a_steered_lag_lowers_it_too_where_the_policy_is_scored_first(
    overrides: tuple[str, ...], is_lowered: bool
) -> None:
    assert adaptation.is_lowered_by_ess(case.config_of(*overrides)) == is_lowered


def test_data_of_the_policy_itself_leave_all_of_the_learning_rate(tmp_path: Path) -> None:
    case.save_model(tmp_path)
    with case.group(0, 1, tmp_path / "store"):
        made, batch = case.updater(case.config_of(RATE, "learner.lr_by_ess=on"), tmp_path), pad(case.batch())
        with torch.no_grad():
            found = made.policy(batch, "both")
        made.update(batch._replace(behavior_logprobs_BT=found.logprobs_BT))
        assert made.optimizer.param_groups[0]["lr"] == pytest.approx(1.0)
