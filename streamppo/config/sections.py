"""The configuration tree. It is frozen; unknown fields are errors; a required field has no default.

A choice between kinds is a tagged union: `kind = "..."` in the file selects the struct, and one `match` selects the
function that builds the object. file.py reads files and overrides; the mathematics is in algorithm.py, data in task.py,
the queue in queue.py, rewards in reward.py, engines in engine.py, ranks in learner.py, files in storage.py.
"""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from streamppo.config.algorithm import Algorithm
from streamppo.config.base import (
    MOST_PROCESSES,
    Count,
    Fraction,
    Machine,
    Positive,
    PositiveFloat,
    Processes,
    Seconds,
    Section,
)
from streamppo.config.engine import EmbeddedEngine, SGLangEngine
from streamppo.config.exploration import KlCov
from streamppo.config.learner import Learner
from streamppo.config.lora import Lora
from streamppo.config.origin import Origin
from streamppo.config.queue import Queue
from streamppo.config.reward import Reward
from streamppo.config.storage import Archive, Checkpoint
from streamppo.config.task import AgentEnvironment, AnyEnvironment, ArithmeticTask, DataTask, Task
from streamppo.config.telemetry import Telemetry

BUILTIN = "builtin:tiny"
"""The model.path of a small model that the run makes itself."""
HEAD_WIDTH = 8
"""Width of an attention head of builtin:tiny."""
JOINED = ("flash_attention_2", "flash_attention_3", "flash_attention_4", "varlen")
"""Attention kernels for packed rows, without padding, in 16 bits, on a GPU; the last is torch's own."""

# --- the model -----------------------------------------------------------------------------------------------


class Tiny(Section, frozen=True):
    """The model "builtin:tiny": its size, and the supervised warm-up that teaches it the format and weak answers."""

    hidden_size: Positive = 64
    """Width; every attention head is 8 wide."""
    layers: Annotated[int, Meta(ge=1, le=128)] = 2
    """Layers."""
    max_steps: Count = 200
    """Maximum supervised steps before reinforcement."""
    target_accuracy: Fraction = 0.22
    """Greedy accuracy on training problems that ends the warm-up."""

    def contradictions(self) -> Iterator[str]:
        """The heads must divide the width."""
        if self.hidden_size % HEAD_WIDTH:
            yield f"hidden_size ({self.hidden_size}) must be a multiple of {HEAD_WIDTH}, the width of a head"


class Model(Section, frozen=True):
    """The policy."""

    path: str
    """Folder or hub name of a causal LM, or "builtin:tiny"."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Parameters and activations of learner and engine."""
    float32_head: bool = True
    """Compute logits in float32 in learner and engine (arXiv:2506.13585)."""
    attention: Literal[
        "auto", "sdpa", "eager", "varlen", "flash_attention_2", "flash_attention_3", "flash_attention_4"
    ] = "auto"
    """The learner's; auto: for bfloat16 on a GPU flash-attn, or torch's own (varlen), else sdpa."""
    share_prompts: bool = True
    """Compute a prompt once for its samples in a micro-batch; not with eager."""
    float32_router: bool = False
    """The learner computes expert scores in float32."""
    gradient_checkpointing: Literal["auto", "off", "full", "offloaded"] = "auto"
    """Recompute activations from layers' inputs ("offloaded": kept in CPU memory); auto: full if a GPU is too small."""
    compile: bool = False
    """Compile the learner's layers with torch.compile: a warm-up of minutes."""
    lora: Lora | None = None
    """Train adapters on frozen weights; `{}` takes their defaults."""
    clock: str = ""
    """Time for chat templates (2026-01-31T12:00); empty is the run's start."""
    tiny: Tiny = Tiny()
    """The model behind "builtin:tiny"."""

    def contradictions(self) -> Iterator[str]:
        """Attention over packed rows needs bfloat16, float32_router needs compile off, clock must be a time."""
        if self.clock and not _is_time(self.clock):
            yield f"clock ({self.clock!r}) is a date, or a date and a time: 2026-01-31 or 2026-01-31T12:00"
        if self.attention in JOINED and self.dtype != "bfloat16":
            yield f'attention = "{self.attention}" computes in 16 bits: it needs dtype = "bfloat16"'
        if self.compile and self.float32_router:
            yield "float32_router = true needs single operations, and compile = true fuses them"

    def refuses(self, what: str) -> Iterator[str]:
        """Yield a sentence for every choice that excludes `what`, which needs the learner's own attention."""
        for name, refused in {"attention": self.attention == "eager", "compile": self.compile}.items():
            if refused:
                yield f"{what} is not possible with model.{name} = {getattr(self, name)!r}"


