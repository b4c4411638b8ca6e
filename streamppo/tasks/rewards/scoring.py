"""Selects a run's scorers for each trajectory, and combines their scores to one reward."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from streamppo.config import reward as choices
from streamppo.errors import RewardFailed, TaskError
from streamppo.tasks import plugins, user_traceback
from streamppo.tasks.coroutines import EagerCoroutine, TooLate, within
from streamppo.tasks.dataset_files import Row
from streamppo.tasks.rewards import signature
from streamppo.tasks.rewards.batcher import Batcher, CallBatch, CallOne
from streamppo.tasks.rewards.guard import Guard
from streamppo.tasks.rewards.outcome import Outcome, number, too_late
from streamppo.tasks.rewards.processes import pool
from streamppo.tasks.rewards.processes.pool import Pool
from streamppo.tasks.rewards.signature import Columns, Texts
from streamppo.types import Prompt, Reward, ScoredText, ScorerReport

if TYPE_CHECKING:
    from streamppo.tasks.rewards.reward_model import Models
    from streamppo.tasks.rewards.service import Service

MODEL_BATCHES = 2
"""Number of concurrent batches of a reward model: while one is scored, the next is already sent."""

NAMED = "; the source of a row is its column data_source, if it has one"

ScorerGuard: TypeAlias = Guard[[ScoredText, Row], Outcome]

log = logging.getLogger(__name__)


class Rewards:
    """Scores trajectories after `start` has loaded the scorers. `models` are the actors of `reward_model.create`."""

    def __init__(self, config: choices.Reward, models: Models = MappingProxyType({})) -> None:
        self._scorers = config.scorers
        self._selected: dict[str, list[str]] = {}
        self._several = len(self._scorers) > 1
        self._combine_as = config.combine
        self._models = models
        self._guards: dict[str, ScorerGuard] = {}
        self._pools: dict[str, Pool] = {}
        self._services: dict[str, Service] = {}

    async def start(self, sources: set[str], *, every: bool = False) -> None:
        """Load every scorer. `every`: no prompt has a source outside `sources`. Raises `TaskError`, and as `match`."""
        self.match(sources, every=every)
        for name, scorer in self._scorers.items():
            self._guards[name] = await self._build(name, scorer)

    async def score(self, prompt: Prompt, text: ScoredText) -> Reward:
        """Return the weighted sum of the scores. Raises `RewardFailed` if a scorer fails, or if no scorer applies."""
        names = self.scorers_of(prompt.source)
        if not names:
            return Reward()
        if len(names) == 1:
            # The most common case needs no separate asyncio task.
            outcomes = [await self._guards[names[0]].score(text, prompt.columns)]
        else:
            outcomes = await asyncio.gather(*(self._guards[name].score(text, prompt.columns) for name in names))
        scored: list[tuple[str, Reward]] = []
        for name, outcome in zip(names, outcomes, strict=True):
            if outcome.reason:
                raise RewardFailed(f"{name}: {outcome.reason}" if self._several else outcome.reason)
            if outcome.reward:
                scored.append((name, outcome.reward))
        if not scored:
            raise RewardFailed(f"{', '.join(names)} returned None: no reward applies to this trajectory")
        reward = self._combine(scored)
        try:
            number(reward.total)
        except ValueError as error:
            raise RewardFailed(f"the sum of {', '.join(name for name, _ in scored)} is {error}") from error
        return reward

    def report(self) -> tuple[ScorerReport, ...]:
        return tuple(
            guard.report(self._pools[name].respawns if name in self._pools else 0)
            for name, guard in self._guards.items()
        )

    async def close(self) -> None:
        for started in self._pools.values():
            await started.close()
        for service in self._services.values():
            await service.close()

    def scorers_of(self, source: str) -> list[str]:
        """Return the scorers of a data source. Raises `TaskError` if there are scorers, but none for this source."""
        if source not in self._selected:
            self._selected[source] = [
                name for name, scorer in self._scorers.items() if not scorer.sources or source in scorer.sources
            ]
        if self._scorers and not self._selected[source]:
            raise TaskError(f"no scorer of [reward.scorers] is for the data source {source!r}{NAMED}")
        return self._selected[source]

    def match(self, sources: Collection[str], *, every: bool) -> None:
        """Raise `TaskError` if a source has no scorer, or, with `every`, if a scorer is for none of the sources."""
        for source in sorted(sources):
            self.scorers_of(source)
        for name, scorer in self._scorers.items() if every else ():
            if scorer.sources and not set(scorer.sources) & set(sources):
                raise TaskError(
                    f"the scorer {name!r} would never be called: its sources are {', '.join(map(repr, scorer.sources))}"
                    f", and those of the prompts are {', '.join(map(repr, sorted(sources)))}{NAMED}"
                )

    def _combine(self, scored: list[tuple[str, Reward]]) -> Reward:
        if not self._several and self._scorers[scored[0][0]].weight == 1.0:
            return scored[0][1]
        scorers = [self._scorers[name] for name, _ in scored]
        # With `model_first`, functions get the weight 0 if there is a scorer of another kind.
        models_only = self._combine_as == "model_first" and any(map(_is_model, scorers))
        weights = [scorer.weight if _is_model(scorer) or not models_only else 0.0 for scorer in scorers]
        components: dict[str, float] = {}
        for name, reward in scored:
            prefix = f"{name}/" if self._several else ""
            components |= {f"{prefix}{key}": value for key, value in reward.components.items()}
            if self._several:
                components[name] = reward.total
        rewards = [reward for _, reward in scored]
        return Reward(
            score=sum(weight * reward.score for weight, reward in zip(weights, rewards, strict=True)),
            tokens=_weighted_sum(weights, [reward.tokens for reward in rewards]),
            turns=_weighted_sum(weights, [reward.turns for reward in rewards]),
            components=components,
            explanation="\n".join(
                f"{name}: {reward.explanation}" if self._several else reward.explanation
                for name, reward in scored
                if reward.explanation
            ),
        )

    async def _build(self, name: str, scorer: choices.Scorer) -> ScorerGuard:
        match scorer:
            case choices.FunctionScorer():
                call, size, places = await self._function(name, scorer)
            case choices.ModelScorer():
                log.info("%s is the reward model %s", name, scorer.path)
                size, places = scorer.batch_size, MODEL_BATCHES
                # Imported here so that checking a configuration needs no Ray.
                from streamppo.tasks.rewards import reward_model

                call = _in_time(await reward_model.connect(self._models[name], scorer), scorer.timeout_s)
            case choices.ServiceScorer() | choices.JudgeScorer():
                log.info("%s is %s", name, scorer.url)
                # Imported here because it takes 0.1 s and most runs do not need it.
                from streamppo.tasks.rewards.service import Service

                service = self._services[name] = Service(scorer)
                call, size, places = _in_time(service.call, scorer.timeout_s), 1, scorer.concurrency
        return Guard(name, scorer, Batcher(call, size, places) if size > 1 else _call_single(call))

    async def _function(self, name: str, scorer: choices.FunctionScorer) -> tuple[CallBatch, int, int]:
        """Load a function; return (its call, trajectories per call, number of concurrent calls)."""
        reward_signature, in_actor = detect(scorer)
        log.info("%s is %s", name, describe(scorer, reward_signature, in_actor=in_actor))
        size = scorer.batch_size if reward_signature.style.is_batched else 1
        if in_actor:
            reward = signature.load(scorer.function, scorer.arguments)
            call = _in_time(partial(signature.call_async, reward), scorer.timeout_s)
            return call, size, scorer.concurrency
        started = self._pools[name] = await pool.start(scorer, reward_signature.is_async)
        return started.call, size, scorer.concurrency if reward_signature.is_async else scorer.processes


def detect(scorer: choices.FunctionScorer) -> tuple[signature.Signature, bool]:
    """Return a function's signature, and True if the function runs in the actor. Raises `TaskError`."""
    function = plugins.load(scorer.function, "reward.function")
    reward_signature = signature.detect_signature(function, scorer.function, scorer.arguments)
    is_safe = plugins.is_ours(function) and reward_signature.is_async
    in_actor = scorer.where == "actor" or (scorer.where == "auto" and is_safe)
    if in_actor and not reward_signature.is_async:
        raise TaskError(f'reward.function {scorer.function!r} is sync: it would block the actor (where = "actor")')
    return reward_signature, in_actor


