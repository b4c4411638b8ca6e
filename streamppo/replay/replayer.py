"""The archive in the place of the queue: the learner takes its batches from it, and nobody generates.

consumes     versions from the learner
produces     the batches that the run was trained on, in their order
"""

import asyncio
from pathlib import Path
from typing import Any

from streamppo.replay import archive
from streamppo.replay.lessons import Lessons
from streamppo.types import Push, decode, encode


class Replayer(Lessons):
    """What the learner asks of a `ReplayActor`, and the digests of what it made."""

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
