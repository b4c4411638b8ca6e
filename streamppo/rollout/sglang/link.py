"""The two ways to SGLang: an engine that the actor starts (own.py), and a server that runs already (server.py).

Both answer the same calls. A call is the name of an endpoint of SGLang's HTTP server and the fields of its request.
"""

from typing import Any, Protocol

HEALTH_S = 0.5
"""Between two looks at whether SGLang is alive."""


class Link(Protocol):
    """A running SGLang. `start` may be called again after a death."""

    @property
    def version(self) -> tuple[int, ...]:
        """SGLang's."""
        ...

    @property
    def capacity(self) -> int:
        """Completions that it runs at once."""
        ...

    @property
    def ranks(self) -> int:
        """Processes that share the model."""
        ...

    async def start(self, life: int) -> None:
        """Until it serves; `life` counts the starts. Raises `ModelError` if it does not come to that."""
        ...

    async def call(self, name: str, /, **fields: Any) -> Any:
        """The answer of endpoint `name`.

        Raises `ValueError` for what SGLang refuses, `NotImplementedError` for what it does not have, and
        `ConnectionError` where it is gone; it may also never answer.
        """
        ...

    async def abort(self, rid: str) -> None:
        """Nobody waits for request `rid` any more."""
        ...

    async def death(self) -> str:
        """Why it has died; empty while it lives."""
        ...

    async def stop(self) -> None:
        """End it, if it is ours."""
        ...
