"""Checkpoints by torch.distributed.checkpoint: written aside, flushed, renamed; complete only with their manifest.

start        a copy on the CPU; the learner waits for no more than that, and goes on
a thread     writes the files, waits until the version is published, adds the manifest, gives the name
"""

import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from streamppo import durable
from streamppo.config.sections import Checkpoint
from streamppo.errors import CheckpointError
from streamppo.learner import manifest
from streamppo.learner.manifest import State
from streamppo.weights.transport import Pushed


class Saver:
    """Writes checkpoints beside training, one after another: memory holds one copy at most.

    `group` is of CPU tensors and used by nothing else, for its collectives run beside those of the updates.
    """

    def __init__(self, group: dist.ProcessGroup, config: Checkpoint) -> None:
        self._group = group
        self._config = config
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._under_way: Future[None] | None = None

    def start(
        self,
        folder: Path,
        state: State,
        policy: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        pushed: "Future[Pushed]",
    ) -> None:
        """Start a checkpoint under `folder`, after the one before; both modules may change when this returns.

        `pushed` is the push of its version, whose digest `state` gets. A collective. Raises `CheckpointError` if the
        one before could not be written.
        """
        self.wait()
        final = folder / f"{state.version:08d}"
        if self._is_there(final):
            return
        if dist.get_rank() == 0:
            shutil.rmtree(durable.aside(final), ignore_errors=True)
        tensors = _tensors(policy, optimizer)
        written = dcp.async_save(tensors, checkpoint_id=durable.aside(final), process_group=self._group)
        assert isinstance(written, Future), "async_save gives a future unless it is asked for more"
        self._under_way = self._thread.submit(self._complete, final, state, written, pushed)

    def wait(self) -> None:
        """Wait until the last checkpoint has its name. Raises `CheckpointError` if the disk refused it."""
        if self._under_way is not None:
            self._under_way.result()

    def check(self) -> None:
        """Raise the error that `wait` would raise, without waiting."""
        if self._under_way is not None and self._under_way.done():
            self._under_way.result()

    def _is_there(self, final: Path) -> bool:
        """The answer of rank 0 on every rank: the others do not know when it gives a name."""
        found = [final.exists()]
        dist.broadcast_object_list(found, group=self._group, group_src=0)
        return found[0]

    def _complete(self, final: Path, state: State, written: "Future[object]", pushed: "Future[Pushed]") -> None:
        try:
            written.result()
        except dcp.api.CheckpointException as error:
            reasons = [str(failure) for failure, _ in error.failures.values()]
            raise CheckpointError(f"{final}: cannot be written: {reasons[0]}") from error
        if dist.get_rank() != 0:
            return
        # A run must never go on from a version that the queue does not know.
        whole = msgspec.structs.replace(state, digest=pushed.result().digest)
        with durable.naming(final, CheckpointError):
            manifest.write(durable.aside(final), whole)
            durable.settle(final)
            manifest.drop(final.parent, self._config.keep, self._config.keep_every)


def own_group() -> dist.ProcessGroup:
    """A new group of all ranks' CPU tensors, as a `Saver` needs it. A collective."""
    made = dist.new_group(backend="gloo")
    assert isinstance(made, dist.ProcessGroup)
    return made


def load(path: Path, policy: torch.nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Load one verified checkpoint in place, RNG included. A collective.

    Raises `CheckpointError` if another number of ranks wrote it.
    """
    state = manifest.verify(path)
    if state.ranks != dist.get_world_size():
        raise CheckpointError(f"{path}: written by {state.ranks} ranks, and learner.ranks is {dist.get_world_size()}")
    tensors = _tensors(policy, optimizer)
    dcp.load(tensors, checkpoint_id=path)
    set_state_dict(policy, optimizer, model_state_dict=tensors["policy"], optim_state_dict=tensors["optimizer"])
    (rng,) = tensors["rng"].values()
    torch.set_rng_state(rng["cpu"])
    if "cuda" in rng:
        torch.cuda.set_rng_state(rng["cuda"])
    return state


def _tensors(policy: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(policy, optimizer)
    rng = {"cpu": torch.get_rng_state()} | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})
    return {"policy": model_state, "optimizer": optimizer_state, "rng": {f"rank-{dist.get_rank()}": rng}}
