"""Plays a prompt to a finished completion: one turn, or several with an environment.

    turn of the policy -> environment.step -> observation, or done
            ^                                      |
            +--------------------------------------+   until max_turns or max_tokens

Sampled tokens stay unchanged; observations are tokenised separately and masked.
"""

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np
from msgspec import structs

from streamppo.config.task import AgentEnvironment, AnyEnvironment
from streamppo.config.task import Environment as EnvironmentConfig
from streamppo.errors import ModelError, TaskError
from streamppo.rollout import random_numbers
from streamppo.rollout.engine import Completion, ContextReuse, Cuts, Sampler, Sampling, TokenCandidates
from streamppo.tasks import environments
from streamppo.tasks.environments import Done, EnvSession
from streamppo.tasks.stalls import EventLoopStalls
from streamppo.tasks.stop import Stop
from streamppo.tasks.tokenizer import Said, Tokenizer
from streamppo.types import (
    Flags,
    Floats,
    Identity,
    Ints,
    Message,
    Prompt,
    Reward,
    Routes,
    ScoredText,
    Trajectory,
    flags,
    routes,
    utf8_safe,
)

if TYPE_CHECKING:
    from streamppo.rollout.agents import Agents

FAILURES = (TaskError, ModelError)
"""Errors that fail only the trajectory that is being played or scored."""
NO_STOP = Stop()
EXPLAINED = 2000
"""Maximum number of characters of a reward's explanation in a trajectory."""


class Episode(NamedTuple):
    """A finished completion of T tokens before it is scored. `turn_ends` are the indices of the turns' last tokens.

    `opening` is the prompt that the environment or agent wrote; `observations` are their messages after turns.
    `branches` and `placed_turns` become `branches` and `turns` of the `Trajectory`.
    """

    prompt_tokens: Ints
    tokens: Ints
    logprobs: Floats
    versions: Ints
    mask: Flags
    finish: Literal["stop", "length", "cut"]
    turn_ends: tuple[int, ...]
    versions_known: bool = True
    turns: tuple[str, ...] = ()
    turn_rewards: tuple[float, ...] = ()
    end: Done = Done()
    candidates: TokenCandidates | None = None
    routes_SE: Routes | None = None
    opening: Prompt | None = None
    observations: tuple[tuple[Message, ...], ...] = ()
    branches: bytes = b""
    placed_turns: bytes = b""

    @property
    def num_sampled(self) -> int:
        """The number of sampled tokens."""
        return int(np.count_nonzero(self.mask))

    def until(self, end: int) -> "Episode":
        """Return the episode of the first `end` tokens, with `finish` "cut"."""
        return self._replace(
            tokens=self.tokens[:end],
            logprobs=self.logprobs[:end],
            versions=self.versions[:end],
            mask=self.mask[:end],
            finish="cut",
            candidates=self.candidates and self.candidates.first(end),
            routes_SE=None if self.routes_SE is None else self.routes_SE[: len(self.prompt_tokens) + end - 1],
        )

    def text(self, prompt: Prompt, tokenizer: Tokenizer, stop: Stop = NO_STOP) -> ScoredText:
        """Decode a finished episode for its rewards, without the end tokens of its turns and the last stop string."""
        assert self.finish != "cut"
        sampled = self.tokens[self.mask]
        tokens, is_sampled = self.tokens, self.mask
        if inner := [end for end in self.turn_ends[:-1] if int(tokens[end]) in stop.origins]:
            tokens, is_sampled = np.delete(tokens, inner), np.delete(is_sampled, inner)
        return ScoredText(
            prompt=prompt.text,
            completion=stop.text(tokens, self.finish, lambda left: tokenizer.completion(left, is_sampled[: len(left)])),
            finish=self.finish,
            num_tokens=len(sampled),
            tokens=sampled.tobytes(),
            messages=(self.opening or prompt).messages,
            turns=self.turns,
            source=prompt.source,
            observations=self.observations,
        )

    def reward(self, scored: Reward) -> Reward:
        """Return the sum of the scorers' reward and the environment's rewards."""
        if not self.turn_rewards:
            return scored
        scored_turns = scored.turns or (0.0,) * len(self.turn_rewards)
        return Reward(
            score=scored.score,
            tokens=scored.tokens,
            turns=tuple(a + b for a, b in zip(self.turn_rewards, scored_turns, strict=True)),
            components={**self.end.components, **scored.components},
            explanation="\n".join(filter(None, (self.end.explanation, scored.explanation))),
        )

    def trajectory(
        self, identity: Identity, actor: str, reward: Reward, teacher_logprobs: bytes = b"", *, prefix: int = 0
    ) -> Trajectory:
        """Make the scored trajectory for the queue; the first `prefix` tokens become part of its prompt."""
        segment, candidates = slice(prefix, None), self.candidates and self.candidates.drop_first(prefix)
        routed, route_bytes = (b"", 2) if self.routes_SE is None else routes.column(self.routes_SE)
        return Trajectory(
            identity=identity,
            actor=actor,
            prompt_tokens=self.prompt_tokens.tobytes() + self.tokens[:prefix].tobytes(),
            tokens=self.tokens[segment].tobytes(),
            logprobs=self.logprobs[segment].tobytes(),
            versions=self.versions[segment].tobytes(),
            mask=self.mask[segment].tobytes(),
            finish=self.finish,
            versions_known=self.versions_known,
            reward=reward.total,
            prefix=prefix,
            token_rewards=place(reward, self.mask, self.turn_ends, prefix),
            candidates=b"" if candidates is None else candidates.tokens.tobytes(),
            candidate_counts=b"" if candidates is None else candidates.counts.tobytes(),
            teacher_logprobs=teacher_logprobs[4 * prefix :],
            routes=routed,
            route_bytes=route_bytes,
            branches=self.branches,
            turns=self.placed_turns,
            components=reward.components,
            explanation=utf8_safe(reward.explanation)[:EXPLAINED],
        )


