"""Transports weights from a rollout actor, which has verified their bytes, into SGLang's processes."""

# SGLang is not installed where this project is type-checked.
# pyright: reportMissingImports=false

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Protocol, TypeAlias, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

import torch
from torch import Tensor

from streamppo import process
from streamppo.rollout.sglang import wire
from streamppo.rollout.sglang.copies import VersionCopies
from streamppo.rollout.sglang.link import Link
from streamppo.weights import shared_memory

Named: TypeAlias = Sequence[tuple[str, Tensor]]
T = TypeVar("T")
log = logging.getLogger(__name__)
LEAVE_S = 5.0
"""Time limit for SGLang to leave a process group."""


class Carrier(Protocol):
    """A transport of weights into one running SGLang.

    stage     while SGLang decodes: put the weights where SGLang can read them
    carry     while SGLang is paused: SGLang only loads them
    close     at the end of the session: release what the transport holds here and in SGLang
    """

    async def stage(self, tensors: Mapping[str, Tensor]) -> None: ...

    async def carry(self, version: int, *, flush: bool) -> None:
        """Load the staged weights as `version`; `flush` empties the prefix cache. Raises `ValueError` if refused."""
        ...

    async def close(self) -> None:
        """Release everything. SGLang may be dead, or busy with a push that it has refused."""
        ...


Connect: TypeAlias = Callable[[Link], Awaitable[Carrier]]
"""Connects the transport of weights to a newly started SGLang."""


class BySharedMemory:
    """Flat buckets in shared memory; tensors in shared memory are not copied. `server`: not a child process."""

    def __init__(self, link: Link, bucket_bytes: int, *, server: bool) -> None:
        self._link, self._server = link, server
        self._copies = VersionCopies(bucket_bytes, shared=True)
        self._staged: list[tuple[Tensor, object]] = []

    async def stage(self, tensors: Mapping[str, Tensor]) -> None:
        await asyncio.to_thread(self._stage, tensors)

    async def carry(self, version: int, *, flush: bool) -> None:
        for number, (flat, places) in enumerate(self._staged, 1):
            # Each handle can be opened only once.
            payloads = [_handle(flat, places, text=self._server) for _ in range(self._link.ranks)]
            await self._link.call(
                "update_weights_from_tensor",
                serialized_named_tensors=payloads,
                load_format="flattened_bucket",
                **_request_fields(version, last=number == len(self._staged), flush=flush),
            )

    async def close(self) -> None:
        self._staged = []

    def _stage(self, tensors: Mapping[str, Tensor]) -> None:
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

        others = {
            name: tensor
            for name, tensor in tensors.items()
            if not (tensor.is_contiguous() and shared_memory.is_shared([tensor]))
        }
        copied = self._copies.copy(others) if others else {}
        buckets: dict[int, tuple[Tensor, list[object]]] = {}
        for name, tensor in {**tensors, **copied}.items():
            storage = tensor.untyped_storage()
            begin = storage.data_ptr()
            _, places = buckets.setdefault(begin, (torch.empty(0, dtype=torch.uint8).set_(storage), []))
            start, end = tensor.data_ptr() - begin, tensor.data_ptr() - begin + tensor.nbytes
            places.append(FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, start, end, tensor.nbytes))
        self._staged = [*buckets.values()]


async def by_shared_memory(bucket_bytes: int, server: bool, link: Link) -> BySharedMemory:
    """Connect by shared memory. With all arguments but `link` bound, this function is a `Connect`."""
    return BySharedMemory(link, bucket_bytes, server=server)


