"""The chaos campaign draws valid configurations of every kind, and continues where it stopped."""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import MATH, REPOSITORY

from streamppo.config import file as configfile

sys.path.insert(0, str(REPOSITORY))

from benchmarks.faults import chaos
from benchmarks.lib import draw
from benchmarks.lib.runs import PLAIN

KINDS = [one for name in ("correction", "advantage", "policy_loss", "exploration") for one in draw.choices()[name]]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_the_mathematics_can_be_drawn(kind: str) -> None:
    configfile.load(MATH, [*PLAIN, "queue.samples_per_prompt=4", "learner.minibatches=2", kind])


def test_every_task_is_drawn_or_left_out_by_name() -> None:
    assert draw.TASKS.keys() | draw.LEFT_OUT == draw.tasks()


def test_a_drawn_configuration_is_valid_and_the_same_again(tmp_path: Path) -> None:
    first, again, other = (draw.draw(random.Random(seed), MATH, chaos.SHORT, tmp_path) for seed in (1, 1, 2))
    assert first == again != other
    configfile.load(MATH, [*chaos.SHORT, *first])


def options(**changed: Any) -> argparse.Namespace:
    known = {
        "seed": 1,
        "trials": 3,
        "kills": 2,
        "draw": True,
        "set": ["updates=9"],
        "config": MATH,
        "parallel": 1,
        "agents": False,
    }
    return argparse.Namespace(**{**known, **changed})


@pytest.mark.slow
def test_a_campaign_goes_on_after_the_trials_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def attempt(_: argparse.Namespace, job: chaos.Job) -> dict[str, Any]:
        made.append(job.number)
        if len(made) == 2:
            raise KeyboardInterrupt
        return {**job._asdict(), "failure": "planted"}

    monkeypatch.setattr(chaos, "attempt", attempt)
    log = tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt):
        list(chaos.campaign(options(), tmp_path / "data", log))
    *_, last = chaos.campaign(options(trials=4), tmp_path / "data", log)
    assert made.count(0) == 1 and made.count(1) == 2
    assert sorted(line["number"] for line in last) == [0, 1, 2, 3]
    assert sorted(json.loads(line)["number"] for line in log.read_text().splitlines()) == [0, 1, 2, 3]
    with pytest.raises(SystemExit, match="of another campaign"):
        list(chaos.campaign(options(seed=2), tmp_path / "data", log))
