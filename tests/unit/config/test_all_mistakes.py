"""Every mistake of a configuration is reported at once, with its place, the expected and the given value."""

from pathlib import Path

import pytest
from conftest import MATH

from streamppo.config import file as configfile
from streamppo.errors import ConfigError

BROKEN = """
name = "x"
updates = "many"
sed = 2

[model]
share_prompts = true
dtype = "float23"
tiny = { layers = 0 }

[task]
kind = "arithmetic"
first = [10]

[reward]
function = "a:b"
timeout = 3
weight = "heavy"

[queue]
batch_size = 512
max_lag = true
too_old = "mask"

[algorithm]
advantage = { kind = "grppo" }
correction = { kind = "mask", band = [3.0, 2.0] }

[rollout.engine]
kind = "sglang"
mem_fraction_static = 1.0
"""
TOLD = """
3: updates: must be a whole number of at least 1, not "many"
4: sed: unknown field 'sed': did you mean 'seed'?
6: model: missing required field `path`
8: model.dtype: must be "bfloat16" or "float32", not "float23"
9: model.tiny.layers: must be a whole number of at least 1 and of at most 128, not 0
13: task.first: must be a list of 2: a whole number of at least 0 and a whole number of at least 0, not [10]
17: reward.timeout: unknown field 'timeout': did you mean 'timeout_s'?
18: reward.weight: must be a number, not "heavy"
22: queue.max_lag: must be a whole number of at least 0 or a table, not true
26: algorithm.advantage.kind: unknown kind "grppo": kinds are gae, vtrace, sequence, grpo, dr_grpo, rloo, maxrl, \
gdpo, reinforce_plus_plus, reinforce_plus_plus_baseline, function
27: algorithm.correction: band must rise: 3.0 is not below 2.0
31: rollout.engine.mem_fraction_static: must be a number above 0 and below 1, not 1.0
"""


def told(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        configfile.load(path, overrides)
    return str(caught.value).splitlines()


def test_all_mistakes_of_a_file_are_told_at_once_each_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text(BROKEN)
    expected = [f"{path}:{line}" for line in TOLD.strip().splitlines()]
    assert told(path) == expected


def test_rules_between_fields_are_told_at_once_too() -> None:
    found = told(MATH, "queue.batch_size=7", "learner.minibatches=2", "name=a/b", "learner.gpus=2")
    assert found == [
        "override queue.batch_size (7) must be a multiple of queue.samples_per_prompt (4)",
        "override queue.batch_size (7) must be a multiple of learner.minibatches (2)",
        "override learner.gpus (2) must be at most 1: a rank computes on one GPU; raise learner.ranks",
        "override name ('a/b') must be usable as the name of a folder: at most 200 bytes, "
        'without "/", control characters, spaces at an end or "." at the beginning',
    ]


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
@pytest.mark.parametrize(
    "name", ["learner.lr", "algorithm.entropy", "reward.weight", "reward.arguments.x", "watchdog.stall_s"]
)
def test_a_number_is_finite(name: str, value: str) -> None:
    (found,) = told(MATH, f"{name}={value}")
    assert found.startswith(f"override {name}: must be ") and found.endswith(f", not {value}")


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        (["seed=9223372036854775808"], "override seed: must be a whole number"),
        (["learner.betas=[0.9, 2.0]"], "override learner.betas: must be a list of 2: a number of at least 0"),
        (["learner=3"], "override learner: must be a table, not 3"),
        (["task.kind=7"], "override task.kind: unknown kind 7: kinds are arithmetic, data, reasoning_gym"),
        (["task={}"], "override task: missing required field `kind`: kinds are arithmetic"),
        (["task.kind=verifiers"], "override task: missing required field `environment`"),
        (["task.kind=data"], "override task: a data task needs `data`, or tables `[task.sources.NAME]`"),
        (["reward={}"], "a run has `[reward] function = ...`, `[reward.scorers.NAME]` tables or an `[environment]`"),
        (["reward.combin=sum"], "override reward.combin: unknown field 'combin': did you mean 'combine'?"),
        (["task.kind=data", "task.data=x", "task.wait=2"], "override task.wait: unknown field 'wait'"),
        (
            ["reward.scorers.x.kind=function", "reward.scorers.x.function=a:b"],
            "reward.function: belongs into the [reward.scorers.NAME] tables, next to it",
        ),
        (["cluster.cpus=0"], "override cluster.cpus: must be a whole number of at least 1, not 0"),
        (
            ["reward.arguments.x=[1]"],
            "override reward.arguments.x: must be a text, a whole number, a number or true or false",
        ),
    ],
)
def test_a_mistake_is_named_by_its_field(overrides: list[str], found: str) -> None:
    (line,) = told(MATH, *overrides)
    assert found in line


def test_overrides_without_a_form_are_all_told() -> None:
    assert [line.split(" is ")[0] for line in told(MATH, "a", "seed=2", "=b")] == ["override 'a'", "override '=b'"]