class Cutter(Protocol):
    """Hands over an episode's segments while it is played: see `segment_writer.SegmentWriter`."""

    def cuts(self, so_far: Callable[[Completion], Episode], before: Ints) -> Cuts | None:
        """Return where the engine cuts the next turn."""
        ...

    def wait(self, episode: Episode) -> None:
        """Note that a turn has ended: `episode` waits for the environment's answer."""
        ...


class Player:
    """Plays prompts with one engine. If configured, each prompt gets a new environment, or a new run of the agent.

    `scored` is true if the run has scorers. If it has none, an agent must give a reward.
    """

    def __init__(
        self,
        engine: Sampler,
        tokenizer: Tokenizer,
        environment: AnyEnvironment | None,
        stop: Stop = NO_STOP,
        *,
        scored: bool = False,
    ) -> None:
        self._engine = engine
        self.tokenizer, self.stop, self.contexts = tokenizer, stop, ContextReuse()
        self.agents: Agents | None = None
        self._stalls: EventLoopStalls | None = None
        self._environment = environment if isinstance(environment, EnvironmentConfig) else None
        if isinstance(environment, AgentEnvironment):
            # This imports a web server, which other runs do not need.
            from streamppo.rollout import agents
            from streamppo.rollout.endpoint.session import SampledPolicy

            policy = SampledPolicy(engine, tokenizer, stop, self.contexts)
            self.agents = agents.Agents(policy, environment, scored=scored)
        if self._environment:
            self._make = environments.load(self._environment)
            self._stalls = EventLoopStalls(self._environment.name, self._environment.timeout_s)

    def stalls(self) -> dict[str, int]:
        """Return the number of environment steps that blocked the event loop, by file and line."""
        return dict(self._stalls.counts) if self._stalls else {}

    def prepare(self, prompt: Prompt) -> None:
        """Tokenize `prompt` once, before its samples are played. Raises `TaskError`, as `play` does."""
        # Environments and agents write their own prompts, so this prompt is not used.
        if self._environment is None and self.agents is None:
            self.tokenizer.encode(prompt)

    async def play(self, prompt: Prompt, sampling: Sampling, cutter: Cutter | None = None) -> Episode:
        """Play one episode; `cutter` hands over its segments. Raises one of `FAILURES`."""
        if self.agents is not None:
            return Episode(**(await self.agents.play(prompt, sampling))._asdict())
        if self._environment is None or self._stalls is None:
            tokens = self.tokenizer.encode(prompt)
            so_far = partial(_one_turn, tokens)
            cuts = cutter.cuts(so_far, tokens[:0]) if cutter else None
            return so_far(await self._engine.generate(tokens, sampling, cuts))
        async with environments.open_session(self._make, self._stalls) as world:
            return await self._converse(prompt, sampling, self._environment, world, cutter)

    async def _converse(
        self, prompt: Prompt, sampling: Sampling, limits: EnvironmentConfig, world: EnvSession, cutter: Cutter | None
    ) -> Episode:
        opening = _opening(prompt, await world.begin(prompt), limits)
        columns = Columns(self.tokenizer.encode(opening), opening)
        for turn in range(1, limits.max_turns + 1):
            room = limits.max_tokens - columns.length
            cuts = cutter.cuts(columns.cut, columns.versions()) if cutter else None
            seed = random_numbers.seed_of_turn(sampling.seed, turn - 1)
            drawing = sampling._replace(max_tokens=min(sampling.max_tokens, room), seed=seed)
            completion = await self._engine.generate(columns.context(), drawing, cuts)
            self.contexts.add(columns.known, completion.cached)
            text = self.stop.text(completion.tokens, completion.finish, self.tokenizer.completion)
            columns.add_turn(completion, text)
            if completion.finish == "length":
                return columns.episode("length", Done())
            if cutter:
                cutter.wait(columns.episode("cut", Done()))
            answer = await world.step(columns.turns[-1])
            columns.rewards.append(answer.reward)
            if isinstance(answer, Done):
                return columns.episode("stop", answer)
            observation = answer.said if isinstance(answer.said, str) else tuple(answer.said)
            observed = self.tokenizer.observation(observation, opening.template, int(completion.tokens[-1]))
            if turn == limits.max_turns or columns.length + len(observed) >= limits.max_tokens:
                break
            columns.add_observation(observed, observation)
        return columns.episode("length", Done())


