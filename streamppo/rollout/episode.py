"""A completion of one or several turns: while it is played (`Columns`), and finished (`Episode`)."""

from collections.abc import Sequence
from copy import copy
from typing import Literal, NamedTuple

import numpy as np

from streamppo.rollout.engine import Completion, TokenCandidates
from streamppo.tasks.environments import Done
from streamppo.tasks.stop import Stop
from streamppo.tasks.tokenizer import EnvironmentText, Tokenizer
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

NO_STOP = Stop()
EXPLAINED = 2000


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
        return int(np.count_nonzero(self.mask))

    def until(self, end: int) -> "Episode":
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
        self._candidates: list[TokenCandidates | None] = []
        self._routes: Routes | None = None

    def context(self) -> Ints:
        return np.concatenate([self.prompt_tokens, *(part[0] for part in self._parts)])

    def before_turn(self) -> list[Message]:
        """Return the messages before the last turn; none if the opening is a text."""
        messages = list(self.opening.messages) if self.opening is not None else []
        if messages:
            for text, said in zip(self.turns, self.observations, strict=False):
                messages += [Message(role="assistant", content=text), *said]
        return messages

    def versions(self) -> Ints:
        return np.concatenate([np.zeros(0, np.int32), *(part[2] for part in self._parts)])

    def cut(self, completion: Completion) -> Episode:
        columns = copy(self)
        columns.turns, columns._parts = [*self.turns], [*self._parts]
        columns._turn_ends, columns._candidates = [*self._turn_ends], [*self._candidates]
        columns.add_turn(completion, "")
        return columns.episode("cut", Done())

    def add_turn(self, completion: Completion, text: str) -> None:
        self._add(completion.tokens, completion.logprobs, completion.versions, sampled=True)
        self._candidates.append(completion.candidates)
        if completion.routes_SE is not None:
            # Tokens of earlier turns keep the routes under which they were sampled.
            num_routed = 0 if self._routes is None else len(self._routes)
            before = completion.routes_SE[:0] if self._routes is None else self._routes
            self._routes = np.concatenate([before, completion.routes_SE[num_routed:]])
        self.turns.append(text)
        self._turn_ends.append(self.length - 1)
        self.known = len(self.prompt_tokens) + self.length

    def add_observation(self, tokens: Ints, said: EnvironmentText = ()) -> None:
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
            tuple(self.turns),
            rewards,
            end,
            self._join_candidates(),
            self._padded_routes(),
            self.opening,
            tuple(self.observations),
        )

    def _padded_routes(self) -> Routes | None:
        if self._routes is None:
            return None
        missing = len(self.prompt_tokens) + self.length - 1 - len(self._routes)
        return np.pad(self._routes, ((0, missing), (0, 0)), constant_values=-1)

    def _join_candidates(self) -> TokenCandidates | None:
        if all(candidates is None for candidates in self._candidates):
            return None
        none = np.zeros(0, np.int32)
        return TokenCandidates.concatenate(
            [
                candidates or TokenCandidates(none, np.zeros(len(part[0]), np.int32))
                for part, candidates in zip(self._parts, self._candidates, strict=True)
            ]
        )


def one_turn(prompt_tokens: Ints, completion: Completion) -> Episode:
    """Make the episode of a single turn."""
    count = len(completion.tokens)
    return Episode(
        prompt_tokens,
        completion.tokens,
        completion.logprobs,
        completion.versions,
        flags(b"\x01" * count),
        completion.finish,
        (count - 1,),
        candidates=completion.candidates,
        routes_SE=completion.routes_SE,
    )


def place(reward: Reward, mask: Flags, turn_ends: Sequence[int], prefix: int = 0) -> bytes:
    """Return a trajectory's rewards by token, [T - prefix] as a bytes column that sums to `reward.total`.

    Empty if the last sampled token gets all. Rewards of the first `prefix` tokens move to the next sampled token.
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
