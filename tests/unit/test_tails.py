"""Lengths that are drawn have the right median and tail, for the same identities again; goals have a verdict."""

import functools
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import MATH, REPOSITORY

from streamppo.config import file as configfile
from streamppo.tasks import plugins, stop
from streamppo.tasks.tokenizer import END, Tokenizer
from streamppo.types import Identity, Prompt

sys.path.insert(0, str(REPOSITORY))

from benchmarks.learning import tails
from benchmarks.learning.tails import Case
from benchmarks.lib import lengths
from benchmarks.lib.campaign import Campaign
from benchmarks.lib.runs import Goal, table, told

PROMPT = Prompt(text="", columns={})


@functools.cache
def draws(shape: str) -> list[int]:
    return [lengths.draw(shape, *divmod(number, 4)) for number in range(20_000)]


def share_beyond(shape: str, length: float) -> float:
    return sum(drawn > length for drawn in draws(shape)) / len(draws(shape))


@pytest.mark.parametrize("shape", lengths.SHAPES)
def test_half_of_the_lengths_are_above_the_median_and_none_beyond_the_cut(shape: str) -> None:
    assert np.median(draws(shape)) == lengths.MEDIAN
    assert min(draws(shape)) >= lengths.SHORTEST and max(draws(shape)) <= lengths.LONGEST == 64 * lengths.MEDIAN


def test_the_tails_are_those_of_the_distributions() -> None:
    for times in (2, 4, 8):
        # A length is rounded: the share is that beyond a half more.
        beyond = times * lengths.MEDIAN + 0.5
        normal = 0.5 * math.erfc(math.log(beyond / lengths.MEDIAN) / math.sqrt(2))
        assert share_beyond("lognormal", beyond) == pytest.approx(normal, abs=4 * math.sqrt(normal / 20_000))
        power = 0.5 * (beyond / lengths.MEDIAN) ** -1.3
        assert share_beyond("pareto", beyond) == pytest.approx(power, abs=4 * math.sqrt(power / 20_000))
    assert share_beyond("pareto", lengths.LONGEST - 1) == pytest.approx(0.5 * 64**-1.3, rel=0.5)
    assert set(draws("equal")) == {lengths.MEDIAN}


@pytest.mark.parametrize("shape", tails.HEAVY)
def test_a_length_is_a_function_of_the_trajectory_and_each_sample_and_attempt_has_its_own(shape: str) -> None:
    assert draws(shape)[:100] == [lengths.draw(shape, *divmod(number, 4)) for number in range(100)]
    samples, attempts = (
        [lengths.draw(shape, 7, n) for n in range(50)],
        [lengths.draw(shape, 7, 0, n) for n in range(50)],
    )
    assert len(set(samples)) > 10 and len(set(attempts)) > 10 and samples != attempts
    assert np.corrcoef(np.log(np.array(draws(shape)).reshape(-1, 4).T))[0, 1] == pytest.approx(0, abs=0.06)


@pytest.mark.parametrize("shape", lengths.SHAPES)
def test_a_run_takes_the_limits_that_are_drawn_and_an_answer_fits_into_an_evaluations(shape: str) -> None:
    config = configfile.load(MATH, tails.overrides(Path("model"), Case(shape, 4, "drop"), 45))
    assert (config.queue.max_lag, config.queue.too_old, config.updates) == (4, "drop", 45)
    assert config.queue.samples_per_prompt == tails.SAMPLES
    limit = stop.load_limit(config.rollout.limit, config.rollout.max_tokens)
    identity = Identity(task="arithmetic", prompt=3, sample=2, attempt=1)
    assert limit(PROMPT, identity) == lengths.draw(shape, 3, 2, 1)
    assert limit(PROMPT, None) == len("198") + 1
    assert callable(plugins.load("benchmarks.lib.lengths:score", "reward.function"))


def test_the_reward_reads_up_to_the_first_end(tmp_path: Path) -> None:
    from streamppo.tasks.tokenizer import character_tokenizer

    character_tokenizer("0123456789+=").save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    four, six = tokenizer.encode_turn("46", "length").tolist()

    def is_right(*tokens: int) -> bool:
        return lengths.is_right(list(tokens), tokenizer.decode(np.array(tokens)), "46")

    assert is_right(four, six, END) and is_right(four, six, END, four, END, 0, 2)
    wrong = [
        (four, six),
        (four, six, six),
        (four, END, six),
        (four, six, six, END),
        (END, four, six),
        (four, 2, six, END),
    ]
    assert not any(is_right(*tokens) for tokens in wrong)


def test_the_model_without_end_is_the_model_with_no_token_that_ends_a_completion(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    from streamppo.learner.model import tiny
    from streamppo.tasks import stop

    config = configfile.load(MATH, ["model.tiny={hidden_size=16, layers=1, max_steps=1}"])
    tiny.make(config, tmp_path / "model")
    lengths.without_end(tmp_path / "model", tmp_path / "endless")
    found = [AutoConfig.from_pretrained(tmp_path / name) for name in ("model", "endless")]
    both = [AutoTokenizer.from_pretrained(tmp_path / name) for name in ("model", "endless")]
    assert stop.read(tmp_path / "model", found[0], both[0]).ids == {END}
    assert stop.read(tmp_path / "endless", found[1], both[1]).ids == set()
    assert found[1].max_position_embeddings >= lengths.LONGEST + len("99+99=")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("model", "endless")]
    assert weights[0] == weights[1]


