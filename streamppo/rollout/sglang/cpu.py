"""SGLang's platform for machines without an accelerator. SGLang finds it by the entry point in pyproject.toml."""

# SGLang is not part of what this project is checked with.
# pyright: reportMissingImports=false

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import PlatformEnum, SRTPlatform


def activate() -> str | None:
    """Name the platform's class; None if there is an accelerator, for which SGLang has a platform of its own."""
    if torch.accelerator.is_available():
        return None
    # Its weights checker waits for a GPU before it hashes, and raises where there is none: all else of it works here.
    torch.cuda.synchronize = _nothing_to_wait_for
    return f"{__name__}.Platform"


def _nothing_to_wait_for(device: object = None) -> None:
    """Take the place of `torch.cuda.synchronize` in SGLang's processes."""


def _plain_memory(
    dims: tuple[int, ...], dtype: torch.dtype, device: str, pin_memory: bool, allocator: object
) -> torch.Tensor:
    """Make a buffer of the host's memory, as SGLang's function of the same signature does beside a GPU."""
    return torch.empty(dims, dtype=dtype, device=device)


class Platform(CpuDeviceMixin, SRTPlatform):
    """Runs everything in plain torch: no compiled kernel is needed."""

    _enum = PlatformEnum.OOT

    def get_default_attention_backend(self) -> str:
        """Name attention by torch."""
        return "torch_native"

    def is_pin_memory_available(self, device: object = None) -> bool:
        """Say no: there is no GPU to pin memory for."""
        return False

    def get_mha_kv_pool_cls(self) -> type:
        """Give the cache of keys and values."""
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

        # What it keeps on the host, such as the experts of every token, it would register with a GPU.
        ALLOC_MEMORY_FUNCS["cpu"] = _plain_memory
        return MHATokenToKVPool

    def get_paged_allocator_cls(self) -> type:
        """Give the allocator of that cache."""
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

        return PagedTokenToKVPoolAllocator
