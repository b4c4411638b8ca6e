"""A reference that follows the policy: how far it moves, when, on how many ranks, and over a resume."""

from pathlib import Path

import learner_case as case
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from streamppo.config.sections import Config
from streamppo.errors import ConfigError
from streamppo.learner import learner
from streamppo.learner.batch.padded import pad
from streamppo.learner.learner import Learner
from streamppo.learner.model.policy import Policy
from streamppo.learner.update import Updater

ALONE = pytest.mark.usefixtures("alone")
KL = ("algorithm.kl.loss_beta=0.1", "algorithm.advantage.kind=rloo", "learner.lr=0.01")
SOFT = (*KL, "algorithm.kl.follow_every=2", "algorithm.kl.follow_share=0.25")


def weights(policy: Policy) -> case.Weights:
    """The weights of the model alone."""
    return {name: tensor for name, tensor in case.whole(policy).items() if name.startswith("lm.")}


def frozen(updater: Updater) -> Policy:
    assert updater.reference is not None
    return updater.reference


@ALONE
def test_it_moves_by_its_share_after_every_so_many_updates_and_stands_still_between_them(folder: Path) -> None:
    updater = case.updater(case.config_of(*SOFT), folder)
    expected = weights(frozen(updater))
    for version in range(4):
        case.metrics(updater, pad(case.batch(version=version, min_version=0)))
        leader = weights(updater.policy)
        if version % 2:
            expected = {name: one + 0.25 * (leader[name] - one) for name, one in expected.items()}
        case.assert_same_weights(weights(frozen(updater)), expected, atol=1e-6)
        assert updater.reference_moved is (version > 0)
    assert not all(torch.equal(one, leader[name]) for name, one in expected.items())


@ALONE
def test_the_whole_way_makes_it_the_policy_which_is_then_no_distance_away(folder: Path) -> None:
    updater = case.updater(case.config_of(*KL, "algorithm.kl.follow_every=3"), folder)
    far = [case.metrics(updater, pad(case.batch(version=version, min_version=0)))["reference_kl"] for version in (1, 2)]
    assert far[1] > 1e-4
    after, leader = weights(frozen(updater)), weights(updater.policy)
    assert all(torch.equal(after[name], leader[name]) for name in leader)
    metrics = case.metrics(updater, pad(case.batch()))
    assert metrics["reference_kl"] == pytest.approx(0.0, abs=1e-6)


@ALONE
def test_teaching_the_critic_beforehand_moves_no_reference(folder: Path) -> None:
    updater = case.updater(case.config_of("algorithm.kl.loss_beta=0.1", "algorithm.kl.follow_every=1"), folder)
    updater.pretrain(pad(case.batch()))
    assert not updater.reference_moved


def _made(ranks: int, folder: Path) -> tuple[case.Weights, case.Weights]:
    updater = case.updater(case.config_of(*SOFT, f"learner.ranks={ranks}"), folder)
    for version in range(3):
        case.metrics(updater, pad(case.batch(version=version, min_version=0)))
    return weights(updater.policy), weights(frozen(updater))


@pytest.mark.slow
def test_three_ranks_move_it_as_one_does(folder: Path, tmp_path: Path) -> None:
    one, three = (case.by_ranks(_made, ranks, tmp_path, folder) for ranks in (1, 3))
    for mine, other in zip(one, three, strict=True):
        case.assert_same_weights(mine, other, atol=2e-5)
    assert not all(torch.equal(one[0][name], one[1][name]) for name in one[0])


# --- a learner that is resumed, and one whose configuration changes ------------------------------------------


def made(config: Config, folder: Path, resume_from: Path | None = None) -> Learner:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    come = None if resume_from is None else str(resume_from)
    return learner.build(config, str(folder), mesh, lambda *_: None, come)


def advance(one: Learner, updates: int) -> None:
    for _ in range(updates):
        batch = pad(case.batch(version=one.version, min_version=0, seed=one.version))
        case.metrics(one.updater, batch)
        one.version += 1


def saved(one: Learner, folder: Path) -> Path:
    one.save(folder)
    one.saver.wait()
    return folder / f"{one.version:08d}"


@pytest.mark.slow
@ALONE
def test_a_resumed_run_goes_on_with_the_reference_that_it_had(folder: Path, tmp_path: Path) -> None:
    config = case.config_of(*SOFT)
    first = made(config, folder)
    advance(first, 3)
    checkpoint = saved(first, tmp_path)
    second = made(config, folder, checkpoint)
    had, has = weights(frozen(first.updater)), weights(frozen(second.updater))
    assert all(torch.equal(had[name], has[name]) for name in had)
    first_model = weights(frozen(made(config, folder).updater))
    assert any(not torch.equal(first_model[name], has[name]) for name in has)
    for one in (first, second):
        advance(one, 2)
    for mine, other in zip(*((one.policy, frozen(one.updater)) for one in (first, second)), strict=True):
        known = weights(other)
        assert all(torch.equal(tensor, known[name]) for name, tensor in weights(mine).items())


@pytest.mark.slow
@ALONE
def test_a_reference_that_never_moved_is_in_no_checkpoint(folder: Path, tmp_path: Path) -> None:
    sizes: dict[str, int] = {}
    for name, choices in (("still", KL), ("moved", SOFT)):
        one = made(case.config_of(*choices), folder)
        advance(one, 2)
        sizes[name] = sum(path.stat().st_size for path in saved(one, tmp_path / name).glob("*.distcp"))
        assert one.updater.reference_moved is (name == "moved")
    model = sum(tensor.nbytes for tensor in weights(one.policy).values())
    assert sizes["moved"] - sizes["still"] > 0.9 * model


@pytest.mark.slow
@ALONE
def test_a_reference_that_stops_moving_stays_where_it_is_also_over_a_resume(folder: Path, tmp_path: Path) -> None:
    first, still = made(case.config_of(*SOFT), folder), case.config_of(*KL)
    advance(first, 2)
    checkpoint = saved(first, tmp_path)
    first.configure(still)
    second = made(still, folder, checkpoint)
    advance(first, 3)
    advance(second, 3)
    assert first.updater.reference_moved and second.updater.reference_moved
    one, other = weights(frozen(first.updater)), weights(frozen(second.updater))
    assert all(torch.equal(one[name], other[name]) for name in one)
    first.configure(case.config_of("algorithm.advantage.kind=rloo"))
    assert not first.updater.reference_moved
    first.configure(still)
    again = weights(frozen(first.updater))
    assert any(not torch.equal(one[name], again[name]) for name in one), "it begins with the first model anew"


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        (["algorithm.kl.follow_every=5"], "moves a reference: set reward_beta or loss_beta"),
        ([*KL, "algorithm.kl.follow_share=0.5"], "has no effect without follow_every"),
        ([*SOFT, "algorithm.kl.follow_share=0"], "follow_share"),
    ],
)
def test_settings_of_no_move_are_refused(choices: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        case.config_of(*choices)
