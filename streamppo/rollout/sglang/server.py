"""A running SGLang server, on this machine or in the cluster's private network."""

import asyncio
import ipaddress
import logging
import socket
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from urllib.parse import urlsplit

import httpx
import msgspec

from streamppo.config.rollout import SGLangEngine
from streamppo.errors import ModelError
from streamppo.rollout.sglang import checks, wire
from streamppo.rollout.sglang.link import HEALTH_S, Answer

SILENT_S = 20.0
"""A server whose HTTP process gives no answer for this long counts as dead."""
IDLE_S = 2.0
"""Idle connections are closed after this long. SGLang closes them after 5 s, and would lose a request sent then."""
ALIVE_S = 60
"""A request may last for many minutes without a byte. Probes of this interval keep routers from forgetting it."""
GATEWAY = (httpx.codes.BAD_GATEWAY, httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.GATEWAY_TIMEOUT)
log = logging.getLogger(__name__)


class ServerLink:
    """A `Link` to a server. `client` is connected to `url`; `info` is the server's answer to /server_info."""

    def __init__(self, client: httpx.AsyncClient, url: str, slots: int, info: Mapping[str, Answer]) -> None:
        states = info.get("internal_states") or [{}]
        room = sum(state.get("effective_max_running_requests_per_dp") or slots for state in states)
        self.capacity, self.ranks = min(slots, room), int(info.get("tp_size", 1))
        self.longest, self.is_ordered = checks.longest(info), False
        self._client, self._url = client, url

    async def call(self, name: str, /, **fields: object) -> Answer:
        if self._client.is_closed:
            raise ConnectionError(f"the connection to {self._url} is closed")
        try:
            answer = await self._client.post(f"/{name}", json=fields)
        except httpx.TransportError as error:
            raise ConnectionError(f"{type(error).__name__} at {self._url}") from error
        content = _read(answer, self._url)
        return content.get("ranks") if name == "weights_checker" else content

    async def stream(self, **fields: object) -> AsyncGenerator[Answer]:
        if self._client.is_closed:
            raise ConnectionError(f"the connection to {self._url} is closed")
        try:
            async with self._client.stream("POST", "/generate", json=fields) as response:
                if response.is_error:
                    await response.aread()
                    _read(response, self._url)
                async for answer in _events(response):
                    yield answer
        except httpx.TransportError as error:
            raise ConnectionError(f"{type(error).__name__} at {self._url}") from error

    async def abort(self, rid: str) -> None:
        """See `Link.abort`. `death` detects a server that does not answer."""
        with suppress(ValueError, TimeoutError):
            async with asyncio.timeout(SILENT_S):
                await self.call("abort_request", rid=rid)

    async def death(self) -> str:
        """See `Link.death`. A paused server cannot answer /health. Idle connections may be closed, so try twice."""
        try:
            try:
                answer = await self._client.get("/model_info", timeout=SILENT_S)
            except (httpx.NetworkError, httpx.RemoteProtocolError):
                answer = await self._client.get("/model_info", timeout=SILENT_S)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            return f"the server at {self._url} gives no answer ({type(error).__name__})"
        return ""

    async def stop(self) -> None:
        await self._client.aclose()


def _read(answer: httpx.Response, url: str) -> Answer:
    """Return the content of an answer. Raises `ValueError` for a refusal, `ConnectionError` if a proxy wrote it."""
    try:
        content = msgspec.json.decode(answer.content) if answer.content else None
    except msgspec.DecodeError:
        content = answer.text[:400]
    fields = content if isinstance(content, dict) else {}
    if answer.status_code in GATEWAY and not fields:
        raise ConnectionError(f"status {answer.status_code} at {url}")
    if isinstance(content, str):
        # For example, SGLang answers an unexpected error with plain text.
        raise ValueError(f"status {answer.status_code}: {content}")
    if answer.is_error or fields.get("success") is False:
        reason = fields.get("message") or fields.get("error") or fields.get("detail")
        reason = reason.get("message") if isinstance(reason, dict) else reason
        raise ValueError(f"status {answer.status_code}: {reason}" if answer.is_error else str(reason))
    return content


