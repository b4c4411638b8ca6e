"""`streamppo eval`: measures held-out accuracy and pass@k of a run's checkpoint or a model, in this process.

accuracy    share of the prompts whose greedy answer is right, as in a run's own evaluations
pass@k      chance that one of k samples is right: the mean over prompts of 1 - C(n - c, k) / C(n, k), for n samples
            with c right ones (Chen et al. 2021, https://arxiv.org/abs/2107.03374)

An answer is right if its reward is at least `reward.correct_at`. Samples are drawn with the settings of `[rollout]`.
"""

import asyncio
import json
import logging
import math
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, TypedDict

import transformers
from msgspec import structs
from torch import Tensor

from streamppo.commands import standalone
from streamppo.commands.checks import folder as folders
from streamppo.commands.console import console, echo, log_to_stderr, table
from streamppo.commands.models import weights
from streamppo.config.model import BUILTIN
from streamppo.config.sections import Config, model_path
from streamppo.errors import ConfigError, TaskError
from streamppo.learner.model import tiny
from streamppo.queue import pairs
from streamppo.rollout import build
from streamppo.rollout.engine import Sampling
from streamppo.rollout.player import FAILURES, Player
from streamppo.tasks import plugins, stop
from streamppo.tasks import task as tasks
from streamppo.tasks.rewards.scoring import Rewards
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.types import Prompt

PROGRESS_S = 10.0
REASONS = 3

log = logging.getLogger(__name__)


class Subject(NamedTuple):
    """A policy: the name of its run or model, its version, the folder of config.json and tokenizer, and its weights."""

    name: str
    version: int
    path: str
    tensors: Mapping[str, Tensor]


class ScoredAnswer(NamedTuple):
    """A scored answer. A failed answer has a reason and no reward."""

    reward: float | None
    tokens: int = 0
    truncated: bool = False
    reason: str = ""


class MeanEstimate(TypedDict):
    """A mean over prompts (None without scored prompts), and its standard error (None for fewer than two)."""

    mean: float | None
    error: float | None


class EvalResult(TypedDict):
    """The output of `--json`. `reward`, `tokens` and `truncated` are means over the greedy answers.

    `failed` counts greedy answers and samples without a score; `reasons` counts them by the most frequent reasons.
    """

    model: str
    version: int
    prompts: int
    accuracy: MeanEstimate
    samples: int
    temperature: float
    pass_at: dict[int, MeanEstimate]
    reward: float | None
    tokens: float | None
    truncated: float | None
    failed: int
    reasons: dict[str, int]


def evaluate(
    name: str, run_config: Config | None, config: Config | None, *, version: int | None, samples: int, as_json: bool
) -> int:
    """Evaluate and print the run or model `name`. Returns the exit code, 1 if no greedy answer has a score.

    For a run, `config` replaces all sections of `run_config` except [model]. For a model, `run_config` is None. If
    `samples` is 0, there is no pass@k. Raises `ConfigError`, `TaskError`, and errors of `checkpoint_weights`.
    """
    plugins.export_path()
    transformers.utils.logging.disable_progress_bar()
    with log_to_stderr(), tempfile.TemporaryDirectory() as aside:
        if run_config is not None:
            config, subject = _load_run(Path(name).resolve(), run_config, config or run_config, version)
        else:
            assert config is not None
            config, subject = _load_model(name, config, Path(aside))
        with standalone.reward_models(config) as models:
            rewards = Rewards(config.reward, models)
            answers = asyncio.run(_answers(config, subject, rewards, samples))
    result = _result(config, subject, samples, answers)
    echo(*json.dumps(result, indent=2).split("\n")) if as_json else _print(result)
    return 0 if result["accuracy"]["mean"] is not None else 1


def _load_run(run: Path, run_config: Config, config: Config, version: int | None) -> tuple[Config, Subject]:
    path = model_path(run_config, run)
    config = structs.replace(config, model=run_config.model)
    if version == 0:
        return config, Subject(run.name, 0, path, weights.model_weights(path, run_config.model.dtype))
    policy = weights.checkpoint_weights(run_config, run, version)
    return config, Subject(run.name, policy.version, path, policy.tensors)


def _load_model(name: str, config: Config, aside: Path) -> tuple[Config, Subject]:
    config = structs.replace(config, model=structs.replace(config.model, path=name))
    if faults := [finding.text for finding in folders.model(config) if finding.state in ("error", "not here")]:
        raise ConfigError("\n".join(faults))
    path = model_path(config, aside)
    if name == BUILTIN:
        tiny.make(config, Path(path))
    return config, Subject(name, 0, path, weights.model_weights(path, config.model.dtype))


