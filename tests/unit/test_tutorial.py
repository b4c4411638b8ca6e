"""The commands and code of docs/tutorial.md that take seconds, as they stand there."""

import json
import re
import tomllib
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
from conftest import REPOSITORY

from streamppo import cli
from streamppo.config import file as configfile
from streamppo.types import Reward, ScoredText

PAGE = (REPOSITORY / "docs" / "tutorial.md").read_text()
BLOCKS = dict(re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
COMMANDS = re.findall(r"^    (streamppo .*?)(?: +#.*)?$", PAGE, re.MULTILINE)


def test_every_command_of_the_page_is_a_command() -> None:
    assert len(COMMANDS) >= 10, "the page has more than these"
    assert {command.split()[1] for command in COMMANDS} <= {name for name in cli.app if not name.startswith("-")}


def test_the_mistake_is_answered_as_the_page_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    command, answer = BLOCKS["console"].splitlines()
    assert cli.main(command.split()[2:]) == cli.MISTAKE
    assert capsys.readouterr().err.strip() == answer


def test_the_page_s_reward_scores_the_page_s_row_in_a_new_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "sorting"]) == 0
    row = json.loads(BLOCKS["json"])
    files = [Path("sorting", "data", f"{name}.jsonl").read_text().splitlines() for name in ("train", "held_out")]
    assert row in [json.loads(line) for line in chain(*files)]
    rewards: dict[str, Callable[..., Reward]] = {}
    exec(compile(BLOCKS["python"], "rewards.py", "exec"), rewards)
    found = [rewards["score"](said(row["prompt"], text), answer=row["answer"]) for text in ("abcd", "abdc", "x")]
    assert [reward.score for reward in found] == [1.0, pytest.approx(0.2), 0.0]
    assert [reward.components["right"] for reward in found] == [1.0, 0.0, 0.0]
    scorer = configfile.load(Path("sorting", "run.toml")).reward.scorers["reward"]
    assert scorer.function == f"{Path('sorting').resolve()}/rewards.py:score"  # pyright: ignore[reportAttributeAccessIssue]


def said(prompt: str, completion: str) -> ScoredText:
    return ScoredText(prompt=prompt, completion=completion, finish="stop", num_tokens=len(completion), tokens=b"")


def test_the_tables_for_a_gpu_are_those_of_the_shipped_configuration() -> None:
    shipped = tomllib.loads((REPOSITORY / "configs" / "gsm8k-qwen2.5-0.5b.toml").read_text())
    for section, fields in tomllib.loads(BLOCKS["toml"]).items():
        assert fields.items() <= shipped[section].items()
