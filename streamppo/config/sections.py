"""The configuration of a run as frozen structs. Unknown fields are errors, and a required field has no default.

A choice between kinds is a tagged union: `kind = "..."` in the file selects the struct. One `match` on the struct
builds the object. file.py reads files and overrides. Large sections are in model.py, task.py, reward.py, rollout.py,
queue.py, algorithm.py and learner.py.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from streamppo.config.algorithm import Algorithm
from streamppo.config.base import MOST_PROCESSES, Count, Kind, Positive, Seconds, Section
from streamppo.config.learner import Folder, Learner
from streamppo.config.model import BUILTIN, JOINED, Model
from streamppo.config.queue import Queue
from streamppo.config.regularisation import KlCov
from streamppo.config.reward import Reward
from streamppo.config.rollout import Rollout
from streamppo.config.task import AgentEnvironment, AnyEnvironment, DataTask, Task
from streamppo.terminal import quoted

LONGEST_NAME = 200
"""Maximum bytes of a run's name. File systems allow 255, and a number may be appended."""
LOCAL = "local"
"""The cluster.address with which the run starts Ray on this machine."""
HORIZON = 5
"""A batch of this many kl.horizons could change the weight of the KL by its whole size (algorithms/kl.py)."""
Tracker: TypeAlias = Literal["tensorboard", "wandb", "trackio", "mlflow"]
Port: TypeAlias = Annotated[int, Meta(ge=1, le=65535)]


class Evaluation(Section, frozen=True):
    """Evaluation during training, by greedy answers to held-out prompts."""

    every: Count = 20
    """Updates between two evaluations; 0 evaluates only before and after training."""
    prompts: Positive = 256
    """Held-out prompts of one evaluation."""
    actors: Annotated[int, Meta(ge=0, le=MOST_PROCESSES)] = 0
    """Number of actors that only evaluate; 0 lets rollout actors evaluate."""


class Checkpoint(Section, frozen=True):
    """Checkpoints, from which a run is resumed."""

    every: Count = 50
    """Updates between two checkpoints; 0 writes only the last one."""
    keep: Positive = 2
    """Number of newest checkpoints that stay on disk."""
    keep_every: Count = 0
    """Never delete checkpoints of versions that are multiples of this; 0 is off."""
    remote: str = ""
    """An fsspec address (s3://bucket/runs) to which checkpoints are copied."""


class Archive(Section, frozen=True):
    """The archive, which stores trained batches on disk."""

    keep: Count = 0
    """Number of newest batches that stay on disk; all after the oldest checkpoint stay too; 0 keeps all."""
    numbers: bool = True
    """Store each token's advantage and learner's log-prob for `watch` and `inspect`, 8 bytes a token."""


class Cluster(Section, frozen=True):
    """The Ray cluster of the run."""

    address: str = LOCAL
    """"local" starts Ray on this machine; another address joins the cluster there."""
    cpus: Positive | None = None
    """Logical CPUs of a local Ray; by default what the configuration needs."""
    object_store_mib: Positive = 256
    """Shared memory of a local object store."""
    own_disks: bool = False
    """Nodes share no folder; files are copied through checkpoint.remote."""


class Watchdog(Section, frozen=True):
    """Time limits, and limits on restarts."""

    stall_s: Seconds = 300.0
    """The run ends after this time without an update or evaluation."""
    load_s: Seconds = 900.0
    """Time that is added to stall_s while the learner loads its model."""
    shutdown_s: Seconds | None = None
    """Time limit of the last checkpoint; by default 6 s plus 10 s per GB."""
    heartbeat_s: Annotated[float, Meta(ge=10)] = 60.0
    """Restart an actor or rank after this time without a heartbeat."""
    max_restarts: Count = 10
    """The run ends after more than this many restarts within restarts_s."""
    restarts_s: Seconds = 600.0
    """Time window of max_restarts."""


class Endpoint(Kind, frozen=True, tag="endpoint"):
    """An HTTP server on 127.0.0.1 that Prometheus scrapes."""

    port: Port
    """Port of the server."""


class RayMetrics(Kind, frozen=True, tag="ray"):
    """Prometheus scrapes Ray's metrics; all nodes need ray[default]."""


class Telemetry(Section, frozen=True):
    """Programs that get the run's metrics, and that can neither stop a run nor slow it down."""

    trackers: tuple[Tracker, ...] = ()
    """Trackers of metrics and configuration."""
    project: str = "streamppo"
    """Name of the project or experiment in the trackers."""
    prometheus: Endpoint | RayMetrics | None = None
    """How Prometheus gets the metrics; by default it gets none."""

    def contradictions(self) -> Iterator[str]:
        if len(set(self.trackers)) < len(self.trackers):
            yield f"trackers ({', '.join(self.trackers)}) must name each tracker once"
        if not self.project:
            yield "project must have a name"


class Origin(Section, frozen=True):
    """The version of another run from which a fork begins. `streamppo fork` writes this table; runs do not read it."""

    run: str
    """The folder of the run that was forked."""
    version: Count
    """The last version that both runs have."""
    digest: str
    """The hash of that version's weights."""


