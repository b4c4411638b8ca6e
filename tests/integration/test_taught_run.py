"""A run of several turns with a teacher's server: failures do not stop it, a resume takes another server, a replay
none."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import MATH
from teacher_server import scored, teaching
from test_recovery import command, replayed, resumed
from test_run import CALCULATOR, finished, summary, updates
from transformers import AutoModelForCausalLM

from streamppo.config import file as configfile
from streamppo.learner.model import tiny
from streamppo.queue.store import archive
from streamppo.types import flags, floats, ints

SHORT = (
    "updates=3",
    "queue.batch_size=16",
    "rollout.in_flight=16",
    "evaluation.every=0",
    "evaluation.prompts=8",
    "checkpoint.every=2",
    "model.tiny.max_steps=3",
)
TURNS = (*CALCULATOR, "model.tiny.max_steps=10")
"""Enough of a warm start for some calls of the calculator."""
FAILS_EVERY = 9


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_is_taught_by_a_server_goes_on_with_another_one_and_is_replayed_when_both_are_gone(
    tmp_path: Path,
) -> None:
    taught_by = tmp_path / "teacher"
    # Another seed is another model with the same characters.
    tiny.make(configfile.load(MATH, [*TURNS, "seed=2"]), taught_by)
    run = tmp_path / "math"
    with teaching(taught_by) as server:
        number = itertools.count(1)

        def at_times(answer: dict[str, Any]) -> tuple[int, Any]:
            # Calls that come together have the same length of `asked`: they are counted here.
            return (400, "not this one") if next(number) % FAILS_EVERY == 0 else (200, answer)

        server.edit = at_times
        finished(tmp_path, *SHORT, *TURNS, f"algorithm.teacher.url={server.url}", "algorithm.teacher.weight=0.1")
    made = summary(tmp_path)
    (calls,) = [one for one in made["engines"]["scorers"] if one["name"] == "teacher"]
    assert calls["calls"] > 3 * 16 and calls["mean_s"] > 0
    assert made["failed"]["teacher"] == pytest.approx(calls["failed"], abs=16), "some may be under way at the end"
    assert made["failed"].keys() == {"teacher"}
    assert all(row["teacher_kl"] > 0.01 for row in updates(tmp_path))

    with teaching(taught_by) as other:
        resumed(tmp_path, "updates=5", f"algorithm.teacher.url={other.url}")
        assert other.asked
    _columns_are_the_models(run, taught_by)
    assert "6 versions, all of them bit for bit as recorded" in replayed(tmp_path)


@pytest.mark.slow
def test_a_run_whose_teacher_does_not_answer_ends_before_it_begins_with_the_reason(tmp_path: Path) -> None:
    teacher = "algorithm.teacher={url='http://127.0.0.1:9', attempts=2}"
    done = command("run", str(MATH), "--runs", str(tmp_path), *SHORT, teacher)
    output = done.stdout + done.stderr
    assert done.returncode == 1 and "the teacher cannot be reached: Retryable: http://127.0.0.1:9/generate" in output
    assert updates(tmp_path) == []


def _columns_are_the_models(run: Path, folder: Path) -> None:
    """Compare the archived teacher's log-probs with the servers' model, at sampled tokens of all turns alone."""
    found = archive.open(run)
    assert found.versions() == [0, 1, 2, 3, 4]
    made = [one for version in found.versions() for one in found.batch(version).trajectories]
    several = [one for one in made if not flags(one.mask).all()]
    assert len(several) >= 3, "the calculator was called"
    lm = AutoModelForCausalLM.from_pretrained(folder)
    for one in [*several[:12], *made[:8]]:
        prompt, tokens, mask = ints(one.prompt_tokens).tolist(), ints(one.tokens).tolist(), flags(one.mask)
        body = {"input_ids": [*prompt, *tokens], "logprob_start_len": len(prompt) - 1}
        answer = scored(lm, {**body, "return_logprob": True, "sampling_params": {"max_new_tokens": 0}})
        numbers = np.array([entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]])
        assert floats(one.teacher_logprobs) == pytest.approx(np.where(mask, numbers, 0.0), abs=1e-5)
