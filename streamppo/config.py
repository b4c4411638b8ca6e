"""The one configuration tree. Frozen; unknown fields are errors; required means that it has no default.

A choice between kinds is a tagged union: `kind = "..."` in the file selects the struct, and one `match` where the
object is built. Reading files and overrides is configfile.py; the mathematics is in config_algorithm.py, data in
config_task.py, rewards in config_reward.py.
"""

from typing import Annotated, Literal

from msgspec import Meta

from streamppo.config_algorithm import GROUP_BASED, Algorithm
from streamppo.config_base import Count, Fraction, Kind, NonNegative, Positive, PositiveFloat, Seconds, Section
from streamppo.config_reward import Reward
from streamppo.config_task import Environment, Task

# --- the model -----------------------------------------------------------------------------------------------


class WarmStart(Section, frozen=True):
    """Supervised steps that teach `builtin:tiny` the format and a weak answer before reinforcement begins."""

    max_steps: Count = 200
    """Steps at most."""
    target_accuracy: Fraction = 0.22
    """Stops at the first check in which greedy answers to training problems reach this."""
    check_every: Positive = 2
    """Steps between two checks."""
    batch_size: Positive = 256
    """Problems in one step."""
    lr: PositiveFloat = 5e-3
    """AdamW's learning rate in the warm start."""


class Model(Section, frozen=True):
    """The policy."""

    path: str
    """A local folder or hub name of a Hugging Face causal LM, or "builtin:tiny"."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Parameters and activations of learner and engine."""
    attention: Literal["auto", "sdpa", "flash_attention_2"] = "auto"
    """Attention of the learner's forward; auto takes flash-attn where it is installed and a GPU is there."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    hidden_size: Positive = 64
    """Width of builtin:tiny."""
    layers: Positive = 2
    """Layers of builtin:tiny."""
    heads: Positive = 8
    """Attention heads of builtin:tiny."""
    warm_start: WarmStart = WarmStart()
    """Warm start of builtin:tiny."""


# --- rollout -------------------------------------------------------------------------------------------------


class EmbeddedEngine(Kind, frozen=True, tag="embedded"):
    """Our own torch engine: any device, small models."""

    kv: Literal["keep", "recompute"] = "keep"
    """What a weight swap does with the cache of running completions."""


class Rollout(Section, frozen=True):
    """The actors that generate."""

    engine: EmbeddedEngine = EmbeddedEngine()
    """What samples the tokens."""
    actors: Positive = 1
    """Rollout actors."""
    in_flight: Positive = 64
    """Trajectories that one actor keeps in flight, rewards included."""
    slots: Positive = 64
    """Completions that one engine decodes at once."""
    max_tokens: Positive = 16
    """Tokens of one completion at most."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; the learner's log-probs are taken at the same one."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Nucleus sampling in training; below 1 the learner cannot match the sampled distribution exactly."""
    top_k: Count = 0
    """Top-k sampling in training; above 0 the learner cannot match the sampled distribution exactly."""
    threads: Positive = 1
    """CPU threads of one engine."""
    gpus: NonNegative = 0
    """GPUs of one actor."""


# --- replay --------------------------------------------------------------------------------------------------


class Queue(Section, frozen=True):
    """What waits between rollout and learner."""

    batch_size: Positive
    """Trajectories of one update."""
    max_lag: Count
    """Hard bound on the age of a trained token, in versions; 0 is synchronous PPO."""
    too_old: Literal["mask", "drop", "wait"]
    """A token beyond max_lag: train the rest, sample the prompt again, or hold the flow in issue order."""
    samples_per_prompt: Positive = 1
    """Completions of each prompt."""
    max_attempts: Positive = 3
    """Tries of one trajectory before it is abandoned, counting failures only."""
    max_failure_rate: Fraction = 0.5
    """A higher share of failed trajectories stops the run."""


# --- learner -------------------------------------------------------------------------------------------------


class Learner(Section, frozen=True):
    """The ranks that train."""

    lr: PositiveFloat
    """AdamW's learning rate."""
    ranks: Positive = 1
    """Learner ranks, one Ray actor each."""
    warmup_updates: Count = 0
    """Updates over which the learning rate rises from 0."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls until the last update."""
    final_lr_share: Fraction = 0.0
    """Where the decay ends, as a share of lr."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's moments."""
    weight_decay: NonNegative = 0.0
    """AdamW's weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """The gradient's global 2-norm is clipped to this."""
    max_bad_steps: Positive = 3
    """Optimizer steps in a row whose gradient is not finite are skipped; after so many the run stops."""
    epochs: Positive = 1
    """Passes over one batch."""
    minibatches: Positive = 1
    """Optimizer steps in one epoch."""
    micro_batch_tokens: Positive = 16384
    """Tokens, padding included, of one forward and backward on one rank."""
    threads: Positive = 1
    """CPU threads of one rank."""
    gpus: NonNegative = 0
    """GPUs of one rank."""


