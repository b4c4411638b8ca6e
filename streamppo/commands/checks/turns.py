"""Checks of conversations: control tokens that rows spell, and one turn of the environment with its answer."""

import asyncio
from collections.abc import Sequence
from typing import cast

import numpy as np
from msgspec import structs

from streamppo.commands.checks.finding import Finding, Findings
from streamppo.config.sections import Config
from streamppo.config.task import AgentEnvironment
from streamppo.errors import EnvironmentFailed, TaskError
from streamppo.rollout.engine import Completion, Cuts, Engine, Sampling
from streamppo.rollout.episode import Episode, Player
from streamppo.tasks.task import Task
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.types import Ints, Message, Prompt

PROMPTS = 64
"""Prompts whose texts are looked at."""
TURNS = 2
"""Turns of the policy that are played: one is answered, and the other stands behind the answer."""


class Answers:
    """An engine that gives the row's answer in every turn."""

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt) -> None:
        answer = prompt.columns.get("answer")
        text = answer if isinstance(answer, str) and answer else "?"
        self._tokens = tokenizer.encode_turn(text, "stop")
        if (end := tokenizer.turn_end()) is not None:
            self._tokens[-1] = end

    async def generate(self, prompt: Ints, sampling: Sampling, cuts: Cuts | None = None) -> Completion:
        """Return the answer."""
        count = len(self._tokens)
        return Completion(self._tokens, np.zeros(count, np.float32), np.zeros(count, np.int32), "stop")


def findings(config: Config, task: Task, tokenizer: Tokenizer) -> Findings:
    """Look at the first prompts, and play a turn of the environment with the first one of each source."""
    first = task.training[:PROMPTS]
    if note := _note_control_tokens(first, tokenizer):
        yield Finding("task", "note", note)
    if config.environment is not None:
        for source, prompt in {one.source: one for one in reversed(first)}.items():
            yield _play(source, prompt, config, tokenizer)


def _note_control_tokens(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> str:
    """Say which control tokens are spelled by prompts that keep them as text."""
    kept = [one for one in prompts if one.template.control_tokens == "text"]
    names = [found for one in kept if (found := tokenizer.find_control_token(one))]
    if not names:
        return ""
    return (
        f"{len(names)} of the first {len(kept)} prompts spell control tokens ({', '.join(sorted(set(names))[:3])}), "
        'which stay text; where rows are written in a chat template already, choose control_tokens = "parse"'
    )


def _play(source: str, prompt: Prompt, config: Config, tokenizer: Tokenizer) -> Finding:
    subject, environment = "environment", config.environment
    assert environment is not None
    engine = cast(Engine, Answers(tokenizer, prompt))
    try:
        limited = structs.replace(environment, max_turns=min(TURNS, environment.max_turns))
        if isinstance(environment, AgentEnvironment):
            limited = environment
        player = Player(engine, tokenizer, limited, scored=bool(config.reward.scorers))
        episode = asyncio.run(_play_to_the_end(player, prompt, Sampling(environment.max_tokens)))
        if episode.opening is not None and episode.opening.messages and not episode.observations:
            tokenizer.observation((Message(role="user", content="?"),), episode.opening.template)
    except EnvironmentFailed as error:
        state = "note" if str(error).startswith("step") or error.tokens else "error"
        return Finding(subject, state, f"{source}: it fails on the row's answer as a turn: {error}")
    except TaskError as error:
        return Finding(subject, "error", f"{source}: no turn can be played: {error}")
    said = episode.observations[0] if episode.observations else ()
    answer = f"answered {_shorten(said)}" if said else "ended the conversation"
    return Finding(subject, "ok", f"{source}: to the row's answer as a turn it {answer}")


async def _play_to_the_end(player: Player, prompt: Prompt, sampling: Sampling) -> Episode:
    try:
        return await player.play(prompt, sampling)
    finally:
        if player.agents is not None:
            await player.agents.close()


def _shorten(said: tuple[Message, ...]) -> str:
    text = " ".join(f"{one.role}: {one.text}" for one in said)
    return repr(text if len(text) <= 60 else f"{text[:60]}...")