class Columns:
    """The growing columns of a running episode. `known` counts all tokens, prompt included, to the last turn's end."""

    def __init__(self, prompt_tokens: Ints, opening: Prompt | None = None) -> None:
        self.prompt_tokens = prompt_tokens
        self.opening = opening
        self.observations: list[tuple[Message, ...]] = []
        self.turns: list[str] = []
        self.rewards: list[float] = []
        self.length = self.known = 0
        self._parts: list[tuple[Ints, Floats, Ints, Flags]] = []
        self._turn_ends: list[int] = []
        self._versions_known = True
        self._candidates: list[TokenCandidates | None] = []
        self._routes: Routes | None = None

    def context(self) -> Ints:
        """Join all tokens so far, the prompt's first."""
        return np.concatenate([self.prompt_tokens, *(part[0] for part in self._parts)])

    def versions(self) -> Ints:
        """Join the versions of all tokens so far, except the prompt's."""
        return np.concatenate([np.zeros(0, np.int32), *(part[2] for part in self._parts)])

    def cut(self, completion: Completion) -> Episode:
        """Return the episode so far, including the tokens of the running turn."""
        columns = copy(self)
        columns.turns, columns._parts = [*self.turns], [*self._parts]
        columns._turn_ends, columns._candidates = [*self._turn_ends], [*self._candidates]
        columns.add_turn(completion, "")
        return columns.episode("cut", Done())

    def add_turn(self, completion: Completion, text: str) -> None:
        """Add a turn of the policy with its text."""
        self._add(completion.tokens, completion.logprobs, completion.versions, sampled=True)
        self._candidates.append(completion.candidates)
        if completion.routes_SE is not None:
            # Tokens of earlier turns keep the routes under which they were sampled.
            num_routed = 0 if self._routes is None else len(self._routes)
            before = completion.routes_SE[:0] if self._routes is None else self._routes
            self._routes = np.concatenate([before, completion.routes_SE[num_routed:]])
        self._versions_known &= completion.versions_known
        self.turns.append(text)
        self._turn_ends.append(self.length - 1)
        self.known = len(self.prompt_tokens) + self.length

    def add_observation(self, tokens: Ints, said: Said = ()) -> None:
        """Add an observation: masked tokens with log-probs of 0 and the version of the token before them."""
        self.observations.append((Message(role="user", content=said),) if isinstance(said, str) else said)
        version = self._parts[-1][2][-1]
        self._candidates.append(None)
        self._add(tokens, np.zeros(len(tokens), np.float32), np.full(len(tokens), version, np.int32), sampled=False)

    def _add(self, tokens: Ints, logprobs: Floats, versions: Ints, *, sampled: bool) -> None:
        self._parts.append((tokens, logprobs, versions, np.full(len(tokens), sampled)))
        self.length += len(tokens)

    def episode(self, finish: Literal["stop", "length", "cut"], end: Done) -> Episode:
        """Join the columns; a turn that the environment has not answered has a reward of 0."""
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
            self._join_candidates(),
            self._padded_routes(),
            self.opening,
            tuple(self.observations),
        )

    def _padded_routes(self) -> Routes | None:
        """Return the routes of all tokens except the last; those of an observation at the end are -1."""
        if self._routes is None:
            return None
        missing = len(self.prompt_tokens) + self.length - 1 - len(self._routes)
        return np.pad(self._routes, ((0, missing), (0, 0)), constant_values=-1)

    def _join_candidates(self) -> TokenCandidates | None:
        """Join the candidates of all turns; tokens of observations have a count of 0."""
        if all(candidates is None for candidates in self._candidates):
            return None
        none = np.zeros(0, np.int32)
        return TokenCandidates.concatenate(
            [
                candidates or TokenCandidates(none, np.zeros(len(part[0]), np.int32))
                for part, candidates in zip(self._parts, self._candidates, strict=True)
            ]
        )


