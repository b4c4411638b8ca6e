"""Estimates of the memory of an engine, the object store and a machine, beside a rank's (learner/memory.py).

The 1 to 3 GiB of CUDA and SGLang's graphs are not counted.
"""

from typing import NamedTuple

from streamppo.config.engine import EmbeddedEngine
from streamppo.config.sections import Config
from streamppo.learner.memory import ModelSizes, RankMemory, state

VERSIONS = 3
"""Versions of the weights in the object store: two in the ledger, one on its way there."""
COPIES = 2
"""Versions of the weights in the memory of a rollout actor: the one that is served, and the next one on its way."""


class EngineMemory(NamedTuple):
    """Bytes of one engine on one GPU (or in the actor, on a CPU), and how many tokens its cache holds.

    Rows that wait between two turns are in the cache; `copied` are those of one layer on their way to other places.
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
    """One engine on one of its GPUs, of which `free` bytes are free when it starts. None for a server that is not ours.

    On a GPU SGLang keeps `mem_fraction_static` of the free memory for weights and cache. Everywhere else the cache
    holds the `longest` row for every slot from the start.
    """
    gpus = max(1, int(config.rollout.gpus))
    weights = model.parameters * model.element // gpus

    def fit(share: float) -> int:
        return int(max(0.0, share * free - weights) * gpus / model.cache_per_token)

    asked = config.rollout.slots * longest
    tokens = config.rollout.engine.cache_tokens(asked, fit if config.rollout.gpus else None)
    if tokens is None:
        return None
    cache = tokens * model.cache_per_token // gpus
    copies = isinstance(config.rollout.engine, EmbeddedEngine) and config.environment is not None
    return EngineMemory(weights, cache, tokens, cache // model.layers if copies else 0)


def object_store(model: ModelSizes) -> int:
    """Bytes that the versions on their way from learner to engines take in Ray's object store."""
    return VERSIONS * model.trained * model.element


def host(config: Config, model: ModelSizes) -> int:
    """Bytes that all rollout actors hold of the weights in the memory of their machines, beside their engines."""
    return config.rollout.actors * COPIES * model.parameters * model.element


class MachineMemory(NamedTuple):
    """Bytes that the stages of a run have in the memory of one machine, if they are all on it."""

    ranks: int
    engines: int
    weights: int
    object_store: int

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(self)


def machine(config: Config, model: ModelSizes, rank: RankMemory, engine: EngineMemory | None) -> MachineMemory:
    """A run on one machine. On GPUs are ranks that are not offloaded, and engines.

    An embedded engine has memory for the weights twice: the next version is written beside the one that is served.
    """
    on_cpu = 0 if config.learner.gpus else rank.total
    offloaded = state(config, model) if config.learner.offload else 0
    spare = config.rollout.engine.spare_weights
    cached = 0 if engine is None or config.rollout.gpus else engine.total + spare * engine.weights
    store = min(object_store(model), config.cluster.object_store_mib * 2**20)
    return MachineMemory(
        ranks=config.learner.ranks * (on_cpu + offloaded),
        engines=config.rollout.actors * cached,
        weights=host(config, model),
        object_store=store,
    )


def candidate_bytes(config: Config, model: ModelSizes) -> int:
    """Bytes that a token's candidates take at most, in trajectory and journal: four for each, and for their count."""
    return 4 + 4 * min(config.rollout.top_k or model.vocabulary, model.vocabulary)
