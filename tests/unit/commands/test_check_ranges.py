"""`check` refuses impossible settings, and notes unusual ones with their number."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import MATH

from streamppo.cli import main
from streamppo.commands.checks import check, lengths, notes
from streamppo.commands.checks import task as tasks
from streamppo.commands.checks.finding import Finding
from streamppo.config import file as configfile
from streamppo.errors import ConfigError


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The project that `init` makes."""
    before, folder = Path.cwd(), tmp_path_factory.mktemp("project")
    os.chdir(folder)
    assert main(["init", "letters"]) == 0
    os.chdir(folder / "letters")
    yield folder / "letters"
    os.chdir(before)


def worth(*overrides: str, file: Path = Path("run.toml")) -> list[Finding]:
    """All findings that are neither ok nor later; threads and cores are the machine's."""
    found, _ = check.check_lightly(configfile.load(file, overrides))
    return [one for one in found if one.state in ("note", "error") and " threads, but this machine" not in one.text]


NOTES = {
    "learner.lr=100": "learner.lr (100) is far above the usual range: from 1e-6 for weights of a billion to 1e-3",
    "learner.lr=1e-12": "learner.lr (1e-12) is far below",
    "algorithm.critic.lr=1": "algorithm.critic.lr (1) is far above the usual range: from 1e-6 to 3e-3",
    "learner.max_grad_norm=1e-5": "learner.max_grad_norm (1e-05) is far below the usual range: from 0.1 to 1",
    "learner.weight_decay=10": "learner.weight_decay (10) is far above",
    "learner.epochs=50": "learner.epochs (50) is far above the usual range: from 1 to 4",
    "rollout.temperature=5": "rollout.temperature (5) is far above the usual range: from 0.6 to 1.2",
    "rollout.temperature=0.01": "rollout.temperature (0.01) is far below",
    "rollout.top_p=0.1": "rollout.top_p (0.1) is far below the usual range: from 0.9 to 1",
    "queue.max_lag=1000": "queue.max_lag (1000) is far above the usual range: from 0 to 16",
    "queue.max_lag={kind='adaptive', at_most=1000}": "queue.max_lag (1000) is far above",
    "algorithm.entropy=10": "algorithm.entropy (10) is far above the usual range: from 0 to 0.01",
    "algorithm.entropy=-5": "algorithm.entropy (-5) is far below",
    "algorithm.kl.loss_beta=50": "algorithm.kl.loss_beta (50) is far above the usual range: from 0.001 to 0.1",
    "algorithm.kl.reward_beta=50": "algorithm.kl.reward_beta (50) is far above",
    "algorithm.critic.coefficient=1000": "algorithm.critic.coefficient (1000) is far above",
    "algorithm.positive_nll=30": "algorithm.positive_nll (30) is far above the usual range: about 0.1",
    "algorithm.target_kl=20": "algorithm.target_kl (20) is far above the usual range: from 0.01 to 0.1",
    "algorithm.advantage.lam=0": "algorithm.advantage.lam (0) is far below the usual range: from 0.9 to 1",
    "algorithm.advantage.gamma=0.1": "algorithm.advantage.gamma (0.1) is far below the usual range: from 0.99",
    "algorithm.policy_loss.range=[0.2,50]": "algorithm.policy_loss.range (50) is far above the usual range",
    "algorithm.correction={kind='truncate', cap=1000}": "algorithm.correction.cap (1000) is far above the usual "
    "range: from 1 to 10",
    "queue.batch_size=100000": "a batch has 25000 prompts (batch_size / samples_per_prompt), and the data have 3840: "
    "each is 6.51 times in every batch",
}
ERRORS = {
    "rollout.max_tokens=1": "rollout.max_tokens (1) has room for no answer: the shortest of the first 64 rows has 4 "
    "tokens, so every right completion is cut off; raise it to 5 or more",
    "rollout.max_tokens=3": "rollout.max_tokens (3) has room for no answer",
    "learner.ranks=60000": "learner.ranks (60000) and rollout.actors (1) are 60001 processes of at least",
    "rollout.actors=60000": "learner.ranks (1) and rollout.actors (60000) are 60001 processes",
    "cluster.cpus=1": "cluster.cpus (1) is less than the 2",
    "task.max_prompt_tokens=2": "a prompt of 5 tokens is longer than max_prompt_tokens (2): raise it",
}
REFUSED = {
    "task={kind='arithmetic', first=[0, 100000]}": "first (0, 100000) and second (10, 99) have 9,000,090 sums, more "
    "than 1,000,000",
    "rollout.actors=65537": "must be a whole number of at least 1 and of at most 65536, not 65537",
    "learner.betas=[0.9, 1.0]": "betas ([0.9, 1.0]) must be below 1: with 1 a moment ignores every gradient",
    "learner.minibatches=1000": "queue.batch_size (256) must be a multiple of learner.minibatches (1000)",
    "algorithm.advantage=grop": 'unknown kind "grop": kinds are gae, vtrace, sequence, grpo',
    "batch_size=64": "did you mean 'queue.batch_size'?",
    "lr=1": "did you mean 'learner.lr'?",
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("override", NOTES)
def test_what_hardly_ever_works_is_noted_with_its_number(project: Path, override: str) -> None:
    found = worth(override)
    assert {one.state for one in found} == {"note"}
    assert any(NOTES[override] in one.text for one in found), found


@pytest.mark.parametrize("override", ERRORS)
def test_what_cannot_work_is_an_error(project: Path, override: str) -> None:
    found = [one.text for one in worth(override) if one.state == "error"]
    assert any(ERRORS[override] in text for text in found), found
    with pytest.raises(ConfigError) as refused:
        check.refuse(configfile.load(Path("run.toml"), [override]))
    assert ERRORS[override] in str(refused.value), "a run makes the same look"


@pytest.mark.parametrize("override", REFUSED)
def test_what_contradicts_itself_is_refused_with_what_may_stand_there(project: Path, override: str) -> None:
    with pytest.raises(ConfigError) as refused:
        configfile.load(Path("run.toml"), [override])
    assert REFUSED[override] in str(refused.value)


def test_every_range_is_in_the_table_and_holds_the_defaults_and_the_project(project: Path) -> None:
    assert all(any(f"{one.name} (" in said for said in NOTES.values()) for one in notes.RANGES)
    assert worth() == []
    assert worth(file=MATH) == []
    assert worth("algorithm.advantage=grpo") == []


@pytest.mark.parametrize("file", sorted((MATH.parent).glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_configuration_lies_within_the_usual_ranges(file: Path) -> None:
    assert list(notes.ranges(configfile.load(file))) == []


@pytest.mark.parametrize("name", ["reward", "style"])
def test_a_reward_is_named_once(project: Path, name: str) -> None:
    (project / "own.toml").write_text(
        (project / "run.toml").read_text().replace("[reward]\n", f"[reward.scorers.{name}]\nkind = 'function'\n")
    )
    with pytest.raises(ConfigError) as refused:
        check.refuse(configfile.load(project / "own.toml", [f"reward.scorers.{name}.function=rewards.py:nope"]))
    begin = "reward: " if name == "reward" else "reward style: "
    assert str(refused.value).startswith(begin) and "reward reward" not in str(refused.value)


@pytest.mark.parametrize(
    ("answer", "function", "said"),
    [
        (46, "rewards.py:score", "64 of the first 64 rows have a number as their answer, such as 46: the reward "
         "gets it as int, and a completion is a text"),
        (4.5, "rewards.py:score", "such as 4.5: the reward gets it as float"),
        ("46", "rewards.py:score", None),
        (46, "streamppo.tasks.scorers.maths:numeric", None),
    ],
)  # fmt: skip
def test_answers_that_are_numbers_are_told(
    project: Path, tmp_path: Path, answer: object, function: str, said: str | None
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}>", "answer": answer}) + "\n" for n in range(100)))
    # The built-in model learns from texts: of another one the rows are read without its tokenizer.
    task = f"task={{kind='data', data='{data}', max_prompt_tokens=16}}"
    config = configfile.load(Path("run.toml"), [task, f"reward.function={function}", "model.path=./none"])
    prompts = tasks.load(config, None).task
    assert prompts is not None
    told = [one.text for one in lengths.answers(config, prompts, None)]
    assert (told == []) if said is None else any(said in text for text in told)


# --- numbers without bounds ----------------------------------------------------------------------------------


def numbers(table: Any, place: tuple[str, ...] = ()) -> Iterator[str]:
    """The overrides of each number of a configuration, with N for the number; of a range, its end."""
    match table:
        case msgspec.Struct():
            for name in table.__struct_fields__:
                yield from numbers(getattr(table, name), (*place, name))
        case bool():
            return
        case int() | float():
            yield f"{'.'.join(place)}=N"
        case (int(), int()):
            yield f"{'.'.join(place)}=[1,N]"
        case _:
            return


@pytest.mark.sampled(4)
@pytest.mark.timeout(60)
@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("number", [10**6, 10**12, 2**62])
@pytest.mark.parametrize("override", [*numbers(configfile.load(MATH))])
def test_no_number_keeps_check_at_work_for_ever(override: str, number: int) -> None:
    try:
        config = configfile.load(MATH, [override.replace("N", str(number))])
    except ConfigError as error:
        assert str(error).startswith(("override ", f"{MATH}: "))
        return
    assert check.check_all(config, None)
