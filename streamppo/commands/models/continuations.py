"""`streamppo try`: lets versions of a run continue an archived completion from a token, in this process.

seeds of continuations    seed_of_retry(seed of the archived completion, 0 .. n - 1), the same for each version
seed of the repetition    the seed of the archived completion, so that its version samples the same tokens again
"""

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import transformers
from msgspec import structs
from torch import Tensor

from streamppo.commands import replay, standalone, trial, versions
from streamppo.commands.console import console, echo, log_to_stderr, table
from streamppo.commands.models import archived, weights
from streamppo.commands.models.archived import ArchivedCompletion
from streamppo.commands.models.eval import estimate
from streamppo.commands.models.weights import Weights
from streamppo.commands.trial import Trial, TrialQuestion, TrialSample, VersionTrial
from streamppo.config.rollout import EmbeddedEngine
from streamppo.config.sections import Config, model_path
from streamppo.driver import inputs
from streamppo.errors import JournalError, RunError
from streamppo.learner.checkpoint import distcp, manifest
from streamppo.learner.model import hf_files
from streamppo.queue.rules.state import queue_settings
from streamppo.rollout import build, random_numbers
from streamppo.rollout.continuation import Continuation
from streamppo.rollout.engine import Engine, Sampling
from streamppo.rollout.episode import Episode
from streamppo.rollout.player import FAILURES, Player
from streamppo.tasks import plugins, stop
from streamppo.tasks import task as tasks
from streamppo.tasks.rewards.scoring import Rewards
from streamppo.tasks.task import Task
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.types import Identity, Ints, Message, Prompt


class VersionWeights(NamedTuple):
    """A version: its weights, its checkpoint at `path` or None, and the version `begin` from which it was replayed."""

    policy: Weights
    path: Path | None
    begin: int


class SampledContinuation(NamedTuple):
    """A continuation, and its episode (None if the continuation failed)."""

    result: TrialSample
    episode: Episode | None


def try_versions(run: Path, question: TrialQuestion, *, as_json: bool) -> int:
    """Sample and print continuations. Returns the exit code, 1 if all failed. Raises the errors of `find`."""
    with log_to_stderr():
        result = find(run, question)
    if as_json:
        echo(json.dumps(msgspec.to_builtins(result)))
    else:
        echo(*trial.sentences(result))
        rows = table("", *(f"version {version.version}" for version in result.versions))
        for number, cells in enumerate(trial.cells(result)):
            rows.add_row(f"{number}", *cells)
        console().print(rows)
    return 0 if any(continuation.tokens for version in result.versions for continuation in version.continuations) else 1


def find(run: Path, question: TrialQuestion) -> Trial:
    """Sample the continuations that `question` asks for.

    Raises `ConfigError` for a question that does not suit the run, `JournalError` if a version or the completion was
    not kept, `RunError` if the prompt or the environment has changed, and the errors of `versions.remake`.
    """
    plugins.export_path()
    transformers.utils.logging.disable_progress_bar()
    pasts = [versions.read_past(run, version) for version in question.versions]
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
        subjects = [_subject(subject_past, config, Path(aside)) for subject_past in pasts]
        with standalone.reward_models(config) as models:
            rewards = Rewards(config.reward, models)
            continuations = _Continuations(config, model_path(config, run), question, source, rewards)
            return asyncio.run(continuations.run(subjects, replayable=isinstance(past.rollout.engine, EmbeddedEngine)))


def _embedded(config: Config, rows: int) -> Config:
    rollout, engine = config.rollout, config.rollout.engine
    embedded = structs.replace(
        rollout,
        engine=engine if isinstance(engine, EmbeddedEngine) else EmbeddedEngine(),
        gpus=rollout.gpus if torch.cuda.is_available() else 0,
        slots=min(rollout.slots, rows),
    )
    return structs.replace(config, rollout=embedded)


def _subject(past: versions.Past, config: Config, aside: Path) -> VersionWeights:
    version, start = past.version, model_path(config, past.run)
    if not version:
        tensors = weights.model_weights(start, config.model.dtype)
        return VersionWeights(Weights(0, past.digests[0], tensors, {}), None, 0)

    def use(begin: Path | None) -> VersionWeights:
        number, path = manifest.version_of(begin), begin
        if path is None or number != version:
            versions.remake(past, begin, aside / f"{version}")
            path = aside / f"{version}" / f"{version:08d}"
        return VersionWeights(weights.weights_in(path, config, start, past.history), path, number)

    return replay.from_checkpoint(lambda: versions.newest_whole(past), use)


