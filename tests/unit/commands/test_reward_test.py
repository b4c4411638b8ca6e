"""`streamppo reward-test`: a table of scores, timings and errors."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from config_case import one_source
from conftest import MATH, SUPPORT

from streamppo.cli import main
from streamppo.commands.start import reward_test as trial
from streamppo.config.sections import Config
from streamppo.config.task import DataTask
from streamppo.errors import ModelError, TaskError
from streamppo.tasks import dataset_files, task
from streamppo.tasks.tokenizer import Tokenizer, character_tokenizer
from streamppo.types import Message, Prompt, ScoredText

FAULTY = SUPPORT / "faulty_rewards.py"


def test_completions_sampled_from_the_model_are_scored_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reward-test", str(MATH), "--n", "5", "model.tiny.max_steps=1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        *["#", "reward", "ms", "tokens", "completion", "answer"],
        *["components,", "explanation", "or", "error"],
    ]
    assert [line.split()[0] for line in lines[1:6]] == list("01234")
    assert "5 completions: mean reward" in lines[6] and "0 failed" in lines[6]
    assert "reward: 5 calls" in lines[7]


def test_what_prevents_learning_is_said_below_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "by_text.py").write_text(
        "def score(trajectory, answer):\n    return float(trajectory.completion == answer)\n"
    )
    overrides = [f"reward.function={tmp_path}/by_text.py:score", "model.tiny.max_steps=1"]
    long = "12345" * 24
    cases = (
        ([{"completion": long, "finish": "length"}, {"completion": "7", "answer": "7"}], [True, False]),
        ([{"completion": "1"}, {"completion": "2"}], [False, True]),
        ([{"completion": "1"}], [False, False]),
    )
    for rows, said in cases:
        filled = [{"prompt": "1+1=", "answer": "12", **row} for row in rows]
        assert main(["reward-test", str(MATH), "--completions", str(jsonl(tmp_path, *filled)), *overrides]) == 0
        out = capsys.readouterr().out
        assert ["1 of 2 completions (+) were cut off" in out, "all scores are the same" in out] == said
        tokens, shown = out.splitlines()[1].split()[3:5]
        assert tokens == ("120+" if said[0] else "2") and shown.startswith('"1')
        # The end of a long completion is shown too: rewards usually read the answer there.
        assert ("…" in out.splitlines()[1] and '345"  ' in out.splitlines()[1]) == said[0]


def test_given_completions_are_scored_and_a_failure_is_shown_and_is_not_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"completion": "fine"}, {"completion": "raises"}, {"completion": "fine", "prompt": "1+1="}]
    (tmp_path / "given.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [f"reward.function={FAULTY}:sync", "model.tiny.max_steps=1"]
    assert main(["reward-test", str(MATH), "--completions", str(tmp_path / "given.jsonl"), *overrides]) == 1
    out, log = capsys.readouterr()
    lines = out.splitlines()
    assert lines[1].split()[1] == "1" and lines[3].split()[1] == "1"
    assert lines[2].split()[1] == "failed" and "ValueError: no such answer" in lines[2]
    assert "3 completions: mean reward 1, 1 failed" in out
    assert "(sync, trajectory signature), in processes of its own" in log
    assert "making builtin:tiny" not in log, "no model is needed"


AGENTS = SUPPORT / "agents_of_every_kind.py"


@pytest.mark.slow
def test_agents_are_played_and_what_became_of_their_requests_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["reward={}", "model.tiny.max_steps=1", "rollout.max_tokens=4", "environment.max_tokens=64"]
    agent = [f"environment.agent={AGENTS}:two_turns", "environment.max_turns=4"]
    assert main(["reward-test", str(MATH), "--n", "3", *agent, *overrides]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [[str(row), "2"] for row in range(3)]
    assert "3 completions: mean reward 2, 0 failed" in lines
    assert lines[-1] == "agents: 6 requests, 3 runs, 0 undelivered tokens"


def test_an_agent_that_fails_is_a_row_with_its_sentence_and_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    agent = [f"environment.agent={AGENTS}:never_calls", "reward={}", "model.tiny.max_steps=1"]
    assert main(["reward-test", str(MATH), "--n", "2", *agent]) == 1
    out = capsys.readouterr().out
    assert "the agent made no request" in " ".join(out.split()) and "agents: 2 failed" in out


def test_a_reward_that_cannot_be_loaded_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reward-test", str(MATH), "reward.function=nowhere:score", "model.tiny.max_steps=1"]) == 1
    assert "importing nowhere failed" in capsys.readouterr().err


def test_a_given_completion_has_the_tokens_that_a_policy_would_have_sampled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """TRL's reward of docs/rewards.md divides by their number."""
    (tmp_path / "trl_style.py").write_text(
        "def share(completions, completion_ids, **kwargs):\n    return [1 / len(ids) for ids in completion_ids]\n"
    )
    rows = [{"completion": "1"}, {"completion": "123"}, {"completion": "12", "finish": "length"}]
    given = jsonl(tmp_path, *rows)
    overrides = [f"reward.function={tmp_path}/trl_style.py:share", "model.tiny.max_steps=1"]
    assert main(["reward-test", str(MATH), "--completions", str(given), *overrides]) == 0
    # The end of a turn is a token too, unless the completion was cut off.
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:4]] == ["0.5", "0.25", "0.5"]


