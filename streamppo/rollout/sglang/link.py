"""The protocol of connections to SGLang's endpoints: of its own processes (in_process.py) or a server (server.py)."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Protocol, TypeAlias

HEALTH_S = 0.5
"""Seconds between two checks that SGLang is alive."""
Answer: TypeAlias = Any
"""An answer of SGLang: a server's JSON, or SGLang's own objects with the same content. wire.py reads it."""


class Link(Protocol):
    """A connection to a running SGLang."""

    capacity: int
    """Maximum number of completions that SGLang runs concurrently."""
    ranks: int
    """Number of SGLang's processes that share the model."""
    is_ordered: bool
    """True if all tokens sampled before a pause arrive before the answer to the pause."""
    longest: int
    """Maximum number of tokens in a row (prompt and completion), by SGLang's context and cache."""

    async def call(self, name: str, /, **fields: object) -> Answer:
        """Call endpoint `name` and return its answer.

        Raises `ValueError` if SGLang refuses the request, and `ConnectionError` if SGLang has ended. A call to a dead
        SGLang may also never return.
        """
        ...

    def stream(self, **fields: object) -> AsyncGenerator[Answer]:
        """Yield the answers to `generate` as they arrive. Raises as `call` does. Callers must close the generator."""
        ...

    async def abort(self, rid: str) -> None: ...

    async def death(self) -> str:
        """Return the reason for SGLang's death; empty while it runs."""
        ...

    async def stop(self) -> None:
        """Release everything; SGLang's processes end if this actor has started them."""
        ...


Start: TypeAlias = Callable[[int], Awaitable[Link]]
"""Starts SGLang, or waits for a server. The argument counts starts from 0.

Raises `ModelError` if SGLang cannot start, and `ConnectionError` if another start may succeed: if it is killed
meanwhile, or if another process has taken a port.
"""