# --- rollout -------------------------------------------------------------------------------------------------


class Rollout(Machine, frozen=True):
    """The actors that generate."""

    engine: EmbeddedEngine | SGLangEngine = EmbeddedEngine()
    """The engine that samples the tokens."""
    threads: Positive = 1
    """CPU threads."""
    actors: Processes = 1
    """Rollout actors; `streamppo scale` changes their number."""
    in_flight: Positive = 64
    """Trajectories of one actor in flight, rewards included."""
    slots: Positive = 64
    """Completions that one engine decodes at once."""
    max_tokens: Positive = 256
    """Maximum tokens of one completion."""
    stop: tuple[str, ...] = ()
    """Further stops: names of added tokens, and strings."""
    limit: str = ""
    """`package.module:name` or `path/file.py:name`: (prompt, identity) -> a lower max_tokens."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature, of the learner's log-probs too."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Nucleus sampling in training; below 1, log-probs are over the candidates."""
    top_k: Count = 0
    """Top-k sampling in training, as with top_p; 0 is off."""

    @property
    def cuts(self) -> bool:
        """True if top-p or top-k exclude tokens of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0

    def contradictions(self) -> Iterator[str]:
        """Sampling without a training signal, or that the engine does not support."""
        if "" in self.stop:
            yield 'stop has "", which would end a completion at its first token'
        if self.top_k == 1:
            yield "top_k (1) leaves every token without an alternative: all log-probs are 0, and nothing is learned"
        if refused := self.engine.refuses_sampling(self.top_p, self.top_k):
            yield refused


# --- around --------------------------------------------------------------------------------------------------


class Evaluation(Section, frozen=True):
    """Greedy answers to held-out prompts, during training."""

    every: Count = 20
    """Updates between two evaluations; 0: only before and after training."""
    prompts: Positive = 256
    """Held-out prompts of one evaluation."""
    actors: Annotated[int, Meta(ge=0, le=MOST_PROCESSES)] = 0
    """Actors that only evaluate, each as one of [rollout]; 0: the rollout actors answer beside their samples."""


LONGEST_NAME = 200
"""Longest name of a run in bytes: file systems take 255, and a number may be appended."""
LOCAL = "local"
"""The address of a Ray that the run starts here for itself."""


class Cluster(Section, frozen=True):
    """The run's Ray."""

    address: str = LOCAL
    """ "local" starts Ray here; any other address joins that cluster."""
    cpus: Positive | None = None
    """Logical CPUs of local Ray; by default what the configuration needs."""
    object_store_mib: Positive = 256
    """Shared memory of the local object store."""
    own_disks: bool = False
    """Nodes share no folder; files come through checkpoint.remote."""


class Watchdog(Section, frozen=True):
    """Bounds on waiting."""

    stall_s: Seconds = 300.0
    """Time without an update or evaluation after which the run stops."""
    load_s: Seconds = 900.0
    """Added to stall_s while the learner loads its model."""
    shutdown_s: Seconds | None = None
    """Time limit of the last checkpoint; by default 6 s, plus 10 s per GB."""
    heartbeat_s: Annotated[float, Meta(ge=10)] = 60.0
    """Time without a heartbeat after which an actor or rank is replaced."""
    max_restarts: Count = 10
    """Restarts within restarts_s; one more death ends the run."""
    restarts_s: Seconds = 600.0
    """Time window in which restarts are counted."""


