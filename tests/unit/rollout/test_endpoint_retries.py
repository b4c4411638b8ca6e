"""Retries of the real clients: an answer that was written and never read is neither sampled nor trained twice."""

import asyncio
from importlib import import_module
from typing import Any

import agent_case
import pytest
from agent_case import Case, served

from streamppo.rollout.endpoint import session
from streamppo.tasks.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return agent_case.tokenizer(tmp_path_factory.mktemp("tokenizer"))


def client(case: Case, dialect: str, lost: list[str]) -> Any:
    """A client whose connection breaks behind the answer of its first request, which it then has not read."""
    import anthropic
    import openai

    library: Any = openai if dialect == "openai" else anthropic
    base: Any = library.DefaultAsyncHttpxClient
    # httpx, or httpx2 in newer versions.
    network = import_module(base.__base__.__module__.partition(".")[0])

    class Breaks(base):
        async def send(self, request: Any, **options: Any) -> Any:
            answer = await super().send(request, **options)
            if not lost:
                lost.append((await answer.aread()).decode())
                raise network.ReadError("the connection was lost")
            return answer

    given: Any = {"api_key": case.key, "max_retries": 2, "http_client": Breaks()}
    if dialect == "openai":
        return case.keep(openai.AsyncOpenAI(base_url=case.base_url, **given))
    return case.keep(anthropic.AsyncAnthropic(base_url=case.endpoint.address, **given))


async def ask(client: Any, dialect: str, text: str = "a") -> str:
    messages = [{"role": "user", "content": text}]
    if dialect == "openai":
        made = await client.chat.completions.create(model="m", messages=messages)
        return made.choices[0].message.content
    made = await client.messages.create(model="m", messages=messages, max_tokens=50)
    return made.content[0].text


@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
def test_a_retry_behind_an_answer_that_was_not_read_gets_the_same_answer(dialect: str, tokenizer: Tokenizer) -> None:
    async def main() -> None:
        answers = iter(["first", "second", "third"])
        async with served(tokenizer, lambda _: next(answers)) as case:
            lost = list[str]()
            asking = client(case, dialect, lost)
            assert await ask(asking, dialect) == "first" and "first" in lost[0]
            assert case.counts["joined"] == 1 and len(case.engine.asked) == 1
            # The same request without a retry is a new sample.
            assert await ask(asking, dialect) == "second"
            assert case.session.undelivered == 0 and len(case.session.row.columns([]).branches) == 1

    asyncio.run(main())


def test_a_retry_of_a_request_that_was_turned_away_is_a_sample_of_its_own(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    import openai

    monkeypatch.setattr(session, "MOST_UNDER_WAY", 2)

    async def main() -> None:
        async with served(tokenizer, lambda _: "hi", max_tokens=4096) as case:
            case.engine.gate.clear()
            asking = case.keep(openai.AsyncOpenAI(base_url=case.base_url, api_key=case.key, max_retries=9))
            asked = asyncio.gather(*(ask(asking, "openai") for _ in range(5)))
            while not case.counts.get("too many at once"):
                await asyncio.sleep(0.01)
            case.engine.gate.set()
            assert await asked == ["hi"] * 5
            assert len(case.engine.asked) == 5 and not case.counts.get("joined")

    asyncio.run(main())
