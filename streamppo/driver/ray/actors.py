"""The Ray actors of a run: how each is made, and with which options."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from streamppo.config.sections import Config, model_path
from streamppo.driver.ray.cluster import here
from streamppo.driver.ray.placement import Placement
from streamppo.learner.rank import Rank
from streamppo.queue.actor import QueueActor
from streamppo.queue.batch_source import BatchSource
from streamppo.queue.shards import shards
from streamppo.queue.shards.shard import QueueShard
from streamppo.rollout.actor import RolloutActor
from streamppo.types import encode

if TYPE_CHECKING:
    from ray.actor import ActorProxy

MAILBOX_CALLS = 10_000
"""Calls that may wait inside an actor at one time; more than all actors ever make."""


def make_shards(config: Config, folder: Path) -> "list[ActorProxy[QueueShard]]":
    """The shards of the queue of the run in `folder`, beside it; none where the queue has the trajectories itself."""
    actor = ray.remote(QueueShard)
    return [
        actor.options(name=shards.name(shard), **_lasting()).remote(
            encode(config), str(folder), model_path(config, folder), shard
        )
        for shard in shards.numbers(config)
    ]


def make_queue(config: Config, folder: Path) -> "ActorProxy[QueueActor]":
    """The queue of the run in `folder`, beside the driver; its shards are there already."""
    actor = ray.remote(QueueActor).options(name="queue", **_lasting())
    return actor.remote(encode(config), str(folder), model_path(config, folder))


def _lasting() -> dict[str, Any]:
    """Ray's options for actors beside the driver, which it starts again when they die; it repeats calls to them."""
    lasting = {"max_concurrency": MAILBOX_CALLS, "max_restarts": -1, "max_task_retries": -1}
    return {"num_cpus": 0, "scheduling_strategy": here(), **lasting}


def make_rollout(
    config: Config,
    name: str,
    queue: "ActorProxy[QueueActor]",
    reward_models: Mapping[str, Any],
    options: Mapping[str, object],
) -> "ActorProxy[RolloutActor]":
    """A rollout actor under `name`; `options` are Ray's, for its place."""
    actor = ray.remote(RolloutActor).options(name=name, max_concurrency=MAILBOX_CALLS, **options)
    return actor.remote(encode(config), name, queue, reward_models)


def make_ranks(
    config: Config, queue: "ActorProxy[BatchSource]", placement: Placement, group: int = 0
) -> "list[ActorProxy[Rank]]":
    """The learner's ranks, rank 0 first; `group` counts the groups of ranks that a run has had.

    Wait for the same call of all of them: where one rank fails, the others stand in a collective that never ends.
    """
    actor = ray.remote(Rank)
    return [
        actor.options(name=f"learner-{rank}.{group}", max_concurrency=1, **placement.rank(rank)).remote(
            encode(config), rank, queue, group
        )
        for rank in range(config.learner.ranks)
    ]
