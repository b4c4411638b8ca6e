"""The examples run as examples/README.md says, a few updates long."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import bring_case
import pytest
from conftest import REPOSITORY
from replay_case import replay

README = (REPOSITORY / "examples" / "README.md").read_text()
SHORT = ("updates=3", "queue.batch_size=16", "model.tiny.max_steps=20", "evaluation.prompts=16")


def python(*arguments: str, folder: Path = REPOSITORY, log: bool = True) -> str:
    """Run Python, in the repository's folder unless another one is named; its output, with its log or without."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if log else None,
        text=True,
        timeout=240.0,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def updates(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "update" in line]


def test_the_readme_names_every_example() -> None:
    named = set(re.findall(r"examples/(\w+\.(?:py|toml))", README))
    files = {path.name for path in (REPOSITORY / "examples").iterdir() if path.suffix in (".py", ".toml")}
    assert named <= files
    assert {Path(name).stem for name in named} == {Path(name).stem for name in files}


@pytest.mark.slow
def test_a_new_project_trains_with_its_own_reward(tmp_path: Path) -> None:
    project = tmp_path / "sorting"
    python("-m", "streamppo", "init", str(project))
    short = ("updates=3", "queue.batch_size=32", "model.tiny.max_steps=40", "evaluation.prompts=16")
    python("-m", "streamppo", "run", str(project / "run.toml"), "--runs", str(project / "runs"), *short)
    found = updates(project / "runs" / "sorting")
    assert len(found) == 3
    assert all(0.0 < line["reward_placed"] <= 1.0 for line in found)
    assert all(0.0 < line["reward"] < line["reward_placed"] for line in found), "letters in their place are worth less"


MAKE = """
from pathlib import Path
from streamppo.config import file as configfile
from streamppo.learner.model import tiny
tiny.make(configfile.load(Path("sorting/run.toml")), Path("model"))
"""


@pytest.mark.slow
def test_two_commands_train_a_model_on_rows_by_an_async_reward_as_they_are_brought(tmp_path: Path) -> None:
    """A user's files lead to a rising curve without an edit or a mistake."""
    python("-m", "streamppo", "init", "sorting", folder=tmp_path)
    python("-c", MAKE, folder=tmp_path)
    (tmp_path / "reward.py").write_text(bring_case.REWARD)
    yours = ("--model", "model", "--data", "sorting/data/train.jsonl", "--reward", "reward.py:score")
    said = python("-m", "streamppo", "init", "mine", *yours, folder=tmp_path)
    assert said.splitlines()[-2:] == ["  check    0 errors", "begin with: streamppo run mine.toml"]
    # As it is, but for its length: 40 of its 300 updates.
    python("-m", "streamppo", "run", "mine.toml", "updates=40", "evaluation.every=0", folder=tmp_path)
    found = [line["reward"] for line in updates(tmp_path / "runs" / "mine")]
    assert len(found) == 40
    assert sum(found[-5:]) / 5 > sum(found[:5]) / 5 + 0.15, found


