"""What Ray is asked for: bundles of CPUs and GPUs, reserved together or not at all.

apart      a bundle for each rank, and one for each rollout actor
sharing    both ask for less than one GPU: rank i and rollout actors i, i + ranks, ... have a GPU between them
beside     a bundle for each reward model that asks for GPUs

Reserved together, because a stage that waits for what another one holds would wait for ever; and whatever is started
again finds its place kept. Rollout actors that are added later find their places outside.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from streamppo.config.sections import LOCAL, Config, shares_gpus
from streamppo.errors import RunError

Bundle = dict[str, float]


class Plan(NamedTuple):
    """The bundles; rank i lives in bundle i; `actors` and `models` say where those are who have one."""

    bundles: list[Bundle]
    actors: list[int]
    models: dict[str, int]

    def total(self, resource: str) -> float:
        """All that is asked for of "CPU" or "GPU"."""
        return sum(bundle.get(resource, 0.0) for bundle in self.bundles)


def plan(config: Config, *, rollout: bool = True) -> Plan:
    """Where the ranks go, and the rollout actors and reward models too, if the run has a `rollout`."""
    learner, engine = config.learner, config.rollout
    count = engine.actors if rollout else 0
    models = {name: one.gpus for name, one in config.reward.models().items() if one.gpus and rollout}
    bundles = [_bundle(learner.threads, learner.gpus) for _ in range(learner.ranks)]
    if not shares_gpus(config):
        bundles += [_bundle(engine.threads, engine.gpus) for _ in range(count)]
        places = [learner.ranks + number for number in range(count)]
    else:
        places = [number % learner.ranks for number in range(count)]
        # All of the GPU: Ray must not put two ranks on one.
        bundles = [_bundle(learner.threads + engine.threads * places.count(rank), 1.0) for rank in range(learner.ranks)]
    beside = {name: len(bundles) + number for number, name in enumerate(models)}
    return Plan([*bundles, *({"GPU": gpus} for gpus in models.values())], places, beside)


def _bundle(cpus: int, gpus: float) -> Bundle:
    return {"CPU": float(cpus)} | ({"GPU": gpus} if gpus else {})


def shortage(wanted: Plan, there: Mapping[str, float]) -> str:
    """What is missing in `there`, for people; nothing if all is there."""
    missing = [
        f"{wanted.total(resource):g} {resource}s (there are {there.get(resource, 0):g})"
        for resource in ("GPU", "CPU")
        if wanted.total(resource) > there.get(resource, 0)
    ]
    return " and ".join(missing)


def refuse_impossible(config: Config, *, rollout: bool = True) -> None:
    """Raise `RunError` for what a Ray of our own can never have. A cluster may grow, and somebody may wait for it."""
    import ray

    there: Mapping[str, float] = ray.cluster_resources()
    if config.cluster.cpus is None:
        # It is started with as many as the configuration asks for.
        there = {**there, "CPU": math.inf}
    if config.cluster.address == LOCAL and (missing := shortage(plan(config, rollout=rollout), there)):
        raise RunError(
            f"the configuration asks for {missing}: learner.gpus, rollout.gpus, rollout.actors and cluster.cpus say "
            "how many, `streamppo check` says why"
        )


class Placement:
    """The bundles of a run, once Ray is there. Raises `RunError` where a Ray of our own can never have enough."""

    def __init__(self, config: Config, *, rollout: bool = True) -> None:
        from ray.util import placement_group

        refuse_impossible(config, rollout=rollout)
        self._config = config
        self._plan = plan(config, rollout=rollout)
        self._group = placement_group(self._plan.bundles, strategy="PACK")

    def rank(self, number: int) -> dict[str, Any]:
        """Ray's options for rank `number`."""
        learner = self._config.learner
        return self._options(number, learner.threads, learner.gpus)

    def actor(self, number: int) -> dict[str, Any]:
        """Ray's options for rollout actor `number`; for one that was not planned a demand that a cluster may grow by.

        A Ray of our own does not count the CPUs of such a one: people say how many actors their machine can bear.
        """
        rollout = self._config.rollout
        if number >= len(self._plan.actors):
            cpus = 0 if self._config.cluster.address == LOCAL else rollout.threads
            return {"num_cpus": cpus, "num_gpus": rollout.gpus}
        return self._options(self._plan.actors[number], rollout.threads, rollout.gpus)

    def model(self, name: str) -> dict[str, Any]:
        """Ray's options for a reward model."""
        gpus = self._config.reward.models()[name].gpus
        return self._options(self._plan.models[name], 0, gpus) if gpus else {"num_cpus": 0}

    def waiting(self) -> str:
        """What Ray has not found a place for yet; nothing once everything has one."""
        import ray
        from ray.util import placement_group_table

        if placement_group_table(self._group)["state"] == "CREATED":
            return ""
        missing = shortage(self._plan, ray.cluster_resources()) or "its bundles in one piece on any node"
        return f"; Ray has no place for the run: it asks for {missing}"

    def _options(self, bundle: int, cpus: int, gpus: float) -> dict[str, Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": strategy}
