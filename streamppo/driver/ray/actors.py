"""Creates the Ray actors of a run, each with its Ray options."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorProxy

from streamppo.config.sections import Config, model_path
from streamppo.driver.ray.cluster import this_node
from streamppo.driver.ray.placement import Placement
from streamppo.learner.rank import Rank
from streamppo.queue.actor import QueueActor
from streamppo.queue.batch_source import BatchSource
from streamppo.queue.shards import shards
from streamppo.queue.shards.shard import QueueShard
from streamppo.rollout.actor import RolloutActor
from streamppo.types import encode

MAILBOX_CALLS = 10_000
"""The maximum number of calls that wait in an actor at one time. All actors together never make so many calls."""


def make_shards(config: Config, folder: Path) -> "list[ActorProxy[QueueShard]]":
    """Create the queue's shards on the driver's node; [] if the queue stores the trajectories itself."""
    actor = ray.remote(QueueShard)
    return [
        actor.options(name=shards.name(shard), **_lasting()).remote(
            encode(config), str(folder), model_path(config, folder), shard
        )
        for shard in shards.numbers(config)
    ]


def make_queue(config: Config, folder: Path) -> "ActorProxy[QueueActor]":
    """Create the queue of the run in `folder` on the driver's node. Its shards must have been created."""
    actor = ray.remote(QueueActor).options(name="queue", **_lasting())
    return actor.remote(encode(config), str(folder), model_path(config, folder))


def _lasting() -> dict[str, Any]:
    """Return Ray options for actors on the driver's node that Ray restarts after death, and whose calls it retries."""
    lasting = {"max_concurrency": MAILBOX_CALLS, "max_restarts": -1, "max_task_retries": -1}
    return {"num_cpus": 0, "scheduling_strategy": this_node(), **lasting}


def make_rollout(
    config: Config,
    name: str,
    place: int,
    queue: "ActorProxy[QueueActor]",
    reward_models: Mapping[str, Any],
    options: Mapping[str, object],
) -> "ActorProxy[RolloutActor]":
    """Create a rollout actor named `name` with engine number `place`. `options` are Ray's options for its placement."""
    actor = ray.remote(RolloutActor).options(name=name, max_concurrency=MAILBOX_CALLS, **options)
    return actor.remote(encode(config), name, place, queue, reward_models)


def make_ranks(
    config: Config, queue: "ActorProxy[BatchSource]", placement: Placement, group: int = 0
) -> "list[ActorProxy[Rank]]":
    """Create the ranks of the run's group number `group`, which get their numbers by `placement.in_order`.

    Call all of them: a failed rank blocks the others.
    """
    actor = ray.remote(Rank)
    return [
        actor.options(max_concurrency=1, **placement.rank(place)).remote(encode(config), queue, group)
        for place in range(config.learner.ranks)
    ]