class Config(Section, frozen=True):
    """Configuration of one run."""

    name: str
    """Name of the run and of its folder in runs/; by default the file's name."""
    model: Model
    """The policy."""
    task: Task
    """The source of prompts."""
    updates: Positive = 200
    """Number of updates in the run."""
    queue: Queue = Queue()
    """The queue of trajectories between rollout and learner."""
    algorithm: Algorithm = Algorithm()
    """The mathematics of one update."""
    learner: Learner = Learner()
    """The ranks that train."""
    reward: Reward = Reward()
    """The source of scores; optional with an environment, because environments give rewards."""
    environment: AnyEnvironment | None = None
    """An environment makes trajectories of several turns. The environment's rewards are added to those of [reward]."""
    seed: Count = 1
    """Seed of all randomness."""
    rollout: Rollout = Rollout()
    """The actors that generate."""
    evaluation: Evaluation = Evaluation()
    """Evaluation on held-out prompts."""
    checkpoint: Checkpoint = Checkpoint()
    """Checkpoints, from which a run is resumed."""
    archive: Archive = Archive()
    """The archive of trained batches."""
    cluster: Cluster = Cluster()
    """The Ray cluster of the run."""
    watchdog: Watchdog = Watchdog()
    """Time limits, and limits on restarts."""
    telemetry: Telemetry = Telemetry()
    """Programs that get the run's metrics, and that can neither stop a run nor slow it down."""
    origin: Origin | None = None
    """The run from which this one was forked; `streamppo fork` writes it."""

    @property
    def engines(self) -> int:
        """The number of actors with an engine: rollout actors, and actors that only evaluate."""
        return self.rollout.actors + self.evaluation.actors

    @property
    def linear(self) -> tuple[str, ...]:
        """The settings of this run that do not support trajectories whose tokens form a tree."""
        segments = ("queue.segments",) if self.queue.segments else ()
        return (*segments, *self.learner.mesh.attention_settings)

    def contradictions(self) -> Iterator[str]:
        queue, learner, algorithm = self.queue, self.learner, self.algorithm
        sizes = {
            "queue.samples_per_prompt": queue.samples_per_prompt,
            "learner.minibatches": learner.minibatches,
            "algorithm.critic.minibatches": algorithm.critic.minibatches or 1,
        }
        for name, size in sizes.items():
            if queue.batch_size % size:
                yield f"queue.batch_size ({queue.batch_size}) must be a multiple of {name} ({size})"
        if algorithm.compares_samples and queue.samples_per_prompt < 2:
            few = f"queue.samples_per_prompt ({queue.samples_per_prompt}) must be at least 2"
            yield f"{algorithm.compares_samples} compares the samples of a prompt: {few}"
        if algorithm.kl.target and queue.batch_size >= HORIZON * algorithm.kl.horizon:
            yield (
                f"algorithm.kl.horizon ({algorithm.kl.horizon}) must be above queue.batch_size ({queue.batch_size}) / "
                f"{HORIZON}: a KL far below kl.target would set the weight of the KL to 0, where it stays"
            )
        yield from _proximal_mistakes(self)
        yield from queue.segments.refuses(algorithm) if queue.segments else ()
        for choice in (*queue.attention_settings, *self.learner.mesh.attention_settings):
            yield from self.model.refuses(choice)
        if reason := algorithm.teacher.refuses_sampling(
            self.rollout.temperature, excludes_tokens=self.rollout.excludes_tokens
        ):
            yield reason
        if self.environment is None and not self.reward.scorers:
            yield "a run has `[reward] function = ...`, `[reward.scorers.NAME]` tables or an `[environment]`"
        if isinstance(self.environment, AgentEnvironment):
            yield from self.environment.refuses(self.linear)
        yield from _file_mistakes(self)
        yield from _engine_mistakes(self)
        yield from _gpu_mistakes(self)
        yield from self.model.lora.refuses(algorithm.kl) if self.model.lora else ()
        if self.model.compile and learner.exact:
            yield "model.compile may choose other operations in a resumed run: it needs learner.exact = false"
        if not _names_folder(self.name):
            yield (
                f"name ({quoted(self.name)}) must be usable as the name of a folder: at most {LONGEST_NAME} bytes, "
                'without "/", control characters, spaces at an end or "." at the beginning'
            )


def _file_mistakes(config: Config) -> Iterator[str]:
    """Yield a sentence for every setting with which a run would lack files that it needs."""
    if config.archive.keep and (not config.checkpoint.every or config.checkpoint.keep < 2):
        yield (
            f"archive.keep ({config.archive.keep}) drops batches that two checkpoints replace: "
            "checkpoint.every must be above 0 and checkpoint.keep at least 2"
        )
    if config.cluster.own_disks and not config.checkpoint.remote:
        yield "cluster.own_disks needs checkpoint.remote: a new node lacks the files of earlier ones"
    if config.queue.standby and not config.cluster.own_disks:
        yield "queue.standby needs cluster.own_disks: without it the model's files are only on the queue's disk"
    if config.cluster.own_disks and config.learner.transport == Folder():
        yield (
            "learner.transport = { kind = 'folder' } needs a path with cluster.own_disks: nodes do not see the run's "
            "folder"
        )