@pytest.mark.slow
def test_a_service_scores_a_run(tmp_path: Path) -> None:
    service = subprocess.Popen(
        [sys.executable, "examples/reward_service.py", "0"], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    try:
        assert service.stdout is not None
        url = service.stdout.readline().strip()
        address = f"reward.scorers.remote.url={url}"
        python("-m", "streamppo", "run", "examples/reward_service.toml", "--runs", str(tmp_path), address, *SHORT)
    finally:
        service.kill()
        service.communicate()
    found = updates(tmp_path / "reward_service")
    assert len(found) == 3
    assert all(0.0 <= line["reward_digits"] <= 1.0 for line in found)
    assert any(0.0 < line["reward_digits"] != line["reward"] for line in found)


@pytest.mark.slow
def test_an_environment_gives_a_second_chance(tmp_path: Path) -> None:
    python("-m", "streamppo", "run", "examples/second_chance.toml", "--runs", str(tmp_path), *SHORT)
    found = updates(tmp_path / "second_chance")
    assert len(found) == 3
    assert all(0.0 <= line["reward_first"] <= line["reward"] <= 1.0 for line in found)


@pytest.mark.slow
def test_an_agent_with_two_tools_trains_a_run_and_is_replayed_without_it(tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text((REPOSITORY / "examples" / "calculator_agent.py").read_text())
    override = f"environment.agent={agent}:run"
    python("-m", "streamppo", "run", "examples/calculator_agent.toml", "--runs", str(tmp_path), override, *SHORT)
    run = tmp_path / "calculator_agent"
    found = updates(run)
    assert len(found) == 3
    assert all(0.0 <= line["reward_right"] == line["reward"] <= 1.0 for line in found)
    counted = json.loads((run / "summary.json").read_text())["engines"]["agents"]
    assert counted["runs"] >= 48 and counted["requests"] >= counted["runs"]
    agent.unlink()
    done = replay(run)
    assert "bit for bit" in done.stdout, done.stderr


@pytest.mark.slow
def test_a_loss_an_advantage_and_a_correction_of_the_user_train_a_run_that_is_replayed(tmp_path: Path) -> None:
    own = [
        f"algorithm.{part}={{kind='function', function='examples/custom_{file}.py:{name}'}}"
        for part, file, name in (
            ("policy_loss", "loss", "loss"),
            ("advantage", "advantage", "advantage"),
            ("correction", "correction", "weights"),
        )
    ]
    filters = "algorithm.filters=[{kind='truncated'}, {kind='off_policy_negative', delta=0.01}]"
    sizes = (*SHORT, "queue.batch_size=64", "learner.minibatches=4", "rollout.max_tokens=3")
    python("-m", "streamppo", "run", "configs/math.toml", "--runs", str(tmp_path), *own, filters, *sizes)
    found = updates(tmp_path / "math")
    assert [line["steps"] + line["empty_steps"] for line in found] == [4.0, 4.0, 4.0]
    assert all(line["clip_fraction_high"] == line["clip_fraction_low"] == 0.0 for line in found), (
        "the loss clips nothing"
    )
    # A batch in which every answer is wrong has advantages of exactly 0.
    assert any(line["policy_loss"] != 0.0 for line in found) and any(line["grad_norm"] > 0 for line in found)
    assert all(line["value_loss"] == 0.0 for line in found), "the advantage has no critic"
    assert all(line["rejected_function"] == 0.0 for line in found), "none of the correction's weights is 0"
    assert all(line["filtered_truncated_responses"] == line["truncated"] > 0.0 for line in found)
    assert "bit for bit" in python("-m", "streamppo", "replay", str(tmp_path / "math"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_page_about_python_runs_as_it_stands(tmp_path: Path) -> None:
    """All boxes of docs/python.md, one after another, in a folder that has the configurations: a run and its resume."""
    page = (REPOSITORY / "docs" / "python.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks))
    shown = python(str(script), folder=tmp_path)
    found = updates(tmp_path / "runs" / "math")
    assert [line["update"] for line in found] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert any(line["reward"] % 0.2 > 0.0 for line in found), "scores are those of the page's function"
    assert "runs/math/reward.py:score (sync, trajectory signature), in processes of its own" in shown
    assert "override learner.lrr" in shown
    assert [folder.name for folder in (tmp_path / "runs").iterdir()] == ["math"], "a mistake leaves no folder"
    evaluations = dict(json.loads((tmp_path / "runs" / "math" / "summary.json").read_text())["evaluations"])
    for version in (0, 8):
        asked = ("--version", str(version), "--samples", "2", "--json")
        found = json.loads(python("-m", "streamppo", "eval", "runs/math", *asked, folder=tmp_path, log=False))
        assert (found["version"], found["prompts"], found["failed"]) == (version, 32, 0)
        # By the run's own reward, as in the run; two answers may be equally likely to the last bit.
        assert abs(found["accuracy"]["mean"] - evaluations[version]) <= 1 / 32
        assert found["pass_at"]["1"]["mean"] <= found["pass_at"]["2"]["mean"]


@pytest.mark.slow
def test_a_run_from_python_shows_its_metrics_and_its_archive(tmp_path: Path) -> None:
    shown = python("examples/first_run.py", "2", str(tmp_path))
    assert re.search(r"'update': 2(\.0)?,", shown)
    assert "first_run/reward.py:exact (sync, trajectory signature), in processes of its own" in shown
    assert "00000000.zarr.zip: 64 trajectories, mean reward" in shown
    assert "tokens of the first: [" in shown
