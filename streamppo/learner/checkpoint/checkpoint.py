"""Checkpoints by torch.distributed.checkpoint: written aside, flushed, renamed; complete only with their manifest.

start             copies all tensors to the CPU; the learner waits only for this copy
first thread      writes this rank's files, waits until the version is published, adds the manifest, renames the folder
second thread     copies this rank's files to `checkpoint.remote`, if set; a checkpoint that is completed during another
                  copy is not copied, unless it is the last one

Nodes may have separate disks: for each folder one leading rank writes the manifest and renames the folder.
"""

import logging
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, cast
from uuid import uuid4

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from streamppo import durable
from streamppo.config.sections import Checkpoint
from streamppo.errors import CheckpointError
from streamppo.learner.checkpoint import distcp, manifest
from streamppo.learner.checkpoint.distcp import METADATA
from streamppo.learner.checkpoint.history import History
from streamppo.learner.checkpoint.manifest import CheckpointFiles, CheckpointState, DamagedFile
from streamppo.learner.checkpoint.remote import CheckpointStore, Copier
from streamppo.learner.device import LOAD, from_first_rank, gather
from streamppo.learner.model.policy import rank_in_copy
from streamppo.weights.pusher import PushedVersion

NO_OPTIONS = StagingOptions(
    use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
)
"""torch's options for the copy to the CPU that a plain `async_save` has: a copy that is complete when it returns."""
log = logging.getLogger(__name__)


class TrainState(NamedTuple):
    """All tensors of a checkpoint; `reference` is saved only if `CheckpointState.reference_moved` is set."""

    policy: torch.nn.Module
    optimizer: torch.optim.Optimizer
    reference: torch.nn.Module | None


class Saver:
    """Writes checkpoints during training, one at a time, in a separate process group. A collective."""

    def __init__(self, config: Checkpoint) -> None:
        # A rank on the disk's node may have to wait for a checkpoint of hundreds of GiB from the others.
        group = dist.new_group(backend="gloo", timeout=LOAD)
        assert isinstance(group, dist.ProcessGroup)
        self._group = group
        self._config = config
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._under_way: Future[None] | None = None
        self._copier = Copier(config)
        self._uncopied: tuple[Path, list[str]] | None = None

    def start(self, folder: Path, state: CheckpointState, trained: TrainState, pushed: "Future[PushedVersion]") -> None:
        """Wait for the last checkpoint, then start one under `folder`. When `start` has returned, `trained` may change.

        `pushed` is the push of the checkpoint's version, which gives `state` its digest. A collective. Raises the
        errors of `wait`.
        """
        self.wait()
        final = folder / f"{state.version:08d}"
        # Rank 0 decides for all ranks, because they may see the rename at different times.
        if from_first_rank(final.exists(), self._group):
            return
        leads = _leads(folder, self._group)
        # Either all ranks copy the checkpoint, or none does.
        copies = self._copier.remote is not None and not any(gather(self._copier.is_busy, self._group))
        if leads:
            shutil.rmtree(durable.aside(final), ignore_errors=True)
        tensors = _tensors(trained, state)
        with closing(DefaultStager(NO_OPTIONS)) as stager:
            write = dcp.async_save(
                tensors,
                checkpoint_id=durable.aside(final),
                # By default the writer waits for the GPU's queue after each 10 MB of the copy, which is on the CPU.
                storage_writer=FileSystemWriter(durable.aside(final), per_thread_copy_ahead=0),
                async_stager=stager,
                process_group=self._group,
                # If the model has several replicas, the first replica writes its shards.
                planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
            )
        assert isinstance(write, Future), "async_save gives a future unless it is asked for more"
        self._under_way = self._thread.submit(self._complete, final, state, write, pushed, leads=leads, copies=copies)

    def wait(self) -> None:
        """Wait until the last checkpoint is complete. Raises `CheckpointError` if it could not be written."""
        if self._under_way is not None:
            self._under_way.result()

    def settle(self) -> None:
        """Wait until the last checkpoint is complete and copied to the address. Raises the errors of `wait`."""
        self.wait()
        self._copier.wait()
        if self._uncopied is not None and self._copier.remote is not None:
            self._copy(*self._uncopied)
            self._copier.wait()

    def check(self) -> None:
        """Raise the error that `wait` would raise, without waiting."""
        if self._under_way is not None and self._under_way.done():
            self._under_way.result()

    def _complete(
        self,
        final: Path,
        state: CheckpointState,
        write: "Future[object]",
        pushed: "Future[PushedVersion]",
        *,
        leads: bool,
        copies: bool,
    ) -> None:
        try:
            write.result()
        except dcp.api.CheckpointException as error:
            reasons = [str(failure) for failure, _ in error.failures.values()]
            raise CheckpointError(f"{final}: cannot be written: {reasons[0]}") from error
        aside = durable.aside(final)
        with durable.naming(final, CheckpointError):
            sealed = manifest.flush_and_hash(aside, f"__{dist.get_rank()}_*")
            ranks, metadata = gather(sealed, self._group), b""
            if dist.get_rank() == 0:
                # Wait for the push, because a run must never resume from a version that was not published.
                state = msgspec.structs.replace(state, digest=pushed.result().digest)
                metadata = durable.read(aside / METADATA)
            state, metadata = from_first_rank((state, metadata), self._group)
            if leads:
                # torch.distributed.checkpoint writes the metadata only on rank 0's disk, but every rank reads them.
                (aside / METADATA).write_bytes(metadata)
                files = CheckpointFiles(shared=manifest.flush_and_hash(aside, METADATA), ranks=tuple(ranks))
                manifest.write(aside, state, files)
                durable.settle(final)
                manifest.drop(final.parent, self._config.keep, self._config.keep_every)
            if self._copier.remote is not None:
                # After the barrier, the leading ranks have renamed the folder on every disk.
                dist.barrier(self._group)
                self._uncopied = final, list(sealed)
                if copies:
                    self._copy(*self._uncopied)

    def _copy(self, final: Path, rank_files: Sequence[str]) -> None:
        """Start to copy this rank's files; open them first, because `manifest.drop` may delete them during the copy."""
        is_first, self._uncopied = dist.get_rank() == 0, None
        names = [*rank_files, METADATA, manifest.MANIFEST] if is_first else rank_files
        self._copier.start(final, {name: (final / name).open("rb") for name in names}, prunes=is_first)


