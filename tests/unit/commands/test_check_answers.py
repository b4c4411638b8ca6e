"""`check` notes answers beyond the token limit: a policy that writes them is cut off."""

from pathlib import Path

import bring_case as case
import pytest

from streamppo.cli import main
from streamppo.commands.start.project import sizes


def answers(capsys: pytest.CaptureFixture[str], *overrides: str) -> list[str]:
    code = main(["check", "mine.toml", *overrides])
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("answers")]
    assert code == any(" error " in line for line in found)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("model", ["model", "builtin:tiny"])
def test_answers_without_room_are_counted_with_the_longest(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = case.bring(tmp_path) if model == "model" else case.bring(tmp_path, model=model)
    case.rows(tmp_path / "rows.jsonl", [{"prompt": f"{n}:", "answer": "abcdefgh"} for n in range(100)])
    assert main(words) == 0
    capsys.readouterr()
    assert answers(capsys) == [], "init leaves room for them"
    assert answers(capsys, "rollout.max_tokens=9") == [], "eight characters and the end"
    (found,) = answers(capsys, "rollout.max_tokens=8")
    assert " note " in found
    assert "64 of the first 64 rows have an answer that is longer than rollout.max_tokens (8), up to 9 tokens" in found
    (found,) = answers(capsys, "rollout.max_tokens=6")
    assert " error " in found
    assert "rollout.max_tokens (6) has room for no answer: the shortest of the first 64 rows has 8 tokens" in found


def test_long_answers_may_be_solutions_of_which_a_reward_reads_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = case.bring(tmp_path)
    case.rows(tmp_path / "rows.jsonl", [{"prompt": f"{n}:", "answer": "a" * 100} for n in range(100)])
    assert main(words) == 0
    capsys.readouterr()
    (found,) = answers(capsys, "rollout.max_tokens=6")
    assert " note " in found and "longer than rollout.max_tokens (6), up to 101 tokens" in found


@pytest.mark.parametrize(("long", "is_noted"), [(0, False), (2, False), (60, True)])
def test_a_few_long_answers_are_no_matter(
    long: int, is_noted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = case.bring(tmp_path)
    answer = {True: "a long answer", False: "a"}
    case.rows(tmp_path / "rows.jsonl", [{"prompt": f"{n}:", "answer": answer[n < long]} for n in range(100)])
    assert main(words) == 0
    capsys.readouterr()
    assert bool(answers(capsys, "rollout.max_tokens=6")) == is_noted


@pytest.mark.slow
def test_a_large_model_with_the_tokens_of_a_small_one_is_noted_though_its_answers_are_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(case.bring(tmp_path)) == 0
    capsys.readouterr()
    assert answers(capsys) == []
    monkeypatch.setattr(sizes, "SMALL", 1000)
    (found,) = answers(capsys)
    assert " note " in found and "rollout.max_tokens (6) is low for a model of 5,952 parameters" in found
    assert answers(capsys, "rollout.max_tokens=64") == []
