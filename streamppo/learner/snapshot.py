"""A version's weights, copied to the host's memory for its push while the learner goes on.

    learner's stream    step n | passes of update n + 1 ............ | step n + 1
    stream of copies           | weights -> their type -> the host   |

The host waits for nothing, and the GPU before its next step alone.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from streamppo.learner import adapters, parallel
from streamppo.learner.policy import Policy, local
from streamppo.process import phase


class Copies:
    """Copies the weights of `policy`, which `optimizer` changes. Weights in the host's memory need no stream."""

    def __init__(self, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
        self._policy = policy
        self._stream = torch.cuda.Stream() if is_on_gpu(policy) else None
        if self._stream is not None:
            optimizer.register_step_pre_hook(self._wait)

    @phase("snapshot")
    def write(self, into: Mapping[str, Tensor]) -> Callable[[], None]:
        """Write this rank's shards to `into`, as `snapshot` does. Returns a function that waits until all is there."""
        if self._stream is None:
            snapshot(self._policy, into)
            return lambda: None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            snapshot(self._policy, into)
            return self._stream.record_event().synchronize

    def _wait(self, *_: Any) -> None:
        """Let the step that follows wait, on the GPU, until the weights before it are copied."""
        assert self._stream is not None
        torch.cuda.current_stream().wait_stream(self._stream)


def is_on_gpu(policy: Policy) -> bool:
    """True if the weights to copy are in a GPU's memory; those that are offloaded are not."""
    return any(local(parameter).is_cuda for parameter in adapters.trained(policy.lm).values())


@torch.no_grad()
def snapshot(policy: Policy, into: Mapping[str, Tensor]) -> None:
    """Write this rank's shards to `into`, which has them as `shards` says.

    From a GPU to pinned memory that is begun alone. A collective of ranks that have columns of a weight each, and of no
    others.
    """
    for name, parameter in adapters.trained(policy.lm).items():
        if isinstance(parameter, DTensor) and parallel.is_cut_by_columns(parameter):
            rows = parallel.whole_rows(local(parameter).to(into[name].dtype), parameter)
            if into[name].numel():
                into[name].copy_(rows, non_blocking=True)
        elif into[name].numel():
            own = local(parameter)
            # From a GPU to the host torch would move 32 bits, and round there.
            into[name].copy_(own.to(into[name].dtype) if own.is_cuda else own, non_blocking=True)
