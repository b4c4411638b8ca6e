"""Benchmarks measure the configurations that they name."""

import ast
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY

from streamppo.config import file as configfile
from streamppo.config.reward import FunctionScorer

sys.path.insert(0, str(REPOSITORY))

from benchmarks.cost import throughput
from benchmarks.gpu import gpu_day, gpu_parts
from benchmarks.gpu.gpu_day import Part
from benchmarks.learning import alarms
from benchmarks.lib.latency import LATENCY
from benchmarks.lib.runs import Run


def commands(document: str, script: str) -> list[list[str]]:
    """The arguments of every such command in a document."""
    text = (REPOSITORY / document).read_text()
    return [shlex.split(found) for found in re.findall(rf"python benchmarks/{script}([^`\n]*)", text)]


@pytest.mark.parametrize("document", ["docs/results.md"])
def test_the_throughput_commands_measure_the_lag_bound_and_the_reward_and_no_bound_of_their_own(document: str) -> None:
    found = commands(document, "cost/throughput.py")
    assert found
    for arguments in found:
        options = throughput.parser().parse_args(arguments)
        options.set = [one for one in options.set if "gpus" not in one]
        for max_lag in options.max_lag:
            config = configfile.load(REPOSITORY / options.config, throughput.overrides(options, max_lag))
            admitted = (max_lag + 1) * config.queue.batch_size
            assert config.rollout.in_flight >= admitted
            scorer = config.reward.scorers["reward"]
            assert isinstance(scorer, FunctionScorer) and scorer.function == "benchmarks.lib.latency:score"
            assert scorer.concurrency >= admitted


def test_runs_of_one_lag_bound_differ_in_what_the_reward_takes_and_in_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[list[str], dict[str, str]]] = []
    nothing = Run(summary={}, updates=[], evaluations=[], first_output_s=0.0, peak_memory_mib=0.0)

    def run(config: Path, overrides: list[str], environment: dict[str, str]) -> Run:
        asked.append((overrides, environment))
        return nothing

    monkeypatch.setattr(throughput, "run", run)
    monkeypatch.setattr(throughput, "_measure", lambda *_: {})
    for latency_s in (0.0, 1.0):
        throughput._run(throughput.parser().parse_args([]), 1, latency_s)
    (without, none), (with_latency, some) = asked
    assert without == with_latency
    assert (none, some) == ({LATENCY: "0.0"}, {LATENCY: "1.0"})


# --- scripts --------------------------------------------------------------------------------------------------

SMALLEST = (
    "cost/agents.py --agents 4 --turns 2 --rounds 1",
    "cost/ahead.py --shapes equal --updates 20",
    "cost/bare_update.py --rounds 1 --times 1 model.tiny.max_steps=5",
    "cost/checkpoint_stall.py --times 1",
    "cost/context_cost.py --prefix 64 --updates 1",
    "cost/cost.py --updates 25 --repeat 1 model.tiny.max_steps=5",
    "cost/engine.py --rounds 1 --no-peer",
    "cost/head_memory.py --tokens 512",
    "cost/load.py --layers 2 --times 1",
    "cost/push.py --gigabytes 0.02 --layouts 10M --repeat 1",
    "cost/queue_load.py --engines 1 5 --tokens 100 --seconds 1",
    "cost/reward_calls.py service 16 --calls 32",
    "cost/reward_latency.py --updates 24 --repeats 1 --tolerance 1 --set model.tiny.max_steps=5",
    "cost/sandbox.py --runs 2",
    "cost/short_rows.py --tokens 16 --rounds 1",
    "cost/throughput.py --max-lag 1 --updates 8 --no-peer",
    "faults/folders.py --draws 4 --whole 1",
    "learning/algorithms.py --max-lag 1 --seeds 1 --updates 4 --only 'loss cispo'",
    "learning/lags.py --part fixed --seeds 1 --lags 2 --updates 6",
    "learning/negatives.py --tasks sort --rules steady plain --lags 0 2 --seeds 4 --updates 20",
    "learning/seeds.py --seeds 1 --set updates=5 evaluation.every=5",
    "learning/signs.py --tasks sort --lags 0 2 --seeds 4 --updates 12",
    "learning/staleness.py --only pareto --rules mask --max-lag 2 --seeds 1 --updates 5",
    "learning/tails.py --only equal --max-lag 1 --updates 18 --repeat 1",
)


