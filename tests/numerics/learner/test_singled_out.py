"""Tokens that are singled out of a batch, and a bonus that is steered: in an update, over ranks, over a resume."""

import math
from pathlib import Path

import learner_case as case
import pytest
import torch
from msgspec.structs import replace

from streamppo.algorithms.exploration import Bonus
from streamppo.errors import ConfigError
from streamppo.learner.batch.padded import PaddedBatch, pad
from streamppo.learner.objective import objective
from streamppo.learner.objective.adaptation import UpdaterState
from streamppo.learner.update import Updater, UpdateResult

ALONE = pytest.mark.usefixtures("alone")
RLOO = ("algorithm.advantage.kind=rloo", "learner.minibatches=2")
TOP = "algorithm.exploration={kind = 'top_entropy', share = 0.3}"
CLIP_COV = "algorithm.exploration={kind = 'clip_cov', share = 0.2, band = [0.05, 9.0]}"
KL_COV = "algorithm.exploration={kind = 'kl_cov', share = 0.2}"
KINDS = pytest.mark.parametrize("kind", [TOP, CLIP_COV, KL_COV], ids=["top_entropy", "clip_cov", "kl_cov"])


def updated(folder: Path, *choices: str, batch: PaddedBatch | None = None) -> tuple[Updater, UpdateResult]:
    updater = case.updater(case.config_of(*RLOO, *choices), folder)
    return updater, updater.update(pad(case.batch()) if batch is None else batch)


def chosen(updated: UpdateResult) -> torch.Tensor:
    assert updated.targets.chosen_BT is not None
    return updated.targets.chosen_BT


@ALONE
@KINDS
def test_only_trained_tokens_are_singled_out_and_the_metric_counts_them(folder: Path, kind: str) -> None:
    updater, found = updated(folder, kind)
    chosen_BT, trained_BT = chosen(found), found.targets.trained_BT
    assert 0 < chosen_BT.sum() < trained_BT.sum() and not (chosen_BT & ~trained_BT).any()
    metrics = case.adapt(updater, found)
    assert metrics["singled_out"] == pytest.approx(float(chosen_BT.sum() / trained_BT.sum()))
    assert "singled_out" not in case.metrics(*_plain(folder))


def _plain(folder: Path) -> tuple[Updater, PaddedBatch]:
    return case.updater(case.config_of(*RLOO), folder), pad(case.batch())


@ALONE
@KINDS
def test_tokens_that_are_not_trained_change_no_choice(folder: Path, kind: str) -> None:
    updater, found = updated(folder, kind)
    assert updater.objective.exploration is not None
    choose, targets, batch = updater.objective.exploration.choose, found.targets, pad(case.batch())
    trained_BT = targets.trained_BT.clone()
    trained_BT[::2] = False
    loud_BT = targets.estimate.advantages.masked_fill(~trained_BT, 100.0)
    loud = targets.scored._replace(entropy_BT=targets.scored.entropy_BT.masked_fill(~trained_BT, 100.0))
    expected_BT = choose(batch, targets.scored, targets.estimate.advantages, trained_BT)
    assert expected_BT.any() and torch.equal(choose(batch, loud, loud_BT, trained_BT), expected_BT)


@ALONE
def test_the_share_of_top_entropy_stays_in_the_loss(folder: Path) -> None:
    updater, found = updated(folder, TOP)
    trained_BT, entropy_BT = found.targets.trained_BT, found.targets.scored.entropy_BT
    kept_BT, n = chosen(found), int(trained_BT.sum())
    assert kept_BT.sum() == math.ceil(0.3 * n)
    assert entropy_BT[kept_BT].min() > entropy_BT[trained_BT & ~kept_BT].max()
    assert case.adapt(updater, found)["singled_out"] == pytest.approx(math.ceil(0.3 * n) / n)


