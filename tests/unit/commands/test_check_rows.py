"""`check` takes real rows through all that a run does with them, and ends when it is done."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import MATH, REPOSITORY

from streamppo.cli import main

Check = Callable[..., tuple[int, str]]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Check:
    """Check the default task with rows of its own; (exit code, output with single spaces)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")

    def run(rows: list[dict[str, Any]], function: str, *more: str) -> tuple[int, str]:
        Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = "task={kind='data', data='rows.jsonl', held_out=0.2}"
        scorer = f"reward={{function='{function}', processes=1}}"
        code = main(["check", str(MATH), task, scorer, *more])
        output = capsys.readouterr()
        return code, re.sub(" +\n", "\n", re.sub(" {2,}", " ", output.out + output.err))

    return run


def sums(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"{n}+1=", "answer": str(n + 1), **more} for n in range(count)]


OURS = "streamppo.tasks.scorers.maths:numeric"


@pytest.mark.parametrize(
    "function", [OURS, "streamppo.tasks.scorers.maths:Math", "streamppo.tasks.scorers.maths:gsm8k"]
)
def test_rows_are_scored_with_their_own_answers_and_one_is_shown(check: Check, function: str) -> None:
    code, output = check(sums(20), function)
    assert code == 0, output
    assert "reward ok 8 rows with their own answer as the completion score 1\n" in output
    assert "example ok a prompt as the model sees it, " in output


WITH_OWN = "rows with their own answer as the completion"
MINE = {
    "raises": (
        "raise ValueError(level)",
        1,
        f"error all 8 {WITH_OWN} failed: score.py:2: ValueError: 3; if it runs only on another machine, check with",
    ),
    "raises for some": ("return 1 / (int(answer) - 3)", 0, ", and 1 failed: score.py:2: ZeroDivisionError"),
    "is never right": ("return 0", 0, f"note 8 {WITH_OWN} score 0, as wrong answers do"),
    "is right": ("return trajectory.completion == answer", 0, f"ok 8 {WITH_OWN} score 1\n"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mine", MINE)
def test_a_reward_of_the_users_own_is_called_on_the_rows(check: Check, mine: str) -> None:
    body, wanted, sentence = MINE[mine]
    rows = sums(20, level=3)
    Path("score.py").write_text(f"def score(trajectory, answer, level):\n    {body}\n")
    code, output = check(rows, "score.py:score")
    assert code == wanted, output
    assert sentence in output
    code, output = check(rows, "score.py:score", "--no-score")
    assert code == 0, output
    assert "with their own answer" not in output


def test_an_answer_that_the_tokenizer_writes_otherwise_scores_as_in_a_run(check: Check, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def score(trajectory, answer):\n    return float(trajectory.completion == answer)\n"
    )
    for accent, score in (("\u00e9", 1), ("e\u0301", 0)):
        code, output = check([{"prompt": f"{n}=", "answer": f"caf{accent}"} for n in range(20)], "own.py:score")
        assert code == 0, output
        assert f"{WITH_OWN} score {score}" in output
        respelled = r"the tokenizer writes the answer 'cafe\u0301' as 'caf\xe9'"
        assert (respelled in output) == (score == 0)


def test_answers_that_no_completion_can_match_are_counted_with_their_places(check: Check) -> None:
    rows = sums(20)
    for number, answer in ((3, "46 apples"), (7, "The answer is 8."), (11, "['12']"), (12, "about 13")):
        rows[number]["answer"] = answer
    code, output = check(rows, OURS, "queue.max_failure_rate=0.5")
    assert code == 0, output
    assert "reward note 4 of 20 rows fail for every completion: the scorer cannot read the answer: " in output
    assert "rows.jsonl, row 4: the row's answer is '46 apples', which is not a number" in output
    assert "row 12:" in output
    assert "row 13:" not in output
    code, output = check(rows, OURS, "queue.max_failure_rate=0.1")
    assert code == 1
    assert "reward error 4 of 20 rows fail" in output


def test_repeated_rows_left_out_columns_and_doubtful_files_are_noted(check: Check, tmp_path: Path) -> None:
    Path("data").mkdir()
    for name in ("train.jsonl", "train-old.jsonl"):
        Path("data", name).write_text("".join(json.dumps(row) + "\n" for row in sums(10) * 2))
    code, output = check([], OURS, "task={kind='data', data='data', held_out=0.2}")
    assert code == 0, output
    assert "task note data: 10 of 20 rows repeat the prompt of an earlier row\n" in output
    assert "task note data: not read, although named like the split 'train' in " in output


def test_a_column_that_the_reward_does_not_get_is_named(check: Check) -> None:
    Path("score.py").write_text("def score(completions, **columns):\n    return [1.0 for _ in completions]\n")
    code, output = check(sums(10, completions="theirs"), "score.py:score")
    assert code == 0, output
    assert "it does not get the columns completions, whose names are its parameters" in output


@pytest.mark.slow
def test_check_ends_when_a_rewards_module_has_started_a_thread_that_does_not(tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text(
        "import threading, time\n"
        "def wait():\n    while True:\n        time.sleep(0.05)\n"
        "threading.Thread(target=wait).start()\n"
        "def score(trajectory, answer):\n    return float(trajectory.completion == answer)\n"
    )
    command = [sys.executable, "-m", "streamppo", "check", str(MATH), "reward={function='score.py:score', processes=1}"]
    env = {"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 rows with their own answer as the completion score 1" in done.stdout
    assert "a thread at score.py:4 continues and is not waited for" in done.stderr
