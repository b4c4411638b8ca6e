"""Archived batches of other runs, for a learner whose critic is to know what they earned."""

import asyncio
from functools import lru_cache
from pathlib import Path

from streamppo.replay import archive
from streamppo.types import encode


class Lessons:
    """What a learner may ask of whoever stands in the place of the queue. Raises `JournalError` for a damaged run."""

    async def lessons(self, run: str) -> list[int]:
        """The versions whose batches the run in the folder `run` has archived."""
        return (await asyncio.to_thread(_opened, run)).versions()

    async def lesson(self, run: str, version: int) -> bytes:
        """One of these batches."""
        return encode(await asyncio.to_thread(lambda: _opened(run).batch(version)))


@lru_cache(maxsize=1)
def _opened(run: str) -> archive.Archive:
    """Opened once: the whole journal is checked for it, and all ranks must see the same batches."""
    return archive.open(Path(run))