def load_newest(
    path: Path, trained: TrainState, address: str = "", past: History | None = None
) -> CheckpointState | None:
    """Load the checkpoint at `path` in place or, if it is damaged, the newest intact one before it. A collective.

    Skips checkpoints with a damaged file or outside of the run's `past`; returns None if it skips all. Ranks fetch
    missing files from `address`, if set. Raises the errors of `load` except `DamagedFile`.
    """
    copies = CheckpointStore(address) if address else None
    local = [folder.name for folder in manifest.complete(path.parent)]
    remote = _complete_copies(copies) if copies and dist.get_rank() == 0 else []
    candidates = [name for name in {path.name, *local, *remote} if name <= path.name]
    for name in from_first_rank(sorted(candidates))[::-1]:
        candidate = path.with_name(name)
        try:
            return load(candidate, trained, copies, past)
        except DamagedFile as error:
            if _leads(candidate.parent) and candidate.is_dir():
                manifest.set_aside(candidate, error)
    return None


def _complete_copies(copies: CheckpointStore) -> list[str]:
    try:
        return [f"{version:08d}" for version in copies.versions()]
    except CheckpointError as error:
        log.info("%s", error)
        return []


def reference_has_moved(path: Path) -> bool:
    """True if the checkpoint at `path` has a reference, or if its manifest is damaged or missing. A collective."""
    try:
        moved = manifest.read(path).state.reference_moved
    except DamagedFile:
        moved = True
    return from_first_rank(moved)


def load(
    path: Path, trained: TrainState, copies: CheckpointStore | None = None, past: History | None = None
) -> CheckpointState:
    """Load one checkpoint in place, with the states of the random number generators. A collective.

    Each rank verifies the files that it reads, and fetches missing files from `copies`. All ranks raise
    `CheckpointError` if a rank lacks a file, or if another number of ranks wrote the checkpoint. A damaged file, or a
    checkpoint outside of the run's `past`, raises `DamagedFile`.
    """
    parameter = next(trained.policy.parameters())
    writer = rank_in_copy(parameter.device_mesh) if isinstance(parameter, DTensor) else dist.get_rank()
    state = _verify(path, writer, copies, past)
    if state.ranks != dist.get_world_size():
        raise CheckpointError(f"{path}: written by {state.ranks} ranks, and learner.ranks is {dist.get_world_size()}")
    tensors = _tensors(trained, state)
    distcp.load(tensors, path)
    (rank_state,) = tensors["own"].values()
    moments = {name: {**shards, **rank_state["state"][name]} for name, shards in tensors["optimizer"].items()}
    optimizer_state = {"state": moments, "param_groups": rank_state["param_groups"]}
    policy, optimizer, _ = trained
    states = {"model_state_dict": tensors["policy"], "optim_state_dict": optimizer_state}
    # Strictness is off, because checkpoints lack frozen weights; the load above raised for any other missing tensor.
    set_state_dict(policy, optimizer, **states, options=StateDictOptions(strict=False))
    torch.set_rng_state(rank_state["rng"]["cpu"])
    if "cuda" in rank_state["rng"]:
        torch.cuda.set_rng_state(rank_state["rng"]["cuda"])
    return state