def _engine_mistakes(config: Config) -> Iterator[str]:
    """Yield a sentence for every setting that the engine excludes."""
    engine = config.rollout.engine
    if reason := engine.refuses_places(config.rollout.actors, config.evaluation.actors, config.rollout.gpus):
        yield reason
    if engine.routes and config.model.compile:
        yield "rollout.engine.routes replaces each router's choice, and model.compile fuses a layer's operations"
    if engine.routes and config.queue.segments:
        yield "rollout.engine.routes arrive at the end of a completion, and queue.segments are trained on earlier"


def _proximal_mistakes(config: Config) -> Iterator[str]:
    """Yield a sentence for every setting that is useless or misleading with the configured proximal policy."""
    algorithm, learner, max_lag = config.algorithm, config.learner, config.queue.bound
    if algorithm.proximal == "loglinear" and learner.steps == 1:
        yield (
            "algorithm.proximal = 'loglinear' approximates log-probs that are exact and free where "
            "an update is one step: learner.epochs (1) times learner.minibatches (1)"
        )
    if learner.lr_by_ess == "on" and algorithm.proximal != "recompute":
        yield (
            f"learner.lr_by_ess scores a batch before its first step, and algorithm.proximal = {algorithm.proximal!r} "
            "passes over it only to learn from it: choose recompute"
        )
    steps, is_behavior = learner.steps, algorithm.proximal == "behavior"
    if isinstance(algorithm.exploration, KlCov) and steps == 1 and not is_behavior:
        yield (
            "algorithm.exploration = 'kl_cov' penalises the distance to the policy at the update's start, 0 if "
            "an update is one step: learner.epochs (1) times learner.minibatches (1)"
        )
    if algorithm.proximal == "behavior" and algorithm.target_kl and max_lag:
        yield (
            f"algorithm.target_kl ({algorithm.target_kl:g}) bounds KL(proximal || current), and with proximal = "
            f"'behavior' and queue.max_lag ({max_lag}) that includes the age of the data: it would end updates "
            "without a step"
        )


def _names_folder(name: str) -> bool:
    fits = 0 < len(name.encode(errors="surrogatepass")) <= LONGEST_NAME
    return fits and name.isprintable() and "/" not in name and name == name.strip() and not name.startswith(".")


PROMPT = 256
"""Assumed tokens of a prompt whose length the configuration does not bound."""


def longest_row(config: Config) -> int:
    """Return the maximum tokens of a prompt and its completion. A prompt without a bound counts as `PROMPT` tokens."""
    if not isinstance(config.task, DataTask):
        return PROMPT + longest_completion(config)
    return max(source.max_prompt_tokens for source in config.task.sources.values()) + longest_completion(config)


def longest_completion(config: Config) -> int:
    """Return the maximum tokens of a completion; with an environment, of all turns and observations together."""
    return config.rollout.max_tokens if config.environment is None else config.environment.max_tokens


def describe_limits(config: Config) -> str:
    """Name the limits that cut a completion off. Example: "rollout.max_tokens (256)"."""
    limit, environment = f"rollout.max_tokens ({config.rollout.max_tokens})", config.environment
    if environment is None:
        return limit
    limits = f"{limit} for a turn or environment.max_tokens ({environment.max_tokens}) for all turns"
    return f"{limits} or the agent's own limit" if isinstance(environment, AgentEnvironment) else limits


def shares_gpus(config: Config) -> bool:
    """Return whether ranks and rollout actors share GPUs: both are configured to need less than one GPU."""
    return 0 < config.learner.gpus < 1 and 0 < config.rollout.gpus < 1


def _gpu_mistakes(config: Config) -> Iterator[str]:
    """Yield a sentence for every impossible demand for GPUs."""
    learner, rollout = config.learner, config.rollout
    together = learner.gpus + rollout.gpus * -(-config.engines // learner.ranks)
    if learner.gpus > 1:
        yield f"learner.gpus ({learner.gpus:g}) must be at most 1: a rank computes on one GPU; raise learner.ranks"
    if config.model.attention in JOINED and not learner.gpus:
        yield f"model.attention = {config.model.attention!r} needs a GPU, and learner.gpus is 0"
    if shares_gpus(config) and together > 1:
        yield (
            f"learner.gpus ({learner.gpus:g}) and rollout.gpus ({rollout.gpus:g}) are more than one GPU, but a rank "
            f"and its share of the {config.engines} engines share one"
        )
    cut = {"adapted": config.model.lora is not None, "compiled": config.model.compile}
    yield from learner.mesh.refuses(learner.ranks, config.queue.prefix, **cut)
    if 0 < learner.gpus < 1 and learner.ranks > 1 and not shares_gpus(config):
        yield f"learner.gpus ({learner.gpus:g}) must be 1 with several ranks: NCCL needs a GPU for each"


def model_path(config: Config, run: Path) -> str:
    """Return the folder or hub name of the run's initial model and its tokenizer."""
    return str(run / "model") if config.model.path == BUILTIN else config.model.path
