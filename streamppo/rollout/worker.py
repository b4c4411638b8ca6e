"""The work of one rollout actor: it keeps up to `rollout.in_flight` trajectories under way, one for each ticket.

consumes     tickets of the queue, requested with each delivery, or in a separate call if a delivery brings too few
produces     scored trajectories and failures, in the order in which they finish
waits for    tickets, which the queue's admission rule limits; never for the learner, another actor or a batch
unblocks     the queue's next take

    ticket -> prompt -> generate -> score -> deliver      one coroutine for each trajectory in flight: `_sample`
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, NamedTuple

from msgspec import structs

from streamppo import process
from streamppo.config.sections import Config
from streamppo.errors import EnvironmentFailed, RewardFailed, TaskError, TeacherFailed
from streamppo.process import phase
from streamppo.queue.batch_source import BEAT_S
from streamppo.queue.shards.shards import Shards
from streamppo.rollout import build, random_numbers, teacher
from streamppo.rollout.engine import Sampling
from streamppo.rollout.episode import Episode
from streamppo.rollout.player import FAILURES, Player
from streamppo.rollout.segment_cuts import cut_for, max_in_flight
from streamppo.rollout.segment_writer import SegmentWriter
from streamppo.rollout.teacher import TeacherClient
from streamppo.rollout.weight_sync import WeightSync
from streamppo.tasks import stop as stops
from streamppo.tasks import task as tasks
from streamppo.tasks.rewards.scoring import Rewards
from streamppo.tasks.task import Task
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.types import (
    EngineReport,
    EvaluationReport,
    Failure,
    Identity,
    Prompt,
    Reward,
    Sample,
    ScoredText,
    Ticket,
    Trajectory,
    decode,
    encode,
    utf8_safe,
)
from streamppo.weights import adapters, factory
from streamppo.weights.content import check

if TYPE_CHECKING:
    from ray.actor import ActorProxy

    from streamppo.queue.actor import QueueActor
    from streamppo.tasks.rewards.reward_model import RewardModel

log = logging.getLogger(__name__)
GATHER_S = 0.05
"""Seconds that a call to the queue waits, so that it covers several trajectories: each call has a fixed cost."""


class GreedyAnswer(NamedTuple):
    """A greedy answer: whether it is correct (None: failed, see `reason`), and its oldest and newest version."""

    correct: bool | None
    oldest: int
    newest: int
    reason: str = ""


async def start(
    config: Config,
    name: str,
    queue: "ActorProxy[QueueActor]",
    reward_models: "Mapping[str, ActorProxy[RewardModel]]",
    model_path: str,
    place: int = 0,
) -> "Worker":
    """Load tokenizer, task and reward, and start engine number `place` with the newest version."""
    tokenizer = Tokenizer(model_path, config.model.clock)
    task = tasks.build(config.task, config.seed, tokenizer)
    for kind, count in task.lengths().items():
        log.info("%d prompts are too long: %s", count, kind)
    for note in task.notes():
        log.warning("%s", note)
    if config.algorithm.curriculum is not None:
        await queue.map_rows.remote(encode(task.row_numbers()))
    rewards = Rewards(config.reward, reward_models)
    await rewards.start(task.sources(), every=True)
    client = await teacher.connect(config.algorithm.teacher, tokenizer)
    puller = build.puller(config, name, queue, factory.ends(config).receiver())
    push, replica = await puller.newer(-1), puller.replica
    await asyncio.to_thread(check, replica.contents, replica.tensors.items())
    source = await asyncio.to_thread(adapters.source, config, model_path)
    tensors, _ = await source.materialize(replica)
    engine = await build.engine(config, name, model_path, push.version, tensors, tokenizer, place=place)
    player = build.player(config, engine, model_path, tokenizer)
    if player.agents is not None:
        await player.agents.start()
    follower = WeightSync(puller, engine, source)
    return Worker(
        config, name, queue, task, player, rewards, follower=follower, teacher=client, shards=Shards.attach(config)
    )


class Worker:
    """Samples trajectories for tickets, and greedy answers for evaluations, with one engine; `start` makes it."""

    def __init__(
        self,
        config: Config,
        name: str,
        queue: "ActorProxy[QueueActor]",
        task: Task,
        player: Player,
        rewards: Rewards,
        *,
        follower: WeightSync,
        teacher: TeacherClient | None = None,
        shards: Shards | None = None,
    ) -> None:
        self._config, self._name, self._queue, self._shards = config, name, queue, shards
        self._task, self._player, self._rewards, self._teacher = task, player, rewards, teacher
        self._follower, self._engine = follower, follower.engine
        self._has_sources = len(task.sources()) > 1
        self._sampling = build.sampling(config)
        self._limit = stops.load_limit(config.rollout.limit, self._sampling.max_tokens)
        self._free_places, self._call_number = config.rollout.in_flight, 0
        self._needs_tickets = asyncio.Event()
        self._needs_tickets.set()
        self._num_sharing = config.rollout.actors
        self._under_way: set[SegmentWriter] = set()
        self._finished: list[Trajectory | Failure] = []
        self._delivery_due = asyncio.Event()
        self._trajectories = 0
        self._latest_sample: tuple[ScoredText, float, int] | None = None

    @property
    def version(self) -> int:
        return self._engine.version

    async def run(self) -> None:
        """Sample, and swap to new versions, in an endless loop that only an exception ends."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.follow())
            group.create_task(self._deliver(group))
            if self._config.queue.segments:
                group.create_task(self._report_cuts())
            await self._issue(group)

    async def follow(self) -> None:
        """Swap to new versions for evaluations, in an endless loop, without sampling for tickets."""
        await asyncio.gather(self._beat(), self._follower.run())

    async def _beat(self) -> None:
        """Send heartbeats, in an endless loop: during a swap, an actor without free places makes no other call."""
        while True:
            sampling = await self._queue.beat.remote(self._name)
            if self._config.queue.segments:
                # A batch is divided between the actors, including added ones and configured ones not yet started.
                self._num_sharing = max(sampling, self._config.rollout.actors)
                # A delivery tells a restarted queue up to which version segments were cut.
                self._delivery_due.set()
            await asyncio.sleep(BEAT_S)

    async def _report_cuts(self) -> None:
        """Deliver after every swap, because the learner may wait until all due segments are cut."""
        while True:
            await self._follower.reach(self.version + 1)
            self._delivery_due.set()

    async def _issue(self, group: asyncio.TaskGroup) -> None:
        """In an endless loop, request tickets if a delivery brought too few. The queue answers when it has some."""
        while True:
            await self._needs_tickets.wait()
            await asyncio.sleep(GATHER_S)
            if limit := self._num_requestable:
                answer = await self._queue.issue.remote(self._name, self._engine.version, limit, self._call_number)
                if self._admit(answer, group) < limit:
                    continue
            self._needs_tickets.clear()
            if self._num_requestable:
                # Places have become free meanwhile, so a delivery requests tickets for them.
                self._delivery_due.set()

    @property
    def _num_requestable(self) -> int:
        queue, in_flight = self._config.queue, self._config.rollout.in_flight
        if queue.segments:
            under_way = in_flight - self._free_places
            return max(0, min(self._free_places, max_in_flight(queue.cut_age, self._share) - under_way))
        return self._free_places

    @property
    def _share(self) -> float:
        return self._config.queue.batch_size / self._num_sharing

    def _aim(self) -> int:
        return self._config.queue.aim(self._follower.admitted_lag)

    def _admit(self, answer: bytes, group: asyncio.TaskGroup) -> int:
        with phase("admit"):
            tickets = decode(answer, tuple[Ticket, ...])
            for ticket in tickets:
                group.create_task(self._sample(ticket))
        with phase("tokenize"):
            # All prompts share one phase: reading the clock for each would cost as much as tokenizing it.
            for number in {ticket.identity.prompt for ticket in tickets}:
                # `play` will raise the same error, which then fails the trajectory.
                with suppress(*FAILURES):
                    self._player.prepare(self._task.prompt(number))
        if tickets and self._config.queue.segments:
            # A delivery tells the queue up to which version this actor, which now has tickets, has cut segments.
            self._delivery_due.set()
        self._free_places -= len(tickets)
        # A retry with the same number gets the same tickets, so the number changes only after tickets have arrived.
        self._call_number += bool(tickets)
        return len(tickets)

    async def _sample(self, ticket: Ticket) -> None:
        episode: Episode | None = None
        first_version, source = self._engine.version, ""
        writer = SegmentWriter(ticket, self._name, self._config, self._hand_over, share=self._share, aim=self._aim)
        self._under_way.add(writer)
        try:
            prompt = self._task.prompt(ticket.identity.prompt)
            source = prompt.source if self._has_sources else ""
            seed = random_numbers.seed_of(self._config.seed, ticket.identity)
            sampling = self._with_length_limit(self._sampling._replace(seed=seed), prompt, ticket.identity)
            episode = await self._player.play(prompt, sampling, writer if self._config.queue.segments else None)
            writer.wait(episode)
            reward, teacher_logprobs = await self._score_and_teach(prompt, episode)
            last = episode.trajectory(writer.identity, self._name, reward, teacher_logprobs, prefix=writer.prefix)
            self._hand_over(structs.replace(last, source=source) if source else last)
            self._trajectories += 1
        except FAILURES as error:
            stage, reason = _stage(error), utf8_safe(error)
            sampled = int(episode.mask[writer.prefix :].sum()) if episode else getattr(error, "tokens", 0)
            failure = Failure(identity=writer.identity, actor=self._name, stage=stage, reason=reason, tokens=sampled)
            self._hand_over(structs.replace(failure, version=first_version, source=source))
        self._under_way.remove(writer)
        self._free_places += 1

    def _with_length_limit(self, sampling: Sampling, prompt: Prompt, identity: Identity | None) -> Sampling:
        limit = self._limit(prompt, identity)
        return sampling if limit == sampling.max_tokens else sampling._replace(max_tokens=limit)

    def _hand_over(self, result: Trajectory | Failure) -> None:
        self._finished.append(result)
        self._delivery_due.set()

    async def _score_and_teach(self, prompt: Prompt, episode: Episode) -> tuple[Reward, bytes]:
        if self._teacher is None:
            return await self._score(prompt, episode), b""
        return await asyncio.gather(self._score(prompt, episode), self._teacher.score(episode))

    async def _score(self, prompt: Prompt, episode: Episode) -> Reward:
        begin = time.perf_counter()
        text = episode.text(prompt, self._player.tokenizer, self._player.stop)
        scored = await self._rewards.score(prompt, text)
        process.add("reward", time.perf_counter() - begin)
        reward = episode.reward(scored)
        self._latest_sample = text, reward.total, int(episode.versions[0])
        return reward

    async def _deliver(self, group: asyncio.TaskGroup) -> None:
        """Deliver all new results, in an endless loop. Answers bring tickets, unless `_issue` is requesting some."""
        while True:
            await self._delivery_due.wait()
            await asyncio.sleep(GATHER_S)
            self._delivery_due.clear()
            with phase("deliver"):
                # All segments that were cut for this version are in this delivery or an earlier one.
                version = self._cut_waiting()
                results, self._finished = self._finished, []
                trajectories = tuple(result for result in results if isinstance(result, Trajectory))
                failures = tuple(result for result in results if isinstance(result, Failure))
                delivery = b"" if self._shards else encode(trajectories)
            if self._shards:
                delivery = encode(await self._shards.store(trajectories))
            limit = 0 if self._needs_tickets.is_set() else self._num_requestable
            request = {"engine_version": self.version, "limit": limit, "call": self._call_number}
            answer = await self._queue.deliver.remote(self._name, version, delivery, encode(failures), **request)
            if self._admit(answer, group) < limit:
                self._needs_tickets.set()

    def _cut_waiting(self) -> int:
        """Cut the waiting completions that are due; return the version up to which all due segments are cut."""
        if self._config.queue.segments is None:
            return self.version
        oldest = [writer.cut_waiting(self.version) for writer in self._under_way]
        waiting = (version for version in oldest if version is not None)
        return cut_for(self.version, waiting, self._config.queue.flow_lag)

    async def evaluate(self, first: int, step: int, min_version: int) -> EvaluationReport:
        """Answer the held-out prompts `first`, `first` + `step`, ... greedily, when the engine holds `min_version`."""
        await self._follower.reach(min_version)
        prompts = self._task.held_out(self._config.evaluation.prompts)[first::step]
        answers = await asyncio.gather(*(self._answer(prompt) for prompt in prompts))
        reasons = [answer.reason for answer in answers if answer.correct is None]
        return EvaluationReport(
            actor=self._name,
            correct=sum(answer.correct is True for answer in answers),
            count=sum(answer.correct is not None for answer in answers),
            failed=len(reasons),
            min_version=min((answer.oldest for answer in answers), default=min_version),
            max_version=max((answer.newest for answer in answers), default=min_version),
            reason=reasons[0] if reasons else "",
        )

    async def _answer(self, prompt: Prompt) -> GreedyAnswer:
        try:
            episode = await self._player.play(prompt, self._with_length_limit(self._sampling.greedy, prompt, None))
            correct = (await self._score(prompt, episode)).total >= self._config.reward.correct_at
        except FAILURES as error:
            return GreedyAnswer(None, self.version, self.version, utf8_safe(f"{_stage(error)}: {error}"))
        return GreedyAnswer(correct, int(episode.versions.min()), int(episode.versions.max()))

    def report(self) -> EngineReport:
        return EngineReport(
            **self._engine.usage()._asdict(),
            actor=self._name,
            version=self.version,
            trajectories=self._trajectories,
            push_ms=self._follower.push_ms,
            checksum=self._follower.digest,
            context=self._player.contexts.tokens,
            context_reused=self._player.contexts.reused,
            scorers=(*self._rewards.report(), *([self._teacher.report()] if self._teacher else [])),
            too_long=self._task.lengths(),
            stalls=self._player.stalls(),
            agents=dict(self._player.agents.counts) if self._player.agents else {},
            phases=process.phase_times(),
            sample=_display_sample(*self._latest_sample) if self._latest_sample else None,
        )


def _stage(error: Exception) -> Literal["engine", "environment", "reward", "teacher", "task"]:
    match error:
        case RewardFailed():
            return "reward"
        case TeacherFailed():
            return "teacher"
        case EnvironmentFailed():
            return "environment"
        case TaskError():
            return "task"
        case _:
            return "engine"


def _display_sample(text: ScoredText, reward: float, version: int) -> Sample:
    prompt = text.messages[-1].text if text.messages else text.prompt
    prompt_end, completion = utf8_safe(prompt[-Sample.LENGTH :]), utf8_safe(text.completion[: Sample.LENGTH])
    return Sample(prompt=prompt_end, completion=completion, reward=reward, version=version)
