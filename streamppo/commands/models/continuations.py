"""`streamppo try`: versions of a run continue an archived completion from a token, in an engine in this process.

numbers of a continuation   seed_of_retry(seed of the archived completion, 0 .. n - 1): each version has the same
numbers of the proof        the archived completion's own: at lag 0 its version samples it again, token for token
"""

import asyncio
import json
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
import transformers
from msgspec import structs

from streamppo.commands import standalone, trial, versions
from streamppo.commands.console import console, echo, log_to_stderr, table
from streamppo.commands.models import archived, critic, weights
from streamppo.commands.models.archived import ArchivedCompletion
from streamppo.commands.models.eval import estimate
from streamppo.commands.models.weights import Weights
from streamppo.commands.trial import Continued, Trial, TrialQuestion, VersionTrial
from streamppo.config.rollout import EmbeddedEngine
from streamppo.config.sections import Config, model_path
from streamppo.driver import inputs
from streamppo.errors import JournalError, RunError
from streamppo.queue.rules.state import queue_settings
from streamppo.rollout import build, random_numbers
from streamppo.rollout.continuation import Continuation
from streamppo.rollout.engine import Engine, Sampling
from streamppo.rollout.episode import FAILURES, Episode, Player
from streamppo.tasks import plugins, stop
from streamppo.tasks import task as tasks
from streamppo.tasks.rewards.scoring import Rewards
from streamppo.tasks.task import Task
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.types import Identity, Ints, Message, Prompt


class VersionWeights(NamedTuple):
    """A version: its weights, the checkpoint `path` (None of version 0), and the version that it was replayed from."""

    policy: Weights
    path: Path | None
    begin: int


class Played(NamedTuple):
    """A continuation, and its episode if it did not fail."""

    shown: Continued
    episode: Episode | None


def try_versions(run: Path, question: TrialQuestion, *, as_json: bool) -> int:
    """Sample the continuations and print them; exit code 1 if there are none. Raises the errors of `find`."""
    with log_to_stderr():
        result = find(run, question)
    if as_json:
        echo(json.dumps(msgspec.to_builtins(result)))
    else:
        echo(*trial.sentences(result))
        rows = table("", *(f"version {one.version}" for one in result.versions))
        for number, cells in enumerate(trial.cells(result)):
            rows.add_row(f"{number}", *cells)
        console().print(rows)
    return 0 if any(one.tokens for version in result.versions for one in version.continuations) else 1


def find(run: Path, question: TrialQuestion) -> Trial:
    """Have each version continue a completion.

    Raises `ConfigError` for a question that this run cannot answer; `JournalError` for a version or a completion that
    is not kept; `RunError` if the prompt or the environment has changed; and as `versions.remake` does.
    """
    question.refuse()
    plugins.export_path()
    transformers.utils.logging.disable_progress_bar()
    pasts = [versions.look(run, version) for version in question.versions]
    number = question.number
    source = None if number is None else archived.find(run, number, question.sample, question.attempt)
    if source is None and (question.at or question.sample is not None or question.attempt is not None):
        raise JournalError(f"{run}: no such completion of prompt {number} was trained on; see `inspect --prompt`")
    past = pasts[0].history.at(source.update - 1 if source else max(question.versions))
    config = _embedded(inputs.with_clock(past, run), question.n + 1)
    question.refuse_agent(config)
    if source is not None:
        source.refuse(question.at)
    torch.set_num_threads(config.rollout.threads)
    with tempfile.TemporaryDirectory() as aside:
        subjects = [_subject(one, config, Path(aside)) for one in pasts]
        with standalone.reward_models(config) as models:
            asked = _Continuations(config, model_path(config, run), question, source, Rewards(config.reward, models))
            return asyncio.run(asked.run(subjects, replayable=isinstance(past.rollout.engine, EmbeddedEngine)))


def _embedded(config: Config, rows: int) -> Config:
    """The configuration with an embedded engine of at most `rows` rows, on a GPU if there is one for it."""
    rollout, engine = config.rollout, config.rollout.engine
    chosen = structs.replace(
        rollout,
        engine=engine if isinstance(engine, EmbeddedEngine) else EmbeddedEngine(),
        gpus=rollout.gpus if torch.cuda.is_available() else 0,
        slots=min(rollout.slots, rows),
    )
    return structs.replace(config, rollout=chosen)


def _subject(past: versions.Past, config: Config, aside: Path) -> VersionWeights:
    """The weights of a version: the run's first model, a checkpoint, or a replayed version."""
    version, start = past.version, model_path(config, past.run)
    if not version:
        tensors = weights.model_weights(start, config.model.dtype)
        return VersionWeights(Weights(0, past.digests[0], tensors, {}), None, 0)
    begin = versions.newest_whole(past)
    number = int(begin.name) if begin else 0
    if begin is not None and number == version:
        path = begin
    else:
        folder = aside / f"{version}"
        versions.remake(past, begin, folder)
        path = folder / f"{version:08d}"
    return VersionWeights(weights.weights_in(path, config, start, past.history), path, number)


