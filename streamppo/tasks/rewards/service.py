"""Scorers behind HTTP: a plain JSON service, or a language model as a judge."""

import math
import os
import re
from collections.abc import Mapping
from itertools import cycle

import httpx
import msgspec

from streamppo.config.reward import JudgeScorer, ServiceScorer
from streamppo.errors import Retryable, TaskError
from streamppo.tasks.read import Row
from streamppo.tasks.rewards.outcome import QUOTED, Outcome, check, check_verl, failed
from streamppo.tasks.rewards.signature import Columns, Texts
from streamppo.types import Reward, ScoredText

BUSY = (408, 425, 429, 500, 502, 503, 504)
"""Status codes after which the same request may work a little later."""


CONNECTIONS = 32
"""Of one client. httpx looks at all of a client's connections for every request, so a large one crawls."""


class Service:
    """Asks one address over several clients in turn. Errors of transport and of a busy server are retryable."""

    def __init__(self, config: ServiceScorer | JudgeScorer) -> None:
        self._config = config
        headers = {"Content-Type": "application/json"}
        if config.key_env:
            if config.key_env not in os.environ:
                raise TaskError(f"the environment variable {config.key_env!r} (key_env) is not set")
            headers["Authorization"] = f"Bearer {os.environ[config.key_env]}"
        tls, limits = httpx.create_ssl_context(), httpx.Limits(max_connections=CONNECTIONS)
        # httpx would bound every read; the caller bounds the whole call.
        self._clients = [
            httpx.AsyncClient(headers=headers, timeout=None, verify=tls, limits=limits)
            for _ in range(math.ceil(config.concurrency / CONNECTIONS))
        ]
        self._next_client = cycle(self._clients)
        self._encoder = msgspec.json.Encoder(enc_hook=str)

    async def call(self, texts: Texts, columns: Columns) -> tuple[Outcome, ...]:
        """Score one trajectory: the first of `texts`, which is the only one."""
        try:
            match self._config:
                case ServiceScorer(url=url):
                    return (check_verl(await self._post(url, _question(texts[0], columns[0])), texts[0]),)
                case JudgeScorer() as judge:
                    return (await self._judge(judge, texts[0], columns[0]),)
        # A server of other people may answer anything.
        except Exception as error:
            return (failed(error),)

    async def close(self) -> None:
        """Close all connections."""
        for client in self._clients:
            await client.aclose()

    async def _judge(self, judge: JudgeScorer, text: ScoredText, columns: Row) -> Outcome:
        question = _fill(judge.question, {**columns, "prompt": text.prompt, "completion": text.completion})
        answer = await self._post(
            f"{judge.url.rstrip('/')}/chat/completions",
            {
                "model": judge.model,
                "messages": [{"role": "user", "content": question}],
                "max_tokens": judge.max_tokens,
                "temperature": 0,
            },
        )
        match answer:
            case {"choices": [{"message": {"content": content}}, *_]}:
                said = str(content)
            case _:
                raise TaskError(f"{judge.url}: no chat completion: {repr(answer)[:QUOTED]}")
        found = re.search(judge.pattern, said.strip())
        if found is None:
            return Outcome(reason=f"the judge gave no number: {said[-QUOTED:]!r}")
        return check(Reward(score=float(found[1]) / judge.scale, explanation=said), text)

    async def _post(self, url: str, body: Mapping[str, object]) -> object:
        try:
            response = await next(self._next_client).post(url, content=self._encoder.encode(body))
        except httpx.TransportError as error:
            raise Retryable(f"{url}: {error!r}") from error
        if response.status_code in BUSY:
            raise Retryable(f"{url}: status {response.status_code}")
        if not response.is_success:
            raise TaskError(f"{url}: status {response.status_code}: {response.text[:QUOTED]}")
        return response.json()


def _question(text: ScoredText, columns: Row) -> dict[str, object]:
    return {
        "prompt": text.prompt,
        "messages": text.messages,
        "completion": text.completion,
        "finish": text.finish,
        "source": text.source,
        "columns": columns,
    }


def _fill(template: str, values: Row) -> str:
    """Replace known names in braces, and nothing else: a completion may hold braces of its own."""
    return re.sub(r"\{(\w+)\}", lambda m: str(values[m[1]]) if m[1] in values else m[0], template)