class ByGroup:
    """Broadcasts from `device` in a process group of this actor and SGLang's ranks, for an SGLang on any machine."""

    def __init__(
        self, link: Link, bucket_bytes: int, name: str, group: torch.distributed.ProcessGroup, device: str
    ) -> None:
        self._link, self._bucket_bytes = link, bucket_bytes
        self._name, self._group, self._device = name, group, device
        self._staged: Mapping[str, Tensor] = {}

    async def stage(self, tensors: Mapping[str, Tensor]) -> None:
        """Store the tensors, because SGLang must be paused to receive a broadcast."""
        self._staged = tensors

    async def carry(self, version: int, *, flush: bool) -> None:
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        for part, last in _parts(self._staged, self._bucket_bytes):
            sglang_call = self._link.call(
                "update_weights_from_distributed",
                names=[name for name, _ in part],
                dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in part],
                shapes=[list(tensor.shape) for _, tensor in part],
                group_name=self._name,
                load_format="flattened_bucket",
                **_request_fields(version, last=last, flush=flush),
            )
            flat: Tensor = FlattenedTensorBucket(named_tensors=list(part)).get_flattened_tensor().to(self._device)
            await asyncio.gather(sglang_call, _in_thread(torch.distributed.broadcast, flat, 0, self._group))

    async def close(self) -> None:
        """Leave the group on both sides: a server outlives sessions, and its end of the group ends a broadcast here."""
        self._staged = {}
        with suppress(ValueError, ConnectionError, TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                if not await self._link.death():
                    await self._link.call("destroy_weights_update_group", group_name=self._name)
        try:
            await asyncio.to_thread(_destroy, self._group)
        except RuntimeError as error:
            log.warning("the process group with SGLang could not be destroyed: %s", error)


async def by_group(bucket_bytes: int, url: str, gpu: bool, link: Link) -> ByGroup:
    """Create a process group with SGLang's ranks: of NCCL if this actor has a GPU of its own (`gpu`), else of gloo."""
    from sglang.srt.utils.common import init_custom_process_group

    host, port = _address(url)
    name = f"streamppo-{host}-{port}-{uuid4().hex[:8]}"
    world, backend = 1 + link.ranks, "nccl" if gpu else "gloo"
    sglang_call = link.call(
        "init_weights_update_group",
        master_address=host,
        master_port=port,
        rank_offset=1,
        world_size=world,
        group_name=name,
        backend=backend,
    )
    ours = _in_thread(
        init_custom_process_group,
        backend=backend,
        init_method=f"tcp://{process.netloc(host, port)}",
        world_size=world,
        rank=0,
        group_name=name,
    )
    _, group = await asyncio.gather(sglang_call, ours)
    return ByGroup(link, bucket_bytes, name, group, "cuda" if gpu else "cpu")


def _destroy(group: torch.distributed.ProcessGroup) -> None:
    # `destroy_process_group` alone would wait for a broadcast of NCCL that SGLang does not receive.
    group.abort()
    torch.distributed.destroy_process_group(group)


async def _in_thread(function: Callable[..., T], *arguments: object, **named: object) -> T:
    """Call a function of the process group in a thread. Raises `ConnectionError` if SGLang's ranks are lost."""
    try:
        return await asyncio.to_thread(function, *arguments, **named)
    except RuntimeError as error:
        raise ConnectionError(f"the process group with SGLang has failed: {error}") from error


def _parts(tensors: Mapping[str, Tensor], bucket_bytes: int) -> Iterator[tuple[Named, bool]]:
    """Split `tensors` into parts of one type and about `bucket_bytes`; yield each, and whether it is the last."""
    part: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors.items():
        if part and (size + tensor.nbytes > bucket_bytes or tensor.dtype != part[-1][1].dtype):
            yield part, False
            part, size = [], 0
        part.append((name, tensor))
        size += tensor.nbytes
    yield part, True


def _request_fields(version: int, *, last: bool, flush: bool) -> dict[str, object]:
    return {"weight_version": wire.version_name(version) if last else None, "flush_cache": last and flush}


def _handle(flat: Tensor, places: object, *, text: bool) -> str | bytes:
    from sglang.srt.utils import MultiprocessingSerializer

    return MultiprocessingSerializer.serialize({"flattened_tensor": flat, "metadata": places}, output_str=text)


def _address(url: str) -> tuple[str, int]:
    """Return this machine's address as seen by SGLang at `url`, and a free port."""
    host, family = "127.0.0.1", socket.AF_INET
    if url:
        parts = urlsplit(url)
        default = 443 if parts.scheme == "https" else 80
        with socket.create_connection((parts.hostname or "", parts.port or default)) as there:
            host, family = there.getsockname()[0], there.family
    with socket.create_server((host, 0), family=family) as free:
        return host, free.getsockname()[1]