class _Continuations:
    """The continuations of one question."""

    def __init__(
        self, config: Config, model: str, question: TrialQuestion, source: ArchivedCompletion | None, rewards: Rewards
    ) -> None:
        self._config, self._model, self._question, self._source = config, model, question, source
        self._rewards = rewards
        self._tokenizer = Tokenizer(model, config.model.clock)
        self._stop = build.stop(config, model, self._tokenizer)
        self._completes = self._stop.make_check(self._tokenizer.spell)
        self._limit = stop.load_limit(config.rollout.limit, config.rollout.max_tokens)

    async def run(self, subjects: list[VersionWeights], *, replayable: bool) -> Trial:
        """Sample from every version, one after another. `replayable`: the run's engine draws the same numbers."""
        config, question, source = self._config, self._question, self._source
        task = tasks.build(config.task, config.seed, self._tokenizer)
        prompt = self._prompt(task)
        await self._rewards.start(task.sources())
        try:
            tried = [await self._version(one, prompt, replayable=replayable) for one in subjects]
        finally:
            await self._rewards.close()
        tokens = np.zeros(0, np.int32) if source is None else source.recorded.tokens
        value = float(source.values[question.at]) if source else float("nan")
        pairs = [
            second.reward - first.reward
            for first, second in zip(tried[0].continuations, tried[-1].continuations, strict=True)
            if first.reward is not None and second.reward is not None
        ]
        between = estimate(pairs if len(tried) > 1 else [])
        return Trial(
            prompt=self._spell(source.recorded.prompt_tokens) if source else self._tokenizer.render(prompt),
            at=question.at,
            before=self._spell(tokens[: question.at]),
            versions=tuple(tried),
            number=question.number,
            sample=source and source.identity.sample,
            attempt=source and source.identity.attempt,
            update=source and source.update,
            archived=self._spell(tokens[question.at :]),
            reward=source and source.reward,
            recorded_value=None if np.isnan(value) else value,
            difference=between["mean"],
            difference_error=between["error"],
        )

    def _prompt(self, task: Task) -> Prompt:
        """The prompt with this number, or of this text: a message after the system's if the run's prompts are chats."""
        if (number := self._question.number) is not None:
            return task.prompt(number)
        alike, text = task.prompt(0), self._question.prompt
        system = tuple(one for one in alike.messages if one.role == "system")
        messages = (*system, Message(role="user", content=text)) if alike.messages else ()
        return structs.replace(alike, text=text, columns={}, messages=messages)

    async def _version(self, subject: VersionWeights, prompt: Prompt, *, replayable: bool) -> VersionTrial:
        """The continuations of a version, and the archived completion sampled again if the version sampled it."""
        policy, source, question = subject.policy, self._source, self._question
        task = queue_settings(self._config).task
        identity = source.identity if source else Identity(task=task, prompt=question.number or 0, sample=0)
        seed = random_numbers.seed_of(self._config.seed, identity)
        seeds = [random_numbers.seed_of_retry(seed, number) for number in range(question.n)]
        proves = replayable and source is not None and source.sampled_by(policy.version)
        limit = self._limit(prompt, source and source.identity)
        sampling = build.sampling(self._config)._replace(max_tokens=limit)
        async with standalone.engine(self._config, "try", self._model, policy.version, policy.tensors) as engine:
            asked = [*seeds, *([seed] if proves else [])]
            played = await asyncio.gather(*(self._play(engine, prompt, sampling._replace(seed=one)) for one in asked))
        again = played.pop().episode if proves else None
        rewards = [one.shown.reward for one in played if one.shown.reward is not None]
        mean = estimate(rewards)
        context = next((self._context(one.episode) for one in played if one.episode), None)
        differs = _first_difference(source, again) if source and again else None
        return VersionTrial(
            version=policy.version,
            begin=subject.begin,
            mean=mean["mean"],
            error=mean["error"],
            value=self._value(subject, context),
            continuations=tuple(one.shown for one in played),
            is_same=(again is not None and differs is None) if proves else None,
            differs=differs,
        )

    def _spell(self, tokens: Ints) -> str:
        """The text of tokens, special ones included: the last may be the end token."""
        return self._tokenizer.spell(tokens.tolist())

    def _context(self, episode: Episode) -> Ints:
        return np.concatenate([episode.prompt_tokens, episode.tokens[: self._question.at]])

    def _value(self, subject: VersionWeights, context: Ints | None) -> float | None:
        if context is None or subject.path is None or not self._config.algorithm.has_critic:
            return None
        return critic.value(self._config, self._model, subject.path, subject.policy, context)

    async def _play(self, engine: Engine, prompt: Prompt, sampling: Sampling) -> Played:
        """Play and score one continuation; a failure has a reason, and no reward."""
        at, source = self._question.at, self._source
        sampler = Continuation(engine, source.recorded, at, self._completes) if source else engine
        scored = bool(self._config.reward.scorers)
        player = Player(sampler, self._tokenizer, self._config.environment, self._stop, scored=scored)
        try:
            episode = await player.play(prompt, sampling)
        except FAILURES as error:
            return Played(Continued(None, reason=str(error)), None)
        if isinstance(sampler, Continuation) and not sampler.has_begun:
            raise RunError(f"the environment ended before token {at}, which it did not in the run")
        rest = episode.tokens[at:]
        shown = Continued(None, int(episode.mask[at:].sum()), self._spell(rest), episode.finish)
        try:
            text = episode.text(prompt, self._tokenizer, self._stop)
            reward = episode.reward(await self._rewards.score(prompt, text)).total
        except FAILURES as error:
            return Played(structs.replace(shown, reason=str(error)), episode)
        return Played(structs.replace(shown, reward=reward), episode)


def _first_difference(source: ArchivedCompletion, again: Episode) -> int | None:
    """The first token that differs, or that only one of them has; None if there is none."""
    first, second = source.recorded.tokens, again.tokens
    both = min(len(first), len(second))
    if (others := np.flatnonzero(first[:both] != second[:both])).size:
        return int(others[0])
    return None if len(first) == len(second) else both
