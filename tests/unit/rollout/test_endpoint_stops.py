"""Answers that end at a stop string of their request: the real clients, and the embedded engine."""

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import agent_case
import numpy as np
import pytest
from agent_case import served

from streamppo.commands import standalone
from streamppo.commands.models import weights
from streamppo.config.sections import Config
from streamppo.config.task import AgentEnvironment
from streamppo.learner.model import tiny
from streamppo.rollout import build
from streamppo.rollout.endpoint.request import Request, Turn
from streamppo.rollout.endpoint.session import SampledPolicy, Session
from streamppo.rollout.engine import ContextReuse
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.types import Message

if TYPE_CHECKING:
    import anthropic
    import openai

SAYS = "Thought: look\nObservation: it rains, says the policy, and on and on it goes"
FOLLOW = {"text": "Thought: look\n", "text and string": "Thought: look\nObservation:"}
"""The forms in which programs send a stopped answer back: smolagents puts its string back, others do not."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return agent_case.tokenizer(tmp_path_factory.mktemp("tokenizer"))


def user(text: str) -> Any:
    return {"role": "user", "content": text}


async def chat(client: "openai.AsyncOpenAI", messages: Any, stop: Any, *, stream: bool) -> tuple[str, str]:
    made: Any = await client.chat.completions.create(model="m", messages=messages, stop=stop, stream=stream)
    if not stream:
        return made.choices[0].message.content, made.choices[0].finish_reason
    chunks = [chunk.choices[0] async for chunk in made]
    return "".join(one.delta.content or "" for one in chunks), chunks[-1].finish_reason


async def claude(client: "anthropic.AsyncAnthropic", messages: Any, stop: Any, *, stream: bool) -> tuple[str, str]:
    given: Any = {"model": "m", "max_tokens": 150, "messages": messages, "stop_sequences": [stop]}
    if stream:
        async with client.messages.stream(**given) as events:
            made = await events.get_final_message()
    else:
        made = await client.messages.create(**given)
    assert made.stop_sequence == (stop if made.stop_reason == "stop_sequence" else None)
    return made.content[0].text, made.stop_reason  # pyright: ignore


@pytest.mark.parametrize("form", FOLLOW)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pace_s", [0.0, 0.0005])
@pytest.mark.parametrize("dialect", ["chat", "claude"])
def test_an_answer_ends_at_a_stop_string_and_the_next_request_follows_its_tokens(
    dialect: str, pace_s: float, stream: bool, form: str, tokenizer: Tokenizer
) -> None:
    """Of an engine that hands over tokens on the way (`pace_s`) and of one that does not."""
    import anthropic
    import openai

    async def main() -> None:
        async with served(tokenizer, lambda text: "done" if "[user]more" in text else SAYS) as case:
            case.engine.pace_s = pace_s
            given: Any = {"api_key": case.key, "max_retries": 0}
            client: Any = (
                openai.AsyncOpenAI(base_url=case.base_url, **given)
                if dialect == "chat"
                else anthropic.AsyncAnthropic(base_url=case.endpoint.address, **given)
            )
            case.keep(client)
            ask = chat if dialect == "chat" else claude
            said = await ask(client, [user("a")], "Observation:", stream=stream)
            assert said == ("Thought: look\n", "stop" if dialect == "chat" else "stop_sequence")
            told = [user("a"), {"role": "assistant", "content": FOLLOW[form]}, user("more")]
            more = await ask(client, told, "Observation:", stream=stream)
            assert more == ("done", "stop" if dialect == "chat" else "end_turn")
            assert case.row() == (
                "[user]a<eos>[assistant]Thought: look\nObservation:<eos>[user]more<eos>[assistant]done<eos>"
            )
            columns = case.session.row.columns([1, 2])
            assert not len(columns.branches) and case.session.undelivered == 0
            assert int(columns.mask.sum()) == case.session.sampled == len("Thought: look\nObservation:done") + 1
            assert case.engine.under_way == 0 and len(case.engine.ended) == (1 if pace_s else 2)

    asyncio.run(main())


def test_requests_that_differ_in_their_stop_strings_are_others(tokenizer: Tokenizer) -> None:
    asked = [Request((Message("user", "a"),), stop=stop).key() for stop in ((), ("x",), ("x", "y"))]
    assert len({*asked}) == 3


def test_the_engines_tokens_and_logprobs_up_to_the_string_are_those_without_it(
    math_config: Callable[..., Config], tmp_path: Path
) -> None:
    limits = ("environment.max_tokens=9000", "rollout.max_tokens=40")
    config = math_config("environment.agent=a:b", "reward={}", "model.tiny.max_steps=1", *limits)
    tiny.make(config, tmp_path)
    tokenizer, loaded = Tokenizer(tmp_path), weights.model_weights(str(tmp_path), config.model.dtype)
    environment = config.environment
    assert isinstance(environment, AgentEnvironment)

    async def main() -> None:
        async with standalone.engine(config, "test", str(tmp_path), 0, loaded) as engine:
            policy = SampledPolicy(engine, tokenizer, build.stop(config, str(tmp_path), tokenizer), ContextReuse())

            async def ask(stop: tuple[str, ...], seed: int) -> tuple[Turn, Session]:
                sampling = build.sampling(config)._replace(seed=seed)
                session = Session("k", policy, sampling, environment, counts=Counter[str]())
                turn = session.begin(Request((Message("user", "12+34="),), stop=stop))
                assert turn.task is not None
                await turn.task
                assert turn.error is None
                return turn, session

            seed, text, whole = 0, "", None
            while len(text) < 12:
                seed += 1
                free, whole = await ask((), seed)
                text = free.text
            assert whole is not None
            for string in {text[at : at + size] for at in range(0, len(text) - 3, 3) for size in (1, 3)}:
                turn, session = await ask((string,), seed)
                end = text.index(string) + len(string)
                assert (turn.text, turn.finish, turn.tokens) == (text[: end - len(string)], "stop", end)
                mine, theirs = session.row.columns([1]), whole.row.columns([1])
                upto = session.row.prompt + end
                assert len(mine.tokens) == upto
                np.testing.assert_array_equal(mine.tokens, theirs.tokens[:upto])
                np.testing.assert_array_equal(mine.logprobs, theirs.logprobs[:upto])

    asyncio.run(main())
