"""A critic with a transformer of its own: its first weights, and its own steps."""

import shutil
from pathlib import Path

import learner_case as case
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForSequenceClassification

from streamppo.config import file as configfile
from streamppo.errors import ModelError
from streamppo.learner.batch.padded import pad
from streamppo.learner.model import hf_files, load_policy
from streamppo.learner.model import policy as model
from streamppo.tasks.tokenizer import character_tokenizer

pytestmark = pytest.mark.usefixtures("alone")

OWN = "algorithm.critic.model=policy"


def updated(folder: Path, *overrides: str) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    updater = case.updater(case.config_of(OWN, *overrides), folder)
    metrics = case.metrics(updater, pad(case.batch()))
    return case.whole(updater.policy), metrics


@pytest.mark.parametrize("model_choice", ["head", "policy"])
def test_pretraining_teaches_the_critic_and_nothing_else(folder: Path, model_choice: str) -> None:
    config = case.config_of(f"algorithm.critic.model={model_choice}", "algorithm.critic.clip=0", "learner.lr=0.0003")
    updater = case.updater(config, folder)
    before = case.whole(updater.policy)
    batch = pad(case.batch())
    explained = [updater.pretrain(batch) for _ in range(30)]
    after = case.whole(updater.policy)
    assert explained[-1] > explained[0] + 0.1
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) is not is_critics(name), name


def test_another_runs_tokens_are_never_the_learners_own_whatever_their_lag(folder: Path) -> None:
    """V-trace takes a token of lag 0 for on-policy; in an archive it only says that the run was in step with itself."""
    batch = pad(case.batch())
    in_step = batch._replace(lag_BT=torch.zeros_like(batch.lag_BT))
    taught = {}
    for lesson in ("pretrain", "update"):
        for name, learned in (("late", batch), ("in step", in_step)):
            updater = case.updater(case.config_of(OWN, "algorithm.advantage.kind=vtrace"), folder)
            getattr(updater, lesson)(learned)
            taught[lesson, name] = case.whole(updater.policy)["value_head.weight"]
    assert torch.equal(taught["pretrain", "late"], taught["pretrain", "in step"])
    assert not torch.equal(taught["update", "late"], taught["update", "in step"])


def is_critics(name: str) -> bool:
    return name.startswith(("critic.", "value_head."))


def test_the_critic_makes_its_own_steps_and_moves_nothing_of_the_policy(folder: Path) -> None:
    start = case.whole(case.updater(case.config_of(OWN), folder).policy)
    once, metrics = updated(folder)
    often, often_metrics = updated(folder, "algorithm.critic.epochs=3", "algorithm.critic.minibatches=2")
    assert (metrics["steps"], metrics["critic_steps"]) == (1, 1)
    assert (often_metrics["steps"], often_metrics["critic_steps"]) == (1, 6)
    for name in start:
        assert torch.equal(once[name], often[name]) is not is_critics(name), name
        assert not torch.equal(start[name], once[name]), name


def test_the_critic_follows_the_learners_schedule_unless_it_has_one(folder: Path) -> None:
    _, metrics = updated(folder, "learner.epochs=2", "learner.minibatches=3")
    assert (metrics["steps"], metrics["critic_steps"]) == (6, 6)
    _, metrics = updated(folder, "learner.epochs=2", "learner.minibatches=3", "algorithm.critic.epochs=1")
    assert (metrics["steps"], metrics["critic_steps"]) == (6, 3)


def test_more_passes_of_the_critic_fit_the_returns_better(folder: Path) -> None:
    """The loss is that of the mean step, so it falls with every pass that still learns."""
    free = ("algorithm.critic.clip=0", "learner.lr=0.002")
    losses = [updated(folder, *free, f"algorithm.critic.epochs={n}")[1]["value_loss"] for n in (1, 4, 8)]
    assert losses == sorted(losses, reverse=True)


def test_the_critics_gradient_is_clipped_on_its_own(folder: Path) -> None:
    start = case.whole(case.updater(case.config_of(OWN), folder).policy)
    free, _ = updated(folder)
    after, metrics = updated(folder, "algorithm.critic.max_grad_norm=0.001")
    lr = case.config_of().learner.lr * 100
    moved = torch.cat([(after[name] - start[name]).flatten() for name in start if is_critics(name)])
    assert metrics["critic_grad_norm"] > 0.001
    assert moved.norm().item() == pytest.approx(lr * 0.001, rel=1e-2)
    assert all(torch.equal(free[name], after[name]) for name in start if not is_critics(name))


def test_target_kl_ends_the_policys_steps_and_not_the_critics(folder: Path) -> None:
    _, metrics = updated(folder, "learner.epochs=4", "learner.lr=0.01", "algorithm.target_kl=0.001")
    assert metrics["stopped_early"] == 1
    assert metrics["steps"] < 4
    assert metrics["critic_steps"] == 4


