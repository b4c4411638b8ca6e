"""A run's placement group in Ray: bundles of CPUs and GPUs that are reserved together.

separate         a bundle for each rank and each actor; in a cluster one bundle for neighbouring ranks
shared GPUs      ranks and actors each need less than one GPU: rank i and rollout actors i, i + ranks, ... share a GPU
reward models    a bundle for each reward model with GPUs

Reserved one by one, stages could wait forever for each other's GPUs. Actors that are added later are outside the group.

Ray assigns nodes and GPUs anew at each start, so ranks get their numbers only then, in the order of nodes and GPUs. The
rounding of NCCL's sums depends on which rank has which GPU.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from streamppo.config.sections import LOCAL, Config, shares_gpus
from streamppo.errors import RunError

Bundle = dict[str, float]
Options = dict[str, object]
T = TypeVar("T")

log = logging.getLogger(__name__)


class Location(NamedTuple):
    """The address and Ray's id of a process's node, and its GPUs. A GPU's id follows its length: "10" is after "9"."""

    address: str
    node: str
    gpus: list[tuple[int, str]]


class PlacementPlan(NamedTuple):
    """Bundles, and the index of the bundle of each rank, rollout actor, actor that only evaluates, and reward model."""

    bundles: list[Bundle]
    ranks: list[int]
    actors: list[int]
    evaluators: list[int]
    models: dict[str, int]

    def total(self, resource: str) -> float:
        return sum(bundle.get(resource, 0.0) for bundle in self.bundles)


