"""The real clients against builtin:tiny on the embedded engine, under a template of three lines."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from streamppo.commands import standalone
from streamppo.commands.models import weights
from streamppo.config.sections import Config
from streamppo.config.task import AgentEnvironment
from streamppo.learner.model import tiny
from streamppo.rollout import build
from streamppo.rollout.endpoint import session
from streamppo.rollout.endpoint.server import Endpoint
from streamppo.rollout.endpoint.session import SampledPolicy, Session
from streamppo.rollout.engine import ContextReuse
from streamppo.rollout.player import Player
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.types import Prompt

if TYPE_CHECKING:
    import anthropic
    import openai

TEMPLATE = """\
{{ tools | length if tools else "" }}{% for message in messages %}\
{{ message.content }}{{ eos_token }}{% endfor %}\
{% if add_generation_prompt %}={% endif %}"""
TOOL = {"type": "function", "function": {"name": "sum", "parameters": {"type": "object"}}}


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def test_streams_tools_parallel_requests_and_retries_of_real_clients_are_paths_of_one_row(
    math_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import anthropic
    import openai

    monkeypatch.setattr(session, "STREAM_S", 0.0)
    limits = ("environment.max_turns=20", "environment.max_tokens=900", "rollout.max_tokens=40")
    config = math_config("environment.agent=a:b", "reward={}", "model.tiny.max_steps=1", *limits)
    tiny.make(config, tmp_path)
    made = Tokenizer(tmp_path)
    made.hf.chat_template = TEMPLATE
    made.hf.save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    loaded = weights.model_weights(str(tmp_path), config.model.dtype)

    async def main() -> None:
        async with standalone.engine(config, "test", str(tmp_path), 0, loaded) as engine:
            endpoint, contexts = Endpoint("127.0.0.1"), ContextReuse()
            await endpoint.start()
            policy = SampledPolicy(engine, tokenizer, build.stop(config, str(tmp_path), tokenizer), contexts)
            assert isinstance(config.environment, AgentEnvironment)
            limits = config.environment
            opened = endpoint.open(
                lambda key: Session(key, policy, build.sampling(config), limits, counts=endpoint.counts)
            )
            chat = openai.AsyncOpenAI(base_url=f"{endpoint.address}/v1", api_key=opened.key, max_retries=0)
            claude = anthropic.AsyncAnthropic(base_url=endpoint.address, api_key=opened.key, max_retries=0)
            async with chat, claude:
                await _asked(chat, claude, endpoint)
            await endpoint.stop()
            _check(opened, contexts, tokenizer)

    asyncio.run(main())


async def _asked(chat: "openai.AsyncOpenAI", claude: "anthropic.AsyncAnthropic", endpoint: Endpoint) -> None:
    """Ask as programs do: whole, streamed, with a tool's answer, several at once, and again after a cut."""
    told: list[Any] = [user("12+34"), {"role": "assistant", "content": ""}, {"role": "tool", "content": "46"}]
    first = await chat.chat.completions.create(model="m", messages=[user("12+34")], tools=[TOOL])  # pyright: ignore
    told[1]["content"] = first.choices[0].message.content
    more = await chat.chat.completions.create(model="m", messages=told, tools=[TOOL])  # pyright: ignore
    assert more.usage is not None and more.usage.prompt_tokens > 12
    pieces = list[str]()
    stream: Any = await chat.chat.completions.create(
        model="m", messages=[user("1" * 70)], stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        pieces += [one.delta.content for one in chunk.choices if one.delta.content]
        tokens = chunk.usage.completion_tokens if chunk.usage else 0
    assert tokens >= len("".join(pieces)) and len(pieces) > 1
    followed = [user("1" * 70), {"role": "assistant", "content": "".join(pieces)}, user("2")]
    longer: Any = await chat.chat.completions.create(model="m", messages=followed)
    assert longer.usage.prompt_tokens_details.cached_tokens >= 70
    async with claude.messages.stream(model="m", max_tokens=30, messages=[user("5+6")]) as events:
        said = await events.get_final_text()
        assert said == (await events.get_final_message()).content[0].text  # pyright: ignore
    await asyncio.gather(
        *(claude.messages.create(model="m", max_tokens=9, messages=[user("7+8")]) for _ in range(3)),
        *(chat.responses.create(model="m", max_output_tokens=9, input="7+8") for _ in range(2)),
    )
    asking = asyncio.create_task(chat.chat.completions.create(model="m", messages=[user("9+9")]))
    while endpoint.counts["requests"] < 11:
        await asyncio.sleep(0)
    asking.cancel()
    while not endpoint.counts["disconnected"]:
        await asyncio.sleep(0.01)
    assert (await chat.chat.completions.create(model="m", messages=[user("9+9")])).choices
    assert endpoint.counts["joined"] == 1


def _check(opened: Session, contexts: ContextReuse, tokenizer: Tokenizer) -> None:
    columns = opened.row.columns(range(1, len(opened.turns) + 1))
    assert len(opened.turns) == 11 and opened.undelivered == 0 and not opened.failure
    assert int(columns.mask.sum()) == opened.sampled
    ends = np.flatnonzero(columns.mask)[np.cumsum([one.tokens for one in opened.turns]) - 1]
    for end, turn in zip(ends, opened.turns, strict=True):
        path = opened.row.context(int(end))
        tools, first = "1" if turn.request.tools else "", turn.request.messages[0].text
        assert tokenizer.spell(path.tolist()).startswith(f"{tools}{first}<eos>")
        assert len(path) == turn.context + turn.tokens
        assert turn.text == tokenizer.completion(path[turn.context :]).removesuffix("<eos>")
    assert contexts.reused > 0


TALKS = """
from streamppo.tasks.environments import Done, Observation


class Talks:
    def __init__(self) -> None:
        self.turns = 0

    async def reset(self, prompt) -> str:
        return "1" * 80

    async def step(self, text: str):
        self.turns += 1
        return Done(1.0) if self.turns == 5 else Observation("2" * 20)
"""


def test_an_environment_of_several_turns_is_computed_once_as_an_agent_is(
    math_config: Callable[..., Config], tmp_path: Path
) -> None:
    (tmp_path / "talks.py").write_text(TALKS)
    limits = ("environment.max_turns=6", "environment.max_tokens=600", "rollout.max_tokens=12")
    config = math_config(f"environment.name={tmp_path}/talks.py:Talks", "reward={}", "model.tiny.max_steps=1", *limits)
    path = tmp_path / "model"
    tiny.make(config, path)
    tokenizer = Tokenizer(path)
    loaded = weights.model_weights(str(path), config.model.dtype)

    async def main() -> tuple[int, int, int]:
        async with standalone.engine(config, "test", str(path), 0, loaded) as engine:
            player = Player(engine, tokenizer, config.environment, build.stop(config, str(path), tokenizer))
            sampling = build.sampling(config)
            while True:
                # A model of random weights cuts some of its turns off, which ends an episode.
                episode = await player.play(Prompt(text="1", columns={}), sampling)
                if len(episode.turns) > 2:
                    return len(episode.turns), player.contexts.tokens, player.contexts.reused

    turns, known, reused = asyncio.run(main())
    # The last token of a turn was sampled and never fed: it alone is computed behind what was there.
    assert turns > 2 and known > 100 and 0.9 * known <= reused < known
