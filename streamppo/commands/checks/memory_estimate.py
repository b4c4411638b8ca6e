"""Estimates the memory of an engine, the object store and a machine, without 1 to 3 GiB of CUDA and SGLang's graphs."""

import math
from typing import NamedTuple

from streamppo.config.learner import ObjectStore
from streamppo.config.rollout import EmbeddedEngine, SGLangEngine
from streamppo.config.sections import LOCAL, Config
from streamppo.learner.memory import MASTER, MOMENTS, ModelSizes, RankMemory, critic_body, routes, state

VERSIONS = 3
"""Versions of the weights in the object store: two in the ledger, and one that is being pushed."""
COPIES = 2
"""Versions of the weights in an actor with SGLang, in addition to the pulled version: the served one and the next."""
IN_COMMON = 3
"""Versions in memory that a machine's actors share: the served version, the next, and the pulled version."""
RAY, PROCESS = 2**30, 350 * 2**20
"""Bytes of Ray, driver and queue, and of a rank or a rollout actor without its tensors (measured)."""
TOKEN_BYTES = 13
"""Bytes of a token of a completion in journal and archive: its id, log-prob, version and mask."""
QUEUE_BYTES_PER_S = 60e6
"""Maximum bytes of tokens per second of one queue process (docs/results.md, the queue under thousands of engines)."""
SHARD_SHARE = 0.7
"""The share of `QUEUE_BYTES_PER_S` that each of several shards reaches."""
OPERATIONS_PER_S = 989e12 / 2
"""Assumed operations per second of a learner's GPU: half of an H100's peak in bfloat16."""


class EngineMemory(NamedTuple):
    """Bytes of an engine on each of its GPUs or, on a CPU, in its actor's memory.

    `cache` has room for `tokens` tokens, including rows that wait between two turns. `copied` is a temporary copy of
    one layer's rows.
    """

    weights: int
    cache: int
    tokens: int
    copied: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.copied