@ALONE
@pytest.mark.parametrize("kind", [TOP, CLIP_COV], ids=["top_entropy", "clip_cov"])
def test_advantages_of_tokens_that_are_left_out_teach_nothing_and_denominators_keep_them(
    folder: Path, kind: str
) -> None:
    """With these advantages at 0 in place of the choice, the plain update is the same one."""
    updater, found = updated(folder, kind)
    plain, batch = _plain(folder)
    real, left_out_BT = plain.objective.advantages, chosen(found)
    if kind == TOP:
        left_out_BT = found.targets.trained_BT & ~left_out_BT

    def without(*arguments: object):
        estimate = real(*arguments)  # pyright: ignore[reportArgumentType]
        return estimate._replace(advantages=estimate.advantages.masked_fill(left_out_BT, 0.0))

    plain.objective = plain.objective._replace(advantages=without, scored="policy", anchor=None)
    plain.update(batch)
    assert_same(updater, plain)


def assert_same(one: Updater, other: Updater, *, atol: float = 0.0) -> None:
    case.assert_same_weights(case.whole(one.policy), case.whole(other.policy), atol=atol)


@ALONE
def test_kl_cov_holds_its_tokens_nearer_to_the_proximal_policy(folder: Path) -> None:
    def moved(kind: str) -> float:
        updater, found = updated(folder, kind, "learner.epochs=3", "learner.lr=0.003")
        with torch.no_grad():
            now_BT = updater.policy(found.batch, "policy").logprobs_BT
        return (now_BT - found.targets.scored.logprobs_BT)[chosen(found)].abs().mean().item()

    assert moved(f"{KL_COV[:-1]}, coefficient = 20.0}}") < 0.7 * moved(f"{KL_COV[:-1]}, coefficient = 1e-9}}")


@ALONE
def test_clip_cov_draws_anew_in_every_update_and_the_same_again(folder: Path) -> None:
    def drawn(version: int) -> torch.Tensor:
        batch = pad(case.batch())._replace(version=version)
        return chosen(updated(folder, CLIP_COV.replace("0.2", "0.05"), batch=batch)[1])

    assert torch.equal(drawn(3), drawn(3))
    assert any(not torch.equal(drawn(3), drawn(version)) for version in (4, 5))


@pytest.mark.slow
@ALONE
@KINDS
def test_micro_batches_change_nothing(folder: Path, kind: str) -> None:
    whole, _ = updated(folder, kind, "learner.micro_batch_tokens=100000")
    split, _ = updated(folder, kind, "learner.micro_batch_tokens=40")
    assert_same(whole, split, atol=2e-6)


def _made(ranks: int, folder: Path) -> list[tuple[case.Weights, tuple[float, ...]]]:
    made = []
    for kind in (TOP, CLIP_COV, KL_COV, STEERED):
        updater, found = updated(folder, kind, "algorithm.entropy=0.1", f"learner.ranks={ranks}")
        case.adapt(updater, found)
        made.append((case.whole(updater.policy), tuple(updater.bonus)))
    return made


@pytest.mark.slow
def test_ranks_change_nothing(folder: Path, tmp_path: Path) -> None:
    of_one, of_two = (case.by_ranks(_made, ranks, tmp_path, folder) for ranks in (1, 2))
    for (one, one_bonus), (two, two_bonus) in zip(of_one, of_two, strict=True):
        assert one_bonus == two_bonus
        case.assert_same_weights(one, two)


# --- the bonus -----------------------------------------------------------------------------------------------

STEERED = "algorithm.entropy_control={target = 9.0, step = 0.05, range = [0.0, 0.5]}"


@ALONE
def test_the_bonus_is_steered_by_the_entropy_of_the_update_before(folder: Path) -> None:
    updater = case.updater(case.config_of(*RLOO, "algorithm.entropy=0.1", STEERED), folder)
    weights = [case.metrics(updater, pad(case.batch()))["entropy_weight"] for _ in range(3)]
    assert weights == pytest.approx([0.1, 0.15, 0.2])
    high = STEERED.replace("9.0", "1e-6")
    updater = case.updater(case.config_of(*RLOO, "algorithm.entropy=0.1", high), folder)
    weights = [case.metrics(updater, pad(case.batch()))["entropy_weight"] for _ in range(2)]
    assert weights == [0.1, 0.0] and updater.bonus == pytest.approx((0.0, 0.0))


