"""SGLang's platform for machines without an accelerator. SGLang finds it by the entry point in pyproject.toml."""

# SGLang is not installed where this project is type-checked.
# pyright: reportMissingImports=false

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import PlatformEnum, SRTPlatform


def activate() -> str | None:
    """Return the name of the platform's class; None with an accelerator, for which SGLang has a platform."""
    if torch.accelerator.is_available():
        return None
    # SGLang's weights checker synchronizes a GPU before it hashes, which would raise on a CPU.
    torch.cuda.synchronize = lambda device=None: None
    return f"{__name__}.Platform"


def _allocate_host_memory(
    dims: tuple[int, ...], dtype: torch.dtype, device: str, pin_memory: bool, allocator: object
) -> torch.Tensor:
    return torch.empty(dims, dtype=dtype, device=device)


class Platform(CpuDeviceMixin, SRTPlatform):
    """Runs everything in plain torch, without compiled kernels."""

    _enum = PlatformEnum.OOT

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

        # By default SGLang would register host buffers, such as the experts of every token, with a GPU.
        ALLOC_MEMORY_FUNCS["cpu"] = _allocate_host_memory
        return MHATokenToKVPool

    def get_paged_allocator_cls(self) -> type:
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

        return PagedTokenToKVPoolAllocator
