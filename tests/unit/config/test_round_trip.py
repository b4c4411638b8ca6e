"""A configuration is printed as TOML that says the same when it is read."""

from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec
import pytest
from conftest import MATH, REPOSITORY

from benchmarks.lib.runs import PLAIN
from streamppo.config import file as configfile
from streamppo.config.algorithm import Algorithm
from streamppo.config.reward import Scorer
from streamppo.config.rollout import Rollout
from streamppo.config.sections import Config
from streamppo.config.task import Task

SHIPPED = sorted((REPOSITORY / "configs").glob("*.toml"))
REQUIRED = {
    "gdpo": "weights={right=1.0}",
    "reject": "reject=[{kind='geometric', band=[0.5, 2.0]}, {kind='k3', at_most=0.1}]",
    "data": "data='x.jsonl'",
    "reasoning_gym": "dataset='chain_sum'",
    "verifiers": "environment='wordle'",
    "function": "function='a:b'",
    "model": "path='x'",
    "service": "url='http://x'",
    "judge": "url='http://x', model='m', question='{prompt}?'",
}


def choices() -> Iterator[tuple[str, str]]:
    hints = get_type_hints(Algorithm)
    for section in ("advantage", "correction", "policy_loss"):
        yield from ((f"algorithm.{section}", kind) for kind in tags(hints[section]))
    yield from (("task", kind) for kind in tags(Task))
    yield from (("reward.scorers.reward", kind) for kind in tags(Scorer))
    yield from (("rollout.engine", kind) for kind in tags(get_type_hints(Rollout)["engine"]))


def tags(union: object) -> list[str]:
    return [kind.__struct_config__.tag for kind in get_args(union)]


def read_back(config: Config, folder: Path) -> Config:
    configfile.save(config, folder)
    return configfile.load(folder / configfile.CONFIG)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_configuration_is_read_back(path: Path, tmp_path: Path) -> None:
    config = configfile.load(path)
    assert read_back(config, tmp_path) == config


@pytest.mark.parametrize(("place", "kind"), list(choices()))
def test_every_kind_is_read_back(place: str, kind: str, tmp_path: Path) -> None:
    rest = f", {REQUIRED[kind]}" if kind in REQUIRED else ""
    override = f"{place}={{kind='{kind}'{rest}}}"
    rewards = ["reward={}"] if place.startswith("reward") else []
    config = configfile.load(MATH, [*PLAIN, *rewards, override])
    assert read_back(config, tmp_path) == config
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=Config) == config


def test_tables_are_sections_and_a_field_without_a_value_is_left_out() -> None:
    text = configfile.show(configfile.load(MATH))
    assert '\n[rollout.engine]\nkind = "embedded"\n' in text
    assert "environment" not in text and "cpus" not in text


def test_a_run_takes_the_short_form_of_its_only_scorer_and_source(tmp_path: Path) -> None:
    configfile.save(configfile.load(MATH, ["task.kind=data", "task.data=a.jsonl"]), tmp_path)
    changed = configfile.load(tmp_path / configfile.CONFIG, ["reward.timeout_s=2", "task.weight=3"])
    same = configfile.load(MATH, ["task.kind=data", "task.data=a.jsonl", "reward.timeout_s=2", "task.weight=3"])
    assert changed == same
