"""A rank's device (its GPU from Ray, or the CPU) and the process group of all ranks."""

import os
import re
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from streamppo.config.learner import Mesh
from streamppo.errors import RunError, UpdateError

DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1"}
"""Environment variables that make cuBLAS and flash-attn deterministic, set before their first use."""
INEXACT = re.compile(r"^(\S+) does not have a deterministic implementation")
LOAD = timedelta(hours=2)
"""Timeout of a collective while models load (rank 0 may read a 70B model for all ranks) or a checkpoint is written."""
LOOPBACK = ("127.0.0.1", "::1")
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""Environment variables for the network interface of gloo and of NCCL; a value that the user has set is kept."""
UPDATE = timedelta(minutes=10)
"""Timeout of a collective in an update: the other ranks raise an error if a rank is this late."""
T = TypeVar("T")


def acquire(gpus: float, *, exact: bool = True) -> torch.device:
    """Return this process's device: its only visible GPU, or the CPU if `gpus` is 0.

    With `exact`, all operations are deterministic; an operation without a deterministic form raises an error. Raises
    `RunError` if torch has no usable GPU.
    """
    # On a CPU with several threads, index_put_ would otherwise add the entries of a large tensor in any order.
    torch.use_deterministic_algorithms(exact)
    # Filling FSDP's many large buffers would take time, and streamppo reads no uninitialised memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    if not gpus:
        return torch.device("cpu")
    if exact:
        os.environ.update(DETERMINISTIC)
    if not torch.cuda.is_available():
        raise RunError(
            f"learner.gpus = {gpus:g}, and torch {torch.__version__} sees no GPU here: "
            "it needs a driver and a build of torch for CUDA"
        )
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    return device


def refuse_more_gpus() -> None:
    """Raise `RunError` if Ray shows this process more than one GPU: all ranks and engines would use the first."""
    if (count := torch.cuda.device_count()) > 1:
        raise RunError(
            f"a rank sees {count} GPUs, and all ranks and engines would use the first: unset "
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES where Ray starts"
        )


@contextmanager
def naming_errors() -> Generator[None]:
    """Turn torch's errors about a full GPU and an operation without a deterministic form into an `UpdateError`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UpdateError(
            f"the GPU's memory is full ({str(error).partition('. GPU')[0]}): set model.gradient_checkpointing = "
            "'full', lower learner.micro_batch_tokens or, beside an engine, rollout.engine.mem_fraction_static"
        ) from error
    except RuntimeError as error:
        if (operation := INEXACT.match(str(error))) is None:
            raise
        raise UpdateError(
            f"torch's operation {operation[1]} has no deterministic form here, which learner.exact = true needs: set "
            "learner.exact = false"
        ) from error


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from host memory to `device`. The copy to a GPU is asynchronous, from pinned memory."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def join(device: torch.device, address: tuple[str, int], rank: int, ranks: int, *, offload: bool = False) -> None:
    """Make the process group of all ranks: NCCL between GPUs, gloo between CPUs. A collective.

    With `offload`, GPU ranks use both, because their shards are in CPU memory. Collectives have the timeout `LOAD`
    until `expect` is called. By default gloo uses the address of the host name, which is often loopback. Here it uses
    the interface from which a rank reaches rank 0. If rank 0 is at loopback, NCCL uses the same interface.
    """
    host, port = address
    if interface := interface_to(host, port):
        os.environ.setdefault(GLOO, interface)
        if host in LOOPBACK:
            os.environ.setdefault(NCCL, interface)
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        ("cpu:gloo,cuda:nccl" if offload else "nccl") if on_gpu else "gloo",
        store=_store(host, port, rank, ranks),
        rank=rank,
        world_size=ranks,
        timeout=LOAD,
        device_id=device if on_gpu else None,
    )


@contextmanager
def alone(device: torch.device) -> Generator[None]:
    """Make a process group of this process alone, without network connections, and destroy it at the end."""
    if interface := interface_to(LOOPBACK[0], 1):
        os.environ.setdefault(GLOO, interface)
    on_gpu = device.type == "cuda"
    # A store in this process's memory listens at no port.
    backend, device_id = ("nccl", device) if on_gpu else ("gloo", None)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device_id)
    try:
        yield
    finally:
        dist.destroy_process_group()


def interface_to(host: str, port: int) -> str:
    """The interface from which this machine reaches `host` (perhaps itself); "" if there is none."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe, suppress(OSError):
        # Connecting a UDP socket sends nothing; it only selects the route.
        probe.connect(address)
        local = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if local in {address.address.partition("%")[0] for address in addresses}:
                return name
    return ""


def mesh_of(device: str, config: Mesh) -> DeviceMesh:
    """The mesh [ranks] or [replicas, ranks of a replica]; FSDP2 shards over the last dimension. A collective."""
    ranks = dist.get_world_size()
    if config.replicate == 1:
        return init_device_mesh(device, (ranks,))
    return init_device_mesh(device, (config.replicate, config.shards(ranks)), mesh_dim_names=("replicate", "shard"))


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks of `group`, by default all ranks. A collective."""
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def from_first_rank(value: T, group: dist.ProcessGroup | None = None) -> T:
    """Return the value of the first rank of `group`, by default of all ranks. A collective."""
    values = [value]
    dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def all_ranks() -> dist.ProcessGroup:
    """The group of all ranks."""
    assert dist.group.WORLD is not None, "join comes first"
    return dist.group.WORLD


def add_up(
    tensor: Tensor, group: dist.ProcessGroup | None = None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> None:
    """Replace `tensor` by its sum over all ranks of `group`, or by its reduction with `op`. A collective."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op, group)


def expect(timeout: timedelta, mesh: DeviceMesh, *groups: dist.ProcessGroup) -> None:
    """Set the timeout of all collectives: `LOAD` before models are loaded, `UPDATE` afterwards."""
    for group in (all_ranks(), *mesh.get_all_groups(), *groups):
        group.set_timeout(timeout)


def _store(host: str, port: int, rank: int, ranks: int) -> dist.Store:
    """Rank 0 listens only at `host`; by default torch would listen at every address."""
    family, *_ = socket.getaddrinfo(host, port)[0]
    listening = socket.create_server((host, port), family=family).detach() if rank == 0 else None
    return dist.TCPStore(host, port, ranks, rank == 0, master_listen_fd=listening)
