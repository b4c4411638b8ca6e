"""Processes that kill themselves at a chosen call of a push or a swap: a learner rank and a rollout actor."""

import asyncio
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from push_case import Rank, Remote, Tensors
from transformers import Qwen2Config

from streamppo.rollout.embedded.engine import EmbeddedEngine
from streamppo.rollout.embedded.fused_decoder import FusedDecoder
from streamppo.rollout.embedded.requests import EndTokens
from streamppo.rollout.puller import Puller
from streamppo.rollout.weight_sync import WeightSync
from streamppo.types import encode
from streamppo.weights import buckets, content, folder
from streamppo.weights.adapters import WholeModel
from streamppo.weights.replica import Replica

SETTINGS = Qwen2Config(
    vocab_size=37,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
Chain = list[tuple[bytes, list[bytes]]]
"""Encoded pushes, each with the references of its buckets."""
Carried = dict[str, tuple[tuple[int, ...], np.ndarray]]
"""bfloat16 tensors by name, as (shape, bits)."""


def carried(tensors: Tensors) -> Carried:
    return {name: (tuple(one.shape), one.view(torch.int16).numpy()) for name, one in tensors.items()}


def received(tensors: Carried) -> Tensors:
    return {name: torch.from_numpy(bits.copy()).view(torch.bfloat16) for name, (_, bits) in tensors.items()}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying(owner: Any, name: str, at: int) -> None:
    """Kill this process at the beginning of call number `at` of `owner.name`."""
    real, calls = getattr(owner, name), [0]

    def counted(*arguments: Any, **keywords: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            die()
        return real(*arguments, **keywords)

    setattr(owner, name, counted)


# --- a rank --------------------------------------------------------------------------------------------------

RANK_DIES: dict[str, Callable[[], None]] = {
    "in the hash of its shards": lambda: dying(buckets, "hash_tensor", 5),
    "between two buckets": lambda: dying(folder.FolderSender, "_write", 2),
    "in the middle of a file": lambda: dying(folder.os, "replace", 2),
    "when all is written and nobody knows": lambda: dying(folder.FolderSender, "drop", 1),
}


def rank(path: str, number: int, version: int, tensors: Carried, pipe: Connection, dies: str) -> None:
    """Put this rank's share of a version, drop older versions, and report the push."""
    torch.set_num_threads(1)
    sender, present = folder.FolderSender(Path(path), number), received(tensors)
    made = Rank(present, number, 2, bucket_bytes=700)
    RANK_DIES[dies]()
    push, arrays = made.push(version, present)
    refs = sender.put(version, arrays)
    sender.drop(version)
    pipe.send((encode(push), refs))


# --- a rollout actor -----------------------------------------------------------------------------------------

ACTOR_DIES: dict[str, Callable[[], None]] = {
    "in the middle of a fetch": lambda: dying(folder, "_read", 2),
    "in the middle of unpacking": lambda: dying(Replica, "_use", 7),
    "ahead of the copy": lambda: dying(FusedDecoder, "stage", 1),
    "in the middle of the comparison": lambda: dying(content, "hash_tensor", 5),
    "in the swap itself": lambda: dying(FusedDecoder, "adopt", 1),
    "after the swap, which nobody knows of": lambda: dying(Actor, "_told", 1),
}


class Actor:
    """A queue for one rollout actor: it returns the chain `first`, then the chain `then`."""

    def __init__(self, first: Chain, then: Chain) -> None:
        self.chains = [first, then]
        self.weights_after = Remote(self._after)

    async def _after(self, name: str, version: int, have: int) -> Chain:
        if self.chains:
            return self.chains.pop(0)
        self._told()
        return await asyncio.Event().wait() or []

    def _told(self) -> None:
        """Called when the engine holds the second version and its actor waits for a newer one."""


def actor(first: Chain, then: Chain, dies: str) -> None:
    """Begin with the first chain, and swap to the second; the exit code is 0 if the process survives."""
    torch.set_num_threads(1)

    async def story() -> None:
        queue: Any = Actor(first, then)
        puller = Puller("a", queue, folder.FolderReceiver())
        await puller.newer(-1)
        engine = EmbeddedEngine(
            SETTINGS,
            puller.replica.tensors,
            version=puller.replica.version,
            slots=1,
            max_total_tokens=64,
            ends=EndTokens({1}),
            seed=0,
            dtype=torch.bfloat16,
        )
        ACTOR_DIES[dies]()
        following = asyncio.create_task(WeightSync(puller, engine, WholeModel()).run())
        await asyncio.wait({following}, timeout=60)

    asyncio.run(story())