class Config(Section, frozen=True):
    """One run."""

    name: str
    """The run's folder is runs/NAME; by default the file's name."""
    model: Model
    """The policy."""
    task: Task
    """The source of prompts."""
    updates: Positive = 200
    """Updates to make."""
    queue: Queue = Queue()
    """The queue of trajectories between rollout and learner."""
    algorithm: Algorithm = Algorithm()
    """The mathematics of one update."""
    learner: Learner = Learner()
    """The ranks that train."""
    reward: Reward = Reward()
    """The source of scores; optional with an environment, which gives rewards itself."""
    environment: AnyEnvironment | None = None
    """Several turns, if given; its rewards are added to those of [reward]."""
    seed: Count = 1
    """Seed of all randomness."""
    rollout: Rollout = Rollout()
    """The actors that generate."""
    evaluation: Evaluation = Evaluation()
    """Held-out accuracy."""
    checkpoint: Checkpoint = Checkpoint()
    """State on disk."""
    archive: Archive = Archive()
    """Batches on disk."""
    cluster: Cluster = Cluster()
    """The run's Ray."""
    watchdog: Watchdog = Watchdog()
    """Bounds on waiting."""
    telemetry: Telemetry = Telemetry()
    """Other programs that get the run's metrics."""
    origin: Origin | None = None
    """The run that this one was forked of; `streamppo fork` writes it."""

    @property
    def engines(self) -> int:
        """The number of engines, those that only evaluate included."""
        return self.rollout.actors + self.evaluation.actors

    @property
    def linear(self) -> tuple[str, ...]:
        """The choices that exclude trajectories with branches, whose tokens form a tree."""
        segments = ("queue.segments",) if self.queue.segments else ()
        return (*segments, *self.learner.mesh.own_attention)

    def contradictions(self) -> Iterator[str]:
        """Rules between sections."""
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
        if algorithm.curriculum and isinstance(self.task, ArithmeticTask) and self.task.ramp_prompts:
            yield "algorithm.curriculum and task.ramp_prompts are two curricula: choose one"
        yield from _proximal(self)
        yield from queue.segments.refuses(algorithm) if queue.segments else ()
        for choice in (*queue.own_attention, *self.learner.mesh.own_attention):
            yield from self.model.refuses(choice)
        if refused := algorithm.teacher.refuses_sampling(self.rollout.temperature, cuts=self.rollout.cuts):
            yield refused
        if self.environment is None and not self.reward.scorers:
            yield "a run has `[reward] function = ...`, `[reward.scorers.NAME]` tables or an `[environment]`"
        if isinstance(self.environment, AgentEnvironment):
            yield from self.environment.refuses(self.linear)
        yield from _kept(self)
        places = self.rollout.actors, self.evaluation.actors, self.rollout.gpus
        if refused := self.rollout.engine.refuses_places(*places):
            yield refused
        segments = queue.segments is not None
        yield from self.rollout.engine.refuses_learner(compiled=self.model.compile, segments=segments)
        yield from _gpus(self)
        yield from self.model.lora.refuses(algorithm.kl) if self.model.lora else ()
        if self.model.compile and learner.exact:
            yield "model.compile may choose other operations in a resumed run: it needs learner.exact = false"
        if not _names_folder(self.name):
            yield (
                f"name ({_short(self.name)}) must be usable as the name of a folder: at most {LONGEST_NAME} bytes, "
                'without "/", control characters, spaces at an end or "." at the beginning'
            )