async def _events(response: httpx.Response) -> AsyncGenerator[Answer]:
    async for line in _lines(response):
        if line.startswith(b"data: {"):
            answer: Answer = msgspec.json.decode(line.removeprefix(b"data: "))
            if "error" in answer:
                raise ValueError(str(answer["error"].get("message")))
            yield answer


async def _lines(response: httpx.Response) -> AsyncGenerator[bytes]:
    """Yield the lines of an answer as they arrive, except a last line without a newline, which is incomplete."""
    incomplete: list[bytes] = []
    # `aiter_lines` would also split at other separators, such as U+2028, which a completion's text may contain.
    async for part in response.aiter_bytes():
        *ends, rest = part.split(b"\n")
        for end in ends:
            yield b"".join([*incomplete, end])
            incomplete = []
        incomplete.append(rest)


async def connect(
    settings: SGLangEngine, key: str, slots: int, strings: Sequence[str], learner: Mapping[str, object], number: int
) -> ServerLink:
    """Wait for the only server of `settings.urls`, and reset state that a dead client may have left in it."""
    (url,) = settings.urls
    async with AsyncExitStack() as undo:
        client = _client(url, key, slots)
        undo.push_async_callback(client.aclose)
        info = await _answer(client, url, settings.start_s)
        checks.check_server(info, url)
        wire.parse_supported_version(info["version"], f"the SGLang server at {url}")
        server = ServerLink(client, url, slots, info)
        if settings.routes:
            checks.check_routes(info)
        checks.check_strings(info, strings)
        for difference in checks.differences(info, learner):
            log.warning("the SGLang server at %s has %s: log-probs differ more than necessary", url, difference)
        with suppress(ValueError):
            await server.call("end_weight_update")
        await server.call("continue_generation")
        await server.call("abort_request", abort_all=True)
        undo.pop_all()
    return server


def _client(url: str, key: str, slots: int) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=slots, keepalive_expiry=IDLE_S)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    # A client with a transport of its own ignores the environment's proxies.
    transport = httpx.AsyncHTTPTransport(limits=limits, socket_options=list(_probes()))
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=None, transport=transport)


def _probes() -> Iterator[tuple[int, int, int]]:
    """Yield the socket options of TCP's keep-alive, as far as the operating system has them."""
    yield socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1
    for name, value in (("TCP_KEEPIDLE", ALIVE_S), ("TCP_KEEPINTVL", ALIVE_S), ("TCP_KEEPCNT", 3)):
        if option := getattr(socket, name, None):
            yield socket.IPPROTO_TCP, option, value


async def _answer(client: httpx.AsyncClient, url: str, start_s: float) -> Mapping[str, Answer]:
    begin, is_logged = time.monotonic(), False
    while True:
        try:
            answer = await client.get("/server_info", timeout=SILENT_S)
            if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
                raise ModelError(f"the SGLang server at {url} refuses the key: see rollout.engine.api_key_env")
            if answer.is_client_error or answer.is_redirect:
                raise ModelError(
                    f"{url} is no SGLang server: it answers /server_info with status {answer.status_code}; "
                    "rollout.engine.urls has no path, such as /v1"
                )
            return answer.raise_for_status().json()
        except (httpx.HTTPError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            if time.monotonic() > begin + start_s:
                raise ModelError(f"no SGLang server can be reached at {url} ({reason})") from error
        if not is_logged:
            log.info("waits up to rollout.engine.start_s (%g s) for the SGLang server at %s (%s)", start_s, url, reason)
            is_logged = True
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
    # Some clusters number their machines in 100.64.0.0/10, which is neither private nor public.
    if any(address.is_global for address in addresses):
        raise ModelError(f"the SGLang server at {url} has a public address: everybody who reaches it controls it")
    if not key:
        raise ModelError(f"the SGLang server at {url} needs a key (--api-key), given by rollout.engine.api_key_env")
