"""A run's placement group in Ray: bundles of CPUs and GPUs, reserved together or not at all.

separate         a bundle for each rank, and one for each rollout actor
shared GPUs      both ask for less than one GPU: rank i and rollout actors i, i + ranks, ... share one GPU
reward models    a bundle for each reward model with GPUs

They are reserved together, because a stage could otherwise wait for ever for a GPU held by another stage. A restarted
actor finds its bundle free. Rollout actors that are added later are placed outside the group.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from streamppo.config.sections import LOCAL, Config, shares_gpus
from streamppo.errors import RunError

Bundle = dict[str, float]
Options = dict[str, object]
"""Ray options of an actor."""


class PlacementPlan(NamedTuple):
    """Bundles and their users: rank i has bundle i, rollout actor i `actors[i]`, a reward model `models[name]`."""

    bundles: list[Bundle]
    actors: list[int]
    models: dict[str, int]

    def total(self, resource: str) -> float:
        """The total demand for "CPU" or "GPU"."""
        return sum(bundle.get(resource, 0.0) for bundle in self.bundles)


def plan(config: Config, *, rollout: bool = True) -> PlacementPlan:
    """Give every rank a bundle, and with `rollout` every rollout actor and reward model too."""
    learner, engine = config.learner, config.rollout
    count = engine.actors if rollout else 0
    models = {name: one.gpus for name, one in config.reward.models().items() if one.gpus and rollout}
    bundles = [_bundle(learner.threads, learner.gpus) for _ in range(learner.ranks)]
    if not shares_gpus(config):
        bundles += [_bundle(engine.threads, engine.gpus) for _ in range(count)]
        places = [learner.ranks + number for number in range(count)]
    else:
        places = [number % learner.ranks for number in range(count)]
        # A whole GPU, so that Ray does not put two ranks on one.
        bundles = [_bundle(learner.threads + engine.threads * places.count(rank), 1.0) for rank in range(learner.ranks)]
    beside = {name: len(bundles) + number for number, name in enumerate(models)}
    return PlacementPlan([*bundles, *({"GPU": gpus} for gpus in models.values())], places, beside)


def _bundle(cpus: int, gpus: float) -> Bundle:
    return {"CPU": float(cpus)} | ({"GPU": gpus} if gpus else {})


def shortage(wanted: PlacementPlan, there: Mapping[str, float]) -> str:
    """Describe the resources that `wanted` needs beyond `there`; "" if they suffice."""
    missing = [
        f"{wanted.total(resource):g} {resource}s (there are {there.get(resource, 0):g})"
        for resource in ("GPU", "CPU")
        if wanted.total(resource) > there.get(resource, 0)
    ]
    return " and ".join(missing)


def refuse_impossible(config: Config, *, rollout: bool = True) -> None:
    """Raise `RunError` for a demand that our own Ray can never meet. A cluster may grow, so a run waits for it."""
    import ray

    there: Mapping[str, float] = ray.cluster_resources()
    if config.cluster.cpus is None:
        # Our own Ray is started with as many CPUs as the configuration needs.
        there = {**there, "CPU": math.inf}
    if config.cluster.address == LOCAL and (missing := shortage(plan(config, rollout=rollout), there)):
        raise RunError(
            f"the configuration asks for {missing}: learner.gpus, rollout.gpus, rollout.actors and cluster.cpus say "
            "how many, `streamppo check` says why"
        )


class Placement:
    """Reserves a run's bundles in the running Ray. Raises `RunError` if our own Ray can never have enough."""

    def __init__(self, config: Config, *, rollout: bool = True) -> None:
        from ray.util import placement_group

        refuse_impossible(config, rollout=rollout)
        self._config = config
        self._plan = plan(config, rollout=rollout)
        self._group = placement_group(self._plan.bundles, strategy="PACK")

    def rank(self, number: int) -> Options:
        """Return the Ray options of rank `number`."""
        learner = self._config.learner
        return self._options(number, learner.threads, learner.gpus)

    def actor(self, number: int) -> Options:
        """Return the Ray options of rollout actor `number`; beyond the plan, a demand outside the placement group.

        A cluster may grow to meet that demand. Our own Ray does not count the CPUs of an actor beyond the plan: the
        user decides how many actors the machine can run.
        """
        rollout = self._config.rollout
        if number >= len(self._plan.actors):
            cpus = 0 if self._config.cluster.address == LOCAL else rollout.threads
            return {"num_cpus": cpus, "num_gpus": rollout.gpus}
        return self._options(self._plan.actors[number], rollout.threads, rollout.gpus)

    def model(self, name: str) -> Options:
        """Return the Ray options of the reward model `name`."""
        gpus = self._config.reward.models()[name].gpus
        return self._options(self._plan.models[name], 0, gpus) if gpus else {"num_cpus": 0}

    def waiting(self) -> str:
        """Describe the resources that Ray lacks for the bundles; "" once all are reserved."""
        import ray
        from ray.util import placement_group_table

        if placement_group_table(self._group)["state"] == "CREATED":
            return ""
        missing = shortage(self._plan, ray.cluster_resources()) or "its bundles in one piece on any node"
        return f"; Ray has no place for the run: it asks for {missing}"

    def _options(self, bundle: int, cpus: int, gpus: float) -> Options:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": strategy}
