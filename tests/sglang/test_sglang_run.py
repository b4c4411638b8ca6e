"""configs/math-sglang.toml, trained with two engines at once; and failed starts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import sglang_case as case
import torch
from conftest import REPOSITORY
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from streamppo.errors import ModelError
from streamppo.tasks.library.arithmetic import ALPHABET
from streamppo.tasks.tokenizer import character_tokenizer
from streamppo.telemetry import metrics_file as lines

pytest_plugins = ["sglang_case"]
SEVENS = """
async def score(trajectory, answer):
    return trajectory.completion.count("7") / 5
"""
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


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("routes", "ranks"),
    [
        pytest.param(False, (), id="own routes"),
        pytest.param(True, (), id="the engine's routes"),
        pytest.param(True, ("learner.ranks=2", "learner.mesh.expert=2"), id="experts-on-two-ranks"),
    ],
)
def test_a_mixture_of_experts_learns_and_is_resumed_and_replayed(
    tmp_path: Path, routes: bool, ranks: tuple[str, ...]
) -> None:
    """From random weights, for a reward that any model can learn; every push is compared tensor by tensor."""
    tokenizer = character_tokenizer(ALPHABET)
    tokens = {name: getattr(tokenizer, f"{name}_id") for name in ("bos_token", "pad_token", "eos_token")} | {
        "vocab_size": len(tokenizer)
    }
    torch.manual_seed(0)
    made = Qwen3MoeForCausalLM(Qwen3MoeConfig(**case.SHAPE | case.EXPERTS | tokens | {"initializer_range": 0.02}))
    for one in (made, tokenizer):
        one.save_pretrained(tmp_path / "model")
    (tmp_path / "sevens.py").write_text(SEVENS)
    overrides = [f"model.path={tmp_path / 'model'}", f"reward.function={tmp_path / 'sevens.py'}:score", "updates=30"]
    overrides += ["queue.batch_size=128", "rollout.slots=16", "rollout.in_flight=48", "learner.lr=3e-3"]
    overrides += [f"rollout.engine.routes={str(routes).lower()}", *ranks]
    command = [sys.executable, "-W", "ignore", "-m", "streamppo"]
    config, runs = REPOSITORY / "configs" / "math-sglang.toml", tmp_path / "runs"
    subprocess.run([*command, "run", str(config), "--runs", str(runs), *overrides], check=True, cwd=REPOSITORY)
    (run,) = runs.iterdir()
    found = lines.updates(run)
    assert found[0]["reward"] < 0.2 and found[-1]["reward"] > 0.5
    assert max(line["mismatch"] for line in found if line["lag_mean"] == 0) < 1e-4
    engines = json.loads((run / "summary.json").read_text())["engines"]
    assert ([one["version"] for one in engines["actors"]], engines["restarts"]) == ([30], 0)
    assert all(line["expert_load"] >= 1 for line in found)
    if routes:
        assert found[0]["routes_own"] > 0.99, "the engine has the learner's weights"
        assert any(line["routes_own"] < 1 for line in found if line["lag_mean"]), "older weights chose other experts"
    subprocess.run([*command, "resume", str(run), "updates=34"], check=True, cwd=REPOSITORY)
    subprocess.run([*command, "replay", str(run)], check=True, cwd=REPOSITORY)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.engine.mem_fraction_static=0.0001", "does not fit into the memory"),
        ("rollout.engine.start_s=0.5", r"not within rollout.engine.start_s \(0.5 s\)"),
        ("rollout.engine.args={attention_backend='none_such'}", "Invalid attention backend: none_such"),
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