class Weights(Section, frozen=True):
    """Pushes from learner to engines."""

    bucket_bytes: Positive = 256 * 1024 * 1024
    """Parameters travel in flat buckets of about this size."""


# --- around --------------------------------------------------------------------------------------------------


class Evaluation(Section, frozen=True):
    """Greedy answers to held-out prompts, by the rollout actors, while training goes on."""

    every: Count = 20
    """Updates between two evaluations; 0 evaluates only before and after."""
    prompts: Positive = 256
    """Held-out prompts of one evaluation."""


class Checkpoint(Section, frozen=True):
    """State on disk to resume from."""

    every: Count = 50
    """Updates between two checkpoints; 0 writes only the last one."""
    keep: Positive = 2
    """Checkpoints that stay on disk."""


class Cluster(Section, frozen=True):
    """Where Ray runs."""

    address: str = "local"
    """ "local" starts Ray in this process's machine; anything else joins that cluster."""
    cpus: Positive | None = None
    """Logical CPUs that local Ray may hand out; all that the actors ask for by default."""
    object_store_mib: Positive = 256
    """Shared memory of the local object store."""


class Watchdog(Section, frozen=True):
    """Bounds on waiting."""

    stall_s: Seconds = 300.0
    """With no update for so long the run stops and says what every stage waits for."""
    shutdown_s: Seconds = 8.0
    """Actors that have not stopped by then are killed."""


class Config(Section, frozen=True):
    """One run."""

    name: str
    """The run's folder is runs/NAME."""
    updates: Positive
    """Updates to make."""
    model: Model
    """The policy."""
    task: Task
    """Where prompts come from."""
    reward: Reward
    """Where scores come from."""
    queue: Queue
    """What waits between rollout and learner."""
    algorithm: Algorithm
    """The mathematics of one update."""
    learner: Learner
    """The ranks that train."""
    environment: Environment | None = None
    """Several turns, if there is one; its rewards are added to those of [reward], which may then be empty."""
    seed: int = 1
    """Everything random is derived from it."""
    rollout: Rollout = Rollout()
    """The actors that generate."""
    weights: Weights = Weights()
    """Pushes from learner to engines."""
    evaluation: Evaluation = Evaluation()
    """Held-out accuracy."""
    checkpoint: Checkpoint = Checkpoint()
    """State on disk."""
    cluster: Cluster = Cluster()
    """Where Ray runs."""
    watchdog: Watchdog = Watchdog()
    """Bounds on waiting."""

    def __post_init__(self) -> None:
        """Rules between fields. `ValueError` becomes a ConfigError that names the file."""
        queue, learner = self.queue, self.learner
        if queue.batch_size % queue.samples_per_prompt:
            raise ValueError(
                f"queue.batch_size ({queue.batch_size}) must be a multiple of "
                f"queue.samples_per_prompt ({queue.samples_per_prompt})"
            )
        if queue.batch_size % learner.minibatches:
            raise ValueError(
                f"queue.batch_size ({queue.batch_size}) must be a multiple of "
                f"learner.minibatches ({learner.minibatches})"
            )
        algorithm = self.algorithm
        if isinstance(algorithm.advantage, GROUP_BASED) and queue.samples_per_prompt < 2:
            raise ValueError(
                f"advantage {algorithm.advantage.__struct_config__.tag!r} compares the samples of a prompt: "
                f"queue.samples_per_prompt ({queue.samples_per_prompt}) must be at least 2"
            )
        if algorithm.zero_variance != "keep" and not isinstance(algorithm.advantage, GROUP_BASED):
            raise ValueError("zero_variance is about groups: it needs an advantage that compares them")
        if algorithm.kl.reward_beta and algorithm.kl.loss_beta and not algorithm.kl.allow_both:
            raise ValueError("KL in reward and loss at once over-regularises: set algorithm.kl.allow_both = true")
        if self.environment is None and not self.reward.named():
            raise ValueError("a reward has either `function` or `[reward.scorers.NAME]` tables, if no [environment]")
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ValueError(f"name ({self.name!r}) must be usable as the name of a folder")
