"""Learning from a teacher, and from right answers as they are: in one update, by itself, and split in every way."""

from pathlib import Path

import learner_case as case
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from streamppo.errors import ModelError
from streamppo.learner.batch.padded import PaddedBatch, pad
from streamppo.learner.model import frozen
from streamppo.learner.update import Updater
from streamppo.tasks.tokenizer import character_tokenizer

ALONE = ("algorithm.advantage.kind=rloo", "algorithm.teacher.others=0")


@pytest.fixture(scope="module")
def taught_by(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A teacher that is not the policy, and of another size."""
    folder = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(11)
    Qwen2ForCausalLM(Qwen2Config(**{**case.SMALL, "hidden_size": 16}, initializer_range=0.3)).save_pretrained(folder)
    return f"algorithm.teacher.model={folder}"


def updated(folder: Path, *overrides: str) -> tuple[case.Weights, dict[str, float]]:
    return case.updated(folder, pad(case.batch()), "reward.correct_at=0.5", *overrides)


def estimates(updater: Updater, batch: PaddedBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The advantages of an update, the policy's log-probs before it, and the teacher's."""
    assert updater.teacher is not None
    with torch.no_grad():
        taught_BT = updater.teacher(batch, "policy").logprobs_BT
        before_BT = updater.policy(batch, "policy").logprobs_BT
    return updater.update(batch).targets.estimate.advantages, before_BT, taught_BT


@pytest.mark.usefixtures("alone")
def test_as_an_advantage_it_stands_on_its_own_token_beside_that_of_the_rewards(folder: Path, taught_by: str) -> None:
    batch, rloo = pad(case.batch()), "algorithm.advantage.kind=rloo"
    plain_BT = case.updater(case.config_of(rloo), folder).update(batch).targets.estimate.advantages
    for weight, others in ((1.0, 0.0), (0.25, 1.0)):
        choices = (rloo, taught_by, f"algorithm.teacher.weight={weight}", f"algorithm.teacher.others={others}")
        found_BT, before_BT, taught_BT = estimates(case.updater(case.config_of(*choices), folder), batch)
        expected_BT = others * plain_BT + weight * (taught_BT - before_BT)
        torch.testing.assert_close(found_BT, expected_BT.masked_fill(~batch.mask_BT, 0.0), rtol=0, atol=1e-5)


@pytest.mark.usefixtures("alone")
def test_as_a_reward_it_is_summed_by_the_estimator(folder: Path, taught_by: str) -> None:
    batch = pad(case.batch())
    choices = (taught_by, "algorithm.teacher.signal=reward", "algorithm.teacher.weight=0.5")
    estimator = ("algorithm.advantage.kind=reinforce_plus_plus", "algorithm.whiten.over=off")
    found_BT, before_BT, taught_BT = estimates(case.updater(case.config_of(*choices, *estimator), folder), batch)
    rewards_BT = (batch.rewards_BT + 0.5 * (taught_BT - before_BT)).masked_fill(~batch.mask_BT, 0.0)
    returns_BT = rewards_BT.flip(-1).cumsum(-1).flip(-1)[batch.mask_BT]
    white = (returns_BT - returns_BT.mean()) / (returns_BT.var(unbiased=False) + 1e-8).sqrt()
    torch.testing.assert_close(found_BT[batch.mask_BT], white, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("alone")
def test_updates_bring_the_policy_to_the_teacher_without_a_reward(folder: Path, taught_by: str) -> None:
    choices = (taught_by, *ALONE, "algorithm.correction.kind=off", "learner.lr=0.01", "learner.max_grad_norm=100")
    updater = case.updater(case.config_of(*choices), folder)
    batch = pad(case.batch())
    assert updater.teacher is not None
    with torch.no_grad():
        taught_BT = updater.teacher(batch, "policy").logprobs_BT
    distances: list[float] = []
    for _ in range(20):
        updated = updater.update(batch)
        far_BT = (updated.targets.scored.logprobs_BT - taught_BT)[batch.fresh_BT]
        distances.append(far_BT.square().mean().item())
    assert distances[-1] < 0.7 * distances[0]


@pytest.mark.usefixtures("alone")
def test_the_policy_as_its_own_teacher_teaches_nothing(folder: Path) -> None:
    before = case.whole(case.updater(case.config_of(), folder).policy)
    after, metrics = updated(folder, f"algorithm.teacher.model={folder}", *ALONE, "algorithm.entropy=0")
    assert metrics["teacher_kl"] == pytest.approx(0.0, abs=1e-6)
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-6)


NLL = ("algorithm.advantage.kind=rloo", "algorithm.positive_nll=0.1", "learner.minibatches=2")


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_micro_batches_change_nothing(folder: Path, taught_by: str) -> None:
    cut = ("learner.micro_batch_tokens=100000", "learner.micro_batch_tokens=40", "learner.micro_batch_tokens=1")
    for choices in ((taught_by, "algorithm.teacher.signal=reward"), (taught_by, *ALONE), NLL):
        whole, *pieces = (updated(folder, *choices, one) for one in cut)
        for piece in pieces:
            case.assert_same(whole, piece)


@pytest.mark.usefixtures("alone")
def test_the_nll_is_of_right_answers_alone_and_its_gradient_is_added(folder: Path) -> None:
    batch, rloo = pad(case.batch()), "algorithm.advantage.kind=rloo"
    choices = (rloo, "learner.max_grad_norm=1000", "reward.correct_at=0.5")
    moved = {}
    for weight in (0.0, 0.3):
        updater = case.updater(case.config_of(*choices, f"algorithm.positive_nll={weight}"), folder)
        metrics = case.metrics(updater, batch)
        moved[weight] = case.whole(updater.policy)
    plain = case.updater(case.config_of(*choices), folder)
    logprobs_BT = plain.policy(batch, "policy").logprobs_BT
    right_BT = batch.mask_BT & (batch.reward_B >= 0.5)[:, None]
    trained_BT = right_BT & batch.fresh_BT
    assert 0 < trained_BT.sum() < right_BT.sum() < batch.mask_BT.sum()
    assert metrics["positive_nll"] == pytest.approx(-logprobs_BT[trained_BT].mean().item(), rel=1e-5)
    (-0.3 * logprobs_BT[trained_BT].sum() / right_BT.sum()).backward()
    rate = plain.optimizer.param_groups[0]["lr"]
    for name, parameter in plain.policy.lm.named_parameters():
        expected = moved[0.0][f"lm.{name}"] - rate * case.full(parameter.grad)
        torch.testing.assert_close(moved[0.3][f"lm.{name}"], expected, rtol=0, atol=1e-5)


def _made(ranks: int, folder: Path, choices: list[tuple[str, ...]]) -> list[tuple[case.Weights, dict[str, float]]]:
    return [updated(folder, *one, f"learner.ranks={ranks}", "learner.micro_batch_tokens=40") for one in choices]


@pytest.mark.slow
def test_three_ranks_make_the_update_of_one(folder: Path, taught_by: str, tmp_path: Path) -> None:
    choices = [(taught_by, "learner.minibatches=2"), NLL]
    of_one, of_three = (case.by_ranks(_made, ranks, tmp_path, folder, choices) for ranks in (1, 3))
    for one, three in zip(of_one, of_three, strict=True):
        case.assert_same(one, three)


# --- the teacher's tokens ------------------------------------------------------------------------------------


def folder_of(folder: Path, alphabet: str, vocabulary: int) -> str:
    character_tokenizer(alphabet).save_pretrained(folder)
    Qwen2Config(**{**case.SMALL, "vocab_size": vocabulary}).save_pretrained(folder)
    return str(folder)


def test_a_teacher_that_reads_other_tokens_is_refused_by_the_first_of_them(tmp_path: Path) -> None:
    ours = folder_of(tmp_path / "ours", "0123+=", 17)
    frozen.check_teacher_tokens(folder_of(tmp_path / "same", "0123+=", 17), ours)
    frozen.check_teacher_tokens(folder_of(tmp_path / "larger", "0123+=ab", 32), ours)
    with pytest.raises(ModelError, match=r"must have the policy's tokenizer: token 7, '\+', is 8 there \(2 of 9"):
        frozen.check_teacher_tokens(folder_of(tmp_path / "moved", "0123=+", 17), ours)
    with pytest.raises(ModelError, match=r"'=', is unknown there"):
        frozen.check_teacher_tokens(folder_of(tmp_path / "fewer", "0123+", 17), ours)
    with pytest.raises(ModelError, match="has 9 tokens, and the policy may sample any of its 17 tokens"):
        frozen.check_teacher_tokens(folder_of(tmp_path / "short", "0123+=", 9), ours)
    Qwen2Config(**case.SMALL).save_pretrained(tmp_path / "bare")
    with pytest.raises(ModelError, match="cannot be compared"):
        frozen.check_teacher_tokens(str(tmp_path / "bare"), ours)
