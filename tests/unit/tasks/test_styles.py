"""Rewards in the signatures of other trainers score unchanged."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from reward_case import one_function, started, text

from streamppo.errors import TaskError
from streamppo.tasks import plugins
from streamppo.tasks.rewards import styles
from streamppo.tasks.rewards.outcome import check_scored
from streamppo.tasks.rewards.signature import detect_signature
from streamppo.types import Message, Prompt, Reward

THEIRS = Path(__file__).parents[2] / "support" / "trainers_rewards.py"
ROW: dict[str, Any] = {
    "answer": "3",
    "data_source": "sums",
    "extra_info": {"index": 7},
    "info": {"weight": 1.0},
    "solutions": ["5", "3"],
    # Columns of TRL's rows, whose names are parameters of other signatures.
    "completion": "of the row",
    "queries": "of the row",
}
STYLES = {
    "trl": "batched",
    "trl_async": "batched",
    "TrlFactory": "batched",
    "made": "batched",
    "closure": "batched",
    "well_wrapped": "batched",
    "verl": "verl",
    "verl_batch": "verl_batch",
    "openrlhf": "openrlhf",
    "openrlhf_tensor": "openrlhf",
    "areal": "areal",
    "areal_solutions": "areal",
    "verifiers": "verifiers",
    "verifiers_kwargs": "verifiers",
}
CHAT = (Message(role="user", content="1+2="),)


def score(name: str, completions: list[str], messages: tuple[Message, ...] = CHAT, **row: Any) -> list[float | str]:
    """The scores of a reward in `trainers_rewards.py`, or the reasons of failures."""
    prompt = Prompt(text="1+2=", columns={**ROW, **row}, messages=messages, source="sums")

    async def story() -> list[float | str]:
        # OpenRLHF's rewards import torch, whose libraries for GPUs take gigabytes of addresses.
        limits = {"timeout_s": 60.0, "memory_mib": 32_768}
        async with started(one_function(function=f"{THEIRS}:{name}", **limits)) as rewards:
            said = [text(one, tokens=b"\1\0\0\0", messages=messages, source="sums") for one in completions]
            scored = await asyncio.gather(*(rewards.score(prompt, one) for one in said), return_exceptions=True)
        return [one.total if isinstance(one, Reward) else str(one) for one in scored]

    return asyncio.run(story())


@pytest.mark.sampled(len(STYLES))
@pytest.mark.parametrize("messages", [CHAT, ()], ids=["chat", "text"])
@pytest.mark.parametrize("name", STYLES)
def test_a_reward_of_another_trainer_scores_unchanged(name: str, messages: tuple[Message, ...]) -> None:
    assert score(name, ["$3$", "$4$", "$3.0$"], messages) == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(("info", "total"), [('{"weight": 0.5}', 0.5), ({"weight": 0.5}, 0.5), ("", "KeyError")])
def test_the_info_of_verifiers_rows_may_be_json(info: object, total: float | str) -> None:
    (scored,) = score("verifiers", ["$3$"], info=info)
    assert scored == total or str(total) in str(scored)


@pytest.mark.parametrize(("name", "style"), STYLES.items())
def test_the_style_is_told_by_the_parameters(name: str, style: str) -> None:
    assert detect_signature(plugins.load(f"{THEIRS}:{name}", "reward"), name, {}).style.name == style


def test_each_style_has_its_marks_among_its_parameters_and_the_first_that_fits_is_its_own() -> None:
    for style in styles.STYLES:
        for mark in style.marks:
            assert mark <= style.parameters.keys()
            fitting = [other for other in styles.STYLES if any(own <= style.parameters.keys() for own in other.marks)]
            assert fitting[0] is style


def test_a_trajectory_as_first_parameter_leaves_other_names_to_columns() -> None:
    def ours(trajectory: Any, completion: str, queries: str) -> float:
        return 0.0

    found = detect_signature(ours, "ours", {})
    assert found.columns(ROW) == {"completion": "of the row", "queries": "of the row"}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("of_slime", r"takes \(args, sample, \*\*kwargs\); .*; slime gives sample: sample\.response is `trajectory"),
        ("badly_wrapped", r"takes \(\*args, \*\*kwargs\); .*write the decorator with functools\.wraps"),
        ("Uncallable", "is a class without `__call__`"),
        ("by_keyword", r"'trajectory' gets no keyword: put it before the `\*`"),
        ("by_position", "'answer' is passed as a keyword: put the `/` before it"),
        ("trl_by_position", "'prompts' is passed as a keyword: put the `/` before it"),
    ],
)
def test_a_signature_of_none_is_refused_with_what_to_do(name: str, why: str) -> None:
    with pytest.raises(TaskError, match=why):
        score(name, ["3"])


def test_what_no_trajectory_has_fails_it_with_the_reason() -> None:
    (reason,) = score("with_state", ["3"])
    assert "asks for the column 'state'" in str(reason) and "verifiers gives state: run the whole env" in str(reason)
    (reason,) = score("with_ids", ["3"])
    assert "object of type 'NoneType' has no len()" in str(reason)


@pytest.mark.parametrize(("name", "parameter"), [("verl_batch", "ground_truths"), ("openrlhf", "labels")])
def test_a_row_without_the_answer_that_a_parameter_gets_is_refused(name: str, parameter: str) -> None:
    found = detect_signature(plugins.load(f"{THEIRS}:{name}", "reward"), name, {})
    with pytest.raises(TaskError, match=f"its `{parameter}` is the row's answer: name that column as task.answer"):
        found.columns({"gt": "3"})


def test_numbers_that_openrlhf_logs_become_components() -> None:
    import torch

    given = {"rewards": torch.ones(1), "scores": torch.ones(1), "extra_logs": {"length": torch.tensor(7.0), "x": "no"}}
    reward = Reward(score=1.0, components={"scores": 1.0, "length": 7.0})
    assert check_scored(given, text("3")).reward == reward
    assert "whose rewards is not a finite number" in check_scored({"rewards": torch.ones(2)}, text("3")).reason
