"""A rank's device, the GPU that Ray gave it or the CPU, and its process group."""

import os
import socket
from contextlib import suppress
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from streamppo.config.mesh import Mesh
from streamppo.errors import RunError

DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1"}
"""Told to cuBLAS and flash-attn (by transformers) by the environment, before they are used for the first time."""

LOAD = timedelta(hours=2)
"""Limit of a collective while models are read: rank 0 may read for all, and 70B longer than NCCL's 10 minutes."""
LOOPBACK = ("127.0.0.1", "::1")
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""Tell gloo and NCCL on which interface ranks talk; one that the user has set wins."""
UPDATE = timedelta(minutes=10)
"""Limit of a collective in an update: a rank that is so late hangs, and the others end with an error."""


def acquire(gpus: float, *, exact: bool = True) -> torch.device:
    """This process's device: the only GPU that it sees, made deterministic; the CPU, if it asked for none.

    Redone updates that are `exact` must make the same bits: every operation on a GPU is the deterministic one,
    and one that has none is an error. Raises `RunError` if there is no GPU that torch can use.
    """
    if not gpus:
        return torch.device("cpu")
    if exact:
        os.environ.update(DETERMINISTIC)
    if not torch.cuda.is_available():
        raise RunError(
            f"learner.gpus = {gpus:g}, and torch {torch.__version__} sees no GPU here: "
            "it needs a driver and a build of torch for CUDA"
        )
    torch.use_deterministic_algorithms(exact)
    # Nothing of ours reads what it has not written, and FSDP makes large buffers all the time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    return device


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host's memory on `device`. The host does not wait for a GPU, nor the GPU's work before for it."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def join(device: torch.device, address: tuple[str, int], rank: int, ranks: int, *, offload: bool = False) -> None:
    """Make the process group of all ranks: NCCL between GPUs, gloo between CPUs. A collective.

    With `offload` both: shards of ranks on GPUs are in the memory of CPUs.

    Its collectives may take as long as models are read, until `expect_updates`. Gloo talks on the interface from which
    a rank reaches rank 0: left to itself, it takes the address of the machine's name, which many machines have on
    loopback, where no other node reaches it. NCCL looks at the interfaces itself, and takes loopback where ranks meet
    there, so that they listen there alone.
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


def interface_to(host: str, port: int) -> str:
    """The interface from which this machine reaches an address of another or its own; "" where it has no name."""
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as asked, suppress(OSError):
        # To connect UDP sends nothing: it chooses the way.
        asked.connect(where)
        own = asked.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if own in {one.address.partition("%")[0] for one in addresses}:
                return name
    return ""


def mesh_of(device: str, config: Mesh) -> DeviceMesh:
    """All ranks: [ranks], or [copies, ranks of a copy] where the model has several. FSDP2 shards over the last.

    A collective.
    """
    ranks = dist.get_world_size()
    if config.replicate == 1:
        return init_device_mesh(device, (ranks,))
    return init_device_mesh(device, (config.replicate, config.shards(ranks)), mesh_dim_names=("replicate", "shard"))


def everybody() -> dist.ProcessGroup:
    """The group of all ranks."""
    assert dist.group.WORLD is not None, "join comes first"
    return dist.group.WORLD


def add_up(
    tensor: Tensor, group: dist.ProcessGroup | None = None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> None:
    """Put the sum over all ranks in the place of `tensor`, or what `op` says. A collective of several ranks.

    A rank that is alone has it: gloo would wake a thread of its own for each, half a millisecond on a busy machine.
    """
    if dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op, group)


def expect_updates(mesh: DeviceMesh, *groups: dist.ProcessGroup) -> None:
    """Shorten the limit of collectives, those of `groups` too: everything is loaded."""
    for group in (everybody(), *mesh.get_all_groups(), *groups):
        group.set_timeout(UPDATE)


def _store(host: str, port: int, rank: int, ranks: int) -> dist.Store:
    """Meet at `host`, which listens there alone: left to itself, torch listens at every address of the machine."""
    listening = socket.create_server((host, port)).detach() if rank == 0 else None
    return dist.TCPStore(host, port, ranks, rank == 0, master_listen_fd=listening)