@pytest.mark.slow
@pytest.mark.parametrize("command", SMALLEST, ids=lambda command: command.partition(".py")[0])
def test_a_script_runs_at_its_smallest_size(command: str, tmp_path: Path) -> None:
    script, *words = shlex.split(command)
    result = tmp_path / "result.json"
    call = [sys.executable, f"benchmarks/{script}", "--json", str(result), *words]
    done = subprocess.run(call, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert json.loads(result.read_text())


# --- files ----------------------------------------------------------------------------------------------------


def folder_of(script: Path, node: ast.expr, names: dict[str, Path]) -> Path | None:
    """Evaluate `Path(__file__).parents[N]`, `.parent`, names of such folders, and `/` with a constant; else None."""
    match node:
        case ast.Name(id=name):
            return names.get(name)
        case ast.Attribute(value=ast.Call(args=[ast.Name(id="__file__")]), attr="parent"):
            return script.parent
        case ast.Subscript(value=ast.Attribute(attr="parents"), slice=ast.Constant(value=int(number))):
            return script.parents[number]
        case ast.BinOp(left=left, op=ast.Div(), right=ast.Constant(value=str(name))):
            folder = folder_of(script, left, names)
            return folder and folder / name
        case _:
            return None


@pytest.mark.parametrize("script", sorted((REPOSITORY / "benchmarks").rglob("*.py")), ids=lambda path: path.name)
def test_every_path_that_a_script_builds_from_its_folder_exists(script: Path) -> None:
    tree = ast.parse(script.read_text())
    names: dict[str, Path] = {}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if folder := folder_of(script, value, names):
                names[name] = folder
            case _:
                pass
    built = [folder_of(script, node, names) for node in ast.walk(tree) if isinstance(node, ast.BinOp)]
    assert [path for path in built if path and not path.exists()] == []


def test_every_shipped_project_of_the_study_of_alarms_exists() -> None:
    for file, *changes in alarms.PROJECTS.values():
        assert file == alarms.INIT or (REPOSITORY / file).exists()
        for path in re.findall(r"function='([^:']+):", " ".join(changes)):
            assert (REPOSITORY / path).exists(), path


# --- the day of a GPU ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_part_that_fails_or_takes_too_long_stops_no_other_and_says_why(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = gpu_day.run([Part("no_such", 90), Part("head", 1.1), Part("ray_run", 90), Part("push", 90)], 500, out)
    assert json.loads(out.read_text()) == result
    made: Any = result["parts"]
    assert made["no_such"]["failed"] == "exit code 1"
    assert "KeyError: 'no_such'" in made["no_such"]["output"][-1]
    assert made["head"]["failed"] == "not within 1 s"
    assert made["ray_run"]["left_out"] == "no GPU here"
    assert made["push"]["result"]["bytes"] > 0
    late: Any = gpu_day.run([Part("device", 90)], 0.5, None)
    assert late["parts"]["device"]["left_out"] == "no time was left"


@pytest.mark.sampled(1)
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the parts are what they are for, and take their time")
@pytest.mark.parametrize(
    "name", ["device", "head", "update", "layers", pytest.param("end_to_end", marks=pytest.mark.slow)]
)
def test_every_part_that_needs_no_gpu_is_rehearsed(name: str) -> None:
    found: Any = gpu_day.measured(name, 200)
    assert set(found) == {"result"}, found
    if name == "head":
        distance = {kind: one["distance"]["grad_weight"] for kind, one in found["result"].items() if kind != "kernels"}
        assert distance["float32"] == 0 < distance["wide_two_parts"] < 5e-4 < distance["wide_one_part"]
    if name == "update":
        made = [one for kind, one in found["result"].items() if kind != "fa4"]
        assert {one["bits"] for one in made} == {made[0]["bits"]} and all(one["redone"] for one in made)
    if name == "layers":
        assert set(found["result"]) == {"sdpa off", "sdpa full"}
        assert all("median_ms" in one for one in found["result"].values())
    if name == "end_to_end":
        assert found["result"]["updates"] > 0
        assert found["result"]["mismatch"] < 0.05


def test_every_part_has_its_function_and_all_of_them_end_within_ten_minutes() -> None:
    assert [part.name for part in gpu_day.PARTS if part.name not in gpu_parts.PARTS] == []
    assert {part.name for part in gpu_day.PARTS} == set(gpu_parts.PARTS)
    assert gpu_day.parser().parse_args([]).limit_s <= 600