def _one_turn(prompt_tokens: Ints, completion: Completion) -> Episode:
    count = len(completion.tokens)
    return Episode(
        prompt_tokens,
        completion.tokens,
        completion.logprobs,
        completion.versions,
        flags(b"\x01" * count),
        completion.finish,
        (count - 1,),
        completion.versions_known,
        candidates=completion.candidates,
        routes_SE=completion.routes_SE,
    )


def _opening(prompt: Prompt, opening: Said, environment: EnvironmentConfig) -> Prompt:
    """Replace the prompt's content by the environment's opening."""
    template = structs.replace(
        prompt.template,
        arguments=prompt.template.arguments | environment.template,
        control_tokens=environment.control_tokens,
    )
    if isinstance(opening, str):
        return Prompt(text=opening, columns={}, max_tokens=prompt.max_tokens, template=template)
    text = "\n\n".join(message.text for message in opening)
    return Prompt(text=text, columns={}, messages=opening, max_tokens=prompt.max_tokens, template=template)


def place(reward: Reward, mask: Flags, turn_ends: Sequence[int], prefix: int = 0) -> bytes:
    """Return a trajectory's rewards by token, [T - prefix] as a bytes column that sums to `reward.total`.

    The column is empty if the whole reward belongs to the last sampled token. `mask` [T] is true for sampled tokens,
    `turn_ends` are the indices of the turns' last tokens. Rewards of the first `prefix` tokens are added to the first
    sampled token after them.
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
    if prefix:
        rewards[sampled[sampled >= prefix][0]] += rewards[:prefix].sum()
    return rewards[prefix:].tobytes()
