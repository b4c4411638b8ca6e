"""An endpoint over an engine whose answers are a function of the context, and its clients."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np

from streamppo.config.task import AgentEnvironment
from streamppo.rollout.endpoint import session
from streamppo.rollout.endpoint.server import Endpoint
from streamppo.rollout.endpoint.session import SampledPolicy, Session
from streamppo.rollout.engine import Completion, Cuts, Sampling, Usage
from streamppo.tasks.stop import Stop
from streamppo.tasks.tokenizer import Tokenizer, character_tokenizer
from streamppo.types import Ints, Prompt, Template

T = TypeVar("T")
TEMPLATE = """\
{% if tools %}[tools]{% for tool in tools %}{{ tool.function.name }} {% endfor %}<eos>{% endif %}\
{% for message in messages %}[{{ message.role }}]{{ message.content or "" }}\
{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<eos>\
{% endfor %}\
{% if add_generation_prompt %}[assistant]{% endif %}"""


def tokenizer(folder: Path, template: str | None = TEMPLATE) -> Tokenizer:
    made = character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    made.chat_template = template
    made.save_pretrained(folder)
    return Tokenizer(folder)


class Speaks:
    """An engine that answers a context with `say(text)`; `gate` delays answers, `pace_s` is the time of a token."""

    version = 0

    def __init__(self, tokenizer: Tokenizer, say: Callable[[str], str]) -> None:
        self.tokenizer, self.say = tokenizer, say
        self.asked: list[list[int]] = []
        self.under_way = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.pace_s = 0.0
        self.ended: list[int] = []

    async def generate(self, prompt: Ints, sampling: Sampling, cuts: Cuts | None = None) -> Completion:
        self.asked.append(prompt.tolist())
        ids = [*self.tokenizer.ids(Prompt(text=self.say(self.text(prompt)), columns={})), self.tokenizer.eos_id]
        tokens, whole = np.asarray(ids, np.int32)[: sampling.max_tokens], len(ids) <= sampling.max_tokens
        self.under_way += 1
        try:
            for at in range(1, len(tokens) if self.pace_s else 1):
                await asyncio.sleep(self.pace_s)
                if cuts and at % cuts.max_tokens == 0:
                    cuts.take(_completion(tokens[:at], "cut"))
            await self.gate.wait()
        finally:
            self.under_way -= 1
        self.ended.append(len(tokens))
        return _completion(tokens, "stop" if whole else "length")

    def text(self, tokens: Any) -> str:
        return self.tokenizer.spell(list(map(int, tokens)))

    async def update_weights(self, version: int, tensors: Any, contents: Any = None) -> None: ...

    def usage(self) -> Usage:
        return Usage(0, 0.0, 0.0, 0, 0.0)

    async def stop(self) -> None: ...


def _completion(tokens: Ints, finish: Any) -> Completion:
    count = len(tokens)
    return Completion(tokens, np.full(count, -0.5, np.float32), np.full(count, 3, np.int32), finish)


class Case:
    """An endpoint with one open run."""

    def __init__(self, endpoint: Endpoint, engine: Speaks, limits: AgentEnvironment) -> None:
        self.endpoint, self.engine, self.limits = endpoint, engine, limits
        self.session = self.opened()
        self._closing = list[Any]()

    def opened(self) -> Session:
        policy = SampledPolicy(self.engine, self.engine.tokenizer, Stop())
        return self.endpoint.open(
            lambda key: Session(key, policy, Sampling(200), self.limits, Template(), counts=self.endpoint.counts)
        )

    @property
    def key(self) -> str:
        return self.session.key

    @property
    def base_url(self) -> str:
        return f"{self.endpoint.address}/v1"

    @property
    def counts(self) -> dict[str, int]:
        return dict(self.endpoint.counts)

    def keep(self, client: T) -> T:
        """Register a client to be closed at the end."""
        self._closing.append(client)
        return client

    async def close(self) -> None:
        for client in self._closing:
            await client.close()

    def row(self) -> str:
        """The text of all tokens of the row."""
        return self.engine.text(self.session.row.columns([]).tokens)


@asynccontextmanager
async def served(
    tokenizer: Tokenizer, say: Callable[[str], str] = lambda _: "hi", host: str = "127.0.0.1", **limits: Any
) -> AsyncIterator[Case]:
    """A listening endpoint, stopped at the end of the block."""
    endpoint = Endpoint(host)
    await endpoint.start()
    case = Case(endpoint, Speaks(tokenizer, say), AgentEnvironment(agent="a:b", **limits))
    try:
        # Every piece of a stream is shown, without a minimum interval.
        with mock.patch.object(session, "STREAM_S", 0.0):
            yield case
    finally:
        await case.close()
        await endpoint.stop()