def _kept(config: Config) -> Iterator[str]:
    """Yield a sentence for every choice that would leave a run without files that it needs."""
    if config.archive.keep and (not config.checkpoint.every or config.checkpoint.keep < 2):
        yield (
            f"archive.keep ({config.archive.keep}) drops batches that two checkpoints replace: "
            "checkpoint.every must be above 0 and checkpoint.keep at least 2"
        )
    if config.cluster.own_disks and not config.checkpoint.remote:
        yield "cluster.own_disks needs checkpoint.remote: a new node lacks the files of earlier ones"
    if config.queue.standby and not config.cluster.own_disks:
        yield "queue.standby needs cluster.own_disks: without the queue's disk the model must come from elsewhere"
    yield from config.learner.transport.refuses_disks(own=config.cluster.own_disks)


def _proximal(config: Config) -> Iterator[str]:
    """Yield a sentence for every choice that is void or misleading with the configured proximal policy."""
    algorithm, learner, max_lag = config.algorithm, config.learner, config.queue.bound
    if algorithm.proximal == "loglinear" and learner.epochs * learner.minibatches == 1:
        yield (
            "algorithm.proximal = 'loglinear' approximates log-probs that are exact and free where "
            "an update is one step: learner.epochs (1) times learner.minibatches (1)"
        )
    if learner.lr_by_ess == "on" and algorithm.proximal != "recompute":
        yield (
            f"learner.lr_by_ess scores a batch before its first step, and algorithm.proximal = {algorithm.proximal!r} "
            "passes over it only to learn from it: choose recompute"
        )
    steps, is_behavior = learner.epochs * learner.minibatches, algorithm.proximal == "behavior"
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


def _is_time(text: str) -> bool:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True


def _names_folder(name: str) -> bool:
    fits = 0 < len(name.encode(errors="surrogatepass")) <= LONGEST_NAME
    return fits and name.isprintable() and "/" not in name and name == name.strip() and not name.startswith(".")


def _short(name: str) -> str:
    return repr(name if len(name) <= 40 else f"{name[:40]}...")


PROMPT = 256
"""Assumed tokens of a prompt if the configuration does not bound them."""


def longest_row(config: Config) -> int:
    """Tokens of the longest prompt plus the longest completion; `PROMPT` replaces an unbounded prompt."""
    if not isinstance(config.task, DataTask):
        return PROMPT + longest_completion(config)
    return max(source.max_prompt_tokens for source in config.task.sources.values()) + longest_completion(config)


def longest_completion(config: Config) -> int:
    """Maximum tokens of a completion, including an environment's turns and observations."""
    return config.rollout.max_tokens if config.environment is None else config.environment.max_tokens


def shares_gpus(config: Config) -> bool:
    """True if ranks and rollout actors share GPUs: both need less than one."""
    return 0 < config.learner.gpus < 1 and 0 < config.rollout.gpus < 1


def _gpus(config: Config) -> Iterator[str]:
    """Yield a sentence for every impossible demand for GPUs."""
    learner, rollout = config.learner, config.rollout
    together = learner.gpus + rollout.gpus * -(-config.engines // learner.ranks)
    if learner.gpus > 1:
        yield f"learner.gpus ({learner.gpus:g}) must be at most 1: a rank computes on one GPU; raise learner.ranks"
    if config.model.attention in JOINED and not learner.gpus:
        yield f"model.attention = {config.model.attention!r} needs a GPU, and learner.gpus is 0"
    if shares_gpus(config) and together > 1:
        yield (
            f"learner.gpus ({learner.gpus:g}) and rollout.gpus ({rollout.gpus:g}) are more than one GPU where a rank "
            f"and its share of the {config.engines} engines have one between them"
        )
    cut = {"adapted": config.model.lora is not None, "compiled": config.model.compile}
    yield from learner.mesh.refuses(learner.ranks, config.queue.prefix, **cut)
    if 0 < learner.gpus < 1 and learner.ranks > 1 and not shares_gpus(config):
        yield f"learner.gpus ({learner.gpus:g}) must be 1 with several ranks: NCCL needs a GPU for each"


def model_path(config: Config, run: Path) -> str:
    """Folder or hub name of the run's first model and its tokenizer."""
    return str(run / "model") if config.model.path == BUILTIN else config.model.path
