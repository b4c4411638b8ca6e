"""The two ways to SGLang: processes of the actor's own (own.py), and a server that runs already (server.py).

Both answer the same calls. A call is the name of an endpoint of SGLang's HTTP server and the fields of its request.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Protocol, TypeAlias

HEALTH_S = 0.5
"""Seconds between two looks at whether SGLang is alive."""
Answer: TypeAlias = Any
"""An answer of SGLang: JSON of a server, or SGLang's own objects with the same content. wire.py reads it."""


class Link(Protocol):
    """A running SGLang, until its death."""

    @property
    def version(self) -> tuple[int, ...]:
        """SGLang's version."""
        ...

    @property
    def capacity(self) -> int:
        """Number of completions that it runs at once."""
        ...

    @property
    def ranks(self) -> int:
        """Number of processes that share the model."""
        ...

    async def call(self, name: str, /, **fields: object) -> Answer:
        """Call endpoint `name` and return its answer.

        Raises `ValueError` if SGLang refuses the request, `NotImplementedError` if it has no such endpoint, and
        `ConnectionError` if it is gone. A call to a dead SGLang may also never return.
        """
        ...

    def stream(self, **fields: object) -> AsyncGenerator[Answer]:
        """Call `generate` and give its answers as they come; errors are those of `call`. To be closed at the end."""
        ...

    async def abort(self, rid: str) -> None:
        """Give up request `rid`."""
        ...

    async def death(self) -> str:
        """Say why it has died; empty while it lives."""
        ...

    async def stop(self) -> None:
        """Release everything; processes of the actor's own end."""
        ...


Start: TypeAlias = Callable[[int], Awaitable[Link]]
"""Starts SGLang for the given life, counted from 0. Raises `ModelError` if it does not come to serve."""