def restore(trained: TrainState, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill the unsharded `trained` from the unsharded `tensors` of a checkpoint, by flat name (`distcp.empty_tensors`).

    Without moments the optimizer stays unchanged. Raises `CheckpointError` for a tensor that is missing or does not
    fit.
    """
    policy, optimizer, reference = trained
    parameters = dict(policy.named_parameters())
    targets = {f"policy.{name}": weight for name, weight in parameters.items() if weight.requires_grad}
    if any(name.startswith("optimizer.") for name in tensors):
        for name, weight in parameters.items():
            moments = optimizer.state.get(weight, {})
            targets |= {f"optimizer.{name}.{kind}": moment for kind, moment in moments.items()}
    if reference is not None and any(name.startswith("reference.") for name in tensors):
        targets |= {f"reference.{name}": weight for name, weight in reference.named_parameters()}
    for name, target in targets.items():
        saved = tensors.get(name)
        if saved is None or (saved.shape, saved.dtype) != (target.shape, target.dtype):
            lacks = "is missing" if saved is None else f"is {saved.dtype} {list(saved.shape)}"
            raise CheckpointError(f"{name!r} {lacks}, and the model has {target.dtype} {list(target.shape)}")
        with torch.no_grad():
            target.copy_(saved)
    if (rng := tensors.get("rng")) is not None:
        torch.set_rng_state(rng)


def _verify(path: Path, shards_of: int, copies: CheckpointStore | None, past: History | None) -> CheckpointState:
    """Verify on every rank the files that it reads; `shards_of` is the rank that wrote this rank's shards.

    All ranks raise the error of the lowest failing rank; a missing file takes precedence over damage.
    """
    outcome: CheckpointState | CheckpointError
    try:
        outcome = manifest.verify(path, dist.get_rank(), shards_of, copies.fetch if copies else None, past)
    except CheckpointError as error:
        outcome = error
    errors = [gathered for gathered in gather(outcome) if isinstance(gathered, CheckpointError)]
    for error in sorted(errors, key=lambda error: isinstance(error, DamagedFile)):
        raise error
    assert isinstance(outcome, CheckpointState)
    return outcome


def _leads(folder: Path, group: dist.ProcessGroup | None = None) -> bool:
    """True on the lowest of all ranks that share this `folder`. A collective."""
    rank = dist.get_rank(group)
    if dist.get_world_size(group) == 1:
        return True
    token = from_first_rank(uuid4().hex, group)
    marker = folder / f".rank-{rank}"
    with durable.naming(folder, CheckpointError):
        folder.mkdir(parents=True, exist_ok=True)
        marker.write_text(token)
        dist.barrier(group)
        lower = [folder / f".rank-{other}" for other in range(rank)]
        leads = not any(other.exists() and other.read_text() == token for other in lower)
        dist.barrier(group)
        marker.unlink()
    return leads


def _tensors(trained: TrainState, state: CheckpointState) -> dict[str, Any]:
    """The tensors of a checkpoint: shards under common names, and everything unsharded under this rank's name.

    Under a common name, torch would keep one rank's unsharded values. Frozen weights under adapters are left out. Tied
    weights have one name.
    """
    policy, optimizer, reference = trained
    model_state, optimizer_state = get_state_dict(policy, optimizer)
    sharded: dict[str, dict[str, object]] = {}
    unsharded: dict[str, dict[str, object]] = {}
    moments_of = cast("dict[str, dict[str, object]]", optimizer_state["state"])
    # Moments of a working copy are stored like FSDP's shards: policies with and without FSDP read each other's files.
    is_full = getattr(policy, "working_copy", None) is not None
    for name, moments in moments_of.items():
        sharded[name], unsharded[name] = {}, {}
        for key, value in moments.items():
            is_sharded = isinstance(value, DTensor) or (is_full and key != "step")
            (sharded if is_sharded else unsharded)[name][key] = value
    # A rank on a CPU may see GPUs; reading a GPU's random state would open a context on it.
    on_gpu = torch.cuda.is_initialized()
    rng = {"cpu": torch.get_rng_state()} | ({"cuda": torch.cuda.get_rng_state()} if on_gpu else {})
    rank_state = {"state": unsharded, "param_groups": optimizer_state["param_groups"], "rng": rng}
    names = {name for name, tensor in policy.named_parameters() if tensor.requires_grad}
    left_out = {name for name, _ in policy.named_parameters(remove_duplicate=False)} - names
    trained_state = {name: tensor for name, tensor in model_state.items() if name not in left_out}
    own = {f"rank-{dist.get_rank()}": rank_state}
    tensors: dict[str, Any] = {"policy": trained_state, "optimizer": sharded, "own": own}
    if reference is not None and state.reference_moved:
        tensors["reference"] = {name: tensor.detach() for name, tensor in reference.named_parameters()}
    return tensors
