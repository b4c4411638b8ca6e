"""One learner rank: the Ray actor around `Updater`.

consumes     the batch of version v (leased: asking again gives the same)
produces     version v + 1 in the ledger, a report, now and then a checkpoint
waits for    the batch, which was fetched and packed while the update before it ran
unblocks     every engine's pull, and the queue's next take
"""

import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import msgspec
import ray
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh

from streamppo.config.sections import Config
from streamppo.config.sections import Learner as LearnerConfig
from streamppo.errors import JournalError
from streamppo.learner import checkpoint, device, objective, optimizer, pretrained, tiny
from streamppo.learner import policy as model
from streamppo.learner.batch import Packed, pack, unpadded
from streamppo.learner.manifest import State
from streamppo.learner.update import Updater
from streamppo.types import Batch, UpdateReport, decode, encode
from streamppo.weights.transport import Pusher


class Fetched(NamedTuple):
    """A batch, its histogram of lags, and how long it took to come."""

    batch: Packed
    lags: dict[int, int]
    fetch_s: float


class Rank:
    """Calls come from the driver, one at a time; ranks get the same calls in the same order.

    `epoch` counts the groups of ranks that this run has had.
    """

    def __init__(self, config: bytes, rank: int, queue: Any, epoch: int) -> None:
        self.epoch = epoch
        self.config = msgspec.msgpack.decode(config, type=Config)
        self.rank = rank
        self.queue = queue
        torch.set_num_threads(self.config.learner.threads)
        transformers.utils.logging.disable_progress_bar()
        self._fetcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fetch")
        self._next: Future[Fetched | None] | None = None

    @ray.method
    def rendezvous(self) -> tuple[str, int]:
        """An address at which this rank can be met."""
        from ray._common.network_utils import find_free_port

        return ray.util.get_node_ip_address(), find_free_port()

    @ray.method
    def make_model(self, folder: str) -> None:
        """Create builtin:tiny at `folder`, unless it is there."""
        if not Path(folder).exists():
            tiny.make(self.config, Path(folder))

    @ray.method
    def setup(self, address: tuple[str, int], model_path: str, resume_from: str | None) -> int:
        """Join the group, load the model or a checkpoint, push the first version. Returns that version."""
        ranks = self.config.learner.ranks
        place = device.take(self.config.learner.gpus)
        device.join(place, address, self.rank, ranks)
        self.mesh = init_device_mesh(place.type, (ranks,))
        torch.manual_seed(self.config.seed)
        self.model_path = model_path
        critic = self.config.algorithm.critic
        self.policy = self._load(critic.model)
        self.reference = self._reference(None)
        self.optimizer = optimizer.adamw(self.policy, self.config)
        self.group = self.mesh.get_group()
        self.updater = self._updater()
        self.version = 0
        if resume_from is not None:
            state = checkpoint.load(Path(resume_from), self.policy, self.optimizer)
            self.version = state.version
            optimizer.configure(self.optimizer, self.config)
            self.updater.remember(state.beta, state.bad_steps)
        elif critic.pretrain:
            self._pretrain(critic.pretrain)
        self.pusher = Pusher(self._publish, self.config.learner.bucket_bytes)
        cpu_group: Any = dist.new_group(backend="gloo")
        self.saver = checkpoint.Saver(cpu_group, self.config.checkpoint)
        if self.rank == 0:
            life = ray.get(self.queue.another_life.remote(""))
            Thread(target=self._follow_queue, args=(life,), name="follow queue", daemon=True).start()
        self._push()
        self._prefetch(self.version)
        return self.version

    @ray.method
    def update(self) -> bytes:
        """Make the next version. Returns an `UpdateReport`, equal on every rank but for times; nothing if stopped.

        Raises `CheckpointError` if the checkpoint that was written beside training could not be written.
        """
        begin = time.perf_counter()
        self.saver.check()
        assert self._next is not None, "setup comes first"
        fetched = self._next.result()
        if fetched is None:
            return b""
        wait_s = time.perf_counter() - begin
        if self.version + 1 < self.config.updates:
            self._prefetch(self.version + 1)
        self._schedule()
        assert fetched.batch.version == self.version, "a batch of another version"
        batch = fetched.batch.to(self.updater.device)
        metrics, values_BT = self.updater.update(batch)
        self.version += 1
        push_ms = self._push(b"" if values_BT is None else unpadded(values_BT, batch.length_B))
        metrics |= {
            "wait_s": wait_s,
            "fetch_s": fetched.fetch_s,
            "update_s": time.perf_counter() - begin,
            "push_ms": push_ms,
        }
        return encode(UpdateReport(version=self.version, metrics=metrics, lag_histogram=fetched.lags))

    @ray.method
    def configure(self, config: bytes) -> None:
        """`config` holds from the present version on: what a run that was resumed with changes did here."""
        self.config = msgspec.msgpack.decode(config, type=Config)
        torch.set_num_threads(self.config.learner.threads)
        optimizer.configure(self.optimizer, self.config)
        self.policy.temperature = self.config.rollout.temperature
        self.policy.float32_head = self.config.model.float32_head
        self.reference = self._reference(self.reference)
        before, self.updater = self.updater, self._updater()
        self.updater.remember(before.beta, before.bad_steps)
        self._prefetch(self.version)

    @ray.method
    def settle(self) -> None:
        """Wait until the last push is published and the last checkpoint has its name."""
        self.pusher.last.result()
        self.saver.wait()

    @ray.method
    def save(self, folder: str) -> None:
        """Start a checkpoint of the present version under `folder`; it is written beside training. A collective."""
        state = State(
            version=self.version,
            digest="",
            ranks=self.config.learner.ranks,
            beta=self.updater.beta,
            bad_steps=self.updater.bad_steps,
        )
        self.saver.start(Path(folder), state, self.policy, self.optimizer, self.pusher.last)

    @ray.method
    def export(self, folder: str) -> str:
        """The present policy as a Hugging Face folder. A collective. Returns the digest of the last push."""
        whole = model.snapshot(self.policy, self.config.model.dtype)
        if self.rank == 0:
            _export(whole, self.model_path, Path(folder), self.config.model.dtype)
        return self.pusher.last.result().digest

    # --- the pieces ------------------------------------------------------------------------------------------

    def _load(self, critic: str = "head", *, offload: bool = False) -> model.Policy:
        temperature = self.config.rollout.temperature
        return model.load(self.config.model, self.model_path, temperature, self.mesh, critic, offload=offload)

    def _reference(self, known: model.Policy | None) -> model.Policy | None:
        """The run's first model, as the configuration wants it; it is read only where it is not `known`."""
        kl = self.config.algorithm.kl
        if not kl.on:
            return None
        made = known or self._load(offload=kl.offload)
        made.temperature, made.float32_head = self.policy.temperature, self.policy.float32_head
        return made

    def _updater(self) -> Updater:
        chosen = objective.build(self.config)
        return Updater(self.policy, self.optimizer, chosen, self.config, group=self.group, reference=self.reference)

    def _pretrain(self, run: str) -> None:
        """Teach the critic what an earlier run earned, in the order in which it was trained on."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["full_lr"]
        explained: list[float] = []
        for version in ray.get(self.queue.lessons.remote(run)):
            batch = pack(decode(ray.get(self.queue.lesson.remote(run, version)), Batch))
            explained.append(self.updater.pretrain(batch.to(self.updater.device)))
        if not explained:
            raise JournalError(f"{run}: no archived batch to teach the critic")
        if self.rank == 0:
            shares = f"{explained[0]:.2f} of the returns' variance explained at first, {explained[-1]:.2f} at last"
            print(f"the critic has learned from {len(explained)} batches of {run}: {shares}", flush=True)

    def _prefetch(self, version: int) -> None:
        self._next = self._fetcher.submit(self._fetch, version)

    def _fetch(self, version: int) -> Fetched | None:
        begin = time.perf_counter()
        data: Any = ray.get(self.queue.take.remote(version))
        if not data:
            return None
        packed = pack(decode(data, Batch))
        lags, counts = packed.lag_BT[packed.mask_BT].unique(return_counts=True)
        histogram = dict(zip(lags.tolist(), counts.tolist(), strict=True))
        return Fetched(packed, histogram, time.perf_counter() - begin)

    def _push(self, values: bytes = b"") -> float:
        """Snapshot on every rank, carry from rank 0. Returns how long the push before it took, in ms."""
        whole = model.snapshot(self.policy, self.config.model.dtype)
        return self.pusher.push(self.version, whole, values) if self.rank == 0 else 0.0

    def _publish(self, push: bytes, refs: list[Any], values: bytes) -> None:
        ray.get(self.queue.publish.remote(push, refs, values, self.epoch))

    def _follow_queue(self, life: str) -> None:
        """A queue that was started again has no weights to give: it gets the last ones once more."""
        while True:
            life = ray.get(self.queue.another_life.remote(life))
            self.pusher.again()

    def _schedule(self) -> None:
        share = lr_share(self.config.learner, self.version, self.config.updates)
        actor, critic = self.optimizer.param_groups
        actor["lr"] = actor["full_lr"] * share
        critic["lr"] = critic["full_lr"] * share


def lr_share(config: LearnerConfig, version: int, updates: int) -> float:
    """The share of the full learning rate that the update after `version` uses: warm-up, then decay."""
    if version < config.warmup_updates:
        return (version + 1) / config.warmup_updates
    progress = (version - config.warmup_updates) / max(1, updates - config.warmup_updates)
    floor = config.final_lr_share
    match config.decay:
        case "constant":
            return 1.0
        case "linear":
            return floor + (1 - floor) * (1 - progress)
        case "cosine":
            return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def _export(whole: dict[str, torch.Tensor], start: str, folder: Path, dtype: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lm = AutoModelForCausalLM.from_pretrained(start, dtype=getattr(torch, dtype))
    parameters = dict(lm.named_parameters())
    with torch.no_grad():
        for name, tensor in whole.items():
            parameters[name].copy_(tensor)
    pretrained.write(lm, AutoTokenizer.from_pretrained(start), folder)
