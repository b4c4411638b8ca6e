"""`streamppo reward-test`: a table of scores, timings and errors."""

import json
from pathlib import Path

import pytest
from conftest import MATH

from streamppo.cli import main

FAULTY = Path(__file__).parent / "faulty_rewards.py"


def test_completions_sampled_from_the_model_are_scored_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reward-test", str(MATH), "--n", "5", "model.warm_start.max_steps=1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["#", "reward", "ms", "completion", "components,", "explanation", "or", "error"]
    assert [line.split()[0] for line in lines[1:6]] == list("01234")
    assert "5 completions: mean reward" in lines[6] and "0 failed" in lines[6]
    assert "reward: 5 calls" in lines[7]


def test_given_completions_are_scored_and_a_failure_is_shown_and_is_not_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"completion": "fine"}, {"completion": "raises"}, {"completion": "fine", "prompt": "1+1="}]
    (tmp_path / "given.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [f"reward.function={FAULTY}:sync", "model.warm_start.max_steps=1"]
    assert main(["reward-test", str(MATH), "--completions", str(tmp_path / "given.jsonl"), *overrides]) == 1
    out, log = capsys.readouterr()
    lines = out.splitlines()
    assert lines[1].split()[1] == "1" and lines[3].split()[1] == "1"
    assert lines[2].split()[1] == "failed" and "ValueError: no such answer" in lines[2]
    assert "3 completions: mean reward 1, 1 failed" in out
    assert "(sync, trajectory signature), in processes of its own" in log


def test_a_reward_that_cannot_be_loaded_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reward-test", str(MATH), "reward.function=nowhere:score", "model.warm_start.max_steps=1"]) == 1
    assert "importing nowhere failed" in capsys.readouterr().err