@pytest.mark.parametrize("kind", ["head", "policy"])
def test_in_the_warm_up_only_the_critic_learns(folder: Path, kind: str) -> None:
    """The batch is that of version 3: in the warm-up of four updates, and past that of three."""
    for warmup, stands in ((4, True), (3, False)):
        config = case.config_of(f"algorithm.critic.model={kind}", f"algorithm.critic.warmup_updates={warmup}")
        updater = case.updater(config, folder)
        updater.optimizer = torch.optim.AdamW(updater.policy.parameters(), lr=0.01)
        before = case.whole(updater.policy)
        updater.update(pad(case.batch()))
        for name, tensor in case.whole(updater.policy).items():
            assert torch.equal(tensor, before[name]) is (stands and not is_critics(name)), (warmup, name)
        moments = {id(parameter) for parameter in updater.optimizer.state}
        assert all((id(parameter) in moments) is not stands for parameter in updater.policy.lm.parameters())


# --- where it begins -----------------------------------------------------------------------------------------


def critic_at(folder: Path, choice: str | Path) -> model.Policy:
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return load_policy.load(case.config_of().model, folder, 1.0, mesh, str(choice))


def reward_model(path: Path, **settings: int) -> Qwen2ForSequenceClassification:
    made = Qwen2ForSequenceClassification(Qwen2Config(**case.SMALL | settings))
    made.save_pretrained(path)
    return made.eval()


def test_a_reward_model_gives_transformer_and_value_head(folder: Path, tmp_path: Path) -> None:
    made = reward_model(tmp_path, num_labels=1)
    policy = critic_at(folder, tmp_path)
    weights = case.whole(policy)
    torch.testing.assert_close(weights["value_head.weight"], made.score.weight.detach(), rtol=0, atol=0)
    assert not weights["value_head.bias"].any()
    padded = pad(case.batch())
    with torch.no_grad():
        values_BT = policy(padded, "critic").values_BT
        for row in range(case.BATCH):
            start, length = int(padded.start_B[row]), int(padded.length_B[row])
            for t in range(length):
                score = made(input_ids=padded.inputs_BL[row : row + 1, : start + t]).logits
                torch.testing.assert_close(values_BT[row, t], score.squeeze(), rtol=0, atol=1e-5)


def test_a_causal_model_gives_its_transformer_and_a_head_of_zeros(folder: Path) -> None:
    expected = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).base_model.named_parameters())
    for choice in ("policy", folder):
        weights = case.whole(critic_at(folder, choice))
        assert not weights["value_head.weight"].any()
        assert all(torch.equal(weights[f"critic.{name}"], tensor) for name, tensor in expected.items())


def test_from_scratch_is_the_policys_architecture_with_weights_of_its_own(folder: Path) -> None:
    one, two = (case.whole(critic_at(folder, "scratch")) for _ in range(2))
    copy = case.whole(critic_at(folder, "policy"))
    assert {name: tensor.shape for name, tensor in one.items()} == {name: t.shape for name, t in copy.items()}
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["critic.layers.0.mlp.up_proj.weight"], copy["critic.layers.0.mlp.up_proj.weight"])


def test_a_critic_that_cannot_value_these_tokens_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere.* cannot be loaded"):
        critic_at(folder, tmp_path / "nowhere")
    reward_model(tmp_path / "two", num_labels=2)
    with pytest.raises(ModelError, match="two' has 2 labels: a value is one number"):
        critic_at(folder, tmp_path / "two")
    reward_model(tmp_path / "few", num_labels=1, vocab_size=9)
    with pytest.raises(ModelError, match="few' has 9 tokens, and the policy may sample any of its 17 tokens"):
        critic_at(folder, tmp_path / "few")


def test_a_critic_that_reads_other_tokens_is_refused(
    folder: Path, tmp_path: Path, logged: pytest.LogCaptureFixture
) -> None:
    ours = shutil.copytree(folder, tmp_path / "ours")
    character_tokenizer("0123+=").save_pretrained(ours)
    reward_model(tmp_path / "rated", num_labels=1)
    critic_at(ours, tmp_path / "rated")
    assert "it is unknown whether the critic" in logged.text
    character_tokenizer("0123=+").save_pretrained(tmp_path / "rated")
    with pytest.raises(ModelError, match=r"rated' must have the policy's tokenizer: token 7, '\+', is 8 there"):
        critic_at(ours, tmp_path / "rated")
    character_tokenizer("0123+=").save_pretrained(tmp_path / "rated")
    logged.clear()
    critic_at(ours, tmp_path / "rated")
    assert not logged.text


def test_a_critic_learns_from_no_run_of_another_tokenizer(
    folder: Path, tmp_path: Path, logged: pytest.LogCaptureFixture
) -> None:
    ours, theirs, run = (tmp_path / name for name in ("ours", "theirs", "run"))
    run.mkdir()
    configfile.save(case.config_of(f"model.path={theirs}"), run)
    for alphabet in ("0123+=", "0123+=ab"):
        shutil.copytree(folder, ours, dirs_exist_ok=True)
        character_tokenizer(alphabet).save_pretrained(ours)
        hf_files.check_archived_tokens(str(run), ours)
        assert logged.text.count("it is unknown whether") == 1, "only while the run's model is missing"
        character_tokenizer("0123+=").save_pretrained(theirs)
    character_tokenizer("012=+3").save_pretrained(ours)
    with pytest.raises(
        ModelError, match=r"run', which was sampled with another.* token 6, '3', is 8 in the policy's \(2"
    ):
        hf_files.check_archived_tokens(str(run), ours)
