"""Two configurations of one run are compared by the names of their fields."""

import re
from pathlib import Path
from typing import get_args

import pytest
from conftest import MATH, REPOSITORY

from streamppo.config import file as configfile
from streamppo.config.algorithm import Advantage
from streamppo.config.diff import fields, fixed_values, learning, moved_paths

SHIPPED = sorted((REPOSITORY / "configs").glob("*.toml"))
ESTIMATORS = [kind.__struct_config__.tag for kind in get_args(Advantage)]


@pytest.mark.sampled(17)
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_can_be_compared(path: Path, estimator: str) -> None:
    grouped = ["queue.samples_per_prompt=4", "algorithm.zero_variance=keep", f"algorithm.advantage.kind={estimator}"]
    # Some need the pass over the batch that the others save.
    grouped.append("algorithm.proximal=recompute")
    grouped += {
        "function": ["algorithm.advantage.function=a.b:c"],
        "gdpo": ["algorithm.advantage.weights={right = 1.0}"],
    }.get(estimator, [])
    config = configfile.load(path, grouped)
    again = configfile.change(config, ["updates=7", "queue.samples_per_prompt=8"])
    assert fixed_values(config) == fixed_values(again)
    assert learning(config) != learning(again)  # a schedule ends with the updates
    assert learning(config) == learning(configfile.change(config, ["queue.samples_per_prompt=8"]))


@pytest.mark.parametrize(
    "override",
    ["name=x", "reward.timeout_s=3", "rollout.slots=3", "evaluation.every=0", "cluster.cpus=9", "queue.segments={}"],
)
def test_an_update_does_not_depend_on_these(override: str) -> None:
    config = configfile.load(MATH)
    assert learning(config) == learning(configfile.change(config, [override]))


@pytest.mark.parametrize(
    "override",
    [
        "seed=2",
        "reward.correct_at=0.5",
        "queue.segments={max_tokens=2}",
        "learner.lr=1",
        "algorithm.advantage.kind=vtrace",
        "algorithm.advantage.lam=0.5",
        "rollout.temperature=0.5",
        "rollout.max_tokens=3",
        "queue.max_lag=1",
        "queue.too_old=drop",
        "queue.segments={prefix='detached'}",
        "model.float32_head=false",
    ],
)
def test_an_update_depends_on_these(override: str) -> None:
    config = configfile.load(MATH)
    assert learning(config) != learning(configfile.change(config, [override]))


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("model.dtype=bfloat16", "model.dtype"),
        ("model.tiny.layers=3", "model.tiny.layers"),
        ("algorithm.critic.model=policy", "algorithm.critic.model"),
        ("learner.ranks=2", "learner.ranks"),
        ("learner.gpus=1", "learner.gpus > 0"),
    ],
)
def test_a_run_keeps_these(override: str, name: str) -> None:
    before, after = (fixed_values(config) for config in (configfile.load(MATH), configfile.load(MATH, [override])))
    assert [key for key in before if before[key] != after[key]] == [name]


def test_a_run_keeps_having_a_teacher_at_a_url_and_may_move_it_and_bound_its_calls() -> None:
    url = "algorithm.teacher.url=http://a:1"
    plain, taught = configfile.load(MATH), configfile.load(MATH, [url])
    moved_on = configfile.change(taught, ["algorithm.teacher.url=http://b:2", "algorithm.teacher.timeout_s=9"])
    assert [key for key, value in fixed_values(plain).items() if fixed_values(taught)[key] != value] == [
        "teacher at a url"
    ]
    assert (fixed_values(taught), learning(taught)) == (fixed_values(moved_on), learning(moved_on))
    weighed = configfile.change(taught, ["algorithm.teacher.weight=0.5"])
    assert fixed_values(taught) == fixed_values(weighed) and learning(taught) != learning(weighed)


def test_a_run_may_change_these_of_its_model() -> None:
    changed = configfile.load(MATH, ["model.float32_head=false", "model.gradient_checkpointing=full"])
    assert fixed_values(configfile.load(MATH)) == fixed_values(changed)


MODELS = ["model.path", "algorithm.critic.model", "algorithm.critic.pretrain"]


@pytest.mark.parametrize("field", MODELS)
def test_a_folder_that_was_moved_is_the_same_and_one_of_another_name_is_not(field: str) -> None:
    here, moved_to, other = (configfile.load(MATH, [f"{field}={path}"]) for path in ("/a/m", "/b/c/m", "/a/n"))
    assert fixed_values(here) == fixed_values(moved_to) and learning(here) == learning(moved_to)
    assert (fixed_values(here), learning(here)) != (fixed_values(other), learning(other))
    assert (moved_paths(here, moved_to), moved_paths(here, other)) == ({field: "/b/c/m"}, {})


def test_of_two_names_on_a_hub_every_part_counts() -> None:
    ours, theirs = (configfile.load(MATH, [f"model.path={name}/m"]) for name in ("ours", "theirs"))
    assert fixed_values(ours) != fixed_values(theirs)


def test_every_value_has_a_dotted_name() -> None:
    names = fields(configfile.load(MATH))
    assert names["algorithm.advantage.kind"] == "gae" and names["learner.betas"] == (0.9, 0.999)


READ = re.compile(r"config\.((?:reward|environment|rollout|queue|evaluation|cluster|checkpoint)\.\w+(?:\.\w+)?)")
NUMBERS = {
    "queue.least_explained": "queue.segments.explained",
    "queue.prefix": "queue.segments.prefix",
    "queue.first_lag": "queue.max_lag",
    "queue.segments": "queue.segments.explained",
}
"""Properties that an update reads, by the number of `learning` that stands for them."""
ELSEWHERE = ("checkpoint.remote", "checkpoint.remote.rstrip", "cluster.address", "cluster.own_disks", "queue.shards")
"""Where weights are kept and where columns come from: no number of an update."""
ESTIMATED = ("queue.samples_per_prompt",)
"""A part of a rank's memory, by which checkpointing is chosen: every choice makes the same bits."""


def test_every_field_of_other_stages_that_the_learner_reads_is_one_of_learning() -> None:
    known, read = set(learning(configfile.load(MATH, ["rollout.engine={kind='sglang'}"]))), set[str]()
    for room in ("learner", "algorithms"):
        for file in (REPOSITORY / "streamppo" / room).rglob("*.py"):
            read |= {*READ.findall(file.read_text())}
    assert "reward.correct_at" in read, "the pattern finds none"
    names = {NUMBERS.get(name, name) for name in read.difference(ELSEWHERE, ESTIMATED)}
    missing = {name for name in names if not any(f"{one}.".startswith(f"{name}.") for one in known)}
    assert not missing, "a change of them on a resume would be replayed with the first value"
