"""configs/math-sglang.toml, trained with two engines at once; and what starts badly."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import sglang_case as case
from conftest import REPOSITORY

from streamppo.errors import ModelError
from streamppo.telemetry import metrics_file as lines

pytest_plugins = ["sglang_case"]
pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("more", [(), ("model.lora={}", "learner.lr=2e-3")], ids=["all-weights", "adapters"])
def test_the_reward_rises_with_two_engines(tmp_path: Path, more: tuple[str, ...]) -> None:
    overrides = ["updates=60", "rollout.actors=2", "rollout.slots=32", "rollout.in_flight=48", "evaluation.prompts=64"]
    command = [sys.executable, "-W", "ignore", "-m", "streamppo", "run", str(REPOSITORY / "configs/math-sglang.toml")]
    subprocess.run([*command, "--runs", str(tmp_path), *overrides, *more], check=True, cwd=REPOSITORY)
    (made,) = tmp_path.iterdir()
    summary = json.loads((made / "summary.json").read_text())
    rewards = [line["reward"] for line in lines.updates(made)]
    assert sum(rewards[-10:]) > 1.2 * sum(rewards[:10])
    assert {engine["version"] for engine in summary["engines"]["actors"]} == {60}
    assert len({engine["checksum"] for engine in summary["engines"]["actors"]}) == 1
    assert summary["engines"]["swaps"] > 20
    assert summary["failed"] == {}
    assert {*summary["restarts"].values(), summary["engines"]["restarts"]} == {0}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.engine.mem_fraction_static=0.0001", "does not fit into the memory"),
        ("rollout.engine.start_s=0.5", r"not within rollout.engine.start_s \(0.5 s\)"),
        ("rollout.engine.attention_backend=none_such", "Invalid attention backend: none_such"),
        ("rollout.gpus=1", "rollout.gpus is 1, and torch finds no GPU"),
    ],
)
def test_an_engine_that_cannot_start_says_why(setting: case.Setting, override: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        setting.run(case.engine(setting.folder, case.tensors(setting.model), override))


def test_a_server_that_cannot_be_reached_is_named(setting: case.Setting) -> None:
    nowhere = ["rollout.engine.urls=['http://127.0.0.1:9']", "rollout.engine.start_s=1"]
    with pytest.raises(ModelError, match=r"no SGLang server can be reached at http://127.0.0.1:9 \(ConnectError"):
        setting.run(case.engine(setting.folder, case.tensors(setting.model), *nowhere))