async def _answers(config: Config, subject: Subject, rewards: Rewards, samples: int) -> list[list[ScoredAnswer]]:
    """Return a list for each held-out prompt, with the greedy answer first and then the samples."""
    tokenizer = Tokenizer(subject.path, config.model.clock)
    task = tasks.build(config.task, config.seed, tokenizer)
    prompts = task.held_out(config.evaluation.prompts)
    if not prompts:
        raise TaskError("the task has no held-out prompts")
    await rewards.start(task.sources())
    try:
        async with standalone.engine(config, "eval", subject.path, subject.version, subject.tensors) as engine:
            player = build.player(config, engine, subject.path, tokenizer)
            queue = _AnswerQueue(config, player, rewards, len(prompts) * (1 + samples))
            greedy = build.sampling(config).greedy
            kinds = [greedy, *[build.sampling(config)] * samples]
            flat = await asyncio.gather(*(queue.answer(prompt, kind) for prompt in prompts for kind in kinds))
            if player.agents is not None:
                await player.agents.close()
    finally:
        await rewards.close()
    return [list(flat[begin : begin + len(kinds)]) for begin in range(0, len(flat), len(kinds))]


class _AnswerQueue:
    def __init__(self, config: Config, player: Player, rewards: Rewards, total: int) -> None:
        self._player, self._rewards = player, rewards
        self._limit = stop.load_limit(config.rollout.limit, config.rollout.max_tokens)
        self._places = asyncio.Semaphore(config.rollout.in_flight)
        self._total, self._done, self._logged_at = total, 0, time.monotonic()

    async def answer(self, prompt: Prompt, sampling: Sampling) -> ScoredAnswer:
        async with self._places:
            try:
                limited = sampling._replace(max_tokens=self._limit(prompt, None))
                episode = await self._player.play(prompt, limited)
                text = episode.text(prompt, self._player.tokenizer, self._player.stop)
                scored = await self._rewards.score(prompt, text)
            except FAILURES as error:
                return ScoredAnswer(None, reason=str(error))
            finally:
                self._done += 1
                if time.monotonic() - self._logged_at > PROGRESS_S:
                    self._logged_at = time.monotonic()
                    log.info("%d of %d answers", self._done, self._total)
        return ScoredAnswer(episode.reward(scored).total, episode.num_sampled, episode.finish == "length")


def pass_at(samples: int, correct: int, k: int) -> float:
    """Return the chance that one of k samples is right: 1 - C(samples - correct, k) / C(samples, k)."""
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def _result(config: Config, subject: Subject, samples: int, answers: Sequence[Sequence[ScoredAnswer]]) -> EvalResult:
    correct_at = config.reward.correct_at
    greedy = [row[0] for row in answers if row[0].reward is not None]
    rewards = [answer.reward for answer in greedy if answer.reward is not None]
    failed = [answer.reason for row in answers for answer in row if answer.reward is None]
    scored = [[answer.reward >= correct_at for answer in row[1:] if answer.reward is not None] for row in answers]
    return {
        "model": subject.name,
        "version": subject.version,
        "prompts": len(answers),
        "accuracy": estimate([float(reward >= correct_at) for reward in rewards]),
        "samples": samples,
        "temperature": config.rollout.temperature,
        "pass_at": {
            k: estimate([pass_at(len(row), sum(row), k) for row in scored if len(row) >= k]) for k in _ks(samples)
        },
        "reward": _mean(rewards),
        "tokens": _mean([answer.tokens for answer in greedy]),
        "truncated": _mean([answer.truncated for answer in greedy]),
        "failed": len(failed),
        "reasons": dict(Counter(failed).most_common(REASONS)),
    }


def _ks(samples: int) -> list[int]:
    """Return 1, 2, 4, ... below `samples`, and `samples`."""
    return [2**power for power in range(max(samples - 1, 0).bit_length())] + ([samples] if samples else [])


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def estimate(values: Sequence[float]) -> MeanEstimate:
    """Return the mean, and its standard error from the unbiased variance. A single value has no error."""
    return {"mean": _mean(values), "error": pairs.standard_error(values)}


def _print(result: EvalResult) -> None:
    rows = table("", "", "", "")
    rows.add_row(result["model"], "", "", f"version {result['version']}, {result['prompts']} held-out prompts")
    rows.add_row("accuracy", *_numbers(result["accuracy"]), "greedy")
    sampling_remark = f"{result['samples']} samples each, temperature {result['temperature']:g}"
    for k, estimate in result["pass_at"].items():
        rows.add_row(f"pass@{k}", *_numbers(estimate), sampling_remark)
    for name, remark in (("reward", "mean, greedy"), ("tokens", "mean, greedy"), ("truncated", "share, greedy")):
        value = result[name]
        rows.add_row(name, "-" if value is None else f"{value:.3f}", "", remark)
    console().print(rows)
    for reason, count in result["reasons"].items():
        echo(f"{count} of {result['failed']} answers without a score: {reason}")


def _numbers(estimate: MeanEstimate) -> tuple[str, str]:
    mean, error = estimate["mean"], estimate["error"]
    return "-" if mean is None else f"{mean:.3f}", "" if error is None else f"± {error:.3f}"
