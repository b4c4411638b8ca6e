"""Segments of the real SGLang: handed-over tokens, against transformers and its final completion."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import sglang_case as case
from conftest import REPOSITORY

from benchmarks.lib import lengths
from streamppo.rollout.engine import Completion, Cuts, Sampling
from streamppo.tasks.tokenizer import character_tokenizer
from streamppo.telemetry import metrics_file as lines

pytest_plugins = ["sglang_case"]
pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]
CLOSE = case.CLOSE
COUNT, LENGTH = 6, 300


class Sampled(NamedTuple):
    """A prompt, all that was handed over of its completion, each with everything before it, and the completion."""

    prompt: np.ndarray
    handed: list[Completion]
    whole: Completion


async def sampled(engine: Any, pushes: list[Any], cuts: dict[str, Any], sampling: Sampling) -> list[Sampled]:
    """Completions during which all of `pushes` are swapped in, one after another."""
    made, tasks = [], []
    for prompt in case.prompts(COUNT, seed=30):
        handed: list[Completion] = []
        made.append((prompt, handed))
        tasks.append(asyncio.ensure_future(engine.generate(prompt, sampling, Cuts(handed.append, **cuts))))
    for pushed in pushes:
        await asyncio.sleep(case.BEGUN_S)
        await engine.update_weights(engine.version + 1, case.tensors(pushed))
    wholes = await asyncio.gather(*tasks)
    return [Sampled(*one, whole) for one, whole in zip(made, wholes, strict=True)]


def check_parts(one: Sampled) -> None:
    """Each part is a beginning of the whole, and no token of it counts as younger than it is."""
    lengths = [len(part.tokens) for part in one.handed]
    assert lengths == sorted(set(lengths))
    assert len(one.whole.tokens) > max(lengths, default=0)
    for part, length in zip(one.handed, lengths, strict=True):
        assert part.finish == "cut"
        assert part.tokens.tolist() == one.whole.tokens[:length].tolist()
        assert part.logprobs.tolist() == one.whole.logprobs[:length].tolist()
        assert (part.versions <= one.whole.versions[:length]).all()
        assert (np.diff(part.versions) >= 0).all()


def test_every_segment_has_the_log_probs_of_the_weights_that_sampled_it(setting: case.Setting) -> None:
    engine, after = setting.engine, case.model(seed=31)
    setting.run(engine.update_weights(engine.version + 1, case.tensors(setting.model)))
    first = engine.version
    cuts = {"max_age": 1, "share": 1.0}
    done = setting.run(sampled(engine, [after], cuts, Sampling(LENGTH)))
    assert sum(len(one.handed) for one in done) == COUNT
    for one in done:
        check_parts(one)
        (segment,) = one.handed
        # A cut stands behind all tokens that can be of the version before.
        assert set(segment.versions) == {first}
        assert (one.whole.versions[len(segment.tokens) :] == first + 1).all()
        at = int((one.whole.versions == first).sum())
        expected = case.logprobs(setting.model, one.prompt, one.whole.tokens)
        np.testing.assert_allclose(one.whole.logprobs[:at], expected[:at], atol=CLOSE)
        mixed = case.continued(setting.model, after, one.prompt, one.whole.tokens, at)
        np.testing.assert_allclose(one.whole.logprobs[at:], mixed, atol=CLOSE)
        assert len(segment.tokens) - at <= 16


def test_segments_of_a_length_follow_each_other_over_swaps_with_their_candidates(setting: case.Setting) -> None:
    engine = setting.engine
    pushes = [case.model(seed=32), case.model(seed=33)]
    cuts = {"max_tokens": 50, "max_age": 2, "share": 0.5}
    done = setting.run(sampled(engine, pushes, cuts, Sampling(LENGTH, 1.3, 1.0, 8)))
    for one in done:
        check_parts(one)
        assert len(one.handed) >= 5
        assert (np.diff([0, *(len(part.tokens) for part in one.handed)]) <= 50).all()
        assert one.whole.candidates is not None
        for part in one.handed:
            assert part.candidates is not None
            assert part.candidates.counts.tolist() == one.whole.candidates.counts[: len(part.tokens)].tolist()
            tokens = one.whole.candidates.tokens[: len(part.candidates.tokens)]
            assert part.candidates.tokens.tolist() == tokens.tolist()


def test_segments_are_cut_in_time_while_texts_end_as_stop_strings_begin(tmp_path: Path) -> None:
    made, after = case.model(), case.model(seed=34)
    made.save_pretrained(tmp_path)
    letters = "abcdefghijklmnopqrstuvwx"
    tokenizer = character_tokenizer(letters)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    strings = [f"{letter}abcdefgh" for letter in letters]

    async def sample() -> list[Sampled]:
        engine = await case.engine(str(tmp_path), case.tensors(made), f"rollout.stop={strings}")
        # The first tokens of an engine take longer than the time before the swap.
        await engine.generate(case.prompts(1)[0], Sampling(4))
        done = await sampled(engine, [after], {"max_age": 1, "share": 1.0}, Sampling(LENGTH))
        await engine.stop()
        return done

    for one in asyncio.run(sample()):
        check_parts(one)
        (segment,) = one.handed
        assert set(segment.versions) == {0} and len(segment.tokens) < LENGTH
        assert (one.whole.versions[len(segment.tokens) :] == 1).all()


@pytest.mark.timeout(900)
def test_a_run_of_heavy_tails_trains_on_segments_in_time_and_loses_none(tmp_path: Path) -> None:
    config = REPOSITORY / "configs/math-sglang.toml"
    _, model = lengths.make_models(config, tmp_path)
    told = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**told, "eos_token_id": None}))
    overrides = [
        *(f"model.path={model}", *lengths.overrides("pareto"), "updates=24", "evaluation={every=0, prompts=8}"),
        *("queue.segments={max_tokens = 128, explained = 0}", "queue.max_lag=4", "queue.batch_size=64"),
        *("rollout.slots=32", "rollout.in_flight=40", "rollout.engine.kv=recompute"),
    ]
    command = [sys.executable, "-W", "ignore", "-m", "streamppo", "run", str(config), "--runs", str(tmp_path / "runs")]
    subprocess.run([*command, *overrides], check=True, cwd=REPOSITORY)
    (made,) = (tmp_path / "runs").iterdir()
    summary, updates = json.loads((made / "summary.json").read_text()), list(lines.updates(made))
    assert summary["lag"]["max"] <= 4
    assert (sum(line["tokens_too_old"] for line in updates), summary["failed"]) == (0, {})
    assert sum(line.get("segments_cut") or 0 for line in updates) > 0.2
    assert any(line.get("reward") is not None for line in updates)
    # With a cache of the new weights the learner has the log-probs of all tokens of its own version.
    mismatches = [line["mismatch"] for line in updates if line.get("mismatch") is not None]
    assert mismatches and max(mismatches) < CLOSE
