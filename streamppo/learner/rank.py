"""One learner rank: the Ray actor around a `Learner`.

consumes     the batch of version v (leased: a second take returns the same batch)
produces     version v + 1 in the ledger, a report, and at intervals a checkpoint
waits for    the batch, which is fetched and padded during the previous update
unblocks     every engine's pull, and the queue's next take
"""
# Ray leaves parts of its signatures untyped.
# pyright: reportUnknownMemberType=false

import itertools
import logging
import os
import sys
import time
import traceback
from pathlib import Path
from threading import Thread, get_ident
from typing import TYPE_CHECKING, NamedTuple

import ray
from ray.actor import ActorProxy

from streamppo import process
from streamppo.config.sections import Config
from streamppo.learner.checkpoint import manifest
from streamppo.learner.checkpoint.history import History
from streamppo.queue.batch_source import BEAT_S, BatchSource
from streamppo.types import UpdateReport, decode, encode
from streamppo.weights import store
from streamppo.weights.ledger import PublishReply

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from streamppo.learner.learner import Learner
    from streamppo.weights.transport import BucketRef

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables of torch's GPU allocator; a value that the user has set is kept."""
GROWS = "expandable_segments:True"
"""The allocator's setting to reuse freed blocks for larger ones, because row lengths differ in every update."""

HANGS = 0.9
"""Share of `watchdog.stall_s` after which a rank logs where its update is. At the end of this time the run ends."""
FRAMES = 6
"""Number of a stack's innermost frames that are logged."""

log = logging.getLogger(__name__)


class _ComputedUpdate(NamedTuple):
    """The update that `thread` has computed since `since_s` (`time.monotonic()`)."""

    number: int
    thread: int
    since_s: float