class _Continuations:
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
        config, question, source = self._config, self._question, self._source
        task = tasks.build(config.task, config.seed, self._tokenizer)
        prompt = self._prompt(task)
        await self._rewards.start(task.sources())
        try:
            trials = [await self._version(subject, prompt, replayable=replayable) for subject in subjects]
        finally:
            await self._rewards.close()
        tokens = np.zeros(0, np.int32) if source is None else source.recorded.tokens
        value = float(source.values[question.at]) if source else float("nan")
        pairs = [
            second.reward - first.reward
            for first, second in zip(trials[0].continuations, trials[-1].continuations, strict=True)
            if first.reward is not None and second.reward is not None
        ]
        difference = estimate(pairs if len(trials) > 1 else [])
        return Trial(
            prompt=self._spell(source.recorded.prompt_tokens) if source else self._tokenizer.render(prompt),
            at=question.at,
            before=self._spell(tokens[: question.at]),
            versions=tuple(trials),
            number=question.number,
            sample=source and source.identity.sample,
            attempt=source and source.identity.attempt,
            update=source and source.update,
            archived=self._spell(tokens[question.at :]),
            reward=source and source.reward,
            recorded_value=None if np.isnan(value) else value,
            difference=difference["mean"],
            difference_error=difference["error"],
        )

    def _prompt(self, task: Task) -> Prompt:
        """Return the prompt by its number or its text. In a chat, a text is a user message after the system message."""
        if (number := self._question.number) is not None:
            return task.prompt(number)
        example, text = task.prompt(0), self._question.prompt
        system = tuple(message for message in example.messages if message.role == "system")
        messages = (*system, Message(role="user", content=text)) if example.messages else ()
        return structs.replace(example, text=text, columns={}, messages=messages)

    async def _version(self, subject: VersionWeights, prompt: Prompt, *, replayable: bool) -> VersionTrial:
        """Sample with a version. A version that sampled the archived completion also samples that completion again."""
        policy, source, question = subject.policy, self._source, self._question
        task = queue_settings(self._config).task
        identity = source.identity if source else Identity(task=task, prompt=question.number or 0, sample=0)
        seed = random_numbers.seed_of(self._config.seed, identity)
        seeds = [random_numbers.seed_of_retry(seed, number) for number in range(question.n)]
        proves = replayable and source is not None and source.sampled_by(policy.version)
        limit = self._limit(prompt, source and source.identity)
        sampling = build.sampling(self._config)._replace(max_tokens=limit)
        async with standalone.engine(self._config, "try", self._model, policy.version, policy.tensors) as engine:
            samplings = [sampling._replace(seed=number) for number in [*seeds, *[seed] * proves]]
            played = await asyncio.gather(*(self._play(engine, prompt, seeded) for seeded in samplings))
        repetition = played.pop().episode if proves else None
        rewards = [play.result.reward for play in played if play.result.reward is not None]
        mean = estimate(rewards)
        value, episode = None, next((play.episode for play in played if play.episode), None)
        if episode and subject.path and self._config.algorithm.has_critic:
            context = np.concatenate([episode.prompt_tokens, episode.tokens[: question.at]])
            value = critic_value(self._config, self._model, subject.path, policy, context)
        differs = _first_difference(source, repetition) if source and repetition else None
        return VersionTrial(
            version=policy.version,
            begin=subject.begin,
            mean=mean["mean"],
            error=mean["error"],
            value=value,
            continuations=tuple(play.result for play in played),
            is_same=(repetition is not None and differs is None) if proves else None,
            differs=differs,
        )

    def _spell(self, tokens: Ints) -> str:
        return self._tokenizer.spell(tokens.tolist())

    async def _play(self, engine: Engine, prompt: Prompt, sampling: Sampling) -> SampledContinuation:
        at, source = self._question.at, self._source
        sampler = Continuation(engine, source.recorded, at, self._completes) if source else engine
        scored = bool(self._config.reward.scorers)
        player = Player(sampler, self._tokenizer, self._config.environment, self._stop, scored=scored)
        try:
            episode = await player.play(prompt, sampling)
        except FAILURES as error:
            return SampledContinuation(TrialSample(None, reason=str(error)), None)
        if isinstance(sampler, Continuation) and not sampler.has_begun:
            raise RunError(f"the environment ended before token {at}, unlike in the run")
        text = self._spell(episode.tokens[at:])
        result = TrialSample(None, int(episode.mask[at:].sum()), text, episode.finish)
        try:
            scored_text = episode.text(prompt, self._tokenizer, self._stop)
            reward = episode.reward(await self._rewards.score(prompt, scored_text)).total
        except FAILURES as error:
            return SampledContinuation(structs.replace(result, reason=str(error)), episode)
        return SampledContinuation(structs.replace(result, reward=reward), episode)


def _first_difference(source: ArchivedCompletion, repetition: Episode) -> int | None:
    """Return the position of the first token that differs or is missing in one completion; None if all are equal."""
    first, second = source.recorded.tokens, repetition.tokens
    shorter = min(len(first), len(second))
    if (differences := np.flatnonzero(first[:shorter] != second[:shorter])).size:
        return int(differences[0])
    return None if len(first) == len(second) else shorter


@torch.no_grad()
def critic_value(config: Config, start: str, path: Path, policy: Weights, context: Ints) -> float:
    """Return the critic's value after the tokens `context`. Critic and `policy` are in the checkpoint at `path`.

    The run began with the model `start`. The value is in float32. Raises `CheckpointError` and `ModelError`.
    """
    critic = config.algorithm.critic.model
    if critic == "head":
        lm = hf_files.read(start, "eager")
        for name, parameter in lm.named_parameters():
            parameter.copy_(policy.tensors[name])
        transformer: Any = lm.base_model
    else:
        transformer = hf_files.critic(critic, start, "eager").transformer.float()
    width = transformer.config.get_text_config().hidden_size
    saved = {"value_head.weight": torch.empty(1, width), "value_head.bias": torch.empty(1)}
    named = {} if critic == "head" else dict(transformer.named_parameters())
    parameters = {f"critic.{name}": parameter for name, parameter in named.items()}
    saved |= {name: torch.empty(parameter.shape) for name, parameter in parameters.items()}
    state: dict[str, dict[str, Tensor]] = {"policy": saved}
    distcp.load(state, path, alone=True)
    for name, parameter in parameters.items():
        parameter.copy_(saved[name])
    hidden_1LD = transformer(input_ids=torch.from_numpy(context)[None].long(), use_cache=False).last_hidden_state
    return float(hidden_1LD[0, -1] @ saved["value_head.weight"][0] + saved["value_head.bias"][0])
