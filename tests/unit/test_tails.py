"""Lengths that are drawn have the right median and tail, for the same identities again; goals have a verdict."""

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import MATH, REPOSITORY

from streamppo.config import file as configfile
from streamppo.tasks import limits, plugins
from streamppo.tasks.tokenizer import END, Tokenizer
from streamppo.types import Identity, Prompt

sys.path.insert(0, str(REPOSITORY))

from benchmarks import lengths, tails
from benchmarks.runs import Goal, table, told

DRAWS = {shape: [lengths.draw(shape, *divmod(number, 4)) for number in range(20_000)] for shape in lengths.SHAPES}
PROMPT = Prompt(text="", columns={})


def share_beyond(shape: str, length: float) -> float:
    return sum(drawn > length for drawn in DRAWS[shape]) / len(DRAWS[shape])


@pytest.mark.parametrize("shape", lengths.SHAPES)
def test_half_of_the_lengths_are_above_the_median_and_none_beyond_the_cut(shape: str) -> None:
    assert np.median(DRAWS[shape]) == lengths.MEDIAN
    assert min(DRAWS[shape]) >= lengths.SHORTEST and max(DRAWS[shape]) <= lengths.LONGEST == 64 * lengths.MEDIAN


def test_the_tails_are_those_of_the_distributions() -> None:
    for times in (2, 4, 8):
        # A length is rounded: the share is that beyond a half more.
        beyond = times * lengths.MEDIAN + 0.5
        normal = 0.5 * math.erfc(math.log(beyond / lengths.MEDIAN) / math.sqrt(2))
        assert share_beyond("lognormal", beyond) == pytest.approx(normal, abs=4 * math.sqrt(normal / 20_000))
        power = 0.5 * (beyond / lengths.MEDIAN) ** -1.3
        assert share_beyond("pareto", beyond) == pytest.approx(power, abs=4 * math.sqrt(power / 20_000))
    assert share_beyond("pareto", lengths.LONGEST - 1) == pytest.approx(0.5 * 64**-1.3, rel=0.5)
    assert set(DRAWS["equal"]) == {lengths.MEDIAN}


@pytest.mark.parametrize("shape", tails.HEAVY)
def test_a_length_is_a_function_of_the_trajectory_and_each_sample_and_attempt_has_its_own(shape: str) -> None:
    assert DRAWS[shape][:100] == [lengths.draw(shape, *divmod(number, 4)) for number in range(100)]
    samples, attempts = (
        [lengths.draw(shape, 7, n) for n in range(50)],
        [lengths.draw(shape, 7, 0, n) for n in range(50)],
    )
    assert len(set(samples)) > 10 and len(set(attempts)) > 10 and samples != attempts
    assert np.corrcoef(np.log(np.array(DRAWS[shape]).reshape(-1, 4).T))[0, 1] == pytest.approx(0, abs=0.06)


@pytest.mark.parametrize("shape", lengths.SHAPES)
def test_a_run_takes_the_limits_that_are_drawn_and_an_answer_fits_into_an_evaluations(shape: str) -> None:
    config = configfile.load(MATH, tails.overrides(Path("model"), shape, 4, "drop", 45))
    assert (config.queue.max_lag, config.queue.too_old, config.updates) == (4, "drop", 45)
    assert config.queue.samples_per_prompt == tails.SAMPLES
    limit = limits.load(config.rollout.limit, config.rollout.max_tokens)
    identity = Identity(task="arithmetic", prompt=3, sample=2, attempt=1)
    assert limit(PROMPT, identity) == lengths.draw(shape, 3, 2, 1)
    assert limit(PROMPT, None) == len("198") + 1
    assert callable(plugins.load("benchmarks.lengths:score", "reward.function"))


def test_the_reward_reads_up_to_the_first_end(tmp_path: Path) -> None:
    from streamppo.tasks.tokenizer import character_tokenizer

    character_tokenizer("0123456789+=").save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    four, six = tokenizer.sampled("46", "length").tolist()

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
    from transformers import AutoConfig

    from streamppo.learner import tiny
    from streamppo.rollout import build

    config = configfile.load(MATH, ["model.tiny={hidden_size=16, layers=1, max_steps=1}"])
    tiny.make(config, tmp_path / "model")
    lengths.without_end(tmp_path / "model", tmp_path / "endless")
    found = [AutoConfig.from_pretrained(tmp_path / name) for name in ("model", "endless")]
    assert build._eos_ids(found[0], str(tmp_path / "model")) == {END}
    assert build._eos_ids(found[1], str(tmp_path / "endless")) == set()
    assert found[1].max_position_embeddings >= lengths.LONGEST + len("99+99=")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("model", "endless")]
    assert weights[0] == weights[1]


# --- goals and tables ----------------------------------------------------------------------------------------


def row(shape: str, max_lag: int, too_old: str, tokens_per_s: float, idle: float = 0.01) -> dict[str, Any]:
    speed = {"trained_tokens_per_s": tokens_per_s, "learner_idle_share": idle}
    return {"lengths": shape, "max_lag": max_lag, "too_old": too_old, **speed}


def test_the_goals_compare_max_lag_4_with_0_under_the_treatment_of_the_default_run() -> None:
    assert configfile.load(MATH).queue.too_old == "mask"
    rows = [
        row("equal", 0, "mask", 10.0),
        row("equal", 4, "mask", 17.0, idle=0.06),
        row("equal", 4, "drop", 90.0),
        row("pareto", 0, "drop", 10.0),
        row("pareto", 4, "mask", 28.0, idle=0.05),
        row("pareto", 2, "mask", 90.0),
        row("lognormal", 4, "mask", 90.0),
    ]
    found = {verdict["goal"]: (verdict["measured"], verdict["met"]) for verdict in tails.judge(rows)}
    faster, busy = ": trained tokens/s at max_lag 4 over max_lag 0", ": idle share of the learner at max_lag 4"
    assert found == {
        f"equal{faster}": (1.7, False),
        f"equal{busy}": (0.06, False),
        f"pareto{faster}": (2.8, True),
        f"pareto{busy}": (0.05, True),
        f"lognormal{faster}": (None, None),
        f"lognormal{busy}": (0.01, True),
    }


def test_a_verdict_is_told_in_a_line() -> None:
    least, most = Goal("speed", least=2.0), Goal("idle", most=0.05)
    assert told(least.verdict(1.994)).split() == ["NOT", "met", "speed,", "at", "least", "2:", "1.99"]
    assert told(most.verdict(0.02)).split() == ["met", "idle,", "at", "most", "0.05:", "0.02"]
    assert told(most.verdict(None)).split() == ["not", "measured", "idle,", "at", "most", "0.05"]


def test_a_lag_bound_of_0_is_measured_once() -> None:
    made = list(tails.cases(["equal"], tails.MAX_LAGS, tails.TOO_OLD))
    assert made.count(("equal", 0, "mask")) == 1 and len(made) == len(set(made)) == 1 + 5 * 3


def test_columns_are_as_wide_as_their_longest_cell() -> None:
    assert table([{"name": "one", "share": 0.123456}, {"name": "another", "share": None}]).split("\n") == [
        "   name   share",
        "    one  0.1235",
        "another       -",
    ]