class Rank:
    """The Ray actor. All ranks get the same calls, one at a time; `setup` precedes all calls that need the learner.

    `epoch` counts the groups of ranks of this run. Torch is imported in `__init__`: the driver needs only the class.
    """

    def __init__(self, config: bytes, queue: ActorProxy[BatchSource], epoch: int) -> None:
        process.log_to_stdout("learner")
        self._config = decode(config, Config)
        if self._config.learner.gpus and not any(name in os.environ for name in ALLOCATOR):
            # torch reads the variable at import.
            os.environ[ALLOCATOR[0]] = GROWS
        if self._config.learner.gpus:
            os.environ.update(process.compile_caches())
        with process.without_gc():
            import torch
            import transformers.masking_utils  # imported by the code of every model

            from streamppo.learner.batch.fetch import Fetcher
            from streamppo.learner.learner import build
        self._rank = 0
        self._queue = queue
        self._epoch = epoch
        self._fetcher = Fetcher(queue)
        self._build = build
        self._built: Learner | None = None
        self._computed: _ComputedUpdate | None = None
        self._history = History({0: self._config})
        torch.set_num_threads(self._config.learner.thread_count)
        transformers.utils.logging.disable_progress_bar()

    @ray.method
    def rendezvous(self) -> tuple[str, int]:
        """Return an address (host, free port) where all ranks can meet."""
        from ray._common.network_utils import find_free_port

        return ray.util.get_node_ip_address(), find_free_port()

    @ray.method
    def make_model(self, folder: str) -> None:
        """Create builtin:tiny at `folder`, unless it exists there or at the run's address."""
        from streamppo.learner.model import tiny

        store.bring_model(self._config, folder)
        if not Path(folder).exists():
            tiny.make(self._config, Path(folder))
            self._put(store.MODEL, folder)

    @ray.method
    def setup(self, rank: int, address: tuple[str, int], model_path: str, resume_from: str | None, past: bytes) -> int:
        """Join the group as `rank`, load a model or checkpoint, push and return its version; `past` is a `History`."""
        from streamppo.learner import device

        self._rank = rank
        process.log_to_stdout(f"learner-{rank}")
        self._history = decode(past, History)
        store.bring_model(self._config, model_path)
        settings = self._history.at(manifest.version_of(resume_from)).learner
        if settings.gpus:
            device.refuse_more_gpus()
        rank_device = device.acquire(settings.gpus, exact=settings.exact)
        device.join(rank_device, address, self._rank, settings.ranks, offload=settings.offload)
        mesh = device.mesh_of(rank_device.type, settings.mesh)
        learner = self._built = self._load(model_path, mesh, resume_from)
        device.expect(device.UPDATE, mesh, *learner.policy.slices.groups())
        process_id = ray.get(self._queue.new_process_id.remote(""))
        Thread(target=self._follow_queue, args=(process_id, learner), name="follow queue", daemon=True).start()
        learner.push()
        self._fetcher.start(learner.version, learner.rank_rows)
        Thread(target=self._beat, name="beat", daemon=True).start()
        return learner.version

    @ray.method
    def update(self) -> bytes:
        """Make the next version. Returns an encoded `UpdateReport`, or b"" if the run was stopped.

        Reports of ranks differ only in times. Raises `CheckpointError` if the last checkpoint could not be written.
        """
        from streamppo.learner import device

        begin, learner = time.perf_counter(), self._learner()
        learner.saver.check()
        if (fetched := self._fetcher.result()) is None:
            return b""
        wait_s = time.perf_counter() - begin
        assert fetched.batch.version == learner.version, "a batch of another version"
        following = learner.version + 1
        self._computed = _ComputedUpdate(following, get_ident(), time.monotonic())
        if following not in self._history.configs and following < learner.config.updates:
            self._fetcher.start(following, learner.rank_rows)
        scheduled = learner.follow_schedule(fetched.lags)
        batch, updater = fetched.batch.to(learner.updater.device), learner.updater
        with device.naming_errors():
            updated = updater.update(batch)
        metrics = learner.metrics(updated)
        # The record is of the whole batch, and equal on all ranks.
        token_record = encode(updater.token_record(updated)) if self._rank == 0 else b""
        metrics |= learner.adapt(updated, metrics, fetched.lags, scheduled) | learner.speed(updated, metrics)
        learner.version += 1
        pushed = learner.push(token_record)
        self._follow_history(learner)
        metrics |= {
            "wait_s": wait_s,
            "fetch_s": fetched.fetch_s,
            "update_s": time.perf_counter() - begin,
            "push_ms": pushed.ms,
            "push_mib": pushed.nbytes / 2**20,
        }
        self._computed = None
        lags, phases = fetched.lags, process.phase_times()
        return encode(UpdateReport(version=learner.version, metrics=metrics, lag_histogram=lags, phases=phases))

    @ray.method
    def settle(self) -> None:
        """Wait until the last push is published and the last checkpoint is complete and copied."""
        learner = self._learner()
        learner.pusher.last.result()
        learner.saver.settle()

    @ray.method
    def save(self, folder: str) -> None:
        """Start a checkpoint of the current version under `folder`; it is written during training. A collective."""
        self._learner().save(Path(folder))

    @ray.method
    def export(self, folder: str) -> str:
        """Write the policy as a Hugging Face folder; return the digest of the last push. A collective."""
        digest = self._learner().export(Path(folder))
        if self._rank == 0:
            self._put(store.FINAL, folder)
        return digest

    def _load(self, model_path: str, mesh: "DeviceMesh", resume_from: str | None) -> "Learner":
        """Build the learner from the checkpoint `resume_from`, with the configuration of its version.

        A damaged checkpoint is replaced by the previous one or by the first model, whose critic is then pretrained
        again.
        """
        while True:
            requested = manifest.version_of(resume_from)
            learner = self._build(
                self._history.at(requested), model_path, mesh, self._publish, resume_from, self._history
            )
            if resume_from is None:
                if critic := learner.config.algorithm.critic.pretrain:
                    learner.pretrain(self._fetcher.of_archive(critic))
                return learner
            if learner.version == requested or (
                learner.version and self._history.at(learner.version) is learner.config
            ):
                return learner
            resume_from = str(Path(resume_from).with_name(f"{learner.version:08d}")) if learner.version else None
            del learner

    def _follow_history(self, learner: "Learner") -> None:
        if (config := self._history.configs.get(learner.version)) is None:
            return
        from streamppo.learner import device

        groups = learner.policy.slices.groups()
        device.expect(device.LOAD, learner.mesh, *groups)
        learner.configure(config)
        device.expect(device.UPDATE, learner.mesh, *groups)
        if learner.version < config.updates:
            self._fetcher.start(learner.version, learner.rank_rows)

    def _put(self, name: str, folder: str) -> None:
        if self._config.cluster.own_disks:
            store.Store(self._config.checkpoint.remote).put_folder(name, Path(folder))

    def _learner(self) -> "Learner":
        assert self._built is not None, "setup comes first"
        return self._built

    def _publish(self, push: bytes, refs: "list[BucketRef]", token_record: bytes) -> PublishReply:
        # With shards, the queue passes a reference to the record on to the shards, which fetch the record.
        record = [ray.put(token_record)] if token_record and self._config.queue.shards > 1 else token_record
        return decode(ray.get(self._queue.publish.remote(push, refs, record, self._epoch)), PublishReply)

    def _beat(self) -> None:
        """Send heartbeats to the queue forever, in a separate thread, and log where an update hangs.

        Heartbeats do not detect a hanging collective, and the driver cannot call a rank during an update.
        """
        me = ray.get_runtime_context().get_actor_id()
        assert me is not None, "a rank is an actor"
        limit_s, logged = HANGS * self._config.watchdog.stall_s, None
        while True:
            ray.get(self._queue.beat.remote(me))
            computed = self._computed
            if computed and computed is not logged and time.monotonic() - computed.since_s > limit_s:
                stack = describe_stack(computed.thread)
                log.warning("update %d has taken more than %g s, and is in %s", computed.number, limit_s, stack)
                logged = computed
            time.sleep(BEAT_S)

    def _follow_queue(self, process_id: str, learner: "Learner") -> None:
        """Push the weights again after each restart of the queue, because a restarted queue has lost them."""
        while True:
            process_id = ray.get(self._queue.new_process_id.remote(process_id))
            learner.pusher.republish()


def describe_stack(thread: int) -> str:
    """Return the innermost frames of a thread, for example "mine.py:12 loss < objective.py:88 backward"."""
    frames = itertools.islice(traceback.walk_stack(sys._current_frames()[thread]), FRAMES)
    return " < ".join(f"{Path(frame.f_code.co_filename).name}:{line} {frame.f_code.co_name}" for frame, line in frames)
