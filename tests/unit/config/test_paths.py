"""Paths of a file are found beside it, those of an override here; a run is resumed from anywhere, moved or not."""

import shutil
from pathlib import Path

import pytest
from conftest import MATH

from streamppo.config import file as configfile
from streamppo.config.correction import CustomCorrection
from streamppo.config.policy_loss import CustomLoss
from streamppo.config.sections import Config
from streamppo.config.task import DataTask, VerifiersTask

OWN = """
task = { kind = "data", data = "rows.jsonl" }
[environment]
name = "world.py:World"
[reward]
function = "mine.py:score"
"""
MATHEMATICS = """
advantage = { kind = "function", function = "mine.py:advantage" }
policy_loss = { kind = "function", function = "mine.py:loss" }
"""


def data(config: Config) -> str:
    assert isinstance(config.task, DataTask)
    return config.task.sources["data"].data


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a configuration and its files; the current folder is another one, with one of these names."""
    for place in ("project", "here"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "rows.jsonl").touch()
    for name in ("mine.py", "world.py"):
        (tmp_path / "project" / name).touch()
    text = MATH.read_text()
    for section in ("task", "reward"):
        before, _, rest = text.partition(f"\n[{section}]\n")
        text = f"{before}\n{rest.partition(chr(10) + chr(10))[2]}"
    text = text.replace("[rollout]", '[rollout]\nlimit = "mine.py:limit"')
    text = text.replace("[algorithm]", f"[algorithm]\n{MATHEMATICS}").replace('advantage = { kind = "gae"', "# ")
    task, own = OWN.strip().split("\n", 1)
    (tmp_path / "project" / "own.toml").write_text(f"{task}\n{text}\n{own}\n")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "project"


def test_a_path_of_the_file_is_beside_it_and_one_of_an_override_here(project: Path) -> None:
    config = configfile.load(project / "own.toml")
    assert data(config) == str(project / "rows.jsonl")
    assert config.environment is not None and config.environment.name == f"{project / 'world.py'}:World"
    assert config.rollout.limit == f"{project / 'mine.py'}:limit"
    for of, name in ((config.reward, "score"), (config.algorithm, "advantage"), (config.algorithm, "loss")):
        assert f"'{project / 'mine.py'}:{name}'" in str(of)
    assert data(configfile.load(project / "own.toml", ["task.data=rows.jsonl"])) == str(Path("rows.jsonl").absolute())


def test_functions_of_the_mathematics_are_found_beside_the_file_too(project: Path) -> None:
    text = (project / "own.toml").read_text()
    correction = next(line for line in text.splitlines() if line.startswith("correction ="))
    own = 'correction = { kind = "function", function = "mine.py:weights" }'
    (project / "own.toml").write_text(text.replace(correction, own))
    found = configfile.load(project / "own.toml", ["algorithm.policy_loss={kind='function', function='no.such:loss'}"])
    assert found.algorithm.correction == CustomCorrection(function=f"{project / 'mine.py'}:weights")
    assert found.algorithm.policy_loss == CustomLoss(function="no.such:loss")


def test_a_run_keeps_its_paths_wherever_it_is_resumed_from(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configfile.load(project / "own.toml")
    (project / "run").mkdir()
    configfile.save(config, project / "run")
    monkeypatch.chdir("/")
    assert configfile.load(project / "run" / configfile.CONFIG) == config


def test_a_run_that_was_moved_finds_what_is_in_it(project: Path) -> None:
    (project / "run" / "base").mkdir(parents=True)
    configfile.save(configfile.load(project / "own.toml", [f"model.path={project}/run/base"]), project / "run")
    (project / "run").rename(project / "moved")
    moved = configfile.load(project / "moved" / configfile.CONFIG)
    assert moved.model.path == str(project / "moved" / "base")


def test_a_run_that_was_moved_with_its_neighbours_finds_them(project: Path) -> None:
    for name in ("run", "base"):
        (project / name).mkdir()
    configfile.save(configfile.load(project / "own.toml", [f"model.path={project}/base"]), project / "run")
    moved = project.rename(project.parent / "moved")
    config = configfile.load(moved / "run" / configfile.CONFIG)
    assert (config.model.path, data(config)) == (str(moved / "base"), str(moved / "rows.jsonl"))
    assert config.environment is not None and config.environment.name == f"{moved / 'world.py'}:World"


def test_a_run_that_was_moved_with_its_project_finds_the_projects_files(project: Path) -> None:
    config, run = configfile.load(project / "own.toml"), Path("out") / "runs" / "run"
    (project / run).mkdir(parents=True)
    configfile.save(config, project / run)
    copy = shutil.copytree(project, project.parent / "über all" / "copy")
    assert data(configfile.load(copy / run / configfile.CONFIG)) == str(copy / "rows.jsonl")
    (copy / "rows.jsonl").unlink()
    assert data(configfile.load(copy / run / configfile.CONFIG)) == str(project / "rows.jsonl")
    moved = project.rename(project.parent / "moved")
    found = configfile.load(moved / run / configfile.CONFIG)
    assert data(found) == str(moved / "rows.jsonl")
    assert found.rollout.limit == f"{moved / 'mine.py'}:limit"
    configfile.save(found, moved / run)
    assert configfile.load(moved / run / configfile.CONFIG) == found


def test_a_run_that_was_moved_alone_keeps_the_files_of_its_project(project: Path, tmp_path: Path) -> None:
    config = configfile.load(project / "own.toml")
    (project / "runs" / "run").mkdir(parents=True)
    configfile.save(config, project / "runs" / "run")
    (tmp_path / "disk" / "all").mkdir(parents=True)
    moved = (project / "runs").rename(tmp_path / "disk" / "all" / "runs")
    assert configfile.load(moved / "run" / configfile.CONFIG) == config
    copied = shutil.copy(moved / "run" / configfile.CONFIG, tmp_path / "mine.toml")
    assert configfile.load(Path(copied)) == config


def test_a_name_that_leads_nowhere_stays_as_it_is(project: Path) -> None:
    config = configfile.load(project / "own.toml", ["model.path=Qwen/Qwen2.5-0.5B", "reward.function=a.b:c"])
    assert config.model.path == "Qwen/Qwen2.5-0.5B" and "'a.b:c'" in str(config.reward)


def test_sandboxes_of_rewards_and_files_of_verifiers_are_found_beside_the_file(project: Path) -> None:
    text = (project / "own.toml").read_text()
    text = text.replace(
        'function = "mine.py:score"', 'function = "mine.py:score"\narguments = { sandbox = "mine.py:Box" }'
    )
    for name, found in (("game.toml", project / "game.toml"), ("world", "world")):
        (project / name).touch()
        task = f'task = {{ kind = "verifiers", environment = "{name}" }}'
        (project / "own.toml").write_text(text.replace(OWN.strip().split("\n", 1)[0], task))
        config = configfile.load(project / "own.toml")
        assert f"'{project / 'mine.py'}:Box'" in str(config.reward)
        assert isinstance(config.task, VerifiersTask) and config.task.environment == str(found)
