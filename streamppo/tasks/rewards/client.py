"""The HTTP client of scorers, and of a teacher, that run elsewhere."""

import math
import os
from collections.abc import Mapping
from itertools import cycle

import httpx
import msgspec

from streamppo.errors import Retryable, TaskError
from streamppo.tasks.rewards.outcome import QUOTED

BUSY = (408, 425, 429, 500, 502, 503, 504)
"""Status codes after which the same request may work a little later."""
CONNECTIONS = 32
"""Of one client. httpx looks at all of a client's connections for every request, so a large one crawls."""


class Client:
    """Posts JSON over several clients in turn. Errors of transport and of a busy server are `Retryable`.

    `key_env` names the environment variable of a bearer token, or is empty; raises `TaskError` if it is not set.
    """

    def __init__(self, key_env: str, concurrency: int) -> None:
        headers = {"Content-Type": "application/json"}
        if key_env:
            if key_env not in os.environ:
                raise TaskError(f"the environment variable {key_env!r} (key_env) is not set")
            headers["Authorization"] = f"Bearer {os.environ[key_env]}"
        tls, limits = httpx.create_ssl_context(), httpx.Limits(max_connections=CONNECTIONS)
        # httpx would bound every read; the caller bounds the whole call.
        self._clients = [
            httpx.AsyncClient(headers=headers, timeout=None, verify=tls, limits=limits)
            for _ in range(math.ceil(concurrency / CONNECTIONS))
        ]
        self._next_client = cycle(self._clients)
        self._encoder = msgspec.json.Encoder(enc_hook=str)

    async def post(self, url: str, body: Mapping[str, object]) -> bytes:
        """Return the content of the answer. Raises `Retryable`, or `TaskError` with what the server says."""
        try:
            response = await next(self._next_client).post(url, content=self._encoder.encode(body))
        except httpx.TransportError as error:
            raise Retryable(f"{url}: {error!r}") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise TaskError(f"{url}: {error!r}") from error
        if response.status_code in BUSY:
            raise Retryable(f"{url}: status {response.status_code}")
        if not response.is_success:
            raise TaskError(f"{url}: status {response.status_code}: {response.text[:QUOTED]}")
        return response.content

    async def close(self) -> None:
        """Close all connections."""
        for client in self._clients:
            await client.aclose()
