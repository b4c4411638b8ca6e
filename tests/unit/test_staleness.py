"""The study of segments against rules for whole completions: its task, its cases, its verdicts."""

import asyncio
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import learner_case
import pytest

from benchmarks.learning import staleness
from benchmarks.learning.staleness import Case
from benchmarks.lib import ciphers, simulated
from benchmarks.lib.simulated import Costs
from streamppo.config import file as configfile
from streamppo.learner.batch.padded import pad
from streamppo.learner.model import tiny
from streamppo.types import ScoredText

TINY = (
    "queue.batch_size=16",
    "rollout.slots=8",
    "rollout.in_flight=8",
    "model.tiny.max_steps=1",
    "evaluation.prompts=8",
)


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
    ciphers.write(tmp_path, "pareto", median=staleness.MEDIAN)
    cases = list(staleness.cases(("pareto",), staleness.RULES, (2, 4), (1, 2)))
    assert cases[0] == Case("pareto", "sync", 0, 1) and len(cases) == 2 * (1 + 2 * 11) == len(set(cases))
    for case in cases:
        config = configfile.load(staleness.CONFIG, staleness.overrides(case, tmp_path, tmp_path, []))
        cuts = {"segments": 0, "adaptive-segments": 0, "segments-detached": 0}
        most = cuts | {f"segments-{tokens}": tokens for tokens in (4, 8, 16)}
        assert (config.queue.segments.max_tokens if config.queue.segments else None) == most.get(case.rule)
        assert config.queue.prefix == ("detached" if case.rule == "segments-detached" else "attached")
        assert config.queue.bound == case.max_lag
        assert (config.queue.first_lag is not None) == case.rule.startswith("adaptive")
        assert config.queue.too_old == (case.rule if case.rule in staleness.WHOLE else "mask")


def simulate(case: Case, folder: Path, updates: int) -> dict[str, Any]:
    """A tiny run of a case."""
    config = configfile.load(
        staleness.CONFIG, staleness.overrides(case, folder, folder / "model", [f"updates={updates}", *TINY])
    )
    if not (folder / "model").is_dir():
        tiny.make(config, folder / "model")
    run = folder / f"run-{len(list(folder.iterdir()))}"
    return staleness.measure(config, simulated.run(config, folder / "model", run, Costs()))


@pytest.mark.slow
def test_a_simulated_run_is_the_same_again_and_waits_as_long_as_its_rule_makes_it(tmp_path: Path) -> None:
    ciphers.write(tmp_path, "pareto", median=staleness.MEDIAN)
    real = time.perf_counter
    with learner_case.group(0, 1, tmp_path / "store"):
        sync, mask, segments, again = (
            simulate(Case("pareto", rule, lag, 1), tmp_path, 12)
            for rule, lag in (("sync", 0), ("mask", 2), ("segments", 2), ("segments", 2))
        )
    assert time.perf_counter is real, "the clocks of the process are its own again"
    assert again == segments, "bit for bit, however long it really took"
    # Nobody samples while the learner learns: an update takes as long as the longest answer, and then the update.
    assert sync["seconds"] > 2 * segments["seconds"]
    assert (sync["lag_max"], sync["lost_share"], sync["segments_cut"]) == (0, 0.0, 0)
    assert mask["lost_share"] > 0 and mask["segments_cut"] == 0
    assert segments["lost_share"] == 0.0 and 0 < segments["lag_max"] <= 2 and segments["segments_cut"] > 0
    assert [version for version, _, _ in segments["accuracies"]] == [0, 12]


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


def test_throughput_of_the_lag_that_steers_itself_is_judged_by_the_fastest_fixed_one() -> None:
    rows = [
        row("mask", 4, None, trained_tokens_per_s=80.0),
        row("mask", 16, None, trained_tokens_per_s=100.0),
        row("adaptive", 16, None, trained_tokens_per_s=95.0),
        row("adaptive", 16, None, trained_tokens_per_s=95.0, seed=2),
    ]
    measured = {one["goal"]: one["range"] for one in staleness.judge(rows)}
    assert measured[staleness.GOALS["steered"].name] == [0.95, 0.95], "seed 2 has no fixed lag"


def test_a_clock_moves_where_a_loop_would_wait_and_by_what_a_call_costs() -> None:
    async def world() -> list[tuple[str, float]]:
        loop, seen = asyncio.get_running_loop(), list[tuple[str, float]]()

        def computed() -> float:
            clock.cost(2.0)
            return clock.now

        async def sleeper() -> None:
            await asyncio.sleep(0.5)
            seen.append(("slept", loop.time()))

        other = asyncio.create_task(sleeper())
        await asyncio.sleep(0)
        inside = await asyncio.to_thread(computed)
        seen.append(("computed", loop.time()))
        await other
        assert inside == 2.0, "within the call its cost has passed"
        return seen

    clock = simulated.Clock()
    with asyncio.Runner(loop_factory=lambda: simulated.Loop(clock)) as runner:
        seen = runner.run(world())
    assert [name for name, _ in seen] == ["slept", "computed"]
    assert [at for _, at in seen] == pytest.approx([0.5, 2.0])


def test_a_context_without_gradient_costs_an_update_a_third() -> None:
    batch, costs = pad(learner_case.batch()), Costs(update_s=1.0, token_s=3.0, context_s=1.0)
    tokens, rows = int((batch.start_B + batch.length_B).sum()), len(batch.start_B)
    context = int(batch.start_B.sum()) - rows
    assert simulated.update_s(costs, batch, "attached") == 1.0 + 3.0 * tokens
    assert simulated.update_s(costs, batch, "detached") == 1.0 + 3.0 * (tokens - context) + context
    assert context > 0


def test_a_world_in_which_everybody_waits_for_somebody_else_says_so() -> None:
    with (
        pytest.raises(RuntimeError, match="everybody waits"),
        asyncio.Runner(loop_factory=lambda: simulated.Loop(simulated.Clock())) as runner,
    ):
        runner.run(asyncio.Event().wait())
