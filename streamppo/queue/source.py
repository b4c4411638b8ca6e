"""The archive in the place of the queue: the learner takes its batches from it, and nobody generates.

consumes     versions from the learner
produces     the batches that the run was trained on, in their order
"""

import asyncio
from functools import lru_cache
from pathlib import Path
from typing import Any

from streamppo.queue import archive
from streamppo.types import Push, decode, encode


class Lessons:
    """What a learner may ask of whoever stands in the place of the queue. Raises `JournalError` for a damaged run."""

    async def lessons(self, run: str) -> list[int]:
        """The versions whose batches the run in the folder `run` has archived."""
        return (await asyncio.to_thread(_opened, run)).versions()

    async def lesson(self, run: str, version: int) -> bytes:
        """One of these batches."""
        return encode(await asyncio.to_thread(lambda: _opened(run).batch(version)))


class Replayer(Lessons):
    """What the learner asks of a `QueueActor`, and the digests of what it made."""

    def __init__(self, run: str) -> None:
        self._archive = archive.open(Path(run))
        self._digests: dict[int, str] = {}

    async def take(self, version: int) -> bytes:
        """The batch that was trained on from `version`."""
        return encode(await asyncio.to_thread(self._archive.batch, version))

    async def publish(self, push: bytes, refs: list[Any], values: bytes, learner: int) -> None:
        """Note what the learner made."""
        described = decode(push, Push)
        self._digests[described.version] = described.digest

    async def another_life(self, known: str) -> str:
        """There is only one."""
        if known:
            await asyncio.Event().wait()
        return "only"

    async def digests(self) -> dict[int, str]:
        """The digest of every version that was made."""
        return self._digests


@lru_cache(maxsize=1)
def _opened(run: str) -> archive.Archive:
    """Opened once: the whole journal is checked for it, and all ranks must see the same batches."""
    return archive.open(Path(run))