# --- goals and tables ----------------------------------------------------------------------------------------


FASTER, BUSY = ": trained tokens/s at max_lag 4 over max_lag 0", ": idle share of the learner at max_lag 4"


def row(
    shape: str, max_lag: int, too_old: str, tokens_per_s: float, *, idle: float = 0.01, number: int = 1
) -> dict[str, Any]:
    speed = {"trained_tokens_per_s": tokens_per_s, "learner_idle_share": idle}
    return {"lengths": shape, "max_lag": max_lag, "too_old": too_old, "round": number, **speed}


def test_the_goals_compare_max_lag_4_with_0_under_the_treatment_of_the_default_run() -> None:
    assert configfile.load(MATH).queue.too_old == "mask" == tails.TOO_OLD[0]
    rows = [
        row("equal", 0, "mask", 10.0),
        row("equal", 4, "mask", 17.0, idle=0.06),
        row("equal", 4, "drop", 90.0),
        row("pareto", 0, "mask", 10.0),
        row("pareto", 4, "mask", 28.0, idle=0.05),
        row("pareto", 2, "mask", 90.0),
        row("lognormal", 4, "mask", 90.0),
    ]
    found = {verdict["goal"]: (verdict["measured"], verdict["met"]) for verdict in tails.judge(rows)}
    assert found == {
        f"equal{FASTER}": (1.7, False),
        f"equal{BUSY}": (0.06, False),
        f"pareto{FASTER}": (2.8, True),
        f"pareto{BUSY}": (0.05, True),
        f"lognormal{FASTER}": (None, None),
        f"lognormal{BUSY}": (0.01, True),
    }


def test_speeds_are_compared_within_a_round_and_the_median_of_the_rounds_counts() -> None:
    rows = [
        row("equal", 0, "mask", 10.0),
        row("equal", 4, "mask", 20.0),
        row("equal", 4, "mask", 12.0, number=2),
        row("equal", 0, "mask", 4.0, number=2),
        row("equal", 0, "mask", 5.0, number=3),
        row("equal", 4, "mask", 8.0, number=3),
        row("equal", 0, "mask", 1.0, number=4),
    ]
    (verdict,) = [one for one in tails.judge(rows) if one["goal"] == f"equal{FASTER}"]
    assert (verdict["measured"], verdict["range"], verdict["met"]) == (2.0, [1.6, 3.0], True)


def test_a_verdict_is_told_in_a_line() -> None:
    least, most = Goal("speed", least=2.0), Goal("idle", most=0.05)
    assert told(least.verdict(1.994, 1.5, 2.5)) == "NOT met      speed, at least 2: 1.99 (1.5 to 2.5)"
    assert told(most.verdict(0.02)) == "met          idle, at most 0.05: 0.02 (0.02 to 0.02)"
    assert told(most.verdict()) == "not measured idle, at most 0.05"


def test_the_cases_of_the_goals_come_first_and_a_lag_bound_of_0_has_one_treatment() -> None:
    made = tails.cases(["equal", "pareto"], tails.MAX_LAGS, tails.TOO_OLD, 2)
    judged = [(shape, lag) for shape in ("equal", "pareto") for lag in (0, 4)]
    assert made[:8] == [Case(*one, "mask", number) for number in (1, 2) for one in judged]
    treatments = [case.too_old for case in made[8:]]
    assert treatments == ["mask"] * 8 + ["drop"] * 10 + ["wait"] * 10 + ["windowed"] * 10 + ["segments"] * 10
    assert all(case.round == 1 and case.max_lag for case in made[8:]) and len(set(made)) == len(made)
    assert tails.cases(["equal"], [0, 4], ["drop"], 1) == [Case("equal", 0, "mask"), Case("equal", 4, "drop")]


def test_a_campaign_goes_on_after_the_rows_that_are_there(tmp_path: Path) -> None:
    path, measured = tmp_path / "out.json", []

    def row(number: int) -> dict[str, Any]:
        measured.append(number)
        return {"speed": 10.0 * number}

    first = Campaign(path)
    assert first.row({"case": "a", "n": 1}, lambda: row(1)) == {"case": "a", "n": 1, "speed": 10.0}
    first.row({"case": "a", "n": 2}, lambda: row(2))
    second = Campaign(path)
    assert second.row({"case": "a", "n": 2}, lambda: row(7))["speed"] == 20.0
    second.row({"case": "b", "n": 2}, lambda: row(3))
    assert measured == [1, 2, 3] and Campaign(path).rows == second.rows and len(second.rows) == 3
    assert Campaign(None).rows == []


def test_columns_are_as_wide_as_their_longest_cell() -> None:
    assert table([{"name": "one", "share": 0.123456}, {"name": "another", "share": None}]).split("\n") == [
        "   name   share",
        "    one  0.1235",
        "another       -",
    ]


def test_segments_are_a_treatment_of_their_own(tmp_path: Path) -> None:
    told_of = tails.overrides(tmp_path, Case("pareto", 4, "segments"), 9)
    assert {"queue.segments={}", "queue.too_old=mask"} <= set(told_of)
    assert "queue.segments={}" not in tails.overrides(tmp_path, Case("pareto", 4, "drop"), 9)