def engine(config: Config, model: ModelSizes, longest: int, free: float) -> EngineMemory | None:
    """Estimate one engine on one of its GPUs, with `free` bytes when it starts. Returns None for a running server.

    SGLang on a GPU uses `mem_fraction_static` of the free memory for weights and cache. Otherwise the cache has room
    for a row of `longest` tokens in every slot.
    """
    gpus = max(1, int(config.rollout.gpus))
    weights = (1 + config.rollout.engine.spare_weights) * _engine_weights(config, model) // gpus

    def fit(share: float) -> int:
        return int(max(0.0, share * free - weights) * gpus / model.cache_per_token)

    demand = config.rollout.slots * longest
    tokens = config.rollout.engine.cache_tokens(demand, fit if config.rollout.gpus else None)
    if tokens is None:
        return None
    cache = tokens * model.cache_per_token // gpus
    moves_rows = isinstance(config.rollout.engine, EmbeddedEngine) and config.environment is not None
    return EngineMemory(weights, cache, tokens, cache // model.layers if moves_rows else 0)


def _engine_weights(config: Config, model: ModelSizes) -> int:
    """Bytes of one copy of the weights in an engine. The embedded engine adds a copy of the head in float32."""
    engine = config.rollout.engine
    has_head = isinstance(engine, EmbeddedEngine) and config.model.float32_head and model.element < MASTER
    encoders = model.encoders if isinstance(engine, SGLangEngine) else 0
    return (model.parameters + encoders) * model.element + has_head * model.hidden * model.vocabulary * MASTER


def object_store(model: ModelSizes) -> int:
    """Bytes of weights in Ray's object store."""
    return VERSIONS * model.trained * model.element


class ActorWeights(NamedTuple):
    """Bytes of weights in the memory of one rollout actor, without those of the engine.

        pulled     the newest version; 0 if it is a view of Ray's object store, such as a version from a single rank
        merged     with adapters: the frozen model and the next version
        private    copies that are sent to SGLang
        shared     copies that SGLang reads in place

    All are 0 if the actors of a machine share their versions (`shared_version_bytes`).
    """

    pulled: int
    merged: int = 0
    private: int = 0
    shared: int = 0

    @property
    def total(self) -> int:
        return sum(self)


def actor(config: Config, model: ModelSizes) -> ActorWeights:
    """Estimate the bytes of weights in the memory of one rollout actor."""
    if shared_version_bytes(config, model):
        return ActorWeights(pulled=0)
    learner, whole = config.learner, model.parameters * model.element
    deltas = learner.deltas == "on" or (learner.deltas == "auto" and config.cluster.address != LOCAL)
    is_view = learner.ranks == 1 and not deltas and isinstance(learner.transport, ObjectStore)
    pulled = 0 if is_view else model.trained * model.element
    memory = ActorWeights(pulled, merged=0 if config.model.lora is None else 2 * whole)
    match config.rollout.engine:
        case SGLangEngine(transport="tensor"):
            return memory._replace(shared=COPIES * whole)
        case SGLangEngine():
            return memory._replace(private=COPIES * whole)
        case EmbeddedEngine():
            return memory


def shared_version_bytes(config: Config, model: ModelSizes) -> int:
    """Bytes of the versions in /dev/shm that the actors of a machine share; 0 if the engine cannot share them."""
    if not config.rollout.engine.shares_weights(adapted=config.model.lora is not None):
        return 0
    return IN_COMMON * model.parameters * model.element


def shared(config: Config, model: ModelSizes) -> int:
    """Bytes of /dev/shm that a run on one machine needs for versions of the weights and for Ray's object store."""
    store = min(object_store(model), config.cluster.object_store_mib * 2**20)
    return config.engines * actor(config, model).shared + shared_version_bytes(config, model) + store


class MachineMemory(NamedTuple):
    """Bytes of host memory that each part of a run needs on one machine."""

    ranks: int
    pushes: int
    checkpoint: int
    engines: int
    weights: int
    object_store: int
    processes: int

    @property
    def total(self) -> int:
        return sum(self)


def machine(
    config: Config, model: ModelSizes, rank: RankMemory, engine: EngineMemory | None, longest: int
) -> MachineMemory:
    """Estimate the host memory of a run on one machine.

    Ranks hold two sets of buckets for pushes, and copy the trained state while they write a checkpoint.
    """
    trained = model.trained + critic_body(config, model)
    on_cpu = routes(config, model, longest) if config.learner.gpus else rank.total
    offloaded = state(config, model) if config.learner.offload else 0
    cached = 0 if engine is None or config.rollout.gpus else engine.total
    store = min(object_store(model), config.cluster.object_store_mib * 2**20)
    return MachineMemory(
        ranks=config.learner.ranks * (on_cpu + offloaded),
        pushes=2 * model.trained * model.element,
        checkpoint=config.learner.mesh.replicate * trained * (MASTER + MOMENTS),
        engines=config.engines * cached,
        weights=config.engines * actor(config, model).total + shared_version_bytes(config, model),
        object_store=store,
        processes=RAY + PROCESS * (config.learner.ranks + config.engines),
    )


class QueueLoad(NamedTuple):
    """Bytes of a token in the queue. The shards store `capacity` tokens per second; the ranks take at most `demand`."""

    token_bytes: int
    capacity: float
    demand: float

    @property
    def shards(self) -> int:
        queues = self.demand * self.token_bytes / QUEUE_BYTES_PER_S
        return 1 if queues <= 1 else math.ceil(queues / SHARD_SHARE)


def queue(config: Config, model: ModelSizes) -> QueueLoad:
    """Estimate the queue's load: H100s compute six operations per parameter and token, and the learner never waits."""
    size = TOKEN_BYTES + (model.routes if config.rollout.engine.routes else 0)
    size += candidate_bytes(config, model) if config.rollout.excludes_tokens else 0
    shards = config.queue.shards
    capacity = QUEUE_BYTES_PER_S * (1 if shards == 1 else SHARD_SHARE * shards) / size
    gpus = config.learner.ranks * min(1.0, config.learner.gpus)
    return QueueLoad(size, capacity, gpus * OPERATIONS_PER_S / (6 * model.active))


def candidate_bytes(config: Config, model: ModelSizes) -> int:
    """Maximum bytes of a token's candidates in trajectory and journal: four per candidate, and four for the count."""
    return 4 + 4 * min(config.rollout.top_k or model.vocabulary, model.vocabulary)
