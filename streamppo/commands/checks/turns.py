"""Checks conversations. Instead of the policy, an engine answers every turn with the row's answer."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import numpy as np
from msgspec import structs

from streamppo.commands.checks.finding import Finding, Findings
from streamppo.config.sections import Config
from streamppo.config.task import AgentEnvironment, Environment
from streamppo.errors import EnvironmentFailed, TaskError
from streamppo.rollout.engine import Completion, Cuts, Engine, Sampling
from streamppo.rollout.episode import Episode
from streamppo.rollout.player import Player
from streamppo.tasks import agent
from streamppo.tasks.task import Task
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.terminal import quoted
from streamppo.types import Ints, Message, Prompt, branches

PROMPTS = 64
TURNS = 2
"""Turns of the policy, one before and one after the environment's answer."""
AGENT_S = 20.0


class Answers:
    """An engine that answers every turn with the row's answer."""

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


def findings(config: Config, task: Task, tokenizer: Tokenizer, *, call: bool = True) -> Findings:
    """Check the first prompts. For each source, play a turn of the environment or, with `call`, run the agent."""
    first = task.training[:PROMPTS]
    yield from (Finding("task", "note", note) for note in _notes(first, tokenizer))
    by_source = {prompt.source: prompt for prompt in reversed(first)}
    if isinstance(config.environment, AgentEnvironment) and not call:
        yield Finding("environment", "later", "the agent is played when a run starts")
    elif isinstance(config.environment, AgentEnvironment):
        yield from _play_agents(by_source, config, config.environment, tokenizer)
    elif config.environment is not None:
        for source, prompt in by_source.items():
            yield _play(source, prompt, config.environment, tokenizer)


def _notes(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> Iterator[str]:
    examined = [prompt for prompt in prompts if prompt.template.control_tokens == "text" or prompt.messages]
    spelled = [(prompt, name) for prompt in examined if (name := tokenizer.find_control_token(prompt))]
    if spelled:
        names = ", ".join(sorted({name for _, name in spelled})[:3])
        is_text = any(prompt.template.control_tokens == "text" for prompt, _ in spelled)
        no_chat = ", and neither chat nor system" if any(prompt.messages for prompt, _ in spelled) else ""
        yield (
            f"{len(spelled)} of the first {len(examined)} prompts spell control tokens ({names}), "
            f"{'which stay text' if is_text else 'to which the chat template adds its own'}; if rows are written in a "
            f'chat template already, choose control_tokens = "parse"{no_chat}'
        )
    if any(prompt.messages for prompt in prompts) and (opening := tokenizer.chat.missing_opening()):
        yield (
            f"the chat template does not open the assistant's turn: a completion begins with {opening!r}, which "
            "templates write `if add_generation_prompt`"
        )
    if count := sum(tokenizer.chat.leaves_out_tools(prompt.messages, prompt.template) for prompt in prompts):
        yield (
            f"{count} of the first {len(prompts)} prompts have tools, which the chat template leaves out: the policy "
            "does not see them; describe them in a message"
        )
    if count := sum(prompt.messages[-1].role == "assistant" for prompt in prompts if prompt.messages):
        yield (
            f"{count} of the first {len(prompts)} prompts end with an assistant's message, which every completion "
            "continues: if it is the answer, move it from the prompt to another column"
        )


def _play(source: str, prompt: Prompt, environment: Environment, tokenizer: Tokenizer) -> Finding:
    subject = "environment"
    try:
        engine = cast(Engine, Answers(tokenizer, prompt))
        player = Player(engine, tokenizer, structs.replace(environment, max_turns=min(TURNS, environment.max_turns)))
        episode = asyncio.run(player.play(prompt, Sampling(environment.max_tokens)))
        if episode.opening is not None and episode.opening.messages and not episode.observations:
            tokenizer.observation((Message(role="user", content="?"),), episode.opening.template)
    except EnvironmentFailed as error:
        state = "note" if str(error).startswith("step") else "error"
        return Finding(subject, state, f"{source}: it fails on the row's answer as a turn: {error}")
    except TaskError as error:
        return Finding(subject, "error", f"{source}: no turn can be played: {error}")
    observation = episode.observations[0] if episode.observations else ()
    answer = f"answered {_shorten(observation)}" if observation else "ended the conversation"
    return Finding(subject, "ok", f"{source}: with the row's answer as a turn it {answer}")


def _play_agents(
    prompts: Mapping[str, Prompt], config: Config, environment: AgentEnvironment, tokenizer: Tokenizer
) -> Findings:
    limited = structs.replace(environment, timeout_s=min(AGENT_S, environment.timeout_s))
    for source, prompt in prompts.items():
        try:
            engine = cast(Engine, Answers(tokenizer, prompt))
            player = Player(engine, tokenizer, limited, scored=bool(config.reward.scorers))
            most = min(config.rollout.max_tokens, environment.max_tokens)
            episode = asyncio.run(_run_agent(player, prompt, Sampling(most)))
        except EnvironmentFailed as error:
            reason = f"{source}: with the row's answer to each request it fails: {error}"
            late = agent.timeout_reason(limited.timeout_s)
            if is_late := limited.timeout_s < environment.timeout_s and str(error).startswith(late):
                reason = f"{source}: it has not ended after {limited.timeout_s:g} s, and was stopped; in a run it has "
                reason += f"{environment.timeout_s:g} s (environment.timeout_s)"
            # A failure after an answer is not a fault: the agent may expect another answer than the row's.
            is_fault = not error.tokens and not is_late
            yield Finding("environment", "error" if is_fault else "note", reason)
            return
        except TaskError as error:
            yield Finding("environment", "error", f"{source}: no run can be played: {error}")
            return
        yield Finding("environment", "ok", f"{source}: {_outcome(episode)}")


async def _run_agent(player: Player, prompt: Prompt, sampling: Sampling) -> Episode:
    assert player.agents is not None
    try:
        return await player.play(prompt, sampling)
    finally:
        await player.agents.close()


def _outcome(episode: Episode) -> str:
    count, forks = len(episode.turns), len(branches.pairs(episode.branches))
    text = f"with the row's answer to each request it got {count} answer{'s' * (count > 1)}"
    text += f" in {forks + 1} branches" if forks else ""
    if observation := next((messages for messages in episode.observations if messages), ()):
        text += f", continued with {_shorten(observation)}"
    if episode.finish == "length":
        text += ", was cut off by max_turns or max_tokens"
    return f"{text}, and ended with reward {sum(episode.turn_rewards):g}"


def _shorten(messages: tuple[Message, ...]) -> str:
    text = " ".join(f"{message.role}: {message.text}" for message in messages)
    return quoted(text, 60)
