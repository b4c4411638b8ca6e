"""What a change of the configuration between a run and its resume means."""

from typing import Any

import msgspec

from streamppo.config.reward import Reward
from streamppo.config.sections import Checkpoint, Cluster, Config, Evaluation, Queue, Rollout, Watchdog

FREE = ("float32_head", "gradient_checkpointing")
"""What may change of [model]."""


def kept(config: Config) -> dict[str, Any]:
    """What a run has from its beginning to its end, by name: no update on its way can begin to use another one."""
    model = msgspec.structs.asdict(config.model)
    return {f"model.{name}": value for name, value in model.items() if name not in FREE} | {
        "weights.bucket_bytes": config.weights.bucket_bytes,
        "algorithm.critic.model": config.algorithm.critic.model,
        "learner.ranks": config.learner.ranks,
        "learner.gpus > 0": config.learner.gpus > 0,
    }


def learning(config: Config) -> Config:
    """`config` with everything blanked that the result of an update on a given batch does not depend on."""
    return msgspec.structs.replace(
        config,
        name="-",
        reward=Reward(function="-"),
        environment=None,
        # A part of a GPU computes what a whole one does.
        learner=msgspec.structs.replace(config.learner, gpus=float(config.learner.gpus > 0)),
        rollout=Rollout(max_tokens=config.rollout.max_tokens, temperature=config.rollout.temperature),
        queue=Queue(batch_size=config.queue.batch_size, max_lag=config.queue.max_lag, too_old=config.queue.too_old),
        evaluation=Evaluation(),
        checkpoint=Checkpoint(),
        cluster=Cluster(),
        watchdog=Watchdog(),
    )