def plan(config: Config, *, rollout: bool = True, together: int = 1) -> PlacementPlan:
    """Plan bundles of `together` neighbouring ranks and, with `rollout`, of every rollout actor and reward model."""
    learner, engine = config.learner, config.rollout
    count = config.engines if rollout else 0
    models = {name: model.gpus for name, model in config.reward.models().items() if model.gpus and rollout}
    ranks = [number // together for number in range(learner.ranks)]
    bundles = [_bundle(together * learner.thread_count, together * learner.gpus) for _ in range(ranks[-1] + 1)]
    if not shares_gpus(config):
        places = [len(bundles) + number for number in range(count)]
        bundles += [_bundle(engine.threads, engine.gpus) for _ in range(count)]
    else:
        places = [number % learner.ranks for number in range(count)]
        # The bundle has a whole GPU, so that Ray does not place two ranks on the same GPU.
        bundles = [
            _bundle(learner.thread_count + engine.threads * places.count(rank), 1.0) for rank in range(learner.ranks)
        ]
    model_bundles = {name: len(bundles) + number for number, name in enumerate(models)}
    bundles += [{"GPU": gpus} for gpus in models.values()]
    return PlacementPlan(bundles, ranks, places[: engine.actors], places[engine.actors :], model_bundles)


def ranks_per_node(config: Config, nodes: Sequence[Mapping[str, float]]) -> int:
    """Return the number of neighbouring ranks to put into one bundle, so that Ray places them on one node.

    The number is the first that fits the resources of `nodes`: the ranks of a replica, if the model has several; the
    ranks that exchange tokens in every layer; a divisor of these. If the ranks need more nodes, nodes like these are
    expected to join. Ray orders equal bundles arbitrarily, and may separate neighbours.
    """
    learner, mesh = config.learner, config.learner.mesh
    if shares_gpus(config) or learner.gpus % 1:
        return 1
    copy, together = mesh.shards(learner.ranks) if mesh.replicate > 1 else 1, exchanging(config)
    grows = sum(_rooms(config, 1, nodes)) < learner.ranks
    for size in sorted({copy, *(part for part in range(1, together + 1) if not together % part)}, reverse=True):
        rooms = _rooms(config, size, nodes)
        if sum(rooms) * size >= learner.ranks or (grows and any(rooms)):
            return size
    return 1


def _rooms(config: Config, ranks: int, nodes: Sequence[Mapping[str, float]]) -> list[int]:
    """Return the number of bundles of `ranks` ranks that each of `nodes` has room for."""
    bundle = _bundle(ranks * config.learner.thread_count, ranks * config.learner.gpus)
    return [min(int(node.get(name, 0) // amount) for name, amount in bundle.items()) for node in nodes]


def exchanging(config: Config) -> int:
    """Return the number of neighbouring ranks that exchange tokens in every layer."""
    return math.lcm(config.learner.mesh.slices, config.learner.mesh.expert)


def _bundle(cpus: int, gpus: float) -> Bundle:
    return {"CPU": float(cpus)} | ({"GPU": gpus} if gpus else {})


def shortage(plan: PlacementPlan, present: Mapping[str, float]) -> str:
    """Describe the resources that `plan` needs beyond those `present`; "" if they suffice."""
    missing = [
        f"{plan.total(resource):g} {resource}s (there are {present.get(resource, 0):g})"
        for resource in ("GPU", "CPU")
        if plan.total(resource) > present.get(resource, 0)
    ]
    return " and ".join(missing)


def refuse_impossible(config: Config, *, rollout: bool = True) -> None:
    """Raise `RunError` for a demand that our own Ray can never meet. A cluster may grow, so a run waits for it."""
    import ray

    resources: Mapping[str, float] = ray.cluster_resources()
    if config.cluster.cpus is None:
        # Our own Ray is started with the number of CPUs that the configuration needs.
        resources = {**resources, "CPU": math.inf}
    if config.cluster.address == LOCAL and (missing := shortage(plan(config, rollout=rollout), resources)):
        raise RunError(
            f"the configuration needs {missing}: learner.gpus, rollout.gpus, rollout.actors and cluster.cpus say "
            "how many, `streamppo check` says why"
        )


def locate(actor: object) -> Location:
    """Return the location of this process. Runs inside an actor."""
    import ray
    import ray.util

    context = ray.get_runtime_context()
    gpus = [(len(gpu), gpu) for gpu in context.get_accelerator_ids()["GPU"]]
    return Location(ray.util.get_node_ip_address(), context.get_node_id(), gpus)


def in_order(actors: Sequence[T], locations: Sequence[Location]) -> list[T]:
    """Order `actors` by their `locations`. Actors of a node without GPUs keep their order.

    Example: GPUs 2, 0 and 1 of one node -> the second, third and first actor.
    """
    return [actors[number] for number in sorted(range(len(actors)), key=lambda number: locations[number])]


def _cluster_ranks_per_node(config: Config) -> int:
    import ray

    if config.cluster.address == LOCAL:
        return 1
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    together, needed = ranks_per_node(config, nodes), exchanging(config)
    if together < needed:
        log.info("learner.mesh: %d ranks exchange tokens in every layer, and a node gets %d of them", needed, together)
    return together


class Placement:
    """Reserves a run's placement group in the running Ray. Raises `RunError` if our own Ray is too small."""

    def __init__(self, config: Config, *, rollout: bool = True) -> None:
        from ray.util import placement_group

        refuse_impossible(config, rollout=rollout)
        self._config = config
        self._plan = plan(config, rollout=rollout, together=_cluster_ranks_per_node(config))
        self._group = placement_group(self._plan.bundles, strategy="PACK")

    def rank(self, number: int) -> Options:
        learner = self._config.learner
        return self._options(self._plan.ranks[number], learner.thread_count, learner.gpus)

    def actor(self, number: int) -> Options:
        """Return the Ray options of rollout actor `number`, outside the group if it was not planned."""
        rollout = self._config.rollout
        if number >= len(self._plan.actors):
            # Our own Ray does not count its CPUs, because the user decides how many actors the machine can run.
            cpus = 0 if self._config.cluster.address == LOCAL else rollout.threads
            return {"num_cpus": cpus, "num_gpus": rollout.gpus}
        return self._options(self._plan.actors[number], rollout.threads, rollout.gpus)

    def evaluator(self, number: int) -> Options:
        rollout = self._config.rollout
        return self._options(self._plan.evaluators[number], rollout.threads, rollout.gpus)

    def model(self, name: str) -> Options:
        gpus = self._config.reward.models()[name].gpus
        return self._options(self._plan.models[name], 0, gpus) if gpus else {"num_cpus": 0}

    def waiting(self) -> str:
        """Describe the resources that Ray lacks for the bundles; "" if all are reserved."""
        import ray
        from ray.util import placement_group_table

        if placement_group_table(self._group)["state"] == "CREATED":
            return ""
        missing = shortage(self._plan, ray.cluster_resources()) or "its bundles in one piece on any node"
        return f"; Ray has no room for the run: it needs {missing}"

    def _options(self, bundle: int, cpus: int, gpus: float) -> Options:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": strategy}