def jsonl(folder: Path, *rows: dict[str, Any]) -> Path:
    (folder / "given.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "given.jsonl"


def given(folder: Path, source: DataTask, *rows: dict[str, Any]) -> list[tuple[Prompt, ScoredText]]:
    made = character_tokenizer("abcdefghijklmnopqrstuvwxyz")
    made.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    made.save_pretrained(folder / "tokenizer")
    tokenizer = Tokenizer(folder / "tokenizer")
    built = task.build(source, 1, tokenizer)
    return list(
        trial._completions(
            [*dataset_files.rows(str(jsonl(folder, *rows)), "train")], built, source.sources["data"], tokenizer
        )
    )


@pytest.fixture
def chats(tmp_path: Path) -> DataTask:
    """A data set of one chat."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "one", "answer": "two"}\n')
    return one_source(data=str(tmp_path / "rows.jsonl"), held_out=0.0, system="brief")


def test_a_given_completion_of_a_chat_is_scored_as_one(tmp_path: Path, chats: DataTask) -> None:
    def chat(text: str) -> tuple[Message, ...]:
        return (Message(role="system", content="brief"), Message(role="user", content=text))

    own = [{"role": "user", "content": "four"}]
    found = given(
        tmp_path,
        chats,
        {"completion": "a", "answer": "three"},
        {"completion": "b", "prompt": "three", "level": 1},
        {"completion": "c", "prompt": own},
    )
    assert [prompt.messages for prompt, _ in found] == [chat("one"), chat("three"), chat("four")]
    assert [text.messages for _, text in found] == [chat("one"), chat("three"), chat("four")]
    assert [prompt.columns for prompt, _ in found] == [{"answer": "three"}, {"level": 1}, {}]
    assert {text.source for _, text in found} == {"data"}


TRL = {"problem": "one", "solution": "two"}
VERL = {
    "data_source": "sums",
    "prompt": [{"role": "user", "content": "one"}],
    "reward_model": {"style": "rule", "ground_truth": "two"},
    "extra_info": {"index": 3},
}
NESTED = {"sample": {"text": "one"}, "meta": {"gold": "two", "tests": ["a", "b"]}}


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (TRL, {"prompt": "problem", "answer": "solution"}),
        (VERL, {}),
        (NESTED, {"prompt": "sample.text", "answer": "meta.gold", "columns": {"tests": "meta.tests"}}),
    ],
    ids=["trl", "verl", "nested"],
)
def test_a_row_of_the_data_with_a_completion_is_scored_as_that_row(
    tmp_path: Path, row: dict[str, Any], named: dict[str, Any]
) -> None:
    others = [json.loads(json.dumps(row).replace("one", word).replace("two", word)) for word in ("x", "y", "z")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in [*others, row]))
    source = one_source(data=str(tmp_path / "rows.jsonl"), held_out=0.0, **named)
    made = character_tokenizer("abcdefghijklmnopqrstuvwxyz")
    made.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    made.save_pretrained(tmp_path / "tokenizer")
    built = task.build(source, 1, Tokenizer(tmp_path / "tokenizer"))
    (expected,) = (prompt for prompt in built.training if prompt.text == "one")
    assert expected.columns["answer"] == "two"
    ((prompt, text),) = given(tmp_path, source, {**row, "completion": "two"})
    assert prompt == expected
    assert (text.prompt, text.messages, text.source) == ("one", expected.messages, expected.source)
    left_out = {
        name: value for name, value in row.items() if name != next(iter(named.values()), "prompt").split(".")[0]
    }
    ((prompt, _),) = given(tmp_path, source, {**left_out, "completion": "two"})
    assert prompt.text == built.prompt(0).text and prompt.columns["answer"] == "two"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"completion": 1}, "row 1: no text `completion`"),
        ({"completion": "a", "finish": "eos"}, 'row 1: `finish` is "stop" or "length", not \'eos\''),
        ({"completion": "", "finish": "length"}, "the completion '' has no tokens"),
        ({"completion": "a", "prompt": 5}, "row 1: the prompt must be a string or a list of messages"),
    ],
)
def test_a_completion_that_no_policy_can_have_sampled_is_refused(
    tmp_path: Path, chats: DataTask, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(TaskError, match=message):
        given(tmp_path, chats, row)


def test_a_prompt_that_the_engine_refuses_is_a_row_of_the_table(math_config: Callable[..., Config]) -> None:
    class Refusing:
        async def play(self, prompt: Prompt, sampling: Any) -> Any:
            raise ModelError("a prompt of 99 tokens does not fit")

    one: Any = Refusing()
    tried = asyncio.run(trial._sample(math_config(), one, one, Prompt(text="1+1=", columns={})))
    assert tried == trial.TriedCompletion(None, "", None, "a prompt of 99 tokens does not fit", 0.0)
