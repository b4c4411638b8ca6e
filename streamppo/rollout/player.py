"""Plays a prompt to a finished completion: one turn, or several with an environment or an agent.

turn of the policy -> environment.step -> observation, or done
        ^                                      |
        +--------------------------------------+   until max_turns or max_tokens
"""

from functools import partial
from typing import TYPE_CHECKING

from msgspec import structs

from streamppo.config.task import AgentEnvironment, AnyEnvironment
from streamppo.config.task import Environment as EnvironmentConfig
from streamppo.errors import ModelError, TaskError
from streamppo.rollout import random_numbers
from streamppo.rollout.engine import ContextReuse, Sampler, Sampling
from streamppo.rollout.episode import NO_STOP, Columns, Episode, one_turn
from streamppo.rollout.segment_writer import SegmentWriter
from streamppo.tasks import environments
from streamppo.tasks.environments import Done, EnvSession
from streamppo.tasks.stalls import EventLoopStalls
from streamppo.tasks.stop import Stop
from streamppo.tasks.tokenizer import EnvironmentText, Tokenizer
from streamppo.types import Prompt

if TYPE_CHECKING:
    from streamppo.rollout.agents import Agents

FAILURES = (TaskError, ModelError)
"""Errors that fail only the trajectory that is being played or scored."""


class Player:
    """Plays prompts with one engine; if configured, each prompt in a new environment or by a new run of the agent."""

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
        return dict(self._stalls.counts) if self._stalls else {}

    def prepare(self, prompt: Prompt) -> None:
        """Tokenize `prompt` once, before its samples are played. Raises `TaskError`, as `play` does."""
        # Environments and agents write their own prompts, so this prompt is not used.
        if self._environment is None and self.agents is None:
            self.tokenizer.encode(prompt)

    async def play(self, prompt: Prompt, sampling: Sampling, cutter: SegmentWriter | None = None) -> Episode:
        """Play one episode; `cutter` hands over its segments. Raises one of `FAILURES`."""
        if self.agents is not None:
            return await self.agents.play(prompt, sampling)
        if self._environment is None or self._stalls is None:
            tokens = self.tokenizer.encode(prompt)
            so_far = partial(one_turn, tokens)
            cuts = cutter.cuts(so_far, tokens[:0]) if cutter else None
            return so_far(await self._engine.generate(tokens, sampling, cuts))
        async with environments.open_session(self._make, self._stalls) as world:
            return await self._converse(prompt, sampling, self._environment, world, cutter)

    async def _converse(
        self,
        prompt: Prompt,
        sampling: Sampling,
        limits: EnvironmentConfig,
        world: EnvSession,
        cutter: SegmentWriter | None,
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
            last, before = int(completion.tokens[-1]), columns.before_turn()
            observed = self.tokenizer.observation(observation, opening.template, last, before=before)
            if turn == limits.max_turns or columns.length + len(observed) >= limits.max_tokens:
                break
            columns.add_observation(observed, observation)
        return columns.episode("length", Done())


def _opening(prompt: Prompt, opening: EnvironmentText, environment: EnvironmentConfig) -> Prompt:
    template = structs.replace(
        prompt.template,
        arguments=prompt.template.arguments | environment.template,
        control_tokens=environment.control_tokens,
    )
    if isinstance(opening, str):
        return Prompt(text=opening, columns={}, max_tokens=prompt.max_tokens, template=template)
    text = "\n\n".join(message.text for message in opening)
    return Prompt(text=text, columns={}, messages=opening, max_tokens=prompt.max_tokens, template=template)
