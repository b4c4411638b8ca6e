"""The HTTP client of remote scorers and of a remote teacher."""

import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from itertools import cycle

import httpx
import msgspec

from streamppo.errors import Retryable, TaskError
from streamppo.tasks.rewards.outcome import QUOTED

BUSY = (408, 425, 429, 500, 502, 503, 504)
"""Status codes after which a retry of the request may succeed."""
CONNECTIONS = 32
"""Connections of one client. For every request httpx scans all connections of its client, so more would be slow."""
DIRECT: Mapping[str, httpx.AsyncBaseTransport | None] = dict.fromkeys(
    f"all://{host}" for host in ("localhost", "127.0.0.1", "[::1]")
)
"""Hosts that are called without the environment's proxy: on the proxy's machine these names mean the proxy itself."""


class Client:
    """Posts JSON over several clients. Raises `TaskError` if `key_env`, the variable of a bearer token, is not set."""

    def __init__(self, key_env: str, concurrency: int) -> None:
        headers = {"Content-Type": "application/json"}
        if key_env:
            if key_env not in os.environ:
                raise TaskError(f"the environment variable {key_env!r} (key_env) is not set")
            headers["Authorization"] = f"Bearer {os.environ[key_env]}"
        tls, limits = httpx.create_ssl_context(), httpx.Limits(max_connections=CONNECTIONS)
        # No timeout: httpx would bound each read, but the caller bounds the whole call.
        self._clients = [
            httpx.AsyncClient(headers=headers, timeout=None, verify=tls, limits=limits, mounts=DIRECT)
            for _ in range(math.ceil(concurrency / CONNECTIONS))
        ]
        self._next_client = cycle(self._clients)
        self._encoder = msgspec.json.Encoder(enc_hook=str)

    async def post(self, url: str, body: Mapping[str, object]) -> bytes:
        """Return the answer's content. Raises `Retryable`, or `TaskError` with the server's message."""
        try:
            response = await next(self._next_client).post(url, content=self._encoder.encode(body))
        except httpx.TransportError as error:
            raise Retryable(f"{url}: {error!r}") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise TaskError(f"{url}: {error!r}") from error
        if response.status_code in BUSY:
            raise Retryable(f"{url}: status {response.status_code}", _seconds(response.headers.get("retry-after", "")))
        if not response.is_success:
            raise TaskError(f"{url}: status {response.status_code}: {response.text[:QUOTED]}")
        return response.content

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()


def _seconds(retry_after: str) -> float:
    """Return the seconds that a server asks to wait, by a number or a date; 0 for anything else."""
    with suppress(ValueError):
        return max(0.0, float(retry_after))
    with suppress(ValueError):
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    return 0.0
