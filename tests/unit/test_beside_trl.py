"""The comparison with TRL counts seconds from the command on, and reports reached, met and lost goals."""

import sys
from typing import Any

import msgspec
import pytest
from conftest import MATH, REPOSITORY

from streamppo.config import file as configfile

sys.path.insert(0, str(REPOSITORY))

from benchmarks.learning import beside_trl as beside
from benchmarks.learning.beside_trl import judge, lost, measured
from benchmarks.lib import trl_run
from benchmarks.lib.runs import PLAIN

EVENTS: list[dict[str, Any]] = [
    {"evaluation": 0, "wall_s": 3.0, "accuracy": 0.2},
    *({"update": n, "wall_s": 10.0 + 2.0 * n} for n in range(1, 41)),
    {"evaluation": 20, "wall_s": 53.0, "accuracy": None},
    {"evaluation": 40, "wall_s": 99.0, "accuracy": 0.9},
]


def test_the_target_is_reached_with_the_update_whose_version_has_it() -> None:
    found = measured(EVENTS, 0.9)
    assert (found["reached_update"], found["reached_s"], found["updates"]) == (40, 90.0, 40)
    assert (found["first_update_s"], found["until_s"], found["wall_ms"]) == (12.0, 90.0, pytest.approx(2000.0))
    assert found["curve"] == [(12.0, 0.2), (50.0, None), (90.0, 0.9)]
    assert measured(EVENTS, 0.91)["reached_s"] is None


def row(case: str, side: str, reached_s: float | None, **more: Any) -> dict[str, Any]:
    whole = {"limit_s": 500.0} if side == "TRL" else {}
    numbers = {"until_s": 210.0, "reached_update": 300, "first_update_s": 9.0, "wall_ms": 200.0, "cpu_ms": 200.0}
    return {"case": case, "side": side, "reached_s": reached_s, **numbers, **whole, **more}


def test_goals_compare_with_trl_at_its_best_and_a_bound_counts_only_where_it_is_enough() -> None:
    ours = "streamppo, grpo"
    rows = [
        row("equal", "streamppo, default", 60.0),
        row("equal", ours, 100.0),
        row("equal", "TRL, 1 threads, 1 parts, 6 updates", None),
        row("equal", "TRL", 170.0),
        row("equal", "TRL", 150.0),
        row("equal", "TRL", None),
        row("lognormal", ours, 52.5),
        row("lognormal", "TRL", None),
        row("pareto", ours, 105.0),
        row("pareto", "TRL", None),
        row("reward", ours, None),
        row("reward", "TRL", 400.0),
    ]
    verdicts = {
        (one["goal"].partition(":")[0], one["goal"].rpartition(", ")[2]): (one["measured"], one["met"])
        for one in judge(rows, 0.9)
        if one["measured"] is not None
    }
    # TRL was at 210 s without the target: four times 52.5 s, and only twice 105 s.
    assert verdicts == {
        ("equal", "grpo"): (1.5, False),
        ("equal", "default"): (2.5, True),
        ("lognormal", "grpo"): (4.0, True),
    }


def test_everything_in_which_trl_is_better_is_told() -> None:
    rows = [
        row("equal", "streamppo, grpo", 100.0, cpu_ms=300.0, first_update_s=8.0),
        row("equal", "TRL", 150.0),
        row("reward", "streamppo, grpo", None),
        row("reward", "TRL", 400.0),
    ]
    assert lost(rows) == [
        "lost: equal, grpo, CPU time of an update: 300, TRL 200",
        "lost: reward, grpo, seconds to the target: not reached, TRL 400",
    ]
    assert lost([row("equal", "streamppo, grpo", 1.0)]) == []


@pytest.mark.parametrize("name", beside.CASES)
def test_every_case_is_a_configuration_that_is_valid_and_is_evaluated_as_often_as_trl(name: str) -> None:
    case = beside.CASES[name]
    config = configfile.load(MATH, [*beside.RULES["grpo"], *case.grpo, *case.overrides, *beside.EVALUATED])
    default = configfile.load(MATH, PLAIN)
    assert (config.evaluation.every, config.evaluation.prompts) == (beside.EVERY, default.evaluation.prompts)
    # Old data may lower the rate; that of fresh data is TRL's.
    learner = msgspec.structs.replace(config.learner, lr_by_ess=default.learner.lr_by_ess)
    assert (config.queue.batch_size, learner) == (default.queue.batch_size, default.learner)
    assert (case.shape != "") == (config.rollout.limit != "")


def test_the_seconds_of_an_evaluation_are_in_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    for clock_of in ("perf_counter", "process_time", "time"):
        monkeypatch.setattr(trl_run.time, clock_of, lambda: now[0])
    clock = trl_run.Clock(begin=993.0)
    for pause_s in (5.0, 6.0):
        now[0] += 1.0
        with clock.paused():
            now[0] += pause_s
    assert clock.read() == (7.0 + 2.0, 1000.0 + 2.0)
