"""A running SGLang server, on this machine or in the cluster's private network."""

import asyncio
import ipaddress
import socket
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from urllib.parse import urlsplit

import httpx
import msgspec

from streamppo.config.rollout import SGLangEngine
from streamppo.errors import ModelError
from streamppo.rollout.sglang import wire
from streamppo.rollout.sglang.link import HEALTH_S, Answer

SILENT_S = 5.0
"""A server without an answer for this long counts as dead."""


class Server:
    """A `Link` to a server. `client` is connected to `url`; `info` is its answer to /server_info."""

    def __init__(self, client: httpx.AsyncClient, url: str, slots: int, info: Mapping[str, Answer]) -> None:
        states = info.get("internal_states") or [{}]
        room = sum(state.get("effective_max_running_requests_per_dp") or slots for state in states)
        self.version = wire.parse_supported_version(info["version"], f"the SGLang server at {url}")
        self.capacity, self.ranks = min(slots, room), int(info.get("tp_size", 1))
        self._client, self._url = client, url

    async def call(self, name: str, /, **fields: object) -> Answer:
        """See `Link.call`."""
        if self._client.is_closed:
            raise ConnectionError(f"the connection to {self._url} is closed")
        try:
            answer = await self._client.post(f"/{name}", json=fields)
        except httpx.TransportError as error:
            raise ConnectionError(f"{type(error).__name__} at {self._url}") from error
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise NotImplementedError(name)
        content = answer.json() if answer.content else None
        answer_fields = content if isinstance(content, dict) else {}
        if answer.is_error or answer_fields.get("success") is False:
            raise ValueError(
                str(answer_fields.get("message") or answer_fields.get("error") or f"status {answer.status_code}")
            )
        return answer_fields.get("ranks") if name == "weights_checker" else content

    async def stream(self, **fields: object) -> AsyncGenerator[Answer]:
        """See `Link.stream`. Its answers are server-sent events."""
        if self._client.is_closed:
            raise ConnectionError(f"the connection to {self._url} is closed")
        try:
            async with self._client.stream("POST", "/generate", json=fields) as response:
                if response.is_error:
                    raise ValueError(f"status {response.status_code}: {(await response.aread())[:400].decode()}")
                async for answer in _events(response):
                    yield answer
        except httpx.TransportError as error:
            raise ConnectionError(f"{type(error).__name__} at {self._url}") from error

    async def abort(self, rid: str) -> None:
        """See `Link.abort`."""
        await self.call("abort_request", rid=rid)

    async def death(self) -> str:
        """See `Link.death`."""
        try:
            (await self._client.get("/health", timeout=SILENT_S)).raise_for_status()
        except httpx.HTTPError as error:
            return f"the server at {self._url} gives no answer ({type(error).__name__})"
        return ""

    async def stop(self) -> None:
        """Close the connections; the server, which the user started, continues running."""
        await self._client.aclose()


async def _events(response: httpx.Response) -> AsyncGenerator[Answer]:
    """Yield the events of a stream. Raises `ValueError` for an error event."""
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            answer = msgspec.json.decode(line.removeprefix("data: "))
            if "error" in answer:
                raise ValueError(str(answer["error"].get("message")))
            yield answer


async def connect(chosen: SGLangEngine, key: str, slots: int, strings: Sequence[str], life: int) -> Server:
    """Wait for the only server of `chosen.urls`, and reset state that a dead client may have left in it.

    It is a `Start` after partial application of all arguments but `life`. At most `slots` completions run concurrently;
    they end at `strings`. Raises `ModelError` for a server that cannot be reached or used.
    """
    (url,) = chosen.urls
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=slots)
    async with AsyncExitStack() as undo:
        client = httpx.AsyncClient(base_url=url, headers=headers, timeout=None, limits=limits)
        undo.push_async_callback(client.aclose)
        info = await _answer(client, url, chosen.start_s)
        server = Server(client, url, slots, info)
        wire.check_server(info, chosen.kv, server.version, routes=chosen.routes)
        wire.check_strings(info, strings)
        with suppress(ValueError, NotImplementedError):
            await server.call("end_weight_update")
        await server.call("continue_generation")
        await server.call("abort_request", abort_all=True)
        undo.pop_all()
    return server


async def _answer(client: httpx.AsyncClient, url: str, start_s: float) -> Mapping[str, Answer]:
    """Request /server_info until the server answers. Raises `ModelError` if it does not within `start_s`."""
    deadline = time.monotonic() + start_s
    while True:
        try:
            answer = await client.get("/server_info", timeout=SILENT_S)
            if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
                raise ModelError(f"the SGLang server at {url} refuses the key: see rollout.engine.api_key_env")
            return answer.raise_for_status().json()
        except (httpx.HTTPError, ValueError) as error:
            if time.monotonic() > deadline:
                why = f"{type(error).__name__}: {error}"
                raise ModelError(f"no SGLang server can be reached at {url} ({why})") from error
        await asyncio.sleep(HEALTH_S)


def check_address(url: str, key: str) -> None:
    """Raise `ModelError` for a server with a public address, or on another machine without a key."""
    parts = urlsplit(url)
    try:
        resolved = socket.getaddrinfo(parts.hostname, parts.port or 80, proto=socket.IPPROTO_TCP)
    except OSError as error:
        raise ModelError(f"no SGLang server can be reached at {url} ({error})") from error
    addresses = [ipaddress.ip_address(entry[4][0]) for entry in resolved]
    if all(address.is_loopback for address in addresses):
        return
    if not all(address.is_private for address in addresses):
        raise ModelError(f"the SGLang server at {url} has a public address: everybody who reaches it controls it")
    if not key:
        raise ModelError(f"the SGLang server at {url} needs a key (--api-key), given by rollout.engine.api_key_env")
