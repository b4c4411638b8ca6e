"""Copies a version's weights to host memory for its push, during training.

    learner's stream    step n | passes of update n + 1 ............ | step n + 1
    stream of copies           | weights -> their type -> the host   |

The host does not wait for the copy; the GPU waits for the copy only before the next optimizer step.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from streamppo.learner.model import adapters
from streamppo.learner.model.policy import Policy, local
from streamppo.learner.parallel import tensor_parallel
from streamppo.process import phase


class WeightSnapshots:
    """Copies the weights of `policy`, which `optimizer` changes. Weights in host memory need no CUDA stream."""

    def __init__(self, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
        self._policy = policy
        self._stream = torch.cuda.Stream() if is_on_gpu(policy) else None
        if self._stream is not None:
            optimizer.register_step_pre_hook(self._wait)

    @phase("snapshot")
    def write(self, into: Mapping[str, Tensor]) -> Callable[[], None]:
        """Write this rank's shards to `into`, as `snapshot` does. Returns a function that waits for the copy's end."""
        if self._stream is None:
            snapshot(self._policy, into)
            return lambda: None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            snapshot(self._policy, into)
            return self._stream.record_event().synchronize

    def _wait(self, *_: object) -> None:
        assert self._stream is not None
        torch.cuda.current_stream().wait_stream(self._stream)


def is_on_gpu(policy: Policy) -> bool:
    """True if the trained weights are in GPU memory; offloaded weights are not."""
    return any(local(parameter).is_cuda for parameter in adapters.adapter_parameters(policy.lm).values())


@torch.no_grad()
def snapshot(policy: Policy, into: Mapping[str, Tensor]) -> None:
    """Write this rank's shards to `into`, which has the layout of `policy.shards`.

    On return, a copy from a GPU to pinned memory has only started. Ranks that split a weight by columns call this
    together.
    """
    for name, parameter in adapters.adapter_parameters(policy.lm).items():
        if isinstance(parameter, DTensor) and tensor_parallel.is_cut_by_columns(parameter):
            rows = tensor_parallel.whole_rows(local(parameter).to(into[name].dtype), parameter)
            if into[name].numel():
                into[name].copy_(rows, non_blocking=True)
        elif into[name].numel():
            shard = local(parameter)
            # The GPU casts before the copy; by default torch would move 32 bits and round on the host.
            into[name].copy_(shard.to(into[name].dtype) if shard.is_cuda else shard, non_blocking=True)
