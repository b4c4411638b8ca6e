"""How weights get from a rollout actor, which has verified their bytes, into SGLang's processes."""

# SGLang is not part of what this project is checked with.
# pyright: reportMissingImports=false

import asyncio
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor

from streamppo.rollout.sglang.link import Link

Named = Sequence[tuple[str, Tensor]]


class Carrier(Protocol):
    """A way for weights. `flush` empties SGLang's cache of prefixes with the last of them."""

    async def carry(self, link: Link, version: int, tensors: Mapping[str, Tensor], *, flush: bool) -> None:
        """Load `tensors` into a paused SGLang as `version`. Raises `ValueError` if it refuses them."""
        ...

    async def connect(self, link: Link) -> None:
        """`link` leads to processes that have just started."""
        ...


class BySharedMemory:
    """Flat buckets in shared memory: for an SGLang on this machine."""

    def __init__(self, bucket_bytes: int, *, server: bool) -> None:
        self._bucket_bytes = bucket_bytes
        if server:
            # The default hands over open files, and only to processes that this one has started.
            torch.multiprocessing.set_sharing_strategy("file_system")
        self._server = server

    async def connect(self, link: Link) -> None:
        """Nothing to do."""

    async def carry(self, link: Link, version: int, tensors: Mapping[str, Tensor], *, flush: bool) -> None:
        """See `Carrier.carry`."""
        for part, last in _parts(tensors, self._bucket_bytes):
            payloads = [_serialize(part, text=self._server) for _ in range(link.ranks)]
            await link.call(
                "update_weights_from_tensor",
                serialized_named_tensors=payloads,
                load_format="flattened_bucket",
                **_ending(version, last=last, flush=flush),
            )


class ByGroup:
    """Broadcasts in a process group of this actor and SGLang's ranks: for an SGLang on any machine.

    NCCL where this actor has a GPU that SGLang has not, gloo otherwise.
    """

    def __init__(self, bucket_bytes: int, *, url: str, gpu: bool) -> None:
        self._bucket_bytes = bucket_bytes
        self._url = url
        self._backend = "nccl" if gpu else "gloo"
        self._device = "cuda" if gpu else "cpu"
        self._groups = 0

    async def connect(self, link: Link) -> None:
        """Make a group with SGLang's ranks."""
        from sglang.srt.utils.common import init_custom_process_group

        host, port = _address(self._url)
        self._groups += 1
        self._name = f"streamppo-{host}-{port}-{self._groups}"
        world = 1 + link.ranks
        theirs = link.call(
            "init_weights_update_group",
            master_address=host,
            master_port=port,
            rank_offset=1,
            world_size=world,
            group_name=self._name,
            backend=self._backend,
        )
        ours = asyncio.to_thread(
            init_custom_process_group,
            backend=self._backend,
            init_method=f"tcp://{host}:{port}",
            world_size=world,
            rank=0,
            group_name=self._name,
        )
        _, self._group = await asyncio.gather(theirs, ours)

    async def carry(self, link: Link, version: int, tensors: Mapping[str, Tensor], *, flush: bool) -> None:
        """See `Carrier.carry`."""
        for part, last in _parts(tensors, self._bucket_bytes):
            theirs = link.call(
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


class ByDisk:
    """Files in a folder that both sides reach."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def connect(self, link: Link) -> None:
        """Nothing to do."""

    async def carry(self, link: Link, version: int, tensors: Mapping[str, Tensor], *, flush: bool) -> None:
        """See `Carrier.carry`. The files are gone when it returns."""
        from safetensors.torch import save_file

        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            await asyncio.to_thread(save_file, dict(tensors), self._folder / "model.safetensors")
            ending = _ending(version, last=True, flush=flush)
            await link.call("update_weights_from_disk", model_path=str(self._folder), **ending)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)


def _parts(tensors: Mapping[str, Tensor], bucket_bytes: int) -> Iterator[tuple[Named, bool]]:
    """`tensors` in parts of about `bucket_bytes`, and whether it is the last part."""
    part: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors.items():
        if part and size + tensor.nbytes > bucket_bytes:
            yield part, False
            part, size = [], 0
        part.append((name, tensor))
        size += tensor.nbytes
    yield part, True


def _ending(version: int, *, last: bool, flush: bool) -> dict[str, Any]:
    """The version holds, and the cache is emptied, once all parts have arrived."""
    return {"weight_version": str(version) if last else None, "flush_cache": last and flush}


def _bucket(part: Named) -> Any:
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    return FlattenedTensorBucket(named_tensors=list(part))


def _serialize(part: Named, *, text: bool) -> Any:
    """A handle on the part's tensors in shared memory; it can be opened once."""
    from sglang.srt.utils import MultiprocessingSerializer

    bucket = _bucket(part)
    held = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
    return MultiprocessingSerializer.serialize(held, output_str=text)


def _address(url: str) -> tuple[str, int]:
    """This machine's address as SGLang sees it, and a free port."""
    host = "127.0.0.1"
    if url:
        parts = urlsplit(url)
        with socket.create_connection((parts.hostname or "", parts.port or 80)) as there:
            host = there.getsockname()[0]
    with socket.create_server((host, 0)) as free:
        return host, free.getsockname()[1]
