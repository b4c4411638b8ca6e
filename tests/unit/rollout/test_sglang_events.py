"""The stream of a server: its events become answers, and its faults errors."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import httpx
import pytest
from fake_sglang import run

from streamppo.rollout.sglang.server import Server

EVENT = b'data: {"meta_info": {"completion_tokens": %d}}\n\n'
INFO = {"version": "0.5.21"}


def served(*parts: bytes, status: int = 200, breaks: bool = False) -> Server:
    """A server that answers every call by `parts` as they are cut."""

    async def body() -> AsyncIterator[bytes]:
        for part in parts:
            yield part
        if breaks:
            raise httpx.RemoteProtocolError("it hung up")

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/generate"
        return httpx.Response(status, content=body())

    client = httpx.AsyncClient(verify=False, transport=httpx.MockTransport(answer), base_url="http://localhost:1")
    return Server(client, "http://localhost:1", 4, INFO)


async def counts(link: Server, into: list[int]) -> None:
    async with aclosing(link.stream(rid="r", input_ids=[3])) as answers:
        async for answer in answers:
            into.append(answer["meta_info"]["completion_tokens"])


def test_events_become_answers_however_they_are_cut_into_packets() -> None:
    async def case() -> None:
        whole, found = EVENT % 1 + EVENT % 9 + b"data: [DONE]\n\n", list[int]()
        await counts(served(whole[:20], whole[20:60], whole[60:]), found)
        assert found == [1, 9]

    run(case())


@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        ({"parts": [b'data: {"error": {"message": "too long"}}\n\n']}, ValueError, "too long"),
        ({"parts": [b"no such field"], "status": 400}, ValueError, "status 400: no such field"),
        ({"parts": [EVENT % 1], "breaks": True}, ConnectionError, "RemoteProtocolError at http://localhost:1"),
    ],
)
def test_a_refusal_and_a_broken_connection_are_told_apart(made: dict[str, Any], error: type, message: str) -> None:
    async def case() -> None:
        link, found = served(*made.pop("parts"), **made), list[int]()
        with pytest.raises(error, match=message):
            await counts(link, found)
        await link.stop()
        with pytest.raises(ConnectionError, match="is closed"):
            await counts(link, found)

    asyncio.run(case())
