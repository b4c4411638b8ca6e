"""One rollout actor: keeps a set number of trajectories in flight for ever.

consumes     tickets from the queue, versions from the ledger
produces     scored trajectories and failures, in the order in which they finish
waits for    tickets, which the queue's admission rule gives out; never for the learner, another actor or a batch
unblocks     the queue's next take
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec
import ray
from ray.exceptions import ObjectLostError

from streamppo import process
from streamppo.config.sections import Config
from streamppo.errors import EnvironmentFailed, RewardFailed, TaskError, WeightsError
from streamppo.rollout import build
from streamppo.rollout.engine import Engine
from streamppo.rollout.episode import FAILURES, Episode, Player, place
from streamppo.tasks import task as tasks
from streamppo.tasks.rewards.scoring import Rewards
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.types import (
    EngineReport,
    EvaluationReport,
    Failure,
    Prompt,
    Reward,
    Ticket,
    Trajectory,
    decode,
    encode,
    utf8_safe,
)
from streamppo.weights.transport import unpack

PULLS = 3
"""A version is pulled so often at most."""
RETRY_S = 0.5
"""Between two attempts to get weights whose owner has died."""


class Answer(NamedTuple):
    """A greedy answer: whether it is right, or else why it failed; its oldest and its newest version."""

    correct: bool | None
    oldest: int
    newest: int
    reason: str = ""


class RolloutActor:
    """The life of a trajectory is `_sample`, read from top to bottom; one such coroutine for each in flight."""

    def __init__(self, config: bytes, name: str, queue: Any, reward_models: Mapping[str, Any]) -> None:
        self.config = msgspec.msgpack.decode(config, type=Config)
        self.name = name
        self.queue = queue
        self._reward_models = reward_models
        self._sampling = build.sampling(self.config)
        self._greedy = self._sampling._replace(temperature=0.0, top_p=1.0, top_k=0)
        self._finished: list[Trajectory | Failure] = []
        self._delivery_due = asyncio.Event()
        self._free = asyncio.Semaphore(0)
        self._started = asyncio.Event()
        self._swapped = asyncio.Condition()
        self._trajectories = 0
        self._push_ms = 0.0
        self._digest = ""
        build.limit_threads(self.config.rollout.threads)

    @ray.method
    async def start(self, model_path: str) -> int:
        """Load tokenizer, task and reward; start the engine on the first version. Returns that version."""
        self.tokenizer = Tokenizer(model_path)
        self.task = tasks.build(self.config.task, self.config.seed, self.tokenizer)
        for what, count in self.task.lengths().items():
            self._say(f"{count} prompts are too long: {what}")
        self.rewards = Rewards(self.config.reward, self._reward_models)
        await self.rewards.start(self.task.sources())
        push, tensors = await self._pull(-1)
        self.engine: Engine = await build.engine(
            self.config, self.name, model_path, push.version, tensors, say=self._say
        )
        self.player = Player(self.engine, self.tokenizer, self.config.environment)
        self._digest = push.digest
        process.collect_rarely()
        self._started.set()
        return push.version

    @ray.method
    async def run(self) -> None:
        """Generate until the actor is killed. Ends only by an exception: the driver watches for it."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_weights())
            group.create_task(self._deliver())
            await self._fill(group)

    @ray.method
    async def evaluate(self, first: int, step: int, min_version: int) -> bytes:
        """Greedy answers to held-out prompts first, first + step, ..., once the engine is at `min_version`."""
        await self._started.wait()
        async with self._swapped:
            await self._swapped.wait_for(lambda: self.engine.version >= min_version)
        prompts = self.task.held_out(self.config.evaluation.prompts)[first::step]
        answers = await asyncio.gather(*(self._answer(prompt) for prompt in prompts))
        reasons = [answer.reason for answer in answers if answer.correct is None]
        if reasons:
            self._say(f"{len(reasons)} of {len(answers)} held-out prompts failed, the first of them: {reasons[0]}")
        report = EvaluationReport(
            actor=self.name,
            correct=sum(answer.correct is True for answer in answers),
            count=sum(answer.correct is not None for answer in answers),
            failed=len(reasons),
            min_version=min((answer.oldest for answer in answers), default=min_version),
            max_version=max((answer.newest for answer in answers), default=min_version),
        )
        return encode(report)

    @ray.method
    async def report(self) -> bytes:
        """Counters since the start."""
        await self._started.wait()
        usage = self.engine.usage()
        report = EngineReport(
            actor=self.name,
            version=self.engine.version,
            tokens=usage.tokens,
            trajectories=self._trajectories,
            busy_s=usage.busy_s,
            idle_s=usage.idle_s,
            swaps=usage.swaps,
            swap_s=usage.swap_s,
            push_ms=self._push_ms,
            checksum=self._digest,
            restarts=usage.restarts,
            scorers=self.rewards.report(),
            too_long=self.task.lengths(),
        )
        return encode(report)

    def _say(self, text: str) -> None:
        print(f"{self.name}: {text}", flush=True)

    # --- the life of a trajectory ----------------------------------------------------------------------------

    async def _fill(self, group: asyncio.TaskGroup) -> None:
        """One request for as many tickets as there is room for; while it is on its way, more room appears."""
        room, call = self.config.rollout.in_flight, 0
        while True:
            while room == 0 or not self._free.locked():
                await self._free.acquire()
                room += 1
            answer = await self.queue.issue.remote(self.name, self.engine.version, room, call)
            tickets = decode(answer, tuple[Ticket, ...])
            # The next request only after an answer: what was given out to this one comes again until it has arrived.
            call += bool(tickets)
            for ticket in tickets:
                room -= 1
                group.create_task(self._sample(ticket))

    async def _sample(self, ticket: Ticket) -> None:
        try:
            prompt = self.task.prompt(ticket.identity.prompt)
            episode = await self.player.play(prompt, self._sampling)
            reward = await self._score(prompt, episode)
            self._finish(
                Trajectory(
                    identity=ticket.identity,
                    actor=self.name,
                    prompt_tokens=episode.prompt_tokens.tobytes(),
                    tokens=episode.tokens.tobytes(),
                    logprobs=episode.logprobs.tobytes(),
                    versions=episode.versions.tobytes(),
                    mask=episode.mask.tobytes(),
                    finish=episode.finish,
                    versions_known=episode.versions_known,
                    reward=reward.total,
                    token_rewards=place(reward, episode.mask, episode.turn_ends),
                    components=reward.components,
                )
            )
        except FAILURES as error:
            failed = Failure(identity=ticket.identity, actor=self.name, stage=_stage(error), reason=utf8_safe(error))
            self._finish(failed)
        self._free.release()

    async def _score(self, prompt: Prompt, episode: Episode) -> Reward:
        return episode.reward(await self.rewards.score(prompt, episode.text(prompt, self.tokenizer)))

    def _finish(self, result: Trajectory | Failure) -> None:
        self._trajectories += isinstance(result, Trajectory)
        self._finished.append(result)
        self._delivery_due.set()

    async def _deliver(self) -> None:
        """One delivery at a time: while it is on its way, the next one gathers."""
        while True:
            await self._delivery_due.wait()
            self._delivery_due.clear()
            results, self._finished = self._finished, []
            trajectories = tuple(result for result in results if isinstance(result, Trajectory))
            failures = tuple(result for result in results if isinstance(result, Failure))
            await self.queue.deliver.remote(encode(trajectories), encode(failures))

    # --- weights and evaluation ------------------------------------------------------------------------------

    async def _follow_weights(self) -> None:
        """Always the newest version: one that came and went while another was swapped in is never pulled.

        Bytes that were damaged on the way are asked for again; after `PULLS` refusals in a row it is not the way.
        """
        refusals = 0
        while True:
            start = time.perf_counter()
            try:
                push, tensors = await self._pull(self.engine.version)
                start = time.perf_counter()
                await self.engine.update_weights(push.version, tensors)
            except WeightsError as error:
                self._say(f"keeps version {self.engine.version}: {error}")
                refusals += 1
                if refusals == PULLS:
                    raise
                continue
            refusals = 0
            self._push_ms += (time.perf_counter() - start) * 1e3
            self._digest = push.digest
            await self.queue.swapped.remote(self.name, push.version)
            async with self._swapped:
                self._swapped.notify_all()

    async def _pull(self, version: int) -> Any:
        while True:
            found = await self.queue.weights_after.remote(self.name, version)
            if found is None:
                continue
            push, refs = found
            try:
                return await asyncio.to_thread(unpack, push, await asyncio.gather(*refs))
            except ObjectLostError:
                # The learner died with its weights; the one after it brings them again.
                await asyncio.sleep(RETRY_S)

    async def _answer(self, prompt: Prompt) -> Answer:
        try:
            episode = await self.player.play(prompt, self._greedy)
            correct = (await self._score(prompt, episode)).total >= self.config.reward.correct_at
        except FAILURES as error:
            return Answer(None, self.engine.version, self.engine.version, utf8_safe(f"{_stage(error)}: {error}"))
        return Answer(correct, int(episode.versions.min()), int(episode.versions.max()))


def _stage(error: Exception) -> Literal["engine", "environment", "reward", "task"]:
    match error:
        case RewardFailed():
            return "reward"
        case EnvironmentFailed():
            return "environment"
        case TaskError():
            return "task"
        case _:
            return "engine"
