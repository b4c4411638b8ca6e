"""A rank's device, the GPU that Ray gave it or the CPU, and its process group."""

import os

import torch
import torch.distributed as dist

from streamppo.errors import RunError

DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1"}
"""Told to cuBLAS and flash-attn (by transformers) by the environment, before they are used for the first time."""


def acquire(gpus: float) -> torch.device:
    """This process's device: the only GPU that it sees, made deterministic; the CPU, if it asked for none.

    Redone updates must make the same bits, so every operation on a GPU is the deterministic one, and one that has none
    is an error. Raises `RunError` if there is no GPU that torch can use.
    """
    if not gpus:
        return torch.device("cpu")
    os.environ.update(DETERMINISTIC)
    if not torch.cuda.is_available():
        raise RunError(
            f"learner.gpus = {gpus:g}, and torch {torch.__version__} sees no GPU here: "
            "it needs a driver and a build of torch for CUDA"
        )
    torch.use_deterministic_algorithms(True)
    # Nothing of ours reads what it has not written, and FSDP makes large buffers all the time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    return device


def join(device: torch.device, address: tuple[str, int], rank: int, ranks: int) -> None:
    """The process group of all ranks: NCCL between GPUs, gloo between CPUs. A collective."""
    host, port = address
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"tcp://{host}:{port}",
        rank=rank,
        world_size=ranks,
        device_id=device if on_gpu else None,
    )
