"""An unknown name gets a suggestion: for a typo, a field of another table, the word of another trainer."""

import re
from pathlib import Path

import pytest
from conftest import MATH, REPOSITORY

from streamppo.config import file as configfile
from streamppo.config import hints
from streamppo.errors import ConfigError


def answer(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        configfile.load(MATH, overrides)
    return str(refused.value).splitlines()


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("batch_size", "queue.batch_size"),
        ("lr", "learner.lr"),
        ("max_tokens", "rollout.max_tokens"),
        ("temperature", "rollout.temperature"),
        ("queue.max_tokens", "rollout.max_tokens"),
        ("learner.batch_size", "queue.batch_size"),
        ("max_lagg", "queue.max_lag"),
        ("num_generations", "queue.samples_per_prompt"),
        ("per_device_train_batch_size", "queue.batch_size"),
        ("learning_rate", "learner.lr"),
        ("learner.learning_rate", "learner.lr"),
        ("beta", "algorithm.kl.loss_beta"),
        ("algorithm.beta", "algorithm.kl.loss_beta"),
        ("max_completion_length", "rollout.max_tokens"),
        ("num_iterations", "learner.epochs"),
        ("epsilon_high", "algorithm.policy_loss.range"),
        ("max_steps", "updates"),
        ("kl_coef", "algorithm.kl.reward_beta"),
        ("train_batch_size", "queue.batch_size"),
        ("data.train_batch_size", "queue.batch_size"),
        ("data.train_files", "task.data"),
        ("data.max_response_length", "rollout.max_tokens"),
        ("rollout.n", "queue.samples_per_prompt"),
        ("actor_rollout_ref.rollout.n", "queue.samples_per_prompt"),
        ("actor_rollout_ref.actor.optim.lr", "learner.lr"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", "learner.minibatches"),
        ("actor_rollout_ref.rollout.gpu_memory_utilization", "rollout.engine.mem_fraction_static"),
        ("algorithm.adv_estimator", "algorithm.advantage"),
        ("algorithm.kl_ctrl.kl_coef", "algorithm.kl.reward_beta"),
        ("critic.optim.lr", "algorithm.critic.lr"),
        ("trainer.total_epochs", "updates"),
        ("trainer.save_freq", "checkpoint.every"),
        ("trainer.experiment_name", "name"),
    ],
)
def test_a_field_of_another_table_or_trainer_is_answered_with_ours(override: str, field: str) -> None:
    (line,) = answer(f"{override}=1")
    assert line.startswith(
        f"override {override}: unknown field '{override.rpartition('.')[2]}': did you mean '{field}'"
    )


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("learner.lrr", "did you mean 'lr'?"),
        ("queue.batch_sizes", "did you mean 'batch_size'?"),
        ("gpus", "did you mean 'learner.gpus' or 'rollout.gpus'?"),
        ("rolout.max_tokens", "rolout: unknown field 'rolout': did you mean 'rollout'?"),
        ("task.data", 'kind "data" has it'),
        ("algorithm.correction.band", 'kind "mask" has it'),
        ("wibble", "known here are algorithm, archive, checkpoint"),
    ],
)
def test_a_typo_a_field_of_several_tables_and_one_of_another_kind_are_told_apart(override: str, said: str) -> None:
    (line,) = answer(f"{override}=1")
    assert line.startswith("override ") and said in line


def test_a_table_of_another_trainer_is_answered_field_by_field_with_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "verl.toml"
    path.write_text(MATH.read_text() + "\n[data]\ntrain_batch_size = 256\nshuffle = true\n")
    first = path.read_text().splitlines().index("[data]") + 1
    with pytest.raises(ConfigError) as refused:
        configfile.load(path)
    assert str(refused.value).splitlines() == [
        f"{path}:{first + 1}: data.train_batch_size: unknown field 'train_batch_size': did you mean "
        "'queue.batch_size' (all completions of one update, over all ranks)?",
        f"{path}:{first + 2}: data.shuffle: unknown field 'shuffle'",
    ]


def test_every_answer_is_a_field_that_there_is_and_no_word_has_two() -> None:
    there = {field.name for field in hints._fields()}
    assert set(hints.ALIASES) | set(hints.MEANING) <= there
    words = [word for text in hints.ALIASES.values() for word in text.split()]
    assert len(words) == len(set(words)) > 100


def test_the_hints_agree_with_the_table_of_the_page_about_other_trainers() -> None:
    table = (REPOSITORY / "docs" / "comparison.md").read_text().partition("## Names of fields\n")[2]
    rows = [[re.findall(r"`(.*?)`", cell) for cell in line.split("|")[1:4]] for line in table.splitlines()]
    rows = [row for row in rows if len(row) == 3 and row[0]]
    assert len(rows) >= 10
    for fields, *trainers in rows:
        for names in trainers:
            assert {hints._aliases()[name] for name in names} & set(fields), names
