"""A server that runs already, on this machine or in the cluster's private network."""

import asyncio
import contextlib
import ipaddress
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import httpx

from streamppo.errors import ModelError
from streamppo.rollout.sglang import wire
from streamppo.rollout.sglang.link import HEALTH_S

SILENT_S = 5.0
"""A server that has not answered for so long is taken for dead."""


class Server:
    """A server that runs already, on this machine or in the cluster's private network."""

    def __init__(self, url: str, key: str, *, slots: int, kv: str, start_s: float) -> None:
        check_address(url, key)
        self.version, self.capacity, self.ranks = (0,), slots, 1
        self._url, self._slots, self._kv, self._start_s = url, slots, kv, start_s
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=slots)
        self._client = httpx.AsyncClient(base_url=url, headers=headers, timeout=None, limits=limits)

    async def start(self, life: int) -> None:
        """See `Link.start`: wait for it, and undo what a client that died may have left behind."""
        said = await self._wait()
        self.version = wire.supported(said["version"], f"the SGLang server at {self._url}")
        wire.check_server(said, self._kv, self.version)
        states = said.get("internal_states") or [{}]
        room = sum(state.get("effective_max_running_requests_per_dp") or self._slots for state in states)
        self.capacity, self.ranks = min(self._slots, room), int(said.get("tp_size", 1))
        with contextlib.suppress(ValueError, NotImplementedError):
            await self.call("end_weight_update")
        await self.call("continue_generation")
        await self.call("abort_request", abort_all=True)

    async def call(self, name: str, /, **fields: Any) -> Any:
        """See `Link.call`."""
        try:
            answer = await self._client.post(f"/{name}", json=fields)
        except httpx.TransportError as error:
            raise ConnectionError(f"{type(error).__name__} at {self._url}") from error
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise NotImplementedError(name)
        said = answer.json() if answer.content else None
        fields = said if isinstance(said, dict) else {}
        if answer.is_error or fields.get("success") is False:
            raise ValueError(str(fields.get("message") or fields.get("error") or f"status {answer.status_code}"))
        return fields["ranks"] if name == "weights_checker" else said

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
        """See `Link.stop`: a server that others started goes on."""

    async def _wait(self) -> dict[str, Any]:
        deadline = time.monotonic() + self._start_s
        while True:
            try:
                answer = await self._client.get("/server_info", timeout=SILENT_S)
                if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
                    raise ModelError(
                        f"the SGLang server at {self._url} refuses the key: see rollout.engine.api_key_env"
                    )
                return answer.raise_for_status().json()
            except (httpx.HTTPError, ValueError) as error:
                if time.monotonic() > deadline:
                    why = f"{type(error).__name__}: {error}"
                    raise ModelError(f"no SGLang server can be reached at {self._url} ({why})") from error
            await asyncio.sleep(HEALTH_S)


def check_address(url: str, key: str) -> None:
    """A server outside of this machine needs a key and an address that is not public. Raises `ModelError`."""
    parts = urlsplit(url)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or 80, proto=socket.IPPROTO_TCP)
    except OSError as error:
        raise ModelError(f"no SGLang server can be reached at {url} ({error})") from error
    addresses = [ipaddress.ip_address(entry[4][0]) for entry in found]
    if all(address.is_loopback for address in addresses):
        return
    if not all(address.is_private for address in addresses):
        raise ModelError(f"the SGLang server at {url} has a public address: whoever reaches it controls it")
    if not key:
        raise ModelError(f"the SGLang server at {url} needs a key (--api-key), given by rollout.engine.api_key_env")
