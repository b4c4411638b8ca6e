"""The one configuration tree. Frozen; unknown fields are errors; required means that it has no default.

A choice between kinds is a tagged union: `kind = "..."` in the file selects the struct, and one `match` where the
object is built. Reading files and overrides is configfile.py.
"""

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

Positive: TypeAlias = Annotated[int, Meta(ge=1)]
Count: TypeAlias = Annotated[int, Meta(ge=0)]
Seconds: TypeAlias = Annotated[float, Meta(gt=0)]
Fraction: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
NonNegative: TypeAlias = Annotated[float, Meta(ge=0)]
PositiveFloat: TypeAlias = Annotated[float, Meta(gt=0)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every table of the file."""


class Kind(Section, frozen=True, tag_field="kind"):
    """Base of every table that is one choice of several; its tag is given by each subclass."""


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
    hidden_size: Positive = 64
    """Width of builtin:tiny."""
    layers: Positive = 2
    """Layers of builtin:tiny."""
    heads: Positive = 8
    """Attention heads of builtin:tiny."""
    warm_start: WarmStart = WarmStart()
    """Warm start of builtin:tiny."""


# --- the task ------------------------------------------------------------------------------------------------


class ArithmeticTask(Kind, frozen=True, tag="arithmetic"):
    """Procedural addition: "12+34=" asks for "46"."""

    first: tuple[Count, Count] = (10, 99)
    """Smallest and largest first number."""
    second: tuple[Count, Count] = (10, 99)
    """Smallest and largest second number."""
    held_out: Fraction = 0.1
    """Share of the problems kept for evaluation and never trained on."""


class FilesTask(Kind, frozen=True, tag="files"):
    """Rows of jsonl or parquet files with a `prompt` and an `answer` column; other columns reach the reward."""

    train: str
    """Path of the training file."""
    evaluation: str | None = None
    """Path of the evaluation file; without it a share of the training rows is held out."""
    held_out: Fraction = 0.05
    """Share of the training rows held out when there is no evaluation file."""
    prompt: str = "prompt"
    """Column of the prompt."""
    answer: str = "answer"
    """Column of the answer."""
    max_prompt_tokens: Positive = 1024
    """Longer prompts are an error."""


class Reward(Section, frozen=True):
    """Where scores come from."""

    function: str
    """`package.module:name` of an `async def score(prompt, completion, answer, **columns) -> float`."""
    timeout_s: Seconds = 30.0
    """A reward that takes longer fails its trajectory."""
    correct_at: float = 1.0
    """Evaluation counts a completion as correct when its score reaches this."""


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


# --- algorithm -----------------------------------------------------------------------------------------------


class Gae(Kind, frozen=True, tag="gae"):
    """Generalized advantage estimation (arXiv:1506.02438): one critic value per token."""

    gamma: Fraction = 1.0
    """Discount per token."""
    lam: Fraction = 0.95
    """Lambda of the actor's advantages."""
    critic_lam: Fraction = 1.0
    """Lambda of the critic's targets."""
    bootstrap_truncated: bool = True
    """The value after the last token of a truncated completion: the critic's, or 0."""


class NoCorrection(Kind, frozen=True, tag="off"):
    """No weight for off-policy data: a biased gradient when lag > 0."""


class Truncate(Kind, frozen=True, tag="truncate"):
    """min(proximal / behavior, cap), at the level of tokens (decoupled PPO, arXiv:2505.24298)."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """What the ratio is taken over."""
    cap: PositiveFloat = 2.0
    """The largest weight."""


class Clip(Kind, frozen=True, tag="clip"):
    """PPO's clipped surrogate (arXiv:1707.06347), with separate bounds (DAPO, arXiv:2503.14476)."""

    low: Fraction = 0.2
    """The ratio is clipped below at 1 - low."""
    high: NonNegative = 0.2
    """The ratio is clipped above at 1 + high."""
    dual: NonNegative = 0.0
    """Bound on ratio * advantage for negative advantages (arXiv:1912.09729); 0 is off."""


class ValueLoss(Section, frozen=True):
    """The critic's loss."""

    coefficient: NonNegative = 0.5
    """Weight of the critic's loss beside the policy's."""
    clip: NonNegative = 0.2
    """The value may move this far from its proximal value before the gradient stops; 0 is unclipped."""


class Algorithm(Section, frozen=True):
    """The mathematics of one update."""

    correction: NoCorrection | Truncate
    """How the age of the data is corrected for; no default, so that nobody corrects nothing unawares."""
    advantage: Gae = Gae()
    """How advantages are estimated."""
    whiten: Literal["off", "batch"] = "batch"
    """Advantages get mean 0 and variance 1 over the whole batch, all ranks."""
    policy_loss: Clip = Clip()
    """The policy's loss."""
    aggregation: Literal["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum"] = "token-mean"
    """How per-token losses become one number; the denominators are global."""
    value_loss: ValueLoss = ValueLoss()
    """The critic's loss."""
    entropy: float = 0.0
    """Weight of the entropy bonus."""


# --- learner -------------------------------------------------------------------------------------------------


class Learner(Section, frozen=True):
    """The ranks that train."""

    lr: PositiveFloat
    """AdamW's learning rate."""
    ranks: Positive = 1
    """Learner ranks, one Ray actor each."""
    critic_lr: PositiveFloat | None = None
    """Learning rate of the value head; the policy's by default."""
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
    """The gradient's global norm is clipped to this."""
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
    task: ArithmeticTask | FilesTask
    """Where prompts come from."""
    reward: Reward
    """Where scores come from."""
    queue: Queue
    """What waits between rollout and learner."""
    algorithm: Algorithm
    """The mathematics of one update."""
    learner: Learner
    """The ranks that train."""
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
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ValueError(f"name ({self.name!r}) must be usable as the name of a folder")
