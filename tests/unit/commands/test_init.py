"""A new project: it can be run, and existing files stay untouched."""

import json
from pathlib import Path

import pytest

from streamppo.cli import MISTAKE, main
from streamppo.commands.start import init
from streamppo.config import file as configfile
from streamppo.tasks import warmup_data


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_project_has_a_configuration_that_loads_with_its_own_data_and_reward(tmp_path: Path) -> None:
    project = tmp_path / "sorting"
    assert main(["init", str(project)]) == 0
    config = configfile.load(project / "run.toml")
    assert config.name == "sorting"
    assert config.reward.scorers["reward"].function == f"{project}/rewards.py:score"  # type: ignore[union-attr]
    assert {path.name for path in project.iterdir()} == {"run.toml", "rewards.py", "README.md", "data"}
    assert "streamppo summary runs/sorting" in (project / "README.md").read_text()
    prepared = warmup_data.prepare(config)
    assert set(prepared.alphabet) == set(init.LETTERS) | {">"}


def test_every_answer_is_right_and_no_problem_is_trained_on_and_held_out(tmp_path: Path) -> None:
    main(["init", str(tmp_path / "sorting")])
    train, held_out = (rows(tmp_path / "sorting" / "data" / f"{name}.jsonl") for name in ("train", "held_out"))
    assert all("".join(sorted(row["prompt"].removesuffix(">"))) == row["answer"] for row in train + held_out)
    assert len(held_out) == init.HELD_OUT
    assert len({row["prompt"] for row in train + held_out}) == len(train) + len(held_out) == len(init.LETTERS) ** 4


def test_the_same_project_is_made_each_time(tmp_path: Path) -> None:
    for place in ("one", "two"):
        main(["init", str(tmp_path / place / "sorting")])
    files = [path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file()]
    assert len(files) == 5
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in files)


@pytest.mark.parametrize("name", ["two words", "-begins", "ümlaut"])
def test_a_name_that_would_be_in_the_way_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "--", str(tmp_path / name)]) == MISTAKE
    assert "cannot name a project" in capsys.readouterr().err
    assert not (tmp_path / name).exists()


def test_a_folder_with_files_is_left_as_it_is_and_an_empty_one_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    assert main(["init", str(tmp_path / "full")]) == MISTAKE
    assert main(["init", str(tmp_path / "full" / "mine.txt")]) == MISTAKE
    assert capsys.readouterr().err.count("already exists") == 2
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine.txt"]
    (tmp_path / "empty").mkdir()
    assert main(["init", str(tmp_path / "empty")]) == 0
