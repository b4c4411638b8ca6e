"""From a prompt to a finished completion: one turn, or several with an environment. Tokens in, tokens out.

    turn of the policy -> environment.step -> observation, or done
            ^                                      |
            +--------------------------------------+   until max_turns or max_tokens

What the policy sampled is kept as it was sampled; observations are tokenised on their own and masked.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from streamppo.config.task import Environment as EnvironmentConfig
from streamppo.errors import ModelError, TaskError
from streamppo.rollout.engine import Completion, Engine, Sampling
from streamppo.tasks import environments
from streamppo.tasks.environments import Done, Environment
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.types import Flags, Floats, Ints, Message, Prompt, Reward, ScoredText

FAILURES = (TaskError, ModelError)
"""What costs one trajectory and nothing else, while it is played or scored."""


class Episode(NamedTuple):
    """A finished trajectory before it is scored; T tokens. `turn_ends` are the places of the last tokens of turns."""

    prompt_tokens: Ints
    tokens: Ints
    logprobs: Floats
    versions: Ints
    mask: Flags
    finish: Literal["stop", "length"]
    turn_ends: tuple[int, ...]
    versions_known: bool = True
    turns: tuple[str, ...] = ()
    turn_rewards: tuple[float, ...] = ()
    end: Done = Done()

    def text(self, prompt: Prompt, tokenizer: Tokenizer) -> ScoredText:
        """What rewards see of it."""
        return ScoredText(
            prompt=prompt.text,
            completion=tokenizer.decode(self.tokens),
            finish=self.finish,
            num_tokens=int(self.mask.sum()),
            tokens=self.tokens[self.mask].tobytes(),
            messages=prompt.messages,
            turns=self.turns,
            source=prompt.source,
        )

    def reward(self, scored: Reward) -> Reward:
        """The scorers' reward and the environment's together."""
        if not self.turn_rewards:
            return scored
        theirs = scored.turns or (0.0,) * len(self.turn_rewards)
        return Reward(
            score=scored.score,
            tokens=scored.tokens,
            turns=tuple(own + other for own, other in zip(self.turn_rewards, theirs, strict=True)),
            components={**self.end.components, **scored.components},
            explanation="\n".join(filter(None, (self.end.explanation, scored.explanation))),
        )


class Player:
    """Plays prompts on one engine."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, environment: EnvironmentConfig | None) -> None:
        self._engine = engine
        self.tokenizer = tokenizer
        self._environment = environment
        self._make = environments.load(environment) if environment else None

    async def play(self, prompt: Prompt, sampling: Sampling) -> Episode:
        """One trajectory. Raises one of `FAILURES`."""
        if self._environment is None or self._make is None:
            tokens = self.tokenizer.encode(prompt)
            done = await self._engine.generate(tokens, sampling)
            mask = np.ones(len(done.tokens), dtype=np.bool_)
            ends, known = (len(mask) - 1,), done.versions_known
            return Episode(tokens, done.tokens, done.logprobs, done.versions, mask, done.finish, ends, known)
        async with environments.opened(self._make, self._environment.timeout_s) as world:
            return await self._turns(prompt, sampling, self._environment, world)

    async def _turns(
        self, prompt: Prompt, sampling: Sampling, limits: EnvironmentConfig, world: Environment
    ) -> Episode:
        said = await environments.begin(world, prompt, limits.timeout_s)
        record = Record(self.tokenizer.encode(_opening(prompt, said)))
        for turn in range(1, limits.max_turns + 1):
            room = limits.max_tokens - record.length
            done = await self._engine.generate(
                record.context(), sampling._replace(max_tokens=min(sampling.max_tokens, room))
            )
            record.say(done, self.tokenizer.decode(done.tokens))
            if done.finish == "length":
                return record.episode("length", Done())
            answer = await environments.step(world, record.turns[-1], limits.timeout_s)
            record.rewards.append(answer.reward)
            if isinstance(answer, Done):
                return record.episode("stop", answer)
            observed = self.tokenizer.observation(answer.said if isinstance(answer.said, str) else tuple(answer.said))
            if turn == limits.max_turns or record.length + len(observed) >= limits.max_tokens:
                break
            record.observe(observed)
        return record.episode("length", Done())


class Record:
    """The columns of a trajectory as they grow."""

    def __init__(self, prompt_tokens: Ints) -> None:
        self.prompt_tokens = prompt_tokens
        self.turns: list[str] = []
        self.rewards: list[float] = []
        self.length = 0
        self._parts: list[tuple[Ints, Floats, Ints, Flags]] = []
        self._turn_ends: list[int] = []
        self._versions_known = True

    def context(self) -> Ints:
        """All tokens so far."""
        return np.concatenate([self.prompt_tokens, *(part[0] for part in self._parts)])

    def say(self, completion: Completion, text: str) -> None:
        """A turn of the policy."""
        self._add(completion.tokens, completion.logprobs, completion.versions, sampled=True)
        self._versions_known &= completion.versions_known
        self.turns.append(text)
        self._turn_ends.append(self.length - 1)

    def observe(self, tokens: Ints) -> None:
        """An observation: no log-prob, the version of the token before it, and never trained on."""
        version = self._parts[-1][2][-1]
        self._add(tokens, np.zeros(len(tokens), np.float32), np.full(len(tokens), version, np.int32), sampled=False)

    def _add(self, tokens: Ints, logprobs: Floats, versions: Ints, *, sampled: bool) -> None:
        self._parts.append((tokens, logprobs, versions, np.full(len(tokens), sampled)))
        self.length += len(tokens)

    def episode(self, finish: Literal["stop", "length"], end: Done) -> Episode:
        """The whole; a turn that was cut off has no reward of its own."""
        tokens, logprobs, versions, mask = (np.concatenate(column) for column in zip(*self._parts, strict=True))
        rewards = (*self.rewards, *[0.0] * (len(self.turns) - len(self.rewards)))
        return Episode(
            self.prompt_tokens,
            tokens,
            logprobs,
            versions,
            mask,
            finish,
            tuple(self._turn_ends),
            self._versions_known,
            tuple(self.turns),
            rewards,
            end,
        )


def _opening(prompt: Prompt, said: str | tuple[Message, ...]) -> Prompt:
    """The prompt as the environment words it."""
    if isinstance(said, str):
        return Prompt(text=said, columns={}, max_tokens=prompt.max_tokens)
    text = "\n\n".join(message.content for message in said)
    return Prompt(text=text, columns={}, messages=said, max_tokens=prompt.max_tokens)


def place(reward: Reward, mask: Flags, turn_ends: Sequence[int]) -> bytes:
    """Place a trajectory's rewards: [T] as a bytes column; empty when all of it stands on the last sampled token.

    `mask` [T] are the sampled tokens, `turn_ends` the place of the last token of each turn. The column sums to
    `reward.total`.
    """
    if not reward.tokens and not reward.turns:
        return b""
    rewards = np.zeros(len(mask), dtype=np.float32)
    sampled = np.flatnonzero(mask)
    if reward.tokens:
        rewards[sampled] += np.asarray(reward.tokens, dtype=np.float32)
    if reward.turns:
        rewards[list(turn_ends)] += np.asarray(reward.turns, dtype=np.float32)
    rewards[sampled[-1]] += np.float32(reward.score)
    return rewards.tobytes()
