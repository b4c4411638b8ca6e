"""The study of segments against rules for whole completions: its task, its cases, its verdicts."""

import asyncio
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ciphers, staleness
from benchmarks.staleness import Case
from streamppo.config import file as configfile
from streamppo.types import ScoredText


def said(completion: str, finish: str = "stop") -> ScoredText:
    return ScoredText(prompt="cab>", completion=completion, finish=finish, num_tokens=4)  # pyright: ignore[reportArgumentType]


def test_only_the_whole_answer_that_ends_is_right_and_letters_in_place_are_worth_a_little() -> None:
    assert asyncio.run(ciphers.score(said("dbc"), "dbc")) == 1.0
    assert asyncio.run(ciphers.score(said("dbc", "length"), "dbc")) == pytest.approx(0.2)
    assert asyncio.run(ciphers.score(said("dxc"), "dbc")) == pytest.approx(0.2 * 2 / 3)
    assert asyncio.run(ciphers.score(said(""), "dbc")) == 0.0


@pytest.mark.parametrize("shape", staleness.SHAPES)
def test_answers_are_the_next_letters_with_a_heavy_tail_of_lengths(tmp_path: Path, shape: str) -> None:
    ciphers.write(tmp_path, shape)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    held_out = (tmp_path / "held_out.jsonl").read_text().splitlines()
    assert (len(rows), len(held_out)) == (ciphers.PROBLEMS - ciphers.HELD_OUT, ciphers.HELD_OUT)
    for row in rows[:50]:
        assert row["prompt"] == "".join(chr(ord(letter) - 1) for letter in row["answer"]) + ">"
    lengths = [len(row["answer"]) for row in rows]
    assert statistics.median(lengths) == ciphers.MEDIAN
    assert (min(lengths), max(lengths)) == (1 if shape == "lognormal" else 2, ciphers.LONGEST)
    assert statistics.mean(lengths) > 1.4 * ciphers.MEDIAN


def test_every_case_is_a_configuration_that_can_be_run(tmp_path: Path) -> None:
    ciphers.write(tmp_path, "pareto")
    cases = list(staleness.cases(("pareto",), (2, 4), (1, 2)))
    assert cases[0] == Case("pareto", "sync", 0, 1) and len(cases) == 2 * (1 + 2 * 4) == len(set(cases))
    for case in cases:
        config = configfile.load(staleness.CONFIG, staleness.overrides(case, tmp_path, tmp_path, 9))
        assert (config.queue.segments is not None) == (case.rule == "segments")
        assert config.queue.max_lag == case.max_lag
        assert case.rule not in ("drop", "wait") or config.queue.too_old == case.rule


def row(rule: str, max_lag: int, to_target_s: float | None, **more: Any) -> Mapping[str, Any]:
    numbers = {"accuracy": 0.9, "lost_share": 0.0, "lag_max": max_lag, "learner_idle_share": 0.01}
    case = {"lengths": "pareto", "rule": rule, "max_lag": max_lag, "seed": 1, "to_target_s": to_target_s}
    return {**case, **numbers, **more}


def test_segments_are_judged_by_the_best_rival_of_the_same_seed() -> None:
    rows = [
        row("sync", 0, 60.0, accuracy=1.0),
        row("segments", 4, 20.0, learner_idle_share=0.2, lost_share=0.01),
        row("segments", 16, 10.0, lag_max=8),
        row("mask", 4, 30.0),
        row("drop", 16, 24.0),
        row("wait", 2, None),
    ]
    measured = {one["goal"]: (one["measured"], one["met"]) for one in staleness.judge(rows)}
    goals = {name: measured[goal.name] for name, goal in staleness.GOALS.items()}
    assert goals["sync"] == (3.0, True)
    assert goals["whole"] == (pytest.approx(1.2), False)
    assert goals["accuracy"] == (0.9, False)
    assert goals["bias"] == (0.01, False)
    assert goals["lag"] == (1.0, True)
    assert goals["idle"] == (0.2, False)