@ALONE
def test_a_weight_that_is_steered_weighs_as_the_same_weight_that_is_not(folder: Path) -> None:
    steered, plain = (
        case.updater(case.config_of(*RLOO, f"algorithm.entropy={first}", *more), folder)
        for first, more in ((0.3, []), (0.1, [STEERED]))
    )
    plain.restore(UpdaterState(0.0, bonus=Bonus(0.3, 0.3)))
    for updater in (steered, plain):
        updater.update(pad(case.batch()))
    assert_same(steered, plain)


@ALONE
def test_a_policy_that_stands_still_steers_nothing(folder: Path) -> None:
    kl = "algorithm.kl={reward_beta=0.1, target=6.0, horizon=100}"
    config = case.config_of("algorithm.entropy=0.1", STEERED, "algorithm.critic.warmup_updates=4", kl)
    updater = case.updater(config, folder)
    assert updater.update(pad(case.batch(version=3))).frozen
    case.metrics(updater, pad(case.batch(version=3)))
    assert (updater.bonus, updater.beta) == ((0.1, 0.1), 0.1)
    case.metrics(updater, pad(case.batch(version=4)))
    assert updater.bonus == pytest.approx((0.15, 0.15))
    assert updater.beta < 0.1


@ALONE
def test_an_update_without_a_trained_token_has_no_entropy_and_steers_nothing(folder: Path) -> None:
    config = case.config_of(*RLOO, "algorithm.zero_variance=mask", "algorithm.entropy=0.1", STEERED)
    updater, batch = case.updater(config, folder), case.batch()
    equal = [replace(one, reward=1.0) for one in batch.trajectories]
    found = case.metrics(updater, pad(replace(batch, trajectories=tuple(equal))))
    assert found["empty_steps"] and not found.keys() & {"entropy", "ratio_p01", "ratio_p50", "ratio_p99"}
    assert updater.bonus == (0.1, 0.1)


@ALONE
def test_only_a_bonus_that_is_and_was_steered_goes_on_from_where_it_was(folder: Path) -> None:
    steered = case.updater(case.config_of(*RLOO, "algorithm.entropy=0.1", STEERED), folder)
    assert steered.state.bonus == (0.1, 0.1)
    steered.restore(UpdaterState(0.0, bonus=Bonus(0.4, 0.0)))
    assert steered.bonus == (0.4, 0.0)
    steered.restore(UpdaterState(0.0))
    assert steered.bonus == (0.4, 0.0)
    fixed = case.updater(case.config_of(*RLOO, "algorithm.entropy=0.1"), folder)
    assert fixed.state.bonus is None
    fixed.restore(UpdaterState(0.0, bonus=Bonus(0.4, 0.0)))
    assert fixed.bonus == (0.1, 0.1)


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        (["algorithm.exploration.kind=kl_cov"], "0 if an update is one step"),
        (["algorithm.exploration={kind = 'clip_cov', band = [2.0, 1.0]}"], "band must rise"),
        (["algorithm.entropy=2", STEERED], r"entropy \(2\) must lie in entropy_control.range \(0 to 0.5\)"),
        (["algorithm.entropy_control={target = 1.0, range = [0.2, 0.1]}"], "range must rise"),
        (
            [*RLOO, TOP, "algorithm.proximal=loglinear"],
            "exploration 'top_entropy', whose tokens are found in the whole",
        ),
    ],
    ids=["kl_cov", "band", "entropy", "range", "loglinear"],
)
def test_choices_that_say_nothing_are_refused(choices: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        case.config_of(*choices)


def test_without_an_exploration_there_is_nothing_to_choose() -> None:
    assert objective.build(case.config_of()).exploration is None
