"""The length of a sharded gradient, and its bound. A collective: every rank calls it and gets the same norm."""

from collections.abc import Iterable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Norm = Literal["2-norm", "max-norm"]


def clip(parameters: Iterable[nn.Parameter], bound: float, norm: Norm, group: dist.ProcessGroup) -> float:
    """Scale all gradients so that their common norm is at most `bound`; returns the norm before. NaN gives inf or NaN.

    The max-norm is the largest entry. Parameters without a gradient are left out.
    """
    owners = [parameter for parameter in parameters if parameter.grad is not None]
    if norm == "2-norm":
        total = torch.nn.utils.clip_grad_norm_(owners, bound)
        return float((total.full_tensor() if isinstance(total, DTensor) else total).item())
    # torch's own max-norm fails on a rank that holds no row of some parameter.
    shards = [_local(owner.grad) for owner in owners if owner.grad is not None]
    sizes = [shard.abs().max() for shard in shards if shard.numel()]
    largest = torch.stack(sizes).max() if sizes else shards[0].new_zeros(())
    # A maximum over ranks may lose a NaN, and never an infinity.
    largest = largest.nan_to_num(nan=torch.inf, posinf=torch.inf)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    if largest > bound:
        for shard in shards:
            shard.mul_(bound / largest)
    return float(largest.item())


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