def describe(scorer: choices.FunctionScorer, reward_signature: signature.Signature, *, in_actor: bool) -> str:
    """Describe the result of `detect` for the log."""
    kind = f"{'async' if reward_signature.is_async else 'sync'}, {reward_signature.style.name} signature"
    return f"{scorer.function} ({kind}), in {'the actor' if in_actor else 'processes of its own'}"


def _is_model(scorer: choices.Scorer) -> bool:
    return not isinstance(scorer, choices.FunctionScorer)


def _in_time(call: CallBatch, timeout_s: float) -> CallBatch:
    """Bound `call` by `timeout_s`. Calls in separate processes are bounded by their pool instead."""

    async def bounded(texts: Texts, columns: Columns) -> tuple[Outcome, ...]:
        scoring, loop = EagerCoroutine(call(texts, columns)), asyncio.get_running_loop()
        end_s = scoring.start_s + timeout_s
        if scoring.result is not None:
            return scoring.result if loop.time() <= end_s else (too_late(timeout_s),) * len(texts)
        try:
            return await within(asyncio.timeout_at(end_s), scoring)
        except TooLate as error:
            return (too_late(timeout_s, user_traceback.locate(error)),) * len(texts)

    return bounded


def _call_single(call: CallBatch) -> CallOne:
    async def call_single(text: ScoredText, columns: Row) -> Outcome:
        return (await call((text,), (columns,)))[0]

    return call_single


def _weighted_sum(weights: list[float], columns: list[tuple[float, ...]]) -> tuple[float, ...]:
    """Return the weighted sum of the nonempty columns, which have equal lengths."""
    pairs = [(weight, column) for weight, column in zip(weights, columns, strict=True) if column]
    return tuple(sum(weight * column[i] for weight, column in pairs) for i in range(len(pairs[0][1]))) if pairs else ()
