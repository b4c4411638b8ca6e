"""Carries weights from a rollout actor, which has verified their bytes, into SGLang's processes."""

# SGLang is not part of what this project is checked with.
# pyright: reportMissingImports=false

import asyncio
import shutil
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias
from urllib.parse import urlsplit
from uuid import uuid4

import torch
from torch import Tensor

from streamppo.rollout.sglang.link import Link

Named: TypeAlias = Sequence[tuple[str, Tensor]]


class Carrier(Protocol):
    """A way for weights into one SGLang, until its death."""

    async def carry(self, version: int, tensors: Mapping[str, Tensor], *, flush: bool) -> None:
        """Load `tensors` into a paused SGLang as `version`; with `flush`, empty its cache of prefixes at the end.

        Raises `ValueError` if it refuses them.
        """
        ...


Connect: TypeAlias = Callable[[Link], Awaitable[Carrier]]
"""Makes the way for weights into an SGLang that has just started."""


class BySharedMemory:
    """Flat buckets in shared memory, for an SGLang on this machine; `server`: this process has not started it."""

    def __init__(self, link: Link, bucket_bytes: int, *, server: bool) -> None:
        self._link, self._bucket_bytes, self._server = link, bucket_bytes, server

    async def carry(self, version: int, tensors: Mapping[str, Tensor], *, flush: bool) -> None:
        """See `Carrier.carry`."""
        for part, last in _parts(tensors, self._bucket_bytes):
            payloads = [_serialize(part, text=self._server) for _ in range(self._link.ranks)]
            await self._link.call(
                "update_weights_from_tensor",
                serialized_named_tensors=payloads,
                load_format="flattened_bucket",
                **_ending(version, last=last, flush=flush),
            )


async def by_shared_memory(bucket_bytes: int, server: bool, link: Link) -> BySharedMemory:
    """Make the way by shared memory. A `Connect` once all but `link` is given."""
    if server:
        # The default hands over open files, and only to processes that this one has started.
        torch.multiprocessing.set_sharing_strategy("file_system")
    return BySharedMemory(link, bucket_bytes, server=server)


class ByGroup:
    """Broadcasts from `device` in a process group of this actor and SGLang's ranks, for an SGLang on any machine."""

    def __init__(
        self, link: Link, bucket_bytes: int, name: str, group: torch.distributed.ProcessGroup, device: str
    ) -> None:
        self._link, self._bucket_bytes = link, bucket_bytes
        self._name, self._group, self._device = name, group, device

    async def carry(self, version: int, tensors: Mapping[str, Tensor], *, flush: bool) -> None:
        """See `Carrier.carry`."""
        for part, last in _parts(tensors, self._bucket_bytes):
            theirs = self._link.call(
                "update_weights_from_distributed",
                names=[name for name, _ in part],
                dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in part],
                shapes=[list(tensor.shape) for _, tensor in part],
                group_name=self._name,
                load_format="flattened_bucket",
                **_ending(version, last=last, flush=flush),
            )
            flat = _bucket(part).get_flattened_tensor().to(self._device)
            await asyncio.gather(theirs, asyncio.to_thread(torch.distributed.broadcast, flat, 0, self._group))


async def by_group(bucket_bytes: int, url: str, gpu: bool, link: Link) -> ByGroup:
    """Make a process group with SGLang's ranks. A `Connect` once all but `link` is given.

    NCCL with `gpu`, if this actor has a GPU that SGLang does not use; gloo otherwise.
    """
    from sglang.srt.utils.common import init_custom_process_group

    host, port = _address(url)
    name = f"streamppo-{host}-{port}-{uuid4().hex[:8]}"
    world, backend = 1 + link.ranks, "nccl" if gpu else "gloo"
    theirs = link.call(
        "init_weights_update_group",
        master_address=host,
        master_port=port,
        rank_offset=1,
        world_size=world,
        group_name=name,
        backend=backend,
    )
    ours = asyncio.to_thread(
        init_custom_process_group,
        backend=backend,
        init_method=f"tcp://{host}:{port}",
        world_size=world,
        rank=0,
        group_name=name,
    )
    _, group = await asyncio.gather(theirs, ours)
    return ByGroup(link, bucket_bytes, name, group, "cuda" if gpu else "cpu")


class ByDisk:
    """Files in a folder that this actor and SGLang both reach."""

    def __init__(self, link: Link, folder: Path) -> None:
        self._link, self._folder = link, folder

    async def carry(self, version: int, tensors: Mapping[str, Tensor], *, flush: bool) -> None:
        """See `Carrier.carry`. The files are gone when it returns."""
        from safetensors.torch import save_file

        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            await asyncio.to_thread(save_file, dict(tensors), self._folder / "model.safetensors")
            ending = _ending(version, last=True, flush=flush)
            # SGLang has begun with random weights, and would take none from files in that format.
            await self._link.call(
                "update_weights_from_disk", model_path=str(self._folder), load_format="auto", **ending
            )
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)


async def by_disk(folder: Path, link: Link) -> ByDisk:
    """Make the way by files. A `Connect` once `folder` is given."""
    return ByDisk(link, folder)


class Bucket(Protocol):
    """SGLang's flat buffer of several tensors."""

    def get_flattened_tensor(self) -> Tensor:
        """The buffer."""
        ...

    def get_metadata(self) -> object:
        """Names and places of the tensors in it."""
        ...


def _parts(tensors: Mapping[str, Tensor], bucket_bytes: int) -> Iterator[tuple[Named, bool]]:
    """Cut `tensors` into parts of about `bucket_bytes`; true comes with the last part."""
    part: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors.items():
        if part and size + tensor.nbytes > bucket_bytes:
            yield part, False
            part, size = [], 0
        part.append((name, tensor))
        size += tensor.nbytes
    yield part, True


def _ending(version: int, *, last: bool, flush: bool) -> dict[str, object]:
    """Let the last part set the version and empty the cache."""
    return {"weight_version": str(version) if last else None, "flush_cache": last and flush}


def _bucket(part: Named) -> Bucket:
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    return FlattenedTensorBucket(named_tensors=list(part))


def _serialize(part: Named, *, text: bool) -> str | bytes:
    """Put a part into shared memory. Returns a handle on it, which can be opened once."""
    from sglang.srt.utils import MultiprocessingSerializer

    bucket = _bucket(part)
    held = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
    return MultiprocessingSerializer.serialize(held, output_str=text)


def _address(url: str) -> tuple[str, int]:
    """Find this machine's address as SGLang at `url` sees it, and a free port."""
    host = "127.0.0.1"
    if url:
        parts = urlsplit(url)
        with socket.create_connection((parts.hostname or "", parts.port or 80)) as there:
            host = there.getsockname()[0]
    with socket.create_server((host, 0)) as free:
        return host, free.getsockname()[1]
