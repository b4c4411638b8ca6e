"""Estimates of the memory of an engine, the object store and a machine; a rank's are in learner/memory.py.

The 1 to 3 GiB of CUDA and SGLang's graphs are not counted.
"""

import math
from typing import NamedTuple

from streamppo.config.learner import ObjectStore
from streamppo.config.rollout import EmbeddedEngine, SGLangEngine
from streamppo.config.sections import LOCAL, Config
from streamppo.learner.memory import MASTER, MOMENTS, ModelSizes, RankMemory, routes, state

VERSIONS = 3
"""Versions of the weights in the object store: two in the ledger, one on its way there."""
COPIES = 2
"""Versions of the weights in an actor with SGLang, besides the pulled one: the served one and the next."""
IN_COMMON = 3
"""Versions that the actors of a machine have in common: the served one, the next, and the pulled one."""
TOKEN_BYTES = 13
"""Bytes of a token of a completion in journal and archive: its id, log-prob, version and mask."""
QUEUE_BYTES_PER_S = 60e6
"""The most bytes of tokens per second of one process (docs/results.md, the queue under thousands of engines)."""
SHARD_SHARE = 0.7
"""The share of that rate for each of several shards."""
OPERATIONS_PER_S = 989e12 / 2
"""Half of an H100's peak in bfloat16: a learner on GPUs hardly exceeds it."""


class EngineMemory(NamedTuple):
    """Bytes of one engine on one GPU (or in the actor, on a CPU), and the capacity of its cache in tokens.

    Rows that wait between two turns are in the cache; `copied` are rows of one layer in transit.
    """

    weights: int
    cache: int
    tokens: int
    copied: int = 0

    @property
    def total(self) -> int:
        """All parts together."""
        return self.weights + self.cache + self.copied


def engine(config: Config, model: ModelSizes, longest: int, free: float) -> EngineMemory | None:
    """Estimate one engine on one of its GPUs, with `free` bytes when it starts. None for a running server.

    On a GPU SGLang keeps `mem_fraction_static` of the free memory for weights and cache. Everywhere else the cache
    has room for the `longest` row in every slot.
    """
    gpus = max(1, int(config.rollout.gpus))
    spare = config.rollout.engine.spare_weights if config.rollout.gpus else 0
    weights = (1 + spare) * _engine_weights(config, model) // gpus

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
    """Bytes of one copy of the weights in an engine; the embedded one has the head in float32 too."""
    has_head = (
        isinstance(config.rollout.engine, EmbeddedEngine) and config.model.float32_head and model.element < MASTER
    )
    return model.parameters * model.element + has_head * model.hidden * model.vocabulary * MASTER


def object_store(model: ModelSizes) -> int:
    """Bytes in Ray's object store of the versions in transit from learner to engines."""
    return VERSIONS * model.trained * model.element


class ActorWeights(NamedTuple):
    """Bytes of weights in the memory of one rollout actor, outside its engine; `shared` ones are in /dev/shm.

    pulled    the newest version; 0 if it is a view of Ray's object store, as from a single rank
    merged    with adapters: the frozen model, and the next version
    private   copies that are sent to SGLang
    shared    copies that SGLang reads in place

    If the actors of a machine have their versions in common (`in_common`), an actor has none.
    """

    pulled: int
    merged: int = 0
    private: int = 0
    shared: int = 0

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(self)


def actor(config: Config, model: ModelSizes) -> ActorWeights:
    """Estimate the weights in one actor's memory."""
    if in_common(config, model):
        return ActorWeights(pulled=0)
    learner, whole = config.learner, model.parameters * model.element
    deltas = learner.deltas == "on" or (learner.deltas == "auto" and config.cluster.address != LOCAL)
    is_view = learner.ranks == 1 and not deltas and isinstance(learner.transport, ObjectStore)
    memory = ActorWeights(
        pulled=0 if is_view else model.trained * model.element,
        merged=0 if config.model.lora is None else 2 * whole,
    )
    match config.rollout.engine:
        case SGLangEngine(transport="tensor"):
            return memory._replace(shared=COPIES * whole)
        case SGLangEngine():
            return memory._replace(private=COPIES * whole)
        case EmbeddedEngine():
            return memory


def in_common(config: Config, model: ModelSizes) -> int:
    """Bytes of the versions that the actors of a machine have in common in /dev/shm; 0 for other engines."""
    if not config.rollout.engine.shares_weights(adapted=config.model.lora is not None):
        return 0
    return IN_COMMON * model.parameters * model.element


def shared(config: Config, model: ModelSizes) -> int:
    """Bytes of /dev/shm for a whole run on one machine: versions of engines, and Ray's object store."""
    store = min(object_store(model), config.cluster.object_store_mib * 2**20)
    return config.engines * actor(config, model).shared + in_common(config, model) + store


class MachineMemory(NamedTuple):
    """Bytes of the stages of a whole run in the memory of one machine."""

    ranks: int
    pushes: int
    checkpoint: int
    engines: int
    weights: int
    object_store: int

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(self)


def machine(
    config: Config, model: ModelSizes, rank: RankMemory, engine: EngineMemory | None, longest: int
) -> MachineMemory:
    """Estimate a run on one machine; ranks that are not offloaded, and engines, may be on GPUs.

    Ranks keep two sets of buckets for pushes, and a copy of the trained state while a checkpoint is written. An
    embedded engine has memory for the weights twice: the next version is written while the current one serves.
    """
    on_cpu = routes(config, model, longest) if config.learner.gpus else rank.total
    offloaded = state(config, model) if config.learner.offload else 0
    spare = config.rollout.engine.spare_weights
    cached = 0 if engine is None or config.rollout.gpus else engine.total + spare * engine.weights
    store = min(object_store(model), config.cluster.object_store_mib * 2**20)
    return MachineMemory(
        ranks=config.learner.ranks * (on_cpu + offloaded),
        pushes=2 * model.trained * model.element,
        checkpoint=config.learner.mesh.replicate * model.trained * (MASTER + MOMENTS),
        engines=config.engines * cached,
        weights=config.engines * actor(config, model).total + in_common(config, model),
        object_store=store,
    )


class QueueLoad(NamedTuple):
    """Bytes of a token in the queue; tokens per second: `capacity` of its shards, and `demand` of the ranks at most."""

    token_bytes: int
    capacity: float
    demand: float

    @property
    def shards(self) -> int:
        """The number of shards that suffice for the ranks."""
        queues = self.demand * self.token_bytes / QUEUE_BYTES_PER_S
        return 1 if queues <= 1 else math.ceil(queues / SHARD_SHARE)


def queue(config: Config, model: ModelSizes) -> QueueLoad:
    """Estimate the queue's load by a learner on H100s that never waits: six operations per parameter and token."""
    size = TOKEN_BYTES + (model.routes if config.rollout.engine.routes else 0)
    size += candidate_bytes(config, model) if config.rollout.excludes_tokens else 0
    shards = config.queue.shards
    capacity = QUEUE_BYTES_PER_S * (1 if shards == 1 else SHARD_SHARE * shards) / size
    gpus = config.learner.ranks * min(1.0, config.learner.gpus)
    return QueueLoad(size, capacity, gpus * OPERATIONS_PER_S / (6 * model.active))


def candidate_bytes(config: Config, model: ModelSizes) -> int:
    """The most bytes of a token's candidates, in trajectory and journal: four for each, and four for their count."""
    return 4 + 4 * min(config.rollout.top_k or model.vocabulary, model.vocabulary)
